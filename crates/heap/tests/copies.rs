//! Copies: older versions that come back into slots which have seen newer ones, and the fence that they must not lower.

mod common;

use common::{Granted, TestNode, id_of, now, record_of};
use moontide_heap::{
    BeginError, CommitError, Grant, Killed, Lookup, NodeHeap, NodePin, Reclaimed, Transition, Writer,
};
use moontide_types::record::{DigestContext, State, Word};
use moontide_types::{ClientId, Epoch, ErrorCode, Extent, MonoTime, SegmentId, SlotId, Span, Term};
use proptest::prelude::*;

const SEGMENT: SegmentId = SegmentId(0);
const TERM: u32 = 5;

fn term(term: u32) -> Term {
    Term::new(term).unwrap()
}

/// The `n`th epoch of the term that the segment obeys.
fn epoch(n: u64) -> Epoch {
    Epoch::new(term(TERM), n).unwrap()
}

fn node(slots: u32) -> TestNode {
    let node = TestNode::new(1, slots, 1 << 20);
    node.heap.segments()[0].obey(term(TERM));
    node
}

fn bytes(len: u64, version: Epoch) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(version.bits() as u8)).collect()
}

const KEY: &[u8] = b"the object";
const LEN: u64 = 3000;

/// The record that all tests put, in a place that depends on its slot alone.
fn grant(slot: SlotId, version: Epoch) -> Grant<'static> {
    let extent = Extent { start: 16 * slot.0, units: 6 };
    Grant {
        slot,
        epoch: version,
        term: term(TERM),
        extent,
        record: record_of(KEY, LEN),
        writer: Writer::Node,
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

fn kill(heap: &NodeHeap, slot: SlotId, version: Epoch) -> Killed {
    heap.kill(SEGMENT, slot, version, MonoTime(0))
}

fn reclaim(heap: &NodeHeap) -> Reclaimed {
    heap.reclaim(now())
}

/// What the slot's word is: burning it to epoch 0 changes nothing.
fn word(heap: &NodeHeap, slot: SlotId) -> Word {
    match heap.burn(SEGMENT, slot, Epoch::ZERO) {
        Transition::Refused(found) => found,
        Transition::Already => Word::default(),
        Transition::Done(old) => panic!("{old:?} was burnt to 0"),
    }
}

/// A slot that has seen version 10, and is free.
fn used_slot(heap: &NodeHeap, slot: SlotId) {
    heap.begin(SEGMENT, &grant(slot, epoch(10))).unwrap();
    assert_eq!(kill(heap, slot, epoch(10)), Killed::Dying);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free));
}

fn refused_by_the_word<T: std::fmt::Debug>(result: Result<T, BeginError>) -> bool {
    matches!(result, Err(BeginError::Word { .. }))
}

#[test]
fn an_older_version_comes_back_and_leaves_the_fence_as_it_was() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(2));
    used_slot(heap, slot);
    // A version of an earlier term, too.
    for version in [epoch(3), Epoch::new(term(2), 900).unwrap()] {
        put_copy(heap, slot, version);
        let local = node.join("older");
        let mut reader = local.reader().unwrap();
        for found in [reader.get(&id_of(KEY), now()), reader.get_at(SEGMENT, slot, version, now())] {
            let Lookup::Hit(guard) = found else { panic!("{version}: {found:?}") };
            assert_eq!((guard.version(), guard.bytes()), (version, &bytes(LEN, version)[..]));
            assert_eq!(guard.verify(), Some(true));
        }
        for late in [3, 7, 10, 11] {
            assert!(refused_by_the_word(heap.begin(SEGMENT, &grant(slot, epoch(late)))), "the slot is taken");
        }
        assert_eq!(kill(heap, slot, version), Killed::Dying);
        assert_eq!(kill(heap, slot, version), Killed::Already);
        assert_eq!(reclaim(heap).freed[0].epoch, version);
        assert_eq!(kill(heap, slot, version), Killed::NotThere, "nothing is left that says so");
        assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free));
        for late in [1, 3, 7, 10] {
            assert!(refused_by_the_word(heap.begin(SEGMENT, &grant(slot, epoch(late)))), "a late begin");
        }
    }
    heap.begin(SEGMENT, &grant(slot, epoch(11))).unwrap();
}

#[test]
fn a_copy_that_is_given_up_leaves_the_fence_as_it_was() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(0));
    used_slot(heap, slot);
    heap.begin_copy(SEGMENT, &grant(slot, epoch(4))).unwrap();
    let claim = heap.claim(SEGMENT, slot, epoch(4)).unwrap();
    assert_eq!(kill(heap, slot, epoch(4)), Killed::Dying);
    assert_eq!(reclaim(heap).freed.len(), 0, "somebody is filling it");
    drop(claim);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free));
    assert!(refused_by_the_word(heap.begin(SEGMENT, &grant(slot, epoch(9)))));
    // A copy of a newer version raises it, as a put does.
    put_copy(heap, slot, epoch(12));
    assert_eq!(kill(heap, slot, epoch(12)), Killed::Dying);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert!(refused_by_the_word(heap.begin(SEGMENT, &grant(slot, epoch(12)))));
}

