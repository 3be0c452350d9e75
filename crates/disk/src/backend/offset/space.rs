//! [`SpaceMap`]: allocation of the blocks of the file.
//!
//! The allocator counts in 32 bits: a file with more blocks has several areas, each with its own allocator, and no
//! record crosses an area boundary.
//!
//! A freed range is not reused while a reader may use it: each has a [`RangeGuard`], and every
//! [`RecordLocation`](crate::RecordLocation) holds a clone.

use std::num::NonZeroU32;
use std::sync::Arc;

use moontide_heap::alloc::{Align, Allocator, BlockRef};
use moontide_types::Extent;

/// Maximum number of blocks of an area: 8 TiB with 4 KiB blocks.
const AREA_BLOCKS_MAX: u64 = 1 << 31;

/// Guard of a range: holders of a clone may still read it.
pub(super) type RangeGuard = Arc<()>;

/// An allocated range of blocks.
#[derive(Debug)]
pub(super) struct BlockRange {
    /// First block in the file.
    pub(super) first_block: u64,
    /// Number of blocks.
    pub(super) blocks: u32,
    /// Guard that readers clone.
    pub(super) guard: RangeGuard,
    area: usize,
    block: BlockRef,
}

/// Allocation of the data blocks of the file.
#[derive(Debug)]
pub(super) struct SpaceMap {
    first_block: u64,
    /// Blocks of the largest area.
    area_blocks: u64,
    areas: Vec<Allocator>,
    /// Freed ranges that readers may still use.
    held: Vec<BlockRange>,
    used_blocks: u64,
}

/// A range that conflicts with an earlier one, by its index in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RangeConflict(pub(super) usize);

impl SpaceMap {
    /// Manages `blocks` blocks from `first_block` on, of which the ranges `used` (first block and number of blocks) are
    /// in use.
    ///
    /// # Panics
    /// If the ranges overlap or are out of bounds: see [`conflicts`].
    pub(super) fn new(first_block: u64, blocks: u64, used: &[(u64, u32)]) -> (SpaceMap, Vec<BlockRange>) {
        let count = blocks.div_ceil(AREA_BLOCKS_MAX) as usize;
        let mut extents = vec![vec![]; count];
        let mut indices = Vec::with_capacity(used.len());
        for &(first, len) in used {
            let (area, start) = area_of(first - first_block);
            indices.push((area, extents[area].len()));
            extents[area].push(Extent { start, units: len });
        }
        let (areas, refs): (Vec<_>, Vec<_>) = extents
            .iter()
            .enumerate()
            .map(|(area, extents)| {
                let capacity = (blocks - area as u64 * AREA_BLOCKS_MAX).min(AREA_BLOCKS_MAX) as u32;
                Allocator::rebuild(capacity, extents).expect("the ranges were checked")
            })
            .unzip();
        let ranges = indices.iter().zip(used).map(|(&(area, number), &(first_block, blocks))| {
            let block: BlockRef = refs[area][number];
            BlockRange { first_block, blocks, guard: RangeGuard::default(), area, block }
        });
        let used_blocks = used.iter().map(|&(_, blocks)| u64::from(blocks)).sum();
        let area_blocks = blocks.min(AREA_BLOCKS_MAX);
        (SpaceMap { first_block, area_blocks, areas, held: vec![], used_blocks }, ranges.collect())
    }

    /// Allocates a range, if one is free.
    pub(super) fn alloc(&mut self, blocks: u32) -> Option<BlockRange> {
        let range = self.alloc_now(blocks);
        if range.is_some() || self.held.is_empty() {
            return range;
        }
        let (held, unused): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.held).into_iter().partition(|range| Arc::strong_count(&range.guard) > 1);
        self.held = held;
        unused.into_iter().for_each(|range| self.free_now(range));
        self.alloc_now(blocks)
    }

    /// Frees a range: at once, or when its last reader has ended. No entry may refer to it, neither on disk nor in
    /// memory.
    pub(super) fn free(&mut self, range: BlockRange) {
        if Arc::strong_count(&range.guard) > 1 { self.held.push(range) } else { self.free_now(range) }
    }

    /// Number of blocks in use, including freed ones that readers still use.
    pub(super) fn used_blocks(&self) -> u64 {
        self.used_blocks
    }

    /// Whether a range of this length could ever be allocated.
    pub(super) fn could_hold(&self, blocks: u64) -> bool {
        blocks <= self.area_blocks
    }

    fn alloc_now(&mut self, blocks: u32) -> Option<BlockRange> {
        let units = NonZeroU32::new(blocks).expect("a record has at least one block");
        let found = self.areas.iter_mut().enumerate().find_map(|(number, area)| {
            let allocation = area.alloc(units, Align::Unit)?;
            Some((number, allocation))
        });
        let (area, allocation) = found?;
        self.used_blocks += u64::from(blocks);
        let start = u64::from(allocation.extent.start) + area as u64 * AREA_BLOCKS_MAX;
        let (first_block, block) = (self.first_block + start, allocation.block);
        Some(BlockRange { first_block, blocks, guard: RangeGuard::default(), area, block })
    }

    fn free_now(&mut self, range: BlockRange) {
        self.used_blocks -= u64::from(range.blocks);
        self.areas[range.area].free(range.block);
    }
}

