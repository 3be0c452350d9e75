//! The 64-byte header in front of every frame of the data plane and of the hot control calls.
//!
//! ```text
//!  header 64 B │ body: arguments, body_len bytes │ payload: raw bytes, payload_len bytes
//! ```
//!
//! The body of a control frame is the protobuf message that gRPC carries; of Begin, Commit,
//! Load, Attach and their replies one, too; of Read, Write and Release packed [`TransferOp`]s
//! ([`TransferOps`](crate::TransferOps) holds them against the header); of their replies packed codes; of Hello a
//! [`Hello`], behind which later releases may say more. The payload goes
//! straight between socket and segment. [`FRAME_FIELDS`] is the one description of the header's bytes.
//!
//! [`FrameHeader::decode`] judges everything that can be judged from 64 bytes before anything is allocated:
//! `body_len` and `payload_len` are then within the bounds of their kind. In control frames `group`,
//! `map_version`, `term` and `deadline_ms` repeat the context in the body, so that a frame can be routed to
//! its group's thread unparsed; the context is what counts. Capabilities stand in the operations, because each
//! slot is granted by itself; so the header does not grow beyond one cache line.

use moontide_types::bounds::{GROUPS_MAX, REQUEST_BYTES_MAX};
use moontide_types::record::Field;
use moontide_types::{ErrorCode, GroupId, MapVersion, Term};

use crate::hello::Hello;
use crate::layout::{FieldValue, FixedRecord, assert_tiles, code_from_number, code_number};
use crate::limits::{
    DEADLINE_MS_MAX, ENGINE_BYTES_MAX, ERROR_TEXT_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX, HELLO_BYTES_MAX,
    OPS_PER_FRAME_MAX,
};
use crate::ops::TransferOp;
use crate::records::{Handle, ObjectEntry};

/// Size of a frame's header: one cache line.
pub const FRAME_HEADER_BYTES: usize = 64;

/// The first four bytes of a frame: `MTF1`.
pub const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"MTF1");

/// Version of the header's layout. Hello is always sent in version 1, so that any two releases can talk about
/// the version they use from then on.
pub const FRAME_VERSION: u16 = 1;

/// In the group's place: keys of several groups, or none at all.
const NO_GROUP: u16 = u16::MAX;

const SPARE_OFFSET: usize = 50;
const CRC_OFFSET: usize = FRAME_HEADER_BYTES - 4;

const fn field(offset: usize, bytes: usize, name: &'static str) -> Field {
    Field { offset, bytes, name }
}

/// Every byte of the header, in order.
pub const FRAME_FIELDS: &[Field] = &[
    field(0, 4, "magic"),
    field(4, 2, "version"),
    field(6, 2, "kind"),
    field(8, 8, "request"),
    field(16, 4, "body_len"),
    field(20, 4, "deadline_ms"),
    field(24, 8, "payload_len"),
    field(32, 8, "map_version"),
    field(40, 4, "term"),
    field(44, 2, "flags"),
    field(46, 2, "status"),
    field(48, 2, "group"),
    field(SPARE_OFFSET, 10, "spare"),
    field(CRC_OFFSET, 4, "crc"),
];

const _: () = assert_tiles(FRAME_FIELDS, FRAME_HEADER_BYTES);
const _: () = assert!(GROUPS_MAX < NO_GROUP);

numbered! {
    /// What a frame is. Control calls are below 32, the data plane above.
    pub enum FrameKind(u16) {
        /// `ExistRequest`.
        Exist = 1,
        /// `ExistResponse`.
        ExistReply = 2,
        /// `GetReplicaListRequest`.
        GetReplicaList = 3,
        /// `GetReplicaListResponse`.
        GetReplicaListReply = 4,
        /// `PutStartRequest`.
        PutStart = 5,
        /// `PutStartResponse`.
        PutStartReply = 6,
        /// `PutEndRequest`.
        PutEnd = 7,
        /// `OutcomesResponse`.
        PutEndReply = 8,
        /// `RemoveRequest`.
        Remove = 9,
        /// `OutcomesResponse`.
        RemoveReply = 10,

        /// Opens a connection.
        Hello = 32,
        /// The other side agrees.
        HelloAck = 33,
        /// Operations; no payload.
        Read = 34,
        /// A code per operation; payload: the bytes of those that succeeded, in order.
        ReadReply = 35,
        /// Operations; payload: their bytes, in order.
        Write = 36,
        /// A code per operation.
        WriteReply = 37,
        /// Whoever sent `request` no longer waits for it. Not answered.
        Cancel = 38,
        /// Are you there?
        Ping = 39,
        /// Yes.
        Pong = 40,
        /// The request failed as a whole; body: text for a log.
        Error = 41,
        /// `BeginRequest`: open slots for writing.
        Begin = 42,
        /// `SlotOutcomes`.
        BeginReply = 43,
        /// `CommitRequest`: publish or abandon slots.
        Commit = 44,
        /// `SlotOutcomes`.
        CommitReply = 45,
        /// `LoadRequest`: bring bytes from disk into staging slots.
        Load = 46,
        /// `LoadReply`: the staging slots, ready to be read or used one-sidedly.
        LoadReply = 47,
        /// Release operations: staging slots are given back.
        Release = 48,
        /// A code per operation.
        ReleaseReply = 49,
        /// `AttachRequest`: how may this node's memory be used one-sidedly?
        Attach = 50,
        /// `AttachReply`: an address, and a key for each region.
        AttachReply = 51,
    }
}

