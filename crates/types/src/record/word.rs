//! The header word: version and state of a slot.
//!
//! ```text
//!   bit 63 ──────────────────────────────── 2 │ 1 0
//!        epoch:62  (term:22 | sequence:40)    │ state:2
//! ```
//!
//! Only the owner of the segment changes it, by compare-and-swap from the exact old word. It contains no reader
//! count: readers publish the slot in their own ledger instead. A zeroed slot reads as FREE(0).

use std::fmt;

use crate::ids::Epoch;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// The slot is empty; the epoch is that of its last record.
    Free = 0,
    /// A writer may hold a claim and fill the payload.
    Writing = 1,
    /// The record is complete and immutable.
    Ready = 2,
    /// No new reader may pin the slot; existing guards remain valid until they are dropped.
    Dead = 3,
}

/// Header word: `epoch:62 | state:2`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct Word(u64);

impl Word {
    const STATE_BITS: u32 = 2;
    const STATE_MASK: u64 = (1 << Self::STATE_BITS) - 1;

    /// Combines epoch and state.
    pub const fn new(epoch: Epoch, state: State) -> Word {
        Word(epoch.bits() << Self::STATE_BITS | state as u64)
    }

    /// Converts the stored form. Every `u64` is valid: all 62 bits of epoch and all four states have a meaning.
    pub const fn from_bits(bits: u64) -> Word {
        Word(bits)
    }

    /// Returns the stored form.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns the version.
    pub const fn epoch(self) -> Epoch {
        match Epoch::from_bits(self.0 >> Self::STATE_BITS) {
            Ok(epoch) => epoch,
            Err(_) => unreachable!(), // 64 − 2 bits always fit
        }
    }

    /// Returns the state.
    pub const fn state(self) -> State {
        match self.0 & Self::STATE_MASK {
            0 => State::Free,
            1 => State::Writing,
            2 => State::Ready,
            _ => State::Dead,
        }
    }

    /// Returns a word with the same version and another state.
    pub const fn with_state(self, state: State) -> Word {
        Word(self.0 & !Self::STATE_MASK | state as u64)
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({})", self.state(), self.epoch())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_parts_round_trip() {
        for state in [State::Free, State::Writing, State::Ready, State::Dead] {
            for bits in [0, 1, 1 << 40, Epoch::MAX.bits()] {
                let epoch = Epoch::from_bits(bits).unwrap();
                let word = Word::new(epoch, state);
                assert_eq!((word.epoch(), word.state()), (epoch, state));
                assert_eq!(word.with_state(State::Dead), Word::new(epoch, State::Dead));
            }
        }
        assert_eq!(Word::from_bits(0), Word::new(Epoch::ZERO, State::Free), "zeroed memory is free");
    }
}