#[test]
fn begin_copy_refuses_whatever_does_not_fit_the_books() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(1));
    used_slot(heap, slot);
    let good = grant(slot, epoch(3));
    let begin = |grant: Grant<'_>| heap.begin_copy(SEGMENT, &grant);
    let nowhere = SegmentId(9);
    assert_eq!(heap.begin_copy(nowhere, &good), Err(BeginError::Segment(nowhere)));
    assert!(matches!(begin(Grant { slot: SlotId(4), ..good }), Err(BeginError::Slot { .. })));
    let by_client = begin(Grant { writer: Writer::Client(ClientId(1)), ..good });
    assert_eq!(by_client, Err(BeginError::Copy(ClientId(1))));
    assert_eq!(by_client.unwrap_err().code(), ErrorCode::InvalidArgument);
    assert!(matches!(begin(Grant { term: term(TERM - 1), ..good }), Err(BeginError::Term { .. })));
    let later = Epoch::new(term(TERM + 1), 1).unwrap();
    assert!(matches!(begin(Grant { epoch: later, ..good }), Err(BeginError::Term { .. })));
    assert!(refused_by_the_word(begin(Grant { epoch: Epoch::ZERO, ..good })), "no version");
    let extent = |start, units| begin(Grant { extent: Extent { start, units }, ..good });
    assert!(matches!(extent(16, 7), Err(BeginError::Extent { .. })));
    assert!(matches!(extent(2044, 6), Err(BeginError::Space(_))), "beyond the end");
    heap.begin(SEGMENT, &grant(SlotId(0), epoch(1))).unwrap();
    assert_eq!(extent(0, 6).unwrap_err().code(), ErrorCode::Overlap);
    assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free), "what was refused changed nothing");

    assert_eq!(begin(good), Ok(()));
    assert_eq!(begin(good), Ok(()), "a repeated one is harmless");
    let elsewhere = Extent { start: 128, units: 6 };
    assert!(refused_by_the_word(begin(Grant { extent: elsewhere, ..good })), "but not of another record");
    assert!(
        refused_by_the_word(heap.begin(SEGMENT, &good)),
        "nor is a late begin of the version a repetition"
    );
    assert!(refused_by_the_word(begin(grant(SlotId(0), epoch(1)))), "nor the other way round");
    assert!(refused_by_the_word(begin(Grant { epoch: epoch(2), ..good })), "it is taken");
    publish(heap, slot, epoch(3)).unwrap();
    assert!(refused_by_the_word(begin(good)), "READY");

    let retired = SlotId(3);
    assert!(matches!(heap.burn(SEGMENT, retired, Epoch::MAX), Transition::Done(_)));
    assert!(refused_by_the_word(begin(grant(retired, epoch(1)))));
}

#[test]
fn what_is_burnt_while_a_copy_stands_there_does_not_begin_after_it() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(1));
    used_slot(heap, slot);
    put_copy(heap, slot, epoch(3));
    let found = Word::new(epoch(3), State::Ready);
    assert_eq!(heap.burn(SEGMENT, slot, epoch(15)), Transition::Refused(found));
    assert_eq!(kill(heap, slot, epoch(3)), Killed::Dying);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert!(refused_by_the_word(heap.begin(SEGMENT, &grant(slot, epoch(15)))));
    assert!(matches!(heap.burn(SEGMENT, slot, epoch(16)), Transition::Done(_)), "and burning goes on");
    assert!(refused_by_the_word(heap.begin(SEGMENT, &grant(slot, epoch(16)))));
    heap.begin(SEGMENT, &grant(slot, epoch(17))).unwrap();
}

#[test]
fn the_version_that_a_slot_had_last_comes_back() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(1));
    used_slot(heap, slot);
    put_copy(heap, slot, epoch(10));
    assert_eq!(heap.pin(SEGMENT, slot, epoch(10)).unwrap().payload(), bytes(LEN, epoch(10)));
    assert_eq!(kill(heap, slot, epoch(10)), Killed::Dying);
    assert_eq!(reclaim(heap).freed.len(), 1);
    assert_eq!(word(heap, slot), Word::new(epoch(10), State::Free));
    assert!(refused_by_the_word(heap.begin(SEGMENT, &grant(slot, epoch(10)))), "a late begin of it");
    heap.begin(SEGMENT, &grant(slot, epoch(11))).unwrap();
}

