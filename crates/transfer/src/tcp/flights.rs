//! [`Flights`]: which requests are in flight on a connection, and who finishes them.
//!
//! A request's memory is used by two: by its sender until [`Flights::sent`], and by whoever has the turn while it
//! receives the answer. It is finished when neither uses it any more:
//!
//! | what happens | who finishes it |
//! |---|---|
//! | the answer comes | whoever received it, once the sender is done ([`Flights::answered`]) |
//! | its own sender receives the answer, because it could not send on | the sender ([`Flights::sent`]) |
//! | the connection fails while it waits for its answer | whoever has the turn ([`Flights::clear`]) |
//! | the connection fails while it is being sent | the sender ([`Flights::sent`]) |
//! | the same, while its answer is already being received | whoever of the two is done last |
//!
//! Generic, and without a socket, so that a model checker runs it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, lock, wait};

/// Requests `R` in flight, which end with answers `A`.
#[derive(Debug)]
pub(crate) struct Flights<R, A> {
    books: Mutex<Books<R, A>>,
    /// Rung when there is room for another request.
    room: Condvar,
    /// Rung when a sender is done.
    sent: Condvar,
    max: usize,
}

#[derive(Debug)]
struct Books<R, A> {
    in_flight: VecDeque<Flight<R, A>>,
    /// After a failure: what everybody gets who has no answer.
    failure: Option<A>,
}

#[derive(Debug)]
struct Flight<R, A> {
    number: u64,
    request: R,
    /// Its sender is not done with it.
    sending: bool,
    /// Whoever has the turn is receiving its answer.
    receiving: bool,
    /// The answer, which its sender received before it was done.
    early: Option<A>,
    sent_at: Instant,
}

/// Who received an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// A thread that is in the middle of sending a request.
    TheSender,
    /// A thread that only receives.
    AReceiver,
}

/// The sender of a request was not done in time.
#[derive(Debug)]
pub(crate) struct Late;

/// Why a request did not enter.
#[derive(Debug)]
pub(crate) enum NoEntry<A> {
    /// There is no room now; there is some after the next answer.
    Full,
    /// The connection has failed.
    Failed(A),
}

impl<R: Clone, A: Clone> Flights<R, A> {
    /// None yet, and at most so many at a time.
    pub(crate) fn new(max: usize) -> Flights<R, A> {
        let books = Books { in_flight: VecDeque::new(), failure: None };
        Flights {
            books: Mutex::new(books),
            room: Condvar::default(),
            sent: Condvar::default(),
            max: max.max(1),
        }
    }

    /// Enters a request that is about to be sent: its answer may come at once. The sender calls [`Flights::sent`] later,
    /// whatever happens.
    pub(crate) fn enter(&self, number: u64, request: R) -> Result<(), NoEntry<A>> {
        let mut books = lock(&self.books);
        if let Some(failure) = &books.failure {
            return Err(NoEntry::Failed(failure.clone()));
        }
        if books.in_flight.len() >= self.max {
            return Err(NoEntry::Full);
        }
        let sent_at = Instant::now();
        let (sending, receiving, early) = (true, false, None);
        books.in_flight.push_back(Flight { number, request, sending, receiving, early, sent_at });
        Ok(())
    }

    /// Waits until there is room, or the connection has failed, at most so long.
    pub(crate) fn await_room(&self, timeout: Duration) {
        let books = lock(&self.books);
        if books.failure.is_none() && books.in_flight.len() >= self.max {
            drop(wait(&self.room, books, timeout));
        }
    }

    /// The sender is done with a request. If one is returned, the caller finishes it.
    #[must_use]
    pub(crate) fn sent(&self, number: u64) -> Option<(R, A)> {
        let mut books = lock(&self.books);
        let at = books.in_flight.iter().position(|flight| flight.number == number)?;
        let flight = &mut books.in_flight[at];
        flight.sending = false;
        flight.sent_at = Instant::now();
        self.sent.notify_all();
        let early = flight.early.take();
        let receiving = flight.receiving && !planted(Bug::ForgetsTheReceiver);
        let answer = early.or_else(|| books.failure.clone().filter(|_| !receiving))?;
        let flight = books.in_flight.remove(at).expect("found above");
        self.room.notify_one();
        Some((flight.request, answer))
    }

    /// The request that an answer names, if it has none yet. The caller, who has the turn, receives the answer, and then
    /// calls [`Flights::answered`], or after a failure [`Flights::clear`].
    pub(crate) fn receive(&self, number: u64) -> Option<R> {
        let mut books = lock(&self.books);
        let mut flights = books.in_flight.iter_mut();
        let flight = flights.find(|flight| flight.number == number && flight.early.is_none())?;
        flight.receiving = true;
        Some(flight.request.clone())
    }

    /// The oldest request, and since when it has been waiting for its answer; not while it is being sent.
    #[cfg_attr(shuttle, expect(dead_code, reason = "the model has no clock"))]
    pub(crate) fn front(&self) -> Option<(R, Option<Instant>)> {
        let books = lock(&self.books);
        let sent_at = |flight: &Flight<R, A>| (!flight.sending).then_some(flight.sent_at);
        books.in_flight.front().map(|flight| (flight.request.clone(), sent_at(flight)))
    }

