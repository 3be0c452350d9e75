//! [`FileBackend`]: each record is a file, which other tools can inspect, copy and delete.
//!
//! ```text
//!  3f/a9/3fa9….-0000000000000007-0.rec       id, version and stripe, in directories by the first two bytes of the id
//!  3f/a9/3fa9….-0000000000000007-0.rec.tmp   a record that is being written
//!  removed.log                               tombstones
//! ```
//!
//! # Order of writes
//!
//! ```text
//!  write    .tmp written ─▶ synced ─▶ renamed ─▶ directory synced ─▶ in the index, acknowledged
//! remove tombstone durable ─▶ not in the index, acknowledged ─▶ unlinked; directory synced before the tombstone is
//! dropped
//!  evict    not in the index ─▶ unlinked, directory synced ─▶ masters are notified
//! ```
//!
//! Invariants:
//!
//! * a file without `.tmp` is complete: its bytes were durable before it was renamed;
//! * a thread that writes, replaces or evicts a file has claimed its name, so that it does not unlink the file of
//!   another writer;
//! * `bytes` of the index is at least the size of all files: it increases before a file is created and decreases after
//!   it is deleted.
//!
//! A file that cannot be read, or could not be unlinked, is an orphan: it takes space, is evicted first, and is
//! replaced when its record is written again.
//!
//! Directories are created on demand and never removed. They do not count towards the limit: there are at most 65,792.
//!
//! The order of writes is not stored. After a restart, the order of versions is used instead, which masters assign in
//! rising order.

mod dirs;
mod names;
mod open;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use moontide_rt::collections::{HashMap, HashSet};
use moontide_rt::sync::Mutex;
use moontide_types::{Epoch, ObjectId};
use tracing::{debug, warn};

use crate::backend::batch_io::{PreambleScan, run_batch, scan_preambles};
use crate::backend::bucket::OPEN_FILES_MAX_DEFAULT;
use crate::backend::bucket::open_files::OpenFileCache;
use crate::backend::claims::WriteClaims;
use crate::backend::eviction_queue::EvictionQueue;
use crate::backend::tombstones::Tombstones;
use crate::backend::{
    Backend, Eviction, EvictionPolicy, RecordId, RecordLocation, RecordSource, ScannedRecord, Usage,
    WriteError,
};
use crate::buffer::Buffer;
use crate::mutation::Mutation;
use crate::record::{DiskLayout, WriteOps};
use crate::storage::{File, Op, OpKind, OpenMode, Queue, Storage};
use dirs::{Directory, DirectoryCache};
use moontide_rt::mutation_enabled;
use names::{path_of, temporary_of};

pub use open::inspect;

/// Maximum number of open files of a batch.
const BATCH_FILES_MAX: usize = 256;

/// Maximum number of records that a scan processes at a time.
const SCAN_FILES_MAX: usize = 4096;

/// Settings of a [`FileBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileConfig {
    /// Limit of the bytes on the disk.
    pub limit_bytes: u64,
    /// Eviction policy.
    pub eviction_policy: EvictionPolicy,
    /// Maximum number of files that stay open for reads.
    pub open_files_max: usize,
}

impl FileConfig {
    /// Returns the defaults with this limit.
    pub fn with_limit(limit_bytes: u64) -> FileConfig {
        FileConfig {
            limit_bytes,
            eviction_policy: EvictionPolicy::default(),
            open_files_max: OPEN_FILES_MAX_DEFAULT,
        }
    }
}

/// Backend with one file per record.
#[derive(Debug)]
pub struct FileBackend {
    storage: Arc<dyn Storage>,
    limit: u64,
    tombstones: Tombstones,
    /// Never held during I/O. No other lock is held when it is taken; the lock of the eviction queue may be taken
    /// inside it.
    index: Mutex<FileIndex>,
    claims: WriteClaims,
    /// Numbers of the records in the index.
    eviction: EvictionQueue,
    dirs: DirectoryCache,
    open_files: OpenFileCache,
    /// Whether all directories were read: only then no unknown file can reappear.
    complete: bool,
}

