//! `docs/formats.md` against the records of this crate.

#[path = "../../types/tests/page/mod.rs"]
mod page;

use moontide_proto::limits::HELLO_BYTES_MAX;
use moontide_proto::{
    CommitEntry, CommitFlags, FRAME_FIELDS, FixedRecord, FrameKind, Handle, HandleFlags, Hello, Medium,
    ObjectEntry, ObjectFlags, OffloadFlags, OffloadRecord, OpFlags, OpKind, Order, OrderFlags, OrderKind,
    OrderPhase, OrderResult, PutEndEntry, PutEntry, ReportFlags, ReportRecord, TransferOp, VersionedId,
};

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
        ("| Error | 41 | ≤ ", FrameKind::Error),
    ] {
        let row = format!("{row}{} |", grouped(kind.body_len_max()));
        assert!(PAGE.contains(&row), "docs/formats.md should have: {row}");
    }
    assert_eq!(FrameKind::Hello.body_len_max(), HELLO_BYTES_MAX);
}
