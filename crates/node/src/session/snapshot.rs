//! Snapshot of a segment at the start of its report: every record that is not FREE, in one pass under the segment's
//! lock.

use moontide_heap::KillOutcome;
use moontide_proto::v1;
use moontide_types::record::State;
use moontide_types::{MonoTime, SegmentId};

use crate::logic::commands::SlotVersion;
use crate::logic::report::{ReportBuilder, ReportedRecord, SegmentTerm, Snapshot, record_of};
use crate::memory::NodeMemory;

/// Returns the snapshot, its records numbered from `first` on, and the records that were killed because their key is
/// unreadable.
pub(super) fn take(
    memory: &NodeMemory,
    segment: SegmentId,
    first: u64,
) -> Option<(Snapshot, Vec<SlotVersion>)> {
    moontide_rt::mark!("about to take a snapshot");
    let node_segment = memory.segment(segment)?;
    let shape = node_segment.segment().shape();
    let (_, term) = node_segment.grant()?;
    let of = SegmentTerm { segment, generation: shape.generation, term };
    let mut builder = ReportBuilder::new(of, v1::ReportKind::Snapshot, first);
    let (mut writing, mut unreadable) = (Vec::new(), Vec::new());
    node_segment.segment().for_each_record(|slot, header, trailer| {
        let Some(trailer) = trailer else {
            return unreadable.push((segment, slot, header.word.epoch()));
        };
        let record = record_of(slot, header);
        let (tenant, key) = (trailer.tenant.as_str(), trailer.key.as_bytes());
        builder.push(record, tenant, key, trailer.attributes);
        if header.word.state() == State::Writing {
            let attributes = trailer.attributes.into();
            writing.push(ReportedRecord { record, tenant: tenant.into(), key: key.into(), attributes });
        }
    });
    // Records that are already dead are draining anyway.
    unreadable.retain(|&(segment, slot, epoch)| {
        memory.heap().kill(segment, slot, epoch, MonoTime(0)) == KillOutcome::Killed
    });
    let (chunks, records) = builder.finish();
    Some((Snapshot { of, chunks, records, writing }, unreadable))
}
