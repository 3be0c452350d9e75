//! [`Cell`]: a hazard pointer with which a process pins a slot, and the owner's scan for pins.
//!
//! A cell is 0 or holds a slot reference. The **reader** stores the reference, fences, and only then loads the word;
//! the **owner** stores DEAD, fences, and only then loads the cells. The later one of the two sees the store of the
//! other, so either the reader is refused or the owner finds the reference and lets the slot drain. Both fences are
//! needed, and a model test fails without either.
//!
//! ```text
//!   reader                                   owner
//!   cell ← slot                              word: READY → DEAD
//!   ─── fence(SeqCst) ───                    ─── fence(SeqCst) ───
//!   word READY?  yes: pinned                 any cell = slot?  yes: keep draining
//!                no:  cell ← 0, miss                           no:  free, reuse
//! ```
//!
//! One process writes a cell. Within the process, cells form lanes. One thread stores references in the cells of a
//! lane ([`CellLane`]); any holder of the resulting pin may clear its cell. A cell is vacant if and only if it is 0,
//! so there is no other state about it, in particular none that another thread writes.

use std::num::NonZeroU64;

use moontide_rt::sync::{AtomicU64, Ordering, fence};
use moontide_rt::{mutation_enabled, weakened};
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, SegmentId, SlotId};

use crate::mutation::Mutation;
use crate::word::{AtomicWord, Transition};

/// Cells of one lane: two cache lines, because adjacent lines are fetched in pairs.
pub const CELLS_PER_LANE: usize = 16;

/// Reference to a slot of one of the node's segments, as a cell stores it: `segment:32 | slot + 1 : 32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotRef(NonZeroU64);

impl SlotRef {
    /// Packs segment and slot. Slots are below
    /// [`SLOTS_PER_SEGMENT_MAX`](moontide_types::limits::SLOTS_PER_SEGMENT_MAX).
    #[inline]
    pub fn new(segment: SegmentId, slot: SlotId) -> SlotRef {
        let bits = u64::from(segment.0) << 32 | (u64::from(slot.0) + 1);
        SlotRef(NonZeroU64::new(bits).expect("slot + 1 is at least 1"))
    }

    /// Returns the value of the cell, for kernels that write cells themselves.
    pub fn bits(self) -> u64 {
        self.0.get()
    }

    /// Returns the segment. No segment with this id need exist: a cell is foreign memory.
    pub fn segment(self) -> SegmentId {
        SegmentId((self.0.get() >> 32) as u32)
    }

    /// Returns the slot. It may be out of range: a cell is foreign memory.
    pub fn slot(self) -> SlotId {
        // `u32::MAX + 1` in the low half wraps to a slot that no segment has.
        SlotId((self.0.get() as u32).wrapping_sub(1))
    }
}

/// Condition on the word under which a pin is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedWord {
    /// READY at any epoch: a reader that found the slot by id.
    Ready,
    /// READY at this epoch: a reader that knows the version.
    ReadyAt(Epoch),
    /// WRITING at this epoch: a writer that was granted this version.
    WritingAt(Epoch),
    /// WRITING or READY at this epoch: a process that waits for this version.
    BegunAt(Epoch),
}

impl ExpectedWord {
    /// Returns whether the pin is for reading bytes, and not for writing them or waiting for them.
    #[inline]
    pub(crate) fn is_for_reading(self) -> bool {
        matches!(self, ExpectedWord::Ready | ExpectedWord::ReadyAt(_))
    }

    #[inline]
    fn accepts(self, word: Word) -> bool {
        match self {
            ExpectedWord::Ready => word.state() == State::Ready,
            ExpectedWord::ReadyAt(epoch) => word == Word::new(epoch, State::Ready),
            ExpectedWord::WritingAt(epoch) => word == Word::new(epoch, State::Writing),
            ExpectedWord::BegunAt(epoch) => {
                word.epoch() == epoch && matches!(word.state(), State::Writing | State::Ready)
            }
        }
    }
}

