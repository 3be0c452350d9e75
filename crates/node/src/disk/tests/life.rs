//! What a record goes through when nothing, or one thing, goes wrong.

use moontide_disk::Faults;

use super::*;

const KIB: u64 = 1 << 10;

#[test]
fn what_is_written_comes_back_as_it_was() {
    for backend in BackendKind::ALL {
        let world = World::new(Setup { backend, staging_bytes: 4 << 20, ..Setup::default() });
        // Within a block, a whole one, several, and with pages whose digests count.
        let lens = [1, 100, 4096, 5000, 256 * KIB, 256 * KIB + 1, 700 * KIB];
        let slots = (0u32..).map(SlotId);
        let names: Vec<RecordName> =
            lens.iter().zip(slots).map(|(&len, slot)| world.store(slot, len, len)).collect();
        for name in &names {
            assert_eq!(world.fetch(*name), Ok(()), "{backend}");
        }
        assert_eq!(world.count(|c| &c.loads_read), names.len() as u64);
        for name in &names {
            assert_eq!(world.fetch(*name), Ok(()), "{backend}");
        }
        assert_eq!(world.count(|c| &c.loads_staged), names.len() as u64, "they are in memory still");
        assert_eq!(world.count(|c| &c.offloaded_records), names.len() as u64);
        assert_eq!(world.count(|c| &c.offloaded_bytes), lens.iter().sum::<u64>());
        let again = world.crash();
        world.check_sum();
        let mut told = again.told_anew(SessionId(6));
        told.sort_unstable();
        let mut sorted = names.clone();
        sorted.sort_unstable();
        assert_eq!(told, sorted, "{backend}");
        names.iter().for_each(|name| assert_eq!(again.fetch(*name), Ok(()), "{backend}"));
        again.check_sum();
        again.end();
    }
}

#[test]
fn staging_gives_room_to_what_was_used_longest_ago_but_for_what_is_held() {
    let world = World::new(Setup::default());
    let [a, b, c] = [0, 1, 2].map(|n| world.store(SlotId(n), n.into(), 400 * KIB));
    let reads = || world.count(|c| &c.loads_read);
    // 1 MiB of staging has room for two of them.
    assert_eq!([world.fetch(a), world.fetch(b), world.fetch(a), world.fetch(c)], [Ok(()); 4]);
    assert_eq!(reads(), 3);
    assert_eq!((world.fetch(a), reads()), (Ok(()), 3), "it was used later than the other");
    assert_eq!((world.fetch(b), reads()), (Ok(()), 4), "this one went");
    // Pinned ones stay.
    let pins = [world.stage(a).unwrap(), world.stage(b).unwrap()];
    assert_eq!(world.fetch(c), Err(ErrorCode::Busy));
    world.check(a, &pins[0]);
    world.check(b, &pins[1]);
    drop(pins);
    assert_eq!(world.fetch(c), Ok(()));
    world.check_sum();
    world.end();
}

#[test]
fn what_is_kept_stays_until_all_who_asked_gave_it_back() {
    let world = World::new(Setup::default());
    let [a, b] = [0, 1].map(|n| world.store(SlotId(n), n.into(), 600 * KIB));
    let keep = |for_ms| {
        let until = Instant::now() + Duration::from_millis(for_ms);
        world.tier.stage_and_keep(&[a], until, Instant::now() + HANGS).pop().unwrap().map(drop)
    };
    assert_eq!([keep(60_000), keep(60_000)], [Ok(()); 2]);
    assert_eq!(world.fetch(b), Err(ErrorCode::Busy));
    world.tier.give_back(a);
    assert_eq!(world.fetch(b), Err(ErrorCode::Busy), "one of the two reads it still");
    world.tier.give_back(a);
    assert_eq!(world.fetch(b), Ok(()));
    // One that is never given back goes when its time is over.
    assert_eq!(keep(300), Ok(()));
    let began = Instant::now();
    while world.fetch(b).is_err() {
        assert!(began.elapsed() < HANGS);
    }
    assert!(began.elapsed() >= Duration::from_millis(50), "it was kept");
    world.end();
}

