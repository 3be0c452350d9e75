//! Comparison of `docs/formats.md` with the records of this crate.

#[path = "../../types/tests/page/mod.rs"]
mod page;

use moontide_proto::limits::HELLO_BYTES_MAX;
use moontide_proto::{
    AccessRight, CapabilityKey, CapabilityScope, CapabilitySecret, CommandFlags, CommandKind, CommandResult,
    CommandStatus, CommitEntry, CommitFlags, CopyPurpose, CopySource, FRAME_FIELDS, FixedRecord, FrameKind,
    Handle, HandleFlags, Hello, NodeCommand, ObjectEntry, ObjectFlags, OffloadFlags, OffloadRecord, OpFlags,
    OpKind, PutEndEntry, PutEndFlags, PutEntry, RecordShape, ReportFlags, ReportRecord, TransferOp,
    VersionedId,
};
use moontide_types::{
    Epoch, Extent, Generation, Medium, NodeId, ObjectId, SegmentId, SlotId, TenantGeneration, Term,
};

#[test]
fn record_fields_match_formats_doc() {
    fn check<T: FixedRecord>() {
        page::assert_fields(T::NAME, T::FIELDS);
    }
    page::assert_fields("Frame", FRAME_FIELDS);
    check::<TransferOp>();
    check::<ReportRecord>();
    check::<ObjectEntry>();
    check::<Handle>();
    check::<PutEntry>();
    check::<PutEndEntry>();
    check::<VersionedId>();
    check::<CommitEntry>();
    check::<OffloadRecord>();
    check::<NodeCommand>();
    check::<CopySource>();
    check::<CommandResult>();
    check::<Hello>();
}

#[test]
fn capability_input_matches_formats_doc() {
    let shape = RecordShape {
        extent: Extent { start: 0x2122_2324, units: 0x2526_2728 },
        object_len: 0x3132_3334_3536_3738,
        stripe_offset: 0x4142_4344_4546_4748,
        stripe_len: 0x5152_5354_5556_5758,
        stripe_count: 0x6162,
        digestless: true,
        id_key: 0x7172_7374,
        tenant_generation: TenantGeneration(0x8182_8384),
    };
    let granted = CapabilityScope {
        right: AccessRight::Write(shape),
        stripe: 0x0910,
        segment: SegmentId(0x0102),
        generation: Generation(0x0304_0506_0708_090a),
        slot: SlotId(0x0b0c_0d0e),
        epoch: Epoch::from_bits(0x0f10_1112_1314_1516).unwrap(),
        id: ObjectId(std::array::from_fn(|i| 0x20 + i as u8)),
        term: Term::new(0x1718).unwrap(),
    };
    let mut input = vec![];
    for row in page::table("Capability") {
        let [offset, bytes] = [row[0], row[1]].map(|number| number.parse::<usize>().unwrap());
        assert_eq!(offset, input.len(), "{} follows the previous field", row[2]);
        match row[2] {
            "right" => input.push(2),
            "digestless" => input.push(1),
            "stripe" => input.extend(granted.stripe.to_le_bytes()),
            "segment" => input.extend(granted.segment.0.to_le_bytes()),
            "slot" => input.extend(granted.slot.0.to_le_bytes()),
            "generation" => input.extend(granted.generation.0.to_le_bytes()),
            "epoch" => input.extend(granted.epoch.bits().to_le_bytes()),
            "id" => input.extend(granted.id.0),
            "term" => input.extend(granted.term.get().to_le_bytes()),
            "extent" => {
                input.extend(shape.extent.start.to_le_bytes());
                input.extend(shape.extent.units.to_le_bytes());
            }
            "object_len" => input.extend(shape.object_len.to_le_bytes()),
            "stripe_offset" => input.extend(shape.stripe_offset.to_le_bytes()),
            "stripe_len" => input.extend(shape.stripe_len.to_le_bytes()),
            "id_key" => input.extend(shape.id_key.to_le_bytes()),
            "tenant_generation" => input.extend(shape.tenant_generation.0.to_le_bytes()),
            "stripe_count" => input.extend(shape.stripe_count.to_le_bytes()),
            other => panic!("{other} is no input of a capability"),
        }
        assert_eq!(input.len(), offset + bytes, "{}", row[2]);
    }
    let hash = |key: &[u8; 32], input: &[u8]| *blake3::keyed_hash(key, input).as_bytes();
    let made = CapabilityKey::new([7; 32]).sign(&granted);
    assert_eq!(made.0, hash(&[7; 32], &input)[..16]);
    let read = CapabilityKey::new([7; 32]).sign(&CapabilityScope { right: AccessRight::Read, ..granted });
    (input[0], input[1]) = (1, 0);
    assert_eq!(read.0, hash(&[7; 32], &input[..48])[..16]);
    let (node, rotation) = (0x0102_0304_0506_0708u64, 0x1112_1314_1516_1718u64);
    let of_node = CapabilitySecret::new([9; 32]).key_of(NodeId(node), rotation);
    let input = [node.to_le_bytes(), rotation.to_le_bytes()].concat();
    assert_eq!(*of_node.as_bytes(), hash(&[9; 32], &input));
}

const PAGE: &str = include_str!("../../../docs/formats.md");

#[test]
fn enum_and_flag_numbers_match_formats_doc() {
    fn check(name: &str, values: impl Iterator<Item = (String, u64)>) {
        let values: Vec<_> = values.map(|(value, number)| format!("{value} {number}")).collect();
        let row = format!("| {name} | {} |", values.join(", "));
        assert!(PAGE.contains(&row), "docs/formats.md should have: {row}");
    }
    macro_rules! numbers {
        ($($name:ident)*) => {
            $(check(stringify!($name), $name::ALL.iter().map(|v| (format!("{v:?}"), v.number().into())));)*
        };
    }
    macro_rules! bits {
        ($($name:ident)*) => {
            $(check(
                stringify!($name),
                $name::ALL.iter().map(|(name, flag)| (name.to_string(), flag.bits().trailing_zeros().into())),
            );)*
        };
    }
    numbers!(OpKind CommandKind CommandStatus CopyPurpose Medium);
    bits!(OpFlags ObjectFlags HandleFlags CommitFlags PutEndFlags CommandFlags ReportFlags OffloadFlags);
}

#[test]
fn frame_body_limits_match_formats_doc() {
    let grouped = |number: usize| {
        let digits = number.to_string();
        let mut text = String::new();
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        text
    };
    for (row, kind) in [
        ("| Hello / HelloAck | 32 / 33 | 96 … ", FrameKind::Hello),
        ("| Read / Write | 34 / 36 | 80 … ", FrameKind::Read),
        ("| ReadReply / WriteReply | 35 / 37 | ≤ ", FrameKind::ReadReply),
        ("| Load | 46 | 80 … ", FrameKind::Load),
        ("| LoadReply | 47 | ≤ ", FrameKind::LoadReply),
        ("| Attach | 50 | ≤ ", FrameKind::Attach),
        ("| Error | 41 | ≤ ", FrameKind::Error),
    ] {
        let row = format!("{row}{} |", grouped(kind.body_len_max()));
        assert!(PAGE.contains(&row), "docs/formats.md should have: {row}");
    }
    assert_eq!(FrameKind::Hello.body_len_max(), HELLO_BYTES_MAX);
}
