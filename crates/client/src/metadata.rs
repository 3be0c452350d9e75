//! Operations on metadata: exists, remove, touch, prefetch, list, stat.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use moontide_proto::convert::{self, OutcomesResponse, RemoveRequest, Wire};
use moontide_proto::{FixedRecord, Handle, Packed, PackedKeys, PackedKeysBuilder, v1};
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Key, ObjectId, Span};

use crate::cluster::{Master, next_counter, retry_if_disconnected};
use crate::config::KEYS_PER_CALL;
use crate::error::StoreError;
use crate::link::KeyResult;
use crate::logic::RETRY_BACKOFF;
use crate::store::{Inner, Store};
use crate::write_plan::StripeLocation;

/// A page of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyPage {
    /// Keys, in no particular order.
    pub keys: Vec<Vec<u8>>,
    /// Cursor of the next page; empty after the last.
    pub next: Vec<u8>,
}

/// Metadata of an object at the master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Id of the object.
    pub id: ObjectId,
    /// Version of the object.
    pub epoch: Epoch,
    /// Length in bytes.
    pub len: u64,
    /// Root digest.
    pub root: u64,
    /// Whether the object is still being written.
    pub writing: bool,
    /// Resistance to eviction.
    pub pin: PinClass,
    /// Remaining time of the longest lease, in milliseconds.
    pub leased_ms: u32,
    /// Expiry time in milliseconds since 1970; 0 if the object does not expire.
    pub expires_unix_ms: u64,
    /// Locations of the stripes, by replica.
    pub stripes: Vec<StripeLocation>,
}

impl Store {
    /// Returns whether the object exists. The key is batched with those of other threads.
    pub fn exists(&self, key: &[u8]) -> Result<bool, StoreError> {
        let inner = &*self.inner;
        let (tenant, key, deadline) = (inner.cluster.tenant(), Key::new(key)?, inner.deadline());
        let mut results = inner.cluster.route(
            1,
            deadline,
            |_| inner.local_nodes.id(tenant, key),
            |master, _| {
                let link = master.link(&inner.cluster, deadline)?;
                Ok(vec![retry_if_disconnected(|| link.exist_one_until(tenant, key, Some(deadline)))?])
            },
        );
        results.pop().expect("one result per key")?.map_err(StoreError::refused)
    }

