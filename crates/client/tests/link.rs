//! The blocking link against a test server with configurable faults.

mod server;

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use moontide_client::{BlockingLink, LinkConfig, LinkError, LinkLoad, MasterHint, ProtocolError};
use moontide_proto::convert::{CallerId, OutcomesResponse, RemoveRequest, RequestContext, Wire};
use moontide_proto::{FrameKind, PackedKeys, PackedKeysBuilder, Token};
use moontide_types::limits::{BATCH_KEYS_MAX, LEASE_MS_MAX};
use moontide_types::{ErrorCode, Key, MapVersion, Tenant, Term};
use server::{Greeting, Plan, Server, eventually, id_of, rule};

fn config(server: &Server) -> LinkConfig {
    // Long enough for a busy machine; tests of timeouts set their own.
    LinkConfig { timeout_ms: 60_000, ..LinkConfig::new(&server.address, CallerId(7)) }
}

fn connect(config: LinkConfig) -> BlockingLink {
    BlockingLink::connect(config).expect("the server listens")
}

fn key(bytes: &[u8]) -> Key<'_> {
    Key::new(bytes).expect("a key")
}

/// Returns the unique key of a call, with any last byte.
fn key_of(thread: u64, call: u64) -> [u8; 17] {
    let mut key = [0; 17];
    key[..8].copy_from_slice(&thread.to_le_bytes());
    key[8..16].copy_from_slice(&call.to_le_bytes());
    key[16] = (thread.wrapping_mul(31) + call.wrapping_mul(7)) as u8;
    key
}

#[test]
fn concurrent_threads_get_their_own_replies() {
    const THREADS: u64 = 64;
    const CALLS: u64 = 1600; // × 64 > 100,000
    let server = Server::start();
    let link = connect(config(&server));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let link = &link;
            scope.spawn(move || {
                for call in 0..CALLS {
                    let bytes = key_of(thread, call);
                    let key = key(&bytes);
                    if call % 4 == 0 {
                        let found = link.lookup_one(Tenant::DEFAULT, key, 5).expect("a reply");
                        match (found, rule(key)) {
                            (Ok(found), Ok(true)) => {
                                assert_eq!(found.object.id, id_of(key), "reply of another caller");
                                assert_eq!((found.object.valid_ms, found.handles.len()), (5, 1));
                            }
                            (Err(code), expected) => {
                                assert_eq!(code, expected.err().unwrap_or(ErrorCode::NotFound));
                            }
                            (found, expected) => panic!("got {found:?}, expected {expected:?}"),
                        }
                    } else {
                        assert_eq!(link.exist_one(Tenant::DEFAULT, key).expect("a reply"), rule(key));
                    }
                }
            });
        }
    });
    assert_eq!(server.keys() as u64, THREADS * CALLS);
    assert_eq!(server.connections(), 1);
    assert!(server.frames() * 2 < server.keys(), "{} frames for {} keys", server.frames(), server.keys());
    assert_eq!(link.load(), LinkLoad::default());
}

#[test]
fn keys_queued_while_two_are_in_flight_form_one_batch() {
    let server = Server::start();
    server.set_plan(Plan::Hold);
    let link = connect(config(&server));
    thread::scope(|scope| {
        for i in 0..64u8 {
            let link = &link;
            scope.spawn(move || {
                assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[i])).unwrap(), rule(key(&[i])))
            });
        }
        // The first two were sent, each alone; the others wait for a reply.
        eventually("all keys are queued", || link.load() == LinkLoad { in_flight: 2, queued_keys: 62 });
        eventually("two frames", || server.frames() == 2);
        server.release();
    });
    assert_eq!((server.frames(), server.keys()), (3, 64));
}

#[test]
fn single_caller_is_not_delayed_by_batching() {
    let server = Server::start();
    let link = connect(config(&server));
    for i in 0..100u8 {
        assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[i])).unwrap(), rule(key(&[i])));
    }
    assert_eq!((server.frames(), server.keys()), (100, 100));
}

