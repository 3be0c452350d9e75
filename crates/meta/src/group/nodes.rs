//! The nodes' side: segments come, go and drain; readers' marks arrive.

use std::time::Duration;

use moontide_types::bounds::{LOCAL_STALE_MS, SEGMENT_UNITS_MAX};
use moontide_types::record::PinClass;
use moontide_types::{ErrorCode, Generation, NodeId, SegmentId, SessionId, Tenant, Term};

use super::{Absence, Group, Node};
use crate::effect::Effects;
use crate::placement::{Candidate, Topology};
use crate::record::Flag;
use crate::segment::{Medium, SLOTS_MAX, Segment, SegmentPhase, Shape, SlotState};
use crate::slab::Ref;
use crate::time::Now;

/// A segment as its node offers it.
#[derive(Clone, Copy, Debug)]
pub struct MountSpec<'a> {
    /// The node.
    pub node: NodeId,
    /// Its session.
    pub session: SessionId,
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// What it is made of.
    pub medium: Medium,
    /// Its size.
    pub units: u32,
    /// Its header slots.
    pub slots: u32,
    /// Labels of where the node stands: host, rack, zone; empty if unknown.
    pub labels: [&'a str; 3],
    /// The only tenant that may use it.
    pub tenant: Option<Tenant<'a>>,
    /// The term it adopted last; zero if none.
    pub term: Term,
    /// Whether it holds records to be reported.
    pub occupied: bool,
    /// The term of the master that last knew of everything in it; zero if none ever did.
    pub known: Term,
    /// How long ago that was.
    pub away: Duration,
    /// Whether peers reach it without asking its node, so that nothing but time ends what they were promised.
    pub one_sided: bool,
}

/// What becomes of an offered segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The node must report what it holds.
    pub report: bool,
    /// Nothing is given out in it before.
    pub usable_in: Duration,
}

/// A segment as the group sees it. `live + reserved + draining + free = units`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// Its node.
    pub node: NodeId,
    /// Its number on the node.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// What it is made of.
    pub medium: Medium,
    /// How far it is.
    pub phase: SegmentPhase,
    /// Its size.
    pub units: u32,
    /// Units of complete objects.
    pub live_units: u32,
    /// Units of objects being written.
    pub reserved_units: u32,
    /// Units that their node has not given back yet.
    pub draining_units: u32,
    /// The rest.
    pub free_units: u32,
    /// Its header slots.
    pub slots: u32,
    /// Slots that are not free.
    pub taken_slots: u32,
}

impl Group {
    /// Takes a segment into use. One of the same name, or of an earlier session of the node, is lost by this.
    pub fn mount(
        &mut self,
        now: Now,
        spec: &MountSpec<'_>,
        effects: &mut Effects,
    ) -> Result<Mount, ErrorCode> {
        self.seen_term(spec.term, effects)?;
        if spec.units == 0
            || spec.slots == 0
            || spec.medium == Medium::Disk
            || spec.segment == SegmentId::DISK
        {
            return Err(ErrorCode::InvalidArgument);
        }
        if spec.units > SEGMENT_UNITS_MAX || spec.slots > SLOTS_MAX {
            return Err(ErrorCode::TooLarge);
        }
        let tenant = spec.tenant.map(|tenant| self.tenants.named(tenant)).transpose()?;
        if self.nodes.get(&spec.node).is_some_and(|node| node.session != spec.session) {
            self.lose_node(spec.node, now, effects);
        }
        if let Some(&earlier) = self.by_name.get(&(spec.node, spec.segment)) {
            let known = self.segment(earlier);
            if (known.session, known.generation) == (spec.session, spec.generation)
                && !moontide_types::planted("mount-said-twice-taken-as-new")
            {
                // Said twice: taken as new, it would be thought empty.
                let usable_in = known.usable_at.since(now.mono);
                return Ok(Mount { report: known.phase == SegmentPhase::Reporting, usable_in });
            }
            self.lose_segment(earlier, now, effects);
        }
        let missed = self.absent.remove(&(spec.node, spec.segment));
        if missed.is_some_and(|absence| absence.generation != spec.generation)
            && !moontide_types::planted("ghost-forgotten")
        {
            // The process before is dead, but processes of its host may take its memory for alive, and read it, until they
            // miss its beat.
            let ghost = Duration::from_millis(u64::from(LOCAL_STALE_MS) * 105 / 100);
            self.settled_at = self.settled_at.max(now.mono.after(ghost));
        }
        let late_before = missed.is_some_and(|absence| absence.late && absence.generation == spec.generation);
        let missed = missed.is_some();
        let topology = self.topology(spec.labels);
        // An earlier master, or this one in an earlier session, may have promised parts of it to somebody. Where the node is
        // asked first it refuses what is late: a lower term, an epoch that has passed, a range that is taken.
        let promised =
            spec.term != Term::ZERO && spec.one_sided && !moontide_types::planted("no-wait-for-old-leases");
        let wait = if promised { self.config.reallocate_wait } else { Duration::ZERO };
        let phase = if spec.occupied { SegmentPhase::Reporting } else { SegmentPhase::Waiting };
        let shape = Shape {
            node: spec.node,
            session: spec.session,
            id: spec.segment,
            generation: spec.generation,
            medium: spec.medium,
            units: spec.units,
            slots: spec.slots,
            topology,
            tenant,
        };
        let mut segment = Segment::new(shape, phase, now.mono.after(wait));
        // Removals have been acknowledged without it: what it holds may be among them. By this master, which does not wait
        // for it any more; or by one before, of which it has not even heard, and which waited as long as we do.
        let skipped = spec.known != Term::ZERO && spec.known < self.config.previous;
        let skipped = skipped && !moontide_types::planted("missed-term-believed");
        segment.is_late = !missed
            && now.mono > self.reports_until
            && !moontide_types::planted("late-segment-believed")
            || skipped && spec.away >= self.config.report_wait / 100 * 99
            || !missed && self.was_given_up(spec, now)
            || !missed && self.all_listed && spec.known != Term::ZERO && spec.known <= self.config.previous
            || late_before;
        let index = self.add_segment(segment, topology);
        if !spec.occupied {
            self.waiting_segments.push(index);
            self.activate_segments(now);
        }
        Ok(Mount { report: spec.occupied, usable_in: wait })
    }

