//! Properties of a record, as bits of its header.

/// Properties of a record that a reader must know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RecordFlags(u16);

impl RecordFlags {
    /// No flag set.
    pub const NONE: RecordFlags = RecordFlags(0);
    /// The record has no page digests because a GPU kernel wrote it; remote peers never transfer it one-sidedly.
    pub const DIGESTLESS: RecordFlags = RecordFlags(1);

    const KNOWN: u16 = Self::DIGESTLESS.0;

    /// Returns the stored form.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Converts the stored form; `None` if a flag is unknown to this release.
    pub const fn from_bits(bits: u16) -> Option<RecordFlags> {
        if bits & !Self::KNOWN == 0 { Some(RecordFlags(bits)) } else { None }
    }

    /// Returns whether the record has no page digests.
    pub const fn digestless(self) -> bool {
        self.0 & Self::DIGESTLESS.0 != 0
    }
}
