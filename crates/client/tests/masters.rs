//! Several masters in this process with an in-memory registry: clients find keys at any master, while masters join and
//! leave.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutItem, PutOptions, PutOutcome, Store, StoreConfig};
use moontide_master::election::MemoryRegistry;
use moontide_master::{MasterConfig, Role, Server};
use moontide_node::{Node, NodeConfig};
use moontide_types::ErrorCode;

const GROUPS: usize = 16;
const LEASE_MS: u32 = 1_000;
const KEYS: u32 = 400;

struct Cluster {
    registry: MemoryRegistry,
    masters: Vec<Server>,
    nodes: Vec<Node>,
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
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
        until("all groups are hosted", || total() == GROUPS);
        let shares = || cluster.hosted().iter().all(|&groups| groups >= GROUPS / masters);
        until("each master has its share", shares);
        cluster.add_nodes(nodes);
        cluster
    }

    fn add_nodes(&mut self, count: usize) {
        for _ in 0..count {
            let config =
                NodeConfig { master: self.addresses(), memory_bytes: 64 << 20, ..NodeConfig::default() };
            let node = Node::start(config).unwrap();
            assert!(node.wait_until_mounted(Duration::from_secs(10)));
            self.nodes.push(node);
        }
    }

    fn add_master(&mut self) {
        self.add_master_as(None);
    }

    /// Adds a master that others know by these addresses.
    fn add_master_as(&mut self, advertised: Option<(SocketAddr, SocketAddr)>) {
        let free = "127.0.0.1:0".parse().unwrap();
        let config = MasterConfig {
            grpc_listen: free,
            frame_listen: free,
            admin_listen: free,
            groups: Some(GROUPS as u16),
            registry_lease_ms: LEASE_MS,
            grpc_advertise: advertised.map(|(grpc, _)| grpc.to_string()),
            frame_advertise: advertised.map(|(_, frame)| frame.to_string()),
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

    /// Connects a store that reads over TCP and asks the masters every time.
    fn store(&self) -> Store {
        let config =
            StoreConfig { shm: false, location_cache_entries: 0, ..StoreConfig::new(self.addresses()) };
        Store::connect(config).unwrap()
    }
}

/// Forwards connections to a server until it is silenced. Then it keeps the connections open and forwards nothing.
struct Proxy {
    address: SocketAddr,
    silent: Arc<AtomicBool>,
}

impl Proxy {
    fn start() -> (Proxy, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        (Proxy { address: listener.local_addr().unwrap(), silent: Arc::default() }, listener)
    }

    fn forward(&self, listener: TcpListener, to: SocketAddr) {
        let silent = Arc::clone(&self.silent);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { return };
                let (client_too, server_too) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (silent, silent_too) = (Arc::clone(&silent), Arc::clone(&silent));
                std::thread::spawn(move || copy_unless(&silent, client, server));
                std::thread::spawn(move || copy_unless(&silent_too, server_too, client_too));
            }
        });
    }
}

