//! Reports of a node's records to a master. [`ReportBuilder`] packs records into chunks; [`Reports`] tracks the report
//! of each segment and turns later changes into deltas.
//!
//! Records of a segment's report are numbered without gaps, snapshot and deltas together. A change of a segment whose
//! snapshot has not been taken in this session is not reported: the snapshot will contain it.
//!
//! | change since the snapshot | reported as |
//! |---|---|
//! | a WRITING record was committed | READY with its root |
//! | the writer abandoned a record or exited | DEAD |
//! | space was freed without a command | FREE |
//! | a record was begun that the master may not know | WRITING |
//!
//! The last kind is reported for a limited time after a session was lost: earlier reservations may still be used, and
//! the master no longer knows them. It responds with Reclaim commands.

use std::collections::{BTreeMap, BTreeSet};

use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{FixedRecord, PackedBuilder, PackedBytesBuilder, ReportFlags, ReportRecord, v1};
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::{Header, State, Word};
use moontide_types::{Epoch, Extent, Generation, SegmentId, SlotId, Term};
use v1::node_message::Body;

/// Maximum size of a chunk: the master applies it in a few milliseconds while the next one is in flight.
const CHUNK_BYTES_MAX: usize = 512 << 10;

/// A record of a report with its tenant, key and attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReportedRecord {
    pub(crate) record: ReportRecord,
    pub(crate) tenant: Box<str>,
    pub(crate) key: Box<[u8]>,
    pub(crate) attributes: Box<[u8]>,
}

/// Returns the report record of a header. The chunk sets the index of the tenant.
pub(crate) fn record_of(slot: SlotId, header: &Header) -> ReportRecord {
    let writing = header.word.state() == State::Writing;
    let units = header.layout().map_or(0, |layout| layout.units());
    ReportRecord {
        slot,
        tenant: 0,
        flags: if header.flags.digestless() { ReportFlags::DIGESTLESS } else { ReportFlags::NONE },
        extent: Extent { start: (header.payload_offset / UNIT_BYTES) as u32, units },
        word: header.word,
        id: header.id,
        object_len: header.object_len,
        root: if writing { 0 } else { header.root },
        stripe_offset: header.stripe_offset,
        stripe_len: header.stripe_len,
        payload_offset: header.payload_offset,
        stripe_index: header.stripe_index,
        stripe_count: header.stripe_count,
        id_key: header.id_key,
        tenant_generation: header.tenant_generation,
    }
}

/// Fields that all chunks of a segment have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentTerm {
    pub(crate) segment: SegmentId,
    pub(crate) generation: Generation,
    /// Adopted term of the segment.
    pub(crate) term: Term,
}

/// Packs records of one segment into chunks.
#[derive(Debug)]
pub(crate) struct ReportBuilder {
    of: SegmentTerm,
    kind: v1::ReportKind,
    /// Number of the next record.
    next: u64,
    full: Vec<v1::ReportChunk>,
    chunk: Chunk,
}

#[derive(Debug, Default)]
struct Chunk {
    first: u64,
    records: PackedBuilder<ReportRecord>,
    keys: PackedBytesBuilder,
    attributes: PackedBytesBuilder,
    has_attributes: bool,
    tenants: Vec<Box<str>>,
}

impl Chunk {
    fn bytes(&self) -> usize {
        self.records.len() * ReportRecord::BYTES + self.keys.encoded_len() + self.attributes.encoded_len()
    }

    fn tenant(&mut self, name: &str) -> u16 {
        // A chunk has few tenants, mostly one.
        let index = self.tenants.iter().position(|tenant| **tenant == *name);
        let index = index.unwrap_or_else(|| {
            self.tenants.push(name.into());
            self.tenants.len() - 1
        });
        index as u16 // ≤ SESSION_RECORDS_MAX
    }
}

impl ReportBuilder {
    /// Starts a report. `first`: number of the first record.
    pub(crate) fn new(of: SegmentTerm, kind: v1::ReportKind, first: u64) -> ReportBuilder {
        let chunk = Chunk { first, ..Chunk::default() };
        ReportBuilder { of, kind, next: first, full: Vec::new(), chunk }
    }

    pub(crate) fn push(&mut self, mut record: ReportRecord, tenant: &str, key: &[u8], attributes: &[u8]) {
        let more = ReportRecord::BYTES + key.len() + attributes.len() + 4;
        if self.chunk.records.len() == SESSION_RECORDS_MAX || self.chunk.bytes() + more > CHUNK_BYTES_MAX {
            self.close();
        }
        if record.word.state() != State::Free {
            record.tenant = self.chunk.tenant(tenant);
        }
        // A key and an attributes section have a few kilobytes, and the chunk was not full.
        self.chunk.keys.push(key).expect("a chunk is smaller than a packed array may be");
        self.chunk.attributes.push(attributes).expect("a chunk is smaller than a packed array may be");
        self.chunk.has_attributes |= !attributes.is_empty();
        self.chunk.records.push(&record);
        self.next += 1;
    }

