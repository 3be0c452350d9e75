//! Mistakes that a test switches on for its own thread, to show that the crash matrix would find them.
//!
//! In a release build `planted` is the constant `false` and the branches vanish.

/// A mistake that somebody could make in this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A bucket, or the file of a record, gets its name before its bytes are durable.
    RenameBeforeSync,
    /// A bucket, or the file of a record, is acknowledged before its name is durable.
    NameUnsynced,
    /// A record in the one large file is acknowledged before its entry is durable.
    EntriesUnsynced,
    /// A removal is acknowledged before it is durable.
    TombstoneUnsynced,
    /// Entries of a footer are taken for what was written without looking at their CRC.
    FooterBelieved,
    /// A record is served without looking at its page digests.
    PagesBelieved,
}

#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) const fn planted(_bug: Bug) -> bool {
    false
}

#[cfg(debug_assertions)]
pub(crate) use switch::planted;
#[cfg(debug_assertions)]
pub use switch::with_planted;

#[cfg(debug_assertions)]
mod switch {
    use std::cell::Cell;

    use super::Bug;

    thread_local!(static ACTIVE: Cell<Option<Bug>> = const { Cell::new(None) });

    pub(crate) fn planted(bug: Bug) -> bool {
        ACTIVE.get() == Some(bug)
    }

    /// Runs `test` with a mistake switched on for this thread, or none.
    pub fn with_planted<T>(bug: Option<Bug>, test: impl FnOnce() -> T) -> T {
        struct Reset;
        impl Drop for Reset {
            fn drop(&mut self) {
                ACTIVE.set(None);
            }
        }
        let _reset = Reset;
        ACTIVE.set(bug);
        test()
    }
}
