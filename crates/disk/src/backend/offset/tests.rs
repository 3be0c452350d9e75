//! The backend with one large file: conformance, and its own properties.

use std::sync::Arc;

use super::open::DATA;
use super::*;
use crate::backend::conformance::{BackendHarness, Open, Opened, run_conformance, run_on_real_disk, samples};
use crate::backend::{OpenError, Recovery};
use crate::record::{InspectedRecord, InspectedState};
use crate::samples::SampleRecord;
use crate::simulated::Faults;
use crate::storage::{QueueConfig, Storage};

const CONFIG: OffsetConfig =
    OffsetConfig { limit_bytes: 1 << 20, entries: Some(128), eviction_policy: EvictionPolicy::Fifo };

fn open_with(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    config: OffsetConfig,
) -> Result<Opened, OpenError> {
    let mut found = BTreeMap::new();
    let (backend, recovery) = OffsetBackend::open(storage.clone(), queue, config, &mut |record| {
        found.insert(RecordId::of(record.header), (record.key.to_vec(), record.disk_len));
    })?;
    Ok(Opened { backend: Box::new(backend), recovery, found })
}

const OPEN: Open = |storage, queue| open_with(storage, queue, CONFIG);

#[test]
fn backend_passes_conformance_suite() {
    run_conformance(OPEN);
}

#[test]
fn records_survive_reopen_on_real_disk() {
    run_on_real_disk(OPEN, "offset");
}

#[test]
fn file_keeps_size_and_records_when_limit_changes() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..5, 30_000);
    harness.write_ok(&samples);
    let len = harness.disk.files()[0].1;
    assert!(len <= CONFIG.limit_bytes);
    let storage: Arc<dyn Storage> = Arc::new(harness.disk.clone());
    for limit_bytes in [1 << 19, 1 << 22] {
        let config = OffsetConfig { limit_bytes, entries: None, ..CONFIG };
        let opened = open_with(&storage, &mut *harness.queue, config).expect("it keeps its size");
        assert_eq!((opened.recovery.records, opened.backend.usage().limit), (5, len));
        assert_eq!(harness.disk.files()[0].1, len);
    }
    let config = OffsetConfig { limit_bytes: 4096, ..CONFIG };
    assert!(matches!(open_with(&storage, &mut *harness.queue, config), Err(OpenError::Config { .. })));
}

#[test]
fn full_entry_table_fails_write_with_full() {
    let open: Open = |storage, queue| open_with(storage, queue, OffsetConfig { entries: Some(64), ..CONFIG });
    let mut harness = BackendHarness::new(1, open);
    let samples = samples(0..65, 100);
    let results = harness.write(&samples);
    assert_eq!(results[..64], vec![Ok(()); 64]);
    assert_eq!(results[64], Err(WriteError::Full { needed: 4096 }));
    assert_eq!(harness.evict(4096), [samples[0].name()]);
    assert_eq!(harness.write(&samples[64..]), [Ok(())]);
}

#[test]
fn removed_space_is_reused_without_eviction() {
    let mut harness = BackendHarness::new(1, OPEN);
    for version in 1..200 {
        let sample = SampleRecord::new(1, version, 400_000);
        harness.write_ok(std::slice::from_ref(&sample));
        harness.remove(&sample).expect("no faults");
    }
    assert_eq!(harness.restart().recovery.bad_count, 0);
}

#[test]
fn batch_takes_two_syncs_and_few_table_writes() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..60, 100);
    let before = harness.disk.counters();
    harness.write_ok(&samples);
    let after = harness.disk.counters();
    assert_eq!(after.syncs - before.syncs, 2);
    // 60 fresh slots are in at most two blocks: one per shard here.
    assert!(after.writes - before.writes <= 60 + 2, "{} writes", after.writes - before.writes);
}

/// Flips bits all over a block, and checks the recovery after each flip.
fn flips_of(block: u64, check: impl Fn(u64, &Recovery)) {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..20, 100);
    harness.write_ok(&samples);
    let file = harness.disk.read_file(DATA);
    // Each flip takes a start; the tests of the format show that every single bit is detected.
    for byte in (0..4096).step_by(13) {
        let bit = byte * 8 + byte % 8;
        harness.disk.write_file(DATA, &file);
        harness.disk.flip_bit(DATA, block * 4096 * 8 + bit);
        let opened = harness.reopen();
        check(byte, &opened.recovery);
        let mut stored = 0;
        for sample in &samples {
            if harness.backend.contains(&sample.name()) {
                harness.assert_stored(sample);
                stored += 1;
            }
        }
        assert_eq!(stored, opened.recovery.records);
    }
}

