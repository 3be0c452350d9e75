//! Clocks: each process has its own, with a drift and an offset.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moontide_rt::sim::ProcessClock;
use moontide_types::{Clock, MonoTime, UnixMillis};

/// Calendar time when a run begins.
const UNIX_BEGIN_MS: i64 = 1_700_000_000_000;

/// A host's clock, as a function of the world's time. Nodes have the clocks of their processes instead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostClock {
    /// Parts per million by which it runs fast; slow if below 0.
    drift_ppm: i64,
    offset_ns: u64,
    /// How far the calendar is off.
    wall_offset_ms: i64,
}

impl HostClock {
    pub(crate) fn new(drift_ppm: i64, offset_ns: u64) -> HostClock {
        HostClock { drift_ppm, offset_ns, wall_offset_ms: 0 }
    }

    /// Returns the clock of a process on the host.
    pub(crate) fn of_process(&self) -> ProcessClock {
        let HostClock { drift_ppm, offset_ns, wall_offset_ms: calendar_offset_ms } = *self;
        ProcessClock { drift_ppm, offset_ns, calendar_offset_ms }
    }

    /// Returns the host's monotonic time.
    pub(crate) fn mono(&self, now: MonoTime) -> MonoTime {
        let drift = i128::from(now.0) * i128::from(self.drift_ppm) / 1_000_000;
        MonoTime((i128::from(now.0) + drift) as u64 + self.offset_ns)
    }

    /// Returns the host's wall clock time.
    pub(crate) fn unix(&self, now: MonoTime) -> UnixMillis {
        UnixMillis((UNIX_BEGIN_MS + (now.0 / 1_000_000) as i64 + self.wall_offset_ms).max(0) as u64)
    }

    /// Returns the world time in which `local` passes on the host; never zero.
    pub(crate) fn span(&self, local: Duration) -> Duration {
        let nanos = local.as_nanos() as i128 * 1_000_000 / (1_000_000 + i128::from(self.drift_ppm));
        Duration::from_nanos(nanos as u64 + 1)
    }

    /// Changes the wall clock by `by_ms`.
    pub(crate) fn jump(&mut self, by_ms: i64) {
        self.wall_offset_ms += by_ms;
    }
}

/// A clock that shipped code can ask; the world sets it before anything happens there.
#[derive(Debug, Default)]
pub(crate) struct SimClock {
    mono: AtomicU64,
    unix: AtomicU64,
}

impl SimClock {
    pub(crate) fn set(&self, host: &HostClock, now: MonoTime) {
        // Relaxed: there is one thread.
        self.mono.store(host.mono(now).0, Ordering::Relaxed);
        self.unix.store(host.unix(now).0, Ordering::Relaxed);
    }
}

impl Clock for SimClock {
    fn now(&self) -> MonoTime {
        MonoTime(self.mono.load(Ordering::Relaxed))
    }

    fn unix(&self) -> UnixMillis {
        UnixMillis(self.unix.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_clock_sleeps_for_less_world_time() {
        let fast = HostClock::new(10_000, 500);
        assert_eq!(fast.mono(MonoTime(1_000_000)), MonoTime(1_010_500));
        let second = fast.span(Duration::from_secs(1));
        let shown = fast.mono(MonoTime(second.as_nanos() as u64)).since(fast.mono(MonoTime(0)));
        assert!(shown >= Duration::from_secs(1) && shown < Duration::from_millis(1001), "{shown:?}");
    }
}