fn copy_unless(silent: &AtomicBool, mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = [0; 65536];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        while silent.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if to.write_all(&bytes[..len]).is_err() {
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// Regression: masters were asked one after the other, and silent ones took the deadline of the whole batch.
#[test]
fn silent_masters_delay_only_their_own_keys() {
    let mut cluster = Cluster { registry: MemoryRegistry::default(), masters: vec![], nodes: vec![] };
    let mut proxies = vec![];
    // An attempt at a master takes a quarter of the timeout: asked one after the other, four silent ones would take all of it.
    for _ in 0..5 {
        let ((grpc, grpc_listener), (frame, frame_listener)) = (Proxy::start(), Proxy::start());
        cluster.add_master_as(Some((grpc.address, frame.address)));
        let real = cluster.masters.last().unwrap().addresses();
        grpc.forward(grpc_listener, real.grpc);
        frame.forward(frame_listener, real.frame);
        proxies.push([grpc, frame]);
    }
    until("all groups are hosted", || cluster.hosted().iter().sum::<usize>() == GROUPS);
    until("each master has its share", || cluster.hosted().iter().all(|&groups| groups >= 3));
    cluster.add_nodes(2);
    fill(&cluster.store());
    let named: Vec<String> = proxies.iter().map(|[grpc, _]| grpc.address.to_string()).collect();
    let keys: Vec<Vec<u8>> = (0..KEYS).map(key).collect();
    let refs: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    // Longer than a busy machine stalls.
    let timeout = Duration::from_secs(2);
    let objects = |master: &Server| master.service().stats().objects as usize;
    let expected: Vec<usize> = cluster.masters.iter().map(objects).collect();
    for healthy in [4, 0] {
        let expected = expected[healthy];
        let config = StoreConfig {
            shm: false,
            location_cache_entries: 0,
            timeout,
            connect_timeout: Duration::from_secs(5),
            ..StoreConfig::new(named.join(","))
        };
        // One store knows all masters from before; the other connects while four of them are silent.
        let known = Store::connect(config.clone()).unwrap();
        assert_eq!(
            known.exists_batch(&refs).into_iter().collect::<Result<Vec<_>, _>>().unwrap(),
            vec![true; refs.len()]
        );
        let silence = |silent| {
            for (_, proxies) in proxies.iter().enumerate().filter(|&(at, _)| at != healthy) {
                proxies.iter().for_each(|proxy| proxy.silent.store(silent, Ordering::SeqCst));
            }
        };
        silence(true);
        let started = Instant::now();
        let new = Store::connect(config).unwrap();
        assert!(started.elapsed() < Duration::from_secs(4), "connect took {:?}", started.elapsed());
        for (what, store) in [("known", &known), ("new", &new)] {
            let started = Instant::now();
            let found = store.get_batch(&refs);
            let elapsed = started.elapsed();
            let hits = found.iter().filter(|found| matches!(found, Ok(Some(_)))).count();
            assert_eq!(hits, expected, "{what}: keys of master {healthy}");
            assert!(!found.iter().any(|found| matches!(found, Ok(None))), "{what}: silence is not a miss");
            assert!(elapsed < timeout + Duration::from_secs(1), "{what}: {elapsed:?}");
        }
        // Puts: those of the healthy master are stored.
        let before = objects(&cluster.masters[healthy]);
        let new_keys: Vec<String> = (0..200).map(|n| format!("during-{healthy}-{n}")).collect();
        let items: Vec<PutItem<'_>> =
            new_keys.iter().map(|key| PutItem { key: key.as_bytes(), parts: &[b"value"] }).collect();
        let started = Instant::now();
        let puts = known.put_batch(&items, &PutOptions::default());
        let elapsed = started.elapsed();
        let stored = puts.iter().filter(|put| matches!(put, Ok(PutOutcome::Stored))).count();
        let of_healthy = objects(&cluster.masters[healthy]) - before;
        assert!(stored > 0 && stored == of_healthy, "{stored} of {of_healthy} puts at master {healthy}");
        assert!(elapsed < timeout + Duration::from_secs(1), "puts: {elapsed:?}");
        silence(false);
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
    put_all(store, 0..KEYS);
}

fn put_all(store: &Store, numbers: impl Iterator<Item = u32>) {
    let (keys, values): (Vec<_>, Vec<_>) = numbers.map(|n| (key(n), value(n))).unzip();
    let parts: Vec<[&[u8]; 1]> = values.iter().map(|value| [&value[..]]).collect();
    let items: Vec<PutItem<'_>> =
        keys.iter().zip(&parts).map(|(key, parts)| PutItem { key, parts }).collect();
    for put in store.put_batch(&items, &PutOptions::default()) {
        assert!(matches!(put.unwrap(), PutOutcome::Stored));
    }
}

/// Returns the number of keys that exist. Fails if one has wrong bytes.
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
fn calls_reach_the_master_that_hosts_the_key() {
    let cluster = Cluster::start(3, 2);
    let store = cluster.store();
    fill(&store);
    assert_eq!(hits(&store), KEYS);
    let objects: Vec<u64> = cluster.masters.iter().map(|master| master.service().stats().objects).collect();
    assert_eq!(objects.iter().sum::<u64>(), u64::from(KEYS));
    assert!(objects.iter().all(|&objects| objects > 0), "{objects:?}");
    // Single keys, lists, removals and stat also go to the right master.
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
    // remove_all removes the objects of a tenant at all masters.
    store.remove_all(true).unwrap();
    let other = cluster.store();
    assert_eq!((hits(&store), hits(&other)), (0, 0));
    fill(&other);
    assert_eq!(hits(&store), KEYS);
}

#[test]
fn bulk_removals_follow_groups_that_move() {
    let mut cluster = Cluster::start(2, 2);
    let store = cluster.store();
    fill(&store);
    let has_prefix = |&n: &u32| key(n).starts_with(b"key-1");
    let expected = (0..KEYS).filter(has_prefix).count() as u64;
    assert!(expected > 0);
    // Groups move while removals run, one after the other.
    let moved = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let remover = scope.spawn(|| {
            let (store, mut rounds) = (store.clone(), 0);
            loop {
                let is_last = moved.load(Ordering::SeqCst);
                let removed = store.remove_by_prefix(b"key-1", true).unwrap().removed;
                assert!(removed <= expected, "{removed} of {expected}");
                let left = store.list(b"key-1", &[], 1).unwrap();
                assert!(left.keys.is_empty(), "round {rounds}: {:?}", left.keys);
                rounds += 1;
                if is_last {
                    return rounds;
                }
                put_all(&store, (0..KEYS).filter(has_prefix));
            }
        });
        cluster.add_master();
        until("the new master has its share", || cluster.hosted()[2] >= 5 || remover.is_finished());
        moved.store(true, Ordering::SeqCst);
        assert!(remover.join().unwrap() > 1);
    });
    assert_eq!(u64::from(hits(&store)), u64::from(KEYS) - expected);
    let rest = store.remove_by_regex("^key-[0-9]*[02468]$", true).unwrap();
    assert_eq!(
        rest.removed,
        (0..KEYS).filter(|n| n % 2 == 0 && !key(*n).starts_with(b"key-1")).count() as u64
    );
    assert_eq!(store.remove_by_regex("(", true).unwrap_err().code(), ErrorCode::InvalidArgument);
    assert_eq!(store.remove_all(false).unwrap().kept, 0);
    assert_eq!(hits(&store), 0);
}

#[test]
fn joining_or_leaving_master_loses_no_keys() {
    let mut cluster = Cluster::start(2, 2);
    let store = cluster.store();
    fill(&store);
    // Clients that make no call while groups move, and ask the former masters afterwards.
    let mut idle = vec![cluster.store(), cluster.store()];
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let store = store.clone();
            while !stop.load(Ordering::SeqCst) {
                // Also during a handoff: the new owner received all locations.
                assert_eq!(hits(&store), KEYS, "round {}", rounds.load(Ordering::SeqCst));
                rounds.fetch_add(1, Ordering::SeqCst);
            }
        });
        cluster.add_master();
        until("the new master has its share", || cluster.hosted()[2] >= 5);
        until("all groups are hosted", || cluster.hosted().iter().sum::<usize>() == GROUPS);
        assert_eq!(idle.pop().map(|store| hits(&store)), Some(KEYS), "the map of the client is outdated");
        let before = rounds.load(Ordering::SeqCst);
        until("all keys are read", || rounds.load(Ordering::SeqCst) > before + 2 || reader.is_finished());
        cluster.masters.remove(0).shutdown();
        until("all groups are hosted", || cluster.hosted().iter().sum::<usize>() == GROUPS);
        assert_eq!(idle.pop().map(|store| hits(&store)), Some(KEYS), "the map of the client is outdated");
        let before = rounds.load(Ordering::SeqCst);
        until("all keys are read", || rounds.load(Ordering::SeqCst) > before + 2 || reader.is_finished());
        stop.store(true, Ordering::SeqCst);
        reader.join().unwrap();
    });
    assert!(rounds.load(Ordering::SeqCst) > 4);
    // Objects of moved groups can be removed, and new ones can be put.
    until("removals are confirmed", || match store.remove(&key(3), false) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::Pending, "{error}");
            false
        }
    });
    assert!(store.get(&key(3)).unwrap().is_none());
    assert!(matches!(store.put(b"new", b"bytes").unwrap(), PutOutcome::Stored));
}

