//! The UCX engine behind the traits of all engines: attach, get, put, commit, abort.
//!
//! Needs a libucp (see `ucx.rs`); without one the tests are not run, which is a failure under `CI=true`. Owner and caller are in
//! one process here, with a worker each; `ucx.rs` runs them in two processes.

mod common;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{TestNode, get, soon};
use moontide_proto::convert::{SlotOutcomes, Wire};
use moontide_proto::{AccessRight, FrameKind, v1};
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::ucx::{OldVersions, Ucx, UcxEngine, UcxServer, WorkerConfig};
use moontide_transfer::{
    Engine, EngineKind, Engines, Op, OwnedOp, Peer, Target, Transfer, TransferError, call, run,
};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{ErrorCode, Generation};
use not_run::not_run;
use prost::Message;

fn worker(tls: &str, allow_tcp: bool) -> WorkerConfig {
    WorkerConfig {
        tls: Some(tls.into()),
        allow_tcp,
        old_versions: OldVersions::AllowOld,
        ..Default::default()
    }
}

struct Pair {
    node: TestNode,
    _server: UcxServer,
    engines: Engines,
}

impl Pair {
    fn peer(&self) -> Peer {
        let mut peer = self.node.peer();
        peer.addresses.push((EngineKind::Ucx, "attach".into()));
        peer
    }
}

/// Starts a node that offers UCX, and the engines of a caller.
fn start(config: SampleNodeConfig, tls: &str, allow_tcp: bool) -> Option<Pair> {
    let ucx = match Ucx::load(None) {
        Ok(ucx) => ucx,
        Err(unavailable) => {
            not_run(unavailable);
            return None;
        }
    };
    let node = TestNode::new(config);
    // SAFETY: the peer is in this test, which writes only what it was granted.
    let server =
        unsafe { UcxServer::start(&ucx, worker(tls, allow_tcp), Arc::clone(&node.sample) as _) }.unwrap();
    node.sample.offer_attach(server.attach_reply());
    let metrics = Arc::clone(&node.metrics);
    let tcp: Arc<dyn Engine> = Arc::new(TcpEngine::new(TcpConfig::default(), Arc::clone(&metrics)));
    let engine =
        UcxEngine::new(&ucx, worker(tls, allow_tcp), Arc::clone(&tcp), Arc::clone(&metrics)).unwrap();
    let engines = Engines::new(vec![tcp, Arc::new(engine)], metrics);
    Some(Pair { node, _server: server, engines })
}

#[test]
fn one_sided_put_and_get_round_trip_with_digests() {
    for tls in ["tcp,self", "cma,posix,self"] {
        for record_bytes in [1, PAGE_BYTES + 17, 5 << 20] {
            let config = SampleNodeConfig { record_bytes, readable: 2, writable: 1, ..Default::default() };
            let Some(pair) = start(config, tls, true) else { return };
            let config = pair.node.config();
            let link = pair.engines.connect(&pair.peer(), soon()).unwrap();
            assert_eq!(link.engine(), EngineKind::Ucx, "UCX is preferred to TCP");
            for record in 0..2 {
                assert!(get(&*link, config, record).unwrap().unwrap() == config.content(record));
            }
            let bytes = config.content(77);
            let context = config.digest_context(2);
            let mut digests = vec![0; record_bytes.div_ceil(PAGE_BYTES) as usize];
            let op = Op::put_parts(config.target(2), 0, bytes.chunks(100_000));
            let mut ops = [op.digested(context, &mut digests).unwrap()];
            run(&*link, &mut ops, soon()).unwrap();
            assert_eq!(ops[0].outcome(), Some(Ok(())));
            let root = context.root_of(digests);
            assert_eq!(root, context.payload(&bytes, |_| ()));
            let reply = call(&*link, FrameKind::Commit, config.commit_body(2, root), soon()).unwrap();
            let message = v1::SlotOutcomes::decode(&reply[..]).unwrap();
            let outcomes = SlotOutcomes::from_wire(&message).unwrap();
            assert_eq!(outcomes.codes.iter().collect::<Vec<_>>(), [None]);
            let mut into = vec![0; bytes.len()];
            let mut back = vec![0; record_bytes.div_ceil(PAGE_BYTES) as usize];
            let op = Op::get(config.target_for(2, AccessRight::Read), 0, &mut into);
            let mut ops = [op.digested(context, &mut back).unwrap()];
            run(&*link, &mut ops, soon()).unwrap();
            assert_eq!(context.root_of(back), root);
            assert!(into == bytes);
        }
    }
}

