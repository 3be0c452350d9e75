//! [`World`]: a tier, and what must be true of it.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;

use moontide_disk::samples::{Sample, id};
use moontide_disk::{
    Aligned, Backend, Location, Queue, QueueConfig, ReadError, ReadJob, RecordName, SimulatedDisk, Storage,
    WriteError, read_records,
};
use moontide_types::Epoch;

use crate::kinds::Kind;

/// What went wrong: a sentence for whoever reads the test's output.
pub(crate) type Check = Result<(), String>;

/// What is known of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Its write was acknowledged: it must be there.
    Written,
    /// Its removal was acknowledged: it must not be there.
    Removed,
    /// It may be there: its write or its removal failed, or it was evicted.
    Open,
}

/// A tier and what must be true of it.
pub(crate) struct World {
    pub(crate) kind: Kind,
    pub(crate) disk: SimulatedDisk,
    queue: Box<dyn Queue>,
    backend: Option<Box<dyn Backend>>,
    records: BTreeMap<RecordName, (Sample, Status)>,
    /// Names that the last opening told, without those that were removed since.
    found: BTreeSet<RecordName>,
    /// Faults up to the last opening.
    faults_before: u64,
}

impl World {
    pub(crate) fn new(kind: Kind, disk: SimulatedDisk) -> World {
        let queue = disk.queue(&QueueConfig::default());
        World {
            kind,
            disk,
            queue,
            backend: None,
            records: BTreeMap::new(),
            found: BTreeSet::new(),
            faults_before: 0,
        }
    }

    /// Closes the tier if it is open, and opens it; whether that worked.
    pub(crate) fn open(&mut self) -> Result<bool, String> {
        self.backend = None;
        self.queue = self.disk.queue(&QueueConfig::default());
        self.found.clear();
        self.faults_before = self.faults();
        let storage: Arc<dyn Storage> = Arc::new(self.disk.clone());
        let found = &mut self.found;
        let mut twice = None;
        let opened = (self.kind.open)(storage, &mut *self.queue, &mut |record| {
            let name = RecordName::of(record.header);
            if !found.insert(name) {
                twice = Some(name);
            }
        });
        if let Some(name) = twice {
            return Err(format!("{name:?} was told twice"));
        }
        self.backend = opened.ok().map(|(backend, _)| backend);
        Ok(self.backend.is_some())
    }

    /// The disk lost power, or is taken away, and comes back.
    pub(crate) fn restart(&mut self) {
        self.backend = None;
        self.disk.restart();
    }

    fn faults(&self) -> u64 {
        let counters = self.disk.counters();
        counters.errors + counters.no_space + counters.flipped_reads
    }

    /// The open tier.
    pub(crate) fn backend(&self) -> &dyn Backend {
        &**self.backend.as_ref().expect("the tier is open")
    }

    /// Names of what must be there.
    pub(crate) fn written(&self) -> Vec<RecordName> {
        self.records
            .iter()
            .filter(|(_, (_, status))| *status == Status::Written)
            .map(|(name, _)| *name)
            .collect()
    }

