//! [`RemoteReadTable`]: which records processes of other hosts read much, for the masters.
//!
//! The table holds sampled bytes for each record and reading host since the last heartbeat. A master that sees a record read
//! much by one host lets the node of that host copy it.

use std::collections::BTreeMap;

use moontide_proto::limits::REMOTE_READS_MAX;
use moontide_proto::{TransferOp, v1};
use moontide_rt::sync::Mutex;
use moontide_types::{Epoch, Generation, NodeId, SegmentId, SlotId};

/// See the top of the file.
#[derive(Debug, Default)]
pub(crate) struct RemoteReadTable {
    bytes: Mutex<BTreeMap<ReadRecord, u64>>,
}

/// A record, and the node of a host that read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ReadRecord {
    segment: SegmentId,
    generation: Generation,
    slot: SlotId,
    epoch: Epoch,
    reader: NodeId,
}

impl RemoteReadTable {
    /// Counts bytes of a read. A full table counts only what it has: the samples are hints, and what is read much comes again.
    pub(crate) fn note(&self, reader: NodeId, op: &TransferOp, bytes: u64) {
        let TransferOp { segment, generation, slot, epoch, .. } = *op;
        let key = ReadRecord { segment, generation, slot, epoch, reader };
        let mut table = self.bytes.lock();
        if table.len() < REMOTE_READS_MAX || table.contains_key(&key) {
            let counted = table.entry(key).or_default();
            *counted = counted.saturating_add(bytes);
        }
    }

    /// Takes the counts of the records whose segment `concerns` selects.
    pub(crate) fn take(&self, concerns: impl Fn(SegmentId) -> bool) -> Vec<v1::RemoteReads> {
        let mut table = self.bytes.lock();
        let (taken, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut *table).into_iter().partition(|(key, _)| concerns(key.segment));
        // Those of groups without a session must not take the place of others, nor be sent hours later.
        if kept.len() <= REMOTE_READS_MAX / 2 {
            *table = kept;
        }
        drop(table);
        let wire = |(key, bytes): (ReadRecord, u64)| v1::RemoteReads {
            segment: key.segment.0,
            generation: key.generation.0,
            slot: key.slot.0,
            epoch: key.epoch.bits(),
            reader: key.reader.0,
            bytes,
        };
        taken.into_iter().map(wire).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_proto::{Capability, OpFlags, OpKind};
    use moontide_types::{ObjectId, Term};

    fn read(segment: u32, slot: u32) -> TransferOp {
        TransferOp {
            kind: OpKind::Read,
            flags: OpFlags::NONE,
            stripe: 0,
            segment: SegmentId(segment),
            generation: Generation(1),
            slot: SlotId(slot),
            term: Term::new(1).unwrap(),
            epoch: Epoch::new(Term::new(1).unwrap(), 1).unwrap(),
            id: ObjectId([1; 16]),
            offset: 0,
            len: 1,
            capability: Capability::default(),
        }
    }

    #[test]
    fn bytes_are_summed_by_record_and_reader_and_taken_once() {
        let table = RemoteReadTable::default();
        for (reader, slot, bytes) in [(7, 1, 10), (7, 1, 5), (8, 1, 3), (7, 2, 1)] {
            table.note(NodeId(reader), &read(0, slot), bytes);
        }
        table.note(NodeId(7), &read(1, 1), 100);
        let taken = table.take(|segment| segment == SegmentId(0));
        let counts: Vec<_> = taken.iter().map(|reads| (reads.slot, reads.reader, reads.bytes)).collect();
        assert_eq!(counts, [(1, 7, 15), (1, 8, 3), (2, 7, 1)]);
        assert!(table.take(|segment| segment == SegmentId(0)).is_empty());
        assert_eq!(table.take(|_| true).len(), 1, "segments of other masters are kept for them");
    }

    #[test]
    fn table_is_bounded_and_goes_on_counting_what_it_has() {
        let table = RemoteReadTable::default();
        for slot in 0..2 * REMOTE_READS_MAX as u32 {
            table.note(NodeId(7), &read(0, slot), 1);
        }
        table.note(NodeId(7), &read(0, 0), 1);
        let taken = table.take(|_| true);
        assert_eq!((taken.len(), taken[0].bytes), (REMOTE_READS_MAX, 2));
    }

    #[test]
    fn counts_that_no_master_takes_leave_room_for_others() {
        let table = RemoteReadTable::default();
        for slot in 0..REMOTE_READS_MAX as u32 {
            table.note(NodeId(7), &read(1, slot), 1);
        }
        assert!(table.take(|segment| segment == SegmentId(0)).is_empty());
        table.note(NodeId(7), &read(0, 0), 1);
        assert_eq!(table.take(|segment| segment == SegmentId(0)).len(), 1);
    }
}
