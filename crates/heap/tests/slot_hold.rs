//! Slot holds of processes that wait for a record.

mod common;

use std::sync::Arc;

use common::TestNode;
use moontide_heap::{KillOutcome, LocalHeap, PayloadWriter, SharedReader, SlotHoldError};
use moontide_types::record::State;
use moontide_types::{Epoch, SegmentId, SlotId, Span};

fn reader(heap: &Arc<LocalHeap>) -> SharedReader {
    SharedReader::new(Arc::clone(heap)).expect("a vacant lane")
}

#[test]
fn slot_hold_delays_reclaim_through_write_commit_and_kill() {
    let node = TestNode::new(1, 4, 64 << 10);
    let (writer, waiting) = (Arc::new(node.connect("writer")), Arc::new(node.connect("waiting")));
    let payload_writer = PayloadWriter::Client(writer.client());
    let object = node.begin(b"k", 3000, payload_writer).unwrap();
    let hold =
        reader(&waiting).stay(object.segment, object.slot, object.epoch).expect("the record has begun");
    assert_eq!(hold.state(), Some(State::Writing));
    let mut claim = writer.reader().unwrap();
    let root = claim.claim(object.segment, object.slot, object.epoch).unwrap().fill(&[9; 3000]);
    // The commit does not wait for slot holds.
    node.heap.commit(object.segment, object.slot, object.epoch, root, payload_writer).unwrap();
    assert_eq!((hold.state(), hold.epoch()), (Some(State::Ready), object.epoch));
    assert_eq!(hold.complete_span(), Span::new(object.extent.span().offset(), 3000));
    let second = reader(&waiting).stay(object.segment, object.slot, object.epoch).expect("it is complete");
    assert_eq!(node.kill(&object), KillOutcome::Killed);
    assert_eq!(hold.state(), Some(State::Dead));
    assert_eq!(
        reader(&waiting).stay(object.segment, object.slot, object.epoch).err(),
        Some(SlotHoldError::Ended)
    );
    drop(hold);
    assert_eq!(node.reclaim().freed.len(), 0, "the second hold still pins the slot");
    let at = second.payload(Span::new(object.extent.span().offset(), 3000).unwrap()).unwrap();
    // SAFETY: the record was complete, and its slot is held.
    assert_eq!(unsafe { std::slice::from_raw_parts(at.as_ptr(), 3000) }, [9; 3000]);
    drop(second);
    assert_eq!(node.reclaim().freed.len(), 1);
    node.assert_empty();
}

#[test]
fn slot_hold_refuses_other_version_missing_slot_and_own_write() {
    let node = TestNode::new(1, 4, 64 << 10);
    let heap = Arc::new(node.connect("own"));
    let object = node.begin(b"k", 100, PayloadWriter::Client(heap.client())).unwrap();
    let mut own = reader(&heap);
    let other = Epoch::new(object.epoch.term(), 99).unwrap();
    let ended = Some(SlotHoldError::Ended);
    assert_eq!(own.stay(object.segment, object.slot, other).err(), ended, "another version");
    assert_eq!(own.stay(object.segment, SlotId(4), object.epoch).err(), ended, "no such slot");
    assert_eq!(own.stay(SegmentId(7), object.slot, object.epoch).err(), ended, "no such segment");
    let claim = own.claim(object.segment, object.slot, object.epoch).unwrap();
    let refused = Some(SlotHoldError::Own);
    assert_eq!(own.stay(object.segment, object.slot, object.epoch).err(), refused, "this process writes it");
    let pending_commit = claim.end_before_commit();
    assert_eq!(
        own.stay(object.segment, object.slot, object.epoch).err(),
        refused,
        "this process is about to commit it"
    );
    drop(pending_commit);
    let hold = own.stay(object.segment, object.slot, object.epoch).unwrap();
    assert!(hold.payload(Span::new(64 << 10, 1).unwrap()).is_none(), "beyond the segment's end");
    assert_eq!(hold.complete_span(), None, "the record is not complete");
}
