//! Support for all fault tests: command line of a test runner, seeds, clocks, counts, and transfers with known bytes.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_rt::SplitMix64;
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, EngineKind, Link, Metrics, Op, Peer, TransferError, run};
use moontide_types::NodeId;

pub const MIB: u64 = 1 << 20;

/// Tests selected by the part of libtest's command line that runners use: filters, `--exact`, `--skip`, `--list`,
/// `--ignored`, `--include-ignored`.
pub struct TestSelection {
    pub list: bool,
    pub tests: Vec<(&'static str, fn())>,
}

impl TestSelection {
    /// Selects from `all`; tests whose names are in `ignored` only on request, as libtest does.
    pub fn from_arguments(
        arguments: &[String],
        all: &[(&'static str, fn())],
        ignored: &[&str],
    ) -> TestSelection {
        let (mut filters, mut skipped) = (Vec::new(), Vec::new());
        let (mut list, mut exact, mut only_ignored, mut include_ignored) = (false, false, false, false);
        let mut words = arguments.iter().map(String::as_str);
        while let Some(word) = words.next() {
            match word {
                "--list" => list = true,
                "--exact" => exact = true,
                "--ignored" => only_ignored = true,
                "--include-ignored" => include_ignored = true,
                "--skip" => skipped.extend(words.next()),
                "--format" | "--test-threads" | "--color" => drop(words.next()),
                flag if flag.starts_with('-') => {}
                filter => filters.push(filter),
            }
        }
        let matches = |name: &str, filter: &&str| if exact { name == *filter } else { name.contains(filter) };
        let selected = |name: &str| {
            let is_ignored = ignored.contains(&name);
            (is_ignored || !only_ignored)
                && (!is_ignored || only_ignored || include_ignored || list)
                && (filters.is_empty() || filters.iter().any(|filter| matches(name, filter)))
                && !skipped.iter().any(|filter| matches(name, filter))
        };
        TestSelection { list, tests: all.iter().copied().filter(|(name, _)| selected(name)).collect() }
    }
}

/// Returns `short` in the short form of the tests, `full` in the long one.
pub fn count(short: u32, full: u32) -> u32 {
    if std::env::var("MOONTIDE_TESTS").is_ok_and(|form| form == "full") { full } else { short }
}

/// Random numbers of a test.
#[derive(Clone)]
pub struct Rng(SplitMix64);

impl Rng {
    /// Seeds it from `MOONTIDE_SEED`, or from the clock, and prints the seed.
    pub fn seeded() -> Rng {
        let given =
            std::env::var("MOONTIDE_SEED").ok().map(|seed| seed.parse().expect("the seed must be a number"));
        let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.as_nanos() as u64);
        let seed = given.unwrap_or_else(clock);
        println!("MOONTIDE_SEED={seed}");
        Rng(SplitMix64::new(seed))
    }

    pub fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Draws a number that is at least `from` and below `to`.
    pub fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.0.below(to - from)
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill(bytes);
    }

