//! The asynchronous link against a test server with configurable faults.

mod server;

use std::future::Future;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use moontide_client::{AsyncLink, LinkConfig, LinkError, LinkLoad, ProtocolError};
use moontide_proto::convert::CallerId;
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::{ErrorCode, Key, Tenant};
use server::{Greeting, Plan, Server, eventually, id_of, rule};
use tokio::task::JoinHandle;

fn config(server: &Server) -> LinkConfig {
    // Long enough for a busy machine; tests of timeouts set their own.
    LinkConfig { timeout_ms: 60_000, ..LinkConfig::new(&server.address, CallerId(7)) }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("a runtime").block_on(work)
}

async fn connect(config: LinkConfig) -> AsyncLink {
    AsyncLink::connect(config).await.expect("the server listens")
}

fn key(bytes: &[u8]) -> Key<'_> {
    Key::new(bytes).expect("a key")
}

/// Spawns a call with a key of one byte.
fn spawn_one(link: &AsyncLink, byte: u8) -> JoinHandle<Result<(), LinkError>> {
    let link = link.clone();
    tokio::spawn(async move {
        let result = link.exist_one(Tenant::DEFAULT, key(&[byte])).await?;
        assert_eq!(result, rule(key(&[byte])));
        Ok(())
    })
}

/// Spawns a call with a batch of one key, which is not batched with others.
fn spawn_batch(link: &AsyncLink, byte: u8) -> JoinHandle<Result<(), LinkError>> {
    let link = link.clone();
    tokio::spawn(async move {
        let results = link.exist(Tenant::DEFAULT, &[key(&[byte])]).await?;
        assert_eq!(results, [rule(key(&[byte]))]);
        Ok(())
    })
}

