//! Gets: zero-copy references and copies, of single objects and batches.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moontide_heap::{SharedGuard, run_parallel};
use moontide_rt::sync::Mutex;
use moontide_rt::time::Instant;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{ErrorCode, Key, ObjectId};

use crate::cluster::{Rounds, next_counter};
use crate::error::StoreError;
use crate::local::LocalLookup;
use crate::logic::{Distance, RETRY_BACKOFF, is_unanswered};
use crate::read::{ObjectRead, Outcome, ReadSource};
use crate::replica_list::ReplicaList;
use crate::store::{Inner, Store};

/// Source argument of gets that return no bytes; ignored.
const NO_DISTANCE: ReadSource = ReadSource::Memory(Distance::Remote);

/// Pages that a thread of a parallel copy takes at a time.
const PART_PAGES: usize = 4;

/// Attempts of a get. Locations may change between look-up and read.
const ATTEMPTS_MAX: u32 = 4;

/// An object's bytes: zero-copy in the memory of a local node, or a copy.
///
/// Zero-copy bytes do not change until the reference is dropped, whatever happens to the object meanwhile. Drop it
/// soon: until then the node cannot reuse the memory.
#[derive(Debug)]
pub struct ObjectRef(ObjectBytes);

#[derive(Debug)]
enum ObjectBytes {
    InPlace(SharedGuard),
    Copied(Bytes),
}

impl ObjectRef {
    pub(crate) fn zero_copy(guard: SharedGuard) -> ObjectRef {
        ObjectRef(ObjectBytes::InPlace(guard))
    }

    /// Returns whether the bytes are in the node's memory and not a copy.
    pub fn is_zero_copy(&self) -> bool {
        matches!(self.0, ObjectBytes::InPlace(_))
    }

    /// Compares the bytes with their digest. Returns `false` if they are corrupt and must not be used. Copies were
    /// verified when they were made.
    pub fn verify(&self) -> bool {
        match &self.0 {
            ObjectBytes::InPlace(guard) => guard.verify().unwrap_or(true),
            ObjectBytes::Copied(_) => true,
        }
    }
}

impl From<Bytes> for ObjectRef {
    fn from(copied: Bytes) -> ObjectRef {
        ObjectRef(ObjectBytes::Copied(copied))
    }
}

impl Deref for ObjectRef {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            ObjectBytes::InPlace(guard) => guard.bytes(),
            ObjectBytes::Copied(bytes) => bytes,
        }
    }
}

/// One object of a batch, with its destination buffer.
#[derive(Debug)]
pub struct GetInto<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Destination; at least as long as the object.
    pub into: &'a mut [u8],
}

impl Store {
    /// Returns an object's bytes, zero-copy if a local node has them. `None`: no such object.
    #[inline]
    pub fn get_ref(&self, key: &[u8]) -> Result<Option<ObjectRef>, StoreError> {
        let inner = &*self.inner;
        let key = inner.key(key)?;
        let (id, found) = inner.local_nodes.find_key(key);
        if let LocalLookup::Hit(guard) = found {
            return Ok(Some(ObjectRef(ObjectBytes::InPlace(guard))));
        }
        inner.metrics.gets.inc();
        let fetched = inner.fetch_shared(key, id, inner.deadline());
        Ok(fetched?.map(|bytes| ObjectRef(ObjectBytes::Copied(bytes))))
    }

    /// As [`Store::get_ref`], but never waits. `None` if no local node has the object in its memory.
    #[inline]
    pub fn try_get_ref(&self, key: &[u8]) -> Result<Option<ObjectRef>, StoreError> {
        let inner = &*self.inner;
        let (_, found) = inner.local_nodes.find_key(inner.key(key)?);
        Ok(match found {
            LocalLookup::Hit(guard) => Some(ObjectRef(ObjectBytes::InPlace(guard))),
            LocalLookup::Miss => None,
        })
    }

    /// Copies an object that [`Store::try_get_ref`] returned, and verifies it like every copy. `false`: the bytes are
    /// corrupt, read another replica. `into` is as long as the object.
    pub fn copy_out(&self, from: &ObjectRef, into: &mut [u8]) -> bool {
        match &from.0 {
            ObjectBytes::InPlace(guard) => self.inner.copy_out(guard, into),
            ObjectBytes::Copied(bytes) => {
                into.copy_from_slice(bytes);
                true
            }
        }
    }

