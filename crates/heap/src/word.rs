//! [`AtomicWord`]: the header word in shared memory, and its transitions.
//!
//! ```text
//!              begin(e′ > e)            publish(e′)
//!   FREE(e) ───────────────▶ WRITING(e′) ─────────▶ READY(e′)
//!     ▲ │ fence_epoch: FREE(e′)   │ kill                │ kill
//!     │ └──▶                      ▼                     ▼
//!     └───────── free ────────── DEAD(e′) ◀─────────────┘
//! ```
//!
//! The epoch is the version of the bytes and the slot's fence: the owner refuses a late begin, with an epoch that the
//! slot has seen or passed. A **copy** is the exception: the node restores a record from its disk, in its old
//! version.
//!
//! ```text
//!   FREE(e) ── begin_copy(v), any v ──▶ WRITING(v) ──▶ READY(v) ──▶ DEAD(v) ── free_at_least(v, e) ──▶ FREE(max(v,
//! e))
//! ```
//!
//! Copies are sound for three reasons. A version is never used twice for different objects, so READY(v) in a slot
//! means the same bytes whenever a reader that names an object and its version finds it there, and digests are bound
//! to both. The fence is not lost: while the copy exists no begin finds the slot FREE, and afterwards the word has
//! the old fence again, which the owner kept meanwhile ([`EpochFences`](crate::epoch_fence::EpochFences)). Only the
//! node itself begins copies, so no other process can hold a grant for one.
//!
//! A commit takes two steps from WRITING to READY: it closes the word (DEAD) for a moment, so that no claim can be
//! granted, scans for claims, and then publishes or reopens the word. The word cannot change otherwise meanwhile,
//! because the owner holds its lock.
//!
//! Only the owner calls these functions. Every transition is a compare-and-swap from the exact old word, takes the
//! epoch as an argument, and returns the word that it found if it fails.

use moontide_rt::sync::{AtomicU64, Ordering};
use moontide_rt::{mutation_enabled, weakened};
use moontide_types::Epoch;
use moontide_types::record::{State, Word};

use crate::mutation::Mutation;

/// Result of an attempted transition.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// The word changed; this is the old word.
    Done(Word),
    /// The word already had the new value.
    Already,
    /// The current word does not allow the transition; this is the current word.
    Refused(Word),
}

impl Transition {
    /// Returns whether the word now has the requested value.
    pub fn succeeded(self) -> bool {
        !matches!(self, Transition::Refused(_))
    }
}

/// Header word in shared memory: all processes may load it, only the owner changes it.
#[derive(Debug)]
#[repr(transparent)]
pub struct AtomicWord(AtomicU64);

impl AtomicWord {
    /// Creates a word outside of shared memory, for models.
    pub fn new(word: Word) -> AtomicWord {
        AtomicWord(AtomicU64::new(word.bits()))
    }

    /// Loads the word. Acquire: a thread that sees READY sees the bytes; pairs with the Release in [`Self::publish`].
    #[inline]
    pub fn load(&self) -> Word {
        Word::from_bits(self.0.load(weakened(Mutation::RelaxedLoad, Ordering::Acquire)))
    }

    /// Stores `word` unconditionally: for a word outside of a header table that no other thread touches at this time.
    /// Release: a thread that sees this word sees the stores before it.
    pub fn set(&self, word: Word) {
        self.0.store(word.bits(), Ordering::Release);
    }

    /// FREE(e) → WRITING(epoch), if `epoch` is newer than any the slot has seen.
    pub fn begin(&self, epoch: Epoch) -> Transition {
        let new = Word::new(epoch, State::Writing);
        let is_new = |old: Word| old.epoch() < epoch || mutation_enabled(Mutation::LateBegin);
        self.change(new, |old| old.state() == State::Free && is_new(old))
    }

    /// FREE(e) → WRITING(version), for any e: a copy of a record that was written before. The caller keeps
    /// e, which is in the returned word, for [`Self::free_at_least`]. Fails for a retired slot and for version 0.
    pub(crate) fn begin_copy(&self, version: Epoch) -> Transition {
        let new = Word::new(version, State::Writing);
        let usable = |old: Word| old.epoch() != Epoch::MAX && version != Epoch::ZERO;
        self.change(new, |old| old.state() == State::Free && usable(old))
    }

