//! [`FileBackend`]: each record is a file, which other tools can look at, copy and delete.
//!
//! ```text
//!  3f/a9/3fa9….-0000000000000007-0.rec       id, version and stripe, in directories by the first two bytes of the id
//!  3f/a9/3fa9….-0000000000000007-0.rec.tmp   one that is being written
//!  removed.log                               what was removed
//! ```
//!
//! # Order of writing
//!
//! ```text
//!  write    .tmp written ─▶ synced ─▶ renamed ─▶ directory synced ─▶ found, acknowledged
//!  remove   tombstone, durable ─▶ not found, acknowledged ─▶ unlinked; the directory is synced before the tombstone goes
//!  evict    not found ─▶ the master hears of it ─▶ unlinked
//! ```
//!
//! Invariants:
//!
//! * a file without `.tmp` is whole: its bytes were durable before it had its name;
//! * whoever writes, replaces or evicts a file has claimed its name, so that none unlinks what another has written;
//! * `bytes` of the books is at least what the files take: it rises before a file is made and falls when it is gone.
//!
//! A file that cannot be read, and one that could not be unlinked, is debris: it takes space, is the first to be
//! evicted, and is replaced when its record is written again.
//!
//! Directories are made when they are needed and stay. They are not counted: there are 65,792 of them at most.
//!
//! Who was written first is not stored. After a restart the versions stand for it, which masters give in rising order.

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

use hashbrown::{HashMap, HashSet};
use moontide_types::{Epoch, ObjectId};
use parking_lot::Mutex;
use tracing::{debug, warn};

use crate::backend::bucket::OPEN_FILES_MAX_DEFAULT;
use crate::backend::bucket::files::Files;
use crate::backend::claims::Claims;
use crate::backend::order::Order;
use crate::backend::scatter::{Scan, run_for_each, scan_fronts};
use crate::backend::tombstones::Tombstones;
use crate::backend::{
    Backend, Eviction, EvictionOrder, Found, Location, RecordName, Source, Usage, WriteError,
};
use crate::buffer::Buffer;
use crate::planted::{Bug, planted};
use crate::record::{DiskLayout, WriteOps};
use crate::storage::{File, Mode, Op, OpKind, Queue, Storage};
use dirs::{Directory, Dirs};
use names::{path_of, temporary_of};

pub use open::inspect;

/// Files that a batch has open at a time.
const BATCH_FILES_MAX: usize = 256;

/// Records that a scan has in its hands at a time.
const SCAN_FILES_MAX: usize = 4096;

/// How the tier is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileConfig {
    /// Bytes that may be used.
    pub limit_bytes: u64,
    /// Who goes first when it is full.
    pub order: EvictionOrder,
    /// Files that stay open because they were read lately.
    pub open_files_max: usize,
}

impl FileConfig {
    /// All defaults, with this limit.
    pub fn with_limit(limit_bytes: u64) -> FileConfig {
        FileConfig { limit_bytes, order: EvictionOrder::default(), open_files_max: OPEN_FILES_MAX_DEFAULT }
    }
}

/// Each record is a file.
#[derive(Debug)]
pub struct FileBackend {
    storage: Arc<dyn Storage>,
    limit: u64,
    tombstones: Tombstones,
    /// Never held while the disk works. Before it none is taken; the order's lock may be taken with it.
    books: Mutex<Books>,
    claims: Claims,
    /// Numbers of what is in the index.
    order: Order,
    dirs: Dirs,
    open_files: Files,
    /// Whether all directories were read: only then nothing unknown can come back.
    complete: bool,
}

#[derive(Debug, Default)]
struct Books {
    index: BTreeMap<RecordName, Filed>,
    /// What the order, or an eviction, calls them.
    names: HashMap<u64, RecordName>,
    next_number: u64,
    /// Bytes of all files.
    bytes: u64,
    /// Files that are there but cannot be found, with their lengths.
    debris: BTreeMap<RecordName, u64>,
    /// Files that were chosen for eviction, with their numbers and lengths.
    evicting: HashMap<RecordName, (u64, u64)>,
    /// Directories from which names were removed that a crash would bring back.
    unsynced: HashSet<Directory>,
}

