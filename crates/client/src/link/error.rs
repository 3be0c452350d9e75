//! [`LinkError`]: why a call as a whole has no answer. What a master says about one key is no error of the link.

use std::io;
use std::sync::Arc;

use moontide_proto::convert::{ConvertError, ResponseContext, Wire};
use moontide_proto::{FrameError, FrameKind, ProtocolVersions, RecordError, v1};
use moontide_types::ErrorCode;

/// Why a call has no answer. Cheap to clone: a broken connection tells it to everybody who waits.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LinkError {
    /// Nobody answers there, or not in time.
    #[error(
        "the master at {address} cannot be reached: {source}; check that it runs, that it serves the framed \
         protocol at this address, and that nothing on the way filters the port"
    )]
    Unreachable {
        /// Where.
        address: Arc<str>,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The connection broke. Whether the request was carried out is not known.
    #[error("the connection to the master at {address} broke; try again: the next call connects anew")]
    Lost {
        /// Where.
        address: Arc<str>,
    },
    /// No answer in time. Whether the request was carried out is not known.
    #[error(
        "no answer from the master at {address} within {deadline_ms} ms; try again with a longer deadline"
    )]
    Deadline {
        /// Where.
        address: Arc<str>,
        /// How long the call waited.
        deadline_ms: u32,
    },
    /// What came is no answer.
    #[error("the master at {address} broke the protocol: {source}; run the same release on both sides")]
    Protocol {
        /// Where.
        address: Arc<str>,
        /// What is wrong with it.
        source: ProtocolError,
    },
    /// The master refused the call as a whole.
    #[error(transparent)]
    Rejected(Arc<Rejection>),
    /// The request breaks a bound; it was not sent.
    #[error("the request cannot be sent: {0}")]
    Request(#[from] ConvertError),
}

impl LinkError {
    /// The stable code.
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

    /// Whether the same call may succeed when repeated, after a pause or elsewhere.
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

/// How a peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Not a frame. Ends the connection.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame that answers nothing we asked. Ends the connection.
    #[error("a frame of kind {found:?}, where {expected:?} is due")]
    Kind {
        /// What was due; `Error` where any answer was.
        expected: FrameKind,
        /// What came.
        found: FrameKind,
    },
    /// A body that means nothing. The connection goes on: frames are told apart by their headers.
    #[error(transparent)]
    Body(#[from] ConvertError),
    /// The HelloAck is none.
    #[error("Hello: {0}")]
    Hello(#[from] RecordError),
    /// The peer chose a version that we do not speak.
    #[error("protocol version {}, this release speaks {} to {}", found.min, ours.min, ours.max)]
    Version {
        /// What it chose.
        found: ProtocolVersions,
        /// What we offered.
        ours: ProtocolVersions,
    },
}

impl ProtocolError {
    /// The stable code. Not the code of the source: that one would blame the caller for what its peer did.
    pub fn code(&self) -> ErrorCode {
        match self {
            ProtocolError::Frame(FrameError::Crc { .. }) => ErrorCode::Corrupt,
            _ => ErrorCode::Unsupported,
        }
    }
}

/// What a master said when it refused a call.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("the master refused the call: {code}{}{text}; {}", if text.is_empty() { "" } else { ": " }, code.hint())]
pub struct Rejection {
    /// Why.
    pub code: ErrorCode,
    /// The same in words, if it sent any.
    pub text: String,
    /// When another attempt makes sense; 0 if it did not say.
    pub retry_after_ms: u32,
    /// With `WrongMaster`: the newer map.
    pub newer_map: Option<v1::GroupMap>,
}

impl Rejection {
    /// From an Error frame.
    pub(super) fn from_frame(code: ErrorCode, text: &[u8]) -> LinkError {
        let text = String::from_utf8_lossy(text).into_owned();
        LinkError::Rejected(Arc::new(Rejection { code, text, retry_after_ms: 0, newer_map: None }))
    }

    /// From the context of an answer without body.
    pub(super) fn from_context(context: &ResponseContext<'_>) -> LinkError {
        LinkError::Rejected(Arc::new(Rejection {
            code: context.code.unwrap_or(ErrorCode::Internal),
            text: String::new(),
            retry_after_ms: context.retry_after_ms,
            newer_map: context.newer_map.as_ref().map(Wire::to_wire),
        }))
    }
}
