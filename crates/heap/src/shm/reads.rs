//! [`ReadCounts`]: what one thread of a client has read in place, in the client's ledger, where the node adds it up.
//!
//! A read in place is nobody's call, so nobody but the reader can count it. A line that all readers write would cost
//! more than the read itself; so every group of cells has counts of its own, written by the one thread that has the group.

use crate::sync::{AtomicU64, Ordering};

/// The counts of one group: two cache lines, because adjacent lines are fetched in pairs.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct ReadCounts {
    hits: AtomicU64,
    misses: AtomicU64,
    bytes: AtomicU64,
    _spare: [u64; 13],
}

const _: () = assert!(size_of::<ReadCounts>() == 128);

/// Reads in place, by id. What was closed, or too much to be held, counts as neither hit nor miss: it is read in
/// another way and counted there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalReads {
    /// Objects that were there.
    pub hits: u64,
    /// Objects that were not.
    pub misses: u64,
    /// Bytes of those that were.
    pub bytes: u64,
}

impl LocalReads {
    /// Adds others. What wraps around was written by a client that lies, and means nothing anyway.
    pub fn add(&mut self, other: LocalReads) {
        self.hits = self.hits.wrapping_add(other.hits);
        self.misses = self.misses.wrapping_add(other.misses);
        self.bytes = self.bytes.wrapping_add(other.bytes);
    }
}

impl ReadCounts {
    /// The group's thread has read an object of this length.
    #[inline]
    pub(crate) fn hit(&self, bytes: u64) {
        bump(&self.hits, 1);
        bump(&self.bytes, bytes);
    }

    /// The group's thread has looked for an object in vain.
    #[inline]
    pub(crate) fn miss(&self) {
        bump(&self.misses, 1);
    }

    /// What they are now.
    pub(crate) fn load(&self) -> LocalReads {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        LocalReads { hits: load(&self.hits), misses: load(&self.misses), bytes: load(&self.bytes) }
    }
}

/// Not a read-modify-write: one thread writes, and the next one that has the group gets it through a swap. Relaxed:
/// the numbers order nothing.
#[inline]
fn bump(count: &AtomicU64, by: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}
