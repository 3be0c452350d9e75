//! [`SlotFills`]: slots of this node that commands of masters fill with records that were complete before: promotions from
//! disk, and copies from other nodes.
//!
//! If a master removes the object meanwhile, it must not appear in memory afterwards: a Kill or Reclaim of the slot cancels
//! the fill, and the record is begun and published under the lock that guards the cancellation.

use moontide_heap::{Grant, NodeClaim, PayloadWriter, RecordSpec};
use moontide_rt::collections::HashMap;
use moontide_rt::sync::Mutex;
use moontide_types::record::{Attributes, Header, KeySection, State};
use moontide_types::{Epoch, ErrorCode, Extent, MonoTime, NodeId, SegmentId, SessionId, SlotId, Term};

use crate::logic::commands::CommandId;
use crate::memory::NodeMemory;

/// A slot to fill, as a command names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FillTarget {
    pub(crate) command: CommandId,
    pub(crate) segment: SegmentId,
    pub(crate) slot: SlotId,
    pub(crate) epoch: Epoch,
    pub(crate) extent: Extent,
    pub(crate) term: Term,
}

/// Where the bytes of a fill come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FillSource {
    /// A directory of the disk, by its number.
    Disk(usize),
    /// Another node.
    Node(NodeId),
}

/// What a test leaves out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SkippedChecks {
    /// The record begins although the fill was cancelled.
    pub(crate) begin: bool,
    /// The record is published although the fill was cancelled.
    pub(crate) publish: bool,
}

/// Fills in progress, by their slots.
#[derive(Debug, Default)]
pub(crate) struct SlotFills {
    slots: Mutex<FillSlots>,
}

type FillSlots = HashMap<(SegmentId, SlotId), Fill>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fill {
    command: CommandId,
    source: FillSource,
}

impl SlotFills {
    /// Lists a fill. An earlier one of the same slot is cancelled.
    pub(crate) fn list(&self, target: &FillTarget, source: FillSource) {
        let fill = Fill { command: target.command, source };
        self.slots.lock().insert((target.segment, target.slot), fill);
    }

    /// Removes a fill that has ended. Another one of the same slot remains.
    pub(crate) fn unlist(&self, target: &FillTarget) {
        let mut slots = self.slots.lock();
        if is_listed(&slots, target) {
            slots.remove(&(target.segment, target.slot));
        }
    }

    /// Cancels the fill of a slot: no record will appear there. Returns whether there was one.
    pub(crate) fn cancel(&self, segment: SegmentId, slot: SlotId) -> bool {
        self.slots.lock().remove(&(segment, slot)).is_some()
    }

    /// Cancels all fills of an ended session.
    pub(crate) fn cancel_session(&self, session: SessionId) {
        self.slots.lock().retain(|_, fill| fill.command.0 != session);
    }

    /// Cancels all fills from a source, and returns their commands.
    pub(crate) fn cancel_source(&self, source: FillSource) -> Vec<CommandId> {
        let mut slots = self.slots.lock();
        slots.extract_if(|_, fill| fill.source == source).map(|(_, fill)| fill.command).collect()
    }

    /// Whether a fill was not cancelled.
    pub(crate) fn is_current(&self, target: &FillTarget) -> bool {
        is_listed(&self.slots.lock(), target)
    }
}

impl NodeMemory {
    /// Begins the record of a fill, and claims all of it. `is_live` tells whether the session of the command is live.
    ///
    /// After a cancellation, the slot and the extent may already belong to another record.
    pub(crate) fn begin_fill(
        &self,
        target: &FillTarget,
        header: &Header,
        key: KeySection<'_>,
        attributes: &Attributes,
        (is_live, skipped): (&dyn Fn() -> bool, SkippedChecks),
    ) -> Result<NodeClaim<'_>, ErrorCode> {
        let FillTarget { segment, slot, epoch, extent, term, .. } = *target;
        let heap = self.heap();
        let record = record_spec(header, key, attributes);
        let grant = Grant { slot, epoch, term, extent, record, writer: PayloadWriter::Node };
        // Under the lock: a later Kill finds the record begun here, and an earlier one has cancelled the fill.
        let slots = self.fills.slots.lock();
        let is_current = is_listed(&slots, target) && is_live();
        if !is_current && !skipped.begin {
            return Err(ErrorCode::Cancelled);
        }
        heap.begin_copy(segment, &grant).map_err(|error| error.code())?;
        self.record_copy(segment, slot, epoch, extent.units);
        drop(slots);
        heap.claim(segment, slot, epoch).ok_or_else(|| {
            self.abandon_fill(target);
            ErrorCode::Busy
        })
    }

    /// Publishes the record of a fill, all of whose bytes are written. After an error it is dead.
    pub(crate) fn publish_fill(
        &self,
        target: &FillTarget,
        mut claim: NodeClaim<'_>,
        root: u64,
        (is_live, skipped): (&dyn Fn() -> bool, SkippedChecks),
    ) -> Result<(), ErrorCode> {
        let slots = self.fills.slots.lock();
        let is_current = is_listed(&slots, target) && is_live();
        if !is_current && !skipped.publish {
            drop(slots);
            drop(claim);
            self.abandon_fill(target);
            return Err(ErrorCode::Cancelled);
        }
        claim.set_written();
        let published = claim.publish(root);
        drop(slots);
        if let Err(error) = published {
            self.abandon_fill(target);
            return Err(error.code());
        }
        self.record_transition(target.segment, target.slot, target.epoch, State::Ready);
        Ok(())
    }

    /// Kills the record of a fill that has failed. The claim on it has ended.
    pub(crate) fn abandon_fill(&self, target: &FillTarget) {
        let FillTarget { segment, slot, epoch, .. } = *target;
        let _ = self.heap().kill(segment, slot, epoch, MonoTime(0));
        self.record_transition(segment, slot, epoch, State::Dead);
    }
}

fn is_listed(slots: &FillSlots, target: &FillTarget) -> bool {
    slots.get(&(target.segment, target.slot)).is_some_and(|fill| fill.command == target.command)
}

/// Returns the description of a record for the heap.
pub(crate) fn record_spec<'a>(
    header: &Header,
    key: KeySection<'a>,
    attributes: &'a Attributes,
) -> RecordSpec<'a> {
    RecordSpec {
        id: header.id,
        flags: header.flags,
        object_len: header.object_len,
        stripe_index: header.stripe_index,
        stripe_count: header.stripe_count,
        stripe_offset: header.stripe_offset,
        stripe_len: header.stripe_len,
        key,
        attributes,
        id_key: header.id_key,
        tenant_generation: header.tenant_generation,
    }
}
