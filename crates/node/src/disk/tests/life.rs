//! Life of a record without faults, or with one fault.

use moontide_disk::Faults;

use super::*;

const KIB: u64 = 1 << 10;

#[test]
fn offloaded_records_round_trip_across_crash() {
    for backend in BackendKind::ALL {
        let harness = Harness::new(Setup { backend, staging_bytes: 4 << 20, ..Setup::default() });
        // Within a block, a whole block, several blocks, and several digest pages.
        let lens = [1, 100, 4096, 5000, 256 * KIB, 256 * KIB + 1, 700 * KIB];
        let slots = (0u32..).map(SlotId);
        let names: Vec<RecordId> =
            lens.iter().zip(slots).map(|(&len, slot)| harness.store(slot, len, len)).collect();
        for name in &names {
            assert_eq!(harness.fetch(*name), Ok(()), "{backend}");
        }
        assert_eq!(harness.count(|c| &c.loads_read), names.len() as u64);
        for name in &names {
            assert_eq!(harness.fetch(*name), Ok(()), "{backend}");
        }
        assert_eq!(harness.count(|c| &c.loads_staged), names.len() as u64, "they are still in staging");
        assert_eq!(harness.count(|c| &c.offloaded_records), names.len() as u64);
        assert_eq!(harness.count(|c| &c.offloaded_bytes), lens.iter().sum::<u64>());
        let restarted = harness.crash();
        harness.check_sum();
        let mut inventory = restarted.inventory(SessionId(6));
        inventory.sort_unstable();
        let mut sorted = names.clone();
        sorted.sort_unstable();
        assert_eq!(inventory, sorted, "{backend}");
        names.iter().for_each(|name| assert_eq!(restarted.fetch(*name), Ok(()), "{backend}"));
        restarted.check_sum();
        restarted.end();
    }
}

#[test]
fn staging_evicts_least_recently_used_unpinned_record() {
    let harness = Harness::new(Setup::default());
    let [a, b, c] = [0, 1, 2].map(|n| harness.store(SlotId(n), n.into(), 400 * KIB));
    let reads = || harness.count(|c| &c.loads_read);
    // 1 MiB of staging holds two of them.
    assert_eq!([harness.fetch(a), harness.fetch(b), harness.fetch(a), harness.fetch(c)], [Ok(()); 4]);
    assert_eq!(reads(), 3);
    assert_eq!((harness.fetch(a), reads()), (Ok(()), 3), "it was used later than the other");
    assert_eq!((harness.fetch(b), reads()), (Ok(()), 4), "this one was evicted");
    // Pinned records are not evicted.
    let pins = [harness.stage(a).unwrap(), harness.stage(b).unwrap()];
    assert_eq!(harness.fetch(c), Err(ErrorCode::Busy));
    harness.check(a, &pins[0]);
    harness.check(b, &pins[1]);
    drop(pins);
    assert_eq!(harness.fetch(c), Ok(()));
    harness.check_sum();
    harness.end();
}

#[test]
fn leased_record_occupies_staging_until_release_or_expiry() {
    let harness = Harness::new(Setup::default());
    let [a, b] = [0, 1].map(|n| harness.store(SlotId(n), n.into(), 600 * KIB));
    let lease = |for_ms| {
        let until = Instant::now() + Duration::from_millis(for_ms);
        harness
            .tier
            .stage_with_lease(&[read_op(a, 0)], until, Instant::now() + HANG_TIMEOUT)
            .pop()
            .unwrap()
            .map(drop)
    };
    assert_eq!([lease(60_000), lease(60_000)], [Ok(()); 2]);
    assert_eq!(harness.fetch(b), Err(ErrorCode::Busy));
    harness.tier.release_lease(&read_op(a, 0));
    assert_eq!(harness.fetch(b), Err(ErrorCode::Busy), "one of the two still reads it");
    harness.tier.release_lease(&read_op(a, 0));
    assert_eq!(harness.fetch(b), Ok(()));
    // A lease that is never released expires.
    assert_eq!(lease(300), Ok(()));
    let started = Instant::now();
    while harness.fetch(b).is_err() {
        assert!(started.elapsed() < HANG_TIMEOUT);
    }
    assert!(started.elapsed() >= Duration::from_millis(50), "the lease was effective");
    harness.end();
}