#[test]
fn room_of_what_was_removed_is_not_used_while_it_is_kept() {
    let world = World::new(Setup::default());
    let [a, b] = [0, 1].map(|n| world.store(SlotId(n), n.into(), 600 * KIB));
    let until = Instant::now() + Duration::from_millis(1500);
    let staged = world.tier.stage_and_keep(&[a], until, Instant::now() + HANGS).pop().unwrap();
    drop(staged);
    assert_eq!(world.outcome(world.remove(a)), Ok(()));
    assert_eq!(world.fetch(a), Err(ErrorCode::Gone));
    let outcome = world.fetch(b);
    // Somebody may be reading those bytes without asking.
    assert!(outcome == Err(ErrorCode::Busy) || Instant::now() >= until, "{outcome:?}");
    std::thread::sleep(until.saturating_duration_since(Instant::now()));
    assert_eq!(world.fetch(b), Ok(()));
    world.end();
}

#[test]
fn many_who_want_the_same_record_cause_one_read() {
    let world = World::new(Setup::default());
    let name = world.store(SlotId(0), 1, 300 * KIB);
    world.disk.set_faults(Faults { latency: Some(Duration::from_millis(20)), ..Faults::default() });
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                // Also more than once in one batch.
                for pin in world.tier.stage(&[name, name], Instant::now() + HANGS) {
                    world.check(name, &pin.unwrap());
                }
            });
        }
    });
    assert_eq!((world.count(|c| &c.loads_read), world.count(|c| &c.loads_staged)), (1, 11));
    world.check_sum();
    world.end();
}

#[test]
fn what_staging_cannot_hold_is_refused_and_what_is_not_there_is_told() {
    let world = World::new(Setup { staging_bytes: 512 * KIB, ..Setup::default() });
    let large = world.store(SlotId(0), 1, 700 * KIB);
    assert_eq!(world.fetch(large), Err(ErrorCode::TooLarge));
    let never_written = world.put(SlotId(1), 2, 100);
    assert_eq!(world.fetch(never_written), Err(ErrorCode::Gone));
    let gone = world.session.hear("that it is gone", |note| match note {
        Note::Gone { session, versions } => Some((*session, versions.clone())),
        _ => None,
    });
    assert_eq!(gone, (SESSION, vec![(never_written.id, never_written.version)]));
    assert_eq!((world.count(|c| &c.loads_missed), world.count(|c| &c.loads_failed)), (1, 1));
    world.check_sum();
    world.end();
}

/// A batch larger than staging once made its thread wait for every record that did not fit, 200 ms each, although it held
/// the room itself. It waits once for all.
#[test]
fn batch_beyond_staging_is_refused_soon() {
    let world = World::new(Setup { slots: 24, units: 1024, ..Setup::default() });
    let names: Vec<RecordName> = (0..24).map(|n| world.put(SlotId(n), n.into(), 300 * KIB)).collect();
    let orders: Vec<u64> =
        names.iter().zip((0..).map(SlotId)).map(|(n, slot)| world.offload(*n, slot)).collect();
    orders.iter().for_each(|order| assert_eq!(world.outcome(*order), Ok(())));
    let began = Instant::now();
    let pins = world.tier.stage(&names, Instant::now() + HANGS);
    let took = began.elapsed();
    for (name, pin) in names.iter().zip(&pins) {
        match pin {
            Ok(pin) => world.check(*name, pin),
            Err(code) => assert_eq!(*code, ErrorCode::Busy),
        }
    }
    assert!((1..=4).contains(&pins.iter().filter(|pin| pin.is_ok()).count()));
    assert!(took < Duration::from_millis(21 * 200), "{took:?} for one batch");
    drop(pins);
    world.check_sum();
    world.end();
}

