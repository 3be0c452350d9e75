//! Races, forced with hooks at the points where threads interleave. Each scenario function returns whether its
//! invariant held, so that the mutation tests can prove that it detects the mutation.

use moontide_disk::Faults;

use super::*;

/// Runs `action` once, when a thread of the tier reaches `point`.
fn once_at(harness: &Arc<Harness>, point: HookPoint, action: impl Fn(&Harness) + Send + Sync + 'static) {
    let (weak, done) = (Arc::downgrade(harness), AtomicBool::new(false));
    harness.tier.test_hooks.hook(move |reached| {
        if reached == point && !done.swap(true, Ordering::SeqCst) {
            action(&weak.upgrade().expect("the harness exists"));
        }
    });
}

/// A record is killed while it is being written.
pub(super) fn killed_while_written(backend: BackendKind, mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { backend, mutation, ..Setup::default() });
    let name = harness.put(SlotId(0), 1, 5000);
    once_at(&harness, HookPoint::Pinned, move |harness| {
        let kill = harness.command(CommandKind::Kill, name, SlotId(0));
        assert_eq!(harness.first_result(kill).code, None);
    });
    let outcome = harness.outcome(harness.offload(name, SlotId(0)));
    let has_notice = harness.log.has_notice_of(name);
    let restarted = harness.crash();
    let inventory = restarted.inventory(SessionId(6));
    let found = restarted.fetch(name);
    restarted.end();
    (outcome, has_notice, inventory, found) == (Err(ErrorCode::Gone), false, vec![], Err(ErrorCode::Gone))
}

/// An eviction: its records are removed from the disk before the notice.
pub(super) fn evicted_and_notified(backend: BackendKind, mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { backend, mutation, limit_bytes: 2 << 20, ..Setup::default() });
    let names: Vec<RecordId> = (0..3).map(|n| harness.store(SlotId(n), n.into(), 500 << 10)).collect();
    let before = harness.tier.usage().bytes;
    let when_notified = Arc::new(AtomicU64::new(u64::MAX));
    let seen = Arc::clone(&when_notified);
    once_at(&harness, HookPoint::Notified, move |harness| {
        seen.store(harness.tier.usage().bytes, Ordering::SeqCst)
    });
    let name = harness.put(SlotId(3), 3, 500 << 10);
    let id = harness.offload(name, SlotId(3));
    assert_eq!(harness.outcome(id), Ok(()));
    harness.log.wait_for("gone notice", |entry| matches!(entry, LogEntry::Gone { .. }).then_some(()));
    let found = names.iter().filter(|name| harness.tier.contains(name)).count();
    assert_eq!(harness.fetch(name), Ok(()));
    harness.end();
    assert!(found < names.len(), "evicted records are still found");
    // The removal is durable before the notice: a crash does not restore the records.
    when_notified.load(Ordering::SeqCst) < before
}

/// An eviction fails, because nothing can be written or deleted for a while. Returns whether masters were told
/// only when a crash could not restore the records.
pub(super) fn evicted_with_errors(backend: BackendKind, mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { backend, mutation, limit_bytes: 2 << 20, ..Setup::default() });
    let names: Vec<RecordId> = (0..3).map(|n| harness.store(SlotId(n), n.into(), 500 << 10)).collect();
    once_at(&harness, HookPoint::Evicting, |harness| {
        let faults = Faults { name_error_permille: 1000, write_error_permille: 1000, ..Faults::default() };
        harness.disk.set_faults(faults);
        let disk = harness.disk.clone();
        moontide_rt::thread::spawn(move || {
            moontide_rt::thread::sleep(Duration::from_millis(100));
            disk.set_faults(Faults::default());
        });
    });
    let name = harness.put(SlotId(3), 3, 500 << 10);
    harness.offload(name, SlotId(3));
    let gone = harness.log.wait_for("gone notice", |entry| match entry {
        LogEntry::Gone { versions, .. } => Some(versions.clone()),
        _ => None,
    });
    harness.disk.set_faults(Faults::default());
    let restarted = harness.crash();
    let returned = restarted.inventory(SessionId(6));
    restarted.end();
    assert!(names.iter().any(|name| gone.contains(&(name.id, name.version))), "{gone:?}");
    returned.iter().all(|name| !gone.contains(&(name.id, name.version)))
}

#[test]
fn eviction_with_errors_is_reported_when_it_is_durable() {
    for backend in BackendKind::ALL {
        assert!(evicted_with_errors(backend, None), "{backend}");
    }
}

