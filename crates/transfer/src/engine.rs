//! [`Engine`] and [`Link`]: a transport, and one peer reached by it. [`Engines`] chooses the engine of a peer.
//!
//! Every engine rates how well it suits a peer ([`Engine::score`]). [`Engines`] takes the best one that connects. Each
//! link logs the choice once, in an `info` line with the field `engine`, and counts it in the metric
//! `moontide_transfer_links{engine=…}`. Engines that do not suit the peer are logged at level `debug`.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use moontide_heap::LocalHeap;
use moontide_proto::FrameKind;
use moontide_rt::time::Instant;
use moontide_types::{ErrorCode, NodeId};
use tracing::{debug, info, warn};

use crate::engine_kind::EngineKind;
use crate::error::TransferError;
use crate::metrics::Metrics;
use crate::op::{Op, OpCore};

/// Id and addresses of a node, as it announces them at registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Id that the node must confirm in the handshake.
    pub node: NodeId,
    /// Addresses by engine: for `tcp` an IP address and port, one per rail; for `shm` the result of
    /// [`shm::address`](crate::shm::address).
    pub addresses: Vec<(EngineKind, String)>,
}

impl Peer {
    /// Returns the addresses for the engine `kind`.
    pub fn addresses_of(&self, kind: EngineKind) -> impl Iterator<Item = &str> {
        self.addresses.iter().filter(move |(of, _)| *of == kind).map(|(_, address)| address.as_str())
    }
}

/// Rating of an engine for a peer; higher is better. Only the order of the values matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score(pub u32);

impl Score {
    /// Both processes map the memory; no copy over a network.
    pub const SAME_MEMORY: Score = Score(300);
    /// The network card moves the bytes (one-sided RDMA).
    pub const ONE_SIDED: Score = Score(200);
    /// The kernel moves the bytes (byte stream).
    pub const STREAM: Score = Score(100);
}

/// Whether the calling thread waits for the operations that it starts. A waiting thread does the work itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// The caller calls [`Pending::wait`] right away.
    Blocking,
    /// The caller polls; threads of the engine do the work.
    Polling,
}

/// A transport that moves bytes.
pub trait Engine: Send + Sync + fmt::Debug {
    /// Returns the kind of this engine.
    fn kind(&self) -> EngineKind;

    /// Rates how well the engine suits `peer`, or returns the reason why it does not.
    fn score(&self, peer: &Peer) -> Result<Score, EngineUnavailable>;

    /// Connects to `peer`. Blocks until `deadline` at most.
    fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError>;
}

/// Reason why an engine cannot be used for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineUnavailable {
    /// The peer announces no address for this engine.
    #[error("peer has no address for this engine")]
    NoAddress,
    /// No address of the peer for this engine can be parsed.
    #[error("peer has no valid address for this engine")]
    BadAddress,
    /// The engine works only within one host.
    #[error("peer is on another host")]
    OtherHost,
    /// The library of the engine is missing or cannot be used.
    #[error("library of the engine is not installed or not usable")]
    NotInstalled,
}

/// Connection to one peer over one engine. All threads of the process share it.
pub trait Link: Send + Sync + fmt::Debug {
    /// Returns the engine of this link.
    fn engine(&self) -> EngineKind;

    /// Returns the id of the peer.
    fn node(&self) -> NodeId;

    /// Returns the memory of the peer if it is mapped: objects in it can be read without a copy.
    fn local(&self) -> Option<&Arc<LocalHeap>> {
        None
    }

    /// Returns whether the peer has closed its end for good: only a new link can reach it, or its successor.
    fn is_closed(&self) -> bool {
        false
    }

    /// Starts operations.
    ///
    /// # Safety
    /// The memory behind the operations, and the arrays for their digests, stay valid until the returned value has
    /// finished, was aborted, or was dropped. Until then no other code writes to them, or reads those that are being
    /// filled.
    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, wait_mode: WaitMode) -> Box<dyn Pending>;

    /// Opens, fills and publishes slots without waiting in between, if the engine supports it and the records are small
    /// enough to benefit. `commit` builds the body of the Commit from the digest roots of the operations.
    ///
    /// # Safety
    /// As [`Link::start`], until this function returns.
    unsafe fn put_pipelined(
        &self,
        _begin: Vec<u8>,
        _ops: Vec<OpCore>,
        _commit: &mut dyn FnMut(&[Option<u64>]) -> Vec<u8>,
        _deadline: Instant,
    ) -> PipelinedPut {
        PipelinedPut::NotTried
    }

    /// Starts a call to the node: Begin, Commit, Load, Release, Attach or Describe. Calls are idempotent, and the link
    /// repeats them when a connection breaks.
    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        wait_mode: WaitMode,
    ) -> Box<dyn Pending>;
}