#[test]
fn removal_is_answered_when_it_is_durable() {
    for backend in BackendKind::ALL {
        let world = World::new(Setup { backend, ..Setup::default() });
        let [a, b] = [0, 1].map(|n| world.store(SlotId(n), n.into(), 5000));
        let pin = world.stage(a).unwrap();
        world.disk.set_faults(Faults { sync_error_permille: 1000, ..Faults::default() });
        assert_eq!(world.outcome(world.remove(a)), Err(ErrorCode::DiskError), "{backend}");
        assert_eq!(world.count(|c| &c.removed_records), 0, "none is durable");
        assert!(world.count(|c| &c.write_errors) > 0);
        world.disk.set_faults(Faults::default());
        assert_eq!(world.outcome(world.remove(a)), Ok(()), "{backend}");
        assert_eq!(world.count(|c| &c.removed_records), 1);
        world.check(a, &pin); // whoever reads it reads it to its end
        drop(pin);
        assert_eq!([world.fetch(a), world.fetch(b)], [Err(ErrorCode::Gone), Ok(())], "{backend}");
        let again = world.crash();
        assert_eq!(again.told_anew(SessionId(6)), [b], "{backend}");
        assert_eq!([again.fetch(a), again.fetch(b)], [Err(ErrorCode::Gone), Ok(())], "{backend}");
        world.check_sum();
        again.end();
    }
}

#[test]
fn promoted_record_is_found_in_memory() {
    for backend in BackendKind::ALL {
        let world = World::new(Setup { backend, ..Setup::default() });
        for (slot, len) in [(0, 100), (1, 600 * KIB)] {
            let name = world.store(SlotId(slot), len, len);
            assert_eq!(world.outcome(world.order(OrderKind::Reclaim, name, SlotId(slot))), Ok(()));
            assert!(find(&world, name).is_none(), "it left memory");
            let to = SlotId(slot + 8);
            let order = world.promote(name, to);
            assert_eq!(world.outcome(order), Ok(()), "{backend}");
            let (segment, slot) = find(&world, name).expect("readers of this host find it");
            assert_eq!((segment, slot), (SEGMENT, to));
            world.check(name, &world.memory.heap().pin(SEGMENT, to, name.version).expect("it is there"));
            assert_eq!(world.answer(order).word.epoch(), name.version);
        }
        assert_eq!(world.count(|c| &c.promoted_records), 2);
        world.check_sum();
        world.end();
    }
}

/// Where the index says that a whole object is.
fn find(world: &World, name: RecordName) -> Option<(SegmentId, SlotId)> {
    let heap = world.memory.heap();
    heap.board().index().find(&name.id, |place| {
        let pin = heap.pin(place.segment, place.slot, name.version)?;
        (pin.header().id == name.id).then_some((place.segment, place.slot))
    })
}

#[test]
fn writing_pauses_after_a_failure_and_reading_goes_on() {
    let world = World::new(Setup { write_pause: Duration::from_millis(400), ..Setup::default() });
    let there = world.store(SlotId(0), 1, 5000);
    for (faults, code) in [
        (Faults { write_error_permille: 1000, ..Faults::default() }, ErrorCode::DiskError),
        (Faults { no_space_permille: 1000, ..Faults::default() }, ErrorCode::DiskFull),
    ] {
        let name = world.put(SlotId(1), 2, 5000);
        world.disk.set_faults(faults);
        assert_eq!(world.outcome(world.offload(name, SlotId(1))), Err(code));
        world.disk.set_faults(Faults::default());
        let writes = world.disk.counters().writes;
        assert_eq!(world.outcome(world.offload(name, SlotId(1))), Err(code), "not even tried");
        assert_eq!(world.disk.counters().writes, writes);
        assert_eq!(world.fetch(there), Ok(()));
        world.wait_for_pause();
        assert_eq!(world.outcome(world.offload(name, SlotId(1))), Ok(()));
        assert_eq!(world.fetch(name), Ok(()));
        assert_eq!(world.outcome(world.order(OrderKind::Reclaim, name, SlotId(1))), Ok(()));
    }
    world.end();
}

/// Asking for what cannot be loaded any more was not counted, and the sum did not hold after the end.
#[test]
fn loads_after_the_end_are_counted() {
    let world = World::new(Setup::default());
    let name = world.store(SlotId(0), 1, 5000);
    world.end();
    assert_eq!(world.fetch(name), Err(ErrorCode::StaleSession));
    world.check_sum();
}
