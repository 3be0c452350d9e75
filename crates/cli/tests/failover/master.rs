//! A master that is killed and started again under load: how soon readers and writers go on, and what becomes of writers
//! whose place was given to them by the one that was killed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{Put, PutOptions, StoreConfig};

use crate::content::Rng;
use crate::kit::{Cluster, KIB, SOON, Shape, connect, is_full, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Way, put_all, read};

/// From the kill to the first get that had to ask the new master. Some tenths of a second are usual.
const FIRST_HIT: Duration = Duration::from_secs(3);

#[test]
fn gets_and_puts_go_on_within_three_seconds_of_a_masters_kill() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(Shape { session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> =
        (0..sized(500, 20_000)).map(|n| Object::new("kept", n, &mut rng, 0..8 * KIB)).collect();
    put_all(&cluster.far(), &objects, &PutOptions::default());
    // It remembers nothing: every get asks the master.
    let asking = StoreConfig { local: false, locations: 0, ..cluster.config() };
    let asking = connect(StoreConfig { deadline: Duration::from_millis(500), ..asking });
    let putting = connect(StoreConfig { deadline: Duration::from_millis(500), ..cluster.config() });
    for round in 0..sized(3, 20) {
        let (stop, hits) = (AtomicBool::new(false), AtomicU64::new(0));
        let stored = Mutex::new(Vec::<(Instant, Instant, Object)>::new());
        let (killed, first_hit) = (Mutex::new(None::<Instant>), Mutex::new(None::<Instant>));
        let times = std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            let (stop, hits, stored) = (&stop, &hits, &stored);
            let (first_hit, killed, asking, putting, objects) =
                (&first_hit, &killed, &asking, &putting, &objects);
            let mut readers = rng.fork();
            let reader = scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let object = &objects[readers.within(0, objects.len())];
                    let began = Instant::now();
                    if let Got::Right = read(asking, Way::Copy, object) {
                        hits.fetch_add(1, Ordering::Relaxed);
                        if killed.lock().unwrap().is_some_and(|killed| began > killed) {
                            first_hit.lock().unwrap().get_or_insert_with(Instant::now);
                        }
                    }
                }
            });
            let mut writers = rng.fork();
            let writer = scope.spawn(move || {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let object = Object::new(&format!("put-{round}"), number, &mut writers, 1..4 * KIB);
                    let began = Instant::now();
                    if object.put(putting, &PutOptions::default()).is_ok() {
                        stored.lock().unwrap().push((began, Instant::now(), object));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            until("hits and puts before", SOON, || {
                hits.load(Ordering::Relaxed) > 50 && stored.lock().unwrap().len() > 20
            });
            let signalled_at = Instant::now();
            cluster.master.kill();
            // What begins from here on is not answered by the one that was killed.
            let killed_at = Instant::now();
            *killed.lock().unwrap() = Some(killed_at);
            cluster.restart_master();
            until("a hit after the kill", SOON, || first_hit.lock().unwrap().is_some());
            let after = || {
                let stored = stored.lock().unwrap();
                stored.iter().find(|(began, ..)| *began > killed_at).map(|(_, ended, _)| *ended)
            };
            until("a put after the kill", SOON, || after().is_some());
            let hit = first_hit.lock().unwrap().expect("waited for") - signalled_at;
            stop.store(true, Ordering::Relaxed);
            reader.join().expect("the reader found nothing wrong");
            writer.join().expect("the writer found nothing wrong");
            (hit, after().expect("waited for") - signalled_at)
        });
        println!("first hit after {:?}, first put after {:?}", times.0, times.1);
        assert!(times.0 <= FIRST_HIT, "the first hit came {:?} after the kill", times.0);
        cluster.wait_for_nodes(3);
        // What was acknowledged, by the old master or the new one, is there.
        for object in stored.into_inner().unwrap().iter().map(|(.., object)| object).chain(&objects) {
            until(&format!("{} is found again", object.key), SOON, || {
                matches!(read(&asking, Way::Copy, object), Got::Right)
            });
        }
    }
    drop((asking, putting));
    cluster.check_books();
    cluster.end();
}

