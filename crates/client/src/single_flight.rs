//! [`SingleFlight`]: deduplicates concurrent fetches of one object.
//!
//! A caller never joins a running fetch, which may have read the object before the call began: it could return an
//! object that the caller has just removed. Callers share the **next** fetch instead, which begins when the current one
//! has ended. So one thread at a time fetches a hot key, a caller waits for two fetches at most, and every result was
//! looked up after its call began.

use std::collections::HashMap;
use std::hash::Hash;

use moontide_rt::mutation_enabled;
use moontide_rt::sync::{Arc, Condvar, Mutex, lock, wait};
use moontide_rt::time::Instant;

/// Running and next fetches, by object.
#[derive(Debug)]
pub(crate) struct SingleFlight<K, T> {
    entries: Mutex<HashMap<K, KeyEntry<T>>>,
}

impl<K, T> Default for SingleFlight<K, T> {
    fn default() -> SingleFlight<K, T> {
        SingleFlight { entries: Mutex::new(HashMap::new()) }
    }
}

#[derive(Debug)]
struct KeyEntry<T> {
    current: Arc<Fetch<T>>,
    next: Option<Arc<Fetch<T>>>,
}

#[derive(Debug)]
struct Fetch<T> {
    result: Mutex<Option<FetchResult<T>>>,
    published: Condvar,
}

#[derive(Clone, Debug)]
enum FetchResult<T> {
    With(T),
    /// The leader never finished: it panicked, or timed out before it began.
    Abandoned,
}

impl<T: Clone> Fetch<T> {
    fn new() -> Arc<Fetch<T>> {
        Arc::new(Fetch { result: Mutex::new(None), published: Condvar::new() })
    }

    /// Waits for the result; `None` on timeout.
    fn wait(&self, deadline: Instant) -> Option<FetchResult<T>> {
        let mut result = lock(&self.result);
        let mut in_time = true;
        while result.is_none() && in_time {
            let left = deadline.saturating_duration_since(Instant::now());
            (result, in_time) = wait(&self.published, result, left);
        }
        result.clone()
    }

    fn publish(&self, result: FetchResult<T>) {
        lock(&self.result).get_or_insert(result);
        self.published.notify_all();
    }
}

/// Role of a caller.
enum FlightRole<T> {
    /// Fetches at once.
    Lead(Arc<Fetch<T>>),
    /// Fetches when the current fetch has ended.
    LeadNext { current: Arc<Fetch<T>>, own: Arc<Fetch<T>> },
    /// Waits for the fetch of another caller.
    Follow(Arc<Fetch<T>>),
}

impl<K: Copy + Eq + Hash, T: Clone> SingleFlight<K, T> {
    /// Fetches an object, or shares a fetch that another caller starts after this call began. `None` on timeout. The
    /// flag is true if the fetch was another caller's.
    pub(crate) fn fetch(&self, id: K, deadline: Instant, fetch: impl FnOnce() -> T) -> Option<(T, bool)> {
        let mut fetch = Some(fetch);
        loop {
            match self.role(id) {
                FlightRole::Lead(own) => {
                    let leader =
                        LeaderGuard { single_flight: self, id, own: &own, result: FetchResult::Abandoned };
                    return Some((leader.lead(fetch.take()?), false));
                }
                FlightRole::LeadNext { current, own } => {
                    let leader =
                        LeaderGuard { single_flight: self, id, own: &own, result: FetchResult::Abandoned };
                    current.wait(deadline)?;
                    return Some((leader.lead(fetch.take()?), false));
                }
                FlightRole::Follow(other) => match other.wait(deadline)? {
                    FetchResult::With(fetched) => return Some((fetched, true)),
                    FetchResult::Abandoned => {} // try again to become the leader
                },
            }
        }
    }

    fn role(&self, id: K) -> FlightRole<T> {
        let mut entries = lock(&self.entries);
        let Some(entry) = entries.get_mut(&id) else {
            let own = Fetch::new();
            entries.insert(id, KeyEntry { current: Arc::clone(&own), next: None });
            return FlightRole::Lead(own);
        };
        if mutation_enabled(Mutation::JoinRunningFetch) {
            return FlightRole::Follow(Arc::clone(&entry.current));
        }
        if let Some(next) = &entry.next {
            return FlightRole::Follow(Arc::clone(next));
        }
        let own = Fetch::new();
        entry.next = Some(Arc::clone(&own));
        FlightRole::LeadNext { current: Arc::clone(&entry.current), own }
    }

    /// Removes a finished fetch: the next one, if any, becomes the current one.
    fn remove(&self, id: K, own: &Arc<Fetch<T>>) {
        let mut entries = lock(&self.entries);
        let Some(entry) = entries.get_mut(&id) else { return };
        if Arc::ptr_eq(&entry.current, own) {
            match entry.next.take() {
                Some(next) => entry.current = next,
                None => {
                    entries.remove(&id);
                }
            }
        } else if entry.next.as_ref().is_some_and(|next| Arc::ptr_eq(next, own)) {
            entry.next = None;
        }
    }
}

/// Leader of a fetch. Publishes the result and removes the fetch when dropped, also after a panic.
struct LeaderGuard<'a, K: Copy + Eq + Hash, T: Clone> {
    single_flight: &'a SingleFlight<K, T>,
    id: K,
    own: &'a Arc<Fetch<T>>,
    result: FetchResult<T>,
}

