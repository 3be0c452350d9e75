//! `moontide bench drain`: empties a node while clients get and put, and compares its rate with bare sockets.
//!
//! ```text
//!   node A, full ──▶ nodes B and C       gets of all objects, puts of others, at a constant rate
//! ```
//!
//! The load starts first. Then, while it goes on: two bare connections send memory as fast as they can, nothing else
//! happens, and the node is drained. Latencies count from the time at which a call was due, not from its start, so that a
//! stall shows in all calls behind it. At the end every object is read and compared.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{Store, StoreConfig};
use moontide_rt::SplitMix64;
use moontide_types::NodeId;

use crate::measure::Percentiles;
use crate::process::ServerProcess;
use crate::results::{BenchError, Progress, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench drain                      1 GiB, with the budget lifted and with the default one: 3 GiB, a minute
  moontide bench drain --mib 10240          10 GiB; needs 22 GiB of memory
  moontide bench drain --gets-per-s 1000 --object-kib 64

Every result is one JSON object per line on standard output, one per budget:
  drain_bytes_per_s, bare_bytes_per_s, of_bare    rate of the drain, of two bare connections under the same load, ratio
  p50_before_us, p99_before_us, …                 gets without a drain, and while it runs
  p99_during_over_before                          ratio of the 99th percentiles
  gets, failed_gets, lost_objects                 gets in total; gets that failed or missed; objects lost at the end";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// MiB of objects on the node that is drained
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(16..=1_048_576))]
    mib: u64,
    /// KiB of each object
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(4..=65_536))]
    object_kib: u64,
    /// Gets per second, of random objects
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    gets_per_s: u32,
    /// Puts per second, of objects of 64 KiB; each replaces an earlier one
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    puts_per_s: u32,
    /// Seconds of load before the drain
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Seed of the keys that are read
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// Threads that get; a get that takes long delays only those of its own thread.
const READERS: usize = 4;

/// Objects that the puts replace in turn.
const WRITTEN_OBJECTS: u64 = 64;

/// Connections and bytes of memory of each in the bare measurement: far more than a cache of a processor.
const BARE_CONNECTIONS: usize = 2;
const BARE_BYTES: usize = 128 << 20;
const BARE_SPAN: Duration = Duration::from_secs(4);

/// Timeout of the drain.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(900);

/// Targets: share of the bare rate with the budget lifted, and 99th percentiles of gets over those without a drain.
const OF_BARE: f64 = 0.5;
const P99_LIFTED: f64 = 2.0;
const P99_DEFAULT: f64 = 1.2;

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    for (case, budget, p99) in [("lifted", Some("0"), P99_LIFTED), ("default_budget", None, P99_DEFAULT)] {
        measure(args, case, budget, p99)?;
    }
    if args.gate { check_gates() } else { Ok(()) }
}

/// Phase of the load in which a get was due.
const BARE: usize = 0;
const BEFORE: usize = 1;
const DURING: usize = 2;
const AFTER: usize = 3;

/// Objects, and what the callers have seen.
#[derive(Debug)]
struct Load {
    objects: u64,
    content: Vec<u8>,
    phase: AtomicUsize,
    stop: AtomicBool,
    gets: AtomicU64,
    failed: AtomicU64,
    /// Nanoseconds of the gets of each phase.
    nanos: Mutex<[Vec<u32>; 4]>,
}

impl Load {
    fn key(number: u64) -> String {
        format!("drained-{number:09}")
    }

