//! One node and one client in one process: every call of the heap, and its errors.

mod common;

use common::{GrantedObject, TestNode, id_of, now};
use moontide_heap::{
    BeginError, ClientExited, CommitError, Grant, Guard, HeapConfig, HugePages, KillOutcome, LocalHeap,
    LocalReadStats, Lookup, NodeHeap, PayloadWriter, Protection, RecordSpec, Region, Trailer, Transition,
};
use moontide_types::record::{Attributes, KeySection, RecordFlags, RecordLayout, State, Word};
use moontide_types::{
    ClientId, Clock, Epoch, Extent, Generation, Key, MonoTime, NodeId, SegmentId, SlotId, Span, SystemClock,
    Tenant, TenantGeneration, Term,
};

fn hit<'h>(lookup: Lookup<'h>) -> Guard<'h> {
    match lookup {
        Lookup::Hit(guard) => guard,
        other => panic!("expected a hit, got {other:?}"),
    }
}

fn bytes(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(salt)).collect()
}

#[test]
fn objects_of_every_size_are_read_zero_copy() {
    let node = TestNode::new(2, 64, 8 << 20);
    let local = node.connect("sizes");
    let mut reader = local.reader().unwrap();
    for len in [0, 1, 511, 512, 4095, 4096, 4097, 262_143, 262_144, 262_145, 1_000_003] {
        let key = format!("object of {len}");
        let granted = node.put(key.as_bytes(), &bytes(len, 1));
        let guard = hit(reader.get(&granted.id, now()));
        assert_eq!(guard.bytes(), bytes(len, 1));
        assert_eq!(guard.verify(), Some(true));
        assert_eq!((guard.version(), guard.location()), (granted.epoch, (granted.segment, granted.slot)));
        if len >= 4096 {
            assert_eq!(guard.bytes().as_ptr() as usize % 4096, 0);
        }
    }
    assert!(matches!(reader.get(&id_of(b"another"), now()), Lookup::Miss));
}

#[test]
fn client_commit_needs_ended_claim_own_writer_and_matching_root() {
    let node = TestNode::new(1, 8, 1 << 20);
    let local = node.connect("client-put");
    let mut reader = local.reader().unwrap();
    let writer = PayloadWriter::Client(local.client());
    let GrantedObject { segment, slot, epoch, id, .. } = node.begin(b"k", 5000, writer).unwrap();
    assert!(matches!(reader.get(&id, now()), Lookup::Miss), "readable before the commit");
    let mut claim = reader.claim(segment, slot, epoch).unwrap();
    let root = claim.fill(&bytes(5000, 2));
    let commit = |root, writer| node.heap.commit(segment, slot, epoch, root, writer);
    for _ in 0..2 {
        assert!(reader.claim(segment, slot, epoch).is_none(), "one claim at a time");
    }
    assert_eq!(commit(root, writer), Err(CommitError::Claimed));
    drop(claim);
    assert_eq!(commit(root, PayloadWriter::Node), Err(CommitError::Writer));
    assert!(matches!(commit(root ^ 1, writer), Err(CommitError::Root { .. })));
    assert_eq!(commit(root, writer), Ok(()));
    assert_eq!(commit(root, writer), Ok(()), "a repeated commit is harmless");
    assert!(
        matches!(commit(root ^ 1, writer), Err(CommitError::Root { .. })),
        "a repeated commit of other bytes"
    );
    assert_eq!(hit(reader.get(&id, now())).bytes(), bytes(5000, 2));
    assert!(reader.claim(segment, slot, epoch).is_none(), "READY cannot be claimed for writing");
}

#[test]
fn guard_delays_reclaim_until_dropped() {
    let node = TestNode::new(1, 4, 64 << 10);
    let local = node.connect("guard");
    let mut reader = local.reader().unwrap();
    let granted = node.put(b"old", &bytes(40_000, 3));
    let guard = hit(reader.get(&granted.id, now()));
    assert_eq!(node.kill(&granted), KillOutcome::Killed);
    assert_eq!(node.kill(&granted), KillOutcome::AlreadyDead);
    assert!(matches!(reader.get(&granted.id, now()), Lookup::Miss), "a dead record was found");
    assert!(reader.clone_guard(&guard).is_none(), "a guard of a dead record was cloned");
    let reclaimed = node.reclaim();
    assert_eq!((reclaimed.freed.len(), reclaimed.draining), (0, 1));
    assert!(node.begin(b"new", 40_000, PayloadWriter::Node).is_none(), "the space is not free yet");
    assert_eq!(guard.bytes(), bytes(40_000, 3));
    drop(guard);
    assert_eq!(node.reclaim().freed.len(), 1);
    assert_eq!(node.kill(&granted), KillOutcome::AlreadyDead, "a freed record counts as dead");
    let new = node.put(b"new", &bytes(40_000, 4));
    assert_eq!(hit(reader.get(&new.id, now())).bytes(), bytes(40_000, 4));
}

