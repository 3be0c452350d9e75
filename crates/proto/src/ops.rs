//! What a data-plane frame asks for: [`TransferOp`]s, packed in the body of Read, Write, Load and Release.
//!
//! An operation names bytes by what they belong to — segment and generation, slot and epoch, object — and by
//! an offset within; never by an address. The owner compares all of it before it touches a byte. The
//! capability stands here and not in the frame's header because one frame carries operations on many slots,
//! and each slot was granted by itself.

use moontide_types::bounds::{OBJECT_BYTES_MAX, STRIPES_MAX};
use moontide_types::{Epoch, Generation, ObjectId, SegmentId, SlotId, Span, Term};

use crate::layout::{FieldValue, RecordError};
use crate::limits::FRAME_PAYLOAD_BYTES_MAX;

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

numbered! {
    /// What is to be done with the bytes.
    pub enum OpKind(u8) {
        /// Send them.
        Read = 1,
        /// Take them; the slot was begun before.
        Write = 2,
        /// Bring them from disk into a staging slot; answered by a Read operation on that slot.
        Load = 3,
        /// Give a staging slot back.
        Release = 4,
    }
}

flags! {
    /// How it is to be done.
    pub struct OpFlags(u8) {
        /// The disk's copy is meant: segment, generation and slot are zero, (id, epoch, stripe) names it.
        DISK = 0,
        /// The range counts in the record's page digests instead of its payload.
        DIGESTS = 1,
        /// Of low priority: prefetch and repair.
        BACKGROUND = 2,
    }
}

fixed_record! {
    /// One operation on one range of one stripe.
    ///
    /// Invariants: `stripe < STRIPES_MAX`, `offset + len ≤ OBJECT_BYTES_MAX`, `len ≤ FRAME_PAYLOAD_BYTES_MAX`;
    /// with [`OpFlags::DISK`] it is a Read or Load, and segment, generation and slot are zero; a Load is
    /// always from disk. For slots of a segment `stripe` repeats what the header says.
    pub struct TransferOp[80] {
        /// What to do.
        0 kind: OpKind,
        /// How.
        1 flags: OpFlags,
        /// Index of the stripe.
        2 stripe: u16,
        /// The segment.
        4 segment: SegmentId,
        /// Which incarnation of it.
        8 generation: Generation,
        /// The slot.
        16 slot: SlotId,
        /// The term in which the capability was made.
        20 term: Term,
        /// The version.
        24 epoch: Epoch,
        /// The object.
        32 id: ObjectId,
        /// First byte, counted from the first byte of the stripe's payload (or of its digests).
        48 offset: u64,
        /// Number of bytes.
        56 len: u64,
        /// Proof that the caller may.
        64 capability: Capability,
    }
}

impl TransferOp {
    fn check(&self) -> Result<(), RecordError> {
        let disk = self.flags.contains(OpFlags::DISK);
        let nowhere = self.segment.0 == 0 && self.generation.0 == 0 && self.slot.0 == 0;
        Self::rule(usize::from(self.stripe) < STRIPES_MAX, "stripe < STRIPES_MAX")?;
        Self::rule(self.len <= FRAME_PAYLOAD_BYTES_MAX, "len ≤ FRAME_PAYLOAD_BYTES_MAX")?;
        Self::rule(
            Span::new(self.offset, self.len).is_some_and(|span| span.end() <= OBJECT_BYTES_MAX),
            "offset + len ≤ OBJECT_BYTES_MAX",
        )?;
        Self::rule(!disk || nowhere, "a disk operation names no slot")?;
        Self::rule(
            !disk || matches!(self.kind, OpKind::Read | OpKind::Load),
            "disks are read and loaded from",
        )?;
        Self::rule(disk || self.kind != OpKind::Load, "a load is from disk")
    }
}
