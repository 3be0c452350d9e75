//! [`DiskTier`]: the node's disk. It writes records on command of a master, loads records for peers, and notifies the
//! masters of its content.
//!
//! | thread | task |
//! |---|---|
//! | `moontide-offload` | writes records, evicts when the limit is reached ([`offload`]) |
//! | `moontide-load-…` | read and verify records into staging, from where they are served ([`load`]) |
//! | `moontide-removal` | makes removals durable before the reply ([`removal`]) |
//! | `moontide-scan` | sends the inventory of the disk to a master ([`inventory`]) |
//! | `moontide-watch` | excludes a directory that fails or does not respond ([`exclusion`]) |
//!
//! Each directory is a [`Device`] with threads of its own; one thread watches all of them.
//!
//! Invariants: a record is durable before a master is notified of it; a removed record can no longer be found before
//! the notice or the reply is sent, and the removal is durable in all directories before the reply; every record in staging
//! can be found on the disk.

mod counters;
mod device;
mod directories;
mod exclusion;
mod identity;
mod inventory;
mod load;
mod members;
mod memory_list;
mod offload;
mod open_jobs;
mod parts;
mod promote;
mod record_spec;
mod removal;
mod staging_cache;
mod test_hooks;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{fmt, io};

use moontide_disk::{OpenError, OsStorage, RecordId, Storage, Usage};
use moontide_heap::Staging;
use moontide_proto::v1;
use moontide_rt::collections::HashMap;
use moontide_rt::sync::mpsc::Sender;
use moontide_rt::sync::{Mutex, RwLock};
use moontide_rt::time::Instant;
use moontide_types::{ErrorCode, ObjectId, SessionId};
use tracing::{error, info, warn};

use self::counters::DiskCounters;
use self::device::Device;
pub(crate) use self::device::DeviceThread;
pub(crate) use self::directories::DiskDirectories;
use self::directories::DiskMembers;
pub use self::identity::IdentityError;
use self::inventory::InventoryProgress;
use self::memory_list::MemoryList;
pub(crate) use self::offload::OffloadJob;
use self::open_jobs::OpenJobs;
pub(crate) use self::promote::PromoteJob;
pub(crate) use self::removal::RemovalJob;
use self::staging_cache::StagingCache;
use crate::config::DiskConfig;
use crate::event_router::EventRouter;
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

