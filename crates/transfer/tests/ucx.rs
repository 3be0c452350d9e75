//! UCX between real processes: bytes, failures, aborts, leaks.
//!
//! Needs a libucp: the system's, or the one in `MOONTIDE_UCX_LIB`. Without one the tests are not run, which is
//! a failure under `CI=true`. Versions below the minimum for use run too, since the bindings must load them.
//!
//! Not covered, because the hardware is missing: RDMA transports and GPU memory.

#[path = "../../types/tests/support/not_run.rs"]
mod not_run;
#[path = "ucx/peer.rs"]
mod peer;
#[path = "ucx/ratio.rs"]
mod ratio;

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use moontide_transfer::ucx::{
    Get, INFLIGHT_MAX, MIN_FOR_USE, OldVersions, Put, Ucx, UcxError, UcxUnavailable, UcxVersion, UcxWorker,
    WorkerConfig,
};
use peer::{Buffer, Owner, config, get, library, pattern, put, wait, within};

/// UCX without any network: copies by the kernel (`cma`), small messages through shared memory.
const LOCAL: &str = "cma,posix,self";
/// Shared memory alone, over which UCX emulates get and put by messages to the owner's thread.
const EMULATED: &str = "posix,self";
const TCP: &str = "tcp,self";
const ALL: [&str; 3] = [TCP, LOCAL, EMULATED];

/// Serialises the tests: they measure time, and the machine may have only two cores.
fn serialize() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Body of a child process; does nothing in the parent.
#[test]
fn child_process() {
    let Ok(role) = std::env::var(peer::ROLE) else { return };
    match role.split_once(' ').unwrap() {
        ("owner", tls) => peer::serve(tls),
        ("reader", rest) => read_forever(rest),
        ("leaks", tls) => count_leaks(tls),
        ("system", _) => report_system_library(),
        other => panic!("unknown role {other:?}"),
    }
}

#[test]
fn put_and_get_of_all_sizes_round_trip() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    for tls in ALL {
        let mut owner = Owner::start(tls);
        let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
        let (end, key) = owner.reach(&worker);
        println!("{tls}: transports {}", end.transports());
        // Once into plain memory, once into registered memory, which takes another path inside UCX.
        let buffer = Buffer::new(17 << 20);
        for registered in [false, true] {
            // SAFETY: never freed.
            let _registration =
                registered.then(|| unsafe { worker.register(buffer.at(0), 17 << 20) }.unwrap());
            for len in [1, 7, 64, 4095, 4096, 65_537, 262_144, 1 << 20, (4 << 20) + 3, 16 << 20] {
                let offset = 4097;
                let mut expected = vec![0; len];
                let seed = len as u64 * 2 + u64::from(registered);
                pattern(seed, offset, buffer.bytes_mut()[..len].as_mut());
                let outcome = put(
                    &end,
                    Put {
                        key: &key,
                        remote: owner.base + offset as u64,
                        local: buffer.at(0),
                        len,
                        deadline: within(10.0),
                    },
                );
                assert_eq!(wait(&outcome), Ok(()), "put of {len} over {tls}");
                assert!(owner.holds(seed, offset, len), "put of {len} over {tls} stored wrong bytes");

                buffer.bytes_mut().fill(0xee);
                let outcome = get(
                    &end,
                    Get {
                        key: &key,
                        remote: owner.base + offset as u64,
                        local: buffer.at(1),
                        len,
                        deadline: within(10.0),
                    },
                );
                assert_eq!(wait(&outcome), Ok(()), "get of {len} over {tls}");
                pattern(seed, offset, &mut expected);
                assert!(
                    buffer.bytes()[1..=len] == expected[..],
                    "get of {len} over {tls} returned wrong bytes"
                );
                assert_eq!(
                    (buffer.bytes()[0], buffer.bytes()[len + 1]),
                    (0xee, 0xee),
                    "bytes beside the target were written"
                );
            }
        }
        drop((end, key, worker));
        owner.end();
    }
}