    /// FREE(e) → FREE(epoch): a reservation was cancelled before its begin, so a late begin must fail.
    pub fn fence_epoch(&self, epoch: Epoch) -> Transition {
        let new = Word::new(epoch, State::Free);
        self.change(new, |old| old.state() == State::Free && old.epoch() < epoch)
    }

    /// WRITING(epoch) → READY(epoch), when no process can hold a claim. Payload and header must be complete.
    pub fn publish(&self, epoch: Epoch) -> Transition {
        if mutation_enabled(Mutation::EpochIgnored) {
            let old = self.load();
            return match old.state() {
                State::Writing => self.swap_exact(old, old.with_state(State::Ready), Ordering::Release),
                _ => Transition::Refused(old),
            };
        }
        // Release: the bytes become visible before the word; pairs with the Acquire in `load`.
        let order = weakened(Mutation::RelaxedPublish, Ordering::Release);
        self.swap_exact(Word::new(epoch, State::Writing), Word::new(epoch, State::Ready), order)
    }

    /// WRITING(epoch) or READY(epoch) → DEAD(epoch). Does not depend on readers: they keep their pins, and no new
    /// reader gets one.
    pub fn kill(&self, epoch: Epoch) -> Transition {
        let new = Word::new(epoch, State::Dead);
        self.change(new, |old| old.epoch() == epoch && matches!(old.state(), State::Writing | State::Ready))
    }

