//! Objects on disks of nodes.
//!
//! A disk is a segment without units. Its node chooses the positions of records and the victims of a full disk; the
//! group knows which objects are on it. A location on a disk is like any other, so that the loss of a node, removal,
//! and the combination of stripes need no separate code.
//!
//! ```text
//!             victim, no copy on disk                    notice: it is on disk
//!   in memory ────────── Offload command ──▶ offloading ────────────────────────▶ in memory and on disk
//!       ▲                                       │ refused or timed out                 │ victim: memory is
//!       │◀──────────────────────────────────────┘                                      ▼ released, O(1)
//!       └───────────── Promote command, done ◀── read again, or prefetched ──────── on disk
//! ```
//!
//! A write-back ([`flush`](super::flush)) is an offload of an object that is not a victim: it stays in its queue, and in memory
//! after the notice.
//!
//! An object that is being offloaded is complete and readable. The group releases none of its memory before the node
//! reports that the record would survive a crash. If the disk is slower than the puts, the puts wait.
//!
//! The node reports an eviction from its disk ([`Group::disk_evicted`]) before it reuses the space. For objects that
//! the group drops (removed, expired, replaced) it sends ordinary commands.

use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, Medium, MonoTime, NodeId, ObjectId, SegmentId, SessionId, Term,
};

use super::exclusion::SyncMark;
use super::flush::WriteBack;
use super::report::{ReportRecord, ReportState};
use super::{Group, LocationVersion, LookupKey};
use crate::effect::{CommandKind, CommandOutcome, Effects};
use crate::ids::{NONE, RecordRef};
use crate::record::{Record, RecordFlag, SlotLocation};
use crate::segment::{Segment, SegmentParams, SegmentPhase, SlotState};
use crate::time::{Now, Tick};

/// A disk as its node offers it.
#[derive(Clone, Copy, Debug)]
pub struct DiskSpec<'a> {
    /// Node that owns the disk.
    pub node: NodeId,
    /// Session of the node.
    pub session: SessionId,
    /// Incarnation of the node.
    pub generation: Generation,
    /// Topology labels of the node: host, rack, zone; empty if unknown.
    pub labels: [&'a str; 3],
    /// Whether the node will report its records with [`Group::disk_notice`], up to [`Group::disk_recovered`].
    pub occupied: bool,
    /// When the node was last in sync with a master of the group.
    pub synced: SyncMark,
}

/// Which objects are written to a disk. SSDs wear out by writing, and many objects are never read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// All victims of eviction from memory.
    #[default]
    All,
    /// Objects that were read since their put; others are dropped.
    Accessed,
}

/// An offload for which commands were sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offload {
    pub(super) until: Tick,
    /// Units of memory that it will free.
    units: u64,
    /// It ends when every stripe is on this number of disks.
    copies: usize,
    /// Set if the object stays in memory.
    pub(super) write_back: Option<WriteBack>,
}

/// Reason for an offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OffloadPurpose {
    /// The object is a victim: it leaves memory afterwards.
    Evict,
    /// The object stays in memory.
    WriteBack {
        /// The flush that waits for it.
        flush: Option<SessionId>,
    },
}

#[cfg(any(test, feature = "testing"))]
impl Offload {
    pub(super) fn units(&self) -> u64 {
        self.units
    }
}

/// Maximum number of concurrent offloads of one group. A command and its result take a hundred bytes at each end.
const OFFLOADS_MAX: usize = 16 << 10;

/// Maximum number of objects that wait for promotion; further requests fail and must be repeated.
const PROMOTIONS_MAX: usize = 4096;

/// Maximum number of tombstones for disks that may return. Beyond that the group no longer waits for these disks and
/// treats them as empty if they return.
const DISK_TOMBSTONES_MAX: usize = 1 << 18;