#[test]
fn concurrent_operations_all_complete() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    for tls in ALL {
        let mut owner = Owner::start(tls);
        let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
        let (end, key) = owner.reach(&worker);
        let (count, len) = (256, 16 << 10);
        let source = Buffer::new(count * len);
        let target = Buffer::new(count * len);
        pattern(77, 0, source.bytes_mut());
        std::thread::scope(|scope| {
            for part in 0..4 {
                let (end, key, owner, source) = (&end, &key, &owner, &source);
                scope.spawn(move || {
                    let outcomes: Vec<_> = (0..count / 4)
                        .map(|i| (part * count / 4 + i) * len)
                        .map(|at| {
                            let remote = owner.base + at as u64;
                            put(end, Put { key, remote, local: source.at(at), len, deadline: within(10.0) })
                        })
                        .collect();
                    for outcome in outcomes {
                        assert_eq!(wait(&outcome), Ok(()));
                    }
                });
            }
        });
        assert!(owner.holds(77, 0, count * len));
        let outcomes: Vec<_> = (0..count)
            .map(|i| {
                let (remote, local) = (owner.base + (i * len) as u64, target.at(i * len));
                get(&end, Get { key: &key, remote, local, len, deadline: within(10.0) })
            })
            .collect();
        for outcome in outcomes {
            assert_eq!(wait(&outcome), Ok(()));
        }
        assert!(source.bytes() == target.bytes());
        drop((end, key, worker));
        owner.end();
    }
}

#[test]
fn operation_on_killed_owner_fails_before_deadline() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    for tls in ALL {
        for direction in ["get", "put"] {
            let owner = Owner::start(tls);
            let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
            let (end, key) = owner.reach(&worker);
            let len = 16 << 20;
            let buffer = Buffer::new(len);
            // One reply first; the next test covers owners that exit before it.
            let first =
                Get { key: &key, remote: owner.base, local: buffer.at(0), len: 8, deadline: within(10.0) };
            assert_eq!(wait(&get(&end, first)), Ok(()));
            let (base, mut killed) = (owner.base, None);
            let mut owner = Some(owner);
            let deadline = within(20.0);
            // Repeated operations; the owner is killed during one of them.
            let failure = loop {
                let outcomes: Vec<_> = (0..4)
                    .map(|_| match direction {
                        "get" => {
                            get(&end, Get { key: &key, remote: base, local: buffer.at(0), len, deadline })
                        }
                        _ => put(&end, Put { key: &key, remote: base, local: buffer.at(0), len, deadline }),
                    })
                    .collect();
                if let Some(owner) = owner.take() {
                    std::thread::sleep(Duration::from_millis(3));
                    killed = Some(Instant::now());
                    owner.kill();
                }
                let failed: Vec<_> = outcomes.iter().filter_map(|outcome| wait(outcome).err()).collect();
                if let Some(error) = failed.into_iter().next() {
                    break error;
                }
            };
            let took = killed.unwrap().elapsed();
            println!("{tls}: {direction} from a killed owner: {failure} after {took:?}");
            assert!(matches!(failure, UcxError::PeerLost { .. }), "{tls}: {failure}");
            assert!(Instant::now() < deadline);
            // The endpoint stays closed, and returns the reason.
            let again =
                get(&end, Get { key: &key, remote: base, local: buffer.at(0), len, deadline: within(1.0) });
            assert!(matches!(wait(&again), Err(UcxError::PeerLost { .. })));
        }
    }
}

/// Failure: an owner killed right after the connection was at times not detected, and only the deadline ended the
/// operation (always with UCX 1.13, two times in five with 1.22). Cause: unknown; UCX reports a connection over shared
/// memory before the peer has responded, and its later liveness check of the peer finds no error. Fix: none in this
/// crate except the deadline, which this test checks.
#[test]
fn operation_on_owner_killed_before_first_reply_ends_by_deadline() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    for tls in [EMULATED, LOCAL] {
        let owner = Owner::start(tls);
        let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
        owner.pause();
        let (end, key) = owner.reach(&worker);
        let buffer = Buffer::new(8);
        let (start, remote, deadline) = (Instant::now(), owner.base, within(2.5));
        let outcome = get(&end, Get { key: &key, remote, local: buffer.at(0), len: 8, deadline });
        owner.kill();
        let outcome = wait(&outcome);
        println!("{tls}: killed before the first reply: {outcome:?} after {:?}", start.elapsed());
        // Over LOCAL the kernel may have copied before the kill.
        assert!(
            matches!(outcome, Err(UcxError::DeadlineExceeded | UcxError::PeerLost { .. }))
                || (tls == LOCAL && outcome.is_ok()),
            "{tls}: {outcome:?}"
        );
        assert!(start.elapsed() < Duration::from_secs(3));
    }
}

