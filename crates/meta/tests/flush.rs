//! Write-backs, and flushes of nodes that stop, case by case.

mod common;

use std::num::NonZeroU16;
use std::time::Duration;

use common::{GroupHarness, Routed, config, disks, id, lookup_key, memory, session, with_disks};
use moontide_meta::{
    Admission, CommandKind, CommandOutcome, FlushProgress, GroupConfig, MountSpec, OffloadTrigger, PutEnd,
    PutOptions, PutStart, RemoveOutcome, ReportRecord, TickBudget, WaiterId,
};
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Extent, Generation, Medium, NodeId, SegmentId, SlotId, Term};

const KIB: u64 = 1024;

fn flush(harness: &mut GroupHarness, node: u64) {
    harness.group.flush(NodeId(node), session(node, 0)).unwrap();
    harness.tick();
}

fn progress(harness: &GroupHarness, node: u64) -> FlushProgress {
    harness.group.flush_progress(session(node, 0)).expect("node is flushing")
}

/// Returns the media of an object's locations, sorted.
fn media(harness: &mut GroupHarness, key: &str) -> Vec<Medium> {
    let detail = harness.group.query(harness.now, &lookup_key(key));
    let mut media: Vec<Medium> =
        detail.map_or(vec![], |detail| detail.locations.iter().map(|location| location.medium).collect());
    media.sort();
    media
}

/// Returns the keys of the queued Offload commands, in order.
fn offloads(harness: &GroupHarness) -> Vec<&str> {
    let commands = harness.commands.iter().filter(|command| command.kind == CommandKind::Offload);
    commands.map(|command| harness.names[&command.id].as_str()).collect()
}

/// Returns the keys in the order in which memory pressure evicts them.
fn eviction_order(harness: &mut GroupHarness) -> Vec<String> {
    let mut order = vec![];
    while harness.group.evict(harness.now, 0, 1, &mut harness.effects).objects > 0 {
        harness.settle();
        let command = harness.commands.pop_back().expect("a victim on disk is reclaimed");
        assert_eq!(command.kind, CommandKind::Reclaim);
        order.push(harness.names[&command.id].clone());
    }
    order
}

fn take_offload(harness: &mut GroupHarness) -> Routed {
    let command = harness.commands.pop_front().expect("a command");
    assert_eq!(command.kind, CommandKind::Offload);
    command
}

/// Puts objects on node 1, and one that cannot be evicted on node 2: the memory of a node that stops does not count as used.
fn under_pressure(keys: &[&str]) -> GroupHarness {
    let mut harness = disks(&[1, 2]);
    let on = |node| PutOptions { local_node: Some(NodeId(node)), ..PutOptions::default() };
    let epoch = harness.start_full("hard", KIB, &on(2), PinClass::Hard, None).unwrap();
    harness.end("hard", epoch).unwrap();
    for key in keys {
        let epoch = harness.start_with(key, KIB, &on(1)).unwrap();
        harness.end(key, epoch).unwrap();
    }
    harness
}

#[test]
fn write_back_keeps_memory_and_eviction_order() {
    let mut harness = under_pressure(&["a", "b", "c", "d"]);
    harness.lookup("b", 0).unwrap();
    let free = harness.free_units();
    flush(&mut harness, 1);
    assert_eq!(progress(&harness, 1), FlushProgress { objects: 4, bytes: 4 * KIB, refused: 0 });
    assert_eq!(harness.group.offloading_units(), 0, "a write-back frees no memory");
    harness.run_commands();
    assert_eq!(progress(&harness, 1), FlushProgress::default());
    assert_eq!(harness.free_units(), free);
    for key in ["a", "b", "c", "d"] {
        assert_eq!(media(&mut harness, key), [Medium::Memory, Medium::Disk], "{key}");
    }
    // A write-back is no use. The eviction only releases memory.
    assert_eq!(eviction_order(&mut harness), ["a", "c", "d", "b"]);
    let stats = harness.group.stats();
    assert_eq!((stats.offloads_started, stats.offloaded_objects, stats.demoted_objects), (4, 4, 4));
}

