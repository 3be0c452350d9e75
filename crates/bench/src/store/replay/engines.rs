//! Inference engines that process the requests of a trace.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{GetInto, PutItem, PutOptions, Store};
use moontide_rt::SplitMix64;
use moontide_types::ErrorCode;
use parking_lot::Mutex;

use crate::results::Progress;
use crate::trace::{BlockHash, Request};

/// What the engines have done.
#[derive(Default)]
pub(super) struct Counts {
    next: AtomicUsize,
    pub(super) requested: AtomicU64,
    pub(super) hits: AtomicU64,
    pub(super) puts: AtomicU64,
    /// Puts that failed because another engine was putting the same block.
    pub(super) in_progress: AtomicU64,
    pub(super) wrong: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) nanos: Mutex<Vec<u32>>,
}

impl Counts {
    /// Stored blocks / requested blocks.
    pub(super) fn hit_rate(&self) -> f64 {
        let [hits, requested] = [&self.hits, &self.requested].map(|count| count.load(Ordering::Relaxed));
        hits as f64 / requested.max(1) as f64
    }
}

/// A trace, and how it is replayed.
pub(super) struct Replay {
    pub(super) requests: Vec<Request>,
    pub(super) block_bytes: usize,
    pub(super) engines: u16,
    /// Multiple of the recorded speed; `None`: full speed.
    pub(super) speed: Option<f64>,
}

impl Replay {
    /// Has the engines process a part of the requests.
    pub(super) fn run(&self, store: &Store, part: std::ops::Range<usize>) -> Counts {
        let counts = Counts::default();
        let (started, requests) = (Instant::now(), &self.requests[part]);
        std::thread::scope(|scope| {
            for _ in 0..self.engines {
                scope.spawn(|| self.run_engine(store, requests, started, &counts));
            }
            scope.spawn(|| {
                let mut progress = Progress::new("replay", requests.len() as u64);
                while counts.next.load(Ordering::Relaxed) < requests.len() {
                    std::thread::sleep(Duration::from_millis(10));
                    progress.at(counts.next.load(Ordering::Relaxed).min(requests.len()) as u64);
                }
            });
        });
        counts
    }

    fn run_engine(&self, store: &Store, requests: &[Request], started: Instant, counts: &Counts) {
        let first_us = requests.first().map_or(0, |request| request.at_us);
        loop {
            let at = counts.next.fetch_add(1, Ordering::Relaxed);
            let Some(request) = requests.get(at) else { return };
            if let Some(speed) = self.speed {
                let due = Duration::from_secs_f64((request.at_us - first_us) as f64 / 1e6 / speed);
                std::thread::sleep(due.saturating_sub(started.elapsed()));
            }
            let started = Instant::now();
            serve(store, &request.blocks, self.block_bytes, counts);
            counts.nanos.lock().push(started.elapsed().as_nanos().min(u32::MAX.into()) as u32);
        }
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
