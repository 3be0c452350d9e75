//! Cost of single operations. Blocks are a few bytes each, so that only the bookkeeping is measured.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use moontide_blocks::{
    Attention, BlockHash, BlockPool, Cache, CacheConfig, CacheShape, DimOrder, Dtype, SequenceId, Token,
    block_hashes,
};
use moontide_rt::SplitMix64;

use super::Args;
use crate::measure::{median, relative_range};
use crate::results::{BenchError, Progress, ResultRow, wrong};

/// Target of allocating or freeing a block and of appending a token.
const OPERATION_NS: f64 = 100.0;
/// Target of a view.
const VIEW_NS: f64 = 50.0;

pub(super) const SMALL: CacheShape = CacheShape {
    layers: 1,
    block_tokens: 16,
    attention: Attention::Heads { kv_heads: 1, dim: 1 },
    dtype: Dtype::F8,
    order: DimOrder::TokenMajor,
};

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let blocks = if args.quick { 100_000 } else { 1_000_000 };
    for threads in [1, 2] {
        pool(args, blocks, threads);
    }
    cache(args, blocks)
}

/// Returns median and relative range over the repeats of the nanoseconds per operation; a run has `count` operations.
fn nanos(repeats: u64, count: u64, mut run: impl FnMut(u64) -> Instant) -> (f64, f64) {
    let values: Vec<f64> =
        (0..repeats).map(|repeat| run(repeat).elapsed().as_nanos() as f64 / count as f64).collect();
    (median(values.clone()), relative_range(&values))
}

/// Measures threads that each hold a share of the blocks and repeatedly free a random one and allocate another.
fn pool(args: &Args, blocks: u32, threads: u32) {
    let pool = BlockPool::new(blocks, blocks);
    let stack = Mutex::new((0..blocks).rev().collect::<Vec<_>>());
    let turns = if args.quick { 200_000 } else { 2_000_000 };
    let share = (blocks / 2 / threads) as usize;
    let side = |exchange: &(dyn Fn(&mut u32) + Sync), first: &(dyn Fn() -> u32 + Sync)| {
        nanos(args.repeats(), turns * 2, |repeat| {
            let mut held: Vec<Vec<u32>> =
                (0..threads).map(|_| (0..share).map(|_| first()).collect()).collect();
            let started = Instant::now();
            std::thread::scope(|scope| {
                for (thread, held) in held.iter_mut().enumerate() {
                    let mut rng = SplitMix64::new(args.seed ^ repeat << 8 ^ thread as u64);
                    scope.spawn(move || {
                        for _ in 0..turns {
                            let at = rng.index(held.len());
                            exchange(&mut held[at]);
                        }
                    });
                }
            });
            let took = Instant::now() - started.elapsed();
            for block in held.into_iter().flatten() {
                // Returns the block to the pool or to the baseline's stack; only one of them is in use at a time.
                if pool.is_taken(block) {
                    pool.free_blocks([block]);
                } else {
                    stack.lock().expect("not poisoned").push(block);
                }
            }
            took
        })
    };
    let take = || {
        let mut taken = 0;
        assert!(pool.alloc(1, |block| taken = block), "half of the blocks are free");
        taken
    };
    let ours = side(
        &|block| {
            pool.free_blocks([*block]);
            *block = take();
        },
        &take,
    );
    let pop = || stack.lock().expect("not poisoned").pop().expect("half of the blocks are free");
    let baseline = side(
        &|block| {
            stack.lock().expect("not poisoned").push(*block);
            *block = pop();
        },
        &pop,
    );
    ResultRow::new("blocks", "pool")
        .with("blocks", blocks)
        .with("threads", threads)
        .with_target("ns", ours.0, OPERATION_NS, false)
        .number("ns_range", ours.1)
        .number("mutex_ns", baseline.0)
        .number("million_per_s", f64::from(threads) * 1e3 / ours.0)
        .print();
}

