//! Callers who give up, at any moment, while others share their connections.

use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use moontide_proto::FrameKind;
use moontide_transfer::sample::{Sample, SampleConfig};
use moontide_transfer::tcp::{Server, ServerConfig};
use moontide_transfer::{Link, Metrics, Op, OwnedOp, Transfer, Waiting, run};

use crate::kit::{Rng, check_typed, count, get_into, in_ms, link, put_from, soon};
use crate::process::OwnerProcess;
use crate::raw::{Liar, read_frame};

const LEN: usize = 8 << 20;

fn config() -> SampleConfig {
    SampleConfig { record_bytes: LEN as u64, readable: 1, writable: 2, digests: false, ..Default::default() }
}

/// The moments: from before anything was sent until after everything came.
fn moment(rng: &mut Rng) -> Duration {
    Duration::from_micros(rng.within(0, 15_000) * rng.within(0, 2))
}

/// Memory that was given back is overwritten, and must stay so.
#[track_caller]
fn stays(memory: &mut [u8], rng: &mut Rng, what: &str) {
    memory.fill(0x5a);
    std::thread::sleep(Duration::from_millis(rng.within(5, 20)));
    // Every byte is as the one before it, and the first is right.
    assert!(memory[0] == 0x5a && memory[1..] == memory[..memory.len() - 1], "written after {what}");
}

/// How somebody gives up.
type GiveUp = fn(&dyn Link, &SampleConfig, &mut Rng);

pub fn gets() {
    give_up_among_others(&[by_abort, by_drop], count(320, 3000));
}

pub fn deadlines() {
    give_up_among_others(&[by_deadline, by_abort_around_deadline], count(200, 2000));
}

fn give_up_among_others(ways: &[GiveUp], attempts: u32) {
    let mut rng = Rng::seeded();
    let config = config();
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    for connections in [1, 2] {
        let link = link(owner.address(), connections);
        let (done, over) = (AtomicU32::new(0), AtomicBool::new(false));
        let others = AtomicU32::new(0);
        let hurt = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let quitters: Vec<_> = (0..2)
                .map(|_| {
                    let (mut rng, link, config, done) = (rng.fork(), &*link, &config, &done);
                    scope.spawn(move || {
                        while done.fetch_add(1, Ordering::Relaxed) < attempts / 2 {
                            ways[rng.within(0, ways.len() as u64) as usize](link, config, &mut rng);
                        }
                    })
                })
                .collect();
            // Others, who give nothing up: their bytes arrive.
            for caller in 0..2 {
                let (link, config, content, over) = (&*link, &config, &content, &over);
                let (others, hurt) = (&others, &hurt);
                scope.spawn(move || {
                    let mut memory = vec![0; LEN];
                    while !over.load(Ordering::Relaxed) {
                        let result = if caller == 0 {
                            get_into(link, config, 0, content, &mut memory, soon())
                        } else {
                            put_from(link, config, content, soon())
                        };
                        match result {
                            Ok(()) => drop(others.fetch_add(1, Ordering::Relaxed)),
                            Err(error) => hurt.lock().expect("no panic").push(error.to_string()),
                        }
                    }
                });
            }
            quitters.into_iter().for_each(|quitter| quitter.join().expect("memory stays"));
            over.store(true, Ordering::Relaxed);
        });
        let (others, hurt) = (others.into_inner(), hurt.into_inner().expect("no panic"));
        println!("{connections} connections: {} gave up, {others} others served", attempts / 2);
        let what = "by somebody who gave up on the same connection";
        assert!(hurt.is_empty(), "{} of {} hurt {what}: {}", hurt.len(), hurt.len() as u32 + others, hurt[0]);
    }
}

fn by_abort(link: &dyn Link, config: &SampleConfig, rng: &mut Rng) {
    let transfer = Transfer::start(link, vec![OwnedOp::get(config.target(0), 0, vec![0; LEN])], soon());
    std::thread::sleep(moment(rng));
    let mut buffers = transfer.into_buffers();
    stays(&mut buffers[0], rng, "an abort");
}

fn by_drop(link: &dyn Link, config: &SampleConfig, rng: &mut Rng) {
    let mut memory = vec![0; LEN];
    let op = Op::get(config.target(0), 0, &mut memory);
    // SAFETY: the memory outlives what is started, which is dropped below; until then nobody uses it.
    let pending = unsafe { link.start(vec![op.core().clone()], soon(), Waiting::Elsewhere) };
    std::thread::sleep(moment(rng));
    drop(pending);
    stays(&mut memory, rng, "a drop");
}

fn by_deadline(link: &dyn Link, config: &SampleConfig, rng: &mut Rng) {
    let mut memory = vec![0; LEN];
    let mut ops = [Op::get(config.target(0), 0, &mut memory)];
    if let Err(error) = run(link, &mut ops, Instant::now() + moment(rng)) {
        check_typed(&error);
    }
    stays(&mut memory, rng, "a deadline");
}

fn by_abort_around_deadline(link: &dyn Link, config: &SampleConfig, rng: &mut Rng) {
    let op = OwnedOp::get(config.target(0), 0, vec![0; LEN]);
    let mut transfer = Transfer::start(link, vec![op], Instant::now() + moment(rng));
    std::thread::sleep(moment(rng));
    transfer.abort();
    let mut buffers = transfer.into_buffers();
    stays(&mut buffers[0], rng, "an abort around the deadline");
}

