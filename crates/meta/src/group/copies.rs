//! Copies of records between nodes, and the drain of segments, which they carry.
//!
//! The group reserves a slot of another segment and commands its node to copy the record into it. Until the node has
//! answered, the slot counts as draining and its version as unconfirmed, like that of a promotion
//! ([`disk`](super::disk)): a removal kills it, and a put that replaces the object waits for the kill. When the record is
//! complete in its slot, the group adds the location, and in a drain releases the source after that. So each step leaves a
//! complete replica, whichever of the nodes and masters fails.
//!
//! ```text
//!   source  ── READY ─────────────────────────────────────────┬─ released (Reclaim) ──▶ free
//!   target  ── free ──▶ reserved, Copy command ──▶ done: location added
//!                                            └───▶ refused, or the object is gone: Reclaim
//! ```
//!
//! A segment that drains accepts no new objects. Its records move to other segments, the most valuable ones first
//! ([`Candidate`]). If these are full, the group evicts as for a put: the objects that are used least leave, wherever they
//! are. If there is no other segment that could take a record, the record stays. What cannot move now (leases do not
//! matter; puts in progress and kills in flight do) is found again by the next scan.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::num::NonZeroU32;
use std::time::Duration;

use moontide_heap::alloc::Align;
use moontide_types::limits::{PAYLOAD_ALIGN, UNIT_BYTES};
use moontide_types::{Epoch, ErrorCode, Generation, Medium, MonoTime, NodeId, SegmentId, SessionId};

use super::flush::Candidate;
use super::{Group, LocationVersion};
use crate::effect::{CommandKind, CommandOutcome, CopyPurpose, CopySource, Effects};
use crate::ids::RecordRef;
use crate::placement::{PlacementRequest, ReplicaSite};
use crate::record::{Record, RecordFlag, SlotLocation};
use crate::segment::{SegmentPhase, SlotState};
use crate::time::Now;

/// Maximum number of concurrent copies to one node, of all groups.
const COPIES_PER_NODE: u64 = 512;

/// Bytes of concurrent copies to one node, of all groups, at which no further one starts.
const COPY_BYTES_PER_NODE: u64 = 128 << 20;

/// Maximum number of records that a scan has found and that were not copied. It takes 8 MiB; the scan goes on
/// when they are.
pub(super) const CANDIDATES_MAX: usize = 1 << 18;

/// Time between two scans of a segment.
const SCAN_INTERVAL: Duration = Duration::from_millis(200);

/// Copies that are started when another one has ended, without a tick in between.
pub(super) const REFILL_MAX: usize = 8;

/// Candidates that are looked at for each copy that may start. Those that cannot move cost time, too.
pub(super) const TRIES_PER_COPY: usize = 8;

/// Choices of the placement strategy before all segments are scanned.
const PLACEMENT_ATTEMPTS: usize = 8;

/// What happens to the records of a segment that drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainMode {
    /// They stay until they are removed.
    Keep,
    /// They move to other segments.
    Move,
    /// They are evicted, unless they are leased, pinned or being written.
    Evict,
}

/// All copies of a group.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Copies in flight, by the version in their target slot.
    in_flight: BTreeMap<LocationVersion, CopyInFlight>,
    /// Number and bytes of the copies in flight, by node of the target.
    by_node: BTreeMap<NodeId, (u64, u64)>,
    /// Segments whose records move to others.
    drains: BTreeMap<u32, SegmentDrain>,
    /// Nodes that announce that they are to be emptied.
    draining_nodes: BTreeSet<NodeId>,
}

/// A copy that was commanded.
#[derive(Clone, Copy, Debug)]
struct CopyInFlight {
    /// Segment and slot of the source. By name: the segment may be mounted again meanwhile.
    source: (NodeId, SegmentId, Generation, u32),
    node: NodeId,
    bytes: u64,
    purpose: CopyPurpose,
}

/// A segment whose records move.
#[derive(Debug, Default)]
struct SegmentDrain {
    /// Next slot of the scan.
    next_slot: u32,
    /// Time at which the next scan may begin.
    scan_at: MonoTime,
    candidates: BinaryHeap<Candidate>,
}