#[test]
fn cloned_guard_outlives_original() {
    let node = TestNode::new(1, 4, 64 << 10);
    let local = node.connect("clone");
    let mut reader = local.reader().unwrap();
    let granted = node.put(b"k", &bytes(100, 5));
    let first = hit(reader.get(&granted.id, now()));
    let second = reader.clone_guard(&first).unwrap();
    drop(first);
    assert_eq!(node.kill(&granted), KillOutcome::Killed);
    assert_eq!(node.reclaim().freed.len(), 0);
    assert_eq!(second.bytes(), bytes(100, 5));
    drop(second);
    assert_eq!(node.reclaim().freed.len(), 1);
    node.assert_empty();
}

#[test]
fn lease_delays_reclaim() {
    let node = TestNode::new(1, 4, 64 << 10);
    let granted = node.put(b"k", b"bytes");
    let until = MonoTime(SystemClock.now().0 + 3_600_000_000_000);
    assert_eq!(node.heap.kill(granted.segment, granted.slot, granted.epoch, until), KillOutcome::Killed);
    let reclaimed = node.heap.reclaim(MonoTime(until.0 - 1));
    assert_eq!((reclaimed.freed.len(), reclaimed.draining), (0, 1));
    assert_eq!(node.heap.reclaim(until).freed.len(), 1);
}

#[test]
fn second_kill_can_only_bring_reclaim_forward() {
    let node = TestNode::new(1, 4, 64 << 10);
    let (first, second) = (node.put(b"first", b"bytes"), node.put(b"second", b"bytes"));
    let kill = |g: &GrantedObject, at: u64| node.heap.kill(g.segment, g.slot, g.epoch, MonoTime(at));
    assert_eq!((kill(&first, 1000), kill(&second, 1000)), (KillOutcome::Killed, KillOutcome::Killed));
    assert_eq!(
        (kill(&first, 2000), kill(&second, 500)),
        (KillOutcome::AlreadyDead, KillOutcome::AlreadyDead)
    );
    let freed = |at| node.heap.reclaim(MonoTime(at)).freed.iter().map(|f| f.slot).collect::<Vec<_>>();
    assert_eq!(freed(499), []);
    assert_eq!(freed(500), [second.slot]);
    assert_eq!(kill(&second, 0), KillOutcome::AlreadyDead, "a freed record counts as dead");
    assert_eq!(freed(999), []);
    assert_eq!(freed(1000), [first.slot]);
}

#[test]
fn node_pin_delays_reclaim() {
    let node = TestNode::new(1, 4, 64 << 10);
    let granted = node.put(b"k", &bytes(600, 6));
    let pin = || node.heap.pin(granted.segment, granted.slot, granted.epoch);
    let held = pin().unwrap();
    assert_eq!(node.kill(&granted), KillOutcome::Killed);
    assert_eq!(node.reclaim().freed.len(), 0);
    assert_eq!(held.payload(), bytes(600, 6));
    drop(held);
    assert!(pin().is_none());
    assert_eq!(node.reclaim().freed.len(), 1);
}

#[test]
fn begin_rejects_invalid_grants() {
    let node = TestNode::new(1, 4, 1 << 20);
    let used = node.put(b"used", &bytes(8192, 7));
    let unused = GrantedObject {
        segment: SegmentId(0),
        slot: SlotId(3),
        epoch: Epoch::new(Term::new(1).unwrap(), 1000).unwrap(),
        extent: Extent { start: 1024, units: 17 },
        id: id_of(b"k"),
    };
    let begin = |granted: GrantedObject| node.begin_granted(&granted, b"k", 8192, PayloadWriter::Node);
    assert_eq!(
        begin(GrantedObject { segment: SegmentId(1), ..unused }),
        Err(BeginError::Segment(SegmentId(1)))
    );
    assert!(matches!(begin(GrantedObject { slot: SlotId(4), ..unused }), Err(BeginError::Slot { .. })));
    assert!(matches!(begin(GrantedObject { slot: used.slot, ..unused }), Err(BeginError::Word { .. })));
    let older = Epoch::new(Term::ZERO, 2000).unwrap();
    assert!(matches!(begin(GrantedObject { epoch: older, ..unused }), Err(BeginError::Term { .. })));
    let newer = Epoch::new(Term::new(2).unwrap(), 1).unwrap();
    assert!(matches!(begin(GrantedObject { epoch: newer, ..unused }), Err(BeginError::Term { .. })));
    let extent = |start, units| begin(GrantedObject { extent: Extent { start, units }, ..unused });
    assert!(matches!(extent(1024, 16), Err(BeginError::Extent { .. })), "too small");
    assert!(matches!(extent(1024, 18), Err(BeginError::Extent { .. })), "too large");
    assert!(matches!(extent(1025, 17), Err(BeginError::Extent { .. })), "not aligned to 4 KiB");
    assert!(matches!(extent(2040, 17), Err(BeginError::Space(_))), "beyond the end");
    let overlap = extent(used.extent.start + 8, 17);
    assert_eq!(overlap.unwrap_err().code(), moontide_types::ErrorCode::Overlap);
    assert_eq!(begin(unused), Ok(()));
    assert_eq!(begin(unused), Ok(()), "a repeated begin of the same writer is harmless");
    let elsewhere = GrantedObject { extent: Extent { start: 1064, units: 17 }, ..unused };
    assert!(matches!(begin(elsewhere), Err(BeginError::Word { .. })), "a repeated begin with another extent");
    let other_key = node.begin_granted(&unused, b"j", 8192, PayloadWriter::Node);
    assert!(matches!(other_key, Err(BeginError::Word { .. })), "a repeated begin of another object");
    let exited = PayloadWriter::Client(ClientId(9));
    assert_eq!(
        node.begin_granted(&unused, b"k", 8192, exited),
        Err(BeginError::Client(ClientId(9))),
        "a client that exited before its request was read"
    );
}

