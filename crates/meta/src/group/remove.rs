//! Removal: the group acknowledges nothing before the nodes have killed their copies.
//!
//! Otherwise a master that crashes right after its response would be rebuilt from reports that still contain the
//! object, and the removed object would reappear. For unreachable nodes the group keeps a tombstone: when they return,
//! it kills the reported versions that the tombstone covers.

use std::time::Duration;

use hashbrown::hash_map::Entry;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, MonoTime, NodeId, ObjectId, SegmentId, SlotId, Term};

use super::exclusion::Certainty;
use super::lookup::{LookupKey, ObjectState};
use super::{Group, LocationVersion, PendingRemoval, UnansweredKill};
use crate::effect::{CommandKind, CommandOutcome, Effect, Effects, WaiterId};
use crate::ids::{RecordRef, TenantIndex};
use crate::job::{JOBS_REMEMBERED, JOBS_RUNNING_MAX, Job, JobId, JobKind, JobState, JobStatus, JobStep};
use crate::record::RecordFlag;
use crate::time::Now;

/// Result of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum RemoveOutcome {
    /// The object is out of the index. Commands to the nodes are in flight; [`Effect::Removed`] follows.
    Waiting,
    /// Nothing follows. `None`, or the reason why the object was not removed, or not yet certainly.
    Done(Option<ErrorCode>),
}

/// Maximum number of tombstones of one group; beyond that a removal that needs one is refused as `Busy`. A million take
/// some 50 MB and last for [`rejoin_window`](crate::GroupConfig::rejoin_window) at 16,000 removals per second.
const TOMBSTONES_MAX: usize = 1 << 20;

/// Time after which refused kills are sent again: a full or failing disk of a node rarely recovers sooner.
const KILL_RETRY_INTERVAL: Duration = Duration::from_secs(1);

impl Group {
    /// Removes an object. Without `force`, leased, hard-pinned and incomplete objects are kept.
    pub fn remove(
        &mut self,
        now: Now,
        lookup: &LookupKey<'_>,
        force: bool,
        waiter: WaiterId,
        effects: &mut Effects,
    ) -> RemoveOutcome {
        let certainty = match self.certainty(now) {
            _ if moontide_rt::mutation_enabled("removal-certain-while-unsettled") => Certainty::Certain,
            certainty => certainty,
        };
        let unsettled = certainty == Certainty::Uncertain;
        let at = match self.find(lookup) {
            Some(at) => at,
            None if unsettled => return RemoveOutcome::Done(Some(self.add_tombstone(lookup.id))),
            None => {
                let awaits = certainty == Certainty::AfterExclusion;
                if awaits && self.add_tombstone(lookup.id) == ErrorCode::Busy {
                    return RemoveOutcome::Done(Some(ErrorCode::Busy));
                }
                self.keep_disk_tombstone(lookup.id, self.newest_epoch(), now);
                return self.remove_unconfirmed(lookup.id, certainty, waiter, effects);
            }
        };
        let record = *self.slab.get(at);
        match self.state_of(&record, now) {
            ObjectState::Writing if !force => return RemoveOutcome::Done(Some(ErrorCode::InProgress)),
            ObjectState::Complete
                if !force && (record.pin() == PinClass::Hard || self.is_leased(&record, now)) =>
            {
                return RemoveOutcome::Done(Some(ErrorCode::Leased));
            }
            _ => {}
        }
        let gone = self.state_of(&record, now) == ObjectState::Gone;
        if certainty != Certainty::Certain && self.tombstones.len() >= TOMBSTONES_MAX {
            return RemoveOutcome::Done(Some(ErrorCode::Busy));
        }
        self.keep_disk_tombstone(lookup.id, self.newest_epoch(), now);
        let removal = self.kill_object(at, now, effects);
        if !gone {
            self.stats.removed_objects += 1;
        }
        if certainty != Certainty::Certain {
            self.add_tombstone(lookup.id);
        }
        let pending = unsettled || removal.unreachable;
        let left = removal.kills + self.await_exclusion(removal.number, certainty);
        if left == 0 || moontide_rt::mutation_enabled("removal-before-kill") {
            let code = if pending {
                Some(ErrorCode::Pending)
            } else if gone {
                Some(ErrorCode::NotFound)
            } else {
                None
            };
            return RemoveOutcome::Done(code);
        }
        self.add_pending_removal(
            removal.number,
            PendingRemoval {
                id: record.id(),
                epoch: record.epoch(),
                left,
                waiter: Some(waiter),
                replaced_by: None,
                pending,
                not_found: gone && removal.kills == 0,
                job: None,
            },
        );
        RemoveOutcome::Waiting
    }

