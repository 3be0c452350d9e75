//! Everything about objects but their bytes: exists, remove, touch, prefetch, list, stat.

use std::time::{Duration, Instant};

use moontide_proto::convert::{self, OutcomesResponse, RemoveRequest, Wire};
use moontide_proto::{FixedRecord, Handle, Packed, PackedKeys, PackedKeysBuilder, v1};
use moontide_types::bounds::REQUEST_BYTES_MAX;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Key, ObjectId, Span};

use crate::cluster::{insisting, spread};
use crate::config::KEYS_PER_CALL;
use crate::decide::Backoff;
use crate::error::StoreError;
use crate::plan::StripePlace;
use crate::store::{Inner, Store};

/// A page of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyPage {
    /// The keys, in no particular order.
    pub keys: Vec<Vec<u8>>,
    /// Where the next page begins; empty after the last.
    pub next: Vec<u8>,
}

/// What the master knows about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its id.
    pub id: ObjectId,
    /// Its version.
    pub epoch: Epoch,
    /// Its length.
    pub len: u64,
    /// Its root digest.
    pub root: u64,
    /// Whether it is still being written.
    pub writing: bool,
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// Longest lease still out, in milliseconds.
    pub leased_ms: u32,
    /// When it expires, in milliseconds since 1970; 0 for never.
    pub expires_unix_ms: u64,
    /// Its stripes, by replica.
    pub stripes: Vec<StripePlace>,
}

impl Store {
    /// Whether there is such an object. Leaves together with the keys of other threads.
    pub fn exists(&self, key: &[u8]) -> Result<bool, StoreError> {
        let inner = &*self.inner;
        let (tenant, key) = (inner.cluster.tenant(), Key::new(key)?);
        let answer = insisting(|| inner.cluster.link.exist_one(tenant, key))?;
        answer.map_err(StoreError::refused)
    }

