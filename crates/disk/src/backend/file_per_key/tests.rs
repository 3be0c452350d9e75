//! What files, one per record, promise: the rules of all backends, and those of this one.

use super::*;
use crate::backend::OpenError;
use crate::backend::trial::{Open, Opened, Trial, keeps_the_rules, samples, works_on_a_real_disk};
use crate::record::{Inspected, InspectedState};
use crate::samples::Sample;
use crate::simulated::Faults;
use crate::storage::QueueConfig;

const CONFIG: FileConfig = FileConfig { limit_bytes: 1 << 20, order: EvictionOrder::Fifo, open_files_max: 4 };

fn open_with(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    config: FileConfig,
) -> Result<Opened, OpenError> {
    let mut found = BTreeMap::new();
    let (backend, recovery) = FileBackend::open(storage.clone(), queue, config, &mut |record| {
        found.insert(RecordName::of(record.header), (record.key.to_vec(), record.disk_len));
    })?;
    Ok(Opened { backend: Box::new(backend), recovery, found })
}

const OPEN: Open = |storage, queue| open_with(storage, queue, CONFIG);

fn open_files(trial: &mut Trial) -> FileBackend {
    let storage: Arc<dyn Storage> = Arc::new(trial.disk.clone());
    FileBackend::open(storage, &mut *trial.queue, CONFIG, &mut |_| ()).expect("no faults").0
}

#[test]
fn it_keeps_the_rules_of_all_backends() {
    keeps_the_rules(OPEN);
}

#[test]
fn it_works_on_a_real_disk() {
    works_on_a_real_disk(OPEN, "file_per_key");
}

#[test]
fn a_record_is_a_file_in_its_directory() {
    let mut trial = Trial::new(1, OPEN);
    let sample = Sample::new(1, 7, 5000);
    trial.write_ok(std::slice::from_ref(&sample));
    let path = path_of(&sample.name());
    assert_eq!(trial.disk.files(), [(path.clone(), 12288)]);
    assert_eq!(trial.disk.read_file(path), sample.encode());
}

#[test]
fn a_batch_syncs_each_directory_once() {
    let mut trial = Trial::new(1, OPEN);
    let mut samples: Vec<Sample> = samples(0..20, 100);
    samples.sort_by_key(|sample| Directory::of(&sample.name()));
    samples.dedup_by_key(|sample| Directory::of(&sample.name()));
    let directories = samples.len() as u64;
    let firsts: HashSet<u8> = samples.iter().map(|sample| sample.name().id.0[0]).collect();
    let before = trial.disk.counters().syncs;
    trial.write_ok(&samples);
    let syncs = trial.disk.counters().syncs - before;
    // One per file, one per directory of records, and those of the new directories.
    assert_eq!(syncs, directories * 2 + directories + firsts.len() as u64);
}

#[test]
fn unfinished_and_foreign_files() {
    let mut trial = Trial::new(1, OPEN);
    let sample = Sample::new(1, 7, 5000);
    trial.write_ok(std::slice::from_ref(&sample));
    let other = Sample::new(2, 7, 5000);
    trial.disk.write_file(temporary_of(&other.name()), &other.encode());
    trial.disk.write_file("notes.txt", b"mine");
    trial.disk.write_file("ab/cd/notes.txt", b"mine");
    trial.disk.write_file(path_of(&other.name()).replace(".rec", ".bak"), b"mine");
    let opened = trial.reopen();
    assert_eq!((opened.recovery.records, opened.recovery.bad_count), (1, 0));
    assert!(trial.disk.files().iter().all(|(path, _)| !path.ends_with(".tmp")));
    assert_eq!(trial.disk.files().len(), 4, "what is not ours stays");
}

#[test]
fn damage_to_one_file_loses_one_record() {
    let mut trial = Trial::new(1, OPEN);
    let samples = samples(0..5, 5000);
    trial.write_ok(&samples);
    let path = path_of(&samples[2].name());
    let whole = trial.disk.read_file(&path);
    for len in [0, 1, 4095, 4096, 5000, 8192, 12287] {
        trial.disk.write_file(&path, &whole[..len]);
        let opened = trial.reopen();
        assert_eq!((opened.recovery.records, opened.recovery.bad_count), (4, 1), "cut to {len}");
        assert_eq!(opened.recovery.bad[0].file, path);
    }
    // It is the first to go, and in nobody's way.
    let used = trial.backend.usage().bytes;
    let eviction = trial.backend.prepare_eviction(1).expect("there is something");
    assert_eq!((eviction.names.len(), eviction.bytes), (0, 12287));
    trial.backend.finish_eviction(&mut *trial.queue, eviction);
    assert_eq!(used - trial.backend.usage().bytes, 12287);
    trial.write_ok(&samples[2..3]);
    trial.assert_there(&samples[2]);
}

