//! Kills one of three masters and adds another one under load: [`KillResult`] and [`AddResult`].

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::Store;
use moontide_rt::SplitMix64;

use super::cluster::{Cluster, is_balanced, wait_until};
use super::{Args, BATCH, CALL_TIMEOUT, RELAXED_TIMEOUT, bytes_of, content, key};
use crate::results::{BenchError, ResultRow, wrong};

/// Result of a kill, in seconds after it.
#[derive(Clone, Debug)]
pub(super) struct KillResult {
    groups: u64,
    keys: usize,
    pub(super) first_hit: f64,
    pub(super) all_known: f64,
    pub(super) others_gap: f64,
    /// Share of the killed master's keys that exist afterwards.
    pub(super) found: f64,
}

impl KillResult {
    pub(super) fn line(&self, args: &Args, case: &str) -> ResultRow {
        let lease = args.lease().as_secs_f64();
        ResultRow::new("masters", case)
            .with("objects", args.objects)
            .with("registry_lease_ms", args.registry_lease_ms)
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

/// Result of adding a master, in seconds after its start.
#[derive(Clone, Debug)]
pub(super) struct AddResult {
    groups: u64,
    handoff_objects: u64,
    first_move: f64,
    pub(super) moving: f64,
    pub(super) balanced: f64,
    requested: u64,
    missed: u64,
    failed: u64,
    /// Error of the first failed call.
    failure: Option<String>,
    pub(super) longest_call: f64,
}

impl AddResult {
    pub(super) fn hit_share(&self) -> f64 {
        1.0 - (self.missed + self.failed) as f64 / self.requested.max(1) as f64
    }

    pub(super) fn line(&self, args: &Args, case: &str) -> ResultRow {
        let line = match &self.failure {
            Some(failure) => ResultRow::new("masters", case).with("first_failure", failure.as_str()),
            None => ResultRow::new("masters", case),
        };
        line.with("objects", args.objects)
            .with("registry_lease_ms", args.registry_lease_ms)
            .with("groups_moved", self.groups)
            .with("handoff_objects", self.handoff_objects)
            .number("first_move_s", self.first_move)
            .number("moving_s", self.moving)
            .number("balanced_s", self.balanced)
            .number("balanced_leases", self.balanced / args.lease().as_secs_f64())
            .with("asked", self.requested)
            .with("missed", self.missed)
            .with("failed", self.failed)
            .with("hit_share", self.hit_share())
            .number("longest_call_s", self.longest_call)
    }
}

impl Cluster {
    /// Kills the oldest master, and waits until the others have indexed its objects.
    pub(super) fn kill_one(&mut self, args: &Args, repeat: u16) -> Result<KillResult, BenchError> {
        let hosts = self.hosts(args.objects)?;
        let of = |lost: bool| -> Vec<u64> {
            (0..args.objects).filter(|&number| (hosts[number as usize] == 0) == lost).collect()
        };
        let (lost, others) = (of(true), of(false));
        let store = self.store(CALL_TIMEOUT)?;
        let (on_lost, on_others) = (KeyProbe::new(&store), KeyProbe::new(&store));
        let (stop, seed) = (AtomicBool::new(false), args.seed + 10 * u64::from(repeat));
        std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            scope.spawn(|| on_lost.run(&stop, &lost, seed));
            scope.spawn(|| on_others.run(&stop, &others, seed + 1));
            wait_until("waiting for hits before the kill", || {
                Ok(on_lost.requested() > 50 && on_others.requested() > 50)
            })?;
            on_others.reset();
            let groups = self.masters[0].groups()?;
            let mut victim = self.masters.remove(0);
            let killed_at = Instant::now();
            victim.process.kill()?;
            drop(victim);
            wait_until("waiting for the other masters to index all objects", || {
                Ok(self.stored()? >= args.objects)
            })?;
            let all_known = killed_at.elapsed().as_secs_f64();
            wait_until("waiting for a hit on the killed master's keys", || {
                Ok(on_lost.first_hit_after(killed_at).is_some())
            })?;
            let first_hit = on_lost.first_hit_after(killed_at).expect("a hit exists");
            let mut found = 0;
            for part in lost.chunks(BATCH) {
                let keys: Vec<String> = part.iter().copied().map(key).collect();
                for exists in store.exists_batch(&bytes_of(&keys)) {
                    found += usize::from(exists.map_err(wrong)?);
                }
            }
            on_lost.check()?;
            on_others.check()?;
            Ok(KillResult {
                groups,
                keys: lost.len(),
                first_hit,
                all_known,
                others_gap: on_others.longest_gap(),
                found: found as f64 / lost.len().max(1) as f64,
            })
        })
    }

