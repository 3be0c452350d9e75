//! [`Trailer`]: tenant, key and attributes of a record, read back from the segment.
//!
//! The node writes the trailer at begin, and no process may write it afterwards. But clients map the payload
//! writable, and bytes that a faulty client writes must not be reported as a key. So the bytes are copied first and
//! the copy is checked, since the original may change between a check and a read.

use std::sync::atomic::{AtomicU8, Ordering};

use moontide_types::record::{AttributesRef, Header, KeySection, trailer_crc};
use moontide_types::{Key, Tenant};

use crate::shm::segment::SegmentRegions;

/// Tenant, key and attributes, which follow a record's payload and digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer<'a> {
    /// Tenant of the object.
    pub tenant: Tenant<'a>,
    /// Full key of the object.
    pub key: Key<'a>,
    /// Encoded attributes, for [`AttributesRef::decode`](moontide_types::record::AttributesRef::decode).
    pub attributes: &'a [u8],
}

impl SegmentRegions {
    /// Copies a record's trailer into `scratch` and decodes it. Returns `None` if it does not match the header's
    /// checksum or is invalid.
    pub(crate) fn trailer<'a>(&self, header: &Header, scratch: &'a mut Vec<u8>) -> Option<Trailer<'a>> {
        let (layout, span) = self.record_span(header)?;
        let (key, attributes) = (layout.key(), layout.attributes());
        let (at, len) = (span.offset() + key.offset(), attributes.end() - key.offset());
        // SAFETY: every byte is an `AtomicU8`. Otherwise only begin writes here, in a slot that is FREE; and a client
        // that
        // breaks the protocol may write at this moment, which is why they are atomics.
        let stored = unsafe { self.payload.slice::<AtomicU8>(at, len) };
        scratch.clear();
        // Relaxed: no order is needed, a torn read fails the check.
        scratch.extend(stored.iter().map(|byte| byte.load(Ordering::Relaxed)));
        let (section, attributes) = scratch.split_at(key.len() as usize);
        if trailer_crc(section, attributes) != header.trailer_crc {
            return None;
        }
        let KeySection { tenant, key } = KeySection::decode(section).ok()?;
        AttributesRef::decode(attributes).ok()?;
        Some(Trailer { tenant, key, attributes })
    }
}