#[test]
fn a_plan_of_a_master_that_was_killed_is_refused_and_touches_nothing() {
    let mut rng = Rng::seeded();
    // Little memory: what the new master gives out lies where the old plans would write.
    let mut cluster = Cluster::start(Shape { nodes: 2, memory_mib: 8, ..Shape::default() });
    let far = cluster.far();
    let plans: Vec<_> = (0..20)
        .map(|n| {
            let object = Object::new("old", n, &mut rng, 64 * KIB..65 * KIB);
            let plan = far.open_for_write(object.key(), object.len as u64, &PutOptions::default());
            (plan.expect("there is room"), object)
        })
        .collect();
    cluster.master.kill();
    cluster.restart_master();
    cluster.wait_for_nodes(2);
    // Most of the memory, so that many of the ranges that were promised are somebody else's now.
    let fresh: Vec<Object> = (0..150).map(|n| Object::new("new", n, &mut rng, 64 * KIB..65 * KIB)).collect();
    put_all(&cluster.far(), &fresh, &PutOptions::default());
    let refused = |cluster: &Cluster| {
        cluster.nodes.iter().map(|node| node.metrics().node("begins_refused_total")).sum::<u64>()
    };
    let before = refused(&cluster);
    let count = plans.len() as u64;
    for (mut plan, object) in plans {
        let written = plan.write(&[&object.content()]);
        assert!(written.is_err(), "{}: a plan of an older term was written", object.key);
    }
    assert!(refused(&cluster) >= before + count, "it was the nodes who refused");
    for object in &fresh {
        let got = read(&far, Way::Copy, object);
        assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
    }
    cluster.check_books();
    cluster.end();
}

#[test]
fn a_writer_who_is_late_is_refused_and_one_who_is_not_may_end_at_the_new_master() {
    let mut rng = Rng::seeded();
    let window = Duration::from_millis(1000);
    let master_words = crate::kit::words(&format!("--reservation-ms {}", window.as_millis()));
    let mut cluster = Cluster::start(Shape { nodes: 2, master_words, ..Shape::default() });
    let mut ways = vec![("near", true), ("far", false)];
    if !is_full() {
        ways.remove(rng.within(0, ways.len()));
    }
    for (name, local) in ways {
        let store = connect(StoreConfig { local, ..cluster.config() });
        let begin = |name: &str, rng: &mut Rng| {
            let object = Object::new(name, 0, rng, 10 * KIB..100 * KIB);
            let plan = store.open_for_write(object.key(), object.len as u64, &PutOptions::default());
            let mut plan = plan.expect("there is room");
            plan.write(&[&object.content()]).expect("the plan is of this master");
            (plan, object)
        };
        let (in_time, early) = begin(&format!("early-{name}"), &mut rng);
        let (too_late, late) = begin(&format!("late-{name}"), &mut rng);
        cluster.master.kill();
        cluster.restart_master();
        cluster.wait_for_nodes(2);
        // The nodes have told the new master of both, and each has a fresh deadline.
        let epoch = in_time.epoch();
        match in_time.commit(epoch) {
            Ok(put) => {
                assert_eq!(put, Put::Stored);
                let got = read(&store, Way::Copy, &early);
                assert!(matches!(got, Got::Right), "{} was acknowledged: {got:?}", early.key);
            }
            Err(error) => println!("{name}: a writer who began before is refused by the new master: {error}"),
        }
        // Both deadlines, that of the old master and the fresh one, and some ticks.
        std::thread::sleep(2 * window + Duration::from_millis(500));
        let epoch = too_late.epoch();
        let ended = too_late.commit(epoch);
        assert!(ended.is_err(), "{name}: a writer came long after its time: {ended:?}");
        assert!(store.get(late.key()).expect("the master answers").is_none(), "{}", late.key);
    }
    cluster.check_books();
    cluster.end();
}
