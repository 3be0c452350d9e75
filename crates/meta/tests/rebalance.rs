//! Balance of the nodes: records move from full nodes to empty ones, at a bounded rate, the least valuable first.

mod common;

use std::time::Duration;

use common::{GroupHarness, Routed, config, lookup_key, memory};
use moontide_meta::{CommandKind, CommandOutcome, CopyPurpose, GroupConfig, MountSpec, PutOptions};
use moontide_types::limits::UNIT_BYTES;
use moontide_types::{NodeId, SegmentId, Term};

/// A segment has 1,000 units; a record of this payload takes 8 of them.
const PAYLOAD: u64 = 7 * UNIT_BYTES;
const RECORDS: u64 = 80;

fn on(node: u64) -> PutOptions {
    PutOptions { local_node: Some(NodeId(node)), ..PutOptions::default() }
}

fn nodes_of(harness: &GroupHarness, key: &str) -> Vec<u64> {
    let found = harness.group.query(harness.now, &lookup_key(key));
    let locations = found.map_or(vec![], |detail| detail.locations.to_vec());
    locations.iter().map(|location| location.node.0).collect()
}

fn used_permille(harness: &GroupHarness, node: u64) -> u32 {
    let view = harness.group.segments().find(|view| view.node == NodeId(node)).expect("node is mounted");
    (view.units - view.free_units) * 1000 / view.units
}

/// Full nodes with records `NODE-NUMBER` in the order of their puts, and an empty node that has just joined.
fn joined(config: GroupConfig, full: &[u64], joining: u64) -> GroupHarness {
    let mut harness = GroupHarness::with(config);
    for &node in full {
        harness.mount(node, 0, Term::ZERO, false);
        for number in 0..RECORDS {
            let key = format!("{node}-{number}");
            let epoch = harness.start_with(&key, PAYLOAD, &on(node)).unwrap();
            harness.end(&key, epoch).unwrap();
            assert_eq!(nodes_of(&harness, &key), [node]);
        }
    }
    harness.mount(joining, 0, Term::ZERO, false);
    harness
}

fn balanced_config() -> GroupConfig {
    GroupConfig { rebalance_bytes_per_s: 1 << 30, ..config(1) }
}

/// Lets a second pass in tenths, and returns the moves that the group commanded.
fn second(harness: &mut GroupHarness) -> Vec<Routed> {
    let mut moves = vec![];
    for _ in 0..10 {
        harness.advance(Duration::from_millis(100));
        harness.group_tick();
        while let Some(command) = harness.commands.pop_front() {
            if let CommandKind::Copy { purpose, .. } = command.kind {
                assert_eq!(purpose, CopyPurpose::Rebalance);
                moves.push(command);
            }
            harness.run_command(&command);
        }
    }
    moves
}

#[test]
fn node_that_joins_full_ones_is_filled_to_half_the_limit() {
    let mut harness = joined(balanced_config(), &[1, 2, 3, 4], 5);
    let before = used_permille(&harness, 1);
    assert_eq!(before, 640);
    let seconds = (0..20).take_while(|_| !second(&mut harness).is_empty()).count();
    assert!((1..20).contains(&seconds), "{seconds}");
    let used: Vec<u32> = (1..=5).map(|node| used_permille(&harness, node)).collect();
    let skew = used.iter().max().unwrap() - used.iter().min().unwrap();
    assert!(skew <= 50, "{used:?}");
    for node in 1..=4 {
        for number in 0..RECORDS {
            assert_eq!(
                nodes_of(&harness, &format!("{node}-{number}")).len(),
                1,
                "no object is lost or doubled"
            );
        }
    }
    assert!(!harness.group.is_rebalancing());
}

#[test]
fn least_used_records_move_first() {
    let mut harness = joined(balanced_config(), &[1], 2);
    for number in 0..RECORDS / 2 {
        harness.lookup(&format!("1-{number}"), 0).unwrap();
    }
    while !second(&mut harness).is_empty() {}
    let moved = |number: &u64| nodes_of(&harness, &format!("1-{number}")) == [2];
    let (read, unread) =
        ((0..RECORDS / 2).filter(moved).count(), (RECORDS / 2..RECORDS).filter(moved).count());
    assert!(read == 0 && unread >= 30, "{read} that were read, {unread} others");
}

#[test]
fn moves_per_second_are_bounded() {
    // Two records of 8 units per second, of all groups together; this is the only one.
    let rate = 16 * UNIT_BYTES;
    let mut harness = joined(GroupConfig { rebalance_bytes_per_s: rate, ..config(1) }, &[1], 2);
    second(&mut harness);
    let moves: Vec<usize> = (0..5).map(|_| second(&mut harness).len()).collect();
    assert!(moves.iter().sum::<usize>() <= 5 * 2 + 1 && moves.iter().all(|&moves| moves >= 1), "{moves:?}");
}

