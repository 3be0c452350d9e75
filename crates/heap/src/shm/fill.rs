//! Filling a record: payload and page digests, page by page while the page is in cache.
//!
//! A stored digest of 0 means that the page's digest is not known: it was not written yet, or is being changed. A
//! page whose digest really is 0 is digested once more at the end, which costs time and nothing else.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use moontide_types::Span;
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::{Header, PageDigests, RootBuilder};

use crate::shm::segment::SegmentRegions;

/// All pages of a record.
pub(crate) fn pages(header: &Header) -> Range<u64> {
    0..header.stripe_len.div_ceil(PAGE_BYTES)
}

/// The pages of which some byte is in the range.
pub(crate) fn pages_touched(range: Span) -> Range<u64> {
    if range.is_empty() { 0..0 } else { range.offset() / PAGE_BYTES..range.end().div_ceil(PAGE_BYTES) }
}

/// The bytes of a page; the last one may be shorter.
pub(crate) fn page_span(header: &Header, page: u64) -> Span {
    let start = page * PAGE_BYTES;
    let end = (start + PAGE_BYTES).min(header.stripe_len);
    Span::new(start, end.saturating_sub(start)).expect("inside an object")
}

impl SegmentRegions {
    /// The digests section of a record; `None` if it has none.
    fn digests_span(&self, header: &Header) -> Option<Span> {
        let (layout, span) = self.record_span(header).expect("a record inside of its segment");
        let digests = layout.digests();
        let at = Span::new(span.offset() + digests.offset(), digests.len()).expect("inside the record");
        (!header.flags.digestless()).then_some(at)
    }

    /// Stores the digest of a page; nothing in a record without digests.
    ///
    /// # Safety
    /// Nobody else may read or write this page's digest meanwhile.
    pub(crate) unsafe fn write_digest(&self, header: &Header, page: u64, digest: u64) {
        if let Some(digests) = self.digests_span(header) {
            assert!((page + 1) * 8 <= digests.len(), "a page of this record");
            // SAFETY: inside the record; exclusive, says the caller.
            unsafe { self.write_bytes(digests.offset() + page * 8, &digest.to_le_bytes()) };
        }
    }

    /// The stored digests, in page order.
    ///
    /// # Safety
    /// Nobody may write them while they are read.
    pub(crate) unsafe fn digests(&self, header: &Header) -> PageDigests<'_> {
        let span = self.digests_span(header).unwrap_or_default();
        // SAFETY: says the caller.
        PageDigests::new(unsafe { self.bytes(span) })
    }

    /// Copies the payload, given in parts, into the record and its page digests behind it, which `each` is told; the
    /// root over them, 0 without digests. Several threads copy what is long: one does not use all of the memory's speed,
    /// and the kernel's work at the first use of a page is spread, too.
    ///
    /// # Safety
    /// The caller is the one writer of the record, and holds a pin granted on WRITING.
    ///
    /// # Panics
    /// If the payload has another length than the record's, or the record does not lie in the segment.
    pub(crate) unsafe fn fill(&self, header: &Header, payload: &[&[u8]], mut each: impl FnMut(u64)) -> u64 {
        let payload = Payload::new(payload);
        assert_eq!(payload.len, header.stripe_len, "payload for another record");
        let (_, span) = self.record_span(header).expect("a record inside of its segment");
        let context = header.digest_context();
        let fill_page = |page: u64| -> u64 {
            let bytes = page_span(header, page);
            let mut at = span.offset() + bytes.offset();
            payload.pieces(bytes, |piece| {
                // SAFETY: inside the record, of which the caller is the one writer, and this thread that of the page.
                unsafe { self.write_bytes(at, piece) };
                at += piece.len() as u64;
            });
            if header.flags.digestless() {
                return 0;
            }
            // The copy above has brought the page into cache.
            let stored = Span::new(span.offset() + bytes.offset(), bytes.len()).expect("inside the record");
            // SAFETY: as above.
            context.page(page, unsafe { self.bytes(stored) })
        };
        let mut digests = vec![0; pages(header).count()];
        let parts = Mutex::new(digests.chunks_mut(PART_PAGES).enumerate());
        let work = || {
            while let Some((nth, digests)) = { parts.lock().unwrap_or_else(PoisonError::into_inner).next() } {
                for (page, digest) in ((nth * PART_PAGES) as u64..).zip(digests) {
                    *digest = fill_page(page);
                }
            }
        };
        with_helpers(payload.len, work);
        if header.flags.digestless() {
            return 0;
        }
        let mut root = RootBuilder::new(context);
        for (page, digest) in pages(header).zip(digests) {
            // SAFETY: the caller is the record's one writer.
            unsafe { self.write_digest(header, page, digest) };
            root.push(digest);
            each(digest);
        }
        root.finish()
    }
}

/// A payload in parts, of which any range can be had.
struct Payload<'a> {
    /// Each part, and where it starts.
    parts: Vec<(u64, &'a [u8])>,
    len: u64,
}

impl<'a> Payload<'a> {
    fn new(parts: &[&'a [u8]]) -> Payload<'a> {
        let mut len = 0;
        let placed = parts.iter().map(|part| {
            let start = len;
            len += part.len() as u64;
            (start, *part)
        });
        Payload { parts: placed.collect(), len }
    }

    /// Tells `take` the bytes of a range, piece by piece.
    fn pieces(&self, range: Span, mut take: impl FnMut(&[u8])) {
        let first = self.parts.partition_point(|(start, part)| start + part.len() as u64 <= range.offset());
        for (start, part) in &self.parts[first..] {
            if *start >= range.end() {
                return;
            }
            let from = range.offset().saturating_sub(*start) as usize;
            let to = (part.len() as u64).min(range.end() - start) as usize;
            take(&part[from..to]);
        }
    }
}

/// Pages that a thread takes at a time.
const PART_PAGES: usize = 4;

/// Runs `work` on this thread, and for a copy of many bytes within this host on some others as well. It must do what is left
/// to do, whoever else does.
pub fn with_helpers(bytes: u64, work: impl Fn() + Copy + Send) {
    match copy_helpers(bytes) {
        0 => work(),
        helpers => std::thread::scope(|scope| {
            for _ in 0..helpers {
                // If there is no thread to be had, this one does everything.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        }),
    }
}

/// How many threads should help with a copy of so many bytes within this host. Starting one takes some tens of
/// microseconds, in which a core copies a few hundred KiB.
fn copy_helpers(bytes: u64) -> usize {
    const ALONE_MAX: u64 = 4 << 20;
    const HELPERS_MAX: usize = 3;
    // Asked once: the answer is read from files.
    static CORES: OnceLock<usize> = OnceLock::new();
    match (bytes / ALONE_MAX) as usize {
        0 => 0,
        wanted => {
            let cores = *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
            wanted.min(cores - 1).min(HELPERS_MAX)
        }
    }
}
