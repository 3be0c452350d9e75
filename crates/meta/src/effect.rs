//! What a command asks of the world: [`Effect`], mostly an [`Order`] to a node.
//!
//! Orders are idempotent and name the epoch they mean. The group does not number them: whoever carries them to the
//! node does, keeps them until the node has answered, sends them again after a broken connection, and brings the
//! answer back by [`Group::order_outcome`](crate::Group::order_outcome).

use moontide_types::{Epoch, ErrorCode, Extent, Generation, ObjectId, SegmentId, SessionId, SlotId, Term};

/// Where effects go. The caller empties it and uses it again.
pub type Effects = Vec<Effect>;

/// Something that the caller of a command has to see to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Carry an order to the node of a session.
    Order {
        /// The node's session.
        session: SessionId,
        /// What it is to do.
        order: Order,
    },
    /// A removal that had to wait for nodes has come to its end.
    Removed {
        /// What the caller of [`Group::remove`](crate::Group::remove) gave.
        waiter: Waiter,
        /// Nothing, or why it is not certain yet.
        code: Option<ErrorCode>,
    },
    /// Somebody knows a higher term: this group has another master, and this one must not answer any more.
    StepDown {
        /// The term.
        seen: Term,
    },
}

/// Whoever waits for a removal: a number that means something to the caller alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Waiter(pub u64);

/// What a node is to do with a slot; or with its disk, if the segment is [`SegmentId::DISK`]: then a version is to be
/// removed from it so that it does not come back, the slot says nothing, and `Kill` and `Reclaim` are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// What.
    pub kind: OrderKind,
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// The slot.
    pub slot: SlotId,
    /// The version.
    pub epoch: Epoch,
    /// The object.
    pub id: ObjectId,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OrderKind {
    /// No new readers: READY or WRITING becomes DEAD, and a tombstone is durable where the node has a disk. Answered
    /// at once; a removal is acknowledged after that.
    Kill,
    /// Afterwards the slot is FREE at an epoch that is not lower: one that never began is burned, one that is
    /// WRITING or READY is killed first, and none is freed while a ledger names it.
    Reclaim,
    /// Write the record in this slot to the node's disk, say so by
    /// [`Group::disk_notice`](crate::Group::disk_notice), then answer.
    Offload,
    /// Bring a record from the node's disk into this slot, which is FREE.
    Promote {
        /// Which stripe.
        stripe: u16,
        /// The slot's extent.
        extent: Extent,
    },
}

/// What became of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderOutcome {
    /// Done as far as readers and writers can tell; the space is not free yet.
    Accepted,
    /// Done for good.
    Done,
    /// The node will not do it.
    Refused(ErrorCode),
}