    /// Whether the master before this one, which was at work until it was replaced, had stopped waiting for a segment by then.
    fn was_given_up(&self, spec: &MountSpec<'_>, now: Now) -> bool {
        let away_by_then = spec.away.saturating_sub(now.mono.since(self.began_at));
        self.config.witnessed
            && spec.known == self.config.previous
            && away_by_then >= self.config.absence_max / 100 * 99
            && !moontide_types::planted("given-up-and-believed")
    }

    /// Gives a segment its place in the tables, and its node one if it has none.
    pub(super) fn add_segment(&mut self, segment: Segment, topology: Topology) -> u32 {
        let index = match self.vacant_segments.pop() {
            Some(index) => index,
            None => {
                self.segments.push(None);
                (self.segments.len() - 1) as u32
            }
        };
        self.by_name.insert((segment.node, segment.id), index);
        let new = Node { session: segment.session, topology, segments: vec![] };
        let node = self.nodes.entry(segment.node).or_insert(new);
        node.topology = topology;
        node.segments.push(index);
        self.segments[index as usize] = Some(segment);
        index
    }

    /// Takes a segment out of use. What is in it is gone for the index; the sweep follows in ticks.
    pub fn unmount(
        &mut self,
        now: Now,
        node: NodeId,
        segment: SegmentId,
        effects: &mut Effects,
    ) -> Result<(), ErrorCode> {
        let &index = self.by_name.get(&(node, segment)).ok_or(ErrorCode::NotFound)?;
        self.lose_segment(index, now, effects);
        Ok(())
    }

    /// A node's session has ended. What it has cannot be read any more; if it comes back, it reports.
    pub fn node_lost(&mut self, now: Now, node: NodeId, session: SessionId, effects: &mut Effects) {
        if self.nodes.get(&node).is_none_or(|known| known.session != session) {
            return;
        }
        self.lose_node(node, now, effects);
    }

    /// Lets no new object into a segment. With `evict`, what is in it and not held leaves in the course of ticks.
    pub fn drain(&mut self, node: NodeId, segment: SegmentId, evict: bool) -> Result<(), ErrorCode> {
        let &index = self.by_name.get(&(node, segment)).ok_or(ErrorCode::NotFound)?;
        if self.segment(index).is_disk() {
            return Err(ErrorCode::InvalidArgument); // its node decides what leaves it
        }
        match self.segment(index).phase {
            SegmentPhase::Serving | SegmentPhase::Waiting | SegmentPhase::Draining => {}
            SegmentPhase::Reporting => return Err(ErrorCode::Retry),
            SegmentPhase::Lost => return Err(ErrorCode::Gone),
        }
        self.withdraw(index);
        self.waiting_segments.retain(|&waiting| waiting != index);
        let segment = self.segment_mut(index);
        segment.phase = SegmentPhase::Draining;
        segment.swept = if evict { 0 } else { u32::MAX };
        Ok(())
    }

