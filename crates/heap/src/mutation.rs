//! Mutations that model tests enable to prove that they detect the bug. The switch is that of [`moontide_rt`].

moontide_rt::mutations! {
    /// A deliberate bug in this crate. For each one a model test must fail.
    pub enum Mutation {
        /// WRITING → READY without Release: a reader may see the word before the bytes.
        RelaxedPublish,
        /// Loading the word without Acquire: the same bug in the reader.
        RelaxedLoad,
        /// DEAD → FREE without Release: the next owner may write before the last reader has read.
        RelaxedFree,
        /// Loading the word, then storing the new one, instead of a compare-and-swap.
        CheckThenStore,
        /// Beginning in a slot that has already seen the epoch.
        LateBegin,
        /// Freeing a copy at its own version although its slot's fence was higher.
        FenceForgotten,
        /// Reusing the staging chunk of a killed record without waiting until its slot is FREE.
        ChunkReusedWhilePinned,
        /// Storing the slot reference and loading the word without a fence in between.
        AcquireFenceMissing,
        /// Scanning the ledgers right after DEAD without a fence in between.
        ScanFenceMissing,
        /// Scanning for claims before the word is closed, while one can still be granted.
        ScanBeforeClose,
        /// Freeing without a ledger scan.
        ReuseWithoutScan,
        /// Storing the slot reference without checking the word afterwards.
        WordUnchecked,
        /// Clearing a cell without Release: the owner may see it before the last reads are done.
        RelaxedRelease,
        /// Loading a cell without Acquire: the same bug in the owner.
        RelaxedScan,
        /// Storing a slot reference in a cell that still holds another one.
        CellTakenTwice,
        /// Moving a pin to another cell without checking the word again.
        NaivePinMove,
        /// Publishing the current write whatever epoch the caller passes.
        EpochIgnored,
        /// Filling an empty index entry without a compare-and-swap.
        InsertByStore,
        /// Reading a liveness row without checking that its member did not change.
        RowReadOnce,
        /// Storing a heartbeat without Release: a successor's heartbeat may be seen before its member id.
        RelaxedHeartbeat,
        /// Loading a heartbeat without Acquire: the same bug in the reader.
        RelaxedHeartbeatRead,
        /// Joining a row without a heartbeat.
        JoinWithoutHeartbeat,
        /// Storing a heartbeat over a newer one.
        HeartbeatByStore,
    }
}