#[test]
fn claim_delays_reclaim_of_killed_write_and_commit_is_refused() {
    let node = TestNode::new(1, 4, 1 << 20);
    let local = node.connect("late");
    let mut reader = local.reader().unwrap();
    let writer = PayloadWriter::Client(local.client());
    let granted = node.begin(b"k", 4096, writer).unwrap();
    let GrantedObject { segment, slot, epoch, .. } = granted;
    let mut claim = reader.claim(segment, slot, epoch).unwrap();
    assert_eq!(node.kill(&granted), KillOutcome::Killed, "the reservation expired");
    assert_eq!(node.reclaim().freed.len(), 0, "the writer may still write, so its range is not reused");
    let root = claim.fill(&bytes(4096, 8));
    drop(claim);
    let found = Word::new(epoch, State::Dead);
    assert_eq!(
        node.heap.commit(segment, slot, epoch, root, writer),
        Err(CommitError::Word { found, named: epoch })
    );
    assert_eq!(node.reclaim().freed.len(), 1);
    assert!(reader.claim(segment, slot, epoch).is_none());
    node.assert_empty();
}

#[test]
fn begin_of_fenced_epoch_is_refused() {
    let node = TestNode::new(1, 4, 1 << 20);
    let granted = GrantedObject {
        segment: SegmentId(0),
        slot: SlotId(2),
        epoch: Epoch::new(Term::new(1).unwrap(), 50).unwrap(),
        extent: Extent { start: 0, units: 1 },
        id: id_of(b"k"),
    };
    assert!(matches!(node.heap.fence_epoch(SegmentId(0), SlotId(2), granted.epoch), Transition::Done(_)));
    let refused = node.begin_granted(&granted, b"k", 10, PayloadWriter::Node);
    assert!(matches!(refused, Err(BeginError::Word { .. })));
}

#[test]
fn lookup_returns_closed_after_heartbeat_timeout_or_close() {
    let node = TestNode::new(1, 4, 1 << 20);
    let local = node.connect("silent");
    let mut reader = local.reader().unwrap();
    let granted = node.put(b"k", b"bytes");
    let later = MonoTime(now().0 + 6_000_000_000);
    assert!(matches!(reader.get(&granted.id, later), Lookup::Closed), "no heartbeat for 6 s");
    node.heap.index_region().heartbeat(later);
    assert!(matches!(reader.get(&granted.id, later), Lookup::Hit(_)));
    node.heap.index_region().set_open(false);
    assert!(matches!(reader.get(&granted.id, later), Lookup::Closed));
}

#[test]
fn lookup_returns_full_at_pin_limit() {
    let node = TestNode::new(1, 2000, 4 << 20);
    let local = node.connect("full");
    let mut reader = local.reader().unwrap();
    let granted = node.put(b"k", &[1; 100]);
    let guards: Vec<_> = (0..512).map(|_| hit(reader.get(&granted.id, now()))).collect();
    assert_eq!(reader.pinned_bytes(), 51_200);
    assert!(matches!(reader.get(&granted.id, now()), Lookup::Full));
    drop(guards);
    assert_eq!(reader.pinned_bytes(), 0);
    assert!(matches!(reader.get(&granted.id, now()), Lookup::Hit(_)));
}

#[test]
fn guard_of_dropped_reader_still_delays_reclaim() {
    let node = TestNode::new(1, 4, 1 << 20);
    let local = node.connect("dropped-reader");
    let granted = node.put(b"k", b"bytes");
    let mut old = local.reader().unwrap();
    let guard = hit(old.get(&granted.id, now()));
    drop(old);
    let mut new = local.reader().unwrap();
    for _ in 0..100 {
        hit(new.get(&granted.id, now()));
    }
    assert_eq!(node.kill(&granted), KillOutcome::Killed);
    assert_eq!(node.reclaim().freed.len(), 0);
    drop(guard);
    assert_eq!(node.reclaim().freed.len(), 1);
}