/// A record that can be found.
#[derive(Clone, Copy, Debug)]
struct Filed {
    number: u64,
    len: u64,
    head_len: u64,
}

/// A record on its way to the disk.
struct Planned<'a> {
    /// Its place in the caller's list.
    place: usize,
    source: Source<'a>,
    name: RecordName,
    layout: DiskLayout,
    /// Bytes of a useless file of the same name, which this one replaces.
    replaces: Option<u64>,
}

impl Books {
    fn insert(&mut self, order: &Order, name: RecordName, len: u64, head_len: u64) {
        let number = self.next_number;
        self.next_number += 1;
        order.insert(number);
        self.names.insert(number, name);
        self.index.insert(name, Filed { number, len, head_len });
    }

    fn take_out(&mut self, order: &Order, name: &RecordName) -> Option<Filed> {
        let filed = self.index.remove(name)?;
        order.remove(filed.number);
        self.names.remove(&filed.number);
        Some(filed)
    }

    /// Whether a record is on the disk, in this version or a newer one.
    fn has(&self, name: &RecordName) -> bool {
        let last = RecordName { id: name.id, version: Epoch::MAX, stripe: u16::MAX };
        self.index.range(name..=&last).any(|(other, _)| other.stripe == name.stripe)
    }

    /// Takes over a useless file of this name.
    fn take_useless(&mut self, name: &RecordName) -> Option<u64> {
        let evicting = self.evicting.remove(name).map(|(_, len)| len);
        self.debris.remove(name).or(evicting)
    }
}

