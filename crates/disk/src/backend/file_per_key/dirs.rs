//! [`DirectoryCache`]: the directories of records, and which of them are durable.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use moontide_rt::collections::HashSet;
use moontide_rt::sync::Mutex;
use moontide_types::ObjectId;

use crate::backend::RecordId;
use crate::storage::Storage;

/// A directory of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Directory {
    /// First byte of the ids in it: name of the parent directory.
    pub(super) first: u8,
    /// Second byte of the ids in it.
    pub(super) second: u8,
}

impl Directory {
    /// Returns the directory of a record.
    pub(super) fn of(name: &RecordId) -> Directory {
        Directory::of_id(&name.id)
    }

    /// Returns the directory of an object's records.
    pub(super) fn of_id(id: &ObjectId) -> Directory {
        Directory { first: id.0[0], second: id.0[1] }
    }

    /// Returns the path, relative to the root.
    pub(super) fn path(&self) -> PathBuf {
        self.to_string().into()
    }
}

impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}/{:02x}", self.first, self.second)
    }
}

/// Returns the byte whose directory has this name.
pub(super) fn byte_of(name: &str) -> Option<u8> {
    let byte = u8::from_str_radix(name, 16).ok()?;
    (name == format!("{byte:02x}")).then_some(byte)
}

/// Directories that are known to be durable.
#[derive(Debug, Default)]
pub(super) struct DirectoryCache {
    durable: Mutex<Durable>,
}

#[derive(Debug, Default)]
struct Durable {
    first: HashSet<u8>,
    both: HashSet<Directory>,
}

impl DirectoryCache {
    /// Adds directories that the start has found, after a sync of their parent directories.
    pub(super) fn add_durable(&mut self, first: u8, second: impl Iterator<Item = u8>) {
        let durable = self.durable.get_mut();
        durable.first.insert(first);
        durable.both.extend(second.map(|second| Directory { first, second }));
    }

    /// Creates a directory durably, if it does not exist. Holds the lock until then: a second caller must not rely on a
    /// directory that is not durable yet.
    pub(super) fn create(&self, storage: &dyn Storage, directory: Directory) -> io::Result<()> {
        let mut durable = self.durable.lock();
        if durable.both.contains(&directory) {
            return Ok(());
        }
        let parent = format!("{:02x}", directory.first);
        let parent = Path::new(&parent);
        if !durable.first.contains(&directory.first) {
            storage.create_dir(parent)?;
            storage.sync_dir(Path::new(""))?;
            durable.first.insert(directory.first);
        }
        storage.create_dir(&directory.path())?;
        storage.sync_dir(parent)?;
        durable.both.insert(directory);
        Ok(())
    }
}
