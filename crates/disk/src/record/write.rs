//! [`WriteOps`]: records as a few large writes.
//!
//! Large payloads that start on a block are written from where they stand, in pieces of [`PIECE_BYTES_MAX`]. All else
//! (fronts, small payloads, ends of payloads with their padding) is copied, neighbours together, so that a thousand
//! tiny records are a handful of writes:
//!
//! ```text
//!  record 0                        record 1                         record 2, 3, 4 …
//!  ├ front ┼─── payload ────┼ end ─┼ front ┼──── payload ────┼ end ─┼ front+payload ┼ front+payload ┼ …
//!  └ copied┘└──── lent ────┘└─── copied ───┘└───── lent ────┘└─────────────── copied ────────────────
//! ```
//!
//! Copies are made when an operation is asked for and dropped when it has ended: no more memory is in use than a queue
//! is deep.

use std::collections::VecDeque;
use std::io;

use crate::backend::Source;
use crate::buffer::{Aligned, BLOCK_BYTES, Buffer};
use crate::record::{DiskLayout, encode_front};
use crate::storage::{Done, File, Op, OpKind, Queue, Work};

/// Bytes of one operation, at most, but for the front of a huge record: what SSDs take best, and a queue of 32 of them
/// is 32 MiB of copies at worst.
const PIECE_BYTES_MAX: usize = 1 << 20;

/// Payloads below this are copied: a copy of 64 KiB takes less time than one more operation.
const LENT_BYTES_MIN: usize = 64 << 10;

/// Where a record was placed in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    /// First byte.
    pub(crate) offset: u64,
    /// Where its parts stand.
    pub(crate) layout: DiskLayout,
}

/// Consecutive bytes of a file as a list of writes; an iterator over them.
#[derive(Debug)]
pub(crate) struct WriteOps<'a> {
    file: File,
    /// Where the next byte goes.
    position: u64,
    /// Copies that will be one write.
    run: Run<'a>,
    writes: VecDeque<Write<'a>>,
}

#[derive(Debug)]
enum Write<'a> {
    Lent { offset: u64, bytes: &'a [u8] },
    Copied(Run<'a>),
}

/// Parts that stand side by side.
#[derive(Debug, Default)]
struct Run<'a> {
    offset: u64,
    len: usize,
    parts: Vec<Part<'a>>,
}

#[derive(Debug)]
enum Part<'a> {
    Front(Source<'a>),
    Bytes(&'a [u8]),
    Owned(Vec<u8>),
    Zeros(usize),
}

impl<'a> WriteOps<'a> {
    /// Writes from `offset` on, which must be whole blocks.
    pub(crate) fn new(file: &File, offset: u64) -> WriteOps<'a> {
        assert!(offset.is_multiple_of(BLOCK_BYTES as u64), "records start on blocks");
        let run = Run { offset, ..Run::default() };
        WriteOps { file: file.clone(), position: offset, run, writes: VecDeque::new() }
    }

    /// Where the next record would stand.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Appends a record that [`DiskLayout::of_source`] has let through.
    pub(crate) fn record(&mut self, source: &Source<'a>) -> Placed {
        let layout = DiskLayout::of(source.header);
        let offset = self.position;
        self.append(Part::Front(*source), layout.head_len as usize);
        if layout.head_len < layout.len {
            self.payload(source.payload);
        }
        debug_assert_eq!(self.position, offset + layout.len);
        Placed { offset, layout }
    }

    /// Appends other bytes, and zeros up to the next block.
    pub(crate) fn bytes(&mut self, bytes: Vec<u8>) {
        let len = bytes.len();
        self.append(Part::Owned(bytes), len);
        self.pad();
    }

    fn payload(&mut self, payload: &'a [u8]) {
        let lends = payload.len() >= LENT_BYTES_MIN && payload.as_ptr().addr().is_multiple_of(BLOCK_BYTES);
        let whole = if lends { payload.len() / BLOCK_BYTES * BLOCK_BYTES } else { 0 };
        let (lent, copied) = payload.split_at(whole);
        for bytes in lent.chunks(PIECE_BYTES_MAX) {
            self.close_run();
            self.writes.push_back(Write::Lent { offset: self.position, bytes });
            self.position += bytes.len() as u64;
            self.run.offset = self.position;
        }
        for bytes in copied.chunks(PIECE_BYTES_MAX / 2) {
            self.append(Part::Bytes(bytes), bytes.len());
        }
        self.pad();
    }

    fn pad(&mut self) {
        let zeros = self.position.next_multiple_of(BLOCK_BYTES as u64) - self.position;
        if zeros > 0 {
            // Never a run of its own: the bytes before it end in the middle of a block, so they are in this run.
            let zeros = zeros as usize;
            self.run.parts.push(Part::Zeros(zeros));
            self.run.len += zeros;
            self.position += zeros as u64;
        }
    }

    fn append(&mut self, part: Part<'a>, len: usize) {
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
            let next = Run { offset: self.position, ..Run::default() };
            self.writes.push_back(Write::Copied(std::mem::replace(&mut self.run, next)));
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
            Write::Lent { offset, bytes } => (offset, Buffer::Lent(bytes)),
            Write::Copied(run) => (run.offset, Buffer::Owned(run.copy())),
        };
        Some(Op { tag: 0, kind: OpKind::Write, file: self.file.clone(), offset, buffer })
    }
}

impl Run<'_> {
    fn copy(self) -> Aligned {
        let mut buffer = Aligned::zeroed(self.len);
        debug_assert_eq!(buffer.len(), self.len, "whole blocks");
        let mut at = 0;
        for part in &self.parts {
            let rest = &mut buffer[at..];
            at += match part {
                Part::Front(source) => {
                    let len = DiskLayout::of(source.header).head_len as usize;
                    encode_front(source, &mut rest[..len]);
                    len
                }
                Part::Bytes(bytes) => copy(rest, bytes),
                Part::Owned(bytes) => copy(rest, bytes),
                Part::Zeros(len) => *len,
            };
        }
        buffer
    }
}

fn copy(to: &mut [u8], from: &[u8]) -> usize {
    to[..from.len()].copy_from_slice(from);
    from.len()
}

/// Runs writes. After the first failure no more are begun; all that were begun have ended when it returns.
pub(crate) fn run_writes<'a>(queue: &mut dyn Queue, ops: impl Iterator<Item = Op<'a>>) -> io::Result<()> {
    struct Writes<I> {
        ops: I,
        result: io::Result<()>,
    }
    impl<'a, I: Iterator<Item = Op<'a>>> Work<'a> for Writes<I> {
        fn next(&mut self) -> Option<Op<'a>> {
            if self.result.is_ok() { self.ops.next() } else { None }
        }

        fn done(&mut self, done: Done<'a>) {
            if self.result.is_ok() {
                self.result = done.result;
            }
        }
    }
    let mut writes = Writes { ops, result: Ok(()) };
    queue.run(&mut writes);
    writes.result
}
