//! Copies of hot objects on the nodes of their readers.
//!
//! Nodes report which records other hosts read much ([`Group::remote_reads`]). If the processes of a host read more of an
//! object within some seconds than [`READS_MIN`] times its length and [`GroupConfig::hot_copy_bytes`], the node of that host
//! gets a copy, and they read it in place from then on. Such a copy is a replica beyond those that the writer asked for:
//! any reader may use it, and a removal kills it like the others. It is released when it was not read for
//! [`GroupConfig::hot_copy_idle`], or earlier if memory is scarce.
//!
//! ```text
//!   read much by a host ──▶ copied to its node ──▶ read there in place ──▶ idle: released
//! ```
//!
//! All of this is a hint in memory: a new master does not know which replicas were copies. So every object with more
//! replicas than its writer asked for is treated as one with copies, whatever the cause ([`Group::note_surplus`]).
//!
//! Only objects of one stripe are copied, to nodes that their spread allows, and within the quota of their tenant. All copies
//! together take at most a tenth of the memory ([`SHARE`]), and nothing is evicted for them.
//!
//! [`GroupConfig::hot_copy_bytes`]: super::GroupConfig::hot_copy_bytes
//! [`GroupConfig::hot_copy_idle`]: super::GroupConfig::hot_copy_idle

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use moontide_types::limits::{REPLICAS_MAX, UNIT_BYTES};
use moontide_types::{Epoch, Generation, Medium, MonoTime, NodeId, ObjectId, SegmentId, SlotId};

use super::Group;
use super::copies::{CopyTargets, NotStarted};
use crate::effect::{CopyPurpose, Effects};
use crate::ids::RecordRef;
use crate::record::{Record, RecordFlag};
use crate::segment::{Segment, SlotState};
use crate::time::Now;

/// How often the processes of a host must read an object before a copy pays: a copy moves the bytes once more.
const READS_MIN: u64 = 8;

/// Time between two reviews of the objects.
const REVIEW_INTERVAL: Duration = Duration::from_secs(1);

/// Objects that one step reviews, in which no other call of the group runs.
const REVIEWED_MAX: usize = 512;

/// Each review forgets one of this many parts of the counted bytes: half of them in some five seconds.
const FORGET: u64 = 8;

/// Maximum number of objects whose readers are counted, or that have copies. They take at most some MiB.
const OBJECTS_MAX: usize = 1 << 14;

/// Maximum number of reading hosts that are counted for one object.
const READERS_MAX: usize = 16;

/// Copies take at most one of this many parts of the group's memory.
const SHARE: u64 = 10;

/// Time after which an unread copy is released if the group must evict.
const IDLE_UNDER_PRESSURE: Duration = Duration::from_secs(5);

/// Bytes of a record that were read by the processes of another host since the last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteReads {
    /// Segment of the record.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Slot of the record.
    pub slot: SlotId,
    /// Version of the object.
    pub epoch: Epoch,
    /// Node of the host that read.
    pub reader: NodeId,
    /// Bytes that were read.
    pub bytes: u64,
}

/// State of all hot objects.
#[derive(Debug, Default)]
pub(super) struct HotObjects {
    objects: BTreeMap<ObjectId, HotObject>,
    /// Time of the last call that had one.
    now: MonoTime,
    review_at: MonoTime,
    /// The review in progress.
    reviewed: Option<Review>,
    /// Units of all copies, at the last review and since.
    copied_units: u64,
}

/// How far a review has got.
#[derive(Clone, Copy, Debug, Default)]
struct Review {
    /// The last object that was reviewed.
    after: Option<ObjectId>,
    /// Units of copies so far.
    units: u64,
}

#[derive(Debug, Default)]
struct HotObject {
    epoch: Epoch,
    /// Bytes that other hosts have read recently, by their node.
    readers: BTreeMap<NodeId, u64>,
    /// Nodes with replicas that may be released, and when each was last read.
    copies: BTreeMap<NodeId, MonoTime>,
    /// How many of them are more than the writer asked for.
    surplus: u64,
}

impl Group {
    /// Number of replicas that exist only because objects are hot, or were left over, as far as the group knows.
    pub fn hot_copies(&self) -> u64 {
        self.hot.objects.values().map(|object| object.surplus).sum()
    }

