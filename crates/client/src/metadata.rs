//! Operations on metadata: exists, remove, touch, pin, prefetch, list, stat.

use bytes::Bytes;

use moontide_proto::convert::{self, OutcomesResponse, RemoveRequest, Wire};
use moontide_proto::{Codes, FixedRecord, Handle, Packed, PackedKeys, PackedKeysBuilder, v1};
use moontide_rt::time::Instant;
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Key, ObjectId, Span};

use crate::cluster::{Master, retry_if_disconnected};
use crate::error::StoreError;
use crate::link::KeyResult;
use crate::store::{Inner, Store};
use crate::write_plan::StripeLocation;

/// Share of the timeout of a removal that is left for the response, after the master has waited for the nodes: a tenth.
const RESPONSE_SHARE: u32 = 10;

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
            |_| inner.local_nodes.id(key),
            |master, _| {
                let link = master.link(&inner.cluster, deadline)?;
                Ok(vec![retry_if_disconnected(|| link.exist_one_until(tenant, key, Some(deadline)))?])
            },
        );
        results.pop().expect("one result per key")?.map_err(StoreError::refused)
    }

    /// Returns whether each object exists.
    pub fn exists_batch(&self, keys: &[&[u8]]) -> Vec<Result<bool, StoreError>> {
        let inner = &*self.inner;
        let (tenant, deadline) = (inner.cluster.tenant(), inner.deadline());
        let results = with_valid_keys(keys, |keys| {
            inner.cluster.route(
                keys.len(),
                deadline,
                |at| inner.local_nodes.id(keys[at]),
                |master, part| {
                    let keys: Vec<Key<'_>> = part.iter().map(|&at| keys[at]).collect();
                    let link = master.link(&inner.cluster, deadline)?;
                    Ok(retry_if_disconnected(|| link.exist_until(tenant, &keys, Some(deadline)))?)
                },
            )
        });
        results.into_iter().map(|result| result?.map_err(StoreError::refused)).collect()
    }

    /// Removes an object. Returns whether it existed. Fails if it is leased or pinned, unless `force` is set.
    pub fn remove(&self, key: &[u8], force: bool) -> Result<bool, StoreError> {
        self.remove_batch(&[key], force).pop().expect("one result per key")
    }

    /// Removes objects; one result each.
    pub fn remove_batch(&self, keys: &[&[u8]], force: bool) -> Vec<Result<bool, StoreError>> {
        let inner = &*self.inner;
        let removed = inner.remove(keys, force, inner.deadline());
        let existed = removed.into_iter().map(|removed| match removed? {
            Ok(()) => Ok(true),
            Err(ErrorCode::NotFound) => Ok(false),
            Err(code) => Err(StoreError::refused(code)),
        });
        existed.collect()
    }

    /// Marks objects as used, so that they are evicted later. Returns whether each exists.
    pub fn touch(&self, keys: &[&[u8]]) -> Vec<Result<bool, StoreError>> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let touched = inner.keyed(keys, deadline, |master, context, keys| {
            let request = v1::TouchRequest { context, keys, lease_ms: 0 };
            inner.cluster.call(master, deadline, move |mut m| async move { m.touch(request).await })
        });
        let found = touched.into_iter().map(|touched| match touched? {
            Ok(()) => Ok(true),
            Err(ErrorCode::NotFound | ErrorCode::NotReady) => Ok(false),
            Err(code) => Err(StoreError::refused(code)),
        });
        found.collect()
    }

    /// Changes the pin class of objects: their resistance to eviction. Returns whether each exists. The masters keep the
    /// class. When a master is lost without a handoff, the next one knows only the class of the put.
    pub fn set_pin(&self, keys: &[&[u8]], pin: PinClass) -> Vec<Result<bool, StoreError>> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let set = inner.keyed(keys, deadline, |master, context, keys| {
            let request = v1::SetPinRequest { context, keys, pin: pin as i32 };
            inner.cluster.call(master, deadline, move |mut m| async move { m.set_pin(request).await })
        });
        let found = set.into_iter().map(|set| match set? {
            Ok(()) => Ok(true),
            Err(ErrorCode::NotFound | ErrorCode::NotReady) => Ok(false),
            Err(code) => Err(StoreError::refused(code)),
        });
        found.collect()
    }

    /// Requests promotion of objects from disk to memory, as soon as there is space. Returns whether each exists, in
    /// memory or on disk. Does not wait for the promotion.
    pub fn prefetch(&self, keys: &[&[u8]]) -> Vec<Result<bool, StoreError>> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let requested = inner.keyed(keys, deadline, |master, context, keys| {
            let request = v1::PrefetchRequest { context, keys, target_node: 0 };
            inner.cluster.call(master, deadline, move |mut m| async move { m.prefetch(request).await })
        });
        let found = requested.into_iter().map(|requested| match requested? {
            // Busy: too many promotions are in flight. The object exists and will be read from disk.
            Ok(()) | Err(ErrorCode::Busy) => Ok(true),
            Err(ErrorCode::NotFound | ErrorCode::NotReady) => Ok(false),
            Err(code) => Err(StoreError::refused(code)),
        });
        found.collect()
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
        self.stat_batch(&[key]).pop().expect("one result per key")
    }

    /// Returns the metadata of objects; `None` for each that does not exist.
    pub fn stat_batch(&self, keys: &[&[u8]]) -> Vec<Result<Option<ObjectInfo>, StoreError>> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let found = with_valid_keys(keys, |keys| {
            inner.cluster.route(
                keys.len(),
                deadline,
                |at| inner.local_nodes.id(keys[at]),
                |master, part| {
                    let keys: Vec<Key<'_>> = part.iter().map(|&at| keys[at]).collect();
                    let request = v1::QueryKeysRequest {
                        context: Some(inner.cluster.context(deadline).to_wire()),
                        keys: pack(&keys)?.into(),
                    };
                    let message = inner
                        .cluster
                        .call(master, deadline, move |mut m| async move { m.query_keys(request).await })?;
                    check_context(&message.context)?;
                    object_infos(&message, keys.len())
                },
            )
        });
        let infos = found.into_iter().map(|found| match found? {
            Ok(info) => Ok(Some(info)),
            Err(ErrorCode::NotFound) => Ok(None),
            Err(code) => Err(StoreError::refused(code)),
        });
        infos.collect()
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
            self.forget_object(&self.local_nodes.id(key));
        }
        self.each_keyed(keys, deadline, |master, packed, count| {
            let packed = PackedKeys::decode(packed).expect("packed above");
            let link = master.link(&self.cluster, deadline)?;
            let mut context = self.cluster.context(deadline);
            // The master waits for the nodes, and must respond in time: a removal that is sent again does not find what
            // the first one has removed.
            let wait_ms = context.timeout_ms;
            context.timeout_ms = (wait_ms - wait_ms / RESPONSE_SHARE).max(1);
            let request = RemoveRequest { context, keys: packed, force };
            codes(&retry_if_disconnected(|| link.call_for(&request, wait_ms))?, count)
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
        with_valid_keys(keys, |keys| {
            self.cluster.route(
                keys.len(),
                deadline,
                |at| self.local_nodes.id(keys[at]),
                |master, part| {
                    let keys: Vec<Key<'_>> = part.iter().map(|&at| keys[at]).collect();
                    let outcomes = call(master, &pack(&keys)?, keys.len())?;
                    Ok(outcomes.into_iter().map(|code| code.map_or(Ok(()), Err)).collect())
                },
            )
        })
    }
}

