//! [`World`]: the scheduler. It owns the fibers, virtual time and all draws.
//!
//! Invariants: one fiber runs at a time, and only while [`CURRENT`] names its world. A fiber that does not run is in exactly
//! one of these states: ready (in `ready`, or in `held` of a process that is stopped), waiting (by a key in `waiters`, by a
//! timer in `timers`, or both), ended. No borrow of the state lives across a switch.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::task::Waker;
use std::time::Duration;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

use super::process::{FIRST_PROCESS, ProcessClock, ProcessState};
use super::{Failure, FailureKind, Files, Report, WorldConfig};
use crate::random::{SplitMix64, mix64};

/// Address space of a fiber's stack; the kernel provides the pages that are used. Debug builds have large frames.
const STACK_BYTES: usize = 1 << 20;

/// Virtual time that a reading of the clock takes, so that a loop which waits for a time ends.
const CLOCK_NANOS: u64 = 30;
/// Virtual time that a yield takes, so that a loop which waits for a sleeping thread ends.
const YIELD_NANOS: u64 = 1000;

/// Bounds of a stall: less is ordinary lateness, more is a thread that is gone.
const STALL_NANOS: (u64, u64) = (50_000_000, 60_000_000_000);

/// What a thread waits for that got no processor.
const STALL: &str = "a processor (a drawn stall)";

/// Switches that a failure lists.
const RECENT_MAX: usize = 30;

type Place = &'static Location<'static>;
type Fiber = Coroutine<(), (), Result<(), String>, DefaultStack>;

thread_local! {
    /// The world whose fiber runs on this thread of the operating system.
    static CURRENT: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
    /// Place and message of the last panic in a world.
    static LAST_PANIC: Cell<Option<String>> = const { Cell::new(None) };
}

/// What a fiber waits for. An address is looked up, never printed or ordered by: it differs between runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// A lock at this address.
    Lock(usize),
    /// A condition variable at this address.
    Condvar(usize),
    /// The end of this fiber.
    End(usize),
    /// An unpark of this fiber.
    Park(usize),
}

/// What the caller of a run sees while it runs.
#[derive(Debug, Default)]
pub(super) struct Progress {
    steps: AtomicU64,
    now: AtomicU64,
    running: AtomicU64,
    names: Mutex<Vec<Arc<str>>>,
}

impl Progress {
    pub(super) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    pub(super) fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.now.load(Ordering::Relaxed))
    }

    pub(super) fn running(&self) -> String {
        let names = self.names.lock().expect("no holder panics");
        names.get(self.running.load(Ordering::Relaxed) as usize).map_or("none", |name| name).to_owned()
    }

    pub(super) fn names(&self) -> Vec<String> {
        let names = self.names.lock().expect("no holder panics");
        names.iter().enumerate().map(|(fiber, name)| format!("{name:?}, number {fiber}")).collect()
    }
}

/// A fiber as the scheduler sees it.
struct FiberState {
    name: Arc<str>,
    /// Number of its process.
    process: usize,
    status: Status,
    /// Suspends the fiber. Set when it starts.
    yielder: *const Yielder<(), ()>,
    /// Whether the last wait ended by a notification.
    notified: bool,
    /// An unpark that no park has used.
    unparked: bool,
    key: Option<Key>,
    timer: Option<(u64, u64)>,
}

