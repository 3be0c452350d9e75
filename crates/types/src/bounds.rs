//! Every limit that more than one crate knows, in one place, each with its reason.
//!
//! A bound is checked before anything is allocated. Relations between bounds are asserted at compile time,
//! so that changing one cannot silently break another.

/// Longest key in bytes. Engines use hashes with a prefix (≤ 300 B seen); 4 KiB leaves room, and
/// almost a full batch of longest keys fits into a request: 4,078 of 4,096.
pub const KEY_BYTES_MAX: usize = 4096;

/// Longest tenant name in bytes: it is repeated in every record.
pub const TENANT_BYTES_MAX: usize = 64;

/// Longest cohort label in bytes.
pub const COHORT_BYTES_MAX: usize = 64;

/// Longest parent hash in bytes: a SHA-256 chained block hash.
pub const PARENT_HASH_BYTES_MAX: usize = 32;

/// Longest opaque note in bytes: the token ids of one 512-token block as u32, with a header.
pub const NOTE_BYTES_MAX: usize = 2560;

/// Largest object in bytes (1 TiB).
pub const OBJECT_BYTES_MAX: u64 = 1 << 40;

/// Most keys in one batch call.
pub const BATCH_KEYS_MAX: usize = 4096;

/// Largest request in bytes, keys and arguments together.
pub const REQUEST_BYTES_MAX: usize = 16 << 20;

/// Most replicas of one object.
pub const REPLICAS_MAX: usize = 8;

/// Most stripes of one replica.
pub const STRIPES_MAX: usize = 1024;

/// Most groups in a cluster: 64 masters with 64 groups each.
pub const GROUPS_MAX: u16 = 4096;

/// Groups of a new cluster unless told otherwise.
pub const GROUPS_DEFAULT: u16 = 16;

/// The grain of space in memory: extents are counted in units of this size, so that a `u32` reaches 2 TiB.
pub const UNIT_BYTES: u64 = 512;

/// Payloads of at least this size start on a multiple of it, for O_DIRECT and for page-wise mapping.
pub const PAYLOAD_ALIGN: u64 = 4096;

/// The piece of payload under one digest, and the unit of transfer.
pub const PAGE_BYTES: u64 = 256 << 10;

/// Digests under one node of the digest tree. 512 × 8 B = one 4 KiB block of digests for 128 MiB of payload.
pub const DIGEST_FAN_OUT: usize = 512;

/// Most segments of one node, its disk included: the local index has 16 bits for them.
pub const SEGMENTS_PER_NODE_MAX: u32 = 1 << 16;

/// Most slots of one segment: a ledger cell stores slot + 1 in 32 bits.
pub const SLOTS_PER_SEGMENT_MAX: u32 = u32::MAX - 1;

/// Largest segment in units: whole pages whose end still fits in a `u32`.
pub const SEGMENT_UNITS_MAX: u32 = u32::MAX - 7;

/// Bits of an epoch taken by its term; the cluster may elect 4 million masters in its life.
pub const TERM_BITS: u32 = 22;

/// Bits of an epoch taken by its sequence: 10¹² puts per term.
pub const SEQUENCE_BITS: u32 = 40;

/// Longest time a reservation may stay unfinished.
pub const RESERVATION_MS_MAX: u32 = 30_000;

/// How long processes of a host believe a node without a beat of it: twenty beats. A node that is stopped is noticed long
/// before its session at the master ends and its objects are written off.
pub const LOCAL_STALE_MS: u32 = 2_000;

/// Longest lease a one-sided reader may be granted.
pub const LEASE_MS_MAX: u32 = 30_000;

/// Lease of a one-sided reader unless it asks otherwise.
pub const LEASE_MS_DEFAULT: u32 = 5_000;

const _: () = assert!(BATCH_KEYS_MAX * KEY_BYTES_MAX <= REQUEST_BYTES_MAX);
const _: () = assert!(TERM_BITS + SEQUENCE_BITS + 2 == u64::BITS);
const _: () = assert!(PAGE_BYTES.is_multiple_of(PAYLOAD_ALIGN) && PAYLOAD_ALIGN.is_multiple_of(UNIT_BYTES));
const _: () = assert!(SEGMENT_UNITS_MAX as u64 * UNIT_BYTES > OBJECT_BYTES_MAX);
const _: () = assert!(DIGEST_FAN_OUT.pow(3) as u64 * PAGE_BYTES >= OBJECT_BYTES_MAX);
const _: () = assert!(LEASE_MS_DEFAULT <= LEASE_MS_MAX);