impl Group {
    /// Mounts a node's disk. A disk of an earlier session of the node is lost by this. Returns whether it was not mounted
    /// before.
    pub fn mount_disk(&mut self, now: Now, spec: &DiskSpec<'_>, effects: &mut Effects) -> bool {
        if self.nodes.get(&spec.node).is_some_and(|node| node.session != spec.session) {
            self.lose_node(spec.node, now, effects);
        }
        if let Some(&earlier) = self.by_name.get(&(spec.node, SegmentId::DISK)) {
            if self.segment(earlier).session == spec.session {
                return false; // mounted for another group, too
            }
            self.lose_segment(earlier, now, effects);
        }
        self.observe_sync_mark(spec.synced);
        let was_absent = self.absent_disks.remove(&spec.node).is_some();
        let topology = self.topology(spec.labels);
        let params = SegmentParams {
            node: spec.node,
            session: spec.session,
            id: SegmentId::DISK,
            generation: spec.generation,
            medium: Medium::Disk,
            units: 1, // never allocated
            slots: 0,
            topology,
            tenant: None,
        };
        let phase = if spec.occupied { SegmentPhase::Reporting } else { SegmentPhase::Serving };
        let mut segment = Segment::new(params, phase, now.mono);
        let late = now.mono >= self.disk_reports_until;
        segment.is_stale = spec.occupied && !was_absent && (late || self.was_excluded(spec.synced));
        segment.accepts_offloads = true;
        self.add_segment(segment, topology);
        if spec.occupied {
            self.jobs_are_uncertain();
        }
        true
    }

    /// Sets whether a node's disk accepts more records; part of every heartbeat.
    pub fn disk_status(&mut self, node: NodeId, session: SessionId, accepts_offloads: bool) {
        if let Ok(index) = self.disk_of(node, session) {
            self.segment_mut(index).accepts_offloads = accepts_offloads;
        }
    }

