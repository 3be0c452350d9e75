//! [`Syncs`]: makes the one file durable for all writers, and remembers when that has failed.
//!
//! The system reports a failed write-back once: whoever syncs next is told that all is well although earlier bytes are
//! lost. So syncs of the file follow one another, and after a failed one none is trusted any more: the tier refuses
//! writes until it is opened again.
//!
//! A writer that waited while another's sync both began and ended needs none of its own.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::storage::{self, File, Queue};

/// Syncs of one file.
#[derive(Debug)]
pub(super) struct Syncs {
    file: File,
    /// Syncs that have begun.
    begun: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// The last sync that has ended, by the number with which it began.
    Sound { ended: u64 },
    /// Nothing that is written now can be trusted.
    Broken,
}

impl Syncs {
    /// Syncs of this file.
    pub(super) fn new(file: File) -> Syncs {
        Syncs { file, begun: AtomicU64::new(0), state: Mutex::new(State::Sound { ended: 0 }) }
    }

    /// Makes durable what the caller has written.
    pub(super) fn sync(&self, queue: &mut dyn Queue) -> io::Result<()> {
        // AcqRel, a read that writes; pairs with the one below. Either this comes first, and then that sync begins after
        // the caller's writes, or that comes first, and then its number is not above `before`.
        let before = self.begun.fetch_add(0, Ordering::AcqRel);
        let mut state = self.state.lock();
        match *state {
            State::Broken => return Err(io::Error::other("an earlier sync of this file has failed")),
            State::Sound { ended } if ended > before => return Ok(()),
            State::Sound { .. } => {}
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1; // AcqRel; pairs with the one above
        match storage::sync(queue, &self.file) {
            Ok(()) => {
                *state = State::Sound { ended: number };
                Ok(())
            }
            Err(error) => {
                *state = State::Broken;
                Err(error)
            }
        }
    }

    /// Refuses all writes from now on.
    pub(super) fn refuse(&self) {
        *self.state.lock() = State::Broken;
    }

    /// Whether writes are refused.
    pub(super) fn is_broken(&self) -> bool {
        matches!(*self.state.lock(), State::Broken)
    }
}
