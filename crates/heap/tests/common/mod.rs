//! A node with a small master in the same process, which grants slots, extents and epochs as the real one does.

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
    BeginError, FreedSlot, Grant, HeapConfig, HugePages, KillOutcome, LocalHeap, NodeHeap, PayloadWriter,
    ReclaimReport, RecordSpec, Segment, ShmListener, connect,
};
use moontide_types::record::{Attributes, KeySection, RecordFlags, RecordLayout};
use moontide_types::{
    Clock, Epoch, Extent, Generation, IdKey, Key, MonoTime, NodeId, ObjectId, SegmentId, SlotId, SystemClock,
    Tenant, TenantGeneration, Term,
};

/// Grant of the small master.
#[derive(Clone, Copy, Debug)]
pub struct GrantedObject {
    pub segment: SegmentId,
    pub slot: SlotId,
    pub epoch: Epoch,
    pub extent: Extent,
    pub id: ObjectId,
}

struct MasterState {
    allocator: Allocator,
    free_slots: Vec<SlotId>,
    blocks: HashMap<SlotId, BlockRef>,
}

pub struct TestNode {
    pub heap: NodeHeap,
    master: Mutex<Vec<MasterState>>,
    sequence: AtomicU64,
}

pub const TERM: u32 = 1;

pub fn id_of(key: &[u8]) -> ObjectId {
    IdKey::new(1, [7; 32]).object_id(Tenant::DEFAULT, TenantGeneration(0), Key::new(key).unwrap())
}

/// Returns an object of one stripe, with the key as its only property.
pub fn record_of(key: &[u8], len: u64) -> RecordSpec<'_> {
    static NO_ATTRIBUTES: LazyLock<Attributes> = LazyLock::new(Attributes::default);
    RecordSpec {
        id: id_of(key),
        flags: RecordFlags::NONE,
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
        let make = |heap: &NodeHeap, slots| heap.add_segment(slots, units, HugePages::Auto).unwrap();
        TestNode::with_segments(node, segments, slots, bytes, make)
    }

    /// Creates a node whose segments `make` adds.
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
            huge: HugePages::Auto,
        })
        .unwrap();
        let units = (bytes / 512) as u32;
        let mut master = vec![];
        for _ in 0..segments {
            let segment = make(&heap, slots);
            segment.adopt_term(Term::new(TERM).unwrap());
            master.push(MasterState {
                allocator: Allocator::new(units),
                free_slots: (0..slots).rev().map(SlotId).collect(),
                blocks: HashMap::new(),
            });
        }
        heap.index_region().set_open(true);
        heap.heartbeat();
        TestNode { heap, master: Mutex::new(master), sequence: AtomicU64::new(1) }
    }

    /// Grants slot, extent and epoch for an object, and begins it at the node.
    pub fn begin(&self, key: &[u8], len: u64, writer: PayloadWriter) -> Option<GrantedObject> {
        let section = KeySection { tenant: Tenant::DEFAULT, key: Key::new(key).unwrap() };
        let layout = RecordLayout::new(len, section.encoded_len() as u32, 0, RecordFlags::NONE).unwrap();
        let align = if layout.align() == 4096 { Align::Page } else { Align::Unit };
        let units = NonZeroU32::new(layout.units()).unwrap();
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let epoch = Epoch::new(Term::new(TERM).unwrap(), sequence).unwrap();
        let granted = {
            let mut states = self.master.lock().unwrap();
            let count = states.len();
            (0..count).map(|i| (sequence as usize + i) % count).find_map(|segment| {
                let state = &mut states[segment];
                let slot = state.free_slots.pop()?;
                let Some(allocation) = state.allocator.alloc(units, align) else {
                    state.free_slots.push(slot);
                    return None;
                };
                state.blocks.insert(slot, allocation.block);
                Some(GrantedObject {
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
        granted: &GrantedObject,
        key: &[u8],
        len: u64,
        writer: PayloadWriter,
    ) -> Result<(), BeginError> {
        let record = record_of(key, len);
        let GrantedObject { segment, slot, epoch, extent, .. } = *granted;
        self.heap.begin(segment, &Grant { slot, epoch, term: epoch.term(), extent, record, writer })
    }

    /// Puts an object by the node itself.
    pub fn put(&self, key: &[u8], payload: &[u8]) -> GrantedObject {
        let granted = self.begin(key, payload.len() as u64, PayloadWriter::Node).expect("enough space");
        let GrantedObject { segment, slot, epoch, .. } = granted;
        let root = self.heap.claim(segment, slot, epoch).unwrap().fill(payload);
        self.heap.commit(segment, slot, epoch, root, PayloadWriter::Node).unwrap();
        granted
    }

    pub fn kill(&self, granted: &GrantedObject) -> KillOutcome {
        self.heap.kill(granted.segment, granted.slot, granted.epoch, MonoTime(0))
    }

    /// Reclaims, and frees the reclaimed slots and extents at the master.
    pub fn reclaim(&self) -> ReclaimReport {
        let reclaimed = self.heap.reclaim(now());
        let mut states = self.master.lock().unwrap();
        for &FreedSlot { segment, slot, extent, .. } in &reclaimed.freed {
            let state = &mut states[segment.0 as usize];
            let block = state.blocks.remove(&slot).expect("the slot was granted");
            assert_eq!(state.allocator.free(block), extent);
            state.free_slots.push(slot);
        }
        reclaimed
    }

    /// Asserts that nothing is in use: neither in the node's map nor at the master nor in the index.
    pub fn assert_empty(&self) {
        for (segment, state) in self.heap.segments().iter().zip(self.master.lock().unwrap().iter()) {
            let shape = segment.shape();
            assert_eq!(segment.taken_units(), 0, "units leaked in {:?}", shape.segment);
            assert_eq!(state.free_slots.len(), shape.slots as usize, "slots leaked in {:?}", shape.segment);
            let stats = state.allocator.stats();
            assert_eq!((stats.free_units, stats.free_blocks), (shape.units, 1), "{stats:?}");
            segment.for_each_record(|slot, header, _| panic!("{slot} still holds {header:?}"));
        }
        assert!(self.heap.index_region().index().is_empty(), "the index still has entries");
    }

    /// Binds a listener at a path of its own.
    pub fn bind_listener(&self, name: &str) -> (ShmListener, PathBuf) {
        bind_listener(name)
    }

    /// Connects a client of this node in the same process.
    pub fn connect(&self, name: &str) -> LocalHeap {
        self.connect_with_limit(name, u64::MAX)
    }

    pub fn connect_with_limit(&self, name: &str, pinned_bytes_max: u64) -> LocalHeap {
        connect_to_heap(&self.heap, name, pinned_bytes_max)
    }
}

pub fn bind_listener(name: &str) -> (ShmListener, PathBuf) {
    let path = std::env::temp_dir().join(format!("moontide-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    // SAFETY: node and clients are these tests.
    (unsafe { ShmListener::bind(&path, &[], Duration::from_secs(5)) }.unwrap(), path)
}

/// Connects a client of a heap in the same process.
pub fn connect_to_heap(heap: &NodeHeap, name: &str, pinned_bytes_max: u64) -> LocalHeap {
    let (listener, path) = bind_listener(name);
    let local = std::thread::scope(|scope| {
        let handshake = scope.spawn(|| listener.handshake(listener.accept().unwrap(), heap).unwrap());
        // SAFETY: node and client are this test.
        let (local, _socket) = unsafe { connect(&path, Duration::from_secs(5), pinned_bytes_max) }.unwrap();
        handshake.join().unwrap();
        local
    });
    std::fs::remove_file(&path).unwrap();
    local
}
