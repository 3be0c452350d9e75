//! Placement that callers ask for, through the command line: preferred nodes and segments, replicas in different racks,
//! and copies on disks.

use std::collections::BTreeSet;
use std::process::{Command, Output, Stdio};

use moontide_client::{Medium, Store};
use moontide_types::NodeId;

use crate::harness::{Cluster, Process, STEP_TIMEOUT, Shape, until, words};

/// Puts the object `key` with these arguments, and returns the nodes of its replicas, in order.
#[track_caller]
fn put(cluster: &Cluster, key: &str, arguments: &[&str]) -> Vec<NodeId> {
    let ended = run(cluster, &[&["put", key, "/proc/version"], arguments].concat());
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    nodes_of(&cluster.remote(), key)
}

fn nodes_of(store: &Store, key: &str) -> Vec<NodeId> {
    let info = store.stat(key.as_bytes()).unwrap().expect("the object exists");
    info.stripes.iter().map(|stripe| stripe.node).collect()
}

fn run(cluster: &Cluster, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moontide"));
    command.args(arguments).args(["--master", cluster.grpc()]).stdin(Stdio::null());
    command.output().expect("the command starts")
}

#[test]
fn preferred_nodes_and_segments_take_the_replicas_in_order() {
    let mut cluster = Cluster::start(Shape { nodes: 4, groups: 1, ..Shape::default() });
    cluster.wait_for_nodes(4);
    let ids = cluster.ids();
    let names: Vec<String> = ids.iter().map(NodeId::to_string).collect();
    for n in 0..8 {
        let at = n % 4;
        let place = if n < 4 { names[at].clone() } else { format!("{}/0", names[at]) };
        assert_eq!(put(&cluster, &format!("one-{n}"), &["--prefer", &place]), [ids[at]]);
        let other = (at + 2) % 4;
        // The first place is no node, and the second one is no segment of its node.
        let two =
            ["--replicas", "2", "--prefer", "0000000000000001", "--prefer", &format!("{}/77", names[0])];
        let two = [&two[..], &["--prefer", &names[other], "--prefer", &place]].concat();
        assert_eq!(put(&cluster, &format!("two-{n}"), &two), [ids[other], ids[at]]);
    }
    let refused = run(&cluster, &["put", "k", "/proc/version", "--prefer", "127.0.0.1:7500"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && text.contains("is not a place"), "{text}");
    let nine: Vec<&str> = (0..9).flat_map(|_| ["--prefer", &names[0]]).collect();
    let refused = run(&cluster, &[&["put", "k", "/proc/version"], &nine[..]].concat());
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("prefer must be at most 8 places"), "{text}");

    // A preferred node that is gone costs nothing but the preference, also before the master has noticed.
    cluster.nodes[1].kill();
    let placed = put(&cluster, "gone", &["--prefer", &names[1], "--prefer", &names[2]]);
    assert_eq!(placed, [ids[2]]);
}

