//! One of three masters is killed, and another one is added, while callers ask: [`Kill`] and [`Add`].

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::Store;
use moontide_meta::Rng;

use super::super::figures::{BenchError, Line};
use super::super::transfer::wrong;
use super::cluster::{Cluster, is_spread, until};
use super::{Args, BATCH, CALL, PATIENT, bytes_of, content, key};

/// What came of a kill. Seconds after it.
#[derive(Clone, Debug)]
pub(super) struct Kill {
    groups: u64,
    keys: usize,
    pub(super) first_hit: f64,
    pub(super) all_known: f64,
    pub(super) others_gap: f64,
    /// Of its keys.
    pub(super) found: f64,
}

impl Kill {
    pub(super) fn line(&self, args: &Args, case: &str) -> Line {
        let lease = args.lease().as_secs_f64();
        Line::new("masters", case)
            .with("objects", args.objects)
            .with("lease_ms", args.lease_ms)
            .with("groups", self.groups)
            .with("keys", self.keys)
            .number("first_hit_s", self.first_hit)
            .number("first_hit_leases", self.first_hit / lease)
            .number("all_known_s", self.all_known)
            .number("all_known_leases", self.all_known / lease)
            .with("found_share", self.found)
            .number("others_gap_s", self.others_gap)
    }
}

/// What came of another master. Seconds after its start.
#[derive(Clone, Debug)]
pub(super) struct Add {
    groups: u64,
    inherited: u64,
    first_move: f64,
    pub(super) moving: f64,
    pub(super) spread: f64,
    asked: u64,
    missed: u64,
    failed: u64,
    /// Why the first of those that failed did.
    failure: Option<String>,
    pub(super) longest_call: f64,
}

impl Add {
    pub(super) fn hit_share(&self) -> f64 {
        1.0 - (self.missed + self.failed) as f64 / self.asked.max(1) as f64
    }

    pub(super) fn line(&self, args: &Args, case: &str) -> Line {
        let line = match &self.failure {
            Some(failure) => Line::new("masters", case).with("first_failure", failure.as_str()),
            None => Line::new("masters", case),
        };
        line.with("objects", args.objects)
            .with("lease_ms", args.lease_ms)
            .with("groups_moved", self.groups)
            .with("inherited_objects", self.inherited)
            .number("first_move_s", self.first_move)
            .number("moving_s", self.moving)
            .number("spread_s", self.spread)
            .number("spread_leases", self.spread / args.lease().as_secs_f64())
            .with("asked", self.asked)
            .with("missed", self.missed)
            .with("failed", self.failed)
            .with("hit_share", self.hit_share())
            .number("longest_call_s", self.longest_call)
    }
}

