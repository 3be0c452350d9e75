//! [`EpochFences`]: keeps the fence of a slot while it holds a copy of an older version.
//!
//! A word has one epoch with two meanings: the version of the bytes, and the fence below which no begin succeeds. For
//! a new record the two are equal, because a new version is above all that the slot has seen. A copy of an older
//! version (restored from disk) is below its slot's fence:
//!
//! ```text
//!   FREE(7) ── begin_copy(3) ──▶ WRITING(3) ──▶ READY(3) ──▶ DEAD(3) ── free ──▶ FREE(7)
//!              └─ fence: 7 ─────────────────────────────────────────────────────┘
//! ```
//!
//! While the copy exists no begin succeeds, since the slot is not FREE. When the copy is gone the word has its
//! previous value, so a late begin with an epoch up to the fence fails as if the copy had never existed.
//!
//! Invariant: a slot in the map is not FREE, and its fence is at least its word's epoch. For a slot without an entry
//! the word's own epoch is the fence.
#![cfg_attr(not(any(loom, shuttle)), expect(unreachable_pub, reason = "model builds show it to their tests"))]

use std::collections::HashMap;

use moontide_rt::mutation_enabled;
use moontide_types::{Epoch, SlotId};

use crate::mutation::Mutation;
use crate::word::{AtomicWord, Transition};

/// Fences of a segment's slots. The owner changes them together with the words, under its lock.
#[derive(Debug, Default)]
pub struct EpochFences {
    /// Only slots whose fence is not their word's epoch.
    fences: HashMap<SlotId, Epoch>,
}

impl EpochFences {
    /// FREE(e) → WRITING(version), for any e. The fence is e until the slot is FREE again.
    pub fn begin_copy(&mut self, slot: SlotId, word: &AtomicWord, version: Epoch) -> Transition {
        let begun = word.begin_copy(version);
        if let Transition::Done(old) = begun
            && old.epoch() >= version
        {
            self.fences.insert(slot, old.epoch());
        }
        begun
    }

    /// Cancels a reservation of `epoch`: FREE(e) → FREE(epoch). If the slot holds a copy below its fence, raises the
    /// fence instead, so that the reservation cannot begin after the copy is gone. The transition is `Refused` for
    /// any slot that is not FREE, also if the fence rose: the caller may have to handle the record in it.
    pub fn fence_epoch(&mut self, slot: SlotId, word: &AtomicWord, epoch: Epoch) -> Transition {
        let fenced = word.fence_epoch(epoch);
        if let Transition::Refused(_) = fenced
            && let Some(fence) = self.fences.get_mut(&slot)
        {
            *fence = epoch.max(*fence);
        }
        fenced
    }

    /// DEAD(version) → FREE(version or the fence, whichever is higher). No ledger may pin the slot.
    pub fn free(&mut self, slot: SlotId, word: &AtomicWord, version: Epoch) -> Transition {
        let fence = match self.fences.get(&slot) {
            Some(&fence) if !mutation_enabled(Mutation::FenceForgotten) => fence,
            _ => version,
        };
        let freed = word.free_at_least(version, fence);
        if freed.succeeded() {
            self.fences.remove(&slot);
        }
        freed
    }

    /// Returns the number of slots with a separate fence.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests check that no fence is left over"))]
    pub fn len(&self) -> usize {
        self.fences.len()
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

    /// Begins and frees a copy of `version` in a slot at FREE(before), and returns the resulting word.
    fn free_after_copy(before: u64, version: u64, published: bool) -> Word {
        let (mut fences, atomic) = (EpochFences::default(), AtomicWord::new(word(before, Free)));
        let begun = fences.begin_copy(SLOT, &atomic, epoch(version));
        assert_eq!(begun, Transition::Done(word(before, Free)));
        assert_eq!(atomic.load(), word(version, Writing));
        assert_eq!(fences.begin_copy(SLOT, &atomic, epoch(version)), Transition::Already);
        assert_eq!(
            fences.len(),
            usize::from(version <= before),
            "a fence is kept only if it differs from the word's epoch"
        );
        if published {
            assert_eq!(atomic.publish(epoch(version)), Transition::Done(word(version, Writing)));
            let again = fences.begin_copy(SLOT, &atomic, epoch(version));
            assert_eq!(again, Transition::Refused(word(version, Ready)));
        }
        for late in 1..10 {
            assert!(
                !matches!(atomic.begin(epoch(late)), Transition::Done(_)),
                "begin succeeded in a used slot"
            );
        }
        assert!(atomic.kill(epoch(version)).succeeded());
        assert_eq!(fences.free(SLOT, &atomic, epoch(version)), Transition::Done(word(version, Dead)));
        assert_eq!(fences.len(), 0, "fence left over");
        atomic.load()
    }

    #[test]
    fn free_after_copy_keeps_or_raises_epoch_fence() {
        for published in [false, true] {
            assert_eq!(free_after_copy(7, 3, published), word(7, Free));
            assert_eq!(free_after_copy(7, 7, published), word(7, Free));
            assert_eq!(free_after_copy(7, 9, published), word(9, Free));
            assert_eq!(free_after_copy(0, 1, published), word(1, Free));
        }
    }

    #[test]
    fn epoch_fenced_during_a_copy_stays_fenced_after_free() {
        for (before, version) in [(7, 3), (3, 3)] {
            let (mut fences, atomic) = (EpochFences::default(), AtomicWord::new(word(before, Free)));
            assert!(fences.begin_copy(SLOT, &atomic, epoch(version)).succeeded());
            assert_eq!(
                fences.fence_epoch(SLOT, &atomic, epoch(9)),
                Transition::Refused(word(version, Writing))
            );
            assert_eq!(
                fences.fence_epoch(SLOT, &atomic, epoch(8)),
                Transition::Refused(word(version, Writing))
            );
            assert_eq!(
                fences.fence_epoch(SLOT, &atomic, epoch(1)),
                Transition::Refused(word(version, Writing))
            );
            assert!(atomic.kill(epoch(version)).succeeded());
            assert!(matches!(fences.free(SLOT, &atomic, epoch(version)), Transition::Done(_)));
            assert_eq!(atomic.begin(epoch(9)), Transition::Refused(word(9, Free)));
            assert_eq!(atomic.begin(epoch(10)), Transition::Done(word(9, Free)));
        }
        // In a FREE slot the word itself rises.
        let (mut fences, atomic) = (EpochFences::default(), AtomicWord::new(word(7, Free)));
        assert_eq!(fences.fence_epoch(SLOT, &atomic, epoch(9)), Transition::Done(word(7, Free)));
        assert_eq!((atomic.load(), fences.len()), (word(9, Free), 0));
    }

    #[test]
    fn slot_without_copy_is_freed_at_own_epoch() {
        let (mut fences, atomic) = (EpochFences::default(), AtomicWord::new(word(7, Dead)));
        assert_eq!(fences.free(SLOT, &atomic, epoch(6)), Transition::Refused(word(7, Dead)));
        assert_eq!(fences.free(SLOT, &atomic, epoch(7)), Transition::Done(word(7, Dead)));
        assert_eq!(atomic.load(), word(7, Free));
    }
}
