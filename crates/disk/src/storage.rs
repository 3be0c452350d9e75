//! [`Storage`] and [`Queue`]: the layer between the backends and a disk, real or simulated.
//!
//! A storage is a tree of files under one root; paths are relative to it. The storage changes names, synchronously and
//! one at a time. A queue transfers bytes, many operations at a time: each thread has its own, so that none waits for
//! another's lock. A write is durable after a [`OpKind::Sync`] of its file that began after the write ended; a new,
//! renamed or removed name is durable after [`Storage::sync_dir`] of its directory.

use std::any::Any;
use std::fmt;
use std::io;
use std::path::{Component, Path};
use std::sync::Arc;

use crate::buffer::{BLOCK_BYTES, Buffer};

/// A tree of files.
pub trait Storage: Send + Sync + fmt::Debug {
    /// Opens a file.
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<File>;

    /// Returns the length of a file.
    fn len(&self, file: &File) -> io::Result<u64>;

    /// Sets the length of a file and allocates disk space for all of it, so that a full disk fails here and not later.
    /// A smaller length truncates.
    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()>;

    /// Renames a file. An existing target is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a name. Open handles of the file remain valid; its space is freed when the last one is dropped.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Creates a directory, unless it exists. Its parent must exist.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Lists a directory, in no particular order.
    fn list(&self, dir: &Path) -> io::Result<Vec<DirEntry>>;

    /// Makes the names in a directory durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// Returns the size of the disk and its free space.
    fn space(&self) -> io::Result<DiskSpace>;

    /// Creates a queue for the calling thread.
    fn queue(&self, config: &QueueConfig) -> Box<dyn Queue>;
}

/// Access mode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Read only.
    Read,
    /// An existing file, for reads and writes.
    Write,
    /// A new file, for reads and writes.
    Create,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Name. Entries whose names are not UTF-8 are foreign and not listed.
    pub name: String,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Length of a file, in bytes.
    pub len: u64,
}

/// Size of a disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSpace {
    /// Total size.
    pub total: u64,
    /// Space that may still be used.
    pub free: u64,
}

/// An open file; clones refer to the same file. It remains readable when its name is removed.
#[derive(Clone, Debug)]
pub struct File(Arc<dyn StorageFile>);

/// A storage's own representation of an open file.
pub(crate) trait StorageFile: Any + Send + Sync + fmt::Debug {}

impl File {
    /// Wraps an open file of a storage.
    pub(crate) fn new(file: impl StorageFile) -> File {
        File(Arc::new(file))
    }

    /// Returns the file of the storage that opened it.
    ///
    /// # Panics
    /// If a storage of another kind opened it.
    pub(crate) fn downcast<T: StorageFile>(&self) -> &T {
        let file: &dyn Any = &*self.0;
        file.downcast_ref().expect("the file belongs to a storage of this kind")
    }
}

/// Checks a path within a storage. Paths come from this crate and never leave the root.
pub(crate) fn relative(path: &Path) -> &Path {
    let inside = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    assert!(inside, "{path:?} is not a path within the storage");
    path
}

/// Parameters of a queue.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Maximum number of operations in flight.
    pub depth: usize,
    /// Memory of repeated reads: an engine may register it, to avoid pinning it for every operation.
    pub registered: Option<RegisteredMemory>,
}

/// Address range of memory to register. It is only a hint: the [`Buffer`] of each operation still proves that the bytes
/// exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredMemory {
    /// Address of the first byte.
    pub address: usize,
    /// Length in bytes.
    pub len: usize,
}

/// Default depth of a queue: 32 operations keep one NVMe device busy.
pub const QUEUE_DEPTH_DEFAULT: usize = 32;

impl Default for QueueConfig {
    fn default() -> QueueConfig {
        QueueConfig { depth: QUEUE_DEPTH_DEFAULT, registered: None }
    }
}

/// Transfers bytes for one thread.
pub trait Queue: Send + fmt::Debug {
    /// Returns the name of the engine for logs and metrics.
    fn engine(&self) -> &'static str;

    /// Whether [`QueueConfig::registered`] is registered with the kernel.
    fn is_registered(&self) -> bool {
        false
    }

