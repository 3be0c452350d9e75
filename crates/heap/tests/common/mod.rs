//! A node with a small master in the same process: grants slots, extents and epochs, as the real one will.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test file uses its own part")]

pub mod libtest;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use moontide_heap::alloc::{Align, Allocator, BlockRef};
use moontide_heap::{
    BeginError, Door, Freed, Grant, HeapConfig, HugePages, Killed, LocalHeap, NewRecord, NodeHeap, Reclaimed,
    Segment, Writer, join,
};
use moontide_types::record::{Attributes, Flags, KeySection, RecordLayout};
use moontide_types::{
    Clock, Epoch, Extent, Generation, IdKey, Key, MonoTime, NodeId, ObjectId, SegmentId, SlotId, SystemClock,
    Tenant, TenantGeneration, Term,
};

/// What the small master granted.
#[derive(Clone, Copy, Debug)]
pub struct Granted {
    pub segment: SegmentId,
    pub slot: SlotId,
    pub epoch: Epoch,
    pub extent: Extent,
    pub id: ObjectId,
}

struct Books {
    allocator: Allocator,
    free_slots: Vec<SlotId>,
    blocks: HashMap<SlotId, BlockRef>,
}

pub struct TestNode {
    pub heap: NodeHeap,
    books: Mutex<Vec<Books>>,
    sequence: AtomicU64,
}

pub const TERM: u32 = 1;

pub fn id_of(key: &[u8]) -> ObjectId {
    IdKey::new(1, [7; 32]).object_id(Tenant::DEFAULT, TenantGeneration(0), Key::new(key).unwrap())
}

/// An object of one stripe, with the key as its only property.
pub fn record_of(key: &[u8], len: u64) -> NewRecord<'_> {
    static NO_ATTRIBUTES: LazyLock<Attributes> = LazyLock::new(Attributes::default);
    NewRecord {
        id: id_of(key),
        flags: Flags::NONE,
        object_len: len,
        stripe_index: 0,
        stripe_count: 1,
        stripe_offset: 0,
        stripe_len: len,
        key: KeySection { tenant: Tenant::DEFAULT, key: Key::new(key).unwrap() },
        attributes: &NO_ATTRIBUTES,
        id_key: 1,
        tenant_generation: TenantGeneration(0),
    }
}

pub fn now() -> MonoTime {
    SystemClock.now()
}

impl TestNode {
    pub fn new(segments: u32, slots: u32, bytes: u64) -> TestNode {
        TestNode::of(1, segments, slots, bytes)
    }

    pub fn of(node: u64, segments: u32, slots: u32, bytes: u64) -> TestNode {
        let units = (bytes / 512) as u32;
        let make = |heap: &NodeHeap, slots| heap.add_segment(slots, units, HugePages::IfAllowed).unwrap();
        TestNode::with_segments(node, segments, slots, bytes, make)
    }

    /// With segments that somebody else makes.
    pub fn with_segments(
        node: u64,
        segments: u32,
        slots: u32,
        bytes: u64,
        make: impl Fn(&NodeHeap, u32) -> Arc<Segment>,
    ) -> TestNode {
        let heap = NodeHeap::create(HeapConfig {
            node: NodeId(node),
            generation: Generation(1),
            slots_max: u64::from(segments) * u64::from(slots),
            huge: HugePages::IfAllowed,
        })
        .unwrap();
        let units = (bytes / 512) as u32;
        let mut books = vec![];
        for _ in 0..segments {
            let segment = make(&heap, slots);
            segment.obey(Term::new(TERM).unwrap());
            books.push(Books {
                allocator: Allocator::new(units),
                free_slots: (0..slots).rev().map(SlotId).collect(),
                blocks: HashMap::new(),
            });
        }
        heap.board().set_open(true);
        heap.beat();
        TestNode { heap, books: Mutex::new(books), sequence: AtomicU64::new(1) }
    }

