//! [`CallLog`]: counts every call, injects failures, and writes a line per call.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError};

use crate::codes::{NOT_INITIALIZED, UNKNOWN};
use crate::settings::Settings;
use crate::state::{Api, DriverState};

struct CallLog {
    pid: u32,
    log: Option<File>,
    /// Name of the failing call, its number (from 1), and the code that it returns.
    fault: Option<(String, u32, c_int)>,
    counts: HashMap<&'static str, u32>,
    state: DriverState,
}

static CALL_LOG: LazyLock<Mutex<CallLog>> = LazyLock::new(|| {
    let log = std::env::var_os("MOONTIDE_FAKE_DRIVER_LOG")
        .map(|path| File::options().append(true).create(true).open(path).expect("cannot open the log file"));
    let fault = std::env::var("MOONTIDE_FAKE_DRIVER_FAIL").ok().map(|text| {
        let mut words = text.split(':');
        let call = words.next().expect("a call").to_owned();
        let number = |word: &str| word.parse().expect("call:number[:code]");
        (call, words.next().map_or(1, number), words.next().map_or(UNKNOWN, |word| number(word) as c_int))
    });
    let state = DriverState::new(Settings::from_env());
    Mutex::new(CallLog { pid: std::process::id(), log, fault, counts: HashMap::new(), state })
});

fn call_log() -> MutexGuard<'static, CallLog> {
    CALL_LOG.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Performs a call, or fails it as configured, and logs it.
pub(crate) fn call(
    api: Api,
    name: &'static str,
    arguments: Arguments<'_>,
    perform: &mut dyn FnMut(&mut DriverState) -> Result<(), c_int>,
) -> c_int {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: a function of this library, which is not unloaded before the exit.
        unsafe { libc::atexit(report_at_exit) };
    });
    let mut call_log = call_log();
    let count = call_log.counts.entry(name).or_insert(0);
    *count += 1;
    let fault =
        call_log.fault.as_ref().filter(|(call, nth, _)| call == name && *nth == call_log.counts[name]);
    let code = match fault {
        Some(&(_, _, code)) => code,
        // As with real drivers, no call works in a forked child.
        None if call_log.pid != std::process::id() => NOT_INITIALIZED,
        None => {
            call_log.state.api = api;
            perform(&mut call_log.state).err().unwrap_or(0)
        }
    };
    call_log.write_line(format_args!("{name}({arguments}) = {code}"));
    code
}

impl CallLog {
    fn write_line(&mut self, line: Arguments<'_>) {
        let Some(log) = &mut self.log else { return };
        // One write, so that lines of several processes do not mix.
        let line = format!("{} {line}\n", std::process::id());
        log.write_all(line.as_bytes()).expect("cannot write the log file");
    }
}

extern "C" fn report_at_exit() {
    let mut call_log = call_log();
    if call_log.pid == std::process::id() {
        let leaks = call_log.state.leaks();
        call_log.write_line(format_args!("exit: {leaks}"));
    }
}

/// Writes the resources that are left into `text`, terminated by a zero and truncated to `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn moontide_fake_leaks(text: *mut c_char, len: usize) {
    let leaks = call_log().state.leaks();
    let bytes = &leaks.as_bytes()[..leaks.len().min(len.saturating_sub(1))];
    // SAFETY: the caller's buffer has `len` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), text.cast(), bytes.len());
        text.add(bytes.len()).write(0);
    }
}

/// Stops all devices: see [`DriverState::break_devices`].
#[unsafe(no_mangle)]
extern "C" fn moontide_fake_break() {
    call_log().state.break_devices();
}
