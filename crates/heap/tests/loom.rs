//! Every interleaving of small models of the protocol, and every reordering that the memory model allows, on
//! the shipped code. Each model is written once and run without a planted bug, when it must pass, and with
//! each bug that it is there to find, when it must fail with the message of the broken promise.
//!
//! Where loom is not the C++ memory model: its SeqCst fences also order as release and acquire among
//! themselves, and no load returns a store that is executed later. So the payload is modelled in two ways
//! ([`Payload`]): as Relaxed values, where a reader may see foreign bytes, and as plain memory, where loom
//! finds every pair of accesses that nothing orders, even if no execution of loom's shows a wrong value.
//!
//! `cargo test … -- --nocapture` prints what each model explored.
#![cfg(loom)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};
use moontide_heap::cell::{Cell, CellGroup, Expect, Shut, SlotName, scan, shut_out_claims};
use moontide_heap::model::{Bug, Floors, free, publish_shut, with_planted};
use moontide_heap::{
    AtomicWord, Counted, ENTRIES_PER_BUCKET, Flag, Index, Inserted, Liveness, Place, Progress, Row,
    Transition,
};
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Generation, MonoTime, ObjectId, SegmentId, SlotId, Span};

/// A model: what its threads do, and what must have come about in some interleaving.
struct Model {
    run: fn(),
    /// Without these outcomes the model has explored nothing of interest, and fails.
    outcomes: &'static [&'static str],
    /// How often threads may be interrupted; `None` for every interleaving.
    preemptions_max: Option<usize>,
}

/// Every interleaving.
const fn all(run: fn(), outcomes: &'static [&'static str]) -> Model {
    Model { run, outcomes, preemptions_max: None }
}

/// Every interleaving with at most so many interruptions. Two readers and an owner have 9,330 with up to three;
/// with up to thirty they were not exhausted after a minute and a half.
const fn bounded(run: fn(), preemptions_max: usize, outcomes: &'static [&'static str]) -> Model {
    Model { run, outcomes, preemptions_max: Some(preemptions_max) }
}

thread_local! {
    /// How often each outcome came about. loom runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

/// Explores a model to its end, or to its first failure.
fn check(name: &str, model: &Model, bug: Option<Bug>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = model.preemptions_max;
    let run = model.run;
    SEEN.take();
    with_planted(bug, || {
        builder.check(move || {
            seen("interleavings");
            run();
        });
    });
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if bug.is_none() {
        let never: Vec<_> = model.outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "in no interleaving: {never:?}");
    }
}

/// For each model its test, then a test per bug that must fail in it, and how.
macro_rules! models {
    ($($test:ident: $model:expr, { $($twin:ident: $bug:ident => $message:expr,)* })*) => { $(
        #[test]
        fn $test() {
            check(stringify!($test), &$model, None);
        }
        $(
            #[test]
            #[should_panic(expected = $message)]
            fn $twin() {
                check(stringify!($twin), &$model, Some(Bug::$bug));
            }
        )*
    )* };
}

