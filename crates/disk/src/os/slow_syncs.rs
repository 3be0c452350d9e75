//! [`SlowSyncs`]: delays the completion of every sync by a random time, above the engines, so that all of them are
//! slow in the same way. Compiled only with the feature `testing`.
//!
//! A process is slow if [`VARIABLE`] is set when it opens its storage. Not delayed: reads, writes and changes of names.
//! The delays of syncs that are in flight together overlap, as on a disk; a queue still returns with nothing in flight.

use std::sync::Arc;
use std::time::Duration;
use std::{env, fmt, io};

use moontide_rt::sync::Mutex;
use moontide_rt::time::Instant;
use moontide_rt::{SplitMix64, thread};

use crate::buffer::Buffer;
use crate::storage::{Completion, Op, OpSource, Queue};

/// Environment variable: the longest delay in milliseconds and the seed of the delays, separated by a comma.
const VARIABLE: &str = "MOONTIDE_SLOW_SYNCS";

/// Delays of the syncs of one storage.
#[derive(Clone)]
pub(crate) struct SlowSyncs {
    delay_max: Duration,
    rng: Arc<Mutex<SplitMix64>>,
}

impl SlowSyncs {
    /// Reads [`VARIABLE`]. `None` if it is not set.
    ///
    /// # Panics
    /// If its value is invalid: a test that believes its disks to be slow must not run on fast ones.
    pub(crate) fn from_environment() -> Option<SlowSyncs> {
        let text = env::var(VARIABLE).ok()?;
        let numbers =
            text.split_once(',').and_then(|(ms, seed)| Some((ms.parse().ok()?, seed.parse().ok()?)));
        let Some((ms_max, seed)) = numbers else {
            panic!("{VARIABLE}={text:?} is not a time in milliseconds and a seed, separated by a comma")
        };
        tracing::warn!(ms_max, seed, "syncs are delayed, for a test");
        Some(SlowSyncs::new(Duration::from_millis(ms_max), seed))
    }

    pub(crate) fn new(delay_max: Duration, seed: u64) -> SlowSyncs {
        SlowSyncs { delay_max, rng: Arc::new(Mutex::new(SplitMix64::new(seed))) }
    }

    fn draw(&self) -> Duration {
        let micros = self.delay_max.as_micros() as u64;
        Duration::from_micros(self.rng.lock().below(micros + 1))
    }

    /// Delays the result of a sync that is not an operation of a queue.
    pub(crate) fn delay(&self, result: io::Result<()>) -> io::Result<()> {
        thread::sleep(self.draw());
        result
    }

    /// Delays the syncs of a queue.
    pub(crate) fn queue(&self, queue: Box<dyn Queue>) -> Box<dyn Queue> {
        Box::new(SlowQueue { queue, syncs: self.clone() })
    }
}

impl fmt::Debug for SlowSyncs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlowSyncs").field("delay_max", &self.delay_max).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct SlowQueue {
    queue: Box<dyn Queue>,
    syncs: SlowSyncs,
}

impl Queue for SlowQueue {
    fn engine(&self) -> &'static str {
        self.queue.engine()
    }

    fn is_registered(&self) -> bool {
        self.queue.is_registered()
    }

    fn run<'a>(&mut self, source: &mut dyn OpSource<'a>) {
        let mut slow = SlowSource { source, syncs: &self.syncs, held: vec![] };
        loop {
            self.queue.run(&mut slow);
            // The source may have more operations after the completion of a sync.
            let Some(first) = slow.held.iter().map(|(due, _)| *due).min() else { return };
            thread::sleep(first.saturating_duration_since(Instant::now()));
            slow.release();
        }
    }
}

