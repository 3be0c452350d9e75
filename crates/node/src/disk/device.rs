//! [`Device`]: one directory of the disk tier, with its own backend, queues and threads, so that a directory that does not
//! respond delays no other.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use moontide_disk::{
    Backend, BackendConfig, Queue, QueueConfig, RecordId, Recovery, RegisteredMemory, Storage,
};
use moontide_heap::Staging;
use moontide_rt::collections::{HashMap, HashSet};
use moontide_rt::sync::Mutex;
use moontide_rt::sync::mpsc::Sender;
use moontide_rt::thread::JoinHandle;
use moontide_rt::time::Instant;
use tracing::{info, warn};

use super::load::LoadQueue;
use super::offload::OffloadJob;
use super::open_jobs::JobTicket;
use super::parts::PartId;
use super::removal::Removal;
use super::{DiskError, WritePauseReason};
use crate::config::DiskConfig;

/// Share of the file system's free space that is used if no limit is set.
const SHARE_OF_FREE: (u64, u64) = (9, 10);

/// Share of the limit that a flush may write: deleting whole bucket files frees more than is needed.
const FLUSH_SHARE: (u64, u64) = (9, 10);

/// One directory of the disk tier.
pub(super) struct Device {
    /// Number of the directory in the tier.
    pub(super) number: usize,
    pub(super) dir: PathBuf,
    storage: Arc<dyn Storage>,
    pub(super) backend: Box<dyn Backend>,
    /// Result of the scan at the start.
    pub(super) recovery: Recovery,
    pub(super) loads: LoadQueue,
    pub(super) offloads: Mutex<Option<Sender<(JobTicket, OffloadJob)>>>,
    pub(super) removals: Mutex<Option<Sender<Arc<Removal>>>>,
    /// Writes that have not ended. `None` after the exclusion.
    pub(super) open_offloads: Mutex<Option<HashMap<JobTicket, OffloadJob>>>,
    /// Removals that are not durable here. `None` after the exclusion.
    pub(super) open_removals: Mutex<Option<HashMap<JobTicket, Arc<Removal>>>>,
    /// Payload bytes of accepted Offload commands that are not written yet.
    pub(super) backlog: AtomicU64,
    pub(super) evictions: Mutex<Evictions>,
    /// Parts that the load threads read. `None` after the exclusion.
    pub(super) loading: Mutex<Option<HashSet<PartId>>>,
    /// Set after a failed write: the time of the next attempt.
    writes_paused: Mutex<Option<(Instant, WritePauseReason)>>,
    /// Bytes that the flush before the stop may still write; `None` before it.
    flush_budget: Mutex<Option<u64>>,
    is_excluded: AtomicBool,
    pub(super) health: Health,
}

/// Evictions in progress: their records can no longer be found, and are not durably gone.
#[derive(Debug, Default)]
pub(super) struct Evictions {
    last: u64,
    /// Records of each, by its number.
    pub(super) running: BTreeMap<u64, HashSet<RecordId>>,
}