#[test]
fn flush_writes_most_valuable_objects_first() {
    let mut harness = disks(&[1]);
    for key in ["a", "b", "c", "d"] {
        harness.put(key, KIB);
    }
    for (key, pin) in [("soft", PinClass::Soft), ("hard", PinClass::Hard)] {
        let epoch = harness.start_full(key, KIB, &PutOptions::default(), pin, None).unwrap();
        harness.end(key, epoch).unwrap();
    }
    harness.put("e", KIB);
    harness.lookup("c", 0).unwrap();
    harness.lookup("a", 0).unwrap();
    flush(&mut harness, 1);
    assert_eq!(offloads(&harness), ["hard", "soft", "a", "c", "e", "d", "b"]);
}

#[test]
fn flush_keeps_limited_amount_in_flight() {
    let mut harness = disks(&[1]);
    // One node with more slots than may be in flight.
    harness.group.unmount(harness.now, NodeId(1), SegmentId(0), &mut vec![]).unwrap();
    for segment in 1..5 {
        harness.mount(1, segment, Term::ZERO, false);
    }
    let keys: Vec<String> = (0..300).map(|number| format!("k{number}")).collect();
    for key in &keys {
        harness.put(key, 1);
    }
    flush(&mut harness, 1);
    assert_eq!((offloads(&harness).len(), progress(&harness, 1).objects), (256, 300));
    harness.tick();
    assert_eq!(offloads(&harness).len(), 256, "no more before one is complete");
    let first = take_offload(&mut harness);
    harness.run_command(&first);
    assert_eq!((offloads(&harness).len(), progress(&harness, 1).objects), (256, 299));
    harness.run_commands();
    assert_eq!(progress(&harness, 1), FlushProgress::default());
    assert!(keys.iter().all(|key| media(&mut harness, key).contains(&Medium::Disk)));
}

#[test]
fn flush_scans_limited_slots_per_tick() {
    let mut harness = disks(&[1]);
    for key in ["a", "b", "c"] {
        harness.put(key, KIB);
    }
    harness.group.flush(NodeId(1), session(1, 0)).unwrap();
    let budget = TickBudget { flushed_slots: 10, ..TickBudget::default() };
    for tick in 0..10 {
        assert!(harness.commands.is_empty(), "order is not known before the end of the scan, tick {tick}");
        assert!(progress(&harness, 1).objects > 0, "tick {tick}");
        assert!(harness.group.tick(harness.now, &budget, &mut harness.effects), "tick {tick}");
        harness.settle();
    }
    assert!(!harness.group.tick(harness.now, &budget, &mut harness.effects));
    harness.settle();
    assert_eq!(offloads(&harness), ["c", "b", "a"]);
}

#[test]
fn flush_passes_over_objects_that_cannot_be_written() {
    let mut harness = with_disks(GroupConfig { admission: Admission::Accessed, ..config(1) }, &[1]);
    harness.put("unread", KIB);
    harness.put("read", KIB);
    harness.lookup("read", 0).unwrap();
    let options = PutOptions { digestless: true, ..PutOptions::default() };
    let epoch = harness.start_with("digestless", KIB, &options).unwrap();
    harness.end("digestless", epoch).unwrap();
    harness.lookup("digestless", 0).unwrap();
    flush(&mut harness, 1);
    assert_eq!(offloads(&harness), ["read"]);
    assert_eq!(progress(&harness, 1), FlushProgress { objects: 1, bytes: KIB, refused: 2 });
    assert_eq!(harness.group.stats().offloads_not_admitted, 0, "no victim");
    // A refusal is not repeated.
    let offload = take_offload(&mut harness);
    harness.respond(&offload, CommandOutcome::Refused(ErrorCode::TooLarge));
    harness.tick();
    assert_eq!((offloads(&harness).len(), progress(&harness, 1).objects), (0, 0));
    assert_eq!(progress(&harness, 1).refused, 3);
    assert_eq!(media(&mut harness, "read"), [Medium::Memory]);
}

