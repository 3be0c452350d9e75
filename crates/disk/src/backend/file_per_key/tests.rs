//! The backend with one file per record: conformance, and its own properties.

use super::*;
use crate::backend::OpenError;
use crate::backend::conformance::{BackendHarness, Open, Opened, run_conformance, run_on_real_disk, samples};
use crate::record::{InspectedRecord, InspectedState};
use crate::samples::SampleRecord;
use crate::simulated::Faults;
use crate::storage::QueueConfig;

const CONFIG: FileConfig =
    FileConfig { limit_bytes: 1 << 20, eviction_policy: EvictionPolicy::Fifo, open_files_max: 4 };

fn open_with(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    config: FileConfig,
) -> Result<Opened, OpenError> {
    let mut found = BTreeMap::new();
    let (backend, recovery) = FileBackend::open(storage.clone(), queue, config, &mut |record| {
        found.insert(RecordId::of(record.header), (record.key.to_vec(), record.disk_len));
    })?;
    Ok(Opened { backend: Box::new(backend), recovery, found })
}

const OPEN: Open = |storage, queue| open_with(storage, queue, CONFIG);

fn open_files(harness: &mut BackendHarness) -> FileBackend {
    let storage: Arc<dyn Storage> = Arc::new(harness.disk.clone());
    FileBackend::open(storage, &mut *harness.queue, CONFIG, &mut |_| ()).expect("no faults").0
}

#[test]
fn backend_passes_conformance_suite() {
    run_conformance(OPEN);
}

#[test]
fn records_survive_reopen_on_real_disk() {
    run_on_real_disk(OPEN, "file_per_key");
}

#[test]
fn record_is_stored_as_one_file_in_its_directory() {
    let mut harness = BackendHarness::new(1, OPEN);
    let sample = SampleRecord::new(1, 7, 5000);
    harness.write_ok(std::slice::from_ref(&sample));
    let path = path_of(&sample.name());
    assert_eq!(harness.disk.files(), [(path.clone(), 12288)]);
    assert_eq!(harness.disk.read_file(path), sample.encode());
}

#[test]
fn batch_syncs_each_directory_once() {
    let mut harness = BackendHarness::new(1, OPEN);
    let mut samples: Vec<SampleRecord> = samples(0..20, 100);
    samples.sort_by_key(|sample| Directory::of(&sample.name()));
    samples.dedup_by_key(|sample| Directory::of(&sample.name()));
    let directories = samples.len() as u64;
    let firsts: HashSet<u8> = samples.iter().map(|sample| sample.name().id.0[0]).collect();
    let before = harness.disk.counters().syncs;
    harness.write_ok(&samples);
    let syncs = harness.disk.counters().syncs - before;
    // One sync per file, one per directory of records, and those of new directories.
    assert_eq!(syncs, directories * 2 + directories + firsts.len() as u64);
}

#[test]
fn open_deletes_temporary_files_and_keeps_foreign_ones() {
    let mut harness = BackendHarness::new(1, OPEN);
    let sample = SampleRecord::new(1, 7, 5000);
    harness.write_ok(std::slice::from_ref(&sample));
    let other = SampleRecord::new(2, 7, 5000);
    harness.disk.write_file(temporary_of(&other.name()), &other.encode());
    harness.disk.write_file("notes.txt", b"mine");
    harness.disk.write_file("ab/cd/notes.txt", b"mine");
    harness.disk.write_file(path_of(&other.name()).replace(".rec", ".bak"), b"mine");
    let opened = harness.reopen();
    assert_eq!((opened.recovery.records, opened.recovery.bad_count), (1, 0));
    assert!(harness.disk.files().iter().all(|(path, _)| !path.ends_with(".tmp")));
    assert_eq!(harness.disk.files().len(), 4, "foreign files are kept");
}

#[test]
fn truncated_file_loses_only_its_record() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..5, 5000);
    harness.write_ok(&samples);
    let path = path_of(&samples[2].name());
    let whole = harness.disk.read_file(&path);
    for len in [0, 1, 4095, 4096, 5000, 8192, 12287] {
        harness.disk.write_file(&path, &whole[..len]);
        let opened = harness.reopen();
        assert_eq!((opened.recovery.records, opened.recovery.bad_count), (4, 1), "truncated to {len}");
        assert_eq!(opened.recovery.bad[0].file, path);
    }
    // The orphan is evicted first, and does not block a new write.
    let used = harness.backend.usage().bytes;
    let eviction = harness.backend.prepare_eviction(1).expect("an orphan");
    assert_eq!((eviction.names.len(), eviction.bytes), (0, 12287));
    harness.backend.finish_eviction(&mut *harness.queue, eviction).unwrap();
    assert_eq!(used - harness.backend.usage().bytes, 12287);
    harness.write_ok(&samples[2..3]);
    harness.assert_stored(&samples[2]);
}