    /// Lets a removal wait for the exclusion, if it must. Returns the number of events that it waits for.
    fn await_exclusion(&mut self, number: u64, certainty: Certainty) -> u32 {
        let awaits = certainty == Certainty::AfterExclusion;
        self.awaiting_exclusion.extend(awaits.then_some(number));
        awaits.into()
    }

    /// Kills released locations of an object that is no longer in the index: an evicted object is permanently gone only
    /// when its nodes have confirmed it.
    fn remove_unconfirmed(
        &mut self,
        id: ObjectId,
        certainty: Certainty,
        waiter: WaiterId,
        effects: &mut Effects,
    ) -> RemoveOutcome {
        self.removal_count += 1;
        let number = self.removal_count;
        let kills = self.kill_unconfirmed(id, number, effects);
        let left = kills + self.await_exclusion(number, certainty);
        if left == 0 || moontide_rt::mutation_enabled("evicted-taken-for-dead") {
            return RemoveOutcome::Done(Some(ErrorCode::NotFound));
        }
        let epoch = self.newest_epoch();
        self.add_pending_removal(
            number,
            PendingRemoval {
                id,
                epoch,
                left,
                waiter: Some(waiter),
                replaced_by: None,
                pending: false,
                not_found: kills == 0,
                job: None,
            },
        );
        RemoveOutcome::Waiting
    }

    /// Starts a job that removes many objects.
    pub fn start_job(&mut self, tenant: TenantIndex, kind: JobKind, force: bool) -> Result<JobId, ErrorCode> {
        let newest = self.newest_epoch();
        let mut running = self.jobs.iter_mut().filter(|(_, job)| job.status.state == JobState::Running);
        if let Some((&id, job)) = running.find(|(_, job)| job.is_for(tenant, &kind, force)) {
            // A repeated call does not add another job.
            job.newest = newest;
            job.scan_again();
            return Ok(id);
        }
        let running = self.jobs.values().filter(|job| job.status.state == JobState::Running).count();
        if running >= JOBS_RUNNING_MAX {
            return Err(ErrorCode::Busy);
        }
        self.job_count += 1;
        let id = JobId(self.job_count);
        self.jobs.insert(id, Job::new(kind, tenant, force, newest));
        let finished = self.jobs.iter().filter(|(_, job)| job.status.state == JobState::Done);
        let finished: Vec<JobId> = finished.map(|(&id, _)| id).collect();
        for old in &finished[..finished.len().saturating_sub(JOBS_REMEMBERED)] {
            self.jobs.remove(old);
        }
        Ok(id)
    }

    /// Returns the progress of a job.
    pub fn job(&self, job: JobId) -> Option<JobStatus> {
        self.jobs.get(&job).map(|job| job.status)
    }

    /// Continues the running jobs. Visits at most `budget` objects; returns the number of visited objects.
    pub(super) fn step_jobs(&mut self, now: Now, budget: usize, effects: &mut Effects) -> usize {
        let running = self.jobs.iter().filter(|(_, job)| job.status.state == JobState::Running);
        let running: Vec<JobId> = running.map(|(&id, _)| id).collect();
        if running.is_empty() {
            return 0;
        }
        self.give_up_unknown_disks(now);
        let certainty = self.certainty(now);
        if certainty == Certainty::AfterExclusion {
            return 0;
        }
        let is_certain = certainty == Certainty::Certain && !self.disks_are_returning();
        let mut visited = 0;
        for id in running {
            // Removed from the map while it runs, so that job and group can be borrowed mutably at the same time.
            let mut job = self.jobs.remove(&id).expect("running job exists");
            if !is_certain {
                job.is_uncertain();
            }
            while matches!(job.step, JobStep::Scan) && visited < budget {
                visited += 1;
                match self.slab.previous(job.cursor) {
                    Some(at) => {
                        job.cursor = Some(at);
                        job.status.scanned += 1;
                        self.visit_job_object(id, &mut job, at, now, effects);
                    }
                    None => job.step = JobStep::Confirm(self.unconfirmed_kills.iter().copied().collect()),
                }
            }
            self.confirm_job(&mut job, is_certain);
            self.jobs.insert(id, job);
        }
        visited
    }

