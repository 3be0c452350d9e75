//! Conformance tests: rules for all backends. The tests of each backend run them with their own function to open.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use moontide_rt::SplitMix64;
use moontide_types::record::HEADER_BYTES;

use crate::backend::{Backend, OpenError, RecordId, Recovery, WriteError};
use crate::buffer::AlignedBuf;
use crate::os::{IoEngine, OsStorage};
use crate::read::{ReadError, ReadJob, read_records};
use crate::samples::SampleRecord;
use crate::simulated::{Faults, SimulatedDisk};
use crate::storage::{Queue, QueueConfig, Storage};

/// Result of opening a tier.
pub(super) struct Opened {
    pub(super) backend: Box<dyn Backend>,
    pub(super) recovery: Recovery,
    pub(super) found: BTreeMap<RecordId, (Vec<u8>, u64)>,
}

/// Opens a tier.
pub(super) type Open = fn(&Arc<dyn Storage>, &mut dyn Queue) -> Result<Opened, OpenError>;

/// A backend on a simulated disk.
pub(super) struct BackendHarness {
    pub(super) disk: SimulatedDisk,
    pub(super) queue: Box<dyn Queue>,
    pub(super) backend: Box<dyn Backend>,
    open: Open,
}

impl BackendHarness {
    pub(super) fn new(seed: u64, open: Open) -> BackendHarness {
        let disk = SimulatedDisk::new(seed);
        let mut queue = disk.queue(&QueueConfig::default());
        let storage: Arc<dyn Storage> = Arc::new(disk.clone());
        let backend = open(&storage, &mut *queue).expect("an empty disk without faults").backend;
        BackendHarness { disk, queue, backend, open }
    }

    /// Opens the tier again, as after an exit of the process.
    pub(super) fn reopen(&mut self) -> Opened {
        self.try_reopen().expect("no faults")
    }

    pub(super) fn try_reopen(&mut self) -> Result<Opened, OpenError> {
        self.queue = self.disk.queue(&QueueConfig::default());
        let storage: Arc<dyn Storage> = Arc::new(self.disk.clone());
        let mut opened = (self.open)(&storage, &mut *self.queue)?;
        std::mem::swap(&mut self.backend, &mut opened.backend);
        Ok(opened)
    }

    /// Crashes, and opens the tier again.
    pub(super) fn restart(&mut self) -> Opened {
        self.disk.restart();
        self.reopen()
    }

    pub(super) fn write(&mut self, samples: &[SampleRecord]) -> Vec<Result<(), WriteError>> {
        let sources: Vec<_> = samples.iter().map(SampleRecord::source).collect();
        self.backend.write(&mut *self.queue, &sources)
    }

    pub(super) fn write_ok(&mut self, samples: &[SampleRecord]) {
        assert_eq!(self.write(samples), vec![Ok(()); samples.len()]);
    }

    /// Reads a record; `None` if it cannot be found.
    pub(super) fn read(&mut self, name: &RecordId) -> Option<Result<AlignedBuf, ReadError>> {
        let location = self.backend.locate(name)?;
        let mut memory = AlignedBuf::zeroed(location.len as usize);
        let job = ReadJob::whole(*name, location, &mut memory);
        let result = read_records(&mut *self.queue, vec![job]).pop().expect("one job");
        Some(result.map(|_| memory))
    }

    /// Asserts that a record is stored with the right bytes.
    pub(super) fn assert_stored(&mut self, sample: &SampleRecord) {
        let read = self.read(&sample.name()).expect("it can be found").expect("it can be read");
        assert_eq!(&read[..], sample.encode(), "{:?}", sample.name());
    }

    pub(super) fn remove(&mut self, sample: &SampleRecord) -> io::Result<()> {
        let name = sample.name();
        self.backend.remove(&mut *self.queue, &[(name.id, name.version)])
    }

    pub(super) fn evict(&mut self, bytes: u64) -> Vec<RecordId> {
        let Some(eviction) = self.backend.prepare_eviction(bytes) else { return vec![] };
        let names = eviction.names.clone();
        let _ = self.backend.finish_eviction(&mut *self.queue, eviction); // the disk of a test may fail
        names
    }

