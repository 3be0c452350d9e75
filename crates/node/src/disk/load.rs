//! Loading: records from the disk into staging, for whoever asks. A few threads do it, each with a queue of its own; a
//! batch of one caller is read together, so that the disk is kept busy and verification is hidden behind it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_disk::{
    BLOCK_BYTES, DiskLayout, Location, Queue, ReadError, ReadJob, RecordName, decode_front, read_records,
};
use moontide_heap::{NewRecord, NodePin, Staged, StagingRoom};
use moontide_types::record::{Attributes, Header, KeySection};
use moontide_types::{ErrorCode, MonoTime};
use parking_lot::{Condvar, Mutex};
use tracing::warn;

use super::counters::raise;
use super::planted::Point;
use super::promote::PromoteJob;
use super::staged::Looked;
use super::{DiskTier, code_of};

/// How long a load waits for room in staging. Not for ever: those who hold it may wait for this very thread.
const ROOM_WAIT: Duration = Duration::from_millis(200);

/// Work for the loading threads.
#[derive(Debug, Default)]
pub(super) struct Loads {
    queue: Mutex<Waiting>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    stopped: bool,
}

#[derive(Debug)]
enum Job {
    Load(Arc<LoadJob>),
    Promote(PromoteJob),
}

/// What became of one record.
type Loaded = Result<Arc<Staged>, ErrorCode>;

/// Records of one caller.
#[derive(Debug)]
struct LoadJob {
    names: Vec<RecordName>,
    outcomes: Mutex<Option<Vec<Loaded>>>,
    done: Condvar,
}

impl Loads {
    fn push(&self, job: Job) -> bool {
        let mut waiting = self.queue.lock();
        if !waiting.stopped {
            waiting.jobs.push_back(job);
        }
        let pushed = !waiting.stopped;
        drop(waiting);
        self.news.notify_one();
        pushed
    }

    /// Ends the threads; the answer is what they were asked for and will not load.
    pub(super) fn stop(&self) -> Vec<RecordName> {
        let mut waiting = self.queue.lock();
        waiting.stopped = true;
        let mut unread = Vec::new();
        for job in waiting.jobs.drain(..) {
            if let Job::Load(job) = job {
                job.finish(vec![Err(ErrorCode::StaleSession); job.names.len()]);
                unread.extend(&job.names);
            }
        }
        drop(waiting);
        self.news.notify_all();
        unread
    }

    fn next(&self) -> Option<Job> {
        let mut waiting = self.queue.lock();
        loop {
            if let Some(job) = waiting.jobs.pop_front() {
                return Some(job);
            }
            if waiting.stopped {
                return None;
            }
            self.news.wait(&mut waiting);
        }
    }
}

impl LoadJob {
    fn finish(&self, outcomes: Vec<Loaded>) {
        *self.outcomes.lock() = Some(outcomes);
        self.done.notify_all();
    }
}