#[test]
fn operation_on_stopped_owner_fails_at_deadline() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    // Not over LOCAL: there the kernel copies without the owner running, and the get succeeds.
    for tls in [TCP, EMULATED] {
        let owner = Owner::start(tls);
        let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
        let (end, key) = owner.reach(&worker);
        owner.pause();
        let buffer = Buffer::new(1 << 20);
        let start = Instant::now();
        let start_get = |seconds| {
            let (remote, deadline) = (owner.base, within(seconds));
            get(&end, Get { key: &key, remote, local: buffer.at(0), len: 1 << 20, deadline })
        };
        let (second, first) = (start_get(20.0), start_get(0.5));
        assert_eq!(wait(&first), Err(UcxError::DeadlineExceeded), "{tls}");
        assert_eq!(
            wait(&second),
            Err(UcxError::DeadlineExceeded),
            "{tls}: one late operation closes the endpoint"
        );
        let took = start.elapsed();
        println!("{tls}: a deadline of 500 ms took {took:?}");
        assert!(took >= Duration::from_millis(500) && took < Duration::from_millis(900), "{tls}: {took:?}");

        // A put does not complete either before the owner has received it.
        let fresh = UcxWorker::start(&ucx, config(tls)).unwrap();
        let refused = fresh.connect(&owner.address, within(0.3)).err();
        println!("{tls}: connecting to a stopped owner: {refused:?}");
        owner.resume();
        drop((end, key, worker, fresh));
        // Not `end`: with UCX 1.22 about one emulated owner in five crashes here with SIGSEGV, inside
        // `ucp_worker_progress`, in an endpoint that UCX created itself to serve gets; with older versions most fail an
        // assertion about an endpoint that is still being connected. The deadline of the peer causes this.
        owner.kill();
    }
}

#[test]
fn put_completes_only_after_owner_received_it() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    for tls in [TCP, EMULATED] {
        let mut owner = Owner::start(tls);
        let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
        let (end, key) = owner.reach(&worker);
        let buffer = Buffer::new(4096);
        pattern(5, 0, buffer.bytes_mut());
        owner.pause();
        let (remote, len) = (owner.base, 4096);
        let outcome = put(&end, Put { key: &key, remote, local: buffer.at(0), len, deadline: within(10.0) });
        assert!(
            outcome.recv_timeout(Duration::from_millis(300)).is_err(),
            "{tls}: put completed while the owner is stopped"
        );
        owner.resume();
        assert_eq!(wait(&outcome), Ok(()), "{tls}");
        assert!(owner.holds(5, 0, 4096));
        drop((end, key, worker));
        owner.end();
    }
}

#[test]
fn abort_completes_operations_and_releases_buffers() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    for tls in ALL {
        for round in 0..3u64 {
            let owner = Owner::start(tls);
            let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
            let (end, key) = owner.reach(&worker);
            let (count, len) = (8, 4 << 20);
            let buffer = Buffer::new(count * len);
            let outcomes: Vec<_> = (0..count)
                .map(|i| {
                    let local = buffer.at(i * len);
                    get(&end, Get { key: &key, remote: owner.base, local, len, deadline: within(20.0) })
                })
                .collect();
            std::thread::sleep(Duration::from_micros(400 * round));
            let start = Instant::now();
            assert_eq!(end.abort(), Ok(()));
            let took = start.elapsed();
            // Every completion has run at this point.
            let outcomes: Vec<_> = outcomes
                .iter()
                .map(|outcome| outcome.try_recv().expect("the operation has completed").0)
                .collect();
            pattern(99, 0, buffer.bytes_mut());
            std::thread::sleep(Duration::from_millis(300));
            let mut expected = vec![0; count * len];
            pattern(99, 0, &mut expected);
            assert!(buffer.bytes() == expected, "{tls}: a buffer changed after the abort");
            let aborted = outcomes.iter().filter(|outcome| **outcome == Err(UcxError::Aborted)).count();
            println!("{tls}: abort took {took:?}, {aborted} of {count} gets were aborted");
            assert!(
                outcomes.iter().all(|outcome| matches!(outcome, Ok(()) | Err(UcxError::Aborted))),
                "{outcomes:?}"
            );
            let (remote, local) = (owner.base, buffer.at(0));
            let after = get(&end, Get { key: &key, remote, local, len, deadline: within(1.0) });
            assert_eq!(wait(&after), Err(UcxError::Aborted));
            // Another endpoint to the same owner works.
            let (end, key) = owner.reach(&worker);
            let (remote, local) = (owner.base, buffer.at(0));
            let after = get(&end, Get { key: &key, remote, local, len, deadline: within(10.0) });
            assert_eq!(wait(&after), Ok(()));
            drop((end, key, worker));
            owner.end();
        }
    }
}

