//! Read calls: exist, lookup with a lease, touch, pins, and the operators' queries.
//!
//! Batches are processed in stages, all keys of a stage before the next one: the directory of the table, its lines, the
//! records. With ten million objects every stage misses the cache, and the misses of one stage overlap.

use std::time::Duration;

use moontide_types::limits::LEASE_MS_MAX;
use moontide_types::record::PinClass;
use moontide_types::{ErrorCode, Key, ObjectId};

use super::Group;
use super::view::{ObjectDetail, ObjectView};
use crate::ids::{NONE, RecordRef, TenantIndex};
use crate::record::{Record, RecordFlag};
use crate::table::{BATCH, ProbeResult};
use crate::time::{Now, Tick};

/// A key and its id.
#[derive(Clone, Copy, Debug)]
pub struct LookupKey<'a> {
    /// Id that the caller computed from tenant, generation and key.
    pub id: ObjectId,
    /// Key, which is compared with the record's.
    pub key: Key<'a>,
}

/// Result for one key of a lookup.
pub type LookupResult<'a> = Result<ObjectView<'a>, ErrorCode>;

/// Counters of lookups. `requested = hits + hits_disk + misses + not_ready`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookupCounts {
    /// Keys of lookups.
    pub requested: u64,
    /// Found, with a replica in memory.
    pub hits: u64,
    /// Found, on disk only.
    pub hits_disk: u64,
    /// Not found.
    pub misses: u64,
    /// Being written.
    pub not_ready: u64,
    /// Keys of exist calls, not included in `requested`.
    pub exists: u64,
}

/// Position of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListCursor(u32);

impl ListCursor {
    /// Returns the wire form.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Creates a cursor from the wire form. Any number is valid; one that this group did not return starts at an
    /// arbitrary position.
    pub fn from_number(number: u32) -> ListCursor {
        ListCursor(number)
    }
}

/// Maximum number of objects that one page of a listing visits: half a millisecond.
const LIST_SCAN_MAX: usize = 16_384;

