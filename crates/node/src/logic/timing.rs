//! Intervals of heartbeats and reclaim, backoff between attempts, and the time of self-fencing.

use std::time::Duration;

use moontide_rt::Backoff;
use moontide_types::MonoTime;

/// Maximum time between two heartbeats: the delay until a master learns of accesses.
const HEARTBEAT_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// Interval of heartbeats during a flush: a stop without objects to write takes about as long.
pub(crate) const FLUSH_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(50);

/// Waits between attempts to reach a master, with jitter so that a thousand nodes do not retry in step.
pub(crate) const MASTER_BACKOFF: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));

/// Interval of reclaim attempts while commands wait for slots: about as long as a reader holds a slot.
const RECLAIM_INTERVAL_SHORT: Duration = Duration::from_millis(2);
/// Interval of reclaim attempts for slots that have been held for long.
const RECLAIM_INTERVAL_LONG: Duration = Duration::from_millis(20);
/// Time after the last progress for which reclaim keeps the short interval.
const RECLAIM_FAST_FOR: Duration = Duration::from_secs(1);
/// Interval of reclaim attempts when no slot drains: finds records of exited writers.
const RECLAIM_IDLE_INTERVAL: Duration = Duration::from_millis(100);

/// Returns the time between two heartbeats of a session: it survives the loss of three.
pub(crate) fn heartbeat_interval(ttl: Duration) -> Duration {
    (ttl / 4).min(HEARTBEAT_INTERVAL_MAX)
}

/// Returns the time until the next reclaim. `progress`: time at which a slot was last freed or added.
pub(crate) fn reclaim_interval(is_draining: bool, progress: MonoTime, now: MonoTime) -> Duration {
    match is_draining {
        false => RECLAIM_IDLE_INTERVAL,
        true if now.since(progress) < RECLAIM_FAST_FOR => RECLAIM_INTERVAL_SHORT,
        true => RECLAIM_INTERVAL_LONG,
    }
}

/// Whether local clients may use the index. `synced_at`: last time at which the masters were synced.
pub(crate) fn may_open_index(
    synced_at: Option<MonoTime>,
    now: MonoTime,
    self_fence_timeout: Duration,
) -> bool {
    synced_at.is_some_and(|at| {
        now.since(at) < self_fence_timeout || moontide_rt::mutation_enabled("stale-index-open")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn heartbeat_interval_is_quarter_of_ttl_capped_at_one_second() {
        let cases = [(10_000, 1000), (4000, 1000), (2000, 500), (100, 25)];
        for (ttl, interval) in cases {
            assert_eq!(heartbeat_interval(Duration::from_millis(ttl)), Duration::from_millis(interval));
        }
    }

    #[test]
    fn reclaim_is_frequent_while_draining_slots_make_progress() {
        let (now, then) = (MonoTime(5000 * MS), MonoTime(4500 * MS));
        assert_eq!(reclaim_interval(false, then, now), RECLAIM_IDLE_INTERVAL);
        assert_eq!(reclaim_interval(true, then, now), RECLAIM_INTERVAL_SHORT);
        assert_eq!(reclaim_interval(true, MonoTime(0), now), RECLAIM_INTERVAL_LONG);
    }

    #[test]
    fn index_is_open_only_within_self_fence_timeout() {
        let timeout = Duration::from_nanos(30);
        for (synced_at, now, open) in
            [(None, 5, false), (Some(0), 29, true), (Some(0), 30, false), (Some(10), 30, true)]
        {
            assert_eq!(
                may_open_index(synced_at.map(MonoTime), MonoTime(now), timeout),
                open,
                "{synced_at:?} {now}"
            );
        }
    }
}
