//! Objects on nodes' disks.
//!
//! A disk is a segment without units: its node decides what stands where and what leaves when it is full; the group
//! knows who is on it. A place on a disk is a place like any other, so that losing a node, removing, and combining
//! stripes need no second way.
//!
//! ```text
//!                 victim, no copy on disk                notice: it is on disk
//!   in memory ────────── Offload order ──▶ offloading ────────────────────────▶ in memory and on disk
//!       ▲                                      │ refused, or time is over             │ victim: memory is
//!       │◀─────────────────────────────────────┘                                      ▼ given up, O(1)
//!       └───────────── Promote order, done ◀── read again, or asked for ────────── on disk
//! ```
//!
//! An object that is being offloaded is complete and can be read; nothing of it is given up before its node says that the
//! record would survive a crash. If the disk is slower than the puts, the puts wait.
//!
//! What leaves a disk is said by its node ([`Group::disk_evicted`]) before its space is used again; what the group gives
//! up (removed, expired, replaced) is an order like any other.

use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, MonoTime, NodeId, ObjectId, SegmentId, SessionId, Term,
};

use super::report::{ReportRecord, ReportState};
use super::{Ask, Group};
use crate::effect::{Effects, OrderKind, OrderOutcome};
use crate::record::{Flag, NONE, Place, Record};
use crate::segment::{Medium, Segment, SegmentPhase, Shape, SlotState};
use crate::slab::Ref;
use crate::time::{Now, Tick};

/// A disk as its node offers it.
#[derive(Clone, Copy, Debug)]
pub struct DiskSpec<'a> {
    /// The node.
    pub node: NodeId,
    /// Its session.
    pub session: SessionId,
    /// Which incarnation of the node.
    pub generation: Generation,
    /// Labels of where the node stands: host, rack, zone; empty if unknown.
    pub labels: [&'a str; 3],
    /// Whether what it holds will be told by [`Group::disk_notice`], up to [`Group::disk_recovered`].
    pub occupied: bool,
}

/// What is worth being written to a disk. SSDs wear out by writing, and much of what is put is never asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Everything that has to leave memory.
    #[default]
    All,
    /// What was read since it was put; the rest is dropped.
    ReadBefore,
}

/// An offload that was ordered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offload {
    until: Tick,
    units: u64,
}

impl Offload {
    pub(super) fn units(&self) -> u64 {
        self.units
    }
}

/// Offloads of one group at a time. An order and its answer take a hundred bytes on each side.
const OFFLOADS_MAX: usize = 16 << 10;

/// Objects that wait for their promotion, at most; what is asked for beyond that is asked for again.
const PROMOTIONS_MAX: usize = 4096;

/// Removals and evictions that are remembered for disks which may come back. Beyond that they are not waited for any
/// more, and taken as empty if they come.
const REMEMBERED_MAX: usize = 1 << 18;

impl Group {
    /// Takes a node's disk into use. One of an earlier session of the node is lost by this.
    pub fn mount_disk(&mut self, now: Now, spec: &DiskSpec<'_>, effects: &mut Effects) {
        if self.nodes.get(&spec.node).is_some_and(|node| node.session != spec.session) {
            self.lose_node(spec.node, now, effects);
        }
        if let Some(&earlier) = self.by_name.get(&(spec.node, SegmentId::DISK)) {
            if self.segment(earlier).session == spec.session {
                return; // for the sake of other groups
            }
            self.lose_segment(earlier, now, effects);
        }
        let missed = self.absent_disks.remove(&spec.node).is_some();
        let topology = self.topology(spec.labels);
        let shape = Shape {
            node: spec.node,
            session: spec.session,
            id: SegmentId::DISK,
            generation: spec.generation,
            medium: Medium::Disk,
            units: 1, // of which none is ever given out
            slots: 0,
            topology,
            tenant: None,
        };
        let phase = if spec.occupied { SegmentPhase::Reporting } else { SegmentPhase::Serving };
        let mut segment = Segment::new(shape, phase, now.mono);
        segment.is_late = spec.occupied && !missed && now.mono >= self.disk_reports_until;
        segment.takes_offloads = true;
        self.add_segment(segment, topology);
    }

