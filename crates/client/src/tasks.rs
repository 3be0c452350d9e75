//! [`AsyncStore`]: the same calls for tasks.
//!
//! A task asks the master by the shared asynchronous link, where the keys of many tasks travel together, and reads what
//! is mapped in place. Bytes that have to be moved are moved by blocking threads, of which a bounded number works and a
//! bounded number waits: beyond that a call is refused at once, because a cache that answers late is no use.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytes::Bytes;
use moontide_types::{Key, ObjectId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout_at;

use crate::config::{PutOptions, StoreConfig};
use crate::error::StoreError;
use crate::get::ObjectRef;
use crate::link::{AsyncLink, LinkError};
use crate::local::Found;
use crate::put::{Put, PutItem};
use crate::store::{Inner, Store};

/// Copies up to this length are made on the task: they take less than handing them over would.
const COPY_HERE_MAX: u64 = 256 << 10;

/// A store for tasks of a tokio runtime. Clones share everything.
#[derive(Clone, Debug)]
pub struct AsyncStore {
    store: Store,
    /// To a master that is alone. Where there are several, threads ask them.
    link: Option<AsyncLink>,
    working: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
}

impl AsyncStore {
    /// Connects. Fails within [`StoreConfig::connect`] if no master answers, saying where and what to do.
    pub async fn connect(config: StoreConfig) -> Result<AsyncStore, StoreError> {
        let working = Arc::new(Semaphore::new(config.working));
        let store = blocking(move || Store::connect(config)).await??;
        let link = match store.inner.cluster.link_config() {
            Some(config) => Some(AsyncLink::connect(config).await?),
            None => None,
        };
        Ok(AsyncStore { store, link, working, waiting: Arc::default() })
    }

    /// The same store, for threads.
    pub fn blocking(&self) -> &Store {
        &self.store
    }

    /// An object's bytes, without a copy if a node on this host has them. `None`: there is no such object.
    pub async fn get_ref(&self, key: &[u8]) -> Result<Option<ObjectRef>, StoreError> {
        let inner = &*self.store.inner;
        let (id, found) = inner.near.find_key(inner.cluster.tenant(), Key::new(key)?);
        if let Found::Here(guard) = found {
            return Ok(Some(ObjectRef::in_place(guard)));
        }
        Ok(self.fetch(key, id).await?.map(ObjectRef::from))
    }

    /// A copy of an object. Tasks that want the same one at the same time share it.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StoreError> {
        let inner = &*self.store.inner;
        let (id, found) = inner.near.find_key(inner.cluster.tenant(), Key::new(key)?);
        if let Found::Here(guard) = found {
            let copied = if guard.header().stripe_len <= COPY_HERE_MAX {
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
        inner.metrics.requested.inc();
        let deadline = inner.deadline();
        // Before anything is asked: whoever would wait in vain is told for nearly nothing.
        let limit = inner.config().waiting;
        if self.waiting.load(Ordering::Relaxed) >= limit {
            inner.count_failed();
            return Err(StoreError::Overloaded { limit });
        }
        if inner.remembered(&id).is_none()
            && let Some(link) = &self.link
        {
            // Asked here, where it travels with the keys of other tasks; the fetch finds it remembered.
            let (tenant, lease_ms) = (inner.cluster.tenant(), inner.config().lease_ms());
            let key = Key::new(key)?;
            let mut answer = link.lookup_one(tenant, key, lease_ms).await;
            if let Err(LinkError::Lost { .. }) = answer {
                // A master that was started anew is found by the next attempt.
                answer = link.lookup_one(tenant, key, lease_ms).await;
            }
            match answer.map(|found| inner.understood(found)) {
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
        let turn = self.turn(deadline).await.inspect_err(|_| inner.count_failed())?;
        let shared = Arc::clone(&self.store.inner);
        blocking(move || {
            let _turn = turn;
            // It counts what it finds.
            shared.fetch_shared(Key::new(&key)?, id, deadline)
        })
        .await?
    }

    /// Stores an object.
    pub async fn put(&self, key: &[u8], value: Bytes, options: &PutOptions) -> Result<Put, StoreError> {
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
    ) -> Result<Vec<Result<Put, StoreError>>, StoreError> {
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

    /// Many objects, each copied; in the order of the keys.
    pub async fn get_batch(
        &self,
        keys: Vec<Bytes>,
    ) -> Result<Vec<Result<Option<Bytes>, StoreError>>, StoreError> {
        let store = self.store.clone();
        self.work(self.store.inner.deadline(), move |_| {
            let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
            Ok(store.get_batch(&keys))
        })
        .await
    }

    /// Whether there is such an object. Leaves together with the keys of other tasks.
    pub async fn exists(&self, key: &[u8]) -> Result<bool, StoreError> {
        let Some(link) = &self.link else {
            let (store, key) = (self.store.clone(), Box::<[u8]>::from(key));
            return self.work(self.store.inner.deadline(), move |_| store.exists(&key)).await;
        };
        let (tenant, key) = (self.store.inner.cluster.tenant(), Key::new(key)?);
        let mut answer = link.exist_one(tenant, key).await;
        if let Err(LinkError::Lost { .. }) = answer {
            answer = link.exist_one(tenant, key).await;
        }
        answer?.map_err(StoreError::refused)
    }

    /// Which objects there are, in the order of the keys; at most 4,096.
    pub async fn exists_batch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let Some(link) = &self.link else {
            let (store, keys) = (self.store.clone(), keys.iter().map(|key| key.to_vec()).collect::<Vec<_>>());
            return self
                .work(self.store.inner.deadline(), move |_| {
                    store.exists_batch(&keys.iter().map(|key| &key[..]).collect::<Vec<_>>())
                })
                .await;
        };
        let keys: Vec<Key<'_>> = keys.iter().map(|key| Key::new(key)).collect::<Result<_, _>>()?;
        let answers = link.exist(self.store.inner.cluster.tenant(), &keys).await?;
        answers.into_iter().map(|answer| answer.map_err(StoreError::refused)).collect()
    }

    /// Removes an object; whether there was one.
    pub async fn remove(&self, key: &[u8], force: bool) -> Result<bool, StoreError> {
        let (store, key) = (self.store.clone(), Box::<[u8]>::from(key));
        self.work(self.store.inner.deadline(), move |_| store.remove(&key, force)).await
    }

    /// Marks objects as used; whether each is there.
    pub async fn touch(&self, keys: Vec<Bytes>) -> Result<Vec<bool>, StoreError> {
        let store = self.store.clone();
        self.work(self.store.inner.deadline(), move |_| {
            let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
            store.touch(&keys)
        })
        .await
    }

    /// Has objects that are on disk brought back into memory; whether each is there at all.
    pub async fn prefetch(&self, keys: Vec<Bytes>) -> Result<Vec<bool>, StoreError> {
        let store = self.store.clone();
        self.work(self.store.inner.deadline(), move |_| {
            let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
            store.prefetch(&keys)
        })
        .await
    }

    /// Runs something of the store for threads, on a thread of its own and in its turn.
    pub async fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> R + Send + 'static,
    ) -> Result<R, StoreError> {
        let store = self.store.clone();
        self.work(self.store.inner.deadline(), move |_| Ok(work(&store))).await
    }

    /// Runs something that waits on a blocking thread, in its turn.
    async fn work<R: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&Inner) -> Result<R, StoreError> + Send + 'static,
    ) -> Result<R, StoreError> {
        let permit = self.turn(deadline).await?;
        let inner = Arc::clone(&self.store.inner);
        blocking(move || {
            let worked = work(&inner);
            drop(permit);
            worked
        })
        .await?
    }

    /// A place among those that work.
    async fn turn(&self, deadline: Instant) -> Result<OwnedSemaphorePermit, StoreError> {
        if let Ok(permit) = Arc::clone(&self.working).try_acquire_owned() {
            return Ok(permit);
        }
        let limit = self.store.inner.config().waiting;
        // Relaxed: a bound, not a lock.
        let place = Waiting(&self.waiting);
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= limit {
            drop(place);
            return Err(StoreError::Overloaded { limit });
        }
        let waited = timeout_at(deadline.into(), Arc::clone(&self.working).acquire_owned()).await;
        drop(place);
        match waited {
            Ok(permit) => Ok(permit.expect("the semaphore is never closed")),
            Err(_) => Err(self.store.inner.too_late()),
        }
    }
}

/// One of those that wait; counted down however the wait ends.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R, StoreError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| StoreError::system("work on a thread", error))
}
