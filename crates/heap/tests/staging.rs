//! Staging: buffers are allocated, filled, published, read and released, and no buffer is reused while it is read.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{connect_to_heap, id_of, now, record_of};
use moontide_heap::{
    BeginError, Grant, HeapConfig, HugePages, KillOutcome, LocalHeap, Lookup, NodeHeap, NodePin,
    PayloadWriter, PublishFailure, RecordSpec, StageError, StagedRecord, Staging, StagingBuffer, Transition,
};
use moontide_rt::SplitMix64;
use moontide_types::record::{DigestContext, RecordFlags, RecordLayout, State, Word};
use moontide_types::{Epoch, ErrorCode, Extent, Generation, MonoTime, NodeId, ObjectId, SlotId, Span, Term};

const PAGE: u64 = 4096;

fn version(n: u64) -> Epoch {
    Epoch::new(Term::new(3).unwrap(), n).unwrap()
}

/// A heap with an ordinary segment of 16 slots and 1 MiB, and a staging of `slots` and `pages`.
fn heap_with(slots: u32, pages: u32) -> (Arc<NodeHeap>, Arc<Staging>) {
    let huge = HugePages::Auto;
    let config = HeapConfig { node: NodeId(1), generation: Generation(1), slots_max: 4096, huge };
    let heap = Arc::new(NodeHeap::create(config).unwrap());
    heap.add_segment(16, 2048, huge).unwrap().adopt_term(Term::new(3).unwrap());
    let staging = Arc::new(Staging::new(&heap, slots, pages * 8, huge).unwrap());
    heap.index_region().set_open(true);
    heap.heartbeat();
    (heap, staging)
}

/// Returns a payload that is unique to the object and the version.
fn payload_of(id: ObjectId, version: Epoch, len: u64) -> Vec<u8> {
    let salt = id.as_u128() as u64 ^ version.bits().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len).map(|i| (salt.rotate_left(i as u32 % 64) as u8).wrapping_add(i as u8)).collect()
}

fn digests_of(record: &RecordSpec<'_>, version: Epoch, payload: &[u8]) -> (Vec<u8>, u64) {
    let RecordSpec { id, stripe_index: stripe, stripe_len: len, .. } = *record;
    let mut digests = vec![];
    let root = DigestContext { id, version, stripe, len }
        .payload(payload, |digest| digests.extend_from_slice(&digest.to_le_bytes()));
    (digests, root)
}

/// Fills a buffer, as a read from disk does, and publishes it.
fn fill(
    mut buffer: StagingBuffer,
    key: &[u8],
    version: Epoch,
    len: u64,
    at: u64,
) -> Result<StagedRecord, PublishFailure> {
    let record = record_of(key, len);
    let payload = payload_of(record.id, version, len);
    let (digests, root) = digests_of(&record, version, &payload);
    buffer.bytes_mut().fill(0xee);
    buffer.bytes_mut()[at as usize..][..len as usize].copy_from_slice(&payload);
    buffer.publish(version, at, record, &digests, root, true)
}

fn stage(staging: &Arc<Staging>, key: &[u8], version: Epoch, len: u64) -> StagedRecord {
    let buffer = staging.alloc((len + 600).next_multiple_of(PAGE)).expect("enough space");
    fill(buffer, key, version, len, 0).unwrap()
}

/// Asserts that the node's pin and a client's guard see the record.
fn assert_readable(local: &LocalHeap, key: &[u8], staged: &StagedRecord, len: u64) {
    let expected = payload_of(id_of(key), staged.version(), len);
    let pin = staged.pin().expect("READY");
    assert_eq!(pin.payload(), expected);
    assert_eq!(pin.digests(), digests_of(&record_of(key, len), staged.version(), &expected).0);
    let mut reader = local.reader().unwrap();
    for found in [
        reader.get(&id_of(key), now()),
        reader.get_at(staged.segment(), staged.slot(), staged.version(), now()),
    ] {
        let Lookup::Hit(guard) = found else { panic!("expected a hit, got {found:?}") };
        assert_eq!(guard.bytes(), expected);
        assert_eq!(guard.verify(), Some(true));
        assert_eq!(guard.version(), staged.version());
    }
}