    /// As [`Store::copy_out`], into several consecutive buffers. Their total length is that of the object.
    pub fn copy_out_parts(&self, from: &ObjectRef, into: &mut [&mut [u8]]) -> bool {
        let ObjectBytes::InPlace(guard) = &from.0 else {
            ScatterWriter::over(into).take(from);
            return true;
        };
        self.inner.copy_out_parts(guard, into)
    }

    /// Copies an object into a buffer that `make` allocates when the length is known. Returns the length. `make` is
    /// called again if the object was replaced before it was read; the bytes are in the buffer of the last call.
    pub fn get_with<'m>(
        &self,
        key: &[u8],
        make: &mut dyn FnMut(usize) -> &'m mut [u8],
    ) -> Result<Option<usize>, StoreError> {
        let inner = &*self.inner;
        let key = inner.key(key)?;
        let (id, found) = inner.local_nodes.find_key(key);
        if let LocalLookup::Hit(guard) = found {
            let len = guard.bytes().len();
            if inner.copy_out(&guard, &mut make(len)[..len]) {
                return Ok(Some(len));
            }
        }
        inner.metrics.gets.inc();
        let mut gets = [PendingGet::new(key, id, GetBuffer::Made(make))];
        inner.fetch_all(&mut gets, inner.deadline());
        let [get] = gets;
        get.into_len()
    }

    /// Returns a copy of an object. Concurrent gets of one key share one fetch.
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>, StoreError> {
        let inner = &*self.inner;
        let key = inner.key(key)?;
        let (id, found) = inner.local_nodes.find_key(key);
        if let LocalLookup::Hit(guard) = found
            && let Some(bytes) = inner.copied(&guard)
        {
            return Ok(Some(bytes));
        }
        inner.metrics.gets.inc();
        inner.fetch_shared(key, id, inner.deadline())
    }

    /// Copies an object into a buffer that is at least as long. Returns the length.
    pub fn get_into(&self, key: &[u8], into: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let inner = &*self.inner;
        let key = inner.key(key)?;
        let (id, found) = inner.local_nodes.find_key(key);
        if let LocalLookup::Hit(guard) = found {
            let len = guard.bytes().len();
            let buffer = inner.buffer_prefix(into, len as u64)?;
            if inner.copy_out(&guard, buffer) {
                return Ok(Some(len));
            }
        }
        inner.metrics.gets.inc();
        let mut gets = [PendingGet::new(key, id, GetBuffer::Borrowed(into))];
        inner.fetch_all(&mut gets, inner.deadline());
        let [get] = gets;
        get.into_len()
    }

    /// Returns copies of many objects, in the order of the keys.
    pub fn get_batch(&self, keys: &[&[u8]]) -> Vec<Result<Option<Bytes>, StoreError>> {
        let inner = &*self.inner;
        let mut results: Vec<Option<Result<Option<Bytes>, StoreError>>> = Vec::with_capacity(keys.len());
        let (mut gets, mut indices) = (Vec::new(), Vec::new());
        for (at, key) in keys.iter().enumerate() {
            let key = match inner.key(key) {
                Ok(key) => key,
                Err(error) => {
                    results.push(Some(Err(error)));
                    continue;
                }
            };
            let (id, found) = inner.local_nodes.find_key(key);
            let mut result = None;
            if let LocalLookup::Hit(guard) = found {
                result = inner.copied(&guard).map(|bytes| Ok(Some(bytes)));
            }
            if result.is_none() {
                inner.metrics.gets.inc();
                gets.push(PendingGet::new(key, id, GetBuffer::Owned(Vec::new())));
                indices.push(at);
            }
            results.push(result);
        }
        inner.fetch_all(&mut gets, inner.deadline());
        for (at, get) in indices.into_iter().zip(gets) {
            results[at] = Some(get.into_bytes());
        }
        results.into_iter().map(|result| result.expect("every get has a result")).collect()
    }

    /// Copies many objects, each into its own buffer. Returns their lengths, in order.
    pub fn get_batch_into(&self, items: &mut [GetInto<'_>]) -> Vec<Result<Option<usize>, StoreError>> {
        let inner = &*self.inner;
        let mut results: Vec<Option<Result<Option<usize>, StoreError>>> = Vec::with_capacity(items.len());
        let (mut gets, mut indices) = (Vec::new(), Vec::new());
        for (at, item) in items.iter_mut().enumerate() {
            let key = match inner.key(item.key) {
                Ok(key) => key,
                Err(error) => {
                    results.push(Some(Err(error)));
                    continue;
                }
            };
            let (id, found) = inner.local_nodes.find_key(key);
            let mut result = None;
            if let LocalLookup::Hit(guard) = found {
                let len = guard.bytes().len();
                result = match inner.buffer_prefix(item.into, len as u64) {
                    Ok(buffer) => inner.copy_out(&guard, buffer).then_some(Ok(Some(len))),
                    Err(error) => Some(Err(error)),
                };
            }
            if result.is_none() {
                inner.metrics.gets.inc();
                gets.push(PendingGet::new(key, id, GetBuffer::Borrowed(item.into)));
                indices.push(at);
            }
            results.push(result);
        }
        inner.fetch_all(&mut gets, inner.deadline());
        for (at, get) in indices.into_iter().zip(gets) {
            results[at] = Some(get.into_len());
        }
        results.into_iter().map(|result| result.expect("every get has a result")).collect()
    }
}

