//! Callers that abort, at any moment, while others share their connections.

use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use moontide_proto::FrameKind;
use moontide_transfer::sample::{SampleNode, SampleNodeConfig};
use moontide_transfer::tcp::{TcpServer, TcpServerConfig};
use moontide_transfer::{Link, Metrics, Op, OwnedOp, Transfer, WaitMode, run};

use crate::harness::{Rng, check_typed, count, get_into, in_ms, link, put_from, soon};
use crate::process::OwnerProcess;
use crate::raw::{FakePeer, read_frame};

const LEN: usize = 8 << 20;

fn config() -> SampleNodeConfig {
    SampleNodeConfig {
        record_bytes: LEN as u64,
        readable: 1,
        writable: 2,
        digests: false,
        ..Default::default()
    }
}

/// Draws the delay before an abort: from before anything was sent until after everything arrived.
fn abort_delay(rng: &mut Rng) -> Duration {
    Duration::from_micros(rng.within(0, 15_000) * rng.within(0, 2))
}

/// Overwrites memory that was returned to the caller, and checks that it does not change.
#[track_caller]
fn check_unchanged(memory: &mut [u8], rng: &mut Rng, what: &str) {
    memory.fill(0x5a);
    std::thread::sleep(Duration::from_millis(rng.within(5, 20)));
    // Every byte equals the one before it, and the first is right.
    assert!(memory[0] == 0x5a && memory[1..] == memory[..memory.len() - 1], "written after {what}");
}

/// A way to end a transfer early.
type AbortFn = fn(&dyn Link, &SampleNodeConfig, &mut Rng);

pub fn gets() {
    abort_beside_others(&[by_abort, by_drop], count(320, 3000));
}

pub fn deadlines() {
    abort_beside_others(&[by_deadline, by_abort_around_deadline], count(200, 2000));
}

fn abort_beside_others(ways: &[AbortFn], attempts: u32) {
    let mut rng = Rng::seeded();
    let config = config();
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    for connections in [1, 2] {
        let link = link(owner.address(), connections);
        let (attempted, finished) = (AtomicU32::new(0), AtomicBool::new(false));
        let succeeded = AtomicU32::new(0);
        let failures = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let aborting: Vec<_> = (0..2)
                .map(|_| {
                    let (mut rng, link, config, attempted) = (rng.fork(), &*link, &config, &attempted);
                    scope.spawn(move || {
                        while attempted.fetch_add(1, Ordering::Relaxed) < attempts / 2 {
                            ways[rng.within(0, ways.len() as u64) as usize](link, config, &mut rng);
                        }
                    })
                })
                .collect();
            // Other callers abort nothing: their transfers must succeed.
            for caller in 0..2 {
                let (link, config, content, finished) = (&*link, &config, &content, &finished);
                let (succeeded, failures) = (&succeeded, &failures);
                scope.spawn(move || {
                    let mut memory = vec![0; LEN];
                    while !finished.load(Ordering::Relaxed) {
                        let result = if caller == 0 {
                            get_into(link, config, 0, content, &mut memory, soon())
                        } else {
                            put_from(link, config, content, soon())
                        };
                        match result {
                            Ok(()) => drop(succeeded.fetch_add(1, Ordering::Relaxed)),
                            Err(error) => failures.lock().expect("no panic").push(error.to_string()),
                        }
                    }
                });
            }
            aborting.into_iter().for_each(|thread| thread.join().expect("memory is unchanged"));
            finished.store(true, Ordering::Relaxed);
        });
        let (succeeded, failures) = (succeeded.into_inner(), failures.into_inner().expect("no panic"));
        println!("{connections} connections: {} aborts, {succeeded} other transfers", attempts / 2);
        let (failed, total) = (failures.len(), failures.len() as u32 + succeeded);
        assert!(
            failures.is_empty(),
            "{failed} of {total} failed by aborts on the same connection: {}",
            failures[0]
        );
    }
}

fn by_abort(link: &dyn Link, config: &SampleNodeConfig, rng: &mut Rng) {
    let transfer = Transfer::start(link, vec![OwnedOp::get(config.target(0), 0, vec![0; LEN])], soon());
    std::thread::sleep(abort_delay(rng));
    let mut buffers = transfer.into_buffers();
    check_unchanged(&mut buffers[0], rng, "an abort");
}

fn by_drop(link: &dyn Link, config: &SampleNodeConfig, rng: &mut Rng) {
    let mut memory = vec![0; LEN];
    let op = Op::get(config.target(0), 0, &mut memory);
    // SAFETY: the memory outlives the started operation, which is dropped below; until then no other code uses it.
    let pending = unsafe { link.start(vec![op.core().clone()], soon(), WaitMode::Polling) };
    std::thread::sleep(abort_delay(rng));
    drop(pending);
    check_unchanged(&mut memory, rng, "a drop");
}

fn by_deadline(link: &dyn Link, config: &SampleNodeConfig, rng: &mut Rng) {
    let mut memory = vec![0; LEN];
    let mut ops = [Op::get(config.target(0), 0, &mut memory)];
    if let Err(error) = run(link, &mut ops, Instant::now() + abort_delay(rng)) {
        check_typed(&error);
    }
    check_unchanged(&mut memory, rng, "a deadline");
}

