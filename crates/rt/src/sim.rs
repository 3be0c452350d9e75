//! A simulated world: threads, locks, channels and the clock of a process, on one thread of the operating system and on
//! virtual time. Compiled with `--cfg sim`, in which [`crate::sync`], [`crate::thread`] and [`crate::time`] are the names of
//! this module.
//!
//! [`run`] starts a world with one thread. Each thread of it is a fiber with a stack of its own. One fiber runs at a time,
//! until it waits, sleeps or ends, or until the world draws a switch at a lock, a channel or a reading of the clock. Which fiber
//! runs next is drawn, too. Virtual time passes only when no fiber can run, except for small costs of the clock and of
//! switches, so that loops that poll come to their end. All draws follow from the seed: equal seeds give equal runs,
//! and [`Report::trace`] shows it.
//!
//! A run fails, with the seed and the state of all threads, if a thread panics, if no thread can run and none sleeps (a
//! deadlock or a lost wake-up), if it exceeds its limits, or if a thread runs for long in real time without a switch.
//!
//! Outside a world, also on other threads of the same process, the types are locks, threads and the clock of the
//! operating system, as in an ordinary build.
//!
//! A world may have several processes ([`Process`]), each with clocks of its own. A process is stopped, resumed or killed as a
//! whole, like those of an operating system. The first process then drives the others, and is never late.
//!
//! Limits: a thread of a world must not wait by other means (std's locks, sockets, files that block), since all others wait
//! with it. Atomics are those of the operating system, so weak memory orders are not explored; that is what loom is for.
//! Thread-locals are shared by all threads of a world, and a static lock by all worlds of a process: worlds that use one must
//! not run at the same time.

mod channel;
mod clock;
pub(crate) mod files;
mod lock;
mod process;
mod tables;
mod threads;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::mpsc::RecvTimeoutError;
use std::task::Waker;
use std::time::Duration;

use crate::random::SplitMix64;
pub use clock::Instant;
use files::Files;
pub use files::set_files_fail;
pub use lock::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, WaitTimeoutResult};
pub(crate) use process::OwnedBy;
pub use process::{Process, ProcessClock};
pub use tables::{HashMap, HashSet};
pub use threads::{
    Builder, JoinHandle, Thread, ThreadId, current, park, park_timeout, sleep, spawn, yield_now,
};

/// Channels with the names of [`std::sync::mpsc`].
pub mod mpsc {
    pub use super::channel::{Iter, Receiver, Sender, channel};
    pub use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError};
}

/// What a world draws, and its limits.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// Seed of all draws.
    pub seed: u64,
    /// How often a thread is interrupted at a lock, a channel or the clock, per million.
    pub switch_per_million: u32,
    /// How often a thread stalls there for 50 ms to 60 s, as if it got no processor, per million.
    pub stall_per_million: u32,
    /// Whether threads wake late: mostly by less than 50 µs, sometimes by 3 ms, rarely by half a second.
    pub wakes_late: bool,
    /// Switches after which the run fails.
    pub steps_max: u64,
    /// Virtual time after which the run fails.
    pub time_max: Duration,
    /// Real time without a switch after which the run fails. The thread of the operating system remains.
    pub stuck_after: Duration,
}

impl WorldConfig {
    /// Returns a world that switches only where threads wait, and wakes them on time.
    pub fn new(seed: u64) -> WorldConfig {
        WorldConfig {
            seed,
            switch_per_million: 0,
            stall_per_million: 0,
            wakes_late: false,
            steps_max: 100_000_000,
            time_max: Duration::from_secs(30 * 24 * 3600),
            stuck_after: Duration::from_secs(30),
        }
    }

    /// Returns a world whose frequencies follow from the seed: some worlds switch often, and some stall.
    pub fn drawn(seed: u64) -> WorldConfig {
        let mut rng = SplitMix64::new(seed ^ 0x5eed_0f0a_3017_1d00);
        WorldConfig {
            switch_per_million: [0, 1000, 10_000, 100_000][rng.index(4)],
            stall_per_million: [0, 0, 20, 200][rng.index(4)],
            wakes_late: true,
            ..WorldConfig::new(seed)
        }
    }
}

/// A run that has ended: all its threads have.
#[derive(Clone, Debug)]
pub struct Report<T> {
    /// What the first thread returned.
    pub value: T,
    /// Virtual time that has passed.
    pub elapsed: Duration,
    /// Number of switches to a thread.
    pub steps: u64,
    /// Number of drawn stalls.
    pub stalls: u64,
    /// How often each [`mark!`](crate::mark) was reached.
    pub marks: BTreeMap<&'static str, u64>,
    /// Hash of all switches, their times, and what was given to [`record`].
    pub trace: u64,
}

/// Why a run has failed. [`fmt::Display`] prints all of it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Seed of the world.
    pub seed: u64,
    /// Virtual time that has passed.
    pub elapsed: Duration,
    /// What happened.
    pub kind: FailureKind,
    /// The threads that have not ended, by name, with what each waits for.
    pub threads: Vec<String>,
    /// The last switches, oldest first.
    pub recent: Vec<String>,
}

