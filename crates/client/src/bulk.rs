//! Removal of many objects at once: by prefix, by expression, or all objects of a tenant.
//!
//! Each master runs a job in its groups. The job is done when the objects cannot return. If a group moves to another
//! master meanwhile, its job is lost, and the call starts again at all masters: it then also removes objects that were put
//! in the meantime.

use std::sync::Arc;
use std::time::Duration;

use moontide_proto::convert::Wire;
use moontide_proto::v1;
use moontide_rt::time::Instant;
use moontide_types::ErrorCode;

use crate::cluster::{Master, next_counter};
use crate::error::StoreError;
use crate::logic::{RETRY_BACKOFF, is_unanswered};
use crate::metadata::check_context;
use crate::store::Store;

/// Result of a removal of many objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BulkRemoval {
    /// Number of removed objects. If a master fails or a group moves meanwhile, those removed before may be missing; calls
    /// for the same objects at the same time share their count.
    pub removed: u64,
    /// Number of objects that were kept because they were leased, pinned or being written.
    pub kept: u64,
}

/// Objects of a tenant to remove.
#[derive(Clone, Debug)]
enum Selection {
    Prefix(Vec<u8>),
    Regex(String),
    All,
}

impl Store {
    /// Removes every object whose key has this prefix. When this returns, no node has them any more. Leased and pinned
    /// objects are kept unless `force` is set. Fails with `Pending` if a node is absent that may return with objects; the
    /// masters go on.
    ///
    /// The call waits for as long as the masters make progress.
    pub fn remove_by_prefix(&self, prefix: &[u8], force: bool) -> Result<BulkRemoval, StoreError> {
        self.remove_selected(&Selection::Prefix(prefix.to_vec()), force)
    }

    /// As [`Store::remove_by_prefix`], for keys that match a regular expression anywhere: `^` and `$` match the ends of the
    /// key.
    pub fn remove_by_regex(&self, pattern: &str, force: bool) -> Result<BulkRemoval, StoreError> {
        self.remove_selected(&Selection::Regex(pattern.to_owned()), force)
    }

    /// As [`Store::remove_by_prefix`], for all objects of the tenant. With `force` they become unreadable at once, before
    /// this returns.
    pub fn remove_all(&self, force: bool) -> Result<BulkRemoval, StoreError> {
        self.remove_selected(&Selection::All, force)
    }

    fn remove_selected(&self, selection: &Selection, force: bool) -> Result<BulkRemoval, StoreError> {
        let deadline = self.inner.deadline();
        let mut call = BulkCall { store: self, selection, force, generation: 0, removed: 0, deadline };
        let mut backoff = RETRY_BACKOFF;
        loop {
            match call.attempt() {
                Ok(kept) => return Ok(BulkRemoval { removed: call.removed, kept }),
                // A group has moved, or has no master at the moment.
                Err(error) if is_unanswered(error.code()) && Instant::now() < call.deadline => {
                    std::thread::sleep(backoff.pause(Duration::ZERO, next_counter()));
                    let cluster = &self.inner.cluster;
                    cluster.refresh_map(cluster.masters().version(), call.deadline);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// State of a removal over several attempts.
struct BulkCall<'a> {
    store: &'a Store,
    selection: &'a Selection,
    force: bool,
    /// Generation of the tenant in a forced removal of all, which all masters adopt. 0 before it is known.
    generation: u32,
    removed: u64,
    /// End of the attempts, unless there is progress.
    deadline: Instant,
}

impl BulkCall<'_> {
    /// Starts a job at each master and waits for them. Returns the number of objects that were kept.
    fn attempt(&mut self) -> Result<u64, StoreError> {
        let inner = &*self.store.inner;
        let masters = inner.cluster.masters();
        if !masters.is_complete() {
            return Err(StoreError::refused(ErrorCode::WrongMaster));
        }
        let mut jobs: Vec<(&Arc<Master>, u64)> = Vec::new();
        let mut groups = 0;
        // One after the other: in a forced removal of all, the first master creates the generation, the others adopt it.
        for master in masters.hosts() {
            let started = self.start(master)?;
            check_context(&started.context)?;
            if let (Selection::All, true, Some(context)) = (self.selection, self.force, &started.context) {
                self.generation = context.tenant_generation;
            }
            groups += started.groups;
            jobs.push((master, started.job));
        }
        if self.generation > 0 {
            // Cached locations are of the old generation; other clients learn the new one with the node list.
            inner.refresh_nodes_now(inner.deadline())?;
        }
        // A group that has moved since the last map may be in none of the jobs.
        if groups != masters.group_count() {
            return Err(StoreError::refused(ErrorCode::WrongMaster));
        }
        let mut kept = 0;
        for (master, job) in jobs {
            kept += self.wait(master, job)?;
        }
        Ok(kept)
    }

    /// Returns the deadline of one call. A master that does not respond may no longer be one: the rest of the time is for
    /// another attempt.
    fn call_deadline(&self) -> Instant {
        let cluster = &self.store.inner.cluster;
        match cluster.is_single_master() {
            true => self.store.inner.deadline(),
            false => Instant::now() + cluster.attempt_timeout(),
        }
    }

    fn start(&self, master: &Master) -> Result<v1::StartJobResponse, StoreError> {
        let inner = &*self.store.inner;
        let deadline = self.call_deadline();
        let context = Some(inner.cluster.context(deadline).to_wire());
        let (selection, force, generation) = (self.selection.clone(), self.force, self.generation);
        inner.cluster.call(master, deadline, move |mut master| async move {
            match selection {
                Selection::Prefix(prefix) => {
                    let request = v1::RemoveByPrefixRequest { context, prefix: prefix.into(), force };
                    master.remove_by_prefix(request).await
                }
                Selection::Regex(pattern) => {
                    let request = v1::RemoveByRegexRequest { context, pattern, force };
                    master.remove_by_regex(request).await
                }
                Selection::All => {
                    master.remove_all(v1::RemoveAllRequest { context, force, generation }).await
                }
            }
        })
    }

    /// Waits for a job, for as long as it makes progress. Returns the number of objects that it kept.
    fn wait(&mut self, master: &Master, job: u64) -> Result<u64, StoreError> {
        let inner = &*self.store.inner;
        let mut backoff = RETRY_BACKOFF;
        let mut progress = (0, 0);
        loop {
            let deadline = self.call_deadline();
            let context = Some(inner.cluster.context(deadline).to_wire());
            let request = v1::GetJobRequest { context, job };
            let status = inner
                .cluster
                .call(master, deadline, move |mut master| async move { master.get_job(request).await })?;
            check_context(&status.context).map_err(|error| match error.code() {
                // The master has restarted.
                ErrorCode::NotFound => StoreError::refused(ErrorCode::Retry),
                _ => error,
            })?;
            match (status.state(), ErrorCode::try_from(status.code)) {
                (v1::JobState::Done, _) => {
                    self.removed += status.affected;
                    return Ok(status.skipped);
                }
                (v1::JobState::Failed, code) => {
                    // Not counted: where the job goes on, the next attempt joins it.
                    return Err(StoreError::refused(code.unwrap_or(ErrorCode::Internal)));
                }
                _ => {}
            }
            if progress != (status.examined, status.affected) {
                progress = (status.examined, status.affected);
                self.deadline = inner.deadline();
            }
            if Instant::now() >= self.deadline {
                return Err(StoreError::refused(ErrorCode::Pending));
            }
            std::thread::sleep(backoff.pause(Duration::ZERO, next_counter()));
        }
    }
}
