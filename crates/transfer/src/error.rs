//! [`TransferError`] and [`ConnectionError`]: errors of batches, calls and connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moontide_heap::ShmError;
use moontide_proto::{FrameError, FrameKind, RecordError, TransferOpsError};
use moontide_types::{ErrorCode, NodeId};

use crate::ucx::UcxError;

/// Error of a whole batch or call. The error of a single operation is in its own outcome.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransferError {
    /// The deadline of the caller has passed.
    #[error("no reply from the peer within {waited:?}; {hint}", hint = ErrorCode::DeadlineExceeded.hint())]
    Deadline {
        /// Time since the start of the batch or call.
        waited: Duration,
    },
    /// No connection is open, and connecting fails.
    #[error("cannot reach node {node}: {last}; {hint}", hint = ErrorCode::Unreachable.hint())]
    Unreachable {
        /// The peer.
        node: NodeId,
        /// Error of the last attempt.
        last: ConnectionError,
    },
    /// The shm listener of the node rejected this process, or could not be reached.
    #[error("cannot attach to local node {node}: {reason}")]
    AttachRejected {
        /// The local node.
        node: NodeId,
        /// Error of the handshake.
        reason: Arc<ShmError>,
    },
    /// The connection ended before the reply, on every attempt.
    #[error("connection to node {node} lost: {last}")]
    ConnectionLost {
        /// The peer.
        node: NodeId,
        /// Error of the last connection.
        last: ConnectionError,
    },
    /// The peer refused the request as a whole.
    #[error("peer refused the request: {code}; {hint}", hint = code.hint())]
    Refused {
        /// Code in the reply of the peer.
        code: ErrorCode,
    },
    /// The engine does not support the operation.
    #[error("engine {engine} does not support this: {what}")]
    Unsupported {
        /// Name of the engine.
        engine: &'static str,
        /// The unsupported feature.
        what: &'static str,
    },
    /// The request cannot be encoded as a frame.
    #[error("cannot encode the request: {source}")]
    Malformed {
        /// Error of the encoder.
        source: FrameError,
    },
    /// The caller aborted the transfer.
    #[error("transfer was aborted")]
    Aborted,
}

impl TransferError {
    /// Returns the stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            TransferError::Deadline { .. } => ErrorCode::DeadlineExceeded,
            TransferError::Unreachable { .. } | TransferError::AttachRejected { .. } => {
                ErrorCode::Unreachable
            }
            TransferError::ConnectionLost { last, .. } => last.code(),
            TransferError::Refused { code } => *code,
            TransferError::Unsupported { .. } => ErrorCode::Unsupported,
            TransferError::Malformed { source } => source.code(),
            TransferError::Aborted => ErrorCode::Cancelled,
        }
    }

    /// Returns whether the same call may succeed later or at another node.
    pub fn is_retryable(&self) -> bool {
        self.code().is_retryable()
    }
}

