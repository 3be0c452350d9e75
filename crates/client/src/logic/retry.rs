//! Retries: [`Budget`], [`RETRY_BACKOFF`] and [`classify`].
//!
//! Retries and hedges help when one replica is slow or gone, and add load when everything is. So they spend a budget
//! that first attempts fill: at most a tenth of the requests are repeated, after a few free ones.

use std::time::Duration;

use moontide_rt::Backoff;
use moontide_types::ErrorCode;

/// Hundredths of a token that a first attempt adds.
const EARNED_CENTS: u64 = 10;
/// Most hundredths of tokens: the retries of a process after a quiet time.
const CENTS_MAX: u64 = 20_00;

/// Retry budget.
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
    /// Adds to the budget for a first attempt.
    pub fn earn(&mut self) {
        self.cents = (self.cents + EARNED_CENTS).min(CENTS_MAX);
    }

    /// Spends one retry. Returns `false` if the budget is empty.
    #[must_use]
    pub fn spend(&mut self) -> bool {
        let left = self.cents.checked_sub(100);
        self.cents = left.unwrap_or(self.cents);
        left.is_some()
    }
}

/// Pauses between attempts of a call.
pub const RETRY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(200));

/// Action after a failed read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// The location is stale: look it up at the master.
    Relookup,
    /// Try another replica, or the same one later.
    OtherReplica,
    /// Fail: no retry helps.
    Final,
}

/// Returns the action after a read failed with this code.
pub fn classify(code: ErrorCode) -> RetryDecision {
    use ErrorCode::*;
    match code {
        _ if moontide_rt::mutation_enabled("stale-place-kept") => RetryDecision::OtherReplica,
        NotFound | Gone | StaleEpoch | StaleGeneration | StaleTerm | LeaseExpired => RetryDecision::Relookup,
        // The capability of the location is too old for the node: the master has a new one.
        PermissionDenied => RetryDecision::Relookup,
        InvalidArgument | TooLarge | Unauthenticated => RetryDecision::Final,
        _ => RetryDecision::OtherReplica,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_budget_allows_one_retry_per_ten_requests() {
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
    fn unused_retry_budget_is_capped() {
        let mut budget = Budget::default();
        (0..100_000).for_each(|_| budget.earn());
        assert_eq!((0..1000).filter(|_| budget.spend()).count(), 20);
    }

    #[test]
    fn classify_sends_corrupt_to_other_replica_and_gone_to_relookup() {
        assert_eq!(classify(ErrorCode::Corrupt), RetryDecision::OtherReplica);
        assert_eq!(classify(ErrorCode::Gone), RetryDecision::Relookup);
        assert_eq!(classify(ErrorCode::PermissionDenied), RetryDecision::Relookup);
        assert_eq!(classify(ErrorCode::Unauthenticated), RetryDecision::Final);
        assert_eq!(classify(ErrorCode::Busy), RetryDecision::OtherReplica);
    }
}
