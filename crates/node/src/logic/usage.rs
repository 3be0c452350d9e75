//! [`UsageTracker`]: units of a segment per state, updated as slots change, because a scan of a million headers takes
//! too long for a heartbeat.
//!
//! Transitions may arrive in another order than they happened: threads make them in the heap and record them
//! afterwards. So a recorded transition only ever moves a slot forward, along
//! `WRITING(e) → READY(e) → DEAD(e) → FREE(e) → WRITING(e′ > e)`; a late one is ignored, except for the units of a late
//! WRITING.
//!
//! Invariant: `live + writing + draining + free = all` units, for every order of arrival.

use moontide_types::record::{State, Word};
use moontide_types::{Epoch, SlotId};

/// Units and slots of a segment, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitUsage {
    pub(crate) live_units: u64,
    pub(crate) writing_units: u64,
    pub(crate) draining_units: u64,
    pub(crate) free_units: u64,
    pub(crate) free_slots: u64,
    pub(crate) units: u64,
    pub(crate) slots: u64,
}

impl UnitUsage {
    pub(crate) fn add(&mut self, other: &UnitUsage) {
        self.live_units += other.live_units;
        self.writing_units += other.writing_units;
        self.draining_units += other.draining_units;
        self.free_units += other.free_units;
        self.free_slots += other.free_slots;
        self.units += other.units;
        self.slots += other.slots;
    }
}

/// Usage of one segment.
#[derive(Clone, Debug)]
pub(crate) struct UsageTracker {
    units: u32,
    slots: Vec<SlotUsage>,
    /// By state; for FREE only the slots count.
    sums: [StateTotals; 4],
}

#[derive(Clone, Copy, Debug, Default)]
struct SlotUsage {
    word: Word,
    /// Units of the extent; 0 if not yet known.
    units: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct StateTotals {
    units: u64,
    slots: u64,
}

fn transition_order(word: Word) -> (Epoch, u8) {
    let position = match word.state() {
        State::Writing => 0,
        State::Ready => 1,
        State::Dead => 2,
        State::Free => 3,
    };
    (word.epoch(), position)
}

impl UsageTracker {
    pub(crate) fn new(units: u32, slots: u32) -> UsageTracker {
        let mut sums = [StateTotals::default(); 4];
        sums[State::Free as usize].slots = slots.into();
        UsageTracker { units, slots: vec![SlotUsage::default(); slots as usize], sums }
    }

    /// Records that the slot, which was free, holds a copy of a version that may be older than its previous content. No
    /// transition of the previous content can arrive later: a master assigns a slot only after the report that it is
    /// free, and the node records the transition before it reports.
    pub(crate) fn note_copy(&mut self, slot: SlotId, version: Epoch, units: u32) {
        let new = SlotUsage { word: Word::new(version, State::Writing), units };
        self.replace(slot, |_| new);
    }

    /// Records that the word of a slot has become `word`. `units`: size of its extent, if known.
    pub(crate) fn record(&mut self, slot: SlotId, word: Word, units: Option<u32>) {
        self.replace(slot, |old| UsageTracker::after(old, word, units));
    }

    fn after(old: SlotUsage, word: Word, units: Option<u32>) -> SlotUsage {
        let mut new = old;
        if transition_order(word) > transition_order(old.word) {
            new.word = word;
            if word.epoch() != old.word.epoch() {
                new.units = 0;
            }
        }
        if word.epoch() == new.word.epoch() {
            new.units = units.unwrap_or(new.units);
        }
        if new.word.state() == State::Free {
            new.units = 0;
        }
        new
    }

    fn replace(&mut self, slot: SlotId, by: impl FnOnce(SlotUsage) -> SlotUsage) {
        let Some(usage) = self.slots.get_mut(slot.0 as usize) else { return };
        let old = *usage;
        let new = by(old);
        *usage = new;
        let from = &mut self.sums[old.word.state() as usize];
        (from.units, from.slots) = (from.units - u64::from(old.units), from.slots - 1);
        let to = &mut self.sums[new.word.state() as usize];
        (to.units, to.slots) = (to.units + u64::from(new.units), to.slots + 1);
    }

