//! Shuttle models of the protocol, larger than loom can exhaust, on the shipped code and on many random schedules: an
//! owner that reuses slots, readers with several pins, writers whose reservations expire, a row of members that
//! replace each other.
//!
//! Shuttle is sequentially consistent: it cannot detect a missing fence or a Relaxed in place of a Release. Those
//! mutations have their tests in `loom.rs`; here are the ones that are wrong under every memory model. When a
//! schedule fails, shuttle prints it, for `shuttle::replay`.
#![cfg(shuttle)]

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use moontide_heap::alloc::PAGE_UNITS;
use moontide_heap::cell::{Cell, CellLane, ExpectedWord, SlotRef, scan};
use moontide_heap::model::{EpochFences, Mutation, StagingAllocator, StagingChunk, free};
use moontide_heap::{
    AtomicWord, ENTRIES_PER_BUCKET, Index, IndexEntry, InsertOutcome, Liveness, LivenessRow, Transition,
};
use moontide_rt::with_mutation;
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, MonoTime, ObjectId, SegmentId, SlotId};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::{Config, Runner, thread};

/// Random schedules per model.
const SCHEDULES: usize = 20_000;
/// Schedules with few but well-placed preemptions.
const PCT_SCHEDULES: usize = 5_000;
const PCT_INTERRUPTIONS: usize = 4;

thread_local! {
    /// Number of occurrences of each outcome. Shuttle runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

/// A model: body of its threads, and outcomes that must occur in some schedule.
struct Model {
    run: fn(),
    /// The model fails if one of these outcomes never occurs, because it has tried too little.
    outcomes: &'static [&'static str],
}

fn explore(name: &str, model: &Model, scheduler: impl Scheduler + 'static, mutation: Option<Mutation>) {
    let mut config = Config::new();
    // It would warn of every Relaxed that it treats as SeqCst.
    config.silence_warnings = true;
    let run = model.run;
    SEEN.take();
    with_mutation(mutation, || {
        Runner::new(scheduler, config).run(move || {
            seen("schedules");
            run();
        })
    });
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if mutation.is_none() {
        let never: Vec<_> = model.outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "outcomes that never occurred: {never:?}");
    }
}

/// Declares for each model a test with new schedules every time, then a test per mutation that must fail in it, with
/// the message. The latter have a fixed seed, so that the result does not depend on chance.
macro_rules! models {
    ($($test:ident, $pct_test:ident: $model:expr, { $($mutated:ident: $mutation:ident => $message:expr,)* })*) => { $(
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
            fn $mutated() {
                let scheduler = RandomScheduler::new_from_seed(1, SCHEDULES);
                explore(stringify!($mutated), &$model, scheduler, Some(Mutation::$mutation));
            }
        )*
    )* };
}

models! {
    readers_see_whole_objects_while_slots_are_reused, readers_see_whole_objects_while_slots_are_reused_under_pct: Model {
        run: turnover,
        outcomes: &["hit", "miss", "another object in the slot", "refused", "moved", "kept", "draining", "freed",
            "reused"],
    }, {
        mutation_reuse_without_scan_is_detected: ReuseWithoutScan => "foreign bytes",
        mutation_pin_move_without_word_check_is_detected: NaivePinMove => "foreign bytes",
        mutation_pin_without_word_check_is_detected: WordUnchecked => "foreign bytes",
        mutation_cell_taken_while_pinned_is_detected: CellTakenTwice => "foreign bytes",
    }
    late_writers_and_commits_never_corrupt_records, late_writers_and_commits_never_corrupt_records_under_pct: Model {
        run: reservations,
        outcomes: &["wrote", "claim refused", "published", "commit refused", "aborted", "killed", "draining",
            "reused", "read"],
    }, {
        mutation_commit_ignoring_epoch_is_detected: EpochIgnored => "another version was published",
        mutation_abort_without_scan_is_detected: ReuseWithoutScan => "foreign bytes",
    }
    staging_chunk_has_one_owner, staging_chunk_has_one_owner_under_pct: Model {
        run: || staging(true),
        outcomes: &["published", "read", "refused", "draining", "drained", "no vacant chunk", "late begin refused"],
    }, {
        mutation_chunk_reused_while_pinned_is_detected: ChunkReusedWhilePinned => "a chunk whose slot is not FREE",
        mutation_chunk_reused_without_scan_is_detected: ReuseWithoutScan => "foreign bytes",
        mutation_chunk_read_without_word_check_is_detected: WordUnchecked => "foreign bytes",
        mutation_forgotten_epoch_fence_is_detected: FenceForgotten => "a late begin succeeded",
    }
    dead_member_is_never_reported_alive, dead_member_is_never_reported_alive_under_pct: Model {
        run: succession,
        outcomes: &["absent", "alive", "silent", "late heartbeat"],
    }, {
        mutation_single_read_of_liveness_row_is_detected: RowReadOnce => "a dead member was reported alive",
        mutation_join_without_heartbeat_is_detected: JoinWithoutHeartbeat => "a new member was reported silent",
        mutation_heartbeat_overwriting_newer_one_is_detected: HeartbeatByStore => "a new member was reported silent",
    }
}

