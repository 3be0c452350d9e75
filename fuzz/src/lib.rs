//! One function per decoder. Each takes arbitrary bytes and asserts that what is accepted means something:
//! it encodes to the same bytes again, or to an equal value, and its invariants hold.
//!
//! libFuzzer drives them through `fuzz_targets/`; `tests/replay.rs` runs the corpus and random changes of it
//! on a stable compiler. [`TARGETS`] is the list that both are held against. `examples/seeds.rs` writes the
//! first inputs.

#![forbid(unsafe_code)]

#[path = "../../crates/heap/tests/alloc/model.rs"]
mod model;
#[path = "../../crates/heap/tests/alloc/steps.rs"]
mod steps;

use moontide_proto::convert::{self, Wire};
use moontide_proto::limits::{OPS_PER_FRAME_MAX, SESSION_RECORDS_MAX};
use moontide_proto::{
    FRAME_HEADER_BYTES, FixedRecord, FrameHeader, Handle, Hello, ObjectEntry, OffloadRecord, Order,
    OrderResult, Packed, PackedBuilder, PackedKeys, PackedKeysBuilder, ReportRecord, TransferOp, VersionedId,
};
use moontide_types::bounds::{BATCH_KEYS_MAX, KEY_BYTES_MAX, OBJECT_BYTES_MAX, REQUEST_BYTES_MAX};
use moontide_types::record::{Attributes, HEADER_BYTES, Header, KeySection, State, WORD_OFFSET};
use prost::Message;
use prost::bytes::Bytes;

/// A decoder under test: arbitrary bytes in, a panic if something is wrong.
pub type Target = fn(&[u8]);

/// Every target, by the name of its file in `fuzz_targets/` and of its folder in `corpus/`.
pub const TARGETS: &[(&str, Target)] = &[
    ("record_header", record_header),
    ("trailer", trailer),
    ("attributes", attributes),
    ("frame_header", frame_header),
    ("transfer_ops", transfer_ops),
    ("packed_keys", packed_keys),
    ("report_records", report_records),
    ("control_messages", control_messages),
    ("door_messages", door_messages),
    ("allocator", allocator),
];

/// The 128-byte header of a record: as it is, and with the right CRC, which random changes never hit.
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
    let layout = header.layout().expect("a decoded header can be laid out");
    assert!(layout.total_len() >= header.stripe_len);
}

/// Tenant and key behind a payload.
pub fn trailer(data: &[u8]) {
    let Ok(section) = KeySection::decode(data) else { return };
    let mut again = vec![];
    section.encode(&mut again);
    assert_eq!(again, data);
    assert_eq!(section.encoded_len(), data.len());
}

/// Attributes behind a payload. Kinds of later releases are skipped, so only the value must come back.
pub fn attributes(data: &[u8]) {
    let Ok(attributes) = Attributes::decode(data) else { return };
    let mut again = vec![];
    attributes.encode(&mut again);
    assert!(again.len() <= data.len());
    assert_eq!(Attributes::decode(&again), Ok(attributes));
}

