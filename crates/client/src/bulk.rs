//! Removal of many objects at once: by prefix, by expression, or all objects of a tenant.
//!
//! Each master runs a job in its groups. The part of a group is done when its objects cannot return. A group may move to
//! another master meanwhile, which does not know of the job. The call keeps the specification and follows: it starts the
//! part of such a group again at the new master, until every group has reported that it is done.
//!
//! ```text
//!   open groups ── start at the masters that host them ──▶ running parts ── GetJob: done ──▶ counted
//!        ▲                                                     │
//!        └── group lost, master restarted or unreachable ◀─────┘
//! ```
//!
//! A part that starts again also removes objects that were put in the meantime, as if they had been put before the call.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use moontide_proto::convert::Wire;
use moontide_proto::v1;
use moontide_rt::time::Instant;
use moontide_types::ErrorCode;

use crate::cluster::{Master, Masters, next_counter};
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

/// Progress of a removal of many objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BulkProgress {
    /// Number of groups of the cluster.
    pub groups: u32,
    /// Number of groups whose objects are removed, and cannot return.
    pub groups_done: u32,
    /// Number of objects that the masters have examined.
    pub examined: u64,
    /// Number of objects to examine, as far as known.
    pub total: u64,
    /// Number of removed objects.
    pub removed: u64,
}

/// Objects of a tenant to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BulkSelection {
    /// Keys with this prefix.
    Prefix(Vec<u8>),
    /// Keys that match this regular expression anywhere, in the syntax of the Rust crate `regex`: `^` and `$` match the
    /// ends of the key.
    Regex(String),
    /// All keys. With `force` they become unreadable at once.
    All,
}

impl Store {
    /// Removes every object whose key has this prefix. When this returns, no node has them any more. Leased and pinned
    /// objects are kept unless `force` is set. Fails with `Pending` if a node is absent that may return with objects; the
    /// masters go on.
    ///
    /// The call waits for as long as the masters make progress.
    pub fn remove_by_prefix(&self, prefix: &[u8], force: bool) -> Result<BulkRemoval, StoreError> {
        self.remove_selected(
            &BulkSelection::Prefix(prefix.to_vec()),
            force,
            self.inner.config().timeout,
            |_| {},
        )
    }

    /// As [`Store::remove_by_prefix`], for keys that match a regular expression anywhere: `^` and `$` match the ends of the
    /// key.
    pub fn remove_by_regex(&self, pattern: &str, force: bool) -> Result<BulkRemoval, StoreError> {
        self.remove_selected(
            &BulkSelection::Regex(pattern.to_owned()),
            force,
            self.inner.config().timeout,
            |_| {},
        )
    }

    /// As [`Store::remove_by_prefix`], for all objects of the tenant. With `force` they become unreadable at once, before
    /// this returns.
    pub fn remove_all(&self, force: bool) -> Result<BulkRemoval, StoreError> {
        self.remove_selected(&BulkSelection::All, force, self.inner.config().timeout, |_| {})
    }

