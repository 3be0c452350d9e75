//! [`Fleet`]: one [`Driver`] for each master that hosts groups. Follows the group map: asks for it when a driver is in
//! trouble, when a master mentions a newer one, and now and then.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moontide_proto::v1;
use moontide_types::{GroupId, MapVersion, Term};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tracing::{debug, info, warn};

use super::calls;
use super::{Driver, Facts, Parts, stopped};
use crate::decide::groups::{GroupSet, Hosted, set_of};
use crate::decide::pace::Backoff;
use crate::lines::Lines;

/// How often the map is asked for when all is well: a newer one is heard of with every heartbeat.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The same, while some group has no master.
const LOOK_SOON: Duration = Duration::from_millis(200);

/// Not more often than that.
const LOOK_PAUSE: Duration = Duration::from_millis(50);

/// How long one master has to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// That something may have changed.
#[derive(Debug, Default)]
pub(super) struct News {
    /// The version of the map that is followed.
    followed: AtomicU64,
    notify: Notify,
}

impl News {
    /// The map should be looked at.
    pub(super) fn look(&self) {
        self.notify.notify_one();
    }

    /// A master has mentioned a version.
    pub(super) fn version(&self, version: MapVersion) {
        // Relaxed: a hint.
        if version.0 > self.followed.load(Ordering::Relaxed) {
            self.look();
        }
    }
}

/// All drivers.
#[derive(Debug)]
pub(crate) struct Fleet {
    facts: Arc<Facts>,
    parts: Arc<Parts>,
    lines: Arc<Lines>,
    /// Masters that were named at the start; any of them knows the others.
    seeds: Vec<String>,
    stop: watch::Receiver<bool>,
    news: Arc<News>,
    drivers: BTreeMap<Arc<str>, Running>,
    /// Masters that were mentioned, also those that host nothing.
    known: BTreeSet<String>,
    /// The map that is followed.
    version: Option<u64>,
    covered: bool,
}

/// A driver that runs.
#[derive(Debug)]
struct Running {
    /// The master's number.
    number: u32,
    line: Arc<str>,
    wanted: watch::Sender<Hosted>,
    task: JoinHandle<()>,
}

impl Fleet {
    pub(crate) fn new(
        facts: Facts,
        parts: Parts,
        lines: Arc<Lines>,
        seeds: Vec<String>,
        stop: watch::Receiver<bool>,
    ) -> Fleet {
        Fleet {
            facts: Arc::new(facts),
            parts: Arc::new(parts),
            lines,
            seeds,
            stop,
            news: Arc::default(),
            drivers: BTreeMap::new(),
            known: BTreeSet::new(),
            version: None,
            covered: false,
        }
    }

    /// Runs until told to stop, and then until all drivers have said goodbye.
    pub(crate) async fn run(mut self) {
        let mut stop = self.stop.clone();
        // When all is well one master is asked, each in turn; otherwise all of them.
        let mut ask_one = None;
        for turn in 0.. {
            tokio::select! {
                map = self.newest_map(ask_one) => if let Some(map) = map {
                    self.known = map.masters.iter().map(|master| master.grpc_address.clone()).collect();
                    self.follow(&map);
                },
                () = stopped(&mut stop) => break,
            }
            let wait = if self.covered { LOOK_EVERY } else { LOOK_SOON };
            ask_one = self.covered.then_some(turn);
            tokio::select! {
                () = stopped(&mut stop) => break,
                () = tokio::time::sleep(wait) => {}
                () = self.news.notify.notified() => {
                    ask_one = None;
                    tokio::time::sleep(LOOK_PAUSE).await;
                }
            }
        }
        for (_, running) in self.drivers {
            let _ = running.task.await;
        }
    }

