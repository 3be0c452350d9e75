//! What happens when two things happen at once, made to happen by stepping in where they meet. Each scene answers whether
//! what must hold held, so that it can be shown to notice a mistake.

use super::*;

/// Does something once, when a thread of the tier reaches a point.
fn once_at(world: &Arc<World>, point: Point, step_in: impl Fn(&World) + Send + Sync + 'static) {
    let (in_it, done) = (Arc::downgrade(world), AtomicBool::new(false));
    world.tier.trial.hook(move |reached| {
        if reached == point && !done.swap(true, Ordering::SeqCst) {
            step_in(&in_it.upgrade().expect("it is running"));
        }
    });
}

/// A record is killed while it is being written.
pub(super) fn killed_while_written(backend: BackendKind, bug: Option<Bug>) -> bool {
    let world = World::new(Setup { backend, bug, ..Setup::default() });
    let name = world.put(SlotId(0), 1, 5000);
    once_at(&world, Point::Pinned, move |world| {
        let kill = world.order(OrderKind::Kill, name, SlotId(0));
        assert_eq!(world.answer(kill).code, None);
    });
    let outcome = world.outcome(world.offload(name, SlotId(0)));
    let is_told = world.session.is_told(name);
    let again = world.crash();
    let told = again.told_anew(SessionId(6));
    let found = again.fetch(name);
    again.end();
    (outcome, is_told, told, found) == (Err(ErrorCode::Gone), false, vec![], Err(ErrorCode::Gone))
}

/// Room is made, and it is looked what is left on the disk when that is told.
pub(super) fn evicted_and_told(backend: BackendKind, bug: Option<Bug>) -> bool {
    let world = World::new(Setup { backend, bug, limit_bytes: 2 << 20, ..Setup::default() });
    let names: Vec<RecordName> = (0..3).map(|n| world.store(SlotId(n), n.into(), 500 << 10)).collect();
    let before = world.tier.backend.usage().bytes;
    let when_told = Arc::new(AtomicU64::new(u64::MAX));
    let seen = Arc::clone(&when_told);
    once_at(&world, Point::Told, move |world| seen.store(world.tier.backend.usage().bytes, Ordering::SeqCst));
    let name = world.put(SlotId(3), 3, 500 << 10);
    let order = world.offload(name, SlotId(3));
    assert_eq!(world.outcome(order), Ok(()));
    world.session.hear("that records are gone", |note| matches!(note, Note::Gone { .. }).then_some(()));
    let found = names.iter().filter(|name| world.tier.backend.contains(name)).count();
    assert_eq!(world.fetch(name), Ok(()));
    world.end();
    assert!(found < names.len(), "what was told cannot be found");
    // It was gone for good by then: a crash does not bring it back.
    when_told.load(Ordering::SeqCst) < before
}

/// Another session begins while a record is being copied into its slot.
pub(super) fn session_ends_while_promoted(bug: Option<Bug>) -> bool {
    let world = World::new(Setup { bug, ..Setup::default() });
    let name = world.store(SlotId(0), 1, 5000);
    once_at(&world, Point::Copied, |world| world.begin_session(SessionId(6)));
    let order = world.promote(name, SlotId(1));
    let answer = world.answer(order);
    let is_there = world.memory.heap().pin(SEGMENT, SlotId(1), name.version).is_some();
    world.end();
    (answer.code, is_there) == (Some(ErrorCode::Cancelled), false)
}

/// Something that was found by a scan leaves the disk before it is told.
pub(super) fn gone_while_told(removed: bool, bug: Option<Bug>) -> bool {
    let world = World::new(Setup { bug, limit_bytes: 2 << 20, ..Setup::default() });
    let [a, _] = [0, 1].map(|n| world.store(SlotId(n), n.into(), 500 << 10));
    world.session.hear("the first end", |note| (*note == Note::End(SESSION)).then_some(()));
    once_at(&world, Point::Found, move |world| {
        if removed {
            assert_eq!(world.outcome(world.remove(a)), Ok(()));
        } else {
            // Enough to make the first ones leave.
            (2..5).for_each(|n| _ = world.store(SlotId(n), n.into(), 500 << 10));
        }
    });
    let told = world.told_anew(SessionId(6));
    world.end();
    !told.contains(&a)
}

/// A promotion is cancelled, and that answered, before it has begun in its slot.
pub(super) fn cancelled_before_promoted(kind: OrderKind, bug: Option<Bug>) -> bool {
    let world = World::new(Setup { bug, ..Setup::default() });
    let name = world.store(SlotId(0), 1, 5000);
    let copied = Arc::new(AtomicBool::new(false));
    let (in_it, seen) = (Arc::downgrade(&world), Arc::clone(&copied));
    world.tier.trial.hook(move |reached| match reached {
        Point::Loaded => {
            let world = in_it.upgrade().unwrap();
            assert_eq!(world.outcome(world.order(kind, name, SlotId(1))), Ok(()));
        }
        Point::Copied => seen.store(true, Ordering::SeqCst),
        _ => {}
    });
    let outcome = world.outcome(world.promote(name, SlotId(1)));
    world.tier.trial.unhook();
    let is_alone = !copied.load(Ordering::SeqCst);
    if is_alone {
        // The slot is free for what the master gives it for.
        let other = world.store(SlotId(1), 2, 5000);
        world.check(other, &world.memory.heap().pin(SEGMENT, SlotId(1), other.version).unwrap());
    }
    world.end();
    is_alone && outcome == Err(ErrorCode::Cancelled)
}

