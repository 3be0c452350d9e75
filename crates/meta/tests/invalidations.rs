//! Invalidations: one test for each way in which an object leaves, and for changes that emit none.

mod common;

use std::time::Duration;

use common::{GroupHarness, config, id, lookup_key, memory, session};
use moontide_meta::{
    CommandOutcome, DrainMode, Effect, INVALIDATIONS_KEPT, Invalidations, JobKind, MountSpec, PutEnd,
    PutOptions, PutStart, ReportRecord, WaiterId,
};
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Extent, NodeId, ObjectId, SegmentId, SlotId, Tenant, Term};

const KIB: u64 = 1024;

/// A client that polls invalidations.
struct Watcher {
    next: u64,
}

impl Watcher {
    /// Starts to watch: earlier invalidations are in the gap.
    fn new(harness: &mut GroupHarness) -> Watcher {
        let response =
            harness.group.invalidations(harness.now, Tenant::DEFAULT, 0, usize::MAX).expect("feed is open");
        assert!(response.gap && response.ids.is_empty());
        Watcher { next: response.next }
    }

    /// Returns the invalidations since the last poll, and checks that there is no gap.
    fn poll(&mut self, harness: &mut GroupHarness) -> Vec<ObjectId> {
        let response = harness
            .group
            .invalidations(harness.now, Tenant::DEFAULT, self.next, usize::MAX)
            .expect("feed is open");
        assert!(!response.gap);
        self.next = response.next;
        response.ids
    }
}

fn upsert() -> PutOptions {
    PutOptions { upsert: true, ..PutOptions::default() }
}

/// Runs `action` and checks that exactly the `gone` keys are invalidated, once.
fn check(gone: &[&str], mut harness: GroupHarness, action: impl FnOnce(&mut GroupHarness)) {
    let mut watcher = Watcher::new(&mut harness);
    action(&mut harness);
    let mut expected: Vec<ObjectId> = gone.iter().map(|key| id(key)).collect();
    let mut response = watcher.poll(&mut harness);
    expected.sort();
    response.sort();
    assert_eq!(response, expected);
    for key in gone {
        assert!(!harness.exists(key), "{key} is readable");
    }
    harness.advance(Duration::from_secs(200));
    harness.tick();
    assert_eq!(watcher.poll(&mut harness), [], "duplicate invalidation");
}

fn with(keys: &[&str]) -> GroupHarness {
    let mut harness = GroupHarness::new(&[1, 2]);
    for key in keys {
        harness.put(key, KIB);
    }
    harness
}

/// Returns a node with a disk, and an object that is only there.
fn on_disk(key: &str) -> (GroupHarness, Epoch) {
    let mut harness = GroupHarness::new(&[1]);
    harness.mount_disk(1, 0, false);
    let epoch = harness.put(key, KIB);
    harness.group.evict(harness.now, 0, 1, &mut harness.effects);
    harness.settle();
    harness.run_commands();
    assert_eq!(harness.group.objects_on_disk(), 1);
    (harness, epoch)
}

#[test]
fn remove_emits_one_invalidation() {
    check(&["k"], with(&["k", "stays"]), |harness| {
        let _waits = harness.remove("k", false);
        harness.run_commands();
        let _not_found = harness.remove("k", false);
    });
}

#[test]
fn removal_job_emits_invalidations() {
    check(&["a/1", "a/2"], with(&["a/1", "a/2", "b/1"]), |harness| {
        harness.group.start_job(harness.tenant, JobKind::Prefix((*b"a/").into()), false).unwrap();
        harness.tick();
    });
    check(&["a", "b"], with(&["a", "b"]), |harness| {
        harness.group.start_job(harness.tenant, JobKind::All, true).unwrap();
        harness.tick();
    });
}

#[test]
fn eviction_without_disk_emits_invalidations() {
    check(&["a", "b"], with(&["a", "b"]), |harness| {
        harness.group.evict(harness.now, 0, 2, &mut harness.effects);
        harness.settle();
    });
}

#[test]
fn offload_and_promotion_emit_no_invalidation() {
    let (mut harness, _) = on_disk("k");
    let mut watcher = Watcher::new(&mut harness);
    for _ in 0..2 {
        harness.lookup("k", 0).unwrap();
    }
    harness.tick();
    harness.run_commands();
    assert_eq!(harness.group.objects_on_disk(), 0, "object was not promoted");
    harness.group.evict(harness.now, 0, 1, &mut harness.effects);
    harness.settle();
    harness.run_commands();
    assert_eq!(harness.group.objects_on_disk(), 1);
    assert_eq!(watcher.poll(&mut harness), []);
}