    /// Treats disks that this master has never seen as stale from now on: it keeps no tombstones for objects that a job would
    /// remove from them. Their nodes had the time to report that nodes have after a change of the master.
    fn give_up_unknown_disks(&mut self, now: Now) {
        let first_term = self.config.previous_term == Term::ZERO;
        let may_report = !first_term && now.mono < self.disk_reports_until;
        if may_report
            && !self.awaits_reports(now)
            && !moontide_rt::mutation_enabled("job-trusts-unknown-disks")
        {
            self.disk_reports_until = MonoTime(0);
            self.need_exclusion();
        }
    }

    /// Lets running jobs scan again: records that they have seen removed may return.
    pub(super) fn jobs_are_uncertain(&mut self) {
        self.jobs
            .values_mut()
            .filter(|job| job.status.state == JobState::Running)
            .for_each(Job::is_uncertain);
    }

    /// Ends a job whose objects cannot return, or lets it scan again when no more objects are awaited.
    fn confirm_job(&self, job: &mut Job, is_certain: bool) {
        let JobStep::Confirm(released) = &mut job.step else { return };
        while released.pop_if(|version| !self.unconfirmed_kills.contains(version)).is_some() {}
        let confirmed = released.is_empty() && job.unanswered == 0;
        if !confirmed && !moontide_rt::mutation_enabled("job-done-before-kills") {
            return;
        }
        if job.is_certain {
            job.status.state = JobState::Done;
            job.step = JobStep::Confirm(vec![]);
        } else if is_certain {
            job.scan_again();
        }
    }

    fn visit_job_object(&mut self, id: JobId, job: &mut Job, at: RecordRef, now: Now, effects: &mut Effects) {
        let (record, key) = self.slab.with_key(at);
        if record.tenant() != job.tenant || record.epoch() > job.newest || !job.kind.matches(key) {
            return;
        }
        let record = *record;
        let in_use =
            record.has(RecordFlag::Writing) || record.pin() == PinClass::Hard || self.is_leased(&record, now);
        if in_use && !job.force {
            job.status.kept += 1;
            return;
        }
        if !job.is_certain && self.add_tombstone(record.id()) == ErrorCode::Busy {
            job.status.kept += 1;
            return;
        }
        self.keep_disk_tombstone(record.id(), record.epoch(), now);
        let removal = self.kill_object(at, now, effects);
        if removal.kills > 0 {
            job.unanswered += 1;
            self.add_pending_removal(
                removal.number,
                PendingRemoval {
                    id: record.id(),
                    epoch: record.epoch(),
                    left: removal.kills,
                    waiter: None,
                    replaced_by: None,
                    pending: removal.unreachable,
                    not_found: false,
                    job: Some(id),
                },
            );
        }
        if removal.unreachable {
            job.is_uncertain();
        }
        job.status.removed += 1;
        self.stats.removed_objects += 1;
    }

    /// Removes the old version of an id. The put of the new one waits until nodes have killed the old one.
    pub(super) fn replace_object(&mut self, at: RecordRef, now: Now, by: ObjectId, effects: &mut Effects) {
        let record = *self.slab.get(at);
        let mark = self.invalidation_count();
        if record.has(RecordFlag::Writing) {
            // No reader can have seen it. What it was to replace is still uncertain for its successor.
            let uncertain = self.uncertain_replacements.contains(&by);
            self.drop_object(at, now, effects);
            if uncertain {
                self.uncertain_replacements.insert(by);
            }
            self.invalidate_unless_put(by, mark);
            return;
        }
        let removal = self.kill_object(at, now, effects);
        self.invalidate_unless_put(by, mark);
        if removal.unreachable {
            self.uncertain_replacements.insert(by);
        }
        if removal.kills == 0 {
            return;
        }
        *self.replacing.entry(by).or_insert(0) += 1;
        self.add_pending_removal(
            removal.number,
            PendingRemoval {
                id: record.id(),
                epoch: record.epoch(),
                left: removal.kills,
                waiter: None,
                replaced_by: Some(by),
                pending: removal.unreachable,
                not_found: false,
                job: None,
            },
        );
    }