    /// The newest map that any master knows, or one of them.
    async fn newest_map(&self, one: Option<usize>) -> Option<v1::GroupMap> {
        let known = self.drivers.keys().map(|master| master.to_string()).chain(self.known.iter().cloned());
        let mut asked: BTreeSet<String> = self.seeds.iter().cloned().chain(known).collect();
        if let Some(turn) = one
            && let Some(master) = self.drivers.keys().nth(turn % self.drivers.len().max(1))
        {
            asked = BTreeSet::from([master.to_string()]);
        }
        let mut answers = JoinSet::new();
        for master in asked {
            let boot = self.facts.boot;
            answers.spawn(async move {
                let answer = tokio::time::timeout(ANSWER_MAX, calls::group_map(&master, boot)).await;
                match answer {
                    Ok(Ok(map)) => Some(map),
                    Ok(Err(failure)) => {
                        debug!(master, %failure, "no map");
                        None
                    }
                    Err(_) => None,
                }
            });
        }
        let mut newest: Option<v1::GroupMap> = None;
        while let Some(answer) = answers.join_next().await {
            let Ok(Some(map)) = answer else { continue };
            let of_cluster = map.groups == u32::from(self.facts.groups.get());
            if of_cluster && newest.as_ref().is_none_or(|newest| newest.version < map.version) {
                let enough = self.version.is_some_and(|version| version < map.version);
                newest = Some(map);
                if enough {
                    break; // those that do not answer are not worth waiting for
                }
            }
        }
        newest
    }

    /// Has a driver for each master of the map, and no other.
    fn follow(&mut self, map: &v1::GroupMap) {
        let seeds = self.seeds.clone();
        let older = self.version.is_some_and(|version| map.version < version);
        // Masters that have forgotten everything begin anew; while one of the others is heard, it is right.
        if self.version == Some(map.version) || older && !self.lines.all_bad() {
            return;
        }
        if older {
            warn!(
                version = map.version,
                before = self.version,
                "masters know an older map only; following it"
            );
        }
        let mut hosts: BTreeMap<&str, (u32, Hosted)> = BTreeMap::new();
        let mut covered = GroupSet::none(self.facts.groups);
        for master in &map.masters {
            let terms = master.terms.iter().map(|&term| Term::new(term).unwrap_or(Term::ZERO));
            let numbers =
                master.groups.iter().map(|&group| GroupId(u16::try_from(group).unwrap_or(u16::MAX)));
            let groups: Hosted = numbers.zip(terms).collect();
            covered.extend(&set_of(self.facts.groups, &groups));
            // One that is alone may be reached in another way than it knows of.
            let seed = seeds.first().filter(|_| map.alone);
            if !groups.is_empty() {
                hosts.insert(seed.unwrap_or(&master.grpc_address), (master.term, groups));
            }
        }
        self.version = Some(map.version);
        self.covered = covered.len() == usize::from(self.facts.groups.get());
        self.news.followed.store(map.version, Ordering::Relaxed);
        // Those that host less first, so that no group has two lines.
        // One that has another number forgot its sessions, or does not count on them; one that is alone keeps its driver,
        // which finds out by itself.
        let is_same = |(master, running): &(&Arc<str>, &Running)| {
            hosts.get(&***master).is_some_and(|(number, _)| *number == running.number || map.alone)
        };
        let gone =
            self.drivers.iter().filter(|driver| !is_same(driver)).map(|(master, _)| Arc::clone(master));
        let gone: Vec<Arc<str>> = gone.collect();
        for master in gone {
            info!(master = %master, version = map.version, "master hosts nothing any more");
            if let Some(running) = self.drivers.remove(&master) {
                self.lines.close(&running.line);
            }
        }
        for (master, (_, groups)) in &hosts {
            if let Some(running) = self.drivers.get(*master) {
                self.lines.set_groups(&running.line, set_of(self.facts.groups, groups));
                running.wanted.send_if_modified(|wanted| {
                    let changes = *wanted != *groups;
                    wanted.clone_from(groups);
                    changes
                });
            }
        }
        for (master, (number, groups)) in hosts {
            if !self.drivers.contains_key(master) {
                info!(master, number, groups = groups.len(), version = map.version, "master hosts groups");
                self.hire(master.into(), number, groups);
            }
        }
    }

    fn hire(&mut self, master: Arc<str>, number: u32, groups: Hosted) {
        let (events, taken) = mpsc::unbounded_channel();
        let line: Arc<str> = format!("{number} at {master}").into();
        self.lines.open(&line, set_of(self.facts.groups, &groups), events);
        let (wanted, wishes) = watch::channel(groups);
        let driver = Driver {
            master: Arc::clone(&master),
            line: Arc::clone(&line),
            facts: Arc::clone(&self.facts),
            parts: Arc::clone(&self.parts),
            lines: Arc::clone(&self.lines),
            events: taken,
            wanted: wishes,
            news: Arc::clone(&self.news),
            stop: self.stop.clone(),
            highest_term: Term::ZERO,
            conversation: None,
            backoff: Backoff::new(self.facts.boot),
        };
        self.drivers.insert(master, Running { number, line, wanted, task: tokio::spawn(driver.run()) });
    }
}
