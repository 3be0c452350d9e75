//! [`DiskTier`]: the node's disk. It writes records on command of a master, loads records for peers, and notifies the
//! masters of its content.
//!
//! | thread | task |
//! |---|---|
//! | `moontide-offload` | writes records, evicts when the limit is reached ([`offload`]) |
//! | `moontide-load-…` | read and verify records into staging, from where they are served ([`load`]) |
//! | `moontide-removal` | makes removals durable before the reply ([`removal`]) |
//! | `moontide-scan` | sends the inventory of the disk to a master ([`inventory`]) |
//!
//! Invariants: a record is durable before a master is notified of it; a removed record can no longer be found before
//! the notice or the reply is sent, and the removal is durable before the reply; every record in staging can be found on
//! the disk.

mod counters;
mod identity;
mod inventory;
mod load;
mod memory_list;
mod offload;
mod open_jobs;
mod parts;
mod promote;
mod record_spec;
mod removal;
mod staging_cache;
mod test_hooks;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io};

use hashbrown::HashMap;
use moontide_disk::{
    Backend, BackendConfig, OpenError, OsStorage, Queue, QueueConfig, Recovery, RegisteredMemory, Storage,
};
use moontide_heap::Staging;
use moontide_proto::{CommandResult, v1};
use moontide_types::{ErrorCode, SessionId};
use parking_lot::{Mutex, RwLock};
use tracing::{info, warn};

use self::counters::DiskCounters;
pub use self::identity::IdentityError;
pub(crate) use self::identity::{DiskIdentity, DiskLock};
use self::inventory::InventoryProgress;
use self::memory_list::MemoryList;
pub(crate) use self::offload::OffloadJob;
use self::open_jobs::{JobTicket, OpenJobs};
pub(crate) use self::promote::PromoteJob;
pub(crate) use self::removal::RemovalJob;
use self::staging_cache::StagingCache;
use crate::config::DiskConfig;
use crate::event_router::{EventRouter, NodeEvent};
use crate::logic::groups::GroupSet;
use crate::logic::notice::NoticeSubscribers;
use crate::memory::NodeMemory;

/// Failure to open a node's disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The directory is not usable.
    #[error("disk directory {dir}: {source}; set `disk.dir` to a directory that this user may write")]
    Directory {
        /// Path of the directory.
        dir: String,
        /// I/O error.
        source: io::Error,
    },
    /// The directory belongs to another node, cluster or backend, or is in use.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The content of the directory cannot be opened.
    #[error("disk directory {dir}: {source}")]
    Open {
        /// Path of the directory.
        dir: String,
        /// Error of the backend.
        source: OpenError,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread for the disk: {0}; raise the limit of processes")]
    Threads(#[from] io::Error),
}

/// Time without writes after a write failed; then writes are retried.
const WRITE_PAUSE: Duration = Duration::from_secs(10);

/// Share of the file system's free space that is used if no limit is set.
const SHARE_OF_FREE: (u64, u64) = (9, 10);

/// Share of the limit that a flush may write: deleting whole bucket files frees more than is needed.
const FLUSH_SHARE: (u64, u64) = (9, 10);

/// The node's disk tier.
pub(crate) struct DiskTier {
    config: DiskConfig,
    storage: Arc<dyn Storage>,
    backend: Box<dyn Backend>,
    memory: Arc<NodeMemory>,
    staging: Arc<Staging>,
    cache: StagingCache,
    events: Arc<EventRouter>,
    counters: DiskCounters,
    /// Result of the scan at the start.
    recovery: Recovery,
    /// Sessions that are notified about the disk. Notices for other sessions are dropped.
    subscribers: RwLock<NoticeSubscribers>,
    /// Held while a record is looked up or removed *and* the notice is sent, so that notices are in the order of these
    /// events.
    notify_lock: Mutex<()>,
    /// Set after a failed write: the time of the next attempt.
    writes_paused: Mutex<Option<(Instant, WritePauseReason)>>,
    /// Bytes that the flush before the stop may still write; `None` before it.
    flush_budget: Mutex<Option<u64>>,
    /// Payload bytes of accepted Offload commands that are not written yet.
    backlog: AtomicU64,
    /// Offloads and removals that have not ended.
    open_jobs: OpenJobs,
    /// Progress of the inventories of sessions.
    inventories: Mutex<HashMap<SessionId, InventoryProgress>>,
    /// Objects that the masters are told to have been in memory.
    memory_list: Mutex<MemoryList>,
    loads: load::LoadQueue,
    promotions: promote::PromotionTable,
    offloads: Mutex<Option<std::sync::mpsc::Sender<(JobTicket, OffloadJob)>>>,
    removals: Mutex<Option<std::sync::mpsc::Sender<(JobTicket, RemovalJob)>>>,
    /// Time without writes after a write failed.
    write_pause: Duration,
    test_hooks: test_hooks::TestHooks,
}

/// Name, help text and value of each metric.
#[derive(Debug)]
pub(crate) struct DiskMetrics {
    pub(crate) gauges: Vec<(&'static str, &'static str, u64)>,
    pub(crate) counts: Vec<(&'static str, &'static str, u64)>,
    /// Time for which writes waited for the write rate limit.
    pub(crate) throttled: Duration,
}

/// Reason why writes are paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WritePauseReason {
    /// No space left.
    Full,
    /// A write failed.
    Failed,
}

