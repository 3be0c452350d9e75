//! Bugs that can be planted, to show that the model tests would find them.
//!
//! In an ordinary build [`planted`] is the constant `false` and the branches vanish. In a model build one bug at a time
//! is switched on for the running test.

use crate::sync::Ordering;

/// A mistake that somebody could make in this crate. Each has a model test that must fail with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(loom), expect(unreachable_pub, reason = "model builds show it to their tests"))]
pub enum Bug {
    /// The head of the stack without a count of its changes: it may be the same again, and its successor another.
    NoTag,
    /// The head of the stack set by a store after it was looked at.
    HeadByStore,
    /// Blocks put back without Release: who takes them may write while the one before still reads.
    RelaxedGive,
    /// Looking at the head without Acquire: the same, from the other side.
    RelaxedTake,
    /// A block that is put away without a second look at the limit, which may have been raised meanwhile.
    LimitReadOnce,
    /// Entering without a fence between the reader's stamp and its first look.
    EnterFenceMissing,
    /// Looking for readers without a fence after what they must not find was unlinked.
    ScanFenceMissing,
    /// Leaving without Release: the owner may see it before the last reads are done.
    RelaxedLeave,
    /// Reading the stamps without Acquire: the same, from the owner's side.
    RelaxedScan,
    /// Giving memory out again without looking for readers at all.
    ReuseWithoutScan,
}

#[cfg(not(loom))]
#[inline(always)]
pub(crate) const fn planted(_bug: Bug) -> bool {
    false
}

/// `order`, or Relaxed with the bug.
#[inline(always)]
pub(crate) fn weakened(bug: Bug, order: Ordering) -> Ordering {
    if planted(bug) { Ordering::Relaxed } else { order }
}

#[cfg(loom)]
pub(crate) use switch::planted;
#[cfg(loom)]
pub use switch::with_planted;

#[cfg(loom)]
mod switch {
    use std::cell::Cell;

    use super::Bug;

    thread_local! {
        /// loom runs all threads of a model on the test's own OS thread.
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