#[test]
fn full_disk_ends_flush() {
    let mut harness = disks(&[1]);
    for number in 0..80 {
        harness.put(&format!("k{number}"), 1);
    }
    harness.group.flush(NodeId(1), session(1, 0)).unwrap();
    harness.group.disk_status(NodeId(1), session(1, 0), false);
    harness.tick();
    assert!(harness.commands.is_empty());
    assert_eq!(progress(&harness, 1), FlushProgress { objects: 0, bytes: 0, refused: 80 });
}

#[test]
fn write_back_times_out_and_late_completion_still_counts() {
    let mut harness = disks(&[1]);
    harness.put("k", KIB);
    flush(&mut harness, 1);
    let offload = take_offload(&mut harness);
    harness.advance(Duration::from_secs(59));
    harness.tick();
    assert_eq!(progress(&harness, 1).objects, 1);
    harness.advance(Duration::from_secs(2));
    harness.tick();
    assert_eq!(progress(&harness, 1), FlushProgress { objects: 0, bytes: 0, refused: 1 });
    assert!(harness.commands.is_empty(), "no second attempt");
    harness.write_to_disk(&offload).unwrap();
    harness.respond(&offload, CommandOutcome::Done);
    assert_eq!(media(&mut harness, "k"), [Medium::Memory, Medium::Disk]);
}

/// A node cancels commands that it did not begin for 30 s: with a low write rate, these are most of them.
#[test]
fn cancelled_write_back_is_repeated() {
    let mut stopping = disks(&[1]);
    stopping.put("k", KIB);
    flush(&mut stopping, 1);
    let mut running = eager(&[1]);
    running.put("k", KIB);
    running.tick();
    for mut harness in [stopping, running] {
        let offload = take_offload(&mut harness);
        harness.respond(&offload, CommandOutcome::Refused(ErrorCode::Cancelled));
        assert_eq!((harness.commands.len(), harness.group.stats().write_backs_skipped), (0, 0));
        harness.tick();
        assert_eq!(offloads(&harness), ["k"]);
        harness.run_commands();
        assert_eq!(media(&mut harness, "k"), [Medium::Memory, Medium::Disk]);
    }
}

#[test]
fn victim_that_is_written_back_needs_no_second_command() {
    let mut harness = under_pressure(&["k"]);
    flush(&mut harness, 1);
    let offload = take_offload(&mut harness);
    let report = harness.group.evict(harness.now, 0, 1, &mut harness.effects);
    harness.settle();
    assert_eq!((report.objects, harness.commands.len()), (1, 0));
    assert!(report.bytes > 0 && harness.group.offloading_units() > 0);
    harness.run_command(&offload);
    assert_eq!(media(&mut harness, "k"), [Medium::Disk], "a victim leaves memory");
    assert_eq!(harness.group.offloading_units(), 0);
}

#[test]
fn removal_during_write_back_waits_for_kill_and_record_is_dropped() {
    let mut harness = disks(&[1]);
    let epoch = harness.put("k", KIB);
    flush(&mut harness, 1);
    let offload = take_offload(&mut harness);
    assert_eq!(harness.remove("k", false), RemoveOutcome::Waiting);
    assert_eq!(progress(&harness, 1).objects, 0);
    let kill = harness.commands.pop_front().unwrap();
    assert_eq!((kill.kind, kill.epoch), (CommandKind::Kill, epoch));
    // The notice of a write that was faster is refused.
    let record = harness.on_disk("k", epoch);
    harness.notice(1, offload.session, &record, false).unwrap();
    harness.respond(&offload, CommandOutcome::Done);
    let drops = |command: &Routed| command.segment == SegmentId::DISK && command.id == id("k");
    assert!(harness.commands.iter().any(drops));
    assert!(harness.removed.is_empty());
    harness.respond(&kill, CommandOutcome::Accepted);
    assert_eq!(harness.removed, [(WaiterId(1), None)]);
    harness.run_commands();
    assert!(!harness.exists("k"));
}