/// Cell of a ledger: 0, or one pinned slot.
#[derive(Debug)]
#[repr(transparent)]
pub struct Cell(AtomicU64);

impl Cell {
    /// Creates a vacant cell outside of shared memory, for models and for the node's own ledger.
    pub fn vacant() -> Cell {
        Cell(AtomicU64::new(0))
    }

    /// Stores the slot reference and checks the slot's word. With `Ok` the slot's bytes do not change until
    /// [`Cell::release`]; with `Err` the cell is vacant again and the caller has a miss.
    #[inline]
    pub fn acquire(&self, name: SlotRef, word: &AtomicWord, expect: ExpectedWord) -> Result<Word, Word> {
        // AcqRel: later loads cannot pass a read-modify-write on common machines, and it takes over the cell from
        // the thread that released it.
        self.0.swap(name.0.get(), Ordering::AcqRel);
        if !mutation_enabled(Mutation::AcquireFenceMissing) {
            // Pairs with the fence in `scan`.
            fence(Ordering::SeqCst);
        }
        let seen = word.load();
        if expect.accepts(seen) || mutation_enabled(Mutation::WordUnchecked) {
            Ok(seen)
        } else {
            self.release();
            Err(seen)
        }
    }

    /// Releases the slot. Release: all reading and writing of the bytes happens before; pairs with the Acquire in
    /// [`Cell::name`].
    #[inline]
    pub fn release(&self) {
        self.0.store(0, weakened(Mutation::RelaxedRelease, Ordering::Release));
    }

    /// Pins in `self` the slot that `from` pins, and checks the word again: an owner's scan could pass this cell
    /// before the reference is in it and `from` after it was released. Returns `false` if the slot is dead; then the
    /// caller must keep the old cell.
    #[must_use]
    pub fn duplicate_pin(&self, from: &Cell, word: &AtomicWord, held: Word) -> bool {
        let Some(name) = from.name() else { return false };
        if mutation_enabled(Mutation::NaivePinMove) {
            self.0.swap(name.0.get(), Ordering::AcqRel);
            return true;
        }
        let expect = match held.state() {
            State::Writing => ExpectedWord::WritingAt(held.epoch()),
            _ => ExpectedWord::ReadyAt(held.epoch()),
        };
        self.acquire(name, word, expect).is_ok()
    }

    /// Returns the pinned slot. Acquire: pairs with the Release in [`Cell::release`].
    #[inline]
    pub fn name(&self) -> Option<SlotRef> {
        NonZeroU64::new(self.0.load(weakened(Mutation::RelaxedScan, Ordering::Acquire))).map(SlotRef)
    }

    /// Returns the address of the cell, for a kernel that writes it.
    pub fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    #[inline]
    fn is_vacant(&self) -> bool {
        // Relaxed: only the lane's one thread fills cells, and it sees its own stores.
        self.0.load(Ordering::Relaxed) == 0
    }
}

/// Cells in which one thread may pin slots.
#[derive(Clone, Copy, Debug)]
pub struct CellLane<'a>(&'a [Cell]);

impl<'a> CellLane<'a> {
    /// Wraps all cells of a lane. The caller must be the only thread that fills cells of it.
    pub fn new(cells: &'a [Cell]) -> CellLane<'a> {
        CellLane(cells)
    }

    /// Returns a cell that pins nothing.
    #[inline]
    pub fn vacant(&self) -> Option<&'a Cell> {
        self.0.iter().find(|cell| cell.is_vacant() || mutation_enabled(Mutation::CellTakenTwice))
    }
}

impl<'a> CellLane<'a> {
    /// Returns the indices of the cells that pin a slot.
    pub fn in_use(&self) -> impl Iterator<Item = usize> + use<'a> {
        self.0.iter().enumerate().filter(|(_, cell)| !cell.is_vacant()).map(|(index, _)| index)
    }

    /// Returns the index of a cell of this lane.
    #[inline]
    pub fn index_of(&self, cell: &Cell) -> usize {
        (std::ptr::from_ref(cell).addr() - self.0.as_ptr().addr()) / size_of::<Cell>()
    }
}

