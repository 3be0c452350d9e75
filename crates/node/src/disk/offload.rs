//! Offload: writes records that a master has chosen to disk, in batches, and notifies the master when they are durable.
//!
//! A record is pinned while it is written, so that it does not change. If it is removed meanwhile, the backend detects
//! it, because the removal is in its log before the record is in its index, or after.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moontide_disk::{DiskLayout, Queue, RecordId, RecordSource, WriteError};
use moontide_heap::NodePin;
use moontide_rt::mark;
use moontide_rt::sync::mpsc::{Receiver, RecvTimeoutError};
use moontide_rt::time::Instant;
use moontide_types::record::{State, Word};
use moontide_types::{Clock, Epoch, ErrorCode, ObjectId, SegmentId, SessionId, SlotId, SystemClock};
use tracing::{debug, warn};

use super::counters::increment;
use super::device::Device;
use super::open_jobs::JobTicket;
use super::test_hooks::{HookPoint, Mutation};
use super::{DiskTier, WritePauseReason};
use crate::logic::batch::{BatchLimits, ByteThrottle, OffloadBatch};
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

/// Whether a record was written, or why not.
type WriteOutcome = Result<(), ErrorCode>;

/// Runs the offload thread of a directory.
pub(super) fn run(tier: &DiskTier, device: &Device, jobs: &Receiver<(JobTicket, OffloadJob)>) {
    let mut queue = device.queue(None);
    let limits = BatchLimits::default();
    let mut throttle = ByteThrottle::new(tier.config.write_bytes_per_s);
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
        let outcomes = tier.write_batch(device, &mut *queue, &taken, &mut throttle);
        device.backlog.fetch_sub(bytes, Ordering::Relaxed);
        tier.end_offloads(device, &tickets, outcomes);
    }
}

impl DiskTier {
    /// Queues a record for writing.
    pub(crate) fn offload(&self, job: OffloadJob) {
        self.queue_offload(self.open_jobs.begin_offload(job.session, job.id), job);
    }

    /// Queues a record in the directory that will write it first. A job that moves to another directory keeps its ticket: an
    /// inventory may wait for it.
    fn queue_offload(&self, ticket: JobTicket, job: OffloadJob) {
        // If none accepts writes, the first one says why.
        while let Some(device) = self.device_to_write().or(self.devices().next()) {
            let (offloads, mut open) = (device.offloads.lock(), device.open_offloads.lock());
            match (&*offloads, &mut *open) {
                (Some(offloads), Some(open)) => {
                    device.backlog.fetch_add(job.bytes, Ordering::Relaxed);
                    open.insert(ticket, job);
                    let _ = offloads.send((ticket, job));
                    return;
                }
                _ if device.is_excluded() => {} // meanwhile
                _ => break,                     // the tier stops
            }
        }
        self.open_jobs.end(ticket);
    }

    /// Returns the directory that accepts writes and will write a record first.
    fn device_to_write(&self) -> Option<&Arc<Device>> {
        let writable = self.devices().filter(|device| device.write_pause_reason().is_none());
        writable.min_by_key(|device| device.write_order())
    }

    /// Ends jobs: replies, or has another directory try it if this one cannot write. `None` as outcome: the tier stops.
    fn end_offloads(&self, device: &Device, tickets: &[JobTicket], outcomes: Vec<Option<WriteOutcome>>) {
        let mut results = Vec::with_capacity(tickets.len());
        let mut ended = Vec::with_capacity(tickets.len());
        for (ticket, outcome) in tickets.iter().zip(outcomes) {
            // After the exclusion of this directory, another one writes it and replies.
            if outcome.is_none() && device.is_excluded() {
                continue;
            }
            let claimed = device.open_offloads.lock().as_mut().and_then(|open| open.remove(ticket));
            let Some(job) = claimed else { continue };
            match outcome {
                None => {}
                Some(Err(code)) => {
                    let is_of_device = matches!(code, ErrorCode::DiskError | ErrorCode::DiskFull);
                    if is_of_device
                        && self.device_to_write().is_some_and(|other| other.number != device.number)
                    {
                        self.queue_offload(*ticket, job);
                        continue;
                    }
                    increment(&self.counters.offloads_refused, 1);
                    let reply = CommandReply::refused(code, Word::default());
                    results.push((job.session, reply.to(job.command_id)));
                }
                Some(Ok(())) => {
                    let reply = CommandReply::done(Word::new(job.epoch, State::Ready));
                    results.push((job.session, reply.to(job.command_id)));
                }
            }
            ended.push(*ticket);
        }
        self.events.send_results(results);
        // The masters have been notified, so their inventories may end.
        ended.into_iter().for_each(|ticket| self.open_jobs.end(ticket));
    }

    /// Has other directories write what was queued in an excluded one.
    pub(super) fn move_offloads(&self, device: &Device) {
        let open = device.open_offloads.lock().take().unwrap_or_default();
        for (ticket, job) in open {
            self.queue_offload(ticket, job);
        }
    }

