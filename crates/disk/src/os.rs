//! [`OsStorage`]: files in a directory of the operating system, and the choice of the I/O engine.
//!
//! Files are opened for direct I/O, so that the tier does not fill the page cache with data that it caches itself. If
//! the file system refuses direct I/O, the page cache is used. The engine is io_uring if the kernel allows it,
//! otherwise plain reads and writes: a start never fails for that reason, and a warning is logged once.
//!
//! Invariants: no path leaves the root; no other user may read what is created; every descriptor is closed on exec; an
//! operation that fails because the disk is full does not change the length of the file.

mod op;
mod posix;
#[cfg(any(test, feature = "testing"))]
mod slow_syncs;
mod uring;

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;

use crate::storage::{DirEntry, DiskSpace, File, OpenMode, Queue, QueueConfig, Storage, relative};
use op::OsFile;
use posix::PosixQueue;
#[cfg(any(test, feature = "testing"))]
use slow_syncs::SlowSyncs;
use uring::{UringFallback, UringQueue};

/// A directory and the files in it.
#[derive(Debug)]
pub struct OsStorage {
    root: PathBuf,
    engine: Engine,
    /// Cleared when the file system refuses direct I/O.
    direct: AtomicBool,
    fallback: Arc<UringFallback>,
    #[cfg(any(test, feature = "testing"))]
    slow_syncs: Option<SlowSyncs>,
}

/// Requested I/O engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// io_uring if the kernel allows it, otherwise plain reads and writes.
    #[default]
    Auto,
    /// io_uring. If the kernel refuses it, the same as `Auto`: a slow cache is better than none.
    Uring,
    /// Plain reads and writes, one at a time per thread.
    Posix,
}

/// An unknown engine name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown I/O engine {name:?}; use auto, uring or posix")]
pub struct UnknownEngine {
    /// The name as given.
    pub name: String,
}

/// Engine in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Uring,
    Posix,
}

impl OsStorage {
    /// Opens the storage in a directory. Creates the directory if it does not exist.
    pub fn open(root: &Path, engine: IoEngine) -> io::Result<OsStorage> {
        OsStorage::open_with(root, engine, true)
    }

    /// Like [`OsStorage::open`]; `direct` is false to simulate a file system without direct I/O.
    fn open_with(root: &Path, engine: IoEngine, direct: bool) -> io::Result<OsStorage> {
        private_dir().recursive(true).create(root)?;
        // The root must not depend on the working directory of the process.
        let root = root.canonicalize()?;
        if let Some(parent) = root.parent() {
            // The name of the root must be durable. A process that may not open the parent did not create the root
            // either.
            if let Ok(parent) = fs::File::open(parent) {
                parent.sync_all()?;
            }
        }
        let fallback = Arc::new(UringFallback::new(&root));
        let engine = match engine {
            IoEngine::Posix => Engine::Posix,
            IoEngine::Auto | IoEngine::Uring => match uring::probe() {
                Ok(()) => Engine::Uring,
                Err(reason) => {
                    fallback.warn(&reason);
                    Engine::Posix
                }
            },
        };
        Ok(OsStorage {
            root,
            engine,
            direct: AtomicBool::new(direct),
            fallback,
            #[cfg(any(test, feature = "testing"))]
            slow_syncs: SlowSyncs::from_environment(),
        })
    }

    /// Returns the name of the engine in use: `uring` or `posix`.
    pub fn engine(&self) -> &'static str {
        match self.engine {
            Engine::Uring => uring::NAME,
            Engine::Posix => posix::NAME,
        }
    }

    /// Whether files bypass the page cache. True until the file system refuses it.
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    fn path(&self, path: &Path) -> PathBuf {
        self.root.join(relative(path))
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> io::Result<(fs::File, bool)> {
        let mut options = OpenOptions::new();
        options.read(true).write(mode != OpenMode::Read).mode(0o600);
        let refused = if self.is_direct() {
            let mut options = options.clone();
            options.create_new(mode == OpenMode::Create).custom_flags(libc::O_DIRECT);
            match options.open(path) {
                Ok(file) => return Ok((file, true)),
                Err(err) if err.raw_os_error() == Some(libc::EINVAL) => true,
                Err(err) => return Err(err),
            }
        } else {
            false
        };
        if refused {
            // The kernel creates the file before it finds that direct I/O is impossible, so the name may exist now. It
            // did not exist before, otherwise the error would have been that it exists.
            options.create(mode == OpenMode::Create);
        } else {
            options.create_new(mode == OpenMode::Create);
        }
        let file = options.open(path)?;
        Ok((file, false))
    }
}

