//! A node is killed with SIGKILL while it writes to its disk, and restarted on it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use moontide_client::{PutOptions, PutOutcome, Store, StoreConfig};
use moontide_disk::BackendKind;
use moontide_types::ErrorCode;

use crate::content::Rng;
use crate::disk_harness::{
    DiskCluster, RELAXED_TIMEOUT, Sizes, count_existing, first_hit, for_each, mib, on_disk, put_fast,
    read_fast,
};
use crate::harness::{KIB, MIB, connect, is_full, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Way, read};

/// Time after the first hit in which all records on disk must be reported.
const REPORTED: Duration = Duration::from_secs(20);

#[test]
fn records_on_disk_survive_node_kill_during_offload() {
    let backends = if is_full() { &BackendKind::ALL[..] } else { &[BackendKind::Bucket] };
    for &backend in backends {
        kill_in_mid_offload(backend, sized(1, 5));
    }
}

fn kill_in_mid_offload(backend: BackendKind, rounds: usize) {
    let memory_mib = sized(32, 256);
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start(backend, Sizes::times(memory_mib, 8 * rounds), "");
    let store = cluster.store(false);
    let mut all: Vec<Object> = Vec::new();
    for round in 0..rounds {
        let acknowledged = Mutex::new(Vec::new());
        let (stop, next) = (AtomicBool::new(false), AtomicUsize::new(0));
        let seed = rng.draw();
        // A put on a killed node waits for its restart, with a limit.
        let config = StoreConfig { timeout: Duration::from_secs(10), ..cluster.cluster.config() };
        let writers = [true, false].map(|local| connect(StoreConfig { shm: local, ..config.clone() }));
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
                                assert_eq!(put, PutOutcome::Stored, "{}", object.key);
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
            until("twice the memory is put", RELAXED_TIMEOUT, || {
                mib(&acknowledged()) > 2.0 * memory_mib as f64
            });
            let known = on_disk(&store, &[&all[..], &acknowledged()].concat());
            until("something is being written", RELAXED_TIMEOUT, || {
                cluster.node_metrics().node("disk_offload_backlog_bytes") > 0
            });
            stop.store(true, Ordering::Relaxed);
            cluster.cluster.nodes[0].kill();
            cluster.cluster.restart_node(0);
            Served::wait(&cluster, &store, known)
        });
        all.extend(acknowledged.into_inner().expect("no holder panics"));
        served.check(&store, &all, &format!("{backend}, kill {round}"));
    }
    cluster.cluster.end();
}

/// Objects on disk before the kill, and times until the first and until all were readable again.
struct Served {
    known: Vec<Object>,
    first: Duration,
    all: Duration,
}

impl Served {
    /// Waits until all objects exist again, or [`REPORTED`] has passed.
    fn wait(cluster: &DiskCluster, store: &Store, known: Vec<Object>) -> Served {
        let first = first_hit(cluster, store, &known);
        let started = cluster.cluster.nodes[0].started;
        while count_existing(store, &known) < known.len() && started.elapsed() < first + REPORTED {
            std::thread::sleep(Duration::from_millis(5));
        }
        Served { known, first, all: started.elapsed() }
    }

    /// Asserts that all known objects are served: a master learns of a record on disk only when the record is durable.
    /// All other reads are correct or miss.
    fn check(&self, store: &Store, put: &[Object], what: &str) {
        let Served { known, first, all } = self;
        let tally = read_fast(store, known);
        println!(
            "{what}: {} of {} objects that were on disk are served again; after the start: first hit {first:?}, \
             all exist {all:?}",
            tally.right(),
            known.len()
        );
        assert!(known.len() > 10, "only {} objects were on disk", known.len());
        assert_eq!(tally.right(), known.len() as u64, "{what}: {:?}", tally.lost().first());
        let rest = read_fast(store, put);
        let failed: Vec<_> = rest.lost().into_iter().filter(|lost| lost.reason != "a miss").collect();
        assert!(failed.is_empty(), "{what}: reads failed; only misses are expected: {:?}", failed.first());
    }
}

#[test]
fn removed_objects_do_not_return_after_node_kill() {
    for backend in BackendKind::ALL {
        removed_stays_removed(backend);
    }
}

fn removed_stays_removed(backend: BackendKind) {
    let memory_mib = sized(16, 256);
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start(backend, Sizes::times(memory_mib, 8), "");
    let store = cluster.store(false);
    for round in 0..sized(1, 4) {
        let bytes = 3 * memory_mib * MIB;
        let objects: Vec<Object> = (0..bytes / (256 * KIB))
            .map(|n| Object::new(&format!("round-{round}"), n, &mut rng, KIB..512 * KIB))
            .collect();
        put_fast(&[&store], &objects);
        let known = on_disk(&store, &objects);
        assert!(known.len() > 10, "only {} objects were on disk", known.len());
        // Objects on disk and objects being offloaded.
        let removed: Vec<Object> = objects.iter().filter(|_| rng.draw().is_multiple_of(3)).cloned().collect();
        for_each(&[&store], &removed, |store, object| {
            assert!(store.remove(object.key(), true).unwrap(), "{} was there", object.key);
        });
        cluster.kill_and_restart();
        let kept: Vec<Object> =
            known.into_iter().filter(|object| !removed.iter().any(|other| other.key == object.key)).collect();
        first_hit(&cluster, &store, &kept);
        until("objects that were not removed exist again", REPORTED, || {
            count_existing(&store, &kept) == kept.len()
        });
        let tally = read_fast(&store, &kept);
        assert_eq!(tally.right(), kept.len() as u64, "{backend}: {:?}", tally.lost().first());
        for object in &removed {
            let got = read(&store, Way::Copy, object);
            assert!(matches!(got, Got::Miss), "{backend}: {} was removed, and now {got:?}", object.key);
        }
        println!("{backend}: {} stay removed, {} kept exist", removed.len(), kept.len());
    }
    cluster.cluster.end();
}