/// Segments that may take a copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum CopyTargets<'a> {
    /// Any segment, chosen by the placement strategy.
    Any,
    /// These segments, the first that can.
    Of(&'a [u32]),
}

/// Reason why a copy was not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotStarted {
    /// The record cannot be copied now, or not at all.
    Unsuitable,
    /// The nodes with space have as many copies in flight as they may have.
    Busy,
    /// No segment has space, but there are segments that would after an eviction.
    NoSpace,
    /// No segment could take the record, however empty it were. An eviction does not help.
    NoPlace,
}

impl Group {
    /// Stops new objects in a segment, and empties it according to `mode`. A further call changes the mode.
    pub fn drain(&mut self, node: NodeId, segment: SegmentId, mode: DrainMode) -> Result<(), ErrorCode> {
        let &index = self.by_name.get(&(node, segment)).ok_or(ErrorCode::NotFound)?;
        if self.segment(index).is_disk() {
            return Err(ErrorCode::InvalidArgument); // the node chooses the disk's victims
        }
        match self.segment(index).phase {
            SegmentPhase::Serving | SegmentPhase::Quarantined | SegmentPhase::Draining => {}
            SegmentPhase::Reporting => return Err(ErrorCode::Retry),
            SegmentPhase::Lost => return Err(ErrorCode::Gone),
        }
        self.withdraw(index);
        self.quarantined_segments.retain(|&waiting| waiting != index);
        let segment = self.segment_mut(index);
        segment.phase = SegmentPhase::Draining;
        segment.swept = if mode == DrainMode::Evict { 0 } else { u32::MAX };
        if mode == DrainMode::Move {
            self.copies.drains.entry(index).or_default();
        } else {
            self.copies.drains.remove(&index);
        }
        Ok(())
    }

    /// Ends the drain of a segment: it accepts new objects again. Copies in flight go on.
    pub fn undrain(&mut self, now: Now, node: NodeId, segment: SegmentId) -> Result<(), ErrorCode> {
        let &index = self.by_name.get(&(node, segment)).ok_or(ErrorCode::NotFound)?;
        if self.segment(index).phase != SegmentPhase::Draining {
            return Ok(());
        }
        if self.is_flushing(node) {
            return Err(ErrorCode::Busy); // the node is about to stop
        }
        self.copies.drains.remove(&index);
        let segment = self.segment_mut(index);
        segment.phase = SegmentPhase::Quarantined;
        segment.swept = u32::MAX;
        self.quarantined_segments.push(index);
        self.activate_segments(now);
        Ok(())
    }

    /// Applies what a node announces with each heartbeat: whether it is to be emptied. Starts the drain of all its
    /// segments in memory, also of those that were not in use before, or ends it.
    pub fn announce_drain(&mut self, now: Now, node: NodeId, session: SessionId, draining: bool) {
        let Some(mounted) = self.nodes.get(&node).filter(|mounted| mounted.session == session) else {
            return;
        };
        let changes = match draining {
            true => {
                self.copies.draining_nodes.insert(node);
                true
            }
            false => self.copies.draining_nodes.remove(&node),
        };
        if !changes {
            return;
        }
        let memory = |&&index: &&u32| !self.segment(index).is_disk();
        let segments: Vec<(SegmentId, SegmentPhase)> = mounted
            .segments
            .iter()
            .filter(memory)
            .map(|&index| self.segment(index))
            .map(|s| (s.id, s.phase))
            .collect();
        for (segment, phase) in segments {
            if !draining {
                // Refused if the node is about to stop.
                let _ = self.undrain(now, node, segment);
            } else if matches!(phase, SegmentPhase::Serving | SegmentPhase::Quarantined) {
                let drained = self.drain(node, segment, DrainMode::Move);
                debug_assert!(drained.is_ok(), "segment is mounted and in use");
            }
        }
    }

    /// Continues all drains: scans at most `slots` slots, and starts at most `copies` copies. Returns whether more could be
    /// done at once.
    pub(super) fn step_drains(
        &mut self,
        now: Now,
        slots: usize,
        copies: usize,
        effects: &mut Effects,
    ) -> bool {
        let mut left = slots;
        let indexes: Vec<u32> = self.copies.drains.keys().copied().collect();
        for index in indexes {
            left -= self.scan_for_drain(index, now, left);
        }
        let started = self.start_drain_copies(copies, effects);
        (slots > 0 && left == 0) || (copies > 0 && started >= copies)
    }