#[test]
fn corrupt_superblock_loses_no_record() {
    let last =
        Geometry::new(CONFIG.limit_bytes / 8 * 7, CONFIG.entries).expect("a valid size").file_len / 4096 - 1;
    for block in [0, last] {
        flips_of(block, |byte, recovery| {
            assert_eq!((recovery.records, recovery.bad_count), (20, 0), "block {block}, byte {byte}");
        });
    }
}

#[test]
fn flipped_bit_in_table_loses_no_record() {
    for block in [1, 2] {
        flips_of(block, |byte, recovery| {
            assert_eq!((recovery.records, recovery.bad_count), (20, 0), "block {block}, byte {byte}");
        });
    }
}

#[test]
fn corrupt_entry_loses_one_record() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..20, 100);
    harness.write_ok(&samples);
    let file = harness.disk.read_file(DATA);
    let used = (4096..3 * 4096).step_by(64).filter(|&at| file[at..at + 64] != [0; 64]);
    for at in used.collect::<Vec<_>>() {
        let mut corrupt = file.clone();
        corrupt[at..at + 64].fill(0xa5);
        harness.disk.write_file(DATA, &corrupt);
        for (records, bad) in [(19, 1), (19, 0)] {
            let opened = harness.reopen();
            assert_eq!((opened.recovery.records, opened.recovery.bad_count), (records, bad), "at {at}");
        }
        // A lost sector loses its eight entries, and no others.
        corrupt[at / 512 * 512..][..512].fill(0xa5);
        harness.disk.write_file(DATA, &corrupt);
        assert!(harness.reopen().recovery.records >= 12);
        // Lost records can be written again.
        let lost = (0..20).filter(|&number| !harness.backend.contains(&samples[number as usize].name()));
        let lost: Vec<SampleRecord> =
            lost.map(|number| SampleRecord::new(number, 10 + number, 100)).collect();
        harness.write_ok(&lost);
    }
}

#[test]
fn corrupt_superblock_is_repaired_from_its_copy_on_open() {
    let mut harness = BackendHarness::new(1, OPEN);
    harness.write_ok(&samples(0..3, 100));
    let len = harness.disk.files()[0].1;
    for round in 0..6 {
        let block = if round % 2 == 0 { 0 } else { len / 4096 - 1 };
        harness.disk.flip_bit(DATA, block * 4096 * 8 + 77);
        assert_eq!(harness.reopen().recovery.records, 3, "round {round}");
    }
    harness.disk.flip_bit(DATA, 77);
    harness.disk.flip_bit(DATA, (len - 4096) * 8 + 77);
    let before = harness.disk.read_file(DATA);
    assert!(matches!(harness.try_reopen(), Err(OpenError::Foreign { .. })));
    assert_eq!(harness.disk.read_file(DATA), before, "nothing was overwritten");
}

#[test]
fn newer_of_two_overlapping_entries_wins() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..2, 100);
    harness.write_ok(&samples);
    let mut file = harness.disk.read_file(DATA);
    let slots: Vec<usize> = (0..128).map(|slot| 4096 + slot * 64).collect();
    let used: Vec<usize> =
        slots.into_iter().filter(|&at| file[at..at + 64].iter().any(|&byte| byte != 0)).collect();
    let geometry = Geometry::decode(&file[..4096]).expect("a valid superblock");
    let entry =
        |file: &[u8], at: usize| match format::Slot::decode(file[at..].first_chunk().expect("64"), &geometry)
        {
            format::Slot::Used(entry) => entry,
            other => panic!("{other:?}"),
        };
    let (first, second) = (entry(&file, used[0]), entry(&file, used[1]));
    let (older, newer) = if first.sequence < second.sequence { (0, second) } else { (1, first) };
    let wrong = Entry { first_block: newer.first_block, ..entry(&file, used[older]) };
    file[used[older]..used[older] + 64].copy_from_slice(&wrong.encode());
    harness.disk.write_file(DATA, &file);
    for bad in [1, 0] {
        let opened = harness.reopen();
        assert_eq!(
            (opened.recovery.records, opened.recovery.bad_count),
            (1, bad),
            "the older one is cleared"
        );
        assert!(harness.backend.contains(&newer.name));
    }
}

