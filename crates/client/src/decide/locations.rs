//! Which places are remembered: [`Locations`], a bounded map in which what is not used leaves first (SIEVE: one bit and
//! one hand, nothing moves on a use).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use moontide_types::ObjectId;

/// Remembers something for a bounded number of objects.
#[derive(Debug)]
pub struct Locations<T> {
    places: HashMap<ObjectId, usize, BuildHasherDefault<IdHasher>>,
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

/// Ids are digests already.
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

impl<T: Clone> Locations<T> {
    /// For so many objects; 0 remembers nothing.
    pub fn new(capacity: usize) -> Locations<T> {
        Locations { places: HashMap::default(), entries: Vec::new(), hand: 0, capacity }
    }

    /// How many are remembered.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What is remembered for an object.
    pub fn get(&mut self, id: &ObjectId) -> Option<T> {
        let entry = &mut self.entries[*self.places.get(id)?];
        entry.used = true;
        Some(entry.value.clone())
    }

    /// Remembers; something else may be forgotten for it.
    pub fn put(&mut self, id: ObjectId, value: T) {
        if self.capacity == 0 {
            return;
        }
        if let Some(&at) = self.places.get(&id) {
            self.entries[at].value = value;
            return;
        }
        if self.entries.len() >= self.capacity {
            self.evict();
        }
        self.places.insert(id, self.entries.len());
        self.entries.push(Entry { id, value, used: false });
    }

    /// Forgets an object, if `still` says so of what is remembered.
    pub fn forget_if(&mut self, id: &ObjectId, still: impl FnOnce(&T) -> bool) {
        if let Some(&at) = self.places.get(id)
            && still(&self.entries[at].value)
        {
            self.take(at);
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.places.clear();
        self.entries.clear();
        self.hand = 0;
    }

    fn evict(&mut self) {
        // Every entry is passed over at most once, so this ends.
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
        self.places.remove(&entry.id);
        if let Some(moved) = self.entries.get(at) {
            self.places.insert(moved.id, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap as Model;

    fn id(n: u64) -> ObjectId {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        ObjectId(id)
    }

    #[test]
    fn it_is_bounded_and_what_is_used_stays() {
        let mut locations = Locations::new(100);
        for n in 0..1000 {
            locations.put(id(n), n);
            let hot = locations.get(&id(0));
            assert_eq!(hot, Some(0), "used all the time, after {n}");
        }
        assert_eq!(locations.len(), 100);
    }

    #[test]
    fn it_agrees_with_a_map_as_far_as_it_remembers() {
        let mut locations = Locations::new(64);
        let mut model = Model::new();
        let mut state = 7u64;
        for step in 0..20_000u64 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let n = (state >> 33) % 200;
            match state >> 60 {
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
            assert!(locations.len() <= 64 && locations.places.len() == locations.entries.len());
        }
    }

    #[test]
    fn nothing_is_remembered_with_no_room() {
        let mut locations = Locations::new(0);
        locations.put(id(1), 1);
        assert!(locations.is_empty() && locations.get(&id(1)).is_none());
    }
}
