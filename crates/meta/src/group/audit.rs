//! [`Group::audit`]: checks the whole state against the invariants. For tests and simulation.

use std::collections::HashSet;

use moontide_types::ObjectId;
use moontide_types::limits::UNIT_BYTES;
use moontide_types::{Epoch, Extent, NodeId, SegmentId, SlotId};

use super::{Group, UnansweredKill, disk};
use crate::ids::{NONE, RecordRef};
use crate::record::RecordFlag;
use crate::segment::{Segment, SegmentPhase, SlotState};
use crate::segment_sizes::SegmentSizes;
use crate::time::Now;

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{invariant}")]
pub struct Violation {
    /// Description of the invariant and where it is violated.
    pub invariant: String,
}

/// Summary of a passed audit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Complete objects.
    pub complete: u64,
    /// Objects being written.
    pub writing: u64,
    /// Every extent that is not free, with its owner; draining extents included.
    pub ranges: Vec<AuditedExtent>,
}

/// An extent of a segment that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditedExtent {
    /// Node that owns the segment.
    pub node: NodeId,
    /// Segment on the node.
    pub segment: SegmentId,
    /// Slot of the extent.
    pub slot: SlotId,
    /// The extent.
    pub extent: Extent,
    /// Version that uses it.
    pub epoch: Epoch,
    /// Object that uses it.
    pub id: ObjectId,
    /// Released, and not free yet.
    pub draining: bool,
    /// A lease on it has not ended.
    pub leased: bool,
}

fn check(holds: bool, violation: impl FnOnce() -> String) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation { invariant: violation() }) }
}

impl Group {
    /// Checks all invariants that apply between two commands. Proportional to the number of objects.
    pub fn audit(&self, now: Now) -> Result<Audit, Violation> {
        let mut audit = Audit::default();
        let objects = self.audit_objects()?;
        for at in objects {
            if self.slab.get(at).has(RecordFlag::Writing) {
                audit.writing += 1;
            } else {
                audit.complete += 1;
            }
        }
        for index in 0..self.segments.len() as u32 {
            if self.segments[index as usize].is_some() {
                self.audit_segment(index, now, &mut audit)?;
            }
        }
        self.audit_tenants()?;
        self.audit_kills()?;
        for &(_, segment, slot) in self.leased_drains.keys() {
            let draining =
                self.segments[segment as usize].as_ref().is_some_and(|s| s.drains.contains_key(&slot));
            check(draining, || {
                format!("leased drain of segment {segment}, slot {slot}: slot is not draining")
            })?;
        }
        for (at, candidate) in self.candidates.iter().enumerate() {
            let segment = self.segment(candidate.index);
            let consistent = segment.candidate == Some(at as u32)
                && segment.phase == SegmentPhase::Serving
                && segment.free_units() == candidate.free_units;
            check(consistent, || format!("candidate {at} does not match its segment"))?;
        }
        let mut sizes = SegmentSizes::default();
        self.candidates.iter().for_each(|candidate| sizes.add(self.segment(candidate.index)));
        check(sizes == self.sizes, || format!("sizes are {:?}, expected {sizes:?}", self.sizes))?;
        Ok(audit)
    }

    /// Every removal waits for kills that are unanswered; every unconfirmed version drains, or its kill is unanswered.
    fn audit_kills(&self) -> Result<(), Violation> {
        for (version, &UnansweredKill { id, .. }) in &self.unanswered_kills {
            let mounted = self.segments[version.segment as usize].as_ref().is_some_and(Segment::is_readable);
            check(mounted, || format!("kill of {id} in a segment that is gone is still awaited"))?;
            check(self.unconfirmed_kills.contains(&(id, *version)), || {
                format!("{id}: unanswered kill of a version that counts as dead")
            })?;
        }
        let queued = self.unanswered_kills.values().filter(|kill| kill.is_queued).count();
        check(queued <= self.refused_kills.len(), || "a refused kill is not in the queue".into())?;
        for version in self.kills.keys() {
            check(self.unanswered_kills.contains_key(version), || {
                format!("a removal waits for a kill that was not sent: {version:?}")
            })?;
        }
        for (id, version) in &self.unconfirmed_kills {
            let segment = self.segments[version.segment as usize].as_ref();
            let drain = segment.and_then(|segment| segment.drains.get(&version.slot));
            let draining = drain.is_some_and(|drain| drain.epoch == version.epoch);
            check(draining || self.unanswered_kills.contains_key(version), || {
                format!("{id}: {version:?} is unconfirmed, but neither draining nor killed")
            })?;
        }
        Ok(())
    }

