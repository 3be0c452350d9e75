//! Operations for many records at once, each with its own result.

use std::collections::VecDeque;
use std::io;

use moontide_rt::collections::HashMap;

use crate::backend::{RecordId, RecordLocation, ScannedRecord};
use crate::buffer::{AlignedBuf, BLOCK_BYTES, Buffer};
use crate::read::{ReadJob, read_records};
use crate::record::{InspectedState, PreambleError, RecordPreamble, decode_header, decode_preamble};
use crate::storage::{Completion, File, Op, OpKind, OpSource, Queue};

/// Runs operations that belong to one of `count` owners each. Returns the first failure of each owner, if there was
/// one. After a failure no further operations of that owner start.
pub(super) fn run_batch<'a>(
    queue: &mut dyn Queue,
    count: usize,
    ops: impl Iterator<Item = (usize, Op<'a>)>,
) -> Vec<io::Result<()>> {
    struct Each<I> {
        ops: I,
        results: Vec<io::Result<()>>,
    }
    impl<'a, I: Iterator<Item = (usize, Op<'a>)>> OpSource<'a> for Each<I> {
        fn next(&mut self) -> Option<Op<'a>> {
            let (owner, op) = self.ops.find(|&(owner, _)| self.results[owner].is_ok())?;
            Some(Op { tag: owner as u64, ..op })
        }

        fn done(&mut self, done: Completion<'a>) {
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

/// A record whose preamble is to be read.
#[derive(Debug)]
pub(super) struct PreambleScan {
    /// Identifies the record for the caller.
    pub(super) tag: usize,
    /// File of the record, or the error of opening it.
    pub(super) file: io::Result<File>,
    /// Offset of the record in the file.
    pub(super) offset: u64,
    /// Length of the record.
    pub(super) len: u64,
    /// Bytes to read first, whole blocks. If the header requires more, these are read, too.
    pub(super) preamble_read_len: u64,
}

/// Reason why a preamble could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScanError {
    /// An I/O error.
    #[error("cannot be read: {0}")]
    Io(io::Error),
    /// The bytes are not a valid preamble.
    #[error(transparent)]
    Preamble(#[from] PreambleError),
}

/// Maximum number of reads of invalid data: a bit may have flipped in transfer, not on the disk.
pub(super) const READS_MAX: u32 = 4;

/// Reads the preambles of records, as many at a time as the queue is deep, and passes each to `each`.
pub(super) fn scan_preambles(
    queue: &mut dyn Queue,
    scans: impl Iterator<Item = PreambleScan>,
    each: &mut dyn FnMut(usize, Result<RecordPreamble<'_>, ScanError>),
) {
    struct Preambles<'f, I> {
        scans: I,
        each: &'f mut dyn FnMut(usize, Result<RecordPreamble<'_>, ScanError>),
        number: u64,
        reading: HashMap<u64, Reading>,
        /// Records whose preamble is longer than the first read, or invalid.
        retries: VecDeque<Reading>,
    }
    struct Reading {
        tag: usize,
        file: File,
        offset: u64,
        len: u64,
        preamble_read_len: u64,
        reads: u32,
    }
    impl<'a, I: Iterator<Item = PreambleScan>> OpSource<'a> for Preambles<'_, I> {
        fn next(&mut self) -> Option<Op<'a>> {
            let reading = loop {
                if let Some(reading) = self.retries.pop_front() {
                    break reading;
                }
                let PreambleScan { tag, file, offset, len, preamble_read_len } = self.scans.next()?;
                match file {
                    Ok(file) => {
                        let preamble_read_len = preamble_read_len.min(len);
                        break Reading { tag, file, offset, len, preamble_read_len, reads: 0 };
                    }
                    Err(error) => (self.each)(tag, Err(ScanError::Io(error))),
                }
            };
            let buffer = Buffer::Owned(AlignedBuf::zeroed(reading.preamble_read_len as usize));
            let (tag, file, offset) = (self.number, reading.file.clone(), reading.offset);
            self.number += 1;
            self.reading.insert(tag, reading);
            Some(Op { tag, kind: OpKind::Read, file, offset, buffer })
        }

        fn done(&mut self, done: Completion<'a>) {
            let reading = self.reading.remove(&done.tag).expect("the read was started");
            let bytes = done.buffer.as_slice();
            // Never longer than the record: a wrong header cannot cause larger reads or allocations.
            let required = |bytes| {
                decode_header(bytes).map_or(0, |(_, layout)| layout.preamble_read_len.min(reading.len))
            };
            let preamble = match done.result {
                Ok(()) if required(bytes) > bytes.len() as u64 => {
                    self.retries.push_back(Reading { preamble_read_len: required(bytes), ..reading });
                    return;
                }
                Ok(()) => decode_preamble(bytes).map_err(ScanError::from),
                Err(error) => Err(ScanError::Io(error)),
            };
            if preamble.is_err() && reading.reads + 1 < READS_MAX {
                self.retries.push_back(Reading { reads: reading.reads + 1, ..reading });
            } else {
                (self.each)(reading.tag, preamble);
            }
        }
    }
    let reading = HashMap::new();
    let mut preambles = Preambles { scans, each, number: 0, reading, retries: VecDeque::new() };
    queue.run(&mut preambles);
}

impl RecordPreamble<'_> {
    /// Whether this is the preamble of the record `name`, with these lengths.
    pub(super) fn matches(&self, name: &RecordId, len: u64, preamble_read_len: u64) -> bool {
        RecordId::of(&self.header) == *name
            && self.layout.len == len
            && self.layout.preamble_read_len == preamble_read_len
    }

    /// Returns the record for a scan.
    pub(super) fn scanned(&self) -> ScannedRecord<'_> {
        let RecordPreamble { header, key, attributes, layout, .. } = self;
        ScannedRecord { header, key, attributes, disk_len: layout.len }
    }
}

/// Verifies the payload of a record whose preamble was read.
pub(super) fn verify_payload(
    queue: &mut dyn Queue,
    name: RecordId,
    location: RecordLocation,
) -> InspectedState {
    let mut memory = AlignedBuf::zeroed(location.len as usize);
    let job = ReadJob::whole(name, location, &mut memory);
    match read_records(queue, vec![job]).pop() {
        Some(Err(error)) => InspectedState::Corrupt { reason: error.to_string() },
        _ => InspectedState::Ok,
    }
}

const _: () =
    assert!(BLOCK_BYTES >= moontide_types::record::HEADER_BYTES, "the first block holds the header");