/// Reason why a connection ended or could not be opened.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConnectionError {
    /// A system call failed.
    #[error("{what} {peer}: {source}")]
    System {
        /// Operation that failed, as a verb before the name of the peer.
        what: &'static str,
        /// The other end of the connection.
        peer: PeerName,
        /// Error of the system call.
        source: rustix::io::Errno,
    },
    /// The peer closed the connection.
    #[error("{peer} closed the connection")]
    Closed {
        /// The other end of the connection.
        peer: PeerName,
    },
    /// Bytes were expected and none was received or sent for too long.
    #[error("no byte to or from {peer} for {silent:?}")]
    Stalled {
        /// The other end of the connection.
        peer: PeerName,
        /// Time without progress.
        silent: Duration,
    },
    /// The received bytes are not a valid frame.
    #[error("invalid frame from {peer}: {source}")]
    Frame {
        /// The other end of the connection.
        peer: PeerName,
        /// Error of the decoder.
        source: FrameError,
    },
    /// The received frame is not the reply to a request in flight.
    #[error("unexpected reply from {peer}: frame of kind {kind:?} for request {request}")]
    UnexpectedReply {
        /// The other end of the connection.
        peer: PeerName,
        /// Kind of the received frame.
        kind: FrameKind,
        /// Request id of the received frame.
        request: u64,
    },
    /// The peer rejected the handshake.
    #[error("{peer} refused the connection: {code}; {hint}", hint = code.hint())]
    HandshakeRefused {
        /// The other end of the connection.
        peer: PeerName,
        /// Code in the reply of the peer.
        code: ErrorCode,
    },
    /// The handshake message of the peer is malformed.
    #[error("invalid handshake from {peer}: {source}")]
    Handshake {
        /// The other end of the connection.
        peer: PeerName,
        /// Error of the decoder.
        source: RecordError,
    },
    /// TLS failed: the peer has no valid certificate, refuses that of this process, does not speak TLS, or bytes were changed.
    #[error("TLS with {peer}: {reason}; {hint}", hint = ErrorCode::Unauthenticated.hint())]
    Tls {
        /// The other end of the connection.
        peer: PeerName,
        /// Error of TLS.
        reason: Arc<str>,
    },
    /// Another node listens at the address.
    #[error("{peer} is node {found}, not node {expected}")]
    WrongNode {
        /// The other end of the connection.
        peer: PeerName,
        /// Node that replied.
        found: NodeId,
        /// Node that was expected.
        expected: NodeId,
    },
    /// The operations of a request are malformed.
    #[error("invalid operations from {peer}: {source}")]
    Ops {
        /// The other end of the connection.
        peer: PeerName,
        /// Error of the decoder.
        source: TransferOpsError,
    },
    /// A request was abandoned while it was sent or received, so the rest of the stream cannot be parsed.
    #[error("a request to {peer} was abandoned before it was complete")]
    Abandoned {
        /// The other end of the connection.
        peer: PeerName,
    },
    /// An earlier attempt failed, and the backoff is not over.
    #[error("next connection attempt in {pause:?}")]
    BackingOff {
        /// Remaining backoff.
        pause: Duration,
    },
    /// A UCX call failed.
    #[error("ucx: {source}")]
    Ucx {
        /// Error of UCX.
        source: UcxError,
    },
    /// The link or server was stopped.
    #[error("link was closed")]
    Stopped,
}

impl ConnectionError {
    /// Returns the stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            ConnectionError::System { .. }
            | ConnectionError::Closed { .. }
            | ConnectionError::Abandoned { .. } => ErrorCode::ConnectionLost,
            ConnectionError::Stalled { .. } | ConnectionError::Ucx { .. } => ErrorCode::ConnectionLost,
            ConnectionError::Frame { source, .. } => source.code(),
            ConnectionError::UnexpectedReply { .. } | ConnectionError::Handshake { .. } => {
                ErrorCode::Unsupported
            }
            ConnectionError::HandshakeRefused { code, .. } => *code,
            ConnectionError::Tls { .. } => ErrorCode::Unauthenticated,
            ConnectionError::WrongNode { .. } => ErrorCode::StaleSession,
            ConnectionError::Ops { source, .. } => source.code(),
            ConnectionError::BackingOff { .. } => ErrorCode::Unreachable,
            ConnectionError::Stopped => ErrorCode::Cancelled,
        }
    }

    /// Returns the name used in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            ConnectionError::System { .. } => "system",
            ConnectionError::Closed { .. } => "closed",
            ConnectionError::Stalled { .. } => "stalled",
            ConnectionError::Frame { .. } => "frame",
            ConnectionError::UnexpectedReply { .. } => "unexpected_reply",
            ConnectionError::HandshakeRefused { .. } => "handshake_refused",
            ConnectionError::Handshake { .. } => "handshake",
            ConnectionError::Tls { .. } => "tls",
            ConnectionError::WrongNode { .. } => "wrong_node",
            ConnectionError::Ops { .. } => "ops",
            ConnectionError::Abandoned { .. } => "abandoned",
            ConnectionError::BackingOff { .. } => "backing_off",
            ConnectionError::Ucx { .. } => "ucx",
            ConnectionError::Stopped => "stopped",
        }
    }
}

/// The other end of a stream, as shown in errors and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerName {
    /// Network address of a process.
    Tcp(SocketAddr),
    /// Process id of a process on this host.
    Local(u32),
}

impl std::fmt::Display for PeerName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PeerName::Tcp(address) => write!(f, "{address}"),
            PeerName::Local(pid) => write!(f, "process {pid}"),
        }
    }
}
