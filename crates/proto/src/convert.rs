//! Conversion between messages and plain structs, with every limit checked in one place.
//!
//! [`decode`] converts bytes to a message and counts elements first. A decoded message is only known to be
//! well-formed protobuf. [`Wire::from_wire`] converts it to a struct of `moontide_types` values, borrowed from the
//! message where that saves a copy, or returns an error that names the field. It is total: it never panics, and its
//! allocations are a small multiple of the message. Unknown enum values are errors, never defaults.
//!
//! Invariant: `from_wire(to_wire(x)) = x`.
//!
//! Reading order: [`RequestContext`] and [`ResponseContext`] of every call, the hot calls (lookup, put, remove), the
//! data plane of the node, the node session, then the calls of operators.

mod admin;
mod bounded;
mod check;
mod context;
mod data;
mod handoff;
mod invalidations;
mod lookup;
mod nodes;
mod objects;
mod outcomes;
mod put;
mod report;
mod response;
mod session;

pub use admin::{
    ClusterInfo, DrainNodeRequest, DrainSegmentRequest, EvictRequest, GetClusterInfoResponse, GetJobRequest,
    GetJobResponse, GetTenantsRequest, IdKeySecret, JobState, JobStatus, ListKeysRequest,
    ListSegmentsRequest, Pagination, QueryKeysRequest, RemoveAllRequest, RemoveByPrefixRequest,
    RemoveByRegexRequest, SegmentRef, SetTenantQuotaRequest,
};
pub use bounded::{Bounded, Repeated, check_counts, decode, encode};
pub use context::{CallerId, GroupMap, MasterEntry, RequestContext, ResponseContext};
pub use data::{
    AttachReply, AttachRequest, AttachedRegion, BeginRequest, CommitRequest, DescribeReply, LoadReply,
    LoadRequest, SlotOutcomes,
};
pub use handoff::{HandoffGroupRequest, KnownSegment};
pub use invalidations::{
    GroupInvalidations, InvalidationBatch, InvalidationCursor, PollInvalidationsRequest,
    PollInvalidationsResponse,
};
pub use lookup::{
    ExistRequest, ExistResponse, GetReplicaListRequest, GetReplicaListResponse, PrefetchRequest, Presence,
    RemoveRequest, Replicas, SetPinRequest, TouchRequest,
};
pub use nodes::{GetNodesResponse, NodeDetail, NodeDirectory};
pub use objects::{
    AttributeSection, AttributeSections, ObjectFields, ObjectList, ObjectListBuilder, ObjectListKind,
};
pub use outcomes::{Outcomes, OutcomesResponse};
pub use put::{PutConfig, PutEndRequest, PutRevokeRequest, PutStartRequest, PutStartResponse, Reservations};
pub use report::{OffloadNotice, ReportChunk, ReportEnd, ReportKind};
pub use response::{Response, ResponseBody};
pub use session::{
    Address, Commands, DiskState, DiskStatus, FlushStatus, Heartbeat, MasterMessage, MasterMessageBody,
    MountResult, MountResults, MountSegmentsRequest, MountSegmentsResponse, NodeMessage, NodeMessageBody,
    NumberedKey, OpenSessionRequest, OpenSessionResponse, Pressure, ReadCounters, RemoteReads, SegmentSpec,
    SegmentState, SegmentStatus, SessionGrant, SyncMark, Topology, TouchBitmap, UnmountSegmentsRequest,
};

use moontide_types::record::TrailerError;
use moontide_types::{BoundExceeded, ErrorCode, KeyError, UnknownErrorCode};

use crate::packed::PackedError;

/// A plain struct and the message that carries it.
pub trait Wire<'a>: Sized {
    /// Protobuf message.
    type Message: Bounded;

    /// Checks and converts a message; borrows from it where possible.
    fn from_wire(message: &'a Self::Message) -> Result<Self, ConvertError>;

    /// Converts the struct to a message.
    fn to_wire(&self) -> Self::Message;
}

/// Error of the conversion of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// The bytes are no protobuf message of this type.
    #[error("bytes are no valid message of this type")]
    Malformed,
    /// A required field is missing.
    #[error("{field} is missing")]
    Missing {
        /// Name of the field.
        field: &'static str,
    },
    /// A value, length or count exceeds a documented limit.
    #[error("{field} is {found}, at most {max} is allowed")]
    TooLarge {
        /// Name of the field.
        field: &'static str,
        /// Value, length or count.
        found: u64,
        /// Maximum.
        max: u64,
    },
    /// A value, length or count is too small.
    #[error("{field} is {found}, at least {min} is required")]
    TooSmall {
        /// Name of the field.
        field: &'static str,
        /// Value, length or count.
        found: u64,
        /// Minimum.
        min: u64,
    },
    /// The number of elements does not match the rest of the message.
    #[error("{field} has {found} elements, expected {expected}")]
    Count {
        /// Name of the field.
        field: &'static str,
        /// Number of elements.
        found: usize,
        /// Expected number of elements.
        expected: usize,
    },
    /// An enum value is unknown to this release.
    #[error("{field} has unknown value {found}")]
    Unknown {
        /// Name of the field.
        field: &'static str,
        /// Unknown value.
        found: i64,
    },
    /// Two fields of the message contradict each other.
    #[error("{field}: {rule} does not hold")]
    Relation {
        /// Name of the field.
        field: &'static str,
        /// Rule that does not hold.
        rule: &'static str,
    },
    /// A packed array is invalid.
    #[error("{field}: {source}")]
    Packed {
        /// Name of the field.
        field: &'static str,
        /// Error of the array.
        source: PackedError,
    },
    /// Attributes of an object are invalid.
    #[error("{field}: {source}")]
    Attributes {
        /// Name of the field.
        field: &'static str,
        /// Error of the attributes.
        source: TrailerError,
    },
    /// A key or a tenant name is invalid.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A term or an epoch does not fit into its bits.
    #[error(transparent)]
    Bits(#[from] BoundExceeded),
    /// An error code is unknown to this release.
    #[error(transparent)]
    Code(#[from] UnknownErrorCode),
}

impl ConvertError {
    /// Returns the stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            ConvertError::TooLarge { .. } => ErrorCode::TooLarge,
            ConvertError::Key(KeyError::KeyTooLong { .. } | KeyError::TenantTooLong { .. }) => {
                ErrorCode::TooLarge
            }
            ConvertError::Attributes { source: TrailerError::AttributesTooLong { .. }, .. } => {
                ErrorCode::TooLarge
            }
            ConvertError::Unknown { .. } | ConvertError::Code(_) => ErrorCode::Unsupported,
            ConvertError::Packed { source, .. } => source.code(),
            _ => ErrorCode::InvalidArgument,
        }
    }
}