    pub(crate) fn write(&mut self, samples: Vec<Sample>) -> Check {
        let backend = self.backend.as_ref().expect("the tier is open");
        let sources: Vec<_> = samples.iter().map(Sample::source).collect();
        let answers = backend.write(&mut *self.queue, &sources);
        for (sample, answer) in samples.into_iter().zip(answers) {
            let name = sample.name();
            let before = self.records.get(&name).map(|(_, status)| *status);
            let after = match (before, answer) {
                (Some(Status::Removed), Ok(())) => {
                    return Err(format!("{name:?} was written after its removal"));
                }
                (_, Ok(())) => Status::Written,
                (Some(Status::Written), Err(WriteError::Removed)) => {
                    return Err(format!("{name:?} is there, and yet said to be removed"));
                }
                (before, Err(_)) => before.unwrap_or(Status::Open),
            };
            self.records.insert(name, (sample, after));
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, numbers: &[(u64, u64)]) -> Check {
        let names: Vec<_> = numbers
            .iter()
            .map(|&(number, version)| (id(number), Epoch::from_bits(version).expect("small")))
            .collect();
        self.remove_names(&names)
    }

    pub(crate) fn remove_names(&mut self, names: &[(moontide_types::ObjectId, Epoch)]) -> Check {
        let backend = self.backend.as_ref().expect("the tier is open");
        let done = backend.remove(&mut *self.queue, names).is_ok();
        for (name, (_, status)) in &mut self.records {
            if names.iter().any(|(id, version)| name.id == *id && name.version <= *version) {
                match (done, *status) {
                    (true, _) => {
                        *status = Status::Removed;
                        self.found.remove(name);
                    }
                    (false, Status::Removed) => {}
                    (false, _) => *status = Status::Open,
                }
            }
        }
        Ok(())
    }

    pub(crate) fn evict(&mut self, bytes: u64) -> Check {
        let backend = self.backend.as_ref().expect("the tier is open");
        // What could not be read, and so cannot be found, may go with its neighbours without a word.
        for (name, (_, status)) in &mut self.records {
            if *status == Status::Written && !backend.contains(name) {
                *status = Status::Open;
            }
        }
        let Some(eviction) = backend.prepare_eviction(bytes) else { return Ok(()) };
        for name in &eviction.names {
            let Some((_, status)) = self.records.get_mut(name) else {
                return Err(format!("{name:?} was evicted and never written"));
            };
            if *status == Status::Removed {
                return Err(format!("{name:?} was evicted although it was removed"));
            }
            *status = Status::Open;
            if backend.contains(name) {
                return Err(format!("{name:?} is found although it was chosen for eviction"));
            }
        }
        backend.finish_eviction(&mut *self.queue, eviction);
        Ok(())
    }

    /// Everything that must be true, without faults.
    pub(crate) fn check(&mut self) -> Check {
        self.check_with(|_| true)
    }

    /// The same; of records that were written only those must be there that `intact` names.
    pub(crate) fn check_with(&mut self, intact: impl Fn(&RecordName) -> bool) -> Check {
        if let Some(name) = self.found.iter().find(|name| !self.records.contains_key(*name)) {
            return Err(format!("{name:?} was told and never written"));
        }
        let names: Vec<RecordName> = self.records.keys().copied().collect();
        for name in names {
            let status = self.records[&name].1;
            let contained = self.backend().contains(&name);
            let location = self.backend().locate(&name);
            let must = status == Status::Written && intact(&name);
            if location.is_some() && !contained {
                return Err(format!("{name:?} is located, but not contained"));
            }
            if status == Status::Removed && (location.is_some() || self.found.contains(&name)) {
                return Err(format!("{name:?} is back after its removal"));
            }
            let Some(location) = location else {
                if must {
                    return Err(format!("{name:?} is lost"));
                }
                continue;
            };
            match self.read(&name, location)? {
                Ok(()) => {}
                Err(error) if must => return Err(format!("{name:?} cannot be read: {error}")),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// While things go wrong: nothing is read wrong, and nothing is missing unless something went wrong since the tier
    /// was opened. What is damaged is dropped, as a node does.
    pub(crate) fn check_among_faults(&mut self) -> Check {
        for name in self.written() {
            let Some(location) = self.backend().locate(&name) else {
                if self.faults() == self.faults_before {
                    return Err(format!("{name:?} is lost, although nothing went wrong"));
                }
                continue;
            };
            let before = self.faults();
            if let Err(error) = self.read(&name, location)? {
                if self.faults() == before {
                    return Err(format!("{name:?} cannot be read, although nothing went wrong: {error}"));
                }
                if matches!(error, ReadError::Damaged(_)) {
                    self.backend().drop_damaged(&name);
                }
            }
        }
        for (name, (_, status)) in &self.records {
            if *status == Status::Removed && (self.backend().contains(name) || self.found.contains(name)) {
                return Err(format!("{name:?} is back after its removal"));
            }
        }
        Ok(())
    }

    /// Reads a record; wrong bytes are an error of the outer kind.
    fn read(&mut self, name: &RecordName, location: Location) -> Result<Result<(), ReadError>, String> {
        let mut memory = Aligned::zeroed(location.len as usize);
        let job = ReadJob { name: *name, location, into: &mut memory };
        let answer = read_records(&mut *self.queue, vec![job]).pop().expect("one job");
        Ok(match answer {
            Err(error) => Err(error),
            Ok(header) => {
                let payload = &memory[header.payload_offset as usize..][..header.stripe_len as usize];
                if payload != self.records[name].0.payload() {
                    return Err(format!("{name:?} was read with wrong bytes"));
                }
                Ok(())
            }
        })
    }

    /// The tier can still be used.
    pub(crate) fn check_use(&mut self, number: u64) -> Check {
        self.write(vec![Sample::new(number, 1, 5000), Sample::new(number + 1, 1, 100)])?;
        let name = Sample::new(number, 1, 5000).name();
        if self.records[&name].1 != Status::Written {
            return Err("nothing can be written any more".into());
        }
        self.remove(&[(number + 1, 1)])?;
        self.check()
    }

    /// Takes over what is known of the records of another world.
    pub(crate) fn know(&mut self, samples: impl IntoIterator<Item = (Sample, Status)>) {
        self.records.extend(samples.into_iter().map(|(sample, status)| (sample.name(), (sample, status))));
    }
}
