//! Write-backs: offloads that keep the copy in memory; and the flush of a node that is about to stop.
//!
//! A write-back is no use of the object: it changes neither the queue of the object nor its position there. When the record
//! is on disk, the object is in memory and on disk, and a later eviction only releases the memory.
//!
//! A node that stops announces a flush. The group then places nothing more on the node, scans its slots for objects that
//! are not on a disk, and writes them back, the most valuable ones first: pinned objects, then those that were used again,
//! then those that were used once, each in reverse order of the last use. The node writes nothing without a command, so
//! that the group knows of every record that may be on a disk, and kills it when the object is dropped.
//!
//! With [`OffloadTrigger::Put`], every object is written back after its put, for each disk in the order of the puts, and after
//! a change of the master, when the inventory of its node's disk is complete. So is an object whose writer wants it on disks,
//! one disk after the other, and again after a repair. Then its replicas have a disk each. The queue is bounded: objects beyond it are
//! counted, and left to a flush or an eviction. While a disk accepts no writes, its objects wait.
//!
//! A write-back that the node cancels, because its disk was too slow for it, is repeated. Any other refusal is final, and so
//! is a timeout.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use moontide_types::record::PinClass;
use moontide_types::{ErrorCode, Medium, NodeId, ObjectId, SegmentId, SessionId};

use super::Group;
use super::copies::DrainMode;
use super::disk::OffloadPurpose;
use crate::effect::Effects;
use crate::ids::RecordRef;
use crate::record::{Record, RecordFlag, SlotLocation};
use crate::segment::{SegmentPhase, SlotState};
use crate::time::{Now, Tick};

/// Maximum number of concurrent write-backs to one disk, of all groups. Victims of an eviction wait behind them at the node.
const WRITE_BACKS_PER_DISK: u64 = 256;

/// Bytes of concurrent write-backs to one disk, of all groups, at which no further one starts. Few, because a flush writes
/// the most valuable objects of each group first, and the groups take turns.
const WRITE_BACK_BYTES_PER_DISK: u64 = 32 << 20;

/// Maximum number of queued objects that are passed over at a time because their disk accepts no write-back now.
const PASSED_OVER_MAX: usize = 64;

/// Maximum number of objects that a flush has found and not written. It takes 8 MiB; the scan goes on when they are
/// written.
const CANDIDATES_MAX: usize = 1 << 18;

/// Maximum number of objects that wait for a write-back after their put: 1.5 MiB.
const QUEUE_MAX: usize = 1 << 16;

/// Write-backs that are started when another one has ended, without a tick in between.
const REFILL_MAX: usize = 8;

/// When objects are written to a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OffloadTrigger {
    /// When they are evicted from memory, or their node stops.
    #[default]
    Evict,
    /// In addition, in the background after their put, so that few objects are lost in a crash.
    Put,
}

/// State of a flush.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushProgress {
    /// Objects that are still to be written, as far as they are known. 0: the flush is complete.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Objects that the node cannot write: without digests, not admitted, too large, or refused by the disk.
    pub refused: u64,
}

/// All write-backs of a group.
#[derive(Debug, Default)]
pub(super) struct WriteBacks {
    /// Write-backs in flight, by their end.
    deadlines: BTreeSet<(Tick, ObjectId)>,
    /// Bytes of the write-backs in flight.
    bytes: u64,
    /// Number and bytes of the write-backs in flight, by node.
    by_node: BTreeMap<NodeId, (u64, u64)>,
    /// Objects to write back after their put, oldest first, with their bytes.
    queue: VecDeque<(ObjectId, u64)>,
    queued_bytes: u64,
    /// Nodes that are about to stop. Ordered, so that the same commands give the same effects.
    flushes: BTreeMap<SessionId, Flush>,
}

/// A write-back in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteBack {
    pub(super) node: NodeId,
    pub(super) bytes: u64,
    /// The flush that waits for it.
    pub(super) flush: Option<SessionId>,
}

/// The flush of one node.
#[derive(Debug)]
struct Flush {
    node: NodeId,
    /// Segments of the node that are not scanned completely.
    unscanned: Vec<SegmentId>,
    /// Next slot to scan in the last one of them.
    next_slot: u32,
    /// The scan pauses until all candidates are written.
    is_paused: bool,
    candidates: BinaryHeap<Candidate>,
    candidate_bytes: u64,
    in_flight: u64,
    in_flight_bytes: u64,
    refused: u64,
}