#[test]
fn owner_survives_killed_readers() {
    let _serial = serialize();
    let Some(_) = library() else { return };
    // Only where UCX reads without the owner's help. Where it emulates the get, the owner's UCX replies to an exited
    // reader and may end its own process ("Fatal: unexpected error", seen with 1.22 over TCP): one more reason to
    // refuse such endpoints.
    for tls in [LOCAL] {
        let mut owner = Owner::start(tls);
        for _ in 0..3 {
            let rest = format!("{tls} {} {} {}", to_hex(&owner.address), to_hex(&owner.key), owner.base);
            let (mut child, _stdin, mut stdout) = peer::spawn("reader", &rest);
            assert_eq!(peer::read_line(&mut stdout), "reading");
            std::thread::sleep(Duration::from_millis(20));
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(owner.holds(1, 0, 1 << 20), "{tls}");
        owner.end();
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Body of a reader process: runs gets until it is killed.
fn read_forever(rest: &str) {
    let words: Vec<&str> = rest.split(' ').collect();
    let [tls, address, key, base] = words[..] else { panic!("bad role {rest}") };
    let worker = UcxWorker::start(&Ucx::load(None).unwrap(), config(tls)).unwrap();
    let end = worker.connect(&peer::unhex(address), within(10.0)).unwrap();
    let key = end.import(&peer::unhex(key)).unwrap();
    let (remote, len) = (base.parse().unwrap(), 8 << 20);
    let buffer = Buffer::new(len);
    peer::send_line("reading");
    loop {
        let outcomes: Vec<_> = (0..4)
            .map(|_| get(&end, Get { key: &key, remote, local: buffer.at(0), len, deadline: within(10.0) }))
            .collect();
        for outcome in outcomes {
            wait(&outcome).unwrap();
        }
    }
}

#[test]
fn range_outside_registration_is_rejected_locally() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    let owner = Owner::start(TCP);
    let worker = UcxWorker::start(&ucx, config(TCP)).unwrap();
    let (end, key) = owner.reach(&worker);
    let buffer = Buffer::new(64);
    let (base, past) = (owner.base, owner.base + owner.len);
    for (remote, len) in
        [(base - 1, 1), (base - 1, 2), (past - 1, 2), (past, 1), (0, 8), (u64::MAX, 1), (u64::MAX - 3, 8)]
    {
        let expected = Err(UcxError::OutOfRange { address: remote, len: len as u64, base, range: owner.len });
        let deadline = within(5.0);
        assert_eq!(wait(&get(&end, Get { key: &key, remote, local: buffer.at(0), len, deadline })), expected);
        assert_eq!(wait(&put(&end, Put { key: &key, remote, local: buffer.at(0), len, deadline })), expected);
    }
    let last_byte = Get { key: &key, remote: past - 1, local: buffer.at(0), len: 1, deadline: within(5.0) };
    assert_eq!(wait(&get(&end, last_byte)), Ok(()));
    // A key is valid only for the endpoint that imported it.
    let (other, _other_key) = owner.reach(&worker);
    assert_eq!(wait(&get(&other, last_byte)), Err(UcxError::WrongEndpoint));
    drop((end, other, key, _other_key, worker));
    owner.end();
}

#[test]
fn malformed_key_or_address_is_rejected_before_ucx() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    let owner = Owner::start(TCP);
    let worker = UcxWorker::start(&ucx, config(TCP)).unwrap();
    let end = worker.connect(&owner.address, within(5.0)).unwrap();
    let corrupt = |good: &[u8]| {
        let mut cases = vec![vec![], vec![0; 8], vec![0xff; 300], good[..good.len() - 1].to_vec()];
        for at in (0..good.len()).step_by(3) {
            let mut bad = good.to_vec();
            bad[at] ^= 0x40;
            cases.push(bad);
        }
        cases
    };
    for bad in corrupt(&owner.key) {
        assert!(matches!(end.import(&bad), Err(UcxError::Envelope(_))));
    }
    for bad in corrupt(&owner.address) {
        assert!(matches!(worker.connect(&bad, within(1.0)), Err(UcxError::Envelope(_))));
    }
    assert!(matches!(end.import(&owner.address), Err(UcxError::Envelope(_))));
    assert!(matches!(worker.connect(&owner.key, within(1.0)), Err(UcxError::Envelope(_))));
    // A valid key of another owner.
    let other_owner = Owner::start(TCP);
    assert!(matches!(end.import(&other_owner.key), Err(UcxError::WrongOwner { .. })));
    drop((end, worker));
    owner.end();
    other_owner.end();
}

#[test]
fn endpoint_over_tcp_is_refused_unless_allowed() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    let owner = Owner::start("all");
    let strict = |tls: &str| WorkerConfig { allow_tcp: false, ..config(tls) };
    let worker = UcxWorker::start(&ucx, strict("tcp")).unwrap();
    let refused = worker.connect(&owner.address, within(5.0)).unwrap_err();
    println!("{refused}");
    if ucx.version() < (UcxVersion { major: 1, minor: 14 }) {
        assert!(matches!(refused, UcxError::TransportsUnknown { .. }), "{refused}");
    } else {
        let UcxError::OnlyTcp { transports } = refused else { panic!("{refused}") };
        assert_eq!(transports.names(), ["tcp"]);
        let worker = UcxWorker::start(&ucx, strict("all")).unwrap();
        let end = worker.connect(&owner.address, within(5.0)).unwrap();
        println!("with every transport allowed: {}", end.transports());
        assert!(!end.transports().is_only_tcp());
    }
    drop(worker);
    owner.end();
}