#[test]
fn touched_slots_are_reported_once() {
    let node = TestNode::new(2, 100, 1 << 20);
    let local = node.connect("touch");
    let mut reader = local.reader().unwrap();
    let granted: Vec<_> = (0..10u8).map(|n| node.put(&[n], &[n; 10])).collect();
    for granted in &granted[3..6] {
        hit(reader.get(&granted.id, now()));
    }
    let touched = || {
        let mut slots = vec![];
        node.heap.ledgers().clients()[0].take_touched(|slot| slots.push(slot));
        slots.sort();
        slots
    };
    let mut expected: Vec<u64> =
        granted[3..6].iter().map(|g| u64::from(g.segment.0) * 100 + u64::from(g.slot.0)).collect();
    expected.sort();
    assert_eq!(touched(), expected);
    assert_eq!(touched(), []);
}

#[test]
fn client_exit_kills_its_open_writes() {
    let node = TestNode::new(1, 4, 1 << 20);
    let local = node.connect("exited");
    let mut reader = local.reader().unwrap();
    let object = node.put(b"k", b"bytes");
    let _guard = hit(reader.get(&object.id, now()));
    let granted = node.begin(b"half", 4096, PayloadWriter::Client(local.client())).unwrap();
    let _claim = reader.claim(granted.segment, granted.slot, granted.epoch).unwrap();
    // The process counts as exited: from here on its pins have no effect.
    // SAFETY: nothing that it pinned is used any more.
    let exited = unsafe { ClientExited::assume(local.client()) };
    assert_eq!(node.heap.client_exited(exited), [(granted.segment, granted.slot, granted.epoch)]);
    assert_eq!(node.heap.client_exited(exited), [], "an exit is handled once");
    assert_eq!(node.kill(&object), KillOutcome::Killed);
    assert_eq!(node.reclaim().freed.len(), 2);
    node.assert_empty();
}

#[test]
fn pinned_bytes_limit_ignores_dropped_guards() {
    let node = TestNode::new(1, 100, 4 << 20);
    let local = node.connect_with_limit("limit", 10_000);
    let mut reader = local.reader().unwrap();
    let objects: Vec<_> = (0..30u8).map(|n| node.put(&[n], &[n; 1000])).collect();
    let mut guards: Vec<_> = objects[..10].iter().map(|o| hit(reader.get(&o.id, now()))).collect();
    assert_eq!(reader.pinned_bytes(), 10_000);
    assert!(matches!(reader.get(&objects[10].id, now()), Lookup::Full));
    assert!(reader.clone_guard(&guards[0]).is_none());
    guards.truncate(3);
    assert_eq!(reader.pinned_bytes(), 3_000);
    guards.extend(objects[10..17].iter().map(|o| hit(reader.get(&o.id, now()))));
    assert!(matches!(reader.get(&objects[20].id, now()), Lookup::Full));
    drop(guards);
    // One at a time without limit: dropped guards do not count.
    for object in objects.iter().cycle().take(1000) {
        hit(reader.get(&object.id, now()));
    }
    assert_eq!(reader.pinned_bytes(), 0);
}

#[test]
fn node_claim_is_exclusive_and_blocks_commit() {
    let node = TestNode::new(1, 4, 64 << 10);
    let GrantedObject { segment, slot, epoch, .. } = node.begin(b"k", 100, PayloadWriter::Node).unwrap();
    let claim = || node.heap.claim(segment, slot, epoch);
    let commit = |root| node.heap.commit(segment, slot, epoch, root, PayloadWriter::Node);
    let mut first = claim().unwrap();
    assert!(claim().is_none());
    assert!(claim().is_none(), "a refused claim must not end the existing one");
    let root = first.fill(&bytes(100, 9));
    assert_eq!(commit(root), Err(CommitError::Claimed));
    drop(first);
    let again = claim().expect("the record can be claimed again").fill(&bytes(100, 10));
    assert!(matches!(commit(root), Err(CommitError::Root { .. })));
    assert_eq!(commit(again), Ok(()));
    assert!(claim().is_none());
}

#[test]
fn guard_of_another_heap_cannot_be_cloned() {
    let (first, second) = (TestNode::new(1, 4, 64 << 10), TestNode::new(1, 4, 64 << 10));
    let (local_first, local_second) = (first.connect("of-first"), second.connect("of-second"));
    let object = first.put(b"k", b"bytes");
    let guard = hit(local_first.reader().unwrap().get(&object.id, now()));
    assert!(local_second.reader().unwrap().clone_guard(&guard).is_none());
}

