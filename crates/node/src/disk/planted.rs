//! Mistakes that a test switches on for one [`DiskTier`](super::DiskTier), to show that it would find them; and points at
//! which a test may step in, where the threads of the tier meet others.
//!
//! In an ordinary build [`Trial`] is nothing, [`Trial::planted`] is the constant `false`, and the branches vanish.

/// A mistake that somebody could make here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    /// A kill is answered without a word to the disk.
    KilledUntold,
    /// An eviction is told first and finished then.
    EvictedLater,
    /// A promotion is published without a look whether it was cancelled.
    PromotedUnasked,
    /// A promotion begins in its slot without a look whether it was cancelled.
    BegunUnasked,
    /// What was written is told to the session that ordered it, also if that one is over.
    ToldToEnded,
    /// What somebody missed is told as gone without a look whether it has come meanwhile.
    GoneUnseen,
    /// What was found by a scan is told without a look whether it is still there.
    ToldUnseen,
}

/// Where a test may step in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    /// Records are pinned and about to be written.
    Pinned,
    /// Records are on the disk and were not told yet.
    Written,
    /// What was evicted has just been told.
    Told,
    /// A record was not found, and that is about to be told.
    Missed,
    /// Records were read, and nobody is let in to them yet.
    Read,
    /// A record is in staging and about to be copied into its slot.
    Loaded,
    /// A record was copied into its slot and is about to be published.
    Copied,
    /// Records were found by a scan and are about to be told.
    Found,
}

#[cfg(not(test))]
pub(super) use off::Trial;
#[cfg(test)]
pub(super) use on::Trial;

#[cfg(not(test))]
mod off {
    use super::{Bug, Point};

    /// Nothing.
    #[derive(Debug, Default)]
    pub(in crate::disk) struct Trial;

    impl Trial {
        #[inline(always)]
        pub(in crate::disk) const fn planted(&self, _bug: Bug) -> bool {
            false
        }

        #[inline(always)]
        pub(in crate::disk) const fn reached(&self, _point: Point) {}
    }
}

#[cfg(test)]
mod on {
    use std::fmt;
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::{Bug, Point};

    type Hook = Arc<dyn Fn(Point) + Send + Sync>;

    /// What a test does to a tier.
    #[derive(Default)]
    pub(in crate::disk) struct Trial {
        bug: Mutex<Option<Bug>>,
        hook: Mutex<Option<Hook>>,
    }

    impl Trial {
        pub(in crate::disk) fn planted(&self, bug: Bug) -> bool {
            *self.bug.lock() == Some(bug)
        }

        pub(in crate::disk) fn reached(&self, point: Point) {
            // Called without the lock: what it does may reach a point, too.
            let hook = self.hook.lock().clone();
            if let Some(hook) = hook {
                hook(point);
            }
        }

        pub(in crate::disk) fn plant(&self, bug: Option<Bug>) {
            *self.bug.lock() = bug;
        }

        pub(in crate::disk) fn hook(&self, hook: impl Fn(Point) + Send + Sync + 'static) {
            *self.hook.lock() = Some(Arc::new(hook));
        }

        pub(in crate::disk) fn unhook(&self) {
            *self.hook.lock() = None;
        }
    }

    impl fmt::Debug for Trial {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Trial").field("bug", &*self.bug.lock()).finish_non_exhaustive()
        }
    }
}
