//! The bucket backend without crashes; crash tests are in `tests/crash.rs`.

use std::collections::BTreeSet;

use moontide_rt::SplitMix64;

use super::*;
use crate::backend::{OpenError, Recovery};
use crate::buffer::AlignedBuf;
use crate::read::{ReadJob, read_records};
use crate::record::{InspectedRecord, InspectedState};
use crate::samples::{SampleRecord, id};
use crate::simulated::{Faults, SimulatedDisk};
use crate::storage::QueueConfig;

fn config(limit_bytes: u64) -> BucketConfig {
    BucketConfig {
        bucket_bytes_max: 1 << 18,
        bucket_records_max: 16,
        ..BucketConfig::with_limit(limit_bytes)
    }
}

struct Tier {
    disk: SimulatedDisk,
    queue: Box<dyn Queue>,
    backend: BucketBackend,
    recovery: Recovery,
    found: Vec<RecordId>,
}

fn open(disk: &SimulatedDisk, config: BucketConfig) -> Tier {
    let mut queue = disk.queue(&QueueConfig::default());
    let mut found = vec![];
    let mut each = |record: ScannedRecord<'_>| found.push(RecordId::of(record.header));
    let (backend, recovery) =
        BucketBackend::open(Arc::new(disk.clone()), &mut *queue, config, &mut each).unwrap();
    Tier { disk: disk.clone(), queue, backend, recovery, found }
}

impl Tier {
    fn write(&mut self, samples: &[SampleRecord]) -> Vec<Result<(), WriteError>> {
        let sources: Vec<_> = samples.iter().map(SampleRecord::source).collect();
        self.backend.write(&mut *self.queue, &sources)
    }

    fn write_all(&mut self, samples: &[SampleRecord]) {
        assert!(self.write(samples).iter().all(Result::is_ok));
    }

    fn remove(&mut self, number: u64, version: u64) {
        let names = [(id(number), Epoch::from_bits(version).unwrap())];
        self.backend.remove(&mut *self.queue, &names).unwrap();
    }

    /// Whether a record is found; then its bytes must be right.
    fn has(&mut self, sample: &SampleRecord) -> bool {
        let Some(location) = self.backend.locate(&sample.name()) else { return false };
        self.read(sample, location);
        true
    }

    fn read(&mut self, sample: &SampleRecord, location: RecordLocation) {
        let mut memory = AlignedBuf::zeroed(location.len as usize);
        let job = ReadJob::whole(sample.name(), location, &mut memory);
        let header = read_records(&mut *self.queue, vec![job]).pop().unwrap().unwrap();
        assert_eq!(&memory[header.payload_offset as usize..][..sample.payload().len()], sample.payload());
    }

    fn evict(&mut self, bytes: u64) -> Vec<RecordId> {
        let Some(eviction) = self.backend.prepare_eviction(bytes) else { return vec![] };
        let names = eviction.names.clone();
        let _ = self.backend.finish_eviction(&mut *self.queue, eviction);
        names
    }

    fn files(&self) -> Vec<String> {
        self.disk.files().into_iter().map(|(name, _)| name).collect()
    }

    fn bytes_on_disk(&self) -> u64 {
        self.disk.files().iter().map(|(_, len)| len).sum()
    }
}

fn batch(numbers: std::ops::Range<u64>, len: usize) -> Vec<SampleRecord> {
    numbers.map(|number| SampleRecord::new(number, 1, len)).collect()
}

#[test]
fn records_survive_restart() {
    let disk = SimulatedDisk::new(1);
    let samples: Vec<SampleRecord> =
        (0..50).map(|n| SampleRecord::new(n, n + 1, (n * n * 30) as usize)).collect();
    let mut tier = open(&disk, config(1 << 30));
    tier.write_all(&samples);
    assert!(samples.iter().all(|sample| tier.has(sample)));
    let usage = tier.backend.usage();
    assert_eq!((usage.records, usage.bytes), (50, tier.bytes_on_disk()));
    disk.restart();
    let mut tier = open(&disk, config(1 << 30));
    assert!(samples.iter().all(|sample| tier.has(sample)));
    assert_eq!((tier.backend.usage(), tier.recovery.records, tier.recovery.bad_count), (usage, 50, 0));
    let found: BTreeSet<_> = tier.found.iter().copied().collect();
    assert_eq!((found.len(), tier.found.len()), (50, 50));
    // Numbers continue after the last one.
    let before = tier.files();
    tier.write_all(&batch(100..101, 10));
    let new = tier.files().into_iter().find(|name| !before.contains(name)).unwrap();
    assert!(before.iter().all(|name| *name < new), "{new} after {before:?}");
}

