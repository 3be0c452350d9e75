//! Description of a record from disk for the heap.

use moontide_heap::RecordSpec;
use moontide_types::record::{Attributes, Header, KeySection};

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
