//! One replica of two behind a proxy: slow, where a second one is asked, and cut in the middle, where it is tried again.

use std::time::{Duration, Instant};

use moontide_client::{Hedge, Store, StoreConfig};

use crate::content::Rng;
use crate::kit::{Cluster, KIB, SOON, Shape, connect, sized, words};
use crate::proxy::Proxy;
use crate::readers::{Got, Object, Way, put_all, read, replicas};

const DELAY: Duration = Duration::from_millis(300);

/// Two nodes, the second of which is reached through a proxy.
fn start(rng: &mut Rng) -> (Cluster, Proxy) {
    let proxy = Proxy::start(rng.fork());
    let shape = Shape {
        nodes: 1,
        memory_mib: sized(256, 2048),
        // What a put that failed has reserved comes back while the test waits for it.
        master_words: words("--reservation-ms 5000"),
        ..Shape::default()
    };
    let mut cluster = Cluster::start(shape);
    cluster.add_node(&words(&format!("--advertise {}", proxy.address)));
    proxy.speak_for(cluster.nodes[1].said("tcp").parse().expect("an address"));
    (cluster, proxy)
}

fn far(cluster: &Cluster, hedge: Hedge) -> Store {
    connect(StoreConfig { local: false, hedge, ..cluster.config() })
}

/// Reads each object, and returns how long each read took, sorted.
fn times(store: &Store, objects: &[Object]) -> Vec<Duration> {
    let mut times: Vec<Duration> = objects
        .iter()
        .map(|object| {
            let began = Instant::now();
            let got = read(store, Way::Copy, object);
            assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
            began.elapsed()
        })
        .collect();
    times.sort();
    times
}

fn percentile(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() * percent).div_ceil(100) - 1]
}

#[test]
fn a_second_replica_is_asked_when_the_first_is_slow() {
    let mut rng = Rng::seeded();
    let (cluster, proxy) = start(&mut rng);
    let objects: Vec<Object> =
        (0..sized(200, 2000)).map(|n| Object::new("slow", n, &mut rng, KIB..60 * KIB)).collect();
    put_all(&far(&cluster, Hedge::Off), &objects, &replicas(2));

    let hedges = [Hedge::Off, Hedge::Adaptive, Hedge::After(Duration::from_millis(20))];
    let [patient, usual, fixed] = hedges.map(|hedge| far(&cluster, hedge));
    // Connections are there, and what is usual is known, when it becomes slow.
    for store in [&patient, &usual, &fixed] {
        times(store, &objects);
    }
    proxy.set_delay(DELAY);
    // Without: those that draw the slow replica first wait for it. Few of them are enough to see that.
    let without = times(&patient, &objects[..40]);
    let adaptive = times(&usual, &objects);
    let after = times(&fixed, &objects);
    let p99 = [&without, &adaptive, &after].map(|times| percentile(times, 99));
    let (hedges, won) = {
        let stats = usual.metrics().stats();
        (stats.hedges, stats.hedges_won)
    };
    println!(
        "replica late by {DELAY:?}: p99 {:?} without, {:?} adaptive ({hedges} second reads, {won} of them first), {:?} after 20 ms",
        p99[0], p99[1], p99[2]
    );
    assert!(p99[0] >= DELAY, "{:?}", p99[0]);
    assert!(p99[1] < DELAY / 2, "{:?}", p99[1]);
    assert!(p99[2] < DELAY / 2, "{:?}", p99[2]);
    assert!(won > 0 && won <= hedges, "{won} of {hedges}");
    let stats = fixed.metrics().stats();
    assert!(stats.hedges_won > 0, "{stats:?}");
    assert_eq!(stats.requested, stats.hits_remote, "{stats:?}");
    cluster.end();
}

#[test]
fn gets_are_right_when_connections_are_cut_in_the_middle() {
    let mut rng = Rng::seeded();
    let (cluster, proxy) = start(&mut rng);
    let objects: Vec<Object> =
        (0..sized(100, 1000)).map(|n| Object::new("cut", n, &mut rng, 100 * KIB..700 * KIB)).collect();
    let options = replicas(2);
    put_all(&far(&cluster, Hedge::Off), &objects, &options);
    proxy.cut_within(800 << 10);
    for hedge in [Hedge::Off, Hedge::Adaptive] {
        let (store, before, end) = (far(&cluster, hedge), proxy.cuts(), Instant::now() + SOON);
        let mut all = Vec::new();
        // A node that was just cut off is asked last for a while.
        while all.len() < 3 * objects.len() || proxy.cuts() < before + 5 {
            assert!(Instant::now() < end, "{} cuts within {SOON:?}", proxy.cuts() - before);
            all.extend(times(&store, &objects));
        }
        all.sort();
        println!(
            "{hedge:?}: {} reads with {} cuts, p99 {:?}, the longest {:?}",
            all.len(),
            proxy.cuts() - before,
            percentile(&all, 99),
            percentile(&all, 100)
        );
        let stats = store.metrics().stats();
        assert_eq!(stats.requested, stats.hits_remote, "{stats:?}");
        assert_eq!(stats.corrupt, 0);
    }

    // Puts too: a put that was acknowledged holds what was put.
    let store = far(&cluster, Hedge::Off);
    let (mut stored, mut failed, before) = (0, 0, proxy.cuts());
    proxy.cut_within(2000);
    for number in 0..sized(40, 400) {
        let object = Object::new("put", number, &mut rng, 100 * KIB..700 * KIB);
        match object.put(&store, &options) {
            Ok(_) => {
                let got = read(&store, Way::Copy, &object);
                assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
                stored += 1;
            }
            Err(_) => failed += 1,
        }
    }
    println!("{stored} objects stored, {failed} not, with {} cuts", proxy.cuts() - before);
    assert!(stored > 0);
    assert!(proxy.cuts() > before);
    proxy.cut_within(0);
    // When the cuts have ended puts succeed again: not at once, for a node that failed so often is left alone for a moment,
    // and whoever failed so often repeats nothing.
    let object = Object::new("last", 0, &mut rng, KIB..2 * KIB);
    let end = Instant::now() + SOON;
    while let Err(error) = object.put(&store, &options) {
        assert!(Instant::now() < end, "a put after the cuts: {error}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(matches!(read(&store, Way::Copy, &object), Got::Right));
    cluster.check_books();
    cluster.end();
}