#[test]
fn concurrent_tasks_get_their_own_replies() {
    const TASKS: u64 = 64;
    const CALLS: u64 = 1600; // × 64 > 100,000
    let server = Server::start();
    run(async {
        let link = connect(config(&server)).await;
        let tasks = (0..TASKS).map(|task| {
            let link = link.clone();
            tokio::spawn(async move {
                for call in 0..CALLS {
                    let mut bytes = [0; 16];
                    bytes[..8].copy_from_slice(&task.to_le_bytes());
                    bytes[8..].copy_from_slice(&((call << 8) | ((task * 31 + call * 7) % 256)).to_be_bytes());
                    let key = key(&bytes);
                    if call % 4 != 0 {
                        assert_eq!(link.exist_one(Tenant::DEFAULT, key).await.unwrap(), rule(key));
                        continue;
                    }
                    match (link.lookup_one(Tenant::DEFAULT, key, 5).await.unwrap(), rule(key)) {
                        (Ok(found), Ok(true)) => assert_eq!(found.object.id, id_of(key)),
                        (Err(code), rule) => assert_eq!(code, rule.err().unwrap_or(ErrorCode::NotFound)),
                        (found, rule) => panic!("got {found:?}, expected {rule:?}"),
                    }
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    });
    assert_eq!(server.keys() as u64, TASKS * CALLS);
    assert_eq!(server.connections(), 1);
    assert!(server.frames() * 2 < server.keys(), "{} frames for {} keys", server.frames(), server.keys());
}

#[test]
fn keys_queued_while_two_are_in_flight_form_one_batch() {
    let server = Server::start();
    server.set_plan(Plan::Hold);
    run(async {
        let link = connect(config(&server)).await;
        let mut calls = Vec::new();
        for i in 0..2usize {
            calls.push(spawn_one(&link, i as u8));
            eventually("the key is sent at once", || server.frames() == i + 1);
        }
        calls.extend((2..64).map(|byte| spawn_one(&link, byte)));
        eventually("all keys are queued", || link.load() == LinkLoad { in_flight: 2, queued_keys: 62 });
        assert_eq!(server.frames(), 2);
        server.release();
        for call in calls {
            call.await.unwrap().unwrap();
        }
    });
    assert_eq!((server.frames(), server.keys()), (3, 64));
}

#[test]
fn out_of_order_replies_reach_their_callers() {
    let server = Server::start();
    server.set_plan(Plan::Hold);
    run(async {
        let link = connect(config(&server)).await;
        let calls: Vec<_> = (0..16).map(|byte| spawn_batch(&link, byte)).collect();
        eventually("all are in flight", || server.frames() == 16);
        server.release();
        for call in calls {
            call.await.unwrap().unwrap();
        }
    });
}

#[test]
fn large_batches_complete_on_one_connection() {
    let server = Server::start();
    run(async {
        let link = connect(config(&server)).await;
        let calls: Vec<_> = (0..8)
            .map(|_| {
                let link = link.clone();
                tokio::spawn(async move {
                    let bytes: Vec<[u8; 640]> = (0..BATCH_KEYS_MAX).map(|i| [i as u8; 640]).collect();
                    let keys: Vec<Key<'_>> = bytes.iter().map(|bytes| key(bytes)).collect();
                    let reply = link.lookup(Tenant::DEFAULT, &keys, 0, true).await.unwrap();
                    let entries = reply.replicas().unwrap().list;
                    assert_eq!(entries.len(), keys.len());
                    assert!(
                        entries
                            .iter()
                            .zip(&keys)
                            .all(|((e, _), &k)| e.code.is_none() == (rule(k) == Ok(true)))
                    );
                })
            })
            .collect();
        for call in calls {
            call.await.unwrap();
        }
    });
    assert_eq!(server.connections(), 1);
}

#[test]
fn unanswered_calls_time_out_and_keep_connection() {
    let server = Server::start();
    server.set_plan(Plan::Forget);
    run(async {
        let link = connect(LinkConfig { timeout_ms: 400, ..config(&server) }).await;
        let started = Instant::now();
        let singles = (0..8).map(|byte| spawn_one(&link, byte));
        let calls: Vec<_> = singles.chain((8..12).map(|byte| spawn_batch(&link, byte))).collect();
        for call in calls {
            let error = call.await.unwrap().unwrap_err();
            assert!(matches!(error, LinkError::Deadline { deadline_ms: 400, .. }), "{error}");
        }
        let waited = started.elapsed();
        assert!(waited >= Duration::from_millis(400) && waited < Duration::from_millis(800), "{waited:?}");
        server.set_plan(Plan::Reply);
        eventually("a cancel arrives", || server.cancels() > 0);
        assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).await.unwrap(), Ok(true));
        assert_eq!(server.connections(), 1, "a slow master is not a broken connection");
        eventually("no request is left", || link.load() == LinkLoad::default());
    });
}

#[test]
fn dropped_call_does_not_block_next_call() {
    let server = Server::start();
    server.set_plan(Plan::Hold);
    run(async {
        let link = connect(LinkConfig { inflight_max: 1, ..config(&server) }).await;
        let call = spawn_batch(&link, 1);
        eventually("it is in flight", || server.frames() == 1);
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        server.release();
        assert_eq!(link.exist(Tenant::DEFAULT, &[key(&[2])]).await.unwrap(), [Ok(true)]);
    });
}

#[test]
fn lost_connection_fails_all_calls_and_next_call_reconnects() {
    let server = Server::start();
    run(async {
        let link = connect(config(&server)).await;
        assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).await.unwrap(), Ok(true));
        server.set_plan(Plan::Hold);
        let first: Vec<_> = (0..2).map(|byte| spawn_one(&link, byte)).collect();
        eventually("keys are in flight", || server.keys() == 3);
        let others =
            (2..8).map(|byte| spawn_one(&link, byte)).chain((8..16).map(|byte| spawn_batch(&link, byte)));
        let others: Vec<_> = others.collect();
        eventually("all wait", || {
            let load = link.load();
            load.in_flight >= 8 && server.keys() - 1 + load.queued_keys == 16
        });
        server.hang_up();
        for call in first.into_iter().chain(others) {
            let error = call.await.unwrap().unwrap_err();
            assert!(matches!(error, LinkError::Lost { .. }), "{error}");
        }
        server.set_plan(Plan::Reply);
        assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).await.unwrap(), Ok(true));
        assert_eq!(server.connections(), 2);
    });
}

