//! Locks, from one place, so that a model checker can stand in for the machine (`--cfg shuttle`).
//!
//! The machine's are parking_lot's: a bell that nobody listens to costs no system call.

use std::time::Duration;

#[cfg(not(shuttle))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(shuttle))]
pub(crate) use std::sync::Arc;

#[cfg(not(shuttle))]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

#[cfg(shuttle)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread of a model dies with a lock")
}

/// Waits for the bell, at most so long.
#[cfg(not(shuttle))]
pub(crate) fn wait<'a, T>(
    bell: &Condvar,
    mut guard: MutexGuard<'a, T>,
    timeout: Duration,
) -> MutexGuard<'a, T> {
    bell.wait_for(&mut guard, timeout);
    guard
}

#[cfg(shuttle)]
pub(crate) fn wait<'a, T>(bell: &Condvar, guard: MutexGuard<'a, T>, timeout: Duration) -> MutexGuard<'a, T> {
    bell.wait_timeout(guard, timeout).expect("no thread of a model dies with a lock").0
}
