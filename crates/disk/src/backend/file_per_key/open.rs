//! How a start finds again what is in the files, and how they are looked at from outside.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};
use moontide_types::ObjectId;
use parking_lot::Mutex;
use tracing::{info, warn};

use super::dirs::{Directory, Dirs, byte_of};
use super::names::{Kind, kind_of, path_of};
use super::{Books, FileBackend, FileConfig};
use crate::backend::bucket::files::Files;
use crate::backend::claims::Claims;
use crate::backend::order::Order;
use crate::backend::scatter::{READS_MAX, Scan, ScanError, scan_fronts, verify_payload};
use crate::backend::tombstones::Tombstones;
use crate::backend::{Backend, Found, Location, OpenError, RecordName, Recovery};
use crate::buffer::BLOCK_BYTES;
use crate::record::{Front, Inspected, InspectedState};
use crate::storage::{Entry, Mode, Queue, Storage};

/// What the directories hold.
#[derive(Debug, Default)]
struct Walk {
    /// Records by their names, with the lengths of their files.
    records: Vec<(RecordName, u64)>,
    /// Paths and lengths of files that were being written.
    temporary: Vec<(String, u64)>,
    directories: Vec<(u8, Vec<u8>)>,
    /// Directories that could not be read.
    unreadable: Vec<String>,
}