/// Kind of a [`Failure`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// A thread panicked.
    Panic {
        /// Name of the thread.
        thread: String,
        /// Place and message.
        message: String,
    },
    /// No thread can run, and none sleeps: a deadlock, or a wake-up that was lost.
    Deadlock,
    /// [`WorldConfig::steps_max`] is reached.
    StepsExceeded,
    /// [`WorldConfig::time_max`] is reached.
    TimeExceeded,
    /// A thread has run for [`WorldConfig::stuck_after`] without a switch.
    Stuck {
        /// Name of the thread.
        thread: String,
    },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, after {:?} of virtual time: ", self.seed, self.elapsed)?;
        match &self.kind {
            FailureKind::Panic { thread, message } => write!(f, "thread {thread:?} {message}")?,
            FailureKind::Deadlock => f.write_str("deadlock: no thread can run, and none sleeps")?,
            FailureKind::StepsExceeded => f.write_str("too many switches")?,
            FailureKind::TimeExceeded => f.write_str("too much virtual time")?,
            FailureKind::Stuck { thread } => write!(f, "thread {thread:?} runs without a switch")?,
        }
        for thread in &self.threads {
            write!(f, "\n  thread {thread}")?;
        }
        for event in &self.recent {
            write!(f, "\n  {event}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Runs a world. `main` is its first thread; the run ends when all threads have ended.
///
/// The world has a thread of the operating system of its own, so that the thread-locals of one run do not reach the next
/// one. After a failure, the stacks of threads that have not ended are leaked, because unwinding them could wait for locks
/// that no thread would release.
///
/// # Errors
/// If a thread panics, all threads wait, a limit is reached, or a thread never switches.
///
/// # Panics
/// If the operating system gives no thread.
pub fn run<T: Send + 'static>(
    config: &WorldConfig,
    main: impl FnOnce() -> T + Send + 'static,
) -> Result<Report<T>, Failure> {
    world::install_panic_hook();
    let progress = std::sync::Arc::new(world::Progress::default());
    let (sender, result) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new().name(format!("world-{}", config.seed)).spawn({
        let (config, progress) = (config.clone(), progress.clone());
        move || {
            let ended = world::run(config, progress, Box::new(main));
            // The caller may have given up.
            let _ = sender.send(ended);
        }
    });
    let thread = thread.expect("the operating system has a thread");
    let mut seen = progress.steps();
    loop {
        match result.recv_timeout(config.stuck_after) {
            Ok(ended) => {
                thread.join().expect("the world catches panics");
                return ended;
            }
            Err(RecvTimeoutError::Timeout) => {
                let steps = progress.steps();
                if steps == seen {
                    return Err(Failure {
                        seed: config.seed,
                        elapsed: progress.elapsed(),
                        kind: FailureKind::Stuck { thread: progress.running() },
                        threads: progress.names(),
                        recent: vec![],
                    });
                }
                seen = steps;
            }
            Err(RecvTimeoutError::Disconnected) => panic!("the scheduler of a world panicked"),
        }
    }
}

/// Whether the caller is a thread of a world.
pub fn is_inside() -> bool {
    world::World::current().is_some()
}

/// Adds a fact to [`Report::trace`]: two runs that differ in it have different traces. Does nothing outside a world.
pub fn record(value: u64) {
    if let Some(world) = world::World::current() {
        world.record(value);
    }
}

/// Counts that the running thread has reached a mark, and calls the hook.
pub fn mark(name: &'static str) {
    if let Some(world) = world::World::current() {
        world.mark(name);
    }
}

/// Sets what happens at each mark of the caller's world: the hook runs in the thread that reaches it, which it may delay.
pub fn set_mark_hook(hook: Option<Rc<dyn Fn(&'static str)>>) {
    if let Some(world) = world::World::current() {
        world.set_mark_hook(hook);
    }
}

/// Ends all stalls of the caller's world, and draws no more.
pub fn end_stalls() {
    if let Some(world) = world::World::current() {
        world.end_stalls();
    }
}

/// Wakes a future at a time, unless the timer is dropped before.
#[derive(Debug)]
pub struct WakeTimer((u64, u64));

impl WakeTimer {
    /// Sets a timer. `None` outside a world.
    pub fn new(at: Instant, waker: Waker) -> Option<WakeTimer> {
        let world = world::World::current()?;
        Some(WakeTimer(world.wake_at(at.as_world_nanos(&world), waker)))
    }
}

impl Drop for WakeTimer {
    fn drop(&mut self) {
        if let Some(world) = world::World::current() {
            world.cancel_wake(self.0);
        }
    }
}

/// Returns what the clocks of the running process show: monotonic nanoseconds, and milliseconds since 1970. `None` outside a
/// world.
#[track_caller]
pub(crate) fn clocks() -> Option<(u64, u64)> {
    let world = world::World::current()?;
    let monotonic = world.read_clock(std::panic::Location::caller()).as_nanos() as u64;
    Some((monotonic, world.calendar()))
}

/// Virtual time since the start of the world; zero outside a world. Costs no virtual time.
pub fn elapsed() -> Duration {
    world::World::current().map_or(Duration::ZERO, |world| world.elapsed())
}
