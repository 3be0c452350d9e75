//! Several batches at a time, on memory that the caller lends: [`run_together`] and [`run_hedged`].
//!
//! The counterpart of [`run`](crate::run) for more than one peer. Both return only when every batch has ended, so that
//! no thread touches the memory afterwards.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use crate::engine::{Link, OneGo, Pending, Waiting};
use crate::error::TransferError;
use crate::op::Op;

/// Operations at one peer.
#[derive(Debug)]
pub struct Batch<'a, 'm> {
    /// The peer.
    pub link: &'a dyn Link,
    /// What is asked of it.
    pub ops: Vec<Op<'m>>,
    /// How it ended as a whole; `None` before.
    pub result: Option<Result<(), TransferError>>,
}

impl<'a, 'm> Batch<'a, 'm> {
    /// These operations at this peer.
    pub fn new(link: &'a dyn Link, ops: Vec<Op<'m>>) -> Batch<'a, 'm> {
        Batch { link, ops, result: None }
    }

    /// # Safety
    /// As [`Link::start`]: what is returned ends before the batch's borrows do.
    unsafe fn start(&self, deadline: Instant, waiting: Waiting) -> Box<dyn Pending> {
        let cores = self.ops.iter().map(|op| op.core().clone()).collect();
        // SAFETY: says the caller.
        unsafe { self.link.start(cores, deadline, waiting) }
    }

    fn settle(&mut self, pending: &dyn Pending, result: Result<(), TransferError>) {
        for (op, outcome) in self.ops.iter_mut().zip(pending.outcomes()) {
            op.set_outcome(*outcome);
        }
        self.result = Some(result);
    }
}

/// Runs all batches at a time and waits for all of them. This thread does the last one's work; the engines' threads do
/// that of the others.
pub fn run_together(batches: &mut [Batch<'_, '_>], deadline: Instant) {
    let last = batches.len().saturating_sub(1);
    let mut pending: Vec<Box<dyn Pending>> = Vec::with_capacity(batches.len());
    for (index, batch) in batches.iter().enumerate() {
        let waiting = if index == last { Waiting::Here } else { Waiting::Elsewhere };
        // SAFETY: the batches borrow their memory for this call, and `pending` ends, by waiting or by its drop, before
        // it returns.
        pending.push(unsafe { batch.start(deadline, waiting) });
    }
    // Those that this thread drives first, or nobody would.
    for (batch, mut pending) in batches.iter_mut().zip(pending).rev() {
        let result = pending.wait();
        batch.settle(&*pending, result);
    }
}

/// Which of two batches was first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Winner {
    /// The first one; a second one, if there was one, was given up.
    First,
    /// The second one; the first was given up.
    Second,
}

/// Runs a batch. If it has not ended at `impatient`, `second` may name another one, usually the same bytes at another
/// peer into other memory; then the first of which every operation ends well is waited for, and the other one is given up.
///
/// The winner's operations have outcomes. If both failed the answer is the first.
pub fn run_hedged<'a, 'm>(
    first: &mut Batch<'_, '_>,
    impatient: Instant,
    second: impl FnOnce() -> Option<Batch<'a, 'm>>,
    deadline: Instant,
) -> (Winner, Option<Batch<'a, 'm>>) {
    // SAFETY: as in `run_together`.
    let mut ours = unsafe { first.start(deadline, Waiting::Elsewhere) };
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    if let Some(result) = poll_until(&mut *ours, &waker, impatient.min(deadline)) {
        first.settle(&*ours, result);
        return (Winner::First, None);
    }
    let Some(mut other) = second() else {
        let result = ours.wait();
        first.settle(&*ours, result);
        return (Winner::First, None);
    };
    // SAFETY: as in `run_together`; `other` outlives `theirs`, which is declared after it.
    let mut theirs = unsafe { other.start(deadline, Waiting::Elsewhere) };
    let mut context = Context::from_waker(&waker);
    let mut failed = None;
    loop {
        if failed.is_none() {
            match ours.poll(&mut context) {
                Poll::Ready(Ok(())) => {
                    theirs.abort();
                    first.settle(&*ours, Ok(()));
                    return (Winner::First, None);
                }
                Poll::Ready(Err(error)) => failed = Some(error),
                Poll::Pending => {}
            }
        }
        match theirs.poll(&mut context) {
            Poll::Ready(Ok(())) if theirs.outcomes().iter().all(|outcome| *outcome == Some(Ok(()))) => {
                ours.abort();
                first.settle(&*ours, Err(failed.unwrap_or(TransferError::Aborted)));
                other.settle(&*theirs, Ok(()));
                drop(theirs);
                return (Winner::Second, Some(other));
            }
            Poll::Ready(ended) => {
                // It failed, or was refused. The first may still make it, or has said why not.
                let result = match failed {
                    Some(failed) => Err(failed),
                    None => ours.wait(),
                };
                first.settle(&*ours, result);
                other.settle(&*theirs, ended);
                drop(theirs);
                return (Winner::First, Some(other));
            }
            Poll::Pending => std::thread::park_timeout(std::time::Duration::from_millis(50)),
        }
    }
}

/// Opens slots, fills and publishes them in one go, if the link can; see [`Link::put_in_one_go`].
pub fn put_in_one_go(
    link: &dyn Link,
    begin: Vec<u8>,
    ops: &mut [Op<'_>],
    mut commit: impl FnMut(&[Option<u64>]) -> Vec<u8>,
    deadline: Instant,
) -> OneGo {
    let cores = ops.iter().map(|op| op.core().clone()).collect();
    // SAFETY: `ops` borrows the memory exclusively for this call, which ends when all use of it has ended.
    unsafe { link.put_in_one_go(begin, cores, &mut commit, deadline) }
}

/// Wakes a thread that parks.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls until the time; `None` if it has not ended by then.
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
