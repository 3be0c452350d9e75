//! Removing: nothing is acknowledged before the nodes have killed what they have.
//!
//! Otherwise a master that crashes right after its answer would be rebuilt from reports that still contain the
//! object, and what was removed would be back. Nodes that cannot be reached leave a tombstone here: when they come
//! back, what they report of that version is killed.

use hashbrown::hash_map::Entry;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, NodeId, ObjectId, SegmentId, SlotId};

use super::lookup::{Ask, ObjectState};
use super::{Group, Waiting};
use crate::effect::{Effect, Effects, OrderKind, OrderOutcome, Waiter};
use crate::job::{JOBS_REMEMBERED, JOBS_RUNNING_MAX, Job, JobId, JobKind, JobState, JobStatus};
use crate::record::Flag;
use crate::slab::Ref;
use crate::tenant::TenantIx;
use crate::time::Now;

/// The answer of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Removal {
    /// The object is out of the index. Nodes are being told; [`Effect::Removed`] follows.
    Waiting,
    /// That is all: nothing, or why it was not or not yet certainly removed.
    Done(Option<ErrorCode>),
}

/// Tombstones of one group at most; beyond that a removal that needs one is refused as `Busy`. A million take some
/// 50 MB and last for [`absence_max`](crate::GroupConfig::absence_max) at 16,000 removals a second.
const TOMBSTONES_MAX: usize = 1 << 20;

impl Group {
    /// Removes an object. Without `force`, one that is leased or pinned hard stays, and so does one that is being
    /// written.
    pub fn remove(
        &mut self,
        now: Now,
        ask: &Ask<'_>,
        force: bool,
        waiter: Waiter,
        effects: &mut Effects,
    ) -> Removal {
        let unsettled = self.is_unsettled(now) && !moontide_types::planted("removal-certain-while-unsettled");
        let at = match self.find(ask) {
            Some(at) => at,
            None if unsettled => return Removal::Done(Some(self.entomb(ask.id))),
            None => {
                self.remember_for_disks(ask.id, self.newest_epoch(), now);
                return self.remove_undead(ask.id, waiter, effects);
            }
        };
        let record = *self.slab.get(at);
        match self.state_of(&record, now) {
            ObjectState::Writing if !force => return Removal::Done(Some(ErrorCode::InProgress)),
            ObjectState::Complete
                if !force && (record.pin() == PinClass::Hard || self.is_leased(&record, now)) =>
            {
                return Removal::Done(Some(ErrorCode::Leased));
            }
            _ => {}
        }
        let gone = self.state_of(&record, now) == ObjectState::Gone;
        if unsettled && self.tombstones.len() >= TOMBSTONES_MAX {
            return Removal::Done(Some(ErrorCode::Busy));
        }
        self.remember_for_disks(ask.id, self.newest_epoch(), now);
        let removal = self.kill_object(at, now, effects);
        if !gone {
            self.stats.removed_objects += 1;
        }
        if unsettled {
            self.entomb(ask.id);
        }
        let pending = unsettled || removal.unreachable;
        if removal.kills == 0 || moontide_types::planted("removal-before-kill") {
            let code = if pending {
                Some(ErrorCode::Pending)
            } else if gone {
                Some(ErrorCode::NotFound)
            } else {
                None
            };
            return Removal::Done(code);
        }
        self.wait_for(
            removal.number,
            Waiting {
                id: record.id(),
                epoch: record.epoch(),
                left: removal.kills,
                waiter: Some(waiter),
                replaced_by: None,
                pending,
            },
        );
        Removal::Waiting
    }

    /// An object that was evicted is gone for good only when its nodes have said so.
    fn remove_undead(&mut self, id: ObjectId, waiter: Waiter, effects: &mut Effects) -> Removal {
        self.removal_count += 1;
        let number = self.removal_count;
        let left = self.kill_undead(id, number, effects);
        if left == 0 || moontide_types::planted("evicted-taken-for-dead") {
            return Removal::Done(Some(ErrorCode::NotFound));
        }
        let epoch = self.newest_epoch();
        self.wait_for(
            number,
            Waiting { id, epoch, left, waiter: Some(waiter), replaced_by: None, pending: false },
        );
        Removal::Waiting
    }

