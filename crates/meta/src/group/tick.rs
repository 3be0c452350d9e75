//! [`Group::tick`]: all time-dependent work, and all work that would take too long in one call.

use moontide_types::UnixMillis;

use super::Group;
use crate::effect::{CommandKind, Effects};
use crate::record::RecordFlag;
use crate::time::Now;

/// Limits of one tick, per kind of work. A step takes from well below one microsecond to a few, so the default budget
/// delays lookups by less than a millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickBudget {
    /// Expired reservations and objects.
    pub expiries: usize,
    /// Objects evicted.
    pub evictions: usize,
    /// Slots of lost and draining segments.
    pub swept_slots: usize,
    /// Objects that jobs visit.
    pub job_objects: usize,
    /// Reclaims whose lease has ended.
    pub reclaims: usize,
    /// Objects loaded from disk.
    pub promotions: usize,
    /// Slots scanned for flushes.
    pub flushed_slots: usize,
    /// Slots of disks scanned for objects that return to memory.
    pub warmed_slots: usize,
    /// Objects written back.
    pub write_backs: usize,
    /// Slots scanned for records that move to other segments: for drains, and again for the balance of the nodes.
    pub drained_slots: usize,
    /// Objects scanned for missing replicas.
    pub repair_objects: usize,
    /// Records whose copy is commanded, for each reason of a copy.
    pub copies: usize,
}

impl Default for TickBudget {
    fn default() -> TickBudget {
        TickBudget {
            expiries: 256,
            evictions: 256,
            swept_slots: 4096,
            job_objects: 2048,
            reclaims: 1024,
            promotions: 64,
            flushed_slots: 4096,
            warmed_slots: 1024,
            write_backs: 256,
            drained_slots: 4096,
            repair_objects: 4096,
            copies: 256,
        }
    }
}

impl Group {
    /// Does the due work, within the budget. Returns whether more work is due; then the caller should call again soon.
    #[must_use]
    pub fn tick(&mut self, now: Now, budget: &TickBudget, effects: &mut Effects) -> bool {
        self.activate_segments(now);
        self.expire_absent(now);
        self.open_feed(now);
        self.eviction_order.release_unused(self.objects_in_memory);
        let expired = self.expire_reservations(now, budget.expiries, effects)
            | self.expire_objects(now, budget.expiries, effects)
            | self.expire_offloads(now, budget.expiries)
            | self.start_promotions(now, budget.promotions, effects);
        let reclaims = self.reclaim_leased(now, budget.reclaims, effects)
            | self.retry_kills(now, budget.reclaims, effects);
        let swept = self.sweep(now, budget.swept_slots, effects) >= budget.swept_slots;
        let incomplete = self.drop_incomplete(now, budget.expiries, effects);
        let jobs = self.step_jobs(now, budget.job_objects, effects) >= budget.job_objects;
        let repaired = self.step_repairs(now, budget.repair_objects, budget.copies, effects);
        let copied = self.step_drains(now, budget.drained_slots, budget.copies, effects);
        self.step_hot_objects(now, effects);
        let balanced = self.step_rebalance(now, budget.drained_slots, budget.copies, effects);
        let evicted =
            self.evict_to_watermark(now, budget.evictions, effects).objects as usize >= budget.evictions;
        let flushed = self.step_flushes(now, budget.flushed_slots, budget.write_backs, effects);
        let warmed = self.step_warm_ups(now, budget.warmed_slots, effects);
        expired
            || reclaims
            || swept
            || incomplete
            || jobs
            || evicted
            || copied
            || repaired
            || balanced
            || flushed
            || warmed
    }

    /// The queue is ordered by the ends of the reservations, because all have the same duration.
    fn expire_reservations(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        for _ in 0..budget {
            let Some(at) = self.writing.first() else { return false };
            if moontide_rt::mutation_enabled("reservation-for-ever") {
                return false;
            }
            if self.slab.get(at).until() > self.ticker.now(now.mono) {
                return false;
            }
            debug_assert!(self.slab.get(at).has(RecordFlag::Writing));
            self.drop_object(at, now, effects);
            self.stats.puts_expired += 1;
        }
        true
    }

    fn expire_objects(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        let mut later = vec![];
        let mut done = 0;
        while let Some(&(expires, id)) = self.expiring.first() {
            if UnixMillis(expires) > now.unix {
                break;
            }
            if done == budget {
                self.expiring.extend(later);
                return true;
            }
            done += 1;
            let at = self.find_id(id).expect("expiring object exists");
            if self.slab.get(at).has(RecordFlag::Writing) {
                // It ends with its reservation, or right after its completion.
                self.expiring.remove(&(expires, id));
                later.push((expires, id));
                continue;
            }
            self.drop_object(at, now, effects);
            self.stats.expired_objects += 1;
        }
        self.expiring.extend(later);
        false
    }

    fn reclaim_leased(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        for _ in 0..budget {
            let Some((&(until, segment, slot), &epoch)) = self.leased_drains.first_key_value() else {
                return false;
            };
            if until > self.ticker.now(now.mono) {
                return false;
            }
            self.leased_drains.pop_first();
            if let Some(drain) = self.segment(segment).drains.get(&slot)
                && drain.epoch == epoch
            {
                self.push_command(CommandKind::Reclaim, segment, slot, epoch, drain.id, effects);
            }
        }
        true
    }

    /// Drops entries of nodes that have been absent for too long, and the tombstones kept for them.
    fn expire_absent(&mut self, now: Now) {
        let tick = self.ticker.now(now.mono);
        let awaited = self.absent.len() + self.absent_disks.len();
        self.absent.retain(|_, segment| segment.until > tick);
        self.absent_disks.retain(|_, &mut until| until > tick);
        if self.absent.len() + self.absent_disks.len() < awaited {
            self.need_exclusion();
        }
        if now.mono > self.reports_until && !self.handoff.is_empty() {
            self.handoff = Default::default();
        }
        // While an exclusion is needed, segments that the group does not wait for are still trusted if they return.
        let may_return = self.exclusion_needed || self.awaits_reports(now) || self.disks_may_return(now);
        if !self.tombstones.is_empty() && !may_return {
            // A killed record that its node has not confirmed may still be in the node's next report.
            let mut tombstones = std::mem::take(&mut self.tombstones);
            tombstones.retain(|&id, _| {
                self.has_unconfirmed_kill(id) && !moontide_rt::mutation_enabled("tombstone-forgotten")
            });
            self.tombstones = tombstones;
        }
    }
}