#[derive(Debug, Default)]
struct FileIndex {
    records: BTreeMap<RecordId, IndexedFile>,
    /// Records by their number in the eviction queue or in an eviction.
    names: HashMap<u64, RecordId>,
    next_number: u64,
    /// Bytes of all files.
    bytes: u64,
    /// Files that exist but cannot be found, with their lengths.
    orphans: BTreeMap<RecordId, u64>,
    /// Files that were chosen for eviction, with their numbers and lengths.
    evicting: HashMap<RecordId, (u64, u64)>,
    /// Directories with removed names that a crash would restore.
    unsynced: HashSet<Directory>,
}

/// A record that can be found.
#[derive(Clone, Copy, Debug)]
struct IndexedFile {
    number: u64,
    len: u64,
    preamble_read_len: u64,
}

/// A record that is being written.
struct PlannedRecord<'a> {
    /// Index in the caller's list.
    index: usize,
    source: RecordSource<'a>,
    name: RecordId,
    layout: DiskLayout,
    /// Bytes of an orphan of the same name, which this file replaces.
    replaces: Option<u64>,
}

impl FileIndex {
    fn insert(&mut self, eviction: &EvictionQueue, name: RecordId, len: u64, preamble_read_len: u64) {
        let number = self.next_number;
        self.next_number += 1;
        eviction.insert(number);
        self.names.insert(number, name);
        self.records.insert(name, IndexedFile { number, len, preamble_read_len });
    }

    fn take_out(&mut self, eviction: &EvictionQueue, name: &RecordId) -> Option<IndexedFile> {
        let file = self.records.remove(name)?;
        eviction.remove(file.number);
        self.names.remove(&file.number);
        Some(file)
    }

    /// Whether this stripe is on the disk in this version or a newer one.
    fn has(&self, name: &RecordId) -> bool {
        let last = RecordId { id: name.id, version: Epoch::MAX, stripe: u16::MAX };
        self.records.range(name..=&last).any(|(other, _)| other.stripe == name.stripe)
    }

    /// Takes over an orphan or an evicted file of this name, and returns its length.
    fn take_orphan(&mut self, name: &RecordId) -> Option<u64> {
        let evicting = self.evicting.remove(name).map(|(_, len)| len);
        self.orphans.remove(name).or(evicting)
    }
}

