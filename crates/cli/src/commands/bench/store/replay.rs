//! `moontide bench trace`: replays KV-cache traffic, block by block, as engines would.
//!
//! For each request the leading blocks that are stored are got, up to the first that is not; the others are put. A block's
//! bytes follow from its hash, and a get is compared with them.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{GetInto, PutItem, PutOptions, Store};
use moontide_meta::Rng;
use moontide_types::ErrorCode;
use parking_lot::Mutex;

use super::super::figures::{BenchError, Line, Percentiles, io};
use super::super::transfer::wrong;
use super::cluster::{BenchCluster, Size};
use super::turns::percentiles;
use crate::text;
use crate::trace::{BlockHash, Reader, Request, Summary};

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench trace-gen --users 200 --requests 2000 --seed 1 -o chat.jsonl
  moontide bench trace chat.jsonl                       as fast as four engines go, 2 GiB of memory
  moontide bench trace chat.jsonl --engines 2 --memory 512MiB --remote
  moontide bench trace chat.jsonl --speed 10            ten times as fast as it was recorded

One JSON object on standard output:
  hit_rate, ideal_hit_rate   blocks that were stored, over blocks asked for; the same for a memory without end
  gb_per_s                   bytes got and put
  p50_us …                   one request: all of its gets and puts
  in_progress                puts that another engine was just doing
  failed                     gets and puts that ended with an error
  wrong                      blocks that did not hold what they should: there must be none";

/// What is replayed, and how.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// A trace of ours or of Mooncake; docs/trace.md describes the format.
    file: PathBuf,
    /// Engines that work at a time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    engines: u16,
    /// Memory for blocks.
    #[arg(long, value_name = "SIZE", value_parser = text::size, default_value = "2GiB")]
    memory: u64,
    /// So many times as fast as it was recorded; without it as fast as it goes.
    #[arg(long)]
    speed: Option<f64>,
    /// Over TCP instead of in memory of this host.
    #[arg(long)]
    remote: bool,
    /// Use a cluster that is there, by its master's gRPC address, instead of starting one.
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<String>,
    /// At most so many requests.
    #[arg(long)]
    requests: Option<usize>,
}

#[derive(Default)]
struct Counts {
    next: AtomicUsize,
    asked: AtomicU64,
    hits: AtomicU64,
    puts: AtomicU64,
    /// Blocks that another engine was putting at the same time.
    in_progress: AtomicU64,
    wrong: AtomicU64,
    failed: AtomicU64,
    nanos: Mutex<Vec<u32>>,
}

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let unread = |error| BenchError::Wrong(format!("{}: {error}", args.file.display()));
    let file = File::open(&args.file).map_err(io("opening the trace"))?;
    let reader = Reader::new(BufReader::with_capacity(1 << 20, file)).map_err(unread)?;
    let header = reader.header();
    let requests: Vec<Request> =
        reader.take(args.requests.unwrap_or(usize::MAX)).collect::<Result<_, _>>().map_err(unread)?;
    let mut summary = Summary::new(header);
    requests.iter().for_each(|request| summary.add(request));
    let cluster = match &args.master {
        Some(_) => None,
        None => Some(BenchCluster::start(Size { nodes: 1, node_bytes: args.memory, groups: 4 })?),
    };
    let store = match (&cluster, &args.master) {
        (Some(cluster), _) => cluster.store(|config| config.local = !args.remote)?,
        (None, master) => {
            let mut config =
                moontide_client::StoreConfig::new(master.clone().expect("no cluster was started"));
            config.local = !args.remote;
            Store::connect(config).map_err(wrong)?
        }
    };
    let counts = Counts::default();
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.engines {
            scope
                .spawn(|| engine(&store, &requests, header.block_bytes as usize, args.speed, began, &counts));
        }
        scope.spawn(|| {
            while counts.next.load(Ordering::Relaxed) < requests.len() {
                std::thread::sleep(Duration::from_millis(200));
                if began.elapsed().as_millis() % 1000 < 200 {
                    let done = counts.next.load(Ordering::Relaxed).min(requests.len());
                    eprintln!(
                        "  {done} of {} requests after {:.0} s",
                        requests.len(),
                        began.elapsed().as_secs_f64()
                    );
                }
            }
        });
    });
    let seconds = began.elapsed().as_secs_f64();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (asked, hits, puts) = (count(&counts.asked), count(&counts.hits), count(&counts.puts));
    let line = Line::new("trace", if args.remote { "remote" } else { "local" })
        .with("requests", requests.len())
        .with("blocks", asked)
        .number("hit_rate", hits as f64 / asked.max(1) as f64)
        .number("ideal_hit_rate", summary.ideal_hit_rate())
        .number("requests_per_s", requests.len() as f64 / seconds)
        .number("gb_per_s", ((hits + puts) * header.block_bytes) as f64 / seconds / 1e9)
        .with("in_progress", count(&counts.in_progress))
        .with("wrong", count(&counts.wrong))
        .with("failed", count(&counts.failed));
    percentiles(line, &Percentiles::new(std::mem::take(&mut counts.nanos.lock()))).print();
    match count(&counts.wrong) {
        0 => Ok(()),
        blocks => Err(wrong(format!("{blocks} blocks did not hold what they should"))),
    }
}

fn engine(
    store: &Store,
    requests: &[Request],
    bytes: usize,
    speed: Option<f64>,
    began: Instant,
    counts: &Counts,
) {
    loop {
        let at = counts.next.fetch_add(1, Ordering::Relaxed);
        let Some(request) = requests.get(at) else { return };
        if let Some(speed) = speed {
            let due = Duration::from_secs_f64(request.at_us as f64 / 1e6 / speed);
            std::thread::sleep(due.saturating_sub(began.elapsed()));
        }
        let started = Instant::now();
        serve(store, &request.blocks, bytes, counts);
        counts.nanos.lock().push(started.elapsed().as_nanos().min(u32::MAX.into()) as u32);
    }
}

/// Blocks that are got or put in one call.
const BATCH: usize = 32;

fn serve(store: &Store, blocks: &[BlockHash], bytes: usize, counts: &Counts) {
    counts.asked.fetch_add(blocks.len() as u64, Ordering::Relaxed);
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

/// The bytes of a block: cheap to make, different everywhere.
fn content(block: BlockHash, bytes: usize) -> Vec<u8> {
    let word = Rng::new(block.0).next_u64();
    let mut content = Vec::with_capacity(bytes + 8);
    for at in 0..bytes.div_ceil(8) as u64 {
        content.extend_from_slice(&word.wrapping_add(at).to_le_bytes());
    }
    content.truncate(bytes);
    content
}
