//! Promotion: copies a record from disk into memory that the master has assigned to it.
//!
//! If a master removes the object meanwhile, it must not appear in memory afterwards: a Kill or Reclaim of the slot
//! cancels the promotion, and the record is published under the lock that guards the cancellation.

use hashbrown::HashMap;
use moontide_disk::{Queue, RecordId};
use moontide_heap::{Grant, PayloadWriter, StagedRecord};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::{Attributes, KeySection, State, Word};
use moontide_types::{ErrorCode, Extent, MonoTime, SegmentId, SessionId, SlotId, Span, Term};
use parking_lot::Mutex;
use tracing::debug;

use super::DiskTier;
use super::counters::increment;
use super::record_spec::record_spec;
use super::staging_cache::StagingLookup;
use super::test_hooks::{HookPoint, Mutation};
use crate::logic::commands::{CommandId, CommandReply};

/// A record to copy back into memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromoteJob {
    pub(crate) session: SessionId,
    pub(crate) command_id: u64,
    pub(crate) name: RecordId,
    pub(crate) segment: SegmentId,
    pub(crate) slot: SlotId,
    pub(crate) extent: Extent,
    pub(crate) term: Term,
}

/// Promotions in progress: target slot and command.
#[derive(Debug, Default)]
pub(super) struct PromotionTable {
    slots: Mutex<HashMap<(SegmentId, SlotId), CommandId>>,
}

impl DiskTier {
    /// Starts a promotion. Returns `false` if the tier has stopped.
    pub(crate) fn begin_promotion(&self, job: PromoteJob) -> bool {
        self.promotions.slots.lock().insert((job.segment, job.slot), (job.session, job.command_id));
        self.queue_promotion(job)
    }

    /// Cancels the promotion into a slot: no record will appear there. Returns whether there was one.
    pub(crate) fn cancel_promotion(&self, segment: SegmentId, slot: SlotId) -> bool {
        self.promotions.slots.lock().remove(&(segment, slot)).is_some()
    }

    /// Cancels all promotions of an ended session.
    pub(super) fn cancel_promotions(&self, session: SessionId) {
        self.promotions.slots.lock().retain(|_, &mut (of, _)| of != session);
    }

    /// Executes a promotion, and sends the result.
    pub(super) fn promote(&self, queue: &mut dyn Queue, job: &PromoteJob) {
        let outcome = self.try_promote(queue, job);
        let mut slots = self.promotions.slots.lock();
        if slots.get(&(job.segment, job.slot)) == Some(&(job.session, job.command_id)) {
            slots.remove(&(job.segment, job.slot));
        }
        drop(slots);
        let epoch = job.name.version;
        let reply = match outcome {
            Ok(()) => {
                increment(&self.counters.promoted_records, 1);
                CommandReply::done(Word::new(epoch, State::Ready))
            }
            Err(code) => {
                debug!(id = %job.name.id, %code, "record not promoted");
                CommandReply::refused(code, Word::default())
            }
        };
        self.send_results(vec![(job.session, reply.to(job.command_id))]);
    }

    fn try_promote(&self, queue: &mut dyn Queue, job: &PromoteJob) -> Result<(), ErrorCode> {
        increment(&self.counters.loads_requested, 1);
        let staged = match self.cache.begin(job.name) {
            StagingLookup::Ready(staged) => {
                increment(&self.counters.loads_staged, 1);
                staged
            }
            StagingLookup::Load => self.load(queue, &[job.name]).pop().unwrap_or(Err(ErrorCode::Internal))?,
            // Another thread loads it: the master sends the command again.
            StagingLookup::InProgress => {
                increment(&self.counters.loads_failed, 1);
                return Err(ErrorCode::Busy);
            }
        };
        self.copy_into_slot(&staged, job)
    }

    /// Whether a promotion was not cancelled, and its session is live.
    fn is_current(&self, slots: &HashMap<(SegmentId, SlotId), CommandId>, job: &PromoteJob) -> bool {
        slots.get(&(job.segment, job.slot)) == Some(&(job.session, job.command_id))
            && self.is_live(job.session)
    }

    fn copy_into_slot(&self, staged: &StagedRecord, job: &PromoteJob) -> Result<(), ErrorCode> {
        let source = staged.pin().ok_or(ErrorCode::Gone)?;
        let heap = self.memory.heap();
        let header = *source.header();
        let key = KeySection::decode(source.key()).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(source.attributes()).map_err(|_| ErrorCode::Corrupt)?;
        let (segment, slot, epoch) = (job.segment, job.slot, job.name.version);
        let record = record_spec(&header, key, &attributes);
        let grant =
            Grant { slot, epoch, term: job.term, extent: job.extent, record, writer: PayloadWriter::Node };
        self.test_hooks.reached(HookPoint::Loaded);
        // Under the lock: a later Kill finds the record begun here, and an earlier one has cancelled the promotion.
        // After a cancellation, the slot and the extent may already belong to another record.
        let slots = self.promotions.slots.lock();
        if !self.is_current(&slots, job) && !self.test_hooks.mutation.is_enabled(Mutation::BegunUnasked) {
            return Err(ErrorCode::Cancelled);
        }
        heap.begin_copy(segment, &grant).map_err(|error| error.code())?;
        self.memory.record_copy(segment, slot, epoch, job.extent.units);
        drop(slots);
        let abandon = |code| {
            let _ = heap.kill(segment, slot, epoch, MonoTime(0));
            self.memory.record_transition(segment, slot, epoch, State::Dead);
            Err(code)
        };
        let Some(mut claim) = heap.claim(segment, slot, epoch) else { return abandon(ErrorCode::Busy) };
        let whole = Span::new(0, header.stripe_len).expect("a record has an end");
        claim.bytes_mut(whole).copy_from_slice(source.payload());
        // The digests were verified when the record was read from disk, and the bytes are a copy.
        for (page, digest) in
            (0..header.stripe_len.div_ceil(PAGE_BYTES)).zip(source.digests().chunks_exact(8))
        {
            claim.set_page_digest(page, u64::from_le_bytes(digest.try_into().expect("eight bytes")));
        }
        self.test_hooks.reached(HookPoint::Copied);
        let slots = self.promotions.slots.lock();
        if !self.is_current(&slots, job) && !self.test_hooks.mutation.is_enabled(Mutation::PromotedUnasked) {
            drop(slots);
            drop(claim);
            return abandon(ErrorCode::Cancelled);
        }
        let published = claim.publish(header.root);
        drop(slots);
        if let Err(error) = published {
            return abandon(error.code());
        }
        self.memory.record_transition(segment, slot, epoch, State::Ready);
        Ok(())
    }
}