#[test]
fn a_file_under_another_name_is_no_record() {
    let mut trial = Trial::new(1, OPEN);
    let samples = samples(0..2, 5000);
    trial.write_ok(&samples[..1]);
    trial.disk.write_file(path_of(&samples[1].name()), &samples[0].encode());
    let opened = trial.reopen();
    assert_eq!((opened.recovery.records, opened.recovery.bad_count), (1, 1));
    // What is there is replaced.
    trial.write_ok(&samples[1..]);
    trial.assert_there(&samples[1]);
    assert_eq!(trial.backend.usage().bytes, 2 * 12288);
}

#[test]
fn what_is_written_again_while_it_is_evicted_stays() {
    let mut trial = Trial::new(1, OPEN);
    let samples = samples(0..2, 5000);
    trial.write_ok(&samples);
    let eviction = trial.backend.prepare_eviction(1).expect("there is something");
    assert_eq!(eviction.names, [samples[0].name()]);
    trial.write_ok(&samples[..1]);
    trial.backend.finish_eviction(&mut *trial.queue, eviction);
    trial.assert_there(&samples[0]);
    assert_eq!(trial.backend.usage().bytes, 2 * 12288);
    trial.restart();
    trial.assert_there(&samples[0]);
}

#[test]
fn few_files_stay_open() {
    let mut trial = Trial::new(1, OPEN);
    let samples = samples(0..20, 100);
    trial.write_ok(&samples);
    let backend = open_files(&mut trial);
    for sample in &samples {
        assert!(backend.locate(&sample.name()).is_some());
    }
    assert_eq!(backend.open_files.len(), CONFIG.open_files_max);
    let evicted = backend.prepare_eviction(u64::MAX).expect("all of them");
    assert_eq!(backend.open_files.len(), 0);
    backend.finish_eviction(&mut *trial.queue, evicted);
}

/// Failure: after a removal, a start without a crash and then a crash, the record was back. Cause: the start saw no file
/// and dropped the tombstone, but that the file was gone was never made durable. Fix: the directories of removed objects
/// are synced before their tombstones go.
#[test]
fn a_tombstone_stays_until_the_file_is_gone_for_good() {
    for seed in 0..40 {
        let mut trial = Trial::new(seed, OPEN);
        let samples = samples(0..3, 100);
        trial.write_ok(&samples);
        trial.remove(&samples[0]).expect("no faults");
        trial.reopen();
        let opened = trial.restart();
        assert_eq!(opened.recovery.records, 2, "seed {seed}");
    }
}

#[test]
fn failures_fail_alone_and_leave_nothing_behind() {
    for seed in 0..50 {
        let mut trial = Trial::new(seed, OPEN);
        trial.disk.set_faults(Faults {
            write_error_permille: 50,
            torn_write_permille: 50,
            sync_error_permille: 50,
            name_error_permille: 50,
            no_space_permille: 20,
            ..Faults::default()
        });
        let mut there = vec![];
        for round in 0..6 {
            let batch = samples(round * 10..round * 10 + 10, 3000);
            let results = trial.write(&batch);
            there.extend(
                batch.into_iter().zip(results).filter(|(_, result)| result.is_ok()).map(|(sample, _)| sample),
            );
        }
        trial.disk.set_faults(Faults::default());
        there.iter().for_each(|sample| trial.assert_there(sample));
        let on_disk: u64 = trial.disk.files().iter().map(|(_, len)| len).sum();
        assert!(on_disk <= trial.backend.usage().bytes, "seed {seed}: {on_disk}");
        trial.restart();
        there.iter().for_each(|sample| trial.assert_there(sample));
        trial.evict(u64::MAX);
        assert_eq!(trial.backend.usage().bytes, 0, "seed {seed}");
        assert_eq!(trial.disk.files(), [], "seed {seed}");
    }
}

#[test]
fn an_inspection_sees_all_and_changes_nothing() {
    let mut trial = Trial::new(1, OPEN);
    let samples = samples(0..6, 9000);
    trial.write_ok(&samples);
    trial.disk.flip_bit(path_of(&samples[1].name()), 4096 * 8);
    trial.disk.flip_bit(path_of(&samples[2].name()), 8);
    let before = trial.disk.files();
    let storage: Arc<dyn Storage> = Arc::new(trial.disk.clone());
    for (verify, expected) in [(false, [5, 1]), (true, [4, 2])] {
        let mut counts = [0; 2];
        let queue = &mut *trial.disk.queue(&QueueConfig::default());
        inspect(&storage, queue, verify, &mut |record: Inspected<'_>| {
            counts[usize::from(record.state != InspectedState::Ok)] += 1;
        })
        .expect("it can be read");
        assert_eq!(counts, expected);
    }
    assert_eq!(trial.disk.files(), before);
}
