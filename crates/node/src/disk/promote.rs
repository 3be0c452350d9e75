//! Promotion: copies a record from disk into memory that the master has assigned to it.
//!
//! If a master removes the object meanwhile, it must not appear in memory afterwards: a Kill or Reclaim of the slot
//! cancels the promotion, and the record is published under the lock that guards the cancellation.

use moontide_disk::{AlignedBuf, Queue, ReadJob, RecordId, decode_preamble};
use moontide_heap::{Grant, NodeClaim, PayloadWriter};
use moontide_proto::limits::DISK_PART_BYTES;
use moontide_rt::collections::HashMap;
use moontide_rt::mark;
use moontide_rt::sync::Mutex;
use moontide_types::record::{Attributes, Header, KeySection, State, Word};
use moontide_types::{ErrorCode, Extent, MonoTime, SegmentId, SessionId, SlotId, Span, Term};
use tracing::debug;

use super::DiskTier;
use super::counters::increment;
use super::device::Device;
use super::load::{STAGING_WAIT, read_from};
use super::parts::{PartId, is_split};
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

/// Promotions in progress, by their target slots.
#[derive(Debug, Default)]
pub(super) struct PromotionTable {
    slots: Mutex<PromotionSlots>,
}

type PromotionSlots = HashMap<(SegmentId, SlotId), Promotion>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Promotion {
    command: CommandId,
    /// Number of the directory that has the record.
    device: usize,
}

impl DiskTier {
    /// Starts a promotion. Returns `false` if the tier has stopped, or the directory was excluded.
    pub(crate) fn begin_promotion(&self, job: PromoteJob) -> bool {
        let device = self.device_to_read(&job.name);
        let promotion = Promotion { command: (job.session, job.command_id), device };
        self.promotions.slots.lock().insert((job.segment, job.slot), promotion);
        let is_queued = self.queue_promotion(device, job);
        if !is_queued {
            self.promotions.slots.lock().remove(&(job.segment, job.slot));
        }
        is_queued
    }

    /// Refuses the promotions from an excluded directory.
    pub(super) fn give_up_promotions(&self, device: &Device) {
        let mut slots = self.promotions.slots.lock();
        let given_up = slots.extract_if(|_, promotion| promotion.device == device.number);
        let reply = CommandReply::refused(ErrorCode::DiskError, Word::default());
        let refused = given_up.map(|(_, Promotion { command: (session, id), .. })| (session, reply.to(id)));
        let refused = refused.collect();
        drop(slots);
        self.send_results(refused);
    }

    /// Cancels the promotion into a slot: no record will appear there. Returns whether there was one.
    pub(crate) fn cancel_promotion(&self, segment: SegmentId, slot: SlotId) -> bool {
        self.promotions.slots.lock().remove(&(segment, slot)).is_some()
    }

    /// Cancels all promotions of an ended session.
    pub(super) fn cancel_promotions(&self, session: SessionId) {
        self.promotions.slots.lock().retain(|_, promotion| promotion.command.0 != session);
    }