/// Writes bytes to consecutive buffers.
struct ScatterWriter<'a, 'm> {
    rest: std::slice::IterMut<'a, &'m mut [u8]>,
    /// Unwritten rest of the current buffer.
    begun: &'a mut [u8],
}

impl<'a, 'm> ScatterWriter<'a, 'm> {
    fn over(pieces: &'a mut [&'m mut [u8]]) -> ScatterWriter<'a, 'm> {
        ScatterWriter { rest: pieces.iter_mut(), begun: &mut [] }
    }

    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.begun.is_empty() {
                self.begun = self.rest.next().expect("the buffers are as long as the object");
                continue;
            }
            let len = bytes.len().min(self.begun.len());
            let (head, tail) = bytes.split_at(len);
            let (buffer, left) = std::mem::take(&mut self.begun).split_at_mut(len);
            buffer.copy_from_slice(head);
            (bytes, self.begun) = (tail, left);
        }
    }
}

/// A get that is not finished.
pub(crate) struct PendingGet<'k, 'a, 'm> {
    key: Key<'k>,
    id: ObjectId,
    buffer: GetBuffer<'a, 'm>,
    result: Option<Result<Option<usize>, StoreError>>,
    /// Failure of the last attempt.
    last: Option<StoreError>,
    /// Attempts to read. Look-ups without a response of the master do not count.
    attempts: u32,
    /// No master has responded to the last look-up.
    unanswered: bool,
}

pub(crate) enum GetBuffer<'a, 'm> {
    Owned(Vec<u8>),
    Borrowed(&'m mut [u8]),
    /// Allocated when the length is known.
    Made(&'a mut dyn FnMut(usize) -> &'m mut [u8]),
}

impl<'k, 'a, 'm> PendingGet<'k, 'a, 'm> {
    pub(crate) fn new(key: Key<'k>, id: ObjectId, buffer: GetBuffer<'a, 'm>) -> PendingGet<'k, 'a, 'm> {
        PendingGet { key, id, buffer, result: None, last: None, attempts: 0, unanswered: false }
    }

    fn into_len(self) -> Result<Option<usize>, StoreError> {
        self.result.expect("fetched")
    }

    fn into_bytes(self) -> Result<Option<Bytes>, StoreError> {
        let GetBuffer::Owned(bytes) = self.buffer else { unreachable!("the get allocates its buffer") };
        Ok(self.result.expect("fetched")?.map(|_| bytes.into()))
    }
}

impl Inner {
    /// Checks a key; counts an invalid one as a failed get.
    fn key<'k>(&self, key: &'k [u8]) -> Result<Key<'k>, StoreError> {
        Key::new(key).map_err(|error| {
            self.metrics.gets.inc();
            self.metrics.gets_failed.inc();
            error.into()
        })
    }

