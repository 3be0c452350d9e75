//! Concurrent batches on memory that the caller borrows out: [`run_batches`], [`run_batches_unless_late`] and
//! [`run_hedged`].
//!
//! The counterpart of [`run`](crate::run) for more than one peer. The functions return only after every batch has
//! ended, so no thread accesses the memory afterwards.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use moontide_rt::time::Instant;

use crate::engine::{Link, Pending, PipelinedPut, WaitMode};
use crate::error::TransferError;
use crate::op::Op;

/// Operations at one peer, with their result.
#[derive(Debug)]
pub struct Batch<'a, 'm> {
    /// Link to the peer that runs the operations.
    pub link: &'a dyn Link,
    /// Operations of this batch, in the order of their outcomes.
    pub ops: Vec<Op<'m>>,
    /// Result of the whole batch; `None` before it ends.
    pub result: Option<Result<(), TransferError>>,
}

impl<'a, 'm> Batch<'a, 'm> {
    /// Creates a batch of `ops` at the peer of `link`.
    pub fn new(link: &'a dyn Link, ops: Vec<Op<'m>>) -> Batch<'a, 'm> {
        Batch { link, ops, result: None }
    }

    /// # Safety
    /// As [`Link::start`]: the returned value ends before the borrows of the batch do.
    unsafe fn start(&self, deadline: Instant, wait_mode: WaitMode) -> Box<dyn Pending> {
        let cores = self.ops.iter().map(|op| op.core().clone()).collect();
        // SAFETY: the caller upholds the contract of `Link::start`.
        unsafe { self.link.start(cores, deadline, wait_mode) }
    }

    fn settle(&mut self, pending: &dyn Pending, result: Result<(), TransferError>) {
        for (op, outcome) in self.ops.iter_mut().zip(pending.outcomes()) {
            op.set_outcome(*outcome);
        }
        self.result = Some(result);
    }
}

/// Runs all batches concurrently and waits for all of them. The calling thread does the work of the last batch; threads
/// of the engines do the work of the others.
pub fn run_batches(batches: &mut [Batch<'_, '_>], deadline: Instant) {
    let last = batches.len().saturating_sub(1);
    let mut pending: Vec<Box<dyn Pending>> = Vec::with_capacity(batches.len());
    for (index, batch) in batches.iter().enumerate() {
        let wait_mode = if index == last { WaitMode::Blocking } else { WaitMode::Polling };
        // SAFETY: the batches borrow their memory for this call, and `pending` ends, by waiting or by its drop, before
        // this call returns.
        pending.push(unsafe { batch.start(deadline, wait_mode) });
    }
    // The last batch first: only this thread drives it.
    for (batch, mut pending) in batches.iter_mut().zip(pending).rev() {
        let result = pending.wait();
        batch.settle(&*pending, result);
    }
}

/// A healthy peer is faster than this, also on a busy network.
const SLOW_BYTES_PER_S: f64 = 50e6;

/// As [`run_batches`], but aborts batches that are late, if the caller can read elsewhere: `has_alternative` has one
/// entry per batch. A batch is late when the first batch has succeeded and it needs more than twice the time of that one,
/// for as many bytes, and `grace`; or when half of the time until the deadline is over, unless it is so large that a
/// healthy peer may need longer.
pub fn run_batches_unless_late(
    batches: &mut [Batch<'_, '_>],
    has_alternative: &[bool],
    grace: Duration,
    deadline: Instant,
) {
    let started = Instant::now();
    let half = deadline.saturating_duration_since(started) / 2;
    let bytes_of = |batch: &Batch<'_, '_>| batch.ops.iter().map(|op| op.core().len()).sum::<u64>();
    let bytes: Vec<u64> = batches.iter().map(bytes_of).collect();
    let late_at = |bytes: u64| {
        let is_large = bytes as f64 / half.as_secs_f64().max(1e-3) > SLOW_BYTES_PER_S;
        if is_large { deadline } else { started + half }
    };
    let mut late_at: Vec<Instant> = bytes.iter().map(|&bytes| late_at(bytes)).collect();
    // SAFETY: as in `run_batches`.
    let start = |batch: &Batch<'_, '_>| Some(unsafe { batch.start(deadline, WaitMode::Polling) });
    let mut pending: Vec<Option<Box<dyn Pending>>> = batches.iter().map(start).collect();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        for (index, (batch, slot)) in batches.iter_mut().zip(&mut pending).enumerate() {
            let Some(running) = slot else { continue };
            if let Poll::Ready(result) = running.poll(&mut context) {
                if result.is_ok() {
                    let took = started.elapsed();
                    for (late_at, &other) in late_at.iter_mut().zip(&bytes) {
                        let times = (other as f64 / bytes[index].max(1) as f64).max(1.0);
                        let late = started + 2 * took.mul_f64(times.min(1e6)) + grace;
                        *late_at = late.min(*late_at);
                    }
                }
                batch.settle(&**running, result);
                *slot = None;
            }
        }
        let now = Instant::now();
        if now >= deadline {
            // What still runs is not late but out of time, and says so itself.
            break;
        }
        let mut next: Option<Instant> = None;
        for (index, (batch, slot)) in batches.iter_mut().zip(&mut pending).enumerate() {
            let Some(running) = slot.as_mut().filter(|_| has_alternative[index]) else { continue };
            if late_at[index] > now {
                next = Some(next.map_or(late_at[index], |next| next.min(late_at[index])));
                continue;
            }
            running.abort();
            batch.settle(&**running, Err(TransferError::Aborted));
            *slot = None;
        }
        let Some(next) = next else { break };
        std::thread::park_timeout(next.saturating_duration_since(now));
    }
    for (batch, running) in batches.iter_mut().zip(pending) {
        let Some(mut running) = running else { continue };
        let result = running.wait();
        batch.settle(&*running, result);
    }
}

