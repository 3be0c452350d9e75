//! A larger model of the phase barrier than loom can exhaust, on the shipped code and on many random schedules: three
//! ranks that exchange numbers, lose patience with each other at any moment, go on without each other, and come back.
//!
//! As in `shuttle.rs`: what is wrong under every memory model has its bug planted here, the rest in `loom_phase.rs`.
#![cfg(shuttle)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use moontide_heap::model::{Bug, with_planted};
use moontide_heap::{Entry, Met, Next, PhaseBarrier, Posts, Rank, RankSet, Wait, WaitError};
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
    /// How often each outcome came about. Shuttle runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

fn explore(name: &str, run: fn(), outcomes: &[&str], scheduler: impl Scheduler + 'static, bug: Option<Bug>) {
    let mut config = Config::new();
    config.silence_warnings = true;
    SEEN.take();
    with_planted(bug, || Runner::new(scheduler, config).run(run));
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if bug.is_none() {
        let never: Vec<_> = outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "in no schedule: {never:?}");
    }
}

const PATIENT: &[&str] = &["dispatched", "combined", "slept"];
const HASTY: &[&str] = &["dispatched", "combined", "late", "excluded", "rejoined", "gave up"];

#[test]
fn patient_ranks_exchange_all_numbers() {
    explore("patient", || world(Temper::Patient), PATIENT, RandomScheduler::new(SCHEDULES), None);
}

#[test]
fn patient_ranks_exchange_all_numbers_with_few_interruptions() {
    explore(
        "patient",
        || world(Temper::Patient),
        PATIENT,
        PctScheduler::new(PCT_INTERRUPTIONS, PCT_SCHEDULES),
        None,
    );
}

#[test]
fn hasty_ranks_never_take_a_foreign_number() {
    explore("hasty", || world(Temper::Hasty), HASTY, RandomScheduler::new(SCHEDULES), None);
}

#[test]
fn hasty_ranks_never_take_a_foreign_number_with_few_interruptions() {
    let outcomes = &["dispatched", "combined", "late"];
    explore(
        "hasty",
        || world(Temper::Hasty),
        outcomes,
        PctScheduler::new(PCT_INTERRUPTIONS, PCT_SCHEDULES),
        None,
    );
}

/// With a fixed seed, so that it cannot pass by bad luck.
fn planted(run: fn(), bug: Bug) {
    explore("planted", run, &[], RandomScheduler::new_from_seed(1, SCHEDULES), Some(bug));
}

#[test]
#[should_panic(expected = "deadlock")]
fn going_to_sleep_without_a_look_is_found() {
    planted(|| world(Temper::Patient), Bug::ParkUnchecked);
}

#[test]
#[should_panic(expected = "nobody is missed")]
fn signals_of_all_phases_in_one_line_are_found() {
    planted(|| world(Temper::Patient), Bug::OneSignalLine);
}

/// The rest of the barrier has two defences against foreign numbers, the writer's word and the look at the own standing, and
/// one is enough in this model (`loom_phase.rs` breaks each where it alone counts). So here the rank itself does what
/// it must not.
#[test]
#[should_panic(expected = "foreign number")]
fn going_on_with_those_who_are_late_is_found() {
    let run = || world(Temper::Reckless);
    explore("reckless", run, &[], RandomScheduler::new_from_seed(1, SCHEDULES), None);
}

/// Posts and beds as in `loom_phase.rs`; `tokens[owner][writer]` and `backs[worker][owner]` hold the dispatch's phase.
struct Host {
    posts: Vec<Vec<AtomicU64>>,
    beds: Vec<(Mutex<()>, Condvar)>,
    tokens: Vec<Vec<AtomicU64>>,
    backs: Vec<Vec<AtomicU64>>,
}

#[derive(Clone)]
struct Shared(Arc<Host>);

impl Posts for Shared {
    fn post(&self, rank: Rank) -> &[AtomicU64] {
        &self.0.posts[rank.index()]
    }

    fn wake(&self, rank: Rank) {
        let (bed, awake) = &self.0.beds[rank.index()];
        let _lock = bed.lock().unwrap();
        awake.notify_all();
    }
}

/// Patient ranks sleep for as long as it takes; hasty ones poll for a while and give up.
struct Waiter {
    shared: Shared,
    me: Rank,
    polls_left: Option<u32>,
}

