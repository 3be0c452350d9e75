//! Tens of thousands of malformed requests: the master keeps running, closes connections, and does not grow.
//!
//! The only test of its process, because it counts sockets and memory of the process. `MOONTIDE_STRESS_REQUESTS` sets
//! the number of requests (default 20,000; 1,000,000 for releases), `MOONTIDE_SEED` repeats a run.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use moontide_proto::{FRAME_HEADER_BYTES, FrameKind, PackedBuilder, PutEndEntry, PutEndFlags, v1};
use moontide_rt::SplitMix64;
use moontide_types::limits::REPLICAS_MAX;
use moontide_types::{Epoch, ErrorCode, ObjectId, Term};
use prost::Message;
use support::*;

/// Maximum growth of the process in bytes: buffers, and objects created by mutated puts.
const GROWTH_BYTES_MAX: u64 = 64 << 20;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Returns valid requests, which the test mutates.
fn bodies() -> Vec<(FrameKind, Vec<u8>)> {
    let names = ["a", "b", "some/longer/key", "d"];
    let lookup =
        v1::GetReplicaListRequest { context: context(), keys: keys(names), lease_ms: 100, attributes: true };
    let mut remove = v1::RemoveRequest { context: context(), keys: keys(names), force: true };
    remove.context.as_mut().unwrap().timeout_ms = 1;
    let entry = |n: u8| PutEndEntry {
        id: ObjectId([n; 16]),
        epoch: Epoch::new(Term::new(1).unwrap(), n.into()).unwrap(),
        root: 7,
        outcomes: [None; REPLICAS_MAX],
        replica_count: 1,
        flags: PutEndFlags::NONE,
        stripe_count: 2,
    };
    let entries: PackedBuilder<PutEndEntry> = [entry(1), entry(2)].into_iter().collect();
    let entries = entries.finish().into();
    let end = v1::PutEndRequest { context: context(), entries, stripe_roots: vec![1, 2, 3, 4] };
    vec![
        (FrameKind::Exist, exist(&names).encode_to_vec()),
        (FrameKind::GetReplicaList, lookup.encode_to_vec()),
        (FrameKind::PutStart, put_start(&names, 100).encode_to_vec()),
        (FrameKind::PutEnd, end.encode_to_vec()),
        (FrameKind::Remove, remove.encode_to_vec()),
    ]
}

fn random_bytes(rng: &mut SplitMix64, len: usize) -> Vec<u8> {
    (0..len).map(|_| rng.index(256) as u8).collect()
}

/// Changes, truncates or extends bytes at random.
fn mutate(rng: &mut SplitMix64, bytes: &mut Vec<u8>) {
    for _ in 0..=rng.index(4) {
        let at = rng.index(bytes.len().max(1));
        match rng.index(5) {
            0 => bytes.truncate(at),
            1 => {
                let more = rng.index(40);
                let more = random_bytes(rng, more);
                bytes.splice(at.min(bytes.len())..at.min(bytes.len()), more);
            }
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = rng.index(256) as u8;
                }
            }
        }
    }
}

/// Sends bytes to a server, closes the sending side, and reads until the connection is closed.
fn send_raw(address: SocketAddr, first: &[u8], bytes: &[u8]) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The master may close before everything is sent.
    let _ = socket.write_all(first);
    let _ = socket.write_all(bytes);
    let _ = socket.shutdown(Shutdown::Write);
    let mut discarded = [0; 4096];
    loop {
        match socket.read(&mut discarded) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                panic!("{address} does not close")
            }
            Err(_) => return,
        }
    }
}

#[test]
fn malformed_requests_do_not_leak_or_stop_master() {
    let requests = number("MOONTIDE_STRESS_REQUESTS").unwrap_or(20_000);
    let seed = number("MOONTIDE_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    println!("{requests} requests, MOONTIDE_SEED={seed}");
    let mut rng = SplitMix64::new(seed);
    let server = start();
    let addresses = server.addresses();
    let runtime = runtime();
    let _node = runtime.block_on(FakeNode::start(addresses.grpc, 11, FakeNodeConfig::default()));
    let (bodies, greeting) = (bodies(), hello(moontide_proto::ProtocolVersions::CURRENT, 8));
    // Warm-up, so that buffers and threads exist before the first measurement.
    let mut caller = FrameCaller::connect(addresses.frame);
    assert_eq!(caller.call(FrameKind::Exist, &exist(&["a"])).header.status, None);
    for (kind, body) in &bodies {
        caller.socket.write_all(&frame(*kind, 9, 1_000, body)).unwrap();
        assert_eq!(
            caller.read().unwrap().header.status,
            None,
            "{kind:?}: the request is valid before its mutation"
        );
    }
    let (sockets_before, resident_before) = (sockets(), resident_bytes());

    let (mut answered, mut refused, mut closed) = (0u64, 0u64, 0u64);
    for _ in 0..requests {
        let (kind, body) = &bodies[rng.index(bodies.len())];
        match rng.index(20) {
            0 => {
                let mut bytes = frame(*kind, 7, 1_000, body);
                let at = rng.index(FRAME_HEADER_BYTES);
                bytes[at] ^= 1 << rng.index(8);
                send_raw(addresses.frame, &greeting, &bytes);
                closed += 1;
            }
            1 => {
                let len = rng.index(300);
                let garbage = random_bytes(&mut rng, len);
                let first = if rng.index(2) == 0 { &greeting[..] } else { &[] };
                send_raw(addresses.frame, first, &garbage);
                closed += 1;
            }
            2 if rng.index(10) == 0 => {
                let len = 1 + rng.index(300);
                let garbage = random_bytes(&mut rng, len);
                let address = if rng.index(2) == 0 { addresses.grpc } else { addresses.admin };
                send_raw(address, b"", &garbage);
                closed += 1;
            }
            _ => {
                let mut body = body.clone();
                mutate(&mut rng, &mut body);
                caller.socket.write_all(&frame(*kind, 9, 1_000, &body)).unwrap();
                let reply = caller.read().expect("an invalid body does not end the connection");
                assert_eq!(reply.header.request, 9);
                match reply.header.status {
                    None => answered += 1,
                    Some(code) => {
                        assert_ne!(code, ErrorCode::Internal, "{kind:?} {body:02x?}");
                        refused += 1;
                    }
                }
            }
        }
    }
    println!("{answered} answered, {refused} refused, {closed} connections closed");
    assert!(refused > 0 && closed > 0 && answered > 0);
    eventually("all connections are closed", || sockets() <= sockets_before);
    let growth = resident_bytes().saturating_sub(resident_before);
    println!("grown by {} KiB", growth >> 10);
    assert!(growth < GROWTH_BYTES_MAX, "grown by {growth} bytes");
    assert_eq!(caller.call(FrameKind::Exist, &exist(&["a"])).header.status, None, "the master still serves");
    assert_eq!(get(addresses.admin, "/health").0, 200);
}