#[test]
fn claim_is_refused_to_all_but_granted_writer() {
    let node = TestNode::new(1, 4, 64 << 10);
    let (mine, other) = (node.connect("mine"), node.connect("other"));
    let (mut my_reader, mut other_reader) = (mine.reader().unwrap(), other.reader().unwrap());
    let GrantedObject { segment, slot, epoch, .. } =
        node.begin(b"k", 100, PayloadWriter::Client(mine.client())).unwrap();
    assert!(other_reader.claim(segment, slot, epoch).is_none());
    assert!(my_reader.claim(segment, slot, epoch).is_some());
    let GrantedObject { segment, slot, epoch, .. } =
        node.begin(b"of the node", 100, PayloadWriter::Node).unwrap();
    assert!(my_reader.claim(segment, slot, epoch).is_none());
}

#[test]
fn record_never_becomes_ready_under_a_claim() {
    // Failure: a thread claimed the record again between the node's ledger scan and the word's change to READY, and
    // wrote bytes that readers relied on. Cause: the scan came first. Fix: the word is closed before the scan.
    let node = TestNode::new(1, 4, 64 << 10);
    let local = node.connect("reclaim-race");
    let writer = PayloadWriter::Client(local.client());
    for round in 0..2000u32 {
        let granted = node.begin(&round.to_le_bytes(), 64, writer).unwrap();
        let GrantedObject { segment, slot, epoch, .. } = granted;
        let root = local.reader().unwrap().claim(segment, slot, epoch).unwrap().fill(&[1; 64]);
        std::thread::scope(|scope| {
            let again = scope.spawn(|| {
                let mut reader = local.reader().unwrap();
                let claim = reader.claim(segment, slot, epoch);
                // While this thread holds a claim, the record must not become READY.
                claim.is_some_and(|_held| (0..200).any(|_| node.heap.pin(segment, slot, epoch).is_some()))
            });
            while node.heap.commit(segment, slot, epoch, root, writer) == Err(CommitError::Claimed) {
                std::thread::yield_now();
            }
            assert!(!again.join().unwrap(), "READY under a claim in round {round}");
        });
        assert_eq!(node.kill(&granted), KillOutcome::Killed);
        assert_eq!(node.reclaim().freed.len(), 1);
    }
}

#[test]
fn segment_of_another_node_is_not_attached() {
    let (first, second) = (TestNode::new(1, 4, 64 << 10), TestNode::of(2, 1, 4, 64 << 10));
    let local = first.connect("other-node");
    let segment = second.heap.segments().remove(0);
    let import = |region: &Region, protection| {
        // SAFETY: nothing is written through it.
        let fd = unsafe { region.fd() }.try_clone_to_owned().unwrap();
        Region::import(fd, region.len(), protection).unwrap()
    };
    let headers = import(segment.headers(), Protection::OwnerWrites);
    let payload = import(segment.payload(), Protection::AllWrite);
    assert!(local.attach(segment.shape(), headers, payload).is_err());
}

#[test]
fn node_threads_fill_disjoint_ranges_of_one_record() {
    let page = 256 << 10;
    let len = 2 * page + 1000;
    let node = TestNode::new(1, 4, 4 << 20);
    let granted = node.begin(b"in pieces", len as u64, PayloadWriter::Node).unwrap();
    let GrantedObject { segment, slot, epoch, .. } = granted;
    let payload = bytes(len, 5);
    let span = |from: usize, to: usize| Span::new(from as u64, (to - from) as u64).unwrap();
    let claim = |from, to| node.heap.claim_range(segment, slot, epoch, span(from, to));

    // Four ranges, two of which share the second page.
    let borders = [0, page, page + 77, 2 * page, len];
    std::thread::scope(|scope| {
        for border in borders.windows(2) {
            let (from, to) = (border[0], border[1]);
            let (claim, payload, span) = (&claim, &payload, &span);
            scope.spawn(move || {
                let mut claim = claim(from, to).expect("no other claim on these bytes");
                claim.bytes_mut(span(from, to)).copy_from_slice(&payload[from..to]);
                claim.set_written();
                if (from, to) == (0, page) {
                    claim.digest_page(0);
                }
            });
        }
    });

    let first = claim(10, 20).unwrap();
    assert!(claim(19, 30).is_none(), "byte 19 is claimed");
    assert!(claim(20, 30).is_some(), "these bytes are not claimed");
    assert!(claim(len - 1, len + 1).is_none(), "beyond the end");
    assert!(node.heap.claim(segment, slot, epoch).is_none(), "the whole record overlaps a claim");
    let root =
        moontide_types::record::DigestContext { id: granted.id, version: epoch, stripe: 0, len: len as u64 }
            .payload(&payload, |_| ());
    assert_eq!(node.heap.commit(segment, slot, epoch, root, PayloadWriter::Node), Err(CommitError::Claimed));
    drop(first);

    assert!(
        matches!(
            node.heap.commit(segment, slot, epoch, root, PayloadWriter::Node),
            Err(CommitError::Root { .. })
        ),
        "pages that were written in pieces are not digested yet"
    );
    assert_eq!(node.heap.claim(segment, slot, epoch).unwrap().complete(), root);
    // A write clears the page's digest, and it is computed again.
    claim(300_000, 300_001).unwrap().bytes_mut(span(300_000, 300_001))[0] ^= 1;
    assert_ne!(node.heap.claim(segment, slot, epoch).unwrap().complete(), root);
    claim(300_000, 300_001).unwrap().bytes_mut(span(300_000, 300_001))[0] ^= 1;
    assert_eq!(node.heap.claim(segment, slot, epoch).unwrap().complete(), root);
    // The same for a page that the same claim has digested before.
    let mut again = claim(0, page).unwrap();
    again.digest_page(0);
    again.bytes_mut(span(3, 4))[0] ^= 1;
    drop(again);
    assert_ne!(node.heap.claim(segment, slot, epoch).unwrap().complete(), root);
    claim(3, 4).unwrap().bytes_mut(span(3, 4))[0] ^= 1;
    assert_eq!(node.heap.claim(segment, slot, epoch).unwrap().complete(), root);
    node.heap.commit(segment, slot, epoch, root, PayloadWriter::Node).unwrap();
    let pin = node.heap.pin(segment, slot, epoch).unwrap();
    assert_eq!(pin.payload(), payload);
    assert_eq!(pin.digests().len(), 3 * 8);
    assert!(claim(0, 1).is_none(), "a READY record was claimed");
}

