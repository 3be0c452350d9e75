//! Larger models of the protocol than loom can exhaust, on the shipped code and on many random schedules: an
//! owner that turns slots over, readers with several pins, writers whose reservations are cut short, a row
//! of members that replace each other.
//!
//! Shuttle is sequentially consistent: a missing fence or a Relaxed in place of a Release cannot be seen here.
//! Those bugs have their tests in `loom.rs`; here are the ones that are wrong under every memory model. When a
//! schedule fails, shuttle prints it, for `shuttle::replay`.
#![cfg(shuttle)]

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use moontide_heap::alloc::PAGE_UNITS;
use moontide_heap::cell::{Cell, CellGroup, Expect, SlotName, scan};
use moontide_heap::model::{Bug, Floors, Room, Rooms, free, with_planted};
use moontide_heap::{AtomicWord, ENTRIES_PER_BUCKET, Index, Inserted, Liveness, Place, Row, Transition};
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, MonoTime, ObjectId, SegmentId, SlotId};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::{Config, Runner, thread};

/// Random schedules per model.
const SCHEDULES: usize = 20_000;
/// Schedules with few but well-placed interruptions.
const PCT_SCHEDULES: usize = 5_000;
const PCT_INTERRUPTIONS: usize = 4;

thread_local! {
    /// How often each outcome came about. Shuttle runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

/// A model: what its threads do, and what must have come about in some schedule.
struct Model {
    run: fn(),
    /// Without these outcomes the model has tried nothing of interest, and fails.
    outcomes: &'static [&'static str],
}

fn explore(name: &str, model: &Model, scheduler: impl Scheduler + 'static, bug: Option<Bug>) {
    let mut config = Config::new();
    // It would tell of every Relaxed that it takes for SeqCst.
    config.silence_warnings = true;
    let run = model.run;
    SEEN.take();
    with_planted(bug, || {
        Runner::new(scheduler, config).run(move || {
            seen("schedules");
            run();
        })
    });
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if bug.is_none() {
        let never: Vec<_> = model.outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "in no schedule: {never:?}");
    }
}

/// For each model a test with new schedules every time, then a test per bug that must fail in it, and how. The
/// latter have a fixed seed, so that they cannot pass by bad luck.
macro_rules! models {
    ($($test:ident, $pct_test:ident: $model:expr, { $($twin:ident: $bug:ident => $message:expr,)* })*) => { $(
        #[test]
        fn $test() {
            explore(stringify!($test), &$model, RandomScheduler::new(SCHEDULES), None);
        }
        #[test]
        fn $pct_test() {
            let scheduler = PctScheduler::new(PCT_INTERRUPTIONS, PCT_SCHEDULES);
            explore(stringify!($pct_test), &$model, scheduler, None);
        }
        $(
            #[test]
            #[should_panic(expected = $message)]
            fn $twin() {
                let scheduler = RandomScheduler::new_from_seed(1, SCHEDULES);
                explore(stringify!($twin), &$model, scheduler, Some(Bug::$bug));
            }
        )*
    )* };
}

