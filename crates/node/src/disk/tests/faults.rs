//! A disk that fails one operation in ten in every way: reads and writes with EIO, torn writes, ENOSPC, failed syncs
//! and directory operations, bits flipped during reads, and occasional crashes.
//!
//! Invariants: no read returns wrong bytes, nothing hangs and no thread panics; failures have codes that callers treat
//! as a miss; a removal with a result persists; and when the disk works again, so does the tier.
//!
//! `MOONTIDE_CASES` is the number of seeds.

use std::collections::BTreeSet;

use moontide_disk::{Faults, Times};
use moontide_rt::SplitMix64;

use super::*;

const SLOTS: u32 = 32;
const OBJECTS: u64 = 24;
const STEPS: u64 = 250;

const BAD: Faults = Faults {
    read_error_permille: 100,
    write_error_permille: 100,
    torn_write_permille: 100,
    sync_error_permille: 50,
    name_error_permille: 50,
    no_space_permille: 50,
    flipped_read_permille: 100,
    short_permille: 100,
    capacity: None,
    latency: None,
    times: Times::NONE,
};

/// Codes that callers treat as a miss, or retry.
const MISSES: [ErrorCode; 5] =
    [ErrorCode::Gone, ErrorCode::Busy, ErrorCode::DiskError, ErrorCode::Corrupt, ErrorCode::DeadlineExceeded];

/// Codes with which a command may be refused.
const REFUSALS: [ErrorCode; 6] = [
    ErrorCode::Gone,
    ErrorCode::Busy,
    ErrorCode::DiskError,
    ErrorCode::DiskFull,
    ErrorCode::Corrupt,
    ErrorCode::Cancelled,
];

/// Counters over all seeds.
#[derive(Debug, Default)]
struct Totals {
    offloaded: u64,
    read: u64,
    write_errors: u64,
    read_errors: u64,
    corrupt: u64,
    evicted: u64,
    removed: u64,
    promoted: u64,
    crashes: u64,
}

/// Checks the invariants, independent of the faults of the disk.
struct Oracle {
    rng: SplitMix64,
    /// Records in memory.
    slots: Vec<Option<RecordId>>,
    /// All records that were ever put, in this order.
    names: Vec<RecordId>,
    /// Acknowledged removals: this version and all earlier ones.
    removed: BTreeMap<ObjectId, Epoch>,
    /// Acknowledged kills in memory.
    killed: BTreeSet<RecordId>,
    offloads: Vec<u64>,
    removals: Vec<(u64, RecordId)>,
}

impl Oracle {
    fn is_removed(&self, name: RecordId) -> bool {
        self.removed.get(&name.id).is_some_and(|version| name.version <= *version)
    }

    fn random_name(&mut self) -> Option<RecordId> {
        let recent = self.names.len().min(48);
        let at = self.rng.below(recent.max(1) as u64) as usize;
        self.names.len().checked_sub(at + 1).map(|at| self.names[at])
    }

    fn slot(&mut self, taken: bool) -> Option<SlotId> {
        let begin = self.rng.below(SLOTS.into()) as u32;
        let mut order = (0..SLOTS).map(|n| (begin + n) % SLOTS);
        order.find(|slot| self.slots[*slot as usize].is_some() == taken).map(SlotId)
    }

    fn step(&mut self, harness: &Harness) {
        match self.rng.below(20) {
            0..6 => self.put(harness),
            6..8 => self.offload(harness),
            8..13 => self.stage(harness),
            13..15 => {
                if let Some(name) = self.random_name() {
                    self.removals.push((harness.remove(name), name));
                }
            }
            15..17 => self.promote(harness),
            17..19 => {
                if let Some(slot) = self.slot(true) {
                    let kind = if self.rng.below(2) == 0 { CommandKind::Kill } else { CommandKind::Reclaim };
                    self.free(harness, slot, kind);
                }
            }
            _ => self.await_results(harness),
        }
    }

    fn put(&mut self, harness: &Harness) {
        let Some(slot) = self.slot(false) else { return };
        let number = self.rng.below(OBJECTS);
        let len = [100, 4000, 9000, 25_000][self.rng.below(4) as usize] + self.rng.below(900);
        let name = harness.put(slot, number, len);
        self.slots[slot.0 as usize] = Some(name);
        self.names.push(name);
        self.offloads.push(harness.offload(name, slot));
    }

    fn offload(&mut self, harness: &Harness) {
        if let Some(slot) = self.slot(true)
            && let Some(name) = self.slots[slot.0 as usize]
        {
            self.offloads.push(harness.offload(name, slot));
        }
    }

