//! [`OfProcess`]: something that is of use in the process that made it, and left alone in a child that was forked from it.
//!
//! In a child there are no threads but one, and connections and cells of the ledger are the parent's: using them would
//! hang or harm, and so would giving them back.

use std::mem::ManuallyDrop;

use moontide_heap::ProcessToken;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors;

/// Why it cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    Closed,
    Forked,
}

/// A value that can be closed, and that a forked child neither uses nor drops.
#[derive(Debug)]
pub(crate) struct OfProcess<T> {
    made_in: ProcessToken,
    value: ManuallyDrop<Mutex<Option<T>>>,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> OfProcess<T> {
        OfProcess {
            made_in: ProcessToken::of_this_process(),
            value: ManuallyDrop::new(Mutex::new(Some(value))),
        }
    }

    /// What `look` says of the value. Do not wait in it.
    pub(crate) fn with<R>(&self, look: impl FnOnce(&T) -> R) -> Result<R, Gone> {
        // Before the lock, which a thread of the parent may have held.
        if !self.made_in.is_valid() {
            return Err(Gone::Forked);
        }
        self.value.lock().as_ref().map(look).ok_or(Gone::Closed)
    }

    /// Takes it out, unless `keep` says otherwise, which nobody who looks at the value comes in between; `None` if that was
    /// done before, or in a child.
    pub(crate) fn take_unless<E>(&self, keep: impl FnOnce() -> Result<(), E>) -> Result<Option<T>, E> {
        if !self.made_in.is_valid() {
            return Ok(None);
        }
        let mut value = self.value.lock();
        keep()?;
        Ok(value.take())
    }

    /// Takes it out if `may` says so of it, which nobody who looks at the value comes in between.
    pub(crate) fn take_if(&self, may: impl FnOnce(&T) -> bool) -> Result<Option<T>, Gone> {
        if !self.made_in.is_valid() {
            return Err(Gone::Forked);
        }
        let mut value = self.value.lock();
        if !may(value.as_ref().ok_or(Gone::Closed)?) {
            return Ok(None);
        }
        Ok(value.take())
    }

    /// Takes it out; `None` if that was done before, or in a child.
    pub(crate) fn take(&self) -> Option<T> {
        let Ok(taken) = self.take_unless(|| Ok::<(), std::convert::Infallible>(()));
        taken
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.made_in.is_valid() {
            // SAFETY: not used after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// The exception for something that cannot be used any more.
pub(crate) fn gone(py: Python<'_>, what: &str, gone: Gone) -> PyErr {
    errors::closed(
        py,
        match gone {
            Gone::Closed => format!("the {what} is closed"),
            Gone::Forked => format!(
                "the {what} belongs to the process that this one was forked from; connect anew here, or start workers \
                 with multiprocessing's \"spawn\""
            ),
        },
    )
}
