//! Reports of a node: [`ReportRecord`] for a slot of a segment, [`OffloadRecord`] for a record on disk.
//!
//! Keys, tenants and attributes are in separate fields (see `ReportChunk` and `OffloadNotice`), so that the records
//! have a fixed size and a master ingests them at memory speed.

use moontide_types::limits::OBJECT_BYTES_MAX;
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Extent, ObjectId, SlotId, Span, TenantGeneration};

use crate::layout::RecordError;
use crate::records::object::Stripe;

flags! {
    /// Properties of a reported slot.
    pub struct ReportFlags(u16) {
        /// The record has no page digests.
        DIGESTLESS = 0,
        /// A one-sided remote writer has or had access to the range.
        ONE_SIDED = 1,
        /// The slot was read since the node started.
        TOUCHED = 2,
    }
}

fixed_record! {
    /// State of one slot: the same record for snapshots and for deltas. The state is in the word.
    ///
    /// Invariants: the stripe is within limits; unless FREE, the payload lies in the extent. A FREE record reports that
    /// the slot is free from this epoch on; only slot and word are set, the rest is zero.
    pub struct ReportRecord[96] {
        /// Slot in the segment.
        0 slot: SlotId,
        /// Index of the tenant in the table of the message.
        4 tenant: u16,
        /// Properties.
        6 flags: ReportFlags,
        /// Extent of the slot: first unit `u32`, number of units `u32`.
        8 extent: Extent,
        /// Version and state.
        16 word: Word,
        /// Object id.
        24 id: ObjectId,
        /// Length of the object in bytes.
        40 object_len: u64,
        /// Root of the stripe's page digests; 0 while WRITING.
        48 root: u64,
        /// Offset of the stripe in the object.
        56 stripe_offset: u64,
        /// Length of the stripe in bytes.
        64 stripe_len: u64,
        /// Offset of the payload in the segment.
        72 payload_offset: u64,
        /// Index of the stripe.
        80 stripe_index: u16,
        /// Number of stripes of the object.
        82 stripe_count: u16,
        /// Number of the id key from which the id was computed.
        84 id_key: u32,
        /// Tenant generation from which the id was computed.
        88 tenant_generation: TenantGeneration,
        reserved 92,
    }
}

impl ReportRecord {
    /// Creates the record of a slot that is free from this epoch on.
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

    /// Returns the position of the stripe in the object. Meaningless for a FREE record.
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
            let only_epoch = *self == ReportRecord::free(self.slot, self.word.epoch());
            return Self::rule(only_epoch, "a FREE record has only slot and epoch");
        }
        let payload = Span::new(self.payload_offset, self.stripe_len);
        Self::rule(self.stripe().fits(self.object_len), "the stripe is in bounds")?;
        Self::rule(self.extent.units > 0, "extent.units > 0")?;
        Self::rule(payload.is_some_and(|p| self.extent.span().contains(p)), "the payload lies in the extent")
    }
}

flags! {
    /// Properties of a record on disk.
    pub struct OffloadFlags(u16) {
        /// The record has no page digests.
        DIGESTLESS = 0,
        /// The object was in the node's memory when the node was stopped.
        WAS_IN_MEMORY = 1,
    }
}

fixed_record! {
    /// One record on a node's disk. Readers identify it by (id, epoch, stripe); the location is for operators and for
    /// the master's accounting.
    pub struct OffloadRecord[96] {
        /// Object id.
        0 id: ObjectId,
        /// Version of the object.
        16 epoch: Epoch,
        /// Length of the object in bytes.
        24 object_len: u64,
        /// Offset of the stripe in the object.
        32 stripe_offset: u64,
        /// Length of the stripe in bytes.
        40 stripe_len: u64,
        /// Root of the stripe's page digests.
        48 root: u64,
        /// Number of the bucket or file.
        56 bucket: u64,
        /// Offset of the record in the bucket or file.
        64 offset: u64,
        /// Size of the record on disk in bytes.
        72 disk_len: u64,
        /// Index of the stripe.
        80 stripe_index: u16,
        /// Number of stripes of the object.
        82 stripe_count: u16,
        /// Number of the id key from which the id was computed.
        84 id_key: u32,
        /// Tenant generation from which the id was computed.
        88 tenant_generation: TenantGeneration,
        /// Index of the tenant in the table of the message.
        92 tenant: u16,
        /// Properties.
        94 flags: OffloadFlags,
    }
}

impl OffloadRecord {
    /// Returns the position of the stripe in the object.
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
        Self::rule(Span::new(self.offset, self.disk_len).is_some(), "offset + disk_len fits in 64 bits")?;
        // A record consists of header, payload, digests and trailer: never more than twice the largest object.
        Self::rule(self.disk_len <= 2 * OBJECT_BYTES_MAX, "disk_len ≤ 2 × OBJECT_BYTES_MAX")?;
        Self::rule(self.disk_len >= self.stripe_len, "the payload fits in the record")
    }
}
