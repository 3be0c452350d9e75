//! A master is killed and restarted under load: recovery time of readers and writers, and results of writers with
//! reservations of the killed master.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutOptions, PutOutcome, StoreConfig};

use crate::content::Rng;
use crate::harness::{Cluster, KIB, STEP_TIMEOUT, Shape, connect, is_full, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Way, put_all, read};

/// Maximum time from the kill to the first get through the new master; typically a few tenths of a second.
const FIRST_HIT: Duration = Duration::from_secs(3);

#[test]
fn gets_resume_within_three_seconds_of_master_kill_and_puts_resume() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(Shape { session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> =
        (0..sized(500, 20_000)).map(|n| Object::new("kept", n, &mut rng, 0..8 * KIB)).collect();
    put_all(&cluster.remote(), &objects, &PutOptions::default());
    // Without location cache: every get calls the master.
    let uncached = StoreConfig { shm: false, location_cache_entries: 0, ..cluster.config() };
    let uncached = connect(StoreConfig { timeout: Duration::from_millis(500), ..uncached });
    let writing = connect(StoreConfig { timeout: Duration::from_millis(500), ..cluster.config() });
    for round in 0..sized(3, 20) {
        let (stop, hits) = (AtomicBool::new(false), AtomicU64::new(0));
        let stored = Mutex::new(Vec::<(Instant, Instant, Object)>::new());
        let (killed, first_hit) = (Mutex::new(None::<Instant>), Mutex::new(None::<Instant>));
        let times = std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            let (stop, hits, stored) = (&stop, &hits, &stored);
            let (first_hit, killed, uncached, writing, objects) =
                (&first_hit, &killed, &uncached, &writing, &objects);
            let mut readers = rng.fork();
            let reader = scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let object = &objects[readers.within(0, objects.len())];
                    let began = Instant::now();
                    if let Got::Right = read(uncached, Way::Copy, object) {
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
                    if object.put(writing, &PutOptions::default()).is_ok() {
                        stored.lock().unwrap().push((began, Instant::now(), object));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            until("hits and puts before", STEP_TIMEOUT, || {
                hits.load(Ordering::Relaxed) > 50 && stored.lock().unwrap().len() > 20
            });
            let signalled_at = Instant::now();
            cluster.master.kill();
            // The killed master does not answer calls that start after this.
            let killed_at = Instant::now();
            *killed.lock().unwrap() = Some(killed_at);
            cluster.restart_master();
            until("a hit after the kill", STEP_TIMEOUT, || first_hit.lock().unwrap().is_some());
            let after = || {
                let stored = stored.lock().unwrap();
                stored.iter().find(|(began, ..)| *began > killed_at).map(|(_, ended, _)| *ended)
            };
            until("a put after the kill", STEP_TIMEOUT, || after().is_some());
            let hit = first_hit.lock().unwrap().expect("waited for") - signalled_at;
            stop.store(true, Ordering::Relaxed);
            reader.join().expect("the reader found nothing wrong");
            writer.join().expect("the writer found nothing wrong");
            (hit, after().expect("waited for") - signalled_at)
        });
        println!("first hit after {:?}, first put after {:?}", times.0, times.1);
        assert!(times.0 <= FIRST_HIT, "the first hit came {:?} after the kill", times.0);
        cluster.wait_for_nodes(3);
        // Objects acknowledged by the old or the new master exist.
        for object in stored.into_inner().unwrap().iter().map(|(.., object)| object).chain(&objects) {
            until(&format!("{} is found again", object.key), STEP_TIMEOUT, || {
                matches!(read(&uncached, Way::Copy, object), Got::Right)
            });
        }
    }
    drop((uncached, writing));
    cluster.check_accounting();
    cluster.end();
}

#[test]
fn write_plan_of_killed_master_is_refused_by_nodes() {
    let mut rng = Rng::seeded();
    // Little memory, so that the new master allocates ranges of the old plans.
    let mut cluster = Cluster::start(Shape { nodes: 2, memory_mib: 8, ..Shape::default() });
    let remote = cluster.remote();
    let plans: Vec<_> = (0..20)
        .map(|n| {
            let object = Object::new("old", n, &mut rng, 64 * KIB..65 * KIB);
            let plan = remote.open_for_write(object.key(), object.len as u64, &PutOptions::default());
            (plan.expect("there is space"), object)
        })
        .collect();
    cluster.master.kill();
    cluster.restart_master();
    cluster.wait_for_nodes(2);
    // Most of the memory, so that many ranges of the old plans belong to other objects now.
    let fresh: Vec<Object> = (0..150).map(|n| Object::new("new", n, &mut rng, 64 * KIB..65 * KIB)).collect();
    put_all(&cluster.remote(), &fresh, &PutOptions::default());
    let refused = |cluster: &Cluster| {
        cluster.nodes.iter().map(|node| node.metrics().node("begins_refused_total")).sum::<u64>()
    };
    let before = refused(&cluster);
    let count = plans.len() as u64;
    for (mut plan, object) in plans {
        let written = plan.write(&[&object.content()]);
        assert!(written.is_err(), "{}: a plan of an older term was written", object.key);
    }
    assert!(refused(&cluster) >= before + count, "the nodes did not refuse the plans");
    for object in &fresh {
        let got = read(&remote, Way::Copy, object);
        assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
    }
    cluster.check_accounting();
    cluster.end();
}

#[test]
fn commit_after_master_restart_and_expired_reservation_is_refused() {
    let mut rng = Rng::seeded();
    // Longer than a writer needs after the restart to find the new master, on a machine that stalls for seconds. A plan
    // ends with its reservation, whatever the timeout of its client.
    let window = Duration::from_secs(6);
    let master_words = crate::harness::words(&format!("--reservation-ms {}", window.as_millis()));
    let mut cluster = Cluster::start(Shape { nodes: 2, master_words, ..Shape::default() });
    let mut ways = vec![("local", true), ("remote", false)];
    if !is_full() {
        ways.remove(rng.within(0, ways.len()));
    }
    for (name, local) in ways {
        let store = connect(StoreConfig { shm: local, ..cluster.config() });
        let begin = |name: &str, rng: &mut Rng| {
            let object = Object::new(name, 0, rng, 10 * KIB..100 * KIB);
            let plan = store.open_for_write(object.key(), object.len as u64, &PutOptions::default());
            let mut plan = plan.expect("there is space");
            plan.write(&[&object.content()]).expect("the plan is of this master");
            (plan, object)
        };
        let (in_time, early) = begin(&format!("early-{name}"), &mut rng);
        let (too_late, late) = begin(&format!("late-{name}"), &mut rng);
        cluster.master.kill();
        cluster.restart_master();
        cluster.wait_for_nodes(2);
        // The nodes report both to the new master, and each has a new timeout: a writer that commits within it has lost
        // nothing by the restart.
        let epoch = in_time.epoch();
        let ended = in_time.commit(epoch);
        assert!(matches!(ended, Ok(PutOutcome::Stored)), "{name}: commit within the timeout: {ended:?}");
        let got = read(&store, Way::Copy, &early);
        assert!(matches!(got, Got::Right), "{} was acknowledged: {got:?}", early.key);
        // Both timeouts, of the old master and of the new one, and some ticks.
        std::thread::sleep(2 * window + Duration::from_millis(500));
        let epoch = too_late.epoch();
        let ended = too_late.commit(epoch);
        assert!(ended.is_err(), "{name}: commit after the reservation expired: {ended:?}");
        assert!(store.get(late.key()).expect("the master answers").is_none(), "{}", late.key);
    }
    cluster.check_accounting();
    cluster.end();
}
