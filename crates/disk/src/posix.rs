//! [`PosixQueue`]: operations one after the other, by `pread`, `pwrite` and `fdatasync`. Works everywhere.
//!
//! Invariant: at most one operation is taken and not yet ended, whatever the depth of the queue.

use std::os::unix::fs::FileExt;

use crate::os::{Step, Transfer};
use crate::storage::{Done, Op, OpKind, Queue, Work};

/// The engine's name in logs and metrics.
pub(crate) const NAME: &str = "posix";

/// Runs operations one after the other.
#[derive(Debug)]
pub(crate) struct PosixQueue;

impl Queue for PosixQueue {
    fn engine(&self) -> &'static str {
        NAME
    }

    fn run<'a>(&mut self, work: &mut dyn Work<'a>) {
        while let Some(op) = work.next() {
            work.done(perform(op));
        }
    }
}

fn perform(op: Op<'_>) -> Done<'_> {
    let mut transfer = match Transfer::begin(op) {
        Ok(transfer) => transfer,
        Err(done) => return done,
    };
    loop {
        let offset = transfer.offset();
        let answer = match transfer.kind() {
            OpKind::Read => {
                let (file, rest) = transfer.rest_mut();
                file.file.read_at(rest, offset)
            }
            OpKind::Write => transfer.file().file.write_at(transfer.rest(), offset),
            OpKind::Sync => transfer.file().file.sync_data().map(|()| 0),
        };
        if let Step::Ended(result) = transfer.advance(answer) {
            return transfer.end(result);
        }
    }
}