#[test]
fn connect_or_first_get_to_dead_peer_fails() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    for tls in ALL {
        let mut owner = Owner::start(tls);
        owner.child.kill().unwrap();
        owner.child.wait().unwrap();
        let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
        let start = Instant::now();
        let outcome = worker.connect(&owner.address, within(2.0));
        println!(
            "{tls}: connecting to a dead owner: {:?} after {:?}",
            outcome.as_ref().err(),
            start.elapsed()
        );
        assert!(start.elapsed() < Duration::from_millis(2500));
        match outcome {
            Err(error) => assert!(matches!(error, UcxError::PeerLost { .. }), "{tls}: {error}"),
            // Some transports detect it only with the first operation.
            Ok(end) => {
                let outcome = end.import(&owner.key).and_then(|key| {
                    let buffer = Buffer::new(8);
                    let (remote, deadline) = (owner.base, within(2.0));
                    wait(&get(&end, Get { key: &key, remote, local: buffer.at(0), len: 8, deadline }))
                });
                println!("{tls}: first get: {outcome:?}");
                assert!(outcome.is_err());
            }
        }
    }
}

#[test]
fn handles_survive_full_queue_callback_panic_and_worker_stop() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    let owner = Owner::start(TCP);
    let worker = UcxWorker::start(&ucx, config(TCP)).unwrap();
    let (end, key) = owner.reach(&worker);
    let buffer = Buffer::new(1 << 20);
    let deadline = within(20.0);
    let one = Get { key: &key, remote: owner.base, local: buffer.at(0), len: 1 << 20, deadline };

    // Full queue: refused at once, and the other operations are not affected.
    owner.pause();
    let outcomes: Vec<_> = (0..INFLIGHT_MAX + 3).map(|_| get(&end, one)).collect();
    let refused = outcomes
        .iter()
        .filter(|outcome| matches!(outcome.try_recv(), Ok((Err(UcxError::QueueFull { .. }), _))));
    assert_eq!(refused.count(), 3);

    // A blocking call from a completion is refused: it would deadlock.
    owner.resume();
    for outcome in &outcomes[..INFLIGHT_MAX] {
        assert_eq!(wait(outcome), Ok(()));
    }
    let end = std::sync::Arc::new(end);
    let (sender, receiver) = std::sync::mpsc::channel();
    let inner = std::sync::Arc::clone(&end);
    // SAFETY: never freed.
    unsafe { end.get(one, move |_| drop(sender.send(inner.abort()))) };
    assert_eq!(receiver.recv().unwrap(), Err(UcxError::OnProgressThread { call: "abort" }));

    // A panicking completion affects no other operation.
    // SAFETY: never freed.
    unsafe { end.get(one, |_| panic!("deliberate panic of a completion")) };
    assert_eq!(wait(&get(&end, one)), Ok(()));

    // SAFETY: never freed.
    let registration = unsafe { worker.register(buffer.at(0), 1 << 20) }.unwrap();
    let start = Instant::now();
    drop(worker);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(wait(&get(&end, one)), Err(UcxError::WorkerStopped));
    assert_eq!(end.abort(), Ok(()));
    drop((end, key, registration));
    owner.end();
}

