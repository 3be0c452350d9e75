//! [`EvictionQueue`]: order of eviction.
//!
//! Holds numbers (of buckets, files or slots) in the order in which they were written, or last used. Every operation
//! takes O(log n). A write counts as a use, so that a record that was never read is not older than one that was read
//! long ago.

use std::collections::BTreeMap;

use moontide_rt::collections::HashMap;
use moontide_rt::sync::Mutex;

use crate::backend::EvictionPolicy;

/// Numbers in the order of eviction.
#[derive(Debug)]
pub(crate) struct EvictionQueue {
    policy: EvictionPolicy,
    queue: Mutex<EvictionQueueState>,
}

#[derive(Debug, Default)]
struct EvictionQueueState {
    /// The next stamp. 2⁶⁴ stamps do not run out.
    next: u64,
    keys: BTreeMap<u64, u64>,
    stamps: HashMap<u64, u64>,
}

impl EvictionQueue {
    /// Creates an empty queue.
    pub(crate) fn new(policy: EvictionPolicy) -> EvictionQueue {
        EvictionQueue { policy, queue: Mutex::default() }
    }

    /// Appends a number, if it is not in the queue.
    pub(crate) fn insert(&self, key: u64) {
        let mut queue = self.queue.lock();
        if !queue.stamps.contains_key(&key) {
            queue.put_last(key);
        }
    }

    /// Records a use: under LRU the number moves to the end, if it is in the queue.
    pub(crate) fn touch(&self, key: u64) {
        if self.policy == EvictionPolicy::Fifo {
            return;
        }
        let mut queue = self.queue.lock();
        let Some(&stamp) = queue.stamps.get(&key) else { return };
        // The last one does not move: many threads that read the same bucket do no work here.
        if stamp + 1 != queue.next {
            queue.keys.remove(&stamp);
            queue.put_last(key);
        }
    }

    /// Removes a number.
    pub(crate) fn remove(&self, key: u64) {
        let mut queue = self.queue.lock();
        if let Some(stamp) = queue.stamps.remove(&key) {
            queue.keys.remove(&stamp);
        }
    }

    /// Returns the next number to evict.
    pub(crate) fn first(&self) -> Option<u64> {
        self.queue.lock().keys.first_key_value().map(|(_, &key)| key)
    }

    /// Removes and returns the next number to evict.
    pub(crate) fn pop(&self) -> Option<u64> {
        let mut queue = self.queue.lock();
        let (_, key) = queue.keys.pop_first()?;
        queue.stamps.remove(&key);
        Some(key)
    }
}

impl EvictionQueueState {
    fn put_last(&mut self, key: u64) {
        let stamp = self.next;
        self.next += 1;
        self.keys.insert(stamp, key);
        self.stamps.insert(key, stamp);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(queue: &EvictionQueue) -> Vec<u64> {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn fifo_ignores_use() {
        let queue = EvictionQueue::new(EvictionPolicy::Fifo);
        (1..=4).for_each(|key| queue.insert(key));
        queue.touch(1);
        queue.insert(2);
        queue.remove(3);
        assert_eq!(queue.first(), Some(1));
        assert_eq!(drain(&queue), [1, 2, 4]);
        assert_eq!(queue.first(), None);
    }

    #[test]
    fn lru_evicts_least_recently_used_first() {
        let queue = EvictionQueue::new(EvictionPolicy::Lru);
        queue.insert(1);
        queue.insert(2);
        queue.touch(1);
        queue.insert(3);
        queue.touch(9);
        assert_eq!(drain(&queue), [2, 1, 3]);
        queue.insert(1);
        queue.insert(2);
        queue.touch(2);
        queue.touch(1);
        queue.remove(2);
        assert_eq!(drain(&queue), [1]);
    }
}
