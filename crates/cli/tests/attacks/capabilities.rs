//! Requests to a node with an empty or an invented capability.

use std::time::Instant;

use moontide_client::{Store, StoreConfig};
use moontide_proto::convert::{
    BeginRequest, ObjectListBuilder, ObjectListKind, SlotOutcomes, Wire, decode, encode,
};
use moontide_proto::{
    Capability, FrameKind, Handle, HandleFlags, ObjectEntry, ObjectFlags, OpFlags, PackedKeysBuilder, v1,
};
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, EngineKind, Link, Metrics, Op, Peer, Target, call, run};
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, Key, Medium, NodeId, ObjectId, SegmentId, SlotId, TenantGeneration,
    Term,
};
use serde_json::Value;
use std::sync::Arc;

use crate::harness::{CALL, Cluster, Process, STEP_TIMEOUT, Shape, connect, until, words};

/// What the admin endpoint of a node tells everybody about a segment.
struct Segment {
    id: SegmentId,
    generation: Generation,
    term: Term,
    slots: u32,
    /// READY records: slot, epoch, object, length.
    records: Vec<(SlotId, Epoch, ObjectId, u64)>,
}

fn number(of: &Value) -> u64 {
    of.as_u64().or_else(|| of.as_str()?.parse().ok()).unwrap_or_else(|| panic!("{of} is no number"))
}

fn segments(node: &Process) -> Vec<Segment> {
    let list: Value = serde_json::from_str(&node.page("/segments")).unwrap();
    let segment = |listed: &Value| {
        let id = number(&listed["segment"]);
        let found: Value = serde_json::from_str(&node.page(&format!("/segments/{id}"))).unwrap();
        let record = |record: &Value| {
            let (term, sequence) = record["epoch"].as_str()?.split_once('.')?;
            let term = Term::new(term.parse().ok()?).ok()?;
            let epoch = Epoch::new(term, sequence.parse().ok()?).ok()?;
            let hex = record["id"].as_str()?;
            let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
            let id = ObjectId(std::array::from_fn(byte));
            (record["state"] == "ready")
                .then(|| (SlotId(number(&record["slot"]) as u32), epoch, id, number(&record["length"])))
        };
        Segment {
            id: SegmentId(id as u32),
            generation: Generation(number(&found["generation"])),
            term: Term::new(number(&found["term"]) as u32).unwrap(),
            slots: number(&found["slots"]) as u32,
            records: found["records"].as_array().unwrap().iter().filter_map(record).collect(),
        }
    };
    list["segments"].as_array().unwrap().iter().map(segment).collect()
}

fn link_to(node: &Process, id: NodeId) -> Arc<dyn Link> {
    let peer = Peer { node: id, addresses: vec![(EngineKind::Tcp, node.printed("tcp").to_owned())] };
    TcpEngine::new(TcpConfig::default(), Metrics::new()).connect(&peer, Instant::now() + CALL).unwrap()
}

/// Begins a record in each of these slots, with invented ids and capabilities. Returns the codes.
fn forge_begins(link: &dyn Link, node: NodeId, segment: &Segment, slots: &[u32]) -> Vec<Option<ErrorCode>> {
    let mut keys = PackedKeysBuilder::new();
    let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Begin, slots.len());
    for &slot in slots {
        keys.push(Key::new(b"x").unwrap()).unwrap();
        let extent = Extent { start: slot, units: 1 };
        let object = ObjectEntry {
            code: None,
            flags: ObjectFlags::NONE,
            valid_ms: 1000,
            id: ObjectId(std::array::from_fn(|at| slot.to_le_bytes()[at % 4])),
            epoch: Epoch::new(segment.term, (1 << 40) - 1).unwrap(),
            object_len: 0,
            root: 0,
            first_handle: 0,
            handle_count: 1,
            replica_count: 1,
            format: 0,
            tenant_generation: TenantGeneration(0),
            id_key: 1,
        };
        let handle = Handle {
            node,
            segment: segment.id,
            slot: SlotId(slot),
            generation: segment.generation,
            extent,
            payload_offset: extent.span().offset(),
            stripe_offset: 0,
            stripe_len: 0,
            stripe_root: 0,
            capability: Capability(std::array::from_fn(|at| (slot as usize + at) as u8)),
            term: segment.term,
            stripe_index: 0,
            stripe_count: 1,
            replica: 0,
            medium: Medium::Memory,
            flags: HandleFlags::NONE,
        };
        list.push(object, &[handle], &[]).unwrap();
    }
    let fields = list.finish();
    let message = v1::BeginRequest {
        tenant: "default".into(),
        keys: keys.finish().into(),
        objects: fields.objects,
        handles: fields.handles,
        attributes: fields.attributes,
    };
    let body = encode(&BeginRequest::from_wire(&message).unwrap()).unwrap();
    let reply = call(link, FrameKind::Begin, body, Instant::now() + CALL).unwrap();
    let reply: v1::SlotOutcomes = decode(reply.into()).unwrap();
    SlotOutcomes::from_wire(&reply).unwrap().codes.iter().collect()
}

