//! [`Gather`]: single keys that wait for each other.
//!
//! Natural batching: a key goes out at once while fewer than [`BATCHES_INFLIGHT_MAX`] batches of its kind are in
//! flight; keys that come meanwhile gather, and leave together when a batch comes back. No clock is involved: a lone
//! caller waits 0 µs for company, and the busier the link, the larger the batches.
//!
//! Keys of one batch have the same tenant and the same lease, because a request has one of each.
//!
//! Invariants: no batch is empty; a batch with no waiter left is not kept; `gathered` is the number of waiters.

use std::collections::VecDeque;
use std::time::Instant;

use moontide_proto::PackedKeysBuilder;
use moontide_types::bounds::{BATCH_KEYS_MAX, KEY_BYTES_MAX};
use moontide_types::{Key, Tenant};

/// Batches of gathered keys in flight, of each kind. Two: while the master works on one, the callers of the other
/// are woken and ask again.
pub const BATCHES_INFLIGHT_MAX: usize = 2;

/// Most bytes of keys in a gathered batch, so that a few large keys do not delay the many small ones.
pub const BATCH_BYTES_MAX: usize = 256 << 10;

/// Keys that leave together, and who waits for them.
#[derive(Debug)]
pub(super) struct Batch<W> {
    pub(super) keys: Keys,
    /// One per key; `None` for those who gave up.
    pub(super) waiters: Vec<Option<W>>,
    /// When the last one gives up.
    pub(super) deadline: Instant,
}

/// What a request for gathered keys is made of.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) tenant: Box<str>,
    pub(super) lease_ms: u32,
    pub(super) packed: PackedKeysBuilder,
    bytes: usize,
}

impl Keys {
    fn takes(&self, tenant: Tenant<'_>, lease_ms: u32, key: Key<'_>) -> bool {
        *self.tenant == *tenant.as_str()
            && self.lease_ms == lease_ms
            && self.packed.len() < BATCH_KEYS_MAX
            && self.bytes + key.as_bytes().len() <= BATCH_BYTES_MAX
    }
}

/// One key that joins.
#[derive(Debug)]
pub(super) struct Single<'a, W> {
    pub(super) tenant: Tenant<'a>,
    pub(super) key: Key<'a>,
    /// 0 where there is no lease to ask for.
    pub(super) lease_ms: u32,
    pub(super) deadline: Instant,
    pub(super) waiter: W,
}

/// The batches of one kind, oldest first.
#[derive(Debug)]
pub(super) struct Gather<W> {
    batches: VecDeque<Batch<W>>,
    in_flight: usize,
    gathered: usize,
}

impl<W> Gather<W> {
    pub(super) fn new() -> Gather<W> {
        Gather { batches: VecDeque::new(), in_flight: 0, gathered: 0 }
    }

    /// How many wait.
    pub(super) fn gathered(&self) -> usize {
        self.gathered
    }

    /// Adds a key to the batch it fits into, or to a new one.
    pub(super) fn join(&mut self, single: Single<'_, W>) {
        let Single { tenant, key, lease_ms, deadline, waiter } = single;
        let index = self.batches.iter().position(|batch| batch.keys.takes(tenant, lease_ms, key));
        let index = index.unwrap_or_else(|| {
            let (tenant, packed) = (tenant.as_str().into(), PackedKeysBuilder::new());
            let keys = Keys { tenant, lease_ms, packed, bytes: 0 };
            self.batches.push_back(Batch { keys, waiters: Vec::new(), deadline });
            self.batches.len() - 1
        });
        let batch = &mut self.batches[index];
        batch.keys.packed.push(key).expect("the batch has room for the key");
        batch.keys.bytes += key.as_bytes().len();
        batch.waiters.push(Some(waiter));
        batch.deadline = batch.deadline.max(deadline);
        self.gathered += 1;
    }

    /// The oldest batch, if one may leave.
    pub(super) fn depart(&mut self) -> Option<Batch<W>> {
        if self.in_flight == BATCHES_INFLIGHT_MAX {
            return None;
        }
        let batch = self.batches.pop_front()?;
        self.in_flight += 1;
        self.gathered -= batch.waiters.iter().flatten().count();
        Some(batch)
    }

