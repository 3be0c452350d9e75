//! The disk tier on a [`SimulatedDisk`], with the node's memory, the command executor, and a log of the events for
//! sessions. The content of a record follows from its id, so that every record that is read can be verified.

mod devices;
mod faults;
mod life;
#[cfg(debug_assertions)] // no mutation can be enabled in a release build
mod mutations;
mod order;
mod races;

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use moontide_disk::samples::{fill, id};
use moontide_disk::{BackendKind, EvictionPolicy, RecordId, SimulatedDisk, Storage};
use moontide_heap::{Grant, HugePages, NodePin, PayloadWriter, RecordSpec};
use moontide_proto::limits::{DISK_PART_BYTES, SESSION_RECORDS_MAX};
use moontide_proto::{
    Capability, CommandKind, CommandResult, CommandStatus, NodeCommand, OffloadRecord, OpFlags, OpKind,
    Packed, TransferOp, VersionedId,
};
use moontide_rt::sync::mpsc;
use moontide_rt::sync::mpsc::Sender;
use moontide_rt::sync::{Condvar, Mutex};
use moontide_rt::thread::JoinHandle;
use moontide_rt::time::Instant;
use moontide_types::record::{Attributes, DigestContext, KeySection, RecordFlags, RecordLayout, State};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, Key, NodeId, ObjectId, SegmentId, SessionId, SlotId,
    Tenant, TenantGeneration, Term,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::counters::get;
use super::test_hooks::{HookPoint, Mutation};
use super::{DeviceThread, DiskConfig, DiskError, DiskMembers, DiskTier};
use crate::copier::Copier;
use crate::event_router::{EventRouter, NodeEvent};
use crate::executor::{CommandExecutor, ExecutorTask};
use crate::logic::groups::GroupSet;
use crate::logic::segment_plan::SegmentPlan;
use crate::memory::NodeMemory;

const SEGMENT: SegmentId = SegmentId(0);
const GENERATION: Generation = Generation(9);
const SESSION: SessionId = SessionId(5);

/// Session of the mark in the log that [`Harness::flush`] waits for.
const FLUSH_MARK: SessionId = SessionId(u64::MAX);

/// A step that takes longer hangs. Long, because machines are busy.
const HANG_TIMEOUT: Duration = Duration::from_secs(30);

fn term() -> Term {
    Term::new(3).unwrap()
}

/// Parameters of a [`Harness`].
#[derive(Clone, Copy, Debug)]
struct Setup {
    backend: BackendKind,
    slots: u32,
    /// Size of each slot's extent, in units of 512 bytes.
    units: u32,
    staging_bytes: u64,
    limit_bytes: u64,
    eviction_policy: EvictionPolicy,
    write_pause: Duration,
    exclude_after: Duration,
    mutation: Option<Mutation>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            backend: BackendKind::Bucket,
            slots: 16,
            units: 2048,
            staging_bytes: 1 << 20,
            limit_bytes: 64 << 20,
            eviction_policy: EvictionPolicy::Fifo,
            write_pause: Duration::from_millis(20),
            exclude_after: HANG_TIMEOUT,
            mutation: None,
        }
    }
}

/// An event for a session, or a command.
#[derive(Clone, Debug, PartialEq)]
enum LogEntry {
    /// An Offload command is about to be sent.
    Commanded(u64, RecordId),
    Result(SessionId, CommandResult),
    Present {
        session: SessionId,
        names: Vec<RecordId>,
        recovered: bool,
    },
    /// The inventory is complete.
    InventoryEnd(SessionId),
    Gone {
        session: SessionId,
        versions: Vec<(ObjectId, Epoch)>,
    },
}

/// Log of all events for sessions.
#[derive(Debug, Default)]
struct EventLog {
    entries: Mutex<Vec<LogEntry>>,
    changed: Condvar,
}

