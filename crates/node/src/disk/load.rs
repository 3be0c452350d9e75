//! Loads records from disk into staging. Each load thread has its own I/O queue and reads the batch of one caller
//! together, so that the disk is busy while the thread verifies.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_disk::{
    BLOCK_BYTES, DiskLayout, Queue, ReadError, ReadJob, RecordId, RecordLocation, decode_preamble,
    read_records,
};
use moontide_heap::{NodePin, StagedRecord, StagingBuffer};
use moontide_types::record::{Attributes, Header, KeySection};
use moontide_types::{ErrorCode, MonoTime};
use parking_lot::{Condvar, Mutex};
use tracing::warn;

use super::counters::increment;
use super::promote::PromoteJob;
use super::record_spec::record_spec;
use super::staging_cache::StagingLookup;
use super::test_hooks::HookPoint;
use super::{DiskTier, code_of};

/// Time a load waits for staging memory. Limited, because the holders of the memory may wait for this very thread.
const STAGING_WAIT: Duration = Duration::from_millis(200);

/// Jobs for the load threads.
#[derive(Debug, Default)]
pub(super) struct LoadQueue {
    queue: Mutex<LoadQueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LoadQueueState {
    jobs: VecDeque<Job>,
    stopped: bool,
}

#[derive(Debug)]
enum Job {
    Load(Arc<LoadJob>),
    Promote(PromoteJob),
}

/// Result of loading one record.
type LoadResult = Result<Arc<StagedRecord>, ErrorCode>;

/// Load of the records of one caller.
#[derive(Debug)]
struct LoadJob {
    names: Vec<RecordId>,
    outcomes: Mutex<Option<Vec<LoadResult>>>,
    done: Condvar,
}

impl LoadQueue {
    fn push(&self, job: Job) -> bool {
        let mut state = self.queue.lock();
        if !state.stopped {
            state.jobs.push_back(job);
        }
        let pushed = !state.stopped;
        drop(state);
        self.changed.notify_one();
        pushed
    }

