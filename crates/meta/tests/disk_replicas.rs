//! Objects that their writers want on disks, too: written back after the put, on one disk after the other, best effort.

mod common;

use std::time::Duration;

use common::{GroupHarness, Routed, config, disks, lookup_key, lose_node, reported, session, with_disks};
use moontide_meta::{
    Admission, CommandKind, CommandOutcome, GroupConfig, PutOptions, PutStart, ReportRecord,
};
use moontide_types::{Epoch, ErrorCode, Extent, Generation, Medium, NodeId, SegmentId, SlotId, Term};

const KIB: u64 = 1024;

/// Puts an object with `replicas` in memory, of which `disk_replicas` shall be on disks, too.
fn put(harness: &mut GroupHarness, key: &str, replicas: u8, disk_replicas: u8) {
    let options = PutOptions { replicas, replicas_min: replicas, ..PutOptions::default() };
    let start = PutStart { disk_replicas, ..harness.put_start(key, KIB, &options) };
    let epoch = harness.start_put(key, &start).unwrap();
    harness.end(key, epoch).unwrap();
}

/// Returns the nodes that have an object in memory and those that have it on disk, sorted.
fn nodes_of(harness: &GroupHarness, key: &str) -> (Vec<u64>, Vec<u64>) {
    let locations =
        harness.group.query(harness.now, &lookup_key(key)).map_or(vec![], |found| found.locations);
    let of = |on_disk: bool| {
        let on_medium = locations.iter().filter(|location| (location.medium == Medium::Disk) == on_disk);
        let mut nodes: Vec<u64> = on_medium.map(|location| location.node.0).collect();
        nodes.sort_unstable();
        nodes
    };
    (of(false), of(true))
}

/// Ticks, and takes the Offload commands out of the queue.
fn offloads(harness: &mut GroupHarness) -> Vec<Routed> {
    harness.tick();
    let is_offload = |command: &Routed| command.kind == CommandKind::Offload;
    let (offloads, others) = harness.commands.drain(..).partition(is_offload);
    harness.commands = others;
    Vec::from(offloads)
}

/// Lets time pass, in seconds, with a tick in each of them.
fn seconds(harness: &mut GroupHarness, seconds: u64) {
    for _ in 0..seconds {
        harness.advance(Duration::from_secs(1));
        harness.tick();
        harness.run_commands();
    }
}

#[test]
fn object_is_on_as_many_disks_as_asked_for_and_stays_in_memory() {
    let mut harness = disks(&[1, 2, 3]);
    for (disk_replicas, key) in ["none", "one", "two", "three"].iter().enumerate() {
        put(&mut harness, key, 3, disk_replicas as u8);
        seconds(&mut harness, 3);
        let (memory, disk) = nodes_of(&harness, key);
        assert_eq!((memory, disk.len()), (vec![1, 2, 3], disk_replicas), "{key}: on disks of {disk:?}");
        let different = disk.is_sorted_by(|a, b| a < b);
        assert!(different, "{disk:?}");
    }
    assert_eq!(harness.group.stats().offloads_started, 6);
    assert_eq!(harness.group.write_back_backlog(), (0, 0));
    seconds(&mut harness, 60);
    assert_eq!(harness.group.stats().offloads_started, 6, "nothing is written twice");
}

#[test]
fn nodes_without_disk_write_nothing_and_the_put_succeeds() {
    let mut harness = GroupHarness::new(&[1, 2, 3]);
    put(&mut harness, "k", 2, 2);
    seconds(&mut harness, 3);
    let (memory, disk) = nodes_of(&harness, "k");
    assert_eq!((memory.len(), disk.len()), (2, 0));
    // With a disk at one of two nodes, it has the only copy.
    let mut harness = GroupHarness::new(&[1, 2]);
    harness.mount_disk(2, 0, false);
    put(&mut harness, "k", 2, 2);
    seconds(&mut harness, 3);
    assert_eq!(nodes_of(&harness, "k"), (vec![1, 2], vec![2]));
    assert_eq!(harness.group.write_back_backlog(), (0, 0));
}

