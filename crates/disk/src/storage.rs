//! [`Storage`] and [`Queue`]: the one thin layer between the backends and a disk, real or simulated.
//!
//! A storage is a tree of files under one root; paths are relative to it. Names are changed by the storage, at once and
//! one by one. Bytes are moved by a queue, many at a time: each thread has its own, so that none waits for another's
//! lock. A write is durable after a [`OpKind::Sync`] of its file that began after it ended; a new, renamed or removed
//! name after [`Storage::sync_dir`] of its directory.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::buffer::Buffer;

/// A tree of files.
pub trait Storage: Send + Sync + fmt::Debug {
    /// Opens a file.
    fn open(&self, path: &Path, mode: Mode) -> io::Result<File>;

    /// A file's length.
    fn len(&self, file: &File) -> io::Result<u64>;

    /// Makes a file as long as this, with room on the disk for all of it: it is now that it may be full, not later. A
    /// shorter length cuts.
    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()>;

    /// Gives a file another name; one that has it already is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a name. Whoever has the file open keeps it; its space returns when the last one lets go.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes a directory, unless it is there. Its parent must be.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// What is in a directory, in no order.
    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>>;

    /// Makes the names in a directory durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// How large the disk is, and how much of it is free.
    fn space(&self) -> io::Result<Space>;

    /// A queue for the calling thread.
    fn queue(&self, config: &QueueConfig) -> Box<dyn Queue>;
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// To be read.
    Read,
    /// One that is there, to be read and written.
    Write,
    /// One that is not there yet, to be read and written.
    Create,
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name. One that is not UTF-8 is not ours and is not listed.
    pub name: String,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Length of a file.
    pub len: u64,
}

/// The size of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// All of it.
    pub total: u64,
    /// What may still be used.
    pub free: u64,
}

/// An open file; clones are the same file. It stays readable when its name is removed.
#[derive(Clone, Debug)]
pub struct File(pub(crate) Arc<FileInner>);

/// What is behind a [`File`].
#[derive(Debug)]
pub(crate) enum FileInner {
    /// A file of the operating system.
    Os(crate::os::OsFile),
    /// A file of a simulated disk.
    Simulated(crate::simulated::Inode),
}

/// How a queue is made.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Operations in flight, at most.
    pub depth: usize,
    /// Memory that is read into again and again: an engine may register it, to spare pinning it for every operation.
    pub registered: Option<RegisteredMemory>,
}

/// Address and length of memory to register. It only says where: whoever makes operations still proves by a
/// [`Buffer`] that the bytes are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredMemory {
    /// First byte.
    pub address: usize,
    /// Length.
    pub len: usize,
}

/// Operations per queue unless told otherwise: one NVMe device is busy with 32.
pub const QUEUE_DEPTH_DEFAULT: usize = 32;

impl Default for QueueConfig {
    fn default() -> QueueConfig {
        QueueConfig { depth: QUEUE_DEPTH_DEFAULT, registered: None }
    }
}

/// Moves bytes for one thread.
pub trait Queue: Send + fmt::Debug {
    /// Which engine it is, as in logs and metrics.
    fn engine(&self) -> &'static str;

    /// Whether [`QueueConfig::registered`] is registered with the kernel.
    fn is_registered(&self) -> bool {
        false
    }

    /// Runs operations, as many at a time as the queue is deep, until the work has no more and all have ended. Each
    /// comes back with its buffer as soon as it has ended, in any order. Reads and writes are whole or failed: what the
    /// system did in part is continued, and the end of the file is [`io::ErrorKind::UnexpectedEof`].
    ///
    /// No operation is in flight when this returns or unwinds: the buffers are the caller's again.
    fn run<'a>(&mut self, work: &mut dyn Work<'a>);
}

/// Whoever has operations to run.
pub trait Work<'a> {
    /// The next one, if there is one now. Asked again whenever one has ended.
    fn next(&mut self) -> Option<Op<'a>>;

    /// One has ended.
    fn done(&mut self, done: Done<'a>);
}

/// One operation.
#[derive(Debug)]
pub struct Op<'a> {
    /// The caller's number for it.
    pub tag: u64,
    /// What to do.
    pub kind: OpKind,
    /// With which file.
    pub file: File,
    /// From which byte on; 0 for a sync.
    pub offset: u64,
    /// The bytes; none for a sync.
    pub buffer: Buffer<'a>,
}

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Fills the buffer.
    Read,
    /// Writes the buffer.
    Write,
    /// Makes the file's bytes durable (`fdatasync`).
    Sync,
}

/// An operation that has ended.
#[derive(Debug)]
pub struct Done<'a> {
    /// The caller's number for it.
    pub tag: u64,
    /// How it went. After a failed read the buffer holds anything.
    pub result: io::Result<()>,
    /// The bytes.
    pub buffer: Buffer<'a>,
}

/// Runs operations and waits for all; results come in the order of the operations, whose tags are replaced.
pub fn run_all<'a>(queue: &mut dyn Queue, ops: impl IntoIterator<Item = Op<'a>>) -> Vec<Done<'a>> {
    struct All<'a, I> {
        ops: I,
        count: u64,
        done: Vec<Option<Done<'a>>>,
    }
    impl<'a, I: Iterator<Item = Op<'a>>> Work<'a> for All<'a, I> {
        fn next(&mut self) -> Option<Op<'a>> {
            let op = self.ops.next()?;
            self.count += 1;
            self.done.push(None);
            Some(Op { tag: self.count - 1, ..op })
        }

        fn done(&mut self, done: Done<'a>) {
            let place = done.tag as usize;
            self.done[place] = Some(done);
        }
    }
    let mut all = All { ops: ops.into_iter(), count: 0, done: vec![] };
    queue.run(&mut all);
    all.done.into_iter().map(|done| done.expect("the queue runs all that it took")).collect()
}

/// Runs one operation.
pub fn run_one<'a>(queue: &mut dyn Queue, op: Op<'a>) -> Done<'a> {
    run_all(queue, [op]).pop().expect("one went in")
}

/// Makes a file's bytes durable.
pub fn sync(queue: &mut dyn Queue, file: &File) -> io::Result<()> {
    let op = Op { tag: 0, kind: OpKind::Sync, file: file.clone(), offset: 0, buffer: Buffer::None };
    run_one(queue, op).result
}
