//! Calls that read: exist, lookup with a lease, touch, pins, and the operators' queries.
//!
//! Batches are looked up in stages, all keys of a stage before the next one: the directory of the table, its lines,
//! the records. At ten million objects every stage misses the cache, and the misses of one stage do not wait for each
//! other.

use std::time::Duration;

use moontide_types::bounds::LEASE_MS_MAX;
use moontide_types::record::PinClass;
use moontide_types::{ErrorCode, Key, ObjectId};

use super::Group;
use super::view::{Detail, ObjectView};
use crate::record::{Flag, NONE, Record};
use crate::slab::Ref;
use crate::table::{BATCH, Candidate};
use crate::tenant::TenantIx;
use crate::time::{Now, Tick};

/// A key and its id.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The id that the caller computed from tenant, generation and key.
    pub id: ObjectId,
    /// The key, which is compared.
    pub key: Key<'a>,
}

/// The answer for one key of a lookup.
pub type Found<'a> = Result<ObjectView<'a>, ErrorCode>;

/// What was looked up. `requested = hits + hits_disk + misses + not_ready`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookupCounts {
    /// Keys of lookups.
    pub requested: u64,
    /// Found, with a replica in memory.
    pub hits: u64,
    /// Found, on disk alone.
    pub hits_disk: u64,
    /// Not found.
    pub misses: u64,
    /// Being written.
    pub not_ready: u64,
    /// Keys of exist calls, counted apart.
    pub exists: u64,
}

/// Where a listing has got to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListCursor(u32);

impl ListCursor {
    /// As it travels.
    pub fn number(self) -> u32 {
        self.0
    }

    /// From what travelled: any number is a cursor, a foreign one lists from somewhere.
    pub fn from_number(number: u32) -> ListCursor {
        ListCursor(number)
    }
}

/// Objects that one page of a listing looks at, at most: half a millisecond.
const LIST_LOOKS_MAX: usize = 16_384;

