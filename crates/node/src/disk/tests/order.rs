//! In which order the session hears things: what was told as gone, or whose removal was answered, is not told as there
//! after that, unless it was ordered to be written again. Sessions begin while others are told, records are evicted and
//! removed while they are told.

use std::collections::BTreeSet;

use moontide_disk::samples::Random;

use super::*;

/// What is known of a record at some place in what was heard.
#[derive(Debug, Default)]
struct Fate {
    /// Orders to write it that were not answered yet.
    open: BTreeSet<u64>,
    is_gone: bool,
    /// It may have been written again since it was gone.
    may_return: bool,
    is_removed: bool,
}

/// Looks at what was heard from the first to the last; the answer is how many times something was told as there.
fn check(notes: &[Note], removals: &BTreeMap<u64, RecordName>) -> usize {
    let mut fates: BTreeMap<RecordName, Fate> = BTreeMap::new();
    let mut of_order: BTreeMap<u64, RecordName> = BTreeMap::new();
    let mut there = 0;
    for (at, note) in notes.iter().enumerate() {
        match note {
            Note::Ordered(order, name) => {
                let fate = fates.entry(*name).or_default();
                fate.open.insert(*order);
                fate.may_return = true;
                of_order.insert(*order, *name);
            }
            Note::Answered(_, result) => {
                if let Some(name) = of_order.get(&result.order) {
                    fates.entry(*name).or_default().open.remove(&result.order);
                }
                if let Some(removed) = removals.get(&result.order).filter(|_| result.code.is_none()) {
                    let of_them =
                        |name: &RecordName| name.id == removed.id && name.version <= removed.version;
                    for (_, fate) in fates.iter_mut().filter(|(name, _)| of_them(name)) {
                        fate.is_removed = true;
                    }
                }
            }
            Note::There { names, .. } => {
                for name in names {
                    there += 1;
                    let fate = fates.entry(*name).or_default();
                    assert!(!fate.is_removed, "{at}: {name:?} was removed, and is told");
                    assert!(!fate.is_gone || fate.may_return, "{at}: {name:?} was gone, and is told");
                    fate.is_gone = false;
                }
            }
            Note::Gone { versions, .. } => {
                for (id, version) in versions {
                    let fate = fates.entry(RecordName { id: *id, version: *version, stripe: 0 }).or_default();
                    fate.is_gone = true;
                    fate.may_return = !fate.open.is_empty();
                }
            }
            Note::End(_) => {}
        }
    }
    there
}

fn play(seed: u64, backend: BackendKind, bug: Option<Bug>) -> (Vec<Note>, BTreeMap<u64, RecordName>) {
    let slots = 24;
    let setup = Setup {
        backend,
        slots,
        units: 64,
        limit_bytes: if backend == BackendKind::Offset { 2 << 20 } else { 400 << 10 },
        staging_bytes: 256 << 10,
        bug,
        ..Setup::default()
    };
    let world = World::on(SimulatedDisk::new(seed), setup, Arc::default()).unwrap();
    let names: Vec<RecordName> =
        (0..slots).map(|slot| world.put(SlotId(slot), u64::from(slot), 20_000)).collect();
    let mut removals = BTreeMap::new();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Sessions follow each other, some before the one before was told everything.
            let mut random = Random(seed ^ 1);
            let mut session = SESSION.0;
            while !is_over.load(Ordering::SeqCst) {
                session += 1;
                world.begin_session(SessionId(session));
                std::thread::sleep(Duration::from_micros(random.below(120_000)));
            }
        });
        let mut random = Random(seed);
        let mut left: Vec<(RecordName, SlotId)> = names.iter().copied().zip((0..).map(SlotId)).collect();
        for _ in 0..120 {
            let at = random.below(left.len() as u64) as usize;
            let (name, slot) = left[at];
            match random.below(16) {
                0 if left.len() > 12 => {
                    left.swap_remove(at);
                    removals.insert(world.remove(name), name);
                }
                1 => _ = world.fetch(name),
                _ => _ = world.offload(name, slot),
            }
            std::thread::sleep(Duration::from_micros(random.below(4_000)));
        }
        is_over.store(true, Ordering::SeqCst);
    });
    for order in removals.keys() {
        assert_eq!(world.outcome(*order), Ok(()));
    }
    world.told_anew(SessionId(1 << 40));
    world.end();
    let notes = world.session.notes.lock().clone();
    (notes, removals)
}

#[test]
fn what_is_gone_is_not_told_as_there_afterwards() {
    let (mut there, mut gone) = (0, 0);
    // How much is told depends on how fast the machine is: more plays, if these were too few.
    for (seed, backend) in (1..=30).zip(BackendKind::ALL.into_iter().cycle()) {
        println!("seed {seed}, {backend}");
        let (notes, removals) = play(seed, backend, None);
        there += check(&notes, &removals);
        gone += notes.iter().filter(|note| matches!(note, Note::Gone { .. })).count();
        if seed >= 3 && there > 100 && gone > 5 {
            return;
        }
    }
    panic!("{there} times there, {gone} times gone: too few to show anything");
}

#[test]
fn check_of_the_order_notices_what_is_told_too_late() {
    let name = RecordName { id: id(1), version: Epoch::new(term(), 1).unwrap(), stripe: 0 };
    let there = Note::There { session: SESSION, names: vec![name], recovered: true };
    let gone = Note::Gone { session: SESSION, versions: vec![(name.id, name.version)] };
    let done = |order| {
        let word = moontide_types::record::Word::new(name.version, State::Ready);
        Note::Answered(SESSION, OrderResult { order, word, code: None, phase: OrderPhase::Done })
    };
    let removals = BTreeMap::from([(7, name)]);
    let is_right = |notes: &[Note]| std::panic::catch_unwind(|| check(notes, &removals)).is_ok();
    let (first, second) = (Note::Ordered(1, name), Note::Ordered(2, name));
    assert!(is_right(&[first.clone(), there.clone(), done(1), gone.clone(), second.clone(), there.clone()]));
    assert!(
        is_right(&[first.clone(), there.clone(), gone.clone(), there.clone(), done(1)]),
        "it may be the second time"
    );
    assert!(!is_right(&[first.clone(), there.clone(), done(1), gone, there.clone()]));
    assert!(!is_right(&[first, there.clone(), done(1), done(7), second, there]));
}
