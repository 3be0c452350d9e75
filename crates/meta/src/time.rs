//! Time in this crate: an argument of each command, and a coarse form that fits into a record.
//!
//! Invariant: a deadline stored as a [`Tick`] is never earlier than the exact one.

use std::time::Duration;

use moontide_types::{MonoTime, UnixMillis};

/// Time of a command, read once by its sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Clock for leases, deadlines and delays.
    pub mono: MonoTime,
    /// Clock for objects with a time to live, because that outlives a boot.
    pub unix: UnixMillis,
}

/// Nanoseconds per tick, 16 ms: 32 bits of ticks last 2.2 years, and 16 ms are negligible for a lease.
const TICK_NANOS: u64 = 16_000_000;

/// Ticks since a group was created. Saturates: after 2.2 years of one term there would be no more leases, so a master
/// must be restarted before that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tick(pub(crate) u32);

/// Converts times to ticks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticker {
    start: MonoTime,
}

impl Ticker {
    pub(crate) fn new(start: MonoTime) -> Ticker {
        Ticker { start }
    }

    /// Returns the last tick that has begun.
    pub(crate) fn now(&self, now: MonoTime) -> Tick {
        Tick(saturate(now.since(self.start).as_nanos() as u64 / TICK_NANOS))
    }

    /// Returns the first tick at which `after` has passed since `now`: never too early.
    pub(crate) fn end(&self, now: MonoTime, after: Duration) -> Tick {
        Tick(saturate(now.after(after).since(self.start).as_nanos().div_ceil(TICK_NANOS.into()) as u64))
    }

    /// Returns the time until the tick.
    pub(crate) fn left(&self, until: Tick, now: MonoTime) -> Duration {
        let at = self.start.after(Duration::from_nanos(u64::from(until.0) * TICK_NANOS));
        at.since(now)
    }
}

fn saturate(ticks: u64) -> u32 {
    u32::try_from(ticks).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tick_conversion_rounds_up() {
        let ticker = Ticker::new(MonoTime(5));
        for nanos in [5, 6, TICK_NANOS, TICK_NANOS + 4, TICK_NANOS + 5, 10 * TICK_NANOS] {
            let now = MonoTime(nanos);
            for ms in [0, 1, 15, 16, 17, 5_000] {
                let end = ticker.end(now, Duration::from_millis(ms));
                assert!(ticker.left(end, now) >= Duration::from_millis(ms));
                assert!(ticker.now(MonoTime(nanos + ms * 1_000_000)) <= end);
            }
        }
        assert_eq!(ticker.now(MonoTime(0)), Tick(0), "a clock before the start reads as the start");
        assert_eq!(ticker.end(MonoTime(u64::MAX), Duration::MAX), Tick(u32::MAX));
    }
}
