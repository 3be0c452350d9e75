//! [`ReaderEpochs`]: epoch-based reclamation. The owner learns when no reader can access unlinked memory.
//!
//! An entering reader writes the current epoch (a counter, not a clock) into its own cell and resets it when it leaves;
//! while it is active, it may follow all links that it finds. The owner unlinks something, takes a [`RetireEpoch`] for
//! it, and may reuse its memory once every active reader has entered after that epoch.
//!
//! ```text
//! reader                                owner
//! cell := now                           unlink
//! fence                                 epoch := now; now += 1
//! follow links                          fence
//! …                                     oldest := the least of all cells
//! cell := IDLE                          epoch < oldest: no reader can access it any more
//! ```
//!
//! The two fences make it safe: either the owner sees the cell, or the reader sees the unlink.
//!
//! Invariants: readers write nothing that another reader reads; no thread waits; epochs only grow.

use moontide_rt::sync::{AtomicU64, Ordering, fence};
use moontide_rt::{mutation_enabled, weakened};

use crate::mutation::Mutation;

/// Time at which something was unlinked, by the owner's counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "public for tests of model builds"))]
pub struct RetireEpoch(u64);

/// Cell value of an inactive reader.
const IDLE: u64 = u64::MAX;

/// A cell on separate cache lines: 128 bytes, since processors fetch lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct ReaderCell {
    since: AtomicU64,
    /// 1 if a reader has the cell, else 0.
    taken: AtomicU64,
}

/// Cells of all readers, and the owner's counter.
#[derive(Debug)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "public for tests of model builds"))]
pub struct ReaderEpochs {
    now: AtomicU64,
    cells: Box<[ReaderCell]>,
    /// Cells from this one on have never been taken, and are not scanned.
    high: AtomicU64,
}

#[cfg_attr(not(loom), expect(unreachable_pub, reason = "public for tests of model builds"))]
impl ReaderEpochs {
    /// Creates cells for at most `readers_max` concurrent readers.
    pub fn new(readers_max: usize) -> ReaderEpochs {
        let cell = |_| ReaderCell { since: AtomicU64::new(IDLE), taken: AtomicU64::new(0) };
        ReaderEpochs {
            now: AtomicU64::new(0),
            cells: (0..readers_max).map(cell).collect(),
            high: AtomicU64::new(0),
        }
    }

    /// Maximum number of readers.
    pub fn max(&self) -> usize {
        self.cells.len()
    }

    /// Takes a cell for a new reader, if there is one.
    pub fn register(&self) -> Option<usize> {
        let free = |cell: &ReaderCell| {
            cell.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let found = self.cells.iter().position(free)?;
        self.high.fetch_max(found as u64 + 1, Ordering::Relaxed);
        Some(found)
    }

    /// Releases the cell.
    pub fn unregister(&self, cell: usize) {
        // A guard that was forgotten instead of dropped must not block reclamation any more.
        self.leave(cell);
        self.cells[cell].taken.store(0, Ordering::Release);
    }

    /// Activates the reader of this cell: everything that it finds stays valid, until it [leaves](ReaderEpochs::leave).
    #[inline]
    pub fn enter(&self, cell: usize) {
        // Acquire; pairs with the Release of `next_epoch`: a reader that is later than an epoch sees the unlinks before
        // it.
        let now = self.now.load(Ordering::Acquire);
        self.cells[cell].since.store(now, Ordering::Relaxed);
        if !mutation_enabled(Mutation::EnterFenceMissing) {
            // Pairs with the fence of `min_active`.
            fence(Ordering::SeqCst);
        }
    }

    /// Deactivates the reader of this cell.
    #[inline]
    pub fn leave(&self, cell: usize) {
        // Release; pairs with the Acquire of `min_active`: its reads are over before the memory is written again.
        self.cells[cell].since.store(IDLE, weakened(Mutation::RelaxedLeave, Ordering::Release));
    }

    /// Returns the epoch of something that the owner has just unlinked.
    #[inline]
    pub fn next_epoch(&self) -> RetireEpoch {
        RetireEpoch(self.now.fetch_add(1, Ordering::Release))
    }

    /// Returns an epoch: memory that was unlinked at an earlier one has no readers.
    pub fn min_active(&self) -> RetireEpoch {
        if mutation_enabled(Mutation::ReuseWithoutScan) {
            return RetireEpoch(IDLE);
        }
        if !mutation_enabled(Mutation::ScanFenceMissing) {
            // Pairs with the fence of `enter`. It also separates the owner's unlink from its load of `high`: a reader
            // whose cell is not counted yet enters after this, and finds no link.
            fence(Ordering::SeqCst);
        }
        let high = self.high.load(Ordering::Relaxed) as usize;
        let order = weakened(Mutation::RelaxedScan, Ordering::Acquire);
        let since = self.cells[..high].iter().map(|cell| cell.since.load(order));
        RetireEpoch(since.min().unwrap_or(IDLE))
    }
}
