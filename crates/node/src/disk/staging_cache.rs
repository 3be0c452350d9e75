//! [`StagingCache`]: records of the disk, and parts of long ones, that are in staging, and their eviction.
//!
//! ```text
//!   absent ──begin──▶ loading ──ready──▶ ready ──evict, take──▶ absent
//!                        └──failed──▶ absent            (readers that pin it finish their reads)
//! ```
//!
//! One thread loads a record; other callers wait for it. A ready record is kept until its memory is needed, least
//! recently used first; a leased one is kept until the lease expires or all lessees release it. A lessee may read the
//! record without this node's help: its memory is not reused before, even if the record is removed.

use std::sync::Arc;

use moontide_disk::RecordId;
use moontide_heap::StagedRecord;
use moontide_rt::collections::{HashMap, HashSet};
use moontide_rt::sync::{Condvar, Mutex};
use moontide_rt::time::Instant;
use moontide_types::{Epoch, ErrorCode, ObjectId};

use super::parts::PartId;

/// Records in staging.
#[derive(Debug, Default)]
pub(super) struct StagingCache {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<PartId, Entry>,
    uses: u64,
    /// Removed records that are still leased, until the given time.
    removed: Vec<(Arc<StagedRecord>, Instant)>,
}

#[derive(Debug)]
enum Entry {
    /// `removed`: the record was removed while it was read, and is not admitted. Until that load has ended no other one
    /// starts, so that the two are not confused. `ahead`: no reader has asked for it yet.
    Loading {
        removed: bool,
        ahead: bool,
    },
    Ready {
        staged: Arc<StagedRecord>,
        ahead: bool,
        used: u64,
        leases: u32,
        leased_until: Option<Instant>,
    },
}

impl Table {
    /// Takes out a record that can no longer be found on the disk.
    fn take(&mut self, name: &PartId) -> Option<Arc<StagedRecord>> {
        match self.entries.get_mut(name)? {
            Entry::Loading { removed, .. } => {
                *removed = true;
                None
            }
            Entry::Ready { staged, leased_until, .. } => {
                let staged = Arc::clone(staged);
                if let Some(until) = leased_until.filter(|until| *until > Instant::now()) {
                    self.removed.push((Arc::clone(&staged), until));
                }
                self.entries.remove(name);
                Some(staged)
            }
        }
    }
}

/// Result of a lookup.
#[derive(Debug)]
pub(super) enum StagingLookup {
    /// The record is in staging.
    Ready(Arc<StagedRecord>),
    /// The record is absent: the caller loads it, and calls [`StagingCache::ready`] or [`StagingCache::failed`].
    Load,
    /// Another thread loads it.
    InProgress,
}

impl StagingCache {
    /// Looks up a record. The caller has to load an absent one.
    pub(super) fn begin(&self, name: PartId) -> StagingLookup {
        let mut table = self.table.lock();
        table.uses += 1;
        let now = table.uses;
        match table.entries.get_mut(&name) {
            Some(Entry::Ready { staged, used, ahead, .. }) => {
                (*used, *ahead) = (now, false);
                StagingLookup::Ready(Arc::clone(staged))
            }
            Some(Entry::Loading { ahead, .. }) => {
                *ahead = false;
                StagingLookup::InProgress
            }
            None => {
                table.entries.insert(name, Entry::Loading { removed: false, ahead: false });
                StagingLookup::Load
            }
        }
    }

    /// Begins to load a part that no reader has asked for. Returns `false` if it is here already, or if `ahead_max` such
    /// parts are.
    pub(super) fn begin_ahead(&self, name: PartId, ahead_max: usize) -> bool {
        let mut table = self.table.lock();
        let is_ahead = |entry: &&Entry| {
            matches!(entry, Entry::Loading { ahead: true, .. } | Entry::Ready { ahead: true, .. })
        };
        // As in `evict_one`, the scan takes less time than the load.
        if table.entries.contains_key(&name) || table.entries.values().filter(is_ahead).count() >= ahead_max {
            return false;
        }
        table.entries.insert(name, Entry::Loading { removed: false, ahead: true });
        true
    }

    /// Whether a part is in staging or being loaded.
    pub(super) fn contains(&self, name: PartId) -> bool {
        self.table.lock().entries.contains_key(&name)
    }

