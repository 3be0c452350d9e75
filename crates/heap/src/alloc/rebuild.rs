//! Builds an [`Allocator`] from the live extents, after a restart.
//!
//! The extents come from headers that a crash may have left behind, so contradictions are errors and not panics.
//! Blocks are numbered in address order, so that neighbours are close to each other in the slab.

use super::allocator::Allocator;
use super::blocks::{BlockRef, NIL};
use moontide_types::Extent;

/// Reason why a set of extents cannot be the live set of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RebuildError {
    /// An extent has no units.
    #[error("extent {extent} is empty")]
    Empty {
        /// The empty extent.
        extent: Extent,
    },
    /// An extent ends beyond the segment.
    #[error("extent {extent} ends beyond the segment's {capacity_units} units")]
    OutOfRange {
        /// Extent as the header gives it.
        extent: Extent,
        /// Length of the segment in units.
        capacity_units: u32,
    },
    /// Two extents share a unit.
    #[error("extents {first} and {second} overlap")]
    Overlap {
        /// Extent that starts earlier.
        first: Extent,
        /// Extent that starts later, or at the same unit.
        second: Extent,
    },
}

impl Allocator {
    /// Returns an allocator in which exactly `live` is allocated, and its blocks in the order of `live`, with tag 0.
    pub fn rebuild(capacity_units: u32, live: &[Extent]) -> Result<(Self, Vec<BlockRef>), RebuildError> {
        for &extent in live {
            if extent.units == 0 {
                return Err(RebuildError::Empty { extent });
            }
            if extent.end() > u64::from(capacity_units) {
                return Err(RebuildError::OutOfRange { extent, capacity_units });
            }
        }

        // Start and position in one word: sorting plain words is several times faster than sorting by a key that has
        // to be fetched. At most `capacity_units` extents are disjoint, so one more is enough to find an overlap, and
        // every position fits into 32 bits.
        let considered = live.len().min(capacity_units as usize + 1);
        let words = live[..considered].iter().enumerate();
        let mut order: Vec<u64> =
            words.map(|(at, extent)| u64::from(extent.start) << 32 | at as u64).collect();
        order.sort_unstable();
        let position = |word: u64| word as u32 as usize;

        // Three loops instead of one, because the first and the last miss the cache at every step: in a short loop
        // the processor overlaps many misses.
        let sorted: Vec<Extent> = order.iter().map(|&word| live[position(word)]).collect();

        let mut gaps = 1;
        for pair in sorted.windows(2) {
            let (first, second) = (pair[0], pair[1]);
            if first.end() > u64::from(second.start) {
                return Err(RebuildError::Overlap { first, second });
            }
            gaps += usize::from(first.end() < u64::from(second.start));
        }
        let mut allocator = Self::empty(capacity_units, sorted.len() + gaps + 1);
        let mut block_refs = Vec::with_capacity(sorted.len());
        for &extent in &sorted {
            allocator.append_free_until(extent.start);
            block_refs.push(allocator.append_live(extent));
        }
        allocator.append_free_until(capacity_units);

        let mut refs = vec![BlockRef(NIL); live.len()];
        for (word, block) in order.into_iter().zip(block_refs) {
            refs[position(word)] = block;
        }
        Ok((allocator, refs))
    }
}