#[test]
fn disk_eviction_of_last_copy_emits_invalidation() {
    let (harness, epoch) = on_disk("k");
    check(&["k"], harness, |harness| {
        let name = (NodeId(1), session(1, 0));
        harness.group.disk_evicted(harness.now, name, id("k"), epoch, &mut harness.effects).unwrap();
        harness.settle();
    });
}

#[test]
fn expiry_emits_invalidation() {
    let mut harness = with(&["stays"]);
    let options = PutOptions { ttl_ms: 1000, ..PutOptions::default() };
    let epoch = harness.start_with("k", KIB, &options).unwrap();
    harness.end("k", epoch).unwrap();
    check(&["k"], harness, |harness| {
        harness.advance(Duration::from_secs(2));
        harness.tick();
    });
}

#[test]
fn node_loss_invalidates_only_objects_without_other_replica() {
    let mut harness = GroupHarness::new(&[1]);
    harness.put("k", KIB);
    harness.mount(2, 0, Term::ZERO, false);
    let twice = PutOptions { replicas: 2, replicas_min: 2, ..PutOptions::default() };
    let epoch = harness.start_with("twice", KIB, &twice).unwrap();
    harness.end("twice", epoch).unwrap();
    check(&["k"], harness, |harness| {
        harness.group.node_lost(harness.now, NodeId(1), session(1, 0), &mut harness.effects);
        harness.tick();
        assert!(harness.exists("twice"));
    });
}

#[test]
fn unmount_and_drain_emit_invalidations() {
    check(&["k"], GroupHarness::new(&[1]).with_object("k"), |harness| {
        harness.group.unmount(harness.now, NodeId(1), SegmentId(0), &mut harness.effects).unwrap();
        harness.tick();
    });
    check(&["k"], GroupHarness::new(&[1]).with_object("k"), |harness| {
        harness.group.drain(NodeId(1), SegmentId(0), DrainMode::Evict).unwrap();
        harness.tick();
    });
}

trait WithObject {
    fn with_object(self, key: &str) -> GroupHarness;
}

impl WithObject for GroupHarness {
    fn with_object(mut self, key: &str) -> GroupHarness {
        self.put(key, KIB);
        self
    }
}

#[test]
fn upsert_emits_no_invalidation() {
    check(&[], with(&["k"]), |harness| {
        let epoch = harness.start_with("k", KIB, &upsert()).unwrap();
        harness.run_commands();
        harness.end("k", epoch).unwrap();
        assert!(harness.exists("k"));
    });
}

#[test]
fn unfinished_upsert_emits_invalidation() {
    check(&["k"], with(&["k"]), |harness| {
        let epoch = harness.start_with("k", KIB, &upsert()).unwrap();
        harness.group.put_revoke(harness.now, id("k"), epoch, &mut harness.effects).unwrap();
        harness.settle();
    });
    check(&["k"], with(&["k"]), |harness| {
        // The same caller starts again, and lets the put time out.
        harness.start_with("k", KIB, &upsert()).unwrap();
        harness.start_with("k", KIB, &upsert()).unwrap();
        harness.advance(Duration::from_secs(31));
        harness.tick();
    });
    check(&["k"], with(&["k"]), |harness| {
        harness.start_with("k", KIB, &upsert()).unwrap();
        let _waits = harness.remove("k", true);
    });
}

#[test]
fn incomplete_put_emits_no_invalidation() {
    check(&[], with(&[]), |harness| {
        let epoch = harness.start("k", KIB).unwrap();
        harness.group.put_revoke(harness.now, id("k"), epoch, &mut harness.effects).unwrap();
        harness.settle();
        harness.start("k", KIB).unwrap();
        harness.advance(Duration::from_secs(31));
        harness.tick();
        let _not_found = harness.remove("k", true);
    });
}

#[test]
fn object_removed_twice_emits_two_invalidations() {
    let mut harness = with(&["k"]);
    let mut watcher = Watcher::new(&mut harness);
    for _ in 0..2 {
        let _waits = harness.remove("k", false);
        harness.run_commands();
        assert_eq!(watcher.poll(&mut harness), [id("k")]);
        harness.put("k", KIB);
    }
}