    /// Which objects there are, in the order of the keys.
    pub fn exists_batch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let inner = &*self.inner;
        let keys: Vec<Key<'_>> = keys.iter().map(|key| Key::new(key)).collect::<Result<_, _>>()?;
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_PER_CALL) {
            for answer in insisting(|| inner.cluster.link.exist(inner.cluster.tenant(), part))? {
                found.push(answer.map_err(StoreError::refused)?);
            }
        }
        Ok(found)
    }

    /// Removes an object; whether there was one. With `force` also one that is leased or pinned.
    pub fn remove(&self, key: &[u8], force: bool) -> Result<bool, StoreError> {
        self.remove_batch(&[key], force).pop().expect("one answer per key")
    }

    /// Removes objects; one answer each.
    pub fn remove_batch(&self, keys: &[&[u8]], force: bool) -> Vec<Result<bool, StoreError>> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let mut answers = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_PER_CALL) {
            match inner.remove(part, force, deadline) {
                Ok(codes) => answers.extend(codes.into_iter().map(|code| match code {
                    None => Ok(true),
                    Some(ErrorCode::NotFound) => Ok(false),
                    Some(code) => Err(StoreError::refused(code)),
                })),
                Err(error) => answers.extend(part.iter().map(|_| Err(error.clone()))),
            }
        }
        answers
    }

    /// Marks objects as used, so that they are evicted later; whether each is there.
    pub fn touch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_PER_CALL) {
            let request = v1::TouchRequest {
                context: Some(inner.cluster.context(deadline).to_wire()),
                keys: pack(part)?.into(),
                lease_ms: 0,
            };
            let message =
                inner.cluster.call(deadline, move |mut master| async move { master.touch(request).await })?;
            for code in codes(&message, part.len())? {
                found.push(match code {
                    None => true,
                    Some(ErrorCode::NotFound | ErrorCode::NotReady) => false,
                    Some(code) => return Err(StoreError::refused(code)),
                });
            }
        }
        Ok(found)
    }

    /// Has objects that are on disk brought back into memory ahead of need, as soon as there is room; whether each is there
    /// at all. Returns when that is ordered, not when it is done.
    pub fn prefetch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_PER_CALL) {
            let request = v1::PrefetchRequest {
                context: Some(inner.cluster.context(deadline).to_wire()),
                keys: pack(part)?.into(),
                near_node: 0,
            };
            let message = inner
                .cluster
                .call(deadline, move |mut master| async move { master.prefetch(request).await })?;
            for code in codes(&message, part.len())? {
                found.push(match code {
                    // Busy: too many are on their way already. It is there, and will be read from disk.
                    None | Some(ErrorCode::Busy) => true,
                    Some(ErrorCode::NotFound | ErrorCode::NotReady) => false,
                    Some(code) => return Err(StoreError::refused(code)),
                });
            }
        }
        Ok(found)
    }

    /// Keys with a prefix, page by page: begin with an empty cursor, go on with [`KeyPage::next`].
    pub fn list(&self, prefix: &[u8], cursor: &[u8], limit: u32) -> Result<KeyPage, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let request = v1::ListKeysRequest {
            context: Some(inner.cluster.context(deadline).to_wire()),
            page: Some(v1::Page { cursor: cursor.to_vec().into(), limit }),
            prefix: prefix.to_vec().into(),
        };
        let message =
            inner.cluster.call(deadline, move |mut master| async move { master.list_keys(request).await })?;
        refusal(&message.context)?;
        let keys = PackedKeys::decode(&message.keys)
            .map_err(|source| StoreError::Answer(convert::ConvertError::Packed { field: "keys", source }))?;
        Ok(KeyPage {
            keys: keys.iter().map(|key| key.as_bytes().to_vec()).collect(),
            next: message.next_cursor.to_vec(),
        })
    }

    /// What the master knows about an object. Counts as no access.
    pub fn stat(&self, key: &[u8]) -> Result<Option<ObjectInfo>, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let request = v1::QueryKeysRequest {
            context: Some(inner.cluster.context(deadline).to_wire()),
            keys: pack(&[key])?.into(),
        };
        let message = inner
            .cluster
            .call(deadline, move |mut master| async move { master.query_keys(request).await })?;
        refusal(&message.context)?;
        message.details.first().map(object_info).transpose()
    }

    /// Starts removing every object with a prefix; the number of the job, for `GET /jobs/{job}` of the master.
    pub fn remove_by_prefix(&self, prefix: &[u8], force: bool) -> Result<u64, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let request = v1::RemoveByPrefixRequest {
            context: Some(inner.cluster.context(deadline).to_wire()),
            prefix: prefix.to_vec().into(),
            force,
        };
        let message = inner
            .cluster
            .call(deadline, move |mut master| async move { master.remove_by_prefix(request).await })?;
        refusal(&message.context)?;
        Ok(message.job)
    }

    /// Removes every object of the tenant; how many there were. What is leased or pinned stays, unless by `force`: then
    /// everything is gone at once, and the master frees the space afterwards.
    pub fn remove_all(&self, force: bool) -> Result<u64, StoreError> {
        if !force {
            return self.remove_one_by_one();
        }
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let context = Some(inner.cluster.context(deadline).to_wire());
        let request = v1::RemoveAllRequest { context, force: true, generation: 0 };
        let message =
            inner.cluster.call(deadline, move |mut master| async move { master.remove_all(request).await })?;
        refusal(&message.context)?;
        // What this process remembers is of before; others learn it with the table of nodes.
        inner.refresh_nodes_anew(deadline)?;
        self.job_done(message.job, deadline)
    }

    /// Like any removal, each is acknowledged when the nodes have killed the object.
    fn remove_one_by_one(&self) -> Result<u64, StoreError> {
        let (mut removed, mut cursor) = (0, Vec::new());
        loop {
            let page = self.list(b"", &cursor, KEYS_PER_CALL as u32)?;
            let keys: Vec<&[u8]> = page.keys.iter().map(|key| &key[..]).collect();
            for outcome in self.remove_batch(&keys, false) {
                match outcome {
                    Ok(was_there) => removed += u64::from(was_there),
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

    /// Waits for a job; what it removed.
    fn job_done(&self, job: u64, deadline: Instant) -> Result<u64, StoreError> {
        let inner = &*self.inner;
        let mut backoff = Backoff::default();
        loop {
            let request = v1::GetJobRequest { context: Some(inner.cluster.context(deadline).to_wire()), job };
            let message =
                inner.cluster.call(deadline, move |mut master| async move { master.get_job(request).await })?;
            refusal(&message.context)?;
            match (message.state(), ErrorCode::try_from(message.code)) {
                (v1::JobState::Done, _) => return Ok(message.affected),
                (v1::JobState::Failed, Ok(code)) => return Err(StoreError::refused(code)),
                (v1::JobState::Failed, Err(_)) => return Err(StoreError::refused(ErrorCode::Internal)),
                _ => {}
            }
            if Instant::now() >= deadline {
                return Err(inner.too_late());
            }
            std::thread::sleep(backoff.pause(Duration::ZERO, spread()));
        }
    }
}

impl Inner {
    fn remove(
        &self,
        keys: &[&[u8]],
        force: bool,
        deadline: Instant,
    ) -> Result<Vec<Option<ErrorCode>>, StoreError> {
        let packed = pack(keys)?;
        for key in keys {
            let id = self.near.id(self.cluster.tenant(), Key::new(key)?);
            self.forget_object(&id);
        }
        let packed = PackedKeys::decode(&packed).expect("made by us");
        let request = RemoveRequest { context: self.cluster.context(deadline), keys: packed, force };
        let reply = insisting(|| self.cluster.link.call(&request))?;
        codes(&reply, keys.len())
    }
}

fn pack(keys: &[&[u8]]) -> Result<Vec<u8>, StoreError> {
    let mut packed = PackedKeysBuilder::new();
    for key in keys {
        packed.push(Key::new(key)?).map_err(|_| StoreError::Argument {
            what: "the keys of a batch",
            rule: "less than 16 MiB together",
        })?;
    }
    let packed = packed.finish();
    debug_assert!(packed.len() <= REQUEST_BYTES_MAX);
    Ok(packed)
}

/// Why a call failed as a whole, if it did.
fn refusal(context: &Option<v1::ResponseContext>) -> Result<(), StoreError> {
    let code = context.as_ref().map_or(ErrorCode::Unsupported as u32, |context| context.code);
    match ErrorCode::try_from(code) {
        Ok(code) => Err(StoreError::refused(code)),
        Err(_) => Ok(()),
    }
}

fn codes(message: &v1::OutcomesResponse, expected: usize) -> Result<Vec<Option<ErrorCode>>, StoreError> {
    let answer = OutcomesResponse::from_wire(message).map_err(StoreError::Answer)?;
    let outcomes = answer
        .into_result()
        .map_err(|context| StoreError::refused(context.code.unwrap_or(ErrorCode::Internal)))?;
    let codes: Vec<_> = outcomes.codes.iter().collect();
    if codes.len() == expected {
        return Ok(codes);
    }
    let (field, found) = ("codes", codes.len());
    Err(StoreError::Answer(convert::ConvertError::Count { field, found, expected }))
}

fn object_info(detail: &v1::ObjectDetail) -> Result<ObjectInfo, StoreError> {
    let wrong = |rule| StoreError::Answer(convert::ConvertError::Relation { field: "details", rule });
    let id: [u8; 16] = detail.id[..].try_into().map_err(|_| wrong("an id has 16 bytes"))?;
    let handles = Packed::<Handle>::decode(&detail.handles, detail.handles.len() / Handle::BYTES)
        .map_err(|source| StoreError::Answer(convert::ConvertError::Packed { field: "handles", source }))?;
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
            .ok_or(wrong("a pin class is known"))?,
        leased_ms: detail.leased_ms,
        expires_unix_ms: detail.expires_unix_ms,
        stripes: handles.iter().map(|handle| StripePlace::of(&handle)).collect(),
    })
}
