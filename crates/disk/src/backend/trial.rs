//! What must hold for a backend whatever it is like inside: tests that those of the backends run with their own way of
//! opening.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use crate::backend::{Backend, OpenError, RecordName, Recovery, WriteError};
use crate::buffer::Aligned;
use crate::os::{EngineChoice, OsStorage};
use crate::read::{ReadError, ReadJob, read_records};
use crate::samples::{Random, Sample};
use crate::simulated::{Faults, SimulatedDisk};
use crate::storage::{Queue, QueueConfig, Storage};

/// What an opening found.
pub(super) struct Opened {
    pub(super) backend: Box<dyn Backend>,
    pub(super) recovery: Recovery,
    pub(super) found: BTreeMap<RecordName, (Vec<u8>, u64)>,
}

/// Opens a tier.
pub(super) type Open = fn(&Arc<dyn Storage>, &mut dyn Queue) -> Result<Opened, OpenError>;

/// A backend on a simulated disk.
pub(super) struct Trial {
    pub(super) disk: SimulatedDisk,
    pub(super) queue: Box<dyn Queue>,
    pub(super) backend: Box<dyn Backend>,
    open: Open,
}

impl Trial {
    pub(super) fn new(seed: u64, open: Open) -> Trial {
        let disk = SimulatedDisk::new(seed);
        let mut queue = disk.queue(&QueueConfig::default());
        let storage: Arc<dyn Storage> = Arc::new(disk.clone());
        let backend = open(&storage, &mut *queue).expect("an empty disk without faults").backend;
        Trial { disk, queue, backend, open }
    }

    /// Opens the tier again, as after the process has ended.
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

    /// The power goes, and the tier is opened again.
    pub(super) fn restart(&mut self) -> Opened {
        self.disk.restart();
        self.reopen()
    }

    pub(super) fn write(&mut self, samples: &[Sample]) -> Vec<Result<(), WriteError>> {
        let sources: Vec<_> = samples.iter().map(Sample::source).collect();
        self.backend.write(&mut *self.queue, &sources)
    }

    pub(super) fn write_ok(&mut self, samples: &[Sample]) {
        assert_eq!(self.write(samples), vec![Ok(()); samples.len()]);
    }

    /// Reads a record; None if it cannot be found.
    pub(super) fn read(&mut self, name: &RecordName) -> Option<Result<Aligned, ReadError>> {
        let location = self.backend.locate(name)?;
        let mut memory = Aligned::zeroed(location.len as usize);
        let job = ReadJob { name: *name, location, into: &mut memory };
        let result = read_records(&mut *self.queue, vec![job]).pop().expect("one job");
        Some(result.map(|_| memory))
    }

    /// Asserts that a record is there, byte by byte.
    pub(super) fn assert_there(&mut self, sample: &Sample) {
        let read = self.read(&sample.name()).expect("it can be found").expect("it can be read");
        assert_eq!(&read[..], sample.encode(), "{:?}", sample.name());
    }

    pub(super) fn remove(&mut self, sample: &Sample) -> io::Result<()> {
        let name = sample.name();
        self.backend.remove(&mut *self.queue, &[(name.id, name.version)])
    }

    pub(super) fn evict(&mut self, bytes: u64) -> Vec<RecordName> {
        let Some(eviction) = self.backend.prepare_eviction(bytes) else { return vec![] };
        let names = eviction.names.clone();
        self.backend.finish_eviction(&mut *self.queue, eviction);
        names
    }

    /// Names and keys that a scan tells.
    fn scan(&mut self) -> (BTreeMap<RecordName, Vec<u8>>, u64) {
        let mut told = BTreeMap::new();
        let untold = self.backend.scan(&mut *self.queue, &mut |found| {
            assert!(told.insert(RecordName::of(found.header), found.key.to_vec()).is_none(), "told twice");
        });
        (told, untold)
    }
}

pub(super) fn samples(numbers: std::ops::Range<u64>, len: usize) -> Vec<Sample> {
    numbers.map(|number| Sample::new(number, 10 + number, len)).collect()
}

/// Runs all that follows.
pub(super) fn keeps_the_rules(open: Open) {
    what_is_written_survives(open);
    the_same_is_not_written_twice(open);
    removed_ones_do_not_come_back(open);
    eviction_takes_the_oldest(open);
    a_full_tier_says_how_much_is_wanted(open);
    a_reader_keeps_what_it_reads(open);
    a_damaged_record_can_be_written_again(open);
    a_scan_tells_what_can_be_found(open);
    many_threads_do_not_disturb_each_other(open);
    unreadable_for_a_while_is_not_lost(open);
}

