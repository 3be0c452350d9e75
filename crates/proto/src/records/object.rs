//! Answers of GetReplicaList and PutStart: an [`ObjectEntry`] per key, [`Handle`]s for its replicas' stripes.
//!
//! Both are flat arrays so that a master fills them without allocating per key and a client reads them in
//! place. An entry names its handles by position: `handles[first_handle..][..handle_count]`.

use moontide_types::bounds::{OBJECT_BYTES_MAX, PAGE_BYTES, REPLICAS_MAX, STRIPES_MAX};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, NodeId, ObjectId, SegmentId, SlotId, Span, TenantGeneration, Term,
};

use crate::capability::Capability;
use crate::layout::RecordError;
use crate::limits::WINDOW_MS_MAX;

numbered! {
    /// Where bytes are. The numbers are those of the protobuf enum.
    pub enum Medium(u8) {
        /// A node's memory.
        Memory = 1,
        /// A GPU's memory.
        Device = 2,
        /// A node's disk.
        Disk = 3,
    }
}

/// Which part of an object a stripe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    /// Which one.
    pub index: u16,
    /// Of how many.
    pub count: u16,
    /// Where it starts in the object.
    pub offset: u64,
    /// Its length.
    pub len: u64,
}

impl Stripe {
    /// The rule of record headers: in bounds, on a page boundary, within the object; a lone stripe is all of it.
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
    /// What else is to be known about an object.
    pub struct ObjectFlags(u16) {
        /// Fewer replicas than asked for.
        FEWER_REPLICAS = 0,
        /// Without digests.
        DIGESTLESS = 1,
    }
}

fixed_record! {
    /// One key's answer.
    ///
    /// Invariants: with a code there are no replicas; without one there is at least one, and a handle. In
    /// answers every replica has all of its handles; a Begin carries those of one node.
    pub struct ObjectEntry[64] {
        /// Why there is nothing; 0 if there is something.
        0 code: Option<ErrorCode>,
        /// What else is to be known.
        2 flags: ObjectFlags,
        /// How long the promise holds in milliseconds: lease of a lookup, reservation of a put; 0 for none.
        4 window_ms: u32,
        /// The object's id.
        8 id: ObjectId,
        /// Its version.
        24 epoch: Epoch,
        /// Its length.
        32 object_len: u64,
        /// Its root digest; 0 in the answer of PutStart.
        40 root: u64,
        /// Position of its first handle.
        48 first_handle: u32,
        /// How many handles it has.
        52 handle_count: u16,
        /// How many replicas it has.
        54 replica_count: u8,
        /// Zero: there is only one form of an entry so far.
        55 form: u8,
        /// Generation of the tenant that went into the id.
        56 tenant_generation: TenantGeneration,
        /// Number of the id key that made the id.
        60 id_key: u32,
    }
}

impl ObjectEntry {
    /// The answer for a key of which there is nothing to tell but a code.
    pub fn failed(code: ErrorCode, first_handle: u32) -> ObjectEntry {
        ObjectEntry {
            code: Some(code),
            flags: ObjectFlags::NONE,
            window_ms: 0,
            id: ObjectId([0; 16]),
            epoch: Epoch::ZERO,
            object_len: 0,
            root: 0,
            first_handle,
            handle_count: 0,
            replica_count: 0,
            form: 0,
            tenant_generation: TenantGeneration(0),
            id_key: 0,
        }
    }

    fn check(&self) -> Result<(), RecordError> {
        let (handles, replicas) = (usize::from(self.handle_count), usize::from(self.replica_count));
        Self::rule(self.form == 0, "form = 0")?;
        Self::rule(self.object_len <= OBJECT_BYTES_MAX, "object_len ≤ OBJECT_BYTES_MAX")?;
        Self::rule(self.window_ms <= WINDOW_MS_MAX, "window_ms ≤ WINDOW_MS_MAX")?;
        Self::rule(replicas <= REPLICAS_MAX, "replica_count ≤ REPLICAS_MAX")?;
        Self::rule(handles <= replicas * STRIPES_MAX, "handle_count ≤ replica_count × STRIPES_MAX")?;
        Self::rule(handles > 0 || replicas == 0, "an object with replicas has a handle")?;
        Self::rule(self.code.is_none() == (replicas > 0), "either a code or replicas")
    }
}

flags! {
    /// What else is to be known about a handle.
    pub struct HandleFlags(u16) {
        /// May be read and written one-sidedly.
        ONE_SIDED = 0,
        /// Without digests.
        DIGESTLESS = 1,
        /// A one-sided remote writer had access to the range: verify even in place.
        VERIFY = 2,
    }
}

fixed_record! {
    /// One stripe of one replica, and the right to use it.
    ///
    /// Invariants: the stripe is in bounds; in memory its payload lies in its extent; on disk it has no
    /// segment, slot or extent, because the node finds it by (id, epoch, stripe).
    pub struct Handle[96] {
        /// Whose memory or disk.
        0 node: NodeId,
        /// The segment.
        8 segment: SegmentId,
        /// The slot.
        12 slot: SlotId,
        /// Which incarnation of the segment.
        16 generation: Generation,
        /// The slot's extent: first unit `u32`, number of units `u32`.
        24 extent: Extent,
        /// Where the payload starts in the segment.
        32 payload_offset: u64,
        /// Where the stripe starts in the object.
        40 stripe_offset: u64,
        /// Its length.
        48 stripe_len: u64,
        /// Root of its page digests; 0 in the answer of PutStart.
        56 stripe_root: u64,
        /// Proof that the caller may.
        64 capability: Capability,
        /// The term in which the capability was made.
        80 term: Term,
        /// Which stripe.
        84 stripe_index: u16,
        /// Of how many.
        86 stripe_count: u16,
        /// Which replica.
        88 replica: u8,
        /// Memory, device or disk.
        89 medium: Medium,
        /// What else is to be known.
        90 flags: HandleFlags,
        spare 92,
    }
}

impl Handle {
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
        // The object's length stands in its entry; alone, a handle can only be held against the largest.
        let object_len = if self.stripe_count == 1 { self.stripe_len } else { OBJECT_BYTES_MAX };
        Self::rule(self.stripe().fits(object_len), "the stripe is in bounds")?;
        Self::rule(usize::from(self.replica) < REPLICAS_MAX, "replica < REPLICAS_MAX")?;
        let nowhere = self.segment.0 == 0
            && self.slot.0 == 0
            && self.generation.0 == 0
            && self.extent == Extent::default()
            && self.payload_offset == 0;
        if self.medium == Medium::Disk {
            return Self::rule(nowhere, "a disk handle names no slot");
        }
        let payload = Span::new(self.payload_offset, self.stripe_len);
        Self::rule(self.extent.units > 0, "extent.units > 0")?;
        Self::rule(payload.is_some_and(|p| self.extent.span().contains(p)), "the payload lies in the extent")
    }
}