impl EventLog {
    fn record_all(&self, mut events: UnboundedReceiver<NodeEvent>) {
        while let Some(event) = events.blocking_recv() {
            match event {
                NodeEvent::Results { session, results } => {
                    let results = results.into_iter().map(|result| LogEntry::Result(session, result));
                    self.entries.lock().extend(results);
                }
                NodeEvent::Offloaded { session, notice } => {
                    let records =
                        Packed::<OffloadRecord>::decode(&notice.records, SESSION_RECORDS_MAX).unwrap();
                    let named =
                        |r: OffloadRecord| RecordId { id: r.id, version: r.epoch, stripe: r.stripe_index };
                    let names: Vec<RecordId> = records.iter().map(named).collect();
                    let present = LogEntry::Present { session, names, recovered: notice.recovered };
                    let end = LogEntry::InventoryEnd(session);
                    self.entries.lock().push(if notice.recovery_end { end } else { present });
                }
                NodeEvent::DiskEvicted { session, evicted } => {
                    let versions =
                        Packed::<VersionedId>::decode(&evicted.versions, SESSION_RECORDS_MAX).unwrap();
                    let versions = versions.iter().map(|version| (version.id, version.epoch)).collect();
                    self.entries.lock().push(LogEntry::Gone { session, versions });
                }
                // See `Harness::flush`.
                NodeEvent::Report(SegmentId(u32::MAX)) => {
                    self.entries.lock().push(LogEntry::InventoryEnd(FLUSH_MARK));
                }
                NodeEvent::Change(_) | NodeEvent::Report(_) => {}
            }
            self.changed.notify_all();
        }
    }

    /// Waits for the first log entry that `select` accepts.
    fn wait_for<T>(&self, what: &str, mut select: impl FnMut(&LogEntry) -> Option<T>) -> T {
        let until = Instant::now() + HANG_TIMEOUT;
        let (mut entries, mut seen) = (self.entries.lock(), 0);
        loop {
            if let Some(found) = entries[seen..].iter().find_map(&mut select) {
                return found;
            }
            seen = entries.len();
            assert!(!self.changed.wait_until(&mut entries, until).timed_out(), "no event: {what}");
        }
    }

    fn has_notice_of(&self, name: RecordId) -> bool {
        let is_notice =
            |entry: &LogEntry| matches!(entry, LogEntry::Present { names, .. } if names.contains(&name));
        self.entries.lock().iter().any(is_notice)
    }
}

/// A disk tier with its node components.
struct Harness {
    setup: Setup,
    disk: SimulatedDisk,
    memory: Arc<NodeMemory>,
    tier: Arc<DiskTier>,
    log: Arc<EventLog>,
    /// The current session.
    current: Mutex<Option<SessionId>>,
    tasks: Sender<ExecutorTask>,
    executor: Mutex<Option<JoinHandle<()>>>,
    disk_threads: Mutex<Vec<DeviceThread>>,
    shared: Arc<SharedState>,
}

/// State that survives a restart of the node: number generators, and all records.
#[derive(Debug, Default)]
struct SharedState {
    commands: AtomicU64,
    epochs: AtomicU64,
    /// Length and number of the object.
    records: Mutex<BTreeMap<RecordId, (u64, u64)>>,
}

impl Harness {
    fn new(setup: Setup) -> Arc<Harness> {
        Harness::on(SimulatedDisk::new(1), setup, Arc::default()).unwrap()
    }

    fn on(disk: SimulatedDisk, setup: Setup, shared: Arc<SharedState>) -> Result<Arc<Harness>, DiskError> {
        let dir = PathBuf::from("simulated");
        let members = DiskMembers::single(&dir);
        Harness::on_several(vec![(dir, disk)], members, setup, shared)
    }

