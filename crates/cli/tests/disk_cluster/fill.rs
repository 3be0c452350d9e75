//! Puts of four times the memory size at full speed: puts wait for the disk, and nothing is lost.

use moontide_disk::BackendKind;

use crate::content::Rng;
use crate::disk_harness::{DiskCluster, Sizes, mib, put_fast, read_all};
use crate::harness::{KIB, MIB, sized};
use crate::readers::Object;

/// Returns objects of `bytes` bytes in total: every second one of 1 MiB, the others of 64 KiB to 4 MiB.
fn objects(rng: &mut Rng, bytes: usize) -> Vec<Object> {
    let (mut all, mut sum) = (Vec::new(), 0);
    while sum < bytes {
        let lens = if all.len().is_multiple_of(2) { MIB..MIB + 1 } else { 64 * KIB..4 * MIB };
        let object = Object::new("fill", all.len(), rng, lens);
        sum += object.len;
        all.push(object);
    }
    all
}

fn fill(backend: BackendKind) {
    let memory_mib = sized(64, 1024);
    let mut rng = Rng::seeded();
    let cluster = DiskCluster::start(backend, Sizes::times(memory_mib, 8), "");
    let objects = objects(&mut rng, 4 * memory_mib * MIB);
    let (local, remote) = (cluster.store(true), cluster.store(false));
    let (took, longest) = put_fast(&[&local, &remote], &objects);
    println!(
        "{backend}: {} objects, {:.0} MiB into {memory_mib} MiB put at {:.0} MiB/s, the longest in {longest:?}",
        objects.len(),
        mib(&objects),
        mib(&objects) / took.as_secs_f64()
    );
    for (store, how) in [(&remote, "remote"), (&local, "local")] {
        read_all(store, &objects, &format!("{backend}, {how}"));
        assert!(store.metrics().stats().hits_disk > 0, "nothing was read from disk, {how}");
    }
    let page = cluster.node_metrics();
    assert_eq!(page.node("disk_corrupt_records_total"), 0);
    assert_eq!(page.node("disk_write_errors_total"), 0);
    assert!(page.node("disk_used_bytes") <= page.node("disk_limit_bytes"));
    drop((local, remote));
    cluster.cluster.check_accounting();
    cluster.cluster.end();
}

#[test]
fn bucket_backend_holds_four_times_memory_size() {
    fill(BackendKind::Bucket);
}

#[test]
fn file_backend_holds_four_times_memory_size() {
    fill(BackendKind::File);
}

#[test]
fn offset_backend_holds_four_times_memory_size() {
    fill(BackendKind::Offset);
}

#[test]
fn puts_are_throttled_to_slow_disk_without_loss() {
    let memory_mib = sized(32, 256);
    let (times, limit_mib_s) = (sized(3, 4), sized(16, 32));
    let mut rng = Rng::seeded();
    let words = format!("--disk-write-limit {limit_mib_s}MiB");
    let cluster = DiskCluster::start(BackendKind::Bucket, Sizes::times(memory_mib, 8), &words);
    let objects = objects(&mut rng, times * memory_mib * MIB);
    let (local, remote) = (cluster.store(true), cluster.store(false));
    let (took, longest) = put_fast(&[&local, &remote], &objects);
    println!(
        "a disk of {limit_mib_s} MiB/s: {:.0} MiB into {memory_mib} MiB put at {:.0} MiB/s, the longest in {longest:?}",
        mib(&objects),
        mib(&objects) / took.as_secs_f64()
    );
    // Bytes that do not fit into memory are written before the last put is acknowledged, except up to one second of
    // writes.
    let written = mib(&objects) - (memory_mib + limit_mib_s) as f64;
    assert!(took.as_secs_f64() >= written / limit_mib_s as f64, "puts were faster than the disk: {took:?}");
    assert!(cluster.node_metrics().node("disk_throttled_seconds_total") > 0);
    for (store, how) in [(&remote, "remote"), (&local, "local")] {
        read_all(store, &objects, &format!("a slow disk, {how}"));
    }
    drop((local, remote));
    cluster.cluster.end();
}
