//! Repair: lost replicas are made again, the most urgent ones first, and not before their node could return.

mod common;

use std::time::Duration;

use common::{GroupHarness, Routed, config, lookup_key, lose_node, reported};
use moontide_meta::{
    CommandKind, CommandOutcome, CopyPurpose, GroupConfig, PutOptions, ReportRecord, SegmentPhase,
};
use moontide_types::{Epoch, ErrorCode, Extent, NodeId, SegmentId, SlotId, Term};

const KIB: u64 = 1024;

fn options(replicas: u8) -> PutOptions {
    PutOptions { replicas, replicas_min: 1, ..PutOptions::default() }
}

fn put(harness: &mut GroupHarness, key: &str, replicas: u8) {
    let epoch = harness.start_with(key, KIB, &options(replicas)).unwrap();
    harness.end(key, epoch).unwrap();
}

/// Returns the nodes that have an object, sorted.
fn nodes_of(harness: &GroupHarness, key: &str) -> Vec<u64> {
    let found = harness.group.query(harness.now, &lookup_key(key));
    let mut nodes: Vec<u64> =
        found.map_or(vec![], |detail| detail.locations.iter().map(|location| location.node.0).collect());
    nodes.sort_unstable();
    nodes
}

/// Takes the Copy commands out of the queue.
fn copies(harness: &mut GroupHarness) -> Vec<Routed> {
    let is_copy = |command: &Routed| matches!(command.kind, CommandKind::Copy { .. });
    let (copies, others) = harness.commands.drain(..).partition(is_copy);
    harness.commands = others;
    Vec::from(copies)
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
fn lost_replicas_are_made_again() {
    let mut harness = GroupHarness::new(&[1, 2, 3]);
    (0..30).for_each(|n| put(&mut harness, &format!("k{n}"), 2));
    put(&mut harness, "single", 1);
    let single = nodes_of(&harness, "single");
    lose_node(&mut harness, 1, 0);
    seconds(&mut harness, 29);
    assert_eq!(harness.group.stats().copies_started, 0, "the node may return");
    let left: Vec<Vec<u64>> = (0..30).map(|n| nodes_of(&harness, &format!("k{n}"))).collect();
    let lacking = left.iter().filter(|nodes| nodes.len() == 1).count() as u64;
    assert!(lacking > 0);
    harness.advance(Duration::from_secs(2));
    harness.tick();
    assert_eq!(harness.group.objects_lacking_replicas(), lacking);
    harness.run_commands();
    for n in 0..30 {
        assert_eq!(nodes_of(&harness, &format!("k{n}")), [2, 3], "k{n}");
    }
    assert_eq!(nodes_of(&harness, "single"), if single == [1] { vec![] } else { single });
    assert_eq!(harness.group.stats().copied_records, lacking);
    assert_eq!(harness.group.objects_lacking_replicas(), 0);
    seconds(&mut harness, 60);
    assert_eq!(harness.group.stats().copies_started, lacking, "nothing is copied twice");
}

#[test]
fn objects_with_the_fewest_replicas_are_repaired_first() {
    let mut harness = GroupHarness::new(&[1, 2, 3, 4]);
    put(&mut harness, "two-left", 3);
    put(&mut harness, "one-left", 2);
    // The one with two left was used last.
    harness.advance(Duration::from_secs(1));
    harness.lookup("two-left", 1).unwrap();
    let (more, fewer) = (nodes_of(&harness, "two-left"), nodes_of(&harness, "one-left"));
    let lost = *fewer.iter().find(|node| more.contains(node)).expect("three of four nodes and two of them");
    lose_node(&mut harness, lost, 0);
    harness.advance(Duration::from_secs(31));
    harness.tick();
    let order: Vec<_> = copies(&mut harness).iter().map(|copy| copy.id).collect();
    assert_eq!(order, [common::id("one-left"), common::id("two-left")]);
}

#[test]
fn node_that_returns_in_time_causes_no_copies() {
    let mut harness = GroupHarness::new(&[1, 2, 3]);
    put(&mut harness, "k", 2);
    let nodes = nodes_of(&harness, "k");
    let detail = harness.group.query(harness.now, &lookup_key("k")).unwrap();
    let own = *detail.locations.iter().find(|location| location.node.0 == nodes[0]).unwrap();
    lose_node(&mut harness, nodes[0], 0);
    seconds(&mut harness, 20);
    // It connects again, with its records.
    harness.mount_in(nodes[0], 1, 0, Term::new(1).unwrap(), true);
    let record = ReportRecord {
        extent: own.extent,
        payload_offset: own.extent.span().offset(),
        root: own.root,
        extra_replicas: 1,
        ..reported(&harness, "k", detail.epoch, own.slot.0)
    };
    let (now, name, term) = (harness.now, (NodeId(nodes[0]), SegmentId(0)), Term::new(1).unwrap());
    harness.group.report(now, name, own.generation, term, 0, [record], &mut harness.effects).unwrap();
    harness.group.report_end(now, name, own.generation, term, 1, &mut harness.effects).unwrap();
    harness.settle();
    assert_eq!(nodes_of(&harness, "k"), nodes);
    seconds(&mut harness, 60);
    assert_eq!(harness.group.stats().copies_started, 0);
}

#[test]
fn refused_repair_is_tried_again() {
    let mut harness = GroupHarness::new(&[1, 2, 3]);
    put(&mut harness, "k", 2);
    let nodes = nodes_of(&harness, "k");
    lose_node(&mut harness, nodes[0], 0);
    harness.advance(Duration::from_secs(31));
    harness.tick();
    let copy = copies(&mut harness).pop().expect("the object is copied");
    assert!(matches!(copy.kind, CommandKind::Copy { purpose: CopyPurpose::Repair, .. }));
    harness.respond(&copy, CommandOutcome::Refused(ErrorCode::Unreachable));
    assert_eq!(nodes_of(&harness, "k"), [nodes[1]]);
    assert_eq!(harness.group.objects_lacking_replicas(), 1);
    seconds(&mut harness, 12);
    assert_eq!(nodes_of(&harness, "k").len(), 2);
    assert_eq!(harness.group.objects_lacking_replicas(), 0);
}

#[test]
fn object_without_a_place_for_its_replica_is_repaired_when_a_node_joins() {
    let mut harness = GroupHarness::new(&[1, 2]);
    put(&mut harness, "k", 2);
    lose_node(&mut harness, 1, 0);
    seconds(&mut harness, 60);
    assert_eq!(nodes_of(&harness, "k"), [2]);
    assert_eq!(harness.group.stats().evicted_objects, 0, "an eviction would not help");
    harness.mount(3, 0, Term::ZERO, false);
    seconds(&mut harness, 60);
    assert_eq!(nodes_of(&harness, "k"), [2, 3]);
}

#[test]
fn put_with_fewer_replicas_than_wanted_gets_the_others_later() {
    let mut harness = GroupHarness::new(&[1]);
    put(&mut harness, "k", 2);
    assert_eq!(nodes_of(&harness, "k"), [1]);
    harness.mount(2, 0, Term::ZERO, false);
    seconds(&mut harness, 60);
    assert_eq!(nodes_of(&harness, "k"), [1, 2]);
}

#[test]
fn object_removed_during_its_repair_does_not_return() {
    let mut harness = GroupHarness::new(&[1, 2, 3]);
    put(&mut harness, "k", 2);
    let nodes = nodes_of(&harness, "k");
    lose_node(&mut harness, nodes[0], 0);
    harness.advance(Duration::from_secs(31));
    harness.tick();
    let copy = copies(&mut harness).pop().expect("the object is copied");
    let _waits = harness.remove("k", true);
    harness.respond(&copy, CommandOutcome::Done);
    harness.run_commands();
    seconds(&mut harness, 60);
    assert!(!harness.exists("k"));
    assert_eq!(nodes_of(&harness, "k"), [0; 0]);
}

#[test]
fn new_master_repairs_only_after_the_nodes_have_reported() {
    let wait = Duration::from_secs(50);
    let mut harness = GroupHarness::with(GroupConfig { report_wait: wait, ..config(2) });
    let epoch = Epoch::new(Term::new(1).unwrap(), 9).unwrap();
    let report = |harness: &mut GroupHarness, node: u64| {
        harness.mount(node, 0, Term::new(1).unwrap(), true);
        let extent = Extent { start: 0, units: 3 };
        let record = ReportRecord {
            slot: SlotId(0),
            extent,
            payload_offset: extent.span().offset(),
            extra_replicas: 1,
            ..reported(harness, "k", epoch, 0)
        };
        let (now, name, term) = (harness.now, (NodeId(node), SegmentId(0)), Term::new(2).unwrap());
        let generation = moontide_types::Generation(1);
        harness.group.report(now, name, generation, term, 0, [record], &mut harness.effects).unwrap();
        harness.group.report_end(now, name, generation, term, 1, &mut harness.effects).unwrap();
        harness.settle();
    };
    report(&mut harness, 1);
    harness.mount(3, 0, Term::ZERO, false);
    seconds(&mut harness, 45);
    assert_eq!(harness.group.stats().copies_started, 0, "another node may have the replica");
    report(&mut harness, 2);
    seconds(&mut harness, 60);
    assert_eq!(harness.group.stats().copies_started, 0, "it has");
    // The number of replicas was an attribute of the reported records.
    lose_node(&mut harness, 2, 0);
    seconds(&mut harness, 60);
    assert_eq!(nodes_of(&harness, "k"), [1, 3]);
    assert_eq!(harness.group.find_segment(NodeId(3), SegmentId(0)).unwrap().phase, SegmentPhase::Serving);
}