#[test]
fn staging_memory_of_removed_record_is_not_reused_while_leased() {
    let harness = Harness::new(Setup::default());
    let [a, b] = [0, 1].map(|n| harness.store(SlotId(n), n.into(), 600 * KIB));
    let until = Instant::now() + Duration::from_millis(1500);
    let staged =
        harness.tier.stage_with_lease(&[read_op(a, 0)], until, Instant::now() + HANG_TIMEOUT).pop().unwrap();
    drop(staged);
    assert_eq!(harness.outcome(harness.remove(a)), Ok(()));
    assert_eq!(harness.fetch(a), Err(ErrorCode::Gone));
    let outcome = harness.fetch(b);
    // A lessee may still read those bytes.
    assert!(outcome == Err(ErrorCode::Busy) || Instant::now() >= until, "{outcome:?}");
    moontide_rt::thread::sleep(until.saturating_duration_since(Instant::now()));
    assert_eq!(harness.fetch(b), Ok(()));
    harness.end();
}

#[test]
fn concurrent_loads_of_same_record_read_disk_once() {
    let harness = Harness::new(Setup::default());
    let name = harness.store(SlotId(0), 1, 300 * KIB);
    harness.disk.set_faults(Faults { latency: Some(Duration::from_millis(20)), ..Faults::default() });
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                // Also more than once in one batch.
                for pin in harness.tier.stage(&read_ops(&[name, name]), Instant::now() + HANG_TIMEOUT) {
                    harness.check(name, &pin.unwrap());
                }
            });
        }
    });
    assert_eq!((harness.count(|c| &c.loads_read), harness.count(|c| &c.loads_staged)), (1, 11));
    harness.check_sum();
    harness.end();
}

#[test]
fn record_larger_than_staging_is_read_in_parts() {
    const MIB: u64 = 1 << 20;
    for (backend, parts) in BackendKind::ALL.into_iter().flat_map(|backend| [(backend, 3), (backend, 9)]) {
        let staging_bytes = parts * (MIB + 16 * KIB);
        let harness =
            Harness::new(Setup { backend, slots: 6, units: 24_000, staging_bytes, ..Setup::default() });
        let lens = [MIB, MIB + 1, 2 * MIB - 4096, 2 * MIB, 5 * MIB + 300 * KIB + 7, 11 * MIB];
        let names: Vec<RecordId> =
            lens.iter().zip((0..).map(SlotId)).map(|(&len, slot)| harness.store(slot, len, len)).collect();
        for name in &names {
            assert_eq!(harness.fetch(*name), Ok(()), "{backend}, {parts} parts");
        }
        let past_end = harness.stage_part(&read_op(names[3], 2 * MIB));
        assert_eq!(past_end.map(drop), Err(ErrorCode::OutOfBounds));
        let ahead = harness.count(|c| &c.loads_ahead);
        assert_eq!(ahead > 0, parts == 9, "{ahead} parts read ahead, in staging for {parts}");
        let restarted = harness.crash();
        harness.check_sum();
        names.iter().for_each(|name| assert_eq!(restarted.fetch(*name), Ok(()), "{backend}"));
        restarted.check_sum();
        restarted.end();
    }
}

#[test]
fn long_record_is_promoted_in_parts() {
    for backend in BackendKind::ALL {
        let harness = Harness::new(Setup { backend, slots: 2, units: 12_000, ..Setup::default() });
        let len = 5 * 1024 * KIB + 77;
        let name = harness.store(SlotId(0), 1, len);
        assert_eq!(harness.outcome(harness.command(CommandKind::Reclaim, name, SlotId(0))), Ok(()));
        assert_eq!(harness.outcome(harness.promote(name, SlotId(1))), Ok(()), "{backend}");
        let pin = harness.memory.heap().pin(SEGMENT, SlotId(1), name.version).expect("it is in memory");
        harness.check(name, &pin);
        drop(pin);
        // A part that cannot be verified ends the promotion.
        assert_eq!(harness.outcome(harness.command(CommandKind::Reclaim, name, SlotId(1))), Ok(()));
        harness.disk.set_faults(Faults { flipped_read_permille: 1000, ..Faults::default() });
        assert_eq!(harness.outcome(harness.promote(name, SlotId(0))), Err(ErrorCode::Corrupt), "{backend}");
        harness.disk.set_faults(Faults::default());
        assert!(harness.memory.heap().pin(SEGMENT, SlotId(0), name.version).is_none());
        harness.check_sum();
        harness.end();
    }
}

