//! [`InFlightTable`]: the requests in flight on a connection, and the choice of the thread that finishes each.
//!
//! Two threads use the memory of a request: its sender until [`InFlightTable::sent`], and the holder of the receive
//! lock while it receives the reply. The request is finished when neither uses the memory any more:
//!
//! | event | finished by |
//! |---|---|
//! | the reply arrives | the thread that received it, once the sender is done ([`InFlightTable::replied`]) |
//! | its sender receives the reply, because it could not send | the sender ([`InFlightTable::sent`]) |
//! | the connection fails while it waits for its reply | the holder of the receive lock ([`InFlightTable::clear`]) |
//! | the connection fails while it is being sent | the sender ([`InFlightTable::sent`]) |
//! | the same, while its reply is already being received | the one of the two threads that is done last |
//!
//! Generic, and without a socket, so that a model checker can run it.

use std::collections::VecDeque;
use std::time::Duration;

use moontide_rt::mutation_enabled;
use moontide_rt::sync::{Condvar, Mutex, lock, wait};
use moontide_rt::time::Instant;

/// Requests `R` in flight, which end with results `A`.
#[derive(Debug)]
pub(crate) struct InFlightTable<R, A> {
    state: Mutex<InFlightState<R, A>>,
    /// Notified when the table has capacity for another request.
    capacity: Condvar,
    /// Notified when a sender is done.
    sent: Condvar,
    max: usize,
}

#[derive(Debug)]
struct InFlightState<R, A> {
    in_flight: VecDeque<InFlightRequest<R, A>>,
    /// After a failure: the result of every request without a reply.
    failure: Option<A>,
}

#[derive(Debug)]
struct InFlightRequest<R, A> {
    number: u64,
    request: R,
    /// The sender is not done with the request.
    sending: bool,
    /// The holder of the receive lock is receiving the reply.
    receiving: bool,
    /// The result, if the sender received the reply before it was done.
    early: Option<A>,
    sent_at: Instant,
}

/// Role of the thread that received a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceivedBy {
    /// Thread that is sending a request.
    Sender,
    /// Thread that only receives.
    Receiver,
}

/// The sender of a request was not done before the deadline.
#[derive(Debug)]
pub(crate) struct SendIncomplete;

/// Reason why a request was not inserted.
#[derive(Debug)]
pub(crate) enum InsertError<A> {
    /// The table is full until the next reply.
    Full,
    /// The connection has failed.
    Failed(A),
}

impl<R: Clone, A: Clone> InFlightTable<R, A> {
    /// Creates an empty table for at most `max` requests.
    pub(crate) fn new(max: usize) -> InFlightTable<R, A> {
        let state = InFlightState { in_flight: VecDeque::new(), failure: None };
        InFlightTable {
            state: Mutex::new(state),
            capacity: Condvar::default(),
            sent: Condvar::default(),
            max: max.max(1),
        }
    }

    /// Inserts a request that is about to be sent: its reply may arrive at once. The sender must call
    /// [`InFlightTable::sent`] later in every case.
    pub(crate) fn insert(&self, number: u64, request: R) -> Result<(), InsertError<A>> {
        let mut state = lock(&self.state);
        if let Some(failure) = &state.failure {
            return Err(InsertError::Failed(failure.clone()));
        }
        if state.in_flight.len() >= self.max {
            return Err(InsertError::Full);
        }
        let sent_at = Instant::now();
        let (sending, receiving, early) = (true, false, None);
        state.in_flight.push_back(InFlightRequest { number, request, sending, receiving, early, sent_at });
        Ok(())
    }

    /// Waits until the table has capacity, or the connection has failed, at most for `timeout`.
    pub(crate) fn wait_for_capacity(&self, timeout: Duration) {
        let state = lock(&self.state);
        if state.failure.is_none() && state.in_flight.len() >= self.max {
            drop(wait(&self.capacity, state, timeout));
        }
    }

