//! [`Trailer`]: tenant, key and attributes of a record, read back from the segment.
//!
//! The node wrote them in begin and nobody has business there since. But clients map the payload for writing, and
//! what a broken one scribbles must not be reported as somebody's key: bytes are copied first, and then the copy is
//! checked, since the original may change between a check and a look.

use std::sync::atomic::{AtomicU8, Ordering};

use moontide_types::record::{AttributesRef, Header, KeySection, trailer_crc};
use moontide_types::{Key, Tenant};

use crate::shm::segment::SegmentRegions;

/// What stands behind a record's payload, as far as it says whose and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer<'a> {
    /// Whose object it is.
    pub tenant: Tenant<'a>,
    /// The full key.
    pub key: Key<'a>,
    /// The attributes as they are stored; they can be read by
    /// [`AttributesRef::decode`](moontide_types::record::AttributesRef::decode).
    pub attributes: &'a [u8],
}

impl SegmentRegions {
    /// A record's trailer, copied into `scratch`; `None` if it is not what the header's checksum is about, or makes
    /// no sense.
    pub(crate) fn trailer<'a>(&self, header: &Header, scratch: &'a mut Vec<u8>) -> Option<Trailer<'a>> {
        let (layout, span) = self.record_span(header)?;
        let (key, attributes) = (layout.key(), layout.attributes());
        let (at, len) = (span.offset() + key.offset(), attributes.end() - key.offset());
        // SAFETY: every byte is an `AtomicU8`. Begin writes here otherwise, of a slot that is FREE; and a client that
        // breaks the protocol may write at this moment, which is why they are atomics.
        let stored = unsafe { self.payload.slice::<AtomicU8>(at, len) };
        scratch.clear();
        // Relaxed: no order is needed, what was torn fails the check.
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
