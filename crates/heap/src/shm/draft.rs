//! [`Draft`]: a record's header and trailer, worked out and checked before anything is written.

use moontide_types::Extent;
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{Header, RecordLayout, Word, trailer_crc};

use crate::shm::grant::{BeginError, NewRecord};
use crate::shm::segment::SegmentRegions;

/// Everything of a record but payload and digests.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) header: Header,
    pub(super) layout: RecordLayout,
    /// Tenant, key and attributes, as they stand behind the digests.
    trailer: Vec<u8>,
}

impl Draft {
    /// The record in an extent that starts at its payload. `root` is the header's: the writer's mark while it is WRITING.
    pub(super) fn new(
        record: &NewRecord<'_>,
        word: Word,
        payload_offset: u64,
        root: u64,
    ) -> Result<Draft, BeginError> {
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
        Ok(Draft { header, layout, trailer })
    }

    /// Where it goes: as many units as it needs, from its payload's first byte on. Its header must have been checked.
    pub(super) fn extent(&self) -> Extent {
        Extent { start: (self.header.payload_offset / UNIT_BYTES) as u32, units: self.layout.units() }
    }

    /// Whether the extent is the one that the record needs, and the header makes sense.
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
    /// Nobody may read or write the record's extent meanwhile.
    pub(super) unsafe fn write_trailer(&self, regions: &SegmentRegions) {
        // SAFETY: inside the record's extent; exclusive, says the caller.
        unsafe {
            regions.write_bytes(self.header.payload_offset + self.layout.key().offset(), &self.trailer)
        };
    }

    /// Writes the page digests.
    ///
    /// # Safety
    /// As [`Draft::write_trailer`].
    ///
    /// # Panics
    /// If they are more or fewer than the record has.
    pub(super) unsafe fn write_digests(&self, regions: &SegmentRegions, digests: &[u8]) {
        let place = self.layout.digests();
        assert_eq!(digests.len() as u64, place.len(), "one digest a page");
        // SAFETY: inside the record's extent; exclusive, says the caller.
        unsafe { regions.write_bytes(self.header.payload_offset + place.offset(), digests) };
    }
}
