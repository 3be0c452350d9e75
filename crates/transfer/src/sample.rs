//! [`SampleNode`]: node memory filled with known records, for benchmarks and tests. It has no master and no allocator:
//! location and content of a record follow from its number, so that a client in another process can compute both.
//!
//! Records `0 … readable` are READY and hold [`SampleNodeConfig::content`]. The records behind them are being written
//! by the node, or free until a client begins them.

use std::sync::OnceLock;
use std::time::Duration;

use moontide_auth::Identity;
use moontide_heap::{CommitError, Grant, HeapConfig, HugePages, NodeHeap, PayloadWriter, RecordSpec};
use moontide_proto::convert::{BeginRequest, CommitRequest, Wire};
use moontide_proto::{
    AccessRight, CapabilityKey, CapabilityScope, CodesBuilder, CommitEntry, CommitFlags, FixedRecord,
    FrameKind, Handle, HandleFlags, Hello, ObjectEntry, ObjectFlags, OpFlags, PackedBuilder,
    PackedKeysBuilder, RecordShape, TransferOp, v1,
};
use moontide_rt::SplitMix64;
use moontide_rt::time::Instant;
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::{Attributes, DigestContext, Header, KeySection, RecordFlags, RecordLayout};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, IdKey, Key, Medium, MonoTime, NodeId, ObjectId, SegmentId, SlotId,
    Tenant, TenantGeneration, Term,
};
use prost::Message;

use crate::op::Target;
use crate::owner::{CLAIM_WAIT_MAX, Owner, PeerIdentity, is_granted};

/// Configuration of a sample node.
#[derive(Clone, Debug)]
pub struct SampleNodeConfig {
    /// Id of the node.
    pub node: NodeId,
    /// Payload length of each record, in bytes.
    pub record_bytes: u64,
    /// Number of READY records.
    pub readable: u32,
    /// Number of records that clients can write.
    pub writable: u32,
    /// Whether the node has begun the writable records.
    pub begun: bool,
    /// Whether records have digests.
    pub digests: bool,
    /// Key of the capabilities, which every operation needs.
    pub key: [u8; 32],
}

impl Default for SampleNodeConfig {
    fn default() -> SampleNodeConfig {
        SampleNodeConfig {
            node: NodeId(1),
            record_bytes: 1 << 20,
            readable: 16,
            writable: 16,
            begun: true,
            digests: true,
            key: [3; 32],
        }
    }
}

const TERM: u32 = 1;
const SEGMENT: SegmentId = SegmentId(0);
const GENERATION: Generation = Generation(1);

impl SampleNodeConfig {
    fn term() -> Term {
        Term::new(TERM).expect("1 is a term")
    }

    fn key_of(record: u32) -> [u8; 8] {
        u64::from(record).to_le_bytes()
    }

    fn flags(&self) -> RecordFlags {
        if self.digests { RecordFlags::NONE } else { RecordFlags::DIGESTLESS }
    }

    fn layout(&self) -> RecordLayout {
        let section =
            KeySection { tenant: Tenant::DEFAULT, key: Key::new(&[0; 8]).expect("8 bytes are a key") };
        let encoded = section.encoded_len() as u32;
        RecordLayout::new(self.record_bytes, encoded, 0, self.flags()).expect("record size must be valid")
    }

    /// Units of a record, including padding to 4 KiB.
    fn stride(&self) -> u32 {
        self.layout().units().next_multiple_of((4096 / UNIT_BYTES) as u32)
    }

    fn extent(&self, record: u32) -> Extent {
        Extent { start: record * self.stride(), units: self.layout().units() }
    }

    /// Returns the number of records.
    pub fn records(&self) -> u32 {
        self.readable + self.writable
    }

    /// Returns the id of a record.
    pub fn id(&self, record: u32) -> ObjectId {
        let key = SampleNodeConfig::key_of(record);
        let key = Key::new(&key).expect("8 bytes are a key");
        IdKey::new(1, [7; 32]).object_id(Tenant::DEFAULT, TenantGeneration(0), key)
    }