    fn close(&mut self) {
        let chunk = std::mem::replace(&mut self.chunk, Chunk { first: self.next, ..Chunk::default() });
        if chunk.records.is_empty() {
            return;
        }
        self.full.push(v1::ReportChunk {
            segment: self.of.segment.0,
            generation: self.of.generation.0,
            term: self.of.term.get(),
            kind: self.kind.into(),
            first_record: chunk.first,
            records: chunk.records.finish().into(),
            keys: chunk.keys.finish().into(),
            tenants: chunk.tenants.into_iter().map(String::from).collect(),
            attributes: if chunk.has_attributes {
                chunk.attributes.finish().into()
            } else {
                Default::default()
            },
        });
    }

    /// Returns the chunks and the number of the next record.
    pub(crate) fn finish(mut self) -> (Vec<v1::ReportChunk>, u64) {
        self.close();
        (self.full, self.next)
    }
}

/// Snapshot of a segment.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) of: SegmentTerm,
    pub(crate) chunks: Vec<v1::ReportChunk>,
    /// Number of records in the report so far.
    pub(crate) records: u64,
    /// Records in state WRITING: their later transitions are reported.
    pub(crate) writing: Vec<ReportedRecord>,
}

/// A change of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SlotChange {
    Begun(SegmentId, Box<ReportedRecord>),
    Committed { segment: SegmentId, slot: SlotId, epoch: Epoch, root: u64 },
    Killed { segment: SegmentId, slot: SlotId, epoch: Epoch },
    Freed { segment: SegmentId, slot: SlotId, epoch: Epoch },
}

/// Progress of the reports of a session.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    progress: BTreeMap<SegmentId, ReportProgress>,
    /// Segments whose snapshot has to be taken.
    due: BTreeSet<SegmentId>,
    /// Records that are in state WRITING according to the reports.
    writing: BTreeMap<(SegmentId, SlotId), ReportedRecord>,
}

#[derive(Clone, Copy, Debug)]
struct ReportProgress {
    of: SegmentTerm,
    /// Number of the next record.
    next: u64,
}

impl Reports {
    /// Adds a mounted segment. A segment without records (`occupied` is false) needs no snapshot.
    pub(crate) fn mounted(&mut self, of: SegmentTerm, occupied: bool) {
        if occupied {
            self.due.insert(of.segment);
        } else {
            self.progress.insert(of.segment, ReportProgress { of, next: 0 });
        }
    }

    /// Removes a segment that belongs to another master now.
    pub(crate) fn unmounted(&mut self, segment: SegmentId) {
        self.progress.remove(&segment);
        self.due.remove(&segment);
        self.writing.retain(|&(of, _), _| of != segment);
    }

    /// Reports a segment again; its record numbers continue.
    pub(crate) fn restart(&mut self, segment: SegmentId) {
        self.due.insert(segment);
    }

    /// Returns the next segment whose snapshot has to be taken, and the number of its first record.
    pub(crate) fn next_due(&self) -> Option<(SegmentId, u64)> {
        let &segment = self.due.first()?;
        Some((segment, self.progress.get(&segment).map_or(0, |progress| progress.next)))
    }

    /// Whether all snapshots have been taken.
    pub(crate) fn is_complete(&self) -> bool {
        self.due.is_empty()
    }

    /// Returns the messages for a snapshot.
    pub(crate) fn snapshot(&mut self, snapshot: Snapshot) -> Vec<Body> {
        let Snapshot { of, chunks, records, writing } = snapshot;
        self.due.remove(&of.segment);
        self.progress.insert(of.segment, ReportProgress { of, next: records });
        for reported in writing {
            self.writing.insert((of.segment, reported.record.slot), reported);
        }
        let end = v1::ReportEnd {
            segment: of.segment.0,
            generation: of.generation.0,
            term: of.term.get(),
            records,
        };
        chunks.into_iter().map(Body::Report).chain([Body::ReportEnd(end)]).collect()
    }