fn by_abort_around_deadline(link: &dyn Link, config: &SampleNodeConfig, rng: &mut Rng) {
    let op = OwnedOp::get(config.target(0), 0, vec![0; LEN]);
    let mut transfer = Transfer::start(link, vec![op], Instant::now() + abort_delay(rng));
    std::thread::sleep(abort_delay(rng));
    transfer.abort();
    let mut buffers = transfer.into_buffers();
    check_unchanged(&mut buffers[0], rng, "an abort around the deadline");
}

/// A peer that receives puts slowly checks every byte: no byte was written after the abort.
pub fn puts() {
    let mut rng = Rng::seeded();
    let config = config();
    let fake = FakePeer::with_handshake(64, |mut stream| {
        let (mut piece, untouched) = (vec![0; 64 << 10], vec![0xa5; 64 << 10]);
        while let Some((header, _)) = read_frame(&mut stream) {
            assert_eq!(header.kind, FrameKind::Write);
            let mut left = header.payload_len as usize;
            while left > 0 {
                let len = left.min(piece.len());
                let Ok(count @ 1..) = stream.read(&mut piece[..len]) else { return };
                assert!(piece[..count] == untouched[..count], "read after the abort");
                left -= count;
            }
        }
    });
    let link = link(fake.address, 2);
    let mut memory = vec![0; LEN];
    for _ in 0..count(80, 1000) {
        memory.fill(0xa5);
        let op = Op::put(config.target(1), 0, &memory);
        // SAFETY: the memory outlives the started operation, which is dropped below; until then no other code writes
        // it.
        let mut pending = unsafe { link.start(vec![op.core().clone()], soon(), WaitMode::Polling) };
        std::thread::sleep(abort_delay(&mut rng) / 2);
        if rng.within(0, 2) == 0 {
            pending.abort();
        }
        drop(pending);
        memory.fill(0x5a);
        std::thread::sleep(Duration::from_millis(rng.within(0, 5)));
    }
}

/// A caller that polls shares the only connection with a caller that aborts. With a distant deadline, its transfer is
/// sent again.
pub fn futures_survive() {
    let mut rng = Rng::seeded();
    let config = config();
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    let link = link(owner.address(), 1);
    let mut failures = Vec::new();
    for _ in 0..20 {
        let op = OwnedOp::get(config.target(0), 0, vec![0; LEN]);
        let aborted = Transfer::start(&*link, vec![op], soon());
        let op = OwnedOp::get(config.target(0), 0, vec![0; LEN]);
        let other = Transfer::start(&*link, vec![op], soon());
        std::thread::sleep(Duration::from_micros(rng.within(0, 3000)));
        drop(aborted);
        match block_on(other) {
            Ok(done) => assert!(done[0].buffer == content),
            Err(error) => failures.push(error.to_string()),
        }
        let _ = crate::harness::wait_for_recovery(&*link, &config, &content, Duration::from_secs(5));
    }
    assert!(failures.is_empty(), "{} of 20 failed by another's abort: {}", failures.len(), failures[0]);
}

/// Polls a transfer on this thread until it ends.
pub fn block_on(transfer: Transfer) -> <Transfer as Future>::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::task::Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut transfer = std::pin::pin!(transfer);
    loop {
        match transfer.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(10)),
        }
    }
}

/// The server stops while a batch of many operations is being split into frames and assigned to connections.
pub fn broken_while_starting() {
    let mut rng = Rng::seeded();
    let config = SampleNodeConfig { record_bytes: 4096, readable: 1, writable: 0, ..Default::default() };
    let content = config.content(0);
    let (mut succeeded, mut failed) = (0, 0);
    for _ in 0..count(12, 200) {
        let sample = Arc::new(SampleNode::new(config.clone()).expect("memory for a sample"));
        let server = TcpServer::start(TcpServerConfig::default(), sample, Metrics::new()).expect("a port");
        let link = link(server.addresses()[0], 1);
        let (shared, finished) = (&*link, AtomicBool::new(false));
        let starts = Barrier::new(2);
        let delay = Duration::from_micros(rng.within(0, 40_000));
        std::thread::scope(|scope| {
            // This thread detects that the connection is gone.
            scope.spawn(|| {
                let mut memory = vec![0; 4096];
                while !finished.load(Ordering::Relaxed) {
                    let _ = get_into(shared, &config, 0, &content, &mut memory, in_ms(1000));
                }
            });
            let (sender, receiver) = std::sync::mpsc::channel();
            let (config, starts) = (&config, &starts);
            scope.spawn(move || {
                // 60 frames of 1,024 operations: splitting them takes a while.
                let mut memory = vec![0; 60 << 10];
                let mut ops: Vec<Op<'_>> =
                    memory.chunks_mut(1).map(|byte| Op::get(config.target(0), 0, byte)).collect();
                starts.wait();
                let _ = sender.send(run(shared, &mut ops, in_ms(3000)));
            });
            starts.wait();
            std::thread::sleep(delay);
            drop(server);
            let result = receiver.recv_timeout(Duration::from_secs(10));
            finished.store(true, Ordering::Relaxed);
            match result {
                Ok(Ok(())) => succeeded += 1,
                Ok(Err(error)) => {
                    check_typed(&error);
                    failed += 1;
                }
                Err(_) => {
                    // The blocked thread cannot be joined.
                    eprintln!(
                        "broken {delay:?} after its start, a batch with a deadline of 3 s still runs after 10 s"
                    );
                    std::process::abort();
                }
            }
        });
    }
    println!("{succeeded} batches succeeded, {failed} failed");
}