    /// Returns the version of a record.
    pub fn epoch(&self, record: u32) -> Epoch {
        Epoch::new(SampleNodeConfig::term(), u64::from(record) + 1).expect("record number fits into an epoch")
    }

    /// Returns the target of a record, with a capability to read or write it as its state allows.
    pub fn target(&self, record: u32) -> Target {
        let right = if record < self.readable { AccessRight::Read } else { self.write_right(record) };
        self.target_for(record, right)
    }

    /// Returns the right to write a record.
    pub fn write_right(&self, record: u32) -> AccessRight {
        AccessRight::Write(RecordShape {
            extent: self.extent(record),
            object_len: self.record_bytes,
            stripe_offset: 0,
            stripe_len: self.record_bytes,
            stripe_count: 1,
            digestless: !self.digests,
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        })
    }

    /// As [`SampleNodeConfig::target`], with a capability for `right`.
    pub fn target_for(&self, record: u32, right: AccessRight) -> Target {
        let (id, epoch, term) = (self.id(record), self.epoch(record), SampleNodeConfig::term());
        let slot = SlotId(record);
        let granted = CapabilityScope {
            right,
            stripe: 0,
            segment: SEGMENT,
            generation: GENERATION,
            slot,
            epoch,
            id,
            term,
        };
        Target {
            segment: SEGMENT,
            generation: GENERATION,
            slot,
            term,
            epoch,
            id,
            stripe: 0,
            payload_offset: self.extent(record).span().offset(),
            capability: CapabilityKey::new(self.key).sign(&granted),
            flags: OpFlags::NONE,
        }
    }

    /// Returns the context of the digests of a record.
    pub fn digest_context(&self, record: u32) -> DigestContext {
        DigestContext { id: self.id(record), version: self.epoch(record), stripe: 0, len: self.record_bytes }
    }

    /// Returns the content of a record: words of 8 bytes, each a hash of the record's number and the word's index.
    pub fn content(&self, record: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.record_bytes as usize + 8);
        let mut word = u64::from(record) << 32;
        while (bytes.len() as u64) < self.record_bytes {
            bytes.extend_from_slice(&SplitMix64::new(word).next_u64().to_le_bytes());
            word += 1;
        }
        bytes.truncate(self.record_bytes as usize);
        bytes
    }

    /// Returns the body of a Begin for one record.
    pub fn begin_body(&self, record: u32) -> Vec<u8> {
        let target = self.target_for(record, self.write_right(record));
        let handle = Handle {
            node: self.node,
            segment: target.segment,
            slot: target.slot,
            generation: target.generation,
            extent: self.extent(record),
            payload_offset: target.payload_offset,
            stripe_offset: 0,
            stripe_len: self.record_bytes,
            stripe_root: 0,
            capability: target.capability,
            term: target.term,
            stripe_index: 0,
            stripe_count: 1,
            replica: 0,
            medium: Medium::Memory,
            flags: HandleFlags::NONE,
        };
        let object = ObjectEntry {
            code: None,
            flags: ObjectFlags::NONE,
            valid_ms: 1000,
            id: target.id,
            epoch: target.epoch,
            object_len: self.record_bytes,
            root: 0,
            first_handle: 0,
            handle_count: 1,
            replica_count: 1,
            format: 0,
            tenant_generation: TenantGeneration(0),
            id_key: 1,
        };
        let mut keys = PackedKeysBuilder::default();
        let key = SampleNodeConfig::key_of(record);
        keys.push(Key::new(&key).expect("8 bytes are a key")).expect("one key fits");
        let mut objects = PackedBuilder::with_capacity(1);
        objects.push(&object);
        let mut handles = PackedBuilder::with_capacity(1);
        handles.push(&handle);
        let message = v1::BeginRequest {
            tenant: Tenant::DEFAULT.as_str().into(),
            keys: keys.finish().into(),
            objects: objects.finish().into(),
            handles: handles.finish().into(),
            attributes: Default::default(),
        };
        message.encode_to_vec()
    }

    /// Returns the body of a Commit of one record.
    pub fn commit_body(&self, record: u32, root: u64) -> Vec<u8> {
        let target = self.target_for(record, self.write_right(record));
        let entry = CommitEntry {
            id: target.id,
            epoch: target.epoch,
            generation: target.generation,
            segment: target.segment,
            slot: target.slot,
            root,
            capability: target.capability,
            term: target.term,
            flags: CommitFlags::NONE,
        };
        let mut entries = Vec::new();
        entry.encode(&mut entries);
        v1::CommitRequest { entries: entries.into() }.encode_to_vec()
    }
}