    /// As [`Store::remove_by_prefix`], for any selection. Fails with `Pending` after the time `wait` without progress. Calls
    /// `on_progress` after each round of questions to the masters.
    pub fn remove_selected(
        &self,
        selection: &BulkSelection,
        force: bool,
        wait: Duration,
        mut on_progress: impl FnMut(BulkProgress),
    ) -> Result<BulkRemoval, StoreError> {
        let cluster = &self.inner.cluster;
        let groups = cluster.masters().group_count();
        let mut call = BulkCall {
            store: self,
            selection,
            force,
            generation: 0,
            open: (0..groups).collect(),
            running: vec![],
            done: PartStatus::default(),
            has_restarted: false,
            last: StoreError::refused(ErrorCode::WrongMaster),
        };
        let mut backoff = RETRY_BACKOFF;
        let (mut progressed_at, mut open_since) = (Instant::now(), None);
        let (mut before, mut most) = (BulkProgress::default(), BulkProgress::default());
        loop {
            let masters = cluster.masters();
            call.start_open(&masters)?;
            call.ask_running()?;
            let progress = call.progress(groups);
            on_progress(progress);
            if call.open.is_empty() && call.running.is_empty() {
                return Ok(BulkRemoval { removed: call.done.removed, kept: call.done.kept });
            }
            // Parts that start again and again count their objects again and again: that is no progress.
            let is_progress = match call.has_restarted {
                true => progress.groups_done > most.groups_done || progress.removed > most.removed,
                false => progress != before,
            };
            if is_progress {
                progressed_at = Instant::now();
            }
            before = progress;
            most.groups_done = most.groups_done.max(progress.groups_done);
            most.removed = most.removed.max(progress.removed);
            if call.open.is_empty() {
                open_since = None;
            } else if open_since.get_or_insert_with(Instant::now).elapsed() >= self.inner.config().timeout {
                return Err(call.last);
            }
            if progressed_at.elapsed() >= wait {
                return Err(StoreError::refused(ErrorCode::Pending));
            }
            std::thread::sleep(backoff.pause(Duration::ZERO, next_counter()));
            if !call.open.is_empty() {
                // A group has moved, or has no master at the moment.
                cluster.refresh_map(masters.version(), self.inner.deadline());
            }
        }
    }
}

/// Counts of one part, or of several.
#[derive(Clone, Copy, Debug, Default)]
struct PartStatus {
    examined: u64,
    total: u64,
    removed: u64,
    kept: u64,
}

impl PartStatus {
    fn add(&mut self, other: PartStatus) {
        self.examined += other.examined;
        self.total += other.total;
        self.removed += other.removed;
        self.kept += other.kept;
    }
}

/// A job of one master.
#[derive(Debug)]
struct Part {
    master: Arc<Master>,
    job: u64,
    /// Groups that the master has not lost.
    groups: BTreeSet<u32>,
    status: PartStatus,
}

/// Answer of a master about a part.
enum PartAnswer {
    Running,
    Done,
    /// Groups that the master does not host any more.
    Lost(Vec<u32>),
}

/// State of a removal.
struct BulkCall<'a> {
    store: &'a Store,
    selection: &'a BulkSelection,
    force: bool,
    /// Generation of the tenant in a forced removal of all, which all masters adopt. 0 before it is known.
    generation: u32,
    /// Groups in which no job is known to run.
    open: BTreeSet<u32>,
    running: Vec<Part>,
    /// Sum over the parts that are done.
    done: PartStatus,
    /// Whether a part had to start again.
    has_restarted: bool,
    /// Why the last open group could not be started.
    last: StoreError,
}