#[derive(Clone, Copy)]
enum Status {
    Ready,
    Running,
    Waiting { what: &'static str, until: Option<u64>, holder: Option<usize>, at: Place },
    Ended,
}

/// What happens at a time.
enum Timer {
    /// The wait of this fiber ends.
    Wait(usize),
    /// A future is polled again.
    Wake(Waker),
}

struct State {
    rng: SplitMix64,
    /// Virtual time since the start, in nanoseconds.
    now: u64,
    fibers: Vec<FiberState>,
    processes: Vec<ProcessState>,
    /// Fibers that were started since the last switch.
    started: Vec<Fiber>,
    /// Fibers of processes that were killed since the last switch.
    killed: Vec<usize>,
    /// Stacks of fibers that have ended.
    stacks: Vec<DefaultStack>,
    ready: Vec<usize>,
    /// By key, in the order of arrival.
    waiters: BTreeMap<Key, Vec<usize>>,
    /// By time and sequence number.
    timers: BTreeMap<(u64, u64), Timer>,
    timer_next: u64,
    running: usize,
    steps: u64,
    stall_per_million: u32,
    stalls: u64,
    trace: u64,
    recent: VecDeque<(u64, usize)>,
    marks: BTreeMap<&'static str, u64>,
    /// Set if a fiber cannot go on: it waits while a panic unwinds it.
    broken: bool,
}

/// A simulated world.
pub(super) struct World {
    config: WorldConfig,
    progress: Arc<Progress>,
    hash_key: u64,
    state: RefCell<State>,
    files: RefCell<Files>,
    mark_hook: RefCell<Option<Rc<dyn Fn(&'static str)>>>,
}

/// Records panics of worlds instead of printing them: the failure of the run reports them.
pub(super) fn install_panic_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if World::current().is_some() {
                LAST_PANIC.set(Some(info.to_string()));
            } else {
                before(info);
            }
        }));
    });
}

/// Runs a world on the calling thread.
pub(super) fn run<T: Send + 'static>(
    config: WorldConfig,
    progress: Arc<Progress>,
    main: Box<dyn FnOnce() -> T>,
) -> Result<Report<T>, Failure> {
    let mut rng = SplitMix64::new(config.seed);
    let hash_key = rng.next_u64();
    let state = State {
        rng,
        now: 0,
        fibers: vec![],
        processes: vec![ProcessState::new("main".into(), ProcessClock::default())],
        started: vec![],
        killed: vec![],
        stacks: vec![],
        ready: vec![],
        waiters: BTreeMap::new(),
        timers: BTreeMap::new(),
        timer_next: 0,
        running: 0,
        steps: 0,
        stall_per_million: config.stall_per_million,
        stalls: 0,
        trace: mix64(config.seed),
        recent: VecDeque::new(),
        marks: BTreeMap::new(),
        broken: false,
    };
    let world = Rc::new(World {
        config,
        progress,
        hash_key,
        state: RefCell::new(state),
        files: RefCell::default(),
        mark_hook: RefCell::default(),
    });
    let value: Rc<Cell<Option<T>>> = Rc::default();
    let slot = value.clone();
    let body = Box::new(move || slot.set(Some(main())));
    world.spawn_in(FIRST_PROCESS, Some("main".to_owned()), body).expect("the operating system has a stack");
    let mut fibers: Vec<Option<Fiber>> = vec![];
    if let Err(kind) = world.schedule(&mut fibers) {
        let failure = world.failure(kind);
        // Their destructors could wait for each other.
        std::mem::forget(fibers);
        std::mem::forget(value);
        std::mem::forget(world);
        return Err(failure);
    }
    // Threads of killed processes were forgotten with references to the world, so it may never be dropped.
    let mark_hook = world.mark_hook.take();
    world.while_current(|| drop(mark_hook));
    world.state.borrow_mut().stacks = vec![];
    let state = world.state.borrow();
    Ok(Report {
        value: value.take().expect("the first thread has ended"),
        elapsed: Duration::from_nanos(state.now),
        steps: state.steps,
        stalls: state.stalls,
        marks: state.marks.clone(),
        trace: state.trace,
    })
}

impl World {
    /// Returns the world of the calling fiber.
    pub(super) fn current() -> Option<Rc<World>> {
        // A thread-local that is destroyed belongs to a thread that ends: no fiber.
        CURRENT.try_with(|current| current.borrow().clone()).unwrap_or_default()
    }

    // -- the scheduler's side -----------------------------------------------------------------------------------------