    /// An answer was received. If the request is returned, the caller finishes it with the answer.
    ///
    /// A peer answers what it has got, so a request that is still being sent is sent any moment, or never; in both
    /// cases its sender is done soon, and is waited for: the caller may be waiting for this very request, and if the
    /// sender finished it would not hear of it. Unless the caller **is** the sender, which it says. A peer that lies may
    /// answer what it then takes its time to receive: after `deadline` the caller gives up.
    pub(crate) fn answered(
        &self,
        number: u64,
        answer: A,
        by: By,
        deadline: Instant,
    ) -> Result<Option<(R, A)>, Late> {
        let mut books = lock(&self.books);
        loop {
            let Some(at) = books.in_flight.iter().position(|flight| flight.number == number) else {
                return Ok(None);
            };
            let flight = &mut books.in_flight[at];
            if !flight.sending || planted(Bug::FinishesWhatIsSent) {
                let flight = books.in_flight.remove(at).expect("found above");
                self.room.notify_one();
                return Ok(Some((flight.request, answer)));
            }
            if by == By::TheSender || planted(Bug::LeavesItToTheSender) {
                flight.receiving = false;
                flight.early = Some(answer);
                return Ok(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Late);
            }
            books = wait(&self.sent, books, left);
        }
    }

    /// The connection has failed: nobody enters any more. The first failure is the one that counts.
    pub(crate) fn fail(&self, failure: A) {
        lock(&self.books).failure.get_or_insert(failure);
        self.room.notify_all();
    }

    /// What everybody gets who has no answer, once the connection has failed.
    pub(crate) fn failure(&self) -> Option<A> {
        lock(&self.books).failure.clone()
    }

    /// After a failure: all requests that are not being sent. The caller, who has the turn, finishes them.
    #[must_use]
    pub(crate) fn clear(&self) -> Vec<(R, A)> {
        let mut books = lock(&self.books);
        let Some(failure) = books.failure.clone() else { return Vec::new() };
        let (sending, cleared): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut books.in_flight)
            .into_iter()
            .partition(|flight| flight.sending && !planted(Bug::ClearsWhatIsSent));
        books.in_flight = sending;
        // The caller receives no more.
        books.in_flight.iter_mut().for_each(|flight| flight.receiving = false);
        cleared.into_iter().map(|flight| (flight.request, failure.clone())).collect()
    }
}

