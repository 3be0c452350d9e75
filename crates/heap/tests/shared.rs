//! Readers and guards that keep their heap alive by themselves.

mod common;

use std::sync::Arc;

use common::{TestNode, id_of, now};
use moontide_heap::{Killed, LocalHeap, SharedGuard, SharedLookup, SharedReader};
use moontide_types::Epoch;

fn hit(lookup: SharedLookup) -> SharedGuard {
    match lookup {
        SharedLookup::Hit(guard) => guard,
        other => panic!("expected a hit, got {other:?}"),
    }
}

#[test]
fn a_guard_outlives_reader_and_heap_on_another_thread() {
    let node = TestNode::new(1, 4, 64 << 10);
    let heap = Arc::new(node.join("shared"));
    let gone = Arc::downgrade(&heap);
    let object = node.put(b"k", &[7; 40_000]);
    let mut reader = SharedReader::new(Arc::clone(&heap)).unwrap();
    assert!(Arc::ptr_eq(reader.heap(), &heap));
    let guard = hit(reader.get(&object.id, now()));
    drop((reader, heap));

    assert_eq!(node.kill(&object), Killed::Dying);
    assert_eq!(node.reclaim().freed.len(), 0, "the guard still names it");
    std::thread::spawn(move || {
        assert_eq!(guard.bytes(), [7; 40_000]);
        assert_eq!(guard.verify(), Some(true));
        assert_eq!(guard.header().id, object.id);
        assert_eq!((guard.version(), guard.place()), (object.epoch, (object.segment, object.slot)));
        drop(guard);
    })
    .join()
    .unwrap();
    assert!(gone.upgrade().is_none(), "the last guard unmaps");
    assert_eq!(node.reclaim().freed.len(), 1);
    node.assert_empty();
}

#[test]
fn a_shared_reader_finds_what_a_reader_finds() {
    let node = TestNode::new(1, 4, 64 << 10);
    let object = node.put(b"k", &[1; 1000]);
    let mut reader = SharedReader::new(Arc::new(node.join_with_limit("shared-finds", 1500))).unwrap();
    assert!(matches!(reader.get(&id_of(b"another"), now()), SharedLookup::Miss));
    let other = Epoch::new(object.epoch.term(), 99).unwrap();
    assert!(matches!(reader.get_at(object.segment, object.slot, other, now()), SharedLookup::Miss));
    let guard = hit(reader.get_at(object.segment, object.slot, object.epoch, now()));
    assert_eq!(guard.bytes(), [1; 1000]);
    assert!(matches!(reader.get(&object.id, now()), SharedLookup::Full));
    drop(guard);
    drop(hit(reader.get(&object.id, now())));
    node.heap.board().set_open(false);
    assert!(matches!(reader.get(&object.id, now()), SharedLookup::Closed));
}

#[test]
fn every_reader_takes_a_group_and_gives_it_back() {
    let node = TestNode::new(1, 4, 64 << 10);
    let heap = Arc::new(node.join("shared-groups"));
    for _ in 0..3 {
        let readers: Vec<_> = std::iter::from_fn(|| SharedReader::new(Arc::clone(&heap))).collect();
        assert_eq!(readers.len() as u64, moontide_heap::GROUPS_PER_LEDGER / 4 * 3);
        // Whoever needs one for a moment still finds one.
        let brief: Vec<_> = std::iter::from_fn(|| heap.reader()).collect();
        assert_eq!(brief.len() as u64, moontide_heap::GROUPS_PER_LEDGER / 4);
    }
}

#[test]
fn groups_that_were_needed_once_are_given_back() {
    let node = TestNode::new(1, 4, 64 << 10);
    let object = node.put(b"k", &[1; 100]);
    let heap = Arc::new(node.join("shared-many"));
    let mut reader = SharedReader::new(Arc::clone(&heap)).unwrap();
    let held: Vec<SharedGuard> = (0..100).map(|_| hit(reader.get(&object.id, now()))).collect();
    let left = |heap: &LocalHeap| std::iter::from_fn(|| heap.lasting_reader()).collect::<Vec<_>>().len();
    let before = left(&heap);
    drop(held);
    // One is given back at a time, when the reader is used.
    (0..20).for_each(|_| drop(hit(reader.get(&object.id, now()))));
    assert_eq!(left(&heap), before + 6, "100 guards took seven groups of sixteen cells");
}
