//! Keys of capabilities that change every second, and with the master: no call fails, and no reader sees it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutOptions, StoreConfig};

use crate::content::Rng;
use crate::harness::{Cluster, KIB, STEP_TIMEOUT, Shape, connect, sized, until, words};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read, read_until, replicas};

#[test]
fn rotation_every_second_fails_no_get_and_no_put() {
    let mut rng = Rng::seeded();
    let shape = Shape { master_words: words("--capability-rotation-ms 1s"), ..Shape::default() };
    let cluster = Cluster::start(shape);
    cluster.wait_for_nodes(3);
    let objects: Vec<Object> = (0..200).map(|n| Object::new("kept", n, &mut rng, 1..40 * KIB)).collect();
    put_all(&cluster.remote(), &objects, &replicas(2));
    let stores = [cluster.remote(), cluster.remote()];
    let (stop, reads, failed) = (AtomicBool::new(false), Tally::default(), std::sync::Mutex::new(Vec::new()));
    let puts = std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let (stop, reads, failed, objects) = (&stop, &reads, &failed, &objects);
        for store in &stores {
            let rng = rng.fork();
            scope.spawn(move || read_until(stop, store, objects, rng, &Way::ALL, reads));
        }
        let mut rng = rng.fork();
        let writer = cluster.remote();
        let writer = scope.spawn(move || {
            let mut puts = 0;
            while !stop.load(Ordering::Relaxed) {
                let object = Object::new("put", puts, &mut rng, 1..100 * KIB);
                match object.put(&writer, &PutOptions::default()) {
                    Ok(_) => match read(&writer, Way::Copy, &object) {
                        Got::Right => {}
                        other => failed.lock().unwrap().push(format!("read of {}: {other:?}", object.key)),
                    },
                    Err(error) => failed.lock().unwrap().push(format!("put of {}: {error}", object.key)),
                }
                assert!(writer.remove(object.key(), true).unwrap());
                puts += 1;
            }
            puts
        });
        std::thread::sleep(Duration::from_secs(sized(12, 120)));
        stop.store(true, Ordering::Relaxed);
        writer.join().expect("the writer found nothing wrong")
    });
    reads.summary("reads");
    let refused: u64 =
        cluster.nodes.iter().map(|node| node.metrics().node("capabilities_refused_total")).sum();
    println!("{puts} puts; {refused} requests with retired keys");
    assert!(reads.lost().is_empty(), "{:?}", reads.lost());
    assert_eq!(failed.into_inner().unwrap(), Vec::<String>::new());
    assert!(reads.right() > 100 && puts > 10 && refused > 0, "the load met rotations");
    cluster.end();
}

/// A master dies. Clients read on from the locations that they know, before and after the next master has taken over: it signs
/// with other keys, and the nodes keep those of its predecessor.
#[test]
fn cached_locations_survive_the_failover_of_a_master() {
    let mut rng = Rng::seeded();
    const INTERVAL: Duration = Duration::from_secs(6);
    let shape = Shape { master_words: words("--capability-rotation-ms 6s"), ..Shape::default() };
    let mut cluster = Cluster::start(shape);
    cluster.wait_for_nodes(3);
    let objects: Vec<Object> = (0..300).map(|n| Object::new("kept", n, &mut rng, 1..8 * KIB)).collect();
    put_all(&cluster.remote(), &objects, &PutOptions::default());
    let store = connect(StoreConfig { timeout: Duration::from_secs(2), shm: false, ..cluster.config() });
    let read_all = |when: &str| {
        for object in &objects {
            assert!(matches!(read(&store, Way::Copy, object), Got::Right), "{} {when}", object.key);
        }
    };
    let sum = |cluster: &Cluster, metric: &str| -> Vec<u64> {
        cluster.nodes.iter().map(|node| node.metrics().node(metric)).collect()
    };
    let rotated = |cluster: &Cluster, times: u64| {
        let wanted: Vec<u64> =
            sum(cluster, "capability_keys_total").iter().map(|keys| keys + times).collect();
        until("the nodes have the next key", STEP_TIMEOUT, || {
            sum(cluster, "capability_keys_total").iter().zip(&wanted).all(|(keys, wanted)| keys >= wanted)
        });
    };
    rotated(&cluster, 1);
    let began = Instant::now();
    read_all("before");
    // One rotation: the locations are now signed with the previous key of the master.
    rotated(&cluster, 1);
    cluster.master.kill();
    let is_in_time = began.elapsed() < 2 * INTERVAL; // not on a machine that was stopped for seconds
    read_all("without a master");
    if is_in_time {
        assert_eq!(sum(&cluster, "capabilities_refused_total"), [0; 3]);
    }
    cluster.restart_master();
    let restarted = Instant::now();
    cluster.wait_for_nodes(3);
    read_all("with the next master");
    if is_in_time && restarted.elapsed() < INTERVAL {
        // Until its first rotation the nodes keep the keys of the old master.
        assert_eq!(sum(&cluster, "capabilities_refused_total"), [0; 3]);
    }
    cluster.end();
}
