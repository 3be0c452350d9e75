//! [`Process`]: a group of threads of a world that is stopped or killed as a whole and has clocks of its own.

use std::collections::BTreeMap;
use std::time::Duration;

use super::world::World;

/// Number of the process in which a world starts. If there are others, it is the one that drives the world: its threads wake
/// on time and are never interrupted.
pub(super) const FIRST_PROCESS: usize = 0;

/// Calendar time at the start of a world, in milliseconds since 1970.
const CALENDAR_START_MS: i64 = 1_700_000_000_000;

/// Clocks of a process, as functions of the world's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessClock {
    /// By how much the monotonic clock is fast, in parts per million; slow if below 0.
    pub drift_ppm: i64,
    /// What the monotonic clock shows at the start of the world, in nanoseconds.
    pub offset_ns: u64,
    /// By how much the calendar is ahead.
    pub calendar_offset_ms: i64,
}

impl ProcessClock {
    /// Returns what the monotonic clock shows, in nanoseconds.
    pub(super) fn monotonic(&self, now: u64) -> u64 {
        let drift = i128::from(now) * i128::from(self.drift_ppm) / 1_000_000;
        (i128::from(now) + drift) as u64 + self.offset_ns
    }

    /// Returns what the calendar shows, in milliseconds since 1970.
    pub(super) fn calendar(&self, now: u64) -> u64 {
        (CALENDAR_START_MS + (now / 1_000_000) as i64 + self.calendar_offset_ms).max(0) as u64
    }

    /// Returns the world's time in which `local` nanoseconds pass on the monotonic clock.
    pub(super) fn span(&self, local: u64) -> u64 {
        if self.drift_ppm == 0 {
            return local;
        }
        let nanos = i128::from(local) * 1_000_000 / (1_000_000 + i128::from(self.drift_ppm)) + 1;
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }
}

/// How to take something back from a process that was killed.
pub(super) type TakeBack = Box<dyn FnOnce()>;

/// A process as the scheduler sees it.
pub(super) struct ProcessState {
    pub(super) name: String,
    pub(super) clock: ProcessClock,
    pub(super) is_stopped: bool,
    pub(super) is_killed: bool,
    /// Fibers that could run if the process were not stopped.
    pub(super) held: Vec<usize>,
    /// What it owns outside its heap.
    owned: BTreeMap<u64, TakeBack>,
    owned_next: u64,
}

impl ProcessState {
    pub(super) fn new(name: String, clock: ProcessClock) -> ProcessState {
        let (owned, held) = (BTreeMap::new(), vec![]);
        ProcessState { name, clock, is_stopped: false, is_killed: false, held, owned, owned_next: 0 }
    }

    /// Takes what it owns.
    pub(super) fn take_owned(&mut self) -> impl Iterator<Item = TakeBack> + use<> {
        std::mem::take(&mut self.owned).into_values()
    }
}

/// Something that a process owns outside its heap.
#[derive(Debug)]
pub(crate) struct OwnedBy {
    process: usize,
    number: u64,
}

impl OwnedBy {
    /// Registers how to take it back. `None` outside a world.
    pub(crate) fn running_process(take_back: TakeBack) -> Option<OwnedBy> {
        let world = World::current()?;
        let process = world.running_process();
        let number = world.process(process, |state| {
            state.owned_next += 1;
            state.owned.insert(state.owned_next, take_back);
            state.owned_next
        });
        Some(OwnedBy { process, number })
    }
}

impl Drop for OwnedBy {
    fn drop(&mut self) {
        if let Some(world) = World::current() {
            drop(world.process(self.process, |state| state.owned.remove(&self.number)));
        }
    }
}

/// A process of the caller's world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(usize);

impl Process {
    /// Creates a process without threads.
    ///
    /// # Panics
    /// Outside a world, like all functions of a process.
    pub fn new(name: &str, clock: ProcessClock) -> Process {
        Process(world().add_process(name.to_owned(), clock))
    }

    /// Returns the process of the calling thread.
    pub fn current() -> Process {
        Process(world().running_process())
    }

    /// Starts a thread in the process. Threads that it starts belong to the same process.
    ///
    /// # Panics
    /// If the process was killed, or the operating system gives no stack.
    pub fn spawn(self, name: &str, run: impl FnOnce() + 'static) {
        let spawned = world().spawn_in(self.0, Some(name.to_owned()), Box::new(run));
        spawned.expect("the operating system has a stack");
    }

    /// Kills the process: none of its threads runs again, and none of their destructors runs. Their stacks and what is
    /// registered as [`Owned`](crate::process::Owned) are taken back; what they have in the heap is leaked. What other
    /// processes share with it must not be locked by one of its threads that waits, and must not refer to their stacks.
    pub fn kill(self) {
        let world = world();
        world.kill(self.0);
        let owned = world.process(self.0, ProcessState::take_owned);
        owned.for_each(|take_back| take_back());
    }

    /// Stops the process: its threads do not run, while time goes on.
    pub fn stop(self) {
        world().stop(self.0);
    }

    /// Ends a stop.
    pub fn resume(self) {
        world().resume(self.0);
    }

    /// Whether all its threads have ended.
    pub fn has_ended(self) -> bool {
        world().has_ended_process(self.0)
    }

    /// Whether the process was killed.
    pub fn is_killed(self) -> bool {
        world().process(self.0, |state| state.is_killed)
    }

    /// Sets the calendar of the process ahead, or back if `by_ms` is below 0.
    pub fn jump_calendar(self, by_ms: i64) {
        world().process(self.0, |state| state.clock.calendar_offset_ms += by_ms);
    }

    /// Returns what the monotonic clock of the process shows.
    pub fn monotonic(self) -> Duration {
        let world = world();
        let now = world.now();
        Duration::from_nanos(world.process(self.0, |state| state.clock.monotonic(now)))
    }
}

fn world() -> std::rc::Rc<World> {
    World::current().expect("processes are used within a world")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_clock_shows_more_and_waits_less() {
        let fast = ProcessClock { drift_ppm: 10_000, offset_ns: 500, calendar_offset_ms: 0 };
        assert_eq!(fast.monotonic(1_000_000), 1_010_500);
        let second = fast.span(1_000_000_000);
        let shown = fast.monotonic(second) - fast.monotonic(0);
        assert!((1_000_000_000..1_001_000_000).contains(&shown), "{shown}");
        assert_eq!(ProcessClock::default().span(7), 7);
    }
}
