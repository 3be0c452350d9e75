//! The 64-byte header of every frame of the data plane and of the hot control calls.
//!
//! ```text
//!  header 64 B │ body: arguments, body_len bytes │ payload: raw bytes, payload_len bytes
//! ```
//!
//! Body by kind: control frames, Begin, Commit, Load, Attach, their replies and DescribeReply carry a protobuf message,
//! as gRPC does. Read, Write, Release and Describe carry packed [`TransferOp`]s ([`TransferOps`](crate::TransferOps)
//! compares them with the header); their replies carry packed codes. Hello carries a [`Hello`], after which later
//! releases may append fields. The payload goes directly between socket and segment. [`FRAME_FIELDS`] is the reference
//! description of the header's bytes.
//!
//! [`FrameHeader::decode`] checks everything that the 64 bytes determine before any allocation: afterwards `body_len`
//! and `payload_len` are within the limits of their kind. In control frames `group`, `map_version`, `term` and
//! `timeout_ms` repeat the context in the body, so that a receiver can route a frame to the thread of its group
//! without decoding the body; the context is authoritative. Capabilities are in the operations, because each slot has
//! its own grant; this keeps the header within one cache line.

use moontide_types::limits::{GROUPS_MAX, REQUEST_BYTES_MAX};
use moontide_types::record::Field;
use moontide_types::{ErrorCode, GroupId, MapVersion, Term};

use crate::hello::Hello;
use crate::layout::{FieldValue, FixedRecord, assert_tiles, code_from_number, code_number};
use crate::limits::{
    ENGINE_BYTES_MAX, ERROR_TEXT_BYTES_MAX, FRAME_PAYLOAD_BYTES_MAX, HELLO_BYTES_MAX, OPS_PER_FRAME_MAX,
    TIMEOUT_MS_MAX,
};
use crate::records::{Handle, ObjectEntry, TransferOp};

/// Size of a frame header in bytes: one cache line.
pub const FRAME_HEADER_BYTES: usize = 64;

/// The first four bytes of a frame: `MTF1`.
pub const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"MTF1");

/// Version of the header layout. Hello is always sent in version 1, so that any two releases can negotiate the
/// version of the following frames.
pub const FRAME_VERSION: u16 = 1;

/// Group value for keys of several groups, or for no keys.
const NO_GROUP: u16 = u16::MAX;

const RESERVED_OFFSET: usize = 50;
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
    field(20, 4, "timeout_ms"),
    field(24, 8, "payload_len"),
    field(32, 8, "map_version"),
    field(40, 4, "term"),
    field(44, 2, "flags"),
    field(46, 2, "status"),
    field(48, 2, "group"),
    field(RESERVED_OFFSET, 10, "reserved"),
    field(CRC_OFFSET, 4, "crc"),
];

const _: () = assert_tiles(FRAME_FIELDS, FRAME_HEADER_BYTES);
const _: () = assert!(GROUPS_MAX < NO_GROUP);

numbered! {
    /// Kind of a frame. Numbers below 32 are control calls, the others belong to the data plane.
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

        /// First frame of a connection: identity and protocol versions of the caller.
        Hello = 32,
        /// Accepts a Hello and names the negotiated version.
        HelloAck = 33,
        /// Operations; no payload.
        Read = 34,
        /// One code per operation; payload: the bytes of the successful operations, in order.
        ReadReply = 35,
        /// Operations; payload: their bytes, in order.
        Write = 36,
        /// One code per operation.
        WriteReply = 37,
        /// The sender of `request` no longer waits for it. Has no reply.
        Cancel = 38,
        /// Checks that the peer responds.
        Ping = 39,
        /// Reply to Ping.
        Pong = 40,
        /// The whole request failed; body: text for a log.
        Error = 41,
        /// `BeginRequest`: open slots for writing.
        Begin = 42,
        /// `SlotOutcomes`.
        BeginReply = 43,
        /// `CommitRequest`: publish or abort slots.
        Commit = 44,
        /// `SlotOutcomes`.
        CommitReply = 45,
        /// `LoadRequest`: load bytes from disk into staging slots.
        Load = 46,
        /// `LoadReply`: the staging slots, readable by Read or one-sidedly.
        LoadReply = 47,
        /// Release operations: free staging slots.
        Release = 48,
        /// One code per operation.
        ReleaseReply = 49,
        /// `AttachRequest`: request the data for one-sided access to the node's memory.
        Attach = 50,
        /// `AttachReply`: a worker address, and a remote key for each region.
        AttachReply = 51,
        /// Read operations, whose ranges are ignored: describe their records, for a copy.
        Describe = 52,
        /// `DescribeReply`: everything but the payload of each record.
        DescribeReply = 53,
    }
}

/// Bytes of one successful load in a LoadReply.
const STAGED_BYTES: usize = ObjectEntry::BYTES + Handle::BYTES;

/// Bytes of tags, lengths and a number around the packed arrays of a protobuf message.
const MESSAGE_OVERHEAD_BYTES: usize = 16;

