//! [`Events`]: the event queue; and the messages between processes.
//!
//! Invariant: events of the same time happen in the order in which they were scheduled.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use moontide_master::election::{ClusterState, DocumentVersion, MasterAddresses, Snapshot};
use moontide_meta::GroupHandoff;
use moontide_proto::{CommitEntry, FixedRecord, Handle, ObjectEntry, v1};
use moontide_transfer::CarriedRequest;
use moontide_types::{Epoch, ErrorCode, GroupId, MonoTime, NodeId, ObjectId, SessionId, Term};
use prost::Message as _;

use crate::client::ClientTimer;
use crate::faults::Fault;
use crate::master::MasterTimer;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ProcessId {
    Registry,
    Master(usize),
    Node(usize),
    Client(usize),
}

/// Something that happens at a time.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A message arrives.
    Deliver(Box<Envelope>),
    /// A timer of a process fires. Timers of an earlier incarnation are ignored.
    Timer { process: ProcessId, incarnation: u32, timer: Timer },
    /// Something breaks.
    Fault(Fault),
    /// A process that had ended is there again.
    Starts(ProcessId),
    /// A process that was stopped goes on.
    Resumes(ProcessId),
    /// All faults are healed, and no further ones occur.
    Heal,
    /// Progress is checked against its limits.
    CheckProgress,
}

impl Event {
    /// The process that has to run for it.
    pub(crate) fn needs(&self) -> Option<ProcessId> {
        match self {
            Event::Deliver(envelope) => Some(envelope.to),
            Event::Timer { process, .. } => Some(*process),
            _ => None,
        }
    }
}

/// Timer of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Timer {
    Master(MasterTimer),
    Client(ClientTimer),
}

/// Message in flight.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub(crate) from: ProcessId,
    pub(crate) to: ProcessId,
    pub(crate) message: Message,
}

/// Message between processes. A process never reuses a call number.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// Request of a client to a master.
    Call { call: u64, request: Request },
    /// Reply of a master to a client.
    Reply { call: u64, reply: MasterReply },
    /// Operation of a client on a node.
    Ask { call: u64, ask: NodeOp },
    /// Reply of a node to a client.
    NodeReply { call: u64, reply: NodeReply },
    /// Request of a node to another one, from which it copies.
    Fetch { call: u64, node: NodeId, request: CarriedRequest },
    /// Reply to it.
    Fetched { call: u64, reply: Result<Payload, ErrorCode> },
    /// Request of a node to a master.
    NodeCall { call: u64, request: NodeRequest },
    /// Response of a master to a node.
    NodeResponse { call: u64, reply: NodeResponse },
    /// Request of a master to the registry.
    Registry { call: u64, request: RegistryRequest },
    /// Response of the registry.
    RegistryResponse { call: u64, reply: RegistryResponse },
    /// Handoff of a group to another master.
    Handoff { call: u64, group: GroupId, handoff: Arc<GroupHandoff> },
    /// Acknowledgement of a handoff.
    HandoffAck { call: u64 },
    /// A node wants a stream of its session.
    StreamOpen { stream: u64, session: SessionId },
    /// It has one.
    StreamOpened { stream: u64 },
    /// On the stream.
    FromNode { stream: u64, message: v1::NodeMessage },
    /// On the stream.
    FromMaster { stream: u64, message: v1::MasterMessage },
    /// The stream is over: by the other side, for this reason, or because the connection broke.
    StreamEnd { stream: u64, code: Option<ErrorCode> },
}

impl Message {
    /// Returns the stream of the message; messages of a stream arrive in order.
    pub(crate) fn stream(&self) -> Option<u64> {
        match *self {
            Message::StreamOpen { stream, .. }
            | Message::StreamOpened { stream }
            | Message::FromNode { stream, .. }
            | Message::FromMaster { stream, .. }
            | Message::StreamEnd { stream, .. } => Some(stream),
            _ => None,
        }
    }

