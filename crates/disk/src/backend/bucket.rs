//! [`BucketBackend`]: many records in a file that is written at once, never changed, and deleted as a whole.
//!
//! ```text
//!  write      NNN.tmp: records, footer, tail → fdatasync → rename to NNN.bucket → fsync of the directory → index → Ok
//!  remove     removed.log → fdatasync → index → Ok             (a bucket without live records is deleted)
//!  evict      index → unlink the file → space is free → notify the masters
//!  start      delete *.tmp; read footers; skip removed records     (payloads are not read: every read verifies them)
//! ```
//!
//! Invariants: the bytes of a file are durable before its name ends in `.bucket`. A bucket is in `buckets` before any
//! of its records is in the index. A number is never reused, even after its file is deleted.
//!
//! Locks: `buckets` is locked before the locks inside [`Index`], [`EvictionQueue`] and [`OpenFileCache`], which are
//! never nested in each other. A write looks for a tombstone under the lock of a part of the index; no lock is taken under
//! that of the table of tombstones. No I/O is done under any lock except those of the files of [`Tombstones`].

pub(crate) mod format;
mod index;
pub(super) mod open_files;
mod scan;

mod inspect;
mod open;
mod write;

#[cfg(test)]
mod tests;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_rt::collections::{HashMap, HashSet};
use moontide_rt::sync::Mutex;
use moontide_types::{Epoch, ObjectId};
use tracing::warn;

use crate::backend::claims::WriteClaims;
use crate::backend::eviction_queue::EvictionQueue;
use crate::backend::tombstones::Tombstones;
use crate::backend::{
    Backend, Eviction, EvictionPolicy, RecordId, RecordLocation, RecordSource, ScannedRecord, Usage,
    WriteError,
};
use crate::storage::{File, OpenMode, Queue, Storage};
use index::{Index, RemovedEntry};
use open_files::OpenFileCache;
use scan::BucketFile;

pub use inspect::inspect;

/// Settings of a [`BucketBackend`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketConfig {
    /// Limit of the bytes on the disk, including footers and the tombstone log. Removals are recorded even above the
    /// limit.
    pub limit_bytes: u64,
    /// Maximum size of a bucket; a single larger record has its own bucket.
    pub bucket_bytes_max: u64,
    /// Maximum number of records of a bucket.
    pub bucket_records_max: usize,
    /// Eviction policy.
    pub eviction_policy: EvictionPolicy,
    /// Maximum number of open files.
    pub open_files_max: usize,
}

/// Default size of a bucket: large enough that a sync and two directory operations are negligible, small enough that
/// one eviction does not take half of a small tier.
pub const BUCKET_BYTES_MAX_DEFAULT: u64 = 128 << 20;

/// Default number of records of a bucket: the notice of one eviction fits into one batch.
pub const BUCKET_RECORDS_MAX_DEFAULT: usize = 4096;

/// Default number of open files: far below the limit of a process.
pub const OPEN_FILES_MAX_DEFAULT: usize = 1024;

impl BucketConfig {
    /// Returns the defaults with this limit.
    pub fn with_limit(limit_bytes: u64) -> BucketConfig {
        BucketConfig {
            limit_bytes,
            bucket_bytes_max: BUCKET_BYTES_MAX_DEFAULT,
            bucket_records_max: BUCKET_RECORDS_MAX_DEFAULT,
            eviction_policy: EvictionPolicy::default(),
            open_files_max: OPEN_FILES_MAX_DEFAULT,
        }
    }
}

/// Backend with many records per file.
#[derive(Debug)]
pub struct BucketBackend {
    storage: Arc<dyn Storage>,
    config: BucketConfig,
    index: Index,
    buckets: Mutex<HashMap<u64, Bucket>>,
    eviction: EvictionQueue,
    files: OpenFileCache,
    tombstones: Tombstones,
    claims: WriteClaims,
    /// Number of the next bucket.
    next: AtomicU64,
    /// Bytes of all bucket files, including those being written.
    used: AtomicU64,
    /// Files with unknown records (corrupt at the start): while there are any, no tombstone may be dropped.
    unknown: AtomicU64,
    open_failures: AtomicU64,
}

/// State of a bucket.
#[derive(Debug, Default)]
struct Bucket {
    /// Bytes of its file.
    bytes: u64,
    /// Whether the file is an unfinished one that could not be removed.
    temporary: bool,
    /// Hashes of its records in the index: 8 bytes each.
    hashes: Vec<u64>,
    /// Records in the file that were not removed, whether they can be found or not.
    live_records: u64,
    /// Records in the file that were removed: their tombstones are needed as long as the file exists.
    removed: Vec<(ObjectId, Epoch)>,
    /// Records in the file that cannot be found although they were not removed: corrupt, being evicted, or duplicates.
    /// If they are removed later, their tombstones are needed, too.
    unreachable: Vec<ObjectId>,
}

impl BucketBackend {
    /// Number of failures to open the file of a bucket for a reader.
    pub fn open_failures(&self) -> u64 {
        self.open_failures.load(Ordering::Relaxed)
    }

    /// Returns the open file of a bucket.
    fn file(&self, bucket: u64) -> io::Result<File> {
        if let Some(file) = self.files.get(bucket) {
            return Ok(file);
        }
        let file = self.storage.open(Path::new(&BucketFile::name(bucket, false)), OpenMode::Read)?;
        self.files.insert(bucket, file.clone());
        if !self.buckets.lock().contains_key(&bucket) {
            // It was deleted meanwhile, and `delete` has already removed it from the open files.
            self.files.remove(bucket);
        }
        Ok(file)
    }

