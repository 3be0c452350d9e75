//! The owner: the node of the storm, in a process of its own, which is never killed.
//!
//! One thread per visitor answers requests, one accepts, one waits for deaths, one beats and reclaims, and the
//! first one listens to the conductor. That a client is gone is learnt from its pidfd only: the end of its socket
//! ends the visitor's thread and nothing else.
//!
//! Lock order: [`Directory`], then the node's books, then the heap's own.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use moontide_heap::cell::CELLS_PER_GROUP;
use moontide_heap::{
    ClientLedger, CommitError, DeathWatch, Door, Ended, Freed, GROUPS_PER_LEDGER, Killed, Visitor, Writer,
};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::{ClientId, Epoch, MonoTime, SegmentId, SlotId};

use crate::common::{Granted, TestNode, now};
use crate::payload::Dice;
use crate::wire::{Answer, Placed, Request, key_bytes};

/// Scarce on purpose: space and slots are used again all the time.
const SEGMENTS: u32 = 2;
const SLOTS: u32 = 600;
const SEGMENT_BYTES: u64 = 24 << 20;

/// How long a reservation lasts.
const DEADLINE: Duration = Duration::from_millis(300);

/// How long the owner waits for what must come back; the conductor demands one second.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Writing,
    Ready,
    Dead,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    granted: Granted,
    key: u64,
    life: Life,
    writer: ClientId,
    begun: MonoTime,
}

/// What the owner knows about objects and clients, beside the heap's own books.
#[derive(Default)]
struct Directory {
    entries: HashMap<Epoch, Entry>,
    writing: HashMap<u64, Epoch>,
    ready: HashMap<u64, Epoch>,
    living: HashMap<ClientId, (u32, Arc<ClientLedger>)>,
    slots_used: HashSet<(SegmentId, SlotId)>,
}

/// What is told to the conductor at the end.
#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    reused: AtomicU64,
    freed: AtomicU64,
    expired: AtomicU64,
    dead_claims: AtomicU64,
    dead_pins: AtomicU64,
    late_begins: AtomicU64,
    turned_away: AtomicU64,
}

struct Owner {
    node: TestNode,
    door: Door,
    watch: DeathWatch,
    directory: Mutex<Directory>,
    counts: Counts,
    visitors: AtomicUsize,
    control: Mutex<UnixStream>,
}

pub fn run(plant: bool) -> ! {
    // A thread that panics takes the process along, and the conductor notices.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        std::process::exit(101);
    }));
    let node = TestNode::new(SEGMENTS, SLOTS, SEGMENT_BYTES);
    let (door, path) = node.open_door("storm");
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
    let control = UnixStream::from(stdin);
    let mut orders = BufReader::new(control.try_clone().expect("a descriptor"));
    let owner: &'static Owner = Box::leak(Box::new(Owner {
        node,
        door,
        watch: DeathWatch::new().expect("an epoll"),
        directory: Mutex::default(),
        counts: Counts::default(),
        visitors: AtomicUsize::new(0),
        control: Mutex::new(control),
    }));
    let before = Belongings::count();
    std::thread::spawn(move || owner.accept());
    std::thread::spawn(move || owner.bury());
    std::thread::spawn(move || owner.tick());
    if plant {
        std::thread::spawn(move || owner.forget_the_living());
    }
    owner.tell(&format!("door {}", path.display()));
    let mut order = String::new();
    let _ = orders.read_line(&mut order);
    if order != "finish\n" {
        std::process::exit(0); // no conductor, no storm
    }
    owner.finish(&before);
    std::process::exit(0)
}

/// Descriptors and mappings of this process.
#[derive(Debug, PartialEq, Eq)]
struct Belongings {
    descriptors: usize,
    mappings: usize,
}

impl Belongings {
    fn count() -> Belongings {
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("proc").count();
        let maps = std::fs::read_to_string("/proc/self/maps").expect("proc");
        Belongings { descriptors, mappings: maps.matches("memfd:moontide").count() }
    }
}

impl Owner {
    fn directory(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().expect("a panic ends the process")
    }