/// An object to write, or to copy. Ordered by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    /// `class:2 | last use:62`
    value: u64,
    pub(super) bytes: u64,
    pub(super) id: ObjectId,
}

impl Candidate {
    pub(super) fn new(record: &Record) -> Candidate {
        let class = match record.pin() {
            PinClass::Hard => 3,
            PinClass::Soft => 2,
            PinClass::None => u64::from(record.is_used_again()),
        };
        let value = class << 62 | record.last_use();
        Candidate { value, bytes: record.object_len(), id: record.id() }
    }
}

impl Group {
    /// Starts the flush of a node that is about to stop. A repeated call has no effect.
    pub fn flush(&mut self, node: NodeId, session: SessionId) -> Result<(), ErrorCode> {
        let Some(mounted) = self.nodes.get(&node).filter(|mounted| mounted.session == session) else {
            return Err(ErrorCode::StaleSession);
        };
        if self.write_backs.flushes.contains_key(&session) {
            return Ok(());
        }
        let memory = |&&index: &&u32| self.segment(index).medium == Medium::Memory;
        let unscanned: Vec<SegmentId> =
            mounted.segments.iter().filter(memory).map(|&index| self.segment(index).id).collect();
        for &segment in &unscanned {
            self.place_no_more(node, segment);
        }
        let flush = Flush {
            node,
            unscanned,
            next_slot: 0,
            is_paused: false,
            candidates: BinaryHeap::new(),
            candidate_bytes: 0,
            in_flight: 0,
            in_flight_bytes: 0,
            refused: 0,
        };
        self.write_backs.flushes.insert(session, flush);
        Ok(())
    }

    /// Whether a node is about to stop.
    pub(super) fn is_flushing(&self, node: NodeId) -> bool {
        self.write_backs.flushes.values().any(|flush| flush.node == node)
    }

    /// State of the flush of a node in this session.
    pub fn flush_progress(&self, session: SessionId) -> Option<FlushProgress> {
        let flush = self.write_backs.flushes.get(&session)?;
        let known = flush.candidates.len() as u64 + flush.in_flight;
        Some(FlushProgress {
            objects: known.max(u64::from(!flush.unscanned.is_empty())),
            bytes: flush.candidate_bytes + flush.in_flight_bytes,
            refused: flush.refused,
        })
    }

    /// Objects, and their bytes, that are to be written back and not known to be on disk yet.
    pub fn write_back_backlog(&self) -> (u64, u64) {
        let WriteBacks { deadlines, bytes, queue, queued_bytes, .. } = &self.write_backs;
        (queue.len() as u64 + deadlines.len() as u64, queued_bytes + bytes)
    }

    /// Ends the flush of a node that is gone.
    pub(super) fn end_flush(&mut self, node: NodeId) {
        self.write_backs.flushes.retain(|_, flush| flush.node != node);
    }

    /// Continues all flushes: scans at most `slots` slots, and starts at most `objects` write-backs. Returns whether more
    /// could be done at once.
    pub(super) fn step_flushes(
        &mut self,
        now: Now,
        slots: usize,
        objects: usize,
        effects: &mut Effects,
    ) -> bool {
        if !self.has_write_backs_to_start() {
            return false;
        }
        let sessions: Vec<SessionId> = self.write_backs.flushes.keys().copied().collect();
        let mut left = slots;
        for session in sessions {
            left -= self.scan_for_flush(session, now, left);
        }
        let scans_more = left == 0 && !self.write_backs.flushes.is_empty();
        scans_more | self.start_write_backs(now, objects, effects)
    }

    /// Handles a completed put.
    pub(super) fn note_stored(&mut self, at: RecordRef) {
        self.queue_write_back(at);
        if !self.write_backs.flushes.is_empty() {
            self.flush_stored(at);
        }
    }

    /// Handles an object that a node reports in its memory: a preceding master may not have written it back.
    pub(super) fn note_reported(&mut self, at: RecordRef) {
        self.queue_write_back(at);
    }