    /// Returns the ids and keys of a scan, and the skipped records.
    fn scan(&mut self) -> (BTreeMap<RecordId, Vec<u8>>, Vec<RecordId>) {
        let mut scanned = BTreeMap::new();
        let skipped = self.backend.scan(&mut *self.queue, &mut |found| {
            assert!(
                scanned.insert(RecordId::of(found.header), found.key.to_vec()).is_none(),
                "scanned twice"
            );
        });
        (scanned, skipped)
    }
}

pub(super) fn samples(numbers: std::ops::Range<u64>, len: usize) -> Vec<SampleRecord> {
    numbers.map(|number| SampleRecord::new(number, 10 + number, len)).collect()
}

/// Runs all conformance tests.
pub(super) fn run_conformance(open: Open) {
    records_survive_restart(open);
    duplicate_record_is_not_written(open);
    removed_records_do_not_reappear(open);
    eviction_takes_oldest_records(open);
    full_tier_reports_needed_bytes(open);
    located_record_is_readable_after_eviction(open);
    corrupt_record_can_be_rewritten(open);
    records_of_earlier_header_version_are_reported_and_not_found(open);
    scan_returns_exactly_the_stored_records(open);
    concurrent_operations_are_isolated(open);
    temporarily_unreadable_records_are_not_lost(open);
}

/// Runs on files of the operating system: direct I/O requires alignment.
pub(super) fn run_on_real_disk(open: Open, name: &str) {
    let root = std::env::temp_dir().join(format!("moontide-disk-{name}-{}", std::process::id()));
    for engine in [IoEngine::Posix, IoEngine::Auto] {
        let storage: Arc<dyn Storage> = Arc::new(OsStorage::open(&root, engine).expect("a directory"));
        let queue = &mut *storage.queue(&QueueConfig::default());
        let samples = [0, 700, 5000, 100_000, 300_000].into_iter().zip(0..);
        let samples: Vec<SampleRecord> =
            samples.map(|(len, number)| SampleRecord::with_key(number, 5, len, b"k", &[], 0)).collect();
        let sources: Vec<_> = samples.iter().map(SampleRecord::source).collect();
        let backend = open(&storage, queue).expect("an empty tier").backend;
        assert_eq!(backend.write(queue, &sources), [Ok(()); 5]);
        let gone = samples[1].name();
        backend.remove(queue, &[(gone.id, gone.version)]).expect("no faults");
        for _ in 0..3 {
            let Opened { backend, recovery, .. } = open(&storage, queue).expect("the tier again");
            assert_eq!((recovery.records, recovery.bad_count), (4, 0), "{recovery:?}");
            for sample in samples.iter().filter(|sample| sample.name() != gone) {
                let location = backend.locate(&sample.name()).expect("it is stored");
                let mut memory = AlignedBuf::zeroed(location.len as usize);
                let job = ReadJob::whole(sample.name(), location, &mut memory);
                assert!(read_records(queue, vec![job])[0].is_ok());
                assert_eq!(&memory[..], sample.encode());
            }
        }
        let eviction = backend.prepare_eviction(u64::MAX).expect("records to evict");
        backend.finish_eviction(queue, eviction).unwrap();
        drop(backend);
        assert_eq!(open(&storage, queue).expect("the tier again").recovery.records, 0);
        std::fs::remove_dir_all(&root).expect("a directory of this test");
    }
}

fn records_survive_restart(open: Open) {
    let mut harness = BackendHarness::new(1, open);
    let lens = [0, 1, 511, 3000, 4095, 4096, 4097, 100_000, 300_000];
    let samples: Vec<SampleRecord> = lens
        .iter()
        .zip(0..)
        .map(|(&len, number)| SampleRecord::with_key(number, 5, len, b"k", &[], 64))
        .collect();
    harness.write_ok(&samples);
    for restarted in [false, true] {
        samples.iter().for_each(|sample| harness.assert_stored(sample));
        assert_eq!(harness.backend.usage().records, samples.len() as u64);
        if !restarted {
            let before = harness.backend.usage();
            let opened = harness.restart();
            assert_eq!(opened.recovery.records, samples.len() as u64);
            assert_eq!(opened.recovery.bad_count, 0, "{:?}", opened.recovery);
            assert_eq!(opened.found.len(), samples.len());
            for sample in &samples {
                let layout = crate::record::DiskLayout::of(&sample.header);
                assert_eq!(opened.found[&sample.name()], (sample.key().to_vec(), layout.len));
            }
            assert_eq!(harness.backend.usage(), before);
        }
    }
}

