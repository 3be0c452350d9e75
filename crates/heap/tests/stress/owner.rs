//! Owner: the node of the stress test, in a process of its own, which is never killed.
//!
//! One thread per connection handles requests, one accepts, one waits for exits, one sends heartbeats and reclaims,
//! and the first one waits for the driver's command. The owner detects the exit of a client by its pidfd only: the
//! end of its socket ends the connection's thread and nothing else.
//!
//! Lock order: [`Directory`], then the state of the test's master, then the heap's own.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use moontide_heap::cell::CELLS_PER_LANE;
use moontide_heap::{
    ClientExited, ClientLedger, CommitError, ExitMonitor, FreedSlot, KillOutcome, LANES_PER_LEDGER,
    PayloadWriter, ShmClient, ShmListener,
};
use moontide_types::limits::UNIT_BYTES;
use moontide_types::{ClientId, Epoch, MonoTime, SegmentId, SlotId};

use crate::common::{GrantedObject, TestNode, now};
use crate::payload::Rng;
use crate::wire::{Request, Response, SlotVersion, key_bytes};

/// Scarce on purpose, so that space and slots are reused all the time.
const SEGMENTS: u32 = 2;
const SLOTS: u32 = 600;
const SEGMENT_BYTES: u64 = 24 << 20;

/// Duration of a reservation.
const RESERVATION_TTL: Duration = Duration::from_millis(300);

/// Time for which the owner waits until memory is freed; the driver requires one second.
const FREE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordState {
    Writing,
    Ready,
    Dead,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    granted: GrantedObject,
    key: u64,
    state: RecordState,
    writer: ClientId,
    begun: MonoTime,
}

/// The owner's own record of objects and clients, beside the heap's bookkeeping.
#[derive(Default)]
struct Directory {
    entries: HashMap<Epoch, Entry>,
    writing: HashMap<u64, Epoch>,
    ready: HashMap<u64, Epoch>,
    clients: HashMap<ClientId, (u32, Arc<ClientLedger>)>,
    slots_used: HashSet<(SegmentId, SlotId)>,
}

/// Counters that are reported to the driver at the end.
#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    reused: AtomicU64,
    freed: AtomicU64,
    expired: AtomicU64,
    dead_claims: AtomicU64,
    dead_pins: AtomicU64,
    late_begins: AtomicU64,
    rejected: AtomicU64,
}

struct Owner {
    node: TestNode,
    listener: ShmListener,
    exit_monitor: ExitMonitor,
    directory: Mutex<Directory>,
    counts: Counts,
    connections: AtomicUsize,
    control: Mutex<UnixStream>,
}

pub fn run(mutation: bool) -> ! {
    // A panic of a thread ends the process, which the driver detects.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        std::process::exit(101);
    }));
    let node = TestNode::new(SEGMENTS, SLOTS, SEGMENT_BYTES);
    let (listener, path) = node.bind_listener("stress");
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
    let control = UnixStream::from(stdin);
    let mut commands = BufReader::new(control.try_clone().expect("a descriptor"));
    let owner: &'static Owner = Box::leak(Box::new(Owner {
        node,
        listener,
        exit_monitor: ExitMonitor::new().expect("an epoll"),
        directory: Mutex::default(),
        counts: Counts::default(),
        connections: AtomicUsize::new(0),
        control: Mutex::new(control),
    }));
    let before = ResourceCounts::current();
    std::thread::spawn(move || owner.accept());
    std::thread::spawn(move || owner.handle_exits());
    std::thread::spawn(move || owner.tick());
    if mutation {
        std::thread::spawn(move || owner.forget_living_clients());
    }
    owner.report(&format!("socket {}", path.display()));
    let mut command = String::new();
    let _ = commands.read_line(&mut command);
    if command != "finish\n" {
        std::process::exit(0); // the driver has exited
    }
    owner.finish(&before);
    std::process::exit(0)
}

/// Descriptors and mappings of this process.
#[derive(Debug, PartialEq, Eq)]
struct ResourceCounts {
    descriptors: usize,
    mappings: usize,
}

