//! Where the parts of a record stand behind its payload's first byte.
//!
//! ```text
//!  0            stripe_len   round up to 8    + 8 × pages     + key_len      + attributes_len = total
//!  ├── payload ─────┤ padding ├── digests ────────┤── tenant+key ──┤── attributes ──┤
//! ```

use crate::bounds::{
    COHORT_BYTES_MAX, KEY_BYTES_MAX, NOTE_BYTES_MAX, OBJECT_BYTES_MAX, PAGE_BYTES, PARENT_HASH_BYTES_MAX,
    PAYLOAD_ALIGN, TENANT_BYTES_MAX, UNIT_BYTES,
};
use crate::record::flags::Flags;
use crate::span::{Extent, Span};

/// Longest tenant and key section: both texts with a `u16` in front of each.
const KEY_SECTION_BYTES_MAX: usize = 2 + TENANT_BYTES_MAX + 2 + KEY_BYTES_MAX;

/// Longest attributes: every kind once, with 4 bytes in front of each, and room for kinds of later releases.
pub(super) const ATTRIBUTES_BYTES_MAX: usize = 4096;

const _: () = assert!(
    (4 + 1) + (4 + 8) + (4 + COHORT_BYTES_MAX) + (4 + PARENT_HASH_BYTES_MAX) + (4 + NOTE_BYTES_MAX)
        <= ATTRIBUTES_BYTES_MAX
);

/// Why a record cannot be laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The payload exceeds [`OBJECT_BYTES_MAX`].
    #[error("payload of {len} bytes, at most {OBJECT_BYTES_MAX} are allowed")]
    Payload {
        /// Its length.
        len: u64,
    },
    /// The tenant and key section is longer than the longest tenant and key.
    #[error("tenant and key section of {len} bytes, at most {KEY_SECTION_BYTES_MAX} are allowed")]
    KeySection {
        /// Its length.
        len: u32,
    },
    /// The attributes exceed their bound.
    #[error("attributes of {len} bytes, at most {ATTRIBUTES_BYTES_MAX} are allowed")]
    Attributes {
        /// Their length.
        len: u32,
    },
    /// The payload does not start where payloads of its size may start.
    #[error("payload at {offset}: it must start on a multiple of {align}")]
    Misaligned {
        /// Where it starts.
        offset: u64,
        /// What the offset must be a multiple of.
        align: u64,
    },
    /// The record would end beyond what 64 bits can express.
    #[error("a record at {offset} has no end")]
    Offset {
        /// Where it starts.
        offset: u64,
    },
}

/// The parts of a record, as spans counted from the payload's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    payload_len: u64,
    pages: u64,
    digests_len: u64,
    key_len: u32,
    attributes_len: u32,
}

impl RecordLayout {
    /// The layout for these lengths.
    pub fn new(
        payload_len: u64,
        key_len: u32,
        attributes_len: u32,
        flags: Flags,
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

    /// How many pages the payload has.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The payload.
    pub fn payload(&self) -> Span {
        span(0, self.payload_len)
    }

    /// The page digests, one little-endian `u64` per page.
    pub fn digests(&self) -> Span {
        span(self.payload_len.next_multiple_of(8), self.digests_len)
    }

    /// Tenant and key.
    pub fn key(&self) -> Span {
        span(self.digests().end(), self.key_len.into())
    }

    /// Attributes.
    pub fn attributes(&self) -> Span {
        span(self.key().end(), self.attributes_len.into())
    }

    /// Length of payload and trailer together.
    pub fn total_len(&self) -> u64 {
        self.attributes().end()
    }

    /// What the payload's first byte must be a multiple of.
    pub fn align(&self) -> u64 {
        if self.payload_len >= PAYLOAD_ALIGN { PAYLOAD_ALIGN } else { UNIT_BYTES }
    }

    /// Units that the record takes in a segment: at least one, even for an empty payload.
    pub fn units(&self) -> u32 {
        // 1 TiB of payload plus digests is 2³¹ units and a little.
        Extent::units_for(self.total_len().max(1)).expect("bounded by OBJECT_BYTES_MAX")
    }

    /// The bytes of a record whose payload starts at `offset`, if it may start there.
    pub fn span_from(&self, offset: u64) -> Result<Span, LayoutError> {
        if !offset.is_multiple_of(self.align()) {
            return Err(LayoutError::Misaligned { offset, align: self.align() });
        }
        Span::new(offset, self.total_len()).ok_or(LayoutError::Offset { offset })
    }
}

/// A span whose end is known to fit: all lengths here are bounded far below 2⁶⁴.
fn span(offset: u64, len: u64) -> Span {
    Span::new(offset, len).expect("bounded")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other() {
        let layout = RecordLayout::new(PAGE_BYTES + 1, 10, 7, Flags::NONE).unwrap();
        assert_eq!(layout.pages(), 2);
        assert_eq!(layout.digests(), span(PAGE_BYTES + 8, 16));
        assert_eq!(layout.key(), span(PAGE_BYTES + 24, 10));
        assert_eq!(layout.attributes(), span(PAGE_BYTES + 34, 7));
        assert_eq!(layout.total_len(), PAGE_BYTES + 41);
        assert_eq!(layout.units(), 513);
    }

    #[test]
    fn small_and_empty_payloads() {
        let empty = RecordLayout::new(0, 0, 0, Flags::NONE).unwrap();
        assert_eq!((empty.pages(), empty.total_len(), empty.units(), empty.align()), (0, 0, 1, 512));
        let page = RecordLayout::new(4096, 5, 0, Flags::NONE).unwrap();
        assert_eq!((page.align(), page.units()), (4096, 9));
        let bare = RecordLayout::new(4096, 5, 0, Flags::DIGESTLESS).unwrap();
        assert_eq!((bare.pages(), bare.digests().len()), (1, 0));
    }

    #[test]
    fn bounds_are_checked_at_their_edge() {
        let fits = |p, k, a| RecordLayout::new(p, k, a, Flags::NONE).is_ok();
        assert!(fits(OBJECT_BYTES_MAX, KEY_SECTION_BYTES_MAX as u32, ATTRIBUTES_BYTES_MAX as u32));
        assert!(!fits(OBJECT_BYTES_MAX + 1, 0, 0));
        assert!(!fits(0, KEY_SECTION_BYTES_MAX as u32 + 1, 0));
        assert!(!fits(0, 0, ATTRIBUTES_BYTES_MAX as u32 + 1));
    }
}
