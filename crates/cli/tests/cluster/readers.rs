//! Readers that run during faults: each checks the content and records failures.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutOptions, PutOutcome, Store, StoreError};

use crate::content::{Rng, check, content};

/// An object with content derived from its seed.
#[derive(Clone, Debug)]
pub struct Object {
    pub key: String,
    pub seed: u64,
    pub len: usize,
}

impl Object {
    pub fn new(prefix: &str, number: usize, rng: &mut Rng, lens: std::ops::Range<usize>) -> Object {
        Object { key: format!("{prefix}-{number}"), seed: rng.draw(), len: rng.within(lens.start, lens.end) }
    }

    pub fn key(&self) -> &[u8] {
        self.key.as_bytes()
    }

    pub fn content(&self) -> Vec<u8> {
        content(self.seed, self.len)
    }

    pub fn put(&self, store: &Store, options: &PutOptions) -> Result<PutOutcome, StoreError> {
        store.put_with(self.key(), &[&self.content()], options)
    }

    #[track_caller]
    pub fn check(&self, bytes: &[u8], what: &str) {
        check(self.seed, self.len, bytes, &format!("{} {what}", self.key));
    }
}

/// Options for exactly `count` replicas.
pub fn replicas(count: u8) -> PutOptions {
    PutOptions { replicas: count, replicas_min: count, ..PutOptions::default() }
}

/// Puts objects and asserts that each is stored.
#[track_caller]
pub fn put_all(store: &Store, objects: &[Object], options: &PutOptions) {
    for object in objects {
        assert_eq!(object.put(store, options).expect("a put"), PutOutcome::Stored, "{}", object.key);
    }
}

/// Call that reads an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Ref,
    Copy,
    Into,
    Batch,
}

impl Way {
    pub const ALL: [Way; 4] = [Way::Ref, Way::Copy, Way::Into, Way::Batch];
}

/// Result of a read. There is no variant for wrong bytes: they fail the test.
#[derive(Debug)]
pub enum Got {
    Right,
    Miss,
    Failed(StoreError),
}

/// Reads an object and checks every byte.
#[track_caller]
pub fn read(store: &Store, way: Way, object: &Object) -> Got {
    let what = format!("read by {way:?}");
    let got = match way {
        Way::Ref => store.get_ref(object.key()).map(|held| held.map(|held| object.check(&held, &what))),
        Way::Copy => store.get(object.key()).map(|bytes| bytes.map(|bytes| object.check(&bytes, &what))),
        Way::Into => {
            let mut space = vec![0xee; object.len];
            let got = store.get_into(object.key(), &mut space);
            got.map(|len| len.map(|len| object.check(&space[..len], &what)))
        }
        Way::Batch => {
            let got = store.get_batch(&[object.key()]).pop().expect("one result per key");
            got.map(|bytes| bytes.map(|bytes| object.check(&bytes, &what)))
        }
    };
    match got {
        Ok(Some(())) => Got::Right,
        Ok(None) => Got::Miss,
        Err(error) => Got::Failed(error),
    }
}

/// Results of readers or writers.
#[derive(Debug, Default)]
pub struct Tally {
    right: AtomicU64,
    lost: Mutex<Vec<Lost>>,
    longest: Mutex<Duration>,
}

/// A failed call or a miss.
#[derive(Clone, Debug)]
pub struct Lost {
    /// Start of the call.
    pub began: Instant,
    /// A miss, or an error with its code.
    pub reason: String,
}

impl Tally {
    pub fn note(&self, began: Instant, got: Got) {
        let mut longest = self.longest.lock().expect("no holder panics");
        *longest = began.elapsed().max(*longest);
        drop(longest);
        let reason = match got {
            Got::Right => {
                self.right.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Got::Miss => "a miss".to_owned(),
            Got::Failed(error) => format!("{:?}: {error}", error.code()),
        };
        self.lost.lock().expect("no holder panics").push(Lost { began, reason });
    }

    pub fn right(&self) -> u64 {
        self.right.load(Ordering::Relaxed)
    }

    pub fn lost(&self) -> Vec<Lost> {
        self.lost.lock().expect("no holder panics").clone()
    }

    pub fn longest(&self) -> Duration {
        *self.longest.lock().expect("no holder panics")
    }

    /// Reasons of failures of calls that started after `moment`.
    pub fn lost_after(&self, moment: Instant) -> Vec<String> {
        self.lost().into_iter().filter(|lost| lost.began >= moment).map(|lost| lost.reason).collect()
    }

    pub fn summary(&self, what: &str) {
        let lost = self.lost();
        let mut kinds = std::collections::BTreeMap::<String, usize>::new();
        for lost in &lost {
            *kinds.entry(lost.reason.chars().take(120).collect()).or_default() += 1;
        }
        let longest = self.longest();
        println!(
            "{what}: {} right, {} failed {kinds:?}; the longest took {longest:?}",
            self.right(),
            lost.len()
        );
    }
}

/// Reads random objects until `stop` is set.
pub fn read_until(
    stop: &AtomicBool,
    store: &Store,
    objects: &[Object],
    mut rng: Rng,
    ways: &[Way],
    tally: &Tally,
) {
    while !stop.load(Ordering::Relaxed) {
        let object = &objects[rng.within(0, objects.len())];
        let way = ways[rng.within(0, ways.len())];
        let began = Instant::now();
        let got = read(store, way, object);
        if !matches!(got, Got::Right) {
            // Limits the rate of immediate failures.
            std::thread::sleep(Duration::from_millis(1));
        }
        tally.note(began, got);
    }
}

/// Stops readers on drop, also when the test fails: a scope waits for its threads.
pub struct StopAtEnd<'a>(pub &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
