//! Ranges: [`Span`] in bytes, [`Extent`] in 512-byte units.

use std::fmt;

use crate::limits::UNIT_BYTES;

/// Range of `len` bytes from `offset` on. May be empty. Its end always fits in a `u64`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span {
    offset: u64,
    len: u64,
}

impl Span {
    /// Creates a span; `None` if its end does not fit in a `u64`.
    pub const fn new(offset: u64, len: u64) -> Option<Span> {
        match offset.checked_add(len) {
            Some(_) => Some(Span { offset, len }),
            None => None,
        }
    }

    /// Returns the offset of the first byte.
    pub const fn offset(self) -> u64 {
        self.offset
    }

    /// Returns the length in bytes.
    pub const fn len(self) -> u64 {
        self.len
    }

    /// Returns whether the length is 0.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the offset after the last byte.
    pub const fn end(self) -> u64 {
        self.offset + self.len
    }

    /// Returns whether all of `inner` lies within this span.
    pub const fn contains(self, inner: Span) -> bool {
        self.offset <= inner.offset && inner.end() <= self.end()
    }

    /// Returns whether the two spans have a byte in common. An empty span overlaps no span.
    pub const fn overlaps(self, other: Span) -> bool {
        !self.is_empty() && !other.is_empty() && self.offset < other.end() && other.offset < self.end()
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, +{}]", self.offset, self.len)
    }
}

/// Range of `units` units of [`UNIT_BYTES`] from unit `start` on: the space of a slot in its segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Index of the first unit.
    pub start: u32,
    /// Number of units.
    pub units: u32,
}

impl Extent {
    /// Returns the index after the last unit. Wider than a `u32`, so it cannot overflow.
    pub const fn end(self) -> u64 {
        self.start as u64 + self.units as u64
    }

    /// Returns the range in bytes.
    pub const fn span(self) -> Span {
        // Both factors are below 2³³, so neither product nor sum overflows.
        Span { offset: self.start as u64 * UNIT_BYTES, len: self.units as u64 * UNIT_BYTES }
    }

    /// Returns the number of units for `bytes` bytes; `None` beyond 2 TiB.
    pub const fn units_for(bytes: u64) -> Option<u32> {
        let units = bytes.div_ceil(UNIT_BYTES);
        if units > u32::MAX as u64 { None } else { Some(units as u32) }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "units [{}, +{}]", self.start, self.units)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_do_not_overflow() {
        assert!(Span::new(u64::MAX, 0).is_some());
        assert!(Span::new(u64::MAX, 1).is_none());
        let all = Extent { start: u32::MAX, units: u32::MAX };
        assert_eq!(all.span().end(), all.end() * UNIT_BYTES);
    }

    #[test]
    fn span_containment_and_overlap() {
        let span = |offset, len| Span::new(offset, len).unwrap();
        assert!(span(10, 10).contains(span(10, 10)));
        assert!(!span(10, 10).contains(span(10, 11)));
        assert!(!span(10, 10).contains(span(9, 1)));
        assert!(span(10, 10).overlaps(span(19, 5)));
        assert!(!span(10, 10).overlaps(span(20, 5)));
        assert!(!span(10, 10).overlaps(span(15, 0)));
    }

    #[test]
    fn units_round_up() {
        assert_eq!(Extent::units_for(0), Some(0));
        assert_eq!(Extent::units_for(1), Some(1));
        assert_eq!(Extent::units_for(513), Some(2));
        assert_eq!(Extent::units_for(u32::MAX as u64 * UNIT_BYTES), Some(u32::MAX));
        assert_eq!(Extent::units_for(u32::MAX as u64 * UNIT_BYTES + 1), None);
    }
}
