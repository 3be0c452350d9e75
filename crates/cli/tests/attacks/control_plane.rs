//! Attacks on masters, and on the admin pages of masters and nodes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use moontide_client::{PutOutcome, Store, StoreConfig};
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::v1::master_nodes_client::MasterNodesClient;
use moontide_proto::{
    FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Hello, PackedBuilder, PackedKeysBuilder,
    ProtocolVersions, PutEntry, Token, v1,
};
use moontide_types::{ErrorCode, IdKey, Key, NodeId, Tenant, TenantGeneration, TenantIdKey, Term};
use prost::Message;
use tonic::transport::{Channel, Endpoint};

use crate::harness::{
    CALL, Cluster, Folder, Process, STEP_TIMEOUT, Shape, alone, connect, free_address, until, words,
};

/// Number of the attacker in its requests.
const CALLER: u64 = 99;

fn one_node() -> Shape {
    Shape { nodes: 1, memory_mib: 64, groups: 1, ..Shape::default() }
}

/// Address of a listener of the master.
fn address<'a>(cluster: &'a Cluster, listener: &str) -> &'a str {
    cluster.master.printed(listener).trim_start_matches("http://")
}

/// A real client puts and gets an object, over connections of its own.
#[track_caller]
fn serves_a_client(cluster: &Cluster, key: &str) {
    let store = connect(StoreConfig { shm: false, ..cluster.config() });
    serves(&store, key);
}

#[track_caller]
fn serves(store: &Store, key: &str) {
    assert_eq!(store.put(key.as_bytes(), b"value").unwrap(), PutOutcome::Stored, "{key}");
    assert_eq!(store.get(key.as_bytes()).unwrap().as_deref(), Some(&b"value"[..]), "{key}");
}

// ------------------------------------------------------------------------------------------------------ gRPC by hand

/// The attacker's connection to the gRPC server.
struct Grpc {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
}

impl Grpc {
    fn connect(cluster: &Cluster) -> Grpc {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{}", cluster.grpc())).unwrap().timeout(CALL);
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        Grpc { runtime, channel }
    }

    fn open_session(&self, node: NodeId, highest_term: u32) -> v1::OpenSessionResponse {
        let request = v1::OpenSessionRequest {
            context: context(0),
            node: node.0,
            boot_id: 0x55,
            addresses: vec![v1::Address { engine: "tcp".into(), address: "127.0.0.1:1".into() }],
            topology: Some(v1::Topology::default()),
            protocol_min: 2,
            protocol_max: 2,
            highest_term,
        };
        let mut nodes = MasterNodesClient::new(self.channel.clone());
        self.runtime.block_on(nodes.open_session(request)).unwrap().into_inner()
    }

    fn unmount(&self, session: u64, segments: Vec<u32>) -> Option<ErrorCode> {
        let request = v1::UnmountSegmentsRequest { context: context(session), segments };
        let mut nodes = MasterNodesClient::new(self.channel.clone());
        let response = self.runtime.block_on(nodes.unmount_segments(request)).unwrap().into_inner();
        code(response.context)
    }

    fn mount(&self, session: u64, term: u32) -> Option<ErrorCode> {
        let spec = v1::SegmentSpec {
            segment: 0,
            generation: 1,
            medium: v1::Medium::Memory.into(),
            units: 1_000,
            slots: 100,
            term,
            ..Default::default()
        };
        let request = v1::MountSegmentsRequest {
            capability_rotation: 1,
            context: context(session),
            segments: vec![spec],
            ..Default::default()
        };
        let mut nodes = MasterNodesClient::new(self.channel.clone());
        let response = self.runtime.block_on(nodes.mount_segments(request)).unwrap().into_inner();
        code(response.context).or_else(|| ErrorCode::try_from(response.results[0].code).ok())
    }
}

fn context(session: u64) -> Option<v1::RequestContext> {
    Some(v1::RequestContext { session, caller: CALLER, timeout_ms: 5_000, ..Default::default() })
}