/// The node's disk tier.
pub(crate) struct DiskTier {
    config: DiskConfig,
    /// The directories, also those that were excluded.
    devices: Vec<Arc<Device>>,
    members: Mutex<DiskMembers>,
    /// Locks of the directories, until the stop. Threads that write keep theirs until they end.
    locks: Mutex<Vec<Arc<std::fs::File>>>,
    /// Ends the thread that watches the directories when it is dropped.
    watch: Mutex<Option<Sender<()>>>,
    memory: Arc<NodeMemory>,
    staging: Arc<Staging>,
    cache: StagingCache,
    events: Arc<EventRouter>,
    counters: DiskCounters,
    /// Sessions that are notified about the disk. Notices for other sessions are dropped.
    subscribers: RwLock<NoticeSubscribers>,
    /// Held while a record is looked up or removed *and* the notice is sent, so that notices are in the order of these
    /// events. Not held during I/O: a directory may not respond.
    notify_lock: Mutex<()>,
    /// Offloads and removals that have not ended.
    open_jobs: OpenJobs,
    /// Progress of the inventories of sessions.
    inventories: Mutex<HashMap<SessionId, InventoryProgress>>,
    /// Objects that the masters are told to have been in memory.
    memory_list: Mutex<MemoryList>,
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
        directories: DiskDirectories,
        config: DiskConfig,
        memory: Arc<NodeMemory>,
        staging: Arc<Staging>,
        events: Arc<EventRouter>,
    ) -> Result<DiskTier, DiskError> {
        let mut list = MemoryList::empty();
        let mut storages: Vec<(PathBuf, Arc<dyn Storage>)> = Vec::new();
        for path in &directories.usable {
            let dir = path.display().to_string();
            let storage = OsStorage::open(path, config.io_engine)
                .map_err(|source| DiskError::Directory { dir: dir.clone(), source })?;
            info!(dir, engine = storage.engine(), direct = storage.is_direct(), "disk directory opened");
            storages.push((path.clone(), Arc::new(storage)));
            match MemoryList::take(path) {
                Ok(found) => list.extend(found),
                Err(error) => {
                    warn!(dir, %error, "cannot read which objects were in memory; they are loaded when they are read");
                }
            }
        }
        if list.len() > 0 {
            info!(objects = list.len(), "masters will load what was in memory before the stop");
        }
        let mut tier = DiskTier::open_on(storages, directories.members, config, memory, staging, events)?;
        tier.memory_list = Mutex::new(list);
        tier.locks = Mutex::new(directories.locks);
        Ok(tier)
    }

    /// Like [`DiskTier::open`], with one directory on any storage.
    #[cfg(feature = "testing")]
    pub(crate) fn open_in(
        dir: &std::path::Path,
        storage: Arc<dyn Storage>,
        config: DiskConfig,
        memory: Arc<NodeMemory>,
        events: Arc<EventRouter>,
    ) -> Result<DiskTier, DiskError> {
        let staging = Arc::clone(memory.staging().expect("a node with a disk has staging memory"));
        let storages = vec![(dir.to_owned(), storage)];
        DiskTier::open_on(storages, DiskMembers::single(dir), config, memory, staging, events)
    }

    /// Like [`DiskTier::open`], on any storage.
    fn open_on(
        storages: Vec<(PathBuf, Arc<dyn Storage>)>,
        members: DiskMembers,
        config: DiskConfig,
        memory: Arc<NodeMemory>,
        staging: Arc<Staging>,
        events: Arc<EventRouter>,
    ) -> Result<DiskTier, DiskError> {
        let open = |(number, (dir, storage)): (usize, (PathBuf, Arc<dyn Storage>))| {
            Device::open(number, &dir, storage, &config).map(Arc::new)
        };
        let devices = storages.into_iter().enumerate().map(open).collect::<Result<Vec<_>, _>>()?;
        Ok(DiskTier {
            config,
            devices,
            members: Mutex::new(members),
            locks: Mutex::default(),
            watch: Mutex::default(),
            memory,
            staging,
            cache: StagingCache::default(),
            events,
            counters: DiskCounters::default(),
            subscribers: RwLock::default(),
            notify_lock: Mutex::default(),
            open_jobs: OpenJobs::default(),
            inventories: Mutex::default(),
            memory_list: Mutex::new(MemoryList::empty()),
            write_pause: WRITE_PAUSE,
            test_hooks: Default::default(),
        })
    }

    /// Starts the threads.
    pub(crate) fn start(self: &Arc<Self>) -> Result<Vec<DeviceThread>, DiskError> {
        let mut threads = Vec::new();
        for device in &self.devices {
            let (sender, jobs) = moontide_rt::sync::mpsc::channel();
            *device.offloads.lock() = Some(sender);
            let run = move |tier: &DiskTier, device: &Device| offload::run(tier, device, &jobs);
            threads.push(self.spawn(device, "moontide-offload".into(), run)?);
            let (sender, jobs) = moontide_rt::sync::mpsc::channel();
            *device.removals.lock() = Some(sender);
            let run = move |tier: &DiskTier, device: &Device| removal::run(tier, device, &jobs);
            threads.push(self.spawn(device, "moontide-removal".into(), run)?);
            for number in 0..self.config.read_threads.max(1) {
                threads.push(self.spawn(device, format!("moontide-load-{number}"), load::run)?);
            }
        }
        if self.devices.len() > 1 {
            let (sender, stopped) = moontide_rt::sync::mpsc::channel();
            *self.watch.lock() = Some(sender);
            let tier = Arc::clone(self);
            let watch = moontide_rt::thread::Builder::new().name("moontide-watch".into());
            let locks = self.locks.lock().clone();
            // Nothing waits for its end: it may write to a directory that does not respond.
            watch.spawn(move || {
                exclusion::run(&tier, &stopped);
                drop(locks);
            })?;
        }
        Ok(threads)
    }

    fn spawn(
        self: &Arc<Self>,
        device: &Arc<Device>,
        name: String,
        run: impl FnOnce(&DiskTier, &Device) + Send + 'static,
    ) -> Result<DeviceThread, DiskError> {
        let (tier, of) = (Arc::clone(self), Arc::clone(device));
        let lock = self.locks.lock().get(device.number).cloned();
        let thread = moontide_rt::thread::Builder::new().name(name).spawn(move || {
            run(&tier, &of);
            drop(lock);
        })?;
        Ok(DeviceThread { thread, device: Arc::clone(device) })
    }

    /// Stops the writes of records. Queued ones are dropped.
    pub(crate) fn stop_offloads(&self) {
        self.devices.iter().for_each(|device| *device.offloads.lock() = None);
    }

    /// Stops the threads. Queued jobs are dropped.
    pub(crate) fn stop(&self) {
        *self.watch.lock() = None;
        self.stop_offloads();
        for device in &self.devices {
            *device.removals.lock() = None;
            self.stop_loads(device, ErrorCode::StaleSession);
        }
        *self.subscribers.write() = NoticeSubscribers::default();
    }

    /// Waits for the threads after [`DiskTier::stop`]. With several directories, one that does not respond is not waited for
    /// longer than for its exclusion.
    pub(crate) fn join(&self, threads: Vec<DeviceThread>) {
        let until = (self.devices.len() > 1).then(|| Instant::now() + self.config.exclude_after);
        for thread in threads {
            let name = thread.name().to_owned();
            if !thread.join(until) {
                error!(thread = name, "disk thread panicked");
            }
        }
        self.locks.lock().clear();
    }

    /// Stops the loads from a directory. Queued ones fail with `code`.
    fn stop_loads(&self, device: &Device, code: ErrorCode) {
        let unread = device.loads.stop(code);
        unread.iter().for_each(|name| self.cache.failed(*name));
        counters::increment(&self.counters.loads_failed, unread.len() as u64);
    }

    /// Returns the directories that are in use.
    fn devices(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.devices.iter().filter(|device| !device.is_excluded())
    }

    /// Returns the directory that has a record.
    fn device_of(&self, name: &RecordId) -> Option<&Arc<Device>> {
        self.devices().find(|device| device.backend.contains(name))
    }

    /// Whether a record can be found.
    fn contains(&self, name: &RecordId) -> bool {
        self.device_of(name).is_some()
    }

    fn usage(&self) -> Usage {
        self.devices().fold(Usage::default(), |sum, device| {
            let usage = device.backend.usage();
            Usage {
                bytes: sum.bytes + usage.bytes,
                limit: sum.limit + usage.limit,
                records: sum.records + usage.records,
            }
        })
    }

    fn backlog(&self) -> u64 {
        self.devices().map(|device| device.backlog.load(Ordering::Relaxed)).sum()
    }

    /// Why no directory accepts writes.
    fn write_pause_reason(&self) -> Option<WritePauseReason> {
        let reasons: Option<Vec<_>> = self.devices().map(|device| device.write_pause_reason()).collect();
        let reasons = reasons?;
        reasons.iter().find(|reason| **reason == WritePauseReason::Full).or(reasons.first()).copied()
    }

    /// True only in a test with a mutation that ignores kills: all, or those of versions that are not in their slots.
    pub(crate) fn ignores_kill(&self, killed: bool) -> bool {
        let mutation_enabled = |mutation| self.test_hooks.mutation.is_enabled(mutation);
        mutation_enabled(test_hooks::Mutation::KilledUntold)
            || (!killed && mutation_enabled(test_hooks::Mutation::KilledAbsentUntold))
    }

    /// Whether the disk holds a record, is about to write one, or has to make a removal durable. If not, a master need
    /// not wait for an inventory.
    pub(crate) fn is_occupied(&self) -> bool {
        let is_evicting = || self.devices().any(|device| !device.evictions.lock().running.is_empty());
        self.usage().records > 0 || !self.open_jobs.is_empty() || is_evicting()
    }

    /// Whether all sessions have complete inventories.
    #[cfg(feature = "testing")]
    pub(crate) fn is_inventoried(&self) -> bool {
        self.inventories.lock().values().all(|inventory| inventory.running == 0)
    }

    /// Number of removals that are not durable, and of those that a write has refused. Waits for no lock, and does not count
    /// what is locked: the caller may be about to kill the process, while a thread that was stopped holds a lock.
    #[cfg(feature = "testing")]
    pub(crate) fn removals(&self) -> (usize, usize) {
        let failed = |device: &Arc<Device>| {
            let open = device.open_removals.try_lock();
            let open = open.iter().flat_map(|open| open.iter()).flat_map(|open| open.values());
            open.filter(|removal| removal.has_failed()).count()
        };
        (self.open_jobs.removals(), self.devices().map(failed).sum())
    }

    /// Whether a removal of the object is not durable.
    pub(crate) fn is_removing(&self, id: ObjectId) -> bool {
        self.open_jobs.has_removal(id)
    }

    /// Begins the flush before the stop.
    pub(crate) fn begin_flush(&self) {
        self.devices().for_each(|device| device.begin_flush());
    }

    /// Writes the list of the objects in memory, for the next start. Without it they are loaded when they are read.
    pub(crate) fn write_memory_list(&self) {
        // Any one will do; one that works does not delay the stop.
        let Some(device) =
            self.devices().min_by_key(|device| device.health.bad_for(self.config.exclude_after))
        else {
            return;
        };
        if let Err(error) = MemoryList::write(&device.dir, &self.memory) {
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
        let usage = self.usage();
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
            backlog_bytes: self.backlog(),
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
        let (usage, paused) = (self.usage(), self.write_pause_reason());
        let staging = self.staging.in_use();
        let is = |reason: WritePauseReason| u64::from(paused == Some(reason));
        let gauges = vec![
            ("disk_used_bytes", "Bytes on the disk", usage.bytes),
            ("disk_limit_bytes", "Limit of the bytes on the disk", usage.limit),
            ("disk_records", "Records on the disk", usage.records),
            (
                "disk_offload_backlog_bytes",
                "Bytes of Offload commands that are not written yet",
                self.backlog(),
            ),
            ("disk_full", "1 while writes are paused because the disk is full", is(WritePauseReason::Full)),
            (
                "disk_write_failed",
                "1 while writes are paused because a write failed",
                is(WritePauseReason::Failed),
            ),
            (
                "disk_directories_excluded",
                "Directories of the disk that are not used because they failed or did not respond",
                self.devices.iter().filter(|device| device.is_excluded()).count() as u64,
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
            (
                "disk_recovered_records",
                "Records found at the start",
                self.devices.iter().map(|device| device.recovery.records).sum(),
            ),
            (
                "disk_recovery_corrupt_records",
                "Corrupt records found at the start",
                self.devices.iter().map(|device| device.recovery.bad_count).sum(),
            ),
        ];
        let throttled = Duration::from_millis(get(&counters.throttled_ms));
        DiskMetrics { gauges, counts, throttled }
    }

    /// Ends a session: drops its subscription and its inventory.
    pub(crate) fn end_session(&self, session: SessionId) {
        self.subscribers.write().end(session);
        self.inventories.lock().remove(&session);
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

    fn is_live(&self, session: SessionId) -> bool {
        self.subscribers.read().is_live(session)
    }
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
