//! [`NodeOwner`]: the node as its peers see it. Answers Begin, Commit, Load and Release, and notes what was read.
//!
//! Invariant: whatever it changes in the heap it notes in the books, and tells those who keep the master informed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use moontide_disk::RecordName;
use moontide_heap::{CommitError, Grant, Killed, LocalReads, NewRecord, NodeHeap, NodePin, Staged, Writer};
use moontide_proto::convert::{
    AttributeSection, BeginRequest, CommitRequest, ListKind, LoadRequest, ObjectListBuilder, Wire, decode,
};
use moontide_proto::limits::OPS_PER_FRAME_MAX;
use moontide_proto::{
    CodesBuilder, CommitEntry, CommitFlags, FrameKind, Handle, HandleFlags, Hello, Medium, ObjectEntry,
    ObjectFlags, OpFlags, OpKind, Packed, ReportFlags, ReportRecord, TransferOp, v1,
};
use moontide_transfer::{Caller, Capabilities, Owner};
use moontide_types::record::{Attributes, Flags, KeySection, State, Word};
use moontide_types::{Epoch, ErrorCode, MonoTime, NodeId, SegmentId, SlotId, SystemClock};
use prost::Message;

use crate::decide::orders::Name;
use crate::decide::report::{Change, Reported};
use crate::disk::DiskTier;
use crate::lines::Lines;
use crate::memory::Memory;
use crate::metrics::Counters;
use crate::orders::Work;
use crate::session::Event;

/// How long a commit waits for a late write of the same bytes, from a connection that was given up; as long as a write
/// waits for one.
const CLAIMED_WAIT_MAX: Duration = Duration::from_millis(900);

/// The answer to a Begin in a segment, or at a node, that takes nothing new: the hint that fits is to start the put
/// again, and the master, who knows, places it elsewhere.
const CLOSED: ErrorCode = ErrorCode::StaleEpoch;

/// The owner of the memory.
#[derive(Debug)]
pub(crate) struct NodeOwner {
    node: NodeId,
    memory: Arc<Memory>,
    disk: Option<Arc<DiskTier>>,
    capabilities: Capabilities,
    counters: Arc<Counters>,
    events: Arc<Lines>,
    work: mpsc::Sender<Work>,
    closed: AtomicBool,
    /// Until when begins and commits are told, in nanoseconds of the clock.
    telling_until: AtomicU64,
    calls: AtomicUsize,
    reads: Reads,
}

/// Reads served to peers so far.
#[derive(Debug, Default)]
struct Reads {
    remote: AtomicU64,
    disk: AtomicU64,
    bytes: AtomicU64,
}

impl NodeOwner {
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn new(
        node: NodeId,
        memory: Arc<Memory>,
        disk: Option<Arc<DiskTier>>,
        counters: Arc<Counters>,
        events: Arc<Lines>,
        work: mpsc::Sender<Work>,
    ) -> NodeOwner {
        NodeOwner {
            node,
            memory,
            disk,
            capabilities: Capabilities::Open,
            counters,
            events,
            work,
            closed: AtomicBool::new(false),
            telling_until: AtomicU64::new(0),
            calls: AtomicUsize::new(0),
            reads: Reads::default(),
        }
    }

    /// Nobody may begin, or begin to read, anything any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Until then begins and commits are told, because a new master, or one that forgot, may not know of them.
    pub(crate) fn tell_until(&self, until: MonoTime) {
        // SeqCst: a snapshot that is taken after this has what was begun before it.
        self.telling_until.fetch_max(until.0, Ordering::SeqCst);
    }

    /// Calls that are being answered.
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Reads since the start, of processes of this host and of peers.
    pub(crate) fn reads(&self) -> v1::ReadCounters {
        let local = local_reads(self.memory.heap());
        v1::ReadCounters {
            remote_memory: self.reads.remote.load(Ordering::Relaxed),
            remote_disk: self.reads.disk.load(Ordering::Relaxed),
            bytes: local.bytes.wrapping_add(self.reads.bytes.load(Ordering::Relaxed)),
            ..local
        }
    }

    /// Whether what is here may be removed or replaced elsewhere.
    fn is_out_of_date(&self) -> bool {
        self.closed.load(Ordering::SeqCst) || self.memory.is_stale()
    }

    fn is_telling(&self) -> bool {
        let until = self.telling_until.load(Ordering::SeqCst);
        until != 0 && SystemClock.now_coarse().0 < until
    }

    fn tell(&self, change: Change) {
        // A session's driver that is gone needs to know nothing.
        self.events.send(Event::Change(change));
    }

