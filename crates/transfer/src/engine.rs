//! [`Engine`] and [`Link`]: one way to move bytes, and one peer reached by it. [`Engines`] chooses.
//!
//! Every engine says how well it suits a peer ([`Engine::score`]); the best one that gets a connection is taken. What
//! was chosen, and why others were not, is told once per link: an `info` line with the field `engine`, and the metric
//! `moontide_transfer_links{engine=…}`.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use moontide_heap::LocalHeap;
use moontide_proto::FrameKind;
use moontide_types::{ErrorCode, NodeId};
use tracing::{debug, info, warn};

use crate::error::TransferError;
use crate::metrics::Metrics;
use crate::op::{Op, OpCore};

/// A way to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// Mapped memory of a node on the same host.
    Shm,
    /// UCX: one-sided over RDMA.
    Ucx,
    /// Frames over TCP.
    Tcp,
}

impl EngineKind {
    /// As written in addresses, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Shm => "shm",
            EngineKind::Ucx => "ucx",
            EngineKind::Tcp => "tcp",
        }
    }

    /// The engine of this name.
    pub fn named(name: &str) -> Option<EngineKind> {
        [EngineKind::Shm, EngineKind::Ucx, EngineKind::Tcp].into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A node as others can reach it: what it announces when it registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Who it is.
    pub node: NodeId,
    /// Where it listens, by engine: for `tcp` an IP address and port, one per rail; for `shm` what
    /// [`shm::address`](crate::shm::address) gives.
    pub addresses: Vec<(EngineKind, String)>,
}

impl Peer {
    /// Addresses of one engine.
    pub fn addresses_of(&self, kind: EngineKind) -> impl Iterator<Item = &str> {
        self.addresses.iter().filter(move |(of, _)| *of == kind).map(|(_, address)| address.as_str())
    }
}

/// How well an engine suits a peer; more is better. The numbers only order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score(pub u32);

impl Score {
    /// No copy over a wire: memory that both map.
    pub const SAME_MEMORY: Score = Score(300);
    /// The network card moves the bytes.
    pub const ONE_SIDED: Score = Score(200);
    /// The kernel moves the bytes.
    pub const STREAM: Score = Score(100);
}

/// Whether the caller's thread waits for what it starts. A thread that waits does the work itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// It will call [`Pending::wait`] right away.
    Here,
    /// It will poll; threads of the engine do the work.
    Elsewhere,
}

/// A way to move bytes.
pub trait Engine: Send + Sync + fmt::Debug {
    /// Which one.
    fn kind(&self) -> EngineKind;

    /// How well it suits this peer; why it does not.
    fn score(&self, peer: &Peer) -> Result<Score, NotSuited>;

    /// Connects. Blocks until `deadline` at most.
    fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError>;
}

/// Why an engine cannot be used for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotSuited {
    /// The peer does not offer it.
    #[error("the peer has no address for it")]
    NoAddress,
    /// None of the peer's addresses can be read.
    #[error("none of the peer's addresses can be read")]
    BadAddress,
    /// Only for processes of one host.
    #[error("the peer is on another host")]
    OtherHost,
    /// The library is not there, or not one that can be used.
    #[error("its library is absent")]
    Absent,
}

/// One peer, reached by one engine. Shared by everybody in the process.
pub trait Link: Send + Sync + fmt::Debug {
    /// By which engine.
    fn engine(&self) -> EngineKind;

    /// Whom.
    fn node(&self) -> NodeId;

    /// The peer's memory, where it is mapped: objects in it can be read in place.
    fn local(&self) -> Option<&Arc<LocalHeap>> {
        None
    }

    /// Starts operations.
    ///
    /// # Safety
    /// The memory behind the operations, and the places for their digests, stay valid until what is returned has
    /// finished, was aborted, or was dropped; until then nobody else writes them, nor reads those that are filled.
    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, waiting: Waiting) -> Box<dyn Pending>;

    /// Opens slots, fills and publishes them without waiting in between, if the engine can and the records are small
    /// enough for that to matter. `commit` makes the body of the Commit from the roots of the operations.
    ///
    /// # Safety
    /// As [`Link::start`], until this returns.
    unsafe fn put_in_one_go(
        &self,
        _begin: Vec<u8>,
        _ops: Vec<OpCore>,
        _commit: &mut dyn FnMut(&[Option<u64>]) -> Vec<u8>,
        _deadline: Instant,
    ) -> OneGo {
        OneGo::NotTried
    }

    /// Starts a call to the node: Begin, Commit, Load, Release or Attach. They can be repeated without harm, and are when a
    /// connection breaks.
    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        waiting: Waiting,
    ) -> Box<dyn Pending>;
}

