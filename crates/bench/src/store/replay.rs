//! `moontide bench trace`: replays KV-cache traffic, block by block, like inference engines.
//!
//! For each request it gets the leading stored blocks up to the first missing one, and puts the others. The bytes of a
//! block are derived from its hash; each get is compared with them.

mod engines;
mod restart;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use clap::Args as ClapArgs;
use moontide_client::{Store, StoreConfig};
use moontide_settings::parse_size;

use super::cluster::{BenchCluster, Disk, OffloadTrigger, Size};
use crate::measure::{Percentiles, percentiles};
use crate::results::{BenchError, ResultRow, io, wrong};
use crate::scratch::Scratch;
use crate::trace::{Request, Summary, open, unread};
use engines::{Counts, Replay};

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench trace-gen --users 200 --requests 2000 --seed 1 -o chat.jsonl
  moontide bench trace chat.jsonl                       four engines at full speed, 2 GiB of memory
  moontide bench trace chat.jsonl --engines 2 --memory 512MiB --remote
  moontide bench trace chat.jsonl --speed 10            ten times the recorded speed
  moontide bench trace chat.jsonl --memory 512MiB --disk 4GiB
  moontide bench trace chat.jsonl --memory 1GiB --disk 4GiB --restart-after 1000 --plot restart.svg

One JSON object on standard output:
  hit_rate, ideal_hit_rate   stored blocks / requested blocks; the same for an infinite cache
  gb_per_s                   bytes of gets and puts
  p50_us …                   one request: all of its gets and puts
  in_progress                puts that another engine was performing
  failed                     gets and puts that failed
  wrong                      blocks with wrong content; must be 0
and with --disk:
  disk_share                 gets that the disk served / gets that found a block
  written_per_hit            bytes of blocks written to the disk / bytes of hits
  promoted                   blocks copied from the disk to memory

