//! [`Segment`]: the group's view of one segment of a node: the owner of each slot and of each unit.
//!
//! ```text
//!   Reporting ──report complete──▶ Quarantined ──delay over──▶ Serving ──▶ Draining      (by an operator)
//!       │                                                         │            │
//!       └──── contradictory report, session ends, unmounted ──────┴────────────┴──▶ Lost
//! ```
//!
//! The group allocates space only in a serving segment. A lost segment exists only until the group has removed its
//! objects.
//!
//! Invariant, with `free` as counted by the allocator: `live + reserved + draining + free = units`. A reporting segment
//! has no allocator yet; its reported extents are in `reported`.

use std::num::NonZeroU32;

use hashbrown::HashMap;
use moontide_heap::alloc::{Align, Allocator, BlockRef, PAGE_UNITS};
use moontide_types::{Epoch, Extent, Generation, Medium, MonoTime, NodeId, ObjectId, SegmentId, SessionId};

use crate::ids::{RecordRef, TenantIndex};
use crate::placement::{ReplicaSite, Topology};
use crate::record::SlotLocation;

/// Phase in the life of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentPhase {
    /// The node has not reported all records yet.
    Reporting,
    /// The report is complete, but leases and reservations of an earlier master or session may still be valid.
    Quarantined,
    /// Accepts new objects.
    Serving,
    /// Accepts no new objects.
    Draining,
    /// The node is gone; the group is removing the objects from the index.
    Lost,
}

/// Owner of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    Free,
    Object(RecordRef),
    /// Released by the group. The slot is not free before the node has reported it as free.
    Draining,
}

/// Maximum number of slots of one segment: links of free slots and record numbers share 32 bits.
pub(crate) const SLOTS_MAX: u32 = 1 << 30;

/// Values in the slot table: 0 is a slot that was never used; up to `RecordRef::LARGEST` it is a record's number + 1;
/// from `LINK` on it is the next free slot; `DRAINING` is a draining slot. Zero is untouched memory, so a large table
/// costs nothing before it is used.
const LINK: u32 = 0xa000_0000;
const DRAINING: u32 = u32::MAX;
const NO_LINK: u32 = SLOTS_MAX;
const _: () = assert!(RecordRef::LARGEST < LINK && LINK as u64 + (NO_LINK as u64) < DRAINING as u64);

/// Capacity for draining slots that a segment keeps: enough for an ordinary round of eviction.
const DRAINS_KEPT: usize = 4096;

/// A slot between its release by the group and the node's report that it is free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrainingSlot {
    pub(crate) block: u32,
    pub(crate) units: u32,
    pub(crate) epoch: Epoch,
    pub(crate) id: ObjectId,
    /// The segment's report contained it, although the object was removed or replaced.
    pub(crate) was_reported: bool,
    /// A command fills it with a version that may be older than what the slot held before.
    pub(crate) is_filled: bool,
    /// That command was answered. Until then, the answer to a reclaim is about what the slot held before.
    pub(crate) is_answered: bool,
    /// The object lives on elsewhere, and the node may be writing this record to its disk. A reclaim does not stop that. The
    /// write pins the record: when the slot is free, the write has ended, and its notice has arrived.
    pub(crate) may_be_written: bool,
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
    /// If set, the only tenant that may use the segment.
    pub(crate) tenant: Option<TenantIndex>,
    pub(crate) phase: SegmentPhase,
    /// The group allocates nothing in the segment before this time.
    pub(crate) usable_at: MonoTime,
    /// The segment was mounted after the group stopped waiting for it: none of its records is trusted to be current.
    pub(crate) is_stale: bool,
    /// A remote peer had one-sided access: readers verify the bytes, even of zero-copy reads.
    pub(crate) one_sided: bool,
    /// Position among the group's candidates.
    pub(crate) candidate: Option<u32>,
    /// Records received of the report, deltas included.
    pub(crate) reported_records: u64,
    /// While reporting: the extents so far. An entry whose slot was freed again has 0 units.
    pub(crate) reported: Vec<(u32, Extent)>,
    /// While reporting: freed slots, each with the epoch from which on it is free. The report stream may still contain
    /// older records of them, because the response to a reclaim can overtake it.
    freed_while_reporting: HashMap<u32, Epoch>,
    /// Next slot for the removal of a lost segment's objects.
    pub(crate) swept: u32,
    /// Blocks are numbers of the allocator; before the rebuild they are positions in `reported`.
    rebuilt: bool,
    allocator: Allocator,
    slots: Vec<u32>,
    free_link: u32,
    /// This master has never allocated slots from here on.
    fresh: u32,
    pub(crate) taken_slots: u32,
    pub(crate) drains: HashMap<u32, DrainingSlot>,
    /// Drains of reported records: while there are any, the segment would report removed objects again.
    pub(crate) reported_drains: u32,
    pub(crate) live_units: u32,
    pub(crate) reserved_units: u32,
    pub(crate) draining_units: u32,
    /// For a disk: whether it accepts more records. The node sends this with every heartbeat.
    pub(crate) accepts_offloads: bool,
}

