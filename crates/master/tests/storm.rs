//! Malformed requests by the ten thousand: the master lives, closes what it has to close, and keeps its memory.
//!
//! One test in a process of its own, because it counts the process's sockets and memory. `MOONTIDE_STORM_REQUESTS` sets
//! how many requests there are (20,000 unless set; releases are tested with 1,000,000), `MOONTIDE_STORM_SEED` repeats a
//! run.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use moontide_meta::Rng;
use moontide_proto::{FRAME_HEADER_BYTES, FrameKind, PackedBuilder, PutEndEntry, v1};
use moontide_types::bounds::REPLICAS_MAX;
use moontide_types::{Epoch, ErrorCode, ObjectId, Term};
use prost::Message;
use support::*;

/// By how much the process may grow: buffers, and objects that mutated puts happen to make.
const GROWTH_BYTES_MAX: u64 = 64 << 20;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Valid requests to be mutated.
fn bodies() -> Vec<(FrameKind, Vec<u8>)> {
    let names = ["a", "b", "some/longer/key", "d"];
    let lookup =
        v1::GetReplicaListRequest { context: context(), keys: keys(names), lease_ms: 100, attributes: true };
    let mut remove = v1::RemoveRequest { context: context(), keys: keys(names), force: true };
    remove.context.as_mut().unwrap().deadline_ms = 1;
    let entry = |n: u8| PutEndEntry {
        id: ObjectId([n; 16]),
        epoch: Epoch::new(Term::new(1).unwrap(), n.into()).unwrap(),
        root: 7,
        outcomes: [None; REPLICAS_MAX],
        replica_count: 1,
        form: 0,
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

fn random_bytes(rng: &mut Rng, len: usize) -> Vec<u8> {
    (0..len).map(|_| rng.below(256) as u8).collect()
}

/// Changes, cuts or grows some of the bytes.
fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>) {
    for _ in 0..=rng.below(4) {
        let at = rng.below(bytes.len().max(1));
        match rng.below(5) {
            0 => bytes.truncate(at),
            1 => {
                let more = rng.below(40);
                let more = random_bytes(rng, more);
                bytes.splice(at.min(bytes.len())..at.min(bytes.len()), more);
            }
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = rng.below(256) as u8;
                }
            }
        }
    }
}

/// Sends bytes to any door, says no more, and reads until it is closed.
fn throw_at(address: SocketAddr, first: &[u8], bytes: &[u8]) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The master may close before everything is sent.
    let _ = socket.write_all(first);
    let _ = socket.write_all(bytes);
    let _ = socket.shutdown(Shutdown::Write);
    let mut waste = [0; 4096];
    loop {
        match socket.read(&mut waste) {
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
fn malformed_requests_leave_the_master_as_it_was() {
    let requests = number("MOONTIDE_STORM_REQUESTS").unwrap_or(20_000);
    let seed = number("MOONTIDE_STORM_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    println!("{requests} requests, MOONTIDE_STORM_SEED={seed}");
    let mut rng = Rng::new(seed);
    let server = start();
    let addresses = server.addresses();
    let runtime = runtime();
    let _node = runtime.block_on(FakeNode::start(addresses.grpc, 11, Offer::default()));
    let (bodies, greeting) = (bodies(), hello(moontide_proto::ProtocolVersions::CURRENT, 8));
    // Once around, so that buffers and threads exist before the process is measured.
    let mut caller = FrameCaller::connect(addresses.frame);
    assert_eq!(caller.call(FrameKind::Exist, &exist(&["a"])).header.status, None);
    for (kind, body) in &bodies {
        caller.socket.write_all(&frame(*kind, 9, 1_000, body)).unwrap();
        assert_eq!(caller.read().unwrap().header.status, None, "{kind:?}: what is mutated is valid before");
    }
    let (sockets_before, resident_before) = (sockets(), resident_bytes());

    let (mut answered, mut refused, mut closed) = (0u64, 0u64, 0u64);
    for _ in 0..requests {
        let (kind, body) = &bodies[rng.below(bodies.len())];
        match rng.below(20) {
            0 => {
                let mut bytes = frame(*kind, 7, 1_000, body);
                let at = rng.below(FRAME_HEADER_BYTES);
                bytes[at] ^= 1 << rng.below(8);
                throw_at(addresses.frame, &greeting, &bytes);
                closed += 1;
            }
            1 => {
                let len = rng.below(300);
                let garbage = random_bytes(&mut rng, len);
                let first = if rng.below(2) == 0 { &greeting[..] } else { &[] };
                throw_at(addresses.frame, first, &garbage);
                closed += 1;
            }
            2 if rng.below(10) == 0 => {
                let len = 1 + rng.below(300);
                let garbage = random_bytes(&mut rng, len);
                let door = if rng.below(2) == 0 { addresses.grpc } else { addresses.admin };
                throw_at(door, b"", &garbage);
                closed += 1;
            }
            _ => {
                let mut body = body.clone();
                mutate(&mut rng, &mut body);
                caller.socket.write_all(&frame(*kind, 9, 1_000, &body)).unwrap();
                let reply = caller.read().expect("a wrong body does not end the connection");
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
    assert_eq!(caller.call(FrameKind::Exist, &exist(&["a"])).header.status, None, "it still answers");
    assert_eq!(get(addresses.admin, "/health").0, 200);
}
