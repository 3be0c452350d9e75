//! [`LaneReadCounters`]: counters of local reads of one thread of a client, in the client's ledger, where the node
//! sums them up.
//!
//! A local read involves no call, so only the reader can count it. A cache line that all readers write would cost
//! more than the read itself; so every lane has counters of its own, written by the one thread that holds the lane.

use moontide_rt::sync::{AtomicU64, Ordering};

/// Counters of one lane: two cache lines, because adjacent lines are fetched in pairs.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct LaneReadCounters {
    hits: AtomicU64,
    misses: AtomicU64,
    bytes: AtomicU64,
    _reserved: [u64; 13],
}

const _: () = assert!(size_of::<LaneReadCounters>() == 128);

/// Local reads by id. A read while the index is closed, or above the pin budget, counts as neither hit nor miss: the
/// client reads the object in another way and counts it there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalReadStats {
    /// Objects found.
    pub hits: u64,
    /// Objects not found.
    pub misses: u64,
    /// Bytes of the objects found.
    pub bytes: u64,
}

impl LocalReadStats {
    /// Adds `other`. Wraps around: an overflow comes only from a client that wrote invalid counters.
    pub fn add(&mut self, other: LocalReadStats) {
        self.hits = self.hits.wrapping_add(other.hits);
        self.misses = self.misses.wrapping_add(other.misses);
        self.bytes = self.bytes.wrapping_add(other.bytes);
    }
}

impl LaneReadCounters {
    /// Counts a read of an object of this length by the lane's thread.
    #[inline]
    pub(crate) fn hit(&self, bytes: u64) {
        bump(&self.hits, 1);
        bump(&self.bytes, bytes);
    }

    /// Counts a lookup without a result by the lane's thread.
    #[inline]
    pub(crate) fn miss(&self) {
        bump(&self.misses, 1);
    }

    /// Returns the current values.
    pub(crate) fn load(&self) -> LocalReadStats {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        LocalReadStats { hits: load(&self.hits), misses: load(&self.misses), bytes: load(&self.bytes) }
    }
}

/// Adds `by` without a read-modify-write: only one thread writes, and the next holder of the lane gets it through a
/// swap. Relaxed: the counters order nothing.
#[inline]
fn bump(count: &AtomicU64, by: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}
