//! [`LocationCache`]: bounded map with SIEVE eviction: unused entries leave first, with one bit per entry and one hand,
//! and nothing moves on a hit.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use moontide_types::ObjectId;

/// Cache of values for a bounded number of objects.
#[derive(Debug)]
pub struct LocationCache<T> {
    index: HashMap<ObjectId, usize, BuildHasherDefault<IdHasher>>,
    entries: Vec<Entry<T>>,
    hand: usize,
    capacity: usize,
}

#[derive(Debug)]
struct Entry<T> {
    id: ObjectId,
    value: T,
    used: bool,
}

/// Hasher of object ids: they are digests already.
#[derive(Clone, Copy, Debug, Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = self.0.rotate_left(7) ^ u64::from_le_bytes(word);
        }
    }
}

impl<T: Clone> LocationCache<T> {
    /// Creates a cache of `capacity` objects; with 0 it stays empty.
    pub fn new(capacity: usize) -> LocationCache<T> {
        LocationCache { index: HashMap::default(), entries: Vec::new(), hand: 0, capacity }
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the value of an object, and marks the entry as used.
    pub fn get(&mut self, id: &ObjectId) -> Option<T> {
        let entry = &mut self.entries[*self.index.get(id)?];
        entry.used = true;
        Some(entry.value.clone())
    }

    /// Inserts or replaces a value. May evict another entry.
    pub fn put(&mut self, id: ObjectId, value: T) {
        if self.capacity == 0 {
            return;
        }
        if let Some(&at) = self.index.get(&id) {
            self.entries[at].value = value;
            return;
        }
        if self.entries.len() >= self.capacity {
            self.evict();
        }
        self.index.insert(id, self.entries.len());
        self.entries.push(Entry { id, value, used: false });
    }

    /// Removes the entry of an object if `still` accepts its value.
    pub fn forget_if(&mut self, id: &ObjectId, still: impl FnOnce(&T) -> bool) {
        if let Some(&at) = self.index.get(id)
            && still(&self.entries[at].value)
        {
            self.take(at);
        }
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.index.clear();
        self.entries.clear();
        self.hand = 0;
    }

    fn evict(&mut self) {
        // Every entry is skipped at most once, so the loop ends.
        loop {
            if self.hand >= self.entries.len() {
                self.hand = 0;
            }
            if !std::mem::take(&mut self.entries[self.hand].used) {
                return self.take(self.hand);
            }
            self.hand += 1;
        }
    }

    fn take(&mut self, at: usize) {
        let entry = self.entries.swap_remove(at);
        self.index.remove(&entry.id);
        if let Some(moved) = self.entries.get(at) {
            self.index.insert(moved.id, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap as Model;

    use moontide_rt::SplitMix64;

    use super::*;

    fn id(n: u64) -> ObjectId {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        ObjectId(id)
    }

    #[test]
    fn location_cache_is_bounded_and_keeps_used_entries() {
        let mut locations = LocationCache::new(100);
        for n in 0..1000 {
            locations.put(id(n), n);
            let hot = locations.get(&id(0));
            assert_eq!(hot, Some(0), "used entry was evicted after {n}");
        }
        assert_eq!(locations.len(), 100);
    }

    #[test]
    fn location_cache_matches_map_model() {
        let mut locations = LocationCache::new(64);
        let mut model = Model::new();
        let mut rng = SplitMix64::new(7);
        for step in 0..20_000u64 {
            let n = rng.below(200);
            match rng.below(16) {
                0..=5 => {
                    locations.put(id(n), step);
                    model.insert(n, step);
                }
                6..=7 => {
                    locations.forget_if(&id(n), |_| true);
                    model.remove(&n);
                }
                _ => {
                    if let Some(found) = locations.get(&id(n)) {
                        assert_eq!(Some(&found), model.get(&n));
                    }
                }
            }
            assert!(locations.len() <= 64 && locations.index.len() == locations.entries.len());
        }
    }

    #[test]
    fn location_cache_with_zero_capacity_is_always_empty() {
        let mut locations = LocationCache::new(0);
        locations.put(id(1), 1);
        assert!(locations.is_empty() && locations.get(&id(1)).is_none());
    }
}