impl Cluster {
    /// Kills the oldest master, and waits until the others know all that it knew.
    pub(super) fn kill_one(&mut self, args: &Args, repeat: u16) -> Result<Kill, BenchError> {
        let hosts = self.hosts(args.objects)?;
        let of = |lost: bool| -> Vec<u64> {
            (0..args.objects).filter(|&number| (hosts[number as usize] == 0) == lost).collect()
        };
        let (its, others) = (of(true), of(false));
        let asking = self.store(CALL)?;
        let (on_its, on_others) = (Watch::new(&asking), Watch::new(&asking));
        let (stop, seed) = (AtomicBool::new(false), args.seed + 10 * u64::from(repeat));
        std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            scope.spawn(|| on_its.run(&stop, &its, seed));
            scope.spawn(|| on_others.run(&stop, &others, seed + 1));
            until("hits before the kill", || Ok(on_its.asked() > 50 && on_others.asked() > 50))?;
            on_others.forget();
            let groups = self.masters[0].groups()?;
            let mut victim = self.masters.remove(0);
            let killed_at = Instant::now();
            victim.process.kill()?;
            drop(victim);
            until("the others know everything", || Ok(self.stored()? >= args.objects))?;
            let all_known = killed_at.elapsed().as_secs_f64();
            until("a hit on its keys", || Ok(on_its.first_hit_after(killed_at).is_some()))?;
            let first_hit = on_its.first_hit_after(killed_at).expect("waited for");
            let mut found = 0;
            for part in its.chunks(BATCH) {
                let keys: Vec<String> = part.iter().copied().map(key).collect();
                let there = asking.exists_batch(&bytes_of(&keys)).map_err(wrong)?;
                found += there.iter().filter(|there| **there).count();
            }
            on_its.check()?;
            on_others.check()?;
            Ok(Kill {
                groups,
                keys: its.len(),
                first_hit,
                all_known,
                others_gap: on_others.longest_gap(),
                found: found as f64 / its.len().max(1) as f64,
            })
        })
    }

    /// Starts another master, and waits until it has its share.
    pub(super) fn add_one(&mut self, args: &Args, repeat: u16) -> Result<Add, BenchError> {
        let all: Vec<u64> = (0..args.objects).collect();
        // A caller with patience: what has to come again because a group is on its way is not a failure.
        let asking = self.store(PATIENT)?;
        let (single, batches) = (Watch::new(&asking), Watch::new(&asking));
        let (stop, seed) = (AtomicBool::new(false), args.seed + 10 * u64::from(repeat) + 5);
        std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            scope.spawn(|| single.run(&stop, &all, seed));
            scope.spawn(|| batches.run_batches(&stop, &all, seed + 1));
            until("hits before", || Ok(single.asked() > 50 && batches.asked() > 50))?;
            [&single, &batches].into_iter().for_each(Watch::forget);
            let started = Instant::now();
            self.add_master(args)?;
            let mut moves: Vec<f64> = vec![];
            until("the new one has its share", || {
                let hosted = self.hosted()?;
                let new = hosted.last().copied().unwrap_or(0) as usize;
                moves.resize(new.max(moves.len()), started.elapsed().as_secs_f64());
                Ok(is_spread(&hosted, args.groups))
            })?;
            let spread = started.elapsed().as_secs_f64();
            // Until nodes have reported, and everything that moved was asked for again.
            std::thread::sleep(args.lease());
            single.check()?;
            batches.check()?;
            let new = self.masters.last().expect("it was added");
            let (first, last) = (moves.first().copied(), moves.last().copied());
            let sum = |figure: fn(&Watch) -> &AtomicU64| -> u64 {
                [&single, &batches].into_iter().map(|watch| figure(watch).load(Ordering::Relaxed)).sum()
            };
            Ok(Add {
                groups: moves.len() as u64,
                inherited: new.inherited()?,
                first_move: first.unwrap_or(spread),
                moving: last.zip(first).map_or(0.0, |(last, first)| last - first),
                spread,
                asked: sum(|watch| &watch.asked),
                missed: sum(|watch| &watch.missed),
                failed: sum(|watch| &watch.failed),
                failure: [&single, &batches].into_iter().find_map(Watch::failure),
                longest_call: single.longest_call().max(batches.longest_call()),
            })
        })
    }
}
/// Asks for keys and counts what comes.
struct Watch {
    store: Store,
    asked: AtomicU64,
    missed: AtomicU64,
    failed: AtomicU64,
    /// When calls that hit began and ended.
    hits: Mutex<Vec<(Instant, Instant)>>,
    longest: Mutex<Duration>,
    failure: Mutex<Option<String>>,
    wrong: Mutex<Option<String>>,
}

impl Watch {
    fn new(store: &Store) -> Watch {
        Watch {
            store: store.clone(),
            asked: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            hits: Mutex::default(),
            longest: Mutex::default(),
            failure: Mutex::default(),
            wrong: Mutex::default(),
        }
    }