    /// Marks a request as sent. If a request is returned, the caller finishes it.
    #[must_use]
    pub(crate) fn sent(&self, number: u64) -> Option<(R, A)> {
        let mut state = lock(&self.state);
        let at = state.in_flight.iter().position(|entry| entry.number == number)?;
        let entry = &mut state.in_flight[at];
        entry.sending = false;
        entry.sent_at = Instant::now();
        self.sent.notify_all();
        let early = entry.early.take();
        let receiving = entry.receiving && !mutation_enabled(Mutation::SenderCompletesDuringReceive);
        let result = early.or_else(|| state.failure.clone().filter(|_| !receiving))?;
        let entry = state.in_flight.remove(at).expect("found above");
        self.capacity.notify_one();
        Some((entry.request, result))
    }

    /// Returns the request `number` if it has no reply yet. The caller, which holds the receive lock, receives the
    /// reply, and then calls [`InFlightTable::replied`], or after a failure [`InFlightTable::clear`].
    pub(crate) fn receive(&self, number: u64) -> Option<R> {
        let mut state = lock(&self.state);
        let mut entries = state.in_flight.iter_mut();
        let entry = entries.find(|entry| entry.number == number && entry.early.is_none())?;
        entry.receiving = true;
        Some(entry.request.clone())
    }

    /// Returns the oldest request, and the time since when it has waited for its reply; `None` while it is being sent.
    #[cfg_attr(shuttle, expect(dead_code, reason = "the model has no clock"))]
    pub(crate) fn front(&self) -> Option<(R, Option<Instant>)> {
        let state = lock(&self.state);
        let sent_at = |entry: &InFlightRequest<R, A>| (!entry.sending).then_some(entry.sent_at);
        state.in_flight.front().map(|entry| (entry.request.clone(), sent_at(entry)))
    }

    /// Stores the result of a received reply. If the request is returned, the caller finishes it with the result.
    ///
    /// A peer replies only to a request that it has received, so a request that is still being sent is sent any moment,
    /// or never. In both cases its sender is done soon, and this call waits for it: the caller may be waiting for this
    /// very request, and would not be woken if the sender finished it. `by` states whether the caller itself is the
    /// sender. A malicious peer may reply and then delay receiving the request: after `deadline` the call fails.
    pub(crate) fn replied(
        &self,
        number: u64,
        result: A,
        by: ReceivedBy,
        deadline: Instant,
    ) -> Result<Option<(R, A)>, SendIncomplete> {
        let mut state = lock(&self.state);
        loop {
            let Some(at) = state.in_flight.iter().position(|entry| entry.number == number) else {
                return Ok(None);
            };
            let entry = &mut state.in_flight[at];
            if !entry.sending || mutation_enabled(Mutation::ReplyCompletesDuringSend) {
                let entry = state.in_flight.remove(at).expect("found above");
                self.capacity.notify_one();
                return Ok(Some((entry.request, result)));
            }
            if by == ReceivedBy::Sender || mutation_enabled(Mutation::ReceiverLeavesItToSender) {
                entry.receiving = false;
                entry.early = Some(result);
                return Ok(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SendIncomplete);
            }
            state = wait(&self.sent, state, left).0;
        }
    }

    /// Marks the connection as failed: no request is inserted any more. The first failure counts.
    pub(crate) fn fail(&self, failure: A) {
        lock(&self.state).failure.get_or_insert(failure);
        self.capacity.notify_all();
    }

    /// Returns the result of every request without a reply, once the connection has failed.
    pub(crate) fn failure(&self) -> Option<A> {
        lock(&self.state).failure.clone()
    }

    /// After a failure, removes all requests that are not being sent. The caller, which holds the receive lock,
    /// finishes them.
    #[must_use]
    pub(crate) fn clear(&self) -> Vec<(R, A)> {
        let mut state = lock(&self.state);
        let Some(failure) = state.failure.clone() else { return Vec::new() };
        let (sending, cleared): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut state.in_flight)
            .into_iter()
            .partition(|entry| entry.sending && !mutation_enabled(Mutation::FailureCompletesDuringSend));
        state.in_flight = sending;
        // The caller stops receiving.
        state.in_flight.iter_mut().for_each(|entry| entry.receiving = false);
        cleared.into_iter().map(|entry| (entry.request, failure.clone())).collect()
    }
}

