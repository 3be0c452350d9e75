//! Pipelined puts of small records: Begin, Write and Commit follow each other on one connection, and the caller waits
//! for all three replies together. A put then takes one round trip at its node instead of three.
//!
//! The owner handles the requests of a connection in order, so a Write finds its slot begun, and a Commit its bytes
//! written. The Commit carries the digest root, which is known once the bytes have been sent, because they are digested
//! while they are sent.

use moontide_proto::FrameKind;
use moontide_rt::sync::Arc;
use moontide_rt::time::Instant;

use crate::engine::PipelinedPut;
use crate::engine_kind::EngineKind;
use crate::error::TransferError;
use crate::framing::plan;
use crate::op::OpCore;
use crate::tcp::connection::{Connection, code_at};
use crate::tcp::connection_set::ConnectionSet;
use crate::tcp::request::{Request, RequestError};

/// Most bytes of a pipelined put. Above this, round trips matter less than several connections.
const BYTES_MAX: u64 = 2 << 20;

/// Requests on one connection, in order. Dropping it aborts unfinished ones.
struct PipelineGuard {
    connection: Arc<Connection>,
    load: u64,
    requests: Vec<Arc<Request>>,
}

impl PipelineGuard {
    fn send(&mut self, request: Arc<Request>) {
        self.requests.push(Arc::clone(&request));
        self.connection.submit(&request);
    }
}

impl Drop for PipelineGuard {
    fn drop(&mut self) {
        // A request is unfinished only after a panic.
        for request in &self.requests {
            self.connection.abort(request);
        }
        self.connection.drop_load(self.load);
    }
}

/// Implements [`Link::put_pipelined`](crate::Link::put_pipelined).
///
/// # Safety
/// As [`Link::start`](crate::Link::start), until this function returns.
pub(super) unsafe fn put_pipelined(
    shared: &Arc<ConnectionSet>,
    begin: Vec<u8>,
    ops: Vec<OpCore>,
    commit: &mut dyn FnMut(&[Option<u64>]) -> Vec<u8>,
    deadline: Instant,
) -> PipelinedPut {
    let bytes: u64 = ops.iter().map(OpCore::len).sum();
    if bytes > BYTES_MAX || Request::check_call(FrameKind::Begin, &begin).is_err() {
        return PipelinedPut::NotTried;
    }
    let started = Instant::now();
    let connection = match shared.assign(&[bytes], deadline) {
        Ok(connections) => Arc::clone(&connections[0]),
        Err(error) => return PipelinedPut::Failed(error),
    };
    let frames = plan(&ops, 1);
    let ops: Arc<[OpCore]> = ops.into();
    let mut pipeline =
        PipelineGuard { connection, load: bytes, requests: Vec::with_capacity(frames.len() + 2) };
    // One packet instead of three, where they fit: each packet would wake the owner.
    pipeline.send(Request::call(FrameKind::Begin, begin, deadline).with_more());
    for frame in &frames {
        pipeline.send(Request::transfer(&ops, frame.clone(), deadline).with_more());
    }
    // SAFETY: every sent operation was digested on this thread, which has finished with it. Where sending failed, the
    // digests are the initial values of their array; the root is then wrong, and the Commit fails as well.
    let roots: Vec<Option<u64>> = ops.iter().map(|op| unsafe { op.root() }).collect();
    let commit = commit(&roots);
    let committed = Request::check_call(FrameKind::Commit, &commit);
    if committed.is_ok() {
        pipeline.send(Request::call(FrameKind::Commit, commit, deadline));
    }
    // The last one first: its reply arrives last, and this thread receives the others before it.
    for request in pipeline.requests.iter().rev() {
        pipeline.connection.wait(request);
    }
    let node = shared.node;
    let failed = |error: RequestError| match error {
        RequestError::Refused(code) => TransferError::Refused { code },
        RequestError::Failed(last) => TransferError::ConnectionLost { node, last },
        RequestError::Deadline => TransferError::Deadline { waited: started.elapsed() },
        RequestError::Aborted => TransferError::Aborted,
    };
    let mut results = pipeline
        .requests
        .iter()
        .map(|request| request.take_result().expect("the request was waited for").map_err(failed));
    let begun = results.next().expect("Begin was sent");
    let mut outcomes = vec![Ok(()); ops.len()];
    let mut lost = None;
    for (frame, result) in frames.iter().zip(results.by_ref()) {
        match result {
            Ok(codes) => {
                for (index, part) in frame.parts.iter().enumerate() {
                    if let Some(code) = code_at(&codes, index) {
                        outcomes[part.op] = Err(code);
                    }
                }
            }
            Err(error) => lost = Some(error),
        }
    }
    let committed = match (committed, results.next()) {
        (Ok(()), Some(result)) => result,
        (Err(error), _) => Err(error),
        (Ok(()), None) => unreachable!("Commit was sent"),
    };
    for (op, outcome) in ops.iter().zip(&outcomes) {
        let outcome = lost.as_ref().map_or(*outcome, |error| Err(error.code()));
        shared.metrics.op(EngineKind::Tcp, op.direction(), op.len(), outcome);
    }
    match (begun, lost, committed) {
        (Ok(begun), None, Ok(committed)) => PipelinedPut::Done { begun, outcomes, committed },
        (Err(error), ..) | (_, Some(error), _) | (.., Err(error)) => PipelinedPut::Failed(error),
    }
}
