//! Comparison of `docs/formats.md` with the constants of this crate.

mod page;

use moontide_types::limits::*;
use moontide_types::record::{FIELDS, Field};

#[test]
fn record_header_matches_formats_doc() {
    page::assert_fields("Record header", FIELDS);
}

#[test]
fn digest_seed_in_formats_doc_covers_48_bytes() {
    // The golden vectors pin the meaning of the bytes; this test checks that the table has no gap.
    let sizes = [
        (0, 16, "id"),
        (16, 8, "version"),
        (24, 4, "stripe"),
        (28, 4, "level"),
        (32, 8, "index"),
        (40, 8, "length"),
    ];
    page::assert_fields("Digests", &sizes.map(|(offset, bytes, name)| Field { offset, bytes, name }));
}

#[test]
fn limits_match_formats_doc() {
    let limits: [(&str, u64); 19] = [
        ("KEY_BYTES_MAX", KEY_BYTES_MAX as u64),
        ("TENANT_BYTES_MAX", TENANT_BYTES_MAX as u64),
        ("COHORT_BYTES_MAX", COHORT_BYTES_MAX as u64),
        ("PARENT_HASH_BYTES_MAX", PARENT_HASH_BYTES_MAX as u64),
        ("USER_DATA_BYTES_MAX", USER_DATA_BYTES_MAX as u64),
        ("OBJECT_BYTES_MAX", OBJECT_BYTES_MAX),
        ("BATCH_KEYS_MAX", BATCH_KEYS_MAX as u64),
        ("REQUEST_BYTES_MAX", REQUEST_BYTES_MAX as u64),
        ("REPLICAS_MAX", REPLICAS_MAX as u64),
        ("PREFERRED_PLACES_MAX", PREFERRED_PLACES_MAX as u64),
        ("STRIPES_MAX", STRIPES_MAX as u64),
        ("GROUPS_MAX", GROUPS_MAX.into()),
        ("UNIT_BYTES", UNIT_BYTES),
        ("PAYLOAD_ALIGN", PAYLOAD_ALIGN),
        ("PAGE_BYTES", PAGE_BYTES),
        ("DIGEST_FAN_OUT", DIGEST_FAN_OUT as u64),
        ("SEGMENTS_PER_NODE_MAX", SEGMENTS_PER_NODE_MAX.into()),
        ("RESERVATION_MS_MAX", RESERVATION_MS_MAX.into()),
        ("LEASE_MS_MAX", LEASE_MS_MAX.into()),
    ];
    let documented: Vec<(&str, u64)> =
        page::table("Bounds").iter().map(|row| (row[0], row[1].replace(',', "").parse().unwrap())).collect();
    assert_eq!(documented, limits);
}
