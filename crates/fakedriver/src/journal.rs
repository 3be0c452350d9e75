//! Every call passes here: it is counted, fails if that is planned, and leaves a line.

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError};

use crate::codes::{NOT_INITIALIZED, UNKNOWN};
use crate::ledger::{Api, Ledger};
use crate::settings::Settings;

struct Journal {
    pid: u32,
    log: Option<File>,
    /// The call, which one of them, and its code.
    plan: Option<(String, u32, c_int)>,
    counts: HashMap<&'static str, u32>,
    ledger: Ledger,
}

static JOURNAL: LazyLock<Mutex<Journal>> = LazyLock::new(|| {
    let log = std::env::var_os("MOONTIDE_FAKE_DRIVER_LOG")
        .map(|path| File::options().append(true).create(true).open(path).expect("a file for the log"));
    let plan = std::env::var("MOONTIDE_FAKE_DRIVER_FAIL").ok().map(|text| {
        let mut words = text.split(':');
        let call = words.next().expect("a call").to_owned();
        let number = |word: &str| word.parse().expect("call:number[:code]");
        (call, words.next().map_or(1, number), words.next().map_or(UNKNOWN, |word| number(word) as c_int))
    });
    let ledger = Ledger::new(Settings::from_env());
    Mutex::new(Journal { pid: std::process::id(), log, plan, counts: HashMap::new(), ledger })
});

fn journal() -> MutexGuard<'static, Journal> {
    JOURNAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Performs a call.
pub(crate) fn call(
    api: Api,
    name: &'static str,
    arguments: Arguments<'_>,
    perform: &mut dyn FnMut(&mut Ledger) -> Result<(), c_int>,
) -> c_int {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: a function of this library, which is not unloaded before the exit.
        unsafe { libc::atexit(report_at_exit) };
    });
    let mut journal = journal();
    let count = journal.counts.entry(name).or_insert(0);
    *count += 1;
    let is_planned =
        journal.plan.as_ref().filter(|(call, nth, _)| call == name && *nth == journal.counts[name]);
    let code = match is_planned {
        Some(&(_, _, code)) => code,
        // As the real ones: nothing works on the far side of a fork.
        None if journal.pid != std::process::id() => NOT_INITIALIZED,
        None => {
            journal.ledger.api = api;
            perform(&mut journal.ledger).err().unwrap_or(0)
        }
    };
    journal.tell(format_args!("{name}({arguments}) = {code}"));
    code
}

impl Journal {
    fn tell(&mut self, line: Arguments<'_>) {
        let Some(log) = &mut self.log else { return };
        // One write, so that the lines of several processes stay whole.
        let line = format!("{} {line}\n", std::process::id());
        log.write_all(line.as_bytes()).expect("a log that can be written");
    }
}

extern "C" fn report_at_exit() {
    let mut journal = journal();
    if journal.pid == std::process::id() {
        let left = journal.ledger.left();
        journal.tell(format_args!("exit: {left}"));
    }
}

/// Writes what is left into `text`, ended by a zero, as far as it fits.
#[unsafe(no_mangle)]
unsafe extern "C" fn moontide_fake_left(text: *mut c_char, len: usize) {
    let left = journal().ledger.left();
    let bytes = &left.as_bytes()[..left.len().min(len.saturating_sub(1))];
    // SAFETY: the caller's buffer has `len` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), text.cast(), bytes.len());
        text.add(bytes.len()).write(0);
    }
}

/// Nothing moves after it: see [`Ledger::break_devices`].
#[unsafe(no_mangle)]
extern "C" fn moontide_fake_break() {
    journal().ledger.break_devices();
}
