//! [`Record`]: a group's metadata of one object, in 80 bytes, followed by the key.
//!
//! ```text
//!   id 16 │ epoch 8 │ root 8 │ length:41, flags:10, attributes:13 8 │ prev 4 │ next 4 │ until 4
//!   segment 4 │ slot 4 │ block 4 │ extension 4 │ tenant 2 │ key length 2 │ last use:63, used again:1 8
//! ```
//!
//! Some fields change their meaning with the object's state, because 8 bytes per object are 80 MB with ten million
//! objects:
//!
//! | field | while writing | when complete |
//! |---|---|---|
//! | `root` | the caller that owns the reservation | the root digest |
//! | `until` | end of the reservation | end of the longest lease |
//! | `prev`, `next` | the queue of reservations | the eviction queue of its tenant and class, or that of offloads |
//!
//! The record contains the first location of the bytes. Objects with more locations, stripes or attributes have a
//! [`RecordExtension`](crate::record_extension::RecordExtension).

use moontide_types::limits::OBJECT_BYTES_MAX;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ObjectId};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::eviction::UseNumber;
use crate::ids::{NONE, RecordRef, TenantIndex};
use crate::time::Tick;

/// Metadata of one object. All integers are in native byte order: the record never leaves the process.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Record {
    id: [u8; 16],
    epoch: u64,
    pub(crate) root: u64,
    len_flags: u64,
    pub(crate) prev: u32,
    pub(crate) next: u32,
    until: u32,
    segment: u32,
    slot: u32,
    block: u32,
    pub(crate) extension: u32,
    tenant: u16,
    key_len: u16,
    last_use: u64,
}

pub(crate) const RECORD_BYTES: usize = size_of::<Record>();
const _: () = assert!(RECORD_BYTES == 80);

/// 1 TiB is itself a valid length, hence one bit more than 40.
const LEN_BITS: u32 = 41;
const LEN_MASK: u64 = (1 << LEN_BITS) - 1;
const _: () = assert!(OBJECT_BYTES_MAX <= LEN_MASK);

/// Single bits above the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum RecordFlag {
    /// Reserved or being written; otherwise complete.
    Writing = LEN_BITS,
    /// Used since it was completed, since its offload began, or since it moved to or from disk, whichever was last.
    Visited = LEN_BITS + 1,
    /// The object has no digests.
    Digestless = LEN_BITS + 2,
    /// Fewer replicas than requested.
    UnderReplicated = LEN_BITS + 3,
    /// A node reported the record's own location as READY.
    Committed = LEN_BITS + 4,
    /// Created from a report: its locations are in order of arrival, and its reservation has no owner.
    Reported = LEN_BITS + 5,
    /// Complete, and only on disks.
    OnDisk = LEN_BITS + 6,
    /// Nodes have been commanded to write it to their disks.
    Offloading = LEN_BITS + 7,
}

/// Two bits of pin class above the single bits.
const PIN_SHIFT: u32 = LEN_BITS + 8;
/// The bits above hold the length of the attributes in the record, for objects on a disk: a promotion needs as much
/// space as the record had.
const ATTRIBUTES_SHIFT: u32 = PIN_SHIFT + 2;
const ATTRIBUTES_MASK: u64 = (1 << 13) - 1;
const _: () = assert!(ATTRIBUTES_SHIFT + 13 <= 64);

/// Location of one stripe of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotLocation {
    /// Index of the segment in the group's table; [`NONE`] if the location was lost.
    pub(crate) segment: u32,
    pub(crate) slot: u32,
    /// Block of the allocator; while the segment reports, the position among its reported extents.
    pub(crate) block: u32,
}

impl SlotLocation {
    pub(crate) const LOST: SlotLocation = SlotLocation { segment: NONE, slot: 0, block: 0 };

    pub(crate) fn is_lost(self) -> bool {
        self.segment == NONE
    }
}

impl Record {
    /// Creates a record with no location and no attributes.
    pub(crate) fn new(
        id: ObjectId,
        epoch: Epoch,
        tenant: TenantIndex,
        key_len: usize,
        object_len: u64,
    ) -> Record {
        debug_assert!(object_len <= OBJECT_BYTES_MAX);
        Record {
            id: id.0,
            epoch: epoch.bits(),
            root: 0,
            len_flags: object_len,
            prev: NONE,
            next: NONE,
            until: 0,
            segment: NONE,
            slot: 0,
            block: 0,
            extension: NONE,
            tenant: tenant.0,
            key_len: key_len as u16, // ≤ KEY_BYTES_MAX
            last_use: 0,
        }
    }

    pub(crate) fn id(&self) -> ObjectId {
        ObjectId(self.id)
    }

    pub(crate) fn epoch(&self) -> Epoch {
        Epoch::from_bits(self.epoch).expect("stored epoch is valid")
    }

