//! One object and two sessions in all orders of up to nine events, on a shipped node in a simulated world: commands of a
//! master, progress of the threads of the disk tier, the end of a session, a power failure. After each order the power fails
//! once more and the node starts again. A node must not tell of an object whose removal it has acknowledged, neither before
//! nor after that, and must not tell of recovered records after it has told that there are no more. Between the events, the
//! threads run in one order only: the simulation of clusters draws others.
//!
//! `MOONTIDE_TESTS=full` runs all orders of up to nine events, a million; otherwise all of up to five.

#![cfg(sim)]

#[path = "explore/master.rs"]
mod master;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::num::NonZeroU16;
use std::ops::Range;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use master::{ADDRESS, CAPABILITY_KEY, CLUSTER, ScriptedMaster, term};
use moontide_disk::SimulatedDisk;
use moontide_node::testing::{NodeWithoutSockets, TestNodeConfig};
use moontide_node::{DiskConfig, SELF_FENCE_TIMEOUT_DEFAULT};
use moontide_proto::convert::{ObjectListBuilder, ObjectListKind};
use moontide_proto::{
    AccessRight, Capability, CapabilityKey, CapabilityScope, Codes, CommandKind, CommitEntry, CommitFlags,
    FixedRecord as _, FrameKind, Handle, HandleFlags, NodeCommand, ObjectEntry, ObjectFlags, OpKind,
    PackedKeysBuilder, RecordShape, v1,
};
use moontide_rt::sim::{self, Process, ProcessClock, WorldConfig};
use moontide_rt::sync::{Condvar, Mutex};
use moontide_rt::time::Instant;
use moontide_rt::{thread, with_mutation};
use moontide_transfer::{PeerIdentity, Target, serve_write};
use moontide_types::record::{KeySection, RecordFlags, RecordLayout};
use moontide_types::{
    Epoch, Extent, Generation, IdKey, Key, Medium, NodeId, ObjectId, SegmentId, SlotId, Tenant,
    TenantGeneration,
};
use prost::Message as _;

const NODE: NodeId = NodeId(3);
const SEGMENT: SegmentId = SegmentId(0);
const SLOT: SlotId = SlotId(2);
const LEN: u64 = 600;
/// For how long a command to write is valid: longer than a history.
const LEASE_MS: u32 = 20_000;
const KEY: &[u8] = b"key";

/// Returns the id of the object, by the key that the scripted master sends.
fn id() -> ObjectId {
    let key = Key::new(KEY).unwrap();
    IdKey::new(1, [7; 32]).object_id(Tenant::DEFAULT, TenantGeneration::default(), key)
}

/// What may happen, each at most once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The master commands a write to the disk.
    Offload,
    /// The master commands the removal of the object.
    Kill,
    /// The master commands to free the slot.
    Reclaim,
    /// The session ends, and another one begins.
    NextSession,
    /// The host loses power, and the node starts again.
    PowerFailure,
    /// A thread that waits at this place goes on, and none waits there from now on.
    Pass(Place),
}

/// Places at which threads of the disk tier wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Writing,
    Written,
    Removing,
    Found,
}

impl Place {
    fn of(mark: &str) -> Option<Place> {
        match mark {
            "about to write pinned records" => Some(Place::Writing),
            "about to tell of written records" => Some(Place::Written),
            "about to write removals" => Some(Place::Removing),
            "about to tell of found records" => Some(Place::Found),
            _ => None,
        }
    }
}

const EVENTS: [Event; 9] = [
    Event::Offload,
    Event::Pass(Place::Writing),
    Event::Kill,
    Event::Pass(Place::Removing),
    Event::NextSession,
    Event::Pass(Place::Written),
    Event::Reclaim,
    Event::Pass(Place::Found),
    Event::PowerFailure,
];

/// Which places are passed without a wait.
#[derive(Default)]
struct Gates {
    open: Mutex<BTreeMap<Place, bool>>,
    changed: Condvar,
}

impl Gates {
    fn wait(&self, place: Place) {
        let mut open = self.open.lock();
        while !open.get(&place).is_some_and(|open| *open) {
            self.changed.wait(&mut open);
        }
    }

    fn open(&self, place: Place) {
        self.open.lock().insert(place, true);
        self.changed.notify_all();
    }
}