fn code(context: Option<v1::ResponseContext>) -> Option<ErrorCode> {
    ErrorCode::try_from(context.expect("every response has a context").code).ok()
}

// ----------------------------------------------------------------------------------------------------- other tenants

#[test]
fn tenant_gets_neither_ids_nor_removals_of_another_tenant() {
    let cluster = Cluster::start(one_node());
    let [acme, beta] =
        ["acme", "beta"].map(|tenant| connect(StoreConfig { tenant: tenant.into(), ..cluster.config() }));
    [&acme, &beta].into_iter().for_each(|store| serves(store, "k"));
    let grpc = Grpc::connect(&cluster);
    let mut master = MasterClient::new(grpc.channel.clone());
    let of_beta = Some(v1::RequestContext { tenant: "beta".into(), ..context(0).unwrap() });

    let request = v1::GetClusterInfoRequest { context: of_beta.clone() };
    let info = grpc.runtime.block_on(master.get_cluster_info(request)).unwrap().into_inner();
    let secret: [u8; 32] = info.tenant_id_key[..].try_into().unwrap();
    let (key, generation) = (Key::new(b"k").unwrap(), TenantGeneration(0));
    let computed = TenantIdKey::new(info.id_key, secret).object_id(generation, key);
    assert_eq!(computed, beta.object_id(b"k").unwrap());
    let of_acme = acme.object_id(b"k").unwrap();
    assert_ne!(computed, of_acme);
    for tenant in ["acme", "beta"] {
        let tenant = Tenant::new(tenant).unwrap();
        assert_ne!(IdKey::new(info.id_key, secret).object_id(tenant, generation, key), of_acme);
    }

    let mut poll = |term, next_sequence, wait_ms| {
        let cursors = vec![v1::InvalidationCursor { group: 0, term, next_sequence }];
        let (context, cluster) = (of_beta.clone(), info.cluster);
        let request = v1::PollInvalidationsRequest { context, cursors, wait_ms, cluster };
        grpc.runtime.block_on(master.poll_invalidations(request)).unwrap().into_inner().groups
    };
    let first = (0..6).find_map(|_| poll(0, 0, 5_000).pop()).expect("the feed opens");
    assert!(first.gap && first.ids.is_empty());
    assert!(acme.remove(b"k", true).unwrap());
    assert_eq!(poll(first.term, first.next_sequence, 1_000), [], "a removal of another tenant");
    assert!(beta.remove(b"k", true).unwrap());
    let own = poll(first.term, first.next_sequence, 5_000).pop().unwrap();
    assert_eq!((&own.ids[..], own.gap), (&computed.0[..], false));
    assert_eq!(own.next_sequence, first.next_sequence + 1, "it counts no removal of another tenant");
}

// ---------------------------------------------------------------------------------------------------------- sessions

#[test]
fn session_of_a_node_can_be_neither_guessed_nor_read() {
    let cluster = Cluster::start(one_node());
    let attacker = Grpc::connect(&cluster);
    // As ids were formed before: the term of the master and a count.
    for guess in (1..4u64).flat_map(|term| (0..8).map(move |number| term << 40 | number)) {
        assert_eq!(attacker.unmount(guess, vec![0, 1]), Some(ErrorCode::StaleSession), "{guess:x}");
    }
    let mut master = MasterClient::new(attacker.channel.clone());
    let request = v1::GetNodesRequest { context: context(0) };
    let nodes = attacker.runtime.block_on(master.get_nodes(request)).unwrap().into_inner().nodes;
    assert_eq!(nodes.len(), 1);
    let public = nodes[0].registration;
    assert_eq!(attacker.unmount(public, vec![0, 1]), Some(ErrorCode::StaleSession), "the public number");
    let pages = [cluster.master.page("/get_all_nodes"), cluster.nodes[0].page("/health")];
    for page in pages {
        assert!(!page.contains("session") && !page.contains("boot"), "{page}");
    }
    serves_a_client(&cluster, "served");
    assert_eq!(cluster.master.metrics().master("node_sessions"), 1);
    cluster.end();
}

