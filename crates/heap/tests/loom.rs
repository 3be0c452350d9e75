//! Loom models of the protocol: every interleaving of small models, and every reordering that the memory model
//! allows, on the shipped code. Each model is written once and run without a mutation, when it must pass, and with
//! each mutation that it must detect, when it must fail with the message of the violated guarantee.
//!
//! Differences between loom and the C++ memory model: loom's SeqCst fences also order as release and acquire among
//! themselves, and no load returns a store that is executed later. So the payload is modelled in two ways
//! ([`Payload`]): as Relaxed values, where a reader may see foreign bytes, and as plain memory, where loom finds
//! every pair of unordered accesses, even if no execution of loom's shows a wrong value.
//!
//! `cargo test … -- --nocapture` prints the explored outcomes of each model.
#![cfg(loom)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};
use moontide_heap::cell::{Cell, CellLane, CloseOutcome, ExpectedWord, SlotRef, close_claims, scan};
use moontide_heap::model::{EpochFences, Mutation, free, publish_closed};
use moontide_heap::{
    AtomicWord, ENTRIES_PER_BUCKET, Index, IndexEntry, InsertOutcome, Liveness, LivenessRow, Transition,
};
use moontide_rt::with_mutation;
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Generation, MonoTime, ObjectId, SegmentId, SlotId};

/// A model: body of its threads, and outcomes that must occur in some interleaving.
struct Model {
    run: fn(),
    /// The model fails if one of these outcomes never occurs, because it has explored too little.
    outcomes: &'static [&'static str],
    /// Maximum number of preemptions; `None` for every interleaving.
    preemptions_max: Option<usize>,
}

/// A model with every interleaving.
const fn all(run: fn(), outcomes: &'static [&'static str]) -> Model {
    Model { run, outcomes, preemptions_max: None }
}

/// A model with every interleaving of at most `preemptions_max` preemptions. Two readers and an owner have 9,330 with
/// up to three; with up to thirty they were not exhausted after a minute and a half.
const fn bounded(run: fn(), preemptions_max: usize, outcomes: &'static [&'static str]) -> Model {
    Model { run, outcomes, preemptions_max: Some(preemptions_max) }
}

thread_local! {
    /// Number of occurrences of each outcome. loom runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

/// Explores a model completely, or to its first failure.
fn check(name: &str, model: &Model, mutation: Option<Mutation>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = model.preemptions_max;
    let run = model.run;
    SEEN.take();
    with_mutation(mutation, || {
        builder.check(move || {
            seen("interleavings");
            run();
        });
    });
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if mutation.is_none() {
        let never: Vec<_> = model.outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "outcomes that never occurred: {never:?}");
    }
}

/// Declares for each model its test, then a test per mutation that must fail in it, with the message.
macro_rules! models {
    ($($test:ident: $model:expr, { $($mutated:ident: $mutation:ident => $message:expr,)* })*) => { $(
        #[test]
        fn $test() {
            check(stringify!($test), &$model, None);
        }
        $(
            #[test]
            #[should_panic(expected = $message)]
            fn $mutated() {
                check(stringify!($mutated), &$model, Some(Mutation::$mutation));
            }
        )*
    )* };
}