impl fmt::Debug for DiskTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskTier").field("config", &self.config).finish_non_exhaustive()
    }
}

impl DiskTier {
    /// Opens the disk and scans it. Nothing is served yet.
    pub(crate) fn open(
        config: DiskConfig,
        memory: Arc<NodeMemory>,
        staging: Arc<Staging>,
        events: Arc<EventRouter>,
    ) -> Result<DiskTier, DiskError> {
        let dir = config.dir.display().to_string();
        let storage = OsStorage::open(&config.dir, config.io_engine)
            .map_err(|source| DiskError::Directory { dir: dir.clone(), source })?;
        info!(dir, engine = storage.engine(), direct = storage.is_direct(), "disk directory opened");
        let list = MemoryList::take(&config.dir).unwrap_or_else(|error| {
            warn!(dir, %error, "cannot read which objects were in memory; they are loaded when they are read");
            MemoryList::empty()
        });
        let mut tier = DiskTier::open_on(Arc::new(storage), config, memory, staging, events)?;
        if list.len() > 0 {
            info!(objects = list.len(), "masters will load what was in memory before the stop");
        }
        tier.memory_list = Mutex::new(list);
        Ok(tier)
    }

    /// Like [`DiskTier::open`], on any storage.
    fn open_on(
        storage: Arc<dyn Storage>,
        config: DiskConfig,
        memory: Arc<NodeMemory>,
        staging: Arc<Staging>,
        events: Arc<EventRouter>,
    ) -> Result<DiskTier, DiskError> {
        let dir = config.dir.display().to_string();
        let limit_bytes = match config.limit_bytes {
            Some(limit) => limit,
            None => default_limit(&*storage)
                .map_err(|source| DiskError::Directory { dir: dir.clone(), source })?,
        };
        let started = Instant::now();
        let mut queue = storage.queue(&QueueConfig::default());
        let backend_config = BackendConfig { limit_bytes, eviction_policy: config.eviction_policy };
        let opened = config.backend.open(Arc::clone(&storage), &mut *queue, backend_config, &mut |_| ());
        let (backend, recovery) = opened.map_err(|source| DiskError::Open { dir: dir.clone(), source })?;
        info!(
            dir,
            backend = %config.backend,
            limit_bytes,
            records = recovery.records,
            bad = recovery.bad_count,
            took_ms = started.elapsed().as_millis() as u64,
            "disk tier opened"
        );
        for bad in recovery.bad.iter().take(10) {
            warn!(
                file = bad.file,
                offset = bad.offset,
                reason = bad.reason,
                "skipped corrupt record on disk"
            );
        }
        Ok(DiskTier {
            config,
            storage,
            backend,
            memory,
            staging,
            cache: StagingCache::default(),
            events,
            counters: DiskCounters::default(),
            recovery,
            subscribers: RwLock::default(),
            notify_lock: Mutex::default(),
            writes_paused: Mutex::default(),
            flush_budget: Mutex::default(),
            backlog: AtomicU64::new(0),
            open_jobs: OpenJobs::default(),
            inventories: Mutex::default(),
            memory_list: Mutex::new(MemoryList::empty()),
            loads: load::LoadQueue::default(),
            promotions: promote::PromotionTable::default(),
            offloads: Mutex::default(),
            removals: Mutex::default(),
            write_pause: WRITE_PAUSE,
            test_hooks: Default::default(),
        })
    }

