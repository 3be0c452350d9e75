//! Copies of hot objects on the nodes of their readers: made when a host reads much, released when it is not read.

mod common;

use std::time::Duration;

use common::{GroupHarness, Routed, config, lookup_key};
use moontide_meta::{
    CommandKind, CommandOutcome, CopyPurpose, DrainMode, GroupConfig, PutOptions, Quota, RemoteReads,
    RemoveOutcome, StripeLocation,
};
use moontide_types::{ErrorCode, Generation, NodeId, SegmentId, SlotId, Term};

const LEN: u64 = 1024;
/// Enough reads for a copy.
const MUCH: u64 = 64 << 10;

fn hot_config() -> GroupConfig {
    GroupConfig { hot_copy_bytes: MUCH, hot_copy_idle: Duration::from_secs(10), ..config(1) }
}

fn with_nodes(nodes: &[u64]) -> GroupHarness {
    let mut harness = GroupHarness::with(hot_config());
    for &node in nodes {
        harness.mount(node, 0, Term::ZERO, false);
    }
    harness
}

fn put_on(harness: &mut GroupHarness, key: &str, node: u64, replicas: u8) {
    let options = PutOptions {
        local_node: Some(NodeId(node)),
        replicas,
        replicas_min: replicas,
        ..PutOptions::default()
    };
    let epoch = harness.start_with(key, LEN, &options).unwrap();
    harness.end(key, epoch).unwrap();
}

fn locations(harness: &GroupHarness, key: &str) -> Vec<StripeLocation> {
    let found = harness.group.query(harness.now, &lookup_key(key));
    found.map_or(vec![], |detail| detail.locations.to_vec())
}

fn nodes_of(harness: &GroupHarness, key: &str) -> Vec<u64> {
    let mut nodes: Vec<u64> = locations(harness, key).iter().map(|location| location.node.0).collect();
    nodes.sort_unstable();
    nodes
}

/// The host of node `reader` reads bytes of an object from one of its nodes.
fn read(harness: &mut GroupHarness, key: &str, reader: u64, bytes: u64) {
    let detail = harness.group.query(harness.now, &lookup_key(key)).expect("object exists");
    let location = *detail.locations.first().expect("object has a location");
    let reads = RemoteReads {
        segment: location.segment,
        generation: location.generation,
        slot: location.slot,
        epoch: detail.epoch,
        reader: NodeId(reader),
        bytes,
    };
    harness.group.remote_reads(harness.now, location.node, &reads, &mut harness.effects);
    harness.settle();
}

fn take_copy(harness: &mut GroupHarness) -> Option<Routed> {
    let command = harness.commands.pop_front()?;
    assert!(matches!(command.kind, CommandKind::Copy { purpose: CopyPurpose::Hot, .. }), "{command:?}");
    Some(command)
}

/// The heartbeat of a node says that a replica was read there.
fn touch(harness: &mut GroupHarness, key: &str, node: u64) {
    let location =
        *locations(harness, key).iter().find(|location| location.node.0 == node).expect("a replica is there");
    let slot = location.slot.0;
    let name = (NodeId(node), location.segment);
    harness.group.touched(harness.now, name, location.generation, slot / 8 * 8, &[1 << (slot % 8)]);
}

fn pass(harness: &mut GroupHarness, seconds: u64) {
    for _ in 0..seconds {
        harness.advance(Duration::from_secs(1));
        harness.group_tick();
        harness.run_commands();
    }
}

#[test]
fn object_that_a_host_reads_much_is_copied_to_its_node() {
    let mut harness = with_nodes(&[1, 2, 3]);
    put_on(&mut harness, "k", 1, 1);
    read(&mut harness, "k", 3, MUCH - 1);
    assert!(take_copy(&mut harness).is_none(), "not much yet");
    read(&mut harness, "k", 3, 1);
    let copy = take_copy(&mut harness).expect("a copy");
    assert_eq!(copy.node(), NodeId(3));
    read(&mut harness, "k", 3, MUCH);
    assert!(take_copy(&mut harness).is_none(), "it is on its way");
    harness.respond(&copy, CommandOutcome::Done);
    assert_eq!(nodes_of(&harness, "k"), [1, 3]);
    assert_eq!(harness.group.hot_copies(), 1);
}

#[test]
fn few_reads_of_a_long_object_cause_no_copy() {
    let mut harness = with_nodes(&[1, 2]);
    let on = PutOptions { local_node: Some(NodeId(1)), ..PutOptions::default() };
    let epoch = harness.start_with("long", 60 << 10, &on).unwrap();
    harness.end("long", epoch).unwrap();
    read(&mut harness, "long", 2, 7 * (60 << 10));
    assert!(take_copy(&mut harness).is_none());
    read(&mut harness, "long", 2, 60 << 10);
    assert!(take_copy(&mut harness).is_some(), "eight reads");
}

