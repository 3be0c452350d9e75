//! Candidates that meet at a real etcd while they are killed, paused and started at random, and etcd is stopped now and then.
//!
//! Each master here is a task with a registry of its own, which does what a campaign does: join, renew, look, take, give.
//! Everything that is read and believed is written down, and must agree:
//!
//! - nobody believes to host a group in a term in which somebody else ever did;
//! - a group's term rises whenever its owner changes, and never falls;
//! - when the disturbances are over, all groups are hosted within two leases.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_master::election::{Candidate, Document, MasterAddresses, Registry};
use moontide_meta::Rng;
use moontide_types::{Clock, GroupId, SystemClock, Term};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::etcd::Etcd;

const LEASE: Duration = Duration::from_secs(2);
const GROUPS: u16 = 8;
const MASTERS: usize = 4;
const DISTURBED: Duration = Duration::from_secs(14);
/// Etcd looks twice a second for leases that have run out, and a busy machine is late.
const LATE: Duration = Duration::from_secs(1);

/// What was read and believed by anybody.
#[derive(Default)]
struct Book {
    /// Every document there was, by version.
    documents: BTreeMap<u64, Document>,
    /// Who ever believed to host a group in a term: the number of the life.
    hosts: BTreeMap<(GroupId, Term), u64>,
    /// What each life believes now.
    beliefs: BTreeMap<u64, BTreeMap<GroupId, Term>>,
    lives: u64,
}

impl Book {
    fn read(&mut self, document: &Document) {
        let known = self.documents.entry(document.version).or_insert_with(|| document.clone());
        assert_eq!(known, document, "two documents have the same version");
    }

    fn believes(&mut self, life: u64, hosted: &BTreeMap<GroupId, Term>) {
        for (&group, &term) in hosted {
            let host = *self.hosts.entry((group, term)).or_insert(life);
            assert_eq!(host, life, "two host {group:?} in term {term}");
        }
        self.beliefs.insert(life, hosted.clone());
    }

    /// Checks what was written down. Returns how often a group changed hands.
    fn check(&self) -> usize {
        let mut changes = 0;
        for (before, after) in self.documents.values().zip(self.documents.values().skip(1)) {
            assert!(after.last_term >= before.last_term);
            for (group, (old, new)) in before.owners.iter().zip(&after.owners).enumerate() {
                let Some(old) = old else { continue };
                let new = new.expect("what was owned is owned");
                assert!(new.term >= old.term, "the term of group {group} falls: {old:?} {new:?}");
                if new.master != old.master {
                    assert!(new.term > old.term, "group {group} changes hands in one term: {old:?} {new:?}");
                    changes += 1;
                }
            }
        }
        changes
    }

    /// How many groups somebody alive hosts in the term of the newest document.
    fn hosted(&self) -> usize {
        let Some((_, newest)) = self.documents.last_key_value() else { return 0 };
        let is_hosted = |group: u16, term: u32| {
            let mut beliefs = self.beliefs.values();
            beliefs.any(|hosted| hosted.get(&GroupId(group)).is_some_and(|believed| believed.get() == term))
        };
        let owners = (0u16..).zip(&newest.owners);
        owners.filter(|(group, owner)| owner.is_some_and(|owner| is_hosted(*group, owner.term))).count()
    }
}

/// A master that runs, until it is killed or told to leave.
struct Running {
    life: u64,
    task: JoinHandle<()>,
    paused: Arc<AtomicBool>,
    leaving: Arc<AtomicBool>,
}

impl Running {
    fn start(registry: Arc<dyn Registry>, book: &Arc<Mutex<Book>>) -> Running {
        let (paused, leaving) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let life = {
            let mut book = book.lock();
            book.lives += 1;
            book.lives
        };
        let master = Master {
            registry,
            book: Arc::clone(book),
            life,
            paused: paused.clone(),
            leaving: leaving.clone(),
        };
        Running { life, task: tokio::spawn(master.run()), paused, leaving }
    }

    /// At once, whatever it is doing: nobody is told.
    async fn kill(self, book: &Mutex<Book>) {
        self.task.abort();
        if let Err(ended) = self.task.await {
            assert!(ended.is_cancelled(), "it has failed: {ended}");
        }
        book.lock().beliefs.remove(&self.life);
    }
}

struct Master {
    registry: Arc<dyn Registry>,
    book: Arc<Mutex<Book>>,
    life: u64,
    paused: Arc<AtomicBool>,
    leaving: Arc<AtomicBool>,
}

impl Master {
    async fn run(self) {
        while !self.leaving.load(Ordering::Relaxed) {
            if let Some(candidate) = self.joins().await {
                self.takes_part(candidate).await;
            }
        }
    }

    fn addresses(&self) -> MasterAddresses {
        MasterAddresses { grpc: format!("life{}:1", self.life), frame: format!("life{}:2", self.life) }
    }

    /// A number from the document, and a membership under it.
    async fn joins(&self) -> Option<Candidate> {
        let snapshot = self.registry.read().await.ok()?;
        let Some((token, document)) = &snapshot.document else {
            let first = Document::new(NonZeroU16::new(GROUPS).unwrap());
            let _ = self.registry.write(None, &first).await;
            return None;
        };
        let (next, number) = document.with_next_term().expect("few terms are used");
        if !matches!(self.registry.write(Some(token), &next).await, Ok(true)) {
            return None;
        }
        let asked = SystemClock.now();
        self.registry.join(number, &self.addresses(), LEASE).await.ok()?;
        Some(Candidate::new(number, self.addresses(), LEASE, asked))
    }

