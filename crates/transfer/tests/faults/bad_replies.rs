//! Peers that send invalid replies, or none.

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_proto::{FrameFlags, FrameHeader, FrameKind};
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, Link, Metrics, Op, OwnedOp, Transfer, TransferError, call, run};
use moontide_types::ErrorCode;

use crate::aborts::block_on;
use crate::harness::{MIB, Rng, WakeupJitter, check_typed, in_ms, link, open, peer, soon};
use crate::raw::{FakePeer, frame, hello, read_frame, wait_for_close};

const LEN: usize = 1 << 20;
const GUARD: usize = 4096;

fn reply(request: u64, payload: &[u8]) -> Vec<u8> {
    frame(FrameHeader::new(FrameKind::ReadReply, request), &[0, 0], payload)
}

/// Sends an invalid reply to the second request of a connection, given the request's number.
type BadReply = fn(&mut TcpStream, u64, &mut Rng) -> std::io::Result<()>;

fn noise(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

const BAD_REPLIES: &[(&str, bool, BadReply)] = &[
    ("random bytes", false, |s, _, rng| s.write_all(&noise(rng, 1 << 20))),
    ("reply to an unknown request", false, |s, n, rng| {
        let other = n.wrapping_add(rng.within(1, u64::MAX));
        s.write_all(&reply(other, &[7; LEN]))
    }),
    ("second reply to a finished request", false, |s, n, _| s.write_all(&reply(n - 1, &[7; LEN]))),
    ("one byte too many", false, |s, n, _| s.write_all(&reply(n, &[7; LEN + 1]))),
    ("64 MiB instead of 1", false, |s, n, _| s.write_all(&reply(n, &vec![7; 64 << 20]))),
    ("one byte too few", false, |s, n, _| s.write_all(&reply(n, &[7; LEN - 1]))),
    ("no payload", false, |s, n, _| s.write_all(&reply(n, &[]))),
    ("flag MORE", false, |s, n, _| {
        let header = FrameHeader { flags: FrameFlags::MORE, ..FrameHeader::new(FrameKind::ReadReply, n) };
        s.write_all(&frame(header, &[0, 0], &[7; LEN]))
    }),
    ("reply to a write", false, |s, n, _| {
        s.write_all(&frame(FrameHeader::new(FrameKind::WriteReply, n), &[0, 0], &[]))
    }),
    ("a request", false, |s, n, _| s.write_all(&frame(FrameHeader::new(FrameKind::Ping, n), &[], &[]))),
    ("no code", false, |s, n, _| {
        s.write_all(&frame(FrameHeader::new(FrameKind::ReadReply, n), &[], &[7; LEN]))
    }),
    ("two codes", false, |s, n, _| {
        s.write_all(&frame(FrameHeader::new(FrameKind::ReadReply, n), &[0; 4], &[7; LEN]))
    }),
    ("unknown code", false, |s, n, _| {
        s.write_all(&frame(FrameHeader::new(FrameKind::ReadReply, n), &[0xff, 0xff], &[]))
    }),
    ("error status with payload", false, |s, n, _| {
        let status = Some(ErrorCode::Busy);
        let header = FrameHeader { status, ..FrameHeader::new(FrameKind::ReadReply, n) };
        s.write_all(&frame(header, &[0, 0], &[7; LEN]))
    }),
    ("half a header", false, |s, n, _| s.write_all(&reply(n, &[])[..20])),
    ("half a reply", true, |s, n, _| s.write_all(&reply(n, &[7; LEN])[..LEN / 2])),
];

/// Runs two gets: the first reply is valid, the second is not.
pub fn invalid_replies() {
    let mut rng = Rng::seeded();
    let config = SampleNodeConfig { record_bytes: MIB, ..Default::default() };
    let jitter = WakeupJitter::new();
    let mut late = Vec::new();
    for &(name, may_write, bad_reply) in BAD_REPLIES {
        // With and without the end of the stream after the invalid reply.
        for ends in [true, false] {
            let seed = rng.fork();
            // Only one valid reply: a retry on another connection gets the invalid reply, too.
            let replied_once = AtomicBool::new(false);
            let fake = FakePeer::with_handshake(64, move |mut stream| {
                let mut rng = seed.clone();
                if !replied_once.swap(true, Ordering::SeqCst) {
                    let Some((first, _)) = read_frame(&mut stream) else { return };
                    if stream.write_all(&reply(first.request, &[1; LEN])).is_err() {
                        return;
                    }
                }
                let Some((second, _)) = read_frame(&mut stream) else { return };
                let sent = bad_reply(&mut stream, second.request, &mut rng);
                if !ends && sent.is_ok() {
                    wait_for_close(stream);
                }
            });
            let link = link(fake.address, 1);
            let mut good = vec![0; LEN];
            let mut ops = [Op::get(config.target(0), 0, &mut good)];
            run(&*link, &mut ops, soon()).expect("the first reply is valid");

            let mut memory = vec![0xee; GUARD + LEN + GUARD];
            let mut ops = [Op::get(config.target(1), 0, &mut memory[GUARD..GUARD + LEN])];
            jitter.reset();
            let deadline = in_ms(500);
            let error = run(&*link, &mut ops, deadline).expect_err(name);
            late.extend(jitter.late(deadline, name));
            check_typed(&error);
            assert_ne!(ops[0].outcome(), Some(Ok(())), "{name}");
            std::thread::sleep(Duration::from_millis(5));
            assert!(good.iter().all(|&byte| byte == 1), "{name}: memory of another transfer was written");
            let untouched = if may_write { &memory[..GUARD] } else { &memory[..] };
            assert!(untouched.iter().all(|&byte| byte == 0xee), "{name}: memory was written");
            assert!(
                memory[GUARD + LEN..].iter().all(|&byte| byte == 0xee),
                "{name}: memory behind the end was written"
            );
        }
    }
    invalid_handshakes(&mut rng, &jitter);
    assert!(late.is_empty(), "{late:#?}");
}

/// Invalid replies to the handshake.
fn invalid_handshakes(rng: &mut Rng, jitter: &WakeupJitter) {
    let kinds = |kind: FrameKind, node: u64| move |_: &mut Rng| hello(kind, node, 64);
    type Reply = Box<dyn Fn(&mut Rng) -> Vec<u8> + Send + Sync>;
    let replies: Vec<(&str, Reply)> = vec![
        ("random bytes", Box::new(|rng: &mut Rng| noise(rng, 5000))),
        ("another node", Box::new(kinds(FrameKind::HelloAck, 77))),
        ("Hello instead of HelloAck", Box::new(kinds(FrameKind::Hello, 1))),
        ("reply to a read", Box::new(|_: &mut Rng| reply(0, &[7; 1000]))),
        ("end of the stream", Box::new(|_: &mut Rng| Vec::new())),
        ("half a HelloAck", Box::new(|_: &mut Rng| hello(FrameKind::HelloAck, 1, 64)[..100].to_vec())),
    ];
    for (name, reply) in replies {
        let seed = rng.fork();
        let fake = FakePeer::start(move |mut stream| {
            let _ = read_frame(&mut stream);
            let _ = stream.write_all(&reply(&mut seed.clone()));
        });
        jitter.reset();
        let deadline = in_ms(1500);
        let error = open(&[fake.address], 1, deadline).expect_err(name);
        jitter.check(deadline, name);
        check_typed(&error);
    }
}

/// Peers that complete the handshake and then send nothing; one of them does not receive either.
pub fn no_reply() {
    let config = SampleNodeConfig { record_bytes: 16 * MIB, ..Default::default() };
    let silent = FakePeer::with_handshake(64, wait_for_close);
    let blocked = FakePeer::with_handshake(64, |_stream| std::thread::sleep(Duration::from_secs(4)));
    let jitter = WakeupJitter::new();
    let mut memory = vec![0xee; 16 << 20];
    for (deadline_ms, put, address) in [
        (400, false, silent.address),
        (400, true, silent.address),
        (400, true, blocked.address),
        (2500, false, silent.address),
        (2500, true, blocked.address),
    ] {
        let link = link(address, 2);
        jitter.reset();
        let deadline = in_ms(deadline_ms);
        let mut ops = if put {
            [Op::put(config.target(16), 0, &memory)]
        } else {
            [Op::get(config.target(0), 0, &mut memory)]
        };
        let error = run(&*link, &mut ops, deadline).expect_err("the peer does not reply");
        jitter.check(deadline, "a transfer without a reply");
        check_typed(&error);
        println!("deadline {deadline_ms} ms, put {put}: {error}");
    }
    // Transfers that are polled, not waited for on a thread.
    let link = link(silent.address, 1);
    for put in [false, true] {
        let op = if put {
            OwnedOp::put(config.target(16), 0, vec![0; 16 << 20])
        } else {
            OwnedOp::get(config.target(0), 0, vec![0; 16 << 20])
        };
        jitter.reset();
        let deadline = in_ms(400);
        let error =
            block_on(Transfer::start(&*link, vec![op], deadline)).expect_err("the peer does not reply");
        jitter.check(deadline, "a future without a reply");
        check_typed(&error);
    }
    // A call may take until its deadline: longer than the stall timeout for bytes.
    jitter.reset();
    let (began, deadline) = (Instant::now(), in_ms(1500));
    let error = call(&*link, FrameKind::Commit, config.commit_body(16, 1), deadline)
        .expect_err("the peer does not reply");
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    assert!(began.elapsed() >= Duration::from_millis(1500));
    jitter.check(deadline, "a call without a reply");
}

/// Connects to a peer without a handshake, and to one that does not accept connections.
pub fn connecting() {
    let jitter = WakeupJitter::new();
    let mut late = Vec::new();
    let silent = FakePeer::start(wait_for_close);
    // A listener whose queue is full: the kernel drops further attempts.
    let full = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
        .expect("create a socket");
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    rustix::net::bind(&full, &any).expect("bind to a free port");
    rustix::net::listen(full.as_fd(), 0).expect("listen");
    let address: std::net::SocketAddr =
        rustix::net::getsockname(&full).expect("the socket is bound").try_into().expect("an address");
    let queued: Vec<_> = (0..3)
        .filter_map(|_| TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok())
        .collect();
    for (name, address) in [("no handshake", silent.address), ("no accept", address)] {
        for deadline_ms in [300, 1500] {
            jitter.reset();
            let (began, deadline) = (Instant::now(), in_ms(deadline_ms));
            let error = open(&[address], 2, deadline).expect_err(name);
            check_typed(&error);
            println!("{name}, deadline {deadline_ms} ms: {error} after {:?}", began.elapsed());
            if began.elapsed() > Duration::from_millis(deadline_ms + 200) {
                late.push(format!("{name}: {:?} with a deadline of {deadline_ms} ms", began.elapsed()));
            }
        }
    }
    drop(queued);
    assert!(late.is_empty(), "later than the deadline: {late:?}");
}

/// A caller with a short deadline shares a connection with one that has a long deadline; the peer stops in the middle
/// of the reply to the latter.
pub fn shared_connection() {
    let config = SampleNodeConfig { record_bytes: MIB, ..Default::default() };
    let jitter = WakeupJitter::new();
    // Sends the first reply in pieces without a stall, and never the second.
    let fake = FakePeer::with_handshake(64, |mut stream| {
        let Some((first, _)) = read_frame(&mut stream) else { return };
        let bytes = reply(first.request, &[1; LEN]);
        for piece in bytes.chunks(64 << 10) {
            if stream.write_all(piece).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        wait_for_close(stream);
    });
    let link = link(fake.address, 1);
    let shared: &dyn Link = &*link;
    let late = std::thread::scope(|scope| {
        let long_deadline = scope.spawn(|| {
            let mut memory = vec![0; LEN];
            // Short enough that its thread passes the receive lock to the other.
            let mut ops = [Op::get(config.target(0), 0, &mut memory)];
            run(shared, &mut ops, in_ms(6000))
        });
        std::thread::sleep(Duration::from_millis(100));
        let late: Vec<Duration> = [300, 500]
            .map(|deadline_ms| {
                let mut memory = vec![0; LEN];
                let mut ops = [Op::get(config.target(1), 0, &mut memory)];
                jitter.reset();
                let deadline = in_ms(deadline_ms);
                let error = run(shared, &mut ops, deadline).expect_err("no reply");
                let late = Instant::now().saturating_duration_since(deadline);
                check_typed(&error);
                late
            })
            .into();
        let _ = long_deadline.join();
        late
    });
    println!("late by {late:?}");
    assert!(late.iter().all(|late| *late < Duration::from_millis(150)), "late by {late:?}");

    // The caller with the short deadline holds the receive lock, and the incoming reply is for the other one.
    let fake = FakePeer::with_handshake(64, |mut stream| {
        let Some((_, _)) = read_frame(&mut stream) else { return };
        let Some((second, _)) = read_frame(&mut stream) else { return };
        for piece in reply(second.request, &[1; LEN]).chunks(64 << 10) {
            if stream.write_all(piece).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        wait_for_close(stream);
    });
    let link = crate::harness::link(fake.address, 1);
    let shared: &dyn Link = &*link;
    std::thread::scope(|scope| {
        let short_deadline = scope.spawn(|| {
            let mut memory = vec![0; LEN];
            let mut ops = [Op::get(config.target(0), 0, &mut memory)];
            jitter.reset();
            let deadline = in_ms(600);
            let error = run(shared, &mut ops, deadline).expect_err("no reply");
            check_typed(&error);
            Instant::now().saturating_duration_since(deadline)
        });
        std::thread::sleep(Duration::from_millis(100));
        let mut memory = vec![0; LEN];
        let mut ops = [Op::get(config.target(1), 0, &mut memory)];
        let _ = run(shared, &mut ops, in_ms(8000));
        let late = short_deadline.join().expect("no panic");
        println!("holding the receive lock: late by {late:?}");
        assert!(late < Duration::from_millis(150), "late by {late:?}: it received for another caller");
    });
}

/// A peer that ignores the deadline and sends as fast as it can.
pub fn endless() {
    let config = SampleNodeConfig { record_bytes: 256 * MIB, ..Default::default() };
    let jitter = WakeupJitter::new();
    let fake = FakePeer::with_handshake(64, |mut stream| {
        let payload = vec![1; 4 << 20];
        while let Some((header, body)) = read_frame(&mut stream) {
            let op = moontide_proto::TransferOps::decode(&header, &body).expect("a read").ops();
            let len: u64 = op.iter().map(|op| op.len).sum();
            if stream.write_all(&reply(header.request, &payload[..len as usize])).is_err() {
                return;
            }
        }
    });
    let config_of_link = TcpConfig { connections: 1, ..TcpConfig::default() };
    let link = TcpEngine::new(config_of_link, Metrics::new())
        .connect(&peer(&[fake.address]), soon())
        .expect("the peer completes the handshake");
    let (mut memory, mut digests) = (vec![0; 256 << 20], vec![0; 1024]);
    let op = Op::get(config.target(0), 0, &mut memory).digested(config.digest_context(0), &mut digests);
    let mut ops = [op.expect("whole pages")];
    jitter.reset();
    let (began, deadline) = (Instant::now(), in_ms(50));
    let result = run(&*link, &mut ops, deadline);
    println!("{result:?} after {:?}", began.elapsed());
    if let Err(error) = result {
        assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    }
    jitter.check(deadline, "a transfer whose bytes keep arriving");
}