    /// DEAD(epoch) → FREE(epoch). No ledger may pin the slot: see [`PinSet`](crate::PinSet).
    #[cfg_attr(
        not(any(test, loom, shuttle)),
        expect(dead_code, reason = "the owner frees through its epoch fences")
    )]
    pub(crate) fn free(&self, epoch: Epoch) -> Transition {
        self.free_at_least(epoch, epoch)
    }

    /// DEAD(epoch) → FREE(epoch or `fence`, whichever is higher). As [`Self::free`] otherwise.
    pub(crate) fn free_at_least(&self, epoch: Epoch, fence: Epoch) -> Transition {
        // AcqRel: the reads that the scan saw end happen before the writes of the next owner.
        let order = weakened(Mutation::RelaxedFree, Ordering::AcqRel);
        self.swap_exact(Word::new(epoch, State::Dead), Word::new(epoch.max(fence), State::Free), order)
    }

    /// WRITING(epoch) → DEAD(epoch), during a commit: see [`close_claims`](crate::cell::close_claims).
    pub(crate) fn close(&self, epoch: Epoch) -> Transition {
        self.swap_exact(Word::new(epoch, State::Writing), Word::new(epoch, State::Dead), Ordering::AcqRel)
    }

    /// DEAD(epoch) → WRITING(epoch): the commit is abandoned.
    pub(crate) fn reopen(&self, epoch: Epoch) -> Transition {
        self.swap_exact(Word::new(epoch, State::Dead), Word::new(epoch, State::Writing), Ordering::AcqRel)
    }

    /// DEAD(epoch) → READY(epoch), of a word that the caller has closed. As [`Self::publish`] otherwise.
    pub(crate) fn publish_closed(&self, epoch: Epoch) -> Transition {
        // Release: the bytes become visible before the word; pairs with the Acquire in `load`.
        let order = weakened(Mutation::RelaxedPublish, Ordering::Release);
        self.swap_exact(Word::new(epoch, State::Dead), Word::new(epoch, State::Ready), order)
    }

    fn change(&self, new: Word, allowed: impl Fn(Word) -> bool) -> Transition {
        let mut old = self.load();
        loop {
            if old == new {
                return Transition::Already;
            }
            if !allowed(old) {
                return Transition::Refused(old);
            }
            // AcqRel: accesses under the old word happen before accesses under the new one.
            match self.swap_exact(old, new, Ordering::AcqRel) {
                Transition::Refused(seen) => old = seen,
                done => return done,
            }
        }
    }

    fn swap_exact(&self, old: Word, new: Word, success: Ordering) -> Transition {
        if mutation_enabled(Mutation::CheckThenStore) && self.load() == old {
            self.0.store(new.bits(), Ordering::Release);
            return Transition::Done(old);
        }
        match self.0.compare_exchange(old.bits(), new.bits(), success, Ordering::Acquire) {
            Ok(_) => Transition::Done(old),
            Err(seen) if seen == new.bits() => Transition::Already,
            Err(seen) => Transition::Refused(Word::from_bits(seen)),
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use State::{Dead, Free, Ready, Writing};

    fn epoch(bits: u64) -> Epoch {
        Epoch::from_bits(bits).unwrap()
    }

    fn word(bits: u64, state: State) -> Word {
        Word::new(epoch(bits), state)
    }

    #[test]
    fn every_state_allows_only_its_own_transitions() {
        type TransitionFn = fn(&AtomicWord, Epoch) -> Transition;
        let transitions: [(&str, TransitionFn); 9] = [
            ("begin", AtomicWord::begin),
            ("begin_copy", AtomicWord::begin_copy),
            ("fence_epoch", AtomicWord::fence_epoch),
            ("publish", AtomicWord::publish),
            ("kill", AtomicWord::kill),
            ("free", AtomicWord::free),
            ("close", AtomicWord::close),
            ("reopen", AtomicWord::reopen),
            ("publish_closed", AtomicWord::publish_closed),
        ];
        // From a word at epoch 5: for each transition with epochs 4, 5 and 6, the resulting word.
        let target = |name: &str, from: State, at: u64| match (name, from, at) {
            ("begin", Free, 6) => Some(word(6, Writing)),
            ("begin_copy", Free, at) => Some(word(at, Writing)),
            ("fence_epoch", Free, 6) => Some(word(6, Free)),
            ("publish", Writing, 5) => Some(word(5, Ready)),
            ("kill", Writing | Ready, 5) => Some(word(5, Dead)),
            ("free", Dead, 5) => Some(word(5, Free)),
            ("close", Writing, 5) => Some(word(5, Dead)),
            ("reopen", Dead, 5) => Some(word(5, Writing)),
            ("publish_closed", Dead, 5) => Some(word(5, Ready)),
            _ => None,
        };
        // A transition to the current word is not an error.
        let already = |name: &str, from: State, at: u64| {
            let goal = match name {
                "begin" | "begin_copy" | "reopen" => Writing,
                "fence_epoch" | "free" => Free,
                "publish" | "publish_closed" => Ready,
                _kill_or_close => Dead,
            };
            at == 5 && from == goal
        };
        for (name, transition) in transitions {
            for from in [Free, Writing, Ready, Dead] {
                for at in [4, 5, 6] {
                    let atomic = AtomicWord::new(word(5, from));
                    let got = transition(&atomic, epoch(at));
                    let expected = match target(name, from, at) {
                        Some(_) => Transition::Done(word(5, from)),
                        None if already(name, from, at) => Transition::Already,
                        None => Transition::Refused(word(5, from)),
                    };
                    assert_eq!(got, expected, "{name}({at}) from {from:?}(5)");
                    assert_eq!(atomic.load(), target(name, from, at).unwrap_or(word(5, from)));
                }
            }
        }
    }

    #[test]
    fn slot_at_max_epoch_is_never_reused() {
        let atomic = AtomicWord::new(Word::new(Epoch::MAX, Free));
        assert!(!atomic.begin(epoch(1)).succeeded());
        assert!(matches!(atomic.begin(Epoch::MAX), Transition::Refused(_)));
        assert!(matches!(atomic.begin_copy(epoch(1)), Transition::Refused(_)), "copies are refused too");
    }

    #[test]
    fn copy_with_version_zero_is_refused() {
        let atomic = AtomicWord::new(word(5, Free));
        assert_eq!(atomic.begin_copy(Epoch::ZERO), Transition::Refused(word(5, Free)));
    }

    #[test]
    fn dead_word_is_freed_at_higher_of_epoch_and_fence() {
        for (fence, at) in [(4, 5), (5, 5), (8, 8)] {
            let atomic = AtomicWord::new(word(5, Dead));
            assert_eq!(atomic.free_at_least(epoch(6), epoch(fence)), Transition::Refused(word(5, Dead)));
            assert_eq!(atomic.free_at_least(epoch(5), epoch(fence)), Transition::Done(word(5, Dead)));
            assert_eq!(atomic.load(), word(at, Free));
        }
    }
}