#[test]
fn segments_inherit_node_generation() {
    for generation in [Generation(3), Generation(4)] {
        let (node, huge) = (NodeId(1), HugePages::Auto);
        let heap = NodeHeap::create(HeapConfig { node, generation, slots_max: 16, huge }).unwrap();
        for _ in 0..2 {
            assert_eq!(heap.add_segment(8, 64, huge).unwrap().shape().generation, generation);
        }
    }
}

#[test]
fn for_each_record_returns_tenant_key_and_attributes() {
    let node = TestNode::new(1, 8, 1 << 20);
    let (tenant, key) = (Tenant::new("tenant").unwrap(), Key::new(b"full\0key").unwrap());
    let attributes = Attributes { user_data: Some((*b"a note").into()), ..Attributes::default() };
    let mut stored = vec![];
    attributes.encode(&mut stored);
    let key = KeySection { tenant, key };
    let layout =
        RecordLayout::new(5000, key.encoded_len() as u32, stored.len() as u32, RecordFlags::NONE).unwrap();
    let record = RecordSpec {
        id: id_of(b"full\0key"),
        flags: RecordFlags::NONE,
        object_len: 5000,
        stripe_index: 0,
        stripe_count: 1,
        stripe_offset: 0,
        stripe_len: 5000,
        key,
        attributes: &attributes,
        id_key: 1,
        tenant_generation: TenantGeneration(0),
    };
    let (slot, epoch) = (SlotId(3), Epoch::new(Term::new(1).unwrap(), 1000).unwrap());
    let extent = Extent { start: 1024, units: layout.units() };
    let grant = Grant { slot, epoch, term: epoch.term(), extent, record, writer: PayloadWriter::Node };
    node.heap.begin(SegmentId(0), &grant).unwrap();
    node.put(b"plain", b"bytes");

    let segment = node.heap.segment(SegmentId(0)).unwrap();
    let held = || {
        let mut held = vec![];
        segment.for_each_record(|slot, _, trailer| {
            let own = |t: Trailer<'_>| {
                (t.tenant.as_str().to_owned(), t.key.as_bytes().to_vec(), t.attributes.to_vec())
            };
            held.push((slot, trailer.map(own)));
        });
        held
    };
    let of_plain = (SlotId(0), Some((Tenant::DEFAULT.as_str().to_owned(), b"plain".to_vec(), vec![])));
    let of_full = ("tenant".to_owned(), b"full\0key".to_vec(), stored);
    assert_eq!(held(), [of_plain.clone(), (slot, Some(of_full.clone()))]);

    // A faulty client overwrites the key, and then the attributes.
    for section in [layout.key(), layout.attributes()] {
        let at = extent.span().offset() + section.end() - 1;
        // SAFETY: inside the payload, and no other thread accesses it at this time.
        let flip = || unsafe { *segment.payload().base().add(at as usize).as_ptr() ^= 1 };
        flip();
        assert_eq!(held(), [of_plain.clone(), (slot, None)]);
        flip();
    }
    assert_eq!(held(), [of_plain, (slot, Some(of_full))]);
}