    /// Runs the fibers until all have ended.
    fn schedule(self: &Rc<Self>, fibers: &mut Vec<Option<Fiber>>) -> Result<(), FailureKind> {
        loop {
            let fiber = {
                let mut state = self.state.borrow_mut();
                fibers.extend(state.started.drain(..).map(Some));
                match state.next_fiber() {
                    Next::Run(fiber) => {
                        if state.steps >= self.config.steps_max {
                            return Err(FailureKind::StepsExceeded);
                        }
                        if u128::from(state.now) > self.config.time_max.as_nanos() {
                            return Err(FailureKind::TimeExceeded);
                        }
                        state.enter(fiber);
                        self.progress.running.store(fiber as u64, Ordering::Relaxed);
                        self.progress.now.store(state.now, Ordering::Relaxed);
                        self.progress.steps.store(state.steps, Ordering::Relaxed);
                        fiber
                    }
                    Next::Wake(wakers) => {
                        drop(state);
                        self.while_current(|| wakers.into_iter().for_each(Waker::wake));
                        continue;
                    }
                    Next::Deadlock => return Err(FailureKind::Deadlock),
                    Next::Done => return Ok(()),
                }
            };
            let coroutine = fibers[fiber].as_mut().expect("a fiber that can run has not ended");
            let result = self.while_current(|| coroutine.resume(()));
            let thread = || self.state.borrow().fibers[fiber].name.as_ref().to_owned();
            match result {
                CoroutineResult::Return(Ok(())) => {
                    let stack = fibers[fiber].take().expect("it has just run").into_stack();
                    let mut state = self.state.borrow_mut();
                    state.stacks.push(stack);
                    state.ended(fiber);
                }
                CoroutineResult::Return(Err(message)) => {
                    return Err(FailureKind::Panic { thread: thread(), message });
                }
                CoroutineResult::Yield(()) if self.state.borrow().broken => {
                    let message = LAST_PANIC.take().unwrap_or_else(|| "panicked".to_owned());
                    return Err(FailureKind::Panic { thread: thread(), message });
                }
                CoroutineResult::Yield(()) => {}
            }
            self.release_killed(fibers);
        }
    }

    fn while_current<T>(self: &Rc<Self>, run: impl FnOnce() -> T) -> T {
        CURRENT.with(|current| *current.borrow_mut() = Some(self.clone()));
        let result = run();
        CURRENT.with(|current| *current.borrow_mut() = None);
        result
    }

    /// Unmaps the stacks of killed fibers, without running a destructor of what is on them.
    fn release_killed(&self, fibers: &mut Vec<Option<Fiber>>) {
        let mut state = self.state.borrow_mut();
        fibers.extend(state.started.drain(..).map(Some));
        for fiber in std::mem::take(&mut state.killed) {
            let mut coroutine = fibers[fiber].take().expect("a fiber that has not ended has a stack");
            // SAFETY: no code of the fiber runs any more, and nothing else refers to its stack: other processes of a world
            // share with this one what is in the heap, and must not use channels, notifications or timers whose waiters
            // are linked on the stacks of those that wait. A use all the same meets no mapping, or one of its own.
            unsafe { coroutine.force_reset() };
            drop(coroutine.into_stack());
        }
    }

    fn failure(&self, kind: FailureKind) -> Failure {
        let state = self.state.borrow();
        let name = |fiber: usize| {
            let FiberState { name, process, .. } = &state.fibers[fiber];
            match *process {
                FIRST_PROCESS => format!("{name:?}, number {fiber}"),
                process => format!("{name:?} of {}, number {fiber}", state.processes[process].name),
            }
        };
        let threads = state.fibers.iter().enumerate().filter_map(|(fiber, it)| {
            let status = match it.status {
                Status::Ended => return None,
                Status::Ready => "can run".to_owned(),
                Status::Running => "runs".to_owned(),
                Status::Waiting { what, until, holder, at } => {
                    let until = until.map(|until| format!(" until {:?}", Duration::from_nanos(until)));
                    let holder = holder.map(|holder| format!(" of thread {}", name(holder)));
                    let (until, holder) = (until.unwrap_or_default(), holder.unwrap_or_default());
                    format!("waits for {what}{holder}{until}, at {at}")
                }
            };
            Some(format!("{}: {status}", name(fiber)))
        });
        let threads = threads.collect();
        let event =
            |&(at, fiber): &(u64, usize)| format!("at {:?}: {}", Duration::from_nanos(at), name(fiber));
        Failure {
            seed: self.config.seed,
            elapsed: Duration::from_nanos(state.now),
            kind,
            threads,
            recent: state.recent.iter().map(event).collect(),
        }
    }

    // -- the fibers' side ---------------------------------------------------------------------------------------------

