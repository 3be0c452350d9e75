//! [`Dirs`]: the directories of records, and which of them are known to be there for good.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use hashbrown::HashSet;
use moontide_types::ObjectId;
use parking_lot::Mutex;

use crate::backend::RecordName;
use crate::storage::Storage;

/// A directory of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Directory {
    /// First byte of the ids in it: the directory above.
    pub(super) first: u8,
    /// Second byte of the ids in it.
    pub(super) second: u8,
}

impl Directory {
    /// The directory of a record.
    pub(super) fn of(name: &RecordName) -> Directory {
        Directory::of_id(&name.id)
    }

    /// The directory of an object's records.
    pub(super) fn of_id(id: &ObjectId) -> Directory {
        Directory { first: id.0[0], second: id.0[1] }
    }

    /// Its path.
    pub(super) fn path(&self) -> PathBuf {
        self.to_string().into()
    }
}

impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}/{:02x}", self.first, self.second)
    }
}

/// The byte whose directory has this name.
pub(super) fn byte_of(name: &str) -> Option<u8> {
    let byte = u8::from_str_radix(name, 16).ok()?;
    (name == format!("{byte:02x}")).then_some(byte)
}

/// Directories that a crash does not take away.
#[derive(Debug, Default)]
pub(super) struct Dirs {
    durable: Mutex<Durable>,
}

#[derive(Debug, Default)]
struct Durable {
    first: HashSet<u8>,
    both: HashSet<Directory>,
}

impl Dirs {
    /// A start has seen these and synced the directories above them.
    pub(super) fn know(&mut self, first: u8, second: impl Iterator<Item = u8>) {
        let durable = self.durable.get_mut();
        durable.first.insert(first);
        durable.both.extend(second.map(|second| Directory { first, second }));
    }

    /// Makes a directory for good, if it is not there. The lock is held until it is: whoever comes second must not
    /// believe in what is not durable yet.
    pub(super) fn make(&self, storage: &dyn Storage, directory: Directory) -> io::Result<()> {
        let mut durable = self.durable.lock();
        if durable.both.contains(&directory) {
            return Ok(());
        }
        let above = format!("{:02x}", directory.first);
        let above = Path::new(&above);
        if !durable.first.contains(&directory.first) {
            storage.create_dir(above)?;
            storage.sync_dir(Path::new(""))?;
            durable.first.insert(directory.first);
        }
        storage.create_dir(&directory.path())?;
        storage.sync_dir(above)?;
        durable.both.insert(directory);
        Ok(())
    }
}
