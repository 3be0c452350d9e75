//! [`OsFile`] and [`OsOp`]: an open file and one operation in progress, shared by all engines.
//!
//! The system may perform a read or write partially, or refuse it for now. This module decides the next step, so that
//! all engines behave the same, including errors.
//!
//! Invariant: `done ≤ buffer.len()`, and an operation that is passed to the system has bytes left, unless it is a sync.

use std::fs;
use std::io;

use crate::buffer::BLOCK_BYTES;
use crate::storage::{Completion, Op, OpKind, StorageFile, check};

/// Maximum number of bytes per call: the kernel's own limit is 2 GiB less a page, and this one is whole blocks.
const CALL_BYTES_MAX: usize = 1 << 30;

/// Granularity at which a direct write can be resumed: one sector of an SSD.
const SECTOR_BYTES: usize = 512;

/// Maximum number of retries when the kernel lacks resources.
const RETRIES_MAX: u32 = 10_000;

/// An open file of the operating system.
#[derive(Debug)]
pub(crate) struct OsFile {
    pub(crate) file: fs::File,
    /// Whether the file bypasses the page cache: address, offset and length must be whole blocks.
    pub(crate) direct: bool,
}

impl StorageFile for OsFile {}

/// One operation in progress.
#[derive(Debug)]
pub(crate) struct OsOp<'a> {
    op: Op<'a>,
    done: usize,
    retries: u32,
}

/// Next step of an operation.
#[derive(Debug)]
#[must_use]
pub(crate) enum OpProgress {
    /// Pass the rest to the system.
    Again,
    /// The operation has ended.
    Ended(io::Result<()>),
}

impl<'a> OsOp<'a> {
    /// Starts an operation. One that is invalid or has nothing to do ends at once.
    pub(crate) fn begin(op: Op<'a>) -> Result<OsOp<'a>, Completion<'a>> {
        let direct = op.file.downcast::<OsFile>().direct;
        match check(&op, direct) {
            Ok(true) => Ok(OsOp { op, done: 0, retries: 0 }),
            Ok(false) => Err(Completion { tag: op.tag, result: Ok(()), buffer: op.buffer }),
            Err(err) => Err(Completion { tag: op.tag, result: Err(err), buffer: op.buffer }),
        }
    }

    /// Returns the kind of the operation.
    pub(crate) fn kind(&self) -> OpKind {
        self.op.kind
    }

    /// Returns the file of the operation.
    pub(crate) fn file(&self) -> &OsFile {
        self.op.file.downcast()
    }

    /// Returns the offset of the rest in the file.
    pub(crate) fn offset(&self) -> u64 {
        self.op.offset + self.done as u64
    }

    /// Returns the bytes for the next write call.
    pub(crate) fn rest(&self) -> &[u8] {
        let rest = &self.op.buffer.as_slice()[self.done..];
        &rest[..rest.len().min(CALL_BYTES_MAX)]
    }

    /// Returns the file, and the memory for the next read call.
    pub(crate) fn rest_mut(&mut self) -> (&OsFile, &mut [u8]) {
        let rest = &mut self.op.buffer.as_mut_slice().expect("checked at the start")[self.done..];
        let len = rest.len().min(CALL_BYTES_MAX);
        (self.op.file.downcast(), &mut rest[..len])
    }

    /// Processes the result of a system call: a number of bytes, or an error.
    pub(crate) fn advance(&mut self, result: io::Result<usize>) -> OpProgress {
        let bytes = match result {
            Ok(bytes) => bytes,
            Err(err) if err.kind() == io::ErrorKind::Interrupted => return OpProgress::Again,
            Err(err) if err.kind() == io::ErrorKind::WouldBlock && self.retries < RETRIES_MAX => {
                self.retries += 1;
                return OpProgress::Again;
            }
            Err(err) => return OpProgress::Ended(Err(err)),
        };
        match self.op.kind {
            OpKind::Sync => OpProgress::Ended(Ok(())),
            OpKind::Read => self.advance_read(bytes),
            OpKind::Write => self.advance_write(bytes),
        }
    }

    fn advance_read(&mut self, bytes: usize) -> OpProgress {
        assert!(bytes <= self.rest().len(), "the system read more than requested");
        if bytes == 0 {
            return OpProgress::Ended(Err(io::ErrorKind::UnexpectedEof.into()));
        }
        if self.done + bytes == self.op.buffer.len() {
            self.done += bytes;
            return OpProgress::Ended(Ok(()));
        }
        // Direct I/O cannot resume within a block: read the block again.
        let whole = if self.file().direct { bytes - bytes % BLOCK_BYTES } else { bytes };
        if whole > 0 {
            self.done += whole;
            return OpProgress::Again;
        }
        // Less than a block: the file ends there, or the disk fails.
        let end = self.offset() + bytes as u64;
        OpProgress::Ended(Err(match self.file().file.metadata() {
            Ok(metadata) if metadata.len() > end => io::Error::from_raw_os_error(libc::EIO),
            Ok(_) => io::ErrorKind::UnexpectedEof.into(),
            Err(err) => err,
        }))
    }

