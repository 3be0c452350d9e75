//! Copies: older versions restored into slots that have seen newer ones, and the fence that they must not lower.

mod common;

use common::{GrantedObject, TestNode, id_of, now, record_of};
use moontide_heap::{
    BeginError, CommitError, Grant, KillOutcome, Lookup, NodeHeap, NodePin, PayloadWriter, ReclaimReport,
    Transition,
};
use moontide_types::record::{DigestContext, State, Word};
use moontide_types::{ClientId, Epoch, ErrorCode, Extent, MonoTime, SegmentId, SlotId, Span, Term};
use proptest::prelude::*;

const SEGMENT: SegmentId = SegmentId(0);
const TERM: u32 = 5;

fn term(term: u32) -> Term {
    Term::new(term).unwrap()
}

/// Returns the `n`th epoch of the term that the segment has adopted.
fn epoch(n: u64) -> Epoch {
    Epoch::new(term(TERM), n).unwrap()
}

fn node(slots: u32) -> TestNode {
    let node = TestNode::new(1, slots, 1 << 20);
    node.heap.segments()[0].adopt_term(term(TERM));
    node
}

fn bytes(len: u64, version: Epoch) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(version.bits() as u8)).collect()
}

const KEY: &[u8] = b"the object";
const LEN: u64 = 3000;

/// Returns the grant of the record that all tests put, with an extent that depends on its slot alone.
fn grant(slot: SlotId, version: Epoch) -> Grant<'static> {
    let extent = Extent { start: 16 * slot.0, units: 6 };
    Grant {
        slot,
        epoch: version,
        term: term(TERM),
        extent,
        record: record_of(KEY, LEN),
        writer: PayloadWriter::Node,
    }
}

fn publish(heap: &NodeHeap, slot: SlotId, version: Epoch) -> Result<(), CommitError> {
    let Some(mut claim) = heap.claim(SEGMENT, slot, version) else {
        return heap.publish(SEGMENT, slot, version, 0);
    };
    let root = claim.fill(&bytes(LEN, version));
    claim.publish(root)
}

fn put_copy(heap: &NodeHeap, slot: SlotId, version: Epoch) {
    heap.begin_copy(SEGMENT, &grant(slot, version)).unwrap();
    publish(heap, slot, version).unwrap();
}

fn kill(heap: &NodeHeap, slot: SlotId, version: Epoch) -> KillOutcome {
    heap.kill(SEGMENT, slot, version, MonoTime(0))
}

fn reclaim(heap: &NodeHeap) -> ReclaimReport {
    heap.reclaim(now())
}

/// Returns the slot's word: fencing epoch 0 changes nothing.
fn word(heap: &NodeHeap, slot: SlotId) -> Word {
    match heap.fence_epoch(SEGMENT, slot, Epoch::ZERO) {
        Transition::Refused(found) => found,
        Transition::Already => Word::default(),
        Transition::Done(old) => panic!("{old:?} was fenced at 0"),
    }
}

/// Prepares a slot that has seen version 10, and is FREE.
fn used_slot(heap: &NodeHeap, slot: SlotId) {
    heap.begin(SEGMENT, &grant(slot, epoch(10))).unwrap();
    assert_eq!(kill(heap, slot, epoch(10)), KillOutcome::Killed);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free));
}

fn refused_by_word<T: std::fmt::Debug>(result: Result<T, BeginError>) -> bool {
    matches!(result, Err(BeginError::Word { .. }))
}

#[test]
fn copy_of_older_version_is_readable_and_keeps_epoch_fence() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(2));
    used_slot(heap, slot);
    // A version of an earlier term, too.
    for version in [epoch(3), Epoch::new(term(2), 900).unwrap()] {
        put_copy(heap, slot, version);
        let local = node.connect("older");
        let mut reader = local.reader().unwrap();
        for found in [reader.get(&id_of(KEY), now()), reader.get_at(SEGMENT, slot, version, now())] {
            let Lookup::Hit(guard) = found else { panic!("{version}: {found:?}") };
            assert_eq!((guard.version(), guard.bytes()), (version, &bytes(LEN, version)[..]));
            assert_eq!(guard.verify(), Some(true));
        }
        for late in [3, 7, 10, 11] {
            assert!(
                refused_by_word(heap.begin(SEGMENT, &grant(slot, epoch(late)))),
                "begin succeeded in a used slot"
            );
        }
        assert_eq!(kill(heap, slot, version), KillOutcome::Killed);
        assert_eq!(kill(heap, slot, version), KillOutcome::AlreadyDead);
        assert_eq!(reclaim(heap).freed[0].epoch, version);
        assert_eq!(kill(heap, slot, version), KillOutcome::NotFound, "the slot no longer knows the version");
        assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free));
        for late in [1, 3, 7, 10] {
            assert!(
                refused_by_word(heap.begin(SEGMENT, &grant(slot, epoch(late)))),
                "a late begin succeeded"
            );
        }
    }
    heap.begin(SEGMENT, &grant(slot, epoch(11))).unwrap();
}