#[test]
fn reads_long_ago_do_not_count() {
    let mut harness = with_nodes(&[1, 2]);
    put_on(&mut harness, "k", 1, 1);
    for _ in 0..10 {
        read(&mut harness, "k", 2, MUCH / 10);
        pass(&mut harness, 5);
    }
    assert_eq!(nodes_of(&harness, "k"), [1]);
}

#[test]
fn copy_is_released_when_it_is_not_read() {
    let mut harness = with_nodes(&[1, 2]);
    put_on(&mut harness, "k", 1, 1);
    read(&mut harness, "k", 2, MUCH);
    harness.run_commands();
    for _ in 0..5 {
        pass(&mut harness, 8);
        touch(&mut harness, "k", 2);
        assert_eq!(nodes_of(&harness, "k"), [1, 2], "it is read");
    }
    pass(&mut harness, 12);
    assert_eq!(nodes_of(&harness, "k"), [1]);
    assert_eq!((harness.group.hot_copies(), harness.group.stats().copies_released), (0, 1));
    assert_eq!(harness.free_units(), with_nodes(&[1, 2]).free_units() - 3, "the space of the copy is free");
}

#[test]
fn replicas_that_the_writer_asked_for_are_kept() {
    let mut harness = with_nodes(&[1, 2, 3]);
    put_on(&mut harness, "k", 1, 2);
    let other = nodes_of(&harness, "k").into_iter().find(|&node| node != 1).unwrap();
    let reader = 5 - other;
    read(&mut harness, "k", reader, MUCH);
    harness.run_commands();
    assert_eq!(nodes_of(&harness, "k"), [1, 2, 3]);
    pass(&mut harness, 30);
    assert_eq!(nodes_of(&harness, "k").len(), 2);
}

/// The copy may be the only replica left: it is not released then.
#[test]
fn copy_stays_when_the_other_replicas_are_lost() {
    let mut harness = with_nodes(&[1, 2]);
    put_on(&mut harness, "k", 1, 1);
    read(&mut harness, "k", 2, MUCH);
    harness.run_commands();
    common::lose_node(&mut harness, 1, 0);
    pass(&mut harness, 30);
    assert_eq!(nodes_of(&harness, "k"), [2]);
}

#[test]
fn removal_kills_the_copy_too() {
    let mut harness = with_nodes(&[1, 2]);
    put_on(&mut harness, "k", 1, 1);
    read(&mut harness, "k", 2, MUCH);
    harness.run_commands();
    assert_eq!(harness.remove("k", false), RemoveOutcome::Waiting);
    let mut killed: Vec<u64> = harness
        .commands
        .iter()
        .filter(|command| command.kind == CommandKind::Kill)
        .map(|kill| kill.node().0)
        .collect();
    killed.sort_unstable();
    assert_eq!(killed, [1, 2]);
}

/// A removal after the release must wait until the node has given up the copy, which a new master would learn of otherwise.
#[test]
fn removal_waits_for_a_copy_that_is_being_released() {
    let mut harness = with_nodes(&[1, 2]);
    put_on(&mut harness, "k", 1, 1);
    read(&mut harness, "k", 2, MUCH);
    harness.run_commands();
    harness.advance(Duration::from_secs(11));
    harness.group_tick();
    let reclaim = harness.commands.pop_front().expect("the copy is released");
    assert_eq!((reclaim.kind, reclaim.node()), (CommandKind::Reclaim, NodeId(2)));
    assert_eq!(harness.remove("k", false), RemoveOutcome::Waiting);
    let killed: Vec<u64> = harness
        .commands
        .iter()
        .filter(|command| command.kind == CommandKind::Kill)
        .map(|kill| kill.node().0)
        .collect();
    assert!(killed.contains(&2), "{killed:?}");
}

#[test]
fn copies_take_at_most_a_tenth_of_the_memory() {
    let mut harness = with_nodes(&[1, 2]);
    for number in 0..80 {
        put_on(&mut harness, &format!("{number}"), 1, 1);
    }
    for number in 0..80 {
        read(&mut harness, &format!("{number}"), 2, MUCH);
        harness.run_commands();
    }
    // 2,000 units in all, and 3 units for each payload and its metadata.
    let copies = harness.group.hot_copies();
    assert!((20..=200 / 3).contains(&copies), "{copies}");
}

#[test]
fn refused_copy_is_made_again_when_the_host_still_reads_much() {
    let mut harness = with_nodes(&[1, 2]);
    put_on(&mut harness, "k", 1, 1);
    read(&mut harness, "k", 2, MUCH);
    let copy = take_copy(&mut harness).unwrap();
    harness.respond(&copy, CommandOutcome::Refused(ErrorCode::ConnectionLost));
    harness.run_commands();
    assert_eq!(nodes_of(&harness, "k"), [1]);
    read(&mut harness, "k", 2, MUCH);
    assert!(take_copy(&mut harness).is_some());
}