    /// Accounts for records that were taken out of the index by a removal.
    fn removed(&self, taken: &[RemovedEntry]) {
        let mut empty = vec![];
        {
            let mut buckets = self.buckets.lock();
            for RemovedEntry { name, bucket: number } in taken {
                let Some(bucket) = buckets.get_mut(number) else { continue };
                bucket.live_records -= 1;
                bucket.removed.push((name.id, name.version));
                if bucket.live_records == 0 {
                    self.eviction.remove(*number);
                    empty.push(*number);
                }
            }
        }
        empty.into_iter().for_each(|number| _ = self.delete(number));
    }

    /// Deletes the file of a bucket that is neither in the eviction queue nor in the index. If that fails, it is queued
    /// for eviction again: its space is still in use.
    fn delete(&self, number: u64) -> io::Result<()> {
        let Some(bucket) = self.buckets.lock().remove(&number) else { return Ok(()) };
        self.files.remove(number);
        let name = BucketFile::name(number, bucket.temporary);
        match self.storage.remove(Path::new(&name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(file = name, %error, "cannot delete bucket");
                self.buckets.lock().insert(number, Bucket { hashes: vec![], ..bucket });
                self.eviction.insert(number);
                return Err(error);
            }
            _ => _ = self.used.fetch_sub(bucket.bytes, Ordering::Relaxed),
        }
        Ok(())
    }

    /// Compacts the tombstone log, if needed.
    fn compact_tombstones(&self, queue: &mut dyn Queue) -> io::Result<()> {
        if !self.tombstones.needs_compaction() {
            return Ok(());
        }
        // Deleted files must not reappear after their tombstones are dropped.
        self.storage.sync_dir(Path::new(""))?;
        let keep_all = self.unknown.load(Ordering::Relaxed) > 0;
        let claimed = self.claims.objects();
        let needed: HashSet<ObjectId> = {
            let buckets = self.buckets.lock();
            let of = |bucket: &Bucket| -> Vec<ObjectId> {
                bucket.removed.iter().map(|(id, _)| *id).chain(bucket.unreachable.iter().copied()).collect()
            };
            buckets.values().flat_map(of).collect()
        };
        self.tombstones.compact(queue, |id, _| keep_all || needed.contains(id) || claimed.contains(id))
    }
}

impl Backend for BucketBackend {
    fn write(&self, queue: &mut dyn Queue, records: &[RecordSource<'_>]) -> Vec<Result<(), WriteError>> {
        self.write_records(queue, records)
    }

    fn locate(&self, name: &RecordId) -> Option<RecordLocation> {
        let location = self.index.get(name)?;
        match self.file(location.bucket) {
            Ok(file) => {
                self.eviction.touch(location.bucket);
                Some(RecordLocation {
                    file,
                    offset: location.offset,
                    len: location.len,
                    preamble_read_len: location.preamble_read_len,
                    read_guard: None,
                })
            }
            Err(error) => {
                self.open_failures.fetch_add(1, Ordering::Relaxed);
                // A bucket that was evicted between the two lines above is no failure.
                if error.kind() != io::ErrorKind::NotFound {
                    warn!(file = BucketFile::name(location.bucket, false), %error, "cannot open bucket");
                }
                None
            }
        }
    }

    /// The bucket is kept until it is evicted: the record may be readable again after a restart.
    fn drop_corrupt(&self, name: &RecordId) {
        let Some(location) = self.index.get(name) else { return };
        self.index.remove(name);
        if let Some(bucket) = self.buckets.lock().get_mut(&location.bucket) {
            bucket.unreachable.push(name.id);
        }
    }

    fn remove(&self, queue: &mut dyn Queue, names: &[(ObjectId, Epoch)]) -> io::Result<()> {
        self.tombstones.append(queue, names)?;
        for (id, version) in names {
            self.removed(&self.index.remove_up_to(id, *version));
        }
        if let Err(error) = self.compact_tombstones(queue) {
            // The removals are durable all the same; the next one retries.
            warn!(%error, "cannot compact the tombstone log");
        }
        Ok(())
    }

    fn prepare_eviction(&self, bytes: u64) -> Option<Eviction> {
        let mut eviction = Eviction { names: vec![], bytes: 0, handles: vec![] };
        while eviction.bytes < bytes {
            let Some(number) = self.eviction.pop() else { break };
            let hashes = {
                let mut buckets = self.buckets.lock();
                // A bucket that was deleted with its last record may still have been in the queue.
                let Some(bucket) = buckets.get_mut(&number) else { continue };
                eviction.bytes += bucket.bytes;
                std::mem::take(&mut bucket.hashes)
            };
            let taken = self.index.remove_bucket(number, &hashes);
            if let Some(bucket) = self.buckets.lock().get_mut(&number) {
                bucket.unreachable.extend(taken.iter().map(|taken| taken.name.id));
            }
            eviction.names.extend(taken.iter().map(|taken| taken.name));
            eviction.handles.push(number);
        }
        (!eviction.handles.is_empty()).then_some(eviction)
    }

    fn finish_eviction(&self, _queue: &mut dyn Queue, eviction: Eviction) -> io::Result<()> {
        let mut deleted = Ok(());
        for number in eviction.handles {
            deleted = deleted.and(self.delete(number));
        }
        deleted.and(self.storage.sync_dir(Path::new("")))
    }

    fn scan(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(ScannedRecord<'_>)) -> Vec<RecordId> {
        self.scan_all(queue, found)
    }

    fn contains(&self, name: &RecordId) -> bool {
        self.index.get(name).is_some()
    }

    fn names(&self) -> Vec<RecordId> {
        self.index.names_in(|_| true)
    }

    fn usage(&self) -> Usage {
        Usage {
            bytes: self.used.load(Ordering::Relaxed) + self.tombstones.log_bytes(),
            limit: self.config.limit_bytes,
            records: self.index.len(),
        }
    }
}
