//! Drain of nodes: all objects move to other nodes under load, none is lost, and none that was removed returns.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutOptions, Store, StoreConfig};
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_rt::SplitMix64;
use moontide_types::{ErrorCode, NodeId};

const MIB: u64 = 1 << 20;

fn master() -> Server {
    let free = "127.0.0.1:0".parse().unwrap();
    let config = MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        groups: Some(4),
        reallocation_delay_ms: 0,
        ..MasterConfig::default()
    };
    Server::start(config).unwrap()
}

fn node_config(master: &Server, memory_bytes: u64) -> NodeConfig {
    NodeConfig {
        master: master.addresses().grpc.to_string(),
        memory_bytes,
        copy_bytes_per_s: 0,
        ..NodeConfig::default()
    }
}

fn node(master: &Server, memory_bytes: u64) -> Node {
    Node::start(node_config(master, memory_bytes)).unwrap()
}

/// A store that does not remember locations longer than it must, over shared memory or not.
fn store(master: &Server, shm: bool) -> Store {
    let config = StoreConfig::new(master.addresses().grpc.to_string());
    Store::connect(StoreConfig { shm, ..config }).unwrap()
}

fn key(n: u64) -> Vec<u8> {
    format!("object-{n}").into_bytes()
}

/// Content of an object: all boundaries of pages and units.
fn content(n: u64) -> Vec<u8> {
    let len = [700 << 10, 0, 1, 4096, 262_144, 262_145, 5_000, 100_000][(n % 8) as usize];
    let mut bytes = vec![0; len];
    SplitMix64::new(n).fill(&mut bytes);
    bytes
}

/// Waits until a condition holds; fails after 30 s.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < end, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn drain(store: &Store, node: NodeId) {
    store.drain_node(node).unwrap();
    eventually("the node is empty", || store.drain_progress(node).unwrap().is_empty());
}

/// Number of objects with a location on a node.
fn objects_on(store: &Store, node: NodeId, objects: u64) -> usize {
    let is_on = |n: &u64| {
        let info = store.stat(&key(*n)).unwrap().unwrap_or_else(|| panic!("object {n} is gone"));
        info.stripes.iter().any(|stripe| stripe.node == node)
    };
    (0..objects).filter(is_on).count()
}

#[test]
fn drained_node_is_empty_and_no_object_is_lost() {
    const OBJECTS: u64 = 200;
    let master = master();
    let nodes = [node(&master, 64 * MIB), node(&master, 64 * MIB), node(&master, 64 * MIB)];
    let stores = [store(&master, true), store(&master, false)];
    for n in 0..OBJECTS {
        // Some striped, and some with two replicas, which must stay on different nodes.
        let stripes = (n % 8 == 0).then_some(2);
        let replicas = if n % 3 == 0 { 2 } else { 1 };
        let options = PutOptions { stripes, replicas, replicas_min: replicas, ..PutOptions::default() };
        stores[0].put_with(&key(n), &[&content(n)], &options).unwrap();
    }
    let drained = nodes[0].id();
    assert!(objects_on(&stores[0], drained, OBJECTS) > 0);
    drain(&stores[0], drained);
    assert_eq!(objects_on(&stores[0], drained, OBJECTS), 0);
    for (store, how) in stores.iter().zip(["shared memory", "TCP"]) {
        for n in 0..OBJECTS {
            let got = store.get(&key(n)).unwrap().unwrap_or_else(|| panic!("object {n} is lost, by {how}"));
            assert!(got == content(n), "object {n} has other bytes, by {how}");
        }
    }
    // Each stripe of both replicas is on another node.
    for n in (0..OBJECTS).step_by(3) {
        let info = stores[0].stat(&key(n)).unwrap().unwrap();
        let mut nodes: BTreeMap<u64, Vec<NodeId>> = BTreeMap::new();
        info.stripes.iter().for_each(|stripe| nodes.entry(stripe.offset).or_default().push(stripe.node));
        for (offset, nodes) in nodes {
            assert!(nodes.len() == 2 && nodes[0] != nodes[1], "object {n}, stripe at {offset}: {nodes:?}");
        }
    }
    // New objects go elsewhere, until the drain ends.
    assert!(stores[0].nodes().unwrap().iter().any(|info| info.node == drained && info.draining));
    for n in OBJECTS..2 * OBJECTS {
        stores[0].put(&key(n), &content(n)).unwrap();
    }
    assert!(stores[0].drain_progress(drained).unwrap().is_empty());
    stores[0].undrain_node(drained).unwrap();
    let mut n = 2 * OBJECTS;
    eventually("the node gets new objects", || {
        stores[0].put(&key(n), &content(n)).unwrap();
        n += 1;
        stores[0].drain_progress(drained).unwrap().bytes_left > 0
    });
    for node in nodes {
        node.shutdown();
    }
}