/// Returns the response to a watcher of another tenant than [`Tenant::DEFAULT`].
fn poll_as(harness: &mut GroupHarness, tenant: &str, since: u64) -> Invalidations {
    let tenant = Tenant::new(tenant).unwrap();
    harness.group.invalidations(harness.now, tenant, since, usize::MAX).expect("feed is open")
}

#[test]
fn watcher_receives_invalidations_of_its_tenant_only() {
    let mut harness = with(&["own"]);
    let (default, other) = (harness.tenant, harness.group.tenant(Tenant::new("other").unwrap()).unwrap());
    harness.tenant = other;
    for key in ["theirs/1", "theirs/2", "replaced"] {
        harness.put(key, KIB);
    }
    harness.tenant = default;
    let mut watcher = Watcher::new(&mut harness);
    let first = poll_as(&mut harness, "other", 0);
    assert!(first.gap && first.ids.is_empty());
    for key in ["theirs/1", "own", "theirs/2"] {
        let _waits = harness.remove(key, false);
    }
    harness.run_commands();
    // A replacement of the other tenant that is never written.
    harness.tenant = other;
    let epoch = harness.start_with("replaced", KIB, &upsert()).unwrap();
    harness.group.put_revoke(harness.now, id("replaced"), epoch, &mut harness.effects).unwrap();
    harness.settle();
    harness.tenant = default;
    assert_eq!(watcher.poll(&mut harness), [id("own")]);
    let theirs = poll_as(&mut harness, "other", first.next);
    let expected = ["theirs/1", "theirs/2", "replaced"].map(id);
    assert_eq!((theirs.ids, theirs.next, theirs.gap), (expected.to_vec(), first.next + 3, false));
    let new = poll_as(&mut harness, "new", 0);
    assert_eq!((new.next, new.gap), (1, true), "numbers tell nothing of other tenants");
}

#[test]
fn removals_of_other_tenants_cause_gap_only_for_watcher_that_lags() {
    let mut harness = with(&["k"]);
    let other = harness.group.tenant(Tenant::new("other").unwrap()).unwrap();
    let mut watcher = Watcher::new(&mut harness);
    let lagging = watcher.next;
    let _waits = harness.remove("k", false);
    harness.run_commands();
    assert_eq!(watcher.poll(&mut harness), [id("k")]);
    let default = std::mem::replace(&mut harness.tenant, other);
    harness.put("theirs", KIB);
    for _ in 0..INVALIDATIONS_KEPT {
        remove_and_put_again(&mut harness, "theirs");
    }
    harness.tenant = default;
    assert_eq!(watcher.poll(&mut harness), [], "the position of a tenant does not move");
    let late = harness.group.invalidations(harness.now, Tenant::DEFAULT, lagging, usize::MAX).unwrap();
    assert_eq!(late, Invalidations { ids: vec![], next: watcher.next, gap: true });
    harness.put("k", KIB);
    let _waits = harness.remove("k", false);
    assert_eq!(watcher.poll(&mut harness), [id("k")]);
}

#[test]
fn lagging_watcher_gets_gap_and_current_watcher_does_not() {
    let mut harness = with(&["k"]);
    let lagging = Watcher::new(&mut harness).next;
    let mut current = Watcher::new(&mut harness);
    for _ in 0..INVALIDATIONS_KEPT {
        remove_and_put_again(&mut harness, "k");
        assert_eq!(current.poll(&mut harness), [id("k")]);
    }
    let all = harness.group.invalidations(harness.now, Tenant::DEFAULT, lagging, usize::MAX).unwrap();
    assert_eq!((all.ids.len(), all.gap), (INVALIDATIONS_KEPT, false), "all kept invalidations are readable");
    let some = harness.group.invalidations(harness.now, Tenant::DEFAULT, lagging, 10).unwrap();
    assert_eq!((some.ids.len(), some.next, some.gap), (10, lagging + 10, false));
    let _waits = harness.remove("k", false);
    let late = harness.group.invalidations(harness.now, Tenant::DEFAULT, lagging, usize::MAX).unwrap();
    assert_eq!(late, Invalidations { ids: vec![], next: current.next + 1, gap: true });
    assert_eq!(current.poll(&mut harness), [id("k")]);
    let foreign =
        harness.group.invalidations(harness.now, Tenant::DEFAULT, current.next + 1, usize::MAX).unwrap();
    assert!(foreign.gap, "number was never assigned");
}

