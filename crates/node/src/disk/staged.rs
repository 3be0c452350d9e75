//! [`StagedRecords`]: which records of the disk are in staging, and who may go when there is no room.
//!
//! ```text
//!   absent ──begin──▶ loading ──ready──▶ ready ──evict, forget──▶ absent
//!                        └──failed──▶ absent            (readers that pin it are served to their end)
//! ```
//!
//! One thread loads a record; others who want it wait for that one. A record that is ready stays until its room is
//! needed, oldest use first; one that somebody asked to be kept stays until that time is over, or all who asked gave it
//! back. Whoever had it kept may read it without this node's help: its room is not used again before, also if the record
//! is removed.

use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;
use moontide_disk::RecordName;
use moontide_heap::Staged;
use moontide_types::{Epoch, ErrorCode, ObjectId};
use parking_lot::{Condvar, Mutex};

/// Records in staging.
#[derive(Debug, Default)]
pub(super) struct StagedRecords {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<RecordName, Entry>,
    uses: u64,
    /// Removed, and kept for somebody until then.
    leaving: Vec<(Arc<Staged>, Instant)>,
}

#[derive(Debug)]
enum Entry {
    /// Doomed: it was removed while it was read, and is not let in. Until that has ended nobody loads it anew, so that
    /// the two are not taken for each other.
    Loading {
        doomed: bool,
    },
    Ready {
        staged: Arc<Staged>,
        used: u64,
        keepers: u32,
        kept_until: Option<Instant>,
    },
}

impl Table {
    /// Takes a record out that can be found on the disk no more.
    fn take(&mut self, name: &RecordName) -> Option<Arc<Staged>> {
        match self.entries.get_mut(name)? {
            Entry::Loading { doomed } => {
                *doomed = true;
                None
            }
            Entry::Ready { staged, kept_until, .. } => {
                let staged = Arc::clone(staged);
                if let Some(until) = kept_until.filter(|until| *until > Instant::now()) {
                    self.leaving.push((Arc::clone(&staged), until));
                }
                self.entries.remove(name);
                Some(staged)
            }
        }
    }
}

/// What a look-up found.
#[derive(Debug)]
pub(super) enum Looked {
    /// It is there.
    Ready(Arc<Staged>),
    /// Nobody has it: the caller loads it, and says how that went.
    Mine,
    /// Somebody else is loading it.
    Others,
}

impl StagedRecords {
    /// Looks for a record; one that is absent becomes the caller's to load.
    pub(super) fn begin(&self, name: RecordName) -> Looked {
        let mut table = self.table.lock();
        table.uses += 1;
        let now = table.uses;
        match table.entries.get_mut(&name) {
            Some(Entry::Ready { staged, used, .. }) => {
                *used = now;
                Looked::Ready(Arc::clone(staged))
            }
            Some(Entry::Loading { .. }) => Looked::Others,
            None => {
                table.entries.insert(name, Entry::Loading { doomed: false });
                Looked::Mine
            }
        }
    }

    /// Waits for what somebody else loads.
    pub(super) fn wait(&self, name: RecordName, deadline: Instant) -> Result<Arc<Staged>, ErrorCode> {
        let mut table = self.table.lock();
        loop {
            match table.entries.get(&name) {
                Some(Entry::Ready { staged, .. }) => return Ok(Arc::clone(staged)),
                Some(Entry::Loading { .. }) => {}
                // It failed, or was gone again at once: the reason was told to the one who loaded it.
                None => return Err(ErrorCode::Busy),
            }
            if self.changed.wait_until(&mut table, deadline).timed_out() {
                return Err(ErrorCode::DeadlineExceeded);
            }
        }
    }

    /// A record that the caller loads is there. None: it was removed meanwhile, and is not let in.
    pub(super) fn ready(&self, name: RecordName, staged: Staged) -> Option<Arc<Staged>> {
        let staged = Arc::new(staged);
        let mut table = self.table.lock();
        let used = table.uses;
        let is_wanted = matches!(table.entries.get(&name), Some(Entry::Loading { doomed: false }));
        if is_wanted {
            let entry = Entry::Ready { staged: Arc::clone(&staged), used, keepers: 0, kept_until: None };
            table.entries.insert(name, entry);
        }
        drop(table);
        self.changed.notify_all();
        is_wanted.then_some(staged)
    }

    /// A record that the caller was to load is not there.
    pub(super) fn failed(&self, name: RecordName) {
        let mut table = self.table.lock();
        if matches!(table.entries.get(&name), Some(Entry::Loading { .. })) {
            table.entries.remove(&name);
        }
        drop(table);
        self.changed.notify_all();
    }