#[test]
fn staged_record_of_every_size_is_readable() {
    let (heap, staging) = heap_with(8, 512);
    let local = connect_to_heap(&heap, "staged", u64::MAX);
    for (n, len) in [0, 1, 511, 4095, 4096, 5000, 262_144, 700_001].into_iter().enumerate() {
        let (key, version) = (format!("object of {len}"), version(n as u64 + 1));
        let staged = stage(&staging, key.as_bytes(), version, len);
        assert_readable(&local, key.as_bytes(), &staged, len);
        let mut held = vec![];
        staging.segment().for_each_record(|slot, header, trailer| {
            if header.word.state() == State::Ready {
                held.push((slot, header.word, trailer.unwrap().key.as_bytes().to_vec()));
            }
        });
        assert_eq!(held, [(staged.slot(), Word::new(version, State::Ready), key.into_bytes())]);
    }
    assert_eq!(staging.in_use().draining_buffers, 8, "nothing ran out of space, so nothing was reclaimed");
    assert!(heap.index_region().index().is_empty());
}

#[test]
fn staged_payload_may_start_at_an_offset() {
    let (heap, staging) = heap_with(4, 64);
    let local = connect_to_heap(&heap, "offset", u64::MAX);
    // A whole object starts at a multiple of 4 KiB, a small one at a multiple of 512 bytes.
    for (len, at, buffer_len) in [(8000, PAGE, 4 * PAGE), (700, 512, PAGE), (700, 4096 - 1536, PAGE)] {
        let staged = fill(staging.alloc(buffer_len).unwrap(), b"k", version(1), len, at).unwrap();
        assert_readable(&local, b"k", &staged, len);
        let pin = staged.pin().unwrap();
        assert_eq!(pin.header().payload_offset, staged.extent().span().offset());
        let (address, length) = staging.memory();
        let offset = pin.payload().as_ptr().addr() - address;
        assert_eq!(offset as u64, staged.extent().span().offset());
        assert!(offset + len as usize <= length);
    }
}

#[test]
fn staging_buffers_are_aligned_disjoint_and_freed_on_drop() {
    let (_heap, staging) = heap_with(8, 16);
    let mut buffers: Vec<_> = (1..=4).map(|pages| staging.alloc(pages * PAGE).unwrap()).collect();
    for (n, buffer) in buffers.iter_mut().enumerate() {
        assert_eq!(buffer.len(), (n as u64 + 1) * PAGE);
        assert_eq!(buffer.bytes_mut().as_ptr().addr() % 4096, 0);
        buffer.bytes_mut().fill(n as u8 + 1);
    }
    for (n, buffer) in buffers.iter_mut().enumerate() {
        assert!(buffer.bytes_mut().iter().all(|&byte| byte == n as u8 + 1));
    }
    assert_eq!((staging.free_bytes(), staging.total_bytes()), (6 * PAGE, 16 * PAGE));
    assert_eq!(staging.in_use().used_buffers, 4);
    drop(buffers);
    assert_eq!((staging.free_bytes(), staging.in_use().used_buffers), (16 * PAGE, 0));
    assert_eq!(staging.alloc(16 * PAGE).unwrap().len(), 16 * PAGE);
}

#[test]
fn staging_alloc_fails_when_full_and_succeeds_after_release() {
    let (heap, staging) = heap_with(3, 4);
    assert!(staging.alloc(5 * PAGE).is_none(), "longer than the memory");
    assert!(staging.alloc(1 << 50).is_none());
    let staged: Vec<_> = (1..4).map(|n| stage(&staging, &[n], version(n.into()), 3000)).collect();
    assert!(staging.alloc(PAGE).is_none(), "a page is free, but no slot");
    let pin = heap.pin(staged[0].segment(), staged[0].slot(), staged[0].version()).unwrap();
    drop(staged);
    let in_use = staging.in_use();
    assert_eq!((in_use.used_buffers, in_use.draining_buffers, in_use.free_bytes), (0, 3, PAGE));
    // The test does not call the heap's reclaim: `alloc` reclaims as needed. One slot is still pinned.
    let two: Vec<_> = (0..2).map(|_| staging.alloc(PAGE).unwrap()).collect();
    assert!(staging.alloc(PAGE).is_none());
    assert_eq!(pin.payload(), payload_of(id_of(&[1]), version(1), 3000));
    drop(pin);
    assert!(staging.alloc(PAGE).is_some());
    drop(two);
    assert!(staging.alloc(4 * PAGE).is_some(), "all of it is contiguous again");
}