#[test]
#[should_panic(expected = "foreign bytes")]
fn mutation_early_chunk_reuse_visible_to_reader_is_detected() {
    let scheduler = RandomScheduler::new_from_seed(1, SCHEDULES);
    let model = Model { run: || staging(false), outcomes: &[] };
    explore("a chunk allocated too early", &model, scheduler, Some(Mutation::ChunkReusedWhilePinned));
}

#[test]
fn model_threads_run_on_test_thread() {
    // The enabled mutation and the seen outcomes are stored per OS thread.
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

/// A slot with its word and its record. The bytes of version `n` are computed from `n`.
struct Slot {
    name: SlotRef,
    word: AtomicWord,
    /// In place of the header: object to which the bytes belong.
    identity: AtomicU64,
    payload: [AtomicU64; 2],
}

impl Slot {
    fn free(number: usize) -> Slot {
        Slot {
            name: SlotRef::new(SegmentId(0), SlotId(number as u32)),
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
const LOOKUPS: usize = 4;
const CELLS: usize = 3;

struct Heap {
    slots: Vec<Slot>,
    ledgers: Vec<Vec<Cell>>,
    entries: Vec<AtomicU64>,
}

/// Version `n` is of object `n mod 3`; two of the objects share a tag.
fn id_of(object: u64) -> ObjectId {
    let tag = u128::from(object.min(1)) << 64;
    ObjectId((u128::from(object) | tag).to_le_bytes())
}

fn location(slot: usize) -> IndexEntry {
    IndexEntry { segment: SegmentId(0), slot: SlotId(slot as u32) }
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
            thread::spawn(move || read_objects(&heap, reader))
        })
        .collect();
    (SLOTS as u64 + 1..=VERSIONS).for_each(|version| owner.put(&heap, version));
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert!(heap.ledgers.iter().flatten().all(|cell| cell.name().is_none()), "a pin was left");
}

#[derive(Default)]
struct Owner {
    live: [Option<u64>; SLOTS],
    dead: Vec<(usize, u64)>,
}

impl Owner {
    /// Puts each version into the next slot, whose old record is killed, and freed if it is not pinned.
    fn put(&mut self, heap: &Heap, version: u64) {
        let index = Index::new(&heap.entries);
        let at = version as usize % SLOTS;
        if let Some(old) = self.live[at].take() {
            assert!(matches!(heap.slots[at].word.kill(epoch(old)), Transition::Done(_)));
            assert!(index.remove(&id_of(old % OBJECTS), location(at)));
            self.dead.push((at, old));
        }
        self.reclaim(heap);
        let slot = &heap.slots[at];
        if matches!(slot.word.begin(epoch(version)), Transition::Done(_)) {
            slot.identity.store(version % OBJECTS, Ordering::Relaxed);
            slot.write(version);
            assert!(matches!(slot.word.publish(epoch(version)), Transition::Done(_)));
            assert_eq!(index.insert(&id_of(version % OBJECTS), location(at)), InsertOutcome::Indexed);
            self.live[at] = Some(version);
            seen("reused");
        }
    }

    /// One scan for all dead records.
    fn reclaim(&mut self, heap: &Heap) {
        let mut pinned = HashSet::new();
        scan(heap.ledgers.iter().flatten(), |name| {
            pinned.insert(name);
        });
        self.dead.retain(|&(at, old)| {
            let slot = &heap.slots[at];
            if pinned.contains(&slot.name) {
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

/// A reader: looks up objects, keeps the last one while it looks up the next, and moves pins.
fn read_objects(heap: &Heap, reader: usize) {
    let lane = CellLane::new(&heap.ledgers[reader]);
    let index = Index::new(&heap.entries);
    let mut kept: Option<Guard<'_>> = None;
    for _ in 0..LOOKUPS {
        let object = thread_rng().gen_range(0..OBJECTS);
        let cell = lane.vacant().expect("a reader holds fewer pins than it has cells");
        let found = index.find(&id_of(object), |location| {
            let slot = &heap.slots[location.slot.0 as usize];
            let Ok(word) = cell.acquire(slot.name, &slot.word, ExpectedWord::Ready) else {
                seen("refused");
                return None;
            };
            let guard = Guard { slot, cell, word };
            guard.check();
            if slot.identity.load(Ordering::Relaxed) != object {
                seen("another object in the slot");
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
            // Its cell comes before the new guard's: the direction in which a scan can miss a moving pin.
            last.release();
            let target = lane.vacant().expect("a reader holds fewer pins than it has cells");
            if target.duplicate_pin(guard.cell, &guard.slot.word, guard.word) {
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

struct SlotPool {
    slot: Slot,
    cells: Vec<Cell>,
    /// Version that was granted last.
    granted: AtomicU64,
}

/// One slot, granted again and again. Writers claim, write and commit at any time; the owner ends each reservation at
/// a random time.
fn reservations() {
    let cells = (0..=WRITERS).map(|_| Cell::vacant()).collect();
    let pool = Arc::new(SlotPool { slot: Slot::free(0), cells, granted: AtomicU64::new(0) });
    let writers = (0..WRITERS).map(|writer| {
        let pool = Arc::clone(&pool);
        thread::spawn(move || write_granted(&pool, writer))
    });
    let writers: Vec<_> = writers.collect();
    let reader = {
        let pool = Arc::clone(&pool);
        thread::spawn(move || {
            let SlotPool { slot, cells, .. } = &*pool;
            for _ in 0..3 {
                if let Ok(word) = cells[WRITERS as usize].acquire(slot.name, &slot.word, ExpectedWord::Ready)
                {
                    slot.check(word.epoch());
                    slot.check(word.epoch());
                    cells[WRITERS as usize].release();
                    seen("read");
                }
                thread::yield_now();
            }
        })
    };
    let slot = &pool.slot;
    for version in 1..=RESERVATIONS {
        assert!(matches!(slot.word.begin(epoch(version)), Transition::Done(_)));
        pool.granted.store(version, Ordering::Release);
        (0..thread_rng().gen_range(0..8)).for_each(|_| thread::yield_now());
        match slot.word.kill(epoch(version)) {
            Transition::Done(old) if old.state() == State::Writing => seen("aborted"),
            Transition::Done(_) => seen("killed"),
            other => panic!("only the owner kills: {other:?}"),
        }
        loop {
            let mut pinned = false;
            scan(&pool.cells, |_| pinned = true);
            if !pinned {
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

/// A writer claims every second version that it sees granted.
fn write_granted(pool: &SlotPool, writer: u64) {
    let SlotPool { slot, cells, granted } = pool;
    let cell = &cells[writer as usize];
    let mut last = 0;
    for _ in 0..6 {
        let version = granted.load(Ordering::Acquire);
        if version == last || version % WRITERS != writer {
            thread::yield_now();
            continue;
        }
        last = version;
        if cell.acquire(slot.name, &slot.word, ExpectedWord::WritingAt(epoch(version))).is_err() {
            seen("claim refused");
            continue;
        }
        slot.write(version);
        slot.check(epoch(version));
        cell.release();
        seen("wrote");
        // Stands for the owner's thread that commits, possibly late.
        match slot.word.publish(epoch(version)) {
            Transition::Done(old) if old.epoch() == epoch(version) => seen("published"),
            Transition::Refused(_) => seen("commit refused"),
            other => panic!("another version was published: {other:?}"),
        }
    }
}

const CHUNKS: usize = 2;
const STAGERS: u64 = 2;
const STAGED: u64 = 3;
/// Every slot has seen it before the first version is restored.
const FENCE: u64 = 100;

/// A staging segment of two slots and two pages.
struct StagingModel {
    slots: Vec<Slot>,
    /// Page of each slot's record. In place of the header.
    page_of_slot: Vec<AtomicU64>,
    pages: Vec<[AtomicU64; 2]>,
    cells: Vec<Cell>,
    state: Mutex<StagingModelState>,
    next_version: AtomicU64,
}

struct StagingModelState {
    chunks: StagingAllocator,
    fences: EpochFences,
    dead: Vec<(usize, u64)>,
}

impl StagingModel {
    fn write(&self, page: usize, version: u64) {
        self.pages[page].iter().for_each(|p| p.store(bytes_of(version), Ordering::Relaxed));
    }

    fn check(&self, page: usize, version: u64) {
        let value = bytes_of(version);
        self.pages[page].iter().for_each(|p| assert_eq!(p.load(Ordering::Relaxed), value, "foreign bytes"));
    }

    fn sweep(&self, state: &mut StagingModelState) {
        (0..state.chunks.sweep(|slot| &self.slots[slot.0 as usize].word)).for_each(|_| seen("drained"));
    }

    /// One scan for all dead records.
    fn reclaim(&self, state: &mut StagingModelState) {
        let mut pinned = HashSet::new();
        scan(&self.cells, |name| {
            pinned.insert(name);
        });
        let StagingModelState { fences, dead, .. } = state;
        dead.retain(|&(at, version)| {
            let slot = &self.slots[at];
            if pinned.contains(&slot.name) {
                seen("draining");
                return true;
            }
            let freed = fences.free(SlotId(at as u32), &slot.word, epoch(version));
            assert!(matches!(freed, Transition::Done(_)), "{freed:?}");
            false
        });
    }

    /// As the shipped `alloc`.
    fn alloc(&self) -> Option<StagingChunk> {
        let state = &mut *self.state.lock().unwrap();
        let page = NonZeroU32::new(PAGE_UNITS).unwrap();
        state.chunks.alloc(page).or_else(|| {
            self.reclaim(state);
            self.sweep(state);
            state.chunks.alloc(page)
        })
    }
}

/// Stagers allocate, fill, publish and release chunks, with decreasing versions; readers pin the records that they
/// find; and a begin that was granted before all of that arrives late.
fn staging(strict: bool) {
    let fence = |at| Slot { word: AtomicWord::new(Word::new(epoch(FENCE), State::Free)), ..Slot::free(at) };
    let state = StagingModelState {
        chunks: StagingAllocator::new(CHUNKS as u32, CHUNKS as u32 * PAGE_UNITS),
        fences: EpochFences::default(),
        dead: Vec::new(),
    };
    let model = Arc::new(StagingModel {
        slots: (0..CHUNKS).map(fence).collect(),
        page_of_slot: (0..CHUNKS).map(|_| AtomicU64::new(0)).collect(),
        pages: (0..CHUNKS).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
        cells: (0..READERS).map(|_| Cell::vacant()).collect(),
        state: Mutex::new(state),
        next_version: AtomicU64::new(STAGERS * STAGED),
    });
    let spawn = |body: Box<dyn FnOnce(&StagingModel) + Send>| {
        let model = Arc::clone(&model);
        thread::spawn(move || body(&model))
    };
    let mut threads: Vec<_> = (0..STAGERS)
        .map(|_| spawn(Box::new(move |model| (0..STAGED).for_each(|_| stage(model, strict)))))
        .collect();
    threads.extend((0..READERS).map(|reader| spawn(Box::new(move |model| read_chunks(model, reader)))));
    threads.push(spawn(Box::new(|model| {
        for _ in 0..4 {
            let slot = &model.slots[thread_rng().gen_range(0..CHUNKS)];
            let begun = slot.word.begin(epoch(FENCE));
            assert!(!matches!(begun, Transition::Done(_)), "a late begin succeeded: {begun:?}");
            seen("late begin refused");
        }
    })));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

fn stage(model: &StagingModel, strict: bool) {
    let Some(chunk) = model.alloc() else {
        seen("no vacant chunk");
        return thread::yield_now();
    };
    let version = model.next_version.fetch_sub(1, Ordering::Relaxed);
    let (at, page) = (chunk.slot().0 as usize, (chunk.extent().start / PAGE_UNITS) as usize);
    let slot = &model.slots[at];
    model.write(page, version);
    model.check(page, version);
    {
        let state = &mut *model.state.lock().unwrap();
        if slot.word.load().state() != State::Free {
            assert!(!strict, "a chunk whose slot is not FREE was allocated");
            return state.chunks.free(chunk);
        }
        model.page_of_slot[at].store(page as u64, Ordering::Relaxed);
        assert!(matches!(
            state.fences.begin_copy(chunk.slot(), &slot.word, epoch(version)),
            Transition::Done(_)
        ));
        assert!(matches!(slot.word.publish(epoch(version)), Transition::Done(_)));
        seen("published");
    }
    (0..thread_rng().gen_range(0..4)).for_each(|_| thread::yield_now());
    {
        let state = &mut *model.state.lock().unwrap();
        assert!(matches!(slot.word.kill(epoch(version)), Transition::Done(_)));
        state.dead.push((at, version));
    }
    model.state.lock().unwrap().chunks.drain(chunk);
}

fn read_chunks(model: &StagingModel, reader: usize) {
    for _ in 0..LOOKUPS {
        let at = thread_rng().gen_range(0..CHUNKS);
        let (slot, cell) = (&model.slots[at], &model.cells[reader]);
        let Ok(word) = cell.acquire(slot.name, &slot.word, ExpectedWord::Ready) else {
            seen("refused");
            continue;
        };
        let page = model.page_of_slot[at].load(Ordering::Relaxed) as usize;
        (0..2).for_each(|_| model.check(page, word.epoch().bits()));
        cell.release();
        seen("read");
    }
}

const MEMBERS: u64 = 4;
const TTL: Duration = Duration::from_nanos(50);

/// Generation `n` joins at `100 n`, stores one heartbeat at `100 n + 10` and is dead from then on.
fn succession() {
    let shared = Arc::new((LivenessRow::vacant(), AtomicU64::new(0)));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || (0..5).for_each(|_| check_row(&shared.0, &shared.1)))
        })
        .collect();
    let (row, clock) = &*shared;
    let mut heartbeats = Vec::new();
    for generation in 1..=MEMBERS {
        let now = 100 * generation;
        clock.store(now, Ordering::SeqCst);
        let member = row.join(7, MonoTime(now)).unwrap();
        let shared = Arc::clone(&shared);
        heartbeats.push(thread::spawn(move || {
            if shared.0.heartbeat(member, MonoTime(now + 10)).is_ok() && shared.1.load(Ordering::SeqCst) > now
            {
                seen("late heartbeat");
            }
        }));
        thread::yield_now();
        // From here on its last heartbeat is too old.
        clock.store(now + 90, Ordering::SeqCst);
        row.evict(member).unwrap();
    }
    readers.into_iter().chain(heartbeats).for_each(|thread| thread.join().unwrap());
}

fn check_row(row: &LivenessRow, clock: &AtomicU64) {
    let now = clock.load(Ordering::SeqCst);
    match row.read(MonoTime(now), TTL) {
        Liveness::Absent => seen("absent"),
        Liveness::Alive(member) => {
            let last_heartbeat = 100 * member.generation.0 + 10;
            assert!(now <= last_heartbeat + 50, "a dead member was reported alive");
            seen("alive");
        }
        Liveness::Silent(member, _) => {
            let joined = 100 * member.generation.0;
            assert!(now > joined + 50, "a new member was reported silent");
            seen("silent");
        }
    }
}