/// The batch of [`run_hedged`] that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Winner {
    /// The first batch. A second one, if started, was aborted or failed.
    First,
    /// The second batch. The first one was aborted or failed.
    Second,
}

/// Runs a batch, with a second one as a hedge.
///
/// If the first batch has not ended at `hedge_at`, `second` may return another one, usually the same bytes at another
/// peer into other memory. The first batch wins as soon as it ends without error, the second as soon as all its
/// operations succeed; the other one is aborted.
///
/// The operations of the winner have outcomes. If both batches fail, the winner is the first.
pub fn run_hedged<'a, 'm>(
    first: &mut Batch<'_, '_>,
    hedge_at: Instant,
    second: impl FnOnce() -> Option<Batch<'a, 'm>>,
    deadline: Instant,
) -> (Winner, Option<Batch<'a, 'm>>) {
    // SAFETY: as in `run_batches`.
    let mut first_pending = unsafe { first.start(deadline, WaitMode::Polling) };
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    if let Some(result) = poll_until(&mut *first_pending, &waker, hedge_at.min(deadline)) {
        first.settle(&*first_pending, result);
        return (Winner::First, None);
    }
    let Some(mut other) = second() else {
        let result = first_pending.wait();
        first.settle(&*first_pending, result);
        return (Winner::First, None);
    };
    // SAFETY: as in `run_batches`; `other` outlives `second_pending`, which is declared after it.
    let mut second_pending = unsafe { other.start(deadline, WaitMode::Polling) };
    let mut context = Context::from_waker(&waker);
    let mut failed = None;
    loop {
        if failed.is_none() {
            match first_pending.poll(&mut context) {
                Poll::Ready(Ok(())) => {
                    second_pending.abort();
                    first.settle(&*first_pending, Ok(()));
                    return (Winner::First, None);
                }
                Poll::Ready(Err(error)) => failed = Some(error),
                Poll::Pending => {}
            }
        }
        match second_pending.poll(&mut context) {
            Poll::Ready(Ok(()))
                if second_pending.outcomes().iter().all(|outcome| *outcome == Some(Ok(()))) =>
            {
                first_pending.abort();
                first.settle(&*first_pending, Err(failed.unwrap_or(TransferError::Aborted)));
                other.settle(&*second_pending, Ok(()));
                drop(second_pending);
                return (Winner::Second, Some(other));
            }
            Poll::Ready(ended) => {
                // The second batch failed or was refused. The first may still succeed; if it failed, its error counts.
                let result = match failed {
                    Some(failed) => Err(failed),
                    None => first_pending.wait(),
                };
                first.settle(&*first_pending, result);
                other.settle(&*second_pending, ended);
                drop(second_pending);
                return (Winner::First, Some(other));
            }
            Poll::Pending => std::thread::park_timeout(std::time::Duration::from_millis(50)),
        }
    }
}

/// Opens, fills and publishes slots without waiting in between, if the link can; see [`Link::put_pipelined`].
pub fn put_in_one_round_trip(
    link: &dyn Link,
    begin: Vec<u8>,
    ops: &mut [Op<'_>],
    mut commit: impl FnMut(&[Option<u64>]) -> Vec<u8>,
    deadline: Instant,
) -> PipelinedPut {
    let cores = ops.iter().map(|op| op.core().clone()).collect();
    // SAFETY: `ops` borrows the memory exclusively for this call, and the call returns only after all use of it has
    // ended.
    unsafe { link.put_pipelined(begin, cores, &mut commit, deadline) }
}

/// Waker that unparks a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls until `until`. Returns `None` if `pending` has not ended by then.
fn poll_until(pending: &mut dyn Pending, waker: &Waker, until: Instant) -> Option<Result<(), TransferError>> {
    let mut context = Context::from_waker(waker);
    loop {
        if let Poll::Ready(result) = pending.poll(&mut context) {
            return Some(result);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
    }
}