    /// Returns the messages for changes, in order.
    pub(crate) fn changes(&mut self, changes: impl IntoIterator<Item = SlotChange>) -> Vec<Body> {
        let mut bodies = Vec::new();
        let mut open: Option<ReportBuilder> = None;
        for change in changes {
            let Some((segment, reported)) = self.reported_as(change) else { continue };
            // If a snapshot is due, it will contain the change.
            let progress = self.progress.get_mut(&segment).filter(|_| !self.due.contains(&segment));
            let Some(progress) = progress else { continue };
            if open.as_ref().is_some_and(|builder| builder.of.segment != segment) {
                bodies.extend(open.take().into_iter().flat_map(|b| b.finish().0).map(Body::Report));
            }
            let builder = open
                .get_or_insert_with(|| ReportBuilder::new(progress.of, v1::ReportKind::Delta, progress.next));
            let ReportedRecord { record, tenant, key, attributes } = &reported;
            builder.push(*record, tenant, key, attributes);
            progress.next += 1;
        }
        bodies.extend(open.into_iter().flat_map(|builder| builder.finish().0).map(Body::Report));
        bodies
    }

    fn reported_as(&mut self, change: SlotChange) -> Option<(SegmentId, ReportedRecord)> {
        match change {
            SlotChange::Begun(segment, reported) => {
                self.writing.insert((segment, reported.record.slot), (*reported).clone());
                Some((segment, *reported))
            }
            SlotChange::Committed { segment, slot, epoch, root } => {
                let mut reported = self.take_writing(segment, slot, epoch)?;
                reported.record.word = Word::new(epoch, State::Ready);
                reported.record.root = root;
                Some((segment, reported))
            }
            SlotChange::Killed { segment, slot, epoch } => {
                let mut reported = self.take_writing(segment, slot, epoch)?;
                reported.record.word = Word::new(epoch, State::Dead);
                Some((segment, reported))
            }
            SlotChange::Freed { segment, slot, epoch } => {
                self.take_writing(segment, slot, epoch);
                let record = ReportRecord::free(slot, epoch);
                Some((
                    segment,
                    ReportedRecord { record, tenant: "".into(), key: [].into(), attributes: [].into() },
                ))
            }
        }
    }