    /// Starts the threads.
    pub(crate) fn start(self: &Arc<Self>) -> Result<Vec<JoinHandle<()>>, DiskError> {
        let mut threads = Vec::new();
        let (sender, receiver) = std::sync::mpsc::channel();
        *self.offloads.lock() = Some(sender);
        let tier = Arc::clone(self);
        threads.push(spawn("moontide-offload".into(), move || offload::run(&tier, &receiver))?);
        let (sender, receiver) = std::sync::mpsc::channel();
        *self.removals.lock() = Some(sender);
        let tier = Arc::clone(self);
        threads.push(spawn("moontide-removal".into(), move || removal::run(&tier, &receiver))?);
        for number in 0..self.config.read_threads.max(1) {
            let tier = Arc::clone(self);
            threads.push(spawn(format!("moontide-load-{number}"), move || load::run(&tier))?);
        }
        Ok(threads)
    }

    /// Stops the writes of records. Queued ones are dropped.
    pub(crate) fn stop_offloads(&self) {
        *self.offloads.lock() = None;
    }

    /// Stops the threads. Queued jobs are dropped.
    pub(crate) fn stop(&self) {
        self.stop_offloads();
        *self.removals.lock() = None;
        let unread = self.loads.stop();
        unread.iter().for_each(|name| self.cache.failed(*name));
        counters::increment(&self.counters.loads_failed, unread.len() as u64);
        *self.subscribers.write() = NoticeSubscribers::default();
    }

    /// Queues a record for writing.
    pub(crate) fn offload(&self, job: OffloadJob) {
        self.backlog.fetch_add(job.bytes, Ordering::Relaxed);
        if let Some(offloads) = &*self.offloads.lock() {
            let ticket = self.open_jobs.begin_offload(job.session, job.id);
            let _ = offloads.send((ticket, job));
        }
    }

    /// True only in a test with a mutation that ignores kills: all, or those of versions that are not in their slots.
    pub(crate) fn ignores_kill(&self, killed: bool) -> bool {
        let mutation_enabled = |mutation| self.test_hooks.mutation.is_enabled(mutation);
        mutation_enabled(test_hooks::Mutation::KilledUntold)
            || (!killed && mutation_enabled(test_hooks::Mutation::KilledAbsentUntold))
    }

    /// Queues a removal; the reply follows when it is durable.
    pub(crate) fn remove(&self, job: RemovalJob) {
        if let Some(removals) = &*self.removals.lock() {
            let ticket = self.open_jobs.begin_removal(job.id);
            let _ = removals.send((ticket, job));
        }
    }

    /// Whether the disk holds a record, is about to write one, or has to make a removal durable. If not, a master need
    /// not wait for an inventory.
    pub(crate) fn is_occupied(&self) -> bool {
        self.backend.usage().records > 0 || !self.open_jobs.is_empty()
    }

    /// Begins the flush before the stop. It begins with the most valuable objects and must not evict them from the disk for
    /// others, so it writes less than the limit of the disk.
    pub(crate) fn begin_flush(&self) {
        let (share, of) = FLUSH_SHARE;
        *self.flush_budget.lock() = Some(self.backend.usage().limit / of * share);
    }

    /// Takes the bytes of a record from the budget of the flush. Returns `false` if they exceed it: then nothing more is
    /// written.
    fn take_flush_budget(&self, bytes: u64) -> bool {
        let mut budget = self.flush_budget.lock();
        let Some(left) = &mut *budget else { return true };
        let rest = left.checked_sub(bytes);
        *left = rest.unwrap_or(0);
        rest.is_some()
    }

    /// Writes the list of the objects in memory, for the next start. Without it they are loaded when they are read.
    pub(crate) fn write_memory_list(&self) {
        if let Err(error) = MemoryList::write(&self.config.dir, &self.memory) {
            warn!(%error, "cannot write the list of the objects in memory");
        }
    }

