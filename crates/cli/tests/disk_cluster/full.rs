//! A full disk: reads and puts succeed, and writing resumes when there is space again.
//!
//! The disk is a small `tmpfs` in a separate mount namespace of the node, which ends with the process. Needs root;
//! without it, the test cannot run, and fails under `CI=true`.

use std::process::Command;
use std::time::Instant;

use moontide_disk::BackendKind;

use crate::content::Rng;
use crate::disk_harness::{DiskCluster, RELAXED_TIMEOUT, Sizes, on_disk, put_fast, read_all, read_fast};
use crate::harness::{KIB, MIB, until};
use crate::not_run::not_run;
use crate::readers::Object;

/// Size of the file system, well below the disk limit.
const DISK_MIB: usize = 128;
/// Size of a file that takes most of it at first.
const BALLAST_MIB: usize = 96;
const SIZES: Sizes = Sizes { memory_mib: 24, limit_mib: 1024, staging_mib: 16 };

pub fn may_mount() -> bool {
    let script = "mount -t tmpfs -o size=1m none /tmp";
    let made = Command::new("unshare").args(["--mount", "sh", "-c", script]).output();
    made.is_ok_and(|made| made.status.success())
}

#[test]
fn full_disk_serves_reads_and_resumes_writes_after_space_is_freed() {
    if !may_mount() {
        return not_run("mounting a file system is not permitted");
    }
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::without_node(BackendKind::Bucket, SIZES, "");
    let disk = cluster.disk().display().to_string();
    let script = format!(
        "mount -t tmpfs -o size={DISK_MIB}m none {disk} && head -c {BALLAST_MIB}M /dev/zero > {disk}/ballast && exec \"$@\""
    );
    let through = ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned);
    cluster.cluster.add_node_prepared(&through, &|_| ());
    cluster.cluster.wait_for_nodes(1);
    let store = cluster.store(false);
    let mut objects = Vec::new();
    let put_more = |objects: &mut Vec<Object>, rng: &mut Rng, mib: usize| {
        let first = objects.len();
        objects.extend((first..first + 2 * mib).map(|n| Object::new("full", n, rng, 256 * KIB..768 * KIB)));
        put_fast(&[&store], &objects[first..])
    };
    let (took, longest) = put_more(&mut objects, &mut rng, 2 * DISK_MIB);
    println!("{} MiB put onto a full disk in {took:?}, the longest in {longest:?}", 2 * DISK_MIB);
    let page = cluster.node_metrics();
    assert_eq!(page.node("disk_full"), 1, "the metric disk_full is not set");
    let (errors, written) = (page.node("disk_write_errors_total"), page.node("disk_offloaded_records_total"));
    assert!(errors > 0 && written > 0, "{errors} errors, {written} written");
    // Existing objects are correct; older ones were dropped instead of written.
    let known = on_disk(&store, &objects);
    assert!(!known.is_empty(), "nothing is on disk");
    read_all(&store, &known, "a full disk");
    let tally = read_fast(&store, &objects);
    println!("of {} objects {} exist", objects.len(), tally.right());
    assert!(tally.right() > known.len() as u64, "objects in memory are not served");
    assert!(tally.lost().iter().all(|lost| lost.reason == "a miss"), "{:?}", tally.lost().first());

    // The mount namespace of the node is reachable through /proc.
    let pid = cluster.cluster.nodes[0].pid();
    std::fs::remove_file(format!("/proc/{pid}/root{disk}/ballast")).expect("the ballast exists");
    let freed = Instant::now();
    until("writing resumes", RELAXED_TIMEOUT, || {
        put_more(&mut objects, &mut rng, 4);
        let page = cluster.node_metrics();
        page.node("disk_offloaded_records_total") > written && page.node("disk_full") == 0
    });
    println!("written again {:?} after there was space", freed.elapsed());
    let first = objects.len();
    put_more(&mut objects, &mut rng, SIZES.memory_mib + 16);
    read_all(&store, &objects[first..], "after there was space");
    assert!(objects.iter().map(|object| object.len).sum::<usize>() > 2 * DISK_MIB * MIB);
    cluster.cluster.end();
}
