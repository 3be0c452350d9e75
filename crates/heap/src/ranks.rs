//! [`Rank`] and [`RankSet`]: the members of a world, by number and by the handful.
//!
//! Invariant: a world has at most [`RANKS_MAX`] ranks, so that a set of them is one word.

use std::fmt;

/// Ranks of a world at most. One word holds a set of them; a host has fewer accelerators than that.
pub const RANKS_MAX: usize = 64;

/// A member of a world: its number, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// As an index.
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

/// Some ranks of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RankSet(u64);

impl RankSet {
    /// Nobody.
    pub const EMPTY: RankSet = RankSet(0);

    /// The first `ranks` ranks: a whole world.
    ///
    /// # Panics
    /// If there are more than [`RANKS_MAX`].
    pub fn first(ranks: usize) -> RankSet {
        assert!(ranks <= RANKS_MAX);
        RankSet(if ranks == RANKS_MAX { u64::MAX } else { (1 << ranks) - 1 })
    }

    /// One rank alone.
    #[inline]
    pub fn only(rank: Rank) -> RankSet {
        debug_assert!(rank.index() < RANKS_MAX);
        RankSet(1 << rank.0)
    }

    /// As one bit per rank.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// From one bit per rank.
    #[inline]
    pub fn from_bits(bits: u64) -> RankSet {
        RankSet(bits)
    }

    /// Whether a rank is among them.
    #[inline]
    pub fn contains(self, rank: Rank) -> bool {
        self.0 >> rank.0 & 1 != 0
    }

    /// Adds a rank.
    #[inline]
    pub fn insert(&mut self, rank: Rank) {
        self.0 |= RankSet::only(rank).0;
    }

    /// Those that are in both.
    #[inline]
    pub fn and(self, other: RankSet) -> RankSet {
        RankSet(self.0 & other.0)
    }

    /// Those that are in either.
    #[inline]
    pub fn or(self, other: RankSet) -> RankSet {
        RankSet(self.0 | other.0)
    }

    /// Those that are not in `other`.
    #[inline]
    pub fn without(self, other: RankSet) -> RankSet {
        RankSet(self.0 & !other.0)
    }

    /// How many.
    #[inline]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether nobody is in it.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The lowest one.
    #[inline]
    pub fn lowest(self) -> Option<Rank> {
        (self.0 != 0).then(|| Rank(self.0.trailing_zeros()))
    }

    /// All of them, in ascending order.
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

/// As `1, 3 and 4`.
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
    fn sets_are_told_and_counted() {
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
