//! [`Queue`]: records in the order in which they came, linked through themselves, with a hand for eviction.
//!
//! ```text
//!   first (oldest) ⇄ … ⇄ last (newest)        next points to the newer neighbour, prev to the older one
//!              hand ──▶                        moves towards newer ones, then starts again at the oldest
//! ```
//!
//! Eviction is SIEVE: the hand passes over a record that was used since the last time and takes away its mark,
//! without moving it; it takes the first one that was not used. Compared with moving used records to the back
//! (CLOCK, second chance) a new record that nobody uses is met soon after it came, instead of one lap later, and a
//! use costs one bit. Compared with S3-FIFO there is no second queue and no memory of what was evicted: 0 bytes per
//! object instead of about 8. What decides in a cache of prompt prefixes is that blocks written once and never read
//! again leave first, which both give.
//!
//! Invariant: `hand` is a record of the queue, or none.

use crate::record::NONE;
use crate::slab::{Ref, Slab};

/// A list through the records' `prev` and `next`.
#[derive(Debug)]
pub(crate) struct Queue {
    first: u32,
    last: u32,
    hand: u32,
    len: u64,
}

impl Default for Queue {
    fn default() -> Queue {
        Queue { first: NONE, last: NONE, hand: NONE, len: 0 }
    }
}

impl Queue {
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn first(&self) -> Option<Ref> {
        Ref::from_number(self.first)
    }

    /// Adds a record as the newest.
    pub(crate) fn push(&mut self, slab: &mut Slab, at: Ref) {
        let record = slab.get_mut(at);
        (record.prev, record.next) = (self.last, NONE);
        match Ref::from_number(self.last) {
            Some(last) => slab.get_mut(last).next = at.number(),
            None => self.first = at.number(),
        }
        self.last = at.number();
        self.len += 1;
    }

    /// Takes a record out; the hand moves on if it stood there.
    pub(crate) fn unlink(&mut self, slab: &mut Slab, at: Ref) {
        let (prev, next) = (slab.get(at).prev(), slab.get(at).next());
        let number = |at: Option<Ref>| at.map_or(NONE, Ref::number);
        match prev {
            Some(prev) => slab.get_mut(prev).next = number(next),
            None => self.first = number(next),
        }
        match next {
            Some(next) => slab.get_mut(next).prev = number(prev),
            None => self.last = number(prev),
        }
        if self.hand == at.number() {
            self.hand = number(next);
        }
        self.len -= 1;
    }

    /// The record that was called `old` is called `new` now; its links came with it.
    pub(crate) fn renamed(&mut self, slab: &mut Slab, old: Ref, new: Ref) {
        let (prev, next) = (slab.get(new).prev(), slab.get(new).next());
        match prev {
            Some(prev) => slab.get_mut(prev).next = new.number(),
            None => self.first = new.number(),
        }
        match next {
            Some(next) => slab.get_mut(next).prev = new.number(),
            None => self.last = new.number(),
        }
        if self.hand == old.number() {
            self.hand = new.number();
        }
    }

    /// The record under the hand, which then moves on.
    pub(crate) fn advance(&mut self, slab: &Slab) -> Option<Ref> {
        let at = Ref::from_number(self.hand).or(Ref::from_number(self.first))?;
        self.hand = slab.get(at).next;
        Some(at)
    }

    /// All records, oldest first.
    pub(crate) fn iter<'a>(&self, slab: &'a Slab) -> impl Iterator<Item = Ref> + use<'a> {
        std::iter::successors(self.first(), move |&at| slab.get(at).next())
    }
}