    /// Adds a record on a node's disk: just written because of an Offload command, or found after a start
    /// (`recovered`). The group rejects an unneeded record, and sends a command to drop it. Slot, extent and location
    /// of the record are ignored. `attributes_len` is the length of all attributes, including those that the group does
    /// not keep.
    pub fn disk_notice(
        &mut self,
        now: Now,
        (node, session): (NodeId, SessionId),
        (record, attributes_len): (&ReportRecord<'_>, u32),
        recovered: bool,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let index = self.disk_of(node, session)?;
        self.observe_epoch(record.epoch)?;
        let existing = self.find_id(record.id).filter(|&at| {
            let existing = self.slab.get(at);
            existing.epoch() == record.epoch && !existing.has(RecordFlag::Writing)
        });
        if let Some(at) = existing
            && self.disk_location_of(at, index, record.stripe.index).is_some()
        {
            self.offload_ended(at, now, effects);
            return Ok(()); // repeated notice
        }
        let slot = self.segment_mut(index).disk_slot().ok_or(ErrorCode::Busy)?;
        let record = ReportRecord {
            slot: moontide_types::SlotId(slot),
            state: ReportState::Ready,
            extent: Extent::default(),
            payload_offset: 0,
            ..*record
        };
        // After the end of its inventory, a disk only has new records of objects that the group knows.
        let is_expected =
            existing.is_some() || (recovered && self.segment(index).phase == SegmentPhase::Reporting);
        if !is_expected || (recovered && self.segment(index).is_stale) {
            // Removed, replaced or dropped during the write; or the disk is stale, so that the record may have been
            // removed.
            self.reject_reported(index, &record, effects);
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

    /// Ends the report of a disk's records after a start of its node.
    pub fn disk_recovered(&mut self, node: NodeId, session: SessionId) -> Result<(), ErrorCode> {
        let index = self.disk_of(node, session)?;
        let segment = self.segment_mut(index);
        if segment.phase == SegmentPhase::Reporting {
            segment.phase = SegmentPhase::Serving;
            self.begin_warm_up(index);
        }
        Ok(())
    }

    /// Removes the locations of a version that a full disk is about to evict.
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
        // An incomplete object consists of the stripes that reports and notices have added so far.
        let complete = !record.has(RecordFlag::Writing);
        let single_stripe = self.stripes(&record) == 1;
        let mut evicted = vec![];
        for position in 0..self.location_count(&record) {
            let location = self.location(&record, position);
            if location.segment != index {
                continue;
            }
            if single_stripe {
                self.set_location(at, position, SlotLocation::LOST);
                self.segment_mut(index).vacate(location.slot);
            } else {
                // Another stripe may remain on the disk, untracked by the group.
                self.release_location(at, position, None, effects);
            }
            evicted.push(position);
        }
        if evicted.iter().all(|&position| self.waits_with_stripe(at, position)) {
            self.locations_changed(at);
            return Ok(()); // the object waits for other stripes, and has all that it had
        }
        if complete && !self.has_complete_replica(self.slab.get(at)) {
            self.keep_disk_tombstone(id, epoch, now);
        }
        self.end_if_incomplete(at, false, now, effects);
        Ok(())
    }

    /// Requests the promotion of an object from disk to memory, as soon as there is space for it.
    pub fn prefetch(&mut self, now: Now, lookup: &LookupKey<'_>) -> Result<(), ErrorCode> {
        let at = self.find_complete(lookup, now)?;
        if self.is_read_from_disk(self.slab.get(at)) && !self.request_promotion(lookup.id) {
            return Err(ErrorCode::Busy);
        }
        Ok(())
    }

    /// Number of complete objects that are only on disks.
    pub fn objects_on_disk(&self) -> u64 {
        self.tenants.iter().map(|(_, tenant)| tenant.on_disk.len()).sum()
    }

    /// Units of memory that will be free when all offloads are complete.
    pub fn offloading_units(&self) -> u64 {
        self.offloading_units
    }

    // ------------------------------------------------------------------------------------------- offload

    /// Commands nodes to write an object to their disks. Returns `false` if no disk accepts it, so that a victim can only be
    /// dropped.
    pub(super) fn start_offload(
        &mut self,
        at: RecordRef,
        purpose: OffloadPurpose,
        now: Now,
        effects: &mut Effects,
    ) -> bool {
        let record = *self.slab.get(at);
        debug_assert!(!record.has(RecordFlag::Writing) && !record.has(RecordFlag::Offloading));
        let (id, epoch) = (record.id(), record.epoch());
        let (flushing, copies) = match purpose {
            OffloadPurpose::WriteBack { flush: None } => (None, self.copies_on_disk(&record) + 1),
            OffloadPurpose::WriteBack { flush } => (flush, 1),
            OffloadPurpose::Evict => (None, 1),
        };
        let mut node = self.memory_node(&record);
        // A victim that is being written already needs no further commands.
        if !self.offloads.contains_key(&id) {
            let Some(sources) = self.offload_sources(&record, copies, flushing) else { return false };
            node = sources.first().map(|location| self.segment(location.segment).node).or(node);
            for location in sources {
                self.push_command(CommandKind::Offload, location.segment, location.slot, epoch, id, effects);
            }
            self.stats.offloads_started += 1;
        }
        self.end_offload(id);
        let window = self.config.offload_window;
        match purpose {
            OffloadPurpose::WriteBack { flush } => {
                // The node cancels the command after one window. Its answer is expected before this deadline.
                let until = self.ticker.end(now.mono, 2 * window);
                let node = node.unwrap_or(NodeId(0));
                let write_back = WriteBack { node, bytes: record.object_len(), flush };
                self.offloads.insert(id, Offload { until, units: 0, copies, write_back: Some(write_back) });
                self.write_back_started(id, until, write_back);
            }
            OffloadPurpose::Evict => {
                let until = self.ticker.end(now.mono, window);
                let units = self.memory_units(&record);
                self.dequeue(at);
                let record = self.slab.get_mut(at);
                record.set(RecordFlag::Offloading, true);
                // A use from now on is a reason to keep it in memory.
                record.set(RecordFlag::Visited, false);
                self.enqueue(at);
                self.offloads.insert(id, Offload { until, units, copies, write_back: None });
                self.offloading_units += units;
            }
        }
        true
    }

    /// Returns a location in memory for each stripe that is on fewer than `copies` disks, if its node has a disk that accepts
    /// records, and does not have this one. Prefers the node of `session`, which is about to stop; else one whose disk is not busy
    /// with write-backs.
    fn offload_sources(
        &self,
        record: &Record,
        copies: usize,
        session: Option<SessionId>,
    ) -> Option<Vec<SlotLocation>> {
        let stripes = self.stripes(record);
        let rows = self.location_count(record) / stripes;
        let mut sources = Vec::with_capacity(stripes);
        for stripe in 0..stripes {
            let mut locations = (0..rows)
                .map(|row| self.location(record, row * stripes + stripe))
                .filter(|&location| self.is_readable(location));
            if self.disks_of_stripe(record, stripe) >= copies {
                continue;
            }
            let is_source = |location: &SlotLocation| {
                self.accepting_disk_of(*location).is_some() && self.disk_lacks(record, stripe, *location)
            };
            let is_preferred = |location: &SlotLocation| match session {
                Some(session) => session == self.segment(location.segment).session,
                None => self.accepting_disk_of(*location).is_some_and(|disk| self.takes_write_backs(disk)),
            };
            let preferred = locations.clone().find(|location| is_source(location) && is_preferred(location));
            sources.push(preferred.or_else(|| locations.find(is_source))?);
        }
        Some(sources)
    }

    /// Whether another offload may start now.
    pub(super) fn may_offload_more(&self) -> bool {
        self.offloads.len() < OFFLOADS_MAX
    }

    /// Whether an object can be offloaded at all, and is admitted.
    pub(super) fn should_offload(&mut self, record: &Record) -> bool {
        if !self.is_offloadable(record) {
            return false;
        }
        let admitted = self.is_admitted(record);
        self.stats.offloads_not_admitted += u64::from(!admitted);
        admitted
    }

    /// Whether an object may be written to a disk according to the configuration.
    pub(super) fn is_admitted(&self, record: &Record) -> bool {
        self.sketch.as_ref().is_none_or(|sketch| sketch.count(record.id()) > 0)
    }

    /// Whether every stripe is on a disk.
    pub(super) fn is_completely_on_disk(&self, record: &Record) -> bool {
        self.copies_on_disk(record) > 0
    }

    /// Whether every stripe that is in memory is on a disk, too.
    pub(super) fn can_be_demoted(&self, record: &Record) -> bool {
        if !self.lacks_stripes(record) {
            return self.is_completely_on_disk(record);
        }
        let is_on_disk = |stripe: usize| self.is_stripe_on_disk(record, stripe);
        let mut stripes = 0..self.stripes(record);
        stripes.clone().all(|stripe| is_on_disk(stripe) || !self.is_stripe_in_memory(record, stripe))
            && stripes.any(is_on_disk)
    }

    /// Releases the memory locations of an object; it stays on disk.
    pub(super) fn demote(&mut self, at: RecordRef, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        debug_assert!(self.can_be_demoted(&record) && !self.is_leased(&record, now));
        for position in 0..self.location_count(&record) {
            let location = self.location(&record, position);
            if !location.is_lost() && !self.segment(location.segment).is_disk() {
                self.release_location(at, position, None, effects);
            }
        }
        // One of them may have been on a lost segment, where the sweep does not find it any more.
        if self.lacks_stripes(self.slab.get(at)) {
            self.lost_stripes(at, now);
        }
        self.stats.demoted_objects += 1;
        self.locations_changed(at);
    }

    /// Handles the result of an Offload command. The node reports a written record separately and earlier, so only a
    /// refusal changes anything.
    pub(super) fn offload_result(&mut self, index: u32, slot: u32, epoch: Epoch, outcome: CommandOutcome) {
        let CommandOutcome::Refused(code) = outcome else { return };
        if matches!(code, ErrorCode::DiskFull | ErrorCode::DiskError) {
            // A later heartbeat reports when the disk accepts records again.
            let disk = self.by_name.get(&(self.segment(index).node, SegmentId::DISK)).copied();
            disk.into_iter().for_each(|disk| self.segment_mut(disk).accepts_offloads = false);
        }
        let SlotState::Object(at) = self.segment(index).slot(slot) else { return };
        let record = self.slab.get(at);
        if record.epoch() != epoch {
            return;
        }
        if matches!(code, ErrorCode::TooLarge | ErrorCode::Corrupt | ErrorCode::Unsupported) {
            // The node would refuse every further attempt, and the object would never leave memory.
            self.not_offloadable.insert(record.id());
        }
        if self.stripes(record) > 1 {
            // The nodes of the other stripes have not responded.
            self.late_offloads.insert(record.id());
        }
        let write_back = self.offloads.get(&self.slab.get(at).id()).and_then(|offload| offload.write_back);
        self.leave_offloading(at);
        match write_back {
            Some(write_back) if code == ErrorCode::Cancelled => self.repeat_write_back(at, write_back),
            Some(write_back) => self.write_back_failed(write_back),
            None => {}
        }
    }

    /// Ends offloads that timed out: the objects may become victims again.
    pub(super) fn expire_offloads(&mut self, now: Now, budget: usize) -> bool {
        for _ in 0..budget {
            let Some(id) = self.expired_write_back(now) else { break };
            let write_back = self.offloads.get(&id).and_then(|offload| offload.write_back);
            write_back.into_iter().for_each(|write_back| self.write_back_failed(write_back));
            self.end_offload(id);
            self.late_offloads.insert(id);
        }
        for _ in 0..budget {
            let Some(at) = self.offloading.first() else { return false };
            let id = self.slab.get(at).id();
            // The queue is in order of the commands, and all offloads have the same timeout.
            if self.offloads.get(&id).is_some_and(|offload| offload.until > self.ticker.now(now.mono)) {
                return false;
            }
            self.leave_offloading(at);
            self.late_offloads.insert(id);
        }
        true
    }

    /// Whether a node may be writing an object to its disk.
    pub(super) fn may_be_offloading(&self, record: &Record) -> bool {
        let id = record.id();
        let writes_back =
            self.offloads.contains_key(&id) && !moontide_rt::mutation_enabled("write-back-survives-drop");
        record.has(RecordFlag::Offloading) || writes_back || self.late_offloads.contains(&id)
    }

    /// Handles another record on disk of an object that is being offloaded. After the last one, releases the memory.
    fn offload_ended(&mut self, at: RecordRef, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        let copies = self.copies_on_disk(&record);
        let offload = self.offloads.get(&record.id()).filter(|offload| copies >= offload.copies);
        let Some(&offload) = offload else { return };
        self.leave_offloading(at);
        self.stats.offloaded_objects += 1;
        if offload.write_back.is_some() {
            self.queue_write_back(at); // on another disk, if it shall be on several
            self.refill_write_backs(now, effects);
            return;
        }
        let record = self.slab.get(at);
        if !record.has(RecordFlag::Visited) && record.pin() != PinClass::Hard && !self.is_leased(record, now)
        {
            self.demote(at, now, effects);
        }
    }

    pub(super) fn leave_offloading(&mut self, at: RecordRef) {
        if self.slab.get(at).has(RecordFlag::Offloading) {
            self.dequeue(at);
            self.slab.get_mut(at).set(RecordFlag::Offloading, false);
            self.enqueue(at);
        }
        self.end_offload(self.slab.get(at).id());
    }

    /// Removes an offload from the table and from the unit count. The caller updates the record's flag and queue.
    pub(super) fn end_offload(&mut self, id: ObjectId) {
        let Some(offload) = self.offloads.remove(&id) else { return };
        self.offloading_units -= offload.units;
        if let Some(write_back) = offload.write_back {
            self.write_back_ended(id, offload.until, write_back);
        }
    }

    // ----------------------------------------------------------------------------------------- promotion

    /// Handles a read of an object on disk, before the read counts as a use. The first read only marks the object. A
    /// further one requests its promotion if memory is free, or if the time between the two reads is so short that the
    /// object would have stayed in memory since: then it probably stays until its next read. Otherwise a promotion
    /// would only displace objects that are used as much. (LIRS compares these two times, too: Jiang and Zhang,
    /// SIGMETRICS 2002.)
    pub(super) fn read_from_disk(&mut self, record: &Record) {
        if record.has(RecordFlag::Visited)
            && (self.has_free_memory
                || self.outlives_victim(record)
                || moontide_rt::mutation_enabled("cold-object-promoted"))
        {
            self.request_promotion(record.id());
        }
    }

    fn request_promotion(&mut self, id: ObjectId) -> bool {
        let has_space = self.to_promote.len() < PROMOTIONS_MAX;
        if has_space {
            self.to_promote.push_back(id);
        }
        has_space
    }

    /// Commands nodes to load objects into memory. Requests for which there is no space now are dropped: the next read
    /// requests them again.
    pub(super) fn start_promotions(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        for _ in 0..budget {
            let Some(id) = self.to_promote.pop_front() else { return false };
            let Some(at) = self.find_id(id) else { continue };
            let record = *self.slab.get(at);
            // Unconfirmed locations, including a promotion in progress, must be resolved first.
            if self.is_read_from_disk(&record)
                && !self.is_expired(&record, now)
                && !self.has_unconfirmed_kill(id)
            {
                self.promote(at, effects);
            }
        }
        !self.to_promote.is_empty()
    }

    pub(super) fn promote(&mut self, at: RecordRef, effects: &mut Effects) {
        let record = *self.slab.get(at);
        if self.pressure_permille() >= self.config.eviction_high_watermark_permille {
            return; // it would evict objects that are used as much
        }
        let stripes = self.stripes(&record);
        let missing: Vec<usize> =
            (0..stripes).filter(|&stripe| !self.is_stripe_in_memory(&record, stripe)).collect();
        let mut locations = vec![];
        for &stripe in &missing {
            match self.reserve_promotion(at, stripe, stripes) {
                Some(location) => locations.push((location, stripe as u16)),
                None => break,
            }
        }
        if locations.len() < missing.len() {
            for (location, _) in locations {
                self.segment_mut(location.segment).unreserve(location);
                self.note_free(location.segment);
            }
            return;
        }
        for (location, stripe) in locations {
            // Until its node has responded, the location is treated as draining: taken, and not readable.
            let (epoch, id) = (record.epoch(), record.id());
            let segment = self.segment_mut(location.segment);
            let extent = segment.extent(location.block);
            segment.fill(location, epoch, id);
            self.unconfirmed_kills.insert((id, LocationVersion::of(location, epoch)));
            self.push_command(
                CommandKind::Promote { stripe, extent },
                location.segment,
                location.slot,
                epoch,
                id,
                effects,
            );
        }
    }

    /// Whether a complete object is read from a disk, at least in part.
    pub(super) fn is_read_from_disk(&self, record: &Record) -> bool {
        match self.stripes(record) {
            1 => record.has(RecordFlag::OnDisk),
            stripes => !(0..stripes).all(|stripe| self.is_stripe_in_memory(record, stripe)),
        }
    }

    fn is_stripe_in_memory(&self, record: &Record, stripe: usize) -> bool {
        self.has_stripe(record, stripe, |segment| !segment.is_disk())
    }

    fn is_stripe_on_disk(&self, record: &Record, stripe: usize) -> bool {
        self.has_stripe(record, stripe, Segment::is_disk)
    }

    /// Whether a stripe can be read from one of these segments.
    pub(super) fn has_stripe(&self, record: &Record, stripe: usize, of: impl Fn(&Segment) -> bool) -> bool {
        (stripe..self.location_count(record)).step_by(self.stripes(record)).any(|position| {
            let location = self.location(record, position);
            self.is_readable(location) && of(self.segment(location.segment))
        })
    }

    /// Whether the node of a segment has a stripe of an object in its memory, apart from one location.
    pub(super) fn has_stripe_in_memory(
        &self,
        record: &Record,
        stripe: usize,
        segment: u32,
        except: Option<usize>,
    ) -> bool {
        let node = self.segment(segment).node;
        (stripe..self.location_count(record)).step_by(self.stripes(record)).any(|position| {
            let location = self.location(record, position);
            let of_node = |segment: &Segment| segment.node == node && !segment.is_disk();
            Some(position) != except && self.is_readable(location) && of_node(self.segment(location.segment))
        })
    }

    /// Reserves memory on a node that has the stripe on its disk.
    fn reserve_promotion(&mut self, at: RecordRef, stripe: usize, stripes: usize) -> Option<SlotLocation> {
        let record = *self.slab.get(at);
        let rows = self.location_count(&record) / stripes;
        let (units, align) = self.units_of_stripe(at, stripe)?;
        for row in 0..rows {
            let location = self.location(&record, row * stripes + stripe);
            if !self.is_readable(location) || !self.segment(location.segment).is_disk() {
                continue;
            }
            let node = self.segment(location.segment).node;
            let segments = self.nodes.get(&node).map(|node| node.segments.clone()).unwrap_or_default();
            for index in segments {
                let segment = self.segment_mut(index);
                let fits = segment.phase == SegmentPhase::Serving
                    && segment.medium == Medium::Memory
                    && segment.tenant.is_none_or(|tenant| tenant == record.tenant())
                    && segment.free_units() >= units.get();
                if !fits {
                    continue;
                }
                if let Some(location) = segment.reserve(index, units, align) {
                    self.note_free(index);
                    return Some(location);
                }
            }
        }
        None
    }

    /// Handles the result of a Promote command.
    pub(super) fn promotion_result(
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
        if self.filled_slot(version, stripe, outcome, None, effects).is_some() {
            self.stats.promoted_objects += u64::from(stripe == 0);
        }
    }

    /// Handles the end of a promotion or copy into a slot. If the node has filled the slot and the object still exists, it
    /// becomes a location of the object, and the object is returned; otherwise the slot is reclaimed. `replaces` is a
    /// location of the same stripe that is released in exchange.
    pub(super) fn filled_slot(
        &mut self,
        version: LocationVersion,
        stripe: u16,
        outcome: CommandOutcome,
        replaces: Option<LocationVersion>,
        effects: &mut Effects,
    ) -> Option<RecordRef> {
        let LocationVersion { segment: index, slot, epoch } = version;
        let &drain = self.segment(index).drains.get(&slot).filter(|drain| drain.epoch == epoch)?;
        let expected = self.unconfirmed_kills.contains(&(drain.id, version))
            || moontide_rt::mutation_enabled("copy-not-killed");
        let object = self.find_id(drain.id).filter(|&at| {
            let record = self.slab.get(at);
            record.epoch() == epoch && !record.has(RecordFlag::Writing)
        });
        let killed = !expected || self.unanswered_kills.contains_key(&version);
        let outcome = match outcome {
            CommandOutcome::Refused(_) if moontide_rt::mutation_enabled("refused-copy-believed") => {
                CommandOutcome::Done
            }
            outcome => outcome,
        };
        // A segment of this node has reported the stripe in the meantime.
        let is_there = object.is_some_and(|at| {
            let record = *self.slab.get(at);
            let replaced = replaces.and_then(|replaced| self.position_of(&record, replaced));
            self.has_stripe_in_memory(&record, stripe.into(), index, replaced)
        });
        let (CommandOutcome::Done, Some(at), false) = (outcome, object, killed || is_there) else {
            self.segment_mut(index).fill_answered(slot);
            self.push_command(CommandKind::Reclaim, index, slot, epoch, drain.id, effects);
            return None;
        };
        let record = *self.slab.get(at);
        let stripes = self.stripes(&record);
        let rows = self.location_count(&record) / stripes;
        let stripe = usize::from(stripe);
        let of_row = |row: usize| self.location(&record, row * stripes + stripe);
        let replaced = replaces.and_then(|replaced| self.position_of(&record, replaced));
        let vacant = (0..rows).find(|&row| of_row(row).is_lost()).map(|row| row * stripes + stripe);
        self.unconfirmed_kills.remove(&(drain.id, version));
        let location = self.segment_mut(index).reattach(index, slot, at);
        if let Some(position) = replaced {
            // One-sided readers may rely on it for as long as their lease lasts.
            let leased = Some(self.leased_until(&record)).filter(|&until| {
                until > Tick(0) && !moontide_rt::mutation_enabled("lease-of-moved-record-ignored")
            });
            self.release_location(at, position, leased, effects);
        } else if vacant.is_none() {
            self.extension_mut(at).locations.extend(std::iter::repeat_n(SlotLocation::LOST, stripes));
        }
        let position = replaced.or(vacant).unwrap_or(rows * stripes + stripe);
        self.set_location(at, position, location);
        self.charge_location(at, location);
        self.stripe_returned(at);
        self.locations_changed(at);
        Some(at)
    }

    // --------------------------------------------------------------------------------------------- state

    /// Moves an object to the right queue after its locations changed, and drops an unnecessary extension.
    pub(super) fn locations_changed(&mut self, at: RecordRef) {
        let record = *self.slab.get(at);
        if record.has(RecordFlag::Writing) {
            return;
        }
        let in_memory = (0..self.location_count(&record)).any(|position| {
            let location = self.location(&record, position);
            !location.is_lost() && !self.segment(location.segment).is_disk()
        });
        if record.has(RecordFlag::OnDisk) == in_memory {
            self.dequeue(at);
            let changed = self.slab.get_mut(at);
            changed.set(RecordFlag::OnDisk, !in_memory);
            changed.set(RecordFlag::Visited, false);
            changed.set(RecordFlag::Offloading, false);
            self.end_offload(record.id());
            self.enqueue(at);
        }
        self.compact_locations(at);
    }

    /// Moves the remaining locations of an object of one stripe to the front, and removes its extension if it is no
    /// longer needed.
    fn compact_locations(&mut self, at: RecordRef) {
        let record = *self.slab.get(at);
        let Some(extension) = self.extensions.get(record.extension) else { return };
        if extension.stripes != 1 || extension.locations.is_empty() {
            return;
        }
        let all = std::iter::once(record.location()).chain(extension.locations.iter().copied());
        let locations: Vec<SlotLocation> = all.filter(|location| !location.is_lost()).collect();
        let Some((&first, others)) = locations.split_first() else { return };
        let plain = extension.expires.is_none()
            && extension.cohort == NONE
            && extension.parent.is_none()
            && extension.extra_replicas == 0
            && extension.spread.is_none()
            && extension.disk_replicas == 0;
        if plain && others.is_empty() {
            self.extensions.remove(record.extension);
            self.slab.get_mut(at).extension = NONE;
        } else {
            let extension = self.extensions.get_mut(record.extension).expect("extension exists");
            extension.locations = others.to_vec();
            extension.committed = vec![];
        }
        self.slab.get_mut(at).set_location(first);
    }

    /// Units of memory of an object.
    fn memory_units(&self, record: &Record) -> u64 {
        let locations = (0..self.location_count(record)).map(|position| self.location(record, position));
        let present = locations.filter(|location| !location.is_lost());
        present.map(|location| u64::from(self.segment(location.segment).extent(location.block).units)).sum()
    }

    /// Returns the disk of the node that has a memory location, if it accepts more records.
    fn accepting_disk_of(&self, location: SlotLocation) -> Option<u32> {
        let segment = self.segment(location.segment);
        if segment.medium != Medium::Memory {
            return None;
        }
        let &disk = self.by_name.get(&(segment.node, SegmentId::DISK))?;
        let disk_segment = self.segment(disk);
        (disk_segment.phase == SegmentPhase::Serving && disk_segment.accepts_offloads).then_some(disk)
    }

    /// Whether the node of a memory segment has a disk, in any state.
    pub(super) fn node_has_disk(&self, segment: u32) -> bool {
        let segment = self.segment(segment);
        segment.medium == Medium::Memory && self.by_name.contains_key(&(segment.node, SegmentId::DISK))
    }

    fn disk_of(&self, node: NodeId, session: SessionId) -> Result<u32, ErrorCode> {
        let &index = self.by_name.get(&(node, SegmentId::DISK)).ok_or(ErrorCode::NotFound)?;
        if self.segment(index).session == session { Ok(index) } else { Err(ErrorCode::StaleSession) }
    }

    /// Returns the index of the stripe's location on this disk.
    fn disk_location_of(&self, at: RecordRef, disk: u32, stripe: u16) -> Option<usize> {
        let record = self.slab.get(at);
        let stripes = self.stripes(record);
        (usize::from(stripe)..self.location_count(record))
            .step_by(stripes)
            .find(|&position| self.location(record, position).segment == disk)
    }

    /// Keeps a tombstone of a version that is permanently dropped, because an absent disk may return with it.
    pub(super) fn keep_disk_tombstone(&mut self, id: ObjectId, epoch: Epoch, now: Now) {
        if !self.disks_may_return(now) {
            return;
        }
        if self.tombstones.len() >= DISK_TOMBSTONES_MAX && !self.tombstones.contains_key(&id) {
            self.absent_disks.clear();
            self.disk_reports_until = MonoTime(0);
            self.need_exclusion();
            return;
        }
        let removed = self.tombstones.entry(id).or_insert(epoch);
        *removed = epoch.max(*removed);
    }

    /// Whether a returned disk still reports, or is stale and still has records that it was commanded to drop.
    pub(super) fn disks_are_returning(&self) -> bool {
        let returning = |segment: &Segment| {
            let dropping = segment.is_stale && segment.reported_drains > 0;
            segment.is_disk() && (segment.phase == SegmentPhase::Reporting || dropping)
        };
        self.segments.iter().flatten().any(returning)
    }

    /// Whether a disk may return with versions that were removed or dropped in the meantime.
    pub(super) fn disks_may_return(&self, now: Now) -> bool {
        let first_term = self.config.previous_term == Term::ZERO;
        let reporting = |segment: &Segment| segment.is_disk() && segment.phase == SegmentPhase::Reporting;
        !self.absent_disks.is_empty()
            || (!first_term && now.mono < self.disk_reports_until)
            || self.segments.iter().flatten().any(reporting)
    }
}
