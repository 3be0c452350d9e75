//! Copies between the memory of two nodes, with kills, ends of sessions and damaged bytes at every step.

use std::fmt;
use std::num::NonZeroU16;

use moontide_heap::{Grant, HugePages, NodePin, PayloadWriter, RecordSpec};
use moontide_proto::{
    AccessRight, Capability, CapabilityKey, CapabilityScope, CommandKind, CommandStatus, CopyPurpose,
    NodeCommand,
};
use moontide_rt::sync::mpsc;
use moontide_rt::{SplitMix64, with_mutation};
use moontide_transfer::{CarriedEngine, CarriedRequest, Carrier, EngineKind, Metrics, Owner, PeerIdentity};
use moontide_types::record::{KeySection, RecordFlags, RecordLayout};
use moontide_types::{
    Epoch, Extent, Generation, GroupId, Key, SegmentId, SlotId, Tenant, TenantGeneration, Term,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::capabilities::CapabilityKeys;
use crate::event_router::NodeEvent;
use crate::executor::{CommandExecutor, ExecutorTask};
use crate::logic::groups::GroupSet;
use crate::logic::segment_plan::SegmentPlan;
use crate::owner::NodeOwner;
use crate::sync_marks::SyncMarkStore;

const SEGMENT: SegmentId = SegmentId(0);
const SLOT_UNITS: u32 = 1024;
const SLOTS: u32 = 8;
const SESSION: SessionId = SessionId(5);
const SOURCE: NodeId = NodeId(1);
const TARGET: NodeId = NodeId(2);
const FROM: SlotId = SlotId(3);
const INTO: SlotId = SlotId(6);
const ID: ObjectId = ObjectId([7; 16]);
const KEY: &[u8] = b"the key";
const GROUPS: NonZeroU16 = NonZeroU16::MIN;

fn term() -> Term {
    Term::new(3).unwrap()
}

fn epoch(sequence: u64) -> Epoch {
    Epoch::new(term(), sequence).unwrap()
}

fn memory(node: NodeId) -> Arc<NodeMemory> {
    let plan = SegmentPlan { count: 1, units: SLOTS * SLOT_UNITS, slots: SLOTS };
    let memory = NodeMemory::create(node, Generation(9), plan, HugePages::Auto, None, None).unwrap();
    memory.segment(SEGMENT).unwrap().set_grant(GroupId(0), term());
    Arc::new(memory)
}

fn extent(slot: SlotId, units: u32) -> Extent {
    Extent { start: slot.0 * SLOT_UNITS, units }
}

/// Writes a READY record. Returns its root and its size.
fn put(memory: &NodeMemory, slot: SlotId, version: u64, payload: &[u8]) -> (u64, u32) {
    let key = KeySection { tenant: Tenant::DEFAULT, key: Key::new(KEY).unwrap() };
    let stripe_len = payload.len() as u64;
    let layout = RecordLayout::new(stripe_len, key.encoded_len() as u32, 0, RecordFlags::NONE).unwrap();
    let (epoch, extent) = (epoch(version), extent(slot, layout.units()));
    let record = RecordSpec {
        id: ID,
        flags: RecordFlags::NONE,
        object_len: stripe_len,
        stripe_index: 0,
        stripe_count: 1,
        stripe_offset: 0,
        stripe_len,
        key,
        attributes: &Attributes::default(),
        id_key: 1,
        tenant_generation: TenantGeneration(0),
    };
    let grant = Grant { slot, epoch, term: term(), extent, record, writer: PayloadWriter::Node };
    memory.heap().begin(SEGMENT, &grant).unwrap();
    memory.record_begun(SEGMENT, slot, epoch, extent.units);
    let mut claim = memory.heap().claim(SEGMENT, slot, epoch).unwrap();
    let root = claim.fill(payload);
    claim.publish(root).unwrap();
    memory.record_transition(SEGMENT, slot, epoch, State::Ready);
    (root, extent.units)
}

/// Step of a copy, after its request was served and before the reply arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Described,
    Read,
}

