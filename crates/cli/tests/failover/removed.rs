//! Removed objects stay removed after kills; and the one case in which they may return.

use std::time::{Duration, Instant};

use moontide_client::{PutOptions, Store, StoreConfig};
use moontide_types::{ErrorCode, NodeId};
use rustix::process::Signal;

use crate::content::Rng;
use crate::harness::{Cluster, KIB, Process, STEP_TIMEOUT, Shape, connect, is_full, sized, until, words};
use crate::readers::{Got, Object, Way, put_all, read, replicas};

/// A cluster whose nodes have a disk each: a restarted node has the records of its disk.
struct RemovalCluster {
    cluster: Cluster,
    ttl: Duration,
}

const NODES: usize = 3;

impl RemovalCluster {
    fn start() -> RemovalCluster {
        let ttl = Duration::from_millis(1000);
        let shape = Shape { nodes: 0, session_ttl_ms: ttl.as_millis() as u64, ..Shape::default() };
        let mut cluster = RemovalCluster { cluster: Cluster::start(shape), ttl };
        for at in 0..NODES {
            let node = cluster.start_node(at);
            cluster.cluster.nodes.push(node);
        }
        cluster.wait();
        cluster
    }

    /// Starts a node with its address. Its memory is small, so that most objects are on its disk.
    fn start_node(&self, at: usize) -> Process {
        let (folder, name) = (self.cluster.folder(), format!("node-{at}"));
        let backend = ["bucket", "file", "offset"][at % 3];
        let listen = self
            .cluster
            .nodes
            .get(at)
            .map_or_else(crate::harness::free_address, |node| node.printed("tcp").into());
        let all = words(&format!(
            "node --master {} --node-id {:016x} --memory-bytes 16MiB --admin-listen 127.0.0.1:0 --listen {listen} \
             --shm-socket {}.sock --disk-dir {} --disk-limit 256MiB --disk-staging 16MiB --disk-backend {backend}",
            self.cluster.grpc(),
            0xd15c + at as u64,
            folder.join(&name).display(),
            folder.join(format!("disk-{at}")).display(),
        ));
        Process::start(folder, &name, &[], &all, "ready")
    }

    fn restart_node(&mut self, at: usize) {
        self.cluster.nodes[at].kill();
        self.cluster.nodes[at] = self.start_node(at);
    }

    /// Waits until all nodes are synced and all disks mounted.
    #[track_caller]
    fn wait(&self) {
        until("all nodes are known", STEP_TIMEOUT, || {
            let page = self.cluster.master.metrics();
            page.master("node_sessions") == NODES as u64
                && page.master("disks") == NODES as u64
                && self.cluster.nodes.iter().all(|node| node.metrics().node("synced") == 1)
        });
    }

    /// Clients over shared memory, over TCP, and over TCP without location cache.
    fn stores(&self) -> [Store; 3] {
        let uncached = StoreConfig { shm: false, location_cache_entries: 0, ..self.cluster.config() };
        [self.cluster.local(), self.cluster.remote(), connect(uncached)]
    }
}

