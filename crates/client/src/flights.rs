//! [`Flights`]: threads that want the same object at the same time fetch it once.
//!
//! A fetch that is under way may have looked before its newcomer came: what the newcomer has removed a moment ago could
//! be in it. So newcomers never join it; they share the **next** one, which begins when the current one has ended. A hot
//! key is then fetched by one thread at a time, whoever wants it waits for two fetches at most, and every answer was
//! looked up after its caller had asked.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use moontide_types::ObjectId;
use parking_lot::{Condvar, Mutex};

use crate::error::StoreError;

/// What a fetch gives.
pub(crate) type Fetched = Result<Option<Bytes>, StoreError>;

/// Fetches under way, by object.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    lines: Mutex<HashMap<ObjectId, Line>>,
}

#[derive(Debug)]
struct Line {
    current: Arc<Flight>,
    next: Option<Arc<Flight>>,
}

#[derive(Debug, Default)]
struct Flight {
    landed: Mutex<Option<Landed>>,
    bell: Condvar,
}

#[derive(Clone, Debug)]
enum Landed {
    With(Fetched),
    /// Its leader never finished: a panic, or its time was over before it began.
    Lost,
}

impl Flight {
    /// Waits; `None` when the time is over.
    fn wait(&self, deadline: Instant) -> Option<Landed> {
        let mut landed = self.landed.lock();
        while landed.is_none() {
            if self.bell.wait_until(&mut landed, deadline).timed_out() {
                break;
            }
        }
        landed.clone()
    }

    fn land(&self, with: Landed) {
        self.landed.lock().get_or_insert(with);
        self.bell.notify_all();
    }
}

/// What a newcomer does.
enum Part {
    /// It fetches at once.
    Lead(Arc<Flight>),
    /// It fetches when the current flight has landed.
    LeadNext { current: Arc<Flight>, own: Arc<Flight> },
    /// It waits.
    Follow(Arc<Flight>),
}

impl Flights {
    /// Fetches an object, or shares the fetch of somebody who asked after this began. `None`: the time is over.
    /// The flag says that it was somebody else's.
    pub(crate) fn fetch(
        &self,
        id: ObjectId,
        deadline: Instant,
        fetch: impl FnOnce() -> Fetched,
    ) -> Option<(Fetched, bool)> {
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

    fn arrive(&self, id: ObjectId) -> Part {
        let mut lines = self.lines.lock();
        let Some(line) = lines.get_mut(&id) else {
            let own = Arc::new(Flight::default());
            lines.insert(id, Line { current: Arc::clone(&own), next: None });
            return Part::Lead(own);
        };
        if let Some(next) = &line.next {
            return Part::Follow(Arc::clone(next));
        }
        let own = Arc::new(Flight::default());
        line.next = Some(Arc::clone(&own));
        Part::LeadNext { current: Arc::clone(&line.current), own }
    }

    /// A flight is over: the next one, if there is one, is the current one now.
    fn over(&self, id: ObjectId, own: &Arc<Flight>) {
        let mut lines = self.lines.lock();
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
struct Leader<'a> {
    flights: &'a Flights,
    id: ObjectId,
    own: &'a Arc<Flight>,
    landed: Landed,
}

impl Leader<'_> {
    fn lead(mut self, fetch: impl FnOnce() -> Fetched) -> Fetched {
        let fetched = fetch();
        self.landed = Landed::With(fetched.clone());
        fetched
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        // Out of the line first: the next leader begins when this one has landed, and nobody may join it from then on.
        self.flights.over(self.id, self.own);
        self.own.land(std::mem::replace(&mut self.landed, Landed::Lost));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    const ID: ObjectId = ObjectId([7; 16]);

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
                            Ok(Some(Bytes::copy_from_slice(&found.to_le_bytes())))
                        };
                        let (fetched, _) = flights.fetch(ID, soon(), fetch).unwrap();
                        let found = u64::from_le_bytes(fetched.unwrap().unwrap()[..].try_into().unwrap());
                        assert!(found >= asked, "an answer of {found} to a question of {asked}");
                    }
                });
            }
        });
        assert!(fetches.load(Ordering::SeqCst) < 8 * 300, "some were shared");
        assert!(flights.lines.lock().is_empty(), "nothing is left behind");
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
            let patient = scope.spawn(|| flights.fetch(ID, soon(), || Ok(None)));
            assert!(first.join().is_err());
            assert!(impatient.join().unwrap().is_none());
            assert!(matches!(patient.join().unwrap(), Some((Ok(None), _))));
        });
        assert!(flights.lines.lock().is_empty());
    }
}