    fn answer_begin(&self, writer: Writer, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let message: v1::BeginRequest = decode(body.to_vec().into()).map_err(|error| error.code())?;
        let request = BeginRequest::from_wire(&message).map_err(|error| error.code())?;
        let mut sections = request.attributes.as_ref().map(|sections| sections.iter());
        let mut codes = CodesBuilder::default();
        for ((object, handles), key) in request.list.iter().zip(request.keys.iter()) {
            let section = sections.as_mut().and_then(Iterator::next);
            let attributes = section.map_or_else(Attributes::default, AttributeSection::decode);
            let section = section.map_or(&[][..], AttributeSection::as_bytes);
            let key = KeySection { tenant: request.tenant, key };
            for handle in handles.iter() {
                let begun = self.begin(writer, &object, &handle, key, &attributes, section);
                self.counters.begun(begun.is_ok());
                codes.push(begun.err());
            }
        }
        Ok(v1::SlotOutcomes { codes: codes.finish().into() }.encode_to_vec())
    }

    fn begin(
        &self,
        writer: Writer,
        object: &ObjectEntry,
        handle: &Handle,
        key: KeySection<'_>,
        attributes: &Attributes,
        section: &[u8],
    ) -> Result<(), ErrorCode> {
        let side = self.memory.side(handle.segment).ok_or(ErrorCode::StaleGeneration)?;
        if handle.node != self.node || handle.generation != side.segment().shape().generation {
            return Err(ErrorCode::StaleGeneration);
        }
        if self.closed.load(Ordering::SeqCst) || side.is_closed() {
            return Err(CLOSED);
        }
        if handle.payload_offset != handle.extent.span().offset() {
            return Err(ErrorCode::InvalidArgument);
        }
        let digestless = object.flags.contains(ObjectFlags::DIGESTLESS);
        let record = NewRecord {
            id: object.id,
            flags: if digestless { Flags::DIGESTLESS } else { Flags::NONE },
            object_len: object.object_len,
            stripe_index: handle.stripe_index,
            stripe_count: handle.stripe_count,
            stripe_offset: handle.stripe_offset,
            stripe_len: handle.stripe_len,
            key,
            attributes,
            id_key: object.id_key,
            tenant_generation: object.tenant_generation,
        };
        let (slot, epoch) = (handle.slot, object.epoch);
        let grant = Grant { slot, epoch, term: handle.term, extent: handle.extent, record, writer };
        self.memory.heap().begin(handle.segment, &grant).map_err(|error| error.code())?;
        self.memory.note_begun(handle.segment, slot, epoch, handle.extent.units);
        if self.is_telling() {
            let record = begun_record(object, handle);
            let (tenant, key) = (key.tenant.as_str().into(), key.key.as_bytes().into());
            let reported = Reported { record, tenant, key, attributes: section.into() };
            self.tell(Change::Begun(handle.segment, Box::new(reported)));
        }
        Ok(())
    }

    fn answer_commit(&self, writer: Writer, body: &[u8], deadline: Instant) -> Result<Vec<u8>, ErrorCode> {
        let message: v1::CommitRequest = decode(body.to_vec().into()).map_err(|error| error.code())?;
        let request = CommitRequest::from_wire(&message).map_err(|error| error.code())?;
        let mut codes = CodesBuilder::default();
        for entry in request.entries.iter() {
            let done = if entry.flags.contains(CommitFlags::ABORT) {
                self.abort(&entry)
            } else {
                self.commit(writer, &entry, deadline)
            };
            self.counters.committed(done.is_ok());
            codes.push(done.err());
        }
        Ok(v1::SlotOutcomes { codes: codes.finish().into() }.encode_to_vec())
    }

    fn check_generation(&self, entry: &CommitEntry) -> Result<(), ErrorCode> {
        let side = self.memory.side(entry.segment).ok_or(ErrorCode::StaleGeneration)?;
        let same = side.segment().shape().generation == entry.generation;
        if same { Ok(()) } else { Err(ErrorCode::StaleGeneration) }
    }

    fn commit(&self, writer: Writer, entry: &CommitEntry, deadline: Instant) -> Result<(), ErrorCode> {
        self.check_generation(entry)?;
        let CommitEntry { segment, slot, epoch, root, .. } = *entry;
        let heap = self.memory.heap();
        match writer {
            Writer::Node => publish(heap, entry, deadline)?,
            Writer::Client(_) => {
                heap.commit(segment, slot, epoch, root, writer).map_err(|error| error.code())?;
            }
        }
        self.memory.note(segment, slot, epoch, State::Ready);
        if self.is_telling() {
            self.tell(Change::Committed { segment, slot, epoch, root });
        }
        Ok(())
    }

