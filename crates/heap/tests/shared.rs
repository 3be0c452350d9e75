//! Readers and guards that keep their heap alive.

mod common;

use std::sync::Arc;

use common::{TestNode, id_of, now};
use moontide_heap::{KillOutcome, LocalHeap, SharedGuard, SharedLookup, SharedReader};
use moontide_types::Epoch;

fn hit(lookup: SharedLookup) -> SharedGuard {
    match lookup {
        SharedLookup::Hit(guard) => guard,
        other => panic!("expected a hit, got {other:?}"),
    }
}

#[test]
fn shared_guard_outlives_reader_and_heap_on_another_thread() {
    let node = TestNode::new(1, 4, 64 << 10);
    let heap = Arc::new(node.connect("shared"));
    let weak = Arc::downgrade(&heap);
    let object = node.put(b"k", &[7; 40_000]);
    let mut reader = SharedReader::new(Arc::clone(&heap)).unwrap();
    assert!(Arc::ptr_eq(reader.heap(), &heap));
    let guard = hit(reader.get(&object.id, now()));
    drop((reader, heap));

    assert_eq!(node.kill(&object), KillOutcome::Killed);
    assert_eq!(node.reclaim().freed.len(), 0, "the guard still pins the slot");
    std::thread::spawn(move || {
        assert_eq!(guard.bytes(), [7; 40_000]);
        assert_eq!(guard.verify(), Some(true));
        assert_eq!(guard.header().id, object.id);
        assert_eq!((guard.version(), guard.place()), (object.epoch, (object.segment, object.slot)));
        drop(guard);
    })
    .join()
    .unwrap();
    assert!(weak.upgrade().is_none(), "the last guard drops the heap");
    assert_eq!(node.reclaim().freed.len(), 1);
    node.assert_empty();
}

#[test]
fn shared_reader_returns_miss_hit_full_and_closed() {
    let node = TestNode::new(1, 4, 64 << 10);
    let object = node.put(b"k", &[1; 1000]);
    let mut reader = SharedReader::new(Arc::new(node.connect_with_limit("shared-finds", 1500))).unwrap();
    assert!(matches!(reader.get(&id_of(b"another"), now()), SharedLookup::Miss));
    let other = Epoch::new(object.epoch.term(), 99).unwrap();
    assert!(matches!(reader.get_at(object.segment, object.slot, other, now()), SharedLookup::Miss));
    let guard = hit(reader.get_at(object.segment, object.slot, object.epoch, now()));
    assert_eq!(guard.bytes(), [1; 1000]);
    assert!(matches!(reader.get(&object.id, now()), SharedLookup::Full));
    drop(guard);
    drop(hit(reader.get(&object.id, now())));
    node.heap.index_region().set_open(false);
    assert!(matches!(reader.get(&object.id, now()), SharedLookup::Closed));
}

#[test]
fn shared_readers_leave_lanes_for_others_and_release_theirs() {
    let node = TestNode::new(1, 4, 64 << 10);
    let heap = Arc::new(node.connect("shared-lanes"));
    for _ in 0..3 {
        let readers: Vec<_> = std::iter::from_fn(|| SharedReader::new(Arc::clone(&heap))).collect();
        assert_eq!(readers.len() as u64, moontide_heap::LANES_PER_LEDGER / 4 * 3);
        // Lanes for short use are still vacant.
        let short_lived: Vec<_> = std::iter::from_fn(|| heap.reader()).collect();
        assert_eq!(short_lived.len() as u64, moontide_heap::LANES_PER_LEDGER / 4);
    }
}

#[test]
fn unused_lanes_of_reader_are_released_after_guards_drop() {
    let node = TestNode::new(1, 4, 64 << 10);
    let object = node.put(b"k", &[1; 100]);
    let heap = Arc::new(node.connect("shared-many"));
    let mut reader = SharedReader::new(Arc::clone(&heap)).unwrap();
    let held: Vec<SharedGuard> = (0..100).map(|_| hit(reader.get(&object.id, now()))).collect();
    let vacant = |heap: &LocalHeap| std::iter::from_fn(|| heap.long_lived_reader()).collect::<Vec<_>>().len();
    let before = vacant(&heap);
    drop(held);
    // Each use of the reader releases one lane.
    (0..20).for_each(|_| drop(hit(reader.get(&object.id, now()))));
    assert_eq!(vacant(&heap), before + 6, "100 guards use seven lanes of sixteen cells");
}
