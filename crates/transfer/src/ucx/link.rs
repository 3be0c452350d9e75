//! [`UcxEngine`] and [`UcxLink`]: gets and puts that the network card does, and calls over TCP.
//!
//! A link asks the node over TCP how its memory can be used (Attach), connects a UCX endpoint, and imports a key per
//! region. Operations are cut into pieces of [`PIECE_BYTES`]; while later ones are on their way, earlier ones are
//! digested by whoever waits.
//!
//! The only way to take an operation back is to close its endpoint by force. That hits the others on it, too: they are
//! started again on a new endpoint, a few times.

use std::collections::HashMap;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use moontide_proto::convert::{AttachReply, AttachRequest, Wire, decode, encode};
use moontide_proto::{FrameKind, OpFlags, v1};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::{ErrorCode, Generation, NodeId, SegmentId, Span};
use tracing::{debug, info};

use super::{Endpoint, Get, Put, RemoteKey, Ucx, UcxError, UcxWorker, WorkerConfig};
use crate::engine::{Engine, EngineKind, Link, NotSuited, Peer, Pending, Score, Waiting, call};
use crate::error::{Failure, TransferError};
use crate::metrics::Metrics;
use crate::op::{Direction, OpCore};
use crate::sync::{Arc, Condvar, Mutex, lock, wait};

/// Bytes of one UCX operation: four pages, so that digesting goes on while the next ones arrive.
const PIECE_BYTES: u64 = 4 * PAGE_BYTES;

/// How often a batch is started at most.
const ATTEMPTS_MAX: u32 = 3;

/// How long attaching may take at most.
const ATTACH_MAX: Duration = Duration::from_secs(5);

/// UCX, for peers that offer it.
#[derive(Debug)]
pub struct UcxEngine {
    worker: Arc<UcxWorker>,
    /// For calls, and to attach.
    frames: Arc<dyn Engine>,
    metrics: Arc<Metrics>,
}

impl UcxEngine {
    /// An engine with a worker of its own; calls go over `frames`.
    pub fn new(
        ucx: &Ucx,
        config: WorkerConfig,
        frames: Arc<dyn Engine>,
        metrics: Arc<Metrics>,
    ) -> Result<UcxEngine, UcxError> {
        let worker = Arc::new(UcxWorker::start(ucx, config)?);
        Ok(UcxEngine { worker, frames, metrics })
    }

    /// The engine if there is a usable library, else one line in the log that says why not.
    pub fn if_present(frames: &Arc<dyn Engine>, metrics: &Arc<Metrics>) -> Option<UcxEngine> {
        let made = Ucx::load(None).map_err(UcxError::from).and_then(|ucx| {
            UcxEngine::new(&ucx, WorkerConfig::default(), Arc::clone(frames), Arc::clone(metrics))
        });
        match made {
            Ok(engine) => Some(engine),
            Err(why) => {
                info!(engine = "ucx", %why, "engine is absent");
                None
            }
        }
    }
}

impl Engine for UcxEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Ucx
    }

    fn score(&self, peer: &Peer) -> Result<Score, NotSuited> {
        peer.addresses_of(EngineKind::Ucx).next().ok_or(NotSuited::NoAddress)?;
        self.frames.score(peer)?;
        Ok(Score::ONE_SIDED)
    }

    fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError> {
        let frames = self.frames.connect(peer, deadline)?;
        let (worker, metrics) = (Arc::clone(&self.worker), Arc::clone(&self.metrics));
        let link =
            UcxLink { shared: Arc::new(Shared { frames, worker, attached: Mutex::default(), metrics }) };
        link.shared.metrics.link_opened(EngineKind::Ucx);
        let attached = link.shared.attached(deadline)?;
        debug!(node = peer.node.0, transports = %attached.endpoint.transports(), "endpoint opened");
        Ok(Arc::new(link))
    }
}

/// A peer over UCX.
#[derive(Debug)]
pub struct UcxLink {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    frames: Arc<dyn Link>,
    worker: Arc<UcxWorker>,
    /// `None` before the first use, and after the endpoint was closed.
    attached: Mutex<Option<Arc<Attached>>>,
    metrics: Arc<Metrics>,
}

