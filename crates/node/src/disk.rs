//! [`DiskTier`]: the node's disk. Writes what a master orders, brings back what peers ask for, and tells the master what is
//! there.
//!
//! | thread | what it does |
//! |---|---|
//! | `moontide-offload` | writes records, evicts what is oldest when the limit is reached ([`offload`]) |
//! | `moontide-load-…` | read and verify records into staging, from where they are served ([`load`]) |
//! | `moontide-removal` | makes removals durable before they are answered ([`removal`]) |
//! | `moontide-tell` | tells a master that has to be told anew ([`tell`]) |
//!
//! Invariants: what the master is told to be on the disk was durable before; what is removed here is told, or answered,
//! after it can be found no more; a record in staging is one that can be found on the disk.

mod counters;
mod identity;
mod load;
mod offload;
mod planted;
mod promote;
mod removal;
mod staged;
mod tell;

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
use moontide_proto::{OrderResult, v1};
use moontide_types::{ErrorCode, SessionId};
use parking_lot::{Mutex, RwLock};
use tracing::{info, warn};

use self::counters::DiskCounters;
pub use self::identity::IdentityError;
pub(crate) use self::identity::{Held, Identity};
pub(crate) use self::offload::OffloadJob;
pub(crate) use self::promote::PromoteJob;
pub(crate) use self::removal::RemovalJob;
use self::staged::StagedRecords;
use self::tell::Telling;
use crate::config::DiskConfig;
use crate::decide::groups::GroupSet;
use crate::decide::notice::Audience;
use crate::lines::Lines;
use crate::memory::Memory;
use crate::session::Event;

/// Why a node's disk cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The directory cannot be had.
    #[error("the disk's directory {dir}: {source}; set `disk.dir` to one that this user may write")]
    Directory {
        /// Which one.
        dir: String,
        /// Why.
        source: io::Error,
    },
    /// It belongs to somebody else.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// What is in it cannot be opened.
    #[error("the disk's directory {dir}: {source}")]
    Open {
        /// Which one.
        dir: String,
        /// Why.
        source: OpenError,
    },
    /// The system gives no threads.
    #[error("cannot start a thread for the disk: {0}; raise the limit of processes")]
    Threads(#[from] io::Error),
}

/// After writing failed, nothing is written for so long; then it is tried again.
const WRITE_PAUSE: Duration = Duration::from_secs(10);

/// Of the free space of the file system, what is used unless a limit is set.
const SHARE_OF_FREE: (u64, u64) = (9, 10);

/// The node's disk.
pub(crate) struct DiskTier {
    config: DiskConfig,
    storage: Arc<dyn Storage>,
    backend: Box<dyn Backend>,
    memory: Arc<Memory>,
    staging: Arc<Staging>,
    staged: StagedRecords,
    events: Arc<Lines>,
    counters: DiskCounters,
    /// Found at the start.
    recovery: Recovery,
    /// Who is told about the disk; what concerns a session that is over is of no use to anybody.
    audience: RwLock<Audience>,
    /// Held while something is found or taken away *and* told, so that the two are told in this order.
    telling: Mutex<()>,
    /// Writing has failed: when it is tried again.
    closed_until: Mutex<Option<(Instant, Closed)>>,
    /// Bytes that were ordered and not written yet.
    backlog: AtomicU64,
    /// How far sessions are with being told what is there.
    tellings: Mutex<HashMap<SessionId, Telling>>,
    loads: load::Loads,
    promoting: promote::Promoting,
    offloads: Mutex<Option<std::sync::mpsc::Sender<OffloadJob>>>,
    removals: Mutex<Option<std::sync::mpsc::Sender<RemovalJob>>>,
    /// How long nothing is written after writing failed.
    write_pause: Duration,
    trial: planted::Trial,
}

/// Name, help and value of what metrics show.
#[derive(Debug)]
pub(crate) struct DiskNumbers {
    pub(crate) gauges: Vec<(&'static str, &'static str, u64)>,
    pub(crate) counts: Vec<(&'static str, &'static str, u64)>,
}

/// Why nothing is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closed {
    /// No space left.
    Full,
    /// Writing failed.
    Failed,
}

impl fmt::Debug for DiskTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskTier").field("config", &self.config).finish_non_exhaustive()
    }
}

impl DiskTier {
    /// Opens the disk and finds what is on it. Nothing is served yet.
    pub(crate) fn open(
        config: DiskConfig,
        memory: Arc<Memory>,
        staging: Arc<Staging>,
        events: Arc<Lines>,
    ) -> Result<DiskTier, DiskError> {
        let dir = config.dir.display().to_string();
        let storage = OsStorage::open(&config.dir, config.engine)
            .map_err(|source| DiskError::Directory { dir: dir.clone(), source })?;
        info!(dir, engine = storage.engine(), direct = storage.is_direct(), "disk's directory is there");
        DiskTier::on(Arc::new(storage), config, memory, staging, events)
    }

