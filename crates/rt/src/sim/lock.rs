//! [`Mutex`], [`RwLock`] and [`Condvar`] with the interface of parking_lot.
//!
//! Each contains the lock of parking_lot. Outside a world that is all there is. In a world a thread takes it if it is free, and
//! otherwise waits in the world's scheduler, which never blocks the thread of the operating system. A released lock
//! wakes all threads that wait for it; the scheduler draws which of them is first, so a lock is not fair.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::Instant;
use super::world::{Key, World};

/// No fiber, or none that is known.
const NO_HOLDER: usize = usize::MAX;

/// A lock for one thread at a time.
pub struct Mutex<T: ?Sized> {
    /// Number of the fiber that holds the lock, for reports of deadlocks.
    holder: AtomicUsize,
    inner: parking_lot::Mutex<T>,
}

/// A locked [`Mutex`].
#[must_use]
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    /// `None` only within a wait for a condition variable, and after the drop.
    inner: Option<parking_lot::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Creates a lock that is free.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex { holder: AtomicUsize::new(NO_HOLDER), inner: parking_lot::Mutex::new(value) }
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    fn key(&self) -> Key {
        Key::Lock((&raw const self.holder).addr())
    }

    /// Waits for the lock.
    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let Some(world) = World::current() else {
            return MutexGuard { mutex: self, inner: Some(self.inner.lock()) };
        };
        let at = Location::caller();
        world.point(at);
        MutexGuard { mutex: self, inner: self.lock_in(&world, None, at) }
    }

    /// Waits for the lock in a world, at most until `until`.
    fn lock_in(
        &self,
        world: &World,
        until: Option<u64>,
        at: &'static Location<'static>,
    ) -> Option<parking_lot::MutexGuard<'_, T>> {
        loop {
            if let Some(guard) = self.inner.try_lock() {
                self.holder.store(world.running(), Ordering::Relaxed);
                return Some(guard);
            }
            if until.is_some_and(|until| world.now() >= until) {
                return None;
            }
            let holder = self.holder.load(Ordering::Relaxed);
            world.wait(Some(self.key()), until, "a mutex", (holder != NO_HOLDER).then_some(holder), at);
        }
    }

    /// Takes the lock if it is free.
    #[track_caller]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let world = World::current();
        if let Some(world) = &world {
            world.point(Location::caller());
        }
        let inner = Some(self.inner.try_lock()?);
        self.holder.store(world.map_or(NO_HOLDER, |world| world.running()), Ordering::Relaxed);
        Some(MutexGuard { mutex: self, inner })
    }

    /// Waits for the lock, at most for `timeout`.
    #[track_caller]
    pub fn try_lock_for(&self, timeout: Duration) -> Option<MutexGuard<'_, T>> {
        let Some(world) = World::current() else {
            return self
                .inner
                .try_lock_for(timeout)
                .map(|inner| MutexGuard { mutex: self, inner: Some(inner) });
        };
        let at = Location::caller();
        world.point(at);
        let until = world.after(timeout);
        let inner = Some(self.lock_in(&world, Some(until), at)?);
        Some(MutexGuard { mutex: self, inner })
    }

    /// Waits for the lock, at most until `until`.
    #[track_caller]
    pub fn try_lock_until(&self, until: Instant) -> Option<MutexGuard<'_, T>> {
        self.try_lock_for(until.saturating_duration_since(Instant::now()))
    }

    /// Returns the value; the borrow proves that no thread has the lock.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Releases the lock while `run` runs, and takes it again.
    #[track_caller]
    pub fn unlocked<U>(guard: &mut Self, run: impl FnOnce() -> U) -> U {
        guard.release();
        let value = run();
        guard.inner = match World::current() {
            Some(world) => guard.mutex.lock_in(&world, None, Location::caller()),
            None => Some(guard.mutex.inner.lock()),
        };
        value
    }

    /// Releases the lock and wakes those that wait for it.
    fn release(&mut self) {
        self.mutex.holder.store(NO_HOLDER, Ordering::Relaxed);
        drop(self.inner.take());
        if let Some(world) = World::current() {
            world.wake_all(self.mutex.key());
        }
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        self.release();
        if let Some(world) = World::current() {
            world.point(Location::caller());
        }
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner.as_deref().expect("the guard has the lock")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_deref_mut().expect("the guard has the lock")
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Mutex<T> {
        Mutex::new(T::default())
    }
}

impl<T> From<T> for Mutex<T> {
    fn from(value: T) -> Mutex<T> {
        Mutex::new(value)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A lock for many readers or one writer.
pub struct RwLock<T: ?Sized> {
    /// Gives the lock an address of its own, also if `T` has no bytes.
    address: u8,
    inner: parking_lot::RwLock<T>,
}

impl<T> RwLock<T> {
    /// Creates a lock that is free.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock { address: 0, inner: parking_lot::RwLock::new(value) }
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        self.inner.into_inner()
    }
}

macro_rules! rw_guard {
    ($(#[$attribute:meta])* $guard:ident) => {
        $(#[$attribute])*
        #[must_use]
        pub struct $guard<'a, T: ?Sized> {
            lock: &'a RwLock<T>,
            /// `None` only after the drop.
            inner: Option<parking_lot::$guard<'a, T>>,
        }

        impl<T: ?Sized> Drop for $guard<'_, T> {
            fn drop(&mut self) {
                drop(self.inner.take());
                if let Some(world) = World::current() {
                    world.wake_all(self.lock.key());
                    world.point(Location::caller());
                }
            }
        }

        impl<T: ?Sized> Deref for $guard<'_, T> {
            type Target = T;

            fn deref(&self) -> &T {
                self.inner.as_deref().expect("the guard has the lock")
            }
        }

        impl<T: ?Sized + fmt::Debug> fmt::Debug for $guard<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                (**self).fmt(f)
            }
        }
    };
}

