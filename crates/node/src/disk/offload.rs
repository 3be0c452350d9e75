//! Offloading: what a master has chosen to leave memory is written to the disk, many records at a time, and told when it
//! would survive a crash.
//!
//! A record is pinned while it is written, so that it does not change; that it is removed meanwhile the backend notices,
//! because the removal is in its log before the record is in its index, or after.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use moontide_disk::{DiskLayout, Queue, Source, WriteError};
use moontide_heap::NodePin;
use moontide_proto::OrderResult;
use moontide_types::record::{State, Word};
use moontide_types::{Clock, Epoch, ErrorCode, ObjectId, SegmentId, SessionId, SlotId, SystemClock};
use tracing::debug;

use super::counters::raise;
use super::planted::{Bug, Point};
use super::{Closed, DiskTier};
use crate::decide::batch::{Batch, Limits, Throttle};
use crate::decide::notice::NoticeBuilder;
use crate::decide::orders::Answer;

/// A record that is to be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OffloadJob {
    pub(crate) session: SessionId,
    pub(crate) order: u64,
    pub(crate) segment: SegmentId,
    pub(crate) slot: SlotId,
    pub(crate) epoch: Epoch,
    pub(crate) id: ObjectId,
    /// Its size in memory, about.
    pub(crate) bytes: u64,
    /// Not wanted any more after this.
    pub(crate) until: Instant,
}

/// Beyond this share of the limit room is made ahead of need, in thousandths.
const FULL_PERMILLE: u64 = 980;

/// And so much of it, in thousandths of the limit.
const EVICT_PERMILLE: u64 = 10;

