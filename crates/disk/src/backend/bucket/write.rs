//! Writing: a batch becomes one or more buckets.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use tracing::warn;

use crate::backend::bucket::format::{encode_footer, file_len, footer_share};
use crate::backend::bucket::index::{BUCKET_MAX, hash};
use crate::backend::bucket::scan::BucketFile;
use crate::backend::bucket::{Bucket, BucketBackend};
use crate::backend::{RecordName, Source, WriteError};
use crate::planted::{Bug, planted};
use crate::record::{DiskLayout, Placed, WriteOps, run_writes};
use crate::storage::{File, Mode, Queue, sync};

/// Records that will stand in one bucket: their places in the batch, and the length of the file.
#[derive(Debug, Default)]
struct Planned {
    places: Vec<usize>,
    records_len: u64,
    footer_shares: u64,
}

impl Planned {
    fn len(&self) -> u64 {
        file_len(self.records_len, self.footer_shares)
    }

    /// Length with one more record.
    fn len_with(&self, layout: DiskLayout, share: u64) -> u64 {
        file_len(self.records_len + layout.len, self.footer_shares + share)
    }
}

type Answers = Vec<Result<(), WriteError>>;

impl BucketBackend {
    pub(super) fn write_records(&self, queue: &mut dyn Queue, records: &[Source<'_>]) -> Answers {
        let mut answers: Answers = vec![Ok(()); records.len()];
        let names: Vec<RecordName> = records.iter().map(|record| RecordName::of(record.header)).collect();
        self.claims.write_each(&names, |mine| {
            for planned in self.plan(records, mine, &mut answers) {
                self.write_planned(queue, records, &planned, &mut answers);
            }
        });
        answers
    }

    /// Sorts records into buckets and takes the space for them; answers for those that are not written.
    fn plan(&self, records: &[Source<'_>], mine: &[usize], answers: &mut Answers) -> Vec<Planned> {
        let (mut done, mut current) = (vec![], Planned::default());
        // Bytes of records that did not fit.
        let mut lacking = 0;
        for &place in mine {
            let record = &records[place];
            let layout = match self.judge(record) {
                Ok(layout) => layout,
                Err(error) => {
                    answers[place] = Err(error);
                    continue;
                }
            };
            let share = footer_share(record.header);
            let too_long = current.len_with(layout, share) > self.config.bucket_bytes_max
                || current.places.len() == self.config.bucket_records_max;
            if too_long && !current.places.is_empty() {
                done.push(std::mem::take(&mut current));
            }
            let before = if current.places.is_empty() { 0 } else { current.len() };
            let more = current.len_with(layout, share) - before;
            if let Err(shortage) = self.take_space(more) {
                lacking += more;
                // The earlier ones that did not fit want to be written, too.
                let wanted = shortage + (lacking - more);
                answers[place] = Err(WriteError::Full { wanted });
                continue;
            }
            current.places.push(place);
            current.records_len += layout.len;
            current.footer_shares += share;
        }
        done.extend((!current.places.is_empty()).then_some(current));
        done
    }

    /// Whether a record is to be written.
    fn judge(&self, record: &Source<'_>) -> Result<DiskLayout, WriteError> {
        let layout = DiskLayout::of_source(record)?;
        let name = RecordName::of(record.header);
        if self.tombstones.covers(&name.id, name.version) {
            return Err(WriteError::Removed);
        }
        if self.index.has_as_new(&name) {
            return Err(WriteError::Exists);
        }
        let bytes = file_len(layout.len, footer_share(record.header));
        if bytes > self.config.limit_bytes {
            return Err(WriteError::TooLarge { bytes });
        }
        Ok(layout)
    }

    /// Takes space, or says how much is lacking.
    fn take_space(&self, bytes: u64) -> Result<(), u64> {
        let limit = self.config.limit_bytes.saturating_sub(self.tombstones.log_bytes());
        let fits = |used: u64| used.checked_add(bytes).filter(|&after| after <= limit);
        let taken = self.used.try_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.map(drop).map_err(|used| (used + bytes).saturating_sub(limit))
    }

    /// Writes a bucket and puts its records into the index.
    fn write_planned(
        &self,
        queue: &mut dyn Queue,
        records: &[Source<'_>],
        planned: &Planned,
        answers: &mut Answers,
    ) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        assert!(number <= BUCKET_MAX, "numbers of buckets last for decades");
        let sources: Vec<Source<'_>> = planned.places.iter().map(|&place| records[place]).collect();
        let bytes = planned.len();
        match self.write_file(queue, number, &sources, bytes) {
            Ok((file, placed)) => {
                let hashes = sources.iter().map(|source| hash(&source.header.id)).collect();
                let bucket = Bucket { bytes, hashes, kept: sources.len() as u64, ..Bucket::default() };
                self.buckets.lock().insert(number, bucket);
                self.files.insert(number, file);
                for ((source, placed), &place) in sources.iter().zip(&placed).zip(&planned.places) {
                    answers[place] = self.publish(&RecordName::of(source.header), number, placed);
                }
                self.order.insert(number);
            }
            Err(error) => {
                let answer = match error.kind() {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => WriteError::NoSpace,
                    _ => WriteError::Io,
                };
                planned.places.iter().for_each(|&place| answers[place] = Err(answer));
            }
        }
    }

    /// Puts a record into the index, unless its object was removed while it was written.
    fn publish(&self, name: &RecordName, number: u64, placed: &Placed) -> Result<(), WriteError> {
        if !self.index.insert(name, number, placed) {
            return Err(WriteError::Exists);
        }
        // A removal is known before it looks into the index: either it finds the record there, or we find it here.
        if self.tombstones.covers(&name.id, name.version) {
            if let Some(taken) = self.index.remove(name) {
                self.removed(&[taken]);
            }
            return Err(WriteError::Removed);
        }
        Ok(())
    }

    /// Writes the file of a bucket, so that it survives a crash. After a failure nothing of it is left, or it stands in
    /// line to be deleted.
    fn write_file(
        &self,
        queue: &mut dyn Queue,
        number: u64,
        sources: &[Source<'_>],
        bytes: u64,
    ) -> io::Result<(File, Vec<Placed>)> {
        let mut temporary = true;
        let result = self.try_write_file(queue, number, sources, bytes, &mut temporary);
        if let Err(error) = &result {
            let name = BucketFile::name(number, temporary);
            warn!(file = name, %error, "a bucket cannot be written");
            self.buckets.lock().insert(number, Bucket { bytes, temporary, ..Bucket::default() });
            self.delete(number);
            if self.buckets.lock().contains_key(&number) {
                // Nobody knows what is in it, and a crash may bring it back.
                self.unknown.fetch_add(1, Ordering::Relaxed);
            }
        }
        result
    }

    fn try_write_file(
        &self,
        queue: &mut dyn Queue,
        number: u64,
        sources: &[Source<'_>],
        bytes: u64,
        temporary: &mut bool,
    ) -> io::Result<(File, Vec<Placed>)> {
        let (from, to) = (BucketFile::name(number, true), BucketFile::name(number, false));
        let file = self.storage.open(Path::new(&from), Mode::Create)?;
        // A full disk is noticed before anything is written.
        self.storage.allocate(&file, bytes)?;
        let mut ops = WriteOps::new(&file, 0);
        let placed: Vec<Placed> = sources.iter().map(|source| ops.record(source)).collect();
        let pairs: Vec<(Source<'_>, Placed)> = sources.iter().copied().zip(placed.iter().copied()).collect();
        let footer_offset = ops.position();
        ops.bytes(encode_footer(&pairs, footer_offset));
        assert_eq!(ops.position(), bytes, "the space that was taken for it");
        run_writes(queue, ops)?;
        if !planted(Bug::RenameBeforeSync) {
            sync(queue, &file)?;
        }
        self.storage.rename(Path::new(&from), Path::new(&to))?;
        *temporary = false;
        if !planted(Bug::NameUnsynced) {
            self.storage.sync_dir(Path::new(""))?;
        }
        Ok((file, placed))
    }
}