/// What became of a put in one go.
#[derive(Debug)]
pub enum OneGo {
    /// Nothing was sent: do it step by step.
    NotTried,
    /// Everything was answered.
    Done {
        /// The body of the answer to Begin.
        begun: Vec<u8>,
        /// How each operation went.
        outcomes: Vec<Result<(), ErrorCode>>,
        /// The body of the answer to Commit.
        committed: Vec<u8>,
    },
    /// Something was not answered. The records may or may not be published.
    Failed(TransferError),
}

/// Something that was started. Dropping it aborts it.
pub trait Pending: Send + fmt::Debug {
    /// Waits, at most until the deadline.
    fn wait(&mut self) -> Result<(), TransferError>;

    /// Whether it has finished; if not, the waker is woken when there is something to look at.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransferError>>;

    /// Gives it up. When this returns no thread touches the memory any more.
    fn abort(&mut self);

    /// What became of each operation; `None` where that is not known.
    fn outcomes(&self) -> &[Option<Result<(), ErrorCode>>];

    /// The body of the answer to a call.
    fn take_reply(&mut self) -> Vec<u8>;
}

/// Runs operations and waits for them. What failed alone is in the operation's [`Op::outcome`].
pub fn run(link: &dyn Link, ops: &mut [Op<'_>], deadline: Instant) -> Result<(), TransferError> {
    let cores = ops.iter().map(|op| op.core().clone()).collect();
    // SAFETY: `ops` borrows the memory exclusively (shared, what is only read) for this call, and the end of
    // `pending` is the end of all use of it: by `wait`, or by the drop if that panics.
    let mut pending = unsafe { link.start(cores, deadline, Waiting::Here) };
    let result = pending.wait();
    for (op, outcome) in ops.iter_mut().zip(pending.outcomes()) {
        op.set_outcome(*outcome);
    }
    result
}

/// Calls the node and waits for its answer.
pub fn call(
    link: &dyn Link,
    kind: FrameKind,
    body: Vec<u8>,
    deadline: Instant,
) -> Result<Vec<u8>, TransferError> {
    let mut pending = link.start_call(kind, body, deadline, Waiting::Here);
    pending.wait()?;
    Ok(pending.take_reply())
}

/// The engines that this process has.
#[derive(Debug)]
pub struct Engines {
    engines: Vec<Arc<dyn Engine>>,
    metrics: Arc<Metrics>,
}

impl Engines {
    /// These.
    pub fn new(engines: Vec<Arc<dyn Engine>>, metrics: Arc<Metrics>) -> Engines {
        Engines { engines, metrics }
    }

    /// The engines that suit a peer, best first.
    pub fn ranked(&self, peer: &Peer) -> Vec<(Score, Arc<dyn Engine>)> {
        let mut ranked = Vec::new();
        for engine in &self.engines {
            match engine.score(peer) {
                Ok(score) => ranked.push((score, Arc::clone(engine))),
                Err(why) => {
                    debug!(engine = %engine.kind(), node = peer.node.0, %why, "engine does not suit the peer")
                }
            }
        }
        // Stable: among equals the order of `new` decides.
        ranked.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
        ranked
    }

    /// Connects by the best engine that gets through.
    pub fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError> {
        let mut last = TransferError::Unsupported { engine: "any", what: "no engine suits this peer" };
        for (score, engine) in self.ranked(peer) {
            match engine.connect(peer, deadline) {
                Ok(link) => {
                    info!(engine = %engine.kind(), node = peer.node.0, score = score.0, "link opened");
                    return Ok(link);
                }
                Err(error) => {
                    warn!(engine = %engine.kind(), node = peer.node.0, %error, "link not opened; trying the next engine");
                    self.metrics.connect_failed(engine.kind());
                    last = error;
                }
            }
        }
        Err(last)
    }
}
