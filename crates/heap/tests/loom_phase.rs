//! Every interleaving of small models of the phase barrier, and every reordering that the memory model allows, on the
//! shipped code, as in `loom.rs`: each model without a bug, when it must pass, and with each bug that it is there to find.
//!
//! Ranks exchange numbers as the expert exchange does: each writes into a place of its own in the other's memory, and
//! reads what was written for it on the writer's word. The places are plain memory, so that loom finds every pair of
//! accesses that nothing orders. A futex is a lock and a condition variable; a wake-up that is lost is a deadlock,
//! which loom reports.
#![cfg(loom)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use moontide_heap::model::{Bug, with_planted};
use moontide_heap::{Entry, Next, PhaseBarrier, Posts, Rank, RankSet, Wait, WaitError};

/// How often threads may be interrupted. With up to three, the models have between 10² and 10⁵ interleavings.
const PREEMPTIONS_MAX: usize = 3;

thread_local! {
    /// How often each outcome came about. loom runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

/// A model: what its threads do, and what must have come about in some interleaving.
struct Model {
    run: fn(),
    outcomes: &'static [&'static str],
}

fn check(name: &str, model: &Model, bug: Option<Bug>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.max_branches = 10_000;
    let run = model.run;
    SEEN.take();
    with_planted(bug, || {
        builder.check(move || {
            seen("interleavings");
            run();
        });
    });
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if bug.is_none() {
        let never: Vec<_> = model.outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "in no interleaving: {never:?}");
    }
}

/// For each model its test, then a test per bug that must fail in it, and how.
macro_rules! models {
    ($($test:ident: $model:expr, { $($twin:ident: $bug:ident => $message:expr,)* })*) => { $(
        #[test]
        fn $test() {
            check(stringify!($test), &$model, None);
        }
        $(
            #[test]
            #[should_panic(expected = $message)]
            fn $twin() {
                check(stringify!($twin), &$model, Some(Bug::$bug));
            }
        )*
    )* };
}

