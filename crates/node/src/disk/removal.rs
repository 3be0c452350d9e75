//! Removal: the disk thread that makes removals of masters durable before the reply, in batches.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use moontide_disk::Queue;
use moontide_types::record::Word;
use moontide_types::{Epoch, ErrorCode, ObjectId, SessionId};
use tracing::{error, info};

use super::DiskTier;
use super::counters::increment;
use super::open_jobs::JobTicket;
use super::test_hooks::{HookPoint, Mutation};
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

/// Maximum number of failed removals that are retried; beyond it, the oldest are dropped. A million take 24 MB.
const RETRY_MAX: usize = 1 << 20;

/// A removal that could not be written.
type FailedRemoval = (JobTicket, (ObjectId, Epoch));

/// Runs the removal thread.
pub(super) fn run(tier: &DiskTier, jobs: &Receiver<(JobTicket, RemovalJob)>) {
    let mut queue = tier.queue(false);
    let mut failed: VecDeque<FailedRemoval> = VecDeque::new();
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
                let batch: Vec<(JobTicket, RemovalJob)> =
                    std::iter::once(first).chain(jobs.try_iter()).take(REMOVAL_BATCH_MAX).collect();
                let was_empty = failed.is_empty();
                write_batch(tier, &mut *queue, &batch, &mut failed);
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
            retry_failed(tier, &mut *queue, &mut failed);
            retry_at = Instant::now() + tier.write_pause;
        }
    }
}

fn write_batch(
    tier: &DiskTier,
    queue: &mut dyn Queue,
    batch: &[(JobTicket, RemovalJob)],
    failed: &mut VecDeque<FailedRemoval>,
) {
    tier.test_hooks.reached(HookPoint::Removing);
    let versions: Vec<(ObjectId, Epoch)> = batch.iter().map(|(_, job)| (job.id, job.version)).collect();
    let removed = tier.backend.remove(queue, &versions);
    // After the records can no longer be found, so that none is loaded again. The reply notifies the master, later.
    let guard = tier.notify_lock.lock();
    tier.unpublish(&tier.cache.take_versions(&versions));
    drop(guard);
    if let Err(error) = &removed {
        if tier.write_pause_reason().is_none() {
            error!(%error, "cannot write removal to disk, retrying; its object may reappear after a restart");
        }
        let full = error.kind() == std::io::ErrorKind::StorageFull;
        tier.pause_writes(if full { super::WritePauseReason::Full } else { super::WritePauseReason::Failed });
        failed.extend(batch.iter().map(|&(ticket, job)| (ticket, (job.id, job.version))));
        for (ticket, _) in failed.drain(..failed.len().saturating_sub(RETRY_MAX)) {
            tier.open_jobs.end(ticket);
        }
    } else {
        increment(&tier.counters.removed_records, versions.len() as u64);
        batch.iter().for_each(|&(ticket, _)| tier.open_jobs.end(ticket));
    }
    let results = batch.iter().map(|(_, job)| {
        let reply = match removed {
            Ok(()) => job.reply,
            Err(_) => CommandReply::refused(ErrorCode::DiskError, Word::default()),
        };
        (job.session, reply.to(job.command_id))
    });
    tier.send_results(results.collect());
}

/// Retries failed removals. A master that received the refusal sends the command again, but its session may have ended.
fn retry_failed(tier: &DiskTier, queue: &mut dyn Queue, failed: &mut VecDeque<FailedRemoval>) {
    let retried = failed.len().min(REMOVAL_BATCH_MAX);
    let versions: Vec<(ObjectId, Epoch)> = failed.iter().take(retried).map(|&(_, version)| version).collect();
    if tier.backend.remove(queue, &versions).is_ok() {
        failed.drain(..retried).for_each(|(ticket, _)| tier.open_jobs.end(ticket));
        increment(&tier.counters.removed_records, versions.len() as u64);
        info!(removed = versions.len(), left = failed.len(), "failed removals written to disk");
    }
}
