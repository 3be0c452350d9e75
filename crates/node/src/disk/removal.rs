//! Removal: what a master removes is durable before it is answered, many at a time.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use moontide_disk::Queue;
use moontide_types::record::Word;
use moontide_types::{Epoch, ErrorCode, ObjectId, SessionId};
use tracing::{error, info};

use super::DiskTier;
use super::counters::raise;
use crate::decide::orders::Answer;

/// A version that was removed, and what is to be answered when that is durable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemovalJob {
    pub(crate) session: SessionId,
    pub(crate) order: u64,
    pub(crate) id: ObjectId,
    pub(crate) version: Epoch,
    pub(crate) answer: Answer,
}

/// Longer than a node runs, and short enough for any clock.
const FOR_EVER: Duration = Duration::from_secs(86_400 * 365);

/// Removals that share one write to the disk.
const TOGETHER_MAX: usize = 4096;

/// Removals that failed and are tried again; beyond that the oldest are given up. A million take 24 MB.
const FAILED_MAX: usize = 1 << 20;

/// The removing thread.
pub(super) fn run(tier: &DiskTier, jobs: &Receiver<RemovalJob>) {
    let mut queue = tier.queue(false);
    let mut failed: VecDeque<(ObjectId, Epoch)> = VecDeque::new();
    loop {
        let mut batch = match jobs.recv_timeout(if failed.is_empty() { FOR_EVER } else { tier.write_pause }) {
            Ok(first) => vec![first],
            Err(RecvTimeoutError::Timeout) => {
                try_again(tier, &mut *queue, &mut failed);
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
        while batch.len() < TOGETHER_MAX
            && let Ok(more) = jobs.try_recv()
        {
            batch.push(more);
        }
        let versions: Vec<(ObjectId, Epoch)> = batch.iter().map(|job| (job.id, job.version)).collect();
        let removed = tier.backend.remove(&mut *queue, &versions);
        // After they can be found no more, so that nothing is loaded again; and told by the answer, not before.
        let telling = tier.telling.lock();
        tier.shut(&tier.staged.take_versions(&versions));
        drop(telling);
        if let Err(error) = &removed {
            if tier.closed().is_none() {
                error!(%error, "a removal could not be written to the disk: it is tried again, and may come back after a restart");
            }
            let full = error.kind() == std::io::ErrorKind::StorageFull;
            tier.close(if full { super::Closed::Full } else { super::Closed::Failed });
            failed.extend(&versions);
            failed.drain(..failed.len().saturating_sub(FAILED_MAX));
        } else {
            raise(&tier.counters.removed_records, versions.len() as u64);
        }
        let answered = batch.iter().map(|job| {
            let answer = match removed {
                Ok(()) => job.answer,
                Err(_) => Answer::refused(ErrorCode::DiskError, Word::default()),
            };
            (job.session, answer.to(job.order))
        });
        tier.answer(answered.collect());
    }
}

/// The masters have been told that these are not certain, and have forgotten them: nobody else will have them removed.
fn try_again(tier: &DiskTier, queue: &mut dyn Queue, failed: &mut VecDeque<(ObjectId, Epoch)>) {
    let versions: Vec<(ObjectId, Epoch)> = failed.iter().take(TOGETHER_MAX).copied().collect();
    if tier.backend.remove(queue, &versions).is_ok() {
        failed.drain(..versions.len());
        raise(&tier.counters.removed_records, versions.len() as u64);
        info!(
            removed = versions.len(),
            left = failed.len(),
            "removals that had failed are written to the disk"
        );
    }
}
