//! Every request of a peer with every kind of wrong capability. The requests themselves are right, so that only the
//! capability can be the reason of a refusal.

use std::sync::Arc;

use moontide_heap::HugePages;
use moontide_proto::convert::{ObjectListBuilder, ObjectListKind, SlotOutcomes, Wire};
use moontide_proto::{
    CapabilitySecret, Codes, CommitEntry, CommitFlags, FixedRecord as _, FrameKind, Handle, HandleFlags,
    ObjectEntry, ObjectFlags, OpFlags, OpKind, PackedBuilder, PackedKeysBuilder, RecordShape, TransferOp, v1,
};
use moontide_rt::sync::mpsc;
use moontide_rt::time::Instant;
use moontide_transfer::{Owner as _, PeerIdentity, Target, serve_read, serve_write};
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::record::{KeySection, RecordFlags, RecordLayout};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, IdKey, Key, Medium, NodeId, SegmentId, SlotId, Tenant,
    TenantGeneration,
};
use prost::Message as _;
use tokio::sync::mpsc::unbounded_channel;

use super::*;
use crate::event_router::EventRouter;
use crate::logic::segment_plan::SegmentPlan;
use crate::memory::NodeMemory;
use crate::metrics::Counters;
use crate::owner::NodeOwner;

const GROUPS: NonZeroU16 = NonZeroU16::new(4).unwrap();
const NODE: NodeId = NodeId(1);
const SEGMENT: SegmentId = SegmentId(0);
const SLOT: SlotId = SlotId(2);
const GENERATION: Generation = Generation(9);
const LEN: u64 = 5000;
const KEY: &[u8] = b"the key";

/// Requests that a capability must cover. Load and Release need a disk: `tests/capabilities.rs` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Begin,
    Write,
    Commit,
    Abort,
    Read,
    Describe,
}

const CALLS: [Call; 6] = [Call::Begin, Call::Write, Call::Commit, Call::Abort, Call::Read, Call::Describe];

/// Whether a right to the record allows a request. Without a wildcard: a new right or request needs its rows.
fn allows(right: AccessRight, call: Call) -> bool {
    match (right, call) {
        (AccessRight::Read, Call::Read | Call::Describe) => true,
        (AccessRight::Read, Call::Begin | Call::Write | Call::Commit | Call::Abort) => false,
        (AccessRight::Write(_), Call::Begin | Call::Write | Call::Commit | Call::Abort) => true,
        (AccessRight::Write(_), Call::Read | Call::Describe) => true,
    }
}

/// Scopes that differ from `scope` in one field. Without `..`: a new field needs a row.
fn others(scope: CapabilityScope) -> Vec<(&'static str, CapabilityScope)> {
    let CapabilityScope { right, stripe, segment, generation, slot, term, epoch, id } = scope;
    let mut rows = vec![
        ("stripe", CapabilityScope { stripe: stripe + 1, ..scope }),
        ("segment", CapabilityScope { segment: SegmentId(segment.0 + 1), ..scope }),
        ("generation", CapabilityScope { generation: Generation(generation.0 - 1), ..scope }),
        ("slot", CapabilityScope { slot: SlotId(slot.0 + 1), ..scope }),
        ("term", CapabilityScope { term: Term::new(term.get() - 1).unwrap(), ..scope }),
        ("epoch", CapabilityScope { epoch: Epoch::from_bits(epoch.bits() - 1).unwrap(), ..scope }),
        ("id", CapabilityScope { id: ObjectId(id.0.map(|byte| byte ^ 1)), ..scope }),
    ];
    if let AccessRight::Write(shape) = right {
        let RecordShape {
            extent,
            object_len,
            stripe_offset,
            stripe_len,
            stripe_count,
            digestless,
            id_key,
            tenant_generation,
        } = shape;
        let shapes = [
            ("extent.start", RecordShape { extent: Extent { start: extent.start + 8, ..extent }, ..shape }),
            ("extent.units", RecordShape { extent: Extent { units: extent.units + 1, ..extent }, ..shape }),
            ("object_len", RecordShape { object_len: object_len + 1, ..shape }),
            ("stripe_offset", RecordShape { stripe_offset: stripe_offset + 1, ..shape }),
            ("stripe_len", RecordShape { stripe_len: stripe_len - 1, ..shape }),
            ("stripe_count", RecordShape { stripe_count: stripe_count + 1, ..shape }),
            ("digestless", RecordShape { digestless: !digestless, ..shape }),
            ("id_key", RecordShape { id_key: id_key + 1, ..shape }),
            (
                "tenant_generation",
                RecordShape { tenant_generation: TenantGeneration(tenant_generation.0 + 1), ..shape },
            ),
        ];
        rows.extend(
            shapes.map(|(name, shape)| (name, CapabilityScope { right: AccessRight::Write(shape), ..scope })),
        );
    }
    rows
}

