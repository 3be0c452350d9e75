//! [`NodeMemory`]: the node's heap and, for each segment, state of the node process alone: the grant of the master, the
//! usage, and access marks of remote reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use moontide_heap::{
    DeviceSlice, HeapConfig, HugePages, IndexRegionError, NodeHeap, Protection, Region, RegionError, Segment,
    SegmentError, Staging,
};
use moontide_rt::sync::Mutex;
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::{State, Word};
use moontide_types::{
    Clock, Epoch, Generation, GroupId, MonoTime, NodeId, SegmentId, SlotId, SystemClock, Term,
};

use crate::logic::access::AccessBitmap;
use crate::logic::segment_plan::SegmentPlan;
use crate::logic::usage::{UnitUsage, UsageTracker};
use crate::remote_reads::RemoteReadTable;
use crate::slot_fills::SlotFills;

/// Memory that a node shares with clients and peers, and its state for each segment.
#[derive(Debug)]
pub(crate) struct NodeMemory {
    heap: Arc<NodeHeap>,
    /// Buffers for records read from disk.
    staging: Option<Arc<Staging>>,
    segments: Vec<NodeSegment>,
    /// Slots that commands fill with complete records.
    pub(crate) fills: SlotFills,
    remote_reads: RemoteReadTable,
    generation: Generation,
    slots: u32,
    /// The segments are memory of ranks, which others than the store write, too.
    is_external: bool,
    /// Time from which the node is self-fenced, in nanoseconds of the clock; 0 before the first contact with a master.
    stale_at: AtomicU64,
}

/// A heap segment and the node's state for it.
#[derive(Debug)]
pub(crate) struct NodeSegment {
    segment: Arc<Segment>,
    usage: Mutex<UsageTracker>,
    /// Access marks of remote reads, one bit per slot.
    touched: Box<[AtomicU64]>,
    closed: AtomicBool,
    grant: Mutex<Option<(GroupId, Term)>>,
    was_offered: AtomicBool,
}

/// Failure to allocate the node's memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The local index could not be allocated.
    #[error(
        "cannot create the local index: {0}; lower memory_bytes, or raise the limit of locked or shared \
         memory"
    )]
    Index(#[from] IndexRegionError),
    /// A segment could not be allocated.
    #[error(
        "cannot create segment {number} of {count}: {source}; lower memory_bytes, or free memory of this host"
    )]
    Segment {
        /// Index of the segment, from 0.
        number: u32,
        /// Number of planned segments.
        count: u32,
        /// Error of the heap.
        source: SegmentError,
    },
    /// Staging memory could not be allocated.
    #[error("cannot create staging memory for disk reads: {0}; lower disk.staging_bytes")]
    Staging(SegmentError),
}

/// External memory for a node's segments, such as a range of a rank's region. Segments are adjacent, from its start
/// on.
#[derive(Debug)]
pub struct ExternalMemory {
    region: Region,
    /// Holds the record bytes at the same offsets; `None`: the region holds them.
    device: Option<DeviceSlice>,
}

impl ExternalMemory {
    /// Uses the region, which this process created or whose descriptor it kept.
    ///
    /// # Safety
    /// No process may use these bytes for anything else while a process maps them.
    #[expect(unsafe_code, reason = "other uses of the bytes cannot be checked")]
    pub unsafe fn new(region: Region) -> ExternalMemory {
        ExternalMemory { region, device: None }
    }

    /// Like [`ExternalMemory::new`], with the record bytes in device memory, at the same offsets. Of the region, only
    /// the pages that hold keys and attributes are used.
    ///
    /// # Safety
    /// Like [`ExternalMemory::new`], for both.
    ///
    /// # Panics
    /// Panics if the region is longer than the device memory.
    #[expect(unsafe_code, reason = "other uses of the bytes cannot be checked")]
    pub unsafe fn of_device(region: Region, device: DeviceSlice) -> ExternalMemory {
        let (len, all) = (region.len(), device.len());
        assert!(len <= all, "region of {len} bytes exceeds the device memory of {all} bytes");
        ExternalMemory { region, device: Some(device) }
    }