models! {
    admitted_reader_sees_all_published_bytes:
        all(publish, &["held", "refused"]), {
        mutation_publish_without_release_is_detected: RelaxedPublish => "foreign bytes",
        mutation_word_load_without_acquire_is_detected: RelaxedLoad => "foreign bytes",
    }
    pinned_bytes_never_change:
        all(|| reuse(Payload::values), &["held", "held the next version", "refused", "draining", "reused"]), {
        mutation_pin_without_fence_is_detected: AcquireFenceMissing => "foreign bytes",
        mutation_scan_without_fence_is_detected: ScanFenceMissing => "foreign bytes",
        mutation_free_without_scan_is_detected: ReuseWithoutScan => "foreign bytes",
        mutation_pin_without_word_check_is_detected: WordUnchecked => "foreign bytes",
    }
    reads_happen_before_next_owner_writes:
        all(|| reuse(Payload::plain), &["held", "held the next version", "refused", "draining", "reused"]), {
        mutation_unpin_without_release_is_detected: RelaxedRelease => "Causality violation",
        mutation_scan_without_acquire_is_detected: RelaxedScan => "Causality violation",
    }
    bytes_pinned_by_two_readers_never_change:
        bounded(two_readers, 3, &["held", "refused", "draining", "reused"]), {
        mutation_pin_without_fence_with_two_readers_is_detected: AcquireFenceMissing => "foreign bytes",
        mutation_scan_without_fence_with_two_readers_is_detected: ScanFenceMissing => "foreign bytes",
    }
    late_writer_never_writes_into_next_record:
        all(|| abort(Payload::values), &["wrote", "refused", "draining", "reused"]), {
        mutation_claim_without_fence_is_detected: AcquireFenceMissing => "foreign bytes",
        mutation_abort_without_fence_is_detected: ScanFenceMissing => "foreign bytes",
        mutation_abort_without_scan_is_detected: ReuseWithoutScan => "foreign bytes",
        mutation_claim_without_word_check_is_detected: WordUnchecked => "foreign bytes",
    }
    claimed_writes_happen_before_next_owner_writes:
        all(|| abort(Payload::plain), &["wrote", "refused", "draining", "reused"]), {
        mutation_claim_end_without_release_is_detected: RelaxedRelease => "Causality violation",
        mutation_abort_without_acquire_is_detected: RelaxedScan => "Causality violation",
    }
    commit_publishes_only_its_own_version:
        all(late_commit, &["published", "refused"]), {
        mutation_commit_ignoring_epoch_is_detected: EpochIgnored => "another version was published",
    }
    record_is_never_written_after_publish:
        all(commit, &["wrote, then published", "published, then refused", "still claimed"]), {
        mutation_claim_scan_before_word_close_is_detected: ScanBeforeClose => "written after it was published",
        mutation_claim_scan_without_fence_is_detected: ScanFenceMissing => "written after it was published",
        mutation_claim_before_commit_without_fence_is_detected: AcquireFenceMissing => "written after it was published",
    }
    admitted_reader_sees_header_written_by_commit:
        all(header_of_commit, &["held", "refused"]), {
        mutation_commit_without_release_is_detected: RelaxedPublish => "foreign header",
        mutation_commit_read_without_acquire_is_detected: RelaxedLoad => "foreign header",
    }
    pin_moves_safely_while_slot_is_reclaimed:
        all(pin_move, &["moved", "kept", "draining", "reused"]), {
        mutation_pin_move_without_word_check_is_detected: NaivePinMove => "foreign bytes",
        mutation_pin_move_without_fence_is_detected: AcquireFenceMissing => "foreign bytes",
    }
    cell_is_reused_only_after_its_pin_is_released:
        all(|| cell_reuse(Payload::values), &["cell reused", "no vacant cell", "draining", "reused"]), {
        mutation_cell_taken_while_pinned_is_detected: CellTakenTwice => "foreign bytes",
    }
    reads_happen_before_reclaim_despite_cell_reuse:
        all(|| cell_reuse(Payload::plain), &["cell reused", "no vacant cell", "draining", "reused"]), {
        mutation_shared_cell_unpin_without_release_is_detected: RelaxedRelease => "Causality violation",
    }
    lane_can_be_opened_during_a_scan:
        all(|| opened_lane(false), &["held", "refused", "draining", "reused"]), {
        mutation_lane_open_without_fence_is_detected: AcquireFenceMissing => "foreign bytes",
    }
    reads_happen_before_other_owner_thread_writes:
        all(two_owner_threads, &["begun", "too early", "draining"]), {
        mutation_free_without_release_is_detected: RelaxedFree => "Causality violation",
    }
    stale_index_entry_never_yields_another_object:
        all(|| look_up(true), &["hit", "miss", "another object in the slot", "draining", "reused"]), {
        mutation_index_hit_without_word_check_is_detected: WordUnchecked => "another object's bytes",
    }
    concurrent_inserts_take_different_entries:
        all(two_inserts, &["both indexed"]), {
        mutation_insert_without_compare_and_swap_is_detected: InsertByStore => "an entry was lost",
    }
    held_slot_is_not_reused_after_abort:
        all(hold_and_abort, &["held", "too late", "draining", "reused"]), {
        mutation_slot_hold_without_fence_is_detected: AcquireFenceMissing => "foreign bytes",
        mutation_abort_under_slot_hold_without_fence_is_detected: ScanFenceMissing => "foreign bytes",
    }
    reservation_is_either_begun_or_fenced:
        all(fence_epoch, &["begun", "fenced"]), {
        mutation_begin_after_fence_is_detected: LateBegin => "both fenced and begun",
        mutation_transition_without_compare_and_swap_is_detected: CheckThenStore => "both fenced and begun",
    }
    pinned_bytes_of_copy_never_change:
        all(|| copy(Payload::values), &["held", "held the copy", "refused", "draining", "copied", "reused"]), {
        mutation_copy_slot_reuse_without_scan_is_detected: ReuseWithoutScan => "foreign bytes",
        mutation_copy_pin_without_fence_is_detected: AcquireFenceMissing => "foreign bytes",
        mutation_copy_scan_without_fence_is_detected: ScanFenceMissing => "foreign bytes",
        mutation_copy_publish_without_release_is_detected: RelaxedPublish => "foreign bytes",
    }
    copy_reads_happen_before_next_owner_writes:
        all(|| copy(Payload::plain), &["held", "held the copy", "refused", "draining", "copied", "reused"]), {
        mutation_copy_unpin_without_release_is_detected: RelaxedRelease => "Causality violation",
    }
    late_begin_is_refused_during_and_after_a_copy:
        all(late_begin_around_a_copy, &["refused at a copy", "refused at the fence", "freed", "reused"]), {
        mutation_forgotten_epoch_fence_is_detected: FenceForgotten => "a late begin succeeded",
        mutation_late_begin_around_copy_is_detected: LateBegin => "a late begin succeeded",
    }
    concurrent_kills_succeed_once:
        all(two_kills, &["killed", "already dead"]), {
        mutation_kill_without_compare_and_swap_is_detected: CheckThenStore => "killed 2 times",
    }
    successor_heartbeat_does_not_revive_old_member:
        all(succession, &["absent", "old member silent", "new member alive"]), {
        mutation_single_read_of_liveness_row_is_detected: RowReadOnce => "a dead member was reported alive",
        mutation_heartbeat_without_release_is_detected: RelaxedHeartbeat => "a dead member was reported alive",
        mutation_heartbeat_read_without_acquire_is_detected: RelaxedHeartbeatRead => "a dead member was reported alive",
        mutation_join_without_heartbeat_is_detected: JoinWithoutHeartbeat => "a new member was reported silent",
    }
    late_heartbeat_does_not_time_out_successor:
        all(late_heartbeat, &["stored late", "refused"]), {
        mutation_heartbeat_overwriting_newer_one_is_detected: HeartbeatByStore => "a new member was reported silent",
    }
}

