//! What a group believes of the time before its own term, or before its node's present life: nodes that missed a term, or
//! were started again, and what the master before handed on.

mod common;

use std::time::Duration;

use common::{Bench, ask, config, id, session};
use moontide_meta::{
    GroupConfig, Medium, MountSpec, OrderOutcome, PutOptions, Removal, ReportRecord, Waiter,
};
use moontide_types::{Epoch, ErrorCode, Extent, Generation, NodeId, SegmentId, SlotId, Term};

const KIB: u64 = 1024;

fn term(number: u32) -> Term {
    Term::new(number).unwrap()
}

/// A segment of a node, as it comes back.
fn spec(node: u64, life: u64) -> MountSpec<'static> {
    MountSpec {
        node: NodeId(node),
        session: session(node, life),
        segment: SegmentId(0),
        generation: Generation(1),
        medium: Medium::Memory,
        units: 1000,
        slots: 100,
        labels: ["", "", ""],
        tenant: None,
        term: term(1),
        occupied: true,
        known: term(1),
        away: Duration::ZERO,
        one_sided: true,
    }
}

/// The node comes, and reports one object.
fn comes_with(bench: &mut Bench, spec: &MountSpec<'_>, key: &'static str, epoch: Epoch) {
    bench.group.mount(bench.now, spec, &mut bench.effects).unwrap();
    let extent = Extent { start: 0, units: 3 };
    let record = ReportRecord {
        slot: SlotId(0),
        extent,
        payload_offset: extent.span().offset(),
        ..bench.on_disk(key, epoch)
    };
    let (now, name, own) = (bench.now, (spec.node, spec.segment), bench.group.config().term);
    bench.group.report(now, name, spec.generation, own, 0, [record], &mut bench.effects).unwrap();
    bench.group.report_end(now, name, spec.generation, own, 1, &mut bench.effects).unwrap();
    bench.settle();
}

#[test]
fn who_missed_a_term_is_not_believed_if_that_one_may_have_removed_without_it() {
    // Failure: a removed object came back. Cause: its node was away for the whole of a term in which removals were
    // answered, and was there in time for the next one. Fix: it says for how long it was away, and which term it knows.
    let epoch = Epoch::new(term(1), 9).unwrap();
    let long = Duration::from_secs(31);
    for (known, away, believed) in [(1, Duration::from_secs(5), true), (1, long, false), (2, long, true)] {
        let mut bench = Bench::with(config(3));
        let spec = MountSpec { term: term(known), known: term(known), away, ..spec(1, 0) };
        comes_with(&mut bench, &spec, "k", epoch);
        assert_eq!(bench.has("k"), believed, "knows term {known}, was away for {away:?}");
    }
}

#[test]
fn who_was_given_up_by_a_master_that_was_then_replaced_is_not_believed() {
    // Failure: a removed object came back. Cause: its master could not reach its node for more than a minute, stopped waiting,
    // acknowledged the removal, and died. Fix: the next one knows that there was a master all the time, and the node says how
    // long it was away.
    let epoch = Epoch::new(term(1), 9).unwrap();
    for (away, witnessed, later, believed) in [
        (61, true, 0, false),
        (50, true, 0, true),
        (61, false, 0, true), // nobody knows for how long there was no master: the node is believed, or caches would be lost
        (75, true, 20, true), // it was away for 55 s when the master was replaced
        (85, true, 20, false),
    ] {
        let mut bench = Bench::with(GroupConfig { witnessed, ..config(2) });
        bench.advance(Duration::from_secs(later));
        comes_with(&mut bench, &MountSpec { away: Duration::from_secs(away), ..spec(1, 0) }, "k", epoch);
        assert_eq!(bench.has("k"), believed, "away {away} s, witnessed: {witnessed}, comes after {later} s");
    }
}

#[test]
fn who_came_late_is_late_for_the_heir_as_well() {
    let mut before = Bench::with(config(2));
    before.advance(Duration::from_secs(120));
    before.tick();
    before.group.mount(before.now, &spec(1, 0), &mut before.effects).unwrap(); // and has not reported when the group goes
    let mut heir = Bench::with(config(3));
    heir.group.inherit(heir.now, before.group.bequeath(before.now, 1_000));
    let again = MountSpec { term: term(2), known: term(2), ..spec(1, 1) };
    comes_with(&mut heir, &again, "k", Epoch::new(term(1), 9).unwrap());
    assert!(!heir.has("k"), "it may have been removed while nobody waited for the node");
}

#[test]
fn removals_wait_until_nobody_takes_a_dead_process_for_alive() {
    // Failure: processes of a node's host read what was removed. Cause: its process had been killed and started again,
    // they had not noticed, and the new process had nothing to kill. Fix: nothing is certain before they must have.
    let mut bench = Bench::new(&[1]);
    bench.put("k", KIB);
    let again = MountSpec { generation: Generation(2), occupied: false, ..spec(1, 1) };
    bench.group.mount(bench.now, &again, &mut bench.effects).unwrap();
    bench.settle();
    bench.tick();
    assert!(!bench.has("k"), "it went with the process");
    assert_eq!(bench.remove("k", false), Removal::Done(Some(ErrorCode::Pending)));
    bench.advance(Duration::from_secs(3));
    bench.tick();
    assert_eq!(bench.remove("k", false), Removal::Done(Some(ErrorCode::NotFound)));
}

