//! [`Transfer`]: operations on memory that they own, as a future.
//!
//! Buffers go in by value and come back with the result. A transfer that is dropped is aborted; one that is leaked
//! leaks its memory, which is safe.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use moontide_types::ErrorCode;
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::DigestContext;

use crate::engine::{Link, Pending, Waiting};
use crate::error::TransferError;
use crate::op::{Op, OpError, Target};

/// One operation on memory that it owns.
pub struct OwnedOp {
    op: Op<'static>,
    buffer: Vec<u8>,
    digests: Vec<u64>,
}

/// An operation that has run.
#[derive(Debug)]
pub struct DoneOp {
    /// Its memory.
    pub buffer: Vec<u8>,
    /// The digests of its pages, if they were asked for and the operation went well.
    pub digests: Vec<u64>,
    /// What became of it.
    pub outcome: Result<(), ErrorCode>,
}

impl std::fmt::Debug for OwnedOp {
    /// Does not look at the memory, which others may be filling.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnedOp")
            .field("op", &self.op)
            .field("bytes", &self.buffer.len())
            .finish_non_exhaustive()
    }
}

impl OwnedOp {
    /// From the peer into a buffer, which is filled.
    pub fn get(from: Target, offset: u64, mut into: Vec<u8>) -> OwnedOp {
        // SAFETY: the vector's memory does not move with it, nobody else reaches it, and it lives as long as the
        // operation: both are in one struct, whose drop ends the transfer first.
        let memory = unsafe { std::slice::from_raw_parts_mut(into.as_mut_ptr(), into.len()) };
        OwnedOp { op: Op::get(from, offset, memory), buffer: into, digests: Vec::new() }
    }

    /// From a buffer to the peer.
    pub fn put(to: Target, offset: u64, from: Vec<u8>) -> OwnedOp {
        // SAFETY: as above; it is not written.
        let memory = unsafe { std::slice::from_raw_parts(from.as_ptr(), from.len()) };
        OwnedOp { op: Op::put(to, offset, memory), buffer: from, digests: Vec::new() }
    }

    /// Digests the pages on the way.
    pub fn digested(mut self, context: DigestContext) -> Result<OwnedOp, OpError> {
        self.digests = vec![0; self.buffer.len().div_ceil(PAGE_BYTES as usize)];
        // SAFETY: as above.
        let places = unsafe { std::slice::from_raw_parts_mut(self.digests.as_mut_ptr(), self.digests.len()) };
        self.op = self.op.digested(context, places)?;
        Ok(self)
    }
}

/// Operations under way.
#[derive(Debug)]
#[must_use = "a transfer that is dropped is aborted"]
pub struct Transfer {
    /// First, so that it is dropped, and thereby aborted, before the memory.
    pending: Box<dyn Pending>,
    ops: Vec<OwnedOp>,
}

impl Transfer {
    /// Starts operations. They go on by themselves.
    pub fn start(link: &dyn Link, ops: Vec<OwnedOp>, deadline: Instant) -> Transfer {
        let cores = ops.iter().map(|owned| owned.op.core().clone()).collect();
        // SAFETY: the memory is in `ops`, which nobody touches before `pending` has ended.
        let pending = unsafe { link.start(cores, deadline, Waiting::Elsewhere) };
        Transfer { pending, ops }
    }

    /// Gives it up. When this returns no thread touches the memory any more.
    pub fn abort(&mut self) {
        self.pending.abort();
    }

    /// Waits on this thread.
    pub fn wait(mut self) -> Result<Vec<DoneOp>, TransferError> {
        self.pending.wait()?;
        Ok(self.done())
    }

    /// Gives it up, if it is not done, and takes the memory back.
    pub fn into_buffers(mut self) -> Vec<Vec<u8>> {
        self.pending.abort();
        std::mem::take(&mut self.ops).into_iter().map(|op| op.buffer).collect()
    }

    fn done(&mut self) -> Vec<DoneOp> {
        let outcomes = self.pending.outcomes().iter().copied();
        let ops = std::mem::take(&mut self.ops).into_iter().zip(outcomes);
        ops.map(|(op, outcome)| DoneOp {
            buffer: op.buffer,
            digests: op.digests,
            outcome: outcome.unwrap_or(Err(ErrorCode::Internal)),
        })
        .collect()
    }
}

impl Future for Transfer {
    type Output = Result<Vec<DoneOp>, TransferError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.pending.poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) => Poll::Ready(Ok(self.done())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
        }
    }
}
