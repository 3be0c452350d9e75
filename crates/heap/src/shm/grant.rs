//! What is said between the node and those who put and remove: grants, and the reasons for refusing them.

use moontide_types::record::{Attributes, Flags, HeaderError, KeySection, LayoutError, TrailerError, Word};
use moontide_types::{
    ClientId, Epoch, ErrorCode, Extent, ObjectId, SegmentId, SlotId, TenantGeneration, Term,
};

use crate::alloc::ClaimError;

/// Who fills a record's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Writer {
    /// A client process that maps the segment. If it dies, its records die.
    Client(ClientId),
    /// The node itself, for bytes that come over the network or from disk.
    Node,
}

impl Writer {
    /// How a header names its writer while the record is WRITING, in the place of the root: 0 for the node.
    pub(super) fn mark(self) -> u64 {
        match self {
            Writer::Client(client) => client.0.into(),
            Writer::Node => 0,
        }
    }
}

/// A record that is to be written, as the master granted it.
#[derive(Clone, Copy, Debug)]
pub struct Grant<'a> {
    /// The slot for its header.
    pub slot: SlotId,
    /// Its version, of the same term as the grant.
    pub epoch: Epoch,
    /// The term of the master that granted it: the one that the segment obeys.
    pub term: Term,
    /// The space for its payload and trailer: exactly [`RecordLayout::units`](moontide_types::record::RecordLayout::units)
    /// long and aligned to [`RecordLayout::align`](moontide_types::record::RecordLayout::align).
    pub extent: Extent,
    /// What it will be.
    pub record: NewRecord<'a>,
    /// Who will write it.
    pub writer: Writer,
}

/// Everything about a record but its bytes.
#[derive(Clone, Copy, Debug)]
pub struct NewRecord<'a> {
    /// Its identity.
    pub id: ObjectId,
    /// Properties.
    pub flags: Flags,
    /// Length of the whole object.
    pub object_len: u64,
    /// Which stripe of how many.
    pub stripe_index: u16,
    /// How many stripes there are.
    pub stripe_count: u16,
    /// Where the stripe starts in the object.
    pub stripe_offset: u64,
    /// Length of the stripe: the payload of this record.
    pub stripe_len: u64,
    /// Tenant and key.
    pub key: KeySection<'a>,
    /// Attributes.
    pub attributes: &'a Attributes,
    /// Number of the key that made the id.
    pub id_key: u32,
    /// Generation of the tenant that went into the id.
    pub tenant_generation: TenantGeneration,
}

