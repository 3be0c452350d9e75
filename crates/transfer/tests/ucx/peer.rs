//! A child process that owns memory, and the communication with it.
//!
//! The test binary starts itself again and runs only the test [`ENTRY`], which becomes the owner if [`ROLE`] is set.
//! Owner and test exchange lines over the child's standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use moontide_transfer::ucx::{
    Endpoint, Get, OldVersions, Put, RemoteKey, Ucx, UcxError, UcxWorker, WorkerConfig,
};

use crate::not_run::not_run;

/// The test that a child process runs.
pub(crate) const ENTRY: &str = "child_process";
/// Set in a child process: its role and its transports.
pub(crate) const ROLE: &str = "MOONTIDE_UCX_TEST_ROLE";
/// Marks the lines for the parent among those of the test harness.
const MARK: &str = "@@ ";
/// Length of the memory of an owner.
pub(crate) const OWNED_LEN: usize = 64 << 20;

/// Returns the UCX of this test run, or reports that the test is not run. A configured library that does not load is a
/// failure; otherwise a typing error would look like success.
pub(crate) fn library() -> Option<Ucx> {
    match Ucx::load(None) {
        Ok(ucx) => Some(ucx),
        Err(unavailable) => {
            assert!(std::env::var_os(moontide_transfer::ucx::ENV).is_none(), "{unavailable}");
            not_run(unavailable);
            None
        }
    }
}

/// Configuration for tests: any version, TCP allowed.
pub(crate) fn config(tls: &str) -> WorkerConfig {
    WorkerConfig {
        tls: Some(tls.into()),
        allow_tcp: true,
        old_versions: OldVersions::AllowOld,
        ..WorkerConfig::default()
    }
}