/// One load that succeeded, in a LoadReply.
const STAGED_BYTES: usize = ObjectEntry::BYTES + Handle::BYTES;

/// Tags, lengths and a number around the packed arrays of a protobuf message.
const AROUND_ARRAYS: usize = 16;

/// What a kind of frame may carry.
struct KindBounds {
    body_min: usize,
    body_max: usize,
    /// The body is a multiple of this: packed operations or codes.
    body_grain: usize,
    payload_max: u64,
    /// Asks for something: has a deadline, and no status.
    request: bool,
}

impl FrameKind {
    /// Whether the frame asks for an answer.
    pub fn is_request(self) -> bool {
        self.bounds().request
    }

    /// The kind of the answer, if the frame asks for one.
    pub fn reply(self) -> Option<FrameKind> {
        if self.is_request() { FrameKind::from_number(self.number() + 1) } else { None }
    }

    /// Whether it is a hot call of the control plane or its answer.
    pub fn is_control(self) -> bool {
        self.number() < FrameKind::Hello.number()
    }

    /// The largest body of this kind.
    pub fn body_len_max(self) -> usize {
        self.bounds().body_max
    }

    fn bounds(self) -> KindBounds {
        use FrameKind::*;
        let ops = |count: usize| count * TransferOp::BYTES;
        let (request, body_min, body_max) = match self {
            Exist | GetReplicaList | PutStart | PutEnd | Remove => (true, 0, REQUEST_BYTES_MAX),
            ExistReply | GetReplicaListReply | PutStartReply | PutEndReply | RemoveReply => {
                (false, 0, REQUEST_BYTES_MAX)
            }
            Begin | Commit => (true, 0, REQUEST_BYTES_MAX),
            BeginReply | CommitReply => (false, 0, REQUEST_BYTES_MAX),
            Hello => (true, crate::Hello::BYTES, HELLO_BYTES_MAX),
            HelloAck => (false, crate::Hello::BYTES, HELLO_BYTES_MAX),
            Load => (true, ops(1), ops(OPS_PER_FRAME_MAX) + AROUND_ARRAYS),
            Read | Write | Release => (true, ops(1), ops(OPS_PER_FRAME_MAX)),
            LoadReply => (false, 0, OPS_PER_FRAME_MAX * STAGED_BYTES + AROUND_ARRAYS),
            ReadReply | WriteReply | ReleaseReply => (false, 0, 2 * OPS_PER_FRAME_MAX),
            Attach => (true, 0, ENGINE_BYTES_MAX + AROUND_ARRAYS),
            AttachReply => (false, 0, REQUEST_BYTES_MAX),
            Ping => (true, 0, 0),
            Cancel | Pong => (false, 0, 0),
            Error => (false, 0, ERROR_TEXT_BYTES_MAX),
        };
        let payload_max = if matches!(self, Write | ReadReply) { FRAME_PAYLOAD_BYTES_MAX } else { 0 };
        let body_grain = match self {
            Read | Write | Release => TransferOp::BYTES,
            ReadReply | WriteReply | ReleaseReply => 2,
            _ => 1,
        };
        KindBounds { body_min, body_max, body_grain, payload_max, request }
    }
}

flags! {
    /// How a frame is to be treated.
    pub struct FrameFlags(u16) {
        /// More frames of this request, or of this answer, follow: of a Write or a ReadReply, whose payload may
        /// not fit into one.
        MORE = 0,
    }
}

