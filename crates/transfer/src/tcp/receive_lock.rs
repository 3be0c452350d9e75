//! [`ReceiveLock`]: one waiting thread receives for all (leader/followers); [`Waiter`] is a queued one.
//!
//! One thread at a time reads the replies of a connection. A dedicated thread would be simpler, but then every reply
//! costs a second wake-up, which at 4 KiB is a quarter of a round trip. Instead, a thread that waits for a reply
//! acquires the lock if it is free, receives replies (for other threads, too), and passes the lock on when its own
//! reply has arrived.
//!
//! ```text
//!   acquire ──▶ Acquired ── receive: finish(waiter) … ──▶ release ──▶ queue empty: the lock is free
//!        └────▶ Queued ── wait ──▶ Done                       └─────▶ else the first waiter has it (Promoted)
//! ```
//!
//! Invariants: at most one thread holds the lock; while a thread is in the queue, another one holds the lock. So a
//! waiting thread is woken by its reply, by the lock, or by its own deadline. Mutexes are taken in the order queue,
//! waiter.

use std::collections::VecDeque;
use std::task::Waker;
use std::time::Duration;

use moontide_rt::mutation_enabled;
use moontide_rt::sync::{Arc, Condvar, Mutex, lock, wait};
use moontide_rt::time::Instant;

/// Right to receive on a connection.
#[derive(Debug, Default)]
pub(crate) struct ReceiveLock(Mutex<WaitQueue>);

#[derive(Debug, Default)]
struct WaitQueue {
    held: bool,
    waiters: VecDeque<Arc<Waiter>>,
}

/// One thread that waits for a reply.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    state: Mutex<WaiterState>,
    condvar: Condvar,
}

#[derive(Debug, Default)]
struct WaiterState {
    done: bool,
    promoted: bool,
    waker: Option<Waker>,
}

/// Result of [`ReceiveLock::acquire`].
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AcquireOutcome {
    /// The caller holds the lock, and must [`ReceiveLock::release`] it.
    Acquired,
    /// Another thread holds it. The caller is in the queue, and must [`ReceiveLock::wait`].
    Queued,
}

/// Result of [`ReceiveLock::wait`]. In each case the caller is no longer in the queue.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitOutcome {
    /// The reply has arrived.
    Done,
    /// The caller holds the lock, and must [`ReceiveLock::release`] it.
    Promoted,
    /// The deadline has passed.
    TimedOut,
}

impl ReceiveLock {
    /// Acquires the lock, or appends the caller to the queue.
    pub(crate) fn acquire(&self, waiter: &Arc<Waiter>) -> AcquireOutcome {
        let mut queue = lock(&self.0);
        if queue.held {
            queue.waiters.push_back(Arc::clone(waiter));
            return AcquireOutcome::Queued;
        }
        queue.held = true;
        AcquireOutcome::Acquired
    }

    /// Acquires the lock if it is free.
    pub(crate) fn try_acquire(&self) -> bool {
        !std::mem::replace(&mut lock(&self.0).held, true)
    }

    /// Passes the lock to the first waiter of the queue.
    pub(crate) fn release(&self) {
        let mut queue = lock(&self.0);
        assert!(queue.held, "only the holder can release the lock");
        while let Some(waiter) = queue.waiters.pop_front() {
            let mut state = lock(&waiter.state);
            if !state.done {
                if mutation_enabled(Mutation::ReleaseWithoutWakeup) {
                    break;
                }
                state.promoted = true;
                waiter.condvar.notify_all();
                return;
            }
        }
        queue.held = false;
    }

    /// Waits in the queue, after [`AcquireOutcome::Queued`].
    pub(crate) fn wait(&self, waiter: &Arc<Waiter>, deadline: Instant) -> WaitOutcome {
        let mut state = lock(&waiter.state);
        loop {
            if state.promoted {
                state.promoted = false;
                return WaitOutcome::Promoted;
            }
            if state.done {
                drop(state);
                return self.leave_queue(waiter, WaitOutcome::Done);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                return self.leave_queue(waiter, WaitOutcome::TimedOut);
            }
            state = wait(&waiter.condvar, state, left).0;
        }
    }

    /// Leaves the queue, unless the lock was passed to this waiter meanwhile.
    fn leave_queue(&self, waiter: &Arc<Waiter>, otherwise: WaitOutcome) -> WaitOutcome {
        let mut queue = lock(&self.0);
        queue.waiters.retain(|queued| !Arc::ptr_eq(queued, waiter));
        // No waiter is promoted while the queue is locked, so the value read here is final.
        let promoted = std::mem::take(&mut lock(&waiter.state).promoted);
        if promoted && !mutation_enabled(Mutation::WaiterDropsLock) {
            WaitOutcome::Promoted
        } else {
            otherwise
        }
    }
}

