//! Decoding rejects a message with too many elements before it allocates memory for them, and checks attributes
//! without a copy.
//!
//! The only test of its binary: the counting allocator is global to the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use moontide_proto::convert::{self, AttributeSection, Bounded, ConvertError};
use moontide_proto::v1;
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::record::{Attributes, ParentHash};
use prost::bytes::Bytes;

/// Total of allocated bytes since the start.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Encodes `inner` as a field with this tag.
fn nested(tag: u8, inner: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag << 3 | 2];
    prost::encoding::encode_varint(inner.len() as u64, &mut bytes);
    bytes.extend_from_slice(inner);
    bytes
}

/// Returns almost 16 MiB of empty elements; 32 bytes are left for the enclosing fields.
fn empty_elements(tag: u8) -> Vec<u8> {
    [tag << 3 | 2, 0].repeat(REQUEST_BYTES_MAX / 2 - 16)
}

fn refused_unallocated<M: Bounded>(field: &str, bytes: Vec<u8>) {
    let bytes = Bytes::from(bytes);
    let before = ALLOCATED.load(Ordering::Relaxed);
    let result = convert::decode::<M>(bytes);
    let allocated = ALLOCATED.load(Ordering::Relaxed) - before;
    match result {
        Err(ConvertError::TooLarge { field: found, .. }) => assert_eq!(found, field),
        other => panic!("{field}: {:?}", other.map(|_| "decoded")),
    }
    assert_eq!(allocated, 0, "{field}: the rejection allocated memory");
}

/// A single test, so that no other code allocates at the same time.
#[test]
fn limits_are_checked_before_allocation() {
    attributes_are_checked_where_they_stand();
    too_many_elements_are_refused_before_they_are_allocated();
}

fn attributes_are_checked_where_they_stand() {
    let attributes = Attributes {
        cohort: Some((*b"session-7").into()),
        parent: ParentHash::new(&[9; 32]),
        user_data: Some((*b"tokens").into()),
        ..Attributes::default()
    };
    let mut bytes = vec![];
    attributes.encode(&mut bytes);
    let before = ALLOCATED.load(Ordering::Relaxed);
    let section = AttributeSection::new(&bytes).expect("just encoded");
    let read = section.decode_ref();
    assert_eq!(ALLOCATED.load(Ordering::Relaxed), before, "the check allocated memory");
    assert_eq!(read, attributes.borrowed());
    assert_eq!(section.decode(), attributes);
}

fn too_many_elements_are_refused_before_they_are_allocated() {
    refused_unallocated::<v1::PutStartRequest>("configs", empty_elements(3));
    let places = nested(3, &empty_elements(4));
    refused_unallocated::<v1::PutStartRequest>("config.preferred", places);
    refused_unallocated::<v1::PutStartResponse>("expires_unix_ms", nested(4, &vec![0; 1 << 24][64..]));
    refused_unallocated::<v1::PutEndRequest>("stripe_roots", nested(3, &vec![0; 1 << 24][64..]));
    refused_unallocated::<v1::GroupMap>("map.masters", empty_elements(3));
    let map = nested(1, &nested(6, &empty_elements(3)));
    refused_unallocated::<v1::OutcomesResponse>("map.masters", map.clone());
    refused_unallocated::<v1::GetJobResponse>("map.masters", map);
    let groups = nested(3, &nested(4, &vec![0; 1 << 24][64..]));
    refused_unallocated::<v1::GroupMap>("map.masters.groups", groups);
    // Protobuf merges a message field that occurs twice: small maps would add up to a large one.
    let twice = nested(1, &nested(6, &[])).repeat(2);
    refused_unallocated::<v1::ExistResponse>("context", twice);
    refused_unallocated::<v1::MountSegmentsRequest>("segments", empty_elements(2));
    refused_unallocated::<v1::MountSegmentsResponse>("results", empty_elements(2));
    refused_unallocated::<v1::UnmountSegmentsRequest>("segments", nested(2, &vec![0; 1 << 24][64..]));
    refused_unallocated::<v1::UnmountSegmentsRequest>("segments", [2 << 3, 0].repeat(1 << 22));
    refused_unallocated::<v1::OpenSessionRequest>("addresses", empty_elements(4));
    refused_unallocated::<v1::AttachReply>("regions", empty_elements(2));
    refused_unallocated::<v1::Heartbeat>("touched", empty_elements(3));
    refused_unallocated::<v1::NodeMessage>("touched", nested(4, &empty_elements(3)));
    refused_unallocated::<v1::NodeMessage>("segments", nested(4, &empty_elements(4)));
    refused_unallocated::<v1::NodeMessage>("tenants", nested(6, &empty_elements(8)));
    refused_unallocated::<v1::NodeMessage>("tenants", nested(8, &empty_elements(3)));
    refused_unallocated::<v1::QueryKeysResponse>("details", empty_elements(3));
    refused_unallocated::<v1::GetTenantsResponse>("tenants", empty_elements(2));
    refused_unallocated::<v1::ListSegmentsResponse>("segments", empty_elements(2));
    refused_unallocated::<v1::PollInvalidationsRequest>("cursors", empty_elements(2));
    refused_unallocated::<v1::PollInvalidationsResponse>("groups", empty_elements(2));
    refused_unallocated::<v1::GetNodesResponse>("nodes", empty_elements(2));
    refused_unallocated::<v1::GetNodesResponse>("addresses", nested(2, &empty_elements(3)));
    refused_unallocated::<v1::ExistRequest>("message", vec![0; REQUEST_BYTES_MAX + 1]);
}