    /// Keeps a record for somebody who comes for it, or gives it back.
    pub(super) fn keep(&self, name: RecordName, until: Option<Instant>) {
        if let Some(Entry::Ready { keepers, kept_until, .. }) = self.table.lock().entries.get_mut(&name) {
            match until {
                Some(_) => *keepers += 1,
                None => *keepers = keepers.saturating_sub(1),
            }
            *kept_until = until.max(*kept_until).filter(|_| *keepers > 0);
        }
    }

    /// Lets go of the record that was used longest ago and that nobody waits for. False: there is none.
    pub(super) fn evict_one(&self) -> bool {
        let mut table = self.table.lock();
        let now = Instant::now();
        let (leaving, left) =
            std::mem::take(&mut table.leaving).into_iter().partition(|(_, until)| *until > now);
        let left: Vec<(Arc<Staged>, Instant)> = left;
        table.leaving = leaving;
        if !left.is_empty() {
            drop(table);
            return true;
        }
        let idle = |entry: &Entry| match entry {
            Entry::Ready { staged, used, kept_until, .. } => {
                let free = Arc::strong_count(staged) == 1 && kept_until.is_none_or(|until| until <= now);
                free.then_some(*used)
            }
            Entry::Loading { .. } => None,
        };
        // Staging has some thousands of slots at most, and a load from disk takes longer than to look at them.
        let oldest = table.entries.iter().filter_map(|(name, entry)| Some((idle(entry)?, *name)));
        let Some((_, name)) = oldest.min_by_key(|&(used, _)| used) else { return false };
        let gone = table.entries.remove(&name);
        drop(table);
        drop(gone);
        true
    }

    /// Versions, and all before each, were removed: what was here of them, to be shut by the caller. One look at the table,
    /// however many they are.
    pub(super) fn take_versions(&self, removed: &[(ObjectId, Epoch)]) -> Vec<Arc<Staged>> {
        let mut highest: HashMap<ObjectId, Epoch> = HashMap::with_capacity(removed.len());
        for &(id, version) in removed {
            let known = highest.entry(id).or_insert(version);
            *known = version.max(*known);
        }
        let mut table = self.table.lock();
        let of_them =
            |name: &&RecordName| highest.get(&name.id).is_some_and(|version| name.version <= *version);
        let names: Vec<RecordName> = table.entries.keys().filter(of_them).copied().collect();
        let gone = names.iter().filter_map(|name| table.take(name)).collect();
        drop(table);
        self.changed.notify_all();
        gone
    }