/// Passes each slot that one of `cells` pins to `pinned`. The caller must have made the slots DEAD that it wants to
/// free: the fence here orders those stores before these loads, and pairs with the one in [`Cell::acquire`].
pub fn scan<'a>(cells: impl IntoIterator<Item = &'a Cell>, mut pinned: impl FnMut(SlotRef)) {
    if mutation_enabled(Mutation::ReuseWithoutScan) {
        return;
    }
    if !mutation_enabled(Mutation::ScanFenceMissing) {
        fence(Ordering::SeqCst);
    }
    for cell in cells {
        if let Some(name) = cell.name() {
            pinned(name);
        }
    }
}

/// Result of [`close_claims`].
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseOutcome {
    /// The word is closed and no cell pins the slot: no process can write the record any more.
    Closed,
    /// A cell pins the slot. The word is open again.
    Claimed,
    /// The word is not WRITING at this epoch; it is the given one.
    Refused(Word),
}

/// Scans before a slot counts as claimed. A reader that pinned it through an old index entry releases it after a few
/// scans; a writer does not.
const SCAN_ATTEMPTS_MAX: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 1000 };

/// Ensures that no process can write a record that is about to be published: closes its word, so that no further
/// claim is granted, and then scans for claims granted before. In the opposite order a claim could be granted in
/// between. `cells` are the writer's. The fences are those of [`Cell::acquire`] and [`scan`].
pub fn close_claims<'a, I: IntoIterator<Item = &'a Cell>>(
    word: &AtomicWord,
    epoch: Epoch,
    name: SlotRef,
    cells: impl Fn() -> I,
) -> CloseOutcome {
    let is_pinned = || {
        let mut pinned = false;
        scan(cells(), |other| pinned |= other == name);
        pinned
    };
    let scanned_early = mutation_enabled(Mutation::ScanBeforeClose).then(is_pinned);
    match word.close(epoch) {
        Transition::Done(_) => {}
        // DEAD already: the record was killed and must not be published.
        Transition::Already => return CloseOutcome::Refused(word.load()),
        Transition::Refused(found) => return CloseOutcome::Refused(found),
    }
    for _ in 0..SCAN_ATTEMPTS_MAX {
        if !scanned_early.unwrap_or_else(is_pinned) {
            return CloseOutcome::Closed;
        }
        std::hint::spin_loop();
    }
    let reopened = word.reopen(epoch);
    assert!(
        matches!(reopened, Transition::Done(_)),
        "word changed although the caller holds the owner's lock"
    );
    CloseOutcome::Claimed
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn slot_ref_round_trips() {
        for (segment, slot) in [(0, 0), (7, 12), (u32::MAX, u32::MAX - 1)] {
            let name = SlotRef::new(SegmentId(segment), SlotId(slot));
            assert_eq!((name.segment(), name.slot()), (SegmentId(segment), SlotId(slot)));
        }
    }

    #[test]
    fn refused_acquire_leaves_cell_vacant() {
        let epoch = Epoch::from_bits(3).unwrap();
        let (cell, word) = (Cell::vacant(), AtomicWord::new(Word::new(epoch, State::Ready)));
        let name = SlotRef::new(SegmentId(1), SlotId(2));
        assert!(cell.acquire(name, &word, ExpectedWord::WritingAt(epoch)).is_err());
        assert_eq!(cell.name(), None);
        assert!(cell.acquire(name, &word, ExpectedWord::ReadyAt(epoch)).is_ok());
        assert_eq!(cell.name(), Some(name));
        let other = Cell::vacant();
        assert!(word.kill(epoch).succeeded());
        let dead = Word::new(epoch, State::Dead);
        assert_eq!(
            close_claims(&word, epoch, name, || []),
            CloseOutcome::Refused(dead),
            "a killed word must not be closed"
        );
        assert!(!other.duplicate_pin(&cell, &word, Word::new(epoch, State::Ready)));
        assert_eq!((other.name(), cell.name()), (None, Some(name)));
    }
}