    /// Slots that were read since the last heartbeat, as bits from `first_slot` on.
    pub fn touched(
        &mut self,
        (node, segment): (NodeId, SegmentId),
        generation: Generation,
        first_slot: u32,
        bits: &[u8],
    ) {
        let Some(&index) = self.by_name.get(&(node, segment)) else { return };
        let Some(segment) = self.segments[index as usize].as_ref() else { return };
        if segment.generation != generation {
            return;
        }
        for (byte, &bits) in (0u32..).zip(bits) {
            for bit in (0..8).filter(|bit| bits >> bit & 1 == 1) {
                let Some(slot) = first_slot.checked_add(byte * 8 + bit) else { return };
                if slot >= segment.slot_count() {
                    return;
                }
                if let SlotState::Object(at) = segment.slot(slot) {
                    let record = self.slab.get_mut(at);
                    record.set(Flag::Visited, true);
                    if let Some(sketch) = &mut self.sketch {
                        sketch.add(record.id());
                    }
                }
            }
        }
    }

    /// Whether a node has segments here, in this session.
    pub fn knows_node(&self, node: NodeId, session: SessionId) -> bool {
        self.nodes.get(&node).is_some_and(|known| known.session == session)
    }

    /// All segments, in the order in which they came.
    pub fn segments(&self) -> impl Iterator<Item = SegmentView> {
        self.segments.iter().flatten().map(Segment::view)
    }

    /// A segment by its name.
    pub fn find_segment(&self, node: NodeId, segment: SegmentId) -> Option<SegmentView> {
        self.by_name.get(&(node, segment)).map(|&index| self.segment(index).view())
    }

    /// The candidate's view of what is free follows the segment's.
    pub(super) fn note_free(&mut self, index: u32) {
        let segment = self.segment(index);
        let (candidate, free) = (segment.candidate, segment.free_units());
        if let Some(at) = candidate {
            self.candidates[at as usize].free_units = free;
        }
    }

    /// Segments whose waiting time is over take new objects.
    pub(super) fn activate_segments(&mut self, now: Now) {
        let mut at = 0;
        while at < self.waiting_segments.len() {
            let index = self.waiting_segments[at];
            if self.segment(index).usable_at > now.mono {
                at += 1;
                continue;
            }
            self.waiting_segments.swap_remove(at);
            let position = self.candidates.len() as u32;
            let segment = self.segments[index as usize].as_mut().expect("a segment that waits is there");
            segment.phase = SegmentPhase::Serving;
            segment.candidate = Some(position);
            self.sizes.add(segment);
            let candidate = Candidate {
                index,
                node: segment.node,
                segment: segment.id,
                topology: segment.topology,
                units: segment.units,
                free_units: segment.free_units(),
            };
            self.candidates.push(candidate);
        }
    }

    /// Takes a segment off the list of those that take new objects.
    fn withdraw(&mut self, index: u32) {
        let segment =
            self.segments[index as usize].as_mut().expect("only those that are there are withdrawn");
        let Some(at) = segment.candidate.take() else { return };
        self.sizes.remove(segment);
        self.candidates.swap_remove(at as usize);
        if let Some(moved) = self.candidates.get(at as usize) {
            let moved = moved.index;
            self.segment_mut(moved).candidate = Some(at);
        }
    }

    pub(super) fn lose_node(&mut self, node: NodeId, now: Now, effects: &mut Effects) {
        let segments = self.nodes.get(&node).map(|node| node.segments.clone()).unwrap_or_default();
        for index in segments {
            let segment = self.segment(index);
            let (name, generation) = ((node, segment.id), segment.generation);
            // A late one that still has something which nobody knows any more is a late one again if it comes back.
            let late = segment.is_late;
            self.lose_segment(index, now, effects);
            if name.1 != SegmentId::DISK {
                self.miss_segment(name, generation, late, now);
            }
        }
        self.nodes.remove(&node);
    }

    /// A segment may come back with what it has: until then, or until it is forgotten, removals are not certain.
    pub(super) fn miss_segment(
        &mut self,
        name: (NodeId, SegmentId),
        generation: Generation,
        late: bool,
        now: Now,
    ) {
        let until = self.ticker.end(now.mono, self.config.absence_max);
        self.absent.insert(name, Absence { generation, late, until });
    }

