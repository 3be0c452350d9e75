//! [`Backoff`]: growing pauses between attempts.
//!
//! A value without clock, randomness or waiting: the caller passes a random number, and waits by its own means. So the
//! pauses of a simulated process follow from its seed.

use std::time::Duration;

/// Pauses between attempts. The step doubles with each failure, from `first` to at most `longest`.
///
/// Invariants: a pause is between half a step and a step, unless the caller requests a longer one; a step is never
/// shorter than the one before, until [`Backoff::reset`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    /// Creates a backoff without failures.
    pub const fn new(first: Duration, longest: Duration) -> Backoff {
        Backoff { first, longest, failures: 0 }
    }

    /// Returns the number of failures since the last reset.
    pub const fn failures(&self) -> u32 {
        self.failures
    }

    /// Counts a failure. Returns the step: a pause without jitter.
    pub fn step(&mut self) -> Duration {
        let doublings = self.failures.min(31); // the most that a `u32` holds
        self.failures = self.failures.saturating_add(1);
        self.first.saturating_mul(1 << doublings).min(self.longest)
    }

    /// Counts a failure. Returns the pause: half the step, or `requested` if the peer asked for more, plus up to half
    /// the step chosen by `random`, so that callers that failed together do not retry together.
    pub fn pause(&mut self, requested: Duration, random: u64) -> Duration {
        let step = self.step();
        let half = step / 2;
        // The bias of the remainder is negligible: a pause of ten minutes is less than 2⁴⁰ ns.
        let jitter_max = u64::try_from((step - half).as_nanos()).unwrap_or(u64::MAX - 1);
        requested.max(half).saturating_add(Duration::from_nanos(random % (jitter_max + 1)))
    }

    /// Forgets the failures, after a success: the next step is the first one.
    pub const fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SplitMix64;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn step_doubles_to_limit_and_resets() {
        let mut backoff = Backoff::new(ms(10), ms(1000));
        for (failures, step_ms) in (0..).zip([10, 20, 40, 80, 160, 320, 640, 1000, 1000]) {
            assert_eq!((backoff.failures(), backoff.step()), (failures, ms(step_ms)));
        }
        backoff.reset();
        assert_eq!((backoff.failures(), backoff.step()), (0, ms(10)));
    }

    #[test]
    fn pause_is_half_a_step_plus_jitter() {
        let steps_ms = [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000];
        let (mut shortest, mut longest) =
            (Backoff::new(ms(100), ms(10_000)), Backoff::new(ms(100), ms(10_000)));
        for half in steps_ms.map(|step_ms| ms(step_ms) / 2) {
            let (half_nanos, mut wraps) = (half.as_nanos() as u64, shortest);
            assert_eq!(wraps.pause(Duration::ZERO, half_nanos + 1), half);
            assert_eq!(shortest.pause(Duration::ZERO, 0), half);
            assert_eq!(longest.pause(Duration::ZERO, half_nanos), half * 2);
        }
    }

    #[test]
    fn pauses_of_different_seeds_differ() {
        let pauses = |seed| {
            let (mut backoff, mut random) = (Backoff::new(ms(50), ms(1000)), SplitMix64::new(seed));
            [(); 8].map(|()| backoff.pause(Duration::ZERO, random.next_u64()))
        };
        assert_eq!(pauses(3), pauses(3));
        assert_ne!(pauses(3), pauses(4), "callers do not retry in step");
    }

    #[test]
    fn requested_delay_is_honoured_with_jitter() {
        let pause = |requested, random| Backoff::new(ms(2), ms(200)).pause(requested, random);
        assert_eq!(pause(ms(20), 0), ms(20));
        assert_eq!(pause(ms(20), 1_000_000), ms(21));
        assert_eq!(pause(Duration::from_micros(1), 0), ms(1));
    }

    /// Any calls with any parameters, against steps computed one by one.
    #[test]
    fn backoff_matches_model() {
        let mut random = SplitMix64::new(5);
        for _ in 0..2_000 {
            let mut draw = |bits: u64| Duration::from_nanos(random.next_u64() >> (63 - random.below(bits)));
            let (first, longest) = (draw(63), draw(63));
            let mut backoff = Backoff::new(first, longest);
            let (mut step, mut failures) = (first.min(longest), 0);
            for _ in 0..50 {
                let (requested, number) = (Duration::from_nanos(random.next_u64() >> 20), random.next_u64());
                match random.below(10) {
                    0 => {
                        backoff.reset();
                        (step, failures) = (first.min(longest), 0);
                        continue;
                    }
                    1..4 => assert_eq!(backoff.step(), step),
                    choice => {
                        let requested = if choice < 7 { Duration::ZERO } else { requested };
                        let pause = backoff.pause(requested, number);
                        let shortest = requested.max(step / 2);
                        assert!(pause >= shortest && pause <= shortest + (step - step / 2), "{backoff:?}");
                    }
                }
                failures += 1;
                assert_eq!(backoff.failures(), failures);
                // After 31 doublings the step stays.
                step = if failures <= 31 { step.saturating_mul(2).min(longest) } else { step };
            }
        }
    }

    #[test]
    fn extreme_parameters_do_not_panic() {
        let mut backoff = Backoff::new(Duration::MAX, Duration::MAX);
        assert_eq!(backoff.pause(Duration::MAX, u64::MAX), Duration::MAX);
        backoff.failures = u32::MAX;
        assert_eq!((backoff.step(), backoff.failures()), (Duration::MAX, u32::MAX));
        assert_eq!(Backoff::new(Duration::ZERO, Duration::ZERO).pause(Duration::ZERO, 7), Duration::ZERO);
    }
}
