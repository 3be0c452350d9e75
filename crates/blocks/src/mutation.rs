//! Mutations that model tests enable to prove that they detect the bug. The switch is that of [`moontide_rt`].

moontide_rt::mutations! {
    /// A plausible bug in this crate. Each has a model test that must fail with it.
    pub enum Mutation {
        /// The head of the stack has no change counter: it may have an earlier value again, with a different successor.
        NoTag,
        /// A plain store sets the head of the stack after a separate load.
        HeadByStore,
        /// Blocks are freed without Release: the next owner may write while the previous one still reads.
        RelaxedGive,
        /// The head is loaded without Acquire: the same, on the other side.
        RelaxedTake,
        /// A block is retired without a second check of the limit, which may have been raised in the meantime.
        LimitReadOnce,
        /// No fence between the store of a reader's epoch and its first load.
        EnterFenceMissing,
        /// No fence between the unlink and the scan of the readers.
        ScanFenceMissing,
        /// A reader leaves without Release: the owner may see this before the last reads are done.
        RelaxedLeave,
        /// The scan loads the readers' epochs without Acquire: the same, on the owner's side.
        RelaxedScan,
        /// Memory is reused without any scan of the readers.
        ReuseWithoutScan,
    }
}
