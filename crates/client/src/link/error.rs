//! [`LinkError`]: failure of a whole call. Error codes of single keys are not errors of the link.

use std::io;
use std::sync::Arc;

use moontide_proto::convert::{ConvertError, ResponseContext, Wire};
use moontide_proto::{FrameError, FrameKind, ProtocolVersions, RecordError, v1};
use moontide_types::ErrorCode;

/// Failure of a whole call. Cheap to clone: all callers on a broken connection get the same error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LinkError {
    /// The master does not accept a connection, or not in time.
    #[error(
        "master at {address} is unreachable: {source}; check that it runs, that it serves the framed \
         protocol at this address, and that no firewall blocks the port"
    )]
    Unreachable {
        /// Address of the master.
        address: Arc<str>,
        /// I/O error of the attempt.
        source: Arc<io::Error>,
    },
    /// The connection broke. The master may or may not have executed the request.
    #[error("connection to the master at {address} was lost; retry: the next call reconnects")]
    Lost {
        /// Address of the master.
        address: Arc<str>,
    },
    /// The call timed out. The master may or may not have executed the request.
    #[error("no response from the master at {address} within {deadline_ms} ms; retry with a longer timeout")]
    Deadline {
        /// Address of the master.
        address: Arc<str>,
        /// Timeout of the call, in milliseconds.
        deadline_ms: u32,
    },
    /// The master sent an invalid reply.
    #[error("master at {address} violated the protocol: {source}; run the same release on both sides")]
    Protocol {
        /// Address of the master.
        address: Arc<str>,
        /// Violation.
        source: ProtocolError,
    },
    /// The master refused the whole call.
    #[error(transparent)]
    Rejected(Arc<Rejection>),
    /// The request exceeds a limit; it was not sent.
    #[error("invalid request, not sent: {0}")]
    Request(#[from] ConvertError),
}

impl LinkError {
    /// Returns the stable code of the error.
    pub fn code(&self) -> ErrorCode {
        match self {
            LinkError::Unreachable { .. } => ErrorCode::Unreachable,
            LinkError::Lost { .. } => ErrorCode::ConnectionLost,
            LinkError::Deadline { .. } => ErrorCode::DeadlineExceeded,
            LinkError::Protocol { source, .. } => source.code(),
            LinkError::Rejected(rejection) => rejection.code,
            LinkError::Request(source) => source.code(),
        }
    }

    /// Returns whether the same call may succeed when repeated, after a pause or at another master.
    pub fn is_retryable(&self) -> bool {
        self.code().is_retryable()
    }

    pub(super) fn unreachable(address: &Arc<str>, source: io::Error) -> LinkError {
        LinkError::Unreachable { address: address.clone(), source: Arc::new(source) }
    }

    pub(super) fn lost(address: &Arc<str>) -> LinkError {
        LinkError::Lost { address: address.clone() }
    }

    pub(super) fn protocol(address: &Arc<str>, source: impl Into<ProtocolError>) -> LinkError {
        LinkError::Protocol { address: address.clone(), source: source.into() }
    }
}

/// Protocol violation of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Invalid frame. Ends the connection.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// Frame of an unexpected kind. Ends the connection.
    #[error("frame of kind {found:?} instead of {expected:?}")]
    Kind {
        /// Expected kind; `Error` where any reply was allowed.
        expected: FrameKind,
        /// Received kind.
        found: FrameKind,
    },
    /// Invalid body. The connection stays usable: headers delimit the frames.
    #[error(transparent)]
    Body(#[from] ConvertError),
    /// Invalid HelloAck.
    #[error("Hello: {0}")]
    Hello(#[from] RecordError),
    /// The peer chose a protocol version that this release does not support.
    #[error("protocol version {} is not supported; this release supports {} to {}", found.min, ours.min, ours.max)]
    Version {
        /// Version chosen by the peer.
        found: ProtocolVersions,
        /// Versions offered by this release.
        ours: ProtocolVersions,
    },
}

impl ProtocolError {
    /// Returns the stable code. Not the code of the source: that one would blame the caller for an error of the peer.
    pub fn code(&self) -> ErrorCode {
        match self {
            ProtocolError::Frame(FrameError::Crc { .. }) => ErrorCode::Corrupt,
            _ => ErrorCode::Unsupported,
        }
    }
}

/// Refusal of a call by a master.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("master refused the call: {code}{}{text}; {}", if text.is_empty() { "" } else { ": " }, code.hint())]
pub struct Rejection {
    /// Error code.
    pub code: ErrorCode,
    /// Message of the master; may be empty.
    pub text: String,
    /// Milliseconds until a retry makes sense; 0 if the master gave none.
    pub retry_after_ms: u32,
    /// With `WrongMaster`: the newer group map.
    pub newer_map: Option<v1::GroupMap>,
}

impl Rejection {
    /// Creates the error of an Error frame.
    pub(super) fn from_frame(code: ErrorCode, text: &[u8]) -> LinkError {
        let text = String::from_utf8_lossy(text).into_owned();
        LinkError::Rejected(Arc::new(Rejection { code, text, retry_after_ms: 0, newer_map: None }))
    }

    /// Creates the error of a response context without body.
    pub(super) fn from_context(context: &ResponseContext<'_>) -> LinkError {
        LinkError::Rejected(Arc::new(Rejection {
            code: context.code.unwrap_or(ErrorCode::Internal),
            text: String::new(),
            retry_after_ms: context.retry_after_ms,
            newer_map: context.newer_map.as_ref().map(Wire::to_wire),
        }))
    }
}