    /// Starts another master, and waits until it has its share of the groups.
    pub(super) fn add_one(&mut self, args: &Args, repeat: u16) -> Result<AddResult, BenchError> {
        let all: Vec<u64> = (0..args.objects).collect();
        // With a long timeout: retries because a group is moving are not failures.
        let store = self.store(RELAXED_TIMEOUT)?;
        let (single, batches) = (KeyProbe::new(&store), KeyProbe::new(&store));
        let (stop, seed) = (AtomicBool::new(false), args.seed + 10 * u64::from(repeat) + 5);
        std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            scope.spawn(|| single.run(&stop, &all, seed));
            scope.spawn(|| batches.run_batches(&stop, &all, seed + 1));
            wait_until("waiting for hits before the start", || {
                Ok(single.requested() > 50 && batches.requested() > 50)
            })?;
            [&single, &batches].into_iter().for_each(KeyProbe::reset);
            let started = Instant::now();
            self.add_master(args)?;
            let mut moves: Vec<f64> = vec![];
            wait_until("waiting for balanced groups", || {
                let hosted = self.hosted()?;
                let new = hosted.last().copied().unwrap_or(0) as usize;
                moves.resize(new.max(moves.len()), started.elapsed().as_secs_f64());
                Ok(is_balanced(&hosted, args.groups))
            })?;
            let balanced = started.elapsed().as_secs_f64();
            // Until nodes have reported and the moved keys were requested again.
            std::thread::sleep(args.lease());
            single.check()?;
            batches.check()?;
            let new = self.masters.last().expect("a master was added");
            let (first, last) = (moves.first().copied(), moves.last().copied());
            let sum = |counter: fn(&KeyProbe) -> &AtomicU64| -> u64 {
                [&single, &batches].into_iter().map(|probe| counter(probe).load(Ordering::Relaxed)).sum()
            };
            Ok(AddResult {
                groups: moves.len() as u64,
                handoff_objects: new.handoff_objects()?,
                first_move: first.unwrap_or(balanced),
                moving: last.zip(first).map_or(0.0, |(last, first)| last - first),
                balanced,
                requested: sum(|probe| &probe.requested),
                missed: sum(|probe| &probe.missed),
                failed: sum(|probe| &probe.failed),
                failure: [&single, &batches].into_iter().find_map(KeyProbe::failure),
                longest_call: single.longest_call().max(batches.longest_call()),
            })
        })
    }
}
/// Requests keys and counts the results.
struct KeyProbe {
    store: Store,
    requested: AtomicU64,
    missed: AtomicU64,
    failed: AtomicU64,
    /// Start and end of calls with hits.
    hits: Mutex<Vec<(Instant, Instant)>>,
    longest: Mutex<Duration>,
    failure: Mutex<Option<String>>,
    wrong: Mutex<Option<String>>,
}

impl KeyProbe {
    fn new(store: &Store) -> KeyProbe {
        KeyProbe {
            store: store.clone(),
            requested: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            hits: Mutex::default(),
            longest: Mutex::default(),
            failure: Mutex::default(),
            wrong: Mutex::default(),
        }
    }

    /// Gets random objects one by one.
    fn run(&self, stop: &AtomicBool, numbers: &[u64], seed: u64) {
        let mut rng = SplitMix64::new(seed);
        while !stop.load(Ordering::Relaxed) && !numbers.is_empty() {
            let number = numbers[rng.index(numbers.len())];
            let started = Instant::now();
            let got = self.store.get(key(number).as_bytes());
            let hit = match &got {
                Ok(Some(bytes)) if bytes[..] != content(number)[..] => {
                    let what = format!("{} has wrong content", key(number));
                    self.wrong.lock().expect("no holder panics").get_or_insert(what);
                    return;
                }
                Ok(found) => Ok(u64::from(found.is_some())),
                Err(error) => Err(error.to_string()),
            };
            self.record(started, 1, hit);
            // Limits the load of the callers.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Checks the existence of random batches of keys.
    fn run_batches(&self, stop: &AtomicBool, numbers: &[u64], seed: u64) {
        let mut rng = SplitMix64::new(seed);
        while !stop.load(Ordering::Relaxed) {
            let keys: Vec<String> = (0..BATCH).map(|_| key(numbers[rng.index(numbers.len())])).collect();
            let started = Instant::now();
            let exist = self.store.exists_batch(&bytes_of(&keys)).into_iter();
            let hits = exist.map(|exists| exists.map(u64::from)).sum::<Result<u64, _>>();
            self.record(started, BATCH as u64, hits.map_err(|error| error.to_string()));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn record(&self, started: Instant, requested: u64, hits: Result<u64, String>) {
        let ended = Instant::now();
        self.requested.fetch_add(requested, Ordering::Relaxed);
        match hits {
            Ok(hits) => {
                self.missed.fetch_add(requested - hits, Ordering::Relaxed);
                if hits > 0 {
                    self.hits.lock().expect("no holder panics").push((started, ended));
                }
            }
            Err(error) => {
                self.failed.fetch_add(requested, Ordering::Relaxed);
                self.failure.lock().expect("no holder panics").get_or_insert(error);
            }
        }
        let mut longest = self.longest.lock().expect("no holder panics");
        *longest = longest.max(ended - started);
    }

    /// Resets all counters.
    fn reset(&self) {
        for count in [&self.requested, &self.missed, &self.failed] {
            count.store(0, Ordering::Relaxed);
        }
        self.hits.lock().expect("no holder panics").clear();
        *self.longest.lock().expect("no holder panics") = Duration::ZERO;
        *self.failure.lock().expect("no holder panics") = None;
    }

    fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    fn failure(&self) -> Option<String> {
        self.failure.lock().expect("no holder panics").clone()
    }

    fn longest_call(&self) -> f64 {
        self.longest.lock().expect("no holder panics").as_secs_f64()
    }

    /// Returns the end of the first call with a hit that started after `moment`, in seconds after it.
    fn first_hit_after(&self, moment: Instant) -> Option<f64> {
        let hits = self.hits.lock().expect("no holder panics");
        hits.iter().find(|(started, _)| *started > moment).map(|(_, ended)| (*ended - moment).as_secs_f64())
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

/// Stops the callers on drop, also after an error: a scope waits for its threads.
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
    fn hit_share_counts_misses_and_failures() {
        let add = AddResult {
            groups: 5,
            handoff_objects: 0,
            first_move: 0.0,
            moving: 0.0,
            balanced: 0.0,
            requested: 1000,
            missed: 1,
            failed: 4,
            failure: None,
            longest_call: 0.0,
        };
        assert!((add.hit_share() - 0.995).abs() < 1e-12);
        assert!((AddResult { requested: 0, missed: 0, failed: 0, ..add }.hit_share() - 1.0).abs() < 1e-12);
    }
}
