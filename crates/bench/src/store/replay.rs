//! `moontide bench trace`: replays KV-cache traffic, block by block, like inference engines.
//!
//! For each request it gets the leading stored blocks up to the first missing one, and puts the others. The bytes of a
//! block are derived from its hash; each get is compared with them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{GetInto, PutItem, PutOptions, Store};
use moontide_rt::SplitMix64;
use moontide_settings::parse_size;
use moontide_types::ErrorCode;
use parking_lot::Mutex;

use super::cluster::{BenchCluster, Size};
use crate::measure::{Percentiles, percentiles};
use crate::results::{BenchError, ResultRow, wrong};
use crate::trace::{BlockHash, Request, Summary, open, unread};

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench trace-gen --users 200 --requests 2000 --seed 1 -o chat.jsonl
  moontide bench trace chat.jsonl                       four engines at full speed, 2 GiB of memory
  moontide bench trace chat.jsonl --engines 2 --memory 512MiB --remote
  moontide bench trace chat.jsonl --speed 10            ten times the recorded speed

One JSON object on standard output:
  hit_rate, ideal_hit_rate   stored blocks / requested blocks; the same for an infinite cache
  gb_per_s                   bytes of gets and puts
  p50_us …                   one request: all of its gets and puts
  in_progress                puts that another engine was performing
  failed                     gets and puts that failed
  wrong                      blocks with wrong content; must be 0";

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
    /// Multiple of the recorded speed [default: full speed]
    #[arg(long)]
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

#[derive(Default)]
struct Counts {
    next: AtomicUsize,
    requested: AtomicU64,
    hits: AtomicU64,
    puts: AtomicU64,
    /// Puts that failed because another engine was putting the same block.
    in_progress: AtomicU64,
    wrong: AtomicU64,
    failed: AtomicU64,
    nanos: Mutex<Vec<u32>>,
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
    let cluster = match &args.master {
        Some(_) => None,
        None => Some(BenchCluster::start(Size { nodes: 1, node_bytes: args.memory, groups: 4 })?),
    };
    let store = match (&cluster, &args.master) {
        (Some(cluster), _) => cluster.store(|config| config.shm = !args.remote)?,
        (None, master) => {
            let mut config =
                moontide_client::StoreConfig::new(master.clone().expect("no cluster was started"));
            config.shm = !args.remote;
            Store::connect(config).map_err(wrong)?
        }
    };
    let counts = Counts::default();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.engines {
            scope.spawn(|| {
                engine(&store, &requests, header.block_bytes as usize, args.speed, started, &counts)
            });
        }
        scope.spawn(|| {
            while counts.next.load(Ordering::Relaxed) < requests.len() {
                std::thread::sleep(Duration::from_millis(200));
                if started.elapsed().as_millis() % 1000 < 200 {
                    let done = counts.next.load(Ordering::Relaxed).min(requests.len());
                    eprintln!(
                        "  {done} of {} requests after {:.0} s",
                        requests.len(),
                        started.elapsed().as_secs_f64()
                    );
                }
            }
        });
    });
    let seconds = started.elapsed().as_secs_f64();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (requested, hits, puts) = (count(&counts.requested), count(&counts.hits), count(&counts.puts));
    let line = ResultRow::new("trace", if args.remote { "remote" } else { "local" })
        .with("requests", requests.len())
        .with("blocks", requested)
        .number("hit_rate", hits as f64 / requested.max(1) as f64)
        .number("ideal_hit_rate", summary.ideal_hit_rate())
        .number("requests_per_s", requests.len() as f64 / seconds)
        .number("gb_per_s", ((hits + puts) * header.block_bytes) as f64 / seconds / 1e9)
        .with("in_progress", count(&counts.in_progress))
        .with("wrong", count(&counts.wrong))
        .with("failed", count(&counts.failed));
    percentiles(line, &Percentiles::new(std::mem::take(&mut counts.nanos.lock()))).print();
    match count(&counts.wrong) {
        0 => Ok(()),
        blocks => Err(wrong(format!("{blocks} blocks have wrong content"))),
    }
}

fn engine(
    store: &Store,
    requests: &[Request],
    bytes: usize,
    speed: Option<f64>,
    replay_started: Instant,
    counts: &Counts,
) {
    loop {
        let at = counts.next.fetch_add(1, Ordering::Relaxed);
        let Some(request) = requests.get(at) else { return };
        if let Some(speed) = speed {
            let due = Duration::from_secs_f64(request.at_us as f64 / 1e6 / speed);
            std::thread::sleep(due.saturating_sub(replay_started.elapsed()));
        }
        let started = Instant::now();
        serve(store, &request.blocks, bytes, counts);
        counts.nanos.lock().push(started.elapsed().as_nanos().min(u32::MAX.into()) as u32);
    }
}

/// Blocks per call.
const BATCH: usize = 32;

fn serve(store: &Store, blocks: &[BlockHash], bytes: usize, counts: &Counts) {
    counts.requested.fetch_add(blocks.len() as u64, Ordering::Relaxed);
    let keys: Vec<[u8; 8]> = blocks.iter().map(|block| block.0.to_le_bytes()).collect();
    let mut stored = 0;
    let mut memory = vec![vec![0u8; bytes]; BATCH.min(blocks.len())];
    'blocks: for (part, hashes) in keys.chunks(BATCH).zip(blocks.chunks(BATCH)) {
        let mut items: Vec<GetInto<'_>> =
            part.iter().zip(&mut memory).map(|(key, into)| GetInto { key, into }).collect();
        let lens = store.get_batch_into(&mut items);
        for ((len, block), memory) in lens.into_iter().zip(hashes).zip(&memory) {
            match len {
                Ok(Some(len)) => {
                    let right = len == bytes && *memory == content(*block, bytes);
                    counts.wrong.fetch_add((!right).into(), Ordering::Relaxed);
                    stored += 1;
                }
                Ok(None) => break 'blocks,
                Err(_) => {
                    counts.failed.fetch_add(1, Ordering::Relaxed);
                    break 'blocks;
                }
            }
        }
    }
    counts.hits.fetch_add(stored as u64, Ordering::Relaxed);
    for (part, hashes) in keys[stored..].chunks(BATCH).zip(blocks[stored..].chunks(BATCH)) {
        let values: Vec<Vec<u8>> = hashes.iter().map(|block| content(*block, bytes)).collect();
        let parts: Vec<[&[u8]; 1]> = values.iter().map(|value| [&value[..]]).collect();
        let items: Vec<PutItem<'_>> =
            part.iter().zip(&parts).map(|(key, parts)| PutItem { key, parts }).collect();
        for put in store.put_batch(&items, &PutOptions::default()) {
            match put {
                Ok(_) => counts.puts.fetch_add(1, Ordering::Relaxed),
                Err(error) if error.code() == ErrorCode::InProgress => {
                    counts.in_progress.fetch_add(1, Ordering::Relaxed)
                }
                Err(_) => counts.failed.fetch_add(1, Ordering::Relaxed),
            };
        }
    }
}

/// Returns the bytes of a block: cheap to compute, with no repetition.
fn content(block: BlockHash, bytes: usize) -> Vec<u8> {
    let word = SplitMix64::new(block.0).next_u64();
    let mut content = Vec::with_capacity(bytes + 8);
    for at in 0..bytes.div_ceil(8) as u64 {
        content.extend_from_slice(&word.wrapping_add(at).to_le_bytes());
    }
    content.truncate(bytes);
    content
}
