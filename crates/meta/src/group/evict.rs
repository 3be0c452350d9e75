//! Eviction: who goes when room is needed.
//!
//! 1. tenants over their quota before all others;
//! 2. of the others, a tenant drawn in proportion to its objects: with one tenant this is plain SIEVE;
//! 3. ordinary objects before soft-pinned ones; hard-pinned and leased ones never.
//!
//! Where the victim's node has a disk, it is written there first and leaves memory when it is there; only where there is
//! none, or it takes nothing, is it lost. Units that are being written count as evicted here, too: they are on their way.
//!
//! A victim costs a bounded number of steps, whatever the number of objects. It is out of the index at once, and its
//! range drains until its node has given it back; draining units are not free, but they are on their way, so that
//! they count as evicted here.

use moontide_types::ObjectId;
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::PinClass;

use super::Group;
use crate::effect::Effects;
use crate::queue::Queue;
use crate::record::{Flag, NONE};
use crate::segment::{Segment, SegmentPhase};
use crate::slab::Ref;
use crate::tenant::{TenantIx, TenantState};
use crate::time::Now;

/// What was evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictReport {
    /// Objects.
    pub objects: u64,
    /// Their bytes, all replicas together.
    pub bytes: u64,
}

impl EvictReport {
    fn add(&mut self, other: EvictReport) {
        self.objects += other.objects;
        self.bytes += other.bytes;
    }
}

/// Records that the hand passes over for one victim. After that the first one that nobody holds goes, used or not: a
/// queue in which everything was used is not searched to its end.
const LOOKS_MAX: usize = 64;

/// Members of a cohort that follow one victim.
const FOLLOWERS_MAX: usize = 64;

/// Tenants over their quota that are asked for a victim before one that is not.
const TENANTS_TRIED: usize = 4;

/// Objects that a put which found no room evicts at once; the rest follows in ticks.
const AT_ONCE: usize = 16;

/// What becomes of a victim.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// It goes to disk, where there is one.
    Demote,
    /// It is lost, wherever it is.
    Drop,
}

#[derive(Clone, Copy)]
enum Class {
    Ordinary,
    Soft,
    /// Nowhere but on disk: goes only if there are too many objects, since it gives no memory back.
    OnDisk,
}

impl Class {
    fn queue(self, tenant: &TenantState) -> &Queue {
        match self {
            Class::Ordinary => &tenant.ordinary,
            Class::Soft => &tenant.soft,
            Class::OnDisk => &tenant.on_disk,
        }
    }
}

impl Group {
    /// How full the segments in use are, in thousandths: of units or of slots, whichever is more. What drains, or is on its
    /// way to a disk, counts as free here.
    pub fn pressure_permille(&self) -> u16 {
        self.usage().permille()
    }

    /// Evicts until the pressure is at most `target_permille`, at most `objects_max` objects.
    pub fn evict(
        &mut self,
        now: Now,
        target_permille: u16,
        objects_max: usize,
        effects: &mut Effects,
    ) -> EvictReport {
        let mut usage = self.usage();
        let mut report = EvictReport::default();
        while (report.objects as usize) < objects_max && usage.permille() > target_permille {
            let Some(evicted) = self.evict_one(now, effects) else { break };
            usage.used_units = usage.used_units.saturating_sub(evicted.bytes / UNIT_BYTES);
            usage.used_slots = usage.used_slots.saturating_sub(evicted.objects);
            report.add(evicted);
        }
        report
    }

    /// Evicts ahead of need: from the high watermark down to the low one, and what puts asked for in vain.
    pub(super) fn evict_ahead(&mut self, now: Now, budget: usize, effects: &mut Effects) -> EvictReport {
        let (high, low) = (self.config.high_permille, self.config.low_permille);
        let mut report = EvictReport::default();
        while self.wanted_units > 0 && (report.objects as usize) < budget {
            let Some(evicted) = self.evict_one(now, effects) else { break };
            self.wanted_units = self.wanted_units.saturating_sub(evicted.bytes / UNIT_BYTES);
            report.add(evicted);
        }
        self.evicting |= self.pressure_permille() > high;
        if self.evicting && (report.objects as usize) < budget {
            report.add(self.evict(now, low, budget - report.objects as usize, effects));
            self.evicting = self.pressure_permille() > low;
        }
        report
    }

