//! Count before decoding: [`decode`] rejects a message with too many elements before it allocates memory for them.
//!
//! An empty element takes two bytes on the wire and up to 130 in memory, so 16 MiB could become more than a
//! gigabyte. One pass over the tags counts the elements of every repeated field and applies the limit that
//! `from_wire` applies later. The pass reads tags and lengths only, does not allocate, and skips packed arrays in one
//! step.
//!
//! Both protocols use it: the frame protocol calls [`decode`], gRPC uses [`BoundedCodec`](crate::BoundedCodec), the
//! codec of the generated services.

use moontide_types::limits::{BATCH_KEYS_MAX, GROUPS_MAX, PREFERRED_PLACES_MAX, REQUEST_BYTES_MAX};
use prost::Message;
use prost::bytes::{Buf, Bytes};
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::check::at_most;
use super::{ConvertError, Wire};
use crate::limits::{
    ADDRESSES_MAX, ATTACH_REGIONS_MAX, CONFIGS_MAX, HANDLES_PER_RESPONSE_MAX, HANDOFF_SEGMENTS_MAX,
    NODES_MAX, REMOTE_READS_MAX, SESSION_RECORDS_MAX, TOUCH_BITMAPS_MAX,
};
use crate::v1;

/// Message whose elements are counted before decoding.
pub trait Bounded: Message + Default {
    /// Repeated fields, and message fields that contain repeated fields.
    const REPEATED: &'static [Repeated];
}

/// A repeated field, or a message field that contains repeated fields.
#[derive(Clone, Copy, Debug)]
pub struct Repeated {
    tag: u32,
    field: &'static str,
    /// Maximum number of occurrences. 1 for a single message: protobuf would merge several, with all their elements.
    max: usize,
    element: Element,
}

#[derive(Clone, Copy, Debug)]
enum Element {
    Text,
    Message(&'static [Repeated]),
    Varint,
    Fixed64,
}

/// Counts the elements of a message, then decodes it.
pub fn decode<M: Bounded>(bytes: Bytes) -> Result<M, ConvertError> {
    check_counts::<M>(&bytes)?;
    M::decode(bytes).map_err(|_| ConvertError::Malformed)
}

/// Encodes a message. Fails if it exceeds [`REQUEST_BYTES_MAX`]: then the caller sends a smaller batch.
pub fn encode<'a, T: Wire<'a>>(plain: &T) -> Result<Vec<u8>, ConvertError> {
    let message = plain.to_wire();
    at_most("message", message.encoded_len(), REQUEST_BYTES_MAX)?;
    Ok(message.encode_to_vec())
}

/// Checks the number of elements of an encoded message. Does not allocate.
pub fn check_counts<M: Bounded>(bytes: &[u8]) -> Result<(), ConvertError> {
    at_most("message", bytes.len(), REQUEST_BYTES_MAX)?;
    check_fields(bytes, M::REPEATED)
}

/// Maximum length of a `REPEATED` table.
const FIELDS_MAX: usize = 8;

/// Checks the counts of one message. The recursion is as deep as the tables, which are constants.
fn check_fields(mut rest: &[u8], fields: &[Repeated]) -> Result<(), ConvertError> {
    if fields.is_empty() {
        return Ok(());
    }
    let mut found = [0usize; FIELDS_MAX];
    while rest.has_remaining() {
        let (tag, wire_type) = decode_key(&mut rest).map_err(|_| ConvertError::Malformed)?;
        let Some(index) = fields.iter().position(|field| field.tag == tag) else {
            skip_field(wire_type, tag, &mut rest, DecodeContext::default())
                .map_err(|_| ConvertError::Malformed)?;
            continue;
        };
        let Repeated { field, max, element, .. } = fields[index];
        let value = if wire_type == WireType::LengthDelimited {
            delimited(&mut rest)?
        } else {
            skip_field(wire_type, tag, &mut rest, DecodeContext::default())
                .map_err(|_| ConvertError::Malformed)?;
            &[]
        };
        found[index] += match element {
            _ if wire_type != WireType::LengthDelimited => 1,
            Element::Text | Element::Message(_) => 1,
            Element::Varint => value.iter().filter(|&&byte| byte < 0x80).count(),
            Element::Fixed64 => value.len() / 8,
        };
        at_most(field, found[index], max)?;
        if let Element::Message(fields) = element {
            check_fields(value, fields)?;
        }
    }
    Ok(())
}

/// Reads a length and the bytes after it.
fn delimited<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], ConvertError> {
    let len = decode_varint(rest).map_err(|_| ConvertError::Malformed)?;
    let len = usize::try_from(len).map_err(|_| ConvertError::Malformed)?;
    let (value, left) = rest.split_at_checked(len).ok_or(ConvertError::Malformed)?;
    *rest = left;
    Ok(value)
}

