//! [`Flights`]: threads that want the same object at the same time fetch it once.
//!
//! A fetch that is under way may have looked before its newcomer came: what the newcomer has removed a moment ago could
//! be in it. So newcomers never join it; they share the **next** one, which begins when the current one has ended. A hot
//! key is then fetched by one thread at a time, whoever wants it waits for two fetches at most, and every answer was
//! looked up after its caller had asked.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Instant;

use crate::sync::{Arc, Condvar, Mutex, lock, wait};

/// Fetches under way, by object.
#[derive(Debug)]
pub(crate) struct Flights<K, T> {
    lines: Mutex<HashMap<K, Line<T>>>,
}

impl<K, T> Default for Flights<K, T> {
    fn default() -> Flights<K, T> {
        Flights { lines: Mutex::new(HashMap::new()) }
    }
}

#[derive(Debug)]
struct Line<T> {
    current: Arc<Flight<T>>,
    next: Option<Arc<Flight<T>>>,
}

#[derive(Debug)]
struct Flight<T> {
    landed: Mutex<Option<Landed<T>>>,
    bell: Condvar,
}

#[derive(Clone, Debug)]
enum Landed<T> {
    With(T),
    /// Its leader never finished: a panic, or its time was over before it began.
    Lost,
}

impl<T: Clone> Flight<T> {
    fn new() -> Arc<Flight<T>> {
        Arc::new(Flight { landed: Mutex::new(None), bell: Condvar::new() })
    }

    /// Waits; `None` when the time is over.
    fn wait(&self, deadline: Instant) -> Option<Landed<T>> {
        let mut landed = lock(&self.landed);
        let mut in_time = true;
        while landed.is_none() && in_time {
            (landed, in_time) = wait(&self.bell, landed, deadline);
        }
        landed.clone()
    }

    fn land(&self, with: Landed<T>) {
        lock(&self.landed).get_or_insert(with);
        self.bell.notify_all();
    }
}

/// What a newcomer does.
enum Part<T> {
    /// It fetches at once.
    Lead(Arc<Flight<T>>),
    /// It fetches when the current flight has landed.
    LeadNext { current: Arc<Flight<T>>, own: Arc<Flight<T>> },
    /// It waits.
    Follow(Arc<Flight<T>>),
}

impl<K: Copy + Eq + Hash, T: Clone> Flights<K, T> {
    /// Fetches an object, or shares the fetch of somebody who asked after this began. `None`: the time is over.
    /// The flag says that it was somebody else's.
    pub(crate) fn fetch(&self, id: K, deadline: Instant, fetch: impl FnOnce() -> T) -> Option<(T, bool)> {
        let mut fetch = Some(fetch);
        loop {
            match self.arrive(id) {
                Part::Lead(own) => {
                    let seat = Leader { flights: self, id, own: &own, landed: Landed::Lost };
                    return Some((seat.lead(fetch.take()?), false));
                }
                Part::LeadNext { current, own } => {
                    let seat = Leader { flights: self, id, own: &own, landed: Landed::Lost };
                    current.wait(deadline)?;
                    return Some((seat.lead(fetch.take()?), false));
                }
                Part::Follow(flight) => match flight.wait(deadline)? {
                    Landed::With(fetched) => return Some((fetched, true)),
                    Landed::Lost => {} // somebody has to do it
                },
            }
        }
    }

    fn arrive(&self, id: K) -> Part<T> {
        let mut lines = lock(&self.lines);
        let Some(line) = lines.get_mut(&id) else {
            let own = Flight::new();
            lines.insert(id, Line { current: Arc::clone(&own), next: None });
            return Part::Lead(own);
        };
        if planted(Bug::JoinsTheCurrent) {
            return Part::Follow(Arc::clone(&line.current));
        }
        if let Some(next) = &line.next {
            return Part::Follow(Arc::clone(next));
        }
        let own = Flight::new();
        line.next = Some(Arc::clone(&own));
        Part::LeadNext { current: Arc::clone(&line.current), own }
    }

    /// A flight is over: the next one, if there is one, is the current one now.
    fn over(&self, id: K, own: &Arc<Flight<T>>) {
        let mut lines = lock(&self.lines);
        let Some(line) = lines.get_mut(&id) else { return };
        if Arc::ptr_eq(&line.current, own) {
            match line.next.take() {
                Some(next) => line.current = next,
                None => {
                    lines.remove(&id);
                }
            }
        } else if line.next.as_ref().is_some_and(|next| Arc::ptr_eq(next, own)) {
            line.next = None;
        }
    }
}

/// Who fetches. Gives the place up, whatever happens to it.
struct Leader<'a, K: Copy + Eq + Hash, T: Clone> {
    flights: &'a Flights<K, T>,
    id: K,
    own: &'a Arc<Flight<T>>,
    landed: Landed<T>,
}

impl<K: Copy + Eq + Hash, T: Clone> Leader<'_, K, T> {
    fn lead(mut self, fetch: impl FnOnce() -> T) -> T {
        let fetched = fetch();
        self.landed = Landed::With(fetched.clone());
        fetched
    }
}

