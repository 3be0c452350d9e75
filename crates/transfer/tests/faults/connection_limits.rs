//! A server with stalled clients, and with more connections than its limit.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_proto::{FixedRecord, FrameHeader, FrameKind, OpKind};
use moontide_transfer::sample::{SampleNode, SampleNodeConfig};
use moontide_transfer::tcp::{TcpConfig, TcpEngine, TcpServer, TcpServerConfig};
use moontide_transfer::{Engine, Metrics, Op, OwnedOp, Owner, Transfer, run};
use moontide_types::{Clock, ErrorCode, SystemClock};
use rustix::net::{AddressFamily, SocketType};

use crate::aborts::block_on;
use crate::harness::{MIB, check_typed, get_into, get_ok, in_ms, link, soon};
use crate::raw::{connect_raw, frame, hello, read_frame};

fn serve(config: SampleNodeConfig, server: TcpServerConfig) -> (Arc<SampleNode>, TcpServer, SocketAddr) {
    let sample = Arc::new(SampleNode::new(config).expect("memory for a sample"));
    let server = TcpServer::start(server, Arc::clone(&sample) as _, Metrics::new()).expect("a port");
    let address = server.addresses()[0];
    (sample, server, address)
}

/// Encodes a read of 64 MiB: a record of 4 MiB, sixteen times.
fn large_read(config: &SampleNodeConfig, record: u32, deadline_ms: u32) -> Vec<u8> {
    let mut body = Vec::new();
    for _ in 0..16 {
        config.target(record).to_wire(OpKind::Read, 0, 4 * MIB).encode(&mut body);
    }
    frame(FrameHeader { timeout_ms: deadline_ms, ..FrameHeader::new(FrameKind::Read, 1) }, &body, &[])
}

pub fn stalled_reader() {
    let config = SampleNodeConfig { record_bytes: 4 * MIB, readable: 4, writable: 0, ..Default::default() };
    let (sample, server, address) = serve(config.clone(), TcpServerConfig::default());
    let content = config.content(3);
    let other = link(address, 1);
    // A client that never reads is closed after a stall, or at its deadline; one that reads slowly, at its deadline.
    for (record, deadline_ms, trickles, within_ms) in
        [(0, 60_000, false, 1000), (1, 400, false, 400), (2, 1800, true, 1800)]
    {
        let mut stream = connect_raw(address).expect("connections are below the limit");
        stream.write_all(&large_read(&config, record, deadline_ms)).expect("the request is small");
        let sent_at = Instant::now();
        std::thread::sleep(Duration::from_millis(100));
        sample.kill(record);
        let freed = |sample: &SampleNode| sample.heap().reclaim(SystemClock.now()).freed.len();
        assert_eq!(freed(&sample), 0, "the record is pinned");
        let mut sink = vec![0; 1000];
        let released = loop {
            if trickles {
                let _ = stream.read(&mut sink);
            }
            let began = Instant::now();
            get_ok(&*other, &config, 3, &content);
            assert!(began.elapsed() < Duration::from_secs(2), "other clients are served meanwhile");
            if freed(&sample) > 0 {
                break sent_at.elapsed();
            }
            assert!(sent_at.elapsed() < Duration::from_secs(6), "record {record} is still pinned");
            std::thread::sleep(Duration::from_millis(20));
        };
        println!("deadline {deadline_ms} ms, trickles {trickles}: released after {released:?}");
        assert!(released < Duration::from_millis(within_ms + 500), "{released:?} for {within_ms} ms");
        assert!(trickles || released >= Duration::from_millis(within_ms.min(700) - 50));
    }
    drop(other);
    drop(server);
}

