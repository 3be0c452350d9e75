//! Watchers receive each invalidation once and soon, also across restarts and moves of masters.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_client::{Invalidation, Invalidations, PutItem, PutOptions, Store, StoreConfig};
use moontide_master::election::MemoryRegistry;
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_types::ObjectId;

const TIMEOUT: Duration = Duration::from_secs(30);

/// A new master waits for nodes for twice this time.
const SESSION_TTL_MS: u32 = 1_000;

fn config() -> MasterConfig {
    let free = "127.0.0.1:0".parse().unwrap();
    MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        reallocation_delay_ms: 0,
        session_ttl_ms: SESSION_TTL_MS,
        registry_lease_ms: 1_000,
        ..MasterConfig::default()
    }
}

fn node(master: &str) -> Node {
    let config = NodeConfig { master: master.to_owned(), memory_bytes: 64 << 20, ..NodeConfig::default() };
    let node = Node::start(config).unwrap();
    assert!(node.wait_until_mounted(Duration::from_secs(10)));
    node
}

fn single_master(groups: u16) -> (Server, Node, Store) {
    let master = Server::start(MasterConfig { groups: Some(groups), ..config() }).unwrap();
    let address = master.addresses().grpc.to_string();
    let node = node(&address);
    let store = Store::connect(StoreConfig::new(address)).unwrap();
    (master, node, store)
}

/// Returns a watcher that has received its first gap.
fn watcher(store: &Store) -> Invalidations {
    let mut watcher = store.invalidations();
    assert_eq!(watcher.next(TIMEOUT), Some(vec![Invalidation::Gap]), "the first poll returns a gap");
    watcher
}