    /// Keeps a tombstone for the versions of an object up to this one. Nodes and disks that have yet to report may have
    /// one, known to this master or not, and the new version may be evicted or lost before they report.
    pub(super) fn add_replacement_tombstone(&mut self, id: ObjectId, replaced: Epoch, now: Now) {
        let fits = self.tombstones.len() < TOMBSTONES_MAX || self.tombstones.contains_key(&id);
        if (self.exclusion_needed || self.awaits_reports(now)) && fits {
            let removed = self.tombstones.entry(id).or_insert(replaced);
            *removed = replaced.max(*removed);
        }
        self.keep_disk_tombstone(id, replaced, now);
    }

    /// Handles the result of a command. A `Kill` or `Reclaim` of anything but a draining version is outdated and
    /// ignored; so is a `Reclaim` that was sent before a command that fills the slot, which may be with the same version.
    pub fn command_outcome(
        &mut self,
        (node, segment): (NodeId, SegmentId),
        kind: CommandKind,
        slot: SlotId,
        epoch: Epoch,
        outcome: CommandOutcome,
        effects: &mut Effects,
    ) {
        let Some(&index) = self.by_name.get(&(node, segment)) else { return };
        if let CommandOutcome::Refused(_) = outcome {
            self.stats.commands_refused += 1;
        }
        let version = LocationVersion { segment: index, slot: slot.0, epoch };
        let drains = self.segment(index).drains.get(&slot.0).is_some_and(|drain| {
            let is_answered = !drain.is_filled
                || drain.is_answered
                || moontide_rt::mutation_enabled("earlier-reclaim-frees-copy");
            drain.epoch == epoch && is_answered
        });
        match (kind, outcome) {
            (CommandKind::Kill, _) => {
                // A node without this version has nothing to kill; after any other refusal the version is still
                // readable.
                let alive = match outcome {
                    CommandOutcome::Accepted | CommandOutcome::Done => false,
                    CommandOutcome::Refused(code) => !matches!(
                        code,
                        ErrorCode::StaleEpoch
                            | ErrorCode::StaleGeneration
                            | ErrorCode::Gone
                            | ErrorCode::NotFound
                    ),
                };
                if !self.unanswered_kills.contains_key(&version) {
                    return;
                }
                if alive && !moontide_rt::mutation_enabled("refused-kill-believed") {
                    self.kill_refused(version, effects);
                } else {
                    self.killed(version, false, effects);
                }
            }
            (CommandKind::Reclaim, CommandOutcome::Done) if drains => {
                self.slot_freed(index, slot.0, epoch, effects);
            }
            (CommandKind::Reclaim, CommandOutcome::Accepted) if drains => {
                if moontide_rt::mutation_enabled("range-free-when-accepted") {
                    return self.slot_freed(index, slot.0, epoch, effects);
                }
                self.found_dead(index, slot.0, epoch, false, effects);
            }
            // A disk that is full or fails may refuse to drop a record. It would report the record to the next master.
            (CommandKind::Reclaim, CommandOutcome::Refused(_)) if drains && self.segment(index).is_disk() => {
                self.refused_drops.push_back(version);
            }
            (CommandKind::Reclaim, _) => {}
            (CommandKind::Offload, _) => self.offload_result(index, slot.0, epoch, outcome),
            (CommandKind::Promote { stripe, .. }, _) => {
                self.promotion_result(index, slot.0, (epoch, stripe), outcome, effects);
            }
            (CommandKind::Copy { stripe, .. }, _) => {
                self.copy_result(index, slot.0, (epoch, stripe), outcome, effects);
            }
        }
    }

    /// Handles a report that a slot is free from this epoch on.
    pub(super) fn slot_freed(&mut self, index: u32, slot: u32, epoch: Epoch, effects: &mut Effects) {
        // A message about an earlier version in the slot does not apply to the current one.
        let Some(drain) = self.segment(index).drains.get(&slot).filter(|drain| epoch >= drain.epoch) else {
            return;
        };
        self.found_dead(index, slot, drain.epoch, true, effects);
        if self.segment_mut(index).freed(slot, epoch) {
            self.stats.reclaimed += 1;
            self.note_free(index);
        }
    }