/// Why 64 bytes are not a frame's header. Each of them ends the connection: what follows cannot be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not one of our frames.
    #[error("magic {found:#010x} is not a frame's")]
    Magic {
        /// What stood there.
        found: u32,
    },
    /// A layout that this release does not know.
    #[error("frame version {found}, this release reads {FRAME_VERSION}")]
    Version {
        /// What stood there.
        found: u16,
    },
    /// The bytes changed on the way.
    #[error("frame CRC {found:#010x}, computed {computed:#010x}")]
    Crc {
        /// What stood there.
        found: u32,
        /// What it should be.
        computed: u32,
    },
    /// An unknown kind.
    #[error("unknown frame kind {found}")]
    Kind {
        /// What stood there.
        found: u16,
    },
    /// A flag that this release does not know.
    #[error("unknown frame flags {found:#06x}")]
    Flags {
        /// What stood there.
        found: u16,
    },
    /// A spare byte is not zero.
    #[error("spare bytes are not zero")]
    Spare,
    /// An unknown code, a code in a request, or an error without one.
    #[error("a frame of kind {kind:?} cannot have status {found}")]
    Status {
        /// The frame's kind.
        kind: FrameKind,
        /// What stood there.
        found: u16,
    },
    /// A group that no cluster has.
    #[error("group {found}, the largest is {max}", max = GROUPS_MAX - 1)]
    Group {
        /// What stood there.
        found: u16,
    },
    /// A term beyond 22 bits.
    #[error("term {found} does not exist")]
    Term {
        /// What stood there.
        found: u32,
    },
    /// Requests wait between 1 and [`DEADLINE_MS_MAX`] milliseconds.
    #[error("a frame of kind {kind:?} cannot have a deadline of {found} ms")]
    Deadline {
        /// The frame's kind.
        kind: FrameKind,
        /// What stood there.
        found: u32,
    },
    /// The body is shorter or longer than its kind's may be.
    #[error("a body of {found} bytes, kind {kind:?} has {min} to {max}")]
    BodyLen {
        /// The frame's kind.
        kind: FrameKind,
        /// What stood there.
        found: u32,
        /// The shortest.
        min: usize,
        /// The longest.
        max: usize,
    },
    /// The body is cut within an operation or a code.
    #[error("a body of {found} bytes, kind {kind:?} has a multiple of {grain}")]
    BodyGrain {
        /// The frame's kind.
        kind: FrameKind,
        /// What stood there.
        found: u32,
        /// Length of one element.
        grain: usize,
    },
    /// Only payloads are cut into several frames.
    #[error("a frame of kind {kind:?} is never followed by more")]
    More {
        /// The frame's kind.
        kind: FrameKind,
    },
    /// The payload is longer than its kind's may be.
    #[error("a payload of {found} bytes, kind {kind:?} has at most {max}")]
    PayloadLen {
        /// The frame's kind.
        kind: FrameKind,
        /// What stood there.
        found: u64,
        /// The longest.
        max: u64,
    },
}

impl FrameError {
    /// The stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            FrameError::Crc { .. } => ErrorCode::Corrupt,
            FrameError::Version { .. } | FrameError::Kind { .. } | FrameError::Flags { .. } => {
                ErrorCode::Unsupported
            }
            FrameError::BodyLen { .. } | FrameError::PayloadLen { .. } => ErrorCode::TooLarge,
            _ => ErrorCode::InvalidArgument,
        }
    }
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the frame is.
    pub kind: FrameKind,
    /// How to treat it.
    pub flags: FrameFlags,
    /// Number by which the answer refers to the request; chosen by whoever asks.
    pub request: u64,
    /// Length of the body.
    pub body_len: u32,
    /// Length of the payload.
    pub payload_len: u64,
    /// How long the caller waits, in milliseconds; 0 in answers.
    pub deadline_ms: u32,
    /// Why the whole request failed.
    pub status: Option<ErrorCode>,
    /// The group that all keys belong to, if there is one such.
    pub group: Option<GroupId>,
    /// The term that the sender knows.
    pub term: Term,
    /// Version of the group map that the sender knows.
    pub map_version: MapVersion,
}

impl FrameHeader {
    /// A header without body and payload, to be filled in.
    pub fn new(kind: FrameKind, request: u64) -> FrameHeader {
        FrameHeader {
            kind,
            flags: FrameFlags::NONE,
            request,
            body_len: 0,
            payload_len: 0,
            deadline_ms: if kind.is_request() { DEADLINE_MS_MAX } else { 0 },
            status: None,
            group: None,
            term: Term::ZERO,
            map_version: MapVersion(0),
        }
    }