    /// Slot, extent and epoch for an object, and the node's consent.
    pub fn begin(&self, key: &[u8], len: u64, writer: Writer) -> Option<Granted> {
        let section = KeySection { tenant: Tenant::DEFAULT, key: Key::new(key).unwrap() };
        let layout = RecordLayout::new(len, section.encoded_len() as u32, 0, Flags::NONE).unwrap();
        let align = if layout.align() == 4096 { Align::Page } else { Align::Unit };
        let units = NonZeroU32::new(layout.units()).unwrap();
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let epoch = Epoch::new(Term::new(TERM).unwrap(), sequence).unwrap();
        let granted = {
            let mut books = self.books.lock().unwrap();
            let count = books.len();
            (0..count).map(|i| (sequence as usize + i) % count).find_map(|segment| {
                let books = &mut books[segment];
                let slot = books.free_slots.pop()?;
                let Some(allocation) = books.allocator.alloc(units, align) else {
                    books.free_slots.push(slot);
                    return None;
                };
                books.blocks.insert(slot, allocation.block);
                Some(Granted {
                    segment: SegmentId(segment as u32),
                    slot,
                    epoch,
                    extent: allocation.extent,
                    id: id_of(key),
                })
            })?
        };
        self.begin_granted(&granted, key, len, writer).unwrap();
        Some(granted)
    }

    pub fn begin_granted(
        &self,
        granted: &Granted,
        key: &[u8],
        len: u64,
        writer: Writer,
    ) -> Result<(), BeginError> {
        let record = record_of(key, len);
        let Granted { segment, slot, epoch, extent, .. } = *granted;
        self.heap.begin(segment, &Grant { slot, epoch, term: epoch.term(), extent, record, writer })
    }

    /// A whole put by the node itself.
    pub fn put(&self, key: &[u8], payload: &[u8]) -> Granted {
        let granted = self.begin(key, payload.len() as u64, Writer::Node).expect("room");
        let Granted { segment, slot, epoch, .. } = granted;
        let root = self.heap.claim(segment, slot, epoch).unwrap().fill(payload);
        self.heap.commit(segment, slot, epoch, root, Writer::Node).unwrap();
        granted
    }

    pub fn kill(&self, granted: &Granted) -> Killed {
        self.heap.kill(granted.segment, granted.slot, granted.epoch, MonoTime(0))
    }

    /// Reclaims, and takes what came back into the books.
    pub fn reclaim(&self) -> Reclaimed {
        let reclaimed = self.heap.reclaim(now());
        let mut all_books = self.books.lock().unwrap();
        for &Freed { segment, slot, extent, .. } in &reclaimed.freed {
            let books = &mut all_books[segment.0 as usize];
            let block = books.blocks.remove(&slot).expect("it was granted");
            assert_eq!(books.allocator.free(block), extent);
            books.free_slots.push(slot);
        }
        reclaimed
    }

    /// Nothing is taken anywhere: neither in the node's map nor in the master's books nor in the index.
    pub fn assert_empty(&self) {
        for (segment, books) in self.heap.segments().iter().zip(self.books.lock().unwrap().iter()) {
            let shape = segment.shape();
            assert_eq!(segment.taken_units(), 0, "units leaked in {:?}", shape.segment);
            assert_eq!(books.free_slots.len(), shape.slots as usize, "slots leaked in {:?}", shape.segment);
            let stats = books.allocator.stats();
            assert_eq!((stats.free_units, stats.free_blocks), (shape.units, 1), "{stats:?}");
            segment.for_each_record(|slot, header, _| panic!("{slot} still holds {header:?}"));
        }
        assert!(self.heap.board().index().is_empty(), "the index still has entries");
    }

    /// A door in a folder of its own.
    pub fn open_door(&self, name: &str) -> (Door, PathBuf) {
        open_door(name)
    }

    /// A client of this node in the same process.
    pub fn join(&self, name: &str) -> LocalHeap {
        self.join_with_limit(name, u64::MAX)
    }

    pub fn join_with_limit(&self, name: &str, pinned_bytes_max: u64) -> LocalHeap {
        join_heap(&self.heap, name, pinned_bytes_max)
    }
}

pub fn open_door(name: &str) -> (Door, PathBuf) {
    let path = std::env::temp_dir().join(format!("moontide-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    // SAFETY: node and clients are these tests.
    (unsafe { Door::open(&path, &[], Duration::from_secs(5)) }.unwrap(), path)
}

/// A client of a heap in the same process.
pub fn join_heap(heap: &NodeHeap, name: &str, pinned_bytes_max: u64) -> LocalHeap {
    let (door, path) = open_door(name);
    let local = std::thread::scope(|scope| {
        let admit = scope.spawn(|| door.admit(door.accept().unwrap(), heap).unwrap());
        // SAFETY: node and client are this test.
        let (local, _socket) = unsafe { join(&path, Duration::from_secs(5), pinned_bytes_max) }.unwrap();
        admit.join().unwrap();
        local
    });
    std::fs::remove_file(&path).unwrap();
    local
}
