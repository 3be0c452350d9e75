//! [`Effect`]: an action that the caller of a group command must perform, usually sending a [`NodeCommand`] to a node.
//!
//! Commands are idempotent and name the epoch that they apply to. The group does not number them. The sender does that:
//! it keeps them until the node has responded, sends them again after a broken connection, and passes the result to
//! [`Group::command_outcome`](crate::Group::command_outcome).

use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, Medium, NodeId, ObjectId, SegmentId, SessionId, SlotId, Term,
};

/// List to which a group appends its effects. The caller empties and reuses it.
pub type Effects = Vec<Effect>;

/// Action that the caller of a group command must perform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send a command to the node of a session.
    Command {
        /// Session of the node.
        session: SessionId,
        /// Command to send.
        command: NodeCommand,
    },
    /// A removal that waited for nodes is complete.
    Removed {
        /// Value that the caller passed to [`Group::remove`](crate::Group::remove).
        waiter: WaiterId,
        /// `None`, or the reason why the removal is not certain yet.
        code: Option<ErrorCode>,
    },
    /// A higher term exists: this group has another master, and this one must stop responding.
    StepDown {
        /// The higher term.
        seen: Term,
    },
}

/// Id of the caller that waits for a removal; opaque to the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// A command for a node about a slot. If the segment is [`SegmentId::DISK`], the command is for the disk: remove a
/// version so that it does not reappear. Then `slot` is ignored, and `Kill` and `Reclaim` are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeCommand {
    /// Action that the node performs.
    pub kind: CommandKind,
    /// Segment of the slot, or [`SegmentId::DISK`].
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Slot in the segment; ignored for a disk.
    pub slot: SlotId,
    /// Version of the object.
    pub epoch: Epoch,
    /// Id of the object.
    pub id: ObjectId,
}

/// Action of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommandKind {
    /// No new readers: READY or WRITING becomes DEAD, and a tombstone is durable if the node has a disk. The node
    /// responds immediately; the master acknowledges a removal after the response.
    Kill,
    /// Afterwards the slot is FREE at an epoch that is not lower. An epoch whose write never began is burned, a WRITING
    /// or READY one is killed first, and none is freed while a ledger names it.
    Reclaim,
    /// Write the record in this slot to the node's disk, report it with
    /// [`Group::disk_notice`](crate::Group::disk_notice), then respond.
    Offload,
    /// Load a record from the node's disk into this slot, which is FREE.
    Promote {
        /// Index of the stripe.
        stripe: u16,
        /// Extent of the slot.
        extent: Extent,
    },
    /// Copy a record of another location into this slot, which is FREE.
    Copy {
        /// Index of the stripe.
        stripe: u16,
        /// Extent of the slot.
        extent: Extent,
        /// Location of the record.
        source: CopySource,
        /// Reason for the copy.
        purpose: CopyPurpose,
    },
}

/// Location from which a node copies a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopySource {
    /// Node that has the record.
    pub node: NodeId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Segment of the slot, or [`SegmentId::DISK`].
    pub segment: SegmentId,
    /// Slot in the segment; meaningless for a disk.
    pub slot: SlotId,
    /// Storage medium of the segment.
    pub medium: Medium,
    /// Root of the stripe's digests, which the copy must have.
    pub root: u64,
}

/// Reason for a copy. Nodes make the more urgent ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CopyPurpose {
    /// The source is to be emptied: it is released when the copy is complete.
    Drain,
    /// The object has fewer replicas than its writer asked for.
    Repair,
    /// Another node has more free memory: the source is released when the copy is complete.
    Rebalance,
    /// Processes on the host of the target read the object much.
    Hot,
}

impl CopyPurpose {
    /// Whether the source is released when the copy is complete.
    pub fn is_move(self) -> bool {
        match self {
            CopyPurpose::Drain | CopyPurpose::Rebalance => true,
            CopyPurpose::Repair | CopyPurpose::Hot => false,
        }
    }
}

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutcome {
    /// Visible to readers and writers; the space is not free yet.
    Accepted,
    /// Done permanently. After a reclaim, the slot is free.
    Done,
    /// The node refused the command.
    Refused(ErrorCode),
}
