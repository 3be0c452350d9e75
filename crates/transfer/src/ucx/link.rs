//! [`UcxEngine`] and [`UcxLink`]: gets and puts by the network card, and calls over TCP.
//!
//! A link asks the node over TCP for access to its memory (Attach), connects a UCX endpoint, and imports a key per
//! region. Operations are split into parts of [`PART_BYTES`]; while later parts are in flight, the waiting thread
//! digests earlier ones.
//!
//! An operation can only be aborted by closing its endpoint by force. That also fails the other operations on it; they
//! are restarted on a new endpoint, at most [`ATTEMPTS_MAX`] times.

use std::collections::HashMap;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use moontide_proto::convert::{AttachReply, AttachRequest, Wire, decode, encode};
use moontide_proto::{FrameKind, OpFlags, v1};
use moontide_rt::sync::{Arc, Condvar, Mutex, lock, wait};
use moontide_rt::time::Instant;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{ErrorCode, Generation, NodeId, SegmentId, Span};
use tracing::{debug, info};

use super::{Endpoint, Get, Put, RemoteKey, Ucx, UcxError, UcxWorker, WorkerConfig};
use crate::engine::{Engine, EngineUnavailable, Link, Peer, Pending, Score, WaitMode, call};
use crate::engine_kind::EngineKind;
use crate::error::{ConnectionError, TransferError};
use crate::metrics::Metrics;
use crate::op::{Direction, OpCore};

/// Bytes of one UCX operation: four pages, so that digesting overlaps with the arrival of the next ones.
const PART_BYTES: u64 = 4 * PAGE_BYTES;

/// Most attempts to run a batch.
const ATTEMPTS_MAX: u32 = 3;

/// Time limit for attaching.
const ATTACH_MAX: Duration = Duration::from_secs(5);

/// UCX engine, for peers that offer it.
#[derive(Debug)]
pub struct UcxEngine {
    worker: Arc<UcxWorker>,
    /// Engine for calls, and to attach.
    frames: Arc<dyn Engine>,
    metrics: Arc<Metrics>,
}

impl UcxEngine {
    /// Creates an engine with its own worker; calls use `frames`.
    pub fn new(
        ucx: &Ucx,
        config: WorkerConfig,
        frames: Arc<dyn Engine>,
        metrics: Arc<Metrics>,
    ) -> Result<UcxEngine, UcxError> {
        let worker = Arc::new(UcxWorker::start(ucx, config)?);
        Ok(UcxEngine { worker, frames, metrics })
    }

    /// Returns the engine if a usable library exists; otherwise logs the reason.
    pub fn if_present(frames: &Arc<dyn Engine>, metrics: &Arc<Metrics>) -> Option<UcxEngine> {
        let created = Ucx::load(None).map_err(UcxError::from).and_then(|ucx| {
            UcxEngine::new(&ucx, WorkerConfig::default(), Arc::clone(frames), Arc::clone(metrics))
        });
        match created {
            Ok(engine) => Some(engine),
            Err(reason) => {
                info!(engine = "ucx", %reason, "engine is not available");
                None
            }
        }
    }
}

impl Engine for UcxEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Ucx
    }

    fn score(&self, peer: &Peer) -> Result<Score, EngineUnavailable> {
        peer.addresses_of(EngineKind::Ucx).next().ok_or(EngineUnavailable::NoAddress)?;
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
        debug!(node = %peer.node, transports = %attached.endpoint.transports(), "endpoint opened");
        Ok(Arc::new(link))
    }
}

/// Connection to one peer over UCX.
#[derive(Debug)]
pub struct UcxLink {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    frames: Arc<dyn Link>,
    worker: Arc<UcxWorker>,
    /// `None` before the first use, and after the endpoint was closed.
    attached: Mutex<Option<Arc<AttachedPeer>>>,
    metrics: Arc<Metrics>,
}

