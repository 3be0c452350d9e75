//! [`WriteOps`]: records as a few large writes.
//!
//! Large payloads that start on a block are written without a copy, in pieces of [`PIECE_BYTES_MAX`]. Everything else
//! (preambles, small payloads, ends of payloads with their padding) is copied; adjacent parts are combined, so that a
//! thousand tiny records need only a few writes:
//!
//! ```text
//!  record 0                           record 1                           record 2, 3, 4 …
//!  ├ preamble ┼─── payload ────┼ end ─┼ preamble ┼──── payload ────┼ end ─┼ preamble+payload ┼ preamble+payload ┼ …
//!  └─ copied ─┘└── borrowed ──┘└──── copied ─────┘└─── borrowed ──┘└──────────────── copied ─────────────────────
//! ```
//!
//! A copy is made when the queue takes the operation, and dropped when it has ended: the depth of the queue limits the
//! memory in use.

use std::collections::VecDeque;
use std::io;

use crate::backend::RecordSource;
use crate::buffer::{AlignedBuf, BLOCK_BYTES, Buffer};
use crate::record::{DiskLayout, encode_preamble};
use crate::storage::{Completion, File, Op, OpKind, OpSource, Queue};

/// Maximum size of one operation, except for the preamble of a huge record: efficient for SSDs, and a queue of 32 of
/// them has at most 32 MiB of copies.
const PIECE_BYTES_MAX: usize = 1 << 20;

/// Payloads below this size are copied: a copy of 64 KiB takes less time than one more operation.
const ZERO_COPY_BYTES_MIN: usize = 64 << 10;

/// Location of a record in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedRecord {
    /// Offset of the first byte.
    pub(crate) offset: u64,
    /// Layout of the record.
    pub(crate) layout: DiskLayout,
}

/// Iterator over the writes of a consecutive range of a file.
#[derive(Debug)]
pub(crate) struct WriteOps<'a> {
    file: File,
    /// Offset of the next byte.
    position: u64,
    /// Copied parts that will be one write.
    run: CopyRun<'a>,
    writes: VecDeque<WriteSegment<'a>>,
}

#[derive(Debug)]
enum WriteSegment<'a> {
    Borrowed { offset: u64, bytes: &'a [u8] },
    Copied(CopyRun<'a>),
}

/// Adjacent parts.
#[derive(Debug, Default)]
struct CopyRun<'a> {
    offset: u64,
    len: usize,
    parts: Vec<CopyPart<'a>>,
}

