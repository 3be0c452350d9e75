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
        self.copy_payload(span.offset() + key.offset(), attributes.end() - key.offset(), scratch);
        let (section, attributes) = scratch.split_at(key.len() as usize);
        if trailer_crc(section, attributes) != header.trailer_crc {
            return None;
        }
        let KeySection { tenant, key } = KeySection::decode(section).ok()?;
        AttributesRef::decode(attributes).ok()?;
        Some(Trailer { tenant, key, attributes })
    }

    /// Returns whether a record belongs to this tenant. The caller keeps its slot from being reused, or detects that.
    pub(crate) fn is_of_tenant(&self, header: &Header, tenant: &str) -> bool {
        let Some((layout, span)) = self.record_span(header) else { return false };
        let (at, len) = (span.offset() + layout.key().offset(), KeySection::TENANT_AT + tenant.len());
        if layout.key().len() < len as u64 {
            return false;
        }
        let mut stored = vec![0; len];
        match self.device() {
            None if self.has_bytes() => self.copy_payload(at, len as u64, &mut stored),
            None => return false,
            // A device that does not respond has no records that can be read.
            Some(device) if device.read(at, &mut stored).is_err() => return false,
            Some(_) => {}
        }
        KeySection::starts_with_tenant(&stored, tenant)
    }

    /// Copies bytes of the payload that another process may write at this moment.
    fn copy_payload(&self, at: u64, len: u64, out: &mut Vec<u8>) {
        // SAFETY: every byte is an `AtomicU8`. Otherwise only begin writes here, in a slot that is FREE; and a client
        // that breaks the protocol may write at this moment, which is why they are atomics.
        let stored = unsafe { self.payload.slice::<AtomicU8>(at, len) };
        out.clear();
        // Relaxed: no order is needed, a torn read fails the check or compares as another tenant.
        out.extend(stored.iter().map(|byte| byte.load(Ordering::Relaxed)));
    }
}
