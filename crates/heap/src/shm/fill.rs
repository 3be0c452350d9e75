//! Fills a record with payload and page digests, page by page while the page is in cache.
//!
//! A stored digest of 0 means that the page's digest is unknown: the page is not written yet, or is being changed. A
//! page whose digest really is 0 is digested once more at the end, which only costs time.

use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

use moontide_types::Span;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::{Header, PageDigests, RootBuilder};

use crate::shm::segment::SegmentRegions;

/// Returns all pages of a record.
pub(crate) fn pages(header: &Header) -> Range<u64> {
    0..header.stripe_len.div_ceil(PAGE_BYTES)
}

/// Returns the pages that overlap the range.
pub(crate) fn pages_touched(range: Span) -> Range<u64> {
    if range.is_empty() { 0..0 } else { range.offset() / PAGE_BYTES..range.end().div_ceil(PAGE_BYTES) }
}

/// Returns the range of a page; the last one may be shorter.
pub(crate) fn page_span(header: &Header, page: u64) -> Span {
    let start = page * PAGE_BYTES;
    let end = (start + PAGE_BYTES).min(header.stripe_len);
    Span::new(start, end.saturating_sub(start)).expect("inside an object")
}

impl SegmentRegions {
    /// Returns the digests section of a record; `None` if it has none.
    fn digests_span(&self, header: &Header) -> Option<Span> {
        let (layout, span) = self.record_span(header).expect("a record inside of its segment");
        let digests = layout.digests();
        let at = Span::new(span.offset() + digests.offset(), digests.len()).expect("inside the record");
        (!header.flags.digestless()).then_some(at)
    }

    /// Stores the digest of a page. Does nothing for a record without digests.
    ///
    /// # Safety
    /// No other thread may read or write this page's digest during the call.
    pub(crate) unsafe fn write_digest(&self, header: &Header, page: u64, digest: u64) {
        if let Some(digests) = self.digests_span(header) {
            assert!((page + 1) * 8 <= digests.len(), "page {page} is not in this record");
            // SAFETY: inside the record; the caller guarantees exclusive access.
            unsafe { self.write_bytes(digests.offset() + page * 8, &digest.to_le_bytes()) };
        }
    }

    /// Returns the stored digests, in page order.
    ///
    /// # Safety
    /// No thread may write them during the life of the result.
    pub(crate) unsafe fn digests(&self, header: &Header) -> PageDigests<'_> {
        let span = self.digests_span(header).unwrap_or_default();
        // SAFETY: guaranteed by the caller.
        PageDigests::new(unsafe { self.bytes(span) })
    }

    /// Copies the payload, given in parts, into the record, stores its page digests, and passes each digest to
    /// `each`. Returns the root over them, 0 without digests. Several threads copy a long payload: one thread does
    /// not use the full memory bandwidth, and the kernel's work at the first use of a page is parallel, too.
    ///
    /// # Safety
    /// The caller is the one writer of the record, and holds a pin granted on WRITING.
    ///
    /// # Panics
    /// If the payload's length is not the record's, or the record is outside of the segment.
    pub(crate) unsafe fn fill(&self, header: &Header, payload: &[&[u8]], mut each: impl FnMut(u64)) -> u64 {
        let payload = PayloadParts::new(payload);
        assert_eq!(payload.len, header.stripe_len, "payload length differs from the record's");
        let (_, span) = self.record_span(header).expect("record inside its segment");
        let context = header.digest_context();
        let fill_page = |page: u64| -> u64 {
            let bytes = page_span(header, page);
            let mut at = span.offset() + bytes.offset();
            payload.pieces(bytes, |piece| {
                // SAFETY: inside the record; the caller is its one writer, and this thread the one writer of the
                // page.
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
        run_parallel(payload.len, work);
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

/// A payload in parts, with access by range.
struct PayloadParts<'a> {
    /// Offset and bytes of each part.
    parts: Vec<(u64, &'a [u8])>,
    len: u64,
}

impl<'a> PayloadParts<'a> {
    fn new(parts: &[&'a [u8]]) -> PayloadParts<'a> {
        let mut len = 0;
        let parts = parts.iter().map(|part| {
            let start = len;
            len += part.len() as u64;
            (start, *part)
        });
        PayloadParts { parts: parts.collect(), len }
    }

    /// Passes the bytes of a range to `consume`, piece by piece.
    fn pieces(&self, range: Span, mut consume: impl FnMut(&[u8])) {
        let first = self.parts.partition_point(|(start, part)| start + part.len() as u64 <= range.offset());
        for (start, part) in &self.parts[first..] {
            if *start >= range.end() {
                return;
            }
            let from = range.offset().saturating_sub(*start) as usize;
            let to = (part.len() as u64).min(range.end() - start) as usize;
            consume(&part[from..to]);
        }
    }
}

/// Pages that a thread fills at a time.
const PART_PAGES: usize = 4;

/// Runs `work` on this thread, and for a large copy within the host on helper threads as well. `work` must process
/// the remaining work until none is left, whichever threads run it.
pub fn run_parallel(bytes: u64, work: impl Fn() + Copy + Send) {
    match copy_helpers(bytes) {
        0 => work(),
        helpers => std::thread::scope(|scope| {
            for _ in 0..helpers {
                // If no thread can be started, this one does all the work.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        }),
    }
}

/// Returns the number of helper threads for a copy of `bytes` within the host. Starting one takes some tens of
/// microseconds, in which a core copies a few hundred KiB.
fn copy_helpers(bytes: u64) -> usize {
    const SINGLE_THREAD_MAX: u64 = 4 << 20;
    const HELPERS_MAX: usize = 3;
    // Read once: the value comes from files.
    static CORES: OnceLock<usize> = OnceLock::new();
    match (bytes / SINGLE_THREAD_MAX) as usize {
        0 => 0,
        wanted => {
            let cores = *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from));
            wanted.min(cores - 1).min(HELPERS_MAX)
        }
    }
}