#[test]
fn unknown_node_cannot_be_drained() {
    let master = master();
    let _node = node(&master, 16 * MIB);
    let store = store(&master, false);
    assert_eq!(store.drain_node(NodeId(12)).unwrap_err().code(), ErrorCode::NotFound);
    assert_eq!(store.drain_progress(NodeId(12)).unwrap_err().code(), ErrorCode::NotFound);
}

/// While a node is drained, clients put, replace, remove and read: every read returns a value that was put before and not
/// removed, and no read fails.
#[test]
fn reads_and_writes_go_on_during_a_drain() {
    const KEYS: u64 = 64;
    const THREADS: u64 = 3;
    const KEPT: u64 = 60;
    let master = master();
    let nodes = [node(&master, 96 * MIB), node(&master, 96 * MIB), node(&master, 96 * MIB)];
    // These stay: every round must move those on its node.
    let kept = store(&master, false);
    for n in 0..KEPT {
        kept.put(&format!("kept-{n}").into_bytes(), &content(n)).unwrap();
    }
    let stop = AtomicBool::new(false);
    let (gets, removals) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (master, stop, gets, removals) = (&master, &stop, &gets, &removals);
            scope.spawn(move || {
                let store = store(master, thread == 0);
                let mut random = SplitMix64::new(thread + 1);
                // Keys of this thread only, with the number of their content.
                let mut put: BTreeMap<u64, u64> = BTreeMap::new();
                let upsert = PutOptions { upsert: true, ..PutOptions::default() };
                while !stop.load(Ordering::Relaxed) {
                    let n = random.next_u64() % KEYS * THREADS + thread;
                    match random.next_u64() % 8 {
                        0 => {
                            let version = random.next_u64() % 100_000;
                            store.put_with(&key(n), &[&content(version)], &upsert).unwrap();
                            put.insert(n, version);
                        }
                        1 => {
                            // Leased by a reader: kept.
                            if store.remove(&key(n), true).unwrap() {
                                removals.fetch_add(1, Ordering::Relaxed);
                            }
                            put.remove(&n);
                        }
                        _ => {
                            let got = store.get(&key(n)).unwrap();
                            match (got, put.get(&n)) {
                                (Some(got), Some(&version)) => assert!(got == content(version), "key {n}"),
                                (None, None) => {}
                                (got, put) => panic!("key {n}: found {}, put {put:?}", got.is_some()),
                            }
                            gets.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        let store = store(&master, false);
        // Each node in turn.
        for round in 0..6 {
            let node = nodes[round % nodes.len()].id();
            std::thread::sleep(Duration::from_millis(200));
            drain(&store, node);
            std::thread::sleep(Duration::from_millis(100));
            assert!(store.drain_progress(node).unwrap().is_empty(), "a drained node gets no objects");
            store.undrain_node(node).unwrap();
            for n in 0..KEPT {
                let got = store.get(&format!("kept-{n}").into_bytes()).unwrap();
                assert!(got.is_some_and(|got| got == content(n)), "kept object {n} in round {round}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(gets.load(Ordering::Relaxed) > 100 && removals.load(Ordering::Relaxed) > 10);
}

#[test]
fn node_that_drains_on_stop_loses_nothing() {
    const OBJECTS: u64 = 100;
    let master = master();
    let _stays = node(&master, 64 * MIB);
    let config = NodeConfig { drain_on_stop: Duration::from_secs(30), ..node_config(&master, 64 * MIB) };
    let stops = Node::start(config).unwrap();
    let store = store(&master, false);
    for n in 0..OBJECTS {
        store.put(&key(n), &content(n)).unwrap();
    }
    assert!(objects_on(&store, stops.id(), OBJECTS) > 0);
    stops.shutdown();
    for n in 0..OBJECTS {
        let got = store.get(&key(n)).unwrap().unwrap_or_else(|| panic!("object {n} is lost"));
        assert!(got == content(n), "object {n} has other bytes");
    }
}
