//! Time as `meta` sees it: an argument, and a coarse form of it that fits into a record.
//!
//! Invariant: a promise stored as a [`Tick`] ends no earlier than it was made to.

use std::time::Duration;

use moontide_types::{MonoTime, UnixMillis};

/// The time of a command, read once by whoever sends it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Decides leases, deadlines and waiting times.
    pub mono: MonoTime,
    /// Decides when objects with a time to live expire, because that outlives a boot.
    pub unix: UnixMillis,
}

/// Nanoseconds of one tick, 16 ms: 32 bits of them last 2.2 years, and nobody notices 16 ms of a lease.
const TICK_NANOS: u64 = 16_000_000;

/// Ticks since a group was created. Saturates: after 2.2 years of one term there would be no more leases, and a master
/// must have been restarted before that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tick(pub(crate) u32);

/// Turns times into ticks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticker {
    start: MonoTime,
}

impl Ticker {
    pub(crate) fn new(start: MonoTime) -> Ticker {
        Ticker { start }
    }

    /// The last tick that has begun.
    pub(crate) fn now(&self, now: MonoTime) -> Tick {
        Tick(saturate(now.since(self.start).as_nanos() as u64 / TICK_NANOS))
    }

    /// The first tick at which `after` has passed since `now`: never too early.
    pub(crate) fn end(&self, now: MonoTime, after: Duration) -> Tick {
        Tick(saturate(now.after(after).since(self.start).as_nanos().div_ceil(TICK_NANOS.into()) as u64))
    }

    /// How long until the tick.
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
    fn promises_end_late_never_early() {
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
