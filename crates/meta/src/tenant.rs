//! Tenants of a group: quotas, usage and eviction queues.

use moontide_types::{ErrorCode, Tenant};

use crate::ids::TenantIndex;
use crate::queue::Queue;

/// Maximum number of tenants of one group that have objects: small enough to list all of them in one page and to keep
/// their metrics readable.
pub const TENANTS_MAX: usize = 4096;

/// Limits of a tenant in this group; 0 is no limit.
///
/// The master splits the cluster-wide quota into shares that sum to it, so that a group decides on its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Maximum bytes of memory, counted in whole units and with all replicas. Bytes on disk do not count.
    pub bytes_max: u64,
    /// Maximum number of objects, those on disk included.
    pub objects_max: u64,
}

/// A tenant with its quota and usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantUsage {
    /// Name as given by clients.
    pub name: Box<str>,
    /// Share of the quota in this group.
    pub quota: Quota,
    /// Live and reserved bytes.
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
    /// Evicted under memory pressure: objects that were used once, by their put.
    pub(crate) used_once: Queue,
    /// Evicted under memory pressure: objects that were used again.
    pub(crate) used_again: Queue,
    /// Evicted when no ordinary object is left.
    pub(crate) soft: Queue,
    /// Never evicted; a queue only so that every complete object is in one.
    pub(crate) hard: Queue,
    /// Objects that exist only on disks, so that there is nothing to evict from memory.
    pub(crate) on_disk: Queue,
}

impl TenantState {
    fn new(name: Box<str>) -> TenantState {
        TenantState {
            name,
            quota: Quota::default(),
            bytes: 0,
            objects: 0,
            used_once: Queue::default(),
            used_again: Queue::default(),
            soft: Queue::default(),
            hard: Queue::default(),
            on_disk: Queue::default(),
        }
    }

    pub(crate) fn usage(&self) -> TenantUsage {
        let TenantState { quota, bytes, objects, .. } = *self;
        TenantUsage { name: self.name.clone(), quota, bytes, objects }
    }

    /// Whether nothing would be lost if the tenant was forgotten.
    pub(crate) fn is_idle(&self) -> bool {
        self.objects == 0 && self.bytes == 0 && self.quota == Quota::default()
    }

    pub(crate) fn is_over_quota(&self) -> bool {
        let over = |used: u64, max: u64| max != 0 && used > max;
        over(self.bytes, self.quota.bytes_max) || over(self.objects, self.quota.objects_max)
    }

    /// Whether the tenant has as many objects as its quota allows, in memory and on disk.
    pub(crate) fn is_at_object_limit(&self) -> bool {
        self.quota.objects_max != 0 && self.objects >= self.quota.objects_max
    }

    /// Whether another object of `bytes` bytes fits into the quota after an object of `replaced` bytes is gone.
    pub(crate) fn fits_quota(&self, bytes: u64, replaced: Option<u64>) -> bool {
        let fits =
            |used: u64, less: u64, more: u64, max: u64| max == 0 || (used - less).saturating_add(more) <= max;
        fits(self.bytes, replaced.unwrap_or(0), bytes, self.quota.bytes_max)
            && fits(self.objects, replaced.is_some().into(), 1, self.quota.objects_max)
    }
}

/// All tenants of a group. The index of a tenant without objects, quota and other use may be given to another one when
/// there are [`TENANTS_MAX`].
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    by_name: hashbrown::HashMap<Box<str>, TenantIndex>,
    states: Vec<TenantState>,
}

impl Tenants {
    /// Returns the tenant of this name; creates it if it does not exist. If there are too many, it takes the place of a
    /// tenant that has no objects and no quota, and of which `is_in_use` knows no other use.
    pub(crate) fn find_or_create(
        &mut self,
        tenant: Tenant<'_>,
        is_in_use: impl Fn(TenantIndex) -> bool,
    ) -> Result<TenantIndex, ErrorCode> {
        if let Some(&index) = self.by_name.get(tenant.as_str()) {
            return Ok(index);
        }
        let index = if self.states.len() < TENANTS_MAX {
            TenantIndex(self.states.len() as u16)
        } else if moontide_rt::mutation_enabled("tenant-leak") {
            return Err(ErrorCode::TooManyTenants);
        } else {
            let idle = self.iter().find(|(index, state)| state.is_idle() && !is_in_use(*index));
            idle.ok_or(ErrorCode::TooManyTenants)?.0
        };
        let new = TenantState::new(tenant.as_str().into());
        let name = new.name.clone();
        match self.states.get_mut(usize::from(index.0)) {
            Some(state) => {
                let forgotten = std::mem::replace(state, new);
                self.by_name.remove(&forgotten.name);
            }
            None => self.states.push(new),
        }
        self.by_name.insert(name, index);
        Ok(index)
    }

    pub(crate) fn find(&self, tenant: Tenant<'_>) -> Option<TenantIndex> {
        self.by_name.get(tenant.as_str()).copied()
    }

    pub(crate) fn get(&self, index: TenantIndex) -> &TenantState {
        &self.states[usize::from(index.0)]
    }

    pub(crate) fn get_mut(&mut self, index: TenantIndex) -> &mut TenantState {
        &mut self.states[usize::from(index.0)]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (TenantIndex, &TenantState)> {
        (0..).map(TenantIndex).zip(&self.states)
    }
}