/// Records cannot be read while their inventory is made. Returns whether they are in a later inventory, of another session,
/// although the master was told the end of the one without them.
pub(super) fn unreadable_during_inventory(backend: BackendKind, mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { backend, mutation, ..Setup::default() });
    let names: Vec<RecordId> = (0..3).map(|n| harness.store(SlotId(n), n.into(), 5000)).collect();
    harness.disk.set_faults(Faults { read_error_permille: 1000, ..Faults::default() });
    let first = harness.inventory(SessionId(6));
    harness.disk.set_faults(Faults::default());
    let restarted = harness.crash();
    let second = restarted.inventory(SessionId(7));
    restarted.end();
    assert_eq!(first, [], "nothing can be read");
    names.iter().any(|name| second.contains(name))
}

#[test]
fn unreadable_records_are_removed_before_inventory_ends() {
    for backend in BackendKind::ALL {
        assert!(!unreadable_during_inventory(backend, None), "{backend}");
    }
}

/// A reader asks for a record that is being evicted.
#[test]
fn reader_of_record_that_is_evicted_causes_no_early_notice() {
    let harness = Harness::new(Setup { limit_bytes: 2 << 20, ..Setup::default() });
    let names: Vec<RecordId> = (0..3).map(|n| harness.store(SlotId(n), n.into(), 500 << 10)).collect();
    let early = Arc::new(AtomicU64::new(u64::MAX));
    let seen = Arc::clone(&early);
    once_at(&harness, HookPoint::Evicting, move |harness| {
        let evicted = names.iter().find(|name| !harness.tier.contains(name)).expect("one is evicted");
        assert_eq!(harness.fetch(*evicted), Err(ErrorCode::Gone));
        harness.flush();
        let is_gone = |entry: &&LogEntry| matches!(entry, LogEntry::Gone { .. });
        seen.store(harness.log.entries.lock().iter().filter(is_gone).count() as u64, Ordering::SeqCst);
    });
    let name = harness.put(SlotId(3), 3, 500 << 10);
    assert_eq!(harness.outcome(harness.offload(name, SlotId(3))), Ok(()));
    harness.log.wait_for("gone notice", |entry| matches!(entry, LogEntry::Gone { .. }).then_some(()));
    assert_eq!(early.load(Ordering::SeqCst), 0, "told before the record was durably gone");
    harness.end();
}

/// Another session begins while a record is being copied into its slot.
pub(super) fn session_ends_while_promoted(mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { mutation, ..Setup::default() });
    let name = harness.store(SlotId(0), 1, 5000);
    once_at(&harness, HookPoint::Copied, |harness| harness.begin_session(SessionId(6)));
    let id = harness.promote(name, SlotId(1));
    let result = harness.first_result(id);
    let is_in_memory = harness.memory.heap().pin(SEGMENT, SlotId(1), name.version).is_some();
    harness.end();
    (result.code, is_in_memory) == (Some(ErrorCode::Cancelled), false)
}

/// A record that a scan has found is removed from the disk before its notice.
pub(super) fn gone_during_inventory(removed: bool, mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { mutation, limit_bytes: 2 << 20, ..Setup::default() });
    let [a, _] = [0, 1].map(|n| harness.store(SlotId(n), n.into(), 500 << 10));
    harness
        .log
        .wait_for("first inventory end", |entry| (*entry == LogEntry::InventoryEnd(SESSION)).then_some(()));
    once_at(&harness, HookPoint::Found, move |harness| {
        if removed {
            assert_eq!(harness.outcome(harness.remove(a)), Ok(()));
        } else {
            // Enough to evict the first ones.
            (2..5).for_each(|n| _ = harness.store(SlotId(n), n.into(), 500 << 10));
        }
    });
    let inventory = harness.inventory(SessionId(6));
    harness.end();
    !inventory.contains(&a)
}

/// A promotion is cancelled, and the reply is sent, before it begins in its slot.
pub(super) fn cancelled_before_promoted(kind: CommandKind, mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { mutation, ..Setup::default() });
    let name = harness.store(SlotId(0), 1, 5000);
    let copied = Arc::new(AtomicBool::new(false));
    let (weak, seen) = (Arc::downgrade(&harness), Arc::clone(&copied));
    harness.tier.test_hooks.hook(move |reached| match reached {
        HookPoint::Loaded => {
            let harness = weak.upgrade().unwrap();
            assert_eq!(harness.outcome(harness.command(kind, name, SlotId(1))), Ok(()));
        }
        HookPoint::Copied => seen.store(true, Ordering::SeqCst),
        _ => {}
    });
    let outcome = harness.outcome(harness.promote(name, SlotId(1)));
    harness.tier.test_hooks.unhook();
    let is_untouched = !copied.load(Ordering::SeqCst);
    if is_untouched {
        // The slot is free for another record.
        let other = harness.store(SlotId(1), 2, 5000);
        harness.check(other, &harness.memory.heap().pin(SEGMENT, SlotId(1), other.version).unwrap());
    }
    harness.end();
    is_untouched && outcome == Err(ErrorCode::Cancelled)
}