    /// Scans the slots of a segment for records to move. Returns the number of scanned slots.
    fn scan_for_drain(&mut self, index: u32, now: Now, budget: usize) -> usize {
        let (slots, is_empty) = {
            let segment = self.segment(index);
            (segment.slot_count(), segment.live_units + segment.reserved_units == 0)
        };
        let Some(drain) = self.copies.drains.get_mut(&index) else { return 0 };
        if is_empty {
            self.copies.drains.remove(&index);
            return 0;
        }
        if drain.next_slot >= slots && drain.candidates.is_empty() && drain.scan_at <= now.mono {
            // Records that could not move, and puts that have ended in the meantime.
            (drain.next_slot, drain.scan_at) = (0, now.mono.after(SCAN_INTERVAL));
        }
        if drain.candidates.len() >= CANDIDATES_MAX {
            return 0;
        }
        let first = drain.next_slot;
        let end = slots.min(first.saturating_add(budget as u32));
        let mut found = vec![];
        for slot in first..end {
            if let SlotState::Object(at) = self.segment(index).slot(slot) {
                let record = self.slab.get(at);
                if !record.has(RecordFlag::Writing) {
                    found.push(Candidate::new(record));
                }
            }
        }
        if let Some(drain) = self.copies.drains.get_mut(&index) {
            drain.next_slot = end;
            drain.candidates.extend(found);
        }
        end.saturating_sub(first) as usize
    }

    /// Starts copies of the candidates of all drains. Returns their number.
    fn start_drain_copies(&mut self, budget: usize, effects: &mut Effects) -> usize {
        let (mut started, mut tried) = (0, 0);
        let indexes: Vec<u32> = self.copies.drains.keys().copied().collect();
        for index in indexes {
            let slots = self.segment(index).slot_count();
            while started < budget && tried < budget.saturating_mul(TRIES_PER_COPY) {
                let Some(drain) = self.copies.drains.get_mut(&index) else { break };
                // The most valuable ones are known when the scan is complete.
                if drain.next_slot < slots && drain.candidates.len() < CANDIDATES_MAX {
                    break;
                }
                let Some(candidate) = drain.candidates.pop() else { break };
                tried += 1;
                let Some(at) = self.find_id(candidate.id) else { continue };
                match self.move_from(at, index, effects) {
                    Ok(copies) => started += copies,
                    Err(NotStarted::Unsuitable | NotStarted::NoPlace) => {} // the next scan finds it
                    Err(reason) => {
                        if reason == NotStarted::NoSpace {
                            self.request_space_for_copy(candidate.bytes / UNIT_BYTES + 1);
                        }
                        if let Some(drain) = self.copies.drains.get_mut(&index) {
                            drain.candidates.push(candidate);
                        }
                        break;
                    }
                }
            }
        }
        started
    }

    /// Starts copies of all stripes that an object has in a segment. Returns their number.
    fn move_from(&mut self, at: RecordRef, index: u32, effects: &mut Effects) -> Result<usize, NotStarted> {
        let record = *self.slab.get(at);
        let positions = (0..self.location_count(&record))
            .filter(|&position| self.location(&record, position).segment == index);
        let positions: Vec<usize> = positions.collect();
        let mut started = 0;
        for position in positions {
            match self.start_copy(at, position, CopyPurpose::Drain, CopyTargets::Any, effects) {
                Ok(()) => started += 1,
                Err(NotStarted::Unsuitable) => {}
                Err(reason) => return Err(reason),
            }
        }
        Ok(started)
    }

    /// Lets the next tick evict for copies without space.
    pub(super) fn request_space_for_copy(&mut self, units: u64) {
        // Units being offloaded will be free soon.
        if self.offloading_units <= units {
            self.requested_units = self.requested_units.max(units);
        }
    }

    // ---------------------------------------------------------------------------------------------- copy