    /// Writes the header. The CRC is computed here.
    ///
    /// # Panics
    /// If a field breaks the rules of its kind: a header that could not be read back must never be sent.
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        if let Err(error) = self.check() {
            panic!("a frame's header must be valid before it is sent: {error}");
        }
        let mut bytes = [0; FRAME_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&FRAME_VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.kind.number().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.deadline_ms.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.map_version.0.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.term.get().to_le_bytes());
        bytes[44..46].copy_from_slice(&self.flags.bits().to_le_bytes());
        bytes[46..48].copy_from_slice(&code_number(&self.status).to_le_bytes());
        bytes[48..SPARE_OFFSET].copy_from_slice(&self.group.map_or(NO_GROUP, |g| g.0).to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..CRC_OFFSET]);
        bytes[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header and judges all of it.
    pub fn decode(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<FrameHeader, FrameError> {
        let magic = at::<u32>(bytes, 0);
        if magic != FRAME_MAGIC {
            return Err(FrameError::Magic { found: magic });
        }
        let version = at::<u16>(bytes, 4);
        if version != FRAME_VERSION {
            return Err(FrameError::Version { found: version });
        }
        let (found, computed) = (at::<u32>(bytes, CRC_OFFSET), crc32c::crc32c(&bytes[..CRC_OFFSET]));
        if found != computed {
            return Err(FrameError::Crc { found, computed });
        }
        let kind = at::<u16>(bytes, 6);
        let kind = FrameKind::from_number(kind).ok_or(FrameError::Kind { found: kind })?;
        let flags = at::<u16>(bytes, 44);
        let flags = FrameFlags::from_bits(flags).ok_or(FrameError::Flags { found: flags })?;
        if bytes[SPARE_OFFSET..CRC_OFFSET].iter().any(|&b| b != 0) {
            return Err(FrameError::Spare);
        }
        let status = at::<u16>(bytes, 46);
        let status = code_from_number(status).ok_or(FrameError::Status { kind, found: status })?;
        let term = at::<u32>(bytes, 40);
        let term = Term::new(term).map_err(|_| FrameError::Term { found: term })?;
        let group = at::<u16>(bytes, 48);
        let header = FrameHeader {
            kind,
            flags,
            request: at(bytes, 8),
            body_len: at(bytes, 16),
            deadline_ms: at(bytes, 20),
            payload_len: at(bytes, 24),
            map_version: MapVersion(at(bytes, 32)),
            term,
            status,
            group: (group != NO_GROUP).then_some(GroupId(group)),
        };
        header.check()?;
        Ok(header)
    }

    /// The rules that encoder and decoder both insist on.
    pub fn check(&self) -> Result<(), FrameError> {
        let kind = self.kind;
        let KindBounds { body_min, body_max, body_grain, payload_max, request } = kind.bounds();
        let status_fits = match self.status {
            Some(_) => !request && !matches!(kind, FrameKind::Cancel | FrameKind::Pong),
            None => kind != FrameKind::Error,
        };
        if !status_fits {
            return Err(FrameError::Status { kind, found: code_number(&self.status) });
        }
        if let Some(GroupId(found)) = self.group
            && found >= GROUPS_MAX
        {
            return Err(FrameError::Group { found });
        }
        let waits = if request { 1..=DEADLINE_MS_MAX } else { 0..=0 };
        if !waits.contains(&self.deadline_ms) {
            return Err(FrameError::Deadline { kind, found: self.deadline_ms });
        }
        let found = self.body_len;
        if found as usize > body_max || (found as usize) < body_min {
            return Err(FrameError::BodyLen { kind, found, min: body_min, max: body_max });
        }
        if !(found as usize).is_multiple_of(body_grain) {
            return Err(FrameError::BodyGrain { kind, found, grain: body_grain });
        }
        if self.flags.contains(FrameFlags::MORE) && payload_max == 0 {
            return Err(FrameError::More { kind });
        }
        let found = self.payload_len;
        if found > payload_max {
            return Err(FrameError::PayloadLen { kind, found, max: payload_max });
        }
        Ok(())
    }
}

/// The integer at `offset`.
fn at<T: FieldValue>(bytes: &[u8; FRAME_HEADER_BYTES], offset: usize) -> T {
    match T::take(&bytes[offset..offset + T::BYTES]) {
        Ok(value) => value,
        Err(_) => unreachable!("every bit pattern is an integer"),
    }
}

const _: () = assert!(REQUEST_BYTES_MAX <= u32::MAX as usize);
const _: () = assert!(Hello::BYTES <= HELLO_BYTES_MAX);
