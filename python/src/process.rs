//! [`ProcessLocal`]: a value that only the process that created it uses and drops; a forked child does neither.
//!
//! A forked child has only one thread, and connections and ledger cells belong to the parent: using or releasing them
//! would hang the child or corrupt the parent's state.

use std::mem::ManuallyDrop;

use moontide_heap::ProcessToken;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors;

/// Reason why a value cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    Closed,
    Forked,
}

/// A value that can be closed, and that a forked child neither uses nor drops.
#[derive(Debug)]
pub(crate) struct ProcessLocal<T> {
    process: ProcessToken,
    value: ManuallyDrop<Mutex<Option<T>>>,
}

impl<T> ProcessLocal<T> {
    pub(crate) fn new(value: T) -> ProcessLocal<T> {
        ProcessLocal {
            process: ProcessToken::of_this_process(),
            value: ManuallyDrop::new(Mutex::new(Some(value))),
        }
    }

    /// Calls `read` with the value, under the lock. `read` must not block.
    pub(crate) fn with<R>(&self, read: impl FnOnce(&T) -> R) -> Result<R, Unusable> {
        // Before the lock: a thread of the parent may have held it during the fork.
        if !self.process.is_valid() {
            return Err(Unusable::Forked);
        }
        self.value.lock().as_ref().map(read).ok_or(Unusable::Closed)
    }

    /// Takes the value unless `keep` fails. Both happen under the lock, so no `with` runs between them. Returns `None`
    /// if the value was taken before, or in a forked child.
    pub(crate) fn take_unless<E>(&self, keep: impl FnOnce() -> Result<(), E>) -> Result<Option<T>, E> {
        if !self.process.is_valid() {
            return Ok(None);
        }
        let mut value = self.value.lock();
        keep()?;
        Ok(value.take())
    }

    /// Takes the value if `condition` holds for it. Both happen under the lock, so no `with` runs between them.
    pub(crate) fn take_if(&self, condition: impl FnOnce(&T) -> bool) -> Result<Option<T>, Unusable> {
        if !self.process.is_valid() {
            return Err(Unusable::Forked);
        }
        let mut value = self.value.lock();
        if !condition(value.as_ref().ok_or(Unusable::Closed)?) {
            return Ok(None);
        }
        Ok(value.take())
    }

    /// Takes the value. Returns `None` if it was taken before, or in a forked child.
    pub(crate) fn take(&self) -> Option<T> {
        let Ok(taken) = self.take_unless(|| Ok::<(), std::convert::Infallible>(()));
        taken
    }
}

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if self.process.is_valid() {
            // SAFETY: not used after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// Returns the exception for a value that cannot be used.
pub(crate) fn unusable_error(py: Python<'_>, what: &str, reason: Unusable) -> PyErr {
    errors::closed(
        py,
        match reason {
            Unusable::Closed => format!("the {what} is closed"),
            Unusable::Forked => format!(
                "the {what} belongs to the process that this one was forked from; open a new one in this process, or \
                 start workers with multiprocessing's \"spawn\""
            ),
        },
    )
}
