//! [`StoreError`]: why a call on the store failed. That there is no such object is not an error.

use std::sync::Arc;

use moontide_heap::DeviceError;
use moontide_proto::convert::ConvertError;
use moontide_transfer::TransferError;
use moontide_types::{ErrorCode, KeyError, NodeId};

use crate::link::LinkError;

/// Why a call on the store failed. Cheap to clone: one failure is told to everybody who waits for it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The master did not answer, or refused.
    #[error(transparent)]
    Master(#[from] LinkError),
    /// The master cannot be reached at all.
    #[error(
        "no master answers at {address}: {why}; start one with `moontide master` (or `moontide dev`), or name its gRPC address"
    )]
    NoMaster {
        /// Where.
        address: String,
        /// What happened.
        why: Arc<str>,
    },
    /// What the master said about a key.
    #[error("{code}; {hint}", hint = code.hint())]
    Refused {
        /// Why.
        code: ErrorCode,
    },
    /// A node did not give or take the bytes.
    #[error("node {node}: {source}")]
    Node {
        /// Which one.
        node: NodeId,
        /// Why.
        source: TransferError,
    },
    /// A node that the master names is not known to it any more.
    #[error("node {node} is named by the master, but it is not registered; it may be starting again: retry")]
    UnknownNode {
        /// Which one.
        node: NodeId,
    },
    /// The bytes do not match their digest, in any replica. They were not returned.
    #[error(
        "the object's bytes at {nodes:?} do not match their digest and were not returned; remove the object and put it again"
    )]
    Corrupt {
        /// Where they were read.
        nodes: Vec<NodeId>,
    },
    /// A replica needs a node of its own.
    #[error("{wanted} copies need {wanted} nodes, and {nodes} are registered; start more with `moontide node`")]
    TooFewNodes {
        /// How many are needed.
        wanted: usize,
        /// How many there are.
        nodes: usize,
    },
    /// The time is over.
    #[error("not done within {deadline_ms} ms; {hint}", hint = ErrorCode::DeadlineExceeded.hint())]
    Deadline {
        /// How long it was tried.
        deadline_ms: u64,
    },
    /// The caller's memory is too small.
    #[error("the object has {len} bytes, the buffer {room}; pass a buffer of at least {len}")]
    BufferTooSmall {
        /// The object's length.
        len: u64,
        /// The buffer's.
        room: usize,
    },
    /// The range is not in the object.
    #[error("bytes {offset} to {end} of an object that has {len}")]
    Range {
        /// First byte.
        offset: u64,
        /// Behind the last.
        end: u64,
        /// The object's length.
        len: u64,
    },
    /// An argument makes no sense.
    #[error("{what} must be {rule}")]
    Argument {
        /// Which one.
        what: &'static str,
        /// What it must be.
        rule: &'static str,
    },
    /// The key or the tenant breaks its rules.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The master's answer makes no sense.
    #[error("the master's answer makes no sense: {0}; run the same release on both sides")]
    Answer(ConvertError),
    /// As many calls are under way as may be.
    #[error("{limit} calls wait already; compute instead, or let more of them wait (`waiting`)")]
    Overloaded {
        /// How many may wait.
        limit: usize,
    },
    /// A device, or its driver.
    #[error(transparent)]
    Device(Arc<DeviceError>),
    /// Something of the operating system.
    #[error("{what}: {why}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What came of it.
        why: Arc<str>,
    },
}

impl From<DeviceError> for StoreError {
    fn from(error: DeviceError) -> StoreError {
        StoreError::Device(Arc::new(error))
    }
}

impl StoreError {
    /// The stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            StoreError::Master(error) => error.code(),
            StoreError::NoMaster { .. } | StoreError::UnknownNode { .. } => ErrorCode::Unreachable,
            StoreError::Refused { code } => *code,
            StoreError::Node { source, .. } => source.code(),
            StoreError::Corrupt { .. } => ErrorCode::Corrupt,
            StoreError::TooFewNodes { .. } => ErrorCode::NoSpace,
            StoreError::Deadline { .. } => ErrorCode::DeadlineExceeded,
            StoreError::BufferTooSmall { .. } | StoreError::Range { .. } | StoreError::Argument { .. } => {
                ErrorCode::InvalidArgument
            }
            StoreError::Key(_) => ErrorCode::InvalidArgument,
            StoreError::Answer(_) => ErrorCode::Unsupported,
            StoreError::Overloaded { .. } => ErrorCode::Busy,
            StoreError::Device(_) => ErrorCode::DeviceError,
            StoreError::System { .. } => ErrorCode::Internal,
        }
    }

    /// Whether the same call may succeed when repeated.
    pub fn is_retryable(&self) -> bool {
        self.code().is_retryable()
    }

    pub(crate) fn refused(code: ErrorCode) -> StoreError {
        StoreError::Refused { code }
    }

    pub(crate) fn system(what: &'static str, why: impl std::fmt::Display) -> StoreError {
        StoreError::System { what, why: why.to_string().into() }
    }
}