    /// Returns which objects exist, in the order of the keys.
    pub fn exists_batch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let inner = &*self.inner;
        let keys: Vec<Key<'_>> = keys.iter().map(|key| Key::new(key)).collect::<Result<_, _>>()?;
        let (tenant, deadline) = (inner.cluster.tenant(), inner.deadline());
        let mut found = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_PER_CALL) {
            let results = inner.cluster.route(
                keys.len(),
                deadline,
                |at| inner.local_nodes.id(tenant, keys[at]),
                |master, part| {
                    let part_keys: Vec<Key<'_>> = part.iter().map(|&at| keys[at]).collect();
                    let link = master.link(&inner.cluster, deadline)?;
                    Ok(retry_if_disconnected(|| link.exist_until(tenant, &part_keys, Some(deadline)))?)
                },
            );
            for result in results {
                found.push(result?.map_err(StoreError::refused)?);
            }
        }
        Ok(found)
    }

    /// Removes an object. Returns whether it existed. Fails if it is leased or pinned, unless `force` is set.
    pub fn remove(&self, key: &[u8], force: bool) -> Result<bool, StoreError> {
        self.remove_batch(&[key], force).pop().expect("one result per key")
    }

    /// Removes objects; one result each.
    pub fn remove_batch(&self, keys: &[&[u8]], force: bool) -> Vec<Result<bool, StoreError>> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let mut results = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_PER_CALL) {
            results.extend(inner.remove(part, force, deadline).into_iter().map(|removed| match removed? {
                Ok(()) => Ok(true),
                Err(ErrorCode::NotFound) => Ok(false),
                Err(code) => Err(StoreError::refused(code)),
            }));
        }
        results
    }

    /// Marks objects as used, so that they are evicted later. Returns whether each exists.
    pub fn touch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_PER_CALL) {
            let touched = inner.keyed(part, deadline, |master, context, keys| {
                let request = v1::TouchRequest { context, keys, lease_ms: 0 };
                inner.cluster.call(master, deadline, move |mut m| async move { m.touch(request).await })
            });
            for touched in touched {
                found.push(match touched? {
                    Ok(()) => true,
                    Err(ErrorCode::NotFound | ErrorCode::NotReady) => false,
                    Err(code) => return Err(StoreError::refused(code)),
                });
            }
        }
        Ok(found)
    }

    /// Requests promotion of objects from disk to memory, as soon as there is space. Returns whether each exists, in
    /// memory or on disk. Does not wait for the promotion.
    pub fn prefetch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_PER_CALL) {
            let requested = inner.keyed(part, deadline, |master, context, keys| {
                let request = v1::PrefetchRequest { context, keys, target_node: 0 };
                inner.cluster.call(master, deadline, move |mut m| async move { m.prefetch(request).await })
            });
            for requested in requested {
                found.push(match requested? {
                    // Busy: too many promotions are in flight. The object exists and will be read from disk.
                    Ok(()) | Err(ErrorCode::Busy) => true,
                    Err(ErrorCode::NotFound | ErrorCode::NotReady) => false,
                    Err(code) => return Err(StoreError::refused(code)),
                });
            }
        }
        Ok(found)
    }

    /// Returns keys with a prefix, page by page: start with an empty cursor, continue with [`KeyPage::next`].
    pub fn list(&self, prefix: &[u8], cursor: &[u8], limit: u32) -> Result<KeyPage, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let masters = inner.cluster.masters();
        // Each master lists its own keys, one master after the other. The last two bytes of the cursor are the master's
        // index.
        let (at, cursor) = match cursor.split_last_chunk::<2>() {
            Some((cursor, at)) => (usize::from(u16::from_le_bytes(*at)), cursor),
            None => (0, &[][..]),
        };
        let master = masters.hosts().nth(at).ok_or(StoreError::refused(ErrorCode::InvalidArgument))?;
        let request = v1::ListKeysRequest {
            context: Some(inner.cluster.context(deadline).to_wire()),
            page: Some(v1::Pagination { cursor: cursor.to_vec().into(), limit }),
            prefix: prefix.to_vec().into(),
        };
        let message =
            inner.cluster.call(master, deadline, move |mut m| async move { m.list_keys(request).await })?;
        check_context(&message.context)?;
        let keys = PackedKeys::decode(&message.keys).map_err(|source| {
            StoreError::InvalidResponse(convert::ConvertError::Packed { field: "keys", source })
        })?;
        let mut next = message.next_cursor.to_vec();
        let next_index = if next.is_empty() { at + 1 } else { at };
        if next_index < masters.hosts().count() {
            next.extend((next_index as u16).to_le_bytes()); // ≤ GROUPS_MAX masters
        }
        Ok(KeyPage { keys: keys.iter().map(|key| key.as_bytes().to_vec()).collect(), next })
    }

    /// Returns the metadata of an object. Does not count as an access.
    pub fn stat(&self, key: &[u8]) -> Result<Option<ObjectInfo>, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let (tenant, name) = (inner.cluster.tenant(), Key::new(key)?);
        let mut results = inner.cluster.route(
            1,
            deadline,
            |_| inner.local_nodes.id(tenant, name),
            |master, _| {
                let request = v1::QueryKeysRequest {
                    context: Some(inner.cluster.context(deadline).to_wire()),
                    keys: pack(&[key])?.into(),
                };
                let message = inner
                    .cluster
                    .call(master, deadline, move |mut m| async move { m.query_keys(request).await })?;
                check_context(&message.context)?;
                if let Some(detail) = message.details.first() {
                    return Ok(vec![Ok(object_info(detail)?)]);
                }
                let code = message.codes.first_chunk::<2>().map_or(0, |code| u16::from_le_bytes(*code));
                Ok(vec![Err(ErrorCode::try_from(u32::from(code)).unwrap_or(ErrorCode::NotFound))])
            },
        );
        match results.pop().expect("one result per key")? {
            Ok(info) => Ok(Some(info)),
            Err(ErrorCode::NotFound) => Ok(None),
            Err(code) => Err(StoreError::refused(code)),
        }
    }

    /// Starts a job that removes every object with a prefix. Returns its id, for `GET /jobs/{job}` of the master. With
    /// several masters each has its own job, and the id is that of the first.
    pub fn remove_by_prefix(&self, prefix: &[u8], force: bool) -> Result<u64, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let request = v1::RemoveByPrefixRequest {
            context: Some(inner.cluster.context(deadline).to_wire()),
            prefix: prefix.to_vec().into(),
            force,
        };
        let results = inner.cluster.call_each(deadline, |mut master| {
            let request = request.clone();
            async move { master.remove_by_prefix(request).await }
        });
        let mut first = None;
        for result in results {
            let message = result?;
            check_context(&message.context)?;
            first.get_or_insert(message.job);
        }
        first.ok_or(StoreError::refused(ErrorCode::WrongMaster))
    }

    /// Removes every object of the tenant. Returns their number. Leased and pinned objects are kept unless `force` is
    /// set: then all objects become unreadable at once, and the master frees the space afterwards.
    pub fn remove_all(&self, force: bool) -> Result<u64, StoreError> {
        if !force {
            return self.remove_one_by_one();
        }
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let context = Some(inner.cluster.context(deadline).to_wire());
        // The first master creates the generation, the others adopt it: all have it when this call returns.
        let mut generation = 0;
        let mut jobs = vec![];
        for master in inner.cluster.masters().hosts() {
            let request = v1::RemoveAllRequest { context: context.clone(), force: true, generation };
            let message = inner
                .cluster
                .call(master, deadline, move |mut m| async move { m.remove_all(request).await })?;
            check_context(&message.context)?;
            generation = message.context.as_ref().map_or(0, |context| context.tenant_generation);
            jobs.push((Arc::clone(master), message.job));
        }
        // Cached locations are of the old generation; other clients learn the new one with the node list.
        inner.refresh_nodes_now(deadline)?;
        let mut removed = 0;
        for (master, job) in jobs {
            removed += self.job_done(&master, job, deadline)?;
        }
        Ok(removed)
    }

    /// Removes the objects one by one. Each removal is acknowledged when the nodes have killed the object.
    fn remove_one_by_one(&self) -> Result<u64, StoreError> {
        let (mut removed, mut cursor) = (0, Vec::new());
        loop {
            let page = self.list(b"", &cursor, KEYS_PER_CALL as u32)?;
            let keys: Vec<&[u8]> = page.keys.iter().map(|key| &key[..]).collect();
            for outcome in self.remove_batch(&keys, false) {
                match outcome {
                    Ok(existed) => removed += u64::from(existed),
                    Err(error) if error.code() == ErrorCode::Leased => {}
                    Err(error) => return Err(error),
                }
            }
            if page.next.is_empty() {
                return Ok(removed);
            }
            cursor = page.next;
        }
    }

    /// Waits for a job. Returns the number of objects that it removed.
    fn job_done(&self, master: &Master, job: u64, deadline: Instant) -> Result<u64, StoreError> {
        let inner = &*self.inner;
        let mut backoff = RETRY_BACKOFF;
        loop {
            let request = v1::GetJobRequest { context: Some(inner.cluster.context(deadline).to_wire()), job };
            let message =
                inner.cluster.call(master, deadline, move |mut m| async move { m.get_job(request).await })?;
            check_context(&message.context)?;
            match (message.state(), ErrorCode::try_from(message.code)) {
                (v1::JobState::Done, _) => return Ok(message.affected),
                (v1::JobState::Failed, Ok(code)) => return Err(StoreError::refused(code)),
                (v1::JobState::Failed, Err(_)) => return Err(StoreError::refused(ErrorCode::Internal)),
                _ => {}
            }
            if Instant::now() >= deadline {
                return Err(inner.timeout_error());
            }
            std::thread::sleep(backoff.pause(Duration::ZERO, next_counter()));
        }
    }
}