/// Limits of a kind of frame.
struct FrameLimits {
    body_min: usize,
    body_max: usize,
    /// The body length is a multiple of this: the size of packed operations or codes.
    body_multiple: usize,
    payload_max: u64,
    /// Whether the frame is a request: it has a timeout, and no status.
    request: bool,
}

impl FrameKind {
    /// Returns whether the frame has a reply.
    pub fn is_request(self) -> bool {
        self.limits().request
    }

    /// Returns the kind of the reply, if the frame has one.
    pub fn reply(self) -> Option<FrameKind> {
        if self.is_request() { FrameKind::from_number(self.number() + 1) } else { None }
    }

    /// Returns whether the frame is a hot call of the control plane or a reply to one.
    pub fn is_control(self) -> bool {
        self.number() < FrameKind::Hello.number()
    }

    /// Returns the length in bytes of the longest body of this kind.
    pub fn body_len_max(self) -> usize {
        self.limits().body_max
    }

    fn limits(self) -> FrameLimits {
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
            Load => (true, ops(1), ops(OPS_PER_FRAME_MAX) + MESSAGE_OVERHEAD_BYTES),
            Read | Write | Release | Describe => (true, ops(1), ops(OPS_PER_FRAME_MAX)),
            LoadReply => (false, 0, OPS_PER_FRAME_MAX * STAGED_BYTES + MESSAGE_OVERHEAD_BYTES),
            ReadReply | WriteReply | ReleaseReply => (false, 0, 2 * OPS_PER_FRAME_MAX),
            Attach => (true, 0, ENGINE_BYTES_MAX + MESSAGE_OVERHEAD_BYTES),
            AttachReply | DescribeReply => (false, 0, REQUEST_BYTES_MAX),
            Ping => (true, 0, 0),
            Cancel | Pong => (false, 0, 0),
            Error => (false, 0, ERROR_TEXT_BYTES_MAX),
        };
        let payload_max = if matches!(self, Write | ReadReply) { FRAME_PAYLOAD_BYTES_MAX } else { 0 };
        let body_multiple = match self {
            Read | Write | Release | Describe => TransferOp::BYTES,
            ReadReply | WriteReply | ReleaseReply => 2,
            _ => 1,
        };
        FrameLimits { body_min, body_max, body_multiple, payload_max, request }
    }
}

flags! {
    /// Properties of a frame.
    pub struct FrameFlags(u16) {
        /// More frames of this request or reply follow. Only for Write and ReadReply, whose payload may not fit into
        /// one frame.
        MORE = 0,
    }
}

/// Error of the decoding of a frame header. Each of them ends the connection: the following bytes cannot be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes are no frame header.
    #[error("frame magic {found:#010x}, expected {FRAME_MAGIC:#010x}")]
    Magic {
        /// Value in the header.
        found: u32,
    },
    /// The version of the layout is unknown to this release.
    #[error("frame version {found}, this release reads {FRAME_VERSION}")]
    Version {
        /// Value in the header.
        found: u16,
    },
    /// The checksum does not match: the bytes are corrupt.
    #[error("frame CRC {found:#010x}, computed {computed:#010x}")]
    Crc {
        /// Value in the header.
        found: u32,
        /// Checksum of the received bytes.
        computed: u32,
    },
    /// The kind is unknown to this release.
    #[error("unknown frame kind {found}")]
    Kind {
        /// Value in the header.
        found: u16,
    },
    /// A flag is unknown to this release.
    #[error("unknown frame flags {found:#06x}")]
    Flags {
        /// Value in the header.
        found: u16,
    },
    /// A reserved byte is not zero.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// The status is an unknown code, or a code in a request, or missing in an Error frame.
    #[error("invalid status {found} in a frame of kind {kind:?}")]
    Status {
        /// Kind of the frame.
        kind: FrameKind,
        /// Value in the header.
        found: u16,
    },
    /// The group is out of range.
    #[error("group {found} exceeds the maximum {max}", max = GROUPS_MAX - 1)]
    Group {
        /// Value in the header.
        found: u16,
    },
    /// The term does not fit in 22 bits.
    #[error("term {found} does not fit in 22 bits")]
    Term {
        /// Value in the header.
        found: u32,
    },
    /// The timeout of a request is not in 1 to [`TIMEOUT_MS_MAX`] milliseconds, or that of another frame is not 0.
    #[error("invalid timeout of {found} ms in a frame of kind {kind:?}")]
    Timeout {
        /// Kind of the frame.
        kind: FrameKind,
        /// Value in the header.
        found: u32,
    },
    /// The length of the body is outside the limits of its kind.
    #[error("body of {found} bytes, kind {kind:?} has {min} to {max}")]
    BodyLen {
        /// Kind of the frame.
        kind: FrameKind,
        /// Value in the header.
        found: u32,
        /// Shortest body of this kind in bytes.
        min: usize,
        /// Longest body of this kind in bytes.
        max: usize,
    },
    /// The length of the body is not a multiple of the element size.
    #[error("body of {found} bytes, kind {kind:?} has a multiple of {multiple}")]
    BodyMultiple {
        /// Kind of the frame.
        kind: FrameKind,
        /// Value in the header.
        found: u32,
        /// Size of one element in bytes.
        multiple: usize,
    },
    /// The flag MORE is set in a frame without payload.
    #[error("flag MORE in a frame of kind {kind:?}")]
    More {
        /// Kind of the frame.
        kind: FrameKind,
    },
    /// The payload is longer than the limit of its kind.
    #[error("payload of {found} bytes, kind {kind:?} has at most {max}")]
    PayloadLen {
        /// Kind of the frame.
        kind: FrameKind,
        /// Value in the header.
        found: u64,
        /// Longest payload of this kind in bytes.
        max: u64,
    },
}

