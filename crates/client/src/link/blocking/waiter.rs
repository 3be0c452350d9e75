//! [`Waiter`]: a thread that waits for its outcome and may be given a duty meanwhile.

use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::Instant;

use parking_lot::Mutex;

use super::connection::Connection;
use crate::link::call::Outcome;
use crate::link::error::LinkError;

/// What a thread does while it waits.
#[derive(Debug)]
pub(super) enum Duty {
    /// Read replies, for everybody.
    Read(Arc<Connection>),
    /// Write what is left in the connection.
    Write(Arc<Connection>),
}

/// Why a thread no longer parks.
#[derive(Debug)]
pub(super) enum Wake {
    /// It has what it waited for.
    Outcome(Result<Outcome, LinkError>),
    /// It is to do something.
    Duty(Duty),
    /// Its time is over.
    TimedOut,
    /// It has not parked: it is busy with a duty that has ended, and must enter again first.
    Idle,
}

/// One call that waits. Made by the calling thread, settled by any.
#[derive(Debug)]
pub(super) struct Waiter {
    thread: Thread,
    cell: Mutex<Cell>,
}

#[derive(Debug)]
struct Cell {
    outcome: Option<Result<Outcome, LinkError>>,
    duty: Option<Duty>,
    /// Parked or about to, with nothing to do: may be given a duty.
    idle: bool,
}

impl Waiter {
    pub(super) fn new() -> Arc<Waiter> {
        let cell = Cell { outcome: None, duty: None, idle: false };
        Arc::new(Waiter { thread: thread::current(), cell: Mutex::new(cell) })
    }

    /// Hands over the outcome.
    pub(super) fn settle(&self, outcome: Result<Outcome, LinkError>) {
        self.cell.lock().outcome = Some(outcome);
        self.thread.unpark();
    }

    pub(super) fn is_settled(&self) -> bool {
        self.cell.lock().outcome.is_some()
    }

    /// Gives a duty to a thread that has none and still waits; whether it was taken.
    pub(super) fn give(&self, duty: Duty) -> bool {
        let mut cell = self.cell.lock();
        let takes = cell.idle && cell.outcome.is_none();
        if takes {
            cell.idle = false;
            cell.duty = Some(duty);
            drop(cell);
            self.thread.unpark();
        }
        takes
    }

    /// From now on it may be given a duty.
    pub(super) fn set_idle(&self) {
        self.cell.lock().idle = true;
    }

    /// No duty is given to it any more. What it has at this moment.
    pub(super) fn close(&self) -> (Option<Result<Outcome, LinkError>>, Option<Duty>) {
        let mut cell = self.cell.lock();
        cell.idle = false;
        (cell.outcome.take(), cell.duty.take())
    }

    /// Parks until there is something to do. A duty comes before the outcome, because others wait for it.
    pub(super) fn park(&self, until: Instant) -> Wake {
        loop {
            let mut cell = self.cell.lock();
            if let Some(duty) = cell.duty.take() {
                return Wake::Duty(duty);
            }
            if let Some(outcome) = cell.outcome.take() {
                return Wake::Outcome(outcome);
            }
            let idle = cell.idle;
            drop(cell);
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return Wake::TimedOut;
            };
            if !idle {
                return Wake::Idle;
            }
            thread::park_timeout(left);
        }
    }
}
