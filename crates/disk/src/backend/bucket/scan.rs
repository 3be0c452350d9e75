//! The scan: what is in the buckets of a tier, without reading payloads and without changing anything.
//!
//! Tail and footer of a bucket are one read, or two if it has many records; many buckets are read at a time. What the
//! footer does not tell is looked up in the record's own front. Without a footer (the file was cut, or its end is
//! damaged) the records are walked from the first byte on, each telling where the next one starts, up to the first
//! header that is damaged.
//!
//! Bytes inside of payloads are never believed, whatever they look like: a record is only where the footer says, or
//! where the chain of records leads.

use std::io;
use std::path::Path;

use crate::backend::bucket::format::{Tail, Told, decode_entry};
use crate::buffer::{Aligned, BLOCK_BYTES, Buffer};
use crate::record::{FrontError, decode_front, decode_header};
use crate::storage::{File, Mode, Op, OpKind, Queue, Storage, run_all, run_one};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Bytes from the end of a bucket that are read first: tail and footer of some 250 records.
const FIRST_READ_BYTES: u64 = 64 << 10;

/// Buckets that are looked at together: a queue's worth.
const TOGETHER: usize = 32;

/// Shortest and longest form of file names.
const SUFFIX: &str = ".bucket";
const SUFFIX_TEMPORARY: &str = ".tmp";

/// A file that is, or was to become, a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketFile {
    pub(crate) number: u64,
    /// Whether it was never finished.
    pub(crate) temporary: bool,
    /// Its length.
    pub(crate) len: u64,
}

impl BucketFile {
    /// The name of a bucket's file.
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

    /// All of a tier, the newest first.
    pub(crate) fn list(storage: &dyn Storage) -> io::Result<Vec<BucketFile>> {
        let entries = storage.list(Path::new(""))?;
        let files = entries.iter().filter(|entry| !entry.is_dir);
        let mut files: Vec<_> = files.filter_map(|entry| BucketFile::parse(&entry.name, entry.len)).collect();
        files.sort_by_key(|file| std::cmp::Reverse(file.number));
        Ok(files)
    }
}

/// What the scan tells of a bucket.
#[derive(Debug)]
pub(crate) enum Seen<'a> {
    /// A record is there. Its payload was not read.
    Record(Told<'a>),
    /// Something is not what it should be; maybe there was a record.
    Bad {
        /// Where in the file.
        offset: u64,
        /// What is wrong.
        why: String,
    },
}

/// Looks at buckets, and tells of each one all that is in it, one after the other.
pub(crate) fn scan(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    buckets: &[BucketFile],
    each: &mut dyn FnMut(&BucketFile, Option<&File>, Seen<'_>),
) {
    for together in buckets.chunks(TOGETHER) {
        let mut opened = vec![];
        for bucket in together {
            let name = BucketFile::name(bucket.number, bucket.temporary);
            match open(storage, &name) {
                Ok((file, len)) => opened.push(Opened { bucket, file, len }),
                Err(error) => {
                    each(bucket, None, Seen::Bad { offset: 0, why: format!("cannot be opened: {error}") });
                }
            }
        }
        for (opened, footer) in opened.iter().zip(read_footers(queue, &opened)) {
            let mut tell = |seen: Seen<'_>| each(opened.bucket, Some(&opened.file), seen);
            match footer {
                Ok(footer) => opened.follow(queue, &footer, &mut tell),
                Err(why) => {
                    tell(Seen::Bad { offset: opened.len.saturating_sub(BLOCK), why });
                    opened.walk(queue, &mut tell);
                }
            }
        }
    }
}

fn open(storage: &dyn Storage, name: &str) -> io::Result<(File, u64)> {
    let file = storage.open(Path::new(name), Mode::Read)?;
    let len = storage.len(&file)?;
    Ok((file, len))
}

struct Opened<'b> {
    bucket: &'b BucketFile,
    file: File,
    len: u64,
}

struct Footer {
    tail: Tail,
    bytes: Aligned,
    /// Where the footer starts in `bytes`.
    start: usize,
}

impl Footer {
    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..][..self.tail.footer_len as usize]
    }
}