/// Puts more objects than memory holds. Returns those on disk.
fn objects_on_disk(store: &Store, rng: &mut Rng) -> Vec<Object> {
    let objects: Vec<Object> =
        (0..200).map(|n| Object::new("old", n, rng, 256 * KIB..256 * KIB + 1)).collect();
    put_fast(&[store], &objects);
    let known = on_disk(store, &objects);
    assert!(known.len() > 20, "only {} objects were on disk", known.len());
    known
}

/// Regression: a master forgets the objects of an absent node, so that a replacement found no older version and kept no
/// tombstone. When the new version was lost, the disk of the returning node brought the old one back.
#[test]
fn replaced_object_does_not_return_with_disk_of_absent_node() {
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start(BackendKind::Bucket, Sizes::times(16, 8), "");
    let store = cluster.store(false);
    let known = objects_on_disk(&store, &mut rng);
    let (replaced, kept) = known.split_at(10);
    cluster.cluster.nodes[0].kill();
    cluster.cluster.wait_for_nodes(0);
    cluster.cluster.add_plain_node();
    cluster.cluster.wait_for_nodes(1);
    let upsert = PutOptions { upsert: true, ..PutOptions::default() };
    for object in replaced {
        let put = store.put_with(object.key(), &[b"new"], &upsert).map_err(|error| error.code());
        assert_eq!(put, Err(ErrorCode::Pending), "{}: its node is absent", object.key);
        assert_eq!(store.get(object.key()).unwrap().as_deref(), Some(&b"new"[..]), "stored nevertheless");
    }
    let mut put = std::process::Command::new(env!("CARGO_BIN_EXE_moontide"));
    put.args([
        "put",
        &replaced[0].key,
        "/dev/null",
        "--upsert",
        "--json",
        "--master",
        cluster.cluster.grpc(),
    ]);
    let put = put.output().expect("the command runs");
    let printed = String::from_utf8_lossy(&put.stdout);
    assert!(put.status.success() && printed.contains("\"outcome\":\"pending\""), "{put:?}");
    cluster.cluster.nodes[1].kill();
    cluster.cluster.wait_for_nodes(0);
    cluster.cluster.restart_node(0);
    first_hit(&cluster, &store, kept);
    until("objects that were not replaced exist again", REPORTED, || {
        count_existing(&store, kept) == kept.len()
    });
    for object in replaced {
        let got = read(&store, Way::Copy, object);
        assert!(matches!(got, Got::Miss), "{} was replaced, and now {got:?}", object.key);
    }
}

/// Regression: a removal that was acknowledged while a disk was away came back with the disk, if the master that
/// remembered it had crashed in the meantime.
#[test]
fn removed_object_does_not_return_with_disk_that_missed_two_masters() {
    const TTL_MS: u64 = 2000;
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start_with_ttl(BackendKind::Bucket, Sizes::times(16, 8), TTL_MS);
    let store = cluster.store(false);
    let known = objects_on_disk(&store, &mut rng);
    let (removed, kept) = known.split_at(10);
    let marks = std::path::PathBuf::from(cluster.tier()).join("sync.marks");
    until("the node is in sync", REPORTED, || marks.is_file());

    for removes in [false, true] {
        cluster.cluster.nodes[0].kill();
        cluster.cluster.master.kill();
        cluster.cluster.restart_master();
        cluster.cluster.wait_for_nodes(0);
        // The second master waits for two sessions.
        std::thread::sleep(Duration::from_millis(2 * TTL_MS + 500));
        let store = connect(cluster.cluster.config());
        for object in removed.iter().filter(|_| removes) {
            until("the removal is certain", REPORTED, || {
                let answer = store.remove(object.key(), true);
                let is_certain = matches!(answer, Ok(false));
                assert!(is_certain || answer.is_err_and(|error| error.code() == ErrorCode::Pending));
                is_certain
            });
        }
        cluster.cluster.master.kill();
        cluster.cluster.restart_master();
        cluster.cluster.restart_node(0);
        cluster.cluster.wait_for_nodes(1);
        let store = cluster.store(false);
        if !removes {
            until("without removals the disk keeps its objects", REPORTED, || {
                count_existing(&store, kept) == kept.len() && count_existing(&store, removed) == removed.len()
            });
            continue;
        }
        let ended = std::time::Instant::now() + Duration::from_secs(4);
        while std::time::Instant::now() < ended {
            assert_eq!(count_existing(&store, removed), 0, "removed objects are back");
        }
    }
}