#[test]
fn file_under_wrong_name_is_bad_record_and_can_be_replaced() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..2, 5000);
    harness.write_ok(&samples[..1]);
    harness.disk.write_file(path_of(&samples[1].name()), &samples[0].encode());
    let opened = harness.reopen();
    assert_eq!((opened.recovery.records, opened.recovery.bad_count), (1, 1));
    // The bad file is replaced.
    harness.write_ok(&samples[1..]);
    harness.assert_stored(&samples[1]);
    assert_eq!(harness.backend.usage().bytes, 2 * 12288);
}

#[test]
fn record_rewritten_during_eviction_is_kept() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..2, 5000);
    harness.write_ok(&samples);
    let eviction = harness.backend.prepare_eviction(1).expect("records to evict");
    assert_eq!(eviction.names, [samples[0].name()]);
    harness.write_ok(&samples[..1]);
    harness.backend.finish_eviction(&mut *harness.queue, eviction).unwrap();
    harness.assert_stored(&samples[0]);
    assert_eq!(harness.backend.usage().bytes, 2 * 12288);
    harness.restart();
    harness.assert_stored(&samples[0]);
}

#[test]
fn open_file_count_is_bounded_by_limit() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..20, 100);
    harness.write_ok(&samples);
    let backend = open_files(&mut harness);
    for sample in &samples {
        assert!(backend.locate(&sample.name()).is_some());
    }
    assert_eq!(backend.open_files.len(), CONFIG.open_files_max);
    let evicted = backend.prepare_eviction(u64::MAX).expect("all of them");
    assert_eq!(backend.open_files.len(), 0);
    backend.finish_eviction(&mut *harness.queue, evicted).unwrap();
}

/// Regression. Failure: after a removal, a start without a crash and then a crash, the record reappeared. Cause: the
/// start found no file and dropped the tombstone, but the deletion of the file was not durable. Fix: the directories of
/// removed objects are synced before their tombstones are dropped.
#[test]
fn tombstone_is_kept_until_file_deletion_is_durable() {
    for seed in 0..40 {
        let mut harness = BackendHarness::new(seed, OPEN);
        let samples = samples(0..3, 100);
        harness.write_ok(&samples);
        harness.remove(&samples[0]).expect("no faults");
        harness.reopen();
        let opened = harness.restart();
        assert_eq!(opened.recovery.records, 2, "seed {seed}");
    }
}

#[test]
fn failed_writes_affect_only_their_record_and_leak_no_space() {
    for seed in 0..50 {
        let mut harness = BackendHarness::new(seed, OPEN);
        harness.disk.set_faults(Faults {
            write_error_permille: 50,
            torn_write_permille: 50,
            sync_error_permille: 50,
            name_error_permille: 50,
            no_space_permille: 20,
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
        let on_disk: u64 = harness.disk.files().iter().map(|(_, len)| len).sum();
        assert!(on_disk <= harness.backend.usage().bytes, "seed {seed}: {on_disk}");
        harness.restart();
        stored.iter().for_each(|sample| harness.assert_stored(sample));
        harness.evict(u64::MAX);
        assert_eq!(harness.backend.usage().bytes, 0, "seed {seed}");
        assert_eq!(harness.disk.files(), [], "seed {seed}");
    }
}

#[test]
fn inspection_lists_all_records_without_modifying_files() {
    let mut harness = BackendHarness::new(1, OPEN);
    let samples = samples(0..6, 9000);
    harness.write_ok(&samples);
    harness.disk.flip_bit(path_of(&samples[1].name()), 4096 * 8);
    harness.disk.flip_bit(path_of(&samples[2].name()), 8);
    let before = harness.disk.files();
    let storage: Arc<dyn Storage> = Arc::new(harness.disk.clone());
    for (verify, expected) in [(false, [5, 1]), (true, [4, 2])] {
        let mut counts = [0; 2];
        let queue = &mut *harness.disk.queue(&QueueConfig::default());
        inspect(&storage, queue, verify, &mut |record: InspectedRecord<'_>| {
            counts[usize::from(record.state != InspectedState::Ok)] += 1;
        })
        .expect("no faults");
        assert_eq!(counts, expected);
    }
    assert_eq!(harness.disk.files(), before);
}
