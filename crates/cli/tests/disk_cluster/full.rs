//! A disk without space: serving goes on, puts succeed, and writing resumes when there is space again.
//!
//! The disk is a small `tmpfs`, mounted in a mount namespace of the node's own: it goes with the process. Needs root, and
//! says so and passes where that is missing.

use std::process::Command;
use std::time::Instant;

use moontide_disk::BackendKind;

use crate::content::Rng;
use crate::kit::{KIB, MIB, until};
use crate::readers::Object;
use crate::scene::{PATIENT, Scene, Sizes, on_disk, put_fast, read_all, read_fast};

/// Of the file system, and of a file in it that takes most of it at first. Well below the disk's limit.
const DISK_MIB: usize = 128;
const BALLAST_MIB: usize = 96;
const SIZES: Sizes = Sizes { memory_mib: 24, limit_mib: 1024, staging_mib: 16 };

fn may_mount() -> bool {
    let script = "mount -t tmpfs -o size=1m none /tmp";
    let made = Command::new("unshare").args(["--mount", "sh", "-c", script]).output();
    made.is_ok_and(|made| made.status.success())
}

#[test]
fn a_disk_without_space_is_served_from_and_written_again_when_there_is_some() {
    if !may_mount() {
        println!("passed over: it mounts a file system, which is not permitted here");
        return;
    }
    let mut rng = Rng::seeded();
    let mut scene = Scene::without_node(BackendKind::Bucket, SIZES, "");
    let disk = scene.disk().display().to_string();
    let script = format!(
        "mount -t tmpfs -o size={DISK_MIB}m none {disk} && head -c {BALLAST_MIB}M /dev/zero > {disk}/ballast && exec \"$@\""
    );
    let through = ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned);
    scene.cluster.add_node_prepared(&through, &|_| ());
    scene.cluster.wait_for_nodes(1);
    let store = scene.store(false);
    let mut objects = Vec::new();
    let put_more = |objects: &mut Vec<Object>, rng: &mut Rng, mib: usize| {
        let first = objects.len();
        objects.extend((first..first + 2 * mib).map(|n| Object::new("full", n, rng, 256 * KIB..768 * KIB)));
        put_fast(&[&store], &objects[first..])
    };
    let (took, longest) = put_more(&mut objects, &mut rng, 2 * DISK_MIB);
    println!("{} MiB put onto a full disk in {took:?}, the longest in {longest:?}", 2 * DISK_MIB);
    let page = scene.node_metrics();
    assert_eq!(page.node("disk_full"), 1, "the disk says that it is full");
    let (errors, written) = (page.node("disk_write_errors_total"), page.node("disk_offloaded_records_total"));
    assert!(errors > 0 && written > 0, "{errors} errors, {written} written");
    // What is there is right; older objects were dropped instead of written.
    let known = on_disk(&store, &objects);
    assert!(!known.is_empty(), "nothing is on disk");
    read_all(&store, &known, "a full disk");
    let tally = read_fast(&store, &objects);
    println!("of {} objects {} are there", objects.len(), tally.right());
    assert!(tally.right() > known.len() as u64, "what is in memory is served, too");
    assert!(tally.lost().iter().all(|lost| lost.why == "a miss"), "{:?}", tally.lost().first());

    // The node's file systems are seen through its process.
    let pid = scene.cluster.nodes[0].pid();
    std::fs::remove_file(format!("/proc/{pid}/root{disk}/ballast")).expect("the ballast is there");
    let freed = Instant::now();
    until("writing resumes", PATIENT, || {
        put_more(&mut objects, &mut rng, 4);
        let page = scene.node_metrics();
        page.node("disk_offloaded_records_total") > written && page.node("disk_full") == 0
    });
    println!("written again {:?} after there was space", freed.elapsed());
    let first = objects.len();
    put_more(&mut objects, &mut rng, SIZES.memory_mib + 16);
    read_all(&store, &objects[first..], "after there was space");
    assert!(objects.iter().map(|object| object.len).sum::<usize>() > 2 * DISK_MIB * MIB);
    scene.cluster.end();
}