models! {
    a_reader_that_is_let_in_sees_all_that_was_written:
        all(publish, &["held", "refused"]), {
        publishing_without_release_is_found: RelaxedPublish => "foreign bytes",
        looking_without_acquire_is_found: RelaxedLook => "foreign bytes",
    }
    bytes_stay_as_they_are_under_a_pin:
        all(|| reuse(Payload::values), &["held", "held the next version", "refused", "draining", "reused"]), {
        naming_without_a_fence_is_found: AcquireFenceMissing => "foreign bytes",
        scanning_without_a_fence_is_found: ScanFenceMissing => "foreign bytes",
        freeing_without_a_scan_is_found: ReuseWithoutScan => "foreign bytes",
        a_pin_without_a_look_at_the_word_is_found: WordUnchecked => "foreign bytes",
    }
    reading_is_over_before_the_next_owner_writes:
        all(|| reuse(Payload::plain), &["held", "held the next version", "refused", "draining", "reused"]), {
        releasing_without_release_is_found: RelaxedRelease => "Causality violation",
        scanning_without_acquire_is_found: RelaxedScan => "Causality violation",
    }
    bytes_stay_as_they_are_under_two_pins:
        bounded(two_readers, 3, &["held", "refused", "draining", "reused"]), {
        naming_without_a_fence_is_found_among_three: AcquireFenceMissing => "foreign bytes",
        scanning_without_a_fence_is_found_among_three: ScanFenceMissing => "foreign bytes",
    }
    a_late_writer_never_writes_into_the_next_record:
        all(|| abort(Payload::values), &["wrote", "refused", "draining", "reused"]), {
        claiming_without_a_fence_is_found: AcquireFenceMissing => "foreign bytes",
        aborting_without_a_fence_is_found: ScanFenceMissing => "foreign bytes",
        aborting_without_a_scan_is_found: ReuseWithoutScan => "foreign bytes",
        a_claim_without_a_look_at_the_word_is_found: WordUnchecked => "foreign bytes",
    }
    writing_is_over_before_the_next_owner_writes:
        all(|| abort(Payload::plain), &["wrote", "refused", "draining", "reused"]), {
        ending_a_claim_without_release_is_found: RelaxedRelease => "Causality violation",
        aborting_without_acquire_is_found: RelaxedScan => "Causality violation",
    }
    a_commit_publishes_only_the_version_it_names:
        all(late_commit, &["published", "refused"]), {
        a_commit_that_ignores_the_epoch_is_found: EpochIgnored => "another version was published",
    }
    what_is_published_is_written_no_more:
        all(commit, &["wrote, then published", "published, then refused", "still claimed"]), {
        looking_for_claims_before_the_word_is_shut_is_found: LookBeforeShut => "written after it was published",
        looking_for_claims_without_a_fence_is_found: ScanFenceMissing => "written after it was published",
        claiming_before_a_commit_without_a_fence_is_found: AcquireFenceMissing => "written after it was published",
    }
    a_reader_that_is_let_in_sees_the_header_that_the_commit_wrote:
        all(header_of_commit, &["held", "refused"]), {
        committing_without_release_is_found: RelaxedPublish => "foreign header",
        looking_at_a_commit_without_acquire_is_found: RelaxedLook => "foreign header",
    }
    a_pin_can_move_while_its_slot_is_reclaimed:
        all(pin_move, &["moved", "kept", "draining", "reused"]), {
        moving_a_pin_without_a_look_at_the_word_is_found: NaivePinMove => "foreign bytes",
        moving_a_pin_without_a_fence_is_found: AcquireFenceMissing => "foreign bytes",
    }
    a_cell_is_used_again_only_when_its_pin_is_gone:
        all(|| cell_reuse(Payload::values), &["cell used again", "no vacant cell", "draining", "reused"]), {
        taking_a_cell_that_names_a_slot_is_found: CellTakenTwice => "foreign bytes",
    }
    reading_is_over_though_another_thread_used_the_cell_since:
        all(|| cell_reuse(Payload::plain), &["cell used again", "no vacant cell", "draining", "reused"]), {
        releasing_a_shared_cell_without_release_is_found: RelaxedRelease => "Causality violation",
    }
    a_group_of_cells_can_be_opened_during_a_scan:
        all(|| opened_group(false), &["held", "refused", "draining", "reused"]), {
        opening_a_group_without_a_fence_is_found: AcquireFenceMissing => "foreign bytes",
    }
    reading_is_over_before_another_thread_of_the_owner_writes:
        all(hand_over, &["taken over", "too early", "draining"]), {
        freeing_without_release_is_found: RelaxedFree => "Causality violation",
    }
    an_entry_of_the_index_is_only_a_hint:
        all(|| look_up(true), &["hit", "miss", "a stranger in the slot", "draining", "reused"]), {
        a_hint_without_a_look_at_the_word_is_found: WordUnchecked => "another object's bytes",
    }
    two_threads_of_the_owner_do_not_take_the_same_entry:
        all(two_inserts, &["both indexed"]), {
        inserting_without_compare_and_swap_is_found: InsertByStore => "an entry was lost",
    }
    who_sees_a_raised_flag_sees_all_pages:
        all(flagged_pages, &["arrived", "not yet"]), {
        counting_pages_without_order_is_found: RelaxedCount => "a page is missing",
        raising_a_flag_without_release_is_found: RelaxedPublish => "a page is missing",
        looking_at_a_flag_without_acquire_is_found: RelaxedLook => "a page is missing",
    }
    a_late_page_does_not_count_for_the_next_version:
        all(late_page, &["stale"]), {
        counting_for_another_version_is_found: CountOfAnother => "counted for another version",
    }
    a_slot_stays_for_who_waits_for_it:
        all(stay_and_abort, &["stays", "too late", "draining", "reused"]), {
        staying_without_a_fence_is_found: AcquireFenceMissing => "foreign bytes",
        aborting_under_a_stay_without_a_fence_is_found: ScanFenceMissing => "foreign bytes",
    }
    a_reservation_is_either_begun_or_burnt:
        all(burn, &["begun", "burnt"]), {
        beginning_after_a_burn_is_found: LateBegin => "both burnt and begun",
        transitions_without_compare_and_swap_are_found: CheckThenStore => "both burnt and begun",
    }
    bytes_of_a_copy_stay_as_they_are_under_a_pin:
        all(|| copy(Payload::values), &["held", "held the copy", "refused", "draining", "copied", "reused"]), {
        reusing_a_copys_slot_without_a_scan_is_found: ReuseWithoutScan => "foreign bytes",
        naming_a_copy_without_a_fence_is_found: AcquireFenceMissing => "foreign bytes",
        scanning_for_a_copy_without_a_fence_is_found: ScanFenceMissing => "foreign bytes",
        publishing_a_copy_without_release_is_found: RelaxedPublish => "foreign bytes",
    }
    reading_a_copy_is_over_before_the_next_owner_writes:
        all(|| copy(Payload::plain), &["held", "held the copy", "refused", "draining", "copied", "reused"]), {
        releasing_a_copy_without_release_is_found: RelaxedRelease => "Causality violation",
    }
    no_begin_is_let_in_late_by_a_copy:
        all(late_begin_around_a_copy, &["refused at a copy", "refused at the fence", "freed", "reused"]), {
        forgetting_the_floor_is_found: FloorForgotten => "a late begin was let in",
        beginning_late_around_a_copy_is_found: LateBegin => "a late begin was let in",
    }
    a_record_dies_once:
        all(two_kills, &["mine", "already dead"]), {
        killing_without_compare_and_swap_is_found: CheckThenStore => "died 2 times",
    }
    a_member_is_not_alive_by_its_successors_beat:
        all(succession, &["absent", "the old one silent", "the new one alive"]), {
        reading_a_row_once_is_found: RowReadOnce => "a dead member was reported alive",
        beating_without_release_is_found: RelaxedSign => "a dead member was reported alive",
        reading_a_beat_without_acquire_is_found: RelaxedBeatRead => "a dead member was reported alive",
        joining_without_a_beat_is_found: JoinUnsigned => "a new member was reported silent",
    }
    a_late_beat_does_not_silence_the_successor:
        all(late_beat, &["signed late", "refused"]), {
        a_beat_that_overwrites_a_newer_one_is_found: BeatByStore => "a new member was reported silent",
    }
}