fn duplicate_record_is_not_written(open: Open) {
    let mut harness = BackendHarness::new(2, open);
    let sample = || SampleRecord::new(1, 7, 5000);
    assert_eq!(harness.write(&[sample(), sample()]), [Ok(()), Err(WriteError::Exists)]);
    assert_eq!(harness.write(&[sample()]), [Err(WriteError::Exists)]);
    assert_eq!(
        harness.write(&[SampleRecord::new(1, 6, 100)]),
        [Err(WriteError::Exists)],
        "a newer version exists"
    );
    assert_eq!(harness.write(&[SampleRecord::new(1, 8, 100)]), [Ok(())]);
    let mut wrong = SampleRecord::new(2, 1, 100);
    wrong.header.root ^= 1;
    assert_eq!(harness.write(&[wrong, SampleRecord::new(3, 1, 100)]), [Err(WriteError::Corrupt), Ok(())]);
    harness.restart();
    assert_eq!(harness.write(&[sample(), SampleRecord::new(4, 1, 1)]), [Err(WriteError::Exists), Ok(())]);
}

fn removed_records_do_not_reappear(open: Open) {
    for seed in 0..20 {
        let mut harness = BackendHarness::new(seed, open);
        let samples = samples(0..8, 9000);
        harness.write_ok(&samples);
        for sample in &samples[..4] {
            harness.remove(sample).expect("no faults");
            assert!(harness.read(&sample.name()).is_none());
        }
        assert_eq!(harness.write(&samples[..1]), [Err(WriteError::Removed)]);
        harness.write_ok(&[SampleRecord::new(1, 100, 200)]);
        for round in 0..3 {
            let opened = harness.restart();
            assert_eq!(opened.recovery.records, 5, "seed {seed}, round {round}");
            samples[..4].iter().for_each(|sample| assert!(harness.read(&sample.name()).is_none()));
            samples[4..].iter().for_each(|sample| harness.assert_stored(sample));
        }
    }
}

fn eviction_takes_oldest_records(open: Open) {
    let mut harness = BackendHarness::new(3, open);
    let samples = samples(0..10, 10_000);
    harness.write_ok(&samples);
    let before = harness.backend.usage();
    let names = harness.evict(2 * 16384);
    assert_eq!(names, [samples[0].name(), samples[1].name()]);
    let after = harness.backend.usage();
    assert_eq!((after.records, before.bytes - after.bytes), (8, 2 * 16384));
    assert!(harness.read(&samples[0].name()).is_none());
    harness.write_ok(&samples[..1]);
    assert_eq!(harness.evict(1), [samples[2].name()], "a rewritten record is the newest");
    harness.reopen();
    assert_eq!(harness.evict(u64::MAX).len(), 8);
    assert_eq!(harness.backend.usage().records, 0);
    assert!(harness.backend.prepare_eviction(1).is_none());
    assert_eq!(harness.restart().recovery.bad_count, 0);
}

