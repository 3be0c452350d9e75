//! Golden vectors of the fixed formats, computed by a Python script (`golden/make.py`), in both directions.

use std::collections::BTreeMap;

use moontide_proto::*;
use moontide_types::record::{State, Word};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, Key, MapVersion, NodeId, ObjectId, SegmentId, SlotId,
    TenantGeneration, Term,
};

fn vectors() -> BTreeMap<&'static str, Vec<u8>> {
    let byte = |hex: &str| u8::from_str_radix(hex, 16).unwrap();
    let bytes = |hex: &str| (0..hex.len()).step_by(2).map(|i| byte(&hex[i..i + 2])).collect();
    let lines = include_str!("../golden/frames.txt").lines();
    lines.map(|line| line.split_once(' ').unwrap()).map(|(name, hex)| (name, bytes(hex))).collect()
}

fn term(number: u32) -> Term {
    Term::new(number).unwrap()
}

fn epoch(number: u32, sequence: u64) -> Epoch {
    Epoch::new(term(number), sequence).unwrap()
}

fn ident() -> ObjectId {
    ObjectId(std::array::from_fn(|i| i as u8))
}

fn capability() -> Capability {
    Capability(std::array::from_fn(|i| 0xa0 + i as u8))
}

fn check_frame(name: &str, header: FrameHeader) {
    let expected: [u8; 64] = vectors()[name][..].try_into().unwrap();
    assert_eq!(header.encode(), expected, "{name}");
    assert_eq!(FrameHeader::decode(&expected), Ok(header), "{name}");
}

fn check_record<T: FixedRecord + PartialEq + std::fmt::Debug>(name: &str, record: T) {
    let expected = &vectors()[name];
    let mut bytes = vec![];
    record.encode(&mut bytes);
    assert_eq!(&bytes, expected, "{name}");
    assert_eq!(T::decode(expected), Ok(record), "{name}");
}

#[test]
fn frame_headers_match_golden_vectors() {
    check_frame(
        "frame_exist",
        FrameHeader {
            body_len: 120,
            timeout_ms: 250,
            map_version: MapVersion(9),
            term: term(3),
            group: Some(GroupId(5)),
            ..FrameHeader::new(FrameKind::Exist, 7)
        },
    );
    check_frame(
        "frame_read",
        FrameHeader {
            body_len: 160,
            timeout_ms: 1000,
            term: Term::MAX,
            ..FrameHeader::new(FrameKind::Read, 0x1122_3344_5566_7788)
        },
    );
    check_frame(
        "frame_write",
        FrameHeader {
            body_len: 80,
            payload_len: 262_144,
            timeout_ms: 1000,
            term: term(7),
            flags: FrameFlags::MORE,
            ..FrameHeader::new(FrameKind::Write, 3)
        },
    );
    check_frame(
        "frame_write_reply",
        FrameHeader {
            body_len: 4,
            map_version: MapVersion(2),
            term: term(4),
            status: Some(ErrorCode::Busy),
            ..FrameHeader::new(FrameKind::WriteReply, 1)
        },
    );
    check_frame(
        "frame_error",
        FrameHeader {
            body_len: 5,
            status: Some(ErrorCode::StaleSession),
            ..FrameHeader::new(FrameKind::Error, 2)
        },
    );
}

#[test]
fn capabilities_match_golden_vectors() {
    let key =
        CapabilitySecret::new(std::array::from_fn(|i| i as u8)).key_of(NodeId(0x0102_0304_0506_0708), 9);
    assert_eq!(key.as_bytes()[..], vectors()["capability_key"]);
    let read = CapabilityScope {
        right: AccessRight::Read,
        stripe: 3,
        segment: SegmentId(4),
        generation: Generation(5),
        slot: SlotId(6),
        term: term(7),
        epoch: epoch(7, 99),
        id: ident(),
    };
    let shape = RecordShape {
        extent: Extent { start: 8, units: 1024 },
        object_len: 524_288,
        stripe_offset: 262_144,
        stripe_len: 262_144,
        stripe_count: 2,
        digestless: true,
        id_key: 1,
        tenant_generation: TenantGeneration(6),
    };
    let write = CapabilityScope { right: AccessRight::Write(shape), stripe: 1, ..read };
    for (name, scope) in [("capability_read", read), ("capability_write", write)] {
        assert_eq!(key.sign(&scope).0[..], vectors()[name], "{name}");
    }
}

#[test]
fn transfer_ops_match_golden_vectors() {
    let read = TransferOp {
        kind: OpKind::Read,
        flags: OpFlags::NONE,
        stripe: 3,
        segment: SegmentId(4),
        generation: Generation(5),
        slot: SlotId(6),
        term: term(7),
        epoch: epoch(7, 99),
        id: ident(),
        offset: 4096,
        len: 262_144,
        capability: capability(),
    };
    check_record("op_read", read);
    let load = TransferOp {
        kind: OpKind::Load,
        flags: OpFlags::DISK,
        stripe: 0,
        segment: SegmentId(0),
        generation: Generation(0),
        slot: SlotId(0),
        offset: 0,
        len: 1,
        ..read
    };
    check_record("op_load", load);
}

#[test]
fn report_records_match_golden_vectors() {
    let ready = ReportRecord {
        slot: SlotId(11),
        tenant: 2,
        flags: ReportFlags::TOUCHED,
        extent: Extent { start: 8, units: 1024 },
        word: Word::new(epoch(3, 17), State::Ready),
        id: ident(),
        object_len: 524_288,
        root: 0x0102_0304_0506_0708,
        stripe_offset: 262_144,
        stripe_len: 262_144,
        payload_offset: 4096,
        stripe_index: 1,
        stripe_count: 2,
        id_key: 1,
        tenant_generation: TenantGeneration(6),
    };
    check_record("report_ready", ready);
    check_record("report_free", ReportRecord::free(SlotId(12), epoch(3, 18)));
}

#[test]
fn put_entries_match_golden_vectors() {
    check_record("put_entry", PutEntry { len: 262_144, config: 1 });
}

#[test]
fn packed_keys_match_golden_vectors() {
    let keys: [&[u8]; 3] = [b"a", b"prefix/\x00\xff", &[b'z'; 300]];
    let mut builder = PackedKeysBuilder::new();
    keys.iter().for_each(|key| builder.push(Key::new(key).unwrap()).unwrap());
    let vectors = vectors();
    assert_eq!(builder.finish(), vectors["packed_keys"]);
    let packed = PackedKeys::decode(&vectors["packed_keys"]).unwrap();
    assert!(packed.iter().map(Key::as_bytes).eq(keys));
    assert_eq!(PackedKeysBuilder::new().finish(), vectors["packed_no_keys"]);
    assert!(PackedKeys::decode(&vectors["packed_no_keys"]).unwrap().is_empty());
}