    /// Goes into the trace: all of it, shortly.
    fn mark(&self, trace: &mut impl Hasher) {
        std::mem::discriminant(self).hash(trace);
        match self {
            Message::Call { call, request } => (call, bytes_of(request)).hash(trace),
            Message::Reply { call, reply } => (call, reply.bytes()).hash(trace),
            Message::Ask { call, ask } => (call, ask.location(), ask.epoch()).hash(trace),
            Message::NodeReply { call, reply } => (call, reply.mark()).hash(trace),
            Message::Fetch { call, node, request } => (call, node, format!("{request:?}")).hash(trace),
            Message::Fetched { call, reply } => {
                (call, reply.as_ref().map(Payload::number).map_err(|code| *code as u64)).hash(trace);
            }
            Message::NodeCall { call, request } => {
                let bytes = match request {
                    NodeRequest::Open(m) => m.encode_to_vec(),
                    NodeRequest::Mount(m) => m.encode_to_vec(),
                    NodeRequest::Unmount(m) => m.encode_to_vec(),
                    NodeRequest::Map(m) => m.encode_to_vec(),
                    NodeRequest::Info(m) => m.encode_to_vec(),
                };
                (call, bytes).hash(trace);
            }
            Message::NodeResponse { call, reply } => {
                let bytes = match reply {
                    NodeResponse::Opened(m) => m.encode_to_vec(),
                    NodeResponse::Mounted(m) => m.encode_to_vec(),
                    NodeResponse::Unmounted(m) => m.encode_to_vec(),
                    NodeResponse::Map(m) => m.encode_to_vec(),
                    NodeResponse::Info(m) => m.encode_to_vec(),
                };
                (call, bytes).hash(trace);
            }
            Message::Registry { call, request } => (call, format!("{request:?}")).hash(trace),
            Message::RegistryResponse { call, reply } => (call, format!("{reply:?}")).hash(trace),
            Message::Handoff { call, group, handoff } => {
                (call, group, handoff.objects.len(), &handoff.tombstones).hash(trace);
                handoff.objects.iter().for_each(|object| (object.id, object.epoch).hash(trace));
            }
            Message::HandoffAck { call } => call.hash(trace),
            Message::StreamOpen { stream, session } => (stream, session).hash(trace),
            Message::StreamOpened { stream } => stream.hash(trace),
            Message::FromNode { stream, message } => (stream, message.encode_to_vec()).hash(trace),
            Message::FromMaster { stream, message } => (stream, message.encode_to_vec()).hash(trace),
            Message::StreamEnd { stream, code } => (stream, code).hash(trace),
        }
    }
}

/// Requests of clients to a master, as wire messages.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    PutStart(v1::PutStartRequest),
    PutEnd(v1::PutEndRequest),
    Revoke(v1::PutRevokeRequest),
    Lookup(v1::GetReplicaListRequest),
    Exist(v1::ExistRequest),
    Touch(v1::TouchRequest),
    Remove(v1::RemoveRequest),
    Map(v1::GetGroupMapRequest),
}

fn bytes_of(request: &Request) -> Vec<u8> {
    match request {
        Request::PutStart(m) => m.encode_to_vec(),
        Request::PutEnd(m) => m.encode_to_vec(),
        Request::Revoke(m) => m.encode_to_vec(),
        Request::Lookup(m) => m.encode_to_vec(),
        Request::Exist(m) => m.encode_to_vec(),
        Request::Touch(m) => m.encode_to_vec(),
        Request::Remove(m) => m.encode_to_vec(),
        Request::Map(m) => m.encode_to_vec(),
    }
}

/// Replies of a master to clients.
#[derive(Clone, Debug)]
pub(crate) enum MasterReply {
    Started(v1::PutStartResponse),
    Found(v1::GetReplicaListResponse),
    Present(v1::ExistResponse),
    Outcomes(v1::OutcomesResponse),
    Map(v1::GetGroupMapResponse),
}

impl MasterReply {
    fn bytes(&self) -> Vec<u8> {
        match self {
            MasterReply::Started(m) => m.encode_to_vec(),
            MasterReply::Found(m) => m.encode_to_vec(),
            MasterReply::Present(m) => m.encode_to_vec(),
            MasterReply::Outcomes(m) => m.encode_to_vec(),
            MasterReply::Map(m) => m.encode_to_vec(),
        }
    }
}

/// Requests of nodes to a master.
#[derive(Clone, Debug)]
pub(crate) enum NodeRequest {
    Open(v1::OpenSessionRequest),
    Mount(v1::MountSegmentsRequest),
    Unmount(v1::UnmountSegmentsRequest),
    Map(v1::GetGroupMapRequest),
    Info(v1::GetClusterInfoRequest),
}

/// Responses of a master to nodes.
#[derive(Clone, Debug)]
pub(crate) enum NodeResponse {
    Opened(v1::OpenSessionResponse),
    Mounted(v1::MountSegmentsResponse),
    Unmounted(v1::OutcomesResponse),
    Map(v1::GetGroupMapResponse),
    Info(v1::GetClusterInfoResponse),
}

/// Requests of masters to the registry.
#[derive(Clone, Debug)]
pub(crate) enum RegistryRequest {
    Read,
    Write { token: Option<DocumentVersion>, document: ClusterState },
    Join { number: Term, addresses: MasterAddresses, lease: Duration },
    Renew { number: Term },
    Remove { number: Term },
}

