//! Shared by the tests of a running node: a real master, a node, and a client that puts and gets over the wire.

// Each test binary uses its own part of this.
#![allow(dead_code, unreachable_pub)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_proto::convert::{GetReplicaListResponse, PutStartResponse, SlotOutcomes, Wire};
use moontide_proto::{
    Codes, CommitEntry, CommitFlags, FixedRecord, FrameKind, Handle, ObjectEntry, OpFlags, PackedBuilder,
    PackedKeysBuilder, PutEndEntry, PutEndFlags, PutEntry, v1,
};
use moontide_rt::SplitMix64;
use moontide_transfer::shm::{ShmConfig, ShmEngine, address};
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, EngineKind, Link, Metrics, Op, Peer, Target, call, run};
use moontide_types::limits::{BATCH_KEYS_MAX, PAGE_BYTES, REPLICAS_MAX};
use moontide_types::record::DigestContext;
use moontide_types::{ErrorCode, Key, ObjectId, Tenant, TenantGeneration, TenantIdKey};
use prost::Message;

pub const GROUPS: u16 = 4;

/// Maximum time that a test waits for a condition.
pub const TIMEOUT: Duration = Duration::from_secs(20);

pub fn deadline() -> Instant {
    Instant::now() + TIMEOUT
}

/// Listens on free ports, with few groups and without a delay before reallocation.
pub fn master_config() -> MasterConfig {
    let free = "127.0.0.1:0".parse().unwrap();
    MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        groups: Some(GROUPS),
        reallocation_delay_ms: 0,
        ..MasterConfig::default()
    }
}

pub fn master() -> Server {
    Server::start(master_config()).unwrap()
}

/// Returns a name that no other test on this host uses.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns three addresses that remain free while unused: below the ephemeral ports of the kernel.
pub fn stable_addresses() -> [SocketAddr; 3] {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id() * 60;
    std::array::from_fn(|_| {
        let end = deadline();
        loop {
            let port = 15_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 15_000;
            let address = SocketAddr::from(([127, 0, 0, 1], port as u16)); // < 30,000
            if std::net::TcpListener::bind(address).is_ok() {
                return address;
            }
            assert!(Instant::now() < end, "no port is free");
        }
    })
}

/// A directory that is removed with the test.
pub struct TempDir(pub PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        let path = std::env::temp_dir().join(format!("moontide-node-test-{}", unique()));
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn node_config(master: SocketAddr) -> NodeConfig {
    NodeConfig {
        master: master.to_string(),
        memory_bytes: 64 << 20,
        bytes_per_slot: 16 << 10,
        shm_socket: Some(std::env::temp_dir().join(format!("moontide-node-test-{}.sock", unique()))),
        ..NodeConfig::default()
    }
}

pub fn node(master: &Server) -> Node {
    Node::start(node_config(master.addresses().grpc)).unwrap()
}

pub fn peer(node: &Node) -> Peer {
    let tcp = node.addresses().tcp.iter().map(|address| (EngineKind::Tcp, address.to_string()));
    let shm = node.addresses().shm_socket.iter().map(|socket| (EngineKind::Shm, address(socket).unwrap()));
    Peer { node: node.id(), addresses: tcp.chain(shm).collect() }
}

pub fn tcp(node: &Node) -> Arc<dyn Link> {
    TcpEngine::new(TcpConfig::default(), Metrics::new()).connect(&peer(node), deadline()).unwrap()
}

pub fn shm(node: &Node) -> Arc<dyn Link> {
    // SAFETY: node and client are this test, which follows the protocol.
    let engine = unsafe { ShmEngine::new(ShmConfig::default(), Metrics::new()) };
    engine.connect(&peer(node), deadline()).unwrap()
}

pub fn context() -> Option<v1::RequestContext> {
    Some(v1::RequestContext { timeout_ms: 5_000, caller: 77, ..Default::default() })
}

pub fn keys(names: &[&str]) -> bytes::Bytes {
    let mut packed = PackedKeysBuilder::new();
    names.iter().for_each(|name| packed.push(Key::new(name.as_bytes()).unwrap()).unwrap());
    packed.finish().into()
}

/// Returns pseudo-random bytes for a seed.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SplitMix64::new(seed).fill(&mut bytes);
    bytes
}

/// A reservation of one object.
#[derive(Clone)]
pub struct Reserved {
    pub tenant: String,
    pub name: String,
    pub id: ObjectId,
    pub object: ObjectEntry,
    pub handles: Vec<Handle>,
}