/// Returns the area of a data block, and its index in the area.
fn area_of(block: u64) -> (usize, u32) {
    ((block / AREA_BLOCKS_MAX) as usize, (block % AREA_BLOCKS_MAX) as u32)
}

/// Returns the ranges in `used` (first block and number of blocks) that overlap an earlier one in the list, or cross an
/// area boundary.
pub(super) fn conflicts(first_block: u64, used: impl Iterator<Item = (u64, u32)>) -> Vec<RangeConflict> {
    let mut taken = std::collections::BTreeMap::new();
    let mut out = vec![];
    for (number, (start, blocks)) in used.enumerate() {
        let end = start + u64::from(blocks);
        let crosses = area_of(start - first_block).0 != area_of(end - 1 - first_block).0;
        let overlaps = taken.range(..end).next_back().is_some_and(|(_, &taken_end)| taken_end > start);
        if crosses || overlaps {
            out.push(RangeConflict(number));
        } else {
            taken.insert(start, end);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_range_is_not_reused_while_being_read() {
        let (mut space, _) = SpaceMap::new(10, 8, &[]);
        let range = space.alloc(8).expect("all blocks are free");
        let reader = range.guard.clone();
        space.free(range);
        assert_eq!(space.used_blocks(), 8);
        assert!(space.alloc(1).is_none());
        drop(reader);
        assert_eq!(space.alloc(8).map(|range| range.first_block), Some(10));
    }

    #[test]
    fn used_ranges_are_not_allocated_again_after_open() {
        let (mut space, ranges) = SpaceMap::new(10, 8, &[(12, 2), (16, 2), (10, 1)]);
        assert_eq!(space.used_blocks(), 5);
        assert_eq!(ranges.iter().map(|range| range.first_block).collect::<Vec<_>>(), [12, 16, 10]);
        let mut allocated: Vec<u64> =
            std::iter::from_fn(|| space.alloc(1)).map(|range| range.first_block).collect();
        allocated.sort_unstable();
        assert_eq!(allocated, [11, 14, 15]);
        ranges.into_iter().for_each(|range| space.free(range));
        assert_eq!(space.used_blocks(), 3);
    }

    #[test]
    fn later_of_overlapping_ranges_is_a_conflict() {
        let used = [(20, 4), (23, 2), (24, 1), (18, 2), (10, 20), (19, 1), (20, 4)];
        let wrong = conflicts(10, used.into_iter());
        assert_eq!(wrong, [1, 4, 5, 6].map(RangeConflict));
        let edge = 10 + AREA_BLOCKS_MAX;
        let wrong = conflicts(10, [(edge - 1, 2), (edge - 1, 1), (edge, 1)].into_iter());
        assert_eq!(wrong, [RangeConflict(0)]);
    }

    #[test]
    fn file_larger_than_one_area_uses_several_allocators() {
        let blocks = AREA_BLOCKS_MAX + 4;
        let (mut space, ranges) = SpaceMap::new(1, blocks, &[(1, AREA_BLOCKS_MAX as u32)]);
        assert_eq!(space.alloc(4).map(|range| range.first_block), Some(1 + AREA_BLOCKS_MAX));
        assert!(space.alloc(1).is_none());
        assert!(space.could_hold(AREA_BLOCKS_MAX) && !space.could_hold(AREA_BLOCKS_MAX + 1));
        ranges.into_iter().for_each(|range| space.free(range));
        assert_eq!(space.alloc(1).map(|range| range.first_block <= AREA_BLOCKS_MAX), Some(true));
    }
}