// Callers of the shipped functions are part of the protocol, too. These break it.

#[test]
#[should_panic(expected = "another object's bytes")]
fn mutation_index_hit_without_identity_check_is_detected() {
    check("no identity check", &all(|| look_up(false), &[]), None);
}

#[test]
#[should_panic(expected = "foreign bytes")]
fn mutation_lane_count_read_before_scan_fence_is_detected() {
    check("early lane count", &all(|| opened_lane(true), &[]), None);
}

#[test]
fn model_threads_run_on_test_thread() {
    // The enabled mutation and the seen outcomes are stored per OS thread.
    let test = std::thread::current().id();
    loom::model(move || {
        let other = thread::spawn(move || assert_eq!(std::thread::current().id(), test));
        assert_eq!(std::thread::current().id(), test);
        other.join().unwrap();
    });
}

/// Bytes of a record. Those of version `n` are computed from `n`.
enum Payload {
    /// Relaxed values: the reader may see wrong ones.
    Values([AtomicU64; 2]),
    /// Plain memory: loom detects unordered accesses.
    Plain(UnsafeCell<u64>),
}

// SAFETY: loom, not Rust, checks the accesses; it panics before two of them can race.
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

    fn check(&self, version: u64, message: &str) {
        let value = bytes_of(version);
        match self {
            Payload::Values(values) => {
                values.iter().for_each(|v| assert_eq!(v.load(Ordering::Relaxed), value, "{message}"));
            }
            // SAFETY: loom panics before an access that would race.
            Payload::Plain(cell) => cell.with(|at| assert_eq!(unsafe { *at }, value, "{message}")),
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
    name: SlotRef,
    word: AtomicWord,
    /// In place of the header: version to which the bytes belong.
    identity: AtomicU64,
    payload: Payload,
}

impl Slot {
    fn new(number: u32, version: u64, state: State, payload: fn(u64) -> Payload) -> Slot {
        Slot {
            name: SlotRef::new(SegmentId(0), SlotId(number)),
            word: AtomicWord::new(Word::new(epoch(version), state)),
            identity: AtomicU64::new(version),
            payload: payload(version),
        }
    }

    /// Kills, scans and frees, as the owner does. Returns `false` if the slot is still pinned.
    fn reclaim<'a>(&self, version: u64, cells: impl IntoIterator<Item = &'a Cell>) -> bool {
        assert!(matches!(self.word.kill(epoch(version)), Transition::Done(_)));
        let mut pinned = false;
        scan(cells, |name| pinned |= name == self.name);
        if pinned {
            seen("draining");
            return false;
        }
        assert!(matches!(free(&self.word, epoch(version)), Transition::Done(_)));
        true
    }

    /// Fills the slot again, as the owner does.
    fn refill(&self, version: u64) {
        assert!(matches!(self.word.begin(epoch(version)), Transition::Done(_)));
        self.identity.store(version, Ordering::Relaxed);
        self.payload.write(version);
        let published = self.word.publish(epoch(version));
        assert!(matches!(published, Transition::Done(_)), "{published:?}");
        seen("reused");
    }

    /// Pins and reads, as a reader does: the bytes must be those of the pinned version.
    fn read(&self, cell: &Cell) {
        match cell.acquire(self.name, &self.word, ExpectedWord::Ready) {
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

/// State shared by the threads of a model, and a gate that all of them pass first: a common read-modify-write,
/// because a thread that begins with a load can hide interleavings from loom.
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
    let reader =
        spawn(&shared, |(slot, cell)| match cell.acquire(slot.name, &slot.word, ExpectedWord::Ready) {
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

/// A process holds the slot of a record whose write is aborted: the bytes are not reused meanwhile.
fn hold_and_abort() {
    let shared = share((Slot::new(0, 1, State::Writing, Payload::values), vacant_cells(1)));
    let waiting = spawn(&shared, |(slot, cells)| {
        match cells[0].acquire(slot.name, &slot.word, ExpectedWord::BegunAt(epoch(1))) {
            Ok(_) => {
                seen("held");
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
    assert_eq!(cells[0].name(), None, "a reader left a pin");
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
        if cells[0].acquire(slot.name, &slot.word, ExpectedWord::WritingAt(epoch(1))).is_ok() {
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
        if cells[0].acquire(slot.name, &slot.word, ExpectedWord::WritingAt(epoch(1))).is_ok() {
            written.store(1, Ordering::Relaxed);
            cells[0].release();
        }
    });
    let (slot, cells, written) = shared.enter();
    let published = match close_claims(&slot.word, epoch(1), slot.name, || cells.iter()) {
        CloseOutcome::Closed => {
            assert!(publish_closed(&slot.word, epoch(1)).succeeded());
            Some(written.load(Ordering::Relaxed))
        }
        CloseOutcome::Claimed => {
            seen("still claimed");
            None
        }
        CloseOutcome::Refused(found) => panic!("only the commit changes the word: {found:?}"),
    };
    writer.join().unwrap();
    if let Some(at_publish) = published {
        let at_end = written.load(Ordering::Relaxed);
        assert_eq!(at_end, at_publish, "written after it was published");
        seen(if at_end == 1 { "wrote, then published" } else { "published, then refused" });
    }
}

/// The owner writes the header while the word is closed, and then publishes.
fn header_of_commit() {
    let shared =
        share((Slot::new(0, 1, State::Writing, Payload::values), vacant_cells(1), AtomicU64::new(0)));
    let reader = spawn(&shared, |(slot, cells, header)| {
        if cells[0].acquire(slot.name, &slot.word, ExpectedWord::Ready).is_ok() {
            assert_eq!(header.load(Ordering::Relaxed), 1, "foreign header");
            cells[0].release();
            seen("held");
        } else {
            seen("refused");
        }
    });
    let (slot, _, header) = shared.enter();
    // The reader's cell is not one of the writer's.
    assert_eq!(close_claims(&slot.word, epoch(1), slot.name, || []), CloseOutcome::Closed);
    header.store(1, Ordering::Relaxed);
    assert!(publish_closed(&slot.word, epoch(1)).succeeded());
    reader.join().unwrap();
}

fn pin_move() {
    // The scan passes the new cell first: the order in which it can miss a moving pin.
    const NEW: usize = 0;
    const OLD: usize = 1;
    let shared = share((Slot::new(0, 1, State::Ready, Payload::values), vacant_cells(2)));
    let (slot, cells) = &shared.of;
    cells[OLD].acquire(slot.name, &slot.word, ExpectedWord::Ready).unwrap();
    let holder = spawn(&shared, |(slot, cells)| {
        let moved = cells[NEW].duplicate_pin(&cells[OLD], &slot.word, Word::new(epoch(1), State::Ready));
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
    // One cell, so that the lane's thread must wait for it; another thread holds the pin in it.
    let pinned = Slot::new(0, 1, State::Ready, payload);
    let other = Slot::new(1, 1, State::Ready, payload);
    let shared = share((pinned, other, vacant_cells(1)));
    let (pinned, _, cells) = &shared.of;
    cells[0].acquire(pinned.name, &pinned.word, ExpectedWord::Ready).unwrap();
    let holder = spawn(&shared, |(pinned, _, cells)| {
        pinned.payload.check(1, "foreign bytes");
        cells[0].release();
    });
    let lane_thread = spawn(&shared, |(_, other, cells)| match CellLane::new(cells).vacant() {
        Some(cell) => {
            seen("cell reused");
            other.read(cell);
        }
        None => seen("no vacant cell"),
    });
    let (pinned, _, cells) = shared.enter();
    if pinned.reclaim(1, cells) {
        pinned.refill(2);
    }
    holder.join().unwrap();
    lane_thread.join().unwrap();
}

/// A ledger stores the number of its lanes in use, and the scan goes no further. The number is raised before a cell
/// of a new lane is filled. `early`: the owner loads it before the scan's fence.
fn opened_lane(early: bool) {
    let lanes_used = AtomicU64::new(0);
    let shared = share((Slot::new(0, 1, State::Ready, Payload::values), vacant_cells(1), lanes_used));
    let reader = spawn(&shared, |(slot, cells, lanes_used)| {
        lanes_used.fetch_max(1, Ordering::Relaxed);
        slot.read(&cells[0]);
    });
    let (slot, cells, lanes_used) = shared.enter();
    let in_use = || &cells[..lanes_used.load(Ordering::Relaxed) as usize];
    let reclaimed = if early {
        slot.reclaim(1, in_use())
    } else {
        // As in a ledger's scan: the iterator loads the number when it is first advanced.
        slot.reclaim(1, std::iter::once(()).flat_map(|()| in_use()))
    };
    if reclaimed {
        slot.refill(2);
    }
    reader.join().unwrap();
}

fn two_owner_threads() {
    // One thread of the owner frees the slot, another one fills it again; only the word synchronizes them. The fence
    // of
    // the scan does not order the reader's last read, because its end is visible in the cells only after the fence.
    let shared = share((Slot::new(0, 1, State::Ready, Payload::plain), vacant_cells(1)));
    let (slot, cells) = &shared.of;
    cells[0].acquire(slot.name, &slot.word, ExpectedWord::Ready).unwrap();
    assert!(slot.word.kill(epoch(1)).succeeded());
    let reader = spawn(&shared, |(slot, cells)| {
        slot.payload.check(1, "foreign bytes");
        cells[0].release();
    });
    let next_owner = spawn(&shared, |(slot, _)| match slot.word.begin(epoch(2)) {
        Transition::Done(_) => {
            seen("begun");
            slot.payload.write(2);
        }
        _ => seen("too early"),
    });
    let (slot, cells) = shared.enter();
    let mut pinned = false;
    scan(cells, |_| pinned = true);
    if pinned {
        seen("draining");
    } else {
        assert!(free(&slot.word, epoch(1)).succeeded());
    }
    reader.join().unwrap();
    next_owner.join().unwrap();
}

/// Two objects with the same tag and the same buckets: the worst case.
const OLD_ID: ObjectId = ObjectId(*b"\x07\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0");
const NEW_ID: ObjectId = ObjectId(*b"\x08\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0");

fn look_up(checks_identity: bool) {
    let location = IndexEntry { segment: SegmentId(0), slot: SlotId(0) };
    let entries: Vec<_> = (0..2 * ENTRIES_PER_BUCKET).map(|_| AtomicU64::new(0)).collect();
    let slot = Slot::new(0, 1, State::Ready, Payload::values);
    let shared = share((slot, vacant_cells(1), entries, checks_identity));
    let index = Index::new(&shared.of.2);
    assert_eq!(index.insert(&OLD_ID, location), InsertOutcome::Indexed);
    let reader = spawn(&shared, |(slot, cells, entries, checks_identity)| {
        let found = Index::new(entries).find(&OLD_ID, |location| {
            let name = SlotRef::new(location.segment, location.slot);
            cells[0].acquire(name, &slot.word, ExpectedWord::Ready).ok()?;
            let is_mine = slot.identity.load(Ordering::Relaxed) == 1;
            if is_mine || !checks_identity {
                slot.payload.check(1, "another object's bytes");
            } else {
                seen("another object in the slot");
            }
            cells[0].release();
            is_mine.then_some(())
        });
        seen(if found.is_some() { "hit" } else { "miss" });
    });
    let (slot, cells, ..) = shared.enter();
    // The owner removes the entry right after the kill. Here it remains until after the free, which gives readers
    // more time to follow it: it is a hint, and must do no harm.
    let reclaimed = slot.reclaim(1, cells);
    assert!(index.remove(&OLD_ID, location));
    if reclaimed {
        slot.refill(2);
        assert_eq!(index.insert(&NEW_ID, location), InsertOutcome::Indexed);
    }
    reader.join().unwrap();
}

fn two_inserts() {
    let location = |slot| IndexEntry { segment: SegmentId(0), slot: SlotId(slot) };
    let entries: Vec<_> = (0..2 * ENTRIES_PER_BUCKET).map(|_| AtomicU64::new(0)).collect();
    let shared = share(entries);
    let other = spawn(&shared, |entries| {
        let location = IndexEntry { segment: SegmentId(0), slot: SlotId(1) };
        assert_eq!(Index::new(entries).insert(&NEW_ID, location), InsertOutcome::Indexed);
    });
    let index = Index::new(shared.enter());
    assert_eq!(index.insert(&OLD_ID, location(0)), InsertOutcome::Indexed);
    other.join().unwrap();
    for expected in [location(0), location(1)] {
        let found = index.find(&OLD_ID, |location| (location == expected).then_some(()));
        assert!(found.is_some(), "an entry was lost");
    }
    seen("both indexed");
}

fn fence_epoch() {
    let shared = share((AtomicWord::new(Word::new(epoch(1), State::Free)), AtomicU64::new(0)));
    let late = spawn(&shared, |(word, begun)| {
        let done = matches!(word.begin(epoch(2)), Transition::Done(_));
        begun.store(done.into(), Ordering::Relaxed);
    });
    let (word, begun) = shared.enter();
    let fenced = matches!(word.fence_epoch(epoch(2)), Transition::Done(_));
    late.join().unwrap();
    let begun = begun.load(Ordering::Relaxed) == 1;
    assert!(!(fenced && begun), "both fenced and begun");
    assert!(fenced || begun, "neither fenced nor begun");
    seen(if begun { "begun" } else { "fenced" });
}

/// A slot that has seen version 2 gets a copy of version 1, which is killed, and then version 3. The word shows which
/// version a reader gets.
fn copy(payload: fn(u64) -> Payload) {
    let slot = Slot::new(0, 2, State::Ready, payload);
    let shared = share((slot, vacant_cells(1)));
    let reader =
        spawn(&shared, |(slot, cells)| match cells[0].acquire(slot.name, &slot.word, ExpectedWord::Ready) {
            Ok(word) => {
                let version = word.epoch().bits();
                slot.payload.check(version, "foreign bytes");
                seen(if version == 1 { "held the copy" } else { "held" });
                cells[0].release();
            }
            Err(_) => seen("refused"),
        });
    let (slot, cells) = shared.enter();
    let mut fences = EpochFences::default();
    let is_pinned = || {
        let mut pinned = false;
        scan(cells, |name| pinned |= name == slot.name);
        if pinned {
            seen("draining");
        }
        pinned
    };
    assert!(matches!(slot.word.kill(epoch(2)), Transition::Done(_)));
    if !is_pinned() {
        assert!(fences.free(SlotId(0), &slot.word, epoch(2)).succeeded());
        let begun = fences.begin_copy(SlotId(0), &slot.word, epoch(1));
        assert!(matches!(begun, Transition::Done(_)));
        slot.payload.write(1);
        assert!(matches!(slot.word.publish(epoch(1)), Transition::Done(_)));
        seen("copied");
        assert!(matches!(slot.word.kill(epoch(1)), Transition::Done(_)));
        if !is_pinned() {
            assert!(fences.free(SlotId(0), &slot.word, epoch(1)).succeeded());
            slot.refill(3);
        }
    }
    reader.join().unwrap();
}

/// Two begins that were granted long ago arrive at any moment during a copy in a slot that has passed both.
fn late_begin_around_a_copy() {
    let shared = share(Slot::new(0, 4, State::Free, Payload::values));
    let late = spawn(&shared, |slot| {
        for granted in [3, 4] {
            match slot.word.begin(epoch(granted)) {
                Transition::Done(old) => panic!("a late begin succeeded at {old:?}"),
                Transition::Refused(word) if word.state() == State::Free => seen("refused at the fence"),
                _ => seen("refused at a copy"),
            }
        }
    });
    let slot = shared.enter();
    let mut fences = EpochFences::default();
    assert!(matches!(fences.begin_copy(SlotId(0), &slot.word, epoch(2)), Transition::Done(_)));
    assert!(slot.word.publish(epoch(2)).succeeded() && slot.word.kill(epoch(2)).succeeded());
    assert!(fences.free(SlotId(0), &slot.word, epoch(2)).succeeded());
    seen("freed");
    slot.refill(5);
    late.join().unwrap();
}

fn two_kills() {
    let shared = share((AtomicWord::new(Word::new(epoch(1), State::Ready)), AtomicU64::new(0)));
    let kill = |(word, kills): &(AtomicWord, AtomicU64)| match word.kill(epoch(1)) {
        Transition::Done(_) => {
            seen("killed");
            kills.fetch_add(1, Ordering::Relaxed);
        }
        Transition::Already => seen("already dead"),
        Transition::Refused(word) => unreachable!("{word:?}"),
    };
    let other = spawn(&shared, kill);
    kill(shared.enter());
    other.join().unwrap();
    // The thread that made it DEAD adds it to the list of dead records: two entries would free it twice.
    let kills = shared.of.1.load(Ordering::Relaxed);
    assert_eq!(kills, 1, "the record was killed {kills} times");
}

const TTL: Duration = Duration::from_nanos(50);
const OLD_MEMBER: Generation = Generation(1);

/// Checks the row just after the second member joined: the first one's last heartbeat is long ago.
fn check_row(row: &LivenessRow) {
    match row.read(MonoTime(105), TTL) {
        Liveness::Absent => seen("absent"),
        Liveness::Alive(member) => {
            assert_ne!(member.generation, OLD_MEMBER, "a dead member was reported alive");
            seen("new member alive");
        }
        Liveness::Silent(member, _) => {
            assert_eq!(member.generation, OLD_MEMBER, "a new member was reported silent");
            seen("old member silent");
        }
    }
}

fn succession() {
    let shared = share(LivenessRow::vacant());
    let dead = shared.of.join(7, MonoTime(10)).unwrap();
    let reader = spawn(&shared, check_row);
    let row = shared.enter();
    row.evict(dead).unwrap();
    row.join(8, MonoTime(100)).unwrap();
    reader.join().unwrap();
}

fn late_heartbeat() {
    let shared = share(LivenessRow::vacant());
    let old = shared.of.join(7, MonoTime(10)).unwrap();
    let old_thread = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || match shared.enter().heartbeat(old, MonoTime(12)) {
            Ok(()) => seen("stored late"),
            Err(_) => seen("refused"),
        })
    };
    let row = shared.enter();
    row.evict(old).unwrap();
    row.join(8, MonoTime(100)).unwrap();
    old_thread.join().unwrap();
    check_row(row);
}
