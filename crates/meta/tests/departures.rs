//! What those who watch are told: one test for each way in which an object leaves, and for what is no departure.

mod common;

use std::time::Duration;

use common::{Bench, ask, config, id, session};
use moontide_meta::{
    DEPARTURES_KEPT, Departures, Effect, JobKind, Medium, MountSpec, OrderOutcome, PutEnd, PutOptions,
    PutStart, ReportRecord, Waiter,
};
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Extent, Generation, NodeId, ObjectId, SegmentId, SlotId, Term};

const KIB: u64 = 1024;

/// Somebody who watches.
struct Watcher {
    next: u64,
}

impl Watcher {
    /// Begins: what was before is in the gap.
    fn new(bench: &mut Bench) -> Watcher {
        let told = bench.group.departures(bench.now, 0, usize::MAX).expect("all is known");
        assert!(told.gap && told.ids.is_empty());
        Watcher { next: told.next }
    }

    /// What has left since, without a gap.
    fn told(&mut self, bench: &mut Bench) -> Vec<ObjectId> {
        let told = bench.group.departures(bench.now, self.next, usize::MAX).expect("it told before");
        assert!(!told.gap);
        self.next = told.next;
        told.ids
    }
}

fn upsert() -> PutOptions {
    PutOptions { upsert: true, ..PutOptions::default() }
}

/// Puts `gone` and `stays`, lets something happen, and sees what is told.
fn check(gone: &[&str], mut bench: Bench, happens: impl FnOnce(&mut Bench)) {
    let mut watcher = Watcher::new(&mut bench);
    happens(&mut bench);
    let mut expected: Vec<ObjectId> = gone.iter().map(|key| id(key)).collect();
    let mut told = watcher.told(&mut bench);
    expected.sort();
    told.sort();
    assert_eq!(told, expected);
    for key in gone {
        assert!(!bench.has(key), "{key} can be read");
    }
    bench.advance(Duration::from_secs(200));
    bench.tick();
    assert_eq!(watcher.told(&mut bench), [], "nothing is told twice");
}

fn with(keys: &[&str]) -> Bench {
    let mut bench = Bench::new(&[1, 2]);
    for key in keys {
        bench.put(key, KIB);
    }
    bench
}

/// A node with a disk, and an object that is nowhere else.
fn on_disk(key: &str) -> (Bench, Epoch) {
    let mut bench = Bench::new(&[1]);
    bench.mount_disk(1, 0, false);
    let epoch = bench.put(key, KIB);
    bench.group.evict(bench.now, 0, 1, &mut bench.effects);
    bench.settle();
    bench.obey();
    assert_eq!(bench.group.objects_on_disk(), 1);
    (bench, epoch)
}

#[test]
fn what_is_removed_leaves() {
    check(&["k"], with(&["k", "stays"]), |bench| {
        let _waits = bench.remove("k", false);
        bench.obey();
        let _not_found = bench.remove("k", false);
    });
}

#[test]
fn what_a_job_removes_leaves() {
    check(&["a/1", "a/2"], with(&["a/1", "a/2", "b/1"]), |bench| {
        bench.group.start_job(bench.tenant, JobKind::Prefix((*b"a/").into()), false).unwrap();
        bench.tick();
    });
    check(&["a", "b"], with(&["a", "b"]), |bench| {
        bench.group.start_job(bench.tenant, JobKind::All, true).unwrap();
        bench.tick();
    });
}

#[test]
fn what_is_evicted_without_a_disk_leaves() {
    check(&["a", "b"], with(&["a", "b"]), |bench| {
        bench.group.evict(bench.now, 0, 2, &mut bench.effects);
        bench.settle();
    });
}

#[test]
fn what_goes_to_disk_and_back_has_not_left() {
    let (mut bench, _) = on_disk("k");
    let mut watcher = Watcher::new(&mut bench);
    for _ in 0..2 {
        bench.look("k", 0).unwrap();
    }
    bench.tick();
    bench.obey();
    assert_eq!(bench.group.objects_on_disk(), 0, "it is in memory again");
    bench.group.evict(bench.now, 0, 1, &mut bench.effects);
    bench.settle();
    bench.obey();
    assert_eq!(bench.group.objects_on_disk(), 1);
    assert_eq!(watcher.told(&mut bench), []);
}

#[test]
fn what_leaves_a_disk_and_is_nowhere_else_leaves() {
    let (bench, epoch) = on_disk("k");
    check(&["k"], bench, |bench| {
        let name = (NodeId(1), session(1, 0));
        bench.group.disk_evicted(bench.now, name, id("k"), epoch, &mut bench.effects).unwrap();
        bench.settle();
    });
}