/// The same files, made by the system: direct I/O takes only what is aligned.
pub(super) fn works_on_a_real_disk(open: Open, name: &str) {
    let root = std::env::temp_dir().join(format!("moontide-disk-{name}-{}", std::process::id()));
    for engine in [EngineChoice::Posix, EngineChoice::Auto] {
        let storage: Arc<dyn Storage> = Arc::new(OsStorage::open(&root, engine).expect("a directory"));
        let queue = &mut *storage.queue(&QueueConfig::default());
        let samples = [0, 700, 5000, 100_000, 300_000].into_iter().zip(0..);
        let samples: Vec<Sample> =
            samples.map(|(len, number)| Sample::with_key(number, 5, len, b"k", &[], 0)).collect();
        let sources: Vec<_> = samples.iter().map(Sample::source).collect();
        let backend = open(&storage, queue).expect("an empty tier").backend;
        assert_eq!(backend.write(queue, &sources), [Ok(()); 5]);
        let gone = samples[1].name();
        backend.remove(queue, &[(gone.id, gone.version)]).expect("a disk that works");
        for _ in 0..3 {
            let Opened { backend, recovery, .. } = open(&storage, queue).expect("the tier again");
            assert_eq!((recovery.records, recovery.bad_count), (4, 0), "{recovery:?}");
            for sample in samples.iter().filter(|sample| sample.name() != gone) {
                let location = backend.locate(&sample.name()).expect("it is there");
                let mut memory = Aligned::zeroed(location.len as usize);
                let job = ReadJob { name: sample.name(), location, into: &mut memory };
                assert!(read_records(queue, vec![job])[0].is_ok());
                assert_eq!(&memory[..], sample.encode());
            }
        }
        let eviction = backend.prepare_eviction(u64::MAX).expect("there is something");
        backend.finish_eviction(queue, eviction);
        drop(backend);
        assert_eq!(open(&storage, queue).expect("the tier again").recovery.records, 0);
        std::fs::remove_dir_all(&root).expect("our own directory");
    }
}

fn what_is_written_survives(open: Open) {
    let mut trial = Trial::new(1, open);
    let lens = [0, 1, 511, 3000, 4095, 4096, 4097, 100_000, 300_000];
    let samples: Vec<Sample> =
        lens.iter().zip(0..).map(|(&len, number)| Sample::with_key(number, 5, len, b"k", &[], 64)).collect();
    trial.write_ok(&samples);
    for restarted in [false, true] {
        samples.iter().for_each(|sample| trial.assert_there(sample));
        assert_eq!(trial.backend.usage().records, samples.len() as u64);
        if !restarted {
            let before = trial.backend.usage();
            let opened = trial.restart();
            assert_eq!(opened.recovery.records, samples.len() as u64);
            assert_eq!(opened.recovery.bad_count, 0, "{:?}", opened.recovery);
            assert_eq!(opened.found.len(), samples.len());
            for sample in &samples {
                let layout = crate::record::DiskLayout::of(&sample.header);
                assert_eq!(opened.found[&sample.name()], (sample.key().to_vec(), layout.len));
            }
            assert_eq!(trial.backend.usage(), before);
        }
    }
}

fn the_same_is_not_written_twice(open: Open) {
    let mut trial = Trial::new(2, open);
    let sample = || Sample::new(1, 7, 5000);
    assert_eq!(trial.write(&[sample(), sample()]), [Ok(()), Err(WriteError::Exists)]);
    assert_eq!(trial.write(&[sample()]), [Err(WriteError::Exists)]);
    assert_eq!(trial.write(&[Sample::new(1, 6, 100)]), [Err(WriteError::Exists)], "a newer one is there");
    assert_eq!(trial.write(&[Sample::new(1, 8, 100)]), [Ok(())]);
    let mut wrong = Sample::new(2, 1, 100);
    wrong.header.root ^= 1;
    assert_eq!(trial.write(&[wrong, Sample::new(3, 1, 100)]), [Err(WriteError::Damaged), Ok(())]);
    trial.restart();
    assert_eq!(trial.write(&[sample(), Sample::new(4, 1, 1)]), [Err(WriteError::Exists), Ok(())]);
}

