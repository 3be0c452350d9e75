//! Objects of several stripes on disks, and the return of single stripes.

mod common;

use std::time::Duration;

use common::{
    GroupHarness, config, disks, end_disk_report, evict, id, lookup_key, lose_node, return_node, session,
};
use moontide_meta::{
    CommandKind, CommandOutcome, PutEnd, PutOptions, RemoveOutcome, ReportRecord, StripeRange,
};
use moontide_types::record::object_root;
use moontide_types::{Epoch, ErrorCode, Extent, Medium, NodeId, SegmentId, Term};

const KIB: u64 = 1024;
const STRIPE: u64 = 256 * KIB;
const ROOTS: [u64; 2] = [11, 22];

fn put_striped(harness: &mut GroupHarness) -> Epoch {
    let options = PutOptions { stripes: Some(2), ..PutOptions::default() };
    let epoch = harness.start_with("s", 2 * STRIPE, &options).unwrap();
    let root = object_root(id("s"), epoch, 2 * STRIPE, &ROOTS);
    let end = PutEnd { id: id("s"), epoch, root, outcomes: &[None], stripe_roots: &ROOTS, replaces: false };
    harness.group.put_end(harness.now, &end, &mut harness.effects).unwrap();
    harness.settle();
    epoch
}

fn stripe<'a>(harness: &GroupHarness, epoch: Epoch, index: u16) -> ReportRecord<'a> {
    ReportRecord {
        object_len: 2 * STRIPE,
        stripe: StripeRange { index, count: 2, offset: u64::from(index) * STRIPE, len: STRIPE },
        root: ROOTS[usize::from(index)],
        ..harness.on_disk("s", epoch)
    }
}

fn media(harness: &GroupHarness) -> Vec<Medium> {
    let detail = harness.group.query(harness.now, &lookup_key("s"));
    detail.map_or(vec![], |detail| detail.locations.iter().map(|location| location.medium).collect())
}

#[test]
fn striped_object_is_demoted_after_all_stripes_are_on_disk() {
    use Medium::{Disk, Memory};
    let mut harness = disks(&[1, 2]);
    let all = harness.free_units();
    put_striped(&mut harness);
    evict(&mut harness, 1);
    let offloads: Vec<_> = harness.commands.drain(..).collect();
    assert_eq!(offloads.len(), 2);
    assert_ne!(offloads[0].session, offloads[1].session);
    harness.write_to_disk(&offloads[0]).unwrap();
    assert_eq!(
        media(&harness).iter().filter(|&&medium| medium == Memory).count(),
        2,
        "not demoted before both are on disk"
    );
    harness.write_to_disk(&offloads[1]).unwrap();
    assert_eq!(media(&harness), [Disk, Disk]);
    harness.run_commands();
    assert_eq!(harness.free_units(), all);
    // Back into memory, stripe by stripe: a lookup returns the memory location of each stripe if there is one.
    harness.group.prefetch(harness.now, &lookup_key("s")).unwrap();
    harness.tick();
    let promotions: Vec<_> = harness.commands.drain(..).collect();
    assert_eq!(promotions.len(), 2);
    harness.respond(&promotions[1], CommandOutcome::Done);
    let mut seen = vec![];
    harness.group.lookup(harness.now, 0, &[lookup_key("s")], |_, found| {
        seen = found
            .unwrap()
            .locations
            .iter()
            .map(|location| (location.medium, location.stripe.index))
            .collect();
    });
    let medium_of = |in_memory: bool| if in_memory { Memory } else { Disk };
    let CommandKind::Promote { stripe: second, .. } = promotions[1].kind else { panic!("{promotions:?}") };
    assert_eq!(seen, [(medium_of(second == 0), 0), (medium_of(second == 1), 1)]);
    harness.respond(&promotions[0], CommandOutcome::Done);
    assert_eq!(media(&harness).len(), 4);
    evict(&mut harness, 1);
    harness.run_commands();
    assert_eq!((media(&harness), harness.free_units()), (vec![Disk, Disk], all));
}

