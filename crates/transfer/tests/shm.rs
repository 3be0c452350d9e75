//! Gets and puts in shared memory, and the choice of the engine.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{TestNode, get, soon};
use moontide_heap::{KillOutcome, NodeHeap, SharedLookup, SharedReader};
use moontide_proto::{AccessRight, FRAME_HEADER_BYTES, FrameHeader, FrameKind, Hello, TransferOp};
use moontide_transfer::sample::{SampleNode, SampleNodeConfig};
use moontide_transfer::shm::{ShmConfig, ShmEngine, ShmServer, ShmServerConfig, address};
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{
    Engine, EngineKind, Engines, Link, Metrics, Op, Owner, Peer, PeerIdentity, Target, call, run,
};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{
    Clock, Epoch, ErrorCode, Generation, MonoTime, NodeId, ObjectId, SegmentId, SlotId, SystemClock, Term,
};
use rustix::net::SocketAddrUnix;

fn socket_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("moontide-shm-{name}-{}", std::process::id()))
}

fn start_server(sample: &Arc<SampleNode>, name: &str) -> ShmServer {
    let stale_after = Duration::from_secs(600);
    let config =
        ShmServerConfig { socket: socket_path(name), extra_uids: Vec::new(), stale_after, streams_max: 64 };
    // SAFETY: node and client are in this test, which keeps to the protocol.
    unsafe { ShmServer::start(config, Arc::clone(sample) as _, Metrics::new()) }.unwrap()
}

fn engine(metrics: &Arc<Metrics>) -> ShmEngine {
    // SAFETY: as above.
    unsafe { ShmEngine::new(ShmConfig::default(), Arc::clone(metrics)) }
}

fn peer(sample: &SampleNode, server: &ShmServer) -> Peer {
    Peer { node: sample.config().node, addresses: vec![(EngineKind::Shm, address(server.socket()).unwrap())] }
}

struct Attached {
    sample: Arc<SampleNode>,
    link: Arc<dyn Link>,
    _server: ShmServer,
}

fn attach(config: SampleNodeConfig, name: &str) -> Attached {
    let sample = Arc::new(SampleNode::new(config).unwrap());
    let server = start_server(&sample, name);
    let link = engine(&Metrics::new()).connect(&peer(&sample, &server), soon()).unwrap();
    std::fs::remove_file(server.socket()).unwrap();
    Attached { sample, link, _server: server }
}

#[test]
fn records_of_all_sizes_are_copied_and_read_zero_copy() {
    for record_bytes in [0, 1, 4096, PAGE_BYTES + 1, 3_000_001] {
        let config = SampleNodeConfig { record_bytes, readable: 3, writable: 0, ..Default::default() };
        let Attached { sample, link, _server } = attach(config, &format!("sizes-{record_bytes}"));
        let config = sample.config();
        let mut guards = Vec::new();
        for record in 0..3 {
            assert!(get(&*link, config, record).unwrap().unwrap() == config.content(record));
            let mut into = vec![0; record_bytes as usize];
            let mut digests = vec![0; record_bytes.div_ceil(PAGE_BYTES) as usize];
            let context = config.digest_context(record);
            let op = Op::get_parts(config.target(record), 0, into.chunks_mut(777));
            let mut ops = [op.digested(context, &mut digests).unwrap()];
            run(&*link, &mut ops, soon()).unwrap();
            assert_eq!(ops[0].outcome(), Some(Ok(())));
            assert_eq!(context.root_of(digests), context.payload(&config.content(record), |_| ()));

            let mut reader = SharedReader::new(Arc::clone(link.local().expect("memory is mapped"))).unwrap();
            match reader.get(&config.id(record), SystemClock.now()) {
                SharedLookup::Hit(guard) => guards.push(guard),
                other => panic!("{other:?}"),
            }
        }
        drop(link);
        for (record, guard) in (0..).zip(guards) {
            assert!(guard.bytes() == config.content(record), "a pinned record outlives the link");
        }
    }
}

