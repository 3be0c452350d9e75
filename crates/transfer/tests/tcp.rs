//! Gets, puts and calls over TCP within one process: every byte and every error code.

pub mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use common::{TestNode, get, soon};
use moontide_proto::{AccessRight, CapabilityKey, FrameKind, OpFlags, OpKind};
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{
    Batch, Engine, EngineKind, Link, Op, OwnedOp, Peer, PipelinedPut, Target, Transfer, TransferError,
    Winner, call, put_in_one_round_trip, run, run_batches, run_batches_unless_late, run_hedged,
};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{Epoch, ErrorCode, Generation, ObjectId, SegmentId, SlotId, Term};

const PAGE: u64 = PAGE_BYTES;

fn sizes() -> [u64; 9] {
    [0, 1, 4096, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 17, 5 << 20, (9 << 20) + 333]
}

#[test]
fn get_returns_records_of_all_sizes() {
    for record_bytes in sizes() {
        let node =
            TestNode::new(SampleNodeConfig { record_bytes, readable: 3, writable: 0, ..Default::default() });
        for connections in [1, 2, 4] {
            let link = node.link(connections);
            for record in 0..3 {
                let bytes = get(&*link, node.config(), record).unwrap().unwrap();
                assert!(bytes == node.config().content(record), "{record_bytes} over {connections}");
            }
        }
    }
}

#[test]
fn put_commits_only_under_right_root_and_round_trips() {
    for record_bytes in sizes() {
        let node =
            TestNode::new(SampleNodeConfig { record_bytes, readable: 0, writable: 2, ..Default::default() });
        let config = node.config();
        let link = node.link(2);
        for record in 0..2 {
            let bytes = config.content(record + 100);
            let context = config.digest_context(record);
            let mut digests = vec![0; record_bytes.div_ceil(PAGE) as usize];
            let target = config.target(record);
            let mut ops = [Op::put(target, 0, &bytes).digested(context, &mut digests).unwrap()];
            run(&*link, &mut ops, soon()).unwrap();
            assert_eq!(ops[0].outcome(), Some(Ok(())));
            let root = context.root_of(digests.iter().copied());
            let mut expected = Vec::new();
            assert_eq!(root, context.payload(&bytes, |digest| expected.push(digest)));
            assert_eq!(digests, expected);

            let wrong =
                call(&*link, FrameKind::Commit, config.commit_body(record, root ^ 1), soon()).unwrap();
            assert_eq!(codes(&wrong), [Some(ErrorCode::Corrupt)], "the node digests the received bytes");
            let right = call(&*link, FrameKind::Commit, config.commit_body(record, root), soon()).unwrap();
            assert_eq!(codes(&right), [None]);
            let back = Target { flags: OpFlags::NONE, ..target };
            let mut into = vec![0; bytes.len()];
            let mut ops = [Op::get(back, 0, &mut into)];
            run(&*link, &mut ops, soon()).unwrap();
            assert_eq!(ops[0].outcome(), Some(Ok(())));
            assert!(into == bytes);
        }
    }
}

#[test]
fn put_in_unaligned_parts_commits() {
    let record_bytes = 2 * PAGE + 1000;
    let node =
        TestNode::new(SampleNodeConfig { record_bytes, readable: 0, writable: 1, ..Default::default() });
    let config = node.config();
    let link = node.link(2);
    let bytes = config.content(7);
    let mut at = 0;
    for part in [1, 4095, 300_000, 100, usize::MAX] {
        let end = bytes.len().min(at + part.min(bytes.len()));
        let mut ops = [Op::put(config.target(0), at as u64, &bytes[at..end])];
        run(&*link, &mut ops, soon()).unwrap();
        assert_eq!(ops[0].outcome(), Some(Ok(())));
        at = end;
    }
    let root = config.digest_context(0).payload(&bytes, |_| ());
    let reply = call(&*link, FrameKind::Commit, config.commit_body(0, root), soon()).unwrap();
    assert_eq!(codes(&reply), [None]);
}

