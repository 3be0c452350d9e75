//! Promotion: copies a record from disk into memory that the master has assigned to it.

use moontide_disk::{AlignedBuf, Queue, ReadJob, RecordId, decode_preamble};
use moontide_heap::NodeClaim;
use moontide_proto::limits::DISK_PART_BYTES;
use moontide_rt::mark;
use moontide_types::record::{Attributes, Header, KeySection, State, Word};
use moontide_types::{ErrorCode, Span};
use tracing::debug;

use super::DiskTier;
use super::counters::increment;
use super::device::Device;
use super::load::{STAGING_WAIT, read_from};
use super::parts::{PartId, is_split};
use super::staging_cache::StagingLookup;
use super::test_hooks::{HookPoint, Mutation};
use crate::logic::commands::CommandReply;
use crate::slot_fills::{FillSource, FillTarget, SkippedChecks};

/// A record to copy back into memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromoteJob {
    pub(crate) name: RecordId,
    pub(crate) target: FillTarget,
}

impl DiskTier {
    /// Starts a promotion. Returns `false` if the tier has stopped, or the directory was excluded.
    pub(crate) fn begin_promotion(&self, job: PromoteJob) -> bool {
        let device = self.device_to_read(&job.name);
        self.memory.fills.list(&job.target, FillSource::Disk(device));
        let is_queued = self.queue_promotion(device, job);
        if !is_queued {
            self.memory.fills.unlist(&job.target);
        }
        is_queued
    }

    /// Refuses the promotions from an excluded directory.
    pub(super) fn give_up_promotions(&self, device: &Device) {
        let reply = CommandReply::refused(ErrorCode::DiskError, Word::default());
        let given_up = self.memory.fills.cancel_source(FillSource::Disk(device.number));
        self.events.send_results(given_up.into_iter().map(|(session, id)| (session, reply.to(id))).collect());
    }

    /// Executes a promotion, and sends the result.
    pub(super) fn promote(&self, device: &Device, queue: &mut dyn Queue, job: &PromoteJob) {
        let outcome = self.try_promote(device, queue, job);
        self.memory.fills.unlist(&job.target);
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
        let (session, id) = job.target.command;
        self.events.send_results(vec![(session, reply.to(id))]);
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
                if !self.memory.fills.is_current(&job.target) {
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

    /// Makes a record in the slot of a promotion. `fill` writes payload and digests.
    fn copy_into_slot(
        &self,
        job: &PromoteJob,
        header: &Header,
        (key, attributes): (&[u8], &[u8]),
        fill: impl FnOnce(&mut NodeClaim<'_>) -> Result<(), ErrorCode>,
    ) -> Result<(), ErrorCode> {
        let key = KeySection::decode(key).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(attributes).map_err(|_| ErrorCode::Corrupt)?;
        let skipped = SkippedChecks {
            begin: self.test_hooks.mutation.is_enabled(Mutation::BegunUnasked),
            publish: self.test_hooks.mutation.is_enabled(Mutation::PromotedUnasked),
        };
        let is_live = || self.is_live(job.target.command.0);
        self.test_hooks.reached(HookPoint::Loaded);
        let mut claim = self.memory.begin_fill(&job.target, header, key, &attributes, (&is_live, skipped))?;
        if let Err(code) = fill(&mut claim) {
            drop(claim);
            self.memory.abandon_fill(&job.target);
            return Err(code);
        }
        self.test_hooks.reached(HookPoint::Copied);
        let published = self.memory.publish_fill(&job.target, claim, header.root, (&is_live, skipped));
        mark!("promotion cancelled between begin and publication", published == Err(ErrorCode::Cancelled));
        published
    }
}

/// Sets the page digests of a record. They were verified when it was read from disk, and its bytes are a copy.
fn set_digests(claim: &mut NodeClaim<'_>, digests: &[u8]) {
    for (page, digest) in (0..).zip(digests.as_chunks().0) {
        claim.set_page_digest(page, u64::from_le_bytes(*digest));
    }
}
