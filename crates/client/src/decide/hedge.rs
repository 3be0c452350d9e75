//! When a second replica is asked beside a slow first one: [`HedgeTimer`].
//!
//! It keeps, per class of size, an estimate of the time that 95 of 100 reads stay below, by a step up for each read
//! above and a small step down for each below (a quantile tracker without a sample). A read that takes twice as long
//! is probably not going to be quick.

use std::time::Duration;

/// Classes of size: up to 64 KiB, 512 KiB, 4 MiB, and above.
const SIZE_CLASSES: usize = 4;

/// Never earlier than this: a thread that was not scheduled for a moment is no slow replica.
const EARLIEST: Duration = Duration::from_millis(2);
/// Never later: beyond that a person would notice.
const LATEST: Duration = Duration::from_millis(500);
/// Before anything was measured.
const AT_FIRST: Duration = Duration::from_millis(50);

/// How many of 100 reads the estimate leaves above.
const ABOVE_PERCENT: f64 = 5.0;

/// Estimates by size.
#[derive(Clone, Debug)]
pub struct HedgeTimer {
    /// Nanoseconds; 0 before the first read.
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

    /// A read of so many bytes took so long.
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

    /// How long to wait for the first replica of a read of so many bytes.
    pub fn patience(&self, len: u64) -> Duration {
        let high = self.high[Self::class(len)];
        if high == 0.0 {
            return AT_FIRST;
        }
        Duration::from_nanos((2.0 * high) as u64).clamp(EARLIEST, LATEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_settles_near_the_high_end_of_what_is_usual() {
        let mut timer = HedgeTimer::default();
        assert_eq!(timer.patience(1000), AT_FIRST);
        // 90 % take 3 ms, the others 10 ms: the high end is 10 ms.
        for read in 0..20_000u64 {
            timer.observe(1000, Duration::from_millis(if read % 10 == 0 { 10 } else { 3 }));
        }
        let patience = timer.patience(1000);
        assert!((Duration::from_millis(15)..=Duration::from_millis(21)).contains(&patience), "{patience:?}");
        // Of another size nothing is known.
        assert_eq!(timer.patience(10 << 20), AT_FIRST);
        // A few reads that hang do not make it patient.
        for _ in 0..3 {
            timer.observe(1000, Duration::from_secs(5));
        }
        assert!(timer.patience(1000) < Duration::from_millis(60), "{:?}", timer.patience(1000));
    }

    #[test]
    fn patience_has_bounds() {
        let mut timer = HedgeTimer::default();
        timer.observe(10, Duration::from_micros(20));
        assert_eq!(timer.patience(10), EARLIEST);
        timer.observe(1 << 30, Duration::from_secs(20));
        assert_eq!(timer.patience(1 << 30), LATEST);
    }
}