    /// Returns all records, after checking that each is found by its id, is in exactly one queue, and owns all of its
    /// locations' slots.
    fn audit_objects(&self) -> Result<Vec<RecordRef>, Violation> {
        let mut objects = vec![];
        let mut cursor = None;
        while let Some(at) = self.slab.previous(cursor) {
            cursor = Some(at);
            objects.push(at);
        }
        check(objects.len() == self.slab.len(), || "wrong length of the slab".into())?;
        check(self.table.len() == self.slab.len(), || "table and slab differ in length".into())?;
        let mut queued = HashSet::new();
        let tenant_queues = self.tenants.iter().flat_map(|(_, tenant)| {
            [&tenant.used_once, &tenant.used_again, &tenant.soft, &tenant.hard, &tenant.on_disk]
        });
        for queue in tenant_queues.chain([&self.writing, &self.offloading]) {
            let (mut len, mut last_use) = (0, 0);
            for at in queue.iter(&self.slab) {
                check(queued.insert(at), || format!("{at:?} is in two queues"))?;
                let used = self.slab.get(at).last_use();
                check(used >= last_use, || format!("{at:?} was used before its predecessor"))?;
                (len, last_use) = (len + 1, used);
            }
            check(len == queue.len(), || "wrong length of a queue".into())?;
        }
        check(queued.len() == objects.len(), || "an object is in no queue".into())?;
        let in_memory = objects.iter().filter(|&&at| self.slab.get(at).is_in_memory()).count() as u64;
        check(in_memory == self.objects_in_memory, || "wrong number of objects in memory".into())?;
        let mut extensions = 0;
        for &at in &objects {
            let record = self.slab.get(at);
            check(self.find_id(record.id()) == Some(at), || format!("{} is not found", record.id()))?;
            extensions += usize::from(record.extension != NONE);
            let (count, stripes) = (self.location_count(record), self.stripes(record));
            check(count.is_multiple_of(stripes), || format!("{} has an incomplete replica", record.id()))?;
            let mut replica_nodes: Vec<HashSet<NodeId>> = vec![HashSet::new(); count / stripes];
            let (mut locations, mut in_memory) = (0, 0);
            for index in 0..count {
                let location = self.location(record, index);
                if location.is_lost() {
                    continue;
                }
                locations += 1;
                let segment = self.segment(location.segment);
                in_memory += usize::from(!segment.is_disk());
                check(segment.slot(location.slot) == SlotState::Object(at), || {
                    format!(
                        "{}: slot {} of segment {} has another owner",
                        record.id(),
                        location.slot,
                        location.segment
                    )
                })?;
                if segment.is_readable() && !segment.is_disk() {
                    replica_nodes[index / stripes].insert(segment.node);
                }
            }
            check(locations > 0, || format!("{} has no location", record.id()))?;
            let on_disk = !record.has(RecordFlag::Writing) && in_memory == 0;
            check(record.has(RecordFlag::OnDisk) == on_disk, || {
                format!("{}: wrong on-disk flag", record.id())
            })?;
            let offload = self.offloads.get(&record.id());
            let offloading = offload.is_some_and(|offload| offload.write_back.is_none());
            check(record.has(RecordFlag::Offloading) == offloading, || {
                format!("{}: offloading flag without offload or vice versa", record.id())
            })?;
            // Replicas placed by this master are on different nodes; reported ones may be on any.
            if !record.has(RecordFlag::Reported) {
                for (a, nodes) in replica_nodes.iter().enumerate() {
                    let apart = replica_nodes[..a].iter().all(|other| other.is_disjoint(nodes));
                    check(apart, || format!("{}: two replicas on one node", record.id()))?;
                }
            }
        }
        check(self.copies_are_consistent(), || "wrong counts of copies".into())?;
        check(self.write_backs_are_consistent(), || "wrong counts of write-backs".into())?;
        let victims = self.offloads.values().filter(|offload| offload.write_back.is_none());
        check(victims.count() as u64 == self.offloading.len(), || {
            "wrong length of the offload queue".into()
        })?;
        let units: u64 = self.offloads.values().map(disk::Offload::units).sum();
        check(units == self.offloading_units, || "wrong sum of offloading units".into())?;
        check(extensions == self.extensions.len(), || "an extension has no record".into())?;
        check(self.cohorts.len() <= extensions, || "a cohort has no member".into())?;
        Ok(objects)
    }