    fn advance_write(&mut self, bytes: usize) -> OpProgress {
        assert!(bytes <= self.rest().len(), "the system wrote more than requested");
        let all = self.done + bytes == self.op.buffer.len();
        let whole = if self.file().direct && !all { bytes - bytes % SECTOR_BYTES } else { bytes };
        if whole == 0 {
            return OpProgress::Ended(Err(io::ErrorKind::WriteZero.into()));
        }
        self.done += whole;
        if all { OpProgress::Ended(Ok(())) } else { OpProgress::Again }
    }

    /// Returns the completion with the buffer.
    pub(crate) fn end(self, result: io::Result<()>) -> Completion<'a> {
        Completion { tag: self.op.tag, result, buffer: self.op.buffer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{AlignedBuf, Buffer};
    use crate::storage::File;

    /// Returns an unlinked file of `len` bytes.
    fn file(name: &str, len: u64, direct: bool) -> File {
        let path = std::env::temp_dir().join(format!("moontide-disk-op-{name}-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(len).unwrap();
        File::new(OsFile { file, direct })
    }

    fn begin(kind: OpKind, file: &File, offset: u64, blocks: usize) -> OsOp<'static> {
        let buffer = Buffer::Owned(AlignedBuf::zeroed(blocks * BLOCK_BYTES));
        OsOp::begin(Op { tag: 9, kind, file: file.clone(), offset, buffer }).unwrap()
    }

    #[derive(Debug, PartialEq)]
    enum Progress {
        /// Resumes with this many bytes at this offset.
        Again(u64, usize),
        Ended(Option<io::ErrorKind>),
    }

    fn advance(op: &mut OsOp<'_>, result: io::Result<usize>) -> Progress {
        match op.advance(result) {
            OpProgress::Again => Progress::Again(op.offset(), op.rest().len()),
            OpProgress::Ended(result) => Progress::Ended(result.err().map(|err| err.kind())),
        }
    }

    #[test]
    fn partial_direct_read_resumes_at_block_boundary() {
        for (direct, after) in [(true, Progress::Again(12288, 8192)), (false, Progress::Again(13288, 7192))] {
            let file = file("reads", 1 << 20, direct);
            let mut op = begin(OpKind::Read, &file, 4096, 4);
            assert_eq!(advance(&mut op, Ok(4096)), Progress::Again(8192, 12288));
            assert_eq!(advance(&mut op, Ok(5096)), after);
            let rest = op.rest().len();
            assert_eq!(op.rest_mut().1.len(), rest);
            assert_eq!(advance(&mut op, Ok(rest)), Progress::Ended(None));
        }
    }

    #[test]
    fn short_read_distinguishes_end_of_file_from_io_error() {
        let short = file("short", 10_000, true);
        let mut op = begin(OpKind::Read, &short, 8192, 2);
        assert_eq!(advance(&mut op, Ok(1808)), Progress::Ended(Some(io::ErrorKind::UnexpectedEof)));
        let mut op = begin(OpKind::Read, &short, 8192, 2);
        match op.advance(Ok(512)) {
            OpProgress::Ended(Err(err)) => assert_eq!(err.raw_os_error(), Some(libc::EIO)),
            step => panic!("{step:?}"),
        }
        let mut op = begin(OpKind::Read, &short, 1 << 20, 1);
        assert_eq!(advance(&mut op, Ok(0)), Progress::Ended(Some(io::ErrorKind::UnexpectedEof)));
    }

    #[test]
    fn partial_direct_write_resumes_at_sector_boundary() {
        for (direct, after) in [(true, Progress::Again(5632, 6656)), (false, Progress::Again(5796, 6492))] {
            let file = file("writes", 0, direct);
            let mut op = begin(OpKind::Write, &file, 0, 3);
            assert_eq!(advance(&mut op, Ok(4096)), Progress::Again(4096, 8192));
            assert_eq!(advance(&mut op, Ok(1700)), after);
            let rest = op.rest().len();
            assert_eq!(advance(&mut op, Ok(rest)), Progress::Ended(None));
            let mut op = begin(OpKind::Write, &file, 0, 1);
            assert_eq!(advance(&mut op, Ok(0)), Progress::Ended(Some(io::ErrorKind::WriteZero)));
        }
    }

    #[test]
    fn interrupts_are_retried_and_would_block_fails_after_limit() {
        let file = file("again", 0, true);
        for kind in [OpKind::Read, OpKind::Write, OpKind::Sync] {
            let mut op = begin(kind, &file, 0, 1);
            for _ in 0..2 * RETRIES_MAX {
                assert!(matches!(op.advance(Err(io::ErrorKind::Interrupted.into())), OpProgress::Again));
            }
            for _ in 0..RETRIES_MAX {
                assert!(matches!(op.advance(Err(io::ErrorKind::WouldBlock.into())), OpProgress::Again));
            }
            let last = advance(&mut op, Err(io::ErrorKind::WouldBlock.into()));
            assert_eq!(last, Progress::Ended(Some(io::ErrorKind::WouldBlock)));
        }
        let mut op = begin(OpKind::Write, &file, 0, 1);
        let full = advance(&mut op, Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(full, Progress::Ended(Some(io::ErrorKind::StorageFull)));
        assert_eq!(op.end(Ok(())).tag, 9);
    }
}