/// The node would write the record after the object is gone, and a crash before the notice would bring it back.
#[test]
fn object_dropped_during_write_back_is_killed() {
    for timed_out in [false, true] {
        let mut harness = disks(&[1]);
        let epoch = harness.put("k", KIB);
        flush(&mut harness, 1);
        take_offload(&mut harness);
        if timed_out {
            harness.advance(Duration::from_secs(61));
            harness.tick();
        }
        harness.group.disk_status(NodeId(1), session(1, 0), false);
        // The write-back in flight is not needed for the eviction: the disk accepts nothing.
        let tenant = harness.tenant;
        harness.group.set_quota(tenant, moontide_meta::Quota { bytes_max: 0, objects_max: 1 });
        let started = harness.start("other", KIB);
        assert!(matches!(started, Ok(_) | Err(ErrorCode::NoSpace)), "{started:?}");
        assert!(!harness.exists("k"));
        let kills: Vec<_> = harness.commands.iter().filter(|c| c.kind == CommandKind::Kill).collect();
        assert_eq!(kills.iter().map(|kill| (kill.id, kill.epoch)).collect::<Vec<_>>(), [(id("k"), epoch)]);
    }
}

#[test]
fn flush_of_node_that_dies_ends() {
    let mut harness = disks(&[1, 2]);
    let options = PutOptions { replicas: 2, replicas_min: 2, ..PutOptions::default() };
    let epoch = harness.start_with("both", KIB, &options).unwrap();
    harness.end("both", epoch).unwrap();
    flush(&mut harness, 1);
    let offload = take_offload(&mut harness);
    assert_eq!(offload.node(), NodeId(1), "the node that stops has to write it");
    harness.group.node_lost(harness.now, NodeId(1), session(1, 0), &mut harness.effects);
    harness.tick();
    assert_eq!(harness.group.flush_progress(session(1, 0)), None);
    assert_eq!(harness.group.flush(NodeId(1), session(1, 0)), Err(ErrorCode::StaleSession));
    assert_eq!(media(&mut harness, "both"), [Medium::Memory]);
    // The object can be offloaded by the other node, also while the first write-back has not timed out.
    harness.commands.clear();
    harness.advance(Duration::from_secs(31));
    harness.tick();
    flush(&mut harness, 2);
    assert_eq!(take_offload(&mut harness).node(), NodeId(2));
}

#[test]
fn flushing_node_gets_no_new_objects() {
    let mut harness = disks(&[1, 2]);
    flush(&mut harness, 1);
    for number in 0..8 {
        let key = format!("k{number}");
        harness.put(&key, KIB);
        let detail = harness.group.query(harness.now, &lookup_key(&key)).unwrap();
        assert!(detail.locations.iter().all(|location| location.node == NodeId(2)), "{detail:?}");
    }
    assert_eq!(progress(&harness, 1), FlushProgress::default());
}

#[test]
fn put_that_completes_during_flush_is_written() {
    let mut harness = disks(&[1]);
    let epoch = harness.start("k", KIB).unwrap();
    flush(&mut harness, 1);
    assert_eq!(progress(&harness, 1), FlushProgress::default());
    harness.end("k", epoch).unwrap();
    assert_eq!(progress(&harness, 1).objects, 1);
    harness.tick();
    assert_eq!(offloads(&harness), ["k"]);
}

#[test]
fn flush_waits_for_inventory_of_disk() {
    let mut harness = GroupHarness::with(config(1));
    harness.mount(1, 0, Term::ZERO, false);
    harness.mount_disk(1, 0, true);
    harness.put("k", KIB);
    flush(&mut harness, 1);
    assert_eq!((harness.commands.len(), progress(&harness, 1).objects), (0, 1));
    harness.group.disk_recovered(NodeId(1), session(1, 0)).unwrap();
    harness.tick();
    assert_eq!(offloads(&harness), ["k"]);
}

