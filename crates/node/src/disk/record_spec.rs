//! Description of a part of a record from disk, for the heap.

use moontide_heap::RecordSpec;
use moontide_types::record::RecordFlags;

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
