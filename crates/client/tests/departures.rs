//! What has left the store is heard by those who watch: soon, once each, and through restarts and moves of masters.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_client::{Departure, Departures, PutItem, PutOptions, Store, StoreConfig};
use moontide_master::election::MemoryRegistry;
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_types::ObjectId;

const PATIENCE: Duration = Duration::from_secs(30);

/// Nodes are waited for twice as long after a master was replaced.
const SESSION_TTL_MS: u32 = 1_000;

fn config() -> MasterConfig {
    let free = "127.0.0.1:0".parse().unwrap();
    MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        reallocate_wait_ms: 0,
        session_ttl_ms: SESSION_TTL_MS,
        lease_ms: 1_000,
        ..MasterConfig::default()
    }
}

fn node(master: &str) -> Node {
    let config = NodeConfig { master: master.to_owned(), memory_bytes: 64 << 20, ..NodeConfig::default() };
    let node = Node::start(config).unwrap();
    assert!(node.wait_until_mounted(Duration::from_secs(10)));
    node
}

fn alone(groups: u16) -> (Server, Node, Store) {
    let master = Server::start(MasterConfig { groups, ..config() }).unwrap();
    let address = master.addresses().grpc.to_string();
    let node = node(&address);
    let store = Store::connect(StoreConfig::new(address)).unwrap();
    (master, node, store)
}

/// A watcher that has heard its first gap.
fn watcher(store: &Store) -> Departures {
    let mut watcher = store.departures();
    assert_eq!(watcher.next(PATIENCE), Some(vec![Departure::Gap]), "nothing is known of the time before");
    watcher
}

/// Objects that are told of within this time.
fn gone(watcher: &mut Departures, time: Duration, enough: usize) -> BTreeSet<ObjectId> {
    let (until, mut ids) = (Instant::now() + time, BTreeSet::new());
    while ids.len() < enough
        && let Some(left) = until.checked_duration_since(Instant::now())
    {
        for departure in watcher.next(left).unwrap_or_default() {
            match departure {
                Departure::Gone(id) => assert!(ids.insert(id), "{id:?} was told twice"),
                Departure::Gap => panic!("a gap"),
            }
        }
    }
    ids
}

fn put_all(store: &Store, keys: &[Vec<u8>]) {
    let items: Vec<PutItem<'_>> = keys.iter().map(|key| PutItem { key, parts: &[b"bytes"] }).collect();
    for put in store.put_batch(&items, &PutOptions::default()) {
        put.unwrap();
    }
}

fn keys(numbers: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    numbers.map(|number| format!("key-{number}").into_bytes()).collect()
}

fn ids(store: &Store, keys: &[Vec<u8>]) -> BTreeSet<ObjectId> {
    keys.iter().map(|key| store.object_id(key).unwrap()).collect()
}

#[test]
fn a_removal_is_heard_within_a_second_by_each_watcher() {
    let (_master, _node, store) = alone(4);
    let keys = keys(0..40);
    put_all(&store, &keys);
    let mut first = watcher(&store);
    assert!(store.remove(&keys[0], false).unwrap());
    let began = Instant::now();
    assert_eq!(gone(&mut first, PATIENCE, 1), ids(&store, &keys[..1]));
    assert!(began.elapsed() < Duration::from_secs(1), "it took {:?}", began.elapsed());
    // A second one knows nothing of before, and takes nothing away from the first.
    let mut second = watcher(&store);
    assert_eq!(second.next(Duration::from_millis(300)), None);
    // While they wait, and in all groups.
    std::thread::scope(|scope| {
        let watchers = [&mut first, &mut second];
        let heard = watchers.map(|watcher| scope.spawn(|| gone(watcher, PATIENCE, 39)));
        std::thread::sleep(Duration::from_millis(200));
        let refs: Vec<&[u8]> = keys[1..].iter().map(|key| &key[..]).collect();
        assert!(store.remove_batch(&refs, false).into_iter().all(|removed| removed.unwrap()));
        for heard in heard {
            assert_eq!(heard.join().unwrap(), ids(&store, &keys[1..]));
        }
    });
    assert_eq!(first.next(Duration::from_millis(300)), None, "nothing is told twice");
}

#[test]
fn what_is_replaced_or_put_again_is_there() {
    let (_master, _node, store) = alone(2);
    let mut watcher = watcher(&store);
    store.put(b"k", b"1").unwrap();
    let upsert = PutOptions { upsert: true, ..PutOptions::default() };
    store.put_with(b"k", &[b"2"], &upsert).unwrap();
    assert_eq!(watcher.next(Duration::from_millis(500)), None);
    assert!(store.remove(b"k", true).unwrap());
    assert_eq!(gone(&mut watcher, PATIENCE, 1), BTreeSet::from([store.object_id(b"k").unwrap()]));
}

#[test]
fn everything_of_a_tenant_leaves_by_its_old_names() {
    let (_master, _node, store) = alone(4);
    let keys = keys(0..100);
    put_all(&store, &keys);
    let expected = ids(&store, &keys);
    let mut watcher = watcher(&store);
    store.remove_all(true).unwrap();
    assert_eq!(gone(&mut watcher, PATIENCE, 100), expected);
    assert_ne!(ids(&store, &keys), expected);
}