#[test]
fn what_expires_leaves() {
    let mut bench = with(&["stays"]);
    let options = PutOptions { ttl_ms: 1000, ..PutOptions::default() };
    let epoch = bench.start_with("k", KIB, &options).unwrap();
    bench.end("k", epoch).unwrap();
    check(&["k"], bench, |bench| {
        bench.advance(Duration::from_secs(2));
        bench.tick();
    });
}

#[test]
fn what_is_lost_with_its_node_leaves_and_a_replica_is_enough_to_stay() {
    let mut bench = Bench::new(&[1]);
    bench.put("k", KIB);
    bench.mount(2, 0, Term::ZERO, false);
    let twice = PutOptions { replicas: 2, replicas_min: 2, ..PutOptions::default() };
    let epoch = bench.start_with("twice", KIB, &twice).unwrap();
    bench.end("twice", epoch).unwrap();
    check(&["k"], bench, |bench| {
        bench.group.node_lost(bench.now, NodeId(1), session(1, 0), &mut bench.effects);
        bench.tick();
        assert!(bench.has("twice"));
    });
}

#[test]
fn what_is_in_a_segment_that_is_unmounted_or_drained_leaves() {
    check(&["k"], Bench::new(&[1]).putting("k"), |bench| {
        bench.group.unmount(bench.now, NodeId(1), SegmentId(0), &mut bench.effects).unwrap();
        bench.tick();
    });
    check(&["k"], Bench::new(&[1]).putting("k"), |bench| {
        bench.group.drain(NodeId(1), SegmentId(0), true).unwrap();
        bench.tick();
    });
}

trait Putting {
    fn putting(self, key: &str) -> Bench;
}

impl Putting for Bench {
    fn putting(mut self, key: &str) -> Bench {
        self.put(key, KIB);
        self
    }
}

#[test]
fn what_is_replaced_has_not_left() {
    check(&[], with(&["k"]), |bench| {
        let epoch = bench.start_with("k", KIB, &upsert()).unwrap();
        bench.obey();
        bench.end("k", epoch).unwrap();
        assert!(bench.has("k"));
    });
}

#[test]
fn what_was_to_be_replaced_and_never_was_leaves() {
    check(&["k"], with(&["k"]), |bench| {
        let epoch = bench.start_with("k", KIB, &upsert()).unwrap();
        bench.group.put_revoke(bench.now, id("k"), epoch, &mut bench.effects).unwrap();
        bench.settle();
    });
    check(&["k"], with(&["k"]), |bench| {
        // The same caller begins again, and gives up.
        bench.start_with("k", KIB, &upsert()).unwrap();
        bench.start_with("k", KIB, &upsert()).unwrap();
        bench.advance(Duration::from_secs(31));
        bench.tick();
    });
    check(&["k"], with(&["k"]), |bench| {
        bench.start_with("k", KIB, &upsert()).unwrap();
        let _waits = bench.remove("k", true);
    });
}

#[test]
fn what_never_was_complete_does_not_leave() {
    check(&[], with(&[]), |bench| {
        let epoch = bench.start("k", KIB).unwrap();
        bench.group.put_revoke(bench.now, id("k"), epoch, &mut bench.effects).unwrap();
        bench.settle();
        bench.start("k", KIB).unwrap();
        bench.advance(Duration::from_secs(31));
        bench.tick();
        let _not_found = bench.remove("k", true);
    });
}

#[test]
fn what_comes_back_and_goes_again_leaves_twice() {
    let mut bench = with(&["k"]);
    let mut watcher = Watcher::new(&mut bench);
    for _ in 0..2 {
        let _waits = bench.remove("k", false);
        bench.obey();
        assert_eq!(watcher.told(&mut bench), [id("k")]);
        bench.put("k", KIB);
    }
}

#[test]
fn who_lags_is_told_of_a_gap_and_others_are_not() {
    let mut bench = with(&["k"]);
    let lags = Watcher::new(&mut bench).next;
    let mut follows = Watcher::new(&mut bench);
    for _ in 0..DEPARTURES_KEPT {
        leaves_and_comes_back(&mut bench, "k");
        assert_eq!(follows.told(&mut bench), [id("k")]);
    }
    let all = bench.group.departures(bench.now, lags, usize::MAX).unwrap();
    assert_eq!((all.ids.len(), all.gap), (DEPARTURES_KEPT, false), "as many as are kept can be read");
    let some = bench.group.departures(bench.now, lags, 10).unwrap();
    assert_eq!((some.ids.len(), some.next, some.gap), (10, lags + 10, false));
    let _waits = bench.remove("k", false);
    let late = bench.group.departures(bench.now, lags, usize::MAX).unwrap();
    assert_eq!(late, Departures { ids: vec![], next: follows.next + 1, gap: true });
    assert_eq!(follows.told(&mut bench), [id("k")]);
    let foreign = bench.group.departures(bench.now, follows.next + 1, usize::MAX).unwrap();
    assert!(foreign.gap, "a number that was never given");
}