models! {
    who_has_met_sees_what_was_written_before:
        Model { run: || exchange(1), outcomes: &["met", "slept"] }, {
        arriving_without_release_is_found: RelaxedArrival => "Causality violation",
        looking_out_without_acquire_is_found: RelaxedLookout => "Causality violation",
        signalling_without_a_fence_is_found: ArrivalFenceMissing => "deadlock",
        going_to_sleep_without_a_fence_is_found: ParkFenceMissing => "deadlock",
        going_to_sleep_without_a_look_is_found: ParkUnchecked => "deadlock",
    }
    a_place_is_written_again_only_when_it_has_been_read:
        Model { run: || exchange(2), outcomes: &["met", "slept"] }, {
        signals_of_all_phases_in_one_line_are_found: OneSignalLine => "nobody is missed",
    }
    who_is_left_out_learns_it:
        Model { run: left_out, outcomes: &["met", "late", "excluded"] }, {
        not_looking_whether_one_is_left_out_is_found: ExclusionUnnoticed => "left out, and not told",
    }
    who_is_given_nothing_takes_nothing:
        Model { run: given_nothing, outcomes: &["heard nothing"] }, {
        taking_everyones_word_for_granted_is_found: WordIgnored => "foreign number",
    }
    who_comes_back_waits_for_the_end_of_the_step:
        Model { run: comes_back, outcomes: &["let in", "read the old", "read the new"] }, {
        coming_back_in_the_middle_of_a_step_is_found: EntryUnmet => "Causality violation",
    }
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_barrier_a_step_is_too_few_for_one_buffer() {
    let model = Model { run: || crossing(Buffers::One), outcomes: &[] };
    check("one barrier, one buffer", &model, None);
}

#[test]
fn one_barrier_a_step_is_enough_for_two_buffers() {
    check("one barrier, two buffers", &Model { run: || crossing(Buffers::Two), outcomes: &["met"] }, None);
}

#[derive(Clone, Copy, PartialEq)]
enum Buffers {
    One,
    Two,
}

/// Posts in ordinary memory, and a bed for each rank.
struct Host {
    posts: Vec<Vec<AtomicU64>>,
    beds: Vec<(Mutex<()>, Condvar)>,
    /// `places[owner][writer][buffer]`
    places: Vec<Vec<[UnsafeCell<u64>; 2]>>,
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

/// Goes to sleep at once, for as long as it takes.
struct Sleeper(Shared, Rank);

impl Wait for Sleeper {
    fn next(&mut self) -> Next {
        Next::Sleep
    }

    fn sleep(&mut self, bell: &AtomicU64, seen_bell: u64) {
        let (bed, awake) = &self.0.0.beds[self.1.index()];
        let lock = bed.lock().unwrap();
        // What the kernel does: compares and sleeps in one go.
        if bell.load(loom::sync::atomic::Ordering::Relaxed) == seen_bell {
            seen("slept");
            drop(awake.wait(lock).unwrap());
        }
    }
}

/// Has no patience at all.
struct Hasty;

impl Wait for Hasty {
    fn next(&mut self) -> Next {
        Next::GiveUp
    }

    fn sleep(&mut self, _bell: &AtomicU64, _seen: u64) {
        unreachable!("gives up first")
    }
}

const RANKS: usize = 2;
const BOTH: fn() -> RankSet = || RankSet::first(RANKS);

fn host() -> Shared {
    let words = PhaseBarrier::<Shared>::words(RANKS);
    let shared = Shared(Arc::new(Host {
        posts: (0..RANKS).map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()).collect(),
        beds: (0..RANKS).map(|_| (Mutex::new(()), Condvar::new())).collect(),
        places: (0..RANKS)
            .map(|_| (0..RANKS).map(|_| [UnsafeCell::new(0), UnsafeCell::new(0)]).collect())
            .collect(),
    }));
    PhaseBarrier::found(&shared, RANKS);
    shared
}

impl Shared {
    fn side(&self, rank: u32) -> PhaseBarrier<Shared> {
        PhaseBarrier::new(self.clone(), Rank(rank), RANKS)
    }

    fn write(&self, owner: usize, writer: usize, buffer: usize, number: u64) {
        // SAFETY: loom checks what this line must not do: touch the place while another does.
        self.0.places[owner][writer][buffer].with_mut(|place| unsafe { *place = number });
    }

    fn read(&self, owner: usize, writer: usize, buffer: usize) -> u64 {
        // SAFETY: as above.
        self.0.places[owner][writer][buffer].with(|place| unsafe { *place })
    }
}

/// Both ranks run `steps` steps: dispatch a number, read the other's, return, barrier.
fn exchange(steps: u64) {
    let shared = host();
    let rank = move |me: usize, shared: Shared| {
        let (side, other) = (shared.side(me as u32), 1 - me);
        let mut sleeper = Sleeper(shared.clone(), Rank(me as u32));
        for step in 1..=steps {
            shared.write(other, me, 0, step);
            let phase = side.arrive(BOTH(), RankSet::EMPTY);
            let met = side.wait(phase, &mut sleeper).unwrap();
            assert_eq!(met.sends, BOTH(), "nobody is missed");
            assert_eq!(shared.read(me, other, 0), step, "foreign number");
            seen("met");
            if step < steps {
                let phase = side.arrive(RankSet::EMPTY, BOTH());
                side.wait(phase, &mut sleeper).unwrap();
            }
        }
    };
    let there = shared.clone();
    let thread = thread::spawn(move || rank(1, there));
    rank(0, shared);
    thread.join().unwrap();
}

/// Two steps with one barrier each: what is right with two buffers and wrong with one.
fn crossing(buffers: Buffers) {
    let shared = host();
    let rank = move |me: usize, shared: Shared| {
        let (side, other) = (shared.side(me as u32), 1 - me);
        let mut sleeper = Sleeper(shared.clone(), Rank(me as u32));
        for step in 1..=2 {
            let buffer = if buffers == Buffers::Two { step as usize & 1 } else { 0 };
            shared.write(other, me, buffer, step);
            let phase = side.arrive(BOTH(), BOTH());
            side.wait(phase, &mut sleeper).unwrap();
            assert_eq!(shared.read(me, other, buffer), step, "foreign number");
            seen("met");
        }
    };
    let there = shared.clone();
    let thread = thread::spawn(move || rank(1, there));
    rank(0, shared);
    thread.join().unwrap();
}

/// Rank 0 has no patience and goes on without rank 1 if that is not there at once; rank 1 must be told before it uses what
/// rank 0 did not make for it.
fn left_out() {
    let shared = host();
    let there = shared.clone();
    let late = thread::spawn(move || {
        let side = there.side(1);
        let mut sleeper = Sleeper(there.clone(), Rank(1));
        there.write(0, 1, 0, 7);
        let phase = side.arrive(BOTH(), RankSet::EMPTY);
        if side.wait(phase, &mut sleeper).is_err() {
            return true;
        }
        let phase = side.arrive(RankSet::EMPTY, BOTH());
        match side.wait(phase, &mut sleeper) {
            Ok(met) if met.gives.contains(Rank(0)) => {
                // Only then is there something to read: twice what we sent.
                assert_eq!(there.read(1, 0, 0), 14, "foreign number");
                false
            }
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error, WaitError::Excluded);
                true
            }
        }
    });
    let side = shared.side(0);
    let phase = side.arrive(BOTH(), RankSet::EMPTY);
    let met = match side.wait(phase, &mut Hasty) {
        Ok(met) => met,
        Err(_) => {
            seen("late");
            side.exclude(RankSet::only(Rank(1)));
            side.wait(phase, &mut Hasty).unwrap()
        }
    };
    let is_left_out = !met.members.contains(Rank(1));
    if met.sends.contains(Rank(1)) {
        seen("met");
        let number = shared.read(0, 1, 0);
        shared.write(1, 0, 0, 2 * number);
    }
    side.arrive(RankSet::EMPTY, met.sends);
    let is_told = late.join().unwrap();
    assert_eq!(is_told, is_left_out, "left out, and not told");
    if is_told {
        seen("excluded");
    }
}

