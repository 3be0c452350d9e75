//! [`Group::audit`]: walks over everything and holds it against the invariants. For tests and simulation.

use std::collections::HashSet;

use moontide_types::ObjectId;
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::{Epoch, Extent, NodeId, SegmentId, SlotId};

use super::{Group, disk};
use crate::record::{Flag, NONE};
use crate::segment::{SegmentPhase, SlotState};
use crate::sizes::Sizes;
use crate::slab::Ref;
use crate::time::Now;

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Violation {
    /// Which one, and where.
    pub what: String,
}

/// What the walk has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Complete objects.
    pub complete: u64,
    /// Objects being written.
    pub writing: u64,
    /// Every range that is not free, with who has it; draining ranges included.
    pub ranges: Vec<Range>,
}

/// A range of a segment that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The node.
    pub node: NodeId,
    /// The segment.
    pub segment: SegmentId,
    /// The slot.
    pub slot: SlotId,
    /// The range.
    pub extent: Extent,
    /// The version that has it.
    pub epoch: Epoch,
    /// The object.
    pub id: ObjectId,
    /// Given up, and not free yet.
    pub draining: bool,
    /// A lease on it has not ended.
    pub leased: bool,
}

fn hold(holds: bool, what: impl FnOnce() -> String) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation { what: what() }) }
}