#[test]
fn out_of_order_replies_reach_their_callers() {
    let server = Server::start();
    server.set_plan(Plan::Hold);
    let link = connect(config(&server));
    thread::scope(|scope| {
        for i in 1..=16u8 {
            let link = &link;
            scope.spawn(move || {
                let bytes: Vec<[u8; 2]> = (0..i * 3).map(|j| [i, j]).collect();
                let keys: Vec<Key<'_>> = bytes.iter().map(|bytes| key(bytes)).collect();
                let expected: Vec<_> = keys.iter().map(|&key| rule(key)).collect();
                assert_eq!(link.exist(Tenant::DEFAULT, &keys).unwrap(), expected);
            });
        }
        eventually("all are in flight", || server.frames() == 16);
        server.release();
    });
}

#[test]
fn large_batches_and_single_keys_share_one_connection() {
    let server = Server::start();
    let link = connect(config(&server));
    // Requests of 2.5 MiB and replies of 0.4 MiB: more than the socket buffer, so that writers wait while the leader
    // reads.
    let bytes: Vec<[u8; 640]> = (0..BATCH_KEYS_MAX).map(|i| [i as u8; 640]).collect();
    let keys: Vec<Key<'_>> = bytes.iter().map(|bytes| key(bytes)).collect();
    thread::scope(|scope| {
        for thread in 0..8 {
            let (link, keys) = (&link, &keys);
            scope.spawn(move || {
                for _ in 0..8 {
                    if thread % 2 == 0 {
                        let reply = link.lookup(Tenant::DEFAULT, keys, 0, true).unwrap();
                        let replicas = reply.replicas().unwrap();
                        assert_eq!((replicas.list.len(), replicas.attributes), (keys.len(), None));
                        for ((entry, handles), &key) in replicas.list.iter().zip(keys) {
                            assert_eq!(entry.code.is_none(), rule(key) == Ok(true));
                            assert_eq!(handles.len(), usize::from(entry.code.is_none()));
                        }
                    } else {
                        for &key in &keys[..200] {
                            assert_eq!(link.exist_one(Tenant::DEFAULT, key).unwrap(), rule(key));
                        }
                    }
                }
            });
        }
    });
    assert_eq!(server.connections(), 1);
}

#[test]
fn generic_call_round_trips_and_zero_timeout_is_rejected() {
    let server = Server::start();
    let link = connect(config(&server));
    link.set_known(MasterHint { map_version: MapVersion(3), term: Term::new(4).unwrap() });
    let mut packed = PackedKeysBuilder::new();
    [[1], [255], [2]].iter().for_each(|bytes| packed.push(key(bytes)).unwrap());
    let packed = packed.finish();
    let context = RequestContext {
        tenant: Tenant::DEFAULT,
        group: None,
        map_version: MapVersion(3),
        term: Term::ZERO,
        caller: CallerId(7),
        session: None,
        timeout_ms: 60_000,
        token: Token::NONE,
    };
    let remove = RemoveRequest { context, keys: PackedKeys::decode(&packed).unwrap(), force: false };
    let reply = link.call(&remove).unwrap();
    let outcomes = OutcomesResponse::from_wire(&reply).unwrap().into_result().unwrap();
    assert!(outcomes.codes.iter().eq([None, Some(ErrorCode::Busy), None]));

    let no_time = RemoveRequest { context: RequestContext { timeout_ms: 0, ..context }, ..remove };
    assert_eq!(link.call(&no_time).unwrap_err().code(), ErrorCode::InvalidArgument);
}

#[test]
fn oversized_request_fails_without_being_sent() {
    let server = Server::start();
    let link = connect(config(&server));
    let lease = link.lookup_one(Tenant::DEFAULT, key(b"a"), LEASE_MS_MAX + 1).unwrap_err();
    let many = link.exist(Tenant::DEFAULT, &vec![key(b"a"); BATCH_KEYS_MAX + 1]).unwrap_err();
    for error in [lease, many] {
        assert!(matches!(error, LinkError::Request(_)), "{error}");
        assert_eq!((error.code(), error.is_retryable()), (ErrorCode::TooLarge, false));
    }
    assert_eq!(server.frames(), 0);
}