impl Group {
    /// Which keys are complete objects? Takes no lease and counts as no use.
    pub fn exist(&mut self, now: Now, asks: &[Ask<'_>], mut answer: impl FnMut(usize, bool)) {
        self.stats.lookups.exists += asks.len() as u64;
        let mut places = vec![];
        self.each_found(Wanted::Presence, asks, |group, index, at| {
            let there = at.is_some_and(|at| {
                let record = group.slab.get(at);
                group.state_of(record, now) == ObjectState::Complete
            });
            let mut inherited = || group.heirloom(&asks[index], now, &mut places).is_some();
            answer(index, there || at.is_none() && inherited());
        });
    }

    /// Where are the bytes? With `lease_ms` they stay where they are for that long, counted from now. The answer
    /// comes key by key, in order.
    pub fn lookup(
        &mut self,
        now: Now,
        lease_ms: u32,
        asks: &[Ask<'_>],
        mut answer: impl FnMut(usize, Found<'_>),
    ) {
        let lease = self.lease_end(now, lease_ms);
        let mut places = std::mem::take(&mut self.scratch);
        self.each_found(Wanted::Places, asks, |group, index, at| {
            places.clear();
            group.stats.lookups.requested += 1;
            let Some(at) = at else {
                if let Some(heirloom) = group.heirloom(&asks[index], now, &mut places) {
                    answer(index, Ok(heirloom.view(&places)));
                    group.stats.lookups.hits += 1;
                    return;
                }
                group.stats.lookups.misses += 1;
                return answer(index, Err(ErrorCode::NotFound));
            };
            let record = *group.slab.get(at);
            match group.state_of(&record, now) {
                ObjectState::Gone => {
                    group.stats.lookups.misses += 1;
                    answer(index, Err(ErrorCode::NotFound));
                }
                ObjectState::Writing => {
                    group.stats.lookups.not_ready += 1;
                    answer(index, Err(ErrorCode::NotReady));
                }
                ObjectState::Complete => {
                    if record.has(Flag::OnDisk) {
                        group.stats.lookups.hits_disk += 1;
                        group.read_from_disk(&record);
                    } else {
                        group.stats.lookups.hits += 1;
                    }
                    group.use_object(at, lease);
                    let replicas = group.replica_views(&record, &mut places);
                    answer(index, Ok(group.object_view(&record, &places, replicas)));
                }
            }
        });
        self.scratch = places;
    }

    /// Marks an object as used, and leases it if asked to.
    pub fn touch(&mut self, now: Now, lease_ms: u32, ask: &Ask<'_>) -> Result<(), ErrorCode> {
        let at = self.find_complete(ask, now)?;
        let lease = self.lease_end(now, lease_ms);
        self.use_object(at, lease);
        Ok(())
    }

    /// Changes how strongly an object resists eviction.
    pub fn set_pin(&mut self, now: Now, ask: &Ask<'_>, pin: PinClass) -> Result<(), ErrorCode> {
        let at = self.find_complete(ask, now)?;
        self.dequeue(at);
        self.slab.get_mut(at).set_pin(pin);
        self.enqueue(at);
        Ok(())
    }

    /// Everything about one key. Takes no lease and counts as no use.
    pub fn query(&self, now: Now, ask: &Ask<'_>) -> Option<Detail> {
        let at = self.find(ask)?;
        (self.state_of(self.slab.get(at), now) != ObjectState::Gone).then(|| self.detail(at, now))
    }

    /// The next keys of a tenant, in no order, at most `limit` of them. No key that stays is left out; one may come
    /// twice. No cursor in the answer: that was the last page.
    pub fn list(
        &self,
        now: Now,
        tenant: TenantIx,
        cursor: Option<ListCursor>,
        limit: usize,
        mut each: impl FnMut(&[u8]) -> bool,
    ) -> Option<ListCursor> {
        let mut cursor = cursor.and_then(|cursor| Ref::from_number(cursor.0));
        let mut listed = 0;
        for _ in 0..LIST_LOOKS_MAX {
            let at = self.slab.before(cursor)?;
            let (record, key) = self.slab.with_key(at);
            if record.tenant() == tenant && self.state_of(record, now) == ObjectState::Complete {
                if listed == limit || !each(key) {
                    break;
                }
                listed += 1;
            }
            cursor = Some(at);
        }
        // Nothing passed yet: the page began behind the last record and its first key was refused.
        Some(ListCursor(cursor.map_or(NONE, Ref::number)))
    }

    pub(super) fn find_complete(&self, ask: &Ask<'_>, now: Now) -> Result<Ref, ErrorCode> {
        let at = self.find(ask).ok_or(ErrorCode::NotFound)?;
        match self.state_of(self.slab.get(at), now) {
            ObjectState::Complete => Ok(at),
            ObjectState::Writing => Err(ErrorCode::NotReady),
            ObjectState::Gone => Err(ErrorCode::NotFound),
        }
    }

    fn lease_end(&self, now: Now, lease_ms: u32) -> Option<Tick> {
        let lease = Duration::from_millis(lease_ms.min(LEASE_MS_MAX).into());
        (lease_ms > 0).then(|| self.ticker.end(now.mono, lease))
    }

    fn use_object(&mut self, at: Ref, lease: Option<Tick>) {
        let record = self.slab.get_mut(at);
        record.set(Flag::Visited, true);
        if let Some(sketch) = &mut self.sketch {
            sketch.add(record.id());
        }
        let Some(lease) = lease else { return };
        record.set_until(record.until().max(lease));
        let cohort = self.extras.get(record.extra).map_or(NONE, |extra| extra.cohort);
        if cohort != NONE {
            let cohort = self.cohorts.get_mut(cohort);
            cohort.until = cohort.until.max(lease);
        }
    }

    /// What a reader may know of a record: one whose nodes are gone or whose time is over is as good as gone.
    pub(super) fn state_of(&self, record: &Record, now: Now) -> ObjectState {
        if record.has(Flag::Writing) {
            ObjectState::Writing
        } else if self.is_expired(record, now) || !self.has_complete_replica(record) {
            ObjectState::Gone
        } else {
            ObjectState::Complete
        }
    }

    /// Finds the records of all keys, in stages, and hands them on in order.
    fn each_found(
        &mut self,
        wanted: Wanted,
        asks: &[Ask<'_>],
        mut each: impl FnMut(&mut Group, usize, Option<Ref>),
    ) {
        let mut ids = [ObjectId([0; 16]); BATCH];
        let mut candidates = [Candidate::None; BATCH];
        let mut found = [None; BATCH];
        for (batch, asks) in asks.chunks(BATCH).enumerate() {
            let count = asks.len();
            for (id, ask) in ids.iter_mut().zip(asks) {
                *id = ask.id;
            }
            self.table.candidates(&ids[..count], &mut candidates[..count]);
            for ((found, candidate), ask) in found.iter_mut().zip(&candidates).zip(asks) {
                *found = match *candidate {
                    Candidate::None => None,
                    Candidate::One(number) => {
                        let at = Ref::from_number(number).expect("the table holds records");
                        let (record, key) = self.slab.with_key(at);
                        (record.id() == ask.id && key == ask.key.as_bytes()).then_some(at)
                    }
                    Candidate::Several => self.find(ask),
                };
            }
            if wanted == Wanted::Places {
                // One more miss, in the allocator's books, is brought forward in the same way.
                for at in found[..count].iter().flatten() {
                    let place = self.slab.get(*at).place();
                    if !place.is_lost() {
                        std::hint::black_box(self.segment(place.segment).extent(place.block));
                    }
                }
            }
            for (index, &at) in found[..count].iter().enumerate() {
                each(self, batch * BATCH + index, at);
            }
        }
    }
}

/// What the caller is going to look at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Presence,
    Places,
}

/// What a reader may know of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectState {
    Complete,
    Writing,
    Gone,
}
