//! From messages to plain structs and back, with every bound checked in one place.
//!
//! Bytes become a message by [`decode`], which counts elements first. A message that was decoded is only known to be well-formed protobuf. [`Wire::from_wire`] makes of it a
//! struct of `moontide_types` values, borrowed from the message where that saves a copy, or says what is
//! wrong with it. It is total: any message converts or fails, none panics, and the allocations are a small
//! multiple of the message. Unknown values of enums are errors, never defaults.
//!
//! Invariant: `from_wire(to_wire(x)) = x`.
//!
//! Reading order: [`RequestContext`] and [`ResponseContext`] in every call, the hot calls (lookup, put,
//! remove), the node's data plane, the node session, then the operator's calls.

mod answer;
mod bounded;
mod check;
mod context;
mod data;
mod departures;
mod lookup;
mod nodes;
mod objects;
mod operator;
mod peer;
mod put;
mod report;
mod session;

pub use answer::{Answer, AnswerBody};
pub use bounded::{Bounded, Repeated, check_counts, decode, encode};
pub use context::{
    CallerId, GroupMap, MasterEntry, Outcomes, OutcomesResponse, RequestContext, ResponseContext,
};
pub use data::{
    AttachReply, AttachRequest, AttachedRegion, BeginRequest, CommitRequest, LoadReply, LoadRequest,
    SlotOutcomes,
};
pub use departures::{
    DepartureCursor, DeparturesAnswer, GetDeparturesRequest, GetDeparturesResponse, GroupDepartures,
};
pub use lookup::{
    ExistRequest, ExistResponse, GetReplicaListRequest, GetReplicaListResponse, PrefetchRequest, Presence,
    RemoveRequest, Replicas, SetPinRequest, TouchRequest,
};
pub use nodes::{NodeDetail, NodeDetails, NodeList};
pub use objects::{
    AttributeSection, AttributeSections, ListKind, ObjectFields, ObjectList, ObjectListBuilder,
};
pub use operator::{
    ClusterFacts, ClusterInfo, DrainSegmentRequest, EvictRequest, GetJobRequest, GetTenantsRequest,
    IdKeySecret, JobProgress, JobState, JobStatus, ListKeysRequest, ListSegmentsRequest, Page,
    QueryKeysRequest, RemoveAllRequest, RemoveByPrefixRequest, RemoveByRegexRequest, SegmentRef,
    SetTenantQuotaRequest,
};
pub use peer::{Bequest, KnownSegment};
pub use put::{PutConfig, PutEndRequest, PutRevokeRequest, PutStartRequest, PutStartResponse, Reservations};
pub use report::{OffloadNotice, ReportChunk, ReportEnd, ReportKind};
pub use session::{
    Address, DiskState, DiskStatus, Heartbeat, MasterBody, MasterMessage, MountSegmentsRequest,
    MountSegmentsResponse, NodeBody, NodeMessage, OpenSessionRequest, OpenSessionResponse, Pressure,
    ReadCounters, SegmentGrant, SegmentGrants, SegmentSpec, SegmentState, SegmentStatus, SessionGrant,
    Topology, TouchBitmap, UnmountSegmentsRequest,
};

use moontide_types::record::TrailerError;
use moontide_types::{BoundExceeded, ErrorCode, KeyError, UnknownErrorCode};

use crate::packed::PackedError;

/// A plain struct and the message that carries it.
pub trait Wire<'a>: Sized {
    /// The message.
    type Message: Bounded;

    /// Checks everything and borrows what need not be copied.
    fn from_wire(message: &'a Self::Message) -> Result<Self, ConvertError>;

    /// The message.
    fn to_wire(&self) -> Self::Message;
}

/// Why a message means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// Not a protobuf message of this kind.
    #[error("the bytes are not such a message")]
    Malformed,
    /// Something that must be there is not.
    #[error("{field} is missing")]
    Missing {
        /// What.
        field: &'static str,
    },
    /// More, longer or larger than a documented bound.
    #[error("{field} is {found}, at most {max} is allowed")]
    TooLarge {
        /// What.
        field: &'static str,
        /// How much there is.
        found: u64,
        /// How much there may be.
        max: u64,
    },
    /// Less than makes sense.
    #[error("{field} is {found}, at least {min} is needed")]
    TooSmall {
        /// What.
        field: &'static str,
        /// How much there is.
        found: u64,
        /// How much there must be.
        min: u64,
    },
    /// Another number of things than the rest of the message says.
    #[error("{field}: {found} of them, {expected} are needed")]
    Count {
        /// What.
        field: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// A number that this release has no name for.
    #[error("{field} cannot be {found}")]
    Unknown {
        /// What.
        field: &'static str,
        /// What stood there.
        found: i64,
    },
    /// Two parts of the message contradict each other.
    #[error("{field}: {rule} does not hold")]
    Relation {
        /// What.
        field: &'static str,
        /// The rule that was broken.
        rule: &'static str,
    },
    /// A packed array is not one.
    #[error("{field}: {source}")]
    Packed {
        /// Which one.
        field: &'static str,
        /// Why.
        source: PackedError,
    },
    /// Attributes that cannot stand in a record.
    #[error("{field}: {source}")]
    Attributes {
        /// Where.
        field: &'static str,
        /// Why.
        source: TrailerError,
    },
    /// A key or a tenant breaks its rules.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A term or an epoch has too many bits.
    #[error(transparent)]
    Bits(#[from] BoundExceeded),
    /// An error code that this release does not know.
    #[error(transparent)]
    Code(#[from] UnknownErrorCode),
}

impl ConvertError {
    /// The stable code.
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