    /// Starts a job that removes many objects.
    pub fn start_job(&mut self, tenant: TenantIx, kind: JobKind, force: bool) -> Result<JobId, ErrorCode> {
        let running = self.jobs.values().filter(|job| job.status.state == JobState::Running).count();
        if running >= JOBS_RUNNING_MAX {
            return Err(ErrorCode::Busy);
        }
        self.job_count += 1;
        let id = JobId(self.job_count);
        let status = JobStatus { state: JobState::Running, scanned: 0, removed: 0, kept: 0, code: None };
        let newest = self.newest_epoch();
        self.jobs.insert(id, Job { kind, tenant, force, newest, cursor: None, status });
        let finished = self.jobs.iter().filter(|(_, job)| job.status.state == JobState::Done);
        let finished: Vec<JobId> = finished.map(|(&id, _)| id).collect();
        for old in &finished[..finished.len().saturating_sub(JOBS_REMEMBERED)] {
            self.jobs.remove(old);
        }
        Ok(id)
    }

    /// How far a job is.
    pub fn job(&self, job: JobId) -> Option<JobStatus> {
        self.jobs.get(&job).map(|job| job.status)
    }

    /// Goes on with the running jobs; looks at no more than `budget` objects. The answer is how many it looked at.
    pub(super) fn step_jobs(&mut self, now: Now, budget: usize, effects: &mut Effects) -> usize {
        let mut looked = 0;
        let running = self.jobs.iter().filter(|(_, job)| job.status.state == JobState::Running);
        let running: Vec<JobId> = running.map(|(&id, _)| id).collect();
        for id in running {
            // Taken out while it runs, so that it and the group can be changed side by side.
            let mut job = self.jobs.remove(&id).expect("it was just listed");
            while looked < budget {
                looked += 1;
                let Some(at) = self.slab.before(job.cursor) else {
                    job.status.state = JobState::Done;
                    break;
                };
                job.cursor = Some(at);
                job.status.scanned += 1;
                self.job_visits(&mut job, at, now, effects);
            }
            self.jobs.insert(id, job);
        }
        looked
    }

    fn job_visits(&mut self, job: &mut Job, at: Ref, now: Now, effects: &mut Effects) {
        let (record, key) = self.slab.with_key(at);
        if record.tenant() != job.tenant || record.epoch() > job.newest || !job.kind.matches(key) {
            return;
        }
        let record = *record;
        let held =
            record.has(Flag::Writing) || record.pin() == PinClass::Hard || self.is_leased(&record, now);
        if held && !job.force {
            job.status.kept += 1;
            return;
        }
        let unsettled = self.is_unsettled(now);
        if unsettled && self.entomb(record.id()) == ErrorCode::Busy {
            job.status.kept += 1;
            return;
        }
        self.remember_for_disks(record.id(), record.epoch(), now);
        let removal = self.kill_object(at, now, effects);
        if removal.kills > 0 {
            self.wait_for(
                removal.number,
                Waiting {
                    id: record.id(),
                    epoch: record.epoch(),
                    left: removal.kills,
                    waiter: None,
                    replaced_by: None,
                    pending: removal.unreachable,
                },
            );
        }
        if unsettled || removal.unreachable {
            job.status.code = Some(ErrorCode::Pending);
        }
        job.status.removed += 1;
        self.stats.removed_objects += 1;
    }