impl Inner {
    fn remove(
        &self,
        keys: &[&[u8]],
        force: bool,
        deadline: Instant,
    ) -> Vec<Result<KeyResult<()>, StoreError>> {
        for key in keys.iter().filter_map(|key| Key::new(key).ok()) {
            self.forget_object(&self.local_nodes.id(self.cluster.tenant(), key));
        }
        self.each_keyed(keys, deadline, |master, packed, count| {
            let packed = PackedKeys::decode(packed).expect("packed above");
            let request = RemoveRequest { context: self.cluster.context(deadline), keys: packed, force };
            let link = master.link(&self.cluster, deadline)?;
            codes(&retry_if_disconnected(|| link.call(&request))?, count)
        })
    }

    /// Makes a gRPC call to each master that hosts a group of the keys. The response has one code per key.
    fn keyed(
        &self,
        keys: &[&[u8]],
        deadline: Instant,
        call: impl Fn(&Master, Option<v1::RequestContext>, Bytes) -> Result<v1::OutcomesResponse, StoreError>
        + Sync,
    ) -> Vec<Result<KeyResult<()>, StoreError>> {
        self.each_keyed(keys, deadline, |master, packed, count| {
            let context = Some(self.cluster.context(deadline).to_wire());
            codes(&call(master, context, Bytes::copy_from_slice(packed))?, count)
        })
    }

