//! Objects that were in memory when their node was stopped return to memory.

mod common;

use common::{GroupHarness, config, id, memory, session};
use moontide_meta::{CommandKind, CommandOutcome, MountSpec, ReportRecord, StripeRange};
use moontide_types::{Epoch, ErrorCode, NodeId, Term};

const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;
const UNIT: u64 = 512;

/// A master whose node returns with memory of this size, and has yet to report its disk.
fn returned(bytes: u64) -> GroupHarness {
    let mut harness = GroupHarness::with(config(2));
    harness.mount_disk(1, 0, true);
    mount_memory(&mut harness, bytes);
    harness
}

fn mount_memory(harness: &mut GroupHarness, bytes: u64) {
    let units = (bytes / UNIT) as u32;
    harness.mount_spec(&MountSpec { slots: 4096, one_sided: false, ..memory(1, units) });
}

fn report(harness: &mut GroupHarness, key: &'static str, len: u64, was_in_memory: bool) -> Epoch {
    let epoch = Epoch::new(Term::new(1).unwrap(), harness.names.len() as u64 + 1).unwrap();
    harness.names.insert(id(key), key.to_owned());
    let stripe = StripeRange { index: 0, count: 1, offset: 0, len };
    let record =
        ReportRecord { object_len: len, stripe, touched: was_in_memory, ..harness.on_disk(key, epoch) };
    harness.notice(1, session(1, 0), &record, true).unwrap();
    epoch
}

fn end_report(harness: &mut GroupHarness) {
    harness.group.disk_recovered(NodeId(1), session(1, 0)).unwrap();
    harness.tick();
}

/// Returns the keys of the queued Promote commands, in order.
fn promotions(harness: &GroupHarness) -> Vec<&str> {
    let is_promotion = |kind| matches!(kind, CommandKind::Promote { .. });
    assert!(harness.commands.iter().all(|command| is_promotion(command.kind)), "{:?}", harness.commands);
    harness.commands.iter().map(|command| harness.names[&command.id].as_str()).collect()
}

#[test]
fn objects_that_were_in_memory_are_loaded_after_the_inventory() {
    let mut harness = returned(MIB);
    let hot = report(&mut harness, "hot", KIB, true);
    let cold = report(&mut harness, "cold", KIB, false);
    harness.tick();
    assert!(harness.commands.is_empty(), "the inventory is not complete");
    end_report(&mut harness);
    assert_eq!(promotions(&harness), ["hot"]);
    harness.run_commands();
    assert_eq!(harness.lookup("hot", 0), Ok((hot, 2)), "in memory and on disk");
    assert_eq!(harness.lookup("cold", 0), Ok((cold, 1)));
    harness.tick();
    assert!(harness.commands.is_empty());
}

#[test]
fn warm_up_leaves_the_free_memory_that_eviction_would_restore() {
    let mut harness = returned(MIB);
    let keys = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    keys.iter().for_each(|key| _ = report(&mut harness, key, 80 * KIB, true));
    end_report(&mut harness);
    harness.run_commands();
    harness.tick();
    // Eleven take 88 %, and the low watermark is at 90 %.
    assert!(harness.commands.is_empty());
    assert_eq!(harness.group.stats().promoted_objects, 11);
    assert_eq!(harness.group.objects_on_disk(), 1);
}

#[test]
fn warm_up_loads_few_objects_at_a_time() {
    let mut harness = returned(512 * MIB);
    let keys = ["a", "b", "c", "d", "e", "f"];
    keys.iter().for_each(|key| _ = report(&mut harness, key, 24 * MIB, true));
    end_report(&mut harness);
    assert_eq!(promotions(&harness), ["a", "b", "c"], "64 MiB are reached");
    harness.tick();
    assert_eq!(harness.commands.len(), 3, "nothing has ended");
    // A refused promotion ends as well. It is tried again after the others.
    let command = harness.commands.pop_front().unwrap();
    harness.respond(&command, CommandOutcome::Refused(ErrorCode::Corrupt));
    let command = harness.commands.pop_back().unwrap();
    assert_eq!(command.kind, CommandKind::Reclaim);
    harness.run_command(&command);
    harness.tick();
    assert_eq!(promotions(&harness), ["b", "c", "d"]);
    harness.run_commands();
    harness.tick();
    assert_eq!(promotions(&harness), ["e", "f", "a"]);
    harness.run_commands();
    assert_eq!(harness.group.stats().promoted_objects, 6);
}

#[test]
fn object_whose_loading_is_refused_each_time_is_given_up() {
    let mut harness = returned(MIB);
    report(&mut harness, "k", KIB, true);
    end_report(&mut harness);
    for attempt in 0..4 {
        assert_eq!(promotions(&harness), ["k"], "attempt {attempt}");
        let command = harness.commands.pop_front().unwrap();
        harness.respond(&command, CommandOutcome::Refused(ErrorCode::Busy));
        let command = harness.commands.pop_front().unwrap();
        assert_eq!(command.kind, CommandKind::Reclaim);
        harness.run_command(&command);
        harness.tick();
    }
    assert!(harness.commands.is_empty());
    assert!(harness.exists("k"), "it is read from disk");
}

#[test]
fn warm_up_waits_for_memory_and_ends_with_the_session() {
    let mut harness = GroupHarness::with(config(2));
    harness.mount_disk(1, 0, true);
    report(&mut harness, "k", KIB, true);
    end_report(&mut harness);
    assert!(harness.commands.is_empty(), "the node has no memory yet");
    mount_memory(&mut harness, MIB);
    harness.tick();
    assert_eq!(promotions(&harness), ["k"]);
    harness.commands.clear();
    harness.group.node_lost(harness.now, NodeId(1), session(1, 0), &mut harness.effects);
    harness.tick();
    assert!(harness.commands.is_empty());
    assert_eq!(harness.group.objects(), 0);
}

#[test]
fn removed_object_is_not_loaded() {
    let mut harness = returned(MIB);
    report(&mut harness, "k", KIB, true);
    let _ = harness.remove("k", true);
    end_report(&mut harness);
    let kinds: Vec<CommandKind> = harness.commands.iter().map(|command| command.kind).collect();
    assert!(!kinds.iter().any(|kind| matches!(kind, CommandKind::Promote { .. })), "{kinds:?}");
    harness.run_commands();
    assert!(!harness.exists("k"));
}
