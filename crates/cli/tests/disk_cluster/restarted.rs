//! Restart of a node with very many small objects on its disk: time until they are served.

use std::time::{Duration, Instant};

use moontide_client::{PutItem, PutOptions, PutOutcome, Store};
use moontide_disk::BackendKind;
use rustix::process::Signal;

use crate::content::Rng;
use crate::disk_harness::{
    DiskCluster, RELAXED_TIMEOUT, Sizes, THREADS, count_existing, first_hit, on_disk, read_fast,
};
use crate::harness::{KIB, STEP_TIMEOUT, is_full, sized, until};
use crate::readers::Object;

#[test]
fn many_objects_on_disk_are_served_after_node_restart() {
    let backends = if is_full() { &BackendKind::ALL[..] } else { &[BackendKind::Bucket] };
    for &backend in backends {
        // Slow to fill: one synced file per object.
        let full = if backend == BackendKind::File { 20_000 } else { 100_000 };
        restart_with_many(backend, sized(5000, full));
    }
}

/// Puts small objects, many per call.
fn put_batches(store: &Store, objects: &[Object]) {
    std::thread::scope(|scope| {
        for objects in objects.chunks(objects.len().div_ceil(THREADS)) {
            scope.spawn(move || {
                let contents: Vec<Vec<u8>> = objects.iter().map(Object::content).collect();
                let parts: Vec<[&[u8]; 1]> = contents.iter().map(|content| [&content[..]]).collect();
                let items = objects.iter().zip(&parts);
                let items: Vec<PutItem<'_>> =
                    items.map(|(object, parts)| PutItem { key: object.key(), parts }).collect();
                for (object, put) in objects.iter().zip(store.put_batch(&items, &PutOptions::default())) {
                    match put {
                        Ok(put) => assert_eq!(put, PutOutcome::Stored, "{}", object.key),
                        Err(error) => panic!("the put of {} failed: {error}", object.key),
                    }
                }
            });
        }
    });
}

fn restart_with_many(backend: BackendKind, wanted: usize) {
    let mut rng = Rng::seeded();
    let sizes = Sizes { memory_mib: sized(48, 256), limit_mib: 4096, staging_mib: 32 };
    let mut cluster = DiskCluster::start(backend, sizes, "--bytes-per-slot 4096");
    let store = cluster.store(false);
    let (began, mut objects) = (Instant::now(), Vec::<Object>::new());
    while (cluster.node_metrics().node("disk_records") as usize) < wanted {
        let first = objects.len();
        let more = (first..first + 1000).map(|n| Object::new("small", n, &mut rng, 4 * KIB..4 * KIB + 1));
        objects.extend(more);
        put_batches(&store, &objects[first..]);
        assert!(began.elapsed() < 10 * RELAXED_TIMEOUT, "{} objects put, too few on disk", objects.len());
    }
    let put = began.elapsed();
    let known = on_disk(&store, &objects);
    assert!(known.len() >= wanted * 99 / 100, "only {} are known to be on disk", known.len());
    cluster.cluster.nodes[0].signal(Signal::TERM);
    until("the node ends", STEP_TIMEOUT, || cluster.cluster.nodes[0].ended().is_some());
    cluster.cluster.restart_node(0);
    let ready = cluster.cluster.nodes[0].started.elapsed();
    let first = first_hit(&cluster, &store, &known);
    let (started, mut half) = (cluster.cluster.nodes[0].started, None);
    let all = loop {
        let there = count_existing(&store, &known);
        let now = started.elapsed();
        if half.is_none() && there * 2 >= known.len() {
            half = Some(now);
        }
        if there == known.len() {
            break now;
        }
        assert!(now < RELAXED_TIMEOUT, "{there} of {} are there {now:?} after the start", known.len());
        std::thread::sleep(Duration::from_millis(2));
    };
    println!(
        "{backend}: {} objects of 4 KiB, put in {put:?}; after the start: ready {ready:?}, first hit {first:?}, half there \
         {:?}, all there {all:?}",
        known.len(),
        half.unwrap_or(all)
    );
    let sample: Vec<Object> = known.iter().step_by(known.len() / 1000).cloned().collect();
    let tally = read_fast(&store, &sample);
    assert_eq!(tally.right(), sample.len() as u64, "{:?}", tally.lost().first());
    cluster.cluster.end();
}