    /// Creates a fiber of the running process that can run, and returns its number and name.
    pub(super) fn spawn(
        self: &Rc<Self>,
        name: Option<String>,
        body: Box<dyn FnOnce()>,
    ) -> io::Result<(usize, Arc<str>)> {
        let process = self.running_process();
        self.spawn_in(process, name, body)
    }

    /// Like [`World::spawn`], in any process that was not killed.
    pub(super) fn spawn_in(
        self: &Rc<Self>,
        process: usize,
        name: Option<String>,
        body: Box<dyn FnOnce()>,
    ) -> io::Result<(usize, Arc<str>)> {
        let mut state = self.state.borrow_mut();
        assert!(!state.processes[process].is_killed, "a process that was killed starts no thread");
        let stack = match state.stacks.pop() {
            Some(stack) => stack,
            None => DefaultStack::new(STACK_BYTES)?,
        };
        let fiber = state.fibers.len();
        let name: Arc<str> = name.unwrap_or_else(|| format!("thread-{fiber}")).into();
        let world = Rc::downgrade(self);
        let coroutine = Coroutine::with_stack(stack, move |yielder: &Yielder<(), ()>, ()| {
            let world = world.upgrade().expect("a world outlives its fibers");
            world.state.borrow_mut().fibers[fiber].yielder = yielder;
            drop(world);
            catch_unwind(AssertUnwindSafe(body)).map_err(|payload| {
                LAST_PANIC.take().unwrap_or_else(|| format!("panicked: {}", message(&*payload)))
            })
        });
        state.fibers.push(FiberState {
            name: name.clone(),
            process,
            status: Status::Ready,
            yielder: std::ptr::null(),
            notified: false,
            unparked: false,
            key: None,
            timer: None,
        });
        state.started.push(coroutine);
        state.make_ready(fiber);
        self.progress.names.lock().expect("no holder panics").push(name.clone());
        Ok((fiber, name))
    }

    /// Waits for a key, for a time, or for the first of both. Returns whether the key was notified.
    pub(super) fn wait(
        &self,
        key: Option<Key>,
        until: Option<u64>,
        what: &'static str,
        holder: Option<usize>,
        at: Place,
    ) -> bool {
        let mut state = self.state.borrow_mut();
        let fiber = state.running;
        if let Some(until) = until {
            let lag = self.lag(&mut state);
            let due = until.max(state.now).saturating_add(lag);
            let timer = state.add_timer(due, Timer::Wait(fiber));
            state.fibers[fiber].timer = Some(timer);
        }
        if let Some(key) = key {
            state.waiters.entry(key).or_default().push(fiber);
            state.fibers[fiber].key = Some(key);
        }
        state.fibers[fiber].status = Status::Waiting { what, until, holder, at };
        drop(state);
        self.suspend();
        self.state.borrow().fibers[fiber].notified
    }

    /// Leaves the running fiber. Returns when the scheduler has chosen it again.
    fn suspend(&self) {
        let mut state = self.state.borrow_mut();
        let fiber = state.running;
        // Other fibers would run with the panic count of this one.
        state.broken |= std::thread::panicking();
        let yielder = state.fibers[fiber].yielder;
        drop(state);
        // SAFETY: the yielder lives on the stack of the coroutine until its body returns. The caller is within that body:
        // `running` names the fiber that the scheduler resumed last, and only a fiber calls this.
        unsafe { &*yielder }.suspend(());
    }

    /// A place where another thread may run first, or this one may stall.
    pub(super) fn point(&self, at: Place) {
        if std::thread::panicking() {
            return;
        }
        let mut state = self.state.borrow_mut();
        let (switch, stall) = (self.config.switch_per_million, state.stall_per_million);
        if switch == 0 && stall == 0 {
            return;
        }
        if state.runs_on_time() {
            return;
        }
        let draw = state.rng.below(1_000_000) as u32;
        if draw < switch {
            drop(state);
            self.switch();
        } else if draw - switch < stall {
            let (min, max) = STALL_NANOS;
            let until = state.now + state.rng.log_uniform(min, max);
            state.stalls += 1;
            drop(state);
            self.wait(None, Some(until), STALL, None, at);
        }
    }

