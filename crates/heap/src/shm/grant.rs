//! Arguments and results of begin, commit, kill and reclaim: grants, records, and the reasons for refusing them.

use moontide_types::record::{
    Attributes, HeaderError, KeySection, LayoutError, RecordFlags, TrailerError, Word,
};
use moontide_types::{
    ClientId, Epoch, ErrorCode, Extent, ObjectId, SegmentId, SlotId, TenantGeneration, Term,
};

use crate::alloc::ClaimError;

/// Process that fills a record's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PayloadWriter {
    /// A client process that maps the segment. If it exits, the node kills its open records.
    Client(ClientId),
    /// The node itself, for bytes that come over the network or from disk.
    Node,
}

impl PayloadWriter {
    /// Returns the writer's tag, which the header has in the place of the root while the record is WRITING: 0 for the
    /// node.
    pub(super) fn tag(self) -> u64 {
        match self {
            PayloadWriter::Client(client) => client.0.into(),
            PayloadWriter::Node => 0,
        }
    }
}

/// A record to be written, as the master granted it.
#[derive(Clone, Copy, Debug)]
pub struct Grant<'a> {
    /// Slot for the header.
    pub slot: SlotId,
    /// Version of the record, of the same term as the grant.
    pub epoch: Epoch,
    /// Term of the master that granted it: the one that the segment has adopted.
    pub term: Term,
    /// Space for payload and trailer: exactly [`RecordLayout::units`](moontide_types::record::RecordLayout::units)
    /// long and aligned to [`RecordLayout::align`](moontide_types::record::RecordLayout::align).
    pub extent: Extent,
    /// Contents of the header and trailer.
    pub record: RecordSpec<'a>,
    /// Process that writes the payload.
    pub writer: PayloadWriter,
}

/// Properties of a record, without its bytes.
#[derive(Clone, Copy, Debug)]
pub struct RecordSpec<'a> {
    /// Id of the object.
    pub id: ObjectId,
    /// Flags of the header.
    pub flags: RecordFlags,
    /// Length of the whole object in bytes.
    pub object_len: u64,
    /// Index of the stripe, below `stripe_count`.
    pub stripe_index: u16,
    /// Number of stripes of the object.
    pub stripe_count: u16,
    /// Offset of the stripe in the object.
    pub stripe_offset: u64,
    /// Length of the stripe in bytes: the payload of this record.
    pub stripe_len: u64,
    /// Tenant and full key.
    pub key: KeySection<'a>,
    /// Attributes of the object.
    pub attributes: &'a Attributes,
    /// Number of the key from which the id was computed.
    pub id_key: u32,
    /// Generation of the tenant from which the id was computed.
    pub tenant_generation: TenantGeneration,
}

