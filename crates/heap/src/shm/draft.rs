//! [`RecordDraft`]: a record's header and trailer, computed and checked before they are written.

use moontide_types::Extent;
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::{Header, RecordLayout, Word, trailer_crc};

use crate::shm::grant::{BeginError, RecordSpec};
use crate::shm::segment::SegmentRegions;

/// Header and trailer of a record, without payload and digests.
#[derive(Debug)]
pub(super) struct RecordDraft {
    pub(super) header: Header,
    pub(super) layout: RecordLayout,
    /// Tenant, key and attributes in the order in which they follow the digests.
    trailer: Vec<u8>,
}

impl RecordDraft {
    /// Computes the record for an extent that starts at its payload. `root` goes into the header: the writer's tag
    /// while it is WRITING.
    pub(super) fn new(
        record: &RecordSpec<'_>,
        word: Word,
        payload_offset: u64,
        root: u64,
    ) -> Result<RecordDraft, BeginError> {
        record.attributes.check()?;
        let key_len = record.key.encoded_len();
        let mut trailer = Vec::with_capacity(key_len + 64);
        record.key.encode(&mut trailer);
        record.attributes.encode(&mut trailer);
        let (key_part, attributes_part) = trailer.split_at(key_len);
        let (key_len, attributes_len) = (key_part.len() as u32, attributes_part.len() as u32);
        let layout = RecordLayout::new(record.stripe_len, key_len, attributes_len, record.flags)?;
        let header = Header {
            flags: record.flags,
            id: record.id,
            word,
            object_len: record.object_len,
            stripe_offset: record.stripe_offset,
            stripe_len: record.stripe_len,
            payload_offset,
            root,
            stripe_index: record.stripe_index,
            stripe_count: record.stripe_count,
            key_len,
            attributes_len,
            trailer_crc: trailer_crc(key_part, attributes_part),
            id_key: record.id_key,
            tenant_generation: record.tenant_generation,
        };
        Ok(RecordDraft { header, layout, trailer })
    }

    /// Returns the extent of the record: its units from the payload's first byte on. The header must have been
    /// checked.
    pub(super) fn extent(&self) -> Extent {
        Extent { start: (self.header.payload_offset / UNIT_BYTES) as u32, units: self.layout.units() }
    }

    /// Checks that the extent has the record's length and alignment, and that the header is valid.
    pub(super) fn check(&self, extent: Extent) -> Result<(), BeginError> {
        let (units, align) = (self.layout.units(), self.layout.align());
        if extent.units != units || !extent.span().offset().is_multiple_of(align) {
            return Err(BeginError::Extent { extent, units, align });
        }
        self.header.check()?;
        Ok(())
    }

    /// Writes tenant, key and attributes.
    ///
    /// # Safety
    /// No other thread may read or write the record's extent during the call.
    pub(super) unsafe fn write_trailer(&self, regions: &SegmentRegions) {
        // SAFETY: inside the record's extent; the caller guarantees exclusive access.
        unsafe {
            regions.write_bytes(self.header.payload_offset + self.layout.key().offset(), &self.trailer)
        };
    }

    /// Writes the page digests.
    ///
    /// # Safety
    /// As [`RecordDraft::write_trailer`].
    ///
    /// # Panics
    /// If their number is not the record's number of pages.
    pub(super) unsafe fn write_digests(&self, regions: &SegmentRegions, digests: &[u8]) {
        let span = self.layout.digests();
        assert_eq!(digests.len() as u64, span.len(), "one digest per page");
        // SAFETY: inside the record's extent; the caller guarantees exclusive access.
        unsafe { regions.write_bytes(self.header.payload_offset + span.offset(), digests) };
    }
}