    /// The same on any storage.
    fn on(
        storage: Arc<dyn Storage>,
        config: DiskConfig,
        memory: Arc<Memory>,
        staging: Arc<Staging>,
        events: Arc<Lines>,
    ) -> Result<DiskTier, DiskError> {
        let dir = config.dir.display().to_string();
        let limit_bytes = match config.limit_bytes {
            Some(limit) => limit,
            None => default_limit(&*storage)
                .map_err(|source| DiskError::Directory { dir: dir.clone(), source })?,
        };
        let began = Instant::now();
        let mut queue = storage.queue(&QueueConfig::default());
        let backend_config = BackendConfig { limit_bytes, order: config.order };
        let opened = config.backend.open(Arc::clone(&storage), &mut *queue, backend_config, &mut |_| ());
        let (backend, recovery) = opened.map_err(|source| DiskError::Open { dir: dir.clone(), source })?;
        info!(
            dir,
            backend = %config.backend,
            limit_bytes,
            records = recovery.records,
            bad = recovery.bad_count,
            took_ms = began.elapsed().as_millis() as u64,
            "disk is there"
        );
        for bad in recovery.bad.iter().take(10) {
            warn!(
                file = bad.file,
                offset = bad.offset,
                why = bad.why,
                "a record on disk is damaged and was passed over"
            );
        }
        Ok(DiskTier {
            config,
            storage,
            backend,
            memory,
            staging,
            staged: StagedRecords::default(),
            events,
            counters: DiskCounters::default(),
            recovery,
            audience: RwLock::default(),
            telling: Mutex::default(),
            closed_until: Mutex::default(),
            backlog: AtomicU64::new(0),
            tellings: Mutex::default(),
            loads: load::Loads::default(),
            promoting: promote::Promoting::default(),
            offloads: Mutex::default(),
            removals: Mutex::default(),
            write_pause: WRITE_PAUSE,
            trial: Default::default(),
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
        for number in 0..self.config.load_threads.max(1) {
            let tier = Arc::clone(self);
            threads.push(spawn(format!("moontide-load-{number}"), move || load::run(&tier))?);
        }
        Ok(threads)
    }

    /// Ends the threads: what was not begun is not done.
    pub(crate) fn stop(&self) {
        *self.offloads.lock() = None;
        *self.removals.lock() = None;
        let unread = self.loads.stop();
        unread.iter().for_each(|name| self.staged.failed(*name));
        counters::raise(&self.counters.loads_failed, unread.len() as u64);
        *self.audience.write() = Audience::default();
    }

    /// A record is to be written.
    pub(crate) fn offload(&self, job: OffloadJob) {
        self.backlog.fetch_add(job.bytes, Ordering::Relaxed);
        if let Some(offloads) = &*self.offloads.lock() {
            let _ = offloads.send(job);
        }
    }

    /// Only in tests that plant this mistake.
    pub(crate) fn forgets_kills(&self) -> bool {
        self.trial.planted(planted::Bug::KilledUntold)
    }

    /// A removal is to be made durable, and answered.
    pub(crate) fn remove(&self, job: RemovalJob) {
        if let Some(removals) = &*self.removals.lock() {
            let _ = removals.send(job);
        }
    }

    /// Whether it holds anything that a master has to be told.
    pub(crate) fn is_occupied(&self) -> bool {
        self.backend.usage().records > 0
    }

    /// How it is, for a heartbeat.
    pub(crate) fn status(&self) -> v1::DiskStatus {
        let usage = self.backend.usage();
        let state = match self.closed() {
            Some(Closed::Full) => v1::DiskState::Full,
            Some(Closed::Failed) => v1::DiskState::WriteFailed,
            None if self.tellings.lock().values().any(|telling| telling.running > 0) => {
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

    /// How much of staging is in use, in thousandths.
    pub(crate) fn staging_permille(&self) -> u32 {
        let used = self.staging.in_use();
        let taken = used.total_bytes - used.free_bytes;
        (taken * 1000 / used.total_bytes.max(1)) as u32
    }

    /// The numbers of this moment, for metrics.
    pub(crate) fn numbers(&self) -> DiskNumbers {
        let (usage, closed) = (self.backend.usage(), self.closed());
        let staging = self.staging.in_use();
        let is = |why: Closed| u64::from(closed == Some(why));
        let gauges = vec![
            ("disk_used_bytes", "Bytes on the disk", usage.bytes),
            ("disk_limit_bytes", "Bytes that may be on the disk", usage.limit),
            ("disk_records", "Records on the disk", usage.records),
            (
                "disk_backlog_bytes",
                "Bytes ordered to be written and not written yet",
                self.backlog.load(Ordering::Relaxed),
            ),
            ("disk_full", "1 while nothing is written because the disk is full", is(Closed::Full)),
            ("disk_write_failed", "1 while nothing is written because writing failed", is(Closed::Failed)),
            ("disk_staging_free_bytes", "Free memory for what comes from disk", staging.free_bytes),
            ("disk_staging_all_bytes", "Memory for what comes from disk", staging.total_bytes),
        ];
        let (counters, get) = (&self.counters, counters::get);
        let counts = vec![
            ("disk_offloaded_records", "Records written", get(&counters.offloaded_records)),
            ("disk_offloaded_bytes", "Bytes of payload written", get(&counters.offloaded_bytes)),
            ("disk_offloads_refused", "Orders to write that were refused", get(&counters.offloads_refused)),
            ("disk_loads_requested", "Records asked for", get(&counters.loads_requested)),
            ("disk_loads_staged", "Of these, in memory already", get(&counters.loads_staged)),
            ("disk_loads_read", "Of these, read from the disk", get(&counters.loads_read)),
            ("disk_loads_missed", "Of these, not on the disk", get(&counters.loads_missed)),
            (
                "disk_loads_failed",
                "Of these, damaged, not readable, or without room",
                get(&counters.loads_failed),
            ),
            ("disk_loaded_bytes", "Bytes of payload read", get(&counters.loaded_bytes)),
            (
                "disk_damaged_records",
                "Records that were not what was written",
                get(&counters.damaged_records),
            ),
            ("disk_read_errors", "Reads that the disk failed", get(&counters.read_errors)),
            ("disk_write_errors", "Batches that the disk failed to write", get(&counters.write_errors)),
            (
                "disk_evicted_records",
                "Records that left because the disk was full",
                get(&counters.evicted_records),
            ),
            ("disk_removed_records", "Removals made durable", get(&counters.removed_records)),
            ("disk_promoted_records", "Records brought back into memory", get(&counters.promoted_records)),
            (
                "disk_throttled_ms",
                "Time for which writing waited for its bandwidth",
                get(&counters.throttled_ms),
            ),
            ("disk_recovered_records", "Records found at the start", self.recovery.records),
            ("disk_recovery_bad_records", "Damaged records found at the start", self.recovery.bad_count),
        ];
        DiskNumbers { gauges, counts }
    }

    /// A session is over: nothing of it is wanted any more.
    pub(crate) fn end_session(&self, session: SessionId) {
        self.audience.write().end(session);
        self.tellings.lock().remove(&session);
        self.cancel_promotions(session);
    }

    /// A session is not told any more about groups that are not among these.
    pub(crate) fn narrow(&self, session: SessionId, groups: &GroupSet) {
        self.audience.write().narrow(session, groups);
    }

    /// How much a master has not heard yet.
    pub(crate) fn note_unheard(&self, session: SessionId, bytes: usize) {
        if let Some(telling) = self.tellings.lock().get_mut(&session) {
            telling.unheard = bytes;
        }
    }

    /// Says what became of orders, to the sessions that gave them.
    fn answer(&self, mut answers: Vec<(SessionId, OrderResult)>) {
        answers.sort_by_key(|(session, _)| *session);
        for of_session in answers.chunk_by(|a, b| a.0 == b.0) {
            let results = of_session.iter().map(|(_, result)| *result).collect();
            self.events.send(Event::Results { session: of_session[0].0, results });
        }
    }

    fn is_live(&self, session: SessionId) -> bool {
        self.audience.read().is_live(session)
    }

    fn closed(&self) -> Option<Closed> {
        let mut closed = self.closed_until.lock();
        let over = closed.is_some_and(|(until, _)| until <= Instant::now());
        if over {
            *closed = None;
            info!("writing to the disk is tried again");
        }
        closed.map(|(_, why)| why)
    }

    /// Writing has failed: reads go on.
    fn close(&self, why: Closed) {
        let mut closed = self.closed_until.lock();
        if closed.is_none() {
            let pause_ms = self.write_pause.as_millis() as u64;
            warn!(?why, pause_ms, "nothing is written to the disk for a while; what is on it is served");
        }
        *closed = Some((Instant::now() + self.write_pause, why));
        self.counters.write_failed();
    }

    /// A queue for the calling thread, with the staging memory registered if it reads into that.
    fn queue(&self, reads_into_staging: bool) -> Box<dyn Queue> {
        let (address, len) = self.staging.memory();
        let registered = reads_into_staging.then_some(RegisteredMemory { address, len });
        self.storage.queue(&QueueConfig { registered, ..QueueConfig::default() })
    }
}

fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, DiskError> {
    Ok(std::thread::Builder::new().name(name).spawn(work)?)
}

/// Nine tenths of what is free, with what the tier has already.
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

/// The code for whoever asked.
fn code_of(error: moontide_disk::ReadError) -> ErrorCode {
    match error {
        moontide_disk::ReadError::Io(_) => ErrorCode::DiskError,
        moontide_disk::ReadError::Damaged(_) | moontide_disk::ReadError::OtherRecord => ErrorCode::Corrupt,
    }
}

#[cfg(test)]
mod tests;
