//! What a node tells a master of its records. [`ReportBuilder`] packs records into chunks; [`Reports`] keeps, per
//! segment, how far its report is, and makes later changes into deltas.
//!
//! Records of a segment's report are numbered without gap, snapshot and deltas together. A change of a segment whose
//! snapshot has not been taken in this session is not told: the snapshot will have it.
//!
//! | change since the snapshot | told as |
//! |---|---|
//! | a record that was WRITING was committed | READY with its root |
//! | one whose writer gave up or died | DEAD |
//! | space that nobody ordered back was freed | FREE |
//! | a record was begun that the master may not know of | WRITING |
//!
//! The last is for a while after a session was lost: reservations made before are still around, and the master knows
//! nothing of them any more. It answers with orders to reclaim them.

use std::collections::{BTreeMap, BTreeSet};

use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{FixedRecord, PackedBuilder, PackedBytesBuilder, ReportFlags, ReportRecord, v1};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{Header, State, Word};
use moontide_types::{Epoch, Extent, Generation, SegmentId, SlotId, Term};
use v1::node_message::Body;

/// Most bytes of a chunk: it is applied in a few milliseconds, and the next one is under way meanwhile.
const CHUNK_BYTES_MAX: usize = 512 << 10;

/// A record with what stands beside it in a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    pub record: ReportRecord,
    pub tenant: Box<str>,
    pub key: Box<[u8]>,
    pub attributes: Box<[u8]>,
}

/// A header as it is reported. The tenant's index is the chunk's to fill in.
pub fn record_of(slot: SlotId, header: &Header) -> ReportRecord {
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

/// What all chunks of a segment have in common.
#[derive(Clone, Copy, Debug)]
pub struct Of {
    pub segment: SegmentId,
    pub generation: Generation,
    /// The term that it has adopted.
    pub term: Term,
}

/// Packs records of one segment.
#[derive(Debug)]
pub struct ReportBuilder {
    of: Of,
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
        // Chunks have few tenants, mostly one.
        let known = self.tenants.iter().position(|tenant| **tenant == *name);
        let index = known.unwrap_or_else(|| {
            self.tenants.push(name.into());
            self.tenants.len() - 1
        });
        index as u16 // ≤ SESSION_RECORDS_MAX
    }
}

impl ReportBuilder {
    /// `first`: the number of the first record.
    pub fn new(of: Of, kind: v1::ReportKind, first: u64) -> ReportBuilder {
        let chunk = Chunk { first, ..Chunk::default() };
        ReportBuilder { of, kind, next: first, full: Vec::new(), chunk }
    }

    pub fn push(&mut self, mut record: ReportRecord, tenant: &str, key: &[u8], attributes: &[u8]) {
        let more = ReportRecord::BYTES + key.len() + attributes.len() + 4;
        if self.chunk.records.len() == SESSION_RECORDS_MAX || self.chunk.bytes() + more > CHUNK_BYTES_MAX {
            self.close();
        }
        if record.word.state() != State::Free {
            record.tenant = self.chunk.tenant(tenant);
        }
        // A key and an attributes section are a few kilobytes, and the chunk was not full.
        self.chunk.keys.push(key).expect("a chunk is smaller than a packed array may be");
        self.chunk.attributes.push(attributes).expect("as its key");
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

    /// The chunks, and the number of the record that comes next.
    pub fn finish(mut self) -> (Vec<v1::ReportChunk>, u64) {
        self.close();
        (self.full, self.next)
    }
}

/// A segment's snapshot.
#[derive(Debug)]
pub struct Snapshot {
    pub of: Of,
    pub chunks: Vec<v1::ReportChunk>,
    /// Records of the report so far.
    pub records: u64,
    /// Those that are being written: what becomes of them is told.
    pub writing: Vec<Reported>,
}

/// What changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Begun(SegmentId, Box<Reported>),
    Committed { segment: SegmentId, slot: SlotId, epoch: Epoch, root: u64 },
    Killed { segment: SegmentId, slot: SlotId, epoch: Epoch },
    Freed { segment: SegmentId, slot: SlotId, epoch: Epoch },
}

