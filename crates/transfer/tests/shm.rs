//! Gets and puts in shared memory, and which engine is chosen for whom.

mod common;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{TestNode, get, soon};
use moontide_heap::{Killed, NodeHeap, SharedLookup, SharedReader};
use moontide_proto::{FrameKind, Hello, Right, TransferOp};
use moontide_transfer::sample::{Sample, SampleConfig};
use moontide_transfer::shm::{Host, HostConfig, ShmConfig, ShmEngine, address};
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{
    Caller, Engine, EngineKind, Engines, Link, Metrics, Op, Owner, Peer, Target, call, run,
};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::{
    Clock, Epoch, ErrorCode, Generation, MonoTime, NodeId, ObjectId, SegmentId, SlotId, SystemClock, Term,
};

fn door(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("moontide-shm-{name}-{}", std::process::id()))
}

fn host(sample: &Arc<Sample>, name: &str) -> Host {
    let stale_after = Duration::from_secs(600);
    let config = HostConfig { door: door(name), more_uids: Vec::new(), stale_after, streams_max: 64 };
    // SAFETY: node and client are this test, which keeps to the protocol.
    unsafe { Host::start(config, Arc::clone(sample) as _, Metrics::new()) }.unwrap()
}

fn engine(metrics: &Arc<Metrics>) -> ShmEngine {
    // SAFETY: as above.
    unsafe { ShmEngine::new(ShmConfig::default(), Arc::clone(metrics)) }
}

fn peer(sample: &Sample, host: &Host) -> Peer {
    Peer { node: sample.config().node, addresses: vec![(EngineKind::Shm, address(host.door()).unwrap())] }
}

struct Joined {
    sample: Arc<Sample>,
    link: Arc<dyn Link>,
    _host: Host,
}

fn joined(config: SampleConfig, name: &str) -> Joined {
    let sample = Arc::new(Sample::new(config).unwrap());
    let host = host(&sample, name);
    let link = engine(&Metrics::new()).connect(&peer(&sample, &host), soon()).unwrap();
    std::fs::remove_file(host.door()).unwrap();
    Joined { sample, link, _host: host }
}

#[test]
fn records_of_every_size_are_copied_or_read_in_place() {
    for record_bytes in [0, 1, 4096, PAGE_BYTES + 1, 3_000_001] {
        let config = SampleConfig { record_bytes, readable: 3, writable: 0, ..Default::default() };
        let Joined { sample, link, _host } = joined(config, &format!("sizes-{record_bytes}"));
        let config = sample.config();
        let mut in_place = Vec::new();
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

            let mut reader = SharedReader::new(Arc::clone(link.local().expect("it is mapped"))).unwrap();
            match reader.get(&config.id(record), SystemClock.now()) {
                SharedLookup::Hit(guard) => in_place.push(guard),
                other => panic!("{other:?}"),
            }
        }
        drop(link);
        for (record, guard) in (0..).zip(in_place) {
            assert!(guard.bytes() == config.content(record), "what is held outlives the link");
        }
    }
}

#[test]
fn a_put_is_begun_filled_and_committed() {
    let record_bytes = 2 * PAGE_BYTES + 99;
    let config = SampleConfig { record_bytes, readable: 1, writable: 2, begun: false, ..Default::default() };
    let Joined { sample, link, _host } = joined(config, "put");
    let config = sample.config();
    let bytes = config.content(40);
    let (target, context) = (config.target(1), config.digest_context(1));

    let mut early = [Op::put(target, 0, &bytes)];
    run(&*link, &mut early, soon()).unwrap();
    assert_eq!(early[0].outcome(), Some(Err(ErrorCode::StaleEpoch)), "before Begin");

    call(&*link, FrameKind::Begin, config.begin_body(1), soon()).unwrap();
    let mut part = [Op::put(target, 0, &bytes[..10])];
    run(&*link, &mut part, soon()).unwrap();
    assert_eq!(part[0].outcome(), Some(Err(ErrorCode::Unsupported)), "a record is filled in one go");

    let mut digests = vec![0; 3];
    let mut ops = [Op::put_parts(target, 0, bytes.chunks(1001)).digested(context, &mut digests).unwrap()];
    run(&*link, &mut ops, soon()).unwrap();
    assert_eq!(ops[0].outcome(), Some(Ok(())));
    let root = context.root_of(digests);
    assert_eq!(root, context.payload(&bytes, |_| ()));
    call(&*link, FrameKind::Commit, config.commit_body(1, root), soon()).unwrap();

    let mut into = vec![0; bytes.len()];
    let mut ops = [Op::get(config.target_for(1, Right::Read), 0, &mut into)];
    run(&*link, &mut ops, soon()).unwrap();
    assert_eq!(ops[0].outcome(), Some(Ok(())));
    assert!(into == bytes);

    let mut late = [Op::put(target, 0, &bytes)];
    run(&*link, &mut late, soon()).unwrap();
    assert_eq!(late[0].outcome(), Some(Err(ErrorCode::StaleEpoch)), "after Commit");
}