/// A loading thread.
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
    /// Has records brought into staging, and pins them.
    pub(crate) fn stage(
        &self,
        names: &[RecordName],
        deadline: Instant,
    ) -> Vec<Result<NodePin<'_>, ErrorCode>> {
        let staged = self.bring(names, deadline);
        let pinned = staged.into_iter().map(|staged| {
            let staged = staged?;
            let pin = self.memory.heap().pin(staged.segment(), staged.slot(), staged.version());
            // Killed in the moment between: it was removed.
            pin.ok_or(ErrorCode::Gone)
        });
        pinned.collect()
    }

    /// Has records brought into staging, and keeps them there for a while, for somebody who comes for them.
    pub(crate) fn stage_and_keep(
        &self,
        names: &[RecordName],
        until: Instant,
        deadline: Instant,
    ) -> Vec<Loaded> {
        let staged = self.bring(names, deadline);
        for (name, staged) in names.iter().zip(&staged) {
            if staged.is_ok() {
                self.staged.keep(*name, Some(until));
            }
        }
        staged
    }

    /// Somebody who had records kept has read them.
    pub(crate) fn give_back(&self, name: RecordName) {
        self.staged.keep(name, None);
    }

    /// A record is to be brought back into memory that the master gave for it.
    pub(crate) fn order_promotion(&self, job: PromoteJob) -> bool {
        self.loads.push(Job::Promote(job))
    }

    fn bring(&self, names: &[RecordName], deadline: Instant) -> Vec<Loaded> {
        raise(&self.counters.loads_requested, names.len() as u64);
        let mut outcomes: Vec<Option<Loaded>> = Vec::with_capacity(names.len());
        let mut mine = Vec::new();
        for name in names {
            outcomes.push(match self.staged.begin(*name) {
                Looked::Ready(staged) => {
                    raise(&self.counters.loads_staged, 1);
                    Some(Ok(staged))
                }
                Looked::Mine => {
                    mine.push(*name);
                    None
                }
                Looked::Others => None,
            });
        }
        let loaded = self.have_loaded(&mine, deadline);
        let mut loaded = mine.into_iter().zip(loaded).peekable();
        for (name, outcome) in names.iter().zip(&mut outcomes) {
            if outcome.is_some() {
                continue;
            }
            // A record that is asked for twice is loaded once.
            let own = loaded.next_if(|(loaded, _)| loaded == name);
            *outcome = Some(match own {
                Some((_, loaded)) => loaded,
                None => {
                    let shared = self.staged.wait(*name, deadline);
                    let counter = match shared {
                        Ok(_) => &self.counters.loads_staged,
                        Err(_) => &self.counters.loads_failed,
                    };
                    raise(counter, 1);
                    shared
                }
            });
        }
        outcomes.into_iter().map(|outcome| outcome.unwrap_or(Err(ErrorCode::Internal))).collect()
    }

    /// Has a thread load what is this caller's to load.
    fn have_loaded(&self, names: &[RecordName], deadline: Instant) -> Vec<Loaded> {
        if names.is_empty() {
            return Vec::new();
        }
        let job = LoadJob { names: names.to_vec(), outcomes: Mutex::default(), done: Condvar::new() };
        let job = Arc::new(job);
        if !self.loads.push(Job::Load(Arc::clone(&job))) {
            names.iter().for_each(|name| self.staged.failed(*name));
            raise(&self.counters.loads_failed, names.len() as u64);
            return vec![Err(ErrorCode::StaleSession); names.len()];
        }
        let mut outcomes = job.outcomes.lock();
        while outcomes.is_none() {
            if job.done.wait_until(&mut outcomes, deadline).timed_out() && outcomes.is_none() {
                // Whoever comes next finds them in staging.
                return vec![Err(ErrorCode::DeadlineExceeded); names.len()];
            }
        }
        outcomes.take().unwrap_or_default()
    }

    /// Loads records that are the caller's to load; each is in the table afterwards, or absent.
    pub(super) fn load(&self, queue: &mut dyn Queue, names: &[RecordName]) -> Vec<Loaded> {
        // One wait for all of them: if they do not fit together, the rooms of the first ones are what the last wait for.
        let give_up = Instant::now() + ROOM_WAIT;
        let places: Vec<Result<(Location, StagingRoom), ErrorCode>> =
            names.iter().map(|name| self.room_for(name, give_up)).collect();
        let mut rooms: Vec<(RecordName, Location, StagingRoom)> = Vec::with_capacity(names.len());
        let mut refused = Vec::with_capacity(names.len());
        for (name, place) in names.iter().zip(places) {
            refused.push(match place {
                Ok((location, room)) => {
                    rooms.push((*name, location, room));
                    None
                }
                Err(code) => Some(code),
            });
        }
        let jobs = rooms.iter_mut().map(|(name, location, room)| ReadJob {
            name: *name,
            location: location.clone(),
            into: &mut room.bytes_mut()[..location.len as usize],
        });
        let jobs = jobs.collect();
        let mut read = read_records(queue, jobs).into_iter().zip(rooms);
        self.trial.reached(Point::Read);
        let mut outcomes = Vec::with_capacity(names.len());
        for (name, refused) in names.iter().zip(refused) {
            let outcome = match refused {
                Some(code) => Err(code),
                None => match read.next() {
                    Some((result, (_, location, room))) => self.publish(name, result, &location, room),
                    None => Err(ErrorCode::Internal),
                },
            };
            if outcome.is_err() {
                self.staged.failed(*name);
            }
            let counter = match outcome {
                Ok(_) => &self.counters.loads_read,
                Err(ErrorCode::Gone) => &self.counters.loads_missed,
                Err(_) => &self.counters.loads_failed,
            };
            raise(counter, 1);
            outcomes.push(outcome);
        }
        outcomes
    }

    /// Where a record is on the disk, and room for it: with what stands in front of its payload on disk, and behind it
    /// in memory.
    fn room_for(&self, name: &RecordName, give_up: Instant) -> Result<(Location, StagingRoom), ErrorCode> {
        let Some(location) = self.backend.locate(name) else {
            // Of an object that is here in one piece somebody asks for a second one: the object is not gone.
            if name.stripe != 0 && self.backend.contains(&RecordName { stripe: 0, ..*name }) {
                return Err(ErrorCode::Gone);
            }
            self.trial.reached(Point::Missed);
            // The master believes that it is here: it is told, so that nobody is sent again.
            if self.tell_gone(*name) {
                return Err(ErrorCode::Gone);
            }
            raise(&self.counters.read_errors, 1);
            return Err(ErrorCode::DiskError);
        };
        let front = location.front_len.next_multiple_of(BLOCK_BYTES as u64);
        let needed = location.len + front;
        if needed > self.staging.total_bytes() {
            return Err(ErrorCode::TooLarge);
        }
        loop {
            if let Some(room) = self.staging.take(needed) {
                return Ok((location, room));
            }
            if self.staged.evict_one() {
                continue;
            }
            // Readers are at all of it, and done in a moment.
            if Instant::now() >= give_up {
                return Err(ErrorCode::Busy);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Lets readers in to what was read, if it is what was written.
    fn publish(
        &self,
        name: &RecordName,
        result: Result<Header, ReadError>,
        location: &Location,
        mut room: StagingRoom,
    ) -> Result<Arc<Staged>, ErrorCode> {
        let header = match result {
            Ok(header) => header,
            Err(error) => {
                warn!(id = %name.id, version = %name.version, %error, "a record cannot be read from disk");
                match error {
                    ReadError::Io(_) => raise(&self.counters.read_errors, 1),
                    ReadError::Damaged(_) | ReadError::OtherRecord => {
                        raise(&self.counters.damaged_records, 1);
                        self.backend.drop_damaged(name);
                        self.tell_gone(*name);
                    }
                }
                return Err(code_of(error));
            }
        };
        raise(&self.counters.loaded_bytes, header.stripe_len);
        // The front is overwritten by nothing, but the room is given away with it.
        let head = room.bytes_mut()[..location.front_len as usize].to_vec();
        let front = decode_front(&head).map_err(|_| ErrorCode::Internal)?;
        let key = KeySection::decode(front.key).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(front.attributes).map_err(|_| ErrorCode::Corrupt)?;
        let record = new_record(&header, key, &attributes);
        let payload_at = DiskLayout::of(&header).front_len;
        let staged = room
            .publish(header.word.epoch(), payload_at, record, front.digests.as_bytes(), header.root, false)
            .map_err(|unpublished| {
                warn!(id = %name.id, error = %unpublished.error, "a record from disk does not fit into staging");
                ErrorCode::Internal
            })?;
        self.staged.ready(*name, staged).ok_or(ErrorCode::Gone)
    }

    /// Lets no reader in any more to what was taken out of the table.
    pub(super) fn shut(&self, gone: &[Arc<Staged>]) {
        for staged in gone {
            let (segment, slot, version) = (staged.segment(), staged.slot(), staged.version());
            let _ = self.memory.heap().kill(segment, slot, version, MonoTime(0));
        }
    }
}

/// A record as the heap is told of it.
pub(super) fn new_record<'a>(
    header: &Header,
    key: KeySection<'a>,
    attributes: &'a Attributes,
) -> NewRecord<'a> {
    NewRecord {
        id: header.id,
        flags: header.flags,
        object_len: header.object_len,
        stripe_index: header.stripe_index,
        stripe_count: header.stripe_count,
        stripe_offset: header.stripe_offset,
        stripe_len: header.stripe_len,
        key,
        attributes,
        id_key: header.id_key,
        tenant_generation: header.tenant_generation,
    }
}