    /// Runs operations, at most `depth` at a time, until the source has no more and all have ended. Each is returned
    /// with its buffer as soon as it has ended, in any order. Reads and writes are complete or fail: partial transfers
    /// are continued, and the end of the file is [`io::ErrorKind::UnexpectedEof`].
    ///
    /// No operation is in flight when this returns or unwinds: the caller owns the buffers again.
    fn run<'a>(&mut self, source: &mut dyn OpSource<'a>);
}

/// Source of operations for a queue, and receiver of their completions.
pub trait OpSource<'a> {
    /// Returns the next operation, if one is available now. Called again whenever an operation has ended.
    fn next(&mut self) -> Option<Op<'a>>;

    /// Receives a completed operation.
    fn done(&mut self, done: Completion<'a>);
}

/// One I/O operation.
#[derive(Debug)]
pub struct Op<'a> {
    /// Identifies the operation for the caller.
    pub tag: u64,
    /// What to do.
    pub kind: OpKind,
    /// File of the operation.
    pub file: File,
    /// Offset of the first byte; 0 for a sync.
    pub offset: u64,
    /// Bytes to fill or to write; none for a sync.
    pub buffer: Buffer<'a>,
}

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Fills the buffer.
    Read,
    /// Writes the buffer.
    Write,
    /// Makes the file's data durable (`fdatasync`).
    Sync,
}

/// A completed operation.
#[derive(Debug)]
pub struct Completion<'a> {
    /// Tag of the operation.
    pub tag: u64,
    /// Result. After a failed read, the content of the buffer is undefined.
    pub result: io::Result<()>,
    /// Buffer of the operation.
    pub buffer: Buffer<'a>,
}

/// Checks an operation, and returns whether there is anything to do. Bugs of this crate fail an assertion; in release
/// builds, misaligned direct I/O is refused with an error instead, because it has no further effect.
pub(crate) fn check(op: &Op<'_>, direct: bool) -> io::Result<bool> {
    match op.kind {
        OpKind::Sync => return Ok(true),
        OpKind::Read => {
            assert!(!matches!(op.buffer, Buffer::Borrowed(_)), "a read needs a mutable buffer");
        }
        OpKind::Write => {}
    }
    let aligned = op.buffer.is_aligned() && op.offset.is_multiple_of(BLOCK_BYTES as u64);
    debug_assert!(
        aligned || !direct,
        "direct I/O of {} bytes at {} is not aligned",
        op.buffer.len(),
        op.offset
    );
    let in_range = op.offset.checked_add(op.buffer.len() as u64).is_some_and(|end| end <= i64::MAX as u64);
    if (direct && !aligned) || !in_range {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(!op.buffer.is_empty())
}

/// Runs operations and waits for all. Completions are in the order of the operations, whose tags are replaced.
pub fn run_all<'a>(queue: &mut dyn Queue, ops: impl IntoIterator<Item = Op<'a>>) -> Vec<Completion<'a>> {
    struct All<'a, I> {
        ops: I,
        count: u64,
        done: Vec<Option<Completion<'a>>>,
    }
    impl<'a, I: Iterator<Item = Op<'a>>> OpSource<'a> for All<'a, I> {
        fn next(&mut self) -> Option<Op<'a>> {
            let op = self.ops.next()?;
            self.count += 1;
            self.done.push(None);
            Some(Op { tag: self.count - 1, ..op })
        }

        fn done(&mut self, done: Completion<'a>) {
            let index = done.tag as usize;
            self.done[index] = Some(done);
        }
    }
    let mut all = All { ops: ops.into_iter(), count: 0, done: vec![] };
    queue.run(&mut all);
    all.done.into_iter().map(|done| done.expect("the queue completes every operation")).collect()
}

/// Runs one operation.
pub fn run_one<'a>(queue: &mut dyn Queue, op: Op<'a>) -> Completion<'a> {
    run_all(queue, [op]).pop().expect("one operation has one completion")
}

/// Makes a file's data durable.
pub fn sync(queue: &mut dyn Queue, file: &File) -> io::Result<()> {
    let op = Op { tag: 0, kind: OpKind::Sync, file: file.clone(), offset: 0, buffer: Buffer::None };
    run_one(queue, op).result
}
