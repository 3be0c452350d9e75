//! Writes a batch as one or more buckets.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use moontide_rt::mutation_enabled;
use tracing::warn;

use crate::backend::bucket::format::{encode_footer, file_len, footer_share};
use crate::backend::bucket::index::{BUCKET_MAX, RemovedEntry, hash};
use crate::backend::bucket::scan::BucketFile;
use crate::backend::bucket::{Bucket, BucketBackend};
use crate::backend::{RecordId, RecordSource, WriteError};
use crate::mutation::Mutation;
use crate::record::{DiskLayout, PlacedRecord, WriteOps, run_writes};
use crate::storage::{File, OpenMode, Queue, sync};

/// Records of one bucket (their indices in the batch), and the parts of the file length.
#[derive(Debug, Default)]
struct PlannedBucket {
    indices: Vec<usize>,
    records_len: u64,
    footer_shares: u64,
}

impl PlannedBucket {
    fn len(&self) -> u64 {
        file_len(self.records_len, self.footer_shares)
    }

    /// Length with one more record.
    fn len_with(&self, layout: DiskLayout, share: u64) -> u64 {
        file_len(self.records_len + layout.len, self.footer_shares + share)
    }
}

type WriteResults = Vec<Result<(), WriteError>>;

impl BucketBackend {
    pub(super) fn write_records(&self, queue: &mut dyn Queue, records: &[RecordSource<'_>]) -> WriteResults {
        let mut results: WriteResults = vec![Ok(()); records.len()];
        let names: Vec<RecordId> = records.iter().map(|record| RecordId::of(record.header)).collect();
        self.claims.write_each(&names, |own| {
            for planned in self.plan(records, own, &mut results) {
                self.write_planned(queue, records, &planned, &mut results);
            }
        });
        results
    }

    /// Assigns records to buckets and reserves their space. Sets the results of records that are not written.
    fn plan(
        &self,
        records: &[RecordSource<'_>],
        own: &[usize],
        results: &mut WriteResults,
    ) -> Vec<PlannedBucket> {
        let (mut done, mut current) = (vec![], PlannedBucket::default());
        // Bytes of records that did not fit.
        let mut lacking = 0;
        for &index in own {
            let record = &records[index];
            let layout = match self.check(record) {
                Ok(layout) => layout,
                Err(error) => {
                    results[index] = Err(error);
                    continue;
                }
            };
            let share = footer_share(record.header);
            let too_long = current.len_with(layout, share) > self.config.bucket_bytes_max
                || current.indices.len() == self.config.bucket_records_max;
            if too_long && !current.indices.is_empty() {
                done.push(std::mem::take(&mut current));
            }
            let before = if current.indices.is_empty() { 0 } else { current.len() };
            let more = current.len_with(layout, share) - before;
            if let Err(shortage) = self.reserve_space(more) {
                lacking += more;
                // The earlier records that did not fit have to be written, too.
                let needed = shortage + (lacking - more);
                results[index] = Err(WriteError::Full { needed });
                continue;
            }
            current.indices.push(index);
            current.records_len += layout.len;
            current.footer_shares += share;
        }
        done.extend((!current.indices.is_empty()).then_some(current));
        done
    }

    /// Checks whether a record has to be written.
    fn check(&self, record: &RecordSource<'_>) -> Result<DiskLayout, WriteError> {
        let layout = DiskLayout::of_source(record)?;
        let name = RecordId::of(record.header);
        if self.tombstones.covers(&name.id, name.version) {
            return Err(WriteError::Removed);
        }
        if self.index.contains_at_least(&name) {
            return Err(WriteError::Exists);
        }
        let bytes = file_len(layout.len, footer_share(record.header));
        if bytes > self.config.limit_bytes {
            return Err(WriteError::TooLarge { bytes });
        }
        Ok(layout)
    }

    /// Reserves space. Fails with the number of missing bytes.
    fn reserve_space(&self, bytes: u64) -> Result<(), u64> {
        let limit = self.config.limit_bytes.saturating_sub(self.tombstones.log_bytes());
        let fits = |used: u64| used.checked_add(bytes).filter(|&after| after <= limit);
        let taken = self.used.try_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.map(drop).map_err(|used| (used + bytes).saturating_sub(limit))
    }

    /// Writes a bucket and inserts its records into the index.
    fn write_planned(
        &self,
        queue: &mut dyn Queue,
        records: &[RecordSource<'_>],
        planned: &PlannedBucket,
        results: &mut WriteResults,
    ) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        assert!(number <= BUCKET_MAX, "bucket numbers are used up");
        let sources: Vec<RecordSource<'_>> = planned.indices.iter().map(|&index| records[index]).collect();
        let bytes = planned.len();
        match self.write_file(queue, number, &sources, bytes) {
            Ok((file, placed)) => {
                let hashes = sources.iter().map(|source| hash(&source.header.id)).collect();
                let bucket =
                    Bucket { bytes, hashes, live_records: sources.len() as u64, ..Bucket::default() };
                self.buckets.lock().insert(number, bucket);
                self.files.insert(number, file);
                for ((source, placed), &index) in sources.iter().zip(&placed).zip(&planned.indices) {
                    results[index] = self.publish(&RecordId::of(source.header), number, placed);
                }
                self.eviction.insert(number);
            }
            Err(error) => {
                let error = match error.kind() {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => WriteError::NoSpace,
                    _ => WriteError::Io,
                };
                planned.indices.iter().for_each(|&index| results[index] = Err(error));
            }
        }
    }

    /// Inserts a record into the index, unless its object was removed while it was written.
    fn publish(&self, name: &RecordId, number: u64, placed: &PlacedRecord) -> Result<(), WriteError> {
        // A removal adds its tombstone before it searches the index: either it finds the record there, or this finds the
        // tombstone. The record must not be in the index before this looks: the removal may have been answered.
        let mut is_removed = false;
        let inserted = self.index.insert_if(name, number, placed, || {
            is_removed = self.tombstones.covers(&name.id, name.version);
            !is_removed
        });
        if is_removed {
            self.removed(&[RemovedEntry { name: *name, bucket: number }]);
            return Err(WriteError::Removed);
        }
        if inserted { Ok(()) } else { Err(WriteError::Exists) }
    }

    /// Writes the file of a bucket durably. After a failure the file is deleted, or queued for deletion.
    fn write_file(
        &self,
        queue: &mut dyn Queue,
        number: u64,
        sources: &[RecordSource<'_>],
        bytes: u64,
    ) -> io::Result<(File, Vec<PlacedRecord>)> {
        let mut temporary = true;
        let result = self.try_write_file(queue, number, sources, bytes, &mut temporary);
        if let Err(error) = &result {
            let name = BucketFile::name(number, temporary);
            warn!(file = name, %error, "cannot write bucket");
            self.buckets.lock().insert(number, Bucket { bytes, temporary, ..Bucket::default() });
            _ = self.delete(number);
            if self.buckets.lock().contains_key(&number) {
                // Its content is unknown, and a crash may restore it.
                self.unknown.fetch_add(1, Ordering::Relaxed);
            }
        }
        result
    }

    fn try_write_file(
        &self,
        queue: &mut dyn Queue,
        number: u64,
        sources: &[RecordSource<'_>],
        bytes: u64,
        temporary: &mut bool,
    ) -> io::Result<(File, Vec<PlacedRecord>)> {
        let (from, to) = (BucketFile::name(number, true), BucketFile::name(number, false));
        let file = self.storage.open(Path::new(&from), OpenMode::Create)?;
        // Detects a full disk before anything is written.
        self.storage.allocate(&file, bytes)?;
        let mut ops = WriteOps::new(&file, 0);
        let placed: Vec<PlacedRecord> = sources.iter().map(|source| ops.record(source)).collect();
        let pairs: Vec<(RecordSource<'_>, PlacedRecord)> =
            sources.iter().copied().zip(placed.iter().copied()).collect();
        let footer_offset = ops.position();
        ops.bytes(encode_footer(&pairs, footer_offset));
        assert_eq!(ops.position(), bytes, "the reserved space");
        run_writes(queue, ops)?;
        if !mutation_enabled(Mutation::RenameBeforeSync) {
            sync(queue, &file)?;
        }
        self.storage.rename(Path::new(&from), Path::new(&to))?;
        *temporary = false;
        if !mutation_enabled(Mutation::NameUnsynced) {
            self.storage.sync_dir(Path::new(""))?;
        }
        Ok((file, placed))
    }
}
