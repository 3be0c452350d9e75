//! [`State`]: state of a simulated disk, under its lock.
//!
//! Invariants: every name that is live, durable or pending refers to an existing node; `used` is the sum of what the
//! nodes with a live name or an open file are charged; a sync makes only sectors in a node's `dirty` durable.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use moontide_rt::{SplitMix64, mix64};

use super::content::{Content, PAGE_BYTES, parts};
use super::faults::{Counters, Faults};
use super::names::{Change, Directory, Target};
use super::{Inode, SECTOR_BYTES};
use crate::storage::{DirEntry, DiskSpace, relative};

/// Size of a disk without a capacity: 1 PiB.
const UNLIMITED_BYTES: u64 = 1 << 50;

/// Number of unreferenced nodes that triggers a collection.
const GARBAGE_MAX: usize = 64;

/// Kind of an operation, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Changes nothing, and fails only without power.
    Metadata,
    Read,
    Write,
    Sync,
    Name,
}

/// A file, independent of its names.
#[derive(Debug, Default)]
pub(super) struct FileNode {
    /// Content as processes see it.
    pub(super) current: Content,
    /// Content on the disk.
    durable: Content,
    /// Sectors that the next sync writes: bits by page.
    dirty: BTreeMap<u64, u8>,
    /// Whether the next sync writes the length.
    len_dirty: bool,
    /// Number of open files; clones count as one.
    open: usize,
    /// Number of live names: at most one, except after a crash during a rename between directories.
    links: usize,
    /// Bytes charged to the capacity.
    charged: u64,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) rng: SplitMix64,
    /// Draws durations. Apart from the other draws, so that durations do not change which operations fail.
    times_rng: SplitMix64,
    pub(super) faults: Faults,
    /// How often the stalls of operations under way were ended.
    pub(super) stalls_ended: u64,
    pub(super) counters: Counters,
    pub(super) operations: u64,
    /// The power is off once `operations` reaches this number.
    pub(super) crash_at: Option<u64>,
    pub(super) boot: u64,
    nodes: BTreeMap<u64, FileNode>,
    node_next: u64,
    /// By path; that of the root is empty. A directory is before its content.
    directories: BTreeMap<String, Directory>,
    used: u64,
    /// Nodes that lost their last name or open file since the last collection.
    garbage: usize,
}

impl State {
    pub(super) fn new(seed: u64) -> State {
        State {
            rng: SplitMix64::new(seed),
            times_rng: SplitMix64::new(mix64(seed ^ 1)),
            faults: Faults::default(),
            stalls_ended: 0,
            counters: Counters::default(),
            operations: 0,
            crash_at: None,
            boot: 0,
            nodes: BTreeMap::new(),
            node_next: 0,
            directories: BTreeMap::from([(String::new(), Directory::default())]),
            used: 0,
            garbage: 0,
        }
    }

    pub(super) fn is_off(&self) -> bool {
        self.crash_at.is_some_and(|at| self.operations >= at)
    }

    /// Counts an operation. Fails if the power is off.
    pub(super) fn begin(&mut self, kind: Kind) -> io::Result<()> {
        self.check_power()?;
        let counter = match kind {
            Kind::Metadata => return Ok(()),
            Kind::Read => {
                self.counters.reads += 1;
                return Ok(());
            }
            Kind::Write => &mut self.counters.writes,
            Kind::Sync => &mut self.counters.syncs,
            Kind::Name => &mut self.counters.names,
        };
        *counter += 1;
        self.operations += 1;
        Ok(())
    }

    /// Draws how long an operation takes before and after its effect. Without power it fails at once.
    pub(super) fn draw_times(&mut self, kind: Kind) -> (Duration, Duration) {
        if self.is_off() {
            return (Duration::ZERO, Duration::ZERO);
        }
        let (before, after) = self.faults.times.draw(&mut self.times_rng, kind == Kind::Sync);
        self.counters.stalls += u64::from(before + after >= Duration::from_millis(50));
        (before, after)
    }

    fn check_power(&self) -> io::Result<()> {
        if self.is_off() { Err(io::Error::other("power is off")) } else { Ok(()) }
    }

    pub(super) fn fail(&mut self) -> io::Error {
        self.counters.errors += 1;
        io::Error::from_raw_os_error(libc::EIO)
    }

