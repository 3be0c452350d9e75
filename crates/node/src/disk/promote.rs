//! Promotion: a record that is read often goes back from disk to memory that the master gave for it.
//!
//! A master that removes the object meanwhile must not find it in memory afterwards: a kill or a reclaim of the slot ends
//! the promotion, and what is published is published under the lock that says whether it is still wanted.

use hashbrown::HashMap;
use moontide_disk::{Queue, RecordName};
use moontide_heap::{Grant, Staged, Writer};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::{Attributes, KeySection, State, Word};
use moontide_types::{ErrorCode, Extent, MonoTime, SegmentId, SessionId, SlotId, Span, Term};
use parking_lot::Mutex;
use tracing::debug;

use super::DiskTier;
use super::counters::raise;
use super::load::new_record;
use super::planted::{Bug, Point};
use super::staged::Looked;
use crate::decide::orders::{Answer, Numbered};

/// A record that is to be brought back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromoteJob {
    pub(crate) session: SessionId,
    pub(crate) order: u64,
    pub(crate) name: RecordName,
    pub(crate) segment: SegmentId,
    pub(crate) slot: SlotId,
    pub(crate) extent: Extent,
    pub(crate) term: Term,
}

/// Promotions under way, by the slot that they go to: the order that wants it.
#[derive(Debug, Default)]
pub(super) struct Promoting {
    slots: Mutex<HashMap<(SegmentId, SlotId), Numbered>>,
}

impl DiskTier {
    /// Begins a promotion. False: nobody does it.
    pub(crate) fn begin_promotion(&self, job: PromoteJob) -> bool {
        self.promoting.slots.lock().insert((job.segment, job.slot), (job.session, job.order));
        self.order_promotion(job)
    }

    /// Whether the slot was being promoted to; if so, it is not any more, and nothing will appear there.
    pub(crate) fn cancel_promotion(&self, segment: SegmentId, slot: SlotId) -> bool {
        self.promoting.slots.lock().remove(&(segment, slot)).is_some()
    }

    /// No promotion of a session that is over is wanted any more.
    pub(super) fn cancel_promotions(&self, session: SessionId) {
        self.promoting.slots.lock().retain(|_, &mut (of, _)| of != session);
    }

    /// Carries out a promotion, and answers.
    pub(super) fn promote(&self, queue: &mut dyn Queue, job: &PromoteJob) {
        let outcome = self.try_promote(queue, job);
        let mut slots = self.promoting.slots.lock();
        if slots.get(&(job.segment, job.slot)) == Some(&(job.session, job.order)) {
            slots.remove(&(job.segment, job.slot));
        }
        drop(slots);
        let epoch = job.name.version;
        let answer = match outcome {
            Ok(()) => {
                raise(&self.counters.promoted_records, 1);
                Answer::done(Word::new(epoch, State::Ready))
            }
            Err(code) => {
                debug!(id = %job.name.id, %code, "not brought back into memory");
                Answer::refused(code, Word::default())
            }
        };
        self.answer(vec![(job.session, answer.to(job.order))]);
    }

    fn try_promote(&self, queue: &mut dyn Queue, job: &PromoteJob) -> Result<(), ErrorCode> {
        raise(&self.counters.loads_requested, 1);
        let staged = match self.staged.begin(job.name) {
            Looked::Ready(staged) => {
                raise(&self.counters.loads_staged, 1);
                staged
            }
            Looked::Mine => self.load(queue, &[job.name]).pop().unwrap_or(Err(ErrorCode::Internal))?,
            // Another thread is at it: it will be asked for again.
            Looked::Others => {
                raise(&self.counters.loads_failed, 1);
                return Err(ErrorCode::Busy);
            }
        };
        self.copy_into_slot(&staged, job)
    }

    /// Whether a promotion was not cancelled, and is of a session that there is.
    fn is_wanted(&self, slots: &HashMap<(SegmentId, SlotId), Numbered>, job: &PromoteJob) -> bool {
        slots.get(&(job.segment, job.slot)) == Some(&(job.session, job.order)) && self.is_live(job.session)
    }

    fn copy_into_slot(&self, staged: &Staged, job: &PromoteJob) -> Result<(), ErrorCode> {
        let source = staged.pin().ok_or(ErrorCode::Gone)?;
        let heap = self.memory.heap();
        let header = *source.header();
        let key = KeySection::decode(source.key()).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(source.attributes()).map_err(|_| ErrorCode::Corrupt)?;
        let (segment, slot, epoch) = (job.segment, job.slot, job.name.version);
        let record = new_record(&header, key, &attributes);
        let grant = Grant { slot, epoch, term: job.term, extent: job.extent, record, writer: Writer::Node };
        self.trial.reached(Point::Loaded);
        // Under the lock: a kill that comes later finds what was begun here, and one that came before is obeyed. Its
        // slot, and the extent, may be somebody else's by now.
        let slots = self.promoting.slots.lock();
        if !self.is_wanted(&slots, job) && !self.trial.planted(Bug::BegunUnasked) {
            return Err(ErrorCode::Cancelled);
        }
        heap.begin_copy(segment, &grant).map_err(|error| error.code())?;
        self.memory.note_copy(segment, slot, epoch, job.extent.units);
        drop(slots);
        let give_up = |code| {
            let _ = heap.kill(segment, slot, epoch, MonoTime(0));
            self.memory.note(segment, slot, epoch, State::Dead);
            Err(code)
        };
        let Some(mut claim) = heap.claim(segment, slot, epoch) else { return give_up(ErrorCode::Busy) };
        let whole = Span::new(0, header.stripe_len).expect("a record has an end");
        claim.bytes_mut(whole).copy_from_slice(source.payload());
        // Verified when they came from disk, and copied just now.
        for (page, digest) in
            (0..header.stripe_len.div_ceil(PAGE_BYTES)).zip(source.digests().chunks_exact(8))
        {
            claim.seal_page_as(page, u64::from_le_bytes(digest.try_into().expect("eight bytes")));
        }
        self.trial.reached(Point::Copied);
        let slots = self.promoting.slots.lock();
        if !self.is_wanted(&slots, job) && !self.trial.planted(Bug::PromotedUnasked) {
            drop(slots);
            drop(claim);
            return give_up(ErrorCode::Cancelled);
        }
        let published = claim.publish(header.root);
        drop(slots);
        if let Err(error) = published {
            return give_up(error.code());
        }
        self.memory.note(segment, slot, epoch, State::Ready);
        Ok(())
    }
}
