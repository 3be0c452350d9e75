//! Responses of GetReplicaList and PutStart: an [`ObjectEntry`] per key, [`Handle`]s for the stripes of its replicas.
//!
//! Both are flat arrays, so that a master fills them without an allocation per key and a client reads them without
//! a copy. The handles of an entry are `handles[first_handle..][..handle_count]`.

use moontide_types::limits::{OBJECT_BYTES_MAX, PAGE_BYTES, REPLICAS_MAX, STRIPES_MAX};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, Medium, NodeId, ObjectId, SegmentId, SlotId, Span,
    TenantGeneration, Term,
};

use crate::capability::Capability;
use crate::layout::RecordError;
use crate::limits::VALID_MS_MAX;

/// Position of a stripe in its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    /// Index of the stripe.
    pub index: u16,
    /// Number of stripes of the object.
    pub count: u16,
    /// Offset of the stripe in the object, in bytes.
    pub offset: u64,
    /// Length of the stripe in bytes.
    pub len: u64,
}

impl Stripe {
    /// Returns whether the rules of record headers hold: index and count in range, offset on a page boundary, stripe
    /// within the object; a single stripe covers the object.
    pub fn fits(&self, object_len: u64) -> bool {
        object_len <= OBJECT_BYTES_MAX
            && self.index < self.count
            && usize::from(self.count) <= STRIPES_MAX
            && self.offset.is_multiple_of(PAGE_BYTES)
            && self.offset.checked_add(self.len).is_some_and(|end| end <= object_len)
            && (self.count > 1 || self.len == object_len)
    }
}

flags! {
    /// Properties of an object.
    pub struct ObjectFlags(u16) {
        /// The object has fewer replicas than requested.
        UNDER_REPLICATED = 0,
        /// The record has no page digests.
        DIGESTLESS = 1,
    }
}

fixed_record! {
    /// Result for one key.
    ///
    /// Invariants: an entry with a code has no replicas; an entry without a code has at least one replica and one
    /// handle. In responses every replica has all of its handles; a Begin carries those of one node.
    pub struct ObjectEntry[64] {
        /// Error code; 0 for success.
        0 code: Option<ErrorCode>,
        /// Properties.
        2 flags: ObjectFlags,
        /// Validity in milliseconds: lease of a lookup, reservation of a put; 0 for none.
        4 valid_ms: u32,
        /// Object id.
        8 id: ObjectId,
        /// Version of the object.
        24 epoch: Epoch,
        /// Length of the object in bytes. With the code `TooLarge`: that of the largest object that fits, or 0.
        32 object_len: u64,
        /// Root digest of the object; 0 in the response of PutStart.
        40 root: u64,
        /// Index of the first handle.
        48 first_handle: u32,
        /// Number of handles.
        52 handle_count: u16,
        /// Number of replicas.
        54 replica_count: u8,
        /// Format of the entry: always 0 so far.
        55 format: u8,
        /// Tenant generation from which the id was computed.
        56 tenant_generation: TenantGeneration,
        /// Number of the id key from which the id was computed.
        60 id_key: u32,
    }
}

impl ObjectEntry {
    /// Creates the entry of a key that failed with `code`.
    pub fn failed(code: ErrorCode, first_handle: u32) -> ObjectEntry {
        ObjectEntry {
            code: Some(code),
            flags: ObjectFlags::NONE,
            valid_ms: 0,
            id: ObjectId([0; 16]),
            epoch: Epoch::ZERO,
            object_len: 0,
            root: 0,
            first_handle,
            handle_count: 0,
            replica_count: 0,
            format: 0,
            tenant_generation: TenantGeneration(0),
            id_key: 0,
        }
    }

    fn check(&self) -> Result<(), RecordError> {
        let (handles, replicas) = (usize::from(self.handle_count), usize::from(self.replica_count));
        Self::rule(self.format == 0, "format = 0")?;
        Self::rule(self.object_len <= OBJECT_BYTES_MAX, "object_len ≤ OBJECT_BYTES_MAX")?;
        Self::rule(self.valid_ms <= VALID_MS_MAX, "valid_ms ≤ VALID_MS_MAX")?;
        Self::rule(replicas <= REPLICAS_MAX, "replica_count ≤ REPLICAS_MAX")?;
        Self::rule(handles <= replicas * STRIPES_MAX, "handle_count ≤ replica_count × STRIPES_MAX")?;
        Self::rule(handles > 0 || replicas == 0, "an object with replicas has a handle")?;
        Self::rule(self.code.is_none() == (replicas > 0), "either a code or replicas")
    }
}

flags! {
    /// Properties of a handle.
    pub struct HandleFlags(u16) {
        /// One-sided reads and writes are allowed.
        ONE_SIDED = 0,
        /// The record has no page digests.
        DIGESTLESS = 1,
        /// A one-sided remote writer had access to the range: verify the digests even for local reads.
        VERIFY = 2,
    }
}

fixed_record! {
    /// Location of one stripe of one replica, with the capability to access it.
    ///
    /// Invariants: the stripe is within limits; in memory its payload lies in its extent; on disk it has no segment,
    /// slot or extent, because the node finds it by (id, epoch, stripe).
    pub struct Handle[96] {
        /// Node that owns the memory or disk.
        0 node: NodeId,
        /// Segment of the slot.
        8 segment: SegmentId,
        /// Slot in the segment.
        12 slot: SlotId,
        /// Generation of the segment.
        16 generation: Generation,
        /// Extent of the slot: first unit `u32`, number of units `u32`.
        24 extent: Extent,
        /// Offset of the payload in the segment.
        32 payload_offset: u64,
        /// Offset of the stripe in the object.
        40 stripe_offset: u64,
        /// Length of the stripe in bytes.
        48 stripe_len: u64,
        /// Root of the stripe's page digests; 0 in the response of PutStart.
        56 stripe_root: u64,
        /// Proof of the access right.
        64 capability: Capability,
        /// Term in which the capability was created.
        80 term: Term,
        /// Index of the stripe.
        84 stripe_index: u16,
        /// Number of stripes of the object.
        86 stripe_count: u16,
        /// Index of the replica.
        88 replica: u8,
        /// Storage medium.
        89 medium: Medium,
        /// Properties.
        90 flags: HandleFlags,
        reserved 92,
    }
}

impl Handle {
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
        // The length of the object is in its entry; a handle alone can only be checked against the maximum.
        let object_len = if self.stripe_count == 1 { self.stripe_len } else { OBJECT_BYTES_MAX };
        Self::rule(self.stripe().fits(object_len), "the stripe is in bounds")?;
        Self::rule(usize::from(self.replica) < REPLICAS_MAX, "replica < REPLICAS_MAX")?;
        let no_slot = self.segment.0 == 0
            && self.slot.0 == 0
            && self.generation.0 == 0
            && self.extent == Extent::default()
            && self.payload_offset == 0;
        if self.medium == Medium::Disk {
            return Self::rule(no_slot, "a disk handle names no slot");
        }
        let payload = Span::new(self.payload_offset, self.stripe_len);
        Self::rule(self.extent.units > 0, "extent.units > 0")?;
        Self::rule(payload.is_some_and(|p| self.extent.span().contains(p)), "the payload lies in the extent")
    }
}