    pub(super) fn fail_by_chance(&mut self, permille: u32) -> io::Result<()> {
        if self.rng.chance(permille) { Err(self.fail()) } else { Ok(()) }
    }

    fn no_space(&mut self) -> io::Error {
        self.counters.no_space += 1;
        io::Error::from_raw_os_error(libc::ENOSPC)
    }

    fn no_space_by_chance(&mut self) -> io::Result<()> {
        if self.rng.chance(self.faults.no_space_permille) { Err(self.no_space()) } else { Ok(()) }
    }

    /// Returns the node of an open file, if it was opened after the last restart.
    pub(super) fn node(&mut self, id: u64, boot: u64) -> io::Result<&mut FileNode> {
        if boot != self.boot {
            return Err(io::Error::other("the file was opened before the power failure"));
        }
        Ok(self.nodes.get_mut(&id).expect("an open file has a node"))
    }

    fn writable(&mut self, inode: &Inode) -> io::Result<&mut FileNode> {
        if !inode.writable {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        self.node(inode.id, inode.boot)
    }

    pub(super) fn opened(&mut self, id: u64) {
        self.nodes.get_mut(&id).expect("the node exists").open += 1;
    }

    pub(super) fn closed(&mut self, id: u64, boot: u64) {
        if boot == self.boot {
            self.nodes.get_mut(&id).expect("an open file has a node").open -= 1;
            self.release(id);
        }
    }

    /// Frees the space of a node without names and open files.
    fn release(&mut self, id: u64) {
        let node = self.nodes.get_mut(&id).expect("the node exists");
        if node.links == 0 && node.open == 0 {
            self.used -= std::mem::take(&mut node.charged);
            self.garbage += 1;
            if self.garbage >= GARBAGE_MAX {
                self.collect();
            }
        }
    }

    /// Drops nodes that no name can restore.
    fn collect(&mut self) {
        let named: std::collections::BTreeSet<u64> =
            self.directories.values().flat_map(Directory::files).collect();
        self.nodes.retain(|id, node| node.open > 0 || named.contains(id));
        self.garbage = 0;
    }

    // -- names ----------------------------------------------------------------------------------------------------

    fn directory(&mut self, path: &str) -> io::Result<&mut Directory> {
        if !self.directories.contains_key(path) {
            let is_file = matches!(self.lookup(path), Ok(Some(Target::File(_))));
            let kind = if is_file { io::ErrorKind::NotADirectory } else { io::ErrorKind::NotFound };
            return Err(kind.into());
        }
        Ok(self.directories.get_mut(path).expect("the directory exists"))
    }

    /// Returns the target of a path. Fails if its parent directory does not exist.
    fn lookup(&mut self, path: &str) -> io::Result<Option<Target>> {
        if path.is_empty() {
            return Ok(Some(Target::Directory));
        }
        let (parent, name) = split(path);
        Ok(self.directory(parent)?.live.get(name).copied())
    }

    pub(super) fn find(&mut self, path: &Path) -> io::Result<u64> {
        match self.lookup(&normal(path))? {
            Some(Target::File(id)) => Ok(id),
            Some(Target::Directory) => Err(io::ErrorKind::IsADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    pub(super) fn create(&mut self, path: &Path) -> io::Result<u64> {
        self.fail_by_chance(self.faults.name_error_permille)?;
        self.no_space_by_chance()?;
        let path = normal(path);
        if self.lookup(&path)?.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let id = self.node_next;
        self.node_next += 1;
        self.nodes.insert(id, FileNode { links: 1, ..FileNode::default() });
        let (parent, name) = split(&path);
        self.directory(parent)?.change(Change::Link(name.to_owned(), Target::File(id)));
        Ok(id)
    }

    pub(super) fn create_dir(&mut self, path: &Path) -> io::Result<()> {
        self.fail_by_chance(self.faults.name_error_permille)?;
        let path = normal(path);
        match self.lookup(&path)? {
            Some(Target::Directory) => return Ok(()),
            Some(Target::File(_)) => return Err(io::ErrorKind::AlreadyExists.into()),
            None => {}
        }
        self.no_space_by_chance()?;
        let (parent, name) = split(&path);
        self.directory(parent)?.change(Change::Link(name.to_owned(), Target::Directory));
        self.directories.insert(path, Directory::default());
        Ok(())
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.fail_by_chance(self.faults.name_error_permille)?;
        let (from, to) = (normal(from), normal(to));
        let id = match self.lookup(&from)? {
            Some(Target::File(id)) => id,
            Some(Target::Directory) => return Err(io::ErrorKind::Unsupported.into()),
            None => return Err(io::ErrorKind::NotFound.into()),
        };
        let replaced = match self.lookup(&to)? {
            Some(Target::Directory) => return Err(io::ErrorKind::IsADirectory.into()),
            Some(Target::File(replaced)) if replaced == id => return Ok(()),
            Some(Target::File(replaced)) => Some(replaced),
            None => None,
        };
        let ((from_parent, from_name), (to_parent, to_name)) = (split(&from), split(&to));
        if from_parent == to_parent {
            let change = Change::Rename(from_name.to_owned(), to_name.to_owned());
            self.directory(from_parent)?.change(change);
        } else {
            self.directory(to_parent)?.change(Change::Link(to_name.to_owned(), Target::File(id)));
            self.directory(from_parent)?.change(Change::Unlink(from_name.to_owned()));
        }
        if let Some(replaced) = replaced {
            self.unlinked(replaced);
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, path: &Path) -> io::Result<()> {
        self.fail_by_chance(self.faults.name_error_permille)?;
        let id = self.find(path)?;
        let path = normal(path);
        let (parent, name) = split(&path);
        self.directory(parent)?.change(Change::Unlink(name.to_owned()));
        self.unlinked(id);
        Ok(())
    }

    fn unlinked(&mut self, id: u64) {
        self.nodes.get_mut(&id).expect("the node exists").links -= 1;
        self.release(id);
    }

    pub(super) fn list(&mut self, dir: &Path) -> io::Result<Vec<DirEntry>> {
        let names = self.directory(&normal(dir))?.live.clone();
        let entry = |(name, target)| match target {
            Target::File(id) => DirEntry { name, is_dir: false, len: self.nodes[&id].current.len() },
            Target::Directory => DirEntry { name, is_dir: true, len: 0 },
        };
        Ok(names.into_iter().map(entry).collect())
    }

    pub(super) fn sync_dir(&mut self, dir: &Path) -> io::Result<()> {
        let failed = self.fail_by_chance(self.faults.sync_error_permille);
        let pending = self.directory(&normal(dir))?.pending();
        // Some changes became durable before the failure. The others remain pending: names do not get lost.
        let kept = if failed.is_ok() { pending } else { self.rng.below(pending as u64 + 1) as usize };
        self.directory(&normal(dir))?.keep(kept);
        failed
    }

    pub(super) fn files(&self) -> Vec<(String, u64)> {
        let mut files = vec![];
        for (path, directory) in &self.directories {
            for (name, target) in &directory.live {
                if let Target::File(id) = target {
                    files.push((join(path, name), self.nodes[id].current.len()));
                }
            }
        }
        files.sort();
        files
    }

    // -- bytes ----------------------------------------------------------------------------------------------------

    pub(super) fn space(&self) -> DiskSpace {
        let total = self.faults.capacity.unwrap_or(UNLIMITED_BYTES);
        DiskSpace { total, free: total.saturating_sub(self.used) }
    }

    /// Charges a file for a growth to this length.
    fn charge(&mut self, id: u64, len: u64) -> io::Result<()> {
        let required = len.next_multiple_of(PAGE_BYTES as u64);
        let more = required.saturating_sub(self.nodes[&id].charged);
        if more > self.space().free {
            return Err(self.no_space());
        }
        self.used += more;
        self.nodes.get_mut(&id).expect("the node exists").charged += more;
        Ok(())
    }

    pub(super) fn allocate(&mut self, inode: &Inode, bytes: u64) -> io::Result<()> {
        self.fail_by_chance(self.faults.write_error_permille)?;
        self.no_space_by_chance()?;
        let len = self.writable(inode)?.current.len();
        if bytes >= len {
            self.charge(inode.id, bytes)?;
        }
        let node = self.writable(inode)?;
        node.set_len(bytes);
        let charged = bytes.next_multiple_of(PAGE_BYTES as u64);
        let freed = node.charged - charged;
        node.charged = charged;
        self.used -= freed;
        Ok(())
    }

    /// Starts a write. It may fail, and may then have changed some of the bytes.
    pub(super) fn admit_write(&mut self, inode: &Inode, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.writable(inode)?;
        self.fail_by_chance(self.faults.write_error_permille)?;
        self.no_space_by_chance()?;
        self.charge(inode.id, offset + bytes.len() as u64)?;
        if self.rng.chance(self.faults.torn_write_permille) {
            self.counters.torn_writes += 1;
            for (number, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                if self.rng.coin() {
                    let offset = offset + (number * SECTOR_BYTES) as u64;
                    self.writable(inode)?.write(offset, sector);
                }
            }
            return Err(self.fail());
        }
        Ok(())
    }

    /// Writes a step of an admitted write. It began with power and completes, even if it was the last operation with
    /// power.
    pub(super) fn put(&mut self, inode: &Inode, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.writable(inode)?.write(offset, bytes);
        self.counters.written_bytes += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn read(&mut self, inode: &Inode, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        if self.node(inode.id, inode.boot)?.current.read(offset, buffer) < buffer.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.counters.read_bytes += buffer.len() as u64;
        Ok(())
    }

    pub(super) fn sync(&mut self, inode: &Inode) -> io::Result<()> {
        self.node(inode.id, inode.boot)?;
        let failed = self.fail_by_chance(self.faults.sync_error_permille);
        let node = self.nodes.get_mut(&inode.id).expect("the node exists");
        if failed.is_ok() {
            node.flush(|_, mask| mask, true);
        } else {
            let rng = &mut self.rng;
            let mut lost = 0;
            let keep_len = rng.coin();
            node.flush(
                |_, mask| {
                    let kept = mask & rng.next_u64() as u8;
                    lost += u64::from((mask & !kept).count_ones());
                    kept
                },
                keep_len,
            );
            self.counters.lost_sectors += lost;
        }
        failed
    }

    /// Simulates a power failure and a restart.
    pub(super) fn restart(&mut self) {
        self.counters.restarts += 1;
        self.crash_at = None;
        self.boot += 1;
        for directory in self.directories.values_mut() {
            let kept = self.rng.below(directory.pending() as u64 + 1) as usize;
            directory.keep(kept);
            directory.drop_pending();
        }
        let mut reached = vec![String::new()];
        // A directory is before its content, so that one without its parent is not reached by any name.
        let directories = std::mem::take(&mut self.directories);
        for (path, directory) in directories {
            if reached.binary_search(&path).is_ok() {
                for (name, _) in directory.live.iter().filter(|(_, target)| **target == Target::Directory) {
                    let child = join(&path, name);
                    let index = reached.binary_search(&child).unwrap_or_else(|index| index);
                    reached.insert(index, child);
                }
                self.directories.insert(path, directory);
            }
        }
        for node in self.nodes.values_mut() {
            node.crash(&mut self.rng);
        }
        self.used = 0;
        for id in self.directories.values().flat_map(|directory| directory.live.values()) {
            if let Target::File(id) = id {
                let node = self.nodes.get_mut(id).expect("a name refers to a node");
                node.links += 1;
                if node.links > 1 {
                    continue;
                }
                node.charged = node.current.len().next_multiple_of(PAGE_BYTES as u64);
                self.used += node.charged;
            }
        }
        self.collect();
    }

    /// Closes all files: those that have no name are gone.
    pub(super) fn close_files(&mut self) {
        self.boot += 1;
        let open: Vec<u64> = self.nodes.iter().filter(|(_, node)| node.open > 0).map(|(&id, _)| id).collect();
        for id in open {
            self.nodes.get_mut(&id).expect("it was just found").open = 0;
            self.release(id);
        }
    }

    // -- for tests ------------------------------------------------------------------------------------------------

    fn expect_file(&mut self, path: &Path) -> &mut FileNode {
        let id = self.find(path).unwrap_or_else(|err| panic!("no file {path:?}: {err}"));
        self.nodes.get_mut(&id).expect("a name refers to a node")
    }

    pub(super) fn read_file(&mut self, path: &Path) -> Vec<u8> {
        let content = &self.expect_file(path).current;
        let mut bytes = vec![0; content.len() as usize];
        content.read(0, &mut bytes);
        bytes
    }

    pub(super) fn write_file(&mut self, path: &Path, bytes: &[u8]) {
        let faults = std::mem::take(&mut self.faults);
        let path_name = normal(path);
        let mut parents: Vec<&str> = path_name.match_indices('/').map(|(end, _)| &path_name[..end]).collect();
        parents.insert(0, "");
        for parent in &parents {
            self.create_dir(Path::new(parent)).unwrap_or_else(|err| panic!("no directory {parent:?}: {err}"));
        }
        if self.find(path).is_err() {
            self.create(path).unwrap_or_else(|err| panic!("no file {path:?}: {err}"));
        }
        for parent in &parents {
            self.sync_dir(Path::new(parent)).expect("no faults");
        }
        self.faults = faults;
        self.overwrite(path, |content| {
            content.set_len(0);
            content.write(0, bytes);
        });
    }

    /// Changes the bytes of a file both for processes and on the disk.
    pub(super) fn overwrite(&mut self, path: &Path, change: impl Fn(&mut Content)) {
        let node = self.expect_file(path);
        change(&mut node.current);
        change(&mut node.durable);
        let charged = node.current.len().next_multiple_of(PAGE_BYTES as u64);
        let before = std::mem::replace(&mut node.charged, charged);
        self.used = self.used - before + charged;
    }
}

impl FileNode {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let len = self.current.len();
        self.current.write(offset, bytes);
        self.len_dirty |= self.current.len() != len;
        for part in parts(offset, bytes.len()) {
            let (first, last) = (part.start / SECTOR_BYTES, (part.start + part.len - 1) / SECTOR_BYTES);
            *self.dirty.entry(part.page).or_default() |= sectors(first, last);
        }
    }

    fn set_len(&mut self, len: u64) {
        if len < self.current.len() {
            // If the file grows again before the next sync, the disk must have zeros, too.
            let first = len / PAGE_BYTES as u64;
            let pages: Vec<u64> =
                self.durable.pages_from(first).chain(self.current.pages_from(first)).collect();
            for page in pages {
                let start = if page == first { (len % PAGE_BYTES as u64) as usize / SECTOR_BYTES } else { 0 };
                *self.dirty.entry(page).or_default() |= sectors(start, PAGE_BYTES / SECTOR_BYTES - 1);
            }
        }
        self.len_dirty |= len != self.current.len();
        self.current.set_len(len);
    }

    /// Writes those of the dirty sectors to the disk that `keep` selects, and marks all of them as clean.
    fn flush(&mut self, mut keep: impl FnMut(u64, u8) -> u8, keep_len: bool) {
        for (page, mask) in std::mem::take(&mut self.dirty) {
            let kept = keep(page, mask);
            if kept != 0 {
                self.durable.take_sectors(&self.current, page, kept);
            }
        }
        let take_len = std::mem::take(&mut self.len_dirty) && keep_len;
        self.durable.truncate(if take_len { self.current.len() } else { self.durable.len() });
    }

    /// Applies a power failure.
    fn crash(&mut self, rng: &mut SplitMix64) {
        let keep_len = rng.coin();
        let len = self.current.len();
        self.flush(
            |page, mask| {
                // Truncated bytes are not replaced by zeros: they exist with the old length, or not at all.
                let left = len.saturating_sub(page * PAGE_BYTES as u64).div_ceil(SECTOR_BYTES as u64);
                let within = if left >= 8 { u8::MAX } else { (1 << left) - 1 };
                mask & within & rng.next_u64() as u8
            },
            keep_len,
        );
        self.current = self.durable.clone();
        self.open = 0;
        self.links = 0;
        self.charged = 0;
    }
}

/// Returns the bits of the sectors of a page, both ends inclusive.
fn sectors(first: usize, last: usize) -> u8 {
    (u8::MAX >> (7 - last)) & (u8::MAX << first)
}

/// Returns the normalised path of a directory. All names are UTF-8.
fn normal(path: &Path) -> String {
    let parts = relative(path).components().filter_map(|part| match part {
        std::path::Component::Normal(name) => Some(name.to_str().expect("a name in UTF-8")),
        _ => None,
    });
    parts.collect::<Vec<_>>().join("/")
}

/// Returns directory and name.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

fn join(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

#[cfg(test)]
impl State {
    pub(super) fn node_count(&self) -> usize {
        self.nodes.len()
    }
}
