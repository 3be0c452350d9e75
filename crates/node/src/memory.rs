//! [`Memory`]: the node's heap, and beside each of its segments what only the node process needs to know: the master's
//! grant, the books of its space, and marks of what remote peers read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use moontide_heap::{
    BoardError, DevicePart, DeviceWorld, HeapConfig, HugePages, NodeHeap, RegionError, Segment, SegmentError,
    Staging, World,
};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Generation, GroupId, MonoTime, NodeId, SegmentId, SlotId, SystemClock, Term};
use parking_lot::Mutex;

use crate::decide::books::{Books, Usage};
use crate::decide::plan::SegmentPlan;
use crate::decide::touch::TouchMap;

/// Everything that a node shares, and its notes about it.
#[derive(Debug)]
pub(crate) struct Memory {
    heap: Arc<NodeHeap>,
    /// Where records come from disk.
    staging: Option<Arc<Staging>>,
    sides: Vec<Side>,
    generation: Generation,
    slots: u32,
    /// When it is too long that a master was heard, in nanoseconds of the clock; 0 before the first one is.
    stale_at: AtomicU64,
}

/// What stands beside a segment.
#[derive(Debug)]
pub(crate) struct Side {
    segment: Arc<Segment>,
    books: Mutex<Books>,
    /// One bit per slot.
    touched: Box<[AtomicU64]>,
    closed: AtomicBool,
    grant: Mutex<Option<(GroupId, Term)>>,
}

/// Why the memory could not be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No room for the index.
    #[error(
        "the index cannot be made: {0}; lower memory_bytes, or raise the limit of locked or shared memory"
    )]
    Board(#[from] BoardError),
    /// No room for a segment.
    #[error(
        "segment {number} of {count} cannot be made: {source}; lower memory_bytes, or free memory of this host"
    )]
    Segment {
        /// Which one.
        number: u32,
        /// Of how many.
        count: u32,
        /// Why.
        source: SegmentError,
    },
    /// No room for what comes from disk.
    #[error("memory for loading from disk cannot be made: {0}; lower disk.staging_bytes")]
    Staging(SegmentError),
}

/// Memory that a node is to have its segments in, instead of its own: this rank's part of a world. Segments lie in it one
/// behind the other, from `offset` on.
#[derive(Debug)]
pub struct LentMemory {
    world: Arc<World>,
    /// Where the records' bytes are, at the same offsets, if not in the world's regions.
    device: Option<Arc<DeviceWorld>>,
    offset: u64,
    len: u64,
}

impl LentMemory {
    /// `len` bytes of this rank's region from `offset` on, a multiple of a page.
    ///
    /// # Safety
    /// No other use may be made of these bytes, by any rank, until the world is gone everywhere.
    #[expect(unsafe_code, reason = "what others do with the bytes cannot be checked")]
    pub unsafe fn new(world: Arc<World>, offset: u64, len: u64) -> LentMemory {
        LentMemory { world, device: None, offset, len }
    }

    /// As [`LentMemory::new`], with the records' bytes in this rank's region of `device`, at the same offsets. Of the world's
    /// region only the pages are used on which keys and attributes lie.
    ///
    /// # Safety
    /// As [`LentMemory::new`], in both regions.
    ///
    /// # Panics
    /// If the device's region ends before these bytes do.
    #[expect(unsafe_code, reason = "what others do with the bytes cannot be checked")]
    pub unsafe fn of_device(
        world: Arc<World>,
        device: Arc<DeviceWorld>,
        offset: u64,
        len: u64,
    ) -> LentMemory {
        let (end, all) = (offset.checked_add(len), device.region(device.rank()).len());
        assert!(end.is_some_and(|end| end <= all), "bytes of the device's region");
        LentMemory { world, device: Some(device), offset, len }
    }

    #[expect(unsafe_code, reason = "what others do with the bytes cannot be checked")]
    fn add_segment(
        &self,
        heap: &NodeHeap,
        number: u32,
        plan: SegmentPlan,
    ) -> Result<Arc<Segment>, SegmentError> {
        let (first, expected) = (u64::from(number) * plan.bytes(), u64::from(plan.count) * plan.bytes());
        if expected > self.len {
            return Err(RegionError::Size { found: self.len, expected }.into());
        }
        // SAFETY: nobody else uses the bytes, says who made this.
        let memory = unsafe { self.world.lend(self.offset + first, plan.bytes()) }?;
        let part = |device| DevicePart::new(device, self.offset + first, plan.bytes());
        // SAFETY: as above.
        unsafe {
            match self.device.clone().map(part) {
                None => heap.add_segment_in(plan.slots, memory),
                Some(part) => heap.add_segment_of_device(plan.slots, memory, part),
            }
        }
    }
}

/// Smallest record that staging is made for: with smaller ones its slots run out before its bytes.
const STAGED_BYTES_MIN: u64 = 64 << 10;

/// Slots of staging: at least some, for a small one.
fn staging_slots(bytes: u64) -> u32 {
    u32::try_from(bytes / STAGED_BYTES_MIN).unwrap_or(u32::MAX).clamp(64, 1 << 16)
}

