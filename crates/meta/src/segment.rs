//! [`Segment`]: one segment of a node as its group sees it: who has which slot and which units.
//!
//! ```text
//!   Reporting ──report complete──▶ Waiting ──waiting time over──▶ Serving ──▶ Draining      (by an operator)
//!       │                                                            │            │
//!       └─────────── contradicts itself, session ends, unmounted ─────┴────────────┴──▶ Lost
//! ```
//!
//! Only a serving segment gives out space. A lost one is only there until the group has taken its objects away.
//!
//! Invariant, with `free` the allocator's: `live + reserved + draining + free = units`; while reporting there is no
//! allocator yet, and what was reported so far stands in `reported`.

use std::num::NonZeroU32;

use hashbrown::HashMap;
use moontide_heap::alloc::{Align, Allocator, BlockRef};
use moontide_types::{Epoch, Extent, Generation, MonoTime, NodeId, ObjectId, SegmentId, SessionId};

use crate::placement::Topology;
use crate::record::Place;
use crate::slab::Ref;
use crate::tenant::TenantIx;

/// What a segment is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Medium {
    /// A node's memory.
    #[default]
    Memory,
    /// A GPU's memory.
    Device,
    /// A node's disk. Its node decides what stands where, so that it has no units here, and its slots are made as
    /// objects come: they are there to find the objects of a disk that is lost.
    Disk,
}

/// How far a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentPhase {
    /// Its node has not reported all records yet.
    Reporting,
    /// All is known, but leases and reservations of an earlier time may still be out.
    Waiting,
    /// In use.
    Serving,
    /// Takes no new objects.
    Draining,
    /// Its node is gone; objects are being taken out of the index.
    Lost,
}

/// Who has a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    Free,
    Object(Ref),
    /// Given up, and not free before the node says so.
    Draining,
}

/// Slots of one segment at most: links of free slots must fit beside the names of records in 32 bits.
pub(crate) const SLOTS_MAX: u32 = 1 << 30;

/// In the slot table: 0 never used; up to `Ref::LARGEST` a record's name + 1; from `LINK` on the next free slot;
/// `DRAINING`. Zero means untouched memory, so that a large table costs nothing before it is used.
const LINK: u32 = 0xa000_0000;
const DRAINING: u32 = u32::MAX;
const NO_LINK: u32 = SLOTS_MAX;
const _: () = assert!(Ref::LARGEST < LINK && LINK as u64 + (NO_LINK as u64) < DRAINING as u64);

/// Room for drains that a segment keeps: an ordinary round of eviction.
const DRAINS_KEPT: usize = 4096;

/// A slot that is being given back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drain {
    pub(crate) block: u32,
    pub(crate) units: u32,
    pub(crate) epoch: Epoch,
    pub(crate) id: ObjectId,
}

#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) node: NodeId,
    pub(crate) session: SessionId,
    pub(crate) id: SegmentId,
    pub(crate) generation: Generation,
    pub(crate) medium: Medium,
    pub(crate) units: u32,
    pub(crate) topology: Topology,
    /// The only tenant that may use it.
    pub(crate) tenant: Option<TenantIx>,
    pub(crate) phase: SegmentPhase,
    /// Nothing is given out before.
    pub(crate) usable_at: MonoTime,
    /// It came back after it was given up: nothing that it holds is believed to be current.
    pub(crate) is_late: bool,
    /// A remote peer had one-sided access: its reads are verified, even in place.
    pub(crate) one_sided: bool,
    /// Position among the group's candidates.
    pub(crate) candidate: Option<u32>,
    /// Records of the report that have arrived, deltas included.
    pub(crate) reported_records: u64,
    /// While reporting: the extents so far; what went away again has no units.
    pub(crate) reported: Vec<(u32, Extent)>,
    /// While reporting: slots that were freed since, and from which epoch on. What the stream still says of the time
    /// before is of the past: the answer to a reclaim may overtake it.
    freed_while_reporting: HashMap<u32, Epoch>,
    /// Where the removal of a lost segment's objects has got to.
    pub(crate) swept: u32,
    /// Blocks are the allocator's; until then they are positions in `reported`.
    rebuilt: bool,
    allocator: Allocator,
    slots: Vec<u32>,
    free_link: u32,
    /// Slots from here on were never given out by this master.
    fresh: u32,
    pub(crate) taken_slots: u32,
    pub(crate) drains: HashMap<u32, Drain>,
    pub(crate) live_units: u32,
    pub(crate) reserved_units: u32,
    pub(crate) draining_units: u32,
    /// A disk: whether it takes more. A node says so with every heartbeat.
    pub(crate) takes_offloads: bool,
}

