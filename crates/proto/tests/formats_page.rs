//! `docs/formats.md` against the records of this crate.

#[path = "../../types/tests/page/mod.rs"]
mod page;

use moontide_proto::limits::HELLO_BYTES_MAX;
use moontide_proto::{
    CapabilityKey, CommitEntry, CommitFlags, FRAME_FIELDS, FixedRecord, FrameKind, Granted, Handle,
    HandleFlags, Hello, Medium, ObjectEntry, ObjectFlags, OffloadFlags, OffloadRecord, OpFlags, OpKind,
    Order, OrderFlags, OrderKind, OrderPhase, OrderResult, PutEndEntry, PutEntry, ReportFlags, ReportRecord,
    Right, TransferOp, VersionedId,
};
use moontide_types::{Epoch, Generation, ObjectId, SegmentId, SlotId, Term};

#[test]
fn every_record_is_drawn_as_it_is() {
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
    check::<Order>();
    check::<OrderResult>();
    check::<Hello>();
}

#[test]
fn a_capability_is_made_of_the_bytes_that_are_drawn() {
    let granted = Granted {
        right: Right::Write,
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
        assert_eq!(offset, input.len(), "{} follows what is in front of it", row[2]);
        match row[2] {
            "right" => input.push(2),
            "spare" => input.resize(offset + bytes, 0),
            "segment" => input.extend(granted.segment.0.to_le_bytes()),
            "slot" => input.extend(granted.slot.0.to_le_bytes()),
            "generation" => input.extend(granted.generation.0.to_le_bytes()),
            "epoch" => input.extend(granted.epoch.bits().to_le_bytes()),
            "id" => input.extend(granted.id.0),
            "term" => input.extend(granted.term.get().to_le_bytes()),
            other => panic!("{other} is not in a capability"),
        }
        assert_eq!(input.len(), offset + bytes, "{}", row[2]);
    }
    let made = CapabilityKey::new([7; 32]).seal(&granted);
    assert_eq!(made.0, blake3::keyed_hash(&[7; 32], &input).as_bytes()[..16]);
}

const PAGE: &str = include_str!("../../../docs/formats.md");

#[test]
fn every_number_is_listed_as_it_is() {
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
    numbers!(OpKind OrderKind OrderPhase Medium);
    bits!(OpFlags ObjectFlags HandleFlags CommitFlags OrderFlags ReportFlags OffloadFlags);
}

#[test]
fn every_frame_is_listed_with_its_largest_body() {
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
