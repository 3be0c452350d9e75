//! Atomics, locks and channels, re-exported so that a model checker or a simulated world can replace them.
//!
//! `--cfg loom` explores every interleaving and every allowed reordering of small models. `--cfg shuttle` runs larger
//! models on many random schedules, with sequentially consistent atomics. `--cfg sim` runs whole components on virtual
//! time, with the atomics of std. In every other build the names are those of std and of parking_lot, whose condition
//! variable makes no system call if it is notified without waiters. Read-write locks and channels are in no model.
//!
//! Code that several threads or processes run concurrently, and that a model covers, takes its atomics and locks from
//! here. Atomics in shared memory are used through slices: in production the slices are in a region, in a model they
//! are in a `Vec`.

use std::time::Duration;

#[cfg(loom)]
use loom::sync as names;
#[cfg(shuttle)]
use shuttle::sync as names;

#[cfg(sim)]
pub use crate::sim::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult, mpsc,
};
#[cfg(any(loom, shuttle))]
pub use names::{
    Arc, Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, Ordering, fence},
};
#[cfg(not(any(loom, shuttle, sim)))]
pub use parking_lot::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult,
};
#[cfg(not(any(loom, shuttle, sim)))]
pub use std::sync::mpsc;
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

/// Locks `mutex`. The lock is not poisoned by a thread that panics.
#[cfg(not(any(loom, shuttle)))]
#[inline]
#[cfg_attr(sim, track_caller)]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Locks `mutex`.
#[cfg(any(loom, shuttle))]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread of a model panics while it holds a lock")
}

/// Waits for `condvar`, at most for `timeout`. Returns the guard, and `false` if the time is over.
#[cfg(not(any(loom, shuttle)))]
#[inline]
#[cfg_attr(sim, track_caller)]
pub fn wait<'a, T>(
    condvar: &Condvar,
    mut guard: MutexGuard<'a, T>,
    timeout: Duration,
) -> (MutexGuard<'a, T>, bool) {
    let timed_out = condvar.wait_for(&mut guard, timeout).timed_out();
    (guard, !timed_out)
}

/// Waits for `condvar`. In a model no time passes: a `timeout` of zero ends at once, any other one never does.
#[cfg(any(loom, shuttle))]
pub fn wait<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: Duration,
) -> (MutexGuard<'a, T>, bool) {
    if timeout.is_zero() {
        return (guard, false);
    }
    (condvar.wait(guard).expect("no thread of a model panics while it holds a lock"), true)
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn wait_returns_false_after_timeout() {
        let (mutex, condvar) = (Mutex::new(7), Condvar::new());
        let (guard, notified) = wait(&condvar, lock(&mutex), Duration::from_millis(1));
        assert_eq!((*guard, notified), (7, false));
        assert!(!wait(&condvar, guard, Duration::ZERO).1);
    }

    #[test]
    fn wait_returns_true_after_notification() {
        let shared = Arc::new((Mutex::new(false), Condvar::new()));
        let notifier = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                *lock(&shared.0) = true;
                shared.1.notify_all();
            }
        });
        let mut guard = lock(&shared.0);
        while !*guard {
            let notified;
            (guard, notified) = wait(&shared.1, guard, Duration::from_secs(60));
            assert!(notified);
        }
        drop(guard);
        notifier.join().unwrap();
    }
}