    /// A batch came back, or nobody waits for it any more.
    pub(super) fn returned(&mut self) {
        assert!(self.in_flight > 0, "only what left comes back");
        self.in_flight -= 1;
    }

    /// Somebody gives up. Its key stays in the batch: keys that left the packed form would cost all others a copy.
    pub(super) fn leave(&mut self, is_it: &mut impl FnMut(&W) -> bool) -> bool {
        for (index, batch) in self.batches.iter_mut().enumerate() {
            if vacate(&mut batch.waiters, is_it) {
                self.gathered -= 1;
                if batch.waiters.iter().all(Option::is_none) {
                    self.batches.remove(index);
                }
                return true;
            }
        }
        false
    }

    /// Everybody, when the connection broke.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = W> {
        (self.in_flight, self.gathered) = (0, 0);
        std::mem::take(&mut self.batches).into_iter().flat_map(|batch| batch.waiters).flatten()
    }
}

/// Empties the place of a waiter; whether it was there.
pub(super) fn vacate<W>(waiters: &mut [Option<W>], is_it: &mut impl FnMut(&W) -> bool) -> bool {
    let place = waiters.iter_mut().find(|waiter| waiter.as_ref().is_some_and(&mut *is_it));
    place.and_then(Option::take).is_some()
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
    ) -> Single<'static, u32> {
        let key = Key::new(key).expect("a key");
        Single { tenant, key, lease_ms, deadline: Instant::now(), waiter }
    }

    #[test]
    fn the_first_two_leave_at_once_and_the_rest_together() {
        let mut gather = Gather::new();
        for waiter in 0..2 {
            gather.join(single(Tenant::DEFAULT, b"a", 0, waiter));
            let batch = gather.depart().expect("fewer than two are in flight");
            assert_eq!(batch.waiters, [Some(waiter)]);
        }
        for waiter in 2..10 {
            gather.join(single(Tenant::DEFAULT, b"a", 0, waiter));
            assert!(gather.depart().is_none());
        }
        gather.returned();
        let batch = gather.depart().expect("one came back");
        assert!(batch.waiters.into_iter().flatten().eq(2..10));
        assert_eq!(gather.gathered(), 0);
    }

    #[test]
    fn tenants_and_leases_do_not_mix() {
        let other = Tenant::new("other").expect("a tenant");
        let mut gather = Gather::new();
        for (waiter, (tenant, lease)) in (0..).zip([
            (Tenant::DEFAULT, 0),
            (other, 0),
            (Tenant::DEFAULT, 5),
            (Tenant::DEFAULT, 0),
            (other, 0),
        ]) {
            gather.join(single(tenant, b"a", lease, waiter));
        }
        let mut next = || {
            let batch = gather.depart()?;
            gather.returned();
            Some(batch.waiters.into_iter().flatten().collect::<Vec<_>>())
        };
        assert_eq!(next(), Some(vec![0, 3]));
        assert_eq!(next(), Some(vec![1, 4]));
        assert_eq!(next(), Some(vec![2]));
        assert_eq!(next(), None);
    }

    #[test]
    fn a_full_batch_is_followed_by_another() {
        let long: &'static [u8] = &[7; KEY_BYTES_MAX];
        for (key, per_batch) in [(&b"k"[..], BATCH_KEYS_MAX), (long, BATCH_BYTES_MAX / KEY_BYTES_MAX)] {
            let mut gather = Gather::new();
            (0..per_batch as u32 + 1).for_each(|w| gather.join(single(Tenant::DEFAULT, key, 0, w)));
            assert_eq!(gather.depart().map(|batch| batch.keys.packed.len()), Some(per_batch));
            assert_eq!(gather.depart().map(|batch| batch.keys.packed.len()), Some(1));
        }
    }

    #[test]
    fn who_gave_up_is_not_waited_for() {
        let mut gather = Gather::new();
        (0..2).for_each(|w| gather.join(single(Tenant::DEFAULT, b"a", 0, w)));
        assert!(gather.leave(&mut |&w| w == 0));
        assert!(!gather.leave(&mut |&w| w == 0), "once");
        assert_eq!(gather.gathered(), 1);
        assert!(gather.leave(&mut |&w| w == 1));
        assert!(gather.depart().is_none(), "a batch that nobody waits for does not leave");
    }
}
