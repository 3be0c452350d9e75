//! What a node has: [`ReportRecord`] for a slot of a segment, [`OffloadRecord`] for a record on disk.
//!
//! Keys, tenants and attributes travel beside the records (see `ReportChunk` and `OffloadNotice`), so that the
//! records have a fixed size and a master ingests them at memory speed.

use moontide_types::bounds::OBJECT_BYTES_MAX;
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Extent, ObjectId, SlotId, Span, TenantGeneration};

use crate::layout::RecordError;
use crate::records::object::Stripe;

flags! {
    /// What else is to be known about a reported slot.
    pub struct ReportFlags(u16) {
        /// Without digests.
        DIGESTLESS = 0,
        /// A one-sided remote writer has or had access to the range.
        ONE_SIDED = 1,
        /// Read since the node started.
        TOUCHED = 2,
    }
}

fixed_record! {
    /// One slot as it is: the same record for a snapshot and for a change since. The state is in the word.
    ///
    /// Invariants: the stripe is in bounds; unless FREE, the payload lies in the extent. A FREE record says
    /// that the slot is free from this epoch on; nothing but slot and word counts, the rest is zero.
    pub struct ReportRecord[96] {
        /// The slot.
        0 slot: SlotId,
        /// Index of the tenant in the message's table.
        4 tenant: u16,
        /// What else is to be known.
        6 flags: ReportFlags,
        /// The slot's extent: first unit `u32`, number of units `u32`.
        8 extent: Extent,
        /// Version and state.
        16 word: Word,
        /// The object.
        24 id: ObjectId,
        /// Its length.
        40 object_len: u64,
        /// Root of the stripe's page digests; 0 while WRITING.
        48 root: u64,
        /// Where the stripe starts in the object.
        56 stripe_offset: u64,
        /// Its length.
        64 stripe_len: u64,
        /// Where the payload starts in the segment.
        72 payload_offset: u64,
        /// Which stripe.
        80 stripe_index: u16,
        /// Of how many.
        82 stripe_count: u16,
        /// Number of the id key that made the id.
        84 id_key: u32,
        /// Generation of the tenant that went into the id.
        88 tenant_generation: TenantGeneration,
        spare 92,
    }
}

impl ReportRecord {
    /// The record of a slot that is free from this epoch on.
    pub fn free(slot: SlotId, epoch: Epoch) -> ReportRecord {
        ReportRecord {
            slot,
            tenant: 0,
            flags: ReportFlags::NONE,
            extent: Extent::default(),
            word: Word::new(epoch, State::Free),
            id: ObjectId([0; 16]),
            object_len: 0,
            root: 0,
            stripe_offset: 0,
            stripe_len: 0,
            payload_offset: 0,
            stripe_index: 0,
            stripe_count: 0,
            id_key: 0,
            tenant_generation: TenantGeneration(0),
        }
    }

    /// Which part of the object it is. Meaningless for a FREE record.
    pub fn stripe(&self) -> Stripe {
        Stripe {
            index: self.stripe_index,
            count: self.stripe_count,
            offset: self.stripe_offset,
            len: self.stripe_len,
        }
    }

    fn check(&self) -> Result<(), RecordError> {
        if self.word.state() == State::Free {
            let bare = *self == ReportRecord::free(self.slot, self.word.epoch());
            return Self::rule(bare, "a free slot has nothing but its epoch");
        }
        let payload = Span::new(self.payload_offset, self.stripe_len);
        Self::rule(self.stripe().fits(self.object_len), "the stripe is in bounds")?;
        Self::rule(self.extent.units > 0, "extent.units > 0")?;
        Self::rule(payload.is_some_and(|p| self.extent.span().contains(p)), "the payload lies in the extent")
    }
}

flags! {
    /// What else is to be known about a record on disk.
    pub struct OffloadFlags(u16) {
        /// Without digests.
        DIGESTLESS = 0,
    }
}

fixed_record! {
    /// One record on a node's disk. Readers name it by (id, epoch, stripe); the place is for operators and
    /// for the master's accounting.
    pub struct OffloadRecord[96] {
        /// The object.
        0 id: ObjectId,
        /// The version.
        16 epoch: Epoch,
        /// The object's length.
        24 object_len: u64,
        /// Where the stripe starts in the object.
        32 stripe_offset: u64,
        /// Its length.
        40 stripe_len: u64,
        /// Root of its page digests.
        48 root: u64,
        /// Bucket or file.
        56 bucket: u64,
        /// Where the record starts in it.
        64 offset: u64,
        /// Bytes that the record takes on disk.
        72 disk_len: u64,
        /// Which stripe.
        80 stripe_index: u16,
        /// Of how many.
        82 stripe_count: u16,
        /// Number of the id key that made the id.
        84 id_key: u32,
        /// Generation of the tenant that went into the id.
        88 tenant_generation: TenantGeneration,
        /// Index of the tenant in the message's table.
        92 tenant: u16,
        /// What else is to be known.
        94 flags: OffloadFlags,
    }
}

impl OffloadRecord {
    /// Which part of the object it is.
    pub fn stripe(&self) -> Stripe {
        Stripe {
            index: self.stripe_index,
            count: self.stripe_count,
            offset: self.stripe_offset,
            len: self.stripe_len,
        }
    }

    fn check(&self) -> Result<(), RecordError> {
        Self::rule(self.stripe().fits(self.object_len), "the stripe is in bounds")?;
        Self::rule(Span::new(self.offset, self.disk_len).is_some(), "the record has an end")?;
        // A record is its payload, header, digests and trailer: never more than twice the largest object.
        Self::rule(self.disk_len <= 2 * OBJECT_BYTES_MAX, "disk_len ≤ 2 × OBJECT_BYTES_MAX")?;
        Self::rule(self.disk_len >= self.stripe_len, "the payload fits in the record")
    }
}