/// Removes an object and puts it again. Without the audits between steps, which would take a minute for this many.
fn leaves_and_comes_back(bench: &mut Bench, key: &str) {
    let _waits = bench.group.remove(bench.now, &ask(key), false, Waiter(1), &mut bench.effects);
    while let Some(effect) = bench.effects.pop() {
        let Effect::Order { session, order } = effect else { continue };
        let name = (NodeId(session.0 / 100), order.segment);
        let done = OrderOutcome::Done;
        bench.group.order_outcome(name, order.kind, order.slot, order.epoch, done, &mut bench.effects);
    }
    let options = PutOptions::default();
    let put = PutStart {
        ask: ask(key),
        tenant: bench.tenant,
        caller: 7,
        object_len: KIB,
        attributes_len: 0,
        pin: PinClass::None,
        expires: None,
        cohort: None,
        parent: None,
        options: &options,
    };
    let epoch = bench.group.put_start(bench.now, &put, &mut bench.effects).unwrap().object.epoch;
    let end = PutEnd { id: id(key), epoch, root: 77, outcomes: &[None], stripe_roots: &[] };
    bench.group.put_end(bench.now, &end, &mut bench.effects).unwrap();
}

/// A node of the time before, which has one object.
fn comes_back(bench: &mut Bench, key: &'static str) {
    let (now, own) = (bench.now, bench.group.config().term);
    let before = Term::new(own.get() - 1).unwrap();
    let spec = MountSpec {
        node: NodeId(1),
        session: session(1, 1),
        segment: SegmentId(0),
        generation: Generation(1),
        medium: Medium::Memory,
        units: 1000,
        slots: 100,
        labels: ["", "", ""],
        tenant: None,
        term: before,
        occupied: true,
        known: before,
        away: Duration::ZERO,
        one_sided: true,
    };
    bench.group.mount(now, &spec, &mut bench.effects).unwrap();
    let extent = Extent { start: 0, units: 3 };
    let record = ReportRecord {
        slot: SlotId(0),
        extent,
        payload_offset: extent.span().offset(),
        ..bench.on_disk(key, Epoch::new(before, 9).unwrap())
    };
    let name = (spec.node, spec.segment);
    bench.group.report(now, name, spec.generation, own, 0, [record], &mut bench.effects).unwrap();
    bench.group.report_end(now, name, spec.generation, own, 1, &mut bench.effects).unwrap();
    bench.settle();
}

#[test]
fn a_new_master_tells_nothing_before_nodes_have_had_their_time() {
    let mut bench = Bench::with(config(2));
    assert_eq!(bench.group.departures(bench.now, 0, 1), None);
    bench.advance(Duration::from_secs(20));
    comes_back(&mut bench, "k");
    bench.tick();
    assert_eq!(bench.group.departures(bench.now, 0, 1), None, "another node may come");
    assert_eq!(bench.group.departures_next(), 0);
    bench.advance(Duration::from_secs(11));
    bench.tick();
    assert!(bench.group.departures_next() > 0, "whoever waits is woken");
    let told = bench.group.departures(bench.now, 40, 1).unwrap();
    assert!(told.gap && bench.has("k"), "{told:?}");
}

#[test]
fn who_inherits_waits_until_it_answers_from_reports() {
    let first = with(&["k", "lost"]);
    let inheritance = first.group.bequeath(first.now, 100);
    let mut bench = Bench::with(config(2));
    bench.group.inherit(bench.now, inheritance);
    assert!(bench.has("lost"));
    assert_eq!(bench.group.departures(bench.now, 0, 1), None);
    bench.advance(Duration::from_secs(29));
    bench.tick();
    assert!(bench.has("lost"), "it is still believed in");
    assert_eq!(bench.group.departures(bench.now, 0, 1), None);
    bench.advance(Duration::from_secs(2));
    bench.tick();
    assert!(!bench.has("lost"));
    assert!(bench.group.departures(bench.now, 0, 1).unwrap().gap);
}

#[test]
fn a_refused_put_that_replaces_changes_nothing() {
    check(&[], with(&["k"]), |bench| {
        let huge = bench.start_with("k", 1 << 30, &upsert());
        assert!(matches!(huge, Err(ErrorCode::NoSpace | ErrorCode::TooLarge)), "{huge:?}");
        assert!(bench.has("k"));
    });
}
