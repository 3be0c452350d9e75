//! Whether and when something is tried again: [`Budget`], [`Backoff`] and [`judge`].
//!
//! Retries and hedges help when one replica is slow or gone, and make matters worse when everything is. So they draw
//! from a budget that first attempts fill: at most a tenth of the traffic is repeated, after a few for free.

use std::time::Duration;

use moontide_types::ErrorCode;

/// Tokens that a first attempt adds, in hundredths.
const EARNED_CENTS: u64 = 10;
/// Most tokens, in hundredths: what a process may repeat after a quiet time.
const CENTS_MAX: u64 = 20_00;

/// How much may be repeated.
#[derive(Clone, Debug)]
pub struct Budget {
    cents: u64,
}

impl Default for Budget {
    fn default() -> Budget {
        Budget { cents: CENTS_MAX }
    }
}

impl Budget {
    /// Something was tried for the first time.
    pub fn earn(&mut self) {
        self.cents = (self.cents + EARNED_CENTS).min(CENTS_MAX);
    }

    /// Whether something may be tried once more.
    #[must_use]
    pub fn spend(&mut self) -> bool {
        let left = self.cents.checked_sub(100);
        self.cents = left.unwrap_or(self.cents);
        left.is_some()
    }
}

/// Pauses between attempts, which grow.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    attempts: u32,
}

impl Backoff {
    /// First pause.
    const FIRST: Duration = Duration::from_millis(2);
    /// Longest pause.
    const LONGEST: Duration = Duration::from_millis(200);

    /// The next pause: at least what the peer asked for, and a random part so that callers do not come back together.
    pub fn pause(&mut self, asked: Duration, draw: u64) -> Duration {
        let full = (Self::FIRST * (1 << self.attempts.min(10))).min(Self::LONGEST);
        self.attempts += 1;
        let jitter = full.mul_f64((draw % 1024) as f64 / 1024.0);
        asked.max(full / 2) + jitter / 2
    }
}

/// What a code from a node means for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The place is not right any more: ask the master.
    Stale,
    /// Another replica may do better, or the same one later.
    Elsewhere,
    /// Nothing helps.
    Final,
}

/// What to do after a read failed with this code.
pub fn judge(code: ErrorCode) -> Verdict {
    use ErrorCode::*;
    match code {
        _ if moontide_types::planted("stale-place-kept") => Verdict::Elsewhere,
        NotFound | Gone | StaleEpoch | StaleGeneration | StaleTerm | LeaseExpired => Verdict::Stale,
        InvalidArgument | TooLarge | Unauthenticated | PermissionDenied => Verdict::Final,
        _ => Verdict::Elsewhere,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_may_be_repeated() {
        let mut budget = Budget::default();
        while budget.spend() {}
        let mut repeated = 0;
        for _ in 0..1000 {
            budget.earn();
            repeated += usize::from(budget.spend());
        }
        assert_eq!(repeated, 100);
    }

    #[test]
    fn a_quiet_time_is_not_saved_up_for_ever() {
        let mut budget = Budget::default();
        (0..100_000).for_each(|_| budget.earn());
        assert_eq!((0..1000).filter(|_| budget.spend()).count(), 20);
    }

    #[test]
    fn pauses_grow_and_honour_what_was_asked() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..12).map(|draw| backoff.pause(Duration::ZERO, draw * 77)).collect();
        assert!(pauses[0] <= Duration::from_millis(2));
        assert!(pauses.iter().all(|pause| *pause <= Duration::from_millis(200)));
        assert!(pauses[11] >= Duration::from_millis(100));
        assert!(Backoff::default().pause(Duration::from_millis(20), 0) >= Duration::from_millis(20));
    }

    #[test]
    fn every_code_has_a_verdict_and_corruption_goes_elsewhere() {
        assert_eq!(judge(ErrorCode::Corrupt), Verdict::Elsewhere);
        assert_eq!(judge(ErrorCode::Gone), Verdict::Stale);
        assert_eq!(judge(ErrorCode::PermissionDenied), Verdict::Final);
        assert_eq!(judge(ErrorCode::Busy), Verdict::Elsewhere);
    }
}