    fn on_several(
        disks: Vec<(PathBuf, SimulatedDisk)>,
        members: DiskMembers,
        setup: Setup,
        shared: Arc<SharedState>,
    ) -> Result<Arc<Harness>, DiskError> {
        let plan = SegmentPlan { count: 1, units: setup.slots * setup.units, slots: setup.slots };
        let memory =
            NodeMemory::create(NodeId(1), GENERATION, plan, HugePages::Auto, Some(setup.staging_bytes), None)
                .unwrap();
        let memory = Arc::new(memory);
        memory.segment(SEGMENT).unwrap().set_grant(GroupId(0), term());
        let config = DiskConfig {
            backend: setup.backend,
            limit_bytes: Some(setup.limit_bytes),
            eviction_policy: setup.eviction_policy,
            read_threads: 2,
            exclude_after: setup.exclude_after,
            ..DiskConfig::default()
        };
        let (sender, events) = unbounded_channel();
        let router = EventRouter::single(sender);
        let staging = Arc::clone(memory.staging().unwrap());
        let disk = disks[0].1.clone();
        let storage = |(dir, disk)| (dir, Arc::new(disk) as Arc<dyn Storage>);
        let storages = disks.into_iter().map(storage).collect();
        let (memory_of_tier, events_of_tier) = (Arc::clone(&memory), Arc::clone(&router));
        let mut tier = DiskTier::open_on(storages, members, config, memory_of_tier, staging, events_of_tier)?;
        tier.write_pause = setup.write_pause;
        tier.test_hooks.mutation.enable(setup.mutation);
        let tier = Arc::new(tier);
        let disk_threads = Mutex::new(tier.start()?);
        let log = Arc::new(EventLog::default());
        let recorder = Arc::clone(&log);
        moontide_rt::thread::spawn(move || recorder.record_all(events));
        let (tasks, receiver) = mpsc::channel();
        let copier = Copier::idle(&memory, &router);
        let executor = CommandExecutor::new(
            Arc::clone(&memory),
            Some(Arc::clone(&tier)),
            copier,
            Arc::default(),
            router,
        );
        let executor = Mutex::new(Some(moontide_rt::thread::spawn(move || executor.run(&receiver))));
        let current = Mutex::default();
        let harness =
            Harness { setup, disk, memory, tier, log, current, tasks, executor, disk_threads, shared };
        harness.begin_session(SESSION);
        Ok(Arc::new(harness))
    }

    fn begin_session(&self, session: SessionId) {
        let ends = self.current.lock().replace(session);
        self.tasks.send(ExecutorTask::Session { begins: Some(session), ends }).unwrap();
        ends.into_iter().for_each(|ends| self.tier.end_session(ends));
        self.tier.announce_inventory(session);
        self.tier.start_inventory(session, GroupSet::all(NonZeroU16::MIN));
    }

    /// Stops all threads; none of them has panicked.
    fn end(&self) {
        self.tier.test_hooks.unhook();
        self.tasks.send(ExecutorTask::Stop).unwrap();
        self.tier.stop();
        if let Some(executor) = self.executor.lock().take() {
            assert!(executor.join().is_ok(), "the executor has panicked");
        }
        for thread in self.disk_threads.lock().drain(..) {
            let name = thread.name().to_owned();
            assert!(thread.join(None), "{name} has panicked");
        }
    }

    /// Crashes and restarts the node.
    fn crash(&self) -> Arc<Harness> {
        self.disk.crash_after(0);
        self.end();
        self.disk.restart();
        Harness::on(self.disk.clone(), self.setup, Arc::clone(&self.shared)).unwrap()
    }

    /// Starts a session and returns its inventory.
    fn inventory(&self, session: SessionId) -> Vec<RecordId> {
        self.begin_session(session);
        self.log.wait_for("inventory end", |entry| (*entry == LogEntry::InventoryEnd(session)).then_some(()));
        let entries = self.log.entries.lock();
        let of_session = entries.iter().filter_map(|entry| match entry {
            LogEntry::Present { session: of, names, .. } if *of == session => Some(names.clone()),
            _ => None,
        });
        of_session.flatten().collect()
    }