/// Mistakes that the model switches on, to show that it would find them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// An answer finishes a request whose sender is not done.
    FinishesWhatIsSent,
    /// A failure finishes a request whose sender is not done.
    ClearsWhatIsSent,
    /// Whoever receives an answer leaves the request to its sender, and waits on for that answer.
    LeavesItToTheSender,
    /// After a failure the sender finishes a request whose answer is being received.
    ForgetsTheReceiver,
    /// Whoever marks a connection as failed finishes all requests, although somebody is receiving.
    #[cfg(shuttle)]
    ClearsWithoutTheTurn,
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
    use shuttle::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::sync::Arc;
    use crate::tcp::turn::{Asked, Seat, Turn, Waited};

    const HOUR: Duration = Duration::from_secs(3600);

    /// A request with memory that is its caller's again once it has finished.
    #[derive(Debug, Default)]
    struct Job {
        seat: Arc<Seat>,
        users: AtomicU32,
        ends: AtomicU32,
    }

    impl Job {
        /// Somebody uses the memory for a while.
        fn touch(&self) {
            self.users.fetch_add(1, Ordering::SeqCst);
            shuttle::thread::yield_now();
            assert_eq!(self.ends.load(Ordering::SeqCst), 0, "memory is used after its request has finished");
            self.users.fetch_sub(1, Ordering::SeqCst);
        }

        fn finish(&self) {
            assert_eq!(self.users.load(Ordering::SeqCst), 0, "a request finishes while its memory is used");
            assert_eq!(self.ends.fetch_add(1, Ordering::SeqCst), 0, "a request finishes once");
            self.seat.finish();
        }
    }

    /// A connection whose peer answers at once: what was sent can be received.
    struct Scene {
        turn: Turn,
        flights: Flights<Arc<Job>, bool>,
        numbers: Mutex<u64>,
        wire: Mutex<Wire>,
        arrived: Condvar,
    }

    #[derive(Default)]
    struct Wire {
        answers: VecDeque<u64>,
        down: bool,
    }

    impl Scene {
        fn finish(&self, finished: impl IntoIterator<Item = (Arc<Job>, bool)>) {
            finished.into_iter().for_each(|(job, _)| job.finish());
        }

        fn submit(&self, job: &Arc<Job>) {
            let mut numbers = lock(&self.numbers);
            *numbers += 1;
            let number = *numbers;
            loop {
                match self.flights.enter(number, Arc::clone(job)) {
                    Ok(()) => break,
                    Err(NoEntry::Failed(_)) => return job.finish(),
                    // As `Connection::make_room`.
                    Err(NoEntry::Full) if self.turn.try_take() => {
                        self.receive(By::TheSender);
                        self.turn.leave();
                        self.clear_if_failed();
                    }
                    Err(NoEntry::Full) => self.flights.await_room(HOUR),
                }
            }
            // The answer may come before the sender knows that all was sent.
            lock(&self.wire).answers.push_back(number);
            self.arrived.notify_all();
            job.touch();
            self.finish(self.flights.sent(number));
            drop(numbers);
        }

        /// As `Connection::wait`.
        fn wait(&self, job: &Arc<Job>) {
            while !job.seat.is_done() {
                let has_turn = match self.turn.take(&job.seat) {
                    Asked::Yours => true,
                    Asked::Queued => self.turn.wait(&job.seat, Instant::now() + HOUR) == Waited::Promoted,
                };
                if has_turn {
                    while !job.seat.is_done() && self.receive(By::AReceiver) {}
                    self.turn.leave();
                    self.clear_if_failed();
                }
            }
        }

        /// Receives one answer; `false` if the wire is down, after clearing up.
        fn receive(&self, by: By) -> bool {
            let mut wire = lock(&self.wire);
            while wire.answers.is_empty() && !wire.down {
                wire = wait(&self.arrived, wire, HOUR);
            }
            if wire.down {
                drop(wire);
                self.finish(self.flights.clear());
                return false;
            }
            let number = wire.answers.pop_front().expect("not empty");
            drop(wire);
            self.take_in(number, by);
            true
        }

        fn take_in(&self, number: u64, by: By) {
            // After a failure its sender may have finished it.
            if let Some(job) = self.flights.receive(number) {
                job.touch();
                self.finish(self.flights.answered(number, true, by, Instant::now() + HOUR).expect("an hour"));
            }
        }

        /// As a connection's own thread: receives what has come, for whomever.
        fn mind(&self) {
            if self.turn.try_take() {
                let next =
                    Some(lock(&self.wire)).filter(|wire| !wire.down).and_then(|mut w| w.answers.pop_front());
                if let Some(number) = next {
                    self.take_in(number, By::AReceiver);
                }
                self.turn.leave();
                self.clear_if_failed();
            }
        }

        /// As `Connection::fail`.
        fn fail(&self) {
            self.flights.fail(false);
            lock(&self.wire).down = true;
            self.arrived.notify_all();
            if planted(Bug::ClearsWithoutTheTurn) {
                self.finish(self.flights.clear());
            }
            self.clear_if_failed();
        }

        fn clear_if_failed(&self) {
            if self.flights.failure().is_some() && self.turn.try_take() {
                self.finish(self.flights.clear());
                self.turn.leave();
            }
        }
    }

    fn scene() {
        let scene = Arc::new(Scene {
            turn: Turn::default(),
            flights: Flights::new(2),
            numbers: Mutex::default(),
            wire: Mutex::default(),
            arrived: Condvar::default(),
        });
        let mut threads: Vec<_> = [false, false, true]
            .into_iter()
            .map(|handed_over| {
                let scene = Arc::clone(&scene);
                shuttle::thread::spawn(move || {
                    let job = Arc::new(Job::default());
                    let (sender, sent) = (Arc::clone(&scene), Arc::clone(&job));
                    let other = handed_over.then(|| shuttle::thread::spawn(move || sender.submit(&sent)));
                    if !handed_over {
                        scene.submit(&job);
                    }
                    scene.wait(&job);
                    other.into_iter().for_each(|other| other.join().expect("no sender panics"));
                    assert_eq!(job.ends.load(Ordering::SeqCst), 1);
                })
            })
            .collect();
        let minding = Arc::clone(&scene);
        threads.push(shuttle::thread::spawn(move || {
            for _ in 0..4 {
                minding.mind();
                shuttle::thread::yield_now();
            }
        }));
        let failing = Arc::clone(&scene);
        if shuttle::rand::Rng::r#gen(&mut shuttle::rand::thread_rng()) {
            threads.push(shuttle::thread::spawn(move || failing.fail()));
        }
        threads.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
    }

    #[test]
    fn every_request_finishes_once_and_its_memory_is_left_alone() {
        shuttle::check_random(scene, 30_000);
    }

    fn is_found(bug: Bug) {
        PLANTED.set(Some(bug));
        shuttle::check_random(scene, 30_000);
    }

    #[test]
    #[should_panic]
    fn finishing_what_is_being_sent_is_found() {
        is_found(Bug::FinishesWhatIsSent);
    }

    #[test]
    #[should_panic]
    fn clearing_what_is_being_sent_is_found() {
        is_found(Bug::ClearsWhatIsSent);
    }

    #[test]
    #[should_panic]
    fn waiting_for_an_answer_that_has_come_is_found() {
        is_found(Bug::LeavesItToTheSender);
    }

    #[test]
    #[should_panic]
    fn finishing_what_is_being_received_is_found() {
        is_found(Bug::ForgetsTheReceiver);
    }

    #[test]
    #[should_panic]
    fn clearing_while_somebody_receives_is_found() {
        is_found(Bug::ClearsWithoutTheTurn);
    }
}
