//! Random valid records and messages from a seed, for the tests of this crate and as seeds of the fuzzer.
//!
//! Messages have the form that `to_wire` writes, so that a round trip must reproduce them.

#![allow(dead_code, unused_imports)] // each user needs a part of it

mod contexts;
mod names;
mod session;

pub(crate) use names::{MESSAGES, RESPONSES};

use moontide_proto::convert::{ObjectFields, ObjectListBuilder, ObjectListKind};
use moontide_proto::limits::DISK_PART_BYTES;
use moontide_proto::*;
use moontide_rt::SplitMix64;
use moontide_types::limits::{PAGE_BYTES, SEGMENTS_PER_NODE_MAX, SLOTS_PER_SEGMENT_MAX, UNIT_BYTES};
use moontide_types::record::{Attributes, ParentHash, PinClass, State, Word};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, Key, MapVersion, Medium, NodeId, ObjectId, SegmentId,
    SlotId, Spread, TenantGeneration, Term, UnixMillis,
};
use prost::Message;
use prost::bytes::Bytes;

/// Random numbers, records and messages of a seed.
pub(crate) struct Gen {
    pub(crate) seed: u64,
    random: SplitMix64,
}

impl Gen {
    pub(crate) fn new(seed: u64) -> Gen {
        Gen { seed, random: SplitMix64::new(seed) }
    }

    pub(crate) fn u64(&mut self) -> u64 {
        self.random.next_u64()
    }

    pub(crate) fn u32(&mut self) -> u32 {
        self.u64() as u32
    }