    /// Records left the disk: what was here of them, to be shut by the caller.
    pub(super) fn take(&self, names: &[RecordName]) -> Vec<Arc<Staged>> {
        let mut table = self.table.lock();
        let gone = names.iter().filter_map(|name| table.take(name)).collect();
        drop(table);
        self.changed.notify_all();
        gone
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use moontide_heap::{HeapConfig, HugePages, NewRecord, NodeHeap, Staging};
    use moontide_types::record::{Attributes, DigestContext, Flags, KeySection};
    use moontide_types::{Generation, Key, NodeId, Tenant, TenantGeneration, Term};

    use super::*;

    fn staging() -> Arc<Staging> {
        let (node, generation) = (NodeId(1), Generation(1));
        let config = HeapConfig { node, generation, slots_max: 16, huge: HugePages::IfAllowed };
        let heap = Arc::new(NodeHeap::create(config).unwrap());
        Arc::new(Staging::new(&heap, 16, 256, HugePages::IfAllowed).unwrap())
    }

    fn name(object: u8, sequence: u64) -> RecordName {
        let version = Epoch::new(Term::new(1).unwrap(), sequence).unwrap();
        RecordName { id: ObjectId([object; 16]), version, stripe: 0 }
    }

    fn stage(staging: &Arc<Staging>, name: RecordName) -> Staged {
        let mut room = staging.take(8192).unwrap();
        room.bytes_mut()[..100].fill(name.id.0[0]);
        let context = DigestContext { id: name.id, version: name.version, stripe: 0, len: 100 };
        let mut digests = vec![];
        let root = context.payload(&[name.id.0[0]; 100], |digest| digests.extend(digest.to_le_bytes()));
        let record = NewRecord {
            id: name.id,
            flags: Flags::NONE,
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
        room.publish(name.version, 0, record, &digests, root, false).unwrap()
    }

    fn load(records: &StagedRecords, staging: &Arc<Staging>, name: RecordName) {
        assert!(matches!(records.begin(name), Looked::Mine));
        assert!(records.ready(name, stage(staging, name)).is_some());
    }

    fn is_there(records: &StagedRecords, name: RecordName) -> bool {
        matches!(records.table.lock().entries.get(&name), Some(Entry::Ready { .. }))
    }

    #[test]
    fn one_loads_and_others_wait() {
        let (records, staging, name) = (StagedRecords::default(), staging(), name(1, 1));
        assert!(matches!(records.begin(name), Looked::Mine));
        assert!(matches!(records.begin(name), Looked::Others));
        let late = Instant::now() + Duration::from_millis(5);
        assert_eq!(records.wait(name, late).unwrap_err(), ErrorCode::DeadlineExceeded);
        std::thread::scope(|scope| {
            let waiting =
                scope.spawn(|| records.wait(name, Instant::now() + Duration::from_secs(30)).is_ok());
            records.ready(name, stage(&staging, name)).unwrap();
            assert!(waiting.join().unwrap());
        });
        assert!(matches!(records.begin(name), Looked::Ready(_)));
    }

    #[test]
    fn load_that_failed_is_anybodys() {
        let (records, name) = (StagedRecords::default(), name(1, 1));
        assert!(matches!(records.begin(name), Looked::Mine));
        records.failed(name);
        assert_eq!(records.wait(name, Instant::now()).unwrap_err(), ErrorCode::Busy);
        assert!(matches!(records.begin(name), Looked::Mine));
    }

    /// A load that a removal had overtaken was let in if another one had begun since, in whose place it stood then.
    #[test]
    fn load_that_was_overtaken_is_not_let_in_whoever_comes_next() {
        type Take = fn(&StagedRecords, RecordName) -> Vec<Arc<Staged>>;
        let takes: [Take; 2] = [
            |records, name| records.take_versions(&[(name.id, name.version)]),
            |records, name| records.take(&[name]),
        ];
        for take in takes {
            let (records, staging, name) = (StagedRecords::default(), staging(), name(1, 1));
            assert!(matches!(records.begin(name), Looked::Mine));
            assert!(take(&records, name).is_empty());
            assert!(matches!(records.begin(name), Looked::Others), "until the first has ended");
            assert!(records.ready(name, stage(&staging, name)).is_none());
            assert!(!is_there(&records, name));
            records.failed(name);
            assert!(matches!(records.begin(name), Looked::Mine));
            assert!(records.ready(name, stage(&staging, name)).is_some(), "one that began later is let in");
        }
    }

    #[test]
    fn removal_takes_a_version_and_all_before_of_one_object() {
        let (records, staging) = (StagedRecords::default(), staging());
        let names = [name(1, 1), name(1, 2), name(1, 3), name(2, 1)];
        names.iter().for_each(|name| load(&records, &staging, *name));
        assert_eq!(records.take_versions(&[(names[1].id, names[1].version)]).len(), 2);
        assert_eq!(names.map(|name| is_there(&records, name)), [false, false, true, true]);
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_but_for_what_is_held_or_kept() {
        let (records, staging) = (StagedRecords::default(), staging());
        let names = [name(1, 1), name(2, 1), name(3, 1), name(4, 1)];
        names.iter().for_each(|name| load(&records, &staging, *name));
        let there = || names.map(|name| is_there(&records, name));
        let Looked::Ready(held) = records.begin(names[0]) else { panic!("it is there") };
        records.keep(names[1], Some(Instant::now() + Duration::from_secs(60)));
        drop(records.begin(names[2]));
        assert!(records.evict_one());
        assert_eq!(there(), [true, true, true, false]);
        assert!(records.evict_one());
        assert_eq!(there(), [true, true, false, false]);
        assert!(!records.evict_one(), "one is held, the other kept");
        drop(held);
        assert!(records.evict_one());
        records.keep(names[1], None);
        assert!(records.evict_one());
        assert_eq!((there(), records.evict_one()), ([false; 4], false));
        assert_eq!(staging.in_use().held_rooms, 0);
    }

    /// The first of two who had it kept gave it back, and it went while the other one was reading.
    #[test]
    fn kept_for_two_is_kept_until_both_gave_it_back() {
        let (records, staging, name) = (StagedRecords::default(), staging(), name(1, 1));
        load(&records, &staging, name);
        let soon = Instant::now() + Duration::from_millis(20);
        records.keep(name, Some(Instant::now() + Duration::from_secs(60)));
        records.keep(name, Some(soon));
        records.keep(name, None);
        assert!(!records.evict_one());
        std::thread::sleep(soon.saturating_duration_since(Instant::now()));
        assert!(!records.evict_one(), "the longer time counts");
        records.keep(name, None);
        assert!(records.evict_one());
    }

    /// The room of a record that was removed came free at once, while somebody read it without the node's help.
    #[test]
    fn room_of_what_was_removed_stays_while_it_is_kept() {
        let (records, staging, name) = (StagedRecords::default(), staging(), name(1, 1));
        load(&records, &staging, name);
        let until = Instant::now() + Duration::from_millis(50);
        records.keep(name, Some(until));
        assert_eq!(records.take_versions(&[(name.id, name.version)]).len(), 1);
        assert!(!is_there(&records, name));
        let is_held = staging.in_use().held_rooms == 1;
        assert!(is_held && !records.evict_one() || Instant::now() >= until);
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        assert!(records.evict_one());
        assert_eq!(staging.in_use().held_rooms, 0);
    }
}
