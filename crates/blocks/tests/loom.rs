//! Every interleaving of small models of what threads do at once, and every reordering that the memory model allows, on
//! the shipped code: the pool's stack, and readers against the owner. Each model runs without a planted bug, when it must
//! pass, and with each bug that it is there to find, when it must fail.
#![cfg(loom)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Plain, Ordering as PlainOrdering};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use moontide_blocks::model::{Bug, Readers, with_planted};
use moontide_blocks::{Block, Pool};

/// How often threads may be interrupted. The bugs need two or three.
const PREEMPTIONS_MAX: usize = 3;

fn explore(bug: Option<Bug>, model: fn()) {
    let runs = Arc::new(Plain::new(0));
    let counted = Arc::clone(&runs);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    with_planted(bug, || {
        builder.check(move || {
            counted.fetch_add(1, PlainOrdering::Relaxed);
            model();
        });
    });
    println!("{bug:?}: {} interleavings", runs.load(PlainOrdering::Relaxed));
}

macro_rules! models {
    ($($test:ident: $model:ident, { $($twin:ident: $bug:ident => $message:literal,)* })*) => { $(
        #[test]
        fn $test() {
            explore(None, $model);
        }
        $(
            #[test]
            #[should_panic(expected = $message)]
            fn $twin() {
                explore(Some(Bug::$bug), $model);
            }
        )*
    )* };
}

models! {
    a_block_is_with_one_thread: stack, {
        a_head_without_a_count_is_found: NoTag => "is with two",
        a_head_that_is_stored_is_found: HeadByStore => "",
        giving_without_release_is_found: RelaxedGive => "Causality violation",
        taking_without_acquire_is_found: RelaxedTake => "Causality violation",
    }
    all_that_was_given_can_be_taken_again: counts, {
        a_head_that_is_stored_loses_blocks: HeadByStore => "",
    }
    a_block_that_is_given_back_while_the_limit_rises_is_not_lost: limits, {
        a_limit_that_is_read_once_is_found: LimitReadOnce => "all are there in the end",
    }
    memory_is_reused_when_nobody_can_read_it: reuse, {
        entering_without_a_fence_is_found: EnterFenceMissing => "Causality violation",
        scanning_without_a_fence_is_found: ScanFenceMissing => "Causality violation",
        leaving_without_release_is_found: RelaxedLeave => "Causality violation",
        scanning_without_acquire_is_found: RelaxedScan => "Causality violation",
        not_scanning_is_found: ReuseWithoutScan => "Causality violation",
    }
}

/// A pool, and for each block memory that its owner alone may touch.
struct Blocks {
    pool: Pool,
    memory: Vec<UnsafeCell<u32>>,
    owners: Vec<AtomicU32>,
}

impl Blocks {
    fn new(blocks: u32) -> Arc<Blocks> {
        let memory = (0..blocks).map(|_| UnsafeCell::new(0)).collect();
        let owners = (0..blocks).map(|_| AtomicU32::new(0)).collect();
        Arc::new(Blocks { pool: Pool::new(blocks, blocks), memory, owners })
    }

    fn take(&self, count: u32) -> Option<Vec<Block>> {
        let mut taken = Vec::new();
        if !self.pool.take(count, |block| taken.push(block)) {
            return None;
        }
        for block in &taken {
            let others = self.owners[*block as usize].fetch_add(1, Ordering::Relaxed);
            assert_eq!(others, 0, "block {block} is with two");
            // SAFETY: loom stops the model if anybody else may be doing the same.
            self.memory[*block as usize].with_mut(|bytes| unsafe { *bytes += 1 });
        }
        Some(taken)
    }

    fn give(&self, blocks: Vec<Block>) {
        for block in &blocks {
            self.memory[*block as usize].with_mut(|bytes| unsafe { *bytes += 1 });
            self.owners[*block as usize].fetch_sub(1, Ordering::Relaxed);
        }
        self.pool.give(blocks);
    }
}

/// One thread takes while the other takes two and gives one back: the head is the same again, its successor is not.
fn stack() {
    let blocks = Blocks::new(3);
    let other = Arc::clone(&blocks);
    let thread = thread::spawn(move || {
        // A read-modify-write first, or loom does not switch here.
        other.owners[0].fetch_add(0, Ordering::Relaxed);
        let first = other.take(1);
        let second = other.take(1);
        if let Some(first) = first {
            other.give(first);
        }
        second
    });
    let mine = blocks.take(1);
    let theirs = thread.join().unwrap();
    for taken in [mine, theirs].into_iter().flatten() {
        blocks.give(taken);
    }
    assert_eq!(blocks.take(3).map(|all| all.len()), Some(3), "all are there in the end");
}

/// Both take two of four and give them back; nobody may fail, for there are enough at any time.
fn counts() {
    let blocks = Blocks::new(4);
    let other = Arc::clone(&blocks);
    let turn = |blocks: &Blocks| {
        blocks.owners[0].fetch_add(0, Ordering::Relaxed);
        let taken = blocks.take(2).expect("there are two");
        blocks.give(taken);
    };
    let thread = thread::spawn(move || turn(&other));
    turn(&blocks);
    thread.join().unwrap();
    assert_eq!(blocks.pool.free(), 4);
    assert_eq!(blocks.take(4).map(|all| all.len()), Some(4));
}

/// A block behind the limit is given back while the limit is raised.
fn limits() {
    let blocks = Blocks::new(2);
    let taken = blocks.take(2).expect("there are two");
    blocks.pool.set_limit(1);
    let other = Arc::clone(&blocks);
    let thread = thread::spawn(move || {
        other.owners[0].fetch_add(0, Ordering::Relaxed);
        other.give(taken);
    });
    blocks.pool.set_limit(2);
    thread.join().unwrap();
    assert_eq!(blocks.take(2).map(|all| all.len()), Some(2), "all are there in the end");
}

/// A link to one of two places. A reader follows it; the owner puts it to the other place, and writes the first one again
/// once nobody can be reading it.
fn reuse() {
    struct Shared {
        readers: Readers,
        link: AtomicU32,
        places: [UnsafeCell<u32>; 2],
    }
    let places = [UnsafeCell::new(10), UnsafeCell::new(11)];
    let shared = Arc::new(Shared { readers: Readers::new(1), link: AtomicU32::new(0), places });
    let other = Arc::clone(&shared);
    let thread = thread::spawn(move || {
        other.link.fetch_add(0, Ordering::Relaxed);
        let cell = other.readers.join().unwrap();
        other.readers.enter(cell);
        let found = other.link.load(Ordering::Acquire);
        let read = other.places[found as usize].with(|value| unsafe { *value });
        assert_eq!(read, 10 + found);
        other.readers.leave(cell);
    });
    shared.link.fetch_add(1, Ordering::Release);
    let stamp = shared.readers.stamp();
    if stamp < shared.readers.oldest() {
        shared.places[0].with_mut(|value| unsafe { *value = 99 });
    }
    thread.join().unwrap();
}
