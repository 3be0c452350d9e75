//! Four times the memory is put as fast as it goes: the puts wait for the disk, and nothing is lost.

use moontide_disk::BackendKind;

use crate::content::Rng;
use crate::kit::{KIB, MIB, sized};
use crate::readers::Object;
use crate::scene::{Scene, Sizes, mib, put_fast, read_all};

/// Objects of this many bytes in all: every other one of 1 MiB, the rest of 64 KiB to 4 MiB.
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
    let scene = Scene::start(backend, Sizes::times(memory_mib, 8), "");
    let objects = objects(&mut rng, 4 * memory_mib * MIB);
    let (near, far) = (scene.store(true), scene.store(false));
    let (took, longest) = put_fast(&[&near, &far], &objects);
    println!(
        "{backend}: {} objects, {:.0} MiB into {memory_mib} MiB put at {:.0} MiB/s, the longest in {longest:?}",
        objects.len(),
        mib(&objects),
        mib(&objects) / took.as_secs_f64()
    );
    for (store, how) in [(&far, "far"), (&near, "near")] {
        read_all(store, &objects, &format!("{backend}, {how}"));
        assert!(store.metrics().stats().hits_disk > 0, "nothing was read from disk, {how}");
    }
    let page = scene.node_metrics();
    assert_eq!(page.node("disk_damaged_records_total"), 0);
    assert_eq!(page.node("disk_write_errors_total"), 0);
    assert!(page.node("disk_used_bytes") <= page.node("disk_limit_bytes"));
    drop((near, far));
    scene.cluster.check_books();
    scene.cluster.end();
}

#[test]
fn four_times_the_memory_is_kept_in_buckets() {
    fill(BackendKind::Bucket);
}

#[test]
fn four_times_the_memory_is_kept_in_files() {
    fill(BackendKind::File);
}

#[test]
fn four_times_the_memory_is_kept_in_one_large_file() {
    fill(BackendKind::Offset);
}

#[test]
fn puts_wait_for_a_slow_disk_and_lose_nothing() {
    let memory_mib = sized(32, 256);
    let (times, limit_mib_s) = (sized(3, 4), sized(16, 32));
    let mut rng = Rng::seeded();
    let words = format!("--disk-write-limit {limit_mib_s}MiB");
    let scene = Scene::start(BackendKind::Bucket, Sizes::times(memory_mib, 8), &words);
    let objects = objects(&mut rng, times * memory_mib * MIB);
    let (near, far) = (scene.store(true), scene.store(false));
    let (took, longest) = put_fast(&[&near, &far], &objects);
    println!(
        "a disk of {limit_mib_s} MiB/s: {:.0} MiB into {memory_mib} MiB put at {:.0} MiB/s, the longest in {longest:?}",
        mib(&objects),
        mib(&objects) / took.as_secs_f64()
    );
    // What memory could not hold had to be written before the last put was acknowledged; a second's worth may be ahead.
    let written = mib(&objects) - (memory_mib + limit_mib_s) as f64;
    assert!(took.as_secs_f64() >= written / limit_mib_s as f64, "puts were faster than the disk: {took:?}");
    assert!(scene.node_metrics().node("disk_throttled_ms_total") > 0);
    for (store, how) in [(&far, "far"), (&near, "near")] {
        read_all(store, &objects, &format!("a slow disk, {how}"));
    }
    drop((near, far));
    scene.cluster.end();
}