impl Waiter {
    /// Marks the reply as arrived and wakes the waiting thread.
    pub(crate) fn finish(&self) {
        let mut state = lock(&self.state);
        state.done = true;
        let waker = state.waker.take();
        self.condvar.notify_all();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns whether the reply has arrived.
    pub(crate) fn is_done(&self) -> bool {
        lock(&self.state).done
    }

    /// Waits until the reply has arrived, at most for `timeout`.
    #[cfg_attr(shuttle, expect(dead_code, reason = "connections of the model end without it"))]
    pub(crate) fn await_done(&self, timeout: Duration) {
        let state = lock(&self.state);
        if !state.done {
            drop(wait(&self.condvar, state, timeout));
        }
    }

    /// As [`Waiter::is_done`]; if `false`, `waker` is woken when the reply arrives.
    #[cfg_attr(shuttle, expect(dead_code, reason = "callers of the model wait on threads"))]
    pub(crate) fn poll(&self, waker: &Waker) -> bool {
        let mut state = lock(&self.state);
        if !state.done {
            state.waker = Some(waker.clone());
        }
        state.done
    }
}

moontide_rt::mutations! {
    /// Mutations that the model tests enable to prove that they detect the bug.
    enum Mutation {
        /// The lock is released, and no waiter is promoted.
        ReleaseWithoutWakeup,
        /// A waiter that is promoted just when it times out, or its reply arrives, drops the lock.
        WaiterDropsLock,
    }
}

#[cfg(all(test, shuttle))]
mod model {
    use std::collections::VecDeque;

    use moontide_rt::with_mutation;

    use super::*;

    /// A wire on which replies arrive in the order of the requests, and callers that each wait for one reply.
    struct ModelConnection {
        receive_lock: ReceiveLock,
        wire: Mutex<VecDeque<Arc<Waiter>>>,
    }

    impl ModelConnection {
        /// Receives one reply.
        fn receive(&self) {
            let next = lock(&self.wire).pop_front();
            next.expect("a receiving thread waits for a reply that has not arrived").finish();
        }

        /// Sends a request and waits for its reply. With a timeout of zero every wait ends at once, and is repeated.
        fn call(&self, timeout: Duration) {
            let waiter = Arc::new(Waiter::default());
            lock(&self.wire).push_back(Arc::clone(&waiter));
            while !waiter.is_done() {
                let has_lock = match self.receive_lock.acquire(&waiter) {
                    AcquireOutcome::Acquired => true,
                    AcquireOutcome::Queued => {
                        self.receive_lock.wait(&waiter, Instant::now() + timeout) == WaitOutcome::Promoted
                    }
                };
                if has_lock {
                    while !waiter.is_done() {
                        self.receive();
                    }
                    self.receive_lock.release();
                }
            }
        }
    }

    fn run_model() {
        let connection =
            Arc::new(ModelConnection { receive_lock: ReceiveLock::default(), wire: Mutex::default() });
        // An hour: shuttle's condvars time out or do not, but no time passes; a lost wake-up is a deadlock, which it
        // reports.
        let hour = Duration::from_secs(3600);
        let callers: Vec<_> = [hour, hour, Duration::ZERO]
            .into_iter()
            .map(|timeout| {
                let connection = Arc::clone(&connection);
                shuttle::thread::spawn(move || (0..2).for_each(|_| connection.call(timeout)))
            })
            .collect();
        callers.into_iter().for_each(|caller| caller.join().expect("no caller panics"));
        assert!(connection.receive_lock.try_acquire(), "the lock is free at the end");
    }

    #[test]
    fn every_reply_is_received_and_no_wakeup_is_lost() {
        shuttle::check_random(run_model, 20_000);
    }

    #[test]
    #[should_panic]
    fn mutation_release_without_wakeup_is_detected() {
        with_mutation(Some(Mutation::ReleaseWithoutWakeup), || shuttle::check_random(run_model, 20_000));
    }

    #[test]
    #[should_panic]
    fn mutation_woken_waiter_drops_receive_lock_is_detected() {
        with_mutation(Some(Mutation::WaiterDropsLock), || shuttle::check_random(run_model, 20_000));
    }
}
