//! [`StoreError`]: failure of a call on the store. A missing object is not an error.

use std::sync::Arc;

use moontide_proto::convert::ConvertError;
use moontide_settings::InvalidConfig;
use moontide_symmetric::DeviceError;
use moontide_transfer::TransferError;
use moontide_types::{ErrorCode, KeyError, NodeId, Spread};

use crate::link::LinkError;

/// Failure of a call on the store. Cheap to clone: all callers that share a fetch get the same error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The master did not respond, or refused the call.
    #[error(transparent)]
    Master(#[from] LinkError),
    /// No master can be reached.
    #[error(
        "no master responds at {address}: {reason}; start one with `moontide master` (or `moontide dev`), or check its gRPC address"
    )]
    NoMaster {
        /// Configured addresses.
        address: String,
        /// Last failure.
        reason: Arc<str>,
    },
    /// The certificate files of this process cannot be used.
    #[error("{reason}")]
    Credentials {
        /// Which file, and why.
        reason: Arc<str>,
    },
    /// The certificate of this process gives no right to the call.
    #[error("{reason}")]
    Denied {
        /// Who may make the call.
        reason: Arc<str>,
    },
    /// The master refused the operation on a key.
    #[error("{code}; {hint}", hint = code.hint())]
    Refused {
        /// Code returned by the master.
        code: ErrorCode,
    },
    /// A transfer from or to a node failed.
    #[error("node {node}: {source}")]
    Node {
        /// Node of the transfer.
        node: NodeId,
        /// Failure of the transfer.
        source: TransferError,
    },
    /// The master returned a location on a node that is not in its own list of nodes.
    #[error("node {node} was returned by the master, but is not registered; it may be restarting: retry")]
    UnknownNode {
        /// Node of the location.
        node: NodeId,
    },
    /// The bytes of all replicas mismatch their digest. They were not returned.
    #[error(
        "the object's bytes at {nodes:?} do not match their digest and were not returned; remove the object and put it again"
    )]
    Corrupt {
        /// Nodes that returned corrupt bytes.
        nodes: Vec<NodeId>,
    },
    /// Fewer nodes are registered than replicas are required.
    #[error(
        "{wanted} replicas need {wanted} nodes, but {nodes} are registered; start more with `moontide node`"
    )]
    TooFewNodes {
        /// Required number of nodes.
        wanted: usize,
        /// Number of registered nodes.
        nodes: usize,
    },
    /// Fewer different hosts, racks or zones have nodes than replicas are required.
    #[error(
        "{wanted} replicas in different {spread}s are required, but the registered nodes are in {domains}; start nodes in others, with `--{spread}`, or lower `replicas_min`"
    )]
    TooFewDomains {
        /// What the replicas must not share.
        spread: Spread,
        /// Required number of hosts, racks or zones.
        wanted: usize,
        /// Number of those that have nodes.
        domains: usize,
    },
    /// The object is larger than the memory that its group has on all nodes.
    #[error(
        "object is too large for the memory of its group: {largest} bytes fit; split the object, add memory to the nodes, or create the cluster with fewer groups"
    )]
    ObjectTooLarge {
        /// Length of an object that fits, in bytes.
        largest: u64,
    },
    /// The call timed out.
    #[error("timed out after {deadline_ms} ms; {hint}", hint = ErrorCode::DeadlineExceeded.hint())]
    Deadline {
        /// Timeout of the call, in milliseconds.
        deadline_ms: u64,
    },
    /// The caller's buffer is shorter than the object.
    #[error("object has {len} bytes, but the buffer only {room}; pass a buffer of at least {len} bytes")]
    BufferTooSmall {
        /// Length of the object, in bytes.
        len: u64,
        /// Length of the buffer, in bytes.
        room: usize,
    },
    /// The range exceeds the object.
    #[error("bytes {offset} to {end} are out of range: the object has {len} bytes")]
    Range {
        /// First byte of the range.
        offset: u64,
        /// End of the range, exclusive.
        end: u64,
        /// Length of the object, in bytes.
        len: u64,
    },
    /// An argument is invalid.
    #[error("{what} must be {rule}")]
    InvalidArgument {
        /// Name of the argument.
        what: &'static str,
        /// Allowed values.
        rule: &'static str,
    },
    /// Settings of the store are invalid.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// The key or the tenant is invalid.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The response of the master cannot be parsed.
    #[error("invalid response from the master: {0}; run the same release on both sides")]
    InvalidResponse(ConvertError),
    /// The queue of calls is full.
    #[error("{limit} calls are queued already; compute instead, or raise `async_queue_max`")]
    Overloaded {
        /// Value of `async_queue_max`.
        limit: usize,
    },
    /// A device or its driver failed.
    #[error(transparent)]
    Device(Arc<DeviceError>),
    /// A call of the operating system failed.
    #[error("{what}: {reason}")]
    System {
        /// Operation that failed.
        what: &'static str,
        /// Reason.
        reason: Arc<str>,
    },
}

impl From<DeviceError> for StoreError {
    fn from(error: DeviceError) -> StoreError {
        StoreError::Device(Arc::new(error))
    }
}

impl StoreError {
    /// Returns the stable code of the error.
    pub fn code(&self) -> ErrorCode {
        match self {
            StoreError::Master(error) => error.code(),
            StoreError::NoMaster { .. } | StoreError::UnknownNode { .. } => ErrorCode::Unreachable,
            StoreError::Denied { .. } => ErrorCode::PermissionDenied,
            StoreError::Credentials { .. } => ErrorCode::InvalidArgument,
            StoreError::Refused { code } => *code,
            StoreError::Node { source, .. } => source.code(),
            StoreError::Corrupt { .. } => ErrorCode::Corrupt,
            StoreError::TooFewNodes { .. } | StoreError::TooFewDomains { .. } => ErrorCode::NoSpace,
            StoreError::ObjectTooLarge { .. } => ErrorCode::TooLarge,
            StoreError::Deadline { .. } => ErrorCode::DeadlineExceeded,
            StoreError::BufferTooSmall { .. }
            | StoreError::Range { .. }
            | StoreError::InvalidArgument { .. } => ErrorCode::InvalidArgument,
            StoreError::Key(_) | StoreError::Config(_) => ErrorCode::InvalidArgument,
            StoreError::InvalidResponse(_) => ErrorCode::Unsupported,
            StoreError::Overloaded { .. } => ErrorCode::Busy,
            StoreError::Device(_) => ErrorCode::DeviceError,
            StoreError::System { .. } => ErrorCode::Internal,
        }
    }

    /// Returns whether the same call may succeed when repeated.
    pub fn is_retryable(&self) -> bool {
        self.code().is_retryable()
    }

    pub(crate) fn refused(code: ErrorCode) -> StoreError {
        StoreError::Refused { code }
    }

    pub(crate) fn system(what: &'static str, reason: impl std::fmt::Display) -> StoreError {
        StoreError::System { what, reason: reason.to_string().into() }
    }
}
