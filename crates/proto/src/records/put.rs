//! How a put starts, [`PutEntry`], and ends: [`PutEndEntry`] to the master, [`CommitEntry`] to the node, [`VersionedId`] to give it up.

use moontide_types::bounds::{OBJECT_BYTES_MAX, REPLICAS_MAX, STRIPES_MAX};
use moontide_types::{Epoch, ErrorCode, Generation, ObjectId, SegmentId, SlotId, Term};

use crate::capability::Capability;
use crate::layout::{FieldValue, RecordError, code_from_number, code_number};
use crate::limits::CONFIGS_MAX;

fixed_record! {
    /// One object to be put.
    ///
    /// Invariants: `len ≤ OBJECT_BYTES_MAX`, `config < CONFIGS_MAX`.
    pub struct PutEntry[16] {
        /// Its length.
        0 len: u64,
        /// Index into the request's configurations.
        8 config: u16,
        spare 10,
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
        /// The object.
        0 id: ObjectId,
        /// The version.
        16 epoch: Epoch,
    }
}

impl VersionedId {
    fn check(&self) -> Result<(), RecordError> {
        Ok(())
    }
}

/// One outcome per replica; those beyond the replica count are `None`.
impl FieldValue for [Option<ErrorCode>; REPLICAS_MAX] {
    const BYTES: usize = 2 * REPLICAS_MAX;
    fn put(&self, out: &mut [u8]) {
        for (code, out) in self.iter().zip(out.chunks_exact_mut(2)) {
            code_number(code).put(out);
        }
    }
    fn take(bytes: &[u8]) -> Result<Self, u64> {
        let mut codes = [None; REPLICAS_MAX];
        for (code, bytes) in codes.iter_mut().zip(bytes.chunks_exact(2)) {
            let number = u16::take(bytes)?;
            *code = code_from_number(number).ok_or(u64::from(number))?;
        }
        Ok(codes)
    }
}

fixed_record! {
    /// How the writing of one object went. A replica counts only if all of its stripes were written.
    ///
    /// Invariants: `1 ≤ replica_count ≤ REPLICAS_MAX`, `1 ≤ stripe_count ≤ STRIPES_MAX`, no outcome beyond the
    /// replica count.
    pub struct PutEndEntry[56] {
        /// The object.
        0 id: ObjectId,
        /// The version that PutStart gave.
        16 epoch: Epoch,
        /// Its root digest.
        24 root: u64,
        /// Outcome per replica, `u16` each.
        32 outcomes: [Option<ErrorCode>; REPLICAS_MAX],
        /// How many replicas there are.
        48 replica_count: u8,
        /// Zero: there is only one form of an entry so far.
        49 form: u8,
        /// How many stripes; with more than one their roots follow in the message.
        50 stripe_count: u16,
        spare 52,
    }
}

impl PutEndEntry {
    fn check(&self) -> Result<(), RecordError> {
        let replicas = usize::from(self.replica_count);
        Self::rule(self.form == 0, "form = 0")?;
        Self::rule((1..=REPLICAS_MAX).contains(&replicas), "1 ≤ replica_count ≤ REPLICAS_MAX")?;
        Self::rule(
            (1..=STRIPES_MAX).contains(&usize::from(self.stripe_count)),
            "1 ≤ stripe_count ≤ STRIPES_MAX",
        )?;
        Self::rule(self.outcomes[replicas..].iter().all(Option::is_none), "no outcome beyond the replicas")
    }
}

flags! {
    /// How a slot is to be finished.
    pub struct CommitFlags(u16) {
        /// Abandon it instead.
        ABORT = 0,
    }
}

fixed_record! {
    /// Publishes or abandons one slot.
    pub struct CommitEntry[72] {
        /// The object.
        0 id: ObjectId,
        /// The version.
        16 epoch: Epoch,
        /// Which incarnation of the segment.
        24 generation: Generation,
        /// The segment.
        32 segment: SegmentId,
        /// The slot.
        36 slot: SlotId,
        /// Root of the stripe's page digests.
        40 root: u64,
        /// Proof that the caller may: the handle's.
        48 capability: Capability,
        /// The term in which the capability was made.
        64 term: Term,
        /// Publish or abandon.
        68 flags: CommitFlags,
        spare 70,
    }
}

impl CommitEntry {
    fn check(&self) -> Result<(), RecordError> {
        Ok(())
    }
}
