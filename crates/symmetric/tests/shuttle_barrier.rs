//! Shuttle model of the phase barrier, larger than loom can exhaust, on the shipped code and on many random
//! schedules: three ranks that exchange numbers, time out at any moment, exclude each other, and rejoin.
//!
//! Mutations that are wrong under every memory model are here, the others in `loom_barrier.rs`.
#![cfg(shuttle)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use moontide_rt::with_mutation;
use moontide_symmetric::model::Mutation;
use moontide_symmetric::{
    BarrierMemory, PhaseBarrier, PhaseOutcome, Rank, RankSet, RejoinPoint, WaitAction, WaitError,
    WaitStrategy,
};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::sync::{Condvar, Mutex};
use shuttle::{Config, Runner, thread};

const SCHEDULES: usize = 20_000;
const PCT_SCHEDULES: usize = 5_000;
const PCT_INTERRUPTIONS: usize = 4;

const RANKS: usize = 3;
const STEPS: usize = 4;

thread_local! {
    /// Number of occurrences of each outcome. Shuttle runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

fn explore(
    name: &str,
    run: fn(),
    outcomes: &[&str],
    scheduler: impl Scheduler + 'static,
    mutation: Option<Mutation>,
) {
    let mut config = Config::new();
    config.silence_warnings = true;
    SEEN.take();
    with_mutation(mutation, || Runner::new(scheduler, config).run(run));
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if mutation.is_none() {
        let never: Vec<_> = outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "outcomes that never occurred: {never:?}");
    }
}

const NO_TIMEOUT: &[&str] = &["dispatched", "combined", "slept"];
const TIMEOUT: &[&str] = &["dispatched", "combined", "late", "excluded", "rejoined", "not admitted"];

#[test]
fn ranks_without_timeout_exchange_all_values() {
    explore("no timeout", || world(WaitMode::NoTimeout), NO_TIMEOUT, RandomScheduler::new(SCHEDULES), None);
}

#[test]
fn ranks_without_timeout_exchange_all_values_under_pct() {
    explore(
        "no timeout",
        || world(WaitMode::NoTimeout),
        NO_TIMEOUT,
        PctScheduler::new(PCT_INTERRUPTIONS, PCT_SCHEDULES),
        None,
    );
}

#[test]
fn ranks_with_timeouts_never_read_foreign_values() {
    explore("timeout", || world(WaitMode::Timeout), TIMEOUT, RandomScheduler::new(SCHEDULES), None);
}

#[test]
fn ranks_with_timeouts_never_read_foreign_values_under_pct() {
    let outcomes = &["dispatched", "combined", "late"];
    explore(
        "timeout",
        || world(WaitMode::Timeout),
        outcomes,
        PctScheduler::new(PCT_INTERRUPTIONS, PCT_SCHEDULES),
        None,
    );
}

/// Uses a fixed seed, so that the result does not depend on chance.
fn explore_mutation(run: fn(), mutation: Mutation) {
    explore("mutation", run, &[], RandomScheduler::new_from_seed(1, SCHEDULES), Some(mutation));
}

#[test]
#[should_panic(expected = "deadlock")]
fn mutation_sleep_without_signal_recheck_is_detected() {
    explore_mutation(|| world(WaitMode::NoTimeout), Mutation::SleepUnchecked);
}

#[test]
#[should_panic(expected = "a rank is missing")]
fn mutation_one_signal_word_for_all_phases_is_detected() {
    explore_mutation(|| world(WaitMode::NoTimeout), Mutation::OneSignalSet);
}

/// The barrier has two defences against foreign numbers, the writer's flags and the check of the own member state,
/// and one is enough in this model (`loom_barrier.rs` breaks each in a model where only that one protects). So here
/// the rank itself breaks the protocol.
#[test]
#[should_panic(expected = "foreign number")]
fn mutation_proceeding_with_late_ranks_is_detected() {
    let run = || world(WaitMode::IgnoreTimeout);
    explore("ignored timeout", run, &[], RandomScheduler::new_from_seed(1, SCHEDULES), None);
}

/// Rank words and futexes as in `loom_barrier.rs`; `tokens[owner][writer]` and `results[worker][owner]` hold the
/// dispatch's phase.
struct Memory {
    rank_words: Vec<Vec<AtomicU64>>,
    futexes: Vec<(Mutex<()>, Condvar)>,
    tokens: Vec<Vec<AtomicU64>>,
    results: Vec<Vec<AtomicU64>>,
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

/// Wait strategy: sleeps without a timeout, or polls `polls_left` times and times out.
struct Waiter {
    shared: Shared,
    me: Rank,
    polls_left: Option<u32>,
}

impl WaitStrategy for Waiter {
    fn next(&mut self) -> WaitAction {
        match &mut self.polls_left {
            None => WaitAction::Sleep,
            Some(0) => WaitAction::TimedOut,
            Some(left) => {
                *left -= 1;
                thread::yield_now();
                if *left & 1 == 0 { WaitAction::Poll } else { WaitAction::CheckMembers }
            }
        }
    }

