//! Offload: writes records that a master has chosen to disk, in batches, and notifies the master when they are durable.
//!
//! A record is pinned while it is written, so that it does not change. If it is removed meanwhile, the backend detects
//! it, because the removal is in its log before the record is in its index, or after.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use moontide_disk::{DiskLayout, Queue, RecordSource, WriteError};
use moontide_heap::NodePin;
use moontide_proto::CommandResult;
use moontide_types::record::{State, Word};
use moontide_types::{Clock, Epoch, ErrorCode, ObjectId, SegmentId, SessionId, SlotId, SystemClock};
use tracing::debug;

use super::counters::increment;
use super::open_jobs::JobTicket;
use super::test_hooks::{HookPoint, Mutation};
use super::{DiskTier, WritePauseReason};
use crate::logic::batch::{BatchLimits, OffloadBatch, WriteThrottle};
use crate::logic::commands::CommandReply;
use crate::logic::notice::OffloadNoticeBuilder;

/// A record to write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OffloadJob {
    pub(crate) session: SessionId,
    pub(crate) command_id: u64,
    pub(crate) segment: SegmentId,
    pub(crate) slot: SlotId,
    pub(crate) epoch: Epoch,
    pub(crate) id: ObjectId,
    /// Approximate size in memory.
    pub(crate) bytes: u64,
    /// Deadline of the command.
    pub(crate) until: Instant,
}

/// Share of the limit, in thousandths, above which space is freed in advance.
const FULL_PERMILLE: u64 = 980;

/// Minimum amount to free, in thousandths of the limit.
const EVICT_PERMILLE: u64 = 10;

