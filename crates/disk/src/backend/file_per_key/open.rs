//! Opens a tier: scans the files and builds the index. Also inspects a tier without opening it.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::sync::Arc;

use moontide_rt::collections::{HashMap, HashSet};
use moontide_rt::sync::Mutex;
use moontide_types::ObjectId;
use tracing::{info, warn};

use super::dirs::{Directory, DirectoryCache, byte_of};
use super::names::{Kind, kind_of, path_of};
use super::{FileBackend, FileConfig, FileIndex};
use crate::backend::batch_io::{PreambleScan, READS_MAX, ScanError, scan_preambles, verify_payload};
use crate::backend::bucket::open_files::OpenFileCache;
use crate::backend::claims::WriteClaims;
use crate::backend::eviction_queue::EvictionQueue;
use crate::backend::tombstones::Tombstones;
use crate::backend::{Backend, OpenError, RecordId, RecordLocation, Recovery, ScannedRecord};
use crate::buffer::BLOCK_BYTES;
use crate::record::{InspectedRecord, InspectedState, RecordPreamble};
use crate::storage::{DirEntry, OpenMode, Queue, Storage};

/// Content of the directories.
#[derive(Debug, Default)]
struct DirectoryWalk {
    /// Records by file name, with the lengths of their files.
    records: Vec<(RecordId, u64)>,
    /// Paths and lengths of unfinished files.
    temporary: Vec<(String, u64)>,
    directories: Vec<(u8, Vec<u8>)>,
    /// Directories that could not be read.
    unreadable: Vec<String>,
}