#[test]
fn batch_of_small_scattered_gets_returns_all_records() {
    let config = SampleNodeConfig { record_bytes: 5000, readable: 1500, writable: 0, ..Default::default() };
    let node = TestNode::new(config);
    let link = node.link(2);
    let mut memory = vec![0; 1500 * 5000];
    let mut slices: Vec<Vec<&mut [u8]>> =
        memory.chunks_mut(5000).map(|record| record.chunks_mut(61).collect()).collect();
    let mut ops: Vec<Op<'_>> = slices
        .drain(..)
        .enumerate()
        .map(|(record, parts)| Op::get_parts(node.config().target(record as u32), 0, parts))
        .collect();
    run(&*link, &mut ops, soon()).unwrap();
    assert!(ops.iter().all(|op| op.outcome() == Some(Ok(()))));
    drop(ops);
    for (record, bytes) in memory.chunks(5000).enumerate() {
        assert!(bytes == node.config().content(record as u32), "record {record}");
    }
}

#[test]
fn get_reads_ranges_and_digests() {
    let record_bytes = 3 * PAGE + 5;
    let node =
        TestNode::new(SampleNodeConfig { record_bytes, readable: 1, writable: 0, ..Default::default() });
    let config = node.config();
    let content = config.content(0);
    let link = node.link(1);
    for (offset, len) in [(0, 10), (17, 300_000), (record_bytes - 1, 1), (record_bytes, 0)] {
        let mut into = vec![0; len];
        let mut ops = [Op::get(config.target(0), offset, &mut into)];
        run(&*link, &mut ops, soon()).unwrap();
        assert_eq!(ops[0].outcome(), Some(Ok(())));
        assert!(into == content[offset as usize..offset as usize + len]);
    }
    let mut stored = vec![0; 4 * 8];
    let digests = Target { flags: OpFlags::DIGESTS, ..config.target(0) };
    let mut ops = [Op::get(digests, 0, &mut stored)];
    run(&*link, &mut ops, soon()).unwrap();
    let mut expected = Vec::new();
    config.digest_context(0).payload(&content, |digest| expected.extend_from_slice(&digest.to_le_bytes()));
    assert_eq!(stored, expected);
}