impl FileBackend {
    /// Opens the tier. Every record that is there goes to `found`; single bad ones are skipped and listed. Payloads are
    /// not read: whoever reads them finds out whether they are what was written.
    pub fn open(
        storage: Arc<dyn Storage>,
        queue: &mut dyn Queue,
        config: FileConfig,
        found: &mut dyn FnMut(Found<'_>),
    ) -> Result<(FileBackend, Recovery), OpenError> {
        let (tombstones, _) =
            Tombstones::open(&storage, queue).map_err(OpenError::io("reading the log of removals"))?;
        let walk = walk(&*storage)?;
        let mut recovery = Recovery { files: walk.records.len() as u64, ..Recovery::default() };
        for directory in &walk.unreadable {
            recovery.bad(directory, 0, "the directory cannot be read");
        }
        let mut books = Books::default();
        books.bytes += walk.temporary.iter().map(|(path, len)| remove(&*storage, path, *len)).sum::<u64>();

        let removed = |(name, _): &(RecordName, u64)| tombstones.covers(&name.id, name.version);
        let (removed, records): (Vec<_>, Vec<_>) = walk.records.into_iter().partition(removed);
        recovery.removed = removed.len() as u64;
        let complete = walk.unreadable.is_empty();
        for (name, len) in &removed {
            if remove(&*storage, &path_of(name), *len) > 0 {
                books.bytes += len;
                books.debris.insert(*name, *len);
            }
        }
        if complete && tombstones.len() > 0 {
            forget_removals(&*storage, queue, &tombstones, &mut books);
        }

        let order = Order::new(config.order);
        let mut sound = vec![];
        scan_records(&*storage, queue, &records, &mut |(name, len), front| match front {
            Ok(front) => {
                recovery.records += 1;
                sound.push((*name, *len, front.layout.head_len));
                found(front.found());
            }
            Err(why) => {
                recovery.bad(&path_of(name), 0, why);
                books.debris.insert(*name, *len);
            }
        });
        books.bytes += records.iter().map(|(_, len)| len).sum::<u64>();
        sound.sort_unstable_by_key(|(name, ..)| (name.version, name.id, name.stripe));
        sound.into_iter().for_each(|(name, len, head_len)| books.insert(&order, name, len, head_len));

        let backend = FileBackend {
            dirs: know_directories(&*storage, walk.directories),
            storage,
            limit: config.limit_bytes,
            tombstones,
            books: Mutex::new(books),
            claims: Claims::default(),
            order,
            open_files: Files::new(config.open_files_max),
            complete,
        };
        recovery.bytes = backend.usage().bytes;
        info!(
            records = recovery.records,
            removed = recovery.removed,
            bad = recovery.bad_count,
            "tier opened"
        );
        Ok((backend, recovery))
    }
}

/// Tells of every record in a tier and changes nothing. With `verify` the payloads are read, too. A tier that is in use
/// may be looked at: what comes or goes meanwhile is missing or bad.
pub fn inspect(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    verify: bool,
    each: &mut dyn FnMut(Inspected<'_>),
) -> Result<(), OpenError> {
    let (tombstones, _) =
        Tombstones::inspect(storage, queue).map_err(OpenError::io("reading the log of removals"))?;
    let walk = walk(&**storage)?;
    for directory in &walk.unreadable {
        let state = InspectedState::Damaged { why: "the directory cannot be read".into() };
        each(Inspected { file: directory, offset: 0, len: 0, name: None, state });
    }
    // The scan has the queue while it tells of a record, so payloads are read through another one.
    let mut payloads = verify.then(|| storage.queue(&Default::default()));
    scan_records(&**storage, queue, &walk.records, &mut |(name, len), front| {
        let path = path_of(name);
        let state = match (&front, &mut payloads) {
            (Err(why), _) => InspectedState::Damaged { why: why.clone() },
            _ if tombstones.covers(&name.id, name.version) => InspectedState::Removed,
            (Ok(front), Some(queue)) => match storage.open(Path::new(&path), Mode::Read) {
                Ok(file) => {
                    let front_len = front.layout.head_len;
                    verify_payload(
                        &mut **queue,
                        *name,
                        Location { file, offset: 0, len: *len, front_len, hold: None },
                    )
                }
                Err(error) => InspectedState::Damaged { why: error.to_string() },
            },
            (Ok(_), None) => InspectedState::Ok,
        };
        let name = front.as_ref().ok().map(|front| (&front.header, front.section));
        each(Inspected { file: &path, offset: 0, len: *len, name, state });
    });
    Ok(())
}

/// Looks into all directories. One that cannot be read hides its records, but no others.
fn walk(storage: &dyn Storage) -> Result<Walk, OpenError> {
    let mut walk = Walk::default();
    let root = list(storage, "").map_err(OpenError::io("listing the tier's directory"))?;
    for (first, above) in subdirectories(root) {
        let Ok(entries) = list(storage, &above) else {
            walk.unreadable.push(above);
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
            for Entry { name: file, len, .. } in entries.into_iter().filter(|entry| !entry.is_dir) {
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

fn list(storage: &dyn Storage, directory: &str) -> io::Result<Vec<Entry>> {
    let mut tries = (0..READS_MAX).map(|_| storage.list(Path::new(directory)));
    let first = tries.next().expect("at least one");
    first.or_else(|error| tries.find_map(Result::ok).ok_or(error))
}

fn subdirectories(entries: Vec<Entry>) -> impl Iterator<Item = (u8, String)> {
    let directories = entries.into_iter().filter(|entry| entry.is_dir);
    directories.filter_map(|entry| Some((byte_of(&entry.name)?, entry.name)))
}

/// Hears of a record, by its name and the length of its file, whether its front is right or what is wrong with it.
type Judged<'j> = dyn FnMut(&(RecordName, u64), Result<Front<'_>, String>) + 'j;

/// Reads the fronts of records and judges them.
fn scan_records(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    records: &[(RecordName, u64)],
    each: &mut Judged<'_>,
) {
    // One that is not whole blocks long was cut; no read of whole blocks would get to its end.
    let whole = |len: u64| len > 0 && len.is_multiple_of(BLOCK_BYTES as u64);
    for record in records.iter().filter(|(_, len)| !whole(*len)) {
        each(record, Err(format!("a file of {} bytes is no record", record.1)));
    }
    let scans = records.iter().enumerate().filter(|(_, (_, len))| whole(*len)).map(|(tag, (name, len))| {
        let file = storage.open(Path::new(&path_of(name)), Mode::Read);
        Scan { tag, file, offset: 0, len: *len, head_len: BLOCK_BYTES as u64 }
    });
    scan_fronts(queue, scans, &mut |tag, front| {
        let record = &records[tag];
        let judged = front.map_err(|error: ScanError| error.to_string()).and_then(|front| {
            let named = front.is_named(&record.0, record.1, front.layout.head_len);
            if named { Ok(front) } else { Err("another record than its name says, or cut".into()) }
        });
        each(record, judged);
    });
}

/// Removes a file; the bytes that it still takes.
fn remove(storage: &dyn Storage, path: &str, len: u64) -> u64 {
    match storage.remove(Path::new(path)) {
        Ok(()) => 0,
        Err(error) => {
            warn!(%error, path, "a file of the tier could not be removed; it is tried again at the next start");
            len
        }
    }
}

/// Drops removals of which nothing is left that a crash could bring back: neither a file, nor a name whose removal is
/// not durable, be it of this process or of an earlier one.
fn forget_removals(storage: &dyn Storage, queue: &mut dyn Queue, tombstones: &Tombstones, books: &mut Books) {
    let synced = RefCell::new(HashMap::new());
    let is_durable = |directory: Directory| {
        *synced.borrow_mut().entry(directory).or_insert_with(|| match storage.sync_dir(&directory.path()) {
            Err(error) => error.kind() == io::ErrorKind::NotFound,
            Ok(()) => true,
        })
    };
    let left: HashSet<ObjectId> = books.debris.keys().map(|name| name.id).collect();
    let keep = |id: &ObjectId, _| left.contains(id) || !is_durable(Directory::of_id(id));
    if let Err(error) = tombstones.rewrite(queue, keep) {
        warn!(%error, "the log of removals could not be written anew; it is tried again");
    }
    books
        .unsynced
        .extend(synced.into_inner().into_iter().filter(|(_, durable)| !durable).map(|(dir, _)| dir));
}

/// Directories that are there, and now durably: an earlier process may have died before it made them so. The root is
/// synced already.
fn know_directories(storage: &dyn Storage, directories: Vec<(u8, Vec<u8>)>) -> Dirs {
    let mut dirs = Dirs::default();
    for (first, seconds) in directories {
        if storage.sync_dir(Path::new(&format!("{first:02x}"))).is_ok() {
            dirs.know(first, seconds.into_iter());
        }
    }
    dirs
}