    /// Handles the news that the memory of a draining version is dead or free. If a Kill was sent, only its answer shows
    /// that the version is dead for good: the node's disk may have the version or be writing it, and the answer waits
    /// until the removal is durable. If the object has lived on elsewhere, a write of this record may end after a removal,
    /// until the slot is free.
    pub(super) fn found_dead(
        &mut self,
        index: u32,
        slot: u32,
        epoch: Epoch,
        is_free: bool,
        effects: &mut Effects,
    ) {
        let drain = self.segment(index).drains.get(&slot).filter(|drain| drain.epoch == epoch);
        if drain.is_some_and(|drain| drain.may_be_written)
            && !is_free
            && !moontide_rt::mutation_enabled("write-survives-move")
        {
            return;
        }
        let version = LocationVersion { segment: index, slot, epoch };
        let unanswered = self.unanswered_kills.contains_key(&version);
        if !unanswered || moontide_rt::mutation_enabled("reclaim-answers-kill") {
            self.killed(version, false, effects);
        }
    }

    /// Marks a released version as dead, or as never to be confirmed (`unreachable`). Removals may wait for it.
    pub(super) fn killed(&mut self, version: LocationVersion, unreachable: bool, effects: &mut Effects) {
        let drain = self.segment(version.segment).drains.get(&version.slot);
        let draining = drain.filter(|drain| drain.epoch == version.epoch).map(|drain| drain.id);
        let unanswered = self.unanswered_kills.remove(&version).map(|kill| kill.id);
        if let Some(id) = unanswered.or(draining) {
            self.unconfirmed_kills.remove(&(id, version));
        }
        for number in self.kills.remove(&version).unwrap_or_default() {
            self.kill_result(number, unreachable, effects);
        }
    }

    /// Ends the wait of removals with an uncertain result. A put that replaces the version goes on waiting: the kill is
    /// sent again until the node has carried it out.
    fn kill_refused(&mut self, version: LocationVersion, effects: &mut Effects) {
        let numbers = self.kills.remove(&version).unwrap_or_default();
        let replaced = |number: &u64| self.removals.get(number).is_some_and(|r| r.replaced_by.is_some());
        let (waiting, ended): (Vec<u64>, Vec<u64>) = numbers.into_iter().partition(replaced);
        if !waiting.is_empty() {
            self.kills.insert(version, waiting);
        }
        for number in ended {
            self.kill_result(number, true, effects);
        }
        if let Some(kill) = self.unanswered_kills.get_mut(&version)
            && !std::mem::replace(&mut kill.is_queued, true)
        {
            self.refused_kills.push_back(version);
        }
    }

    /// Sends refused kills, and refused reclaims of records on disks, again, at most `budget` of each. Returns whether more
    /// are due.
    pub(super) fn retry_kills(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        let none = self.refused_kills.is_empty() && self.refused_drops.is_empty();
        if none || now.mono < self.retry_kills_at {
            return false;
        }
        for version in self.refused_kills.drain(..budget.min(self.refused_kills.len())).collect::<Vec<_>>() {
            if let Some(kill) = self.unanswered_kills.get_mut(&version) {
                kill.is_queued = false;
                let id = kill.id;
                self.send_kill(version, id, effects);
            }
        }
        for version in self.refused_drops.drain(..budget.min(self.refused_drops.len())).collect::<Vec<_>>() {
            let LocationVersion { segment, slot, epoch } = version;
            let drain = self.segments[segment as usize].as_ref().and_then(|found| found.drains.get(&slot));
            if let Some(id) = drain.filter(|drain| drain.epoch == epoch).map(|drain| drain.id) {
                self.push_command(CommandKind::Reclaim, segment, slot, epoch, id, effects);
            }
        }
        let more = !self.refused_kills.is_empty() || !self.refused_drops.is_empty();
        if !more {
            self.retry_kills_at = now.mono.after(KILL_RETRY_INTERVAL);
        }
        more
    }

    /// Sends a Kill. Until it is answered, nothing else shows that the version is dead for good.
    pub(super) fn send_kill(&mut self, version: LocationVersion, id: ObjectId, effects: &mut Effects) {
        let LocationVersion { segment, slot, epoch } = version;
        self.push_command(CommandKind::Kill, segment, slot, epoch, id, effects);
        self.unanswered_kills.entry(version).or_insert(UnansweredKill { id, is_queued: false });
    }

