//! [`Floors`]: what fences a slot off against late begins while an older version stands in it.
//!
//! A word has one epoch, which is two things: the version of the bytes, and the fence below which no begin is let in.
//! For a record that is new these are the same, because a new version is above all that the slot has seen. A copy of
//! an older version (it comes back from disk) lies below its slot's fence:
//!
//! ```text
//!   FREE(7) ── begin_copy(3) ──▶ WRITING(3) ──▶ READY(3) ──▶ DEAD(3) ── free ──▶ FREE(7)
//!              └─ floor: 7 ─────────────────────────────────────────────────────┘
//! ```
//!
//! While the copy is there nothing begins, since the slot is not FREE. When it is gone the word says again what it
//! said before, so a late begin with an epoch up to the floor is refused as if the copy had never been.
//!
//! Invariant: a slot is in the map ⇒ it is not FREE and its floor is at least its word's epoch. Without an entry the
//! word's own epoch is the fence.
#![cfg_attr(not(any(loom, shuttle)), expect(unreachable_pub, reason = "model builds show it to their tests"))]

use std::collections::HashMap;

use moontide_types::{Epoch, SlotId};

use crate::planted::{Bug, planted};
use crate::word::{AtomicWord, Transition};

/// The floors of a segment's slots. The owner changes it together with the words, under its lock.
#[derive(Debug, Default)]
pub struct Floors {
    /// Only slots whose word does not say it.
    above: HashMap<SlotId, Epoch>,
}

impl Floors {
    /// FREE(e) → WRITING(version), whatever their order; e is the floor until the slot is free again.
    pub fn begin_copy(&mut self, slot: SlotId, word: &AtomicWord, version: Epoch) -> Transition {
        let begun = word.begin_copy(version);
        if let Transition::Done(old) = begun
            && old.epoch() >= version
        {
            self.above.insert(slot, old.epoch());
        }
        begun
    }

    /// A reservation of `epoch` was cancelled: FREE(e) → FREE(epoch), or, where a copy stands below its slot's floor, the
    /// floor rises, so that the reservation does not begin after the copy is gone. The word of a slot that is taken is
    /// refused all the same: the caller may have to do with the record that is there.
    pub fn burn(&mut self, slot: SlotId, word: &AtomicWord, epoch: Epoch) -> Transition {
        let burnt = word.burn(epoch);
        if let Transition::Refused(_) = burnt
            && let Some(floor) = self.above.get_mut(&slot)
        {
            *floor = epoch.max(*floor);
        }
        burnt
    }

    /// DEAD(version) → FREE(version or the floor, whichever is higher). No ledger may name the slot.
    pub fn free(&mut self, slot: SlotId, word: &AtomicWord, version: Epoch) -> Transition {
        let floor = match self.above.get(&slot) {
            Some(&floor) if !planted(Bug::FloorForgotten) => floor,
            _ => version,
        };
        let freed = word.free_above(version, floor);
        if freed.holds() {
            self.above.remove(&slot);
        }
        freed
    }

    /// How many slots have a floor of their own.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests make sure that nothing is left behind"))]
    pub fn len(&self) -> usize {
        self.above.len()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use State::{Dead, Free, Ready, Writing};
    use moontide_types::record::{State, Word};

    const SLOT: SlotId = SlotId(4);

    fn epoch(bits: u64) -> Epoch {
        Epoch::from_bits(bits).unwrap()
    }

    fn word(bits: u64, state: State) -> Word {
        Word::new(epoch(bits), state)
    }

    /// A copy of `version` comes into a slot at FREE(before), and goes; what the word says then.
    fn there_and_back(before: u64, version: u64, published: bool) -> Word {
        let (mut floors, atomic) = (Floors::default(), AtomicWord::new(word(before, Free)));
        let begun = floors.begin_copy(SLOT, &atomic, epoch(version));
        assert_eq!(begun, Transition::Done(word(before, Free)));
        assert_eq!(atomic.load(), word(version, Writing));
        assert_eq!(floors.begin_copy(SLOT, &atomic, epoch(version)), Transition::Already);
        assert_eq!(
            floors.len(),
            usize::from(version <= before),
            "a floor only where the word does not say it"
        );
        if published {
            assert_eq!(atomic.publish(epoch(version)), Transition::Done(word(version, Writing)));
            let again = floors.begin_copy(SLOT, &atomic, epoch(version));
            assert_eq!(again, Transition::Refused(word(version, Ready)));
        }
        for late in 1..10 {
            assert!(!matches!(atomic.begin(epoch(late)), Transition::Done(_)), "not FREE");
        }
        assert!(atomic.kill(epoch(version)).holds());
        assert_eq!(floors.free(SLOT, &atomic, epoch(version)), Transition::Done(word(version, Dead)));
        assert_eq!(floors.len(), 0, "a floor was left behind");
        atomic.load()
    }

    #[test]
    fn a_copy_leaves_the_fence_where_it_was_or_higher() {
        for published in [false, true] {
            assert_eq!(there_and_back(7, 3, published), word(7, Free));
            assert_eq!(there_and_back(7, 7, published), word(7, Free));
            assert_eq!(there_and_back(7, 9, published), word(9, Free));
            assert_eq!(there_and_back(0, 1, published), word(1, Free));
        }
    }

    #[test]
    fn what_is_burnt_while_a_copy_stands_there_does_not_begin_after_it() {
        for (before, version) in [(7, 3), (3, 3)] {
            let (mut floors, atomic) = (Floors::default(), AtomicWord::new(word(before, Free)));
            assert!(floors.begin_copy(SLOT, &atomic, epoch(version)).holds());
            assert_eq!(floors.burn(SLOT, &atomic, epoch(9)), Transition::Refused(word(version, Writing)));
            assert_eq!(floors.burn(SLOT, &atomic, epoch(8)), Transition::Refused(word(version, Writing)));
            assert_eq!(floors.burn(SLOT, &atomic, epoch(1)), Transition::Refused(word(version, Writing)));
            assert!(atomic.kill(epoch(version)).holds());
            assert!(matches!(floors.free(SLOT, &atomic, epoch(version)), Transition::Done(_)));
            assert_eq!(atomic.begin(epoch(9)), Transition::Refused(word(9, Free)));
            assert_eq!(atomic.begin(epoch(10)), Transition::Done(word(9, Free)));
        }
        // Of a FREE slot it is the word that rises.
        let (mut floors, atomic) = (Floors::default(), AtomicWord::new(word(7, Free)));
        assert_eq!(floors.burn(SLOT, &atomic, epoch(9)), Transition::Done(word(7, Free)));
        assert_eq!((atomic.load(), floors.len()), (word(9, Free), 0));
    }

    #[test]
    fn a_slot_without_a_copy_is_freed_at_its_own_epoch() {
        let (mut floors, atomic) = (Floors::default(), AtomicWord::new(word(7, Dead)));
        assert_eq!(floors.free(SLOT, &atomic, epoch(6)), Transition::Refused(word(7, Dead)));
        assert_eq!(floors.free(SLOT, &atomic, epoch(7)), Transition::Done(word(7, Dead)));
        assert_eq!(atomic.load(), word(7, Free));
    }
}