    /// Executes a promotion, and sends the result.
    pub(super) fn promote(&self, device: &Device, queue: &mut dyn Queue, job: &PromoteJob) {
        let outcome = self.try_promote(device, queue, job);
        let mut slots = self.promotions.slots.lock();
        if is_listed(&slots, job) {
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

    fn try_promote(&self, device: &Device, queue: &mut dyn Queue, job: &PromoteJob) -> Result<(), ErrorCode> {
        if device.backend.locate(&job.name).as_ref().is_some_and(is_split) {
            return self.promote_in_parts(device, queue, job);
        }
        increment(&self.counters.loads_requested, 1);
        let name = PartId::first(job.name);
        let staged = match self.cache.begin(name) {
            StagingLookup::Ready(staged) => {
                increment(&self.counters.loads_staged, 1);
                staged
            }
            StagingLookup::Load => {
                let mut loaded = self.load(device, queue, &[name], STAGING_WAIT);
                loaded.pop().unwrap_or(Err(ErrorCode::Internal))?
            }
            // Another thread loads it: the master sends the command again.
            StagingLookup::InProgress => {
                increment(&self.counters.loads_failed, 1);
                return Err(ErrorCode::Busy);
            }
        };
        let source = staged.pin().ok_or(ErrorCode::Gone)?;
        let sections = (source.key(), source.attributes());
        self.copy_into_slot(job, source.header(), sections, |claim| {
            let whole = Span::new(0, source.header().stripe_len).expect("a record has an end");
            claim.bytes_mut(whole).copy_from_slice(source.payload());
            set_digests(claim, source.digests());
            Ok(())
        })
    }

    /// Promotes a long record, part by part, through memory of its own: the parts of such a record that are in staging
    /// belong to readers.
    fn promote_in_parts(
        &self,
        device: &Device,
        queue: &mut dyn Queue,
        job: &PromoteJob,
    ) -> Result<(), ErrorCode> {
        let location = self.locate(device, &job.name)?;
        let preamble_len = location.preamble_read_len as usize;
        let mut memory = AlignedBuf::zeroed(preamble_len + DISK_PART_BYTES as usize);
        let mut read = |memory: &mut [u8], name: PartId| -> Result<Option<(Header, Span)>, ErrorCode> {
            let Some(blocks) = name.blocks(&location).filter(|blocks| !blocks.is_empty()) else {
                return Ok(None);
            };
            increment(&self.counters.loads_requested, 1);
            let into = &mut memory[..preamble_len + blocks.len() as usize];
            let part = ReadJob::part(job.name, location.clone(), blocks, into);
            let result = read_from(device, queue, vec![part]).pop().ok_or(ErrorCode::Internal);
            let header = result.and_then(|result| self.check_read(device, &job.name, result));
            let counter =
                if header.is_ok() { &self.counters.loads_read } else { &self.counters.loads_failed };
            increment(counter, 1);
            let header = header?;
            let len = blocks.len().min(header.stripe_len - blocks.offset());
            increment(&self.counters.loaded_bytes, len);
            Ok(Some((header, Span::new(blocks.offset(), len).ok_or(ErrorCode::Internal)?)))
        };
        let mut name = PartId::first(job.name);
        let (header, mut range) = read(&mut memory, name)?.ok_or(ErrorCode::Internal)?;
        let preamble = memory[..preamble_len].to_vec();
        let preamble = decode_preamble(&preamble).map_err(|_| ErrorCode::Internal)?;
        self.copy_into_slot(job, &header, (preamble.key, preamble.attributes), |claim| {
            loop {
                let payload = &memory[preamble_len..preamble_len + range.len() as usize];
                claim.bytes_mut(range).copy_from_slice(payload);
                if !self.is_current(&self.promotions.slots.lock(), job) {
                    return Err(ErrorCode::Cancelled);
                }
                name = name.next().ok_or(ErrorCode::Internal)?;
                match read(&mut memory, name)? {
                    Some((_, next)) => range = next,
                    None => break,
                }
            }
            set_digests(claim, preamble.digests.as_bytes());
            Ok(())
        })
    }

    /// Whether a promotion was not cancelled, and its session is live.
    fn is_current(&self, slots: &PromotionSlots, job: &PromoteJob) -> bool {
        is_listed(slots, job) && self.is_live(job.session)
    }

    /// Makes a record in the slot of a promotion. `fill` writes payload and digests.
    fn copy_into_slot(
        &self,
        job: &PromoteJob,
        header: &Header,
        (key, attributes): (&[u8], &[u8]),
        fill: impl FnOnce(&mut NodeClaim<'_>) -> Result<(), ErrorCode>,
    ) -> Result<(), ErrorCode> {
        let heap = self.memory.heap();
        let key = KeySection::decode(key).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(attributes).map_err(|_| ErrorCode::Corrupt)?;
        let (segment, slot, epoch) = (job.segment, job.slot, job.name.version);
        let record = record_spec(header, key, &attributes);
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
        if let Err(code) = fill(&mut claim) {
            drop(claim);
            return abandon(code);
        }
        self.test_hooks.reached(HookPoint::Copied);
        let slots = self.promotions.slots.lock();
        mark!("promotion cancelled between begin and publication", !self.is_current(&slots, job));
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

fn is_listed(slots: &PromotionSlots, job: &PromoteJob) -> bool {
    let listed = slots.get(&(job.segment, job.slot));
    listed.is_some_and(|promotion| promotion.command == (job.session, job.command_id))
}

/// Sets the page digests of a record. They were verified when it was read from disk, and its bytes are a copy.
fn set_digests(claim: &mut NodeClaim<'_>, digests: &[u8]) {
    for (page, digest) in (0..).zip(digests.as_chunks().0) {
        claim.set_page_digest(page, u64::from_le_bytes(*digest));
    }
}