impl Group {
    /// Checks everything that must hold between two commands. Proportional to the number of objects.
    pub fn audit(&self, now: Now) -> Result<Audit, Violation> {
        let mut audit = Audit::default();
        let objects = self.audit_objects()?;
        for at in objects {
            if self.slab.get(at).has(Flag::Writing) {
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
        for &(_, segment, slot) in self.leased_drains.keys() {
            let there =
                self.segments[segment as usize].as_ref().is_some_and(|s| s.drains.contains_key(&slot));
            hold(there, || format!("a leased drain of segment {segment}, slot {slot} drains nothing"))?;
        }
        for (at, candidate) in self.candidates.iter().enumerate() {
            let segment = self.segment(candidate.index);
            let right = segment.candidate == Some(at as u32)
                && segment.phase == SegmentPhase::Serving
                && segment.free_units() == candidate.free_units;
            hold(right, || format!("candidate {at} is not its segment"))?;
        }
        let mut sizes = Sizes::default();
        self.candidates.iter().for_each(|candidate| sizes.add(self.segment(candidate.index)));
        hold(sizes == self.sizes, || format!("sizes are {:?}, not {sizes:?}", self.sizes))?;
        Ok(audit)
    }

    /// All records, each found by its id, in one queue, and named by all of its places.
    fn audit_objects(&self) -> Result<Vec<Ref>, Violation> {
        let mut objects = vec![];
        let mut cursor = None;
        while let Some(at) = self.slab.before(cursor) {
            cursor = Some(at);
            objects.push(at);
        }
        hold(objects.len() == self.slab.len(), || "the slab counts wrongly".into())?;
        hold(self.table.len() == self.slab.len(), || "table and slab differ in length".into())?;
        let mut queued = HashSet::new();
        let tenant_queues = self
            .tenants
            .iter()
            .flat_map(|(_, tenant)| [&tenant.ordinary, &tenant.soft, &tenant.hard, &tenant.on_disk]);
        for queue in tenant_queues.chain([&self.writing, &self.offloading]) {
            let mut len = 0;
            for at in queue.iter(&self.slab) {
                hold(queued.insert(at), || format!("{at:?} stands in two queues"))?;
                len += 1;
            }
            hold(len == queue.len(), || "a queue counts wrongly".into())?;
        }
        hold(queued.len() == objects.len(), || "an object stands in no queue".into())?;
        let mut extras = 0;
        for &at in &objects {
            let record = self.slab.get(at);
            hold(self.find_id(record.id()) == Some(at), || format!("{} is not found", record.id()))?;
            extras += usize::from(record.extra != NONE);
            let (count, stripes) = (self.place_count(record), self.stripes(record));
            hold(count.is_multiple_of(stripes), || format!("{} has half a replica", record.id()))?;
            let mut replica_nodes: Vec<HashSet<NodeId>> = vec![HashSet::new(); count / stripes];
            let (mut places, mut in_memory) = (0, 0);
            for index in 0..count {
                let place = self.place(record, index);
                if place.is_lost() {
                    continue;
                }
                places += 1;
                let segment = self.segment(place.segment);
                in_memory += usize::from(!segment.is_disk());
                hold(segment.slot(place.slot) == SlotState::Object(at), || {
                    format!(
                        "{}: slot {} of segment {} is not its own",
                        record.id(),
                        place.slot,
                        place.segment
                    )
                })?;
                if segment.is_readable() && !segment.is_disk() {
                    replica_nodes[index / stripes].insert(segment.node);
                }
            }
            hold(places > 0, || format!("{} has no place at all", record.id()))?;
            let on_disk = !record.has(Flag::Writing) && in_memory == 0;
            hold(record.has(Flag::OnDisk) == on_disk, || format!("{} is not where it seems", record.id()))?;
            let offloading = self.offloads.contains_key(&record.id());
            hold(record.has(Flag::Offloading) == offloading, || format!("{}: a lost offload", record.id()))?;
            // What was placed here is on different nodes; reports bring what they bring.
            if !record.has(Flag::Reported) {
                for (a, nodes) in replica_nodes.iter().enumerate() {
                    let apart = replica_nodes[..a].iter().all(|other| other.is_disjoint(nodes));
                    hold(apart, || format!("{}: two replicas on one node", record.id()))?;
                }
            }
        }
        hold(self.offloads.len() as u64 == self.offloading.len(), || "offloads are counted wrongly".into())?;
        let units: u64 = self.offloads.values().map(disk::Offload::units).sum();
        hold(units == self.offloading_units, || "units of offloads are counted wrongly".into())?;
        hold(extras == self.extras.len(), || "an extra belongs to nobody".into())?;
        hold(self.cohorts.len() <= extras, || "a cohort has no member".into())?;
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
                    let place = (0..self.place_count(record))
                        .map(|which| self.place(record, which))
                        .find(|place| (place.segment, place.slot) == (index, slot));
                    let Some(place) = place else {
                        return Err(Violation { what: format!("{}: slot {slot} names a stranger", name()) });
                    };
                    let extent = segment.extent(place.block);
                    let writing = record.has(Flag::Writing);
                    *(if writing { &mut reserved } else { &mut live }) += u64::from(extent.units);
                    let leased = !writing && self.is_leased(record, now);
                    self.range(index, slot, extent, record.epoch(), record.id(), false, leased)
                }
                SlotState::Draining => {
                    let Some(drain) = segment.drains.get(&slot) else {
                        return Err(Violation { what: format!("{}: slot {slot} drains nothing", name()) });
                    };
                    let extent = segment.extent(drain.block);
                    hold(extent.units == drain.units, || format!("{}: slot {slot} drains too much", name()))?;
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
        hold((live, reserved, draining) == counted, || {
            format!(
                "{}: {live} live, {reserved} reserved, {draining} draining, but counted {counted:?}",
                name()
            )
        })?;
        hold(taken == segment.taken_slots, || format!("{}: slots are counted wrongly", name()))?;
        if !matches!(segment.phase, SegmentPhase::Reporting | SegmentPhase::Lost) {
            let free = segment.allocator_free_units();
            hold(free == segment.free_units(), || {
                format!("{}: live + reserved + draining + free is not all", name())
            })?;
        }
        ranges.sort_by_key(|range| range.extent.start);
        for pair in ranges.windows(2) {
            let apart = pair[0].extent.end() <= u64::from(pair[1].extent.start);
            hold(apart || segment.phase != SegmentPhase::Serving, || {
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
    ) -> Range {
        let segment = self.segment(index);
        Range {
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

    /// The bytes of all tenants are the live and reserved bytes of all segments.
    fn audit_tenants(&self) -> Result<(), Violation> {
        let (mut bytes, mut objects) = (0, 0);
        for (_, tenant) in self.tenants.iter() {
            bytes += tenant.bytes;
            objects += tenant.objects;
        }
        hold(objects == self.slab.len() as u64, || "the tenants' objects are not all objects".into())?;
        let units = self.segments.iter().flatten();
        let units: u64 = units.map(|s| u64::from(s.live_units) + u64::from(s.reserved_units)).sum();
        hold(bytes == units * UNIT_BYTES, || {
            format!("the tenants have {bytes} bytes, the segments {}", units * UNIT_BYTES)
        })
    }
}