models! {
    readers_see_whole_objects_while_slots_turn_over, readers_see_whole_objects_with_few_interruptions: Model {
        run: turnover,
        outcomes: &["hit", "miss", "a stranger in the slot", "refused", "moved", "kept", "draining", "freed",
            "reused"],
    }, {
        reuse_without_a_scan_is_found: ReuseWithoutScan => "foreign bytes",
        moving_a_pin_without_a_look_at_the_word_is_found: NaivePinMove => "foreign bytes",
        a_pin_without_a_look_at_the_word_is_found: WordUnchecked => "foreign bytes",
        taking_a_cell_that_names_a_slot_is_found: CellTakenTwice => "foreign bytes",
    }
    late_writers_and_late_commits_harm_nobody, late_writers_harm_nobody_with_few_interruptions: Model {
        run: reservations,
        outcomes: &["wrote", "claim refused", "published", "commit refused", "aborted", "killed", "draining",
            "reused", "read"],
    }, {
        a_commit_that_ignores_the_epoch_is_found: EpochIgnored => "another version was published",
        cutting_a_writer_short_without_a_scan_is_found: ReuseWithoutScan => "foreign bytes",
    }
    a_room_is_its_holders_alone, a_room_is_its_holders_alone_with_few_interruptions: Model {
        run: || staging(true),
        outcomes: &["published", "read", "refused", "draining", "drained", "out of room", "late begin refused"],
    }, {
        giving_out_a_room_whose_slot_is_named_is_found: RoomWhileNamed => "a room whose slot is not free",
        giving_out_a_room_after_no_scan_is_found: ReuseWithoutScan => "foreign bytes",
        reading_a_room_without_a_look_at_the_word_is_found: WordUnchecked => "foreign bytes",
        forgetting_the_floor_of_a_slot_is_found: FloorForgotten => "a late begin was let in",
    }
    the_dead_stay_dead_while_rows_change_hands, the_dead_stay_dead_with_few_interruptions: Model {
        run: succession,
        outcomes: &["absent", "alive", "silent", "late beat"],
    }, {
        reading_a_row_once_is_found: RowReadOnce => "a dead member was reported alive",
        joining_without_a_beat_is_found: JoinUnsigned => "a new member was reported silent",
        a_beat_that_overwrites_a_newer_one_is_found: BeatByStore => "a new member was reported silent",
    }
}

#[test]
#[should_panic(expected = "foreign bytes")]
fn what_harm_a_room_does_that_is_given_out_too_early() {
    let scheduler = RandomScheduler::new_from_seed(1, SCHEDULES);
    let model = Model { run: || staging(false), outcomes: &[] };
    explore("a room given out too early", &model, scheduler, Some(Bug::RoomWhileNamed));
}

#[test]
fn all_threads_of_a_model_run_on_the_tests_own_thread() {
    // What is planted, and what was seen, are kept per thread of the operating system.
    let test = std::thread::current().id();
    let threads = move || {
        let other = thread::spawn(move || assert_eq!(std::thread::current().id(), test));
        assert_eq!(std::thread::current().id(), test);
        other.join().unwrap();
    };
    shuttle::check_random(threads, 10);
}

fn epoch(version: u64) -> Epoch {
    Epoch::from_bits(version).unwrap()
}

fn bytes_of(version: u64) -> u64 {
    version * 111
}

/// A slot with its word and its record. The bytes of version `n` are made from `n`.
struct Slot {
    name: SlotName,
    word: AtomicWord,
    /// In place of the header: which object this is.
    identity: AtomicU64,
    payload: [AtomicU64; 2],
}

impl Slot {
    fn free(number: usize) -> Slot {
        Slot {
            name: SlotName::new(SegmentId(0), SlotId(number as u32)),
            word: AtomicWord::new(Word::new(Epoch::ZERO, State::Free)),
            identity: AtomicU64::new(0),
            payload: [AtomicU64::new(0), AtomicU64::new(0)],
        }
    }

    fn write(&self, version: u64) {
        self.payload.iter().for_each(|p| p.store(bytes_of(version), Ordering::Relaxed));
    }

    fn check(&self, version: Epoch) {
        let value = bytes_of(version.bits());
        self.payload.iter().for_each(|p| assert_eq!(p.load(Ordering::Relaxed), value, "foreign bytes"));
    }
}

const SLOTS: usize = 2;
const OBJECTS: u64 = 3;
const VERSIONS: u64 = 7;
const READERS: usize = 3;
const LOOKS: usize = 4;
const CELLS: usize = 3;

struct Heap {
    slots: Vec<Slot>,
    ledgers: Vec<Vec<Cell>>,
    entries: Vec<AtomicU64>,
}

