//! [`GroupStats`]: counters of a group.

use super::LookupCounts;

/// Counters since the start of the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Lookups and existence checks of keys.
    pub lookups: LookupCounts,
    /// Reservations made.
    pub puts_started: u64,
    /// Objects completed.
    pub puts_completed: u64,
    /// Reservations that timed out.
    pub puts_expired: u64,
    /// Puts refused for lack of free space.
    pub puts_no_space: u64,
    /// Objects evicted.
    pub evicted_objects: u64,
    /// Bytes of evicted objects, all replicas together.
    pub evicted_bytes: u64,
    /// Objects whose time to live ended.
    pub expired_objects: u64,
    /// Objects removed by a call or a job.
    pub removed_objects: u64,
    /// Objects lost with the last node that held them.
    pub lost_objects: u64,
    /// Objects for which offload commands were sent.
    pub offloads_started: u64,
    /// Objects that are on disk because of an offload. The others were refused, timed out, or were removed in the
    /// meantime.
    pub offloaded_objects: u64,
    /// Objects that are not written to a disk after their put, although their node has one: the queue was full, or the disk
    /// did not accept them. With [`OffloadTrigger::Put`](super::OffloadTrigger::Put) only.
    pub write_backs_skipped: u64,
    /// Objects whose memory copy was dropped and that are read from disk since.
    pub demoted_objects: u64,
    /// Objects evicted without an offload, because they had not been read.
    pub offloads_not_admitted: u64,
    /// Objects loaded from disk into memory.
    pub promoted_objects: u64,
    /// Records that nodes were commanded to copy from another location.
    pub copies_started: u64,
    /// Records that were copied, and became locations of their objects.
    pub copied_records: u64,
    /// Bytes of these records.
    pub copied_bytes: u64,
    /// Copies that nodes refused.
    pub copies_failed: u64,
    /// Replicas of objects that were released because they were not read, and the writer had not asked for them.
    pub copies_released: u64,
    /// Objects that nodes found on their disks after a start.
    pub recovered_objects: u64,
    /// Records evicted from a full disk.
    pub disk_evicted: u64,
    /// Extents that nodes have reported as free after a drain.
    pub reclaimed: u64,
    /// Commands that nodes refused.
    pub commands_refused: u64,
    /// Reported records.
    pub reported: u64,
    /// Reported records that were refused, superseded or already removed.
    pub reported_killed: u64,
}
