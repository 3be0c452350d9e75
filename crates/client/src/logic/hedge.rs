//! [`HedgeTimer`]: delay before a second replica is read because the first is slow.
//!
//! It estimates the 95th percentile of read times per size class, with a large step up for each read above the estimate
//! and a small step down for each read below (a quantile tracker without samples). A read that takes twice that long is
//! unlikely to finish soon.

use std::time::Duration;

/// Size classes: up to 64 KiB, 512 KiB, 4 MiB, and above.
const SIZE_CLASSES: usize = 4;

/// Shortest delay: a thread that is not scheduled for a moment is not a slow replica.
const EARLIEST: Duration = Duration::from_millis(2);
/// Longest delay: more would be noticeable to users.
const LATEST: Duration = Duration::from_millis(500);
/// Delay before the first measurement.
const INITIAL_DELAY: Duration = Duration::from_millis(50);

/// Percentage of reads above the estimate.
const ABOVE_PERCENT: f64 = 5.0;

/// Estimates of read times by size class.
#[derive(Clone, Debug)]
pub struct HedgeTimer {
    /// Estimated 95th percentile in nanoseconds; 0 before the first read.
    high: [f64; SIZE_CLASSES],
}

impl Default for HedgeTimer {
    fn default() -> HedgeTimer {
        HedgeTimer { high: [0.0; SIZE_CLASSES] }
    }
}

impl HedgeTimer {
    fn class(len: u64) -> usize {
        match len {
            0..=65_536 => 0,
            65_537..=524_288 => 1,
            524_289..=4_194_304 => 2,
            _ => 3,
        }
    }

    /// Records that a read of `len` bytes took `took`.
    pub fn observe(&mut self, len: u64, took: Duration) {
        let high = &mut self.high[Self::class(len)];
        let took = took.as_nanos() as f64;
        if *high == 0.0 {
            *high = took;
            return;
        }
        // In the long run the steps up and down cancel out where ABOVE_PERCENT of reads are above.
        let step = *high * 0.02;
        if took > *high {
            *high = (*high + step * (100.0 - ABOVE_PERCENT) / ABOVE_PERCENT).min(took);
        } else {
            *high = (*high - step).max(took.min(*high));
        }
    }

    /// Returns the delay before a hedge for a read of `len` bytes.
    pub fn delay(&self, len: u64) -> Duration {
        let high = self.high[Self::class(len)];
        if high == 0.0 {
            return INITIAL_DELAY;
        }
        Duration::from_nanos((2.0 * high) as u64).clamp(EARLIEST, LATEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hedge_delay_tracks_high_percentile_of_latency() {
        let mut timer = HedgeTimer::default();
        assert_eq!(timer.delay(1000), INITIAL_DELAY);
        // 90 % take 3 ms, the others 10 ms: the high end is 10 ms.
        for read in 0..20_000u64 {
            timer.observe(1000, Duration::from_millis(if read % 10 == 0 { 10 } else { 3 }));
        }
        let delay = timer.delay(1000);
        assert!((Duration::from_millis(15)..=Duration::from_millis(21)).contains(&delay), "{delay:?}");
        // Other size classes have no measurement.
        assert_eq!(timer.delay(10 << 20), INITIAL_DELAY);
        // A few reads that hang do not raise the delay much.
        for _ in 0..3 {
            timer.observe(1000, Duration::from_secs(5));
        }
        assert!(timer.delay(1000) < Duration::from_millis(60), "{:?}", timer.delay(1000));
    }

    #[test]
    fn hedge_delay_is_clamped() {
        let mut timer = HedgeTimer::default();
        timer.observe(10, Duration::from_micros(20));
        assert_eq!(timer.delay(10), EARLIEST);
        timer.observe(1 << 30, Duration::from_secs(20));
        assert_eq!(timer.delay(1 << 30), LATEST);
    }
}