/// Time in which an inventory would end that does not wait. Longer than the scan of an empty disk, on a busy machine.
const INVENTORY_TIME: Duration = Duration::from_millis(100);

/// Begins a session and waits for the time of an inventory. Returns whether the inventory has ended.
fn inventory_ends_meanwhile(harness: &Harness, session: SessionId) -> bool {
    harness.begin_session(session);
    moontide_rt::thread::sleep(INVENTORY_TIME);
    harness.log.entries.lock().contains(&LogEntry::InventoryEnd(session))
}

/// A session begins while a record is being written for a command of the previous one. The master of the new session
/// receives the record, before the end of the inventory.
pub(super) fn session_ends_while_written(mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { mutation, ..Setup::default() });
    let name = harness.put(SlotId(0), 1, 5000);
    let ended_early = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&ended_early);
    once_at(&harness, HookPoint::Pinned, move |harness| {
        seen.store(inventory_ends_meanwhile(harness, SessionId(6)), Ordering::SeqCst);
    });
    harness.first_result(harness.offload(name, SlotId(0)));
    let notified = harness.log.wait_for("notice of the record", |entry| match entry {
        LogEntry::Present { session, names, .. } if names.contains(&name) => Some(*session),
        _ => None,
    });
    harness
        .log
        .wait_for("inventory end", |entry| (*entry == LogEntry::InventoryEnd(SessionId(6))).then_some(()));
    harness.end();
    notified == SessionId(6) && !ended_early.load(Ordering::SeqCst)
}

/// A session begins while a removal is not durable. The inventory does not end before it is.
pub(super) fn session_begins_during_removal(mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { mutation, ..Setup::default() });
    let name = harness.store(SlotId(0), 1, 5000);
    let ended_early = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&ended_early);
    once_at(&harness, HookPoint::Removing, move |harness| {
        seen.store(inventory_ends_meanwhile(harness, SessionId(6)), Ordering::SeqCst);
    });
    assert_eq!(harness.outcome(harness.remove(name)), Ok(()));
    harness
        .log
        .wait_for("inventory end", |entry| (*entry == LogEntry::InventoryEnd(SessionId(6))).then_some(()));
    harness.end();
    !ended_early.load(Ordering::SeqCst)
}

/// A version is killed that is on disk, and whose slot in memory already holds another object.
pub(super) fn killed_after_reuse(backend: BackendKind, mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { backend, mutation, ..Setup::default() });
    let name = harness.store(SlotId(0), 1, 5000);
    assert_eq!(harness.outcome(harness.command(CommandKind::Reclaim, name, SlotId(0))), Ok(()));
    harness.put(SlotId(0), 2, 5000);
    let result = harness.first_result(harness.command(CommandKind::Kill, name, SlotId(0)));
    assert_eq!(result.code, Some(ErrorCode::StaleEpoch));
    let restarted = harness.crash();
    let inventory = restarted.inventory(SessionId(6));
    restarted.end();
    inventory.is_empty()
}

/// A removal fails, and further removals follow without a pause. The failed one is retried all the same, so that the
/// inventory of the next session ends.
pub(super) fn removal_fails_under_steady_traffic(mutation: Option<Mutation>) -> bool {
    // Long enough that a busy machine causes no gap in the traffic.
    let write_pause = Duration::from_millis(300);
    let harness = Harness::new(Setup { mutation, slots: 2, write_pause, ..Setup::default() });
    let name = harness.store(SlotId(0), 1, 5000);
    harness.disk.set_faults(Faults { no_space_permille: 1000, ..Faults::default() });
    assert_eq!(harness.outcome(harness.remove(name)), Err(ErrorCode::DiskError));
    harness.disk.set_faults(Faults::default());
    harness.begin_session(SessionId(6));
    let other = harness.put(SlotId(1), 2, 100);
    let end = LogEntry::InventoryEnd(SessionId(6));
    let until = Instant::now() + 6 * write_pause;
    while Instant::now() < until && !harness.log.entries.lock().contains(&end) {
        harness.remove(other);
        moontide_rt::thread::sleep(write_pause / 100);
    }
    let ended = harness.log.entries.lock().contains(&end);
    harness.end();
    ended
}

/// A record is written, with its notice, between a miss and the notice of that miss.
pub(super) fn written_while_missed(mutation: Option<Mutation>) -> bool {
    let harness = Harness::new(Setup { mutation, ..Setup::default() });
    let name = harness.put(SlotId(0), 1, 5000);
    once_at(&harness, HookPoint::Missed, move |harness| {
        assert_eq!(harness.outcome(harness.offload(name, SlotId(0))), Ok(()));
    });
    assert!(harness.fetch(name).is_err());
    assert_eq!(harness.fetch(name), Ok(()));
    harness.end();
    harness.flush();
    let entries = harness.log.entries.lock();
    let gone = (name.id, name.version);
    !entries.iter().any(|entry| matches!(entry, LogEntry::Gone { versions, .. } if versions.contains(&gone)))
}

