//! Hosted groups of this master, and the group map.
//!
//! A single master hosts all groups in one term. For one of several masters the elector sets the hosted groups, their
//! terms and the group map; before that it hosts none.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

use moontide_meta::{Effects, Group, GroupConfig, GroupHandoff};
use moontide_proto::convert::{HandoffGroupRequest, Wire};
use moontide_proto::v1;
use moontide_types::{ErrorCode, GroupId, MapVersion, MonoTime, TenantGeneration, Term};
use parking_lot::{MappedMutexGuard, MutexGuard};

use super::{Quota, Service, TenantInfo, refused};
use crate::election::{ClusterState, GroupAssignment, MasterAddresses};

/// Maximum number of objects of a handoff: sent in half a second, during which the group is not served.
const HANDOFF_OBJECTS_MAX: usize = 100_000;

/// State of one group at this master.
#[derive(Debug, Default)]
pub(super) enum GroupSlot {
    /// Not hosted here.
    #[default]
    Vacant,
    /// Hosted here.
    Hosted(Box<Group>),
    /// Hosted here during a handoff to another master: node messages are applied, clients get `Retry`.
    HandingOff(Box<Group>),
}

impl GroupSlot {
    fn group_mut(&mut self) -> Option<&mut Group> {
        match self {
            GroupSlot::Vacant => None,
            GroupSlot::Hosted(group) | GroupSlot::HandingOff(group) => Some(group),
        }
    }
}

/// Locked group.
#[derive(Debug)]
pub(super) struct GroupGuard<'a> {
    /// Index of the group.
    pub(super) index: usize,
    group: MappedMutexGuard<'a, Group>,
}

impl GroupGuard<'_> {
    /// Returns the term of the group.
    pub(super) fn term(&self) -> Term {
        self.group.config().term
    }
}

impl Deref for GroupGuard<'_> {
    type Target = Group;
    fn deref(&self) -> &Group {
        &self.group
    }
}

impl DerefMut for GroupGuard<'_> {
    fn deref_mut(&mut self) -> &mut Group {
        &mut self.group
    }
}