/// A peer that takes puts slowly looks at every byte: none of them is of the time after the abort.
pub fn puts() {
    let mut rng = Rng::seeded();
    let config = config();
    let liar = Liar::greeting(64, |mut stream| {
        let (mut piece, untouched) = (vec![0; 64 << 10], vec![0xa5; 64 << 10]);
        while let Some((header, _)) = read_frame(&mut stream) {
            assert_eq!(header.kind, FrameKind::Write);
            let mut left = header.payload_len as usize;
            while left > 0 {
                let wanted = left.min(piece.len());
                let Ok(count @ 1..) = stream.read(&mut piece[..wanted]) else { return };
                assert!(piece[..count] == untouched[..count], "read after the abort");
                left -= count;
            }
        }
    });
    let link = link(liar.address, 2);
    let mut memory = vec![0; LEN];
    for _ in 0..count(80, 1000) {
        memory.fill(0xa5);
        let op = Op::put(config.target(1), 0, &memory);
        // SAFETY: the memory outlives what is started, which is dropped below; until then nobody writes it.
        let mut pending = unsafe { link.start(vec![op.core().clone()], soon(), Waiting::Elsewhere) };
        std::thread::sleep(moment(&mut rng) / 2);
        if rng.within(0, 2) == 0 {
            pending.abort();
        }
        drop(pending);
        memory.fill(0x5a);
        std::thread::sleep(Duration::from_millis(rng.within(0, 5)));
    }
}

/// Somebody who polls shares the only connection with somebody who gives up. With all the time of the world ahead, its
/// transfer is sent again.
pub fn futures_survive() {
    let mut rng = Rng::seeded();
    let config = config();
    let (content, owner) = (config.content(0), OwnerProcess::start(&config));
    let link = link(owner.address(), 1);
    let mut hurt = Vec::new();
    for _ in 0..20 {
        let op = OwnedOp::get(config.target(0), 0, vec![0; LEN]);
        let quitter = Transfer::start(&*link, vec![op], soon());
        let op = OwnedOp::get(config.target(0), 0, vec![0; LEN]);
        let other = Transfer::start(&*link, vec![op], soon());
        std::thread::sleep(Duration::from_micros(rng.within(0, 3000)));
        drop(quitter);
        match poll_to_the_end(other) {
            Ok(done) => assert!(done[0].buffer == content),
            Err(error) => hurt.push(error.to_string()),
        }
        let _ = crate::kit::recovers(&*link, &config, &content, Duration::from_secs(5));
    }
    assert!(hurt.is_empty(), "{} of 20 hurt by somebody else's abort: {}", hurt.len(), hurt[0]);
}

pub fn poll_to_the_end(transfer: Transfer) -> <Transfer as Future>::Output {
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

/// The peer goes away while a batch of very many operations is being cut into frames and given to connections.
pub fn broken_while_starting() {
    let mut rng = Rng::seeded();
    let config = SampleConfig { record_bytes: 4096, readable: 1, writable: 0, ..Default::default() };
    let content = config.content(0);
    let (mut ended_well, mut failed) = (0, 0);
    for _ in 0..count(12, 200) {
        let sample = Arc::new(Sample::new(config.clone()).expect("room for a sample"));
        let server = Server::start(ServerConfig::default(), sample, Metrics::new()).expect("a port");
        let link = link(server.addresses()[0], 1);
        let (shared, over) = (&*link, AtomicBool::new(false));
        let starts = Barrier::new(2);
        let moment = Duration::from_micros(rng.within(0, 40_000));
        std::thread::scope(|scope| {
            // It notices that the connection is gone.
            scope.spawn(|| {
                let mut memory = vec![0; 4096];
                while !over.load(Ordering::Relaxed) {
                    let _ = get_into(shared, &config, 0, &content, &mut memory, in_ms(1000));
                }
            });
            let (told, tell) = std::sync::mpsc::channel();
            let (config, starts) = (&config, &starts);
            scope.spawn(move || {
                // 60 frames of 1,024 operations: cutting them takes a while.
                let mut memory = vec![0; 60 << 10];
                let mut ops: Vec<Op<'_>> =
                    memory.chunks_mut(1).map(|byte| Op::get(config.target(0), 0, byte)).collect();
                starts.wait();
                let _ = told.send(run(shared, &mut ops, in_ms(3000)));
            });
            starts.wait();
            std::thread::sleep(moment);
            drop(server);
            let ended = tell.recv_timeout(Duration::from_secs(10));
            over.store(true, Ordering::Relaxed);
            match ended {
                Ok(Ok(())) => ended_well += 1,
                Ok(Err(error)) => {
                    check_typed(&error);
                    failed += 1;
                }
                Err(_) => {
                    // The thread that hangs cannot be joined.
                    eprintln!(
                        "broken {moment:?} after its start, a batch with a deadline of 3 s goes on after 10 s"
                    );
                    std::process::abort();
                }
            }
        });
    }
    println!("{ended_well} batches went well, {failed} failed");
}
