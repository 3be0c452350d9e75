//! Rebuilding from what nodes report: headers on the nodes are the truth.
//!
//! A reported record is served at once. Space is given out in a segment only when its report is complete, because
//! only then is it known what is free.
//!
//! | there is | reported | the outcome |
//! |---|---|---|
//! | nothing | READY, all of the object | complete |
//! | nothing | WRITING, or one stripe of several | a reservation with a fresh end; complete when all stripes are READY |
//! | the same version | another place of it | another replica or the missing stripe |
//! | an older version | a complete newer one | the older one is killed |
//! | an older complete version | an incomplete newer one | the newer one is killed |
//! | a newer version | anything older | the older one is killed, unless the newer one is an incomplete rest |
//! | a tombstone, an expiry, a foreign group | anything | killed |

use std::time::Duration;

use moontide_types::bounds::{REPLICAS_MAX, STRIPES_MAX};
use moontide_types::record::{PinClass, object_root};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, NodeId, ObjectId, SegmentId, SlotId, Term, UnixMillis,
};

use super::Group;
use super::view::{StripeView, stripe_of};
use crate::effect::{Effects, OrderKind};
use crate::extra::Extra;
use crate::record::{Flag, NONE, Place, Record};
use crate::segment::{Segment, SegmentPhase, SlotState};
use crate::slab::Ref;
use crate::table::{BATCH, Candidate};
use crate::tenant::TenantIx;
use crate::time::Now;

/// The state of a reported slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportState {
    /// Nobody has it, from this epoch on.
    Free,
    /// Somebody writes it.
    Writing,
    /// It can be read.
    Ready,
    /// It was killed, and somebody may still hold it.
    Dead,
}

/// One slot, as its node reports it. Of a free one only slot and epoch count.
#[derive(Clone, Copy, Debug)]
pub struct ReportRecord<'a> {
    /// The slot.
    pub slot: SlotId,
    /// Its state.
    pub state: ReportState,
    /// Its version.
    pub epoch: Epoch,
    /// The object.
    pub id: ObjectId,
    /// Whose it is.
    pub tenant: TenantIx,
    /// Its key.
    pub key: &'a [u8],
    /// Its length.
    pub object_len: u64,
    /// Which part of it.
    pub stripe: StripeView,
    /// Root of the stripe's digests.
    pub root: u64,
    /// The slot's extent.
    pub extent: Extent,
    /// Where the payload starts in the segment.
    pub payload_offset: u64,
    /// Without digests.
    pub digestless: bool,
    /// A remote peer had one-sided access.
    pub one_sided: bool,
    /// Read since the node started.
    pub touched: bool,
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// When it expires.
    pub expires: Option<UnixMillis>,
    /// Its cohort.
    pub cohort: Option<&'a [u8]>,
    /// The block before it.
    pub parent: Option<&'a [u8]>,
}

