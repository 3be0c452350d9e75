//! What all fault tests need: the command line of a test runner, seeds, clocks, counts, and transfers with known bytes.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_transfer::sample::SampleConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, EngineKind, Link, Metrics, Op, Peer, TransferError, run};
use moontide_types::NodeId;

pub const MIB: u64 = 1 << 20;

/// The part of libtest's command line that runners use: filters, `--exact`, `--skip`, `--list`, `--ignored`.
pub struct Wanted {
    pub list: bool,
    pub tests: Vec<(&'static str, fn())>,
}

impl Wanted {
    pub fn from_arguments(arguments: &[String], all: &[(&'static str, fn())]) -> Wanted {
        let (mut filters, mut skipped) = (Vec::new(), Vec::new());
        let (mut list, mut exact, mut ignored) = (false, false, false);
        let mut words = arguments.iter().map(String::as_str);
        while let Some(word) = words.next() {
            match word {
                "--list" => list = true,
                "--exact" => exact = true,
                "--ignored" => ignored = true,
                "--skip" => skipped.extend(words.next()),
                "--format" | "--test-threads" | "--color" => drop(words.next()),
                flag if flag.starts_with('-') => {}
                filter => filters.push(filter),
            }
        }
        let fits = |name: &str, filter: &&str| if exact { name == *filter } else { name.contains(filter) };
        let wanted = |name: &str| {
            !ignored // there are none
                && (filters.is_empty() || filters.iter().any(|filter| fits(name, filter)))
                && !skipped.iter().any(|filter| fits(name, filter))
        };
        Wanted { list, tests: all.iter().copied().filter(|(name, _)| wanted(name)).collect() }
    }
}

/// So many in the short form, so many in the long one.
pub fn count(short: u32, full: u32) -> u32 {
    if std::env::var("MOONTIDE_FAULTS").is_ok_and(|form| form == "full") { full } else { short }
}

/// SplitMix64.
#[derive(Clone)]
pub struct Rng(u64);

impl Rng {
    /// From `MOONTIDE_SEED`, or the clock; says which.
    pub fn seeded() -> Rng {
        let given = std::env::var("MOONTIDE_SEED").ok().map(|seed| seed.parse().expect("a seed is a number"));
        let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.as_nanos() as u64);
        let seed = given.unwrap_or_else(clock);
        println!("MOONTIDE_SEED={seed}");
        Rng(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// At least `from`, below `to`.
    pub fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.draw() % (to - from)
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            let drawn = self.draw().to_le_bytes();
            word.copy_from_slice(&drawn[..word.len()]);
        }
    }

    pub fn fork(&mut self) -> Rng {
        Rng(self.draw())
    }
}

/// Measures how late this machine wakes a thread that sleeps: what a deadline may be missed by is 50 ms beyond that.
pub struct Punctual {
    worst_ns: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Punctual {
    pub fn new() -> Punctual {
        let (worst_ns, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (worst, stopped) = (Arc::clone(&worst_ns), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let nap = Duration::from_millis(2);
            while !stopped.load(Ordering::Relaxed) {
                let began = Instant::now();
                std::thread::sleep(nap);
                let late = began.elapsed().saturating_sub(nap).as_nanos() as u64;
                worst.fetch_max(late, Ordering::Relaxed);
            }
        });
        Punctual { worst_ns, stop, thread: Some(thread) }
    }

    /// Asserts that it is not later than `deadline`, and measures anew.
    #[track_caller]
    pub fn check(&self, deadline: Instant, what: &str) {
        if let Some(late) = self.late(deadline, what) {
            panic!("{late}");
        }
    }

    /// How much later than `deadline` it is, if it is more than the machine's fault; measures anew.
    pub fn late(&self, deadline: Instant, what: &str) -> Option<String> {
        let late = Instant::now().saturating_duration_since(deadline);
        let machine = Duration::from_nanos(self.worst_ns.swap(0, Ordering::Relaxed));
        // Two threads may have to be woken one after the other.
        let allowed = Duration::from_millis(50) + 2 * machine;
        (late > allowed).then(|| format!("{what}: {late:?} after the deadline, {allowed:?} allowed"))
    }

    pub fn reset(&self) {
        self.worst_ns.store(0, Ordering::Relaxed);
    }
}

impl Drop for Punctual {
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

/// Far enough for everything that goes well.
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
    open(&[address], connections, soon()).expect("a peer that is there")
}

/// Gets a record as often as it fits into `memory`, in one batch. On an error, too, operations that went well must have
/// brought the right bytes.
pub fn get_into(
    link: &dyn Link,
    config: &SampleConfig,
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
        assert!(
            outcome != Some(Ok(())) || part == content,
            "an operation that went well brought wrong bytes"
        );
    }
    result
}

/// A get that must go well.
#[track_caller]
pub fn get_right(link: &dyn Link, config: &SampleConfig, record: u32, content: &[u8]) {
    let mut memory = vec![0xee; content.len()];
    get_into(link, config, record, content, &mut memory, soon()).expect("a get from a peer that is there");
}

/// Puts `memory` into the records that can be written, one after the other.
pub fn put_from(
    link: &dyn Link,
    config: &SampleConfig,
    memory: &[u8],
    deadline: Instant,
) -> Result<(), TransferError> {
    let mut ops: Vec<Op<'_>> = (config.readable..)
        .zip(memory.chunks_exact(config.record_bytes as usize))
        .map(|(record, part)| Op::put(config.target(record), 0, part))
        .collect();
    run(link, &mut ops, deadline)?;
    assert!(ops.iter().all(|op| op.outcome() == Some(Ok(()))), "a put into records that are being written");
    Ok(())
}

/// Only these may come of a peer that is gone, stopped or mad.
#[track_caller]
pub fn check_typed(error: &TransferError) {
    let typed = matches!(
        error,
        TransferError::Lost { .. } | TransferError::Unreachable { .. } | TransferError::Deadline { .. }
    );
    assert!(typed, "not the error of a peer that is gone: {error:?}");
}

/// Tries until a get goes well again.
#[track_caller]
pub fn recovers(link: &dyn Link, config: &SampleConfig, content: &[u8], within: Duration) -> Duration {
    let began = Instant::now();
    let mut memory = vec![0xee; content.len()];
    loop {
        match get_into(link, config, 0, content, &mut memory, in_ms(2000)) {
            Ok(()) => return began.elapsed(),
            Err(error) => {
                check_typed(&error);
                assert!(began.elapsed() < within, "the link has not recovered after {within:?}: {error}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Descriptors and threads of a process.
pub fn counts_of(pid: u32) -> (usize, usize) {
    let entries = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, |dir| dir.count());
    (entries("fd"), entries("task"))
}

/// Resident memory of a process.
pub fn rss_of(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("VmRSS: 0 kB");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0);
    kib << 10
}

/// Waits until the counts are what they were.
#[track_caller]
pub fn settles(pid: u32, before: (usize, usize), what: &str) {
    let until = in_ms(10_000);
    loop {
        let now = counts_of(pid);
        // Which of the two grew is in the message.
        if now == before {
            return;
        }
        assert!(Instant::now() < until, "{what}: (descriptors, threads) were {before:?} and are {now:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The codes in an answer to Begin or Commit.
pub fn codes(reply: &[u8]) -> Vec<Option<moontide_types::ErrorCode>> {
    use moontide_proto::convert::{SlotOutcomes, Wire};
    use prost::Message;
    let message = moontide_proto::v1::SlotOutcomes::decode(reply).expect("an answer of ours");
    SlotOutcomes::from_wire(&message).expect("an answer of ours").codes.iter().collect()
}

/// Threads of this process that are running at this moment, and for how long they did: who hangs here, hangs busily.
pub fn running_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads").flatten();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    // Behind the name: state is the first word, time in user mode the twelfth, in hundredths of a second.
    stats.filter(|stat| stat.split(") ").nth(1).is_some_and(|rest| rest.starts_with('R'))).collect()
}
