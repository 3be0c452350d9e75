//! Clients that send malformed requests to an owner.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_proto::{FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Hello, OpKind, TransferOp};
use moontide_transfer::sample::SampleNodeConfig;

use crate::harness::{MIB, Rng, count, counts_of, get_ok, in_ms, link, rss_of, wait_for_counts};
use crate::process::OwnerProcess;
use crate::raw::{connect_raw, hello, read_header};

/// Threads that send malformed frames.
const SENDERS: usize = 4;

/// Most frames that a sender sends at once.
const BATCH_MAX: u64 = 24;

pub fn frames() {
    let mut rng = Rng::seeded();
    let total = u64::from(count(100_000, 1_000_000));
    let config = SampleNodeConfig { record_bytes: MIB / 4, readable: 4, writable: 4, ..Default::default() };
    let owner = OwnerProcess::start(&config);
    let contents: Vec<Vec<u8>> = (0..4).map(|record| config.content(record)).collect();
    let link = link(owner.address(), 2);
    get_ok(&*link, &config, 0, &contents[0]);
    // The listener, the main thread, and one thread for each connection of this test.
    let until = in_ms(5000);
    while counts_of(owner.pid()).1 < 4 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (before, rss_before) = (counts_of(owner.pid()), rss_of(owner.pid()));

    let (sent, served, finished) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let mut rss_max = 0;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            while !finished.load(Ordering::Relaxed) {
                let record = served.fetch_add(1, Ordering::Relaxed) as u32 % 4;
                get_ok(&*link, &config, record, &contents[record as usize]);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let senders: Vec<_> = (0..SENDERS)
            .map(|_| {
                let (mut rng, address, config, sent) = (rng.fork(), owner.address(), &config, &sent);
                scope.spawn(move || {
                    while sent.load(Ordering::Relaxed) < total {
                        sent.fetch_add(send_malformed(address, config, &mut rng), Ordering::Relaxed);
                    }
                })
            })
            .collect();
        while !senders.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            rss_max = rss_max.max(rss_of(owner.pid()));
            std::thread::sleep(Duration::from_millis(10));
        }
        finished.store(true, Ordering::Relaxed);
        client.join().expect("a correct client is served");
    });
    println!(
        "{} frames parsed in {:?}; {} gets served meanwhile; resident {} KiB before, at most {} KiB",
        sent.into_inner(),
        began.elapsed(),
        served.into_inner(),
        rss_before >> 10,
        rss_max >> 10
    );
    // Each sender can make the owner hold one body; the sample itself is 2 MiB.
    assert!(rss_max < rss_before + (96 << 20), "resident memory grew from {rss_before} to {rss_max}");
    wait_for_counts(owner.pid(), before, "the owner after malformed requests");
    get_ok(&*link, &config, 3, &contents[3]);
}

/// Sends malformed frames over one connection. Returns how many frames the owner has parsed: those that it replied to,
/// and the one for which it closed the connection.
fn send_malformed(address: SocketAddr, config: &SampleNodeConfig, rng: &mut Rng) -> u64 {
    let first = rng.within(0, 20);
    let (stream, mut bytes) = match first {
        // Frames without a handshake.
        0 => (TcpStream::connect(address).ok(), Vec::new()),
        // A Hello with a changed byte.
        1 => {
            let mut bytes = hello(FrameKind::Hello, 0, 64);
            let at = rng.within(0, bytes.len() as u64) as usize;
            bytes[at] ^= rng.within(1, 256) as u8;
            (TcpStream::connect(address).ok(), bytes)
        }
        _ => (connect_raw(address), Vec::new()),
    };
    let Some(mut stream) = stream else { return 0 };
    let frames = rng.within(1, BATCH_MAX);
    for _ in 0..frames {
        match rng.within(0, 40) {
            0 => {
                let mut noise = vec![0; rng.within(1, 300) as usize];
                rng.fill(&mut noise);
                bytes.extend(noise);
            }
            1..=4 => any_frame(&mut bytes, rng),
            5 => header_only_frame(&mut bytes, rng),
            _ => mutated_request(&mut bytes, config, rng),
        }
    }
    let mut reader = stream.try_clone().expect("a handle");
    let _ = reader.set_read_timeout(Some(Duration::from_secs(5)));
    if rng.within(0, 8) == 0 {
        // Closes the connection without waiting for replies.
        let _ = stream.write_all(&bytes);
        return 1;
    }
    std::thread::scope(|scope| {
        // Replies are received, so that the owner does not block on sending.
        let replies = scope.spawn(move || {
            let mut count = 0;
            while let Some(header) = read_header(&mut reader) {
                let len = u64::from(header.body_len) + header.payload_len;
                let received = std::io::copy(&mut (&mut reader).take(len), &mut std::io::sink());
                if !received.is_ok_and(|received| received == len) {
                    break;
                }
                count += 1;
            }
            count
        });
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        frames.min(1 + replies.join().expect("no panic"))
    })
}

