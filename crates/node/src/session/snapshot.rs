//! The snapshot of a segment, as its report begins: every record that is not FREE, in one pass under the segment's lock.

use moontide_heap::Killed;
use moontide_proto::v1;
use moontide_types::record::State;
use moontide_types::{MonoTime, SegmentId};

use crate::decide::orders::Name;
use crate::decide::report::{Of, ReportBuilder, Reported, Snapshot, record_of};
use crate::memory::Memory;

/// The snapshot, its records numbered from `first` on, and what was killed because nobody can say what it is.
pub(super) fn take(memory: &Memory, segment: SegmentId, first: u64) -> Option<(Snapshot, Vec<Name>)> {
    let side = memory.side(segment)?;
    let shape = side.segment().shape();
    let (_, term) = side.grant()?;
    let of = Of { segment, generation: shape.generation, term };
    let mut builder = ReportBuilder::new(of, v1::ReportKind::Snapshot, first);
    let (mut writing, mut unreadable) = (Vec::new(), Vec::new());
    side.segment().for_each_record(|slot, header, trailer| {
        let Some(trailer) = trailer else {
            return unreadable.push((segment, slot, header.word.epoch()));
        };
        let record = record_of(slot, header);
        let (tenant, key) = (trailer.tenant.as_str(), trailer.key.as_bytes());
        builder.push(record, tenant, key, trailer.attributes);
        if header.word.state() == State::Writing {
            let attributes = trailer.attributes.into();
            writing.push(Reported { record, tenant: tenant.into(), key: key.into(), attributes });
        }
    });
    // Those that are dead already drain as they are.
    unreadable.retain(|&(segment, slot, epoch)| {
        memory.heap().kill(segment, slot, epoch, MonoTime(0)) == Killed::Dying
    });
    let (chunks, records) = builder.finish();
    Some((Snapshot { of, chunks, records, writing }, unreadable))
}
