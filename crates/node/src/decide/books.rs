//! [`Books`]: how many units of a segment are in which state, kept as its slots change, because a scan of a million
//! headers is too much for a heartbeat.
//!
//! Changes may arrive in another order than they happened in: threads make them at the heap and note them afterwards. So
//! a note only ever moves a slot forward, along `WRITING(e) → READY(e) → DEAD(e) → FREE(e) → WRITING(e′ > e)`; what comes
//! late is passed over. Only the units of a late WRITING are still of use.
//!
//! Invariant: `live + writing + draining + free = all` units, whatever comes in whatever order.

use moontide_types::record::{State, Word};
use moontide_types::{Epoch, SlotId};

/// Units and slots of a segment, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub live_units: u64,
    pub writing_units: u64,
    pub draining_units: u64,
    pub free_units: u64,
    pub free_slots: u64,
    pub units: u64,
    pub slots: u64,
}

impl Usage {
    pub fn add(&mut self, other: &Usage) {
        self.live_units += other.live_units;
        self.writing_units += other.writing_units;
        self.draining_units += other.draining_units;
        self.free_units += other.free_units;
        self.free_slots += other.free_slots;
        self.units += other.units;
        self.slots += other.slots;
    }
}

/// One segment's.
#[derive(Clone, Debug)]
pub struct Books {
    units: u32,
    slots: Vec<Note>,
    /// By state; of FREE only slots count.
    sums: [Sum; 4],
}

#[derive(Clone, Copy, Debug, Default)]
struct Note {
    word: Word,
    /// 0: not known yet.
    units: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    units: u64,
    slots: u64,
}

fn rank(word: Word) -> (Epoch, u8) {
    let age = match word.state() {
        State::Writing => 0,
        State::Ready => 1,
        State::Dead => 2,
        State::Free => 3,
    };
    (word.epoch(), age)
}

impl Books {
    pub fn new(units: u32, slots: u32) -> Books {
        let mut sums = [Sum::default(); 4];
        sums[State::Free as usize].slots = slots.into();
        Books { units, slots: vec![Note::default(); slots as usize], sums }
    }

    /// The slot, which was free, holds a copy of a version that may be older than what was there before. Nothing comes late
    /// of that: a master gives a slot out when it was told that it is free, and that was noted first.
    pub fn note_copy(&mut self, slot: SlotId, version: Epoch, units: u32) {
        let new = Note { word: Word::new(version, State::Writing), units };
        self.replace(slot, |_| new);
    }

    /// The slot's word has become this. `units`: of its extent, where that is known.
    pub fn note(&mut self, slot: SlotId, word: Word, units: Option<u32>) {
        self.replace(slot, |old| Books::after(old, word, units));
    }

    fn after(old: Note, word: Word, units: Option<u32>) -> Note {
        let mut new = old;
        if rank(word) > rank(old.word) {
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

    fn replace(&mut self, slot: SlotId, by: impl FnOnce(Note) -> Note) {
        let Some(note) = self.slots.get_mut(slot.0 as usize) else { return };
        let old = *note;
        let new = by(old);
        *note = new;
        let from = &mut self.sums[old.word.state() as usize];
        (from.units, from.slots) = (from.units - u64::from(old.units), from.slots - 1);
        let to = &mut self.sums[new.word.state() as usize];
        (to.units, to.slots) = (to.units + u64::from(new.units), to.slots + 1);
    }

    pub fn usage(&self) -> Usage {
        // The heap lets no two extents overlap. Here two may for a moment, when a slot's note is late and its units are
        // noted for another one already: what is too much is the late one's.
        let mut free = u64::from(self.units);
        let mut of = |state: State| {
            let units = self.sums[state as usize].units.min(free);
            free -= units;
            units
        };
        Usage {
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

    fn check(books: &Books, [live, writing, draining]: [u64; 3], free_slots: u64) {
        let usage = books.usage();
        assert_eq!([usage.live_units, usage.writing_units, usage.draining_units], [live, writing, draining]);
        assert_eq!(
            usage.live_units + usage.writing_units + usage.draining_units + usage.free_units,
            usage.units
        );
        assert_eq!(usage.free_slots, free_slots);
    }

    #[test]
    fn an_older_version_comes_back_into_a_slot() {
        let mut books = Books::new(100, 4);
        let slot = SlotId(2);
        for state in [State::Writing, State::Ready, State::Dead, State::Free] {
            books.note(slot, word(9, state), Some(7));
        }
        check(&books, [0, 0, 0], 4);
        books.note_copy(slot, word(3, State::Writing).epoch(), 5);
        check(&books, [0, 5, 0], 3);
        books.note(slot, word(3, State::Ready), None);
        check(&books, [5, 0, 0], 3);
        books.note(slot, word(3, State::Dead), None);
        check(&books, [0, 0, 5], 3);
        books.note(slot, word(9, State::Free), None);
        check(&books, [0, 0, 0], 4);
    }

    #[test]
    fn a_slot_goes_round() {
        let mut books = Books::new(100, 4);
        let slot = SlotId(2);
        check(&books, [0, 0, 0], 4);
        books.note(slot, word(1, State::Writing), Some(9));
        check(&books, [0, 9, 0], 3);
        books.note(slot, word(1, State::Ready), None);
        check(&books, [9, 0, 0], 3);
        books.note(slot, word(1, State::Dead), None);
        check(&books, [0, 0, 9], 3);
        books.note(slot, word(1, State::Free), None);
        check(&books, [0, 0, 0], 4);
        books.note(slot, word(2, State::Writing), Some(5));
        check(&books, [0, 5, 0], 3);
        books.note(SlotId(77), word(2, State::Writing), Some(5)); // of no segment
        check(&books, [0, 5, 0], 3);
    }

    /// Every order in which the notes of two lives of a slot can arrive ends the same.
    #[test]
    fn notes_in_any_order_lead_to_the_same() {
        let notes = [
            (word(1, State::Writing), Some(9)),
            (word(1, State::Ready), None),
            (word(1, State::Dead), None),
            (word(1, State::Free), Some(9)),
            (word(2, State::Writing), Some(7)),
            (word(2, State::Ready), None),
        ];
        let mut order: Vec<usize> = (0..notes.len()).collect();
        permutations(&mut order, 0, &mut |order| {
            let mut books = Books::new(100, 1);
            for &at in order {
                books.note(SlotId(0), notes[at].0, notes[at].1);
                let usage = books.usage();
                let sum = usage.live_units + usage.writing_units + usage.draining_units + usage.free_units;
                assert_eq!(sum, 100);
            }
            check(&books, [7, 0, 0], 0);
        });
    }

    #[test]
    fn units_that_are_noted_twice_for_a_moment_count_once() {
        let mut books = Books::new(10, 2);
        books.note(SlotId(0), word(1, State::Writing), Some(10));
        books.note(SlotId(0), word(1, State::Dead), None);
        // The first is free already, which is noted later.
        books.note(SlotId(1), word(2, State::Writing), Some(8));
        check(&books, [0, 8, 2], 0);
        books.note(SlotId(0), word(1, State::Free), None);
        check(&books, [0, 8, 0], 1);
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