/// Endpoint, and the keys of the peer's memory.
#[derive(Debug)]
struct AttachedPeer {
    /// Declared before the endpoint through which they were imported.
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

/// Closes an endpoint by force. After this returns, the memory of its operations is no longer accessed.
fn close(attached: &AttachedPeer) {
    if let Err(error) = attached.endpoint.abort() {
        abort_if_buffer_stuck(&error);
    }
}

/// Aborts the process if UCX did not release a buffer: UCX could write to it at any later time, whatever its use then.
fn abort_if_buffer_stuck(error: &UcxError) {
    if !error.returns_buffer() {
        tracing::error!(%error, "aborting the process before its memory is corrupted");
        std::process::abort();
    }
}

impl Shared {
    /// Returns the endpoint, attaching again if there is none.
    fn attached(&self, deadline: Instant) -> Result<Arc<AttachedPeer>, TransferError> {
        let mut slot = lock(&self.attached);
        if let Some(attached) = &*slot {
            return Ok(Arc::clone(attached));
        }
        let deadline = deadline.min(Instant::now() + ATTACH_MAX);
        let engine = EngineKind::Ucx.name();
        let body = encode(&AttachRequest { engine }).expect("a short name");
        let reply = call(&*self.frames, FrameKind::Attach, body, deadline)?;
        let malformed =
            TransferError::Unsupported { engine, what: "the peer's reply to Attach is malformed" };
        let message: v1::AttachReply = decode(reply.into()).map_err(|_| malformed.clone())?;
        let reply = AttachReply::from_wire(&message).map_err(|_| malformed)?;
        let failed = |source| TransferError::ConnectionLost {
            node: self.frames.node(),
            last: ConnectionError::Ucx { source },
        };
        let endpoint = self.worker.connect(reply.address, deadline).map_err(failed)?;
        let mut keys = HashMap::new();
        for region in &reply.regions {
            keys.insert((region.segment, region.generation), endpoint.import(region.key).map_err(failed)?);
        }
        let attached = Arc::new(AttachedPeer { keys, endpoint });
        *slot = Some(Arc::clone(&attached));
        Ok(attached)
    }

    /// Closes an endpoint that can no longer be used.
    fn detach(&self, attached: &Arc<AttachedPeer>) {
        let mut slot = lock(&self.attached);
        let current = slot.take_if(|current| Arc::ptr_eq(current, attached));
        drop(slot);
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

    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, _: WaitMode) -> Box<dyn Pending> {
        let mut pending = UcxPending::new(Arc::clone(&self.shared), ops, deadline);
        pending.launch();
        Box::new(pending)
    }

    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        wait_mode: WaitMode,
    ) -> Box<dyn Pending> {
        self.shared.frames.start_call(kind, body, deadline, wait_mode)
    }
}

/// Part of an operation.
#[derive(Clone, Copy, Debug)]
struct UcxPart {
    op: usize,
    range: Span,
}

/// Results that the progress thread passes to the waiting thread.
#[derive(Debug, Default)]
struct Completions {
    state: Mutex<CompletionState>,
    condvar: Condvar,
}

#[derive(Debug, Default)]
struct CompletionState {
    /// Per part: UCX operations that are not done, and the first error.
    parts: Vec<(usize, Option<UcxError>)>,
    waker: Option<Waker>,
}

