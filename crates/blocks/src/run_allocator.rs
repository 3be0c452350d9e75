//! [`RunAllocator`]: contiguous runs of blocks, by a bitmap. For engines whose kernels do not support block tables.
//!
//! First fit from the left. A sequence may keep a reserve of blocks after it; when the reserve is used up, the sequence
//! takes the following blocks, if they are free, and otherwise moves. Scattered free blocks are useless for a long
//! sequence: [`RunAllocator::fragmentation`] measures this, and it is why paged blocks are the default.
//!
//! Invariant: a bit is set when its block is in use or above the limit.

use std::ops::Range;

use crate::pool::Block;

/// Bitmap of blocks in use, for one thread.
#[derive(Debug)]
pub(crate) struct RunAllocator {
    used: Vec<u64>,
    blocks_max: u32,
    limit: u32,
    free: u32,
    /// No block below this one is free.
    lowest: u32,
}

impl RunAllocator {
    pub(crate) fn new(blocks: u32, blocks_max: u32) -> RunAllocator {
        let used = vec![0; blocks_max.div_ceil(64) as usize];
        RunAllocator { used, blocks_max, limit: blocks, free: blocks, lowest: 0 }
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

    /// Allocates `count` contiguous blocks, if there are any.
    pub(crate) fn alloc(&mut self, count: u32) -> Option<Range<Block>> {
        let (from, found) = (self.lowest, self.find(count));
        if let Some(run) = &found {
            self.mark(run.clone());
            if run.start == from {
                self.lowest = run.end;
            }
        }
        found
    }

    /// Allocates exactly these blocks, if they are free.
    pub(crate) fn alloc_at(&mut self, run: Range<Block>) -> bool {
        let fits = run.end <= self.limit && run.clone().all(|block| !self.is_used(block));
        if fits {
            self.mark(run);
        }
        fits
    }

    pub(crate) fn free_block(&mut self, block: Block) {
        assert!(self.is_used(block), "block {block} was freed twice");
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

    /// Number of blocks above the limit that are still in use.
    pub(crate) fn used_above_limit(&self) -> u32 {
        (self.limit..self.blocks_max).filter(|block| self.is_used(*block)).count() as u32
    }

    /// Length of the longest run of free blocks.
    pub(crate) fn longest(&self) -> u32 {
        let (mut longest, mut length) = (0, 0);
        for block in 0..self.limit {
            length = if self.is_used(block) { 0 } else { length + 1 };
            longest = longest.max(length);
        }
        longest
    }

    /// Share of the free blocks that are not in the longest run: 0 if all are contiguous.
    pub(crate) fn fragmentation(&self) -> f64 {
        if self.free == 0 { 0.0 } else { 1.0 - f64::from(self.longest()) / f64::from(self.free) }
    }

    fn mark(&mut self, run: Range<Block>) {
        self.free -= run.end - run.start;
        for block in run {
            self.used[block as usize / 64] |= 1 << (block % 64);
        }
    }

    /// First fit, by whole words where they are completely free or used.
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
    fn run_allocator_uses_first_fit_and_tracks_free_blocks() {
        let mut runs = RunAllocator::new(100, 128);
        assert_eq!(runs.alloc(70), Some(0..70));
        assert_eq!(runs.alloc(31), None);
        assert_eq!(runs.alloc(30), Some(70..100));
        (60..80).for_each(|block| runs.free_block(block));
        (10..15).for_each(|block| runs.free_block(block));
        assert_eq!((runs.free(), runs.longest()), (25, 20));
        assert!((runs.fragmentation() - 0.2).abs() < 1e-9);
        assert!(runs.alloc_at(60..64) && !runs.alloc_at(63..65));
        assert_eq!(runs.alloc(6), Some(64..70));
        assert_eq!(runs.alloc(5), Some(10..15));
        runs.set_limit(128);
        assert_eq!(runs.alloc(28), Some(100..128));
        runs.set_limit(75);
        assert_eq!((runs.free(), runs.used_above_limit()), (5, 48));
        assert!(!runs.alloc_at(75..76));
    }

    /// Compares with a linear search, over many random bitmaps.
    #[test]
    fn run_allocator_matches_linear_search() {
        let mut state = 7_u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        let mut runs = RunAllocator::new(300, 300);
        for _ in 0..20_000 {
            let count = (random() % 20 + 1) as u32;
            let plain =
                (0..=300 - count).find(|start| (*start..start + count).all(|block| !runs.is_used(block)));
            assert_eq!(runs.alloc(count).map(|run| run.start), plain, "{count}");
            while runs.free() < 100 {
                let block = (random() % 300) as u32;
                if runs.is_used(block) {
                    runs.free_block(block);
                }
            }
        }
    }
}