#[test]
fn staging_buffer_is_free_after_node_reclaim() {
    let (heap, staging) = heap_with(1, 4);
    let staged = stage(&staging, b"k", version(4), 9000);
    let (slot, extent) = (staged.slot(), staged.extent());
    drop(staged);
    let freed = heap.reclaim(now()).freed;
    assert_eq!(freed.len(), 1);
    assert_eq!((freed[0].segment, freed[0].slot), (staging.segment().shape().segment, slot));
    assert_eq!(freed[0].extent, extent, "the extent of the record, not of the buffer");
    assert_eq!(staging.free_bytes(), staging.total_bytes());
    assert_eq!(staging.segment().taken_units(), 0);
}

#[test]
fn lease_delays_reuse_of_staging_buffer() {
    let (heap, staging) = heap_with(1, 4);
    let staged = stage(&staging, b"k", version(4), 100);
    let (segment, slot) = (staged.segment(), staged.slot());
    staged.release(MonoTime(now().0 + 3_600_000_000_000));
    assert!(staging.alloc(PAGE).is_none());
    assert_eq!(
        heap.kill(segment, slot, version(4), MonoTime(0)),
        KillOutcome::AlreadyDead,
        "the second kill moves the time forward"
    );
    assert!(staging.alloc(PAGE).is_some());
}

#[test]
fn staging_slot_holds_versions_in_any_order() {
    let (heap, staging) = heap_with(1, 4);
    let local = connect_to_heap(&heap, "order", u64::MAX);
    let mut last = None;
    for n in [9, 5, 4, 4, 4, 1, 12, 12, 2, 1] {
        let staged = stage(&staging, b"k", version(n), 5000);
        assert_readable(&local, b"k", &staged, 5000);
        let location = (staged.segment(), staged.slot());
        if let Some(last) = last.filter(|&last| last != n) {
            let found = local.reader().unwrap().get_at(location.0, location.1, version(last), now());
            assert!(matches!(found, Lookup::Miss), "version {last} was found after its release");
        }
        last = Some(n);
        drop(staged);
        assert!(local.reader().unwrap().get(&id_of(b"k"), now()).is_miss());
    }
}

trait IsMiss {
    fn is_miss(&self) -> bool;
}

impl IsMiss for Lookup<'_> {
    fn is_miss(&self) -> bool {
        matches!(self, Lookup::Miss)
    }
}

#[test]
fn object_staged_and_promoted_is_readable_from_either() {
    let (heap, staging) = heap_with(4, 16);
    let local = connect_to_heap(&heap, "both", u64::MAX);
    let mut reader = local.reader().unwrap();
    let (record, at) = (record_of(b"k", 1000), version(7));
    let payload = payload_of(record.id, at, 1000);
    let root = digests_of(&record, at, &payload).1;
    let granted = heap.segments()[0].shape().segment;
    let mut location_of = |expected: &str| match reader.get(&id_of(b"k"), now()) {
        Lookup::Hit(guard) => {
            assert_eq!(guard.bytes(), payload);
            guard.location()
        }
        other => panic!("{expected}: {other:?}"),
    };
    for staged_released_first in [true, false] {
        let staged = stage(&staging, b"k", at, 1000);
        let staged_location = (staged.segment(), staged.slot());
        assert_eq!(location_of("staged"), staged_location);
        let slot = SlotId(u32::from(staged_released_first));
        let extent = Extent { start: slot.0 * 8, units: 2 };
        let grant = Grant { slot, epoch: at, term: at.term(), extent, record, writer: PayloadWriter::Node };
        heap.begin_copy(granted, &grant).unwrap();
        let mut claim = heap.claim(granted, slot, at).unwrap();
        claim.bytes_mut(Span::new(0, 1000).unwrap()).copy_from_slice(staged.pin().unwrap().payload());
        claim.set_written();
        claim.publish(root).unwrap();
        if staged_released_first {
            drop(staged);
            assert_eq!(location_of("promoted"), (granted, slot));
            assert_eq!(heap.kill(granted, slot, at, MonoTime(0)), KillOutcome::Killed);
        } else {
            assert_eq!(heap.kill(granted, slot, at, MonoTime(0)), KillOutcome::Killed);
            assert_eq!(location_of("staged"), staged_location);
        }
    }
    assert!(heap.index_region().index().is_empty(), "each record removes its own entry");
}

