//! Operations for many records at once, each judged by itself: what stands in one place shares its fate with nobody.

use std::collections::VecDeque;
use std::io;

use hashbrown::HashMap;

use crate::backend::{Found, Location, RecordName};
use crate::buffer::{Aligned, BLOCK_BYTES, Buffer};
use crate::read::{ReadJob, read_records};
use crate::record::{Front, FrontError, InspectedState, decode_front, decode_header};
use crate::storage::{Done, File, Op, OpKind, Queue, Work};

/// Runs operations that belong to one of `count` owners each, and says how each owner fared: the first of its failures,
/// if there was one. After that no more of its operations are begun.
pub(super) fn run_for_each<'a>(
    queue: &mut dyn Queue,
    count: usize,
    ops: impl Iterator<Item = (usize, Op<'a>)>,
) -> Vec<io::Result<()>> {
    struct Each<I> {
        ops: I,
        results: Vec<io::Result<()>>,
    }
    impl<'a, I: Iterator<Item = (usize, Op<'a>)>> Work<'a> for Each<I> {
        fn next(&mut self) -> Option<Op<'a>> {
            let (owner, op) = self.ops.find(|&(owner, _)| self.results[owner].is_ok())?;
            Some(Op { tag: owner as u64, ..op })
        }

        fn done(&mut self, done: Done<'a>) {
            let result = &mut self.results[done.tag as usize];
            if result.is_ok() {
                *result = done.result;
            }
        }
    }
    let results = std::iter::repeat_with(|| Ok(())).take(count).collect();
    let mut each = Each { ops, results };
    queue.run(&mut each);
    each.results
}

/// A record of which everything but the payload is to be read.
#[derive(Debug)]
pub(super) struct Scan {
    /// The caller's number for it.
    pub(super) tag: usize,
    /// Where it stands, if that could be opened.
    pub(super) file: io::Result<File>,
    /// Its first byte.
    pub(super) offset: u64,
    /// Its bytes.
    pub(super) len: u64,
    /// Bytes to read at first: whole blocks. If the header says that there are more, these are read, too.
    pub(super) head_len: u64,
}

/// Why a front could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScanError {
    /// The disk failed.
    #[error("it cannot be read: {0}")]
    Io(io::Error),
    /// It is none.
    #[error(transparent)]
    Front(#[from] FrontError),
}

/// How often something is read that does not look right: a bit may have flipped on its way, not on the disk.
pub(super) const READS_MAX: u32 = 4;

/// Reads the fronts of records, as many at a time as the queue is deep, and gives each to `each`.
pub(super) fn scan_fronts(
    queue: &mut dyn Queue,
    scans: impl Iterator<Item = Scan>,
    each: &mut dyn FnMut(usize, Result<Front<'_>, ScanError>),
) {
    struct Fronts<'f, I> {
        scans: I,
        each: &'f mut dyn FnMut(usize, Result<Front<'_>, ScanError>),
        number: u64,
        reading: HashMap<u64, Reading>,
        /// Those whose front is longer than was thought, or not right.
        again: VecDeque<Reading>,
    }
    struct Reading {
        tag: usize,
        file: File,
        offset: u64,
        len: u64,
        head_len: u64,
        reads: u32,
    }
    impl<'a, I: Iterator<Item = Scan>> Work<'a> for Fronts<'_, I> {
        fn next(&mut self) -> Option<Op<'a>> {
            let reading = loop {
                if let Some(longer) = self.again.pop_front() {
                    break longer;
                }
                let Scan { tag, file, offset, len, head_len } = self.scans.next()?;
                match file {
                    Ok(file) => {
                        break Reading { tag, file, offset, len, head_len: head_len.min(len), reads: 0 };
                    }
                    Err(error) => (self.each)(tag, Err(ScanError::Io(error))),
                }
            };
            let buffer = Buffer::Owned(Aligned::zeroed(reading.head_len as usize));
            let (tag, file, offset) = (self.number, reading.file.clone(), reading.offset);
            self.number += 1;
            self.reading.insert(tag, reading);
            Some(Op { tag, kind: OpKind::Read, file, offset, buffer })
        }

        fn done(&mut self, done: Done<'a>) {
            let reading = self.reading.remove(&done.tag).expect("it was begun");
            let bytes = done.buffer.as_slice();
            // Never longer than the record is: a header that lies cannot make us read, or allocate, more.
            let longer =
                |bytes| decode_header(bytes).map_or(0, |(_, layout)| layout.head_len.min(reading.len));
            let front = match done.result {
                Ok(()) if longer(bytes) > bytes.len() as u64 => {
                    self.again.push_back(Reading { head_len: longer(bytes), ..reading });
                    return;
                }
                Ok(()) => decode_front(bytes).map_err(ScanError::from),
                Err(error) => Err(ScanError::Io(error)),
            };
            if front.is_err() && reading.reads + 1 < READS_MAX {
                self.again.push_back(Reading { reads: reading.reads + 1, ..reading });
            } else {
                (self.each)(reading.tag, front);
            }
        }
    }
    let mut fronts = Fronts { scans, each, number: 0, reading: HashMap::new(), again: VecDeque::new() };
    queue.run(&mut fronts);
}

impl Front<'_> {
    /// Whether it is the front of this record, with these lengths.
    pub(super) fn is_named(&self, name: &RecordName, len: u64, head_len: u64) -> bool {
        RecordName::of(&self.header) == *name && self.layout.len == len && self.layout.head_len == head_len
    }

    /// The record, as a scan tells of it.
    pub(super) fn found(&self) -> Found<'_> {
        let Front { header, key, attributes, layout, .. } = self;
        Found { header, key, attributes, disk_len: layout.len }
    }
}

/// What a record of which the front was read is worth, with its payload.
pub(super) fn verify_payload(queue: &mut dyn Queue, name: RecordName, location: Location) -> InspectedState {
    let mut memory = Aligned::zeroed(location.len as usize);
    let job = ReadJob { name, location, into: &mut memory };
    match read_records(queue, vec![job]).pop() {
        Some(Err(error)) => InspectedState::Damaged { why: error.to_string() },
        _ => InspectedState::Ok,
    }
}

const _: () =
    assert!(BLOCK_BYTES >= moontide_types::record::HEADER_BYTES, "the first block holds the header");