fn removed_ones_do_not_come_back(open: Open) {
    for seed in 0..20 {
        let mut trial = Trial::new(seed, open);
        let samples = samples(0..8, 9000);
        trial.write_ok(&samples);
        for sample in &samples[..4] {
            trial.remove(sample).expect("no faults");
            assert!(trial.read(&sample.name()).is_none());
        }
        assert_eq!(trial.write(&samples[..1]), [Err(WriteError::Removed)]);
        trial.write_ok(&[Sample::new(1, 100, 200)]);
        for round in 0..3 {
            let opened = trial.restart();
            assert_eq!(opened.recovery.records, 5, "seed {seed}, round {round}");
            samples[..4].iter().for_each(|sample| assert!(trial.read(&sample.name()).is_none()));
            samples[4..].iter().for_each(|sample| trial.assert_there(sample));
        }
    }
}

fn eviction_takes_the_oldest(open: Open) {
    let mut trial = Trial::new(3, open);
    let samples = samples(0..10, 10_000);
    trial.write_ok(&samples);
    let before = trial.backend.usage();
    let names = trial.evict(2 * 16384);
    assert_eq!(names, [samples[0].name(), samples[1].name()]);
    let after = trial.backend.usage();
    assert_eq!((after.records, before.bytes - after.bytes), (8, 2 * 16384));
    assert!(trial.read(&samples[0].name()).is_none());
    trial.write_ok(&samples[..1]);
    assert_eq!(trial.evict(1), [samples[2].name()], "what was written again is young");
    trial.reopen();
    assert_eq!(trial.evict(u64::MAX).len(), 8);
    assert_eq!(trial.backend.usage().records, 0);
    assert!(trial.backend.prepare_eviction(1).is_none());
    assert_eq!(trial.restart().recovery.bad_count, 0);
}

