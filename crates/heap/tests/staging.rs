//! Staging: rooms are taken, filled, published, read and released, and no room is given out while somebody reads it.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{id_of, join_heap, now, record_of};
use moontide_heap::{
    BeginError, Grant, HeapConfig, HugePages, Killed, LocalHeap, Lookup, NewRecord, NodeHeap, NodePin,
    StageError, Staged, Staging, StagingRoom, Transition, Unpublished, Writer,
};
use moontide_types::record::{DigestContext, Flags, RecordLayout, State, Word};
use moontide_types::{Epoch, ErrorCode, Extent, Generation, MonoTime, NodeId, ObjectId, SlotId, Span, Term};

const PAGE: u64 = 4096;

fn version(n: u64) -> Epoch {
    Epoch::new(Term::new(3).unwrap(), n).unwrap()
}

/// A heap with an ordinary segment of 16 slots and 1 MiB, and a staging of `slots` and `pages`.
fn heap_with(slots: u32, pages: u32) -> (Arc<NodeHeap>, Arc<Staging>) {
    let huge = HugePages::IfAllowed;
    let config = HeapConfig { node: NodeId(1), generation: Generation(1), slots_max: 4096, huge };
    let heap = Arc::new(NodeHeap::create(config).unwrap());
    heap.add_segment(16, 2048, huge).unwrap().obey(Term::new(3).unwrap());
    let staging = Arc::new(Staging::new(&heap, slots, pages * 8, huge).unwrap());
    heap.board().set_open(true);
    heap.beat();
    (heap, staging)
}

/// A payload that no other object and no other version has.
fn payload_of(id: ObjectId, version: Epoch, len: u64) -> Vec<u8> {
    let salt = id.as_u128() as u64 ^ version.bits().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len).map(|i| (salt.rotate_left(i as u32 % 64) as u8).wrapping_add(i as u8)).collect()
}

fn digests_of(record: &NewRecord<'_>, version: Epoch, payload: &[u8]) -> (Vec<u8>, u64) {
    let NewRecord { id, stripe_index: stripe, stripe_len: len, .. } = *record;
    let mut digests = vec![];
    let root = DigestContext { id, version, stripe, len }
        .payload(payload, |digest| digests.extend_from_slice(&digest.to_le_bytes()));
    (digests, root)
}

/// Fills a room, as a read from disk does, and publishes it.
fn fill(mut room: StagingRoom, key: &[u8], version: Epoch, len: u64, at: u64) -> Result<Staged, Unpublished> {
    let record = record_of(key, len);
    let payload = payload_of(record.id, version, len);
    let (digests, root) = digests_of(&record, version, &payload);
    room.bytes_mut().fill(0xee);
    room.bytes_mut()[at as usize..][..len as usize].copy_from_slice(&payload);
    room.publish(version, at, record, &digests, root, true)
}

fn stage(staging: &Arc<Staging>, key: &[u8], version: Epoch, len: u64) -> Staged {
    let room = staging.take((len + 600).next_multiple_of(PAGE)).expect("room");
    fill(room, key, version, len, 0).unwrap()
}