With --restart-after, the trace is replayed three times. After that many requests, the node is stopped with SIGTERM and
started again: once it keeps its disk (kept), once it loses it (lost). The third time it goes on (running). No request is
sent during the restart. One JSON object for each part of a twentieth of the trace, and for the parts around the restart:
  requests_from, requests_to, hit_rate, failed, seconds
  disk_share_so_far          as disk_share, since the start of the trace";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Trace of Moontide, Mooncake, Bailian or Dynamo, also compressed; see docs/trace.md for the formats
    file: PathBuf,
    /// Number of concurrent engines
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    engines: u16,
    /// Memory of the node, e.g. 512MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "2GiB")]
    memory: u64,
    /// Disk of the node, e.g. 8GiB [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "master")]
    disk: Option<u64>,
    /// Directory for the disk; a new subdirectory is removed at the end [default: the temporary directory]
    #[arg(long, requires = "disk")]
    dir: Option<PathBuf>,
    /// Bytes per block, e.g. 16KiB [default: those of the trace]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    block: Option<u64>,
    /// Stop the node after this many requests, and start it again
    #[arg(long, value_name = "REQUESTS", requires = "disk")]
    restart_after: Option<usize>,
    /// Write a plot of the hits before and after the restart to this file, as SVG
    #[arg(long, value_name = "FILE", requires = "restart_after")]
    plot: Option<PathBuf>,
    /// Multiple of the recorded speed [default: full speed]
    #[arg(long, value_parser = parse_speed)]
    speed: Option<f64>,
    /// Use TCP instead of shared memory
    #[arg(long)]
    remote: bool,
    /// gRPC address of the master of an existing cluster [default: start a cluster]
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<String>,
    /// Maximum number of requests
    #[arg(long)]
    requests: Option<usize>,
}

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed = text.parse::<f64>().ok().filter(|speed| (0.001..=1e6).contains(speed));
    speed.ok_or_else(|| "expected a number from 0.001 to 1000000".to_owned())
}

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let reader = open(&args.file)?;
    let header = reader.header();
    let requests: Vec<Request> = reader
        .take(args.requests.unwrap_or(usize::MAX))
        .collect::<Result<_, _>>()
        .map_err(unread(&args.file))?;
    let mut summary = Summary::new(header);
    requests.iter().for_each(|request| summary.add(request));
    let block_bytes = args.block.unwrap_or(header.block_bytes) as usize;
    let replay = Replay { requests, block_bytes, engines: args.engines, speed: args.speed };
    if let Some(after) = args.restart_after {
        return restart::run(args, &replay, after);
    }
    let cluster = match &args.master {
        Some(_) => None,
        None => Some(ReplayCluster::start(args)?),
    };
    let store = match (&cluster, &args.master) {
        (Some(cluster), _) => cluster.store(args)?,
        (None, master) => {
            let mut config = StoreConfig::new(master.clone().expect("no cluster was started"));
            config.shm = !args.remote;
            Store::connect(config).map_err(wrong)?
        }
    };
    let started = Instant::now();
    let counts = replay.run(&store, 0..replay.requests.len());
    let seconds = started.elapsed().as_secs_f64();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (requested, hits, puts) = (count(&counts.requested), count(&counts.hits), count(&counts.puts));
    let hit_bytes = hits as f64 * block_bytes as f64;
    let mut line = ResultRow::new("trace", if args.remote { "remote" } else { "local" })
        .with("requests", replay.requests.len())
        .with("blocks", requested)
        .number("hit_rate", counts.hit_rate())
        .number("ideal_hit_rate", summary.ideal_hit_rate())
        .number("requests_per_s", replay.requests.len() as f64 / seconds)
        .number("gb_per_s", (hit_bytes + puts as f64 * block_bytes as f64) / seconds / 1e9)
        .with("in_progress", count(&counts.in_progress))
        .with("wrong", count(&counts.wrong))
        .with("failed", count(&counts.failed));
    if let (Some(cluster), Some(_)) = (&cluster, args.disk) {
        let metric = |name: &str| cluster.cluster.node_metric(&format!("moontide_node_{name}"));
        line = line
            .number("disk_share", disk_share(&store))
            .number("written_per_hit", metric("disk_offloaded_bytes_total")? / hit_bytes.max(1.0))
            .with("promoted", metric("disk_promoted_records_total")? as u64);
    }
    percentiles(line, &Percentiles::new(std::mem::take(&mut counts.nanos.lock()))).print();
    check_content(&counts)
}

/// Fails if a block had wrong content.
fn check_content(counts: &Counts) -> Result<(), BenchError> {
    match counts.wrong.load(Ordering::Relaxed) {
        0 => Ok(()),
        blocks => Err(wrong(format!("{blocks} blocks have wrong content"))),
    }
}

/// Hits of a client that came from a disk / all hits.
fn disk_share(store: &Store) -> f64 {
    let stats = store.metrics().stats();
    let hits = stats.hits_local + stats.hits_remote + stats.hits_disk;
    stats.hits_disk as f64 / hits.max(1) as f64
}

/// Staging memory of the node.
const STAGING_BYTES: u64 = 256 << 20;

/// A master and a node, and the directory of the node's disk.
struct ReplayCluster {
    // Stopped before its directory is removed.
    cluster: BenchCluster,
    disk: Option<(Disk, Scratch)>,
}

impl ReplayCluster {
    fn start(args: &Args) -> Result<ReplayCluster, BenchError> {
        let disk = match args.disk {
            None => None,
            Some(limit_bytes) => {
                let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
                let scratch =
                    Scratch::new(&parent, "moontide-bench-trace").map_err(io("creating a directory"))?;
                let dir = scratch.path().join("disk");
                let offload = OffloadTrigger::Evict;
                Some((Disk { dir, limit_bytes, staging_bytes: STAGING_BYTES, offload }, scratch))
            }
        };
        let size = Size { nodes: 1, node_bytes: args.memory, groups: 4 };
        let cluster = BenchCluster::start_with_disk(size, disk.as_ref().map(|(disk, _)| disk))?;
        Ok(ReplayCluster { cluster, disk })
    }

    fn store(&self, args: &Args) -> Result<Store, BenchError> {
        self.cluster.store(|config| config.shm = !args.remote)
    }
}