/// How far the reports of a session are.
#[derive(Debug, Default)]
pub struct Reports {
    told: BTreeMap<SegmentId, Told>,
    /// Whose snapshot is still to be taken.
    due: BTreeSet<SegmentId>,
    /// Those that the master believes to be written.
    writing: BTreeMap<(SegmentId, SlotId), Reported>,
}

#[derive(Clone, Copy, Debug)]
struct Told {
    of: Of,
    /// Number of the next record.
    next: u64,
}

impl Reports {
    /// A segment was mounted. One without records needs no snapshot: `occupied` said so.
    pub fn mounted(&mut self, of: Of, occupied: bool) {
        if occupied {
            self.due.insert(of.segment);
        } else {
            self.told.insert(of.segment, Told { of, next: 0 });
        }
    }

    /// A segment belongs to another master now: nothing more is said of it.
    pub fn unmounted(&mut self, segment: SegmentId) {
        self.told.remove(&segment);
        self.due.remove(&segment);
        self.writing.retain(|&(of, _), _| of != segment);
    }

    /// A segment is to be reported anew, with the numbers going on.
    pub fn again(&mut self, segment: SegmentId) {
        self.due.insert(segment);
    }

    /// The next segment whose snapshot is to be taken, and the number of its first record.
    pub fn next_due(&self) -> Option<(SegmentId, u64)> {
        let &segment = self.due.first()?;
        Some((segment, self.told.get(&segment).map_or(0, |told| told.next)))
    }

    /// All snapshots have been taken.
    pub fn is_complete(&self) -> bool {
        self.due.is_empty()
    }