fn a_full_tier_says_how_much_is_wanted(open: Open) {
    let mut trial = Trial::new(4, open);
    let limit = trial.backend.usage().limit;
    let mut number = 0;
    let full = loop {
        let batch = samples(number..number + 3, 60_000);
        number += 3;
        let results = trial.write(&batch);
        if results.contains(&Ok(())) && !results.iter().any(Result::is_err) {
            continue;
        }
        break (batch, results);
    };
    let (batch, results) = full;
    let wanted: Vec<u64> = results
        .iter()
        .filter_map(|result| match result {
            Err(WriteError::Full { wanted }) => Some(*wanted),
            Ok(()) => None,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(wanted.is_sorted(), "shortages add up: {wanted:?}");
    assert!(trial.backend.usage().bytes <= limit);
    let refused: Vec<Sample> =
        batch.into_iter().filter(|sample| !trial.backend.contains(&sample.name())).collect();
    assert_eq!(refused.len(), wanted.len());
    let mut left = refused;
    for _ in 0..10 {
        trial.evict(*wanted.last().expect("it was full"));
        trial.write(&left);
        left.retain(|sample| !trial.backend.contains(&sample.name()));
        if left.is_empty() {
            break;
        }
    }
    assert!(left.is_empty(), "evicted again and again, and {} are still refused", left.len());
    assert!(trial.backend.usage().bytes <= limit);
    let huge = Sample::new(u64::MAX, 1, limit as usize);
    assert!(matches!(trial.write(&[huge])[..], [Err(WriteError::TooLarge { .. })]));
}

/// Records are evicted and removed, and their space is used again, while somebody still reads them.
fn a_reader_keeps_what_it_reads(open: Open) {
    let mut trial = Trial::new(5, open);
    let samples = samples(0..4, 50_000);
    trial.write_ok(&samples);
    let held: Vec<_> =
        samples.iter().map(|sample| trial.backend.locate(&sample.name()).expect("it is there")).collect();
    trial.remove(&samples[0]).expect("no faults");
    assert_eq!(trial.evict(u64::MAX).len(), 3);
    for number in 100..140 {
        let sample = Sample::new(number, 1, 50_000);
        if trial.write(std::slice::from_ref(&sample)) != [Ok(())] {
            trial.evict(60_000);
        }
    }
    for (sample, location) in samples.iter().zip(held) {
        let mut memory = Aligned::zeroed(location.len as usize);
        let job = ReadJob { name: sample.name(), location, into: &mut memory };
        assert!(read_records(&mut *trial.queue, vec![job])[0].is_ok(), "its range was given to another");
        assert_eq!(&memory[..], sample.encode());
    }
}

fn a_damaged_record_can_be_written_again(open: Open) {
    let mut trial = Trial::new(6, open);
    let samples = samples(0..3, 20_000);
    trial.write_ok(&samples);
    trial.backend.drop_damaged(&samples[1].name());
    assert!(!trial.backend.contains(&samples[1].name()));
    trial.write_ok(&samples[1..2]);
    trial.assert_there(&samples[1]);
    for _ in 0..10 {
        trial.restart();
        samples.iter().for_each(|sample| trial.assert_there(sample));
    }
    assert_eq!(trial.backend.usage().records, 3);
}

fn a_scan_tells_what_can_be_found(open: Open) {
    for seed in 0..20 {
        let mut random = Random(seed);
        let mut trial = Trial::new(seed, open);
        let mut known: BTreeMap<RecordName, Vec<u8>> = BTreeMap::new();
        for round in 0..60 {
            match random.below(10) {
                0 => {
                    let sample = Sample::new(random.below(40), 1 + random.below(5), 1);
                    trial.remove(&sample).expect("no faults");
                }
                1 => drop(trial.evict(random.below(100_000))),
                2 => drop(trial.reopen()),
                3 => {
                    trial.backend.drop_damaged(&Sample::new(random.below(40), 1 + random.below(5), 1).name())
                }
                _ => {
                    let batch: Vec<Sample> = (0..random.below(4))
                        .map(|_| {
                            Sample::new(random.below(40), 1 + random.below(5), random.below(20_000) as usize)
                        })
                        .collect();
                    let results = trial.write(&batch);
                    for (sample, _) in batch.iter().zip(&results).filter(|(_, result)| result.is_ok()) {
                        known.insert(sample.name(), sample.key().to_vec());
                    }
                }
            }
            let (told, untold) = trial.scan();
            let contained: BTreeMap<RecordName, Vec<u8>> =
                known.clone().into_iter().filter(|(name, _)| trial.backend.contains(name)).collect();
            assert_eq!((told, untold), (contained, 0), "seed {seed}, round {round}");
        }
    }
}

fn many_threads_do_not_disturb_each_other(open: Open) {
    let mut trial = Trial::new(7, open);
    let backend = &*trial.backend;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let disk = trial.disk.clone();
            scope.spawn(move || {
                let queue = &mut *disk.queue(&QueueConfig::default());
                let mut random = Random(thread);
                for _ in 0..60 {
                    // All threads write the same records.
                    let batch: Vec<Sample> = (0..3).map(|_| Sample::new(random.below(30), 1, 6000)).collect();
                    let sources: Vec<_> = batch.iter().map(Sample::source).collect();
                    for result in backend.write(queue, &sources) {
                        assert!(matches!(result, Ok(()) | Err(WriteError::Exists | WriteError::Full { .. })));
                    }
                    if random.below(4) == 0
                        && let Some(eviction) = backend.prepare_eviction(20_000)
                    {
                        backend.finish_eviction(queue, eviction);
                    }
                    for sample in &batch {
                        let Some(location) = backend.locate(&sample.name()) else { continue };
                        let mut memory = Aligned::zeroed(location.len as usize);
                        let job = ReadJob { name: sample.name(), location, into: &mut memory };
                        assert_eq!(read_records(queue, vec![job])[0].map(|_| ()), Ok(()));
                    }
                }
            });
        }
    });
    let all: Vec<Sample> = (0..30).map(|number| Sample::new(number, 1, 6000)).collect();
    let there = |trial: &Trial| -> Vec<bool> {
        all.iter().map(|sample| trial.backend.contains(&sample.name())).collect()
    };
    let before = there(&trial);
    trial.reopen();
    assert_eq!(there(&trial), before);
    for (sample, there) in all.iter().zip(before) {
        if there {
            trial.assert_there(sample);
        }
    }
}

/// A start at which the disk reads badly finds what it can; the next one finds the rest.
fn unreadable_for_a_while_is_not_lost(open: Open) {
    let mut missed = 0;
    for seed in 0..20 {
        let mut trial = Trial::new(seed, open);
        let samples = samples(0..30, 5000);
        trial.write_ok(&samples);
        let faults = Faults { read_error_permille: 400, flipped_read_permille: 200, ..Faults::default() };
        trial.disk.set_faults(faults);
        let opened = trial.try_reopen();
        trial.disk.set_faults(Faults::default());
        if let Ok(opened) = opened {
            missed += 30 - opened.recovery.records;
            // Space that belongs to the others is not given out.
            let more: Vec<Sample> = (100..120).map(|number| Sample::new(number, 1, 5000)).collect();
            trial.write(&more);
        }
        trial.restart();
        samples.iter().for_each(|sample| trial.assert_there(sample));
    }
    assert!(missed > 0, "the disk read too well for this test");
}
