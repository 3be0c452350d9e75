//! `moontide bench drain`: empties a node while clients get and put, and compares its rate with bare sockets.
//!
//! ```text
//!   node A, full ──▶ nodes B and C       gets of all objects, puts of others, at a constant rate
//! ```
//!
//! The load starts first. Then, while it goes on: two bare connections send memory as fast as they can, nothing else
//! happens, and the node is drained. At the end every object is read and compared.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{Store, StoreConfig};
use moontide_types::NodeId;

use super::load::{Load, LoadArgs};
use super::{printed, start_master};
use crate::process::{ServerProcess, resident_bytes};
use crate::results::{BenchError, Progress, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench drain                      1 GiB, with the budget lifted and with the default one: 3 GiB, a minute
  moontide bench drain --mib 10240          10 GiB; needs 22 GiB of memory
  moontide bench drain --gets-per-s 1000 --object-kib 64
  moontide bench drain --prefault           with memory that the nodes have already

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
    /// Start the nodes with `prefault`, and wait until they have all of their memory, as in a cluster that has run for a while
    #[arg(long)]
    prefault: bool,
    #[command(flatten)]
    load: LoadArgs,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

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

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    for (case, budget, p99) in [("lifted", Some("0"), P99_LIFTED), ("default_budget", None, P99_DEFAULT)] {
        measure(args, case, budget, p99)?;
    }
    if args.gate { check_gates() } else { Ok(()) }
}

/// Phases of the load, after that of the bare connections.
const BEFORE: usize = 1;
const DURING: usize = 2;
const AFTER: usize = 3;

fn measure(args: &Args, case: &str, budget: Option<&str>, p99_target: f64) -> Result<(), BenchError> {
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-drain").map_err(io("creating a directory"))?;
    // Else the empty nodes would be filled before the drain begins.
    let master = start_master(&[], &scratch, "127.0.0.1", &["--rebalance-bytes-per-s", "0"])?;
    let grpc = &*master.grpc;
    let node = |name: &str, bytes: u64| {
        let socket = scratch.path().join(format!("{name}.sock")).display().to_string();
        let memory = bytes;
        let bytes = bytes.to_string();
        let mut words = vec!["node", "--master", grpc, "--memory-bytes", &bytes, "--shm-socket", &socket];
        words.extend(budget.iter().flat_map(|budget| ["--copy-bytes-per-s", budget]));
        if args.prefault {
            words.extend(["--prefault", "true"]);
        }
        let (process, lines) = ServerProcess::start(&words, "ready")?;
        let started = Instant::now();
        // The last thousandths are those of segments that are smaller than the memory.
        while args.prefault && resident_bytes(process.id())? < memory / 1000 * 990 {
            if started.elapsed() > DRAIN_TIMEOUT {
                return Err(wrong(format!("node {name} did not get its memory")));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok((process, lines))
    };
    let bytes = args.mib << 20;
    // The other nodes also take what the puts of the load write. Groups fill unevenly.
    let (_full, lines) = node("full", bytes / 8 * 9 + (256 << 20))?;
    let full: NodeId = printed(&lines, "node")?.parse().map_err(wrong)?;
    let config = StoreConfig { timeout: Duration::from_secs(20), ..StoreConfig::new(grpc) };
    let store = Store::connect(StoreConfig { shm: false, ..config }).map_err(wrong)?;
    let load = Load::new(&args.load, bytes);
    load.fill(&store)?;
    let _others = [node("left", bytes / 8 * 5 + (256 << 20))?, node("right", bytes / 8 * 5 + (256 << 20))?];
    let (moved, drain_s, bare) = load.run(&store, &args.load, || {
        std::thread::sleep(Duration::from_secs(2));
        let bare = bare_bytes_per_s()?;
        load.begin_phase(BEFORE);
        std::thread::sleep(Duration::from_secs(args.load.seconds));
        load.begin_phase(DURING);
        let (moved, drain_s) = drain(&store, full)?;
        load.begin_phase(AFTER);
        Ok((moved, drain_s, bare))
    })?;
    let lost = load.count_lost(&store)?;
    let (before, during, outcomes) = (load.latencies(BEFORE), load.latencies(DURING), load.outcomes());
    let rate = moved as f64 / drain_s;
    let row = ResultRow::new("drain", case)
        .with("bytes", moved)
        .with("objects", load.objects)
        .with("prefault", args.prefault)
        .with("gets_per_s", args.load.gets_per_s)
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
        .with("gets", outcomes.gets)
        .with("failed_gets", outcomes.failed())
        .with("lost_objects", lost)
        .print();
    match (lost, outcomes.failed()) {
        (0, 0) => Ok(()),
        (lost, failed) => Err(wrong(format!("{lost} objects lost, {failed} gets failed"))),
    }
}

/// Empties a node. Returns the bytes that have left it, and the time in seconds.
pub(super) fn drain(store: &Store, node: NodeId) -> Result<(u64, f64), BenchError> {
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