#[test]
fn killed_unfinished_copy_keeps_epoch_fence() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(0));
    used_slot(heap, slot);
    heap.begin_copy(SEGMENT, &grant(slot, epoch(4))).unwrap();
    let claim = heap.claim(SEGMENT, slot, epoch(4)).unwrap();
    assert_eq!(kill(heap, slot, epoch(4)), KillOutcome::Killed);
    assert_eq!(reclaim(heap).freed.len(), 0, "the record is still claimed");
    drop(claim);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free));
    assert!(refused_by_word(heap.begin(SEGMENT, &grant(slot, epoch(9)))));
    // A copy of a newer version raises the fence, as a put does.
    put_copy(heap, slot, epoch(12));
    assert_eq!(kill(heap, slot, epoch(12)), KillOutcome::Killed);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert!(refused_by_word(heap.begin(SEGMENT, &grant(slot, epoch(12)))));
}

#[test]
fn begin_copy_rejects_invalid_grants() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(1));
    used_slot(heap, slot);
    let good = grant(slot, epoch(3));
    let begin = |grant: Grant<'_>| heap.begin_copy(SEGMENT, &grant);
    let missing = SegmentId(9);
    assert_eq!(heap.begin_copy(missing, &good), Err(BeginError::Segment(missing)));
    assert!(matches!(begin(Grant { slot: SlotId(4), ..good }), Err(BeginError::Slot { .. })));
    let by_client = begin(Grant { writer: PayloadWriter::Client(ClientId(1)), ..good });
    assert_eq!(by_client, Err(BeginError::Copy(ClientId(1))));
    assert_eq!(by_client.unwrap_err().code(), ErrorCode::InvalidArgument);
    assert!(matches!(begin(Grant { term: term(TERM - 1), ..good }), Err(BeginError::Term { .. })));
    let later = Epoch::new(term(TERM + 1), 1).unwrap();
    assert!(matches!(begin(Grant { epoch: later, ..good }), Err(BeginError::Term { .. })));
    assert!(refused_by_word(begin(Grant { epoch: Epoch::ZERO, ..good })), "version 0 is invalid");
    let extent = |start, units| begin(Grant { extent: Extent { start, units }, ..good });
    assert!(matches!(extent(16, 7), Err(BeginError::Extent { .. })));
    assert!(matches!(extent(2044, 6), Err(BeginError::Space(_))), "beyond the end");
    heap.begin(SEGMENT, &grant(SlotId(0), epoch(1))).unwrap();
    assert_eq!(extent(0, 6).unwrap_err().code(), ErrorCode::Overlap);
    assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free), "a refused begin changed the word");

    assert_eq!(begin(good), Ok(()));
    assert_eq!(begin(good), Ok(()), "a repeated begin is harmless");
    let elsewhere = Extent { start: 128, units: 6 };
    assert!(
        refused_by_word(begin(Grant { extent: elsewhere, ..good })),
        "a repeated begin with another extent"
    );
    assert!(refused_by_word(heap.begin(SEGMENT, &good)), "a late begin of the version is not a repetition");
    assert!(refused_by_word(begin(grant(SlotId(0), epoch(1)))), "a copy does not repeat a begin");
    assert!(refused_by_word(begin(Grant { epoch: epoch(2), ..good })), "the slot is in use");
    publish(heap, slot, epoch(3)).unwrap();
    assert!(refused_by_word(begin(good)), "the slot is READY");

    let retired = SlotId(3);
    assert!(matches!(heap.fence_epoch(SEGMENT, retired, Epoch::MAX), Transition::Done(_)));
    assert!(refused_by_word(begin(grant(retired, epoch(1)))));
}

