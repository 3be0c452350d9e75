//! Numbers of records and tenants within one group.

/// No segment, no record, no extension.
pub(crate) const NONE: u32 = u32::MAX;

/// Index of a tenant within one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantIndex(pub u16);

/// Number of a record, valid until a removal renumbers it: `class:6 | index:26`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RecordRef(u32);

impl RecordRef {
    /// Bits of the index within a class.
    pub(crate) const INDEX_BITS: u32 = 26;
    /// Largest index within a class.
    pub(crate) const INDEX_MAX: u32 = (1 << RecordRef::INDEX_BITS) - 1;

    pub(crate) fn new(class: usize, index: usize) -> RecordRef {
        RecordRef((class as u32) << RecordRef::INDEX_BITS | index as u32)
    }

    /// Decodes the stored form; [`NONE`] is no record.
    pub(crate) fn from_number(number: u32) -> Option<RecordRef> {
        (number != NONE).then_some(RecordRef(number))
    }

    pub(crate) fn number(self) -> u32 {
        self.0
    }

    pub(crate) fn class(self) -> usize {
        (self.0 >> RecordRef::INDEX_BITS) as usize
    }

    pub(crate) fn index(self) -> usize {
        (self.0 & RecordRef::INDEX_MAX) as usize
    }
}
