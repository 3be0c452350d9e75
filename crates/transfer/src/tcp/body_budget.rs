//! [`BodyBudget`]: memory for the bodies of requests, shared by all connections of a server.
//!
//! A body arrives before anything in it can be checked, and a peer decides how fast it sends. Small bodies
//! ([`SMALL_BODY_BYTES`]), which all reads and writes have, need no permit: each connection keeps a buffer of that size. A
//! larger body waits until the budget has room for it.

use moontide_proto::limits::OPS_PER_FRAME_MAX;
use moontide_proto::{FixedRecord as _, TransferOp};
use moontide_rt::sync::{Condvar, Mutex, lock, wait};
use moontide_rt::time::Instant;

/// Longest body without a permit: the longest list of operations, 80 KiB. The Begin of some two hundred objects with short
/// keys is as long.
pub(crate) const SMALL_BODY_BYTES: usize = OPS_PER_FRAME_MAX * TransferOp::BYTES;

/// Free bytes, and who waits for them.
#[derive(Debug)]
pub(crate) struct BodyBudget {
    free: Mutex<u64>,
    freed: Condvar,
}

/// Right to hold a large body. Dropping it returns the bytes.
#[derive(Debug)]
pub(crate) struct BodyPermit<'a> {
    budget: &'a BodyBudget,
    bytes: u64,
}

impl BodyBudget {
    pub(crate) fn new(bytes: u64) -> BodyBudget {
        BodyBudget { free: Mutex::new(bytes), freed: Condvar::default() }
    }

    /// Takes a permit for `bytes`; waits for it until `end`. `None`: other bodies hold the budget.
    pub(crate) fn acquire(&self, bytes: u64, end: Instant) -> Option<BodyPermit<'_>> {
        let mut free = lock(&self.free);
        while *free < bytes {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            free = wait(&self.freed, free, left).0;
        }
        *free -= bytes;
        Some(BodyPermit { budget: self, bytes })
    }
}

impl Drop for BodyPermit<'_> {
    fn drop(&mut self) {
        *lock(&self.budget.free) += self.bytes;
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn permit_waits_until_budget_has_room() {
        let budget = BodyBudget::new(100);
        let in_ms = |ms| Instant::now() + Duration::from_millis(ms);
        let first = budget.acquire(60, in_ms(0)).expect("all is free");
        let second = budget.acquire(40, in_ms(0)).expect("40 bytes are free");
        assert!(budget.acquire(1, in_ms(20)).is_none(), "nothing is free");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| budget.acquire(50, in_ms(30_000)).is_some());
            std::thread::sleep(Duration::from_millis(20));
            drop(second);
            drop(first);
            assert!(waiting.join().expect("no panic"), "the bytes were returned");
        });
        assert!(budget.acquire(100, in_ms(0)).is_some(), "a dropped permit has returned its bytes");
        assert!(budget.acquire(101, in_ms(0)).is_none(), "more than the budget");
    }
}