/// Responses of the registry.
#[derive(Clone, Debug)]
pub(crate) enum RegistryResponse {
    Seen(Snapshot),
    Wrote(bool),
    Renewed(bool),
    Done,
}

/// Operations of clients on a node.
#[derive(Clone, Debug)]
pub(crate) enum NodeOp {
    Begin {
        object: ObjectEntry,
        handle: Handle,
        key: usize,
        attributes: Vec<u8>,
    },
    /// The bytes that are made of the token.
    Write {
        object: ObjectEntry,
        handle: Handle,
        token: u64,
    },
    Commit(CommitEntry),
    Read {
        id: ObjectId,
        epoch: Epoch,
        handle: Handle,
    },
}

impl NodeOp {
    fn epoch(&self) -> Epoch {
        match self {
            NodeOp::Begin { object, .. } | NodeOp::Write { object, .. } => object.epoch,
            NodeOp::Commit(entry) => entry.epoch,
            NodeOp::Read { epoch, .. } => *epoch,
        }
    }

    fn location(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            NodeOp::Begin { handle, .. } | NodeOp::Write { handle, .. } | NodeOp::Read { handle, .. } => {
                handle.encode(&mut bytes);
            }
            NodeOp::Commit(entry) => entry.encode(&mut bytes),
        }
        bytes
    }
}

/// Replies of a node.
#[derive(Clone, Debug)]
pub(crate) enum NodeReply {
    Done,
    /// The bytes are there, with this root.
    Written {
        root: u64,
    },
    Bytes(Payload),
    Refused(ErrorCode),
}

impl NodeReply {
    fn mark(&self) -> (u8, u64) {
        match self {
            NodeReply::Done => (0, 0),
            NodeReply::Written { root } => (1, *root),
            NodeReply::Bytes(payload) => (2, payload.number()),
            NodeReply::Refused(code) => (3, *code as u64),
        }
    }
}

/// Bytes of an object. A trace shows what they are, not all of them.
#[derive(Clone)]
pub(crate) struct Payload(pub(crate) Vec<u8>);

impl Payload {
    fn number(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }
}

impl std::fmt::Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes #{:016x}", self.0.len(), self.number())
    }
}

#[derive(Debug)]
struct Scheduled {
    at: MonoTime,
    number: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Scheduled) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// The queue of events and the time.
#[derive(Debug, Default)]
pub(crate) struct Events {
    queue: BinaryHeap<Reverse<Scheduled>>,
    now: MonoTime,
    count: u64,
}

impl Events {
    /// The time of the event that happens now.
    pub(crate) fn now(&self) -> MonoTime {
        self.now
    }

    /// Lets something happen at a time that has not passed.
    pub(crate) fn at(&mut self, at: MonoTime, event: Event) {
        self.count += 1;
        self.queue.push(Reverse(Scheduled { at: at.max(self.now), number: self.count, event }));
    }

    /// Lets something happen some time from now.
    pub(crate) fn after(&mut self, span: std::time::Duration, event: Event) {
        self.at(self.now.after(span), event);
    }

    /// Lets something happen some time from now.
    pub(crate) fn after_ms(&mut self, ms: u64, event: Event) {
        self.after(std::time::Duration::from_millis(ms), event);
    }

    /// Returns the time of the next event.
    pub(crate) fn due(&self) -> Option<MonoTime> {
        self.queue.peek().map(|Reverse(next)| next.at)
    }

    /// Moves the time on.
    pub(crate) fn set_now(&mut self, now: MonoTime) {
        self.now = self.now.max(now);
    }

    /// Takes the next event if it is due.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let is_due = self.due().is_some_and(|due| due <= self.now);
        is_due.then(|| self.queue.pop().expect("looked at above").0.event)
    }
}

/// Goes into the trace.
pub(crate) fn hash_event(at: MonoTime, event: &Event, trace: &mut impl Hasher) {
    at.hash(trace);
    match event {
        Event::Deliver(envelope) => {
            (envelope.from, envelope.to).hash(trace);
            envelope.message.mark(trace);
        }
        Event::Timer { process, incarnation, timer } => {
            (process, incarnation).hash(trace);
            match timer {
                Timer::Master(timer) => (0, timer).hash(trace),
                Timer::Client(timer) => (2, timer).hash(trace),
            }
        }
        Event::Fault(fault) => fault.hash(trace),
        Event::Starts(process) | Event::Resumes(process) => process.hash(trace),
        Event::Heal | Event::CheckProgress => {}
    }
}