/// Result of a pipelined put.
#[derive(Debug)]
pub enum PipelinedPut {
    /// Nothing was sent; the caller must put step by step.
    NotTried,
    /// The peer replied to every request.
    Done {
        /// Body of the reply to Begin.
        begun: Vec<u8>,
        /// Result of each operation, in the order of the operations.
        outcomes: Vec<Result<(), ErrorCode>>,
        /// Body of the reply to Commit.
        committed: Vec<u8>,
    },
    /// At least one reply is missing. The records may or may not be published.
    Failed(TransferError),
}

/// A started batch or call. Dropping it aborts it.
pub trait Pending: Send + fmt::Debug {
    /// Waits for the end, at most until the deadline.
    fn wait(&mut self) -> Result<(), TransferError>;

    /// Returns the result if it has ended. Otherwise the waker is woken when polling again may make progress.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransferError>>;

    /// Aborts it. After this returns, no thread accesses the memory.
    fn abort(&mut self);

    /// Returns the outcome of each operation; `None` where it is not known.
    fn outcomes(&self) -> &[Option<Result<(), ErrorCode>>];

    /// Returns the body of the reply to a call.
    fn take_reply(&mut self) -> Vec<u8>;
}

/// Runs operations and waits for them. The error of a single operation is in its [`Op::outcome`].
pub fn run(link: &dyn Link, ops: &mut [Op<'_>], deadline: Instant) -> Result<(), TransferError> {
    let cores = ops.iter().map(|op| op.core().clone()).collect();
    // SAFETY: `ops` borrows the memory exclusively (shared if it is only read) for this call, and all use of the
    // memory ends with `pending`: by `wait`, or by its drop if that panics.
    let mut pending = unsafe { link.start(cores, deadline, WaitMode::Blocking) };
    let result = pending.wait();
    for (op, outcome) in ops.iter_mut().zip(pending.outcomes()) {
        op.set_outcome(*outcome);
    }
    result
}

/// Calls the node and waits for its reply.
pub fn call(
    link: &dyn Link,
    kind: FrameKind,
    body: Vec<u8>,
    deadline: Instant,
) -> Result<Vec<u8>, TransferError> {
    let mut pending = link.start_call(kind, body, deadline, WaitMode::Blocking);
    pending.wait()?;
    Ok(pending.take_reply())
}

/// The engines that a process can use.
#[derive(Debug)]
pub struct Engines {
    engines: Vec<Arc<dyn Engine>>,
    metrics: Arc<Metrics>,
}

impl Engines {
    /// Creates the set of engines. Among equally good ones, the first in `engines` wins.
    pub fn new(engines: Vec<Arc<dyn Engine>>, metrics: Arc<Metrics>) -> Engines {
        Engines { engines, metrics }
    }

    /// Returns the engines that suit `peer`, best first.
    pub fn ranked(&self, peer: &Peer) -> Vec<(Score, Arc<dyn Engine>)> {
        let mut ranked = Vec::new();
        for engine in &self.engines {
            match engine.score(peer) {
                Ok(score) => ranked.push((score, Arc::clone(engine))),
                Err(reason) => {
                    debug!(engine = %engine.kind(), node = %peer.node, %reason, "engine does not suit the peer")
                }
            }
        }
        // Stable: among equals the order of `new` decides.
        ranked.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
        ranked
    }

    /// Connects with the best engine that succeeds.
    pub fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError> {
        let mut last = TransferError::Unsupported { engine: "any", what: "no engine suits this peer" };
        for (score, engine) in self.ranked(peer) {
            match engine.connect(peer, deadline) {
                Ok(link) => {
                    info!(engine = %engine.kind(), node = %peer.node, score = score.0, "link opened");
                    return Ok(link);
                }
                Err(error) => {
                    warn!(engine = %engine.kind(), node = %peer.node, %error, "cannot open link; trying the next engine");
                    self.metrics.connect_failed(engine.kind());
                    last = error;
                }
            }
        }
        Err(last)
    }
}
