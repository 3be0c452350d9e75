//! An orderly stop of a node with a disk: its objects are on the disk afterwards, except those that were removed. And a crash
//! of a node whose objects are written to disk after their put: only those that were not written yet are lost.

use std::time::{Duration, Instant};

use moontide_client::PutOutcome;
use moontide_disk::BackendKind;
use moontide_types::Medium;
use rustix::process::Signal;

use crate::content::Rng;
use crate::disk_harness::{DiskCluster, RELAXED_TIMEOUT, Sizes, count_existing, on_disk, put_fast, read_all};
use crate::harness::{KIB, STEP_TIMEOUT, until};
use crate::readers::Object;

/// More memory than the objects need: no object is evicted.
const SIZES: Sizes = Sizes { memory_mib: 64, limit_mib: 256, staging_mib: 16 };

fn objects(count: usize, rng: &mut Rng) -> Vec<Object> {
    (0..count).map(|number| Object::new("object", number, rng, 512 * KIB..1024 * KIB)).collect()
}

/// Sends SIGTERM to the node and waits for its end. Returns the time that this took.
#[track_caller]
fn stop_node(cluster: &mut DiskCluster) -> Duration {
    let began = Instant::now();
    cluster.cluster.nodes[0].signal(Signal::TERM);
    until("the node ends", STEP_TIMEOUT, || cluster.cluster.nodes[0].ended().is_some());
    let status = cluster.cluster.nodes[0].ended().expect("just ended");
    assert!(status.success(), "{status:?}: {}", cluster.cluster.nodes[0].log_text());
    began.elapsed()
}

#[test]
fn objects_in_memory_survive_orderly_restart() {
    for backend in BackendKind::ALL {
        let mut rng = Rng::seeded();
        let mut cluster = DiskCluster::start(backend, SIZES, "");
        let store = cluster.store(false);
        let objects = objects(40, &mut rng);
        put_fast(&[&store], &objects);
        assert_eq!(cluster.node_metrics().node("disk_records"), 0, "nothing is evicted");
        let took = stop_node(&mut cluster);
        println!("{backend}: stopped in {took:?}");
        cluster.cluster.restart_node(0);
        until("all objects exist", RELAXED_TIMEOUT, || count_existing(&store, &objects) == objects.len());
        // They return to memory, and are read from there.
        let is_in_memory = |object: &Object| {
            let info = store.stat(object.key()).unwrap().expect("the object exists");
            info.stripes.iter().any(|stripe| stripe.medium == Medium::Memory)
        };
        until("all objects are in memory", RELAXED_TIMEOUT, || objects.iter().all(is_in_memory));
        let loads = cluster.node_metrics().node("disk_loads_total");
        read_all(&store, &objects, "after the restart");
        assert_eq!(cluster.node_metrics().node("disk_loads_total"), loads);
        cluster.cluster.end();
    }
}

/// Failure: reads of a client on the node's host failed for a second after the restart. Cause: it used the memory and the
/// socket of the old process until their heartbeat was old. Fix: a closed socket is noticed by the first read.
#[test]
fn client_on_same_host_reads_at_once_after_restart() {
    for signal in [Signal::TERM, Signal::KILL] {
        let mut rng = Rng::seeded();
        let mut cluster = DiskCluster::start_with_master(BackendKind::Bucket, SIZES, "--offload put", "");
        let store = cluster.store(true);
        let objects = objects(12, &mut rng);
        put_fast(&[&store], &objects);
        until("all objects are on disk", RELAXED_TIMEOUT, || {
            on_disk(&store, &objects).len() == objects.len()
        });
        cluster.cluster.nodes[0].signal(signal);
        until("the node ends", STEP_TIMEOUT, || cluster.cluster.nodes[0].ended().is_some());
        cluster.cluster.restart_node(0);
        until("all objects exist", RELAXED_TIMEOUT, || count_existing(&store, &objects) == objects.len());
        // The first read is of a range, the next ones are of whole objects.
        let mut part = vec![0; 100];
        let read = store.get_range(objects[0].key(), 1000, &mut part);
        assert_eq!(read.expect("a ranged read"), Some(part.len()), "{signal:?}");
        assert_eq!(part, objects[0].content()[1000..1100]);
        read_all(&store, &objects, "after the restart");
        cluster.cluster.end();
    }
}

/// The disk is smaller than the memory. It must not evict the objects that a flush writes first for those that it writes last.
#[test]
fn flush_to_small_disk_keeps_most_valuable_objects() {
    for backend in BackendKind::ALL {
        let mut rng = Rng::seeded();
        let sizes = Sizes { memory_mib: 192, limit_mib: 64, staging_mib: 16 };
        let mut cluster = DiskCluster::start(backend, sizes, "");
        let store = cluster.store(false);
        let objects = objects(180, &mut rng);
        put_fast(&[&store], &objects);
        let used_again = &objects[..20];
        read_all(&store, used_again, "before the stop");
        stop_node(&mut cluster);
        cluster.cluster.restart_node(0);
        until("objects exist", RELAXED_TIMEOUT, || count_existing(&store, used_again) == used_again.len());
        read_all(&store, used_again, "after the restart");
        println!("{backend}: {} of {} objects", count_existing(&store, &objects), objects.len());
        cluster.cluster.end();
    }
}

