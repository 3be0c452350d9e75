//! What single operations cost. Blocks are a few bytes each, so that what is measured is the book-keeping.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use moontide_blocks::{
    Attention, BlockHash, Cache, CacheConfig, Dtype, Order, Pool, SequenceId, Shape, Token, chain,
};
use moontide_meta::Rng;

use super::super::figures::{BenchError, Line, Progress, median, spread};
use super::super::transfer::wrong;
use super::Args;

/// What taking or giving back a block, or a token more, may take.
const OPERATION_NS: f64 = 100.0;
/// What a view may take.
const VIEW_NS: f64 = 50.0;

pub(super) const SMALL: Shape = Shape {
    layers: 1,
    block_tokens: 16,
    attention: Attention::Heads { kv_heads: 1, dim: 1 },
    dtype: Dtype::F8,
    order: Order::TokenMajor,
};

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let blocks = if args.quick { 100_000 } else { 1_000_000 };
    for threads in [1, 2] {
        pool(args, blocks, threads);
    }
    cache(args, blocks)
}

/// Nanoseconds of one of `count`, as the middle of some attempts.
fn nanos(repeats: u64, count: u64, mut run: impl FnMut(u64) -> Instant) -> (f64, f64) {
    let figures: Vec<f64> =
        (0..repeats).map(|repeat| run(repeat).elapsed().as_nanos() as f64 / count as f64).collect();
    (median(figures.clone()), spread(&figures))
}

/// Threads that each have a share of the blocks, and give one back and take one, in no order.
fn pool(args: &Args, blocks: u32, threads: u32) {
    let pool = Pool::new(blocks, blocks);
    let stack = Mutex::new((0..blocks).rev().collect::<Vec<_>>());
    let turns = if args.quick { 200_000 } else { 2_000_000 };
    let share = (blocks / 2 / threads) as usize;
    let side = |exchange: &(dyn Fn(&mut u32) + Sync), first: &(dyn Fn() -> u32 + Sync)| {
        nanos(args.repeats(), turns * 2, |repeat| {
            let mut held: Vec<Vec<u32>> =
                (0..threads).map(|_| (0..share).map(|_| first()).collect()).collect();
            let began = Instant::now();
            std::thread::scope(|scope| {
                for (thread, held) in held.iter_mut().enumerate() {
                    let mut rng = Rng::new(args.seed ^ repeat << 8 ^ thread as u64);
                    scope.spawn(move || {
                        for _ in 0..turns {
                            let at = rng.below(held.len());
                            exchange(&mut held[at]);
                        }
                    });
                }
            });
            let took = Instant::now() - began.elapsed();
            for block in held.into_iter().flatten() {
                // Both sides are emptied and filled: the other has nothing taken.
                if pool.is_taken(block) {
                    pool.give([block]);
                } else {
                    stack.lock().expect("nobody panicked").push(block);
                }
            }
            took
        })
    };
    let take = || {
        let mut taken = 0;
        assert!(pool.take(1, |block| taken = block), "half of the blocks are free");
        taken
    };
    let ours = side(
        &|block| {
            pool.give([*block]);
            *block = take();
        },
        &take,
    );
    let pop = || stack.lock().expect("nobody panicked").pop().expect("half of the blocks are free");
    let bare = side(
        &|block| {
            stack.lock().expect("nobody panicked").push(*block);
            *block = pop();
        },
        &pop,
    );
    Line::new("blocks", "pool")
        .with("blocks", blocks)
        .with("threads", threads)
        .against("ns", ours.0, OPERATION_NS, false)
        .number("ns_spread", ours.1)
        .number("mutex_ns", bare.0)
        .number("million_per_s", f64::from(threads) * 1e3 / ours.0)
        .print();
}