#[test]
fn duplicate_or_older_record_write_returns_exists() {
    let disk = SimulatedDisk::new(1);
    let mut tier = open(&disk, config(1 << 30));
    let twice = [SampleRecord::new(1, 5, 100), SampleRecord::new(1, 5, 100), SampleRecord::new(2, 1, 100)];
    assert_eq!(tier.write(&twice), [Ok(()), Err(WriteError::Exists), Ok(())]);
    assert_eq!(
        tier.write(&[SampleRecord::new(1, 4, 100)]),
        [Err(WriteError::Exists)],
        "a newer version exists"
    );
    assert_eq!(tier.write(&[SampleRecord::new(1, 6, 100)]), [Ok(())]);
    assert!(tier.has(&SampleRecord::new(1, 5, 100)) && tier.has(&SampleRecord::new(1, 6, 100)));
}

#[test]
fn removed_records_remain_removed_after_restart() {
    let disk = SimulatedDisk::new(1);
    let mut tier = open(&disk, config(1 << 30));
    let samples = batch(0..8, 5000);
    tier.write_all(&samples);
    tier.remove(3, 1);
    tier.remove(77, 4);
    assert!(!tier.has(&samples[3]) && tier.has(&samples[4]));
    assert_eq!(tier.write(&batch(3..4, 5000)), [Err(WriteError::Removed)]);
    assert_eq!(
        tier.write(&[SampleRecord::new(77, 4, 9)]),
        [Err(WriteError::Removed)],
        "also without an earlier write"
    );
    disk.restart();
    let mut tier = open(&disk, config(1 << 30));
    assert_eq!((tier.recovery.removed, tier.recovery.records), (1, 7));
    assert!(!tier.has(&samples[3]) && tier.has(&samples[4]));
    assert_eq!(tier.write(&[SampleRecord::new(3, 2, 5000)]), [Ok(())], "a newer version is not removed");
    for number in 0..8 {
        tier.remove(number, 1);
    }
    assert_eq!(
        tier.files().iter().filter(|name| name.ends_with(".bucket")).count(),
        1,
        "an empty bucket is deleted"
    );
    assert_eq!(tier.backend.usage().bytes, tier.bytes_on_disk());
}

#[test]
fn eviction_frees_space_and_usage_is_within_limit() {
    for eviction_policy in [EvictionPolicy::Fifo, EvictionPolicy::Lru] {
        let disk = SimulatedDisk::new(1);
        let mut tier = open(&disk, BucketConfig { eviction_policy, ..config(1 << 20) });
        let first = batch(0..16, 12_000);
        let second = batch(16..32, 12_000);
        tier.write_all(&first);
        tier.write_all(&second);
        assert!(tier.has(&first[0]));
        let third = batch(32..80, 12_000);
        let results = tier.write(&third);
        let written = results.iter().filter(|result| result.is_ok()).count();
        assert!(written > 8 && written < 48, "{written} fit");
        assert!(tier.backend.usage().bytes <= 1 << 20 && tier.backend.usage().bytes == tier.bytes_on_disk());
        let Some(&Err(WriteError::Full { needed })) = results.iter().rfind(|result| result.is_err()) else {
            panic!()
        };
        let gone = tier.evict(needed);
        let expected = match eviction_policy {
            EvictionPolicy::Fifo => &first[0],
            EvictionPolicy::Lru => &second[0],
        };
        assert_eq!(gone.iter().min(), gone.iter().filter(|name| !tier.backend.contains(name)).min());
        assert!(gone.contains(&expected.name()), "{eviction_policy:?}");
        let left: Vec<SampleRecord> =
            third.into_iter().zip(&results).filter(|(_, r)| r.is_err()).map(|(s, _)| s).collect();
        tier.write_all(&left);
        assert!(tier.backend.usage().bytes <= 1 << 20 && tier.backend.usage().bytes == tier.bytes_on_disk());
        let all = tier.evict(u64::MAX);
        assert!(!all.is_empty() && tier.bytes_on_disk() == 0 && tier.backend.prepare_eviction(1).is_none());
    }
}

#[test]
fn large_record_gets_its_own_bucket_and_too_large_is_rejected() {
    let disk = SimulatedDisk::new(1);
    let mut tier = open(&disk, config(1 << 20));
    let samples = [
        SampleRecord::new(1, 1, 100),
        SampleRecord::new(2, 1, 600_000),
        SampleRecord::new(3, 1, 100),
        SampleRecord::new(4, 1, 2 << 20),
    ];
    let results = tier.write(&samples);
    assert_eq!(results[..3], [Ok(()); 3]);
    assert!(matches!(results[3], Err(WriteError::TooLarge { .. })), "{results:?}");
    assert_eq!(tier.files().len(), 3);
    assert!(tier.has(&samples[1]));
}