#[derive(Debug)]
enum CopyPart<'a> {
    Preamble(RecordSource<'a>),
    Bytes(&'a [u8]),
    Owned(Vec<u8>),
    Zeros(usize),
}

impl<'a> WriteOps<'a> {
    /// Writes from `offset` on, a multiple of the block size.
    pub(crate) fn new(file: &File, offset: u64) -> WriteOps<'a> {
        assert!(offset.is_multiple_of(BLOCK_BYTES as u64), "records start on blocks");
        let run = CopyRun { offset, ..CopyRun::default() };
        WriteOps { file: file.clone(), position: offset, run, writes: VecDeque::new() }
    }

    /// Returns the offset of the next record.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Appends a record that [`DiskLayout::of_source`] has accepted.
    pub(crate) fn record(&mut self, source: &RecordSource<'a>) -> PlacedRecord {
        let layout = DiskLayout::of(source.header);
        let offset = self.position;
        self.append(CopyPart::Preamble(*source), layout.preamble_read_len as usize);
        if layout.preamble_read_len < layout.len {
            self.payload(source.payload);
        }
        debug_assert_eq!(self.position, offset + layout.len);
        PlacedRecord { offset, layout }
    }

    /// Appends other bytes, and zeros up to the next block.
    pub(crate) fn bytes(&mut self, bytes: Vec<u8>) {
        let len = bytes.len();
        self.append(CopyPart::Owned(bytes), len);
        self.pad();
    }

    fn payload(&mut self, payload: &'a [u8]) {
        let zero_copy =
            payload.len() >= ZERO_COPY_BYTES_MIN && payload.as_ptr().addr().is_multiple_of(BLOCK_BYTES);
        let whole = if zero_copy { payload.len() / BLOCK_BYTES * BLOCK_BYTES } else { 0 };
        let (borrowed, copied) = payload.split_at(whole);
        for bytes in borrowed.chunks(PIECE_BYTES_MAX) {
            self.close_run();
            self.writes.push_back(WriteSegment::Borrowed { offset: self.position, bytes });
            self.position += bytes.len() as u64;
            self.run.offset = self.position;
        }
        for bytes in copied.chunks(PIECE_BYTES_MAX / 2) {
            self.append(CopyPart::Bytes(bytes), bytes.len());
        }
        self.pad();
    }

    fn pad(&mut self) {
        let zeros = self.position.next_multiple_of(BLOCK_BYTES as u64) - self.position;
        if zeros > 0 {
            // Never starts a run: the bytes before it end in the middle of a block, so they are in this run.
            let zeros = zeros as usize;
            self.run.parts.push(CopyPart::Zeros(zeros));
            self.run.len += zeros;
            self.position += zeros as u64;
        }
    }

    fn append(&mut self, part: CopyPart<'a>, len: usize) {
        if len == 0 {
            return;
        }
        // A run may end only at the end of a block.
        if self.run.len + len > PIECE_BYTES_MAX && self.run.len.is_multiple_of(BLOCK_BYTES) {
            self.close_run();
        }
        self.run.parts.push(part);
        self.run.len += len;
        self.position += len as u64;
    }

    fn close_run(&mut self) {
        if self.run.len > 0 {
            let next = CopyRun { offset: self.position, ..CopyRun::default() };
            self.writes.push_back(WriteSegment::Copied(std::mem::replace(&mut self.run, next)));
        }
    }
}

impl<'a> Iterator for WriteOps<'a> {
    type Item = Op<'a>;

    fn next(&mut self) -> Option<Op<'a>> {
        if self.writes.is_empty() {
            self.close_run();
        }
        let (offset, buffer) = match self.writes.pop_front()? {
            WriteSegment::Borrowed { offset, bytes } => (offset, Buffer::Borrowed(bytes)),
            WriteSegment::Copied(run) => (run.offset, Buffer::Owned(run.copy())),
        };
        Some(Op { tag: 0, kind: OpKind::Write, file: self.file.clone(), offset, buffer })
    }
}

impl CopyRun<'_> {
    fn copy(self) -> AlignedBuf {
        let mut buffer = AlignedBuf::zeroed(self.len);
        debug_assert_eq!(buffer.len(), self.len, "whole blocks");
        let mut at = 0;
        for part in &self.parts {
            let rest = &mut buffer[at..];
            at += match part {
                CopyPart::Preamble(source) => {
                    let len = DiskLayout::of(source.header).preamble_read_len as usize;
                    encode_preamble(source, &mut rest[..len]);
                    len
                }
                CopyPart::Bytes(bytes) => copy(rest, bytes),
                CopyPart::Owned(bytes) => copy(rest, bytes),
                CopyPart::Zeros(len) => *len,
            };
        }
        buffer
    }
}

fn copy(to: &mut [u8], from: &[u8]) -> usize {
    to[..from.len()].copy_from_slice(from);
    from.len()
}

/// Runs writes. After the first failure no further writes start; all started writes have ended when it returns.
pub(crate) fn run_writes<'a>(queue: &mut dyn Queue, ops: impl Iterator<Item = Op<'a>>) -> io::Result<()> {
    struct Writes<I> {
        ops: I,
        result: io::Result<()>,
    }
    impl<'a, I: Iterator<Item = Op<'a>>> OpSource<'a> for Writes<I> {
        fn next(&mut self) -> Option<Op<'a>> {
            if self.result.is_ok() { self.ops.next() } else { None }
        }

        fn done(&mut self, done: Completion<'a>) {
            if self.result.is_ok() {
                self.result = done.result;
            }
        }
    }
    let mut writes = Writes { ops, result: Ok(()) };
    queue.run(&mut writes);
    writes.result
}
