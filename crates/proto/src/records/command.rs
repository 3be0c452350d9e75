//! [`NodeCommand`]: instruction of a master to a node, with a [`CopySource`] if it is a copy. [`CommandResult`]: its
//! result.
//!
//! Commands are idempotent and carry the epoch they refer to, so that a repeated or late command has no effect. One
//! flat record serves all kinds; fields that a kind does not use are zero, and the decoder checks it.

use moontide_types::limits::{LEASE_MS_MAX, STRIPES_MAX};
use moontide_types::record::Word;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, NodeId, ObjectId, SegmentId, SlotId, Span, Term,
};

use crate::capability::Capability;
use crate::layout::RecordError;

numbered! {
    /// Kind of a command.
    pub enum CommandKind(u16) {
        /// READY → DEAD: no new readers. Uses slot, epoch, id.
        Kill = 1,
        /// DEAD → FREE when no ledger contains the slot. Uses slot, epoch, id.
        Reclaim = 2,
        /// FREE → FREE with a higher epoch: the node refuses a late Begin of this epoch. Uses slot, epoch.
        FenceEpoch = 3,
        /// Write the record to disk before the lease expires. Uses slot, epoch, id, lease.
        Offload = 4,
        /// Copy a record from disk into a slot. Uses slot, extent, payload offset, epoch, id, stripe, lease.
        Promote = 5,
        /// Remove a version from disk. Uses epoch, id; no segment.
        DropFromDisk = 6,
        /// Adopt the command's term and group for the segment, and send a snapshot of it. Uses group.
        AdoptTerm = 7,
        /// Refuse every new Begin in the segment.
        Drain = 8,
        /// Verify a record against its digests. Uses slot, epoch, id.
        Scrub = 9,
        /// Copy a record of another node into a slot. Uses slot, extent, payload offset, epoch, id, stripe, lease. A
        /// [`CopySource`] belongs to it.
        Copy = 10,
    }
}

flags! {
    /// Options of a command.
    pub struct CommandFlags(u16) {
        /// A tombstone (id, version) must be durable before the command is done.
        TOMBSTONE = 0,
    }
}

fixed_record! {
    /// One command.
    pub struct NodeCommand[80] {
        /// Number of the command, repeated in its result; ascending within a session.
        0 command_id: u64,
        /// Kind of the command; determines the fields in use.
        8 kind: CommandKind,
        /// Options.
        10 flags: CommandFlags,
        /// Segment of the slot.
        12 segment: SegmentId,
        /// Generation of the segment.
        16 generation: Generation,
        /// Slot in the segment.
        24 slot: SlotId,
        /// Term of the master that sends the command.
        28 term: Term,
        /// Version of the object.
        32 epoch: Epoch,
        /// Object id.
        40 id: ObjectId,
        /// Time in milliseconds for which the master keeps the object for this command.
        56 lease_ms: u32,
        /// Index of the stripe.
        60 stripe: u16,
        /// Group to which the segment is granted.
        62 group: GroupId,
        /// Extent of the slot: first unit `u32`, number of units `u32`.
        64 extent: Extent,
        /// Offset of the payload in the segment.
        72 payload_offset: u64,
    }
}

impl NodeCommand {
    /// Creates a command of this kind; the other fields are zero.
    pub fn new(command_id: u64, kind: CommandKind, term: Term) -> NodeCommand {
        NodeCommand {
            command_id,
            kind,
            flags: CommandFlags::NONE,
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
        use CommandKind::*;
        // Copy of the command with only the fields that its kind uses: it must equal the command.
        let mut used = NodeCommand::new(self.command_id, self.kind, self.term);
        if self.kind != DropFromDisk {
            (used.segment, used.generation) = (self.segment, self.generation);
        }
        if matches!(self.kind, Kill | Reclaim | FenceEpoch | Offload | Promote | Scrub | Copy) {
            (used.slot, used.epoch) = (self.slot, self.epoch);
        }
        if matches!(self.kind, Kill | Reclaim | Offload | Promote | Scrub | Copy | DropFromDisk) {
            (used.id, used.epoch) = (self.id, self.epoch);
        }
        if matches!(self.kind, Offload | Promote | Copy) {
            used.lease_ms = self.lease_ms;
        }
        if matches!(self.kind, Kill | DropFromDisk) {
            used.flags = self.flags;
        }
        if matches!(self.kind, Promote | Copy) {
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
    /// Reason for a copy. Nodes make the more urgent ones first.
    pub enum CopyPurpose(u8) {
        /// The source is to be emptied.
        Drain = 1,
        /// The object lacks a replica.
        Repair = 2,
        /// Another node has more free memory.
        Rebalance = 3,
        /// Processes on the host of the target read the object much.
        Hot = 4,
    }
}

fixed_record! {
    /// Location from which a node copies a record.
    ///
    /// Invariant: the source has a node.
    pub struct CopySource[64] {
        /// Node that has the record.
        0 node: NodeId,
        /// Generation of the segment.
        8 generation: Generation,
        /// Root of the stripe's page digests, which the copy must have.
        16 root: u64,
        /// Proof of the access right.
        24 capability: Capability,
        /// Segment of the slot.
        40 segment: SegmentId,
        /// Slot in the segment.
        44 slot: SlotId,
        /// Term in which the capability was created.
        48 term: Term,
        /// Reason for the copy.
        52 purpose: CopyPurpose,
        reserved 53,
    }
}

impl CopySource {
    fn check(&self) -> Result<(), RecordError> {
        Self::rule(self.node.0 > 0, "node > 0")
    }
}

numbered! {
    /// Progress of a command.
    pub enum CommandStatus(u8) {
        /// Done as visible to readers and writers; the space is not free yet (a killed slot is draining).
        Accepted = 1,
        /// Completely done.
        Done = 2,
        /// Not done; the code is the reason.
        Refused = 3,
    }
}

fixed_record! {
    /// Result of a command.
    ///
    /// Invariant: a result has a code if and only if the command was refused.
    pub struct CommandResult[24] {
        /// Number of the command.
        0 command_id: u64,
        /// Header word of the slot after the command; 0 for commands without a slot.
        8 word: Word,
        /// Reason of a refusal.
        16 code: Option<ErrorCode>,
        /// Progress.
        18 status: CommandStatus,
        reserved 19,
    }
}

impl CommandResult {
    fn check(&self) -> Result<(), RecordError> {
        let refused = self.status == CommandStatus::Refused;
        Self::rule(refused == self.code.is_some(), "a code if and only if refused")
    }
}