    /// Ends all stalls, and draws no more.
    pub(super) fn end_stalls(&self) {
        let mut state = self.state.borrow_mut();
        state.stall_per_million = 0;
        for fiber in 0..state.fibers.len() {
            if matches!(state.fibers[fiber].status, Status::Waiting { what: STALL, .. }) {
                let timer = state.fibers[fiber].timer.take().expect("a stall has an end");
                state.timers.remove(&timer);
                state.end_wait(fiber, false);
            }
        }
    }

    /// Lets the scheduler choose among all fibers that can run, this one included.
    pub(super) fn switch(&self) {
        if std::thread::panicking() {
            return;
        }
        let mut state = self.state.borrow_mut();
        let fiber = state.running;
        state.fibers[fiber].status = Status::Ready;
        state.make_ready(fiber);
        drop(state);
        self.suspend();
    }

    pub(super) fn yield_now(&self) {
        self.state.borrow_mut().now += YIELD_NANOS;
        self.switch();
    }

    /// Wakes all fibers that wait for a key, and returns their number.
    pub(super) fn wake_all(&self, key: Key) -> usize {
        let mut state = self.state.borrow_mut();
        let Some(fibers) = state.waiters.remove(&key) else { return 0 };
        let count = fibers.len();
        for fiber in fibers {
            state.notified(fiber);
        }
        count
    }

    /// Wakes one of the fibers that wait for a key, drawn at random. Returns whether there was one.
    pub(super) fn wake_one(&self, key: Key) -> bool {
        let mut state = self.state.borrow_mut();
        let State { waiters, rng, .. } = &mut *state;
        let Some(fibers) = waiters.get_mut(&key) else { return false };
        let fiber = fibers.remove(rng.index(fibers.len()));
        if fibers.is_empty() {
            waiters.remove(&key);
        }
        state.notified(fiber);
        true
    }

    pub(super) fn park(&self, until: Option<u64>, at: Place) {
        self.point(at);
        let fiber = self.running();
        if !std::mem::take(&mut self.state.borrow_mut().fibers[fiber].unparked) {
            self.wait(Some(Key::Park(fiber)), until, "an unpark", None, at);
        }
    }

    pub(super) fn unpark(&self, fiber: usize) {
        self.state.borrow_mut().unpark(fiber);
    }

    /// Wakes a future of the running fiber at a time. Returns the key of the timer.
    pub(super) fn wake_at(&self, until: u64, waker: Waker) -> (u64, u64) {
        let mut state = self.state.borrow_mut();
        let lag = self.lag(&mut state);
        let at = until.max(state.now).saturating_add(lag);
        state.add_timer(at, Timer::Wake(waker))
    }

    pub(super) fn cancel_wake(&self, timer: (u64, u64)) {
        let removed = self.state.borrow_mut().timers.remove(&timer);
        // It may release what calls the world, hence not while the state is borrowed.
        drop(removed);
    }

    /// Draws by how much the running fiber wakes late.
    fn lag(&self, state: &mut State) -> u64 {
        let is_late = self.config.wakes_late && !state.runs_on_time();
        if is_late { lag(&mut state.rng) } else { 0 }
    }

    pub(super) fn has_ended(&self, fiber: usize) -> bool {
        matches!(self.state.borrow().fibers[fiber].status, Status::Ended)
    }

    pub(super) fn running(&self) -> usize {
        self.state.borrow().running
    }

    pub(super) fn running_thread(&self) -> (usize, Arc<str>) {
        let state = self.state.borrow();
        (state.running, state.fibers[state.running].name.clone())
    }

    /// Returns the virtual time in nanoseconds.
    pub(super) fn now(&self) -> u64 {
        self.state.borrow().now
    }

