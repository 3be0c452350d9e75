//! [`OsStorage`]: a directory of the operating system's files, and which engine moves their bytes.
//!
//! Files are opened for direct I/O, so that a cache tier does not fill the page cache with what it keeps itself. A file
//! system that refuses is used through the page cache. The engine is io_uring where the kernel allows it, and else
//! plain reads and writes: a start never fails for that reason, and the log says so once.
//!
//! Invariants: no path leads out of the root; every descriptor is closed on exec; an operation that fails because the
//! disk is full leaves the file as long as it was.

mod transfer;

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;

use crate::posix::PosixQueue;
use crate::storage::{Entry, File, FileInner, Mode, Queue, QueueConfig, Space, Storage};
use crate::uring::{self, UringQueue};

pub(crate) use transfer::{Step, Transfer, check};

/// A directory and the files in it.
#[derive(Debug)]
pub struct OsStorage {
    root: PathBuf,
    engine: Engine,
    /// Cleared when the file system refuses direct I/O.
    direct: AtomicBool,
    fallback: Arc<Fallback>,
}

/// An open file.
#[derive(Debug)]
pub(crate) struct OsFile {
    pub(crate) file: fs::File,
    /// Whether it goes past the page cache: memory, offset and length must be whole blocks.
    pub(crate) direct: bool,
}

/// Which engine an [`OsStorage`] is asked to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring if the kernel allows it, else plain reads and writes.
    #[default]
    Auto,
    /// io_uring. If the kernel refuses, the same as `Auto`: a cache that is slow is better than one that is down.
    Uring,
    /// Plain reads and writes, one at a time per thread.
    Posix,
}

/// A name that is not one of the engines.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not an I/O engine: auto, uring or posix")]
pub struct UnknownEngine {
    /// The name.
    pub name: String,
}

/// What is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Uring,
    Posix,
}

/// Says once per storage that io_uring is refused: every thread's queue may find out.
#[derive(Debug)]
pub(crate) struct Fallback {
    root: PathBuf,
    said: AtomicBool,
}

impl OsStorage {
    /// The storage in a directory, which is made if it is not there.
    pub fn open(root: &Path, engine: EngineChoice) -> io::Result<OsStorage> {
        OsStorage::open_with(root, engine, true)
    }

    /// As [`OsStorage::open`]; without `direct`, as on a file system that refuses direct I/O.
    fn open_with(root: &Path, engine: EngineChoice, direct: bool) -> io::Result<OsStorage> {
        fs::create_dir_all(root)?;
        // An absolute root does not follow the process into another working directory.
        let root = root.canonicalize()?;
        if let Some(parent) = root.parent() {
            // The root's own name must survive a crash. Who may not open the parent did not make the root either.
            if let Ok(parent) = fs::File::open(parent) {
                parent.sync_all()?;
            }
        }
        let fallback = Arc::new(Fallback { root: root.clone(), said: AtomicBool::new(false) });
        let engine = match engine {
            EngineChoice::Posix => Engine::Posix,
            EngineChoice::Auto | EngineChoice::Uring => match uring::probe() {
                Ok(()) => Engine::Uring,
                Err(reason) => {
                    fallback.warn(&reason);
                    Engine::Posix
                }
            },
        };
        Ok(OsStorage { root, engine, direct: AtomicBool::new(direct), fallback })
    }