impl Reserved {
    pub fn target(&self) -> Target {
        target(&self.object, self.id, &self.handles[0])
    }
}

pub fn target(object: &ObjectEntry, id: ObjectId, handle: &Handle) -> Target {
    Target {
        segment: handle.segment,
        generation: handle.generation,
        slot: handle.slot,
        term: handle.term,
        epoch: object.epoch,
        id,
        stripe: handle.stripe_index,
        payload_offset: handle.payload_offset,
        capability: handle.capability,
        flags: OpFlags::NONE,
    }
}

/// Calls of a client to a master, without the client crate.
pub struct Client<'a> {
    pub master: &'a Server,
    pub runtime: tokio::runtime::Runtime,
}

impl<'a> Client<'a> {
    pub fn new(master: &'a Server) -> Client<'a> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Client { master, runtime }
    }

    pub fn id(&self, name: &str) -> ObjectId {
        self.id_of(Tenant::DEFAULT, name)
    }

    /// Computes the id of a key of a tenant, as its clients can.
    pub fn id_of(&self, tenant: Tenant<'_>, name: &str) -> ObjectId {
        let of_tenant = v1::RequestContext { tenant: tenant.as_str().to_owned(), ..context().unwrap() };
        let request = v1::GetClusterInfoRequest { context: Some(of_tenant) };
        let info = self.master.service().get_cluster_info(&request);
        let key = TenantIdKey::new(info.id_key, info.tenant_id_key[..].try_into().unwrap());
        key.object_id(TenantGeneration(0), Key::new(name.as_bytes()).unwrap())
    }

    pub fn put_start(&self, name: &str, len: u64) -> Result<Reserved, ErrorCode> {
        self.put_start_in(context(), name, len, false)
    }

    /// Starts a put of a record without digests.
    pub fn put_start_digestless(&self, name: &str, len: u64) -> Result<Reserved, ErrorCode> {
        self.put_start_in(context(), name, len, true)
    }

    /// Starts a put as another caller, which cannot take over a reservation.
    pub fn put_start_as_other(&self, name: &str, len: u64) -> Result<Reserved, ErrorCode> {
        let other = context().map(|context| v1::RequestContext { caller: 78, ..context });
        self.put_start_in(other, name, len, false)
    }

    /// Starts a put in this context.
    pub fn put_start_in(
        &self,
        context: Option<v1::RequestContext>,
        name: &str,
        len: u64,
        digestless: bool,
    ) -> Result<Reserved, ErrorCode> {
        let tenant = tenant_of(context.as_ref());
        let mut objects = PackedBuilder::with_capacity(1);
        objects.push(&PutEntry { len, config: 0 });
        let request = v1::PutStartRequest {
            context,
            keys: keys(&[name]),
            configs: vec![v1::PutConfig { replicas: 1, replicas_min: 1, digestless, ..Default::default() }],
            objects: objects.finish().into(),
            attributes: Default::default(),
        };
        let response = self.master.service().put_start(&request);
        let response = PutStartResponse::from_wire(&response).unwrap();
        if let Some(code) = response.context().code {
            return Err(code);
        }
        let (object, handles) = response.body().unwrap().list.iter().next().unwrap();
        match object.code {
            Some(code) => Err(code),
            None => {
                let handles = handles.iter().collect();
                let id = self.id_of(Tenant::new(&tenant).unwrap(), name);
                Ok(Reserved { tenant, name: name.to_owned(), id, object, handles })
            }
        }
    }

    /// Starts a put; retries while no segment is available.
    pub fn put_start_soon(&self, name: &str, len: u64) -> Reserved {
        let end = deadline();
        loop {
            match self.put_start(name, len) {
                Ok(reserved) => return reserved,
                Err(code) if code.is_retryable() && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(code) => panic!("{name}: {code}"),
            }
        }
    }

    pub fn put_end(&self, reserved: &Reserved, root: u64) -> Option<ErrorCode> {
        let entry = PutEndEntry {
            id: reserved.id,
            epoch: reserved.object.epoch,
            root,
            outcomes: [None; REPLICAS_MAX],
            replica_count: reserved.object.replica_count,
            flags: PutEndFlags::NONE,
            stripe_count: 1,
        };
        let mut entries = PackedBuilder::with_capacity(1);
        entries.push(&entry);
        let request =
            v1::PutEndRequest { context: context(), entries: entries.finish().into(), stripe_roots: vec![] };
        one_code(&self.master.service().put_end(&request))
    }