/// Removes objects, with retries while nodes have yet to report, until each removal is acknowledged.
#[track_caller]
fn remove_all(store: &Store, objects: &[Object]) {
    let mut left: Vec<&Object> = objects.iter().collect();
    let end = Instant::now() + STEP_TIMEOUT;
    while !left.is_empty() {
        let keys: Vec<&[u8]> = left.iter().map(|object| object.key()).collect();
        let outcomes = store.remove_batch(&keys, true);
        left = left
            .into_iter()
            .zip(outcomes)
            .filter_map(|(object, outcome)| match outcome {
                Ok(_) => None,
                Err(error) if error.is_retryable() => Some(object),
                Err(error) => panic!("{}: {error}", object.key),
            })
            .collect();
        assert!(Instant::now() < end, "{} removals are not acknowledged", left.len());
        if !left.is_empty() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Killed {
    Master,
    Node(usize),
    Both(usize),
    All,
}

#[test]
fn removed_objects_stay_removed_after_kills() {
    let mut rng = Rng::seeded();
    let mut cluster = RemovalCluster::start();
    let count = sized(300, 3000);
    let make = |name: &str, rng: &mut Rng| -> Vec<Object> {
        (0..count).map(|n| Object::new(name, n, rng, KIB..200 * KIB)).collect()
    };
    let mut rounds = vec![Killed::Master, Killed::Node(rng.within(0, NODES)), Killed::All];
    if is_full() {
        rounds.extend([Killed::Node(0), Killed::Node(1), Killed::Node(2), Killed::Both(0)]);
    }
    let (mut gone, mut offloaded) = (Vec::<Object>::new(), 0);
    for (round, killed) in rounds.into_iter().enumerate() {
        let (kept, removed) =
            (make(&format!("kept-{round}"), &mut rng), make(&format!("gone-{round}"), &mut rng));
        let stores = cluster.stores();
        // Alternately, so that files on disk contain both.
        for (kept, removed) in kept.chunks(20).zip(removed.chunks(20)) {
            put_all(&stores[0], kept, &PutOptions::default());
            put_all(&stores[1], removed, &replicas(1 + (round % 2) as u8));
        }
        let on_disks = cluster.cluster.master.metrics().master("disk_used_bytes");
        offloaded = offloaded.max(on_disks);
        remove_all(&stores[2], &removed);
        gone.extend(removed);
        match killed {
            Killed::Master => {
                cluster.cluster.master.kill();
                cluster.cluster.restart_master();
            }
            Killed::Node(at) => cluster.restart_node(at),
            Killed::Both(at) => {
                cluster.cluster.master.kill();
                cluster.cluster.nodes[at].kill();
                cluster.cluster.restart_master();
                cluster.cluster.nodes[at] = cluster.start_node(at);
            }
            Killed::All => {
                cluster.cluster.master.kill();
                cluster.cluster.nodes.iter_mut().for_each(Process::kill);
                cluster.cluster.restart_master();
                for at in 0..NODES {
                    cluster.cluster.nodes[at] = cluster.start_node(at);
                }
            }
        }
        // During the recovery, and for longer than a session lasts.
        let until_at = Instant::now() + cluster.ttl + Duration::from_millis(500);
        let (fresh, mut passes) = (cluster.stores(), 0);
        while Instant::now() < until_at || passes < 2 {
            for store in fresh.iter().chain(&stores) {
                for object in gone.iter().skip(rng.within(0, 7)).step_by(7) {
                    let got = store.get(object.key());
                    assert!(!matches!(got, Ok(Some(_))), "{} is back after {killed:?}", object.key);
                }
            }
            passes += 1;
        }
        cluster.wait();
        for store in &fresh {
            let there = gone.iter().filter(|object| store.get(object.key()).expect("an answer").is_some());
            let there: Vec<&str> = there.map(|object| &object.key[..]).collect();
            assert!(there.is_empty(), "{there:?} are back after {killed:?}");
        }
        let mut right = 0;
        for object in &kept {
            match read(&fresh[2], Way::Copy, object) {
                Got::Right => right += 1,
                // An object only in the memory of a killed node is lost.
                Got::Miss => assert!(!matches!(killed, Killed::Master), "{} is lost", object.key),
                Got::Failed(error) => panic!("{}: {error}", object.key),
            }
        }
        println!("{killed:?}: {} stay removed, {right} of {} others exist", gone.len(), kept.len());
        drop((stores, fresh));
        remove_all(&cluster.cluster.remote(), &kept);
    }
    assert!(offloaded > 1 << 20, "the disks were hardly used: {offloaded} bytes");
    cluster.cluster.check_accounting();
    cluster.cluster.end();
}

/// Failure: a process that had mapped a node's memory read an object zero-copy after its removal was acknowledged.
/// Cause: the node had been killed and restarted immediately; for the master its memory was gone, for the process it
/// was valid until the last heartbeat was too old.
#[test]
fn memory_of_killed_node_is_not_read_after_removal() {
    let mut rng = Rng::seeded();
    for round in 0..sized(2, 60) {
        let mut cluster = Cluster::start(Shape { nodes: 2, session_ttl_ms: 4000, ..Shape::default() });
        let (local, remote) = (cluster.local(), cluster.remote());
        let objects: Vec<Object> =
            (0..50).map(|n| Object::new(&format!("mapped-{round}"), n, &mut rng, KIB..32 * KIB)).collect();
        put_all(&local, &objects, &PutOptions::default());
        for object in &objects {
            until("the memory is mapped", STEP_TIMEOUT, || {
                local.get_ref(object.key()).expect("an answer").expect("it was put").is_zero_copy()
            });
        }
        cluster.nodes[0].kill();
        // Random delay without reads, in which the session of the killed node is still open.
        std::thread::sleep(Duration::from_millis(rng.within(0, 300) as u64));
        cluster.restart_node(0);
        let mut acknowledged = 0;
        for object in &objects {
            if remote.remove(object.key(), true).is_ok() {
                for way in [Way::Ref, Way::Copy] {
                    let got = read(&local, way, object);
                    assert!(
                        !matches!(got, Got::Right),
                        "{} was read by {way:?} after its removal was acknowledged",
                        object.key
                    );
                }
                acknowledged += 1;
            }
        }
        println!("{acknowledged} of {} removals were acknowledged right after the restart", objects.len());
        cluster.wait_for_nodes(2);
        remove_all(&remote, &objects);
        drop((local, remote));
        cluster.end();
    }
}

/// Documented limit: only the master knows of a removal that returned `Pending` because a node was unreachable. If that
/// master exits before the node returns, the object exists again, with the bytes that were put.
#[test]
fn pending_removal_lost_with_its_master_restores_original_bytes() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(Shape { nodes: 2, session_ttl_ms: 1000, ..Shape::default() });
    let remote = connect(StoreConfig { shm: false, location_cache_entries: 0, ..cluster.config() });
    let objects: Vec<Object> = (0..20).map(|n| Object::new("residue", n, &mut rng, KIB..64 * KIB)).collect();
    put_all(&remote, &objects, &PutOptions::default());
    let node_of = |object: &Object| -> NodeId {
        remote.stat(object.key()).expect("an answer").expect("it was put").stripes[0].node
    };
    let id = cluster.id(1);
    let there: Vec<&Object> = objects.iter().filter(|object| node_of(object) == id).collect();
    assert!(!there.is_empty(), "no object is on node 1");

    // With the same master, a pending removal is executed when the node returns.
    let (kept, forgotten) = there.split_at(there.len() / 2);
    let pend = |objects: &[&Object]| {
        for object in objects {
            let removed = remote.remove(object.key(), true);
            let code = removed.as_ref().map_err(moontide_client::StoreError::code);
            assert_eq!(code, Err(ErrorCode::Pending), "{}: its node is unreachable", object.key);
            let got = remote.get(object.key());
            assert!(!matches!(got, Ok(Some(_))), "{} is out of the index", object.key);
        }
    };
    cluster.nodes[1].signal(Signal::STOP);
    let gone = || cluster.master.metrics().master("node_sessions") == 1;
    until("the node's session ends", STEP_TIMEOUT, gone);
    pend(kept);
    cluster.nodes[1].signal(Signal::CONT);
    cluster.wait_for_nodes(2);
    for object in kept {
        assert!(remote.get(object.key()).expect("an answer").is_none(), "{} is back", object.key);
        // The node has killed its records when the removal is acknowledged.
        until("the removal is final", STEP_TIMEOUT, || remote.remove(object.key(), true).is_ok());
    }

    // With a new master the object may return.
    cluster.nodes[1].signal(Signal::STOP);
    until("the node's session ends", STEP_TIMEOUT, || cluster.master.metrics().master("node_sessions") == 1);
    pend(forgotten);
    cluster.master.kill();
    cluster.restart_master();
    cluster.nodes[1].signal(Signal::CONT);
    cluster.wait_for_nodes(2);
    // A read checks the bytes. It is a miss before the node has reported its records.
    let is_back = |object: &&&Object| matches!(read(&remote, Way::Copy, object), Got::Right);
    let mut back = 0;
    until("an object returns, which the documentation says to be possible", STEP_TIMEOUT, || {
        back = forgotten.iter().filter(is_back).count();
        back > 0 || forgotten.is_empty()
    });
    println!("{back} of {} pending removals were forgotten; their bytes are right", forgotten.len());
    for object in kept {
        assert!(remote.get(object.key()).expect("an answer").is_none(), "{} is back", object.key);
    }
    // The node is connected: after all nodes have reported to the new master, a removal is final.
    let forgotten: Vec<Object> = forgotten.iter().map(|object| (*object).clone()).collect();
    let asked_at = Instant::now();
    remove_all(&remote, &forgotten);
    println!("removals were final after {:?}", asked_at.elapsed());
    for object in &forgotten {
        assert!(remote.get(object.key()).expect("an answer").is_none(), "{}", object.key);
    }
    drop(remote);
    cluster.check_accounting();
    cluster.end();
}