/// Why a record may not be begun. The master's book-keeping and the node's disagree, or the caller is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BeginError {
    /// There is no such segment here.
    #[error("no segment {0}")]
    Segment(SegmentId),
    /// There is no such slot in it.
    #[error("slot {slot} of a segment with {slots} slots")]
    Slot {
        /// The slot that was named.
        slot: SlotId,
        /// How many there are.
        slots: u32,
    },
    /// The grant is of another term than the one the segment obeys.
    #[error(
        "granted in term {named} with an epoch of term {epoch}, the segment obeys term {obeyed} (Segment::obey)"
    )]
    Term {
        /// Term of the grant.
        named: Term,
        /// Term in its epoch, which must be the same.
        epoch: Term,
        /// Term of the segment's master.
        obeyed: Term,
    },
    /// The slot is taken, or its epoch has moved on.
    #[error("the slot is {found:?}, which does not allow epoch {named}")]
    Word {
        /// What the word is.
        found: Word,
        /// The epoch that was named.
        named: Epoch,
    },
    /// The extent is not the one that the record needs.
    #[error("{extent} for a record that takes {units} units from a multiple of {align} bytes")]
    Extent {
        /// What was granted.
        extent: Extent,
        /// What is needed.
        units: u32,
        /// How it must be aligned, in bytes.
        align: u64,
    },
    /// The extent overlaps a living one, or lies outside of the segment.
    #[error(transparent)]
    Space(#[from] ClaimError),
    /// The writer's process has ended, or never was a client of this node.
    #[error("client {0} is not, or no longer, a client of this node")]
    Client(ClientId),
    /// A copy of an older version was granted to a client: only the node itself begins one.
    #[error("client {0} cannot write a copy of an older version: only the node itself does")]
    Copy(ClientId),
    /// The segment is the node's own: no master grants in it.
    #[error("segment {0} is the node's staging memory, in which nothing is granted")]
    Staging(SegmentId),
    /// The segment's bytes are in a device's memory, which the store does not write.
    #[error("segment {0} is in a device's memory: records in it are pushed by ranks, and have no digests")]
    Device(SegmentId),
    /// The record cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// An attribute exceeds its bound.
    #[error(transparent)]
    Attributes(#[from] TrailerError),
    /// The header's fields contradict each other.
    #[error(transparent)]
    Header(#[from] HeaderError),
}

impl BeginError {
    /// The stable code for callers far away.
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

/// Why a record may not be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// There is no such segment or slot here.
    #[error("no slot {slot} in segment {segment}")]
    Slot {
        /// The segment that was named.
        segment: SegmentId,
        /// The slot that was named.
        slot: SlotId,
    },
    /// The slot is not being written in this version: the reservation ended.
    #[error("the slot is {found:?}, not being written in epoch {named}")]
    Word {
        /// What the word is.
        found: Word,
        /// The epoch that was named.
        named: Epoch,
    },
    /// Somebody else is writing it.
    #[error("the record is being written by another process")]
    Writer,
    /// The writer still holds its claim, so it could change bytes that readers rely on.
    #[error("the record is still claimed for writing; drop the claim before the commit")]
    Claimed,
    /// The page digests behind the payload do not lead to the root.
    #[error("page digests lead to root {found:#018x}, the writer says {named:#018x}")]
    Root {
        /// What the digests lead to.
        found: u64,
        /// What the writer says.
        named: u64,
    },
}

impl CommitError {
    /// The stable code for callers far away.
    pub fn code(&self) -> ErrorCode {
        match self {
            CommitError::Slot { .. } => ErrorCode::StaleGeneration,
            CommitError::Word { .. } => ErrorCode::StaleEpoch,
            CommitError::Writer => ErrorCode::PermissionDenied,
            CommitError::Claimed => ErrorCode::Busy,
            CommitError::Root { .. } => ErrorCode::Corrupt,
        }
    }
}

/// Why what is in a room of [`Staging`](crate::Staging) is not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StageError {
    /// The record does not fit its slot or its header, or cannot be laid out.
    #[error(transparent)]
    Record(#[from] BeginError),
    /// Payload and trailer reach beyond the room, or the payload starts where none may.
    #[error(
        "a record of {needed} bytes at {at} of a room of {room} bytes; it starts on a multiple of {align}"
    )]
    Room {
        /// Where in the room the payload starts.
        at: u64,
        /// Bytes of payload and trailer, in whole units.
        needed: u64,
        /// Length of the room.
        room: u64,
        /// What the start must be a multiple of.
        align: u64,
    },
    /// There are more or fewer bytes of digests than the record's pages need.
    #[error("{found} bytes of page digests, the record has {expected}")]
    Digests {
        /// What was given.
        found: u64,
        /// What is needed.
        expected: u64,
    },
    /// The page digests do not lead to the root.
    #[error("page digests lead to root {found:#018x}, the record's is {named:#018x}")]
    Root {
        /// What the digests lead to.
        found: u64,
        /// What the record's root is said to be.
        named: u64,
    },
}

/// What became of a kill.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Killed {
    /// No new reader gets in; the space comes back after a reclaim.
    Dying,
    /// It was dying already, or has been freed.
    Already,
    /// The slot holds another version, or is FREE above this one, or there is no such slot.
    NotThere,
}

/// Space that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The segment.
    pub segment: SegmentId,
    /// The slot, FREE at `epoch`; above it, if a copy of an older version was there.
    pub slot: SlotId,
    /// The version that was there.
    pub epoch: Epoch,
    /// Its space.
    pub extent: Extent,
}

/// What a reclaim did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// What came back.
    pub freed: Vec<Freed>,
    /// How many are dying but still in use, or their time has not come. What another thread's reclaim has in
    /// hand at the same time is not counted.
    pub draining: usize,
}
