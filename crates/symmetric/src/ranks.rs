//! [`Rank`] and [`RankSet`]: members of a world, and sets of them.
//!
//! Invariant: a world has at most [`RANKS_MAX`] ranks, so a set of ranks fits in one word.

use std::fmt;

/// Maximum number of ranks of a world. One word holds a set of them; a host has fewer accelerators than that.
pub const RANKS_MAX: usize = 64;

/// Number of a member of a world, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// Returns the rank as an index.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Set of ranks of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RankSet(u64);

impl RankSet {
    /// The empty set.
    pub const EMPTY: RankSet = RankSet(0);

    /// Returns the first `ranks` ranks: a whole world.
    ///
    /// # Panics
    /// If `ranks` exceeds [`RANKS_MAX`].
    pub fn first(ranks: usize) -> RankSet {
        assert!(ranks <= RANKS_MAX);
        RankSet(if ranks == RANKS_MAX { u64::MAX } else { (1 << ranks) - 1 })
    }

    /// Returns the set with one rank.
    #[inline]
    pub fn only(rank: Rank) -> RankSet {
        debug_assert!(rank.index() < RANKS_MAX);
        RankSet(1 << rank.0)
    }

    /// Returns the set as one bit per rank.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Creates a set from one bit per rank.
    #[inline]
    pub fn from_bits(bits: u64) -> RankSet {
        RankSet(bits)
    }

    /// Returns whether the set contains a rank.
    #[inline]
    pub fn contains(self, rank: Rank) -> bool {
        self.0 >> rank.0 & 1 != 0
    }

    /// Adds a rank.
    #[inline]
    pub fn insert(&mut self, rank: Rank) {
        self.0 |= RankSet::only(rank).0;
    }

    /// Returns the intersection.
    #[inline]
    pub fn and(self, other: RankSet) -> RankSet {
        RankSet(self.0 & other.0)
    }

    /// Returns the union.
    #[inline]
    pub fn or(self, other: RankSet) -> RankSet {
        RankSet(self.0 | other.0)
    }

    /// Returns the ranks that are not in `other`.
    #[inline]
    pub fn without(self, other: RankSet) -> RankSet {
        RankSet(self.0 & !other.0)
    }

    /// Returns the number of ranks in the set.
    #[inline]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns whether the set is empty.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the lowest rank of the set.
    #[inline]
    pub fn lowest(self) -> Option<Rank> {
        (self.0 != 0).then(|| Rank(self.0.trailing_zeros()))
    }

    /// Iterates over the ranks in ascending order.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = Rank> + Clone {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let rank = RankSet(left).lowest()?;
            left &= left - 1;
            Some(rank)
        })
    }
}

impl FromIterator<Rank> for RankSet {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> RankSet {
        let mut set = RankSet::EMPTY;
        ranks.into_iter().for_each(|rank| set.insert(rank));
        set
    }
}

/// Formats a set as `1, 3 and 4`.
impl fmt::Display for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.len().saturating_sub(1);
        for (at, rank) in self.iter().enumerate() {
            let before = match at {
                0 => "",
                at if at == last => " and ",
                _ => ", ",
            };
            write!(f, "{before}{rank}")?;
        }
        if self.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_set_display_and_set_operations() {
        let set: RankSet = [4, 1, 3].into_iter().map(Rank).collect();
        assert_eq!(set.to_string(), "1, 3 and 4");
        assert_eq!((set.len(), set.lowest(), set.bits()), (3, Some(Rank(1)), 0b11010));
        assert!(set.contains(Rank(3)) && !set.contains(Rank(2)) && !set.contains(Rank(63)));
        assert_eq!(set.iter().collect::<Vec<_>>(), [Rank(1), Rank(3), Rank(4)]);
        assert_eq!(RankSet::EMPTY.to_string(), "none");
        assert_eq!(RankSet::first(RANKS_MAX).len(), RANKS_MAX);
        assert_eq!(RankSet::first(5).without(set).to_string(), "0 and 2");
        assert_eq!(RankSet::only(Rank(2)).or(set).and(RankSet::first(3)).to_string(), "1 and 2");
    }
}