fn term() -> Term {
    Term::new(3).unwrap()
}

fn id_key() -> IdKey {
    IdKey::new(1, [7; 32])
}

fn secret() -> CapabilitySecret {
    CapabilitySecret::new([4; 32])
}

/// A node without a master, which has got the keys 1 to 3 of one.
struct Harness {
    memory: Arc<NodeMemory>,
    owner: NodeOwner,
    counters: Arc<Counters>,
}

impl Harness {
    fn new() -> Harness {
        let plan = SegmentPlan { count: 1, units: 1024, slots: 8 };
        let memory = NodeMemory::create(NODE, GENERATION, plan, HugePages::Auto, None, None).unwrap();
        memory.segment(SEGMENT).unwrap().set_grant(GroupId(0), term());
        let memory = Arc::new(memory);
        let capabilities = CapabilityKeys::new(GROUPS, CapabilityKey::new([5; 32]));
        (1..=3).for_each(|n| capabilities.hold(term(), &secret().key_of(NODE, n), &GroupSet::all(GROUPS)));
        let (sender, _) = unbounded_channel();
        let (tasks, _) = mpsc::channel();
        let counters = Arc::<Counters>::default();
        let router = EventRouter::single(sender);
        let (of_owner, counted) = (Arc::clone(&memory), Arc::clone(&counters));
        let owner = NodeOwner::new(NODE, of_owner, None, Arc::new(capabilities), counted, router, tasks);
        assert!(owner.learn_id_key(id_key()));
        Harness { memory, owner, counters }
    }

    /// Makes a request with this capability, as a peer that may use the records of all tenants.
    fn call(&self, call: Call, capability: Capability) -> Result<(), ErrorCode> {
        self.call_as(None, call, capability)
    }