    /// Bytes of an object: its number, then the same for all.
    fn object(&self, number: u64) -> Vec<u8> {
        let mut bytes = self.content.clone();
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    fn is_right(&self, number: u64, got: &[u8]) -> bool {
        got.len() == self.content.len() && got[..8] == number.to_le_bytes() && got[8..] == self.content[8..]
    }

    /// Calls `each` at a constant rate until the load ends, with the time at which the call was due.
    fn at_rate(
        &self,
        per_s: f64,
        mut each: impl FnMut(Instant) -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        let (start, interval) = (Instant::now(), Duration::from_secs_f64(1.0 / per_s));
        for number in 0u32.. {
            let due = start + interval * number;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            each(due)?;
        }
        Ok(())
    }

    fn read(&self, store: &Store, per_s: f64, seed: u64) -> Result<(), BenchError> {
        let mut rng = SplitMix64::new(seed);
        self.at_rate(per_s, |due| {
            let (number, phase) = (rng.next_u64() % self.objects, self.phase.load(Ordering::Relaxed));
            let got = store.get(Load::key(number).as_bytes());
            let nanos = due.elapsed().as_nanos().min(u32::MAX.into()) as u32;
            match got {
                Ok(Some(got)) if self.is_right(number, &got) => {}
                Ok(Some(_)) => return Err(wrong(format!("object {number} has other bytes"))),
                Ok(None) | Err(_) => {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                }
            }
            self.gets.fetch_add(1, Ordering::Relaxed);
            self.nanos.lock().expect("readers do not panic")[phase].push(nanos);
            Ok(())
        })
    }

    fn write(&self, store: &Store, per_s: f64) -> Result<(), BenchError> {
        let mut number = 0u64;
        self.at_rate(per_s, |_| {
            let key = format!("written-{}", number % WRITTEN_OBJECTS);
            number += 1;
            let bytes = vec![number as u8; 64 << 10];
            let _removed = store.remove(key.as_bytes(), true).map_err(wrong)?;
            store.put(key.as_bytes(), &bytes).map(drop).map_err(wrong)
        })
    }
}

fn measure(args: &Args, case: &str, budget: Option<&str>, p99_target: f64) -> Result<(), BenchError> {
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-drain").map_err(io("creating a directory"))?;
    let dir = scratch.path().join("master").display().to_string();
    let (_master, lines) = ServerProcess::start(
        &["master", "--grpc-listen", "127.0.0.1:0", "--frame-listen", "127.0.0.1:0", "--data-dir", &dir],
        "admin ",
    )?;
    let grpc = printed(&lines, "grpc")?;
    let node = |name: &str, bytes: u64| {
        let socket = scratch.path().join(format!("{name}.sock")).display().to_string();
        let bytes = bytes.to_string();
        let mut words = vec!["node", "--master", &grpc, "--memory-bytes", &bytes, "--shm-socket", &socket];
        words.extend(budget.iter().flat_map(|budget| ["--copy-bytes-per-s", budget]));
        ServerProcess::start(&words, "ready")
    };
    let bytes = args.mib << 20;
    // The other nodes also take what the puts of the load write. Groups fill unevenly.
    let (_full, lines) = node("full", bytes / 8 * 9 + (256 << 20))?;
    let full: NodeId = printed(&lines, "node")?.parse().map_err(wrong)?;
    let config = StoreConfig { timeout: Duration::from_secs(20), ..StoreConfig::new(&grpc) };
    let store = Store::connect(StoreConfig { shm: false, ..config }).map_err(wrong)?;
    let mut rng = SplitMix64::new(args.seed);
    let mut content = vec![0; (args.object_kib as usize) << 10];
    content.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
    let load = Load {
        objects: bytes / content.len() as u64,
        content,
        phase: AtomicUsize::new(BARE),
        stop: AtomicBool::new(false),
        gets: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        nanos: Mutex::default(),
    };
    let mut progress = Progress::new(format!("{} objects", load.objects), load.objects);
    for number in 0..load.objects {
        store.put(Load::key(number).as_bytes(), &load.object(number)).map_err(wrong)?;
        progress.at(number + 1);
    }
    let _others = [node("left", bytes / 8 * 5 + (256 << 20))?, node("right", bytes / 8 * 5 + (256 << 20))?];
    let (moved, drain_s, bare) = std::thread::scope(|scope| {
        let end = EndLoad(&load.stop);
        let (load, store) = (&load, &store);
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                let per_s = f64::from(args.gets_per_s) / READERS as f64;
                scope.spawn(move || load.read(store, per_s, args.seed + reader as u64))
            })
            .collect();
        let writer = scope.spawn(move || load.write(store, args.puts_per_s.into()));
        std::thread::sleep(Duration::from_secs(2));
        let bare = bare_bytes_per_s()?;
        load.phase.store(BEFORE, Ordering::Relaxed);
        std::thread::sleep(Duration::from_secs(args.seconds));
        load.phase.store(DURING, Ordering::Relaxed);
        let (moved, drain_s) = drain(store, full)?;
        load.phase.store(AFTER, Ordering::Relaxed);
        drop(end);
        for caller in readers.into_iter().chain([writer]) {
            caller.join().expect("callers do not panic")?;
        }
        Ok::<_, BenchError>((moved, drain_s, bare))
    })?;
    let mut lost = 0;
    for number in 0..load.objects {
        match store.get(Load::key(number).as_bytes()).map_err(wrong)? {
            Some(got) if load.is_right(number, &got) => {}
            Some(_) => return Err(wrong(format!("object {number} has other bytes after the drain"))),
            None => lost += 1,
        }
    }
    let nanos = std::mem::take(&mut *load.nanos.lock().expect("readers have ended"));
    let [_, before, during, _] = nanos.map(Percentiles::new);
    let rate = moved as f64 / drain_s;
    let row = ResultRow::new("drain", case)
        .with("bytes", moved)
        .with("objects", load.objects)
        .with("gets_per_s", args.gets_per_s)
        .number("drain_s", drain_s)
        .number("drain_bytes_per_s", rate)
        .number("bare_bytes_per_s", bare);
    let row = match budget {
        Some(_) => row.with_target("of_bare", rate / bare, OF_BARE, true),
        None => row.number("of_bare", rate / bare),
    };
    row.number("p50_before_us", before.micros(0.5))
        .number("p99_before_us", before.micros(0.99))
        .number("p50_during_us", during.micros(0.5))
        .number("p99_during_us", during.micros(0.99))
        .with_second_target(
            "p99_during_over_before",
            during.micros(0.99) / before.micros(0.99),
            p99_target,
            false,
        )
        .with("gets", load.gets.load(Ordering::Relaxed))
        .with("failed_gets", load.failed.load(Ordering::Relaxed))
        .with("lost_objects", lost)
        .print();
    match (lost, load.failed.load(Ordering::Relaxed)) {
        (0, 0) => Ok(()),
        (lost, failed) => Err(wrong(format!("{lost} objects lost, {failed} gets failed"))),
    }
}