/// Fills `out` with bytes that differ by position, so that a shifted or torn transfer is detected. The period is a
/// prime number of bytes, so that no fragment size of UCX is a multiple of it. The bytes are copied rather than
/// computed, since tests are built unoptimised.
pub(crate) fn pattern(seed: u64, offset: usize, out: &mut [u8]) {
    const PERIOD: usize = 4099;
    let block: Vec<u8> = (0..2 * PERIOD)
        .map(|i| ((((i % PERIOD) as u64) ^ (seed << 13)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect();
    let block = &block[offset % PERIOD..][..PERIOD];
    for chunk in out.chunks_mut(PERIOD) {
        chunk.copy_from_slice(&block[..chunk.len()]);
    }
}

/// Memory at a fixed address, for UCX to read and write.
pub(crate) struct Buffer {
    start: *mut u8,
    len: usize,
}

// SAFETY: plain memory that is never freed (tests are short); each test orders its own accesses.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        Self { start: Box::leak(vec![0u8; len].into_boxed_slice()).as_mut_ptr(), len }
    }

    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len);
        self.start.wrapping_add(offset)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: leaked, initialised; tests do not read while a transfer is in flight.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    #[expect(clippy::mut_from_ref, reason = "tests run one at a time")]
    pub(crate) fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Starts a get and returns the channel for its outcome, with the time of arrival.
pub(crate) fn get(end: &Endpoint, get: Get<'_>) -> Receiver<(Result<(), UcxError>, Instant)> {
    let (sender, outcome) = channel();
    // SAFETY: the buffers of these tests are never freed.
    unsafe { end.get(get, move |result| drop(sender.send((result, Instant::now())))) };
    outcome
}

/// The same for a put.
pub(crate) fn put(end: &Endpoint, put: Put<'_>) -> Receiver<(Result<(), UcxError>, Instant)> {
    let (sender, outcome) = channel();
    // SAFETY: the buffers of these tests are never freed.
    unsafe { end.put(put, move |result| drop(sender.send((result, Instant::now())))) };
    outcome
}

/// Waits for an outcome; a missing completion fails the test.
pub(crate) fn wait(outcome: &Receiver<(Result<(), UcxError>, Instant)>) -> Result<(), UcxError> {
    outcome.recv_timeout(Duration::from_secs(30)).expect("no completion within 30 s").0
}

/// Returns the time `seconds` from now.
pub(crate) fn within(seconds: f64) -> Instant {
    Instant::now() + Duration::from_secs_f64(seconds)
}

/// A child process that owns memory.
pub(crate) struct Owner {
    pub(crate) child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    pub(crate) address: Vec<u8>,
    pub(crate) key: Vec<u8>,
    pub(crate) base: u64,
    pub(crate) len: u64,
}

impl Owner {
    pub(crate) fn start(tls: &str) -> Self {
        let (child, stdin, mut stdout) = spawn("owner", tls);
        let hello = read_line(&mut stdout);
        let fields: Vec<&str> = hello.split(' ').collect();
        assert_eq!(fields[0], "owner", "{hello}");
        Self {
            child,
            stdin,
            stdout,
            address: unhex(fields[1]),
            key: unhex(fields[2]),
            base: fields[3].parse().unwrap(),
            len: fields[4].parse().unwrap(),
        }
    }

    /// Connects to the owner and imports its memory.
    pub(crate) fn reach(&self, worker: &UcxWorker) -> (Endpoint, RemoteKey) {
        let end = worker.connect(&self.address, within(10.0)).unwrap();
        let key = end.import(&self.key).unwrap();
        (end, key)
    }

    /// Asks the owner whether its memory holds the pattern of `seed`.
    pub(crate) fn holds(&mut self, seed: u64, offset: usize, len: usize) -> bool {
        writeln!(self.stdin, "check {seed} {offset} {len}").unwrap();
        read_line(&mut self.stdout) == "true"
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops the owner, and returns when it has stopped: the signal takes effect some time later.
    pub(crate) fn pause(&self) {
        self.signal(rustix::process::Signal::STOP);
        let tasks = format!("/proc/{}/task", self.child.id());
        let all_stopped = || {
            std::fs::read_dir(&tasks).unwrap().all(|task| {
                let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
                stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
            })
        };
        let give_up_at = within(5.0);
        while !all_stopped() {
            assert!(Instant::now() < give_up_at, "the owner does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Continues a stopped owner.
    pub(crate) fn resume(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    /// Closes the owner's input, and expects it to exit successfully.
    pub(crate) fn end(self) {
        drop(self.stdin);
        let mut child = self.child;
        let status = child.wait().unwrap();
        assert!(status.success(), "owner exited with {status}");
    }

    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts this binary again in a role.
pub(crate) fn spawn(role: &str, tls: &str) -> (Child, ChildStdin, BufReader<ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", ENTRY, "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{role} {tls}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    (child, stdin, BufReader::new(stdout))
}

/// Returns the next line of the child that is marked for the parent.
pub(crate) fn read_line(stdout: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(stdout.read_line(&mut line).unwrap() > 0, "the child process exited early");
        if let Some(at) = line.find(MARK) {
            return line[at + MARK.len()..].trim().to_owned();
        }
    }
}

/// Sends a line to the parent.
pub(crate) fn send_line(line: &str) {
    println!("\n{MARK}{line}");
    std::io::stdout().flush().unwrap();
}

/// Body of an owner: registers memory with a pattern and serves requests until its input ends.
pub(crate) fn serve(tls: &str) {
    let ucx = Ucx::load(None).unwrap();
    let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
    let memory = Buffer::new(OWNED_LEN);
    pattern(1, 0, memory.bytes_mut());
    // SAFETY: never freed.
    let registration = unsafe { worker.register(memory.at(0), OWNED_LEN) }.unwrap();
    let (address, key) = (hex(worker.address()), hex(registration.key()));
    send_line(&format!("owner {address} {key} {} {}", registration.base(), registration.len()));
    let mut expected = vec![0; OWNED_LEN];
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let ["check", seed, offset, len] = words[..] else { panic!("unknown request {line}") };
        let (seed, offset, len): (u64, usize, usize) =
            (seed.parse().unwrap(), offset.parse().unwrap(), len.parse().unwrap());
        pattern(seed, offset, &mut expected[..len]);
        send_line(&(memory.bytes()[offset..offset + len] == expected[..len]).to_string());
    }
    drop(registration);
    drop(worker);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}
