//! Election states with a real etcd, while masters are killed, paused and started at random, and etcd is stopped.
//!
//! Each master is a task with its own registry client that acts as an elector: join, renew, read, claim, hand off.
//! The test records every snapshot and every set of hosted groups, and checks:
//!
//! - no master hosts a group in a term in which another master ever hosted it;
//! - the term of a group increases with every change of its owner, and never decreases;
//! - when the disturbances are over, all groups are hosted within two leases.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_master::election::{ClusterState, ElectionState, MasterAddresses, Registry};
use moontide_rt::SplitMix64;
use moontide_types::{Clock, GroupId, SystemClock, Term};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::etcd::Etcd;

const LEASE: Duration = Duration::from_secs(2);
const GROUPS: u16 = 8;
const MASTERS: usize = 4;
const DISTURBED: Duration = Duration::from_secs(14);
/// etcd checks for expired leases twice per second, and a busy machine is late.
const LATE: Duration = Duration::from_secs(1);

/// All snapshots and hosted groups of all masters.
#[derive(Default)]
struct History {
    /// Every observed cluster state, by version.
    documents: BTreeMap<u64, ClusterState>,
    /// Master that hosted a group in a term: the number of its life.
    hosts: BTreeMap<(GroupId, Term), u64>,
    /// Groups that each live master hosts now.
    hosted_by_life: BTreeMap<u64, BTreeMap<GroupId, Term>>,
    lives: u64,
}

impl History {
    fn record_state(&mut self, document: &ClusterState) {
        let known = self.documents.entry(document.version).or_insert_with(|| document.clone());
        assert_eq!(known, document, "two cluster states have the same version");
    }

    fn record_hosted(&mut self, life: u64, hosted: &BTreeMap<GroupId, Term>) {
        for (&group, &term) in hosted {
            let host = *self.hosts.entry((group, term)).or_insert(life);
            assert_eq!(host, life, "two masters host {group:?} in term {term}");
        }
        self.hosted_by_life.insert(life, hosted.clone());
    }

    /// Checks the recorded cluster states. Returns the number of changes of owners.
    fn check(&self) -> usize {
        let mut changes = 0;
        for (before, after) in self.documents.values().zip(self.documents.values().skip(1)) {
            assert!(after.last_term >= before.last_term);
            for (group, (old, new)) in before.group_owners.iter().zip(&after.group_owners).enumerate() {
                let Some(old) = old else { continue };
                let new = new.expect("an owned group keeps an owner");
                assert!(new.term >= old.term, "the term of group {group} decreases: {old:?} {new:?}");
                if new.master != old.master {
                    assert!(
                        new.term > old.term,
                        "group {group} changes its owner in one term: {old:?} {new:?}"
                    );
                    changes += 1;
                }
            }
        }
        changes
    }

    /// Returns the number of groups that a live master hosts in the term of the newest cluster state.
    fn hosted(&self) -> usize {
        let Some((_, newest)) = self.documents.last_key_value() else { return 0 };
        let is_hosted = |group: u16, term: u32| {
            let mut live = self.hosted_by_life.values();
            live.any(|hosted| hosted.get(&GroupId(group)).is_some_and(|hosted| hosted.get() == term))
        };
        let owners = (0u16..).zip(&newest.group_owners);
        owners.filter(|(group, owner)| owner.is_some_and(|owner| is_hosted(*group, owner.term))).count()
    }
}

/// A running master, until it is killed or shuts down.
struct Running {
    life: u64,
    task: JoinHandle<()>,
    paused: Arc<AtomicBool>,
    leaving: Arc<AtomicBool>,
}

impl Running {
    fn start(registry: Arc<dyn Registry>, history: &Arc<Mutex<History>>) -> Running {
        let (paused, leaving) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let life = {
            let mut history = history.lock();
            history.lives += 1;
            history.lives
        };
        let master = Master {
            registry,
            history: Arc::clone(history),
            life,
            paused: paused.clone(),
            leaving: leaving.clone(),
        };
        Running { life, task: tokio::spawn(master.run()), paused, leaving }
    }

    /// Kills the master immediately, without a shutdown.
    async fn kill(self, history: &Mutex<History>) {
        self.task.abort();
        if let Err(ended) = self.task.await {
            assert!(ended.is_cancelled(), "the master has failed: {ended}");
        }
        history.lock().hosted_by_life.remove(&self.life);
    }
}

struct Master {
    registry: Arc<dyn Registry>,
    history: Arc<Mutex<History>>,
    life: u64,
    paused: Arc<AtomicBool>,
    leaving: Arc<AtomicBool>,
}

impl Master {
    async fn run(self) {
        while !self.leaving.load(Ordering::Relaxed) {
            if let Some(state) = self.join().await {
                self.participate(state).await;
            }
        }
    }

    fn addresses(&self) -> MasterAddresses {
        MasterAddresses { grpc: format!("life{}:1", self.life), frame: format!("life{}:2", self.life) }
    }

    /// Takes an id from the cluster state and joins with it.
    async fn join(&self) -> Option<ElectionState> {
        let snapshot = self.registry.read().await.ok()?;
        let Some((version, document)) = &snapshot.document else {
            let first = ClusterState::new(NonZeroU16::new(GROUPS).unwrap());
            let _ = self.registry.write(None, &first).await;
            return None;
        };
        let (next, number) = document.with_next_term().expect("few terms are used");
        if !matches!(self.registry.write(Some(version), &next).await, Ok(true)) {
            return None;
        }
        let sent = SystemClock.now();
        self.registry.join(number, &self.addresses(), LEASE).await.ok()?;
        Some(ElectionState::new(number, self.addresses(), LEASE, sent))
    }