/// Checks that a call waited between once and twice its timeout.
fn check_waited(timeout: Duration, started: Instant) {
    let waited = started.elapsed();
    assert!(waited >= timeout && waited < 2 * timeout, "waited {waited:?}, the timeout is {timeout:?}");
}

#[test]
fn unanswered_calls_time_out_and_keep_connection() {
    let server = Server::start();
    server.set_plan(Plan::Forget);
    let link = connect(LinkConfig { timeout_ms: 400, ..config(&server) });
    let timeout = Duration::from_millis(400);
    thread::scope(|scope| {
        // One thread leads, some keys are in flight, some are queued; some calls are batches.
        for i in 0..12u8 {
            let link = &link;
            scope.spawn(move || {
                let started = Instant::now();
                let error = match i {
                    0..8 => link.exist_one(Tenant::DEFAULT, key(&[i])).unwrap_err(),
                    _ => link.exist(Tenant::DEFAULT, &[key(&[i])]).unwrap_err(),
                };
                assert!(matches!(error, LinkError::Deadline { deadline_ms: 400, .. }), "{error}");
                assert_eq!(error.code(), ErrorCode::DeadlineExceeded);
                check_waited(timeout, started);
            });
        }
    });
    assert_eq!(link.load(), LinkLoad::default(), "a request is left");
    server.set_plan(Plan::Reply);
    assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap(), Ok(true));
    assert_eq!(server.connections(), 1, "a slow master is not a broken connection");
    eventually("a cancel arrives", || server.cancels() > 0);
}

#[test]
fn queued_key_is_sent_after_in_flight_batch_times_out() {
    let server = Server::start();
    server.set_plan(Plan::Forget);
    let link = connect(LinkConfig { timeout_ms: 2_000, ..config(&server) });
    thread::scope(|scope| {
        let link = &link;
        let first: Vec<_> = (0..2u8)
            .map(|i| scope.spawn(move || link.exist_one(Tenant::DEFAULT, key(&[i])).map(drop)))
            .collect();
        eventually("two batches are in flight", || server.frames() == 2);
        server.set_plan(Plan::Reply);
        // Starts later, so that it has one second left when the first two time out.
        thread::sleep(Duration::from_millis(1_000));
        let queued = scope.spawn(move || link.exist_one(Tenant::DEFAULT, key(&[4])));
        for call in first {
            assert!(matches!(call.join().unwrap(), Err(LinkError::Deadline { .. })));
        }
        assert_eq!(queued.join().unwrap().unwrap(), Ok(true));
    });
}

#[test]
fn late_reply_is_dropped() {
    let server = Server::start();
    server.set_plan(Plan::Hold);
    let link = connect(LinkConfig { timeout_ms: 100, ..config(&server) });
    assert!(matches!(link.exist(Tenant::DEFAULT, &[key(&[1])]), Err(LinkError::Deadline { .. })));
    server.release();
    // The table index is reused; the reply to [1] must not be taken for the one to [2].
    let link = &link;
    eventually("a reply in time", || match link.exist(Tenant::DEFAULT, &[key(&[2])]) {
        Ok(results) => results == [Ok(true)],
        Err(error) => panic!("{error}"),
    });
    assert_eq!(server.connections(), 1);
}

#[test]
fn lost_connection_fails_all_calls_and_next_call_reconnects() {
    let server = Server::start();
    let link = connect(config(&server));
    assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap(), Ok(true));
    server.set_plan(Plan::Hold);
    thread::scope(|scope| {
        let calls: Vec<_> = (0..16u8)
            .map(|i| {
                let link = &link;
                scope.spawn(move || match i {
                    0..8 => link.exist_one(Tenant::DEFAULT, key(&[i])).map(drop),
                    _ => link.exist(Tenant::DEFAULT, &[key(&[i])]).map(drop),
                })
            })
            .collect();
        eventually("all wait", || link.load() == LinkLoad { in_flight: 2 + 8, queued_keys: 6 });
        server.hang_up();
        for call in calls {
            let error = call.join().unwrap().unwrap_err();
            assert!(matches!(error, LinkError::Lost { .. }), "{error}");
            assert!(error.is_retryable());
        }
    });
    server.set_plan(Plan::Reply);
    assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap(), Ok(true));
    assert_eq!(server.connections(), 2);
}

