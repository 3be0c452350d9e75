//! Removal: the threads that make removals of masters durable before the reply, in batches. A removal is durable when it is
//! so in all directories: a record may have been in any of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use moontide_disk::Queue;
use moontide_rt::mark;
use moontide_rt::sync::Mutex;
use moontide_rt::sync::mpsc::{Receiver, RecvTimeoutError};
use moontide_rt::time::Instant;
use moontide_types::record::Word;
use moontide_types::{Epoch, ErrorCode, ObjectId, SessionId};
use tracing::{error, info};

use super::counters::increment;
use super::device::Device;
use super::open_jobs::JobTicket;
use super::test_hooks::{HookPoint, Mutation};
use super::{DiskTier, WritePauseReason};
use crate::logic::commands::CommandReply;

/// A removed version, and the reply to send when the removal is durable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemovalJob {
    pub(crate) session: SessionId,
    pub(crate) command_id: u64,
    pub(crate) id: ObjectId,
    pub(crate) version: Epoch,
    pub(crate) reply: CommandReply,
}

/// Longer than a node runs, and short enough for any clock.
const NO_TIMEOUT: Duration = Duration::from_secs(86_400 * 365);

/// Maximum number of removals in one write to the disk.
const REMOVAL_BATCH_MAX: usize = 4096;

/// Maximum number of failed removals that are retried; beyond it, the oldest are dropped. A million take about 200 MB.
const RETRY_MAX: usize = 1 << 20;

/// A removal in all directories.
#[derive(Debug)]
pub(super) struct Removal {
    ticket: JobTicket,
    job: RemovalJob,
    progress: Mutex<RemovalProgress>,
}

#[cfg(feature = "testing")]
impl Removal {
    /// Whether a write has refused it; false while its progress is locked.
    pub(super) fn has_failed(&self) -> bool {
        self.progress.try_lock().is_some_and(|progress| progress.has_failed)
    }
}

#[derive(Debug)]
struct RemovalProgress {
    /// Directories that have yet to try it.
    untried: usize,
    /// Directories in which it is not durable.
    open: usize,
    has_failed: bool,
}

/// What has happened to a removal in one directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RemovalEvent {
    /// It is durable, at the first attempt.
    Durable,
    /// The first attempt has failed.
    Failed,
    /// It is durable after a failure.
    DurableLater,
    /// The directory was excluded, or the removal is no longer retried there.
    GivenUp,
}

