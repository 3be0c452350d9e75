//! [`Record`]: what a group remembers of one object, in 72 bytes; its key stands behind it.
//!
//! ```text
//!   id 16 │ epoch 8 │ root 8 │ length:41, flags:10, attributes:13 8 │ prev 4 │ next 4 │ until 4
//!   segment 4 │ slot 4 │ block 4 │ extra 4 │ tenant 2 │ key length 2
//! ```
//!
//! Some fields change their meaning with the object's life, because every 8 bytes here are 80 MB with ten million
//! objects:
//!
//! | field | while writing | when complete |
//! |---|---|---|
//! | `root` | the caller that owns the reservation | the root digest |
//! | `until` | when the reservation ends | when the longest lease ends |
//! | `prev`, `next` | the queue of reservations | the eviction queue of its tenant and class, or that of offloads |
//!
//! The first place of the bytes stands in the record. Objects with more places, stripes or attributes have an
//! [`Extra`](crate::extra::Extra).

use moontide_types::bounds::OBJECT_BYTES_MAX;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ObjectId};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::slab::Ref;
use crate::tenant::TenantIx;
use crate::time::Tick;

/// One object. All integers in the machine's order: nothing of it leaves the process.
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
    pub(crate) extra: u32,
    tenant: u16,
    key_len: u16,
}

pub(crate) const RECORD_BYTES: usize = size_of::<Record>();
const _: () = assert!(RECORD_BYTES == 72);

/// 1 TiB itself is a length, hence one bit more than 40.
const LEN_BITS: u32 = 41;
const LEN_MASK: u64 = (1 << LEN_BITS) - 1;
const _: () = assert!(OBJECT_BYTES_MAX <= LEN_MASK);

/// No such segment, no such record, nothing extra.
pub(crate) const NONE: u32 = u32::MAX;

/// Single bits behind the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Flag {
    /// Reserved or being written; otherwise complete.
    Writing = LEN_BITS,
    /// Used since the eviction hand came by.
    Visited = LEN_BITS + 1,
    /// Without digests.
    Digestless = LEN_BITS + 2,
    /// Fewer replicas than asked for.
    Fewer = LEN_BITS + 3,
    /// A node reported the record's own place as READY.
    Committed = LEN_BITS + 4,
    /// Brought by a report: its places stand in the order in which they came, and nobody owns its reservation.
    Reported = LEN_BITS + 5,
    /// Complete, and nowhere but on disks.
    OnDisk = LEN_BITS + 6,
    /// Nodes have been told to write it to their disks.
    Offloading = LEN_BITS + 7,
}

/// Two bits of pin class above the single ones.
const PIN_SHIFT: u32 = LEN_BITS + 8;
/// Above these the length of the attributes in the record, of objects that are on a disk: what comes back needs as much
/// room as it had.
const ATTRIBUTES_SHIFT: u32 = PIN_SHIFT + 2;
const ATTRIBUTES_MASK: u64 = (1 << 13) - 1;
const _: () = assert!(ATTRIBUTES_SHIFT + 13 <= 64);

/// Where one stripe of one replica is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Index of the segment in the group's table; [`NONE`] if the place was lost.
    pub(crate) segment: u32,
    pub(crate) slot: u32,
    /// The allocator's block; while the segment reports, the position among its reported extents.
    pub(crate) block: u32,
}

impl Place {
    pub(crate) const LOST: Place = Place { segment: NONE, slot: 0, block: 0 };

    pub(crate) fn is_lost(self) -> bool {
        self.segment == NONE
    }
}

impl Record {
    /// An object of which nothing but its name is known.
    pub(crate) fn new(
        id: ObjectId,
        epoch: Epoch,
        tenant: TenantIx,
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
            extra: NONE,
            tenant: tenant.0,
            key_len: key_len as u16, // ≤ KEY_BYTES_MAX
        }
    }

    pub(crate) fn id(&self) -> ObjectId {
        ObjectId(self.id)
    }

    pub(crate) fn epoch(&self) -> Epoch {
        Epoch::from_bits(self.epoch).expect("an epoch was stored")
    }

    pub(crate) fn object_len(&self) -> u64 {
        self.len_flags & LEN_MASK
    }

    pub(crate) fn has(&self, flag: Flag) -> bool {
        self.len_flags >> flag as u32 & 1 == 1
    }

    pub(crate) fn set(&mut self, flag: Flag, on: bool) {
        self.len_flags = self.len_flags & !(1 << flag as u32) | u64::from(on) << flag as u32;
    }

    pub(crate) fn pin(&self) -> PinClass {
        PinClass::from_number((self.len_flags >> PIN_SHIFT & 3) as u8).expect("a pin class was stored")
    }

    pub(crate) fn set_pin(&mut self, pin: PinClass) {
        self.len_flags = self.len_flags & !(3 << PIN_SHIFT) | (pin as u64) << PIN_SHIFT;
    }

    pub(crate) fn attributes_len(&self) -> u32 {
        (self.len_flags >> ATTRIBUTES_SHIFT & ATTRIBUTES_MASK) as u32
    }

    /// Attributes have at most 4 KiB, so that their length fits.
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

    pub(crate) fn place(&self) -> Place {
        Place { segment: self.segment, slot: self.slot, block: self.block }
    }

    pub(crate) fn set_place(&mut self, place: Place) {
        (self.segment, self.slot, self.block) = (place.segment, place.slot, place.block);
    }

    pub(crate) fn tenant(&self) -> TenantIx {
        TenantIx(self.tenant)
    }

    pub(crate) fn key_len(&self) -> usize {
        self.key_len.into()
    }

    pub(crate) fn next(&self) -> Option<Ref> {
        Ref::from_number(self.next)
    }

    pub(crate) fn prev(&self) -> Option<Ref> {
        Ref::from_number(self.prev)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_types::Term;

    #[test]
    fn bits_do_not_touch_each_other() {
        let epoch = Epoch::new(Term::MAX, 7).unwrap();
        let mut record = Record::new(ObjectId([3; 16]), epoch, TenantIx(9), 64, OBJECT_BYTES_MAX);
        let flags = [
            Flag::Writing,
            Flag::Visited,
            Flag::Digestless,
            Flag::Fewer,
            Flag::Committed,
            Flag::Reported,
            Flag::OnDisk,
            Flag::Offloading,
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
        assert!(record.place().is_lost());
    }
}
