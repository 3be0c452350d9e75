//! Clocks and points in time. Logic takes a [`MonoTime`] argument; only I/O code reads a [`Clock`].
//!
//! [`MonoTime`] counts nanoseconds of CLOCK_MONOTONIC, which all processes of one host share, so a process can
//! compare the heartbeat of another process with its own clock. It has no meaning on another host.

use std::time::Duration;

use moontide_rt::time;

/// A point on this host's monotonic clock, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonoTime(pub u64);

impl MonoTime {
    /// Returns the time since `earlier`; zero if `earlier` is later than this point.
    pub fn since(self, earlier: MonoTime) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns this point plus `duration`, saturating: a deadline 584 years away never passes.
    pub fn after(self, duration: Duration) -> MonoTime {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        MonoTime(self.0.saturating_add(nanos))
    }
}

/// Milliseconds since 1970, for times that outlive a boot, such as the expiry of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixMillis(pub u64);

/// Source of time.
pub trait Clock: Send + Sync {
    /// Returns the monotonic time of this host.
    fn now(&self) -> MonoTime;
    /// Returns calendar time, which may jump.
    fn unix(&self) -> UnixMillis;
}

/// Clock of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// Returns monotonic time with an error of a few milliseconds, in a quarter of the time of `now`. Precise
    /// enough for the comparison with a heartbeat, which local reads make several times per microsecond.
    #[inline]
    pub fn now_coarse(&self) -> MonoTime {
        MonoTime(time::coarse_monotonic_nanos())
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> MonoTime {
        MonoTime(time::monotonic_nanos())
    }

    fn unix(&self) -> UnixMillis {
        // A clock set before 1970 reads as 1970; objects with a TTL then live longer.
        UnixMillis(time::unix_millis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_clock_is_monotonic_and_plausible() {
        let clock = SystemClock;
        let (before, after) = (clock.now(), clock.now());
        assert!(after >= before && before.0 > 0);
        let coarse = clock.now_coarse();
        assert!(
            coarse.since(after) < Duration::from_secs(10) && after.since(coarse) < Duration::from_secs(10)
        );
        assert!(clock.unix() > UnixMillis(1_700_000_000_000), "system clock is before 2023");
    }

    #[test]
    fn mono_time_saturates() {
        assert_eq!(MonoTime(250_000_000).since(MonoTime(0)), Duration::from_millis(250));
        assert_eq!(MonoTime(0).since(MonoTime(250_000_000)), Duration::ZERO);
        assert_eq!(MonoTime(5).after(Duration::MAX), MonoTime(u64::MAX));
    }
}