/// Runs the removal thread of a directory.
pub(super) fn run(tier: &DiskTier, device: &Device, jobs: &Receiver<Arc<Removal>>) {
    let mut queue = device.queue(None);
    let mut failed: VecDeque<Arc<Removal>> = VecDeque::new();
    let mut retry_at = Instant::now();
    loop {
        let starved = tier.test_hooks.mutation.is_enabled(Mutation::RetryStarved);
        let wait = match failed.is_empty() {
            true => NO_TIMEOUT,
            false if starved => tier.write_pause,
            false => retry_at.saturating_duration_since(Instant::now()),
        };
        let idle = match jobs.recv_timeout(wait) {
            Ok(first) => {
                let batch: Vec<Arc<Removal>> =
                    std::iter::once(first).chain(jobs.try_iter()).take(REMOVAL_BATCH_MAX).collect();
                let was_empty = failed.is_empty();
                write_batch(tier, device, &mut *queue, &batch, &mut failed);
                if was_empty {
                    retry_at = Instant::now() + tier.write_pause;
                }
                false
            }
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        // Also between batches: steady removals must not delay the failed ones indefinitely.
        if !failed.is_empty() && retry_at <= Instant::now() && (idle || !starved) {
            retry_failed(tier, device, &mut *queue, &mut failed);
            retry_at = Instant::now() + tier.write_pause;
        }
    }
}

fn write_batch(
    tier: &DiskTier,
    device: &Device,
    queue: &mut dyn Queue,
    batch: &[Arc<Removal>],
    failed: &mut VecDeque<Arc<Removal>>,
) {
    tier.test_hooks.reached(HookPoint::Removing);
    let versions = versions_of(batch);
    let running = device.health.begin();
    let removed = device.backend.remove(queue, &versions);
    drop(running);
    device.health.record_removal(removed.is_ok());
    // After the records can no longer be found, so that none is loaded again. The reply notifies the master, later.
    let guard = tier.notify_lock.lock();
    tier.unpublish(&tier.cache.take_versions(&versions));
    drop(guard);
    let event = match &removed {
        Ok(()) => RemovalEvent::Durable,
        Err(error) => {
            if device.write_pause_reason().is_none() {
                let dir = device.dir.display();
                error!(%dir, %error, "cannot write removal to disk, retrying; its object may reappear after a restart");
            }
            let full = error.kind() == std::io::ErrorKind::StorageFull;
            mark!("disk full at a removal", full);
            let reason = if full { WritePauseReason::Full } else { WritePauseReason::Failed };
            device.pause_writes(reason, tier.write_pause);
            tier.counters.write_failed();
            RemovalEvent::Failed
        }
    };
    tier.removals_ended(device, batch, event);
    if removed.is_err() {
        failed.extend(batch.iter().cloned());
        let dropped: Vec<Arc<Removal>> = failed.drain(..failed.len().saturating_sub(RETRY_MAX)).collect();
        tier.removals_ended(device, &dropped, RemovalEvent::GivenUp);
    }
}

/// Retries failed removals. A master that received the refusal sends the command again, but its session may have ended.
fn retry_failed(
    tier: &DiskTier,
    device: &Device,
    queue: &mut dyn Queue,
    failed: &mut VecDeque<Arc<Removal>>,
) {
    let batch: Vec<Arc<Removal>> = failed.iter().take(REMOVAL_BATCH_MAX).cloned().collect();
    let running = device.health.begin();
    let removed = device.backend.remove(queue, &versions_of(&batch));
    drop(running);
    device.health.record_removal(removed.is_ok());
    if removed.is_ok() {
        failed.drain(..batch.len());
        tier.removals_ended(device, &batch, RemovalEvent::DurableLater);
        info!(removed = batch.len(), left = failed.len(), "failed removals written to disk");
    }
}

fn versions_of(batch: &[Arc<Removal>]) -> Vec<(ObjectId, Epoch)> {
    batch.iter().map(|removal| (removal.job.id, removal.job.version)).collect()
}

impl DiskTier {
    /// Queues a removal; the reply follows when it is durable.
    pub(crate) fn remove(&self, job: RemovalJob) {
        let ticket = self.open_jobs.begin_removal(job.id);
        let progress = RemovalProgress { untried: 0, open: 0, has_failed: false };
        let removal = Arc::new(Removal { ticket, job, progress: Mutex::new(progress) });
        // Held until all directories have it: one that is fast must not take itself for the last one.
        let mut progress = removal.progress.lock();
        let mut senders = Vec::with_capacity(self.devices.len());
        for device in self.devices() {
            if self.test_hooks.mutation.is_enabled(Mutation::RemovedOnOne) && device.number > 0 {
                break;
            }
            match &*device.removals.lock() {
                Some(sender) => senders.push((device, sender.clone())),
                None if device.is_excluded() => {}
                // The tier stops: in some directories only, it would not be durable.
                None => return self.open_jobs.end(ticket),
            }
        }
        for (device, sender) in senders {
            // An exclusion that has begun finds it here, or it finds the exclusion.
            let mut open = device.open_removals.lock();
            let Some(open) = &mut *open else { continue };
            open.insert(ticket, Arc::clone(&removal));
            progress.untried += 1;
            progress.open += 1;
            let _ = sender.send(Arc::clone(&removal)); // the tier stops: no master waits for a result
        }
        if progress.open == 0 {
            self.open_jobs.end(ticket);
        }
    }

    /// Gives up the removals in an excluded directory: they need not be durable there.
    pub(super) fn give_up_removals(&self, device: &Device) {
        let open = device.open_removals.lock().take().unwrap_or_default();
        let untried: Vec<Arc<Removal>> = open.into_values().collect();
        self.end_removals(&untried, RemovalEvent::GivenUp);
    }

    /// Records what has happened to removals in a directory, and replies to those that all directories have tried.
    fn removals_ended(&self, device: &Device, batch: &[Arc<Removal>], event: RemovalEvent) {
        let mut open = device.open_removals.lock();
        // After the exclusion they are given up already.
        let Some(open_here) = &mut *open else { return };
        if event != RemovalEvent::Failed {
            batch.iter().for_each(|removal| _ = open_here.remove(&removal.ticket));
        }
        drop(open);
        self.end_removals(batch, event);
    }

    fn end_removals(&self, batch: &[Arc<Removal>], event: RemovalEvent) {
        let mut results = Vec::with_capacity(batch.len());
        for removal in batch {
            let Removal { ticket, job, progress } = &**removal;
            let mut progress = progress.lock();
            let was_untried = progress.untried > 0;
            if event != RemovalEvent::DurableLater {
                progress.untried = progress.untried.saturating_sub(1);
            }
            match event {
                RemovalEvent::Failed => progress.has_failed = true,
                _ => progress.open -= 1,
            }
            if was_untried && progress.untried == 0 {
                let reply = match progress.has_failed {
                    false => job.reply,
                    true => CommandReply::refused(ErrorCode::DiskError, Word::default()),
                };
                results.push((job.session, reply.to(job.command_id)));
            }
            if progress.open == 0 && event != RemovalEvent::Failed {
                let is_durable = event != RemovalEvent::GivenUp;
                increment(&self.counters.removed_records, u64::from(is_durable));
                self.open_jobs.end(*ticket);
            }
        }
        self.events.send_results(results);
    }
}