    /// Adds an object to the queue of write-backs, if it shall be on a further disk, and one of its nodes has one for it.
    pub(super) fn queue_write_back(&mut self, at: RecordRef) {
        let record = *self.slab.get(at);
        if !self.lacks_disk_copies(&record)
            || self.disks_for_copy(&record).is_empty()
            || !self.is_offloadable(&record)
            // The writer's wish counts more than the configuration.
            || !(self.disk_replicas(&record) > 0 || self.is_admitted(&record))
        {
            return;
        }
        let bytes = record.object_len();
        if self.write_backs.queue.len() >= QUEUE_MAX {
            self.stats.write_backs_skipped += 1;
            return;
        }
        self.write_backs.queue.push_back((record.id(), bytes));
        self.write_backs.queued_bytes += bytes;
    }

    /// Number of disks on which the writer wants an object.
    fn disk_replicas(&self, record: &Record) -> usize {
        self.extensions.get(record.extension).map_or(0, |extension| extension.disk_replicas.into())
    }

    /// Whether an object shall be on more disks than it is.
    fn lacks_disk_copies(&self, record: &Record) -> bool {
        let for_all = usize::from(self.config.offload == OffloadTrigger::Put);
        let wanted = self.disk_replicas(record).max(for_all);
        wanted > 0 && self.copies_on_disk(record) < wanted
    }

    /// Number of disks that have the object: of the stripe that is on the fewest.
    pub(super) fn copies_on_disk(&self, record: &Record) -> usize {
        (0..self.stripes(record)).map(|stripe| self.disks_of_stripe(record, stripe)).min().unwrap_or(0)
    }

    pub(super) fn disks_of_stripe(&self, record: &Record, stripe: usize) -> usize {
        let positions = (stripe..self.location_count(record)).step_by(self.stripes(record));
        let locations = positions.map(|position| self.location(record, position));
        locations.filter(|&at| self.is_readable(at) && self.segment(at.segment).is_disk()).count()
    }

    /// Whether the node of a location in memory has a disk, in any state, that does not have the stripe.
    pub(super) fn disk_lacks(&self, record: &Record, stripe: usize, location: SlotLocation) -> bool {
        let node = self.segment(location.segment).node;
        self.node_has_disk(location.segment)
            && !self.has_stripe(record, stripe, |segment| segment.is_disk() && segment.node == node)
    }

    /// Returns the disks to which the next copy of an object can be written: of the first stripe that is on the fewest.
    fn disks_for_copy(&self, record: &Record) -> Vec<u32> {
        let stripes = self.stripes(record);
        let fewest = (0..stripes).min_by_key(|&stripe| self.disks_of_stripe(record, stripe)).unwrap_or(0);
        let locations = (fewest..self.location_count(record))
            .step_by(stripes)
            .map(|position| self.location(record, position))
            .filter(|&location| self.is_readable(location) && self.disk_lacks(record, fewest, location));
        let disk_of = |location: SlotLocation| {
            self.by_name.get(&(self.segment(location.segment).node, SegmentId::DISK)).copied()
        };
        locations.filter_map(disk_of).collect()
    }

    /// Adds an object that was stored during a flush: the scan may have passed its slot.
    fn flush_stored(&mut self, at: RecordRef) {
        let record = *self.slab.get(at);
        let nodes = self.write_backs.flushes.iter().map(|(&session, flush)| (session, flush.node));
        let concerned: Vec<SessionId> = nodes
            .filter(|&(_, node)| self.is_in_memory_of(&record, node))
            .map(|(session, _)| session)
            .collect();
        for session in concerned {
            self.add_candidate(session, &record);
        }
    }

    /// Handles the start of a write-back.
    pub(super) fn write_back_started(&mut self, id: ObjectId, until: Tick, write_back: WriteBack) {
        self.write_backs.deadlines.insert((until, id));
        self.write_backs.bytes += write_back.bytes;
        let of_node = self.write_backs.by_node.entry(write_back.node).or_default();
        *of_node = (of_node.0 + 1, of_node.1 + write_back.bytes);
        if let Some(flush) = self.flush_of(write_back) {
            flush.in_flight += 1;
            flush.in_flight_bytes += write_back.bytes;
        }
    }

