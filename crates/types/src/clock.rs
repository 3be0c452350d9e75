//! Time as an argument: decisions take a [`MonoTime`], only edges ask a [`Clock`].
//!
//! [`MonoTime`] counts nanoseconds of CLOCK_MONOTONIC, which all processes of one host share, so a beat
//! written by one process can be judged by another. It means nothing on another host.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// A point on this host's monotonic clock, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonoTime(pub u64);

impl MonoTime {
    /// How long ago `earlier` was; zero if it lies ahead.
    pub fn since(self, earlier: MonoTime) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This point plus `duration`, saturating: a deadline 584 years away is for ever.
    pub fn after(self, duration: Duration) -> MonoTime {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        MonoTime(self.0.saturating_add(nanos))
    }
}

/// Milliseconds since 1970, for what outlives a boot: when an object expires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixMillis(pub u64);

/// Where time comes from.
pub trait Clock: Send + Sync {
    /// Monotonic time of this host.
    fn now(&self) -> MonoTime;
    /// Calendar time, which may jump.
    fn unix(&self) -> UnixMillis;
}

/// The machine's own clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// Monotonic time to within a few milliseconds, for a quarter of the price: good enough to compare with a
    /// heartbeat, many times a microsecond.
    #[inline]
    pub fn now_coarse(&self) -> MonoTime {
        mono(ClockId::MonotonicCoarse)
    }
}

#[inline]
fn mono(clock: ClockId) -> MonoTime {
    let time = clock_gettime(clock);
    MonoTime(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

impl Clock for SystemClock {
    fn now(&self) -> MonoTime {
        mono(ClockId::Monotonic)
    }

    fn unix(&self) -> UnixMillis {
        // A clock set before 1970 reads as 1970; everything with a TTL then simply lives longer.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        UnixMillis(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}

/// A clock that moves only when told to, for tests and simulation.
#[derive(Debug, Default)]
pub struct ManualClock {
    nanos: AtomicU64,
    /// Calendar time at monotonic zero.
    unix_base_ms: u64,
}

impl ManualClock {
    /// Starts at monotonic zero, with the calendar at `unix_base`.
    pub fn new(unix_base: UnixMillis) -> ManualClock {
        ManualClock { nanos: AtomicU64::new(0), unix_base_ms: unix_base.0 }
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        // Relaxed: the clock orders nothing but itself.
        self.nanos.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> MonoTime {
        MonoTime(self.nanos.load(Ordering::Relaxed))
    }

    fn unix(&self) -> UnixMillis {
        UnixMillis(self.unix_base_ms + self.now().0 / 1_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_moves_forward() {
        let clock = SystemClock;
        let (before, after) = (clock.now(), clock.now());
        assert!(after >= before && before.0 > 0);
        let coarse = clock.now_coarse();
        assert!(
            coarse.since(after) < Duration::from_secs(10) && after.since(coarse) < Duration::from_secs(10)
        );
        assert!(clock.unix() > UnixMillis(1_700_000_000_000), "the calendar says it is before 2023");
    }

    #[test]
    fn a_manual_clock_moves_when_told() {
        let clock = ManualClock::new(UnixMillis(1_000));
        clock.advance(Duration::from_millis(250));
        assert_eq!(clock.now(), MonoTime(250_000_000));
        assert_eq!(clock.unix(), UnixMillis(1_250));
        assert_eq!(clock.now().since(MonoTime(0)), Duration::from_millis(250));
        assert_eq!(MonoTime(0).since(clock.now()), Duration::ZERO);
        assert_eq!(MonoTime(5).after(Duration::MAX), MonoTime(u64::MAX));
    }
}
