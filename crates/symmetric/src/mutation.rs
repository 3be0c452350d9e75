//! Mutations that model tests enable to prove that they detect the bug. The switch is that of [`moontide_rt`].

moontide_rt::mutations! {
    /// A deliberate bug in this crate. For each one a model test must fail.
    pub enum Mutation {
        /// Arriving without Release: a rank that sees the signal may not see the writes before it.
        RelaxedArrival,
        /// Loading signals without Acquire: the same bug in the waiting rank.
        RelaxedSignalRead,
        /// Storing signals and loading the wake word without a fence in between.
        ArrivalFenceMissing,
        /// Setting the wake word and loading the signals without a fence in between.
        SleepFenceMissing,
        /// Sleeping without checking the signals again.
        SleepUnchecked,
        /// Signals of all phases in the same words: a later signal overwrites an earlier one.
        OneSignalSet,
        /// Not checking whether this rank itself was excluded.
        ExclusionUnnoticed,
        /// Rejoining without waiting for the end of the previous step.
        RejoinWithoutWait,
        /// Treating every member's memory as complete, whatever its signal's flags are.
        FlagsIgnored,
        /// Counting a page without Release and Acquire: the completed record may be seen before one of its pages.
        RelaxedCount,
        /// Counting a page whatever version the flag is for.
        CountOfOtherVersion,
    }
}