    /// Handles the end of a write-back, successful or not.
    pub(super) fn write_back_ended(&mut self, id: ObjectId, until: Tick, write_back: WriteBack) {
        self.write_backs.deadlines.remove(&(until, id));
        self.write_backs.bytes -= write_back.bytes;
        if let Some(of_node) = self.write_backs.by_node.get_mut(&write_back.node) {
            *of_node = (of_node.0 - 1, of_node.1 - write_back.bytes);
            if of_node.0 == 0 {
                self.write_backs.by_node.remove(&write_back.node);
            }
        }
        if let Some(flush) = self.flush_of(write_back) {
            flush.in_flight -= 1;
            flush.in_flight_bytes -= write_back.bytes;
        }
    }

    /// Handles a write-back that the node did not begin in time.
    pub(super) fn repeat_write_back(&mut self, at: RecordRef, write_back: WriteBack) {
        match write_back.flush {
            Some(session) => {
                let record = *self.slab.get(at);
                self.add_candidate(session, &record);
            }
            None => self.queue_write_back(at),
        }
    }

    /// Handles a write-back that the node refused, or that timed out.
    pub(super) fn write_back_failed(&mut self, write_back: WriteBack) {
        match write_back.flush {
            Some(_) => self.flush_of(write_back).into_iter().for_each(|flush| flush.refused += 1),
            None => self.stats.write_backs_skipped += 1,
        }
    }

    /// Starts further write-backs after one has ended.
    pub(super) fn refill_write_backs(&mut self, now: Now, effects: &mut Effects) {
        if self.has_write_backs_to_start() {
            self.start_write_backs(now, REFILL_MAX, effects);
        }
    }

    /// Returns the id of a write-back that has timed out.
    pub(super) fn expired_write_back(&self, now: Now) -> Option<ObjectId> {
        let &(until, id) = self.write_backs.deadlines.first()?;
        (until <= self.ticker.now(now.mono)).then_some(id)
    }

    /// Whether a version of the object can be written to a disk at all.
    pub(super) fn is_offloadable(&self, record: &Record) -> bool {
        // A record that cannot be verified is never promoted.
        !record.has(RecordFlag::Digestless) && !self.not_offloadable.contains(&record.id())
    }

    fn place_no_more(&mut self, node: NodeId, segment: SegmentId) {
        let phase = self.by_name.get(&(node, segment)).map(|&index| self.segment(index).phase);
        // An operator may have started to drain it already. A reporting segment accepts nothing yet.
        if matches!(phase, Some(SegmentPhase::Serving | SegmentPhase::Quarantined)) {
            let drained = self.drain(node, segment, DrainMode::Keep);
            debug_assert!(drained.is_ok(), "segment is mounted and in use");
        }
    }

    /// Searches the slots of a node for objects that are not on disk. Returns the number of scanned slots.
    fn scan_for_flush(&mut self, session: SessionId, now: Now, budget: usize) -> usize {
        let mut scanned = 0;
        while let Some(flush) = self.write_backs.flushes.get_mut(&session) {
            flush.is_paused &= !flush.candidates.is_empty();
            let Some(&segment) = flush.unscanned.last().filter(|_| !flush.is_paused) else { break };
            let (node, first) = (flush.node, flush.next_slot);
            let mounted = (self.by_name.get(&(node, segment)), self.by_name.get(&(node, SegmentId::DISK)));
            let (Some(&index), Some(&disk)) = mounted else {
                self.next_segment_of_flush(session); // unmounted, or there is no disk
                continue;
            };
            let is_reporting = |index: u32| self.segment(index).phase == SegmentPhase::Reporting;
            if is_reporting(index) || is_reporting(disk) {
                break;
            }
            self.place_no_more(node, segment);
            let end = self.segment(index).slot_count().min(first.saturating_add((budget - scanned) as u32));
            for slot in first..end {
                if let SlotState::Object(at) = self.segment(index).slot(slot) {
                    let record = *self.slab.get(at);
                    self.scan_object(session, &record, now);
                }
            }
            scanned += (end - first) as usize;
            if end == self.segment(index).slot_count() {
                self.next_segment_of_flush(session);
            } else if let Some(flush) = self.write_backs.flushes.get_mut(&session) {
                flush.next_slot = end;
            }
            if scanned >= budget {
                break;
            }
        }
        scanned
    }