    /// Commands a node to copy the record of a location: to another row of locations, or for a move to this one, in exchange
    /// for the source.
    pub(super) fn start_copy(
        &mut self,
        at: RecordRef,
        position: usize,
        purpose: CopyPurpose,
        targets: CopyTargets<'_>,
        effects: &mut Effects,
    ) -> Result<(), NotStarted> {
        let record = *self.slab.get(at);
        let (id, epoch, stripes) = (record.id(), record.epoch(), self.stripes(&record));
        let location = self.location(&record, position);
        let source = LocationVersion::of(location, epoch);
        let may_start = !record.has(RecordFlag::Writing)
            && !record.has(RecordFlag::Offloading)
            // A copy without digests cannot be verified.
            && !record.has(RecordFlag::Digestless)
            && self.is_readable(location)
            && self.segment(location.segment).medium == Medium::Memory
            // A kill in flight, a promotion, or a copy of this very record must be resolved first.
            && self.unconfirmed_versions(id).all(|version| {
                self.source_of(version).is_some_and(|of_copy| of_copy != source)
            });
        if !may_start {
            return Err(NotStarted::Unsuitable);
        }
        let stripe = position % stripes;
        let view = self.location_view(&record, position);
        let units = NonZeroU32::new(view.extent.units).ok_or(NotStarted::Unsuitable)?;
        let align = if view.stripe.len >= PAYLOAD_ALIGN { Align::Page } else { Align::Unit };
        let row = match purpose.is_move() {
            true => position / stripes,
            false => self.vacant_row(&record, stripe),
        };
        let sites = self.sites_of_other_replicas(&record, row);
        let target = self.place_copy(&record, &sites, targets, units, align)?;
        // Until its node has responded, the location is treated as draining: taken, and not readable.
        let segment = self.segment_mut(target.segment);
        let (extent, node) = (segment.extent(target.block), segment.node);
        segment.fill(target, epoch, id);
        let version = LocationVersion::of(target, epoch);
        if !moontide_rt::mutation_enabled("copy-not-killed") {
            self.unconfirmed_kills.insert((id, version));
        }
        let bytes = u64::from(units.get()) * UNIT_BYTES;
        let name = (view.node, view.segment, view.generation, view.slot.0);
        self.copies.in_flight.insert(version, CopyInFlight { source: name, node, bytes, purpose });
        let of_node = self.copies.by_node.entry(node).or_default();
        *of_node = (of_node.0 + 1, of_node.1 + bytes);
        self.stats.copies_started += 1;
        let source = CopySource {
            node: view.node,
            generation: view.generation,
            segment: view.segment,
            slot: view.slot,
            medium: view.medium,
            root: view.root,
        };
        let kind = CommandKind::Copy { stripe: stripe as u16, extent, source, purpose };
        self.push_command(kind, target.segment, target.slot, epoch, id, effects);
        if moontide_rt::mutation_enabled("source-released-before-copy") {
            self.release_location(at, position, None, effects);
        }
        Ok(())
    }

    /// Returns the row of locations that a further copy of a stripe completes.
    fn vacant_row(&self, record: &Record, stripe: usize) -> usize {
        let stripes = self.stripes(record);
        let rows = self.location_count(record) / stripes;
        (0..rows).find(|row| self.location(record, row * stripes + stripe).is_lost()).unwrap_or(rows)
    }

    /// Returns the nodes of the other replicas of an object, those that are being copied included: replicas have no node in
    /// common, nor what their spread names.
    fn sites_of_other_replicas(&self, record: &Record, row: usize) -> Vec<ReplicaSite> {
        let stripes = self.stripes(record);
        let mut segments: Vec<u32> = vec![];
        for position in 0..self.location_count(record) {
            let location = self.location(record, position);
            if position / stripes != row && self.is_readable(location) {
                segments.push(location.segment);
            }
            let source = LocationVersion::of(location, record.epoch());
            let copies = self
                .unconfirmed_versions(record.id())
                .filter(|&version| self.source_of(version).is_some_and(|of_copy| of_copy == source));
            if position / stripes != row {
                segments.extend(copies.map(|version| version.segment));
            }
        }
        let mut sites: Vec<ReplicaSite> = vec![];
        for index in segments {
            let segment = self.segment(index);
            if !segment.is_disk() && sites.iter().all(|site| site.node != segment.node) {
                sites.push(segment.site());
            }
        }
        sites
    }

