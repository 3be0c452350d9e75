//! [`Sample`]: a node's memory full of known records, for benchmarks and tests. No master, no allocation: where a record
//! is, and what is in it, follows from its number, so that a client in another process knows both.
//!
//! Records `0 … readable` are READY and hold [`SampleConfig::content`]; the ones behind are being written by the node,
//! or free until somebody begins them.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use moontide_heap::{CommitError, Grant, HeapConfig, HugePages, NewRecord, NodeHeap, Writer};
use moontide_proto::convert::{BeginRequest, CommitRequest, Wire};
use moontide_proto::{
    Capability, CapabilityKey, CodesBuilder, CommitEntry, CommitFlags, FixedRecord, FrameKind, Granted,
    Handle, HandleFlags, Hello, Medium, ObjectEntry, ObjectFlags, OpFlags, PackedBuilder, PackedKeysBuilder,
    Right, TransferOp, v1,
};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{Attributes, DigestContext, Flags, KeySection, RecordLayout};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, IdKey, Key, MonoTime, NodeId, ObjectId, SegmentId, SlotId, Tenant,
    TenantGeneration, Term,
};
use prost::Message;

use crate::op::Target;
use crate::owner::{CLAIM_WAIT_MAX, Caller, Capabilities, Owner};

/// What the sample consists of.
#[derive(Clone, Debug)]
pub struct SampleConfig {
    /// The node.
    pub node: NodeId,
    /// Length of each record.
    pub record_bytes: u64,
    /// How many can be read.
    pub readable: u32,
    /// How many can be written.
    pub writable: u32,
    /// Whether the node has begun those that can be written.
    pub begun: bool,
    /// Whether records have digests.
    pub digests: bool,
    /// With it, only those get in who have a capability.
    pub key: Option<[u8; 32]>,
}

impl Default for SampleConfig {
    fn default() -> SampleConfig {
        SampleConfig {
            node: NodeId(1),
            record_bytes: 1 << 20,
            readable: 16,
            writable: 16,
            begun: true,
            digests: true,
            key: None,
        }
    }
}

const TERM: u32 = 1;
const SEGMENT: SegmentId = SegmentId(0);
const GENERATION: Generation = Generation(1);

impl SampleConfig {
    fn term() -> Term {
        Term::new(TERM).expect("1 is a term")
    }

    fn key_of(record: u32) -> [u8; 8] {
        u64::from(record).to_le_bytes()
    }

    fn flags(&self) -> Flags {
        if self.digests { Flags::NONE } else { Flags::DIGESTLESS }
    }

    fn layout(&self) -> RecordLayout {
        let section =
            KeySection { tenant: Tenant::DEFAULT, key: Key::new(&[0; 8]).expect("8 bytes are a key") };
        let encoded = section.encoded_len() as u32;
        RecordLayout::new(self.record_bytes, encoded, 0, self.flags())
            .expect("a sample is of a possible size")
    }

    /// Units of a record, with what is lost to alignment.
    fn stride(&self) -> u32 {
        self.layout().units().next_multiple_of((4096 / UNIT_BYTES) as u32)
    }

    fn extent(&self, record: u32) -> Extent {
        Extent { start: record * self.stride(), units: self.layout().units() }
    }

    /// How many records there are.
    pub fn records(&self) -> u32 {
        self.readable + self.writable
    }

    /// The identity of a record.
    pub fn id(&self, record: u32) -> ObjectId {
        let key = SampleConfig::key_of(record);
        let key = Key::new(&key).expect("8 bytes are a key");
        IdKey::new(1, [7; 32]).object_id(Tenant::DEFAULT, TenantGeneration(0), key)
    }

    /// The version of a record.
    pub fn epoch(&self, record: u32) -> Epoch {
        Epoch::new(SampleConfig::term(), u64::from(record) + 1).expect("few records")
    }