/// Owner of sample records.
#[derive(Debug)]
pub struct SampleNode {
    config: SampleNodeConfig,
    heap: NodeHeap,
    key: CapabilityKey,
    /// Reply to Attach; unset if one-sided access is not offered.
    attach_reply: OnceLock<Vec<u8>>,
}

/// Error of [`SampleNode::new`].
#[derive(Debug, thiserror::Error)]
pub enum SampleNodeError {
    /// The index region could not be created.
    #[error(transparent)]
    IndexRegion(#[from] moontide_heap::IndexRegionError),
    /// The segment could not be created.
    #[error(transparent)]
    Segment(#[from] moontide_heap::SegmentError),
    /// The heap refused to begin a record.
    #[error(transparent)]
    Begin(#[from] moontide_heap::BeginError),
    /// The heap refused to publish a record.
    #[error(transparent)]
    Commit(#[from] moontide_heap::CommitError),
}

impl SampleNode {
    /// Allocates the memory and writes the records.
    pub fn new(config: SampleNodeConfig) -> Result<SampleNode, SampleNodeError> {
        let records = config.records().max(1);
        let huge = HugePages::Auto;
        let (node, slots_max) = (config.node, u64::from(records));
        let heap = NodeHeap::create(HeapConfig { node, generation: Generation(1), slots_max, huge })?;
        let segment = heap.add_segment(records, records * config.stride(), huge)?;
        segment.adopt_term(SampleNodeConfig::term());
        heap.index_region().set_open(true);
        heap.heartbeat();
        let key = CapabilityKey::new(config.key);
        let sample = SampleNode { config, heap, key, attach_reply: OnceLock::new() };
        for record in 0..sample.config.readable {
            sample.begin(record, PayloadWriter::Node)?;
            let (slot, epoch) = (SlotId(record), sample.config.epoch(record));
            let mut claim = sample.heap.claim(SEGMENT, slot, epoch).expect("record was begun above");
            let root = claim.fill(&sample.config.content(record));
            claim.publish(root)?;
        }
        if sample.config.begun {
            for record in sample.config.readable..sample.config.records() {
                sample.begin(record, PayloadWriter::Node)?;
            }
        }
        Ok(sample)
    }

    /// Returns the configuration.
    pub fn config(&self) -> &SampleNodeConfig {
        &self.config
    }

    /// Sets the reply to Attach.
    pub fn offer_attach(&self, reply: Vec<u8>) {
        let _ = self.attach_reply.set(reply);
    }

    /// Kills a readable record. Its space becomes free when no reader uses it.
    pub fn kill(&self, record: u32) {
        let _ = self.heap.kill(SEGMENT, SlotId(record), self.config.epoch(record), MonoTime(0));
    }

    fn begin(&self, record: u32, writer: PayloadWriter) -> Result<(), moontide_heap::BeginError> {
        let key = SampleNodeConfig::key_of(record);
        let new = RecordSpec {
            id: self.config.id(record),
            flags: self.config.flags(),
            object_len: self.config.record_bytes,
            stripe_index: 0,
            stripe_count: 1,
            stripe_offset: 0,
            stripe_len: self.config.record_bytes,
            key: KeySection { tenant: Tenant::DEFAULT, key: Key::new(&key).expect("8 bytes are a key") },
            attributes: &Attributes::default(),
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        };
        let (slot, epoch) = (SlotId(record), self.config.epoch(record));
        let grant = Grant {
            slot,
            epoch,
            term: epoch.term(),
            extent: self.config.extent(record),
            record: new,
            writer,
        };
        self.heap.begin(SEGMENT, &grant)
    }

    fn handle_begin(&self, writer: PayloadWriter, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let message = v1::BeginRequest::decode(body).map_err(|_| ErrorCode::InvalidArgument)?;
        let request = BeginRequest::from_wire(&message).map_err(|error| error.code())?;
        let mut codes = CodesBuilder::default();
        for (_, handles) in request.list.iter() {
            for handle in handles.iter() {
                // Everything else follows from the record number; the heap checks the grant.
                let begun = if handle.slot.0 < self.config.records() {
                    self.begin(handle.slot.0, writer).map_err(|error| error.code())
                } else {
                    Err(ErrorCode::OutOfBounds)
                };
                codes.push(begun.err());
            }
        }
        Ok(v1::SlotOutcomes { codes: codes.finish().into() }.encode_to_vec())
    }

    fn handle_commit(
        &self,
        writer: PayloadWriter,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        let give_up_at = deadline.min(Instant::now() + CLAIM_WAIT_MAX);
        let message = v1::CommitRequest::decode(body).map_err(|_| ErrorCode::InvalidArgument)?;
        let request = CommitRequest::from_wire(&message).map_err(|error| error.code())?;
        let mut codes = CodesBuilder::default();
        for entry in request.entries.iter() {
            codes.push(self.commit(writer, &entry, give_up_at).err());
        }
        Ok(v1::SlotOutcomes { codes: codes.finish().into() }.encode_to_vec())
    }

    fn commit(
        &self,
        writer: PayloadWriter,
        entry: &CommitEntry,
        give_up_at: Instant,
    ) -> Result<(), ErrorCode> {
        let CommitEntry { segment, slot, epoch, root, .. } = *entry;
        if let PayloadWriter::Client(_) = writer {
            return self.heap.commit(segment, slot, epoch, root, writer).map_err(|error| error.code());
        }
        if self.attach_reply.get().is_some()
            && let Some(mut claim) = self.heap.claim(segment, slot, epoch)
        {
            // Peers write one-sidedly: this node does not see which bytes arrive.
            claim.set_written();
            return claim.publish(root).map_err(|error| error.code());
        }
        loop {
            match self.heap.publish(segment, slot, epoch, root) {
                // A write of the same bytes from an abandoned connection still holds its claim.
                Err(CommitError::Claimed) if Instant::now() < give_up_at => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                done => return done.map_err(|error| error.code()),
            }
        }
    }
}

fn writer_of(caller: PeerIdentity) -> PayloadWriter {
    match caller {
        PeerIdentity::Remote(_) => PayloadWriter::Node,
        PeerIdentity::Local(client) => PayloadWriter::Client(client),
    }
}

impl Owner for SampleNode {
    fn node(&self) -> NodeId {
        self.config.node
    }

    fn heap(&self) -> &NodeHeap {
        &self.heap
    }

    fn authorize_peer(&self, _: &Hello, _: Option<&Identity>) -> Result<(), ErrorCode> {
        Ok(())
    }

    fn authorize_op(&self, op: &TransferOp, record: Option<&Header>) -> Result<(), ErrorCode> {
        let granted = is_granted(op, record, |scope, capability| self.key.verify(scope, capability));
        if granted { Ok(()) } else { Err(ErrorCode::PermissionDenied) }
    }

    fn call(
        &self,
        caller: PeerIdentity,
        _tenant: Option<&str>,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        match kind {
            FrameKind::Begin => self.handle_begin(writer_of(caller), body),
            FrameKind::Commit => self.handle_commit(writer_of(caller), body, deadline),
            FrameKind::Attach => self.attach_reply.get().cloned().ok_or(ErrorCode::Unsupported),
            _ => Err(ErrorCode::Unsupported),
        }
    }
}