/// The writing thread.
pub(super) fn run(tier: &DiskTier, jobs: &Receiver<OffloadJob>) {
    let mut queue = tier.queue(false);
    let limits = Limits::default();
    let mut throttle = Throttle::new(tier.config.write_bytes_per_s);
    while let Ok(first) = jobs.recv() {
        let mut batch = Batch::default();
        let mut taken = vec![first];
        batch.add(first.bytes, SystemClock.now());
        while let Some(wait) = batch.wait(&limits, SystemClock.now()) {
            match jobs.recv_timeout(wait) {
                Ok(job) => {
                    batch.add(job.bytes, SystemClock.now());
                    taken.push(job);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        let bytes = taken.iter().map(|job| job.bytes).sum();
        tier.write_batch(&mut *queue, &taken, &mut throttle);
        tier.backlog.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl DiskTier {
    fn write_batch(&self, queue: &mut dyn Queue, jobs: &[OffloadJob], throttle: &mut Throttle) {
        let mut answers: Vec<(SessionId, OrderResult)> = Vec::with_capacity(jobs.len());
        let mut pinned: Vec<(&OffloadJob, NodePin<'_>)> = Vec::with_capacity(jobs.len());
        for job in jobs {
            match self.pin_for_writing(job) {
                Ok(pin) => pinned.push((job, pin)),
                Err(code) => answers.push(self.refuse(job, code)),
            }
        }
        self.trial.reached(Point::Pinned);
        if !pinned.is_empty() {
            self.write_pinned(queue, &pinned, throttle, &mut answers);
        }
        self.answer(answers);
    }

    fn pin_for_writing(&self, job: &OffloadJob) -> Result<NodePin<'_>, ErrorCode> {
        match self.closed() {
            Some(Closed::Full) => return Err(ErrorCode::DiskFull),
            Some(Closed::Failed) => return Err(ErrorCode::DiskError),
            None => {}
        }
        if !self.is_live(job.session) || job.until <= Instant::now() {
            return Err(ErrorCode::Cancelled);
        }
        let pin = self.memory.heap().pin(job.segment, job.slot, job.epoch).ok_or(ErrorCode::Gone)?;
        if pin.is_in_device() {
            return Err(ErrorCode::Unsupported); // masters do not ask for it: it has no digests
        }
        if pin.header().id == job.id { Ok(pin) } else { Err(ErrorCode::Gone) }
    }

    fn write_pinned(
        &self,
        queue: &mut dyn Queue,
        pinned: &[(&OffloadJob, NodePin<'_>)],
        throttle: &mut Throttle,
        answers: &mut Vec<(SessionId, OrderResult)>,
    ) {
        let sources: Vec<Source<'_>> = pinned.iter().map(|(_, pin)| source_of(pin)).collect();
        let bytes: u64 = pinned.iter().map(|(_, pin)| DiskLayout::of(pin.header()).len).sum();
        self.make_room(queue, bytes);
        let wait = throttle.take(bytes, SystemClock.now());
        if wait > Duration::ZERO {
            raise(&self.counters.throttled_ms, wait.as_millis() as u64);
            std::thread::sleep(wait);
        }
        let mut outcomes = self.backend.write(queue, &sources);
        let short = outcomes.iter().filter_map(|outcome| match outcome {
            Err(WriteError::Full { wanted }) => Some(*wanted),
            _ => None,
        });
        if let Some(wanted) = short.max() {
            // Others were faster, or space is cut to pieces: once more.
            self.evict(queue, wanted);
            let left: Vec<usize> = (0..outcomes.len())
                .filter(|&at| matches!(outcomes[at], Err(WriteError::Full { .. })))
                .collect();
            let again: Vec<Source<'_>> = left.iter().map(|&at| sources[at]).collect();
            for (at, outcome) in left.into_iter().zip(self.backend.write(queue, &again)) {
                outcomes[at] = outcome;
            }
        }
        self.trial.reached(Point::Written);
        self.judge(&outcomes);
        let mut notices: BTreeMap<SessionId, NoticeBuilder> = BTreeMap::new();
        for ((job, pin), outcome) in pinned.iter().zip(outcomes) {
            let answer = match outcome {
                Ok(()) | Err(WriteError::Exists) => {
                    if outcome.is_ok() {
                        raise(&self.counters.offloaded_records, 1);
                        raise(&self.counters.offloaded_bytes, pin.header().stripe_len);
                    }
                    let notice = notices.entry(job.session).or_default();
                    notice.push(pin.header(), pin.key(), pin.attributes());
                    if notice.is_full() {
                        self.tell_written(job.session, notice);
                    }
                    Answer::done(Word::new(job.epoch, State::Ready)).to(job.order)
                }
                Err(error) => {
                    debug!(id = %job.id, %error, "a record is not written to disk");
                    self.refuse(job, refusal(error)).1
                }
            };
            answers.push((job.session, answer));
        }
        for (session, mut notice) in notices {
            self.tell_written(session, &mut notice);
        }
    }

    /// Whether failures of a batch say something about the disk, and not about the records.
    fn judge(&self, outcomes: &[Result<(), WriteError>]) {
        let has = |is: fn(&WriteError) -> bool| outcomes.iter().filter_map(|o| o.as_ref().err()).any(is);
        if has(|error| matches!(error, WriteError::Io)) {
            self.close(Closed::Failed);
        } else if has(|error| matches!(error, WriteError::NoSpace | WriteError::Full { .. })) {
            self.close(Closed::Full);
        }
    }

    fn refuse(&self, job: &OffloadJob, code: ErrorCode) -> (SessionId, OrderResult) {
        raise(&self.counters.offloads_refused, 1);
        (job.session, Answer::refused(code, Word::default()).to(job.order))
    }

    /// Evicts ahead of need, so that what is about to be written fits.
    fn make_room(&self, queue: &mut dyn Queue, bytes: u64) {
        let usage = self.backend.usage();
        let full = usage.limit / 1000 * FULL_PERMILLE;
        if usage.bytes + bytes > full {
            self.evict(queue, (usage.bytes + bytes - full).max(usage.limit / 1000 * EVICT_PERMILLE));
        }
    }

    /// Evicts: what is chosen can be found no more, then it is gone for good, and then masters are told. What they do not know
    /// they answer a removal of, for certain; so nothing that they were told to be gone, or were not told of, may come back
    /// with a crash. Readers whom they send here meanwhile find nothing, and ask again.
    fn evict(&self, queue: &mut dyn Queue, bytes: u64) {
        let _telling = self.telling.lock();
        let Some(eviction) = self.backend.prepare_eviction(bytes) else { return };
        let names = eviction.names.clone();
        if self.trial.planted(Bug::EvictedLater) {
            self.send_gone(&names);
            self.trial.reached(Point::Told);
            return self.backend.finish_eviction(queue, eviction);
        }
        self.backend.finish_eviction(queue, eviction);
        self.send_gone(&names);
        self.trial.reached(Point::Told);
        raise(&self.counters.evicted_records, names.len() as u64);
    }
}

fn source_of<'a>(pin: &'a NodePin<'_>) -> Source<'a> {
    Source {
        header: pin.header(),
        payload: pin.payload(),
        digests: pin.digests(),
        key: pin.key(),
        attributes: pin.attributes(),
    }
}

fn refusal(error: WriteError) -> ErrorCode {
    match error {
        WriteError::TooLarge { .. } => ErrorCode::TooLarge,
        WriteError::Full { .. } | WriteError::NoSpace => ErrorCode::DiskFull,
        WriteError::Io => ErrorCode::DiskError,
        WriteError::Removed => ErrorCode::Gone,
        WriteError::Exists => ErrorCode::AlreadyExists,
        _ => ErrorCode::Corrupt,
    }
}
