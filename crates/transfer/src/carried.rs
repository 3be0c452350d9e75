//! [`CarriedEngine`]: an engine whose requests a test carries to the peer; for simulated worlds, which have no sockets.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use moontide_proto::{FrameKind, TransferOp};
use moontide_rt::time::Instant;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{ErrorCode, NodeId, Span};

use crate::engine::{Engine, EngineUnavailable, Link, Peer, Pending, Score, WaitMode};
use crate::engine_kind::EngineKind;
use crate::error::TransferError;
use crate::op::{Direction, OpCore};

/// A request to a node.
#[derive(Clone, Debug)]
pub enum CarriedRequest {
    /// The bytes of this range are wanted.
    Read(TransferOp),
    /// A call with this body; the body of the reply is wanted.
    Call(FrameKind, Vec<u8>),
}

/// What carries requests.
pub trait Carrier: Send + Sync + fmt::Debug {
    /// Carries a request to a peer, and waits for the reply, at most until the deadline.
    ///
    /// # Errors
    /// The code of the peer, or of the loss of the request.
    fn carry(&self, peer: &Peer, request: CarriedRequest, deadline: Instant) -> Result<Vec<u8>, ErrorCode>;
}

/// See the top of the file.
#[derive(Debug)]
pub struct CarriedEngine(pub Arc<dyn Carrier>);

#[derive(Debug)]
struct CarriedLink {
    carrier: Arc<dyn Carrier>,
    peer: Peer,
}

/// Operations, or a call, that a wait carries one after the other.
#[derive(Debug)]
struct CarriedPending {
    carrier: Arc<dyn Carrier>,
    peer: Peer,
    deadline: Instant,
    ops: Vec<OpCore>,
    call: Option<CarriedRequest>,
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
    reply: Vec<u8>,
}

impl Engine for CarriedEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Tcp
    }

    fn score(&self, _peer: &Peer) -> Result<Score, EngineUnavailable> {
        Ok(Score::STREAM)
    }

    fn connect(&self, peer: &Peer, _deadline: Instant) -> Result<Arc<dyn Link>, TransferError> {
        Ok(Arc::new(CarriedLink { carrier: Arc::clone(&self.0), peer: peer.clone() }))
    }
}

impl CarriedLink {
    fn pending(&self, ops: Vec<OpCore>, call: Option<CarriedRequest>, deadline: Instant) -> Box<dyn Pending> {
        let (carrier, peer, outcomes) = (Arc::clone(&self.carrier), self.peer.clone(), vec![None; ops.len()]);
        Box::new(CarriedPending { carrier, peer, deadline, ops, call, outcomes, reply: Vec::new() })
    }
}

impl Link for CarriedLink {
    fn engine(&self) -> EngineKind {
        EngineKind::Tcp
    }

    fn node(&self) -> NodeId {
        self.peer.node
    }

    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, _wait_mode: WaitMode) -> Box<dyn Pending> {
        self.pending(ops, None, deadline)
    }

    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        _wait_mode: WaitMode,
    ) -> Box<dyn Pending> {
        self.pending(Vec::new(), Some(CarriedRequest::Call(kind, body)), deadline)
    }
}

impl CarriedPending {
    fn get(&self, op: &OpCore) -> Result<(), ErrorCode> {
        assert_eq!(op.direction(), Direction::Get, "nodes only read from each other");
        let target = op.target();
        let wanted = target.to_wire(moontide_proto::OpKind::Read, op.offset(), op.len());
        let bytes = self.carrier.carry(&self.peer, CarriedRequest::Read(wanted), self.deadline)?;
        if bytes.len() as u64 != op.len() {
            return Err(ErrorCode::Internal);
        }
        let mut left = &bytes[..];
        op.visit(Span::new(0, op.len()).ok_or(ErrorCode::Internal)?, |base, len| {
            let (part, rest) = left.split_at(len);
            // SAFETY: memory of the operation, which is this link's until the wait has ended.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), base, len) };
            left = rest;
        });
        for page in 0..op.len().div_ceil(PAGE_BYTES) {
            // SAFETY: as above.
            unsafe { op.digest_page(page) };
        }
        Ok(())
    }
}

impl Pending for CarriedPending {
    fn wait(&mut self) -> Result<(), TransferError> {
        if let Some(call) = self.call.take() {
            let carried = self.carrier.carry(&self.peer, call, self.deadline);
            self.reply = carried.map_err(|code| TransferError::Refused { code })?;
        }
        for at in 0..self.ops.len() {
            let got = self.get(&self.ops[at]);
            self.outcomes[at] = Some(got);
            if let Err(code @ (ErrorCode::ConnectionLost | ErrorCode::DeadlineExceeded)) = got {
                return Err(TransferError::Refused { code });
            }
        }
        Ok(())
    }

    fn poll(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        Poll::Ready(self.wait())
    }

    fn abort(&mut self) {
        self.ops.clear();
        self.call = None;
    }

    fn outcomes(&self) -> &[Option<Result<(), ErrorCode>>] {
        &self.outcomes
    }

    fn take_reply(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.reply)
    }
}
