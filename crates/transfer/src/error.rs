//! [`TransferError`]: why bytes did not arrive.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moontide_heap::DoorError;
use moontide_proto::{FrameError, FrameKind, OpsError, RecordError};
use moontide_types::{ErrorCode, NodeId};

use crate::ucx::UcxError;

/// Why a batch, or a call, failed as a whole. What failed alone is in the operation's own outcome.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransferError {
    /// The time that the caller gave is over.
    #[error("the peer has not answered within {waited:?}; {hint}", hint = ErrorCode::DeadlineExceeded.hint())]
    Deadline {
        /// How long it was waited for.
        waited: Duration,
    },
    /// No connection is there, and none can be had for now.
    #[error("node {node} cannot be reached: {last}; {hint}", hint = ErrorCode::Unreachable.hint())]
    Unreachable {
        /// Whom it was about.
        node: NodeId,
        /// What came of the last attempt.
        last: Failure,
    },
    /// The node's door stayed shut.
    #[error("node {node} on this host does not let this process in: {why}")]
    NotLetIn {
        /// Which node.
        node: NodeId,
        /// What the door said.
        why: Arc<DoorError>,
    },
    /// The connection ended in the middle, again and again.
    #[error("the connection to node {node} ended in the middle: {last}")]
    Lost {
        /// Whom it was about.
        node: NodeId,
        /// What happened last.
        last: Failure,
    },
    /// The peer refused the request as a whole.
    #[error("the peer refuses: {code}; {hint}", hint = code.hint())]
    Refused {
        /// Why.
        code: ErrorCode,
    },
    /// The engine cannot do this.
    #[error("engine {engine} cannot do this: {what}")]
    Unsupported {
        /// Which engine.
        engine: &'static str,
        /// What was asked.
        what: &'static str,
    },
    /// What was asked cannot be said.
    #[error("this cannot be asked: {source}")]
    Malformed {
        /// Why not.
        source: FrameError,
    },
    /// The caller gave up.
    #[error("the transfer was aborted")]
    Aborted,
}

impl TransferError {
    /// The stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            TransferError::Deadline { .. } => ErrorCode::DeadlineExceeded,
            TransferError::Unreachable { .. } | TransferError::NotLetIn { .. } => ErrorCode::Unreachable,
            TransferError::Lost { last, .. } => last.code(),
            TransferError::Refused { code } => *code,
            TransferError::Unsupported { .. } => ErrorCode::Unsupported,
            TransferError::Malformed { source } => source.code(),
            TransferError::Aborted => ErrorCode::Cancelled,
        }
    }

    /// Whether the same call may succeed later or elsewhere.
    pub fn is_retryable(&self) -> bool {
        self.code().is_retryable()
    }
}

/// Why a connection is no more, or did not come to be.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// The operating system said so.
    #[error("{what} {peer}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// With whom.
        peer: Name,
        /// Its answer.
        source: rustix::io::Errno,
    },
    /// The peer closed it.
    #[error("{peer} closed the connection")]
    Closed {
        /// Who.
        peer: Name,
    },
    /// Bytes were due and none came or went for too long.
    #[error("no byte to or from {peer} for {silent:?}")]
    Stalled {
        /// Who.
        peer: Name,
        /// How long.
        silent: Duration,
    },
    /// What came is not a frame.
    #[error("{peer} sent something that is not a frame: {source}")]
    Frame {
        /// Who.
        peer: Name,
        /// What is wrong with it.
        source: FrameError,
    },
    /// What came does not answer what was asked.
    #[error("{peer} answered what was not asked: a frame of kind {kind:?} for request {request}")]
    Answer {
        /// Who.
        peer: Name,
        /// What came.
        kind: FrameKind,
        /// For which request.
        request: u64,
    },
    /// The greeting failed.
    #[error("{peer} refuses the connection: {code}; {hint}", hint = code.hint())]
    Refused {
        /// Who.
        peer: Name,
        /// Why.
        code: ErrorCode,
    },
    /// The greeting cannot be read.
    #[error("the greeting of {peer}: {source}")]
    Greeting {
        /// Who.
        peer: Name,
        /// What is wrong with it.
        source: RecordError,
    },
    /// Somebody else answers there.
    #[error("{peer} is node {found}, not node {expected}")]
    Node {
        /// Where.
        peer: Name,
        /// Who answers.
        found: NodeId,
        /// Who should.
        expected: NodeId,
    },
    /// The operations of a request cannot be read.
    #[error("the operations of {peer}: {source}")]
    Ops {
        /// Who.
        peer: Name,
        /// What is wrong with them.
        source: OpsError,
    },
    /// Somebody gave up a request in the middle, so what follows on the connection has no meaning.
    #[error("a request to {peer} was abandoned in the middle")]
    Abandoned {
        /// Whom.
        peer: Name,
    },
    /// An earlier attempt failed, and the next one is not due yet.
    #[error("the next attempt to connect is due in {pause:?}")]
    Paused {
        /// In how long.
        pause: Duration,
    },
    /// UCX said so.
    #[error("ucx: {source}")]
    Ucx {
        /// What it said.
        source: UcxError,
    },
    /// The link was closed.
    #[error("the link was closed")]
    Stopped,
}

impl Failure {
    /// The stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            Failure::System { .. } | Failure::Closed { .. } | Failure::Abandoned { .. } => {
                ErrorCode::ConnectionLost
            }
            Failure::Stalled { .. } | Failure::Ucx { .. } => ErrorCode::ConnectionLost,
            Failure::Frame { source, .. } => source.code(),
            Failure::Answer { .. } | Failure::Greeting { .. } => ErrorCode::Unsupported,
            Failure::Refused { code, .. } => *code,
            Failure::Node { .. } => ErrorCode::StaleSession,
            Failure::Ops { source, .. } => source.code(),
            Failure::Paused { .. } => ErrorCode::Unreachable,
            Failure::Stopped => ErrorCode::Cancelled,
        }
    }

    /// As written in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Failure::System { .. } => "system",
            Failure::Closed { .. } => "closed",
            Failure::Stalled { .. } => "stalled",
            Failure::Frame { .. } => "frame",
            Failure::Answer { .. } => "answer",
            Failure::Refused { .. } => "refused",
            Failure::Greeting { .. } => "greeting",
            Failure::Node { .. } => "node",
            Failure::Ops { .. } => "ops",
            Failure::Abandoned { .. } => "abandoned",
            Failure::Paused { .. } => "paused",
            Failure::Ucx { .. } => "ucx",
            Failure::Stopped => "stopped",
        }
    }
}

/// Who is at the other end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// A process at a network address.
    Tcp(SocketAddr),
    /// A process of this host: its process number.
    Local(u32),
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Name::Tcp(address) => write!(f, "{address}"),
            Name::Local(pid) => write!(f, "process {pid}"),
        }
    }
}