    /// A put found no room: some objects go at once, more in the next tick.
    pub(super) fn want_space(&mut self, now: Now, units: u64, effects: &mut Effects) {
        // Not more than everything: an object that can never fit must not empty the cache.
        let all: u64 = self.usage().units;
        if units > all {
            return;
        }
        // What is on its way to disks will be free soon; whoever asks again meanwhile must not empty memory.
        if self.offloading_units > units + all / 32 {
            return;
        }
        self.wanted_units = self.wanted_units.max(units);
        self.evict_ahead(now, AT_ONCE, effects);
    }

    /// Evicts one object of a tenant, and of its cohort what nobody holds; never `keep`.
    pub(super) fn evict_from(
        &mut self,
        tenant: TenantIx,
        keep: ObjectId,
        now: Now,
        effects: &mut Effects,
    ) -> Option<EvictReport> {
        let many = self.tenants.get(tenant).has_too_many();
        let classes: &[Class] = if many {
            &[Class::Ordinary, Class::Soft, Class::OnDisk]
        } else {
            &[Class::Ordinary, Class::Soft]
        };
        let victim = classes.iter().find_map(|&class| self.victim(tenant, class, Some(keep), now))?;
        // The room is needed now, so that nothing is written to disk first.
        if many || !self.is_whole_on_disk(self.slab.get(victim)) {
            return Some(self.evict_object(victim, Some(keep), How::Drop, now, effects));
        }
        Some(self.evict_alone(victim, How::Demote, now, effects))
    }

    fn evict_one(&mut self, now: Now, effects: &mut Effects) -> Option<EvictReport> {
        if !self.may_offload_more() {
            return None; // the disks have enough to do: puts wait
        }
        for class in [Class::Ordinary, Class::Soft] {
            for tenant in self.next_tenants(class) {
                if let Some(victim) = self.victim(tenant, class, None, now) {
                    return Some(self.evict_object(victim, None, How::Demote, now, effects));
                }
            }
        }
        None
    }

    /// Whose turn it is to give something up, some of them: if all that the first one has is held, the next one.
    fn next_tenants(&mut self, class: Class) -> Vec<TenantIx> {
        let has_some = |ix: &TenantIx| class.queue(self.tenants.get(*ix)).len() > 0;
        let over = |ix: &TenantIx| self.tenants.get(*ix).is_over_quota();
        let limited = self.limited.iter().copied().filter(over).filter(has_some);
        let mut tenants: Vec<TenantIx> = limited.take(TENANTS_TRIED).collect();
        let drawn = self.slab.draw(&mut self.rng).map(|at| self.slab.get(at).tenant());
        tenants.extend(drawn.filter(|ix| class.queue(self.tenants.get(*ix)).len() > 0));
        if tenants.is_empty() {
            let any = self.tenants.iter().map(|(ix, _)| ix);
            tenants.extend(any.filter(|ix| class.queue(self.tenants.get(*ix)).len() > 0).take(1));
        }
        tenants
    }

    /// Moves a queue's hand to the next object that can go.
    fn victim(&mut self, tenant: TenantIx, class: Class, keep: Option<ObjectId>, now: Now) -> Option<Ref> {
        let mut used = None;
        let looks = class.queue(self.tenants.get(tenant)).len().min(LOOKS_MAX as u64);
        for _ in 0..looks {
            let state = self.tenants.get_mut(tenant);
            let queue = match class {
                Class::Ordinary => &mut state.ordinary,
                Class::Soft => &mut state.soft,
                Class::OnDisk => &mut state.on_disk,
            };
            let at = queue.advance(&self.slab)?;
            let record = self.slab.get(at);
            let leased = self.is_leased(record, now) && !moontide_types::planted("lease-evicted");
            if Some(record.id()) == keep || record.pin() == PinClass::Hard || leased {
                continue;
            }
            let record = self.slab.get_mut(at);
            if !record.has(Flag::Visited) {
                return Some(at);
            }
            record.set(Flag::Visited, false);
            used = used.or(Some(at));
        }
        used
    }

