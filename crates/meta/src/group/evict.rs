//! Eviction: the choice of victims when space is needed.
//!
//! 1. Tenants over their quota come before all others.
//! 2. Of the others, a random tenant is chosen in proportion to its objects. Its victim is the first object of one of two queues
//!    ([`EvictionOrder`](crate::eviction::EvictionOrder)).
//! 3. Ordinary objects come before soft-pinned ones; hard-pinned and leased ones are never evicted.
//!
//! If the victim's node has a disk, the victim is written there first and leaves memory afterwards. It is dropped only
//! if there is no disk, or the disk refuses it. Units that are being offloaded count as evicted here.
//!
//! A victim costs a bounded number of steps, independent of the number of objects. It leaves the index immediately, and
//! its extent drains until its node reports it as free. Draining units are not free, but they will be soon, so they
//! count as evicted here.

use moontide_types::ObjectId;
use moontide_types::limits::{PAYLOAD_ALIGN, UNIT_BYTES};
use moontide_types::record::PinClass;

use super::Group;
use super::disk::OffloadPurpose;
use super::put::{PutStart, may_hold};
use crate::effect::Effects;
use crate::ids::{NONE, RecordRef, TenantIndex};
use crate::record::{Record, RecordFlag};
use crate::segment::{Segment, SegmentPhase};
use crate::tenant::TenantState;
use crate::time::Now;

/// Result of an eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictReport {
    /// Number of evicted objects.
    pub objects: u64,
    /// Their bytes, all replicas together.
    pub bytes: u64,
    /// Units that become usable, gaps behind the records included.
    usable_units: u64,
}

impl EvictReport {
    /// Report of one object. Behind a record that starts at a page, the gap up to the next page becomes usable, too.
    fn one(bytes: u64) -> EvictReport {
        let align = if bytes >= PAYLOAD_ALIGN { PAYLOAD_ALIGN } else { UNIT_BYTES };
        EvictReport { objects: 1, bytes, usable_units: bytes.next_multiple_of(align) / UNIT_BYTES }
    }

    fn add(&mut self, other: EvictReport) {
        self.objects += other.objects;
        self.bytes += other.bytes;
        self.usable_units += other.usable_units;
    }
}

/// Maximum number of leased records that are passed over for one victim.
const LEASED_MAX: usize = 64;

/// Maximum number of cohort members that are evicted together with one victim.
const COHORT_VICTIMS_MAX: usize = 64;

/// Tenants over their quota that are tried before a tenant within its quota.
const TENANTS_TRIED: usize = 4;

/// Objects that a put without space evicts immediately; later ticks evict the rest.
const IMMEDIATE_EVICTIONS_MAX: usize = 16;

/// Handling of a victim.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VictimAction {
    /// Move to disk, if the node has one.
    Demote,
    /// Drop from memory and disk.
    Drop,
}

#[derive(Clone, Copy)]
enum VictimClass {
    Ordinary,
    Soft,
    /// Only on disk: evicted only at the object limit, since it frees no memory.
    OnDisk,
}

impl VictimClass {
    fn is_empty(self, tenant: &TenantState) -> bool {
        match self {
            VictimClass::Ordinary => tenant.used_once.len() + tenant.used_again.len() == 0,
            VictimClass::Soft => tenant.soft.len() == 0,
            VictimClass::OnDisk => tenant.on_disk.len() == 0,
        }
    }
}

