//! `docs/formats.md` against the records of this crate.

#[path = "../../types/tests/page/mod.rs"]
mod page;

use moontide_proto::{
    CommitEntry, FRAME_FIELDS, FixedRecord, Handle, Hello, ObjectEntry, OffloadRecord, Order, OrderResult,
    PutEndEntry, ReportRecord, TransferOp, VersionedId,
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
    check::<PutEndEntry>();
    check::<VersionedId>();
    check::<CommitEntry>();
    check::<OffloadRecord>();
    check::<Order>();
    check::<OrderResult>();
    check::<Hello>();
}