    pub fn exists(&self, name: &str) -> bool {
        let response =
            self.master.service().exist(&v1::ExistRequest { context: context(), keys: keys(&[name]) });
        response.present.first().is_some_and(|byte| byte & 1 == 1)
    }

    pub fn lookup(&self, name: &str) -> Result<Reserved, ErrorCode> {
        self.lookup_in(context(), name)
    }

    /// As [`Client::lookup`], for the tenant in the context.
    pub fn lookup_in(&self, context: Option<v1::RequestContext>, name: &str) -> Result<Reserved, ErrorCode> {
        let tenant = tenant_of(context.as_ref());
        let request =
            v1::GetReplicaListRequest { context, keys: keys(&[name]), lease_ms: 0, attributes: false };
        let response = self.master.service().get_replica_list(&request);
        let response = GetReplicaListResponse::from_wire(&response).unwrap();
        let (object, handles) = response.body().unwrap().list.iter().next().unwrap();
        match object.code {
            Some(code) => Err(code),
            None => {
                let handles = handles.iter().collect();
                let id = self.id_of(Tenant::new(&tenant).unwrap(), name);
                Ok(Reserved { tenant, name: name.to_owned(), id, object, handles })
            }
        }
    }

    pub fn remove(&self, name: &str) -> Option<ErrorCode> {
        let request = v1::RemoveRequest { context: context(), keys: keys(&[name]), force: true };
        one_code(&self.runtime.block_on(self.master.service().remove(&request)))
    }

    /// Puts an object with all steps.
    pub fn put(&self, link: &dyn Link, name: &str, bytes: &[u8]) -> Reserved {
        let reserved = self.put_start_soon(name, bytes.len() as u64);
        assert_eq!(begin(link, &reserved), None, "{name}");
        let root = write(link, &reserved, bytes);
        assert_eq!(commit(link, &reserved, root, CommitFlags::NONE), None, "{name}");
        assert_eq!(self.put_end(&reserved, root), None, "{name}");
        reserved
    }

    /// Gets an object with all steps, and verifies its digests.
    pub fn get(&self, link: &dyn Link, name: &str) -> Result<Vec<u8>, ErrorCode> {
        let found = self.lookup(name)?;
        let mut bytes = vec![0; found.object.object_len as usize];
        let mut digests = vec![0; bytes.len().div_ceil(PAGE_BYTES as usize)];
        let context = digest_context(&found);
        let op = Op::get(found.target(), 0, &mut bytes).digested(context, &mut digests).unwrap();
        let mut ops = [op];
        run(link, &mut ops, deadline()).unwrap();
        ops[0].outcome().unwrap()?;
        assert_eq!(context.root_of(digests), found.handles[0].stripe_root, "{name}");
        Ok(bytes)
    }
}

pub fn one_code(response: &v1::OutcomesResponse) -> Option<ErrorCode> {
    assert_eq!(response.context.as_ref().unwrap().code, 0);
    Codes::decode(&response.codes, BATCH_KEYS_MAX).unwrap().iter().next().unwrap()
}

pub fn digest_context(reserved: &Reserved) -> DigestContext {
    DigestContext {
        id: reserved.id,
        version: reserved.object.epoch,
        stripe: 0,
        len: reserved.object.object_len,
    }
}

fn outcome(body: &[u8]) -> Option<ErrorCode> {
    let message = v1::SlotOutcomes::decode(body).unwrap();
    SlotOutcomes::from_wire(&message).unwrap().codes.iter().next().unwrap()
}

/// Returns the name of the tenant in a context.
fn tenant_of(context: Option<&v1::RequestContext>) -> String {
    let tenant = context.map_or("", |context| &context.tenant);
    if tenant.is_empty() { Tenant::DEFAULT.as_str() } else { tenant }.to_owned()
}

pub fn begin_body(reserved: &Reserved) -> Vec<u8> {
    let mut objects = PackedBuilder::with_capacity(1);
    objects.push(&reserved.object);
    let handles: PackedBuilder<Handle> = reserved.handles.iter().copied().collect();
    v1::BeginRequest {
        tenant: reserved.tenant.clone(),
        keys: keys(&[&reserved.name]),
        objects: objects.finish().into(),
        handles: handles.finish().into(),
        attributes: Default::default(),
    }
    .encode_to_vec()
}

