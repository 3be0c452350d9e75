//! [`PosixQueue`]: runs operations one after the other with `pread`, `pwrite` and `fdatasync`. Works everywhere.
//!
//! Invariant: at most one operation is in progress, regardless of the depth of the queue.

use std::os::unix::fs::FileExt;

use super::op::{OpProgress, OsOp};
use crate::storage::{Completion, Op, OpKind, OpSource, Queue};

/// Name of the engine in logs and metrics.
pub(crate) const NAME: &str = "posix";

/// Runs operations one after the other.
#[derive(Debug)]
pub(crate) struct PosixQueue;

impl Queue for PosixQueue {
    fn engine(&self) -> &'static str {
        NAME
    }

    fn run<'a>(&mut self, source: &mut dyn OpSource<'a>) {
        while let Some(op) = source.next() {
            source.done(perform(op));
        }
    }
}

fn perform(op: Op<'_>) -> Completion<'_> {
    let mut op = match OsOp::begin(op) {
        Ok(op) => op,
        Err(done) => return done,
    };
    loop {
        let offset = op.offset();
        let result = match op.kind() {
            OpKind::Read => {
                let (file, rest) = op.rest_mut();
                file.file.read_at(rest, offset)
            }
            OpKind::Write => op.file().file.write_at(op.rest(), offset),
            OpKind::Sync => op.file().file.sync_data().map(|()| 0),
        };
        if let OpProgress::Ended(result) = op.advance(result) {
            return op.end(result);
        }
    }
}