#[test]
fn partial_offload_keeps_memory_and_retries_missing_stripe() {
    let mut harness = disks(&[1, 2]);
    put_striped(&mut harness);
    evict(&mut harness, 1);
    let offloads: Vec<_> = harness.commands.drain(..).collect();
    harness.write_to_disk(&offloads[0]).unwrap();
    harness.respond(&offloads[1], CommandOutcome::Refused(ErrorCode::Busy));
    assert_eq!(harness.group.offloading_units(), 0);
    assert!(harness.exists("s") && media(&harness).len() == 3);
    evict(&mut harness, 1);
    assert_eq!(harness.commands.len(), 1, "only the missing stripe is written");
    assert_eq!(harness.commands[0].slot, offloads[1].slot);
    harness.run_commands();
    assert_eq!(media(&harness), [Medium::Disk, Medium::Disk]);
}

/// Returns a master that knows the first stripe of an object, from the disk of node 1, and the second one, which is on the disk
/// of node 2.
fn new_master_with_first_stripe() -> (GroupHarness, Epoch, ReportRecord<'static>) {
    let mut harness = GroupHarness::with(config(2));
    let epoch = Epoch::new(Term::new(1).unwrap(), 5).unwrap();
    return_node(&mut harness, 1, 0);
    return_node(&mut harness, 2, 0);
    let [first, second] = [0, 1].map(|index| stripe(&harness, epoch, index));
    harness.notice(1, session(1, 0), &first, true).unwrap();
    (harness, epoch, second)
}

#[test]
fn new_master_recovers_striped_object_from_disks() {
    let (mut harness, epoch, second) = new_master_with_first_stripe();
    assert!(!harness.exists("s"));
    harness.notice(2, session(2, 0), &second, true).unwrap();
    assert_eq!(harness.lookup("s", 0), Ok((epoch, 1)));
    // One disk evicts its stripe: the other stripe is of no use.
    let name = (NodeId(1), session(1, 0));
    harness.group.disk_evicted(harness.now, name, id("s"), epoch, &mut harness.effects).unwrap();
    harness.settle();
    assert!(!harness.exists("s"));
    harness.run_commands();
    assert_eq!(harness.group.objects(), 0);
}

/// Failure: a lookup returned a stripe that was no longer on its disk. Cause: it was evicted before the other stripe
/// was reported, and the eviction ignored incomplete objects. Fix: it handles them.
#[test]
fn stripe_evicted_before_recovery_completes_is_not_served() {
    let (mut harness, epoch, second) = new_master_with_first_stripe();
    let name = (NodeId(1), session(1, 0));
    harness.group.disk_evicted(harness.now, name, id("s"), epoch, &mut harness.effects).unwrap();
    harness.settle();
    harness.notice(2, session(2, 0), &second, true).unwrap();
    assert!(!harness.exists("s"));
}

/// An object with one stripe on the disk of each node, and the node of its first stripe.
fn put_on_two_disks(harness: &mut GroupHarness) -> (Epoch, u64) {
    let epoch = put_striped(harness);
    evict(harness, 1);
    harness.run_commands();
    harness.run_commands();
    let detail = harness.group.query(harness.now, &lookup_key("s")).unwrap();
    assert_eq!(media(harness), [Medium::Disk, Medium::Disk]);
    assert_ne!(detail.locations[0].node, detail.locations[1].node);
    (epoch, detail.locations[0].node.0)
}

fn is_in_index(harness: &GroupHarness) -> bool {
    harness.group.objects() == 1
}

/// The end of the version that [`put_striped`] began.
fn end_of(epoch: Epoch) -> PutEnd<'static> {
    let root = object_root(id("s"), epoch, 2 * STRIPE, &ROOTS);
    PutEnd { id: id("s"), epoch, root, outcomes: &[None], stripe_roots: &ROOTS, replaces: false }
}

