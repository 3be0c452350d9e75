//! Order of the notices to sessions: a record that was reported as gone, or whose removal has a result, is not reported
//! as present after that, unless it was offloaded again. Sessions begin during the inventories of others; records are
//! evicted and removed during inventories.

use std::collections::BTreeSet;

use moontide_rt::SplitMix64;

use super::*;

/// State of a record at one position of the log.
#[derive(Debug, Default)]
struct RecordState {
    /// Offload commands without a result.
    open: BTreeSet<u64>,
    is_gone: bool,
    /// The record may have been written again since it was gone.
    may_return: bool,
    is_removed: bool,
}

/// Checks the log from the first to the last entry. Returns how many times a record was reported as present.
fn check(entries: &[LogEntry], removals: &BTreeMap<u64, RecordId>) -> usize {
    let mut states: BTreeMap<RecordId, RecordState> = BTreeMap::new();
    let mut of_command: BTreeMap<u64, RecordId> = BTreeMap::new();
    let mut present = 0;
    for (at, entry) in entries.iter().enumerate() {
        match entry {
            LogEntry::Commanded(id, name) => {
                let state = states.entry(*name).or_default();
                state.open.insert(*id);
                state.may_return = true;
                of_command.insert(*id, *name);
            }
            LogEntry::Result(_, result) => {
                if let Some(name) = of_command.get(&result.command_id) {
                    states.entry(*name).or_default().open.remove(&result.command_id);
                }
                if let Some(removed) = removals.get(&result.command_id).filter(|_| result.code.is_none()) {
                    let is_removed =
                        |name: &RecordId| name.id == removed.id && name.version <= removed.version;
                    for (_, state) in states.iter_mut().filter(|(name, _)| is_removed(name)) {
                        state.is_removed = true;
                    }
                }
            }
            LogEntry::Present { names, .. } => {
                for name in names {
                    present += 1;
                    let state = states.entry(*name).or_default();
                    assert!(!state.is_removed, "{at}: {name:?} was removed, and is reported as present");
                    assert!(
                        !state.is_gone || state.may_return,
                        "{at}: {name:?} was gone, and is reported as present"
                    );
                    state.is_gone = false;
                }
            }
            LogEntry::Gone { versions, .. } => {
                for (id, version) in versions {
                    let state = states.entry(RecordId { id: *id, version: *version, stripe: 0 }).or_default();
                    state.is_gone = true;
                    state.may_return = !state.open.is_empty();
                }
            }
            LogEntry::InventoryEnd(_) => {}
        }
    }
    present
}

fn run_seed(
    seed: u64,
    backend: BackendKind,
    mutation: Option<Mutation>,
) -> (Vec<LogEntry>, BTreeMap<u64, RecordId>) {
    let slots = 24;
    let setup = Setup {
        backend,
        slots,
        units: 64,
        limit_bytes: if backend == BackendKind::Offset { 2 << 20 } else { 400 << 10 },
        staging_bytes: 256 << 10,
        mutation,
        ..Setup::default()
    };
    let harness = Harness::on(SimulatedDisk::new(seed), setup, Arc::default()).unwrap();
    let names: Vec<RecordId> =
        (0..slots).map(|slot| harness.put(SlotId(slot), u64::from(slot), 20_000)).collect();
    let mut removals = BTreeMap::new();
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Sessions follow each other, some before the inventory of the previous one is complete.
            let mut rng = SplitMix64::new(seed ^ 1);
            let mut session = SESSION.0;
            while !stopped.load(Ordering::SeqCst) {
                session += 1;
                harness.begin_session(SessionId(session));
                moontide_rt::thread::sleep(Duration::from_micros(rng.below(120_000)));
            }
        });
        let mut rng = SplitMix64::new(seed);
        let mut left: Vec<(RecordId, SlotId)> = names.iter().copied().zip((0..).map(SlotId)).collect();
        for _ in 0..120 {
            let at = rng.below(left.len() as u64) as usize;
            let (name, slot) = left[at];
            match rng.below(16) {
                0 if left.len() > 12 => {
                    left.swap_remove(at);
                    removals.insert(harness.remove(name), name);
                }
                1 => _ = harness.fetch(name),
                _ => _ = harness.offload(name, slot),
            }
            moontide_rt::thread::sleep(Duration::from_micros(rng.below(4_000)));
        }
        stopped.store(true, Ordering::SeqCst);
    });
    for id in removals.keys() {
        assert_eq!(harness.outcome(*id), Ok(()));
    }
    harness.inventory(SessionId(1 << 40));
    harness.end();
    let entries = harness.log.entries.lock().clone();
    (entries, removals)
}

#[test]
fn record_reported_gone_is_not_later_reported_present() {
    let (mut present, mut gone) = (0, 0);
    // The number of notices depends on the speed of the machine: run more seeds if these were too few.
    for (seed, backend) in (1..=30).zip(BackendKind::ALL.into_iter().cycle()) {
        println!("seed {seed}, {backend}");
        let (entries, removals) = run_seed(seed, backend, None);
        present += check(&entries, &removals);
        gone += entries.iter().filter(|entry| matches!(entry, LogEntry::Gone { .. })).count();
        if seed >= 3 && present > 100 && gone > 5 {
            return;
        }
    }
    panic!("{present} notices of presence, {gone} of absence: too few for this test");
}

#[test]
fn checker_rejects_present_notice_after_gone_notice() {
    let name = RecordId { id: id(1), version: Epoch::new(term(), 1).unwrap(), stripe: 0 };
    let present = LogEntry::Present { session: SESSION, names: vec![name], recovered: true };
    let gone = LogEntry::Gone { session: SESSION, versions: vec![(name.id, name.version)] };
    let done = |command_id| {
        let word = moontide_types::record::Word::new(name.version, State::Ready);
        LogEntry::Result(SESSION, CommandResult { command_id, word, code: None, status: CommandStatus::Done })
    };
    let removals = BTreeMap::from([(7, name)]);
    let accepts = |entries: &[LogEntry]| std::panic::catch_unwind(|| check(entries, &removals)).is_ok();
    let (first, second) = (LogEntry::Commanded(1, name), LogEntry::Commanded(2, name));
    assert!(accepts(&[
        first.clone(),
        present.clone(),
        done(1),
        gone.clone(),
        second.clone(),
        present.clone()
    ]));
    assert!(
        accepts(&[first.clone(), present.clone(), gone.clone(), present.clone(), done(1)]),
        "the record may have been written a second time"
    );
    assert!(!accepts(&[first.clone(), present.clone(), done(1), gone, present.clone()]));
    assert!(!accepts(&[first, present.clone(), done(1), done(7), second, present]));
}