    pub(super) fn kill_result(&mut self, number: u64, unreachable: bool, effects: &mut Effects) {
        let Entry::Occupied(mut entry) = self.removals.entry(number) else { return };
        let removal = entry.get_mut();
        removal.pending |= unreachable;
        removal.left -= 1;
        if unreachable {
            // The node may return with it. There are at most as many of these as there were slots on the node.
            let removed = self.tombstones.entry(removal.id).or_insert(removal.epoch);
            *removed = removal.epoch.max(*removed);
        }
        if removal.left > 0 {
            return;
        }
        let removal = entry.remove();
        if let Some(waiter) = removal.waiter {
            // A disk that has returned in the meantime may have it, too.
            let pending = removal.pending || self.disks_are_returning();
            let not_found = removal.not_found.then_some(ErrorCode::NotFound);
            let code = if pending { Some(ErrorCode::Pending) } else { not_found };
            effects.push(Effect::Removed { waiter, code });
        }
        if let Some(job) = removal.job.and_then(|job| self.jobs.get_mut(&job)) {
            job.unanswered -= 1;
            if removal.pending {
                job.is_uncertain();
            }
        }
        if let Some(id) = removal.replaced_by {
            if removal.pending && self.find_id(id).is_some() {
                self.uncertain_replacements.insert(id);
            }
            self.replacement_done(id);
        }
    }

    /// Whether a version of an object was released and its node has not confirmed the kill.
    pub(super) fn has_unconfirmed_kill(&self, id: ObjectId) -> bool {
        self.unconfirmed_versions(id).next().is_some()
    }

    /// Returns the released versions of an object that their nodes have not confirmed as dead.
    pub(super) fn unconfirmed_versions(&self, id: ObjectId) -> impl Iterator<Item = LocationVersion> {
        let range = (id, LocationVersion::FIRST)..=(id, LocationVersion::LAST);
        self.unconfirmed_kills.range(range).map(|&(_, version)| version)
    }

    /// Kills released versions of an object that their nodes may still have, under the removal's number.
    fn kill_unconfirmed(&mut self, id: ObjectId, number: u64, effects: &mut Effects) -> u32 {
        let unconfirmed: Vec<LocationVersion> = self.unconfirmed_versions(id).collect();
        for &version in &unconfirmed {
            self.send_kill(version, id, effects);
            self.kills.entry(version).or_default().push(number);
        }
        unconfirmed.len() as u32
    }

    /// Decrements the number of removals that the put of an id waits for.
    fn replacement_done(&mut self, id: ObjectId) {
        let Entry::Occupied(mut left) = self.replacing.entry(id) else { return };
        *left.get_mut() -= 1;
        if *left.get() == 0 {
            left.remove();
        }
    }

    fn add_pending_removal(&mut self, number: u64, removal: PendingRemoval) {
        self.removals.insert(number, removal);
    }

    /// Removes an object from the index and sends kills for all of its locations, each under the removal's number.
    fn kill_object(&mut self, at: RecordRef, now: Now, effects: &mut Effects) -> KillProgress {
        self.removal_count += 1;
        let record = *self.slab.get(at);
        let number = self.removal_count;
        let kills = self.kill_unconfirmed(record.id(), number, effects);
        let mut progress = KillProgress { number, kills, unreachable: false };
        for index in 0..self.location_count(&record) {
            let location = self.location(&record, index);
            if location.is_lost() {
                continue;
            }
            if self.is_readable(location) {
                let version = LocationVersion::of(location, record.epoch());
                self.send_kill(version, record.id(), effects);
                self.kills.entry(version).or_default().push(progress.number);
                progress.kills += 1;
            } else {
                progress.unreachable = true;
            }
        }
        self.drop_without_kill(at, now, effects);
        progress
    }

    /// Keeps a tombstone for all versions up to now. Returns `Pending`, or `Busy` if there are too many tombstones.
    fn add_tombstone(&mut self, id: ObjectId) -> ErrorCode {
        let newest = self.newest_epoch();
        if self.tombstones.len() >= TOMBSTONES_MAX && !self.tombstones.contains_key(&id) {
            return ErrorCode::Busy;
        }
        self.tombstones.insert(id, newest);
        ErrorCode::Pending
    }
}

/// Kills of a removal that are in flight.
struct KillProgress {
    number: u64,
    kills: u32,
    unreachable: bool,
}
