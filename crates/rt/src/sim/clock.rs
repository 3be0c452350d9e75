//! [`Instant`]: virtual time of the running process inside a world, the monotonic clock outside.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::panic::Location;
use std::sync::OnceLock;
use std::time::Duration;

use super::world::World;

/// What an [`Instant`] at time zero of a clock counts, so that code may subtract from it.
const START: Duration = Duration::from_secs(1_000_000);

/// A point in time, with the functions of [`std::time::Instant`]. Times of a world must not be compared with those of
/// another one, or of none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(Duration);

impl Instant {
    /// Returns the present time. In a world, this may switch to another thread.
    #[track_caller]
    pub fn now() -> Instant {
        static REAL_START: OnceLock<std::time::Instant> = OnceLock::new();
        let since_start = match World::current() {
            Some(world) => world.read_clock(Location::caller()),
            None => REAL_START.get_or_init(std::time::Instant::now).elapsed(),
        };
        Instant(START + since_start)
    }

    /// Returns the time since then, or zero if it is in the future.
    #[track_caller]
    pub fn elapsed(&self) -> Duration {
        Instant::now().saturating_duration_since(*self)
    }

    /// Returns the time since `earlier`, or zero if that is later.
    pub fn duration_since(&self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the time since `earlier`, or `None` if that is later.
    pub fn checked_duration_since(&self, earlier: Instant) -> Option<Duration> {
        self.0.checked_sub(earlier.0)
    }

    /// Returns the time since `earlier`, or zero if that is later.
    pub fn saturating_duration_since(&self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the time after `duration`, if it can be represented.
    pub fn checked_add(&self, duration: Duration) -> Option<Instant> {
        self.0.checked_add(duration).map(Instant)
    }

    /// Returns the time before `duration`, if it can be represented.
    pub fn checked_sub(&self, duration: Duration) -> Option<Instant> {
        self.0.checked_sub(duration).map(Instant)
    }

    /// Returns the world's time at which the clock of the running process shows this point, in nanoseconds.
    pub(super) fn as_world_nanos(self, world: &World) -> u64 {
        world.at(u64::try_from(self.0.saturating_sub(START).as_nanos()).unwrap_or(u64::MAX))
    }

    /// Returns how long to wait for this point outside a world.
    pub(super) fn as_real_wait(self) -> Duration {
        self.saturating_duration_since(Instant::now())
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, duration: Duration) -> Instant {
        self.checked_add(duration).expect("a time that can be represented")
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Sub<Duration> for Instant {
    type Output = Instant;

    fn sub(self, duration: Duration) -> Instant {
        self.checked_sub(duration).expect("a time that can be represented")
    }
}

impl SubAssign<Duration> for Instant {
    fn sub_assign(&mut self, duration: Duration) {
        *self = *self - duration;
    }
}

impl Sub<Instant> for Instant {
    type Output = Duration;

    fn sub(self, earlier: Instant) -> Duration {
        self.duration_since(earlier)
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instant({:?})", self.0)
    }
}