impl Completions {
    fn report(&self, part: usize, result: Result<(), UcxError>) {
        let mut state = lock(&self.state);
        let (left, failed) = &mut state.parts[part];
        *left -= 1;
        if let Err(error) = result {
            failed.get_or_insert(error);
        }
        let waker = state.waker.take();
        self.condvar.notify_all();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A running batch.
#[derive(Debug)]
struct UcxPending {
    shared: Arc<Shared>,
    ops: Vec<OpCore>,
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
    parts: Vec<UcxPart>,
    /// Index of the first part that is not done and digested.
    next: usize,
    in_flight: Option<(Arc<AttachedPeer>, Arc<Completions>)>,
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
                // Parts begin at pages of the stripe, since a digested operation does.
                let len = (core.len() - start).min(PART_BYTES);
                parts.push(UcxPart { op, range: Span::new(start, len).expect("inside the operation") });
                start += len;
            }
        }
        let outcomes = vec![None; ops.len()];
        let (next, in_flight, attempts, started, ended) = (0, None, 0, Instant::now(), None);
        UcxPending { shared, ops, outcomes, parts, next, in_flight, attempts, started, deadline, ended }
    }

    /// Starts all parts that are not done.
    fn launch(&mut self) {
        self.attempts += 1;
        let attached = match self.shared.attached(self.deadline) {
            Ok(attached) => attached,
            Err(error) => {
                let _ = self.end(Err(error)); // returned by `wait` and `poll`
                return;
            }
        };
        for (core, outcome) in self.ops.iter().zip(&mut self.outcomes) {
            let target = core.target();
            let has_key = attached.keys.contains_key(&(target.segment, target.generation));
            let plain = target.flags == OpFlags::NONE || target.flags == OpFlags::BACKGROUND;
            *outcome = Some(match (plain, has_key) {
                (false, _) => Err(ErrorCode::Unsupported),
                (true, false) => Err(ErrorCode::StaleGeneration),
                (true, true) => Ok(()),
            });
        }
        let completions = Arc::new(Completions::default());
        lock(&completions.state).parts = vec![(0, None); self.parts.len()];
        for index in self.next..self.parts.len() {
            self.start_part(index, &attached, &completions);
        }
        self.in_flight = Some((attached, completions));
    }

    fn start_part(&self, index: usize, attached: &AttachedPeer, completions: &Arc<Completions>) {
        let UcxPart { op, range } = self.parts[index];
        if self.outcomes[op] != Some(Ok(())) {
            return;
        }
        let (core, deadline) = (&self.ops[op], self.deadline);
        let target = core.target();
        let key = &attached.keys[&(target.segment, target.generation)];
        let mut slices = Vec::new();
        core.visit(range, |local, len| slices.push((local, len)));
        lock(&completions.state).parts[index].0 = slices.len();
        // `get` and `put` refuse an address beyond the registered memory of the peer, also after a sum that wraps.
        let at = key.base().wrapping_add(target.payload_offset).wrapping_add(core.offset());
        let mut remote = at.wrapping_add(range.offset());
        for (local, len) in slices {
            let completions = Arc::clone(completions);
            let done = move |result| completions.report(index, result);
            // SAFETY: the caller of `start` keeps the memory valid until this batch has ended, and it ends only after
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

    /// Digests the parts that are done, in order, up to the first that is not. Returns `true` if all are done.
    fn advance(&mut self) -> Result<bool, UcxError> {
        let Some((_, completions)) = &self.in_flight else { return Ok(true) };
        while self.next < self.parts.len() {
            let (left, failed) = lock(&completions.state).parts[self.next].clone();
            if left > 0 {
                return Ok(false);
            }
            if let Some(error) = failed {
                return Err(error);
            }
            let UcxPart { op, range } = self.parts[self.next];
            if self.ops[op].is_digested() && self.outcomes[op] == Some(Ok(())) {
                let pages = range.offset() / PAGE_BYTES..range.end().div_ceil(PAGE_BYTES);
                // SAFETY: the bytes have arrived, and only this batch uses the memory.
                pages.for_each(|page| unsafe { self.ops[op].digest_page(page) });
            }
            self.next += 1;
        }
        Ok(true)
    }

    /// Handles the failure of a part. Returns `None` if the batch was restarted.
    fn recover(&mut self, error: UcxError) -> Option<Result<(), TransferError>> {
        abort_if_buffer_stuck(&error);
        if let Some((attached, _)) = self.in_flight.take() {
            // After this, all operations of the batch are done, and no code accesses their memory.
            self.shared.detach(&attached);
        }
        if matches!(error, UcxError::DeadlineExceeded) || Instant::now() >= self.deadline {
            return Some(self.end(Err(TransferError::Deadline { waited: self.started.elapsed() })));
        }
        if matches!(error, UcxError::OutOfRange { .. }) {
            return Some(self.end(Err(TransferError::Refused { code: ErrorCode::OutOfBounds })));
        }
        if self.attempts >= ATTEMPTS_MAX {
            let last = ConnectionError::Ucx { source: error };
            return Some(
                self.end(Err(TransferError::ConnectionLost { node: self.shared.frames.node(), last })),
            );
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
        self.in_flight = None;
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
                    let (_, completions) = self.in_flight.as_ref().expect("parts are in in_flight");
                    let state = lock(&completions.state);
                    if state.parts[self.next].0 > 0 {
                        // The worker ends late operations, and notifies.
                        drop(wait(&completions.condvar, state, Duration::from_secs(1)));
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
                    let (_, completions) = self.in_flight.as_ref().expect("parts are in in_flight");
                    let mut state = lock(&completions.state);
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
        if let Some((attached, _)) = self.in_flight.take() {
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