    /// A segment cannot be read or used any more. A disk keeps what it has, and is expected back.
    pub(super) fn lose_segment(&mut self, index: u32, now: Now, effects: &mut Effects) {
        self.withdraw(index);
        self.waiting_segments.retain(|&waiting| waiting != index);
        let segment = self.segment(index);
        // A late one that still has something which nobody knows any more is a late one again if it comes back.
        let is_stale =
            segment.is_late && (segment.phase == SegmentPhase::Reporting || !segment.drains.is_empty());
        if segment.is_disk() && !is_stale {
            let until = self.ticker.end(now.mono, self.config.disk_absence_max);
            self.absent_disks.insert(self.segment(index).node, until);
        }
        let segment = self.segment_mut(index);
        segment.phase = SegmentPhase::Lost;
        segment.swept = 0;
        let (node, name) = (segment.node, segment.id);
        self.by_name.remove(&(node, name));
        if let Some(node) = self.nodes.get_mut(&node) {
            node.segments.retain(|&own| own != index);
        }
        self.leased_drains.retain(|&(_, segment, _), _| segment != index);
        let mut draining: Vec<u32> = self.segment(index).drains.keys().copied().collect();
        draining.sort_unstable(); // a hash map's order is nobody's business
        for slot in draining {
            self.killed(index, slot, true, effects);
        }
        self.lost_segments.push_back(index);
    }

    /// Goes on with taking objects out of lost segments, and out of draining ones that are to be emptied. Looks at no
    /// more than `budget` slots; the answer is how many it looked at.
    pub(super) fn sweep(&mut self, now: Now, budget: usize, effects: &mut Effects) -> usize {
        let mut looked = 0;
        while let Some(&index) = self.lost_segments.front() {
            looked += self.sweep_segment(index, now, budget - looked, effects);
            if self.segment(index).swept < self.segment(index).slot_count() {
                return looked;
            }
            self.lost_segments.pop_front();
            self.segments[index as usize] = None;
            self.vacant_segments.push(index);
        }
        for index in 0..self.segments.len() as u32 {
            let Some(segment) = &self.segments[index as usize] else { continue };
            if looked < budget
                && segment.phase == SegmentPhase::Draining
                && segment.swept < segment.slot_count()
            {
                looked += self.sweep_segment(index, now, budget - looked, effects);
            }
        }
        looked
    }

    fn sweep_segment(&mut self, index: u32, now: Now, budget: usize, effects: &mut Effects) -> usize {
        let segment = self.segment(index);
        let (from, lost) = (segment.swept, segment.phase == SegmentPhase::Lost);
        let to = segment.slot_count().min(from.saturating_add(budget as u32));
        for slot in from..to {
            if let SlotState::Object(at) = self.segment(index).slot(slot) {
                self.lose_place(at, index, slot, lost, now, effects);
            }
        }
        self.segment_mut(index).swept = to;
        (to - from) as usize
    }

    /// Takes one place away from an object, and the object with it if it cannot live without.
    fn lose_place(&mut self, at: Ref, segment: u32, slot: u32, lost: bool, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        let held =
            record.has(Flag::Writing) || record.pin() == PinClass::Hard || self.is_leased(&record, now);
        if !lost && held {
            return;
        }
        let index = self.place_index(&record, segment, slot);
        self.give_up_place(at, index, None, effects);
        self.end_if_incomplete(at, lost, now, effects);
    }

    /// An object without a complete replica ends; one that is being written lives on while it has a place.
    pub(super) fn end_if_incomplete(&mut self, at: Ref, lost: bool, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        let lives = if record.has(Flag::Writing) {
            (0..self.place_count(&record)).any(|index| !self.place(&record, index).is_lost())
        } else {
            self.has_complete_replica(&record)
        };
        if lives {
            self.places_changed(at);
        } else {
            self.drop_object(at, now, effects);
            self.stats.lost_objects += u64::from(lost);
        }
    }

    pub(super) fn topology(&mut self, labels: [&str; 3]) -> Topology {
        let [host, rack, zone] = labels.map(|label| {
            if label.is_empty() {
                return 0;
            }
            let next = self.labels.len() as u32 + 1;
            *self.labels.entry_ref(label).or_insert(next)
        });
        Topology { host, rack, zone }
    }
}

impl Segment {
    fn view(&self) -> SegmentView {
        SegmentView {
            node: self.node,
            segment: self.id,
            generation: self.generation,
            medium: self.medium,
            phase: self.phase,
            units: self.units,
            live_units: self.live_units,
            reserved_units: self.reserved_units,
            draining_units: self.draining_units,
            free_units: self.free_units(),
            slots: self.slot_count(),
            taken_slots: self.taken_slots,
        }
    }
}