fn cache(args: &Args, blocks: u32) -> Result<(), BenchError> {
    let (tokens, per) = (1024_usize, 64_u64);
    let sequences = blocks / 2 / per as u32;
    let config = CacheConfig { sequences_max: sequences + 1, ..CacheConfig::new(SMALL, blocks) };
    let mut cache = Cache::new(&config).map_err(wrong)?;
    let mut progress = Progress::new("allocating sequences", u64::from(sequences));
    // Half of the blocks are in use, by as many different prompts.
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
    let mut rng = Rng::new(args.seed);
    shuffle(&mut ids, &mut rng);

    // Naming alone, without anything else.
    let count = if args.quick { 500 } else { 5_000 };
    let (hash_ns, _) = nanos(args.repeats(), count * per, |repeat| {
        let prompts: Vec<_> = (0..count).map(|n| prompt(1 << 40 ^ repeat << 20 ^ n)).collect();
        let began = Instant::now();
        for prompt in &prompts {
            black_box(chain(root, prompt, 16).last());
        }
        began
    });
    let line = |case| Line::new("blocks", case).with("blocks", blocks).with("sequences", sequences);
    // Some sequences go, and new ones come, which share nothing: at first there are free blocks for them, and later only
    // those of prefixes that nobody uses, which are given up.
    let mut fresh = u64::from(sequences);
    for evicting in [false, true] {
        let (mut freed, mut allocated) = (Vec::new(), Vec::new());
        if evicting {
            append_and_view(args, &mut cache, &ids, &mut rng, line)?;
            fill_up(&mut cache, |n| prompt(1 << 24 ^ n), root)?;
        }
        let turns = u64::from(sequences) / 2 / args.repeats();
        for _ in 0..args.repeats() {
            let going = ids.split_off(ids.len() - turns.min(count) as usize);
            let prompts: Vec<_> = (fresh..).take(going.len()).map(prompt).collect();
            fresh += going.len() as u64;
            let blocks = (going.len() as u64 * per) as f64;
            let began = Instant::now();
            for id in &going {
                cache.free(*id).map_err(wrong)?;
            }
            freed.push(began.elapsed().as_nanos() as f64 / blocks);
            let began = Instant::now();
            let mut came = Vec::with_capacity(going.len());
            for prompt in &prompts {
                came.push(cache.allocate(prompt, root).map_err(wrong)?.id);
            }
            allocated.push(began.elapsed().as_nanos() as f64 / blocks - hash_ns);
            for id in came.drain(..) {
                complete(&mut cache, id)?;
                ids.insert(0, id);
            }
        }
        let line = |case| line(case).with("evicting", evicting);
        line("free")
            .against("ns", median(freed.clone()), OPERATION_NS, false)
            .number("ns_spread", spread(&freed))
            .print();
        let allocate = median(allocated.clone());
        let allocate = match evicting {
            false => line("allocate").against("ns", allocate, OPERATION_NS, false),
            true => line("allocate").number("ns", allocate),
        };
        allocate.number("ns_spread", spread(&allocated)).number("hash_ns", hash_ns).print();
    }

    Ok(())
}

fn append_and_view(
    args: &Args,
    cache: &mut Cache,
    ids: &[SequenceId],
    rng: &mut Rng,
    line: impl Fn(&'static str) -> Line,
) -> Result<(), BenchError> {
    // So many sequences decode at a time, a token each in turn.
    let batch = &ids[..256.min(ids.len())];
    let steps = if args.quick { 64 } else { 640 };
    let count = (steps * batch.len()) as u64;
    let mut failed = None;
    let append = nanos(args.repeats(), count, |_| {
        let began = Instant::now();
        for step in 0..steps {
            for id in batch {
                failed = failed.take().or(cache.append(*id, step as Token).err());
            }
        }
        began
    });
    if let Some(error) = failed {
        return Err(wrong(error));
    }
    for id in batch {
        complete(cache, *id)?;
    }
    line("append").against("ns", append.0, OPERATION_NS, false).number("ns_spread", append.1).print();

    let order: Vec<SequenceId> = (0..100_000).map(|_| ids[rng.below(ids.len())]).collect();
    let count = order.len() as u64;
    let own = nanos(args.repeats(), count, |_| {
        let began = Instant::now();
        for id in &order {
            black_box(cache.view(*id).map_or(0, |view| view.tokens()));
        }
        began
    });
    let mut reader = cache.reader().map_err(wrong)?;
    let entered = nanos(args.repeats(), count, |_| {
        let began = Instant::now();
        for step in order.chunks(256) {
            // A step of the engine: in once, many views.
            let guard = reader.enter();
            for id in step {
                black_box(guard.view(*id).map_or(0, |view| view.tokens()));
            }
        }
        began
    });
    line("view")
        .against("ns", own.0, VIEW_NS, false)
        .number("ns_spread", own.1)
        .also_against("reader_ns", entered.0, VIEW_NS, false)
        .print();
    Ok(())
}

/// Leaves nothing free: prefixes that nobody uses are everywhere.
fn fill_up(cache: &mut Cache, prompt: impl Fn(u64) -> Vec<Token>, root: BlockHash) -> Result<(), BenchError> {
    for n in 0.. {
        if cache.stats().free < 64 {
            break;
        }
        // As many as there is room for at a time: looking at everything takes long.
        for at in 0..u64::from(cache.stats().free / 64).max(1) {
            let id = begin(cache, &prompt(n << 20 ^ at), root)?;
            cache.free(id).map_err(wrong)?;
        }
    }
    Ok(())
}

/// A sequence whose prompt is complete.
fn begin(cache: &mut Cache, prompt: &[Token], root: BlockHash) -> Result<SequenceId, BenchError> {
    let id = cache.allocate(prompt, root).map_err(wrong)?.id;
    complete(cache, id)?;
    Ok(id)
}

/// All its tokens have their rows; nothing is written, as nobody reads them.
pub(super) fn complete(cache: &mut Cache, id: SequenceId) -> Result<(), BenchError> {
    let mut fill = cache.fill(id).map_err(wrong)?;
    fill.complete(fill.tokens().len());
    cache.commit(fill).map_err(wrong)
}

fn shuffle<T>(all: &mut [T], rng: &mut Rng) {
    for at in (1..all.len()).rev() {
        all.swap(at, rng.below(at + 1));
    }
}
