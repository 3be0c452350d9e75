//! [`read_records`]: reads records from the disk into memory, and verifies each part while the next ones are read.
//!
//! A record is read in pieces: first the preamble with the first page of the payload, then page by page. The queue is
//! kept full across records, so that one large record is read as fast as many. A piece is verified when it has arrived,
//! while others are in flight: only the work on the last one adds latency (256 KiB, about 25 µs).
//!
//! ```text
//!  disk     │ preamble+page 0 │ page 1      │ page 2      │ page 3      │
//!  verify                     │ CRCs, page 0│ page 1      │ page 2      │ page 3 │ → Ok
//! ```
//!
//! The digests of all pages are in the preamble, and the header's length is part of their seed: pieces that arrive
//! before the preamble wait for it.
//!
//! A job may ask for a part of the payload. It always reads the preamble, which holds the digests of the part.
//!
//! Invariant: the result is Ok only for a record whose header has the right id, whose CRCs match, whose digests match
//! the root in the header, and whose requested pages all match their digests. No read skips these checks.

use std::io;

use moontide_rt::mutation_enabled;
use moontide_types::Span;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::{DigestContext, Header};

use crate::backend::{RecordId, RecordLocation};
use crate::buffer::Buffer;
use crate::mutation::Mutation;
use crate::record::{Corruption, RecordPreamble, decode_preamble};
use crate::storage::{Completion, Op, OpKind, OpSource, Queue};

/// A record to read, or a part of one.
#[derive(Debug)]
pub struct ReadJob<'a> {
    name: RecordId,
    location: RecordLocation,
    /// First byte of the part in the payload.
    start: u64,
    into: &'a mut [u8],
}

impl<'a> ReadJob<'a> {
    /// Returns the id of the record.
    pub fn name(&self) -> RecordId {
        self.name
    }

    /// Reads the whole record with this id from its location. `into` is as long as the record, and starts on a block. Its
    /// content is undefined after an error.
    ///
    /// # Panics
    /// If `into` has another length.
    pub fn whole(name: RecordId, location: RecordLocation, into: &'a mut [u8]) -> ReadJob<'a> {
        assert_eq!(into.len() as u64, location.len, "memory of the length of the record");
        ReadJob { name, location, start: 0, into }
    }

    /// Reads the preamble, and behind it a part of the payload: `part` is within [`RecordLocation::payload_blocks`],
    /// starts with a page, and ends with a page or the payload; it may be empty. `into` starts on a block. Its content is
    /// undefined after an error.
    ///
    /// # Panics
    /// If the part is none, or `into` is not as long as preamble and part.
    pub fn part(name: RecordId, location: RecordLocation, part: Span, into: &'a mut [u8]) -> ReadJob<'a> {
        let payload = location.payload_blocks();
        let is_part = part.offset().is_multiple_of(PAGE_BYTES)
            && (part.end() == payload || part.end() < payload && part.end().is_multiple_of(PAGE_BYTES));
        assert!(is_part, "whole pages of the payload");
        assert_eq!(into.len() as u64, location.preamble_read_len + part.len(), "memory of the part");
        ReadJob { name, location, start: part.offset(), into }
    }
}

/// Reason why a record was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// An I/O error.
    #[error("disk I/O error: {0}")]
    Io(io::ErrorKind),
    /// The record failed verification.
    #[error(transparent)]
    Corrupt(#[from] Corruption),
    /// The location holds another record.
    #[error("the location holds another record")]
    WrongRecord,
}

/// Reads and verifies records. Results are in the order of the jobs. [`decode_preamble`] returns the sections of a
/// record in its memory.
pub fn read_records<'a>(queue: &mut dyn Queue, jobs: Vec<ReadJob<'a>>) -> Vec<Result<Header, ReadError>> {
    let mut work = ReadWork { current: 0, jobs: jobs.into_iter().map(ReadState::new).collect() };
    queue.run(&mut work);
    work.jobs.into_iter().map(ReadState::finish).collect()
}

struct ReadWork<'a> {
    jobs: Vec<ReadState<'a>>,
    /// First job that may have pieces left to read.
    current: usize,
}