pub fn stalled_writer() {
    let config = SampleNodeConfig {
        record_bytes: MIB,
        readable: 0,
        writable: 1,
        digests: false,
        ..Default::default()
    };
    let (_sample, server, address) = serve(config.clone(), TcpServerConfig::default());
    let bytes = vec![0x11; 1 << 20];
    let mut body = Vec::new();
    config.target(0).to_wire(OpKind::Write, 0, MIB).encode(&mut body);
    let request = frame(FrameHeader::new(FrameKind::Write, 1), &body, &bytes);
    let mut stream = connect_raw(address).expect("connections are below the limit");
    stream.write_all(&request[..request.len() / 2]).expect("the owner receives");
    std::thread::sleep(Duration::from_millis(50));
    let other = link(address, 1);
    let began = Instant::now();
    // A put that waits for the claim may be closed as stalled at the same moment, and is tried again.
    let mut retries = 0;
    while let Err(error) = run(&*other, &mut [Op::put(config.target(0), 0, &bytes)], soon()) {
        check_typed(&error);
        retries += 1;
        assert!(began.elapsed() < Duration::from_secs(3), "the claim was not released: {error}");
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("put into a claimed range: after {:?}, {retries} retries", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(3));
    drop(other);
    drop(server);
}

pub fn limit() {
    let config = SampleNodeConfig { record_bytes: 4096, readable: 1, writable: 0, ..Default::default() };
    let limits = TcpServerConfig { connections_max: 8, ..TcpServerConfig::default() };
    let (_sample, server, address) = serve(config.clone(), limits);
    let content = config.content(0);
    let mut open: Vec<TcpStream> = (0..6).filter_map(|_| connect_raw(address)).collect();
    assert_eq!(open.len(), 6);
    let link = link(address, 2);
    let until = in_ms(5000);
    while server.connections() < 8 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.connections(), 8);
    for _ in 0..50 {
        assert!(connect_raw(address).is_none(), "connection over the limit");
        let began = Instant::now();
        assert!(crate::harness::open(&[address], 1, in_ms(1000)).is_err(), "connection over the limit");
        assert!(began.elapsed() < Duration::from_millis(900), "refused before the deadline");
    }
    get_ok(&*link, &config, 0, &content);
    open.clear();
    let until = in_ms(5000);
    let again = loop {
        match connect_raw(address) {
            Some(stream) => break stream,
            None => assert!(Instant::now() < until, "a connection is accepted after others closed"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    drop(again);
    get_ok(&*crate::harness::link(address, 4), &config, 0, &content);
    get_ok(&*link, &config, 0, &content);
}

/// A batch with more frames than a connection may have in flight is sent as replies arrive.
pub fn more_than_in_flight() {
    let config = SampleNodeConfig {
        record_bytes: 4 * MIB,
        readable: 1,
        writable: 4,
        digests: false,
        ..Default::default()
    };
    let content = config.content(0);
    let mut failures = Vec::new();
    for inflight_max in [1, 3] {
        let limits = TcpServerConfig { inflight_max, ..TcpServerConfig::default() };
        let (_sample, server, address) = serve(config.clone(), limits);
        for connections in [1, 2] {
            let link = link(address, connections);
            let mut memory = vec![0; 4 * content.len() * connections];
            let began = Instant::now();
            let got = get_into(&*link, &config, 0, &content, &mut memory, in_ms(2000));
            if let Err(error) = got {
                failures.push(format!("get, {inflight_max} in flight, {connections} connections: {error}"));
            }
            let link = crate::harness::link(address, connections);
            if let Err(error) =
                crate::harness::put_from(&*link, &config, &memory[..4 * content.len()], in_ms(2000))
            {
                failures.push(format!("put, {inflight_max} in flight, {connections} connections: {error}"));
            }
            let link = crate::harness::link(address, connections);
            let ops = (0..4).map(|_| OwnedOp::get(config.target(0), 0, vec![0; content.len()])).collect();
            if let Err(error) = block_on(Transfer::start(&*link, ops, in_ms(2000))) {
                failures
                    .push(format!("future, {inflight_max} in flight, {connections} connections: {error}"));
            }
            println!("{inflight_max} in flight, {connections} connections: {:?}", began.elapsed());
        }
        drop(server);
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

fn small_sample() -> SampleNodeConfig {
    SampleNodeConfig { record_bytes: 4096, readable: 1, writable: 0, ..Default::default() }
}

/// Waits until the peer has closed the stream.
#[track_caller]
fn assert_closed(stream: &mut TcpStream, within: Duration, what: &str) {
    stream.set_read_timeout(Some(within)).expect("a valid timeout");
    match stream.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        other => panic!("{what} is not closed after {within:?}: {other:?}"),
    }
}

/// Connections that say nothing lock no peer out: the oldest of them is closed for each new one.
pub fn silent() {
    let config = small_sample();
    let limits = TcpServerConfig {
        connections_max: 8,
        handshake_timeout: Duration::from_secs(60),
        ..TcpServerConfig::default()
    };
    let (_sample, server, address) = serve(config.clone(), limits);
    let mut silent: Vec<TcpStream> = Vec::new();
    let until = in_ms(5000);
    for count in 1..=8 {
        silent.push(TcpStream::connect(address).expect("the server listens"));
        while server.connections() < count {
            assert!(Instant::now() < until, "{count} connections are open");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let began = Instant::now();
    let established: Vec<TcpStream> = (0..6).filter_map(|_| connect_raw(address)).collect();
    assert_eq!(established.len(), 6, "each of them replaces a silent connection");
    get_ok(&*link(address, 2), &config, 0, &config.content(0));
    assert!(began.elapsed() < Duration::from_secs(20), "no peer waited for the end of a handshake");
    for (index, stream) in silent.iter_mut().take(6).enumerate() {
        assert_closed(stream, Duration::from_secs(5), &format!("silent connection {index}"));
    }
    // Those that have finished their handshakes do not give way.
    let mut more: Vec<TcpStream> = Vec::new();
    let until = in_ms(5000);
    while more.len() < 2 {
        more.extend(connect_raw(address));
        assert!(Instant::now() < until, "the connections of the link are closed");
    }
    for _ in 0..20 {
        assert!(connect_raw(address).is_none(), "connection over the limit");
    }
    for mut stream in established {
        assert!(stream.write_all(&frame(FrameHeader::new(FrameKind::Ping, 3), &[], &[])).is_ok());
        let (header, _) = read_frame(&mut stream).expect("the connection is open");
        assert_eq!((header.kind, header.request), (FrameKind::Pong, 3));
    }
}

/// One host cannot take all connections of a server.
pub fn per_peer() {
    let config = small_sample();
    let limits =
        TcpServerConfig { connections_max: 8, connections_per_peer_max: 4, ..TcpServerConfig::default() };
    let (_sample, _server, address) = serve(config, limits);
    let open: Vec<TcpStream> = (0..4).filter_map(|_| connect_raw(address)).collect();
    assert_eq!(open.len(), 4);
    assert!(connect_raw(address).is_none(), "a fifth connection of one host");
    // Another host: a connection from another address.
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 2], 0))).expect("an address of this host");
    rustix::net::connect(&socket, &address).expect("the server listens");
    let mut other = TcpStream::from(socket);
    other.write_all(&hello(FrameKind::Hello, 0, 64)).expect("the server receives");
    assert_eq!(read_frame(&mut other).expect("it is accepted").0.kind, FrameKind::HelloAck);
    drop(open);
}

/// A connection that is never used is closed, and a client notices that before its first request.
pub fn unused() {
    let config = small_sample();
    let limits = TcpServerConfig { unused_timeout: Duration::from_millis(200), ..TcpServerConfig::default() };
    let (_sample, server, address) = serve(config.clone(), limits);
    let mut unused = connect_raw(address).expect("below the limit");
    let mut used = connect_raw(address).expect("below the limit");
    let ping = |stream: &mut TcpStream| {
        stream.write_all(&frame(FrameHeader::new(FrameKind::Ping, 3), &[], &[])).expect("it is open");
        assert_eq!(read_frame(stream).expect("it is open").0.kind, FrameKind::Pong);
    };
    ping(&mut used);
    let metrics = Metrics::new();
    let tcp = TcpConfig { connections: 2, ..TcpConfig::default() };
    let link = TcpEngine::new(tcp, Arc::clone(&metrics))
        .connect(&crate::harness::peer(&[address]), crate::harness::soon())
        .expect("the server listens");
    assert_closed(&mut unused, Duration::from_secs(10), "the unused connection");
    let until = in_ms(10_000);
    while server.connections() > 1 {
        assert!(Instant::now() < until, "the connections of the link are closed");
        std::thread::sleep(Duration::from_millis(10));
    }
    ping(&mut used);
    get_ok(&*link, &config, 0, &config.content(0));
    let mut registry = prometheus_client::registry::Registry::default();
    metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).expect("a string takes all");
    assert!(!text.contains("frame_retries_total{"), "no request was sent on a closed connection: {text}");
}

/// Bodies that arrive byte by byte end in time, and hold no more memory than the budget of all connections.
pub fn bodies() {
    let config = small_sample();
    let limits = TcpServerConfig {
        body_bytes_max: MIB,
        body_timeout: Duration::from_secs(3),
        ..TcpServerConfig::default()
    };
    let (_sample, server, address) = serve(config.clone(), limits);
    let begin = |len: usize| {
        let header = FrameHeader { timeout_ms: 60_000, ..FrameHeader::new(FrameKind::Begin, 9) };
        frame(header, &vec![0xff; len], &[])
    };
    let code = |stream: &mut TcpStream| read_frame(stream).and_then(|(header, _)| header.status);
    let mut slow = connect_raw(address).expect("below the limit");
    let body = begin(MIB as usize);
    slow.write_all(&body[..body.len() / 2]).expect("the server receives");
    let began = Instant::now();
    let (link, mut other) = (link(address, 1), connect_raw(address).expect("below the limit"));
    std::thread::sleep(Duration::from_millis(100));
    let trickle = std::thread::spawn(move || {
        let mut sent = 0;
        while slow.write_all(&[0xff]).is_ok() && began.elapsed() < Duration::from_secs(20) {
            sent += 1;
            std::thread::sleep(Duration::from_millis(50));
        }
        (began.elapsed(), sent)
    });
    other.write_all(&begin(200 << 10)).expect("the server receives");
    assert_eq!(code(&mut other), Some(ErrorCode::Busy), "the slow body holds the budget");
    // Small bodies need no budget.
    other.write_all(&begin(60 << 10)).expect("the server receives");
    assert!(code(&mut other).is_some_and(|code| code != ErrorCode::Busy), "not a BeginRequest");
    get_ok(&*link, &config, 0, &config.content(0));
    let (ended, sent) = trickle.join().expect("no panic");
    println!("the slow body ended after {ended:?} and {sent} bytes");
    assert!(sent > 10, "it was not ended as stalled");
    assert!(ended > Duration::from_secs(2) && ended < Duration::from_secs(6), "{ended:?}");
    other.write_all(&begin(200 << 10)).expect("the server receives");
    assert!(code(&mut other).is_some_and(|code| code != ErrorCode::Busy), "the budget is free again");
    drop((link, server));
}