type Hook = Box<dyn FnMut(Step, &mut Vec<u8>) + Send>;

/// The source node, and what happens at each step.
struct SourceNode {
    owner: NodeOwner,
    memory: Arc<NodeMemory>,
    hook: Mutex<Option<Hook>>,
}

impl fmt::Debug for SourceNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SourceNode")
    }
}

impl Carrier for SourceNode {
    fn carry(&self, peer: &Peer, request: CarriedRequest, deadline: Instant) -> Result<Vec<u8>, ErrorCode> {
        if peer.addresses.is_empty() {
            return Err(ErrorCode::Unreachable);
        }
        let (step, mut reply) = match request {
            CarriedRequest::Call(kind, body) => {
                (Step::Described, self.owner.call(PeerIdentity::Remote(1), None, kind, &body, deadline)?)
            }
            CarriedRequest::Read(op) => {
                (Step::Read, moontide_transfer::serve_read(&self.owner, None, &op, deadline, || ())?)
            }
        };
        let hook = self.hook.lock().take();
        if let Some(mut hook) = hook {
            hook(step, &mut reply);
            *self.hook.lock() = Some(hook);
        }
        Ok(reply)
    }
}

struct Harness {
    source: Arc<SourceNode>,
    memory: Arc<NodeMemory>,
    copier: Arc<Copier>,
    executor: Arc<Mutex<CommandExecutor>>,
    router: Arc<EventRouter>,
    events: Mutex<UnboundedReceiver<NodeEvent>>,
}

impl Harness {
    fn new() -> Harness {
        let source_memory = memory(SOURCE);
        let (sender, _) = unbounded_channel();
        let (tasks, _) = mpsc::channel();
        let capabilities = CapabilityKeys::new(GROUPS, CapabilityKey::new([1; 32]));
        capabilities.hold(term(), &key_of_source(), &GroupSet::all(GROUPS));
        let owner = NodeOwner::new(
            SOURCE,
            Arc::clone(&source_memory),
            None,
            Arc::new(capabilities),
            Arc::default(),
            EventRouter::single(sender),
            tasks,
        );
        let source = Arc::new(SourceNode { owner, memory: source_memory, hook: Mutex::new(None) });
        let engine = CarriedEngine(Arc::clone(&source) as Arc<dyn Carrier>);
        let engines = Engines::new(vec![Arc::new(engine)], Metrics::new());
        let memory = memory(TARGET);
        let (sender, events) = unbounded_channel();
        let router = EventRouter::new(vec![GroupId(0)], SyncMarkStore::open(&[]));
        let route = Arc::from("master");
        router.open(&route, GroupSet::all(std::num::NonZeroU16::MIN), sender);
        router.set_session(&route, SESSION);
        let copier =
            Arc::new(Copier::new(Arc::clone(&memory), Arc::clone(&router), Arc::default(), engines, 0));
        copier.learn(vec![(77, peer())]);
        let mut executor = CommandExecutor::new(
            Arc::clone(&memory),
            None,
            Arc::clone(&copier),
            Arc::default(),
            Arc::clone(&router),
        );
        executor.take(ExecutorTask::Session { begins: Some(SESSION), ends: None });
        let executor = Arc::new(Mutex::new(executor));
        Harness { source, memory, copier, executor, router, events: Mutex::new(events) }
    }

    fn command(&self, id: u64, kind: CommandKind, units: u32) -> NodeCommand {
        NodeCommand {
            segment: SEGMENT,
            generation: Generation(9),
            slot: INTO,
            epoch: epoch(1),
            id: ID,
            extent: extent(INTO, units),
            payload_offset: extent(INTO, units).span().offset(),
            lease_ms: 30_000,
            ..NodeCommand::new(id, kind, term())
        }
    }

