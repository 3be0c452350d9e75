//! Mutations that a test enables for one [`DiskTier`](super::DiskTier) to prove that it detects them, and hook points
//! at which a test can interleave with the threads of the tier, and a simulated world can delay them.
//!
//! Outside unit tests [`TestHooks`] has no hook. In a release build it is empty and its branches are compiled out.

use moontide_rt::MutationSwitch;

moontide_rt::mutations! {
    /// A deliberate mutation.
    pub(super) enum Mutation {
        /// A Kill is answered without a removal from the disk.
        KilledUntold,
        /// A Kill of a version that is not in its slot is answered without a removal from the disk.
        KilledAbsentUntold,
        /// An inventory ends before the writes of other sessions and the removals have ended.
        JobsNotAwaited,
        /// Failed removals are retried only when no further removal arrives.
        RetryStarved,
        /// The notice of an eviction is sent before it is finished.
        EvictedLater,
        /// The notice of an eviction is sent although files could not be deleted.
        EvictionErrorIgnored,
        /// An inventory ends although records could not be read, and they stay on the disk.
        UnreadableKept,
        /// A promotion is published without a check for cancellation.
        PromotedUnasked,
        /// A promotion begins in its slot without a check for cancellation.
        BegunUnasked,
        /// The notice of a write is sent to the commanding session even if it has ended.
        ToldToEnded,
        /// A missed record is reported as gone without a check whether it was written meanwhile.
        GoneUnseen,
        /// An exclusion is not durable.
        ExcludedInMemory,
        /// A removal is answered when it is durable in the first directory.
        RemovedOnOne,
        /// A record found by a scan is reported without a check whether it still exists.
        ToldUnseen,
    }
}

/// A point at which a test can interleave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HookPoint {
    /// Records are pinned and about to be written.
    Pinned,
    /// Records are on the disk, and no notice has been sent.
    Written,
    /// Evicted records can no longer be found, and are not durably gone.
    Evicting,
    /// The notice of an eviction has just been sent.
    Notified,
    /// A record was not found, and its notice is about to be sent.
    Missed,
    /// Records were read and are not published yet.
    Read,
    /// A record is in staging and about to be copied into its slot.
    Loaded,
    /// A record was copied into its slot and is about to be published.
    Copied,
    /// Records were found by a scan and are about to be reported.
    Found,
    /// Removals were taken from the queue and are about to be written.
    Removing,
}

impl HookPoint {
    /// Returns the name of its mark.
    #[cfg(not(test))]
    const fn mark(self) -> &'static str {
        match self {
            HookPoint::Pinned => "about to write pinned records",
            HookPoint::Written => "about to tell of written records",
            HookPoint::Evicting => "about to finish an eviction",
            HookPoint::Notified => "told of an eviction",
            HookPoint::Missed => "about to tell of a missed record",
            HookPoint::Read => "about to publish read records",
            HookPoint::Loaded => "about to begin a promoted record",
            HookPoint::Copied => "about to publish a promoted record",
            HookPoint::Found => "about to tell of found records",
            HookPoint::Removing => "about to write removals",
        }
    }
}

/// Enabled mutation and hook of a test.
#[derive(Debug, Default)]
pub(super) struct TestHooks {
    pub(super) mutation: MutationSwitch,
    #[cfg(test)]
    hook: hook::Slot,
}

#[cfg(not(test))]
impl TestHooks {
    #[inline(always)]
    pub(super) fn reached(&self, point: HookPoint) {
        moontide_rt::mark!(point.mark());
    }
}

#[cfg(test)]
mod hook {
    use std::fmt;
    use std::sync::Arc;

    use moontide_rt::sync::Mutex;

    use super::{HookPoint, TestHooks};

    type Hook = Arc<dyn Fn(HookPoint) + Send + Sync>;

    /// Hook of a test, if any.
    #[derive(Default)]
    pub(super) struct Slot(Mutex<Option<Hook>>);

    impl TestHooks {
        pub(in crate::disk) fn reached(&self, point: HookPoint) {
            // Called without the lock: the hook may reach a point, too.
            let hook = self.hook.0.lock().clone();
            if let Some(hook) = hook {
                hook(point);
            }
        }

        pub(in crate::disk) fn hook(&self, hook: impl Fn(HookPoint) + Send + Sync + 'static) {
            *self.hook.0.lock() = Some(Arc::new(hook));
        }

        pub(in crate::disk) fn unhook(&self) {
            *self.hook.0.lock() = None;
        }
    }

    impl fmt::Debug for Slot {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Slot").finish_non_exhaustive()
        }
    }
}
