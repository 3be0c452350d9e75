//! [`SessionManager`]: one [`SessionDriver`] for each master that hosts groups. It follows the group map: it fetches
//! the map when a driver fails, when a master mentions a newer one, and periodically.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use moontide_proto::v1;
use moontide_rt::SplitMix64;
use moontide_tasks::JoinHandle;
use moontide_types::{Clock, GroupId, MapVersion, SystemClock, Term};
use tokio::sync::{Notify, mpsc, watch};
use tracing::{debug, info, warn};

use super::calls;
use super::{NodeComponents, NodeDescriptor, SessionDriver, stopped};
use crate::event_router::EventRouter;
use crate::logic::groups::{GroupSet, HostedGroups, set_of};
use crate::logic::timing::MASTER_BACKOFF;

/// Interval of map polls while all groups are hosted: masters mention a newer version with every heartbeat.
const MAP_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Interval of map polls while a group has no master.
const MAP_POLL_INTERVAL_DEGRADED: Duration = Duration::from_millis(200);

/// Minimum time between two map polls.
const MAP_POLL_MIN: Duration = Duration::from_millis(50);

/// Timeout for the response of one master.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Signal that the group map may have changed.
#[derive(Debug, Default)]
pub(super) struct MapSignal {
    /// Version of the current map.
    followed: AtomicU64,
    notify: Notify,
}

impl MapSignal {
    /// Requests a poll of the map.
    pub(super) fn request_refresh(&self) {
        self.notify.notify_one();
    }

    /// Requests a poll if a master mentions a newer version.
    pub(super) fn version(&self, version: MapVersion) {
        // Relaxed: a hint.
        if version.0 > self.followed.load(Ordering::Relaxed) {
            self.request_refresh();
        }
    }

    /// Whether the node has a map that is as new as this version.
    pub(super) fn is_followed(&self, version: MapVersion) -> bool {
        version.0 <= self.followed.load(Ordering::Relaxed)
    }
}

/// Drivers of all sessions.
#[derive(Debug)]
pub(crate) struct SessionManager {
    descriptor: Arc<NodeDescriptor>,
    components: Arc<NodeComponents>,
    router: Arc<EventRouter>,
    /// Configured masters; each of them knows the others.
    seeds: Vec<String>,
    stop: watch::Receiver<bool>,
    map_signal: Arc<MapSignal>,
    drivers: BTreeMap<Arc<str>, ManagedSession>,
    drivers_started: u64,
    /// Masters of the current map, including those that host nothing.
    masters: BTreeSet<String>,
    /// Version of the current map.
    version: Option<u64>,
    all_groups_hosted: bool,
}

/// A running driver.
#[derive(Debug)]
struct ManagedSession {
    /// Id of the master.
    master_id: u32,
    route: Arc<str>,
    hosted: watch::Sender<HostedGroups>,
    task: JoinHandle<()>,
}

impl SessionManager {
    pub(crate) fn new(
        descriptor: NodeDescriptor,
        components: NodeComponents,
        router: Arc<EventRouter>,
        seeds: Vec<String>,
        stop: watch::Receiver<bool>,
    ) -> SessionManager {
        SessionManager {
            descriptor: Arc::new(descriptor),
            components: Arc::new(components),
            router,
            seeds,
            stop,
            map_signal: Arc::default(),
            drivers: BTreeMap::new(),
            drivers_started: 0,
            masters: BTreeSet::new(),
            version: None,
            all_groups_hosted: false,
        }
    }

    /// Runs until the node stops, and then until all drivers have unmounted and ended.
    pub(crate) async fn run(mut self) {
        let mut stop = self.stop.clone();
        // While all groups are hosted, one master is asked, in turn; otherwise all of them.
        let mut ask_one = None;
        for turn in 0.. {
            tokio::select! {
                map = self.newest_map(ask_one) => if let Some(map) = map {
                    self.masters = map.masters.iter().map(|master| master.grpc_address.clone()).collect();
                    self.follow(&map);
                },
                () = stopped(&mut stop) => break,
            }
            let wait = if self.all_groups_hosted { MAP_POLL_INTERVAL } else { MAP_POLL_INTERVAL_DEGRADED };
            ask_one = self.all_groups_hosted.then_some(turn);
            tokio::select! {
                () = stopped(&mut stop) => break,
                () = moontide_tasks::time::sleep(wait) => {}
                () = self.map_signal.notify.notified() => {
                    ask_one = None;
                    moontide_tasks::time::sleep(MAP_POLL_MIN).await;
                }
            }
        }
        for (_, session) in self.drivers {
            let _ = session.task.await;
        }
    }