#[test]
fn node_without_disk_has_nothing_to_flush() {
    let mut harness = GroupHarness::new(&[1]);
    harness.put("k", KIB);
    flush(&mut harness, 1);
    assert_eq!(progress(&harness, 1), FlushProgress::default());
    assert!(harness.commands.is_empty());
}

fn eager(nodes: &[u64]) -> GroupHarness {
    with_disks(GroupConfig { offload: OffloadTrigger::Put, ..config(1) }, nodes)
}

#[test]
fn put_trigger_writes_objects_in_order_of_puts() {
    let mut harness = eager(&[1]);
    for key in ["a", "b", "c"] {
        harness.put(key, KIB);
    }
    harness.lookup("a", 0).unwrap();
    assert_eq!(harness.group.write_back_backlog(), (3, 3 * KIB));
    harness.tick();
    assert_eq!(offloads(&harness), ["a", "b", "c"]);
    assert_eq!(harness.group.write_back_backlog(), (3, 3 * KIB), "a command is no write");
    harness.run_commands();
    assert_eq!(harness.group.write_back_backlog(), (0, 0));
    for key in ["a", "b", "c"] {
        assert_eq!(media(&mut harness, key), [Medium::Memory, Medium::Disk], "{key}");
    }
    assert_eq!(eviction_order(&mut harness), ["b", "c", "a"], "a write-back is no use");
    assert_eq!(harness.group.stats().write_backs_skipped, 0);
}

#[test]
fn put_trigger_leaves_refused_object_to_flush() {
    let mut harness = eager(&[1]);
    harness.put("refused", KIB);
    harness.tick();
    let offload = take_offload(&mut harness);
    harness.respond(&offload, CommandOutcome::Refused(ErrorCode::Busy));
    harness.tick();
    assert_eq!((harness.commands.len(), harness.group.write_back_backlog()), (0, (0, 0)));
    assert_eq!(harness.group.stats().write_backs_skipped, 1);
    flush(&mut harness, 1);
    assert_eq!(offloads(&harness), ["refused"]);
}

#[test]
fn put_trigger_counts_objects_beyond_queue() {
    let mut harness = eager(&[]);
    let spec = MountSpec { slots: 1 << 17, one_sided: false, ..memory(1, 1 << 18) };
    harness.group.mount(harness.now, &spec, &mut harness.effects).unwrap();
    harness.mount_disk(1, 0, false);
    let (queue, more) = (1 << 16, 10);
    let options = PutOptions::default();
    for number in 0..queue + more {
        let key = format!("k{number}");
        let put = PutStart {
            object: lookup_key(&key),
            tenant: harness.tenant,
            caller: 7,
            object_len: 1,
            attributes_len: 0,
            pin: PinClass::None,
            spread: None,
            disk_replicas: 0,
            expires: None,
            cohort: None,
            parent: None,
            options: &options,
        };
        let epoch = harness.group.put_start(harness.now, &put, &mut harness.effects).unwrap().object.epoch;
        let outcomes = &[None; 8];
        let end = PutEnd { id: id(&key), epoch, root: 77, outcomes, stripe_roots: &[], replaces: false };
        harness.group.put_end(harness.now, &end, &mut harness.effects).unwrap();
    }
    assert_eq!(harness.group.write_back_backlog(), (queue, queue));
    assert_eq!(harness.group.stats().write_backs_skipped, more);
}

#[test]
fn put_trigger_forgets_objects_that_are_gone_or_on_disk() {
    let mut harness = eager(&[1]);
    for key in ["removed", "evicted", "kept"] {
        harness.put(key, KIB);
    }
    assert_eq!(harness.remove("removed", false), RemoveOutcome::Waiting);
    harness.group.evict(harness.now, 0, 1, &mut harness.effects);
    harness.settle();
    assert_eq!(offloads(&harness), ["evicted"]);
    harness.tick();
    assert_eq!(offloads(&harness), ["evicted", "kept"]);
    harness.run_commands();
    assert_eq!(harness.group.write_back_backlog(), (0, 0));
}

