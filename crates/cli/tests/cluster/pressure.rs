//! Puts of several times the memory size, while readers hold objects.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{ObjectRef, PutOptions, PutOutcome, Store};
use moontide_types::record::PinClass;

use crate::content::Rng;
use crate::harness::{
    Cluster, KIB, MIB, STEP_TIMEOUT, Shape, check_master_sums, check_node_sums, sized, until,
};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read};

/// Memory of each of three nodes.
const MEMORY_MIB: usize = 48;

/// Returns the object with a number.
fn object(seed: u64, number: usize) -> Object {
    let mut rng = Rng::new(seed ^ number as u64);
    Object::new("flood", number, &mut rng, 16 * KIB..MIB)
}

#[test]
fn eviction_keeps_pinned_bytes_and_accounting_consistent() {
    let mut rng = Rng::seeded();
    let seed = rng.draw();
    let cluster = Cluster::start(Shape { memory_mib: MEMORY_MIB, ..Shape::default() });
    let wanted = sized(4, 20) * 3 * MEMORY_MIB * MIB;
    let (next, put_bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (stop, tallies) = (AtomicBool::new(false), [Tally::default(), Tally::default()]);
    let (local, remote, writers) = (cluster.local(), cluster.remote(), [cluster.local(), cluster.remote()]);
    let in_place = AtomicU64::new(0);
    let put_tally = Tally::default();
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let (next, put_bytes, stop, tallies, local, remote) =
            (&next, &put_bytes, &stop, &tallies, &local, &remote);
        let (in_place, put_tally) = (&in_place, &put_tally);
        let puts: Vec<_> = writers
            .iter()
            .map(|store| {
                scope.spawn(move || {
                    while put_bytes.load(Ordering::Relaxed) < wanted {
                        let object = object(seed, next.fetch_add(1, Ordering::Relaxed));
                        let began = Instant::now();
                        match object.put(store, &PutOptions::default()) {
                            Ok(put) => {
                                assert_eq!(put, PutOutcome::Stored);
                                put_bytes.fetch_add(object.len, Ordering::Relaxed);
                                put_tally.note(began, Got::Right);
                            }
                            Err(error) => put_tally.note(began, Got::Failed(error)),
                        }
                    }
                })
            })
            .collect();
        let hold_rng = rng.fork();
        scope.spawn(move || hold_until(stop, local, hold_rng, (seed, next), in_place));
        for (store, ways, tally) in [
            (local, &[Way::Copy, Way::Into][..], &tallies[0]),
            (remote, &[Way::Copy, Way::Ref][..], &tallies[1]),
        ] {
            let mut rng = rng.fork();
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let Some(object) = recent(&mut rng, seed, next) else { continue };
                    let began = Instant::now();
                    tally.note(began, read(store, ways[rng.within(0, ways.len())], &object));
                }
            });
        }
        // The sums hold at any time.
        while !puts.iter().all(|put| put.is_finished()) {
            check_master_sums(&cluster.master.metrics());
            cluster.nodes.iter().for_each(|node| check_node_sums(&node.metrics()));
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    put_tally.summary("puts");
    tallies[0].summary("copies local");
    tallies[1].summary("copies remote");
    let held = in_place.load(Ordering::Relaxed);
    let evicted = cluster.master.metrics().master("evicted_objects_total");
    println!(
        "{} MiB put, {held} zero-copy reads, {evicted} evicted",
        put_bytes.load(Ordering::Relaxed) >> 20
    );
    assert!(
        put_tally.lost().is_empty(),
        "puts failed although objects could be evicted: {:?}",
        put_tally.lost()
    );
    for tally in &tallies {
        let failed: Vec<_> = tally.lost().into_iter().filter(|lost| lost.reason != "a miss").collect();
        assert!(failed.is_empty(), "reads failed; only misses are expected: {failed:?}");
        assert!(tally.right() > 0, "nothing was read");
    }
    assert!(held > 0, "nothing was read zero-copy");
    assert!(evicted > 0, "nothing was evicted");
    check_held_objects(&cluster, &local, seed);
    drop((local, remote, writers));
    cluster.check_accounting();
    cluster.end();
}

/// Returns a recently put object.
fn recent(rng: &mut Rng, seed: u64, next: &AtomicUsize) -> Option<Object> {
    let next = next.load(Ordering::Relaxed);
    (next > 0).then(|| object(seed, next - 1 - rng.within(0, next.min(300))))
}

/// Holds zero-copy references for up to 300 ms, and checks every byte before releasing them.
fn hold_until(
    stop: &AtomicBool,
    store: &Store,
    mut rng: Rng,
    (seed, next): (u64, &AtomicUsize),
    in_place: &AtomicU64,
) {
    let mut held: VecDeque<(Object, ObjectRef, Instant)> = VecDeque::new();
    while !stop.load(Ordering::Relaxed) {
        if let Some(object) = recent(&mut rng, seed, next)
            && let Some(found) = store.get_ref(object.key()).expect("a read in place")
        {
            in_place.fetch_add(found.is_zero_copy().into(), Ordering::Relaxed);
            object.check(&found, "when it was found");
            let until = Instant::now() + Duration::from_millis(rng.within(0, 300) as u64);
            held.push_back((object, found, until));
        }
        while held.front().is_some_and(|(_, _, until)| *until < Instant::now() || held.len() > 6) {
            let (object, found, _) = held.pop_front().expect("there is a first");
            object.check(&found, "after it was held");
            assert!(found.verify(), "{}", object.key);
        }
    }
}

/// Checks that memory of removed objects is reclaimed after their references are released, and not earlier.
fn check_held_objects(cluster: &Cluster, local: &Store, seed: u64) {
    let draining = || cluster.master.metrics().master("memory_draining_bytes");
    until("nothing drains", STEP_TIMEOUT, || draining() == 0);
    let objects: Vec<Object> =
        (0..4).map(|n| Object { key: format!("held-{n}"), seed: seed ^ n, len: 700 * KIB }).collect();
    // Pinned: the memory is full, and a new object may be evicted first.
    let pinned = PutOptions { pin: PinClass::Hard, ..PutOptions::default() };
    put_all(local, &objects, &pinned);
    let held: Vec<ObjectRef> =
        objects.iter().map(|object| local.get_ref(object.key()).unwrap().unwrap()).collect();
    assert!(held.iter().all(ObjectRef::is_zero_copy));
    for object in &objects {
        assert!(local.remove(object.key(), true).unwrap(), "{}", object.key);
        assert!(local.get_ref(object.key()).unwrap().is_none(), "{} was removed", object.key);
    }
    let least = (4 * 700 * KIB) as u64;
    until("held objects drain", STEP_TIMEOUT, || draining() >= least);
    // Overwrites all other memory.
    for number in 0..300 {
        let object = Object { key: format!("over-{number}"), seed: seed ^ number, len: 600 * KIB };
        assert_eq!(object.put(local, &PutOptions::default()).unwrap(), PutOutcome::Stored);
    }
    assert!(draining() >= least, "held memory was reallocated");
    for (object, held) in objects.iter().zip(&held) {
        object.check(held, "held while other memory was overwritten");
        assert!(held.verify());
    }
    drop(held);
    until("draining returns to nothing", STEP_TIMEOUT, || draining() == 0);
}