// The callers of the shipped functions have their share in the protocol, too. These do it wrong.

#[test]
#[should_panic(expected = "another object's bytes")]
fn believing_the_index_without_looking_at_the_identity_is_found() {
    check("trusting", &all(|| look_up(false), &[]), None);
}

#[test]
#[should_panic(expected = "foreign bytes")]
fn counting_the_groups_before_the_fence_of_the_scan_is_found() {
    check("eager", &all(|| opened_group(true), &[]), None);
}

#[test]
fn all_threads_of_a_model_run_on_the_tests_own_thread() {
    // What is planted, and what was seen, are kept per thread of the operating system.
    let test = std::thread::current().id();
    loom::model(move || {
        let other = thread::spawn(move || assert_eq!(std::thread::current().id(), test));
        assert_eq!(std::thread::current().id(), test);
        other.join().unwrap();
    });
}

/// The bytes of a record. Those of version `n` are made from `n`.
enum Payload {
    /// Relaxed values: the reader may see what it should not.
    Values([AtomicU64; 2]),
    /// Plain memory: loom complains of accesses that nothing orders.
    Plain(UnsafeCell<u64>),
}

// SAFETY: loom, not Rust, watches the accesses; it panics before two of them can race.
unsafe impl Sync for Payload {}

impl Payload {
    fn values(version: u64) -> Payload {
        let value = bytes_of(version);
        Payload::Values([AtomicU64::new(value), AtomicU64::new(value)])
    }

    fn plain(version: u64) -> Payload {
        Payload::Plain(UnsafeCell::new(bytes_of(version)))
    }

    fn write(&self, version: u64) {
        let value = bytes_of(version);
        match self {
            Payload::Values(values) => values.iter().for_each(|v| v.store(value, Ordering::Relaxed)),
            // SAFETY: loom panics before an access that would race.
            Payload::Plain(cell) => cell.with_mut(|at| unsafe { *at = value }),
        }
    }

    fn check(&self, version: u64, broken: &str) {
        let value = bytes_of(version);
        match self {
            Payload::Values(values) => {
                values.iter().for_each(|v| assert_eq!(v.load(Ordering::Relaxed), value, "{broken}"));
            }
            // SAFETY: loom panics before an access that would race.
            Payload::Plain(cell) => cell.with(|at| assert_eq!(unsafe { *at }, value, "{broken}")),
        }
    }
}

