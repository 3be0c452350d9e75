//! One of two replicas behind a proxy: slow, to test hedging, and with failing connections, to test retries.

use std::time::{Duration, Instant};

use moontide_client::{Hedge, Store, StoreConfig};

use crate::content::Rng;
use crate::harness::{Cluster, KIB, STEP_TIMEOUT, Shape, connect, sized, words};
use crate::proxy::Proxy;
use crate::readers::{Got, Object, Way, put_all, read, replicas};

const DELAY: Duration = Duration::from_millis(300);

/// Starts two nodes, the second behind a proxy.
fn start(rng: &mut Rng) -> (Cluster, Proxy) {
    let proxy = Proxy::start(rng.fork());
    let shape = Shape {
        nodes: 1,
        memory_mib: sized(256, 2048),
        // Reservations of failed puts expire while the test waits.
        master_words: words("--reservation-ms 5000"),
        ..Shape::default()
    };
    let mut cluster = Cluster::start(shape);
    cluster.add_node(&words(&format!("--advertise {}", proxy.address)));
    proxy.set_upstream(cluster.nodes[1].printed("tcp").parse().expect("an address"));
    (cluster, proxy)
}

fn remote(cluster: &Cluster, hedge: Hedge) -> Store {
    connect(StoreConfig { shm: false, hedge, ..cluster.config() })
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
fn hedged_read_avoids_slow_replica() {
    let mut rng = Rng::seeded();
    let (cluster, proxy) = start(&mut rng);
    let objects: Vec<Object> =
        (0..sized(200, 2000)).map(|n| Object::new("slow", n, &mut rng, KIB..60 * KIB)).collect();
    put_all(&remote(&cluster, Hedge::Off), &objects, &replicas(2));

    let hedges = [Hedge::Off, Hedge::Adaptive, Hedge::After(Duration::from_millis(20))];
    let [off, adaptive_store, fixed] = hedges.map(|hedge| remote(&cluster, hedge));
    // Establishes connections and usual latencies before the delay.
    for store in [&off, &adaptive_store, &fixed] {
        times(store, &objects);
    }
    proxy.set_delay(DELAY);
    // Without hedging, reads that choose the slow replica wait for it; a few reads show that.
    let without = times(&off, &objects[..40]);
    let adaptive = times(&adaptive_store, &objects);
    let after = times(&fixed, &objects);
    let p99 = [&without, &adaptive, &after].map(|times| percentile(times, 99));
    let (hedges, won) = {
        let stats = adaptive_store.metrics().stats();
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
    assert_eq!(stats.gets, stats.hits_remote, "{stats:?}");
    cluster.end();
}

#[test]
fn gets_and_puts_are_correct_when_connections_break_mid_transfer() {
    let mut rng = Rng::seeded();
    let (cluster, proxy) = start(&mut rng);
    let objects: Vec<Object> =
        (0..sized(100, 1000)).map(|n| Object::new("cut", n, &mut rng, 100 * KIB..700 * KIB)).collect();
    let options = replicas(2);
    put_all(&remote(&cluster, Hedge::Off), &objects, &options);
    proxy.cut_within(800 << 10);
    for hedge in [Hedge::Off, Hedge::Adaptive] {
        let (store, before, end) = (remote(&cluster, hedge), proxy.cuts(), Instant::now() + STEP_TIMEOUT);
        let mut all = Vec::new();
        // A node with a recent failure is used last for some time.
        while all.len() < 3 * objects.len() || proxy.cuts() < before + 5 {
            assert!(Instant::now() < end, "{} cuts within {STEP_TIMEOUT:?}", proxy.cuts() - before);
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
        assert_eq!(stats.gets, stats.hits_remote, "{stats:?}");
        assert_eq!(stats.corrupt, 0);
    }

    // Puts: an acknowledged put has the correct content.
    let store = remote(&cluster, Hedge::Off);
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
    // After the faults puts succeed again, but not immediately: a node with many failures is avoided for some time, and
    // the retry budget is exhausted.
    let object = Object::new("last", 0, &mut rng, KIB..2 * KIB);
    let end = Instant::now() + STEP_TIMEOUT;
    while let Err(error) = object.put(&store, &options) {
        assert!(Instant::now() < end, "put after the faults: {error}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(matches!(read(&store, Way::Copy, &object), Got::Right));
    cluster.check_accounting();
    cluster.end();
}