impl FileBackend {
    /// Opens the tier, and calls `found` for every record; corrupt ones are skipped and listed. Payloads are not read:
    /// every later read verifies them.
    pub fn open(
        storage: Arc<dyn Storage>,
        queue: &mut dyn Queue,
        config: FileConfig,
        found: &mut dyn FnMut(ScannedRecord<'_>),
    ) -> Result<(FileBackend, Recovery), OpenError> {
        let (tombstones, _) =
            Tombstones::open(&storage, queue).map_err(OpenError::io("read the tombstone log"))?;
        let walk = walk(&*storage)?;
        let mut recovery = Recovery { files: walk.records.len() as u64, ..Recovery::default() };
        for directory in &walk.unreadable {
            recovery.bad(directory, 0, "cannot read the directory");
        }
        let mut index = FileIndex::default();
        index.bytes += walk.temporary.iter().map(|(path, len)| remove(&*storage, path, *len)).sum::<u64>();

        let removed = |(name, _): &(RecordId, u64)| tombstones.covers(&name.id, name.version);
        let (removed, records): (Vec<_>, Vec<_>) = walk.records.into_iter().partition(removed);
        recovery.removed = removed.len() as u64;
        let complete = walk.unreadable.is_empty();
        for (name, len) in &removed {
            if remove(&*storage, &path_of(name), *len) > 0 {
                index.bytes += len;
                index.orphans.insert(*name, *len);
            }
        }
        if complete && tombstones.len() > 0 {
            compact_tombstones(&*storage, queue, &tombstones, &mut index);
        }

        let eviction = EvictionQueue::new(config.eviction_policy);
        let mut valid = vec![];
        scan_records(&*storage, queue, &records, &mut |(name, len), preamble| match preamble {
            Ok(preamble) => {
                recovery.records += 1;
                valid.push((*name, *len, preamble.layout.preamble_read_len));
                found(preamble.scanned());
            }
            Err(reason) => {
                recovery.bad(&path_of(name), 0, reason);
                index.orphans.insert(*name, *len);
            }
        });
        index.bytes += records.iter().map(|(_, len)| len).sum::<u64>();
        valid.sort_unstable_by_key(|(name, ..)| (name.version, name.id, name.stripe));
        for (name, len, preamble_read_len) in valid {
            index.insert(&eviction, name, len, preamble_read_len);
        }

        let backend = FileBackend {
            dirs: durable_directories(&*storage, walk.directories),
            storage,
            limit: config.limit_bytes,
            tombstones,
            index: Mutex::new(index),
            claims: WriteClaims::default(),
            eviction,
            open_files: OpenFileCache::new(config.open_files_max),
            complete,
        };
        recovery.bytes = backend.usage().bytes;
        info!(
            records = recovery.records,
            removed = recovery.removed,
            bad = recovery.bad_count,
            "files opened"
        );
        Ok((backend, recovery))
    }
}

/// Visits every record of a tier without changes. With `verify` the payloads are read, too. The tier may be in use:
/// records that are written or removed meanwhile are missing or corrupt.
pub fn inspect(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    verify: bool,
    each: &mut dyn FnMut(InspectedRecord<'_>),
) -> Result<(), OpenError> {
    let (tombstones, _) =
        Tombstones::inspect(storage, queue).map_err(OpenError::io("read the tombstone log"))?;
    let walk = walk(&**storage)?;
    for directory in &walk.unreadable {
        let state = InspectedState::Corrupt { reason: "cannot read the directory".into() };
        each(InspectedRecord { file: directory, offset: 0, len: 0, name: None, state });
    }
    // The scan uses the queue during the callback, so payloads are read with another one.
    let mut payloads = verify.then(|| storage.queue(&Default::default()));
    scan_records(&**storage, queue, &walk.records, &mut |(name, len), preamble| {
        let path = path_of(name);
        let state = match (&preamble, &mut payloads) {
            (Err(reason), _) => InspectedState::Corrupt { reason: reason.clone() },
            _ if tombstones.covers(&name.id, name.version) => InspectedState::Removed,
            (Ok(preamble), Some(queue)) => match storage.open(Path::new(&path), OpenMode::Read) {
                Ok(file) => {
                    let preamble_read_len = preamble.layout.preamble_read_len;
                    verify_payload(
                        &mut **queue,
                        *name,
                        RecordLocation { file, offset: 0, len: *len, preamble_read_len, read_guard: None },
                    )
                }
                Err(error) => InspectedState::Corrupt { reason: error.to_string() },
            },
            (Ok(_), None) => InspectedState::Ok,
        };
        let name = preamble.as_ref().ok().map(|preamble| (&preamble.header, preamble.section));
        each(InspectedRecord { file: &path, offset: 0, len: *len, name, state });
    });
    Ok(())
}

/// Lists all directories. The records of an unreadable one are skipped.
fn walk(storage: &dyn Storage) -> Result<DirectoryWalk, OpenError> {
    let mut walk = DirectoryWalk::default();
    let root = list(storage, "").map_err(OpenError::io("list the directory of the disk tier"))?;
    for (first, parent) in subdirectories(root) {
        let Ok(entries) = list(storage, &parent) else {
            walk.unreadable.push(parent);
            continue;
        };
        let mut seconds = vec![];
        for (second, _) in subdirectories(entries) {
            seconds.push(second);
            let directory = Directory { first, second };
            let Ok(entries) = list(storage, &directory.to_string()) else {
                walk.unreadable.push(directory.to_string());
                continue;
            };
            for DirEntry { name: file, len, .. } in entries.into_iter().filter(|entry| !entry.is_dir) {
                match kind_of(directory, &file) {
                    Kind::Record(name) => walk.records.push((name, len)),
                    Kind::Temporary => walk.temporary.push((format!("{directory}/{file}"), len)),
                    Kind::Foreign => {}
                }
            }
        }
        walk.directories.push((first, seconds));
    }
    Ok(walk)
}

fn list(storage: &dyn Storage, directory: &str) -> io::Result<Vec<DirEntry>> {
    let mut tries = (0..READS_MAX).map(|_| storage.list(Path::new(directory)));
    let first = tries.next().expect("at least one");
    first.or_else(|error| tries.find_map(Result::ok).ok_or(error))
}

fn subdirectories(entries: Vec<DirEntry>) -> impl Iterator<Item = (u8, String)> {
    let directories = entries.into_iter().filter(|entry| entry.is_dir);
    directories.filter_map(|entry| Some((byte_of(&entry.name)?, entry.name)))
}

/// Receives a record, by its id and the length of its file, with its valid preamble or the reason why it is bad.
type EachRecord<'j> = dyn FnMut(&(RecordId, u64), Result<RecordPreamble<'_>, String>) + 'j;

/// Reads and checks the preambles of records.
fn scan_records(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    records: &[(RecordId, u64)],
    each: &mut EachRecord<'_>,
) {
    // A file whose length is not a multiple of the block size was truncated; reads of whole blocks would not reach its
    // end.
    let whole = |len: u64| len > 0 && len.is_multiple_of(BLOCK_BYTES as u64);
    for record in records.iter().filter(|(_, len)| !whole(*len)) {
        each(record, Err(format!("not a record: the file has {} bytes", record.1)));
    }
    let scans = records.iter().enumerate().filter(|(_, (_, len))| whole(*len)).map(|(tag, (name, len))| {
        let file = storage.open(Path::new(&path_of(name)), OpenMode::Read);
        PreambleScan { tag, file, offset: 0, len: *len, preamble_read_len: BLOCK_BYTES as u64 }
    });
    scan_preambles(queue, scans, &mut |tag, preamble| {
        let record = &records[tag];
        let checked = preamble.map_err(|error: ScanError| error.to_string()).and_then(|preamble| {
            let matches = preamble.matches(&record.0, record.1, preamble.layout.preamble_read_len);
            if matches { Ok(preamble) } else { Err("record does not match the file name or length".into()) }
        });
        each(record, checked);
    });
}

/// Removes a file. Returns the bytes that it still takes.
fn remove(storage: &dyn Storage, path: &str, len: u64) -> u64 {
    match storage.remove(Path::new(path)) {
        Ok(()) => 0,
        Err(error) => {
            warn!(%error, path, "cannot remove file of the disk tier; retrying at the next start");
            len
        }
    }
}

/// Drops tombstones of objects of which nothing is left that a crash could restore: neither a file, nor a name whose
/// removal is not durable, of this process or of an earlier one.
fn compact_tombstones(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    tombstones: &Tombstones,
    index: &mut FileIndex,
) {
    let synced = RefCell::new(HashMap::new());
    let is_durable = |directory: Directory| {
        *synced.borrow_mut().entry(directory).or_insert_with(|| match storage.sync_dir(&directory.path()) {
            Err(error) => error.kind() == io::ErrorKind::NotFound,
            Ok(()) => true,
        })
    };
    let left: HashSet<ObjectId> = index.orphans.keys().map(|name| name.id).collect();
    let keep = |id: &ObjectId, _| left.contains(id) || !is_durable(Directory::of_id(id));
    if let Err(error) = tombstones.compact(queue, keep) {
        warn!(%error, "cannot compact the tombstone log; retrying later");
    }
    index
        .unsynced
        .extend(synced.into_inner().into_iter().filter(|(_, durable)| !durable).map(|(dir, _)| dir));
}

/// Syncs all parent directories, because an earlier process may have exited before it did so. Returns the durable
/// directories. The root is already synced.
fn durable_directories(storage: &dyn Storage, directories: Vec<(u8, Vec<u8>)>) -> DirectoryCache {
    let mut dirs = DirectoryCache::default();
    for (first, seconds) in directories {
        if storage.sync_dir(Path::new(&format!("{first:02x}"))).is_ok() {
            dirs.add_durable(first, seconds.into_iter());
        }
    }
    dirs
}
