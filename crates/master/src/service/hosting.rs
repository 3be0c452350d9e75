//! Which groups this master hosts, and what it knows of the others.
//!
//! A master that is alone hosts all groups in one term. One of several is told by its election which groups are its own, in
//! which term, and which map clients and nodes should follow; it hosts nothing before it is told.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

use moontide_meta::{Group, GroupConfig, Inheritance};
use moontide_proto::convert::{Bequest, Wire};
use moontide_proto::v1;
use moontide_types::{ErrorCode, GroupId, MapVersion, MonoTime, TenantGeneration, Term};
use parking_lot::{MappedMutexGuard, MutexGuard};

use super::{Quota, Service, refused};
use crate::election::{Document, Hosting, MasterAddresses};

/// Objects of a group that are told to its next master: sent in half a second, for which nobody can ask for them.
const ESTATE_OBJECTS_MAX: usize = 100_000;

/// A group's place in a master.
#[derive(Debug, Default)]
pub(super) enum Seat {
    /// Somebody else hosts it, or nobody.
    #[default]
    Vacant,
    /// Hosted here.
    Hosted(Box<Group>),
    /// Hosted here, and about to go to another master: nodes are heard, clients are asked to come again.
    Frozen(Box<Group>),
}

impl Seat {
    fn group_mut(&mut self) -> Option<&mut Group> {
        match self {
            Seat::Vacant => None,
            Seat::Hosted(group) | Seat::Frozen(group) => Some(group),
        }
    }
}

/// A group, for as long as one thread works with it.
#[derive(Debug)]
pub(super) struct Held<'a> {
    /// Its number.
    pub(super) index: usize,
    group: MappedMutexGuard<'a, Group>,
}

impl Held<'_> {
    /// Its term.
    pub(super) fn term(&self) -> Term {
        self.group.config().term
    }
}

impl Deref for Held<'_> {
    type Target = Group;
    fn deref(&self) -> &Group {
        &self.group
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Group {
        &mut self.group
    }
}

