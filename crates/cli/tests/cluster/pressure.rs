//! Several times as much as the memory holds, put while readers hold on to what they found.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{ObjectRef, Put, PutOptions, Store};
use moontide_types::record::PinClass;

use crate::content::Rng;
use crate::kit::{Cluster, KIB, MIB, SOON, Shape, check_master_sums, check_node_sums, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read};

/// Of each node; three of them.
const MEMORY_MIB: usize = 48;

/// What was put last, by number: readers look for these.
fn object(seed: u64, number: usize) -> Object {
    let mut rng = Rng::new(seed ^ number as u64);
    Object::new("flood", number, &mut rng, 16 * KIB..MIB)
}

#[test]
fn eviction_takes_nothing_that_somebody_holds_and_the_books_agree() {
    let mut rng = Rng::seeded();
    let seed = rng.draw();
    let cluster = Cluster::start(Shape { memory_mib: MEMORY_MIB, ..Shape::default() });
    let wanted = sized(4, 20) * 3 * MEMORY_MIB * MIB;
    let (next, put_bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (stop, tallies) = (AtomicBool::new(false), [Tally::default(), Tally::default()]);
    let (near, far, writers) = (cluster.near(), cluster.far(), [cluster.near(), cluster.far()]);
    let in_place = AtomicU64::new(0);
    let putting = Tally::default();
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let (next, put_bytes, stop, tallies, near, far) = (&next, &put_bytes, &stop, &tallies, &near, &far);
        let (in_place, putting) = (&in_place, &putting);
        let puts: Vec<_> = writers
            .iter()
            .map(|store| {
                scope.spawn(move || {
                    while put_bytes.load(Ordering::Relaxed) < wanted {
                        let object = object(seed, next.fetch_add(1, Ordering::Relaxed));
                        let began = Instant::now();
                        match object.put(store, &PutOptions::default()) {
                            Ok(put) => {
                                assert_eq!(put, Put::Stored);
                                put_bytes.fetch_add(object.len, Ordering::Relaxed);
                                putting.note(began, Got::Right);
                            }
                            Err(error) => putting.note(began, Got::Failed(error)),
                        }
                    }
                })
            })
            .collect();
        let hold_rng = rng.fork();
        scope.spawn(move || hold_until(stop, near, hold_rng, (seed, next), in_place));
        for (store, ways, tally) in
            [(near, &[Way::Copy, Way::Into][..], &tallies[0]), (far, &[Way::Copy, Way::Ref][..], &tallies[1])]
        {
            let mut rng = rng.fork();
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let Some(object) = recent(&mut rng, seed, next) else { continue };
                    let began = Instant::now();
                    tally.note(began, read(store, ways[rng.within(0, ways.len())], &object));
                }
            });
        }
        // Sums hold on every page, whatever goes on.
        while !puts.iter().all(|put| put.is_finished()) {
            check_master_sums(&cluster.master.metrics());
            cluster.nodes.iter().for_each(|node| check_node_sums(&node.metrics()));
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    putting.summary("puts");
    tallies[0].summary("copies near");
    tallies[1].summary("copies far");
    let held = in_place.load(Ordering::Relaxed);
    let evicted = cluster.master.metrics().master("evicted_objects_total");
    println!(
        "{} MiB put, {held} objects held in place, {evicted} evicted",
        put_bytes.load(Ordering::Relaxed) >> 20
    );
    assert!(putting.lost().is_empty(), "puts failed though something could be evicted: {:?}", putting.lost());
    for tally in &tallies {
        let failed: Vec<_> = tally.lost().into_iter().filter(|lost| lost.why != "a miss").collect();
        assert!(failed.is_empty(), "reads failed, where a miss is an answer: {failed:?}");
        assert!(tally.right() > 0, "nothing was read");
    }
    assert!(held > 0, "nothing was read in place");
    assert!(evicted > 0, "nothing was evicted");
    held_and_let_go(&cluster, &near, seed);
    drop((near, far, writers));
    cluster.check_books();
    cluster.end();
}

/// One of those that were put a moment ago.
fn recent(rng: &mut Rng, seed: u64, next: &AtomicUsize) -> Option<Object> {
    let next = next.load(Ordering::Relaxed);
    (next > 0).then(|| object(seed, next - 1 - rng.within(0, next.min(300))))
}

/// Holds objects in place for a while, and looks at every byte when it lets go.
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
            in_place.fetch_add(found.is_in_place().into(), Ordering::Relaxed);
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

/// Objects that are held while they are removed keep their memory until they are let go, and not longer.
fn held_and_let_go(cluster: &Cluster, near: &Store, seed: u64) {
    let draining = || cluster.master.metrics().master("space_draining_units");
    until("nothing drains", SOON, || draining() == 0);
    let objects: Vec<Object> =
        (0..4).map(|n| Object { key: format!("held-{n}"), seed: seed ^ n, len: 700 * KIB }).collect();
    // Pinned: the memory is full, and a new object may be the first to leave.
    let pinned = PutOptions { pin: PinClass::Hard, ..PutOptions::default() };
    put_all(near, &objects, &pinned);
    let held: Vec<ObjectRef> =
        objects.iter().map(|object| near.get_ref(object.key()).unwrap().unwrap()).collect();
    assert!(held.iter().all(ObjectRef::is_in_place));
    for object in &objects {
        assert!(near.remove(object.key(), true).unwrap(), "{}", object.key);
        assert!(near.get_ref(object.key()).unwrap().is_none(), "{} was removed", object.key);
    }
    let least = 4 * 700 * 2;
    until("what is held drains", SOON, || draining() >= least);
    // Everything else is written over meanwhile.
    for number in 0..300 {
        let object = Object { key: format!("over-{number}"), seed: seed ^ number, len: 600 * KIB };
        assert_eq!(object.put(near, &PutOptions::default()).unwrap(), Put::Stored);
    }
    assert!(draining() >= least, "what is held is not given out");
    for (object, held) in objects.iter().zip(&held) {
        object.check(held, "held while all else was written over");
        assert!(held.verify());
    }
    drop(held);
    until("draining returns to nothing", SOON, || draining() == 0);
}