#[test]
fn put_trigger_follows_admission_and_needs_disk() {
    let config = GroupConfig { offload: OffloadTrigger::Put, admission: Admission::Accessed, ..config(1) };
    let mut unread = with_disks(config, &[1]);
    unread.put("k", KIB);
    let mut without_disk =
        GroupHarness::with(GroupConfig { offload: OffloadTrigger::Put, ..common::config(1) });
    without_disk.mount(1, 0, Term::ZERO, false);
    without_disk.put("k", KIB);
    for mut harness in [unread, without_disk] {
        harness.tick();
        assert!(harness.commands.is_empty());
        assert_eq!(harness.group.write_back_backlog(), (0, 0));
        assert_eq!(harness.group.stats().write_backs_skipped, 0);
    }
}

/// A flush takes over what is in flight: its command may be lost with an earlier session.
#[test]
fn flush_commands_pending_write_back_again() {
    let mut harness = eager(&[1]);
    harness.put("k", KIB);
    harness.tick();
    harness.commands.clear();
    flush(&mut harness, 1);
    assert_eq!(offloads(&harness), ["k"]);
    assert_eq!(progress(&harness, 1).objects, 1);
    harness.run_commands();
    assert_eq!(progress(&harness, 1), FlushProgress::default());
}

#[test]
fn put_trigger_resumes_after_change_of_master() {
    let term = Term::new(2).unwrap();
    let mut harness = GroupHarness::with(GroupConfig { offload: OffloadTrigger::Put, ..config(2) });
    let reported = Epoch::new(Term::new(1).unwrap(), 9).unwrap();
    harness.mount(1, 0, Term::new(1).unwrap(), true);
    harness.mount_disk(1, 0, true);
    let extents = [Extent { start: 0, units: 3 }, Extent { start: 3, units: 3 }];
    let records: Vec<ReportRecord<'_>> = ["written", "unwritten"]
        .into_iter()
        .zip(extents)
        .zip(0..)
        .map(|((key, extent), slot)| {
            harness.names.insert(id(key), key.into());
            let payload_offset = extent.span().offset();
            ReportRecord { slot: SlotId(slot), extent, payload_offset, ..harness.on_disk(key, reported) }
        })
        .collect();
    let (now, name) = (harness.now, (NodeId(1), SegmentId(0)));
    harness.group.report(now, name, Generation(1), term, 0, records, &mut harness.effects).unwrap();
    harness.group.report_end(now, name, Generation(1), term, 2, &mut harness.effects).unwrap();
    harness.tick();
    assert!(harness.commands.is_empty(), "the objects may be on the disk");
    assert_eq!(harness.group.write_back_backlog(), (2, 2 * KIB));
    harness.notice(1, session(1, 0), &harness.on_disk("written", reported), true).unwrap();
    harness.group.disk_recovered(NodeId(1), session(1, 0)).unwrap();
    harness.tick();
    assert_eq!(offloads(&harness), ["unwritten"]);
    harness.run_commands();
    assert_eq!(harness.group.write_back_backlog(), (0, 0));
}

/// Beyond the limit of a disk, a node would put the victims of an eviction behind the write-backs.
#[test]
fn write_backs_beyond_the_limit_of_a_disk_go_to_that_of_another_replica() {
    let groups = NonZeroU16::new(64).unwrap();
    // 64 groups share the limits, which leaves 16 write-backs for each.
    let config = GroupConfig { offload: OffloadTrigger::Put, groups, ..config(1) };
    let mut harness = with_disks(config, &[1, 2]);
    let both =
        PutOptions { local_node: Some(NodeId(1)), replicas: 2, replicas_min: 2, ..PutOptions::default() };
    for number in 0..24 {
        let key = format!("{number}");
        let epoch = harness.start_with(&key, 1024, &both).unwrap();
        harness.end(&key, epoch).unwrap();
    }
    harness.tick();
    let of = |node: u64| {
        let is_write =
            |command: &&Routed| command.kind == CommandKind::Offload && command.node() == NodeId(node);
        harness.commands.iter().filter(is_write).count()
    };
    assert_eq!((of(1), of(2)), (16, 8));
}