impl Service {
    /// A group for a client's call: `WrongMaster` if it is not hosted here, `Retry` if it is about to go.
    pub(super) fn group(&self, index: usize) -> Result<Held<'_>, ErrorCode> {
        let seat = self.seats[index].0.lock();
        if matches!(*seat, Seat::Frozen(_)) && !moontide_types::planted("frozen-group-answered") {
            return Err(ErrorCode::Retry);
        }
        held(index, seat)
    }

    /// A group for what a node says, or for what is due: also one that is about to go.
    pub(super) fn books(&self, index: usize) -> Result<Held<'_>, ErrorCode> {
        held(index, self.seats[index].0.lock())
    }

    /// All groups that are hosted, one at a time.
    pub(super) fn hosted(&self) -> impl Iterator<Item = Held<'_>> {
        (0..self.seats.len()).filter_map(|index| self.books(index).ok())
    }

    /// How many groups are hosted.
    pub fn hosted_count(&self) -> usize {
        self.hosted().count()
    }

    /// Hosts a group from now on. `inherited`: what the one before handed over.
    pub fn host(&self, hosting: Hosting, inherited: Option<Inheritance>) {
        let Hosting { group, term, .. } = hosting;
        let index = usize::from(group.0);
        let config = self.group_config(hosting);
        let mut hosted = Group::new(config, self.now());
        if let Some(inherited) = inherited {
            hosted.inherit(self.now(), inherited);
        }
        let before = std::mem::replace(&mut *self.seats[index].0.lock(), Seat::Hosted(Box::new(hosted)));
        assert!(matches!(before, Seat::Vacant), "a group is lost before it is hosted in another term");
        // Relaxed: a number that stands for itself.
        self.newest_term.fetch_max(term.get(), Ordering::Relaxed);
    }

    /// Lets go of a group: it is somebody else's. Whoever waits for something in it is told that it is not certain.
    pub fn lose(&self, group: GroupId) {
        let index = usize::from(group.0);
        if moontide_types::planted("lost-group-answered") {
            return;
        }
        let mut seat = self.seats[index].0.lock();
        if matches!(std::mem::take(&mut *seat), Seat::Vacant) {
            return;
        }
        // Still under the lock: nobody may mount in it, or order in its name, while its traces are removed.
        for node in self.nodes.read().values() {
            node.segments.lock().retain(|_, of| *of != index);
            node.forget_orders(index);
        }
        self.group_units[index].store(0, Ordering::Relaxed);
        self.removals.abandon(index);
        drop(seat);
        self.watchers.wake();
    }

    /// Keeps clients out of a group, and says what there is to inherit. None: it is not hosted.
    pub fn freeze(&self, group: GroupId) -> Option<Inheritance> {
        let mut seat = self.seats[usize::from(group.0)].0.lock();
        *seat = match std::mem::take(&mut *seat) {
            Seat::Hosted(group) | Seat::Frozen(group) => Seat::Frozen(group),
            Seat::Vacant => return None,
        };
        let now = self.now();
        seat.group_mut().map(|group| group.bequeath(now, ESTATE_OBJECTS_MAX))
    }

    /// The group stays after all.
    pub fn thaw(&self, group: GroupId) {
        let mut seat = self.seats[usize::from(group.0)].0.lock();
        *seat = match std::mem::take(&mut *seat) {
            Seat::Frozen(group) => Seat::Hosted(group),
            other => other,
        };
    }

    /// Groups of which a node knows a higher term than we have, with that term. Each is said once.
    pub fn take_ousted(&self) -> Vec<(GroupId, Term)> {
        std::mem::take(&mut *self.ousted.lock())
    }

    /// Until there is such a group.
    pub(crate) async fn ousted(&self) {
        self.ousted_news.notified().await;
    }

    /// Takes over part of what another master knows of a group that will be ours.
    pub fn bequeath(&self, m: &v1::Bequest) -> v1::OutcomesResponse {
        let taken = Bequest::from_wire(m).map_err(refused).and_then(|bequest| {
            if bequest.cluster != self.config.cluster || !self.config.shared {
                return Err(ErrorCode::WrongMaster);
            }
            self.estates.add(&bequest)
        });
        let context = match taken {
            Ok(()) => self.context(None),
            Err(code) => self.refusal(code),
        };
        v1::OutcomesResponse { context: Some(context), codes: Default::default() }
    }

    /// How many groups the cluster has.
    pub fn groups(&self) -> NonZeroU16 {
        self.config.groups
    }

    /// The number of the cluster.
    pub fn cluster(&self) -> u64 {
        self.config.cluster
    }

    /// What masters have agreed on, and who else is there.
    pub fn learn(&self, document: &Document, members: &BTreeMap<u32, MasterAddresses>) {
        let masters = document.masters.iter().map(|(number, addresses)| {
            let owners = (0u32..).zip(&document.owners);
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
        // Those that host nothing may host everything tomorrow: whoever looks for a master should know of them.
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
            alone: false,
        };
        let mut known = self.map.write();
        // Also an older one: the registry is right, whatever it has lost.
        *known = map;
        drop(known);
        let mut tenants = self.tenants.write();
        for (name, entry) in &document.tenants {
            let facts = tenants.entry_ref(name.as_str()).or_default();
            facts.generation = facts.generation.max(TenantGeneration(entry.generation));
            facts.quota = Quota { bytes_max: entry.bytes_max, objects_max: entry.objects_max };
        }
    }

    /// Until then nobody else takes our groups.
    pub fn confirm_until(&self, until: MonoTime) {
        // Relaxed: nothing is read by it but the time itself.
        self.confirmed_until.store(until.0, Ordering::Relaxed);
    }

    /// Whether somebody else may have taken our groups without our knowing.
    pub(crate) fn is_unconfirmed(&self) -> bool {
        self.config.shared && self.now().mono.0 >= self.confirmed_until.load(Ordering::Relaxed)
    }

    pub(super) fn map_version(&self) -> MapVersion {
        MapVersion(self.map.read().version)
    }

    fn group_config(&self, Hosting { group, term, previous, witnessed }: Hosting) -> GroupConfig {
        let config = &self.config;
        GroupConfig {
            previous,
            witnessed,
            seed: config.seed.wrapping_add(group.0.into()),
            placement: config.placement,
            admission: config.admission,
            high_permille: config.high_permille,
            low_permille: config.low_permille,
            reservation: config.reservation,
            reallocate_wait: config.reallocate_wait,
            // A node notices within a session's life that its master has changed, and comes back within another.
            report_wait: config.reallocate_wait.max(2 * config.session_ttl),
            absence_max: config.absence_max,
            stripe_bytes_max: config.stripe_bytes_max,
            ..GroupConfig::new(group, config.groups, term)
        }
    }
}

fn held(index: usize, seat: MutexGuard<'_, Seat>) -> Result<Held<'_>, ErrorCode> {
    match MutexGuard::try_map(seat, Seat::group_mut) {
        Ok(group) => Ok(Held { index, group }),
        Err(_) => Err(ErrorCode::WrongMaster),
    }
}
