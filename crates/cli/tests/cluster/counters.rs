//! What is counted adds up: at the client, at the nodes, at the master, and among them.

use bytes::Bytes;
use moontide_client::{AsyncStore, GetInto, Hedge, PutOptions, Store, StoreConfig, StoreStats};

use crate::content::Rng;
use crate::kit::{
    Cluster, KIB, Process, SOON, Shape, check_master_sums, check_node_sums, connect, sized, until,
};
use crate::readers::{Object, put_all, replicas};

#[track_caller]
fn check_sum(stats: &StoreStats) {
    let sum = stats.hits_local + stats.hits_remote + stats.hits_disk + stats.misses + stats.failed;
    assert_eq!(stats.requested, sum, "{stats:?}");
}

/// What a run has asked for, by what must have come of it.
#[derive(Debug, Default)]
struct Asked {
    hits: u64,
    misses: u64,
    failed: u64,
    bytes: u64,
}

impl Asked {
    fn hit(&mut self, object: &Object) {
        self.hits += 1;
        self.bytes += object.len as u64;
    }
}

/// Every call that reads whole objects, hits and misses and mistakes mixed.
fn mixed(store: &Store, objects: &[Object], rng: &mut Rng, rounds: usize) -> Asked {
    let mut asked = Asked::default();
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
                let got = store.get_batch(&[object.key(), b"nobody"]);
                object.check(got[0].as_ref().unwrap().as_ref().unwrap(), "get_batch");
                assert!(got[1].as_ref().unwrap().is_none());
                asked.misses += 1;
            }
            4 => {
                let mut items = [GetInto { key: object.key(), into: &mut space }];
                let got = store.get_batch_into(&mut items);
                assert_eq!(*got[0].as_ref().unwrap(), Some(object.len));
                object.check(&space, "get_batch_into");
            }
            5 => {
                assert!(store.get_ref(b"nobody").unwrap().is_none());
                asked.misses += 1;
                continue;
            }
            6 => {
                assert!(store.get(b"").is_err());
                asked.failed += 1;
                continue;
            }
            _ => {
                assert!(store.get_into(b"nobody", &mut space).unwrap().is_none());
                asked.misses += 1;
                continue;
            }
        }
        asked.hit(object);
    }
    asked
}

#[test]
fn counters_add_up_at_the_client_the_nodes_and_the_master() {
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape { session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> = (0..100).map(|n| Object::new("count", n, &mut rng, 1..200 * KIB)).collect();
    let near = cluster.near();
    // A second replica that is asked in vain would be bytes that nobody has read.
    let far = connect(StoreConfig { local: false, hedge: Hedge::Off, ..cluster.config() });
    put_all(&near, &objects[..50], &PutOptions::default());
    put_all(&far, &objects[50..], &replicas(2));
    let put_bytes = |objects: &[Object]| objects.iter().map(|object| object.len as u64).sum::<u64>();
    for (store, objects) in [(&near, &objects[..50]), (&far, &objects[50..])] {
        let stats = store.metrics().stats();
        assert_eq!((stats.puts, stats.puts_existed, stats.puts_failed), (50, 0, 0), "{stats:?}");
        assert_eq!(stats.bytes_written, put_bytes(objects), "{stats:?}");
    }
    let rounds = sized(1000, 20_000);
    let asked_near = mixed(&near, &objects, &mut rng, rounds);
    let asked_far = mixed(&far, &objects, &mut rng, rounds);
    for (store, asked) in [(&near, &asked_near), (&far, &asked_far)] {
        let stats = store.metrics().stats();
        check_sum(&stats);
        assert_eq!(stats.requested, asked.hits + asked.misses + asked.failed, "{stats:?} {asked:?}");
        assert_eq!((stats.misses, stats.failed), (asked.misses, asked.failed), "{stats:?} {asked:?}");
        assert_eq!((stats.bytes_read, stats.corrupt), (asked.bytes, 0), "{stats:?} {asked:?}");
    }
    let (stats_near, stats_far) = (near.metrics().stats(), far.metrics().stats());
    assert_eq!((stats_near.hits_local, stats_near.hits_remote), (asked_near.hits, 0));
    assert_eq!((stats_far.hits_local, stats_far.hits_remote), (0, asked_far.hits));

    // What the far store has read is what the nodes have served.
    let get = "engine=\"tcp\",direction=\"get\"";
    let served: u64 = cluster
        .nodes
        .iter()
        .map(|node| node.metrics().sum("moontide_transfer_served_bytes_total", get))
        .sum();
    assert_eq!(served, stats_far.bytes_read);
    // The master hears of it with the next heartbeats: reads in place, and bytes of both kinds.
    let page = || cluster.master.metrics();
    until("the master has heard of all reads", SOON, || {
        let page = page();
        check_master_sums(&page);
        page.master("reads_served_bytes_total") == stats_near.bytes_read + stats_far.bytes_read
    });
    let lookups = page().master("lookups_requested_keys_total");
    assert_eq!(page().master("reads_requested_keys_total"), lookups + stats_near.hits_local);
    assert!(page().master("reads_misses_keys_total") >= stats_near.misses + stats_far.misses);
    assert_eq!(page().master("reads_corrupt_objects_total"), 0);
    assert_eq!(page().master("puts_completed_objects_total"), 100);

    // Ranges and tasks count as well.
    for store in [&near, &far] {
        for object in &objects {
            let mut part = vec![0; 1000];
            let got = store.get_range(object.key(), object.len as u64 / 2, &mut part).unwrap().unwrap();
            assert_eq!(got, (object.len - object.len / 2).min(1000));
        }
        assert!(store.get_range(b"nobody", 0, &mut [0; 9]).unwrap().is_none());
        let before = if std::ptr::eq(store, &near) { stats_near } else { stats_far };
        let stats = store.metrics().stats();
        check_sum(&stats);
        assert_eq!(stats.requested, before.requested + 101, "{stats:?}");
        assert_eq!(stats.misses, before.misses + 1, "{stats:?}");
    }
    tasks_add_up(&cluster, &objects);
    check_master_sums(&page());
    cluster.nodes.iter().map(Process::metrics).for_each(|page| check_node_sums(&page));
    drop((near, far));
    cluster.check_books();
    cluster.end();
}

fn tasks_add_up(cluster: &Cluster, objects: &[Object]) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for local in [true, false] {
        let config = StoreConfig { local, ..cluster.config() };
        let stats = runtime.block_on(async {
            let store = AsyncStore::connect(config).await.unwrap();
            let tasks: Vec<_> = (0..4 * objects.len())
                .map(|n| {
                    let (store, object) = (store.clone(), objects[n % objects.len()].clone());
                    tokio::spawn(async move {
                        object.check(&store.get(object.key()).await.unwrap().unwrap(), "get of a task");
                        assert!(store.get_ref(b"nobody").await.unwrap().is_none());
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
        let asked = 4 * objects.len() as u64;
        assert_eq!(stats.requested, 2 * asked + objects.len() as u64, "{stats:?}");
        assert_eq!((stats.misses, stats.failed), (asked, 0), "{stats:?}");
    }
}
