//! [`Readers`]: who may still be looking at what the owner has taken away.
//!
//! A reader that enters writes the present time (a count, not a clock) into its own cell and wipes it when it leaves;
//! while it is in, it may follow whatever it finds. The owner unlinks something, takes a [`Stamp`] for it, and may give
//! its memory out again once every reader that is in has entered after the stamp.
//!
//! ```text
//! reader                                owner
//! cell := now                           unlink
//! fence                                 stamp := now; now += 1
//! follow links                          fence
//! …                                     oldest := the least of all cells
//! cell := IDLE                          stamp < oldest: nobody can have it any more
//! ```
//!
//! The two fences make it safe: either the owner sees the cell, or the reader sees that it was unlinked.
//!
//! Invariants: readers write nothing that another reader reads; nobody waits; stamps only grow.

use crate::planted::{Bug, planted, weakened};
use crate::sync::{AtomicU64, Ordering, fence};

/// When something was taken away, by the owner's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "model builds show it to their tests"))]
pub struct Stamp(u64);

/// What the cell of a reader says that is not in.
const IDLE: u64 = u64::MAX;

/// A cell on lines of its own: 128 bytes, since processors fetch lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Cell {
    since: AtomicU64,
    /// Whether some reader has it.
    taken: AtomicU64,
}

/// The cells of all readers, and the owner's count.
#[derive(Debug)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "model builds show it to their tests"))]
pub struct Readers {
    now: AtomicU64,
    cells: Box<[Cell]>,
    /// Cells from this one on have never been taken, and need not be looked at.
    high: AtomicU64,
}

#[cfg_attr(not(loom), expect(unreachable_pub, reason = "model builds show it to their tests"))]
impl Readers {
    /// For at most so many readers at a time.
    pub fn new(readers_max: usize) -> Readers {
        let cell = |_| Cell { since: AtomicU64::new(IDLE), taken: AtomicU64::new(0) };
        Readers {
            now: AtomicU64::new(0),
            cells: (0..readers_max).map(cell).collect(),
            high: AtomicU64::new(0),
        }
    }

    /// How many there can be.
    pub fn max(&self) -> usize {
        self.cells.len()
    }

    /// A cell for a new reader, if there is one.
    pub fn join(&self) -> Option<usize> {
        let free =
            |cell: &Cell| cell.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let found = self.cells.iter().position(free)?;
        self.high.fetch_max(found as u64 + 1, Ordering::Relaxed);
        Some(found)
    }

    /// Gives the cell back.
    pub fn part(&self, cell: usize) {
        // A guard that was forgotten instead of dropped keeps nothing any more.
        self.leave(cell);
        self.cells[cell].taken.store(0, Ordering::Release);
    }

    /// The reader of this cell is in: what it finds from now on stays, until it [leaves](Readers::leave).
    #[inline]
    pub fn enter(&self, cell: usize) {
        // Acquire; pairs with the Release of `stamp`: a reader that is later than a stamp sees what was unlinked before.
        let now = self.now.load(Ordering::Acquire);
        self.cells[cell].since.store(now, Ordering::Relaxed);
        if !planted(Bug::EnterFenceMissing) {
            // Pairs with the fence of `oldest`.
            fence(Ordering::SeqCst);
        }
    }

    /// It looks at nothing any more.
    #[inline]
    pub fn leave(&self, cell: usize) {
        // Release; pairs with the Acquire of `oldest`: its reads are over before its memory is written again.
        self.cells[cell].since.store(IDLE, weakened(Bug::RelaxedLeave, Ordering::Release));
    }

    /// The owner has unlinked something: when.
    #[inline]
    pub fn stamp(&self) -> Stamp {
        Stamp(self.now.fetch_add(1, Ordering::Release))
    }

    /// What has an older stamp than this has no readers.
    pub fn oldest(&self) -> Stamp {
        if planted(Bug::ReuseWithoutScan) {
            return Stamp(IDLE);
        }
        if !planted(Bug::ScanFenceMissing) {
            // Pairs with the fence of `enter`. It also stands between the owner's unlinking and its look at `high`: a
            // reader whose cell is not counted yet enters after this, and finds no link.
            fence(Ordering::SeqCst);
        }
        let high = self.high.load(Ordering::Relaxed) as usize;
        let order = weakened(Bug::RelaxedScan, Ordering::Acquire);
        let since = self.cells[..high].iter().map(|cell| cell.since.load(order));
        Stamp(since.min().unwrap_or(IDLE))
    }
}