    pub fn fork(&mut self) -> Rng {
        Rng(SplitMix64::new(self.draw()))
    }
}

/// Measures how late this machine wakes a sleeping thread. A deadline may be missed by 50 ms plus that.
pub struct WakeupJitter {
    worst_ns: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl WakeupJitter {
    pub fn new() -> WakeupJitter {
        let (worst_ns, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (worst, stopped) = (Arc::clone(&worst_ns), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let sleep = Duration::from_millis(2);
            while !stopped.load(Ordering::Relaxed) {
                let began = Instant::now();
                std::thread::sleep(sleep);
                let late = began.elapsed().saturating_sub(sleep).as_nanos() as u64;
                worst.fetch_max(late, Ordering::Relaxed);
            }
        });
        WakeupJitter { worst_ns, stop, thread: Some(thread) }
    }

    /// Asserts that the current time is not later than `deadline`, and restarts the measurement.
    #[track_caller]
    pub fn check(&self, deadline: Instant, what: &str) {
        if let Some(late) = self.late(deadline, what) {
            panic!("{late}");
        }
    }

    /// Returns how much later than `deadline` it is, if that exceeds the delay of the machine; restarts the
    /// measurement.
    pub fn late(&self, deadline: Instant, what: &str) -> Option<String> {
        let late = Instant::now().saturating_duration_since(deadline);
        let machine = Duration::from_nanos(self.worst_ns.swap(0, Ordering::Relaxed));
        // Two threads may have to be woken in sequence.
        let allowed = Duration::from_millis(50) + 2 * machine;
        (late > allowed).then(|| format!("{what}: {late:?} after the deadline, {allowed:?} allowed"))
    }

    pub fn reset(&self) {
        self.worst_ns.store(0, Ordering::Relaxed);
    }
}

impl Drop for WakeupJitter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub fn in_ms(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// Returns a deadline far enough in the future for every successful operation.
pub fn soon() -> Instant {
    in_ms(20_000)
}

pub fn peer(addresses: &[SocketAddr]) -> Peer {
    let addresses = addresses.iter().map(|address| (EngineKind::Tcp, address.to_string()));
    Peer { node: NodeId(1), addresses: addresses.collect() }
}

pub fn open(
    addresses: &[SocketAddr],
    connections: usize,
    deadline: Instant,
) -> Result<Arc<dyn Link>, TransferError> {
    let config = TcpConfig { connections, ..TcpConfig::default() };
    TcpEngine::new(config, Metrics::new()).connect(&peer(addresses), deadline)
}

#[track_caller]
pub fn link(address: SocketAddr, connections: usize) -> Arc<dyn Link> {
    open(&[address], connections, soon()).expect("the peer is running")
}

/// Gets a record as often as it fits into `memory`, in one batch. Also after an error, successful operations must have
/// delivered the right bytes.
pub fn get_into(
    link: &dyn Link,
    config: &SampleNodeConfig,
    record: u32,
    content: &[u8],
    memory: &mut [u8],
    deadline: Instant,
) -> Result<(), TransferError> {
    let target = config.target(record);
    let mut ops: Vec<Op<'_>> =
        memory.chunks_exact_mut(content.len()).map(|part| Op::get(target, 0, part)).collect();
    let result = run(link, &mut ops, deadline);
    let outcomes: Vec<_> = ops.iter().map(Op::outcome).collect();
    drop(ops);
    for (part, outcome) in memory.chunks_exact(content.len()).zip(outcomes) {
        if result.is_ok() {
            assert_eq!(outcome, Some(Ok(())));
        }
        assert!(outcome != Some(Ok(())) || part == content, "a successful operation delivered wrong bytes");
    }
    result
}

/// Runs a get that must succeed.
#[track_caller]
pub fn get_ok(link: &dyn Link, config: &SampleNodeConfig, record: u32, content: &[u8]) {
    let mut memory = vec![0xee; content.len()];
    get_into(link, config, record, content, &mut memory, soon()).expect("get from a running peer");
}

/// Puts `memory` into the writable records, in order.
pub fn put_from(
    link: &dyn Link,
    config: &SampleNodeConfig,
    memory: &[u8],
    deadline: Instant,
) -> Result<(), TransferError> {
    let mut ops: Vec<Op<'_>> = (config.readable..)
        .zip(memory.chunks_exact(config.record_bytes as usize))
        .map(|(record, part)| Op::put(config.target(record), 0, part))
        .collect();
    run(link, &mut ops, deadline)?;
    assert!(ops.iter().all(|op| op.outcome() == Some(Ok(()))), "put into records that are being written");
    Ok(())
}

/// Checks that the error is one of those allowed for a peer that is gone, stopped or sends invalid data.
#[track_caller]
pub fn check_typed(error: &TransferError) {
    let typed = matches!(
        error,
        TransferError::ConnectionLost { .. }
            | TransferError::Unreachable { .. }
            | TransferError::Deadline { .. }
    );
    assert!(typed, "unexpected error for a failed peer: {error:?}");
}

/// Retries until a get succeeds. Returns the time that it took.
#[track_caller]
pub fn wait_for_recovery(
    link: &dyn Link,
    config: &SampleNodeConfig,
    content: &[u8],
    within: Duration,
) -> Duration {
    let began = Instant::now();
    let mut memory = vec![0xee; content.len()];
    loop {
        match get_into(link, config, 0, content, &mut memory, in_ms(2000)) {
            Ok(()) => return began.elapsed(),
            Err(error) => {
                check_typed(&error);
                assert!(began.elapsed() < within, "link has not recovered after {within:?}: {error}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Returns the number of descriptors and of threads of a process.
pub fn counts_of(pid: u32) -> (usize, usize) {
    let entries = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, |dir| dir.count());
    (entries("fd"), entries("task"))
}

/// Returns the resident memory of a process in bytes.
pub fn rss_of(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("VmRSS: 0 kB");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0);
    kib << 10
}

/// Waits until the counts are equal to `before`.
#[track_caller]
pub fn wait_for_counts(pid: u32, before: (usize, usize), what: &str) {
    let until = in_ms(10_000);
    loop {
        let now = counts_of(pid);
        // The message shows which of the two grew.
        if now == before {
            return;
        }
        assert!(Instant::now() < until, "{what}: (descriptors, threads) were {before:?} and are {now:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Decodes the codes in a reply to Begin or Commit.
pub fn codes(reply: &[u8]) -> Vec<Option<moontide_types::ErrorCode>> {
    use moontide_proto::convert::{SlotOutcomes, Wire};
    use prost::Message;
    let message = moontide_proto::v1::SlotOutcomes::decode(reply).expect("a valid reply");
    SlotOutcomes::from_wire(&message).expect("a valid reply").codes.iter().collect()
}

/// Returns the stat lines of the threads of this process that are running now, with their CPU time: a hang in these
/// tests is a busy loop.
pub fn running_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs is mounted").flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    // After the name: the first word is the state, the twelfth the time in user mode, in hundredths of a second.
    stats.filter(|stat| stat.split(") ").nth(1).is_some_and(|rest| rest.starts_with('R'))).collect()
}