    #[expect(unsafe_code, reason = "other uses of the bytes cannot be checked")]
    fn add_segment(
        &self,
        heap: &NodeHeap,
        number: u32,
        plan: SegmentPlan,
    ) -> Result<Arc<Segment>, SegmentError> {
        let (first, expected) = (u64::from(number) * plan.bytes(), u64::from(plan.count) * plan.bytes());
        if expected > self.region.len() {
            return Err(RegionError::Size { found: self.region.len(), expected }.into());
        }
        let memory = self.region.subregion((first, plan.bytes()), Protection::AllWrite)?;
        // SAFETY: the caller of `new` or `of_device` guarantees that nothing else uses the bytes.
        unsafe {
            match &self.device {
                None => heap.add_segment_in(plan.slots, memory),
                Some(device) => {
                    heap.add_device_segment(plan.slots, memory, device.subslice(first, plan.bytes()))
                }
            }
        }
    }
}

/// Record size for which the slots of staging suffice: with smaller records, slots run out before bytes.
const STAGED_RECORD_BYTES_MIN: u64 = 64 << 10;

/// Returns the number of slots for `bytes` of staging memory, at least 64.
fn staging_slots(bytes: u64) -> u32 {
    u32::try_from(bytes / STAGED_RECORD_BYTES_MIN).unwrap_or(u32::MAX).clamp(64, 1 << 16)
}

impl NodeMemory {
    pub(crate) fn create(
        node: NodeId,
        generation: Generation,
        plan: SegmentPlan,
        huge: HugePages,
        staging_bytes: Option<u64>,
        external: Option<&ExternalMemory>,
    ) -> Result<NodeMemory, MemoryError> {
        let more_slots = staging_bytes.map_or(0, |bytes| staging_slots(bytes).into());
        let slots_max = plan.slots_all() + more_slots;
        let heap = Arc::new(NodeHeap::create(HeapConfig { node, generation, slots_max, huge })?);
        let mut segments = Vec::with_capacity(plan.count as usize);
        for number in 0..plan.count {
            let segment = match external {
                None => heap.add_segment(plan.slots, plan.units, huge),
                Some(external) => external.add_segment(&heap, number, plan),
            };
            let segment =
                segment.map_err(|source| MemoryError::Segment { number, count: plan.count, source })?;
            segments.push(NodeSegment {
                segment,
                usage: Mutex::new(UsageTracker::new(plan.units, plan.slots)),
                touched: (0..plan.slots.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
                closed: AtomicBool::new(false),
                grant: Mutex::new(None),
                was_offered: AtomicBool::new(false),
            });
        }
        // After all other segments, whose ids masters use.
        let staging = staging_bytes.map(|bytes| {
            let units = u32::try_from(bytes / UNIT_BYTES / 8 * 8).unwrap_or(u32::MAX / 8 * 8);
            Staging::new(&heap, staging_slots(bytes), units, huge).map(Arc::new).map_err(MemoryError::Staging)
        });
        let staging = staging.transpose()?;
        Ok(NodeMemory {
            heap,
            staging,
            segments,
            fills: SlotFills::default(),
            remote_reads: RemoteReadTable::default(),
            generation,
            slots: plan.slots,
            is_external: external.is_some(),
            stale_at: AtomicU64::new(0),
        })
    }

    /// Whether the node is self-fenced: contact with a master was lost for so long that records here may have been
    /// removed. The coarse clock lags by a tick: peers would be served although the local index is closed.
    pub(crate) fn is_stale(&self) -> bool {
        let at = self.stale_at.load(Ordering::SeqCst);
        at != 0 && SystemClock.now().0 >= at
    }

    /// Fences the node from `at` on. The next contact with a master postpones it.
    pub(crate) fn set_stale_at(&self, at: MonoTime) {
        self.stale_at.store(at.0, Ordering::SeqCst);
    }

    pub(crate) fn heap(&self) -> &NodeHeap {
        &self.heap
    }

    pub(crate) fn staging(&self) -> Option<&Arc<Staging>> {
        self.staging.as_ref()
    }

    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// Whether local processes may fill records without digests: kernels and threads of ranks write them, unseen by the
    /// store. In other memory such a record could show what an earlier one has left there.
    pub(crate) fn allows_digestless(&self) -> bool {
        self.is_external
    }

    /// Records that other hosts read much.
    pub(crate) fn remote_reads(&self) -> &RemoteReadTable {
        &self.remote_reads
    }

    pub(crate) fn segments(&self) -> &[NodeSegment] {
        &self.segments
    }

    pub(crate) fn segment(&self, segment: SegmentId) -> Option<&NodeSegment> {
        self.segments.get(segment.0 as usize)
    }

    /// Records that the word of a slot has become `epoch`, `state`.
    pub(crate) fn record_transition(&self, segment: SegmentId, slot: SlotId, epoch: Epoch, state: State) {
        if let Some(node_segment) = self.segment(segment) {
            node_segment.usage.lock().record(slot, Word::new(epoch, state), None);
        }
    }

    /// Records a begun write with an extent of `units` units.
    pub(crate) fn record_begun(&self, segment: SegmentId, slot: SlotId, epoch: Epoch, units: u32) {
        if let Some(node_segment) = self.segment(segment) {
            node_segment.usage.lock().record(slot, Word::new(epoch, State::Writing), Some(units));
        }
    }

    /// Records the start of a copy from disk, or from another node, into a slot with an extent of `units` units.
    pub(crate) fn record_copy(&self, segment: SegmentId, slot: SlotId, version: Epoch, units: u32) {
        if let Some(node_segment) = self.segment(segment) {
            node_segment.usage.lock().note_copy(slot, version, units);
        }
    }

    /// Returns the usage of all segments together.
    pub(crate) fn usage(&self) -> UnitUsage {
        let mut all = UnitUsage::default();
        self.segments.iter().for_each(|node_segment| all.add(&node_segment.usage()));
        all
    }

    /// Takes and clears all access marks.
    pub(crate) fn take_touched(&self) -> AccessBitmap {
        let mut map = AccessBitmap::new(self.segments.len(), self.slots);
        for ledger in self.heap.ledgers().clients() {
            ledger.take_touched(|number| map.mark_number(number));
        }
        for (segment, node_segment) in self.segments.iter().enumerate() {
            for (index, word) in (0u32..).zip(&node_segment.touched) {
                // Relaxed, here and where the bits are set: they are hints for eviction, ordered with nothing.
                if word.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let mut bits = word.swap(0, Ordering::Relaxed);
                while bits != 0 {
                    map.mark(segment, index * 64 + bits.trailing_zeros());
                    bits &= bits - 1;
                }
            }
        }
        map
    }
}

impl NodeSegment {
    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    pub(crate) fn usage(&self) -> UnitUsage {
        self.usage.lock().usage()
    }