#[test]
fn nodes_within_the_limit_keep_their_records() {
    let mut harness = GroupHarness::with(balanced_config());
    for node in [1, 2] {
        harness.mount(node, 0, Term::ZERO, false);
    }
    for number in 0..9 {
        let key = format!("{number}");
        let epoch = harness.start_with(&key, PAYLOAD, &on(1)).unwrap();
        harness.end(&key, epoch).unwrap();
    }
    assert!(used_permille(&harness, 1) > 50 && used_permille(&harness, 2) == 0);
    for _ in 0..5 {
        assert!(second(&mut harness).is_empty());
    }
}

#[test]
fn rate_of_zero_moves_nothing() {
    let mut harness = joined(config(1), &[1], 2);
    assert!((0..5).all(|_| second(&mut harness).is_empty()));
}

#[test]
fn replicas_of_an_object_never_move_to_one_node() {
    let mut harness = GroupHarness::with(balanced_config());
    for node in [1, 2] {
        harness.mount(node, 0, Term::ZERO, false);
    }
    let both = PutOptions { replicas: 2, replicas_min: 2, ..PutOptions::default() };
    for number in 0..40 {
        let epoch = harness.start_with(&format!("both-{number}"), PAYLOAD, &both).unwrap();
        harness.end(&format!("both-{number}"), epoch).unwrap();
    }
    for number in 0..40 {
        let epoch = harness.start_with(&format!("one-{number}"), PAYLOAD, &on(1)).unwrap();
        harness.end(&format!("one-{number}"), epoch).unwrap();
    }
    while !second(&mut harness).is_empty() {}
    for number in 0..40 {
        let mut nodes = nodes_of(&harness, &format!("both-{number}"));
        nodes.sort_unstable();
        assert_eq!(nodes, [1, 2]);
    }
    assert!(used_permille(&harness, 2) > 400, "the others have moved");
}

#[test]
fn refused_move_leaves_the_record_at_its_source() {
    let mut harness = joined(balanced_config(), &[1], 2);
    harness.advance(Duration::from_millis(100));
    harness.group_tick();
    let is_copy = |command: &Routed| matches!(command.kind, CommandKind::Copy { .. });
    let moves: Vec<Routed> = harness.commands.drain(..).filter(is_copy).collect();
    assert!(!moves.is_empty());
    for refused in &moves {
        harness.respond(refused, CommandOutcome::Refused(moontide_types::ErrorCode::ConnectionLost));
    }
    assert!((0..RECORDS).all(|number| nodes_of(&harness, &format!("1-{number}")) == [1]));
}

/// A record that fits nowhere must not hold up those behind it.
#[test]
fn record_that_fits_into_no_target_does_not_block_others() {
    let mut harness = GroupHarness::with(balanced_config());
    harness.mount(1, 0, Term::ZERO, false);
    let long = harness.start_with("long", 500 * UNIT_BYTES, &on(1)).unwrap();
    harness.end("long", long).unwrap();
    for number in 0..30 {
        let epoch = harness.start_with(&format!("{number}"), PAYLOAD, &on(1)).unwrap();
        harness.end(&format!("{number}"), epoch).unwrap();
    }
    // The emptiest node is smaller than the long record, which is the least used.
    harness.mount_spec(&MountSpec { segment: SegmentId(0), ..memory(2, 400) });
    for _ in 0..3 {
        second(&mut harness);
    }
    assert_eq!(nodes_of(&harness, "long"), [1]);
    assert!((0..30).any(|number| nodes_of(&harness, &format!("{number}")) == [2]));
}

/// Failure: one object of 30 MiB on four nodes of 256 MiB moved to another node each second. Cause: half of the skew could not be
/// reached, and any node below the mean was a target. Fix: no move takes a node across the mean.
#[test]
fn object_longer_than_the_difference_of_the_nodes_stays() {
    let mut harness = GroupHarness::with(balanced_config());
    for node in 1..=4 {
        harness.mount(node, 0, Term::ZERO, false);
    }
    let epoch = harness.start_with("one", 300 * UNIT_BYTES, &on(1)).unwrap();
    harness.end("one", epoch).unwrap();
    assert!((0..30).all(|_| second(&mut harness).is_empty()));
    assert_eq!(nodes_of(&harness, "one"), [1]);
}

#[test]
fn moves_of_long_objects_end() {
    let mut harness = GroupHarness::with(balanced_config());
    harness.mount(1, 0, Term::ZERO, false);
    for number in 0..9 {
        let epoch = harness.start_with(&format!("{number}"), 100 * UNIT_BYTES, &on(1)).unwrap();
        harness.end(&format!("{number}"), epoch).unwrap();
    }
    for node in 2..=4 {
        harness.mount(node, 0, Term::ZERO, false);
    }
    let moves: Vec<usize> = (0..40).map(|_| second(&mut harness).len()).collect();
    let total: usize = moves.iter().sum();
    assert!((5..=7).contains(&total) && moves[20..].iter().all(|&moves| moves == 0), "{moves:?}");
}