fn bytes_of(version: u64) -> u64 {
    version * 111
}

fn epoch(version: u64) -> Epoch {
    Epoch::from_bits(version).unwrap()
}

/// A slot with its word and its record.
struct Slot {
    name: SlotName,
    word: AtomicWord,
    /// In place of the header: whose bytes these are.
    identity: AtomicU64,
    payload: Payload,
}

impl Slot {
    fn new(number: u32, version: u64, state: State, payload: fn(u64) -> Payload) -> Slot {
        Slot {
            name: SlotName::new(SegmentId(0), SlotId(number)),
            word: AtomicWord::new(Word::new(epoch(version), state)),
            identity: AtomicU64::new(version),
            payload: payload(version),
        }
    }

    /// The owner's way to get a slot back. `false`: somebody still names it.
    fn reclaim<'a>(&self, version: u64, cells: impl IntoIterator<Item = &'a Cell>) -> bool {
        assert!(matches!(self.word.kill(epoch(version)), Transition::Done(_)));
        let mut named = false;
        scan(cells, |name| named |= name == self.name);
        if named {
            seen("draining");
            return false;
        }
        assert!(matches!(free(&self.word, epoch(version)), Transition::Done(_)));
        true
    }

    /// The owner's way to fill it again.
    fn refill(&self, version: u64) {
        assert!(matches!(self.word.begin(epoch(version)), Transition::Done(_)));
        self.identity.store(version, Ordering::Relaxed);
        self.payload.write(version);
        let published = self.word.publish(epoch(version));
        assert!(matches!(published, Transition::Done(_)), "{published:?}");
        seen("reused");
    }

    /// A reader's way: whatever version it is let in to, the bytes are that version's.
    fn read(&self, cell: &Cell) {
        match cell.acquire(self.name, &self.word, Expect::Ready) {
            Ok(word) => {
                let version = word.epoch().bits();
                self.payload.check(version, "foreign bytes");
                seen(if version == 1 { "held" } else { "held the next version" });
                cell.release();
            }
            Err(_) => seen("refused"),
        }
    }
}

fn vacant_cells(count: usize) -> Vec<Cell> {
    (0..count).map(|_| Cell::vacant()).collect()
}

/// What the threads of a model share, and the gate through which all of them go first: a read-modify-write that
/// they have in common, because a thread that begins with a load can hide interleavings from loom.
struct Shared<T> {
    gate: AtomicU64,
    of: T,
}

fn share<T>(of: T) -> Arc<Shared<T>> {
    Arc::new(Shared { gate: AtomicU64::new(0), of })
}

impl<T> Shared<T> {
    /// Relaxed: orders nothing.
    fn enter(&self) -> &T {
        self.gate.fetch_add(1, Ordering::Relaxed);
        &self.of
    }
}

fn spawn<T: Send + Sync + 'static>(shared: &Arc<Shared<T>>, body: fn(&T)) -> JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || body(shared.enter()))
}

fn publish() {
    let shared = share((Slot::new(0, 0, State::Free, Payload::values), Cell::vacant()));
    let reader = spawn(&shared, |(slot, cell)| match cell.acquire(slot.name, &slot.word, Expect::Ready) {
        Ok(word) => {
            seen("held");
            slot.payload.check(word.epoch().bits(), "foreign bytes");
            cell.release();
        }
        Err(_) => seen("refused"),
    });
    let (slot, _) = shared.enter();
    slot.refill(1);
    reader.join().unwrap();
}

fn flagged_pages() {
    let flag = Flag::new();
    flag.prepare(epoch(1), 2, Span::new(0, 2).unwrap());
    let shared = share((flag, [Payload::values(0), Payload::values(0)]));
    let write = |(flag, pages): &(Flag, [Payload; 2]), page: usize| {
        pages[page].write(1);
        assert_ne!(flag.page_done(epoch(1)), Counted::Stale);
    };
    let other = spawn(&shared, |shared| {
        shared.1[0].write(1);
        assert_ne!(shared.0.page_done(epoch(1)), Counted::Stale);
    });
    let consumer = spawn(&shared, |(flag, pages)| match flag.progress(epoch(1)) {
        Progress::Complete => {
            seen("arrived");
            pages.iter().for_each(|page| page.check(1, "a page is missing"));
        }
        _ => seen("not yet"),
    });
    write(shared.enter(), 1);
    other.join().unwrap();
    consumer.join().unwrap();
    assert_eq!(shared.of.0.progress(epoch(1)), Progress::Complete);
}