    /// Counts reads by other hosts, and starts copies to their nodes.
    pub fn remote_reads(&mut self, now: Now, node: NodeId, reads: &RemoteReads, effects: &mut Effects) {
        self.hot.now = now.mono;
        if self.config.hot_copy_bytes == 0 {
            return;
        }
        let Some(&index) = self.by_name.get(&(node, reads.segment)) else { return };
        let Some(segment) = self.segments[index as usize].as_ref() else { return };
        if segment.generation != reads.generation || reads.slot.0 >= segment.slot_count() {
            return;
        }
        let SlotState::Object(at) = segment.slot(reads.slot.0) else { return };
        let record = *self.slab.get(at);
        if record.epoch() != reads.epoch || record.has(RecordFlag::Writing) || self.stripes(&record) != 1 {
            return;
        }
        let least = self.config.hot_copy_bytes.max(READS_MIN.saturating_mul(record.object_len()));
        let Some(object) = self.hot.object(record.id(), record.epoch()) else { return };
        if object.readers.len() >= READERS_MAX && !object.readers.contains_key(&reads.reader) {
            return;
        }
        let counted = object.readers.entry(reads.reader).or_default();
        *counted = counted.saturating_add(reads.bytes);
        if *counted >= least && self.copy_to_reader(at, reads.reader, effects).is_ok() {
            self.hot.object(record.id(), record.epoch()).map(|object| object.readers.remove(&reads.reader));
        }
    }

    /// Starts a copy of a hot object to a node whose host reads it.
    fn copy_to_reader(
        &mut self,
        at: RecordRef,
        reader: NodeId,
        effects: &mut Effects,
    ) -> Result<(), NotStarted> {
        let record = *self.slab.get(at);
        let replicas = self.replica_positions(&record);
        let is_there = replicas.iter().any(|&(node, _)| node == reader);
        if is_there || replicas.len() >= REPLICAS_MAX {
            return Err(NotStarted::Unsuitable);
        }
        let &(_, position) = replicas.first().ok_or(NotStarted::Unsuitable)?;
        let units = self.units_at(&record, position);
        let memory: u64 = self.candidates.iter().map(|candidate| u64::from(candidate.units)).sum();
        if (self.hot.copied_units + units) * SHARE > memory
            && !moontide_rt::mutation_enabled("hot-copies-unlimited")
        {
            return Err(NotStarted::NoSpace);
        }
        let tenant = self.tenants.get(record.tenant());
        if tenant.quota.bytes_max > 0 && tenant.bytes + units * UNIT_BYTES > tenant.quota.bytes_max {
            return Err(NotStarted::NoSpace);
        }
        let of_reader = |index: &&u32| !self.segment(**index).is_disk();
        let targets: Vec<u32> = self
            .nodes
            .get(&reader)
            .into_iter()
            .flat_map(|node| &node.segments)
            .filter(of_reader)
            .copied()
            .collect();
        let started = self.start_copy(at, position, CopyPurpose::Hot, CopyTargets::Of(&targets), effects);
        // Nothing is evicted for it: victims may be on any node. The next report tries again.
        if started.is_ok() {
            self.hot.copied_units += units;
        }
        started
    }

    /// Handles the end of a copy to a reader. It was read a moment ago, or it would not have been made.
    pub(super) fn hot_copy_done(&mut self, at: RecordRef, node: NodeId) {
        let (record, now) = (*self.slab.get(at), self.hot.now);
        if let Some(object) = self.hot.object(record.id(), record.epoch()) {
            object.copies.insert(node, now);
            object.surplus += 1;
        }
    }

    /// Lists an object that has more replicas than its writer asked for. They are released unless they are read.
    pub(super) fn note_surplus(&mut self, at: RecordRef, now: MonoTime) {
        let record = *self.slab.get(at);
        if record.has(RecordFlag::Writing) || self.stripes(&record) != 1 {
            return;
        }
        let replicas = self.replica_positions(&record);
        if replicas.len() <= self.wanted_replicas(&record) {
            return;
        }
        if let Some(object) = self.hot.object(record.id(), record.epoch()) {
            for (node, _) in replicas {
                object.copies.entry(node).or_insert(now);
            }
        }
    }

    /// Lists an object that was moved if it has more replicas than its writer asked for.
    pub(super) fn surplus_moved(&mut self, at: RecordRef) {
        self.note_surplus(at, self.hot.now);
    }

    /// Remembers that a replica was read, if it is a copy.
    pub(super) fn note_copy_read(&mut self, at: RecordRef, node: NodeId, now: Now) {
        if self.hot.objects.is_empty() {
            return;
        }
        let id = self.slab.get(at).id();
        if let Some(read_at) = self.hot.objects.get_mut(&id).and_then(|object| object.copies.get_mut(&node)) {
            *read_at = now.mono;
        }
    }

    /// Continues the review of the hot objects, or begins one if it is time: forgets old reads, and releases copies that are not
    /// read.
    pub(super) fn step_hot_objects(&mut self, now: Now, effects: &mut Effects) {
        self.hot.now = now.mono;
        if self.hot.reviewed.is_none() {
            if self.hot.review_at > now.mono {
                return;
            }
            self.hot.review_at = now.mono.after(REVIEW_INTERVAL);
            self.hot.reviewed = Some(Review::default());
        }
        let Some(Review { after, mut units }) = self.hot.reviewed else { return };
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let ids: Vec<ObjectId> =
            self.hot.objects.range((start, Bound::Unbounded)).map(|(&id, _)| id).take(REVIEWED_MAX).collect();
        for &id in &ids {
            let Some(mut object) = self.hot.objects.remove(&id) else { continue };
            if let Some(copied) = self.review(id, &mut object, now, effects) {
                units += copied;
                self.hot.objects.insert(id, object);
            }
        }
        if ids.len() == REVIEWED_MAX {
            self.hot.reviewed = Some(Review { after: ids.last().copied(), units });
        } else {
            self.hot.reviewed = None;
            self.hot.copied_units = units + self.hot_units_in_flight();
        }
    }