/// Version `n` is of object `n mod 3`; the objects have different tags, but for two of them.
fn id_of(object: u64) -> ObjectId {
    let tag = u128::from(object.min(1)) << 64;
    ObjectId((u128::from(object) | tag).to_le_bytes())
}

fn place(slot: usize) -> Place {
    Place { segment: SegmentId(0), slot: SlotId(slot as u32) }
}

fn turnover() {
    let heap = Arc::new(Heap {
        slots: (0..SLOTS).map(Slot::free).collect(),
        ledgers: (0..READERS).map(|_| (0..CELLS).map(|_| Cell::vacant()).collect()).collect(),
        entries: (0..2 * ENTRIES_PER_BUCKET).map(|_| AtomicU64::new(0)).collect(),
    });
    let mut owner = Owner::default();
    (1..=SLOTS as u64).for_each(|version| owner.put(&heap, version));
    let readers: Vec<_> = (0..READERS)
        .map(|reader| {
            let heap = Arc::clone(&heap);
            thread::spawn(move || read_around(&heap, reader))
        })
        .collect();
    (SLOTS as u64 + 1..=VERSIONS).for_each(|version| owner.put(&heap, version));
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert!(heap.ledgers.iter().flatten().all(|cell| cell.name().is_none()), "a name was left behind");
}

#[derive(Default)]
struct Owner {
    living: [Option<u64>; SLOTS],
    dying: Vec<(usize, u64)>,
}

impl Owner {
    /// Each version goes into the next slot, whose old record dies, and is freed if nobody names it.
    fn put(&mut self, heap: &Heap, version: u64) {
        let index = Index::new(&heap.entries);
        let at = version as usize % SLOTS;
        if let Some(old) = self.living[at].take() {
            assert!(matches!(heap.slots[at].word.kill(epoch(old)), Transition::Done(_)));
            assert!(index.remove(&id_of(old % OBJECTS), place(at)));
            self.dying.push((at, old));
        }
        self.reclaim(heap);
        let slot = &heap.slots[at];
        if matches!(slot.word.begin(epoch(version)), Transition::Done(_)) {
            slot.identity.store(version % OBJECTS, Ordering::Relaxed);
            slot.write(version);
            assert!(matches!(slot.word.publish(epoch(version)), Transition::Done(_)));
            assert_eq!(index.insert(&id_of(version % OBJECTS), place(at)), Inserted::Indexed);
            self.living[at] = Some(version);
            seen("reused");
        }
    }

    /// One scan for all.
    fn reclaim(&mut self, heap: &Heap) {
        let mut named = HashSet::new();
        scan(heap.ledgers.iter().flatten(), |name| {
            named.insert(name);
        });
        self.dying.retain(|&(at, old)| {
            let slot = &heap.slots[at];
            if named.contains(&slot.name) {
                seen("draining");
                return true;
            }
            assert!(matches!(free(&slot.word, epoch(old)), Transition::Done(_)));
            seen("freed");
            false
        });
    }
}

struct Guard<'h> {
    slot: &'h Slot,
    cell: &'h Cell,
    word: Word,
}

impl Guard<'_> {
    fn check(&self) {
        self.slot.check(self.word.epoch());
    }

    fn release(self) {
        self.check();
        self.cell.release();
    }
}

