//! Newtypes for everything that has a number. None of them is interchangeable with another.

use std::fmt;

use crate::bounds::{SEGMENTS_PER_NODE_MAX, SEQUENCE_BITS, TERM_BITS};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A process that owns memory and disk. Drawn at random at first start, kept with its disk.
    NodeId(u64)
}
id! {
    /// One registration of a node with a master; a node that comes back has a new one.
    SessionId(u64)
}
id! {
    /// A client process as its node sees it: the number of its ledger.
    ClientId(u32)
}
id! {
    /// One region of a node's memory, numbered by the node; unique together with the [`NodeId`].
    SegmentId(u32)
}
impl SegmentId {
    /// A node's disk, where a segment is to be named: no region of memory has this number.
    pub const DISK: SegmentId = SegmentId(SEGMENTS_PER_NODE_MAX - 1);
}

id! {
    /// A header's place in its segment's header table. One slot = one extent = one stripe of one replica.
    SlotId(u32)
}
id! {
    /// A fixed share of the key space together with the segments granted to it.
    GroupId(u16)
}
id! {
    /// Version of the map that says which master hosts which group.
    MapVersion(u64)
}
id! {
    /// Which incarnation of a thing is meant: a region, a staging slot, a member of a table.
    Generation(u64)
}

/// A value did not fit into the bits that its format has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {value} exceeds its largest value {max}")]
pub struct BoundExceeded {
    /// What was too large.
    pub what: &'static str,
    /// The value that was offered.
    pub value: u64,
    /// The largest one that fits.
    pub max: u64,
}

/// Number of a group's current master, from one cluster-wide counter; never goes back. 22 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(u32);

impl Term {
    /// Before any election.
    pub const ZERO: Term = Term(0);
    /// The largest term: a cluster that reaches it must be created anew.
    pub const MAX: Term = Term((1 << TERM_BITS) - 1);

    /// A term, if it fits in 22 bits.
    pub const fn new(term: u32) -> Result<Term, BoundExceeded> {
        if term > Self::MAX.0 {
            return Err(BoundExceeded { what: "term", value: term as u64, max: Self::MAX.0 as u64 });
        }
        Ok(Term(term))
    }

    /// The number itself.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// `term:22 | seq:40`, given by the master at PutStart and never used twice; also the object's version.
///
/// Epochs order first by term, then by sequence, so a new master's epochs exceed all older ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

impl Epoch {
    /// The epoch of a slot that was never used.
    pub const ZERO: Epoch = Epoch(0);
    /// A slot that reaches it retires.
    pub const MAX: Epoch = Epoch((1 << (TERM_BITS + SEQUENCE_BITS)) - 1);
    /// The largest sequence within a term.
    pub const SEQUENCE_MAX: u64 = (1 << SEQUENCE_BITS) - 1;

    /// Puts a term and a sequence together.
    pub const fn new(term: Term, sequence: u64) -> Result<Epoch, BoundExceeded> {
        if sequence > Self::SEQUENCE_MAX {
            return Err(BoundExceeded { what: "epoch sequence", value: sequence, max: Self::SEQUENCE_MAX });
        }
        Ok(Epoch((term.get() as u64) << SEQUENCE_BITS | sequence))
    }

    /// Reads the 62-bit form used on the wire and in the header word.
    pub const fn from_bits(bits: u64) -> Result<Epoch, BoundExceeded> {
        if bits > Self::MAX.0 {
            return Err(BoundExceeded { what: "epoch", value: bits, max: Self::MAX.0 });
        }
        Ok(Epoch(bits))
    }

    /// The 62-bit form.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The term that gave this epoch.
    pub const fn term(self) -> Term {
        Term((self.0 >> SEQUENCE_BITS) as u32)
    }

    /// The place within its term.
    pub const fn sequence(self) -> u64 {
        self.0 & Self::SEQUENCE_MAX
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.term(), self.sequence())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_order_by_term_first() {
        let old = Epoch::new(Term::new(1).unwrap(), Epoch::SEQUENCE_MAX).unwrap();
        let new = Epoch::new(Term::new(2).unwrap(), 0).unwrap();
        assert!(old < new);
        assert_eq!((new.term().get(), new.sequence()), (2, 0));
        assert_eq!(Epoch::from_bits(old.bits()), Ok(old));
    }

    #[test]
    fn values_beyond_their_bits_are_refused() {
        assert!(Term::new(Term::MAX.get()).is_ok());
        assert!(Term::new(Term::MAX.get() + 1).is_err());
        assert!(Epoch::new(Term::ZERO, Epoch::SEQUENCE_MAX + 1).is_err());
        assert!(Epoch::from_bits(Epoch::MAX.bits()).is_ok());
        assert!(Epoch::from_bits(Epoch::MAX.bits() + 1).is_err());
        assert_eq!(Epoch::new(Term::MAX, Epoch::SEQUENCE_MAX), Ok(Epoch::MAX));
    }
}
