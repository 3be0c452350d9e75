//! [`GroupSync`]: syncs the file for all writers, and remembers a failure.
//!
//! The system reports a failed write-back only once: the next sync succeeds although earlier bytes are lost. So syncs
//! of the file are serialised, and after a failed one none is trusted: the tier refuses writes until it is opened
//! again.
//!
//! A writer that waited while another sync both began and ended needs no sync of its own.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_rt::sync::Mutex;

use crate::storage::{self, File, Queue};

/// Syncs of one file.
#[derive(Debug)]
pub(super) struct GroupSync {
    file: File,
    /// Number of syncs that have begun.
    begun: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// `ended`: number of the last sync that has ended, in the order in which they began.
    Healthy { ended: u64 },
    /// A sync has failed: later writes cannot be trusted.
    Poisoned,
}

impl GroupSync {
    /// Creates the state for a file that no sync has failed for.
    pub(super) fn new(file: File) -> GroupSync {
        GroupSync { file, begun: AtomicU64::new(0), state: Mutex::new(State::Healthy { ended: 0 }) }
    }

    /// Makes the writes of the caller durable.
    pub(super) fn sync(&self, queue: &mut dyn Queue) -> io::Result<()> {
        // AcqRel, a read-modify-write; pairs with the one below. Either this comes first, and then that sync begins
        // after the caller's writes, or that comes first, and then its number is not above `before`.
        let before = self.begun.fetch_add(0, Ordering::AcqRel);
        let mut state = self.state.lock();
        match *state {
            State::Poisoned => return Err(io::Error::other("an earlier sync of this file failed")),
            State::Healthy { ended } if ended > before => return Ok(()),
            State::Healthy { .. } => {}
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1; // AcqRel; pairs with the one above
        match storage::sync(queue, &self.file) {
            Ok(()) => {
                *state = State::Healthy { ended: number };
                Ok(())
            }
            Err(error) => {
                *state = State::Poisoned;
                Err(error)
            }
        }
    }

    /// Refuses all writes from now on.
    pub(super) fn poison(&self) {
        *self.state.lock() = State::Poisoned;
    }

    /// Whether writes are refused.
    pub(super) fn is_poisoned(&self) -> bool {
        matches!(*self.state.lock(), State::Poisoned)
    }
}