    fn sleep(&mut self, wake_word: &AtomicU64, seen_word: u64) {
        let (lock, wake_up) = &self.shared.0.futexes[self.me.index()];
        let lock = lock.lock().unwrap();
        if wake_word.load(Ordering::Relaxed) == seen_word {
            seen("slept");
            drop(wake_up.wait(lock).unwrap());
        }
    }
}

/// Reaction of a rank to missing ranks.
#[derive(Clone, Copy, PartialEq)]
enum WaitMode {
    /// Waits without a timeout.
    NoTimeout,
    /// Times out, and excludes them or waits again.
    Timeout,
    /// Times out, and reads data that they have not written yet.
    IgnoreTimeout,
}

fn world(mode: WaitMode) {
    let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let words = PhaseBarrier::<Shared>::words(RANKS);
    let shared = Shared(Arc::new(Memory {
        rank_words: (0..RANKS).map(|_| zeros(words)).collect(),
        futexes: (0..RANKS).map(|_| (Mutex::new(()), Condvar::new())).collect(),
        tokens: (0..RANKS).map(|_| zeros(RANKS)).collect(),
        results: (0..RANKS).map(|_| zeros(RANKS)).collect(),
    }));
    PhaseBarrier::init(&shared, RANKS);
    let threads: Vec<_> = (0..RANKS as u32)
        .map(|rank| {
            let shared = shared.clone();
            thread::spawn(move || run_rank(&shared, Rank(rank), mode))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Body of a rank. A rank with timeouts rejoins when it was excluded, unless no member is left to admit it.
fn run_rank(shared: &Shared, me: Rank, mode: WaitMode) {
    let has_timeout = mode != WaitMode::NoTimeout;
    let mut barrier = PhaseBarrier::new(shared.clone(), me, RANKS);
    let waiter = |polls| Waiter { shared: shared.clone(), me, polls_left: has_timeout.then_some(polls) };
    for _ in 0..STEPS {
        match step(shared, &barrier, mode, &waiter) {
            Ok(()) => {}
            Err(_) => {
                seen("excluded");
                barrier.request_join();
                if barrier.await_admission(&mut waiter(40)).is_err() {
                    return seen("not admitted");
                }
                seen("rejoined");
            }
        }
    }
}

fn step(
    shared: &Shared,
    barrier: &PhaseBarrier<Shared>,
    mode: WaitMode,
    waiter: &impl Fn(u32) -> Waiter,
) -> Result<(), WaitError> {
    let Memory { tokens, results, .. } = &*shared.0;
    let (me, has_timeout) = (barrier.me(), mode != WaitMode::NoTimeout);
    let wait = |phase| loop {
        let polls = if has_timeout { thread_rng().gen_range(0..12) } else { 0 };
        match barrier.wait(phase, &mut waiter(polls)) {
            Err(WaitError::Missing(ranks)) => {
                seen("late");
                if mode == WaitMode::IgnoreTimeout {
                    let members = barrier.membership(phase)?.members;
                    return Ok(PhaseOutcome { members, dispatched: members, combined: members });
                }
                if thread_rng().gen_bool(0.5) {
                    barrier.exclude(ranks);
                }
            }
            other => return other,
        }
    };
    let dispatch = barrier.phase() + 1;
    let members = barrier.membership(dispatch)?.members;
    for rank in members.iter() {
        tokens[rank.index()][me.index()].store(dispatch, Ordering::Relaxed);
    }
    assert_eq!(barrier.arrive(members, RankSet::EMPTY), dispatch);
    let outcome = wait(dispatch)?;
    assert!(has_timeout || outcome.dispatched == RankSet::first(RANKS), "a rank is missing");
    for source in outcome.dispatched.iter() {
        assert_eq!(tokens[me.index()][source.index()].load(Ordering::Relaxed), dispatch, "foreign number");
        results[me.index()][source.index()].store(dispatch, Ordering::Relaxed);
    }
    seen("dispatched");
    let membership = barrier.membership(dispatch + 1)?;
    barrier.admit(membership, RejoinPoint { phase: dispatch + 2, odd_step: false });
    let outcome = {
        let phase = barrier.arrive(RankSet::EMPTY, outcome.dispatched);
        wait(phase)?
    };
    for worker in outcome.combined.and(members).iter() {
        assert_eq!(results[worker.index()][me.index()].load(Ordering::Relaxed), dispatch, "foreign number");
    }
    seen("combined");
    Ok(())
}