fn cache(args: &Args, blocks: u32) -> Result<(), BenchError> {
    let (tokens, per) = (1024_usize, 64_u64);
    let sequences = blocks / 2 / per as u32;
    let config = CacheConfig { sequences_max: sequences + 1, ..CacheConfig::new(SMALL, blocks) };
    let mut cache = Cache::new(&config).map_err(wrong)?;
    let mut progress = Progress::new("allocating sequences", u64::from(sequences));
    // Half of the blocks are in use, by distinct prompts.
    let prompt = |n: u64| -> Vec<Token> {
        let own = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as Token;
        (0..tokens as Token).map(|at| own ^ at).collect()
    };
    let root = BlockHash::root("", "");
    let mut ids: Vec<SequenceId> = Vec::new();
    for n in 0..u64::from(sequences) {
        ids.push(begin(&mut cache, &prompt(n), root)?);
        progress.at(n);
    }
    let mut rng = SplitMix64::new(args.seed);
    shuffle(&mut ids, &mut rng);

    // Hashing alone.
    let count = if args.quick { 500 } else { 5_000 };
    let (hash_ns, _) = nanos(args.repeats(), count * per, |repeat| {
        let prompts: Vec<_> = (0..count).map(|n| prompt(1 << 40 ^ repeat << 20 ^ n)).collect();
        let started = Instant::now();
        for prompt in &prompts {
            black_box(block_hashes(root, prompt, 16).last());
        }
        started
    });
    let line = |case| ResultRow::new("blocks", case).with("blocks", blocks).with("sequences", sequences);
    // Some sequences are freed and new ones allocated, which share nothing. The first round uses free blocks; the
    // second round must evict cached prefixes that no sequence uses.
    let mut fresh = u64::from(sequences);
    for evicting in [false, true] {
        let (mut freed, mut allocated) = (Vec::new(), Vec::new());
        if evicting {
            append_and_view(args, &mut cache, &ids, &mut rng, line)?;
            fill_up(&mut cache, |n| prompt(1 << 24 ^ n), root)?;
        }
        let turns = u64::from(sequences) / 2 / args.repeats();
        for _ in 0..args.repeats() {
            let freed_ids = ids.split_off(ids.len() - turns.min(count) as usize);
            let prompts: Vec<_> = (fresh..).take(freed_ids.len()).map(prompt).collect();
            fresh += freed_ids.len() as u64;
            let blocks = (freed_ids.len() as u64 * per) as f64;
            let started = Instant::now();
            for id in &freed_ids {
                cache.free(*id).map_err(wrong)?;
            }
            freed.push(started.elapsed().as_nanos() as f64 / blocks);
            let started = Instant::now();
            let mut new_ids = Vec::with_capacity(freed_ids.len());
            for prompt in &prompts {
                new_ids.push(cache.allocate(prompt, root).map_err(wrong)?.id);
            }
            allocated.push(started.elapsed().as_nanos() as f64 / blocks - hash_ns);
            for id in new_ids.drain(..) {
                complete(&mut cache, id)?;
                ids.insert(0, id);
            }
        }
        let line = |case| line(case).with("evicting", evicting);
        line("free")
            .with_target("ns", median(freed.clone()), OPERATION_NS, false)
            .number("ns_range", relative_range(&freed))
            .print();
        let allocate = median(allocated.clone());
        let allocate = match evicting {
            false => line("allocate").with_target("ns", allocate, OPERATION_NS, false),
            true => line("allocate").number("ns", allocate),
        };
        allocate.number("ns_range", relative_range(&allocated)).number("hash_ns", hash_ns).print();
    }

    Ok(())
}

fn append_and_view(
    args: &Args,
    cache: &mut Cache,
    ids: &[SequenceId],
    rng: &mut SplitMix64,
    line: impl Fn(&'static str) -> ResultRow,
) -> Result<(), BenchError> {
    // A decode batch: one token per sequence and step.
    let batch = &ids[..256.min(ids.len())];
    let steps = if args.quick { 64 } else { 640 };
    let count = (steps * batch.len()) as u64;
    let mut failed = None;
    let append = nanos(args.repeats(), count, |_| {
        let started = Instant::now();
        for step in 0..steps {
            for id in batch {
                failed = failed.take().or(cache.append(*id, step as Token).err());
            }
        }
        started
    });
    if let Some(error) = failed {
        return Err(wrong(error));
    }
    for id in batch {
        complete(cache, *id)?;
    }
    line("append").with_target("ns", append.0, OPERATION_NS, false).number("ns_range", append.1).print();

    let order: Vec<SequenceId> = (0..100_000).map(|_| ids[rng.index(ids.len())]).collect();
    let count = order.len() as u64;
    let own = nanos(args.repeats(), count, |_| {
        let started = Instant::now();
        for id in &order {
            black_box(cache.view(*id).map_or(0, |view| view.tokens()));
        }
        started
    });
    let mut reader = cache.reader().map_err(wrong)?;
    let entered = nanos(args.repeats(), count, |_| {
        let started = Instant::now();
        for step in order.chunks(256) {
            // A step of an inference engine: enters once, takes many views.
            let guard = reader.enter();
            for id in step {
                black_box(guard.view(*id).map_or(0, |view| view.tokens()));
            }
        }
        started
    });
    line("view")
        .with_target("ns", own.0, VIEW_NS, false)
        .number("ns_range", own.1)
        .with_second_target("reader_ns", entered.0, VIEW_NS, false)
        .print();
    Ok(())
}

/// Fills all free blocks with cached prefixes that no sequence uses.
fn fill_up(cache: &mut Cache, prompt: impl Fn(u64) -> Vec<Token>, root: BlockHash) -> Result<(), BenchError> {
    for n in 0.. {
        if cache.stats().free < 64 {
            break;
        }
        // As many as fit at a time: `stats` is slow.
        for at in 0..u64::from(cache.stats().free / 64).max(1) {
            let id = begin(cache, &prompt(n << 20 ^ at), root)?;
            cache.free(id).map_err(wrong)?;
        }
    }
    Ok(())
}

/// Allocates a sequence and completes its prompt.
fn begin(cache: &mut Cache, prompt: &[Token], root: BlockHash) -> Result<SequenceId, BenchError> {
    let id = cache.allocate(prompt, root).map_err(wrong)?.id;
    complete(cache, id)?;
    Ok(id)
}

/// Marks all tokens as written; no rows are written, as none are read.
pub(super) fn complete(cache: &mut Cache, id: SequenceId) -> Result<(), BenchError> {
    let mut fill = cache.writer(id).map_err(wrong)?;
    fill.mark_written(fill.tokens().len());
    cache.commit(fill).map_err(wrong)
}

fn shuffle<T>(all: &mut [T], rng: &mut SplitMix64) {
    for at in (1..all.len()).rev() {
        all.swap(at, rng.index(at + 1));
    }
}
