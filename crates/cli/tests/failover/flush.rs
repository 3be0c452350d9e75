//! An orderly stop of a node while groups move to another master: the objects of all groups are on the disk afterwards.

use std::time::{Duration, Instant};

use moontide_client::PutOptions;
use rustix::process::Signal;

use crate::content::Rng;
use crate::harness::{KIB, Process, STEP_TIMEOUT, free_address, until, words};
use crate::masters_harness::MasterCluster;
use crate::readers::{Object, put_all};

/// Slow enough that groups move during the flush.
const WRITE_LIMIT: &str = "2MiB";

fn start_node(cluster: &MasterCluster) -> Process {
    let folder = cluster.cluster.folder();
    let all = words(&format!(
        "node --master {} --memory-bytes 128MiB --admin-listen 127.0.0.1:0 --listen {} --shm-socket {}/n.sock \
         --disk-dir {} --disk-limit 256MiB --disk-staging 16MiB --disk-write-limit {WRITE_LIMIT}",
        cluster.addresses(),
        free_address(),
        folder.display(),
        folder.join("disk").display(),
    ));
    Process::start(folder, "node-0", &[], &all, "ready")
}

#[test]
fn objects_survive_orderly_stop_while_groups_move() {
    let mut rng = Rng::seeded();
    let Some(mut cluster) = MasterCluster::start(2, 0) else { return };
    let node = start_node(&cluster);
    cluster.cluster.nodes.push(node);
    cluster.wait_for_nodes();
    let objects: Vec<Object> =
        (0..100).map(|n| Object::new("flushed", n, &mut rng, 64 * KIB..128 * KIB)).collect();
    put_all(&cluster.relaxed(), &objects, &PutOptions::default());
    let began = Instant::now();
    cluster.cluster.nodes[0].signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(300));
    let joined = cluster.add_master();
    cluster.wait_for_shares();
    let moved_after = began.elapsed();
    until("the node ends", STEP_TIMEOUT, || cluster.cluster.nodes[0].ended().is_some());
    println!(
        "groups moved to master {joined} after {moved_after:?}; the node ended after {:?}",
        began.elapsed()
    );
    cluster.cluster.nodes[0] = start_node(&cluster);
    let store = cluster.relaxed();
    let keys: Vec<&[u8]> = objects.iter().map(Object::key).collect();
    let existing = || store.exists_batch(&keys).iter().filter(|exists| matches!(exists, Ok(true))).count();
    until("all objects exist", STEP_TIMEOUT, || existing() == objects.len());
    for object in &objects {
        let bytes = store.get(object.key()).unwrap().expect("the object exists");
        object.check(&bytes, "after the restart");
    }
    cluster.end();
}