    /// Waits for a record that another thread loads.
    pub(super) fn wait(&self, name: PartId, deadline: Instant) -> Result<Arc<StagedRecord>, ErrorCode> {
        let mut table = self.table.lock();
        loop {
            match table.entries.get(&name) {
                Some(Entry::Ready { staged, .. }) => return Ok(Arc::clone(staged)),
                Some(Entry::Loading { .. }) => {}
                // The load failed, or the record was evicted at once: the loading thread has the reason.
                None => return Err(ErrorCode::Busy),
            }
            if self.changed.wait_until(&mut table, deadline).timed_out() {
                return Err(ErrorCode::DeadlineExceeded);
            }
        }
    }

    /// Admits a record that the caller has loaded. Returns `None` if it was removed meanwhile.
    pub(super) fn ready(&self, name: PartId, staged: StagedRecord) -> Option<Arc<StagedRecord>> {
        let staged = Arc::new(staged);
        let mut table = self.table.lock();
        let used = table.uses;
        let admitted = match table.entries.get(&name) {
            Some(&Entry::Loading { removed: false, ahead }) => {
                let staged = Arc::clone(&staged);
                let entry = Entry::Ready { staged, ahead, used, leases: 0, leased_until: None };
                table.entries.insert(name, entry);
                true
            }
            _ => false,
        };
        drop(table);
        self.changed.notify_all();
        admitted.then_some(staged)
    }

    /// Ends the load of a record that failed.
    pub(super) fn failed(&self, name: PartId) {
        let mut table = self.table.lock();
        if matches!(table.entries.get(&name), Some(Entry::Loading { .. })) {
            table.entries.remove(&name);
        }
        drop(table);
        self.changed.notify_all();
    }

    /// Adds a lease of a record until `until`, or releases one (`None`).
    pub(super) fn lease(&self, name: PartId, until: Option<Instant>) {
        if let Some(Entry::Ready { leases, leased_until, .. }) = self.table.lock().entries.get_mut(&name) {
            match until {
                Some(_) => *leases += 1,
                None => *leases = leases.saturating_sub(1),
            }
            *leased_until = until.max(*leased_until).filter(|_| *leases > 0);
        }
    }

    /// Evicts the least recently used record without readers and leases. Returns `false` if there is none.
    pub(super) fn evict_one(&self) -> bool {
        let mut table = self.table.lock();
        let now = Instant::now();
        let (removed, expired) =
            std::mem::take(&mut table.removed).into_iter().partition(|(_, until)| *until > now);
        let expired: Vec<(Arc<StagedRecord>, Instant)> = expired;
        table.removed = removed;
        if !expired.is_empty() {
            drop(table);
            return true;
        }
        let idle = |entry: &Entry| match entry {
            Entry::Ready { staged, used, leased_until, .. } => {
                let free = Arc::strong_count(staged) == 1 && leased_until.is_none_or(|until| until <= now);
                free.then_some(*used)
            }
            Entry::Loading { .. } => None,
        };
        // Staging has at most some thousands of slots, and a load from disk takes longer than this scan.
        let oldest = table.entries.iter().filter_map(|(name, entry)| Some((idle(entry)?, *name)));
        let Some((_, name)) = oldest.min_by_key(|&(used, _)| used) else { return false };
        let gone = table.entries.remove(&name);
        drop(table);
        drop(gone);
        true
    }

    /// Takes out the records of removed versions, and of all earlier versions of each. The caller unpublishes them.
    /// Scans the table once, for any number of versions.
    pub(super) fn take_versions(&self, removed: &[(ObjectId, Epoch)]) -> Vec<Arc<StagedRecord>> {
        let mut highest: HashMap<ObjectId, Epoch> = HashMap::with_capacity(removed.len());
        for &(id, version) in removed {
            let removed = highest.entry(id).or_insert(version);
            *removed = version.max(*removed);
        }
        let mut table = self.table.lock();
        let of_them = |name: &&PartId| {
            highest.get(&name.record.id).is_some_and(|version| name.record.version <= *version)
        };
        let names: Vec<PartId> = table.entries.keys().filter(of_them).copied().collect();
        let gone = names.iter().filter_map(|name| table.take(name)).collect();
        drop(table);
        self.changed.notify_all();
        gone
    }