impl Evictions {
    /// Begins an eviction. Returns its number.
    pub(super) fn begin(&mut self, names: &[RecordId]) -> u64 {
        self.last += 1;
        self.running.insert(self.last, names.iter().copied().collect());
        self.last
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Device {
    /// Opens a directory and scans it.
    pub(super) fn open(
        number: usize,
        dir: &Path,
        storage: Arc<dyn Storage>,
        config: &DiskConfig,
    ) -> Result<Device, DiskError> {
        let name = dir.display().to_string();
        let limit_bytes = match config.limit_bytes {
            Some(limit) => limit,
            None => default_limit(&*storage)
                .map_err(|source| DiskError::Directory { dir: name.clone(), source })?,
        };
        let started = Instant::now();
        let mut queue = storage.queue(&QueueConfig::default());
        let backend_config = BackendConfig { limit_bytes, eviction_policy: config.eviction_policy };
        let opened = config.backend.open(Arc::clone(&storage), &mut *queue, backend_config, &mut |_| ());
        let (backend, recovery) = opened.map_err(|source| DiskError::Open { dir: name.clone(), source })?;
        info!(
            dir = name,
            backend = %config.backend,
            limit_bytes,
            records = recovery.records,
            bad = recovery.bad_count,
            took_ms = started.elapsed().as_millis() as u64,
            "disk tier opened"
        );
        for bad in recovery.bad.iter().take(10) {
            warn!(
                dir = name,
                file = bad.file,
                offset = bad.offset,
                reason = bad.reason,
                "skipped corrupt record on disk"
            );
        }
        Ok(Device {
            number,
            dir: dir.to_owned(),
            storage,
            backend,
            recovery,
            loads: LoadQueue::default(),
            offloads: Mutex::default(),
            removals: Mutex::default(),
            open_offloads: Mutex::new(Some(HashMap::new())),
            open_removals: Mutex::new(Some(HashMap::new())),
            backlog: AtomicU64::new(0),
            evictions: Mutex::default(),
            loading: Mutex::new(Some(HashSet::new())),
            writes_paused: Mutex::default(),
            flush_budget: Mutex::default(),
            is_excluded: AtomicBool::new(false),
            health: Health::default(),
        })
    }

    /// Whether the directory was excluded: its records are gone, and nothing is written to it.
    pub(super) fn is_excluded(&self) -> bool {
        self.is_excluded.load(Ordering::SeqCst)
    }

    pub(super) fn set_excluded(&self) {
        self.is_excluded.store(true, Ordering::SeqCst);
    }

    /// Returns a queue for the calling thread; registers the staging memory if the thread reads into it.
    pub(super) fn queue(&self, reads_into: Option<&Staging>) -> Box<dyn Queue> {
        let registered = reads_into.map(|staging| {
            let (address, len) = staging.memory();
            RegisteredMemory { address, len }
        });
        self.storage.queue(&QueueConfig { registered, ..QueueConfig::default() })
    }

    /// Whether a record is being evicted.
    pub(super) fn is_evicting(&self, name: &RecordId) -> bool {
        self.evictions.lock().running.values().any(|names| names.contains(name))
    }

    /// Order in which directories are chosen for a write: the shortest queue first, then the most space.
    pub(super) fn write_order(&self) -> (u64, Reverse<u64>) {
        let usage = self.backend.usage();
        let free = usage.limit.saturating_sub(usage.bytes);
        (self.backlog.load(Ordering::Relaxed), Reverse(self.flush_budget.lock().unwrap_or(free)))
    }

    /// Begins the flush before the stop. It begins with the most valuable objects and must not evict them for others, so it
    /// writes less than the limit.
    pub(super) fn begin_flush(&self) {
        let (share, of) = FLUSH_SHARE;
        *self.flush_budget.lock() = Some(self.backend.usage().limit / of * share);
    }

    /// Takes the bytes of a record from the budget of the flush. Returns `false` if they exceed it: then nothing more is
    /// written.
    pub(super) fn take_flush_budget(&self, bytes: u64) -> bool {
        let mut budget = self.flush_budget.lock();
        let Some(left) = &mut *budget else { return true };
        let rest = left.checked_sub(bytes);
        *left = rest.unwrap_or(0);
        rest.is_some()
    }

    pub(super) fn write_pause_reason(&self) -> Option<WritePauseReason> {
        let mut paused = self.writes_paused.lock();
        let over = paused.is_some_and(|(until, _)| until <= Instant::now());
        if over {
            *paused = None;
            info!(dir = %self.dir.display(), "retrying disk writes");
        }
        let flush_ended = *self.flush_budget.lock() == Some(0);
        paused.map(|(_, reason)| reason).or(flush_ended.then_some(WritePauseReason::Full))
    }

    /// Pauses writes after a failed one. Reads continue.
    pub(super) fn pause_writes(&self, reason: WritePauseReason, pause: Duration) {
        let mut paused = self.writes_paused.lock();
        if paused.is_none() {
            let pause_ms = pause.as_millis() as u64;
            let dir = self.dir.display();
            warn!(%dir, ?reason, pause_ms, "disk writes paused; records on disk are still served");
        }
        *paused = Some((Instant::now() + pause, reason));
    }
}

/// Returns 90 % of the free space plus the space that the tier already uses.
fn default_limit(storage: &dyn Storage) -> io::Result<u64> {
    fn used(storage: &dyn Storage, dir: &Path) -> io::Result<u64> {
        let mut sum = 0;
        for entry in storage.list(dir)? {
            sum += if entry.is_dir { used(storage, &dir.join(&entry.name))? } else { entry.len };
        }
        Ok(sum)
    }
    let (share, of) = SHARE_OF_FREE;
    let all = storage.space()?.free + used(storage, Path::new(""))?;
    Ok(all / of * share)
}

/// What is known of the reliability of a directory.
#[derive(Debug, Default)]
pub(super) struct Health(Mutex<HealthState>);

#[derive(Debug, Default)]
struct HealthState {
    last: u64,
    /// Starts of the operations in progress.
    running: BTreeMap<u64, Instant>,
    reads: Failures,
    removals: Failures,
}

/// Failures since the last success.
#[derive(Debug, Default)]
struct Failures {
    /// Times of the first and of the last one.
    period: Option<(Instant, Instant)>,
    /// The first record that could not be read, and whether another one could not be read, too: a single bad sector is no
    /// reason to give up all others.
    first: Option<RecordId>,
    is_several: bool,
}

/// An operation in progress, until it is dropped.
#[derive(Debug)]
pub(super) struct RunningOp<'a> {
    health: &'a Health,
    number: u64,
}

impl Drop for RunningOp<'_> {
    fn drop(&mut self) {
        self.health.0.lock().running.remove(&self.number);
    }
}

