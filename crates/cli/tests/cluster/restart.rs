//! A master is killed and restarted while readers continue.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutOptions, PutOutcome};
use moontide_types::ErrorCode;
use rustix::process::Signal;

use crate::content::Rng;
use crate::harness::{Cluster, KIB, STEP_TIMEOUT, Shape, connect, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read, read_until, replicas};

#[test]
fn restarted_master_recovers_all_objects_from_node_reports() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(Shape { session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> =
        (0..sized(200, 5000)).map(|n| Object::new("kept", n, &mut rng, 0..100 * KIB)).collect();
    let (local, remote) = (cluster.local(), cluster.remote());
    let half = objects.len() / 2;
    put_all(&local, &objects[..half], &PutOptions::default());
    put_all(&remote, &objects[half..], &replicas(2));
    let removed = Object::new("removed", 0, &mut rng, KIB..2 * KIB);
    put_all(&remote, std::slice::from_ref(&removed), &PutOptions::default());
    assert!(remote.remove(removed.key(), false).unwrap());
    let term = cluster.master.metrics().master("term");

    let (stop, in_place) = (AtomicBool::new(false), AtomicU64::new(0));
    let [local_tally, remote_tally] = [Tally::default(), Tally::default()];
    let found_again = std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let (mut local_rng, remote_rng) = (rng.fork(), rng.fork());
        let (stop, objects, local, in_place, tally) = (&stop, &objects, &local, &in_place, &local_tally);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let object = &objects[local_rng.within(0, objects.len())];
                let began = Instant::now();
                match local.get_ref(object.key()) {
                    Ok(Some(held)) => {
                        object.check(&held, "in place");
                        in_place.fetch_add(held.is_zero_copy().into(), Ordering::Relaxed);
                        tally.note(began, Got::Right);
                    }
                    Ok(None) => tally.note(began, Got::Miss),
                    Err(error) => tally.note(began, Got::Failed(error)),
                }
            }
        });
        let (remote, tally) = (&remote, &remote_tally);
        scope.spawn(move || read_until(stop, remote, objects, remote_rng, &Way::ALL, tally));

        let read_in_place = |more: u64, what: &str| {
            let before = in_place.load(Ordering::Relaxed);
            until(what, STEP_TIMEOUT, || in_place.load(Ordering::Relaxed) > before + more);
        };
        read_in_place(200, "reads in place before");
        cluster.master.kill();
        read_in_place(sized(2000, 100_000), "reads in place without a master");
        cluster.restart_master();
        let restarted = Instant::now();
        cluster.wait_for_nodes(3);
        let fresh = cluster.remote();
        for object in &objects[..] {
            let end = restarted + STEP_TIMEOUT;
            loop {
                match read(&fresh, Way::Copy, object) {
                    Got::Right => break,
                    got => assert!(Instant::now() < end, "{} is not found: {got:?}", object.key),
                }
            }
        }
        println!("all objects were found {:?} after the restart", restarted.elapsed());
        let found_again = Instant::now();
        read_in_place(200, "reads in place after");
        let before = remote_tally.right();
        until("remote reads after", STEP_TIMEOUT, || remote_tally.right() > before + 200);
        found_again
    });
    local_tally.summary("gets local");
    remote_tally.summary("gets remote");
    assert!(
        local_tally.lost().is_empty(),
        "zero-copy reads failed without a master: {:?}",
        local_tally.lost()
    );
    let late = remote_tally.lost_after(found_again + Duration::from_secs(1));
    assert!(late.is_empty(), "remote reads failed after recovery: {late:?}");

    assert!(cluster.master.metrics().master("term") > term, "the term of the new master is not higher");
    // Clients from before the kill continue to read, replace, remove and write.
    for store in [&local, &remote, &cluster.local()] {
        for object in &objects {
            let got = read(store, Way::Copy, object);
            assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
        }
        assert!(store.get(removed.key()).unwrap().is_none(), "a removed object is readable");
    }
    for (store, object) in [&local, &remote].into_iter().zip(&objects) {
        let replaced = Object { seed: rng.draw(), len: 5000, key: object.key.clone() };
        let options = PutOptions { upsert: true, ..PutOptions::default() };
        // Replacement and removal are pending if a node that may hold the object has not rejoined yet.
        let put = replaced.put(store, &options).map_err(|error| error.code());
        assert!(matches!(put, Ok(PutOutcome::Stored) | Err(ErrorCode::Pending)), "{put:?}");
        for store in [&local, &remote] {
            let got = read(store, Way::Copy, &replaced);
            assert!(matches!(got, Got::Right), "{} {got:?}", replaced.key);
        }
        let removal = store.remove(object.key(), true);
        assert!(
            removal.as_ref().map_or_else(|error| error.code() == ErrorCode::Pending, |there| *there),
            "{removal:?}"
        );
        for store in [&local, &remote] {
            assert!(store.get(object.key()).unwrap().is_none(), "{} was removed", object.key);
        }
    }
    drop((local, remote));
    cluster.check_accounting();
    cluster.end();
}

/// Regression: a single master kept the generations of tenants in memory only. Objects of nodes that had not carried out a
/// forced removal of all objects when the master crashed were back.
#[test]
fn forced_removal_of_all_objects_survives_master_kill() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(Shape { nodes: 1, session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> = (0..50).map(|n| Object::new("all", n, &mut rng, KIB..2 * KIB)).collect();
    let store = cluster.remote();
    put_all(&store, &objects, &PutOptions::default());
    cluster.nodes[0].signal(Signal::STOP);
    // The second master never meets the node.
    cluster.master.kill();
    cluster.restart_master();
    let removed = connect(cluster.config()).remove_all(true);
    cluster.master.kill();
    cluster.restart_master();
    cluster.nodes[0].signal(Signal::CONT);
    assert_eq!(removed.unwrap().removed, 0, "its master knew no objects");
    cluster.wait_for_nodes(1);
    let store = cluster.remote();
    let late = Object::new("late", 0, &mut rng, KIB..2 * KIB);
    until("the node accepts objects", STEP_TIMEOUT, || late.put(&store, &PutOptions::default()).is_ok());
    let ended = Instant::now() + Duration::from_secs(3);
    while Instant::now() < ended {
        for object in &objects {
            assert!(!store.exists(object.key()).unwrap(), "{} was removed", object.key);
        }
    }
}
