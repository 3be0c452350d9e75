//! Removal: what a master removes is durable before it is answered, many at a time.

use std::sync::mpsc::Receiver;

use moontide_types::record::Word;
use moontide_types::{Epoch, ErrorCode, ObjectId, SessionId};
use tracing::error;

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

/// Removals that share one write to the disk.
const TOGETHER_MAX: usize = 4096;

/// The removing thread.
pub(super) fn run(tier: &DiskTier, jobs: &Receiver<RemovalJob>) {
    let mut queue = tier.queue(false);
    while let Ok(first) = jobs.recv() {
        let mut batch = vec![first];
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
                error!(%error, "a removal could not be written to the disk: what was removed may come back after a restart");
            }
            let full = error.kind() == std::io::ErrorKind::StorageFull;
            tier.close(if full { super::Closed::Full } else { super::Closed::Failed });
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
