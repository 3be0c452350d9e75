//! Rebuilding from reports of nodes: the headers on the nodes are authoritative.
//!
//! A reported record is served immediately. The group allocates space in a segment only when its report is complete,
//! because only then the free space is known.
//!
//! | in the index | reported | result |
//! |---|---|---|
//! | nothing | READY, all of the object | complete |
//! | nothing | one stripe of several, on a disk | complete, and found by readers when all stripes are there |
//! | nothing | WRITING, or one stripe of several in memory | a reservation with a new end; complete when all stripes are READY |
//! | the same version | another location of it | another replica or the missing stripe |
//! | an older version | a complete newer one, or one on a disk | the older one is killed |
//! | an older complete version | an incomplete newer one in memory | the newer one is killed |
//! | an older version with missing stripes | anything newer | the older one is killed |
//! | a newer version | anything older | the older one is killed, unless the newer one is an incomplete remainder |
//! | a tombstone, an expiry, a foreign group | anything | killed |

use std::time::Duration;

use moontide_types::limits::{REPLICAS_MAX, STRIPES_MAX};
use moontide_types::record::{PinClass, object_root};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, NodeId, ObjectId, SegmentId, SlotId, Spread, Term, UnixMillis,
};

use super::view::{StripeRange, stripe_of};
use super::{Group, LocationVersion};
use crate::effect::{CommandKind, Effects};
use crate::ids::{NONE, RecordRef, TenantIndex};
use crate::record::{Record, RecordFlag, SlotLocation};
use crate::record_extension::RecordExtension;
use crate::segment::{Segment, SegmentPhase, SlotState};
use crate::table::{BATCH, ProbeResult};
use crate::time::Now;

/// State of a reported slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportState {
    /// Free from this epoch on.
    Free,
    /// A writer is filling it.
    Writing,
    /// Readable.
    Ready,
    /// Killed; a reader may still hold it.
    Dead,
}

/// One slot, as its node reports it. For a free slot only `slot` and `epoch` are valid.
#[derive(Clone, Copy, Debug)]
pub struct ReportRecord<'a> {
    /// Slot in the segment.
    pub slot: SlotId,
    /// State of the slot.
    pub state: ReportState,
    /// Version.
    pub epoch: Epoch,
    /// Id of the object.
    pub id: ObjectId,
    /// Tenant that owns the object.
    pub tenant: TenantIndex,
    /// Key of the object.
    pub key: &'a [u8],
    /// Length of the object in bytes.
    pub object_len: u64,
    /// Position of the stripe in the object.
    pub stripe: StripeRange,
    /// Root of the stripe's digests.
    pub root: u64,
    /// Extent of the slot.
    pub extent: Extent,
    /// Offset of the payload in the segment, in bytes.
    pub payload_offset: u64,
    /// The record has no digests.
    pub digestless: bool,
    /// A remote peer had one-sided access.
    pub one_sided: bool,
    /// Read since the node started; of a record on disk: in memory when the node was stopped.
    pub touched: bool,
    /// Resistance to eviction.
    pub pin: PinClass,
    /// Time at which the object expires.
    pub expires: Option<UnixMillis>,
    /// Label of the cohort.
    pub cohort: Option<&'a [u8]>,
    /// Hash of the preceding block.
    pub parent: Option<&'a [u8]>,
    /// Replicas that the writer asked for, besides the first.
    pub extra_replicas: u8,
    /// What the replicas must not share, besides their node.
    pub spread: Option<Spread>,
    /// Disks that shall have the object, besides memory.
    pub disk_replicas: u8,
}

impl ReportRecord<'_> {
    /// Whether this record alone is a complete object.
    fn is_complete_object(&self) -> bool {
        self.state == ReportState::Ready && self.stripe.count == 1
    }

    /// Returns the length of every stripe but the last, if the fields are consistent.
    fn stripe_len(&self) -> Option<u64> {
        let StripeRange { index, count, offset, len } = self.stripe;
        let (index, count) = (usize::from(index), usize::from(count));
        if index >= count || count > STRIPES_MAX {
            return None;
        }
        let stripe_len = if index + 1 < count || count == 1 { len } else { offset / index as u64 };
        let fits = (count as u64 - 1).checked_mul(stripe_len)? <= self.object_len
            && (count as u64).checked_mul(stripe_len)? >= self.object_len
            && index as u64 * stripe_len == offset
            && stripe_of(self.object_len, stripe_len, index, count).len == len;
        fits.then_some(stripe_len)
    }
}