/// Returns a builder of directories that only this user may enter.
fn private_dir() -> fs::DirBuilder {
    let mut builder = fs::DirBuilder::new();
    builder.mode(0o700);
    builder
}

impl Storage for OsStorage {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<File> {
        let path = self.path(path);
        let (file, direct) = self.open_direct(&path, mode)?;
        if file.metadata()?.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if !direct && self.direct.swap(false, Ordering::Relaxed) {
            let root = self.root.display().to_string();
            tracing::info!(root, "file system refuses direct I/O; using the page cache");
        }
        Ok(File::new(OsFile { file, direct }))
    }

    fn len(&self, file: &File) -> io::Result<u64> {
        Ok(file.downcast::<OsFile>().file.metadata()?.len())
    }

    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        let file = &file.downcast::<OsFile>().file;
        let old = file.metadata()?.len();
        if bytes < old || bytes == 0 {
            return file.set_len(bytes);
        }
        let allocated = loop {
            match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
                Err(rustix::io::Errno::INTR) => {}
                result => break result,
            }
        };
        match allocated {
            Ok(()) => Ok(()),
            // Without fallocate, space cannot be allocated in advance: only set the length.
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(bytes),
            Err(err) => {
                // Release the space that was allocated before the disk was full.
                file.set_len(old)?;
                Err(err.into())
            }
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(self.path(from), self.path(to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(self.path(path))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let path = self.path(path);
        match private_dir().create(&path) {
            Err(err) if err.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            result => result,
        }
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<DirEntry>> {
        let mut entries = vec![];
        for entry in fs::read_dir(self.path(dir))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                // Removed since the directory was read.
                Err(err) if err.kind() == io::ErrorKind::NotFound => continue,
                Err(err) => return Err(err),
            };
            let is_dir = metadata.is_dir();
            entries.push(DirEntry { name, is_dir, len: if is_dir { 0 } else { metadata.len() } });
        }
        Ok(entries)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let result = fs::File::open(self.path(dir))?.sync_all();
        #[cfg(any(test, feature = "testing"))]
        if let Some(slow) = &self.slow_syncs {
            return slow.delay(result);
        }
        result
    }

    fn space(&self) -> io::Result<DiskSpace> {
        let stat = rustix::fs::statvfs(&self.root)?;
        // Free space for an unprivileged user: some is reserved for root.
        Ok(DiskSpace { total: stat.f_frsize * stat.f_blocks, free: stat.f_frsize * stat.f_bavail })
    }

    fn queue(&self, config: &QueueConfig) -> Box<dyn Queue> {
        let queue: Box<dyn Queue> = match self.engine {
            Engine::Uring => Box::new(UringQueue::new(config, self.fallback.clone())),
            Engine::Posix => Box::new(PosixQueue),
        };
        #[cfg(any(test, feature = "testing"))]
        if let Some(slow) = &self.slow_syncs {
            return slow.queue(queue);
        }
        queue
    }
}

impl FromStr for IoEngine {
    type Err = UnknownEngine;

    fn from_str(name: &str) -> Result<IoEngine, UnknownEngine> {
        match name {
            "auto" => Ok(IoEngine::Auto),
            "uring" => Ok(IoEngine::Uring),
            "posix" => Ok(IoEngine::Posix),
            _ => Err(UnknownEngine { name: name.to_owned() }),
        }
    }
}

impl fmt::Display for IoEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            IoEngine::Auto => "auto",
            IoEngine::Uring => "uring",
            IoEngine::Posix => "posix",
        })
    }
}
