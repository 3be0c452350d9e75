//! Loom models of the phase barrier: every interleaving of small models, and every reordering that the memory model
//! allows, on the shipped code, as in `loom_ready_flag.rs`: each model without a mutation, when it must pass, and with
//! each mutation that it must detect.
//!
//! Ranks exchange numbers as the expert exchange does: each writes into memory of its own at the other rank, and
//! reads the number that was written for it if the writer's flag is set. The numbers are plain memory, so that loom
//! finds every pair of unordered accesses. A futex is modelled as a lock and a condition variable; a lost wake-up is
//! a deadlock, which loom reports.
#![cfg(loom)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use moontide_rt::with_mutation;
use moontide_symmetric::model::Mutation;
use moontide_symmetric::{
    BarrierMemory, PhaseBarrier, Rank, RankSet, RejoinPoint, WaitAction, WaitError, WaitStrategy,
};

/// Maximum number of preemptions. With up to three, the models have between 10² and 10⁵ interleavings.
const PREEMPTIONS_MAX: usize = 3;

thread_local! {
    /// Number of occurrences of each outcome. loom runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

/// A model: body of its threads, and outcomes that must occur in some interleaving.
struct Model {
    run: fn(),
    outcomes: &'static [&'static str],
}

fn check(name: &str, model: &Model, mutation: Option<Mutation>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.max_branches = 10_000;
    let run = model.run;
    SEEN.take();
    with_mutation(mutation, || {
        builder.check(move || {
            seen("interleavings");
            run();
        });
    });
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if mutation.is_none() {
        let never: Vec<_> = model.outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "outcomes that never occurred: {never:?}");
    }
}

/// Declares for each model its test, then a test per mutation that must fail in it, with the message.
macro_rules! models {
    ($($test:ident: $model:expr, { $($mutated:ident: $mutation:ident => $message:expr,)* })*) => { $(
        #[test]
        fn $test() {
            check(stringify!($test), &$model, None);
        }
        $(
            #[test]
            #[should_panic(expected = $message)]
            fn $mutated() {
                check(stringify!($mutated), &$model, Some(Mutation::$mutation));
            }
        )*
    )* };
}

models! {
    barrier_makes_earlier_writes_visible:
        Model { run: || exchange(1), outcomes: &["completed", "slept"] }, {
        mutation_arrival_without_release_is_detected: RelaxedArrival => "Causality violation",
        mutation_signal_read_without_acquire_is_detected: RelaxedSignalRead => "Causality violation",
        mutation_arrival_without_fence_is_detected: ArrivalFenceMissing => "deadlock",
        mutation_sleep_without_fence_is_detected: SleepFenceMissing => "deadlock",
        mutation_sleep_without_signal_recheck_is_detected: SleepUnchecked => "deadlock",
    }
    value_is_overwritten_only_after_it_was_read:
        Model { run: || exchange(2), outcomes: &["completed", "slept"] }, {
        mutation_one_signal_word_for_all_phases_is_detected: OneSignalSet => "a rank is missing",
    }
    excluded_rank_gets_excluded_error:
        Model { run: excluded, outcomes: &["completed", "late", "excluded"] }, {
        mutation_unchecked_own_exclusion_is_detected: ExclusionUnnoticed => "exclusion was not reported",
    }
    rank_reads_no_result_from_rank_that_combined_none:
        Model { run: no_result, outcomes: &["no result"] }, {
        mutation_result_read_without_writer_flag_is_detected: FlagsIgnored => "foreign number",
    }
    rejoining_rank_waits_for_end_of_step:
        Model { run: rejoin, outcomes: &["admitted", "read the old", "read the new"] }, {
        mutation_rejoin_in_middle_of_step_is_detected: RejoinWithoutWait => "Causality violation",
    }
}

#[test]
#[should_panic(expected = "Causality violation")]
fn single_buffer_with_one_barrier_per_step_races() {
    let model = Model { run: || one_barrier_per_step(Buffers::One), outcomes: &[] };
    check("one barrier, one buffer", &model, None);
}

#[test]
fn double_buffer_with_one_barrier_per_step_is_race_free() {
    let model = Model { run: || one_barrier_per_step(Buffers::Two), outcomes: &["completed"] };
    check("one barrier, two buffers", &model, None);
}

#[derive(Clone, Copy, PartialEq)]
enum Buffers {
    One,
    Two,
}

/// Rank words in ordinary memory, and a modelled futex per rank.
struct Memory {
    rank_words: Vec<Vec<AtomicU64>>,
    futexes: Vec<(Mutex<()>, Condvar)>,
    /// `numbers[owner][writer][buffer]`
    numbers: Vec<Vec<[UnsafeCell<u64>; 2]>>,
}

#[derive(Clone)]
struct Shared(Arc<Memory>);

impl BarrierMemory for Shared {
    fn rank_words(&self, rank: Rank) -> &[AtomicU64] {
        &self.0.rank_words[rank.index()]
    }