impl FileBackend {
    /// Reserves space for a record, if records of `refused` bytes were refused before it.
    fn plan<'a>(
        &self,
        index: usize,
        source: RecordSource<'a>,
        refused: u64,
    ) -> Result<PlannedRecord<'a>, WriteError> {
        let layout = DiskLayout::of_source(&source)?;
        let name = RecordId::of(source.header);
        if self.tombstones.covers(&name.id, name.version) {
            return Err(WriteError::Removed);
        }
        let log_bytes = self.tombstones.log_bytes();
        if layout.len > self.limit {
            return Err(WriteError::TooLarge { bytes: layout.len });
        }
        let mut files = self.index.lock();
        if files.has(&name) {
            return Err(WriteError::Exists);
        }
        let needed = (files.bytes + log_bytes + refused + layout.len).saturating_sub(self.limit);
        if needed > 0 {
            return Err(WriteError::Full { needed });
        }
        files.bytes += layout.len;
        let replaces = files.take_orphan(&name);
        Ok(PlannedRecord { index, source, name, layout, replaces })
    }

    /// Writes a bounded number of records whose names the caller has claimed.
    fn write_claimed(
        &self,
        queue: &mut dyn Queue,
        records: &[RecordSource<'_>],
        indices: &[usize],
        refused: &mut u64,
        results: &mut [Result<(), WriteError>],
    ) {
        let mut planned = Vec::with_capacity(indices.len());
        for &index in indices {
            match self.plan(index, records[index], *refused) {
                Ok(plan) => planned.push(plan),
                Err(error) => {
                    if let WriteError::Full { .. } = error {
                        *refused += DiskLayout::of(records[index].header).len;
                    }
                    results[index] = Err(error);
                }
            }
        }
        let mut created = vec![];
        for plan in planned {
            match self.create(&plan.name) {
                Ok(file) => created.push((plan, file)),
                Err(error) => results[plan.index] = Err(self.discard(&plan, &error)),
            }
        }
        let ops = created.iter().enumerate().flat_map(|(number, (plan, file))| {
            let mut ops = WriteOps::new(file, 0);
            ops.record(&plan.source);
            ops.map(move |op| (number, op))
        });
        let written = run_batch(queue, created.len(), ops);
        let needs_sync =
            |number: &usize| written[*number].is_ok() && !mutation_enabled(Mutation::RenameBeforeSync);
        let syncs = created.iter().enumerate().filter(|(number, _)| needs_sync(number));
        let syncs = syncs.map(|(number, (_, file))| {
            let (file, buffer) = (file.clone(), Buffer::None);
            (number, Op { tag: 0, kind: OpKind::Sync, file, offset: 0, buffer })
        });
        let synced = run_batch(queue, created.len(), syncs);
        let mut renamed = vec![];
        for (((plan, _), written), synced) in created.into_iter().zip(written).zip(synced) {
            let (from, to) = (temporary_of(&plan.name), path_of(&plan.name));
            let result =
                written.and(synced).and_then(|()| self.storage.rename(Path::new(&from), Path::new(&to)));
            match result {
                Ok(()) => renamed.push(plan),
                Err(error) => results[plan.index] = Err(self.discard(&plan, &error)),
            }
        }
        let directories: HashSet<Directory> = renamed.iter().map(|plan| Directory::of(&plan.name)).collect();
        let synced: HashMap<Directory, io::Result<()>> =
            directories.into_iter().map(|dir| (dir, self.sync_names(dir))).collect();
        for plan in renamed {
            let index = plan.index;
            results[index] = match &synced[&Directory::of(&plan.name)] {
                Ok(()) => self.insert(plan),
                Err(error) => {
                    warn!(%error, "cannot sync directory of the disk tier");
                    _ = self.unlink(&plan.name, plan.layout.len, plan.replaces);
                    Err(write_error(error))
                }
            };
        }
    }

    /// Makes the names in a directory durable.
    fn sync_names(&self, directory: Directory) -> io::Result<()> {
        if mutation_enabled(Mutation::NameUnsynced) {
            Ok(())
        } else {
            self.storage.sync_dir(&directory.path())
        }
    }

    /// Returns the open file of a record.
    fn file(&self, name: &RecordId, number: u64) -> io::Result<File> {
        if let Some(file) = self.open_files.get(number) {
            return Ok(file);
        }
        let file = self.storage.open(Path::new(&path_of(name)), OpenMode::Read)?;
        self.open_files.insert(number, file.clone());
        if !self.contains(name) {
            // It was removed meanwhile, and that thread has already removed it from the open files.
            self.open_files.remove(number);
        }
        Ok(file)
    }

    /// Creates the temporary file of a record, and its directories.
    fn create(&self, name: &RecordId) -> io::Result<File> {
        self.dirs.create(&*self.storage, Directory::of(name))?;
        let path = temporary_of(name);
        match self.storage.open(Path::new(&path), OpenMode::Create) {
            // An earlier attempt could not remove its file.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.storage.remove(Path::new(&path))?;
                self.storage.open(Path::new(&path), OpenMode::Create)
            }
            result => result,
        }
    }

    /// Removes the temporary file of a record that could not be written.
    fn discard(&self, plan: &PlannedRecord<'_>, error: &io::Error) -> WriteError {
        debug!(%error, name = ?plan.name, "cannot write record");
        let removed = self.storage.remove(Path::new(&temporary_of(&plan.name)));
        let mut files = self.index.lock();
        if removed.is_ok() || removed.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            files.bytes -= plan.layout.len;
        }
        if let Some(len) = plan.replaces {
            files.orphans.insert(plan.name, len);
        }
        write_error(error)
    }

    /// Inserts a written record into the index.
    fn insert(&self, plan: PlannedRecord<'_>) -> Result<(), WriteError> {
        let PlannedRecord { name, layout, replaces, .. } = plan;
        let removed = {
            let mut files = self.index.lock();
            // A removal searches the index after it has added its tombstone: one of the two sees the other.
            let removed = self.tombstones.covers(&name.id, name.version);
            if !removed {
                files.bytes -= replaces.unwrap_or(0);
                files.insert(&self.eviction, name, layout.len, layout.preamble_read_len);
            }
            removed
        };
        if removed {
            _ = self.unlink(&name, layout.len, replaces);
            return Err(WriteError::Removed);
        }
        Ok(())
    }

    /// Unlinks a file that the caller has claimed, or that may no longer be written. If that fails, it becomes an
    /// orphan.
    fn unlink(&self, name: &RecordId, len: u64, replaced: Option<u64>) -> io::Result<()> {
        let removed = self.storage.remove(Path::new(&path_of(name)));
        let mut files = self.index.lock();
        files.bytes -= replaced.unwrap_or(0);
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(%error, ?name, "cannot remove file of the disk tier; retrying later");
                files.orphans.insert(*name, len);
                Err(error)
            }
            _ => {
                files.bytes -= len;
                files.unsynced.insert(Directory::of(name));
                Ok(())
            }
        }
    }

    /// Makes the deletion of files durable. Returns the directories for which that failed.
    fn sync_removals(&self) -> Vec<Directory> {
        let unsynced = std::mem::take(&mut self.index.lock().unsynced);
        unsynced.into_iter().filter(|dir| self.storage.sync_dir(&dir.path()).is_err()).collect()
    }

    /// Compacts the tombstone log.
    fn compact_tombstones(&self, queue: &mut dyn Queue) {
        let failed = self.sync_removals();
        let keep_all = !self.complete || !failed.is_empty();
        self.index.lock().unsynced.extend(failed);
        let mut needed = self.claims.objects();
        {
            let files = self.index.lock();
            needed.extend(files.orphans.keys().chain(files.evicting.keys()).map(|name| name.id));
        }
        let keep = |id: &ObjectId, _| keep_all || needed.contains(id);
        if let Err(error) = self.tombstones.compact(queue, keep) {
            warn!(%error, "cannot compact the tombstone log; retrying later");
        }
    }
}

