//! [`KeyBatcher`]: batches of single keys.
//!
//! Natural batching: a key is sent at once while fewer than [`BATCHES_INFLIGHT_MAX`] batches of its kind are in flight.
//! Keys that arrive meanwhile are queued, and sent together when a batch returns. No timer is involved: a lone caller
//! waits 0 µs for other keys, and the batches grow with the load of the link.
//!
//! Keys of one batch have the same tenant and the same lease, because a request has one of each.
//!
//! Invariants: no batch is empty; a batch without waiters is removed; `queued` is the number of waiters.

use std::collections::VecDeque;

use moontide_proto::PackedKeysBuilder;
use moontide_rt::time::Instant;
use moontide_types::limits::{BATCH_KEYS_MAX, KEY_BYTES_MAX};
use moontide_types::{Key, Tenant};

/// Batches of single keys in flight, of each kind. Two: while the master works on one, the callers of the other wake up
/// and send their next keys.
pub const BATCHES_INFLIGHT_MAX: usize = 2;

/// Most bytes of keys in a batch, so that a few large keys do not delay the many small ones.
pub const BATCH_BYTES_MAX: usize = 256 << 10;

/// Keys that are sent together, and their waiters.
#[derive(Debug)]
pub(super) struct Batch<W> {
    pub(super) keys: BatchKeys,
    /// One per key; `None` for canceled ones.
    pub(super) waiters: Vec<Option<W>>,
    /// Latest deadline of the waiters.
    pub(super) deadline: Instant,
}

/// Keys of a batch, with the tenant and lease of its request.
#[derive(Debug)]
pub(super) struct BatchKeys {
    pub(super) tenant: Box<str>,
    pub(super) lease_ms: u32,
    pub(super) packed: PackedKeysBuilder,
    bytes: usize,
}

impl BatchKeys {
    fn fits(&self, tenant: Tenant<'_>, lease_ms: u32, key: Key<'_>) -> bool {
        *self.tenant == *tenant.as_str()
            && self.lease_ms == lease_ms
            && self.packed.len() < BATCH_KEYS_MAX
            && self.bytes + key.as_bytes().len() <= BATCH_BYTES_MAX
    }
}

/// A key to add.
#[derive(Debug)]
pub(super) struct SingleKey<'a, W> {
    pub(super) tenant: Tenant<'a>,
    pub(super) key: Key<'a>,
    /// 0 requests no lease.
    pub(super) lease_ms: u32,
    pub(super) deadline: Instant,
    pub(super) waiter: W,
}

/// Batches of one kind, oldest first.
#[derive(Debug)]
pub(super) struct KeyBatcher<W> {
    batches: VecDeque<Batch<W>>,
    in_flight: usize,
    queued: usize,
}

impl<W> KeyBatcher<W> {
    pub(super) fn new() -> KeyBatcher<W> {
        KeyBatcher { batches: VecDeque::new(), in_flight: 0, queued: 0 }
    }

    /// Returns the number of queued keys.
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// Adds a key to the batch it fits into, or to a new one.
    pub(super) fn push(&mut self, single: SingleKey<'_, W>) {
        let SingleKey { tenant, key, lease_ms, deadline, waiter } = single;
        let index = self.batches.iter().position(|batch| batch.keys.fits(tenant, lease_ms, key));
        let index = index.unwrap_or_else(|| {
            let (tenant, packed) = (tenant.as_str().into(), PackedKeysBuilder::new());
            let keys = BatchKeys { tenant, lease_ms, packed, bytes: 0 };
            self.batches.push_back(Batch { keys, waiters: Vec::new(), deadline });
            self.batches.len() - 1
        });
        let batch = &mut self.batches[index];
        batch.keys.packed.push(key).expect("the batch has space for the key");
        batch.keys.bytes += key.as_bytes().len();
        batch.waiters.push(Some(waiter));
        batch.deadline = batch.deadline.max(deadline);
        self.queued += 1;
    }

    /// Removes the oldest batch, if one may be sent.
    pub(super) fn pop_ready(&mut self) -> Option<Batch<W>> {
        if self.in_flight == BATCHES_INFLIGHT_MAX {
            return None;
        }
        let batch = self.batches.pop_front()?;
        self.in_flight += 1;
        self.queued -= batch.waiters.iter().flatten().count();
        Some(batch)
    }

    /// Records that a batch was answered, or has no waiters left.
    pub(super) fn returned(&mut self) {
        assert!(self.in_flight > 0, "returned() without a batch in flight");
        self.in_flight -= 1;
    }