    /// Whether no write and no removal is queued or in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.open_jobs.is_empty()
    }

    /// Returns the records written since the start, and their bytes.
    pub(crate) fn written(&self) -> (u64, u64) {
        let get = counters::get;
        (get(&self.counters.offloaded_records), get(&self.counters.offloaded_bytes))
    }

    /// Returns the status for a heartbeat.
    pub(crate) fn status(&self) -> v1::DiskStatus {
        self.memory_list.lock().expire();
        let usage = self.backend.usage();
        let state = match self.write_pause_reason() {
            Some(WritePauseReason::Full) => v1::DiskState::Full,
            Some(WritePauseReason::Failed) => v1::DiskState::WriteFailed,
            None if self.inventories.lock().values().any(|inventory| inventory.running > 0) => {
                v1::DiskState::Recovering
            }
            None => v1::DiskState::Serving,
        };
        v1::DiskStatus {
            state: state.into(),
            used_bytes: usage.bytes,
            limit_bytes: usage.limit,
            objects: usage.records,
            backlog_bytes: self.backlog.load(Ordering::Relaxed),
        }
    }

    /// Returns the used share of staging, in thousandths.
    pub(crate) fn staging_permille(&self) -> u32 {
        let used = self.staging.in_use();
        let used_bytes = used.total_bytes - used.free_bytes;
        (used_bytes * 1000 / used.total_bytes.max(1)) as u32
    }

    /// Returns the current metrics.
    pub(crate) fn metrics(&self) -> DiskMetrics {
        let (usage, paused) = (self.backend.usage(), self.write_pause_reason());
        let staging = self.staging.in_use();
        let is = |reason: WritePauseReason| u64::from(paused == Some(reason));
        let gauges = vec![
            ("disk_used_bytes", "Bytes on the disk", usage.bytes),
            ("disk_limit_bytes", "Limit of the bytes on the disk", usage.limit),
            ("disk_records", "Records on the disk", usage.records),
            (
                "disk_offload_backlog_bytes",
                "Bytes of Offload commands that are not written yet",
                self.backlog.load(Ordering::Relaxed),
            ),
            ("disk_full", "1 while writes are paused because the disk is full", is(WritePauseReason::Full)),
            (
                "disk_write_failed",
                "1 while writes are paused because a write failed",
                is(WritePauseReason::Failed),
            ),
            ("disk_staging_free_bytes", "Free staging memory", staging.free_bytes),
            ("disk_staging_capacity_bytes", "Staging memory for records read from disk", staging.total_bytes),
        ];
        let (counters, get) = (&self.counters, counters::get);
        let counts = vec![
            ("disk_offloaded_records", "Records written", get(&counters.offloaded_records)),
            ("disk_offloaded_bytes", "Bytes of payload written", get(&counters.offloaded_bytes)),
            ("disk_offloads_refused", "Offload commands refused", get(&counters.offloads_refused)),
            (
                "disk_loads",
                "Records, or parts of long ones, requested from disk",
                get(&counters.loads_requested),
            ),
            ("disk_loads_ahead", "Of these, parts that were read ahead", get(&counters.loads_ahead)),
            ("disk_load_staging_hits", "Of these, already in staging", get(&counters.loads_staged)),
            ("disk_load_reads", "Of these, read from disk", get(&counters.loads_read)),
            ("disk_load_misses", "Of these, not on disk", get(&counters.loads_missed)),
            (
                "disk_load_failures",
                "Of these, corrupt, not readable, or without free staging memory",
                get(&counters.loads_failed),
            ),
            ("disk_loaded_bytes", "Bytes of payload read", get(&counters.loaded_bytes)),
            (
                "disk_corrupt_records",
                "Records on disk that failed verification",
                get(&counters.corrupt_records),
            ),
            ("disk_read_errors", "Failed reads", get(&counters.read_errors)),
            ("disk_write_errors", "Failed writes of batches", get(&counters.write_errors)),
            (
                "disk_evicted_records",
                "Records evicted because the disk was full",
                get(&counters.evicted_records),
            ),
            ("disk_tombstones_written", "Removals made durable", get(&counters.removed_records)),
            ("disk_promoted_records", "Records copied back into memory", get(&counters.promoted_records)),
            ("disk_recovered_records", "Records found at the start", self.recovery.records),
            ("disk_recovery_corrupt_records", "Corrupt records found at the start", self.recovery.bad_count),
        ];
        let throttled = Duration::from_millis(get(&counters.throttled_ms));
        DiskMetrics { gauges, counts, throttled }
    }

    /// Ends a session: drops its subscription, its inventory and its promotions.
    pub(crate) fn end_session(&self, session: SessionId) {
        self.subscribers.write().end(session);
        self.inventories.lock().remove(&session);
        self.cancel_promotions(session);
    }

    /// Stops notices to a session about groups that are not in `groups`.
    pub(crate) fn restrict(&self, session: SessionId, groups: &GroupSet) {
        self.subscribers.write().restrict(session, groups);
    }

    /// Sets the number of bytes that the master of a session has not acknowledged.
    pub(crate) fn set_unacked_bytes(&self, session: SessionId, bytes: usize) {
        if let Some(inventory) = self.inventories.lock().get_mut(&session) {
            inventory.unacked_bytes = bytes;
        }
    }

    /// Sends the results of commands to the sessions that issued them.
    fn send_results(&self, mut results: Vec<(SessionId, CommandResult)>) {
        results.sort_by_key(|(session, _)| *session);
        for of_session in results.chunk_by(|a, b| a.0 == b.0) {
            let results = of_session.iter().map(|(_, result)| *result).collect();
            self.events.send(NodeEvent::Results { session: of_session[0].0, results });
        }
    }

    fn is_live(&self, session: SessionId) -> bool {
        self.subscribers.read().is_live(session)
    }

    fn write_pause_reason(&self) -> Option<WritePauseReason> {
        let mut paused = self.writes_paused.lock();
        let over = paused.is_some_and(|(until, _)| until <= Instant::now());
        if over {
            *paused = None;
            info!("retrying disk writes");
        }
        let flush_ended = *self.flush_budget.lock() == Some(0);
        paused.map(|(_, reason)| reason).or(flush_ended.then_some(WritePauseReason::Full))
    }

    /// Pauses writes after a failed one. Reads continue.
    fn pause_writes(&self, reason: WritePauseReason) {
        let mut paused = self.writes_paused.lock();
        if paused.is_none() {
            let pause_ms = self.write_pause.as_millis() as u64;
            warn!(?reason, pause_ms, "disk writes paused; records on disk are still served");
        }
        *paused = Some((Instant::now() + self.write_pause, reason));
        self.counters.write_failed();
    }

    /// Returns a queue for the calling thread; registers the staging memory if the thread reads into it.
    fn queue(&self, reads_into_staging: bool) -> Box<dyn Queue> {
        let (address, len) = self.staging.memory();
        let registered = reads_into_staging.then_some(RegisteredMemory { address, len });
        self.storage.queue(&QueueConfig { registered, ..QueueConfig::default() })
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, DiskError> {
    Ok(std::thread::Builder::new().name(name).spawn(run)?)
}

/// Returns 90 % of the free space plus the space that the tier already uses.
fn default_limit(storage: &dyn Storage) -> io::Result<u64> {
    fn used(storage: &dyn Storage, dir: &std::path::Path) -> io::Result<u64> {
        let mut sum = 0;
        for entry in storage.list(dir)? {
            sum += if entry.is_dir { used(storage, &dir.join(&entry.name))? } else { entry.len };
        }
        Ok(sum)
    }
    let (share, of) = SHARE_OF_FREE;
    let all = storage.space()?.free + used(storage, std::path::Path::new(""))?;
    Ok(all / of * share)
}

/// Returns the error code of a failed read.
fn code_of(error: moontide_disk::ReadError) -> ErrorCode {
    match error {
        moontide_disk::ReadError::Io(_) => ErrorCode::DiskError,
        moontide_disk::ReadError::Corrupt(_) | moontide_disk::ReadError::WrongRecord => ErrorCode::Corrupt,
    }
}

#[cfg(test)]
mod tests;