/// A session begins, and is told everything, while a record is being written by order of the one before.
pub(super) fn session_ends_while_written(bug: Option<Bug>) -> bool {
    let world = World::new(Setup { bug, ..Setup::default() });
    let name = world.put(SlotId(0), 1, 5000);
    once_at(&world, Point::Pinned, |world| {
        world.begin_session(SessionId(6));
        world.session.hear("the end", |note| (*note == Note::End(SessionId(6))).then_some(()));
    });
    world.answer(world.offload(name, SlotId(0)));
    let told_to = world.session.hear("the record", |note| match note {
        Note::There { session, names, .. } if names.contains(&name) => Some(*session),
        _ => None,
    });
    world.end();
    told_to == SessionId(6)
}

/// A record is written and told between the moment in which somebody misses it and that in which this is told.
pub(super) fn written_while_missed(bug: Option<Bug>) -> bool {
    let world = World::new(Setup { bug, ..Setup::default() });
    let name = world.put(SlotId(0), 1, 5000);
    once_at(&world, Point::Missed, move |world| {
        assert_eq!(world.outcome(world.offload(name, SlotId(0))), Ok(()));
    });
    assert!(world.fetch(name).is_err());
    assert_eq!(world.fetch(name), Ok(()));
    world.end();
    world.heard_all();
    let notes = world.session.notes.lock();
    let gone = (name.id, name.version);
    !notes.iter().any(|note| matches!(note, Note::Gone { versions, .. } if versions.contains(&gone)))
}

#[test]
fn record_killed_while_it_is_written_is_never_found() {
    for backend in BackendKind::ALL {
        assert!(killed_while_written(backend, None), "{backend}");
    }
}

#[test]
fn what_was_told_to_be_evicted_does_not_come_back_with_a_crash() {
    for backend in BackendKind::ALL {
        assert!(evicted_and_told(backend, None), "{backend}");
    }
}

#[test]
fn promotion_of_an_ended_session_is_not_published() {
    assert!(session_ends_while_promoted(None));
}

#[test]
fn what_left_the_disk_is_not_told_as_there() {
    assert!(gone_while_told(true, None) && gone_while_told(false, None));
}

/// A kill, or a reclaim, before the promotion has begun in its slot was obeyed after the slot had been WRITING for a
/// while: slot and extent may have been somebody else's by then. Now it is looked at under the lock before it begins.
#[test]
fn promotion_cancelled_before_it_begins_leaves_its_slot_alone() {
    assert!(cancelled_before_promoted(OrderKind::Kill, None));
    assert!(cancelled_before_promoted(OrderKind::Reclaim, None));
}

#[test]
fn promotion_killed_while_it_runs_is_never_there() {
    let world = World::new(Setup::default());
    let name = world.store(SlotId(0), 1, 5000);
    once_at(&world, Point::Copied, move |world| {
        assert_eq!(world.answer(world.order(OrderKind::Kill, name, SlotId(1))).code, None);
    });
    let order = world.promote(name, SlotId(1));
    assert_eq!(world.outcome(order), Err(ErrorCode::Cancelled));
    assert!(world.memory.heap().pin(SEGMENT, SlotId(1), name.version).is_none());
    assert_eq!(
        world.outcome(world.order(OrderKind::Reclaim, name, SlotId(1))),
        Ok(()),
        "its space comes back"
    );
    world.store(SlotId(1), 2, 5000);
    world.end();
}

/// The load of a record that was removed meanwhile was let in when another load of it had begun: a removed record was
/// served. Now a load that was overtaken is remembered until it ends.
#[test]
fn record_removed_while_it_is_read_is_not_served() {
    let world = World::new(Setup::default());
    let name = world.store(SlotId(0), 1, 5000);
    let (asked, second) = mpsc::channel();
    once_at(&world, Point::Read, move |world| {
        assert_eq!(world.outcome(world.remove(name)), Ok(()));
        asked.send(()).unwrap();
        // Time for the other one to begin.
        std::thread::sleep(Duration::from_millis(50));
    });
    std::thread::scope(|scope| {
        let world = &world;
        let second = scope.spawn(move || {
            second.recv().unwrap();
            world.fetch(name)
        });
        assert_eq!(world.fetch(name), Err(ErrorCode::Gone));
        let outcome = second.join().unwrap();
        assert!(matches!(outcome, Err(ErrorCode::Gone | ErrorCode::Busy)), "{outcome:?}");
    });
    assert_eq!(world.fetch(name), Err(ErrorCode::Gone));
    world.check_sum();
    world.end();
}

/// What was being written when a session ended was told to that session only; the next one's scan had come too early to
/// find it, and nobody knew of it until the node started anew.
#[test]
fn record_written_while_sessions_change_is_told() {
    assert!(session_ends_while_written(None));
}

/// A record that somebody missed was told as gone after it had been written and told as there: the master forgot what
/// was on the disk.
#[test]
fn record_written_while_it_is_missed_is_told_as_there() {
    assert!(written_while_missed(None));
}
