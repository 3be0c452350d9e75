//! Gets: in place, copied, one or many.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use moontide_heap::{SharedGuard, with_helpers};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::{ErrorCode, Key, ObjectId};
use parking_lot::Mutex;

use crate::cluster::spread;
use crate::decide::{Backoff, Nearness};
use crate::error::StoreError;
use crate::local::Found;
use crate::place::Placed;
use crate::read::{Outcome, Read, Served};
use crate::store::{Inner, Store};

/// Where nothing came from, it does not matter how far that is.
const FAR: Served = Served::Memory(Nearness::Far);

/// Pages that a thread takes at a time.
const PART_PAGES: usize = 4;

/// How often a get looks an object up before it gives up: places may change under it.
const ATTEMPTS_MAX: u32 = 4;

/// An object's bytes: in place in the memory of a node on this host, or a copy.
///
/// Bytes in place stay as they are until the reference is dropped, whatever happens to the object meanwhile. Drop it
/// soon: the node cannot use the memory again before.
#[derive(Debug)]
pub struct ObjectRef(Held);

#[derive(Debug)]
enum Held {
    InPlace(SharedGuard),
    Copied(Bytes),
}

impl ObjectRef {
    pub(crate) fn in_place(guard: SharedGuard) -> ObjectRef {
        ObjectRef(Held::InPlace(guard))
    }

    /// Whether the bytes are the node's own.
    pub fn is_in_place(&self) -> bool {
        matches!(self.0, Held::InPlace(_))
    }

    /// Compares the bytes with their digest; a copy was verified when it was made. `false`: do not use them.
    pub fn verify(&self) -> bool {
        match &self.0 {
            Held::InPlace(guard) => guard.verify().unwrap_or(true),
            Held::Copied(_) => true,
        }
    }
}

impl From<Bytes> for ObjectRef {
    fn from(copied: Bytes) -> ObjectRef {
        ObjectRef(Held::Copied(copied))
    }
}

impl Deref for ObjectRef {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Held::InPlace(guard) => guard.bytes(),
            Held::Copied(bytes) => bytes,
        }
    }
}

/// One object of a batch, and where its bytes go.
#[derive(Debug)]
pub struct GetInto<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// At least as long as the object.
    pub into: &'a mut [u8],
}

impl Store {
    /// An object's bytes, without a copy if a node on this host has them. `None`: there is no such object.
    #[inline]
    pub fn get_ref(&self, key: &[u8]) -> Result<Option<ObjectRef>, StoreError> {
        let inner = &*self.inner;
        let key = inner.key(key)?;
        let (id, found) = inner.near.find_key(inner.cluster.tenant(), key);
        if let Found::Here(guard) = found {
            return Ok(Some(ObjectRef(Held::InPlace(guard))));
        }
        inner.metrics.requested.inc();
        let fetched = inner.fetch_shared(key, id, inner.deadline());
        Ok(fetched?.map(|bytes| ObjectRef(Held::Copied(bytes))))
    }

    /// As [`Store::get_ref`], but only if it takes no waiting: `None` if no node on this host has the object in place.
    #[inline]
    pub fn get_ref_here(&self, key: &[u8]) -> Result<Option<ObjectRef>, StoreError> {
        let inner = &*self.inner;
        let (_, found) = inner.near.find_key(inner.cluster.tenant(), inner.key(key)?);
        Ok(match found {
            Found::Here(guard) => Some(ObjectRef(Held::InPlace(guard))),
            Found::Elsewhere => None,
        })
    }

    /// Copies an object out of what [`Store::get_ref_here`] gave, verified like every copy; `false`: the bytes are not
    /// right, get it elsewhere. `into` is as long as the object.
    pub fn copy_out(&self, from: &ObjectRef, into: &mut [u8]) -> bool {
        match &from.0 {
            Held::InPlace(guard) => self.inner.copy_out(guard, into),
            Held::Copied(bytes) => {
                into.copy_from_slice(bytes);
                true
            }
        }
    }

    /// As [`Store::copy_out`], into several pieces of memory one after the other, which together are as long as the object.
    pub fn copy_out_parts(&self, from: &ObjectRef, into: &mut [&mut [u8]]) -> bool {
        let Held::InPlace(guard) = &from.0 else {
            Scatter::over(into).take(from);
            return true;
        };
        self.inner.copy_out_parts(guard, into)
    }

