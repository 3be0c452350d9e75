//! Objects of all sizes are readable from disk, also those that are larger than the staging memory of the node.

use moontide_client::Store;
use moontide_disk::BackendKind;
use moontide_types::Medium;

use crate::content::Rng;
use crate::disk_harness::{DiskCluster, RELAXED_TIMEOUT, Sizes};
use crate::harness::{KIB, MIB, Shape, sized, until};
use crate::readers::{Got, Object, Way, read};

/// Whether the object is on disk and not in memory.
fn is_only_on_disk(store: &Store, object: &Object) -> bool {
    let info = store.stat(object.key()).expect("a stat").expect("the object was stored");
    info.stripes.iter().all(|stripe| stripe.medium == Medium::Disk)
}

/// Puts objects of 4 MiB until all of `objects` have left memory.
fn push_to_disk(store: &Store, objects: &[Object], rng: &mut Rng) {
    until("all objects are on disk only", RELAXED_TIMEOUT, || {
        let filler = Object::new("filler", rng.draw() as usize, rng, 4 * MIB..4 * MIB + 1);
        filler.put(store, &Default::default()).expect("a put");
        objects.iter().all(|object| is_only_on_disk(store, object))
    });
}

/// Reads ranges at the ends, around the boundaries of pages and parts, and one that is longer than staging.
fn read_ranges(store: &Store, object: &Object, what: &str) {
    let content = object.content();
    let len = object.len;
    let mut ranges = vec![(0, len.min(10)), (len / 2, (len / 2).min(3 * MIB + 5)), (len - 1, 1)];
    let boundaries = [256 * KIB, MIB, 5 * MIB].into_iter().filter(|at| at + 7 < len);
    ranges.extend(boundaries.map(|at| (at - 7, 14)));
    ranges.push((len / 5, len - len / 5));
    for (offset, len) in ranges {
        let mut found = vec![0xee; len];
        let read = store.get_range(object.key(), offset as u64, &mut found);
        let read = read.unwrap_or_else(|error| panic!("{what}: range of {}: {error}", object.key));
        assert_eq!(read, Some(len), "{what}: range of {}", object.key);
        assert!(found == content[offset..offset + len], "{what}: wrong bytes in a range of {}", object.key);
    }
}

fn read_batch(store: &Store, objects: &[Object], what: &str) {
    let keys: Vec<&[u8]> = objects.iter().map(Object::key).collect();
    for (object, got) in objects.iter().zip(store.get_batch(&keys)) {
        let bytes = got.unwrap_or_else(|error| panic!("{what}: {} in a batch: {error}", object.key));
        object.check(&bytes.unwrap_or_else(|| panic!("{what}: {} missed", object.key)), what);
    }
}

/// Ways to read.
const WAYS: [&str; 4] = ["whole", "into a buffer", "range", "batch"];

fn check(store: &Store, way: &str, objects: &[Object], what: &str) {
    let before = store.metrics().stats().hits_disk;
    let read_each = |way: Way| {
        for object in objects {
            let got = read(store, way, object);
            assert!(matches!(got, Got::Right), "{what}: {}: {got:?}", object.key);
        }
    };
    match way {
        "whole" => read_each(Way::Copy),
        "into a buffer" => read_each(Way::Into),
        "range" => objects.iter().for_each(|object| read_ranges(store, object, what)),
        _ => read_batch(store, objects, what),
    }
    let hits = store.metrics().stats().hits_disk - before;
    assert!(hits >= objects.len() as u64, "{what}: {hits} reads from disk");
}

fn read_all_sizes(backend: BackendKind, staging_mib: usize) {
    let lens = sized(
        vec![1, 4 * KIB, MIB, 3 * MIB + 5, 17 * MIB],
        vec![1, 4 * KIB, MIB, 64 * MIB - 1, 64 * MIB, 65 * MIB, 256 * MIB, 512 * MIB],
    );
    let sizes = Sizes { memory_mib: sized(64, 1600), limit_mib: sized(1024, 16 << 10), staging_mib };
    let mut rng = Rng::seeded();
    let shape = Shape { groups: 1, ..Shape::default() };
    let mut cluster = DiskCluster::with_shape(backend, sizes, "--segment-bytes-max 2GiB", shape);
    cluster.cluster.add_node(&[]);
    cluster.cluster.wait_for_nodes(1);
    let (local, remote) = (cluster.store(true), cluster.store(false));
    // All objects leave memory before the first read: the master keeps objects that are read again.
    let mut sets: Vec<(&Store, String, &str, Vec<Object>)> = Vec::new();
    for (store, how) in [(&remote, "remote"), (&local, "local")] {
        for (number, way) in WAYS.into_iter().enumerate() {
            let object = |len: &usize| Object::new(&format!("{how}-{len}"), number, &mut rng, *len..len + 1);
            let objects: Vec<Object> = lens.iter().map(object).collect();
            for object in &objects {
                object.put(store, &Default::default()).expect("a put");
            }
            sets.push((
                store,
                format!("{backend}, staging of {staging_mib} MiB, {how}, {way}"),
                way,
                objects,
            ));
        }
    }
    let all: Vec<Object> = sets.iter().flat_map(|(.., objects)| objects.iter().cloned()).collect();
    push_to_disk(&remote, &all, &mut rng);
    for (store, what, way, objects) in &sets {
        check(store, way, objects, what);
    }
    let page = cluster.node_metrics();
    assert_eq!(page.node("disk_corrupt_records_total"), 0);
    assert!(page.node("disk_loads_ahead_total") > 0, "no part was read ahead");
    drop(sets);
    drop((local, remote));
    cluster.cluster.end();
}

#[test]
fn bucket_backend_reads_objects_larger_than_staging() {
    read_all_sizes(BackendKind::Bucket, 8);
    if crate::harness::is_full() {
        read_all_sizes(BackendKind::Bucket, 256);
    }
}

#[test]
fn file_backend_reads_objects_larger_than_staging() {
    read_all_sizes(BackendKind::File, 8);
    if crate::harness::is_full() {
        read_all_sizes(BackendKind::File, 256);
    }
}

#[test]
fn offset_backend_reads_objects_larger_than_staging() {
    read_all_sizes(BackendKind::Offset, 8);
    if crate::harness::is_full() {
        read_all_sizes(BackendKind::Offset, 256);
    }
}