#[test]
fn replicas_are_in_different_racks_also_after_the_loss_of_a_node() {
    let mut cluster = Cluster::start(Shape {
        nodes: 0,
        session_ttl_ms: 2000,
        master_words: words("--repair-delay-ms 1000"),
        ..Shape::default()
    });
    let racks = ["a", "a", "a", "b", "c"];
    for (number, rack) in racks.iter().enumerate() {
        // Without the label, all nodes are on this host, and thus in one rack.
        cluster.add_node(&words(&format!("--host h{number} --rack {rack}")));
    }
    cluster.wait_for_nodes(racks.len());
    let ids = cluster.ids();
    let racks_of = |nodes: &[NodeId]| -> BTreeSet<&str> {
        let rack = |node: &NodeId| racks[ids.iter().position(|id| id == node).expect("a node of the test")];
        nodes.iter().map(rack).collect()
    };
    let keys: Vec<String> = (0..20).map(|n| format!("k{n}")).collect();
    for key in &keys {
        let placed = put(&cluster, key, &["--replicas", "2", "--spread", "rack"]);
        assert!(placed.len() == 2 && racks_of(&placed).len() == 2, "{placed:?}");
    }
    let three = ["--replicas", "5", "--replicas-min", "1", "--spread", "rack"];
    assert_eq!(racks_of(&put(&cluster, "most", &three)).len(), 3);
    assert_eq!(nodes_of(&cluster.remote(), "most").len(), 3);
    assert_eq!(put(&cluster, "hosts", &["--replicas", "5", "--spread", "host"]).len(), 5);
    // All nodes are in one zone, or in none: nothing says that they share one.
    assert_eq!(put(&cluster, "zones", &["--replicas", "3", "--spread", "zone"]).len(), 3);
    let refused = run(&cluster, &["put", "k", "/proc/version", "--replicas", "4", "--spread", "rack"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && text.contains("4 replicas in different racks"), "{text}");

    // The objects that lose the replica in rack b get one in rack a or c, whichever they lack.
    cluster.nodes[3].kill();
    let store = cluster.remote();
    until("all objects have two replicas again", 3 * STEP_TIMEOUT, || {
        keys.iter().all(|key| {
            let nodes = nodes_of(&store, key);
            nodes.len() == 2 && !nodes.contains(&ids[3])
        })
    });
    for key in &keys {
        let nodes = nodes_of(&store, key);
        assert_eq!(racks_of(&nodes), BTreeSet::from(["a", "c"]), "{key}: {nodes:?}");
    }
    // With rack c gone, too, there is no second rack.
    cluster.nodes[4].kill();
    until("the loss is known", STEP_TIMEOUT, || keys.iter().all(|key| nodes_of(&store, key).len() == 1));
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert!(keys.iter().all(|key| nodes_of(&store, key).len() == 1));
    cluster.add_node(&words("--host h5 --rack d"));
    let new = cluster.id(5);
    until("the new rack has the second replicas", 3 * STEP_TIMEOUT, || {
        keys.iter().all(|key| nodes_of(&store, key).contains(&new))
    });
}

#[test]
fn copies_on_disks_are_written_after_the_put_and_outlive_the_memory() {
    let mut cluster = Cluster::start(Shape { nodes: 0, session_ttl_ms: 2000, ..Shape::default() });
    let disks = cluster.folder().to_owned();
    for number in 0..2 {
        let disk = disks.join(format!("disk-{number}")).display().to_string();
        cluster.add_node(&words(&format!("--disk-limit 64MiB --disk-staging 8MiB --disk-dir {disk}")));
    }
    cluster.add_node(&[]);
    until("three nodes", STEP_TIMEOUT, || cluster.master.metrics().master("node_sessions") == 3);
    let (ids, store) = (cluster.ids(), cluster.remote());
    let nodes_with = |key: &str, medium: Medium| -> BTreeSet<NodeId> {
        let info = store.stat(key.as_bytes()).unwrap().expect("the object exists");
        let of_medium = info.stripes.iter().filter(|stripe| stripe.medium == medium);
        of_medium.map(|stripe| stripe.node).collect()
    };
    for n in 0..10 {
        // Of the three nodes with a replica, two have a disk: the third copy is not made, and the put succeeds.
        for (name, count) in [("none", "0"), ("one", "1"), ("two", "2"), ("three", "3")] {
            let key = format!("{name}-{n}");
            put(&cluster, &key, &["--replicas", "3", "--disk-replicas", count]);
        }
    }
    let refused = run(&cluster, &["put", "k", "/proc/version", "--disk-replicas", "2"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("disk_replicas must be"), "{text}");
    let all = |name: &str| (0..10).map(|n| format!("{name}-{n}")).collect::<Vec<_>>();
    let with_disk = BTreeSet::from([ids[0], ids[1]]);
    for (name, count) in [("one", 1), ("two", 2), ("three", 2)] {
        until(&format!("objects are on {count} disks"), STEP_TIMEOUT, || {
            all(name).iter().all(|key| nodes_with(key, Medium::Disk).len() == count)
        });
        for key in all(name) {
            assert!(nodes_with(&key, Medium::Disk).is_subset(&with_disk), "{key}");
            assert_eq!(nodes_with(&key, Medium::Memory).len(), 3, "{key} stays in memory");
        }
    }
    assert!(all("none").iter().all(|key| nodes_with(key, Medium::Disk).is_empty()));

    // All memory is lost, and one of the disks, too.
    cluster.nodes.iter_mut().for_each(Process::kill);
    cluster.restart_node(1);
    let expected = std::fs::read("/proc/version").unwrap();
    until("objects on both disks are back", STEP_TIMEOUT, || {
        all("two")
            .iter()
            .all(|key| matches!(store.get(key.as_bytes()), Ok(Some(got)) if got[..] == expected[..]))
    });
    until("objects in memory only are lost", STEP_TIMEOUT, || {
        all("none").iter().all(|key| matches!(store.get(key.as_bytes()), Ok(None)))
    });
}