fn late_page() {
    let flag = Flag::new();
    flag.prepare(epoch(2), 2, Span::new(0, 2).unwrap());
    let shared = share(flag);
    let late = spawn(&shared, |flag| {
        assert_eq!(flag.page_done(epoch(1)), Counted::Stale, "counted for another version");
        seen("stale");
    });
    let flag = shared.enter();
    assert_eq!(flag.page_done(epoch(2)), Counted::More, "counted for another version");
    assert_eq!(flag.page_done(epoch(2)), Counted::Complete, "counted for another version");
    late.join().unwrap();
}

/// Somebody waits for a record whose writer gives up: the bytes are not the next record's while it does.
fn stay_and_abort() {
    let shared = share((Slot::new(0, 1, State::Writing, Payload::values), vacant_cells(1)));
    let waiting = spawn(&shared, |(slot, cells)| {
        match cells[0].acquire(slot.name, &slot.word, Expect::BegunAt(epoch(1))) {
            Ok(_) => {
                seen("stays");
                slot.payload.check(1, "foreign bytes");
                cells[0].release();
            }
            Err(_) => seen("too late"),
        }
    });
    let (slot, cells) = shared.enter();
    if slot.reclaim(1, cells) {
        slot.refill(2);
    }
    waiting.join().unwrap();
}

fn reuse(payload: fn(u64) -> Payload) {
    let shared = share((Slot::new(0, 1, State::Ready, payload), vacant_cells(1)));
    let reader = spawn(&shared, |(slot, cells)| slot.read(&cells[0]));
    let (slot, cells) = shared.enter();
    if slot.reclaim(1, cells) {
        slot.refill(2);
    }
    reader.join().unwrap();
    assert_eq!(cells[0].name(), None, "a reader left its name behind");
}

fn two_readers() {
    let shared = share((Slot::new(0, 1, State::Ready, Payload::values), vacant_cells(2)));
    let first = spawn(&shared, |(slot, cells)| slot.read(&cells[0]));
    let second = spawn(&shared, |(slot, cells)| slot.read(&cells[1]));
    let (slot, cells) = shared.enter();
    if slot.reclaim(1, cells) {
        slot.refill(2);
    }
    first.join().unwrap();
    second.join().unwrap();
}

fn abort(payload: fn(u64) -> Payload) {
    let shared = share((Slot::new(0, 1, State::Writing, payload), vacant_cells(1)));
    let writer = spawn(&shared, |(slot, cells)| {
        if cells[0].acquire(slot.name, &slot.word, Expect::WritingAt(epoch(1))).is_ok() {
            slot.payload.write(1);
            seen("wrote");
            cells[0].release();
        } else {
            seen("refused");
        }
    });
    let (slot, cells) = shared.enter();
    let reused = slot.reclaim(1, cells);
    if reused {
        slot.refill(2);
    }
    writer.join().unwrap();
    if reused {
        slot.payload.check(2, "foreign bytes");
    }
}

fn late_commit() {
    let shared = share(Slot::new(0, 1, State::Writing, Payload::values));
    let committer = spawn(&shared, |slot| match slot.word.publish(epoch(1)) {
        Transition::Done(old) if old.epoch() == epoch(1) => seen("published"),
        Transition::Refused(_) => seen("refused"),
        other => panic!("another version was published: {other:?}"),
    });
    let slot = shared.enter();
    assert!(slot.reclaim(1, []));
    slot.refill(2);
    committer.join().unwrap();
}

/// A writer claims while the owner commits on behalf of an earlier claim.
fn commit() {
    let shared =
        share((Slot::new(0, 1, State::Writing, Payload::values), vacant_cells(1), AtomicU64::new(0)));
    let writer = spawn(&shared, |(slot, cells, written)| {
        if cells[0].acquire(slot.name, &slot.word, Expect::WritingAt(epoch(1))).is_ok() {
            written.store(1, Ordering::Relaxed);
            cells[0].release();
        }
    });
    let (slot, cells, written) = shared.enter();
    let published = match shut_out_claims(&slot.word, epoch(1), slot.name, || cells.iter()) {
        Shut::Alone => {
            assert!(publish_shut(&slot.word, epoch(1)).holds());
            Some(written.load(Ordering::Relaxed))
        }
        Shut::Claimed => {
            seen("still claimed");
            None
        }
        Shut::Refused(found) => panic!("only the commit changes the word: {found:?}"),
    };
    writer.join().unwrap();
    if let Some(as_published) = published {
        let at_last = written.load(Ordering::Relaxed);
        assert_eq!(at_last, as_published, "written after it was published");
        seen(if at_last == 1 { "wrote, then published" } else { "published, then refused" });
    }
}