/// The node of a process, once it has started. Never dropped: its destructors would stop threads, and wait for them, also when the
/// process was killed or the world has failed.
type Running = Rc<RefCell<Option<ManuallyDrop<NodeWithoutSockets>>>>;

/// A host with a node, whose process may end and start again.
struct Host {
    disk: SimulatedDisk,
    master: Rc<ScriptedMaster>,
    starts: u64,
    process: Option<(Process, Running)>,
}

fn generation(start: u64) -> Generation {
    Generation(100 + start)
}

impl Host {
    fn start(&mut self) {
        self.starts += 1;
        let dir = PathBuf::from("/disk");
        let disk = DiskConfig {
            dir: vec![dir.clone()],
            limit_bytes: Some(4 << 20),
            staging_bytes: 256 << 10,
            read_threads: 1,
            ..DiskConfig::default()
        };
        let config = TestNodeConfig {
            node: NODE,
            boot: self.starts,
            cluster: CLUSTER,
            groups: NonZeroU16::MIN,
            generation: generation(self.starts),
            segments: (1, 64, 8),
            masters: vec![ADDRESS.into()],
            address: "node:1".into(),
            host: "host".into(),
            self_fence_timeout: SELF_FENCE_TIMEOUT_DEFAULT,
            copy_bytes_per_s: 0,
            engine: None,
            disk: Some((dir, disk, Arc::new(self.disk.clone()))),
        };
        let process = Process::new("node", ProcessClock::default());
        let running = Running::default();
        let slot = Rc::clone(&running);
        process.spawn("main", move || {
            *slot.borrow_mut() = Some(ManuallyDrop::new(NodeWithoutSockets::start(config).unwrap()));
        });
        self.process = Some((process, running));
    }

    fn lose_power(&mut self) {
        self.disk.crash_after(0);
        if let Some((process, running)) = self.process.take() {
            process.kill();
            running.take();
        }
        self.master.node_ended();
        self.disk.restart();
    }

    /// Waits until the node has told everything, at most for `limit`.
    fn settle(&self, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.master.is_synced() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(20));
    }

    /// Puts the object into memory.
    fn put(&self) {
        let (process, running) = self.process.as_ref().unwrap();
        let owner = running.borrow().as_ref().unwrap().owner();
        let done = Rc::new(Cell::new(false));
        let (flag, start) = (Rc::clone(&done), self.starts);
        process.spawn("put", move || {
            let (object, handle) = object(start);
            let deadline = Instant::now() + Duration::from_secs(1);
            let mut keys = PackedKeysBuilder::new();
            keys.push(Key::new(KEY).unwrap()).unwrap();
            let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Begin, 1);
            list.push(object, &[handle], &[]).unwrap();
            let fields = list.finish();
            let begin = v1::BeginRequest {
                tenant: Tenant::DEFAULT.as_str().to_owned(),
                keys: keys.finish().into(),
                objects: fields.objects,
                handles: fields.handles,
                attributes: fields.attributes,
            };
            let peer = PeerIdentity::Remote(1);
            let call = |kind, body: Vec<u8>| {
                let reply = owner.call(peer, None, kind, &body, deadline).unwrap();
                let outcomes = v1::SlotOutcomes::decode(&reply[..]).unwrap();
                let codes = Codes::decode(&outcomes.codes, 1).unwrap();
                assert_eq!(codes.iter().collect::<Vec<_>>(), [None], "{kind:?}");
            };
            call(FrameKind::Begin, begin.encode_to_vec());
            let op = Target::of(&handle, object.id, object.epoch).to_wire(OpKind::Write, 0, LEN);
            let root = serve_write(&*owner, None, &op, &[5; LEN as usize], deadline, || ()).unwrap();
            let entry = CommitEntry {
                id: id(),
                epoch: object.epoch,
                generation: handle.generation,
                segment: SEGMENT,
                slot: SLOT,
                root,
                capability: handle.capability,
                term: term(),
                flags: CommitFlags::NONE,
            };
            let mut entries = Vec::new();
            entry.encode(&mut entries);
            call(FrameKind::Commit, v1::CommitRequest { entries: entries.into() }.encode_to_vec());
            flag.set(true);
        });
        thread::sleep(Duration::from_millis(5));
        assert!(done.get(), "the object was put");
    }

    fn happens(&mut self, event: Event, gates: &Gates) {
        let command = |kind| {
            let start = self.starts;
            move |number| NodeCommand {
                segment: SEGMENT,
                generation: generation(start),
                slot: SLOT,
                epoch: epoch(),
                id: id(),
                lease_ms: if kind == CommandKind::Offload { LEASE_MS } else { 0 },
                ..NodeCommand::new(number, kind, term())
            }
        };
        match event {
            Event::Offload => _ = self.master.command(command(CommandKind::Offload)),
            Event::Kill => _ = self.master.command(command(CommandKind::Kill)),
            Event::Reclaim => _ = self.master.command(command(CommandKind::Reclaim)),
            Event::NextSession => {
                self.master.end_session();
                thread::sleep(Duration::from_millis(150));
            }
            Event::PowerFailure => {
                self.lose_power();
                self.start();
                self.settle(Duration::from_millis(300));
            }
            Event::Pass(place) => gates.open(place),
        }
        thread::sleep(Duration::from_millis(30));
    }
}