    async fn takes_part(&self, mut candidate: Candidate) {
        let number = candidate.number();
        loop {
            while self.paused.load(Ordering::Relaxed) {
                sleep(Duration::from_millis(20)).await; // like a process that is stopped: it believes what it believed
            }
            let sent = SystemClock.now();
            match self.registry.renew(number).await {
                Ok(true) => candidate.renewed(sent),
                Ok(false) => {
                    candidate.expelled();
                    self.book.lock().believes(self.life, candidate.hosted());
                    return;
                }
                Err(_) => {}
            }
            let Ok(snapshot) = self.registry.read().await else { continue };
            let Some((token, document)) = &snapshot.document else { panic!("the document is gone") };
            let plan = {
                let mut book = self.book.lock();
                book.read(document);
                let plan = candidate.seen(SystemClock.now(), &snapshot);
                book.believes(self.life, candidate.hosted());
                plan
            };
            if self.leaving.load(Ordering::Relaxed) {
                candidate.retire();
                let alone = snapshot.members.keys().all(|&member| member == number.get());
                if candidate.hosted().is_empty() || alone {
                    let _ = self.registry.remove(number).await;
                    candidate.expelled();
                    self.book.lock().believes(self.life, candidate.hosted());
                    return;
                }
            }
            let next = match (plan.take, plan.give) {
                (Some(next), _) => Some(next),
                (None, Some(gift)) => {
                    let given = document.with_owner(&[gift.group], gift.heir, &gift.addresses);
                    Some(given.expect("few terms are used").0)
                }
                (None, None) => None,
            };
            match next {
                Some(next) => {
                    let _ = self.registry.write(Some(token), &next).await;
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
async fn masters_that_come_and_go_never_host_a_group_twice_in_a_term() {
    let Some(etcd) = Etcd::start(1).await else { return };
    let given = std::env::var("MOONTIDE_SEED").ok().map(|seed| seed.parse().expect("a seed is a number"));
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.as_nanos() as u64);
    let seed = given.unwrap_or_else(clock);
    println!("MOONTIDE_SEED={seed}");
    let mut rng = Rng::new(seed);
    let book = Arc::new(Mutex::new(Book::default()));
    let start = || Running::start(etcd.open("masters"), &book);
    let mut masters: Vec<Running> = (0..MASTERS).map(|_| start()).collect();
    let end = Instant::now() + DISTURBED;
    let mut counts = [0; 4];
    while Instant::now() < end {
        sleep(millis(rng.below(900))).await;
        let index = rng.below(masters.len());
        let choice = rng.below(counts.len());
        counts[choice] += 1;
        match choice {
            0 => {
                let killed = std::mem::replace(&mut masters[index], start());
                killed.kill(&book).await;
            }
            1 => {
                let leaving = std::mem::replace(&mut masters[index], start());
                leaving.leaving.store(true, Ordering::Relaxed);
                // It may need longer, and is killed on its way then.
                sleep(millis(rng.below(800))).await;
                leaving.kill(&book).await;
            }
            2 => {
                // Shorter than its lease, or longer: then it is replaced, and does not know it.
                let (paused, pause) = (Arc::clone(&masters[index].paused), millis(300 + rng.below(4000)));
                paused.store(true, Ordering::Relaxed);
                tokio::spawn(async move {
                    sleep(pause).await;
                    paused.store(false, Ordering::Relaxed);
                });
            }
            _ => {
                etcd.servers[0].stop();
                sleep(millis(rng.below(1500))).await;
                etcd.servers[0].go_on();
            }
        }
    }
    masters.iter().for_each(|master| master.paused.store(false, Ordering::Relaxed));
    // The last disturbance: half of them die, the one that hosts most among them.
    masters.sort_by_key(|master| book.lock().beliefs.get(&master.life).map_or(0, BTreeMap::len));
    for killed in masters.split_off(MASTERS / 2) {
        killed.kill(&book).await;
    }
    let before = book.lock().hosted();
    let from = book.lock().documents.len();
    let quiet = Instant::now();
    while book.lock().hosted() < GROUPS.into() {
        let waited = quiet.elapsed();
        assert!(waited < LEASE * 2 + LATE, "{} groups are hosted after {waited:?}", book.lock().hosted());
        for master in &masters {
            assert!(!master.task.is_finished(), "a master has failed");
        }
        sleep(Duration::from_millis(20)).await;
    }
    println!(
        "{before} of {GROUPS} groups were hosted after the last disturbance, all of them {:?} later",
        quiet.elapsed()
    );
    assert!(before < GROUPS.into() && book.lock().documents.len() > from, "the last disturbance was none");
    for master in masters {
        master.kill(&book).await;
    }
    let book = book.lock();
    let changes = book.check();
    println!(
        "{} documents, {changes} changes of owners; killed {}, left {}, paused {}, etcd stopped {}",
        book.documents.len(),
        counts[0],
        counts[1],
        counts[2],
        counts[3]
    );
    assert!(changes > 0, "nothing has happened");
}