#[test]
fn failed_sync_rejects_writes_until_reopen() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..4, 5000);
    harness.write_ok(&samples[..1]);
    harness.disk.set_faults(Faults { sync_error_permille: 1000, ..Faults::default() });
    assert_eq!(harness.write(&samples[1..2]), [Err(WriteError::Io)]);
    harness.disk.set_faults(Faults::default());
    assert_eq!(harness.write(&samples[2..3]), [Err(WriteError::Io)]);
    harness.assert_stored(&samples[0]);
    harness.remove(&samples[0]).expect("the tombstone log is another file");
    harness.reopen();
    harness.write_ok(&samples[3..]);
    assert!(!harness.backend.contains(&samples[0].name()));
}

#[test]
fn failed_write_affects_only_its_record_and_leaks_no_space() {
    for seed in 0..50 {
        let mut harness = BackendHarness::new(seed, OPEN);
        harness.disk.set_faults(Faults {
            write_error_permille: 100,
            torn_write_permille: 100,
            ..Faults::default()
        });
        let mut stored = vec![];
        for round in 0..6 {
            let batch = samples(round * 10..round * 10 + 10, 3000);
            let results = harness.write(&batch);
            stored.extend(
                batch.into_iter().zip(results).filter(|(_, result)| result.is_ok()).map(|(sample, _)| sample),
            );
        }
        harness.disk.set_faults(Faults::default());
        stored.iter().for_each(|sample| harness.assert_stored(sample));
        harness.restart();
        stored.iter().for_each(|sample| harness.assert_stored(sample));
        // The space of failed writes is free again.
        harness.evict(u64::MAX);
        let used = harness.backend.usage();
        let fresh = BackendHarness::new(0, OPEN).backend.usage();
        assert_eq!(used.bytes, fresh.bytes, "seed {seed}");
    }
}

#[test]
fn inspection_lists_all_records_without_modifying_files() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..6, 9000);
    harness.write_ok(&samples);
    harness.remove(&samples[0]).expect("no faults");
    let payload = harness.backend.locate(&samples[1].name()).expect("it is stored").offset + 4096;
    harness.disk.flip_bit(DATA, payload * 8);
    let before = harness.disk.read_file(DATA);
    let storage: Arc<dyn Storage> = Arc::new(harness.disk.clone());
    for (verify, corrupt) in [(false, 0), (true, 1)] {
        let mut counts = [0; 3];
        let queue = &mut *harness.disk.queue(&QueueConfig::default());
        inspect(&storage, queue, verify, &mut |record: InspectedRecord<'_>| {
            let kind = match record.state {
                InspectedState::Ok => 0,
                InspectedState::Removed => 1,
                InspectedState::Corrupt { .. } => 2,
            };
            counts[kind] += 1;
        })
        .expect("no faults");
        assert_eq!(counts, [5 - corrupt, 1, corrupt]);
    }
    assert_eq!(harness.disk.read_file(DATA), before);
}

/// Regression. Failure: after a removal, a failed sync, a start without a crash and then a crash, the record
/// reappeared. Cause: the start saw a cleared entry, which the failed sync had not made durable, and dropped the
/// tombstone. Fix: the whole table is written before tombstones are dropped.
#[test]
fn tombstone_is_kept_until_cleared_entry_is_durable() {
    for seed in 0..40 {
        let mut harness = BackendHarness::new(seed, OPEN);
        let samples = samples(0..3, 100);
        harness.write_ok(&samples);
        harness.remove(&samples[0]).expect("no faults");
        harness.disk.set_faults(Faults { sync_error_permille: 1000, ..Faults::default() });
        harness.evict(1);
        harness.disk.set_faults(Faults::default());
        harness.reopen();
        harness.restart();
        assert!(!harness.backend.contains(&samples[0].name()), "seed {seed}");
    }
}
