//! `moontide bench write-back`: what the write of every object to disk after its put costs the puts.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::Store;

use super::cluster::{BenchCluster, Disk, OffloadTrigger, Size};
use super::{BenchEffort, random_bytes};
use crate::measure::{Run, compared, interleave, median, timed};
use crate::results::{BenchError, Progress, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;
use moontide_settings::parse_size;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench write-back --dir /mnt/ssd               puts of 1 MiB, at full speed and at 256 MiB per second; half a minute
  moontide bench write-back --sizes 1M,16M --rate 1GiB     other sizes, and another rate
  moontide bench write-back --quick

Two clusters of one node each, with the same disk: one writes objects to disk when they leave memory, the other one after
each put (`moontide master --offload put`). The objects are removed after each measurement. Every result is one JSON object per
line on standard output:
  case             full-speed: one put after the other; paced: puts at --rate
  gb_per_s         bytes / time in put, with write-back; baseline: without
  ratio            gb_per_s / baseline, median of the repeats
  written          share of the bytes that were on disk when the last put ended
  durable_gb_per_s bytes / time from the first put until all were on disk";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    effort: BenchEffort,
    /// Bytes per second of the paced puts, e.g. 1GiB
    #[arg(long, default_value = "256MiB", value_parser = parse_size)]
    rate: u64,
    /// Directory for the disks of the nodes; new subdirectories are removed at the end [default: the temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Memory of each node. A measurement puts less.
const NODE_BYTES: u64 = 8 << 30;

const STAGING_BYTES: u64 = 64 << 20;

/// Most a write-back may take from the rate of puts.
const TARGET: f64 = 0.9;

/// Longest time until all objects are on disk.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// Pause between two looks at the node's counters.
const POLL: Duration = Duration::from_millis(10);

/// A cluster with one trigger of offloads.
struct Side {
    store: Store,
    offload: OffloadTrigger,
    /// Dropped before the directory of its disk.
    cluster: BenchCluster,
    _dir: Scratch,
}

/// What a measurement with write-back has written.
#[derive(Clone, Copy, Debug)]
struct Written {
    /// Share of the bytes that were on disk when the last put ended.
    share: f64,
    /// Bytes per second from the first put until all are on disk.
    durable_bytes_per_s: f64,
}

impl Side {
    fn start(args: &Args, offload: OffloadTrigger) -> Result<Side, BenchError> {
        let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let name = format!("moontide-bench-write-back-{}", offload.name());
        let dir = Scratch::new(&parent, &name).map_err(io("creating a directory"))?;
        let limit_bytes = 2 * NODE_BYTES;
        let disk = Disk { dir: dir.path().into(), limit_bytes, staging_bytes: STAGING_BYTES, offload };
        let size = Size { nodes: 1, node_bytes: NODE_BYTES, groups: 1 };
        let cluster = BenchCluster::start_with_disk(size, Some(&disk))?;
        let store = cluster.store(|_| ())?;
        Ok(Side { store, offload, cluster, _dir: dir })
    }

    fn written_bytes(&self) -> Result<f64, BenchError> {
        self.cluster.node_metric("moontide_node_disk_offloaded_bytes_total")
    }

    /// Puts objects for the time of a measurement, and removes them when they are on disk, if they are to be. `rate`: most
    /// bytes per second.
    fn puts(
        &self,
        content: &[u8],
        rate: Option<u64>,
        effort: &BenchEffort,
    ) -> Result<(Run, Option<Written>), BenchError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let before = self.written_bytes()?;
        let started = Instant::now();
        let (mut puts, mut in_puts) = (0u64, Vec::new());
        let bytes_max = NODE_BYTES / 2;
        let put = || {
            if let Some(rate) = rate {
                let due = Duration::from_secs_f64((puts * content.len() as u64) as f64 / rate as f64);
                std::thread::sleep(due.saturating_sub(started.elapsed()));
            }
            puts += 1;
            if puts * content.len() as u64 > bytes_max {
                return Err(wrong("the memory of the node is too small for --seconds"));
            }
            let key = format!("write-back-{}", NEXT.fetch_add(1, Ordering::Relaxed));
            let began = Instant::now();
            self.store.put(key.as_bytes(), content).map_err(wrong)?;
            in_puts.push(began.elapsed().as_nanos().min(u32::MAX.into()) as u32);
            Ok(())
        };
        let mut run = timed(vec![put], effort.span(), content.len() as u64)?;
        let written = match self.offload {
            OffloadTrigger::Put => Some(self.drain(before, run.bytes as f64, started)?),
            OffloadTrigger::Evict => None,
        };
        self.store.remove_all(true).map_err(wrong)?;
        // Without the pauses of paced puts.
        let seconds: f64 = in_puts.iter().map(|nanos| f64::from(*nanos) / 1e9).sum();
        run.bytes_per_s = run.bytes as f64 / seconds;
        run.nanos = in_puts;
        Ok((run, written))
    }

    /// Waits until the disk has these bytes more than `before`: the other side must not share it.
    fn drain(&self, before: f64, bytes: f64, started: Instant) -> Result<Written, BenchError> {
        let written = || self.written_bytes().map(|total| total - before);
        let share = (written()? / bytes).min(1.0);
        while written()? < bytes {
            if started.elapsed() > DRAIN_MAX {
                return Err(wrong(format!("not all objects are on disk after {DRAIN_MAX:?}")));
            }
            std::thread::sleep(POLL);
        }
        Ok(Written { share, durable_bytes_per_s: bytes / started.elapsed().as_secs_f64() })
    }
}

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let effort = &args.effort;
    if args.rate == 0 {
        return Err(wrong("--rate must not be 0"));
    }
    let sizes = effort.sizes.clone().unwrap_or_else(|| vec![1 << 20]);
    let sides = [Side::start(args, OffloadTrigger::Put)?, Side::start(args, OffloadTrigger::Evict)?];
    let mut progress = Progress::new(format!("write-back, {} sizes", sizes.len()), 2 * sizes.len() as u64);
    let mut done = 0;
    for bytes in sizes {
        let content = random_bytes(effort.seed, bytes as usize);
        for (case, rate) in [("full-speed", None), ("paced", Some(args.rate))] {
            // The first accesses to memory are not measured.
            sides.iter().try_for_each(|side| side.puts(&content, rate, effort).map(drop))?;
            let (mut shares, mut durable) = (vec![], vec![]);
            let [eager, baseline] = interleave(effort.repeats(), |side, _| {
                let (run, written) = sides[side].puts(&content, rate, effort)?;
                shares.extend(written.map(|written| written.share));
                durable.extend(written.map(|written| written.durable_bytes_per_s / 1e9));
                Ok(run)
            })?;
            let line = ResultRow::new("write-back", case)
                .with("bytes", bytes)
                .number("written", median(shares))
                .number("durable_gb_per_s", median(durable));
            compared(line, &eager, &baseline, Some(TARGET)).print();
            done += 1;
            progress.at(done);
        }
    }
    if effort.gate { check_gates() } else { Ok(()) }
}