#[test]
fn epoch_fenced_during_a_copy_stays_fenced_after_free() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(1));
    used_slot(heap, slot);
    put_copy(heap, slot, epoch(3));
    let found = Word::new(epoch(3), State::Ready);
    assert_eq!(heap.fence_epoch(SEGMENT, slot, epoch(15)), Transition::Refused(found));
    assert_eq!(kill(heap, slot, epoch(3)), KillOutcome::Killed);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert!(refused_by_word(heap.begin(SEGMENT, &grant(slot, epoch(15)))));
    assert!(matches!(heap.fence_epoch(SEGMENT, slot, epoch(16)), Transition::Done(_)), "the fence can rise");
    assert!(refused_by_word(heap.begin(SEGMENT, &grant(slot, epoch(16)))));
    heap.begin(SEGMENT, &grant(slot, epoch(17))).unwrap();
}

#[test]
fn copy_of_last_version_is_readable_and_keeps_epoch_fence() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(1));
    used_slot(heap, slot);
    put_copy(heap, slot, epoch(10));
    assert_eq!(heap.pin(SEGMENT, slot, epoch(10)).unwrap().payload(), bytes(LEN, epoch(10)));
    assert_eq!(kill(heap, slot, epoch(10)), KillOutcome::Killed);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free));
    assert!(refused_by_word(heap.begin(SEGMENT, &grant(slot, epoch(10)))), "a late begin succeeded");
    heap.begin(SEGMENT, &grant(slot, epoch(11))).unwrap();
}

#[test]
fn pinned_copy_delays_reuse_of_its_slot() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(1));
    used_slot(heap, slot);
    let local = node.connect("pinned");
    let mut reader = local.reader().unwrap();
    put_copy(heap, slot, epoch(3));
    let Lookup::Hit(guard) = reader.get_at(SEGMENT, slot, epoch(3), now()) else { panic!("it is READY") };
    assert_eq!(kill(heap, slot, epoch(3)), KillOutcome::Killed);
    assert_eq!(reclaim(heap).freed.len(), 0);
    assert!(refused_by_word(heap.begin(SEGMENT, &grant(slot, epoch(11)))));
    assert_eq!(guard.bytes(), bytes(LEN, epoch(3)));
    drop(guard);
    assert_eq!(reclaim(heap).freed.len(), 1);
    heap.begin(SEGMENT, &grant(slot, epoch(11))).unwrap();
    publish(heap, slot, epoch(11)).unwrap();
    assert!(matches!(reader.get_at(SEGMENT, slot, epoch(3), now()), Lookup::Miss));
    let Lookup::Hit(guard) = reader.get(&id_of(KEY), now()) else { panic!("it is READY") };
    assert_eq!(guard.bytes(), bytes(LEN, epoch(11)));
}

#[test]
fn wrong_page_digest_fails_publish_and_write_recomputes_it() {
    let page = 256 << 10;
    let len = page + 1000;
    let node = TestNode::new(1, 4, 4 << 20);
    let granted = node.begin(KEY, len, PayloadWriter::Node).unwrap();
    let GrantedObject { segment, slot, epoch, id, .. } = granted;
    let payload = bytes(len, epoch);
    let context = DigestContext { id, version: epoch, stripe: 0, len };
    let mut digests = vec![];
    let root = context.payload(&payload, |digest| digests.push(digest));
    let claim = || node.heap.claim(segment, slot, epoch).unwrap();
    let whole = Span::new(0, len).unwrap();

    let mut wrong = claim();
    wrong.bytes_mut(whole).copy_from_slice(&payload);
    wrong.set_written();
    wrong.set_page_digest(0, digests[0]);
    wrong.set_page_digest(1, digests[1] ^ 1);
    assert!(matches!(wrong.publish(root), Err(CommitError::Root { .. })), "a wrong digest was not detected");

    let mut right = claim();
    right.set_page_digest(1, digests[1]);
    // A write clears the digest, and it is computed again.
    right.bytes_mut(Span::new(7, 1).unwrap())[0] ^= 1;
    right.bytes_mut(Span::new(7, 1).unwrap())[0] ^= 1;
    right.publish(root).unwrap();
    let pin = node.heap.pin(segment, slot, epoch).unwrap();
    let stored: Vec<u8> = digests.iter().flat_map(|digest| digest.to_le_bytes()).collect();
    assert_eq!((pin.payload(), pin.digests()), (&payload[..], &stored[..]));
}

#[test]
#[should_panic(expected = "the claim does not cover the whole page")]
fn setting_digest_of_partially_claimed_page_panics() {
    let node = TestNode::new(1, 4, 1 << 20);
    let GrantedObject { segment, slot, epoch, .. } = node.begin(KEY, 1000, PayloadWriter::Node).unwrap();
    let part = Span::new(0, 999).unwrap();
    node.heap.claim_range(segment, slot, epoch, part).unwrap().set_page_digest(0, 1);
}