/// Returns the objects that are invalidated within `time`, at most `enough`.
fn removed_ids(watcher: &mut Invalidations, time: Duration, enough: usize) -> BTreeSet<ObjectId> {
    let (until, mut ids) = (Instant::now() + time, BTreeSet::new());
    while ids.len() < enough
        && let Some(left) = until.checked_duration_since(Instant::now())
    {
        for invalidation in watcher.next(left).unwrap_or_default() {
            match invalidation {
                Invalidation::Removed(id) => assert!(ids.insert(id), "{id:?} was reported twice"),
                Invalidation::Gap => panic!("unexpected gap"),
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
fn removal_reaches_each_watcher_within_one_second() {
    let (_master, _node, store) = single_master(4);
    let keys = keys(0..40);
    put_all(&store, &keys);
    let mut first = watcher(&store);
    assert!(store.remove(&keys[0], false).unwrap());
    let began = Instant::now();
    assert_eq!(removed_ids(&mut first, TIMEOUT, 1), ids(&store, &keys[..1]));
    assert!(began.elapsed() < Duration::from_secs(1), "it took {:?}", began.elapsed());
    // A second watcher starts without history, and takes nothing away from the first.
    let mut second = watcher(&store);
    assert_eq!(second.next(Duration::from_millis(300)), None);
    // Removals in all groups while both watchers wait.
    std::thread::scope(|scope| {
        let watchers = [&mut first, &mut second];
        let received = watchers.map(|watcher| scope.spawn(|| removed_ids(watcher, TIMEOUT, 39)));
        std::thread::sleep(Duration::from_millis(200));
        let refs: Vec<&[u8]> = keys[1..].iter().map(|key| &key[..]).collect();
        assert!(store.remove_batch(&refs, false).into_iter().all(|removed| removed.unwrap()));
        for received in received {
            assert_eq!(received.join().unwrap(), ids(&store, &keys[1..]));
        }
    });
    assert_eq!(first.next(Duration::from_millis(300)), None, "an invalidation was reported twice");
}

#[test]
fn upsert_emits_no_invalidation_but_remove_does() {
    let (_master, _node, store) = single_master(2);
    let mut watcher = watcher(&store);
    store.put(b"k", b"1").unwrap();
    let upsert = PutOptions { upsert: true, ..PutOptions::default() };
    store.put_with(b"k", &[b"2"], &upsert).unwrap();
    assert_eq!(watcher.next(Duration::from_millis(500)), None);
    assert!(store.remove(b"k", true).unwrap());
    assert_eq!(removed_ids(&mut watcher, TIMEOUT, 1), BTreeSet::from([store.object_id(b"k").unwrap()]));
}

#[test]
fn remove_all_invalidates_every_object_under_its_old_id() {
    let (_master, _node, store) = single_master(4);
    let keys = keys(0..100);
    put_all(&store, &keys);
    let expected = ids(&store, &keys);
    let mut watcher = watcher(&store);
    store.remove_all(true).unwrap();
    assert_eq!(removed_ids(&mut watcher, TIMEOUT, 100), expected);
    assert_ne!(ids(&store, &keys), expected);
}

#[test]
fn watcher_receives_removals_of_its_tenant_only() {
    let (master, _node, acme) = single_master(2);
    let config = StoreConfig::new(master.addresses().grpc.to_string());
    let beta = Store::connect(StoreConfig { tenant: "beta".into(), ..config }).unwrap();
    let keys = keys(0..40);
    [&acme, &beta].into_iter().for_each(|store| put_all(store, &keys));
    let (mut of_acme, mut of_beta) = (watcher(&acme), watcher(&beta));
    let refs: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    assert!(acme.remove_batch(&refs[..30], false).into_iter().all(|removed| removed.unwrap()));
    assert_eq!(removed_ids(&mut of_acme, TIMEOUT, 30), ids(&acme, &keys[..30]));
    // The poll ends without a result, and its position remains valid.
    assert_eq!(of_beta.next(Duration::from_millis(500)), None);
    assert!(beta.remove_batch(&refs[20..], false).into_iter().all(|removed| removed.unwrap()));
    assert_eq!(removed_ids(&mut of_beta, TIMEOUT, 20), ids(&beta, &keys[20..]));
    assert_eq!(of_acme.next(Duration::from_millis(500)), None);
    assert!(ids(&acme, &keys).is_disjoint(&ids(&beta, &keys)));
}

#[test]
fn late_poll_returns_gap() {
    const ROUNDS: u32 = 20;
    const EACH: u32 = 4_000;
    const { assert!(ROUNDS * EACH > 65_536 + 4_096) };
    let (_master, _node, store) = single_master(1);
    let mut lags = watcher(&store);
    let mut follows = watcher(&store);
    let (mut received, keys) = (0, keys(0..EACH));
    let refs: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    for _ in 0..ROUNDS {
        put_all(&store, &keys);
        assert!(store.remove_batch(&refs, true).into_iter().all(|removed| removed.unwrap()));
        received += removed_ids(&mut follows, TIMEOUT, EACH as usize).len();
    }
    assert_eq!(received as u32, ROUNDS * EACH);
    let (mut before, mut gap) = (0, false);
    while !gap {
        let invalidations = lags.next(TIMEOUT).expect("many invalidations are left");
        before += invalidations
            .iter()
            .filter(|invalidation| matches!(invalidation, Invalidation::Removed(_)))
            .count() as u32;
        gap = invalidations.contains(&Invalidation::Gap);
    }
    assert!(before < ROUNDS * EACH, "{before} were reported before the gap");
    assert_eq!(lags.next(Duration::from_millis(300)), None, "nothing is left after the gap");
}

#[test]
fn master_shutdown_does_not_wait_for_watchers() {
    let (master, node, store) = single_master(1);
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
fn restarted_master_sends_gap_after_nodes_have_reported() {
    let folder = std::env::temp_dir().join(format!("moontide-invalidations-{}", std::process::id()));
    let first = MasterConfig { groups: Some(4), data_dir: Some(folder.clone()), ..config() };
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
    assert_eq!(watcher.next(Duration::from_millis(500)), None, "an unreachable master reports nothing");
    let _master = Server::start(same).unwrap();
    assert_eq!(watcher.next(TIMEOUT), Some(vec![Invalidation::Gap]));
    let refs: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    let exist = store.exists_batch(&refs).into_iter().collect::<Result<Vec<_>, _>>().unwrap();
    assert!(exist.iter().all(|exists| *exists), "the gap came before all nodes had reported");
    assert!(store.remove(&keys[3], true).unwrap());
    assert_eq!(removed_ids(&mut watcher, TIMEOUT, 1), ids(&store, &keys[3..4]));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn cluster_change_at_same_address_sends_gap_despite_equal_term() {
    let (master, node, store) = single_master(1);
    let mut watcher = watcher(&store);
    for key in keys(0..3) {
        store.put(&key, b"bytes").unwrap();
        assert!(store.remove(&key, true).unwrap());
        assert_eq!(removed_ids(&mut watcher, TIMEOUT, 1).len(), 1);
    }
    let (addresses, term) = (master.addresses(), master.term());
    drop(node);
    master.shutdown();
    let same = MasterConfig {
        groups: Some(1),
        grpc_listen: addresses.grpc,
        frame_listen: addresses.frame,
        ..config()
    };
    let master = Server::start(same).unwrap();
    assert_eq!(master.term(), term);
    assert_eq!(watcher.next(TIMEOUT), Some(vec![Invalidation::Gap]));
}

#[test]
fn watcher_follows_groups_to_other_masters() {
    let registry = MemoryRegistry::default();
    let start = || {
        Server::start_at(MasterConfig { groups: Some(16), ..config() }, Some(Arc::new(registry.clone())))
            .unwrap()
    };
    let mut masters = vec![start(), start()];
    let hosted = |masters: &[Server]| masters.iter().map(|m| m.service().hosted_count()).collect::<Vec<_>>();
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        let end = Instant::now() + TIMEOUT;
        while !holds() {
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
    // Each master starts with a gap.
    let mut watcher = store.invalidations();
    let mut gaps = 0;
    while gaps < 2 {
        assert_eq!(watcher.next(TIMEOUT), Some(vec![Invalidation::Gap]));
        gaps += 1;
    }
    assert!(store.remove(&keys[0], true).unwrap());
    assert_eq!(removed_ids(&mut watcher, TIMEOUT, 1), ids(&store, &keys[..1]));
    masters.remove(0).shutdown();
    until("all groups are hosted", &|| hosted(&masters) == [16]);
    // Each moved group sends a gap; after that, all invalidations arrive again.
    let refs: Vec<&[u8]> = keys[1..].iter().map(|key| &key[..]).collect();
    assert_eq!(watcher.next(TIMEOUT), Some(vec![Invalidation::Gap]));
    while let Some(invalidations) = watcher.next(Duration::from_secs(3)) {
        assert_eq!(invalidations, [Invalidation::Gap], "no object was removed");
    }
    assert!(
        store
            .exists_batch(&refs)
            .into_iter()
            .collect::<Result<Vec<_>, _>>()
            .unwrap()
            .iter()
            .all(|exists| *exists)
    );
    for removed in store.remove_batch(&refs, true) {
        removed.unwrap();
    }
    assert_eq!(removed_ids(&mut watcher, TIMEOUT, refs.len()), ids(&store, &keys[1..]));
}
