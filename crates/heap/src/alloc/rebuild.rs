//! Building an [`Allocator`] from the extents that are live, as after a restart.
//!
//! The extents come from headers that a crash may have left behind, so that contradictions are errors, not
//! panics. Blocks are numbered in address order, which is the order in which neighbours are looked for.

use super::allocator::Allocator;
use super::blocks::{BlockRef, NIL};
use moontide_types::Extent;

/// Why a set of extents cannot be the live set of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RebuildError {
    /// An extent without units.
    #[error("extent {extent} is empty")]
    Empty {
        /// The extent.
        extent: Extent,
    },
    /// An extent that ends behind the segment.
    #[error("extent {extent} ends behind the segment's {capacity_units} units")]
    OutOfRange {
        /// The extent.
        extent: Extent,
        /// Units of the segment.
        capacity_units: u32,
    },
    /// Two extents that share a unit.
    #[error("extents {first} and {second} overlap")]
    Overlap {
        /// The one that starts earlier.
        first: Extent,
        /// The one that starts later, or at the same unit.
        second: Extent,
    },
}

impl Allocator {
    /// An allocator in which exactly `live` is allocated, with the blocks in the order of `live`, tagged 0.
    pub fn rebuild(capacity_units: u32, live: &[Extent]) -> Result<(Self, Vec<BlockRef>), RebuildError> {
        for &extent in live {
            if extent.units == 0 {
                return Err(RebuildError::Empty { extent });
            }
            if extent.end() > u64::from(capacity_units) {
                return Err(RebuildError::OutOfRange { extent, capacity_units });
            }
        }

        // Start and position in one word: sorting plain words is several times faster than sorting by a key
        // that has to be fetched. At most `capacity_units` extents are disjoint, hence looking at one more
        // finds an overlap and every position fits into 32 bits.
        let considered = live.len().min(capacity_units as usize + 1);
        let words = live[..considered].iter().enumerate();
        let mut order: Vec<u64> =
            words.map(|(at, extent)| u64::from(extent.start) << 32 | at as u64).collect();
        order.sort_unstable();
        let position = |word: u64| word as u32 as usize;

        // Three loops instead of one, because the first and the last miss the cache at every step: as short
        // as they are, the processor has many of the misses under way at a time.
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
        let mut numbers = Vec::with_capacity(sorted.len());
        for &extent in &sorted {
            allocator.append_free_until(extent.start);
            numbers.push(allocator.append_live(extent));
        }
        allocator.append_free_until(capacity_units);

        let mut refs = vec![BlockRef(NIL); live.len()];
        for (word, number) in order.into_iter().zip(numbers) {
            refs[position(word)] = number;
        }
        Ok((allocator, refs))
    }
}