    async fn participate(&self, mut state: ElectionState) {
        let number = state.number();
        loop {
            while self.paused.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(20)).await; // like a stopped process: it keeps its state
            }
            let sent = SystemClock.now();
            match self.registry.renew(number).await {
                Ok(true) => state.renewed(sent),
                Ok(false) => {
                    state.lost_membership();
                    self.history.lock().record_hosted(self.life, state.hosted());
                    return;
                }
                Err(_) => {}
            }
            let Ok(snapshot) = self.registry.read().await else { continue };
            let Some((version, document)) = &snapshot.document else { panic!("the cluster state is gone") };
            let plan = {
                let mut history = self.history.lock();
                history.record_state(document);
                let plan = state.observe(SystemClock.now(), &snapshot);
                history.record_hosted(self.life, state.hosted());
                plan
            };
            if self.leaving.load(Ordering::Relaxed) {
                state.retire();
                let alone = snapshot.members.keys().all(|&member| member == number.get());
                if state.hosted().is_empty() || alone {
                    let _ = self.registry.remove(number).await;
                    state.lost_membership();
                    self.history.lock().record_hosted(self.life, state.hosted());
                    return;
                }
            }
            let next = match (plan.claim, plan.hand_off) {
                (Some(next), _) => Some(next),
                (None, Some(transfer)) => {
                    let changed = document.with_owner(&[transfer.group], transfer.to, &transfer.addresses);
                    Some(changed.expect("few terms are used").0)
                }
                (None, None) => None,
            };
            match next {
                Some(next) => {
                    let _ = self.registry.write(Some(version), &next).await;
                }
                None => self.registry.changed(&snapshot, LEASE / 5).await,
            }
        }
    }
}

fn millis(number: usize) -> Duration {
    Duration::from_millis(number as u64)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_has_one_host_per_term_under_master_churn() {
    let Some(etcd) = Etcd::start(1).await else { return };
    let fixed = std::env::var("MOONTIDE_SEED").ok().map(|seed| seed.parse().expect("a seed is a number"));
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.as_nanos() as u64);
    let seed = fixed.unwrap_or_else(clock);
    println!("MOONTIDE_SEED={seed}");
    let mut rng = SplitMix64::new(seed);
    let history = Arc::new(Mutex::new(History::default()));
    let start = || Running::start(etcd.open("masters"), &history);
    let mut masters: Vec<Running> = (0..MASTERS).map(|_| start()).collect();
    let end = Instant::now() + DISTURBED;
    let mut counts = [0; 4];
    while Instant::now() < end {
        sleep(millis(rng.index(900))).await;
        let index = rng.index(masters.len());
        let choice = rng.index(counts.len());
        counts[choice] += 1;
        match choice {
            0 => {
                let killed = std::mem::replace(&mut masters[index], start());
                killed.kill(&history).await;
            }
            1 => {
                let leaving = std::mem::replace(&mut masters[index], start());
                leaving.leaving.store(true, Ordering::Relaxed);
                // The shutdown may take longer; then the master is killed during it.
                sleep(millis(rng.index(800))).await;
                leaving.kill(&history).await;
            }
            2 => {
                // Shorter than its lease, or longer: then the master is replaced without its knowledge.
                let (paused, pause) = (Arc::clone(&masters[index].paused), millis(300 + rng.index(4000)));
                paused.store(true, Ordering::Relaxed);
                tokio::spawn(async move {
                    sleep(pause).await;
                    paused.store(false, Ordering::Relaxed);
                });
            }
            _ => {
                etcd.servers[0].stop();
                sleep(millis(rng.index(1500))).await;
                etcd.servers[0].resume();
            }
        }
    }
    masters.iter().for_each(|master| master.paused.store(false, Ordering::Relaxed));
    // The last disturbance: half of the masters are killed, including the one with the most groups.
    masters.sort_by_key(|master| history.lock().hosted_by_life.get(&master.life).map_or(0, BTreeMap::len));
    for killed in masters.split_off(MASTERS / 2) {
        killed.kill(&history).await;
    }
    let before = history.lock().hosted();
    let from = history.lock().documents.len();
    let quiet = Instant::now();
    while history.lock().hosted() < GROUPS.into() {
        let waited = quiet.elapsed();
        assert!(waited < LEASE * 2 + LATE, "{} groups are hosted after {waited:?}", history.lock().hosted());
        for master in &masters {
            assert!(!master.task.is_finished(), "a master task has failed");
        }
        sleep(Duration::from_millis(20)).await;
    }
    println!(
        "{before} of {GROUPS} groups were hosted after the last disturbance, all of them {:?} later",
        quiet.elapsed()
    );
    assert!(
        before < GROUPS.into() && history.lock().documents.len() > from,
        "the last disturbance had no effect"
    );
    for master in masters {
        master.kill(&history).await;
    }
    let history = history.lock();
    let changes = history.check();
    println!(
        "{} cluster states, {changes} changes of owners; killed {}, shut down {}, paused {}, etcd stopped {}",
        history.documents.len(),
        counts[0],
        counts[1],
        counts[2],
        counts[3]
    );
    assert!(changes > 0, "no group changed its owner");
}
