//! Callers during a kill: threads that get and put objects and record the times of successful calls.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_client::Store;
use moontide_rt::SplitMix64;

use super::{STEP_TIMEOUT, content, key};
use crate::results::{BenchError, wrong};

/// Number of keys in the location cache: fewer than its capacity.
pub(super) const CACHED_KEYS: u64 = 10_000;

/// Start and end of successful calls.
pub(super) type CallTimes = Mutex<Vec<(Instant, Instant)>>;

/// Gets random objects and records the times of hits.
pub(super) struct Reader {
    store: Store,
    pub(super) hits: CallTimes,
    wrong: Mutex<Option<String>>,
}

impl Reader {
    pub(super) fn new(store: &Store) -> Reader {
        Reader { store: store.clone(), hits: Mutex::default(), wrong: Mutex::default() }
    }

    pub(super) fn run(&self, stop: &AtomicBool, objects: u64, bytes: u64, seed: u64) {
        let mut rng = SplitMix64::new(seed);
        while !stop.load(Ordering::Relaxed) {
            let number = rng.index(objects as usize) as u64;
            let started = Instant::now();
            if let Ok(Some(got)) = self.store.get(key(number).as_bytes()) {
                self.hits.lock().expect("no holder panics").push((started, Instant::now()));
                if got[..] != content(number, bytes)[..] {
                    let what = format!("{} has wrong content", key(number));
                    self.wrong.lock().expect("no holder panics").get_or_insert(what);
                    return;
                }
            }
            // Limits the load of the readers.
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Fails if an object had wrong content.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        match self.wrong.lock().expect("no holder panics").take() {
            Some(what) => Err(wrong(what)),
            None => Ok(()),
        }
    }
}

/// Puts new objects and records the times of successful puts.
pub(super) struct WriterThread {
    store: Store,
    pub(super) stored: CallTimes,
}

impl WriterThread {
    pub(super) fn new(store: &Store) -> WriterThread {
        WriterThread { store: store.clone(), stored: Mutex::default() }
    }

    pub(super) fn run(&self, stop: &AtomicBool, repeat: u16, bytes: u64) {
        let mut number = 0u64;
        while !stop.load(Ordering::Relaxed) {
            let key = format!("put-{repeat}-{number}");
            let started = Instant::now();
            if self.store.put(key.as_bytes(), &content(number, bytes)).is_ok() {
                self.stored.lock().expect("no holder panics").push((started, Instant::now()));
            }
            number += 1;
            std::thread::sleep(Duration::from_millis(5));
        }
        // Removes its objects, so that only those of `fill` are counted.
        for number in 0..number {
            let _ = self.store.remove(format!("put-{repeat}-{number}").as_bytes(), true);
        }
    }
}

/// Returns the end of the first successful call that started after `moment`, in seconds after it.
pub(super) fn first_after(
    times: &CallTimes,
    moment: Instant,
    end: Instant,
    what: &'static str,
) -> Result<f64, BenchError> {
    loop {
        let times = times.lock().expect("no holder panics");
        if let Some((_, ended)) = times.iter().find(|(started, _)| *started > moment) {
            return Ok((*ended - moment).as_secs_f64());
        }
        drop(times);
        if Instant::now() > end {
            return Err(wrong(format!("no {what} succeeded within {STEP_TIMEOUT:?} after the kill")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Longest time between the ends of two successful calls.
pub(super) fn longest_gap(times: &CallTimes) -> f64 {
    let times = times.lock().expect("no holder panics");
    let gaps = times.windows(2).map(|pair| (pair[1].1 - pair[0].1).as_secs_f64());
    gaps.fold(0.0, f64::max)
}

/// Stops the callers on drop, also after an error: a scope waits for its threads.
pub(super) struct StopAtEnd<'a>(pub(super) &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