    fn audit_segment(&self, index: u32, now: Now, audit: &mut Audit) -> Result<(), Violation> {
        let segment = self.segment(index);
        let name = || format!("segment {} of node {}", segment.id, segment.node);
        let (mut live, mut reserved, mut draining, mut taken) = (0u64, 0u64, 0u64, 0u32);
        let mut ranges = vec![];
        for slot in 0..segment.slot_count() {
            let range = match segment.slot(slot) {
                SlotState::Free => continue,
                SlotState::Object(at) => {
                    let record = self.slab.get(at);
                    let location = (0..self.location_count(record))
                        .map(|position| self.location(record, position))
                        .find(|location| (location.segment, location.slot) == (index, slot));
                    let Some(location) = location else {
                        return Err(Violation {
                            invariant: format!("{}: record of slot {slot} has no location there", name()),
                        });
                    };
                    let extent = segment.extent(location.block);
                    let writing = record.has(RecordFlag::Writing);
                    *(if writing { &mut reserved } else { &mut live }) += u64::from(extent.units);
                    let leased = !writing && self.is_leased(record, now);
                    self.range(index, slot, extent, record.epoch(), record.id(), false, leased)
                }
                SlotState::Draining => {
                    let Some(drain) = segment.drains.get(&slot) else {
                        return Err(Violation {
                            invariant: format!("{}: draining slot {slot} has no drain", name()),
                        });
                    };
                    let extent = segment.extent(drain.block);
                    check(extent.units == drain.units, || {
                        format!("{}: wrong units of draining slot {slot}", name())
                    })?;
                    draining += u64::from(extent.units);
                    let leased = self.leased_drains.keys().any(|&(until, at_segment, at_slot)| {
                        (at_segment, at_slot) == (index, slot) && until > self.ticker.now(now.mono)
                    });
                    self.range(index, slot, extent, drain.epoch, drain.id, true, leased)
                }
            };
            taken += 1;
            ranges.push(range);
        }
        let counted =
            (segment.live_units.into(), segment.reserved_units.into(), segment.draining_units.into());
        check((live, reserved, draining) == counted, || {
            format!(
                "{}: {live} live, {reserved} reserved, {draining} draining, but counted {counted:?}",
                name()
            )
        })?;
        check(taken == segment.taken_slots, || format!("{}: wrong number of taken slots", name()))?;
        if !matches!(segment.phase, SegmentPhase::Reporting | SegmentPhase::Lost) {
            let free = segment.allocator_free_units();
            check(free == segment.free_units(), || {
                format!("{}: live + reserved + draining + free differs from units", name())
            })?;
        }
        ranges.sort_by_key(|range| range.extent.start);
        for pair in ranges.windows(2) {
            let apart = pair[0].extent.end() <= u64::from(pair[1].extent.start);
            check(apart || segment.phase != SegmentPhase::Serving, || {
                format!("{}: {} and {} overlap", name(), pair[0].extent, pair[1].extent)
            })?;
        }
        audit.ranges.extend(ranges);
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "a literal of seven fields")]
    fn range(
        &self,
        index: u32,
        slot: u32,
        extent: Extent,
        epoch: Epoch,
        id: ObjectId,
        draining: bool,
        leased: bool,
    ) -> AuditedExtent {
        let segment = self.segment(index);
        AuditedExtent {
            node: segment.node,
            segment: segment.id,
            slot: SlotId(slot),
            extent,
            epoch,
            id,
            draining,
            leased,
        }
    }

    /// The bytes of all tenants sum to the live and reserved bytes of all segments.
    fn audit_tenants(&self) -> Result<(), Violation> {
        let (mut bytes, mut objects) = (0, 0);
        for (_, tenant) in self.tenants.iter() {
            bytes += tenant.bytes;
            objects += tenant.objects;
        }
        check(objects == self.slab.len() as u64, || {
            "objects of the tenants do not sum to all objects".into()
        })?;
        let units = self.segments.iter().flatten();
        let units: u64 = units.map(|s| u64::from(s.live_units) + u64::from(s.reserved_units)).sum();
        check(bytes == units * UNIT_BYTES, || {
            format!("tenants have {bytes} bytes, segments {}", units * UNIT_BYTES)
        })
    }
}
