//! [`SimRng`]: random numbers derived from the seed.

use std::time::Duration;

use moontide_rt::SplitMix64;

/// Random numbers of one part of the world.
#[derive(Clone, Debug)]
pub(crate) struct SimRng(SplitMix64);

impl SimRng {
    pub(crate) fn new(seed: u64) -> SimRng {
        SimRng(SplitMix64::new(seed))
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0.index(n as usize) as u64
    }

    /// From `least` to `most`, both included.
    pub(crate) fn within(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// One of several.
    pub(crate) fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.0.index(choices.len())]
    }

    /// Whether something happens that happens so many times out of a thousand.
    pub(crate) fn permille(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1000) < u64::from(permille)
    }

    /// A time up to this one.
    pub(crate) fn up_to(&mut self, longest: Duration) -> Duration {
        Duration::from_nanos(self.below(longest.as_nanos() as u64 + 1))
    }
}