fn extent() -> Extent {
    let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(KEY).unwrap() };
    let layout = RecordLayout::new(LEN, key.encoded_len() as u32, 0, RecordFlags::NONE).unwrap();
    Extent { start: 0, units: layout.units() }
}

fn epoch() -> Epoch {
    Epoch::new(term(), 7).unwrap()
}

fn object(start: u64) -> (ObjectEntry, Handle) {
    let mut handle = Handle {
        node: NODE,
        segment: SEGMENT,
        slot: SLOT,
        generation: generation(start),
        extent: extent(),
        payload_offset: extent().span().offset(),
        stripe_offset: 0,
        stripe_len: LEN,
        stripe_root: 0,
        capability: Capability::default(),
        term: term(),
        stripe_index: 0,
        stripe_count: 1,
        replica: 0,
        medium: Medium::Memory,
        flags: HandleFlags::NONE,
    };
    let object = ObjectEntry {
        code: None,
        flags: ObjectFlags::NONE,
        valid_ms: 1_000,
        id: id(),
        epoch: epoch(),
        object_len: LEN,
        root: 0,
        first_handle: 0,
        handle_count: 1,
        replica_count: 1,
        format: 0,
        tenant_generation: TenantGeneration::default(),
        id_key: 1,
    };
    let right = AccessRight::Write(RecordShape::granted(&object, &handle));
    let scope = CapabilityScope::of_handle(&handle, id(), epoch(), right);
    handle.capability = CapabilityKey::new(CAPABILITY_KEY).sign(&scope);
    (object, handle)
}

/// What an order has shown.
#[derive(Clone, Copy, Debug)]
struct Shown {
    is_removed: bool,
    was_on_disk: bool,
}

/// Runs one order.
fn run(order: Vec<Event>, mutation: Option<&'static str>) -> Result<Shown, String> {
    let text = format!("{order:?}");
    let report = sim::run(&WorldConfig::new(1), move || {
        moontide_tasks::sim::with_runtime(1, || with_mutation(mutation, || explore(&order)))
    });
    let shown = report.map_err(|failure| failure.to_string()).and_then(|report| report.value);
    shown.map_err(|what| format!("{what}; order {text}"))
}

fn explore(order: &[Event]) -> Result<Shown, String> {
    let master = Rc::new(ScriptedMaster::new(id()));
    moontide_tasks::sim::set_network(Rc::clone(&master) as Rc<dyn moontide_tasks::sim::Network>);
    let gates = Rc::new(Gates::default());
    let its_gates = Rc::clone(&gates);
    sim::set_mark_hook(Some(Rc::new(move |name| {
        Place::of(name).into_iter().for_each(|place| its_gates.wait(place));
    })));
    let mut host = Host { disk: SimulatedDisk::new(1), master, starts: 0, process: None };
    host.start();
    host.settle(Duration::from_secs(5));
    host.put();
    for event in order {
        host.happens(*event, &gates);
    }
    for place in [Place::Writing, Place::Written, Place::Removing, Place::Found] {
        gates.open(place);
    }
    thread::sleep(Duration::from_millis(50));
    host.lose_power();
    host.start();
    host.settle(Duration::from_secs(5));
    let is_synced = host.master.is_synced();
    host.lose_power();
    match host.master.violation() {
        Some(violation) => Err(violation),
        None if !is_synced => Err("the node has not told what it has".to_owned()),
        None => Ok(Shown { is_removed: host.master.is_removed(), was_on_disk: host.master.was_on_disk() }),
    }
}