    fn give(&self, command: NodeCommand, sources: Vec<CopySource>) {
        let task = ExecutorTask::Commands { session: SESSION, commands: vec![command], sources };
        let mut executor = self.executor.lock();
        executor.take(task);
        executor.round(SystemClock.now());
    }

    /// Commands a copy of the record in [`FROM`], and makes it.
    fn copy(&self, root: u64, units: u32) -> CommandResult {
        self.give(self.command(1, CommandKind::Copy, units), vec![source(root)]);
        self.copier.run_queued();
        self.result(1)
    }

    /// Returns the last result of a command.
    fn result(&self, id: u64) -> CommandResult {
        let mut last = None;
        let mut events = self.events.lock();
        while let Ok(event) = events.try_recv() {
            if let NodeEvent::Results { results, .. } = event {
                last = results.into_iter().rfind(|result| result.command_id == id).or(last);
            }
        }
        last.unwrap_or_else(|| panic!("command {id} has no result"))
    }

    fn copied(&self) -> Option<NodePin<'_>> {
        self.memory.heap().pin(SEGMENT, INTO, epoch(1))
    }

    /// Lets something happen after a step.
    fn at(&self, step: Step, mut what: impl FnMut(&mut Vec<u8>) + Send + 'static) {
        let mut is_done = false;
        *self.source.hook.lock() = Some(Box::new(move |at, reply| {
            if at == step && !std::mem::replace(&mut is_done, at == step) {
                what(reply);
            }
        }));
    }
}

fn peer() -> Peer {
    Peer { node: SOURCE, addresses: vec![(EngineKind::Tcp, "source:1".into())] }
}

fn key_of_source() -> CapabilityKey {
    CapabilityKey::new([2; 32])
}

fn source(root: u64) -> CopySource {
    let scope = CapabilityScope {
        right: AccessRight::Read,
        stripe: 0,
        segment: SEGMENT,
        generation: Generation(9),
        slot: FROM,
        term: term(),
        epoch: epoch(1),
        id: ID,
    };
    CopySource {
        node: SOURCE,
        generation: Generation(9),
        root,
        capability: key_of_source().sign(&scope),
        segment: SEGMENT,
        slot: FROM,
        term: term(),
        purpose: CopyPurpose::Drain,
    }
}

fn payload(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SplitMix64::new(len as u64).fill(&mut bytes);
    bytes
}

#[test]
fn copy_without_capability_is_refused() {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    let forged = CopySource { capability: Capability([5; 16]), ..source(root) };
    harness.give(harness.command(1, CommandKind::Copy, units), vec![forged]);
    harness.copier.run_queued();
    let result = harness.result(1);
    assert_eq!((result.status, result.code), (CommandStatus::Refused, Some(ErrorCode::PermissionDenied)));
}

#[test]
fn copy_has_payload_digests_and_key_of_its_source() {
    for len in [0, 1, 511, 512, 4096, 4097, 262_144, 300_001] {
        let harness = Harness::new();
        let (root, units) = put(&harness.source.memory, FROM, 1, &payload(len));
        let result = harness.copy(root, units);
        assert_eq!((result.status, result.code), (CommandStatus::Done, None), "{len} bytes");
        let copied = harness.copied().unwrap_or_else(|| panic!("no copy of {len} bytes"));
        assert!(copied.payload() == payload(len), "{len} bytes");
        let original = harness.source.memory.heap().pin(SEGMENT, FROM, epoch(1)).unwrap();
        assert_eq!(copied.digests(), original.digests());
        assert_eq!((copied.key(), copied.header().root), (original.key(), root));
        assert_eq!(copied.header().digest_context().payload(copied.payload(), |_| ()), root);
    }
}

#[test]
fn copy_of_a_record_that_is_gone_is_refused_and_leaves_no_record() {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    let _ = harness.source.memory.heap().kill(SEGMENT, FROM, epoch(1), moontide_types::MonoTime(0));
    assert_eq!(harness.copy(root, units).code, Some(ErrorCode::Gone));
    assert!(harness.copied().is_none());
    assert!(!harness.memory.segment(SEGMENT).unwrap().is_occupied());
}