fn any_kind(rng: &mut Rng) -> FrameKind {
    loop {
        // Mostly kinds that the owner handles: any other ends the connection.
        let number = if rng.within(0, 20) == 0 {
            rng.within(1, 60)
        } else {
            [34, 36, 39, 42, 44, 46, 48, 52][rng.within(0, 8) as usize]
        };
        if let Some(kind) = FrameKind::from_number(number as u16) {
            return kind;
        }
    }
}

/// Appends a frame with a valid header and a random body.
fn any_frame(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let kind = any_kind(rng);
    let element = match kind {
        FrameKind::Read | FrameKind::Write | FrameKind::Release | FrameKind::Describe => TransferOp::BYTES,
        _ => 2,
    };
    let max = kind.body_len_max().min(if rng.within(0, 200) == 0 { 100_000 } else { 500 });
    // Kinds with fixed-size elements have at least one element.
    let min = if element > 2 || kind == FrameKind::Load { 80 } else { 0 };
    let min = if matches!(kind, FrameKind::Hello | FrameKind::HelloAck) { Hello::BYTES } else { min };
    let mut body = vec![0; (rng.within(min.min(max) as u64, max as u64 + 1) as usize) / element * element];
    rng.fill(&mut body);
    let header = FrameHeader {
        body_len: body.len() as u32,
        payload_len: if kind == FrameKind::Write { rng.within(0, 1000) } else { 0 },
        status: (kind == FrameKind::Error).then_some(moontide_types::ErrorCode::Busy),
        ..FrameHeader::new(kind, rng.draw())
    };
    bytes.extend(header.encode());
    bytes.extend(body);
    bytes.extend(vec![0xcc; header.payload_len as usize]);
}

/// Appends a header that announces the longest possible body, without a body.
fn header_only_frame(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let kind = any_kind(rng);
    let element = match kind {
        FrameKind::Read | FrameKind::Write | FrameKind::Release | FrameKind::Describe => TransferOp::BYTES,
        _ => 2,
    };
    let body_len = (kind.body_len_max() / element * element) as u32;
    let status = (kind == FrameKind::Error).then_some(moontide_types::ErrorCode::Busy);
    let header = FrameHeader { body_len, status, ..FrameHeader::new(kind, rng.draw()) };
    bytes.extend(header.encode());
}

/// Appends a request that is valid except for a few bits.
fn mutated_request(bytes: &mut Vec<u8>, config: &SampleNodeConfig, rng: &mut Rng) {
    let write = rng.within(0, 3) == 0;
    let (kind, op_kind, first) =
        if write { (FrameKind::Write, OpKind::Write, 4) } else { (FrameKind::Read, OpKind::Read, 0) };
    let ops = rng.within(1, 5);
    let mut body = Vec::new();
    let mut payload_len = 0;
    for _ in 0..ops {
        let record = first + rng.within(0, 4) as u32;
        let len = rng.within(0, 3000);
        config.target(record).to_wire(op_kind, rng.within(0, MIB / 4), len).encode(&mut body);
        payload_len += len;
    }
    let header = FrameHeader {
        body_len: body.len() as u32,
        payload_len: if write { payload_len } else { 0 },
        timeout_ms: rng.within(1, 5000) as u32,
        ..FrameHeader::new(kind, rng.draw())
    };
    let from = bytes.len();
    bytes.extend(header.encode());
    bytes.extend(body);
    let end = bytes.len();
    if write {
        bytes.extend(vec![0xdd; payload_len as usize]);
    }
    let flips = if rng.within(0, 4) == 0 { rng.within(1, 4) } else { 0 };
    for _ in 0..flips {
        // Mostly in the body: a header with a wrong checksum is not parsed.
        let low = if rng.within(0, 30) == 0 { from } else { from + FRAME_HEADER_BYTES };
        let at = rng.within(low as u64, end as u64) as usize;
        bytes[at] ^= 1 << rng.within(0, 8);
    }
}