/// Reason why a record cannot be begun: the bookkeeping of master and node differ, or the caller is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BeginError {
    /// The segment does not exist at this node.
    #[error("segment {0} does not exist")]
    Segment(SegmentId),
    /// The slot does not exist in the segment.
    #[error("slot {slot} is out of range: the segment has {slots} slots")]
    Slot {
        /// Slot of the grant.
        slot: SlotId,
        /// Number of slots of the segment.
        slots: u32,
    },
    /// The grant has another term than the one that the segment has adopted.
    #[error("grant of term {named} with an epoch of term {epoch} does not match the adopted term {adopted}")]
    Term {
        /// Term of the grant.
        named: Term,
        /// Term in its epoch, which must be the same.
        epoch: Term,
        /// Term that the segment has adopted.
        adopted: Term,
    },
    /// The slot is in use, or has seen the epoch.
    #[error("slot word {found:?} does not allow epoch {named}")]
    Word {
        /// Current word of the slot.
        found: Word,
        /// Epoch of the grant.
        named: Epoch,
    },
    /// The extent has another length or alignment than the record needs.
    #[error("{extent} does not fit the record, which needs {units} units at a multiple of {align} bytes")]
    Extent {
        /// Granted extent.
        extent: Extent,
        /// Units that the record needs.
        units: u32,
        /// Alignment that the record needs, in bytes.
        align: u64,
    },
    /// The extent overlaps one in use, or is outside of the segment.
    #[error(transparent)]
    Space(#[from] ClaimError),
    /// The writer's process has exited, or never was a client of this node.
    #[error("client {0} is not connected to this node")]
    Client(ClientId),
    /// A copy of an older version was granted to a client. Only the node itself begins copies.
    #[error("client {0} cannot write a copy of an older version; only the node can")]
    Copy(ClientId),
    /// The segment is the node's own: no master grants in it.
    #[error("segment {0} is the node's staging memory; grants in it are not allowed")]
    Staging(SegmentId),
    /// The segment's bytes are in a device's memory, which the store does not write.
    #[error("segment {0} is in device memory; its records are pushed by ranks and have no digests")]
    Device(SegmentId),
    /// The record has no valid layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// An attribute exceeds its limit.
    #[error(transparent)]
    Attributes(#[from] TrailerError),
    /// The header's fields contradict each other.
    #[error(transparent)]
    Header(#[from] HeaderError),
}

impl BeginError {
    /// Returns the stable error code for remote callers.
    pub fn code(&self) -> ErrorCode {
        match self {
            BeginError::Segment(_) | BeginError::Client(_) => ErrorCode::StaleGeneration,
            BeginError::Term { .. } => ErrorCode::StaleTerm,
            BeginError::Word { .. } => ErrorCode::StaleEpoch,
            BeginError::Space(ClaimError::Overlap { .. }) => ErrorCode::Overlap,
            BeginError::Slot { .. } | BeginError::Space(_) => ErrorCode::OutOfBounds,
            BeginError::Staging(_) => ErrorCode::PermissionDenied,
            BeginError::Device(_) => ErrorCode::Unsupported,
            BeginError::Copy(_)
            | BeginError::Extent { .. }
            | BeginError::Layout(_)
            | BeginError::Attributes(_)
            | BeginError::Header(_) => ErrorCode::InvalidArgument,
        }
    }
}

/// Reason why a record cannot be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// The segment or the slot does not exist at this node.
    #[error("no slot {slot} in segment {segment}")]
    Slot {
        /// Segment of the request.
        segment: SegmentId,
        /// Slot of the request.
        slot: SlotId,
    },
    /// The slot is not WRITING in this version: the reservation has ended.
    #[error("slot word {found:?} is not WRITING in epoch {named}")]
    Word {
        /// Current word of the slot.
        found: Word,
        /// Epoch of the request.
        named: Epoch,
    },
    /// Another process writes the record.
    #[error("another process is writing the record")]
    Writer,
    /// The writer still holds its claim, so it could change bytes that readers rely on.
    #[error("record is still claimed for writing; drop the claim before the commit")]
    Claimed,
    /// Not all bytes of the payload were written: the others belong to an earlier record.
    #[error("not all bytes of the payload were written; write all of them before the commit")]
    Incomplete,
    /// The stored page digests do not lead to the root.
    #[error("page digests lead to root {found:#018x}, the writer's root is {named:#018x}")]
    Root {
        /// Root computed from the stored digests.
        found: u64,
        /// Root that the writer passed.
        named: u64,
    },
}

impl CommitError {
    /// Returns the stable error code for remote callers.
    pub fn code(&self) -> ErrorCode {
        match self {
            CommitError::Slot { .. } => ErrorCode::StaleGeneration,
            CommitError::Word { .. } => ErrorCode::StaleEpoch,
            CommitError::Writer => ErrorCode::PermissionDenied,
            CommitError::Claimed => ErrorCode::Busy,
            CommitError::Incomplete => ErrorCode::InvalidArgument,
            CommitError::Root { .. } => ErrorCode::Corrupt,
        }
    }
}

/// Reason why a buffer of [`Staging`](crate::Staging) cannot be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StageError {
    /// The record does not fit its slot or its header, or has no valid layout.
    #[error(transparent)]
    Record(#[from] BeginError),
    /// Payload and trailer exceed the buffer, or the payload's start is misaligned.
    #[error(
        "record of {needed} bytes at {at} of a buffer of {buffer} bytes must fit and start at a multiple of {align}"
    )]
    Buffer {
        /// Offset of the payload in the buffer.
        at: u64,
        /// Length of payload and trailer in bytes, in whole units.
        needed: u64,
        /// Length of the buffer in bytes.
        buffer: u64,
        /// Required alignment of the offset.
        align: u64,
    },
    /// The length of the digests is not the one that the record's pages need.
    #[error("{found} bytes of page digests, the record needs {expected}")]
    Digests {
        /// Length of the passed digests in bytes.
        found: u64,
        /// Required length in bytes.
        expected: u64,
    },
    /// The page digests do not lead to the root.
    #[error("page digests lead to root {found:#018x}, the record's is {named:#018x}")]
    Root {
        /// Root computed from the digests.
        found: u64,
        /// Root of the record.
        named: u64,
    },
}

/// Result of a kill.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillOutcome {
    /// The record was killed: it gets no new readers, and a later reclaim frees its space.
    Killed,
    /// The record was dead before, or has been freed.
    AlreadyDead,
    /// The slot holds another version, or is FREE above this one, or does not exist.
    NotFound,
}

/// A slot freed by a reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreedSlot {
    /// Segment of the slot.
    pub segment: SegmentId,
    /// The slot, FREE at `epoch`, or above it if it held a copy of an older version.
    pub slot: SlotId,
    /// Version of the freed record.
    pub epoch: Epoch,
    /// Space of the freed record.
    pub extent: Extent,
}

/// Result of a reclaim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReclaimReport {
    /// Slots that were freed.
    pub freed: Vec<FreedSlot>,
    /// Number of dead records that are still pinned or not yet due. Records that another thread is reclaiming at the
    /// same time are not counted.
    pub draining: usize,
}