/// Ends the load, also after an error.
struct EndLoad<'a>(&'a AtomicBool);

impl Drop for EndLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Empties a node. Returns the bytes that have left it, and the time in seconds.
fn drain(store: &Store, node: NodeId) -> Result<(u64, f64), BenchError> {
    let (first, start) = (store.drain_progress(node).map_err(wrong)?.bytes_left, Instant::now());
    store.drain_node(node).map_err(wrong)?;
    let mut progress = Progress::new("bytes moved", first);
    loop {
        let now = store.drain_progress(node).map_err(wrong)?;
        progress.at(first.saturating_sub(now.bytes_left));
        if now.is_empty() {
            return Ok((first, start.elapsed().as_secs_f64()));
        }
        if start.elapsed() > DRAIN_TIMEOUT {
            return Err(wrong(format!("{} bytes are left after {DRAIN_TIMEOUT:?}", now.bytes_left)));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Rate of bare connections on loopback, each of which sends memory and receives into other memory.
fn bare_bytes_per_s() -> Result<f64, BenchError> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(io("listening"))?;
    let address = listener.local_addr().map_err(io("listening"))?;
    std::thread::scope(|scope| {
        let receivers: Vec<_> = (0..BARE_CONNECTIONS)
            .map(|_| {
                let sender = TcpStream::connect(address).map_err(io("connecting"))?;
                let (receiver, _) = listener.accept().map_err(io("accepting"))?;
                scope.spawn(move || send_for(sender, BARE_SPAN));
                Ok(scope.spawn(move || receive_all(receiver)))
            })
            .collect::<Result<_, BenchError>>()?;
        receivers.into_iter().map(|thread| thread.join().expect("receivers do not panic")).sum()
    })
}

fn send_for(mut stream: TcpStream, span: Duration) {
    let (memory, end) = (vec![7; BARE_BYTES], Instant::now() + span);
    for part in memory.chunks(1 << 20).cycle() {
        if Instant::now() >= end || stream.write_all(part).is_err() {
            return;
        }
    }
}

/// Receives until the end of the stream. Returns the rate in bytes per second.
fn receive_all(mut stream: TcpStream) -> Result<f64, BenchError> {
    let (mut memory, mut bytes, mut at) = (vec![1; BARE_BYTES], 0u64, 0);
    let start = Instant::now();
    loop {
        let count = stream.read(&mut memory[at..]).map_err(io("receiving"))?;
        if count == 0 {
            return Ok(bytes as f64 / start.elapsed().as_secs_f64());
        }
        bytes += count as u64;
        at = (at + count) % BARE_BYTES;
    }
}

/// Returns what a process printed after a word.
fn printed(lines: &[String], word: &str) -> Result<String, BenchError> {
    let found = lines.iter().find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    found.map(str::to_owned).ok_or_else(|| wrong(format!("{word:?} not printed: {lines:?}")))
}
