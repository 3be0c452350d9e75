//! Limits that several crates use, each with its reason.
//!
//! Code checks a limit before it allocates memory. Relations between limits are asserted at compile time, so a
//! change of one limit cannot silently break another.

/// Longest key in bytes. Inference engines use hashes with a prefix (≤ 300 B observed); 4 KiB leaves a reserve,
/// and almost a full batch of longest keys fits into a request: 4,078 of 4,096.
pub const KEY_BYTES_MAX: usize = 4096;

/// Longest tenant name in bytes: it is repeated in every record.
pub const TENANT_BYTES_MAX: usize = 64;

/// Longest cohort label in bytes.
pub const COHORT_BYTES_MAX: usize = 64;

/// Longest parent hash in bytes: a SHA-256 chained block hash.
pub const PARENT_HASH_BYTES_MAX: usize = 32;

/// Longest user data of an object in bytes: the token ids of one 512-token block as u32, with a header.
pub const USER_DATA_BYTES_MAX: usize = 2560;

/// Largest object in bytes (1 TiB).
pub const OBJECT_BYTES_MAX: u64 = 1 << 40;

/// Maximum number of keys in one batch call.
pub const BATCH_KEYS_MAX: usize = 4096;

/// Largest request in bytes, keys and arguments together.
pub const REQUEST_BYTES_MAX: usize = 16 << 20;

/// Maximum number of replicas of one object.
pub const REPLICAS_MAX: usize = 8;

/// Maximum number of stripes of one replica.
pub const STRIPES_MAX: usize = 1024;

/// Maximum number of groups in a cluster: 64 masters with 64 groups each.
pub const GROUPS_MAX: u16 = 4096;

/// Default number of groups of a new cluster with several masters. A single master has one group: groups evict
/// independently, so that each further group costs hits, and they are of use only to be divided among masters. One master
/// is fast enough for most clusters, and the others are there to replace it.
pub const GROUPS_DEFAULT: u16 = 4;

/// Maximum number of places that a put prefers: one for each replica of an object with the most replicas.
pub const PREFERRED_PLACES_MAX: usize = REPLICAS_MAX;

/// Size of a unit of memory in bytes: extents are counted in units, so that a `u32` addresses 2 TiB.
pub const UNIT_BYTES: u64 = 512;

/// Alignment in bytes of payloads of at least this size, for O_DIRECT and for page-wise mapping.
pub const PAYLOAD_ALIGN: u64 = 4096;

/// Size in bytes of a page: the part of a payload under one digest, and the unit of transfer.
pub const PAGE_BYTES: u64 = 256 << 10;

/// Number of digests under one node of the digest tree. 512 × 8 B = one 4 KiB block of digests for 128 MiB of
/// payload.
pub const DIGEST_FAN_OUT: usize = 512;

/// Maximum number of segments of one node, including its disk: the local index has 16 bits for them.
pub const SEGMENTS_PER_NODE_MAX: u32 = 1 << 16;

/// Maximum number of slots of one segment: a ledger cell stores slot + 1 in 32 bits.
pub const SLOTS_PER_SEGMENT_MAX: u32 = u32::MAX - 1;

/// Largest segment in units: whole pages whose end still fits in a `u32`.
pub const SEGMENT_UNITS_MAX: u32 = u32::MAX - 7;

/// Number of bits of the term in an epoch: a cluster can assign 4 million terms in its life.
pub const TERM_BITS: u32 = 22;

/// Number of bits of the sequence in an epoch: 10¹² puts per term.
pub const SEQUENCE_BITS: u32 = 40;

/// Longest time in milliseconds from PutStart to PutEnd.
pub const RESERVATION_MS_MAX: u32 = 30_000;

/// Time in milliseconds after which local processes stop trusting a node without a heartbeat: twenty heartbeat
/// intervals. They detect a stopped node long before its session at the master ends and the master discards its
/// objects.
pub const SHM_HEARTBEAT_TIMEOUT_MS: u32 = 2_000;

/// Longest lease of a one-sided reader in milliseconds.
pub const LEASE_MS_MAX: u32 = 30_000;

/// Default lease of a one-sided reader in milliseconds.
pub const LEASE_MS_DEFAULT: u32 = 5_000;

const _: () = assert!(BATCH_KEYS_MAX * KEY_BYTES_MAX <= REQUEST_BYTES_MAX);
const _: () = assert!(TERM_BITS + SEQUENCE_BITS + 2 == u64::BITS);
const _: () = assert!(PAGE_BYTES.is_multiple_of(PAYLOAD_ALIGN) && PAYLOAD_ALIGN.is_multiple_of(UNIT_BYTES));
const _: () = assert!(SEGMENT_UNITS_MAX as u64 * UNIT_BYTES > OBJECT_BYTES_MAX);
const _: () = assert!(DIGEST_FAN_OUT.pow(3) as u64 * PAGE_BYTES >= OBJECT_BYTES_MAX);
const _: () = assert!(LEASE_MS_DEFAULT <= LEASE_MS_MAX);
