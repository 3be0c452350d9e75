//! [`Rooms`]: which ranges and slots of a staging segment are in whose hands.
//!
//! ```text
//!              take                    (published, killed)
//!   vacant ──────────▶ a Room ───────────────────────────▶ draining
//!     ▲                  │ give (never published)            │ sweep: its word says FREE
//!     └──────────────────┴───────────────────────────────────┘
//! ```
//!
//! A room is a range and a slot, and goes from hand to hand as a whole: the range is not given out before the slot is
//! FREE, and a slot is FREE only after a scan has found no ledger that names it ([`scan`](crate::cell::scan)). So
//! whoever has a room is alone with its bytes: a late reader either still names the slot, and then the room drains,
//! or it is refused by the word.
//!
//! Invariants: every slot is vacant, or in one room, or draining; rooms do not overlap.
#![cfg_attr(not(any(loom, shuttle)), expect(unreachable_pub, reason = "model builds show it to their tests"))]

use std::num::NonZeroU32;

use moontide_types::record::State;
use moontide_types::{Extent, SlotId};

use crate::alloc::{Align, Allocation, Allocator};
use crate::planted::{Bug, planted};
use crate::word::AtomicWord;

/// A slot and a range that belong together. There is one of it: it is given back once.
#[derive(Debug)]
pub struct Room {
    slot: SlotId,
    allocation: Allocation,
}

impl Room {
    /// The slot under which it is published.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// The range, from a multiple of 4 KiB.
    pub fn extent(&self) -> Extent {
        self.allocation.extent
    }
}

/// The books of one segment.
#[derive(Debug)]
pub struct Rooms {
    allocator: Allocator,
    vacant: Vec<SlotId>,
    /// Published once and killed since, in the order in which they were.
    draining: Vec<Room>,
    slots: u32,
}

impl Rooms {
    /// All of it vacant.
    pub fn new(slots: u32, units: u32) -> Rooms {
        let mut allocator = Allocator::new(units);
        allocator.reserve_live(slots);
        // The lowest slot is taken first.
        Rooms { allocator, vacant: (0..slots).rev().map(SlotId).collect(), draining: Vec::new(), slots }
    }

    /// A room of `units`; `None`: no slot, or no range of this length, is vacant.
    pub fn take(&mut self, units: NonZeroU32) -> Option<Room> {
        let slot = *self.vacant.last()?;
        let allocation = self.allocator.alloc(units, Align::Page)?;
        self.vacant.pop();
        Some(Room { slot, allocation })
    }

    /// Takes back a room that was never published: nobody else has seen it.
    pub fn give(&mut self, room: Room) {
        self.allocator.free(room.allocation.block);
        self.vacant.push(room.slot);
    }

    /// Takes back a room that was published, and killed since. It is vacant after a [`Rooms::sweep`] that finds its
    /// slot FREE.
    pub fn drain(&mut self, room: Room) {
        self.draining.push(room);
    }

    /// Makes vacant what has drained: how many rooms. `word` gives the word of a slot. Only the holder of a room begins
    /// in its slot, so one that is draining stays FREE once it is. The look at the word is an Acquire, which pairs with
    /// the Release of its freeing: what its last reader did happens before what the next holder does.
    pub fn sweep<'w>(&mut self, word: impl Fn(SlotId) -> &'w AtomicWord) -> usize {
        let is_free =
            |room: &mut Room| word(room.slot).load().state() == State::Free || planted(Bug::RoomWhileNamed);
        let drained: Vec<Room> = self.draining.extract_if(.., is_free).collect();
        let count = drained.len();
        drained.into_iter().for_each(|room| self.give(room));
        count
    }

    /// Units that are vacant.
    pub fn free_units(&self) -> u32 {
        self.allocator.stats().free_units
    }

    /// Rooms in somebody's hands, published or not.
    pub fn held(&self) -> usize {
        self.slots as usize - self.vacant.len() - self.draining.len()
    }

    /// Rooms that were killed and not yet swept.
    pub fn draining(&self) -> usize {
        self.draining.len()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use moontide_types::Epoch;
    use moontide_types::record::Word;

    fn units(units: u32) -> NonZeroU32 {
        NonZeroU32::new(units).unwrap()
    }

    #[test]
    fn slots_and_ranges_run_out_apart() {
        let mut rooms = Rooms::new(2, 64);
        let first = rooms.take(units(8)).unwrap();
        assert!(rooms.take(units(64)).is_none(), "no such range");
        assert_eq!((rooms.held(), rooms.free_units()), (1, 56), "a refusal takes nothing");
        let second = rooms.take(units(8)).unwrap();
        assert!(rooms.take(units(8)).is_none(), "no slot");
        assert_ne!(first.slot(), second.slot());
        assert_ne!(first.extent(), second.extent());
        rooms.give(first);
        assert!(rooms.take(units(8)).is_some());
    }

    #[test]
    fn a_room_is_vacant_when_its_word_is_free() {
        let word = AtomicWord::new(Word::new(Epoch::from_bits(3).unwrap(), State::Dead));
        let mut rooms = Rooms::new(1, 8);
        let room = rooms.take(units(8)).unwrap();
        rooms.drain(room);
        assert_eq!((rooms.sweep(|_| &word), rooms.held(), rooms.draining()), (0, 0, 1));
        assert!(rooms.take(units(8)).is_none());
        assert!(word.free(Epoch::from_bits(3).unwrap()).holds());
        assert_eq!((rooms.sweep(|_| &word), rooms.draining(), rooms.free_units()), (1, 0, 8));
        assert!(rooms.take(units(8)).is_some());
    }
}