#[test]
fn bad_replies_map_to_distinct_error_codes() {
    type Check = fn(&LinkError) -> bool;
    let cases: [(Plan, Check, ErrorCode, usize); 6] = [
        (Plan::Garbage, |e| protocol(e, |p| matches!(p, ProtocolError::Frame(_))), ErrorCode::Unsupported, 2),
        (
            Plan::WrongKind,
            |e| protocol(e, |p| matches!(p, ProtocolError::Kind { expected: FrameKind::ExistReply, .. })),
            ErrorCode::Unsupported,
            2,
        ),
        (Plan::Truncate, |e| matches!(e, LinkError::Lost { .. }), ErrorCode::ConnectionLost, 2),
        (Plan::Reject(ErrorCode::Busy), |e| e.to_string().contains("not today"), ErrorCode::Busy, 1),
        (Plan::Fail(ErrorCode::WrongMaster), |e| rejected(e) == Some(7), ErrorCode::WrongMaster, 1),
        (Plan::Fail(ErrorCode::Busy), |e| rejected(e) == Some(7), ErrorCode::Busy, 1),
    ];
    for (plan, check, code, connections) in cases {
        let server = Server::start();
        let link = connect(config(&server));
        // The link backs off after a connection without replies; this one has one.
        assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap(), Ok(true));
        server.set_plan(plan);
        let error = link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap_err();
        assert!(check(&error), "{plan:?}: {error}");
        assert_eq!(error.code(), code, "{plan:?}");
        server.set_plan(Plan::Reply);
        assert_eq!(link.exist(Tenant::DEFAULT, &[key(&[2])]).unwrap(), [Ok(true)], "{plan:?}");
        assert_eq!(server.connections(), connections, "{plan:?}");
    }
}

fn protocol(error: &LinkError, check: impl Fn(&ProtocolError) -> bool) -> bool {
    matches!(error, LinkError::Protocol { source, .. } if check(source))
}

fn rejected(error: &LinkError) -> Option<u32> {
    match error {
        LinkError::Rejected(rejection) => Some(rejection.retry_after_ms),
        _ => None,
    }
}

#[test]
fn failed_lookup_returns_master_error_code() {
    let server = Server::start();
    server.set_plan(Plan::Fail(ErrorCode::WrongMaster));
    let link = connect(config(&server));
    let error = link.lookup(Tenant::DEFAULT, &[key(&[2])], 0, false).unwrap_err();
    assert_eq!(error.code(), ErrorCode::WrongMaster);
}

#[test]
fn connect_failure_names_address_and_cause() {
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let error = BlockingLink::connect(LinkConfig::new(&unused, CallerId(7))).unwrap_err();
    assert!(matches!(error, LinkError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains(&unused) && error.to_string().contains("check"), "{error}");

    let server = Server::start();
    let cases = [
        (Greeting::Silence, ErrorCode::Unreachable),
        (Greeting::Reject(ErrorCode::Unauthenticated), ErrorCode::Unauthenticated),
        (Greeting::Version(9), ErrorCode::Unsupported),
    ];
    for (greeting, code) in cases {
        server.set_greeting(greeting);
        let connect_timeout_ms = if greeting == Greeting::Silence { 200 } else { 60_000 };
        let started = Instant::now();
        let error = BlockingLink::connect(LinkConfig { connect_timeout_ms, ..config(&server) }).unwrap_err();
        assert_eq!(error.code(), code, "{greeting:?}: {error}");
        if greeting == Greeting::Silence {
            check_waited(Duration::from_millis(200), started);
        }
    }
}

#[test]
fn host_name_is_resolved() {
    let server = Server::start();
    let port = server.address.rsplit(':').next().unwrap();
    let link = connect(LinkConfig { address: format!("localhost:{port}"), ..config(&server) });
    assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap(), Ok(true));
}