#[test]
fn unindexed_staged_record_is_found_by_slot_only() {
    let (heap, staging) = heap_with(4, 16);
    let local = connect_to_heap(&heap, "not-indexed", u64::MAX);
    let mut reader = local.reader().unwrap();
    let record = record_of(b"k", 1000);
    let payload = payload_of(record.id, version(1), 1000);
    let (digests, root) = digests_of(&record, version(1), &payload);
    let mut buffer = staging.alloc(PAGE).unwrap();
    buffer.bytes_mut()[..1000].copy_from_slice(&payload);
    let staged = buffer.publish(version(1), 0, record, &digests, root, false).unwrap();
    assert!(reader.get(&record.id, now()).is_miss());
    let found = reader.get_at(staged.segment(), staged.slot(), version(1), now());
    assert!(matches!(found, Lookup::Hit(guard) if guard.bytes() == payload));
    drop(staged);

    // A single stripe is useless to a local reader.
    let stripe = RecordSpec {
        object_len: 2 << 20,
        stripe_count: 2,
        stripe_index: 1,
        stripe_offset: 1 << 20,
        ..record
    };
    let (digests, root) = digests_of(&stripe, version(1), &payload);
    let mut buffer = staging.alloc(PAGE).unwrap();
    buffer.bytes_mut()[..1000].copy_from_slice(&payload);
    let staged = buffer.publish(version(1), 0, stripe, &digests, root, true).unwrap();
    assert!(reader.get(&record.id, now()).is_miss());
    assert_eq!(staged.pin().unwrap().payload(), payload);
}

#[test]
fn rejected_publish_returns_staging_buffer() {
    let (heap, staging) = heap_with(2, 64);
    let record = record_of(b"k", 8000);
    let payload = payload_of(record.id, version(2), 8000);
    let (digests, root) = digests_of(&record, version(2), &payload);
    let mut buffer = Some(staging.alloc(3 * PAGE).unwrap());
    buffer.as_mut().unwrap().bytes_mut()[..8000].copy_from_slice(&payload);
    let mut publish = |version: Epoch, at: u64, record: RecordSpec<'_>, digests: &[u8], root: u64| {
        let refused = buffer.take().unwrap().publish(version, at, record, digests, root, true);
        let failure = refused.expect_err("the record does not fit");
        buffer = Some(failure.buffer);
        failure.error
    };
    let good = (version(2), 0, record, &digests[..], root);
    let (v, at, r, d, _) = good;
    assert!(matches!(publish(v, 512, r, d, root), StageError::Buffer { align: 4096, .. }), "misaligned");
    assert!(matches!(publish(v, 2 * PAGE, r, d, root), StageError::Buffer { .. }), "beyond the buffer");
    assert!(matches!(publish(v, u64::MAX - 4095, r, d, root), StageError::Buffer { .. }));
    let long = RecordSpec { object_len: 3 * PAGE, stripe_len: 3 * PAGE, ..r };
    assert!(matches!(publish(v, at, long, d, root), StageError::Buffer { .. }), "no space for the trailer");
    assert_eq!(publish(v, at, r, &[], root), StageError::Digests { found: 0, expected: 8 });
    assert_eq!(publish(v, at, r, d, root ^ 1), StageError::Root { found: root, named: root ^ 1 });
    assert!(matches!(publish(version(3), at, r, d, root), StageError::Root { .. }), "another version");
    let unlike = RecordSpec { object_len: 9000, ..r };
    assert!(matches!(publish(v, at, unlike, d, root), StageError::Record(BeginError::Header(_))));
    let digestless = RecordSpec { flags: RecordFlags::DIGESTLESS, ..r };
    assert!(matches!(
        publish(Epoch::ZERO, at, digestless, &[], 0),
        StageError::Record(BeginError::Word { .. })
    ));
    assert_eq!(staging.segment().taken_units(), 0, "a failed publish uses no units");
    let staged = buffer.unwrap().publish(v, at, r, d, root, true).unwrap();
    assert_eq!(staged.pin().unwrap().payload(), payload);

    // No other access is possible: neither by a grant, of any term, nor by a fenced epoch.
    let segment = staged.segment();
    let layout = RecordLayout::new(100, r.key.encoded_len() as u32, 0, RecordFlags::NONE).unwrap();
    let extent = Extent { start: 256, units: layout.units() };
    for term in [Term::ZERO, Term::new(3).unwrap()] {
        let (epoch, writer) = (Epoch::new(term, 50).unwrap(), PayloadWriter::Node);
        let grant = Grant { slot: SlotId(1), epoch, term, extent, record: record_of(b"j", 100), writer };
        assert_eq!(heap.begin(segment, &grant), Err(BeginError::Staging(segment)));
        assert_eq!(heap.begin_copy(segment, &grant), Err(BeginError::Staging(segment)));
        staging.segment().adopt_term(Term::new(3).unwrap());
    }
    assert_eq!(BeginError::Staging(segment).code(), ErrorCode::PermissionDenied);
    assert!(matches!(heap.fence_epoch(segment, SlotId(1), Epoch::MAX), Transition::Refused(_)));
    assert!(heap.claim(segment, staged.slot(), v).is_none());
    assert!(staging.segment().is_staging() && !heap.segments()[0].is_staging());
}