    pub(super) fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.now())
    }

    /// Returns the time of the running process's clock.
    pub(super) fn read_clock(&self, at: Place) -> Duration {
        self.point(at);
        let mut state = self.state.borrow_mut();
        state.now += CLOCK_NANOS;
        Duration::from_nanos(state.clock().monotonic(state.now))
    }

    /// Returns the calendar time of the running process, in milliseconds since 1970.
    pub(super) fn calendar(&self) -> u64 {
        let state = self.state.borrow();
        state.clock().calendar(state.now)
    }

    /// Returns the world's time at which this much time has passed by the clock of the running process.
    pub(super) fn after(&self, local: Duration) -> u64 {
        let state = self.state.borrow();
        state.now.saturating_add(state.clock().span(super::lock::nanos(local)))
    }

    /// Returns the world's time at which the clock of the running process shows this time.
    pub(super) fn at(&self, monotonic: u64) -> u64 {
        let state = self.state.borrow();
        let left = monotonic.saturating_sub(state.clock().monotonic(state.now));
        state.now.saturating_add(state.clock().span(left))
    }

    // -- processes ----------------------------------------------------------------------------------------------------

    pub(super) fn running_process(&self) -> usize {
        let state = self.state.borrow();
        state.fibers.get(state.running).map_or(FIRST_PROCESS, |fiber| fiber.process)
    }

    pub(super) fn add_process(&self, name: String, clock: ProcessClock) -> usize {
        let mut state = self.state.borrow_mut();
        state.processes.push(ProcessState::new(name, clock));
        state.processes.len() - 1
    }

    pub(super) fn process<T>(&self, process: usize, with: impl FnOnce(&mut ProcessState) -> T) -> T {
        with(&mut self.state.borrow_mut().processes[process])
    }

    pub(super) fn has_ended_process(&self, process: usize) -> bool {
        let state = self.state.borrow();
        state.fibers.iter().all(|fiber| fiber.process != process || matches!(fiber.status, Status::Ended))
    }

    /// Ends all fibers of a process at once. Their stacks are forgotten.
    pub(super) fn kill(&self, process: usize) {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        assert_ne!(state.fibers[state.running].process, process, "a process does not kill itself");
        state.processes[process].is_killed = true;
        state.processes[process].held.clear();
        for (fiber, it) in state.fibers.iter_mut().enumerate() {
            if it.process != process || matches!(it.status, Status::Ended) {
                continue;
            }
            it.status = Status::Ended;
            if let Some(timer) = it.timer.take() {
                state.timers.remove(&timer);
            }
            if let Some(key) = it.key.take() {
                let waiters = state.waiters.get_mut(&key).expect("a fiber with a key is in its list");
                waiters.retain(|&waiter| waiter != fiber);
                if waiters.is_empty() {
                    state.waiters.remove(&key);
                }
            }
            state.killed.push(fiber);
        }
        let fibers = &state.fibers;
        state.ready.retain(|&fiber| fibers[fiber].process != process);
    }

    /// Stops a process: its fibers do not run until [`World::resume`].
    pub(super) fn stop(&self, process: usize) {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        assert_ne!(state.fibers[state.running].process, process, "a process does not stop itself");
        state.processes[process].is_stopped = true;
        let fibers = &state.fibers;
        let held = state.ready.extract_if(.., |fiber| fibers[*fiber].process == process);
        state.processes[process].held.extend(held);
    }

    pub(super) fn resume(&self, process: usize) {
        let mut state = self.state.borrow_mut();
        state.processes[process].is_stopped = false;
        let held = std::mem::take(&mut state.processes[process].held);
        state.ready.extend(held);
    }

    // -- files and marks ----------------------------------------------------------------------------------------------

    pub(super) fn files(&self) -> &RefCell<Files> {
        &self.files
    }

    /// Draws below `n` from the world's numbers.
    pub(super) fn draw(&self, n: u64) -> u64 {
        self.state.borrow_mut().rng.below(n)
    }

    pub(super) fn mark(&self, name: &'static str) {
        *self.state.borrow_mut().marks.entry(name).or_default() += 1;
        let hook = self.mark_hook.borrow().clone();
        if let Some(hook) = hook {
            hook(name);
        }
    }

    pub(super) fn set_mark_hook(&self, hook: Option<Rc<dyn Fn(&'static str)>>) {
        *self.mark_hook.borrow_mut() = hook;
    }

    pub(super) fn hash_key(&self) -> u64 {
        self.hash_key
    }

    pub(super) fn record(&self, value: u64) {
        self.state.borrow_mut().record(value);
    }
}

enum Next {
    Run(usize),
    /// Futures are due.
    Wake(Vec<Waker>),
    Deadlock,
    Done,
}

