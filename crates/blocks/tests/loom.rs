//! Small models of concurrent operations, run in every interleaving and every reordering that the memory model allows,
//! on the shipped code: the pool's stack, and readers against the owner. Each model runs without a mutation, when it
//! must pass, and with each mutation that it must detect, when it must fail.
#![cfg(loom)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Plain, Ordering as PlainOrdering};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use moontide_blocks::model::{Mutation, ReaderEpochs};
use moontide_blocks::{Block, BlockPool};
use moontide_rt::with_mutation;

/// Maximum number of preemptions. The mutations need two or three.
const PREEMPTIONS_MAX: usize = 3;

fn explore(mutation: Option<Mutation>, model: fn()) {
    let runs = Arc::new(Plain::new(0));
    let counted = Arc::clone(&runs);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    with_mutation(mutation, || {
        builder.check(move || {
            counted.fetch_add(1, PlainOrdering::Relaxed);
            model();
        });
    });
    println!("{mutation:?}: {} interleavings", runs.load(PlainOrdering::Relaxed));
}

macro_rules! models {
    ($($test:ident: $model:ident, { $($mutant:ident: $mutation:ident => $message:literal,)* })*) => { $(
        #[test]
        fn $test() {
            explore(None, $model);
        }
        $(
            #[test]
            #[should_panic(expected = $message)]
            fn $mutant() {
                explore(Some(Mutation::$mutation), $model);
            }
        )*
    )* };
}

models! {
    block_is_owned_by_one_thread_at_a_time: stack, {
        mutation_head_without_tag_is_detected: NoTag => "has two owners",
        mutation_head_written_by_store_is_detected: HeadByStore => "has two owners",
        mutation_free_without_release_is_detected: RelaxedGive => "Causality violation",
        mutation_alloc_without_acquire_is_detected: RelaxedTake => "Causality violation",
    }
    freed_blocks_can_be_allocated_again: counts, {
        mutation_head_store_losing_blocks_is_detected: HeadByStore => "Causality violation",
    }
    block_freed_during_limit_increase_is_not_lost: limits, {
        mutation_limit_read_once_is_detected: LimitReadOnce => "blocks were lost",
    }
    memory_is_reused_only_without_active_readers: reuse, {
        mutation_enter_without_fence_is_detected: EnterFenceMissing => "Causality violation",
        mutation_scan_without_fence_is_detected: ScanFenceMissing => "Causality violation",
        mutation_leave_without_release_is_detected: RelaxedLeave => "Causality violation",
        mutation_scan_without_acquire_is_detected: RelaxedScan => "Causality violation",
        mutation_reuse_without_scan_is_detected: ReuseWithoutScan => "Causality violation",
    }
}

/// A pool, and memory for each block that only its owner may access.
struct Blocks {
    pool: BlockPool,
    memory: Vec<UnsafeCell<u32>>,
    owners: Vec<AtomicU32>,
}

impl Blocks {
    fn new(blocks: u32) -> Arc<Blocks> {
        let memory = (0..blocks).map(|_| UnsafeCell::new(0)).collect();
        let owners = (0..blocks).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Blocks { pool: BlockPool::new(blocks, blocks), memory, owners })
    }

    fn alloc(&self, count: u32) -> Option<Vec<Block>> {
        let mut taken = Vec::new();
        if !self.pool.alloc(count, |block| taken.push(block)) {
            return None;
        }
        for block in &taken {
            let others = self.owners[*block as usize].fetch_add(1, Ordering::Relaxed);
            assert_eq!(others, 0, "block {block} has two owners");
            // SAFETY: loom stops the model if another thread may be doing the same.
            self.memory[*block as usize].with_mut(|bytes| unsafe { *bytes += 1 });
        }
        Some(taken)
    }

    fn free(&self, blocks: Vec<Block>) {
        for block in &blocks {
            self.memory[*block as usize].with_mut(|bytes| unsafe { *bytes += 1 });
            self.owners[*block as usize].fetch_sub(1, Ordering::Relaxed);
        }
        self.pool.free_blocks(blocks);
    }
}

/// One thread allocates while the other allocates two and frees one: the head is the same again, its successor is not.
fn stack() {
    let blocks = Blocks::new(3);
    let other = Arc::clone(&blocks);
    let thread = thread::spawn(move || {
        // A read-modify-write first, or loom does not switch here.
        other.owners[0].fetch_add(0, Ordering::Relaxed);
        let first = other.alloc(1);
        let second = other.alloc(1);
        if let Some(first) = first {
            other.free(first);
        }
        second
    });
    let own = blocks.alloc(1);
    let others = thread.join().unwrap();
    for taken in [own, others].into_iter().flatten() {
        blocks.free(taken);
    }
    assert_eq!(blocks.alloc(3).map(|all| all.len()), Some(3), "blocks were lost");
}

/// Both threads allocate two of four blocks and free them; no allocation may fail, for there are enough at any time.
fn counts() {
    let blocks = Blocks::new(4);
    let other = Arc::clone(&blocks);
    let alloc_and_free = |blocks: &Blocks| {
        blocks.owners[0].fetch_add(0, Ordering::Relaxed);
        let taken = blocks.alloc(2).expect("two blocks are free");
        blocks.free(taken);
    };
    let thread = thread::spawn(move || alloc_and_free(&other));
    alloc_and_free(&blocks);
    thread.join().unwrap();
    assert_eq!(blocks.pool.free(), 4);
    assert_eq!(blocks.alloc(4).map(|all| all.len()), Some(4));
}

/// A block above the limit is freed while the limit is raised.
fn limits() {
    let blocks = Blocks::new(2);
    let taken = blocks.alloc(2).expect("two blocks are free");
    blocks.pool.set_limit(1);
    let other = Arc::clone(&blocks);
    let thread = thread::spawn(move || {
        other.owners[0].fetch_add(0, Ordering::Relaxed);
        other.free(taken);
    });
    blocks.pool.set_limit(2);
    thread.join().unwrap();
    assert_eq!(blocks.alloc(2).map(|all| all.len()), Some(2), "blocks were lost");
}

/// A link to one of two slots. A reader follows it; the owner sets it to the other slot, and writes the first one again
/// once no reader can access it.
fn reuse() {
    struct Shared {
        readers: ReaderEpochs,
        link: AtomicU32,
        slots: [UnsafeCell<u32>; 2],
    }
    let slots = [UnsafeCell::new(10), UnsafeCell::new(11)];
    let shared = Arc::new(Shared { readers: ReaderEpochs::new(1), link: AtomicU32::new(0), slots });
    let other = Arc::clone(&shared);
    let thread = thread::spawn(move || {
        other.link.fetch_add(0, Ordering::Relaxed);
        let cell = other.readers.register().unwrap();
        other.readers.enter(cell);
        let found = other.link.load(Ordering::Acquire);
        let read = other.slots[found as usize].with(|value| unsafe { *value });
        assert_eq!(read, 10 + found);
        other.readers.leave(cell);
    });
    shared.link.fetch_add(1, Ordering::Release);
    let epoch = shared.readers.next_epoch();
    if epoch < shared.readers.min_active() {
        shared.slots[0].with_mut(|value| unsafe { *value = 99 });
    }
    thread.join().unwrap();
}
