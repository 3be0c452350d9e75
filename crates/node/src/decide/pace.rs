//! When: how often the node beats, how long it waits before it tries again, and when it stops trusting itself.

use std::time::Duration;

use moontide_types::MonoTime;

/// Longest time between two heartbeats: how late a master hears what was read.
const BEAT_MAX: Duration = Duration::from_secs(1);

/// The first wait before another attempt, and the longest.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// How often reclaim is tried for slots that somebody waits for: a reader holds one for about so long.
const RECLAIM_SOON: Duration = Duration::from_millis(2);
/// The same, for slots that have been held for long.
const RECLAIM_LATER: Duration = Duration::from_millis(20);
/// For how long after the last progress the first pace is kept.
const RECLAIM_PATIENCE: Duration = Duration::from_secs(1);
/// How often anyway: dead writers.
const RECLAIM_ANYWAY: Duration = Duration::from_millis(100);

/// Time between two heartbeats of a session: three may be lost before it ends.
pub fn beat_interval(ttl: Duration) -> Duration {
    (ttl / 4).min(BEAT_MAX)
}

/// When reclaim is tried next. `progress`: when something was freed, or a slot was added, the last time.
pub fn reclaim_interval(something_drains: bool, progress: MonoTime, now: MonoTime) -> Duration {
    match something_drains {
        false => RECLAIM_ANYWAY,
        true if now.since(progress) < RECLAIM_PATIENCE => RECLAIM_SOON,
        true => RECLAIM_LATER,
    }
}

/// Whether processes of this host may use the index. `good`: when the master last knew of everything in it.
pub fn index_open(good: Option<MonoTime>, now: MonoTime, stale_max: Duration) -> bool {
    good.is_some_and(|good| now.since(good) < stale_max || moontide_types::planted("stale-index-open"))
}

/// Waits before attempts: doubling, and spread so that a thousand nodes do not come back in step.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    random: u64,
}

impl Backoff {
    pub fn new(seed: u64) -> Backoff {
        Backoff { next: BACKOFF_MIN, random: seed }
    }

    /// How long to wait now: between half and all of the current step.
    pub fn wait(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(BACKOFF_MAX);
        // SplitMix64: any sequence that differs between nodes will do.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^= z >> 27;
        let half = step / 2;
        half + half * (z as u32 % 1024) / 1024
    }

    /// It worked.
    pub fn reset(&mut self) {
        self.next = BACKOFF_MIN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn three_beats_may_be_lost() {
        let cases = [(10_000, 1000), (4000, 1000), (2000, 500), (100, 25)];
        for (ttl, beat) in cases {
            assert_eq!(beat_interval(Duration::from_millis(ttl)), Duration::from_millis(beat));
        }
    }

    #[test]
    fn waits_double_up_to_a_second_and_start_over() {
        let mut backoff = Backoff::new(3);
        for step in [50, 100, 200, 400, 800, 1000, 1000] {
            let wait = backoff.wait().as_millis();
            assert!((step / 2..=step).contains(&wait), "{wait} of {step}");
        }
        backoff.reset();
        assert!(backoff.wait() <= BACKOFF_MIN);
        let other: Vec<_> = std::iter::repeat_with({
            let mut backoff = Backoff::new(4);
            move || backoff.wait()
        })
        .take(8)
        .collect();
        let mut same = Backoff::new(3);
        assert_ne!(other, (0..8).map(|_| same.wait()).collect::<Vec<_>>(), "nodes do not come in step");
    }

    #[test]
    fn reclaim_is_tried_often_while_somebody_waits() {
        let (now, then) = (MonoTime(5000 * MS), MonoTime(4500 * MS));
        assert_eq!(reclaim_interval(false, then, now), RECLAIM_ANYWAY);
        assert_eq!(reclaim_interval(true, then, now), RECLAIM_SOON);
        assert_eq!(reclaim_interval(true, MonoTime(0), now), RECLAIM_LATER);
    }

    #[test]
    fn the_index_is_open_while_the_master_knows_of_it() {
        let stale = Duration::from_nanos(30);
        for (good, now, open) in
            [(None, 5, false), (Some(0), 29, true), (Some(0), 30, false), (Some(10), 30, true)]
        {
            assert_eq!(index_open(good.map(MonoTime), MonoTime(now), stale), open, "{good:?} {now}");
        }
    }
}