#[test]
fn put_requires_begin_and_is_readable_after_commit() {
    let record_bytes = 2 * PAGE_BYTES + 99;
    let config =
        SampleNodeConfig { record_bytes, readable: 1, writable: 2, begun: false, ..Default::default() };
    let Attached { sample, link, _server } = attach(config, "put");
    let config = sample.config();
    let bytes = config.content(40);
    let (target, context) = (config.target(1), config.digest_context(1));

    let mut early = [Op::put(target, 0, &bytes)];
    run(&*link, &mut early, soon()).unwrap();
    assert_eq!(early[0].outcome(), Some(Err(ErrorCode::StaleEpoch)), "before Begin");

    call(&*link, FrameKind::Begin, config.begin_body(1), soon()).unwrap();
    let mut part = [Op::put(target, 0, &bytes[..10])];
    run(&*link, &mut part, soon()).unwrap();
    assert_eq!(part[0].outcome(), Some(Err(ErrorCode::Unsupported)), "a record is filled in one operation");

    let mut digests = vec![0; 3];
    let mut ops = [Op::put_parts(target, 0, bytes.chunks(1001)).digested(context, &mut digests).unwrap()];
    run(&*link, &mut ops, soon()).unwrap();
    assert_eq!(ops[0].outcome(), Some(Ok(())));
    let root = context.root_of(digests);
    assert_eq!(root, context.payload(&bytes, |_| ()));
    call(&*link, FrameKind::Commit, config.commit_body(1, root), soon()).unwrap();

    let mut into = vec![0; bytes.len()];
    let mut ops = [Op::get(config.target_for(1, AccessRight::Read), 0, &mut into)];
    run(&*link, &mut ops, soon()).unwrap();
    assert_eq!(ops[0].outcome(), Some(Ok(())));
    assert!(into == bytes);

    let mut late = [Op::put(target, 0, &bytes)];
    run(&*link, &mut late, soon()).unwrap();
    assert_eq!(late[0].outcome(), Some(Err(ErrorCode::StaleEpoch)), "after Commit");
}

#[test]
fn stale_target_is_rejected_with_code() {
    let config = SampleNodeConfig { record_bytes: 5000, readable: 2, writable: 0, ..Default::default() };
    let Attached { sample, link, _server } = attach(config, "refused");
    let config = sample.config();
    sample.kill(1);
    let read = config.target(0);
    let other = Epoch::new(Term::new(1).unwrap(), 99).unwrap();
    let cases = [
        (read, 0, 5000, Ok(())),
        (Target { generation: Generation(9), ..read }, 0, 1, Err(ErrorCode::StaleGeneration)),
        (Target { epoch: other, ..read }, 0, 1, Err(ErrorCode::Gone)),
        (Target { id: ObjectId([0; 16]), ..read }, 0, 1, Err(ErrorCode::Gone)),
        (Target { stripe: 3, ..read }, 0, 1, Err(ErrorCode::Gone)),
        (read, 4999, 2, Err(ErrorCode::OutOfBounds)),
        (config.target(1), 0, 1, Err(ErrorCode::Gone)),
    ];
    for (target, offset, len, expected) in cases {
        let mut into = vec![0; len];
        let mut ops = [Op::get(target, offset, &mut into)];
        run(&*link, &mut ops, soon()).unwrap();
        assert_eq!(ops[0].outcome(), Some(expected), "{target:?}");
    }
}

#[test]
fn best_reachable_engine_is_chosen_and_counted() {
    let config = SampleNodeConfig { record_bytes: 100_000, readable: 2, ..Default::default() };
    let node = TestNode::new(config);
    let server = start_server(&node.sample, "choice");
    let metrics = Metrics::new();
    let tcp = Arc::new(TcpEngine::new(TcpConfig::default(), Arc::clone(&metrics)));
    let engines = Engines::new(vec![tcp, Arc::new(engine(&metrics))], Arc::clone(&metrics));
    let metrics_text = || {
        let mut registry = prometheus_client::registry::Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    };

    let mut peer = node.peer();
    peer.addresses.push((EngineKind::Shm, address(server.socket()).unwrap()));
    let shm_link = engines.connect(&peer, soon()).unwrap();
    assert_eq!(shm_link.engine(), EngineKind::Shm);
    assert!(get(&*shm_link, node.config(), 0).unwrap().unwrap() == node.config().content(0));
    assert!(metrics_text().contains("moontide_transfer_links{engine=\"shm\"} 1"), "{}", metrics_text());
    assert!(
        metrics_text().contains("moontide_transfer_bytes_total{engine=\"shm\",direction=\"get\"} 100000")
    );

    // The address is of another boot: TCP.
    peer.addresses[1].1 = peer.addresses[1].1.replace('-', "0");
    let tcp_link = engines.connect(&peer, soon()).unwrap();
    assert_eq!(tcp_link.engine(), EngineKind::Tcp);
    assert!(get(&*tcp_link, node.config(), 1).unwrap().unwrap() == node.config().content(1));

    // The socket exists, but no server listens: the next best engine.
    peer.addresses[1].1 = address(server.socket()).unwrap();
    drop(shm_link);
    drop(server);
    let fallback = engines.connect(&peer, soon()).unwrap();
    assert_eq!(fallback.engine(), EngineKind::Tcp);
    assert!(metrics_text().contains("moontide_transfer_links{engine=\"tcp\"} 2"), "{}", metrics_text());
    assert!(metrics_text().contains("moontide_transfer_links{engine=\"shm\"} 0"));
    assert!(metrics_text().contains("moontide_transfer_connect_failures_total{engine=\"shm\"} 1"));
    std::fs::remove_file(socket_path("choice")).unwrap();
}

/// A sample node that records notifications of exited clients.
#[derive(Debug)]
struct ExitRecorder {
    sample: SampleNode,
    exited: Mutex<Vec<(SegmentId, SlotId, Epoch)>>,
}

