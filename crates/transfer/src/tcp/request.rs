//! [`Request`]: one frame that asks, and what became of it.

use std::time::Instant;

use moontide_proto::{FixedRecord, FrameError, FrameHeader, FrameKind};
use moontide_types::ErrorCode;

use crate::error::{Failure, TransferError};
use crate::op::{Direction, OpCore};
use crate::plan::Frame;
use crate::sync::{Arc, Mutex, lock};
use crate::tcp::turn::Seat;

/// Why a request has no answer.
#[derive(Clone, Debug)]
pub(crate) enum NoAnswer {
    /// The peer refused it as a whole.
    Refused(ErrorCode),
    /// The connection failed; on another one it may succeed.
    Failed(Failure),
    /// Its time was over.
    Deadline,
    /// The caller gave up.
    Aborted,
}

/// The body of an answer, or why there is none.
pub(crate) type Answer = Result<Vec<u8>, NoAnswer>;

/// One frame that asks.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) kind: FrameKind,
    /// Operations, packed, or a message.
    pub(crate) body: Vec<u8>,
    /// For Read and Write: the memory.
    pub(crate) work: Option<Work>,
    pub(crate) deadline: Instant,
    pub(crate) seat: Arc<Seat>,
    /// The same thread sends another one at once: the kernel may let them travel together.
    pub(crate) is_followed: bool,
    answer: Mutex<Option<Answer>>,
}

/// The near end of a Read or Write.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) ops: Arc<[OpCore]>,
    pub(crate) frame: Frame,
}

impl Request {
    /// As it is, and followed by another one at once.
    pub(crate) fn followed(mut self: Arc<Request>) -> Arc<Request> {
        Arc::get_mut(&mut self).expect("nobody has it yet").is_followed = true;
        self
    }

    /// A Read or Write of these parts.
    pub(crate) fn transfer(ops: &Arc<[OpCore]>, frame: Frame, deadline: Instant) -> Arc<Request> {
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
        let work = Some(Work { ops: Arc::clone(ops), frame });
        Request::new(kind, body, work, deadline)
    }

    /// A call, if it can be said. [`Request::check_call`] tells beforehand.
    pub(crate) fn call(kind: FrameKind, body: Vec<u8>, deadline: Instant) -> Arc<Request> {
        Request::new(kind, body, None, deadline)
    }

    /// Whether a call of this kind with this body makes a frame.
    pub(crate) fn check_call(kind: FrameKind, body: &[u8]) -> Result<(), TransferError> {
        use FrameKind::{Attach, Begin, Commit, Load, Release};
        if !matches!(kind, Begin | Commit | Load | Release | Attach) {
            return Err(TransferError::Malformed { source: FrameError::Kind { found: kind.number() } });
        }
        let body_len = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let header = FrameHeader { body_len, ..FrameHeader::new(kind, 0) };
        header.check().map_err(|source| TransferError::Malformed { source })
    }

    fn new(kind: FrameKind, body: Vec<u8>, work: Option<Work>, deadline: Instant) -> Arc<Request> {
        let (seat, answer) = (Arc::default(), Mutex::default());
        Arc::new(Request { kind, body, work, deadline, seat, is_followed: false, answer })
    }

    /// The header that goes in front.
    pub(crate) fn header(&self, request: u64, deadline_ms: u32) -> FrameHeader {
        FrameHeader {
            body_len: self.body.len() as u32, // bounded by `check_call`, or by the plan
            payload_len: if self.kind == FrameKind::Write { self.bytes() } else { 0 },
            deadline_ms,
            ..FrameHeader::new(self.kind, request)
        }
    }

    /// Bytes of payload, whichever way they go.
    pub(crate) fn bytes(&self) -> u64 {
        self.work.as_ref().map_or(0, |work| work.frame.bytes)
    }

    /// Sets the answer, and wakes whoever waits. From here on nobody touches the caller's memory.
    pub(crate) fn finish(&self, answer: Answer) {
        let mut place = lock(&self.answer);
        if place.is_none() {
            *place = Some(answer);
        }
        drop(place);
        self.seat.finish();
    }

    /// Takes the answer; `None` before it is there.
    pub(crate) fn take_answer(&self) -> Option<Answer> {
        if self.seat.is_done() { lock(&self.answer).take() } else { None }
    }
}