#[test]
fn copy_from_a_node_without_address_is_refused() {
    let harness = Harness::new();
    harness.copier.learn(vec![(78, Peer { node: SOURCE, addresses: vec![] })]);
    assert_eq!(harness.copy(1, 16).code, Some(ErrorCode::Unreachable));
}

#[test]
fn copy_with_another_root_than_the_master_named_is_refused() {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    assert_eq!(harness.copy(root ^ 1, units).code, Some(ErrorCode::Corrupt));
    assert!(harness.copied().is_none());
}

/// Bytes that were damaged on the way: the payload, or any byte of the description.
#[test]
fn damaged_copy_is_never_published() {
    for byte in [0, 4095, 4096, 4999] {
        let harness = Harness::new();
        let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
        harness.at(Step::Read, move |reply| reply[byte] ^= 1);
        assert_eq!(harness.copy(root, units).status, CommandStatus::Refused, "byte {byte}");
        assert!(harness.copied().is_none(), "byte {byte}");
    }
    let described = Arc::new(Mutex::new(0));
    {
        let harness = Harness::new();
        let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
        let seen = Arc::clone(&described);
        harness.at(Step::Described, move |reply| *seen.lock() = reply.len());
        harness.copy(root, units);
    }
    let described = *described.lock();
    for byte in 0..described {
        let harness = Harness::new();
        let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
        harness.at(Step::Described, move |reply| reply[byte] ^= 1);
        let result = harness.copy(root, units);
        if result.status == CommandStatus::Done {
            let copied = harness.copied().unwrap();
            assert!(copied.payload() == payload(5000) && copied.key().ends_with(KEY), "byte {byte}");
        }
    }
}

/// The slot is killed at a step of the copy. Returns whether no record appears there after the reply to the kill.
fn killed_at(step: Step, kind: CommandKind, mutation: Option<&'static str>) -> bool {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    let (executor, kill) = (Arc::clone(&harness.executor), harness.command(2, kind, 0));
    let kill = NodeCommand { extent: Extent::default(), payload_offset: 0, lease_ms: 0, ..kill };
    harness.at(step, move |_| {
        let task = ExecutorTask::Commands { session: SESSION, commands: vec![kill], sources: vec![] };
        let mut executor = executor.lock();
        executor.take(task);
        executor.round(SystemClock.now());
    });
    with_mutation(mutation, || harness.copy(root, units));
    // A kill of a record that is there is accepted, and one of a free slot is done.
    let is_dead = harness.copied().is_none();
    // A reclaim that waited for the copy ends now.
    harness.executor.lock().round(SystemClock.now());
    is_dead && (kind != CommandKind::Reclaim || !harness.memory.segment(SEGMENT).unwrap().is_occupied())
}

#[test]
fn copy_killed_before_its_begin_leaves_no_record() {
    assert!(killed_at(Step::Described, CommandKind::Kill, None));
    assert!(killed_at(Step::Described, CommandKind::Reclaim, None));
}

#[test]
fn copy_killed_while_it_is_read_leaves_no_record() {
    assert!(killed_at(Step::Read, CommandKind::Kill, None));
    assert!(killed_at(Step::Read, CommandKind::Reclaim, None));
}

/// The session ends before the begin. Returns whether the copy does not touch the slot, which may belong to another object.
fn cancelled_before_begin(mutation: Option<&'static str>) -> bool {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    let (router, memory) = (Arc::clone(&harness.router), Arc::clone(&harness.memory));
    let is_read = Arc::new(Mutex::new(false));
    let seen = Arc::clone(&is_read);
    *harness.source.hook.lock() = Some(Box::new(move |step, _| match step {
        Step::Described => {
            router.set_session("master", SessionId(0));
            memory.fills.cancel_session(SESSION);
        }
        Step::Read => *seen.lock() = true,
    }));
    with_mutation(mutation, || {
        harness.give(harness.command(1, CommandKind::Copy, units), vec![source(root)]);
        harness.copier.run_queued();
    });
    let is_read = *is_read.lock();
    !is_read
}