struct ReadState<'a> {
    name: RecordId,
    location: RecordLocation,
    /// Memory of the pieces that were not started, and its position in the record.
    rest: &'a mut [u8],
    position: u64,
    /// Bytes of the payload before the part.
    start: u64,
    /// Pieces that are not verified yet: in flight or waiting.
    open: usize,
    /// Everything but the payload, when it has arrived.
    preamble: Option<(RecordPreamble<'a>, DigestContext)>,
    /// Pieces that arrived before the preamble, with their position in the record.
    early: Vec<(u64, &'a [u8])>,
    error: Option<ReadError>,
}

impl<'a> OpSource<'a> for ReadWork<'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        loop {
            let job = self.jobs.get_mut(self.current)?;
            if let Some(op) = job.next_piece(self.current) {
                return Some(op);
            }
            self.current += 1;
        }
    }

    fn done(&mut self, done: Completion<'a>) {
        let (index, blocks) = ((done.tag >> TAG_BLOCK_BITS) as usize, done.tag & ((1 << TAG_BLOCK_BITS) - 1));
        let job = &mut self.jobs[index];
        job.open -= 1;
        if job.error.is_some() {
            return;
        }
        let result = match done.result {
            Err(error) => Err(ReadError::Io(error.kind())),
            Ok(()) => match done.buffer {
                Buffer::BorrowedMut(bytes) => job.arrived(blocks * BLOCK, bytes),
                _ => unreachable!("a queue returns the buffer of the operation"),
            },
        };
        job.error = result.err();
    }
}

/// A tag is the index of the job and the position of the piece in the record, in blocks: a record of 1 TiB has 2²⁸.
const TAG_BLOCK_BITS: u32 = 32;
const BLOCK: u64 = crate::buffer::BLOCK_BYTES as u64;

impl<'a> ReadState<'a> {
    fn new(ReadJob { name, location, start, into }: ReadJob<'a>) -> ReadState<'a> {
        ReadState {
            name,
            location,
            rest: into,
            position: 0,
            start,
            open: 0,
            preamble: None,
            early: vec![],
            error: None,
        }
    }

    fn next_piece(&mut self, index: usize) -> Option<Op<'a>> {
        if self.rest.is_empty() || self.error.is_some() {
            return None;
        }
        let is_first = self.position == 0;
        let len = match is_first {
            // The first page follows the preamble on the disk, another part does not.
            true if self.start > 0 => self.location.preamble_read_len,
            true => (self.location.preamble_read_len + PAGE_BYTES).min(self.rest.len() as u64),
            false => PAGE_BYTES.min(self.rest.len() as u64),
        };
        let (piece, rest) = std::mem::take(&mut self.rest).split_at_mut(len as usize);
        self.rest = rest;
        self.open += 1;
        let tag = ((index as u64) << TAG_BLOCK_BITS) | (self.position / BLOCK);
        let offset = self.location.offset + self.position;
        self.position += if is_first { len + self.start } else { len };
        Some(Op {
            tag,
            kind: OpKind::Read,
            file: self.location.file.clone(),
            offset,
            buffer: Buffer::BorrowedMut(piece),
        })
    }

    /// Verifies a piece, or keeps it until the preamble has arrived.
    fn arrived(&mut self, position: u64, piece: &'a [u8]) -> Result<(), ReadError> {
        if position > 0 {
            let Some((preamble, context)) = &self.preamble else {
                self.early.push((position, piece));
                return Ok(());
            };
            return verify_pages(preamble, context, position, piece);
        }
        let preamble = decode_preamble(piece).map_err(Corruption::Preamble)?;
        let layout = preamble.layout;
        let expected = (self.location.len, self.location.preamble_read_len);
        if RecordId::of(&preamble.header) != self.name || (layout.len, layout.preamble_read_len) != expected {
            return Err(ReadError::WrongRecord);
        }
        preamble.verify_root()?;
        let context = preamble.header.digest_context();
        let preamble_len = layout.preamble_len;
        verify_pages(&preamble, &context, preamble_len, &piece[preamble_len as usize..])?;
        for (position, piece) in self.early.drain(..) {
            verify_pages(&preamble, &context, position, piece)?;
        }
        self.preamble = Some((preamble, context));
        Ok(())
    }

    fn finish(self) -> Result<Header, ReadError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        assert!(
            self.rest.is_empty() && self.open == 0 && self.early.is_empty(),
            "all pieces were read and verified"
        );
        let (preamble, _) = self.preamble.expect("the preamble was read");
        Ok(preamble.header)
    }
}

/// Verifies the pages of a piece, which starts with a page.
fn verify_pages(
    preamble: &RecordPreamble<'_>,
    context: &DigestContext,
    position: u64,
    piece: &[u8],
) -> Result<(), ReadError> {
    if mutation_enabled(Mutation::PagesBelieved) {
        return Ok(());
    }
    let start = position - preamble.layout.preamble_len;
    // The payload is followed by padding.
    let payload_len = (preamble.header.stripe_len - start).min(piece.len() as u64) as usize;
    let first = start / PAGE_BYTES;
    let digests = &preamble.digests.as_bytes()[first as usize * 8..];
    for ((page, digest), index) in
        piece[..payload_len].chunks(PAGE_BYTES as usize).zip(digests.as_chunks().0).zip(first..)
    {
        if context.page(index, page) != u64::from_le_bytes(*digest) {
            return Err(Corruption::Page { index }.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
