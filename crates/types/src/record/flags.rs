//! Properties of a record, as bits of its header.

/// Properties of a record that a reader must know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(u16);

impl Flags {
    /// No property.
    pub const NONE: Flags = Flags(0);
    /// Written by a GPU kernel without digests; never moved one-sidedly by remote peers.
    pub const DIGESTLESS: Flags = Flags(1);

    const KNOWN: u16 = Self::DIGESTLESS.0;

    /// The stored form.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The flags with this stored form, if this release knows them all.
    pub const fn from_bits(bits: u16) -> Option<Flags> {
        if bits & !Self::KNOWN == 0 { Some(Flags(bits)) } else { None }
    }

    /// Whether the record has no page digests.
    pub const fn digestless(self) -> bool {
        self.0 & Self::DIGESTLESS.0 != 0
    }
}
