//! [`Data`]: which blocks of the file belong to whom.
//!
//! The allocator counts in 32 bits: a file with more blocks than that has several areas, each with an allocator of its
//! own, and no record straddles two.
//!
//! A range that was given up is not given out while somebody may still read it: each comes with a [`Hold`], clones of
//! which go with every [`Location`](crate::Location).

use std::num::NonZeroU32;
use std::sync::Arc;

use moontide_heap::alloc::{Align, Allocator, BlockRef};
use moontide_types::Extent;

/// Blocks of an area, at most: 8 TiB of 4 KiB.
const AREA_BLOCKS_MAX: u64 = 1 << 31;

/// Who may still read a range: whoever has a clone.
pub(super) type Hold = Arc<()>;

/// A range of blocks that belongs to somebody.
#[derive(Debug)]
pub(super) struct Range {
    /// Its first block in the file.
    pub(super) first_block: u64,
    /// Its blocks.
    pub(super) blocks: u32,
    /// Who reads it.
    pub(super) hold: Hold,
    area: usize,
    block: BlockRef,
}

/// The blocks of the file that are for records.
#[derive(Debug)]
pub(super) struct Data {
    first_block: u64,
    /// Blocks of the largest area.
    area_blocks: u64,
    areas: Vec<Allocator>,
    /// Given up, but somebody may still read them.
    held: Vec<Range>,
    used_blocks: u64,
}

/// Two ranges that cannot both be in use. It names the one that is not, by its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Contradiction(pub(super) usize);

impl Data {
    /// `blocks` from `first_block` on, of which the ranges `used` (first block and blocks) are in use.
    ///
    /// # Panics
    /// If these overlap or lie outside: see [`contradictions`].
    pub(super) fn new(first_block: u64, blocks: u64, used: &[(u64, u32)]) -> (Data, Vec<Range>) {
        let count = blocks.div_ceil(AREA_BLOCKS_MAX) as usize;
        let mut extents = vec![vec![]; count];
        let mut places = Vec::with_capacity(used.len());
        for &(first, len) in used {
            let (area, start) = place(first - first_block);
            places.push((area, extents[area].len()));
            extents[area].push(Extent { start, units: len });
        }
        let (areas, refs): (Vec<_>, Vec<_>) = extents
            .iter()
            .enumerate()
            .map(|(area, extents)| {
                let capacity = (blocks - area as u64 * AREA_BLOCKS_MAX).min(AREA_BLOCKS_MAX) as u32;
                Allocator::rebuild(capacity, extents).expect("checked before")
            })
            .unzip();
        let ranges = places.iter().zip(used).map(|(&(area, number), &(first_block, blocks))| {
            let block: BlockRef = refs[area][number];
            Range { first_block, blocks, hold: Hold::default(), area, block }
        });
        let used_blocks = used.iter().map(|&(_, blocks)| u64::from(blocks)).sum();
        let area_blocks = blocks.min(AREA_BLOCKS_MAX);
        (Data { first_block, area_blocks, areas, held: vec![], used_blocks }, ranges.collect())
    }

    /// A range, if there is one.
    pub(super) fn alloc(&mut self, blocks: u32) -> Option<Range> {
        let range = self.alloc_now(blocks);
        if range.is_some() || self.held.is_empty() {
            return range;
        }
        let (held, given_up): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.held).into_iter().partition(|range| Arc::strong_count(&range.hold) > 1);
        self.held = held;
        given_up.into_iter().for_each(|range| self.free_now(range));
        self.alloc_now(blocks)
    }

    /// Takes a range back: at once, or when the last one that reads it has ended. No entry may name it any more, on the
    /// disk nor in memory.
    pub(super) fn free(&mut self, range: Range) {
        if Arc::strong_count(&range.hold) > 1 { self.held.push(range) } else { self.free_now(range) }
    }

    /// Blocks that are in use, those that are only read included.
    pub(super) fn used_blocks(&self) -> u64 {
        self.used_blocks
    }

    /// Whether a range of this length could ever be given out.
    pub(super) fn could_hold(&self, blocks: u64) -> bool {
        blocks <= self.area_blocks
    }

    fn alloc_now(&mut self, blocks: u32) -> Option<Range> {
        let units = NonZeroU32::new(blocks).expect("a record has a block");
        let found = self.areas.iter_mut().enumerate().find_map(|(number, area)| {
            let allocation = area.alloc(units, Align::Unit)?;
            Some((number, allocation))
        });
        let (area, allocation) = found?;
        self.used_blocks += u64::from(blocks);
        let start = u64::from(allocation.extent.start) + area as u64 * AREA_BLOCKS_MAX;
        let (first_block, block) = (self.first_block + start, allocation.block);
        Some(Range { first_block, blocks, hold: Hold::default(), area, block })
    }

    fn free_now(&mut self, range: Range) {
        self.used_blocks -= u64::from(range.blocks);
        self.areas[range.area].free(range.block);
    }
}

