//! Counters of the disk threads.
//!
//! Invariant: `loads_requested = loads_staged + loads_read + loads_missed + loads_failed`.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the start. Relaxed everywhere: the values order nothing else.
#[derive(Debug, Default)]
pub(crate) struct DiskCounters {
    pub(crate) offloaded_records: AtomicU64,
    pub(crate) offloaded_bytes: AtomicU64,
    pub(crate) offloads_refused: AtomicU64,
    pub(crate) loads_requested: AtomicU64,
    /// Of these, before a reader asked for them.
    pub(crate) loads_ahead: AtomicU64,
    /// Found in staging.
    pub(crate) loads_staged: AtomicU64,
    /// Read from the disk.
    pub(crate) loads_read: AtomicU64,
    pub(crate) loaded_bytes: AtomicU64,
    /// Not on the disk.
    pub(crate) loads_missed: AtomicU64,
    /// Corrupt, not readable, or without free staging memory.
    pub(crate) loads_failed: AtomicU64,
    pub(crate) corrupt_records: AtomicU64,
    pub(crate) read_errors: AtomicU64,
    pub(crate) write_errors: AtomicU64,
    pub(crate) evicted_records: AtomicU64,
    pub(crate) removed_records: AtomicU64,
    pub(crate) promoted_records: AtomicU64,
    pub(crate) throttled_ms: AtomicU64,
}

impl DiskCounters {
    pub(crate) fn write_failed(&self) {
        increment(&self.write_errors, 1);
    }
}

pub(crate) fn increment(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