/// Whether the node's pin and a client's guard see the record.
fn assert_readable(local: &LocalHeap, key: &[u8], staged: &Staged, len: u64) {
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
fn what_is_published_is_read_like_anything_else() {
    let (heap, staging) = heap_with(8, 512);
    let local = join_heap(&heap, "staged", u64::MAX);
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
    assert_eq!(staging.in_use().draining_rooms, 8, "nothing was out of room, so nothing was reclaimed");
    assert!(heap.board().index().is_empty());
}

#[test]
fn a_payload_may_start_behind_a_header_block() {
    let (heap, staging) = heap_with(4, 64);
    let local = join_heap(&heap, "behind", u64::MAX);
    // A whole object starts on 4 KiB, a small one on 512 bytes.
    for (len, at, room) in [(8000, PAGE, 4 * PAGE), (700, 512, PAGE), (700, 4096 - 1536, PAGE)] {
        let staged = fill(staging.take(room).unwrap(), b"k", version(1), len, at).unwrap();
        assert_readable(&local, b"k", &staged, len);
        let pin = staged.pin().unwrap();
        assert_eq!(pin.header().payload_offset, staged.extent().span().offset());
        let (address, length) = staging.memory();
        let place = pin.payload().as_ptr().addr() - address;
        assert_eq!(place as u64, staged.extent().span().offset());
        assert!(place + len as usize <= length);
    }
}

#[test]
fn rooms_are_aligned_and_apart_and_come_back_unpublished() {
    let (_heap, staging) = heap_with(8, 16);
    let mut rooms: Vec<_> = (1..=4).map(|pages| staging.take(pages * PAGE).unwrap()).collect();
    for (n, room) in rooms.iter_mut().enumerate() {
        assert_eq!(room.len(), (n as u64 + 1) * PAGE);
        assert_eq!(room.bytes_mut().as_ptr().addr() % 4096, 0);
        room.bytes_mut().fill(n as u8 + 1);
    }
    for (n, room) in rooms.iter_mut().enumerate() {
        assert!(room.bytes_mut().iter().all(|&byte| byte == n as u8 + 1));
    }
    assert_eq!((staging.free_bytes(), staging.total_bytes()), (6 * PAGE, 16 * PAGE));
    assert_eq!(staging.in_use().held_rooms, 4);
    drop(rooms);
    assert_eq!((staging.free_bytes(), staging.in_use().held_rooms), (16 * PAGE, 0));
    assert_eq!(staging.take(16 * PAGE).unwrap().len(), 16 * PAGE);
}

#[test]
fn out_of_room_says_so_and_goes_on_later() {
    let (heap, staging) = heap_with(3, 4);
    assert!(staging.take(5 * PAGE).is_none(), "more than there is");
    assert!(staging.take(1 << 50).is_none());
    let staged: Vec<_> = (1..4).map(|n| stage(&staging, &[n], version(n.into()), 3000)).collect();
    assert!(staging.take(PAGE).is_none(), "no slot is left, though a page is");
    let pin = heap.pin(staged[0].segment(), staged[0].slot(), staged[0].version()).unwrap();
    drop(staged);
    let in_use = staging.in_use();
    assert_eq!((in_use.held_rooms, in_use.draining_rooms, in_use.free_bytes), (0, 3, PAGE));
    // Nobody calls the heap's reclaim: take does what is needed. One slot is still read.
    let two: Vec<_> = (0..2).map(|_| staging.take(PAGE).unwrap()).collect();
    assert!(staging.take(PAGE).is_none());
    assert_eq!(pin.payload(), payload_of(id_of(&[1]), version(1), 3000));
    drop(pin);
    assert!(staging.take(PAGE).is_some());
    drop(two);
    assert!(staging.take(4 * PAGE).is_some(), "all of it in one piece again");
}

#[test]
fn what_the_nodes_thread_reclaims_is_vacant() {
    let (heap, staging) = heap_with(1, 4);
    let staged = stage(&staging, b"k", version(4), 9000);
    let (slot, extent) = (staged.slot(), staged.extent());
    drop(staged);
    let freed = heap.reclaim(now()).freed;
    assert_eq!(freed.len(), 1);
    assert_eq!((freed[0].segment, freed[0].slot), (staging.segment().shape().segment, slot));
    assert_eq!(freed[0].extent, extent, "the record's, not the room's");
    assert_eq!(staging.free_bytes(), staging.total_bytes());
    assert_eq!(staging.segment().taken_units(), 0);
}

#[test]
fn a_lease_delays_the_room_until_it_is_over() {
    let (heap, staging) = heap_with(1, 4);
    let staged = stage(&staging, b"k", version(4), 100);
    let (segment, slot) = (staged.segment(), staged.slot());
    staged.release(MonoTime(now().0 + 3_600_000_000_000));
    assert!(staging.take(PAGE).is_none());
    assert_eq!(heap.kill(segment, slot, version(4), MonoTime(0)), Killed::Already, "it is over earlier");
    assert!(staging.take(PAGE).is_some());
}

#[test]
fn versions_come_and_go_in_one_slot_in_any_order() {
    let (heap, staging) = heap_with(1, 4);
    let local = join_heap(&heap, "order", u64::MAX);
    let mut last = None;
    for n in [9, 5, 4, 4, 4, 1, 12, 12, 2, 1] {
        let staged = stage(&staging, b"k", version(n), 5000);
        assert_readable(&local, b"k", &staged, 5000);
        let place = (staged.segment(), staged.slot());
        if let Some(last) = last.filter(|&last| last != n) {
            let found = local.reader().unwrap().get_at(place.0, place.1, version(last), now());
            assert!(matches!(found, Lookup::Miss), "version {last} is gone");
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
fn one_object_may_be_in_staging_and_elsewhere() {
    let (heap, staging) = heap_with(4, 16);
    let local = join_heap(&heap, "both", u64::MAX);
    let mut reader = local.reader().unwrap();
    let (record, at) = (record_of(b"k", 1000), version(7));
    let payload = payload_of(record.id, at, 1000);
    let root = digests_of(&record, at, &payload).1;
    let granted = heap.segments()[0].shape().segment;
    let mut place_of = |found: &str| match reader.get(&id_of(b"k"), now()) {
        Lookup::Hit(guard) => {
            assert_eq!(guard.bytes(), payload);
            guard.place()
        }
        other => panic!("{found}: {other:?}"),
    };
    for staged_dies_first in [true, false] {
        let staged = stage(&staging, b"k", at, 1000);
        let staged_place = (staged.segment(), staged.slot());
        assert_eq!(place_of("staged"), staged_place);
        let slot = SlotId(u32::from(staged_dies_first));
        let extent = Extent { start: slot.0 * 8, units: 2 };
        let grant = Grant { slot, epoch: at, term: at.term(), extent, record, writer: Writer::Node };
        heap.begin_copy(granted, &grant).unwrap();
        let mut claim = heap.claim(granted, slot, at).unwrap();
        claim.bytes_mut(Span::new(0, 1000).unwrap()).copy_from_slice(staged.pin().unwrap().payload());
        claim.publish(root).unwrap();
        if staged_dies_first {
            drop(staged);
            assert_eq!(place_of("promoted"), (granted, slot));
            assert_eq!(heap.kill(granted, slot, at, MonoTime(0)), Killed::Dying);
        } else {
            assert_eq!(heap.kill(granted, slot, at, MonoTime(0)), Killed::Dying);
            assert_eq!(place_of("staged"), staged_place);
        }
    }
    assert!(heap.board().index().is_empty(), "each took its own entry away");
}

#[test]
fn what_is_not_indexed_is_found_by_its_slot_only() {
    let (heap, staging) = heap_with(4, 16);
    let local = join_heap(&heap, "not-indexed", u64::MAX);
    let mut reader = local.reader().unwrap();
    let record = record_of(b"k", 1000);
    let payload = payload_of(record.id, version(1), 1000);
    let (digests, root) = digests_of(&record, version(1), &payload);
    let mut room = staging.take(PAGE).unwrap();
    room.bytes_mut()[..1000].copy_from_slice(&payload);
    let staged = room.publish(version(1), 0, record, &digests, root, false).unwrap();
    assert!(reader.get(&record.id, now()).is_miss());
    let found = reader.get_at(staged.segment(), staged.slot(), version(1), now());
    assert!(matches!(found, Lookup::Hit(guard) if guard.bytes() == payload));
    drop(staged);

    // A stripe alone is of no use to a local reader.
    let stripe =
        NewRecord { object_len: 2 << 20, stripe_count: 2, stripe_index: 1, stripe_offset: 1 << 20, ..record };
    let (digests, root) = digests_of(&stripe, version(1), &payload);
    let mut room = staging.take(PAGE).unwrap();
    room.bytes_mut()[..1000].copy_from_slice(&payload);
    let staged = room.publish(version(1), 0, stripe, &digests, root, true).unwrap();
    assert!(reader.get(&record.id, now()).is_miss());
    assert_eq!(staged.pin().unwrap().payload(), payload);
}

#[test]
fn what_does_not_fit_is_refused_and_the_room_comes_back() {
    let (heap, staging) = heap_with(2, 64);
    let record = record_of(b"k", 8000);
    let payload = payload_of(record.id, version(2), 8000);
    let (digests, root) = digests_of(&record, version(2), &payload);
    let mut room = Some(staging.take(3 * PAGE).unwrap());
    room.as_mut().unwrap().bytes_mut()[..8000].copy_from_slice(&payload);
    let mut publish = |version: Epoch, at: u64, record: NewRecord<'_>, digests: &[u8], root: u64| {
        let refused = room.take().unwrap().publish(version, at, record, digests, root, true);
        let Unpublished { room: back, error } = refused.expect_err("it does not fit");
        room = Some(back);
        error
    };
    let good = (version(2), 0, record, &digests[..], root);
    let (v, at, r, d, _) = good;
    assert!(matches!(publish(v, 512, r, d, root), StageError::Room { align: 4096, .. }), "misaligned");
    assert!(matches!(publish(v, 2 * PAGE, r, d, root), StageError::Room { .. }), "beyond the room");
    assert!(matches!(publish(v, u64::MAX - 4095, r, d, root), StageError::Room { .. }));
    let long = NewRecord { object_len: 3 * PAGE, stripe_len: 3 * PAGE, ..r };
    assert!(matches!(publish(v, at, long, d, root), StageError::Room { .. }), "no place for the trailer");
    assert_eq!(publish(v, at, r, &[], root), StageError::Digests { found: 0, expected: 8 });
    assert_eq!(publish(v, at, r, d, root ^ 1), StageError::Root { found: root, named: root ^ 1 });
    assert!(matches!(publish(version(3), at, r, d, root), StageError::Root { .. }), "of another version");
    let unlike = NewRecord { object_len: 9000, ..r };
    assert!(matches!(publish(v, at, unlike, d, root), StageError::Record(BeginError::Header(_))));
    let digestless = NewRecord { flags: Flags::DIGESTLESS, ..r };
    assert!(matches!(
        publish(Epoch::ZERO, at, digestless, &[], 0),
        StageError::Record(BeginError::Word { .. })
    ));
    assert_eq!(staging.segment().taken_units(), 0, "what was refused takes nothing");
    let staged = room.unwrap().publish(v, at, r, d, root, true).unwrap();
    assert_eq!(staged.pin().unwrap().payload(), payload);

    // Nobody else gets at it: not by a grant, of whatever term, nor by a burn.
    let segment = staged.segment();
    let layout = RecordLayout::new(100, r.key.encoded_len() as u32, 0, Flags::NONE).unwrap();
    let extent = Extent { start: 256, units: layout.units() };
    for term in [Term::ZERO, Term::new(3).unwrap()] {
        let (epoch, writer) = (Epoch::new(term, 50).unwrap(), Writer::Node);
        let grant = Grant { slot: SlotId(1), epoch, term, extent, record: record_of(b"j", 100), writer };
        assert_eq!(heap.begin(segment, &grant), Err(BeginError::Staging(segment)));
        assert_eq!(heap.begin_copy(segment, &grant), Err(BeginError::Staging(segment)));
        staging.segment().obey(Term::new(3).unwrap());
    }
    assert_eq!(BeginError::Staging(segment).code(), ErrorCode::PermissionDenied);
    assert!(matches!(heap.burn(segment, SlotId(1), Epoch::MAX), Transition::Refused(_)));
    assert!(heap.claim(segment, staged.slot(), v).is_none());
    assert!(staging.segment().is_staging() && !heap.segments()[0].is_staging());
}

#[test]
#[should_panic(expected = "a room of 100 bytes")]
fn a_room_of_part_of_a_page_is_a_mistake() {
    let (_heap, staging) = heap_with(2, 4);
    let _ = staging.take(100);
}

#[test]
fn a_record_that_somebody_else_killed_gives_its_room_back_with_its_handle() {
    let (heap, staging) = heap_with(1, 4);
    let staged = stage(&staging, b"k", version(2), 100);
    assert_eq!(heap.kill(staged.segment(), staged.slot(), version(2), MonoTime(0)), Killed::Dying);
    assert_eq!(heap.reclaim(now()).freed.len(), 1);
    assert!(staged.pin().is_none());
    assert!(staging.take(PAGE).is_none(), "its handle is still there");
    drop(staged);
    assert!(staging.take(PAGE).is_some());
}

#[test]
fn a_storm_of_readers_never_sees_a_room_change_under_it() {
    const KEYS: u64 = 5;
    const ROUNDS: u64 = 3000;
    let (heap, staging) = heap_with(5, 16);
    let local = join_heap(&heap, "storm", u64::MAX);
    let stop = AtomicBool::new(false);
    let [hits, outlived, waits] = [const { AtomicU64::new(0) }; 3];
    // Where the last one is: slot and version.
    let shown = AtomicU64::new(0);
    let next = AtomicU64::new(1 << 20);
    let len_of = |n: u64| 1000 + n * 977 % 9000;
    let key_of = |n: u64| (n % KEYS).to_le_bytes();
    std::thread::scope(|scope| {
        let stagers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut last: Option<Staged> = None;
                    for _ in 0..ROUNDS {
                        // Falling, so that every slot sees older versions than it has seen.
                        let n = next.fetch_sub(1, Ordering::Relaxed);
                        let room = loop {
                            match staging.take((len_of(n) + 600).next_multiple_of(PAGE)) {
                                Some(room) => break room,
                                None => {
                                    waits.fetch_add(1, Ordering::Relaxed);
                                    std::thread::yield_now();
                                }
                            }
                        };
                        let staged = fill(room, &key_of(n), version(n), len_of(n), 0).unwrap();
                        shown.store(u64::from(staged.slot().0) << 32 | n, Ordering::Relaxed);
                        // The last one lives until there is a next one.
                        drop(last.replace(staged));
                    }
                })
            })
            .collect();
        // A client by id, a client by place, the node by place.
        for kind in 0..3 {
            let (heap, local, staging) = (&heap, &local, &staging);
            let (stop, hits, outlived, shown) = (&stop, &hits, &outlived, &shown);
            scope.spawn(move || {
                let mut reader = local.reader().unwrap();
                let mut turn = 0;
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    let place = shown.load(Ordering::Relaxed);
                    let (slot, n) = (SlotId((place >> 32) as u32), place & 0xffff_ffff);
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
                            check(guard.place().1, guard.header().id, guard.version(), guard.bytes());
                        }
                    } else if let Some(pin) = heap.pin(segment, slot, version(n.max(1))) {
                        check(slot, pin.header().id, version(n), pin.payload());
                    }
                    heap.beat();
                }
            });
        }
        let ended: Vec<_> = stagers.into_iter().map(|stager| stager.join()).collect();
        stop.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.expect("a stager's room was its own"));
    });
    println!("{hits:?} reads, {outlived:?} of them to the end of their record, {waits:?} waits for room");
    assert!(hits.into_inner() > 100 && outlived.into_inner() > 10, "the readers saw next to nothing");
    heap.reclaim(now());
    assert_eq!(staging.free_bytes(), staging.total_bytes());
    assert!(heap.board().index().is_empty());
}