/// Number of allocations for which the allocator reserves its metadata in advance, because growing it during a put
/// takes milliseconds. In the worst case there is a free run next to every allocation. Half of that is enough as long
/// as free space is not fragmented, and it does not charge every segment for the worst case.
fn expected_blocks(slots: u32, units: u32) -> u32 {
    slots.min(units) / 2 + 1
}

/// Parameters of a segment, as its node offers it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentParams {
    pub(crate) node: NodeId,
    pub(crate) session: SessionId,
    pub(crate) id: SegmentId,
    pub(crate) generation: Generation,
    pub(crate) medium: Medium,
    pub(crate) units: u32,
    pub(crate) slots: u32,
    pub(crate) topology: Topology,
    pub(crate) tenant: Option<TenantIndex>,
}

impl Segment {
    /// Returns the site of replicas in this segment.
    pub(crate) fn site(&self) -> ReplicaSite {
        ReplicaSite { node: self.node, topology: self.topology }
    }

    pub(crate) fn new(params: SegmentParams, phase: SegmentPhase, usable_at: MonoTime) -> Segment {
        let mut allocator = Allocator::new(params.units);
        if phase != SegmentPhase::Reporting {
            allocator.reserve_live(expected_blocks(params.slots, params.units));
        }
        Segment {
            node: params.node,
            session: params.session,
            id: params.id,
            generation: params.generation,
            medium: params.medium,
            units: params.units,
            topology: params.topology,
            tenant: params.tenant,
            phase,
            usable_at,
            is_stale: false,
            one_sided: false,
            candidate: None,
            reported_records: 0,
            reported: vec![],
            freed_while_reporting: HashMap::new(),
            swept: 0,
            rebuilt: phase != SegmentPhase::Reporting || params.medium == Medium::Disk,
            allocator,
            slots: vec![0; params.slots as usize],
            free_link: NO_LINK,
            fresh: 0,
            taken_slots: 0,
            drains: HashMap::new(),
            reported_drains: 0,
            live_units: 0,
            reserved_units: 0,
            draining_units: 0,
            accepts_offloads: false,
        }
    }

    pub(crate) fn is_disk(&self) -> bool {
        self.medium == Medium::Disk
    }

    /// Returns a free slot of a disk; adds a slot if all are taken.
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

    /// Whether a lookup may return locations in this segment.
    pub(crate) fn is_readable(&self) -> bool {
        self.phase != SegmentPhase::Lost
    }

    pub(crate) fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(crate) fn free_units(&self) -> u32 {
        self.units - self.live_units - self.reserved_units - self.draining_units
    }

    /// Returns the free units behind page-aligned records that are too short for another one. Gaps between shorter records do
    /// not count: such a record fits there. Nor do gaps of draining records: these are usable together with the record.
    pub(crate) fn gap_units(&self) -> u32 {
        let page_records = self.allocator.page_blocks().saturating_sub(self.drains.len() as u32);
        self.allocator.sliver_units().min(page_records.saturating_mul(PAGE_UNITS - 1))
    }

    pub(crate) fn slot(&self, slot: u32) -> SlotState {
        match self.slots[slot as usize] {
            DRAINING => SlotState::Draining,
            entry if entry >= LINK || entry == 0 => SlotState::Free,
            entry => SlotState::Object(
                RecordRef::from_number(entry - 1).expect("number is below RecordRef::LARGEST"),
            ),
        }
    }

