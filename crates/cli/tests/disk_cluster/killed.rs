//! A node that is killed without a word while it writes to its disk, and started again on it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use moontide_client::{Put, PutOptions, Store, StoreConfig};
use moontide_disk::BackendKind;

use crate::content::Rng;
use crate::kit::{KIB, MIB, connect, is_full, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Way, read};
use crate::scene::{
    PATIENT, Scene, Sizes, count_existing, first_hit, for_each, mib, on_disk, put_fast, read_fast,
};

/// How long what is on disk may take to be told after the first of it was read.
const TOLD: Duration = Duration::from_secs(20);

#[test]
fn what_was_on_disk_is_there_after_a_kill_in_mid_offload() {
    let backends = if is_full() { &BackendKind::ALL[..] } else { &[BackendKind::Bucket] };
    for &backend in backends {
        kill_in_mid_offload(backend, sized(1, 5));
    }
}

fn kill_in_mid_offload(backend: BackendKind, rounds: usize) {
    let memory_mib = sized(32, 256);
    let mut rng = Rng::seeded();
    let mut scene = Scene::start(backend, Sizes::times(memory_mib, 8 * rounds), "");
    let store = scene.store(false);
    let mut all: Vec<Object> = Vec::new();
    for round in 0..rounds {
        let acknowledged = Mutex::new(Vec::new());
        let (stop, next) = (AtomicBool::new(false), AtomicUsize::new(0));
        let seed = rng.draw();
        // What is put to a node that is dead waits for the next one, not for ever.
        let config = StoreConfig { deadline: Duration::from_secs(10), ..scene.cluster.config() };
        let writers = [true, false].map(|local| connect(StoreConfig { local, ..config.clone() }));
        let served = std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            let (stop, next, acknowledged) = (&stop, &next, &acknowledged);
            for store in writers.iter().cycle().take(4) {
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let mut rng = Rng::new(seed ^ number as u64);
                        let object =
                            Object::new(&format!("round-{round}"), number, &mut rng, 16 * KIB..2 * MIB);
                        match object.put(store, &PutOptions::default()) {
                            Ok(put) => {
                                assert_eq!(put, Put::Stored, "{}", object.key);
                                acknowledged.lock().expect("no holder panics").push(object);
                            }
                            Err(error) => {
                                assert!(stop.load(Ordering::Relaxed), "{}: {error}", object.key);
                            }
                        }
                    }
                });
            }
            let acknowledged = || acknowledged.lock().expect("no holder panics").clone();
            until("twice the memory is put", PATIENT, || mib(&acknowledged()) > 2.0 * memory_mib as f64);
            let known = on_disk(&store, &[&all[..], &acknowledged()].concat());
            until("something is being written", PATIENT, || {
                scene.node_metrics().node("disk_backlog_bytes") > 0
            });
            stop.store(true, Ordering::Relaxed);
            scene.cluster.nodes[0].kill();
            scene.cluster.restart_node(0);
            Served::wait(&scene, &store, known)
        });
        all.extend(acknowledged.into_inner().expect("no holder panics"));
        served.check(&store, &all, &format!("{backend}, kill {round}"));
    }
    scene.cluster.end();
}

/// What was on disk before a node was killed, and how soon it was there again.
struct Served {
    known: Vec<Object>,
    first: Duration,
    all: Duration,
}

impl Served {
    /// Waits until all of it is there again, or for long enough.
    fn wait(scene: &Scene, store: &Store, known: Vec<Object>) -> Served {
        let first = first_hit(scene, store, &known);
        let started = scene.cluster.nodes[0].started;
        while count_existing(store, &known) < known.len() && started.elapsed() < first + TOLD {
            std::thread::sleep(Duration::from_millis(5));
        }
        Served { known, first, all: started.elapsed() }
    }

    /// At least 99 of 100 are there, and whatever else is there has its bytes.
    fn check(&self, store: &Store, put: &[Object], what: &str) {
        let Served { known, first, all } = self;
        let tally = read_fast(store, known);
        let share = tally.right() as f64 / known.len() as f64;
        println!(
            "{what}: {} of {} objects that were on disk are served again ({:.2} %); after the start: first hit {first:?}, \
             all there {all:?}",
            tally.right(),
            known.len(),
            share * 100.0
        );
        assert!(known.len() > 10, "only {} objects were on disk", known.len());
        assert!(share >= 0.99, "{what}: {:?}", tally.lost().first());
        let rest = read_fast(store, put);
        let failed: Vec<_> = rest.lost().into_iter().filter(|lost| lost.why != "a miss").collect();
        assert!(failed.is_empty(), "{what}: where a miss is an answer: {:?}", failed.first());
    }
}

#[test]
fn removed_stays_removed_over_a_kill_and_a_restart() {
    for backend in BackendKind::ALL {
        removed_stays_removed(backend);
    }
}

fn removed_stays_removed(backend: BackendKind) {
    let memory_mib = sized(16, 256);
    let mut rng = Rng::seeded();
    let mut scene = Scene::start(backend, Sizes::times(memory_mib, 8), "");
    let store = scene.store(false);
    for round in 0..sized(1, 4) {
        let bytes = 3 * memory_mib * MIB;
        let objects: Vec<Object> = (0..bytes / (256 * KIB))
            .map(|n| Object::new(&format!("round-{round}"), n, &mut rng, KIB..512 * KIB))
            .collect();
        put_fast(&[&store], &objects);
        let known = on_disk(&store, &objects);
        assert!(known.len() > 10, "only {} objects were on disk", known.len());
        // Of those on disk and of those on their way to it.
        let removed: Vec<Object> = objects.iter().filter(|_| rng.draw().is_multiple_of(3)).cloned().collect();
        for_each(&[&store], &removed, |store, object| {
            assert!(store.remove(object.key(), true).unwrap(), "{} was there", object.key);
        });
        scene.kill_and_restart();
        let kept: Vec<Object> =
            known.into_iter().filter(|object| !removed.iter().any(|other| other.key == object.key)).collect();
        first_hit(&scene, &store, &kept);
        until("what was not removed is there again", TOLD, || count_existing(&store, &kept) == kept.len());
        let tally = read_fast(&store, &kept);
        assert_eq!(tally.right(), kept.len() as u64, "{backend}: {:?}", tally.lost().first());
        for object in &removed {
            let got = read(&store, Way::Copy, object);
            assert!(matches!(got, Got::Miss), "{backend}: {} was removed, and now {got:?}", object.key);
        }
        println!("{backend}: {} removed and gone, {} kept and there", removed.len(), kept.len());
    }
    scene.cluster.end();
}
