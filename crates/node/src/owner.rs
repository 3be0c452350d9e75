//! [`NodeOwner`]: the node as its peers see it. It handles Begin, Commit, Load and Release, and marks slots that were
//! read.
//!
//! Invariant: every change it makes in the heap is recorded in the usage and, where the master may not know of it,
//! reported as a change.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use moontide_auth::{Call, Identity};
use moontide_heap::{
    CommitError, Grant, KillOutcome, LocalReadStats, NodeHeap, NodePin, PayloadWriter, RecordSpec,
    StagedRecord,
};
use moontide_proto::convert::{
    AttributeSection, BeginRequest, CommitRequest, LoadRequest, ObjectListBuilder, ObjectListKind, Wire,
    decode,
};
use moontide_proto::limits::OPS_PER_FRAME_MAX;
use moontide_proto::{
    AccessRight, Capability, CapabilityScope, CodesBuilder, CommitEntry, CommitFlags, FrameKind, Handle,
    HandleFlags, Hello, ObjectEntry, ObjectFlags, OpFlags, OpKind, Packed, PackedBytesBuilder, RecordShape,
    ReportFlags, ReportRecord, TransferOp, v1,
};
use moontide_rt::mark;
use moontide_rt::sync::mpsc;
use moontide_rt::time::Instant;
use moontide_transfer::{Owner, PeerIdentity, check_tenant, is_granted, pin_record};
use moontide_types::record::{Attributes, Header, KeySection, RecordDescription, RecordFlags, State, Word};
use moontide_types::{
    Epoch, ErrorCode, IdKey, Key, Medium, MonoTime, NodeId, SegmentId, SlotId, SystemClock, TenantIdKey,
};
use prost::Message;

use crate::capabilities::CapabilityKeys;
use crate::disk::DiskTier;
use crate::event_router::{EventRouter, NodeEvent};
use crate::executor::ExecutorTask;
use crate::logic::commands::SlotVersion;
use crate::logic::report::{ReportedRecord, SlotChange};
use crate::memory::NodeMemory;
use crate::metrics::Counters;

/// Time a commit waits for a late write of the same bytes from an abandoned connection; as long as a write waits for
/// one.
const CLAIM_WAIT_MAX: Duration = Duration::from_millis(900);

/// Reply to a Begin in a segment, or on a node, that accepts no new records: its hint makes the client restart the put,
/// and the master, which knows of the drain, places it elsewhere.
const CLOSED: ErrorCode = ErrorCode::StaleEpoch;

/// Owner of the node's memory.
#[derive(Debug)]
pub(crate) struct NodeOwner {
    node: NodeId,
    memory: Arc<NodeMemory>,
    disk: Option<Arc<DiskTier>>,
    capabilities: Arc<CapabilityKeys>,
    /// Key from which ids are computed; set by the first session with a master. The key of a cluster does not change.
    id_key: OnceLock<IdKey>,
    counters: Arc<Counters>,
    events: Arc<EventRouter>,
    tasks: mpsc::Sender<ExecutorTask>,
    closed: AtomicBool,
    writes_closed: AtomicBool,
    /// Time until which begins and commits are reported, in nanoseconds of the clock.
    report_changes_until: AtomicU64,
    calls: AtomicUsize,
    reads: ServedReads,
}

/// Reads served to peers since the start.
#[derive(Debug, Default)]
struct ServedReads {
    remote: AtomicU64,
    disk: AtomicU64,
    bytes: AtomicU64,
}

impl NodeOwner {
    pub(crate) fn memory(&self) -> &NodeMemory {
        &self.memory
    }

    pub(crate) fn new(
        node: NodeId,
        memory: Arc<NodeMemory>,
        disk: Option<Arc<DiskTier>>,
        capabilities: Arc<CapabilityKeys>,
        counters: Arc<Counters>,
        events: Arc<EventRouter>,
        tasks: mpsc::Sender<ExecutorTask>,
    ) -> NodeOwner {
        NodeOwner {
            node,
            memory,
            disk,
            capabilities,
            id_key: OnceLock::new(),
            counters,
            events,
            tasks,
            closed: AtomicBool::new(false),
            writes_closed: AtomicBool::new(false),
            report_changes_until: AtomicU64::new(0),
            calls: AtomicUsize::new(0),
            reads: ServedReads::default(),
        }
    }