    /// Reviews one object. Returns the units of its copies; `None` if it is not hot any more.
    fn review(
        &mut self,
        id: ObjectId,
        object: &mut HotObject,
        now: Now,
        effects: &mut Effects,
    ) -> Option<u64> {
        let at = self.find_id(id).filter(|&at| self.slab.get(at).epoch() == object.epoch)?;
        object.readers.retain(|_, bytes| {
            *bytes -= bytes.div_ceil(FORGET);
            *bytes > 0
        });
        let pressed = self.evicting || self.requested_units > 0;
        let idle = self.config.hot_copy_idle;
        let idle = if pressed { idle.min(IDLE_UNDER_PRESSURE) } else { idle };
        let copies: Vec<(NodeId, MonoTime)> =
            object.copies.iter().map(|(&node, &read_at)| (node, read_at)).collect();
        for (node, read_at) in copies {
            let is_idle = now.mono.since(read_at) >= idle;
            if self.copy_has_gone(at, node) || is_idle && self.release_copy(at, node, effects) {
                object.copies.remove(&node);
            }
        }
        if object.readers.is_empty() && object.copies.is_empty() {
            return None;
        }
        let record = self.slab.get(at);
        // All replicas may be listed, if it is not known which of them were copies.
        let surplus = self.replica_positions(record).len().saturating_sub(self.wanted_replicas(record));
        object.surplus = surplus.min(object.copies.len()) as u64;
        Some(record.object_len().div_ceil(UNIT_BYTES) * object.surplus)
    }

    /// Whether a node no longer has a replica in memory.
    fn copy_has_gone(&self, at: RecordRef, node: NodeId) -> bool {
        self.replica_positions(self.slab.get(at)).iter().all(|&(of, _)| of != node)
    }

    /// Releases the replica of a node, unless the object would have fewer than its writer asked for. Returns whether the
    /// replica is no longer one to release.
    fn release_copy(&mut self, at: RecordRef, node: NodeId, effects: &mut Effects) -> bool {
        let record = *self.slab.get(at);
        // An offload in progress reads the record; the next review finds it.
        if record.has(RecordFlag::Writing) || record.has(RecordFlag::Offloading) {
            return false;
        }
        let replicas = self.replica_positions(&record);
        let least = match moontide_rt::mutation_enabled("last-replica-released") {
            true => 0,
            false => self.wanted_replicas(&record),
        };
        if replicas.len() <= least {
            return true;
        }
        let Some(&(_, position)) = replicas.iter().find(|&&(of, _)| of == node) else { return true };
        // Of several replicas in one rack, one is superfluous; the only one in its rack is not.
        let domains = |except: Option<usize>| {
            let left = replicas.iter().map(|&(_, of)| of).filter(|&of| Some(of) != except);
            self.domains_of(&record, left.map(|of| self.location(&record, of)))
        };
        if domains(Some(position)) < domains(None).min(least) {
            return false;
        }
        // One-sided readers may rely on it for as long as their lease lasts.
        let leased = Some(self.leased_until(&record)).filter(|until| until.0 > 0);
        self.release_location(at, position, leased, effects);
        self.locations_changed(at);
        self.stats.copies_released += 1;
        true
    }

    /// Number of replicas that the writer asked for.
    fn wanted_replicas(&self, record: &Record) -> usize {
        1 + self.extra_replicas(record)
    }

    /// Nodes that have an object of one stripe in memory, each with the position of the location.
    fn replica_positions(&self, record: &Record) -> Vec<(NodeId, usize)> {
        let is_memory = |segment: &Segment| segment.medium == Medium::Memory;
        let positions = (0..self.location_count(record)).filter_map(|position| {
            let location = self.location(record, position);
            (self.is_readable(location) && is_memory(self.segment(location.segment)))
                .then(|| (self.segment(location.segment).node, position))
        });
        positions.collect()
    }

    fn units_at(&self, record: &Record, position: usize) -> u64 {
        let location = self.location(record, position);
        self.segment(location.segment).extent(location.block).units.into()
    }
}

impl HotObjects {
    /// Returns the state of an object, empty if there was none; `None` if there are too many.
    fn object(&mut self, id: ObjectId, epoch: Epoch) -> Option<&mut HotObject> {
        if self.objects.len() >= OBJECTS_MAX && !self.objects.contains_key(&id) {
            return None;
        }
        let object = self.objects.entry(id).or_default();
        if object.epoch != epoch {
            *object = HotObject { epoch, ..HotObject::default() };
        }
        Some(object)
    }
}