/// Interval at which a thread that waits for the write rate limit checks whether the node stops.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Runs the offload thread.
pub(super) fn run(tier: &DiskTier, jobs: &Receiver<(JobTicket, OffloadJob)>) {
    let mut queue = tier.queue(false);
    let limits = BatchLimits::default();
    let mut throttle = WriteThrottle::new(tier.config.write_bytes_per_s);
    while let Ok((ticket, first)) = jobs.recv() {
        let mut batch = OffloadBatch::default();
        let (mut tickets, mut taken) = (vec![ticket], vec![first]);
        batch.add(first.bytes, SystemClock.now());
        while let Some(wait) = batch.wait(&limits, SystemClock.now()) {
            match jobs.recv_timeout(wait) {
                Ok((ticket, job)) => {
                    batch.add(job.bytes, SystemClock.now());
                    tickets.push(ticket);
                    taken.push(job);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        let bytes = taken.iter().map(|job| job.bytes).sum();
        tier.write_batch(&mut *queue, &taken, &mut throttle);
        tier.backlog.fetch_sub(bytes, Ordering::Relaxed);
        // The masters have been notified, so their inventories may end.
        tickets.into_iter().for_each(|ticket| tier.open_jobs.end(ticket));
    }
}

impl DiskTier {
    fn write_batch(&self, queue: &mut dyn Queue, jobs: &[OffloadJob], throttle: &mut WriteThrottle) {
        let mut results: Vec<(SessionId, CommandResult)> = Vec::with_capacity(jobs.len());
        let mut pinned: Vec<(&OffloadJob, NodePin<'_>)> = Vec::with_capacity(jobs.len());
        for job in jobs {
            match self.pin_for_writing(job) {
                Ok(pin) if !self.take_flush_budget(DiskLayout::of(pin.header()).len) => {
                    results.push(self.refuse(job, ErrorCode::DiskFull));
                }
                Ok(pin) => pinned.push((job, pin)),
                Err(code) => results.push(self.refuse(job, code)),
            }
        }
        self.test_hooks.reached(HookPoint::Pinned);
        if !pinned.is_empty() {
            self.write_pinned(queue, &pinned, throttle, &mut results);
        }
        self.send_results(results);
    }

    fn pin_for_writing(&self, job: &OffloadJob) -> Result<NodePin<'_>, ErrorCode> {
        match self.write_pause_reason() {
            Some(WritePauseReason::Full) => return Err(ErrorCode::DiskFull),
            Some(WritePauseReason::Failed) => return Err(ErrorCode::DiskError),
            None => {}
        }
        let is_current = self.subscribers.read().has_object(job.session, job.id);
        if !is_current || job.until <= Instant::now() {
            return Err(ErrorCode::Cancelled);
        }
        let pin = self.memory.heap().pin(job.segment, job.slot, job.epoch).ok_or(ErrorCode::Gone)?;
        if pin.is_in_device() {
            return Err(ErrorCode::Unsupported); // masters do not request it: it has no digests
        }
        if pin.header().id == job.id { Ok(pin) } else { Err(ErrorCode::Gone) }
    }

    fn write_pinned(
        &self,
        queue: &mut dyn Queue,
        pinned: &[(&OffloadJob, NodePin<'_>)],
        throttle: &mut WriteThrottle,
        results: &mut Vec<(SessionId, CommandResult)>,
    ) {
        let sources: Vec<RecordSource<'_>> = pinned.iter().map(|(_, pin)| source_of(pin)).collect();
        let bytes: u64 = pinned.iter().map(|(_, pin)| DiskLayout::of(pin.header()).len).sum();
        self.evict_ahead(queue, bytes);
        let wait = throttle.take(bytes, SystemClock.now());
        if wait > Duration::ZERO {
            increment(&self.counters.throttled_ms, wait.as_millis() as u64);
            if !self.wait_unless_stopped(wait) {
                return; // the sessions have ended: no master waits for a result
            }
        }
        let mut outcomes = self.backend.write(queue, &sources);
        let short = outcomes.iter().filter_map(|outcome| match outcome {
            Err(WriteError::Full { needed }) => Some(*needed),
            _ => None,
        });
        if let Some(needed) = short.max() {
            // Concurrent writes took the space, or it is fragmented: evict and retry once.
            self.evict(queue, needed);
            let left: Vec<usize> = (0..outcomes.len())
                .filter(|&at| matches!(outcomes[at], Err(WriteError::Full { .. })))
                .collect();
            let retry: Vec<RecordSource<'_>> = left.iter().map(|&at| sources[at]).collect();
            for (at, outcome) in left.into_iter().zip(self.backend.write(queue, &retry)) {
                outcomes[at] = outcome;
            }
        }
        self.test_hooks.reached(HookPoint::Written);
        self.pause_on_disk_errors(&outcomes);
        let mut notices: BTreeMap<SessionId, OffloadNoticeBuilder> = BTreeMap::new();
        for ((job, pin), outcome) in pinned.iter().zip(outcomes) {
            let result = match outcome {
                Ok(()) | Err(WriteError::Exists) => {
                    if outcome.is_ok() {
                        increment(&self.counters.offloaded_records, 1);
                        increment(&self.counters.offloaded_bytes, pin.header().stripe_len);
                    }
                    let notice = notices.entry(job.session).or_default();
                    notice.push(pin.header(), pin.key(), pin.attributes(), false);
                    if notice.is_full() {
                        self.notify_written(job.session, notice);
                    }
                    CommandReply::done(Word::new(job.epoch, State::Ready)).to(job.command_id)
                }
                Err(error) => {
                    debug!(id = %job.id, %error, "record not written to disk");
                    self.refuse(job, refusal(error)).1
                }
            };
            results.push((job.session, result));
        }
        for (session, mut notice) in notices {
            self.notify_written(session, &mut notice);
        }
    }

    /// Waits for the write rate limit. Returns `false` if the node stops meanwhile.
    fn wait_unless_stopped(&self, wait: Duration) -> bool {
        let until = Instant::now() + wait;
        loop {
            if self.offloads.lock().is_none() {
                return false;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(STOP_POLL_INTERVAL));
        }
    }

    /// Pauses writes if errors of a batch concern the disk and not the records.
    fn pause_on_disk_errors(&self, outcomes: &[Result<(), WriteError>]) {
        let has = |is: fn(&WriteError) -> bool| outcomes.iter().filter_map(|o| o.as_ref().err()).any(is);
        if has(|error| matches!(error, WriteError::Io)) {
            self.pause_writes(WritePauseReason::Failed);
        } else if has(|error| matches!(error, WriteError::NoSpace | WriteError::Full { .. })) {
            self.pause_writes(WritePauseReason::Full);
        }
    }

    fn refuse(&self, job: &OffloadJob, code: ErrorCode) -> (SessionId, CommandResult) {
        increment(&self.counters.offloads_refused, 1);
        (job.session, CommandReply::refused(code, Word::default()).to(job.command_id))
    }

    /// Evicts in advance, so that the next write of `bytes` bytes fits.
    fn evict_ahead(&self, queue: &mut dyn Queue, bytes: u64) {
        let usage = self.backend.usage();
        let full = usage.limit / 1000 * FULL_PERMILLE;
        if usage.bytes + bytes > full {
            self.evict(queue, (usage.bytes + bytes - full).max(usage.limit / 1000 * EVICT_PERMILLE));
        }
    }

    /// Evicts records: they can no longer be found, then they are durably removed, and then the masters are notified. A
    /// master replies to the removal of an object that it does not know at once and with certainty; so a record that a
    /// master was notified is gone, or was never notified of, must not reappear after a crash. Readers that a master still
    /// sends here find nothing, and ask again.
    fn evict(&self, queue: &mut dyn Queue, bytes: u64) {
        let _guard = self.notify_lock.lock();
        let Some(eviction) = self.backend.prepare_eviction(bytes) else { return };
        let names = eviction.names.clone();
        if self.test_hooks.mutation.is_enabled(Mutation::EvictedLater) {
            self.send_gone(&names);
            self.test_hooks.reached(HookPoint::Notified);
            return self.backend.finish_eviction(queue, eviction);
        }
        self.backend.finish_eviction(queue, eviction);
        self.send_gone(&names);
        self.test_hooks.reached(HookPoint::Notified);
        increment(&self.counters.evicted_records, names.len() as u64);
    }
}

fn source_of<'a>(pin: &'a NodePin<'_>) -> RecordSource<'a> {
    RecordSource {
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
