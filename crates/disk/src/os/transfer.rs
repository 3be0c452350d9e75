//! [`Transfer`]: one operation on its way through the system's calls, whichever engine makes them.
//!
//! The system may do a read or write in part, or not at all for now. What to do next is decided here, so that the
//! engines agree to the last error.
//!
//! Invariant: `done ≤ buffer.len()`, and an operation that the system is asked for has bytes left, unless it is a sync.

use std::io;

use super::{OsFile, os_file};
use crate::buffer::{BLOCK_BYTES, Buffer};
use crate::storage::{Done, Op, OpKind};

/// Bytes per call, at most: the kernel's own limit is 2 GiB less a page, and this one is whole blocks.
const CALL_BYTES_MAX: usize = 1 << 30;

/// The least that a direct write can be continued at: one sector of an SSD.
const SECTOR_BYTES: usize = 512;

/// How often an operation is asked for again when the kernel has no room for it now.
const RETRIES_MAX: u32 = 10_000;

/// One operation.
#[derive(Debug)]
pub(crate) struct Transfer<'a> {
    op: Op<'a>,
    done: usize,
    retries: u32,
}

/// What to do next.
#[derive(Debug)]
#[must_use]
pub(crate) enum Step {
    /// Ask the system for the rest.
    Again,
    /// It has ended.
    Ended(io::Result<()>),
}

impl<'a> Transfer<'a> {
    /// Takes an operation. One that the system need not be asked for, or must not, has ended at once.
    pub(crate) fn begin(op: Op<'a>) -> Result<Transfer<'a>, Done<'a>> {
        let direct = os_file(&op.file).direct;
        match check(&op, direct) {
            Ok(true) => Ok(Transfer { op, done: 0, retries: 0 }),
            Ok(false) => Err(Done { tag: op.tag, result: Ok(()), buffer: op.buffer }),
            Err(err) => Err(Done { tag: op.tag, result: Err(err), buffer: op.buffer }),
        }
    }

    /// What to do.
    pub(crate) fn kind(&self) -> OpKind {
        self.op.kind
    }

    /// With which file.
    pub(crate) fn file(&self) -> &OsFile {
        os_file(&self.op.file)
    }

    /// From which byte of the file on.
    pub(crate) fn offset(&self) -> u64 {
        self.op.offset + self.done as u64
    }

    /// What is to be written now.
    pub(crate) fn rest(&self) -> &[u8] {
        let rest = &self.op.buffer.as_slice()[self.done..];
        &rest[..rest.len().min(CALL_BYTES_MAX)]
    }

    /// The file, and what is to be filled from it now.
    pub(crate) fn rest_mut(&mut self) -> (&OsFile, &mut [u8]) {
        let rest = &mut self.op.buffer.as_mut_slice().expect("checked at the start")[self.done..];
        let len = rest.len().min(CALL_BYTES_MAX);
        (os_file(&self.op.file), &mut rest[..len])
    }

    /// The system has answered with a number of bytes, or failed.
    pub(crate) fn advance(&mut self, answer: io::Result<usize>) -> Step {
        let bytes = match answer {
            Ok(bytes) => bytes,
            Err(err) if err.kind() == io::ErrorKind::Interrupted => return Step::Again,
            Err(err) if err.kind() == io::ErrorKind::WouldBlock && self.retries < RETRIES_MAX => {
                self.retries += 1;
                return Step::Again;
            }
            Err(err) => return Step::Ended(Err(err)),
        };
        match self.op.kind {
            OpKind::Sync => Step::Ended(Ok(())),
            OpKind::Read => self.advance_read(bytes),
            OpKind::Write => self.advance_write(bytes),
        }
    }

    fn advance_read(&mut self, bytes: usize) -> Step {
        assert!(bytes <= self.rest().len(), "the system read more than it was asked for");
        if bytes == 0 {
            return Step::Ended(Err(io::ErrorKind::UnexpectedEof.into()));
        }
        if self.done + bytes == self.op.buffer.len() {
            self.done += bytes;
            return Step::Ended(Ok(()));
        }
        // Direct I/O cannot go on within a block: the block is read again.
        let whole = if self.file().direct { bytes - bytes % BLOCK_BYTES } else { bytes };
        if whole > 0 {
            self.done += whole;
            return Step::Again;
        }
        // Less than a block: the file ends there, or the disk fails there.
        let end = self.offset() + bytes as u64;
        Step::Ended(Err(match self.file().file.metadata() {
            Ok(metadata) if metadata.len() > end => io::Error::from_raw_os_error(libc::EIO),
            Ok(_) => io::ErrorKind::UnexpectedEof.into(),
            Err(err) => err,
        }))
    }

    fn advance_write(&mut self, bytes: usize) -> Step {
        assert!(bytes <= self.rest().len(), "the system wrote more than it was asked for");
        let all = self.done + bytes == self.op.buffer.len();
        let whole = if self.file().direct && !all { bytes - bytes % SECTOR_BYTES } else { bytes };
        if whole == 0 {
            return Step::Ended(Err(io::ErrorKind::WriteZero.into()));
        }
        self.done += whole;
        if all { Step::Ended(Ok(())) } else { Step::Again }
    }

