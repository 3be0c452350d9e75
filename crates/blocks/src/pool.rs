//! [`Pool`]: which blocks of an arena are free. It knows neither tokens nor sequences.
//!
//! A stack of free blocks, linked through one word per block, changed by compare-and-swap at its head: taking and giving
//! are O(1) per block, from any thread, without a lock. Many blocks are taken or given by one exchange of the head, so
//! that a request gets all that it asked for or nothing.
//!
//! | bits of the head | what |
//! |---|---|
//! | 0‥26 | the block on top, or [`NONE`] |
//! | 26‥64 | how often the head was changed: a head that is the same again has another successor only if this wrapped, after 2³⁸ changes within one attempt |
//!
//! | low half of a block's word | when |
//! |---|---|
//! | the block below it, or [`NONE`] | it is on the stack; the high half is how many there are, from it down |
//! | [`TAKEN`] | somebody has it |
//! | [`AWAY`] | it lies behind the [limit](Pool::set_limit) |
//!
//! So the count of free blocks is in the topmost one's word, and costs nobody an exchange of its own.
//!
//! Invariant: a block is on the stack, taken, or away; whoever gives one back that is not taken is stopped by an assert.

use crate::planted::{Bug, planted, weakened};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// The number of a block in its arena.
pub type Block = u32;

/// The most blocks that a pool can have: with 16 tokens each, a milliard tokens.
pub const BLOCKS_MAX: u32 = (1 << INDEX_BITS) - 1;

const INDEX_BITS: u32 = 26;
const NONE: u32 = BLOCKS_MAX;
const TAKEN: u32 = u32::MAX;
const AWAY: u32 = u32::MAX - 1;
const _: () = assert!(NONE < AWAY);

/// The free blocks of an arena, for any number of threads.
#[derive(Debug)]
pub struct Pool {
    head: AtomicU64,
    /// One word for each block.
    words: Box<[AtomicU64]>,
    /// Blocks from this one on are not given out again. Read and written with SeqCst, because of `give`.
    limit: AtomicU32,
}

impl Pool {
    /// A pool of `blocks`, all of them free, that can grow to `blocks_max`. The lowest are on top.
    ///
    /// # Panics
    /// If there are more than [`BLOCKS_MAX`], or more than `blocks_max`.
    pub fn new(blocks: u32, blocks_max: u32) -> Pool {
        assert!(blocks <= blocks_max && blocks_max <= BLOCKS_MAX, "{blocks} of {blocks_max} blocks");
        let word = |block: u32| match block {
            _ if block >= blocks => u64::from(AWAY),
            _ if block + 1 == blocks => on_stack(NONE, 1),
            _ => on_stack(block + 1, blocks - block),
        };
        Pool {
            head: AtomicU64::new(u64::from(if blocks == 0 { NONE } else { 0 })),
            words: (0..blocks_max).map(|block| AtomicU64::new(word(block))).collect(),
            limit: AtomicU32::new(blocks),
        }
    }