impl FrameError {
    /// Returns the stable code.
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

/// Header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Kind of the frame; determines body and payload.
    pub kind: FrameKind,
    /// Properties of the frame.
    pub flags: FrameFlags,
    /// Request id, chosen by the sender of the request and repeated in the reply.
    pub request: u64,
    /// Length of the body in bytes.
    pub body_len: u32,
    /// Length of the payload in bytes.
    pub payload_len: u64,
    /// Timeout of the request in milliseconds; 0 in replies.
    pub timeout_ms: u32,
    /// Error code if the whole request failed.
    pub status: Option<ErrorCode>,
    /// Group of all keys, if they belong to one group.
    pub group: Option<GroupId>,
    /// Term known to the sender.
    pub term: Term,
    /// Version of the group map known to the sender.
    pub map_version: MapVersion,
}

impl FrameHeader {
    /// Creates a header without body and payload; the caller sets the other fields.
    pub fn new(kind: FrameKind, request: u64) -> FrameHeader {
        FrameHeader {
            kind,
            flags: FrameFlags::NONE,
            request,
            body_len: 0,
            payload_len: 0,
            timeout_ms: if kind.is_request() { TIMEOUT_MS_MAX } else { 0 },
            status: None,
            group: None,
            term: Term::ZERO,
            map_version: MapVersion(0),
        }
    }

    /// Encodes the header and computes its CRC.
    ///
    /// # Panics
    /// If a field violates the rules of its kind: a header that cannot be decoded must never be sent.
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        if let Err(error) = self.check() {
            panic!("frame header must be valid before it is sent: {error}");
        }
        let mut bytes = [0; FRAME_HEADER_BYTES];
        bytes[0..4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&FRAME_VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.kind.number().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.timeout_ms.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.map_version.0.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.term.get().to_le_bytes());
        bytes[44..46].copy_from_slice(&self.flags.bits().to_le_bytes());
        bytes[46..48].copy_from_slice(&code_number(&self.status).to_le_bytes());
        bytes[48..RESERVED_OFFSET].copy_from_slice(&self.group.map_or(NO_GROUP, |g| g.0).to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..CRC_OFFSET]);
        bytes[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a header and checks all of its fields.
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
        if bytes[RESERVED_OFFSET..CRC_OFFSET].iter().any(|&b| b != 0) {
            return Err(FrameError::Reserved);
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
            timeout_ms: at(bytes, 20),
            payload_len: at(bytes, 24),
            map_version: MapVersion(at(bytes, 32)),
            term,
            status,
            group: (group != NO_GROUP).then_some(GroupId(group)),
        };
        header.check()?;
        Ok(header)
    }

    /// Checks the rules that encoder and decoder require.
    pub fn check(&self) -> Result<(), FrameError> {
        let kind = self.kind;
        let FrameLimits { body_min, body_max, body_multiple, payload_max, request } = kind.limits();
        let status_is_valid = match self.status {
            Some(_) => !request && !matches!(kind, FrameKind::Cancel | FrameKind::Pong),
            None => kind != FrameKind::Error,
        };
        if !status_is_valid {
            return Err(FrameError::Status { kind, found: code_number(&self.status) });
        }
        if let Some(GroupId(found)) = self.group
            && found >= GROUPS_MAX
        {
            return Err(FrameError::Group { found });
        }
        let timeouts = if request { 1..=TIMEOUT_MS_MAX } else { 0..=0 };
        if !timeouts.contains(&self.timeout_ms) {
            return Err(FrameError::Timeout { kind, found: self.timeout_ms });
        }
        let found = self.body_len;
        if found as usize > body_max || (found as usize) < body_min {
            return Err(FrameError::BodyLen { kind, found, min: body_min, max: body_max });
        }
        if !(found as usize).is_multiple_of(body_multiple) {
            return Err(FrameError::BodyMultiple { kind, found, multiple: body_multiple });
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

/// Decodes the integer at `offset`.
fn at<T: FieldValue>(bytes: &[u8; FRAME_HEADER_BYTES], offset: usize) -> T {
    match T::read_from(&bytes[offset..offset + T::BYTES]) {
        Ok(value) => value,
        Err(_) => unreachable!("every bit pattern is an integer"),
    }
}

const _: () = assert!(REQUEST_BYTES_MAX <= u32::MAX as usize);
const _: () = assert!(Hello::BYTES <= HELLO_BYTES_MAX);