impl<K: Copy + Eq + Hash, T: Clone> LeaderGuard<'_, K, T> {
    fn lead(mut self, fetch: impl FnOnce() -> T) -> T {
        let fetched = fetch();
        self.result = FetchResult::With(fetched.clone());
        fetched
    }
}

impl<K: Copy + Eq + Hash, T: Clone> Drop for LeaderGuard<'_, K, T> {
    fn drop(&mut self) {
        let result = std::mem::replace(&mut self.result, FetchResult::Abandoned);
        if mutation_enabled(Mutation::PublishBeforeRemove) {
            self.own.publish(result);
            return self.single_flight.remove(self.id, self.own);
        }
        if mutation_enabled(Mutation::NeverRemove) {
            return self.own.publish(result);
        }
        // Remove the fetch first: the next leader begins when this result is published, and from then on no caller may
        // join it.
        self.single_flight.remove(self.id, self.own);
        self.own.publish(result);
    }
}

moontide_rt::mutations! {
    /// Mutations that the model test enables to prove that it detects the bug.
    enum Mutation {
        /// A caller shares the running fetch.
        JoinRunningFetch,
        /// The next leader begins while callers can still join its fetch.
        PublishBeforeRemove,
        /// The entry of the key is never removed.
        NeverRemove,
    }
}

#[cfg(all(test, shuttle))]
mod model {
    use std::time::Duration;

    use moontide_rt::sync::{AtomicU64, Ordering};
    use moontide_rt::with_mutation;

    use super::*;

    /// Callers increment a version and fetch it; one of them has a timeout of zero.
    fn model_run() {
        struct World {
            single_flight: SingleFlight<u8, u64>,
            version: AtomicU64,
            running: AtomicU64,
        }
        let world = Arc::new(World {
            single_flight: SingleFlight::default(),
            version: AtomicU64::new(0),
            running: AtomicU64::new(0),
        });
        let hour = Duration::from_secs(3600);
        let callers: Vec<_> = [hour, hour, hour, Duration::ZERO]
            .into_iter()
            .map(|timeout| {
                let world = Arc::clone(&world);
                shuttle::thread::spawn(move || {
                    for _ in 0..2 {
                        let asked = world.version.fetch_add(1, Ordering::SeqCst) + 1;
                        let fetched = world.single_flight.fetch(7, Instant::now() + timeout, || {
                            assert_eq!(world.running.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                            let found = world.version.load(Ordering::SeqCst);
                            shuttle::thread::yield_now();
                            world.running.fetch_sub(1, Ordering::SeqCst);
                            found
                        });
                        match fetched {
                            Some((found, _)) => assert!(found >= asked, "result is older than the call"),
                            None => assert_eq!(timeout, Duration::ZERO),
                        }
                    }
                })
            })
            .collect();
        callers.into_iter().for_each(|caller| caller.join().expect("no caller panics"));
        assert!(lock(&world.single_flight.entries).is_empty(), "an entry is left");
    }

    #[test]
    fn single_flight_result_is_never_older_than_the_call() {
        shuttle::check_random(model_run, 20_000);
        shuttle::check_pct(model_run, 10_000, 4);
    }

    fn detects(mutation: Mutation) {
        with_mutation(Some(mutation), || shuttle::check_random(model_run, 20_000));
    }

    #[test]
    #[should_panic]
    fn mutation_joining_running_fetch_is_detected() {
        detects(Mutation::JoinRunningFetch);
    }

    #[test]
    #[should_panic]
    fn mutation_result_published_before_entry_update_is_detected() {
        detects(Mutation::PublishBeforeRemove);
    }

    #[test]
    #[should_panic]
    fn mutation_key_entry_never_removed_is_detected() {
        detects(Mutation::NeverRemove);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    const ID: u8 = 7;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn single_flight_never_returns_a_fetch_started_before_the_call() {
        let single_flight = SingleFlight::default();
        // The version changes all the time; a result must not be older than its call.
        let (version, fetches, running) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        let asked = version.fetch_add(1, Ordering::SeqCst) + 1;
                        let fetch = || {
                            assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                            fetches.fetch_add(1, Ordering::SeqCst);
                            let found = version.load(Ordering::SeqCst);
                            std::thread::sleep(Duration::from_micros(50));
                            running.fetch_sub(1, Ordering::SeqCst);
                            found
                        };
                        let (found, _) = single_flight.fetch(ID, soon(), fetch).unwrap();
                        assert!(found >= asked, "call at version {asked} returned version {found}");
                    }
                });
            }
        });
        assert!(fetches.load(Ordering::SeqCst) < 8 * 300, "some were shared");
        assert!(lock(&single_flight.entries).is_empty(), "an entry is left");
    }

    #[test]
    fn leader_panic_or_timeout_does_not_block_followers() {
        let single_flight = SingleFlight::default();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                single_flight.fetch(ID, soon(), || {
                    std::thread::sleep(Duration::from_millis(50));
                    panic!("fetch panics on purpose")
                })
            });
            std::thread::sleep(Duration::from_millis(10));
            // The next leader times out before its turn; a follower takes over.
            let short = scope.spawn(|| {
                single_flight.fetch(ID, Instant::now() + Duration::from_millis(5), || unreachable!("no time"))
            });
            std::thread::sleep(Duration::from_millis(2));
            let long = scope.spawn(|| single_flight.fetch(ID, soon(), || 5u64));
            assert!(first.join().is_err());
            assert!(short.join().unwrap().is_none());
            assert!(matches!(long.join().unwrap(), Some((5, _))));
        });
        assert!(lock(&single_flight.entries).is_empty());
    }
}