#[test]
fn node_publish_computes_digests_and_verifies_root() {
    let page = 256 << 10;
    let node = TestNode::new(1, 4, 4 << 20);
    let payload = bytes(page + 1000, 11);
    let granted = node.begin(b"k", payload.len() as u64, PayloadWriter::Node).unwrap();
    let GrantedObject { segment, slot, epoch, id, .. } = granted;
    let publish = |root| node.heap.publish(segment, slot, epoch, root);
    let whole = Span::new(0, payload.len() as u64).unwrap();
    let mut first = node.heap.claim(segment, slot, epoch).unwrap();
    first.bytes_mut(whole).copy_from_slice(&payload);
    first.set_written();
    drop(first);
    let root = node.heap.claim(segment, slot, epoch).unwrap().complete();
    // Clears the digests again: publishing computes them.
    node.heap.claim(segment, slot, epoch).unwrap().bytes_mut(whole).copy_from_slice(&payload);

    let last = Span::new(payload.len() as u64 - 1, 1).unwrap();
    let other = node.heap.claim_range(segment, slot, epoch, last).unwrap();
    assert_eq!(publish(root), Err(CommitError::Claimed), "another thread has claimed the last byte");
    drop(other);
    assert_eq!(publish(root ^ 1), Err(CommitError::Root { found: root, named: root ^ 1 }));
    let empty_claim = node.heap.claim_range(segment, slot, epoch, Span::new(0, 0).unwrap()).unwrap();
    assert_eq!(publish(root), Ok(()), "an empty claim conflicts with no other");
    assert_eq!(publish(root), Ok(()), "a repeated publish is harmless");
    assert_eq!(publish(root ^ 1), Err(CommitError::Root { found: root, named: root ^ 1 }));
    drop(empty_claim);
    let local = node.connect("publish");
    assert_eq!(hit(local.reader().unwrap().get(&id, now())).bytes(), payload);

    assert_eq!(node.kill(&granted), KillOutcome::Killed);
    let found = Word::new(epoch, State::Dead);
    assert_eq!(publish(root), Err(CommitError::Word { found, named: epoch }));
    let missing = SegmentId(9);
    assert_eq!(
        node.heap.publish(missing, slot, epoch, root),
        Err(CommitError::Slot { segment: missing, slot })
    );
    let GrantedObject { segment, slot, epoch, .. } =
        node.begin(b"j", 1, PayloadWriter::Client(local.client())).unwrap();
    assert_eq!(node.heap.publish(segment, slot, epoch, root), Err(CommitError::Writer));
    // Killed while it is claimed.
    let granted = node.begin(b"i", 1, PayloadWriter::Node).unwrap();
    let mut claim = node.heap.claim(granted.segment, granted.slot, granted.epoch).unwrap();
    let root = claim.fill(&[1]);
    assert_eq!(node.kill(&granted), KillOutcome::Killed);
    assert!(matches!(claim.publish(root), Err(CommitError::Word { .. })));
}

#[test]
fn record_with_unwritten_bytes_is_not_published() {
    // Failure: a record that was committed without its bytes returned those of an earlier record, perhaps of another tenant.
    // Cause: without digests nothing was compared, and with them a writer could try roots. Fix: the node knows which bytes
    // have arrived, and compares nothing before all of them have.
    let len = 300_000;
    let node = TestNode::new(1, 4, 1 << 20);
    let span = |from: u64, to: u64| Span::new(from, to - from).unwrap();
    let secret = node.put(b"secret", &bytes(len as usize, 1));
    assert_eq!(node.kill(&secret), KillOutcome::Killed);
    assert_eq!(node.reclaim().freed.len(), 1);
    let granted = node.begin(b"k", len, PayloadWriter::Node).unwrap();
    let GrantedObject { segment, slot, epoch, id, .. } = granted;
    let publish = |root| node.heap.publish(segment, slot, epoch, root);
    let commit = |root| node.heap.commit(segment, slot, epoch, root, PayloadWriter::Node);
    let write = |from: u64, to: u64, is_whole: bool| {
        let mut claim = node.heap.claim_range(segment, slot, epoch, span(from, to)).unwrap();
        claim.bytes_mut(span(from, to)).fill(7);
        if is_whole {
            claim.set_written();
        }
    };
    // The root of what is in the memory is the right one, and no root tells more than another.
    let found = || node.heap.claim(segment, slot, epoch).unwrap().complete();
    let refused = || [found(), found() ^ 1].map(|root| (publish(root), commit(root)));
    let incomplete = [(Err(CommitError::Incomplete), Err(CommitError::Incomplete)); 2];
    assert_eq!(refused(), incomplete, "nothing is written");
    write(0, 100_000, true);
    write(100_001, len, true);
    assert_eq!(refused(), incomplete, "one byte is missing");
    write(90_000, 110_000, false);
    assert_eq!(refused(), incomplete, "a write failed in the middle");
    std::thread::scope(|scope| {
        scope.spawn(|| write(100_000, 100_001, true));
        scope.spawn(|| write(5, 90_000, true));
    });
    let root = found();
    assert_eq!(publish(root ^ 1), Err(CommitError::Root { found: root, named: root ^ 1 }));
    assert_eq!(publish(root), Ok(()));
    let local = node.connect("unwritten");
    assert!(hit(local.reader().unwrap().get(&id, now())).bytes().iter().all(|&byte| byte == 7));

    // The memory of the next record of this slot is unwritten again; an empty one has no bytes to write.
    assert_eq!(node.kill(&granted), KillOutcome::Killed);
    assert_eq!(node.reclaim().freed.len(), 1);
    let again = node.begin(b"k", len, PayloadWriter::Node).unwrap();
    assert_eq!(node.heap.publish(again.segment, again.slot, again.epoch, root), Err(CommitError::Incomplete));
    let empty = node.begin(b"empty", 0, PayloadWriter::Node).unwrap();
    let root = node.heap.claim(empty.segment, empty.slot, empty.epoch).unwrap().complete();
    assert_eq!(node.heap.publish(empty.segment, empty.slot, empty.epoch, root), Ok(()));
}