    /// Marks a slot as read. Only the first call after a clear writes.
    pub(crate) fn touch(&self, slot: SlotId) {
        let Some(word) = self.touched.get(slot.0 as usize / 64) else { return };
        let bit = 1 << (slot.0 % 64);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Whether new writes are refused.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Refuses new writes from now on.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Records that the segment is offered to a master. Returns whether it was before: then a master may have allocated
    /// parts of it, even if the response to the mount was lost.
    pub(crate) fn offer(&self) -> bool {
        self.was_offered.swap(true, Ordering::Relaxed)
    }

    /// Returns the group of the segment and its adopted term.
    pub(crate) fn grant(&self) -> Option<(GroupId, Term)> {
        *self.grant.lock()
    }

    /// Records that a master has mounted the segment, and adopts a newer term.
    pub(crate) fn set_grant(&self, group: GroupId, term: Term) {
        let skip = moontide_rt::mutation_enabled("term-not-adopted") && self.grant().is_some();
        let term = if skip { term } else { self.segment.adopt_term(term) };
        *self.grant.lock() = Some((group, term));
        self.closed.store(false, Ordering::Relaxed);
    }

    /// Whether the segment holds any record.
    pub(crate) fn is_occupied(&self) -> bool {
        self.segment.taken_units() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_read_marks_are_taken_once() {
        let plan = SegmentPlan { count: 3, units: 2048, slots: 100 };
        let memory = NodeMemory::create(NodeId(1), Generation(9), plan, HugePages::Auto, None, None).unwrap();
        let touch = |segment, slot| memory.segment(SegmentId(segment)).unwrap().touch(SlotId(slot));
        for (segment, slot) in [(0, 0), (2, 99), (2, 64), (1, 100), (1, 5000)] {
            touch(segment, slot);
        }
        let bitmaps = memory.take_touched().bitmaps(memory.generation(), 0);
        let segments: Vec<(u32, u32)> = bitmaps.iter().map(|b| (b.segment, b.first_slot)).collect();
        assert_eq!(segments, [(0, 0), (2, 64)], "slots out of range leave no mark");
        assert!(memory.take_touched().bitmaps(memory.generation(), 0).is_empty());
    }
}