#[test]
fn copy_cancelled_before_its_begin_does_not_touch_the_slot() {
    assert!(cancelled_before_begin(None));
}

#[test]
fn mutation_begin_of_cancelled_copy_is_detected() {
    assert!(!cancelled_before_begin(Some("copy-begun-after-kill")));
}

/// The session ends at a step. Returns whether no record appears.
fn session_ends_at(step: Step, mutation: Option<&'static str>) -> bool {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    let (router, memory) = (Arc::clone(&harness.router), Arc::clone(&harness.memory));
    harness.at(step, move |_| {
        router.set_session("master", SessionId(0));
        memory.fills.cancel_session(SESSION);
    });
    with_mutation(mutation, || {
        harness.give(harness.command(1, CommandKind::Copy, units), vec![source(root)]);
        harness.copier.run_queued();
    });
    !harness.memory.segment(SEGMENT).unwrap().is_occupied() || {
        // A record that had begun is dead, and is reclaimed.
        harness.executor.lock().round(SystemClock.now());
        !harness.memory.segment(SEGMENT).unwrap().is_occupied()
    }
}

#[test]
fn copy_of_an_ended_session_leaves_no_record() {
    assert!(session_ends_at(Step::Described, None));
    assert!(session_ends_at(Step::Read, None));
}

#[test]
fn mutation_publication_of_cancelled_copy_is_detected() {
    assert!(!session_ends_at(Step::Read, Some("copy-published-after-kill")));
}

/// The command of an ended session reaches the executor late.
fn commanded_by_ended_session(mutation: Option<&'static str>) -> bool {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    harness.router.set_session("master", SessionId(0));
    harness.memory.fills.cancel_session(SESSION);
    with_mutation(mutation, || {
        harness.give(harness.command(1, CommandKind::Copy, units), vec![source(root)]);
        harness.copier.run_queued();
    });
    harness.copied().is_none()
}

#[test]
fn copy_commanded_by_an_ended_session_is_not_made() {
    assert!(commanded_by_ended_session(None));
}

#[test]
fn mutation_copy_of_ended_session_is_detected() {
    assert!(!commanded_by_ended_session(Some("copy-outlives-session")));
}

/// Returns how many copies are queued after a command that is sent twice.
fn queued_twice(mutation: Option<&'static str>) -> usize {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    let copy = harness.command(1, CommandKind::Copy, units);
    with_mutation(mutation, || {
        harness.give(copy, vec![source(root)]);
        harness.give(copy, vec![source(root)]);
    });
    harness.copier.queued()
}

#[test]
fn repeated_command_is_executed_once() {
    assert_eq!(queued_twice(None), 1);
}

#[test]
fn mutation_repeated_execution_is_detected() {
    assert_eq!(queued_twice(Some("copy-executed-again")), 2);
}

#[test]
fn late_copy_is_cancelled() {
    let harness = Harness::new();
    let (root, units) = put(&harness.source.memory, FROM, 1, &payload(5000));
    let copy = NodeCommand { lease_ms: 1, ..harness.command(1, CommandKind::Copy, units) };
    harness.give(copy, vec![source(root)]);
    moontide_rt::thread::sleep(Duration::from_millis(20));
    harness.copier.run_queued();
    assert_eq!(harness.result(1).code, Some(ErrorCode::Cancelled));
    assert!(harness.copied().is_none());
}

#[test]
fn stopped_copier_refuses_copies() {
    let harness = Harness::new();
    harness.copier.stop();
    assert_eq!(harness.copy(1, 16).code, Some(ErrorCode::Busy));
}