impl Service {
    /// Locks a group for a client's call. Fails with `WrongMaster` if it is not hosted here, with `Retry` during a
    /// handoff.
    pub(super) fn group(&self, index: usize) -> Result<GroupGuard<'_>, ErrorCode> {
        let slot = self.group_slots[index].0.lock();
        if matches!(*slot, GroupSlot::HandingOff(_))
            && !moontide_rt::mutation_enabled("frozen-group-answered")
        {
            return Err(ErrorCode::Retry);
        }
        lock_hosted(index, slot)
    }

    /// Locks a group for a message of a node or for periodic work, also during a handoff.
    pub(super) fn group_for_node(&self, index: usize) -> Result<GroupGuard<'_>, ErrorCode> {
        lock_hosted(index, self.group_slots[index].0.lock())
    }

    /// Iterates over all hosted groups, each locked in turn.
    pub(super) fn hosted(&self) -> impl Iterator<Item = GroupGuard<'_>> {
        (0..self.group_slots.len()).filter_map(|index| self.group_for_node(index).ok())
    }

    /// Returns the number of hosted groups.
    pub fn hosted_count(&self) -> usize {
        self.hosted().count()
    }

    /// Hosts a group from now on, with the handoff of the previous owner, if there is one.
    pub fn host(&self, assignment: GroupAssignment, handoff: Option<GroupHandoff>) {
        let GroupAssignment { group, term, .. } = assignment;
        let index = usize::from(group.0);
        let config = self.group_config(assignment);
        let mut hosted = Group::new(config, self.now());
        if let Some(mut handoff) = handoff {
            self.signer.took_over(index, std::mem::take(&mut handoff.node_keys));
            hosted.import_handoff(self.now(), handoff);
        }
        let before =
            std::mem::replace(&mut *self.group_slots[index].0.lock(), GroupSlot::Hosted(Box::new(hosted)));
        assert!(
            matches!(before, GroupSlot::Vacant),
            "a group is released before it is hosted in another term"
        );
        // Relaxed: no other data depends on the number.
        self.newest_term.fetch_max(term.get(), Ordering::Relaxed);
    }

    /// Releases a group that another master owns. Pending removals in it return `Pending`.
    pub fn release_group(&self, group: GroupId) {
        let index = usize::from(group.0);
        if moontide_rt::mutation_enabled("lost-group-answered") {
            return;
        }
        let mut slot = self.group_slots[index].0.lock();
        if matches!(std::mem::take(&mut *slot), GroupSlot::Vacant) {
            return;
        }
        // Still under the lock: no thread may mount a segment in it or enqueue a command for it during the cleanup.
        for node in self.nodes.read().values() {
            node.segments.lock().retain(|_, of| *of != index);
            node.discard_commands(index);
        }
        self.group_units[index].store(0, Ordering::Relaxed);
        self.signer.released(index);
        self.eviction_trials.lock().release(group);
        self.removals.abandon(index);
        drop(slot);
        self.watchers.wake();
    }

    /// Stops serving clients of a group, and returns its state for the new owner. `None` if it is not hosted.
    pub fn begin_handoff(&self, group: GroupId) -> Option<GroupHandoff> {
        let mut slot = self.group_slots[usize::from(group.0)].0.lock();
        *slot = match std::mem::take(&mut *slot) {
            GroupSlot::Hosted(group) | GroupSlot::HandingOff(group) => GroupSlot::HandingOff(group),
            GroupSlot::Vacant => return None,
        };
        let now = self.now();
        slot.group_mut().map(|hosted| GroupHandoff {
            node_keys: self.signer.handed_off(usize::from(group.0)),
            ..hosted.export_handoff(now, HANDOFF_OBJECTS_MAX)
        })
    }

    /// Ends a handoff without a change of ownership: the group is served again.
    pub fn cancel_handoff(&self, group: GroupId) {
        let mut slot = self.group_slots[usize::from(group.0)].0.lock();
        *slot = match std::mem::take(&mut *slot) {
            GroupSlot::HandingOff(group) => GroupSlot::Hosted(group),
            other => other,
        };
    }

    /// Returns the groups for which a node knows a higher term than this master, with that term. Each is returned once.
    pub fn take_superseded(&self) -> Vec<(GroupId, Term)> {
        std::mem::take(&mut *self.superseded.lock())
    }

    /// Waits until [`Service::take_superseded`] returns a group.
    pub(crate) async fn superseded(&self) {
        self.superseded_notify.notified().await;
    }

    /// Receives one chunk of a handoff from another master.
    pub fn handoff_group(&self, m: &v1::HandoffGroupRequest) -> v1::OutcomesResponse {
        let received = HandoffGroupRequest::from_wire(m).map_err(refused).and_then(|request| {
            if request.cluster != self.config.cluster || !self.config.multi_master {
                return Err(ErrorCode::WrongMaster);
            }
            self.handoffs.add(&request)
        });
        let context = match received {
            Ok(()) => self.context(None),
            Err(code) => self.refusal(code),
        };
        v1::OutcomesResponse { context: Some(context), codes: Default::default() }
    }

    /// Returns the number of groups of the cluster.
    pub fn groups(&self) -> NonZeroU16 {
        self.config.groups
    }

    /// Returns the id of the cluster.
    pub fn cluster(&self) -> u64 {
        self.config.cluster
    }

    /// Updates group map and tenants from the cluster state and the members of the registry.
    pub fn update_cluster_state(&self, document: &ClusterState, members: &BTreeMap<u32, MasterAddresses>) {
        let masters = document.masters.iter().map(|(number, addresses)| {
            let owners = (0u32..).zip(&document.group_owners);
            let own =
                owners.filter_map(|(group, owner)| Some((group, owner.filter(|o| o.master == *number)?)));
            let (groups, terms) = own.map(|(group, owner)| (group, owner.term)).unzip();
            v1::MasterEntry {
                grpc_address: addresses.grpc.clone(),
                frame_address: addresses.frame.clone(),
                term: *number,
                groups,
                terms,
            }
        });
        // Masters without groups may get groups later: clients that search a master need their addresses.
        let idle = members.iter().filter(|(number, _)| !document.masters.contains_key(number));
        let idle = idle.map(|(number, addresses)| v1::MasterEntry {
            grpc_address: addresses.grpc.clone(),
            frame_address: addresses.frame.clone(),
            term: *number,
            ..Default::default()
        });
        let map = v1::GroupMap {
            version: document.version,
            groups: self.config.groups.get().into(),
            masters: masters.chain(idle).collect(),
            single_master: false,
        };
        let mut known = self.map.write();
        // Also an older version: the registry is authoritative, even after data loss.
        *known = map;
        drop(known);
        let mut effects = Effects::new();
        for mut group in self.hosted() {
            let owner = document.group_owners.get(group.index).copied().flatten();
            if let Some(owner) = owner.filter(|owner| owner.term == group.term().get()) {
                group.excluded(owner.exclusion, &mut effects);
                self.deliver(&group, &mut effects);
            }
        }
        let mut tenants = self.tenants.write();
        for (name, entry) in &document.tenants {
            let info = tenants.entry_ref(name.as_str()).or_default();
            info.generation = info.generation.max(TenantGeneration(entry.generation));
            info.quota = Quota { bytes_max: entry.bytes_max, objects_max: entry.objects_max };
        }
        // Another master has lifted the last limit of these; a generation that nodes have reported remains.
        let mut lifted = vec![];
        tenants.retain(|name, info| {
            if !document.tenants.contains_key(&**name) && info.quota != Quota::default() {
                info.quota = Quota::default();
                lifted.push(name.clone());
            }
            *info != TenantInfo::default()
        });
        drop(tenants);
        lifted.iter().for_each(|name| self.split_quota(name, Quota::default()));
    }

    /// Returns the numbers of exclusions that the master should make durable: removals and upserts answer `Pending` until
    /// then.
    pub fn wanted_exclusions(&self) -> Vec<(GroupId, u32)> {
        let now = self.now();
        let wanted = self.hosted().map(|group| (GroupId(group.index as u16), group.wanted_exclusion(now)));
        wanted.filter_map(|(group, number)| Some((group, number?))).collect()
    }

    /// Makes the numbers of exclusions of a single master durable with `store`, if any is to be incremented.
    pub fn store_exclusions<E>(&self, store: impl FnOnce(&[u32]) -> Result<(), E>) -> Result<(), E> {
        let wanted = self.wanted_exclusions();
        if wanted.is_empty() {
            return Ok(());
        }
        let mut numbers = vec![0; self.group_slots.len()];
        self.hosted().for_each(|group| numbers[group.index] = group.exclusion());
        wanted.iter().for_each(|&(group, number)| numbers[usize::from(group.0)] = number);
        store(&numbers)?;
        let mut effects = Effects::new();
        for mut group in self.hosted() {
            let number = numbers[group.index];
            group.excluded(number, &mut effects);
            self.deliver(&group, &mut effects);
        }
        Ok(())
    }

    /// Sets the time until which no other master claims the groups of this one.
    pub fn confirm_until(&self, until: MonoTime) {
        // Relaxed: no other data depends on the time.
        self.confirmed_until.store(until.0, Ordering::Relaxed);
    }

    /// Returns whether another master may own the groups already, because the registry lease is not confirmed.
    pub(crate) fn is_unconfirmed(&self) -> bool {
        self.config.multi_master && self.now().mono.0 >= self.confirmed_until.load(Ordering::Relaxed)
    }

    pub(super) fn map_version(&self) -> MapVersion {
        MapVersion(self.map.read().version)
    }

    fn group_config(
        &self,
        GroupAssignment { group, term, previous, exclusion }: GroupAssignment,
    ) -> GroupConfig {
        let config = &self.config;
        // A node detects a change of its master within one session TTL, and registers again within another.
        let report_wait = config.reallocation_delay.max(2 * config.session_ttl);
        let defaults = GroupConfig::new(group, config.groups, term);
        GroupConfig {
            previous_term: previous,
            exclusion,
            seed: config.seed.wrapping_add(group.0.into()),
            placement: config.placement,
            offload: config.offload,
            admission: config.admission,
            eviction_high_watermark_permille: config.eviction_high_watermark_permille,
            eviction_low_watermark_permille: config.eviction_low_watermark_permille,
            reservation: config.reservation,
            reallocation_delay: config.reallocation_delay,
            report_wait,
            // Nothing is given up that was in sync within the time of a report: `Group::excluded` relies on it.
            rejoin_window: config.rejoin_window.max(report_wait),
            repair_delay: config.repair_delay,
            rebalance_bytes_per_s: config.rebalance_bytes_per_s,
            rebalance_skew_permille: config.rebalance_skew_permille,
            hot_copy_bytes: config.hot_copy_bytes,
            hot_copy_idle: config.hot_copy_idle,
            disk_rejoin_window: defaults.disk_rejoin_window.max(report_wait),
            stripe_bytes_max: config.stripe_bytes_max,
            ..defaults
        }
    }
}

fn lock_hosted(index: usize, slot: MutexGuard<'_, GroupSlot>) -> Result<GroupGuard<'_>, ErrorCode> {
    match MutexGuard::try_map(slot, GroupSlot::group_mut) {
        Ok(group) => Ok(GroupGuard { index, group }),
        Err(_) => Err(ErrorCode::WrongMaster),
    }
}
