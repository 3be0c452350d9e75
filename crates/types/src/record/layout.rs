//! Layout of a record's sections, relative to the first byte of its payload.
//!
//! ```text
//!  0            stripe_len   round up to 8    + 8 × pages     + key_len      + attributes_len = total
//!  ├── payload ─────┤ padding ├── digests ────────┤── tenant+key ──┤── attributes ──┤
//! ```

use crate::limits::{
    COHORT_BYTES_MAX, KEY_BYTES_MAX, OBJECT_BYTES_MAX, PAGE_BYTES, PARENT_HASH_BYTES_MAX, PAYLOAD_ALIGN,
    TENANT_BYTES_MAX, UNIT_BYTES, USER_DATA_BYTES_MAX,
};
use crate::record::flags::RecordFlags;
use crate::span::{Extent, Span};

/// Longest tenant and key section in bytes: both texts, each with a `u16` length prefix.
const KEY_SECTION_BYTES_MAX: usize = 2 + TENANT_BYTES_MAX + 2 + KEY_BYTES_MAX;

/// Longest attributes in bytes: every kind once, each with 4 bytes of kind and length, and space for kinds of
/// later releases.
pub(super) const ATTRIBUTES_BYTES_MAX: usize = 4096;

const _: () = assert!(
    (4 + 1) + (4 + 8) + (4 + COHORT_BYTES_MAX) + (4 + PARENT_HASH_BYTES_MAX) + (4 + USER_DATA_BYTES_MAX)
        <= ATTRIBUTES_BYTES_MAX
);

/// Error of the computation of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The payload exceeds [`OBJECT_BYTES_MAX`].
    #[error("payload of {len} bytes, at most {OBJECT_BYTES_MAX} are allowed")]
    Payload {
        /// Length in bytes.
        len: u64,
    },
    /// The tenant and key section is longer than the longest tenant and key require.
    #[error("tenant and key section of {len} bytes, at most {KEY_SECTION_BYTES_MAX} are allowed")]
    KeySection {
        /// Length in bytes.
        len: u32,
    },
    /// The attributes are longer than 4 KiB.
    #[error("attributes of {len} bytes, at most {ATTRIBUTES_BYTES_MAX} are allowed")]
    Attributes {
        /// Length in bytes.
        len: u32,
    },
    /// The offset of the payload violates the alignment for its length.
    #[error("payload offset {offset} is not a multiple of {align}")]
    Misaligned {
        /// Offset of the payload.
        offset: u64,
        /// Required alignment in bytes.
        align: u64,
    },
    /// The end of the record exceeds 64 bits.
    #[error("record at offset {offset} exceeds the 64-bit address range")]
    Offset {
        /// Offset of the payload.
        offset: u64,
    },
}

/// Sections of a record, as spans relative to the first byte of the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    payload_len: u64,
    pages: u64,
    digests_len: u64,
    key_len: u32,
    attributes_len: u32,
}

impl RecordLayout {
    /// Computes the layout for these lengths in bytes.
    pub fn new(
        payload_len: u64,
        key_len: u32,
        attributes_len: u32,
        flags: RecordFlags,
    ) -> Result<RecordLayout, LayoutError> {
        if payload_len > OBJECT_BYTES_MAX {
            return Err(LayoutError::Payload { len: payload_len });
        }
        if key_len as usize > KEY_SECTION_BYTES_MAX {
            return Err(LayoutError::KeySection { len: key_len });
        }
        if attributes_len as usize > ATTRIBUTES_BYTES_MAX {
            return Err(LayoutError::Attributes { len: attributes_len });
        }
        let pages = payload_len.div_ceil(PAGE_BYTES);
        let digests_len = if flags.digestless() { 0 } else { pages * 8 };
        Ok(RecordLayout { payload_len, pages, digests_len, key_len, attributes_len })
    }

    /// Returns the number of pages of the payload.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the span of the payload.
    pub fn payload(&self) -> Span {
        span(0, self.payload_len)
    }

    /// Returns the span of the page digests, one little-endian `u64` per page.
    pub fn digests(&self) -> Span {
        span(self.payload_len.next_multiple_of(8), self.digests_len)
    }

    /// Returns the span of the tenant and key section.
    pub fn key(&self) -> Span {
        span(self.digests().end(), self.key_len.into())
    }

    /// Returns the span of the attributes.
    pub fn attributes(&self) -> Span {
        span(self.key().end(), self.attributes_len.into())
    }

    /// Returns the length of payload and trailer together.
    pub fn total_len(&self) -> u64 {
        self.attributes().end()
    }

    /// Returns the required alignment of the payload in bytes.
    pub fn align(&self) -> u64 {
        if self.payload_len >= PAYLOAD_ALIGN { PAYLOAD_ALIGN } else { UNIT_BYTES }
    }

    /// Returns the number of units that the record takes in a segment: at least one, even for an empty payload.
    pub fn units(&self) -> u32 {
        // 1 TiB of payload plus digests is slightly more than 2³¹ units.
        Extent::units_for(self.total_len().max(1)).expect("bounded by OBJECT_BYTES_MAX")
    }

    /// Returns the bytes of a record whose payload starts at `offset`. Fails if the offset is misaligned.
    pub fn span_from(&self, offset: u64) -> Result<Span, LayoutError> {
        if !offset.is_multiple_of(self.align()) {
            return Err(LayoutError::Misaligned { offset, align: self.align() });
        }
        Span::new(offset, self.total_len()).ok_or(LayoutError::Offset { offset })
    }
}

/// Creates a span whose end fits: all lengths here are far below 2⁶⁴.
fn span(offset: u64, len: u64) -> Span {
    Span::new(offset, len).expect("bounded")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_sections_follow_payload_in_order() {
        let layout = RecordLayout::new(PAGE_BYTES + 1, 10, 7, RecordFlags::NONE).unwrap();
        assert_eq!(layout.pages(), 2);
        assert_eq!(layout.digests(), span(PAGE_BYTES + 8, 16));
        assert_eq!(layout.key(), span(PAGE_BYTES + 24, 10));
        assert_eq!(layout.attributes(), span(PAGE_BYTES + 34, 7));
        assert_eq!(layout.total_len(), PAGE_BYTES + 41);
        assert_eq!(layout.units(), 513);
    }

    #[test]
    fn layout_of_small_and_empty_payloads() {
        let empty = RecordLayout::new(0, 0, 0, RecordFlags::NONE).unwrap();
        assert_eq!((empty.pages(), empty.total_len(), empty.units(), empty.align()), (0, 0, 1, 512));
        let page = RecordLayout::new(4096, 5, 0, RecordFlags::NONE).unwrap();
        assert_eq!((page.align(), page.units()), (4096, 9));
        let bare = RecordLayout::new(4096, 5, 0, RecordFlags::DIGESTLESS).unwrap();
        assert_eq!((bare.pages(), bare.digests().len()), (1, 0));
    }

    #[test]
    fn record_layout_limits_are_enforced() {
        let fits = |p, k, a| RecordLayout::new(p, k, a, RecordFlags::NONE).is_ok();
        assert!(fits(OBJECT_BYTES_MAX, KEY_SECTION_BYTES_MAX as u32, ATTRIBUTES_BYTES_MAX as u32));
        assert!(!fits(OBJECT_BYTES_MAX + 1, 0, 0));
        assert!(!fits(0, KEY_SECTION_BYTES_MAX as u32 + 1, 0));
        assert!(!fits(0, 0, ATTRIBUTES_BYTES_MAX as u32 + 1));
    }
}