#[test]
fn bad_replies_map_to_distinct_error_codes() {
    let cases = [
        (Plan::Garbage, ErrorCode::Unsupported, 2),
        (Plan::WrongKind, ErrorCode::Unsupported, 2),
        (Plan::Truncate, ErrorCode::ConnectionLost, 2),
        (Plan::Reject(ErrorCode::Busy), ErrorCode::Busy, 1),
        (Plan::Fail(ErrorCode::WrongMaster), ErrorCode::WrongMaster, 1),
    ];
    for (plan, code, connections) in cases {
        let server = Server::start();
        run(async {
            let link = connect(config(&server)).await;
            assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).await.unwrap(), Ok(true));
            server.set_plan(plan);
            let error = link.exist_one(Tenant::DEFAULT, key(&[2])).await.unwrap_err();
            assert_eq!(error.code(), code, "{plan:?}: {error}");
            let garbage = matches!(error, LinkError::Protocol { source: ProtocolError::Frame(_), .. });
            assert_eq!(garbage, plan == Plan::Garbage);
            server.set_plan(Plan::Reply);
            assert_eq!(link.exist(Tenant::DEFAULT, &[key(&[2])]).await.unwrap(), [Ok(true)], "{plan:?}");
            assert_eq!(server.connections(), connections, "{plan:?}");
        });
    }
}

#[test]
fn connect_failure_names_address_and_cause() {
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let error = run(AsyncLink::connect(LinkConfig::new(&unused, CallerId(7)))).unwrap_err();
    assert!(matches!(error, LinkError::Unreachable { .. }) && error.to_string().contains(&unused), "{error}");

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
        let error =
            run(AsyncLink::connect(LinkConfig { connect_timeout_ms, ..config(&server) })).unwrap_err();
        assert_eq!(error.code(), code, "{greeting:?}: {error}");
        assert!(greeting != Greeting::Silence || started.elapsed() < Duration::from_millis(400));
    }
}

#[test]
fn in_flight_requests_respect_limits_of_client_and_server() {
    for (own, granted) in [(4, 1000), (64, 3)] {
        let server = Server::start();
        server.set_plan(Plan::Hold);
        server.set_inflight_max(granted);
        let most = usize::from(own).min(granted as usize);
        run(async {
            let link = connect(LinkConfig { inflight_max: own, ..config(&server) }).await;
            let calls: Vec<_> = (0..20).map(|byte| spawn_batch(&link, byte)).collect();
            eventually("as many as allowed", || server.held_most() == most);
            server.release();
            for call in calls {
                call.await.unwrap().unwrap();
            }
        });
        assert_eq!((server.held_most(), server.frames()), (most, 20));
    }
}

#[test]
fn calls_time_out_when_master_stops_reading() {
    let server = Server::start();
    run(async {
        let link = connect(LinkConfig { timeout_ms: 1_000, ..config(&server) }).await;
        assert_eq!(link.exist_one(Tenant::DEFAULT, key(&[2])).await.unwrap(), Ok(true));
        server.set_plan(Plan::StopReading);
        let calls: Vec<_> = (0..8)
            .map(|_| {
                let link = link.clone();
                tokio::spawn(async move {
                    let bytes: Vec<[u8; 2048]> = (0..BATCH_KEYS_MAX).map(|i| [i as u8; 2048]).collect();
                    let keys: Vec<Key<'_>> = bytes.iter().map(|bytes| key(bytes)).collect();
                    let started = Instant::now();
                    let error = link.exist(Tenant::DEFAULT, &keys).await.unwrap_err();
                    assert!(error.is_retryable());
                    assert!(started.elapsed() < Duration::from_millis(2_000), "{:?}", started.elapsed());
                })
            })
            .collect();
        for call in calls {
            call.await.unwrap();
        }
        server.set_plan(Plan::Reply);
        let until = Instant::now() + Duration::from_secs(60);
        while link.exist_one(Tenant::DEFAULT, key(&[2])).await.is_err() {
            assert!(Instant::now() < until, "the link does not recover");
        }
    });
}

#[test]
fn connection_closes_when_last_handle_is_dropped() {
    let server = Server::start();
    run(async {
        let link = connect(config(&server)).await;
        let clone = link.clone();
        drop(link);
        assert_eq!(clone.exist_one(Tenant::DEFAULT, key(&[2])).await.unwrap(), Ok(true));
        assert_eq!(server.open(), 1);
        drop(clone);
        eventually("the connection is closed", || server.open() == 0);
    });
}