    pub(crate) fn usage(&self) -> UnitUsage {
        // Extents never overlap in the heap. They may overlap here for a moment, when the FREE of a slot is recorded
        // late and its units already count for another slot: the excess belongs to the late one.
        let mut free = u64::from(self.units);
        let mut of = |state: State| {
            let units = self.sums[state as usize].units.min(free);
            free -= units;
            units
        };
        UnitUsage {
            live_units: of(State::Ready),
            writing_units: of(State::Writing),
            draining_units: of(State::Dead),
            free_units: free,
            free_slots: self.sums[State::Free as usize].slots,
            units: self.units.into(),
            slots: self.slots.len() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(epoch: u64, state: State) -> Word {
        Word::new(Epoch::from_bits(epoch).unwrap(), state)
    }

    fn check(tracker: &UsageTracker, [live, writing, draining]: [u64; 3], free_slots: u64) {
        let usage = tracker.usage();
        assert_eq!([usage.live_units, usage.writing_units, usage.draining_units], [live, writing, draining]);
        assert_eq!(
            usage.live_units + usage.writing_units + usage.draining_units + usage.free_units,
            usage.units
        );
        assert_eq!(usage.free_slots, free_slots);
    }

    #[test]
    fn usage_counts_copy_of_older_version_into_reused_slot() {
        let mut tracker = UsageTracker::new(100, 4);
        let slot = SlotId(2);
        for state in [State::Writing, State::Ready, State::Dead, State::Free] {
            tracker.record(slot, word(9, state), Some(7));
        }
        check(&tracker, [0, 0, 0], 4);
        tracker.note_copy(slot, word(3, State::Writing).epoch(), 5);
        check(&tracker, [0, 5, 0], 3);
        tracker.record(slot, word(3, State::Ready), None);
        check(&tracker, [5, 0, 0], 3);
        tracker.record(slot, word(3, State::Dead), None);
        check(&tracker, [0, 0, 5], 3);
        tracker.record(slot, word(9, State::Free), None);
        check(&tracker, [0, 0, 0], 4);
    }

    #[test]
    fn usage_follows_slot_state_transitions() {
        let mut tracker = UsageTracker::new(100, 4);
        let slot = SlotId(2);
        check(&tracker, [0, 0, 0], 4);
        tracker.record(slot, word(1, State::Writing), Some(9));
        check(&tracker, [0, 9, 0], 3);
        tracker.record(slot, word(1, State::Ready), None);
        check(&tracker, [9, 0, 0], 3);
        tracker.record(slot, word(1, State::Dead), None);
        check(&tracker, [0, 0, 9], 3);
        tracker.record(slot, word(1, State::Free), None);
        check(&tracker, [0, 0, 0], 4);
        tracker.record(slot, word(2, State::Writing), Some(5));
        check(&tracker, [0, 5, 0], 3);
        tracker.record(SlotId(77), word(2, State::Writing), Some(5)); // slot out of range
        check(&tracker, [0, 5, 0], 3);
    }

    /// The result does not depend on the order in which the transitions of two versions of a slot arrive.
    #[test]
    fn usage_is_independent_of_transition_arrival_order() {
        let transitions = [
            (word(1, State::Writing), Some(9)),
            (word(1, State::Ready), None),
            (word(1, State::Dead), None),
            (word(1, State::Free), Some(9)),
            (word(2, State::Writing), Some(7)),
            (word(2, State::Ready), None),
        ];
        let mut order: Vec<usize> = (0..transitions.len()).collect();
        permutations(&mut order, 0, &mut |order| {
            let mut tracker = UsageTracker::new(100, 1);
            for &at in order {
                tracker.record(SlotId(0), transitions[at].0, transitions[at].1);
                let usage = tracker.usage();
                let sum = usage.live_units + usage.writing_units + usage.draining_units + usage.free_units;
                assert_eq!(sum, 100);
            }
            check(&tracker, [7, 0, 0], 0);
        });
    }

    #[test]
    fn units_reused_before_free_is_recorded_count_once() {
        let mut tracker = UsageTracker::new(10, 2);
        tracker.record(SlotId(0), word(1, State::Writing), Some(10));
        tracker.record(SlotId(0), word(1, State::Dead), None);
        // Slot 0 is already free; the transition is recorded later.
        tracker.record(SlotId(1), word(2, State::Writing), Some(8));
        check(&tracker, [0, 8, 2], 0);
        tracker.record(SlotId(0), word(1, State::Free), None);
        check(&tracker, [0, 8, 0], 1);
    }

    fn permutations(order: &mut Vec<usize>, from: usize, visit: &mut impl FnMut(&[usize])) {
        if from == order.len() {
            return visit(order);
        }
        for at in from..order.len() {
            order.swap(from, at);
            permutations(order, from + 1, visit);
            order.swap(from, at);
        }
    }
}
