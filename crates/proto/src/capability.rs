//! [`Capability`]: proof that the master granted access to one slot in one epoch. Masters and nodes share the key;
//! clients only pass capabilities on.
//!
//! ```text
//!   capability = first 16 bytes of keyed BLAKE3 over
//!     right u8 │ 7 zero bytes │ segment u32 │ slot u32 │ generation u64 │ epoch u64 │ id 16 B │ term u32
//! ```

use moontide_types::{Epoch, Generation, ObjectId, SegmentId, SlotId, Term};

use crate::layout::FieldValue;

/// MAC that proves a grant of the master for one slot in one epoch. The master signs it, the node verifies it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Capability(pub [u8; 16]);

impl std::fmt::Debug for Capability {
    /// Prints only whether the capability is set: its bytes must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Capability::default() { "Capability(none)" } else { "Capability(..)" })
    }
}

impl FieldValue for Capability {
    const BYTES: usize = 16;
    fn write_to(&self, out: &mut [u8]) {
        self.0.write_to(out);
    }
    fn read_from(bytes: &[u8]) -> Result<Self, u64> {
        Ok(Capability(<[u8; 16]>::read_from(bytes)?))
    }
}

/// Access that a capability allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessRight {
    /// Read the record, and free its staging slot.
    Read = 1,
    /// Write the record, until it is committed.
    Write = 2,
}

/// Inputs of the MAC: the right, the slot and the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapabilityScope {
    /// Access right.
    pub right: AccessRight,
    /// Segment of the slot.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Slot in the segment.
    pub slot: SlotId,
    /// Version of the object.
    pub epoch: Epoch,
    /// Object id.
    pub id: ObjectId,
    /// Term of the master that grants the access.
    pub term: Term,
}

/// Secret key of the MAC, shared by masters and nodes.
#[derive(Clone)]
pub struct CapabilityKey([u8; 32]);

impl std::fmt::Debug for CapabilityKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CapabilityKey(..)")
    }
}

impl CapabilityKey {
    /// Creates a key from 32 random bytes.
    pub fn new(key: [u8; 32]) -> CapabilityKey {
        CapabilityKey(key)
    }

    /// Computes the capability for `scope`.
    pub fn sign(&self, scope: &CapabilityScope) -> Capability {
        let mut input = [0; 52];
        input[0] = scope.right as u8;
        input[8..12].copy_from_slice(&scope.segment.0.to_le_bytes());
        input[12..16].copy_from_slice(&scope.slot.0.to_le_bytes());
        input[16..24].copy_from_slice(&scope.generation.0.to_le_bytes());
        input[24..32].copy_from_slice(&scope.epoch.bits().to_le_bytes());
        input[32..48].copy_from_slice(&scope.id.0);
        input[48..52].copy_from_slice(&scope.term.get().to_le_bytes());
        let hash = blake3::keyed_hash(&self.0, &input);
        Capability(*hash.as_bytes().first_chunk().expect("BLAKE3 hash has 32 bytes"))
    }

    /// Returns whether `capability` was signed with this key for exactly this scope.
    pub fn verify(&self, scope: &CapabilityScope, capability: Capability) -> bool {
        let expected = self.sign(scope);
        // Constant time: independent of the position of a difference.
        expected.0.iter().zip(capability.0).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{OpFlags, OpKind, TransferOp};

    #[test]
    fn capability_is_valid_only_for_its_scope() {
        let key = CapabilityKey::new([7; 32]);
        let scope = CapabilityScope {
            right: AccessRight::Write,
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
            segment: scope.segment,
            generation: scope.generation,
            slot: scope.slot,
            term: scope.term,
            epoch: scope.epoch,
            id: scope.id,
            offset: 9,
            len: 10,
            capability: key.sign(&scope),
        };
        let verify = |key: &CapabilityKey, op: &TransferOp| key.verify(&op.capability_scope(), op.capability);
        assert!(verify(&key, &op));
        assert!(
            verify(&key, &TransferOp { offset: 0, ..op }),
            "the owner checks the range, the capability does not"
        );
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
        assert!(others.iter().all(|other| !verify(&key, other)));
        assert!(!verify(&CapabilityKey::new([8; 32]), &op), "another key");
    }
}