/// Largest sequence number of a term that is trusted: half of all, which no term ever uses up. A record with a larger
/// one would leave none to grant.
const SEQUENCE_TRUSTED_MAX: u64 = Epoch::SEQUENCE_MAX / 2;

impl Group {
    /// Adds records of a segment's report, from the snapshot or from later deltas. `first_record` counts the records of
    /// the report: a gap is refused with `Retry`, and the node restarts the report.
    #[expect(clippy::too_many_arguments, reason = "segment name, generation and term are independent")]
    pub fn report<'a>(
        &mut self,
        now: Now,
        (node, segment): (NodeId, SegmentId),
        generation: Generation,
        term: Term,
        first_record: u64,
        records: impl IntoIterator<Item = ReportRecord<'a>>,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let index = self.reporting_segment((node, segment), generation, term, effects)?;
        if self.segment(index).reported_records != first_record {
            return Err(ErrorCode::Retry);
        }
        let mut records = records.into_iter();
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            batch.clear();
            batch.extend(records.by_ref().take(BATCH));
            if batch.is_empty() {
                return Ok(());
            }
            self.warm_table(&batch);
            for record in &batch {
                self.segment_mut(index).reported_records += 1;
                self.stats.reported += 1;
                if let Err(code) = self.report_one(now, index, record, effects) {
                    self.fail_segment(index, now, effects);
                    return Err(code);
                }
            }
        }
    }

    /// Loads the table lines for the lookup and insertion of the records into the cache: all misses overlap, which
    /// takes a third of the time at millions of objects.
    fn warm_table(&self, batch: &[ReportRecord<'_>]) {
        let mut ids = [ObjectId([0; 16]); BATCH];
        for (id, record) in ids.iter_mut().zip(batch) {
            *id = record.id;
        }
        let mut candidates = [ProbeResult::None; BATCH];
        self.table.candidates(&ids[..batch.len()], &mut candidates[..batch.len()]);
        std::hint::black_box(candidates);
    }

    /// Ends the snapshot of a segment, which had `records` records. From now on the free space is known.
    pub fn report_end(
        &mut self,
        now: Now,
        (node, segment): (NodeId, SegmentId),
        generation: Generation,
        term: Term,
        records: u64,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let index = self.reporting_segment((node, segment), generation, term, effects)?;
        if self.segment(index).phase != SegmentPhase::Reporting {
            return Ok(()); // repeated
        }
        if self.segment(index).reported_records < records {
            return Err(ErrorCode::Retry);
        }
        let Ok(blocks) = self.segment_mut(index).rebuild() else {
            // Two records claim the same units: nothing in this segment can be trusted.
            self.fail_segment(index, now, effects);
            return Err(ErrorCode::Overlap);
        };
        for (slot, block) in blocks {
            match self.segment(index).slot(slot) {
                SlotState::Object(at) => {
                    let record = *self.slab.get(at);
                    let location = SlotLocation { segment: index, slot, block };
                    let position = self.location_index(&record, index, slot);
                    self.set_location(at, position, location);
                }
                SlotState::Draining => {
                    let drain = self.segment_mut(index).drains.get_mut(&slot);
                    drain.expect("draining slot has a drain").block = block;
                }
                SlotState::Free => unreachable!("free slots are not in the report"),
            }
        }
        self.segment_mut(index).phase = SegmentPhase::Quarantined;
        if self.segment(index).drains.is_empty() {
            self.segment_mut(index).is_stale = false;
        }
        self.quarantined_segments.push(index);
        self.activate_segments(now);
        Ok(())
    }

    fn reporting_segment(
        &mut self,
        name: (NodeId, SegmentId),
        generation: Generation,
        term: Term,
        effects: &mut Effects,
    ) -> Result<u32, ErrorCode> {
        self.observe_term(term, effects)?;
        if term < self.config.term && !moontide_rt::mutation_enabled("report-of-an-older-term-believed") {
            return Err(ErrorCode::StaleTerm);
        }
        let &index = self.by_name.get(&name).ok_or(ErrorCode::NotFound)?;
        if self.segment(index).generation != generation {
            return Err(ErrorCode::StaleGeneration);
        }
        Ok(index)
    }

    /// Drops a segment with a contradictory report; its node may mount it again.
    fn fail_segment(&mut self, index: u32, now: Now, effects: &mut Effects) {
        let segment = self.segment(index);
        let (name, generation, stale) = ((segment.node, segment.id), segment.generation, segment.is_stale);
        self.lose_segment(index, now, effects);
        self.mark_segment_absent(name, generation, stale, now);
    }

    /// Returns the index of the record's location in this slot.
    pub(super) fn location_index(&self, record: &Record, segment: u32, slot: u32) -> usize {
        (0..self.location_count(record))
            .find(|&index| {
                let location = self.location(record, index);
                (location.segment, location.slot) == (segment, slot)
            })
            .expect("record of a slot has a location there")
    }

    fn report_one(
        &mut self,
        now: Now,
        index: u32,
        new: &ReportRecord<'_>,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let slot = new.slot.0;
        if slot >= self.segment(index).slot_count() {
            return Err(ErrorCode::OutOfBounds);
        }
        self.observe_epoch(new.epoch)?;
        match (self.segment(index).slot(slot), new.state) {
            (SlotState::Free, ReportState::Free) => {}
            (SlotState::Draining, _) if self.is_filled(index, slot) => {}
            (SlotState::Draining, ReportState::Free) => self.slot_freed(index, slot, new.epoch, effects),
            (SlotState::Draining, ReportState::Dead) => {
                if self.segment(index).drains.get(&slot).is_some_and(|drain| drain.epoch == new.epoch) {
                    self.found_dead(index, slot, new.epoch, false, effects);
                }
            }
            (SlotState::Draining, _) => {}
            (SlotState::Object(at), state) => {
                let record = *self.slab.get(at);
                if record.epoch() > new.epoch {
                    return Ok(()); // sent before the slot was allocated again
                }
                let position = self.location_index(&record, index, slot);
                match state {
                    ReportState::Writing => {}
                    ReportState::Ready if (record.epoch(), record.id()) == (new.epoch, new.id) => {
                        self.committed(at, position, new.root, effects);
                    }
                    ReportState::Ready => {} // a version that was never granted there
                    ReportState::Dead => {
                        // New readers do not get it, but a one-sided reader may be reading.
                        let leased = self.lease_of(&record, now);
                        self.release_location(at, position, leased, effects);
                        self.end_unless_stripe_remains(at, position, true, now, effects);
                    }
                    ReportState::Free => {
                        self.release_location(at, position, None, effects);
                        self.slot_freed(index, slot, new.epoch, effects);
                        self.end_unless_stripe_remains(at, position, true, now, effects);
                    }
                }
            }
            (SlotState::Free, _) if self.segment(index).phase != SegmentPhase::Reporting => {
                // The node has a record in a slot that is free here. It does not belong to this group's state: reclaim
                // it.
                self.stats.reported_killed += 1;
                self.push_command(CommandKind::Reclaim, index, slot, new.epoch, new.id, effects);
            }
            (SlotState::Free, _) if self.segment(index).was_freed(slot, new.epoch) => {}
            (SlotState::Free, _) => return self.report_new(now, index, new, effects),
        }
        Ok(())
    }

    /// Whether a command fills the slot, whose answer will tell what is there.
    fn is_filled(&self, index: u32, slot: u32) -> bool {
        self.segment(index).drains.get(&slot).is_some_and(|drain| drain.is_filled)
            && !moontide_rt::mutation_enabled("late-report-frees-copy")
    }

    /// Ensures that an epoch known to a node is never granted again, even if the node knows more of this term than this
    /// master.
    pub(super) fn observe_epoch(&mut self, epoch: Epoch) -> Result<(), ErrorCode> {
        if epoch.term() > self.config.term || epoch.sequence() > SEQUENCE_TRUSTED_MAX {
            return Err(ErrorCode::OutOfBounds);
        }
        if epoch.term() == self.config.term {
            self.sequence = self.sequence.max(epoch.sequence());
        }
        Ok(())
    }

    /// Handles a reported record that is not in the segment's slot table yet.
    pub(super) fn report_new(
        &mut self,
        now: Now,
        index: u32,
        new: &ReportRecord<'_>,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let segment = self.segment_mut(index);
        segment.one_sided |= new.one_sided;
        if !segment.is_disk() {
            if new.extent.units == 0 || new.extent.end() > u64::from(segment.units) {
                return Err(ErrorCode::OutOfBounds);
            }
            if new.extent.units > segment.free_units() {
                return Err(ErrorCode::Overlap); // exceeds the free units: some were reported twice
            }
        }
        let stripe_len = new.stripe_len();
        let acceptable = new.state != ReportState::Dead
            && stripe_len.is_some()
            && new.payload_offset == new.extent.span().offset()
            && new.id.group(self.config.groups) == self.config.group
            && !new.key.is_empty()
            && new.key.len() <= moontide_types::limits::KEY_BYTES_MAX
            && new.expires.is_none_or(|at| at > now.unix)
            && (self.tombstones.get(&new.id).is_none_or(|&removed| new.epoch > removed)
                || moontide_rt::mutation_enabled("removed-reported-and-believed"))
            && (self.segment(index).is_disk() || !self.segment(index).is_stale);
        let Some(stripe_len) = stripe_len.filter(|_| acceptable) else {
            self.reject_reported(index, new, effects);
            return Ok(());
        };
        let Some(at) = self.find_id(new.id) else {
            return self.report_first(now, index, new, stripe_len, effects);
        };
        let (record, key) = self.slab.with_key(at);
        let (record, same_key) = (*record, key == new.key);
        let incomplete = record.has(RecordFlag::Writing);
        let (was_complete, lacks_stripes) = (self.proves_completion(index, new), self.lacks_stripes(&record));
        // A reservation made by this master is a put in progress; a reported one is the remainder of a put.
        let remainder = incomplete && record.has(RecordFlag::Reported);
        if !same_key || record.object_len() != new.object_len {
            let replaces =
                same_key && new.epoch > record.epoch() && (was_complete || remainder || lacks_stripes);
            return self.report_other_version(now, index, new, stripe_len, at, replaces, effects);
        }
        if record.epoch() == new.epoch {
            let fits = if incomplete { remainder } else { new.state == ReportState::Ready };
            if fits && self.add_reported_location(now, index, new, stripe_len, at, effects) {
                return Ok(());
            }
            self.reject_reported(index, new, effects);
            return Ok(());
        }
        let newer = (new.epoch > record.epoch()) != moontide_rt::mutation_enabled("older-version-wins");
        // The put of a newer version has replaced an older one, whether it ended or not. So an object with missing stripes
        // does not keep out a newer version, and a single stripe does not replace one.
        let replaces = if newer {
            was_complete || remainder || lacks_stripes
        } else {
            remainder && new.is_complete_object()
        };
        self.report_other_version(now, index, new, stripe_len, at, replaces, effects)
    }

    #[expect(clippy::too_many_arguments, reason = "one step of report_new, which has all of them")]
    fn report_other_version(
        &mut self,
        now: Now,
        index: u32,
        new: &ReportRecord<'_>,
        stripe_len: u64,
        at: RecordRef,
        replaces: bool,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        if !replaces {
            self.reject_reported(index, new, effects);
            return Ok(());
        }
        let mark = self.invalidation_count();
        self.drop_object(at, now, effects);
        self.stats.reported_killed += 1;
        self.report_first(now, index, new, stripe_len, effects)?;
        if new.is_complete_object() {
            self.retract_invalidation(new.id, mark);
        }
        Ok(())
    }

    /// Lets an unneeded record drain.
    pub(super) fn reject_reported(&mut self, index: u32, new: &ReportRecord<'_>, effects: &mut Effects) {
        let lives = self.find_id(new.id).is_some_and(|at| self.slab.get(at).epoch() == new.epoch);
        let may_be_written = lives && self.node_has_disk(index);
        let segment = self.segment_mut(index);
        let location = segment.report(index, new.slot.0, new.extent, false);
        segment.drain_reported(location, new.epoch, new.id);
        if may_be_written {
            segment.may_be_written(new.slot.0);
        }
        if new.state != ReportState::Dead {
            let version = LocationVersion { segment: index, slot: new.slot.0, epoch: new.epoch };
            self.unconfirmed_kills.insert((new.id, version));
        }
        self.stats.reported_killed += 1;
        self.push_command(CommandKind::Reclaim, index, new.slot.0, new.epoch, new.id, effects);
    }

    /// Adds the first location of an object.
    fn report_first(
        &mut self,
        now: Now,
        index: u32,
        new: &ReportRecord<'_>,
        stripe_len: u64,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let complete = self.proves_completion(index, new);
        let location = self.segment_mut(index).report(index, new.slot.0, new.extent, complete);
        let mut record = Record::new(new.id, new.epoch, new.tenant, new.key.len(), new.object_len);
        record.set(RecordFlag::Reported, true);
        record.set(RecordFlag::Writing, !complete);
        record.set(RecordFlag::Visited, new.touched);
        record.set(RecordFlag::OnDisk, complete && self.segment(index).is_disk());
        record.set(RecordFlag::Digestless, new.digestless);
        record.set_pin(self.confirm_handoff(new.id, new.epoch).unwrap_or(new.pin));
        let (stripe, stripes) = (usize::from(new.stripe.index), usize::from(new.stripe.count));
        if !complete {
            record.set_until(self.ticker.end(now.mono, self.remainder_window()));
        } else if stripes == 1 {
            record.root = new.root;
        }
        let mut locations = vec![SlotLocation::LOST; stripes];
        locations[stripe] = location;
        record.set_location(locations[0]);
        let is_plain = new.expires.is_none()
            && new.cohort.is_none()
            && new.parent.is_none()
            && new.spread.is_none()
            && new.disk_replicas == 0;
        if stripes > 1 || new.extra_replicas > 0 || !is_plain {
            let cohort = new.cohort.map_or(NONE, |label| self.cohorts.join(new.tenant, label, new.id));
            record.extension = self.extensions.add(RecordExtension {
                stripes: new.stripe.count,
                stripe_len,
                locations: locations[1..].to_vec(),
                committed: vec![],
                stripe_roots: if stripes > 1 { vec![0; stripes] } else { vec![] },
                lacks_stripes: false,
                is_awaited: false,
                expires: new.expires,
                cohort,
                parent: new.parent.map(Into::into),
                extra_replicas: new.extra_replicas,
                spread: new.spread,
                disk_replicas: new.disk_replicas,
            });
        }
        let at = self.add_object(&record, new.key)?;
        if complete && !self.segment(index).is_disk() {
            self.note_reported(at);
        }
        if complete && stripes > 1 {
            self.add_stripe_root(at, stripe, new.root);
            self.await_stripes(at, now);
        }
        if !complete && new.state == ReportState::Ready {
            self.committed(at, stripe, new.root, effects);
        }
        Ok(())
    }

    /// Adds another location to an existing version. Returns `false` if the version has no use for it.
    fn add_reported_location(
        &mut self,
        now: Now,
        index: u32,
        new: &ReportRecord<'_>,
        stripe_len: u64,
        at: RecordRef,
        effects: &mut Effects,
    ) -> bool {
        let record = *self.slab.get(at);
        let (stripe, stripes) = (usize::from(new.stripe.index), usize::from(new.stripe.count));
        let extension = self.extensions.get(record.extension);
        let layout = extension
            .map_or((1, record.object_len()), |extension| (extension.stripes.into(), extension.stripe_len));
        if layout != (stripes, stripe_len) {
            return false;
        }
        let complete = !record.has(RecordFlag::Writing);
        let is_replica = match stripes {
            1 => record.root == new.root,
            _ => !complete || self.add_stripe_root(at, stripe, new.root),
        };
        if complete && !is_replica {
            return false; // equal version with different bytes is not a replica
        }
        // It was copied to another segment of this node while the one that reports was away.
        if complete
            && !self.segment(index).is_disk()
            && self.has_stripe_in_memory(&record, stripe, index, None)
        {
            return false;
        }
        let rows = self.location_count(&record) / stripes;
        // A location on a lost segment may be taken; the sweep has not reached it yet.
        let vacant = |row: &usize| !self.is_readable(self.location(&record, row * stripes + stripe));
        // Prefers its own earlier location: a replica whose stripes come from two replicas is lost with either.
        let name = |segment: &Segment| (segment.node, segment.id);
        let own = |row: &usize| {
            let location = self.location(&record, row * stripes + stripe);
            !location.is_lost()
                && location.slot == new.slot.0
                && name(self.segment(location.segment)) == name(self.segment(index))
        };
        let row = (0..rows).filter(vacant).find(own).or((0..rows).find(vacant)).unwrap_or(rows);
        // An object with the maximum number of replicas in memory can be on as many disks, too.
        let rows_max = if self.segment(index).is_disk() { 2 * REPLICAS_MAX } else { REPLICAS_MAX };
        if row >= rows_max {
            return false;
        }
        if row == rows {
            self.extension_mut(at).locations.extend(std::iter::repeat_n(SlotLocation::LOST, stripes));
        }
        let position = row * stripes + stripe;
        // Only the counters of its lost segment still refer to the old location.
        self.release_location(at, position, None, &mut vec![]);
        let location = self.segment_mut(index).report(index, new.slot.0, new.extent, complete);
        self.set_location(at, position, location);
        self.charge_location(at, location);
        self.slab.get_mut(at).set(RecordFlag::Reported, true);
        if complete {
            self.stripe_returned(at);
            self.locations_changed(at);
            self.note_surplus(at, now.mono);
            if new.touched {
                self.slab.get_mut(at).set(RecordFlag::Visited, true);
            }
        } else {
            self.set_committed(at, position, false);
            if new.state == ReportState::Ready {
                self.committed(at, position, new.root, effects);
            }
            if self.slab.get(at).has(RecordFlag::Writing) && self.proves_completion(index, new) {
                self.release_unpublished(at, effects);
                self.complete_object(at, 0);
                self.await_stripes(at, now);
                self.locations_changed(at);
            }
        }
        true
    }

    /// Handles the publication of one location by its node. The remainder of a put is complete when all stripes are
    /// published; a put in progress waits for its writer's PutEnd.
    fn committed(&mut self, at: RecordRef, position: usize, root: u64, effects: &mut Effects) {
        let record = *self.slab.get(at);
        if !record.has(RecordFlag::Writing) {
            return;
        }
        self.set_committed(at, position, true);
        if !record.has(RecordFlag::Reported) {
            return;
        }
        let stripes = self.stripes(&record);
        if stripes > 1 {
            self.extension_mut(at).stripe_roots[position % stripes] = root;
        }
        let record = *self.slab.get(at);
        let rows = self.location_count(&record) / stripes;
        let has_stripe = |stripe| (0..rows).any(|row| self.is_published(&record, row * stripes + stripe));
        if !(0..stripes).all(has_stripe) {
            return;
        }
        self.release_unpublished(at, effects);
        let roots = self.extensions.get(record.extension).map(|extension| extension.stripe_roots.clone());
        let root = match roots {
            Some(roots) if stripes > 1 => {
                object_root(record.id(), record.epoch(), record.object_len(), &roots)
            }
            _ => root,
        };
        self.complete_object(at, root);
        self.locations_changed(at);
    }

    fn is_published(&self, record: &Record, index: usize) -> bool {
        self.is_committed(record, index) && self.is_readable(self.location(record, index))
    }

    /// Releases the locations that are still being written. Readers of a complete object may use all of its locations.
    fn release_unpublished(&mut self, at: RecordRef, effects: &mut Effects) {
        let record = *self.slab.get(at);
        for index in 0..self.location_count(&record) {
            if !self.is_published(&record, index) {
                self.release_location(at, index, None, effects);
            }
        }
    }

    /// Whether a reported record proves that its object was complete: it is all of the object, or it is on a disk.
    fn proves_completion(&self, index: u32, new: &ReportRecord<'_>) -> bool {
        new.is_complete_object() || (new.state == ReportState::Ready && self.segment(index).is_disk())
    }

    fn set_committed(&mut self, at: RecordRef, position: usize, on: bool) {
        if position == 0 {
            self.slab.get_mut(at).set(RecordFlag::Committed, on);
            return;
        }
        let extension = self.extension_mut(at);
        if extension.committed.len() <= position {
            extension.committed.resize(position + 1, false);
        }
        extension.committed[position] = on;
    }

    /// Time limit for the other records of an object, or for the end of its put: that of a put.
    fn remainder_window(&self) -> Duration {
        self.config.reservation
    }
}