    /// As [`Harness::call`]; `tenant`: the only one whose records the peer may use.
    fn call_as(&self, tenant: Option<&str>, call: Call, capability: Capability) -> Result<(), ErrorCode> {
        let (object, handle) = record();
        let handle = Handle { capability, ..handle };
        let deadline = Instant::now() + Duration::from_secs(5);
        let op = |kind, len| Target::of(&handle, object.id, object.epoch).to_wire(kind, 0, len);
        let request =
            |kind, body: &[u8]| self.owner.call(PeerIdentity::Remote(1), tenant, kind, body, deadline);
        match call {
            Call::Begin => {
                let mut keys = PackedKeysBuilder::new();
                keys.push(Key::new(KEY).unwrap()).unwrap();
                let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Begin, 1);
                list.push(object, &[handle], &[]).unwrap();
                let fields = list.finish();
                let begin = v1::BeginRequest {
                    tenant: Tenant::DEFAULT.as_str().to_owned(),
                    keys: keys.finish().into(),
                    objects: fields.objects,
                    handles: fields.handles,
                    attributes: fields.attributes,
                };
                first_code(&request(FrameKind::Begin, &begin.encode_to_vec())?)
            }
            Call::Write => {
                serve_write(&self.owner, tenant, &op(OpKind::Write, LEN), &payload(), deadline, || ())
                    .map(|_| ())
            }
            Call::Commit | Call::Abort => {
                let entry = CommitEntry {
                    id: object.id,
                    epoch: object.epoch,
                    generation: handle.generation,
                    segment: handle.segment,
                    slot: handle.slot,
                    root: root(),
                    capability,
                    term: handle.term,
                    flags: if call == Call::Abort { CommitFlags::ABORT } else { CommitFlags::NONE },
                };
                let mut entries = Vec::new();
                entry.encode(&mut entries);
                let body = v1::CommitRequest { entries: entries.into() }.encode_to_vec();
                first_code(&request(FrameKind::Commit, &body)?)
            }
            Call::Read => {
                let bytes = serve_read(&self.owner, tenant, &op(OpKind::Read, LEN), deadline, || ())?;
                assert_eq!(bytes, payload());
                Ok(())
            }
            Call::Describe => {
                let ops: PackedBuilder<TransferOp> = [op(OpKind::Read, 0)].into_iter().collect();
                let reply = request(FrameKind::Describe, &ops.finish())?;
                let reply = v1::DescribeReply::decode(&reply[..]).unwrap();
                codes(&reply.codes)
            }
        }
    }

    /// Brings the slot into the state in which the request can succeed.
    fn prepare(&self, call: Call) {
        let steps: &[Call] = match call {
            Call::Begin => &[],
            Call::Write => &[Call::Begin],
            Call::Commit | Call::Abort => &[Call::Begin, Call::Write],
            Call::Read | Call::Describe => &[Call::Begin, Call::Write, Call::Commit],
        };
        let valid = secret().key_of(NODE, 3).sign(&scope(write()));
        steps.iter().for_each(|step| assert_eq!(self.call(*step, valid), Ok(()), "{step:?}"));
    }
}

fn first_code(reply: &[u8]) -> Result<(), ErrorCode> {
    let message = v1::SlotOutcomes::decode(reply).unwrap();
    let outcomes = SlotOutcomes::from_wire(&message).unwrap();
    outcomes.codes.iter().next().unwrap().map_or(Ok(()), Err)
}

fn codes(encoded: &[u8]) -> Result<(), ErrorCode> {
    Codes::decode(encoded, BATCH_KEYS_MAX).unwrap().iter().next().unwrap().map_or(Ok(()), Err)
}

fn payload() -> Vec<u8> {
    (0..LEN).map(|at| (at * 31) as u8).collect()
}

fn root() -> u64 {
    let (object, _) = record();
    let context =
        moontide_types::record::DigestContext { id: object.id, version: object.epoch, stripe: 0, len: LEN };
    context.payload(&payload(), |_| ())
}

/// What a master would return for a put, unsigned.
fn record() -> (ObjectEntry, Handle) {
    let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(KEY).unwrap() };
    let layout = RecordLayout::new(LEN, key.encoded_len() as u32, 0, RecordFlags::NONE).unwrap();
    let extent = Extent { start: 16, units: layout.units() };
    let tenant_generation = TenantGeneration(0);
    let handle = Handle {
        node: NODE,
        segment: SEGMENT,
        slot: SLOT,
        generation: GENERATION,
        extent,
        payload_offset: extent.span().offset(),
        stripe_offset: 0,
        stripe_len: LEN,
        stripe_root: 0,
        capability: Capability::default(),
        term: term(),
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
        id: id_key().object_id(key.tenant, tenant_generation, key.key),
        epoch: Epoch::new(term(), 7).unwrap(),
        object_len: LEN,
        root: 0,
        first_handle: 0,
        handle_count: 1,
        replica_count: 1,
        format: 0,
        tenant_generation,
        id_key: 1,
    };
    (object, handle)
}

fn write() -> AccessRight {
    let (object, handle) = record();
    AccessRight::Write(RecordShape::granted(&object, &handle))
}

fn scope(right: AccessRight) -> CapabilityScope {
    let (object, handle) = record();
    CapabilityScope::of_handle(&handle, object.id, object.epoch, right)
}