impl Group {
    /// Usage of the segments in use, in thousandths: of units or of slots, whichever is higher. Gaps behind page-aligned
    /// records count as used. Draining units, and units being offloaded, count as free.
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
        while (report.objects as usize) < objects_max && usage.is_above(target_permille) {
            let Some(evicted) = self.evict_one(now, effects) else { break };
            usage.used_units = usage.used_units.saturating_sub(evicted.usable_units);
            usage.used_slots = usage.used_slots.saturating_sub(evicted.objects);
            report.add(evicted);
        }
        report
    }

    /// Evicts in advance: from the high watermark down to the low one, and the units of failed puts.
    pub(super) fn evict_to_watermark(
        &mut self,
        now: Now,
        budget: usize,
        effects: &mut Effects,
    ) -> EvictReport {
        let (high, low) =
            (self.config.eviction_high_watermark_permille, self.config.eviction_low_watermark_permille);
        let mut report = EvictReport::default();
        while self.requested_units > 0 && (report.objects as usize) < budget {
            let Some(evicted) = self.evict_one(now, effects) else {
                // The put that needs more requests it again. If memory becomes free otherwise, an old request would evict
                // the object that it was made for.
                self.requested_units = 0;
                break;
            };
            self.requested_units = self.requested_units.saturating_sub(evicted.bytes / UNIT_BYTES);
            report.add(evicted);
        }
        let pressure = self.pressure_permille();
        self.evicting |= pressure > high;
        // An eviction ends at the low watermark. From there on, objects that are added soon cause the next one.
        self.has_free_memory = pressure < low.saturating_sub(high.saturating_sub(low));
        if self.evicting && (report.objects as usize) < budget {
            report.add(self.evict(now, low, budget - report.objects as usize, effects));
            self.evicting = self.pressure_permille() > low;
        }
        report
    }

    /// Handles a put without space: evicts some objects immediately, more in the next tick.
    pub(super) fn request_space(&mut self, now: Now, put: &PutStart<'_>, units: u64, effects: &mut Effects) {
        // Not more than everything: an object that can never fit must not empty the cache.
        let all: u64 = self.usage().units;
        if units > all {
            return;
        }
        // Units being offloaded will be free soon; repeated puts in the meantime must not empty memory.
        if self.offloading_units > units + all / 32 {
            return;
        }
        // Memory is full, so the next puts need space, too. They should not all wait until a node has confirmed an eviction.
        // What will be free soon counts, so that many puts without space evict the spare units once.
        let segments = self.segments.iter().flatten().filter(|segment| may_hold(segment, put));
        let (mut own, mut draining) = (0, self.offloading_units);
        for segment in segments.filter(|segment| segment.phase == SegmentPhase::Serving) {
            own += u64::from(segment.units);
            draining += u64::from(segment.draining_units);
        }
        let low = u64::from(self.config.eviction_low_watermark_permille.min(1000));
        let spare = (own * (1000 - low) / 1000 / 2).saturating_sub(draining);
        self.requested_units = self.requested_units.max(units + spare);
        self.evict_to_watermark(now, IMMEDIATE_EVICTIONS_MAX, effects);
    }

    /// Evicts one object of a tenant, and the members of its cohort that are not in use; never `keep`.
    pub(super) fn evict_from(
        &mut self,
        tenant: TenantIndex,
        keep: ObjectId,
        now: Now,
        effects: &mut Effects,
    ) -> Option<EvictReport> {
        let at_limit = self.tenants.get(tenant).is_at_object_limit();
        let classes: &[VictimClass] = if at_limit {
            &[VictimClass::Ordinary, VictimClass::Soft, VictimClass::OnDisk]
        } else {
            &[VictimClass::Ordinary, VictimClass::Soft]
        };
        let victim = classes.iter().find_map(|&class| self.victim(tenant, class, Some(keep), now))?;
        // The space is needed now, so nothing is written to disk first.
        if at_limit || !self.can_be_demoted(self.slab.get(victim)) {
            return Some(self.evict_object(victim, Some(keep), VictimAction::Drop, now, effects));
        }
        Some(self.evict_alone(victim, VictimAction::Demote, now, effects))
    }

    fn evict_one(&mut self, now: Now, effects: &mut Effects) -> Option<EvictReport> {
        if !self.may_offload_more() {
            return None; // offload limit reached: puts wait
        }
        self.eviction_order.memory_is_full(self.objects_in_memory);
        for class in [VictimClass::Ordinary, VictimClass::Soft] {
            for tenant in self.next_tenants(class) {
                if let Some(victim) = self.victim(tenant, class, None, now) {
                    return Some(self.evict_object(victim, None, VictimAction::Demote, now, effects));
                }
            }
        }
        None
    }

    /// Returns the tenants to evict from, in order: if all objects of the first one are in use, the next one is tried.
    fn next_tenants(&mut self, class: VictimClass) -> Vec<TenantIndex> {
        let has_victims = |index: &TenantIndex| !class.is_empty(self.tenants.get(*index));
        let over = |index: &TenantIndex| self.tenants.get(*index).is_over_quota();
        let limited = self.limited.iter().copied().filter(over).filter(has_victims);
        let mut tenants: Vec<TenantIndex> = limited.take(TENANTS_TRIED).collect();
        let sampled = self.slab.sample(&mut self.rng).map(|at| self.slab.get(at).tenant());
        tenants.extend(sampled.filter(|index| !class.is_empty(self.tenants.get(*index))));
        if tenants.is_empty() {
            let any = self.tenants.iter().map(|(index, _)| index);
            tenants.extend(any.filter(|index| !class.is_empty(self.tenants.get(*index))).take(1));
        }
        tenants
    }

    /// Returns the object of a tenant that is evicted first, of those that may be evicted.
    fn victim(
        &mut self,
        tenant: TenantIndex,
        class: VictimClass,
        keep: Option<ObjectId>,
        now: Now,
    ) -> Option<RecordRef> {
        for _ in 0..LEASED_MAX {
            let at = self.first_victim(tenant, class)?;
            let record = self.slab.get(at);
            let leased = self.is_leased(record, now) && !moontide_rt::mutation_enabled("lease-evicted");
            if !leased && Some(record.id()) != keep {
                return Some(at);
            }
            // Otherwise the others behind it would not be tried.
            self.postpone_eviction(at);
        }
        None
    }

    /// Whether an object was used recently enough to stay in memory while its tenant's next victim is evicted. `record`
    /// was used repeatedly, and still has the number of the use before the present one. A pinned one always stays.
    pub(super) fn outlives_victim(&self, record: &Record) -> bool {
        if record.pin() != PinClass::None {
            return true;
        }
        let Some(victim) = self.first_victim(record.tenant(), VictimClass::Ordinary) else { return true };
        let victim = self.slab.get(victim);
        match victim.is_used_again() {
            true => record.last_use() > victim.last_use(),
            false => self.eviction_order.evicts_once(victim.last_use(), record.last_use()),
        }
    }

    fn first_victim(&self, tenant: TenantIndex, class: VictimClass) -> Option<RecordRef> {
        let tenant = self.tenants.get(tenant);
        let (once, again) = match class {
            VictimClass::Ordinary => (tenant.used_once.first(), tenant.used_again.first()),
            VictimClass::Soft => return tenant.soft.first(),
            VictimClass::OnDisk => return tenant.on_disk.first(),
        };
        let last_use = |at: RecordRef| self.slab.get(at).last_use();
        match (once, again) {
            (Some(once), Some(again)) => {
                let order = &self.eviction_order;
                Some(if order.evicts_once(last_use(once), last_use(again)) { once } else { again })
            }
            (once, again) => once.or(again),
        }
    }

    fn evict_object(
        &mut self,
        at: RecordRef,
        keep: Option<ObjectId>,
        action: VictimAction,
        now: Now,
        effects: &mut Effects,
    ) -> EvictReport {
        let record = *self.slab.get(at);
        let cohort = self.extensions.get(record.extension).map_or(NONE, |extension| extension.cohort);
        let mut followers: Vec<_> = vec![];
        if cohort != NONE {
            let others =
                self.cohorts.get(cohort).members().filter(|&id| id != record.id() && Some(id) != keep);
            followers = others.take(COHORT_VICTIMS_MAX).collect();
            followers.sort(); // the order of a hash set is not deterministic
        }
        let mut report = self.evict_alone(at, action, now, effects);
        for id in followers {
            let Some(at) = self.find_id(id) else { continue };
            let record = self.slab.get(at);
            let in_use = record.has(RecordFlag::Writing)
                || record.has(RecordFlag::Offloading)
                || record.has(RecordFlag::OnDisk)
                || record.pin() != PinClass::None
                || self.is_leased(record, now);
            if !in_use {
                report.add(self.evict_alone(at, action, now, effects));
            }
        }
        report
    }

    fn evict_alone(
        &mut self,
        at: RecordRef,
        action: VictimAction,
        now: Now,
        effects: &mut Effects,
    ) -> EvictReport {
        let record = *self.slab.get(at);
        debug_assert!(
            !self.is_leased(&record, now) || moontide_rt::mutation_enabled("lease-evicted"),
            "victim is leased"
        );
        let before = self.tenants.get(record.tenant()).bytes;
        if action == VictimAction::Demote {
            if self.can_be_demoted(&record) {
                self.demote(at, now, effects);
                let bytes = before - self.tenants.get(record.tenant()).bytes;
                return EvictReport::one(bytes);
            }
            let units_before = self.offloading_units;
            if self.should_offload(&record) && self.start_offload(at, OffloadPurpose::Evict, now, effects) {
                let bytes = (self.offloading_units - units_before) * UNIT_BYTES;
                return EvictReport::one(bytes);
            }
        }
        self.keep_disk_tombstone(record.id(), record.epoch(), now);
        self.drop_object(at, now, effects);
        self.eviction_order.evicted(record.id());
        let bytes = before - self.tenants.get(record.tenant()).bytes;
        self.stats.evicted_objects += 1;
        self.stats.evicted_bytes += bytes;
        EvictReport::one(bytes)
    }

    /// Sums over the segments in use. There are some thousands at most, and this is not called once per object.
    fn usage(&self) -> Usage {
        let in_use = |segment: &&Segment| {
            matches!(
                segment.phase,
                SegmentPhase::Serving | SegmentPhase::Quarantined | SegmentPhase::Reporting
            ) && !segment.is_disk()
        };
        let mut usage = Usage::default();
        for segment in self.segments.iter().flatten().filter(in_use) {
            usage.units += u64::from(segment.units);
            usage.used_units += u64::from(segment.live_units) + u64::from(segment.reserved_units);
            usage.used_units += u64::from(segment.gap_units());
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
        let ratio = |used: u64, all: u64| (used * 1000).checked_div(all).unwrap_or(0).min(1000) as u16;
        ratio(self.used_units, self.units).max(ratio(self.used_slots, self.slots))
    }

    /// Whether the usage is above this share. A share of 0 is nothing at all, not less than a thousandth.
    fn is_above(&self, permille: u16) -> bool {
        self.permille() > permille || permille == 0 && self.used_units + self.used_slots > 0
    }
}
