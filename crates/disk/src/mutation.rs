//! Mutations that a test enables for its own thread, to prove that the crash matrix detects them. The switch is that of
//! [`moontide_rt`].

moontide_rt::mutations! {
    /// A deliberate mutation.
    pub enum Mutation {
        /// A bucket, or the file of a record, is renamed before its bytes are durable.
        RenameBeforeSync,
        /// A bucket, or the file of a record, is acknowledged before its name is durable.
        NameUnsynced,
        /// A record in the large file is acknowledged before its table entry is durable.
        EntriesUnsynced,
        /// A removal is acknowledged before it is durable.
        TombstoneUnsynced,
        /// Entries of a footer are accepted without a check of their CRC.
        FooterBelieved,
        /// A record is served without a check of its page digests.
        PagesBelieved,
    }
}