impl<K: Copy + Eq + Hash, T: Clone> Drop for Leader<'_, K, T> {
    fn drop(&mut self) {
        let landed = std::mem::replace(&mut self.landed, Landed::Lost);
        if planted(Bug::LandsBeforeItLeaves) {
            self.own.land(landed);
            return self.flights.over(self.id, self.own);
        }
        if planted(Bug::NeverLeaves) {
            return self.own.land(landed);
        }
        // Out of the line first: the next leader begins when this one has landed, and nobody may join it from then on.
        self.flights.over(self.id, self.own);
        self.own.land(landed);
    }
}

/// Mistakes that the model switches on, to show that it would find them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// Who comes shares the fetch that is under way.
    JoinsTheCurrent,
    /// The next leader begins while newcomers can still join it.
    LandsBeforeItLeaves,
    /// The line is never empty again.
    NeverLeaves,
}

#[cfg(not(shuttle))]
fn planted(_: Bug) -> bool {
    false
}

#[cfg(shuttle)]
thread_local!(static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) });

/// Shuttle runs all threads of a model on one thread of the machine.
#[cfg(shuttle)]
fn planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

#[cfg(all(test, shuttle))]
mod model {
    use std::time::Duration;

    use shuttle::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Callers change the truth and ask for it; one of them has no patience.
    fn scene() {
        struct World {
            flights: Flights<u8, u64>,
            truth: AtomicU64,
            running: AtomicU64,
        }
        let world = Arc::new(World {
            flights: Flights::default(),
            truth: AtomicU64::new(0),
            running: AtomicU64::new(0),
        });
        let hour = Duration::from_secs(3600);
        let callers: Vec<_> = [hour, hour, hour, Duration::ZERO]
            .into_iter()
            .map(|patience| {
                let world = Arc::clone(&world);
                shuttle::thread::spawn(move || {
                    for _ in 0..2 {
                        let asked = world.truth.fetch_add(1, Ordering::SeqCst) + 1;
                        let fetched = world.flights.fetch(7, Instant::now() + patience, || {
                            assert_eq!(world.running.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                            let found = world.truth.load(Ordering::SeqCst);
                            shuttle::thread::yield_now();
                            world.running.fetch_sub(1, Ordering::SeqCst);
                            found
                        });
                        match fetched {
                            Some((found, _)) => assert!(found >= asked, "an answer from before it was asked"),
                            None => assert_eq!(patience, Duration::ZERO),
                        }
                    }
                })
            })
            .collect();
        callers.into_iter().for_each(|caller| caller.join().expect("no caller panics"));
        assert!(lock(&world.flights.lines).is_empty(), "nothing is left behind");
    }

    #[test]
    fn every_answer_was_looked_up_after_its_question() {
        shuttle::check_random(scene, 20_000);
        shuttle::check_pct(scene, 10_000, 4);
    }

    fn finds(bug: Bug) {
        PLANTED.set(Some(bug));
        shuttle::check_random(scene, 20_000);
    }

    #[test]
    #[should_panic]
    fn joining_a_fetch_that_is_under_way_is_found() {
        finds(Bug::JoinsTheCurrent);
    }

    #[test]
    #[should_panic]
    fn landing_before_leaving_is_found() {
        finds(Bug::LandsBeforeItLeaves);
    }

    #[test]
    #[should_panic]
    fn a_line_that_stays_is_found() {
        finds(Bug::NeverLeaves);
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
    fn a_hot_object_is_fetched_by_one_at_a_time_and_nobody_gets_an_answer_from_before_it_asked() {
        let flights = Flights::default();
        // The truth changes all the time; an answer must not be older than its question.
        let (truth, fetches, running) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        let asked = truth.fetch_add(1, Ordering::SeqCst) + 1;
                        let fetch = || {
                            assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "one at a time");
                            fetches.fetch_add(1, Ordering::SeqCst);
                            let found = truth.load(Ordering::SeqCst);
                            std::thread::sleep(Duration::from_micros(50));
                            running.fetch_sub(1, Ordering::SeqCst);
                            found
                        };
                        let (found, _) = flights.fetch(ID, soon(), fetch).unwrap();
                        assert!(found >= asked, "an answer of {found} to a question of {asked}");
                    }
                });
            }
        });
        assert!(fetches.load(Ordering::SeqCst) < 8 * 300, "some were shared");
        assert!(lock(&flights.lines).is_empty(), "nothing is left behind");
    }

    #[test]
    fn a_leader_that_panics_or_gives_up_leaves_no_one_waiting() {
        let flights = Flights::default();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                flights.fetch(ID, soon(), || {
                    std::thread::sleep(Duration::from_millis(50));
                    panic!("a fetch that panics")
                })
            });
            std::thread::sleep(Duration::from_millis(10));
            // The next leader gives up before its turn; a follower takes over.
            let impatient = scope.spawn(|| {
                flights.fetch(ID, Instant::now() + Duration::from_millis(5), || unreachable!("no time"))
            });
            std::thread::sleep(Duration::from_millis(2));
            let patient = scope.spawn(|| flights.fetch(ID, soon(), || 5u64));
            assert!(first.join().is_err());
            assert!(impatient.join().unwrap().is_none());
            assert!(matches!(patient.join().unwrap(), Some((5, _))));
        });
        assert!(lock(&flights.lines).is_empty());
    }
}
