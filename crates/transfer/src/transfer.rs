//! [`Transfer`]: operations on memory that they own, as a future.
//!
//! Buffers are passed by value and returned with the result. Dropping a transfer aborts it. Leaking one leaks its
//! memory, which is safe.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use moontide_rt::time::Instant;
use moontide_types::ErrorCode;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::DigestContext;

use crate::engine::{Link, Pending, WaitMode};
use crate::error::TransferError;
use crate::op::{Op, OpError, Target};

/// Operation on memory that it owns.
pub struct OwnedOp {
    op: Op<'static>,
    buffer: Vec<u8>,
    digests: Vec<u64>,
}

/// Completed operation, with its memory.
#[derive(Debug)]
pub struct CompletedOp {
    /// The buffer that was passed to [`OwnedOp::get`] or [`OwnedOp::put`].
    pub buffer: Vec<u8>,
    /// Digests of the pages, if requested and the operation succeeded; otherwise unspecified.
    pub digests: Vec<u64>,
    /// Result of this operation.
    pub outcome: Result<(), ErrorCode>,
}

impl std::fmt::Debug for OwnedOp {
    /// Does not read the memory, which another thread may be filling.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnedOp")
            .field("op", &self.op)
            .field("bytes", &self.buffer.len())
            .finish_non_exhaustive()
    }
}

impl OwnedOp {
    /// Creates a get from the peer that fills `into`.
    pub fn get(from: Target, offset: u64, mut into: Vec<u8>) -> OwnedOp {
        // SAFETY: the vector's memory does not move with it, no other code reaches it, and it lives as long as the
        // operation: both are in one struct, whose drop ends the transfer first.
        let memory = unsafe { std::slice::from_raw_parts_mut(into.as_mut_ptr(), into.len()) };
        OwnedOp { op: Op::get(from, offset, memory), buffer: into, digests: Vec::new() }
    }

    /// Creates a put of `from` to the peer.
    pub fn put(to: Target, offset: u64, from: Vec<u8>) -> OwnedOp {
        // SAFETY: as above; the memory is not written.
        let memory = unsafe { std::slice::from_raw_parts(from.as_ptr(), from.len()) };
        OwnedOp { op: Op::put(to, offset, memory), buffer: from, digests: Vec::new() }
    }

    /// Requests digests of the pages, computed during the transfer.
    pub fn digested(mut self, context: DigestContext) -> Result<OwnedOp, OpError> {
        self.digests = vec![0; self.buffer.len().div_ceil(PAGE_BYTES as usize)];
        // SAFETY: as above.
        let digests =
            unsafe { std::slice::from_raw_parts_mut(self.digests.as_mut_ptr(), self.digests.len()) };
        self.op = self.op.digested(context, digests)?;
        Ok(self)
    }
}

/// Running operations, with their memory. A future of their results.
#[derive(Debug)]
#[must_use = "a transfer that is dropped is aborted"]
pub struct Transfer {
    /// First field, so that it is dropped, and thereby aborted, before the memory.
    pending: Box<dyn Pending>,
    ops: Vec<OwnedOp>,
}

impl Transfer {
    /// Starts operations. Threads of the engine run them.
    pub fn start(link: &dyn Link, ops: Vec<OwnedOp>, deadline: Instant) -> Transfer {
        let cores = ops.iter().map(|owned| owned.op.core().clone()).collect();
        // SAFETY: the memory is in `ops`, which no other code accesses before `pending` has ended.
        let pending = unsafe { link.start(cores, deadline, WaitMode::Polling) };
        Transfer { pending, ops }
    }

    /// Aborts the operations. After this returns, no thread accesses the memory.
    pub fn abort(&mut self) {
        self.pending.abort();
    }

    /// Blocks the calling thread until the operations end.
    pub fn wait(mut self) -> Result<Vec<CompletedOp>, TransferError> {
        self.pending.wait()?;
        Ok(self.done())
    }

    /// Aborts the operations if they are still running, and returns the buffers.
    pub fn into_buffers(mut self) -> Vec<Vec<u8>> {
        self.pending.abort();
        std::mem::take(&mut self.ops).into_iter().map(|op| op.buffer).collect()
    }

    fn done(&mut self) -> Vec<CompletedOp> {
        let outcomes = self.pending.outcomes().iter().copied();
        let ops = std::mem::take(&mut self.ops).into_iter().zip(outcomes);
        ops.map(|(op, outcome)| CompletedOp {
            buffer: op.buffer,
            digests: op.digests,
            outcome: outcome.unwrap_or(Err(ErrorCode::Internal)),
        })
        .collect()
    }
}

impl Future for Transfer {
    type Output = Result<Vec<CompletedOp>, TransferError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.pending.poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) => Poll::Ready(Ok(self.done())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
        }
    }
}