    /// Returns the newest map of all masters, or the map of one of them.
    async fn newest_map(&self, one: Option<usize>) -> Option<v1::GroupMap> {
        let known = self.drivers.keys().map(|master| master.to_string()).chain(self.masters.iter().cloned());
        let mut asked: BTreeSet<String> = self.seeds.iter().cloned().chain(known).collect();
        if let Some(turn) = one
            && let Some(master) = self.drivers.keys().nth(turn % self.drivers.len().max(1))
        {
            asked = BTreeSet::from([master.to_string()]);
        }
        let NodeDescriptor { boot, ref credentials, .. } = *self.descriptor;
        let responses = asked.into_iter().map(|master| async move {
            let map = calls::group_map(&master, boot, credentials.as_ref());
            match moontide_tasks::time::timeout(RESPONSE_TIMEOUT, map).await {
                Ok(Ok(map)) => Some(map),
                Ok(Err(error)) => {
                    debug!(master, %error, "no group map");
                    None
                }
                Err(_) => None,
            }
        });
        let mut responses: FuturesUnordered<_> = responses.collect();
        let mut newest: Option<v1::GroupMap> = None;
        while let Some(response) = responses.next().await {
            let Some(map) = response else { continue };
            let of_cluster = map.groups == u32::from(self.descriptor.groups.get());
            if of_cluster && newest.as_ref().is_none_or(|newest| newest.version < map.version) {
                let enough = self.version.is_some_and(|version| version < map.version);
                newest = Some(map);
                if enough {
                    break; // do not wait for masters that do not respond
                }
            }
        }
        newest
    }

    /// Starts a driver for each master of the map, and stops all others.
    fn follow(&mut self, map: &v1::GroupMap) {
        let seeds = self.seeds.clone();
        let older = self.version.is_some_and(|version| map.version < version);
        // Masters that have lost their state start again with old versions. While another master is synced, its map is
        // right.
        if self.version == Some(map.version) || older && !self.router.none_synced() {
            return;
        }
        if older {
            warn!(
                version = map.version,
                before = self.version,
                "masters have only an older group map; following it"
            );
        }
        let mut hosts: BTreeMap<&str, (u32, HostedGroups)> = BTreeMap::new();
        let mut covered = GroupSet::none(self.descriptor.groups);
        for master in &map.masters {
            let terms = master.terms.iter().map(|&term| Term::new(term).unwrap_or(Term::ZERO));
            let numbers =
                master.groups.iter().map(|&group| GroupId(u16::try_from(group).unwrap_or(u16::MAX)));
            let groups: HostedGroups = numbers.zip(terms).collect();
            covered.extend(&set_of(self.descriptor.groups, &groups));
            // A single master may be reachable at another address than it knows.
            let seed = seeds.first().filter(|_| map.single_master);
            if !groups.is_empty() {
                hosts.insert(seed.unwrap_or(&master.grpc_address), (master.term, groups));
            }
        }
        self.version = Some(map.version);
        self.all_groups_hosted = covered.len() == usize::from(self.descriptor.groups.get());
        // Before the answers of the new masters count, a flush must not end.
        let components = Arc::clone(&self.components);
        let mut flush = components.flush.monitor();
        // First the masters that host less, so that no group has two routes. A master with another id has lost its
        // sessions, or does not rely on them. A single master keeps its driver, which detects this itself.
        let is_same = |(master, session): &(&Arc<str>, &ManagedSession)| {
            hosts.get(&***master).is_some_and(|(id, _)| *id == session.master_id || map.single_master)
        };
        let gone =
            self.drivers.iter().filter(|driver| !is_same(driver)).map(|(master, _)| Arc::clone(master));
        let gone: Vec<Arc<str>> = gone.collect();
        for master in gone {
            info!(master = %master, version = map.version, "master hosts no group any more");
            if let Some(session) = self.drivers.remove(&master) {
                self.router.close(&session.route);
            }
        }
        for (master, (_, groups)) in &hosts {
            if let Some(session) = self.drivers.get(*master) {
                self.router.set_groups(&session.route, set_of(self.descriptor.groups, groups));
                let has_changed = session.hosted.send_if_modified(|hosted| {
                    let changes = *hosted != *groups;
                    hosted.clone_from(groups);
                    changes
                });
                if has_changed {
                    flush.outdated(&session.route, SystemClock.now());
                }
            }
        }
        for (master, (master_id, groups)) in hosts {
            if !self.drivers.contains_key(master) {
                info!(master, master_id, groups = groups.len(), version = map.version, "master hosts groups");
                self.start_driver(master.into(), master_id, groups);
            }
        }
        self.map_signal.followed.store(map.version, Ordering::Relaxed);
    }

    fn start_driver(&mut self, master: Arc<str>, master_id: u32, groups: HostedGroups) {
        let (sender, events) = mpsc::unbounded_channel();
        // The driver before may still run, and its end must not change this route.
        self.drivers_started += 1;
        let route: Arc<str> = format!("{master_id} at {master}, driver {}", self.drivers_started).into();
        self.router.open(&route, set_of(self.descriptor.groups, &groups), sender);
        let (hosted, hosted_receiver) = watch::channel(groups);
        let driver = SessionDriver {
            master: Arc::clone(&master),
            route: Arc::clone(&route),
            descriptor: Arc::clone(&self.descriptor),
            components: Arc::clone(&self.components),
            router: Arc::clone(&self.router),
            events,
            hosted: hosted_receiver,
            map_signal: Arc::clone(&self.map_signal),
            stop: self.stop.clone(),
            highest_term: Term::ZERO,
            state: None,
            backoff: MASTER_BACKOFF,
            random: SplitMix64::new(self.descriptor.boot),
        };
        self.drivers.insert(
            master,
            ManagedSession { master_id, route, hosted, task: moontide_tasks::spawn(driver.run()) },
        );
    }
}
