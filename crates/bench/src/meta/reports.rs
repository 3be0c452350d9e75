//! Reports of a fake node, which fill the index without any data.

use std::num::NonZeroU16;

use moontide_proto::{
    FixedRecord, PackedBuilder, PackedBytesBuilder, ReportFlags, ReportRecord, limits::SESSION_RECORDS_MAX,
    v1,
};
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Extent, IdKey, SlotId, TenantGeneration, Term};

use super::fixture::{OBJECT_BYTES, TENANT, ids, key};
use crate::results::BenchError;

/// Id of the node.
pub(super) const NODE: u64 = 1;

/// Request context of the node.
pub(super) fn context(session: u64) -> v1::RequestContext {
    v1::RequestContext { session, timeout_ms: 60_000, caller: NODE, ..Default::default() }
}

/// Fails unless the code of a response context is 0.
pub(super) fn accepted(context: &Option<v1::ResponseContext>) -> Result<(), BenchError> {
    match context.as_ref().map(|context| context.code) {
        Some(0) => Ok(()),
        code => Err(BenchError::Wrong(format!("master rejected the node: code {code:?}"))),
    }
}

/// Request that opens a session.
pub(super) fn open_session() -> v1::OpenSessionRequest {
    v1::OpenSessionRequest {
        context: Some(context(0)),
        node: NODE,
        boot_id: 1,
        topology: Some(v1::Topology::default()),
        protocol_min: 2,
        protocol_max: 2,
        ..Default::default()
    }
}

/// Request that mounts one segment per group, with slots for all objects and 10 % more.
pub(super) fn mount(opened: &v1::OpenSessionResponse, groups: u16, objects: u64) -> v1::MountSegmentsRequest {
    let share = (objects / u64::from(groups)).max(1) as u32;
    let slots = share + share / 10 + 4096;
    let segment = |group: u16| v1::SegmentSpec {
        segment: group.into(),
        generation: 1,
        medium: v1::Medium::Memory.into(),
        units: slots,
        slots,
        group: Some(group.into()),
        term: 0,
        has_records: true,
        ..Default::default()
    };
    v1::MountSegmentsRequest {
        context: Some(context(opened.session)),
        segments: (0..groups).map(segment).collect(),
        synced: vec![],
        capability_rotation: opened.capability_key.as_ref().map_or(0, |key| key.rotation),
    }
}

/// Part of a segment's report that is being built.
#[derive(Default)]
struct Chunk {
    records: PackedBuilder<ReportRecord>,
    keys: PackedBytesBuilder,
    /// Number of records in earlier chunks of the segment.
    first: u64,
}

/// Iterator over the messages of the reports.
pub(super) struct Reports {
    session: u64,
    term: u32,
    groups: NonZeroU16,
    id_key: IdKey,
    chunks: Vec<Chunk>,
    sequence: u64,
    next: u64,
    objects: u64,
    ready: Vec<v1::NodeMessage>,
    ended: bool,
}

impl Reports {
    /// Creates reports of `objects` objects.
    pub(super) fn new(session: u64, term: u32, groups: NonZeroU16, id_key: IdKey, objects: u64) -> Reports {
        Reports {
            session,
            term,
            groups,
            id_key,
            chunks: (0..groups.get()).map(|_| Chunk::default()).collect(),
            sequence: 0,
            next: 0,
            objects,
            ready: vec![],
            ended: false,
        }
    }

    /// Reserves the next sequence number for a message that is not a report.
    pub(super) fn skip_sequence(&mut self) {
        self.sequence += 1;
    }

    /// Number of objects generated so far; some may be in unfinished chunks.
    pub(super) fn generated(&self) -> u64 {
        self.next
    }

    fn message(&mut self, body: v1::node_message::Body) -> v1::NodeMessage {
        self.sequence += 1;
        v1::NodeMessage { session: self.session, sequence: self.sequence, highest_term: 0, body: Some(body) }
    }

    fn flush(&mut self, group: usize) {
        let chunk = std::mem::take(&mut self.chunks[group]);
        let count = chunk.records.len() as u64;
        self.chunks[group].first = chunk.first + count;
        if count == 0 {
            return;
        }
        let report = v1::ReportChunk {
            segment: group as u32,
            generation: 1,
            term: self.term,
            kind: v1::ReportKind::Snapshot.into(),
            first_record: chunk.first,
            records: chunk.records.finish().into(),
            keys: chunk.keys.finish().into(),
            tenants: vec![TENANT.as_str().into()],
            attributes: Default::default(),
        };
        let message = self.message(v1::node_message::Body::Report(report));
        self.ready.push(message);
    }

    /// Generates up to 4096 more objects and adds them to the chunks of their groups.
    fn generate(&mut self) {
        let until = (self.next + 4096).min(self.objects);
        let keys: Vec<_> = (self.next..until).map(key).collect();
        let epoch = Epoch::new(Term::ZERO, 1).expect("a valid epoch");
        for (key, id) in keys.iter().zip(ids(&self.id_key, &keys)) {
            let group = usize::from(id.group(self.groups).0);
            let chunk = &mut self.chunks[group];
            let slot = (chunk.first + chunk.records.len() as u64) as u32;
            chunk.records.push(&ReportRecord {
                slot: SlotId(slot),
                tenant: 0,
                flags: ReportFlags::NONE,
                extent: Extent { start: slot, units: 1 },
                word: Word::new(epoch, State::Ready),
                id,
                object_len: OBJECT_BYTES,
                root: 1,
                stripe_offset: 0,
                stripe_len: OBJECT_BYTES,
                payload_offset: Extent { start: slot, units: 1 }.span().offset(),
                stripe_index: 0,
                stripe_count: 1,
                id_key: self.id_key.number(),
                tenant_generation: TenantGeneration(0),
            });
            chunk.keys.push(key).expect("keys of a chunk fit");
            if chunk.records.len() == SESSION_RECORDS_MAX {
                self.flush(group);
            }
        }
        self.next = until;
    }

    fn end(&mut self) {
        for group in 0..self.chunks.len() {
            self.flush(group);
            let end = v1::ReportEnd {
                segment: group as u32,
                generation: 1,
                term: self.term,
                records: self.chunks[group].first,
            };
            let message = self.message(v1::node_message::Body::ReportEnd(end));
            self.ready.push(message);
        }
        self.ended = true;
    }
}

impl Iterator for Reports {
    type Item = v1::NodeMessage;

    fn next(&mut self) -> Option<v1::NodeMessage> {
        while self.ready.is_empty() && !self.ended {
            if self.next < self.objects { self.generate() } else { self.end() }
        }
        // In the order of the sequence numbers.
        if self.ready.is_empty() { None } else { Some(self.ready.remove(0)) }
    }
}

/// Records in a message.
pub(super) fn records(message: &v1::NodeMessage) -> u64 {
    match &message.body {
        Some(v1::node_message::Body::Report(report)) => (report.records.len() / ReportRecord::BYTES) as u64,
        _ => 0,
    }
}
