//! Counters of client, nodes and master are consistent, each and with each other.

use bytes::Bytes;
use moontide_client::{AsyncStore, GetInto, Hedge, PutOptions, Store, StoreConfig, StoreStats};

use crate::content::Rng;
use crate::harness::{
    Cluster, KIB, Process, STEP_TIMEOUT, Shape, check_master_sums, check_node_sums, connect, sized, until,
};
use crate::readers::{Object, put_all, replicas};

#[track_caller]
fn check_sum(stats: &StoreStats) {
    let sum = stats.hits_local + stats.hits_remote + stats.hits_disk + stats.misses + stats.gets_failed;
    assert_eq!(stats.gets, sum, "{stats:?}");
}

/// Expected counters of a run.
#[derive(Debug, Default)]
struct Expected {
    hits: u64,
    misses: u64,
    failed: u64,
    bytes: u64,
}

impl Expected {
    fn hit(&mut self, object: &Object) {
        self.hits += 1;
        self.bytes += object.len as u64;
    }
}

/// Runs every call that reads whole objects, with hits, misses and errors.
fn mixed(store: &Store, objects: &[Object], rng: &mut Rng, rounds: usize) -> Expected {
    let mut expected = Expected::default();
    for _ in 0..rounds {
        let object = &objects[rng.within(0, objects.len())];
        let mut space = vec![0; object.len];
        match rng.within(0, 8) {
            0 => object.check(&store.get(object.key()).unwrap().unwrap(), "get"),
            1 => object.check(&store.get_ref(object.key()).unwrap().unwrap(), "get_ref"),
            2 => {
                assert_eq!(store.get_into(object.key(), &mut space).unwrap(), Some(object.len));
                object.check(&space, "get_into");
            }
            3 => {
                let got = store.get_batch(&[object.key(), b"missing_key"]);
                object.check(got[0].as_ref().unwrap().as_ref().unwrap(), "get_batch");
                assert!(got[1].as_ref().unwrap().is_none());
                expected.misses += 1;
            }
            4 => {
                let mut items = [GetInto { key: object.key(), into: &mut space }];
                let got = store.get_batch_into(&mut items);
                assert_eq!(*got[0].as_ref().unwrap(), Some(object.len));
                object.check(&space, "get_batch_into");
            }
            5 => {
                assert!(store.get_ref(b"missing_key").unwrap().is_none());
                expected.misses += 1;
                continue;
            }
            6 => {
                assert!(store.get(b"").is_err());
                expected.failed += 1;
                continue;
            }
            _ => {
                assert!(store.get_into(b"missing_key", &mut space).unwrap().is_none());
                expected.misses += 1;
                continue;
            }
        }
        expected.hit(object);
    }
    expected
}