    fn next_segment_of_flush(&mut self, session: SessionId) {
        if let Some(flush) = self.write_backs.flushes.get_mut(&session) {
            flush.unscanned.pop();
            flush.next_slot = 0;
            flush.is_paused = flush.candidates.len() >= CANDIDATES_MAX;
        }
    }

    fn scan_object(&mut self, session: SessionId, record: &Record, now: Now) {
        if self.needs_write_back(record, now) {
            self.add_candidate(session, record);
        }
    }

    /// Whether an object would be lost with the memory of its nodes.
    fn needs_write_back(&self, record: &Record, now: Now) -> bool {
        !record.has(RecordFlag::Writing)
            && !record.has(RecordFlag::OnDisk)
            && !self.is_expired(record, now)
            && !self.is_completely_on_disk(record)
    }

    fn add_candidate(&mut self, session: SessionId, record: &Record) {
        let is_writable = self.is_offloadable(record) && self.is_admitted(record);
        let Some(flush) = self.write_backs.flushes.get_mut(&session) else { return };
        if is_writable {
            let candidate = Candidate::new(record);
            flush.candidate_bytes += candidate.bytes;
            flush.candidates.push(candidate);
        } else {
            flush.refused += 1;
        }
    }

    /// Starts write-backs of the candidates, within the limits of what may be in flight. Returns whether `budget` was used
    /// up.
    fn start_write_backs(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        let mut left = budget;
        let sessions: Vec<SessionId> = self.write_backs.flushes.keys().copied().collect();
        for session in sessions {
            while left > 0 {
                let limits = self.write_back_limits();
                let Some(flush) = self.write_backs.flushes.get_mut(&session) else { break };
                if flush.in_flight >= limits.0 || flush.in_flight_bytes >= limits.1 {
                    break;
                }
                // The most valuable ones are known when the scan is complete.
                if !flush.unscanned.is_empty() && !flush.is_paused {
                    break;
                }
                let Some(candidate) = flush.candidates.pop() else { break };
                flush.candidate_bytes -= candidate.bytes;
                left -= 1;
                self.write_back_candidate(session, candidate.id, now, effects);
            }
        }
        let mut passed_over = 0;
        while left > 0 && passed_over < self.write_backs.queue.len().min(PASSED_OVER_MAX) {
            let Some((id, bytes)) = self.write_backs.queue.pop_front() else { break };
            if self.awaits_disk(id) {
                // The disks of other nodes go on.
                self.write_backs.queue.push_back((id, bytes));
                passed_over += 1;
                continue;
            }
            self.write_backs.queued_bytes -= bytes;
            left -= 1;
            self.write_back_stored(id, now, effects);
        }
        left == 0
    }

    /// Whether no disk can take a write-back of an object now, but one can later: it is reporting its records, accepts no
    /// writes for a while, or has enough of them.
    fn awaits_disk(&self, id: ObjectId) -> bool {
        let Some(at) = self.find_id(id) else { return false };
        let disks = self.disks_for_copy(self.slab.get(at));
        !disks.is_empty() && !disks.iter().any(|&disk| self.takes_write_backs(disk))
    }

    /// Whether a disk can take another write-back now.
    pub(super) fn takes_write_backs(&self, disk: u32) -> bool {
        let (count, bytes) = self.write_back_limits();
        let disk = self.segment(disk);
        let in_flight = self.write_backs.by_node.get(&disk.node);
        let is_busy = in_flight.is_some_and(|&of| of.0 >= count || of.1 >= bytes);
        disk.phase != SegmentPhase::Reporting && disk.accepts_offloads && !is_busy
    }

    /// Returns the first node that has an object in its memory.
    pub(super) fn memory_node(&self, record: &Record) -> Option<NodeId> {
        let mut locations = (0..self.location_count(record)).map(|position| self.location(record, position));
        let in_memory = |location: &SlotLocation| {
            self.is_readable(*location) && self.segment(location.segment).medium == Medium::Memory
        };
        locations.find(in_memory).map(|location| self.segment(location.segment).node)
    }

    fn has_write_backs_to_start(&self) -> bool {
        !self.write_backs.flushes.is_empty() || !self.write_backs.queue.is_empty()
    }