#[test]
fn parts_of_removed_record_are_no_longer_staged() {
    let harness = Harness::new(Setup { slots: 2, units: 12_000, staging_bytes: 8 << 20, ..Setup::default() });
    let name = harness.store(SlotId(0), 1, 3 << 20);
    assert_eq!(harness.fetch(name), Ok(()));
    assert_eq!(harness.outcome(harness.remove(name)), Ok(()));
    for offset in [0, 1 << 20, 2 << 20] {
        assert_eq!(harness.stage_part(&read_op(name, offset)).map(drop), Err(ErrorCode::Gone));
    }
    harness.end();
}

#[test]
fn record_without_staging_memory_is_refused_and_missing_record_reported_gone() {
    let harness = Harness::new(Setup { staging_bytes: 512 * KIB, ..Setup::default() });
    let large = harness.store(SlotId(0), 1, 700 * KIB);
    assert_eq!(harness.fetch(large), Err(ErrorCode::TooLarge));
    let never_written = harness.put(SlotId(1), 2, 100);
    assert_eq!(harness.fetch(never_written), Err(ErrorCode::Gone));
    let gone = harness.log.wait_for("gone notice", |entry| match entry {
        LogEntry::Gone { session, versions } => Some((*session, versions.clone())),
        _ => None,
    });
    assert_eq!(gone, (SESSION, vec![(never_written.id, never_written.version)]));
    assert_eq!((harness.count(|c| &c.loads_missed), harness.count(|c| &c.loads_failed)), (1, 1));
    harness.check_sum();
    harness.end();
}

/// Regression: a batch larger than staging made its thread wait 200 ms for every record that did not fit, although the
/// thread itself held the buffers. It waits once for all.
#[test]
fn batch_larger_than_staging_waits_once_for_space() {
    let harness = Harness::new(Setup { slots: 24, units: 1024, ..Setup::default() });
    let names: Vec<RecordId> = (0..24).map(|n| harness.put(SlotId(n), n.into(), 300 * KIB)).collect();
    let commands: Vec<u64> =
        names.iter().zip((0..).map(SlotId)).map(|(n, slot)| harness.offload(*n, slot)).collect();
    commands.iter().for_each(|id| assert_eq!(harness.outcome(*id), Ok(())));
    let started = Instant::now();
    let pins = harness.tier.stage(&read_ops(&names), Instant::now() + HANG_TIMEOUT);
    let took = started.elapsed();
    for (name, pin) in names.iter().zip(&pins) {
        match pin {
            Ok(pin) => harness.check(*name, pin),
            Err(code) => assert_eq!(*code, ErrorCode::Busy),
        }
    }
    assert!((1..=4).contains(&pins.iter().filter(|pin| pin.is_ok()).count()));
    assert!(took < Duration::from_millis(21 * 200), "{took:?} for one batch");
    drop(pins);
    harness.check_sum();
    harness.end();
}

