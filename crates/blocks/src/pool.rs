//! [`BlockPool`]: the free blocks of an arena. It knows neither tokens nor sequences.
//!
//! A stack of free blocks, linked through one word per block, changed by compare-and-swap at its head: allocating and
//! freeing are O(1) per block, from any thread, without a lock. One exchange of the head allocates or frees many
//! blocks, so that a request gets all its blocks or none.
//!
//! | bits of the head | meaning |
//! |---|---|
//! | 0‥26 | the top block, or [`NONE`] |
//! | 26‥64 | change counter: an equal head has a different successor only if this wrapped, after 2³⁸ changes within one attempt |
//!
//! | low half of a block's word | state |
//! |---|---|
//! | the block below it, or [`NONE`] | it is on the stack; the high half is the number of blocks from it down |
//! | [`TAKEN`] | it is allocated |
//! | [`RETIRED`] | it is above the [limit](BlockPool::set_limit) |
//!
//! So the word of the top block contains the number of free blocks, which needs no separate exchange.
//!
//! Invariant: a block is on the stack, taken, or retired; an assertion stops a caller that frees a block that is not
//! taken.

use moontide_rt::sync::{AtomicU32, AtomicU64, Ordering, fence};
use moontide_rt::{mutation_enabled, weakened};

use crate::mutation::Mutation;

/// Number of a block in its arena.
pub type Block = u32;

/// Maximum number of blocks of a pool: with 16 tokens each, 10⁹ tokens.
pub const BLOCKS_MAX: u32 = (1 << INDEX_BITS) - 1;

const INDEX_BITS: u32 = 26;
const NONE: u32 = BLOCKS_MAX;
const TAKEN: u32 = u32::MAX;
const RETIRED: u32 = u32::MAX - 1;
const _: () = assert!(NONE < RETIRED);

/// Free blocks of an arena, for any number of threads.
#[derive(Debug)]
pub struct BlockPool {
    head: AtomicU64,
    /// One word for each block.
    words: Box<[AtomicU64]>,
    /// Blocks from this one on are not allocated again. Read and written with SeqCst, because of `free_blocks`.
    limit: AtomicU32,
}

impl BlockPool {
    /// Creates a pool of `blocks` free blocks that can grow to `blocks_max`. The lowest are on top.
    ///
    /// # Panics
    /// If there are more than [`BLOCKS_MAX`], or more than `blocks_max`.
    pub fn new(blocks: u32, blocks_max: u32) -> BlockPool {
        assert!(
            blocks <= blocks_max && blocks_max <= BLOCKS_MAX,
            "{blocks} blocks exceed `blocks_max` ({blocks_max}) or the limit of a pool"
        );
        let word = |block: u32| match block {
            _ if block >= blocks => u64::from(RETIRED),
            _ if block + 1 == blocks => on_stack(NONE, 1),
            _ => on_stack(block + 1, blocks - block),
        };
        BlockPool {
            head: AtomicU64::new(u64::from(if blocks == 0 { NONE } else { 0 })),
            words: (0..blocks_max).map(|block| AtomicU64::new(word(block))).collect(),
            limit: AtomicU32::new(blocks),
        }
    }

    /// Allocates `count` blocks. Returns `false`, and changes nothing, if fewer are free.
    pub fn alloc(&self, count: u32, mut to: impl FnMut(Block)) -> bool {
        if count == 0 {
            return true;
        }
        // Acquire; pairs with the Release of `free_blocks`: reads of the last owner happen before writes of the next
        // one.
        let acquire = weakened(Mutation::RelaxedTake, Ordering::Acquire);
        let mut head = self.head.load(acquire);
        loop {
            // Other threads may change the words during the walk, and then the head too: the exchange below fails.
            let Some(rest) = self.walk(top(head), count) else {
                // A read-modify-write returns the latest head: if it is unchanged, there are fewer blocks.
                let now = self.head.fetch_add(0, acquire);
                if now == head {
                    return false;
                }
                head = now;
                continue;
            };
            match self.exchange(head, rest, acquire) {
                Ok(()) => break,
                Err(now) => head = now,
            }
        }
        // From here on the blocks belong to this thread alone.
        let mut block = top(head);
        for _ in 0..count {
            let word = &self.words[block as usize];
            let below = below(word.load(Ordering::Relaxed));
            // Release; pairs with the Acquire of `walk`: a thread that sees this sees the new head too.
            word.store(u64::from(TAKEN), Ordering::Release);
            to(block);
            block = below;
        }
        true
    }

