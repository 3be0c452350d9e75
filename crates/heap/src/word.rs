//! [`AtomicWord`]: the header word in shared memory, and its transitions.
//!
//! ```text
//!              begin(e′ > e)            publish(e′)
//!   FREE(e) ───────────────▶ WRITING(e′) ─────────▶ READY(e′)
//!     ▲ │ burn: FREE(e′)          │ kill                │ kill
//!     │ └──▶                      ▼                     ▼
//!     └───────── free ────────── DEAD(e′) ◀─────────────┘
//! ```
//!
//! The epoch is the version of the bytes and the slot's fence: a begin that comes late, with an epoch that the slot has
//! seen or passed, is refused. A **copy** is the exception: the node puts back what it had on disk, in its old version.
//!
//! ```text
//!   FREE(e) ── begin_copy(v), any v ──▶ WRITING(v) ──▶ READY(v) ──▶ DEAD(v) ── free_above(v, e) ──▶ FREE(max(v, e))
//! ```
//!
//! Why this is sound. A version is never used twice for different objects, so READY(v) in a slot means the same bytes
//! whenever a reader that names an object and its version finds it there, and digests are bound to both. The fence is
//! not lost: while the copy is there no begin finds the slot FREE, and after that the word is at the old fence again,
//! which the owner kept meanwhile ([`Floors`](crate::floor::Floors)). And only the node itself begins copies, so nobody
//! else can hold a grant for one.
//!
//! A commit goes the long way from WRITING to READY: it shuts the word (DEAD) for a moment, so that no claim
//! can be granted, looks for claims, and then publishes or opens the word again. Nobody else changes the word
//! meanwhile: the owner holds its lock.
//!
//! Only the owner calls these. Every transition is a compare-and-swap from the exact old word, names its
//! epoch, and says what it found when it could not be made.

use moontide_types::Epoch;
use moontide_types::record::{State, Word};

use crate::planted::{Bug, planted, weakened};
use crate::sync::{AtomicU64, Ordering};

/// What became of an attempted transition.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// The word changed; this is what it was before.
    Done(Word),
    /// It had been made before: nothing to do.
    Already,
    /// The word does not allow it; this is what it is.
    Refused(Word),
}

impl Transition {
    /// Whether the word is now as wanted.
    pub fn holds(self) -> bool {
        !matches!(self, Transition::Refused(_))
    }
}

/// A header word that several processes may look at and one may change.
#[derive(Debug)]
#[repr(transparent)]
pub struct AtomicWord(AtomicU64);

impl AtomicWord {
    /// A word outside of shared memory, for models.
    pub fn new(word: Word) -> AtomicWord {
        AtomicWord(AtomicU64::new(word.bits()))
    }

    /// The word now. Acquire: whoever sees READY sees the bytes; pairs with the Release in [`Self::publish`].
    #[inline]
    pub fn load(&self) -> Word {
        Word::from_bits(self.0.load(weakened(Bug::RelaxedLook, Ordering::Acquire)))
    }

    /// Whatever it was: for a [`Flag`](crate::Flag), which nobody else touches then. Release: what was stored before is
    /// seen by whoever sees this.
    pub(crate) fn set(&self, word: Word) {
        self.0.store(word.bits(), Ordering::Release);
    }

    /// FREE(e) → WRITING(epoch), if `epoch` is newer than any the slot has seen.
    pub fn begin(&self, epoch: Epoch) -> Transition {
        let new = Word::new(epoch, State::Writing);
        let is_new = |old: Word| old.epoch() < epoch || planted(Bug::LateBegin);
        self.change(new, |old| old.state() == State::Free && is_new(old))
    }

    /// FREE(e) → WRITING(version), whatever the order of the two: a copy of what was written before. The caller keeps e,
    /// which is in the word that is returned, for [`Self::free_above`]. A retired slot stays retired, and no version is 0.
    pub(crate) fn begin_copy(&self, version: Epoch) -> Transition {
        let new = Word::new(version, State::Writing);
        let usable = |old: Word| old.epoch() != Epoch::MAX && version != Epoch::ZERO;
        self.change(new, |old| old.state() == State::Free && usable(old))
    }

    /// FREE(e) → FREE(epoch): a reservation was cancelled before it began, so a late begin must be refused.
    pub fn burn(&self, epoch: Epoch) -> Transition {
        let new = Word::new(epoch, State::Free);
        self.change(new, |old| old.state() == State::Free && old.epoch() < epoch)
    }

    /// WRITING(epoch) → READY(epoch), where nobody can hold a claim. Payload and header must be in place.
    pub fn publish(&self, epoch: Epoch) -> Transition {
        if planted(Bug::EpochIgnored) {
            let old = self.load();
            return match old.state() {
                State::Writing => self.swap_exact(old, old.with_state(State::Ready), Ordering::Release),
                _ => Transition::Refused(old),
            };
        }
        // Release: the bytes become visible before the word; pairs with the Acquire in `load`.
        let order = weakened(Bug::RelaxedPublish, Ordering::Release);
        self.swap_exact(Word::new(epoch, State::Writing), Word::new(epoch, State::Ready), order)
    }

    /// WRITING(epoch) or READY(epoch) → DEAD(epoch). Unconditional as far as readers are concerned: they keep
    /// what they hold, and none may enter.
    pub fn kill(&self, epoch: Epoch) -> Transition {
        let new = Word::new(epoch, State::Dead);
        self.change(new, |old| old.epoch() == epoch && matches!(old.state(), State::Writing | State::Ready))
    }