/// Makes a call for the valid keys. Returns one result for each key, in their order.
fn with_valid_keys<'k, T>(
    keys: &[&'k [u8]],
    call: impl FnOnce(&[Key<'k>]) -> Vec<Result<T, StoreError>>,
) -> Vec<Result<T, StoreError>> {
    let checked: Vec<Result<Key<'k>, StoreError>> =
        keys.iter().map(|key| Key::new(key).map_err(StoreError::from)).collect();
    let valid: Vec<Key<'k>> = checked.iter().filter_map(|key| key.as_ref().ok().copied()).collect();
    let mut results = call(&valid).into_iter();
    let result_of = |key: Result<Key<'k>, StoreError>| match key {
        Ok(_) => results.next().expect("one result per valid key"),
        Err(error) => Err(error),
    };
    checked.into_iter().map(result_of).collect()
}

fn pack(keys: &[Key<'_>]) -> Result<Vec<u8>, StoreError> {
    let mut packed = PackedKeysBuilder::new();
    for &key in keys {
        packed.push(key).map_err(|_| StoreError::InvalidArgument {
            what: "the keys of a batch",
            rule: "less than 16 MiB in total",
        })?;
    }
    let packed = packed.finish();
    debug_assert!(packed.len() <= REQUEST_BYTES_MAX);
    Ok(packed)
}

/// Fails if the response context has an error code.
pub(crate) fn check_context(context: &Option<v1::ResponseContext>) -> Result<(), StoreError> {
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

/// Returns metadata or a code for each key of a query.
fn object_infos(
    message: &v1::QueryKeysResponse,
    expected: usize,
) -> Result<Vec<KeyResult<ObjectInfo>>, StoreError> {
    let codes = Codes::decode(&message.codes, expected).map_err(|source| {
        StoreError::InvalidResponse(convert::ConvertError::Packed { field: "codes", source })
    })?;
    let mut details = message.details.iter();
    let infos = codes.iter().map(|code| match code {
        Some(code) => Ok(Err(code)),
        None => match details.next() {
            Some(detail) => object_info(detail).map(Ok),
            None => {
                let (field, found) = ("details", message.details.len());
                Err(StoreError::InvalidResponse(convert::ConvertError::Count { field, found, expected }))
            }
        },
    });
    let infos: Vec<KeyResult<ObjectInfo>> = infos.collect::<Result<_, _>>()?;
    if infos.len() == expected {
        return Ok(infos);
    }
    let (field, found) = ("codes", infos.len());
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