    /// Writes records. Returns the outcome of each; `None` if the tier stops.
    fn write_batch(
        &self,
        device: &Device,
        queue: &mut dyn Queue,
        jobs: &[OffloadJob],
        throttle: &mut ByteThrottle,
    ) -> Vec<Option<WriteOutcome>> {
        let mut outcomes: Vec<Option<WriteOutcome>> = vec![None; jobs.len()];
        let mut pinned: Vec<(usize, &OffloadJob, NodePin<'_>)> = Vec::with_capacity(jobs.len());
        for (at, job) in jobs.iter().enumerate() {
            match self.pin_for_writing(device, job) {
                Ok(pin) if !device.take_flush_budget(DiskLayout::of(pin.header()).len) => {
                    outcomes[at] = Some(Err(ErrorCode::DiskFull));
                }
                Ok(pin) => pinned.push((at, job, pin)),
                Err(code) => outcomes[at] = Some(Err(code)),
            }
        }
        self.test_hooks.reached(HookPoint::Pinned);
        if !pinned.is_empty() {
            self.write_pinned(device, queue, &pinned, throttle, &mut outcomes);
        }
        outcomes
    }

    fn pin_for_writing(&self, device: &Device, job: &OffloadJob) -> Result<NodePin<'_>, ErrorCode> {
        match device.write_pause_reason() {
            Some(WritePauseReason::Full) => return Err(ErrorCode::DiskFull),
            Some(WritePauseReason::Failed) => return Err(ErrorCode::DiskError),
            None => {}
        }
        if device.is_excluded() {
            return Err(ErrorCode::DiskError);
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
        device: &Device,
        queue: &mut dyn Queue,
        pinned: &[(usize, &OffloadJob, NodePin<'_>)],
        throttle: &mut ByteThrottle,
        results: &mut [Option<WriteOutcome>],
    ) {
        let sources: Vec<RecordSource<'_>> = pinned.iter().map(|(_, _, pin)| source_of(pin)).collect();
        let bytes: u64 = pinned.iter().map(|(_, _, pin)| DiskLayout::of(pin.header()).len).sum();
        self.evict_ahead(device, queue, bytes);
        let wait = throttle.take(bytes, SystemClock.now());
        if wait > Duration::ZERO {
            increment(&self.counters.throttled_ms, wait.as_millis() as u64);
            if !wait_unless_stopped(device, wait) {
                return; // no master waits for a result, or another directory writes it
            }
        }
        let mut outcomes = self.write_new(device, queue, &sources);
        let short = outcomes.iter().filter_map(|outcome| match outcome {
            Err(WriteError::Full { needed }) => Some(*needed),
            _ => None,
        });
        if let Some(needed) = short.max() {
            // Concurrent writes took the space, or it is fragmented: evict and retry once.
            self.evict(device, queue, needed);
            let left: Vec<usize> = (0..outcomes.len())
                .filter(|&at| matches!(outcomes[at], Err(WriteError::Full { .. })))
                .collect();
            let retry: Vec<RecordSource<'_>> = left.iter().map(|&at| sources[at]).collect();
            for (at, outcome) in left.into_iter().zip(self.write_new(device, queue, &retry)) {
                outcomes[at] = outcome;
            }
        }
        self.test_hooks.reached(HookPoint::Written);
        self.pause_on_disk_errors(device, &outcomes);
        let mut notices: BTreeMap<SessionId, OffloadNoticeBuilder> = BTreeMap::new();
        for ((at, job, pin), outcome) in pinned.iter().zip(outcomes) {
            self.mark_written(job, &outcome);
            results[*at] = Some(match outcome {
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
                    Ok(())
                }
                Err(error) => {
                    debug!(id = %job.id, %error, "record not written to disk");
                    Err(refusal(error))
                }
            });
        }
        for (session, mut notice) in notices {
            self.notify_written(session, &mut notice);
        }
    }

    /// Tells a simulated world what has happened while a record was written.
    fn mark_written(&self, job: &OffloadJob, outcome: &Result<(), WriteError>) {
        let removed = || matches!(outcome, Err(WriteError::Removed)) || self.is_removing(job.id);
        let over = || !self.is_live(job.session);
        mark!("write ends after its session", over());
        mark!("write ends after the removal of its version", removed());
        mark!("write ends after its session and a removal of its version", over() && removed());
        let pin = || self.memory.heap().pin(job.segment, job.slot, job.epoch);
        mark!("kill while a writer has the pin", pin().is_none());
    }

    /// Writes records that no other directory has.
    fn write_new(
        &self,
        device: &Device,
        queue: &mut dyn Queue,
        sources: &[RecordSource<'_>],
    ) -> Vec<Result<(), WriteError>> {
        let elsewhere = |source: &RecordSource<'_>| {
            let found = self.device_of(&RecordId::of(source.header));
            found.is_some_and(|found| found.number != device.number)
        };
        let is_elsewhere: Vec<bool> = sources.iter().map(elsewhere).collect();
        let new = sources.iter().zip(&is_elsewhere).filter(|(_, elsewhere)| !**elsewhere);
        let new: Vec<RecordSource<'_>> = new.map(|(source, _)| *source).collect();
        let running = device.health.begin();
        let mut written = device.backend.write(queue, &new).into_iter();
        drop(running);
        let outcome = |elsewhere| match elsewhere {
            true => Err(WriteError::Exists),
            false => written.next().unwrap_or(Err(WriteError::Io)),
        };
        is_elsewhere.into_iter().map(outcome).collect()
    }

    /// Pauses writes if errors of a batch concern the disk and not the records.
    fn pause_on_disk_errors(&self, device: &Device, outcomes: &[Result<(), WriteError>]) {
        let has = |is: fn(&WriteError) -> bool| outcomes.iter().filter_map(|o| o.as_ref().err()).any(is);
        let reason = if has(|error| matches!(error, WriteError::Io)) {
            WritePauseReason::Failed
        } else if has(|error| matches!(error, WriteError::NoSpace | WriteError::Full { .. })) {
            WritePauseReason::Full
        } else {
            return;
        };
        device.pause_writes(reason, self.write_pause);
        self.counters.write_failed();
    }

    /// Evicts in advance, so that the next write of `bytes` bytes fits.
    fn evict_ahead(&self, device: &Device, queue: &mut dyn Queue, bytes: u64) {
        let usage = device.backend.usage();
        let full = usage.limit / 1000 * FULL_PERMILLE;
        if usage.bytes + bytes > full {
            let needed = (usage.bytes + bytes - full).max(usage.limit / 1000 * EVICT_PERMILLE);
            self.evict(device, queue, needed);
        }
    }

    /// Evicts records: they can no longer be found, then they are durably removed, and then the masters are notified. A
    /// master replies to the removal of an object that it does not know at once and with certainty; so a record that a
    /// master was notified is gone, or was never notified of, must not reappear after a crash. Readers that a master still
    /// sends here find nothing, and ask again.
    fn evict(&self, device: &Device, queue: &mut dyn Queue, bytes: u64) {
        let guard = self.notify_lock.lock();
        let Some(eviction) = device.backend.prepare_eviction(bytes) else { return };
        let names = eviction.names.clone();
        let number = device.evictions.lock().begin(&names);
        if self.test_hooks.mutation.is_enabled(Mutation::EvictedLater) {
            self.send_gone(&names);
            self.test_hooks.reached(HookPoint::Notified);
        }
        drop(guard);
        self.test_hooks.reached(HookPoint::Evicting);
        let running = device.health.begin();
        let finished = device.backend.finish_eviction(queue, eviction);
        drop(running);
        if let Err(error) = finished
            && !self.remove_evicted(device, queue, &names, &error)
        {
            return; // no master is told, and no inventory of this node ends
        }
        let guard = self.notify_lock.lock();
        device.evictions.lock().running.remove(&number);
        // A record may have been written again, or be in another directory.
        let gone: Vec<RecordId> = names.into_iter().filter(|name| self.is_gone(name)).collect();
        if !self.test_hooks.mutation.is_enabled(Mutation::EvictedLater) {
            self.send_gone(&gone);
            self.test_hooks.reached(HookPoint::Notified);
        }
        drop(guard);
        increment(&self.counters.evicted_records, gone.len() as u64);
    }

    /// Removes evicted records whose files could not be deleted: the log of removals makes it durable. Tries until that
    /// succeeds; returns `false` if the node stops, or the directory is excluded.
    fn remove_evicted(
        &self,
        device: &Device,
        queue: &mut dyn Queue,
        names: &[RecordId],
        error: &io::Error,
    ) -> bool {
        warn!(dir = ?device.dir, %error, records = names.len(), "evicted records cannot be deleted; removing them by the log");
        if self.test_hooks.mutation.is_enabled(Mutation::EvictionErrorIgnored) {
            return true;
        }
        let versions: Vec<(ObjectId, Epoch)> = names.iter().map(|name| (name.id, name.version)).collect();
        loop {
            let running = device.health.begin();
            let removed = device.backend.remove(queue, &versions);
            drop(running);
            match removed {
                Ok(()) => return true,
                Err(error) => {
                    warn!(dir = ?device.dir, %error, "evicted records cannot be removed; trying again")
                }
            }
            device.pause_writes(WritePauseReason::Failed, self.write_pause);
            if device.is_excluded() || !wait_unless_stopped(device, self.write_pause) {
                return false;
            }
        }
    }
}

/// Waits for the write rate limit. Returns `false` if the node stops meanwhile.
fn wait_unless_stopped(device: &Device, wait: Duration) -> bool {
    let until = Instant::now() + wait;
    loop {
        if device.offloads.lock().is_none() {
            return false;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        moontide_rt::thread::sleep(left.min(STOP_POLL_INTERVAL));
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