impl Owner for ExitRecorder {
    fn node(&self) -> NodeId {
        self.sample.node()
    }

    fn heap(&self) -> &NodeHeap {
        self.sample.heap()
    }

    fn authorize_peer(&self, hello: &Hello, peer: Option<&moontide_auth::Identity>) -> Result<(), ErrorCode> {
        self.sample.authorize_peer(hello, peer)
    }

    fn authorize_op(
        &self,
        op: &TransferOp,
        record: Option<&moontide_types::record::Header>,
    ) -> Result<(), ErrorCode> {
        self.sample.authorize_op(op, record)
    }

    fn call(
        &self,
        caller: PeerIdentity,
        tenant: Option<&str>,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        self.sample.call(caller, tenant, kind, body, deadline)
    }

    fn on_client_exit(&self, records: &[(SegmentId, SlotId, Epoch)]) {
        self.exited.lock().unwrap().extend_from_slice(records);
    }
}

fn abandoned_config() -> SampleNodeConfig {
    SampleNodeConfig { record_bytes: 5000, readable: 1, writable: 3, begun: false, ..Default::default() }
}

/// Not a test: body of the child process of the next test, selected by the environment.
#[test]
fn child() {
    let Ok(address) = std::env::var("MOONTIDE_TEST_SHM") else { return };
    let config = abandoned_config();
    let peer = Peer { node: config.node, addresses: vec![(EngineKind::Shm, address)] };
    let link = engine(&Metrics::new()).connect(&peer, soon()).unwrap();
    for record in [1, 3] {
        call(&*link, FrameKind::Begin, config.begin_body(record), soon()).unwrap();
    }
    println!("two begun");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn owner_is_notified_of_open_writes_of_exited_client() {
    let config = abandoned_config();
    let exited = Mutex::default();
    let owner = Arc::new(ExitRecorder { sample: SampleNode::new(config.clone()).unwrap(), exited });
    let stale_after = Duration::from_secs(600);
    let server_config = ShmServerConfig {
        socket: socket_path("abandoned"),
        extra_uids: Vec::new(),
        stale_after,
        streams_max: 64,
    };
    // SAFETY: node and client are in this test, which keeps to the protocol.
    let server = unsafe { ShmServer::start(server_config, Arc::clone(&owner) as _, Metrics::new()) }.unwrap();

    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).stdout(Stdio::piped());
    let mut child = command.env("MOONTIDE_TEST_SHM", address(server.socket()).unwrap()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("two begun")), "the child began no records");
    assert_eq!(*owner.exited.lock().unwrap(), [], "the child is running");
    child.kill().unwrap();
    child.wait().unwrap();

    let give_up_at = soon();
    while owner.exited.lock().unwrap().is_empty() {
        assert!(Instant::now() < give_up_at, "owner is not notified");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut exited = owner.exited.lock().unwrap().clone();
    exited.sort();
    let begun = |record| (SegmentId(0), SlotId(record), config.epoch(record));
    assert_eq!(exited, [begun(1), begun(3)]);
    // The record is DEAD: the slot does not accept the same version again.
    let (segment, slot, epoch) = begun(1);
    assert_eq!(owner.heap().kill(segment, slot, epoch, MonoTime(0)), KillOutcome::AlreadyDead);
    std::fs::remove_file(server.socket()).unwrap();
}

#[test]
fn process_gets_its_share_of_streams_and_silent_processes_wait() {
    let sample = Arc::new(SampleNode::new(abandoned_config()).unwrap());
    let server = start_server(&sample, "share");
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    let silent: Vec<OwnedFd> = (0..100)
        .map(|_| {
            let socket = moontide_heap::socket::open().unwrap();
            rustix::net::connect(&socket, &SocketAddrUnix::new(server.socket()).unwrap()).unwrap();
            socket
        })
        .collect();
    // Their handshakes end after two seconds; one thread each would be a hundred.
    let give_up_at = soon();
    // SAFETY: node and client are in this test, which keeps to the protocol.
    let connected = unsafe { moontide_heap::connect(server.socket(), Duration::from_secs(30), u64::MAX) };
    let (_heap, socket) = connected.unwrap();
    assert!(threads() < before + 90, "{before} threads before, {} now", threads());
    assert!(Instant::now() < give_up_at, "silent processes locked this one out");
    drop(silent);
    // The server allows 64 streams, and this process half of them.
    let ping = FrameHeader::new(FrameKind::Ping, 1).encode();
    let mut streams: Vec<UnixStream> = Vec::new();
    let mut answered = 0;
    for _ in 0..40 {
        let mut stream = UnixStream::from(moontide_heap::open_stream(socket.as_fd()).unwrap());
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let pong = stream.write_all(&ping).and_then(|()| stream.read_exact(&mut [0; FRAME_HEADER_BYTES]));
        answered += usize::from(pong.is_ok());
        streams.push(stream);
    }
    assert_eq!(answered, 32);
    std::fs::remove_file(server.socket()).unwrap();
}