    /// Copies an object into memory that is made when its length is known; how long it is. `make` is called again if the
    /// object is another one when it is read; what counts is the memory of its last call.
    pub fn get_with<'m>(
        &self,
        key: &[u8],
        make: &mut dyn FnMut(usize) -> &'m mut [u8],
    ) -> Result<Option<usize>, StoreError> {
        let inner = &*self.inner;
        let key = inner.key(key)?;
        let (id, found) = inner.near.find_key(inner.cluster.tenant(), key);
        if let Found::Here(guard) = found {
            let len = guard.bytes().len();
            if inner.copy_out(&guard, &mut make(len)[..len]) {
                return Ok(Some(len));
            }
        }
        inner.metrics.requested.inc();
        let mut wants = [Want::new(key, id, Space::Made(make))];
        inner.fetch_all(&mut wants, inner.deadline());
        let [want] = wants;
        want.into_len()
    }

    /// A copy of an object. Threads that want the same one at the same time share it.
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StoreError> {
        let inner = &*self.inner;
        let key = inner.key(key)?;
        let (id, found) = inner.near.find_key(inner.cluster.tenant(), key);
        if let Found::Here(guard) = found
            && let Some(bytes) = inner.copied(&guard)
        {
            return Ok(Some(bytes));
        }
        inner.metrics.requested.inc();
        inner.fetch_shared(key, id, inner.deadline())
    }

    /// Copies an object into memory that is at least as long; how long it is.
    pub fn get_into(&self, key: &[u8], into: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let inner = &*self.inner;
        let key = inner.key(key)?;
        let (id, found) = inner.near.find_key(inner.cluster.tenant(), key);
        if let Found::Here(guard) = found {
            let len = guard.bytes().len();
            let room = inner.room(into, len as u64)?;
            if inner.copy_out(&guard, room) {
                return Ok(Some(len));
            }
        }
        inner.metrics.requested.inc();
        let mut wants = [Want::new(key, id, Space::Lent(into))];
        inner.fetch_all(&mut wants, inner.deadline());
        let [want] = wants;
        want.into_len()
    }

    /// Many objects, each copied; in the order of the keys.
    pub fn get_batch(&self, keys: &[&[u8]]) -> Vec<Result<Option<Bytes>, StoreError>> {
        let inner = &*self.inner;
        let mut answers: Vec<Option<Result<Option<Bytes>, StoreError>>> = Vec::with_capacity(keys.len());
        let (mut wants, mut places) = (Vec::new(), Vec::new());
        for (at, key) in keys.iter().enumerate() {
            let key = match inner.key(key) {
                Ok(key) => key,
                Err(error) => {
                    answers.push(Some(Err(error)));
                    continue;
                }
            };
            let (id, found) = inner.near.find_key(inner.cluster.tenant(), key);
            let mut answer = None;
            if let Found::Here(guard) = found {
                answer = inner.copied(&guard).map(|bytes| Ok(Some(bytes)));
            }
            if answer.is_none() {
                inner.metrics.requested.inc();
                wants.push(Want::new(key, id, Space::Owned(Vec::new())));
                places.push(at);
            }
            answers.push(answer);
        }
        inner.fetch_all(&mut wants, inner.deadline());
        for (at, want) in places.into_iter().zip(wants) {
            answers[at] = Some(want.into_bytes());
        }
        answers.into_iter().map(|answer| answer.expect("each was here or wanted")).collect()
    }

    /// Many objects, each copied into its own memory; how long they are, in order.
    pub fn get_batch_into(&self, items: &mut [GetInto<'_>]) -> Vec<Result<Option<usize>, StoreError>> {
        let inner = &*self.inner;
        let mut answers: Vec<Option<Result<Option<usize>, StoreError>>> = Vec::with_capacity(items.len());
        let (mut wants, mut places) = (Vec::new(), Vec::new());
        for (at, item) in items.iter_mut().enumerate() {
            let key = match inner.key(item.key) {
                Ok(key) => key,
                Err(error) => {
                    answers.push(Some(Err(error)));
                    continue;
                }
            };
            let (id, found) = inner.near.find_key(inner.cluster.tenant(), key);
            let mut answer = None;
            if let Found::Here(guard) = found {
                let len = guard.bytes().len();
                answer = match inner.room(item.into, len as u64) {
                    Ok(room) => inner.copy_out(&guard, room).then_some(Ok(Some(len))),
                    Err(error) => Some(Err(error)),
                };
            }
            if answer.is_none() {
                inner.metrics.requested.inc();
                wants.push(Want::new(key, id, Space::Lent(item.into)));
                places.push(at);
            }
            answers.push(answer);
        }
        inner.fetch_all(&mut wants, inner.deadline());
        for (at, want) in places.into_iter().zip(wants) {
            answers[at] = Some(want.into_len());
        }
        answers.into_iter().map(|answer| answer.expect("each was here or wanted")).collect()
    }
}