    fn wake(&self, rank: Rank) {
        let (lock, wake_up) = &self.0.futexes[rank.index()];
        let _lock = lock.lock().unwrap();
        wake_up.notify_all();
    }
}

/// Sleeps at once, without a timeout.
struct Sleeper(Shared, Rank);

impl WaitStrategy for Sleeper {
    fn next(&mut self) -> WaitAction {
        WaitAction::Sleep
    }

    fn sleep(&mut self, wake_word: &AtomicU64, seen_word: u64) {
        let (lock, wake_up) = &self.0.0.futexes[self.1.index()];
        let lock = lock.lock().unwrap();
        // As the kernel: compares and sleeps atomically.
        if wake_word.load(loom::sync::atomic::Ordering::Relaxed) == seen_word {
            seen("slept");
            drop(wake_up.wait(lock).unwrap());
        }
    }
}

/// Times out at once.
struct NoWait;

impl WaitStrategy for NoWait {
    fn next(&mut self) -> WaitAction {
        WaitAction::TimedOut
    }

    fn sleep(&mut self, _wake_word: &AtomicU64, _seen: u64) {
        unreachable!("times out before it sleeps")
    }
}

const RANKS: usize = 2;
const BOTH: fn() -> RankSet = || RankSet::first(RANKS);

fn new_shared() -> Shared {
    let words = PhaseBarrier::<Shared>::words(RANKS);
    let shared = Shared(Arc::new(Memory {
        rank_words: (0..RANKS).map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()).collect(),
        futexes: (0..RANKS).map(|_| (Mutex::new(()), Condvar::new())).collect(),
        numbers: (0..RANKS)
            .map(|_| (0..RANKS).map(|_| [UnsafeCell::new(0), UnsafeCell::new(0)]).collect())
            .collect(),
    }));
    PhaseBarrier::init(&shared, RANKS);
    shared
}

impl Shared {
    fn barrier(&self, rank: u32) -> PhaseBarrier<Shared> {
        PhaseBarrier::new(self.clone(), Rank(rank), RANKS)
    }

    fn write(&self, owner: usize, writer: usize, buffer: usize, number: u64) {
        // SAFETY: loom detects an access during another one.
        self.0.numbers[owner][writer][buffer].with_mut(|at| unsafe { *at = number });
    }

    fn read(&self, owner: usize, writer: usize, buffer: usize) -> u64 {
        // SAFETY: as above.
        self.0.numbers[owner][writer][buffer].with(|at| unsafe { *at })
    }
}

/// Both ranks run `steps` steps: dispatch a number, read the other's, combine, barrier.
fn exchange(steps: u64) {
    let shared = new_shared();
    let rank = move |me: usize, shared: Shared| {
        let (barrier, other) = (shared.barrier(me as u32), 1 - me);
        let mut sleeper = Sleeper(shared.clone(), Rank(me as u32));
        for step in 1..=steps {
            shared.write(other, me, 0, step);
            let phase = barrier.arrive(BOTH(), RankSet::EMPTY);
            let outcome = barrier.wait(phase, &mut sleeper).unwrap();
            assert_eq!(outcome.dispatched, BOTH(), "a rank is missing");
            assert_eq!(shared.read(me, other, 0), step, "foreign number");
            seen("completed");
            if step < steps {
                let phase = barrier.arrive(RankSet::EMPTY, BOTH());
                barrier.wait(phase, &mut sleeper).unwrap();
            }
        }
    };
    let other = shared.clone();
    let thread = thread::spawn(move || rank(1, other));
    rank(0, shared);
    thread.join().unwrap();
}

/// Two steps with one barrier each: correct with two buffers, a race with one.
fn one_barrier_per_step(buffers: Buffers) {
    let shared = new_shared();
    let rank = move |me: usize, shared: Shared| {
        let (barrier, other) = (shared.barrier(me as u32), 1 - me);
        let mut sleeper = Sleeper(shared.clone(), Rank(me as u32));
        for step in 1..=2 {
            let buffer = if buffers == Buffers::Two { step as usize & 1 } else { 0 };
            shared.write(other, me, buffer, step);
            let phase = barrier.arrive(BOTH(), BOTH());
            barrier.wait(phase, &mut sleeper).unwrap();
            assert_eq!(shared.read(me, other, buffer), step, "foreign number");
            seen("completed");
        }
    };
    let other = shared.clone();
    let thread = thread::spawn(move || rank(1, other));
    rank(0, shared);
    thread.join().unwrap();
}