/// A reader: looks for objects, keeps the last one while it looks for the next, and moves pins about.
fn read_around(heap: &Heap, reader: usize) {
    let group = CellGroup::new(&heap.ledgers[reader]);
    let index = Index::new(&heap.entries);
    let mut kept: Option<Guard<'_>> = None;
    for _ in 0..LOOKS {
        let object = thread_rng().gen_range(0..OBJECTS);
        let cell = group.vacant().expect("a reader holds fewer pins than it has cells");
        let found = index.find(&id_of(object), |place| {
            let slot = &heap.slots[place.slot.0 as usize];
            let Ok(word) = cell.acquire(slot.name, &slot.word, Expect::Ready) else {
                seen("refused");
                return None;
            };
            let guard = Guard { slot, cell, word };
            guard.check();
            if slot.identity.load(Ordering::Relaxed) != object {
                seen("a stranger in the slot");
                guard.release();
                return None;
            }
            Some(guard)
        });
        let Some(mut guard) = found else {
            seen("miss");
            continue;
        };
        seen("hit");
        if let Some(last) = kept.take() {
            // Its cell stands before the new guard's: the direction in which a move can escape a scan.
            last.release();
            let target = group.vacant().expect("a reader holds fewer pins than it has cells");
            if target.acquire_again(guard.cell, &guard.slot.word, guard.word) {
                guard.cell.release();
                guard.cell = target;
                seen("moved");
            } else {
                seen("kept");
            }
            guard.check();
        }
        kept = Some(guard);
    }
    if let Some(last) = kept {
        last.release();
    }
}

const RESERVATIONS: u64 = 4;
const WRITERS: u64 = 2;

struct Desk {
    slot: Slot,
    cells: Vec<Cell>,
    /// The version that was granted last.
    granted: AtomicU64,
}

/// One slot, granted again and again. Writers claim, write and commit in their own time; the owner ends each
/// reservation when it likes.
fn reservations() {
    let cells = (0..=WRITERS).map(|_| Cell::vacant()).collect();
    let desk = Arc::new(Desk { slot: Slot::free(0), cells, granted: AtomicU64::new(0) });
    let writers = (0..WRITERS).map(|writer| {
        let desk = Arc::clone(&desk);
        thread::spawn(move || write_granted(&desk, writer))
    });
    let writers: Vec<_> = writers.collect();
    let reader = {
        let desk = Arc::clone(&desk);
        thread::spawn(move || {
            let Desk { slot, cells, .. } = &*desk;
            for _ in 0..3 {
                if let Ok(word) = cells[WRITERS as usize].acquire(slot.name, &slot.word, Expect::Ready) {
                    slot.check(word.epoch());
                    slot.check(word.epoch());
                    cells[WRITERS as usize].release();
                    seen("read");
                }
                thread::yield_now();
            }
        })
    };
    let slot = &desk.slot;
    for version in 1..=RESERVATIONS {
        assert!(matches!(slot.word.begin(epoch(version)), Transition::Done(_)));
        desk.granted.store(version, Ordering::Release);
        (0..thread_rng().gen_range(0..8)).for_each(|_| thread::yield_now());
        match slot.word.kill(epoch(version)) {
            Transition::Done(old) if old.state() == State::Writing => seen("aborted"),
            Transition::Done(_) => seen("killed"),
            other => panic!("only the owner kills: {other:?}"),
        }
        loop {
            let mut named = false;
            scan(&desk.cells, |_| named = true);
            if !named {
                break;
            }
            seen("draining");
            thread::yield_now();
        }
        assert!(matches!(free(&slot.word, epoch(version)), Transition::Done(_)));
        seen("reused");
    }
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    reader.join().unwrap();
}

/// A writer takes every second version that it sees granted.
fn write_granted(desk: &Desk, writer: u64) {
    let Desk { slot, cells, granted } = desk;
    let cell = &cells[writer as usize];
    let mut last = 0;
    for _ in 0..6 {
        let version = granted.load(Ordering::Acquire);
        if version == last || version % WRITERS != writer {
            thread::yield_now();
            continue;
        }
        last = version;
        if cell.acquire(slot.name, &slot.word, Expect::WritingAt(epoch(version))).is_err() {
            seen("claim refused");
            continue;
        }
        slot.write(version);
        slot.check(epoch(version));
        cell.release();
        seen("wrote");
        // The owner's thread that hears of it, perhaps late.
        match slot.word.publish(epoch(version)) {
            Transition::Done(old) if old.epoch() == epoch(version) => seen("published"),
            Transition::Refused(_) => seen("commit refused"),
            other => panic!("another version was published: {other:?}"),
        }
    }
}