impl BulkCall<'_> {
    /// Starts jobs for the open groups, at the masters that host them. One after the other: in a forced removal of all, the
    /// first master creates the generation, and the others adopt it.
    fn start_open(&mut self, masters: &Masters) -> Result<(), StoreError> {
        for (index, master) in masters.hosting() {
            let hosted = masters.groups_of(index).map(u32::from);
            let groups: Vec<u32> = hosted.filter(|group| self.open.contains(group)).collect();
            if groups.is_empty() {
                continue;
            }
            let started = self.start(master, groups.clone()).and_then(|started| {
                check_context(&started.context)?;
                Ok(started)
            });
            let started = match started {
                Ok(started) => started,
                Err(error) if is_unanswered(error.code()) => {
                    self.last = error;
                    continue;
                }
                Err(error) => return Err(error),
            };
            if let (BulkSelection::All, true, Some(context)) = (self.selection, self.force, &started.context)
                && self.generation == 0
            {
                self.generation = context.tenant_generation;
                // Cached locations are of the old generation; other clients learn the new one with the node list.
                let inner = &self.store.inner;
                inner.refresh_nodes_now(inner.deadline())?;
            }
            // The master leaves out groups that it has lost since the map.
            let groups: BTreeSet<u32> =
                started.groups.iter().copied().filter(|group| self.open.remove(group)).collect();
            if !groups.is_empty() {
                let (master, status) = (Arc::clone(master), PartStatus::default());
                self.running.push(Part { master, job: started.job, groups, status });
            }
        }
        Ok(())
    }

    /// Asks the masters for the state of their parts.
    fn ask_running(&mut self) -> Result<(), StoreError> {
        for mut part in std::mem::take(&mut self.running) {
            match self.ask(&mut part) {
                Ok(PartAnswer::Done) => self.done.add(part.status),
                Ok(PartAnswer::Running) => self.running.push(part),
                Ok(PartAnswer::Lost(lost)) => {
                    self.has_restarted = true;
                    self.last = StoreError::refused(ErrorCode::WrongMaster);
                    self.open.extend(lost.into_iter().filter(|group| part.groups.remove(group)));
                    match part.groups.is_empty() {
                        true => self.done.removed += part.status.removed,
                        false => self.running.push(part),
                    }
                }
                // The master is gone, has restarted, or has forgotten the job.
                Err(error) if is_unanswered(error.code()) || error.code() == ErrorCode::NotFound => {
                    self.has_restarted = true;
                    self.done.removed += part.status.removed;
                    self.open.extend(part.groups);
                    self.last = match error.code() {
                        ErrorCode::NotFound => StoreError::refused(ErrorCode::Retry),
                        _ => error,
                    };
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Asks a master for the state of its part.
    fn ask(&self, part: &mut Part) -> Result<PartAnswer, StoreError> {
        let inner = &*self.store.inner;
        let deadline = self.store.attempt_end(inner.deadline());
        let context = Some(inner.cluster.context(deadline).to_wire());
        let (job, groups) = (part.job, part.groups.iter().copied().collect());
        let request = v1::GetJobRequest { context, job, groups };
        let status = inner
            .cluster
            .call(&part.master, deadline, move |mut master| async move { master.get_job(request).await })?;
        check_context(&status.context)?;
        if !status.lost_groups.is_empty() {
            return Ok(PartAnswer::Lost(status.lost_groups));
        }
        part.status = PartStatus {
            examined: status.examined,
            total: status.total,
            removed: status.affected,
            kept: status.skipped,
        };
        match (status.state(), ErrorCode::try_from(status.code)) {
            (v1::JobState::Done, _) => Ok(PartAnswer::Done),
            (v1::JobState::Failed, code) => Err(StoreError::refused(code.unwrap_or(ErrorCode::Internal))),
            (v1::JobState::Running | v1::JobState::Unspecified, _) => Ok(PartAnswer::Running),
        }
    }

    fn progress(&self, groups: u32) -> BulkProgress {
        let mut sum = self.done;
        self.running.iter().for_each(|part| sum.add(part.status));
        let running: usize = self.running.iter().map(|part| part.groups.len()).sum();
        let PartStatus { examined, total, removed, .. } = sum;
        let groups_done = groups - (running + self.open.len()) as u32; // both are of these groups
        BulkProgress { groups, groups_done, examined, total, removed }
    }

    fn start(&self, master: &Master, groups: Vec<u32>) -> Result<v1::StartJobResponse, StoreError> {
        let inner = &*self.store.inner;
        let deadline = self.store.attempt_end(inner.deadline());
        let context = Some(inner.cluster.context(deadline).to_wire());
        let (selection, force, generation) = (self.selection.clone(), self.force, self.generation);
        inner.cluster.call(master, deadline, move |mut master| async move {
            match selection {
                BulkSelection::Prefix(prefix) => {
                    let request = v1::RemoveByPrefixRequest { context, prefix: prefix.into(), force, groups };
                    master.remove_by_prefix(request).await
                }
                BulkSelection::Regex(pattern) => {
                    let request = v1::RemoveByRegexRequest { context, pattern, force, groups };
                    master.remove_by_regex(request).await
                }
                BulkSelection::All => {
                    master.remove_all(v1::RemoveAllRequest { context, force, generation, groups }).await
                }
            }
        })
    }
}
