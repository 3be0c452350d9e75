//! [`LocalNodes`]: zero-copy reads of the memory of local nodes.
//!
//! Every thread keeps readers of its own (a reader is a lane of ledger cells), so that no two threads write the same
//! cache line. The set of mapped heaps changes rarely; a version number tells threads to update their readers.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use moontide_heap::{LocalHeap, SharedGuard, SharedLookup, SharedReader};
use moontide_rt::sync::RwLock;
use moontide_types::{Clock, Key, MonoTime, ObjectId, SystemClock};

use crate::cluster::ClusterIdentity;
use crate::metrics::{StoreMetrics, ThreadCounters};

/// State of which every thread has a copy.
#[derive(Clone, Debug)]
struct LocalState {
    identity: Arc<ClusterIdentity>,
    heaps: Vec<Arc<LocalHeap>>,
}

/// Heaps of local nodes that are mapped, and the inputs of object ids.
#[derive(Debug)]
pub(crate) struct LocalNodes {
    number: u64,
    version: AtomicU64,
    state: RwLock<LocalState>,
    metrics: StoreMetrics,
    alive: Arc<()>,
}

/// Readers of one thread for one store.
struct ThreadReaders {
    store: u64,
    alive: Weak<()>,
    version: u64,
    identity: Arc<ClusterIdentity>,
    readers: Vec<SharedReader>,
    counters: Arc<ThreadCounters>,
}

thread_local! {
    static READERS: RefCell<Vec<ThreadReaders>> = const { RefCell::new(Vec::new()) };
}

static NEXT_STORE: AtomicU64 = AtomicU64::new(0);

/// Result of a look-up in local memory.
pub(crate) enum LocalLookup {
    /// The object, pinned.
    Hit(SharedGuard),
    /// The object is not in local memory, or cannot be pinned.
    Miss,
}

impl LocalNodes {
    pub(crate) fn new(identity: ClusterIdentity, metrics: StoreMetrics) -> LocalNodes {
        LocalNodes {
            number: NEXT_STORE.fetch_add(1, Ordering::Relaxed),
            version: AtomicU64::new(1),
            state: RwLock::new(LocalState { identity: Arc::new(identity), heaps: Vec::new() }),
            metrics,
            alive: Arc::new(()),
        }
    }

    pub(crate) fn identity(&self) -> Arc<ClusterIdentity> {
        Arc::clone(&self.state.read().identity)
    }

    pub(crate) fn set_identity(&self, identity: ClusterIdentity) {
        self.state.write().identity = Arc::new(identity);
        // Release: pairs with the Acquire loads of `version`; the lock alone would order the state, too.
        self.version.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn set_heaps(&self, heaps: Vec<Arc<LocalHeap>>) {
        self.state.write().heaps = heaps;
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Returns the id of a key.
    #[inline]
    pub(crate) fn id(&self, key: Key<'_>) -> ObjectId {
        self.with_readers(|own| own.identity.id_key.object_id(own.identity.generation, key))
    }

    /// Looks up an object in local memory. A hit is counted as a get.
    #[inline]
    pub(crate) fn find_key(&self, key: Key<'_>) -> (ObjectId, LocalLookup) {
        self.with_readers(|own| {
            let id = own.identity.id_key.object_id(own.identity.generation, key);
            let found = own.find(&id);
            (id, found)
        })
    }

    #[inline]
    fn with_readers<R>(&self, use_readers: impl FnOnce(&mut ThreadReaders) -> R) -> R {
        READERS.with(|all| {
            let all = &mut *all.borrow_mut();
            let at = match all.iter().position(|own| own.store == self.number) {
                Some(at) => at,
                None => {
                    // Readers of dropped stores keep memory mapped: release them.
                    all.retain(|own| own.alive.strong_count() > 0);
                    all.push(self.thread_readers(Vec::new(), self.metrics.thread_counters()));
                    all.len() - 1
                }
            };
            let own = &mut all[at];
            if own.version != self.version.load(Ordering::Acquire) {
                *own = self.thread_readers(std::mem::take(&mut own.readers), Arc::clone(&own.counters));
            }
            use_readers(own)
        })
    }

    /// Creates the thread's readers for the current state; reuses existing ones.
    #[cold]
    fn thread_readers(&self, mut readers: Vec<SharedReader>, counters: Arc<ThreadCounters>) -> ThreadReaders {
        let version = self.version.load(Ordering::Acquire);
        let LocalState { identity, heaps } = self.state.read().clone();
        readers.retain(|reader| heaps.iter().any(|heap| Arc::ptr_eq(heap, reader.heap())));
        for heap in heaps {
            if !readers.iter().any(|reader| Arc::ptr_eq(&heap, reader.heap())) {
                // Threads beyond the number of lanes of the ledger get no reader: their gets go over a link.
                readers.extend(SharedReader::new(heap));
            }
        }
        ThreadReaders {
            store: self.number,
            alive: Arc::downgrade(&self.alive),
            version,
            identity,
            readers,
            counters,
        }
    }
}

impl ThreadReaders {
    #[inline]
    fn find(&mut self, id: &ObjectId) -> LocalLookup {
        if self.readers.is_empty() {
            return LocalLookup::Miss;
        }
        let now: MonoTime = SystemClock.now();
        for reader in &mut self.readers {
            match reader.get(id, now) {
                SharedLookup::Hit(guard) => {
                    self.counters.hit(guard.header().stripe_len);
                    return LocalLookup::Hit(guard);
                }
                SharedLookup::Miss | SharedLookup::Full | SharedLookup::Closed => {}
            }
        }
        LocalLookup::Miss
    }
}
