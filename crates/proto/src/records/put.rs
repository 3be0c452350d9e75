//! Records of a put: [`PutEntry`] starts it at the master, [`CommitEntry`] publishes or aborts a slot at the node,
//! [`PutEndEntry`] ends it at the master, [`VersionedId`] revokes it.

use moontide_types::limits::{OBJECT_BYTES_MAX, REPLICAS_MAX, STRIPES_MAX};
use moontide_types::{Epoch, ErrorCode, Generation, ObjectId, SegmentId, SlotId, Term};

use crate::capability::{AccessRight, Capability, CapabilityScope};
use crate::layout::{FieldValue, RecordError, code_from_number, code_number};
use crate::limits::CONFIGS_MAX;

fixed_record! {
    /// One object of a PutStart.
    ///
    /// Invariants: `len ≤ OBJECT_BYTES_MAX`, `config < CONFIGS_MAX`.
    pub struct PutEntry[16] {
        /// Length of the object in bytes.
        0 len: u64,
        /// Index of its configuration in the request.
        8 config: u16,
        reserved 10,
    }
}

impl PutEntry {
    fn check(&self) -> Result<(), RecordError> {
        Self::rule(self.len <= OBJECT_BYTES_MAX, "len ≤ OBJECT_BYTES_MAX")?;
        Self::rule(usize::from(self.config) < CONFIGS_MAX, "config < CONFIGS_MAX")
    }
}

fixed_record! {
    /// One version of one object.
    pub struct VersionedId[24] {
        /// Object id.
        0 id: ObjectId,
        /// Version of the object.
        16 epoch: Epoch,
        }
}

impl VersionedId {
    fn check(&self) -> Result<(), RecordError> {
        Ok(())
    }
}

/// One outcome per replica; those after the replica count are `None`.
impl FieldValue for [Option<ErrorCode>; REPLICAS_MAX] {
    const BYTES: usize = 2 * REPLICAS_MAX;
    fn write_to(&self, out: &mut [u8]) {
        for (code, out) in self.iter().zip(out.chunks_exact_mut(2)) {
            code_number(code).write_to(out);
        }
    }
    fn read_from(bytes: &[u8]) -> Result<Self, u64> {
        let mut codes = [None; REPLICAS_MAX];
        for (code, bytes) in codes.iter_mut().zip(bytes.chunks_exact(2)) {
            let number = u16::read_from(bytes)?;
            *code = code_from_number(number).ok_or(u64::from(number))?;
        }
        Ok(codes)
    }
}

flags! {
    /// Options of the end of a put.
    pub struct PutEndFlags(u8) {
        /// The put may replace an existing version. It is `Pending` while an unreachable node may return with that version.
        REPLACES = 0,
    }
}

fixed_record! {
    /// Outcome of the write of one object. A replica succeeds only if all of its stripes were written.
    ///
    /// Invariants: `1 ≤ replica_count ≤ REPLICAS_MAX`, `1 ≤ stripe_count ≤ STRIPES_MAX`, no outcome after the replica
    /// count.
    pub struct PutEndEntry[56] {
        /// Object id.
        0 id: ObjectId,
        /// Version from PutStart.
        16 epoch: Epoch,
        /// Root digest of the object.
        24 root: u64,
        /// Outcome per replica, `u16` each.
        32 outcomes: [Option<ErrorCode>; REPLICAS_MAX],
        /// Number of replicas.
        48 replica_count: u8,
        /// Options.
        49 flags: PutEndFlags,
        /// Number of stripes; with more than one, their roots follow in the message.
        50 stripe_count: u16,
        reserved 52,
    }
}

impl PutEndEntry {
    fn check(&self) -> Result<(), RecordError> {
        let replicas = usize::from(self.replica_count);
        Self::rule((1..=REPLICAS_MAX).contains(&replicas), "1 ≤ replica_count ≤ REPLICAS_MAX")?;
        Self::rule(
            (1..=STRIPES_MAX).contains(&usize::from(self.stripe_count)),
            "1 ≤ stripe_count ≤ STRIPES_MAX",
        )?;
        Self::rule(self.outcomes[replicas..].iter().all(Option::is_none), "no outcome beyond the replicas")
    }
}

flags! {
    /// Options of a commit.
    pub struct CommitFlags(u16) {
        /// Abort the slot instead of publishing it.
        ABORT = 0,
    }
}

fixed_record! {
    /// Publishes or aborts one slot.
    pub struct CommitEntry[72] {
        /// Object id.
        0 id: ObjectId,
        /// Version of the object.
        16 epoch: Epoch,
        /// Generation of the segment.
        24 generation: Generation,
        /// Segment of the slot.
        32 segment: SegmentId,
        /// Slot in the segment.
        36 slot: SlotId,
        /// Root of the stripe's page digests.
        40 root: u64,
        /// Proof of the access right: the capability of the handle.
        48 capability: Capability,
        /// Term in which the capability was created.
        64 term: Term,
        /// Options.
        68 flags: CommitFlags,
        reserved 70,
    }
}

impl CommitEntry {
    /// Returns the scope for which the capability must be signed. `stripe` is that of the record in the slot.
    pub fn capability_scope(&self, stripe: u16, right: AccessRight) -> CapabilityScope {
        let CommitEntry { segment, generation, slot, term, epoch, id, .. } = *self;
        CapabilityScope { right, stripe, segment, generation, slot, term, epoch, id }
    }

    fn check(&self) -> Result<(), RecordError> {
        Ok(())
    }
}
