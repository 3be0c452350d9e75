//! Filling a record: payload and page digests, page by page while the page is in cache.
//!
//! A stored digest of 0 means that the page's digest is not known: it was not written yet, or is being changed. A
//! page whose digest really is 0 is digested once more at the end, which costs time and nothing else.

use std::ops::Range;

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
    /// root over them, 0 without digests.
    ///
    /// # Safety
    /// The caller is the one writer of the record, and holds a pin granted on WRITING.
    ///
    /// # Panics
    /// If the payload has another length than the record's, or the record does not lie in the segment.
    pub(crate) unsafe fn fill(&self, header: &Header, payload: &[&[u8]], mut each: impl FnMut(u64)) -> u64 {
        let len: u64 = payload.iter().map(|part| part.len() as u64).sum();
        assert_eq!(len, header.stripe_len, "payload for another record");
        let (_, span) = self.record_span(header).expect("a record inside of its segment");
        let context = header.digest_context();
        let mut root = RootBuilder::new(context);
        let mut parts = payload.iter().copied();
        let mut part: &[u8] = &[];
        for page in pages(header) {
            let bytes = page_span(header, page);
            let mut at = bytes.offset();
            while at < bytes.end() {
                if part.is_empty() {
                    part = parts.next().expect("the lengths add up");
                    continue;
                }
                let (piece, rest) = part.split_at(part.len().min((bytes.end() - at) as usize));
                // SAFETY: inside the record, of which the caller is the one writer.
                unsafe { self.write_bytes(span.offset() + at, piece) };
                at += piece.len() as u64;
                part = rest;
            }
            if header.flags.digestless() {
                continue;
            }
            // The copy above has brought the page into cache.
            let stored = Span::new(span.offset() + bytes.offset(), bytes.len()).expect("inside the record");
            // SAFETY: as above.
            let digest = context.page(page, unsafe { self.bytes(stored) });
            // SAFETY: as above.
            unsafe { self.write_digest(header, page, digest) };
            root.push(digest);
            each(digest);
        }
        if header.flags.digestless() { 0 } else { root.finish() }
    }
}