/// Rank 0 takes part, but gives up its step: it has nothing for rank 1, whose tokens it got.
fn given_nothing() {
    let shared = host();
    let there = shared.clone();
    let other = thread::spawn(move || {
        let side = there.side(0);
        let mut sleeper = Sleeper(there.clone(), Rank(0));
        for _ in 0..2 {
            let phase = side.arrive(BOTH(), RankSet::EMPTY);
            side.wait(phase, &mut sleeper).unwrap();
        }
    });
    let side = shared.side(1);
    let mut sleeper = Sleeper(shared.clone(), Rank(1));
    let phase = side.arrive(BOTH(), RankSet::EMPTY);
    side.wait(phase, &mut sleeper).unwrap();
    let phase = side.arrive(RankSet::EMPTY, BOTH());
    let met = side.wait(phase, &mut sleeper).unwrap();
    match met.gives.contains(Rank(0)) {
        true => assert_eq!(shared.read(1, 0, 0), 14, "foreign number"),
        false => seen("heard nothing"),
    }
    other.join().unwrap();
}

/// Rank 1 sent something and died; another comes in its place while rank 0 is still working on what its predecessor sent.
fn comes_back() {
    let shared = host();
    let predecessor = shared.side(1);
    shared.write(0, 1, 0, 7);
    predecessor.arrive(BOTH(), RankSet::EMPTY);
    drop(predecessor);
    let there = shared.clone();
    let successor = thread::spawn(move || {
        let mut side = there.side(1);
        side.wish();
        let mut sleeper = Sleeper(there.clone(), Rank(1));
        let entry = side.enter(&mut sleeper).unwrap();
        seen("let in");
        assert_eq!(entry.phase, side.phase() + 1);
        there.write(0, 1, 0, 8);
        let phase = side.arrive(BOTH(), RankSet::EMPTY);
        side.wait(phase, &mut sleeper).unwrap();
    });
    let side = shared.side(0);
    let mut sleeper = Sleeper(shared.clone(), Rank(0));
    let phase = side.arrive(BOTH(), RankSet::EMPTY);
    let met = side.wait(phase, &mut sleeper).unwrap();
    // It may have been put out by its successor's wish before we looked.
    let read_old = met.sends.contains(Rank(1));
    // Lets it in with its arrival in the return's phase, as a channel does, as soon as it wishes.
    let roll = loop {
        let roll = side.roll(phase + 1).unwrap();
        if !roll.wishing.is_empty() {
            break roll;
        }
        thread::yield_now();
    };
    side.admit(roll, Entry { phase: phase + 2, odd_step: false });
    if read_old {
        seen("read the old");
        assert_eq!(shared.read(0, 1, 0), 7, "foreign number");
    }
    let phase = side.arrive(RankSet::EMPTY, met.sends);
    side.wait(phase, &mut sleeper).unwrap();
    let phase = side.arrive(BOTH(), RankSet::EMPTY);
    let met = side.wait(phase, &mut sleeper).unwrap();
    assert!(met.sends.contains(Rank(1)), "it was let in with this phase");
    assert_eq!(shared.read(0, 1, 0), 8, "foreign number");
    seen("read the new");
    successor.join().unwrap();
}