impl ReportRecord<'_> {
    /// Whether this record alone makes a complete object.
    fn is_whole(&self) -> bool {
        self.state == ReportState::Ready && self.stripe.count == 1
    }

    /// The length of every stripe but the last, if the parts agree with each other.
    fn stripe_len(&self) -> Option<u64> {
        let StripeView { index, count, offset, len } = self.stripe;
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

/// Epochs of a term up to here are believed: half of all, which no term ever gives out. A record that claims more would
/// leave none to give.
const SEQUENCE_CREDIBLE: u64 = Epoch::SEQUENCE_MAX / 2;

impl Group {
    /// Takes in some records of a segment's report, snapshot or later changes alike. `first_record` counts the
    /// records of the report: a gap is refused with `Retry`, and the node reports anew.
    #[expect(clippy::too_many_arguments, reason = "the segment's name, generation and term are three facts")]
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

    /// Brings the lines of the table in which the records are looked for, and will be put, into the cache: all misses
    /// at a time instead of one after the other, which is a third of the time at millions of objects.
    fn warm_table(&self, batch: &[ReportRecord<'_>]) {
        let mut ids = [ObjectId([0; 16]); BATCH];
        for (id, record) in ids.iter_mut().zip(batch) {
            *id = record.id;
        }
        let mut candidates = [Candidate::None; BATCH];
        self.table.candidates(&ids[..batch.len()], &mut candidates[..batch.len()]);
        std::hint::black_box(candidates);
    }

    /// The snapshot of a segment is complete: it had so many records. From now on it is known what is free.
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
            return Ok(()); // said before
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
                    let place = Place { segment: index, slot, block };
                    let which = self.place_index(&record, index, slot);
                    self.set_place(at, which, place);
                }
                SlotState::Draining => {
                    let drain = self.segment_mut(index).drains.get_mut(&slot);
                    drain.expect("a draining slot has its drain").block = block;
                }
                SlotState::Free => unreachable!("what is free has left the report"),
            }
        }
        self.segment_mut(index).phase = SegmentPhase::Waiting;
        if self.segment(index).drains.is_empty() {
            self.segment_mut(index).is_late = false;
        }
        self.waiting_segments.push(index);
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
        self.seen_term(term, effects)?;
        if term < self.config.term && !moontide_types::planted("report-of-an-older-term-believed") {
            return Err(ErrorCode::StaleTerm);
        }
        let &index = self.by_name.get(&name).ok_or(ErrorCode::NotFound)?;
        if self.segment(index).generation != generation {
            return Err(ErrorCode::StaleGeneration);
        }
        Ok(index)
    }

    /// A segment that contradicts itself is as good as lost; its node may mount it again.
    fn fail_segment(&mut self, index: u32, now: Now, effects: &mut Effects) {
        let segment = self.segment(index);
        let (name, generation, late) = ((segment.node, segment.id), segment.generation, segment.is_late);
        self.lose_segment(index, now, effects);
        self.miss_segment(name, generation, late, now);
    }

    /// Which of the record's places is this slot.
    pub(super) fn place_index(&self, record: &Record, segment: u32, slot: u32) -> usize {
        (0..self.place_count(record))
            .find(|&index| {
                let place = self.place(record, index);
                (place.segment, place.slot) == (segment, slot)
            })
            .expect("a slot names the record that has it")
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
        self.believe_epoch(new.epoch)?;
        match (self.segment(index).slot(slot), new.state) {
            (SlotState::Free, ReportState::Free) => {}
            (SlotState::Draining, ReportState::Free) => self.place_freed(index, slot, new.epoch, effects),
            (SlotState::Draining, ReportState::Dead) => {
                if self.segment(index).drains.get(&slot).is_some_and(|drain| drain.epoch == new.epoch) {
                    self.killed(index, slot, false, effects);
                }
            }
            (SlotState::Draining, _) => {}
            (SlotState::Object(at), state) => {
                let record = *self.slab.get(at);
                if record.epoch() > new.epoch {
                    return Ok(()); // said before the slot was given out again
                }
                let which = self.place_index(&record, index, slot);
                match state {
                    ReportState::Writing => {}
                    ReportState::Ready if (record.epoch(), record.id()) == (new.epoch, new.id) => {
                        self.committed(at, which, new.root, effects);
                    }
                    ReportState::Ready => {} // of something that we never gave out there
                    ReportState::Dead => {
                        // No new reader gets it, but a one-sided one may be reading.
                        let leased = self.lease_of(&record, now);
                        self.give_up_place(at, which, leased, effects);
                        self.end_if_incomplete(at, true, now, effects);
                    }
                    ReportState::Free => {
                        self.give_up_place(at, which, None, effects);
                        self.place_freed(index, slot, new.epoch, effects);
                        self.end_if_incomplete(at, true, now, effects);
                    }
                }
            }
            (SlotState::Free, _) if self.segment(index).phase != SegmentPhase::Reporting => {
                // The node has something where we know of nothing. It is not ours: away with it.
                self.stats.reported_killed += 1;
                self.order(OrderKind::Reclaim, index, slot, new.epoch, new.id, effects);
            }
            (SlotState::Free, _) if self.segment(index).was_freed(slot, new.epoch) => {}
            (SlotState::Free, _) => return self.report_new(now, index, new, effects),
        }
        Ok(())
    }

    /// An epoch that a node knows is never given out again, even if it knows more of this term than we do.
    pub(super) fn believe_epoch(&mut self, epoch: Epoch) -> Result<(), ErrorCode> {
        if epoch.term() > self.config.term || epoch.sequence() > SEQUENCE_CREDIBLE {
            return Err(ErrorCode::OutOfBounds);
        }
        if epoch.term() == self.config.term {
            self.sequence = self.sequence.max(epoch.sequence());
        }
        Ok(())
    }

    /// A record of which nothing is known here yet.
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
                return Err(ErrorCode::Overlap); // more than there is: some of it was reported twice
            }
        }
        let stripe_len = new.stripe_len();
        let welcome = new.state != ReportState::Dead
            && stripe_len.is_some()
            && new.payload_offset == new.extent.span().offset()
            && new.id.group(self.config.groups) == self.config.group
            && !new.key.is_empty()
            && new.key.len() <= moontide_types::bounds::KEY_BYTES_MAX
            && new.expires.is_none_or(|at| at > now.unix)
            && (self.tombstones.get(&new.id).is_none_or(|&removed| new.epoch > removed)
                || moontide_types::planted("removed-reported-and-believed"))
            && (self.segment(index).is_disk() || !self.segment(index).is_late);
        let Some(stripe_len) = stripe_len.filter(|_| welcome) else {
            self.report_unwelcome(index, new, effects);
            return Ok(());
        };
        let Some(at) = self.find_id(new.id) else {
            return self.report_first(now, index, new, stripe_len, effects);
        };
        let (record, key) = self.slab.with_key(at);
        let (record, same_key) = (*record, key == new.key);
        let incomplete = record.has(Flag::Writing);
        // A reservation that was made here is a put in progress; one that a report brought is what is left of one.
        let rest = incomplete && record.has(Flag::Reported);
        if !same_key || record.object_len() != new.object_len {
            let wins = same_key && new.epoch > record.epoch() && (new.is_whole() || rest);
            return self.report_other_version(now, index, new, stripe_len, at, wins, effects);
        }
        if record.epoch() == new.epoch {
            let joins = if incomplete { rest } else { new.state == ReportState::Ready };
            if joins && self.report_joins(index, new, stripe_len, at, effects) {
                return Ok(());
            }
            self.report_unwelcome(index, new, effects);
            return Ok(());
        }
        let newer = (new.epoch > record.epoch()) != moontide_types::planted("older-version-wins");
        let wins = if newer { new.is_whole() || rest } else { rest && new.is_whole() };
        self.report_other_version(now, index, new, stripe_len, at, wins, effects)
    }

    #[expect(clippy::too_many_arguments, reason = "one step of report_new, which has them all")]
    fn report_other_version(
        &mut self,
        now: Now,
        index: u32,
        new: &ReportRecord<'_>,
        stripe_len: u64,
        at: Ref,
        wins: bool,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        if !wins {
            self.report_unwelcome(index, new, effects);
            return Ok(());
        }
        let mark = self.departed();
        self.drop_object(at, now, effects);
        self.stats.reported_killed += 1;
        self.report_first(now, index, new, stripe_len, effects)?;
        if new.is_whole() {
            self.stays(new.id, mark);
        }
        Ok(())
    }

    /// What nobody wants drains.
    pub(super) fn report_unwelcome(&mut self, index: u32, new: &ReportRecord<'_>, effects: &mut Effects) {
        let segment = self.segment_mut(index);
        let place = segment.report(index, new.slot.0, new.extent, false);
        segment.drain(place, new.epoch, new.id, false);
        if new.state != ReportState::Dead {
            self.undead.insert((new.id, index, new.slot.0));
        }
        self.stats.reported_killed += 1;
        self.order(OrderKind::Reclaim, index, new.slot.0, new.epoch, new.id, effects);
    }

    /// The first place of an object.
    fn report_first(
        &mut self,
        now: Now,
        index: u32,
        new: &ReportRecord<'_>,
        stripe_len: u64,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let whole = new.is_whole();
        let place = self.segment_mut(index).report(index, new.slot.0, new.extent, whole);
        let mut record = Record::new(new.id, new.epoch, new.tenant, new.key.len(), new.object_len);
        record.set(Flag::Reported, true);
        record.set(Flag::Writing, !whole);
        record.set(Flag::Visited, new.touched);
        record.set(Flag::OnDisk, whole && self.segment(index).is_disk());
        record.set(Flag::Digestless, new.digestless);
        record.set_pin(self.heirloom_reported(new.id, new.epoch).unwrap_or(new.pin));
        if whole {
            record.root = new.root;
        } else {
            record.set_until(self.ticker.end(now.mono, self.rest_window()));
        }
        let (stripe, stripes) = (usize::from(new.stripe.index), usize::from(new.stripe.count));
        let mut places = vec![Place::LOST; stripes];
        places[stripe] = place;
        record.set_place(places[0]);
        if stripes > 1 || new.expires.is_some() || new.cohort.is_some() || new.parent.is_some() {
            let cohort = new.cohort.map_or(NONE, |label| self.cohorts.join(new.tenant, label, new.id));
            record.extra = self.extras.add(Extra {
                stripes: new.stripe.count,
                stripe_len,
                places: places[1..].to_vec(),
                committed: vec![],
                stripe_roots: if stripes > 1 { vec![0; stripes] } else { vec![] },
                expires: new.expires,
                cohort,
                parent: new.parent.map(Into::into),
            });
        }
        let at = self.add_object(&record, new.key)?;
        if !whole && new.state == ReportState::Ready {
            self.committed(at, stripe, new.root, effects);
        }
        Ok(())
    }

    /// Another place of a version that is there; false if it has no use for it.
    fn report_joins(
        &mut self,
        index: u32,
        new: &ReportRecord<'_>,
        stripe_len: u64,
        at: Ref,
        effects: &mut Effects,
    ) -> bool {
        let record = *self.slab.get(at);
        let (stripe, stripes) = (usize::from(new.stripe.index), usize::from(new.stripe.count));
        let extra = self.extras.get(record.extra);
        let as_cut = extra.map_or((1, record.object_len()), |extra| (extra.stripes.into(), extra.stripe_len));
        if as_cut != (stripes, stripe_len) {
            return false;
        }
        let root_known =
            if stripes > 1 { extra.map_or(0, |extra| extra.stripe_roots[stripe]) } else { record.root };
        let complete = !record.has(Flag::Writing);
        if complete && root_known != new.root {
            return false; // the same version with other bytes is no replica
        }
        let rows = self.place_count(&record) / stripes;
        // A place on a segment that is gone may be taken; the sweep has only not come by yet.
        let vacant = |row: &usize| !self.is_readable(self.place(&record, row * stripes + stripe));
        // Rather its own place of before: a replica whose stripes come from two is lost with either.
        let name = |segment: &Segment| (segment.node, segment.id);
        let own = |row: &usize| {
            let place = self.place(&record, row * stripes + stripe);
            !place.is_lost()
                && place.slot == new.slot.0
                && name(self.segment(place.segment)) == name(self.segment(index))
        };
        let row = (0..rows).filter(vacant).find(own).or((0..rows).find(vacant)).unwrap_or(rows);
        // An object with all replicas that it may have in memory can be on as many disks, too.
        let rows_max = if self.segment(index).is_disk() { 2 * REPLICAS_MAX } else { REPLICAS_MAX };
        if row >= rows_max {
            return false;
        }
        if row == rows {
            self.extra_mut(at).places.extend(std::iter::repeat_n(Place::LOST, stripes));
        }
        let which = row * stripes + stripe;
        // Of the old place nothing remains but the books of its lost segment.
        self.give_up_place(at, which, None, &mut vec![]);
        let place = self.segment_mut(index).report(index, new.slot.0, new.extent, complete);
        self.set_place(at, which, place);
        self.count_place(at, place);
        self.slab.get_mut(at).set(Flag::Reported, true);
        if complete {
            self.places_changed(at);
        } else {
            self.set_committed(at, which, false);
            if new.state == ReportState::Ready {
                self.committed(at, which, new.root, effects);
            }
        }
        true
    }

    /// A node has published one place. What a report left of a put is complete when all stripes are; a put in
    /// progress waits for its writer to say so.
    fn committed(&mut self, at: Ref, which: usize, root: u64, effects: &mut Effects) {
        let record = *self.slab.get(at);
        if !record.has(Flag::Writing) {
            return;
        }
        self.set_committed(at, which, true);
        if !record.has(Flag::Reported) {
            return;
        }
        let stripes = self.stripes(&record);
        if stripes > 1 {
            self.extra_mut(at).stripe_roots[which % stripes] = root;
        }
        let is_published = |group: &Group, record: &Record, index: usize| {
            group.is_committed(record, index) && group.is_readable(group.place(record, index))
        };
        let record = *self.slab.get(at);
        let rows = self.place_count(&record) / stripes;
        let has_stripe = |stripe| (0..rows).any(|row| is_published(self, &record, row * stripes + stripe));
        if !(0..stripes).all(has_stripe) {
            return;
        }
        // Whoever reads a complete object is sent to all of its places: what is still being written must go.
        for index in 0..self.place_count(&record) {
            if !is_published(self, &record, index) {
                self.give_up_place(at, index, None, effects);
            }
        }
        let roots = self.extras.get(record.extra).map(|extra| extra.stripe_roots.clone());
        let root = match roots {
            Some(roots) if stripes > 1 => {
                object_root(record.id(), record.epoch(), record.object_len(), &roots)
            }
            _ => root,
        };
        self.complete_object(at, root);
        self.places_changed(at);
    }

    fn set_committed(&mut self, at: Ref, which: usize, on: bool) {
        if which == 0 {
            self.slab.get_mut(at).set(Flag::Committed, on);
            return;
        }
        let extra = self.extra_mut(at);
        if extra.committed.len() <= which {
            extra.committed.resize(which + 1, false);
        }
        extra.committed[which] = on;
    }

    /// How long the rest of an object, or the end of its put, may take to arrive: as long as a put.
    fn rest_window(&self) -> Duration {
        self.config.reservation
    }
}