const ROOMS: usize = 2;
const STAGERS: u64 = 2;
const STAGED: u64 = 3;
/// Every slot has seen it before the first version comes back.
const FENCE: u64 = 100;

/// A staging segment of two slots and two pages.
struct Yard {
    slots: Vec<Slot>,
    /// Per slot: in which page its record is. In place of the header.
    places: Vec<AtomicU64>,
    pages: Vec<[AtomicU64; 2]>,
    cells: Vec<Cell>,
    books: Mutex<YardBooks>,
    next_version: AtomicU64,
}

struct YardBooks {
    rooms: Rooms,
    floors: Floors,
    dying: Vec<(usize, u64)>,
}

impl Yard {
    fn write(&self, page: usize, version: u64) {
        self.pages[page].iter().for_each(|p| p.store(bytes_of(version), Ordering::Relaxed));
    }

    fn check(&self, page: usize, version: u64) {
        let value = bytes_of(version);
        self.pages[page].iter().for_each(|p| assert_eq!(p.load(Ordering::Relaxed), value, "foreign bytes"));
    }

    fn sweep(&self, books: &mut YardBooks) {
        (0..books.rooms.sweep(|slot| &self.slots[slot.0 as usize].word)).for_each(|_| seen("drained"));
    }

    /// One scan for all that are dying.
    fn reclaim(&self, books: &mut YardBooks) {
        let mut named = HashSet::new();
        scan(&self.cells, |name| {
            named.insert(name);
        });
        let YardBooks { floors, dying, .. } = books;
        dying.retain(|&(at, version)| {
            let slot = &self.slots[at];
            if named.contains(&slot.name) {
                seen("draining");
                return true;
            }
            let freed = floors.free(SlotId(at as u32), &slot.word, epoch(version));
            assert!(matches!(freed, Transition::Done(_)), "{freed:?}");
            false
        });
    }

    /// As in the shipped `take`.
    fn take(&self) -> Option<Room> {
        let books = &mut *self.books.lock().unwrap();
        let page = NonZeroU32::new(PAGE_UNITS).unwrap();
        books.rooms.take(page).or_else(|| {
            self.reclaim(books);
            self.sweep(books);
            books.rooms.take(page)
        })
    }
}