/// Puts an object. Fails with the error of the first step that fails.
pub fn try_put(client: &Client<'_>, link: &dyn Link, name: &str, bytes: &[u8]) -> Result<(), ErrorCode> {
    let fail = |code: Option<ErrorCode>| code.map_or(Ok(()), Err);
    let reserved = client.put_start(name, bytes.len() as u64)?;
    fail(begin(link, &reserved))?;
    let mut digests = vec![0; bytes.len().div_ceil(PAGE_BYTES as usize)];
    let context = digest_context(&reserved);
    let mut ops = [Op::put(reserved.target(), 0, bytes).digested(context, &mut digests).unwrap()];
    run(link, &mut ops, deadline()).unwrap();
    ops[0].outcome().unwrap()?;
    let root = context.root_of(digests);
    fail(commit(link, &reserved, root, CommitFlags::NONE))?;
    fail(client.put_end(&reserved, root))
}

pub fn begin(link: &dyn Link, reserved: &Reserved) -> Option<ErrorCode> {
    outcome(&call(link, FrameKind::Begin, begin_body(reserved), deadline()).unwrap())
}

/// Writes the payload and returns its root.
pub fn write(link: &dyn Link, reserved: &Reserved, bytes: &[u8]) -> u64 {
    let mut digests = vec![0; bytes.len().div_ceil(PAGE_BYTES as usize)];
    let context = digest_context(reserved);
    let mut ops = [Op::put(reserved.target(), 0, bytes).digested(context, &mut digests).unwrap()];
    run(link, &mut ops, deadline()).unwrap();
    assert_eq!(ops[0].outcome(), Some(Ok(())));
    context.root_of(digests)
}

pub fn commit(link: &dyn Link, reserved: &Reserved, root: u64, flags: CommitFlags) -> Option<ErrorCode> {
    let handle = &reserved.handles[0];
    let entry = CommitEntry {
        id: reserved.id,
        epoch: reserved.object.epoch,
        generation: handle.generation,
        segment: handle.segment,
        slot: handle.slot,
        root,
        capability: handle.capability,
        term: handle.term,
        flags,
    };
    let mut entries = Vec::new();
    entry.encode(&mut entries);
    let body = v1::CommitRequest { entries: entries.into() }.encode_to_vec();
    outcome(&call(link, FrameKind::Commit, body, deadline()).unwrap())
}

/// Waits until `holds` returns true; `what` describes the condition.
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    let end = deadline();
    while !holds() {
        assert!(Instant::now() < end, "timeout: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns status and body of an admin endpoint.
pub fn http(address: SocketAddr, path: &str) -> (u16, String) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut response = String::new();
    socket.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

pub fn json(node: &Node, path: &str) -> serde_json::Value {
    let (status, body) = http(node.addresses().admin.unwrap(), path);
    assert_eq!(status, 200, "{path}: {body}");
    serde_json::from_str(&body).unwrap()
}

/// Returns the value of a metric.
pub fn metric(node: &Node, name: &str) -> u64 {
    let (_, page) = http(node.addresses().admin.unwrap(), "/metrics");
    let line = page.lines().find_map(|line| line.strip_prefix(&format!("moontide_node_{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
}

/// Returns the free bytes and the capacity of the node.
pub fn free_bytes(node: &Node) -> (u64, u64) {
    (metric(node, "memory_free_bytes"), metric(node, "memory_capacity_bytes"))
}

/// Enables logs, which are shown if a test fails.
pub fn init_logs() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
}

/// Proxy between a node and its master that can be interrupted.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<ProxyShared>,
}

struct ProxyShared {
    to: SocketAddr,
    open: std::sync::atomic::AtomicBool,
    sockets: std::sync::Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub fn new(to: SocketAddr) -> Proxy {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(ProxyShared { to, open: true.into(), sockets: Default::default() });
        let accepting = Arc::clone(&shared);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for local in listener.incoming() {
                let Ok(local) = local else { return };
                if !accepting.open.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(remote) = TcpStream::connect(accepting.to) else { continue };
                for (from, to) in [(&local, &remote), (&remote, &local)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    from.set_nodelay(true).unwrap();
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(std::net::Shutdown::Both);
                    });
                }
                accepting.sockets.lock().unwrap().extend([local, remote]);
            }
        });
        Proxy { address, shared }
    }

    /// Closes all connections; new ones are accepted.
    pub fn disconnect(&self) {
        for socket in self.shared.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Refuses, or accepts, connections.
    pub fn set_open(&self, open: bool) {
        self.shared.open.store(open, Ordering::SeqCst);
        if !open {
            self.disconnect();
        }
    }
}