    pub(crate) fn object_len(&self) -> u64 {
        self.len_flags & LEN_MASK
    }

    pub(crate) fn has(&self, flag: RecordFlag) -> bool {
        self.len_flags >> flag as u32 & 1 == 1
    }

    pub(crate) fn set(&mut self, flag: RecordFlag, on: bool) {
        self.len_flags = self.len_flags & !(1 << flag as u32) | u64::from(on) << flag as u32;
    }

    /// Whether the object takes memory: it is complete or being written.
    pub(crate) fn is_in_memory(&self) -> bool {
        !self.has(RecordFlag::OnDisk)
    }

    pub(crate) fn pin(&self) -> PinClass {
        PinClass::from_number((self.len_flags >> PIN_SHIFT & 3) as u8).expect("stored pin class is valid")
    }

    pub(crate) fn set_pin(&mut self, pin: PinClass) {
        self.len_flags = self.len_flags & !(3 << PIN_SHIFT) | (pin as u64) << PIN_SHIFT;
    }

    pub(crate) fn attributes_len(&self) -> u32 {
        (self.len_flags >> ATTRIBUTES_SHIFT & ATTRIBUTES_MASK) as u32
    }

    /// Sets the length of the attributes. It fits, because attributes have at most 4 KiB.
    pub(crate) fn set_attributes_len(&mut self, len: u32) {
        let len = u64::from(len) & ATTRIBUTES_MASK;
        self.len_flags = self.len_flags & !(ATTRIBUTES_MASK << ATTRIBUTES_SHIFT) | len << ATTRIBUTES_SHIFT;
    }

    pub(crate) fn until(&self) -> Tick {
        Tick(self.until)
    }

    pub(crate) fn set_until(&mut self, until: Tick) {
        self.until = until.0;
    }

    pub(crate) fn location(&self) -> SlotLocation {
        SlotLocation { segment: self.segment, slot: self.slot, block: self.block }
    }

    pub(crate) fn set_location(&mut self, location: SlotLocation) {
        (self.segment, self.slot, self.block) = (location.segment, location.slot, location.block);
    }

    /// Number of the last use; eviction queues are in this order.
    pub(crate) fn last_use(&self) -> UseNumber {
        self.last_use >> 1
    }

    pub(crate) fn set_last_use(&mut self, number: UseNumber) {
        self.last_use = number << 1 | self.last_use & 1;
    }

    /// Whether the object was used after its put, or before an eviction that preceded the put.
    pub(crate) fn is_used_again(&self) -> bool {
        self.last_use & 1 == 1
    }

    pub(crate) fn set_used_again(&mut self, on: bool) {
        self.last_use = self.last_use & !1 | u64::from(on);
    }

    pub(crate) fn tenant(&self) -> TenantIndex {
        TenantIndex(self.tenant)
    }

    pub(crate) fn key_len(&self) -> usize {
        self.key_len.into()
    }

    pub(crate) fn next(&self) -> Option<RecordRef> {
        RecordRef::from_number(self.next)
    }

    pub(crate) fn prev(&self) -> Option<RecordRef> {
        RecordRef::from_number(self.prev)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_types::Term;

    #[test]
    fn record_fields_do_not_overlap() {
        let epoch = Epoch::new(Term::MAX, 7).unwrap();
        let mut record = Record::new(ObjectId([3; 16]), epoch, TenantIndex(9), 64, OBJECT_BYTES_MAX);
        let flags = [
            RecordFlag::Writing,
            RecordFlag::Visited,
            RecordFlag::Digestless,
            RecordFlag::UnderReplicated,
            RecordFlag::Committed,
            RecordFlag::Reported,
            RecordFlag::OnDisk,
            RecordFlag::Offloading,
        ];
        for pin in [PinClass::None, PinClass::Hard, PinClass::Soft] {
            record.set_pin(pin);
            record.set_attributes_len(4096);
            assert_eq!(record.attributes_len(), 4096);
            for flag in flags {
                record.set(flag, true);
                assert_eq!((record.object_len(), record.pin()), (OBJECT_BYTES_MAX, pin));
                assert_eq!(flags.iter().filter(|&&f| record.has(f)).count(), 1);
                record.set(flag, false);
                assert!(!record.has(flag));
            }
        }
        assert_eq!((record.id(), record.epoch(), record.key_len()), (ObjectId([3; 16]), epoch, 64));
        assert!(record.location().is_lost());
        record.set_last_use(5);
        record.set_used_again(true);
        record.set_last_use(7);
        assert_eq!((record.last_use(), record.is_used_again()), (7, true));
        record.set_used_again(false);
        assert_eq!((record.last_use(), record.is_used_again()), (7, false));
    }
}