    /// Cancels a waiter. Its key stays in the batch: removing it from the packed form would copy all others.
    pub(super) fn cancel(&mut self, is_it: &mut impl FnMut(&W) -> bool) -> bool {
        for (index, batch) in self.batches.iter_mut().enumerate() {
            if remove_waiter(&mut batch.waiters, is_it) {
                self.queued -= 1;
                if batch.waiters.iter().all(Option::is_none) {
                    self.batches.remove(index);
                }
                return true;
            }
        }
        false
    }

    /// Removes and returns all waiters, after the connection broke.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = W> {
        (self.in_flight, self.queued) = (0, 0);
        std::mem::take(&mut self.batches).into_iter().flat_map(|batch| batch.waiters).flatten()
    }
}

/// Removes a waiter. Returns whether it was in the list.
pub(super) fn remove_waiter<W>(waiters: &mut [Option<W>], is_it: &mut impl FnMut(&W) -> bool) -> bool {
    let entry = waiters.iter_mut().find(|waiter| waiter.as_ref().is_some_and(&mut *is_it));
    entry.and_then(Option::take).is_some()
}

const _: () = assert!(BATCH_BYTES_MAX >= KEY_BYTES_MAX, "every key fits into a batch of its own");

#[cfg(test)]
mod tests {
    use super::*;

    fn single(
        tenant: Tenant<'static>,
        key: &'static [u8],
        lease_ms: u32,
        waiter: u32,
    ) -> SingleKey<'static, u32> {
        let key = Key::new(key).expect("a key");
        SingleKey { tenant, key, lease_ms, deadline: Instant::now(), waiter }
    }

    #[test]
    fn first_two_keys_are_sent_at_once_and_later_ones_batched() {
        let mut batcher = KeyBatcher::new();
        for waiter in 0..2 {
            batcher.push(single(Tenant::DEFAULT, b"a", 0, waiter));
            let batch = batcher.pop_ready().expect("fewer than two are in flight");
            assert_eq!(batch.waiters, [Some(waiter)]);
        }
        for waiter in 2..10 {
            batcher.push(single(Tenant::DEFAULT, b"a", 0, waiter));
            assert!(batcher.pop_ready().is_none());
        }
        batcher.returned();
        let batch = batcher.pop_ready().expect("one came back");
        assert!(batch.waiters.into_iter().flatten().eq(2..10));
        assert_eq!(batcher.queued(), 0);
    }

    #[test]
    fn batch_never_mixes_tenants_or_leases() {
        let other = Tenant::new("other").expect("a tenant");
        let mut batcher = KeyBatcher::new();
        for (waiter, (tenant, lease)) in (0..).zip([
            (Tenant::DEFAULT, 0),
            (other, 0),
            (Tenant::DEFAULT, 5),
            (Tenant::DEFAULT, 0),
            (other, 0),
        ]) {
            batcher.push(single(tenant, b"a", lease, waiter));
        }
        let mut next = || {
            let batch = batcher.pop_ready()?;
            batcher.returned();
            Some(batch.waiters.into_iter().flatten().collect::<Vec<_>>())
        };
        assert_eq!(next(), Some(vec![0, 3]));
        assert_eq!(next(), Some(vec![1, 4]));
        assert_eq!(next(), Some(vec![2]));
        assert_eq!(next(), None);
    }

    #[test]
    fn keys_over_batch_limit_go_into_next_batch() {
        let long: &'static [u8] = &[7; KEY_BYTES_MAX];
        for (key, per_batch) in [(&b"k"[..], BATCH_KEYS_MAX), (long, BATCH_BYTES_MAX / KEY_BYTES_MAX)] {
            let mut batcher = KeyBatcher::new();
            (0..per_batch as u32 + 1).for_each(|w| batcher.push(single(Tenant::DEFAULT, key, 0, w)));
            assert_eq!(batcher.pop_ready().map(|batch| batch.keys.packed.len()), Some(per_batch));
            assert_eq!(batcher.pop_ready().map(|batch| batch.keys.packed.len()), Some(1));
        }
    }

    #[test]
    fn batch_without_waiters_is_not_sent() {
        let mut batcher = KeyBatcher::new();
        (0..2).for_each(|w| batcher.push(single(Tenant::DEFAULT, b"a", 0, w)));
        assert!(batcher.cancel(&mut |&w| w == 0));
        assert!(!batcher.cancel(&mut |&w| w == 0), "once");
        assert_eq!(batcher.queued(), 1);
        assert!(batcher.cancel(&mut |&w| w == 1));
        assert!(batcher.pop_ready().is_none(), "a batch without waiters is not sent");
    }
}
