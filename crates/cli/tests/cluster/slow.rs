//! One replica of two behind a proxy: slow, where a second one is asked, and cut in the middle, where it is tried again.

use std::time::{Duration, Instant};

use moontide_client::{Hedge, PutOptions, Store, StoreConfig};

use crate::content::Rng;
use crate::kit::{Cluster, KIB, Shape, connect, sized, words};
use crate::proxy::Proxy;
use crate::readers::{Got, Object, Way, put_all, read};

const DELAY: Duration = Duration::from_millis(300);

/// Two nodes, the second of which is reached through a proxy.
fn start(rng: &mut Rng) -> (Cluster, Proxy) {
    let proxy = Proxy::start(rng.fork());
    let mut cluster = Cluster::start(Shape { nodes: 1, ..Shape::default() });
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
    put_all(
        &far(&cluster, Hedge::Off),
        &objects,
        &PutOptions { replicas: 2, replicas_min: 2, ..PutOptions::default() },
    );

    let usual = far(&cluster, Hedge::Adaptive);
    times(&usual, &objects);
    proxy.set_delay(DELAY);
    // Without: those that draw the slow replica first wait for it. Few of them are enough to see that.
    let without = times(&far(&cluster, Hedge::Off), &objects[..40]);
    let adaptive = times(&usual, &objects);
    let fixed = far(&cluster, Hedge::After(Duration::from_millis(20)));
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
    let options = PutOptions { replicas: 2, replicas_min: 2, ..PutOptions::default() };
    put_all(&far(&cluster, Hedge::Off), &objects, &options);
    proxy.cut_within(800 << 10);
    for hedge in [Hedge::Off, Hedge::Adaptive] {
        let store = far(&cluster, hedge);
        let mut rounds = 0;
        while rounds < 3 || (proxy.cuts() < 5 && rounds < 30) {
            let times = times(&store, &objects);
            println!("{hedge:?}: {} cuts, p99 {:?}", proxy.cuts(), percentile(&times, 99));
            rounds += 1;
        }
        let stats = store.metrics().stats();
        assert_eq!(stats.requested, stats.hits_remote, "{stats:?}");
        assert_eq!(stats.corrupt, 0);
    }
    assert!(proxy.cuts() >= 5, "{} cuts", proxy.cuts());

    // Puts too: a put that was acknowledged holds what was put.
    let store = far(&cluster, Hedge::Off);
    let mut failed = 0;
    for number in 0..sized(40, 400) {
        let object = Object::new("put", number, &mut rng, 100 * KIB..700 * KIB);
        match object.put(&store, &options) {
            Ok(_) => {
                let got = read(&store, Way::Copy, &object);
                assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
            }
            Err(_) => failed += 1,
        }
    }
    println!("{failed} puts failed");
    proxy.cut_within(0);
    let object = Object::new("last", 0, &mut rng, KIB..2 * KIB);
    put_all(&store, std::slice::from_ref(&object), &options);
    cluster.check_books();
    cluster.end();
}