/// Stagers take rooms, fill, publish and release them, versions falling; readers pin what they find; and a begin that
/// was granted before all of that comes late.
fn staging(strict: bool) {
    let fence = |at| Slot { word: AtomicWord::new(Word::new(epoch(FENCE), State::Free)), ..Slot::free(at) };
    let books = YardBooks {
        rooms: Rooms::new(ROOMS as u32, ROOMS as u32 * PAGE_UNITS),
        floors: Floors::default(),
        dying: Vec::new(),
    };
    let yard = Arc::new(Yard {
        slots: (0..ROOMS).map(fence).collect(),
        places: (0..ROOMS).map(|_| AtomicU64::new(0)).collect(),
        pages: (0..ROOMS).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
        cells: (0..READERS).map(|_| Cell::vacant()).collect(),
        books: Mutex::new(books),
        next_version: AtomicU64::new(STAGERS * STAGED),
    });
    let spawn = |body: Box<dyn FnOnce(&Yard) + Send>| {
        let yard = Arc::clone(&yard);
        thread::spawn(move || body(&yard))
    };
    let mut threads: Vec<_> = (0..STAGERS)
        .map(|_| spawn(Box::new(move |yard| (0..STAGED).for_each(|_| stage(yard, strict)))))
        .collect();
    threads.extend((0..READERS).map(|reader| spawn(Box::new(move |yard| read_rooms(yard, reader)))));
    threads.push(spawn(Box::new(|yard| {
        for _ in 0..4 {
            let slot = &yard.slots[thread_rng().gen_range(0..ROOMS)];
            let begun = slot.word.begin(epoch(FENCE));
            assert!(!matches!(begun, Transition::Done(_)), "a late begin was let in: {begun:?}");
            seen("late begin refused");
        }
    })));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn stage(yard: &Yard, strict: bool) {
    let Some(room) = yard.take() else {
        seen("out of room");
        return thread::yield_now();
    };
    let version = yard.next_version.fetch_sub(1, Ordering::Relaxed);
    let (at, page) = (room.slot().0 as usize, (room.extent().start / PAGE_UNITS) as usize);
    let slot = &yard.slots[at];
    yard.write(page, version);
    yard.check(page, version);
    {
        let books = &mut *yard.books.lock().unwrap();
        if slot.word.load().state() != State::Free {
            assert!(!strict, "a room whose slot is not free was given out");
            return books.rooms.give(room);
        }
        yard.places[at].store(page as u64, Ordering::Relaxed);
        assert!(matches!(
            books.floors.begin_copy(room.slot(), &slot.word, epoch(version)),
            Transition::Done(_)
        ));
        assert!(matches!(slot.word.publish(epoch(version)), Transition::Done(_)));
        seen("published");
    }
    (0..thread_rng().gen_range(0..4)).for_each(|_| thread::yield_now());
    {
        let books = &mut *yard.books.lock().unwrap();
        assert!(matches!(slot.word.kill(epoch(version)), Transition::Done(_)));
        books.dying.push((at, version));
    }
    yard.books.lock().unwrap().rooms.drain(room);
}

fn read_rooms(yard: &Yard, reader: usize) {
    for _ in 0..LOOKS {
        let at = thread_rng().gen_range(0..ROOMS);
        let (slot, cell) = (&yard.slots[at], &yard.cells[reader]);
        let Ok(word) = cell.acquire(slot.name, &slot.word, Expect::Ready) else {
            seen("refused");
            continue;
        };
        let page = yard.places[at].load(Ordering::Relaxed) as usize;
        (0..2).for_each(|_| yard.check(page, word.epoch().bits()));
        cell.release();
        seen("read");
    }
}

const MEMBERS: u64 = 4;
const TTL: Duration = Duration::from_nanos(50);

/// Generation `n` comes at `100 n`, beats once at `100 n + 10` and is dead from then on.
fn succession() {
    let shared = Arc::new((Row::vacant(), AtomicU64::new(0)));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || (0..5).for_each(|_| judge(&shared.0, &shared.1)))
        })
        .collect();
    let (row, clock) = &*shared;
    let mut beats = Vec::new();
    for generation in 1..=MEMBERS {
        let now = 100 * generation;
        clock.store(now, Ordering::SeqCst);
        let member = row.join(7, MonoTime(now)).unwrap();
        let shared = Arc::clone(&shared);
        beats.push(thread::spawn(move || {
            if shared.0.beat(member, MonoTime(now + 10)).is_ok() && shared.1.load(Ordering::SeqCst) > now {
                seen("late beat");
            }
        }));
        thread::yield_now();
        // From here on nobody has heard of it for too long.
        clock.store(now + 90, Ordering::SeqCst);
        row.put_out(member).unwrap();
    }
    readers.into_iter().chain(beats).for_each(|thread| thread.join().unwrap());
}

fn judge(row: &Row, clock: &AtomicU64) {
    let now = clock.load(Ordering::SeqCst);
    match row.read(MonoTime(now), TTL) {
        Liveness::Absent => seen("absent"),
        Liveness::Alive(who) => {
            let last_beat = 100 * who.generation.0 + 10;
            assert!(now <= last_beat + 50, "a dead member was reported alive");
            seen("alive");
        }
        Liveness::Silent(who, _) => {
            let joined = 100 * who.generation.0;
            assert!(now > joined + 50, "a new member was reported silent");
            seen("silent");
        }
    }
}