    /// How a record is named in an operation.
    pub fn target(&self, record: u32) -> Target {
        let right = if record < self.readable { Right::Read } else { Right::Write };
        self.target_for(record, right)
    }

    /// As [`SampleConfig::target`], with a capability for this.
    pub fn target_for(&self, record: u32, right: Right) -> Target {
        let (id, epoch, term) = (self.id(record), self.epoch(record), SampleConfig::term());
        let slot = SlotId(record);
        let granted = Granted { right, segment: SEGMENT, generation: GENERATION, slot, epoch, id, term };
        let key = self.key.map(CapabilityKey::new);
        Target {
            segment: SEGMENT,
            generation: GENERATION,
            slot,
            term,
            epoch,
            id,
            stripe: 0,
            payload_offset: self.extent(record).span().offset(),
            capability: key.map_or_else(Capability::default, |key| key.seal(&granted)),
            flags: OpFlags::NONE,
        }
    }

    /// What the digests of a record are bound to.
    pub fn digest_context(&self, record: u32) -> DigestContext {
        DigestContext { id: self.id(record), version: self.epoch(record), stripe: 0, len: self.record_bytes }
    }

    /// What is in a record: 8 bytes at a time a number mixed from the record's and the place's.
    pub fn content(&self, record: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.record_bytes as usize + 8);
        let mut word = u64::from(record) << 32;
        while (bytes.len() as u64) < self.record_bytes {
            bytes.extend_from_slice(&mix(word).to_le_bytes());
            word += 1;
        }
        bytes.truncate(self.record_bytes as usize);
        bytes
    }

    /// The body of a Begin for one record.
    pub fn begin_body(&self, record: u32) -> Vec<u8> {
        let target = self.target_for(record, Right::Write);
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
            window_ms: 1000,
            id: target.id,
            epoch: target.epoch,
            object_len: self.record_bytes,
            root: 0,
            first_handle: 0,
            handle_count: 1,
            replica_count: 1,
            form: 0,
            tenant_generation: TenantGeneration(0),
            id_key: 1,
        };
        let mut keys = PackedKeysBuilder::default();
        let key = SampleConfig::key_of(record);
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

    /// The body of a Commit of one record.
    pub fn commit_body(&self, record: u32, root: u64) -> Vec<u8> {
        let target = self.target_for(record, Right::Write);
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

/// A bijection that scatters its input (the finaliser of SplitMix64).
fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// An owner of sample records.
#[derive(Debug)]
pub struct Sample {
    config: SampleConfig,
    heap: NodeHeap,
    capabilities: Capabilities,
    /// How the memory can be used one-sidedly, if it can.
    attach_reply: OnceLock<Vec<u8>>,
}

/// Why a sample could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// No room for it.
    #[error(transparent)]
    Board(#[from] moontide_heap::BoardError),
    /// No room for it.
    #[error(transparent)]
    Segment(#[from] moontide_heap::SegmentError),
    /// A record was refused.
    #[error(transparent)]
    Begin(#[from] moontide_heap::BeginError),
    /// A record was refused.
    #[error(transparent)]
    Commit(#[from] moontide_heap::CommitError),
}

impl Sample {
    /// Makes the memory and fills it.
    pub fn new(config: SampleConfig) -> Result<Sample, SampleError> {
        let records = config.records().max(1);
        let huge = HugePages::IfAllowed;
        let (node, slots_max) = (config.node, u64::from(records));
        let heap = NodeHeap::create(HeapConfig { node, generation: Generation(1), slots_max, huge })?;
        let segment = heap.add_segment(records, records * config.stride(), huge)?;
        segment.obey(SampleConfig::term());
        heap.board().set_open(true);
        heap.beat();
        let capabilities =
            config.key.map_or(Capabilities::Open, |key| Capabilities::Keyed(CapabilityKey::new(key)));
        let sample = Sample { config, heap, capabilities, attach_reply: OnceLock::new() };
        for record in 0..sample.config.readable {
            sample.begin(record, Writer::Node)?;
            let (slot, epoch) = (SlotId(record), sample.config.epoch(record));
            let mut claim = sample.heap.claim(SEGMENT, slot, epoch).expect("it was begun");
            let root = claim.fill(&sample.config.content(record));
            claim.publish(root)?;
        }
        if sample.config.begun {
            for record in sample.config.readable..sample.config.records() {
                sample.begin(record, Writer::Node)?;
            }
        }
        Ok(sample)
    }

    /// What it consists of.
    pub fn config(&self) -> &SampleConfig {
        &self.config
    }

    /// Answers Attach with this from now on.
    pub fn offer_attach(&self, reply: Vec<u8>) {
        let _ = self.attach_reply.set(reply);
    }

    /// A record that can be read is killed; its space comes back when nobody uses it.
    pub fn kill(&self, record: u32) {
        let _ = self.heap.kill(SEGMENT, SlotId(record), self.config.epoch(record), MonoTime(0));
    }

    fn begin(&self, record: u32, writer: Writer) -> Result<(), moontide_heap::BeginError> {
        let key = SampleConfig::key_of(record);
        let new = NewRecord {
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

    fn answer_begin(&self, writer: Writer, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let message = v1::BeginRequest::decode(body).map_err(|_| ErrorCode::InvalidArgument)?;
        let request = BeginRequest::from_wire(&message).map_err(|error| error.code())?;
        let mut codes = CodesBuilder::default();
        for (_, handles) in request.list.iter() {
            for handle in handles.iter() {
                // Everything else follows from the number; the heap checks what it is granted.
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

    fn answer_commit(&self, writer: Writer, body: &[u8], deadline: Instant) -> Result<Vec<u8>, ErrorCode> {
        let give_up = deadline.min(Instant::now() + CLAIM_WAIT_MAX);
        let message = v1::CommitRequest::decode(body).map_err(|_| ErrorCode::InvalidArgument)?;
        let request = CommitRequest::from_wire(&message).map_err(|error| error.code())?;
        let mut codes = CodesBuilder::default();
        for entry in request.entries.iter() {
            codes.push(self.commit(writer, &entry, give_up).err());
        }
        Ok(v1::SlotOutcomes { codes: codes.finish().into() }.encode_to_vec())
    }

    fn commit(&self, writer: Writer, entry: &CommitEntry, give_up: Instant) -> Result<(), ErrorCode> {
        let CommitEntry { segment, slot, epoch, root, .. } = *entry;
        if let Writer::Client(_) = writer {
            return self.heap.commit(segment, slot, epoch, root, writer).map_err(|error| error.code());
        }
        loop {
            match self.heap.publish(segment, slot, epoch, root) {
                // The same bytes once more, from a connection that was given up.
                Err(CommitError::Claimed) if Instant::now() < give_up => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                done => return done.map_err(|error| error.code()),
            }
        }
    }
}

fn writer_of(caller: Caller) -> Writer {
    match caller {
        Caller::Remote(_) => Writer::Node,
        Caller::Local(client) => Writer::Client(client),
    }
}

impl Owner for Sample {
    fn node(&self) -> NodeId {
        self.config.node
    }

    fn heap(&self) -> &NodeHeap {
        &self.heap
    }

    fn greets(&self, _: &Hello) -> Result<(), ErrorCode> {
        Ok(())
    }

    fn admits(&self, op: &TransferOp) -> Result<(), ErrorCode> {
        self.capabilities.admits(op)
    }

    fn call(
        &self,
        caller: Caller,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        match kind {
            FrameKind::Begin => self.answer_begin(writer_of(caller), body),
            FrameKind::Commit => self.answer_commit(writer_of(caller), body, deadline),
            FrameKind::Attach => self.attach_reply.get().cloned().ok_or(ErrorCode::Unsupported),
            _ => Err(ErrorCode::Unsupported),
        }
    }
}
