//! Newtypes of numeric ids. None of them converts to another.

use std::fmt;
use std::str::FromStr;

use crate::limits::{SEGMENTS_PER_NODE_MAX, SEQUENCE_BITS, TERM_BITS};

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

/// Id of a process that owns memory and disk. Random, chosen at the first start and stored on its disk.
///
/// It is shown and parsed as 16 hexadecimal digits everywhere: in logs, on the command line, in JSON and in Python.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({self})")
    }
}

impl FromStr for NodeId {
    type Err = InvalidNodeId;

    fn from_str(text: &str) -> Result<NodeId, InvalidNodeId> {
        // `from_str_radix` alone would accept a sign.
        let is_plain = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_plain.then(|| u64::from_str_radix(text, 16).ok()).flatten();
        number.map(NodeId).ok_or_else(|| InvalidNodeId(text.to_owned()))
    }
}

/// Error: a text is not a node id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a node id; use 16 hexadecimal digits")]
pub struct InvalidNodeId(String);

/// Id of one registration of a node with a master; a node that registers again gets a new one.
///
/// A process that knows the id can speak for the node. So it cannot be guessed, and texts contain a short hash of it only.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct SessionId(pub u64);

impl SessionId {
    /// Returns the id of the session with this number at the master with this id. Ids of different masters and numbers are
    /// equal only by chance, and no process can compute one without the secret.
    pub fn keyed(secret: &[u8; 32], master: Term, number: u64) -> SessionId {
        let mut input = [0; 12];
        input[..4].copy_from_slice(&master.get().to_le_bytes());
        input[4..].copy_from_slice(&number.to_le_bytes());
        let hash = blake3::keyed_hash(secret, &input);
        SessionId(u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes")))
    }
}

/// A short hash for logs: it tells the sessions of a node apart. 48 bits of the id remain unknown.
impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}", self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId(~{self})")
    }
}
id! {
    /// Id of a client process at its node: the number of its ledger.
    ClientId(u32)
}
id! {
    /// Id of one region of a node's memory, assigned by the node; unique together with the [`NodeId`].
    SegmentId(u32)
}
impl SegmentId {
    /// Segment id of a node's disk; no memory region has this id.
    pub const DISK: SegmentId = SegmentId(SEGMENTS_PER_NODE_MAX - 1);
}

id! {
    /// Index in a segment's header table. One slot = one extent = one stripe of one replica.
    SlotId(u32)
}
id! {
    /// Id of a group: a fixed share of the key space, with the segments granted to it.
    GroupId(u16)
}
id! {
    /// Version of the group map: which master hosts which group.
    MapVersion(u64)
}
id! {
    /// Incarnation of a region, a staging slot or a member of a table.
    Generation(u64)
}

/// Error: a value does not fit into the bits of its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {value} exceeds the maximum {max}")]
pub struct BoundExceeded {
    /// Name of the quantity.
    pub what: &'static str,
    /// Value that does not fit.
    pub value: u64,
    /// Largest value that fits.
    pub max: u64,
}

/// Number of a group's master, from one cluster-wide counter; never decreases. 22 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(u32);

impl Term {
    /// Term before any election.
    pub const ZERO: Term = Term(0);
    /// Largest term: a cluster that reaches it must be created again.
    pub const MAX: Term = Term((1 << TERM_BITS) - 1);

    /// Creates a term. Fails if the number does not fit in 22 bits.
    pub const fn new(term: u32) -> Result<Term, BoundExceeded> {
        if term > Self::MAX.0 {
            return Err(BoundExceeded { what: "term", value: term as u64, max: Self::MAX.0 as u64 });
        }
        Ok(Term(term))
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Version of a slot's content and of an object: `term:22 | sequence:40`, assigned by the master at PutStart and
/// never reused.
///
/// Epochs order first by term, then by sequence, so the epochs of a new master exceed all older epochs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

impl Epoch {
    /// Epoch of a slot that was never used.
    pub const ZERO: Epoch = Epoch(0);
    /// Largest epoch: a slot that reaches it is not used again.
    pub const MAX: Epoch = Epoch((1 << (TERM_BITS + SEQUENCE_BITS)) - 1);
    /// Largest sequence within a term.
    pub const SEQUENCE_MAX: u64 = (1 << SEQUENCE_BITS) - 1;

    /// Combines a term and a sequence. Fails if the sequence does not fit in 40 bits.
    pub const fn new(term: Term, sequence: u64) -> Result<Epoch, BoundExceeded> {
        if sequence > Self::SEQUENCE_MAX {
            return Err(BoundExceeded { what: "epoch sequence", value: sequence, max: Self::SEQUENCE_MAX });
        }
        Ok(Epoch((term.get() as u64) << SEQUENCE_BITS | sequence))
    }

    /// Converts the 62-bit form used on the wire and in the header word.
    pub const fn from_bits(bits: u64) -> Result<Epoch, BoundExceeded> {
        if bits > Self::MAX.0 {
            return Err(BoundExceeded { what: "epoch", value: bits, max: Self::MAX.0 });
        }
        Ok(Epoch(bits))
    }

    /// Returns the 62-bit form.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the term in which the epoch was assigned.
    pub const fn term(self) -> Term {
        Term((self.0 >> SEQUENCE_BITS) as u32)
    }

    /// Returns the sequence within the term.
    pub const fn sequence(self) -> u64 {
        self.0 & Self::SEQUENCE_MAX
    }

    /// Returns the largest epoch below this one; zero for zero.
    pub const fn predecessor(self) -> Epoch {
        Epoch(self.0.saturating_sub(1))
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
    fn node_id_is_16_hexadecimal_digits() {
        for (node, text) in
            [(0, "0000000000000000"), (0xfeed_0001, "00000000feed0001"), (u64::MAX, "ffffffffffffffff")]
        {
            assert_eq!((NodeId(node).to_string(), text.parse()), (text.to_owned(), Ok(NodeId(node))));
        }
        assert_eq!(format!("{:?}", NodeId(0xfeed)), "NodeId(000000000000feed)");
        assert_eq!("00000000FEED0001".parse(), Ok(NodeId(0xfeed_0001)));
        for text in [
            "",
            "feed",
            "0x0000000000feed",
            "+000000000000feed",
            "0000000000000feed",
            "node-7",
            "ffffffffffffffé",
        ] {
            let error = text.parse::<NodeId>().unwrap_err().to_string();
            assert!(error.contains("16 hexadecimal digits"), "{error}");
        }
    }

    #[test]
    fn epochs_order_by_term_first() {
        let old = Epoch::new(Term::new(1).unwrap(), Epoch::SEQUENCE_MAX).unwrap();
        let new = Epoch::new(Term::new(2).unwrap(), 0).unwrap();
        assert!(old < new);
        assert_eq!((new.term().get(), new.sequence()), (2, 0));
        assert_eq!(Epoch::from_bits(old.bits()), Ok(old));
    }

    #[test]
    fn term_and_epoch_out_of_range_are_rejected() {
        assert!(Term::new(Term::MAX.get()).is_ok());
        assert!(Term::new(Term::MAX.get() + 1).is_err());
        assert!(Epoch::new(Term::ZERO, Epoch::SEQUENCE_MAX + 1).is_err());
        assert!(Epoch::from_bits(Epoch::MAX.bits()).is_ok());
        assert!(Epoch::from_bits(Epoch::MAX.bits() + 1).is_err());
        assert_eq!(Epoch::new(Term::MAX, Epoch::SEQUENCE_MAX), Ok(Epoch::MAX));
    }
}