#[test]
fn a_mount_that_is_said_twice_changes_nothing() {
    let mut bench = Bench::with(config(1));
    let empty = MountSpec { term: Term::ZERO, occupied: false, ..spec(1, 0) };
    for _ in 0..2 {
        bench.group.mount(bench.now, &empty, &mut bench.effects).unwrap();
        bench.settle();
        if !bench.has("k") {
            bench.put("k", KIB);
        }
    }
    let free = bench.free_units();
    bench.group.mount(bench.now, &empty, &mut bench.effects).unwrap();
    bench.settle();
    assert!(bench.has("k") && bench.free_units() == free, "the segment is not empty");
}

/// A group of term 1 with an object on nodes 1 and 2, of which the second has gone away.
fn widowed() -> (Bench, Epoch) {
    let mut bench = Bench::new(&[1, 2]);
    let both = PutOptions { replicas: 2, replicas_min: 2, ..PutOptions::default() };
    let epoch = bench.start_with("k", KIB, &both).unwrap();
    bench.end("k", epoch).unwrap();
    bench.put("other", KIB);
    bench.group.node_lost(bench.now, NodeId(2), session(2, 0), &mut bench.effects);
    bench.tick();
    (bench, epoch)
}

#[test]
fn what_was_inherited_is_found_until_it_is_removed() {
    let (before, epoch) = widowed();
    let mut heir = Bench::with(config(2));
    heir.group.inherit(heir.now, before.group.bequeath(before.now, 1_000));
    assert_eq!(heir.look("k", 0), Ok((epoch, 1)), "nobody has reported it yet");
    let start = heir.start("k", KIB);
    assert_eq!(start, Err(ErrorCode::AlreadyExists));
    let removal = heir.group.remove(heir.now, &ask("k"), false, Waiter(1), &mut heir.effects);
    assert_eq!(removal, Removal::Done(Some(ErrorCode::Pending)), "its nodes have not been heard");
    assert_eq!(heir.look("k", 0), Err(ErrorCode::NotFound), "who removes does not find it any more");
    assert!(!heir.has("k"));
}

#[test]
fn what_was_removed_before_the_group_went_does_not_come_back_to_the_heir() {
    let (mut before, epoch) = widowed();
    assert_eq!(before.remove("k", false), Removal::Waiting);
    before.obey();
    assert_eq!(before.removed, [(Waiter(1), Some(ErrorCode::Pending))]);
    let inheritance = before.group.bequeath(before.now, 1_000);
    assert!(inheritance.objects.iter().all(|object| object.id != id("k")));
    let mut heir = Bench::with(config(2));
    heir.group.inherit(heir.now, inheritance);
    assert!(!heir.has("k"));
    // The node that was away comes to the heir, with the object.
    comes_with(&mut heir, &spec(2, 1), "k", epoch);
    assert!(!heir.has("k"), "the heir knows that it was removed");
}

#[test]
fn of_two_versions_that_nodes_bring_the_newer_one_is_found_in_whatever_order_they_come() {
    let [older, newer] = [5, 9].map(|sequence| Epoch::new(term(1), sequence).unwrap());
    for [first, second] in [[older, newer], [newer, older]] {
        let mut bench = Bench::with(config(2));
        comes_with(&mut bench, &spec(1, 0), "k", first);
        comes_with(&mut bench, &spec(2, 0), "k", second);
        assert_eq!(bench.look("k", 0), Ok((newer, 1)), "{first} came first");
    }
}

#[test]
fn a_removal_of_what_was_evicted_waits_for_the_node() {
    let mut bench = Bench::new(&[1]);
    bench.put("k", KIB);
    assert_eq!(bench.group.evict(bench.now, 0, 1, &mut bench.effects).objects, 1);
    bench.settle();
    assert!(!bench.has("k"));
    // The node has not done it yet: a master of the next term would hear of the object.
    assert_eq!(bench.remove("k", false), Removal::Waiting);
    bench.obey();
    assert_eq!(bench.removed, [(Waiter(1), None)]);
    assert_eq!(bench.remove("k", false), Removal::Done(Some(ErrorCode::NotFound)));
}

#[test]
fn what_a_node_would_not_kill_is_remembered_as_removed() {
    let mut bench = Bench::new(&[1]);
    let epoch = bench.put("k", KIB);
    assert_eq!(bench.remove("k", false), Removal::Waiting);
    let kill = bench.orders[0];
    bench.answer(&kill, OrderOutcome::Refused(ErrorCode::DiskFull));
    assert_eq!(bench.removed, [(Waiter(1), Some(ErrorCode::Pending))]);
    // Long after everybody else has forgotten, the node comes back with it.
    bench.advance(Duration::from_secs(120));
    bench.tick();
    bench.group.node_lost(bench.now, NodeId(1), session(1, 0), &mut bench.effects);
    bench.tick();
    comes_with(&mut bench, &spec(1, 1), "k", epoch);
    assert!(!bench.has("k"), "removed, whatever the node has");
}
