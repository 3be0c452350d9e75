//! [`AsyncStore`]: the calls of [`Store`] for tasks.
//!
//! A task asks the master over the shared asynchronous link, which batches the keys of many tasks, and reads mapped
//! memory zero-copy. Blocking threads move all other bytes. A bounded number of such calls runs and a bounded number
//! queues; further calls fail at once, because a late response of a cache is useless.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use moontide_rt::time::Instant;
use moontide_types::record::PinClass;
use moontide_types::{Key, ObjectId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::config::{KEYS_PER_CALL, PutOptions, StoreConfig};
use crate::error::StoreError;
use crate::get::ObjectRef;
use crate::link::{AsyncLink, LinkError};
use crate::local::LocalLookup;
use crate::put::{PutItem, PutOutcome};
use crate::store::{Inner, Store};

/// Longest object, in bytes, that is copied on the task itself: up to this length a copy takes less time than a change
/// of thread.
const INLINE_COPY_MAX: u64 = 256 << 10;

/// Store for tasks of a tokio runtime. Clones share everything.
#[derive(Clone, Debug)]
pub struct AsyncStore {
    store: Store,
    /// Link to the master of a single-master cluster. With several masters, blocking threads ask them.
    link: Option<AsyncLink>,
    running: Arc<Semaphore>,
    queued: Arc<AtomicUsize>,
}

impl AsyncStore {
    /// Connects. Fails within [`StoreConfig::connect_timeout`] if no master responds; the error names the address and a
    /// remedy.
    pub async fn connect(config: StoreConfig) -> Result<AsyncStore, StoreError> {
        let running = Arc::new(Semaphore::new(config.async_calls_max));
        let store = blocking(move || Store::connect(config)).await??;
        let link = match store.inner.cluster.link_config() {
            Some(config) => Some(AsyncLink::connect(config).await?),
            None => None,
        };
        Ok(AsyncStore { store, link, running, queued: Arc::default() })
    }

    /// Returns the same store with blocking calls.
    pub fn blocking(&self) -> &Store {
        &self.store
    }

    /// Returns an object's bytes, zero-copy if a local node has them. `None`: no such object.
    pub async fn get_ref(&self, key: &[u8]) -> Result<Option<ObjectRef>, StoreError> {
        let inner = &*self.store.inner;
        let (id, found) = inner.local_nodes.find_key(Key::new(key)?);
        if let LocalLookup::Hit(guard) = found {
            return Ok(Some(ObjectRef::zero_copy(guard)));
        }
        Ok(self.fetch(key, id).await?.map(ObjectRef::from))
    }

    /// Returns a copy of an object. Concurrent gets of one key share one fetch.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StoreError> {
        let inner = &*self.store.inner;
        let (id, found) = inner.local_nodes.find_key(Key::new(key)?);
        if let LocalLookup::Hit(guard) = found {
            let copied = if guard.header().stripe_len <= INLINE_COPY_MAX {
                inner.copied(&guard)
            } else {
                self.work(inner.deadline(), move |inner| Ok(inner.copied(&guard))).await?
            };
            if copied.is_some() {
                return Ok(copied);
            }
        }
        self.fetch(key, id).await
    }

    async fn fetch(&self, key: &[u8], id: ObjectId) -> Result<Option<Bytes>, StoreError> {
        let inner = &*self.store.inner;
        inner.metrics.gets.inc();
        let deadline = inner.deadline();
        // Checked before the look-up: a call that cannot be queued fails at almost no cost.
        let limit = inner.config().async_queue_max;
        if self.queued.load(Ordering::Relaxed) >= limit {
            inner.count_failed();
            return Err(StoreError::Overloaded { limit });
        }
        if inner.cached_location(&id).is_none()
            && let Some(link) = &self.link
        {
            // Look up here, in a batch with the keys of other tasks; the fetch then finds the location in the cache.
            let (tenant, lease_ms) = (inner.cluster.tenant(), inner.config().lease_ms());
            let key = Key::new(key)?;
            let mut reply = link.lookup_one(tenant, key, lease_ms).await;
            if let Err(LinkError::Lost { .. }) = reply {
                // The next attempt reconnects to a restarted master.
                reply = link.lookup_one(tenant, key, lease_ms).await;
            }
            match reply.map(|found| inner.parse_lookup(found)) {
                Ok(Some(Ok(Some(_))) | None) => {}
                Ok(Some(Ok(None))) => {
                    inner.count_miss();
                    return Ok(None);
                }
                Ok(Some(Err(error))) => {
                    inner.count_failed();
                    return Err(error);
                }
                Err(error) => {
                    inner.count_failed();
                    return Err(error.into());
                }
            }
        }
        let key: Box<[u8]> = key.into();
        let permit = self.permit(deadline).await.inspect_err(|_| inner.count_failed())?;
        let shared = Arc::clone(&self.store.inner);
        blocking(move || {
            let _permit = permit;
            // fetch_shared counts hits, misses and failures.
            shared.fetch_shared(Key::new(&key)?, id, deadline)
        })
        .await?
    }

    /// Stores an object.
    pub async fn put(
        &self,
        key: &[u8],
        value: Bytes,
        options: &PutOptions,
    ) -> Result<PutOutcome, StoreError> {
        let (key, options) = (Box::<[u8]>::from(key), options.clone());
        let deadline = self.store.inner.deadline();
        self.work(deadline, move |inner| {
            let item = PutItem { key: &key, parts: &[&value] };
            inner.put_batch(&[item], &options, deadline).pop().expect("one outcome per item")
        })
        .await
    }

    /// Stores many objects; one outcome for each, in order.
    pub async fn put_batch(
        &self,
        items: Vec<(Bytes, Bytes)>,
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome, StoreError>>, StoreError> {
        let options = options.clone();
        let deadline = self.store.inner.deadline();
        self.work(deadline, move |inner| {
            let parts: Vec<[&[u8]; 1]> = items.iter().map(|(_, value)| [&value[..]]).collect();
            let items: Vec<PutItem<'_>> =
                items.iter().zip(&parts).map(|((key, _), parts)| PutItem { key, parts }).collect();
            Ok(inner.put_batch(&items, &options, deadline))
        })
        .await
    }

    /// Returns copies of many objects, in the order of the keys.
    pub async fn get_batch(
        &self,
        keys: Vec<Bytes>,
    ) -> Result<Vec<Result<Option<Bytes>, StoreError>>, StoreError> {
        self.keyed(keys, |store, keys| store.get_batch(keys)).await
    }

    /// Returns whether the object exists. The key is batched with those of other tasks.
    pub async fn exists(&self, key: &[u8]) -> Result<bool, StoreError> {
        let Some(link) = &self.link else {
            let (store, key) = (self.store.clone(), Box::<[u8]>::from(key));
            return self.work(self.store.inner.deadline(), move |_| store.exists(&key)).await;
        };
        let (tenant, key) = (self.store.inner.cluster.tenant(), Key::new(key)?);
        let mut reply = link.exist_one(tenant, key).await;
        if let Err(LinkError::Lost { .. }) = reply {
            reply = link.exist_one(tenant, key).await;
        }
        reply?.map_err(StoreError::refused)
    }

    /// Returns whether each object exists.
    pub async fn exists_batch(&self, keys: Vec<Bytes>) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        let valid: Option<Vec<Key<'_>>> = keys.iter().map(|key| Key::new(key).ok()).collect();
        let (Some(link), Some(valid)) = (&self.link, valid) else {
            return self.keyed(keys, |store, keys| store.exists_batch(keys)).await;
        };
        let mut found = Vec::with_capacity(valid.len());
        let mut failed: Option<StoreError> = None;
        for part in valid.chunks(KEYS_PER_CALL) {
            if let Some(error) = &failed {
                found.extend(part.iter().map(|_| Err(error.clone())));
                continue;
            }
            match link.exist(self.store.inner.cluster.tenant(), part).await {
                Ok(replies) => {
                    found.extend(replies.into_iter().map(|reply| reply.map_err(StoreError::refused)))
                }
                Err(error) => {
                    let error = StoreError::from(error);
                    found.extend(part.iter().map(|_| Err(error.clone())));
                    failed = Some(error);
                }
            }
        }
        Ok(found)
    }

    /// Removes an object. Returns whether it existed.
    pub async fn remove(&self, key: &[u8], force: bool) -> Result<bool, StoreError> {
        let (store, key) = (self.store.clone(), Box::<[u8]>::from(key));
        self.work(self.store.inner.deadline(), move |_| store.remove(&key, force)).await
    }

    /// Marks objects as used. Returns whether each exists.
    pub async fn touch(&self, keys: Vec<Bytes>) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        self.keyed(keys, |store, keys| store.touch(keys)).await
    }

    /// Changes the pin class of objects. Returns whether each exists. See [`Store::set_pin`].
    pub async fn set_pin(
        &self,
        keys: Vec<Bytes>,
        pin: PinClass,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        self.keyed(keys, move |store, keys| store.set_pin(keys, pin)).await
    }

    /// Requests promotion of objects from disk to memory. Returns whether each exists, in memory or on disk.
    pub async fn prefetch(&self, keys: Vec<Bytes>) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        self.keyed(keys, |store, keys| store.prefetch(keys)).await
    }

    /// Makes a call with one result per key.
    async fn keyed<T: Send + 'static>(
        &self,
        keys: Vec<Bytes>,
        call: impl FnOnce(&Store, &[&[u8]]) -> Vec<Result<T, StoreError>> + Send + 'static,
    ) -> Result<Vec<Result<T, StoreError>>, StoreError> {
        let store = self.store.clone();
        self.work(self.store.inner.deadline(), move |_| {
            let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
            Ok(call(&store, &keys))
        })
        .await
    }

    /// Runs `work` with the blocking store on a blocking thread, within the limit of concurrent calls.
    pub async fn run_blocking<R: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> R + Send + 'static,
    ) -> Result<R, StoreError> {
        let store = self.store.clone();
        self.work(self.store.inner.deadline(), move |_| Ok(work(&store))).await
    }

    /// Runs `work` on a blocking thread, within the limit of concurrent calls.
    async fn work<R: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&Inner) -> Result<R, StoreError> + Send + 'static,
    ) -> Result<R, StoreError> {
        let permit = self.permit(deadline).await?;
        let inner = Arc::clone(&self.store.inner);
        blocking(move || {
            let worked = work(&inner);
            drop(permit);
            worked
        })
        .await?
    }

    /// Waits for a permit to run. Fails at once if the queue is full.
    async fn permit(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, StoreError> {
        if let Ok(permit) = Arc::clone(&self.running).try_acquire_owned() {
            return Ok(permit);
        }
        let limit = self.store.inner.config().async_queue_max;
        // Relaxed: the counter is a limit and orders nothing.
        let queued_call = QueuedCall(&self.queued);
        if self.queued.fetch_add(1, Ordering::Relaxed) >= limit {
            drop(queued_call);
            return Err(StoreError::Overloaded { limit });
        }
        let waited = timeout(
            deadline.saturating_duration_since(Instant::now()),
            Arc::clone(&self.running).acquire_owned(),
        )
        .await;
        drop(queued_call);
        match waited {
            Ok(permit) => Ok(permit.expect("the semaphore is never closed")),
            Err(_) => Err(self.store.inner.timeout_error()),
        }
    }
}

/// Counts one queued call; the count drops however the wait ends.
struct QueuedCall<'a>(&'a AtomicUsize);

impl Drop for QueuedCall<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R, StoreError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| StoreError::system("run a blocking task", error))
}