    fn stage(&mut self, harness: &Harness) {
        let count = 1 + self.rng.below(4);
        let names: Vec<RecordId> = (0..count).filter_map(|_| self.random_name()).collect();
        let short = self.rng.below(10) == 0;
        let deadline = Instant::now() + if short { Duration::from_millis(1) } else { HANG_TIMEOUT };
        for (name, pin) in names.iter().zip(harness.tier.stage(&read_ops(&names), deadline)) {
            match pin {
                Ok(pin) => {
                    assert!(!self.is_removed(*name), "{name:?} was removed");
                    harness.check(*name, &pin);
                }
                Err(code) => {
                    assert!(MISSES.contains(&code), "{name:?}: {code}");
                    assert!(short || code != ErrorCode::DeadlineExceeded, "{name:?} hangs");
                }
            }
        }
    }

    fn promote(&mut self, harness: &Harness) {
        let (Some(name), Some(slot)) = (self.random_name(), self.slot(false)) else { return };
        match harness.outcome(harness.promote(name, slot)) {
            Ok(()) => {
                let pin = harness.memory.heap().pin(SEGMENT, slot, name.version).expect("it was promoted");
                harness.check(name, &pin);
                self.slots[slot.0 as usize] = Some(name);
            }
            Err(code) => {
                assert!(REFUSALS.contains(&code), "{name:?}: {code}");
                assert!(harness.memory.heap().pin(SEGMENT, slot, name.version).is_none());
                harness.first_result(harness.command(CommandKind::Reclaim, name, slot));
            }
        }
    }

    /// Removes a record from memory.
    fn free(&mut self, harness: &Harness, slot: SlotId, kind: CommandKind) {
        let Some(name) = self.slots[slot.0 as usize].take() else { return };
        if kind == CommandKind::Kill {
            let code = harness.first_result(harness.command(kind, name, slot)).code;
            assert!(code.is_none_or(|code| REFUSALS.contains(&code)), "{name:?}: {code:?}");
            if code.is_none() {
                self.killed.insert(name);
            }
        }
        let reclaimed = harness.outcome(harness.command(CommandKind::Reclaim, name, slot));
        assert_eq!(reclaimed, Ok(()), "{name:?}");
    }

    /// Waits for the results of all commands, and checks their codes.
    fn await_results(&mut self, harness: &Harness) {
        for id in std::mem::take(&mut self.offloads) {
            let outcome = harness.outcome(id);
            assert!(outcome.map_or_else(|code| REFUSALS.contains(&code), |()| true), "{outcome:?}");
        }
        for (id, name) in std::mem::take(&mut self.removals) {
            match harness.outcome(id) {
                Ok(()) => add_removed(&mut self.removed, name),
                Err(code) => assert_eq!(code, ErrorCode::DiskError),
            }
        }
    }

    /// Crashes the node. Results sent before count.
    fn crash(&mut self, harness: &Harness) {
        let left = self.rng.below(20);
        harness.disk.crash_after(left);
        for _ in 0..self.rng.below(10) {
            self.put(harness);
            self.stage(harness);
        }
        harness.disk.crash_after(0);
        harness.end();
        harness.flush();
        let entries = harness.log.entries.lock();
        for entry in &*entries {
            if let LogEntry::Gone { versions, .. } = entry {
                // The disk had lost the record: that is not durable, and a later removal does not reach it.
                self.killed.retain(|name| !versions.contains(&(name.id, name.version)));
            }
            let LogEntry::Result(_, CommandResult { command_id, code: None, .. }) = entry else {
                continue;
            };
            if let Some((_, name)) = self.removals.iter().find(|(removal, _)| removal == command_id) {
                add_removed(&mut self.removed, *name);
            }
        }
        drop(entries);
        self.offloads.clear();
        self.removals.clear();
        self.slots.fill(None);
        harness.disk.restart();
    }

    /// Checks the records that a restarted node finds.
    fn check_recovered(&self, harness: &Harness) {
        for name in harness.inventory(SessionId(6)) {
            assert!(!self.is_removed(name), "{name:?} was removed, and reappears");
            assert!(!self.killed.contains(&name), "{name:?} was killed, and reappears");
            if let Err(code) = harness.fetch(name) {
                assert!(MISSES.contains(&code), "{name:?}: {code}");
            }
        }
        for name in &self.names {
            assert!(!self.is_removed(*name) || !harness.tier.contains(name), "{name:?} reappears");
        }
    }
}

fn add_removed(removed: &mut BTreeMap<ObjectId, Epoch>, name: RecordId) {
    let version = removed.entry(name.id).or_insert(name.version);
    *version = name.version.max(*version);
}

fn open(disk: &SimulatedDisk, setup: Setup, shared: &Arc<SharedState>) -> Arc<Harness> {
    match Harness::on(disk.clone(), setup, Arc::clone(shared)) {
        Ok(harness) => harness,
        Err(_) => {
            let faults = disk.faults();
            disk.set_faults(Faults::default());
            let harness =
                Harness::on(disk.clone(), setup, Arc::clone(shared)).expect("the disk has no faults");
            disk.set_faults(faults);
            harness
        }
    }
}