/// An endpoint, and the memory behind it.
#[derive(Debug)]
struct Attached {
    /// Before the endpoint through which they were imported.
    keys: HashMap<(SegmentId, Generation), RemoteKey>,
    endpoint: Endpoint,
}

impl Drop for UcxLink {
    fn drop(&mut self) {
        if let Some(attached) = lock(&self.shared.attached).take() {
            close(&attached);
        }
        self.shared.metrics.link_closed(EngineKind::Ucx);
    }
}

/// Closes an endpoint by force. When this returns no memory of its operations is touched.
fn close(attached: &Attached) {
    if let Err(error) = attached.endpoint.abort() {
        insist_on_memory(&error);
    }
}

/// Memory that UCX does not let go of would be written at any moment from now on, whoever has it then.
fn insist_on_memory(error: &UcxError) {
    if !error.returns_buffer() {
        tracing::error!(%error, "the process ends before its memory is corrupted");
        std::process::abort();
    }
}

impl Shared {
    /// The endpoint, made anew if there is none.
    fn attached(&self, deadline: Instant) -> Result<Arc<Attached>, TransferError> {
        let mut place = lock(&self.attached);
        if let Some(attached) = &*place {
            return Ok(Arc::clone(attached));
        }
        let deadline = deadline.min(Instant::now() + ATTACH_MAX);
        let engine = EngineKind::Ucx.name();
        let body = encode(&AttachRequest { engine }).expect("a short name");
        let reply = call(&*self.frames, FrameKind::Attach, body, deadline)?;
        let unreadable =
            TransferError::Unsupported { engine, what: "the peer's answer to Attach cannot be read" };
        let message: v1::AttachReply = decode(reply.into()).map_err(|_| unreadable.clone())?;
        let reply = AttachReply::from_wire(&message).map_err(|_| unreadable)?;
        let failed = |source| TransferError::Lost { node: self.frames.node(), last: Failure::Ucx { source } };
        let endpoint = self.worker.connect(reply.address, deadline).map_err(failed)?;
        let mut keys = HashMap::new();
        for region in &reply.regions {
            keys.insert((region.segment, region.generation), endpoint.import(region.key).map_err(failed)?);
        }
        let attached = Arc::new(Attached { keys, endpoint });
        *place = Some(Arc::clone(&attached));
        Ok(attached)
    }

    /// An endpoint is of no more use.
    fn detach(&self, attached: &Arc<Attached>) {
        let mut place = lock(&self.attached);
        let current = place.take_if(|current| Arc::ptr_eq(current, attached));
        drop(place);
        close(attached);
        drop(current);
    }
}

impl Link for UcxLink {
    fn engine(&self) -> EngineKind {
        EngineKind::Ucx
    }

    fn node(&self) -> NodeId {
        self.shared.frames.node()
    }

    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, _: Waiting) -> Box<dyn Pending> {
        let mut pending = UcxPending::new(Arc::clone(&self.shared), ops, deadline);
        pending.launch();
        Box::new(pending)
    }

    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        waiting: Waiting,
    ) -> Box<dyn Pending> {
        self.shared.frames.start_call(kind, body, deadline, waiting)
    }
}

/// A piece of an operation.
#[derive(Clone, Copy, Debug)]
struct Part {
    op: usize,
    range: Span,
}