/// Rank 0 times out at once and excludes rank 1 if it has not arrived; rank 1 must get the error before it uses a
/// result that rank 0 did not compute for it.
fn excluded() {
    let shared = new_shared();
    let other = shared.clone();
    let late = thread::spawn(move || {
        let barrier = other.barrier(1);
        let mut sleeper = Sleeper(other.clone(), Rank(1));
        other.write(0, 1, 0, 7);
        let phase = barrier.arrive(BOTH(), RankSet::EMPTY);
        if barrier.wait(phase, &mut sleeper).is_err() {
            return true;
        }
        let phase = barrier.arrive(RankSet::EMPTY, BOTH());
        match barrier.wait(phase, &mut sleeper) {
            Ok(outcome) if outcome.combined.contains(Rank(0)) => {
                // Only then is there a result to read: twice the sent number.
                assert_eq!(other.read(1, 0, 0), 14, "foreign number");
                false
            }
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error, WaitError::Excluded);
                true
            }
        }
    });
    let barrier = shared.barrier(0);
    let phase = barrier.arrive(BOTH(), RankSet::EMPTY);
    let outcome = match barrier.wait(phase, &mut NoWait) {
        Ok(outcome) => outcome,
        Err(_) => {
            seen("late");
            barrier.exclude(RankSet::only(Rank(1)));
            barrier.wait(phase, &mut NoWait).unwrap()
        }
    };
    let is_excluded = !outcome.members.contains(Rank(1));
    if outcome.dispatched.contains(Rank(1)) {
        seen("completed");
        let number = shared.read(0, 1, 0);
        shared.write(1, 0, 0, 2 * number);
    }
    barrier.arrive(RankSet::EMPTY, outcome.dispatched);
    let got_error = late.join().unwrap();
    assert_eq!(got_error, is_excluded, "exclusion was not reported");
    if got_error {
        seen("excluded");
    }
}

/// Rank 0 arrives, but abandons its step: it has no result for rank 1, whose tokens it got.
fn no_result() {
    let shared = new_shared();
    let other = shared.clone();
    let thread = thread::spawn(move || {
        let barrier = other.barrier(0);
        let mut sleeper = Sleeper(other.clone(), Rank(0));
        for _ in 0..2 {
            let phase = barrier.arrive(BOTH(), RankSet::EMPTY);
            barrier.wait(phase, &mut sleeper).unwrap();
        }
    });
    let barrier = shared.barrier(1);
    let mut sleeper = Sleeper(shared.clone(), Rank(1));
    let phase = barrier.arrive(BOTH(), RankSet::EMPTY);
    barrier.wait(phase, &mut sleeper).unwrap();
    let phase = barrier.arrive(RankSet::EMPTY, BOTH());
    let outcome = barrier.wait(phase, &mut sleeper).unwrap();
    match outcome.combined.contains(Rank(0)) {
        true => assert_eq!(shared.read(1, 0, 0), 14, "foreign number"),
        false => seen("no result"),
    }
    thread.join().unwrap();
}

/// Rank 1 dispatched a number and exited; another process replaces it while rank 0 still uses the predecessor's
/// number.
fn rejoin() {
    let shared = new_shared();
    let predecessor = shared.barrier(1);
    shared.write(0, 1, 0, 7);
    predecessor.arrive(BOTH(), RankSet::EMPTY);
    drop(predecessor);
    let other = shared.clone();
    let successor = thread::spawn(move || {
        let mut barrier = other.barrier(1);
        barrier.request_join();
        let mut sleeper = Sleeper(other.clone(), Rank(1));
        let first = barrier.await_admission(&mut sleeper).unwrap();
        seen("admitted");
        assert_eq!(first.phase, barrier.phase() + 1);
        other.write(0, 1, 0, 8);
        let phase = barrier.arrive(BOTH(), RankSet::EMPTY);
        barrier.wait(phase, &mut sleeper).unwrap();
    });
    let barrier = shared.barrier(0);
    let mut sleeper = Sleeper(shared.clone(), Rank(0));
    let phase = barrier.arrive(BOTH(), RankSet::EMPTY);
    let outcome = barrier.wait(phase, &mut sleeper).unwrap();
    // Its successor's request may have removed it from the members before.
    let read_old = outcome.dispatched.contains(Rank(1));
    // Admits it before its own arrival in the combine phase, as a channel does, as soon as it asks.
    let membership = loop {
        let membership = barrier.membership(phase + 1).unwrap();
        if !membership.joining.is_empty() {
            break membership;
        }
        thread::yield_now();
    };
    barrier.admit(membership, RejoinPoint { phase: phase + 2, odd_step: false });
    if read_old {
        seen("read the old");
        assert_eq!(shared.read(0, 1, 0), 7, "foreign number");
    }
    let phase = barrier.arrive(RankSet::EMPTY, outcome.dispatched);
    barrier.wait(phase, &mut sleeper).unwrap();
    let phase = barrier.arrive(BOTH(), RankSet::EMPTY);
    let outcome = barrier.wait(phase, &mut sleeper).unwrap();
    assert!(outcome.dispatched.contains(Rank(1)), "the rank was admitted for this phase");
    assert_eq!(shared.read(0, 1, 0), 8, "foreign number");
    seen("read the new");
    successor.join().unwrap();
}
