//! [`Backoff`]: when a link may try to connect again.
//!
//! A call that comes in the meantime fails at once with what the last attempt said: a cache that is away is a miss
//! now, not in a second. A connection counts as a success when something was answered on it; one that breaks
//! before is one more failure, so that a master that hangs up on us is not called in a loop.

use std::time::{Duration, Instant};

use super::error::LinkError;

/// The pause after the first failure; doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// The longest pause: a master that comes back is found within a second.
const PAUSE_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Backoff {
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Failure {
    pause: Duration,
    until: Instant,
    error: LinkError,
}

impl Backoff {
    /// Whether to try now; otherwise why not.
    pub(super) fn check(&self, now: Instant) -> Result<(), LinkError> {
        match &self.failure {
            Some(failure) if now < failure.until => Err(failure.error.clone()),
            _ => Ok(()),
        }
    }

    /// An attempt failed, or the connection broke before anything was answered on it.
    pub(super) fn failed(&mut self, now: Instant, error: LinkError) {
        let last = self.failure.as_ref().map(|failure| failure.pause);
        let pause = last.map_or(PAUSE_MIN, |last| (2 * last).min(PAUSE_MAX));
        self.failure = Some(Failure { pause, until: now + pause, error });
    }

    /// Something was answered.
    pub(super) fn succeeded(&mut self) {
        self.failure = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound_and_end_with_an_answer() {
        let (mut backoff, mut now) = (Backoff::default(), Instant::now());
        let error = LinkError::Lost { address: "here".into() };
        for pause_ms in [10, 20, 40, 80, 160, 320, 640, 1000, 1000] {
            assert!(backoff.check(now).is_ok());
            backoff.failed(now, error.clone());
            now += Duration::from_millis(pause_ms - 1);
            assert!(backoff.check(now).is_err(), "still in the pause of {pause_ms} ms");
            now += Duration::from_millis(1);
        }
        backoff.failed(now, error);
        backoff.succeeded();
        assert!(backoff.check(now).is_ok());
    }
}