    fn tell(&self, line: &str) {
        let mut control = self.control.lock().expect("a panic ends the process");
        if writeln!(control, "{line}").is_err() {
            std::process::exit(0); // no conductor, no storm
        }
    }

    fn accept(&'static self) {
        loop {
            let socket = self.door.accept().expect("accept");
            self.visitors.fetch_add(1, Ordering::SeqCst);
            std::thread::spawn(move || {
                self.receive_visitor(socket);
                self.visitors.fetch_sub(1, Ordering::SeqCst);
            });
        }
    }

    fn receive_visitor(&self, socket: OwnedFd) {
        let Ok(Visitor { socket, ledger, pidfd, pid, .. }) = self.door.admit(socket, &self.node.heap) else {
            self.counts.turned_away.fetch_add(1, Ordering::Relaxed); // killed or stopped on the doorstep
            return;
        };
        let client = ledger.client();
        self.directory().living.insert(client, (pid, ledger));
        self.watch.watch(client, pidfd).expect("watch");
        while let Some(request) = Request::receive(&socket) {
            if !self.answer(client, request).send(&socket) {
                break;
            }
        }
    }

    fn answer(&self, client: ClientId, request: Request) -> Answer {
        match request {
            Request::Begin { key, len } => self.begin(client, key, len),
            Request::Commit { placed, root } => self.commit(client, placed, root),
            Request::Abort(placed) => {
                self.kill(&mut self.directory(), placed.epoch);
                Answer::Done
            }
            Request::Kill { key, writing } => {
                let mut directory = self.directory();
                let chosen = [
                    directory.ready.get(&key).copied(),
                    directory.writing.get(&key).copied().filter(|_| writing),
                ];
                let killed = chosen.into_iter().flatten().filter(|&e| self.kill(&mut directory, e)).count();
                if killed > 0 { Answer::Done } else { Answer::NotNow }
            }
            Request::Reclaim => {
                self.reclaim();
                Answer::Room { percent: self.free_percent() }
            }
        }
    }

    fn begin(&self, client: ClientId, key: u64, len: u64) -> Answer {
        let mut directory = self.directory();
        if !self.node.heap.ledgers().clients().iter().any(|ledger| ledger.client() == client) {
            // Sent before the kill, read after the burial: granted now, it would never be ended by a death.
            self.counts.late_begins.fetch_add(1, Ordering::Relaxed);
            return Answer::NotNow;
        }
        if directory.writing.contains_key(&key) {
            return Answer::NotNow;
        }
        let Some(granted) = self.node.begin(&key_bytes(key), len, Writer::Client(client)) else {
            return Answer::NotNow;
        };
        let Granted { segment, slot, epoch, .. } = granted;
        let entry = Entry { granted, key, life: Life::Writing, writer: client, begun: now() };
        directory.entries.insert(epoch, entry);
        directory.writing.insert(key, epoch);
        let first = directory.slots_used.insert((segment, slot));
        self.counts.reused.fetch_add(u64::from(!first), Ordering::Relaxed);
        self.counts.begun.fetch_add(1, Ordering::Relaxed);
        Answer::Granted(Placed { segment, slot, epoch })
    }

    fn commit(&self, client: ClientId, placed: Placed, root: u64) -> Answer {
        let Placed { segment, slot, epoch } = placed;
        let mut directory = self.directory();
        match self.node.heap.commit(segment, slot, epoch, root, Writer::Client(client)) {
            Ok(()) => {
                let entry = directory.entries.get_mut(&epoch).expect("it is being written");
                assert_eq!(entry.life, Life::Writing, "a commit went through after {entry:?}");
                entry.life = Life::Ready;
                let key = entry.key;
                directory.writing.remove(&key);
                if let Some(&old) = directory.ready.get(&key) {
                    assert!(self.kill(&mut directory, old));
                }
                directory.ready.insert(key, epoch);
                Answer::Done
            }
            Err(CommitError::Word { .. }) => {
                let life = directory.entries.get(&epoch).map(|entry| entry.life);
                assert!(matches!(life, None | Some(Life::Dead)), "refused, but {life:?}");
                Answer::Late
            }
            Err(error) => {
                eprintln!("commit of {placed:?} by client {client}: {error}");
                Answer::Broken
            }
        }
    }