    /// Gets one object after the other.
    fn run(&self, stop: &AtomicBool, numbers: &[u64], seed: u64) {
        let mut rng = Rng::new(seed);
        while !stop.load(Ordering::Relaxed) && !numbers.is_empty() {
            let number = numbers[rng.below(numbers.len())];
            let began = Instant::now();
            let got = self.store.get(key(number).as_bytes());
            let hit = match &got {
                Ok(Some(bytes)) if bytes[..] != content(number)[..] => {
                    let what = format!("{} came with wrong bytes", key(number));
                    self.wrong.lock().expect("no holder panics").get_or_insert(what);
                    return;
                }
                Ok(found) => Ok(u64::from(found.is_some())),
                Err(error) => Err(error.to_string()),
            };
            self.note(began, 1, hit);
            // A pace at which callers leave the machine to what is measured.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Asks which of a batch exist.
    fn run_batches(&self, stop: &AtomicBool, numbers: &[u64], seed: u64) {
        let mut rng = Rng::new(seed);
        while !stop.load(Ordering::Relaxed) {
            let keys: Vec<String> = (0..BATCH).map(|_| key(numbers[rng.below(numbers.len())])).collect();
            let began = Instant::now();
            let there = self.store.exists_batch(&bytes_of(&keys));
            let hits = there.map(|there| there.iter().filter(|there| **there).count() as u64);
            self.note(began, BATCH as u64, hits.map_err(|error| error.to_string()));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn note(&self, began: Instant, asked: u64, hits: Result<u64, String>) {
        let ended = Instant::now();
        self.asked.fetch_add(asked, Ordering::Relaxed);
        match hits {
            Ok(hits) => {
                self.missed.fetch_add(asked - hits, Ordering::Relaxed);
                if hits > 0 {
                    self.hits.lock().expect("no holder panics").push((began, ended));
                }
            }
            Err(why) => {
                self.failed.fetch_add(asked, Ordering::Relaxed);
                self.failure.lock().expect("no holder panics").get_or_insert(why);
            }
        }
        let mut longest = self.longest.lock().expect("no holder panics");
        *longest = longest.max(ended - began);
    }

    /// Begins to count anew.
    fn forget(&self) {
        for count in [&self.asked, &self.missed, &self.failed] {
            count.store(0, Ordering::Relaxed);
        }
        self.hits.lock().expect("no holder panics").clear();
        *self.longest.lock().expect("no holder panics") = Duration::ZERO;
        *self.failure.lock().expect("no holder panics") = None;
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    fn failure(&self) -> Option<String> {
        self.failure.lock().expect("no holder panics").clone()
    }

    fn longest_call(&self) -> f64 {
        self.longest.lock().expect("no holder panics").as_secs_f64()
    }

    /// When the first call ended that hit and began after a moment, in seconds after it.
    fn first_hit_after(&self, moment: Instant) -> Option<f64> {
        let hits = self.hits.lock().expect("no holder panics");
        hits.iter().find(|(began, _)| *began > moment).map(|(_, ended)| (*ended - moment).as_secs_f64())
    }

    fn longest_gap(&self) -> f64 {
        let hits = self.hits.lock().expect("no holder panics");
        hits.windows(2).map(|pair| (pair[1].1 - pair[0].1).as_secs_f64()).fold(0.0, f64::max)
    }

    fn check(&self) -> Result<(), BenchError> {
        match self.wrong.lock().expect("no holder panics").take() {
            Some(what) => Err(wrong(what)),
            None => Ok(()),
        }
    }
}

/// Tells callers to stop, also where a measurement fails: a scope waits for its threads.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_counts_what_was_missed_and_what_failed() {
        let add = Add {
            groups: 5,
            inherited: 0,
            first_move: 0.0,
            moving: 0.0,
            spread: 0.0,
            asked: 1000,
            missed: 1,
            failed: 4,
            failure: None,
            longest_call: 0.0,
        };
        assert!((add.hit_share() - 0.995).abs() < 1e-12);
        assert!((Add { asked: 0, missed: 0, failed: 0, ..add }.hit_share() - 1.0).abs() < 1e-12);
    }
}