/// Allocations for which the allocator's books are made ahead, because growing them in the middle of a put takes
/// milliseconds. At worst there is a free run beside every allocation; half of that is enough as long as free space
/// is not cut to pieces, and does not make every segment pay for the worst.
fn books_for(slots: u32, units: u32) -> u32 {
    slots.min(units) / 2 + 1
}

/// What a segment is, as its node offers it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) node: NodeId,
    pub(crate) session: SessionId,
    pub(crate) id: SegmentId,
    pub(crate) generation: Generation,
    pub(crate) medium: Medium,
    pub(crate) units: u32,
    pub(crate) slots: u32,
    pub(crate) topology: Topology,
    pub(crate) tenant: Option<TenantIx>,
}

impl Segment {
    pub(crate) fn new(shape: Shape, phase: SegmentPhase, usable_at: MonoTime) -> Segment {
        let mut allocator = Allocator::new(shape.units);
        if phase != SegmentPhase::Reporting {
            allocator.reserve_live(books_for(shape.slots, shape.units));
        }
        Segment {
            node: shape.node,
            session: shape.session,
            id: shape.id,
            generation: shape.generation,
            medium: shape.medium,
            units: shape.units,
            topology: shape.topology,
            tenant: shape.tenant,
            phase,
            usable_at,
            is_late: false,
            one_sided: false,
            candidate: None,
            reported_records: 0,
            reported: vec![],
            freed_while_reporting: HashMap::new(),
            swept: 0,
            rebuilt: phase != SegmentPhase::Reporting || shape.medium == Medium::Disk,
            allocator,
            slots: vec![0; shape.slots as usize],
            free_link: NO_LINK,
            fresh: 0,
            taken_slots: 0,
            drains: HashMap::new(),
            live_units: 0,
            reserved_units: 0,
            draining_units: 0,
            takes_offloads: false,
        }
    }

    pub(crate) fn is_disk(&self) -> bool {
        self.medium == Medium::Disk
    }

    /// A slot of a disk that nobody has: one more, if need be.
    pub(crate) fn disk_slot(&mut self) -> Option<u32> {
        debug_assert!(self.is_disk());
        if let Some(slot) = self.free_slot() {
            return Some(slot);
        }
        (self.slot_count() < SLOTS_MAX).then(|| {
            self.slots.push(0);
            self.slot_count() - 1
        })
    }

    /// Whether readers may be sent there.
    pub(crate) fn is_readable(&self) -> bool {
        self.phase != SegmentPhase::Lost
    }

    pub(crate) fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(crate) fn free_units(&self) -> u32 {
        self.units - self.live_units - self.reserved_units - self.draining_units
    }

    pub(crate) fn slot(&self, slot: u32) -> SlotState {
        match self.slots[slot as usize] {
            DRAINING => SlotState::Draining,
            entry if entry >= LINK || entry == 0 => SlotState::Free,
            entry => SlotState::Object(Ref::from_number(entry - 1).expect("below Ref::LARGEST")),
        }
    }

    /// Names the record that has the slot, or gives the slot a new name of the same record.
    pub(crate) fn set_slot(&mut self, slot: u32, at: Ref) {
        self.slots[slot as usize] = at.number() + 1;
    }

    /// Space for one stripe: a slot and an extent.
    pub(crate) fn reserve(&mut self, segment: u32, units: NonZeroU32, align: Align) -> Option<Place> {
        debug_assert_eq!(self.phase, SegmentPhase::Serving);
        let slot = self.free_slot()?;
        let allocation = self.allocator.alloc(units, align)?;
        self.take_slot(slot);
        self.reserved_units += units.get();
        Some(Place { segment, slot, block: allocation.block.0 })
    }

    /// Takes back what [`reserve`](Self::reserve) gave and nobody has heard of.
    pub(crate) fn unreserve(&mut self, place: Place) {
        let extent = self.allocator.free(BlockRef(place.block));
        self.reserved_units -= extent.units;
        self.give_slot(place.slot);
    }

    /// A reservation became an object.
    pub(crate) fn complete(&mut self, units: u32) {
        self.reserved_units -= units;
        self.live_units += units;
    }

    /// The slot's owner gives it up; it drains until the node says that it is free.
    pub(crate) fn drain(&mut self, place: Place, epoch: Epoch, id: ObjectId, was_live: bool) {
        let units = self.extent(place.block).units;
        if was_live {
            self.live_units -= units;
        } else {
            self.reserved_units -= units;
        }
        self.draining_units += units;
        self.slots[place.slot as usize] = DRAINING;
        self.drains.insert(place.slot, Drain { block: place.block, units, epoch, id });
    }

