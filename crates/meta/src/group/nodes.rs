//! Calls for nodes: mounting, losing and draining segments; read marks from heartbeats.

use std::time::Duration;

use moontide_types::limits::{SEGMENT_UNITS_MAX, SHM_HEARTBEAT_TIMEOUT_MS};
use moontide_types::record::PinClass;
use moontide_types::{ErrorCode, Generation, Medium, NodeId, SegmentId, SessionId, Tenant, Term};

use super::exclusion::SyncMark;
use super::{AbsentSegment, Group, LocationVersion, Node};
use crate::effect::Effects;
use crate::ids::RecordRef;
use crate::placement::{SegmentCandidate, Topology};
use crate::record::RecordFlag;
use crate::segment::{SLOTS_MAX, Segment, SegmentParams, SegmentPhase, SlotState};
use crate::time::Now;

/// Time after a mount within which other nodes are expected to mount their memory, too.
pub(super) const MEMORY_EXPECTED: Duration = Duration::from_secs(5);

/// A segment as its node offers it.
#[derive(Clone, Copy, Debug)]
pub struct MountSpec<'a> {
    /// Node that owns the segment.
    pub node: NodeId,
    /// Session of the node.
    pub session: SessionId,
    /// Id of the segment on its node.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Storage medium; a disk is mounted with [`Group::mount_disk`].
    pub medium: Medium,
    /// Size in units.
    pub units: u32,
    /// Number of header slots.
    pub slots: u32,
    /// Topology labels of the node: host, rack, zone; empty if unknown.
    pub labels: [&'a str; 3],
    /// If set, the only tenant that may use the segment.
    pub tenant: Option<Tenant<'a>>,
    /// Term that the segment adopted last; zero if none.
    pub term: Term,
    /// Whether the segment contains records to be reported.
    pub has_records: bool,
    /// When the node was last in sync with a master of the group.
    pub synced: SyncMark,
    /// Whether peers access the segment without its node, so that granted leases and reservations end only by time.
    pub one_sided: bool,
}

/// Result of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountOutcome {
    /// The node must report its records.
    pub report: bool,
    /// Time before which the group allocates nothing in the segment.
    pub usable_in: Duration,
}

/// State of a segment. `live + reserved + draining + free = units`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// Node that owns the segment.
    pub node: NodeId,
    /// Id of the segment on its node.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Storage medium.
    pub medium: Medium,
    /// Phase of the segment.
    pub phase: SegmentPhase,
    /// Size in units.
    pub units: u32,
    /// Units of complete objects.
    pub live_units: u32,
    /// Units of objects being written.
    pub reserved_units: u32,
    /// Released units that the node has not reported as free yet.
    pub draining_units: u32,
    /// Units that can be allocated.
    pub free_units: u32,
    /// Number of header slots.
    pub slots: u32,
    /// Slots that are not free.
    pub taken_slots: u32,
}

