//! [`BucketBackend`]: many records in a file that is written in one go, never changed, and deleted as a whole.
//!
//! ```text
//!  write      NNN.tmp: records, footer, tail → fdatasync → rename to NNN.bucket → fsync of the directory → index → Ok
//!  remove     removed.log → fdatasync → index → Ok             (a bucket with nothing left in it is deleted)
//!  evict      index → the master is told → the file's name is removed → its space is free
//!  start      *.tmp deleted; footers read; removed ones left out    (payloads are not read: every read verifies them)
//! ```
//!
//! Invariants: a name that ends in `.bucket` stands for bytes that were durable before it had that name. A bucket is in
//! `buckets` before any of its records is in the index. A number is never used twice, whatever became of its file.
//!
//! Locks: `buckets` is taken before those inside of [`Index`], [`Order`] and [`Files`], of which none is held while
//! another one is waited for. No I/O is done under any but those of [`Tombstones`].

pub(super) mod files;
pub(crate) mod format;
mod index;
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

use hashbrown::{HashMap, HashSet};
use moontide_types::{Epoch, ObjectId};
use parking_lot::Mutex;
use tracing::warn;

use crate::backend::claims::Claims;
use crate::backend::order::Order;
use crate::backend::tombstones::Tombstones;
use crate::backend::{
    Backend, Eviction, EvictionOrder, Found, Location, RecordName, Source, Usage, WriteError,
};
use crate::storage::{File, Mode, Queue, Storage};
use files::Files;
use index::{Index, Taken};
use scan::BucketFile;

pub use inspect::inspect;

/// How a [`BucketBackend`] is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketConfig {
    /// Bytes that may be used, footers and the log of removals included. What is removed is recorded in any case.
    pub limit_bytes: u64,
    /// Bytes of a bucket, but for one with a single larger record.
    pub bucket_bytes_max: u64,
    /// Records of a bucket.
    pub bucket_records_max: usize,
    /// Who goes first when the limit is reached.
    pub order: EvictionOrder,
    /// Files that are kept open.
    pub open_files_max: usize,
}

/// Bytes of a bucket unless told otherwise: long enough that a sync and two names cost nothing beside it, short enough
/// that one eviction does not take half of a small tier.
pub const BUCKET_BYTES_MAX_DEFAULT: u64 = 128 << 20;

/// Records of a bucket unless told otherwise: one eviction tells the master of as many as fit in a batch.
pub const BUCKET_RECORDS_MAX_DEFAULT: usize = 4096;

/// Open files unless told otherwise: far below what a process may have.
pub const OPEN_FILES_MAX_DEFAULT: usize = 1024;

impl BucketConfig {
    /// All defaults, with this limit.
    pub fn with_limit(limit_bytes: u64) -> BucketConfig {
        BucketConfig {
            limit_bytes,
            bucket_bytes_max: BUCKET_BYTES_MAX_DEFAULT,
            bucket_records_max: BUCKET_RECORDS_MAX_DEFAULT,
            order: EvictionOrder::default(),
            open_files_max: OPEN_FILES_MAX_DEFAULT,
        }
    }
}

/// Many records in a file.
#[derive(Debug)]
pub struct BucketBackend {
    storage: Arc<dyn Storage>,
    config: BucketConfig,
    index: Index,
    buckets: Mutex<HashMap<u64, Bucket>>,
    order: Order,
    files: Files,
    tombstones: Tombstones,
    claims: Claims,
    /// The number of the next bucket.
    next: AtomicU64,
    /// Bytes of all files of buckets, those that are being written included.
    used: AtomicU64,
    /// Files that hold records which nobody knows, so that no removal may be forgotten: damaged ones at the start.
    unknown: AtomicU64,
    unopened: AtomicU64,
}

/// What is known of a bucket.
#[derive(Debug, Default)]
struct Bucket {
    /// Bytes of its file.
    bytes: u64,
    /// Whether the file was never finished and could not be removed.
    temporary: bool,
    /// By which its records are found in the index: 8 bytes each.
    hashes: Vec<u64>,
    /// Records in the file that were not removed, whether they can be found or not.
    kept: u64,
    /// Records in the file that were removed: as long as the file is there, so is the need for their tombstones.
    removed: Vec<(ObjectId, Epoch)>,
    /// Records in the file that cannot be found although nobody removed them: damaged, on their way out, or there twice. If
    /// they are removed later, their tombstones are needed, too.
    hidden: Vec<ObjectId>,
}

impl BucketBackend {
    /// Times that a bucket's file could not be opened for somebody who wanted to read.
    pub fn unopened(&self) -> u64 {
        self.unopened.load(Ordering::Relaxed)
    }

    /// The file of a bucket, open.
    fn file(&self, bucket: u64) -> io::Result<File> {
        if let Some(file) = self.files.get(bucket) {
            return Ok(file);
        }
        let file = self.storage.open(Path::new(&BucketFile::name(bucket, false)), Mode::Read)?;
        self.files.insert(bucket, file.clone());
        if !self.buckets.lock().contains_key(&bucket) {
            // It was deleted meanwhile, and whoever did it has looked for open files already.
            self.files.remove(bucket);
        }
        Ok(file)
    }