    /// Frees blocks. Those above the limit are retired.
    ///
    /// # Panics
    /// If one of them was not taken.
    pub fn free_blocks(&self, blocks: impl IntoIterator<Item = Block>) {
        let limit = self.limit.load(Ordering::SeqCst);
        let (mut first, mut count) = (NONE, 0);
        for block in blocks {
            let word = &self.words[block as usize];
            assert_eq!(word.load(Ordering::Relaxed), u64::from(TAKEN), "block {block} was freed twice");
            let mut reusable = block < limit;
            if !reusable {
                // Release; pairs with the Acquire of `used_above_limit`: it is no longer read when its memory is
                // discarded.
                word.store(u64::from(RETIRED), Ordering::Release);
                // Another thread that found the block taken may have raised the limit just now. Here: retire, then load
                // the limit; there: store the limit, then look for retired blocks. One of the two sees the other.
                fence(Ordering::SeqCst);
                let raised =
                    block < self.limit.load(Ordering::SeqCst) && !mutation_enabled(Mutation::LimitReadOnce);
                reusable = raised && self.unretire(block);
            }
            if reusable {
                word.store(on_stack(first, 0), Ordering::Relaxed);
                first = block;
                count += 1;
            }
        }
        if count > 0 {
            self.push(first, count);
        }
    }

    /// Pushes a chain of blocks onto the stack.
    fn push(&self, first: Block, count: u32) {
        // Acquire; pairs with the Release of the exchange: the depth belongs to this top.
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            // If another thread changes the top in the meantime, its depth may be anything: the exchange fails, and the
            // loop repeats.
            let under = self.depth(head);
            let mut block = first;
            for above in (0..count).rev() {
                let word = &self.words[block as usize];
                let next = if above == 0 { top(head) } else { below(word.load(Ordering::Relaxed)) };
                word.store(on_stack(next, under.wrapping_add(above + 1)), Ordering::Relaxed);
                block = next;
            }
            // Release; pairs with the Acquire of `alloc`.
            match self.exchange(head, first, weakened(Mutation::RelaxedGive, Ordering::Release)) {
                Ok(()) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Returns the number of blocks on the stack with this head.
    fn depth(&self, head: u64) -> u32 {
        match top(head) {
            NONE => 0,
            block => (self.words[block as usize].load(Ordering::Relaxed) >> 32) as u32,
        }
    }

    /// Returns the block below the first `count` blocks from this one on, if there are that many.
    fn walk(&self, mut block: u32, count: u32) -> Option<u32> {
        for _ in 0..count {
            // Taken by another thread in the meantime, or the end: in both cases this walk fails.
            if block >= NONE {
                return None;
            }
            block = below(self.words[block as usize].load(Ordering::Acquire));
        }
        (block <= NONE).then_some(block)
    }

    /// Sets the head, unless it was changed.
    #[inline]
    fn exchange(&self, head: u64, to: u32, order: Ordering) -> Result<(), u64> {
        let tag = if mutation_enabled(Mutation::NoTag) { 0 } else { (head >> INDEX_BITS) + 1 };
        let new = tag << INDEX_BITS | u64::from(to);
        if mutation_enabled(Mutation::HeadByStore) {
            self.head.store(new, store_ordering(order));
            return Ok(());
        }
        // A chain of exchanges carries a Release on to later Acquires (release sequence): each is a read-modify-write.
        // A failed exchange also loads with Acquire, like the first load.
        let failure = weakened(Mutation::RelaxedTake, Ordering::Acquire);
        self.head.compare_exchange_weak(head, new, order, failure).map(drop)
    }

    /// Sets the limit: no block from `limit` on is allocated; those in use are retired when they are freed. A higher
    /// limit restores retired blocks.
    ///
    /// Only one thread may call it at a time. While the limit is lowered, `alloc` in another thread may find fewer free
    /// blocks than there are, and `free_blocks` may still push one above the limit onto the stack: see
    /// [`BlockPool::used_above_limit`].
    ///
    /// # Panics
    /// If `limit` exceeds `blocks_max`.
    pub fn set_limit(&self, limit: u32) {
        assert!(limit as usize <= self.words.len(), "limit {limit} exceeds {} blocks", self.words.len());
        let before = self.limit.swap(limit, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if limit < before {
            self.retire_above_limit();
        } else {
            // The owners of blocks in use between the two limits free them later.
            self.free_blocks((before..limit).rev().filter(|block| self.unretire(*block)));
        }
    }

    /// Takes a retired block, unless another thread does.
    fn unretire(&self, block: Block) -> bool {
        let (retired, taken) = (u64::from(RETIRED), u64::from(TAKEN));
        let word = &self.words[block as usize];
        word.compare_exchange(retired, taken, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Takes all free blocks and frees them again: afterwards those above the limit are retired.
    fn retire_above_limit(&self) {
        let mut taken = Vec::new();
        while self.alloc(1, |block| taken.push(block)) {}
        self.free_blocks(taken.into_iter().rev());
    }

    /// Number of blocks above the limit that are still in use. Retires free blocks there.
    pub fn used_above_limit(&self) -> u32 {
        // Acquire; pairs with the Release of `free_blocks`.
        let words = || self.words[self.blocks() as usize..].iter().map(|word| word.load(Ordering::Acquire));
        if words().any(|word| word != u64::from(RETIRED) && word != u64::from(TAKEN)) {
            self.retire_above_limit();
        }
        words().filter(|word| *word != u64::from(RETIRED)).count() as u32
    }

    /// Number of free blocks. Exact without concurrent changes.
    pub fn free(&self) -> u32 {
        self.depth(self.head.load(Ordering::Acquire))
    }

    /// Number of blocks below the limit, free or not.
    pub fn blocks(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Maximum number of blocks.
    pub fn blocks_max(&self) -> u32 {
        self.words.len() as u32
    }

    /// Whether this block is allocated.
    pub fn is_taken(&self, block: Block) -> bool {
        self.words[block as usize].load(Ordering::Relaxed) == u64::from(TAKEN)
    }
}

#[inline]
fn on_stack(below: u32, depth: u32) -> u64 {
    u64::from(depth) << 32 | u64::from(below)
}

#[inline]
fn below(word: u64) -> u32 {
    word as u32
}

#[inline]
fn top(head: u64) -> u32 {
    (head & u64::from(NONE)) as u32
}

/// Returns the corresponding ordering of a store.
fn store_ordering(order: Ordering) -> Ordering {
    if order == Ordering::Release { Ordering::Release } else { Ordering::Relaxed }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn alloc(pool: &BlockPool, count: u32) -> Option<Vec<Block>> {
        let mut blocks = Vec::new();
        pool.alloc(count, |block| blocks.push(block)).then_some(blocks)
    }

    #[test]
    fn alloc_of_more_than_free_blocks_takes_none() {
        let pool = BlockPool::new(4, 4);
        assert_eq!(alloc(&pool, 3), Some(vec![0, 1, 2]));
        assert_eq!(alloc(&pool, 2), None);
        assert_eq!(pool.free(), 1);
        assert_eq!(alloc(&pool, 0), Some(vec![]));
        pool.free_blocks([1, 0]);
        assert_eq!(alloc(&pool, 3), Some(vec![0, 1, 3]));
        assert_eq!(alloc(&pool, 1), None);
    }

    #[test]
    #[should_panic(expected = "block 0 was freed twice")]
    fn double_free_panics() {
        let pool = BlockPool::new(4, 4);
        assert_eq!(alloc(&pool, 1), Some(vec![0]));
        pool.free_blocks([0]);
        pool.free_blocks([0]);
    }

    #[test]
    fn limit_decrease_waits_for_used_blocks_and_increase_restores() {
        let pool = BlockPool::new(8, 16);
        assert_eq!(alloc(&pool, 8).map(|all| all.len()), Some(8));
        pool.free_blocks([1, 6]);
        pool.set_limit(4);
        assert_eq!((pool.free(), pool.blocks()), (1, 4));
        pool.free_blocks([0, 2, 3, 4, 5]);
        assert_eq!(pool.free(), 4);
        assert!(pool.is_taken(7));
        pool.set_limit(16);
        assert_eq!(pool.free(), 15);
        pool.free_blocks([7]);
        let mut all = alloc(&pool, 16).expect("sixteen free blocks");
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<_>>());
        assert_eq!(BlockPool::new(0, 4).blocks(), 0);
        assert_eq!(alloc(&BlockPool::new(0, 4), 1), None);
    }

    /// One thread allocates and frees while the other changes the limit: in the end no block is lost.
    #[test]
    fn concurrent_limit_changes_lose_no_block() {
        for run in 0..30 {
            let pool = BlockPool::new(8, 8);
            let done = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        if let Some(all) = alloc(&pool, 8) {
                            pool.free_blocks(all);
                        }
                    }
                });
                for _ in 0..30 {
                    pool.set_limit(0);
                    pool.set_limit(8);
                    std::thread::yield_now();
                }
                done.store(true, Ordering::Relaxed);
            });
            assert_eq!(alloc(&pool, 8).map(|all| all.len()), Some(8), "run {run}");
        }
    }