    fn each_keyed(
        &self,
        keys: &[&[u8]],
        deadline: Instant,
        call: impl Fn(&Master, &[u8], usize) -> Result<Vec<Option<ErrorCode>>, StoreError> + Sync,
    ) -> Vec<Result<KeyResult<()>, StoreError>> {
        let parsed: Result<Vec<Key<'_>>, _> = keys.iter().map(|key| Key::new(key)).collect();
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(error) => return keys.iter().map(|_| Err(StoreError::from(error))).collect(),
        };
        let tenant = self.cluster.tenant();
        self.cluster.route(
            keys.len(),
            deadline,
            |at| self.local_nodes.id(tenant, parsed[at]),
            |master, part| {
                let part_keys: Vec<&[u8]> = part.iter().map(|&at| keys[at]).collect();
                let outcomes = call(master, &pack(&part_keys)?, part_keys.len())?;
                Ok(outcomes.into_iter().map(|code| code.map_or(Ok(()), Err)).collect())
            },
        )
    }
}

fn pack(keys: &[&[u8]]) -> Result<Vec<u8>, StoreError> {
    let mut packed = PackedKeysBuilder::new();
    for key in keys {
        packed.push(Key::new(key)?).map_err(|_| StoreError::InvalidArgument {
            what: "the keys of a batch",
            rule: "less than 16 MiB in total",
        })?;
    }
    let packed = packed.finish();
    debug_assert!(packed.len() <= REQUEST_BYTES_MAX);
    Ok(packed)
}

/// Fails if the response context has an error code.
fn check_context(context: &Option<v1::ResponseContext>) -> Result<(), StoreError> {
    let code = context.as_ref().map_or(ErrorCode::Unsupported as u32, |context| context.code);
    match ErrorCode::try_from(code) {
        Ok(code) => Err(StoreError::refused(code)),
        Err(_) => Ok(()),
    }
}

fn codes(message: &v1::OutcomesResponse, expected: usize) -> Result<Vec<Option<ErrorCode>>, StoreError> {
    let response = OutcomesResponse::from_wire(message).map_err(StoreError::InvalidResponse)?;
    let outcomes = response
        .into_result()
        .map_err(|context| StoreError::refused(context.code.unwrap_or(ErrorCode::Internal)))?;
    let codes: Vec<_> = outcomes.codes.iter().collect();
    if codes.len() == expected {
        return Ok(codes);
    }
    let (field, found) = ("codes", codes.len());
    Err(StoreError::InvalidResponse(convert::ConvertError::Count { field, found, expected }))
}

fn object_info(detail: &v1::ObjectDetail) -> Result<ObjectInfo, StoreError> {
    let wrong =
        |rule| StoreError::InvalidResponse(convert::ConvertError::Relation { field: "details", rule });
    let id: [u8; 16] = detail.id[..].try_into().map_err(|_| wrong("an id has 16 bytes"))?;
    let handles = Packed::<Handle>::decode(&detail.handles, detail.handles.len() / Handle::BYTES).map_err(
        |source| StoreError::InvalidResponse(convert::ConvertError::Packed { field: "handles", source }),
    )?;
    let _ = Span::new(0, detail.len).ok_or(wrong("an object has an end"))?;
    Ok(ObjectInfo {
        id: ObjectId(id),
        epoch: Epoch::from_bits(detail.epoch).map_err(|_| wrong("an epoch has 62 bits"))?,
        len: detail.len,
        root: detail.root,
        writing: detail.writing,
        pin: u8::try_from(detail.pin)
            .ok()
            .and_then(PinClass::from_number)
            .ok_or(wrong("the pin class is valid"))?,
        leased_ms: detail.leased_ms,
        expires_unix_ms: detail.expires_unix_ms,
        stripes: handles.iter().map(|handle| StripeLocation::of(&handle)).collect(),
    })
}