    /// The node says that the slot is free from `epoch` on. The answer is whether that ended a drain.
    pub(crate) fn freed(&mut self, slot: u32, epoch: Epoch) -> bool {
        let Some(&drain) = self.drains.get(&slot) else { return false };
        if epoch < drain.epoch {
            return false;
        }
        self.drains.remove(&slot);
        // What it brought back is gone; what is in it now is known.
        if self.drains.is_empty() && self.phase != SegmentPhase::Reporting {
            self.is_late = false;
        }
        // After a great removal the map would stay as large as it was.
        if self.drains.capacity() > DRAINS_KEPT && self.drains.len() * 8 < self.drains.capacity() {
            self.drains.shrink_to(self.drains.len() * 2);
        }
        self.draining_units -= drain.units;
        if !self.is_disk() {
            if self.rebuilt {
                self.allocator.free(BlockRef(drain.block));
            } else {
                self.reported[drain.block as usize].1.units = 0;
                self.freed_while_reporting.insert(slot, epoch);
            }
        }
        self.give_slot(slot);
        true
    }

    /// Whether the slot was freed since the report began, at this epoch or a later one.
    pub(crate) fn was_freed(&self, slot: u32, epoch: Epoch) -> bool {
        self.freed_while_reporting.get(&slot).is_some_and(|&freed| epoch <= freed)
    }

    /// The extent of a block, or of a position in the report.
    pub(crate) fn extent(&self, block: u32) -> Extent {
        if self.is_disk() {
            Extent::default()
        } else if self.rebuilt {
            self.allocator.extent(BlockRef(block))
        } else {
            self.reported[block as usize].1
        }
    }

    /// A slot that a report says is taken. The place's block is the position in the report.
    pub(crate) fn report(&mut self, segment: u32, slot: u32, extent: Extent, live: bool) -> Place {
        if self.is_disk() {
            self.take_slot(slot);
            return Place { segment, slot, block: 0 };
        }
        self.reported.push((slot, extent));
        self.taken_slots += 1;
        if live {
            self.live_units += extent.units;
        } else {
            self.reserved_units += extent.units;
        }
        Place { segment, slot, block: (self.reported.len() - 1) as u32 }
    }

    /// Builds the allocator from what was reported; the answer pairs each slot with its block. A report with
    /// overlapping extents leaves the segment failed.
    pub(crate) fn rebuild(&mut self) -> Result<Vec<(u32, u32)>, moontide_heap::alloc::RebuildError> {
        let there: Vec<(u32, Extent)> =
            self.reported.iter().copied().filter(|(_, extent)| extent.units > 0).collect();
        let extents: Vec<Extent> = there.iter().map(|&(_, extent)| extent).collect();
        let (mut allocator, blocks) = Allocator::rebuild(self.units, &extents)?;
        allocator.reserve_live(books_for(self.slot_count(), self.units));
        self.allocator = allocator;
        self.rebuilt = true;
        self.reported = vec![];
        self.freed_while_reporting = HashMap::new();
        Ok(there.into_iter().zip(blocks).map(|((slot, _), block)| (slot, block.0)).collect())
    }

    fn free_slot(&mut self) -> Option<u32> {
        if self.free_link != NO_LINK {
            return Some(self.free_link);
        }
        // Slots that a report took are skipped; each at most once in the segment's life.
        while self.slots.get(self.fresh as usize).is_some_and(|&entry| entry != 0) {
            self.fresh += 1;
        }
        (self.fresh < self.slot_count()).then_some(self.fresh)
    }

    /// A draining place has become one of a complete object: what a promotion brought.
    pub(crate) fn revive(&mut self, segment: u32, slot: u32, at: Ref) -> Place {
        let drain = self.drains.remove(&slot).expect("a promotion has its slot");
        self.draining_units -= drain.units;
        self.live_units += drain.units;
        self.set_slot(slot, at);
        Place { segment, slot, block: drain.block }
    }

    /// A place of a disk is gone without anybody being told: its node has said so.
    pub(crate) fn vacate(&mut self, slot: u32) {
        debug_assert!(self.is_disk());
        self.give_slot(slot);
    }

    fn take_slot(&mut self, slot: u32) {
        if slot == self.free_link {
            self.free_link = self.slots[slot as usize] - LINK;
        } else {
            self.fresh = slot + 1;
        }
        self.taken_slots += 1;
    }

    fn give_slot(&mut self, slot: u32) {
        self.taken_slots -= 1;
        if !self.rebuilt {
            // Nothing is given out before the report's end, and until then a slot may be reported again.
            self.slots[slot as usize] = 0;
            return;
        }
        self.slots[slot as usize] = LINK + self.free_link;
        self.free_link = slot;
    }

    /// Memory held by the books.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.allocator.stats().metadata_bytes + self.slots.len() * 4 + self.drains.capacity() * 40
    }

    /// Free units by the allocator's own count.
    pub(crate) fn allocator_free_units(&self) -> u32 {
        self.allocator.stats().free_units
    }
}
