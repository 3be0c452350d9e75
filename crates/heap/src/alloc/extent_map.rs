//! [`ExtentMap`]: the node's own check that a granted range overlaps no live one.
//!
//! ```text
//!   words[0]            words[1]            …    bit = unit % 64 of words[unit / 64], set = claimed
//!   units 0 … 63        units 64 … 127
//! ```
//!
//! The node does not trust the master's allocator. It keeps one bit per unit, 1/4096 of the memory, and handles whole
//! words: a range of 16 MiB is 512 words, a range of 4 KiB one or two.
//!
//! Invariants:
//!
//! * `claimed_units == number of set bits <= capacity_units <= 64 * words.len() < capacity_units + 64`;
//! * bits at and above `capacity_units` are never set.

use moontide_types::Extent;

/// Reason why a range was not claimed. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClaimError {
    /// The range has no units.
    #[error("range {extent} is empty")]
    Empty {
        /// Requested range.
        extent: Extent,
    },
    /// The range ends beyond the segment.
    #[error("range {extent} ends beyond the segment's {capacity_units} units")]
    OutOfRange {
        /// Requested range.
        extent: Extent,
        /// Length of the segment in units.
        capacity_units: u32,
    },
    /// A unit of the range is already claimed.
    #[error("range {extent} overlaps a claimed one at unit {first_taken_unit}")]
    Overlap {
        /// Requested range.
        extent: Extent,
        /// Lowest claimed unit of the range.
        first_taken_unit: u32,
    },
}

/// Bitmap of the claimed units of one segment.
#[derive(Debug)]
pub struct ExtentMap {
    words: Box<[u64]>,
    capacity_units: u32,
    claimed_units: u32,
}

impl ExtentMap {
    /// Creates a map without claimed units.
    pub fn new(capacity_units: u32) -> Self {
        let words = vec![0; capacity_units.div_ceil(u64::BITS) as usize].into_boxed_slice();
        Self { words, capacity_units, claimed_units: 0 }
    }

    /// Claims all of `extent`, or nothing.
    pub fn try_claim(&mut self, extent: Extent) -> Result<(), ClaimError> {
        self.check_bounds(extent)?;
        if let Some(first_taken_unit) = self.first_taken(extent) {
            return Err(ClaimError::Overlap { extent, first_taken_unit });
        }
        for (at, mask) in masks(extent) {
            self.words[at] |= mask;
        }
        self.claimed_units += extent.units;
        Ok(())
    }

    /// Releases `extent`.
    ///
    /// # Panics
    /// If a unit of it is not claimed: the node releases only what it has claimed.
    pub fn release(&mut self, extent: Extent) {
        assert_eq!(self.check_bounds(extent), Ok(()));
        // Check all words first, so that a release that panics leaves the map unchanged.
        for (at, mask) in masks(extent) {
            assert!(self.words[at] & mask == mask, "release of {extent}, which is not completely claimed");
        }
        for (at, mask) in masks(extent) {
            self.words[at] &= !mask;
        }
        self.claimed_units -= extent.units;
    }

    /// Returns whether [`try_claim`](Self::try_claim) would succeed.
    pub fn is_free(&self, extent: Extent) -> bool {
        self.check_bounds(extent).is_ok() && self.first_taken(extent).is_none()
    }

    /// Returns the number of claimed units.
    pub fn claimed_units(&self) -> u32 {
        self.claimed_units
    }

    fn check_bounds(&self, extent: Extent) -> Result<(), ClaimError> {
        if extent.units == 0 {
            return Err(ClaimError::Empty { extent });
        }
        if extent.end() > u64::from(self.capacity_units) {
            return Err(ClaimError::OutOfRange { extent, capacity_units: self.capacity_units });
        }
        Ok(())
    }

    fn first_taken(&self, extent: Extent) -> Option<u32> {
        masks(extent).find_map(|(at, mask)| {
            let taken = self.words[at] & mask;
            (taken != 0).then(|| at as u32 * u64::BITS + taken.trailing_zeros())
        })
    }
}

/// Iterates over the words of an extent (within bounds, not empty), each with the mask of its bits.
fn masks(extent: Extent) -> impl Iterator<Item = (usize, u64)> {
    let last_unit = extent.end() - 1;
    let (first, last) = ((extent.start / u64::BITS) as usize, (last_unit / 64) as usize);
    (first..=last).map(move |at| {
        let low = if at == first { !0 << (extent.start % u64::BITS) } else { !0 };
        let high = if at == last { !0 >> (63 - last_unit % 64) } else { !0 };
        (at, low & high)
    })
}