/// The owner writes the header while the word is shut, and then lets readers in.
fn header_of_commit() {
    let shared =
        share((Slot::new(0, 1, State::Writing, Payload::values), vacant_cells(1), AtomicU64::new(0)));
    let reader = spawn(&shared, |(slot, cells, header)| {
        if cells[0].acquire(slot.name, &slot.word, Expect::Ready).is_ok() {
            assert_eq!(header.load(Ordering::Relaxed), 1, "foreign header");
            cells[0].release();
            seen("held");
        } else {
            seen("refused");
        }
    });
    let (slot, _, header) = shared.enter();
    // The reader's cell is not among the writer's.
    assert_eq!(shut_out_claims(&slot.word, epoch(1), slot.name, || []), Shut::Alone);
    header.store(1, Ordering::Relaxed);
    assert!(publish_shut(&slot.word, epoch(1)).holds());
    reader.join().unwrap();
}

fn pin_move() {
    // The scan passes the new cell first: the order in which a move can escape it.
    const NEW: usize = 0;
    const OLD: usize = 1;
    let shared = share((Slot::new(0, 1, State::Ready, Payload::values), vacant_cells(2)));
    let (slot, cells) = &shared.of;
    cells[OLD].acquire(slot.name, &slot.word, Expect::Ready).unwrap();
    let holder = spawn(&shared, |(slot, cells)| {
        let moved = cells[NEW].acquire_again(&cells[OLD], &slot.word, Word::new(epoch(1), State::Ready));
        let kept = if moved {
            cells[OLD].release();
            seen("moved");
            &cells[NEW]
        } else {
            seen("kept");
            &cells[OLD]
        };
        slot.payload.check(1, "foreign bytes");
        kept.release();
    });
    let (slot, cells) = shared.enter();
    if slot.reclaim(1, cells) {
        slot.refill(2);
    }
    holder.join().unwrap();
}

fn cell_reuse(payload: fn(u64) -> Payload) {
    // One cell, so that the group's thread must wait for it; the pin in it was handed to another thread.
    let pinned = Slot::new(0, 1, State::Ready, payload);
    let other = Slot::new(1, 1, State::Ready, payload);
    let shared = share((pinned, other, vacant_cells(1)));
    let (pinned, _, cells) = &shared.of;
    cells[0].acquire(pinned.name, &pinned.word, Expect::Ready).unwrap();
    let holder = spawn(&shared, |(pinned, _, cells)| {
        pinned.payload.check(1, "foreign bytes");
        cells[0].release();
    });
    let group_thread = spawn(&shared, |(_, other, cells)| match CellGroup::new(cells).vacant() {
        Some(cell) => {
            seen("cell used again");
            other.read(cell);
        }
        None => seen("no vacant cell"),
    });
    let (pinned, _, cells) = shared.enter();
    if pinned.reclaim(1, cells) {
        pinned.refill(2);
    }
    holder.join().unwrap();
    group_thread.join().unwrap();
}

/// A ledger says how many of its groups are in use, and the scan goes no further. The number is raised before
/// a cell of a new group is filled. `eager`: the owner reads it before the scan's fence.
fn opened_group(eager: bool) {
    let groups_used = AtomicU64::new(0);
    let shared = share((Slot::new(0, 1, State::Ready, Payload::values), vacant_cells(1), groups_used));
    let reader = spawn(&shared, |(slot, cells, groups_used)| {
        groups_used.fetch_max(1, Ordering::Relaxed);
        slot.read(&cells[0]);
    });
    let (slot, cells, groups_used) = shared.enter();
    let in_use = || &cells[..groups_used.load(Ordering::Relaxed) as usize];
    let reclaimed = if eager {
        slot.reclaim(1, in_use())
    } else {
        // As in a ledger's scan: the iterator asks for the number when it is first advanced.
        slot.reclaim(1, std::iter::once(()).flat_map(|()| in_use()))
    };
    if reclaimed {
        slot.refill(2);
    }
    reader.join().unwrap();
}

