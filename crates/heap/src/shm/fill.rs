//! Filling a record: payload and page digests, page by page while the page is in cache.

use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::{DigestContext, Header, RootBuilder};

use crate::shm::segment::SegmentRegions;

/// Copies `payload` into the record and its page digests behind it; the root over them.
///
/// # Safety
/// The caller is the one writer of the record, and holds a pin granted on WRITING.
///
/// # Panics
/// If the payload has another length than the record's, or the record does not lie in the segment.
pub(crate) unsafe fn fill(regions: &SegmentRegions, header: &Header, payload: &[u8]) -> u64 {
    assert_eq!(payload.len() as u64, header.stripe_len, "payload for another record");
    let (layout, span) = regions.record_span(header).expect("a record inside of its segment");
    let context = DigestContext {
        id: header.id,
        version: header.word.epoch(),
        stripe: header.stripe_index,
        len: header.stripe_len,
    };
    let digests_at = span.offset() + layout.digests().offset();
    let mut root = RootBuilder::new(context);
    for (index, page) in payload.chunks(PAGE_BYTES as usize).enumerate() {
        let at = span.offset() + index as u64 * PAGE_BYTES;
        // SAFETY: inside the record, of which the caller is the one writer.
        unsafe { regions.write_bytes(at, page) };
        if header.flags.digestless() {
            continue;
        }
        // The source was read into cache by the copy above.
        let digest = context.page(index as u64, page);
        // SAFETY: as above.
        unsafe { regions.write_bytes(digests_at + index as u64 * 8, &digest.to_le_bytes()) };
        root.push(digest);
    }
    if header.flags.digestless() { 0 } else { root.finish() }
}