#[test]
fn striped_object_returns_with_disk_of_restarted_node() {
    let mut harness = disks(&[1, 2]);
    let (epoch, node) = put_on_two_disks(&mut harness);
    lose_node(&mut harness, node, 0);
    assert!(!harness.exists("s") && is_in_index(&harness));
    assert!(harness.commands.is_empty(), "the other stripe stays where it is: {:?}", harness.commands);
    assert_eq!(harness.group.put_end(harness.now, &end_of(epoch), &mut vec![]), Ok(()), "a repeated call");
    return_node(&mut harness, node, 1);
    let first = stripe(&harness, epoch, 0);
    harness.notice(node, session(node, 1), &first, true).unwrap();
    assert_eq!(harness.lookup("s", 0), Ok((epoch, 1)));
    end_disk_report(&mut harness, node, 1);
    harness.tick();
    assert_eq!((harness.lookup("s", 0), media(&harness)), (Ok((epoch, 1)), vec![Medium::Disk, Medium::Disk]));
    // It can be lost and found again.
    lose_node(&mut harness, node, 1);
    return_node(&mut harness, node, 2);
    harness.notice(node, session(node, 2), &first, true).unwrap();
    assert!(harness.exists("s"));
}

#[test]
fn stripe_of_other_bytes_does_not_complete_object() {
    let mut harness = disks(&[1, 2]);
    let (epoch, node) = put_on_two_disks(&mut harness);
    lose_node(&mut harness, node, 0);
    return_node(&mut harness, node, 1);
    let other = ReportRecord { root: 99, ..stripe(&harness, epoch, 0) };
    harness.notice(node, session(node, 1), &other, true).unwrap();
    assert!(!harness.exists("s"));
}

#[test]
fn object_is_dropped_when_its_stripes_do_not_return() {
    let mut harness = disks(&[1, 2]);
    let (_, node) = put_on_two_disks(&mut harness);
    lose_node(&mut harness, node, 0);
    // The node is back without the stripe.
    return_node(&mut harness, node, 1);
    harness.advance(harness.group.config().reservation + Duration::from_secs(1));
    harness.tick();
    assert!(is_in_index(&harness), "the disk is still reporting");
    end_disk_report(&mut harness, node, 1);
    harness.tick();
    assert!(!is_in_index(&harness));
    let reclaimed: Vec<_> = harness.commands.iter().map(|command| (command.kind, command.segment)).collect();
    assert_eq!(reclaimed, [(CommandKind::Reclaim, SegmentId::DISK)], "the other stripe");
    assert_eq!(harness.group.stats().lost_objects, 1);
}

#[test]
fn put_replaces_object_with_missing_stripes() {
    let mut harness = disks(&[1, 2]);
    let (old, node) = put_on_two_disks(&mut harness);
    lose_node(&mut harness, node, 0);
    let other = PutOptions { local_node: Some(NodeId(3 - node)), ..PutOptions::default() };
    let epoch = harness.start_with("s", KIB, &other).expect("readers do not find the old version");
    harness.run_commands();
    harness.end("s", epoch).unwrap();
    return_node(&mut harness, node, 1);
    let first = stripe(&harness, old, 0);
    harness.notice(node, session(node, 1), &first, true).unwrap();
    assert_eq!(harness.lookup("s", 0).map(|found| found.0), Ok(epoch));
    assert!(harness.commands.iter().any(|command| command.epoch == old && command.id == id("s")));
}

#[test]
fn removed_object_with_missing_stripes_does_not_return() {
    let mut harness = disks(&[1, 2]);
    let (epoch, node) = put_on_two_disks(&mut harness);
    lose_node(&mut harness, node, 0);
    assert_eq!(harness.remove("s", false), RemoveOutcome::Waiting, "the other stripe must be killed");
    harness.run_commands();
    assert_eq!(harness.removed.last().map(|removed| removed.1), Some(Some(ErrorCode::Pending)));
    return_node(&mut harness, node, 1);
    let first = stripe(&harness, epoch, 0);
    harness.notice(node, session(node, 1), &first, true).unwrap();
    assert!(!harness.exists("s") && !is_in_index(&harness));
}