    /// Sets the record of a slot. Also used when the record gets a new number.
    pub(crate) fn set_slot(&mut self, slot: u32, at: RecordRef) {
        self.slots[slot as usize] = at.number() + 1;
    }

    /// Reserves a slot and an extent for one stripe.
    pub(crate) fn reserve(&mut self, segment: u32, units: NonZeroU32, align: Align) -> Option<SlotLocation> {
        debug_assert_eq!(self.phase, SegmentPhase::Serving);
        let slot = self.free_slot()?;
        let allocation = self.allocator.alloc(units, align)?;
        self.take_slot(slot);
        self.reserved_units += units.get();
        Some(SlotLocation { segment, slot, block: allocation.block.0 })
    }

    /// Undoes a [`reserve`](Self::reserve) whose location has not been sent to a client.
    pub(crate) fn unreserve(&mut self, location: SlotLocation) {
        let extent = self.allocator.free(BlockRef(location.block));
        self.reserved_units -= extent.units;
        self.release_slot(location.slot);
    }

    /// Moves the units of a reservation to the live units.
    pub(crate) fn complete(&mut self, units: u32) {
        self.reserved_units -= units;
        self.live_units += units;
    }

    /// Releases a slot. It drains until the node reports it as free.
    pub(crate) fn drain(&mut self, location: SlotLocation, epoch: Epoch, id: ObjectId, was_live: bool) {
        let units = self.extent(location.block).units;
        if was_live {
            self.live_units -= units;
        } else {
            self.reserved_units -= units;
        }
        self.draining_units += units;
        self.slots[location.slot as usize] = DRAINING;
        let drain = DrainingSlot {
            block: location.block,
            units,
            epoch,
            id,
            was_reported: false,
            is_filled: false,
            is_answered: false,
            may_be_written: false,
        };
        self.drains.insert(location.slot, drain);
    }

    /// Gives a reserved slot to a command that fills it with a complete version: a promotion or a copy. Until the answer,
    /// it is taken, and not readable, like one that drains.
    ///
    /// Reports of the node say nothing about it: they may be about the version before, which may be newer, or about an
    /// earlier attempt to fill the slot with this very version. Only the answer to the command does, and then answers to
    /// reclaims: the slot may have held this very version before, and have been freed by a report.
    pub(crate) fn fill(&mut self, location: SlotLocation, epoch: Epoch, id: ObjectId) {
        self.drain(location, epoch, id, false);
        let drain = self.drains.get_mut(&location.slot).expect("just inserted");
        drain.is_filled = true;
    }

    /// Remembers that the command that fills a slot was answered. What is in the slot drains.
    pub(crate) fn fill_answered(&mut self, slot: u32) {
        if let Some(drain) = self.drains.get_mut(&slot) {
            drain.is_answered = true;
        }
    }

    /// Remembers that the node may be writing a draining record to its disk.
    pub(crate) fn may_be_written(&mut self, slot: u32) {
        if let Some(drain) = self.drains.get_mut(&slot) {
            drain.may_be_written = true;
        }
    }

    /// Releases a slot whose record was reported, but is not needed.
    pub(crate) fn drain_reported(&mut self, location: SlotLocation, epoch: Epoch, id: ObjectId) {
        self.drain(location, epoch, id, false);
        let drain = self.drains.get_mut(&location.slot).expect("just inserted");
        drain.was_reported = true;
        self.reported_drains += 1;
    }

    /// Whether the segment has no more records that must not be reported to another master: it has reported its records,
    /// and those that were rejected are gone.
    pub(crate) fn is_in_sync(&self) -> bool {
        let clean = self.reported_drains == 0 || moontide_rt::mutation_enabled("rejected-and-in-sync");
        self.phase != SegmentPhase::Reporting && clean
    }

    /// Ends the drain of a slot that the node reports as free from `epoch` on. Returns whether a drain has ended.
    pub(crate) fn freed(&mut self, slot: u32, epoch: Epoch) -> bool {
        let Some(&drain) = self.drains.get(&slot) else { return false };
        if epoch < drain.epoch {
            return false;
        }
        self.drains.remove(&slot);
        self.reported_drains -= u32::from(drain.was_reported);
        // The last untrusted record of the stale segment is gone. All records in it are current now.
        if self.drains.is_empty() && self.phase != SegmentPhase::Reporting {
            self.is_stale = false;
        }
        // After a large removal the map would keep its capacity.
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
        self.release_slot(slot);
        true
    }