#[test]
fn located_record_is_readable_after_eviction_and_removal() {
    let disk = SimulatedDisk::new(1);
    let mut tier = open(&disk, BucketConfig { open_files_max: 2, ..config(1 << 30) });
    let samples: Vec<SampleRecord> = (0..6).map(|n| SampleRecord::new(n, 1, 200_000)).collect();
    tier.write_all(&samples);
    assert!(tier.files().len() == 6 && tier.backend.files.len() == 2, "limit of open files");
    let locations: Vec<_> =
        samples.iter().map(|sample| tier.backend.locate(&sample.name()).unwrap()).collect();
    tier.evict(u64::MAX);
    tier.remove(2, 1);
    assert_eq!((tier.backend.files.len(), tier.backend.usage().records), (0, 0));
    for (sample, location) in samples.iter().zip(locations) {
        tier.read(sample, location);
        assert!(!tier.has(sample));
    }
}

#[test]
fn failed_bucket_write_leaves_no_files_or_usage() {
    for (faults, expected) in [
        (Faults { sync_error_permille: 1000, ..Faults::default() }, WriteError::Io),
        (Faults { write_error_permille: 1000, ..Faults::default() }, WriteError::Io),
        (Faults { capacity: Some(100_000), ..Faults::default() }, WriteError::NoSpace),
    ] {
        let disk = SimulatedDisk::new(1);
        let mut tier = open(&disk, config(1 << 30));
        tier.write_all(&batch(0..4, 5000));
        let before = (tier.backend.usage(), tier.files());
        disk.set_faults(faults);
        let samples = batch(10..20, 20_000);
        assert!(tier.write(&samples).iter().all(|result| *result == Err(expected)), "{expected:?}");
        assert_eq!((tier.backend.usage(), tier.files()), before);
        disk.set_faults(Faults::default());
        tier.write_all(&samples);
    }
}

#[test]
fn failed_file_deletion_is_retried_by_next_eviction() {
    let disk = SimulatedDisk::new(1);
    let mut tier = open(&disk, config(1 << 30));
    tier.write_all(&batch(0..4, 5000));
    disk.set_faults(Faults { name_error_permille: 1000, ..Faults::default() });
    assert_eq!(tier.evict(1).len(), 4);
    assert!(tier.backend.usage().bytes > 0 && tier.backend.usage().records == 0);
    disk.set_faults(Faults::default());
    assert_eq!(tier.evict(1).len(), 0);
    assert_eq!((tier.backend.usage().bytes, tier.bytes_on_disk()), (0, 0));
}

#[test]
fn tombstones_are_dropped_when_no_file_needs_them() {
    let disk = SimulatedDisk::new(1);
    let mut tier = open(&disk, config(1 << 30));
    tier.write_all(&batch(0..10, 100));
    tier.remove(0, 1);
    for number in 1000..2000 {
        tier.remove(number, 1);
    }
    assert!(tier.backend.tombstones.log_bytes() < 2 << 20, "1,001 removals of one block each would be 4 MiB");
    assert!(tier.backend.tombstones.len() < 800, "{}", tier.backend.tombstones.len());
    let name = SampleRecord::new(0, 1, 100).name();
    assert!(tier.backend.tombstones.covers(&name.id, name.version), "its record is still in a file");
    disk.restart();
    assert!(!open(&disk, config(1 << 30)).has(&SampleRecord::new(0, 1, 100)));
}

#[test]
fn scan_returns_exactly_the_stored_records() {
    for seed in 0..20 {
        let mut rng = SplitMix64::new(seed);
        let disk = SimulatedDisk::new(seed);
        let mut tier = open(&disk, config(600_000));
        let mut written = vec![];
        for round in 0..40 {
            match rng.below(4) {
                0 | 1 => {
                    let first = round * 100;
                    let samples = batch(first..first + 1 + rng.below(20), rng.below(9000) as usize);
                    tier.write(&samples);
                    written.extend(samples.iter().map(SampleRecord::name));
                }
                2 => tier.remove(rng.below(round + 1) * 100 + rng.below(20), 1),
                _ => _ = tier.evict(rng.below(200_000)),
            }
        }
        let mut scanned = BTreeSet::new();
        let missed = tier.backend.scan(&mut *tier.queue, &mut |found| {
            assert!(scanned.insert(RecordId::of(found.header)), "seed {seed}: scanned twice");
        });
        let present: BTreeSet<_> = written.into_iter().filter(|name| tier.backend.contains(name)).collect();
        assert_eq!((scanned, missed), (present.clone(), vec![]), "seed {seed}");
        disk.set_faults(Faults { read_error_permille: 1000, ..Faults::default() });
        let missed = tier.backend.scan(&mut *tier.queue, &mut |_| panic!());
        assert_eq!(missed.into_iter().collect::<BTreeSet<_>>(), present);
    }
}