/// Pieces of memory that are filled one after the other.
struct Scatter<'a, 'm> {
    rest: std::slice::IterMut<'a, &'m mut [u8]>,
    /// What is left of the piece that was begun.
    begun: &'a mut [u8],
}

impl<'a, 'm> Scatter<'a, 'm> {
    fn over(pieces: &'a mut [&'m mut [u8]]) -> Scatter<'a, 'm> {
        Scatter { rest: pieces.iter_mut(), begun: &mut [] }
    }

    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.begun.is_empty() {
                self.begun = self.rest.next().expect("as much memory as there are bytes");
                continue;
            }
            let len = bytes.len().min(self.begun.len());
            let (here, later) = bytes.split_at(len);
            let (space, left) = std::mem::take(&mut self.begun).split_at_mut(len);
            space.copy_from_slice(here);
            (bytes, self.begun) = (later, left);
        }
    }
}

/// An object that has to be fetched.
pub(crate) struct Want<'k, 'a, 'm> {
    key: Key<'k>,
    id: ObjectId,
    space: Space<'a, 'm>,
    answer: Option<Result<Option<usize>, StoreError>>,
    /// The last attempt's failure.
    last: Option<StoreError>,
}

pub(crate) enum Space<'a, 'm> {
    Owned(Vec<u8>),
    Lent(&'m mut [u8]),
    /// Made when it is known how much is needed.
    Made(&'a mut dyn FnMut(usize) -> &'m mut [u8]),
}

impl<'k, 'a, 'm> Want<'k, 'a, 'm> {
    pub(crate) fn new(key: Key<'k>, id: ObjectId, space: Space<'a, 'm>) -> Want<'k, 'a, 'm> {
        Want { key, id, space, answer: None, last: None }
    }

    fn into_len(self) -> Result<Option<usize>, StoreError> {
        self.answer.expect("fetched")
    }

    fn into_bytes(self) -> Result<Option<Bytes>, StoreError> {
        let Space::Owned(bytes) = self.space else { unreachable!("wanted as a copy") };
        Ok(self.answer.expect("fetched")?.map(|_| bytes.into()))
    }
}

impl Inner {
    /// A key that keeps to its rules; counted as failed if not.
    fn key<'k>(&self, key: &'k [u8]) -> Result<Key<'k>, StoreError> {
        Key::new(key).map_err(|error| {
            self.metrics.requested.inc();
            self.metrics.failed.inc();
            error.into()
        })
    }