const SLOTS: usize = 3;

/// Expected state of a slot.
#[derive(Clone, Copy, Debug)]
struct Expected {
    state: State,
    version: Epoch,
    /// Begins up to this epoch fail, permanently.
    fence: Epoch,
    is_copy: bool,
    /// A copy below its slot's fence: epochs fenced in the meantime count.
    is_below_fence: bool,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Begin,
    Copy,
    Publish,
    Kill,
    FenceEpoch,
    Pin,
    Unpin,
    Reclaim,
}

fn steps() -> impl Strategy<Value = Vec<(Step, usize, u64)>> {
    use Step::{Begin, Copy, FenceEpoch, Kill, Pin, Publish, Reclaim, Unpin};
    let step = prop::sample::select(vec![
        Begin, Begin, Copy, Copy, Publish, Publish, Kill, FenceEpoch, Pin, Unpin, Reclaim,
    ]);
    prop::collection::vec((step, 0..SLOTS, 1..14u64), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn slots_match_model(steps in steps()) {
        let node = node(SLOTS as u32);
        let heap = &node.heap;
        let new = Expected {
            state: State::Free,
            version: Epoch::ZERO,
            fence: Epoch::ZERO,
            is_copy: false,
            is_below_fence: false,
        };
        let mut expected = [new; SLOTS];
        let mut pins: [Option<NodePin<'_>>; SLOTS] = [const { None }; SLOTS];
        for (step, at, n) in steps {
            let (slot, named, was) = (SlotId(at as u32), epoch(n), expected[at]);
            let now = &mut expected[at];
            let is_this = was.version == named && was.state != State::Free;
            match step {
                Step::Begin | Step::Copy => {
                    let is_copy = matches!(step, Step::Copy);
                    let free = was.state == State::Free;
                    let fits = is_copy || named > was.fence;
                    let repeats = is_this && was.state == State::Writing && was.is_copy == is_copy;
                    let begun = if is_copy {
                        heap.begin_copy(SEGMENT, &grant(slot, named))
                    } else {
                        heap.begin(SEGMENT, &grant(slot, named))
                    };
                    prop_assert_eq!(begun.is_ok(), free && fits || repeats, "{:?} {} on {:?}", step, named, was);
                    if free && fits {
                        let fence = was.fence.max(named);
                        let is_below_fence = is_copy && named <= was.fence;
                        *now = Expected { state: State::Writing, version: named, fence, is_copy, is_below_fence };
                    }
                }
                Step::Publish if is_this && was.state == State::Writing => {
                    prop_assert_eq!(publish(heap, slot, named), Ok(()));
                    now.state = State::Ready;
                }
                Step::Publish => prop_assert!(publish(heap, slot, named).is_err()),
                Step::Kill => {
                    let killed = kill(heap, slot, named);
                    let is_alive = is_this && was.state != State::Dead;
                    prop_assert_eq!(killed == KillOutcome::Killed, is_alive);
                    if is_alive {
                        now.state = State::Dead;
                    }
                }
                Step::FenceEpoch => {
                    let fenced = matches!(heap.fence_epoch(SEGMENT, slot, named), Transition::Done(_));
                    prop_assert_eq!(fenced, was.state == State::Free && named > was.fence);
                    if was.state == State::Free || was.is_below_fence {
                        now.fence = was.fence.max(named);
                    }
                }
                Step::Pin => {
                    let pin = heap.pin(SEGMENT, slot, named);
                    prop_assert_eq!(pin.is_some(), is_this && was.state == State::Ready);
                    pins[at] = pins[at].take().or(pin);
                }
                Step::Unpin => pins[at] = None,
                Step::Reclaim => {
                    let freed: Vec<_> = reclaim(heap).freed.iter().map(|freed| freed.slot.0 as usize).collect();
                    for (at, now) in expected.iter_mut().enumerate() {
                        let frees = now.state == State::Dead && pins[at].is_none();
                        prop_assert_eq!(freed.contains(&at), frees);
                        if frees {
                            now.state = State::Free;
                        }
                    }
                }
            }
            for (at, expected) in expected.iter().enumerate() {
                let epoch = if expected.state == State::Free { expected.fence } else { expected.version };
                prop_assert_eq!(word(heap, SlotId(at as u32)), Word::new(epoch, expected.state));
                if let Some(pin) = &pins[at] {
                    prop_assert_eq!(pin.payload(), bytes(LEN, pin.header().word.epoch()));
                }
            }
        }
    }
}
