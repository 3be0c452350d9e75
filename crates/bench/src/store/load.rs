//! `moontide bench load`: objects on the disk of another process, over TCP on loopback, compared with plain file reads
//! and plain sockets.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Args as ClapArgs;
use moontide_client::{GetInto, Store};
use moontide_disk::{
    AlignedBuf, Buffer, File, IoEngine, Op, OpKind, OpenMode, OsStorage, Queue, QueueConfig, Storage, run_all,
};
use moontide_rt::SplitMix64;
use moontide_types::Medium;

use super::cluster::{BenchCluster, Disk, OffloadTrigger, Size};
use super::remote::BaselineProcess;
use super::{BenchEffort, random_bytes};
use crate::measure::{Run, RunSeries, interleave, median, percentiles, relative_range, timed};
use crate::results::{BenchError, Progress, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench load --dir /mnt/ssd/try          gets of objects that are only on disk; a few minutes, 4 GiB of disk space
  moontide bench load --quick                     one size, half a minute; less precise
  moontide bench load --sizes 1M --seconds 1
  moontide bench load --same-host                 the client maps the memory of the node

Every result is one JSON object per line on standard output. The objects far exceed the memory and staging memory of the
node, and each is read again only after all others. Baselines, measured alternately: reads of as many bytes from the
files of the node without checks (disk), and transfers over plain blocking sockets, or plain copies in memory with
--same-host (transfer).
  get              one caller, one object at a time
  get_batch        one caller, 16 objects at a time
  get, callers 4   four callers, one object at a time each
  ratio            store / the slower of disk and transfer, median of the repeats";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    effort: BenchEffort,
    /// Directory for the node's disk; a new subdirectory is removed at the end [default: the temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Map the memory of the node, as processes of its host do, instead of TCP
    #[arg(long)]
    same_host: bool,
}

/// Objects per batch.
const BATCH: usize = 16;

/// Bytes per read of the disk, as in the reader of the node.
const PIECE: usize = 256 << 10;

/// Staging memory: small, so that few records are found there again.
const STAGING_BYTES: u64 = 128 << 20;

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let effort = &args.effort;
    let set_bytes = if effort.quick { 1 << 30 } else { 4 << 30 };
    let sizes = match (&effort.sizes, effort.quick) {
        (Some(sizes), _) => sizes.clone(),
        (None, true) => vec![1 << 20],
        (None, false) => vec![256 << 10, 1 << 20, 4 << 20],
    };
    let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let mut progress = Progress::new(format!("load, {} sizes", sizes.len()), sizes.len() as u64);
    for (done, &bytes) in sizes.iter().enumerate() {
        let dir = Scratch::new(&parent, "moontide-bench-load").map_err(io("creating a directory"))?;
        let limit_bytes = 2 * set_bytes;
        let offload = OffloadTrigger::Evict;
        let disk = Disk { dir: dir.path().into(), limit_bytes, staging_bytes: STAGING_BYTES, offload };
        let size = Size { nodes: 1, node_bytes: set_bytes / 8, groups: 1 };
        let cluster = BenchCluster::start_with_disk(size, Some(&disk))?;
        let store = cluster.store(|config| config.shm = args.same_host)?;
        let keys = fill(&store, bytes, set_bytes, effort.seed)?;
        let baseline = BaselineProcess::start(bytes, effort)?;
        let files = Files::open(dir.path())?;
        for (case, callers, batch) in [("get", 1, 1), ("get_batch", 1, BATCH), ("get", 4, 1)] {
            let sides = interleave(effort.repeats(), |side, repeat| match side {
                0 => gets(&store, &keys, bytes, callers, batch, effort),
                1 => files.run(bytes, callers, batch, repeat, effort),
                _ if args.same_host => copies(bytes, callers, effort),
                _ => baseline.run(false, false, callers, repeat, effort),
            });
            let [ours, disk, transfer] = sides?;
            let line = ResultRow::new("load", case).with("bytes", bytes).with("callers", callers);
            print(line, &ours, &disk, &transfer);
        }
        progress.at(done as u64 + 1);
    }
    if effort.gate { check_gates() } else { Ok(()) }
}

/// Copies of objects within the memory of this process.
fn copies(bytes: u64, callers: usize, effort: &BenchEffort) -> Result<Run, BenchError> {
    let len = bytes as usize;
    let source = random_bytes(effort.seed, effort.set_bytes() as usize);
    let movers = (0..callers).map(|caller| {
        let mut rng = SplitMix64::new(effort.seed ^ caller as u64);
        let (source, mut memory) = (&source, vec![1u8; len]);
        move || {
            let at = rng.index(source.len() / len) * len;
            memory.copy_from_slice(&source[at..at + len]);
            std::hint::black_box(&memory);
            Ok(())
        }
    });
    timed(movers.collect(), effort.span(), bytes)
}