    /// Kills what is not dead yet. The directory is exact, so the heap must agree.
    fn kill(&self, directory: &mut Directory, epoch: Epoch) -> bool {
        let Some(entry) = directory.entries.get(&epoch).filter(|entry| entry.life != Life::Dead) else {
            return false;
        };
        assert_eq!(self.node.kill(&entry.granted), Killed::Dying, "{entry:?}");
        directory.mark_dead(epoch);
        true
    }

    fn reclaim(&self) {
        let reclaimed = self.node.reclaim();
        let mut directory = self.directory();
        for Freed { epoch, .. } in &reclaimed.freed {
            let entry = directory.entries.remove(epoch).expect("it was begun");
            assert_eq!(entry.life, Life::Dead, "freed: {entry:?}");
        }
        self.counts.freed.fetch_add(reclaimed.freed.len() as u64, Ordering::Relaxed);
    }

    /// How much of the scarcer of space and slots is free.
    fn free_percent(&self) -> u64 {
        let units: u64 = self.node.heap.segments().iter().map(|s| u64::from(s.taken_units())).sum();
        let slots = self.directory().entries.len() as u64;
        let free = |taken: u64, all: u64| 100 * all.saturating_sub(taken) / all;
        let units_all = u64::from(SEGMENTS) * SEGMENT_BYTES / UNIT_BYTES;
        free(units, units_all).min(free(slots, u64::from(SEGMENTS * SLOTS)))
    }