#[test]
fn removal_is_acknowledged_only_when_durable() {
    for backend in BackendKind::ALL {
        let harness = Harness::new(Setup { backend, ..Setup::default() });
        let [a, b] = [0, 1].map(|n| harness.store(SlotId(n), n.into(), 5000));
        let pin = harness.stage(a).unwrap();
        harness.disk.set_faults(Faults { sync_error_permille: 1000, ..Faults::default() });
        assert_eq!(harness.outcome(harness.remove(a)), Err(ErrorCode::DiskError), "{backend}");
        assert_eq!(harness.count(|c| &c.removed_records), 0, "none is durable");
        assert!(harness.count(|c| &c.write_errors) > 0);
        harness.disk.set_faults(Faults::default());
        assert_eq!(harness.outcome(harness.remove(a)), Ok(()), "{backend}");
        // The failed one is repeated after the pause of writes, perhaps by now.
        assert!((1..=2).contains(&harness.count(|c| &c.removed_records)));
        harness.check(a, &pin); // a reader that has pinned it can finish
        drop(pin);
        assert_eq!([harness.fetch(a), harness.fetch(b)], [Err(ErrorCode::Gone), Ok(())], "{backend}");
        let restarted = harness.crash();
        assert_eq!(restarted.inventory(SessionId(6)), [b], "{backend}");
        assert_eq!([restarted.fetch(a), restarted.fetch(b)], [Err(ErrorCode::Gone), Ok(())], "{backend}");
        harness.check_sum();
        restarted.end();
    }
}

#[test]
fn promoted_record_is_readable_in_memory() {
    for backend in BackendKind::ALL {
        let harness = Harness::new(Setup { backend, ..Setup::default() });
        for (slot, len) in [(0, 100), (1, 600 * KIB)] {
            let name = harness.store(SlotId(slot), len, len);
            assert_eq!(harness.outcome(harness.command(CommandKind::Reclaim, name, SlotId(slot))), Ok(()));
            assert!(find(&harness, name).is_none(), "it is no longer in memory");
            let to = SlotId(slot + 8);
            let id = harness.promote(name, to);
            assert_eq!(harness.outcome(id), Ok(()), "{backend}");
            let (segment, slot) = find(&harness, name).expect("local readers find it");
            assert_eq!((segment, slot), (SEGMENT, to));
            harness
                .check(name, &harness.memory.heap().pin(SEGMENT, to, name.version).expect("it is in memory"));
            assert_eq!(harness.first_result(id).word.epoch(), name.version);
        }
        assert_eq!(harness.count(|c| &c.promoted_records), 2);
        harness.check_sum();
        harness.end();
    }
}

/// Returns the location of an object of one stripe according to the local index.
fn find(harness: &Harness, name: RecordId) -> Option<(SegmentId, SlotId)> {
    let heap = harness.memory.heap();
    heap.index_region().index().find(&name.id, |entry| {
        let pin = heap.pin(entry.segment, entry.slot, name.version)?;
        (pin.header().id == name.id).then_some((entry.segment, entry.slot))
    })
}

#[test]
fn disk_writes_pause_after_failure_while_reads_continue() {
    let harness = Harness::new(Setup { write_pause: Duration::from_millis(400), ..Setup::default() });
    let stored = harness.store(SlotId(0), 1, 5000);
    for (faults, code) in [
        (Faults { write_error_permille: 1000, ..Faults::default() }, ErrorCode::DiskError),
        (Faults { no_space_permille: 1000, ..Faults::default() }, ErrorCode::DiskFull),
    ] {
        let name = harness.put(SlotId(1), 2, 5000);
        harness.disk.set_faults(faults);
        assert_eq!(harness.outcome(harness.offload(name, SlotId(1))), Err(code));
        harness.disk.set_faults(Faults::default());
        let writes = harness.disk.counters().writes;
        assert_eq!(harness.outcome(harness.offload(name, SlotId(1))), Err(code), "refused without a write");
        assert_eq!(harness.disk.counters().writes, writes);
        assert_eq!(harness.fetch(stored), Ok(()));
        harness.wait_for_pause();
        assert_eq!(harness.outcome(harness.offload(name, SlotId(1))), Ok(()));
        assert_eq!(harness.fetch(name), Ok(()));
        assert_eq!(harness.outcome(harness.command(CommandKind::Reclaim, name, SlotId(1))), Ok(()));
    }
    harness.end();
}

/// Regression: loads after the shutdown were not counted, and the sum of the counters did not hold.
#[test]
fn loads_after_shutdown_are_counted() {
    let harness = Harness::new(Setup::default());
    let name = harness.store(SlotId(0), 1, 5000);
    harness.end();
    assert_eq!(harness.fetch(name), Err(ErrorCode::StaleSession));
    harness.check_sum();
}