#[test]
fn counters_of_client_nodes_and_master_agree() {
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape { session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> = (0..100).map(|n| Object::new("count", n, &mut rng, 1..200 * KIB)).collect();
    let local = cluster.local();
    // Hedging off: bytes of a hedge that loses are not counted as read.
    let remote = connect(StoreConfig { shm: false, hedge: Hedge::Off, ..cluster.config() });
    put_all(&local, &objects[..50], &PutOptions::default());
    put_all(&remote, &objects[50..], &replicas(2));
    let put_bytes = |objects: &[Object]| objects.iter().map(|object| object.len as u64).sum::<u64>();
    for (store, objects) in [(&local, &objects[..50]), (&remote, &objects[50..])] {
        let stats = store.metrics().stats();
        assert_eq!((stats.puts, stats.puts_already_existed, stats.puts_failed), (50, 0, 0), "{stats:?}");
        assert_eq!(stats.bytes_written, put_bytes(objects), "{stats:?}");
    }
    let rounds = sized(1000, 20_000);
    let expected_local = mixed(&local, &objects, &mut rng, rounds);
    let expected_remote = mixed(&remote, &objects, &mut rng, rounds);
    for (store, expected) in [(&local, &expected_local), (&remote, &expected_remote)] {
        let stats = store.metrics().stats();
        check_sum(&stats);
        assert_eq!(stats.gets, expected.hits + expected.misses + expected.failed, "{stats:?} {expected:?}");
        assert_eq!(
            (stats.misses, stats.gets_failed),
            (expected.misses, expected.failed),
            "{stats:?} {expected:?}"
        );
        assert_eq!((stats.bytes_read, stats.corrupt), (expected.bytes, 0), "{stats:?} {expected:?}");
    }
    let (stats_local, stats_remote) = (local.metrics().stats(), remote.metrics().stats());
    assert_eq!((stats_local.hits_local, stats_local.hits_remote), (expected_local.hits, 0));
    assert_eq!((stats_remote.hits_local, stats_remote.hits_remote), (0, expected_remote.hits));

    // The nodes have served the bytes that the remote store has read.
    let get = "engine=\"tcp\",direction=\"get\"";
    let served: u64 = cluster
        .nodes
        .iter()
        .map(|node| node.metrics().sum("moontide_transfer_served_bytes_total", get))
        .sum();
    assert_eq!(served, stats_remote.bytes_read);
    // The next heartbeats report zero-copy reads, and bytes of both kinds, to the master.
    let page = || cluster.master.metrics();
    until("all reads are reported to the master", STEP_TIMEOUT, || {
        let page = page();
        check_master_sums(&page);
        page.master("read_bytes_total") == stats_local.bytes_read + stats_remote.bytes_read
    });
    let lookups = page().master("lookup_keys_total");
    assert_eq!(page().master("read_keys_total"), lookups + stats_local.hits_local);
    assert!(page().master("read_misses_total") >= stats_local.misses + stats_remote.misses);
    assert_eq!(page().master("read_corrupt_total"), 0);
    assert_eq!(page().master("puts_completed_total"), 100);

    // Ranges and tasks are counted, too.
    for store in [&local, &remote] {
        for object in &objects {
            let mut part = vec![0; 1000];
            let got = store.get_range(object.key(), object.len as u64 / 2, &mut part).unwrap().unwrap();
            assert_eq!(got, (object.len - object.len / 2).min(1000));
        }
        assert!(store.get_range(b"missing_key", 0, &mut [0; 9]).unwrap().is_none());
        let before = if std::ptr::eq(store, &local) { stats_local } else { stats_remote };
        let stats = store.metrics().stats();
        check_sum(&stats);
        assert_eq!(stats.gets, before.gets + 101, "{stats:?}");
        assert_eq!(stats.misses, before.misses + 1, "{stats:?}");
    }
    tasks_add_up(&cluster, &objects);
    check_master_sums(&page());
    cluster.nodes.iter().map(Process::metrics).for_each(|page| check_node_sums(&page));
    drop((local, remote));
    cluster.check_accounting();
    cluster.end();
}

fn tasks_add_up(cluster: &Cluster, objects: &[Object]) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for local in [true, false] {
        let config = StoreConfig { shm: local, ..cluster.config() };
        let stats = runtime.block_on(async {
            let store = AsyncStore::connect(config).await.unwrap();
            let tasks: Vec<_> = (0..4 * objects.len())
                .map(|n| {
                    let (store, object) = (store.clone(), objects[n % objects.len()].clone());
                    tokio::spawn(async move {
                        object.check(&store.get(object.key()).await.unwrap().unwrap(), "get of a task");
                        assert!(store.get_ref(b"missing_key").await.unwrap().is_none());
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            let keys: Vec<Bytes> = objects.iter().map(|object| object.key.clone().into()).collect();
            for (object, got) in objects.iter().zip(store.get_batch(keys).await.unwrap()) {
                object.check(&got.unwrap().unwrap(), "get_batch of a task");
            }
            store.blocking().metrics().stats()
        });
        check_sum(&stats);
        let expected = 4 * objects.len() as u64;
        assert_eq!(stats.gets, 2 * expected + objects.len() as u64, "{stats:?}");
        assert_eq!((stats.misses, stats.gets_failed), (expected, 0), "{stats:?}");
    }
}