fn full_tier_reports_needed_bytes(open: Open) {
    let mut harness = BackendHarness::new(4, open);
    let limit = harness.backend.usage().limit;
    let mut number = 0;
    let full = loop {
        let batch = samples(number..number + 3, 60_000);
        number += 3;
        let results = harness.write(&batch);
        if results.contains(&Ok(())) && !results.iter().any(Result::is_err) {
            continue;
        }
        break (batch, results);
    };
    let (batch, results) = full;
    let needed: Vec<u64> = results
        .iter()
        .filter_map(|result| match result {
            Err(WriteError::Full { needed }) => Some(*needed),
            Ok(()) => None,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(needed.is_sorted(), "shortages add up: {needed:?}");
    assert!(harness.backend.usage().bytes <= limit);
    let refused: Vec<SampleRecord> =
        batch.into_iter().filter(|sample| !harness.backend.contains(&sample.name())).collect();
    assert_eq!(refused.len(), needed.len());
    let mut left = refused;
    for _ in 0..10 {
        harness.evict(*needed.last().expect("the tier was full"));
        harness.write(&left);
        left.retain(|sample| !harness.backend.contains(&sample.name()));
        if left.is_empty() {
            break;
        }
    }
    assert!(left.is_empty(), "{} records are still refused after ten evictions", left.len());
    assert!(harness.backend.usage().bytes <= limit);
    let huge = SampleRecord::new(u64::MAX, 1, limit as usize);
    assert!(matches!(harness.write(&[huge])[..], [Err(WriteError::TooLarge { .. })]));
}

/// Records are evicted and removed, and their space is reused, while a reader holds their locations.
fn located_record_is_readable_after_eviction(open: Open) {
    let mut harness = BackendHarness::new(5, open);
    let samples = samples(0..4, 50_000);
    harness.write_ok(&samples);
    let held: Vec<_> =
        samples.iter().map(|sample| harness.backend.locate(&sample.name()).expect("it is stored")).collect();
    harness.remove(&samples[0]).expect("no faults");
    assert_eq!(harness.evict(u64::MAX).len(), 3);
    for number in 100..140 {
        let sample = SampleRecord::new(number, 1, 50_000);
        if harness.write(std::slice::from_ref(&sample)) != [Ok(())] {
            harness.evict(60_000);
        }
    }
    for (sample, location) in samples.iter().zip(held) {
        let mut memory = AlignedBuf::zeroed(location.len as usize);
        let job = ReadJob::whole(sample.name(), location, &mut memory);
        assert!(read_records(&mut *harness.queue, vec![job])[0].is_ok(), "its range was reused");
        assert_eq!(&memory[..], sample.encode());
    }
}

fn corrupt_record_can_be_rewritten(open: Open) {
    let mut harness = BackendHarness::new(6, open);
    let samples = samples(0..3, 20_000);
    harness.write_ok(&samples);
    harness.backend.drop_corrupt(&samples[1].name());
    assert!(!harness.backend.contains(&samples[1].name()));
    harness.write_ok(&samples[1..2]);
    harness.assert_stored(&samples[1]);
    for _ in 0..10 {
        harness.restart();
        samples.iter().for_each(|sample| harness.assert_stored(sample));
    }
    assert_eq!(harness.backend.usage().records, 3);
}

/// The ids of records of header version 1 were computed in another way.
fn records_of_earlier_header_version_are_reported_and_not_found(open: Open) {
    let mut harness = BackendHarness::new(7, open);
    let samples = samples(0..3, 9000);
    harness.write_ok(&samples);
    assert_eq!(harness.restart().recovery.records, 3);
    for (path, _) in harness.disk.files() {
        let mut bytes = harness.disk.read_file(&path);
        let headers: Vec<usize> = bytes
            .windows(6)
            .enumerate()
            .filter(|(_, start)| start == b"MTRC\x02\x00")
            .map(|(at, _)| at)
            .collect();
        for at in headers {
            let header: &mut [u8; HEADER_BYTES] = bytes[at..].first_chunk_mut().expect("a whole header");
            header[4] = 1;
            crate::fuzzing::fix_header_crc(header).expect("a whole header");
        }
        harness.disk.write_file(&path, &bytes);
    }
    let opened = harness.restart();
    assert!(opened.found.is_empty() && opened.recovery.records == 0 && opened.recovery.bad_count > 0);
    let reasons: Vec<&str> = opened.recovery.bad.iter().map(|bad| &*bad.reason).collect();
    let reason = "header version 1, this release reads 2";
    assert!(reasons.contains(&reason), "{reasons:?}");
    assert!(samples.iter().all(|sample| harness.backend.locate(&sample.name()).is_none()));
}

fn scan_returns_exactly_the_stored_records(open: Open) {
    for seed in 0..20 {
        let mut rng = SplitMix64::new(seed);
        let mut harness = BackendHarness::new(seed, open);
        let mut written: BTreeMap<RecordId, Vec<u8>> = BTreeMap::new();
        for round in 0..60 {
            match rng.below(10) {
                0 => {
                    let sample = SampleRecord::new(rng.below(40), 1 + rng.below(5), 1);
                    harness.remove(&sample).expect("no faults");
                }
                1 => drop(harness.evict(rng.below(100_000))),
                2 => drop(harness.reopen()),
                3 => harness
                    .backend
                    .drop_corrupt(&SampleRecord::new(rng.below(40), 1 + rng.below(5), 1).name()),
                _ => {
                    let batch: Vec<SampleRecord> = (0..rng.below(4))
                        .map(|_| {
                            SampleRecord::new(rng.below(40), 1 + rng.below(5), rng.below(20_000) as usize)
                        })
                        .collect();
                    let results = harness.write(&batch);
                    for (sample, _) in batch.iter().zip(&results).filter(|(_, result)| result.is_ok()) {
                        written.insert(sample.name(), sample.key().to_vec());
                    }
                }
            }
            let (scanned, skipped) = harness.scan();
            let contained: BTreeMap<RecordId, Vec<u8>> =
                written.clone().into_iter().filter(|(name, _)| harness.backend.contains(name)).collect();
            assert_eq!((scanned, skipped), (contained, vec![]), "seed {seed}, round {round}");
        }
    }
}

fn concurrent_operations_are_isolated(open: Open) {
    let mut harness = BackendHarness::new(7, open);
    let backend = &*harness.backend;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let disk = harness.disk.clone();
            scope.spawn(move || {
                let queue = &mut *disk.queue(&QueueConfig::default());
                let mut rng = SplitMix64::new(thread);
                for _ in 0..60 {
                    // All threads write the same records.
                    let batch: Vec<SampleRecord> =
                        (0..3).map(|_| SampleRecord::new(rng.below(30), 1, 6000)).collect();
                    let sources: Vec<_> = batch.iter().map(SampleRecord::source).collect();
                    for result in backend.write(queue, &sources) {
                        assert!(matches!(result, Ok(()) | Err(WriteError::Exists | WriteError::Full { .. })));
                    }
                    if rng.below(4) == 0
                        && let Some(eviction) = backend.prepare_eviction(20_000)
                    {
                        backend.finish_eviction(queue, eviction).unwrap();
                    }
                    for sample in &batch {
                        let Some(location) = backend.locate(&sample.name()) else { continue };
                        let mut memory = AlignedBuf::zeroed(location.len as usize);
                        let job = ReadJob::whole(sample.name(), location, &mut memory);
                        assert_eq!(read_records(queue, vec![job])[0].map(|_| ()), Ok(()));
                    }
                }
            });
        }
    });
    let all: Vec<SampleRecord> = (0..30).map(|number| SampleRecord::new(number, 1, 6000)).collect();
    let stored = |harness: &BackendHarness| -> Vec<bool> {
        all.iter().map(|sample| harness.backend.contains(&sample.name())).collect()
    };
    let before = stored(&harness);
    harness.reopen();
    assert_eq!(stored(&harness), before);
    for (sample, is_stored) in all.iter().zip(before) {
        if is_stored {
            harness.assert_stored(sample);
        }
    }
}

/// A start with read errors finds as many records as possible; the next one finds the rest.
fn temporarily_unreadable_records_are_not_lost(open: Open) {
    let mut missed = 0;
    for seed in 0..20 {
        let mut harness = BackendHarness::new(seed, open);
        let samples = samples(0..30, 5000);
        harness.write_ok(&samples);
        let faults = Faults { read_error_permille: 400, flipped_read_permille: 200, ..Faults::default() };
        harness.disk.set_faults(faults);
        let opened = harness.try_reopen();
        harness.disk.set_faults(Faults::default());
        if let Ok(opened) = opened {
            missed += 30 - opened.recovery.records;
            // The space of the unreadable records is not reused.
            let more: Vec<SampleRecord> =
                (100..120).map(|number| SampleRecord::new(number, 1, 5000)).collect();
            harness.write(&more);
        }
        harness.restart();
        samples.iter().for_each(|sample| harness.assert_stored(sample));
    }
    assert!(missed > 0, "too few read errors for this test");
}
