//! [`Waiter`]: thread that waits for its outcome and may get a role meanwhile.

use std::sync::Arc;
use std::thread::{self, Thread};

use moontide_rt::sync::Mutex;
use moontide_rt::time::Instant;

use super::connection::Connection;
use crate::link::call::Outcome;
use crate::link::error::LinkError;

/// Work of a thread while it waits.
#[derive(Debug)]
pub(super) enum IoRole {
    /// Read replies for all waiters.
    Read(Arc<Connection>),
    /// Write the bytes left in the connection.
    Write(Arc<Connection>),
}

/// Reason why [`Waiter::park`] returned.
#[derive(Debug)]
pub(super) enum WakeReason {
    /// The call is finished.
    Outcome(Result<Outcome, LinkError>),
    /// The thread got a role.
    Role(IoRole),
    /// The deadline has passed.
    TimedOut,
    /// The thread did not park: its role has ended, and it must enter again first.
    Idle,
}

/// A waiting call. Created by the calling thread, settled by any.
#[derive(Debug)]
pub(super) struct Waiter {
    thread: Thread,
    state: Mutex<WaiterState>,
}

#[derive(Debug)]
struct WaiterState {
    outcome: Option<Result<Outcome, LinkError>>,
    role: Option<IoRole>,
    /// Parked or about to park, without a role: may be given one.
    idle: bool,
}

impl Waiter {
    pub(super) fn new() -> Arc<Waiter> {
        let state = WaiterState { outcome: None, role: None, idle: false };
        Arc::new(Waiter { thread: thread::current(), state: Mutex::new(state) })
    }

    /// Delivers the outcome.
    pub(super) fn settle(&self, outcome: Result<Outcome, LinkError>) {
        self.state.lock().outcome = Some(outcome);
        self.thread.unpark();
    }

    pub(super) fn is_settled(&self) -> bool {
        self.state.lock().outcome.is_some()
    }

    /// Gives a role to a thread that has none and still waits. Returns whether it accepted.
    pub(super) fn give(&self, role: IoRole) -> bool {
        let mut state = self.state.lock();
        let accepts = state.idle && state.outcome.is_none();
        if accepts {
            state.idle = false;
            state.role = Some(role);
            drop(state);
            self.thread.unpark();
        }
        accepts
    }

    /// Makes the thread a candidate for roles.
    pub(super) fn set_idle(&self) {
        self.state.lock().idle = true;
    }

    /// Refuses roles from now on. Returns the outcome and role at this moment.
    pub(super) fn close(&self) -> (Option<Result<Outcome, LinkError>>, Option<IoRole>) {
        let mut state = self.state.lock();
        state.idle = false;
        (state.outcome.take(), state.role.take())
    }

    /// Parks until there is a role or an outcome. The role comes first, because other threads depend on it.
    pub(super) fn park(&self, until: Instant) -> WakeReason {
        loop {
            let mut state = self.state.lock();
            if let Some(role) = state.role.take() {
                return WakeReason::Role(role);
            }
            if let Some(outcome) = state.outcome.take() {
                return WakeReason::Outcome(outcome);
            }
            let idle = state.idle;
            drop(state);
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return WakeReason::TimedOut;
            };
            if !idle {
                return WakeReason::Idle;
            }
            thread::park_timeout(left);
        }
    }
}
