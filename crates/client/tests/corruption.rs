//! Corrupt bytes are never returned, whatever the cause.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_client::{Store, StoreConfig};
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_proto::convert::{PutStartResponse, SlotOutcomes, Wire};
use moontide_proto::{
    CommitEntry, CommitFlags, FixedRecord, FrameKind, Handle, ObjectEntry, OpFlags, PackedBuilder,
    PackedKeysBuilder, PutEndEntry, PutEndFlags, PutEntry, v1,
};
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, EngineKind, Link, Metrics, Op, Peer, Target, call, run};
use moontide_types::limits::{PAGE_BYTES, REPLICAS_MAX};
use moontide_types::record::DigestContext;
use moontide_types::{ErrorCode, Key, ObjectId, Tenant, TenantGeneration, TenantIdKey};
use prost::Message;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn context() -> Option<v1::RequestContext> {
    Some(v1::RequestContext { timeout_ms: 5_000, caller: 77, ..Default::default() })
}

/// Writer that reports arbitrary roots.
struct Writer<'a> {
    master: &'a Server,
    link: Arc<dyn Link>,
}

impl Writer<'_> {
    fn id(&self, name: &str) -> ObjectId {
        let info = self.master.service().get_cluster_info(&v1::GetClusterInfoRequest { context: context() });
        let key = TenantIdKey::new(info.id_key, info.tenant_id_key[..].try_into().unwrap());
        key.object_id(TenantGeneration(0), Key::new(name.as_bytes()).unwrap())
    }

    fn keys(name: &str) -> bytes::Bytes {
        let mut keys = PackedKeysBuilder::new();
        keys.push(Key::new(name.as_bytes()).unwrap()).unwrap();
        keys.finish().into()
    }

    fn start(&self, name: &str, len: u64) -> (ObjectEntry, Handle) {
        let objects: PackedBuilder<PutEntry> = [PutEntry { len, config: 0 }].into_iter().collect();
        let response = self.master.service().put_start(&v1::PutStartRequest {
            context: context(),
            keys: Self::keys(name),
            configs: vec![v1::PutConfig { replicas: 1, replicas_min: 1, ..Default::default() }],
            objects: objects.finish().into(),
            attributes: Default::default(),
        });
        let response = PutStartResponse::from_wire(&response).unwrap();
        let (object, handles) = response.body().unwrap().list.iter().next().unwrap();
        assert_eq!(object.code, None, "{name}");
        (object, handles.iter().next().unwrap())
    }

    fn call_node(&self, kind: FrameKind, body: Vec<u8>) {
        let response = call(&*self.link, kind, body, soon()).unwrap();
        let response = v1::SlotOutcomes::decode(&response[..]).unwrap();
        let code = SlotOutcomes::from_wire(&response).unwrap().codes.iter().next().unwrap();
        assert_eq!(code, None, "{kind:?}");
    }

    /// Puts bytes whose root at the master is off by `off`: for a reader they are corrupt.
    fn put(&self, name: &str, bytes: &[u8], off: u64) {
        let (object, handle) = self.start(name, bytes.len() as u64);
        let (id, epoch) = (self.id(name), object.epoch);
        let objects: PackedBuilder<ObjectEntry> = [object].into_iter().collect();
        let handles: PackedBuilder<Handle> = [handle].into_iter().collect();
        let begin = v1::BeginRequest {
            tenant: Tenant::DEFAULT.as_str().into(),
            keys: Self::keys(name),
            objects: objects.finish().into(),
            handles: handles.finish().into(),
            attributes: Default::default(),
        };
        self.call_node(FrameKind::Begin, begin.encode_to_vec());
        let target = Target {
            segment: handle.segment,
            generation: handle.generation,
            slot: handle.slot,
            term: handle.term,
            epoch,
            id,
            stripe: 0,
            payload_offset: handle.payload_offset,
            capability: handle.capability,
            flags: OpFlags::NONE,
        };
        let digest = DigestContext { id, version: epoch, stripe: 0, len: bytes.len() as u64 };
        let mut digests = vec![0; bytes.len().div_ceil(PAGE_BYTES as usize)];
        let mut ops = [Op::put(target, 0, bytes).digested(digest, &mut digests).unwrap()];
        run(&*self.link, &mut ops, soon()).unwrap();
        assert_eq!(ops[0].outcome(), Some(Ok(())));
        let root = digest.root_of(digests);
        let mut entries = Vec::new();
        CommitEntry {
            id,
            epoch,
            generation: handle.generation,
            segment: handle.segment,
            slot: handle.slot,
            root,
            capability: handle.capability,
            term: handle.term,
            flags: CommitFlags::NONE,
        }
        .encode(&mut entries);
        self.call_node(FrameKind::Commit, v1::CommitRequest { entries: entries.into() }.encode_to_vec());
        let end = PutEndEntry {
            id,
            epoch,
            root: root.wrapping_add(off),
            outcomes: [None; REPLICAS_MAX],
            replica_count: 1,
            flags: PutEndFlags::NONE,
            stripe_count: 1,
        };
        let entries: PackedBuilder<PutEndEntry> = [end].into_iter().collect();
        let end =
            v1::PutEndRequest { context: context(), entries: entries.finish().into(), stripe_roots: vec![] };
        let ended = self.master.service().put_end(&end);
        assert!(ended.codes.iter().all(|&byte| byte == 0), "{name}: {:?}", ended.codes);
    }
}

#[test]
fn bytes_that_do_not_match_their_digest_are_not_returned() {
    let free = "127.0.0.1:0".parse().unwrap();
    let config = MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        groups: Some(1),
        reallocation_delay_ms: 0,
        ..MasterConfig::default()
    };
    let master = Server::start(config).unwrap();
    let address = master.addresses().grpc.to_string();
    let config = NodeConfig { master: address.clone(), memory_bytes: 64 << 20, ..NodeConfig::default() };
    let node = Node::start(config).unwrap();
    assert!(node.wait_until_mounted(Duration::from_secs(10)));
    let addresses = node.addresses().tcp.iter().map(|address| (EngineKind::Tcp, address.to_string()));
    let peer = Peer { node: node.id(), addresses: addresses.collect() };
    let link = TcpEngine::new(TcpConfig::default(), Metrics::new()).connect(&peer, soon()).unwrap();
    let writer = Writer { master: &master, link };
    let store = Store::connect(StoreConfig { shm: false, ..StoreConfig::new(address) }).unwrap();
    let value: Vec<u8> = (0..700_000u32).map(|n| n.wrapping_mul(2_654_435_761) as u8).collect();
    for (name, off) in [("right", 0), ("wrong", 1)] {
        writer.put(name, &value, off);
        let got = store.get(name.as_bytes());
        let batch = store.get_batch(&[name.as_bytes()]).remove(0);
        let mut part = vec![0; 1000];
        let ranged = store.get_range(name.as_bytes(), 300_000, &mut part);
        if off == 0 {
            assert!(got.unwrap().unwrap() == value && batch.unwrap().unwrap() == value);
            assert_eq!((ranged.unwrap(), &part[..]), (Some(1000), &value[300_000..301_000]));
            continue;
        }
        for code in [got.unwrap_err().code(), batch.unwrap_err().code(), ranged.unwrap_err().code()] {
            assert_eq!(code, ErrorCode::Corrupt);
        }
    }
}
