//! [`PartId`]: what a load reads from the disk. A short record is read as a whole, a longer one in parts of its payload
//! and of its digests, so that a record of any length needs little staging memory.

use moontide_disk::{RecordId, RecordLocation};
use moontide_proto::limits::DISK_PART_BYTES;
use moontide_proto::{OpFlags, TransferOp};
use moontide_types::Span;

/// A part of a record on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PartId {
    pub(crate) record: RecordId,
    pub(crate) part: Part,
}

/// Part of a record. The part of index `i` starts at `i` × [`DISK_PART_BYTES`]. Part 0 of the payload of a record that
/// is no longer than a part is the whole record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Payload(u32),
    Digests(u32),
}

/// Returns the record that an operation names.
pub(crate) fn record_of(op: &TransferOp) -> RecordId {
    RecordId { id: op.id, version: op.epoch, stripe: op.stripe }
}

/// Whether a record is read in parts.
pub(super) fn is_split(location: &RecordLocation) -> bool {
    location.payload_blocks() > DISK_PART_BYTES
}

impl PartId {
    /// Returns the whole of a short record, or the first part of a longer one.
    pub(super) fn first(record: RecordId) -> PartId {
        PartId { record, part: Part::Payload(0) }
    }

    /// Returns the part that an operation reads. The location is that of its record, if there is one.
    pub(super) fn of(op: &TransferOp, location: Option<&RecordLocation>) -> PartId {
        // An operation is shorter than 2⁴⁰.
        let index = (op.offset / DISK_PART_BYTES) as u32;
        let part = match op.flags.contains(OpFlags::DIGESTS) {
            // The digests of a short record are read with it.
            true if location.is_some_and(|location| !is_split(location)) => Part::Payload(0),
            // A record that is not on the disk any more is refused. A part of its payload may still be in staging.
            true => Part::Digests(index),
            false => Part::Payload(index),
        };
        PartId { record: record_of(op), part }
    }

    /// Returns the range of the payload that this part needs from the disk, in blocks; empty for a part of the digests,
    /// which are in the preamble. `None` if the record has no such part.
    pub(super) fn blocks(&self, location: &RecordLocation) -> Option<Span> {
        let Part::Payload(index) = self.part else { return Span::new(0, 0) };
        let start = u64::from(index) * DISK_PART_BYTES;
        let len = location.payload_blocks().checked_sub(start)?;
        (len > 0 || index == 0).then(|| Span::new(start, len.min(DISK_PART_BYTES)))?
    }

    /// Returns the part that follows in the payload.
    pub(super) fn next(&self) -> Option<PartId> {
        let Part::Payload(index) = self.part else { return None };
        Some(PartId { part: Part::Payload(index.checked_add(1)?), ..*self })
    }

    /// Returns the part before this one in the payload.
    pub(super) fn previous(&self) -> Option<PartId> {
        let Part::Payload(index) = self.part else { return None };
        Some(PartId { part: Part::Payload(index.checked_sub(1)?), ..*self })
    }
}

#[cfg(test)]
mod tests {
    use moontide_proto::{Capability, OpKind};
    use moontide_types::{Epoch, Generation, ObjectId, SegmentId, SlotId, Term};

    use super::*;

    /// Regression: a read of digests whose record had just left the disk got a part of the payload, which was still in
    /// staging.
    #[test]
    fn digests_of_absent_record_are_no_part_of_its_payload() {
        let op = TransferOp {
            kind: OpKind::Read,
            flags: OpFlags::DISK.with(OpFlags::DIGESTS),
            stripe: 0,
            segment: SegmentId(0),
            generation: Generation(0),
            slot: SlotId(0),
            term: Term::ZERO,
            epoch: Epoch::ZERO,
            id: ObjectId([1; 16]),
            offset: 0,
            len: 8,
            capability: Capability::default(),
        };
        assert_eq!(PartId::of(&op, None).part, Part::Digests(0));
        let payload = TransferOp { flags: OpFlags::DISK, offset: 3 * DISK_PART_BYTES, ..op };
        assert_eq!(PartId::of(&payload, None).part, Part::Payload(3));
    }
}