    /// Sets the key from which ids are computed. Returns whether it is the first one, or the same as before.
    pub(crate) fn learn_id_key(&self, id_key: IdKey) -> bool {
        *self.id_key.get_or_init(|| id_key.clone()) == id_key
    }

    /// Refuses new writes from now on. Writes that have begun, and reads, go on.
    pub(crate) fn close_writes(&self) {
        self.writes_closed.store(true, Ordering::SeqCst);
    }

    /// Refuses new writes and reads from now on.
    pub(crate) fn close(&self) {
        self.close_writes();
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Reports begins and commits until `until`, because a new master, or one without state, may not know of them.
    pub(crate) fn report_changes_until(&self, until: MonoTime) {
        // SeqCst: a snapshot that is taken after this contains all records begun before it.
        self.report_changes_until.fetch_max(until.0, Ordering::SeqCst);
    }

    /// Number of calls in progress.
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Returns the reads since the start, of local clients and of peers.
    pub(crate) fn reads(&self) -> v1::ReadCounters {
        let local = local_reads(self.memory.heap());
        v1::ReadCounters {
            remote_memory: self.reads.remote.load(Ordering::Relaxed),
            remote_disk: self.reads.disk.load(Ordering::Relaxed),
            bytes: local.bytes.wrapping_add(self.reads.bytes.load(Ordering::Relaxed)),
            ..local
        }
    }

    /// Whether the node no longer learns of removals and replacements, and so refuses reads.
    fn refuses_reads(&self) -> bool {
        self.closed.load(Ordering::SeqCst) || self.memory.is_stale()
    }

    fn reports_changes(&self) -> bool {
        let until = self.report_changes_until.load(Ordering::SeqCst);
        until != 0 && SystemClock.now_coarse().0 < until
    }

    fn report(&self, change: SlotChange) {
        // If there is no session, the next one starts with a snapshot.
        self.events.send(NodeEvent::Change(change));
    }

    /// Refuses a request whose capability a master of the group did not sign for exactly this scope.
    fn check_capability(
        &self,
        what: &'static str,
        scope: &CapabilityScope,
        capability: Capability,
    ) -> Result<(), ErrorCode> {
        if self.capabilities.verify(scope, capability) { Ok(()) } else { Err(self.refused(what, scope)) }
    }

    /// Counts and logs a request without a valid capability. Returns the code of its refusal.
    fn refused(&self, what: &'static str, scope: &CapabilityScope) -> ErrorCode {
        self.capabilities.log_refusal(what, scope, self.counters.capability_refused());
        ErrorCode::PermissionDenied
    }

    fn handle_begin(
        &self,
        writer: PayloadWriter,
        tenant: Option<&str>,
        body: &[u8],
    ) -> Result<Vec<u8>, ErrorCode> {
        let message: v1::BeginRequest = decode(body.to_vec().into()).map_err(|error| error.code())?;
        let request = BeginRequest::from_wire(&message).map_err(|error| error.code())?;
        check_tenant(tenant, |tenant| request.tenant.as_str() == tenant)?;
        let mut sections = request.attributes.as_ref().map(|sections| sections.iter());
        // Before the first session, no master has granted anything.
        let id_key = self.id_key.get().ok_or(ErrorCode::StaleTerm).map(|key| key.of_tenant(request.tenant));
        let mut codes = CodesBuilder::default();
        for ((object, handles), key) in request.list.iter().zip(request.keys.iter()) {
            let section = sections.as_mut().and_then(Iterator::next);
            let attributes = section.map_or_else(Attributes::default, AttributeSection::decode);
            let section = section.map_or(&[][..], AttributeSection::as_bytes);
            let key = KeySection { tenant: request.tenant, key };
            let named =
                id_key.as_ref().map_err(|code| *code).and_then(|id_key| check_id(id_key, &object, key.key));
            for handle in handles.iter() {
                let begun =
                    named.and_then(|()| self.begin(writer, &object, &handle, key, &attributes, section));
                self.counters.begun(begun.is_ok());
                codes.push(begun.err());
            }
        }
        Ok(v1::SlotOutcomes { codes: codes.finish().into() }.encode_to_vec())
    }

    fn begin(
        &self,
        writer: PayloadWriter,
        object: &ObjectEntry,
        handle: &Handle,
        key: KeySection<'_>,
        attributes: &Attributes,
        section: &[u8],
    ) -> Result<(), ErrorCode> {
        let node_segment = self.memory.segment(handle.segment).ok_or(ErrorCode::StaleGeneration)?;
        if handle.node != self.node || handle.generation != node_segment.segment().shape().generation {
            return Err(ErrorCode::StaleGeneration);
        }
        let right = AccessRight::Write(RecordShape::granted(object, handle));
        let scope = CapabilityScope::of_handle(handle, object.id, object.epoch, right);
        self.check_capability("begin", &scope, handle.capability)?;
        if self.writes_closed.load(Ordering::SeqCst) || node_segment.is_closed() {
            return Err(CLOSED);
        }
        if handle.payload_offset != handle.extent.span().offset() {
            return Err(ErrorCode::InvalidArgument);
        }
        let digestless = object.flags.contains(ObjectFlags::DIGESTLESS);
        if digestless && !(self.memory.allows_digestless() && matches!(writer, PayloadWriter::Client(_))) {
            return Err(ErrorCode::Unsupported);
        }
        let record = RecordSpec {
            id: object.id,
            flags: if digestless { RecordFlags::DIGESTLESS } else { RecordFlags::NONE },
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
        let begun = self.memory.heap().begin(handle.segment, &grant).map_err(|error| error.code());
        mark!("grant of an earlier term", begun == Err(ErrorCode::StaleTerm));
        begun?;
        self.memory.record_begun(handle.segment, slot, epoch, handle.extent.units);
        if self.reports_changes() {
            let record = begun_record(object, handle);
            let (tenant, key) = (key.tenant.as_str().into(), key.key.as_bytes().into());
            let reported = ReportedRecord { record, tenant, key, attributes: section.into() };
            self.report(SlotChange::Begun(handle.segment, Box::new(reported)));
        }
        Ok(())
    }

    fn handle_commit(
        &self,
        writer: PayloadWriter,
        tenant: Option<&str>,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        let message: v1::CommitRequest = decode(body.to_vec().into()).map_err(|error| error.code())?;
        let request = CommitRequest::from_wire(&message).map_err(|error| error.code())?;
        let mut codes = CodesBuilder::default();
        for entry in request.entries.iter() {
            let done = if entry.flags.contains(CommitFlags::ABORT) {
                self.abort(tenant, &entry)
            } else {
                self.commit(writer, tenant, &entry, deadline)
            };
            self.counters.committed(done.is_ok());
            codes.push(done.err());
        }
        Ok(v1::SlotOutcomes { codes: codes.finish().into() }.encode_to_vec())
    }

    /// Checks that the sender of a commit or an abort may write the record in the slot.
    fn check_writer(
        &self,
        what: &'static str,
        tenant: Option<&str>,
        entry: &CommitEntry,
    ) -> Result<(), ErrorCode> {
        let node_segment = self.memory.segment(entry.segment).ok_or(ErrorCode::StaleGeneration)?;
        if node_segment.segment().shape().generation != entry.generation {
            return Err(ErrorCode::StaleGeneration);
        }
        let header = self.memory.heap().header(entry.segment, entry.slot, entry.epoch);
        let header = header.ok_or(ErrorCode::StaleEpoch)?;
        let CommitEntry { segment, slot, epoch, .. } = *entry;
        check_tenant(tenant, |tenant| self.memory.heap().is_of_tenant(segment, slot, epoch, tenant))?;
        let right = AccessRight::Write(RecordShape::of(&header));
        let scope = entry.capability_scope(header.stripe_index, right);
        self.check_capability(what, &scope, entry.capability)
    }

    fn commit(
        &self,
        writer: PayloadWriter,
        tenant: Option<&str>,
        entry: &CommitEntry,
        deadline: Instant,
    ) -> Result<(), ErrorCode> {
        self.check_writer("commit", tenant, entry)?;
        let CommitEntry { segment, slot, epoch, root, .. } = *entry;
        let heap = self.memory.heap();
        match writer {
            PayloadWriter::Node => publish(heap, entry, deadline)?,
            PayloadWriter::Client(_) => {
                heap.commit(segment, slot, epoch, root, writer).map_err(|error| error.code())?;
            }
        }
        self.memory.record_transition(segment, slot, epoch, State::Ready);
        if self.reports_changes() {
            self.report(SlotChange::Committed { segment, slot, epoch, root });
        }
        Ok(())
    }

    /// Aborts a record that is being written. Only the master may remove a complete one: any peer that may read it
    /// knows its slot and epoch, too.
    fn abort(&self, tenant: Option<&str>, entry: &CommitEntry) -> Result<(), ErrorCode> {
        self.check_writer("abort", tenant, entry)?;
        let CommitEntry { segment, slot, epoch, .. } = *entry;
        if self.memory.heap().pin(segment, slot, epoch).is_some() {
            return Err(ErrorCode::AlreadyExists);
        }
        // Only the writer had access, so there is no lease to wait for.
        match self.memory.heap().kill(segment, slot, epoch, MonoTime(0)) {
            KillOutcome::Killed | KillOutcome::AlreadyDead => {
                self.abandon(&[(segment, slot, epoch)]);
                Ok(())
            }
            KillOutcome::NotFound => Err(ErrorCode::StaleEpoch),
        }
    }

    /// Loads records from disk into memory, for a peer that reads the memory itself.
    fn handle_load(
        &self,
        tenant: Option<&str>,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        let message: v1::LoadRequest = decode(body.to_vec().into()).map_err(|error| error.code())?;
        let request = LoadRequest::from_wire(&message).map_err(|error| error.code())?;
        if self.refuses_reads() {
            return Err(ErrorCode::StaleSession);
        }
        let disk = self.disk.as_ref().ok_or(ErrorCode::Gone)?;
        let ops: Vec<TransferOp> = request.ops.iter().collect();
        let granted: Vec<Result<(), ErrorCode>> = ops.iter().map(|op| self.check_op(op, None)).collect();
        let allowed = ops.iter().zip(&granted).filter(|(_, granted)| granted.is_ok());
        let allowed: Vec<TransferOp> = allowed.map(|(op, _)| *op).collect();
        let until = Instant::now() + Duration::from_millis(request.lease_ms.into());
        let mut staged = disk.stage_with_lease(&allowed, until, deadline).into_iter();
        let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Load, ops.len());
        for (op, granted) in ops.iter().zip(granted) {
            let loaded = granted
                .and_then(|()| staged.next().expect("one result per allowed operation"))
                .and_then(|staged| self.loaded(tenant, op, &staged, request.lease_ms));
            let pushed = match loaded {
                Ok((entry, handle)) => {
                    // A large object is read in many parts; only the first one counts.
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

    /// Returns the entry and the handle of a record in staging.
    fn loaded(
        &self,
        tenant: Option<&str>,
        op: &TransferOp,
        staged: &StagedRecord,
        valid_ms: u32,
    ) -> Result<(ObjectEntry, Handle), ErrorCode> {
        let pin = staged.pin().ok_or(ErrorCode::Gone)?;
        check_tenant(tenant, |tenant| pin.is_of_tenant(tenant))?;
        let header = pin.header();
        let entry = ObjectEntry {
            code: None,
            flags: ObjectFlags::NONE,
            valid_ms,
            id: header.id,
            epoch: header.word.epoch(),
            object_len: header.object_len,
            root: header.root,
            first_handle: 0,
            handle_count: 1,
            replica_count: 1,
            format: 0,
            tenant_generation: header.tenant_generation,
            id_key: header.id_key,
        };
        let extent = staged.extent();
        let mut handle = Handle {
            node: self.node,
            segment: staged.segment(),
            slot: staged.slot(),
            generation: self.memory.generation(),
            extent,
            payload_offset: header.payload_offset,
            stripe_offset: header.stripe_offset,
            stripe_len: header.stripe_len,
            stripe_root: header.root,
            capability: Capability::default(),
            term: op.term,
            stripe_index: header.stripe_index,
            stripe_count: header.stripe_count,
            replica: 0,
            medium: Medium::Memory,
            flags: HandleFlags::NONE,
        };
        let scope = CapabilityScope::of_handle(&handle, entry.id, entry.epoch, AccessRight::Read);
        handle.capability = self.capabilities.sign_staged(&scope);
        Ok((entry, handle))
    }

    /// Releases loaded records that have been read.
    fn handle_release(&self, tenant: Option<&str>, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let ops = Packed::<TransferOp>::decode(body, OPS_PER_FRAME_MAX).map_err(|error| error.code())?;
        let mut codes = CodesBuilder::default();
        for op in ops.iter() {
            let scope = op.capability_scope(AccessRight::Read);
            if !self.capabilities.verify_staged(&scope, op.capability) {
                codes.push(Some(self.refused("release", &scope)));
                continue;
            }
            let heap = self.memory.heap();
            let own = check_tenant(tenant, |tenant| {
                // A slot that was reused has no lease any more.
                heap.header(op.segment, op.slot, op.epoch).is_none()
                    || heap.is_of_tenant(op.segment, op.slot, op.epoch, tenant)
            });
            if let Err(code) = own {
                codes.push(Some(code));
                continue;
            }
            if let Some(disk) = &self.disk {
                disk.release_lease(&op);
            }
            codes.push(None);
        }
        Ok(codes.finish())
    }

    /// Describes records in memory, for a node that copies them.
    fn handle_describe(&self, body: &[u8]) -> Result<Vec<u8>, ErrorCode> {
        let ops = Packed::<TransferOp>::decode(body, OPS_PER_FRAME_MAX).map_err(|error| error.code())?;
        let (mut codes, mut records) = (CodesBuilder::default(), PackedBytesBuilder::new());
        for op in ops.iter() {
            let described = match op.kind {
                OpKind::Read => pin_record(self, &op),
                _ => Err(ErrorCode::InvalidArgument),
            };
            let described =
                described.map(|pin| RecordDescription::encode(pin.header(), pin.key(), pin.attributes()));
            codes.push(described.as_ref().err().copied());
            records.push(&described.unwrap_or_default()).map_err(|_| ErrorCode::TooLarge)?;
        }
        Ok(v1::DescribeReply { codes: codes.finish().into(), records: records.finish().into() }
            .encode_to_vec())
    }

    /// Checks the capability of an operation.
    fn check_op(&self, op: &TransferOp, record: Option<&Header>) -> Result<(), ErrorCode> {
        if is_granted(op, record, |scope, capability| self.capabilities.verify(scope, capability)) {
            return Ok(());
        }
        Err(self.refused(
            if op.kind == OpKind::Write { "write" } else { "read" },
            &op.capability_scope(AccessRight::Read),
        ))
    }

    /// Records that these are dead without a command of the master, and has them reclaimed.
    pub(crate) fn abandon(&self, names: &[SlotVersion]) {
        for &(segment, slot, epoch) in names {
            self.memory.record_transition(segment, slot, epoch, State::Dead);
            self.report(SlotChange::Killed { segment, slot, epoch });
        }
        // An error means that the executor has exited: the node is stopping.
        let _ = self.tasks.send(ExecutorTask::Abandoned(names.to_vec()));
    }
}

/// Returns the zero-copy reads of local clients. Clients write these counters, so the sums must wrap instead of fail.
fn local_reads(heap: &NodeHeap) -> v1::ReadCounters {
    let LocalReadStats { hits, misses, bytes } = heap.ledgers().reads();
    v1::ReadCounters { local_memory: hits, local_misses: misses, bytes, ..Default::default() }
}

/// Checks that the id is the one of tenant and key: readers of the host find a record by its id alone, so no caller may store
/// other bytes under it.
fn check_id(id_key: &TenantIdKey, object: &ObjectEntry, key: Key<'_>) -> Result<(), ErrorCode> {
    let id = id_key.object_id(object.tenant_generation, key);
    let named = object.id_key == id_key.number() && object.id == id
        || moontide_rt::mutation_enabled("record-under-any-id");
    if named { Ok(()) } else { Err(ErrorCode::PermissionDenied) }
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

/// Publishes a record whose bytes came over the network. Late writes, which repeat the same bytes, end soon.
fn publish(heap: &NodeHeap, entry: &CommitEntry, deadline: Instant) -> Result<(), ErrorCode> {
    let wait_until = deadline.min(Instant::now() + CLAIM_WAIT_MAX);
    loop {
        match heap.publish(entry.segment, entry.slot, entry.epoch, entry.root) {
            Err(CommitError::Claimed) if Instant::now() < wait_until => {
                moontide_rt::thread::sleep(Duration::from_millis(1));
            }
            done => return done.map_err(|error| error.code()),
        }
    }
}

fn writer_of(caller: PeerIdentity) -> PayloadWriter {
    match caller {
        PeerIdentity::Remote(_) => PayloadWriter::Node,
        PeerIdentity::Local(client) => PayloadWriter::Client(client),
    }
}

impl Owner for NodeOwner {
    fn node(&self) -> NodeId {
        self.node
    }

    fn heap(&self) -> &NodeHeap {
        self.memory.heap()
    }

    fn authorize_peer(&self, hello: &Hello, peer: Option<&Identity>) -> Result<(), ErrorCode> {
        if peer.is_some_and(|peer| !peer.role().may(Call::PingNode)) {
            return Err(ErrorCode::PermissionDenied);
        }
        // A client sends 0. Another id means that the peer has an outdated address.
        if hello.node == NodeId(0) || hello.node == self.node { Ok(()) } else { Err(ErrorCode::StaleSession) }
    }

    fn authorize_op(&self, op: &TransferOp, record: Option<&Header>) -> Result<(), ErrorCode> {
        self.check_op(op, record)?;
        // The master unmounts the segments, or has done so: records may be removed or replaced elsewhere from now on.
        if self.refuses_reads() && op.kind == OpKind::Read {
            return Err(ErrorCode::StaleSession);
        }
        // A copy by another node is no use of the object.
        let counts = !op.flags.contains(OpFlags::DIGESTS) && !op.flags.contains(OpFlags::BACKGROUND);
        if op.kind == OpKind::Read && counts {
            let on_disk = op.flags.contains(OpFlags::DISK);
            if let Some(node_segment) = self.memory.segment(op.segment).filter(|_| !on_disk) {
                node_segment.touch(op.slot);
            }
            // A large object is read in many parts; only the first one counts.
            let reads = if on_disk { &self.reads.disk } else { &self.reads.remote };
            reads.fetch_add(u64::from(op.offset == 0), Ordering::Relaxed);
            self.reads.bytes.fetch_add(op.len, Ordering::Relaxed);
        }
        Ok(())
    }

    fn on_remote_reads(&self, near: NodeId, op: &TransferOp, bytes: u64) {
        self.memory.remote_reads().note(near, op, bytes);
    }

    fn stage(&self, ops: &[TransferOp], deadline: Instant) -> Vec<Result<NodePin<'_>, ErrorCode>> {
        match &self.disk {
            Some(disk) if !self.refuses_reads() => disk.stage(ops, deadline),
            Some(_) => ops.iter().map(|_| Err(ErrorCode::StaleSession)).collect(),
            None => ops.iter().map(|_| Err(ErrorCode::Gone)).collect(),
        }
    }

    fn call(
        &self,
        caller: PeerIdentity,
        tenant: Option<&str>,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let response = match kind {
            FrameKind::Begin => self.handle_begin(writer_of(caller), tenant, body),
            FrameKind::Commit => self.handle_commit(writer_of(caller), tenant, body, deadline),
            FrameKind::Load => self.handle_load(tenant, body, deadline),
            FrameKind::Release => self.handle_release(tenant, body),
            FrameKind::Describe => self.handle_describe(body),
            // No engine attaches to a node.
            _ => Err(ErrorCode::Unsupported),
        };
        self.calls.fetch_sub(1, Ordering::SeqCst);
        response
    }

    fn on_client_exit(&self, records: &[(SegmentId, SlotId, Epoch)]) {
        for &(segment, slot, epoch) in records {
            // The heap has killed them already; this covers another caller.
            let _ = self.memory.heap().kill(segment, slot, epoch, MonoTime(0));
        }
        self.abandon(records);
    }
}