#[test]
fn worker_stop_fails_operations_in_flight() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    let owner = Owner::start(TCP);
    let worker = UcxWorker::start(&ucx, config(TCP)).unwrap();
    let (end, key) = owner.reach(&worker);
    owner.pause();
    let buffer = Buffer::new(1 << 20);
    let (remote, deadline) = (owner.base, within(20.0));
    let outcome = get(&end, Get { key: &key, remote, local: buffer.at(0), len: 1 << 20, deadline });
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    drop(worker);
    println!("stopping took {:?}", start.elapsed());
    assert_eq!(outcome.try_recv().expect("the operation has completed").0, Err(UcxError::WorkerStopped));
    owner.kill();
}

#[test]
fn descriptors_and_threads_do_not_leak() {
    let _serial = serialize();
    let Some(_) = library() else { return };
    for tls in ALL {
        let (mut child, stdin, mut stdout) = peer::spawn("leaks", tls);
        println!("{tls}: {}", peer::read_line(&mut stdout));
        drop(stdin);
        assert!(child.wait().unwrap().success());
    }
}

/// Number of descriptors and threads of this process once both are stable. `/proc` still lists a thread for a moment
/// after it was joined: the kernel wakes the joining thread before it removes the other one.
fn settled_counts() -> (usize, usize) {
    /// Longer than the removal of a thread takes on a busy machine.
    const STABLE: Duration = Duration::from_millis(200);
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let give_up_at = within(10.0);
    let (mut last, mut since) = ((count("fd"), count("task")), Instant::now());
    while since.elapsed() < STABLE {
        assert!(Instant::now() < give_up_at, "descriptors and threads do not settle: {last:?}");
        std::thread::sleep(Duration::from_millis(5));
        let now = (count("fd"), count("task"));
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    last
}

/// Body of the leak count, in a process without other tests: descriptors and threads after each of eight workers, four
/// of them with an owner that is killed.
fn count_leaks(tls: &str) {
    let ucx = Ucx::load(None).unwrap();
    let buffer = Buffer::new(1 << 20);
    let mut counts = Vec::new();
    for round in 0..8 {
        let owner = Owner::start(tls);
        let worker = UcxWorker::start(&ucx, config(tls)).unwrap();
        let (end, key) = owner.reach(&worker);
        // SAFETY: never freed.
        let registration = unsafe { worker.register(buffer.at(0), 1 << 20) }.unwrap();
        let one =
            Get { key: &key, remote: owner.base, local: buffer.at(0), len: 1 << 20, deadline: within(5.0) };
        assert_eq!(wait(&get(&end, one)), Ok(()));
        if round % 2 == 0 {
            owner.kill();
            let _ = wait(&get(&end, one));
            drop((registration, end, key, worker));
        } else {
            drop((registration, end, key, worker));
            owner.end();
        }
        counts.push(settled_counts());
    }
    // The first rounds may create resources that last as long as the process.
    peer::send_line(&format!("descriptors and threads by round: {counts:?}"));
    assert_eq!(counts[2..4], counts[6..8], "{counts:?}");
}

#[test]
fn idle_worker_sleeps() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    let owner = Owner::start(TCP);
    let worker = UcxWorker::start(&ucx, config(TCP)).unwrap();
    let (end, key) = owner.reach(&worker);
    let buffer = Buffer::new(4096);
    let one =
        || Get { key: &key, remote: owner.base, local: buffer.at(0), len: 4096, deadline: within(10.0) };
    assert_eq!(wait(&get(&end, one())), Ok(()));
    // Idle, then waiting for a missing reply: neither may occupy a core.
    let idle = cpu_ms_during(Duration::from_secs(1));
    owner.pause();
    let outcome = get(&end, one());
    let waiting = cpu_ms_during(Duration::from_secs(1));
    owner.resume();
    assert_eq!(wait(&outcome), Ok(()));
    println!("in one second the progress thread ran {idle} ms idle, {waiting} ms waiting");
    assert!(idle <= 30 && waiting <= 30, "idle {idle} ms, waiting {waiting} ms");
    drop((end, key, worker));
    owner.end();
}

