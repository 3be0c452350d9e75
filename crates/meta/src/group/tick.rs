//! [`Group::tick`]: everything that waits for time, and everything that would take too long at once.

use moontide_types::UnixMillis;

use super::Group;
use crate::effect::{Effects, OrderKind};
use crate::record::Flag;
use crate::time::Now;

/// How much one tick may do of each kind. A step takes well below a microsecond to a few, so that the usual budget
/// keeps lookups waiting for less than a millisecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickBudget {
    /// Reservations and objects whose time is over.
    pub expiries: usize,
    /// Objects evicted.
    pub evictions: usize,
    /// Slots of lost and draining segments.
    pub swept_slots: usize,
    /// Objects that jobs look at.
    pub job_objects: usize,
    /// Reclaims whose lease has ended.
    pub reclaims: usize,
    /// Objects brought back from disk.
    pub promotions: usize,
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
        }
    }
}

impl Group {
    /// Does what is due, within the budget. True: there is more to do, come again soon.
    #[must_use]
    pub fn tick(&mut self, now: Now, budget: &TickBudget, effects: &mut Effects) -> bool {
        self.activate_segments(now);
        self.forget_absent(now);
        self.open_feed(now);
        let expired = self.expire_reservations(now, budget.expiries, effects)
            | self.expire_objects(now, budget.expiries, effects)
            | self.expire_offloads(now, budget.expiries)
            | self.promote_some(now, budget.promotions, effects);
        let reclaims = self.reclaim_leased(now, budget.reclaims, effects);
        let swept = self.sweep(now, budget.swept_slots, effects) >= budget.swept_slots;
        let jobs = self.step_jobs(now, budget.job_objects, effects) >= budget.job_objects;
        let evicted = self.evict_ahead(now, budget.evictions, effects).objects as usize >= budget.evictions;
        expired || reclaims || swept || jobs || evicted
    }

    /// Reservations stand in the order of their ends, because all last equally long.
    fn expire_reservations(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        for _ in 0..budget {
            let Some(at) = self.writing.first() else { return false };
            if moontide_types::planted("reservation-for-ever") {
                return false;
            }
            if self.slab.get(at).until() > self.ticker.now(now.mono) {
                return false;
            }
            debug_assert!(self.slab.get(at).has(Flag::Writing));
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
            let at = self.find_id(id).expect("what expires is there");
            if self.slab.get(at).has(Flag::Writing) {
                // It ends with its reservation, or right after it was completed.
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
                self.order(OrderKind::Reclaim, segment, slot, epoch, drain.id, effects);
            }
        }
        true
    }

    /// Nodes that have been away for long, and with them what was removed in their absence.
    fn forget_absent(&mut self, now: Now) {
        let tick = self.ticker.now(now.mono);
        self.absent.retain(|_, absence| absence.until > tick);
        if now.mono > self.reports_until && !self.inherited.is_empty() {
            self.inherited = Default::default();
        }
        self.absent_disks.retain(|_, &mut until| until > tick);
        if !self.tombstones.is_empty() && !self.is_unsettled(now) && !self.disks_may_return(now) {
            // What a node was told to kill and has not confirmed may still come back with its next report.
            let mut tombstones = std::mem::take(&mut self.tombstones);
            tombstones
                .retain(|&id, _| self.has_undead(id) && !moontide_types::planted("tombstone-forgotten"));
            self.tombstones = tombstones;
        }
    }
}