    fn take_writing(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<ReportedRecord> {
        let writing = self.writing.get(&(segment, slot))?;
        if writing.record.word.epoch() != epoch {
            return None;
        }
        self.writing.remove(&(segment, slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_proto::convert::{ReportChunk, Wire};
    use moontide_types::{ObjectId, TenantGeneration};

    fn epoch(sequence: u64) -> Epoch {
        Epoch::new(Term::new(3).unwrap(), sequence).unwrap()
    }

    fn of(segment: u32) -> SegmentTerm {
        SegmentTerm { segment: SegmentId(segment), generation: Generation(8), term: Term::new(3).unwrap() }
    }

    fn reported(slot: u32, state: State, key: &[u8]) -> ReportedRecord {
        let record = ReportRecord {
            slot: SlotId(slot),
            tenant: 0,
            flags: ReportFlags::NONE,
            extent: Extent { start: slot * 8, units: 8 },
            word: Word::new(epoch(u64::from(slot) + 1), state),
            id: ObjectId([slot as u8; 16]),
            object_len: 100,
            root: 0,
            stripe_offset: 0,
            stripe_len: 100,
            payload_offset: u64::from(slot) * 8 * UNIT_BYTES,
            stripe_index: 0,
            stripe_count: 1,
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        };
        ReportedRecord { record, tenant: "default".into(), key: key.into(), attributes: [].into() }
    }

    /// Segment, number of the first record, slots and states.
    type Delta = (u32, u64, Vec<(u32, State)>);

    /// Decodes deltas as the master does.
    fn decode(bodies: &[Body]) -> Vec<Delta> {
        let chunk = |body: &Body| {
            let Body::Report(message) = body else { panic!("{body:?}") };
            let chunk = ReportChunk::from_wire(message).unwrap();
            let records = chunk.records.iter().map(|r| (r.slot.0, r.word.state())).collect();
            (chunk.segment.0, chunk.first_record, records)
        };
        bodies.iter().map(chunk).collect()
    }

    #[test]
    fn report_chunks_are_contiguous_and_within_byte_limit() {
        let key = vec![b'k'; 300];
        let mut builder = ReportBuilder::new(of(2), v1::ReportKind::Snapshot, 0);
        for slot in 0..5000 {
            let tenant = if slot % 2 == 0 { "even" } else { "odd" };
            let ReportedRecord { record, .. } = reported(slot, State::Ready, &key);
            builder.push(record, tenant, &key, &[]);
        }
        let (chunks, records) = builder.finish();
        assert_eq!(records, 5000);
        let mut next = 0;
        for message in &chunks {
            let chunk = ReportChunk::from_wire(message).unwrap();
            assert_eq!(chunk.first_record, next);
            assert!(chunk.attributes.is_none() && chunk.tenants.len() == 2);
            assert!(message.records.len() + message.keys.len() <= CHUNK_BYTES_MAX);
            for (record, key) in chunk.iter() {
                assert_eq!(u64::from(record.slot.0), next);
                assert_eq!(key.unwrap().as_bytes().len(), 300);
                let tenant = chunk.tenants[usize::from(record.tenant)].as_str();
                assert_eq!(tenant, if next % 2 == 0 { "even" } else { "odd" });
                next += 1;
            }
        }
        assert_eq!(next, 5000);
        assert!(chunks.len() > 3, "{}", chunks.len());
    }

    #[test]
    fn report_chunk_of_small_records_is_limited_by_count() {
        let mut builder = ReportBuilder::new(of(2), v1::ReportKind::Snapshot, 10);
        (0..5000).for_each(|slot| {
            builder.push(reported(slot, State::Ready, b"k").record, "default", b"k", &[]);
        });
        let (chunks, next) = builder.finish();
        assert_eq!(next, 5010);
        let first: Vec<_> = chunks.iter().map(|chunk| chunk.first_record).collect();
        assert_eq!(first, [10, 10 + SESSION_RECORDS_MAX as u64]);
    }

    #[test]
    fn record_writing_at_snapshot_is_reported_once_on_commit() {
        let mut reports = Reports::default();
        reports.mounted(of(0), true);
        reports.mounted(of(1), false);
        let (slot, root) = (SlotId(4), 99);
        let commit =
            |segment| SlotChange::Committed { segment: SegmentId(segment), slot, epoch: epoch(5), root };
        assert!(reports.changes([commit(0)]).is_empty(), "its snapshot has not been taken yet");
        assert_eq!(reports.next_due(), Some((SegmentId(0), 0)));
        let writing = vec![reported(4, State::Writing, b"a"), reported(5, State::Writing, b"b")];
        let bodies = reports.snapshot(Snapshot { of: of(0), chunks: vec![], records: 7, writing });
        assert!(matches!(&bodies[..], [Body::ReportEnd(end)] if end.records == 7));
        assert!(reports.is_complete());

        let other = SlotChange::Committed { segment: SegmentId(0), slot, epoch: epoch(6), root };
        assert!(reports.changes([other, commit(1)]).is_empty(), "another version, another segment");
        let killed = SlotChange::Killed { segment: SegmentId(0), slot: SlotId(5), epoch: epoch(6) };
        let freed = SlotChange::Freed { segment: SegmentId(0), slot: SlotId(5), epoch: epoch(6) };
        let bodies = reports.changes([commit(0), killed, freed]);
        let states = vec![(4, State::Ready), (5, State::Dead), (5, State::Free)];
        assert_eq!(decode(&bodies), [(0, 7, states)]);
        assert!(reports.changes([commit(0)]).is_empty(), "once");
        let freed = SlotChange::Freed { segment: SegmentId(0), slot: SlotId(6), epoch: epoch(7) };
        assert_eq!(decode(&reports.changes([freed])), [(0, 10, vec![(6, State::Free)])]);
    }

    #[test]
    fn record_begun_in_earlier_session_is_reported() {
        let mut reports = Reports::default();
        reports.mounted(of(0), false);
        reports.mounted(of(1), false);
        let begun = |segment, slot| {
            SlotChange::Begun(SegmentId(segment), Box::new(reported(slot, State::Writing, b"k")))
        };
        let bodies = reports.changes([begun(0, 1), begun(1, 2), begun(1, 3), begun(0, 4)]);
        let one = |slot| (slot, State::Writing);
        let expected = [(0, 0, vec![one(1)]), (1, 0, vec![one(2), one(3)]), (0, 1, vec![one(4)])];
        assert_eq!(decode(&bodies), expected, "in order, one chunk per run of a segment");
        let committed =
            SlotChange::Committed { segment: SegmentId(0), slot: SlotId(1), epoch: epoch(2), root: 9 };
        assert_eq!(decode(&reports.changes([committed])), [(0, 2, vec![(1, State::Ready)])]);
    }

    #[test]
    fn restarted_segment_report_continues_record_numbers() {
        let mut reports = Reports::default();
        reports.mounted(of(0), false);
        reports.changes([SlotChange::Freed { segment: SegmentId(0), slot: SlotId(1), epoch: epoch(1) }]);
        reports.restart(SegmentId(0));
        assert_eq!(reports.next_due(), Some((SegmentId(0), 1)));
        assert!(!reports.is_complete());
    }
}