#[test]
fn stale_or_out_of_bounds_target_is_rejected() {
    let config = SampleNodeConfig { record_bytes: 8192, readable: 1, writable: 0, ..Default::default() };
    let Some(pair) = start(config, "tcp,self", true) else { return };
    let link = pair.engines.connect(&pair.peer(), soon()).unwrap();
    let target = pair.node.config().target(0);
    let mut into = [0; 16];
    let mut ops = [Op::get(Target { generation: Generation(9), ..target }, 0, &mut into)];
    run(&*link, &mut ops, soon()).unwrap();
    assert_eq!(ops[0].outcome(), Some(Err(ErrorCode::StaleGeneration)));
    for (payload_offset, offset) in [(1 << 40, 0), (u64::MAX - 5, 0), (0, 1 << 39), (u64::MAX, u64::MAX)] {
        let mut ops = [Op::get(Target { payload_offset, ..target }, offset, &mut into)];
        let error = run(&*link, &mut ops, soon()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::OutOfBounds, "{error}");
    }
    assert!(get(&*link, pair.node.config(), 0).unwrap().is_ok(), "the owner still runs");
}

#[test]
fn aborted_transfer_stops_writing_and_link_continues() {
    let config = SampleNodeConfig { record_bytes: 32 << 20, readable: 2, writable: 0, ..Default::default() };
    let Some(pair) = start(config, "tcp,self", true) else { return };
    let config = pair.node.config();
    let link = pair.engines.connect(&pair.peer(), soon()).unwrap();
    for turn in 0..6u64 {
        let op = OwnedOp::get(config.target(0), 0, vec![0; 32 << 20]);
        let mut transfer = Transfer::start(&*link, vec![op], soon());
        std::thread::sleep(Duration::from_millis(3 * turn));
        transfer.abort();
        let mut buffers = transfer.into_buffers();
        buffers[0].fill(0x5a);
        std::thread::sleep(Duration::from_millis(20));
        assert!(buffers[0].iter().all(|&byte| byte == 0x5a), "written after abort returned");
    }
    assert!(get(&*link, config, 1).unwrap().unwrap() == config.content(1));
}

#[test]
fn transfer_past_deadline_fails_with_deadline_error() {
    let config = SampleNodeConfig { record_bytes: 64 << 20, readable: 1, writable: 0, ..Default::default() };
    let Some(pair) = start(config, "tcp,self", true) else { return };
    let link = pair.engines.connect(&pair.peer(), soon()).unwrap();
    let mut into = vec![0; 64 << 20];
    let mut ops = [Op::get(pair.node.config().target(0), 0, &mut into)];
    let error = run(&*link, &mut ops, Instant::now() + Duration::from_millis(3)).unwrap_err();
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
}

#[test]
fn ucx_endpoint_over_tcp_falls_back_to_tcp_engine() {
    let config = SampleNodeConfig { record_bytes: 8192, readable: 1, writable: 0, ..Default::default() };
    let Some(pair) = start(config, "tcp,self", false) else { return };
    let link = pair.engines.connect(&pair.peer(), soon()).unwrap();
    assert_eq!(link.engine(), EngineKind::Tcp);
    assert!(get(&*link, pair.node.config(), 0).unwrap().is_ok());
}
