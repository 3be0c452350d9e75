//! Many small objects: batches through the node, and a report of several chunks per segment after a restart of the
//! master.

mod support;

use std::time::{Duration, Instant};

use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_proto::convert::{SlotOutcomes, Wire};
use moontide_proto::limits::HANDLES_PER_RESPONSE_MAX;
use moontide_proto::{
    CommitEntry, CommitFlags, FrameKind, Handle, ObjectEntry, Packed, PackedBuilder, PutEndEntry,
    PutEndFlags, PutEntry, v1,
};
use moontide_transfer::{Link, Op, call, run};
use moontide_types::limits::{BATCH_KEYS_MAX, REPLICAS_MAX};
use moontide_types::record::DigestContext;
use moontide_types::{Key, Tenant, TenantGeneration, TenantIdKey};
use prost::Message;
use support::*;

const BATCH: usize = 2000;
const BATCHES: usize = 12;

fn names(batch: usize) -> Vec<String> {
    (0..BATCH).map(|n| format!("some/longer/prefix/of/a/key/{batch:04}/{n:06}")).collect()
}

fn bytes_of(name: &str) -> Vec<u8> {
    name.bytes().rev().cycle().take(100).collect()
}

fn all_ok(body: &[u8]) {
    let message = v1::SlotOutcomes::decode(body).unwrap();
    let outcomes = SlotOutcomes::from_wire(&message).unwrap();
    assert_eq!(outcomes.codes.iter().len(), BATCH);
    assert!(outcomes.codes.iter().all(|code| code.is_none()));
}

/// Puts a batch with all steps.
fn put_batch(master: &Server, link: &dyn Link, batch: usize) {
    let names = names(batch);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let objects: PackedBuilder<PutEntry> = names.iter().map(|_| PutEntry { len: 100, config: 0 }).collect();
    let started = master.service().put_start(&v1::PutStartRequest {
        context: context(),
        keys: keys(&names),
        configs: vec![v1::PutConfig { replicas: 1, replicas_min: 1, ..Default::default() }],
        objects: objects.finish().into(),
        attributes: Default::default(),
    });
    // All of them are on this node, so the response has the fields of a Begin.
    let begin = v1::BeginRequest {
        tenant: Tenant::DEFAULT.as_str().into(),
        keys: keys(&names),
        objects: started.objects.clone(),
        handles: started.handles.clone(),
        attributes: Default::default(),
    };
    all_ok(&call(link, FrameKind::Begin, begin.encode_to_vec(), deadline()).unwrap());

    let info = master.service().get_cluster_info(&v1::GetClusterInfoRequest { context: context() });
    let id_key = TenantIdKey::new(info.id_key, info.tenant_id_key[..].try_into().unwrap());
    let objects = Packed::<ObjectEntry>::decode(&started.objects, BATCH_KEYS_MAX).unwrap();
    let handles = Packed::<Handle>::decode(&started.handles, HANDLES_PER_RESPONSE_MAX).unwrap();
    let payloads: Vec<Vec<u8>> = names.iter().map(|name| bytes_of(name)).collect();
    let mut ops = Vec::new();
    let (mut commits, mut ends) = (PackedBuilder::with_capacity(BATCH), PackedBuilder::with_capacity(BATCH));
    for (((name, payload), object), handle) in
        names.iter().zip(&payloads).zip(objects.iter()).zip(handles.iter())
    {
        let id = id_key.object_id(TenantGeneration(0), Key::new(name.as_bytes()).unwrap());
        let context = DigestContext { id, version: object.epoch, stripe: 0, len: 100 };
        let root = context.payload(payload, |_| ());
        ops.push(Op::put(target(&object, id, &handle), 0, payload));
        commits.push(&CommitEntry {
            id,
            epoch: object.epoch,
            generation: handle.generation,
            segment: handle.segment,
            slot: handle.slot,
            root,
            capability: handle.capability,
            term: handle.term,
            flags: CommitFlags::NONE,
        });
        ends.push(&PutEndEntry {
            id,
            epoch: object.epoch,
            root,
            outcomes: [None; REPLICAS_MAX],
            replica_count: 1,
            flags: PutEndFlags::NONE,
            stripe_count: 1,
        });
    }
    run(link, &mut ops, deadline()).unwrap();
    assert!(ops.iter().all(|op| op.outcome() == Some(Ok(()))));
    let commit = v1::CommitRequest { entries: commits.finish().into() };
    all_ok(&call(link, FrameKind::Commit, commit.encode_to_vec(), deadline()).unwrap());
    let ended = master.service().put_end(&v1::PutEndRequest {
        context: context(),
        entries: ends.finish().into(),
        stripe_roots: vec![],
    });
    assert!(ended.codes.iter().all(|&code| code == 0));
}

fn present(master: &Server, batch: usize) -> u32 {
    let names = names(batch);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let response = master.service().exist(&v1::ExistRequest { context: context(), keys: keys(&names) });
    response.present.iter().map(|byte| byte.count_ones()).sum()
}

#[test]
fn report_of_many_records_restores_restarted_master() {
    init_logs();
    let dir = TempDir::new();
    let [grpc_listen, frame_listen, admin_listen] = stable_addresses();
    let config = MasterConfig {
        data_dir: Some(dir.0.clone()),
        grpc_listen,
        frame_listen,
        admin_listen,
        reallocation_delay_ms: 60_000,
        ..master_config()
    };
    let master = Server::start(config.clone()).unwrap();
    let node_config = NodeConfig { bytes_per_slot: 1024, ..node_config(grpc_listen) };
    let node = Node::start(node_config).unwrap();
    let (tcp, shm) = (tcp(&node), shm(&node));
    let started = Instant::now();
    for batch in 0..BATCHES {
        put_batch(&master, if batch % 2 == 0 { &*tcp } else { &*shm }, batch);
    }
    println!("{} puts in {:?}", BATCH * BATCHES, started.elapsed());
    drop(master);
    let master = Server::start(config).unwrap();
    let started = Instant::now();
    eventually("all objects are present again", || {
        (0..BATCHES).all(|batch| present(&master, batch) == BATCH as u32)
    });
    println!("reported within {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(20));
    assert_eq!(metric(&node, "reported_records_total"), (BATCH * BATCHES) as u64);
    let client = Client::new(&master);
    for batch in 0..BATCHES {
        let name = &names(batch)[batch * 7];
        assert!(client.get(&*tcp, name).unwrap() == bytes_of(name), "{name}");
    }
}