    /// Stops the threads, and returns the records that will not be loaded.
    pub(super) fn stop(&self) -> Vec<RecordId> {
        let mut state = self.queue.lock();
        state.stopped = true;
        let mut unread = Vec::new();
        for job in state.jobs.drain(..) {
            if let Job::Load(job) = job {
                job.finish(vec![Err(ErrorCode::StaleSession); job.names.len()]);
                unread.extend(&job.names);
            }
        }
        drop(state);
        self.changed.notify_all();
        unread
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.queue.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.stopped {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

impl LoadJob {
    fn finish(&self, outcomes: Vec<LoadResult>) {
        *self.outcomes.lock() = Some(outcomes);
        self.done.notify_all();
    }
}

/// Runs a load thread.
pub(super) fn run(tier: &DiskTier) {
    let mut queue = tier.queue(true);
    while let Some(job) = tier.loads.next() {
        match job {
            Job::Load(job) => {
                let outcomes = tier.load(&mut *queue, &job.names);
                job.finish(outcomes);
            }
            Job::Promote(job) => tier.promote(&mut *queue, &job),
        }
    }
}

impl DiskTier {
    /// Loads records into staging, and pins them.
    pub(crate) fn stage(&self, names: &[RecordId], deadline: Instant) -> Vec<Result<NodePin<'_>, ErrorCode>> {
        let staged = self.load_all(names, deadline);
        let pinned = staged.into_iter().map(|staged| {
            let staged = staged?;
            let pin = self.memory.heap().pin(staged.segment(), staged.slot(), staged.version());
            // Killed between the load and the pin: it was removed.
            pin.ok_or(ErrorCode::Gone)
        });
        pinned.collect()
    }

    /// Loads records into staging, and keeps them there until `until` for a peer that reads them itself.
    pub(crate) fn stage_with_lease(
        &self,
        names: &[RecordId],
        until: Instant,
        deadline: Instant,
    ) -> Vec<LoadResult> {
        let staged = self.load_all(names, deadline);
        for (name, staged) in names.iter().zip(&staged) {
            if staged.is_ok() {
                self.cache.lease(*name, Some(until));
            }
        }
        staged
    }

    /// Releases one lease of a record.
    pub(crate) fn release_lease(&self, name: RecordId) {
        self.cache.lease(name, None);
    }

    /// Queues a promotion. Returns `false` if the tier has stopped.
    pub(crate) fn queue_promotion(&self, job: PromoteJob) -> bool {
        self.loads.push(Job::Promote(job))
    }

    fn load_all(&self, names: &[RecordId], deadline: Instant) -> Vec<LoadResult> {
        increment(&self.counters.loads_requested, names.len() as u64);
        let mut outcomes: Vec<Option<LoadResult>> = Vec::with_capacity(names.len());
        let mut own = Vec::new();
        for name in names {
            outcomes.push(match self.cache.begin(*name) {
                StagingLookup::Ready(staged) => {
                    increment(&self.counters.loads_staged, 1);
                    Some(Ok(staged))
                }
                StagingLookup::Load => {
                    own.push(*name);
                    None
                }
                StagingLookup::InProgress => None,
            });
        }
        let loaded = self.load_and_wait(&own, deadline);
        let mut loaded = own.into_iter().zip(loaded).peekable();
        for (name, outcome) in names.iter().zip(&mut outcomes) {
            if outcome.is_some() {
                continue;
            }
            // A record that is requested twice is loaded once.
            let result = loaded.next_if(|(loaded, _)| loaded == name);
            *outcome = Some(match result {
                Some((_, loaded)) => loaded,
                None => {
                    let shared = self.cache.wait(*name, deadline);
                    let counter = match shared {
                        Ok(_) => &self.counters.loads_staged,
                        Err(_) => &self.counters.loads_failed,
                    };
                    increment(counter, 1);
                    shared
                }
            });
        }
        outcomes.into_iter().map(|outcome| outcome.unwrap_or(Err(ErrorCode::Internal))).collect()
    }

    /// Has a thread load the records that this caller has to load.
    fn load_and_wait(&self, names: &[RecordId], deadline: Instant) -> Vec<LoadResult> {
        if names.is_empty() {
            return Vec::new();
        }
        let job = LoadJob { names: names.to_vec(), outcomes: Mutex::default(), done: Condvar::new() };
        let job = Arc::new(job);
        if !self.loads.push(Job::Load(Arc::clone(&job))) {
            names.iter().for_each(|name| self.cache.failed(*name));
            increment(&self.counters.loads_failed, names.len() as u64);
            return vec![Err(ErrorCode::StaleSession); names.len()];
        }
        let mut outcomes = job.outcomes.lock();
        while outcomes.is_none() {
            if job.done.wait_until(&mut outcomes, deadline).timed_out() && outcomes.is_none() {
                // The thread continues; the next caller finds them in staging.
                return vec![Err(ErrorCode::DeadlineExceeded); names.len()];
            }
        }
        outcomes.take().unwrap_or_default()
    }

    /// Loads records that the caller has to load; afterwards, each is in the cache or absent.
    pub(super) fn load(&self, queue: &mut dyn Queue, names: &[RecordId]) -> Vec<LoadResult> {
        // One deadline for all of them: if they do not fit together, the last ones wait for the buffers of the first
        // ones.
        let wait_until = Instant::now() + STAGING_WAIT;
        let allocations: Vec<Result<(RecordLocation, StagingBuffer), ErrorCode>> =
            names.iter().map(|name| self.allocate_for(name, wait_until)).collect();
        let mut buffers: Vec<(RecordId, RecordLocation, StagingBuffer)> = Vec::with_capacity(names.len());
        let mut refused = Vec::with_capacity(names.len());
        for (name, allocation) in names.iter().zip(allocations) {
            refused.push(match allocation {
                Ok((location, buffer)) => {
                    buffers.push((*name, location, buffer));
                    None
                }
                Err(code) => Some(code),
            });
        }
        let jobs = buffers.iter_mut().map(|(name, location, buffer)| ReadJob {
            name: *name,
            location: location.clone(),
            into: &mut buffer.bytes_mut()[..location.len as usize],
        });
        let jobs = jobs.collect();
        let mut read = read_records(queue, jobs).into_iter().zip(buffers);
        self.test_hooks.reached(HookPoint::Read);
        let mut outcomes = Vec::with_capacity(names.len());
        for (name, refused) in names.iter().zip(refused) {
            let outcome = match refused {
                Some(code) => Err(code),
                None => match read.next() {
                    Some((result, (_, location, buffer))) => self.publish(name, result, &location, buffer),
                    None => Err(ErrorCode::Internal),
                },
            };
            if outcome.is_err() {
                self.cache.failed(*name);
            }
            let counter = match outcome {
                Ok(_) => &self.counters.loads_read,
                Err(ErrorCode::Gone) => &self.counters.loads_missed,
                Err(_) => &self.counters.loads_failed,
            };
            increment(counter, 1);
            outcomes.push(outcome);
        }
        outcomes
    }

    /// Returns the location of a record on disk and a staging buffer for it: the preamble comes before the payload on
    /// disk, and after it in memory.
    fn allocate_for(
        &self,
        name: &RecordId,
        wait_until: Instant,
    ) -> Result<(RecordLocation, StagingBuffer), ErrorCode> {
        let Some(location) = self.backend.locate(name) else {
            // The object has one stripe here, and the caller asks for a further one: the object is not gone.
            if name.stripe != 0 && self.backend.contains(&RecordId { stripe: 0, ..*name }) {
                return Err(ErrorCode::Gone);
            }
            self.test_hooks.reached(HookPoint::Missed);
            // The master expects the record here: notify it, so that it sends no more readers.
            if self.notify_gone(*name) {
                return Err(ErrorCode::Gone);
            }
            increment(&self.counters.read_errors, 1);
            return Err(ErrorCode::DiskError);
        };
        let preamble = location.preamble_read_len.next_multiple_of(BLOCK_BYTES as u64);
        let needed = location.len + preamble;
        if needed > self.staging.total_bytes() {
            return Err(ErrorCode::TooLarge);
        }
        loop {
            if let Some(buffer) = self.staging.alloc(needed) {
                return Ok((location, buffer));
            }
            if self.cache.evict_one() {
                continue;
            }
            // Readers hold all buffers, for a short time.
            if Instant::now() >= wait_until {
                return Err(ErrorCode::Busy);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Verifies a record that was read, and publishes it to readers.
    fn publish(
        &self,
        name: &RecordId,
        result: Result<Header, ReadError>,
        location: &RecordLocation,
        mut buffer: StagingBuffer,
    ) -> Result<Arc<StagedRecord>, ErrorCode> {
        let header = match result {
            Ok(header) => header,
            Err(error) => {
                warn!(id = %name.id, version = %name.version, %error, "cannot read record from disk");
                match error {
                    ReadError::Io(_) => increment(&self.counters.read_errors, 1),
                    ReadError::Corrupt(_) | ReadError::WrongRecord => {
                        increment(&self.counters.corrupt_records, 1);
                        self.backend.drop_corrupt(name);
                        self.notify_gone(*name);
                    }
                }
                return Err(code_of(error));
            }
        };
        increment(&self.counters.loaded_bytes, header.stripe_len);
        // Nothing overwrites the preamble, but `publish` consumes the buffer that holds it.
        let preamble = buffer.bytes_mut()[..location.preamble_read_len as usize].to_vec();
        let preamble = decode_preamble(&preamble).map_err(|_| ErrorCode::Internal)?;
        let key = KeySection::decode(preamble.key).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(preamble.attributes).map_err(|_| ErrorCode::Corrupt)?;
        let record = record_spec(&header, key, &attributes);
        let payload_at = DiskLayout::of(&header).preamble_len;
        let staged = buffer
            .publish(header.word.epoch(), payload_at, record, preamble.digests.as_bytes(), header.root, false)
            .map_err(|failure| {
                warn!(id = %name.id, error = %failure.error, "record from disk does not fit into staging");
                ErrorCode::Internal
            })?;
        self.cache.ready(*name, staged).ok_or(ErrorCode::Gone)
    }

    /// Kills records that were taken out of the cache, so that they get no new readers.
    pub(super) fn unpublish(&self, gone: &[Arc<StagedRecord>]) {
        for staged in gone {
            let (segment, slot, version) = (staged.segment(), staged.slot(), staged.version());
            let _ = self.memory.heap().kill(segment, slot, version, MonoTime(0));
        }
    }
}
