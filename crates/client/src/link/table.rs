//! [`Table`]: requests in flight by request number, with a fixed capacity.
//!
//! ```text
//!   request number:  bit 63 ───── 8 │ 7 ──── 0
//!                    sequence, from 1 │ index
//! ```
//!
//! The whole number is compared, so that the late reply of a canceled request is ignored, even if its index is in use
//! again. The look-up is one array access, without hashing.

use super::config::INFLIGHT_MAX;

const INDEX_BITS: u32 = 8;

/// Table with a fixed capacity.
#[derive(Debug)]
pub(super) struct Table<T> {
    entries: Vec<Option<(u64, T)>>,
    free: Vec<u8>,
    sequence: u64,
}

impl<T> Table<T> {
    pub(super) fn new(capacity: u16) -> Table<T> {
        assert!((1..=INFLIGHT_MAX).contains(&capacity), "capacity {capacity} is not validated");
        let free = (0..capacity).rev().map(|index| index as u8).collect(); // < 256
        Table { entries: (0..capacity).map(|_| None).collect(), free, sequence: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Inserts an entry and returns its request number.
    ///
    /// # Panics
    /// If the table is full.
    pub(super) fn insert(&mut self, entry: T) -> u64 {
        let index = self.free.pop().expect("callers check is_full first");
        self.sequence += 1; // 2⁵⁶ requests take a million years
        let request = self.sequence << INDEX_BITS | u64::from(index);
        self.entries[usize::from(index)] = Some((request, entry));
        request
    }

    pub(super) fn get(&self, request: u64) -> Option<&T> {
        let (number, entry) = self.entries.get(index_of(request))?.as_ref()?;
        (*number == request).then_some(entry)
    }

    pub(super) fn remove(&mut self, request: u64) -> Option<T> {
        let position = self.entries.get_mut(index_of(request))?;
        let (_, entry) = position.take_if(|(number, _)| *number == request)?;
        self.free.push(index_of(request) as u8);
        Some(entry)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.entries.iter().flatten().map(|(request, entry)| (*request, entry))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.entries.iter_mut().flatten().map(|(request, entry)| (*request, entry))
    }
}

fn index_of(request: u64) -> usize {
    (request & ((1 << INDEX_BITS) - 1)) as usize
}

const _: () = assert!(INFLIGHT_MAX == 1 << INDEX_BITS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_for_reused_request_slot_is_ignored() {
        let mut table = Table::new(2);
        let (a, b) = (table.insert('a'), table.insert('b'));
        assert!(table.is_full());
        assert_eq!(table.remove(a), Some('a'));
        let c = table.insert('c');
        assert_eq!(index_of(c), index_of(a), "the index is reused");
        assert_eq!(table.get(a), None);
        assert_eq!(table.remove(a), None);
        assert_eq!(table.get(b), Some(&'b'));
        assert_eq!(table.remove(c), Some('c'));
        assert_eq!(table.len(), 1);
        assert_eq!(table.remove(u64::MAX), None);
    }
}
