//! Loads records from disk into staging. Each load thread has its own I/O queue and reads the batch of one caller
//! together, so that the disk is busy while the thread verifies.
//!
//! A record that is longer than [`DISK_PART_BYTES`] is loaded in parts, each of which is verified by itself. While a
//! reader gets one part, the next ones are read ahead.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use moontide_disk::{
    BLOCK_BYTES, DiskLayout, Queue, ReadError, ReadJob, RecordId, RecordLocation, decode_preamble,
    read_records,
};
use moontide_heap::{NodePin, StagedRecord, StagingBuffer};
use moontide_proto::TransferOp;
use moontide_proto::limits::DISK_PART_BYTES;
use moontide_rt::mark;
use moontide_rt::sync::{Condvar, Mutex};
use moontide_rt::time::Instant;
use moontide_types::record::{Attributes, Header, KeySection};
use moontide_types::{ErrorCode, MonoTime, Span};
use tracing::warn;

use super::counters::increment;
use super::device::Device;
use super::parts::{Part, PartId, is_split, record_of};
use super::promote::PromoteJob;
use super::record_spec::part_spec;
use super::staging_cache::StagingLookup;
use super::test_hooks::HookPoint;
use super::{DiskTier, code_of};
use crate::slot_fills::record_spec;

/// Time a load waits for staging memory. Limited, because the holders of the memory may wait for this very thread.
pub(super) const STAGING_WAIT: Duration = Duration::from_millis(200);

/// Jobs for the load threads.
#[derive(Debug, Default)]
pub(super) struct LoadQueue {
    queue: Mutex<LoadQueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LoadQueueState {
    jobs: VecDeque<Job>,
    /// Promotions. A reader waits for a load, nothing waits for these.
    promotions: VecDeque<PromoteJob>,
    /// Loads since the last promotion.
    loads_in_a_row: u32,
    stopped: bool,
}

#[derive(Debug)]
enum Job {
    Load(Arc<LoadJob>),
    ReadAhead(PartId),
    Promote(PromoteJob),
}

/// Loads after which a promotion has its turn: it holds memory that is of no use before it ends.
const LOADS_PER_PROMOTION: u32 = 8;

/// Parts that are read ahead of a reader. With one part in transfer to the reader and these in flight, the disk is busy
/// also if it needs a few parts in flight to be fast.
const READ_AHEAD_PARTS: usize = 4;

/// Share of staging memory that parts read ahead may take: a quarter, so that they do not displace each other.
const AHEAD_SHARE: u64 = 4;

/// Result of loading one record or part.
type LoadResult = Result<Arc<StagedRecord>, ErrorCode>;

/// A part that a caller asks for.
#[derive(Debug)]
struct LoadRequest {
    name: PartId,
    /// Number of the directory that has it, or the first one.
    device: usize,
    /// Location of a long record, if the caller reads the whole part.
    long: Option<RecordLocation>,
}

/// What one part needs: where it is, and memory for it.
#[derive(Debug)]
struct Allocation {
    location: RecordLocation,
    blocks: Span,
    buffer: StagingBuffer,
}

/// Load of the records of one caller.
#[derive(Debug)]
struct LoadJob {
    names: Vec<PartId>,
    outcomes: Mutex<Option<Vec<LoadResult>>>,
    done: Condvar,
}

impl LoadQueue {
    fn push(&self, job: Job) -> bool {
        let mut state = self.queue.lock();
        match job {
            _ if state.stopped => {}
            Job::Promote(job) => state.promotions.push_back(job),
            job => state.jobs.push_back(job),
        }
        let pushed = !state.stopped;
        drop(state);
        self.changed.notify_one();
        pushed
    }

