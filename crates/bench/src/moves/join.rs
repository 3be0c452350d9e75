//! `moontide bench join`: a node joins full ones while clients get and put, and is filled by moves.
//!
//! ```text
//!   nodes 1 to 4, full ──▶ node 5, empty       gets of all objects, puts of others, at a constant rate
//! ```
//!
//! Measured are the time until the fullest and the emptiest node differ by at most a tenth of their memory, and what gets pay
//! for it. At the end every object is read and compared.

use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{Store, StoreConfig};
use moontide_types::NodeId;

use super::load::{Load, LoadArgs};
use super::{start_master, start_node};
use crate::results::{BenchError, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench join                       four nodes of 512 MiB, and a fifth: 2.5 GiB, half a minute
  moontide bench join --node-mib 2048       10 GiB
  moontide bench join --rate 512MiB         with another rebalance_bytes_per_s

The result is one JSON object on standard output:
  seconds_to_skew_100           from the start of the fifth node until the skew is at most 100 thousandths
  moved_bytes_per_s             rate at which it was filled
  skew_before, skew_after       thousandths of the memory of a node
  p99_before_us, p99_during_us  gets before the node joined, and until the skew was reached
  gets, failed_gets, lost_objects";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// MiB of memory of each node
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(16..=1_048_576))]
    node_mib: u64,
    /// Bytes per second that the node receives from the others; none: the default of the master
    #[arg(long)]
    rate: Option<String>,
    #[command(flatten)]
    load: LoadArgs,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// Nodes that are full when the last one joins.
const FULL_NODES: u64 = 4;

/// Share of their memory that objects take, in thousandths.
const FILLED: u64 = 900;

/// Skew at which the nodes count as balanced, in thousandths: the limit at which masters begin to move.
const BALANCED: u64 = 100;

/// Target for the 99th percentile of gets, over that before the node joined.
const P99: f64 = 1.2;

const TIMEOUT: Duration = Duration::from_secs(900);

/// Phases of the load.
const BEFORE: usize = 1;
const DURING: usize = 2;
const AFTER: usize = 3;

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let scratch = Scratch::new(&std::env::temp_dir(), "moontide-join").map_err(io("creating a directory"))?;
    let rate = args.rate.iter().flat_map(|rate| ["--rebalance-bytes-per-s", rate]);
    let master = start_master(&[], &scratch, "127.0.0.1", &rate.collect::<Vec<_>>())?;
    let grpc = &*master.grpc;
    let memory = args.node_mib << 20;
    let node = |number: u64| start_node(&scratch, grpc, number, memory);
    let mut nodes = (0..FULL_NODES).map(node).collect::<Result<Vec<_>, BenchError>>()?;
    let config = StoreConfig { timeout: Duration::from_secs(20), ..StoreConfig::new(grpc) };
    let store = Store::connect(StoreConfig { shm: false, ..config }).map_err(wrong)?;
    let load = Load::new(&args.load, FULL_NODES * memory / 1000 * FILLED);
    load.fill(&store)?;
    let (skew_before, seconds, moved) = load.run(&store, &args.load, || {
        std::thread::sleep(Duration::from_secs(2));
        load.begin_phase(BEFORE);
        std::thread::sleep(Duration::from_secs(args.load.seconds));
        nodes.push(node(FULL_NODES)?);
        load.begin_phase(DURING);
        let ids: Vec<NodeId> = nodes.iter().map(|(_, id)| *id).collect();
        let (start, before) = (Instant::now(), skew_permille(&store, &ids, memory)?);
        while skew_permille(&store, &ids, memory)? > BALANCED {
            if start.elapsed() > TIMEOUT {
                return Err(wrong(format!("the nodes are not balanced after {TIMEOUT:?}")));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let seconds = start.elapsed().as_secs_f64();
        load.begin_phase(AFTER);
        Ok((before, seconds, bytes_of(&store, ids[FULL_NODES as usize])?))
    })?;
    let ids: Vec<NodeId> = nodes.iter().map(|(_, id)| *id).collect();
    let lost = load.count_lost(&store)?;
    let (before, during, outcomes) = (load.latencies(BEFORE), load.latencies(DURING), load.outcomes());
    ResultRow::new("join", "fifth_node")
        .with("node_bytes", memory)
        .with("objects", load.objects)
        .with("gets_per_s", args.load.gets_per_s)
        .with("skew_before", skew_before)
        .with("skew_after", skew_permille(&store, &ids, memory)?)
        .number("seconds_to_skew_100", seconds)
        .with("moved_bytes", moved)
        .number("moved_bytes_per_s", moved as f64 / seconds)
        .number("p50_before_us", before.micros(0.5))
        .number("p99_before_us", before.micros(0.99))
        .number("p50_during_us", during.micros(0.5))
        .number("p99_during_us", during.micros(0.99))
        .with_target("p99_during_over_before", during.micros(0.99) / before.micros(0.99), P99, false)
        .with("gets", outcomes.gets)
        .with("failed_gets", outcomes.failed())
        .with("lost_objects", lost)
        .print();
    match (lost, outcomes.failed()) {
        (0, 0) if args.gate => check_gates(),
        (0, 0) => Ok(()),
        (lost, failed) => Err(wrong(format!("{lost} objects lost, {failed} gets failed"))),
    }
}

/// Bytes of objects on a node.
fn bytes_of(store: &Store, node: NodeId) -> Result<u64, BenchError> {
    Ok(store.drain_progress(node).map_err(wrong)?.bytes_left)
}

/// Difference between the fullest and the emptiest node, in thousandths of the memory of one.
fn skew_permille(store: &Store, nodes: &[NodeId], memory: u64) -> Result<u64, BenchError> {
    let bytes = nodes.iter().map(|&node| bytes_of(store, node)).collect::<Result<Vec<_>, _>>()?;
    let (most, least) = (bytes.iter().max().unwrap_or(&0), bytes.iter().min().unwrap_or(&0));
    Ok((most - least) * 1000 / memory)
}