    /// Reserves a location for a copy: in one of the given segments; or in one chosen by the strategy, else in any.
    fn place_copy(
        &mut self,
        record: &Record,
        sites: &[ReplicaSite],
        targets: CopyTargets<'_>,
        units: NonZeroU32,
        align: Align,
    ) -> Result<SlotLocation, NotStarted> {
        if self.candidates.is_empty() {
            return Err(NotStarted::NoPlace);
        }
        let request = PlacementRequest { writer: None, replicas: sites };
        let start = self.rng.index(self.candidates.len());
        let attempts = match targets {
            CopyTargets::Any => PLACEMENT_ATTEMPTS + self.candidates.len(),
            CopyTargets::Of(segments) => segments.len(),
        };
        let (mut is_busy, mut may_get_space) = (false, false);
        for attempt in 0..attempts {
            let index = match targets {
                CopyTargets::Of(segments) => segments[attempt],
                CopyTargets::Any if attempt < PLACEMENT_ATTEMPTS => {
                    let chosen = self.placement.choose(&self.candidates, &request, &mut self.rng);
                    self.candidates[chosen].index
                }
                CopyTargets::Any => self.candidates[(start + attempt) % self.candidates.len()].index,
            };
            match self.reserve_copy(index, record, sites, units, align) {
                Ok(location) => return Ok(location),
                Err(NotStarted::Busy) => is_busy = true,
                Err(NotStarted::NoSpace) => may_get_space = true,
                Err(_) => {}
            }
        }
        Err(match (is_busy, may_get_space) {
            (true, _) => NotStarted::Busy,
            (false, true) => NotStarted::NoSpace,
            (false, false) => NotStarted::NoPlace,
        })
    }

    fn reserve_copy(
        &mut self,
        index: u32,
        record: &Record,
        sites: &[ReplicaSite],
        units: NonZeroU32,
        align: Align,
    ) -> Result<SlotLocation, NotStarted> {
        let spread = self.spread(record).filter(|_| !moontide_rt::mutation_enabled("copy-ignores-spread"));
        let segment = self.segment(index);
        let fits = segment.phase == SegmentPhase::Serving
            && segment.medium == Medium::Memory
            && segment.tenant.is_none_or(|tenant| tenant == record.tenant())
            && segment.units >= units.get()
            && (sites.iter().all(|other| other.is_apart(&segment.site(), spread))
                || moontide_rt::mutation_enabled("copy-beside-its-replica"));
        if !fits {
            return Err(NotStarted::NoPlace);
        }
        if segment.free_units() < units.get() {
            return Err(NotStarted::NoSpace);
        }
        if self.has_enough_copies(segment.node) {
            return Err(NotStarted::Busy);
        }
        let location = self.segment_mut(index).reserve(index, units, align).ok_or(NotStarted::NoSpace)?;
        self.note_free(index);
        Ok(location)
    }

    /// Whether a node has as many copies of this group in flight as its share allows.
    fn has_enough_copies(&self, node: NodeId) -> bool {
        let groups = u64::from(self.config.groups.get());
        let (count, bytes) = self.copies.by_node.get(&node).copied().unwrap_or_default();
        let is_enough =
            count >= (COPIES_PER_NODE / groups).max(16) || bytes >= (COPY_BYTES_PER_NODE / groups).max(1);
        is_enough && !moontide_rt::mutation_enabled("copies-unlimited")
    }

    /// Handles the result of a Copy command.
    pub(super) fn copy_result(
        &mut self,
        index: u32,
        slot: u32,
        (epoch, stripe): (Epoch, u16),
        outcome: CommandOutcome,
        effects: &mut Effects,
    ) {
        if outcome == CommandOutcome::Accepted {
            return; // in progress
        }
        let version = LocationVersion { segment: index, slot, epoch };
        let source = self.source_of(version);
        let copy = self.end_copy(version);
        let purpose = copy.map(|copy| copy.purpose);
        let moved = source.filter(|_| purpose.is_some_and(CopyPurpose::is_move));
        self.stats.copies_failed += u64::from(outcome != CommandOutcome::Done);
        let copied = self.filled_slot(version, stripe, outcome, moved, effects);
        if copied.is_some() {
            self.stats.copied_records += 1;
            self.stats.copied_bytes += copy.map_or(0, |copy| copy.bytes);
        }
        match (purpose, copied) {
            (Some(CopyPurpose::Repair), Some(at)) => self.repair_done(at),
            (Some(CopyPurpose::Repair), None) => self.repair_failed(),
            (Some(CopyPurpose::Hot), Some(at)) => self.hot_copy_done(at, self.segment(index).node),
            // What was not wanted before is not wanted at its new place either.
            (Some(CopyPurpose::Drain | CopyPurpose::Rebalance), Some(at)) => self.surplus_moved(at),
            (Some(CopyPurpose::Drain | CopyPurpose::Rebalance | CopyPurpose::Hot) | None, _) => {}
        }
        self.refill_repairs(effects);
        self.start_drain_copies(REFILL_MAX, effects);
    }