    /// Takes out records that left the disk. The caller unpublishes them.
    pub(super) fn take(&self, records: &[RecordId]) -> Vec<Arc<StagedRecord>> {
        let records: HashSet<RecordId> = records.iter().copied().collect();
        let mut table = self.table.lock();
        let names: Vec<PartId> =
            table.entries.keys().filter(|name| records.contains(&name.record)).copied().collect();
        let gone = names.iter().filter_map(|name| table.take(name)).collect();
        drop(table);
        self.changed.notify_all();
        gone
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use moontide_heap::{HeapConfig, HugePages, NodeHeap, RecordSpec, Staging};
    use moontide_types::record::{Attributes, DigestContext, KeySection, RecordFlags};
    use moontide_types::{Generation, Key, NodeId, Tenant, TenantGeneration, Term};

    use super::*;

    fn staging() -> Arc<Staging> {
        let (node, generation) = (NodeId(1), Generation(1));
        let config = HeapConfig { node, generation, slots_max: 16, huge: HugePages::Auto };
        let heap = Arc::new(NodeHeap::create(config).unwrap());
        Arc::new(Staging::new(&heap, 16, 256, HugePages::Auto).unwrap())
    }

    fn name(object: u8, sequence: u64) -> PartId {
        let version = Epoch::new(Term::new(1).unwrap(), sequence).unwrap();
        PartId::first(RecordId { id: ObjectId([object; 16]), version, stripe: 0 })
    }

    fn stage(staging: &Arc<Staging>, name: PartId) -> StagedRecord {
        let name = name.record;
        let mut buffer = staging.alloc(8192).unwrap();
        buffer.bytes_mut()[..100].fill(name.id.0[0]);
        let context = DigestContext { id: name.id, version: name.version, stripe: 0, len: 100 };
        let mut digests = vec![];
        let root = context.payload(&[name.id.0[0]; 100], |digest| digests.extend(digest.to_le_bytes()));
        let record = RecordSpec {
            id: name.id,
            flags: RecordFlags::NONE,
            object_len: 100,
            stripe_index: 0,
            stripe_count: 1,
            stripe_offset: 0,
            stripe_len: 100,
            key: KeySection { tenant: Tenant::DEFAULT, key: Key::new(b"key").unwrap() },
            attributes: &Attributes::default(),
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        };
        buffer.publish(name.version, 0, record, &digests, root, false).unwrap()
    }

    fn load(records: &StagingCache, staging: &Arc<Staging>, name: PartId) {
        assert!(matches!(records.begin(name), StagingLookup::Load));
        assert!(records.ready(name, stage(staging, name)).is_some());
    }

    fn is_ready(records: &StagingCache, name: PartId) -> bool {
        matches!(records.table.lock().entries.get(&name), Some(Entry::Ready { .. }))
    }

    #[test]
    fn concurrent_lookups_wait_for_one_load() {
        let (records, staging, name) = (StagingCache::default(), staging(), name(1, 1));
        assert!(matches!(records.begin(name), StagingLookup::Load));
        assert!(matches!(records.begin(name), StagingLookup::InProgress));
        let late = Instant::now() + Duration::from_millis(5);
        assert_eq!(records.wait(name, late).unwrap_err(), ErrorCode::DeadlineExceeded);
        std::thread::scope(|scope| {
            let waiting =
                scope.spawn(|| records.wait(name, Instant::now() + Duration::from_secs(30)).is_ok());
            records.ready(name, stage(&staging, name)).unwrap();
            assert!(waiting.join().unwrap());
        });
        assert!(matches!(records.begin(name), StagingLookup::Ready(_)));
    }

    #[test]
    fn failed_load_can_be_retried_by_any_caller() {
        let (records, name) = (StagingCache::default(), name(1, 1));
        assert!(matches!(records.begin(name), StagingLookup::Load));
        records.failed(name);
        assert_eq!(records.wait(name, Instant::now()).unwrap_err(), ErrorCode::Busy);
        assert!(matches!(records.begin(name), StagingLookup::Load));
    }

    /// Regression: a load that a removal had overtaken was admitted if another load had started since, and took its
    /// entry.
    #[test]
    fn load_overtaken_by_removal_is_not_admitted() {
        type Take = fn(&StagingCache, PartId) -> Vec<Arc<StagedRecord>>;
        let takes: [Take; 2] = [
            |records, name| records.take_versions(&[(name.record.id, name.record.version)]),
            |records, name| records.take(&[name.record]),
        ];
        for take in takes {
            let (records, staging, name) = (StagingCache::default(), staging(), name(1, 1));
            assert!(matches!(records.begin(name), StagingLookup::Load));
            assert!(take(&records, name).is_empty());
            assert!(
                matches!(records.begin(name), StagingLookup::InProgress),
                "until the first load has ended"
            );
            assert!(records.ready(name, stage(&staging, name)).is_none());
            assert!(!is_ready(&records, name));
            records.failed(name);
            assert!(matches!(records.begin(name), StagingLookup::Load));
            assert!(
                records.ready(name, stage(&staging, name)).is_some(),
                "a load that started later is admitted"
            );
        }
    }

    #[test]
    fn removal_takes_version_and_older_ones_of_same_object() {
        let (records, staging) = (StagingCache::default(), staging());
        let names = [name(1, 1), name(1, 2), name(1, 3), name(2, 1)];
        names.iter().for_each(|name| load(&records, &staging, *name));
        assert_eq!(records.take_versions(&[(names[1].record.id, names[1].record.version)]).len(), 2);
        assert_eq!(names.map(|name| is_ready(&records, name)), [false, false, true, true]);
    }

    #[test]
    fn eviction_is_lru_and_skips_pinned_and_leased_records() {
        let (records, staging) = (StagingCache::default(), staging());
        let names = [name(1, 1), name(2, 1), name(3, 1), name(4, 1)];
        names.iter().for_each(|name| load(&records, &staging, *name));
        let ready = || names.map(|name| is_ready(&records, name));
        let StagingLookup::Ready(held) = records.begin(names[0]) else { panic!("not in the cache") };
        records.lease(names[1], Some(Instant::now() + Duration::from_secs(60)));
        drop(records.begin(names[2]));
        assert!(records.evict_one());
        assert_eq!(ready(), [true, true, true, false]);
        assert!(records.evict_one());
        assert_eq!(ready(), [true, true, false, false]);
        assert!(!records.evict_one(), "one is held, the other leased");
        drop(held);
        assert!(records.evict_one());
        records.lease(names[1], None);
        assert!(records.evict_one());
        assert_eq!((ready(), records.evict_one()), ([false; 4], false));
        assert_eq!(staging.in_use().used_buffers, 0);
    }

    /// Regression: the first of two lessees released the record, and it was evicted while the other one was reading.
    #[test]
    fn record_leased_twice_is_evictable_after_both_releases() {
        let (records, staging, name) = (StagingCache::default(), staging(), name(1, 1));
        load(&records, &staging, name);
        let soon = Instant::now() + Duration::from_millis(20);
        records.lease(name, Some(Instant::now() + Duration::from_secs(60)));
        records.lease(name, Some(soon));
        records.lease(name, None);
        assert!(!records.evict_one());
        std::thread::sleep(soon.saturating_duration_since(Instant::now()));
        assert!(!records.evict_one(), "the longer lease counts");
        records.lease(name, None);
        assert!(records.evict_one());
    }

    /// Regression: the memory of a removed record was freed at once, while a lessee read it without the node's help.
    #[test]
    fn memory_of_removed_record_is_not_freed_while_leased() {
        let (records, staging, name) = (StagingCache::default(), staging(), name(1, 1));
        load(&records, &staging, name);
        let until = Instant::now() + Duration::from_millis(50);
        records.lease(name, Some(until));
        assert_eq!(records.take_versions(&[(name.record.id, name.record.version)]).len(), 1);
        assert!(!is_ready(&records, name));
        let is_held = staging.in_use().used_buffers == 1;
        assert!(is_held && !records.evict_one() || Instant::now() >= until);
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        assert!(records.evict_one());
        assert_eq!(staging.in_use().used_buffers, 0);
    }

    #[test]
    fn parts_read_ahead_are_limited_until_a_reader_asks_for_them() {
        let (records, staging) = (StagingCache::default(), staging());
        let names = [name(1, 1), name(2, 1), name(3, 1), name(4, 1)];
        assert!(records.begin_ahead(names[0], 2));
        assert!(!records.begin_ahead(names[0], 2), "it is being loaded");
        assert!(records.begin_ahead(names[1], 2));
        assert!(!records.begin_ahead(names[2], 2), "two are ahead");
        records.ready(names[0], stage(&staging, names[0])).unwrap();
        assert!(!records.begin_ahead(names[2], 2), "still two");
        assert!(matches!(records.begin(names[0]), StagingLookup::Ready(_)));
        assert!(records.begin_ahead(names[2], 2));
        assert!(matches!(records.begin(names[1]), StagingLookup::InProgress));
        assert!(records.begin_ahead(names[3], 2));
        records.failed(names[3]);
        assert!(records.begin_ahead(names[3], 2), "a failed load no longer counts");
    }

    #[test]
    fn removal_takes_all_parts_of_a_record() {
        let (records, staging) = (StagingCache::default(), staging());
        let first = name(1, 1);
        let second = first.next().unwrap();
        for name in [first, second, name(2, 1)] {
            load(&records, &staging, name);
        }
        assert_eq!(records.take(&[first.record]).len(), 2);
        assert_eq!([first, second, name(2, 1)].map(|name| is_ready(&records, name)), [false, false, true]);
    }
}