/// Area and block in it of a block of the data.
fn place(block: u64) -> (usize, u32) {
    ((block / AREA_BLOCKS_MAX) as usize, (block % AREA_BLOCKS_MAX) as u32)
}

/// Which of the ranges `used` (first block and blocks) cannot be in use because an earlier one in the list is, or because
/// it straddles two areas.
pub(super) fn contradictions(first_block: u64, used: impl Iterator<Item = (u64, u32)>) -> Vec<Contradiction> {
    let mut taken = std::collections::BTreeMap::new();
    let mut out = vec![];
    for (number, (start, blocks)) in used.enumerate() {
        let end = start + u64::from(blocks);
        let straddles = place(start - first_block).0 != place(end - 1 - first_block).0;
        let overlaps = taken.range(..end).next_back().is_some_and(|(_, &taken_end)| taken_end > start);
        if straddles || overlaps {
            out.push(Contradiction(number));
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
    fn what_is_read_is_not_given_out() {
        let (mut data, _) = Data::new(10, 8, &[]);
        let range = data.alloc(8).expect("all is free");
        let reader = range.hold.clone();
        data.free(range);
        assert_eq!(data.used_blocks(), 8);
        assert!(data.alloc(1).is_none());
        drop(reader);
        assert_eq!(data.alloc(8).map(|range| range.first_block), Some(10));
    }

    #[test]
    fn ranges_in_use_are_found_again() {
        let (mut data, ranges) = Data::new(10, 8, &[(12, 2), (16, 2), (10, 1)]);
        assert_eq!(data.used_blocks(), 5);
        assert_eq!(ranges.iter().map(|range| range.first_block).collect::<Vec<_>>(), [12, 16, 10]);
        let mut given: Vec<u64> =
            std::iter::from_fn(|| data.alloc(1)).map(|range| range.first_block).collect();
        given.sort_unstable();
        assert_eq!(given, [11, 14, 15]);
        ranges.into_iter().for_each(|range| data.free(range));
        assert_eq!(data.used_blocks(), 3);
    }

    #[test]
    fn the_earlier_in_the_list_wins() {
        let used = [(20, 4), (23, 2), (24, 1), (18, 2), (10, 20), (19, 1), (20, 4)];
        let wrong = contradictions(10, used.into_iter());
        assert_eq!(wrong, [1, 4, 5, 6].map(Contradiction));
        let edge = 10 + AREA_BLOCKS_MAX;
        let wrong = contradictions(10, [(edge - 1, 2), (edge - 1, 1), (edge, 1)].into_iter());
        assert_eq!(wrong, [Contradiction(0)]);
    }

    #[test]
    fn a_file_with_more_blocks_than_an_allocator_counts_has_several() {
        let blocks = AREA_BLOCKS_MAX + 4;
        let (mut data, ranges) = Data::new(1, blocks, &[(1, AREA_BLOCKS_MAX as u32)]);
        assert_eq!(data.alloc(4).map(|range| range.first_block), Some(1 + AREA_BLOCKS_MAX));
        assert!(data.alloc(1).is_none());
        assert!(data.could_hold(AREA_BLOCKS_MAX) && !data.could_hold(AREA_BLOCKS_MAX + 1));
        ranges.into_iter().for_each(|range| data.free(range));
        assert_eq!(data.alloc(1).map(|range| range.first_block <= AREA_BLOCKS_MAX), Some(true));
    }
}