impl Wait for Waiter {
    fn next(&mut self) -> Next {
        match &mut self.polls_left {
            None => Next::Sleep,
            Some(0) => Next::GiveUp,
            Some(left) => {
                *left -= 1;
                thread::yield_now();
                if *left & 1 == 0 { Next::Poll } else { Next::Look }
            }
        }
    }

    fn sleep(&mut self, bell: &AtomicU64, seen_bell: u64) {
        let (bed, awake) = &self.shared.0.beds[self.me.index()];
        let lock = bed.lock().unwrap();
        if bell.load(Ordering::Relaxed) == seen_bell {
            seen("slept");
            drop(awake.wait(lock).unwrap());
        }
    }
}

/// How a rank takes it when others do not come.
#[derive(Clone, Copy, PartialEq)]
enum Temper {
    /// Waits for ever.
    Patient,
    /// Leaves them behind, or waits a little more.
    Hasty,
    /// Takes what they have not written yet.
    Reckless,
}

fn world(temper: Temper) {
    let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let words = PhaseBarrier::<Shared>::words(RANKS);
    let shared = Shared(Arc::new(Host {
        posts: (0..RANKS).map(|_| zeros(words)).collect(),
        beds: (0..RANKS).map(|_| (Mutex::new(()), Condvar::new())).collect(),
        tokens: (0..RANKS).map(|_| zeros(RANKS)).collect(),
        backs: (0..RANKS).map(|_| zeros(RANKS)).collect(),
    }));
    PhaseBarrier::found(&shared, RANKS);
    let threads: Vec<_> = (0..RANKS as u32)
        .map(|rank| {
            let shared = shared.clone();
            thread::spawn(move || live(&shared, Rank(rank), temper))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A rank's life. Hasty ranks come back once they notice that they were left out, unless nobody is there to let them in.
fn live(shared: &Shared, me: Rank, temper: Temper) {
    let hasty = temper != Temper::Patient;
    let mut side = PhaseBarrier::new(shared.clone(), me, RANKS);
    let waiter = |polls| Waiter { shared: shared.clone(), me, polls_left: hasty.then_some(polls) };
    for _ in 0..STEPS {
        match step(shared, &side, temper, &waiter) {
            Ok(()) => {}
            Err(_) => {
                seen("excluded");
                side.wish();
                if side.enter(&mut waiter(40)).is_err() {
                    return seen("gave up");
                }
                seen("rejoined");
            }
        }
    }
}

fn step(
    shared: &Shared,
    side: &PhaseBarrier<Shared>,
    temper: Temper,
    waiter: &impl Fn(u32) -> Waiter,
) -> Result<(), WaitError> {
    let Host { tokens, backs, .. } = &*shared.0;
    let (me, hasty) = (side.me(), temper != Temper::Patient);
    let wait = |phase| loop {
        let polls = if hasty { thread_rng().gen_range(0..12) } else { 0 };
        match side.wait(phase, &mut waiter(polls)) {
            Err(WaitError::Missing(ranks)) => {
                seen("late");
                if temper == Temper::Reckless {
                    let members = side.roll(phase)?.members;
                    return Ok(Met { members, sends: members, gives: members });
                }
                if thread_rng().gen_bool(0.5) {
                    side.exclude(ranks);
                }
            }
            other => return other,
        }
    };
    let dispatch = side.phase() + 1;
    let members = side.roll(dispatch)?.members;
    for rank in members.iter() {
        tokens[rank.index()][me.index()].store(dispatch, Ordering::Relaxed);
    }
    assert_eq!(side.arrive(members, RankSet::EMPTY), dispatch);
    let met = wait(dispatch)?;
    assert!(hasty || met.sends == RankSet::first(RANKS), "nobody is missed");
    for source in met.sends.iter() {
        assert_eq!(tokens[me.index()][source.index()].load(Ordering::Relaxed), dispatch, "foreign number");
        backs[me.index()][source.index()].store(dispatch, Ordering::Relaxed);
    }
    seen("dispatched");
    let roll = side.roll(dispatch + 1)?;
    side.admit(roll, Entry { phase: dispatch + 2, odd_step: false });
    let met = {
        let phase = side.arrive(RankSet::EMPTY, met.sends);
        wait(phase)?
    };
    for worker in met.gives.and(members).iter() {
        assert_eq!(backs[worker.index()][me.index()].load(Ordering::Relaxed), dispatch, "foreign number");
    }
    seen("combined");
    Ok(())
}