impl ResourceCounts {
    fn current() -> ResourceCounts {
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("proc").count();
        let maps = std::fs::read_to_string("/proc/self/maps").expect("proc");
        ResourceCounts { descriptors, mappings: maps.matches("memfd:moontide").count() }
    }
}

impl Owner {
    fn directory(&self) -> MutexGuard<'_, Directory> {
        self.directory.lock().expect("a panic ends the process")
    }

    fn report(&self, line: &str) {
        let mut control = self.control.lock().expect("a panic ends the process");
        if writeln!(control, "{line}").is_err() {
            std::process::exit(0); // the driver has exited
        }
    }

    fn accept(&'static self) {
        loop {
            let socket = self.listener.accept().expect("accept");
            self.connections.fetch_add(1, Ordering::SeqCst);
            std::thread::spawn(move || {
                self.serve(socket);
                self.connections.fetch_sub(1, Ordering::SeqCst);
            });
        }
    }

    fn serve(&self, socket: OwnedFd) {
        let Ok(ShmClient { socket, ledger, pidfd, pid, .. }) =
            self.listener.handshake(socket, &self.node.heap)
        else {
            self.counts.rejected.fetch_add(1, Ordering::Relaxed); // killed or stopped during the handshake
            return;
        };
        let client = ledger.client();
        self.directory().clients.insert(client, (pid, ledger));
        self.exit_monitor.watch(client, pidfd).expect("watch");
        while let Some(request) = Request::receive(&socket) {
            if !self.handle(client, request).send(&socket) {
                break;
            }
        }
    }

    fn handle(&self, client: ClientId, request: Request) -> Response {
        match request {
            Request::Begin { key, len } => self.begin(client, key, len),
            Request::Commit { location, root } => self.commit(client, location, root),
            Request::Abort(location) => {
                self.kill(&mut self.directory(), location.epoch);
                Response::Done
            }
            Request::Kill { key, writing } => {
                let mut directory = self.directory();
                let chosen = [
                    directory.ready.get(&key).copied(),
                    directory.writing.get(&key).copied().filter(|_| writing),
                ];
                let killed = chosen.into_iter().flatten().filter(|&e| self.kill(&mut directory, e)).count();
                if killed > 0 { Response::Done } else { Response::Busy }
            }
            Request::Reclaim => {
                self.reclaim();
                Response::Free { percent: self.free_percent() }
            }
        }
    }

    fn begin(&self, client: ClientId, key: u64, len: u64) -> Response {
        let mut directory = self.directory();
        if !self.node.heap.ledgers().clients().iter().any(|ledger| ledger.client() == client) {
            // Sent before the client was killed, read after its exit was handled: no exit would ever end this write.
            self.counts.late_begins.fetch_add(1, Ordering::Relaxed);
            return Response::Busy;
        }
        if directory.writing.contains_key(&key) {
            return Response::Busy;
        }
        let Some(granted) = self.node.begin(&key_bytes(key), len, PayloadWriter::Client(client)) else {
            return Response::Busy;
        };
        let GrantedObject { segment, slot, epoch, .. } = granted;
        let entry = Entry { granted, key, state: RecordState::Writing, writer: client, begun: now() };
        directory.entries.insert(epoch, entry);
        directory.writing.insert(key, epoch);
        let first = directory.slots_used.insert((segment, slot));
        self.counts.reused.fetch_add(u64::from(!first), Ordering::Relaxed);
        self.counts.begun.fetch_add(1, Ordering::Relaxed);
        Response::Granted(SlotVersion { segment, slot, epoch })
    }

    fn commit(&self, client: ClientId, location: SlotVersion, root: u64) -> Response {
        let SlotVersion { segment, slot, epoch } = location;
        let mut directory = self.directory();
        match self.node.heap.commit(segment, slot, epoch, root, PayloadWriter::Client(client)) {
            Ok(()) => {
                let entry = directory.entries.get_mut(&epoch).expect("an open write");
                assert_eq!(entry.state, RecordState::Writing, "a commit succeeded after {entry:?}");
                entry.state = RecordState::Ready;
                let key = entry.key;
                directory.writing.remove(&key);
                if let Some(&old) = directory.ready.get(&key) {
                    assert!(self.kill(&mut directory, old));
                }
                directory.ready.insert(key, epoch);
                Response::Done
            }
            Err(CommitError::Word { .. }) => {
                let state = directory.entries.get(&epoch).map(|entry| entry.state);
                assert!(matches!(state, None | Some(RecordState::Dead)), "commit refused in state {state:?}");
                Response::Late
            }
            Err(error) => {
                eprintln!("commit of {location:?} by client {client}: {error}");
                Response::Broken
            }
        }
    }

    /// Kills a record that is not dead yet. The directory is exact, so the heap must agree.
    fn kill(&self, directory: &mut Directory, epoch: Epoch) -> bool {
        let Some(entry) = directory.entries.get(&epoch).filter(|entry| entry.state != RecordState::Dead)
        else {
            return false;
        };
        assert_eq!(self.node.kill(&entry.granted), KillOutcome::Killed, "{entry:?}");
        directory.mark_dead(epoch);
        true
    }

    fn reclaim(&self) {
        let reclaimed = self.node.reclaim();
        let mut directory = self.directory();
        for FreedSlot { epoch, .. } in &reclaimed.freed {
            let entry = directory.entries.remove(epoch).expect("a begun record");
            assert_eq!(entry.state, RecordState::Dead, "freed: {entry:?}");
        }
        self.counts.freed.fetch_add(reclaimed.freed.len() as u64, Ordering::Relaxed);
    }

    /// Returns the free percentage of space or slots, whichever is scarcer.
    fn free_percent(&self) -> u64 {
        let units: u64 = self.node.heap.segments().iter().map(|s| u64::from(s.taken_units())).sum();
        let slots = self.directory().entries.len() as u64;
        let free = |used: u64, all: u64| 100 * all.saturating_sub(used) / all;
        let units_all = u64::from(SEGMENTS) * SEGMENT_BYTES / UNIT_BYTES;
        free(units, units_all).min(free(slots, u64::from(SEGMENTS * SLOTS)))
    }

    /// Sends heartbeats, ends expired reservations, reclaims.
    fn tick(&self) {
        loop {
            self.node.heap.heartbeat();
            let mut directory = self.directory();
            let time = now();
            let expired = directory
                .filter(|e| e.state == RecordState::Writing && time.since(e.begun) > RESERVATION_TTL);
            let count = expired.into_iter().filter(|&epoch| self.kill(&mut directory, epoch)).count();
            drop(directory);
            self.counts.expired.fetch_add(count as u64, Ordering::Relaxed);
            self.reclaim();
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn handle_exits(&self) {
        loop {
            for exited in self.exit_monitor.wait(Duration::from_millis(100)).expect("wait") {
                self.handle_exit(exited);
            }
        }
    }

    /// Drops an exited client's ledger, and waits until everything that it held is free or pinned by others only.
    fn handle_exit(&self, exited: ClientExited) {
        let client = exited.client();
        let (pid, claims, mut pins) = {
            let mut directory = self.directory();
            let (pid, ledger) = directory.clients.remove(&client).expect("a watched client");
            let pinned = pins_in(&ledger);
            let is_pinned = |e: &Entry| pinned.contains(&(e.granted.segment, e.granted.slot));
            let claims = directory.filter(|e| e.writer == client && e.state == RecordState::Writing);
            let pins = directory.filter(|e| e.state == RecordState::Dead && is_pinned(e));
            assert_eq!(
                self.node.heap.client_exited(exited).len(),
                claims.len(),
                "open writes of client {client}"
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
                let location = directory.entries.get(epoch).map(|e| (e.granted.segment, e.granted.slot));
                location.is_some_and(|(segment, slot)| !pinned.contains(segment, slot))
            });
            if pins.is_empty() && claims.iter().all(|epoch| !directory.entries.contains_key(epoch)) {
                break;
            }
            assert!(
                started.elapsed() < FREE_TIMEOUT,
                "process {pid} has exited and still holds {pins:?} or {claims:?}"
            );
            drop(directory);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.report(&format!("freed {pid} {}", now().0));
    }

    /// The mutation: treats a living client as exited, as a node would that relies on timeouts.
    fn forget_living_clients(&self) {
        let mut rng = Rng::new(1);
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let mut directory = self.directory();
            let mut clients: Vec<ClientId> = directory.clients.keys().copied().collect();
            clients.sort();
            if clients.is_empty() {
                continue;
            }
            let client = clients[rng.below(clients.len() as u64) as usize];
            let claims = directory.filter(|e| e.writer == client && e.state == RecordState::Writing);
            // SAFETY: violated on purpose: the client is alive. That is the mutation.
            self.node.heap.client_exited(unsafe { ClientExited::assume(client) });
            claims.into_iter().for_each(|epoch| directory.mark_dead(epoch));
        }
    }

    /// Checks, after all clients have exited, that nothing is left of them and of their records.
    fn finish(&self, before: &ResourceCounts) {
        let started = Instant::now();
        while !self.directory().clients.is_empty() || self.connections.load(Ordering::SeqCst) > 0 {
            assert!(started.elapsed() < FREE_TIMEOUT, "timed out handling the exits of all clients");
            std::thread::sleep(Duration::from_millis(5));
        }
        {
            let mut directory = self.directory();
            let alive = directory.filter(|entry| entry.state != RecordState::Dead);
            alive.into_iter().for_each(|epoch| assert!(self.kill(&mut directory, epoch)));
        }
        while !self.directory().entries.is_empty() {
            assert!(started.elapsed() < FREE_TIMEOUT, "records left: {:?}", self.directory().entries);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(self.node.heap.ledgers().clients().len(), 0, "ledgers are left");
        assert!(self.node.heap.ledgers().pins().is_empty(), "pins are left");
        self.node.assert_empty();
        // A thread closes its socket shortly after it has decremented the counter.
        while ResourceCounts::current() != *before {
            let after = ResourceCounts::current();
            assert!(started.elapsed() < FREE_TIMEOUT, "{before:?} before, {after:?} after");
            std::thread::sleep(Duration::from_millis(5));
        }
        let Counts { begun, reused, freed, expired, dead_claims, dead_pins, late_begins, rejected } =
            &self.counts;
        assert_eq!(begun.load(Ordering::Relaxed), freed.load(Ordering::Relaxed), "begun and freed");
        let overflowed = self.node.heap.index_region().overflowed();
        self.report(&format!(
            "clean begun={begun:?} reused={reused:?} freed={freed:?} expired={expired:?} \
             dead_claims={dead_claims:?} dead_pins={dead_pins:?} late_begins={late_begins:?} \
             rejected={rejected:?} index_overflows={overflowed}"
        ));
    }
}

impl Directory {
    fn filter(&self, condition: impl Fn(&Entry) -> bool) -> Vec<Epoch> {
        self.entries.iter().filter(|(_, entry)| condition(entry)).map(|(&epoch, _)| epoch).collect()
    }

    fn mark_dead(&mut self, epoch: Epoch) {
        let entry = self.entries.get_mut(&epoch).expect("a begun record");
        entry.state = RecordState::Dead;
        for map in [&mut self.writing, &mut self.ready] {
            if map.get(&entry.key) == Some(&epoch) {
                map.remove(&entry.key);
            }
        }
    }
}

/// Returns the slots that a ledger pins, read from its region as the heap lays it out: a page, then the cells.
fn pins_in(ledger: &ClientLedger) -> HashSet<(SegmentId, SlotId)> {
    let cells = LANES_PER_LEDGER as usize * CELLS_PER_LANE;
    let region = ledger.region();
    assert!(4096 + cells as u64 * 8 <= region.len());
    // SAFETY: in bounds by the line above, page-aligned, mapped during the life of `region`, and accessed as atomics
    // only.
    let cells =
        unsafe { std::slice::from_raw_parts(region.base().as_ptr().add(4096).cast::<AtomicU64>(), cells) };
    let pinned = cells.iter().map(|cell| cell.load(Ordering::Acquire)).filter(|&bits| bits != 0);
    pinned.map(|bits| (SegmentId((bits >> 32) as u32), SlotId(bits as u32 - 1))).collect()
}
