//! [`Runs`]: contiguous runs of blocks, by a bitmap. For engines whose kernels know no block tables.
//!
//! First fit from the left. A sequence may keep blocks in reserve behind it; when they are used up it takes what follows,
//! if that is free, and otherwise moves. Free blocks that are not together are of no use to a long sequence: that is what
//! [`Runs::fragmentation`] says, and why paged blocks are the default.
//!
//! Invariant: a bit is set when its block is in use or behind the limit.

use std::ops::Range;

use crate::pool::Block;

/// Which blocks are in use, for one thread.
#[derive(Debug)]
pub(crate) struct Runs {
    used: Vec<u64>,
    blocks_max: u32,
    limit: u32,
    free: u32,
    /// No block below this one is free.
    lowest: u32,
}

impl Runs {
    pub(crate) fn new(blocks: u32, blocks_max: u32) -> Runs {
        let used = vec![0; blocks_max.div_ceil(64) as usize];
        Runs { used, blocks_max, limit: blocks, free: blocks, lowest: 0 }
    }

    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.limit
    }

    pub(crate) fn is_used(&self, block: Block) -> bool {
        self.used[block as usize / 64] >> (block % 64) & 1 == 1
    }

    /// Takes so many blocks that follow each other, if there are.
    pub(crate) fn take(&mut self, count: u32) -> Option<Range<Block>> {
        let (from, found) = (self.lowest, self.find(count));
        if let Some(run) = &found {
            self.mark(run.clone());
            if run.start == from {
                self.lowest = run.end;
            }
        }
        found
    }

    /// Takes exactly these, if they are free.
    pub(crate) fn take_at(&mut self, run: Range<Block>) -> bool {
        let fits = run.end <= self.limit && run.clone().all(|block| !self.is_used(block));
        if fits {
            self.mark(run);
        }
        fits
    }

    pub(crate) fn give(&mut self, block: Block) {
        assert!(self.is_used(block), "block {block} was given back twice");
        self.used[block as usize / 64] &= !(1 << (block % 64));
        if block < self.limit {
            self.free += 1;
            self.lowest = self.lowest.min(block);
        }
    }

    pub(crate) fn set_limit(&mut self, limit: u32) {
        assert!(limit <= self.blocks_max);
        self.limit = limit;
        self.free = (0..limit).filter(|block| !self.is_used(*block)).count() as u32;
        self.lowest = 0;
    }

    /// How many blocks behind the limit are still in use.
    pub(crate) fn behind(&self) -> u32 {
        (self.limit..self.blocks_max).filter(|block| self.is_used(*block)).count() as u32
    }

    /// The longest run of free blocks.
    pub(crate) fn longest(&self) -> u32 {
        let (mut longest, mut length) = (0, 0);
        for block in 0..self.limit {
            length = if self.is_used(block) { 0 } else { length + 1 };
            longest = longest.max(length);
        }
        longest
    }

    /// Which share of the free blocks is not in the longest run: 0 if all are together.
    pub(crate) fn fragmentation(&self) -> f64 {
        if self.free == 0 { 0.0 } else { 1.0 - f64::from(self.longest()) / f64::from(self.free) }
    }

    fn mark(&mut self, run: Range<Block>) {
        self.free -= run.end - run.start;
        for block in run {
            self.used[block as usize / 64] |= 1 << (block % 64);
        }
    }

    /// First fit, whole words at a time where they are all free or all used.
    fn find(&self, count: u32) -> Option<Range<Block>> {
        if count > self.free {
            return None;
        }
        let (mut start, mut at) = (self.lowest, self.lowest);
        while at - start < count {
            if at >= self.limit {
                return None;
            }
            let word = self.used[at as usize / 64] >> (at % 64);
            let step = if word & 1 == 1 {
                let step = word.trailing_ones();
                start = at + step;
                step
            } else {
                word.trailing_zeros().min(64 - at % 64)
            };
            at += step;
        }
        (start + count <= self.limit).then_some(start..start + count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_fit_and_what_is_left() {
        let mut runs = Runs::new(100, 128);
        assert_eq!(runs.take(70), Some(0..70));
        assert_eq!(runs.take(31), None);
        assert_eq!(runs.take(30), Some(70..100));
        (60..80).for_each(|block| runs.give(block));
        (10..15).for_each(|block| runs.give(block));
        assert_eq!((runs.free(), runs.longest()), (25, 20));
        assert!((runs.fragmentation() - 0.2).abs() < 1e-9);
        assert!(runs.take_at(60..64) && !runs.take_at(63..65));
        assert_eq!(runs.take(6), Some(64..70));
        assert_eq!(runs.take(5), Some(10..15));
        runs.set_limit(128);
        assert_eq!(runs.take(28), Some(100..128));
        runs.set_limit(75);
        assert_eq!((runs.free(), runs.behind()), (5, 48));
        assert!(!runs.take_at(75..76));
    }

    /// Against a search one by one, over all small bitmaps' worth of random ones.
    #[test]
    fn finds_what_a_plain_search_finds() {
        let mut state = 7_u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        let mut runs = Runs::new(300, 300);
        for _ in 0..20_000 {
            let count = (random() % 20 + 1) as u32;
            let plain = (0..=300 - count).find(|start| (*start..start + count).all(|block| !runs.is_used(block)));
            assert_eq!(runs.take(count).map(|run| run.start), plain, "{count}");
            while runs.free() < 100 {
                let block = (random() % 300) as u32;
                if runs.is_used(block) {
                    runs.give(block);
                }
            }
        }
    }
}