    /// Two threads allocate and free concurrently: no block ever has two owners.
    #[test]
    fn concurrent_alloc_never_hands_out_a_block_twice() {
        const BLOCKS: u32 = 64;
        let pool = BlockPool::new(BLOCKS, BLOCKS);
        let owners: Vec<AtomicU32> = (0..BLOCKS).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 1..=2 {
                let (pool, owners) = (&pool, &owners);
                scope.spawn(move || {
                    let mut owned = Vec::new();
                    for step in 0..200_000_u32 {
                        if step % 3 < 2 {
                            let before = owned.len();
                            pool.alloc(step % 7, |block| owned.push(block));
                            for block in &owned[before..] {
                                assert_eq!(owners[*block as usize].swap(thread, Ordering::Relaxed), 0);
                            }
                        } else {
                            let rest = owned.len() / 2;
                            for block in &owned[rest..] {
                                assert_eq!(owners[*block as usize].swap(0, Ordering::Relaxed), thread);
                            }
                            pool.free_blocks(owned.drain(rest..));
                        }
                    }
                    for block in &owned {
                        owners[*block as usize].store(0, Ordering::Relaxed);
                    }
                    pool.free_blocks(owned);
                });
            }
        });
        assert_eq!(pool.free(), BLOCKS);
    }
}