/// Removes an object and puts it again. Skips the audits between steps, which would take a minute for this many.
fn remove_and_put_again(harness: &mut GroupHarness, key: &str) {
    let _waits =
        harness.group.remove(harness.now, &lookup_key(key), false, WaiterId(1), &mut harness.effects);
    while let Some(effect) = harness.effects.pop() {
        let Effect::Command { session, command } = effect else { continue };
        let name = (NodeId(session.0 / 100), command.segment);
        let done = CommandOutcome::Done;
        harness.group.command_outcome(
            name,
            command.kind,
            command.slot,
            command.epoch,
            done,
            &mut harness.effects,
        );
    }
    let options = PutOptions::default();
    let put = PutStart {
        object: lookup_key(key),
        tenant: harness.tenant,
        caller: 7,
        object_len: KIB,
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
    let end = PutEnd { id: id(key), epoch, root: 77, outcomes: &[None], stripe_roots: &[], replaces: false };
    harness.group.put_end(harness.now, &end, &mut harness.effects).unwrap();
}

/// Mounts a node of the preceding term and reports its one object.
fn report_from_preceding_term(harness: &mut GroupHarness, key: &'static str) {
    let (now, term) = (harness.now, harness.group.config().term);
    let before = Term::new(term.get() - 1).unwrap();
    let spec = MountSpec { session: session(1, 1), term: before, has_records: true, ..memory(1, 1000) };
    harness.group.mount(now, &spec, &mut harness.effects).unwrap();
    let extent = Extent { start: 0, units: 3 };
    let record = ReportRecord {
        slot: SlotId(0),
        extent,
        payload_offset: extent.span().offset(),
        ..harness.on_disk(key, Epoch::new(before, 9).unwrap())
    };
    let name = (spec.node, spec.segment);
    harness.group.report(now, name, spec.generation, term, 0, [record], &mut harness.effects).unwrap();
    harness.group.report_end(now, name, spec.generation, term, 1, &mut harness.effects).unwrap();
    harness.settle();
}

#[test]
fn new_master_withholds_invalidations_while_nodes_may_report() {
    let mut harness = GroupHarness::with(config(2));
    assert_eq!(harness.group.invalidations(harness.now, Tenant::DEFAULT, 0, 1), None);
    harness.advance(Duration::from_secs(20));
    report_from_preceding_term(&mut harness, "k");
    harness.tick();
    assert_eq!(
        harness.group.invalidations(harness.now, Tenant::DEFAULT, 0, 1),
        None,
        "another node may report"
    );
    assert_eq!(harness.group.open_invalidation_count(), 0);
    harness.advance(Duration::from_secs(11));
    harness.tick();
    assert!(harness.group.open_invalidation_count() > 0, "feed did not open");
    let response = harness.group.invalidations(harness.now, Tenant::DEFAULT, 40, 1).unwrap();
    assert!(response.gap && harness.exists("k"), "{response:?}");
}

#[test]
fn invalidations_are_withheld_while_handoff_is_used() {
    let first = with(&["k", "lost"]);
    let handoff = first.group.export_handoff(first.now, 100);
    let mut harness = GroupHarness::with(config(2));
    harness.group.import_handoff(harness.now, handoff);
    assert!(harness.exists("lost"));
    assert_eq!(harness.group.invalidations(harness.now, Tenant::DEFAULT, 0, 1), None);
    harness.advance(Duration::from_secs(29));
    harness.tick();
    assert!(harness.exists("lost"), "handoff is still in use");
    assert_eq!(harness.group.invalidations(harness.now, Tenant::DEFAULT, 0, 1), None);
    harness.advance(Duration::from_secs(2));
    harness.tick();
    assert!(!harness.exists("lost"));
    assert!(harness.group.invalidations(harness.now, Tenant::DEFAULT, 0, 1).unwrap().gap);
}

#[test]
fn rejected_upsert_keeps_object_and_emits_no_invalidation() {
    check(&[], with(&["k"]), |harness| {
        let huge = harness.start_with("k", 1 << 30, &upsert());
        assert!(matches!(huge, Err(ErrorCode::NoSpace | ErrorCode::TooLarge)), "{huge:?}");
        assert!(harness.exists("k"));
    });
}