moontide_rt::mutations! {
    /// Mutations that the model tests enable to prove that they detect the bug.
    enum Mutation {
        /// A reply finishes a request whose sender is not done.
        ReplyCompletesDuringSend,
        /// A failure finishes a request whose sender is not done.
        FailureCompletesDuringSend,
        /// The receiver of a reply leaves the request to its sender, and keeps waiting for that reply.
        ReceiverLeavesItToSender,
        /// After a failure the sender finishes a request whose reply is being received.
        SenderCompletesDuringReceive,
    }
}

#[cfg(all(test, shuttle))]
mod model {
    use moontide_rt::sync::{Arc, AtomicU32, Ordering};
    use moontide_rt::with_mutation;

    use super::*;
    use crate::tcp::receive_lock::{AcquireOutcome, ReceiveLock, WaitOutcome, Waiter};

    moontide_rt::mutations! {
        /// A mutation of the model itself.
        enum ModelMutation {
            /// The thread that marks a connection as failed finishes all requests while another thread is receiving.
            ClearWithoutLock,
        }
    }

    const HOUR: Duration = Duration::from_secs(3600);

    /// A request whose memory belongs to its caller again once it has finished.
    #[derive(Debug, Default)]
    struct Job {
        waiter: Arc<Waiter>,
        users: AtomicU32,
        ends: AtomicU32,
    }

    impl Job {
        /// Uses the memory for a while.
        fn touch(&self) {
            self.users.fetch_add(1, Ordering::SeqCst);
            shuttle::thread::yield_now();
            assert_eq!(self.ends.load(Ordering::SeqCst), 0, "memory is used after its request has finished");
            self.users.fetch_sub(1, Ordering::SeqCst);
        }

        fn finish(&self) {
            assert_eq!(self.users.load(Ordering::SeqCst), 0, "a request finishes while its memory is used");
            assert_eq!(self.ends.fetch_add(1, Ordering::SeqCst), 0, "a request finishes twice");
            self.waiter.finish();
        }
    }

    /// A connection whose peer replies at once: the reply to a sent request can be received.
    struct ModelConnection {
        receive_lock: ReceiveLock,
        in_flight: InFlightTable<Arc<Job>, bool>,
        numbers: Mutex<u64>,
        wire: Mutex<Wire>,
        arrived: Condvar,
    }

    #[derive(Default)]
    struct Wire {
        replies: VecDeque<u64>,
        down: bool,
    }

    impl ModelConnection {
        fn finish(&self, finished: impl IntoIterator<Item = (Arc<Job>, bool)>) {
            finished.into_iter().for_each(|(job, _)| job.finish());
        }

        fn submit(&self, job: &Arc<Job>) {
            let mut numbers = lock(&self.numbers);
            *numbers += 1;
            let number = *numbers;
            loop {
                match self.in_flight.insert(number, Arc::clone(job)) {
                    Ok(()) => break,
                    Err(InsertError::Failed(_)) => return job.finish(),
                    // As `Connection::free_capacity`.
                    Err(InsertError::Full) if self.receive_lock.try_acquire() => {
                        self.receive(ReceivedBy::Sender);
                        self.receive_lock.release();
                        self.clear_if_failed();
                    }
                    Err(InsertError::Full) => self.in_flight.wait_for_capacity(HOUR),
                }
            }
            // The reply may arrive before the sender knows that everything was sent.
            lock(&self.wire).replies.push_back(number);
            self.arrived.notify_all();
            job.touch();
            self.finish(self.in_flight.sent(number));
            drop(numbers);
        }

        /// As `Connection::wait`.
        fn wait(&self, job: &Arc<Job>) {
            while !job.waiter.is_done() {
                let has_lock = match self.receive_lock.acquire(&job.waiter) {
                    AcquireOutcome::Acquired => true,
                    AcquireOutcome::Queued => {
                        self.receive_lock.wait(&job.waiter, Instant::now() + HOUR) == WaitOutcome::Promoted
                    }
                };
                if has_lock {
                    while !job.waiter.is_done() && self.receive(ReceivedBy::Receiver) {}
                    self.receive_lock.release();
                    self.clear_if_failed();
                }
            }
        }