impl Memory {
    pub(crate) fn create(
        node: NodeId,
        generation: Generation,
        plan: SegmentPlan,
        huge: HugePages,
        staging_bytes: Option<u64>,
        lent: Option<&LentMemory>,
    ) -> Result<Memory, MemoryError> {
        let more_slots = staging_bytes.map_or(0, |bytes| staging_slots(bytes).into());
        let slots_max = plan.slots_all() + more_slots;
        let heap = Arc::new(NodeHeap::create(HeapConfig { node, generation, slots_max, huge })?);
        let mut sides = Vec::with_capacity(plan.count as usize);
        for number in 0..plan.count {
            let segment = match lent {
                None => heap.add_segment(plan.slots, plan.units, huge),
                Some(lent) => lent.add_segment(&heap, number, plan),
            };
            let segment =
                segment.map_err(|source| MemoryError::Segment { number, count: plan.count, source })?;
            sides.push(Side {
                segment,
                books: Mutex::new(Books::new(plan.units, plan.slots)),
                touched: (0..plan.slots.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
                closed: AtomicBool::new(false),
                grant: Mutex::new(None),
            });
        }
        // Behind the others, whose numbers masters know.
        let staging = staging_bytes.map(|bytes| {
            let units = u32::try_from(bytes / UNIT_BYTES / 8 * 8).unwrap_or(u32::MAX / 8 * 8);
            Staging::new(&heap, staging_slots(bytes), units, huge).map(Arc::new).map_err(MemoryError::Staging)
        });
        let staging = staging.transpose()?;
        Ok(Memory { heap, staging, sides, generation, slots: plan.slots, stale_at: AtomicU64::new(0) })
    }

    /// Whether no master was heard for so long that what is here may have been removed.
    pub(crate) fn is_stale(&self) -> bool {
        let at = self.stale_at.load(Ordering::SeqCst);
        at != 0 && SystemClock.now_coarse().0 >= at
    }

    /// From then on, unless a master is heard before.
    pub(crate) fn stale_at(&self, at: MonoTime) {
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

    pub(crate) fn sides(&self) -> &[Side] {
        &self.sides
    }

    pub(crate) fn side(&self, segment: SegmentId) -> Option<&Side> {
        self.sides.get(segment.0 as usize)
    }

    /// A slot's word has become this.
    pub(crate) fn note(&self, segment: SegmentId, slot: SlotId, epoch: Epoch, state: State) {
        if let Some(side) = self.side(segment) {
            side.books.lock().note(slot, Word::new(epoch, state), None);
        }
    }

    /// A slot was begun, with an extent of so many units.
    pub(crate) fn note_begun(&self, segment: SegmentId, slot: SlotId, epoch: Epoch, units: u32) {
        if let Some(side) = self.side(segment) {
            side.books.lock().note(slot, Word::new(epoch, State::Writing), Some(units));
        }
    }

    /// A copy from disk was begun in a slot, with an extent of so many units.
    pub(crate) fn note_copy(&self, segment: SegmentId, slot: SlotId, version: Epoch, units: u32) {
        if let Some(side) = self.side(segment) {
            side.books.lock().note_copy(slot, version, units);
        }
    }

    /// All segments together.
    pub(crate) fn usage(&self) -> Usage {
        let mut all = Usage::default();
        self.sides.iter().for_each(|side| all.add(&side.usage()));
        all
    }

    /// Takes all marks of what was read.
    pub(crate) fn take_touched(&self) -> TouchMap {
        let mut map = TouchMap::new(self.sides.len(), self.slots);
        for ledger in self.heap.ledgers().clients() {
            ledger.take_touched(|number| map.mark_number(number));
        }
        for (segment, side) in self.sides.iter().enumerate() {
            for (index, word) in (0u32..).zip(&side.touched) {
                // Relaxed, here and where they are set: hints for eviction, ordered with nothing.
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

impl Side {
    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    pub(crate) fn usage(&self) -> Usage {
        self.books.lock().usage()
    }

    /// Marks a slot as read. Costs a store only the first time.
    pub(crate) fn touch(&self, slot: SlotId) {
        let Some(word) = self.touched.get(slot.0 as usize / 64) else { return };
        let bit = 1 << (slot.0 % 64);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Whether nobody may begin in it any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Nobody may begin in it any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// The group that it belongs to, and the term that was adopted for it.
    pub(crate) fn grant(&self) -> Option<(GroupId, Term)> {
        *self.grant.lock()
    }

    /// A master has taken it into use. A newer term is obeyed from now on.
    pub(crate) fn granted(&self, group: GroupId, term: Term) {
        let late = moontide_types::planted("term-not-adopted") && self.grant().is_some();
        let term = if late { term } else { self.segment.obey(term) };
        *self.grant.lock() = Some((group, term));
        self.closed.store(false, Ordering::Relaxed);
    }

    /// Whether it holds any record.
    pub(crate) fn is_occupied(&self) -> bool {
        self.segment.taken_units() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_remote_reads_are_taken_once() {
        let plan = SegmentPlan { count: 3, units: 2048, slots: 100 };
        let memory =
            Memory::create(NodeId(1), Generation(9), plan, HugePages::IfAllowed, None, None).unwrap();
        let touch = |segment, slot| memory.side(SegmentId(segment)).unwrap().touch(SlotId(slot));
        for (segment, slot) in [(0, 0), (2, 99), (2, 64), (1, 100), (1, 5000)] {
            touch(segment, slot);
        }
        let bitmaps = memory.take_touched().bitmaps(memory.generation(), 0);
        let segments: Vec<(u32, u32)> = bitmaps.iter().map(|b| (b.segment, b.first_slot)).collect();
        assert_eq!(segments, [(0, 0), (2, 64)], "slots that there are not leave no mark");
        assert!(memory.take_touched().bitmaps(memory.generation(), 0).is_empty());
    }
}
