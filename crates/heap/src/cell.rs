//! The cell: how a process says "I am looking at this slot", and how the owner finds out.
//!
//! A cell is 0 or names a slot. It is a hazard pointer: the **reader** writes the name, fences, and only then
//! looks at the word; the **owner** writes DEAD, fences, and only then looks at the cells. Whichever came
//! second sees the other, so either the reader is refused or the owner finds the name and lets the slot drain.
//! Both fences are needed, and a model test fails without either.
//!
//! ```text
//!   reader                                   owner
//!   cell ← name                              word: READY → DEAD
//!   ─── fence(SeqCst) ───                    ─── fence(SeqCst) ───
//!   word READY?  yes: bytes are mine         any cell = name?  yes: keep draining
//!                no:  cell ← 0, miss                           no:  free, reuse
//! ```
//!
//! A cell is written by one process. Within it, cells come in groups; a group has one thread that may name
//! slots in it ([`CellGroup`]), and anyone who holds the resulting pin may clear it. That a cell is vacant is
//! just that it is 0, so nothing else needs to be kept about it, in particular nothing that another thread
//! writes.

use std::num::NonZeroU64;

use moontide_types::record::{State, Word};
use moontide_types::{Epoch, SegmentId, SlotId};

use crate::planted::{Bug, planted, weakened};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::word::{AtomicWord, Transition};

/// Cells of one group: two cache lines, because adjacent lines are fetched in pairs.
pub const CELLS_PER_GROUP: usize = 16;

/// A slot of one of the node's segments, as a cell stores it: `segment:32 | slot + 1 : 32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotName(NonZeroU64);

impl SlotName {
    /// The name of a slot. Slots are below [`SLOTS_PER_SEGMENT_MAX`](moontide_types::bounds::SLOTS_PER_SEGMENT_MAX).
    #[inline]
    pub fn new(segment: SegmentId, slot: SlotId) -> SlotName {
        let bits = u64::from(segment.0) << 32 | (u64::from(slot.0) + 1);
        SlotName(NonZeroU64::new(bits).expect("slot + 1 is at least 1"))
    }

    /// As a cell has it, for kernels that name slots themselves.
    pub fn bits(self) -> u64 {
        self.0.get()
    }

    /// The segment.
    pub fn segment(self) -> SegmentId {
        SegmentId((self.0.get() >> 32) as u32)
    }

    /// The slot.
    pub fn slot(self) -> SlotId {
        // A cell is foreign memory: `u32::MAX + 1` in the low half wraps to a slot that no segment has.
        SlotId((self.0.get() as u32).wrapping_sub(1))
    }
}

/// What the word must say for a pin to be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// A reader that found the slot by id: any complete version.
    Ready,
    /// A reader that was told the version.
    ReadyAt(Epoch),
    /// A writer that was granted this version.
    WritingAt(Epoch),
    /// Somebody who waits for this version: it is being written, or complete.
    BegunAt(Epoch),
}

impl Expect {
    /// Whether somebody means to read bytes, and neither to write them nor to wait.
    #[inline]
    pub(crate) fn is_for_reading(self) -> bool {
        matches!(self, Expect::Ready | Expect::ReadyAt(_))
    }

    #[inline]
    fn accepts(self, word: Word) -> bool {
        match self {
            Expect::Ready => word.state() == State::Ready,
            Expect::ReadyAt(epoch) => word == Word::new(epoch, State::Ready),
            Expect::WritingAt(epoch) => word == Word::new(epoch, State::Writing),
            Expect::BegunAt(epoch) => {
                word.epoch() == epoch && matches!(word.state(), State::Writing | State::Ready)
            }
        }
    }
}

/// One cell of a ledger.
#[derive(Debug)]
#[repr(transparent)]
pub struct Cell(AtomicU64);

impl Cell {
    /// A vacant cell outside of shared memory, for models and for the node's own ledger.
    pub fn vacant() -> Cell {
        Cell(AtomicU64::new(0))
    }

    /// Names the slot and looks at its word. With `Ok` the slot's bytes stay as they are until
    /// [`Cell::release`]; with `Err` the cell is vacant again and the caller has a miss.
    #[inline]
    pub fn acquire(&self, name: SlotName, word: &AtomicWord, expect: Expect) -> Result<Word, Word> {
        // AcqRel: as a read-modify-write it cannot be passed by later loads on common machines, and it takes
        // over the cell from whoever released it.
        self.0.swap(name.0.get(), Ordering::AcqRel);
        if !planted(Bug::AcquireFenceMissing) {
            // Pairs with the fence in `scan`.
            fence(Ordering::SeqCst);
        }
        let seen = word.load();
        if expect.accepts(seen) || planted(Bug::WordUnchecked) {
            Ok(seen)
        } else {
            self.release();
            Err(seen)
        }
    }

    /// Gives the slot back. Release: all reading and writing of the bytes happens before; pairs with the
    /// Acquire in [`Cell::name`].
    #[inline]
    pub fn release(&self) {
        self.0.store(0, weakened(Bug::RelaxedRelease, Ordering::Release));
    }

    /// Pins in `self` what `from` pins already. The word is looked at again: an owner's scan could pass this
    /// cell before the name is in it and `from` after it was released. `false`: the slot is dying, the old
    /// cell must be kept.
    #[must_use]
    pub fn acquire_again(&self, from: &Cell, word: &AtomicWord, held: Word) -> bool {
        let Some(name) = from.name() else { return false };
        if planted(Bug::NaivePinMove) {
            self.0.swap(name.0.get(), Ordering::AcqRel);
            return true;
        }
        let expect = match held.state() {
            State::Writing => Expect::WritingAt(held.epoch()),
            _ => Expect::ReadyAt(held.epoch()),
        };
        self.acquire(name, word, expect).is_ok()
    }

