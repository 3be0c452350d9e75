//! [`CrashHarness`]: a tier, and its invariants.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;

use moontide_disk::samples::{SampleRecord, id};
use moontide_disk::{
    AlignedBuf, Backend, Queue, QueueConfig, ReadError, ReadJob, RecordId, RecordLocation, SimulatedDisk,
    Storage, WriteError, read_records,
};
use moontide_types::Epoch;

use crate::kinds::Kind;

/// Result of a check; the error describes the violated invariant.
pub(crate) type Check = Result<(), String>;

/// Expected state of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Its write was acknowledged: it must be stored.
    Written,
    /// Its removal was acknowledged: it must not be stored.
    Removed,
    /// Its eviction has ended without an error: it must not be stored until it is written again.
    Evicted,
    /// It may be stored: its write, its removal or its eviction failed.
    Unknown,
}

impl Status {
    /// What a record that must not be stored has gone through.
    fn end(self) -> &'static str {
        if self == Status::Evicted { "eviction" } else { "removal" }
    }
}

/// A tier with the expected state of its records.
pub(crate) struct CrashHarness {
    pub(crate) kind: Kind,
    pub(crate) disk: SimulatedDisk,
    queue: Box<dyn Queue>,
    backend: Option<Box<dyn Backend>>,
    records: BTreeMap<RecordId, (SampleRecord, Status)>,
    /// Records found by the last open, without those that were removed since.
    found: BTreeSet<RecordId>,
    /// Number of faults up to the last open.
    faults_before: u64,
}

impl CrashHarness {
    pub(crate) fn new(kind: Kind, disk: SimulatedDisk) -> CrashHarness {
        let queue = disk.queue(&QueueConfig::default());
        CrashHarness {
            kind,
            disk,
            queue,
            backend: None,
            records: BTreeMap::new(),
            found: BTreeSet::new(),
            faults_before: 0,
        }
    }

    /// Closes the tier if it is open, and opens it. Returns whether that succeeded.
    pub(crate) fn open(&mut self) -> Result<bool, String> {
        self.backend = None;
        self.queue = self.disk.queue(&QueueConfig::default());
        self.found.clear();
        self.faults_before = self.faults();
        let storage: Arc<dyn Storage> = Arc::new(self.disk.clone());
        let found = &mut self.found;
        let mut twice = None;
        let opened = (self.kind.open)(storage, &mut *self.queue, &mut |record| {
            let name = RecordId::of(record.header);
            if !found.insert(name) {
                twice = Some(name);
            }
        });
        if let Some(name) = twice {
            return Err(format!("{name:?} was found twice"));
        }
        self.backend = opened.ok().map(|(backend, _)| backend);
        Ok(self.backend.is_some())
    }

    /// Restarts the disk after a power failure.
    pub(crate) fn restart(&mut self) {
        self.backend = None;
        self.disk.restart();
    }

    fn faults(&self) -> u64 {
        let counters = self.disk.counters();
        counters.errors + counters.no_space + counters.flipped_reads
    }

    /// Returns the open tier.
    pub(crate) fn backend(&self) -> &dyn Backend {
        &**self.backend.as_ref().expect("the tier is open")
    }

    /// Returns the records that must be stored.
    pub(crate) fn written(&self) -> Vec<RecordId> {
        self.records
            .iter()
            .filter(|(_, (_, status))| *status == Status::Written)
            .map(|(name, _)| *name)
            .collect()
    }