#[test]
fn inspection_lists_all_records_without_modifying_files() {
    let disk = SimulatedDisk::new(1);
    let mut tier = open(&disk, config(1 << 30));
    tier.write_all(&batch(0..4, 5000));
    tier.remove(1, 1);
    disk.write_file("00000000000000ff.tmp", b"half");
    // In the payload of record 2: each record has three blocks, and the payload starts with the second.
    disk.flip_bit("0000000000000000.bucket", (2 * 12_288 + 5000) * 8);
    let before: Vec<_> = disk.files();
    let storage: Arc<dyn Storage> = Arc::new(disk.clone());
    for verify in [false, true] {
        let mut states = vec![];
        inspect(&storage, &mut *tier.queue, verify, &mut |record: InspectedRecord<'_>| {
            let (_, section) = record.name.unwrap();
            assert_eq!(section.key.as_bytes(), format!("key-{}", states.len()).as_bytes());
            states.push(record.state);
        })
        .unwrap();
        let corrupt = matches!(states[2], InspectedState::Corrupt { .. });
        assert_eq!((states.len(), corrupt), (4, verify));
        assert_eq!((&states[0], &states[1]), (&InspectedState::Ok, &InspectedState::Removed));
    }
    assert_eq!(disk.files(), before);
}

#[test]
fn open_rejects_invalid_config_and_foreign_file() {
    let disk = SimulatedDisk::new(1);
    let queue = &mut *disk.queue(&QueueConfig::default());
    let bad = BucketConfig { bucket_records_max: 0, ..config(1 << 30) };
    let error = BucketBackend::open(Arc::new(disk.clone()), queue, bad, &mut |_| ()).unwrap_err();
    assert!(matches!(error, OpenError::Config { what: "bucket_records_max", .. }), "{error}");
    disk.write_file("ffffffffffffffff.bucket", b"");
    let error = BucketBackend::open(Arc::new(disk.clone()), queue, config(1 << 30), &mut |_| ()).unwrap_err();
    assert!(matches!(error, OpenError::Foreign { .. }), "{error}");
}

#[test]
fn concurrent_operations_keep_usage_consistent() {
    let disk = SimulatedDisk::new(1);
    let tier = open(&disk, config(2 << 20));
    let backend = &tier.backend;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let disk = &disk;
            scope.spawn(move || {
                let mut rng = SplitMix64::new(thread);
                let mut queue = disk.queue(&QueueConfig::default());
                for round in 0..60 {
                    let samples = batch(rng.below(50)..60, 3000);
                    let sources: Vec<_> = samples.iter().map(SampleRecord::source).collect();
                    let results = backend.write(&mut *queue, &sources);
                    let full = results.iter().any(|result| matches!(result, Err(WriteError::Full { .. })));
                    let eviction = (full || round % 7 == 0).then(|| backend.prepare_eviction(300_000));
                    if let Some(eviction) = eviction.flatten() {
                        backend.finish_eviction(&mut *queue, eviction).unwrap();
                    }
                    for sample in &samples {
                        let Some(location) = backend.locate(&sample.name()) else { continue };
                        let mut memory = AlignedBuf::zeroed(location.len as usize);
                        let job = ReadJob::whole(sample.name(), location, &mut memory);
                        assert!(read_records(&mut *queue, vec![job])[0].is_ok());
                    }
                    let names = [(id(rng.below(60)), Epoch::from_bits(u64::from(round % 20 == 0)).unwrap())];
                    backend.remove(&mut *queue, &names).unwrap();
                    assert!(backend.usage().bytes <= (2 << 20) + (1 << 20), "limit plus the tombstone log");
                }
            });
        }
    });
    assert_eq!(backend.usage().bytes, tier.bytes_on_disk());
    let mut scanned = 0;
    assert_eq!(backend.scan(&mut *disk.queue(&QueueConfig::default()), &mut |_| scanned += 1), []);
    assert_eq!(scanned, backend.usage().records);
}
