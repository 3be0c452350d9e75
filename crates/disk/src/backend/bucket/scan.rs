//! Scan of the buckets of a tier, without reading payloads and without changes.
//!
//! Tail and footer of a bucket are one read, or two if it has many records; many buckets are read at a time. An entry
//! that the footer does not provide is read from the record's own preamble. Without a footer (the file was truncated,
//! or its end is corrupt) the records are walked from the first byte on, each giving the position of the next one, up
//! to the first corrupt header.
//!
//! Bytes inside payloads are never interpreted: a record is only where the footer points, or where the chain of records
//! leads.

use std::io;
use std::path::Path;

use crate::backend::bucket::format::{FooterEntry, FooterTail, decode_entry};
use crate::buffer::{AlignedBuf, BLOCK_BYTES, Buffer};
use crate::record::{PreambleError, decode_header, decode_preamble};
use crate::storage::{File, Op, OpKind, OpenMode, Queue, Storage, run_all, run_one};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Bytes from the end of a bucket that are read first: tail and footer of about 250 records.
const FIRST_READ_BYTES: u64 = 64 << 10;

/// Buckets that are scanned together: the depth of a queue.
const SCAN_BATCH: usize = 32;

/// Suffixes of file names.
const SUFFIX: &str = ".bucket";
const SUFFIX_TEMPORARY: &str = ".tmp";

/// A bucket file, finished or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketFile {
    pub(crate) number: u64,
    /// Whether it was never finished.
    pub(crate) temporary: bool,
    /// Length in bytes.
    pub(crate) len: u64,
}

impl BucketFile {
    /// Returns the name of a bucket's file.
    pub(crate) fn name(number: u64, temporary: bool) -> String {
        format!("{number:016x}{}", if temporary { SUFFIX_TEMPORARY } else { SUFFIX })
    }

    fn parse(name: &str, len: u64) -> Option<BucketFile> {
        let (digits, temporary) = match name.strip_suffix(SUFFIX) {
            Some(digits) => (digits, false),
            None => (name.strip_suffix(SUFFIX_TEMPORARY)?, true),
        };
        let number = u64::from_str_radix(digits, 16).ok()?;
        (BucketFile::name(number, temporary) == name).then_some(BucketFile { number, temporary, len })
    }

    /// Lists all bucket files of a tier, the newest first.
    pub(crate) fn list(storage: &dyn Storage) -> io::Result<Vec<BucketFile>> {
        let entries = storage.list(Path::new(""))?;
        let files = entries.iter().filter(|entry| !entry.is_dir);
        let mut files: Vec<_> = files.filter_map(|entry| BucketFile::parse(&entry.name, entry.len)).collect();
        files.sort_by_key(|file| std::cmp::Reverse(file.number));
        Ok(files)
    }
}

/// One finding of a scan.
#[derive(Debug)]
pub(crate) enum ScanItem<'a> {
    /// A record. Its payload was not read.
    Record(FooterEntry<'a>),
    /// Invalid data; there may have been a record.
    Bad {
        /// Offset in the file.
        offset: u64,
        /// Description of the problem.
        reason: String,
    },
}

/// Scans buckets, and passes everything in each to `each`, one after the other.
pub(crate) fn scan(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    buckets: &[BucketFile],
    each: &mut dyn FnMut(&BucketFile, Option<&File>, ScanItem<'_>),
) {
    for batch in buckets.chunks(SCAN_BATCH) {
        let mut opened = vec![];
        for bucket in batch {
            let name = BucketFile::name(bucket.number, bucket.temporary);
            match open(storage, &name) {
                Ok((file, len)) => opened.push(Opened { bucket, file, len }),
                Err(error) => {
                    each(
                        bucket,
                        None,
                        ScanItem::Bad { offset: 0, reason: format!("cannot be opened: {error}") },
                    );
                }
            }
        }
        for (opened, footer) in opened.iter().zip(read_footers(queue, &opened)) {
            let mut emit = |item: ScanItem<'_>| each(opened.bucket, Some(&opened.file), item);
            match footer {
                Ok(footer) => opened.follow(queue, &footer, &mut emit),
                Err(reason) => {
                    emit(ScanItem::Bad { offset: opened.len.saturating_sub(BLOCK), reason });
                    opened.walk(queue, &mut emit);
                }
            }
        }
    }
}

fn open(storage: &dyn Storage, name: &str) -> io::Result<(File, u64)> {
    let file = storage.open(Path::new(name), OpenMode::Read)?;
    let len = storage.len(&file)?;
    Ok((file, len))
}

struct Opened<'b> {
    bucket: &'b BucketFile,
    file: File,
    len: u64,
}

struct Footer {
    tail: FooterTail,
    bytes: AlignedBuf,
    /// Position of the footer in `bytes`.
    start: usize,
}

impl Footer {
    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..][..self.tail.footer_len as usize]
    }
}

