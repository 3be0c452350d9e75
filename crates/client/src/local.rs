//! Memory of this host, read in place: [`Near`].
//!
//! Every thread keeps readers of its own (a reader is a group of cells in the ledger), so that two threads share no cache
//! line that is written. What they are readers of changes rarely; a version number tells a thread to look again.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use moontide_heap::{LocalHeap, SharedGuard, SharedLookup, SharedReader};
use moontide_types::{Clock, Key, MonoTime, ObjectId, SystemClock, Tenant};
use parking_lot::RwLock;

use crate::cluster::Identity;
use crate::metrics::{Lane, StoreMetrics};

/// What every thread has a copy of.
#[derive(Clone, Debug)]
struct Known {
    identity: Arc<Identity>,
    heaps: Vec<Arc<LocalHeap>>,
}

/// Nodes of this host whose memory is mapped, and how ids are made.
#[derive(Debug)]
pub(crate) struct Near {
    number: u64,
    version: AtomicU64,
    known: RwLock<Known>,
    metrics: StoreMetrics,
    alive: Arc<()>,
}

/// One thread's readers for one store.
struct Seat {
    store: u64,
    alive: Weak<()>,
    version: u64,
    identity: Arc<Identity>,
    readers: Vec<SharedReader>,
    lane: Arc<Lane>,
}

thread_local! {
    static SEATS: RefCell<Vec<Seat>> = const { RefCell::new(Vec::new()) };
}

static NEXT_STORE: AtomicU64 = AtomicU64::new(0);

/// What a look into the memory of this host found.
pub(crate) enum Found {
    /// The object, in place.
    Here(SharedGuard),
    /// Not here, or it must be read by a copy.
    Elsewhere,
}

impl Near {
    pub(crate) fn new(identity: Identity, metrics: StoreMetrics) -> Near {
        Near {
            number: NEXT_STORE.fetch_add(1, Ordering::Relaxed),
            version: AtomicU64::new(1),
            known: RwLock::new(Known { identity: Arc::new(identity), heaps: Vec::new() }),
            metrics,
            alive: Arc::new(()),
        }
    }

    pub(crate) fn identity(&self) -> Arc<Identity> {
        Arc::clone(&self.known.read().identity)
    }

    pub(crate) fn set_identity(&self, identity: Identity) {
        self.known.write().identity = Arc::new(identity);
        // Release: a thread that sees the number sees what it stands for; the lock would do, too.
        self.version.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn set_heaps(&self, heaps: Vec<Arc<LocalHeap>>) {
        self.known.write().heaps = heaps;
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The id of a key.
    #[inline]
    pub(crate) fn id(&self, tenant: Tenant<'_>, key: Key<'_>) -> ObjectId {
        self.with_seat(|seat| seat.identity.id_key.object_id(tenant, seat.identity.generation, key))
    }

    /// Looks for an object in the memory of this host. One that is found is counted as asked for and read.
    #[inline]
    pub(crate) fn find_key(&self, tenant: Tenant<'_>, key: Key<'_>) -> (ObjectId, Found) {
        self.with_seat(|seat| {
            let id = seat.identity.id_key.object_id(tenant, seat.identity.generation, key);
            let found = seat.find(&id);
            (id, found)
        })
    }

    #[inline]
    fn with_seat<R>(&self, use_it: impl FnOnce(&mut Seat) -> R) -> R {
        SEATS.with(|seats| {
            let seats = &mut *seats.borrow_mut();
            let at = match seats.iter().position(|seat| seat.store == self.number) {
                Some(at) => at,
                None => {
                    // Readers of stores that are gone keep their memory mapped: let go of them.
                    seats.retain(|seat| seat.alive.strong_count() > 0);
                    seats.push(self.seat(Vec::new(), self.metrics.lane()));
                    seats.len() - 1
                }
            };
            let seat = &mut seats[at];
            if seat.version != self.version.load(Ordering::Acquire) {
                *seat = self.seat(std::mem::take(&mut seat.readers), Arc::clone(&seat.lane));
            }
            use_it(seat)
        })
    }

    /// A seat for what is known now; readers that it had before stay.
    #[cold]
    fn seat(&self, mut readers: Vec<SharedReader>, lane: Arc<Lane>) -> Seat {
        let version = self.version.load(Ordering::Acquire);
        let Known { identity, heaps } = self.known.read().clone();
        readers.retain(|reader| heaps.iter().any(|heap| Arc::ptr_eq(heap, reader.heap())));
        for heap in heaps {
            if !readers.iter().any(|reader| Arc::ptr_eq(&heap, reader.heap())) {
                // With more threads than the ledger has groups, the rest of them read by copies.
                readers.extend(SharedReader::new(heap));
            }
        }
        Seat { store: self.number, alive: Arc::downgrade(&self.alive), version, identity, readers, lane }
    }
}

impl Seat {
    #[inline]
    fn find(&mut self, id: &ObjectId) -> Found {
        if self.readers.is_empty() {
            return Found::Elsewhere;
        }
        let now: MonoTime = SystemClock.now();
        for reader in &mut self.readers {
            match reader.get(id, now) {
                SharedLookup::Hit(guard) => {
                    self.lane.hit(guard.header().stripe_len);
                    return Found::Here(guard);
                }
                SharedLookup::Miss | SharedLookup::Full | SharedLookup::Closed => {}
            }
        }
        Found::Elsewhere
    }
}
