//! Common code of the tests of the binary: runs with a timeout, and processes that are killed with their test.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Timeout of every wait; long, because test machines are slow and busy.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Command of the binary, without the MOONTIDE_ variables of this test's environment.
pub(crate) fn moontide(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moontide"));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("MOONTIDE_")) {
            command.env_remove(name);
        }
    }
    command.args(arguments);
    command
}

/// Result of a run.
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) out: Vec<u8>,
    pub(crate) err: String,
}

impl Ended {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap()
    }

    /// Parses the output as one JSON object.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    /// Parses the output as one JSON object per line.
    pub(crate) fn json_lines(&self) -> Vec<serde_json::Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Runs the binary until it exits.
pub(crate) fn run(arguments: &[&str], input: &[u8]) -> Ended {
    run_command(moontide(arguments), input)
}

pub(crate) fn run_command(mut command: Command, input: &[u8]) -> Ended {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Running { child: command.spawn().unwrap(), _sockets: None };
    let mut stdin = child.child.stdin.take().unwrap();
    let input = input.to_vec();
    // A separate thread: a process that does not read its input may exit before all of it is written.
    std::thread::spawn(move || stdin.write_all(&input));
    let out = collect(child.child.stdout.take().unwrap());
    let err = collect(child.child.stderr.take().unwrap());
    let code = child.wait();
    let err = String::from_utf8(err.recv_timeout(TIMEOUT).unwrap()).unwrap();
    Ended { code, out: out.recv_timeout(TIMEOUT).unwrap(), err }
}

/// Runs the binary and asserts its exit code.
pub(crate) fn expect(code: i32, arguments: &[&str], input: &[u8]) -> Ended {
    let ended = run(arguments, input);
    assert_eq!(ended.code, code, "{arguments:?}: {}", ended.err);
    ended
}

fn collect(mut from: impl Read + Send + 'static) -> mpsc::Receiver<Vec<u8>> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = vec![];
        let _ = from.read_to_end(&mut bytes);
        let _ = send.send(bytes);
    });
    receive
}

/// A process, which is killed on drop.
pub(crate) struct Running {
    child: Child,
    /// Directory of its shm socket, which a killed node does not remove.
    _sockets: Option<Folder>,
}

impl Running {
    /// Starts a server and reads its output up to `ready`.
    pub(crate) fn start(arguments: &[&str]) -> (Running, Vec<String>) {
        Running::start_until(arguments, "ready")
    }

    /// Starts a server and reads its output up to a line with this beginning.
    pub(crate) fn start_until(arguments: &[&str], last: &str) -> (Running, Vec<String>) {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let sockets = Folder::new(&format!("sockets-{}", STARTED.fetch_add(1, Ordering::Relaxed)));
        let mut command = moontide(arguments);
        command.env("XDG_RUNTIME_DIR", &sockets.0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut running = Running { child: command.spawn().unwrap(), _sockets: Some(sockets) };
        let out = BufReader::new(running.child.stdout.take().unwrap());
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let started = Instant::now();
        let mut lines = vec![];
        while lines.last().is_none_or(|line: &String| !line.starts_with(last)) {
            let left = TIMEOUT.saturating_sub(started.elapsed());
            let line = receive.recv_timeout(left);
            lines.push(line.unwrap_or_else(|_| panic!("{arguments:?} did not print {last}: {lines:?}")));
        }
        (running, lines)
    }

    /// Sends a signal, as a supervisor does, and returns the exit code.
    pub(crate) fn stop(mut self, signal: Signal) -> i32 {
        self.signal(signal);
        self.wait()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn wait(&mut self) -> i32 {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(started.elapsed() < TIMEOUT, "process did not exit within {TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Safe: the pid is not reused before `wait`.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the text after `word` in the output of a server.
pub(crate) fn printed<'a>(lines: &'a [String], word: &str) -> &'a str {
    let found = lines.iter().find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("{word} is not in {lines:?}"))
}

/// A directory, which is removed on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("moontide-cli-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// Path of a file in it, as an argument.
    pub(crate) fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
