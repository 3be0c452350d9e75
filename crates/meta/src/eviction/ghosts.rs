//! [`Ghosts`]: which objects were evicted lately, in 20 bytes per object in memory.
//!
//! A table of buckets. An entry has 16 bits of the object's id and the time of its eviction, counted in evictions. An object
//! that was not evicted is found with a probability of 1 in 4,000. In a full bucket the oldest entry is replaced.

use moontide_types::ObjectId;

use super::{GHOST_REACH_MAX, hash};

/// Entries of a bucket: a cache line.
const BUCKET: usize = 16;

/// Units of time per capacity. 16 bits are 64 capacities: an entry is replaced long before its time recurs.
const UNITS: u64 = 1024;

/// An entry: fingerprint above, time below. 0 is no entry; a fingerprint is never 0.
type Entry = u32;

#[derive(Debug, Default)]
pub(super) struct Ghosts {
    buckets: Vec<[Entry; BUCKET]>,
    /// Objects in memory.
    objects: u64,
    /// Objects for which there is space.
    capacity: u64,
    evictions: u64,
}

impl Ghosts {
    /// Returns the number of objects in memory.
    pub(super) fn objects(&self) -> u64 {
        self.objects
    }

    /// Sets the number of objects in memory. Forgets all evictions if it changed much, which is rare.
    pub(super) fn resize(&mut self, objects: u64) {
        self.objects = objects;
        if self.capacity / 2 <= objects && objects <= self.capacity && self.capacity > 0 {
            return;
        }
        self.capacity = objects + objects / 8 + 1;
        // A bucket keeps the last evictions of its objects. With half as many again, 19 of 20 are kept as long as is necessary.
        let entries = self.capacity * GHOST_REACH_MAX * 3 / 2;
        self.buckets = vec![[0; BUCKET]; (entries as usize).div_ceil(BUCKET)];
    }

    /// Frees the memory if most of the objects for which there is space were removed.
    pub(super) fn release_unused(&mut self, objects: u64) {
        if objects < self.capacity / 4 {
            *self = Ghosts { evictions: self.evictions, ..Ghosts::default() };
        }
    }

    pub(super) fn insert(&mut self, id: ObjectId) {
        self.evictions += 1;
        let (now, fingerprint) = (self.now(), fingerprint(id));
        let Some(bucket) = self.bucket(id) else { return };
        let age = |entry: Entry| if entry == 0 { u16::MAX } else { now.wrapping_sub(entry as u16) };
        let known = bucket.iter().position(|entry| entry >> 16 == fingerprint);
        let oldest = || (0..BUCKET).max_by_key(|&index| age(bucket[index])).unwrap_or(0);
        bucket[known.unwrap_or_else(oldest)] = fingerprint << 16 | u32::from(now);
    }

    /// Forgets an object. Returns the number of evictions since its own.
    pub(super) fn take(&mut self, id: ObjectId) -> Option<u64> {
        let (now, fingerprint, unit) = (self.now(), fingerprint(id), self.unit());
        let entry = self.bucket(id)?.iter_mut().find(|entry| **entry >> 16 == fingerprint)?;
        let age = now.wrapping_sub(std::mem::take(entry) as u16);
        Some(u64::from(age) * unit)
    }

    fn bucket(&mut self, id: ObjectId) -> Option<&mut [Entry; BUCKET]> {
        let index = (u128::from(hash(id)) * self.buckets.len() as u128) >> 64;
        self.buckets.get_mut(index as usize)
    }

    /// Evictions per unit of time.
    fn unit(&self) -> u64 {
        (self.capacity / UNITS).max(1)
    }

    fn now(&self) -> u16 {
        (self.evictions / self.unit()) as u16
    }
}

/// These bytes choose neither the group nor the bucket.
fn fingerprint(id: ObjectId) -> u32 {
    u32::from(u16::from_le_bytes([id.0[4], id.0[5]])).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> ObjectId {
        let mut generator = moontide_rt::SplitMix64::new(number);
        let words = [generator.next_u64(), generator.next_u64()];
        ObjectId(std::array::from_fn(|byte| words[byte / 8].to_le_bytes()[byte % 8]))
    }

    #[test]
    fn evicted_objects_are_found_with_their_age() {
        for capacity in [1, 10, 1000, 100_000] {
            let mut ghosts = Ghosts::default();
            ghosts.resize(capacity);
            let count = 2 * capacity;
            (0..count).for_each(|number| ghosts.insert(id(number)));
            let (mut found, mut wrong) = (0, 0);
            for number in 0..count {
                let Some(age) = ghosts.take(id(number)) else { continue };
                found += 1;
                let exact = count - 1 - number;
                wrong += u64::from(age.abs_diff(exact) > ghosts.unit());
            }
            // Buckets fill unevenly, the few of a small table most.
            assert!(found * 100 >= count * if capacity >= 1000 { 90 } else { 70 }, "{found} of {count}");
            // Two objects of a bucket may have the same 16 bits.
            assert!(wrong * 1000 <= count, "{wrong} of {count} have another age");
            assert!((0..count).all(|number| ghosts.take(id(number)).is_none()), "an object is found once");
        }
    }

    #[test]
    fn other_objects_are_rarely_found() {
        let mut ghosts = Ghosts::default();
        ghosts.resize(10_000);
        (0..30_000).for_each(|number| ghosts.insert(id(number)));
        let wrong = (1_000_000..1_100_000).filter(|&number| ghosts.take(id(number)).is_some()).count();
        assert!(wrong < 50, "{wrong} of 100,000");
    }

    #[test]
    fn resize_keeps_evictions_unless_memory_changed_much() {
        let mut ghosts = Ghosts::default();
        ghosts.insert(id(1));
        assert_eq!(ghosts.take(id(1)), None, "nothing is kept before memory is full");
        ghosts.resize(1000);
        ghosts.insert(id(1));
        ghosts.resize(1100);
        ghosts.resize(900);
        assert!(ghosts.take(id(1)).is_some());
        ghosts.insert(id(2));
        ghosts.resize(5000);
        assert_eq!(ghosts.take(id(2)), None);
    }

    #[test]
    fn memory_is_freed_when_most_objects_are_removed() {
        let mut ghosts = Ghosts::default();
        ghosts.resize(1000);
        ghosts.insert(id(1));
        ghosts.release_unused(400);
        assert!(ghosts.take(id(1)).is_some());
        ghosts.release_unused(200);
        assert_eq!((ghosts.buckets.capacity(), ghosts.objects()), (0, 0));
        ghosts.resize(1000);
        ghosts.insert(id(1));
        assert!(ghosts.take(id(1)).is_some(), "it starts again when memory is full");
    }
}
