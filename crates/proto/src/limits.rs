//! Bounds that only the wire has. Everything else is bounded by [`moontide_types::bounds`].

use moontide_types::bounds::{
    BATCH_KEYS_MAX, KEY_BYTES_MAX, LEASE_MS_MAX, PAGE_BYTES, REPLICAS_MAX, REQUEST_BYTES_MAX,
    RESERVATION_MS_MAX, SEGMENTS_PER_NODE_MAX, STRIPES_MAX, TENANT_BYTES_MAX,
};

/// Longest packed array in bytes, and most that the packed arrays of one answer may have together: what is
/// left of a request is for its context and the fields beside them. 4,078 longest keys fit.
pub const PACKED_BYTES_MAX: usize = REQUEST_BYTES_MAX - (64 << 10);

/// Longest proof of identity in bytes: a MAC of 32 bytes with what it is about.
pub const TOKEN_BYTES_MAX: usize = 64;

/// Longest time a caller may be willing to wait: ten minutes, for operators. Every wait has an end.
pub const DEADLINE_MS_MAX: u32 = 600_000;

/// Longest time after which a caller may be told to come again.
pub const RETRY_AFTER_MS_MAX: u32 = 60_000;

/// Most handles in one answer: with 4,096 entries they stay below [`REQUEST_BYTES_MAX`].
pub const HANDLES_PER_ANSWER_MAX: usize = 131_072;

/// Most distinct configurations in one PutStart. Callers have one or two.
pub const CONFIGS_MAX: usize = 64;

/// Most parts of a group's bequest: with 4,096 objects each they are 268 million, more than a master has.
pub const BEQUEST_PARTS_MAX: u32 = 65_535;

/// Most tombstones in one part of a bequest: 1.5 MB of them.
pub const BEQUEST_TOMBSTONES_MAX: usize = 65_536;

/// Most segments in a bequest: of a thousand nodes 65 each, or of 65,536 nodes one.
pub const BEQUEST_SEGMENTS_MAX: usize = 65_536;

/// Longest time for which a master may be asked to wait for departures: shorter than what lies between forget about
/// connections on which nothing moves.
pub const DEPARTURES_WAIT_MS_MAX: u32 = 30_000;

/// Most departures in one answer: 1 MiB of ids.
pub const DEPARTURES_PER_ANSWER_MAX: usize = 65_536;

/// Longest time to live: a hundred years, so that no sum of times overflows.
pub const TTL_MS_MAX: u64 = 100 * 366 * 86_400_000;

/// Most entries in one packed message of a node session: bounds what one message costs its receiver.
pub const SESSION_RECORDS_MAX: usize = BATCH_KEYS_MAX;

/// Most touch bitmaps in one heartbeat.
pub const TOUCH_BITMAPS_MAX: usize = 1024;

/// Longest touch bitmap in bytes: 524,288 slots. Longer ones are cut into several.
pub const TOUCH_BYTES_MAX: usize = 65_536;

/// Most addresses of one node: engines times rails.
pub const ADDRESSES_MAX: usize = 32;

/// Most nodes in one answer. Together they stay below [`REQUEST_BYTES_MAX`], which leaves 4 KiB for each.
pub const NODES_MAX: usize = 4096;

/// Longest name of a transfer engine in bytes.
pub const ENGINE_BYTES_MAX: usize = 16;

/// Longest address in an AttachReply in bytes: engines write one entry per device and transport into it.
pub const ATTACH_BYTES_MAX: usize = 4096;

/// Most regions in one AttachReply: one per segment, and a client on the node's own host maps no more either.
pub const ATTACH_REGIONS_MAX: usize = BATCH_KEYS_MAX;

/// Longest key of a region in bytes: engines write tens of bytes per device into it. 4,096 such keys are half of
/// [`REQUEST_BYTES_MAX`]; twice as long, they would leave nothing for what stands around them.
pub const ATTACH_KEY_BYTES_MAX: usize = 2048;

/// Longest address in bytes: a DNS name is at most 253, and a port.
pub const ADDRESS_BYTES_MAX: usize = 260;

/// Longest topology label in bytes, as in Kubernetes.
pub const LABEL_BYTES_MAX: usize = 64;

/// Longest regular expression in bytes: bounds what compiling it costs.
pub const PATTERN_BYTES_MAX: usize = 1024;

/// Longest cursor of a listing in bytes: a tenant, a key and a little state.
pub const CURSOR_BYTES_MAX: usize = 64 + TENANT_BYTES_MAX + KEY_BYTES_MAX;

/// Most operations in one data-plane frame.
pub const OPS_PER_FRAME_MAX: usize = 1024;

/// Most raw bytes in one data-plane frame: 256 pages. At 1 GB/s they occupy a connection for 64 ms, so that a
/// ping or a cancel behind them waits no longer.
pub const FRAME_PAYLOAD_BYTES_MAX: u64 = 256 * PAGE_BYTES;

/// Longest body of a Hello in bytes. This release writes 96 and ignores what follows them.
pub const HELLO_BYTES_MAX: usize = 4096;

/// Longest text in an error frame, in bytes.
pub const ERROR_TEXT_BYTES_MAX: usize = 1024;

/// Longest promise in an [`ObjectEntry`](crate::ObjectEntry): a lease or a reservation.
pub const WINDOW_MS_MAX: u32 =
    if LEASE_MS_MAX > RESERVATION_MS_MAX { LEASE_MS_MAX } else { RESERVATION_MS_MAX };

const _: () = assert!(HANDLES_PER_ANSWER_MAX * 96 + BATCH_KEYS_MAX * 64 < PACKED_BYTES_MAX);
const _: () = assert!(HANDLES_PER_ANSWER_MAX >= REPLICAS_MAX * STRIPES_MAX, "one object always fits");
/// Beside its key a region has four tags, two lengths below 16,384, a segment below 65,536 and a generation.
const ATTACHED_REGION_BYTES_MAX: usize = 4 + 2 * 2 + 3 + 10 + ATTACH_KEY_BYTES_MAX;
const _: () = assert!(
    3 + ATTACH_BYTES_MAX + ATTACH_REGIONS_MAX * ATTACHED_REGION_BYTES_MAX <= REQUEST_BYTES_MAX,
    "the fullest AttachReply can be sent: 8,478,723 bytes"
);
const _: () =
    assert!(ATTACH_BYTES_MAX < 1 << 14 && ATTACHED_REGION_BYTES_MAX < 1 << 14, "lengths of two bytes");
const _: () = assert!(SEGMENTS_PER_NODE_MAX <= 1 << 21, "a segment of three bytes");
const _: () = assert!(REPLICAS_MAX * STRIPES_MAX <= u16::MAX as usize);