#[test]
fn stranger_cannot_take_over_a_node_or_stop_the_master() {
    let mut cluster = Cluster::start(one_node());
    let attacker = Grpc::connect(&cluster);
    let victim = cluster.id(0);
    let taken = attacker.open_session(victim, 0);
    assert_eq!(code(taken.context), Some(ErrorCode::Retry));
    assert!(taken.session == 0 && taken.id_key_secret.is_empty());
    until("the log names the node", STEP_TIMEOUT, || {
        let text = cluster.master.log_text();
        text.contains("another process is registered as this node") && text.contains(&victim.to_string())
    });
    // The highest term, at a registration, at a mount, and on a stream.
    let newest = Term::MAX.get();
    let refused = attacker.open_session(NodeId(0xabc), newest);
    assert_eq!(code(refused.context), Some(ErrorCode::StaleTerm));
    let stranger = attacker.open_session(NodeId(0xabc), 0);
    assert_eq!(code(stranger.context), None);
    assert_eq!(attacker.mount(stranger.session, newest), Some(ErrorCode::StaleTerm));
    assert!(cluster.master.page("/role").contains("leader"), "{}", cluster.master.page("/role"));
    serves_a_client(&cluster, "served");
    // A node that is killed is back as soon as it has started again, with the same id.
    let ttl = Duration::from_millis(one_node().session_ttl_ms);
    cluster.nodes[0].kill();
    let killed = Instant::now();
    cluster.restart_node(0);
    until("the node is back", STEP_TIMEOUT, || cluster.master.page("/get_all_nodes").contains("127.0.0.1"));
    assert!(killed.elapsed() < ttl / 2, "it waited for the end of its session: {:?}", killed.elapsed());
    serves_a_client(&cluster, "served again");
}

// ------------------------------------------------------------------------------------------------------- connections

/// Limit of connections in these tests, of each server.
const CONNECTIONS: usize = 64;

/// Opens connections that send the same bytes and nothing else.
fn open(address: &str, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let open = |_| {
        let mut socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(CALL)).unwrap();
        // The server may have closed it already.
        let _ = socket.write_all(bytes);
        socket
    };
    (0..count).map(open).collect()
}