    /// Makes room for a new version under the same id, whose put waits until nodes have killed the old one.
    pub(super) fn replace_object(&mut self, at: Ref, now: Now, by: ObjectId, effects: &mut Effects) {
        let record = *self.slab.get(at);
        let mark = self.departed();
        if record.has(Flag::Writing) {
            // Nobody can have read it.
            self.drop_object(at, now, effects);
            self.departs_if_not_put(by, mark);
            return;
        }
        if self.is_unsettled(now) && self.tombstones.len() < TOMBSTONES_MAX {
            // Nodes that have yet to report may have it too; the new version may be evicted before they do.
            let removed = self.tombstones.entry(record.id()).or_insert(record.epoch());
            *removed = record.epoch().max(*removed);
        }
        self.remember_for_disks(record.id(), record.epoch(), now);
        let removal = self.kill_object(at, now, effects);
        self.departs_if_not_put(by, mark);
        if removal.kills == 0 {
            return;
        }
        *self.replacing.entry(by).or_insert(0) += 1;
        self.wait_for(
            removal.number,
            Waiting {
                id: record.id(),
                epoch: record.epoch(),
                left: removal.kills,
                waiter: None,
                replaced_by: Some(by),
                pending: removal.unreachable,
            },
        );
    }

    /// A node has answered an order. `Kill` and `Reclaim` of anything else than what drains are of the past.
    pub fn order_outcome(
        &mut self,
        (node, segment): (NodeId, SegmentId),
        kind: OrderKind,
        slot: SlotId,
        epoch: Epoch,
        outcome: OrderOutcome,
        effects: &mut Effects,
    ) {
        let Some(&index) = self.by_name.get(&(node, segment)) else { return };
        if let OrderOutcome::Refused(_) = outcome {
            self.stats.orders_refused += 1;
        }
        let of_this_drain = |drain: Option<&crate::segment::Drain>| drain.is_some_and(|d| d.epoch == epoch);
        match (kind, outcome) {
            (OrderKind::Kill, _) => {
                // A node that has no such version has nothing to kill; any other refusal leaves it alive.
                let alive = match outcome {
                    OrderOutcome::Accepted | OrderOutcome::Done => false,
                    OrderOutcome::Refused(code) => !matches!(
                        code,
                        ErrorCode::StaleEpoch
                            | ErrorCode::StaleGeneration
                            | ErrorCode::Gone
                            | ErrorCode::NotFound
                    ),
                };
                if !of_this_drain(self.segment(index).drains.get(&slot.0)) {
                    return;
                }
                if alive && !moontide_types::planted("refused-kill-believed") {
                    self.kill_refused(index, slot.0, effects);
                } else {
                    self.killed(index, slot.0, false, effects);
                }
            }
            (OrderKind::Reclaim, OrderOutcome::Done) => {
                if of_this_drain(self.segment(index).drains.get(&slot.0)) {
                    self.place_freed(index, slot.0, epoch, effects);
                }
            }
            (OrderKind::Reclaim, OrderOutcome::Accepted) => {
                if of_this_drain(self.segment(index).drains.get(&slot.0)) {
                    if moontide_types::planted("range-free-when-accepted") {
                        return self.place_freed(index, slot.0, epoch, effects);
                    }
                    self.killed(index, slot.0, false, effects);
                }
            }
            (OrderKind::Reclaim, OrderOutcome::Refused(_)) => {}
            (OrderKind::Offload, _) => self.offload_answered(index, slot.0, epoch, outcome),
            (OrderKind::Promote { stripe, .. }, _) => {
                self.promotion_answered(index, slot.0, (epoch, stripe), outcome, effects);
            }
        }
    }

    /// The node says that a slot is free from this epoch on.
    pub(super) fn place_freed(&mut self, index: u32, slot: u32, epoch: Epoch, effects: &mut Effects) {
        // What is said of an earlier owner of the slot says nothing about this one.
        if self.segment(index).drains.get(&slot).is_none_or(|drain| epoch < drain.epoch) {
            return;
        }
        // What is free is certainly dead.
        self.killed(index, slot, false, effects);
        if self.segment_mut(index).freed(slot, epoch) {
            self.stats.reclaimed += 1;
            self.note_free(index);
        }
    }

    /// What drains in a slot is dead, or nobody will ever say so (`unreachable`). Removals may wait for it.
    pub(super) fn killed(&mut self, index: u32, slot: u32, unreachable: bool, effects: &mut Effects) {
        if let Some(drain) = self.segment(index).drains.get(&slot) {
            self.undead.remove(&(drain.id, index, slot));
        }
        for number in self.kills.remove(&(index, slot)).unwrap_or_default() {
            self.kill_answered(number, unreachable, effects);
        }
    }