    /// Gives up a record that is being written. One that is complete is the master's to remove: whoever may read it
    /// knows its slot and epoch, too.
    fn abort(&self, entry: &CommitEntry) -> Result<(), ErrorCode> {
        self.check_generation(entry)?;
        let CommitEntry { segment, slot, epoch, .. } = *entry;
        if self.memory.heap().pin(segment, slot, epoch).is_some() {
            return Err(ErrorCode::AlreadyExists);
        }
        // Nobody but the writer had access, so there is no lease to wait for.
        match self.memory.heap().kill(segment, slot, epoch, MonoTime(0)) {
            Killed::Dying | Killed::Already => {
                self.gave_up(&[(segment, slot, epoch)]);
                Ok(())
            }
            Killed::NotThere => Err(ErrorCode::StaleEpoch),
        }
    }

    /// Brings records from disk into memory, for a peer that reads it by itself.
    fn answer_load(&self, body: &[u8], deadline: Instant) -> Result<Vec<u8>, ErrorCode> {
        let message: v1::LoadRequest = decode(body.to_vec().into()).map_err(|error| error.code())?;
        let request = LoadRequest::from_wire(&message).map_err(|error| error.code())?;
        if self.is_out_of_date() {
            return Err(ErrorCode::StaleSession);
        }
        let disk = self.disk.as_ref().ok_or(ErrorCode::Gone)?;
        let ops: Vec<TransferOp> = request.ops.iter().collect();
        for op in &ops {
            self.capabilities.admits(op)?;
        }
        let names: Vec<RecordName> = ops.iter().map(name_of).collect();
        let until = Instant::now() + Duration::from_millis(request.lease_ms.into());
        let mut list = ObjectListBuilder::with_capacity(ListKind::Load, names.len());
        for (op, staged) in ops.iter().zip(disk.stage_and_keep(&names, until, deadline)) {
            let loaded = staged.and_then(|staged| self.loaded(op, &staged, request.lease_ms));
            let pushed = match loaded {
                Ok((entry, handle)) => {
                    // A large object is read in many pieces; the first one counts.
                    self.reads.disk.fetch_add(u64::from(op.offset == 0), Ordering::Relaxed);
                    self.reads.bytes.fetch_add(op.len, Ordering::Relaxed);
                    list.push(entry, &[handle], &[])
                }
                Err(code) => list.push(ObjectEntry::failed(code, 0), &[], &[]),
            };
            pushed.map_err(|_| ErrorCode::TooLarge)?;
        }
        let fields = list.finish();
        Ok(v1::LoadReply { objects: fields.objects, handles: fields.handles }.encode_to_vec())
    }

    /// A record in staging as a peer is told of it.
    fn loaded(
        &self,
        op: &TransferOp,
        staged: &Staged,
        window_ms: u32,
    ) -> Result<(ObjectEntry, Handle), ErrorCode> {
        let pin = staged.pin().ok_or(ErrorCode::Gone)?;
        let header = pin.header();
        let entry = ObjectEntry {
            code: None,
            flags: ObjectFlags::NONE,
            window_ms,
            id: header.id,
            epoch: header.word.epoch(),
            object_len: header.object_len,
            root: header.root,
            first_handle: 0,
            handle_count: 1,
            replica_count: 1,
            form: 0,
            tenant_generation: header.tenant_generation,
            id_key: header.id_key,
        };
        let extent = staged.extent();
        let handle = Handle {
            node: self.node,
            segment: staged.segment(),
            slot: staged.slot(),
            generation: self.memory.generation(),
            extent,
            payload_offset: header.payload_offset,
            stripe_offset: header.stripe_offset,
            stripe_len: header.stripe_len,
            stripe_root: header.root,
            capability: op.capability,
            term: op.term,
            stripe_index: header.stripe_index,
            stripe_count: header.stripe_count,
            replica: 0,
            medium: Medium::Memory,
            flags: HandleFlags::NONE,
        };
        Ok((entry, handle))
    }

    /// Records that were loaded have been read.
    fn answer_release(&self, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let ops = Packed::<TransferOp>::decode(body, OPS_PER_FRAME_MAX).map_err(|error| error.code())?;
        let mut codes = CodesBuilder::default();
        for op in ops.iter() {
            if let Some(disk) = &self.disk {
                disk.give_back(name_of(&op));
            }
            codes.push(None);
        }
        Ok(codes.finish())
    }

    /// These are dead, and the master did not order it.
    pub(crate) fn gave_up(&self, names: &[Name]) {
        for &(segment, slot, epoch) in names {
            self.memory.note(segment, slot, epoch, State::Dead);
            self.tell(Change::Killed { segment, slot, epoch });
        }
        // A thread that is gone frees nothing any more, and the node with it.
        let _ = self.work.send(Work::GivenUp(names.to_vec()));
    }
}