#[test]
fn invalid_op_fails_alone_and_leaves_its_buffer_untouched() {
    let node = TestNode::new(SampleNodeConfig {
        record_bytes: 8192,
        readable: 2,
        writable: 2,
        ..Default::default()
    });
    let config = node.config();
    let link = node.link(1);
    node.sample.kill(1);
    let (read, write) = (config.target(0), config.target(2));
    let newer = Term::new(9).unwrap();
    let wrong_epoch = Epoch::new(Term::new(1).unwrap(), 999).unwrap();
    // A valid capability for each target, so that another check must reject it.
    let signed = |target: Target, right: AccessRight| {
        let scope = target.to_wire(OpKind::Read, 0, 0).capability_scope(right);
        Target { capability: CapabilityKey::new(config.key).sign(&scope), ..target }
    };
    let cases = [
        ("valid get", read, 0, 8192, false, Ok(())),
        (
            "segment",
            signed(Target { segment: SegmentId(7), ..read }, AccessRight::Read),
            0,
            1,
            false,
            Err(ErrorCode::StaleGeneration),
        ),
        (
            "generation",
            signed(Target { generation: Generation(2), ..read }, AccessRight::Read),
            0,
            1,
            false,
            Err(ErrorCode::StaleGeneration),
        ),
        (
            "slot",
            signed(Target { slot: SlotId(99), ..read }, AccessRight::Read),
            0,
            1,
            false,
            Err(ErrorCode::Gone),
        ),
        (
            "epoch",
            signed(Target { epoch: wrong_epoch, ..read }, AccessRight::Read),
            0,
            1,
            false,
            Err(ErrorCode::Gone),
        ),
        (
            "term",
            signed(Target { term: newer, ..read }, AccessRight::Read),
            0,
            1,
            false,
            Err(ErrorCode::StaleTerm),
        ),
        (
            "object",
            signed(Target { id: ObjectId([1; 16]), ..read }, AccessRight::Read),
            0,
            1,
            false,
            Err(ErrorCode::Gone),
        ),
        (
            "stripe",
            signed(Target { stripe: 1, ..read }, AccessRight::Read),
            0,
            1,
            false,
            Err(ErrorCode::Gone),
        ),
        ("offset behind the end", read, 8192, 1, false, Err(ErrorCode::OutOfBounds)),
        ("range over the end", read, 8000, 193, false, Err(ErrorCode::OutOfBounds)),
        (
            "no capability",
            Target { capability: Default::default(), ..read },
            0,
            1,
            false,
            Err(ErrorCode::PermissionDenied),
        ),
        (
            "capability for writing another shape",
            config.target_for(0, config.write_right(1)),
            0,
            1,
            false,
            Err(ErrorCode::PermissionDenied),
        ),
        ("killed", config.target(1), 0, 1, false, Err(ErrorCode::Gone)),
        ("being written", config.target_for(2, AccessRight::Read), 0, 1, false, Err(ErrorCode::Gone)),
        ("valid put", write, 0, 8192, true, Ok(())),
        (
            "put to a READY record",
            config.target_for(0, config.write_right(0)),
            0,
            1,
            true,
            Err(ErrorCode::StaleEpoch),
        ),
        ("put over the end", write, 8000, 193, true, Err(ErrorCode::OutOfBounds)),
        (
            "put with a capability for reading",
            config.target_for(2, AccessRight::Read),
            0,
            1,
            true,
            Err(ErrorCode::PermissionDenied),
        ),
        (
            "put with a capability for another shape",
            config.target_for(2, config.write_right(3)),
            0,
            1,
            true,
            Err(ErrorCode::PermissionDenied),
        ),
    ];
    // All in one batch: each operation is checked separately, and the bytes of the valid ones arrive.
    let mut memory: Vec<Vec<u8>> = cases.iter().map(|case| vec![0xab; case.3]).collect();
    let mut ops: Vec<Op<'_>> = cases
        .iter()
        .zip(&mut memory)
        .map(
            |((_, target, offset, _, put, _), bytes)| {
                if *put { Op::put(*target, *offset, bytes) } else { Op::get(*target, *offset, bytes) }
            },
        )
        .collect();
    run(&*link, &mut ops, soon()).unwrap();
    for (op, case) in ops.iter().zip(&cases) {
        assert_eq!(op.outcome(), Some(case.5), "{}", case.0);
    }
    drop(ops);
    for (bytes, case) in memory.iter().zip(&cases).skip(1) {
        assert!(bytes.iter().all(|&byte| byte == 0xab), "{} wrote to the memory", case.0);
    }
    assert!(memory[0] == config.content(0));
}

#[test]
fn concurrent_gets_on_one_link_return_right_records() {
    let node = TestNode::new(SampleNodeConfig {
        record_bytes: 700_000,
        readable: 32,
        writable: 0,
        ..Default::default()
    });
    for connections in [1, 2] {
        let link = node.link(connections);
        std::thread::scope(|scope| {
            for caller in 0..4u32 {
                let (link, config) = (&link, node.config());
                scope.spawn(move || {
                    for turn in 0..40 {
                        let record = (turn * 7 + caller * 5) % 32;
                        let bytes = get(&**link, config, record).unwrap().unwrap();
                        assert!(bytes == config.content(record));
                    }
                });
            }
        });
    }
}

#[test]
fn gets_and_puts_of_one_batch_do_not_deadlock() {
    // Both sides have more to send than the socket buffers hold.
    let node = TestNode::new(SampleNodeConfig {
        record_bytes: 24 << 20,
        readable: 2,
        writable: 2,
        ..Default::default()
    });
    let config = node.config();
    let link = node.link(1);
    let (put, mut got) = (config.content(50), vec![vec![0; 24 << 20]; 2]);
    let (first, second) = got.split_at_mut(1);
    let mut ops = [
        Op::get(config.target(0), 0, &mut first[0]),
        Op::put(config.target(2), 0, &put),
        Op::get(config.target(1), 0, &mut second[0]),
        Op::put(config.target(3), 0, &put),
    ];
    run(&*link, &mut ops, soon()).unwrap();
    assert!(ops.iter().all(|op| op.outcome() == Some(Ok(()))));
    assert!(got[0] == config.content(0) && got[1] == config.content(1));
}

