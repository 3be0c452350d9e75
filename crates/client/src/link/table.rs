//! [`Table`]: what is in flight, by request number, in a fixed number of places.
//!
//! ```text
//!   request number:  bit 63 ───── 8 │ 7 ──── 0
//!                    sequence, from 1 │ place
//! ```
//!
//! The whole number is compared, so that the late answer of a request that was given up finds nobody, even if its
//! place is taken again. Finding an answer's request is one index, without hashing.

use super::config::INFLIGHT_MAX;

const PLACE_BITS: u32 = 8;

/// At most a fixed number of entries.
#[derive(Debug)]
pub(super) struct Table<T> {
    places: Vec<Option<(u64, T)>>,
    free: Vec<u8>,
    sequence: u64,
}

impl<T> Table<T> {
    pub(super) fn new(places: u16) -> Table<T> {
        assert!((1..=INFLIGHT_MAX).contains(&places), "the number of places is validated");
        let free = (0..places).rev().map(|place| place as u8).collect(); // < 256
        Table { places: (0..places).map(|_| None).collect(), free, sequence: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Takes a place and says the number of the request.
    ///
    /// # Panics
    /// If the table is full.
    pub(super) fn insert(&mut self, entry: T) -> u64 {
        let place = self.free.pop().expect("callers ask is_full first");
        self.sequence += 1; // 2⁵⁶ requests take a million years
        let request = self.sequence << PLACE_BITS | u64::from(place);
        self.places[usize::from(place)] = Some((request, entry));
        request
    }

    pub(super) fn get(&self, request: u64) -> Option<&T> {
        let (number, entry) = self.places.get(place_of(request))?.as_ref()?;
        (*number == request).then_some(entry)
    }

    pub(super) fn remove(&mut self, request: u64) -> Option<T> {
        let place = self.places.get_mut(place_of(request))?;
        let (_, entry) = place.take_if(|(number, _)| *number == request)?;
        self.free.push(place_of(request) as u8);
        Some(entry)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.places.iter().flatten().map(|(request, entry)| (*request, entry))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.places.iter_mut().flatten().map(|(request, entry)| (*request, entry))
    }
}

fn place_of(request: u64) -> usize {
    (request & ((1 << PLACE_BITS) - 1)) as usize
}

const _: () = assert!(INFLIGHT_MAX == 1 << PLACE_BITS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_finds_nobody() {
        let mut table = Table::new(2);
        let (a, b) = (table.insert('a'), table.insert('b'));
        assert!(table.is_full());
        assert_eq!(table.remove(a), Some('a'));
        let c = table.insert('c');
        assert_eq!(place_of(c), place_of(a), "the place is used again");
        assert_eq!(table.get(a), None);
        assert_eq!(table.remove(a), None);
        assert_eq!(table.get(b), Some(&'b'));
        assert_eq!(table.remove(c), Some('c'));
        assert_eq!(table.len(), 1);
        assert_eq!(table.remove(u64::MAX), None);
    }
}