/// Returns the CPU time of the progress threads of this process during `time`.
fn cpu_ms_during(time: Duration) -> u64 {
    let used = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let ticks = tasks.filter_map(|task| {
            let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
            let (before, after) = stat.rsplit_once(") ")?;
            let fields: Vec<&str> = after.split(' ').collect();
            // Fields 14 and 15 of the line, user and system time; the state is field 3.
            before
                .ends_with("moontide-ucx")
                .then(|| fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap())
        });
        ticks.sum::<u64>() * 10
    };
    let before = used();
    std::thread::sleep(time);
    used() - before
}

#[test]
fn old_versions_are_refused_unless_allowed() {
    let _serial = serialize();
    let Some(ucx) = library() else { return };
    let refuse = || WorkerConfig { old_versions: OldVersions::Refuse, ..config(TCP) };
    if ucx.version() < MIN_FOR_USE {
        let refused = UcxWorker::start(&ucx, refuse()).unwrap_err();
        println!("{refused}");
        assert_eq!(
            refused,
            UcxError::Unavailable(UcxUnavailable::TooOld { found: ucx.version(), need: MIN_FOR_USE })
        );
        assert!(ucx.usable(OldVersions::AllowOld).is_ok());
    } else {
        UcxWorker::start(&ucx, refuse()).unwrap();
        assert!(ucx.usable(OldVersions::Refuse).is_ok());
    }
    // Any other library in the same process is refused.
    let other = Ucx::load(Some("/elsewhere/libucp.so.0".as_ref()));
    assert!(matches!(other, Err(UcxUnavailable::AnotherLoaded { .. })));
}

#[test]
fn loading_ucx_keeps_signal_handlers() {
    let _serial = serialize();
    let Some(_) = library() else { return };
    let (mut child, stdin, mut stdout) = peer::spawn("system", "-");
    let line = peer::read_line(&mut stdout);
    println!("{line}");
    drop(stdin);
    assert!(child.wait().unwrap().success());
}

/// Body of the signal check: loads UCX and compares the caught signals.
fn report_system_library() {
    let caught = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|line| line.starts_with("SigCgt")).unwrap().to_owned()
    };
    let before = caught();
    let ucx = Ucx::load(None).unwrap();
    let loaded = caught();
    let worker = UcxWorker::start(&ucx, config(TCP)).unwrap();
    let started = caught();
    drop(worker);
    peer::send_line(&format!("before {before:?}, loaded {loaded:?}, started {started:?}"));
    assert_eq!((&before, &before), (&loaded, &started));
}

/// Throughput compared to a plain C loop; see the module. Not a test of behaviour; needs an idle machine.
#[test]
#[ignore = "a measurement; run it in release on an idle machine"]
fn throughput_ratio_to_plain_c_loop() {
    let _serial = serialize();
    ratio::compare();
}