rw_guard!(
    /// A [`RwLock`] locked for reading.
    RwLockReadGuard
);
rw_guard!(
    /// A [`RwLock`] locked for writing.
    RwLockWriteGuard
);

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_deref_mut().expect("the guard has the lock")
    }
}

impl<T: ?Sized> RwLock<T> {
    fn key(&self) -> Key {
        Key::Lock((&raw const self.address).addr())
    }

    /// Waits until no thread writes.
    #[track_caller]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let Some(world) = World::current() else {
            return RwLockReadGuard { lock: self, inner: Some(self.inner.read()) };
        };
        let at = Location::caller();
        world.point(at);
        loop {
            if let Some(inner) = self.inner.try_read() {
                return RwLockReadGuard { lock: self, inner: Some(inner) };
            }
            world.wait(Some(self.key()), None, "a read lock", None, at);
        }
    }

    /// Waits until no thread reads or writes.
    #[track_caller]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let Some(world) = World::current() else {
            return RwLockWriteGuard { lock: self, inner: Some(self.inner.write()) };
        };
        let at = Location::caller();
        world.point(at);
        loop {
            if let Some(inner) = self.inner.try_write() {
                return RwLockWriteGuard { lock: self, inner: Some(inner) };
            }
            world.wait(Some(self.key()), None, "a write lock", None, at);
        }
    }

    /// Returns the value; the borrow proves that no thread has the lock.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }
}

impl<T: Default> Default for RwLock<T> {
    fn default() -> RwLock<T> {
        RwLock::new(T::default())
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// A condition variable. A wait ends only by a notification or by its time, as with parking_lot's.
pub struct Condvar {
    /// Gives the variable an address of its own.
    address: u8,
    inner: parking_lot::Condvar,
}

/// Tells whether a wait ended by its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Whether the wait ended by its time.
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Creates a condition variable.
    pub const fn new() -> Condvar {
        Condvar { address: 0, inner: parking_lot::Condvar::new() }
    }

    fn key(&self) -> Key {
        Key::Condvar((&raw const self.address).addr())
    }

    /// Wakes one thread that waits. Returns whether there was one.
    pub fn notify_one(&self) -> bool {
        match World::current() {
            Some(world) => world.wake_one(self.key()),
            None => self.inner.notify_one(),
        }
    }

    /// Wakes all threads that wait, and returns their number.
    pub fn notify_all(&self) -> usize {
        match World::current() {
            Some(world) => world.wake_all(self.key()),
            None => self.inner.notify_all(),
        }
    }

    /// Releases the lock, waits for a notification and takes the lock again.
    #[track_caller]
    pub fn wait<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>) {
        match World::current() {
            Some(world) => {
                self.wait_in(&world, guard, None, Location::caller());
            }
            None => self.inner.wait(guard.inner.as_mut().expect("the guard has the lock")),
        }
    }

    /// Like [`Condvar::wait`], at most for `timeout`.
    #[track_caller]
    pub fn wait_for<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) -> WaitTimeoutResult {
        match World::current() {
            Some(world) => {
                let until = world.after(timeout);
                self.wait_in(&world, guard, Some(until), Location::caller())
            }
            None => {
                let inner = guard.inner.as_mut().expect("the guard has the lock");
                WaitTimeoutResult(self.inner.wait_for(inner, timeout).timed_out())
            }
        }
    }

    /// Like [`Condvar::wait`], at most until `until`.
    #[track_caller]
    pub fn wait_until<T: ?Sized>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> WaitTimeoutResult {
        match World::current() {
            Some(world) => {
                self.wait_in(&world, guard, Some(until.as_world_nanos(&world)), Location::caller())
            }
            None => self.wait_for(guard, until.as_real_wait()),
        }
    }

    fn wait_in<T: ?Sized>(
        &self,
        world: &World,
        guard: &mut MutexGuard<'_, T>,
        until: Option<u64>,
        at: &'static Location<'static>,
    ) -> WaitTimeoutResult {
        // No other fiber runs between the release and the wait.
        guard.release();
        let notified = world.wait(Some(self.key()), until, "a condition variable", None, at);
        guard.inner = guard.mutex.lock_in(world, None, at);
        WaitTimeoutResult(!notified)
    }
}

impl Default for Condvar {
    fn default() -> Condvar {
        Condvar::new()
    }
}

impl fmt::Debug for Condvar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Condvar")
    }
}

/// Returns a duration in nanoseconds, at most 584 years.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
