//! Locks, from one place, so that a model checker can stand in for the machine (`--cfg shuttle`).

use std::time::Instant;

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

/// Waits for the bell, at most until then. `false`: the time is over.
#[cfg(not(shuttle))]
pub(crate) fn wait<'a, T>(
    bell: &Condvar,
    mut guard: MutexGuard<'a, T>,
    until: Instant,
) -> (MutexGuard<'a, T>, bool) {
    let over = bell.wait_until(&mut guard, until).timed_out();
    (guard, !over)
}

/// In a model no time passes: whoever has a time that is over gives up at once, and the others wait for the bell.
#[cfg(shuttle)]
pub(crate) fn wait<'a, T>(
    bell: &Condvar,
    guard: MutexGuard<'a, T>,
    until: Instant,
) -> (MutexGuard<'a, T>, bool) {
    if until <= Instant::now() {
        return (guard, false);
    }
    (bell.wait(guard).expect("no thread of a model dies with a lock"), true)
}
