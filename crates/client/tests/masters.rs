//! Several masters in this process, which meet at a registry of their own: keys are found whoever hosts them, while masters
//! come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{Put, PutItem, PutOptions, Store, StoreConfig};
use moontide_master::election::MemoryRegistry;
use moontide_master::{MasterConfig, Role, Server};
use moontide_node::{Node, NodeConfig};
use moontide_types::ErrorCode;

const LEASE_MS: u32 = 1_000;
const KEYS: u32 = 400;

struct Cluster {
    registry: MemoryRegistry,
    masters: Vec<Server>,
    nodes: Vec<Node>,
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Cluster {
    fn start(masters: usize, nodes: usize) -> Cluster {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
        let mut cluster = Cluster { registry: MemoryRegistry::default(), masters: vec![], nodes: vec![] };
        for _ in 0..masters {
            cluster.add_master();
        }
        let total = || cluster.hosted().iter().sum::<usize>();
        until("all groups are hosted", || total() == 16);
        let shares = || cluster.hosted().iter().all(|&groups| groups >= 16 / masters);
        until("each has its share", shares);
        for _ in 0..nodes {
            let config =
                NodeConfig { master: cluster.addresses(), memory_bytes: 64 << 20, ..NodeConfig::default() };
            let node = Node::start(config).unwrap();
            assert!(node.wait_until_mounted(Duration::from_secs(10)));
            cluster.nodes.push(node);
        }
        cluster
    }

    fn add_master(&mut self) {
        let free = "127.0.0.1:0".parse().unwrap();
        let config = MasterConfig {
            grpc_listen: free,
            frame_listen: free,
            admin_listen: free,
            lease_ms: LEASE_MS,
            ..MasterConfig::default()
        };
        self.masters.push(Server::start_at(config, Some(Arc::new(self.registry.clone()))).unwrap());
    }

    fn addresses(&self) -> String {
        let addresses: Vec<String> =
            self.masters.iter().map(|master| master.addresses().grpc.to_string()).collect();
        addresses.join(",")
    }

    fn hosted(&self) -> Vec<usize> {
        self.masters.iter().map(|master| master.service().hosted_count()).collect()
    }

    /// Over TCP, and asking the masters every time.
    fn store(&self) -> Store {
        let config = StoreConfig { local: false, locations: 0, ..StoreConfig::new(self.addresses()) };
        Store::connect(config).unwrap()
    }
}

fn key(number: u32) -> Vec<u8> {
    format!("key-{number}").into_bytes()
}

fn value(number: u32) -> Vec<u8> {
    let len = 100 + number as usize * 37 % 3000;
    (0..len).map(|at| (at as u32).wrapping_mul(number | 1) as u8).collect()
}

fn fill(store: &Store) {
    let (keys, values): (Vec<_>, Vec<_>) = (0..KEYS).map(|n| (key(n), value(n))).unzip();
    let parts: Vec<[&[u8]; 1]> = values.iter().map(|value| [&value[..]]).collect();
    let items: Vec<PutItem<'_>> =
        keys.iter().zip(&parts).map(|(key, parts)| PutItem { key, parts }).collect();
    for put in store.put_batch(&items, &PutOptions::default()) {
        assert!(matches!(put.unwrap(), Put::Stored));
    }
}

/// How many keys there are; none has other bytes than its own.
fn hits(store: &Store) -> u32 {
    let keys: Vec<Vec<u8>> = (0..KEYS).map(key).collect();
    let refs: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    let found = store.get_batch(&refs).into_iter().zip(0..).filter(|(found, number)| match found {
        Ok(Some(bytes)) => {
            assert!(bytes[..] == value(*number), "key {number} has other bytes");
            true
        }
        Ok(None) => false,
        Err(error) => panic!("key {number}: {error}"),
    });
    found.count() as u32
}

#[test]
fn keys_are_found_whoever_hosts_them() {
    let cluster = Cluster::start(3, 2);
    let store = cluster.store();
    fill(&store);
    assert_eq!(hits(&store), KEYS);
    let objects: Vec<u64> = cluster.masters.iter().map(|master| master.service().stats().objects).collect();
    assert_eq!(objects.iter().sum::<u64>(), u64::from(KEYS));
    assert!(objects.iter().all(|&objects| objects > 0), "{objects:?}");
    // Single keys, lists, removals and details go to the right one, too.
    assert!(store.exists(&key(7)).unwrap() && !store.exists(b"nothing").unwrap());
    assert_eq!(store.stat(&key(7)).unwrap().unwrap().len, value(7).len() as u64);
    let (mut listed, mut cursor) = (0, vec![]);
    loop {
        let page = store.list(b"key-", &cursor, 50).unwrap();
        listed += page.keys.len();
        cursor = page.next;
        if cursor.is_empty() {
            break;
        }
    }
    assert_eq!(listed as u32, KEYS);
    assert!(store.remove(&key(7), false).unwrap());
    assert!(store.get(&key(7)).unwrap().is_none());
    // Everything of a tenant at once, at all masters.
    store.remove_all(true).unwrap();
    let other = cluster.store();
    assert_eq!((hits(&store), hits(&other)), (0, 0));
    fill(&other);
    assert_eq!(hits(&store), KEYS);
}

#[test]
fn a_master_that_leaves_or_comes_takes_no_key_along() {
    let mut cluster = Cluster::start(2, 2);
    let store = cluster.store();
    fill(&store);
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let store = store.clone();
            while !stop.load(Ordering::SeqCst) {
                // Also while groups are on their way: the heir has inherited where everything is.
                assert_eq!(hits(&store), KEYS, "round {}", rounds.load(Ordering::SeqCst));
                rounds.fetch_add(1, Ordering::SeqCst);
            }
        });
        cluster.add_master();
        until("the new one has its share", || cluster.hosted()[2] >= 5);
        until("all groups are hosted", || cluster.hosted().iter().sum::<usize>() == 16);
        let before = rounds.load(Ordering::SeqCst);
        until("they are read", || rounds.load(Ordering::SeqCst) > before + 2 || reader.is_finished());
        cluster.masters.remove(0).shutdown();
        until("all groups are hosted", || cluster.hosted().iter().sum::<usize>() == 16);
        let before = rounds.load(Ordering::SeqCst);
        until("they are read", || rounds.load(Ordering::SeqCst) > before + 2 || reader.is_finished());
        stop.store(true, Ordering::SeqCst);
        reader.join().unwrap();
    });
    assert!(rounds.load(Ordering::SeqCst) > 4);
    // What came along can be removed, and new things find a place.
    until("removals are certain", || match store.remove(&key(3), false) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::Pending, "{error}");
            false
        }
    });
    assert!(store.get(&key(3)).unwrap().is_none());
    assert!(matches!(store.put(b"new", b"bytes").unwrap(), Put::Stored));
}