    /// Returns a number in `0..bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    pub(crate) fn bool(&mut self) -> bool {
        self.u64() & 1 == 1
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.u64() as u8)
    }

    pub(crate) fn byte_string(&mut self, min: u64, max: u64) -> Vec<u8> {
        let len = min + self.below(max - min + 1);
        (0..len).map(|_| self.u64() as u8).collect()
    }

    pub(crate) fn text(&mut self, min: u64, max: u64) -> String {
        let len = min + self.below(max - min + 1);
        (0..len).map(|_| self.pick(b"abcxyz019.-_") as char).collect()
    }

    pub(crate) fn id(&mut self) -> ObjectId {
        ObjectId(self.bytes())
    }

    pub(crate) fn epoch(&mut self) -> Epoch {
        Epoch::from_bits(self.u64() >> 2).unwrap()
    }

    pub(crate) fn term(&mut self) -> Term {
        Term::new(self.u32() >> 10).unwrap()
    }

    pub(crate) fn segment(&mut self) -> SegmentId {
        SegmentId(self.below(SEGMENTS_PER_NODE_MAX.into()) as u32)
    }

    pub(crate) fn slot(&mut self) -> SlotId {
        SlotId(self.below(SLOTS_PER_SEGMENT_MAX.into()) as u32)
    }

    pub(crate) fn code(&mut self) -> ErrorCode {
        self.pick(ErrorCode::ALL)
    }

    pub(crate) fn maybe_code(&mut self) -> Option<ErrorCode> {
        self.bool().then(|| self.code())
    }

    pub(crate) fn stripe(&mut self) -> (Stripe, u64) {
        let count = self.pick(&[1, 1, 1, 2, 7, 1024]);
        let len = self.pick(&[0, 1, 4096, PAGE_BYTES, 3 * PAGE_BYTES + 5]);
        if count == 1 {
            return (Stripe { index: 0, count, offset: 0, len }, len);
        }
        let offset = self.below(1 << 16) * PAGE_BYTES;
        let stripe = Stripe { index: self.below(count.into()) as u16, count, offset, len };
        (stripe, offset + len + self.below(1000))
    }

    /// Returns an extent and a payload offset with space for `len` bytes.
    pub(crate) fn extent_for(&mut self, len: u64) -> (Extent, u64) {
        let start = self.u32() >> 1;
        let units = (len.div_ceil(UNIT_BYTES) + 1 + self.below(9)) as u32;
        (Extent { start, units }, u64::from(start) * UNIT_BYTES)
    }

    pub(crate) fn transfer_op(&mut self) -> TransferOp {
        let kind = self.pick(OpKind::ALL);
        let disk = kind == OpKind::Load || kind == OpKind::Read && self.bool();
        let flags = if disk { OpFlags::DISK } else { OpFlags::NONE };
        let digests = kind != OpKind::Write && self.bool();
        let flags = if digests { flags.with(OpFlags::DIGESTS) } else { flags };
        let offset = self.below(1 << 39);
        let len_max = if disk { DISK_PART_BYTES - offset % DISK_PART_BYTES } else { 1 << 26 };
        TransferOp {
            kind,
            flags,
            stripe: self.below(1024) as u16,
            segment: if disk { SegmentId(0) } else { self.segment() },
            generation: Generation(if disk { 0 } else { self.u64() }),
            slot: if disk { SlotId(0) } else { self.slot() },
            term: self.term(),
            epoch: self.epoch(),
            id: self.id(),
            offset,
            len: self.below(len_max + 1),
            capability: Capability(self.bytes()),
        }
    }

    /// Returns an operation of this kind.
    pub(crate) fn op_of(&mut self, kind: OpKind) -> TransferOp {
        loop {
            let op = self.transfer_op();
            if op.kind == kind {
                return op;
            }
        }
    }

    /// Returns the fields of a LoadReply: for each load a staging slot or a code.
    pub(crate) fn staged(&mut self, count: usize) -> ObjectFields {
        let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Load, count);
        for _ in 0..count {
            let (object, handles) = self.object();
            list.push(object, &handles[..handles.len().min(1)], &[]).unwrap();
        }
        list.finish()
    }

    pub(crate) fn handle(&mut self, stripe: Stripe, replica: u8) -> Handle {
        let medium = self.pick(Medium::ALL);
        let disk = medium == Medium::Disk;
        let (extent, payload_offset) = self.extent_for(stripe.len);
        Handle {
            node: NodeId(self.u64()),
            segment: if disk { SegmentId(0) } else { self.segment() },
            slot: if disk { SlotId(0) } else { self.slot() },
            generation: Generation(if disk { 0 } else { self.u64() }),
            extent: if disk { Extent::default() } else { extent },
            payload_offset: if disk { 0 } else { payload_offset },
            stripe_offset: stripe.offset,
            stripe_len: stripe.len,
            stripe_root: self.u64(),
            capability: Capability(self.bytes()),
            term: self.term(),
            stripe_index: stripe.index,
            stripe_count: stripe.count,
            replica,
            medium,
            flags: self.pick(&[HandleFlags::NONE, HandleFlags::ONE_SIDED, HandleFlags::KNOWN]),
        }
    }

    /// Returns an entry with its handles; the builder sets their index.
    pub(crate) fn object(&mut self) -> (ObjectEntry, Vec<Handle>) {
        if self.below(4) == 0 {
            return (ObjectEntry::failed(self.code(), 0), vec![]);
        }
        self.whole_object()
    }

    /// Returns an entry with all stripes of all replicas.
    pub(crate) fn whole_object(&mut self) -> (ObjectEntry, Vec<Handle>) {
        let replicas = 1 + self.below(3) as u8;
        let count = self.pick(&[1, 1, 1, 2, 5]);
        let last = self.pick(&[0, 1, 4096, PAGE_BYTES, 3 * PAGE_BYTES + 5]);
        let object_len = u64::from(count - 1) * PAGE_BYTES + last;
        let mut handles = vec![];
        for (replica, index) in (0..replicas).flat_map(|replica| (0..count).map(move |i| (replica, i))) {
            let len = if index + 1 == count { last } else { PAGE_BYTES };
            let stripe = Stripe { index, count, offset: u64::from(index) * PAGE_BYTES, len };
            handles.push(self.handle(stripe, replica));
        }
        let entry = ObjectEntry {
            code: None,
            flags: self.pick(&[ObjectFlags::NONE, ObjectFlags::KNOWN]),
            valid_ms: self.below(30_001) as u32,
            id: self.id(),
            epoch: self.epoch(),
            object_len,
            root: self.u64(),
            first_handle: 0,
            handle_count: handles.len() as u16,
            replica_count: replicas,
            format: 0,
            tenant_generation: TenantGeneration(self.u32()),
            id_key: self.u32(),
        };
        (entry, handles)
    }

    pub(crate) fn put_end_entry(&mut self) -> PutEndEntry {
        let replica_count = 1 + self.below(8) as u8;
        let mut outcomes = [None; 8];
        outcomes[..replica_count.into()].fill_with(|| self.maybe_code());
        PutEndEntry {
            id: self.id(),
            epoch: self.epoch(),
            root: self.u64(),
            outcomes,
            replica_count,
            flags: self.pick(&[PutEndFlags::NONE, PutEndFlags::REPLACES]),
            stripe_count: self.pick(&[1, 1, 2, 5]),
        }
    }

    pub(crate) fn commit_entry(&mut self) -> CommitEntry {
        CommitEntry {
            id: self.id(),
            epoch: self.epoch(),
            generation: Generation(self.u64()),
            segment: self.segment(),
            slot: self.slot(),
            root: self.u64(),
            capability: Capability(self.bytes()),
            term: self.term(),
            flags: self.pick(&[CommitFlags::NONE, CommitFlags::ABORT]),
        }
    }

    pub(crate) fn versioned_id(&mut self) -> VersionedId {
        VersionedId { id: self.id(), epoch: self.epoch() }
    }

    /// Returns a record of a slot that is not FREE.
    pub(crate) fn report_record(&mut self) -> ReportRecord {
        let (stripe, object_len) = self.stripe();
        let (extent, payload_offset) = self.extent_for(stripe.len);
        let state = self.pick(&[State::Writing, State::Ready, State::Dead]);
        ReportRecord {
            slot: self.slot(),
            tenant: 0,
            flags: self.pick(&[ReportFlags::NONE, ReportFlags::KNOWN]),
            extent,
            word: Word::new(self.epoch(), state),
            id: self.id(),
            object_len,
            root: self.u64(),
            stripe_offset: stripe.offset,
            stripe_len: stripe.len,
            payload_offset,
            stripe_index: stripe.index,
            stripe_count: stripe.count,
            id_key: self.u32(),
            tenant_generation: TenantGeneration(self.u32()),
        }
    }

    pub(crate) fn offload_record(&mut self) -> OffloadRecord {
        let (stripe, object_len) = self.stripe();
        OffloadRecord {
            id: self.id(),
            epoch: self.epoch(),
            object_len,
            stripe_offset: stripe.offset,
            stripe_len: stripe.len,
            root: self.u64(),
            bucket: self.u64(),
            offset: self.u64() >> 8,
            disk_len: stripe.len + 4096,
            stripe_index: stripe.index,
            stripe_count: stripe.count,
            id_key: self.u32(),
            tenant_generation: TenantGeneration(self.u32()),
            tenant: 0,
            flags: OffloadFlags::NONE,
        }
    }

    pub(crate) fn command(&mut self) -> NodeCommand {
        use CommandKind::*;
        let kind = self.pick(CommandKind::ALL);
        let mut command = NodeCommand::new(self.u64(), kind, self.term());
        if kind != DropFromDisk {
            command.segment = self.segment();
            command.generation = Generation(self.u64());
        }
        if !matches!(kind, AdoptTerm | Drain) {
            command.epoch = self.epoch();
        }
        if !matches!(kind, AdoptTerm | Drain | DropFromDisk) {
            command.slot = self.slot();
        }
        if !matches!(kind, AdoptTerm | Drain | FenceEpoch) {
            command.id = self.id();
        }
        match kind {
            Offload => command.lease_ms = 5000,
            Promote | Copy => {
                (command.extent, command.payload_offset) = self.extent_for(1000);
                (command.stripe, command.lease_ms) = (self.below(1024) as u16, 30_000);
            }
            AdoptTerm => command.group = GroupId(self.below(4096) as u16),
            Kill | DropFromDisk => command.flags = CommandFlags::TOMBSTONE,
            _ => {}
        }
        command
    }

    pub(crate) fn copy_source(&mut self) -> CopySource {
        CopySource {
            node: NodeId(self.u64().max(1)),
            generation: Generation(self.u64()),
            root: self.u64(),
            capability: Capability(self.id().0),
            segment: self.segment(),
            slot: self.slot(),
            term: self.term(),
            purpose: self.pick(CopyPurpose::ALL),
        }
    }

    pub(crate) fn command_result(&mut self) -> CommandResult {
        let code = self.maybe_code();
        let phase = match code {
            Some(_) => CommandStatus::Refused,
            None => self.pick(&[CommandStatus::Accepted, CommandStatus::Done]),
        };
        CommandResult { command_id: self.u64(), word: Word::from_bits(self.u64()), code, status: phase }
    }

    pub(crate) fn hello(&mut self) -> Hello {
        let min = 1 + self.below(5) as u16;
        Hello {
            node: NodeId(self.u64()),
            caller: self.u64(),
            versions: ProtocolVersions { min, max: min + self.below(5) as u16 },
            inflight_max: 1 + self.below(1000) as u32,
            features: self.u32(),
            token: Token::new(&self.byte_string(0, 64)).unwrap(),
        }
    }

    pub(crate) fn frame_header(&mut self) -> FrameHeader {
        let kind = self.pick(FrameKind::ALL);
        self.header_of(kind)
    }

    pub(crate) fn header_of(&mut self, kind: FrameKind) -> FrameHeader {
        let mut header = FrameHeader::new(kind, self.u64());
        header.term = self.term();
        header.map_version = MapVersion(self.u64());
        header.group = self.bool().then(|| GroupId(self.below(4096) as u16));
        if kind.is_request() {
            header.timeout_ms = 1 + self.below(600_000) as u32;
        }
        if kind == FrameKind::Error || kind.is_control() && !kind.is_request() {
            header.status = Some(self.code());
        }
        header.body_len = match kind {
            FrameKind::Hello | FrameKind::HelloAck => 96,
            kind if kind.body_len_max() == 0 => 0,
            kind => (kind.body_len_max() as u32).min(80 * (1 + self.below(9) as u32)),
        };
        if matches!(kind, FrameKind::Write | FrameKind::ReadReply) {
            header.payload_len = self.below(1 << 26);
            header.flags = self.pick(&[FrameFlags::NONE, FrameFlags::MORE]);
        }
        header
    }

    pub(crate) fn attributes(&mut self) -> Vec<u8> {
        let attributes = Attributes {
            pin: self.pick(&[PinClass::None, PinClass::Soft, PinClass::Hard]),
            expires: self.bool().then(|| UnixMillis(self.u64())),
            cohort: self.bool().then(|| self.byte_string(1, 64).into()),
            parent: self.bool().then(|| ParentHash::new(&self.byte_string(1, 32)).unwrap()),
            user_data: self.bool().then(|| self.byte_string(1, 40).into()),
            extra_replicas: self.below(8) as u8,
            spread: Spread::from_number(self.below(4) as u8),
            disk_replicas: self.below(9) as u8,
        };
        let mut bytes = vec![];
        attributes.encode(&mut bytes);
        bytes
    }

    pub(crate) fn keys(&mut self, count: usize) -> Bytes {
        let mut keys = PackedKeysBuilder::new();
        for _ in 0..count {
            keys.push(Key::new(&self.byte_string(1, 40)).unwrap()).unwrap();
        }
        keys.finish().into()
    }

    pub(crate) fn sections(&mut self, count: usize) -> Bytes {
        let mut sections = PackedBytesBuilder::new();
        (0..count).for_each(|_| sections.push(&self.attributes()).unwrap());
        if self.bool() { sections.finish().into() } else { Bytes::new() }
    }

    pub(crate) fn packed<T: FixedRecord>(&mut self, count: usize, record: fn(&mut Gen) -> T) -> Bytes {
        (0..count).map(|_| record(self)).collect::<PackedBuilder<T>>().finish().into()
    }

    pub(crate) fn codes(&mut self, count: usize) -> Bytes {
        (0..count).map(|_| self.maybe_code()).collect::<CodesBuilder>().finish().into()
    }

    pub(crate) fn objects(&mut self, count: usize) -> ObjectFields {
        let mut list = ObjectListBuilder::default();
        let with_attributes = self.bool();
        for _ in 0..count {
            let (object, handles) = self.object();
            let attributes = if with_attributes { self.attributes() } else { vec![] };
            list.push(object, &handles, &attributes).unwrap();
        }
        list.finish()
    }

    fn known_segment(&mut self) -> v1::KnownSegment {
        let (node, segment) = (self.u64().max(1), self.below(65_536) as u32);
        v1::KnownSegment { node, segment, generation: self.u64(), stale: self.bool() }
    }

    /// Returns the fields of complete objects.
    pub(crate) fn found(&mut self, count: usize) -> ObjectFields {
        let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Response, count);
        for _ in 0..count {
            let (object, handles) = self.whole_object();
            list.push(object, &handles, &self.attributes()).expect("it fits");
        }
        list.finish()
    }

    /// Returns the fields of a Begin: one replica of each object.
    pub(crate) fn parts(&mut self, count: usize) -> ObjectFields {
        let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Begin, count);
        for _ in 0..count {
            let (object, mut handles) = self.whole_object();
            let replica = self.below(object.replica_count.into()) as u8;
            handles.retain(|handle| handle.replica == replica);
            list.push(object, &handles, &self.attributes()).unwrap();
        }
        list.finish()
    }

    pub(crate) fn put_entry(&mut self) -> PutEntry {
        PutEntry { len: self.below((1 << 40) + 1), config: self.below(2) as u16 }
    }

    fn heartbeat(&mut self) -> v1::Heartbeat {
        let touched = |g: &mut Gen| v1::TouchBitmap {
            segment: g.segment().0,
            generation: g.u64(),
            first_slot: g.u32() >> 1,
            bits: g.byte_string(0, 30).into(),
        };
        let status = |g: &mut Gen| v1::SegmentStatus {
            segment: g.segment().0,
            generation: g.u64(),
            state: 1 + g.below(4) as i32,
            live_units: g.u32() >> 2,
            writing_units: g.u32() >> 2,
            draining_units: g.u32() >> 2,
            free_units: g.u32() >> 2,
            free_slots: g.slot().0,
        };
        let remote = |g: &mut Gen| v1::RemoteReads {
            segment: g.segment().0,
            generation: g.u64(),
            slot: g.slot().0,
            epoch: g.epoch().bits(),
            reader: g.u64().max(1),
            bytes: g.u64(),
        };
        v1::Heartbeat {
            heartbeat_id: 1 + self.below(1 << 40),
            reads: Some(v1::ReadCounters {
                local_memory: self.u64(),
                bytes: self.u64(),
                ..Default::default()
            }),
            touched: (0..self.below(3)).map(|_| touched(self)).collect(),
            segments: (0..self.below(3)).map(|_| status(self)).collect(),
            disk: self.bool().then(|| v1::DiskStatus {
                state: 1 + self.below(4) as i32,
                used_bytes: self.u64(),
                limit_bytes: self.u64(),
                objects: self.u64(),
                backlog_bytes: self.u64(),
            }),
            pressure: Some(v1::Pressure {
                inflight_permille: self.below(1001) as u32,
                staging_permille: self.below(1001) as u32,
                ledger_permille: self.below(1001) as u32,
            }),
            flushing: self.bool(),
            draining: self.bool(),
            remote_reads: (0..self.below(3)).map(|_| remote(self)).collect(),
        }
    }

    fn report_chunk(&mut self) -> v1::ReportChunk {
        let delta = self.bool();
        let (mut records, mut keys) = (PackedBuilder::default(), PackedBytesBuilder::new());
        for _ in 0..self.below(5) {
            if delta && self.bool() {
                records.push(&ReportRecord::free(self.slot(), self.epoch()));
                keys.push(b"").unwrap();
            } else {
                records.push(&self.report_record());
                keys.push(&self.byte_string(1, 40)).unwrap();
            }
        }
        let attributes = self.sections(records.len());
        v1::ReportChunk {
            segment: self.segment().0,
            generation: self.u64(),
            term: self.term().get(),
            kind: if delta { 2 } else { 1 },
            first_record: self.u64() >> 1,
            records: records.finish().into(),
            keys: keys.finish().into(),
            tenants: vec![self.text(1, 20)],
            attributes,
        }
    }

    fn addresses(&mut self, count: usize) -> Vec<v1::Address> {
        (0..count).map(|_| v1::Address { engine: self.text(1, 16), address: self.text(1, 260) }).collect()
    }

    fn topology(&mut self) -> v1::Topology {
        v1::Topology { host: self.text(0, 64), rack: self.text(0, 64), zone: self.text(0, 64) }
    }

    pub(crate) fn node_message(&mut self) -> v1::NodeMessage {
        use v1::node_message::Body;
        let n = self.below(5) as usize;
        let body = match self.below(7) {
            0 => Body::Heartbeat(self.heartbeat()),
            1 => Body::CommandResults(v1::CommandResults { results: self.packed(n, Gen::command_result) }),
            2 => Body::Report(self.report_chunk()),
            3 => Body::ReportEnd(v1::ReportEnd {
                segment: self.segment().0,
                generation: self.u64(),
                term: self.term().get(),
                records: self.slot().0.into(),
            }),
            4 => Body::Offloaded(v1::OffloadNotice {
                records: self.packed(n, Gen::offload_record),
                keys: self.keys(n),
                tenants: vec![self.text(1, 20)],
                attributes: self.sections(n),
                recovered: true,
                recovery_end: self.bool(),
                inventories: self.u32(),
            }),
            5 => Body::DiskEvicted(v1::DiskEvicted { versions: self.packed(n, Gen::versioned_id) }),
            _ => Body::CapabilityKeyHeld(v1::CapabilityKeyHeld { rotation: self.u64() }),
        };
        v1::NodeMessage {
            session: 1 + self.below(u64::MAX),
            sequence: 1 + self.below(u64::MAX),
            highest_term: self.term().get(),
            body: Some(body),
        }
    }

    /// Returns the encoded message number `index`, in the order of [`MESSAGES`]. Some responses are failures.
    pub(crate) fn message(&mut self, index: usize) -> Vec<u8> {
        if RESPONSES.contains(&MESSAGES[index]) && self.below(4) == 0 {
            self.failure()
        } else {
            self.whole(index)
        }
    }

    /// Returns the response of a failed call: for every type, because only the context is relevant.
    pub(crate) fn failure(&mut self) -> Vec<u8> {
        let code = self.code() as u32;
        let context = self.response().map(|context| v1::ResponseContext { code, ..context });
        v1::SetTenantQuotaResponse { context }.encode_to_vec()
    }

    /// As `message`, but no response is a failure.
    pub(crate) fn whole(&mut self, index: usize) -> Vec<u8> {
        let n = self.below(6) as usize;
        let (context, response) = (self.request(), self.response());
        let keys = self.keys(n);
        let ObjectFields { objects, handles, attributes } = self.objects(n);
        let force = self.bool();
        match MESSAGES[index] {
            "ExistRequest" => v1::ExistRequest { context, keys }.encode_to_vec(),
            "ExistResponse" => {
                let codes: Vec<_> = (0..n).map(|_| self.maybe_code()).collect();
                let bits: BitmapBuilder = codes.iter().map(|c| c.is_none() && self.bool()).collect();
                let codes: CodesBuilder = codes.into_iter().collect();
                let (count, present) = (n as u32, bits.finish().into());
                v1::ExistResponse { context: response, count, present, codes: codes.finish().into() }
                    .encode_to_vec()
            }
            "GetReplicaListRequest" => {
                let lease_ms = self.below(30_001) as u32;
                v1::GetReplicaListRequest { context, keys, lease_ms, attributes: force }.encode_to_vec()
            }
            "GetReplicaListResponse" => {
                v1::GetReplicaListResponse { context: response, objects, handles, attributes }.encode_to_vec()
            }
            "PutStartRequest" => {
                let configs = vec![self.put_config(), self.put_config()];
                let (objects, attributes) = (self.packed(n, Gen::put_entry), self.sections(n));
                v1::PutStartRequest { context, keys, configs, objects, attributes }.encode_to_vec()
            }
            "PutStartResponse" => {
                let expires_unix_ms = (0..if force { n } else { 0 }).map(|_| self.u64()).collect();
                v1::PutStartResponse { context: response, objects, handles, expires_unix_ms }.encode_to_vec()
            }
            "PutEndRequest" => {
                let entries: Vec<_> = (0..n).map(|_| self.put_end_entry()).collect();
                let striped = entries.iter().map(|e| u64::from(e.stripe_count)).filter(|&c| c > 1);
                let stripe_roots = (0..striped.sum()).map(|_| self.u64()).collect();
                let entries = entries.into_iter().collect::<PackedBuilder<_>>().finish().into();
                v1::PutEndRequest { context, entries, stripe_roots }.encode_to_vec()
            }
            "PutRevokeRequest" => {
                v1::PutRevokeRequest { context, versions: self.packed(n, Gen::versioned_id) }.encode_to_vec()
            }
            "RemoveRequest" => v1::RemoveRequest { context, keys, force }.encode_to_vec(),
            "TouchRequest" => v1::TouchRequest { context, keys, lease_ms: 30_000 }.encode_to_vec(),
            "SetPinRequest" => v1::SetPinRequest { context, keys, pin: self.below(3) as i32 }.encode_to_vec(),
            "PrefetchRequest" => {
                v1::PrefetchRequest { context, keys, target_node: self.u64() }.encode_to_vec()
            }
            "OutcomesResponse" => {
                v1::OutcomesResponse { context: response, codes: self.codes(n) }.encode_to_vec()
            }
            "BeginRequest" => {
                let ObjectFields { objects, handles, attributes } = self.parts(n);
                let tenant = self.text(1, 64);
                v1::BeginRequest { tenant, keys, objects, handles, attributes }.encode_to_vec()
            }
            "CommitRequest" => {
                v1::CommitRequest { entries: self.packed(n, Gen::commit_entry) }.encode_to_vec()
            }
            "SlotOutcomes" => v1::SlotOutcomes { codes: self.codes(n) }.encode_to_vec(),
            "OpenSessionRequest" => v1::OpenSessionRequest {
                context,
                node: self.u64().max(1),
                boot_id: self.u64(),
                addresses: self.addresses(n),
                topology: Some(self.topology()),
                protocol_min: 1,
                protocol_max: 1 + self.below(9) as u32,
                highest_term: self.term().get(),
            }
            .encode_to_vec(),
            "OpenSessionResponse" => v1::OpenSessionResponse {
                context: response,
                session: self.u64().max(1),
                ttl_ms: 1 + self.below(600_000) as u32,
                protocol: 1,
                groups: 1 + self.below(4096) as u32,
                id_key: self.u32(),
                id_key_secret: self.byte_string(32, 32).into(),
                capability_key: Some(self.capability_key()),
            }
            .encode_to_vec(),
            "MountSegmentsRequest" => {
                let segments = (0..n).map(|_| self.segment_spec()).collect();
                let synced = vec![v1::SyncMark { group: 5, exclusion: 7, ago_ms: 9 }; n];
                let capability_rotation = self.u64();
                v1::MountSegmentsRequest { context, segments, synced, capability_rotation }.encode_to_vec()
            }
            "MountSegmentsResponse" => {
                let result = |g: &mut Gen| v1::MountResult {
                    segment: g.segment().0,
                    code: g.maybe_code().map_or(0, |code| code as u32),
                    group: g.below(4096) as u32,
                    term: g.term().get(),
                };
                let results = (0..n).map(|_| result(self)).collect();
                v1::MountSegmentsResponse { context: response, results }.encode_to_vec()
            }
            "UnmountSegmentsRequest" => {
                let segments = (0..n).map(|_| self.segment().0).collect();
                v1::UnmountSegmentsRequest { context, segments }.encode_to_vec()
            }
            "NodeMessage" => self.node_message().encode_to_vec(),
            "MasterMessage" => self.master_message().encode_to_vec(),
            "RemoveByPrefixRequest" => {
                let prefix = self.byte_string(1, 30).into();
                v1::RemoveByPrefixRequest { context, prefix, force, groups: self.groups(n) }.encode_to_vec()
            }
            "RemoveByRegexRequest" => {
                let pattern = self.text(1, 30);
                v1::RemoveByRegexRequest { context, pattern, force, groups: self.groups(n) }.encode_to_vec()
            }
            "RemoveAllRequest" => {
                let generation = self.below(9) as u32;
                v1::RemoveAllRequest { context, force, generation, groups: self.groups(n) }.encode_to_vec()
            }
            "GetJobRequest" => {
                v1::GetJobRequest { context, job: self.u64(), groups: self.groups(n) }.encode_to_vec()
            }
            "GetJobResponse" => {
                let state = 1 + self.below(3) as i32;
                let code = if state == 3 { self.code() as u32 } else { 0 };
                let (examined, affected) = (self.u64(), self.u64());
                let (skipped, total) = (self.u64(), self.u64());
                let (context, lost_groups) = (response, self.groups(n));
                v1::GetJobResponse { context, state, examined, affected, skipped, total, code, lost_groups }
                    .encode_to_vec()
            }
            "ListKeysRequest" => {
                let (page, prefix) = (self.page(), self.byte_string(0, 30).into());
                v1::ListKeysRequest { context, page, prefix }.encode_to_vec()
            }
            "QueryKeysRequest" => v1::QueryKeysRequest { context, keys }.encode_to_vec(),
            "EvictRequest" => {
                v1::EvictRequest { context, target_permille: self.below(1001) as u32 }.encode_to_vec()
            }
            "SetTenantQuotaRequest" => {
                let (bytes_max, objects_max) = (self.u64(), self.u64());
                v1::SetTenantQuotaRequest { context, bytes_max, objects_max }.encode_to_vec()
            }
            "GetTenantsRequest" => v1::GetTenantsRequest { context, page: self.page() }.encode_to_vec(),
            "ListSegmentsRequest" => {
                v1::ListSegmentsRequest { context, page: self.page(), node: self.u64() }.encode_to_vec()
            }
            "DrainSegmentRequest" => {
                let segment = Some(self.segment_ref());
                v1::DrainSegmentRequest { context, segment, evict: force }.encode_to_vec()
            }
            "DrainNodeRequest" => {
                v1::DrainNodeRequest { context, node: self.u64().max(1), undrain: force }.encode_to_vec()
            }
            "GetClusterInfoResponse" => v1::GetClusterInfoResponse {
                context: response,
                cluster: self.u64(),
                groups: 1 + self.below(4096) as u32,
                id_key: self.u32(),
                tenant_id_key: Bytes::new(),
                protocol_min: 1,
                protocol_max: 1,
            }
            .encode_to_vec(),
            "LoadRequest" => {
                let ops = self.packed(1 + n, |g| g.op_of(OpKind::Load));
                v1::LoadRequest { ops, lease_ms: 1 + self.below(30_000) as u32 }.encode_to_vec()
            }
            "LoadReply" => {
                let ObjectFields { objects, handles, .. } = self.staged(n);
                v1::LoadReply { objects, handles }.encode_to_vec()
            }
            "DescribeReply" => {
                let (mut codes, mut records) = (CodesBuilder::default(), PackedBytesBuilder::new());
                for _ in 0..n {
                    let code = self.maybe_code();
                    let record = if code.is_some() { vec![] } else { self.byte_string(1, 300) };
                    codes.push(code);
                    records.push(&record).unwrap();
                }
                v1::DescribeReply { codes: codes.finish().into(), records: records.finish().into() }
                    .encode_to_vec()
            }
            "HandoffGroupRequest" => {
                let ObjectFields { objects, handles, attributes } = self.found(n);
                let replicas = v1::GetReplicaListResponse { context: None, objects, handles, attributes };
                v1::HandoffGroupRequest {
                    context,
                    cluster: self.u64(),
                    group: self.below(4096) as u32,
                    chunk: self.below(65_536) as u32,
                    is_last: force,
                    keys,
                    replicas: Some(replicas),
                    tombstones: self.packed(n, Gen::versioned_id),
                    segments: (0..n).map(|_| self.known_segment()).collect(),
                    segments_complete: self.bool(),
                    disks_complete: self.bool(),
                    exclusion_needed: self.bool(),
                    node_keys: (0..n).map(|_| self.handoff_key()).collect(),
                }
                .encode_to_vec()
            }
            "AttachRequest" => v1::AttachRequest { engine: self.text(1, 16) }.encode_to_vec(),
            "AttachReply" => {
                let region = |g: &mut Gen| v1::AttachedRegion {
                    segment: g.segment().0,
                    generation: g.u64(),
                    key: g.byte_string(1, 200).into(),
                };
                let regions = (0..n).map(|_| region(self)).collect();
                v1::AttachReply { address: self.byte_string(0, 300).into(), regions }.encode_to_vec()
            }
            "GetNodesResponse" => {
                let nodes = (0..n).map(|_| self.node_detail(n)).collect();
                v1::GetNodesResponse { context: response, nodes }.encode_to_vec()
            }
            "PollInvalidationsRequest" => {
                let cursor = |g: &mut Gen| v1::InvalidationCursor {
                    group: g.below(4096) as u32,
                    term: g.term().get(),
                    next_sequence: g.u64(),
                };
                let cursors = (0..1 + n).map(|_| cursor(self)).collect();
                let (wait_ms, cluster) = (self.below(30_001) as u32, self.u64());
                v1::PollInvalidationsRequest { context, cursors, wait_ms, cluster }.encode_to_vec()
            }
            "PollInvalidationsResponse" => {
                let group = |g: &mut Gen| {
                    let group = g.below(4096) as u32;
                    if g.bool() {
                        let code = g.code() as u32;
                        return v1::GroupInvalidations { group, code, ..Default::default() };
                    }
                    let ids: Vec<u8> = (0..g.below(4)).flat_map(|_| g.id().0).collect();
                    let (term, next, gap) = (g.term().get(), g.u64().max(1), g.bool());
                    v1::GroupInvalidations { group, code: 0, term, next_sequence: next, gap, ids: ids.into() }
                };
                let groups = (0..n).map(|_| group(self)).collect();
                v1::PollInvalidationsResponse { context: response, groups, cluster: self.u64() }
                    .encode_to_vec()
            }
            other => unreachable!("{other}"),
        }
    }
}