    /// Returns the position of a version in the locations of its object.
    pub(super) fn position_of(&self, record: &Record, version: LocationVersion) -> Option<usize> {
        (0..self.location_count(record))
            .find(|&position| LocationVersion::of(self.location(record, position), record.epoch()) == version)
    }

    /// Returns the location from which a copy in flight is made, if its segment is mounted.
    fn source_of(&self, target: LocationVersion) -> Option<LocationVersion> {
        let (node, segment, generation, slot) = self.copies.in_flight.get(&target)?.source;
        let &index = self.by_name.get(&(node, segment))?;
        let is_same = self.segment(index).generation == generation;
        is_same.then_some(LocationVersion { segment: index, slot, epoch: target.epoch })
    }

    /// Removes a copy from those in flight.
    fn end_copy(&mut self, target: LocationVersion) -> Option<CopyInFlight> {
        let copy = self.copies.in_flight.remove(&target)?;
        if let Some(of_node) = self.copies.by_node.get_mut(&copy.node) {
            *of_node = (of_node.0 - 1, of_node.1 - copy.bytes);
            if of_node.0 == 0 {
                self.copies.by_node.remove(&copy.node);
            }
        }
        Some(copy)
    }

    /// Forgets what a node has announced: it is lost.
    pub(super) fn forget_announcement(&mut self, node: NodeId) {
        self.copies.draining_nodes.remove(&node);
    }

    /// Ends the copies into a segment that is lost, and its drain.
    pub(super) fn end_copies_of_segment(&mut self, index: u32) {
        self.copies.drains.remove(&index);
        let into = self.copies.in_flight.keys().filter(|version| version.segment == index);
        for version in into.copied().collect::<Vec<_>>() {
            self.end_copy(version);
        }
    }

    /// Units that moves in flight for the balance of the nodes will free, by segment.
    pub(super) fn units_leaving(&self) -> BTreeMap<(NodeId, SegmentId), u64> {
        let mut leaving = BTreeMap::new();
        let moves = self.copies.in_flight.values().filter(|copy| copy.purpose == CopyPurpose::Rebalance);
        for copy in moves {
            *leaving.entry((copy.source.0, copy.source.1)).or_default() += copy.bytes / UNIT_BYTES;
        }
        leaving
    }

    /// Units of the copies in flight to readers.
    pub(super) fn hot_units_in_flight(&self) -> u64 {
        let hot = self.copies.in_flight.values().filter(|copy| copy.purpose == CopyPurpose::Hot);
        hot.map(|copy| copy.bytes / UNIT_BYTES).sum()
    }

    /// Number of copies in flight that repair objects.
    pub(super) fn repairs_in_flight(&self) -> u64 {
        let repairs = self.copies.in_flight.values().filter(|copy| copy.purpose == CopyPurpose::Repair);
        repairs.count() as u64
    }

    /// Checks the counts of copies in flight.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn copies_are_consistent(&self) -> bool {
        let in_flight = &self.copies.in_flight;
        let of_nodes = self.copies.by_node.iter().all(|(&node, &(count, bytes))| {
            let of_node = || in_flight.values().filter(|copy| copy.node == node);
            count == of_node().count() as u64 && bytes == of_node().map(|copy| copy.bytes).sum::<u64>()
        });
        let are_drains = self.copies.drains.keys().all(|&index| {
            self.segments[index as usize].as_ref().is_some_and(|s| s.phase == SegmentPhase::Draining)
        });
        let count: u64 = self.copies.by_node.values().map(|of_node| of_node.0).sum();
        of_nodes && are_drains && count == in_flight.len() as u64
    }
}
