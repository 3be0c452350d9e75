//! Slots that stay for those who wait for them, and segments in memory that a world's ranks know by another way.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::TestNode;
use moontide_heap::{
    Counted, FLAG_BYTES, HugePages, Killed, LocalHeap, NoStay, NodeHeap, Progress, Rank, SharedReader, World,
    WorldConfig, WorldShape, Writer,
};
use moontide_types::record::State;
use moontide_types::{Epoch, SegmentId, SlotId, Span};

fn reader(heap: &Arc<LocalHeap>) -> SharedReader {
    SharedReader::new(Arc::clone(heap)).expect("a group of cells")
}

#[test]
fn a_slot_stays_while_its_record_is_written_committed_and_killed() {
    let node = TestNode::new(1, 4, 64 << 10);
    let (writer, waiting) = (Arc::new(node.join("writer")), Arc::new(node.join("waiting")));
    let by = Writer::Client(writer.client());
    let object = node.begin(b"k", 3000, by).unwrap();
    let stay = reader(&waiting).stay(object.segment, object.slot, object.epoch).expect("it has begun");
    assert_eq!(stay.state(), Some(State::Writing));
    let mut claim = writer.reader().unwrap();
    let root = claim.claim(object.segment, object.slot, object.epoch).unwrap().fill(&[9; 3000]);
    // The commit does not wait for those who wait for it.
    node.heap.commit(object.segment, object.slot, object.epoch, root, by).unwrap();
    assert_eq!((stay.state(), stay.epoch()), (Some(State::Ready), object.epoch));
    assert_eq!(stay.complete_span(), Span::new(object.extent.span().offset(), 3000));
    let again = reader(&waiting).stay(object.segment, object.slot, object.epoch).expect("it is complete");
    assert_eq!(node.kill(&object), Killed::Dying);
    assert_eq!(stay.state(), Some(State::Dead));
    assert_eq!(reader(&waiting).stay(object.segment, object.slot, object.epoch).err(), Some(NoStay::Ended));
    drop(stay);
    assert_eq!(node.reclaim().freed.len(), 0, "the second one still names it");
    let at = again.payload(Span::new(object.extent.span().offset(), 3000).unwrap()).unwrap();
    // SAFETY: the record was complete, and its slot stays.
    assert_eq!(unsafe { std::slice::from_raw_parts(at.as_ptr(), 3000) }, [9; 3000]);
    drop(again);
    assert_eq!(node.reclaim().freed.len(), 1);
    node.assert_empty();
}

#[test]
fn what_cannot_stay() {
    let node = TestNode::new(1, 4, 64 << 10);
    let heap = Arc::new(node.join("here"));
    let object = node.begin(b"k", 100, Writer::Client(heap.client())).unwrap();
    let mut own = reader(&heap);
    let other = Epoch::new(object.epoch.term(), 99).unwrap();
    let ended = Some(NoStay::Ended);
    assert_eq!(own.stay(object.segment, object.slot, other).err(), ended, "another version");
    assert_eq!(own.stay(object.segment, SlotId(4), object.epoch).err(), ended, "no such slot");
    assert_eq!(own.stay(SegmentId(7), object.slot, object.epoch).err(), ended, "no such segment");
    let claim = own.claim(object.segment, object.slot, object.epoch).unwrap();
    let refused = Some(NoStay::Own);
    assert_eq!(own.stay(object.segment, object.slot, object.epoch).err(), refused, "this process writes it");
    let committing = claim.end_before_commit();
    assert_eq!(
        own.stay(object.segment, object.slot, object.epoch).err(),
        refused,
        "and is about to commit it"
    );
    drop(committing);
    let stay = own.stay(object.segment, object.slot, object.epoch).unwrap();
    assert!(stay.payload(Span::new(64 << 10, 1).unwrap()).is_none(), "behind the segment's end");
    assert_eq!(stay.complete_span(), None, "it is not complete");
}

#[test]
fn a_segment_lies_in_a_ranks_region_and_its_clients_map_the_same_bytes() {
    let dir = std::env::temp_dir().join(format!("moontide-{}-lent-world", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let config = WorldConfig {
        path: dir.join("world"),
        rank: Rank(0),
        shape: WorldShape { ranks: 1, bytes: 1 << 20 },
        huge: HugePages::IfAllowed,
        timeout: Duration::from_secs(10),
    };
    // SAFETY: this process is the world's only rank, and uses its region as this test says.
    let world = Arc::new(unsafe { World::join(&config) }.unwrap());
    let bytes = 64 << 10;
    let make = |heap: &NodeHeap, slots| {
        // SAFETY: the second 64 KiB are for this segment alone.
        let memory = unsafe { world.lend(bytes, bytes) }.unwrap();
        // SAFETY: as above.
        unsafe { heap.add_segment_in(slots, memory) }.unwrap()
    };
    let node = TestNode::with_segments(1, 1, 4, bytes, make);
    let heap = Arc::new(node.join("lent"));
    let object = node.begin(b"k", 5000, Writer::Client(heap.client())).unwrap();
    let claim = reader(&heap).claim(object.segment, object.slot, object.epoch).unwrap();
    let at = claim.payload().expect("no fork");
    // SAFETY: the claim makes these bytes this thread's.
    unsafe { std::ptr::write_bytes(at.as_ptr(), 0x5a, 5000) };
    let offset = bytes + claim.header().payload_offset;
    // SAFETY: nobody writes them meanwhile.
    let seen = unsafe { std::slice::from_raw_parts(world.at(Rank(0), offset, 5000).as_ptr(), 5000) };
    assert!(seen.iter().all(|byte| *byte == 0x5a), "the world sees what the client wrote");

    let flag = world.flag(Rank(0), 4 * bytes);
    flag.prepare(object.epoch, 2, Span::new(claim.header().payload_offset, 5000).unwrap());
    assert_eq!(world.flag(Rank(0), 4 * bytes + FLAG_BYTES).progress(object.epoch), Progress::NotYet);
    assert_eq!(flag.page_done(object.epoch), Counted::More);
    assert_eq!(flag.page_done(object.epoch), Counted::Complete);
    assert_eq!(flag.progress(object.epoch), Progress::Complete);

    for (offset, why) in
        [(1 << 20, "behind the region's end"), (100, "not on a page"), (bytes, "lent before")]
    {
        // SAFETY: refused before anything is done with it.
        assert!(unsafe { world.lend(offset, 4096) }.is_err(), "{why}");
    }
    drop(world);
    assert_eq!(claim.payload(), Some(at), "the segment's own mapping stays");
    std::fs::remove_dir_all(&dir).unwrap();
}