    /// Beats, ends reservations, reclaims.
    fn tick(&self) {
        loop {
            self.node.heap.beat();
            let mut directory = self.directory();
            let time = now();
            let expired = directory.of(|e| e.life == Life::Writing && time.since(e.begun) > DEADLINE);
            let count = expired.into_iter().filter(|&epoch| self.kill(&mut directory, epoch)).count();
            drop(directory);
            self.counts.expired.fetch_add(count as u64, Ordering::Relaxed);
            self.reclaim();
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn bury(&self) {
        loop {
            for ended in self.watch.wait(Duration::from_millis(100)).expect("wait") {
                self.bury_one(ended);
            }
        }
    }

    /// Drops a dead client's ledger, and waits until all that it held is free or somebody else's.
    fn bury_one(&self, ended: Ended) {
        let client = ended.client();
        let (pid, claims, mut pins) = {
            let mut directory = self.directory();
            let (pid, ledger) = directory.living.remove(&client).expect("it was watched once");
            let named = names_in(&ledger);
            let is_named = |e: &Entry| named.contains(&(e.granted.segment, e.granted.slot));
            let claims = directory.of(|e| e.writer == client && e.life == Life::Writing);
            let pins = directory.of(|e| e.life == Life::Dead && is_named(e));
            assert_eq!(
                self.node.heap.client_died(ended).len(),
                claims.len(),
                "what client {client} was writing"
            );
            claims.iter().for_each(|&epoch| directory.mark_dead(epoch));
            (pid, claims, pins)
        };
        self.counts.dead_claims.fetch_add(claims.len() as u64, Ordering::Relaxed);
        self.counts.dead_pins.fetch_add(pins.len() as u64, Ordering::Relaxed);
        let started = Instant::now();
        loop {
            self.reclaim();
            let directory = self.directory();
            let pinned = self.node.heap.ledgers().pins();
            pins.retain(|epoch| {
                let place = directory.entries.get(epoch).map(|e| (e.granted.segment, e.granted.slot));
                place.is_some_and(|(segment, slot)| !pinned.contains(segment, slot))
            });
            if pins.is_empty() && claims.iter().all(|epoch| !directory.entries.contains_key(epoch)) {
                break;
            }
            assert!(
                started.elapsed() < PATIENCE,
                "process {pid} is dead and still holds {pins:?} or {claims:?}"
            );
            drop(directory);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.tell(&format!("gone {pid} {}", now().0));
    }

    /// The planted bug: takes a client for dead that is not, as a node would that believes in time-outs.
    fn forget_the_living(&self) {
        let mut dice = Dice::new(1);
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let mut directory = self.directory();
            let mut clients: Vec<ClientId> = directory.living.keys().copied().collect();
            clients.sort();
            if clients.is_empty() {
                continue;
            }
            let client = clients[dice.below(clients.len() as u64) as usize];
            let claims = directory.of(|e| e.writer == client && e.life == Life::Writing);
            // SAFETY: none, and that is the bug.
            self.node.heap.client_died(unsafe { Ended::assume(client) });
            claims.into_iter().for_each(|epoch| directory.mark_dead(epoch));
        }
    }

    /// Everyone is dead: nothing may be left of them, nor of what they wrote.
    fn finish(&self, before: &Belongings) {
        let started = Instant::now();
        while !self.directory().living.is_empty() || self.visitors.load(Ordering::SeqCst) > 0 {
            assert!(started.elapsed() < PATIENCE, "clients are dead and were not all buried");
            std::thread::sleep(Duration::from_millis(5));
        }
        {
            let mut directory = self.directory();
            let alive = directory.of(|entry| entry.life != Life::Dead);
            alive.into_iter().for_each(|epoch| assert!(self.kill(&mut directory, epoch)));
        }
        while !self.directory().entries.is_empty() {
            assert!(started.elapsed() < PATIENCE, "left: {:?}", self.directory().entries);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(self.node.heap.ledgers().clients().len(), 0, "ledgers are left");
        assert!(self.node.heap.ledgers().pins().is_empty(), "pins are left");
        self.node.assert_empty();
        // A thread closes its socket a moment after it has said that it ends.
        while Belongings::count() != *before {
            assert!(started.elapsed() < PATIENCE, "{:?} before, {:?} after", before, Belongings::count());
            std::thread::sleep(Duration::from_millis(5));
        }
        let Counts { begun, reused, freed, expired, dead_claims, dead_pins, late_begins, turned_away } =
            &self.counts;
        assert_eq!(begun.load(Ordering::Relaxed), freed.load(Ordering::Relaxed), "begun and freed");
        let overflowed = self.node.heap.board().overflowed();
        self.tell(&format!(
            "clean begun={begun:?} reused={reused:?} freed={freed:?} expired={expired:?} \
             dead_claims={dead_claims:?} dead_pins={dead_pins:?} late_begins={late_begins:?} \
             turned_away={turned_away:?} index_overflows={overflowed}"
        ));
    }
}

impl Directory {
    fn of(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<Epoch> {
        self.entries.iter().filter(|(_, entry)| wanted(entry)).map(|(&epoch, _)| epoch).collect()
    }

    fn mark_dead(&mut self, epoch: Epoch) {
        let entry = self.entries.get_mut(&epoch).expect("it was begun");
        entry.life = Life::Dead;
        for map in [&mut self.writing, &mut self.ready] {
            if map.get(&entry.key) == Some(&epoch) {
                map.remove(&entry.key);
            }
        }
    }
}

/// The slots that a ledger names, read from its region as the heap lays it out: a page, then the cells.
fn names_in(ledger: &ClientLedger) -> HashSet<(SegmentId, SlotId)> {
    let cells = GROUPS_PER_LEDGER as usize * CELLS_PER_GROUP;
    let region = ledger.region();
    assert!(4096 + cells as u64 * 8 <= region.len());
    // SAFETY: in bounds by the line above, page-aligned, mapped while `region` lives, and atomics to everyone.
    let cells =
        unsafe { std::slice::from_raw_parts(region.base().as_ptr().add(4096).cast::<AtomicU64>(), cells) };
    let names = cells.iter().map(|cell| cell.load(Ordering::Acquire)).filter(|&name| name != 0);
    names.map(|name| (SegmentId((name >> 32) as u32), SlotId(name as u32 - 1))).collect()
}