#[test]
fn new_master_waits_for_stripes_of_late_node() {
    let mut harness = GroupHarness::with(config(2));
    let epoch = Epoch::new(Term::new(1).unwrap(), 5).unwrap();
    return_node(&mut harness, 1, 0);
    let halves = [stripe(&harness, epoch, 0), stripe(&harness, epoch, 1)];
    harness.notice(1, session(1, 0), &halves[0], true).unwrap();
    end_disk_report(&mut harness, 1, 0);
    // Longer than the time that a put may take.
    harness.advance(2 * harness.group.config().reservation);
    harness.tick();
    assert!(!harness.exists("s") && is_in_index(&harness));
    assert_eq!(harness.group.put_end(harness.now, &end_of(epoch), &mut vec![]), Err(ErrorCode::Retry));
    return_node(&mut harness, 2, 0);
    harness.notice(2, session(2, 0), &halves[1], true).unwrap();
    assert_eq!(harness.lookup("s", 0), Ok((epoch, 1)));
    let root = harness.group.query(harness.now, &lookup_key("s")).unwrap().root;
    assert_eq!(root, end_of(epoch).root);
    assert_eq!(harness.group.put_end(harness.now, &end_of(epoch), &mut vec![]), Ok(()));
}

/// A version is written to a disk only when it is complete: then its predecessor was replaced.
#[test]
fn stripe_on_disk_replaces_older_version() {
    let mut harness = GroupHarness::with(config(2));
    let [old, new] = [5, 6].map(|sequence| Epoch::new(Term::new(1).unwrap(), sequence).unwrap());
    return_node(&mut harness, 1, 0);
    return_node(&mut harness, 2, 0);
    let older = harness.on_disk("s", old);
    harness.notice(1, session(1, 0), &older, true).unwrap();
    assert_eq!(harness.lookup("s", 0), Ok((old, 1)));
    let halves = [stripe(&harness, new, 0), stripe(&harness, new, 1)];
    harness.notice(2, session(2, 0), &halves[0], true).unwrap();
    assert!(!harness.exists("s"), "the older version was replaced");
    harness.notice(1, session(1, 0), &halves[1], true).unwrap();
    assert_eq!(harness.lookup("s", 0), Ok((new, 1)));
}

/// Failure: a put was lost with its master. Cause: the lone stripe of the version that it had replaced counted as complete.
#[test]
fn lone_stripe_of_replaced_version_does_not_displace_newer_one() {
    let [old, new] = [5, 6].map(|sequence| Epoch::new(Term::new(1).unwrap(), sequence).unwrap());
    for disk_first in [true, false] {
        let mut harness = GroupHarness::with(config(2));
        return_node(&mut harness, 1, 0);
        for node in [2, 3] {
            harness.mount_in(node, 0, 0, Term::ZERO, true);
        }
        let on_disk = stripe(&harness, old, 0);
        let in_memory = [0, 1].map(|index| {
            let extent = Extent { start: 0, units: (STRIPE / 512) as u32 + 10 };
            let payload_offset = extent.span().offset();
            ReportRecord { extent, payload_offset, ..stripe(&harness, new, index) }
        });
        let report = |harness: &mut GroupHarness, node: u64, index: usize| {
            let name = (NodeId(node), SegmentId(0));
            let generation = harness.group.find_segment(name.0, name.1).unwrap().generation;
            let (now, term) = (harness.now, harness.group.config().term);
            let records = [in_memory[index]];
            harness.group.report(now, name, generation, term, 0, records, &mut harness.effects).unwrap();
            harness.settle();
        };
        if disk_first {
            harness.notice(1, session(1, 0), &on_disk, true).unwrap();
            report(&mut harness, 2, 0);
        } else {
            report(&mut harness, 2, 0);
            harness.notice(1, session(1, 0), &on_disk, true).unwrap();
        }
        report(&mut harness, 3, 1);
        assert_eq!(harness.lookup("s", 0).map(|found| found.0), Ok(new), "disk first: {disk_first}");
    }
}

/// Returns an object with both stripes in memory and on disk, after the node of the first stripe has left. The second result
/// is that node.
fn put_in_memory_and_on_disks(harness: &mut GroupHarness) -> (Epoch, u64) {
    let epoch = put_striped(harness);
    evict(harness, 1);
    let offloads: Vec<_> = harness.commands.drain(..).collect();
    // A read in the meantime keeps it in memory.
    harness.lookup("s", 0).unwrap();
    for offload in &offloads {
        harness.write_to_disk(offload).unwrap();
    }
    assert_eq!(media(harness).len(), 4);
    let detail = harness.group.query(harness.now, &lookup_key("s")).unwrap();
    let is_first = |location: &&moontide_meta::StripeLocation| location.stripe.index == 0;
    let node = detail.locations.iter().find(is_first).unwrap().node.0;
    lose_node(harness, node, 0);
    assert!(!harness.exists("s") && is_in_index(harness));
    (epoch, node)
}

