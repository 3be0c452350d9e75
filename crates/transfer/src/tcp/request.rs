//! [`Request`]: one request frame and its result.

use moontide_proto::{FixedRecord, FrameError, FrameHeader, FrameKind};
use moontide_rt::sync::{Arc, Mutex, lock};
use moontide_rt::time::Instant;
use moontide_types::ErrorCode;

use crate::error::{ConnectionError, TransferError};
use crate::framing::FramePlan;
use crate::op::{Direction, OpCore};
use crate::tcp::receive_lock::Waiter;

/// Reason why a request has no reply.
#[derive(Clone, Debug)]
pub(crate) enum RequestError {
    /// The peer refused the request as a whole.
    Refused(ErrorCode),
    /// The connection failed; on another one it may succeed.
    Failed(ConnectionError),
    /// The deadline has passed.
    Deadline,
    /// The caller aborted the request.
    Aborted,
}

/// Body of the reply, or the reason why there is none.
pub(crate) type RequestResult = Result<Vec<u8>, RequestError>;

/// One request frame.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) kind: FrameKind,
    /// Packed operations, or a message.
    pub(crate) body: Vec<u8>,
    /// Local side of a Read or Write; `None` for a call.
    pub(crate) work: Option<TransferWork>,
    pub(crate) deadline: Instant,
    pub(crate) waiter: Arc<Waiter>,
    /// Whether the same thread sends another request immediately: the kernel may then merge them (MSG_MORE).
    pub(crate) more: bool,
    result: Mutex<Option<RequestResult>>,
}

/// Local side of a Read or Write.
#[derive(Debug)]
pub(crate) struct TransferWork {
    pub(crate) ops: Arc<[OpCore]>,
    pub(crate) frame: FramePlan,
}

impl Request {
    /// Marks the request as immediately followed by another one.
    pub(crate) fn with_more(mut self: Arc<Request>) -> Arc<Request> {
        Arc::get_mut(&mut self).expect("the request is not shared yet").more = true;
        self
    }

    /// Creates a Read or Write of the parts of `frame`.
    pub(crate) fn transfer(ops: &Arc<[OpCore]>, frame: FramePlan, deadline: Instant) -> Arc<Request> {
        let kind = match frame.direction {
            Direction::Get => FrameKind::Read,
            Direction::Put => FrameKind::Write,
        };
        let mut body = Vec::new();
        for part in &frame.parts {
            let op = &ops[part.op];
            let at = op.offset() + part.range.offset();
            op.target().to_wire(frame.direction.op_kind(), at, part.range.len()).encode(&mut body);
        }
        let work = Some(TransferWork { ops: Arc::clone(ops), frame });
        Request::new(kind, body, work, deadline)
    }

    /// Creates a call, which must be valid by [`Request::check_call`].
    pub(crate) fn call(kind: FrameKind, body: Vec<u8>, deadline: Instant) -> Arc<Request> {
        Request::new(kind, body, None, deadline)
    }

    /// Checks whether a call of this kind with this body is a valid frame.
    pub(crate) fn check_call(kind: FrameKind, body: &[u8]) -> Result<(), TransferError> {
        use FrameKind::{Attach, Begin, Commit, Describe, Load, Release};
        if !matches!(kind, Begin | Commit | Load | Release | Attach | Describe) {
            return Err(TransferError::Malformed { source: FrameError::Kind { found: kind.number() } });
        }
        let body_len = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let header = FrameHeader { body_len, ..FrameHeader::new(kind, 0) };
        header.check().map_err(|source| TransferError::Malformed { source })
    }

    fn new(kind: FrameKind, body: Vec<u8>, work: Option<TransferWork>, deadline: Instant) -> Arc<Request> {
        let (waiter, result) = (Arc::default(), Mutex::default());
        Arc::new(Request { kind, body, work, deadline, waiter, more: false, result })
    }

    /// Returns the frame header of the request.
    pub(crate) fn header(&self, request: u64, timeout_ms: u32) -> FrameHeader {
        FrameHeader {
            body_len: self.body.len() as u32, // bounded by `check_call`, or by the frame plan
            payload_len: if self.kind == FrameKind::Write { self.bytes() } else { 0 },
            timeout_ms,
            ..FrameHeader::new(self.kind, request)
        }
    }

    /// Returns the payload bytes, in either direction.
    pub(crate) fn bytes(&self) -> u64 {
        self.work.as_ref().map_or(0, |work| work.frame.bytes)
    }

    /// Sets the result and wakes the waiting thread. After this, no thread accesses the caller's memory.
    pub(crate) fn finish(&self, result: RequestResult) {
        let mut slot = lock(&self.result);
        if slot.is_none() {
            *slot = Some(result);
        }
        drop(slot);
        self.waiter.finish();
    }

    /// Takes the result; `None` before the request has finished.
    pub(crate) fn take_result(&self) -> Option<RequestResult> {
        if self.waiter.is_done() { lock(&self.result).take() } else { None }
    }
}
