//! [`Queue`]: records in insertion order, linked through the records.
//!
//! ```text
//!   first (oldest) ⇄ … ⇄ last (newest)        next points to the newer neighbour, prev to the older one
//! ```

use crate::ids::{NONE, RecordRef};
use crate::slab::Slab;

/// A list through the records' `prev` and `next`.
#[derive(Debug)]
pub(crate) struct Queue {
    first: u32,
    last: u32,
    len: u64,
}

impl Default for Queue {
    fn default() -> Queue {
        Queue { first: NONE, last: NONE, len: 0 }
    }
}

impl Queue {
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn first(&self) -> Option<RecordRef> {
        RecordRef::from_number(self.first)
    }

    /// Adds a record as the newest.
    pub(crate) fn push(&mut self, slab: &mut Slab, at: RecordRef) {
        let record = slab.get_mut(at);
        (record.prev, record.next) = (self.last, NONE);
        match RecordRef::from_number(self.last) {
            Some(last) => slab.get_mut(last).next = at.number(),
            None => self.first = at.number(),
        }
        self.last = at.number();
        self.len += 1;
    }

    /// Adds a record as the oldest.
    pub(crate) fn push_oldest(&mut self, slab: &mut Slab, at: RecordRef) {
        let record = slab.get_mut(at);
        (record.prev, record.next) = (NONE, self.first);
        match RecordRef::from_number(self.first) {
            Some(first) => slab.get_mut(first).prev = at.number(),
            None => self.last = at.number(),
        }
        self.first = at.number();
        self.len += 1;
    }

    /// Removes a record.
    pub(crate) fn unlink(&mut self, slab: &mut Slab, at: RecordRef) {
        let (prev, next) = (slab.get(at).prev(), slab.get(at).next());
        let number = |at: Option<RecordRef>| at.map_or(NONE, RecordRef::number);
        match prev {
            Some(prev) => slab.get_mut(prev).next = number(next),
            None => self.first = number(next),
        }
        match next {
            Some(next) => slab.get_mut(next).prev = number(prev),
            None => self.last = number(prev),
        }
        self.len -= 1;
    }

    /// Updates the links to a record whose number changed to `new`. The record's own links moved with it.
    pub(crate) fn record_moved(&mut self, slab: &mut Slab, new: RecordRef) {
        let (prev, next) = (slab.get(new).prev(), slab.get(new).next());
        match prev {
            Some(prev) => slab.get_mut(prev).next = new.number(),
            None => self.first = new.number(),
        }
        match next {
            Some(next) => slab.get_mut(next).prev = new.number(),
            None => self.last = new.number(),
        }
    }

    /// Returns all records, oldest first.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn iter<'a>(&self, slab: &'a Slab) -> impl Iterator<Item = RecordRef> + use<'a> {
        std::iter::successors(self.first(), move |&at| slab.get(at).next())
    }
}
