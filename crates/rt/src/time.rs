//! The clock of the process.
//!
//! In an ordinary build [`Instant`] is that of std. With `--cfg sim` it is a type of its own, whose [`Instant::now`] in a
//! simulated world returns the world's virtual time. The type differs from std's on purpose: code that still reads std's
//! clock does not compile together with code that reads this one.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

#[cfg(sim)]
pub use crate::sim::Instant;
#[cfg(not(sim))]
pub use std::time::Instant;

/// Returns the present time.
#[inline]
#[must_use]
pub fn now() -> Instant {
    Instant::now()
}

/// Returns nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
#[inline]
#[must_use]
#[cfg_attr(sim, track_caller)]
pub fn monotonic_nanos() -> u64 {
    #[cfg(sim)]
    if let Some((monotonic, _)) = crate::sim::clocks() {
        return monotonic;
    }
    nanos_of(ClockId::Monotonic)
}

/// Returns nanoseconds of the same clock with an error of a few milliseconds, in a quarter of the time.
#[inline]
#[must_use]
#[cfg_attr(sim, track_caller)]
pub fn coarse_monotonic_nanos() -> u64 {
    #[cfg(sim)]
    if let Some((monotonic, _)) = crate::sim::clocks() {
        return monotonic - monotonic % COARSE_TICK_NANOS;
    }
    nanos_of(ClockId::MonotonicCoarse)
}

/// Time between two changes of the coarse clock in a world.
#[cfg(sim)]
const COARSE_TICK_NANOS: u64 = 4_000_000;

#[inline]
fn nanos_of(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns milliseconds since 1970 by the calendar, which may jump. A clock set before 1970 reads as 1970.
#[must_use]
#[cfg_attr(sim, track_caller)]
pub fn unix_millis() -> u64 {
    #[cfg(sim)]
    if let Some((_, calendar)) = crate::sim::clocks() {
        return calendar;
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn instant_arithmetic_is_that_of_std() {
        let start = now();
        let later = start + Duration::from_millis(1500);
        assert_eq!(later - start, Duration::from_millis(1500));
        assert_eq!(later - Duration::from_millis(1500), start);
        assert_eq!(later.duration_since(start), Duration::from_millis(1500));
        // An earlier time is no negative duration.
        assert_eq!(start.duration_since(later), Duration::ZERO);
        assert_eq!(start.saturating_duration_since(later), Duration::ZERO);
        assert_eq!(start.checked_duration_since(later), None);
        assert_eq!(start.checked_add(Duration::MAX), None);
        assert_eq!(start.checked_sub(Duration::MAX), None);
        assert!(now() >= start && start.elapsed() < Duration::from_secs(3600));
    }
}