/// splitmix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// Ranges that must not be given out, and the longest piece between them.
fn longest_gap(taken: &[Extent], units: u32) -> u32 {
    let mut taken = taken.to_vec();
    taken.sort_by_key(|extent| extent.start);
    let mut gaps = vec![];
    let mut end = 0;
    for extent in &taken {
        assert!(extent.start >= end, "{extent} was given out twice");
        gaps.push(extent.start - end);
        end = extent.start + extent.units;
    }
    gaps.push(units - end);
    gaps.into_iter().max().unwrap()
}

#[test]
fn a_hundred_thousand_random_steps_agree_with_a_model() {
    const SLOTS: u32 = 12;
    const PAGES: u32 = 40;
    let seed =
        std::env::var("MOONTIDE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| now().0);
    println!("MOONTIDE_SEED={seed}");
    let mut dice = Dice(seed);
    let (heap, staging) = heap_with(SLOTS, PAGES);
    let mut rooms: Vec<StagingRoom> = vec![];
    // With each record the extent of its room.
    let mut staged: Vec<(Staged, Extent)> = vec![];
    let mut pins: Vec<(NodePin<'_>, Extent)> = vec![];
    let (mut taken, mut refused, mut published) = (0, 0, 0);
    for _ in 0..100_000 {
        match dice.below(12) {
            0..4 => {
                // Everything that somebody has or reads; a room under two pins counts once.
                let mut busy: Vec<Extent> = rooms.iter().map(StagingRoom::extent).collect();
                busy.extend(staged.iter().map(|(_, room)| *room));
                busy.extend(pins.iter().map(|(_, room)| *room));
                busy.sort_by_key(|extent| extent.start);
                busy.dedup();
                let gap = longest_gap(&busy, PAGES * 8);
                let units = (1 + dice.below(8) as u32) * 8;
                match staging.take(u64::from(units) * 512) {
                    Some(room) => {
                        taken += 1;
                        assert_eq!((room.extent().units, room.extent().start % 8), (units, 0));
                        busy.push(room.extent());
                        longest_gap(&busy, PAGES * 8);
                        rooms.push(room);
                    }
                    None => {
                        refused += 1;
                        let room_left = busy.len() < SLOTS as usize && units <= gap * 64 / 65;
                        assert!(
                            !room_left,
                            "{units} units refused with {gap} in one piece, {} rooms",
                            busy.len()
                        );
                    }
                }
            }
            4..7 if !rooms.is_empty() => {
                let room = rooms.swap_remove(dice.below(rooms.len() as u64) as usize);
                let (extent, at) = (room.extent(), version(1 + dice.below(50)));
                let len = dice.below(room.len() - 600);
                if dice.below(8) == 0 {
                    drop(room);
                } else {
                    let key = dice.below(20).to_le_bytes();
                    staged.push((fill(room, &key, at, len, 0).unwrap(), extent));
                    published += 1;
                }
            }
            7..9 if !staged.is_empty() => {
                let (record, _) = staged.swap_remove(dice.below(staged.len() as u64) as usize);
                record.release(MonoTime(dice.below(2)));
            }
            9 if !staged.is_empty() && pins.len() < 4 => {
                let (record, room) = &staged[dice.below(staged.len() as u64) as usize];
                let pin = heap.pin(record.segment(), record.slot(), record.version());
                pins.push((pin.expect("READY"), *room));
            }
            10 if !pins.is_empty() => {
                let (pin, _) = pins.swap_remove(dice.below(pins.len() as u64) as usize);
                let header = pin.header();
                assert_eq!(pin.payload(), payload_of(header.id, header.word.epoch(), header.stripe_len));
            }
            11 => {
                heap.reclaim(now());
            }
            _ => {}
        }
    }
    println!("{taken} rooms taken, {refused} refused, {published} published");
    assert!(taken > 10_000 && refused > 1000 && published > 5000);
    drop((rooms, staged, pins));
    heap.reclaim(now());
    assert_eq!(staging.in_use().free_bytes, staging.total_bytes());
    assert!(heap.board().index().is_empty());
}
