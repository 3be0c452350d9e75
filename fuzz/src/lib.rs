//! Fuzz targets: one function per decoder. Each takes arbitrary bytes and asserts that an accepted input is valid: it
//! encodes to the same bytes again, or to an equal value, and its invariants hold.
//!
//! libFuzzer runs them through `fuzz_targets/`; `tests/replay.rs` runs the corpus and random changes of it on a stable
//! compiler, and checks both against [`TARGETS`]. `examples/seeds.rs` writes the first inputs.

#![forbid(unsafe_code)]

#[path = "../../crates/heap/tests/alloc/model.rs"]
mod model;
#[path = "../../crates/heap/tests/alloc/steps.rs"]
mod steps;

use std::sync::{Arc, OnceLock};

use moontide_auth::testing::{Authority, Directory};
use moontide_auth::{ClientCertificates, Credentials, Identity, Role, Session, identity_of, rustls};
use moontide_blocks::SuspendedSequence;
use moontide_master::election::{ClusterIdentity, ClusterState, MasterAddresses};
use moontide_proto::convert::{self, Wire};
use moontide_proto::limits::{OPS_PER_FRAME_MAX, SESSION_RECORDS_MAX};
use moontide_proto::{
    CommandResult, CommitEntry, CopySource, FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Handle,
    Hello, NodeCommand, ObjectEntry, OffloadRecord, Packed, PackedBuilder, PackedKeys, PackedKeysBuilder,
    PutEndEntry, PutEntry, ReportRecord, TransferOp, TransferOps, VersionedId, v1,
};
use moontide_types::limits::{BATCH_KEYS_MAX, KEY_BYTES_MAX, OBJECT_BYTES_MAX, REQUEST_BYTES_MAX};
use moontide_types::record::{
    Attributes, HEADER_BYTES, Header, KeySection, RecordDescription, State, WORD_OFFSET, trailer_crc,
};
use moontide_types::tensor::{TENSOR_HEADER_BYTES, TensorError, TensorHeader};
use moontide_types::{GroupId, Term};
use prost::Message;
use prost::bytes::Bytes;

/// Decoder under test: takes arbitrary bytes, and panics if an assertion fails.
pub type Target = fn(&[u8]);

/// All targets, by the name of their file in `fuzz_targets/` and of their directory in `corpus/`.
pub const TARGETS: &[(&str, Target)] = &[
    ("record_header", record_header),
    ("record_description", record_description),
    ("trailer", trailer),
    ("attributes", attributes),
    ("frame_header", frame_header),
    ("transfer_ops", transfer_ops),
    ("packed_keys", packed_keys),
    ("report_records", report_records),
    ("control_messages", control_messages),
    ("shm_messages", shm_messages),
    ("world_messages", world_messages),
    ("allocator", allocator),
    ("disk_preamble", disk_preamble),
    ("disk_footer", disk_footer),
    ("disk_tombstones", disk_tombstones),
    ("tensor_header", tensor_header),
    ("suspended_sequence", suspended_sequence),
    ("registry_documents", registry_documents),
    ("identities", identities),
    ("tls_handshake", tls_handshake),
];

/// Reads the identity of a process as text, and in a certificate.
pub fn identities(data: &[u8]) {
    if let Some(identity) = std::str::from_utf8(data).ok().and_then(|text| text.parse::<Identity>().ok()) {
        let text = identity.to_string();
        assert_eq!(text.parse::<Identity>().as_ref(), Ok(&identity));
        // A node may be written by its name; all others have one text.
        assert!(text.as_bytes() == data || matches!(identity.role(), Role::Node(_)), "{text}");
    }
    if let Ok(identity) = identity_of(data) {
        assert_eq!(identity.to_string().parse(), Ok(identity));
    }
}