    /// Records were taken out of the index because they were removed.
    fn removed(&self, taken: &[Taken]) {
        let mut empty = vec![];
        {
            let mut buckets = self.buckets.lock();
            for Taken { name, bucket: number } in taken {
                let Some(bucket) = buckets.get_mut(number) else { continue };
                bucket.kept -= 1;
                bucket.removed.push((name.id, name.version));
                if bucket.kept == 0 {
                    self.order.remove(*number);
                    empty.push(*number);
                }
            }
        }
        empty.into_iter().for_each(|number| self.delete(number));
    }

    /// Removes the file of a bucket that is neither in the order nor in the index any more. If that fails, it stands in
    /// line to be evicted again: its space is in use, after all.
    fn delete(&self, number: u64) {
        let Some(bucket) = self.buckets.lock().remove(&number) else { return };
        self.files.remove(number);
        let name = BucketFile::name(number, bucket.temporary);
        match self.storage.remove(Path::new(&name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(file = name, %error, "a bucket cannot be deleted");
                self.buckets.lock().insert(number, Bucket { hashes: vec![], ..bucket });
                self.order.insert(number);
            }
            _ => _ = self.used.fetch_sub(bucket.bytes, Ordering::Relaxed),
        }
    }

    /// Shortens the log of removals, if it is worth it.
    fn forget_removals(&self, queue: &mut dyn Queue) -> io::Result<()> {
        if !self.tombstones.wants_rewrite() {
            return Ok(());
        }
        // Files that were deleted must not come back after their tombstones are gone.
        self.storage.sync_dir(Path::new(""))?;
        let keep_all = self.unknown.load(Ordering::Relaxed) > 0;
        let claimed = self.claims.objects();
        let needed: HashSet<ObjectId> = {
            let buckets = self.buckets.lock();
            let of = |bucket: &Bucket| -> Vec<ObjectId> {
                bucket.removed.iter().map(|(id, _)| *id).chain(bucket.hidden.iter().copied()).collect()
            };
            buckets.values().flat_map(of).collect()
        };
        self.tombstones.rewrite(queue, |id, _| keep_all || needed.contains(id) || claimed.contains(id))
    }
}

impl Backend for BucketBackend {
    fn write(&self, queue: &mut dyn Queue, records: &[Source<'_>]) -> Vec<Result<(), WriteError>> {
        self.write_records(queue, records)
    }

    fn locate(&self, name: &RecordName) -> Option<Location> {
        let place = self.index.get(name)?;
        match self.file(place.bucket) {
            Ok(file) => {
                self.order.touch(place.bucket);
                Some(Location {
                    file,
                    offset: place.offset,
                    len: place.len,
                    front_len: place.head_len,
                    hold: None,
                })
            }
            Err(error) => {
                self.unopened.fetch_add(1, Ordering::Relaxed);
                // One that was evicted between the two lines above is no failure.
                if error.kind() != io::ErrorKind::NotFound {
                    warn!(file = BucketFile::name(place.bucket, false), %error, "a bucket cannot be opened");
                }
                None
            }
        }
    }

    /// The bucket stays until it is evicted: who could not read it now may be able to after a restart.
    fn drop_damaged(&self, name: &RecordName) {
        let Some(place) = self.index.get(name) else { return };
        self.index.remove(name);
        if let Some(bucket) = self.buckets.lock().get_mut(&place.bucket) {
            bucket.hidden.push(name.id);
        }
    }

    fn remove(&self, queue: &mut dyn Queue, names: &[(ObjectId, Epoch)]) -> io::Result<()> {
        self.tombstones.append(queue, names)?;
        for (id, version) in names {
            self.removed(&self.index.remove_up_to(id, *version));
        }
        if let Err(error) = self.forget_removals(queue) {
            // The removals are durable all the same; it is tried again with the next one.
            warn!(%error, "the log of removals cannot be shortened");
        }
        Ok(())
    }

    fn prepare_eviction(&self, bytes: u64) -> Option<Eviction> {
        let mut eviction = Eviction { names: vec![], bytes: 0, parts: vec![] };
        while eviction.bytes < bytes {
            let Some(number) = self.order.take_first() else { break };
            let hashes = {
                let mut buckets = self.buckets.lock();
                // One that was deleted when its last record was removed may still have stood in line.
                let Some(bucket) = buckets.get_mut(&number) else { continue };
                eviction.bytes += bucket.bytes;
                std::mem::take(&mut bucket.hashes)
            };
            let taken = self.index.remove_bucket(number, &hashes);
            if let Some(bucket) = self.buckets.lock().get_mut(&number) {
                bucket.hidden.extend(taken.iter().map(|taken| taken.name.id));
            }
            eviction.names.extend(taken.iter().map(|taken| taken.name));
            eviction.parts.push(number);
        }
        (!eviction.parts.is_empty()).then_some(eviction)
    }

    fn finish_eviction(&self, _queue: &mut dyn Queue, eviction: Eviction) {
        for number in eviction.parts {
            self.delete(number);
        }
        if let Err(error) = self.storage.sync_dir(Path::new("")) {
            warn!(%error, "what was evicted may come back if the machine stops now");
        }
    }

    fn scan(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(Found<'_>)) -> u64 {
        self.tell_all(queue, found)
    }

    fn contains(&self, name: &RecordName) -> bool {
        self.index.get(name).is_some()
    }

    fn usage(&self) -> Usage {
        Usage {
            bytes: self.used.load(Ordering::Relaxed) + self.tombstones.log_bytes(),
            limit: self.config.limit_bytes,
            records: self.index.len(),
        }
    }
}
