//! Tenants of a group: their quotas, what they use, and the queues from which they are evicted.

use moontide_types::{ErrorCode, Tenant};

use crate::queue::Queue;

/// Names a tenant within one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantIx(pub u16);

/// Most tenants of one group: a table of them is listed in one page, and their metrics are still readable.
pub(crate) const TENANTS_MAX: usize = 4096;

/// How much a tenant may store in this group; 0 is no limit.
///
/// A cluster's quota is split by the master into shares that sum to it, so that a group decides alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Most bytes of memory, counted in whole units and with all replicas. What is on disk does not count.
    pub bytes_max: u64,
    /// Most objects, those on disk included.
    pub objects_max: u64,
}

/// A tenant, its quota and what it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantUsage {
    /// Its name.
    pub name: Box<str>,
    /// Its quota in this group.
    pub quota: Quota,
    /// Bytes live and reserved.
    pub bytes: u64,
    /// Objects, those being written included.
    pub objects: u64,
}

#[derive(Debug)]
pub(crate) struct TenantState {
    pub(crate) name: Box<str>,
    pub(crate) quota: Quota,
    pub(crate) bytes: u64,
    pub(crate) objects: u64,
    /// Evicted under pressure.
    pub(crate) ordinary: Queue,
    /// Evicted when nothing ordinary is left.
    pub(crate) soft: Queue,
    /// Never evicted; a queue only so that every complete object is in one.
    pub(crate) hard: Queue,
    /// Nowhere but on disks, so that there is nothing to evict from memory.
    pub(crate) on_disk: Queue,
}

impl TenantState {
    pub(crate) fn is_over_quota(&self) -> bool {
        let over = |used: u64, max: u64| max != 0 && used > max;
        over(self.bytes, self.quota.bytes_max) || over(self.objects, self.quota.objects_max)
    }

    /// Whether it has all objects that it may have, wherever they are.
    pub(crate) fn has_too_many(&self) -> bool {
        self.quota.objects_max != 0 && self.objects >= self.quota.objects_max
    }

    /// Whether another object of so many bytes would stay within the quota, once one of `replaced` bytes is gone.
    pub(crate) fn has_room_for(&self, bytes: u64, replaced: Option<u64>) -> bool {
        let fits =
            |used: u64, less: u64, more: u64, max: u64| max == 0 || (used - less).saturating_add(more) <= max;
        fits(self.bytes, replaced.unwrap_or(0), bytes, self.quota.bytes_max)
            && fits(self.objects, replaced.is_some().into(), 1, self.quota.objects_max)
    }
}

/// All tenants of a group. None is ever forgotten: their number is bounded, and their numbers stay valid.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    by_name: hashbrown::HashMap<Box<str>, TenantIx>,
    states: Vec<TenantState>,
}

impl Tenants {
    /// The tenant of this name, which is new if it was never heard of.
    pub(crate) fn named(&mut self, tenant: Tenant<'_>) -> Result<TenantIx, ErrorCode> {
        if let Some(&known) = self.by_name.get(tenant.as_str()) {
            return Ok(known);
        }
        if self.states.len() == TENANTS_MAX {
            return Err(ErrorCode::TooLarge);
        }
        let ix = TenantIx(self.states.len() as u16);
        let name: Box<str> = tenant.as_str().into();
        self.by_name.insert(name.clone(), ix);
        self.states.push(TenantState {
            name,
            quota: Quota::default(),
            bytes: 0,
            objects: 0,
            ordinary: Queue::default(),
            soft: Queue::default(),
            hard: Queue::default(),
            on_disk: Queue::default(),
        });
        Ok(ix)
    }

    pub(crate) fn find(&self, tenant: Tenant<'_>) -> Option<TenantIx> {
        self.by_name.get(tenant.as_str()).copied()
    }

    pub(crate) fn get(&self, ix: TenantIx) -> &TenantState {
        &self.states[usize::from(ix.0)]
    }

    pub(crate) fn get_mut(&mut self, ix: TenantIx) -> &mut TenantState {
        &mut self.states[usize::from(ix.0)]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (TenantIx, &TenantState)> {
        (0..).map(TenantIx).zip(&self.states)
    }
}
