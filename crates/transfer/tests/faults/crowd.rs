//! An owner with many at its door: those who do not go on, and those who are too many.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_proto::{FixedRecord, FrameHeader, FrameKind, OpKind};
use moontide_transfer::sample::{Sample, SampleConfig};
use moontide_transfer::tcp::{Server, ServerConfig};
use moontide_transfer::{Metrics, Op, OwnedOp, Owner, Transfer, run};
use moontide_types::{Clock, SystemClock};

use crate::aborts::poll_to_the_end;
use crate::kit::{MIB, check_typed, get_into, get_right, in_ms, link, soon};
use crate::raw::{frame, greeted};

fn served(config: SampleConfig, server: ServerConfig) -> (Arc<Sample>, Server, SocketAddr) {
    let sample = Arc::new(Sample::new(config).expect("room for a sample"));
    let server = Server::start(server, Arc::clone(&sample) as _, Metrics::new()).expect("a port");
    let address = server.addresses()[0];
    (sample, server, address)
}

/// A read of 64 MiB: a record of 4 MiB, sixteen times.
fn large_read(config: &SampleConfig, record: u32, deadline_ms: u32) -> Vec<u8> {
    let mut body = Vec::new();
    for _ in 0..16 {
        config.target(record).to_wire(OpKind::Read, 0, 4 * MIB).encode(&mut body);
    }
    frame(FrameHeader { deadline_ms, ..FrameHeader::new(FrameKind::Read, 1) }, &body, &[])
}

pub fn stalled_reader() {
    let config = SampleConfig { record_bytes: 4 * MIB, readable: 4, writable: 0, ..Default::default() };
    let (sample, server, address) = served(config.clone(), ServerConfig::default());
    let content = config.content(3);
    let other = link(address, 1);
    // Who never reads is given up after a stall, or by its deadline; who reads a little, by its deadline.
    for (record, deadline_ms, trickles, within_ms) in
        [(0, 60_000, false, 1000), (1, 400, false, 400), (2, 1800, true, 1800)]
    {
        let mut stream = greeted(address).expect("there is room");
        stream.write_all(&large_read(&config, record, deadline_ms)).expect("it is small");
        let asked = Instant::now();
        std::thread::sleep(Duration::from_millis(100));
        sample.kill(record);
        let freed = |sample: &Sample| sample.heap().reclaim(SystemClock.now()).freed.len();
        assert_eq!(freed(&sample), 0, "it is pinned");
        let mut sink = vec![0; 1000];
        let released = loop {
            if trickles {
                let _ = stream.read(&mut sink);
            }
            let served = Instant::now();
            get_right(&*other, &config, 3, &content);
            assert!(served.elapsed() < Duration::from_secs(2), "others are served meanwhile");
            if freed(&sample) > 0 {
                break asked.elapsed();
            }
            assert!(asked.elapsed() < Duration::from_secs(6), "record {record} is still pinned");
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
    let config =
        SampleConfig { record_bytes: MIB, readable: 0, writable: 1, digests: false, ..Default::default() };
    let (_sample, server, address) = served(config.clone(), ServerConfig::default());
    let bytes = vec![0x11; 1 << 20];
    let mut body = Vec::new();
    config.target(0).to_wire(OpKind::Write, 0, MIB).encode(&mut body);
    let request = frame(FrameHeader::new(FrameKind::Write, 1), &body, &bytes);
    let mut stream = greeted(address).expect("there is room");
    stream.write_all(&request[..request.len() / 2]).expect("the owner reads");
    std::thread::sleep(Duration::from_millis(50));
    let other = link(address, 1);
    let began = Instant::now();
    // A put that waits for the claim may be given up as stalled at the same moment, and is tried again.
    let mut given_up = 0;
    while let Err(error) = run(&*other, &mut [Op::put(config.target(0), 0, &bytes)], soon()) {
        check_typed(&error);
        given_up += 1;
        assert!(began.elapsed() < Duration::from_secs(3), "the claim was not released: {error}");
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("put into a range that is claimed: after {:?}, {given_up} given up before", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(3));
    drop(other);
    drop(server);
}

pub fn limit() {
    let config = SampleConfig { record_bytes: 4096, readable: 1, writable: 0, ..Default::default() };
    let limits = ServerConfig { connections_max: 8, ..ServerConfig::default() };
    let (_sample, server, address) = served(config.clone(), limits);
    let content = config.content(0);
    let mut inside: Vec<TcpStream> = (0..6).filter_map(|_| greeted(address)).collect();
    assert_eq!(inside.len(), 6);
    let link = link(address, 2);
    let until = in_ms(5000);
    while server.connections() < 8 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.connections(), 8);
    for _ in 0..50 {
        assert!(greeted(address).is_none(), "one too many");
        let began = Instant::now();
        assert!(crate::kit::open(&[address], 1, in_ms(1000)).is_err(), "one too many");
        assert!(began.elapsed() < Duration::from_millis(900), "refused, and not left waiting");
    }
    get_right(&*link, &config, 0, &content);
    inside.clear();
    let until = in_ms(5000);
    let again = loop {
        match greeted(address) {
            Some(stream) => break stream,
            None => assert!(Instant::now() < until, "room again"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    drop(again);
    get_right(&*crate::kit::link(address, 4), &config, 0, &content);
    get_right(&*link, &config, 0, &content);
}

/// A batch that is cut into more frames than a connection may have in flight is sent as answers come.
pub fn more_than_in_flight() {
    let config = SampleConfig {
        record_bytes: 4 * MIB,
        readable: 1,
        writable: 4,
        digests: false,
        ..Default::default()
    };
    let content = config.content(0);
    let mut wrong = Vec::new();
    for inflight_max in [1, 3] {
        let limits = ServerConfig { inflight_max, ..ServerConfig::default() };
        let (_sample, server, address) = served(config.clone(), limits);
        for connections in [1, 2] {
            let link = link(address, connections);
            let mut memory = vec![0; 4 * content.len() * connections];
            let began = Instant::now();
            let got = get_into(&*link, &config, 0, &content, &mut memory, in_ms(2000));
            if let Err(error) = got {
                wrong.push(format!("get, {inflight_max} in flight, {connections} connections: {error}"));
            }
            let link = crate::kit::link(address, connections);
            if let Err(error) =
                crate::kit::put_from(&*link, &config, &memory[..4 * content.len()], in_ms(2000))
            {
                wrong.push(format!("put, {inflight_max} in flight, {connections} connections: {error}"));
            }
            let link = crate::kit::link(address, connections);
            let ops = (0..4).map(|_| OwnedOp::get(config.target(0), 0, vec![0; content.len()])).collect();
            if let Err(error) = poll_to_the_end(Transfer::start(&*link, ops, in_ms(2000))) {
                wrong.push(format!("future, {inflight_max} in flight, {connections} connections: {error}"));
            }
            println!("{inflight_max} in flight, {connections} connections: {:?}", began.elapsed());
        }
        drop(server);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
