//! Limits of the wire format. Limits that do not depend on it are in [`moontide_types::limits`].

use moontide_types::limits::{
    BATCH_KEYS_MAX, KEY_BYTES_MAX, LEASE_MS_MAX, PAGE_BYTES, REPLICAS_MAX, REQUEST_BYTES_MAX,
    RESERVATION_MS_MAX, SEGMENTS_PER_NODE_MAX, STRIPES_MAX, TENANT_BYTES_MAX,
};

/// Longest packed array in bytes, and the limit for the sum of the packed arrays of one response. The rest of a
/// request is for its context and its other fields. 4,078 longest keys fit.
pub const PACKED_BYTES_MAX: usize = REQUEST_BYTES_MAX - (64 << 10);

/// Longest authentication token in bytes: a MAC of 32 bytes and the data under it.
pub const TOKEN_BYTES_MAX: usize = 64;

/// Longest timeout of a call in milliseconds: ten minutes, for operators. Every wait is bounded.
pub const TIMEOUT_MS_MAX: u32 = 600_000;

/// Longest retry delay in a response, in milliseconds.
pub const RETRY_AFTER_MS_MAX: u32 = 60_000;

/// Maximum number of handles in one response: with 4,096 entries they take less than [`REQUEST_BYTES_MAX`].
pub const HANDLES_PER_RESPONSE_MAX: usize = 131_072;

/// Maximum number of distinct configurations in one PutStart. Callers use one or two.
pub const CONFIGS_MAX: usize = 64;

/// Maximum number of chunks of a handoff: with 4,096 objects each they hold 268 million, more than a master has.
pub const HANDOFF_CHUNKS_MAX: u32 = 65_535;

/// Maximum number of tombstones in one chunk of a handoff: 1.5 MB.
pub const HANDOFF_TOMBSTONES_MAX: usize = 65_536;

/// Maximum number of segments in a handoff: 65 each of a thousand nodes, or one each of 65,536 nodes.
pub const HANDOFF_SEGMENTS_MAX: usize = 65_536;

/// Longest wait for invalidations in milliseconds: shorter than the time after which middleboxes (NAT, load
/// balancers) drop idle connections.
pub const INVALIDATIONS_WAIT_MS_MAX: u32 = 30_000;

/// Maximum number of invalidations in one response: 1 MiB of ids.
pub const INVALIDATIONS_PER_RESPONSE_MAX: usize = 65_536;

/// Longest TTL of an object in milliseconds: a hundred years, so that no sum of times overflows.
pub const TTL_MS_MAX: u64 = 100 * 366 * 86_400_000;

/// Maximum number of entries in one packed message of a node session: bounds the cost of one message at its receiver.
pub const SESSION_RECORDS_MAX: usize = BATCH_KEYS_MAX;

/// Maximum number of touch bitmaps in one heartbeat.
pub const TOUCH_BITMAPS_MAX: usize = 1024;

/// Longest touch bitmap in bytes: 524,288 slots. A node splits longer ones.
pub const TOUCH_BYTES_MAX: usize = 65_536;

/// Maximum number of records in one heartbeat that other hosts read much.
pub const REMOTE_READS_MAX: usize = 1024;

/// Maximum number of addresses of one node: engines times rails.
pub const ADDRESSES_MAX: usize = 32;

/// Maximum number of nodes in one response. [`REQUEST_BYTES_MAX`] leaves 4 KiB for each.
pub const NODES_MAX: usize = 4096;

/// Longest name of a transfer engine in bytes.
pub const ENGINE_BYTES_MAX: usize = 16;

/// Longest worker address in an AttachReply in bytes: engines write one entry per device and transport into it.
pub const ATTACH_BYTES_MAX: usize = 4096;

/// Maximum number of regions in one AttachReply: one per segment. Local clients map no more either.
pub const ATTACH_REGIONS_MAX: usize = BATCH_KEYS_MAX;

/// Longest remote key of a region in bytes: engines write tens of bytes per device into it. 4,096 such keys are
/// half of [`REQUEST_BYTES_MAX`]; keys of twice this length would leave no space for the other fields.
pub const ATTACH_KEY_BYTES_MAX: usize = 2048;

/// Longest network address in bytes: a DNS name of at most 253 bytes, and a port.
pub const ADDRESS_BYTES_MAX: usize = 260;

/// Longest topology label (host, rack, zone) in bytes, as in Kubernetes.
pub const LABEL_BYTES_MAX: usize = 64;

/// Longest regular expression in bytes: bounds the cost of its compilation.
pub const PATTERN_BYTES_MAX: usize = 1024;

/// Longest cursor of a listing in bytes: a tenant, a key and 64 bytes of state.
pub const CURSOR_BYTES_MAX: usize = 64 + TENANT_BYTES_MAX + KEY_BYTES_MAX;

/// Maximum number of operations in one data-plane frame.
pub const OPS_PER_FRAME_MAX: usize = 1024;

/// Longest payload of one data-plane frame in bytes: 256 pages. At 1 GB/s it occupies a connection for 64 ms, so a
/// following Ping or Cancel waits no longer than that.
pub const FRAME_PAYLOAD_BYTES_MAX: u64 = 256 * PAGE_BYTES;

/// Length of the parts in which a node reads a record from its disk: four pages. An operation on the disk is within one
/// part, so that a node needs little memory for a record of any length.
pub const DISK_PART_BYTES: u64 = 4 * PAGE_BYTES;

/// Longest body of a Hello in bytes. This release writes 96 and ignores the bytes after them.
pub const HELLO_BYTES_MAX: usize = 4096;

/// Longest text in an error frame, in bytes.
pub const ERROR_TEXT_BYTES_MAX: usize = 1024;

/// Longest validity in an [`ObjectEntry`](crate::ObjectEntry) in milliseconds: of a lease or a reservation.
pub const VALID_MS_MAX: u32 =
    if LEASE_MS_MAX > RESERVATION_MS_MAX { LEASE_MS_MAX } else { RESERVATION_MS_MAX };

const _: () = assert!(HANDLES_PER_RESPONSE_MAX * 96 + BATCH_KEYS_MAX * 64 < PACKED_BYTES_MAX);
const _: () = assert!(HANDLES_PER_RESPONSE_MAX >= REPLICAS_MAX * STRIPES_MAX, "one object always fits");
/// Besides its key a region has four tags, two lengths below 16,384, a segment below 65,536 and a generation.
const ATTACHED_REGION_BYTES_MAX: usize = 4 + 2 * 2 + 3 + 10 + ATTACH_KEY_BYTES_MAX;
const _: () = assert!(
    3 + ATTACH_BYTES_MAX + ATTACH_REGIONS_MAX * ATTACHED_REGION_BYTES_MAX <= REQUEST_BYTES_MAX,
    "the largest AttachReply fits: 8,478,723 bytes"
);
const _: () =
    assert!(ATTACH_BYTES_MAX < 1 << 14 && ATTACHED_REGION_BYTES_MAX < 1 << 14, "lengths take two bytes");
const _: () = assert!(SEGMENTS_PER_NODE_MAX <= 1 << 21, "a segment id takes three bytes");
const _: () = assert!(REPLICAS_MAX * STRIPES_MAX <= u16::MAX as usize);