#[test]
fn batch_larger_than_inflight_limit_completes() {
    let node = TestNode::new(SampleNodeConfig {
        record_bytes: 40 << 20,
        readable: 1,
        writable: 1,
        ..Default::default()
    });
    let config = node.config();
    let link = node.link_with(TcpConfig { connections: 1, inflight_max: 2, ..TcpConfig::default() });
    assert!(get(&*link, config, 0).unwrap().unwrap() == config.content(0));
    let bytes = config.content(5);
    let mut ops = [Op::put(config.target(1), 0, &bytes)];
    run(&*link, &mut ops, soon()).unwrap();
    assert_eq!(ops[0].outcome(), Some(Ok(())));
    let op = OwnedOp::get(config.target(0), 0, vec![0; 40 << 20]);
    let done = block_on(Transfer::start(&*link, vec![op], soon())).unwrap();
    assert!(done[0].buffer == config.content(0));
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park_timeout(Duration::from_secs(10)),
        }
    }
}

#[test]
fn owned_transfers_complete_as_futures() {
    let node = TestNode::new(SampleNodeConfig {
        record_bytes: 3 << 20,
        readable: 8,
        writable: 1,
        ..Default::default()
    });
    let config = node.config();
    let link = node.link(2);
    let transfers: Vec<Transfer> = (0..8)
        .map(|record| {
            let op = OwnedOp::get(config.target(record), 0, vec![0; 3 << 20]);
            Transfer::start(&*link, vec![op.digested(config.digest_context(record)).unwrap()], soon())
        })
        .collect();
    for (record, transfer) in transfers.into_iter().enumerate() {
        let done = block_on(transfer).unwrap();
        assert_eq!(done[0].outcome, Ok(()));
        assert!(done[0].buffer == config.content(record as u32));
        let mut digests = Vec::new();
        config.digest_context(record as u32).payload(&done[0].buffer, |digest| digests.push(digest));
        assert_eq!(done[0].digests, digests);
    }
    let put = OwnedOp::put(config.target(8), 0, config.content(9));
    let done = block_on(Transfer::start(&*link, vec![put], soon())).unwrap();
    assert_eq!(done[0].outcome, Ok(()));
}

#[test]
fn aborted_transfer_stops_writing_and_others_continue() {
    let node = TestNode::new(SampleNodeConfig {
        record_bytes: 32 << 20,
        readable: 4,
        writable: 0,
        ..Default::default()
    });
    let config = node.config();
    let link = node.link(1);
    std::thread::scope(|scope| {
        let (other, shared) = (&link, config);
        scope.spawn(move || {
            for turn in 0..6 {
                let bytes = get(&**other, shared, turn % 4).unwrap().unwrap();
                assert!(bytes == shared.content(turn % 4), "other transfers on the connection succeed");
            }
        });
        for turn in 0..12u64 {
            let op = OwnedOp::get(config.target(0), 0, vec![0; 32 << 20]);
            let mut transfer = Transfer::start(&*link, vec![op], soon());
            std::thread::sleep(Duration::from_millis(turn));
            transfer.abort();
            let mut buffers = transfer.into_buffers();
            buffers[0].fill(0x5a);
            std::thread::sleep(Duration::from_millis(5));
            assert!(buffers[0].iter().all(|&byte| byte == 0x5a), "written after abort returned");
        }
    });
    assert!(get(&*link, config, 1).unwrap().unwrap() == config.content(1));
}

