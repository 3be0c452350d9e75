//! Segments of a node in a rank's region: clients map them, ranks see their bytes through the world, and flags show that
//! records are complete.

#[path = "../../heap/tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::Duration;

use common::TestNode;
use moontide_heap::{HugePages, NodeHeap, PayloadWriter, SharedReader};
use moontide_symmetric::{
    PageOutcome, READY_FLAG_BYTES, Rank, RecordProgress, World, WorldConfig, WorldShape,
};
use moontide_types::Span;

#[test]
fn segment_in_rank_region_is_mapped_by_its_clients() {
    let dir = std::env::temp_dir().join(format!("moontide-{}-reserved-world", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let config = WorldConfig {
        path: dir.join("world"),
        rank: Rank(0),
        shape: WorldShape { ranks: 1, bytes: 1 << 20 },
        huge: HugePages::Auto,
        timeout: Duration::from_secs(10),
    };
    // SAFETY: this process is the world's only rank, and uses its region only as below.
    let world = Arc::new(unsafe { World::join(&config) }.unwrap());
    let bytes = 64 << 10;
    let make = |heap: &NodeHeap, slots| {
        // SAFETY: only this segment uses the second 64 KiB.
        let memory = unsafe { world.reserve(bytes, bytes) }.unwrap();
        // SAFETY: as above.
        unsafe { heap.add_segment_in(slots, memory) }.unwrap()
    };
    let node = TestNode::with_segments(1, 1, 4, bytes, make);
    let heap = Arc::new(node.connect("reserved"));
    let object = node.begin(b"k", 5000, PayloadWriter::Client(heap.client())).unwrap();
    let claim = SharedReader::new(Arc::clone(&heap))
        .expect("a vacant lane")
        .claim(object.segment, object.slot, object.epoch)
        .unwrap();
    let at = claim.payload().expect("not in a forked child");
    // SAFETY: the claim gives this thread exclusive access to these bytes.
    unsafe { std::ptr::write_bytes(at.as_ptr(), 0x5a, 5000) };
    let offset = bytes + claim.header().payload_offset;
    // SAFETY: no thread writes them during the life of the slice.
    let seen = unsafe { std::slice::from_raw_parts(world.at(Rank(0), offset, 5000).as_ptr(), 5000) };
    assert!(seen.iter().all(|byte| *byte == 0x5a), "the world's mapping lacks the client's writes");

    let flag = world.flag(Rank(0), 4 * bytes);
    flag.prepare(object.epoch, 2, Span::new(claim.header().payload_offset, 5000).unwrap());
    assert_eq!(
        world.flag(Rank(0), 4 * bytes + READY_FLAG_BYTES).progress(object.epoch),
        RecordProgress::Pending
    );
    assert_eq!(flag.page_done(object.epoch), PageOutcome::Pending);
    assert_eq!(flag.page_done(object.epoch), PageOutcome::Complete);
    assert_eq!(flag.progress(object.epoch), RecordProgress::Complete);

    for (offset, reason) in
        [(1 << 20, "beyond the region's end"), (100, "not page-aligned"), (bytes, "already reserved")]
    {
        // SAFETY: rejected before it is used.
        assert!(unsafe { world.reserve(offset, 4096) }.is_err(), "{reason}");
    }
    drop(world);
    assert_eq!(claim.payload(), Some(at), "the segment's own mapping remains");
    std::fs::remove_dir_all(&dir).unwrap();
}