#[test]
fn who_does_not_ask_for_long_hears_of_a_gap() {
    const ROUNDS: u32 = 20;
    const EACH: u32 = 4_000;
    const { assert!(ROUNDS * EACH > 65_536 + 4_096) };
    let (_master, _node, store) = alone(1);
    let mut lags = watcher(&store);
    let mut follows = watcher(&store);
    let (mut heard, keys) = (0, keys(0..EACH));
    let refs: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    for _ in 0..ROUNDS {
        put_all(&store, &keys);
        assert!(store.remove_batch(&refs, true).into_iter().all(|removed| removed.unwrap()));
        heard += gone(&mut follows, PATIENCE, EACH as usize).len();
    }
    assert_eq!(heard as u32, ROUNDS * EACH);
    let (mut before, mut gap) = (0, false);
    while !gap {
        let news = lags.next(PATIENCE).expect("there is much to tell");
        before += news.iter().filter(|departure| matches!(departure, Departure::Gone(_))).count() as u32;
        gap = news.contains(&Departure::Gap);
    }
    assert!(before < ROUNDS * EACH, "{before} were told before the gap");
    assert_eq!(lags.next(Duration::from_millis(300)), None, "after a gap it is as if it had just begun");
}

#[test]
fn a_master_does_not_wait_for_those_who_watch() {
    let (master, node, store) = alone(1);
    let mut watcher = watcher(&store);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(watcher.next(Duration::from_secs(3)), None));
        std::thread::sleep(Duration::from_millis(300));
        drop(node);
        let began = Instant::now();
        master.shutdown();
        assert!(began.elapsed() < Duration::from_secs(5), "it took {:?}", began.elapsed());
    });
}

#[test]
fn a_master_that_was_started_again_begins_with_a_gap_when_nodes_have_reported() {
    let folder = std::env::temp_dir().join(format!("moontide-departures-{}", std::process::id()));
    let first = MasterConfig { groups: 4, data_dir: Some(folder.clone()), ..config() };
    let master = Server::start(first.clone()).unwrap();
    let address = master.addresses().grpc.to_string();
    let _node = node(&address);
    let store = Store::connect(StoreConfig::new(address)).unwrap();
    let keys = keys(0..50);
    put_all(&store, &keys);
    let mut watcher = watcher(&store);
    let addresses = master.addresses();
    let same = MasterConfig { grpc_listen: addresses.grpc, frame_listen: addresses.frame, ..first };
    master.shutdown();
    assert_eq!(watcher.next(Duration::from_millis(500)), None, "a master that is away leaves nothing");
    let _master = Server::start(same).unwrap();
    assert_eq!(watcher.next(PATIENCE), Some(vec![Departure::Gap]));
    let refs: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    let there = store.exists_batch(&refs).unwrap();
    assert!(there.iter().all(|there| *there), "all nodes have reported by then");
    assert!(store.remove(&keys[3], true).unwrap());
    assert_eq!(gone(&mut watcher, PATIENCE, 1), ids(&store, &keys[3..4]));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn another_cluster_at_the_same_address_is_a_gap_although_its_term_is_the_same() {
    let (master, node, store) = alone(1);
    let mut watcher = watcher(&store);
    for key in keys(0..3) {
        store.put(&key, b"bytes").unwrap();
        assert!(store.remove(&key, true).unwrap());
        assert_eq!(gone(&mut watcher, PATIENCE, 1).len(), 1);
    }
    let (addresses, term) = (master.addresses(), master.term());
    drop(node);
    master.shutdown();
    let same =
        MasterConfig { groups: 1, grpc_listen: addresses.grpc, frame_listen: addresses.frame, ..config() };
    let master = Server::start(same).unwrap();
    assert_eq!(master.term(), term);
    assert_eq!(watcher.next(PATIENCE), Some(vec![Departure::Gap]));
}

#[test]
fn groups_are_followed_to_other_masters() {
    let registry = MemoryRegistry::default();
    let start = || Server::start_at(config(), Some(Arc::new(registry.clone()))).unwrap();
    let mut masters = vec![start(), start()];
    let hosted = |masters: &[Server]| masters.iter().map(|m| m.service().hosted_count()).collect::<Vec<_>>();
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        let end = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < end, "{what}: not in time");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    until("each has its share", &|| hosted(&masters).iter().all(|&groups| groups == 8));
    let addresses: Vec<String> = masters.iter().map(|master| master.addresses().grpc.to_string()).collect();
    let _node = node(&addresses.join(","));
    let store = Store::connect(StoreConfig::new(addresses.join(","))).unwrap();
    let keys = keys(0..200);
    put_all(&store, &keys);
    // Each master begins with a gap.
    let mut watcher = store.departures();
    let mut gaps = 0;
    while gaps < 2 {
        assert_eq!(watcher.next(PATIENCE), Some(vec![Departure::Gap]));
        gaps += 1;
    }
    assert!(store.remove(&keys[0], true).unwrap());
    assert_eq!(gone(&mut watcher, PATIENCE, 1), ids(&store, &keys[..1]));
    masters.remove(0).shutdown();
    until("all groups are hosted", &|| hosted(&masters) == [16]);
    // What moved is told of anew, group by group; then everything that leaves is heard again.
    let refs: Vec<&[u8]> = keys[1..].iter().map(|key| &key[..]).collect();
    assert_eq!(watcher.next(PATIENCE), Some(vec![Departure::Gap]));
    while let Some(news) = watcher.next(Duration::from_secs(3)) {
        assert_eq!(news, [Departure::Gap], "nothing has left");
    }
    assert!(store.exists_batch(&refs).unwrap().iter().all(|there| *there));
    for removed in store.remove_batch(&refs, true) {
        removed.unwrap();
    }
    assert_eq!(gone(&mut watcher, PATIENCE, refs.len()), ids(&store, &keys[1..]));
}
