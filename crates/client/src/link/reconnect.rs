//! [`Reconnect`]: time of the next attempt to connect.
//!
//! Until then, calls fail at once with the error of the last attempt: for a cache, a fast miss is better than a late
//! hit. A connection counts as a success when it has delivered a reply. One that breaks before counts as a failure, so
//! that a master that closes connections is not called in a loop.

use std::time::Duration;

use moontide_rt::Backoff;
use moontide_rt::time::Instant;

use super::error::LinkError;

/// Pauses between attempts. The longest one is a second: a restarted master is found within it.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(1));

#[derive(Debug)]
pub(super) struct Reconnect {
    backoff: Backoff,
    /// Last failure, and the end of its pause.
    failure: Option<(Instant, LinkError)>,
}

impl Default for Reconnect {
    fn default() -> Reconnect {
        Reconnect { backoff: BACKOFF, failure: None }
    }
}

impl Reconnect {
    /// Fails with the last error while the pause lasts.
    pub(super) fn check(&self, now: Instant) -> Result<(), LinkError> {
        match &self.failure {
            Some((until, error)) if now < *until => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Records that an attempt failed, or that the connection broke before it delivered a reply.
    pub(super) fn failed(&mut self, now: Instant, error: LinkError) {
        self.failure = Some((now + self.backoff.step(), error));
    }

    /// Records that the connection delivered a reply.
    pub(super) fn succeeded(&mut self) {
        *self = Reconnect::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconnect_backoff_doubles_to_limit_and_resets_on_success() {
        let (mut reconnect, mut now) = (Reconnect::default(), Instant::now());
        let error = LinkError::Lost { address: "here".into() };
        for pause_ms in [10, 20, 40, 80, 160, 320, 640, 1000, 1000] {
            assert!(reconnect.check(now).is_ok());
            reconnect.failed(now, error.clone());
            now += Duration::from_millis(pause_ms - 1);
            assert!(reconnect.check(now).is_err(), "still in the pause of {pause_ms} ms");
            now += Duration::from_millis(1);
        }
        reconnect.failed(now, error);
        reconnect.succeeded();
        assert!(reconnect.check(now).is_ok());
    }
}