fn run_seed(seed: u64, totals: &mut Totals) {
    let backend = BackendKind::ALL[(seed % 3) as usize];
    println!("seed {seed}, {backend}");
    let setup = Setup {
        backend,
        slots: SLOTS,
        units: 64,
        staging_bytes: 128 << 10,
        limit_bytes: if backend == BackendKind::Offset { 1 << 20 } else { 512 << 10 },
        eviction_policy: if seed.is_multiple_of(2) { EvictionPolicy::Fifo } else { EvictionPolicy::Lru },
        write_pause: Duration::from_millis(4),
        ..Setup::default()
    };
    let disk = SimulatedDisk::new(seed);
    let mut oracle = Oracle {
        rng: SplitMix64::new(seed),
        slots: vec![None; SLOTS as usize],
        names: vec![],
        removed: BTreeMap::new(),
        killed: BTreeSet::new(),
        offloads: vec![],
        removals: vec![],
    };
    let shared: Arc<SharedState> = Arc::default();
    let mut harness = open(&disk, setup, &shared);
    let runs = 1 + seed % 3;
    for run in 0..runs {
        if run > 0 {
            oracle.crash(&harness);
            add_counters(&harness, totals);
            totals.crashes += 1;
            harness = open(&disk, setup, &shared);
            oracle.check_recovered(&harness);
        }
        let stopped = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (harness, stopped) = (&harness, &stopped);
            scope.spawn(move || read_until(harness, stopped, seed ^ run));
            for _ in 0..STEPS / runs {
                if oracle.rng.below(25) == 0 {
                    disk.set_faults(if oracle.rng.below(3) == 0 { Faults::default() } else { BAD });
                }
                oracle.step(harness);
            }
            oracle.await_results(harness);
            stopped.store(true, Ordering::SeqCst);
        });
    }
    disk.set_faults(Faults::default());
    if backend == BackendKind::Offset {
        // After a failed sync, the backend refuses writes to its file until it is opened again.
        oracle.crash(&harness);
        add_counters(&harness, totals);
        harness = open(&disk, setup, &shared);
        oracle.check_recovered(&harness);
    }
    let name = check_works_again(&mut oracle, &harness);
    add_counters(&harness, totals);
    oracle.crash(&harness);
    harness = open(&disk, setup, &shared);
    oracle.check_recovered(&harness);
    assert_eq!(harness.fetch(name), Ok(()), "it was written durably and not evicted");
    harness.end();
}

/// Reads rng records until `stopped` is set.
fn read_until(harness: &Harness, stopped: &AtomicBool, seed: u64) {
    let mut rng = SplitMix64::new(seed);
    while !stopped.load(Ordering::SeqCst) {
        let names: Vec<RecordId> = harness.shared.records.lock().keys().copied().collect();
        if !names.is_empty() {
            let name = names[rng.below(names.len() as u64) as usize];
            if let Err(code) = harness.fetch(name) {
                assert!(MISSES.contains(&code) && code != ErrorCode::DeadlineExceeded, "{name:?}: {code}");
            }
        }
        moontide_rt::thread::sleep(Duration::from_micros(rng.below(2000)));
    }
}

/// Checks that the tier works again on a disk without faults.
fn check_works_again(oracle: &mut Oracle, harness: &Harness) -> RecordId {
    harness.wait_for_pause();
    let slot = match oracle.slot(false) {
        Some(slot) => slot,
        None => {
            oracle.free(harness, SlotId(0), CommandKind::Reclaim);
            SlotId(0)
        }
    };
    let name = harness.store(slot, OBJECTS + 1, 20_000);
    oracle.names.push(name);
    oracle.slots[slot.0 as usize] = Some(name);
    assert_eq!(harness.fetch(name), Ok(()));
    harness.check_sum();
    name
}

fn add_counters(harness: &Harness, totals: &mut Totals) {
    harness.check_sum();
    totals.offloaded += harness.count(|c| &c.offloaded_records);
    totals.read += harness.count(|c| &c.loads_read);
    totals.write_errors += harness.count(|c| &c.write_errors);
    totals.read_errors += harness.count(|c| &c.read_errors);
    totals.corrupt += harness.count(|c| &c.corrupt_records);
    totals.evicted += harness.count(|c| &c.evicted_records);
    totals.removed += harness.count(|c| &c.removed_records);
    totals.promoted += harness.count(|c| &c.promoted_records);
}

#[test]
fn failing_disk_never_returns_wrong_bytes() {
    let seeds = std::env::var("MOONTIDE_CASES").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(9);
    let mut totals = Totals::default();
    for seed in 0..seeds {
        run_seed(seed, &mut totals);
    }
    println!("{totals:?}");
    let Totals { offloaded, read, write_errors, read_errors, corrupt, evicted, removed, promoted, crashes } =
        totals;
    let all = [offloaded, read, write_errors, read_errors, corrupt, evicted, removed, promoted, crashes];
    assert!(all.iter().all(|count| *count > 0), "{all:?}: an event never happened");
}