#[test]
fn connect_to_stopped_node_fails_fast_as_unreachable() {
    let node = TestNode::new(SampleNodeConfig::default());
    let mut peer = node.peer();
    drop(node);
    let engine =
        moontide_transfer::tcp::TcpEngine::new(TcpConfig::default(), moontide_transfer::Metrics::new());
    let began = Instant::now();
    let error = moontide_transfer::Engine::connect(&engine, &peer, soon()).unwrap_err();
    assert!(matches!(error, TransferError::Unreachable { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(1));
    peer.addresses.clear();
    assert!(moontide_transfer::Engine::score(&engine, &peer).is_err());
}

#[test]
fn connect_rejects_wrong_node_id() {
    let node = TestNode::new(SampleNodeConfig::default());
    let mut peer = node.peer();
    peer.node = moontide_types::NodeId(77);
    let credentials = common::credentials(moontide_auth::Role::Operator);
    let expected = match credentials {
        None => "is node 0000000000000001, not node 000000000000004d",
        Some(_) => {
            "peer is spiffe://test/moontide/cluster/node/0000000000000001, expected node/000000000000004d"
        }
    };
    let config = TcpConfig { credentials, ..TcpConfig::default() };
    let engine = moontide_transfer::tcp::TcpEngine::new(config, moontide_transfer::Metrics::new());
    let error = moontide_transfer::Engine::connect(&engine, &peer, soon()).unwrap_err();
    assert!(error.to_string().contains(expected), "{error}");
}

fn codes(reply: &[u8]) -> Vec<Option<ErrorCode>> {
    use prost::Message;
    let message = moontide_proto::v1::SlotOutcomes::decode(reply).unwrap();
    let outcomes =
        <moontide_proto::convert::SlotOutcomes<'_> as moontide_proto::convert::Wire<'_>>::from_wire(&message);
    outcomes.unwrap().codes.iter().collect()
}

#[test]
fn concurrent_puts_on_one_link_store_all_records() {
    let config = SampleNodeConfig {
        record_bytes: 4 << 20,
        readable: 8,
        writable: 8,
        digests: false,
        ..Default::default()
    };
    let node = TestNode::new(config);
    let config = node.config();
    let link = node.link(1);
    std::thread::scope(|scope| {
        for caller in 0..4u32 {
            let link = &link;
            scope.spawn(move || {
                for record in [9, 8, 9] {
                    let record = record + 2 * caller;
                    let bytes = config.content(record);
                    let mut ops = [Op::put(config.target(record), 0, &bytes)];
                    run(&**link, &mut ops, soon()).unwrap();
                    assert_eq!(ops[0].outcome(), Some(Ok(())));
                }
            });
        }
    });
    let segment = &moontide_transfer::Owner::heap(&*node.sample).segments()[0];
    for record in 8..16 {
        let at = config.target(record).payload_offset as usize;
        // SAFETY: all writes have ended.
        let stored =
            unsafe { std::slice::from_raw_parts(segment.payload().base().as_ptr().add(at), 4 << 20) };
        assert!(stored == config.content(record), "record {record}");
    }
}

/// A node that handles calls slowly.
#[derive(Debug)]
struct SlowNode(moontide_transfer::sample::SampleNode);

impl moontide_transfer::Owner for SlowNode {
    fn node(&self) -> moontide_types::NodeId {
        self.0.node()
    }

    fn heap(&self) -> &moontide_heap::NodeHeap {
        self.0.heap()
    }

    fn authorize_peer(
        &self,
        hello: &moontide_proto::Hello,
        peer: Option<&moontide_auth::Identity>,
    ) -> Result<(), ErrorCode> {
        self.0.authorize_peer(hello, peer)
    }

    fn authorize_op(
        &self,
        op: &moontide_proto::TransferOp,
        record: Option<&moontide_types::record::Header>,
    ) -> Result<(), ErrorCode> {
        self.0.authorize_op(op, record)
    }

    fn call(
        &self,
        caller: moontide_transfer::PeerIdentity,
        tenant: Option<&str>,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        std::thread::sleep(Duration::from_millis(1800));
        self.0.call(caller, tenant, kind, body, deadline)
    }
}

/// Failure: the reply to a call that took longer than the stall timeout was never received; the thread looped without
/// progress. Cause: the end of the wait stayed in the past. Fix: it is computed again for each wait.
#[test]
fn call_longer_than_stall_timeout_succeeds() {
    use moontide_transfer::tcp::{TcpServer, TcpServerConfig};
    use moontide_transfer::{Metrics, Owner, WaitMode};
    let config = SampleNodeConfig { readable: 0, writable: 2, begun: false, ..Default::default() };
    let owner = Arc::new(SlowNode(moontide_transfer::sample::SampleNode::new(config.clone()).unwrap()));
    let server =
        TcpServer::start(TcpServerConfig::default(), Arc::clone(&owner) as _, Metrics::new()).unwrap();
    let address = (EngineKind::Tcp, server.addresses()[0].to_string());
    let peer = Peer { node: owner.node(), addresses: vec![address] };
    let link = TcpEngine::new(TcpConfig::default(), Metrics::new()).connect(&peer, soon()).unwrap();
    let began = Instant::now();
    let reply = call(&*link, FrameKind::Begin, config.begin_body(0), soon()).unwrap();
    assert_eq!(codes(&reply), [None]);
    assert!(began.elapsed() < Duration::from_millis(2500), "{:?}", began.elapsed());
    let mut later = link.start_call(FrameKind::Begin, config.begin_body(1), soon(), WaitMode::Polling);
    block_on(std::future::poll_fn(|context| later.poll(context))).unwrap();
    assert_eq!(codes(&later.take_reply()), [None]);
    assert!(began.elapsed() < Duration::from_millis(4500), "{:?}", began.elapsed());
}

#[test]
fn malformed_call_is_rejected_before_sending() {
    let node = TestNode::new(SampleNodeConfig::default());
    let link = node.link(1);
    for (kind, body) in
        [(FrameKind::Load, vec![]), (FrameKind::Release, vec![0; 81]), (FrameKind::Ping, vec![])]
    {
        let error = call(&*link, kind, body, soon()).unwrap_err();
        assert!(matches!(error, TransferError::Malformed { .. }), "{error}");
    }
    let body = vec![0; FrameKind::Begin.body_len_max() + 1];
    assert_eq!(call(&*link, FrameKind::Begin, body, soon()).unwrap_err().code(), ErrorCode::TooLarge);
    assert!(get(&*link, node.config(), 0).unwrap().is_ok(), "the link still works");
}

#[test]
fn pipelined_put_commits_small_records_and_skips_large() {
    for record_bytes in [1, 4096, PAGE + 1, 2 << 20, (2 << 20) + 1] {
        let config =
            SampleNodeConfig { record_bytes, readable: 0, writable: 3, begun: false, ..Default::default() };
        let node = TestNode::new(config);
        let config = node.config();
        let link = node.link(2);
        for record in 0..3 {
            let bytes = config.content(record + 7);
            let mut digests = vec![0; record_bytes.div_ceil(PAGE) as usize];
            let context = config.digest_context(record);
            let target = config.target(record);
            let mut ops = [Op::put(target, 0, &bytes).digested(context, &mut digests).unwrap()];
            let begin = config.begin_body(record);
            let mut root = None;
            let commit = |roots: &[Option<u64>]| {
                root = roots[0];
                config.commit_body(record, roots[0].unwrap())
            };
            let done = put_in_one_round_trip(&*link, begin, &mut ops, commit, soon());
            if record_bytes > 2 << 20 {
                assert!(matches!(done, PipelinedPut::NotTried), "larger records are put step by step");
                continue;
            }
            let PipelinedPut::Done { begun, outcomes, committed } = done else { panic!("{done:?}") };
            assert_eq!((codes(&begun), outcomes, codes(&committed)), (vec![None], vec![Ok(())], vec![None]));
            assert_eq!(root, Some(context.payload(&bytes, |_| ())));
            assert_eq!(get(&*link, config, record).unwrap(), Ok(bytes.clone()));
            // The second time the slot is not free: every request gets a reply, and nothing changes.
            let other = config.content(record + 99);
            let mut digests = vec![0; record_bytes.div_ceil(PAGE) as usize];
            let mut ops = [Op::put(target, 0, &other).digested(context, &mut digests).unwrap()];
            let commit = |roots: &[Option<u64>]| config.commit_body(record, roots[0].unwrap());
            let again = put_in_one_round_trip(&*link, config.begin_body(record), &mut ops, commit, soon());
            let PipelinedPut::Done { begun, outcomes, committed } = again else { panic!("{again:?}") };
            assert_eq!(codes(&begun), [Some(ErrorCode::StaleEpoch)]);
            assert!(outcomes[0].is_err() && codes(&committed)[0].is_some());
            assert_eq!(get(&*link, config, record).unwrap(), Ok(bytes));
        }
    }
}

#[test]
fn batches_to_several_peers_complete_and_bad_op_fails_alone() {
    let config =
        SampleNodeConfig { record_bytes: 3 * PAGE + 9, readable: 4, writable: 0, ..Default::default() };
    let nodes = [TestNode::new(config.clone()), TestNode::new(config)];
    let links = [nodes[0].link(1), nodes[1].link(2)];
    let len = nodes[0].config().record_bytes as usize;
    let mut memory = vec![vec![0; len]; 8];
    let mut batches: Vec<Batch<'_, '_>> = Vec::new();
    for (link, memory) in links.iter().zip(memory.chunks_mut(4)) {
        let ops = (0..).zip(memory).map(|(record, into)| Op::get(nodes[0].config().target(record), 0, into));
        batches.push(Batch::new(&**link, ops.collect()));
    }
    // One operation with an invalid target fails alone.
    let mut unused = [0; 5];
    let invalid = Target { slot: SlotId(77), ..nodes[0].config().target(0) };
    batches[0].ops.push(Op::get(invalid, 0, &mut unused));
    run_batches(&mut batches, soon());
    for batch in &batches {
        assert!(matches!(batch.result, Some(Ok(()))));
        assert!(batch.ops[..4].iter().all(|op| op.outcome() == Some(Ok(()))));
    }
    assert_eq!(batches[0].ops[4].outcome(), Some(Err(ErrorCode::Gone)));
    drop(batches);
    for (record, bytes) in (0u32..).zip(&memory) {
        assert!(*bytes == nodes[0].config().content(record % 4), "record {record}");
    }
}

/// Starts a proxy that forwards nothing more once `silent` is set.
fn start_proxy(node: &TestNode, silent: &Arc<AtomicBool>) -> std::net::SocketAddr {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, upstream) = (listener.local_addr().unwrap(), node.server.addresses()[0]);
    let silent = Arc::clone(silent);
    std::thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let server = TcpStream::connect(upstream).unwrap();
            let copies = (client.try_clone().unwrap(), server.try_clone().unwrap());
            for (mut from, mut to) in [(client, server), (copies.1, copies.0)] {
                let silent = Arc::clone(&silent);
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if !silent.load(Ordering::SeqCst) && to.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                });
            }
        }
    });
    address
}