#[test]
fn concurrent_rewrite_of_same_bytes_never_fails_publish() {
    // Failure: a commit was refused as corrupt although all bytes were written. Cause: a write from an abandoned
    // connection came between digesting and committing, and cleared digests. Fix: one step under one claim.
    let node = TestNode::new(1, 4, 64 << 10);
    let payload = bytes(5000, 12);
    for round in 0..300u32 {
        let granted = node.begin(&round.to_le_bytes(), 5000, PayloadWriter::Node).unwrap();
        let GrantedObject { segment, slot, epoch, .. } = granted;
        let root = node.heap.claim(segment, slot, epoch).unwrap().fill(&payload);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let part = Span::new(1000, 1000).unwrap();
                // Until it is READY.
                while let Some(probe) = node.heap.claim_range(segment, slot, epoch, Span::new(0, 0).unwrap())
                {
                    drop(probe);
                    if let Some(mut late) = node.heap.claim_range(segment, slot, epoch, part) {
                        late.bytes_mut(part).copy_from_slice(&payload[1000..2000]);
                    }
                }
            });
            loop {
                match node.heap.publish(segment, slot, epoch, root) {
                    Err(CommitError::Claimed) => std::thread::yield_now(),
                    done => break assert_eq!(done, Ok(()), "round {round}"),
                }
            }
        });
        let pin = node.heap.pin(segment, slot, epoch).unwrap();
        assert_eq!(pin.payload(), payload);
        drop(pin);
        assert_eq!(node.kill(&granted), KillOutcome::Killed);
        assert_eq!(node.reclaim().freed.len(), 1);
    }
}

#[test]
fn local_read_stats_sum_over_threads_and_exited_clients() {
    let node = TestNode::new(1, 8, 1 << 20);
    let object = node.put(b"k", &[1; 1000]);
    let large = node.put(b"large", &[1; 5000]);
    let (first, second) = (node.connect_with_limit("reads-1", 3000), node.connect("reads-2"));
    let read = |local: &LocalHeap, hits: u64, misses: u64| {
        let mut reader = local.reader().unwrap();
        for _ in 0..hits {
            drop(hit(reader.get(&object.id, now())));
            // The master has counted this read.
            drop(hit(reader.get_at(object.segment, object.slot, object.epoch, now())));
        }
        for _ in 0..misses {
            assert!(matches!(reader.get(&id_of(b"another"), now()), Lookup::Miss));
        }
    };
    assert_eq!(node.heap.ledgers().reads(), LocalReadStats::default());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| read(&first, 100, 10));
            scope.spawn(|| read(&second, 50, 0));
        }
    });
    // A read above the pin limit, and one while the index is closed, count as neither.
    assert!(matches!(first.reader().unwrap().get(&large.id, now()), Lookup::Full));
    node.heap.index_region().set_open(false);
    assert!(matches!(second.reader().unwrap().get(&large.id, now()), Lookup::Closed));
    node.heap.index_region().set_open(true);
    let all = LocalReadStats { hits: 600, misses: 40, bytes: 600_000 };
    assert_eq!(node.heap.ledgers().reads(), all);
    let of_first = node.heap.ledgers().get(first.client()).unwrap().reads();
    assert_eq!(of_first, LocalReadStats { hits: 400, misses: 40, bytes: 400_000 });

    // SAFETY: nothing that it pinned is used any more.
    let exited = unsafe { ClientExited::assume(first.client()) };
    node.heap.client_exited(exited);
    node.heap.client_exited(exited);
    assert_eq!(node.heap.ledgers().reads(), all, "reads of an exited client are counted once");
    read(&second, 1, 0);
    assert_eq!(node.heap.ledgers().reads(), LocalReadStats { hits: 601, misses: 40, bytes: 601_000 });
}