    /// Returns the part of a caller's buffer that an object of `len` bytes takes.
    fn buffer_prefix<'m>(&self, into: &'m mut [u8], len: u64) -> Result<&'m mut [u8], StoreError> {
        let room = into.len();
        into.get_mut(..len as usize).ok_or(StoreError::BufferTooSmall { len, room })
    }

    /// Returns a copy of an object in local memory. `None`: the bytes are corrupt.
    pub(crate) fn copied(&self, guard: &SharedGuard) -> Option<Bytes> {
        let mut bytes = vec![0; guard.bytes().len()];
        self.copy_out(guard, &mut bytes).then(|| bytes.into())
    }

    /// Copies an object out of local memory, page by page, and verifies each page while it is in the CPU cache.
    /// `false`: the bytes are corrupt.
    fn copy_out(&self, guard: &SharedGuard, into: &mut [u8]) -> bool {
        let header = guard.header();
        if !self.config().verify_shm || header.flags.digestless() {
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
        run_parallel(guard.bytes().len() as u64, work);
        context.root_of(digests) == header.root || self.report_corrupt(guard)
    }

    /// As [`Inner::copy_out`], into several buffers. A page may span two of them, so the source page is verified:
    /// pinned bytes do not change.
    fn copy_out_parts(&self, guard: &SharedGuard, into: &mut [&mut [u8]]) -> bool {
        let header = guard.header();
        let mut into = ScatterWriter::over(into);
        if !self.config().verify_shm || header.flags.digestless() {
            into.take(guard.bytes());
            return true;
        }
        let context = header.digest_context();
        let pages = (0u64..).zip(guard.bytes().chunks(PAGE_BYTES as usize));
        let digests = pages.map(|(index, page)| {
            into.take(page);
            context.page(index, page)
        });
        context.root_of(digests) == header.root || self.report_corrupt(guard)
    }

    /// Reports bytes in local memory that mismatch their digest. Returns `false`.
    fn report_corrupt(&self, guard: &SharedGuard) -> bool {
        self.metrics.corrupt.inc();
        let (segment, slot) = guard.place();
        tracing::warn!(segment = segment.0, slot = slot.0, "bytes do not match their digest");
        false
    }

    /// Fetches a copy; shares the fetch with concurrent gets of the object.
    pub(crate) fn fetch_shared(
        &self,
        key: Key<'_>,
        id: ObjectId,
        deadline: Instant,
    ) -> Result<Option<Bytes>, StoreError> {
        let fetched = self.single_flight.fetch(id, deadline, || {
            let mut gets = [PendingGet::new(key, id, GetBuffer::Owned(Vec::new()))];
            self.fetch_all(&mut gets, deadline);
            let [get] = gets;
            get.into_bytes()
        });
        match fetched {
            Some((fetched, false)) => fetched,
            Some((fetched, true)) => {
                self.metrics.gets_coalesced.inc();
                match &fetched {
                    Ok(Some(bytes)) => self.count_hit(ReadSource::Memory(Distance::Remote), bytes.len()),
                    Ok(None) => self.count_miss(),
                    Err(_) => self.count_failed(),
                }
                fetched
            }
            None => {
                self.count_failed();
                Err(self.timeout_error())
            }
        }
    }

    /// Fetches objects that are not readable in local memory.
    pub(crate) fn fetch_all(&self, gets: &mut [PendingGet<'_, '_, '_>], deadline: Instant) {
        let mut backoff = RETRY_BACKOFF;
        for round in 0.. {
            let is_open = |get: &&PendingGet<'_, '_, '_>| get.result.is_none() && get.attempts < ATTEMPTS_MAX;
            let open: Vec<&PendingGet<'_, '_, '_>> = gets.iter().filter(is_open).collect();
            if open.is_empty() {
                break;
            }
            let unanswered = open.iter().filter(|get| get.unanswered).count();
            if round > 1 || unanswered > 0 {
                let pause = backoff.pause(Duration::ZERO, next_counter());
                let left = deadline.saturating_duration_since(Instant::now());
                if unanswered == open.len() && pause >= left {
                    break;
                }
                std::thread::sleep(pause.min(left));
            }
            if unanswered > 0 {
                self.cluster.refresh_map(self.cluster.masters().version(), deadline);
            }
            self.attempt(gets, round == 0, deadline);
        }
        for get in gets.iter_mut().filter(|get| get.result.is_none()) {
            // Every look-up found the object and every read found it gone: for the caller it does not exist.
            let result = match get.last.take() {
                // The node has left the cluster with its copy.
                Some(error) if error.code() == ErrorCode::StaleSession => Ok(None),
                Some(error) => Err(error),
                None => Ok(None),
            };
            self.finish(get, result, NO_DISTANCE);
        }
    }

    /// Makes one attempt for the unfinished gets.
    fn attempt(&self, gets: &mut [PendingGet<'_, '_, '_>], use_cache: bool, deadline: Instant) {
        // Locations: from the cache, and one call for all others.
        let mut locations: Vec<Option<Arc<ReplicaList>>> = Vec::with_capacity(gets.len());
        for get in gets.iter() {
            let may_use_cache = use_cache && get.result.is_none();
            locations.push(may_use_cache.then(|| self.cached_location(&get.id)).flatten());
        }
        let from_cache: Vec<bool> = locations.iter().map(Option::is_some).collect();
        let is_open = |get: &PendingGet<'_, '_, '_>| get.result.is_none() && get.attempts < ATTEMPTS_MAX;
        let unknown: Vec<usize> =
            (0..gets.len()).filter(|&at| is_open(&gets[at]) && !from_cache[at]).collect();
        gets.iter_mut().for_each(|get| get.attempts += 1);
        if !unknown.is_empty() {
            let keys: Vec<Key<'_>> = unknown.iter().map(|&at| gets[at].key).collect();
            // What the other masters have found is read before silent ones are asked again.
            let rounds = if gets.len() > 1 { Rounds::One } else { Rounds::UntilDeadline };
            for (&at, result) in unknown.iter().zip(self.fetch_locations(&keys, rounds, deadline)) {
                gets[at].unanswered = false;
                match result {
                    Err(error)
                        if rounds == Rounds::One
                            && !self.cluster.is_single_master()
                            && is_unanswered(error.code()) =>
                    {
                        gets[at].last = Some(error);
                        gets[at].unanswered = true;
                        gets[at].attempts -= 1;
                    }
                    Ok(Some(location)) => locations[at] = Some(location),
                    Ok(None) => self.finish(&mut gets[at], Ok(None), NO_DISTANCE),
                    Err(error) => self.finish(&mut gets[at], Err(error), NO_DISTANCE),
                }
            }
        }
        // A buffer for each object, then all reads together.
        let mut reads = Vec::with_capacity(gets.len());
        let mut indices = Vec::with_capacity(gets.len());
        for (at, (get, location)) in gets.iter_mut().zip(&locations).enumerate() {
            let Some(location) = location.as_ref().filter(|_| get.result.is_none()) else { continue };
            let into: &mut [u8] = match &mut get.buffer {
                GetBuffer::Owned(bytes) => {
                    *bytes = vec![0; location.len() as usize];
                    bytes
                }
                GetBuffer::Made(make) => &mut make(location.len() as usize)[..location.len() as usize],
                GetBuffer::Borrowed(buffer) => {
                    let room = buffer.len();
                    match buffer.get_mut(..location.len() as usize) {
                        Some(buffer) => buffer,
                        None => {
                            let error = StoreError::BufferTooSmall { len: location.len(), room };
                            if !from_cache[at] {
                                get.result = Some(Err(error));
                                self.count_failed();
                            } else {
                                // The cached length may be that of an older version: look it up at the master.
                                self.invalidate_location(location);
                                get.last = Some(error);
                            }
                            continue;
                        }
                    }
                }
            };
            reads.push(ObjectRead { location: Arc::clone(location), into, outcome: Outcome::Open });
            indices.push(at);
        }
        self.read_all(&mut reads, deadline);
        let outcomes: Vec<Outcome> = reads.into_iter().map(|read| read.outcome).collect();
        for (at, outcome) in indices.into_iter().zip(outcomes) {
            let location = locations[at].as_ref().expect("it was read there");
            match outcome {
                Outcome::Done(source) => {
                    self.finish(&mut gets[at], Ok(Some(location.len() as usize)), source)
                }
                Outcome::Lost => self.finish(&mut gets[at], Ok(None), NO_DISTANCE),
                Outcome::Stale(error) => {
                    self.invalidate_location(location);
                    gets[at].last = error;
                }
                Outcome::Failed(error) => {
                    self.invalidate_location(location);
                    // A cached location may be stale: a look-up at the master does not count as a retry.
                    let again = Instant::now() < deadline
                        && (from_cache[at] || error.is_retryable() && self.budget.lock().spend());
                    match again {
                        true => gets[at].last = Some(error),
                        false => self.finish(&mut gets[at], Err(error), NO_DISTANCE),
                    }
                }
                Outcome::Open => unreachable!("read_all sets every outcome"),
            }
        }
    }

    fn finish(
        &self,
        get: &mut PendingGet<'_, '_, '_>,
        result: Result<Option<usize>, StoreError>,
        source: ReadSource,
    ) {
        match &result {
            Ok(Some(len)) => self.count_hit(source, *len),
            Ok(None) => self.count_miss(),
            Err(_) => self.count_failed(),
        }
        get.result = Some(result);
    }

    pub(crate) fn count_hit(&self, source: ReadSource, len: usize) {
        match source {
            ReadSource::Memory(Distance::Mapped) => self.metrics.hits_local.inc(),
            ReadSource::Memory(_) => self.metrics.hits_remote.inc(),
            ReadSource::Disk => self.metrics.hits_disk.inc(),
        };
        self.metrics.bytes_read.inc_by(len as u64);
    }

    pub(crate) fn count_miss(&self) {
        self.metrics.misses.inc();
    }

    pub(crate) fn count_failed(&self) {
        self.metrics.gets_failed.inc();
    }
}