#[test]
fn each_request_needs_a_capability_for_exactly_its_scope() {
    let key = secret().key_of(NODE, 3);
    for call in CALLS {
        let harness = Harness::new();
        harness.prepare(call);
        let mut refused = 0;
        let mut refuses = |what: &str, capability| {
            assert_eq!(harness.call(call, capability), Err(ErrorCode::PermissionDenied), "{call:?}: {what}");
            refused += 1;
        };
        refuses("no capability", Capability::default());
        refuses("forged", Capability([0x5a; 16]));
        for right in [AccessRight::Read, write()] {
            let scope = scope(right);
            if !allows(right, call) {
                refuses("another right", key.sign(&scope));
            }
            for (field, other) in others(scope) {
                refuses(field, key.sign(&other));
            }
            refuses("retired key", secret().key_of(NODE, 1).sign(&scope));
            refuses("key that the node has not got yet", secret().key_of(NODE, 4).sign(&scope));
            refuses("key of another node", secret().key_of(NodeId(2), 3).sign(&scope));
            refuses("key of another master", CapabilitySecret::new([9; 32]).key_of(NODE, 3).sign(&scope));
            refuses("key for staging memory", CapabilityKey::new([5; 32]).sign(&scope));
        }
        assert_eq!(harness.counters.capability_refused(), refused + 1, "all are counted");
    }
}

#[test]
fn each_right_allows_its_requests_with_both_keys() {
    for rotation in [2, 3] {
        for call in CALLS {
            for right in [AccessRight::Read, write()] {
                let harness = Harness::new();
                harness.prepare(call);
                let expected = if allows(right, call) { Ok(()) } else { Err(ErrorCode::PermissionDenied) };
                let capability = secret().key_of(NODE, rotation).sign(&scope(right));
                assert_eq!(
                    harness.call(call, capability),
                    expected,
                    "{call:?} with {right:?}, key {rotation}"
                );
            }
        }
    }
}

#[test]
fn valid_capability_is_refused_to_the_certificate_of_another_tenant() {
    let capability = secret().key_of(NODE, 3).sign(&scope(write()));
    // Only nodes may describe records, and they copy those of all tenants.
    for call in CALLS.into_iter().filter(|&call| call != Call::Describe) {
        let harness = Harness::new();
        harness.prepare(call);
        for other in ["other", "defaul", "default2", ""] {
            let refused = harness.call_as(Some(other), call, capability);
            assert_eq!(refused, Err(ErrorCode::PermissionDenied), "{call:?} by tenant {other:?}");
        }
        let own = harness.call_as(Some(Tenant::DEFAULT.as_str()), call, capability);
        assert_eq!(own, Ok(()), "{call:?} by the tenant of the record");
    }
}

#[test]
fn local_callers_need_capabilities_too() {
    let harness = Harness::new();
    let deadline = Instant::now() + Duration::from_secs(5);
    let client = PeerIdentity::Local(moontide_types::ClientId(1));
    let (object, handle) = record();
    let entry = CommitEntry {
        id: object.id,
        epoch: object.epoch,
        generation: handle.generation,
        segment: handle.segment,
        slot: handle.slot,
        root: 0,
        capability: Capability::default(),
        term: handle.term,
        flags: CommitFlags::ABORT,
    };
    harness.prepare(Call::Commit);
    let mut entries = Vec::new();
    entry.encode(&mut entries);
    let body = v1::CommitRequest { entries: entries.into() }.encode_to_vec();
    let reply = harness.owner.call(client, None, FrameKind::Commit, &body, deadline).unwrap();
    assert_eq!(first_code(&reply), Err(ErrorCode::PermissionDenied));
    let op = Target::of(&handle, object.id, object.epoch).to_wire(OpKind::Release, 0, 0);
    assert!(!op.flags.contains(OpFlags::DISK));
    let ops: PackedBuilder<TransferOp> = [op].into_iter().collect();
    let reply = harness.owner.call(client, None, FrameKind::Release, &ops.finish(), deadline).unwrap();
    assert_eq!(codes(&reply), Err(ErrorCode::PermissionDenied));
    assert!(harness.memory.heap().claim(SEGMENT, SLOT, object.epoch).is_some(), "it is still being written");
}