impl State {
    /// Draws the next fiber. If none can run, time passes until a timer is due.
    fn next_fiber(&mut self) -> Next {
        loop {
            if self.ready.is_empty() {
                let Some((&(due, _), _)) = self.timers.first_key_value() else {
                    let all_ended = self.fibers.iter().all(|fiber| matches!(fiber.status, Status::Ended));
                    return if all_ended { Next::Done } else { Next::Deadlock };
                };
                self.now = self.now.max(due);
            }
            let mut due = vec![];
            while let Some(timer) = self.timers.first_entry().filter(|timer| timer.key().0 <= self.now) {
                match timer.remove() {
                    Timer::Wait(fiber) => self.timed_out(fiber),
                    Timer::Wake(waker) => due.push(waker),
                }
            }
            if !due.is_empty() {
                return Next::Wake(due);
            }
            // None can run if the process of the fiber is stopped.
            if !self.ready.is_empty() {
                let index = self.rng.index(self.ready.len());
                return Next::Run(self.ready.swap_remove(index));
            }
        }
    }

    fn add_timer(&mut self, at: u64, timer: Timer) -> (u64, u64) {
        let key = (at, self.timer_next);
        self.timer_next += 1;
        self.timers.insert(key, timer);
        key
    }

    /// Lets a fiber run, unless its process is stopped.
    fn make_ready(&mut self, fiber: usize) {
        let process = &mut self.processes[self.fibers[fiber].process];
        if process.is_stopped { process.held.push(fiber) } else { self.ready.push(fiber) }
    }

    fn clock(&self) -> &ProcessClock {
        &self.processes[self.fibers[self.running].process].clock
    }

    /// Whether the running fiber is the one that drives a world of several processes: it is interrupted by none of them.
    fn runs_on_time(&self) -> bool {
        self.processes.len() > 1 && self.fibers[self.running].process == FIRST_PROCESS
    }

    /// Ends the park of a fiber, or its next one.
    fn unpark(&mut self, fiber: usize) {
        if matches!(self.fibers[fiber].status, Status::Ended) {
            return;
        }
        match self.waiters.remove(&Key::Park(fiber)) {
            Some(_) => self.notified(fiber),
            None => self.fibers[fiber].unparked = true,
        }
    }

    fn enter(&mut self, fiber: usize) {
        self.steps += 1;
        self.running = fiber;
        self.fibers[fiber].status = Status::Running;
        self.record(fiber as u64);
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back((self.now, fiber));
    }

    fn record(&mut self, value: u64) {
        self.trace = mix64(self.trace ^ mix64(value.wrapping_add(1))).wrapping_add(self.now);
    }

    /// Ends the wait of a fiber whose key was removed from `waiters`.
    fn notified(&mut self, fiber: usize) {
        if let Some(timer) = self.fibers[fiber].timer.take() {
            self.timers.remove(&timer);
        }
        self.end_wait(fiber, true);
    }

    /// Ends the wait of a fiber whose timer was removed from `timers`.
    fn timed_out(&mut self, fiber: usize) {
        self.fibers[fiber].timer = None;
        if let Some(key) = self.fibers[fiber].key {
            let waiters = self.waiters.get_mut(&key).expect("a fiber with a key is in its list");
            waiters.retain(|&waiter| waiter != fiber);
            if waiters.is_empty() {
                self.waiters.remove(&key);
            }
        }
        self.end_wait(fiber, false);
    }

    fn end_wait(&mut self, fiber: usize, notified: bool) {
        let state = &mut self.fibers[fiber];
        state.key = None;
        state.notified = notified;
        state.status = Status::Ready;
        self.make_ready(fiber);
    }

    fn ended(&mut self, fiber: usize) {
        self.fibers[fiber].status = Status::Ended;
        for waiter in self.waiters.remove(&Key::End(fiber)).unwrap_or_default() {
            self.notified(waiter);
        }
    }
}

/// Draws by how much a thread wakes late.
fn lag(rng: &mut SplitMix64) -> u64 {
    match rng.below(10_000) {
        0 => 10_000_000 + rng.below(490_000_000),
        1..=1000 => rng.below(3_000_000),
        _ => rng.below(50_000),
    }
}

/// Returns the message of a panic.
fn message(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