#[test]
fn a_reader_keeps_a_copy_while_its_slot_changes_hands() {
    let node = node(4);
    let (heap, slot) = (&node.heap, SlotId(1));
    used_slot(heap, slot);
    let local = node.join("keeps");
    let mut reader = local.reader().unwrap();
    put_copy(heap, slot, epoch(3));
    let Lookup::Hit(guard) = reader.get_at(SEGMENT, slot, epoch(3), now()) else { panic!("it is READY") };
    assert_eq!(kill(heap, slot, epoch(3)), Killed::Dying);
    assert_eq!(reclaim(heap).freed.len(), 0);
    assert!(refused_by_the_word(heap.begin(SEGMENT, &grant(slot, epoch(11)))));
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
fn a_page_is_sealed_with_a_digest_that_is_known() {
    let page = 256 << 10;
    let len = page + 1000;
    let node = TestNode::new(1, 4, 4 << 20);
    let granted = node.begin(KEY, len, Writer::Node).unwrap();
    let Granted { segment, slot, epoch, id, .. } = granted;
    let payload = bytes(len, epoch);
    let context = DigestContext { id, version: epoch, stripe: 0, len };
    let mut digests = vec![];
    let root = context.payload(&payload, |digest| digests.push(digest));
    let claim = || node.heap.claim(segment, slot, epoch).unwrap();
    let whole = Span::new(0, len).unwrap();

    let mut wrong = claim();
    wrong.bytes_mut(whole).copy_from_slice(&payload);
    wrong.seal_page_as(0, digests[0]);
    wrong.seal_page_as(1, digests[1] ^ 1);
    assert!(matches!(wrong.publish(root), Err(CommitError::Root { .. })), "it is believed, and noticed");

    let mut right = claim();
    right.seal_page_as(1, digests[1]);
    // Whoever changes bytes makes the digest unknown, and it is computed.
    right.bytes_mut(Span::new(7, 1).unwrap())[0] ^= 1;
    right.bytes_mut(Span::new(7, 1).unwrap())[0] ^= 1;
    right.publish(root).unwrap();
    let pin = node.heap.pin(segment, slot, epoch).unwrap();
    let stored: Vec<u8> = digests.iter().flat_map(|digest| digest.to_le_bytes()).collect();
    assert_eq!((pin.payload(), pin.digests()), (&payload[..], &stored[..]));
}

#[test]
#[should_panic(expected = "a page is sealed by whoever has all of it")]
fn a_page_that_is_claimed_in_part_is_not_sealed() {
    let node = TestNode::new(1, 4, 1 << 20);
    let Granted { segment, slot, epoch, .. } = node.begin(KEY, 1000, Writer::Node).unwrap();
    let part = Span::new(0, 999).unwrap();
    node.heap.claim_range(segment, slot, epoch, part).unwrap().seal_page_as(0, 1);
}

const SLOTS: usize = 3;

/// What a slot should be.
#[derive(Clone, Copy, Debug)]
struct Expected {
    state: State,
    version: Epoch,
    /// No begin up to this one is let in, ever again.
    fence: Epoch,
    is_copy: bool,
    /// A copy that lies below its slot's fence: what is burnt meanwhile counts.
    has_floor: bool,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Begin,
    Copy,
    Publish,
    Kill,
    Burn,
    Pin,
    Unpin,
    Reclaim,
}

fn steps() -> impl Strategy<Value = Vec<(Step, usize, u64)>> {
    use Step::{Begin, Burn, Copy, Kill, Pin, Publish, Reclaim, Unpin};
    let step = prop::sample::select(vec![
        Begin, Begin, Copy, Copy, Publish, Publish, Kill, Burn, Pin, Unpin, Reclaim,
    ]);
    prop::collection::vec((step, 0..SLOTS, 1..14u64), 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn slots_do_what_a_simple_model_says(steps in steps()) {
        let node = node(SLOTS as u32);
        let heap = &node.heap;
        let new = Expected { state: State::Free, version: Epoch::ZERO, fence: Epoch::ZERO, is_copy: false, has_floor: false };
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
                        let has_floor = is_copy && named <= was.fence;
                        *now = Expected { state: State::Writing, version: named, fence, is_copy, has_floor };
                    }
                }
                Step::Publish if is_this && was.state == State::Writing => {
                    prop_assert_eq!(publish(heap, slot, named), Ok(()));
                    now.state = State::Ready;
                }
                Step::Publish => prop_assert!(publish(heap, slot, named).is_err()),
                Step::Kill => {
                    let killed = kill(heap, slot, named);
                    let dies = is_this && was.state != State::Dead;
                    prop_assert_eq!(killed == Killed::Dying, dies);
                    if dies {
                        now.state = State::Dead;
                    }
                }
                Step::Burn => {
                    let burnt = matches!(heap.burn(SEGMENT, slot, named), Transition::Done(_));
                    prop_assert_eq!(burnt, was.state == State::Free && named > was.fence);
                    if was.state == State::Free || was.has_floor {
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
                let shown = if expected.state == State::Free { expected.fence } else { expected.version };
                prop_assert_eq!(word(heap, SlotId(at as u32)), Word::new(shown, expected.state));
                if let Some(pin) = &pins[at] {
                    prop_assert_eq!(pin.payload(), bytes(LEN, pin.header().word.epoch()));
                }
            }
        }
    }
}
