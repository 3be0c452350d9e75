//! Everything about objects but their bytes: exists, remove, touch, prefetch, list, stat.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use moontide_proto::convert::{self, OutcomesResponse, RemoveRequest, Wire};
use moontide_proto::{FixedRecord, Handle, Packed, PackedKeys, PackedKeysBuilder, v1};
use moontide_types::bounds::REQUEST_BYTES_MAX;
use moontide_types::record::PinClass;
use moontide_types::{Epoch, ErrorCode, Key, ObjectId, Span};

use crate::cluster::{Master, insisting, spread};
use crate::config::KEYS_PER_CALL;
use crate::decide::Backoff;
use crate::error::StoreError;
use crate::link::KeyResult;
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
        let mut answers = inner.cluster.route(
            1,
            inner.deadline(),
            |_| inner.near.id(tenant, key),
            |master, _| {
                let link = master.link(&inner.cluster)?;
                Ok(vec![insisting(|| link.exist_one(tenant, key))?])
            },
        );
        answers.pop().expect("one answer per key")?.map_err(StoreError::refused)
    }

    /// Which objects there are, in the order of the keys.
    pub fn exists_batch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let inner = &*self.inner;
        let keys: Vec<Key<'_>> = keys.iter().map(|key| Key::new(key)).collect::<Result<_, _>>()?;
        let (tenant, deadline) = (inner.cluster.tenant(), inner.deadline());
        let mut found = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_PER_CALL) {
            let answers = inner.cluster.route(
                keys.len(),
                deadline,
                |at| inner.near.id(tenant, keys[at]),
                |master, part| {
                    let asked: Vec<Key<'_>> = part.iter().map(|&at| keys[at]).collect();
                    let link = master.link(&inner.cluster)?;
                    Ok(insisting(|| link.exist(tenant, &asked))?)
                },
            );
            for answer in answers {
                found.push(answer?.map_err(StoreError::refused)?);
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
            answers.extend(inner.remove(part, force, deadline).into_iter().map(|removed| match removed? {
                Ok(()) => Ok(true),
                Err(ErrorCode::NotFound) => Ok(false),
                Err(code) => Err(StoreError::refused(code)),
            }));
        }
        answers
    }

    /// Marks objects as used, so that they are evicted later; whether each is there.
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

    /// Has objects that are on disk brought back into memory ahead of need, as soon as there is room; whether each is there
    /// at all. Returns when that is ordered, not when it is done.
    pub fn prefetch(&self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_PER_CALL) {
            let ordered = inner.keyed(part, deadline, |master, context, keys| {
                let request = v1::PrefetchRequest { context, keys, near_node: 0 };
                inner.cluster.call(master, deadline, move |mut m| async move { m.prefetch(request).await })
            });
            for ordered in ordered {
                found.push(match ordered? {
                    // Busy: too many are on their way already. It is there, and will be read from disk.
                    Ok(()) | Err(ErrorCode::Busy) => true,
                    Err(ErrorCode::NotFound | ErrorCode::NotReady) => false,
                    Err(code) => return Err(StoreError::refused(code)),
                });
            }
        }
        Ok(found)
    }

    /// Keys with a prefix, page by page: begin with an empty cursor, go on with [`KeyPage::next`].
    pub fn list(&self, prefix: &[u8], cursor: &[u8], limit: u32) -> Result<KeyPage, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let masters = inner.cluster.masters();
        // A master lists what it hosts; the next one begins where it ends. Who is next is written behind its cursor.
        let (at, cursor) = match cursor.split_last_chunk::<2>() {
            Some((cursor, at)) => (usize::from(u16::from_le_bytes(*at)), cursor),
            None => (0, &[][..]),
        };
        let master = masters.hosts().nth(at).ok_or(StoreError::refused(ErrorCode::InvalidArgument))?;
        let request = v1::ListKeysRequest {
            context: Some(inner.cluster.context(deadline).to_wire()),
            page: Some(v1::Page { cursor: cursor.to_vec().into(), limit }),
            prefix: prefix.to_vec().into(),
        };
        let message =
            inner.cluster.call(master, deadline, move |mut m| async move { m.list_keys(request).await })?;
        refusal(&message.context)?;
        let keys = PackedKeys::decode(&message.keys)
            .map_err(|source| StoreError::Answer(convert::ConvertError::Packed { field: "keys", source }))?;
        let mut next = message.next_cursor.to_vec();
        let follows = if next.is_empty() { at + 1 } else { at };
        if follows < masters.hosts().count() {
            next.extend((follows as u16).to_le_bytes()); // ≤ GROUPS_MAX masters
        }
        Ok(KeyPage { keys: keys.iter().map(|key| key.as_bytes().to_vec()).collect(), next })
    }

    /// What the master knows about an object. Counts as no access.
    pub fn stat(&self, key: &[u8]) -> Result<Option<ObjectInfo>, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let (tenant, name) = (inner.cluster.tenant(), Key::new(key)?);
        let mut answers = inner.cluster.route(
            1,
            deadline,
            |_| inner.near.id(tenant, name),
            |master, _| {
                let request = v1::QueryKeysRequest {
                    context: Some(inner.cluster.context(deadline).to_wire()),
                    keys: pack(&[key])?.into(),
                };
                let message = inner.cluster.call(master, deadline, move |mut m| async move {
                    m.query_keys(request).await
                })?;
                refusal(&message.context)?;
                if let Some(detail) = message.details.first() {
                    return Ok(vec![Ok(object_info(detail)?)]);
                }
                let code = message.codes.first_chunk::<2>().map_or(0, |code| u16::from_le_bytes(*code));
                Ok(vec![Err(ErrorCode::try_from(u32::from(code)).unwrap_or(ErrorCode::NotFound))])
            },
        );
        match answers.pop().expect("one answer per key")? {
            Ok(info) => Ok(Some(info)),
            Err(ErrorCode::NotFound) => Ok(None),
            Err(code) => Err(StoreError::refused(code)),
        }
    }

    /// Starts removing every object with a prefix; the number of the job, for `GET /jobs/{job}` of the master. Where there
    /// are several masters each has a job of its own, and the number is that of the first.
    pub fn remove_by_prefix(&self, prefix: &[u8], force: bool) -> Result<u64, StoreError> {
        let inner = &*self.inner;
        let deadline = inner.deadline();
        let request = v1::RemoveByPrefixRequest {
            context: Some(inner.cluster.context(deadline).to_wire()),
            prefix: prefix.to_vec().into(),
            force,
        };
        let answers = inner.cluster.call_each(deadline, |mut master| {
            let request = request.clone();
            async move { master.remove_by_prefix(request).await }
        });
        let mut first = None;
        for answer in answers {
            let message = answer?;
            refusal(&message.context)?;
            first.get_or_insert(message.job);
        }
        first.ok_or(StoreError::refused(ErrorCode::WrongMaster))
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
        // The first master draws the generation, the others take it over: all have it when this is acknowledged.
        let mut generation = 0;
        let mut jobs = vec![];
        for master in inner.cluster.masters().hosts() {
            let request = v1::RemoveAllRequest { context: context.clone(), force: true, generation };
            let message =
                inner.cluster.call(master, deadline, move |mut m| async move { m.remove_all(request).await })?;
            refusal(&message.context)?;
            generation = message.context.as_ref().map_or(0, |context| context.tenant_generation);
            jobs.push((Arc::clone(master), message.job));
        }
        // What this process remembers is of before; others learn it with the table of nodes.
        inner.refresh_nodes_anew(deadline)?;
        let mut removed = 0;
        for (master, job) in jobs {
            removed += self.job_done(&master, job, deadline)?;
        }
        Ok(removed)
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
    fn job_done(&self, master: &Master, job: u64, deadline: Instant) -> Result<u64, StoreError> {
        let inner = &*self.inner;
        let mut backoff = Backoff::default();
        loop {
            let request = v1::GetJobRequest { context: Some(inner.cluster.context(deadline).to_wire()), job };
            let message =
                inner.cluster.call(master, deadline, move |mut m| async move { m.get_job(request).await })?;
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
    ) -> Vec<Result<KeyResult<()>, StoreError>> {
        for key in keys.iter().filter_map(|key| Key::new(key).ok()) {
            self.forget_object(&self.near.id(self.cluster.tenant(), key));
        }
        self.each_keyed(keys, deadline, |master, packed, count| {
            let packed = PackedKeys::decode(packed).expect("made by us");
            let request = RemoveRequest { context: self.cluster.context(deadline), keys: packed, force };
            let link = master.link(&self.cluster)?;
            codes(&insisting(|| link.call(&request))?, count)
        })
    }

    /// A call over gRPC about keys, to each master that hosts some of them, that answers with a code for each.
    fn keyed(
        &self,
        keys: &[&[u8]],
        deadline: Instant,
        call: impl Fn(&Master, Option<v1::RequestContext>, Bytes) -> Result<v1::OutcomesResponse, StoreError>,
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
        call: impl Fn(&Master, &[u8], usize) -> Result<Vec<Option<ErrorCode>>, StoreError>,
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
            |at| self.near.id(tenant, parsed[at]),
            |master, part| {
                let asked: Vec<&[u8]> = part.iter().map(|&at| keys[at]).collect();
                let outcomes = call(master, &pack(&asked)?, asked.len())?;
                Ok(outcomes.into_iter().map(|code| code.map_or(Ok(()), Err)).collect())
            },
        )
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