    /// Whoever waits is told that it is not certain; the slot is not forgotten, and its reclaim is under way.
    fn kill_refused(&mut self, index: u32, slot: u32, effects: &mut Effects) {
        for number in self.kills.remove(&(index, slot)).unwrap_or_default() {
            self.kill_answered(number, true, effects);
        }
    }

    fn kill_answered(&mut self, number: u64, unreachable: bool, effects: &mut Effects) {
        let Entry::Occupied(mut entry) = self.removals.entry(number) else { return };
        let waiting = entry.get_mut();
        waiting.pending |= unreachable;
        waiting.left -= 1;
        if unreachable {
            // The node may come back with it. There are no more of these than there were slots on the node.
            let removed = self.tombstones.entry(waiting.id).or_insert(waiting.epoch);
            *removed = waiting.epoch.max(*removed);
        }
        if waiting.left > 0 {
            return;
        }
        let waiting = entry.remove();
        if let Some(waiter) = waiting.waiter {
            // A disk that has come back meanwhile may have it, too.
            let pending = waiting.pending || self.disks_are_returning();
            effects.push(Effect::Removed { waiter, code: pending.then_some(ErrorCode::Pending) });
        }
        if let Some(id) = waiting.replaced_by {
            self.replaced(id);
        }
    }

    /// Whether some version of an object was given up and its node has not said that it is dead.
    pub(super) fn has_undead(&self, id: ObjectId) -> bool {
        self.undead.range((id, 0, 0)..=(id, u32::MAX, u32::MAX)).next().is_some()
    }

    /// Kills what drains of an object and may be alive on its node, under the removal's number.
    fn kill_undead(&mut self, id: ObjectId, number: u64, effects: &mut Effects) -> u32 {
        let undead: Vec<(u32, u32)> = self
            .undead
            .range((id, 0, 0)..=(id, u32::MAX, u32::MAX))
            .map(|&(_, segment, slot)| (segment, slot))
            .collect();
        for &(segment, slot) in &undead {
            let epoch = self.segment(segment).drains[&slot].epoch;
            self.order(OrderKind::Kill, segment, slot, epoch, id, effects);
            self.kills.entry((segment, slot)).or_default().push(number);
        }
        undead.len() as u32
    }

    /// One removal less that the put of an id waits for.
    fn replaced(&mut self, id: ObjectId) {
        let Entry::Occupied(mut left) = self.replacing.entry(id) else { return };
        *left.get_mut() -= 1;
        if *left.get() == 0 {
            left.remove();
        }
    }

    fn wait_for(&mut self, number: u64, waiting: Waiting) {
        self.removals.insert(number, waiting);
    }

    /// Takes an object out of the index and has all of its places killed, each kill under the removal's number.
    fn kill_object(&mut self, at: Ref, now: Now, effects: &mut Effects) -> Killing {
        self.removal_count += 1;
        let record = *self.slab.get(at);
        let number = self.removal_count;
        let kills = self.kill_undead(record.id(), number, effects);
        let mut killing = Killing { number, kills, unreachable: false };
        for index in 0..self.place_count(&record) {
            let place = self.place(&record, index);
            if place.is_lost() {
                continue;
            }
            if self.is_readable(place) {
                self.order(OrderKind::Kill, place.segment, place.slot, record.epoch(), record.id(), effects);
                self.kills.entry((place.segment, place.slot)).or_default().push(killing.number);
                killing.kills += 1;
            } else {
                killing.unreachable = true;
            }
        }
        self.drop_places(at, now, effects);
        killing
    }

    /// Remembers that every version up to now was removed. `Pending`, or `Busy` if there are too many to remember.
    fn entomb(&mut self, id: ObjectId) -> ErrorCode {
        let newest = self.newest_epoch();
        if self.tombstones.len() >= TOMBSTONES_MAX && !self.tombstones.contains_key(&id) {
            return ErrorCode::Busy;
        }
        self.tombstones.insert(id, newest);
        ErrorCode::Pending
    }
}

/// What a removal set going.
struct Killing {
    number: u64,
    kills: u32,
    unreachable: bool,
}
