//! Putting small records in one go: Begin, the bytes and Commit follow each other on one connection, and all three
//! answers are waited for together. A put then takes one round trip at its node instead of three.
//!
//! The owner answers the requests of a connection in their order, so a Write finds its slot begun, and a Commit its
//! bytes written. What the Commit says, the root, is known when the bytes have been sent, because they are digested on
//! the way.

use std::time::Instant;

use moontide_proto::FrameKind;

use crate::engine::{EngineKind, OneGo};
use crate::error::TransferError;
use crate::op::OpCore;
use crate::plan::plan;
use crate::sync::Arc;
use crate::tcp::connection::{Connection, code_at};
use crate::tcp::link::Shared;
use crate::tcp::request::{NoAnswer, Request};

/// Beyond this the round trips do not matter, and several connections do.
const BYTES_MAX: u64 = 2 << 20;

/// Requests on one connection, in order.
struct Train {
    connection: Arc<Connection>,
    load: u64,
    requests: Vec<Arc<Request>>,
}

impl Train {
    fn send(&mut self, request: Arc<Request>) {
        self.requests.push(Arc::clone(&request));
        self.connection.submit(&request);
    }
}

impl Drop for Train {
    fn drop(&mut self) {
        // Only after a panic is one of them not finished.
        for request in &self.requests {
            self.connection.abort(request);
        }
        self.connection.drop_load(self.load);
    }
}

/// # Safety
/// As [`Link::start`](crate::Link::start), until this returns.
pub(super) unsafe fn put_in_one_go(
    shared: &Arc<Shared>,
    begin: Vec<u8>,
    ops: Vec<OpCore>,
    commit: &mut dyn FnMut(&[Option<u64>]) -> Vec<u8>,
    deadline: Instant,
) -> OneGo {
    let bytes: u64 = ops.iter().map(OpCore::len).sum();
    if bytes > BYTES_MAX || Request::check_call(FrameKind::Begin, &begin).is_err() {
        return OneGo::NotTried;
    }
    let started = Instant::now();
    let connection = match shared.assign(&[bytes], deadline) {
        Ok(connections) => Arc::clone(&connections[0]),
        Err(error) => return OneGo::Failed(error),
    };
    let frames = plan(&ops, 1);
    let ops: Arc<[OpCore]> = ops.into();
    let mut train = Train { connection, load: bytes, requests: Vec::with_capacity(frames.len() + 2) };
    // One packet instead of three, where they fit: each would wake the owner by itself.
    train.send(Request::call(FrameKind::Begin, begin, deadline).followed());
    for frame in &frames {
        train.send(Request::transfer(&ops, frame.clone(), deadline).followed());
    }
    // SAFETY: whatever was sent was digested on this thread, which is done with it. Where sending failed the places hold
    // what they held before, and the Commit, which then says something wrong, fails as well.
    let roots: Vec<Option<u64>> = ops.iter().map(|op| unsafe { op.root() }).collect();
    let commit = commit(&roots);
    let committed = Request::check_call(FrameKind::Commit, &commit);
    if committed.is_ok() {
        train.send(Request::call(FrameKind::Commit, commit, deadline));
    }
    // The last one first: its answer comes last, and this thread receives the others on the way.
    for request in train.requests.iter().rev() {
        train.connection.wait(request);
    }
    let node = shared.node;
    let failed = |none: NoAnswer| match none {
        NoAnswer::Refused(code) => TransferError::Refused { code },
        NoAnswer::Failed(last) => TransferError::Lost { node, last },
        NoAnswer::Deadline => TransferError::Deadline { waited: started.elapsed() },
        NoAnswer::Aborted => TransferError::Aborted,
    };
    let mut answers = train
        .requests
        .iter()
        .map(|request| request.take_answer().expect("it was waited for").map_err(failed));
    let begun = answers.next().expect("Begin was sent");
    let mut outcomes = vec![Ok(()); ops.len()];
    let mut lost = None;
    for (frame, answer) in frames.iter().zip(answers.by_ref()) {
        match answer {
            Ok(codes) => {
                for (place, part) in frame.parts.iter().enumerate() {
                    if let Some(code) = code_at(&codes, place) {
                        outcomes[part.op] = Err(code);
                    }
                }
            }
            Err(error) => lost = Some(error),
        }
    }
    let committed = match (committed, answers.next()) {
        (Ok(()), Some(answer)) => answer,
        (Err(error), _) => Err(error),
        (Ok(()), None) => unreachable!("Commit was sent"),
    };
    for (op, outcome) in ops.iter().zip(&outcomes) {
        let outcome = lost.as_ref().map_or(*outcome, |error| Err(error.code()));
        shared.metrics.op(EngineKind::Tcp, op.direction(), op.len(), outcome);
    }
    match (begun, lost, committed) {
        (Ok(begun), None, Ok(committed)) => OneGo::Done { begun, outcomes, committed },
        (Err(error), ..) | (_, Some(error), _) | (.., Err(error)) => OneGo::Failed(error),
    }
}