    /// What the cell names, if anything. Acquire: pairs with the Release in [`Cell::release`].
    #[inline]
    pub fn name(&self) -> Option<SlotName> {
        NonZeroU64::new(self.0.load(weakened(Bug::RelaxedScan, Ordering::Acquire))).map(SlotName)
    }

    /// Where it is, for a kernel that writes it.
    pub fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    #[inline]
    fn is_vacant(&self) -> bool {
        // Relaxed: only the group's one thread fills cells, and it sees its own stores.
        self.0.load(Ordering::Relaxed) == 0
    }
}

/// The cells in which one thread may name slots.
#[derive(Clone, Copy, Debug)]
pub struct CellGroup<'a>(&'a [Cell]);

impl<'a> CellGroup<'a> {
    /// All cells of a group. The caller must be the only one to fill cells of it.
    pub fn new(cells: &'a [Cell]) -> CellGroup<'a> {
        CellGroup(cells)
    }

    /// A cell that names nothing.
    #[inline]
    pub fn vacant(&self) -> Option<&'a Cell> {
        self.0.iter().find(|cell| cell.is_vacant() || planted(Bug::CellTakenTwice))
    }
}

impl<'a> CellGroup<'a> {
    /// The places of the cells that name something.
    pub fn in_use(&self) -> impl Iterator<Item = usize> + use<'a> {
        self.0.iter().enumerate().filter(|(_, cell)| !cell.is_vacant()).map(|(place, _)| place)
    }

    /// Where in the group a cell of it is.
    #[inline]
    pub fn place_of(&self, cell: &Cell) -> usize {
        (std::ptr::from_ref(cell).addr() - self.0.as_ptr().addr()) / size_of::<Cell>()
    }
}

/// Collects what all `cells` name into `pinned`. Slots that are to be freed must have been made DEAD before:
/// the fence in here orders those stores before these loads, and pairs with the one in [`Cell::acquire`].
pub fn scan<'a>(cells: impl IntoIterator<Item = &'a Cell>, mut pinned: impl FnMut(SlotName)) {
    if planted(Bug::ReuseWithoutScan) {
        return;
    }
    if !planted(Bug::ScanFenceMissing) {
        fence(Ordering::SeqCst);
    }
    for cell in cells {
        if let Some(name) = cell.name() {
            pinned(name);
        }
    }
}

/// What a commit finds.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shut {
    /// The word is shut, and no cell names the slot: nobody can write the record any more.
    Alone,
    /// A cell names the slot. The word is open again.
    Claimed,
    /// The word does not say WRITING at this epoch; this is what it says.
    Refused(Word),
}

/// Looks at the cells before a slot counts as claimed. A reader that named it by an old index entry is gone
/// after a few; a writer is not.
const LOOKS_MAX: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 1000 };

/// Makes sure that nobody can write a record that is to be published: shuts its word, so that no claim is
/// granted from now on, and then looks whether one was granted before. The other way round, a claim could slip
/// in between. `cells` are the writer's. The fences are those of [`Cell::acquire`] and [`scan`].
pub fn shut_out_claims<'a, I: IntoIterator<Item = &'a Cell>>(
    word: &AtomicWord,
    epoch: Epoch,
    name: SlotName,
    cells: impl Fn() -> I,
) -> Shut {
    let is_named = || {
        let mut named = false;
        scan(cells(), |other| named |= other == name);
        named
    };
    let seen_first = planted(Bug::LookBeforeShut).then(is_named);
    match word.shut(epoch) {
        Transition::Done(_) => {}
        // DEAD already: it was killed, and must not come back.
        Transition::Already => return Shut::Refused(word.load()),
        Transition::Refused(found) => return Shut::Refused(found),
    }
    for _ in 0..LOOKS_MAX {
        if !seen_first.unwrap_or_else(is_named) {
            return Shut::Alone;
        }
        std::hint::spin_loop();
    }
    let opened = word.open_again(epoch);
    assert!(matches!(opened, Transition::Done(_)), "the owner's lock keeps everyone else from the word");
    Shut::Claimed
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for (segment, slot) in [(0, 0), (7, 12), (u32::MAX, u32::MAX - 1)] {
            let name = SlotName::new(SegmentId(segment), SlotId(slot));
            assert_eq!((name.segment(), name.slot()), (SegmentId(segment), SlotId(slot)));
        }
    }

    #[test]
    fn a_refused_acquire_leaves_nothing_behind() {
        let epoch = Epoch::from_bits(3).unwrap();
        let (cell, word) = (Cell::vacant(), AtomicWord::new(Word::new(epoch, State::Ready)));
        let name = SlotName::new(SegmentId(1), SlotId(2));
        assert!(cell.acquire(name, &word, Expect::WritingAt(epoch)).is_err());
        assert_eq!(cell.name(), None);
        assert!(cell.acquire(name, &word, Expect::ReadyAt(epoch)).is_ok());
        assert_eq!(cell.name(), Some(name));
        let other = Cell::vacant();
        assert!(word.kill(epoch).holds());
        let dead = Word::new(epoch, State::Dead);
        assert_eq!(shut_out_claims(&word, epoch, name, || []), Shut::Refused(dead), "killed is not shut");
        assert!(!other.acquire_again(&cell, &word, Word::new(epoch, State::Ready)));
        assert_eq!((other.name(), cell.name()), (None, Some(name)));
    }
}
