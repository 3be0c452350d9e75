//! Who receives on a connection: [`Turn`], and a [`Seat`] for everyone who waits for an answer.
//!
//! A connection's answers are read by one thread at a time. It would be simple to have a thread for that; but then
//! every answer costs a second wake-up, which at 4 KiB is a quarter of a round trip. So whoever waits for an answer
//! and finds nobody receiving takes the turn, receives what comes (for others, too), and hands the turn on when its own
//! answer is there.
//!
//! ```text
//!   take ──▶ Yours ──── receive: finish(seat) … ────▶ leave ──▶ nobody waits: the turn is free
//!     └────▶ Queued ── wait ──▶ Done                    └─────▶ somebody waits: the turn is that one's (Promoted)
//! ```
//!
//! Invariants: at most one thread has the turn; while somebody waits in the queue, somebody has the turn. So whoever
//! waits is woken by its answer, by the turn, or by its own clock. Locks are taken in the order turn, seat.

use std::collections::VecDeque;
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::sync::{Arc, Condvar, Mutex, lock, wait};

/// The right to receive.
#[derive(Debug, Default)]
pub(crate) struct Turn(Mutex<Line>);

#[derive(Debug, Default)]
struct Line {
    taken: bool,
    waiting: VecDeque<Arc<Seat>>,
}

/// Where somebody waits.
#[derive(Debug, Default)]
pub(crate) struct Seat {
    state: Mutex<SeatState>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct SeatState {
    done: bool,
    promoted: bool,
    waker: Option<Waker>,
}

/// What asking for the turn gave.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// The caller has the turn, and must [`Turn::leave`] it.
    Yours,
    /// Somebody else has it; the caller stands in line, and must [`Turn::wait`].
    Queued,
}

/// How a wait ended. In any case the caller stands in line no more.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// What was waited for is there.
    Done,
    /// The caller has the turn, and must [`Turn::leave`] it.
    Promoted,
    /// Its time is over.
    TimedOut,
}

impl Turn {
    /// Takes the turn or stands in line.
    pub(crate) fn take(&self, seat: &Arc<Seat>) -> Asked {
        let mut line = lock(&self.0);
        if line.taken {
            line.waiting.push_back(Arc::clone(seat));
            return Asked::Queued;
        }
        line.taken = true;
        Asked::Yours
    }

    /// Takes the turn if nobody has it.
    pub(crate) fn try_take(&self) -> bool {
        !std::mem::replace(&mut lock(&self.0).taken, true)
    }

    /// Gives the turn to the next in line.
    pub(crate) fn leave(&self) {
        let mut line = lock(&self.0);
        assert!(line.taken, "only who has the turn can leave it");
        while let Some(seat) = line.waiting.pop_front() {
            let mut state = lock(&seat.state);
            if !state.done {
                if planted(Bug::ForgetsTheNext) {
                    break;
                }
                state.promoted = true;
                seat.bell.notify_all();
                return;
            }
        }
        line.taken = false;
    }

    /// Waits in line, after [`Asked::Queued`].
    pub(crate) fn wait(&self, seat: &Arc<Seat>, deadline: Instant) -> Waited {
        let mut state = lock(&seat.state);
        loop {
            if state.promoted {
                state.promoted = false;
                return Waited::Promoted;
            }
            if state.done {
                drop(state);
                return self.step_out(seat, Waited::Done);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                return self.step_out(seat, Waited::TimedOut);
            }
            state = wait(&seat.bell, state, left);
        }
    }

    /// Leaves the line, unless the turn came meanwhile.
    fn step_out(&self, seat: &Arc<Seat>, otherwise: Waited) -> Waited {
        let mut line = lock(&self.0);
        line.waiting.retain(|waiting| !Arc::ptr_eq(waiting, seat));
        // Under the line's lock nobody is promoted, so what is seen here holds.
        let promoted = std::mem::take(&mut lock(&seat.state).promoted);
        if promoted && !planted(Bug::DropsTheTurn) { Waited::Promoted } else { otherwise }
    }
}

