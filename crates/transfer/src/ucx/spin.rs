//! [`AdaptiveSpin`]: how long the progress thread polls for events before it sleeps.
//!
//! Invariant: a spin without an event takes at most [`AdaptiveSpin::MAX`].

use std::time::Duration;

use moontide_rt::time::Instant;

/// Adaptive time limit for polling before a sleep.
///
/// A sleep costs two system calls and a wake-up, 5–20 µs, which is as long as a whole small transfer takes. Spinning
/// occupies a core, which on a small machine is the core that the peer or the caller needs. So a spin never exceeds
/// [`AdaptiveSpin::MAX`], and shrinks to [`AdaptiveSpin::MIN`] while spins find no event.
pub(super) struct AdaptiveSpin {
    budget: Duration,
    since: Option<Instant>,
}

impl AdaptiveSpin {
    const MIN: Duration = Duration::from_micros(1);
    const MAX: Duration = Duration::from_micros(40);

    /// Records an event. If it happened during a spin, the limit grows.
    pub(super) fn worked(&mut self) {
        if self.since.take().is_some() {
            self.budget = (self.budget * 2).min(Self::MAX);
        }
    }

    /// Records a poll without an event. Returns whether it is time to sleep.
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

impl Default for AdaptiveSpin {
    fn default() -> Self {
        Self { budget: Self::MAX, since: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_polls_shrink_spin_budget_and_work_grows_it() {
        let mut spin = AdaptiveSpin::default();
        let mut now = Instant::now();
        for _ in 0..20 {
            assert!(!spin.idle(now), "a spin takes some time");
            now += AdaptiveSpin::MAX;
            assert!(spin.idle(now), "no spin is longer than the maximum");
        }
        assert_eq!(spin.budget, AdaptiveSpin::MIN);
        for _ in 0..20 {
            assert!(!spin.idle(now));
            spin.worked();
        }
        assert_eq!(spin.budget, AdaptiveSpin::MAX);
    }
}