/// Lets a server receive bytes of a client in its TLS handshake.
pub fn tls_handshake(data: &[u8]) {
    static SERVER: OnceLock<Arc<rustls::ServerConfig>> = OnceLock::new();
    let config = SERVER.get_or_init(|| {
        let directory = Directory::new();
        let files = Authority::new().issue(&directory, "master", Role::Master);
        let credentials = Credentials::load(files).expect("a new certificate");
        credentials.server(ClientCertificates::Required, &[])
    });
    let mut session = Session::server(Arc::clone(config)).expect("a valid configuration");
    let mut rest = data;
    while !rest.is_empty() {
        let space = session.space();
        let len = rest.len().min(space.len());
        space[..len].copy_from_slice(&rest[..len]);
        session.received(len);
        rest = &rest[len..];
        match session.handshake() {
            Ok(is_done) => assert!(!is_done, "no input has the key of a client's certificate"),
            Err(_) => return,
        }
        let unsent = session.unsent().len();
        session.sent(unsent);
    }
}

/// Decodes the 128-byte header of a record: as it is, and with a valid CRC, which random changes never produce.
pub fn record_header(data: &[u8]) {
    let Some((bytes, _)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    check_record_header(bytes);
    let mut sealed = *bytes;
    sealed[WORD_OFFSET] &= !3; // the CRC takes the state's two bits as zero
    let crc = crc32c::crc32c(&sealed[..HEADER_BYTES - 4]);
    sealed[WORD_OFFSET] = bytes[WORD_OFFSET];
    sealed[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    check_record_header(&sealed);
}

fn check_record_header(bytes: &[u8; HEADER_BYTES]) {
    let Ok(header) = Header::decode(bytes) else { return };
    assert_eq!(header.encode(), *bytes);
    assert!(header.stripe_offset + header.stripe_len <= header.object_len);
    assert!(header.object_len <= OBJECT_BYTES_MAX);
    let layout = header.layout().expect("a decoded header has a layout");
    assert!(layout.total_len() >= header.stripe_len);
}

/// Decodes the description of a record, as a node that copies it gets it: as it is, and with valid CRCs.
pub fn record_description(data: &[u8]) {
    check_record_description(data);
    let Some((header, rest)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok(header) = Header::decode(header) else { return };
    let split = rest.len().min(header.key_len as usize);
    let (key, attributes) = rest.split_at(split);
    let sealed = Header { trailer_crc: trailer_crc(key, attributes), ..header };
    check_record_description(&[&sealed.encode(), rest].concat());
}

fn check_record_description(data: &[u8]) {
    let Ok(description) = RecordDescription::decode(data) else { return };
    let mut key = vec![];
    description.key.encode(&mut key);
    assert_eq!(RecordDescription::encode(&description.header, &key, description.attributes), data);
    assert_eq!(description.header.word.state(), State::Ready);
}

/// Decodes the header of a tensor: as it is, and with a valid CRC.
pub fn tensor_header(data: &[u8]) {
    let Some((bytes, _)) = data.split_first_chunk::<TENSOR_HEADER_BYTES>() else { return };
    check_tensor_header(bytes);
    let mut sealed = *bytes;
    let crc = crc32c::crc32c(&sealed[..TENSOR_HEADER_BYTES - 4]);
    sealed[TENSOR_HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    check_tensor_header(&sealed);
}

fn check_tensor_header(bytes: &[u8; TENSOR_HEADER_BYTES]) {
    // A payload of 0 bytes fails with `Length` unless the header describes an empty tensor.
    let len = match TensorHeader::decode(bytes, 0) {
        Ok(header) => header.payload_bytes(),
        Err(TensorError::Length { expected, .. }) => expected,
        Err(_) => return,
    };
    let header = TensorHeader::decode(bytes, len + TENSOR_HEADER_BYTES as u64).expect("its own length");
    assert_eq!(header.encode(), *bytes);
    let product: u128 = header.shape().iter().map(|&len| u128::from(len)).product();
    assert_eq!(product * header.dtype().bytes() as u128, u128::from(len));
}

/// Decodes what masters read from a registry: as a cluster state, as the addresses of a master, and as an identity.
pub fn registry_documents(data: &[u8]) {
    if let Ok(state) = ClusterState::decode(data) {
        let json = state.encode().expect("a decoded state is within all limits");
        assert_eq!(ClusterState::decode(&json), Ok(state.clone()));
        // What masters do with it.
        for master in state.masters.keys().filter_map(|&number| Term::new(number).ok()) {
            assert!(
                state.groups_of(master).all(|group| usize::from(group.group.0) < state.group_owners.len())
            );
        }
        let addresses = MasterAddresses::default();
        if let Some((next, term)) = state.with_owner(&[GroupId(0)], Term::ZERO, &addresses) {
            assert!(term.get() > state.last_term && next.groups_of(Term::ZERO).any(|g| g.term == term));
        }
    }
    let _ = MasterAddresses::decode(data);
    let _ = ClusterIdentity::decode(data);
}

/// Decodes a sequence that was suspended in another process.
pub fn suspended_sequence(data: &[u8]) {
    let Some(suspended) = SuspendedSequence::from_bytes(data) else { return };
    assert_eq!(suspended.to_bytes(), data);
    assert!(suspended.computed_tokens() <= suspended.tokens().len());
}

/// Decodes the key section of a trailer: tenant and key.
pub fn trailer(data: &[u8]) {
    let Ok(section) = KeySection::decode(data) else { return };
    let mut again = vec![];
    section.encode(&mut again);
    assert_eq!(again, data);
    assert_eq!(section.encoded_len(), data.len());
}

/// Decodes the attributes section of a trailer. Kinds of later releases are skipped, so only the value must round-trip.
pub fn attributes(data: &[u8]) {
    let Ok(attributes) = Attributes::decode(data) else { return };
    let mut again = vec![];
    attributes.encode(&mut again);
    assert!(again.len() <= data.len());
    assert_eq!(Attributes::decode(&again), Ok(attributes));
}

/// Decodes a frame header, as it is and with a valid CRC, and the body of a Hello after it.
pub fn frame_header(data: &[u8]) {
    let Some((bytes, body)) = data.split_first_chunk::<FRAME_HEADER_BYTES>() else { return };
    check_frame_header(bytes);
    let mut sealed = *bytes;
    let crc = crc32c::crc32c(&sealed[..FRAME_HEADER_BYTES - 4]);
    sealed[FRAME_HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    check_frame_header(&sealed);
    if let Ok(hello) = Hello::decode_body(body) {
        let mut again = vec![];
        hello.encode(&mut again);
        assert!(body.starts_with(&again), "only fields of later releases may follow");
    }
}

fn check_frame_header(bytes: &[u8; FRAME_HEADER_BYTES]) {
    let Ok(header) = FrameHeader::decode(bytes) else { return };
    assert_eq!(header.encode(), *bytes);
    assert!(header.body_len as usize <= header.kind.body_len_max());
    assert!(header.body_len as usize <= REQUEST_BYTES_MAX);
    assert!(header.kind.is_request() == (header.timeout_ms > 0));
}

/// Returns the kind of the frame header at the start of an input, if it is valid.
pub fn accepted_frame(data: &[u8]) -> Option<FrameKind> {
    let (bytes, _) = data.split_first_chunk()?;
    FrameHeader::decode(bytes).ok().map(|header| header.kind)
}

/// Decodes the body of a Read, a Write or a Release: operations, and whether they are valid in such a frame.
pub fn transfer_ops(data: &[u8]) {
    let ops = records::<TransferOp>(data, OPS_PER_FRAME_MAX);
    let payload_len = ops.map_or(0, |ops| ops.iter().map(|op| op.len).sum());
    for op in ops.iter().flat_map(Packed::iter) {
        assert!(op.offset + op.len <= OBJECT_BYTES_MAX);
    }
    for kind in [FrameKind::Read, FrameKind::Write, FrameKind::Release] {
        let header = FrameHeader { body_len: data.len() as u32, payload_len, ..FrameHeader::new(kind, 1) };
        if let Ok(of_frame) = TransferOps::decode(&header, data) {
            assert_eq!(Some(of_frame.ops()), ops);
            assert!(of_frame.ops().iter().all(|op| Some(op.kind) == of_frame.ops().get(0).map(|op| op.kind)));
        }
    }
}

/// Decodes the packed keys of a batch.
pub fn packed_keys(data: &[u8]) {
    let Ok(keys) = PackedKeys::decode(data) else { return };
    assert!(keys.len() <= BATCH_KEYS_MAX);
    let mut again = PackedKeysBuilder::new();
    for key in keys.iter() {
        assert!((1..=KEY_BYTES_MAX).contains(&key.as_bytes().len()));
        again.push(key).expect("a decoded key can be encoded");
    }
    assert_eq!(again.finish(), data);
}

/// Decodes the packed records of sessions and calls; the first byte selects the type.
pub fn report_records(data: &[u8]) {
    let Some((&which, data)) = data.split_first() else { return };
    let max = SESSION_RECORDS_MAX;
    match which {
        0 => {
            let Some(reports) = records::<ReportRecord>(data, max) else { return };
            for report in reports.iter().filter(|report| report.word.state() != State::Free) {
                assert!(report.extent.span().end() >= report.payload_offset + report.stripe_len);
            }
        }
        1 => drop(records::<OffloadRecord>(data, max)),
        2 => drop(records::<NodeCommand>(data, max)),
        3 => drop(records::<CommandResult>(data, max)),
        4 => drop(records::<VersionedId>(data, max)),
        5 => drop(records::<Handle>(data, max)),
        6 => drop(records::<ObjectEntry>(data, max)),
        7 => drop(records::<PutEntry>(data, max)),
        8 => drop(records::<PutEndEntry>(data, max)),
        9 => drop(records::<CopySource>(data, max)),
        _ => drop(records::<CommitEntry>(data, max)),
    }
}

/// Decodes the messages between a node and a local client.
pub fn shm_messages(data: &[u8]) {
    let Ok(message) = moontide_heap::ShmMessage::decode(data) else { return };
    assert_eq!(message.encode(), data);
}

/// Decodes the messages between the ranks of a world.
pub fn world_messages(data: &[u8]) {
    let Ok(message) = moontide_symmetric::WorldMessage::decode(data) else { return };
    assert_eq!(message.encode(), data);
}

/// Runs bytes as steps of an allocator and of its naive model, which is that of the heap's own tests.
pub fn allocator(data: &[u8]) {
    steps::run_steps(data);
}

/// Decodes a record on disk: everything before its payload, and the payload.
pub fn disk_preamble(data: &[u8]) {
    moontide_disk::fuzzing::front(data);
}

/// Decodes the footer of a bucket.
pub fn disk_footer(data: &[u8]) {
    moontide_disk::fuzzing::bucket_footer(data);
}

/// Decodes a block of the tombstone log of a disk.
pub fn disk_tombstones(data: &[u8]) {
    moontide_disk::fuzzing::removals(data);
}

/// Decodes records. Valid ones encode to the same bytes.
fn records<T: FixedRecord>(data: &[u8], max: usize) -> Option<Packed<'_, T>> {
    let records = Packed::<T>::decode(data, max).ok()?;
    assert!(records.len() <= max);
    assert_eq!(records.iter().collect::<PackedBuilder<T>>().finish(), data);
    assert!((0..records.len()).all(|index| records.get(index).is_some()));
    assert!(records.get(records.len()).is_none());
    Some(records)
}

/// Decodes and converts a message: plain struct → message → plain struct must not change it. Returns whether it is
/// accepted.
macro_rules! message {
    ($name:ident, $data:expr) => {{
        let message = convert::decode::<<convert::$name as Wire>::Message>(Bytes::copy_from_slice($data));
        match message.as_ref().map_err(|error| *error).and_then(convert::$name::from_wire) {
            Ok(plain) => {
                let sent = convert::encode(&plain).expect("a decoded message can be encoded");
                let received = convert::decode(Bytes::from(sent)).expect("an encoded message can be decoded");
                assert_eq!(convert::$name::from_wire(&received), Ok(plain));
                true
            }
            Err(error) => {
                assert!(!error.to_string().is_empty() && !error.code().hint().is_empty());
                false
            }
        }
    }};
}

macro_rules! messages {
    ($($name:ident)*) => {
        /// Names of the messages, indexed by the byte that selects them. New ones are appended.
        pub const MESSAGES: &[&str] = &[$(stringify!($name),)*];

        /// Returns the name of an accepted message, and its encoded form.
        fn check_message(data: &[u8]) -> Option<(&'static str, &[u8])> {
            let (&which, data) = data.split_first()?;
            let &name = MESSAGES.get(usize::from(which))?;
            let accepted = match name {
                $(stringify!($name) => message!($name, data),)*
                _ => unreachable!("both come from one list"),
            };
            accepted.then_some((name, data))
        }
    };
}
messages! {
    ExistRequest ExistResponse GetReplicaListRequest GetReplicaListResponse PutStartRequest PutStartResponse
    PutEndRequest PutRevokeRequest RemoveRequest TouchRequest SetPinRequest PrefetchRequest OutcomesResponse
    BeginRequest CommitRequest SlotOutcomes OpenSessionRequest OpenSessionResponse MountSegmentsRequest
    MountSegmentsResponse UnmountSegmentsRequest NodeMessage MasterMessage RemoveByPrefixRequest
    RemoveByRegexRequest RemoveAllRequest GetJobRequest GetJobResponse ListKeysRequest QueryKeysRequest EvictRequest
    SetTenantQuotaRequest GetTenantsRequest ListSegmentsRequest DrainSegmentRequest DrainNodeRequest
    GetClusterInfoResponse
    LoadRequest LoadReply AttachRequest AttachReply DescribeReply GetNodesResponse HandoffGroupRequest
    PollInvalidationsRequest PollInvalidationsResponse
}

/// Decodes a control message; the first byte selects the type.
pub fn control_messages(data: &[u8]) {
    check_message(data);
}

/// Names of the bodies of session messages, as returned by [`accepted_message`].
pub const SESSION_BODIES: &[&str] = &[
    "Heartbeat",
    "CommandResults",
    "Report",
    "ReportEnd",
    "Offloaded",
    "DiskEvicted",
    "CapabilityKeyHeld",
    "Commands",
    "HeartbeatAck",
    "CapabilityKey",
];

/// Returns the name of an accepted message, and the name of its body if it is a session message.
pub fn accepted_message(data: &[u8]) -> Option<(&'static str, Option<&'static str>)> {
    use v1::{master_message, node_message};
    let (name, data) = check_message(data)?;
    let node = |message: v1::NodeMessage| match message.body? {
        node_message::Body::Heartbeat(_) => Some("Heartbeat"),
        node_message::Body::CommandResults(_) => Some("CommandResults"),
        node_message::Body::Report(_) => Some("Report"),
        node_message::Body::ReportEnd(_) => Some("ReportEnd"),
        node_message::Body::Offloaded(_) => Some("Offloaded"),
        node_message::Body::DiskEvicted(_) => Some("DiskEvicted"),
        node_message::Body::CapabilityKeyHeld(_) => Some("CapabilityKeyHeld"),
    };
    let master = |message: v1::MasterMessage| match message.body? {
        master_message::Body::Commands(_) => Some("Commands"),
        master_message::Body::HeartbeatAck(_) => Some("HeartbeatAck"),
        master_message::Body::CapabilityKey(_) => Some("CapabilityKey"),
    };
    let body = match name {
        "NodeMessage" => v1::NodeMessage::decode(data).ok().and_then(node),
        "MasterMessage" => v1::MasterMessage::decode(data).ok().and_then(master),
        _ => None,
    };
    Some((name, body))
}