#[test]
fn calls_fail_fast_while_master_is_unavailable_then_reconnect() {
    let server = Server::start();
    let link = connect(config(&server));
    assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap(), Ok(true));
    server.set_greeting(Greeting::Reject(ErrorCode::Busy));
    server.hang_up();
    let mut codes = Vec::new();
    for _ in 0..50 {
        codes.push(link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap_err().code());
    }
    assert_eq!(codes.remove(0), ErrorCode::ConnectionLost);
    assert!(codes.iter().all(|&code| code == ErrorCode::Busy), "{codes:?}");
    assert!(server.connections() < 25, "attempts are spaced: {}", server.connections());
    server.set_greeting(Greeting::Accept);
    eventually("the link reconnects", || link.exist_one(Tenant::DEFAULT, key(&[2])).is_ok());
}

#[test]
fn in_flight_requests_respect_limits_of_client_and_server() {
    for (own, granted) in [(4, 1000), (64, 3)] {
        let server = Server::start();
        server.set_plan(Plan::Hold);
        server.set_inflight_max(granted);
        let link = connect(LinkConfig { inflight_max: own, ..config(&server) });
        let most = usize::from(own).min(granted as usize);
        thread::scope(|scope| {
            for i in 0..20u8 {
                let link = &link;
                scope.spawn(move || {
                    assert_eq!(link.exist(Tenant::DEFAULT, &[key(&[i])]).unwrap(), [rule(key(&[i]))])
                });
            }
            eventually("as many as allowed", || server.held_most() == most);
            server.release();
        });
        assert_eq!(server.held_most(), most);
        assert_eq!(server.frames(), 20);
    }
}

#[test]
fn caller_blocked_by_inflight_limit_times_out() {
    let server = Server::start();
    server.set_plan(Plan::Hold);
    let link = connect(LinkConfig { inflight_max: 1, timeout_ms: 400, ..config(&server) });
    thread::scope(|scope| {
        for i in 0..6u8 {
            let link = &link;
            scope.spawn(move || {
                let started = Instant::now();
                let result = match i % 2 {
                    0 => link.exist(Tenant::DEFAULT, &[key(&[i])]).map(drop),
                    _ => link.exist_one(Tenant::DEFAULT, key(&[i])).map(drop),
                };
                assert!(matches!(result, Err(LinkError::Deadline { .. })));
                check_waited(Duration::from_millis(400), started);
            });
        }
    });
}

#[test]
fn calls_time_out_when_master_stops_reading() {
    let server = Server::start();
    let link = Arc::new(connect(LinkConfig { timeout_ms: 1_000, ..config(&server) }));
    assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).unwrap(), Ok(true));
    server.set_plan(Plan::StopReading);
    let bytes: Vec<[u8; 2048]> = (0..BATCH_KEYS_MAX).map(|i| [i as u8; 2048]).collect();
    let keys: Vec<Key<'_>> = bytes.iter().map(|bytes| key(bytes)).collect();
    thread::scope(|scope| {
        for i in 0..8u8 {
            let (link, keys) = (&link, &keys);
            scope.spawn(move || {
                let started = Instant::now();
                let result = match i {
                    0..4 => link.exist(Tenant::DEFAULT, keys).map(drop), // 8 MiB each
                    _ => link.exist_one(Tenant::DEFAULT, key(&[i])).map(drop),
                };
                assert!(result.unwrap_err().is_retryable());
                assert!(started.elapsed() < Duration::from_millis(2_000), "{:?}", started.elapsed());
            });
        }
    });
    server.set_plan(Plan::Reply);
    eventually("the link works again", || link.exist_one(Tenant::DEFAULT, key(&[2])).is_ok());
}