/// What the progress thread tells whoever waits.
#[derive(Debug, Default)]
struct Board {
    state: Mutex<BoardState>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct BoardState {
    /// UCX operations of each part that are not done, and the first that failed.
    parts: Vec<(usize, Option<UcxError>)>,
    waker: Option<Waker>,
}

impl Board {
    fn tell(&self, part: usize, result: Result<(), UcxError>) {
        let mut state = lock(&self.state);
        let (left, failed) = &mut state.parts[part];
        *left -= 1;
        if let Err(error) = result {
            failed.get_or_insert(error);
        }
        let waker = state.waker.take();
        self.bell.notify_all();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A batch under way.
#[derive(Debug)]
struct UcxPending {
    shared: Arc<Shared>,
    ops: Vec<OpCore>,
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
    parts: Vec<Part>,
    /// Parts below it are done, and digested.
    next: usize,
    flight: Option<(Arc<Attached>, Arc<Board>)>,
    attempts: u32,
    started: Instant,
    deadline: Instant,
    ended: Option<Result<(), TransferError>>,
}

impl UcxPending {
    fn new(shared: Arc<Shared>, ops: Vec<OpCore>, deadline: Instant) -> UcxPending {
        let mut parts = Vec::new();
        for (op, core) in ops.iter().enumerate() {
            let mut start = 0;
            while start < core.len() {
                // At the stripe's pages, where an operation that is digested begins.
                let len = (core.len() - start).min(PIECE_BYTES);
                parts.push(Part { op, range: Span::new(start, len).expect("inside the operation") });
                start += len;
            }
        }
        let outcomes = vec![None; ops.len()];
        let (next, flight, attempts, started, ended) = (0, None, 0, Instant::now(), None);
        UcxPending { shared, ops, outcomes, parts, next, flight, attempts, started, deadline, ended }
    }

    /// Starts all parts that are not done.
    fn launch(&mut self) {
        self.attempts += 1;
        let attached = match self.shared.attached(self.deadline) {
            Ok(attached) => attached,
            Err(error) => {
                let _ = self.end(Err(error)); // told by `wait` and `poll`
                return;
            }
        };
        for (core, outcome) in self.ops.iter().zip(&mut self.outcomes) {
            let target = core.target();
            let known = attached.keys.contains_key(&(target.segment, target.generation));
            let plain = target.flags == OpFlags::NONE || target.flags == OpFlags::BACKGROUND;
            *outcome = Some(match (plain, known) {
                (false, _) => Err(ErrorCode::Unsupported),
                (true, false) => Err(ErrorCode::StaleGeneration),
                (true, true) => Ok(()),
            });
        }
        let board = Arc::new(Board::default());
        lock(&board.state).parts = vec![(0, None); self.parts.len()];
        for index in self.next..self.parts.len() {
            self.start_part(index, &attached, &board);
        }
        self.flight = Some((attached, board));
    }

    fn start_part(&self, index: usize, attached: &Attached, board: &Arc<Board>) {
        let Part { op, range } = self.parts[index];
        if self.outcomes[op] != Some(Ok(())) {
            return;
        }
        let (core, deadline) = (&self.ops[op], self.deadline);
        let target = core.target();
        let key = &attached.keys[&(target.segment, target.generation)];
        let mut pieces = Vec::new();
        core.visit(range, |local, len| pieces.push((local, len)));
        lock(&board.state).parts[index].0 = pieces.len();
        // An address beyond what the peer has registered is refused by `get` and `put`, a sum that wraps as well.
        let at = key.base().wrapping_add(target.payload_offset).wrapping_add(core.offset());
        let mut remote = at.wrapping_add(range.offset());
        for (local, len) in pieces {
            let board = Arc::clone(board);
            let done = move |result| board.tell(index, result);
            // SAFETY: the caller of `start` keeps the memory valid until this batch has ended, and it ends only when
            // all its operations are done.
            unsafe {
                match core.direction() {
                    Direction::Get => attached.endpoint.get(Get { key, remote, local, len, deadline }, done),
                    Direction::Put => attached.endpoint.put(Put { key, remote, local, len, deadline }, done),
                }
            }
            remote = remote.wrapping_add(len as u64);
        }
    }

    /// Takes in the parts that are done, in order, up to the first that is not. `true` if all are.
    fn advance(&mut self) -> Result<bool, UcxError> {
        let Some((_, board)) = &self.flight else { return Ok(true) };
        while self.next < self.parts.len() {
            let (left, failed) = lock(&board.state).parts[self.next].clone();
            if left > 0 {
                return Ok(false);
            }
            if let Some(error) = failed {
                return Err(error);
            }
            let Part { op, range } = self.parts[self.next];
            if self.ops[op].is_digested() && self.outcomes[op] == Some(Ok(())) {
                let pages = range.offset() / PAGE_BYTES..range.end().div_ceil(PAGE_BYTES);
                // SAFETY: its bytes are there, and the memory is this batch's.
                pages.for_each(|page| unsafe { self.ops[op].digest_page(page) });
            }
            self.next += 1;
        }
        Ok(true)
    }

    /// A part failed. `None`: it was started again.
    fn recover(&mut self, error: UcxError) -> Option<Result<(), TransferError>> {
        insist_on_memory(&error);
        if let Some((attached, _)) = self.flight.take() {
            // All operations of the batch are done after this, and nobody touches their memory.
            self.shared.detach(&attached);
        }
        if matches!(error, UcxError::DeadlineExceeded) || Instant::now() >= self.deadline {
            return Some(self.end(Err(TransferError::Deadline { waited: self.started.elapsed() })));
        }
        if matches!(error, UcxError::OutOfRange { .. }) {
            return Some(self.end(Err(TransferError::Refused { code: ErrorCode::OutOfBounds })));
        }
        if self.attempts >= ATTEMPTS_MAX {
            let last = Failure::Ucx { source: error };
            return Some(self.end(Err(TransferError::Lost { node: self.shared.frames.node(), last })));
        }
        self.shared.metrics.resubmitted(EngineKind::Ucx);
        self.launch();
        self.ended.clone()
    }

    fn end(&mut self, result: Result<(), TransferError>) -> Result<(), TransferError> {
        let failed = result.as_ref().err().map(TransferError::code);
        for (op, outcome) in self.ops.iter().zip(&mut self.outcomes) {
            if let Some(code) = failed {
                *outcome = outcome.filter(|outcome| outcome.is_err());
                self.shared.metrics.op(
                    EngineKind::Ucx,
                    op.direction(),
                    op.len(),
                    outcome.unwrap_or(Err(code)),
                );
            } else {
                let outcome = outcome.unwrap_or(Err(ErrorCode::Internal));
                self.shared.metrics.op(EngineKind::Ucx, op.direction(), op.len(), outcome);
            }
        }
        self.flight = None;
        self.ended = Some(result.clone());
        result
    }
}

impl Pending for UcxPending {
    fn wait(&mut self) -> Result<(), TransferError> {
        loop {
            if let Some(ended) = &self.ended {
                return ended.clone();
            }
            match self.advance() {
                Ok(true) => return self.end(Ok(())),
                Ok(false) => {
                    let (_, board) = self.flight.as_ref().expect("parts are under way");
                    let state = lock(&board.state);
                    if state.parts[self.next].0 > 0 {
                        // The worker ends what is late, and rings.
                        drop(wait(&board.bell, state, Duration::from_secs(1)));
                    }
                }
                Err(error) => {
                    if let Some(ended) = self.recover(error) {
                        return ended;
                    }
                }
            }
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        loop {
            if let Some(ended) = &self.ended {
                return Poll::Ready(ended.clone());
            }
            match self.advance() {
                Ok(true) => return Poll::Ready(self.end(Ok(()))),
                Ok(false) => {
                    let (_, board) = self.flight.as_ref().expect("parts are under way");
                    let mut state = lock(&board.state);
                    if state.parts[self.next].0 > 0 {
                        state.waker = Some(context.waker().clone());
                        return Poll::Pending;
                    }
                }
                Err(error) => {
                    if let Some(ended) = self.recover(error) {
                        return Poll::Ready(ended);
                    }
                }
            }
        }
    }

    fn abort(&mut self) {
        if self.ended.is_some() {
            return;
        }
        if let Some((attached, _)) = self.flight.take() {
            self.shared.detach(&attached);
        }
        let _ = self.end(Err(TransferError::Aborted));
    }

    fn outcomes(&self) -> &[Option<Result<(), ErrorCode>>] {
        &self.outcomes
    }

    fn take_reply(&mut self) -> Vec<u8> {
        Vec::new()
    }
}

impl Drop for UcxPending {
    fn drop(&mut self) {
        self.abort();
    }
}