    /// DEAD(epoch) → FREE(epoch). No ledger may name the slot: see [`Pins`](crate::Pins).
    #[cfg_attr(
        not(any(test, loom, shuttle)),
        expect(dead_code, reason = "the owner frees through its floors")
    )]
    pub(crate) fn free(&self, epoch: Epoch) -> Transition {
        self.free_above(epoch, epoch)
    }

    /// DEAD(epoch) → FREE(epoch or `floor`, whichever is higher). As [`Self::free`] otherwise.
    pub(crate) fn free_above(&self, epoch: Epoch, floor: Epoch) -> Transition {
        // AcqRel: what the scan saw happens before what the next owner does.
        let order = weakened(Bug::RelaxedFree, Ordering::AcqRel);
        self.swap_exact(Word::new(epoch, State::Dead), Word::new(epoch.max(floor), State::Free), order)
    }

    /// WRITING(epoch) → DEAD(epoch), for the moment of a commit: see [`shut_out_claims`](crate::cell::shut_out_claims).
    pub(crate) fn shut(&self, epoch: Epoch) -> Transition {
        self.swap_exact(Word::new(epoch, State::Writing), Word::new(epoch, State::Dead), Ordering::AcqRel)
    }

    /// DEAD(epoch) → WRITING(epoch): the commit is not to be.
    pub(crate) fn open_again(&self, epoch: Epoch) -> Transition {
        self.swap_exact(Word::new(epoch, State::Dead), Word::new(epoch, State::Writing), Ordering::AcqRel)
    }

    /// DEAD(epoch) → READY(epoch), of a word that the caller has shut. As [`Self::publish`] otherwise.
    pub(crate) fn publish_shut(&self, epoch: Epoch) -> Transition {
        // Release: the bytes become visible before the word; pairs with the Acquire in `load`.
        let order = weakened(Bug::RelaxedPublish, Ordering::Release);
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
            // AcqRel: what was done under the old word happens before what is done under the new one.
            match self.swap_exact(old, new, Ordering::AcqRel) {
                Transition::Refused(seen) => old = seen,
                made => return made,
            }
        }
    }

    fn swap_exact(&self, old: Word, new: Word, success: Ordering) -> Transition {
        if planted(Bug::CheckThenStore) && self.load() == old {
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
        type Try = fn(&AtomicWord, Epoch) -> Transition;
        let tries: [(&str, Try); 9] = [
            ("begin", AtomicWord::begin),
            ("begin_copy", AtomicWord::begin_copy),
            ("burn", AtomicWord::burn),
            ("publish", AtomicWord::publish),
            ("kill", AtomicWord::kill),
            ("free", AtomicWord::free),
            ("shut", AtomicWord::shut),
            ("open_again", AtomicWord::open_again),
            ("publish_shut", AtomicWord::publish_shut),
        ];
        // From a word at epoch 5: for each transition naming epochs 4, 5 and 6, the word it leads to.
        let leads = |name: &str, from: State, named: u64| match (name, from, named) {
            ("begin", Free, 6) => Some(word(6, Writing)),
            ("begin_copy", Free, named) => Some(word(named, Writing)),
            ("burn", Free, 6) => Some(word(6, Free)),
            ("publish", Writing, 5) => Some(word(5, Ready)),
            ("kill", Writing | Ready, 5) => Some(word(5, Dead)),
            ("free", Dead, 5) => Some(word(5, Free)),
            ("shut", Writing, 5) => Some(word(5, Dead)),
            ("open_again", Dead, 5) => Some(word(5, Writing)),
            ("publish_shut", Dead, 5) => Some(word(5, Ready)),
            _ => None,
        };
        // Asking for what is already so is not an error.
        let already = |name: &str, from: State, named: u64| {
            let wanted = match name {
                "begin" | "begin_copy" | "open_again" => Writing,
                "burn" | "free" => Free,
                "publish" | "publish_shut" => Ready,
                _kill_or_shut => Dead,
            };
            named == 5 && from == wanted
        };
        for (name, transition) in tries {
            for from in [Free, Writing, Ready, Dead] {
                for named in [4, 5, 6] {
                    let atomic = AtomicWord::new(word(5, from));
                    let got = transition(&atomic, epoch(named));
                    let expected = match leads(name, from, named) {
                        Some(_) => Transition::Done(word(5, from)),
                        None if already(name, from, named) => Transition::Already,
                        None => Transition::Refused(word(5, from)),
                    };
                    assert_eq!(got, expected, "{name}({named}) from {from:?}(5)");
                    assert_eq!(atomic.load(), leads(name, from, named).unwrap_or(word(5, from)));
                }
            }
        }
    }

    #[test]
    fn a_slot_at_the_largest_epoch_retires() {
        let atomic = AtomicWord::new(Word::new(Epoch::MAX, Free));
        assert!(!atomic.begin(epoch(1)).holds());
        assert!(matches!(atomic.begin(Epoch::MAX), Transition::Refused(_)));
        assert!(matches!(atomic.begin_copy(epoch(1)), Transition::Refused(_)), "for copies, too");
    }

    #[test]
    fn nothing_is_of_version_zero() {
        let atomic = AtomicWord::new(word(5, Free));
        assert_eq!(atomic.begin_copy(Epoch::ZERO), Transition::Refused(word(5, Free)));
    }

    #[test]
    fn a_word_is_freed_at_the_higher_of_epoch_and_floor() {
        for (floor, at) in [(4, 5), (5, 5), (8, 8)] {
            let atomic = AtomicWord::new(word(5, Dead));
            assert_eq!(atomic.free_above(epoch(6), epoch(floor)), Transition::Refused(word(5, Dead)));
            assert_eq!(atomic.free_above(epoch(5), epoch(floor)), Transition::Done(word(5, Dead)));
            assert_eq!(atomic.load(), word(at, Free));
        }
    }
}