#[test]
fn record_killed_during_offload_is_not_readable_after_crash() {
    for backend in BackendKind::ALL {
        assert!(killed_while_written(backend, None), "{backend}");
    }
}

#[test]
fn eviction_is_reported_only_after_durable_removal() {
    for backend in BackendKind::ALL {
        assert!(evicted_and_notified(backend, None), "{backend}");
    }
}

#[test]
fn promotion_of_ended_session_is_not_published() {
    assert!(session_ends_while_promoted(None));
}

#[test]
fn inventory_omits_records_removed_or_evicted_after_scan() {
    assert!(gone_during_inventory(true, None) && gone_during_inventory(false, None));
}

/// Regression: a Kill or Reclaim before a promotion began in its slot took effect only after the slot had become
/// WRITING; by then, slot and extent could belong to another record. The check for cancellation under the lock, before
/// the begin, fixes it.
#[test]
fn promotion_cancelled_before_start_does_not_touch_its_slot() {
    assert!(cancelled_before_promoted(CommandKind::Kill, None));
    assert!(cancelled_before_promoted(CommandKind::Reclaim, None));
}

#[test]
fn promotion_killed_before_publish_is_cancelled() {
    let harness = Harness::new(Setup::default());
    let name = harness.store(SlotId(0), 1, 5000);
    once_at(&harness, HookPoint::Copied, move |harness| {
        assert_eq!(harness.first_result(harness.command(CommandKind::Kill, name, SlotId(1))).code, None);
    });
    let id = harness.promote(name, SlotId(1));
    assert_eq!(harness.outcome(id), Err(ErrorCode::Cancelled));
    assert!(harness.memory.heap().pin(SEGMENT, SlotId(1), name.version).is_none());
    assert_eq!(
        harness.outcome(harness.command(CommandKind::Reclaim, name, SlotId(1))),
        Ok(()),
        "its space is reclaimed"
    );
    harness.store(SlotId(1), 2, 5000);
    harness.end();
}

/// Regression: the load of a record that was removed meanwhile was admitted when another load of it had begun: a
/// removed record was served. Now the entry of an overtaken load remains until the load ends.
#[test]
fn record_removed_during_load_is_not_served() {
    let harness = Harness::new(Setup::default());
    let name = harness.store(SlotId(0), 1, 5000);
    let (removed, second) = mpsc::channel();
    once_at(&harness, HookPoint::Read, move |harness| {
        assert_eq!(harness.outcome(harness.remove(name)), Ok(()));
        removed.send(()).unwrap();
        // Time for the other load to begin.
        moontide_rt::thread::sleep(Duration::from_millis(50));
    });
    std::thread::scope(|scope| {
        let harness = &harness;
        let second = scope.spawn(move || {
            second.recv().unwrap();
            harness.fetch(name)
        });
        assert_eq!(harness.fetch(name), Err(ErrorCode::Gone));
        let outcome = second.join().unwrap();
        assert!(matches!(outcome, Err(ErrorCode::Gone | ErrorCode::Busy)), "{outcome:?}");
    });
    assert_eq!(harness.fetch(name), Err(ErrorCode::Gone));
    harness.check_sum();
    harness.end();
}

/// Regression: the notice of a record that was being written when a session ended went to that session only; the scan
/// of the next one had been too early to find it, and no master knew it until the node restarted. Later it went to the
/// new session, but possibly after the end of the inventory: an object that the new master had meanwhile answered as
/// removed was back.
#[test]
fn offload_during_session_change_is_reported_to_new_session_before_inventory_ends() {
    assert!(session_ends_while_written(None));
}

#[test]
fn inventory_ends_after_earlier_removals_are_durable() {
    assert!(session_begins_during_removal(None));
}

/// Regression: the Kill of a version that was no longer in its slot was answered without a removal from the disk.
#[test]
fn kill_of_reused_slot_removes_version_from_disk() {
    for backend in BackendKind::ALL {
        assert!(killed_after_reuse(backend, None), "{backend}");
    }
}

/// Regression: failed removals were retried only after a pause without any removal.
#[test]
fn failed_removal_is_retried_under_steady_removals() {
    assert!(removal_fails_under_steady_traffic(None));
}

/// Regression: a missed record was reported as gone after it had been written and reported as present: the master
/// forgot a record that was on the disk.
#[test]
fn record_written_after_miss_is_not_reported_gone() {
    assert!(written_while_missed(None));
}