fn return_first_stripe(harness: &mut GroupHarness, epoch: Epoch, node: u64) {
    return_node(harness, node, 1);
    let first = stripe(harness, epoch, 0);
    harness.notice(node, session(node, 1), &first, true).unwrap();
}

#[test]
fn eviction_of_object_with_missing_stripes_keeps_its_stripes_on_disk() {
    let mut harness = disks(&[1, 2]);
    let (epoch, node) = put_in_memory_and_on_disks(&mut harness);
    evict(&mut harness, 1);
    harness.run_commands();
    assert!(is_in_index(&harness));
    return_first_stripe(&mut harness, epoch, node);
    assert_eq!(harness.lookup("s", 0), Ok((epoch, 1)));
    assert_eq!(media(&harness), [Medium::Disk, Medium::Disk]);
}

#[test]
fn object_with_missing_stripes_survives_loss_of_second_copy_of_present_stripe() {
    let mut harness = disks(&[1, 2]);
    let (epoch, node) = put_in_memory_and_on_disks(&mut harness);
    let other = 3 - node;
    let name = (NodeId(other), session(other, 0));
    harness.group.disk_evicted(harness.now, name, id("s"), epoch, &mut harness.effects).unwrap();
    harness.settle();
    assert!(is_in_index(&harness), "the stripe is in memory");
    return_first_stripe(&mut harness, epoch, node);
    assert_eq!(harness.lookup("s", 0), Ok((epoch, 1)));
}

#[test]
fn wait_for_stripes_ends_while_disk_still_reports() {
    let mut harness = disks(&[1, 2]);
    let (_, node) = put_on_two_disks(&mut harness);
    lose_node(&mut harness, node, 0);
    return_node(&mut harness, node, 1);
    let (window, put) = (harness.group.config().disk_rejoin_window, harness.group.config().reservation);
    harness.advance(window);
    harness.tick();
    assert!(is_in_index(&harness), "the disk reports");
    harness.advance(put + Duration::from_secs(1));
    harness.tick();
    assert!(!is_in_index(&harness));
}

#[test]
fn returned_stripe_is_promoted_beside_stripes_in_memory() {
    let mut harness = disks(&[1, 2]);
    let (epoch, node) = put_in_memory_and_on_disks(&mut harness);
    return_first_stripe(&mut harness, epoch, node);
    end_disk_report(&mut harness, node, 1);
    harness.run_commands();
    assert_eq!(media(&harness).iter().filter(|&&medium| medium == Medium::Memory).count(), 1);
    // The first read marks it, the second one promotes it.
    harness.lookup("s", 0).unwrap();
    harness.lookup("s", 0).unwrap();
    harness.tick();
    let promoted: Vec<_> = harness.commands.iter().map(|command| command.kind).collect();
    assert!(matches!(promoted[..], [CommandKind::Promote { stripe: 0, .. }]), "{promoted:?}");
    harness.run_commands();
    assert_eq!(media(&harness).iter().filter(|&&medium| medium == Medium::Memory).count(), 2);
}

#[test]
fn stripe_that_was_in_memory_before_orderly_stop_returns_to_memory() {
    let mut harness = disks(&[1, 2]);
    let (epoch, node) = put_in_memory_and_on_disks(&mut harness);
    return_node(&mut harness, node, 1);
    let first = ReportRecord { touched: true, ..stripe(&harness, epoch, 0) };
    harness.notice(node, session(node, 1), &first, true).unwrap();
    end_disk_report(&mut harness, node, 1);
    harness.tick();
    assert!(
        harness.commands.iter().any(|command| matches!(command.kind, CommandKind::Promote { stripe: 0, .. }))
    );
}