fn read(
    link: &dyn Link,
    segment: &Segment,
    record: (SlotId, Epoch, ObjectId, u64),
    capability: Capability,
) -> ErrorCode {
    let (slot, epoch, id, len) = record;
    let target = Target {
        segment: segment.id,
        generation: segment.generation,
        slot,
        term: segment.term,
        epoch,
        id,
        stripe: 0,
        payload_offset: 0,
        capability,
        flags: OpFlags::NONE,
    };
    let mut bytes = vec![0; len as usize];
    let mut ops = [Op::get(target, 0, &mut bytes)];
    run(link, &mut ops, Instant::now() + CALL).unwrap();
    let outcome = ops[0].outcome().unwrap().expect_err("the read is refused");
    assert!(bytes.iter().all(|byte| *byte == 0), "no byte of the object arrived");
    outcome
}

fn one_node() -> (Cluster, Store) {
    let cluster = Cluster::start(Shape { nodes: 1, groups: 1, memory_mib: 64, ..Shape::default() });
    cluster.wait_for_nodes(1);
    let store = cluster.remote();
    (cluster, store)
}

/// Failure: a process that reached the port of a node read any object, with an empty capability. Cause: no master signed, and nodes
/// did not check. Fix: masters sign, nodes check each request.
#[test]
fn read_without_capability_is_refused() {
    let (cluster, store) = one_node();
    let secret = vec![0x5e; 10_000];
    store.put(b"secret", &secret).unwrap();
    let node = &cluster.nodes[0];
    let all = segments(node);
    let (segment, record) = all.iter().find_map(|of| Some((of, *of.records.first()?))).expect("the object");
    let link = link_to(node, cluster.id(0));
    for forged in [Capability::default(), Capability([0xa5; 16])] {
        assert_eq!(read(&*link, segment, record, forged), ErrorCode::PermissionDenied);
    }
    assert_eq!(node.metrics().node("capabilities_refused_total"), 2);
    assert!(store.get(b"secret").unwrap().unwrap() == secret);
    cluster.end();
}

/// Failure: 131,000 Begins with invented grants took all slots of a node within two seconds, and no put succeeded any more.
/// Cause and fix: as above.
#[test]
fn forged_begins_are_refused_and_puts_go_on() {
    let (cluster, store) = one_node();
    let node = &cluster.nodes[0];
    let link = link_to(node, cluster.id(0));
    let all = segments(node);
    let segment = &all[0];
    let free = node.metrics().node("slots_free");
    let slots: Vec<u32> = (0..BATCH_KEYS_MAX as u32).map(|n| n % segment.slots).collect();
    let codes = forge_begins(&*link, cluster.id(0), segment, &slots);
    assert_eq!(codes, vec![Some(ErrorCode::PermissionDenied); slots.len()]);
    assert_eq!(node.metrics().node("slots_free"), free);
    for n in 0..50 {
        let key = format!("after-{n}");
        store.put(key.as_bytes(), key.as_bytes()).unwrap();
        assert_eq!(store.get(key.as_bytes()).unwrap().unwrap(), key);
    }
    cluster.end();
}

/// A location that a client has cached is of use for one to two intervals. After that it costs one refused request and one
/// look-up, and no error.
#[test]
fn cached_location_with_a_retired_key_costs_one_refused_request_and_one_lookup() {
    let shape = Shape {
        nodes: 1,
        groups: 1,
        memory_mib: 64,
        master_words: words("--capability-rotation-ms 1s"),
        ..Shape::default()
    };
    let cluster = Cluster::start(shape);
    cluster.wait_for_nodes(1);
    let store = connect(StoreConfig { shm: false, ..cluster.config() });
    store.put(b"key", b"the bytes").unwrap();
    let refused = || cluster.nodes[0].metrics().node("capabilities_refused_total");
    let lookups = || cluster.master.metrics().master("read_keys_total");
    let keys = || cluster.nodes[0].metrics().node("capability_keys_total");
    for round in 0..3 {
        // From the put, and later from the look-ups.
        assert_eq!(store.get(b"key").unwrap().unwrap(), "the bytes");
        let (before, first) = ((refused(), lookups()), keys());
        // The master signs with the next key when the node has acknowledged it, so the location may have that already.
        until("three more keys", STEP_TIMEOUT, || keys() >= first + 3);
        assert_eq!(store.get(b"key").unwrap().unwrap(), "the bytes");
        assert_eq!((refused(), lookups()), (before.0 + 1, before.1 + 1), "round {round}");
    }
    cluster.end();
}
