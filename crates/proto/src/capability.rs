//! [`Capability`]: proof that the master granted access to one slot in one epoch. Made with a key that master and nodes
//! share; everybody else carries it around.
//!
//! ```text
//!   capability = first 16 bytes of keyed BLAKE3 over
//!     right u8 │ 7 zero bytes │ segment u32 │ slot u32 │ generation u64 │ epoch u64 │ id 16 B │ term u32
//! ```

use moontide_types::{Epoch, Generation, ObjectId, SegmentId, SlotId, Term};

use crate::layout::FieldValue;
use crate::ops::{OpKind, TransferOp};

/// Proof that the master granted access to one slot in one epoch. Made by the master, checked by the node.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Capability(pub [u8; 16]);

impl std::fmt::Debug for Capability {
    /// Says only whether there is one: it must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Capability::default() { "Capability(none)" } else { "Capability(..)" })
    }
}

impl FieldValue for Capability {
    const BYTES: usize = 16;
    fn put(&self, out: &mut [u8]) {
        self.0.put(out);
    }
    fn take(bytes: &[u8]) -> Result<Self, u64> {
        Ok(Capability(<[u8; 16]>::take(bytes)?))
    }
}

/// What a capability allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Reading the record, and giving its staging slot back.
    Read = 1,
    /// Writing it, until it is committed.
    Write = 2,
}

/// What a capability is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// What is allowed.
    pub right: Right,
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// The slot.
    pub slot: SlotId,
    /// The version.
    pub epoch: Epoch,
    /// The object.
    pub id: ObjectId,
    /// The term of the master that grants.
    pub term: Term,
}

/// A key that capabilities are made with.
#[derive(Clone)]
pub struct CapabilityKey([u8; 32]);

impl std::fmt::Debug for CapabilityKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CapabilityKey(..)")
    }
}

impl CapabilityKey {
    /// From 32 random bytes.
    pub fn new(key: [u8; 32]) -> CapabilityKey {
        CapabilityKey(key)
    }

    /// Makes a capability.
    pub fn seal(&self, granted: &Granted) -> Capability {
        let mut input = [0; 52];
        input[0] = granted.right as u8;
        input[8..12].copy_from_slice(&granted.segment.0.to_le_bytes());
        input[12..16].copy_from_slice(&granted.slot.0.to_le_bytes());
        input[16..24].copy_from_slice(&granted.generation.0.to_le_bytes());
        input[24..32].copy_from_slice(&granted.epoch.bits().to_le_bytes());
        input[32..48].copy_from_slice(&granted.id.0);
        input[48..52].copy_from_slice(&granted.term.get().to_le_bytes());
        let hash = blake3::keyed_hash(&self.0, &input);
        Capability(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
    }

    /// Whether an operation's capability was made with this key, for just that.
    pub fn admits(&self, op: &TransferOp) -> bool {
        let right = match op.kind {
            OpKind::Write => Right::Write,
            OpKind::Read | OpKind::Load | OpKind::Release => Right::Read,
        };
        let TransferOp { segment, generation, slot, epoch, id, term, .. } = *op;
        let made = self.seal(&Granted { right, segment, generation, slot, epoch, id, term });
        // In the same time wherever they differ.
        made.0.iter().zip(op.capability.0).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::OpFlags;

    #[test]
    fn a_capability_is_for_one_thing_only() {
        let key = CapabilityKey::new([7; 32]);
        let granted = Granted {
            right: Right::Write,
            segment: SegmentId(1),
            generation: Generation(2),
            slot: SlotId(3),
            epoch: Epoch::from_bits(4).unwrap(),
            id: ObjectId([5; 16]),
            term: Term::new(6).unwrap(),
        };
        let op = TransferOp {
            kind: OpKind::Write,
            flags: OpFlags::NONE,
            stripe: 0,
            segment: granted.segment,
            generation: granted.generation,
            slot: granted.slot,
            term: granted.term,
            epoch: granted.epoch,
            id: granted.id,
            offset: 9,
            len: 10,
            capability: key.seal(&granted),
        };
        assert!(key.admits(&op));
        assert!(key.admits(&TransferOp { offset: 0, ..op }), "the range is the owner's business");
        let others = [
            TransferOp { kind: OpKind::Read, ..op },
            TransferOp { segment: SegmentId(9), ..op },
            TransferOp { generation: Generation(9), ..op },
            TransferOp { slot: SlotId(9), ..op },
            TransferOp { epoch: Epoch::from_bits(9).unwrap(), ..op },
            TransferOp { id: ObjectId([9; 16]), ..op },
            TransferOp { term: Term::new(9).unwrap(), ..op },
            TransferOp { capability: Capability::default(), ..op },
        ];
        assert!(others.iter().all(|other| !key.admits(other)));
        assert!(!CapabilityKey::new([8; 32]).admits(&op), "another key");
    }
}