fn hand_over() {
    // One thread of the owner frees the slot, another one fills it again; only the word lies between them. The
    // fence of the scan does not order the reader's last look, because that is learnt from the cells after it.
    let shared = share((Slot::new(0, 1, State::Ready, Payload::plain), vacant_cells(1)));
    let (slot, cells) = &shared.of;
    cells[0].acquire(slot.name, &slot.word, Expect::Ready).unwrap();
    assert!(slot.word.kill(epoch(1)).holds());
    let reader = spawn(&shared, |(slot, cells)| {
        slot.payload.check(1, "foreign bytes");
        cells[0].release();
    });
    let next_owner = spawn(&shared, |(slot, _)| match slot.word.begin(epoch(2)) {
        Transition::Done(_) => {
            seen("taken over");
            slot.payload.write(2);
        }
        _ => seen("too early"),
    });
    let (slot, cells) = shared.enter();
    let mut named = false;
    scan(cells, |_| named = true);
    if named {
        seen("draining");
    } else {
        assert!(free(&slot.word, epoch(1)).holds());
    }
    reader.join().unwrap();
    next_owner.join().unwrap();
}

/// Two objects with the same tag and the same buckets, as bad as it gets.
const OLD_ID: ObjectId = ObjectId(*b"\x07\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0");
const NEW_ID: ObjectId = ObjectId(*b"\x08\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0");

fn look_up(checks_identity: bool) {
    let place = Place { segment: SegmentId(0), slot: SlotId(0) };
    let entries: Vec<_> = (0..2 * ENTRIES_PER_BUCKET).map(|_| AtomicU64::new(0)).collect();
    let slot = Slot::new(0, 1, State::Ready, Payload::values);
    let shared = share((slot, vacant_cells(1), entries, checks_identity));
    let index = Index::new(&shared.of.2);
    assert_eq!(index.insert(&OLD_ID, place), Inserted::Indexed);
    let reader = spawn(&shared, |(slot, cells, entries, checks_identity)| {
        let found = Index::new(entries).find(&OLD_ID, |place| {
            let name = SlotName::new(place.segment, place.slot);
            cells[0].acquire(name, &slot.word, Expect::Ready).ok()?;
            let is_mine = slot.identity.load(Ordering::Relaxed) == 1;
            if is_mine || !checks_identity {
                slot.payload.check(1, "another object's bytes");
            } else {
                seen("a stranger in the slot");
            }
            cells[0].release();
            is_mine.then_some(())
        });
        seen(if found.is_some() { "hit" } else { "miss" });
    });
    let (slot, cells, ..) = shared.enter();
    // The owner removes the entry right after the kill. Here it stays until after the free, which leaves
    // readers more time to follow it: it is a hint, and must do no harm.
    let reclaimed = slot.reclaim(1, cells);
    assert!(index.remove(&OLD_ID, place));
    if reclaimed {
        slot.refill(2);
        assert_eq!(index.insert(&NEW_ID, place), Inserted::Indexed);
    }
    reader.join().unwrap();
}

fn two_inserts() {
    let place = |slot| Place { segment: SegmentId(0), slot: SlotId(slot) };
    let entries: Vec<_> = (0..2 * ENTRIES_PER_BUCKET).map(|_| AtomicU64::new(0)).collect();
    let shared = share(entries);
    let other = spawn(&shared, |entries| {
        let place = Place { segment: SegmentId(0), slot: SlotId(1) };
        assert_eq!(Index::new(entries).insert(&NEW_ID, place), Inserted::Indexed);
    });
    let index = Index::new(shared.enter());
    assert_eq!(index.insert(&OLD_ID, place(0)), Inserted::Indexed);
    other.join().unwrap();
    for wanted in [place(0), place(1)] {
        let found = index.find(&OLD_ID, |place| (place == wanted).then_some(()));
        assert!(found.is_some(), "an entry was lost");
    }
    seen("both indexed");
}

fn burn() {
    let shared = share((AtomicWord::new(Word::new(epoch(1), State::Free)), AtomicU64::new(0)));
    let late = spawn(&shared, |(word, begun)| {
        let done = matches!(word.begin(epoch(2)), Transition::Done(_));
        begun.store(done.into(), Ordering::Relaxed);
    });
    let (word, begun) = shared.enter();
    let burnt = matches!(word.burn(epoch(2)), Transition::Done(_));
    late.join().unwrap();
    let begun = begun.load(Ordering::Relaxed) == 1;
    assert!(!(burnt && begun), "both burnt and begun");
    assert!(burnt || begun, "neither burnt nor begun");
    seen(if begun { "begun" } else { "burnt" });
}