#[test]
#[should_panic(expected = "buffer length of 100 bytes")]
fn staging_alloc_of_partial_page_panics() {
    let (_heap, staging) = heap_with(2, 4);
    let _ = staging.alloc(100);
}

#[test]
fn killed_staged_record_keeps_buffer_until_handle_is_dropped() {
    let (heap, staging) = heap_with(1, 4);
    let staged = stage(&staging, b"k", version(2), 100);
    assert_eq!(heap.kill(staged.segment(), staged.slot(), version(2), MonoTime(0)), KillOutcome::Killed);
    assert_eq!(heap.reclaim(now()).freed.len(), 1);
    assert!(staged.pin().is_none());
    assert!(staging.alloc(PAGE).is_none(), "the handle still exists");
    drop(staged);
    assert!(staging.alloc(PAGE).is_some());
}

#[test]
fn concurrent_readers_never_see_staging_buffer_change() {
    const KEYS: u64 = 5;
    const ROUNDS: u64 = 3000;
    let (heap, staging) = heap_with(5, 16);
    let local = connect_to_heap(&heap, "stress", u64::MAX);
    let stop = AtomicBool::new(false);
    let [hits, outlived, waits] = [const { AtomicU64::new(0) }; 3];
    // Slot and version of the last published record.
    let last_published = AtomicU64::new(0);
    let next = AtomicU64::new(1 << 20);
    let len_of = |n: u64| 1000 + n * 977 % 9000;
    let key_of = |n: u64| (n % KEYS).to_le_bytes();
    std::thread::scope(|scope| {
        let stagers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut last: Option<StagedRecord> = None;
                    for _ in 0..ROUNDS {
                        // Decreasing, so that every slot gets older versions than it has seen.
                        let n = next.fetch_sub(1, Ordering::Relaxed);
                        let buffer = loop {
                            match staging.alloc((len_of(n) + 600).next_multiple_of(PAGE)) {
                                Some(buffer) => break buffer,
                                None => {
                                    waits.fetch_add(1, Ordering::Relaxed);
                                    std::thread::yield_now();
                                }
                            }
                        };
                        let staged = fill(buffer, &key_of(n), version(n), len_of(n), 0).unwrap();
                        last_published.store(u64::from(staged.slot().0) << 32 | n, Ordering::Relaxed);
                        // The previous record exists until the next one is published.
                        drop(last.replace(staged));
                    }
                })
            })
            .collect();
        // A client by id, a client by location, the node by location.
        for kind in 0..3 {
            let (heap, local, staging) = (&heap, &local, &staging);
            let (stop, hits, outlived, last_published) = (&stop, &hits, &outlived, &last_published);
            scope.spawn(move || {
                let mut reader = local.reader().unwrap();
                let mut turn = 0;
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    let location = last_published.load(Ordering::Relaxed);
                    let (slot, n) = (SlotId((location >> 32) as u32), location & 0xffff_ffff);
                    let segment = staging.segment().shape().segment;
                    let check = |slot: SlotId, id: ObjectId, at: Epoch, bytes: &[u8]| {
                        for _ in 0..2 {
                            assert!(bytes == payload_of(id, at, bytes.len() as u64), "foreign bytes of {at}");
                            std::thread::yield_now();
                        }
                        hits.fetch_add(1, Ordering::Relaxed);
                        outlived.fetch_add(heap.pin(segment, slot, at).is_none().into(), Ordering::Relaxed);
                    };
                    if kind < 2 {
                        let found = if kind == 0 {
                            reader.get(&id_of(&key_of(turn)), now())
                        } else {
                            reader.get_at(segment, slot, version(n.max(1)), now())
                        };
                        if let Lookup::Hit(guard) = found {
                            assert_eq!(guard.verify(), Some(true));
                            check(guard.location().1, guard.header().id, guard.version(), guard.bytes());
                        }
                    } else if let Some(pin) = heap.pin(segment, slot, version(n.max(1))) {
                        check(slot, pin.header().id, version(n), pin.payload());
                    }
                    heap.heartbeat();
                }
            });
        }
        let results: Vec<_> = stagers.into_iter().map(|stager| stager.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.expect("a stager saw foreign bytes in its buffer"));
    });
    println!("{hits:?} reads, {outlived:?} of them longer than their record, {waits:?} waits for space");
    assert!(hits.into_inner() > 100 && outlived.into_inner() > 10, "too few reads to be significant");
    heap.reclaim(now());
    assert_eq!(staging.free_bytes(), staging.total_bytes());
    assert!(heap.index_region().index().is_empty());
}