#[test]
fn reads_of_a_slot_that_holds_something_else_are_ignored() {
    let mut harness = with_nodes(&[1, 2]);
    put_on(&mut harness, "k", 1, 1);
    let location = locations(&harness, "k")[0];
    let epoch = harness.group.query(harness.now, &lookup_key("k")).unwrap().epoch;
    let right = RemoteReads {
        segment: location.segment,
        generation: location.generation,
        slot: location.slot,
        epoch,
        reader: NodeId(2),
        bytes: MUCH,
    };
    let newer = moontide_types::Epoch::new(Term::new(1).unwrap(), 99).unwrap();
    for wrong in [
        RemoteReads { epoch: newer, ..right },
        RemoteReads { generation: Generation(9), ..right },
        RemoteReads { slot: SlotId(u32::MAX), ..right },
        RemoteReads { slot: SlotId(location.slot.0 + 1), ..right },
        RemoteReads { segment: SegmentId(7), ..right },
        RemoteReads { reader: NodeId(9), ..right },
    ] {
        harness.group.remote_reads(harness.now, NodeId(1), &wrong, &mut harness.effects);
        harness.settle();
        assert!(harness.commands.is_empty(), "{wrong:?}");
    }
    harness.group.remote_reads(harness.now, NodeId(1), &right, &mut harness.effects);
    harness.settle();
    assert!(take_copy(&mut harness).is_some());
}

#[test]
fn copies_are_off_with_a_limit_of_zero() {
    let mut harness = GroupHarness::with(GroupConfig { hot_copy_bytes: 0, ..hot_config() });
    harness.mount(1, 0, Term::ZERO, false);
    harness.mount(2, 0, Term::ZERO, false);
    put_on(&mut harness, "k", 1, 1);
    read(&mut harness, "k", 2, 1 << 40);
    assert!(harness.commands.is_empty());
}

/// A copy that a drain moved would otherwise stay for as long as the object.
#[test]
fn copy_that_was_moved_is_released_when_it_is_not_read() {
    let mut harness = with_nodes(&[1, 2, 3]);
    put_on(&mut harness, "k", 1, 1);
    read(&mut harness, "k", 2, MUCH);
    harness.run_commands();
    assert_eq!(nodes_of(&harness, "k"), [1, 2]);
    harness.group.drain(NodeId(2), SegmentId(0), DrainMode::Move).unwrap();
    pass(&mut harness, 3);
    assert_eq!(nodes_of(&harness, "k"), [1, 3]);
    pass(&mut harness, 20);
    assert_eq!(nodes_of(&harness, "k").len(), 1);
    assert_eq!(harness.group.hot_copies(), 0);
}

#[test]
fn copies_stay_within_the_quota_of_the_tenant() {
    let mut harness = with_nodes(&[1, 2]);
    put_on(&mut harness, "k", 1, 1);
    let tenant = harness.tenant;
    harness.group.set_quota(tenant, Quota { bytes_max: 2 * LEN, objects_max: 0 });
    read(&mut harness, "k", 2, MUCH);
    assert!(take_copy(&mut harness).is_none());
    harness.group.set_quota(tenant, Quota { bytes_max: 16 * LEN, objects_max: 0 });
    read(&mut harness, "k", 2, MUCH);
    assert!(take_copy(&mut harness).is_some());
}

#[test]
fn nothing_is_evicted_for_a_copy() {
    let mut harness = with_nodes(&[1, 2, 3]);
    put_on(&mut harness, "k", 1, 1);
    let mut number = 0;
    // Until the node of the readers is full.
    while {
        put_on(&mut harness, &format!("full-{number}"), 2, 1);
        nodes_of(&harness, &format!("full-{number}")) == [2]
    } {
        number += 1;
    }
    read(&mut harness, "k", 2, MUCH);
    assert!(take_copy(&mut harness).is_none());
    pass(&mut harness, 2);
    assert_eq!(harness.group.stats().evicted_objects, 0);
}

#[test]
fn all_hot_objects_are_reviewed_in_steps() {
    let mut harness = with_nodes(&[1, 2]);
    for number in 0..60 {
        put_on(&mut harness, &format!("{number}"), 1, 1);
        read(&mut harness, &format!("{number}"), 2, MUCH);
        harness.run_commands();
    }
    let copies = harness.group.hot_copies();
    assert!(copies > 10, "{copies}");
    pass(&mut harness, 30);
    assert_eq!(harness.group.hot_copies(), 0);
    assert!((0..60).all(|number| nodes_of(&harness, &format!("{number}")) == [1]));
}