impl Group {
    /// Mounts a segment. A mounted segment of the same name, or of an earlier session of the node, is lost by this.
    pub fn mount(
        &mut self,
        now: Now,
        spec: &MountSpec<'_>,
        effects: &mut Effects,
    ) -> Result<MountOutcome, ErrorCode> {
        self.observe_term(spec.term, effects)?;
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
        let tenant = spec.tenant.map(|tenant| self.tenant(tenant)).transpose()?;
        if self.nodes.get(&spec.node).is_some_and(|node| node.session != spec.session) {
            self.lose_node(spec.node, now, effects);
        }
        if let Some(&earlier) = self.by_name.get(&(spec.node, spec.segment)) {
            let mounted = self.segment(earlier);
            if (mounted.session, mounted.generation) == (spec.session, spec.generation)
                && !moontide_rt::mutation_enabled("mount-said-twice-taken-as-new")
            {
                // A repeated mount. Treated as new, the segment would be considered empty.
                let usable_in = mounted.usable_at.since(now.mono);
                return Ok(MountOutcome { report: mounted.phase == SegmentPhase::Reporting, usable_in });
            }
            self.lose_segment(earlier, now, effects);
        }
        self.expect_memory(now, MEMORY_EXPECTED);
        self.observe_sync_mark(spec.synced);
        let absent = self.absent.remove(&(spec.node, spec.segment));
        if absent.is_some_and(|segment| segment.generation != spec.generation)
            && !moontide_rt::mutation_enabled("ghost-forgotten")
        {
            // The earlier process is dead, but local client processes may still consider its memory alive, and read it,
            // until its heartbeat times out.
            let grace = Duration::from_millis(u64::from(SHM_HEARTBEAT_TIMEOUT_MS) * 105 / 100);
            self.unknown_nodes_until = self.unknown_nodes_until.max(now.mono.after(grace));
        }
        let was_stale = absent.is_some_and(|segment| segment.stale && segment.generation == spec.generation);
        let absent = absent.is_some();
        let topology = self.topology(spec.labels);
        // An earlier master, or this one in an earlier session, may have granted parts of the segment. If peers access
        // it only through the node, the node rejects late requests: a lower term, a past epoch, a taken extent.
        let granted = spec.term != Term::ZERO
            && spec.one_sided
            && !moontide_rt::mutation_enabled("no-wait-for-old-leases");
        let delay = if granted { self.config.reallocation_delay } else { Duration::ZERO };
        let phase = if spec.has_records { SegmentPhase::Reporting } else { SegmentPhase::Quarantined };
        let params = SegmentParams {
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
        let mut segment = Segment::new(params, phase, now.mono.after(delay));
        // Removals may have been acknowledged without this segment, so its records may include removed objects. Either
        // this master no longer waits for it, or an earlier one did so.
        let late = now.mono > self.reports_until && !moontide_rt::mutation_enabled("late-segment-believed");
        segment.is_stale = !absent && (late || self.was_excluded(spec.synced)) || was_stale;
        let index = self.add_segment(segment, topology);
        if spec.has_records {
            self.jobs_are_uncertain();
        }
        if !spec.has_records {
            self.quarantined_segments.push(index);
            self.activate_segments(now);
        }
        Ok(MountOutcome { report: spec.has_records, usable_in: delay })
    }

    /// Adds a segment to the tables, and its node if it is new.
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

    /// Unmounts a segment. Its objects can no longer be read; later ticks remove them from the index.
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

    /// Ends a node's session. The node's objects can no longer be read. If the node returns, it reports them.
    pub fn node_lost(&mut self, now: Now, node: NodeId, session: SessionId, effects: &mut Effects) {
        if self.nodes.get(&node).is_none_or(|node| node.session != session) {
            return;
        }
        self.lose_node(node, now, effects);
    }

    /// Marks slots that were read since the last heartbeat, given as bits from `first_slot` on.
    pub fn touched(
        &mut self,
        now: Now,
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
        let mut read = std::mem::take(&mut self.found);
        for (byte, &bits) in (0u32..).zip(bits) {
            for bit in (0..8).filter(|bit| bits >> bit & 1 == 1) {
                // A slot beyond the last one is an error of the node; the others count.
                let Some(slot) = first_slot.checked_add(byte * 8 + bit) else { continue };
                if slot < segment.slot_count()
                    && let SlotState::Object(at) = segment.slot(slot)
                {
                    read.push(at);
                }
            }
        }
        for &at in &read {
            self.note_copy_read(at, node, now);
            let record = self.slab.get_mut(at);
            record.set(RecordFlag::Visited, true);
            if let Some(sketch) = &mut self.sketch {
                sketch.add(record.id());
            }
        }
        // The blocks of a prompt were put in order, and mostly have slots in this order.
        self.note_uses(read.drain(..));
        self.found = read;
    }

    /// Whether a node has segments here, in this session.
    pub fn knows_node(&self, node: NodeId, session: SessionId) -> bool {
        self.nodes.get(&node).is_some_and(|node| node.session == session)
    }

    /// Returns all segments, in mount order.
    pub fn segments(&self) -> impl Iterator<Item = SegmentView> {
        self.segments.iter().flatten().map(Segment::view)
    }

    /// Returns a segment by its node and id.
    pub fn find_segment(&self, node: NodeId, segment: SegmentId) -> Option<SegmentView> {
        self.by_name.get(&(node, segment)).map(|&index| self.segment(index).view())
    }

    /// Copies the free units of a segment to its candidate entry.
    pub(super) fn note_free(&mut self, index: u32) {
        let segment = self.segment(index);
        let (candidate, free) = (segment.candidate, segment.free_units());
        if let Some(at) = candidate {
            self.candidates[at as usize].free_units = free;
        }
    }

    /// Lets segments whose delay is over accept new objects.
    pub(super) fn activate_segments(&mut self, now: Now) {
        let mut at = 0;
        while at < self.quarantined_segments.len() {
            let index = self.quarantined_segments[at];
            if self.segment(index).usable_at > now.mono {
                at += 1;
                continue;
            }
            self.quarantined_segments.swap_remove(at);
            let position = self.candidates.len() as u32;
            let segment = self.segments[index as usize].as_mut().expect("quarantined segment exists");
            segment.phase = SegmentPhase::Serving;
            segment.candidate = Some(position);
            self.sizes.add(segment);
            let candidate = SegmentCandidate {
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

    /// Removes a segment from the candidates.
    pub(super) fn withdraw(&mut self, index: u32) {
        let segment = self.segments[index as usize].as_mut().expect("withdrawn segment exists");
        let Some(at) = segment.candidate.take() else { return };
        self.end_rebalance_of_segment(index);
        let segment = self.segments[index as usize].as_mut().expect("withdrawn segment exists");
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
            // A stale segment that still has untracked records is stale again if it returns.
            let stale = segment.is_stale;
            self.lose_segment(index, now, effects);
            if name.1 != SegmentId::DISK {
                self.mark_segment_absent(name, generation, stale, now);
            }
        }
        self.nodes.remove(&node);
        self.end_flush(node);
        self.forget_announcement(node);
    }

    /// Expects a segment to return with its records. Until it does, or its entry is dropped, removals are not certain.
    pub(super) fn mark_segment_absent(
        &mut self,
        name: (NodeId, SegmentId),
        generation: Generation,
        stale: bool,
        now: Now,
    ) {
        let until = self.ticker.end(now.mono, self.config.rejoin_window);
        self.absent.insert(name, AbsentSegment { generation, stale, until });
    }

    fn expect_memory(&mut self, now: Now, within: Duration) {
        self.memory_expected_until = self.memory_expected_until.max(now.mono.after(within));
    }

    /// Marks a segment as lost: it can no longer be read or used. A disk keeps its records and is expected to return.
    pub(super) fn lose_segment(&mut self, index: u32, now: Now, effects: &mut Effects) {
        self.withdraw(index);
        self.expect_memory(now, self.config.rejoin_window);
        self.quarantined_segments.retain(|&waiting| waiting != index);
        let segment = self.segment(index);
        // A stale segment that still has untracked records is stale again if it returns.
        let is_stale =
            segment.is_stale && (segment.phase == SegmentPhase::Reporting || !segment.drains.is_empty());
        if segment.is_disk() && !is_stale {
            let until = self.ticker.end(now.mono, self.config.disk_rejoin_window);
            self.absent_disks.insert(self.segment(index).node, until);
        }
        let segment = self.segment_mut(index);
        segment.phase = SegmentPhase::Lost;
        segment.swept = 0;
        let (node, name) = (segment.node, segment.id);
        self.by_name.remove(&(node, name));
        if let Some(node) = self.nodes.get_mut(&node) {
            node.segments.retain(|&mounted| mounted != index);
        }
        self.leased_drains.retain(|&(_, segment, _), _| segment != index);
        self.end_warm_up(index);
        self.end_copies_of_segment(index);
        self.repair_after_loss(now);
        self.jobs_are_uncertain();
        let draining = self.segment(index).drains.iter();
        let draining =
            draining.map(|(&slot, drain)| LocationVersion { segment: index, slot, epoch: drain.epoch });
        let unanswered = self.unanswered_kills.keys().copied().filter(|version| version.segment == index);
        let mut versions: Vec<LocationVersion> = draining.chain(unanswered).collect();
        versions.sort_unstable(); // the order of a hash map is not deterministic
        versions.dedup();
        for version in versions {
            self.killed(version, true, effects);
        }
        self.lost_segments.push_back(index);
    }

    /// Continues to remove objects from lost segments, and from draining ones that are to be emptied. Scans at most
    /// `budget` slots; returns the number of scanned slots.
    pub(super) fn sweep(&mut self, now: Now, budget: usize, effects: &mut Effects) -> usize {
        let mut scanned = 0;
        while let Some(&index) = self.lost_segments.front() {
            scanned += self.sweep_segment(index, now, budget - scanned, effects);
            if self.segment(index).swept < self.segment(index).slot_count() {
                return scanned;
            }
            self.lost_segments.pop_front();
            self.segments[index as usize] = None;
            self.vacant_segments.push(index);
        }
        for index in 0..self.segments.len() as u32 {
            let Some(segment) = &self.segments[index as usize] else { continue };
            if scanned < budget
                && segment.phase == SegmentPhase::Draining
                && segment.swept < segment.slot_count()
            {
                scanned += self.sweep_segment(index, now, budget - scanned, effects);
            }
        }
        scanned
    }

    fn sweep_segment(&mut self, index: u32, now: Now, budget: usize, effects: &mut Effects) -> usize {
        let segment = self.segment(index);
        let (from, lost) = (segment.swept, segment.phase == SegmentPhase::Lost);
        let to = segment.slot_count().min(from.saturating_add(budget as u32));
        for slot in from..to {
            if let SlotState::Object(at) = self.segment(index).slot(slot) {
                self.lose_location(at, index, slot, lost, now, effects);
            }
        }
        self.segment_mut(index).swept = to;
        (to - from) as usize
    }

    /// Removes one location from an object, and the object if it cannot be read without it.
    fn lose_location(
        &mut self,
        at: RecordRef,
        segment: u32,
        slot: u32,
        lost: bool,
        now: Now,
        effects: &mut Effects,
    ) {
        let record = *self.slab.get(at);
        let in_use =
            record.has(RecordFlag::Writing) || record.pin() == PinClass::Hard || self.is_leased(&record, now);
        if !lost && in_use {
            return;
        }
        let index = self.location_index(&record, segment, slot);
        self.release_location(at, index, None, effects);
        if !(lost && self.keep_for_missing_stripes(at, now)) {
            self.end_unless_stripe_remains(at, index, lost, now, effects);
        }
    }

    /// Drops an object without a complete replica. An object being written remains while it has a location.
    pub(super) fn end_if_incomplete(&mut self, at: RecordRef, lost: bool, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        let remains = if record.has(RecordFlag::Writing) {
            (0..self.location_count(&record)).any(|index| !self.location(&record, index).is_lost())
        } else {
            self.has_complete_replica(&record)
        };
        if remains {
            self.locations_changed(at);
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