#[test]
fn wish_of_the_writer_overrides_the_admission_to_disks() {
    let config = GroupConfig { admission: Admission::Accessed, ..config(1) };
    let mut harness = with_disks(config, &[1]);
    put(&mut harness, "asked", 1, 1);
    put(&mut harness, "other", 1, 0);
    seconds(&mut harness, 3);
    assert_eq!(nodes_of(&harness, "asked"), (vec![1], vec![1]));
    assert_eq!(nodes_of(&harness, "other"), (vec![1], vec![]));
}

#[test]
fn disk_that_accepts_nothing_for_now_is_awaited_and_others_go_on() {
    let mut harness = disks(&[1, 2]);
    harness.group.disk_status(NodeId(1), session(1, 0), false);
    put(&mut harness, "k", 2, 2);
    seconds(&mut harness, 5);
    assert_eq!(nodes_of(&harness, "k"), (vec![1, 2], vec![2]));
    assert_eq!(harness.group.write_back_backlog().0, 1);
    harness.group.disk_status(NodeId(1), session(1, 0), true);
    seconds(&mut harness, 5);
    assert_eq!(nodes_of(&harness, "k"), (vec![1, 2], vec![1, 2]));
}

#[test]
fn cancelled_write_is_repeated_and_refused_one_is_not() {
    let mut harness = disks(&[1]);
    put(&mut harness, "cancelled", 1, 1);
    let command = offloads(&mut harness).pop().expect("the object is written");
    harness.respond(&command, CommandOutcome::Refused(ErrorCode::Cancelled));
    let command = offloads(&mut harness).pop().expect("it is written again");
    harness.respond(&command, CommandOutcome::Refused(ErrorCode::TooLarge));
    seconds(&mut harness, 60);
    assert!(offloads(&mut harness).is_empty());
    assert_eq!(nodes_of(&harness, "cancelled"), (vec![1], vec![]));
    assert_eq!(harness.group.stats().write_backs_skipped, 1);
}

#[test]
fn object_removed_during_its_second_write_is_killed_on_both_disks() {
    let mut harness = disks(&[1, 2]);
    put(&mut harness, "k", 2, 2);
    let first = offloads(&mut harness).pop().expect("the first write");
    harness.write_to_disk(&first).unwrap();
    let second = offloads(&mut harness).pop().expect("the second write");
    assert_ne!(first.node(), second.node());
    let _waits = harness.remove("k", true);
    harness.respond(&second, CommandOutcome::Done);
    harness.run_commands();
    seconds(&mut harness, 60);
    assert!(!harness.exists("k"));
    assert_eq!(nodes_of(&harness, "k"), (vec![], vec![]));
}

#[test]
fn repair_of_a_lost_replica_writes_the_lost_copy_on_disk_again() {
    let mut harness = disks(&[1, 2, 3]);
    put(&mut harness, "k", 2, 2);
    seconds(&mut harness, 3);
    let (memory, disk) = nodes_of(&harness, "k");
    assert_eq!(memory, disk);
    lose_node(&mut harness, disk[0], 0);
    seconds(&mut harness, 60);
    let left: Vec<u64> = (1..=3).filter(|&node| node != disk[0]).collect();
    assert_eq!(nodes_of(&harness, "k"), (left.clone(), left));
}

#[test]
fn next_master_writes_what_the_last_one_did_not() {
    let mut harness = GroupHarness::with(config(2));
    let epoch = Epoch::new(Term::new(1).unwrap(), 9).unwrap();
    harness.mount(1, 0, Term::new(1).unwrap(), true);
    harness.mount_disk(1, 0, false);
    let extent = Extent { start: 0, units: 3 };
    let record = ReportRecord {
        slot: SlotId(0),
        extent,
        payload_offset: extent.span().offset(),
        disk_replicas: 1,
        ..reported(&harness, "k", epoch, 0)
    };
    let (now, name, term) = (harness.now, (NodeId(1), SegmentId(0)), Term::new(2).unwrap());
    harness.names.insert(common::id("k"), "k".to_owned());
    harness.group.report(now, name, Generation(1), term, 0, [record], &mut harness.effects).unwrap();
    harness.group.report_end(now, name, Generation(1), term, 1, &mut harness.effects).unwrap();
    harness.settle();
    seconds(&mut harness, 5);
    assert_eq!(nodes_of(&harness, "k"), (vec![1], vec![1]));
}