impl Seat {
    /// What was waited for is there.
    pub(crate) fn finish(&self) {
        let mut state = lock(&self.state);
        state.done = true;
        let waker = state.waker.take();
        self.bell.notify_all();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether it is there.
    pub(crate) fn is_done(&self) -> bool {
        lock(&self.state).done
    }

    /// Waits until it is there, at most so long.
    #[cfg_attr(shuttle, expect(dead_code, reason = "the model's connections end by themselves"))]
    pub(crate) fn await_done(&self, timeout: Duration) {
        let state = lock(&self.state);
        if !state.done {
            drop(wait(&self.bell, state, timeout));
        }
    }

    /// As [`Seat::is_done`]; if not, `waker` is woken when it is.
    #[cfg_attr(shuttle, expect(dead_code, reason = "the model's callers wait on threads"))]
    pub(crate) fn poll(&self, waker: &Waker) -> bool {
        let mut state = lock(&self.state);
        if !state.done {
            state.waker = Some(waker.clone());
        }
        state.done
    }
}

/// Mistakes that the model switches on, to show that it would find them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// The turn is left, and nobody in line hears of it.
    ForgetsTheNext,
    /// Who gets the turn at the moment its time is over, or its answer comes, drops it.
    DropsTheTurn,
}

#[cfg(not(shuttle))]
fn planted(_: Bug) -> bool {
    false
}

#[cfg(shuttle)]
thread_local!(static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) });

/// Shuttle runs all threads of a model on one thread of the machine.
#[cfg(shuttle)]
fn planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

#[cfg(all(test, shuttle))]
mod model {
    use std::collections::VecDeque;

    use super::*;

    /// A wire on which answers come in the order of the requests, and callers who each wait for one.
    struct Scene {
        turn: Turn,
        wire: Mutex<VecDeque<Arc<Seat>>>,
    }

    impl Scene {
        /// Receives one answer.
        fn receive(&self) {
            let next = lock(&self.wire).pop_front();
            next.expect("whoever receives waits for an answer that has not come").finish();
        }

        /// An impatient caller gives up waiting at once, and asks again.
        fn call(&self, patience: Duration) {
            let seat = Arc::new(Seat::default());
            lock(&self.wire).push_back(Arc::clone(&seat));
            while !seat.is_done() {
                let has_turn = match self.turn.take(&seat) {
                    Asked::Yours => true,
                    Asked::Queued => self.turn.wait(&seat, Instant::now() + patience) == Waited::Promoted,
                };
                if has_turn {
                    while !seat.is_done() {
                        self.receive();
                    }
                    self.turn.leave();
                }
            }
        }
    }

    fn scene() {
        let scene = Arc::new(Scene { turn: Turn::default(), wire: Mutex::default() });
        // An hour: shuttle's bells ring or do not, but no time passes; a lost wake-up is a deadlock, which it reports.
        let hour = Duration::from_secs(3600);
        let callers: Vec<_> = [hour, hour, Duration::ZERO]
            .into_iter()
            .map(|patience| {
                let scene = Arc::clone(&scene);
                shuttle::thread::spawn(move || (0..2).for_each(|_| scene.call(patience)))
            })
            .collect();
        callers.into_iter().for_each(|caller| caller.join().expect("no caller panics"));
        assert!(scene.turn.try_take(), "nobody took the turn away");
    }

    #[test]
    fn every_answer_is_received_and_nobody_is_forgotten() {
        shuttle::check_random(scene, 20_000);
    }

    #[test]
    #[should_panic]
    fn a_turn_that_is_not_handed_on_is_found() {
        PLANTED.set(Some(Bug::ForgetsTheNext));
        shuttle::check_random(scene, 20_000);
    }

    #[test]
    #[should_panic]
    fn a_turn_that_is_dropped_is_found() {
        PLANTED.set(Some(Bug::DropsTheTurn));
        shuttle::check_random(scene, 20_000);
    }
}