        /// Receives one reply; `false` if the wire is down, after clearing the table.
        fn receive(&self, by: ReceivedBy) -> bool {
            let mut wire = lock(&self.wire);
            while wire.replies.is_empty() && !wire.down {
                wire = wait(&self.arrived, wire, HOUR).0;
            }
            if wire.down {
                drop(wire);
                self.finish(self.in_flight.clear());
                return false;
            }
            let number = wire.replies.pop_front().expect("not empty");
            drop(wire);
            self.handle_reply(number, by);
            true
        }

        fn handle_reply(&self, number: u64, by: ReceivedBy) {
            // After a failure the sender may have finished it.
            if let Some(job) = self.in_flight.receive(number) {
                job.touch();
                self.finish(
                    self.in_flight.replied(number, true, by, Instant::now() + HOUR).expect("an hour"),
                );
            }
        }

        /// As the thread of a connection: receives an available reply for any request.
        fn receive_available(&self) {
            if self.receive_lock.try_acquire() {
                let next =
                    Some(lock(&self.wire)).filter(|wire| !wire.down).and_then(|mut w| w.replies.pop_front());
                if let Some(number) = next {
                    self.handle_reply(number, ReceivedBy::Receiver);
                }
                self.receive_lock.release();
                self.clear_if_failed();
            }
        }

        /// As `Connection::fail`.
        fn fail(&self) {
            self.in_flight.fail(false);
            lock(&self.wire).down = true;
            self.arrived.notify_all();
            if mutation_enabled(ModelMutation::ClearWithoutLock) {
                self.finish(self.in_flight.clear());
            }
            self.clear_if_failed();
        }

        fn clear_if_failed(&self) {
            if self.in_flight.failure().is_some() && self.receive_lock.try_acquire() {
                self.finish(self.in_flight.clear());
                self.receive_lock.release();
            }
        }
    }

    fn run_model() {
        let connection = Arc::new(ModelConnection {
            receive_lock: ReceiveLock::default(),
            in_flight: InFlightTable::new(2),
            numbers: Mutex::default(),
            wire: Mutex::default(),
            arrived: Condvar::default(),
        });
        let mut threads: Vec<_> = [false, false, true]
            .into_iter()
            .map(|sent_by_other| {
                let connection = Arc::clone(&connection);
                shuttle::thread::spawn(move || {
                    let job = Arc::new(Job::default());
                    let (sender, sent) = (Arc::clone(&connection), Arc::clone(&job));
                    let other = sent_by_other.then(|| shuttle::thread::spawn(move || sender.submit(&sent)));
                    if !sent_by_other {
                        connection.submit(&job);
                    }
                    connection.wait(&job);
                    other.into_iter().for_each(|other| other.join().expect("no sender panics"));
                    assert_eq!(job.ends.load(Ordering::SeqCst), 1);
                })
            })
            .collect();
        let receiving = Arc::clone(&connection);
        threads.push(shuttle::thread::spawn(move || {
            for _ in 0..4 {
                receiving.receive_available();
                shuttle::thread::yield_now();
            }
        }));
        let failing = Arc::clone(&connection);
        if shuttle::rand::Rng::r#gen(&mut shuttle::rand::thread_rng()) {
            threads.push(shuttle::thread::spawn(move || failing.fail()));
        }
        threads.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
    }

    #[test]
    fn request_completes_once_and_memory_is_untouched_afterwards() {
        shuttle::check_random(run_model, 30_000);
    }

    fn run_with(mutation: impl moontide_rt::Mutation) {
        with_mutation(Some(mutation), || shuttle::check_random(run_model, 30_000));
    }

    #[test]
    #[should_panic]
    fn mutation_reply_completes_request_during_send_is_detected() {
        run_with(Mutation::ReplyCompletesDuringSend);
    }

    #[test]
    #[should_panic]
    fn mutation_failure_completes_request_during_send_is_detected() {
        run_with(Mutation::FailureCompletesDuringSend);
    }

    #[test]
    #[should_panic]
    fn mutation_receiver_waits_for_received_reply_is_detected() {
        run_with(Mutation::ReceiverLeavesItToSender);
    }

    #[test]
    #[should_panic]
    fn mutation_sender_completes_request_during_receive_is_detected() {
        run_with(Mutation::SenderCompletesDuringReceive);
    }

    #[test]
    #[should_panic]
    fn mutation_clear_without_receive_lock_is_detected() {
        run_with(ModelMutation::ClearWithoutLock);
    }
}