#[test]
fn without_a_registry_serving_goes_on_and_removals_are_not_certain() {
    let cluster = Cluster::start(2, 1);
    let store = cluster.store();
    fill(&store);
    assert!(store.remove(&key(0), false).unwrap());
    cluster.registry.set_away(true);
    let unconfirmed =
        |master: &Server| matches!(master.service().role(), Role::Member { confirmed: false, .. });
    until("they notice", || cluster.masters.iter().all(unconfirmed));
    assert_eq!(hits(&store), KEYS - 1);
    assert!(matches!(store.put(b"new", b"bytes").unwrap(), Put::Stored));
    assert_eq!(store.remove(&key(1), false).unwrap_err().code(), ErrorCode::Pending);
    assert!(store.get(&key(1)).unwrap().is_none(), "removed, as far as we know");
    // Longer than a lease, and nothing moves.
    std::thread::sleep(Duration::from_millis(u64::from(LEASE_MS) * 3 / 2));
    assert_eq!(cluster.hosted().iter().sum::<usize>(), 16);
    assert_eq!(hits(&store), KEYS - 2);
    cluster.registry.set_away(false);
    until("all groups are hosted", || cluster.hosted().iter().sum::<usize>() == 16);
    until("they are confirmed", || !cluster.masters.iter().any(unconfirmed));
    until("everything is found again", || {
        let h = hits(&store);
        eprintln!("HITS {h}");
        h == KEYS - 2
    });
    assert!(store.get(b"new").unwrap().is_some());
}