    /// Puts a new version of an object into a slot.
    fn put(&self, slot: SlotId, number: u64, len: u64) -> RecordId {
        let epoch = Epoch::new(term(), self.shared.epochs.fetch_add(1, Ordering::SeqCst) + 1).unwrap();
        let name = RecordId { id: id(number), version: epoch, stripe: 0 };
        let text = format!("key-{number}");
        let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(text.as_bytes()).unwrap() };
        let units = layout(&key, len).units();
        let record = RecordSpec {
            id: name.id,
            flags: RecordFlags::NONE,
            object_len: len,
            stripe_index: 0,
            stripe_count: 1,
            stripe_offset: 0,
            stripe_len: len,
            key,
            attributes: &Attributes::default(),
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        };
        let extent = Extent { start: slot.0 * self.setup.units, units };
        let grant = Grant { slot, epoch, term: term(), extent, record, writer: PayloadWriter::Node };
        let heap = self.memory.heap();
        heap.begin(SEGMENT, &grant).unwrap();
        self.memory.record_begun(SEGMENT, slot, epoch, units);
        let mut claim = heap.claim(SEGMENT, slot, epoch).unwrap();
        let root = claim.fill(&payload(number, epoch, len));
        claim.publish(root).unwrap();
        self.memory.record_transition(SEGMENT, slot, epoch, State::Ready);
        self.shared.records.lock().insert(name, (len, number));
        name
    }

    fn command(&self, kind: CommandKind, name: RecordId, slot: SlotId) -> u64 {
        let id = self.next_command_id();
        self.send(NodeCommand { slot, ..self.template(id, kind, name) });
        id
    }

    fn next_command_id(&self) -> u64 {
        self.shared.commands.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn template(&self, id: u64, kind: CommandKind, name: RecordId) -> NodeCommand {
        NodeCommand {
            generation: GENERATION,
            epoch: name.version,
            id: name.id,
            ..NodeCommand::new(id, kind, term())
        }
    }

    fn send(&self, command: NodeCommand) {
        let session = self.current.lock().expect("a session has begun");
        self.tasks
            .send(ExecutorTask::Commands { session, commands: vec![command], sources: vec![] })
            .unwrap();
    }

    fn offload(&self, name: RecordId, slot: SlotId) -> u64 {
        let id = self.next_command_id();
        self.log.entries.lock().push(LogEntry::Commanded(id, name));
        self.send(NodeCommand { slot, ..self.template(id, CommandKind::Offload, name) });
        id
    }

    fn remove(&self, name: RecordId) -> u64 {
        self.command(CommandKind::DropFromDisk, name, SlotId(0))
    }

    fn promote(&self, name: RecordId, slot: SlotId) -> u64 {
        let (len, number) = self.shared.records.lock()[&name];
        let text = format!("key-{number}");
        let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(text.as_bytes()).unwrap() };
        let extent = Extent { start: slot.0 * self.setup.units, units: layout(&key, len).units() };
        let id = self.next_command_id();
        self.send(NodeCommand { slot, extent, ..self.template(id, CommandKind::Promote, name) });
        id
    }

    /// Waits for the first result of a command.
    fn first_result(&self, id: u64) -> CommandResult {
        self.log.wait_for(&format!("result of command {id}"), |entry| match entry {
            LogEntry::Result(_, result) if result.command_id == id => Some(*result),
            _ => None,
        })
    }

    /// Waits until the log contains all events sent so far.
    fn flush(&self) {
        let is_mark = |entry: &LogEntry| *entry == LogEntry::InventoryEnd(FLUSH_MARK);
        let before = self.log.entries.lock().iter().filter(|entry| is_mark(entry)).count();
        assert!(self.tier.events.send(NodeEvent::Report(SegmentId(u32::MAX))));
        let mut count = 0;
        self.log.wait_for("flush mark", |entry| {
            count += usize::from(is_mark(entry));
            (count > before).then_some(())
        });
    }

    /// Waits for the final result of a command.
    fn outcome(&self, id: u64) -> Result<(), ErrorCode> {
        let is_final = |result: &CommandResult| result.status != CommandStatus::Accepted;
        let result = self.log.wait_for(&format!("final result of command {id}"), |entry| match entry {
            LogEntry::Result(_, result) if result.command_id == id && is_final(result) => Some(*result),
            _ => None,
        });
        result.code.map_or(Ok(()), Err)
    }

    /// Puts a record and offloads it.
    fn store(&self, slot: SlotId, number: u64, len: u64) -> RecordId {
        let name = self.put(slot, number, len);
        assert_eq!(self.outcome(self.offload(name, slot)), Ok(()), "{name:?}");
        assert!(self.log.has_notice_of(name), "the notice precedes the result");
        name
    }

    /// Stages a short record, or the first part of a long one.
    fn stage(&self, name: RecordId) -> Result<NodePin<'_>, ErrorCode> {
        self.stage_part(&read_op(name, 0))
    }

    fn stage_part(&self, op: &TransferOp) -> Result<NodePin<'_>, ErrorCode> {
        self.tier.stage(&[*op], Instant::now() + HANG_TIMEOUT).pop().unwrap()
    }

    /// Stages a record and verifies its bytes.
    fn fetch(&self, name: RecordId) -> Result<(), ErrorCode> {
        let len = self.shared.records.lock().get(&name).expect("the record was put").0;
        if len > DISK_PART_BYTES {
            return self.fetch_parts(name, len);
        }
        let pin = self.stage(name)?;
        self.check(name, &pin);
        Ok(())
    }

    /// Stages a long record part by part, then its digests, and verifies all of it.
    fn fetch_parts(&self, name: RecordId, len: u64) -> Result<(), ErrorCode> {
        let mut bytes = Vec::with_capacity(len as usize);
        for offset in (0..len).step_by(DISK_PART_BYTES as usize) {
            let len = DISK_PART_BYTES.min(len - offset);
            let pin = self.stage_part(&TransferOp { len, ..read_op(name, offset) })?;
            assert_eq!(RecordId::of(pin.header()), name);
            assert!(pin.header().flags.digestless(), "a part has no digests");
            bytes.extend_from_slice(pin.payload());
        }
        let number = self.shared.records.lock()[&name].1;
        assert!(bytes == payload(number, name.version, len), "{name:?}: wrong bytes");
        let op = TransferOp { flags: OpFlags::DISK.with(OpFlags::DIGESTS), ..read_op(name, 0) };
        let pin = self.stage_part(&op)?;
        let context = DigestContext { id: name.id, version: name.version, stripe: 0, len };
        let mut digests = vec![];
        context.payload(&bytes, |digest| digests.extend(digest.to_le_bytes()));
        assert!(pin.payload() == digests, "{name:?}: wrong digests");
        Ok(())
    }

    /// Verifies that the bytes are those that were put.
    fn check(&self, name: RecordId, pin: &NodePin<'_>) {
        let (len, number) = *self.shared.records.lock().get(&name).expect("the record was put");
        assert_eq!(RecordId::of(pin.header()), name);
        assert!(pin.payload() == payload(number, name.version, len), "{name:?}: wrong bytes");
        let context = DigestContext { id: name.id, version: name.version, stripe: 0, len };
        let mut digests = vec![];
        let root = context.payload(pin.payload(), |digest| digests.extend(digest.to_le_bytes()));
        assert_eq!((pin.header().root, pin.digests()), (root, &digests[..]), "{name:?}");
    }

    fn count(&self, of: impl Fn(&super::DiskCounters) -> &AtomicU64) -> u64 {
        get(of(&self.tier.counters))
    }

    /// Every requested load has exactly one outcome.
    fn check_sum(&self) {
        let until = Instant::now() + HANG_TIMEOUT;
        loop {
            let counters = &self.tier.counters;
            let outcomes = [
                &counters.loads_staged,
                &counters.loads_read,
                &counters.loads_missed,
                &counters.loads_failed,
            ];
            let (requested, sum) = (get(&counters.loads_requested), outcomes.map(get).iter().sum::<u64>());
            if requested == sum {
                return;
            }
            // A load whose caller timed out may still be in progress.
            assert!(
                sum < requested && Instant::now() < until,
                "{requested} requested, outcomes {outcomes:?}"
            );
            moontide_rt::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a pause of writes is over.
    fn wait_for_pause(&self) {
        moontide_rt::thread::sleep(self.setup.write_pause + Duration::from_millis(2));
    }
}

/// Returns an operation that reads the part of a record at `offset`.
fn read_op(name: RecordId, offset: u64) -> TransferOp {
    TransferOp {
        kind: OpKind::Read,
        flags: OpFlags::DISK,
        stripe: name.stripe,
        segment: SegmentId(0),
        generation: Generation(0),
        slot: SlotId(0),
        term: term(),
        epoch: name.version,
        id: name.id,
        offset,
        len: 1,
        capability: Capability::default(),
    }
}

fn read_ops(names: &[RecordId]) -> Vec<TransferOp> {
    names.iter().map(|name| read_op(*name, 0)).collect()
}

fn layout(key: &KeySection<'_>, len: u64) -> RecordLayout {
    RecordLayout::new(len, key.encoded_len() as u32, 0, RecordFlags::NONE).unwrap()
}

fn payload(number: u64, version: Epoch, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fill(number << 40 ^ version.sequence(), &mut bytes);
    bytes
}