/// A slot that has seen version 2 gets a copy of version 1 back, which dies, and then version 3. What a reader gets
/// there it is told by the word.
fn copy(payload: fn(u64) -> Payload) {
    let slot = Slot::new(0, 2, State::Ready, payload);
    let shared = share((slot, vacant_cells(1)));
    let reader =
        spawn(&shared, |(slot, cells)| match cells[0].acquire(slot.name, &slot.word, Expect::Ready) {
            Ok(word) => {
                let version = word.epoch().bits();
                slot.payload.check(version, "foreign bytes");
                seen(if version == 1 { "held the copy" } else { "held" });
                cells[0].release();
            }
            Err(_) => seen("refused"),
        });
    let (slot, cells) = shared.enter();
    let mut floors = Floors::default();
    let is_named = || {
        let mut named = false;
        scan(cells, |name| named |= name == slot.name);
        if named {
            seen("draining");
        }
        named
    };
    assert!(matches!(slot.word.kill(epoch(2)), Transition::Done(_)));
    if !is_named() {
        assert!(floors.free(SlotId(0), &slot.word, epoch(2)).holds());
        let begun = floors.begin_copy(SlotId(0), &slot.word, epoch(1));
        assert!(matches!(begun, Transition::Done(_)));
        slot.payload.write(1);
        assert!(matches!(slot.word.publish(epoch(1)), Transition::Done(_)));
        seen("copied");
        assert!(matches!(slot.word.kill(epoch(1)), Transition::Done(_)));
        if !is_named() {
            assert!(floors.free(SlotId(0), &slot.word, epoch(1)).holds());
            slot.refill(3);
        }
    }
    reader.join().unwrap();
}

/// Two begins that were granted long ago come in at any moment while a copy comes and goes in a slot that has passed both.
fn late_begin_around_a_copy() {
    let shared = share(Slot::new(0, 4, State::Free, Payload::values));
    let late = spawn(&shared, |slot| {
        for granted in [3, 4] {
            match slot.word.begin(epoch(granted)) {
                Transition::Done(old) => panic!("a late begin was let in at {old:?}"),
                Transition::Refused(word) if word.state() == State::Free => seen("refused at the fence"),
                _ => seen("refused at a copy"),
            }
        }
    });
    let slot = shared.enter();
    let mut floors = Floors::default();
    assert!(matches!(floors.begin_copy(SlotId(0), &slot.word, epoch(2)), Transition::Done(_)));
    assert!(slot.word.publish(epoch(2)).holds() && slot.word.kill(epoch(2)).holds());
    assert!(floors.free(SlotId(0), &slot.word, epoch(2)).holds());
    seen("freed");
    slot.refill(5);
    late.join().unwrap();
}

fn two_kills() {
    let shared = share((AtomicWord::new(Word::new(epoch(1), State::Ready)), AtomicU64::new(0)));
    let kill = |(word, kills): &(AtomicWord, AtomicU64)| match word.kill(epoch(1)) {
        Transition::Done(_) => {
            seen("mine");
            kills.fetch_add(1, Ordering::Relaxed);
        }
        Transition::Already => seen("already dead"),
        Transition::Refused(word) => unreachable!("{word:?}"),
    };
    let other = spawn(&shared, kill);
    kill(shared.enter());
    other.join().unwrap();
    // Whoever made it DEAD puts it into the list of dying ones: twice would free it twice.
    let kills = shared.of.1.load(Ordering::Relaxed);
    assert_eq!(kills, 1, "the record died {kills} times");
}

const TTL: Duration = Duration::from_nanos(50);
const OLD_MEMBER: Generation = Generation(1);

/// What the row says just after the second member came in: the first one fell silent long before.
fn judge(row: &Row) {
    match row.read(MonoTime(105), TTL) {
        Liveness::Absent => seen("absent"),
        Liveness::Alive(who) => {
            assert_ne!(who.generation, OLD_MEMBER, "a dead member was reported alive");
            seen("the new one alive");
        }
        Liveness::Silent(who, _) => {
            assert_eq!(who.generation, OLD_MEMBER, "a new member was reported silent");
            seen("the old one silent");
        }
    }
}

fn succession() {
    let shared = share(Row::vacant());
    let dead = shared.of.join(7, MonoTime(10)).unwrap();
    let reader = spawn(&shared, judge);
    let row = shared.enter();
    row.put_out(dead).unwrap();
    row.join(8, MonoTime(100)).unwrap();
    reader.join().unwrap();
}

fn late_beat() {
    let shared = share(Row::vacant());
    let dying = shared.of.join(7, MonoTime(10)).unwrap();
    let dying_one = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || match shared.enter().beat(dying, MonoTime(12)) {
            Ok(()) => seen("signed late"),
            Err(_) => seen("refused"),
        })
    };
    let row = shared.enter();
    row.put_out(dying).unwrap();
    row.join(8, MonoTime(100)).unwrap();
    dying_one.join().unwrap();
    judge(row);
}