/// Checks that the used ranges are disjoint, and returns the longest gap between them.
fn longest_gap(used: &[Extent], units: u32) -> u32 {
    let mut used = used.to_vec();
    used.sort_by_key(|extent| extent.start);
    let mut gaps = vec![];
    let mut end = 0;
    for extent in &used {
        assert!(extent.start >= end, "{extent} was allocated twice");
        gaps.push(extent.start - end);
        end = extent.start + extent.units;
    }
    gaps.push(units - end);
    gaps.into_iter().max().unwrap()
}

#[test]
fn staging_matches_model() {
    const SLOTS: u32 = 12;
    const PAGES: u32 = 40;
    let seed =
        std::env::var("MOONTIDE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| now().0);
    println!("MOONTIDE_SEED={seed}");
    let mut rng = SplitMix64::new(seed);
    let (heap, staging) = heap_with(SLOTS, PAGES);
    let mut buffers: Vec<StagingBuffer> = vec![];
    // Each record with the extent of its buffer.
    let mut staged: Vec<(StagedRecord, Extent)> = vec![];
    let mut pins: Vec<(NodePin<'_>, Extent)> = vec![];
    let (mut allocated, mut refused, mut published) = (0, 0, 0);
    for _ in 0..100_000 {
        match rng.below(12) {
            0..4 => {
                // All buffers that are held or pinned; a buffer with two pins counts once.
                let mut busy: Vec<Extent> = buffers.iter().map(StagingBuffer::extent).collect();
                busy.extend(staged.iter().map(|(_, buffer)| *buffer));
                busy.extend(pins.iter().map(|(_, buffer)| *buffer));
                busy.sort_by_key(|extent| extent.start);
                busy.dedup();
                let gap = longest_gap(&busy, PAGES * 8);
                let units = (1 + rng.below(8) as u32) * 8;
                match staging.alloc(u64::from(units) * 512) {
                    Some(buffer) => {
                        allocated += 1;
                        assert_eq!((buffer.extent().units, buffer.extent().start % 8), (units, 0));
                        busy.push(buffer.extent());
                        longest_gap(&busy, PAGES * 8);
                        buffers.push(buffer);
                    }
                    None => {
                        refused += 1;
                        let fits = busy.len() < SLOTS as usize && units <= gap * 64 / 65;
                        assert!(
                            !fits,
                            "allocation of {units} units failed with a gap of {gap} and {} buffers",
                            busy.len()
                        );
                    }
                }
            }
            4..7 if !buffers.is_empty() => {
                let buffer = buffers.swap_remove(rng.below(buffers.len() as u64) as usize);
                let (extent, at) = (buffer.extent(), version(1 + rng.below(50)));
                let len = rng.below(buffer.len() - 600);
                if rng.below(8) == 0 {
                    drop(buffer);
                } else {
                    let key = rng.below(20).to_le_bytes();
                    staged.push((fill(buffer, &key, at, len, 0).unwrap(), extent));
                    published += 1;
                }
            }
            7..9 if !staged.is_empty() => {
                let (record, _) = staged.swap_remove(rng.below(staged.len() as u64) as usize);
                record.release(MonoTime(rng.below(2)));
            }
            9 if !staged.is_empty() && pins.len() < 4 => {
                let (record, buffer) = &staged[rng.below(staged.len() as u64) as usize];
                let pin = heap.pin(record.segment(), record.slot(), record.version());
                pins.push((pin.expect("READY"), *buffer));
            }
            10 if !pins.is_empty() => {
                let (pin, _) = pins.swap_remove(rng.below(pins.len() as u64) as usize);
                let header = pin.header();
                assert_eq!(pin.payload(), payload_of(header.id, header.word.epoch(), header.stripe_len));
            }
            11 => {
                heap.reclaim(now());
            }
            _ => {}
        }
    }
    println!("{allocated} buffers allocated, {refused} refused, {published} published");
    assert!(allocated > 10_000 && refused > 1000 && published > 5000);
    drop((buffers, staged, pins));
    heap.reclaim(now());
    assert_eq!(staging.in_use().free_bytes, staging.total_bytes());
    assert!(heap.index_region().index().is_empty());
}