/// Whether the server closes the connection.
fn is_closed(mut socket: &TcpStream) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match socket.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn silent_connections_lock_no_client_out() {
    let mut shape = one_node();
    shape.master_words = words(&format!("--connections-max {CONNECTIONS}"));
    let cluster = Cluster::start(shape);
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let attacks: [(&str, &[u8]); 5] =
        [("grpc", b""), ("frame", b""), ("grpc", preface), ("grpc", &preface[..10]), ("frame", b"MTF1")];
    for (at, (listener, bytes)) in attacks.into_iter().enumerate() {
        let started = Instant::now();
        let silent = open(address(&cluster, listener), 3 * CONNECTIONS, bytes);
        serves_a_client(&cluster, &format!("during {at}"));
        let ls = std::process::Command::new(env!("CARGO_BIN_EXE_moontide"))
            .args(["ls", "--master", cluster.grpc(), "--timeout", "10s"])
            .output()
            .unwrap();
        assert!(ls.status.success(), "{}", String::from_utf8_lossy(&ls.stderr));
        assert!(started.elapsed() < CALL, "{:?}", started.elapsed());
        drop(silent);
    }
    let page = cluster.master.metrics();
    assert!(page.sum("moontide_master_connections_rejected_total", "grpc") > 0, "{page:?}");
    // The admin pages of master and node have limits of their own.
    let node = cluster.nodes[0].printed("admin").trim_start_matches("http://").to_owned();
    for admin in [address(&cluster, "admin").to_owned(), node] {
        let silent = open(&admin, 400, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n");
        let page = crate::harness::http_get(&admin, "/metrics").unwrap();
        assert!(page.contains("moontide_"));
        drop(silent);
    }
    cluster.end();
}

#[test]
fn connection_that_never_greets_is_closed_in_time() {
    let cluster = Cluster::start(one_node());
    let started = Instant::now();
    let listeners = ["grpc", "frame", "admin"];
    let silent: Vec<TcpStream> =
        listeners.iter().flat_map(|listener| open(address(&cluster, listener), 1, b"")).collect();
    // A request line that comes byte by byte.
    let mut slow = open(address(&cluster, "admin"), 1, b"").remove(0);
    let reader = slow.try_clone().unwrap();
    let drip = std::thread::spawn(move || {
        for byte in b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nx: yyyyyyyyyyyyyyyyyyy\r\n\r\n".iter() {
            if slow.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    });
    for (listener, socket) in listeners.iter().zip(&silent).chain([(&"a slow head", &reader)]) {
        assert!(is_closed(socket), "{listener}");
        let took = started.elapsed();
        assert!((Duration::from_secs(8)..Duration::from_secs(16)).contains(&took), "{listener}: {took:?}");
    }
    drip.join().unwrap();
    serves_a_client(&cluster, "served");
    cluster.end();
}

// ----------------------------------------------------------------------------------------------------------- tenants

/// The attacker's connection to the frame server.
struct Frames {
    socket: TcpStream,
}

impl Frames {
    fn connect(address: &str) -> Frames {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(CALL)).unwrap();
        let mut frames = Frames { socket };
        let versions = ProtocolVersions::CURRENT;
        let (node, token) = (NodeId(0), Token::NONE);
        let hello = Hello { node, caller: CALLER, versions, inflight_max: 64, features: 0, token };
        let mut body = vec![];
        hello.encode(&mut body);
        let (header, _) = frames.call(FrameKind::Hello, &body);
        assert_eq!(header.kind, FrameKind::HelloAck);
        frames
    }

    fn call(&mut self, kind: FrameKind, body: &[u8]) -> (FrameHeader, Vec<u8>) {
        let mut header = FrameHeader::new(kind, 1);
        (header.timeout_ms, header.body_len) = (5_000, body.len() as u32);
        self.socket.write_all(&[&header.encode()[..], body].concat()).unwrap();
        let mut bytes = [0; FRAME_HEADER_BYTES];
        self.socket.read_exact(&mut bytes).unwrap();
        let header = FrameHeader::decode(&bytes).unwrap();
        let mut body = vec![0; header.body_len as usize];
        self.socket.read_exact(&mut body).unwrap();
        (header, body)
    }
}

fn put_start(tenant: String) -> v1::PutStartRequest {
    let (mut keys, count) = (PackedKeysBuilder::new(), 4);
    (0..count).for_each(|n| keys.push(Key::new(format!("a{n}").as_bytes()).unwrap()).unwrap());
    let objects: PackedBuilder<PutEntry> = (0..count).map(|_| PutEntry { len: 1, config: 0 }).collect();
    v1::PutStartRequest {
        context: context(0).map(|context| v1::RequestContext { tenant, ..context }),
        keys: keys.finish().into(),
        configs: vec![v1::PutConfig { replicas: 1, replicas_min: 1, ..Default::default() }],
        objects: objects.finish().into(),
        attributes: Default::default(),
    }
}

#[test]
fn invented_tenants_use_up_no_table() {
    let mut shape = one_node();
    shape.node_words = words("--bytes-per-slot 2KiB");
    // So that puts that never end are soon over.
    shape.master_words = words("--reservation-ms 3000");
    let cluster = Cluster::start(shape);
    let victim = connect(StoreConfig { tenant: "known-before".into(), ..cluster.config() });
    serves(&victim, "before");
    let mut attacker = Frames::connect(address(&cluster, "frame"));
    for n in 0..4_200 {
        let (header, _) = attacker.call(FrameKind::PutStart, &put_start(format!("t{n}")).encode_to_vec());
        assert_eq!(header.kind, FrameKind::PutStartReply);
    }
    serves(&victim, "meanwhile");
    // A tenant that was never seen before can store as soon as these puts are over.
    let newcomer = connect(StoreConfig { tenant: "newcomer".into(), ..cluster.config() });
    until("there is a place for a new tenant", STEP_TIMEOUT, || newcomer.put(b"first", b"value").is_ok());
    serves(&newcomer, "after");
    let tenants = |cluster: &Cluster| cluster.master.page("/get_all_tenants").matches("\"name\"").count();
    until("the invented tenants are forgotten", STEP_TIMEOUT, || tenants(&cluster) <= 3);
    cluster.check_accounting();
    cluster.end();
}