/// Reads tail and footer of all; why there is none is told for each.
fn read_footers(queue: &mut dyn Queue, buckets: &[Opened<'_>]) -> Vec<Result<Footer, String>> {
    let first: Vec<u64> =
        buckets.iter().map(|bucket| (bucket.len / BLOCK * BLOCK).min(FIRST_READ_BYTES)).collect();
    let ops = buckets.iter().zip(&first).filter(|(_, len)| **len > 0).map(|(bucket, &len)| {
        // A file that is not whole blocks long was cut; what is read then is no tail, or would be one of chance.
        bucket.read(bucket.len / BLOCK * BLOCK - len, len)
    });
    let mut ends = run_all(queue, ops).into_iter();
    let mut footers: Vec<Result<Footer, String>> = vec![];
    for (bucket, &len) in buckets.iter().zip(&first) {
        let end = if len > 0 { ends.next() } else { None };
        footers.push(match end {
            None => Err("there is no tail: the file is too short".into()),
            Some(done) => match (done.result, done.buffer) {
                (Ok(()), Buffer::Owned(bytes)) => bucket.footer_in(bytes),
                (Err(error), _) => Err(format!("the tail cannot be read: {error}")),
                (Ok(()), _) => unreachable!("a queue gives back the buffer that it took"),
            },
        });
    }
    let longer =
        |footer: &Result<Footer, String>| footer.as_ref().is_ok_and(|footer| footer.start == usize::MAX);
    let again = buckets.iter().zip(&footers).filter(|(_, footer)| longer(footer)).map(|(bucket, footer)| {
        let tail = footer.as_ref().map(|footer| footer.tail).expect("it is one of the longer ones");
        bucket.read(tail.footer_offset, tail.footer_len)
    });
    let mut again = run_all(queue, again.collect::<Vec<_>>()).into_iter();
    for footer in footers.iter_mut().filter(|footer| longer(footer)) {
        let done = again.next().expect("one for each of the longer ones");
        match (done.result, done.buffer, &mut *footer) {
            (Ok(()), Buffer::Owned(bytes), Ok(footer)) => (footer.bytes, footer.start) = (bytes, 0),
            (result, ..) => *footer = Err(format!("the footer cannot be read: {result:?}")),
        }
    }
    footers
}

impl Opened<'_> {
    fn read<'a>(&self, offset: u64, len: u64) -> Op<'a> {
        let buffer = Buffer::Owned(Aligned::zeroed(len as usize));
        Op { tag: 0, kind: OpKind::Read, file: self.file.clone(), offset, buffer }
    }

    /// The footer, if the tail in the last bytes of the file can be believed. One that is longer than these bytes starts
    /// at `usize::MAX` until it is read.
    fn footer_in(&self, bytes: Aligned) -> Result<Footer, String> {
        let tail = bytes
            .last_chunk()
            .and_then(|block| Tail::decode(block, self.len))
            .ok_or("the tail is damaged")?;
        let from_end = (tail.footer_len + BLOCK) as usize;
        let start = bytes.len().checked_sub(from_end).unwrap_or(usize::MAX);
        Ok(Footer { tail, bytes, start })
    }

    /// Tells what the footer says, and looks up what it does not.
    fn follow(&self, queue: &mut dyn Queue, footer: &Footer, tell: &mut dyn FnMut(Seen<'_>)) {
        let tail = &footer.tail;
        // Where the next record starts, if that is known.
        let mut next = Some(0);
        for index in 0..tail.count {
            if let Some(told) = decode_entry(footer.bytes(), tail, index) {
                next = Some(told.offset + told.layout.len);
                tell(Seen::Record(told));
                continue;
            }
            let Some(offset) = next else {
                tell(Seen::Bad { offset: tail.footer_offset, why: format!("entry {index} is damaged") });
                continue;
            };
            next = self.look(queue, offset, tail.footer_offset, tell);
        }
    }

    /// Tells what the records themselves say, from the first one on.
    fn walk(&self, queue: &mut dyn Queue, tell: &mut dyn FnMut(Seen<'_>)) {
        let mut offset = 0;
        while offset < self.len {
            let Some(next) = self.look(queue, offset, self.len, tell) else { return };
            offset = next;
        }
    }

    /// Tells what stands at `offset` and ends before `end`; where the next record starts, if that is known.
    fn look(
        &self,
        queue: &mut dyn Queue,
        offset: u64,
        end: u64,
        tell: &mut dyn FnMut(Seen<'_>),
    ) -> Option<u64> {
        let front = match self.front(queue, offset, end) {
            Ok(front) => front,
            Err(why) => {
                tell(Seen::Bad { offset, why });
                return None;
            }
        };
        let (_, layout) = decode_header(&front).ok()?;
        match decode_front(&front) {
            Ok(front) => {
                let (header, key, attributes) = (front.header, front.key, front.attributes);
                tell(Seen::Record(Told { offset, header, layout, key, attributes }));
            }
            Err(error) => tell(Seen::Bad { offset, why: error.to_string() }),
        }
        Some(offset + layout.len)
    }

    /// The front of the record at `offset`, of which at least the header is undamaged.
    fn front(&self, queue: &mut dyn Queue, offset: u64, end: u64) -> Result<Aligned, String> {
        let mut len = BLOCK;
        loop {
            let available = end.saturating_sub(offset);
            if available < len {
                return Err(FrontError::Short { needed: len, found: available }.to_string());
            }
            let done = run_one(queue, self.read(offset, len));
            done.result.map_err(|error| format!("cannot be read: {error}"))?;
            let Buffer::Owned(bytes) = done.buffer else {
                unreachable!("a queue gives back the buffer that it took")
            };
            let (_, layout) = decode_header(&bytes).map_err(|error| error.to_string())?;
            if layout.len > available {
                // A record whose end is missing cannot be read; and nothing stands behind it.
                return Err(FrontError::Short { needed: layout.len, found: available }.to_string());
            }
            if layout.head_len <= len {
                return Ok(bytes);
            }
            len = layout.head_len;
        }
    }
}