#[test]
fn what_is_not_so_is_refused() {
    let config = SampleConfig { record_bytes: 5000, readable: 2, writable: 0, ..Default::default() };
    let Joined { sample, link, _host } = joined(config, "refused");
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
fn the_best_engine_that_gets_through_is_chosen_and_seen() {
    let config = SampleConfig { record_bytes: 100_000, readable: 2, ..Default::default() };
    let node = TestNode::new(config);
    let host = host(&node.sample, "choice");
    let metrics = Metrics::new();
    let tcp = Arc::new(TcpEngine::new(TcpConfig::default(), Arc::clone(&metrics)));
    let engines = Engines::new(vec![tcp, Arc::new(engine(&metrics))], Arc::clone(&metrics));
    let shown = || {
        let mut registry = prometheus_client::registry::Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    };

    let mut peer = node.peer();
    peer.addresses.push((EngineKind::Shm, address(host.door()).unwrap()));
    let near = engines.connect(&peer, soon()).unwrap();
    assert_eq!(near.engine(), EngineKind::Shm);
    assert!(get(&*near, node.config(), 0).unwrap().unwrap() == node.config().content(0));
    assert!(shown().contains("moontide_transfer_links{engine=\"shm\"} 1"), "{}", shown());
    assert!(shown().contains("moontide_transfer_bytes_total{engine=\"shm\",direction=\"get\"} 100000"));

    // The same node seen from another boot, or with its door gone: TCP.
    peer.addresses[1].1 = peer.addresses[1].1.replace('-', "0");
    let far = engines.connect(&peer, soon()).unwrap();
    assert_eq!(far.engine(), EngineKind::Tcp);
    assert!(get(&*far, node.config(), 1).unwrap().unwrap() == node.config().content(1));

    // A door behind which nobody is: the next best.
    peer.addresses[1].1 = address(host.door()).unwrap();
    drop(near);
    drop(host);
    let left = engines.connect(&peer, soon()).unwrap();
    assert_eq!(left.engine(), EngineKind::Tcp);
    assert!(shown().contains("moontide_transfer_links{engine=\"tcp\"} 2"), "{}", shown());
    assert!(shown().contains("moontide_transfer_links{engine=\"shm\"} 0"));
    assert!(shown().contains("moontide_transfer_connects_failed_total{engine=\"shm\"} 1"));
    std::fs::remove_file(door("choice")).unwrap();
}

/// A sample that remembers what it was told of ended processes.
#[derive(Debug)]
struct Bereaved {
    sample: Sample,
    told: Mutex<Vec<(SegmentId, SlotId, Epoch)>>,
}

impl Owner for Bereaved {
    fn node(&self) -> NodeId {
        self.sample.node()
    }

    fn heap(&self) -> &NodeHeap {
        self.sample.heap()
    }

    fn greets(&self, hello: &Hello) -> Result<(), ErrorCode> {
        self.sample.greets(hello)
    }

    fn admits(&self, op: &TransferOp) -> Result<(), ErrorCode> {
        self.sample.admits(op)
    }

    fn call(
        &self,
        caller: Caller,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        self.sample.call(caller, kind, body, deadline)
    }

    fn abandoned(&self, records: &[(SegmentId, SlotId, Epoch)]) {
        self.told.lock().unwrap().extend_from_slice(records);
    }
}

fn abandoned_config() -> SampleConfig {
    SampleConfig { record_bytes: 5000, readable: 1, writable: 3, begun: false, ..Default::default() }
}

/// Not a test: what the child process of the next one runs, when told so by the environment.
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
fn the_owner_is_told_what_an_ended_process_was_writing() {
    let config = abandoned_config();
    let told = Mutex::default();
    let owner = Arc::new(Bereaved { sample: Sample::new(config.clone()).unwrap(), told });
    let stale_after = Duration::from_secs(600);
    let host = HostConfig { door: door("abandoned"), more_uids: Vec::new(), stale_after, streams_max: 64 };
    // SAFETY: node and client are this test, which keeps to the protocol.
    let host = unsafe { Host::start(host, Arc::clone(&owner) as _, Metrics::new()) }.unwrap();

    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).stdout(Stdio::piped());
    let mut child = command.env("MOONTIDE_TEST_SHM", address(host.door()).unwrap()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("two begun")), "the child wrote nothing");
    assert_eq!(*owner.told.lock().unwrap(), [], "it is alive");
    child.kill().unwrap();
    child.wait().unwrap();

    let give_up = soon();
    while owner.told.lock().unwrap().is_empty() {
        assert!(Instant::now() < give_up, "nobody told");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut told = owner.told.lock().unwrap().clone();
    told.sort();
    let begun = |record| (SegmentId(0), SlotId(record), config.epoch(record));
    assert_eq!(told, [begun(1), begun(3)]);
    // Dead: the slot does not take the same version again.
    let (segment, slot, epoch) = begun(1);
    assert_eq!(owner.heap().kill(segment, slot, epoch, MonoTime(0)), Killed::Already);
    std::fs::remove_file(host.door()).unwrap();
}