    /// The part of a caller's memory that an object of this length takes.
    fn room<'m>(&self, into: &'m mut [u8], len: u64) -> Result<&'m mut [u8], StoreError> {
        let room = into.len();
        into.get_mut(..len as usize).ok_or(StoreError::BufferTooSmall { len, room })
    }

    /// A copy of an object of this host; `None`: the bytes are not right.
    pub(crate) fn copied(&self, guard: &SharedGuard) -> Option<Bytes> {
        let mut bytes = vec![0; guard.bytes().len()];
        self.copy_out(guard, &mut bytes).then(|| bytes.into())
    }

    /// Copies an object of this host out, page by page, each verified while it is in cache. `false`: the bytes are not
    /// right.
    fn copy_out(&self, guard: &SharedGuard, into: &mut [u8]) -> bool {
        let header = guard.header();
        if !self.config().verify_local || header.flags.digestless() {
            into.copy_from_slice(guard.bytes());
            return true;
        }
        let context = header.digest_context();
        let page_bytes = PAGE_BYTES as usize;
        let mut digests = vec![0; guard.bytes().len().div_ceil(page_bytes)];
        let parts = into
            .chunks_mut(PART_PAGES * page_bytes)
            .zip(guard.bytes().chunks(PART_PAGES * page_bytes))
            .zip(digests.chunks_mut(PART_PAGES))
            .enumerate();
        let parts = Mutex::new(parts);
        let work = || {
            while let Some((nth, ((to, from), digests))) = { parts.lock().next() } {
                let pages = to.chunks_mut(page_bytes).zip(from.chunks(page_bytes)).zip(digests);
                for (index, ((to, from), digest)) in ((nth * PART_PAGES) as u64..).zip(pages) {
                    to.copy_from_slice(from);
                    *digest = context.page(index, to);
                }
            }
        };
        with_helpers(guard.bytes().len() as u64, work);
        context.root_of(digests) == header.root || self.not_right(guard)
    }

    /// As [`Inner::copy_out`], into several pieces. A page may lie in two of them, so that it is verified where it comes
    /// from: while it is pinned it does not change.
    fn copy_out_parts(&self, guard: &SharedGuard, into: &mut [&mut [u8]]) -> bool {
        let header = guard.header();
        let mut into = Scatter::over(into);
        if !self.config().verify_local || header.flags.digestless() {
            into.take(guard.bytes());
            return true;
        }
        let context = header.digest_context();
        let pages = (0u64..).zip(guard.bytes().chunks(PAGE_BYTES as usize));
        let digests = pages.map(|(index, page)| {
            into.take(page);
            context.page(index, page)
        });
        context.root_of(digests) == header.root || self.not_right(guard)
    }

    /// Bytes of this host do not match their digest.
    fn not_right(&self, guard: &SharedGuard) -> bool {
        self.metrics.corrupt.inc();
        let (segment, slot) = guard.place();
        tracing::warn!(segment = segment.0, slot = slot.0, "bytes do not match their digest");
        false
    }

    /// Fetches a copy, together with whoever else wants it.
    pub(crate) fn fetch_shared(
        &self,
        key: Key<'_>,
        id: ObjectId,
        deadline: Instant,
    ) -> Result<Option<Bytes>, StoreError> {
        let fetched = self.flights.fetch(id, deadline, || {
            let mut wants = [Want::new(key, id, Space::Owned(Vec::new()))];
            self.fetch_all(&mut wants, deadline);
            let [want] = wants;
            want.into_bytes()
        });
        match fetched {
            Some((fetched, false)) => fetched,
            Some((fetched, true)) => {
                self.metrics.joined.inc();
                match &fetched {
                    Ok(Some(bytes)) => self.count_hit(Served::Memory(Nearness::Far), bytes.len()),
                    Ok(None) => self.count_miss(),
                    Err(_) => self.count_failed(),
                }
                fetched
            }
            None => {
                self.count_failed();
                Err(self.too_late())
            }
        }
    }

    /// Fetches objects that are not in memory of this host, or not readable in place.
    pub(crate) fn fetch_all(&self, wants: &mut [Want<'_, '_, '_>], deadline: Instant) {
        let mut backoff = Backoff::default();
        for attempt in 0..ATTEMPTS_MAX {
            if wants.iter().all(|want| want.answer.is_some()) {
                return;
            }
            if attempt > 1 {
                let pause = backoff.pause(Duration::ZERO, spread());
                std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
            }
            self.attempt(wants, attempt == 0, deadline);
        }
        for want in wants.iter_mut().filter(|want| want.answer.is_none()) {
            // Found again and again, and gone when it was read: for the caller it is not there.
            let answer = match want.last.take() {
                // Its node has left the cluster, and took it along.
                Some(error) if error.code() == ErrorCode::StaleSession => Ok(None),
                Some(error) => Err(error),
                None => Ok(None),
            };
            self.settle(want, answer, FAR);
        }
    }

    fn attempt(&self, wants: &mut [Want<'_, '_, '_>], may_remember: bool, deadline: Instant) {
        // Places: those that are remembered, and one call for the others.
        let mut places: Vec<Option<Arc<Placed>>> = Vec::with_capacity(wants.len());
        for want in wants.iter() {
            let remembered = may_remember && want.answer.is_none();
            places.push(remembered.then(|| self.remembered(&want.id)).flatten());
        }
        let unknown: Vec<usize> =
            (0..wants.len()).filter(|&at| wants[at].answer.is_none() && places[at].is_none()).collect();
        if !unknown.is_empty() {
            let keys: Vec<Key<'_>> = unknown.iter().map(|&at| wants[at].key).collect();
            for (&at, answer) in unknown.iter().zip(self.look_up(&keys, deadline)) {
                match answer {
                    Ok(Some(placed)) => places[at] = Some(placed),
                    Ok(None) => self.settle(&mut wants[at], Ok(None), FAR),
                    Err(error) => self.settle(&mut wants[at], Err(error), FAR),
                }
            }
        }
        // Memory for each, then all reads together.
        let mut reads = Vec::with_capacity(wants.len());
        let mut of = Vec::with_capacity(wants.len());
        for (at, (want, placed)) in wants.iter_mut().zip(&places).enumerate() {
            let Some(placed) = placed.as_ref().filter(|_| want.answer.is_none()) else { continue };
            let into: &mut [u8] = match &mut want.space {
                Space::Owned(bytes) => {
                    *bytes = vec![0; placed.len() as usize];
                    bytes
                }
                Space::Made(make) => &mut make(placed.len() as usize)[..placed.len() as usize],
                Space::Lent(space) => {
                    let room = space.len();
                    match space.get_mut(..placed.len() as usize) {
                        Some(space) => space,
                        None => {
                            let error = StoreError::BufferTooSmall { len: placed.len(), room };
                            if unknown.contains(&at) {
                                want.answer = Some(Err(error));
                                self.count_failed();
                            } else {
                                // Remembered from another time, perhaps: the master knows how long it is now.
                                self.forget(placed);
                                want.last = Some(error);
                            }
                            continue;
                        }
                    }
                }
            };
            reads.push(Read { placed: Arc::clone(placed), into, outcome: Outcome::Open });
            of.push(at);
        }
        self.read_all(&mut reads, deadline);
        let outcomes: Vec<Outcome> = reads.into_iter().map(|read| read.outcome).collect();
        for (at, outcome) in of.into_iter().zip(outcomes) {
            let placed = places[at].as_ref().expect("it was read there");
            match outcome {
                Outcome::Done(served) => {
                    self.settle(&mut wants[at], Ok(Some(placed.len() as usize)), served)
                }
                Outcome::Lost => self.settle(&mut wants[at], Ok(None), FAR),
                Outcome::Stale => {
                    self.forget(placed);
                    wants[at].last = None;
                }
                Outcome::Failed(error) => {
                    self.forget(placed);
                    // A place from memory may be of another time: the master knows better, and asking it is not a repetition.
                    let from_memory = !unknown.contains(&at);
                    let again = Instant::now() < deadline
                        && (from_memory || error.is_retryable() && self.budget.lock().spend());
                    match again {
                        true => wants[at].last = Some(error),
                        false => self.settle(&mut wants[at], Err(error), FAR),
                    }
                }
                Outcome::Open => unreachable!("each has an outcome"),
            }
        }
    }

    fn settle(&self, want: &mut Want<'_, '_, '_>, answer: Result<Option<usize>, StoreError>, served: Served) {
        match &answer {
            Ok(Some(len)) => self.count_hit(served, *len),
            Ok(None) => self.count_miss(),
            Err(_) => self.count_failed(),
        }
        want.answer = Some(answer);
    }

    pub(crate) fn count_hit(&self, served: Served, len: usize) {
        match served {
            Served::Memory(Nearness::Mapped) => self.metrics.hits_local.inc(),
            Served::Memory(_) => self.metrics.hits_remote.inc(),
            Served::Disk => self.metrics.hits_disk.inc(),
        };
        self.metrics.bytes_read.inc_by(len as u64);
    }

    pub(crate) fn count_miss(&self) {
        self.metrics.misses.inc();
    }

    pub(crate) fn count_failed(&self) {
        self.metrics.failed.inc();
    }
}