fn print(line: ResultRow, ours: &RunSeries, disk: &RunSeries, transfer: &RunSeries) {
    let (over_disk, over_transfer) = (ours.over(disk), ours.over(transfer));
    // The larger ratio is the one to the slower baseline.
    let ratios: Vec<f64> = over_disk.iter().zip(&over_transfer).map(|(disk, wire)| disk.max(*wire)).collect();
    let line = line
        .number("gb_per_s", ours.rate() / 1e9)
        .number("disk_gb_per_s", disk.rate() / 1e9)
        .number("transfer_gb_per_s", transfer.rate() / 1e9)
        .with_target("ratio", median(ratios.clone()), 0.8, true)
        .number("ratio_range", relative_range(&ratios));
    percentiles(line, &ours.took()).print();
}

/// Puts `set_bytes` of objects, and returns the keys of those that are only on disk.
fn fill(store: &Store, bytes: u64, set_bytes: u64, seed: u64) -> Result<Vec<String>, BenchError> {
    let content = random_bytes(seed, bytes as usize);
    let keys: Vec<String> = (0..set_bytes / bytes).map(|n| format!("load-{bytes}-{n}")).collect();
    for key in &keys {
        store.put(key.as_bytes(), &content).map_err(wrong)?;
    }
    let mut on_disk = Vec::with_capacity(keys.len());
    for key in keys {
        let info = store.stat(key.as_bytes()).map_err(wrong)?;
        let info = info.ok_or_else(|| wrong("an object is missing after its put"))?;
        if info.stripes.iter().all(|stripe| stripe.medium == Medium::Disk) {
            on_disk.push(key);
        }
    }
    if (on_disk.len() as u64) < set_bytes / bytes / 2 {
        return Err(wrong(format!("only {} objects are on disk", on_disk.len())));
    }
    Ok(on_disk)
}

fn gets(
    store: &Store,
    keys: &[String],
    bytes: u64,
    callers: usize,
    batch: usize,
    effort: &BenchEffort,
) -> Result<Run, BenchError> {
    // In a fixed order over all runs: an object is read again only after all others.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let len = bytes as usize;
    let movers = (0..callers).map(|_| {
        let mut memory = vec![1u8; len * batch];
        move || {
            let first = NEXT.fetch_add(batch, Ordering::Relaxed);
            let key = |n: usize| keys[(first + n) % keys.len()].as_bytes();
            if batch == 1 {
                let found = store.get_into(key(0), &mut memory).map_err(wrong)?;
                return if found == Some(len) { Ok(()) } else { Err(wrong("an object is missing")) };
            }
            let parts = memory.chunks_exact_mut(len).enumerate();
            let mut items: Vec<GetInto<'_>> = parts.map(|(n, into)| GetInto { key: key(n), into }).collect();
            for found in store.get_batch_into(&mut items) {
                if found.map_err(wrong)? != Some(len) {
                    return Err(wrong("an object is missing"));
                }
            }
            Ok(())
        }
    });
    timed(movers.collect(), effort.span(), bytes * batch as u64)
}

/// Files of the node, read without checks.
struct Files {
    storage: Arc<OsStorage>,
    files: Vec<(File, u64)>,
}

impl Files {
    fn open(dir: &Path) -> Result<Files, BenchError> {
        let storage = OsStorage::open(dir, IoEngine::Auto).map_err(io("opening the disk's directory"))?;
        let mut files = Vec::new();
        for entry in storage.list(Path::new("")).map_err(io("listing the disk's directory"))? {
            if entry.name.ends_with(".bucket") {
                let file =
                    storage.open(Path::new(&entry.name), OpenMode::Read).map_err(io("opening a file"))?;
                files.push((file, entry.len));
            }
        }
        if files.is_empty() {
            return Err(wrong("node has written no files"));
        }
        Ok(Files { storage: Arc::new(storage), files })
    }

    fn run(
        &self,
        bytes: u64,
        callers: usize,
        batch: usize,
        seed: u64,
        effort: &BenchEffort,
    ) -> Result<Run, BenchError> {
        let movers = (0..callers).map(|caller| {
            let mut queue: Box<dyn Queue> = self.storage.queue(&QueueConfig::default());
            let mut rng = SplitMix64::new(seed << 8 | caller as u64);
            let piece = PIECE.min(bytes as usize);
            let pieces = (bytes as usize / piece).max(1);
            let mut free_buffers: Vec<AlignedBuf> =
                (0..pieces * batch).map(|_| AlignedBuf::zeroed(piece)).collect();
            move || {
                let mut ops = Vec::with_capacity(free_buffers.len());
                for _ in 0..batch {
                    let (file, len) = &self.files[rng.index(self.files.len())];
                    let offsets = (len.saturating_sub(bytes) / 4096).max(1);
                    let start = rng.index(offsets as usize) as u64 * 4096;
                    for at in 0..pieces {
                        let buffer = free_buffers.pop().map_or(Buffer::None, Buffer::Owned);
                        let offset = start + (at * piece) as u64;
                        ops.push(Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer });
                    }
                }
                for done in run_all(&mut *queue, ops) {
                    done.result.map_err(io("reading from the disk"))?;
                    if let Buffer::Owned(buffer) = done.buffer {
                        free_buffers.push(buffer);
                    }
                }
                Ok(())
            }
        });
        timed(movers.collect(), effort.span(), bytes * batch as u64)
    }
}