    /// A snapshot was taken: what is to be said.
    pub fn snapshot(&mut self, snapshot: Snapshot) -> Vec<Body> {
        let Snapshot { of, chunks, records, writing } = snapshot;
        self.due.remove(&of.segment);
        self.told.insert(of.segment, Told { of, next: records });
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

    /// Changes: what is to be said of them, in order.
    pub fn changes(&mut self, changes: impl IntoIterator<Item = Change>) -> Vec<Body> {
        let mut bodies = Vec::new();
        let mut open: Option<ReportBuilder> = None;
        for change in changes {
            let Some((segment, reported)) = self.told_as(change) else { continue };
            // Due: the snapshot will have it.
            let told = self.told.get_mut(&segment).filter(|_| !self.due.contains(&segment));
            let Some(told) = told else { continue };
            if open.as_ref().is_some_and(|builder| builder.of.segment != segment) {
                bodies.extend(open.take().into_iter().flat_map(|b| b.finish().0).map(Body::Report));
            }
            let builder =
                open.get_or_insert_with(|| ReportBuilder::new(told.of, v1::ReportKind::Delta, told.next));
            let Reported { record, tenant, key, attributes } = &reported;
            builder.push(*record, tenant, key, attributes);
            told.next += 1;
        }
        bodies.extend(open.into_iter().flat_map(|builder| builder.finish().0).map(Body::Report));
        bodies
    }

    fn told_as(&mut self, change: Change) -> Option<(SegmentId, Reported)> {
        match change {
            Change::Begun(segment, reported) => {
                self.writing.insert((segment, reported.record.slot), (*reported).clone());
                Some((segment, *reported))
            }
            Change::Committed { segment, slot, epoch, root } => {
                let mut reported = self.take_writing(segment, slot, epoch)?;
                reported.record.word = Word::new(epoch, State::Ready);
                reported.record.root = root;
                Some((segment, reported))
            }
            Change::Killed { segment, slot, epoch } => {
                let mut reported = self.take_writing(segment, slot, epoch)?;
                reported.record.word = Word::new(epoch, State::Dead);
                Some((segment, reported))
            }
            Change::Freed { segment, slot, epoch } => {
                self.take_writing(segment, slot, epoch);
                let record = ReportRecord::free(slot, epoch);
                Some((segment, Reported { record, tenant: "".into(), key: [].into(), attributes: [].into() }))
            }
        }
    }

    fn take_writing(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<Reported> {
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

    fn of(segment: u32) -> Of {
        Of { segment: SegmentId(segment), generation: Generation(8), term: Term::new(3).unwrap() }
    }

    fn reported(slot: u32, state: State, key: &[u8]) -> Reported {
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
        Reported { record, tenant: "default".into(), key: key.into(), attributes: [].into() }
    }

    /// Segment, number of the first record, slots and states.
    type Delta = (u32, u64, Vec<(u32, State)>);

    /// What deltas say, checked as the master does.
    fn told(bodies: &[Body]) -> Vec<Delta> {
        let chunk = |body: &Body| {
            let Body::Report(message) = body else { panic!("{body:?}") };
            let chunk = ReportChunk::from_wire(message).unwrap();
            let records = chunk.records.iter().map(|r| (r.slot.0, r.word.state())).collect();
            (chunk.segment.0, chunk.first_record, records)
        };
        bodies.iter().map(chunk).collect()
    }

    #[test]
    fn records_are_packed_into_chunks_without_gap() {
        let key = vec![b'k'; 300];
        let mut builder = ReportBuilder::new(of(2), v1::ReportKind::Snapshot, 0);
        for slot in 0..5000 {
            let tenant = if slot % 2 == 0 { "even" } else { "odd" };
            let Reported { record, .. } = reported(slot, State::Ready, &key);
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
    fn small_records_fill_a_chunk_by_number() {
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
    fn what_was_written_at_the_snapshot_is_told_when_it_is_done() {
        let mut reports = Reports::default();
        reports.mounted(of(0), true);
        reports.mounted(of(1), false);
        let (slot, root) = (SlotId(4), 99);
        let commit = |segment| Change::Committed { segment: SegmentId(segment), slot, epoch: epoch(5), root };
        assert!(reports.changes([commit(0)]).is_empty(), "its snapshot is not taken yet");
        assert_eq!(reports.next_due(), Some((SegmentId(0), 0)));
        let writing = vec![reported(4, State::Writing, b"a"), reported(5, State::Writing, b"b")];
        let bodies = reports.snapshot(Snapshot { of: of(0), chunks: vec![], records: 7, writing });
        assert!(matches!(&bodies[..], [Body::ReportEnd(end)] if end.records == 7));
        assert!(reports.is_complete());

        let other = Change::Committed { segment: SegmentId(0), slot, epoch: epoch(6), root };
        assert!(reports.changes([other, commit(1)]).is_empty(), "another version, another segment");
        let killed = Change::Killed { segment: SegmentId(0), slot: SlotId(5), epoch: epoch(6) };
        let freed = Change::Freed { segment: SegmentId(0), slot: SlotId(5), epoch: epoch(6) };
        let bodies = reports.changes([commit(0), killed, freed]);
        let states = vec![(4, State::Ready), (5, State::Dead), (5, State::Free)];
        assert_eq!(told(&bodies), [(0, 7, states)]);
        assert!(reports.changes([commit(0)]).is_empty(), "once");
        let freed = Change::Freed { segment: SegmentId(0), slot: SlotId(6), epoch: epoch(7) };
        assert_eq!(told(&reports.changes([freed])), [(0, 10, vec![(6, State::Free)])]);
    }

    #[test]
    fn a_record_begun_under_an_earlier_session_is_told() {
        let mut reports = Reports::default();
        reports.mounted(of(0), false);
        reports.mounted(of(1), false);
        let begun =
            |segment, slot| Change::Begun(SegmentId(segment), Box::new(reported(slot, State::Writing, b"k")));
        let bodies = reports.changes([begun(0, 1), begun(1, 2), begun(1, 3), begun(0, 4)]);
        let one = |slot| (slot, State::Writing);
        let expected = [(0, 0, vec![one(1)]), (1, 0, vec![one(2), one(3)]), (0, 1, vec![one(4)])];
        assert_eq!(told(&bodies), expected, "in order, a chunk per run of a segment");
        let committed =
            Change::Committed { segment: SegmentId(0), slot: SlotId(1), epoch: epoch(2), root: 9 };
        assert_eq!(told(&reports.changes([committed])), [(0, 2, vec![(1, State::Ready)])]);
    }

    #[test]
    fn a_segment_reported_again_goes_on_counting() {
        let mut reports = Reports::default();
        reports.mounted(of(0), false);
        reports.changes([Change::Freed { segment: SegmentId(0), slot: SlotId(1), epoch: epoch(1) }]);
        reports.again(SegmentId(0));
        assert_eq!(reports.next_due(), Some((SegmentId(0), 1)));
        assert!(!reports.is_complete());
    }
}