const fn many(tag: u32, field: &'static str, max: usize, element: Element) -> Repeated {
    Repeated { tag, field, max, element }
}

/// A single message that contains repeated fields.
const fn one(tag: u32, field: &'static str, fields: &'static [Repeated]) -> Repeated {
    Repeated { tag, field, max: 1, element: Element::Message(fields) }
}

/// Messages without repeated fields of their own.
const PLAIN: Element = Element::Message(&[]);

/// Context of every response; it may contain a group map.
const CONTEXT: Repeated = one(1, "context", v1::ResponseContext::REPEATED);

macro_rules! bounded {
    ($($message:ident: [$($repeated:expr),*];)*) => {
        $(impl Bounded for v1::$message {
            const REPEATED: &'static [Repeated] = &[$($repeated),*];
        }
        const _: () = assert!(v1::$message::REPEATED.len() <= FIELDS_MAX);)*
    };
}

bounded! {
    RequestContext: [];
    ResponseContext: [one(6, "map", v1::GroupMap::REPEATED)];
    GroupMap: [many(3, "map.masters", GROUPS_MAX as usize, Element::Message(v1::MasterEntry::REPEATED))];
    MasterEntry: [
        many(4, "map.masters.groups", GROUPS_MAX as usize, Element::Varint),
        many(5, "map.masters.terms", GROUPS_MAX as usize, Element::Varint)
    ];
    OutcomesResponse: [CONTEXT];
    SegmentRef: [];

    ExistRequest: [];
    ExistResponse: [CONTEXT];
    GetReplicaListRequest: [];
    GetReplicaListResponse: [CONTEXT];
    TouchRequest: [];
    SetPinRequest: [];
    PrefetchRequest: [];

    Place: [];
    PutConfig: [many(4, "config.preferred", PREFERRED_PLACES_MAX, PLAIN)];
    PutStartRequest: [many(3, "configs", CONFIGS_MAX, Element::Message(v1::PutConfig::REPEATED))];
    PutStartResponse: [CONTEXT, many(4, "expires_unix_ms", BATCH_KEYS_MAX, Element::Varint)];
    PutEndRequest: [many(3, "stripe_roots", HANDLES_PER_RESPONSE_MAX, Element::Fixed64)];
    PutRevokeRequest: [];
    HandoffGroupRequest: [
        one(7, "replicas", v1::GetReplicaListResponse::REPEATED),
        many(9, "segments", HANDOFF_SEGMENTS_MAX, PLAIN),
        many(13, "node_keys", HANDOFF_SEGMENTS_MAX, PLAIN)
    ];
    HandoffKey: [];
    KnownSegment: [];
    RemoveRequest: [];
    BeginRequest: [];
    CommitRequest: [];
    SlotOutcomes: [];
    LoadRequest: [];
    LoadReply: [];
    AttachRequest: [];
    AttachReply: [many(2, "regions", ATTACH_REGIONS_MAX, PLAIN)];
    AttachedRegion: [];
    DescribeReply: [];

    RemoveByPrefixRequest: [many(4, "groups", GROUPS_MAX as usize, Element::Varint)];
    RemoveByRegexRequest: [many(4, "groups", GROUPS_MAX as usize, Element::Varint)];
    RemoveAllRequest: [many(4, "groups", GROUPS_MAX as usize, Element::Varint)];
    StartJobResponse: [CONTEXT, many(4, "groups", GROUPS_MAX as usize, Element::Varint)];
    GetJobRequest: [many(3, "groups", GROUPS_MAX as usize, Element::Varint)];
    GetJobResponse: [CONTEXT, many(8, "lost_groups", GROUPS_MAX as usize, Element::Varint)];
    Pagination: [];
    ListKeysRequest: [];
    ListKeysResponse: [CONTEXT];
    QueryKeysRequest: [];
    QueryKeysResponse: [CONTEXT, many(3, "details", BATCH_KEYS_MAX, PLAIN)];
    PollInvalidationsRequest: [many(2, "cursors", GROUPS_MAX as usize, PLAIN)];
    InvalidationCursor: [];
    PollInvalidationsResponse: [CONTEXT, many(2, "groups", GROUPS_MAX as usize, PLAIN)];
    GroupInvalidations: [];
    GetGroupMapRequest: [];
    GetGroupMapResponse: [CONTEXT, one(2, "map", v1::GroupMap::REPEATED)];
    GetClusterInfoRequest: [];
    GetClusterInfoResponse: [CONTEXT];
    GetNodesRequest: [];
    GetNodesResponse: [CONTEXT, many(2, "nodes", NODES_MAX, Element::Message(v1::NodeDetail::REPEATED))];
    NodeDetail: [many(3, "addresses", ADDRESSES_MAX, PLAIN)];
    EvictRequest: [];
    EvictResponse: [CONTEXT];
    SetTenantQuotaRequest: [];
    SetTenantQuotaResponse: [CONTEXT];
    GetTenantsRequest: [];
    GetTenantsResponse: [CONTEXT, many(2, "tenants", BATCH_KEYS_MAX, PLAIN)];
    ListSegmentsRequest: [];
    ListSegmentsResponse: [CONTEXT, many(2, "segments", BATCH_KEYS_MAX, PLAIN)];
    DrainSegmentRequest: [];
    DrainNodeRequest: [];
    DrainNodeResponse: [CONTEXT];

    OpenSessionRequest: [many(4, "addresses", ADDRESSES_MAX, PLAIN)];
    OpenSessionResponse: [CONTEXT];
    CapabilityKey: [];
    CapabilityKeyHeld: [];
    SegmentSpec: [];
    SyncMark: [];
    MountSegmentsRequest: [
        many(2, "segments", BATCH_KEYS_MAX, PLAIN),
        many(3, "synced", GROUPS_MAX as usize, PLAIN)
    ];
    MountSegmentsResponse: [CONTEXT, many(2, "results", BATCH_KEYS_MAX, PLAIN)];
    UnmountSegmentsRequest: [many(2, "segments", BATCH_KEYS_MAX, Element::Varint)];

    SegmentStatus: [];
    DiskStatus: [];
    Pressure: [];
    RemoteReads: [];
    Heartbeat: [
        many(3, "touched", TOUCH_BITMAPS_MAX, PLAIN),
        many(4, "segments", BATCH_KEYS_MAX, PLAIN),
        many(9, "remote_reads", REMOTE_READS_MAX, PLAIN)
    ];
    ReportChunk: [many(8, "tenants", SESSION_RECORDS_MAX, Element::Text)];
    ReportEnd: [];
    OffloadNotice: [many(3, "tenants", SESSION_RECORDS_MAX, Element::Text)];
    NodeMessage: [
        one(4, "heartbeat", v1::Heartbeat::REPEATED),
        one(6, "report", v1::ReportChunk::REPEATED),
        one(8, "offloaded", v1::OffloadNotice::REPEATED)
    ];
    HeartbeatAck: [many(3, "in_sync", GROUPS_MAX as usize, PLAIN)];
    Commands: [many(3, "nodes", NODES_MAX, Element::Message(v1::NodeDetail::REPEATED))];
    MasterMessage: [one(5, "commands", v1::Commands::REPEATED), one(6, "heartbeat_ack", v1::HeartbeatAck::REPEATED)];
}