/// Returns a link to a peer that responds to nothing but the handshake.
fn silent_link(node: &TestNode) -> Arc<dyn Link> {
    let silent = Arc::new(AtomicBool::new(false));
    let addresses = vec![(EngineKind::Tcp, start_proxy(node, &silent).to_string())];
    let peer = Peer { node: node.config().node, addresses };
    let credentials = common::credentials(moontide_auth::Role::Operator);
    let stall = Duration::from_secs(60);
    let slow = TcpConfig { connections: 1, stall, credentials, ..TcpConfig::default() };
    let link = TcpEngine::new(slow, Arc::clone(&node.metrics)).connect(&peer, soon()).unwrap();
    silent.store(true, Ordering::SeqCst);
    link
}

#[test]
fn late_batch_is_aborted_if_it_has_an_alternative() {
    let config = SampleNodeConfig { record_bytes: PAGE + 9, readable: 2, writable: 0, ..Default::default() };
    let node = TestNode::new(config);
    let config = node.config();
    let good = node.link(1);
    let (grace, timeout) = (Duration::from_millis(100), Duration::from_secs(2));
    for has_alternative in [true, false] {
        let silent = silent_link(&node);
        let mut buffers = [0xee, 0].map(|byte| vec![byte; config.record_bytes as usize]);
        let [late, fast] = &mut buffers;
        let mut batches = [
            Batch::new(&*silent, vec![Op::get(config.target(0), 0, late)]),
            Batch::new(&*good, vec![Op::get(config.target(1), 0, fast)]),
        ];
        let began = Instant::now();
        run_batches_unless_late(&mut batches, &[has_alternative, true], grace, began + timeout);
        let took = began.elapsed();
        assert_eq!((batches[0].ops[0].outcome(), batches[1].ops[0].outcome()), (None, Some(Ok(()))));
        let aborted = matches!(batches[0].result, Some(Err(TransferError::Aborted)));
        assert_eq!(aborted, has_alternative, "{:?}", batches[0].result);
        assert!(if has_alternative { took < timeout } else { took >= timeout }, "{took:?}");
        drop(batches);
        assert_eq!(buffers[1], config.content(1));
        assert!(buffers[0].iter().all(|&byte| byte == 0xee), "no byte arrived");
    }
}

