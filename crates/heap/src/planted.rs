//! Bugs that can be planted, to show that the model tests would find them.
//!
//! In an ordinary build [`planted`] is the constant `false` and the branches vanish. In a model build one
//! bug at a time is switched on for the running test.

/// A mistake that somebody could make in this crate. Each has a model test that must fail with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(any(loom, shuttle)), expect(unreachable_pub, reason = "model builds show it to their tests"))]
pub enum Bug {
    /// WRITING → READY without Release: a reader may see the word before the bytes.
    RelaxedPublish,
    /// Naming the slot and looking at the word without a fence in between.
    AcquireFenceMissing,
    /// Scanning the ledgers right after DEAD without a fence in between.
    ScanFenceMissing,
    /// Freeing without looking into the ledgers at all.
    ReuseWithoutScan,
    /// Moving a pin to another cell without looking at the word again.
    NaivePinMove,
    /// Publishing whatever is being written, whichever epoch the caller names.
    EpochIgnored,
    /// Reading a liveness row without checking that it stayed the same member's.
    RowReadOnce,
}

#[cfg(not(any(loom, shuttle)))]
#[inline(always)]
pub(crate) const fn planted(_bug: Bug) -> bool {
    false
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