/// Returns the order with this number among all orders of `len` events.
fn order_of(mut number: u64, len: usize) -> Vec<Event> {
    let mut left = EVENTS.to_vec();
    let mut order = Vec::with_capacity(len);
    for _ in 0..len {
        let index = (number % left.len() as u64) as usize;
        number /= left.len() as u64;
        order.push(left.remove(index));
    }
    order
}

fn count_of(len: usize) -> u64 {
    (0..len).map(|index| (EVENTS.len() - index) as u64).product()
}

/// What some orders have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    orders: u64,
    /// The removal was acknowledged.
    removed: u64,
    /// The removal was acknowledged, and the object was on the disk.
    removed_from_disk: u64,
}

/// Runs these of the orders of `len` events, until one fails.
fn run_orders(len: usize, orders: Range<u64>, mutation: Option<&'static str>) -> Result<Counts, String> {
    let next = AtomicU64::new(orders.start);
    let done = std::sync::Mutex::new(Ok(Counts::default()));
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= orders.end || done.lock().unwrap().is_err() {
                return;
            }
            let shown = run(order_of(number, len), mutation);
            let mut done = done.lock().unwrap();
            match (&mut *done, shown) {
                (Err(_), _) => {}
                (Ok(counts), Ok(shown)) => {
                    counts.orders += 1;
                    counts.removed += u64::from(shown.is_removed);
                    counts.removed_from_disk += u64::from(shown.is_removed && shown.was_on_disk);
                }
                (counts, Err(what)) => *counts = Err(format!("order {number} of {len} events: {what}")),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    done.into_inner().unwrap()
}

/// Orders of one process: what a killed node had in the heap is never freed.
const ORDERS_PER_PROCESS: u64 = 20_000;
/// Tells a process which orders to run: the number of events, the first order, and the end.
const PART: &str = "MOONTIDE_ORDERS";

/// Runs all orders of `len` events, in processes of their own if they are many.
fn all_orders(len: usize) -> Counts {
    if count_of(len) <= ORDERS_PER_PROCESS {
        return run_orders(len, 0..count_of(len), None).unwrap_or_else(|what| panic!("{what}"));
    }
    let mut sum = Counts::default();
    for first in (0..count_of(len)).step_by(ORDERS_PER_PROCESS as usize) {
        let end = count_of(len).min(first + ORDERS_PER_PROCESS);
        let part = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "part_of_the_orders", "--nocapture"])
            .env(PART, format!("{len} {first} {end}"))
            .output()
            .unwrap();
        let page = String::from_utf8_lossy(&part.stdout).into_owned();
        assert!(part.status.success(), "{page}{}", String::from_utf8_lossy(&part.stderr));
        let counts = page.split("counts ").nth(1).expect("a part prints what it has shown");
        let counts: Vec<u64> =
            counts.split_whitespace().take(3).map(|count| count.parse().unwrap()).collect();
        sum.orders += counts[0];
        sum.removed += counts[1];
        sum.removed_from_disk += counts[2];
        println!("{len} events: {end} of {} orders", count_of(len));
    }
    sum
}

#[test]
#[ignore = "part of the full form, which runs it in processes of their own"]
fn part_of_the_orders() {
    let part = std::env::var(PART).expect("the test that starts it tells which orders to run");
    let part: Vec<u64> = part.split(' ').map(|word| word.parse().unwrap()).collect();
    let Counts { orders, removed, removed_from_disk } =
        run_orders(part[0] as usize, part[1]..part[2], None).unwrap_or_else(|what| panic!("{what}"));
    println!("counts {orders} {removed} {removed_from_disk} ");
}