    fn evict_object(
        &mut self,
        at: Ref,
        keep: Option<ObjectId>,
        how: How,
        now: Now,
        effects: &mut Effects,
    ) -> EvictReport {
        let record = *self.slab.get(at);
        let cohort = self.extras.get(record.extra).map_or(NONE, |extra| extra.cohort);
        let mut followers: Vec<_> = vec![];
        if cohort != NONE {
            let others =
                self.cohorts.get(cohort).members().filter(|&id| id != record.id() && Some(id) != keep);
            followers = others.take(FOLLOWERS_MAX).collect();
            followers.sort(); // a hash set's order is nobody's business
        }
        let mut report = self.evict_alone(at, how, now, effects);
        for id in followers {
            let Some(at) = self.find_id(id) else { continue };
            let record = self.slab.get(at);
            let held = record.has(Flag::Writing)
                || record.has(Flag::Offloading)
                || record.has(Flag::OnDisk)
                || record.pin() != PinClass::None
                || self.is_leased(record, now);
            if !held {
                report.add(self.evict_alone(at, how, now, effects));
            }
        }
        report
    }

    fn evict_alone(&mut self, at: Ref, how: How, now: Now, effects: &mut Effects) -> EvictReport {
        let record = *self.slab.get(at);
        debug_assert!(
            !self.is_leased(&record, now) || moontide_types::planted("lease-evicted"),
            "a lease-holder's range is never reclaimed"
        );
        let before = self.tenants.get(record.tenant()).bytes;
        if how == How::Demote {
            if self.is_whole_on_disk(&record) {
                self.demote(at, now, effects);
                let bytes = before - self.tenants.get(record.tenant()).bytes;
                return EvictReport { objects: 1, bytes };
            }
            let under_way = self.offloading_units;
            if self.is_worth_offloading(&record) && self.start_offload(at, now, effects) {
                let bytes = (self.offloading_units - under_way) * UNIT_BYTES;
                return EvictReport { objects: 1, bytes };
            }
        }
        self.remember_for_disks(record.id(), record.epoch(), now);
        self.drop_object(at, now, effects);
        let bytes = before - self.tenants.get(record.tenant()).bytes;
        self.stats.evicted_objects += 1;
        self.stats.evicted_bytes += bytes;
        EvictReport { objects: 1, bytes }
    }

    /// Sums over the segments in use. There are some thousands at most, and nobody asks once per object.
    fn usage(&self) -> Usage {
        let in_use = |segment: &&Segment| {
            matches!(segment.phase, SegmentPhase::Serving | SegmentPhase::Waiting | SegmentPhase::Reporting)
                && !segment.is_disk()
        };
        let mut usage = Usage::default();
        for segment in self.segments.iter().flatten().filter(in_use) {
            usage.units += u64::from(segment.units);
            usage.used_units += u64::from(segment.live_units) + u64::from(segment.reserved_units);
            usage.slots += u64::from(segment.slot_count());
            usage.used_slots += u64::from(segment.taken_slots) - segment.drains.len() as u64;
        }
        usage.used_units = usage.used_units.saturating_sub(self.offloading_units);
        usage.used_slots = usage.used_slots.saturating_sub(self.offloading.len());
        usage
    }
}

#[derive(Clone, Copy, Default)]
struct Usage {
    units: u64,
    used_units: u64,
    slots: u64,
    used_slots: u64,
}

impl Usage {
    fn permille(&self) -> u16 {
        let share = |used: u64, all: u64| (used * 1000).checked_div(all).unwrap_or(0).min(1000) as u16;
        share(self.used_units, self.units).max(share(self.used_slots, self.slots))
    }
}