/// Regression: a batch that needed more than half of the time, or more than twice that of a small one, was aborted however
/// many bytes it had.
#[test]
fn large_batch_is_not_late_because_of_a_small_one() {
    let config = SampleNodeConfig { record_bytes: PAGE + 9, readable: 2, writable: 0, ..Default::default() };
    let node = TestNode::new(config);
    let config = node.config();
    let (good, silent) = (node.link(1), silent_link(&node));
    let (mut large, mut small) = (vec![0; 64 << 20], vec![0; 9]);
    let mut batches = [
        Batch::new(&*silent, vec![Op::get(config.target(0), 0, &mut large)]),
        Batch::new(&*good, vec![Op::get(config.target(1), PAGE, &mut small)]),
    ];
    let (began, timeout) = (Instant::now(), Duration::from_millis(600));
    run_batches_unless_late(&mut batches, &[true, true], Duration::from_millis(20), began + timeout);
    assert_eq!(batches[1].ops[0].outcome(), Some(Ok(())));
    assert!(
        matches!(batches[0].result, Some(Err(TransferError::Deadline { .. }))),
        "{:?}",
        batches[0].result
    );
    assert!(began.elapsed() >= timeout, "{:?}", began.elapsed());
}

#[test]
fn hedge_wins_over_slow_peer_and_loser_buffer_is_untouched() {
    let config = SampleNodeConfig { record_bytes: PAGE + 9, readable: 2, writable: 0, ..Default::default() };
    let node = TestNode::new(config);
    let config = node.config();
    let (good, slow) = (node.link(1), silent_link(&node));
    let (mut first, mut second) =
        (vec![0xee; config.record_bytes as usize], vec![0; config.record_bytes as usize]);
    let hedge = |first_link, second_link, delay: Duration, first: &mut [u8], second: &mut [u8]| {
        let mut batch = Batch::new(first_link, vec![Op::get(config.target(1), 0, first)]);
        let began = Instant::now();
        let (winner, other) = run_hedged(
            &mut batch,
            began + delay,
            || Some(Batch::new(second_link, vec![Op::get(config.target(1), 0, second)])),
            soon(),
        );
        let outcome = match winner {
            Winner::First => batch.ops[0].outcome(),
            Winner::Second => other.unwrap().ops[0].outcome(),
        };
        assert_eq!(outcome, Some(Ok(())));
        (winner, began.elapsed())
    };
    let (winner, took) = hedge(&*slow, &*good, Duration::from_millis(20), &mut first, &mut second);
    assert_eq!(winner, Winner::Second);
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(second, config.content(1));
    assert!(first.iter().all(|&byte| byte == 0xee), "the loser wrote nothing");
    // A second batch that is refused does not end a running first one.
    let invalid = Target { slot: SlotId(77), ..config.target(1) };
    let mut batch = Batch::new(&*good, vec![Op::get(config.target(0), 0, &mut first)]);
    let (winner, other) = run_hedged(
        &mut batch,
        Instant::now(),
        || Some(Batch::new(&*good, vec![Op::get(invalid, 0, &mut second[..1])])),
        soon(),
    );
    drop(other);
    assert_eq!((winner, batch.ops[0].outcome()), (Winner::First, Some(Ok(()))));
    drop(batch);
    assert_eq!(first, config.content(0));
    // If the first batch is fast enough, no second one is started.
    let (winner, _) = hedge(&*good, &*slow, Duration::from_secs(10), &mut first, &mut second);
    assert_eq!(winner, Winner::First);
    assert_eq!(first, config.content(1));
}