impl Health {
    /// Begins an operation on the directory.
    pub(super) fn begin(&self) -> RunningOp<'_> {
        let mut state = self.0.lock();
        state.last += 1;
        let number = state.last;
        state.running.insert(number, Instant::now());
        RunningOp { health: self, number }
    }

    /// Records the result of reading a record.
    pub(super) fn record_read(&self, name: RecordId, succeeded: bool) {
        let mut state = self.0.lock();
        let reads = &mut state.reads;
        reads.record(succeeded);
        if !succeeded {
            let first = *reads.first.get_or_insert(name);
            reads.is_several |= first != name;
        }
    }

    /// Records the result of making removals durable.
    pub(super) fn record_removal(&self, succeeded: bool) {
        let mut state = self.0.lock();
        state.removals.record(succeeded);
        state.removals.is_several = true;
    }

    /// Returns for how long the directory has failed, or has not responded. Failures that are older than `forget_after` do
    /// not count: without any operation, nothing is known.
    pub(super) fn bad_for(&self, forget_after: Duration) -> Duration {
        let mut state = self.0.lock();
        state.reads.forget(forget_after);
        state.removals.forget(forget_after);
        let oldest = state.running.values().next().map_or(Duration::ZERO, Instant::elapsed);
        oldest.max(state.reads.time()).max(state.removals.time())
    }
}

impl Failures {
    fn record(&mut self, succeeded: bool) {
        if succeeded {
            *self = Failures::default();
            return;
        }
        let now = Instant::now();
        self.period = Some((self.period.map_or(now, |(first, _)| first), now));
    }

    fn forget(&mut self, after: Duration) {
        if self.period.is_some_and(|(_, last)| last.elapsed() > after) {
            *self = Failures::default();
        }
    }

    /// Time between the first and the last failure: time without any operation does not count.
    fn time(&self) -> Duration {
        let period = self.period.filter(|_| self.is_several);
        period.map_or(Duration::ZERO, |(first, last)| last.duration_since(first))
    }
}

/// A thread of a directory.
#[derive(Debug)]
pub(crate) struct DeviceThread {
    pub(super) thread: JoinHandle<()>,
    pub(super) device: Arc<Device>,
}

impl DeviceThread {
    /// Time between two checks whether the thread has ended.
    const POLL_INTERVAL: Duration = Duration::from_millis(2);

    /// Waits for the end of the thread until the given time. It may hang, above all if its directory was excluded. Returns
    /// whether it has not panicked.
    pub(crate) fn join(self, until: Option<Instant>) -> bool {
        while !self.thread.is_finished() {
            if self.device.is_excluded() || until.is_some_and(|until| until <= Instant::now()) {
                warn!(dir = %self.device.dir.display(), thread = self.name(), "a disk thread has not ended");
                return true;
            }
            moontide_rt::thread::sleep(Self::POLL_INTERVAL);
        }
        self.thread.join().is_ok()
    }

    pub(crate) fn name(&self) -> &str {
        self.thread.thread().name().unwrap_or_default()
    }
}
