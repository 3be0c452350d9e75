//! Peers that lie, or say nothing.

use std::io::Write;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_proto::{FrameFlags, FrameHeader, FrameKind};
use moontide_transfer::sample::SampleConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Engine, Link, Metrics, Op, OwnedOp, Transfer, TransferError, call, run};
use moontide_types::ErrorCode;

use crate::aborts::poll_to_the_end;
use crate::kit::{MIB, Punctual, Rng, check_typed, in_ms, link, open, peer, soon};
use crate::raw::{Liar, frame, hello, read_frame, wait_for_the_end};

const LEN: usize = 1 << 20;
const GUARD: usize = 4096;

fn reply(request: u64, payload: &[u8]) -> Vec<u8> {
    frame(FrameHeader::new(FrameKind::ReadReply, request), &[0, 0], payload)
}

/// The lie told to the second request of a connection: the request's number, and chance.
type Lie = fn(&mut TcpStream, u64, &mut Rng) -> std::io::Result<()>;

fn noise(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

const LIES: &[(&str, bool, Lie)] = &[
    ("random bytes", false, |s, _, rng| s.write_all(&noise(rng, 1 << 20))),
    ("an answer to nobody", false, |s, n, rng| {
        let other = n.wrapping_add(rng.within(1, u64::MAX));
        s.write_all(&reply(other, &[7; LEN]))
    }),
    ("the answer to what was answered", false, |s, n, _| s.write_all(&reply(n - 1, &[7; LEN]))),
    ("too much", false, |s, n, _| s.write_all(&reply(n, &[7; LEN + 1]))),
    ("far too much", false, |s, n, _| s.write_all(&reply(n, &vec![7; 64 << 20]))),
    ("too little", false, |s, n, _| s.write_all(&reply(n, &[7; LEN - 1]))),
    ("nothing", false, |s, n, _| s.write_all(&reply(n, &[]))),
    ("more to follow", false, |s, n, _| {
        let header = FrameHeader { flags: FrameFlags::MORE, ..FrameHeader::new(FrameKind::ReadReply, n) };
        s.write_all(&frame(header, &[0, 0], &[7; LEN]))
    }),
    ("the answer to a write", false, |s, n, _| {
        s.write_all(&frame(FrameHeader::new(FrameKind::WriteReply, n), &[0, 0], &[]))
    }),
    ("a request", false, |s, n, _| s.write_all(&frame(FrameHeader::new(FrameKind::Ping, n), &[], &[]))),
    ("no code", false, |s, n, _| {
        s.write_all(&frame(FrameHeader::new(FrameKind::ReadReply, n), &[], &[7; LEN]))
    }),
    ("two codes", false, |s, n, _| {
        s.write_all(&frame(FrameHeader::new(FrameKind::ReadReply, n), &[0; 4], &[7; LEN]))
    }),
    ("a code that is none", false, |s, n, _| {
        s.write_all(&frame(FrameHeader::new(FrameKind::ReadReply, n), &[0xff, 0xff], &[]))
    }),
    ("a failure with bytes", false, |s, n, _| {
        let status = Some(ErrorCode::Busy);
        let header = FrameHeader { status, ..FrameHeader::new(FrameKind::ReadReply, n) };
        s.write_all(&frame(header, &[0, 0], &[7; LEN]))
    }),
    ("half a header", false, |s, n, _| s.write_all(&reply(n, &[])[..20])),
    ("half an answer", true, |s, n, _| s.write_all(&reply(n, &[7; LEN])[..LEN / 2])),
];

/// Two gets: the first is answered well, the second with a lie.
pub fn lies() {
    let mut rng = Rng::seeded();
    let config = SampleConfig { record_bytes: MIB, ..Default::default() };
    let punctual = Punctual::new();
    let mut late = Vec::new();
    for &(name, may_write, lie) in LIES {
        // With the end of the stream behind the lie, and without.
        for ends in [true, false] {
            let seed = rng.fork();
            // Once: what is asked again on another connection is answered with the lie, too.
            let answered_well = AtomicBool::new(false);
            let liar = Liar::greeting(64, move |mut stream| {
                let mut rng = seed.clone();
                if !answered_well.swap(true, Ordering::SeqCst) {
                    let Some((first, _)) = read_frame(&mut stream) else { return };
                    if stream.write_all(&reply(first.request, &[1; LEN])).is_err() {
                        return;
                    }
                }
                let Some((second, _)) = read_frame(&mut stream) else { return };
                let told = lie(&mut stream, second.request, &mut rng);
                if !ends && told.is_ok() {
                    wait_for_the_end(stream);
                }
            });
            let link = link(liar.address, 1);
            let mut good = vec![0; LEN];
            let mut ops = [Op::get(config.target(0), 0, &mut good)];
            run(&*link, &mut ops, soon()).expect("the first answer is right");

            let mut memory = vec![0xee; GUARD + LEN + GUARD];
            let mut ops = [Op::get(config.target(1), 0, &mut memory[GUARD..GUARD + LEN])];
            punctual.reset();
            let deadline = in_ms(500);
            let error = run(&*link, &mut ops, deadline).expect_err(name);
            late.extend(punctual.late(deadline, name));
            check_typed(&error);
            assert_ne!(ops[0].outcome(), Some(Ok(())), "{name}");
            std::thread::sleep(Duration::from_millis(5));
            assert!(good.iter().all(|&byte| byte == 1), "{name}: memory of another transfer was written");
            let untouched = if may_write { &memory[..GUARD] } else { &memory[..] };
            assert!(untouched.iter().all(|&byte| byte == 0xee), "{name}: memory was written");
            assert!(memory[GUARD + LEN..].iter().all(|&byte| byte == 0xee), "{name}: behind the end");
        }
    }
    greetings(&mut rng, &punctual);
    assert!(late.is_empty(), "{late:#?}");
}

/// Lies in the place of the greeting.
fn greetings(rng: &mut Rng, punctual: &Punctual) {
    let kinds = |kind: FrameKind, node: u64| move |_: &mut Rng| hello(kind, node, 64);
    type Answer = Box<dyn Fn(&mut Rng) -> Vec<u8> + Send + Sync>;
    let answers: Vec<(&str, Answer)> = vec![
        ("random bytes", Box::new(|rng: &mut Rng| noise(rng, 5000))),
        ("another node", Box::new(kinds(FrameKind::HelloAck, 77))),
        ("a greeting", Box::new(kinds(FrameKind::Hello, 1))),
        ("an answer", Box::new(|_: &mut Rng| reply(0, &[7; 1000]))),
        ("the end", Box::new(|_: &mut Rng| Vec::new())),
        ("half a greeting", Box::new(|_: &mut Rng| hello(FrameKind::HelloAck, 1, 64)[..100].to_vec())),
    ];
    for (name, answer) in answers {
        let seed = rng.fork();
        let liar = Liar::start(move |mut stream| {
            let _ = read_frame(&mut stream);
            let _ = stream.write_all(&answer(&mut seed.clone()));
        });
        punctual.reset();
        let deadline = in_ms(1500);
        let error = open(&[liar.address], 1, deadline).expect_err(name);
        punctual.check(deadline, name);
        check_typed(&error);
    }
}

/// A peer that greets, and then hears and says nothing.
pub fn silence() {
    let config = SampleConfig { record_bytes: 16 * MIB, ..Default::default() };
    let liar = Liar::greeting(64, wait_for_the_end);
    let deaf = Liar::greeting(64, |_stream| std::thread::sleep(Duration::from_secs(4)));
    let punctual = Punctual::new();
    let mut memory = vec![0xee; 16 << 20];
    for (deadline_ms, put, address) in [
        (400, false, liar.address),
        (400, true, liar.address),
        (400, true, deaf.address),
        (2500, false, liar.address),
        (2500, true, deaf.address),
    ] {
        let link = link(address, 2);
        punctual.reset();
        let deadline = in_ms(deadline_ms);
        let mut ops = if put {
            [Op::put(config.target(16), 0, &memory)]
        } else {
            [Op::get(config.target(0), 0, &mut memory)]
        };
        let error = run(&*link, &mut ops, deadline).expect_err("nobody answers");
        punctual.check(deadline, "a transfer that nobody answers");
        check_typed(&error);
        println!("deadline {deadline_ms} ms, put {put}: {error}");
    }
    // Nobody waits for it on a thread.
    let link = link(liar.address, 1);
    for put in [false, true] {
        let op = if put {
            OwnedOp::put(config.target(16), 0, vec![0; 16 << 20])
        } else {
            OwnedOp::get(config.target(0), 0, vec![0; 16 << 20])
        };
        punctual.reset();
        let deadline = in_ms(400);
        let error = poll_to_the_end(Transfer::start(&*link, vec![op], deadline)).expect_err("nobody answers");
        punctual.check(deadline, "a future that nobody answers");
        check_typed(&error);
    }
    // A call may take its time, up to its deadline: longer than what is a stall for bytes.
    punctual.reset();
    let (began, deadline) = (Instant::now(), in_ms(1500));
    let error =
        call(&*link, FrameKind::Commit, config.commit_body(16, 1), deadline).expect_err("nobody answers");
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    assert!(began.elapsed() >= Duration::from_millis(1500));
    punctual.check(deadline, "a call that nobody answers");
}

/// Connecting to who does not greet, and to who does not even accept.
pub fn connecting() {
    let punctual = Punctual::new();
    let mut wrong = Vec::new();
    let mute = Liar::start(wait_for_the_end);
    // A listener whose queue is full: further attempts are dropped without a word.
    let full = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
        .expect("a socket");
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    rustix::net::bind(&full, &any).expect("a port");
    rustix::net::listen(full.as_fd(), 0).expect("it listens");
    let address: std::net::SocketAddr =
        rustix::net::getsockname(&full).expect("it is bound").try_into().expect("an address");
    let waiting: Vec<_> = (0..3)
        .filter_map(|_| TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok())
        .collect();
    for (name, address) in [("does not greet", mute.address), ("does not accept", address)] {
        for deadline_ms in [300, 1500] {
            punctual.reset();
            let (began, deadline) = (Instant::now(), in_ms(deadline_ms));
            let error = open(&[address], 2, deadline).expect_err(name);
            check_typed(&error);
            println!("{name}, deadline {deadline_ms} ms: {error} after {:?}", began.elapsed());
            if began.elapsed() > Duration::from_millis(deadline_ms + 200) {
                wrong.push(format!("{name}: {:?} with a deadline of {deadline_ms} ms", began.elapsed()));
            }
        }
    }
    drop(waiting);
    assert!(wrong.is_empty(), "later than the deadline: {wrong:?}");
}

/// Somebody with little time shares a connection with somebody who has much; the peer stops in the middle of what the
/// latter asked for.
pub fn deadlines_of_others() {
    let config = SampleConfig { record_bytes: MIB, ..Default::default() };
    let punctual = Punctual::new();
    // Answers the first request in trickles that are no stall, and never the second.
    let liar = Liar::greeting(64, |mut stream| {
        let Some((first, _)) = read_frame(&mut stream) else { return };
        let answer = reply(first.request, &[1; LEN]);
        for piece in answer.chunks(64 << 10) {
            if stream.write_all(piece).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        wait_for_the_end(stream);
    });
    let link = link(liar.address, 1);
    let shared: &dyn Link = &*link;
    let late = std::thread::scope(|scope| {
        let patient = scope.spawn(|| {
            let mut memory = vec![0; LEN];
            // So little that its thread leaves the turn to the other.
            let mut ops = [Op::get(config.target(0), 0, &mut memory)];
            run(shared, &mut ops, in_ms(6000))
        });
        std::thread::sleep(Duration::from_millis(100));
        let late: Vec<Duration> = [300, 500]
            .map(|deadline_ms| {
                let mut memory = vec![0; LEN];
                let mut ops = [Op::get(config.target(1), 0, &mut memory)];
                punctual.reset();
                let deadline = in_ms(deadline_ms);
                let error = run(shared, &mut ops, deadline).expect_err("never answered");
                let late = Instant::now().saturating_duration_since(deadline);
                check_typed(&error);
                late
            })
            .into();
        let _ = patient.join();
        late
    });
    println!("late by {late:?}");
    assert!(late.iter().all(|late| *late < Duration::from_millis(150)), "late by {late:?}");

    // The one with little time has the turn, and what comes is for the other.
    let liar = Liar::greeting(64, |mut stream| {
        let Some((_, _)) = read_frame(&mut stream) else { return };
        let Some((second, _)) = read_frame(&mut stream) else { return };
        for piece in reply(second.request, &[1; LEN]).chunks(64 << 10) {
            if stream.write_all(piece).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        wait_for_the_end(stream);
    });
    let link = crate::kit::link(liar.address, 1);
    let shared: &dyn Link = &*link;
    std::thread::scope(|scope| {
        let hasty = scope.spawn(|| {
            let mut memory = vec![0; LEN];
            let mut ops = [Op::get(config.target(0), 0, &mut memory)];
            punctual.reset();
            let deadline = in_ms(600);
            let error = run(shared, &mut ops, deadline).expect_err("never answered");
            check_typed(&error);
            Instant::now().saturating_duration_since(deadline)
        });
        std::thread::sleep(Duration::from_millis(100));
        let mut memory = vec![0; LEN];
        let mut ops = [Op::get(config.target(1), 0, &mut memory)];
        let _ = run(shared, &mut ops, in_ms(8000));
        let late = hasty.join().expect("no panic");
        println!("with the turn: late by {late:?}");
        assert!(late < Duration::from_millis(150), "late by {late:?}: it received for somebody else");
    });
}

/// A peer that ignores the deadline and sends as fast as it can.
pub fn endless() {
    let config = SampleConfig { record_bytes: 256 * MIB, ..Default::default() };
    let punctual = Punctual::new();
    let liar = Liar::greeting(64, |mut stream| {
        let zeros = vec![1; 4 << 20];
        while let Some((header, body)) = read_frame(&mut stream) {
            let op = moontide_proto::TransferOps::decode(&header, &body).expect("a read").ops();
            let len: u64 = op.iter().map(|op| op.len).sum();
            if stream.write_all(&reply(header.request, &zeros[..len as usize])).is_err() {
                return;
            }
        }
    });
    let config_of_link = TcpConfig { connections: 1, ..TcpConfig::default() };
    let link = TcpEngine::new(config_of_link, Metrics::new())
        .connect(&peer(&[liar.address]), soon())
        .expect("it greets");
    let (mut memory, mut digests) = (vec![0; 256 << 20], vec![0; 1024]);
    let op = Op::get(config.target(0), 0, &mut memory).digested(config.digest_context(0), &mut digests);
    let mut ops = [op.expect("whole pages")];
    punctual.reset();
    let (began, deadline) = (Instant::now(), in_ms(50));
    let result = run(&*link, &mut ops, deadline);
    println!("{result:?} after {:?}", began.elapsed());
    if let Err(error) = result {
        assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    }
    punctual.check(deadline, "a transfer whose bytes keep coming");
}
