//! [`Order`]: who goes first when space is wanted.
//!
//! Numbers (of buckets, files or slots) stand in the order in which they were written, or last used. Every operation
//! takes O(log n), none looks at all of them. Being written counts as being used: what nobody has read yet is not older
//! than what was read long ago.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::backend::EvictionOrder;

/// Numbers in order of eviction.
#[derive(Debug)]
pub(crate) struct Order {
    policy: EvictionOrder,
    queue: Mutex<Stamped>,
}

#[derive(Debug, Default)]
struct Stamped {
    /// The next stamp. 2⁶⁴ of them do not run out.
    next: u64,
    keys: BTreeMap<u64, u64>,
    stamps: HashMap<u64, u64>,
}

impl Order {
    /// An empty one.
    pub(crate) fn new(policy: EvictionOrder) -> Order {
        Order { policy, queue: Mutex::default() }
    }

    /// Puts a number last, if it is not there yet.
    pub(crate) fn insert(&self, key: u64) {
        let mut queue = self.queue.lock();
        if !queue.stamps.contains_key(&key) {
            queue.put_last(key);
        }
    }

    /// A number was used: under LRU it goes last, if it is there.
    pub(crate) fn touch(&self, key: u64) {
        if self.policy == EvictionOrder::Fifo {
            return;
        }
        let mut queue = self.queue.lock();
        let Some(&stamp) = queue.stamps.get(&key) else { return };
        // The last one stays where it is: many threads that read the same bucket do no work.
        if stamp + 1 != queue.next {
            queue.keys.remove(&stamp);
            queue.put_last(key);
        }
    }

    /// Takes a number out.
    pub(crate) fn remove(&self, key: u64) {
        let mut queue = self.queue.lock();
        if let Some(stamp) = queue.stamps.remove(&key) {
            queue.keys.remove(&stamp);
        }
    }

    /// Who goes first.
    pub(crate) fn first(&self) -> Option<u64> {
        self.queue.lock().keys.first_key_value().map(|(_, &key)| key)
    }

    /// Takes out who goes first.
    pub(crate) fn take_first(&self) -> Option<u64> {
        let mut queue = self.queue.lock();
        let (_, key) = queue.keys.pop_first()?;
        queue.stamps.remove(&key);
        Some(key)
    }
}

impl Stamped {
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

    fn drain(order: &Order) -> Vec<u64> {
        std::iter::from_fn(|| order.take_first()).collect()
    }

    #[test]
    fn fifo_ignores_use() {
        let order = Order::new(EvictionOrder::Fifo);
        (1..=4).for_each(|key| order.insert(key));
        order.touch(1);
        order.insert(2);
        order.remove(3);
        assert_eq!(order.first(), Some(1));
        assert_eq!(drain(&order), [1, 2, 4]);
        assert_eq!(order.first(), None);
    }

    #[test]
    fn lru_puts_the_used_last_and_the_written_behind_the_read() {
        let order = Order::new(EvictionOrder::Lru);
        order.insert(1);
        order.insert(2);
        order.touch(1);
        order.insert(3);
        order.touch(9);
        assert_eq!(drain(&order), [2, 1, 3]);
        order.insert(1);
        order.insert(2);
        order.touch(2);
        order.touch(1);
        order.remove(2);
        assert_eq!(drain(&order), [1]);
    }
}