#[test]
fn removed_object_is_not_told_of_in_any_order_of_events() {
    let is_full = std::env::var("MOONTIDE_TESTS").is_ok_and(|value| value == "full");
    let longest = if is_full { EVENTS.len() } else { 5 };
    for len in 1..=longest {
        let Counts { orders, removed, removed_from_disk } = all_orders(len);
        println!(
            "{orders} orders of {len} events; removal acknowledged in {removed}, in {removed_from_disk} of an object that was \
             on the disk"
        );
        assert_eq!(orders, count_of(len));
        // An exploration without removals would find nothing.
        assert!(len < 2 || removed > 0);
        assert!(len < 5 || removed_from_disk > 0);
    }
}

/// Each of these lets a removed object return; the exploration finds it.
#[test]
fn deliberate_bugs_are_found() {
    const MODULE: &str = "moontide_node::disk::test_hooks::";
    for bug in ["KilledUntold", "KilledAbsentUntold", "JobsNotAwaited"] {
        let name: &'static str = format!("{MODULE}{bug}").leak();
        let found = (1..=5).find_map(|len| run_orders(len, 0..count_of(len), Some(name)).err());
        let what = found.unwrap_or_else(|| panic!("{bug} is not found"));
        assert!(what.contains(": told "), "{bug}: {what}");
        println!("{bug}: {what}");
    }
}

/// A master hosts the group again while the node still ends the session from before. The end of that session must not close
/// the route of the next one.
#[test]
fn session_that_ends_late_leaves_the_next_one_its_results() {
    let report = sim::run(&WorldConfig::new(1), || {
        moontide_tasks::sim::with_runtime(1, || {
            let master = Rc::new(ScriptedMaster::new(id()));
            moontide_tasks::sim::set_network(Rc::clone(&master) as Rc<dyn moontide_tasks::sim::Network>);
            let mut host =
                Host { disk: SimulatedDisk::new(1), master: Rc::clone(&master), starts: 0, process: None };
            host.start();
            host.settle(Duration::from_secs(5));
            host.put();
            // The next session reports the object, and is interrupted there.
            let snapshots = Rc::new(Cell::new(0));
            let interrupted = Rc::clone(&snapshots);
            sim::set_mark_hook(Some(Rc::new(move |name| {
                if name == "about to take a snapshot" {
                    interrupted.set(interrupted.get() + 1);
                    if interrupted.get() == 1 {
                        thread::sleep(Duration::from_secs(20));
                    }
                }
            })));
            master.end_session();
            thread::sleep(Duration::from_secs(1));
            assert_eq!(snapshots.get(), 1);
            // The node follows within its interval of polls.
            master.toggle_hosting();
            thread::sleep(Duration::from_secs(6));
            master.toggle_hosting();
            thread::sleep(Duration::from_secs(6));
            assert_eq!(snapshots.get(), 2, "another session has begun");
            assert!(master.is_synced());
            // The first one has ended.
            thread::sleep(Duration::from_secs(10));
            host.happens(Event::Kill, &Gates::default());
            thread::sleep(Duration::from_secs(1));
            assert!(master.is_removed(), "the result of the command reaches the master");
            host.lose_power();
        });
    });
    report.unwrap_or_else(|failure| panic!("{failure}"));
}

/// Threads are interrupted at any clock, lock or channel for 50 ms to a minute. After that the node has a session again.
#[test]
fn interrupted_node_finds_its_master_again() {
    let mut stalls = 0;
    for seed in 1..=500 {
        let config = WorldConfig { stall_per_million: 3_000, ..WorldConfig::new(seed) };
        let report = sim::run(&config, move || {
            moontide_tasks::sim::with_runtime(seed, || {
                let master = Rc::new(ScriptedMaster::new(id()));
                moontide_tasks::sim::set_network(Rc::clone(&master) as Rc<dyn moontide_tasks::sim::Network>);
                let disk = SimulatedDisk::new(seed);
                let mut host = Host { disk, master: Rc::clone(&master), starts: 0, process: None };
                host.start();
                for _ in 0..20 {
                    thread::sleep(Duration::from_secs(2));
                    master.end_session();
                }
                sim::end_stalls();
                host.settle(Duration::from_secs(90));
                assert!(master.is_synced(), "the node has a session");
                host.lose_power();
            });
        });
        stalls += report.unwrap_or_else(|failure| panic!("{failure}")).stalls;
    }
    assert!(stalls > 1_000, "{stalls}");
}