impl FileBackend {
    /// Finds room for a record, if others of `refused` bytes found none before it.
    fn plan<'a>(&self, place: usize, source: Source<'a>, refused: u64) -> Result<Planned<'a>, WriteError> {
        let layout = DiskLayout::of_source(&source)?;
        let name = RecordName::of(source.header);
        if self.tombstones.covers(&name.id, name.version) {
            return Err(WriteError::Removed);
        }
        let log_bytes = self.tombstones.log_bytes();
        if layout.len > self.limit {
            return Err(WriteError::TooLarge { bytes: layout.len });
        }
        let mut books = self.books.lock();
        if books.has(&name) {
            return Err(WriteError::Exists);
        }
        let wanted = (books.bytes + log_bytes + refused + layout.len).saturating_sub(self.limit);
        if wanted > 0 {
            return Err(WriteError::Full { wanted });
        }
        books.bytes += layout.len;
        let replaces = books.take_useless(&name);
        Ok(Planned { place, source, name, layout, replaces })
    }

    /// Writes records whose names the caller has claimed, a bounded number.
    fn write_claimed(
        &self,
        queue: &mut dyn Queue,
        records: &[Source<'_>],
        places: &[usize],
        refused: &mut u64,
        results: &mut [Result<(), WriteError>],
    ) {
        let mut planned = Vec::with_capacity(places.len());
        for &place in places {
            match self.plan(place, records[place], *refused) {
                Ok(plan) => planned.push(plan),
                Err(error) => {
                    if let WriteError::Full { .. } = error {
                        *refused += DiskLayout::of(records[place].header).len;
                    }
                    results[place] = Err(error);
                }
            }
        }
        let mut made = vec![];
        for plan in planned {
            match self.make(&plan.name) {
                Ok(file) => made.push((plan, file)),
                Err(error) => results[plan.place] = Err(self.give_up(&plan, &error)),
            }
        }
        let ops = made.iter().enumerate().flat_map(|(number, (plan, file))| {
            let mut ops = WriteOps::new(file, 0);
            ops.record(&plan.source);
            ops.map(move |op| (number, op))
        });
        let written = run_for_each(queue, made.len(), ops);
        let wanted = |number: &usize| written[*number].is_ok() && !planted(Bug::RenameBeforeSync);
        let syncs = made.iter().enumerate().filter(|(number, _)| wanted(number));
        let syncs = syncs.map(|(number, (_, file))| {
            let (file, buffer) = (file.clone(), Buffer::None);
            (number, Op { tag: 0, kind: OpKind::Sync, file, offset: 0, buffer })
        });
        let synced = run_for_each(queue, made.len(), syncs);
        let mut named = vec![];
        for (((plan, _), written), synced) in made.into_iter().zip(written).zip(synced) {
            let (from, to) = (temporary_of(&plan.name), path_of(&plan.name));
            let renamed =
                written.and(synced).and_then(|()| self.storage.rename(Path::new(&from), Path::new(&to)));
            match renamed {
                Ok(()) => named.push(plan),
                Err(error) => results[plan.place] = Err(self.give_up(&plan, &error)),
            }
        }
        let directories: HashSet<Directory> = named.iter().map(|plan| Directory::of(&plan.name)).collect();
        let synced: HashMap<Directory, io::Result<()>> =
            directories.into_iter().map(|dir| (dir, self.sync_names(dir))).collect();
        for plan in named {
            let place = plan.place;
            results[place] = match &synced[&Directory::of(&plan.name)] {
                Ok(()) => self.insert(plan),
                Err(error) => {
                    warn!(%error, "a directory of the tier could not be synced");
                    self.forget(&plan.name, plan.layout.len, plan.replaces);
                    Err(refusal(error))
                }
            };
        }
    }

    /// Makes the names in a directory durable.
    fn sync_names(&self, directory: Directory) -> io::Result<()> {
        if planted(Bug::NameUnsynced) { Ok(()) } else { self.storage.sync_dir(&directory.path()) }
    }

    /// The file of a record, open.
    fn file(&self, name: &RecordName, number: u64) -> io::Result<File> {
        if let Some(file) = self.open_files.get(number) {
            return Ok(file);
        }
        let file = self.storage.open(Path::new(&path_of(name)), Mode::Read)?;
        self.open_files.insert(number, file.clone());
        if !self.contains(name) {
            // It has gone meanwhile, and whoever did that has looked for open files already.
            self.open_files.remove(number);
        }
        Ok(file)
    }

    /// Makes the file of a record that is to be written, and its directories.
    fn make(&self, name: &RecordName) -> io::Result<File> {
        self.dirs.make(&*self.storage, Directory::of(name))?;
        let path = temporary_of(name);
        match self.storage.open(Path::new(&path), Mode::Create) {
            // An earlier attempt could not clean up behind itself.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.storage.remove(Path::new(&path))?;
                self.storage.open(Path::new(&path), Mode::Create)
            }
            result => result,
        }
    }

    /// A record did not get its name.
    fn give_up(&self, plan: &Planned<'_>, error: &io::Error) -> WriteError {
        debug!(%error, name = ?plan.name, "a record could not be written");
        let removed = self.storage.remove(Path::new(&temporary_of(&plan.name)));
        let mut books = self.books.lock();
        if removed.is_ok() || removed.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            books.bytes -= plan.layout.len;
        }
        if let Some(len) = plan.replaces {
            books.debris.insert(plan.name, len);
        }
        refusal(error)
    }

    /// A record can be found from now on.
    fn insert(&self, plan: Planned<'_>) -> Result<(), WriteError> {
        let Planned { name, layout, replaces, .. } = plan;
        let removed = {
            let mut books = self.books.lock();
            // Whoever removes looks here after its tombstone is known: one of the two sees the other.
            let removed = self.tombstones.covers(&name.id, name.version);
            if !removed {
                books.bytes -= replaces.unwrap_or(0);
                books.insert(&self.order, name, layout.len, layout.head_len);
            }
            removed
        };
        if removed {
            self.forget(&name, layout.len, replaces);
            return Err(WriteError::Removed);
        }
        Ok(())
    }

    /// Unlinks a file that the caller has claimed, or that nobody may write any more. One that stays is debris.
    fn forget(&self, name: &RecordName, len: u64, replaced: Option<u64>) {
        let removed = self.storage.remove(Path::new(&path_of(name)));
        let mut books = self.books.lock();
        books.bytes -= replaced.unwrap_or(0);
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(%error, ?name, "a file of the tier could not be removed; it is tried again");
                books.debris.insert(*name, len);
            }
            _ => {
                books.bytes -= len;
                books.unsynced.insert(Directory::of(name));
            }
        }
    }

    /// Makes it durable that files are gone; the answer is where that failed.
    fn sync_removals(&self) -> Vec<Directory> {
        let unsynced = std::mem::take(&mut self.books.lock().unsynced);
        unsynced.into_iter().filter(|dir| self.storage.sync_dir(&dir.path()).is_err()).collect()
    }

    /// Drops what nobody needs from a log of removals that has become long.
    fn shorten_tombstones(&self, queue: &mut dyn Queue) {
        let failed = self.sync_removals();
        let keep_all = !self.complete || !failed.is_empty();
        self.books.lock().unsynced.extend(failed);
        let mut left = self.claims.objects();
        {
            let books = self.books.lock();
            left.extend(books.debris.keys().chain(books.evicting.keys()).map(|name| name.id));
        }
        let keep = |id: &ObjectId, _| keep_all || left.contains(id);
        if let Err(error) = self.tombstones.rewrite(queue, keep) {
            warn!(%error, "the log of removals could not be written anew; it is tried again");
        }
    }
}

