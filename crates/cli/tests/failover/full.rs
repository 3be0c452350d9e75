//! Removals on a node whose disk has no space left, not even for the removal log.
//!
//! The disk is a small `tmpfs` that outlives the node. Mounting it needs root; otherwise the test prints a message and
//! passes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use moontide_client::{PutOptions, StoreConfig};
use moontide_types::ErrorCode;

use crate::content::Rng;
use crate::harness::{Cluster, KIB, Process, STEP_TIMEOUT, Shape, connect, free_address, until, words};
use crate::not_run::not_run;
use crate::readers::{Object, put_all};

/// A small file system, unmounted on drop.
struct Disk(PathBuf);

impl Disk {
    fn mount(path: PathBuf) -> Option<Disk> {
        std::fs::create_dir_all(&path).expect("a folder");
        let made = Command::new("mount").args(["-t", "tmpfs", "-o", "size=96m", "none"]).arg(&path).output();
        made.is_ok_and(|made| made.status.success()).then_some(Disk(path))
    }

    fn fill(&self) {
        let mut ballast = std::fs::File::create(self.0.join("ballast")).expect("a file");
        while ballast.write_all(&[0; 4096]).is_ok() {}
    }

    fn empty(&self) {
        std::fs::remove_file(self.0.join("ballast")).expect("the ballast is there");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn start_node(cluster: &Cluster, disk: &Path, listen: &str) -> Process {
    let folder = cluster.folder();
    let all = words(&format!(
        "node --master {} --node-id 00000000000f0011 --memory-bytes 16MiB --admin-listen 127.0.0.1:0 --listen {listen} \
         --shm-socket {}/node.sock --disk-dir {} --disk-limit 64MiB --disk-staging 8MiB --disk-backend file",
        cluster.grpc(),
        folder.display(),
        disk.display(),
    ));
    Process::start(folder, "node", &[], &all, "ready")
}

/// Failure: records of objects that were removed while a disk was full stayed on it, unknown to the master. Cause: a
/// removal that could not be written was dropped, although the disk accepted writes again soon.
#[test]
fn removals_on_full_disk_complete_after_space_is_freed() {
    remove_on_a_full_disk(false);
}

#[test]
fn acknowledged_removals_on_full_disk_persist_after_node_kill() {
    remove_on_a_full_disk(true);
}

fn remove_on_a_full_disk(killed: bool) {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(Shape { nodes: 0, ..Shape::default() });
    let Some(disk) = Disk::mount(cluster.folder().join("disk")) else {
        return not_run("mounting a file system is not permitted");
    };
    let listen = free_address();
    let node = start_node(&cluster, &disk.0, &listen);
    cluster.nodes.push(node);
    let store = connect(StoreConfig { shm: false, location_cache_entries: 0, ..cluster.config() });
    let objects: Vec<Object> =
        (0..300).map(|n| Object::new("full", n, &mut rng, 64 * KIB..128 * KIB)).collect();
    put_all(&store, &objects, &PutOptions::default());
    let records = |cluster: &Cluster| cluster.nodes[0].metrics().node("disk_records");
    until("objects move to the disk", STEP_TIMEOUT, || records(&cluster) > 50);

    disk.fill();
    let keys: Vec<&[u8]> = objects.iter().map(Object::key).collect();
    let outcomes = store.remove_batch(&keys, true);
    let mut acknowledged = vec![];
    for (object, outcome) in objects.iter().zip(&outcomes) {
        match outcome {
            Ok(_) => acknowledged.push(object),
            Err(error) => assert_eq!(error.code(), ErrorCode::Pending, "{}: {error}", object.key),
        }
    }
    println!(
        "{} of {} removals were acknowledged while the disk was full",
        acknowledged.len(),
        objects.len()
    );
    let listed = || store.list(b"full-", b"", 1000).expect("a list").keys.len();
    println!("{} keys are still listed, {} records are on the disk", listed(), records(&cluster));

    // Acknowledged removals persist even if the node is killed immediately.
    if killed {
        cluster.nodes[0].kill();
    }
    disk.empty();
    if killed {
        cluster.nodes[0] = start_node(&cluster, &disk.0, &listen);
    }
    let known = || {
        let page = cluster.master.metrics();
        page.master("node_sessions") == 1 && page.master("disks") == 1 && page.master("disks_read_only") == 0
    };
    until("the node and its disk are back", STEP_TIMEOUT, known);
    for object in acknowledged {
        assert!(store.get(object.key()).expect("an answer").is_none(), "{} is readable again", object.key);
    }
    // The master retries pending removals; after a restart the node reports the records like others, and the test
    // removes them again.
    let end = Instant::now() + STEP_TIMEOUT;
    while killed && store.remove_batch(&keys, true).iter().any(Result::is_err) {
        assert!(Instant::now() < end, "removals are not acknowledged although there is space");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    until("nothing is on the disk", STEP_TIMEOUT, || records(&cluster) == 0);
    assert_eq!(listed(), 0);
    drop(store);
    cluster.check_accounting();
    // No `cluster.end()`: the node logs the full disk as an error.
}