    /// Whether the slot was freed since the report began, at this epoch or a later one.
    pub(crate) fn was_freed(&self, slot: u32, epoch: Epoch) -> bool {
        self.freed_while_reporting.get(&slot).is_some_and(|&freed| epoch <= freed)
    }

    /// Returns the extent of a block, or of a position in the report.
    pub(crate) fn extent(&self, block: u32) -> Extent {
        if self.is_disk() {
            Extent::default()
        } else if self.rebuilt {
            self.allocator.extent(BlockRef(block))
        } else {
            self.reported[block as usize].1
        }
    }

    /// Marks a reported slot as taken. The block of the result is the position in the report.
    pub(crate) fn report(&mut self, segment: u32, slot: u32, extent: Extent, live: bool) -> SlotLocation {
        if self.is_disk() {
            self.take_slot(slot);
            return SlotLocation { segment, slot, block: 0 };
        }
        self.reported.push((slot, extent));
        self.taken_slots += 1;
        if live {
            self.live_units += extent.units;
        } else {
            self.reserved_units += extent.units;
        }
        SlotLocation { segment, slot, block: (self.reported.len() - 1) as u32 }
    }

    /// Builds the allocator from the reported extents. Returns each slot with its block. A report with overlapping
    /// extents leaves the segment failed.
    pub(crate) fn rebuild(&mut self) -> Result<Vec<(u32, u32)>, moontide_heap::alloc::RebuildError> {
        let taken: Vec<(u32, Extent)> =
            self.reported.iter().copied().filter(|(_, extent)| extent.units > 0).collect();
        let extents: Vec<Extent> = taken.iter().map(|&(_, extent)| extent).collect();
        let (mut allocator, blocks) = Allocator::rebuild(self.units, &extents)?;
        allocator.reserve_live(expected_blocks(self.slot_count(), self.units));
        self.allocator = allocator;
        self.rebuilt = true;
        self.reported = vec![];
        self.freed_while_reporting = HashMap::new();
        Ok(taken.into_iter().zip(blocks).map(|((slot, _), block)| (slot, block.0)).collect())
    }

    fn free_slot(&mut self) -> Option<u32> {
        if self.free_link != NO_LINK {
            return Some(self.free_link);
        }
        // Skips slots that a report took, each at most once in the segment's life.
        while self.slots.get(self.fresh as usize).is_some_and(|&entry| entry != 0) {
            self.fresh += 1;
        }
        (self.fresh < self.slot_count()).then_some(self.fresh)
    }

    /// Makes a draining slot the location of a complete object, after a promotion or a copy.
    pub(crate) fn reattach(&mut self, segment: u32, slot: u32, at: RecordRef) -> SlotLocation {
        let drain = self.drains.remove(&slot).expect("slot of a promotion or copy is draining");
        debug_assert!(!drain.was_reported);
        self.draining_units -= drain.units;
        self.live_units += drain.units;
        self.set_slot(slot, at);
        SlotLocation { segment, slot, block: drain.block }
    }

    /// Frees a slot of a disk without a command: the node has reported the record as gone.
    pub(crate) fn vacate(&mut self, slot: u32) {
        debug_assert!(self.is_disk());
        self.release_slot(slot);
    }

    fn take_slot(&mut self, slot: u32) {
        if slot == self.free_link {
            self.free_link = self.slots[slot as usize] - LINK;
        } else {
            self.fresh = slot + 1;
        }
        self.taken_slots += 1;
    }

    fn release_slot(&mut self, slot: u32) {
        self.taken_slots -= 1;
        if !self.rebuilt {
            // The group allocates nothing before the end of the report, and until then a slot may be reported again.
            self.slots[slot as usize] = 0;
            return;
        }
        self.slots[slot as usize] = LINK + self.free_link;
        self.free_link = slot;
    }

    /// Memory of the allocator's metadata, the slot table and the drains.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.allocator.stats().metadata_bytes + self.slots.len() * 4 + self.drains.capacity() * 40
    }

    /// Free units as counted by the allocator.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn allocator_free_units(&self) -> u32 {
        self.allocator.stats().free_units
    }
}