impl Backend for FileBackend {
    fn write(&self, queue: &mut dyn Queue, records: &[Source<'_>]) -> Vec<Result<(), WriteError>> {
        let names: Vec<RecordName> = records.iter().map(|record| RecordName::of(record.header)).collect();
        let mut results = vec![Ok(()); records.len()];
        let mut refused = 0;
        self.claims.write_each(&names, |places| {
            for places in places.chunks(BATCH_FILES_MAX) {
                self.write_claimed(queue, records, places, &mut refused, &mut results);
            }
        });
        results
    }

    fn locate(&self, name: &RecordName) -> Option<Location> {
        let filed = *self.books.lock().index.get(name)?;
        self.order.touch(filed.number);
        match self.file(name, filed.number) {
            Ok(file) => {
                Some(Location { file, offset: 0, len: filed.len, front_len: filed.head_len, hold: None })
            }
            Err(error) => {
                // Evicted or removed a moment ago, most likely.
                debug!(%error, ?name, "a file of the tier could not be opened");
                None
            }
        }
    }

    fn drop_damaged(&self, name: &RecordName) {
        let mut books = self.books.lock();
        if let Some(filed) = books.take_out(&self.order, name) {
            books.debris.insert(*name, filed.len);
            drop(books);
            self.open_files.remove(filed.number);
        }
    }

    fn remove(&self, queue: &mut dyn Queue, names: &[(ObjectId, Epoch)]) -> io::Result<()> {
        self.tombstones.append(queue, names)?;
        let mut gone = vec![];
        {
            let mut books = self.books.lock();
            for &(id, version) in names {
                let first = RecordName { id, version: Epoch::ZERO, stripe: 0 };
                let last = RecordName { id, version, stripe: u16::MAX };
                let found: Vec<RecordName> = books.index.range(first..=last).map(|(name, _)| *name).collect();
                for name in found {
                    let filed = books.take_out(&self.order, &name).expect("just seen");
                    gone.push((name, filed.len));
                    self.open_files.remove(filed.number);
                }
                let useless: Vec<RecordName> =
                    books.debris.range(first..=last).map(|(name, _)| *name).collect();
                for name in useless {
                    let len = books.debris.remove(&name).expect("just seen");
                    gone.push((name, len));
                }
            }
        }
        // The tombstone keeps all others from writing them.
        gone.iter().for_each(|(name, len)| self.forget(name, *len, None));
        if self.tombstones.wants_rewrite() {
            self.shorten_tombstones(queue);
        }
        Ok(())
    }

    fn prepare_eviction(&self, bytes: u64) -> Option<Eviction> {
        let mut eviction = Eviction { names: vec![], bytes: 0, parts: vec![] };
        let mut books = self.books.lock();
        while eviction.bytes < bytes {
            let (name, len, number) = if let Some((name, len)) = books.debris.pop_first() {
                let number = books.next_number;
                books.next_number += 1;
                (name, len, number)
            } else {
                let Some(number) = self.order.first() else { break };
                let name = books.names[&number];
                let filed = books.take_out(&self.order, &name).expect("the order names what is there");
                self.open_files.remove(number);
                eviction.names.push(name);
                (name, filed.len, number)
            };
            eviction.bytes += len;
            eviction.parts.push(number);
            books.names.insert(number, name);
            books.evicting.insert(name, (number, len));
        }
        (!eviction.parts.is_empty()).then_some(eviction)
    }

    fn finish_eviction(&self, _queue: &mut dyn Queue, eviction: Eviction) {
        let names: Vec<RecordName> = {
            let mut books = self.books.lock();
            eviction.parts.iter().filter_map(|number| books.names.remove(number)).collect()
        };
        self.claims.write_each(&names, |places| {
            for &place in places {
                let name = &names[place];
                let chosen = {
                    let mut books = self.books.lock();
                    // None: it was written again since, in its place. It may even have been chosen again.
                    let chosen =
                        books.evicting.get(name).filter(|(number, _)| eviction.parts.contains(number));
                    let len = chosen.map(|&(_, len)| len);
                    len.inspect(|_| _ = books.evicting.remove(name))
                };
                if let Some(len) = chosen {
                    self.forget(name, len, None);
                }
            }
        });
        let failed = self.sync_removals();
        if !failed.is_empty() {
            warn!(directories = failed.len(), "what was evicted may come back if the machine stops now");
        }
        self.books.lock().unsynced.extend(failed);
    }

    fn scan(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(Found<'_>)) -> u64 {
        let mut untold = 0;
        let mut from = Bound::Unbounded;
        loop {
            let names: Vec<(RecordName, Filed)> = {
                let books = self.books.lock();
                let names = books.index.range((from, Bound::Unbounded)).take(SCAN_FILES_MAX);
                names.map(|(&name, &filed)| (name, filed)).collect()
            };
            let Some((last, _)) = names.last() else { return untold };
            from = Bound::Excluded(*last);
            let scans = names.iter().enumerate().map(|(tag, (name, filed))| Scan {
                tag,
                file: self.storage.open(Path::new(&path_of(name)), Mode::Read),
                offset: 0,
                len: filed.len,
                head_len: filed.head_len,
            });
            scan_fronts(queue, scans, &mut |tag, front| {
                let (name, filed) = &names[tag];
                match front {
                    Ok(front) if front.is_named(name, filed.len, filed.head_len) => {
                        if self.contains(name) {
                            found(front.found());
                        }
                    }
                    _ => untold += u64::from(self.contains(name)),
                }
            });
        }
    }

    fn contains(&self, name: &RecordName) -> bool {
        self.books.lock().index.contains_key(name)
    }

    fn usage(&self) -> Usage {
        let log_bytes = self.tombstones.log_bytes();
        let books = self.books.lock();
        Usage { bytes: books.bytes + log_bytes, limit: self.limit, records: books.index.len() as u64 }
    }
}

/// What a failed operation means for a record.
fn refusal(error: &io::Error) -> WriteError {
    if error.kind() == io::ErrorKind::StorageFull { WriteError::NoSpace } else { WriteError::Io }
}