/// The header of a frame, as it is and with the right CRC, and the body of a Hello behind it.
pub fn frame_header(data: &[u8]) {
    let Some((bytes, body)) = data.split_first_chunk::<FRAME_HEADER_BYTES>() else { return };
    check_frame_header(bytes);
    let mut sealed = *bytes;
    let crc = crc32c::crc32c(&sealed[..FRAME_HEADER_BYTES - 4]);
    sealed[FRAME_HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    check_frame_header(&sealed);
    if let Ok(hello) = Hello::decode(body) {
        let mut again = vec![];
        hello.encode(&mut again);
        assert_eq!(again, body);
    }
}

fn check_frame_header(bytes: &[u8; FRAME_HEADER_BYTES]) {
    let Ok(header) = FrameHeader::decode(bytes) else { return };
    assert_eq!(header.encode(), *bytes);
    assert!(header.body_len as usize <= header.kind.body_len_max());
    assert!(header.body_len as usize <= REQUEST_BYTES_MAX);
    assert!(header.kind.is_request() == (header.deadline_ms > 0));
}

/// The body of a Read or Write.
pub fn transfer_ops(data: &[u8]) {
    let Some(ops) = records::<TransferOp>(data, OPS_PER_FRAME_MAX) else { return };
    for op in ops.iter() {
        assert!(op.offset + op.len <= OBJECT_BYTES_MAX);
    }
}

/// The keys of a batch.
pub fn packed_keys(data: &[u8]) {
    let Ok(keys) = PackedKeys::decode(data) else { return };
    assert!(keys.len() <= BATCH_KEYS_MAX);
    let mut again = PackedKeysBuilder::new();
    for key in keys.iter() {
        assert!((1..=KEY_BYTES_MAX).contains(&key.as_bytes().len()));
        again.push(key).expect("what was decoded can be encoded");
    }
    assert_eq!(again.finish(), data);
}

/// The packed records of a node session; the first byte selects which.
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
        2 => drop(records::<Order>(data, max)),
        3 => drop(records::<OrderResult>(data, max)),
        4 => drop(records::<VersionedId>(data, max)),
        5 => drop(records::<Handle>(data, max)),
        _ => drop(records::<ObjectEntry>(data, max)),
    }
}

/// What is said between a node and a client of the same host.
pub fn door_messages(data: &[u8]) {
    let Ok(message) = moontide_heap::Message::decode(data) else { return };
    assert_eq!(message.encode(), data);
}

/// Bytes as steps of an allocator beside its naive model, which is the one of the heap's own tests.
pub fn allocator(data: &[u8]) {
    steps::run_steps(data);
}

/// The records, if they are valid; then they encode to the same bytes.
fn records<T: FixedRecord>(data: &[u8], max: usize) -> Option<Packed<'_, T>> {
    let records = Packed::<T>::decode(data, max).ok()?;
    assert!(records.len() <= max);
    assert_eq!(records.iter().collect::<PackedBuilder<T>>().finish(), data);
    assert!((0..records.len()).all(|index| records.get(index).is_some()));
    assert!(records.get(records.len()).is_none());
    Some(records)
}

/// A message, decoded and converted: plain struct → message → plain struct must not change it.
macro_rules! message {
    ($name:ident, $data:expr) => {
        if let Ok(message) = <convert::$name as Wire>::Message::decode(Bytes::copy_from_slice($data)) {
            match convert::$name::from_wire(&message) {
                Ok(plain) => {
                    let sent = plain.to_wire().encode_to_vec();
                    let received = <convert::$name as Wire>::Message::decode(Bytes::from(sent));
                    let received = received.expect("what was encoded can be decoded");
                    assert_eq!(convert::$name::from_wire(&received), Ok(plain));
                }
                Err(error) => assert!(!error.to_string().is_empty() && !error.code().hint().is_empty()),
            }
        }
    };
}

macro_rules! messages {
    ($($name:ident)*) => {
        /// The names of the messages by the byte that selects them. New ones go to the end.
        pub const MESSAGES: &[&str] = &[$(stringify!($name),)*];

        /// A control message; the first byte selects which.
        pub fn control_messages(data: &[u8]) {
            let Some((&which, data)) = data.split_first() else { return };
            let Some(&name) = MESSAGES.get(usize::from(which)) else { return };
            match name {
                $(stringify!($name) => message!($name, data),)*
                _ => unreachable!("both come from one list"),
            }
        }
    };
}
messages! {
    ExistRequest ExistResponse GetReplicaListRequest GetReplicaListResponse PutStartRequest PutStartResponse
    PutEndRequest PutRevokeRequest RemoveRequest TouchRequest SetPinRequest PrefetchRequest OutcomesResponse
    BeginRequest CommitRequest SlotOutcomes OpenSessionRequest OpenSessionResponse MountSegmentsRequest
    MountSegmentsResponse UnmountSegmentsRequest NodeMessage MasterMessage RemoveByPrefixRequest
    RemoveByRegexRequest RemoveAllRequest GetJobRequest JobProgress ListKeysRequest QueryKeysRequest EvictRequest
    SetTenantQuotaRequest GetTenantsRequest ListSegmentsRequest DrainSegmentRequest ClusterInfo
}
