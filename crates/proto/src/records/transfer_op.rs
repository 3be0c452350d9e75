//! [`TransferOp`]: one operation of the data plane.
//!
//! An operation identifies bytes by segment and generation, slot and epoch, object, and an offset within; never by
//! an address. The owner compares all of these before it accesses a byte. The capability is part of the operation
//! and not of the frame header, because one frame carries operations on several slots, and each slot has its own
//! grant.

use moontide_types::limits::{OBJECT_BYTES_MAX, STRIPES_MAX};
use moontide_types::{Epoch, Generation, ObjectId, SegmentId, SlotId, Span, Term};

use crate::capability::{AccessRight, Capability, CapabilityScope};
use crate::layout::RecordError;
use crate::limits::{DISK_PART_BYTES, FRAME_PAYLOAD_BYTES_MAX};

numbered! {
    /// Kind of an operation.
    pub enum OpKind(u8) {
        /// Send the bytes.
        Read = 1,
        /// Store the bytes; a Begin opened the slot before.
        Write = 2,
        /// Load the bytes from disk into a staging slot; the reply contains a handle of that slot.
        Load = 3,
        /// Free a staging slot.
        Release = 4,
    }
}

flags! {
    /// Options of an operation.
    pub struct OpFlags(u8) {
        /// The operation is on the disk's copy: segment, generation and slot are zero, and (id, epoch, stripe)
        /// identifies the record.
        DISK = 0,
        /// The range is in the record's page digests instead of its payload. Not for Write: the commit of the record
        /// writes the digests.
        DIGESTS = 1,
        /// Low priority: prefetch and repair.
        BACKGROUND = 2,
    }
}

fixed_record! {
    /// One operation on one range of one stripe.
    ///
    /// Invariants: `stripe < STRIPES_MAX`, `offset + len ≤ OBJECT_BYTES_MAX`, `len ≤ FRAME_PAYLOAD_BYTES_MAX`;
    /// [`OpFlags::DIGESTS`] not with Write; with [`OpFlags::DISK`] the kind is Read or Load, segment, generation and slot
    /// are zero, and the range is within one part of [`DISK_PART_BYTES`]; a Load always has [`OpFlags::DISK`]. For slots
    /// of a segment `stripe` repeats the value in the record header.
    pub struct TransferOp[80] {
        /// Kind of the operation.
        0 kind: OpKind,
        /// Options.
        1 flags: OpFlags,
        /// Index of the stripe.
        2 stripe: u16,
        /// Segment of the slot.
        4 segment: SegmentId,
        /// Generation of the segment.
        8 generation: Generation,
        /// Slot in the segment.
        16 slot: SlotId,
        /// Term in which the capability was created.
        20 term: Term,
        /// Version of the object.
        24 epoch: Epoch,
        /// Object id.
        32 id: ObjectId,
        /// First byte, relative to the first byte of the stripe's payload (or of its digests).
        48 offset: u64,
        /// Number of bytes.
        56 len: u64,
        /// Proof of the access right.
        64 capability: Capability,
    }
}

impl TransferOp {
    fn check(&self) -> Result<(), RecordError> {
        let disk = self.flags.contains(OpFlags::DISK);
        let no_slot = self.segment.0 == 0 && self.generation.0 == 0 && self.slot.0 == 0;
        Self::rule(usize::from(self.stripe) < STRIPES_MAX, "stripe < STRIPES_MAX")?;
        Self::rule(self.len <= FRAME_PAYLOAD_BYTES_MAX, "len ≤ FRAME_PAYLOAD_BYTES_MAX")?;
        Self::rule(
            Span::new(self.offset, self.len).is_some_and(|span| span.end() <= OBJECT_BYTES_MAX),
            "offset + len ≤ OBJECT_BYTES_MAX",
        )?;
        Self::rule(!disk || no_slot, "a disk operation names no slot")?;
        Self::rule(
            !disk || matches!(self.kind, OpKind::Read | OpKind::Load),
            "a disk operation is a Read or a Load",
        )?;
        Self::rule(disk || self.kind != OpKind::Load, "a load is from disk")?;
        let in_one_part = self.offset % DISK_PART_BYTES + self.len <= DISK_PART_BYTES;
        Self::rule(!disk || in_one_part, "a disk operation is within one part")?;
        let digests = self.flags.contains(OpFlags::DIGESTS);
        Self::rule(!digests || self.kind != OpKind::Write, "digests are not written")
    }

    /// Returns the scope for which the capability of the operation must be signed, if the operation needs this right.
    pub fn capability_scope(&self, right: AccessRight) -> CapabilityScope {
        let TransferOp { stripe, segment, generation, slot, term, epoch, id, .. } = *self;
        CapabilityScope { right, stripe, segment, generation, slot, term, epoch, id }
    }
}
