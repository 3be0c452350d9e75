//! Description of a record from disk, or of a part of one, for the heap.

use moontide_heap::RecordSpec;
use moontide_types::record::{Attributes, Header, KeySection, RecordFlags};

/// Returns the description of a record for the heap.
pub(super) fn record_spec<'a>(
    header: &Header,
    key: KeySection<'a>,
    attributes: &'a Attributes,
) -> RecordSpec<'a> {
    RecordSpec {
        id: header.id,
        flags: header.flags,
        object_len: header.object_len,
        stripe_index: header.stripe_index,
        stripe_count: header.stripe_count,
        stripe_offset: header.stripe_offset,
        stripe_len: header.stripe_len,
        key,
        attributes,
        id_key: header.id_key,
        tenant_generation: header.tenant_generation,
    }
}

/// Returns the description of a part of a record: a record of `len` bytes without digests.
pub(super) fn part_spec(record: RecordSpec<'_>, len: u64) -> RecordSpec<'_> {
    RecordSpec {
        flags: RecordFlags::DIGESTLESS,
        // The only stripe is the whole object.
        object_len: if record.stripe_count == 1 { len } else { record.object_len },
        stripe_offset: 0,
        stripe_len: len,
        ..record
    }
}