    /// Gives the buffer back with the result.
    pub(crate) fn end(self, result: io::Result<()>) -> Done<'a> {
        Done { tag: self.op.tag, result, buffer: self.op.buffer }
    }
}

/// Whether there is anything to do for an operation that may be done. What our own code got wrong is asserted; direct
/// I/O with the wrong alignment is refused in release builds, because it harms nobody else.
pub(crate) fn check(op: &Op<'_>, direct: bool) -> io::Result<bool> {
    match op.kind {
        OpKind::Sync => return Ok(true),
        OpKind::Read => {
            assert!(!matches!(op.buffer, Buffer::Lent(_)), "a read needs a buffer that it may fill");
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::buffer::Aligned;
    use crate::storage::{File, FileInner};

    /// A file of this many bytes that has no name any more.
    fn file(name: &str, len: u64, direct: bool) -> File {
        let path = std::env::temp_dir().join(format!("moontide-disk-transfer-{name}-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(len).unwrap();
        File(Arc::new(FileInner::Os(OsFile { file, direct })))
    }

    fn begin(kind: OpKind, file: &File, offset: u64, blocks: usize) -> Transfer<'static> {
        let buffer = Buffer::Owned(Aligned::zeroed(blocks * BLOCK_BYTES));
        Transfer::begin(Op { tag: 9, kind, file: file.clone(), offset, buffer }).unwrap()
    }

    #[derive(Debug, PartialEq)]
    enum Seen {
        /// Goes on with this many bytes at this offset.
        Again(u64, usize),
        Ended(Option<io::ErrorKind>),
    }

    fn seen(transfer: &mut Transfer<'_>, answer: io::Result<usize>) -> Seen {
        match transfer.advance(answer) {
            Step::Again => Seen::Again(transfer.offset(), transfer.rest().len()),
            Step::Ended(result) => Seen::Ended(result.err().map(|err| err.kind())),
        }
    }

    #[test]
    fn partial_reads_go_on_at_whole_blocks() {
        for (direct, after) in [(true, Seen::Again(12288, 8192)), (false, Seen::Again(13288, 7192))] {
            let file = file("reads", 1 << 20, direct);
            let mut transfer = begin(OpKind::Read, &file, 4096, 4);
            assert_eq!(seen(&mut transfer, Ok(4096)), Seen::Again(8192, 12288));
            assert_eq!(seen(&mut transfer, Ok(5096)), after);
            let rest = transfer.rest().len();
            assert_eq!(transfer.rest_mut().1.len(), rest);
            assert_eq!(seen(&mut transfer, Ok(rest)), Seen::Ended(None));
        }
    }

    #[test]
    fn end_of_a_file_is_told_from_a_failing_disk() {
        let short = file("short", 10_000, true);
        let mut transfer = begin(OpKind::Read, &short, 8192, 2);
        assert_eq!(seen(&mut transfer, Ok(1808)), Seen::Ended(Some(io::ErrorKind::UnexpectedEof)));
        let mut transfer = begin(OpKind::Read, &short, 8192, 2);
        match transfer.advance(Ok(512)) {
            Step::Ended(Err(err)) => assert_eq!(err.raw_os_error(), Some(libc::EIO)),
            step => panic!("{step:?}"),
        }
        let mut transfer = begin(OpKind::Read, &short, 1 << 20, 1);
        assert_eq!(seen(&mut transfer, Ok(0)), Seen::Ended(Some(io::ErrorKind::UnexpectedEof)));
    }

    #[test]
    fn partial_writes_go_on_at_whole_sectors() {
        for (direct, after) in [(true, Seen::Again(5632, 6656)), (false, Seen::Again(5796, 6492))] {
            let file = file("writes", 0, direct);
            let mut transfer = begin(OpKind::Write, &file, 0, 3);
            assert_eq!(seen(&mut transfer, Ok(4096)), Seen::Again(4096, 8192));
            assert_eq!(seen(&mut transfer, Ok(1700)), after);
            let rest = transfer.rest().len();
            assert_eq!(seen(&mut transfer, Ok(rest)), Seen::Ended(None));
            let mut transfer = begin(OpKind::Write, &file, 0, 1);
            assert_eq!(seen(&mut transfer, Ok(0)), Seen::Ended(Some(io::ErrorKind::WriteZero)));
        }
    }

    #[test]
    fn interruptions_are_not_errors_but_a_lasting_one_is() {
        let file = file("again", 0, true);
        for kind in [OpKind::Read, OpKind::Write, OpKind::Sync] {
            let mut transfer = begin(kind, &file, 0, 1);
            for _ in 0..2 * RETRIES_MAX {
                assert!(matches!(transfer.advance(Err(io::ErrorKind::Interrupted.into())), Step::Again));
            }
            for _ in 0..RETRIES_MAX {
                assert!(matches!(transfer.advance(Err(io::ErrorKind::WouldBlock.into())), Step::Again));
            }
            let lasting = seen(&mut transfer, Err(io::ErrorKind::WouldBlock.into()));
            assert_eq!(lasting, Seen::Ended(Some(io::ErrorKind::WouldBlock)));
        }
        let mut transfer = begin(OpKind::Write, &file, 0, 1);
        let full = seen(&mut transfer, Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(full, Seen::Ended(Some(io::ErrorKind::StorageFull)));
        assert_eq!(transfer.end(Ok(())).tag, 9);
    }
}