// ------------------------------------------------------------------------------------------------------ admin pages

/// Makes a request, and returns status and response.
fn http(address: &str, request: &str) -> (u16, String) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(CALL)).unwrap();
    socket.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    socket.read_to_string(&mut response).unwrap();
    (response.split(' ').nth(1).unwrap().parse().unwrap(), response)
}

fn request(method: &str, path: &str, host: &str, more: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 0\r\n{more}\r\n"
    )
}

#[test]
fn pages_of_other_sites_can_use_no_admin_endpoint() {
    let mut shape = one_node();
    shape.master_words = words("--admin-hosts cache.example");
    let cluster = Cluster::start(shape);
    let store = cluster.remote();
    serves(&store, "key");
    let master = address(&cluster, "admin").to_owned();
    let node = cluster.nodes[0].printed("admin").trim_start_matches("http://").to_owned();
    // A name of another site that leads to this address.
    for admin in [&master, &node] {
        let (status, response) = http(admin, &request("GET", "/metrics", "evil.example:80", ""));
        assert_eq!(status, 403, "{response}");
        assert!(response.contains("admin_hosts"), "{response}");
        for host in ["localhost", "127.0.0.1:1", "[::1]:1"] {
            assert_eq!(http(admin, &request("GET", "/metrics", host, "")).0, 200, "{host}");
        }
    }
    assert_eq!(http(&master, &request("GET", "/metrics", "cache.example", "")).0, 200);
    // A form of another site.
    let evict = |host, more| http(&master, &request("POST", "/evict?target_permille=0", host, more));
    for (host, more) in [("localhost", ""), ("localhost", "Origin: http://evil.example\r\n")] {
        let (status, response) = evict(host, more);
        assert_eq!(status, 403, "{response}");
        assert!(response.contains("curl -X POST -H 'moontide-admin: 1'"), "{response}");
    }
    assert_eq!(evict("evil.example", "moontide-admin: 1\r\n").0, 403);
    assert!(store.exists(b"key").unwrap(), "nothing was evicted");
    // The question of a browser whether it may send the header is not answered with permission.
    let asks = "Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n";
    let (_, response) = http(&master, &request("OPTIONS", "/evict", "localhost", asks));
    assert!(!response.to_ascii_lowercase().contains("access-control-allow"), "{response}");
    let (status, response) = evict("localhost", "moontide-admin: 1\r\n");
    assert_eq!(status, 200, "{response}");
    cluster.end();
}

// ------------------------------------------------------------------------------------------------------------- files

#[test]
fn secrets_are_private_whatever_the_umask() {
    let _alone = alone();
    let folder = Folder::new();
    let data = folder.path().join("data");
    let [grpc, frame, admin] = [(); 3].map(|()| free_address());
    let all = words(&format!(
        "master --grpc-listen {grpc} --frame-listen {frame} --admin-listen {admin} --data-dir {}",
        data.display()
    ));
    let through = ["sh", "-c", "umask 0; exec \"$@\"", "sh"].map(str::to_owned);
    let mode = |name: &str| std::fs::metadata(data.join(name)).unwrap().permissions().mode() & 0o777;
    // The first start creates the files, the second one replaces them.
    for _ in 0..2 {
        let _master = Process::start(folder.path(), "master", &through, &all, "admin");
        assert_eq!((mode(""), mode("cluster.toml"), mode("lock")), (0o700, 0o600, 0o600));
    }
    for entry in std::fs::read_dir(&data).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert_eq!(mode(&name) & 0o077, 0, "{name}");
    }
}