    /// Which engine is used: `uring` or `posix`.
    pub fn engine(&self) -> &'static str {
        match self.engine {
            Engine::Uring => uring::NAME,
            Engine::Posix => crate::posix::NAME,
        }
    }

    /// Whether files go past the page cache. True until the file system has refused it.
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    fn path(&self, path: &Path) -> PathBuf {
        self.root.join(relative(path))
    }

    fn open_direct(&self, path: &Path, mode: Mode) -> io::Result<(fs::File, bool)> {
        let mut options = OpenOptions::new();
        options.read(true).write(mode != Mode::Read);
        let refused = if self.is_direct() {
            let mut options = options.clone();
            options.create_new(mode == Mode::Create).custom_flags(libc::O_DIRECT);
            match options.open(path) {
                Ok(file) => return Ok((file, true)),
                Err(err) if err.raw_os_error() == Some(libc::EINVAL) => true,
                Err(err) => return Err(err),
            }
        } else {
            false
        };
        if refused {
            // The kernel makes the file before it finds that direct I/O is impossible, so that the name may be there
            // now. It was not there before, else the answer had been that it exists.
            options.create(mode == Mode::Create);
        } else {
            options.create_new(mode == Mode::Create);
        }
        let file = options.open(path)?;
        Ok((file, false))
    }
}

/// Checks a path within a storage, which comes from our own code: it never leads out of the root.
pub(crate) fn relative(path: &Path) -> &Path {
    let inside = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    assert!(inside, "{path:?} is not a path within a storage");
    path
}

impl Storage for OsStorage {
    fn open(&self, path: &Path, mode: Mode) -> io::Result<File> {
        let path = self.path(path);
        let (file, direct) = self.open_direct(&path, mode)?;
        if file.metadata()?.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        if !direct && self.direct.swap(false, Ordering::Relaxed) {
            let root = self.root.display().to_string();
            tracing::info!(root, "the file system refuses direct I/O: files go through the page cache");
        }
        Ok(File(Arc::new(FileInner::Os(OsFile { file, direct }))))
    }

    fn len(&self, file: &File) -> io::Result<u64> {
        Ok(os_file(file).file.metadata()?.len())
    }

    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        let file = &os_file(file).file;
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
            // Without it the room cannot be had in advance: the length at least is right.
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(bytes),
            Err(err) => {
                // What was allocated before the disk was full would stay with the file.
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
        match fs::create_dir(&path) {
            Err(err) if err.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            result => result,
        }
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
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
            entries.push(Entry { name, is_dir, len: if is_dir { 0 } else { metadata.len() } });
        }
        Ok(entries)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        fs::File::open(self.path(dir))?.sync_all()
    }

    fn space(&self) -> io::Result<Space> {
        let stat = rustix::fs::statvfs(&self.root)?;
        // Free is what an ordinary user may take: some is reserved for root.
        Ok(Space { total: stat.f_frsize * stat.f_blocks, free: stat.f_frsize * stat.f_bavail })
    }

    fn queue(&self, config: &QueueConfig) -> Box<dyn Queue> {
        match self.engine {
            Engine::Uring => Box::new(UringQueue::new(config, self.fallback.clone())),
            Engine::Posix => Box::new(PosixQueue),
        }
    }
}

/// The system's file behind a file of this storage.
pub(crate) fn os_file(file: &File) -> &OsFile {
    match &*file.0 {
        FileInner::Os(file) => file,
        FileInner::Simulated(_) => panic!("a simulated file in a storage of the system's files"),
    }
}

impl Fallback {
    /// io_uring was refused, for a thread or for all.
    pub(crate) fn warn(&self, reason: &io::Error) {
        if !self.said.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                root = %self.root.display(),
                %reason,
                "io_uring is not available: the posix engine moves the bytes, one operation at a time per thread; \
                 slower, still right"
            );
        }
    }
}

impl FromStr for EngineChoice {
    type Err = UnknownEngine;

    fn from_str(name: &str) -> Result<EngineChoice, UnknownEngine> {
        match name {
            "auto" => Ok(EngineChoice::Auto),
            "uring" => Ok(EngineChoice::Uring),
            "posix" => Ok(EngineChoice::Posix),
            _ => Err(UnknownEngine { name: name.to_owned() }),
        }
    }
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            EngineChoice::Auto => "auto",
            EngineChoice::Uring => "uring",
            EngineChoice::Posix => "posix",
        })
    }
}