/// What processes of this host read in place. They count themselves, so that sums may wrap but not fail.
fn local_reads(heap: &NodeHeap) -> v1::ReadCounters {
    let LocalReads { hits, misses, bytes } = heap.ledgers().reads();
    v1::ReadCounters { local_memory: hits, local_misses: misses, bytes, ..Default::default() }
}

/// The record that an operation on the disk is about.
fn name_of(op: &TransferOp) -> RecordName {
    RecordName { id: op.id, version: op.epoch, stripe: op.stripe }
}

fn begun_record(object: &ObjectEntry, handle: &Handle) -> ReportRecord {
    let digestless = object.flags.contains(ObjectFlags::DIGESTLESS);
    ReportRecord {
        slot: handle.slot,
        tenant: 0,
        flags: if digestless { ReportFlags::DIGESTLESS } else { ReportFlags::NONE },
        extent: handle.extent,
        word: Word::new(object.epoch, State::Writing),
        id: object.id,
        object_len: object.object_len,
        root: 0,
        stripe_offset: handle.stripe_offset,
        stripe_len: handle.stripe_len,
        payload_offset: handle.payload_offset,
        stripe_index: handle.stripe_index,
        stripe_count: handle.stripe_count,
        id_key: object.id_key,
        tenant_generation: object.tenant_generation,
    }
}

/// Publishes a record whose bytes came over the network. Late writes, which bring the same bytes again, end in a moment.
fn publish(heap: &NodeHeap, entry: &CommitEntry, deadline: Instant) -> Result<(), ErrorCode> {
    let give_up = deadline.min(Instant::now() + CLAIMED_WAIT_MAX);
    loop {
        match heap.publish(entry.segment, entry.slot, entry.epoch, entry.root) {
            Err(CommitError::Claimed) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done.map_err(|error| error.code()),
        }
    }
}

fn writer_of(caller: Caller) -> Writer {
    match caller {
        Caller::Remote(_) => Writer::Node,
        Caller::Local(client) => Writer::Client(client),
    }
}

impl Owner for NodeOwner {
    fn node(&self) -> NodeId {
        self.node
    }

    fn heap(&self) -> &NodeHeap {
        self.memory.heap()
    }

    fn greets(&self, hello: &Hello) -> Result<(), ErrorCode> {
        // A client says 0. A node that looks for another one under this address has an old one.
        if hello.node == NodeId(0) || hello.node == self.node { Ok(()) } else { Err(ErrorCode::StaleSession) }
    }

    fn admits(&self, op: &TransferOp) -> Result<(), ErrorCode> {
        self.capabilities.admits(op)?;
        // The master is about to forget what is here, or has: it may be removed or replaced elsewhere from now on.
        if self.is_out_of_date() && op.kind == OpKind::Read {
            return Err(ErrorCode::StaleSession);
        }
        if op.kind == OpKind::Read && !op.flags.contains(OpFlags::DIGESTS) {
            let on_disk = op.flags.contains(OpFlags::DISK);
            if let Some(side) = self.memory.side(op.segment).filter(|_| !on_disk) {
                side.touch(op.slot);
            }
            // A large object is read in many pieces; the first one counts.
            let reads = if on_disk { &self.reads.disk } else { &self.reads.remote };
            reads.fetch_add(u64::from(op.offset == 0), Ordering::Relaxed);
            self.reads.bytes.fetch_add(op.len, Ordering::Relaxed);
        }
        Ok(())
    }

    fn stage(&self, ops: &[TransferOp], deadline: Instant) -> Vec<Result<NodePin<'_>, ErrorCode>> {
        match &self.disk {
            Some(disk) if !self.is_out_of_date() => {
                let names: Vec<RecordName> = ops.iter().map(name_of).collect();
                disk.stage(&names, deadline)
            }
            Some(_) => ops.iter().map(|_| Err(ErrorCode::StaleSession)).collect(),
            None => ops.iter().map(|_| Err(ErrorCode::Gone)).collect(),
        }
    }

    fn call(
        &self,
        caller: Caller,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let answer = match kind {
            FrameKind::Begin => self.answer_begin(writer_of(caller), body),
            FrameKind::Commit => self.answer_commit(writer_of(caller), body, deadline),
            FrameKind::Load => self.answer_load(body, deadline),
            FrameKind::Release => self.answer_release(body),
            // There is no engine that attaches.
            _ => Err(ErrorCode::Unsupported),
        };
        self.calls.fetch_sub(1, Ordering::SeqCst);
        answer
    }

    fn abandoned(&self, records: &[(SegmentId, SlotId, Epoch)]) {
        for &(segment, slot, epoch) in records {
            // They are dead already, unless somebody else says so than the heap.
            let _ = self.memory.heap().kill(segment, slot, epoch, MonoTime(0));
        }
        self.gave_up(records);
    }
}