    /// Whether a node's disk takes more; it says so with every heartbeat.
    pub fn disk_status(&mut self, node: NodeId, session: SessionId, takes_offloads: bool) {
        if let Ok(index) = self.disk_of(node, session) {
            self.segment_mut(index).takes_offloads = takes_offloads;
        }
    }

    /// A record is on a node's disk: just written because it was ordered, or found after a start (`recovered`). What
    /// nobody wants is given up, and the node is told. Of the record's slot, extent and place nothing counts; beside it
    /// stands the length of all of its attributes, those included that are not kept here.
    pub fn disk_notice(
        &mut self,
        now: Now,
        (node, session): (NodeId, SessionId),
        (record, attributes_len): (&ReportRecord<'_>, u32),
        recovered: bool,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let index = self.disk_of(node, session)?;
        self.believe_epoch(record.epoch)?;
        let known = self.find_id(record.id).filter(|&at| {
            let known = self.slab.get(at);
            known.epoch() == record.epoch && !known.has(Flag::Writing)
        });
        if let Some(at) = known
            && self.disk_place_of(at, index, record.stripe.index).is_some()
        {
            self.offload_ended(at, now, effects);
            return Ok(()); // said before
        }
        let slot = self.segment_mut(index).disk_slot().ok_or(ErrorCode::Busy)?;
        let record = ReportRecord {
            slot: moontide_types::SlotId(slot),
            state: ReportState::Ready,
            extent: Extent::default(),
            payload_offset: 0,
            ..*record
        };
        if (known.is_none() && !recovered) || (recovered && self.segment(index).is_late) {
            // Removed, replaced or given up while it was being written; or so long ago that nobody knows.
            self.report_unwelcome(index, &record, effects);
            return Ok(());
        }
        self.report_new(now, index, &record, effects)?;
        if recovered {
            self.stats.recovered_objects += u64::from(self.segment(index).slot(slot) != SlotState::Draining);
        }
        if let Some(at) = self.find_id(record.id).filter(|&at| self.slab.get(at).epoch() == record.epoch) {
            self.slab.get_mut(at).set_attributes_len(attributes_len);
            self.offload_ended(at, now, effects);
        }
        Ok(())
    }

    /// Everything that a disk held when its node started was told.
    pub fn disk_recovered(&mut self, node: NodeId, session: SessionId) -> Result<(), ErrorCode> {
        let index = self.disk_of(node, session)?;
        let segment = self.segment_mut(index);
        if segment.phase == SegmentPhase::Reporting {
            segment.phase = SegmentPhase::Serving;
        }
        Ok(())
    }

    /// A version is about to leave a node's disk, because that is full.
    pub fn disk_evicted(
        &mut self,
        now: Now,
        (node, session): (NodeId, SessionId),
        id: ObjectId,
        epoch: Epoch,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let index = self.disk_of(node, session)?;
        self.stats.disk_evicted += 1;
        let Some(at) = self.find_id(id) else { return Ok(()) };
        let record = *self.slab.get(at);
        if record.epoch() != epoch {
            return Ok(());
        }
        // One that is not complete yet is what reports and notices have brought so far: some of its stripes.
        let complete = !record.has(Flag::Writing);
        let alone = self.stripes(&record) == 1;
        for which in 0..self.place_count(&record) {
            let place = self.place(&record, which);
            if place.segment != index {
                continue;
            }
            if alone {
                self.set_place(at, which, Place::LOST);
                self.segment_mut(index).vacate(place.slot);
            } else {
                // Another stripe may stay behind, of which nobody would know.
                self.give_up_place(at, which, None, effects);
            }
        }
        if complete && !self.has_complete_replica(self.slab.get(at)) {
            self.remember_for_disks(id, epoch, now);
        }
        self.end_if_incomplete(at, false, now, effects);
        Ok(())
    }

    /// Brings an object from disk to memory ahead of need, as soon as there is room for it.
    pub fn prefetch(&mut self, now: Now, ask: &Ask<'_>) -> Result<(), ErrorCode> {
        let at = self.find_complete(ask, now)?;
        if self.slab.get(at).has(Flag::OnDisk) && !self.want_in_memory(ask.id) {
            return Err(ErrorCode::Busy);
        }
        Ok(())
    }

    /// Complete objects that are nowhere but on disks.
    pub fn objects_on_disk(&self) -> u64 {
        self.tenants.iter().map(|(_, tenant)| tenant.on_disk.len()).sum()
    }

    /// Units of memory that will be free when what is being written to disks is there.
    pub fn offloading_units(&self) -> u64 {
        self.offloading_units
    }

    // ------------------------------------------------------------------------------------------- offload

    /// Has nodes write a victim to their disks. False: none of them takes it, so that it can only be dropped.
    pub(super) fn start_offload(&mut self, at: Ref, now: Now, effects: &mut Effects) -> bool {
        let record = *self.slab.get(at);
        debug_assert!(!record.has(Flag::Writing) && !record.has(Flag::Offloading));
        let stripes = self.stripes(&record);
        let rows = self.place_count(&record) / stripes;
        let mut sources = Vec::with_capacity(stripes);
        for stripe in 0..stripes {
            let mut places = (0..rows).map(|row| self.place(&record, row * stripes + stripe));
            let readable = |place: &Place| self.is_readable(*place);
            if places.clone().filter(readable).any(|place| self.segment(place.segment).is_disk()) {
                continue;
            }
            match places.find(|&place| self.is_readable(place) && self.disk_beside(place).is_some()) {
                Some(place) => sources.push(place),
                None => return false,
            }
        }
        let (id, epoch, units) = (record.id(), record.epoch(), self.memory_units(&record));
        for place in sources {
            self.order(OrderKind::Offload, place.segment, place.slot, epoch, id, effects);
        }
        self.dequeue(at);
        let record = self.slab.get_mut(at);
        record.set(Flag::Offloading, true);
        // A use from now on is a reason to keep it in memory after all.
        record.set(Flag::Visited, false);
        self.enqueue(at);
        let until = self.ticker.end(now.mono, self.config.offload_window);
        self.offloads.insert(id, Offload { until, units });
        self.offloading_units += units;
        self.stats.offloads_ordered += 1;
        true
    }

    /// Whether another object may be handed to the disks now.
    pub(super) fn may_offload_more(&self) -> bool {
        self.offloads.len() < OFFLOADS_MAX
    }

    /// Whether an object can be offloaded at all, and is worth it.
    pub(super) fn is_worth_offloading(&mut self, record: &Record) -> bool {
        // What cannot be verified is not brought back.
        if record.has(Flag::Digestless) || self.unfit.contains(&record.id()) {
            return false;
        }
        let worth = self.sketch.as_ref().is_none_or(|sketch| sketch.count(record.id()) > 0);
        self.stats.offloads_not_admitted += u64::from(!worth);
        worth
    }

    /// Whether every stripe is on some disk.
    pub(super) fn is_whole_on_disk(&self, record: &Record) -> bool {
        let stripes = self.stripes(record);
        let rows = self.place_count(record) / stripes;
        let on_disk = |stripe: usize, row: usize| {
            let place = self.place(record, row * stripes + stripe);
            self.is_readable(place) && self.segment(place.segment).is_disk()
        };
        (0..stripes).all(|stripe| (0..rows).any(|row| on_disk(stripe, row)))
    }

    /// Gives up what an object has in memory; it stays on disk.
    pub(super) fn demote(&mut self, at: Ref, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        debug_assert!(self.is_whole_on_disk(&record) && !self.is_leased(&record, now));
        for which in 0..self.place_count(&record) {
            let place = self.place(&record, which);
            if !place.is_lost() && !self.segment(place.segment).is_disk() {
                self.give_up_place(at, which, None, effects);
            }
        }
        self.stats.demoted_objects += 1;
        self.places_changed(at);
    }

    /// A node has answered an Offload. What it wrote was told before, so that only a refusal changes anything.
    pub(super) fn offload_answered(&mut self, index: u32, slot: u32, epoch: Epoch, outcome: OrderOutcome) {
        let OrderOutcome::Refused(code) = outcome else { return };
        if matches!(code, ErrorCode::DiskFull | ErrorCode::DiskError) {
            // The next heartbeat says when it takes something again.
            let disk = self.by_name.get(&(self.segment(index).node, SegmentId::DISK)).copied();
            disk.into_iter().for_each(|disk| self.segment_mut(disk).takes_offloads = false);
        }
        let SlotState::Object(at) = self.segment(index).slot(slot) else { return };
        let record = self.slab.get(at);
        if record.epoch() != epoch {
            return;
        }
        if matches!(code, ErrorCode::TooLarge | ErrorCode::Corrupt | ErrorCode::Unsupported) {
            // It would be refused again and again, and stay for ever.
            self.unfit.insert(record.id());
        }
        if self.stripes(record) > 1 {
            // Of the others nothing was said.
            self.late_offloads.insert(record.id());
        }
        self.back_from_offload(at);
    }

    /// Offloads whose time is over: the objects may be chosen again.
    pub(super) fn expire_offloads(&mut self, now: Now, budget: usize) -> bool {
        for _ in 0..budget {
            let Some(at) = self.offloading.first() else { return false };
            let id = self.slab.get(at).id();
            // They stand in the order in which they were ordered, and all have equally long.
            if self.offloads.get(&id).is_some_and(|offload| offload.until > self.ticker.now(now.mono)) {
                return false;
            }
            self.back_from_offload(at);
            self.late_offloads.insert(id);
        }
        true
    }

    /// Whether a node may be writing an object to its disk.
    pub(super) fn may_be_written(&self, record: &Record) -> bool {
        record.has(Flag::Offloading) || self.late_offloads.contains(&record.id())
    }

    /// Of an object that was being offloaded another record is on disk: if that was the last one, memory is free.
    fn offload_ended(&mut self, at: Ref, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        if !record.has(Flag::Offloading) || !self.is_whole_on_disk(&record) {
            return;
        }
        self.back_from_offload(at);
        self.stats.offloaded_objects += 1;
        let record = self.slab.get(at);
        if !record.has(Flag::Visited) && record.pin() != PinClass::Hard && !self.is_leased(record, now) {
            self.demote(at, now, effects);
        }
    }

    fn back_from_offload(&mut self, at: Ref) {
        let id = self.slab.get(at).id();
        if !self.slab.get(at).has(Flag::Offloading) {
            return;
        }
        self.dequeue(at);
        self.slab.get_mut(at).set(Flag::Offloading, false);
        self.enqueue(at);
        self.end_offload(id);
    }

    /// Takes an offload out of the books; the record's mark and queue are the caller's.
    pub(super) fn end_offload(&mut self, id: ObjectId) {
        if let Some(offload) = self.offloads.remove(&id) {
            self.offloading_units -= offload.units;
        }
    }

    // ----------------------------------------------------------------------------------------- promotion

    /// An object on disk was read: the first time it is noted, the second time it is wanted in memory.
    pub(super) fn read_from_disk(&mut self, record: &Record) {
        if record.has(Flag::Visited) {
            self.want_in_memory(record.id());
        }
    }

    fn want_in_memory(&mut self, id: ObjectId) -> bool {
        let room = self.to_promote.len() < PROMOTIONS_MAX;
        if room {
            self.to_promote.push_back(id);
        }
        room
    }

    /// Has nodes bring objects back that are wanted in memory. Those for which there is no room now are forgotten: they
    /// are wanted again when they are read again.
    pub(super) fn promote_some(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        for _ in 0..budget {
            let Some(id) = self.to_promote.pop_front() else { return false };
            let Some(at) = self.find_id(id) else { continue };
            let record = *self.slab.get(at);
            // What was given up and is not confirmed, a promotion under way included, comes first.
            if record.has(Flag::OnDisk) && !self.is_expired(&record, now) && !self.has_undead(id) {
                self.promote(at, effects);
            }
        }
        !self.to_promote.is_empty()
    }

    fn promote(&mut self, at: Ref, effects: &mut Effects) {
        let record = *self.slab.get(at);
        if self.pressure_permille() >= self.config.high_permille {
            return; // it would push out what is used as much
        }
        let stripes = self.stripes(&record);
        let mut places = vec![];
        for stripe in 0..stripes {
            match self.reserve_promotion(at, stripe, stripes) {
                Some(place) => places.push((place, stripe as u16)),
                None => break,
            }
        }
        if places.len() < stripes {
            for (place, _) in places {
                self.segment_mut(place.segment).unreserve(place);
                self.note_free(place.segment);
            }
            return;
        }
        for (place, stripe) in places {
            // Until its node has answered, the place is as one that drains: taken, and nobody's to read.
            let (epoch, id) = (record.epoch(), record.id());
            let segment = self.segment_mut(place.segment);
            let extent = segment.extent(place.block);
            segment.drain(place, epoch, id, false);
            self.undead.insert((id, place.segment, place.slot));
            self.order(OrderKind::Promote { stripe, extent }, place.segment, place.slot, epoch, id, effects);
        }
    }

    /// Room in memory of a node that has the stripe on its disk.
    fn reserve_promotion(&mut self, at: Ref, stripe: usize, stripes: usize) -> Option<Place> {
        let record = *self.slab.get(at);
        let rows = self.place_count(&record) / stripes;
        let (units, align) = self.units_of_stripe(at, stripe)?;
        for row in 0..rows {
            let place = self.place(&record, row * stripes + stripe);
            if !self.is_readable(place) || !self.segment(place.segment).is_disk() {
                continue;
            }
            let node = self.segment(place.segment).node;
            let segments = self.nodes.get(&node).map(|node| node.segments.clone()).unwrap_or_default();
            for index in segments {
                let segment = self.segment_mut(index);
                let suits = segment.phase == SegmentPhase::Serving
                    && segment.medium == Medium::Memory
                    && segment.tenant.is_none_or(|tenant| tenant == record.tenant())
                    && segment.free_units() >= units.get();
                if !suits {
                    continue;
                }
                if let Some(place) = segment.reserve(index, units, align) {
                    self.note_free(index);
                    return Some(place);
                }
            }
        }
        None
    }

    /// A node has brought a stripe back into memory, or could not.
    pub(super) fn promotion_answered(
        &mut self,
        index: u32,
        slot: u32,
        (epoch, stripe): (Epoch, u16),
        outcome: OrderOutcome,
        effects: &mut Effects,
    ) {
        let Some(&drain) = self.segment(index).drains.get(&slot).filter(|drain| drain.epoch == epoch) else {
            return;
        };
        if outcome == OrderOutcome::Accepted {
            return; // under way
        }
        let alive = self.undead.contains(&(drain.id, index, slot));
        let wanted = self.find_id(drain.id).filter(|&at| {
            let record = self.slab.get(at);
            record.epoch() == epoch && !record.has(Flag::Writing)
        });
        let killed = !alive || self.kills.contains_key(&(index, slot));
        let (OrderOutcome::Done, Some(at), false) = (outcome, wanted, killed) else {
            self.order(OrderKind::Reclaim, index, slot, epoch, drain.id, effects);
            return;
        };
        self.undead.remove(&(drain.id, index, slot));
        let place = self.segment_mut(index).revive(index, slot, at);
        let record = *self.slab.get(at);
        let stripes = self.stripes(&record);
        let rows = self.place_count(&record) / stripes;
        let stripe = usize::from(stripe);
        let row = (0..rows).find(|row| self.place(&record, row * stripes + stripe).is_lost());
        if row.is_none() {
            self.extra_mut(at).places.extend(std::iter::repeat_n(Place::LOST, stripes));
        }
        self.set_place(at, row.unwrap_or(rows) * stripes + stripe, place);
        self.count_place(at, place);
        self.places_changed(at);
        self.stats.promoted_objects += u64::from(stripe == 0);
    }

    // --------------------------------------------------------------------------------------------- books

    /// After places came or went: the object stands in the queue that fits, and carries no more than it needs.
    pub(super) fn places_changed(&mut self, at: Ref) {
        let record = *self.slab.get(at);
        if record.has(Flag::Writing) {
            return;
        }
        let in_memory = (0..self.place_count(&record)).any(|which| {
            let place = self.place(&record, which);
            !place.is_lost() && !self.segment(place.segment).is_disk()
        });
        if record.has(Flag::OnDisk) == in_memory {
            self.dequeue(at);
            let changed = self.slab.get_mut(at);
            changed.set(Flag::OnDisk, !in_memory);
            changed.set(Flag::Visited, false);
            changed.set(Flag::Offloading, false);
            self.end_offload(record.id());
            self.enqueue(at);
        }
        self.forget_lost_places(at);
    }

    /// An object of one stripe whose only place stands behind lost ones gets it to the front; what is then not needed
    /// any more goes.
    fn forget_lost_places(&mut self, at: Ref) {
        let record = *self.slab.get(at);
        let Some(extra) = self.extras.get(record.extra) else { return };
        if extra.stripes != 1 || extra.places.is_empty() {
            return;
        }
        let all = std::iter::once(record.place()).chain(extra.places.iter().copied());
        let places: Vec<Place> = all.filter(|place| !place.is_lost()).collect();
        let Some((&first, others)) = places.split_first() else { return };
        let plain = extra.expires.is_none() && extra.cohort == NONE && extra.parent.is_none();
        if plain && others.is_empty() {
            self.extras.remove(record.extra);
            self.slab.get_mut(at).extra = NONE;
        } else {
            let extra = self.extras.get_mut(record.extra).expect("it was just read");
            extra.places = others.to_vec();
            extra.committed = vec![];
        }
        self.slab.get_mut(at).set_place(first);
    }

    /// Units of memory that an object has.
    fn memory_units(&self, record: &Record) -> u64 {
        let places = (0..self.place_count(record)).map(|which| self.place(record, which));
        let there = places.filter(|place| !place.is_lost());
        there.map(|place| u64::from(self.segment(place.segment).extent(place.block).units)).sum()
    }

    /// The disk of the node that has a place in memory, if it takes more.
    fn disk_beside(&self, place: Place) -> Option<u32> {
        let segment = self.segment(place.segment);
        if segment.medium != Medium::Memory {
            return None;
        }
        let &disk = self.by_name.get(&(segment.node, SegmentId::DISK))?;
        let disk_segment = self.segment(disk);
        (disk_segment.phase == SegmentPhase::Serving && disk_segment.takes_offloads).then_some(disk)
    }

    /// Whether the node that has a place in memory has a disk, whatever its state.
    pub(super) fn has_disk_beside(&self, place: Place) -> bool {
        let segment = self.segment(place.segment);
        segment.medium == Medium::Memory && self.by_name.contains_key(&(segment.node, SegmentId::DISK))
    }

    fn disk_of(&self, node: NodeId, session: SessionId) -> Result<u32, ErrorCode> {
        let &index = self.by_name.get(&(node, SegmentId::DISK)).ok_or(ErrorCode::NotFound)?;
        if self.segment(index).session == session { Ok(index) } else { Err(ErrorCode::StaleSession) }
    }

    /// Which of an object's places is the stripe's on this disk.
    fn disk_place_of(&self, at: Ref, disk: u32, stripe: u16) -> Option<usize> {
        let record = self.slab.get(at);
        let stripes = self.stripes(record);
        (usize::from(stripe)..self.place_count(record))
            .step_by(stripes)
            .find(|&which| self.place(record, which).segment == disk)
    }

    /// A disk that is away may come back with this version, which is given up for good.
    pub(super) fn remember_for_disks(&mut self, id: ObjectId, epoch: Epoch, now: Now) {
        if !self.disks_may_return(now) {
            return;
        }
        if self.tombstones.len() >= REMEMBERED_MAX && !self.tombstones.contains_key(&id) {
            self.absent_disks.clear();
            self.disk_reports_until = MonoTime(0);
            return;
        }
        let removed = self.tombstones.entry(id).or_insert(epoch);
        *removed = epoch.max(*removed);
    }

    /// Whether a disk has come back and still has what nobody knows of, or what it was told to drop because it came late.
    pub(super) fn disks_are_returning(&self) -> bool {
        let returning = |segment: &Segment| {
            let dropping = segment.is_late && !segment.drains.is_empty();
            segment.is_disk() && (segment.phase == SegmentPhase::Reporting || dropping)
        };
        self.segments.iter().flatten().any(returning)
    }

    /// Whether a disk may come back with what was removed or forgotten meanwhile.
    pub(super) fn disks_may_return(&self, now: Now) -> bool {
        let first_term = self.config.previous == Term::ZERO;
        let reporting = |segment: &Segment| segment.is_disk() && segment.phase == SegmentPhase::Reporting;
        !self.absent_disks.is_empty()
            || (!first_term && now.mono < self.disk_reports_until)
            || self.segments.iter().flatten().any(reporting)
    }
}