struct SlowSource<'s, 'a> {
    source: &'s mut dyn OpSource<'a>,
    syncs: &'s SlowSyncs,
    /// Completed syncs that the source does not know of yet, and the time at which it is told.
    held: Vec<(Instant, Completion<'a>)>,
}

impl SlowSource<'_, '_> {
    /// Passes on the completions that are due.
    fn release(&mut self) {
        let now = Instant::now();
        while let Some(index) = self.held.iter().position(|(due, _)| *due <= now) {
            let (_, done) = self.held.swap_remove(index);
            self.source.done(done);
        }
    }
}

impl<'a> OpSource<'a> for SlowSource<'_, 'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        self.release();
        self.source.next()
    }

    fn done(&mut self, done: Completion<'a>) {
        // Only a sync has no buffer.
        match done.buffer {
            Buffer::None => self.held.push((Instant::now() + self.syncs.draw(), done)),
            _ => self.source.done(done),
        }
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::buffer::AlignedBuf;
    use crate::os::{IoEngine, OsStorage};
    use crate::storage::{File, OpKind, OpenMode, QueueConfig, Storage, run_all};

    const DELAY_MAX: Duration = Duration::from_millis(200);

    fn op(tag: u64, kind: OpKind, file: &File) -> Op<'static> {
        let write = || Buffer::Owned(AlignedBuf::zeroed(1));
        let buffer = if kind == OpKind::Sync { Buffer::None } else { write() };
        Op { tag, kind, file: file.clone(), offset: 0, buffer }
    }

    /// Calls `test` with the slow storage of each engine, a file of it, and the delays that will be drawn.
    fn with_engines(name: &str, test: impl Fn(&OsStorage, &File, &mut dyn FnMut() -> Duration)) {
        for engine in [IoEngine::Posix, IoEngine::Auto] {
            let root = env::temp_dir().join(format!("moontide-slow-{name}-{engine}-{}", std::process::id()));
            let mut storage = OsStorage::open(&root, engine).unwrap();
            storage.slow_syncs = Some(SlowSyncs::new(DELAY_MAX, 7));
            let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
            let same = SlowSyncs::new(DELAY_MAX, 7);
            test(&storage, &file, &mut || same.draw());
            std::fs::remove_dir_all(root).unwrap();
        }
    }

    #[test]
    fn delays_of_concurrent_syncs_overlap() {
        with_engines("overlap", |storage, file, delay| {
            let delays: Vec<Duration> = (0..20).map(|_| delay()).collect();
            let mut queue = storage.queue(&QueueConfig::default());
            let started = Instant::now();
            let done = run_all(&mut *queue, (0..20).map(|tag| op(tag, OpKind::Sync, file)));
            assert!(done.iter().all(|done| done.result.is_ok()));
            let took = started.elapsed();
            assert!(took >= *delays.iter().max().unwrap(), "{took:?} {delays:?}");
            assert!(took < delays.iter().sum(), "{took:?} {delays:?}");
        });
    }

    #[test]
    fn sync_of_a_directory_is_delayed() {
        with_engines("directory", |storage, _, delay| {
            let started = Instant::now();
            storage.sync_dir(Path::new("")).unwrap();
            let (took, delay) = (started.elapsed(), delay());
            assert!(took >= delay, "{took:?} {delay:?}");
        });
    }

    #[test]
    fn writes_are_not_delayed_and_the_source_continues_after_a_sync() {
        /// A sync and a write at once, and another write after the sync.
        struct Source<'f> {
            file: &'f File,
            next: Vec<Op<'static>>,
            done: Vec<u64>,
        }
        impl OpSource<'static> for Source<'_> {
            fn next(&mut self) -> Option<Op<'static>> {
                self.next.pop()
            }

            fn done(&mut self, done: Completion<'static>) {
                done.result.unwrap();
                self.done.push(done.tag);
                if done.tag == 1 {
                    self.next.push(op(3, OpKind::Write, self.file));
                }
            }
        }
        with_engines("writes", |storage, file, _| {
            let next = vec![op(2, OpKind::Write, file), op(1, OpKind::Sync, file)];
            let mut source = Source { file, next, done: vec![] };
            storage.queue(&QueueConfig::default()).run(&mut source);
            assert_eq!(source.done, [2, 1, 3]);
        });
    }
}