    /// Stops the threads, and returns what will not be loaded. Those who wait for it get `code`.
    pub(super) fn stop(&self, code: ErrorCode) -> Vec<PartId> {
        let mut state = self.queue.lock();
        state.stopped = true;
        state.promotions.clear();
        let mut unread = Vec::new();
        for job in state.jobs.drain(..) {
            match job {
                Job::Load(job) => {
                    job.finish(vec![Err(code); job.names.len()]);
                    unread.extend(&job.names);
                }
                Job::ReadAhead(name) => unread.push(name),
                Job::Promote(_) => {}
            }
        }
        drop(state);
        self.changed.notify_all();
        unread
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.queue.lock();
        loop {
            if let Some(job) = state.next() {
                return Some(job);
            }
            if state.stopped {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

impl LoadQueueState {
    fn next(&mut self) -> Option<Job> {
        let is_turn = self.jobs.is_empty() || self.loads_in_a_row >= LOADS_PER_PROMOTION;
        if is_turn && let Some(job) = self.promotions.pop_front() {
            self.loads_in_a_row = 0;
            return Some(Job::Promote(job));
        }
        self.loads_in_a_row += 1;
        self.jobs.pop_front()
    }
}

impl LoadJob {
    fn wait(&self, deadline: Instant) -> Vec<LoadResult> {
        let mut outcomes = self.outcomes.lock();
        while outcomes.is_none() {
            if self.done.wait_until(&mut outcomes, deadline).timed_out() && outcomes.is_none() {
                // The thread continues; the next caller finds them in staging.
                return vec![Err(ErrorCode::DeadlineExceeded); self.names.len()];
            }
        }
        outcomes.take().unwrap_or_default()
    }

    fn finish(&self, outcomes: Vec<LoadResult>) {
        *self.outcomes.lock() = Some(outcomes);
        self.done.notify_all();
    }
}

/// Runs a load thread.
pub(super) fn run(tier: &DiskTier, device: &Device) {
    let mut queue = device.queue(Some(&tier.staging));
    while let Some(job) = device.loads.next() {
        match job {
            Job::Load(job) => {
                let outcomes = tier.load(device, &mut *queue, &job.names, STAGING_WAIT);
                job.finish(outcomes);
            }
            Job::ReadAhead(name) => drop(tier.load(device, &mut *queue, &[name], Duration::ZERO)),
            Job::Promote(job) => tier.promote(device, &mut *queue, &job),
        }
    }
}

impl DiskTier {
    /// Loads the parts that operations read into staging, and pins them.
    pub(crate) fn stage(&self, ops: &[TransferOp], deadline: Instant) -> Vec<Result<NodePin<'_>, ErrorCode>> {
        let staged = self.load_all(&self.requests_of(ops), deadline);
        let pinned = staged.into_iter().map(|staged| {
            let staged = staged?;
            let pin = self.memory.heap().pin(staged.segment(), staged.slot(), staged.version());
            // Killed between the load and the pin: it was removed.
            pin.ok_or(ErrorCode::Gone)
        });
        pinned.collect()
    }

    /// Loads the parts that operations read into staging, and keeps them there until `until` for a peer that reads them
    /// itself.
    pub(crate) fn stage_with_lease(
        &self,
        ops: &[TransferOp],
        until: Instant,
        deadline: Instant,
    ) -> Vec<LoadResult> {
        let requests = self.requests_of(ops);
        let staged = self.load_all(&requests, deadline);
        for (request, staged) in requests.iter().zip(&staged) {
            if staged.is_ok() {
                self.cache.lease(request.name, Some(until));
            }
        }
        staged
    }

    /// Releases one lease of the part that an operation has read.
    pub(crate) fn release_lease(&self, op: &TransferOp) {
        let (_, location) = self.find(&record_of(op));
        self.cache.lease(PartId::of(op, location.as_ref()), None);
    }

    /// Returns the number of the directory that has a record, or else of the first one, which notifies the masters.
    pub(super) fn device_to_read(&self, name: &RecordId) -> usize {
        self.device_of(name).or(self.devices().next()).map_or(0, |device| device.number)
    }

    /// Like [`DiskTier::device_to_read`], with the location of the record.
    fn find(&self, name: &RecordId) -> (usize, Option<RecordLocation>) {
        let device = self.device_to_read(name);
        (device, self.devices[device].backend.locate(name))
    }

    fn requests_of(&self, ops: &[TransferOp]) -> Vec<LoadRequest> {
        let request = |op: &TransferOp| {
            let (device, location) = self.find(&record_of(op));
            let name = PartId::of(op, location.as_ref());
            // A reader of all of a record asks for whole parts.
            let reads_whole_part = op.len == DISK_PART_BYTES;
            LoadRequest {
                name,
                device,
                long: location.filter(|location| reads_whole_part && is_split(location)),
            }
        };
        ops.iter().map(request).collect()
    }

    /// Queues a promotion. Returns `false` if the tier has stopped, or the directory was excluded.
    pub(super) fn queue_promotion(&self, device: usize, job: PromoteJob) -> bool {
        self.devices[device].loads.push(Job::Promote(job))
    }

    fn load_all(&self, requests: &[LoadRequest], deadline: Instant) -> Vec<LoadResult> {
        increment(&self.counters.loads_requested, requests.len() as u64);
        let mut outcomes: Vec<Option<LoadResult>> = Vec::with_capacity(requests.len());
        let mut own = Vec::new();
        for LoadRequest { name, device, .. } in requests {
            outcomes.push(match self.cache.begin(*name) {
                StagingLookup::Ready(staged) => {
                    increment(&self.counters.loads_staged, 1);
                    Some(Ok(staged))
                }
                StagingLookup::Load => {
                    own.push((*device, *name));
                    None
                }
                StagingLookup::InProgress => None,
            });
        }
        let jobs = self.queue_loads(&own);
        self.read_ahead(requests);
        let mut of_device: Vec<_> = jobs
            .into_iter()
            .map(|(device, count, job)| (device, self.wait_for(device, job, count, deadline).into_iter()))
            .collect();
        let loaded = own.into_iter().map(|(device, name)| {
            let results = of_device.iter_mut().find(|(of, _)| *of == device);
            (name, results.and_then(|(_, results)| results.next()).unwrap_or(Err(ErrorCode::Internal)))
        });
        let mut loaded = loaded.peekable();
        for (LoadRequest { name, device, .. }, outcome) in requests.iter().zip(&mut outcomes) {
            if outcome.is_some() {
                continue;
            }
            // A record that is requested twice is loaded once.
            let result = loaded.next_if(|(loaded, _)| loaded == name);
            *outcome = Some(match result {
                Some((_, loaded)) => loaded,
                None => self.wait_for_other(*device, *name, deadline),
            });
        }
        outcomes.into_iter().map(|outcome| outcome.unwrap_or(Err(ErrorCode::Internal))).collect()
    }

    /// Waits for a job with this number of parts.
    fn wait_for(
        &self,
        device: usize,
        job: Option<Arc<LoadJob>>,
        count: usize,
        deadline: Instant,
    ) -> Vec<LoadResult> {
        match job {
            Some(job) => job.wait(deadline),
            None if self.devices[device].is_excluded() => vec![Err(ErrorCode::DiskError); count],
            None => vec![Err(ErrorCode::StaleSession); count],
        }
    }

    /// Waits for a load of another caller, or of a read-ahead. If that had no staging memory, loads the record itself: a
    /// read-ahead does not wait for memory.
    fn wait_for_other(&self, device: usize, name: PartId, deadline: Instant) -> LoadResult {
        let mut shared = self.cache.wait(name, deadline);
        if shared.as_ref().is_err_and(|code| *code == ErrorCode::Busy) {
            match self.cache.begin(name) {
                StagingLookup::Ready(staged) => shared = Ok(staged),
                StagingLookup::InProgress => shared = self.cache.wait(name, deadline),
                // The load counts its result.
                StagingLookup::Load => {
                    let job = self.queue_load(device, vec![name]);
                    let loaded = self.wait_for(device, job, 1, deadline).pop();
                    return loaded.unwrap_or(Err(ErrorCode::Internal));
                }
            }
        }
        let counter = if shared.is_ok() { &self.counters.loads_staged } else { &self.counters.loads_failed };
        increment(counter, 1);
        shared
    }

    /// Has threads of all directories load what a caller has to load. Returns the number of parts and the job of each
    /// directory.
    fn queue_loads(&self, own: &[(usize, PartId)]) -> Vec<(usize, usize, Option<Arc<LoadJob>>)> {
        let mut devices: Vec<usize> = own.iter().map(|(device, _)| *device).collect();
        devices.sort_unstable();
        devices.dedup();
        let jobs = devices.into_iter().map(|device| {
            let names: Vec<PartId> =
                own.iter().filter(|(of, _)| *of == device).map(|(_, name)| *name).collect();
            (device, names.len(), self.queue_load(device, names))
        });
        jobs.collect()
    }

    /// Has a thread of a directory load parts. `None`: the directory has stopped.
    fn queue_load(&self, device: usize, names: Vec<PartId>) -> Option<Arc<LoadJob>> {
        let job = Arc::new(LoadJob { names, outcomes: Mutex::default(), done: Condvar::new() });
        if self.devices[device].loads.push(Job::Load(Arc::clone(&job))) {
            return Some(job);
        }
        job.names.iter().for_each(|name| self.cache.failed(*name));
        increment(&self.counters.loads_failed, job.names.len() as u64);
        None
    }

    /// Has threads load the parts that follow the last requested one, if a reader seems to read all of a record: it asks
    /// for the whole first part, or for the one after a part that was read before.
    fn read_ahead(&self, requests: &[LoadRequest]) {
        for (index, LoadRequest { name, device, long }) in requests.iter().enumerate() {
            let (Some(location), Some(mut next)) = (long, name.next()) else { continue };
            // The caller asks for it itself.
            if requests[index + 1..].iter().any(|request| request.name == next) {
                continue;
            }
            let is_sequential = name.previous().is_none_or(|previous| self.cache.contains(previous));
            if !is_sequential {
                continue;
            }
            let ahead_max = (self.staging.total_bytes() / DISK_PART_BYTES / AHEAD_SHARE) as usize;
            for _ in 0..READ_AHEAD_PARTS {
                let exists = next.blocks(location).is_some_and(|blocks| !blocks.is_empty());
                if !exists {
                    break;
                }
                if self.cache.begin_ahead(next, ahead_max) {
                    increment(&self.counters.loads_requested, 1);
                    increment(&self.counters.loads_ahead, 1);
                    if !self.devices[*device].loads.push(Job::ReadAhead(next)) {
                        self.cache.failed(next);
                        increment(&self.counters.loads_failed, 1);
                    }
                }
                let Some(following) = next.next() else { break };
                next = following;
            }
        }
    }

    /// Loads what the caller has to load; afterwards, each is in the cache or absent. Waits for staging memory for the
    /// given time.
    pub(super) fn load(
        &self,
        device: &Device,
        queue: &mut dyn Queue,
        names: &[PartId],
        staging_wait: Duration,
    ) -> Vec<LoadResult> {
        // From here on, the exclusion of the directory ends them.
        let is_excluded = match &mut *device.loading.lock() {
            Some(loading) => {
                loading.extend(names);
                false
            }
            None => true,
        };
        if is_excluded {
            names.iter().for_each(|name| self.cache.failed(*name));
            increment(&self.counters.loads_failed, names.len() as u64);
            return vec![Err(ErrorCode::DiskError); names.len()];
        }
        // One deadline for all of them: if they do not fit together, the last ones wait for the buffers of the first
        // ones.
        let wait_until = Instant::now() + staging_wait;
        let allocations: Vec<Result<Allocation, ErrorCode>> =
            names.iter().map(|name| self.allocate_for(device, name, wait_until)).collect();
        let mut buffers: Vec<(PartId, Allocation)> = Vec::with_capacity(names.len());
        let mut refused = Vec::with_capacity(names.len());
        for (name, allocation) in names.iter().zip(allocations) {
            refused.push(match allocation {
                Ok(allocation) => {
                    buffers.push((*name, allocation));
                    None
                }
                Err(code) => Some(code),
            });
        }
        let jobs = buffers.iter_mut().map(|(name, Allocation { location, blocks, buffer })| {
            let len = location.preamble_read_len + blocks.len();
            let into = &mut buffer.bytes_mut()[..len as usize];
            ReadJob::part(name.record, location.clone(), *blocks, into)
        });
        let jobs = jobs.collect();
        let mut read = read_from(device, queue, jobs).into_iter().zip(buffers);
        self.test_hooks.reached(HookPoint::Read);
        let mut outcomes = Vec::with_capacity(names.len());
        for (name, refused) in names.iter().zip(refused) {
            let read = if refused.is_none() { read.next() } else { None };
            // Taken by the exclusion of the directory, it has failed already.
            if !device.loading.lock().as_mut().is_some_and(|loading| loading.remove(name)) {
                outcomes.push(Err(ErrorCode::DiskError));
                continue;
            }
            let outcome = match (refused, read) {
                (Some(code), _) => Err(code),
                (None, Some((result, (_, allocation)))) => self.publish(device, name, result, allocation),
                (None, None) => Err(ErrorCode::Internal),
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

    /// Fails the loads that an excluded directory has not ended.
    pub(super) fn fail_loads(&self, device: &Device) {
        let loading = device.loading.lock().take().unwrap_or_default();
        loading.iter().for_each(|name| self.cache.failed(*name));
        increment(&self.counters.loads_failed, loading.len() as u64);
    }

    /// Returns the location of a record in a directory.
    pub(super) fn locate(&self, device: &Device, name: &RecordId) -> Result<RecordLocation, ErrorCode> {
        if let Some(location) = device.backend.locate(name).filter(|_| !device.is_excluded()) {
            return Ok(location);
        }
        // The object has one stripe here, and the caller asks for a further one: the object is not gone.
        if name.stripe != 0 && self.contains(&RecordId { stripe: 0, ..*name }) {
            return Err(ErrorCode::Gone);
        }
        self.test_hooks.reached(HookPoint::Missed);
        // The master expects the record here: notify it, so that it sends no more readers.
        if self.notify_gone(*name) {
            return Err(ErrorCode::Gone);
        }
        // It was written to another directory meanwhile; or its file cannot be opened.
        if device.backend.contains(name) {
            device.health.record_read(*name, false);
        }
        increment(&self.counters.read_errors, 1);
        Err(ErrorCode::DiskError)
    }

    /// Returns a staging buffer for a part: the preamble comes before the payload on disk, and after it in memory.
    fn allocate_for(
        &self,
        device: &Device,
        name: &PartId,
        wait_until: Instant,
    ) -> Result<Allocation, ErrorCode> {
        let location = self.locate(device, &name.record)?;
        let blocks = name.blocks(&location).ok_or(ErrorCode::OutOfBounds)?;
        // A part of the digests is moved to the start of the buffer.
        let preamble = location.preamble_read_len.next_multiple_of(BLOCK_BYTES as u64);
        let needed = preamble + blocks.len() + preamble;
        if needed > self.staging.total_bytes() {
            return Err(ErrorCode::TooLarge);
        }
        loop {
            if let Some(buffer) = self.staging.alloc(needed) {
                return Ok(Allocation { location, blocks, buffer });
            }
            if self.cache.evict_one() {
                continue;
            }
            // Readers hold all buffers, for a short time.
            if Instant::now() >= wait_until {
                return Err(ErrorCode::Busy);
            }
            moontide_rt::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Handles the result of reading a record.
    pub(super) fn check_read(
        &self,
        device: &Device,
        name: &RecordId,
        result: Result<Header, ReadError>,
    ) -> Result<Header, ErrorCode> {
        result.map_err(|error| {
            warn!(id = %name.id, version = %name.version, %error, "cannot read record from disk");
            match error {
                ReadError::Io(_) => increment(&self.counters.read_errors, 1),
                ReadError::Corrupt(_) | ReadError::WrongRecord => {
                    increment(&self.counters.corrupt_records, 1);
                    device.backend.drop_corrupt(name);
                    self.notify_gone(*name);
                }
            }
            code_of(error)
        })
    }

    /// Publishes what was read and verified to readers.
    fn publish(
        &self,
        device: &Device,
        name: &PartId,
        result: Result<Header, ReadError>,
        Allocation { location, blocks, mut buffer }: Allocation,
    ) -> Result<Arc<StagedRecord>, ErrorCode> {
        let header = self.check_read(device, &name.record, result)?;
        // Nothing overwrites the preamble, but `publish` consumes the buffer that holds it.
        let preamble = buffer.bytes_mut()[..location.preamble_read_len as usize].to_vec();
        let preamble = decode_preamble(&preamble).map_err(|_| ErrorCode::Internal)?;
        let key = KeySection::decode(preamble.key).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(preamble.attributes).map_err(|_| ErrorCode::Corrupt)?;
        let record = record_spec(&header, key, &attributes);
        let (version, payload_at) = (header.word.epoch(), DiskLayout::of(&header).preamble_len);
        let digests = preamble.digests.as_bytes();
        let published = if !is_split(&location) {
            increment(&self.counters.loaded_bytes, header.stripe_len);
            buffer.publish(version, payload_at, record, digests, header.root, false)
        } else if let Part::Digests(index) = name.part {
            let start = u64::from(index) * DISK_PART_BYTES;
            let digests = usize::try_from(start).ok().and_then(|start| digests.get(start..));
            let digests = digests.filter(|part| !part.is_empty()).ok_or(ErrorCode::OutOfBounds)?;
            let digests = &digests[..digests.len().min(DISK_PART_BYTES as usize)];
            buffer.bytes_mut()[..digests.len()].copy_from_slice(digests);
            buffer.publish(version, 0, part_spec(record, digests.len() as u64), &[], 0, false)
        } else {
            // The last block may be longer than the payload.
            let len = blocks.len().min(header.stripe_len - blocks.offset());
            increment(&self.counters.loaded_bytes, len);
            buffer.publish(version, payload_at, part_spec(record, len), &[], 0, false)
        };
        let staged = published.map_err(|failure| {
            warn!(id = %name.record.id, error = %failure.error, "record from disk does not fit into staging");
            ErrorCode::Internal
        })?;
        let ready = self.cache.ready(*name, staged);
        mark!("record removed or evicted while it is read from disk", ready.is_none());
        ready.ok_or(ErrorCode::Gone)
    }

    /// Kills records that were taken out of the cache, so that they get no new readers.
    pub(super) fn unpublish(&self, gone: &[Arc<StagedRecord>]) {
        for staged in gone {
            let (segment, slot, version) = (staged.segment(), staged.slot(), staged.version());
            let _ = self.memory.heap().kill(segment, slot, version, MonoTime(0));
        }
    }
}

/// Reads records from a directory, and notes whether it works.
pub(super) fn read_from(
    device: &Device,
    queue: &mut dyn Queue,
    jobs: Vec<ReadJob<'_>>,
) -> Vec<Result<Header, ReadError>> {
    let names: Vec<RecordId> = jobs.iter().map(ReadJob::name).collect();
    let running = device.health.begin();
    let results = read_records(queue, jobs);
    drop(running);
    for (name, result) in names.into_iter().zip(&results) {
        device.health.record_read(name, !matches!(result, Err(ReadError::Io(_))));
    }
    results
}
