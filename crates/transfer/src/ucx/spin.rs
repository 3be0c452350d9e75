//! How long the progress thread looks for events before it sleeps.
//!
//! Invariant: a look without a find lasts [`Spin::MAX`] at most.

use std::time::{Duration, Instant};

/// Decides how long to look for events before sleeping.
///
/// A sleep costs two system calls and a wake-up, 5–20 µs, which is as long as a whole small transfer takes. Looking
/// costs a core, which on a small machine is the core that the peer or the caller needs. So a look never exceeds
/// [`Spin::MAX`], and shrinks to [`Spin::MIN`] when looks keep finding nothing.
pub(super) struct Spin {
    budget: Duration,
    since: Option<Instant>,
}

impl Spin {
    const MIN: Duration = Duration::from_micros(1);
    const MAX: Duration = Duration::from_micros(40);

    /// Something happened; if it did during a look, looking pays.
    pub(super) fn worked(&mut self) {
        if self.since.take().is_some() {
            self.budget = (self.budget * 2).min(Self::MAX);
        }
    }

    /// Whether it is time to sleep.
    pub(super) fn idle(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) < self.budget {
            return false;
        }
        self.since = None;
        self.budget = (self.budget / 2).max(Self::MIN);
        true
    }
}

impl Default for Spin {
    fn default() -> Self {
        Self { budget: Self::MAX, since: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_find_nothing_get_shorter_and_finds_make_them_longer() {
        let mut spin = Spin::default();
        let mut now = Instant::now();
        for _ in 0..20 {
            assert!(!spin.idle(now), "a look takes some time");
            now += Spin::MAX;
            assert!(spin.idle(now), "no look is longer than the maximum");
        }
        assert_eq!(spin.budget, Spin::MIN);
        for _ in 0..20 {
            assert!(!spin.idle(now));
            spin.worked();
        }
        assert_eq!(spin.budget, Spin::MAX);
    }
}