    /// Returns the number and the bytes of write-backs of this group that one disk gets at a time: its share, and at least
    /// so much that the disk is not idle between two of them.
    fn write_back_limits(&self) -> (u64, u64) {
        let groups = u64::from(self.config.groups.get());
        ((WRITE_BACKS_PER_DISK / groups).max(16), (WRITE_BACK_BYTES_PER_DISK / groups).max(1 << 20))
    }

    fn write_back_candidate(&mut self, session: SessionId, id: ObjectId, now: Now, effects: &mut Effects) {
        let Some(at) = self.find_id(id) else { return };
        let record = *self.slab.get(at);
        if !self.needs_write_back(&record, now) {
            return;
        }
        let in_flight = self.offloads.get(&id).map(|offload| offload.write_back);
        if in_flight.flatten().is_some_and(|write_back| write_back.flush == Some(session)) {
            return; // the object has several stripes on this node
        }
        if in_flight.is_some() {
            // The command may be lost with an earlier session. A node that receives it twice writes the record once.
            self.leave_offloading(at);
            self.late_offloads.insert(id);
        }
        let purpose = OffloadPurpose::WriteBack { flush: Some(session) };
        if !self.start_offload(at, purpose, now, effects)
            && let Some(flush) = self.write_backs.flushes.get_mut(&session)
        {
            flush.refused += 1;
        }
    }

    /// Writes back an object after its put, unless it is gone, on the disks or on its way to one.
    fn write_back_stored(&mut self, id: ObjectId, now: Now, effects: &mut Effects) {
        let Some(at) = self.find_id(id) else { return };
        let record = *self.slab.get(at);
        let is_wanted = !record.has(RecordFlag::Writing)
            && !record.has(RecordFlag::OnDisk)
            && !self.is_expired(&record, now)
            && self.lacks_disk_copies(&record);
        if !is_wanted || self.offloads.contains_key(&id) {
            return;
        }
        if !self.start_offload(at, OffloadPurpose::WriteBack { flush: None }, now, effects) {
            self.stats.write_backs_skipped += 1;
        }
    }

    fn flush_of(&mut self, write_back: WriteBack) -> Option<&mut Flush> {
        self.write_backs.flushes.get_mut(&write_back.flush?)
    }

    fn is_in_memory_of(&self, record: &Record, node: NodeId) -> bool {
        (0..self.location_count(record)).any(|position| {
            let location = self.location(record, position);
            self.is_readable(location) && {
                let segment = self.segment(location.segment);
                segment.node == node && segment.medium == Medium::Memory
            }
        })
    }

    /// Checks the counts of write-backs against the offloads.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn write_backs_are_consistent(&self) -> bool {
        let in_flight =
            || self.offloads.iter().filter_map(|(&id, offload)| Some((id, offload, offload.write_back?)));
        let bytes: u64 = in_flight().map(|(_, _, write_back)| write_back.bytes).sum();
        let has_deadline = |(id, offload, _): (ObjectId, &super::disk::Offload, WriteBack)| {
            self.write_backs.deadlines.contains(&(offload.until, id))
        };
        let flushes = self.write_backs.flushes.iter().all(|(&session, flush)| {
            let of_flush = || in_flight().filter(|(_, _, write_back)| write_back.flush == Some(session));
            let candidate_bytes: u64 = flush.candidates.iter().map(|candidate| candidate.bytes).sum();
            flush.in_flight == of_flush().count() as u64
                && flush.in_flight_bytes == of_flush().map(|(_, _, write_back)| write_back.bytes).sum::<u64>()
                && flush.candidate_bytes == candidate_bytes
                && self.nodes.get(&flush.node).is_some_and(|node| node.session == session)
        });
        let by_node = self.write_backs.by_node.iter().all(|(&node, &(count, bytes))| {
            let of_node = || in_flight().filter(|(_, _, write_back)| write_back.node == node);
            count == of_node().count() as u64
                && bytes == of_node().map(|(_, _, write_back)| write_back.bytes).sum::<u64>()
        });
        let queued_bytes: u64 = self.write_backs.queue.iter().map(|(_, bytes)| bytes).sum();
        self.write_backs.deadlines.len() == in_flight().count()
            && queued_bytes == self.write_backs.queued_bytes
            && in_flight().all(has_deadline)
            && bytes == self.write_backs.bytes
            && by_node
            && flushes
    }
}