impl Group {
    /// Returns for each key whether it is a complete object. Takes no lease and does not count as a use.
    pub fn exist(&mut self, now: Now, keys: &[LookupKey<'_>], mut respond: impl FnMut(usize, bool)) {
        self.stats.lookups.exists += keys.len() as u64;
        let mut locations = vec![];
        self.each_found(LookupDetail::Presence, keys, |group, index, at| {
            let complete = at.is_some_and(|at| {
                let record = group.slab.get(at);
                group.state_of(record, now) == ObjectState::Complete
            });
            let mut in_handoff = || group.find_in_handoff(&keys[index], now, &mut locations).is_some();
            respond(index, complete || at.is_none() && in_handoff());
        });
    }

    /// Returns the locations of each key, in order. With `lease_ms` the bytes stay there for that long, counted from
    /// now.
    pub fn lookup(
        &mut self,
        now: Now,
        lease_ms: u32,
        keys: &[LookupKey<'_>],
        mut respond: impl FnMut(usize, LookupResult<'_>),
    ) {
        let lease = self.lease_end(now, lease_ms);
        let mut locations = std::mem::take(&mut self.scratch);
        let mut found = std::mem::take(&mut self.found);
        self.each_found(LookupDetail::Locations, keys, |group, index, at| {
            locations.clear();
            group.stats.lookups.requested += 1;
            let Some(at) = at else {
                if let Some(object) = group.find_in_handoff(&keys[index], now, &mut locations) {
                    respond(index, Ok(object.view(&locations)));
                    group.stats.lookups.hits += 1;
                    return;
                }
                group.stats.lookups.misses += 1;
                return respond(index, Err(ErrorCode::NotFound));
            };
            let record = *group.slab.get(at);
            match group.state_of(&record, now) {
                ObjectState::Gone => {
                    group.stats.lookups.misses += 1;
                    respond(index, Err(ErrorCode::NotFound));
                }
                ObjectState::Writing => {
                    group.stats.lookups.not_ready += 1;
                    respond(index, Err(ErrorCode::NotReady));
                }
                ObjectState::Complete => {
                    if group.is_read_from_disk(&record) {
                        group.stats.lookups.hits_disk += 1;
                        group.read_from_disk(&record);
                    } else {
                        group.stats.lookups.hits += 1;
                    }
                    group.mark_used(at, lease);
                    found.push(at);
                    let replicas = group.replica_views(&record, &mut locations);
                    respond(index, Ok(group.object_view(&record, &locations, replicas)));
                }
            }
        });
        self.note_uses(found.drain(..));
        (self.scratch, self.found) = (locations, found);
    }

    /// Marks an object as used, and leases it if `lease_ms` is not 0.
    pub fn touch(&mut self, now: Now, lease_ms: u32, lookup: &LookupKey<'_>) -> Result<(), ErrorCode> {
        let at = self.find_complete(lookup, now)?;
        let lease = self.lease_end(now, lease_ms);
        self.mark_used(at, lease);
        self.note_use(at);
        Ok(())
    }

    /// Changes an object's resistance to eviction.
    pub fn set_pin(&mut self, now: Now, lookup: &LookupKey<'_>, pin: PinClass) -> Result<(), ErrorCode> {
        if self.find(lookup).is_none() && self.find_in_handoff(lookup, now, &mut vec![]).is_some() {
            // No node has reported it yet. It keeps the class when one does.
            self.set_handoff_pin(lookup.id, pin);
            return Ok(());
        }
        let at = self.find_complete(lookup, now)?;
        self.dequeue(at);
        self.slab.get_mut(at).set_pin(pin);
        self.enqueue(at);
        Ok(())
    }

    /// Returns all properties of one key. Takes no lease and does not count as a use.
    pub fn query(&self, now: Now, lookup: &LookupKey<'_>) -> Option<ObjectDetail> {
        let at = self.find(lookup)?;
        (self.state_of(self.slab.get(at), now) != ObjectState::Gone).then(|| self.detail(at, now))
    }

    /// Passes the next keys of a tenant to `each`, in no particular order, at most `limit` of them. No key that stays
    /// is skipped; a key may appear twice. Returns no cursor after the last page.
    pub fn list(
        &self,
        now: Now,
        tenant: TenantIndex,
        cursor: Option<ListCursor>,
        limit: usize,
        mut each: impl FnMut(&[u8]) -> bool,
    ) -> Option<ListCursor> {
        let mut cursor = cursor.and_then(|cursor| RecordRef::from_number(cursor.0));
        let mut listed = 0;
        for _ in 0..LIST_SCAN_MAX {
            let at = self.slab.previous(cursor)?;
            let (record, key) = self.slab.with_key(at);
            if record.tenant() == tenant && self.state_of(record, now) == ObjectState::Complete {
                if listed == limit || !each(key) {
                    break;
                }
                listed += 1;
            }
            cursor = Some(at);
        }
        // Without progress the cursor is `NONE`: the page began after the last record, and `each` refused its first
        // key.
        Some(ListCursor(cursor.map_or(NONE, RecordRef::number)))
    }

    pub(super) fn find_complete(&self, lookup: &LookupKey<'_>, now: Now) -> Result<RecordRef, ErrorCode> {
        let at = self.find(lookup).ok_or(ErrorCode::NotFound)?;
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

    /// Sets the flag of use, and the lease.
    fn mark_used(&mut self, at: RecordRef, lease: Option<Tick>) {
        let record = self.slab.get_mut(at);
        record.set(RecordFlag::Visited, true);
        if let Some(sketch) = &mut self.sketch {
            sketch.add(record.id());
        }
        let Some(lease) = lease else { return };
        record.set_until(record.until().max(lease));
        let cohort = self.extensions.get(record.extension).map_or(NONE, |extension| extension.cohort);
        if cohort != NONE {
            let cohort = self.cohorts.get_mut(cohort);
            cohort.until = cohort.until.max(lease);
        }
    }

    /// Returns the state of a record as seen by readers: a record whose nodes are lost or that has expired is gone.
    pub(super) fn state_of(&self, record: &Record, now: Now) -> ObjectState {
        if record.has(RecordFlag::Writing) {
            ObjectState::Writing
        } else if self.is_expired(record, now) || !self.has_complete_replica(record) {
            ObjectState::Gone
        } else {
            ObjectState::Complete
        }
    }

    /// Finds the records of all keys, in stages, and passes them to `each` in order.
    fn each_found(
        &mut self,
        detail: LookupDetail,
        keys: &[LookupKey<'_>],
        mut each: impl FnMut(&mut Group, usize, Option<RecordRef>),
    ) {
        let mut ids = [ObjectId([0; 16]); BATCH];
        let mut candidates = [ProbeResult::None; BATCH];
        let mut found = [None; BATCH];
        for (batch, keys) in keys.chunks(BATCH).enumerate() {
            let count = keys.len();
            for (id, lookup) in ids.iter_mut().zip(keys) {
                *id = lookup.id;
            }
            self.table.candidates(&ids[..count], &mut candidates[..count]);
            for ((found, candidate), lookup) in found.iter_mut().zip(&candidates).zip(keys) {
                *found = match *candidate {
                    ProbeResult::None => None,
                    ProbeResult::One(number) => {
                        let at = RecordRef::from_number(number).expect("table entries are record numbers");
                        let (record, key) = self.slab.with_key(at);
                        (record.id() == lookup.id && key == lookup.key.as_bytes()).then_some(at)
                    }
                    ProbeResult::Several => self.find(lookup),
                };
            }
            if detail == LookupDetail::Locations {
                // Overlaps one more cache miss, in the allocator's metadata, in the same way.
                for at in found[..count].iter().flatten() {
                    let location = self.slab.get(*at).location();
                    if !location.is_lost() {
                        std::hint::black_box(self.segment(location.segment).extent(location.block));
                    }
                }
            }
            for (index, &at) in found[..count].iter().enumerate() {
                each(self, batch * BATCH + index, at);
            }
        }
    }
}

/// Data that the caller needs of each record.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LookupDetail {
    Presence,
    Locations,
}

/// State of a record as seen by readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectState {
    Complete,
    Writing,
    Gone,
}
