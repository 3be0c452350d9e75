//! Objects whose stripes are on the disks of several nodes: the restart of any one node loses none of them.

use moontide_client::{PutOptions, PutOutcome, Store, StoreConfig};
use moontide_disk::BackendKind;
use moontide_types::{Medium, NodeId};
use rustix::process::Signal;

use crate::content::Rng;
use crate::disk_harness::{RELAXED_TIMEOUT, count_existing, read_all};
use crate::harness::{Cluster, Folder, KIB, STEP_TIMEOUT, Shape, connect, until, words};
use crate::readers::{Object, put_all};

const NODES: usize = 3;

/// Nodes with a disk each, and objects with a stripe on each node.
struct StripedCluster {
    // Dropped before the disks.
    cluster: Cluster,
    store: Store,
    objects: Vec<Object>,
    _disks: Folder,
}

impl StripedCluster {
    fn start(backend: BackendKind, master: &str) -> StripedCluster {
        let disks = Folder::new();
        let node = format!("--disk-backend {backend} --disk-limit 256MiB --disk-staging 16MiB");
        let shape = Shape {
            nodes: 0,
            memory_mib: 128,
            node_words: words(&node),
            master_words: words(master),
            ..Shape::default()
        };
        let mut cluster = Cluster::start(shape);
        for number in 0..NODES {
            let directory = disks.path().join(format!("disk-{number}"));
            cluster.add_node(&["--disk-dir".to_owned(), directory.display().to_string()]);
        }
        cluster.wait_for_nodes(NODES);
        let config = StoreConfig { timeout: RELAXED_TIMEOUT, location_cache_entries: 0, ..cluster.config() };
        let store = connect(config);
        let mut rng = Rng::seeded();
        let object = |number| Object::new("striped", number, &mut rng, 3000 * KIB..4000 * KIB);
        let objects: Vec<Object> = (0..12).map(object).collect();
        put_all(&store, &objects, &striped());
        let cluster = StripedCluster { cluster, store, objects, _disks: disks };
        for object in &cluster.objects {
            let (mut nodes, stripes) = (cluster.nodes_of(object), NODES);
            nodes.sort_unstable();
            nodes.dedup();
            assert_eq!(nodes.len(), stripes, "{}: a stripe on each node", object.key);
        }
        cluster
    }

    fn nodes_of(&self, object: &Object) -> Vec<NodeId> {
        let info = self.store.stat(object.key()).unwrap().expect("the object exists");
        info.stripes.iter().map(|stripe| stripe.node).collect()
    }

    /// Number of objects without all stripes, according to the master's metric.
    fn missing_stripes(&self) -> usize {
        self.cluster.master.metrics().master("objects_missing_stripes") as usize
    }

    /// Waits until every stripe is on a disk.
    fn wait_for_disks(&self) {
        let is_on_disk = |object: &Object| {
            let info = self.store.stat(object.key()).unwrap().expect("the object exists");
            let on_disk = info.stripes.iter().filter(|stripe| stripe.medium == Medium::Disk);
            on_disk.count() == NODES
        };
        until("all stripes are on disk", RELAXED_TIMEOUT, || self.objects.iter().all(is_on_disk));
    }

    fn end_node(&mut self, node: usize, signal: Signal) {
        self.cluster.nodes[node].signal(signal);
        until("the node ends", STEP_TIMEOUT, || self.cluster.nodes[node].ended().is_some());
    }

    fn check_all(&self, what: &str) {
        until(&format!("all objects exist {what}"), RELAXED_TIMEOUT, || {
            count_existing(&self.store, &self.objects) == self.objects.len()
        });
        read_all(&self.store, &self.objects, what);
    }
}

fn striped() -> PutOptions {
    PutOptions { stripes: Some(NODES as u16), ..PutOptions::default() }
}

#[test]
fn striped_objects_survive_orderly_restart_of_any_node() {
    for backend in BackendKind::ALL {
        let mut cluster = StripedCluster::start(backend, "");
        for node in 0..NODES {
            cluster.end_node(node, Signal::TERM);
            let left = || count_existing(&cluster.store, &cluster.objects);
            until("objects without all stripes are misses", RELAXED_TIMEOUT, || left() == 0);
            assert_eq!(cluster.missing_stripes(), cluster.objects.len(), "the metric counts them");
            cluster.cluster.restart_node(node);
            cluster.check_all(&format!("{backend}: after the restart of node {node}"));
            until("the metric counts none", RELAXED_TIMEOUT, || cluster.missing_stripes() == 0);
        }
        cluster.cluster.end();
    }
}

#[test]
fn striped_objects_survive_kill_of_any_node() {
    for backend in BackendKind::ALL {
        let mut cluster = StripedCluster::start(backend, "--offload put");
        cluster.wait_for_disks();
        for node in 0..NODES {
            cluster.end_node(node, Signal::KILL);
            cluster.cluster.restart_node(node);
            cluster.check_all(&format!("{backend}: after the kill of node {node}"));
        }
        // The new master knows only what the nodes report, one after the other.
        cluster.cluster.master.kill();
        cluster.end_node(0, Signal::KILL);
        cluster.cluster.restart_master();
        cluster.cluster.wait_for_nodes(NODES - 1);
        cluster.cluster.restart_node(0);
        cluster.check_all(&format!("{backend}: after the kill of the master and a node"));
        cluster.cluster.end();
    }
}

#[test]
fn replaced_and_removed_striped_objects_do_not_return_with_their_node() {
    let mut cluster = StripedCluster::start(BackendKind::Bucket, "--offload put");
    cluster.wait_for_disks();
    cluster.end_node(0, Signal::TERM);
    let store = &cluster.store;
    until("the objects are misses", RELAXED_TIMEOUT, || count_existing(store, &cluster.objects) == 0);
    let [removed, replaced, ..] = &cluster.objects[..] else { panic!("too few objects") };
    // Not acknowledged, because the node is away; but it must not return.
    store.remove(removed.key(), true).expect_err("the removal is pending");
    let put = store.put(replaced.key(), b"another value").expect("a miss can be put");
    assert_eq!(put, PutOutcome::Stored);
    cluster.cluster.restart_node(0);
    let others = &cluster.objects[2..];
    until("the other objects exist", RELAXED_TIMEOUT, || {
        count_existing(&cluster.store, others) == others.len()
    });
    assert_eq!(cluster.store.get(removed.key()).unwrap(), None);
    let got = cluster.store.get(replaced.key()).unwrap().expect("the new value");
    assert_eq!(&got[..], b"another value");
    read_all(&cluster.store, others, "after the restart");
    cluster.cluster.end();
}
