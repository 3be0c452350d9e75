//! Bugs that can be planted, to show that the model tests would find them.
//!
//! In an ordinary build [`planted`] is the constant `false` and the branches vanish. In a model build one
//! bug at a time is switched on for the running test.

use crate::sync::Ordering;

/// A mistake that somebody could make in this crate. Each has a model test that must fail with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(any(loom, shuttle)), expect(unreachable_pub, reason = "model builds show it to their tests"))]
pub enum Bug {
    /// WRITING → READY without Release: a reader may see the word before the bytes.
    RelaxedPublish,
    /// Looking at the word without Acquire: the same, from the reader's side.
    RelaxedLook,
    /// DEAD → FREE without Release: the next owner may write before the last reader has read.
    RelaxedFree,
    /// Looking at the word, then storing the new one, instead of a compare-and-swap.
    CheckThenStore,
    /// Beginning in a slot that has seen the epoch already.
    LateBegin,
    /// Freeing a copy at its own version, although its slot's fence was higher.
    FloorForgotten,
    /// Giving out the room of a record that was killed, without waiting until its slot is FREE.
    RoomWhileNamed,
    /// Naming the slot and looking at the word without a fence in between.
    AcquireFenceMissing,
    /// Scanning the ledgers right after DEAD without a fence in between.
    ScanFenceMissing,
    /// Looking for claims before the word is shut, when one can still be granted.
    LookBeforeShut,
    /// Freeing without looking into the ledgers at all.
    ReuseWithoutScan,
    /// Naming the slot without looking at the word afterwards.
    WordUnchecked,
    /// Clearing a cell without Release: the owner may see it before the last reads are done.
    RelaxedRelease,
    /// Reading a cell without Acquire: the same, from the owner's side.
    RelaxedScan,
    /// Naming a slot in a cell that still names another one.
    CellTakenTwice,
    /// Moving a pin to another cell without looking at the word again.
    NaivePinMove,
    /// Publishing whatever is being written, whichever epoch the caller names.
    EpochIgnored,
    /// Taking an empty entry of the index without a compare-and-swap.
    InsertByStore,
    /// Reading a liveness row without checking that it stayed the same member's.
    RowReadOnce,
    /// A beat without Release: a successor's beat may be seen before its name.
    RelaxedSign,
    /// Reading a beat without Acquire: the same, from the other side.
    RelaxedBeatRead,
    /// Entering a row without a beat.
    JoinUnsigned,
    /// A beat that overwrites a newer one.
    BeatByStore,
    /// Arriving without Release: whoever sees the signal may not see what was written before.
    RelaxedArrival,
    /// Looking out for signals without Acquire: the same, from the other side.
    RelaxedLookout,
    /// Signalling and looking at the bell without a fence in between.
    ArrivalFenceMissing,
    /// Setting the bell and looking at the signals without a fence in between.
    ParkFenceMissing,
    /// Going to sleep without looking at the signals again.
    ParkUnchecked,
    /// Signals of all phases in the same words: a later one hides an earlier one.
    OneSignalLine,
    /// Not looking whether one has been left out oneself.
    ExclusionUnnoticed,
    /// Coming back without waiting for the end of the step before.
    EntryUnmet,
    /// Taking everyone's memory for complete, whether they said so or not.
    WordIgnored,
    /// Counting a page without Release and Acquire: the last one to count lets others see a page that is not there.
    RelaxedCount,
    /// Counting a page of whatever version the flag is about.
    CountOfAnother,
}

#[cfg(not(any(loom, shuttle)))]
#[inline(always)]
pub(crate) const fn planted(_bug: Bug) -> bool {
    false
}

/// `order`, or Relaxed with the bug.
#[inline(always)]
pub(crate) fn weakened(bug: Bug, order: Ordering) -> Ordering {
    if planted(bug) { Ordering::Relaxed } else { order }
}

#[cfg(any(loom, shuttle))]
pub(crate) use switch::planted;
#[cfg(any(loom, shuttle))]
pub use switch::with_planted;

#[cfg(any(loom, shuttle))]
mod switch {
    use std::cell::Cell;

    use super::Bug;

    thread_local! {
        /// Both checkers run all threads of a model on the test's own OS thread.
        static ACTIVE: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    pub(crate) fn planted(bug: Bug) -> bool {
        ACTIVE.get() == Some(bug)
    }

    /// Runs `model` with `bug` switched on (or none).
    pub fn with_planted<T>(bug: Option<Bug>, model: impl FnOnce() -> T) -> T {
        struct Reset;
        impl Drop for Reset {
            fn drop(&mut self) {
                ACTIVE.set(None);
            }
        }
        let _reset = Reset;
        ACTIVE.set(bug);
        model()
    }
}