#[test]
fn object_removed_before_orderly_stop_does_not_return() {
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start(BackendKind::Bucket, SIZES, "");
    let store = cluster.store(false);
    let objects = objects(24, &mut rng);
    put_fast(&[&store], &objects);
    let (kept, removed) = objects.split_at(12);
    let last = &removed[0];
    for object in &removed[1..] {
        store.remove(object.key(), true).expect("the node is there");
    }
    // The stop begins while the last removal is in progress.
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| store.remove(last.key(), true));
        stop_node(&mut cluster);
        if let Err(error) = stopping.join().expect("a removal does not panic") {
            assert!(error.is_retryable(), "{error}");
        }
    });
    cluster.cluster.restart_node(0);
    until("all other objects exist", RELAXED_TIMEOUT, || count_existing(&store, kept) == kept.len());
    read_all(&store, kept, "after the restart");
    assert_eq!(count_existing(&store, &removed[1..]), 0, "removed objects are back");
    cluster.cluster.end();
}

#[test]
fn orderly_stop_without_answer_of_master_takes_limited_time() {
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start(BackendKind::Bucket, SIZES, "");
    let store = cluster.store(false);
    put_fast(&[&store], &objects(4, &mut rng));
    cluster.cluster.master.signal(Signal::STOP);
    let took = stop_node(&mut cluster);
    cluster.cluster.master.signal(Signal::CONT);
    println!("stopped in {took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn stop_with_flush_timeout_of_zero_writes_nothing() {
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start(BackendKind::Bucket, SIZES, "--disk-flush-timeout 0s");
    let store = cluster.store(false);
    let objects = objects(8, &mut rng);
    put_fast(&[&store], &objects);
    stop_node(&mut cluster);
    cluster.cluster.restart_node(0);
    // The node reports its records before it accepts new ones.
    until("a put succeeds", RELAXED_TIMEOUT, || {
        store.put(b"another", b"object").is_ok_and(|put| put == PutOutcome::Stored)
    });
    assert_eq!(count_existing(&store, &objects), 0);
    cluster.cluster.end();
}

/// The write rate is so low that the flush takes minutes: only what is commanded first, 16 MiB per group, is written at once.
#[test]
fn second_signal_ends_flush() {
    let mut rng = Rng::seeded();
    let sizes = Sizes { memory_mib: 256, limit_mib: 512, ..SIZES };
    let mut cluster = DiskCluster::start(BackendKind::Bucket, sizes, "--disk-write-limit 64KiB");
    let store = cluster.store(false);
    let objects = objects(200, &mut rng);
    put_fast(&[&store], &objects);
    cluster.cluster.nodes[0].signal(Signal::TERM);
    std::thread::sleep(Duration::from_secs(2));
    assert!(cluster.cluster.nodes[0].ended().is_none(), "flush has ended");
    // Reads go on. New objects are refused, because there is no other node.
    read_all(&store, &objects[..20], "during the flush");
    let began = Instant::now();
    cluster.cluster.nodes[0].signal(Signal::TERM);
    until("the node ends", STEP_TIMEOUT, || cluster.cluster.nodes[0].ended().is_some());
    println!("stopped in {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(4), "drain_timeout is 5 s, and there is no reader");
    assert!(cluster.cluster.nodes[0].log_text().contains("memory not completely written to disk"));
}

/// Objects that the master has queued for a write to disk, or commanded to write.
fn backlog(cluster: &DiskCluster) -> usize {
    cluster.cluster.master.metrics().master("write_back_pending_objects") as usize
}

#[test]
fn crash_with_put_trigger_loses_at_most_backlog() {
    // The first batch is written at once, the others wait for the limit.
    for (limit, expects_backlog) in [("0", false), ("256KiB", true)] {
        let mut rng = Rng::seeded();
        let node = format!("--disk-write-limit {limit}");
        let mut cluster = DiskCluster::start_with_master(BackendKind::Bucket, SIZES, "--offload put", &node);
        let store = cluster.store(false);
        let objects = objects(40, &mut rng);
        for object in &objects {
            put_fast(&[&store], std::slice::from_ref(object));
            std::thread::sleep(Duration::from_millis(10));
        }
        if !expects_backlog {
            until("all objects are written", STEP_TIMEOUT, || backlog(&cluster) == 0);
        }
        let in_memory_only = backlog(&cluster);
        assert_eq!(in_memory_only > 0, expects_backlog, "{in_memory_only} objects are not written");
        assert_eq!(cluster.cluster.master.metrics().master("write_backs_skipped_total"), 0);
        assert_eq!(cluster.cluster.master.metrics().master("demoted_objects_total"), 0, "nothing is evicted");
        cluster.kill_and_restart();
        let expected = objects.len() - in_memory_only.min(objects.len());
        until("the written objects exist", RELAXED_TIMEOUT, || count_existing(&store, &objects) >= expected);
        let found: Vec<Object> =
            objects.iter().filter(|object| store.exists(object.key()).unwrap_or(false)).cloned().collect();
        println!(
            "limit {limit}: {} of {} after kill -9, backlog {in_memory_only}",
            found.len(),
            objects.len()
        );
        read_all(&store, &found, "after the crash");
        cluster.cluster.end();
    }
}
