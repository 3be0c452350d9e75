//! `moontide bench rolling`: all nodes restart one after the other, each after a drain, while clients get and put.
//!
//! ```text
//!   for each of four nodes:  drain ──▶ stop ──▶ start ──▶ next        gets of all objects, at a constant rate
//! ```
//!
//! The objects take six tenths of the memory, so that three nodes hold them. Nothing puts an object again that was lost: the
//! hit rate of each second is compared with that before the first restart.

use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{Store, StoreConfig};
use moontide_types::NodeId;

use super::drain::drain;
use super::load::{Load, LoadArgs};
use super::{start_master, start_node};
use crate::results::{BenchError, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench rolling                    four nodes of 512 MiB: 2 GiB, a minute
  moontide bench rolling --node-mib 2048    8 GiB

The result is one JSON object on standard output:
  lowest_hit_rate_of_before     lowest hit rate of a second from the first drain on, over the rate before it
  seconds_per_node              drain, stop and start of a node
  p99_before_us, p99_during_us  gets before the first drain, and from then to the last start
  gets, misses, errors, lost_objects";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// MiB of memory of each node
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(16..=1_048_576))]
    node_mib: u64,
    #[command(flatten)]
    load: LoadArgs,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

const NODES: u64 = 4;

/// Share of the memory that objects take, in thousandths.
const FILLED: u64 = 600;

/// Target for the lowest hit rate of a second.
const HIT_RATE: f64 = 0.95;

/// Time for a node that has started to be known to the masters.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Phases of the load.
const BEFORE: usize = 1;
const DURING: usize = 2;
const AFTER: usize = 3;

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-rolling").map_err(io("creating a directory"))?;
    let master = start_master(&[], &scratch, "127.0.0.1", &[])?;
    let grpc = &*master.grpc;
    let memory = args.node_mib << 20;
    let node = |number: u64| start_node(&scratch, grpc, number, memory);
    let mut nodes = (0..NODES).map(node).collect::<Result<Vec<_>, BenchError>>()?;
    let config = StoreConfig { timeout: Duration::from_secs(20), ..StoreConfig::new(grpc) };
    let store = Store::connect(StoreConfig { shm: false, ..config }).map_err(wrong)?;
    let load = Load::new(&args.load, NODES * memory / 1000 * FILLED);
    load.fill(&store)?;
    let seconds = load.run(&store, &args.load, || {
        std::thread::sleep(Duration::from_secs(2));
        load.begin_phase(BEFORE);
        std::thread::sleep(Duration::from_secs(args.load.seconds));
        load.begin_phase(DURING);
        let start = Instant::now();
        for number in 0..NODES {
            let (process, id) = nodes.remove(0);
            drain(&store, id)?;
            drop(process); // stops it, and waits for it
            let started = node(number)?;
            wait_for(&store, started.1)?;
            nodes.push(started);
        }
        load.begin_phase(AFTER);
        Ok(start.elapsed().as_secs_f64())
    })?;
    let lost = load.count_lost(&store)?;
    let outcomes = load.outcomes();
    let of_before = load.lowest_hit_rate(DURING) / load.lowest_hit_rate(BEFORE);
    let (before, during) = (load.latencies(BEFORE), load.latencies(DURING));
    ResultRow::new("rolling", "four_nodes")
        .with("node_bytes", memory)
        .with("objects", load.objects)
        .with("gets_per_s", args.load.gets_per_s)
        .with_target("lowest_hit_rate_of_before", of_before, HIT_RATE, true)
        .number("seconds_per_node", seconds / NODES as f64)
        .number("p50_before_us", before.micros(0.5))
        .number("p99_before_us", before.micros(0.99))
        .number("p50_during_us", during.micros(0.5))
        .number("p99_during_us", during.micros(0.99))
        .with("gets", outcomes.gets)
        .with("misses", outcomes.misses)
        .with("errors", outcomes.errors)
        .with("lost_objects", lost)
        .print();
    if args.gate { check_gates() } else { Ok(()) }
}

/// Waits until the masters place objects on a node.
fn wait_for(store: &Store, node: NodeId) -> Result<(), BenchError> {
    let start = Instant::now();
    while store.drain_progress(node).is_ok_and(|progress| progress.segments == 0)
        || store.drain_progress(node).is_err()
    {
        if start.elapsed() > JOIN_TIMEOUT {
            return Err(wrong(format!("node {node} is not known after {JOIN_TIMEOUT:?}")));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