impl Backend for FileBackend {
    fn write(&self, queue: &mut dyn Queue, records: &[RecordSource<'_>]) -> Vec<Result<(), WriteError>> {
        let names: Vec<RecordId> = records.iter().map(|record| RecordId::of(record.header)).collect();
        let mut results = vec![Ok(()); records.len()];
        let mut refused = 0;
        self.claims.write_each(&names, |indices| {
            for indices in indices.chunks(BATCH_FILES_MAX) {
                self.write_claimed(queue, records, indices, &mut refused, &mut results);
            }
        });
        results
    }

    fn locate(&self, name: &RecordId) -> Option<RecordLocation> {
        let indexed = *self.index.lock().records.get(name)?;
        self.eviction.touch(indexed.number);
        match self.file(name, indexed.number) {
            Ok(file) => Some(RecordLocation {
                file,
                offset: 0,
                len: indexed.len,
                preamble_read_len: indexed.preamble_read_len,
                read_guard: None,
            }),
            Err(error) => {
                // Most likely evicted or removed a moment ago.
                debug!(%error, ?name, "cannot open file of the disk tier");
                None
            }
        }
    }

    fn drop_corrupt(&self, name: &RecordId) {
        let mut files = self.index.lock();
        if let Some(file) = files.take_out(&self.eviction, name) {
            files.orphans.insert(*name, file.len);
            drop(files);
            self.open_files.remove(file.number);
        }
    }

    fn remove(&self, queue: &mut dyn Queue, names: &[(ObjectId, Epoch)]) -> io::Result<()> {
        self.tombstones.append(queue, names)?;
        let mut gone = vec![];
        {
            let mut files = self.index.lock();
            for &(id, version) in names {
                let first = RecordId { id, version: Epoch::ZERO, stripe: 0 };
                let last = RecordId { id, version, stripe: u16::MAX };
                let found: Vec<RecordId> = files.records.range(first..=last).map(|(name, _)| *name).collect();
                for name in found {
                    let file = files.take_out(&self.eviction, &name).expect("it was just found");
                    gone.push((name, file.len));
                    self.open_files.remove(file.number);
                }
                let orphans: Vec<RecordId> =
                    files.orphans.range(first..=last).map(|(name, _)| *name).collect();
                for name in orphans {
                    let len = files.orphans.remove(&name).expect("it was just found");
                    gone.push((name, len));
                }
            }
        }
        // The tombstones keep other threads from writing them.
        gone.iter().for_each(|(name, len)| _ = self.unlink(name, *len, None));
        if self.tombstones.needs_compaction() {
            self.compact_tombstones(queue);
        }
        Ok(())
    }

    fn prepare_eviction(&self, bytes: u64) -> Option<Eviction> {
        let mut eviction = Eviction { names: vec![], bytes: 0, handles: vec![] };
        let mut files = self.index.lock();
        while eviction.bytes < bytes {
            let (name, len, number) = if let Some((name, len)) = files.orphans.pop_first() {
                let number = files.next_number;
                files.next_number += 1;
                (name, len, number)
            } else {
                let Some(number) = self.eviction.first() else { break };
                let name = files.names[&number];
                let file = files.take_out(&self.eviction, &name).expect("the queue has only indexed records");
                self.open_files.remove(number);
                eviction.names.push(name);
                (name, file.len, number)
            };
            eviction.bytes += len;
            eviction.handles.push(number);
            files.names.insert(number, name);
            files.evicting.insert(name, (number, len));
        }
        (!eviction.handles.is_empty()).then_some(eviction)
    }

    fn finish_eviction(&self, _queue: &mut dyn Queue, eviction: Eviction) -> io::Result<()> {
        let mut deleted = Ok(());
        let names: Vec<RecordId> = {
            let mut files = self.index.lock();
            eviction.handles.iter().filter_map(|number| files.names.remove(number)).collect()
        };
        self.claims.write_each(&names, |indices| {
            for &index in indices {
                let name = &names[index];
                let chosen = {
                    let mut files = self.index.lock();
                    // None: the record was written again meanwhile. It may even have been chosen again.
                    let chosen =
                        files.evicting.get(name).filter(|(number, _)| eviction.handles.contains(number));
                    let len = chosen.map(|&(_, len)| len);
                    len.inspect(|_| _ = files.evicting.remove(name))
                };
                if let Some(len) = chosen {
                    let unlinked = self.unlink(name, len, None);
                    deleted = std::mem::replace(&mut deleted, Ok(())).and(unlinked);
                }
            }
        });
        let failed = self.sync_removals();
        let synced = match failed.len() {
            0 => Ok(()),
            directories => Err(io::Error::other(format!("cannot sync {directories} directories"))),
        };
        self.index.lock().unsynced.extend(failed);
        deleted.and(synced)
    }

    fn scan(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(ScannedRecord<'_>)) -> Vec<RecordId> {
        let mut skipped = Vec::new();
        let mut from = Bound::Unbounded;
        loop {
            let names: Vec<(RecordId, IndexedFile)> = {
                let files = self.index.lock();
                let names = files.records.range((from, Bound::Unbounded)).take(SCAN_FILES_MAX);
                names.map(|(&name, &file)| (name, file)).collect()
            };
            let Some((last, _)) = names.last() else { return skipped };
            from = Bound::Excluded(*last);
            let scans = names.iter().enumerate().map(|(tag, (name, indexed))| PreambleScan {
                tag,
                file: self.storage.open(Path::new(&path_of(name)), OpenMode::Read),
                offset: 0,
                len: indexed.len,
                preamble_read_len: indexed.preamble_read_len,
            });
            scan_preambles(queue, scans, &mut |tag, preamble| {
                let (name, indexed) = &names[tag];
                if !self.contains(name) {
                    return; // removed meanwhile
                }
                match preamble {
                    Ok(preamble) if preamble.matches(name, indexed.len, indexed.preamble_read_len) => {
                        found(preamble.scanned());
                    }
                    _ => skipped.push(*name),
                }
            });
        }
    }

    fn contains(&self, name: &RecordId) -> bool {
        self.index.lock().records.contains_key(name)
    }

    fn names(&self) -> Vec<RecordId> {
        self.index.lock().records.keys().copied().collect()
    }

    fn usage(&self) -> Usage {
        let log_bytes = self.tombstones.log_bytes();
        let files = self.index.lock();
        Usage { bytes: files.bytes + log_bytes, limit: self.limit, records: files.records.len() as u64 }
    }
}

/// Returns the write error for a failed operation.
fn write_error(error: &io::Error) -> WriteError {
    if error.kind() == io::ErrorKind::StorageFull { WriteError::NoSpace } else { WriteError::Io }
}