#[test]
fn registry_outage_keeps_serving_and_removals_return_pending() {
    let cluster = Cluster::start(2, 1);
    let store = cluster.store();
    fill(&store);
    assert!(store.remove(&key(0), false).unwrap());
    cluster.registry.set_unavailable(true);
    let unconfirmed =
        |master: &Server| matches!(master.service().role(), Role::Member { confirmed: false, .. });
    until("all masters notice", || cluster.masters.iter().all(unconfirmed));
    assert_eq!(hits(&store), KEYS - 1);
    assert!(matches!(store.put(b"new", b"bytes").unwrap(), PutOutcome::Stored));
    assert_eq!(store.remove(&key(1), false).unwrap_err().code(), ErrorCode::Pending);
    assert!(store.get(&key(1)).unwrap().is_none(), "a pending removal is visible");
    // No group moves, even after more than one lease.
    std::thread::sleep(Duration::from_millis(u64::from(LEASE_MS) * 3 / 2));
    assert_eq!(cluster.hosted().iter().sum::<usize>(), GROUPS);
    assert_eq!(hits(&store), KEYS - 2);
    cluster.registry.set_unavailable(false);
    until("all groups are hosted", || cluster.hosted().iter().sum::<usize>() == GROUPS);
    until("all leases are confirmed", || !cluster.masters.iter().any(unconfirmed));
    until("all keys are found again", || hits(&store) == KEYS - 2);
    assert!(store.get(b"new").unwrap().is_some());
}