/// Reads tail and footer of all buckets. Fails for each with the reason why there is none.
fn read_footers(queue: &mut dyn Queue, buckets: &[Opened<'_>]) -> Vec<Result<Footer, String>> {
    let first: Vec<u64> =
        buckets.iter().map(|bucket| (bucket.len / BLOCK * BLOCK).min(FIRST_READ_BYTES)).collect();
    let ops = buckets.iter().zip(&first).filter(|(_, len)| **len > 0).map(|(bucket, &len)| {
        // A file whose length is not a multiple of the block size was truncated; its last bytes are then no valid tail,
        // except by chance.
        bucket.read(bucket.len / BLOCK * BLOCK - len, len)
    });
    let mut ends = run_all(queue, ops).into_iter();
    let mut footers: Vec<Result<Footer, String>> = vec![];
    for (bucket, &len) in buckets.iter().zip(&first) {
        let end = if len > 0 { ends.next() } else { None };
        footers.push(match end {
            None => Err("no tail: the file is too short".into()),
            Some(done) => match (done.result, done.buffer) {
                (Ok(()), Buffer::Owned(bytes)) => bucket.footer_in(bytes),
                (Err(error), _) => Err(format!("cannot read the tail: {error}")),
                (Ok(()), _) => unreachable!("a queue returns the buffer of the operation"),
            },
        });
    }
    let longer =
        |footer: &Result<Footer, String>| footer.as_ref().is_ok_and(|footer| footer.start == usize::MAX);
    let long = buckets.iter().zip(&footers).filter(|(_, footer)| longer(footer)).map(|(bucket, footer)| {
        let tail = footer.as_ref().map(|footer| footer.tail).expect("the footer is one of the long ones");
        bucket.read(tail.footer_offset, tail.footer_len)
    });
    let mut reads = run_all(queue, long.collect::<Vec<_>>()).into_iter();
    for footer in footers.iter_mut().filter(|footer| longer(footer)) {
        let done = reads.next().expect("one read per long footer");
        match (done.result, done.buffer, &mut *footer) {
            (Ok(()), Buffer::Owned(bytes), Ok(footer)) => (footer.bytes, footer.start) = (bytes, 0),
            (result, ..) => *footer = Err(format!("cannot read the footer: {result:?}")),
        }
    }
    footers
}

impl Opened<'_> {
    fn read<'a>(&self, offset: u64, len: u64) -> Op<'a> {
        let buffer = Buffer::Owned(AlignedBuf::zeroed(len as usize));
        Op { tag: 0, kind: OpKind::Read, file: self.file.clone(), offset, buffer }
    }

    /// Returns the footer, if the tail in the last bytes of the file is valid. `start` is `usize::MAX` for a footer
    /// that is longer than these bytes, until it is read.
    fn footer_in(&self, bytes: AlignedBuf) -> Result<Footer, String> {
        let tail = bytes
            .last_chunk()
            .and_then(|block| FooterTail::decode(block, self.len))
            .ok_or("the tail is corrupt")?;
        let from_end = (tail.footer_len + BLOCK) as usize;
        let start = bytes.len().checked_sub(from_end).unwrap_or(usize::MAX);
        Ok(Footer { tail, bytes, start })
    }

    /// Emits the entries of the footer, and reads the records of corrupt entries.
    fn follow(&self, queue: &mut dyn Queue, footer: &Footer, emit: &mut dyn FnMut(ScanItem<'_>)) {
        let tail = &footer.tail;
        // Offset of the next record, if known.
        let mut next = Some(0);
        for index in 0..tail.count {
            if let Some(entry) = decode_entry(footer.bytes(), tail, index) {
                next = Some(entry.offset + entry.layout.len);
                emit(ScanItem::Record(entry));
                continue;
            }
            let Some(offset) = next else {
                emit(ScanItem::Bad {
                    offset: tail.footer_offset,
                    reason: format!("entry {index} is corrupt"),
                });
                continue;
            };
            next = self.read_record(queue, offset, tail.footer_offset, emit);
        }
    }

    /// Emits the records themselves, from the first one on.
    fn walk(&self, queue: &mut dyn Queue, emit: &mut dyn FnMut(ScanItem<'_>)) {
        let mut offset = 0;
        while offset < self.len {
            let Some(next) = self.read_record(queue, offset, self.len, emit) else { return };
            offset = next;
        }
    }

    /// Emits the record at `offset`, which ends before `end`. Returns the offset of the next record, if known.
    fn read_record(
        &self,
        queue: &mut dyn Queue,
        offset: u64,
        end: u64,
        emit: &mut dyn FnMut(ScanItem<'_>),
    ) -> Option<u64> {
        let bytes = match self.preamble(queue, offset, end) {
            Ok(bytes) => bytes,
            Err(reason) => {
                emit(ScanItem::Bad { offset, reason });
                return None;
            }
        };
        let (_, layout) = decode_header(&bytes).ok()?;
        match decode_preamble(&bytes) {
            Ok(preamble) => {
                let (header, key, attributes) = (preamble.header, preamble.key, preamble.attributes);
                emit(ScanItem::Record(FooterEntry { offset, header, layout, key, attributes }));
            }
            Err(error) => emit(ScanItem::Bad { offset, reason: error.to_string() }),
        }
        Some(offset + layout.len)
    }

    /// Reads the preamble of the record at `offset`; at least its header is valid.
    fn preamble(&self, queue: &mut dyn Queue, offset: u64, end: u64) -> Result<AlignedBuf, String> {
        let mut len = BLOCK;
        loop {
            let available = end.saturating_sub(offset);
            if available < len {
                return Err(PreambleError::Short { needed: len, found: available }.to_string());
            }
            let done = run_one(queue, self.read(offset, len));
            done.result.map_err(|error| format!("cannot be read: {error}"))?;
            let Buffer::Owned(bytes) = done.buffer else {
                unreachable!("a queue returns the buffer of the operation")
            };
            let (_, layout) = decode_header(&bytes).map_err(|error| error.to_string())?;
            if layout.len > available {
                // A record without its end cannot be read; and nothing follows it.
                return Err(PreambleError::Short { needed: layout.len, found: available }.to_string());
            }
            if layout.preamble_read_len <= len {
                return Ok(bytes);
            }
            len = layout.preamble_read_len;
        }
    }
}