    pub(crate) fn write(&mut self, samples: Vec<SampleRecord>) -> Check {
        let backend = self.backend.as_ref().expect("the tier is open");
        let sources: Vec<_> = samples.iter().map(SampleRecord::source).collect();
        let results = backend.write(&mut *self.queue, &sources);
        for (sample, result) in samples.into_iter().zip(results) {
            let name = sample.name();
            let before = self.records.get(&name).map(|(_, status)| *status);
            let after = match (before, result) {
                (Some(Status::Removed), Ok(())) => {
                    return Err(format!("{name:?} was written after its removal"));
                }
                (_, Ok(())) => Status::Written,
                (Some(Status::Written), Err(WriteError::Removed)) => {
                    return Err(format!("{name:?} is stored, but refused as removed"));
                }
                (None | Some(Status::Evicted), Err(_)) => Status::Unknown,
                (Some(before), Err(_)) => before,
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
                    (false, Status::Removed | Status::Evicted) => {}
                    (false, _) => *status = Status::Unknown,
                }
            }
        }
        Ok(())
    }

    pub(crate) fn evict(&mut self, bytes: u64) -> Check {
        let backend = self.backend.as_ref().expect("the tier is open");
        // Unreadable records, which cannot be found, may be evicted together with others without being listed.
        for (name, (_, status)) in &mut self.records {
            if *status == Status::Written && !backend.contains(name) {
                *status = Status::Unknown;
            }
        }
        let Some(eviction) = backend.prepare_eviction(bytes) else { return Ok(()) };
        for name in &eviction.names {
            let Some((_, status)) = self.records.get_mut(name) else {
                return Err(format!("{name:?} was evicted and never written"));
            };
            if matches!(*status, Status::Removed | Status::Evicted) {
                return Err(format!("{name:?} was evicted although it was {status:?}"));
            }
            *status = Status::Unknown;
            if backend.contains(name) {
                return Err(format!("{name:?} is found although it was chosen for eviction"));
            }
        }
        let names = eviction.names.clone();
        if backend.finish_eviction(&mut *self.queue, eviction).is_ok() {
            for name in names {
                self.records.get_mut(&name).expect("checked above").1 = Status::Evicted;
                self.found.remove(&name);
            }
        }
        Ok(())
    }

    /// Checks all invariants, without faults.
    pub(crate) fn check(&mut self) -> Check {
        self.check_with(|_| true)
    }

    /// Like [`CrashHarness::check`]; of the written records, only those that `intact` selects must be stored.
    pub(crate) fn check_with(&mut self, intact: impl Fn(&RecordId) -> bool) -> Check {
        if let Some(name) = self.found.iter().find(|name| !self.records.contains_key(*name)) {
            return Err(format!("{name:?} was found, but never written"));
        }
        let names: Vec<RecordId> = self.records.keys().copied().collect();
        for name in names {
            let status = self.records[&name].1;
            let contained = self.backend().contains(&name);
            let location = self.backend().locate(&name);
            let must = status == Status::Written && intact(&name);
            if location.is_some() && !contained {
                return Err(format!("{name:?} is located, but not contained"));
            }
            let is_gone = matches!(status, Status::Removed | Status::Evicted);
            if is_gone && (location.is_some() || self.found.contains(&name)) {
                return Err(format!("{name:?} reappears after its {}", status.end()));
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

    /// Checks the invariants with faults: no read returns wrong bytes, and no record is missing unless a fault occurred
    /// since the tier was opened. Drops corrupt records, as a node does.
    pub(crate) fn check_among_faults(&mut self) -> Check {
        for name in self.written() {
            let Some(location) = self.backend().locate(&name) else {
                if self.faults() == self.faults_before {
                    return Err(format!("{name:?} is lost without a fault"));
                }
                continue;
            };
            let before = self.faults();
            if let Err(error) = self.read(&name, location)? {
                if self.faults() == before {
                    return Err(format!("{name:?} cannot be read, without a fault: {error}"));
                }
                if matches!(error, ReadError::Corrupt(_)) {
                    self.backend().drop_corrupt(&name);
                }
            }
        }
        for (name, (_, status)) in &self.records {
            let is_gone = matches!(status, Status::Removed | Status::Evicted);
            if is_gone && (self.backend().contains(name) || self.found.contains(name)) {
                return Err(format!("{name:?} reappears after its {}", status.end()));
            }
        }
        Ok(())
    }

    /// Reads a record. The outer error means wrong bytes.
    fn read(&mut self, name: &RecordId, location: RecordLocation) -> Result<Result<(), ReadError>, String> {
        let mut memory = AlignedBuf::zeroed(location.len as usize);
        let job = ReadJob::whole(*name, location, &mut memory);
        let result = read_records(&mut *self.queue, vec![job]).pop().expect("one job");
        Ok(match result {
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

    /// Checks that the tier can still be used.
    pub(crate) fn check_use(&mut self, number: u64) -> Check {
        self.write(vec![SampleRecord::new(number, 1, 5000), SampleRecord::new(number + 1, 1, 100)])?;
        let name = SampleRecord::new(number, 1, 5000).name();
        if self.records[&name].1 != Status::Written {
            return Err("the tier refuses writes".into());
        }
        self.remove(&[(number + 1, 1)])?;
        self.check()
    }

    /// Adds the expected states of records of another tier.
    pub(crate) fn expect(&mut self, samples: impl IntoIterator<Item = (SampleRecord, Status)>) {
        self.records.extend(samples.into_iter().map(|(sample, status)| (sample.name(), (sample, status))));
    }
}
