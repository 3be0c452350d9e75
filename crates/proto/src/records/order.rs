//! What a master tells a node to do: [`Order`], and what became of it: [`OrderResult`].
//!
//! Orders are idempotent and name the epoch they mean, so that a repeated or late one does no harm. One flat
//! form serves all kinds; fields that a kind does not use are zero, which the decoder insists on.

use moontide_types::bounds::{LEASE_MS_MAX, STRIPES_MAX};
use moontide_types::record::Word;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, ObjectId, SegmentId, SlotId, Span, Term,
};

use crate::layout::RecordError;

numbered! {
    /// What is to be done.
    pub enum OrderKind(u16) {
        /// READY → DEAD: no new readers. Uses slot, epoch, id.
        Kill = 1,
        /// DEAD → FREE once no ledger names the slot. Uses slot, epoch, id.
        Reclaim = 2,
        /// FREE → FREE of a higher epoch: a late Begin of this epoch is refused. Uses slot, epoch.
        Burn = 3,
        /// Write the record to disk while the lease lasts. Uses slot, epoch, id, lease.
        Offload = 4,
        /// Bring a record from disk into a slot. Uses slot, extent, payload offset, epoch, id, stripe, lease.
        Promote = 5,
        /// Remove a version from disk. Uses epoch, id; no segment.
        DropDisk = 6,
        /// Adopt the order's term and group for the segment, snapshot it and report. Uses group.
        AdoptTerm = 7,
        /// Let nobody begin in the segment any more.
        Drain = 8,
        /// Verify a record against its digests. Uses slot, epoch, id.
        Scrub = 9,
    }
}

flags! {
    /// How it is to be done.
    pub struct OrderFlags(u16) {
        /// A tombstone (id, version) must be durable before the order counts as done.
        TOMBSTONE = 0,
    }
}

fixed_record! {
    /// One order.
    pub struct Order[80] {
        /// Number by which the result refers to it; rises within a session.
        0 order: u64,
        /// What to do.
        8 kind: OrderKind,
        /// How.
        10 flags: OrderFlags,
        /// The segment.
        12 segment: SegmentId,
        /// Which incarnation of it.
        16 generation: Generation,
        /// The slot.
        24 slot: SlotId,
        /// The term of the master that orders it.
        28 term: Term,
        /// The version.
        32 epoch: Epoch,
        /// The object.
        40 id: ObjectId,
        /// How long the object is kept for it, in milliseconds.
        56 lease_ms: u32,
        /// Which stripe.
        60 stripe: u16,
        /// The group that the segment is granted to.
        62 group: GroupId,
        /// The slot's extent: first unit `u32`, number of units `u32`.
        64 extent: Extent,
        /// Where the payload starts in the segment.
        72 payload_offset: u64,
    }
}

impl Order {
    /// An order of this kind with everything else zero, to be filled in.
    pub fn new(order: u64, kind: OrderKind, term: Term) -> Order {
        Order {
            order,
            kind,
            flags: OrderFlags::NONE,
            segment: SegmentId(0),
            generation: Generation(0),
            slot: SlotId(0),
            term,
            epoch: Epoch::ZERO,
            id: ObjectId([0; 16]),
            lease_ms: 0,
            stripe: 0,
            group: GroupId(0),
            extent: Extent::default(),
            payload_offset: 0,
        }
    }

    fn check(&self) -> Result<(), RecordError> {
        use OrderKind::*;
        // The order with only those fields that its kind uses: nothing else may differ from it.
        let mut used = Order::new(self.order, self.kind, self.term);
        if self.kind != DropDisk {
            (used.segment, used.generation) = (self.segment, self.generation);
        }
        if matches!(self.kind, Kill | Reclaim | Burn | Offload | Promote | Scrub) {
            (used.slot, used.epoch) = (self.slot, self.epoch);
        }
        if matches!(self.kind, Kill | Reclaim | Offload | Promote | Scrub | DropDisk) {
            (used.id, used.epoch) = (self.id, self.epoch);
        }
        if matches!(self.kind, Offload | Promote) {
            used.lease_ms = self.lease_ms;
        }
        if matches!(self.kind, Kill | DropDisk) {
            used.flags = self.flags;
        }
        if self.kind == Promote {
            (used.stripe, used.extent, used.payload_offset) = (self.stripe, self.extent, self.payload_offset);
        }
        if self.kind == AdoptTerm {
            used.group = self.group;
        }
        Self::rule(*self == used, "fields that the kind does not use are zero")?;
        Self::rule(self.lease_ms <= LEASE_MS_MAX, "lease_ms ≤ LEASE_MS_MAX")?;
        Self::rule(usize::from(self.stripe) < STRIPES_MAX, "stripe < STRIPES_MAX")?;
        let start = Span::new(self.payload_offset, 0);
        Self::rule(start.is_some_and(|s| self.extent.span().contains(s)), "the payload starts in the extent")
    }
}

numbered! {
    /// How far an order is.
    pub enum OrderPhase(u8) {
        /// Done as far as readers and writers can tell; space is not free yet (a killed slot drains).
        Accepted = 1,
        /// Done for good.
        Done = 2,
        /// Not done, for the reason in the code.
        Refused = 3,
    }
}

fixed_record! {
    /// What became of an order.
    ///
    /// Invariant: a refused order has a code, no other has.
    pub struct OrderResult[24] {
        /// The order's number.
        0 order: u64,
        /// The slot's word as the node left it; 0 where no slot was meant.
        8 word: Word,
        /// Why it was refused.
        16 code: Option<ErrorCode>,
        /// How far it is.
        18 phase: OrderPhase,
        spare 19,
    }
}

impl OrderResult {
    fn check(&self) -> Result<(), RecordError> {
        let refused = self.phase == OrderPhase::Refused;
        Self::rule(refused == self.code.is_some(), "a code if and only if refused")
    }
}