    /// Takes so many blocks, or none: then there are not as many, and nothing has changed.
    pub fn take(&self, count: u32, mut to: impl FnMut(Block)) -> bool {
        if count == 0 {
            return true;
        }
        // Acquire; pairs with the Release of `give`: what the last owner read is read before the next one writes.
        let acquire = weakened(Bug::RelaxedTake, Ordering::Acquire);
        let mut head = self.head.load(acquire);
        loop {
            // Others may change what is walked over, and then the head too: the exchange below fails.
            let Some(rest) = self.walk(top(head), count) else {
                // A read-modify-write finds the latest head: if it is still the same, there are not as many blocks.
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
        // From here on the blocks are this thread's alone.
        let mut block = top(head);
        for _ in 0..count {
            let word = &self.words[block as usize];
            let below = below(word.load(Ordering::Relaxed));
            // Release; pairs with the Acquire of `walk`: who sees this sees the new head too.
            word.store(u64::from(TAKEN), Ordering::Release);
            to(block);
            block = below;
        }
        true
    }

    /// Gives blocks back. Those behind the limit are put away.
    ///
    /// # Panics
    /// If one of them was not taken.
    pub fn give(&self, blocks: impl IntoIterator<Item = Block>) {
        let limit = self.limit.load(Ordering::SeqCst);
        let (mut first, mut count) = (NONE, 0);
        for block in blocks {
            let word = &self.words[block as usize];
            assert_eq!(word.load(Ordering::Relaxed), u64::from(TAKEN), "block {block} was given back twice");
            let mut stays = block < limit;
            if !stays {
                // Release; pairs with the Acquire of `behind`: it is no longer read when its memory goes.
                word.store(u64::from(AWAY), Ordering::Release);
                // The limit may have been raised just now, by somebody who found the block taken: put away, then look at
                // the limit; there it is the limit, then what is away. One of the two sees the other.
                fence(Ordering::SeqCst);
                let raised = block < self.limit.load(Ordering::SeqCst) && !planted(Bug::LimitReadOnce);
                stays = raised && self.bring_back(block);
            }
            if stays {
                word.store(on_stack(first, 0), Ordering::Relaxed);
                first = block;
                count += 1;
            }
        }
        if count > 0 {
            self.push(first, count);
        }
    }

    /// Puts a chain of blocks on the stack.
    fn push(&self, first: Block, count: u32) {
        // Acquire; pairs with the Release of the exchange: the depth belongs to this top.
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            // If others change the top meanwhile, its depth may be anything: the exchange fails, and it is looked at again.
            let under = self.depth(head);
            let mut block = first;
            for above in (0..count).rev() {
                let word = &self.words[block as usize];
                let next = if above == 0 { top(head) } else { below(word.load(Ordering::Relaxed)) };
                word.store(on_stack(next, under.wrapping_add(above + 1)), Ordering::Relaxed);
                block = next;
            }
            // Release; pairs with the Acquire of `take`.
            match self.exchange(head, first, weakened(Bug::RelaxedGive, Ordering::Release)) {
                Ok(()) => return,
                Err(now) => head = now,
            }
        }
    }

    /// How many blocks there are on the stack with this head.
    fn depth(&self, head: u64) -> u32 {
        match top(head) {
            NONE => 0,
            block => (self.words[block as usize].load(Ordering::Relaxed) >> 32) as u32,
        }
    }

    /// What lies below the first `count` blocks from this one on, if there are so many.
    fn walk(&self, mut block: u32, count: u32) -> Option<u32> {
        for _ in 0..count {
            // Taken by another in the meantime, or the end: both mean that this walk leads nowhere.
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
        let tag = if planted(Bug::NoTag) { 0 } else { (head >> INDEX_BITS) + 1 };
        let new = tag << INDEX_BITS | u64::from(to);
        if planted(Bug::HeadByStore) {
            self.head.store(new, order_of_store(order));
            return Ok(());
        }
        // A chain of exchanges carries a Release on to whoever takes later (release sequence): each is a
        // read-modify-write. A failure is looked at again, as at first.
        let failure = weakened(Bug::RelaxedTake, Ordering::Acquire);
        self.head.compare_exchange_weak(head, new, order, failure).map(drop)
    }

    /// From now on no block from this one on is given out; those that are in use go away when they are given back.
    /// A higher limit brings back what was put away.
    ///
    /// Only one thread may do it at a time. While the limit is lowered, `take` in another thread may find fewer free
    /// blocks than there are, and `give` may still put one behind it on the stack: see [`Pool::behind`].
    ///
    /// # Panics
    /// If the pool was made for fewer.
    pub fn set_limit(&self, limit: u32) {
        assert!(limit as usize <= self.words.len(), "{limit} of {} blocks", self.words.len());
        let before = self.limit.swap(limit, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if limit < before {
            self.put_away();
        } else {
            // Those in use between the two limits are given back by whoever has them.
            self.give((before..limit).rev().filter(|block| self.bring_back(*block)));
        }
    }

    /// Takes a block that is away, unless somebody else does.
    fn bring_back(&self, block: Block) -> bool {
        let (away, taken) = (u64::from(AWAY), u64::from(TAKEN));
        let word = &self.words[block as usize];
        word.compare_exchange(away, taken, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Takes all that is free and gives it back: what lies behind the limit is away then.
    fn put_away(&self) {
        let mut taken = Vec::new();
        while self.take(1, |block| taken.push(block)) {}
        self.give(taken.into_iter().rev());
    }

    /// How many blocks behind the limit somebody still has. What is free there is put away.
    pub fn behind(&self) -> u32 {
        // Acquire; pairs with the Release of `give`.
        let words = || self.words[self.blocks() as usize..].iter().map(|word| word.load(Ordering::Acquire));
        if words().any(|word| word != u64::from(AWAY) && word != u64::from(TAKEN)) {
            self.put_away();
        }
        words().filter(|word| *word != u64::from(AWAY)).count() as u32
    }

    /// How many blocks are free. Exact when nobody is changing it.
    pub fn free(&self) -> u32 {
        self.depth(self.head.load(Ordering::Acquire))
    }

    /// How many blocks there are, free or not, below the limit.
    pub fn blocks(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// How many there could be.
    pub fn blocks_max(&self) -> u32 {
        self.words.len() as u32
    }

    /// Whether somebody has this block.
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

/// What a store can be ordered by.
fn order_of_store(order: Ordering) -> Ordering {
    if order == Ordering::Release { Ordering::Release } else { Ordering::Relaxed }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn taken(pool: &Pool, count: u32) -> Option<Vec<Block>> {
        let mut blocks = Vec::new();
        pool.take(count, |block| blocks.push(block)).then_some(blocks)
    }

    #[test]
    fn all_or_nothing() {
        let pool = Pool::new(4, 4);
        assert_eq!(taken(&pool, 3), Some(vec![0, 1, 2]));
        assert_eq!(taken(&pool, 2), None);
        assert_eq!(pool.free(), 1);
        assert_eq!(taken(&pool, 0), Some(vec![]));
        pool.give([1, 0]);
        assert_eq!(taken(&pool, 3), Some(vec![0, 1, 3]));
        assert_eq!(taken(&pool, 1), None);
    }

    #[test]
    #[should_panic(expected = "block 0 was given back twice")]
    fn a_block_is_given_back_once() {
        let pool = Pool::new(4, 4);
        assert_eq!(taken(&pool, 1), Some(vec![0]));
        pool.give([0]);
        pool.give([0]);
    }

    #[test]
    fn a_lower_limit_waits_for_what_is_in_use_and_a_higher_one_brings_it_back() {
        let pool = Pool::new(8, 16);
        assert_eq!(taken(&pool, 8).map(|all| all.len()), Some(8));
        pool.give([1, 6]);
        pool.set_limit(4);
        assert_eq!((pool.free(), pool.blocks()), (1, 4));
        pool.give([0, 2, 3, 4, 5]);
        assert_eq!(pool.free(), 4);
        assert!(pool.is_taken(7));
        pool.set_limit(16);
        assert_eq!(pool.free(), 15);
        pool.give([7]);
        let mut all = taken(&pool, 16).expect("all sixteen");
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<_>>());
        assert_eq!(Pool::new(0, 4).blocks(), 0);
        assert_eq!(taken(&Pool::new(0, 4), 1), None);
    }

    /// One thread takes and gives while the other changes the limit: in the end all are there.
    #[test]
    fn no_block_is_lost_to_a_limit_that_changes() {
        for run in 0..30 {
            let pool = Pool::new(8, 8);
            let done = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        if let Some(all) = taken(&pool, 8) {
                            pool.give(all);
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
            assert_eq!(taken(&pool, 8).map(|all| all.len()), Some(8), "run {run}");
        }
    }

    /// Two threads take and give as fast as they can: no block is ever with both.
    #[test]
    fn no_block_is_with_two() {
        const BLOCKS: u32 = 64;
        let pool = Pool::new(BLOCKS, BLOCKS);
        let owners: Vec<AtomicU32> = (0..BLOCKS).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for me in 1..=2 {
                let (pool, owners) = (&pool, &owners);
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    for turn in 0..200_000_u32 {
                        if turn % 3 < 2 {
                            let before = mine.len();
                            pool.take(turn % 7, |block| mine.push(block));
                            for block in &mine[before..] {
                                assert_eq!(owners[*block as usize].swap(me, Ordering::Relaxed), 0);
                            }
                        } else {
                            let rest = mine.len() / 2;
                            for block in &mine[rest..] {
                                assert_eq!(owners[*block as usize].swap(0, Ordering::Relaxed), me);
                            }
                            pool.give(mine.drain(rest..));
                        }
                    }
                    for block in &mine {
                        owners[*block as usize].store(0, Ordering::Relaxed);
                    }
                    pool.give(mine);
                });
            }
        });
        assert_eq!(pool.free(), BLOCKS);
    }
}
