//! The UCX engine behind the same traits as the others: attach, get, put, commit, abort.
//!
//! Needs a libucp (see `ucx.rs`); without one the tests say that they did not run and pass. Owner and caller are one
//! process here, with a worker each; `ucx.rs` has them in two.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{TestNode, get, soon};
use moontide_proto::{FrameKind, Right};
use moontide_transfer::sample::SampleConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::ucx::{OldVersions, Ucx, UcxEngine, UcxHost, WorkerConfig};
use moontide_transfer::{
    Engine, EngineKind, Engines, Op, OwnedOp, Peer, Target, Transfer, TransferError, call, run,
};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::{ErrorCode, Generation};

fn worker(tls: &str, allow_tcp: bool) -> WorkerConfig {
    WorkerConfig {
        tls: Some(tls.into()),
        allow_tcp,
        old_versions: OldVersions::AllowOld,
        ..Default::default()
    }
}

struct Both {
    node: TestNode,
    _host: UcxHost,
    engines: Engines,
}

impl Both {
    fn peer(&self) -> Peer {
        let mut peer = self.node.peer();
        peer.addresses.push((EngineKind::Ucx, "attach".into()));
        peer
    }
}

/// A node that offers UCX, and a caller that has it.
fn both(config: SampleConfig, tls: &str, allow_tcp: bool) -> Option<Both> {
    let ucx = match Ucx::load(None) {
        Ok(ucx) => ucx,
        Err(absent) => {
            eprintln!("DID NOT RUN: {absent}");
            return None;
        }
    };
    let node = TestNode::new(config);
    // SAFETY: the peer is this test, which writes only what it was granted.
    let host =
        unsafe { UcxHost::start(&ucx, worker(tls, allow_tcp), Arc::clone(&node.sample) as _) }.unwrap();
    node.sample.offer_attach(host.attach_reply());
    let metrics = Arc::clone(&node.metrics);
    let tcp: Arc<dyn Engine> = Arc::new(TcpEngine::new(TcpConfig::default(), Arc::clone(&metrics)));
    let engine =
        UcxEngine::new(&ucx, worker(tls, allow_tcp), Arc::clone(&tcp), Arc::clone(&metrics)).unwrap();
    let engines = Engines::new(vec![tcp, Arc::new(engine)], metrics);
    Some(Both { node, _host: host, engines })
}

#[test]
fn records_come_and_go_one_sidedly_and_digests_say_so() {
    for tls in ["tcp,self", "cma,posix,self"] {
        for record_bytes in [1, PAGE_BYTES + 17, 5 << 20] {
            let config = SampleConfig { record_bytes, readable: 2, writable: 1, ..Default::default() };
            let Some(both) = both(config, tls, true) else { return };
            let config = both.node.config();
            let link = both.engines.connect(&both.peer(), soon()).unwrap();
            assert_eq!(link.engine(), EngineKind::Ucx, "better than TCP");
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
            call(&*link, FrameKind::Commit, config.commit_body(2, root), soon()).unwrap();
            let mut into = vec![0; bytes.len()];
            let mut back = vec![0; record_bytes.div_ceil(PAGE_BYTES) as usize];
            let op = Op::get(config.target_for(2, Right::Read), 0, &mut into);
            let mut ops = [op.digested(context, &mut back).unwrap()];
            run(&*link, &mut ops, soon()).unwrap();
            assert_eq!(context.root_of(back), root);
            assert!(into == bytes);
        }
    }
}

#[test]
fn what_is_not_so_is_refused_here_before_it_is_sent() {
    let config = SampleConfig { record_bytes: 8192, readable: 1, writable: 0, ..Default::default() };
    let Some(both) = both(config, "tcp,self", true) else { return };
    let link = both.engines.connect(&both.peer(), soon()).unwrap();
    let target = both.node.config().target(0);
    let mut into = [0; 16];
    let mut ops = [Op::get(Target { generation: Generation(9), ..target }, 0, &mut into)];
    run(&*link, &mut ops, soon()).unwrap();
    assert_eq!(ops[0].outcome(), Some(Err(ErrorCode::StaleGeneration)));
    for (payload_offset, offset) in [(1 << 40, 0), (u64::MAX - 5, 0), (0, 1 << 39), (u64::MAX, u64::MAX)] {
        let mut ops = [Op::get(Target { payload_offset, ..target }, offset, &mut into)];
        let error = run(&*link, &mut ops, soon()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::OutOfBounds, "{error}");
    }
    assert!(get(&*link, both.node.config(), 0).unwrap().is_ok(), "and the owner lives");
}

#[test]
fn an_aborted_transfer_leaves_its_memory_alone_and_the_link_goes_on() {
    let config = SampleConfig { record_bytes: 32 << 20, readable: 2, writable: 0, ..Default::default() };
    let Some(both) = both(config, "tcp,self", true) else { return };
    let config = both.node.config();
    let link = both.engines.connect(&both.peer(), soon()).unwrap();
    for turn in 0..6u64 {
        let op = OwnedOp::get(config.target(0), 0, vec![0; 32 << 20]);
        let mut transfer = Transfer::start(&*link, vec![op], soon());
        std::thread::sleep(Duration::from_millis(3 * turn));
        transfer.abort();
        let mut buffers = transfer.into_buffers();
        buffers[0].fill(0x5a);
        std::thread::sleep(Duration::from_millis(20));
        assert!(buffers[0].iter().all(|&byte| byte == 0x5a), "touched after abort returned");
    }
    assert!(get(&*link, config, 1).unwrap().unwrap() == config.content(1));
}

#[test]
fn a_deadline_that_passes_is_told() {
    let config = SampleConfig { record_bytes: 64 << 20, readable: 1, writable: 0, ..Default::default() };
    let Some(both) = both(config, "tcp,self", true) else { return };
    let link = both.engines.connect(&both.peer(), soon()).unwrap();
    let mut into = vec![0; 64 << 20];
    let mut ops = [Op::get(both.node.config().target(0), 0, &mut into)];
    let error = run(&*link, &mut ops, Instant::now() + Duration::from_millis(3)).unwrap_err();
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
}

#[test]
fn an_endpoint_that_is_only_tcp_is_refused_and_our_own_tcp_is_used() {
    let config = SampleConfig { record_bytes: 8192, readable: 1, writable: 0, ..Default::default() };
    let Some(both) = both(config, "tcp,self", false) else { return };
    let link = both.engines.connect(&both.peer(), soon()).unwrap();
    assert_eq!(link.engine(), EngineKind::Tcp);
    assert!(get(&*link, both.node.config(), 0).unwrap().is_ok());
}
