//! [`read_records`]: records from the disk into memory, verified while the next ones are read.
//!
//! A record is read in pieces: first the front with the first page of the payload, then page by page. The queue is kept
//! full across records, so that one large record is read as fast as many. A piece is verified when it has arrived,
//! while the others are on their way: only the work on the last one is not hidden (256 KiB, some 25 µs).
//!
//! ```text
//!  disk     │ front+page 0 │ page 1      │ page 2      │ page 3      │
//!  verify                  │ CRCs, page 0│ page 1      │ page 2      │ page 3 │ → Ok
//! ```
//!
//! The digests of all pages stand in the front, and the header's length is part of their seed: what arrives before the
//! front waits for it.
//!
//! Invariant: Ok is answered only for a record whose header has the right name, whose CRCs hold, and of which every page
//! has the digest that the root in the header vouches for. There is no way to read that skips this.

use std::io;

use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::{DigestContext, Header};

use crate::backend::{Location, RecordName};
use crate::buffer::Buffer;
use crate::planted::{Bug, planted};
use crate::record::{Damage, Front, decode_front};
use crate::storage::{Done, Op, OpKind, Queue, Work};

/// A record to be read.
#[derive(Debug)]
pub struct ReadJob<'a> {
    /// Which one is expected there.
    pub name: RecordName,
    /// Where it stands.
    pub location: Location,
    /// Where it goes: as long as the record, and starting on a block. After an error it holds anything.
    pub into: &'a mut [u8],
}

/// Why a record was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The disk failed.
    #[error("the disk failed: {0}")]
    Io(io::ErrorKind),
    /// It is not what was written.
    #[error(transparent)]
    Damaged(#[from] Damage),
    /// Another record stands there.
    #[error("another record stands there")]
    OtherRecord,
}

/// Reads and verifies records; the answers come in the order of the jobs. What stands where in the memory of a record
/// is told by [`decode_front`].
///
/// # Panics
/// If the memory of a job is not as long as its record.
pub fn read_records<'a>(queue: &mut dyn Queue, jobs: Vec<ReadJob<'a>>) -> Vec<Result<Header, ReadError>> {
    let mut reading = Reading { current: 0, jobs: jobs.into_iter().map(Job::new).collect() };
    queue.run(&mut reading);
    reading.jobs.into_iter().map(Job::finish).collect()
}

struct Reading<'a> {
    jobs: Vec<Job<'a>>,
    /// The first one that may have pieces left to begin.
    current: usize,
}

struct Job<'a> {
    name: RecordName,
    location: Location,
    /// What was not begun yet, and where it stands in the record.
    rest: &'a mut [u8],
    position: u64,
    /// Pieces that were not verified yet: begun or waiting.
    open: usize,
    /// Everything but the payload, when it has arrived.
    front: Option<(Front<'a>, DigestContext)>,
    /// Pieces that arrived before the front, and where they stand in the record.
    early: Vec<(u64, &'a [u8])>,
    error: Option<ReadError>,
}

impl<'a> Work<'a> for Reading<'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        loop {
            let job = self.jobs.get_mut(self.current)?;
            if let Some(op) = job.next_piece(self.current) {
                return Some(op);
            }
            self.current += 1;
        }
    }

    fn done(&mut self, done: Done<'a>) {
        let (index, blocks) = ((done.tag >> TAG_BLOCK_BITS) as usize, done.tag & ((1 << TAG_BLOCK_BITS) - 1));
        let job = &mut self.jobs[index];
        job.open -= 1;
        if job.error.is_some() {
            return;
        }
        let result = match done.result {
            Err(error) => Err(ReadError::Io(error.kind())),
            Ok(()) => match done.buffer {
                Buffer::Fill(bytes) => job.arrived(blocks * BLOCK, bytes),
                _ => unreachable!("a queue gives back the buffer that it took"),
            },
        };
        job.error = result.err();
    }
}

/// A tag is the job's index and where the piece starts in the record, in blocks: a record of 1 TiB has 2²⁸.
const TAG_BLOCK_BITS: u32 = 32;
const BLOCK: u64 = crate::buffer::BLOCK_BYTES as u64;

impl<'a> Job<'a> {
    fn new(ReadJob { name, location, into }: ReadJob<'a>) -> Job<'a> {
        assert_eq!(into.len() as u64, location.len, "memory for the whole record, and no more");
        Job { name, location, rest: into, position: 0, open: 0, front: None, early: vec![], error: None }
    }

    fn next_piece(&mut self, index: usize) -> Option<Op<'a>> {
        if self.rest.is_empty() || self.error.is_some() {
            return None;
        }
        let front_len = if self.position == 0 { self.location.front_len } else { 0 };
        let len = (front_len + PAGE_BYTES).min(self.rest.len() as u64);
        let (piece, rest) = std::mem::take(&mut self.rest).split_at_mut(len as usize);
        self.rest = rest;
        self.open += 1;
        let tag = ((index as u64) << TAG_BLOCK_BITS) | (self.position / BLOCK);
        let offset = self.location.offset + self.position;
        self.position += len;
        Some(Op {
            tag,
            kind: OpKind::Read,
            file: self.location.file.clone(),
            offset,
            buffer: Buffer::Fill(piece),
        })
    }

    /// Verifies a piece, or puts it aside until the front is there.
    fn arrived(&mut self, position: u64, piece: &'a [u8]) -> Result<(), ReadError> {
        if position > 0 {
            let Some((front, context)) = &self.front else {
                self.early.push((position, piece));
                return Ok(());
            };
            return verify_pages(front, context, position, piece);
        }
        let front = decode_front(piece).map_err(Damage::Front)?;
        let layout = front.layout;
        let expected = (self.location.len, self.location.front_len);
        if RecordName::of(&front.header) != self.name || (layout.len, layout.head_len) != expected {
            return Err(ReadError::OtherRecord);
        }
        front.verify_root()?;
        let context = front.header.digest_context();
        let front_len = layout.front_len;
        verify_pages(&front, &context, front_len, &piece[front_len as usize..])?;
        for (position, piece) in self.early.drain(..) {
            verify_pages(&front, &context, position, piece)?;
        }
        self.front = Some((front, context));
        Ok(())
    }

    fn finish(self) -> Result<Header, ReadError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        assert!(
            self.rest.is_empty() && self.open == 0 && self.early.is_empty(),
            "all of it was read and verified"
        );
        let (front, _) = self.front.expect("the front was read");
        Ok(front.header)
    }
}

/// Verifies the pages in a piece, which starts with one.
fn verify_pages(
    front: &Front<'_>,
    context: &DigestContext,
    position: u64,
    piece: &[u8],
) -> Result<(), ReadError> {
    if planted(Bug::PagesBelieved) {
        return Ok(());
    }
    let start = position - front.layout.front_len;
    // What follows the payload is padding.
    let payload_len = (front.header.stripe_len - start).min(piece.len() as u64) as usize;
    let first = start / PAGE_BYTES;
    let digests = &front.digests.as_bytes()[first as usize * 8..];
    for ((page, digest), index) in
        piece[..payload_len].chunks(PAGE_BYTES as usize).zip(digests.as_chunks().0).zip(first..)
    {
        if context.page(index, page) != u64::from_le_bytes(*digest) {
            return Err(Damage::Page { index }.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
