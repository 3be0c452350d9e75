//! [`Events`]: what happens when; and the messages that travel.
//!
//! Invariant: events of the same time happen in the order in which they were scheduled.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use moontide_master::election::{Document, MasterAddresses, Snapshot, Token};
use moontide_meta::Inheritance;
use moontide_proto::{CommitEntry, FixedRecord, Handle, ObjectEntry, v1};
use moontide_types::{Epoch, ErrorCode, GroupId, MonoTime, ObjectId, SessionId, Term};
use prost::Message as _;

use crate::client::ClientTimer;
use crate::faults::Fault;
use crate::master::MasterTimer;
use crate::node::NodeTimer;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Who {
    Registry,
    Master(usize),
    Node(usize),
    Client(usize),
}

/// Something that happens at a time.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A message arrives.
    Arrives(Box<Letter>),
    /// A process wanted to be woken. Of an earlier life it is void.
    Timer { who: Who, life: u32, timer: Timer },
    /// Something breaks.
    Fault(Fault),
    /// A process that had ended is there again.
    Starts(Who),
    /// A process that was stopped goes on.
    Resumes(Who),
    /// Everything that is broken is mended, and nothing breaks any more.
    Heals,
    /// It is looked whether what has to be true by now is.
    Judged,
}

impl Event {
    /// The process that has to run for it.
    pub(crate) fn needs(&self) -> Option<Who> {
        match self {
            Event::Arrives(letter) => Some(letter.to),
            Event::Timer { who, .. } => Some(*who),
            _ => None,
        }
    }
}

/// What a process wanted to be woken for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Timer {
    Master(MasterTimer),
    Node(NodeTimer),
    Client(ClientTimer),
}

/// A message on its way.
#[derive(Clone, Debug)]
pub(crate) struct Letter {
    pub(crate) from: Who,
    pub(crate) to: Who,
    pub(crate) message: Message,
}

/// What travels. Numbers of calls are never used twice by the same process.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// A client asks the master.
    Call { call: u64, request: Request },
    /// The master answers.
    Answer { call: u64, answer: Answer },
    /// A client asks a node.
    Ask { call: u64, ask: Ask },
    /// A node answers.
    Told { call: u64, told: Told },
    /// A node asks the master.
    NodeCall { call: u64, request: NodeRequest },
    /// The master answers.
    NodeAnswer { call: u64, answer: NodeAnswer },
    /// A master asks the registry.
    Registry { call: u64, request: RegistryRequest },
    /// It answers.
    RegistryAnswer { call: u64, answer: RegistryAnswer },
    /// A master hands on what it knows of a group.
    Bequest { call: u64, group: GroupId, estate: Arc<Inheritance> },
    /// It was taken.
    Bequeathed { call: u64 },
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
    /// The stream that it travels on, in the order in which it was sent.
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
            Message::Answer { call, answer } => (call, answer.bytes()).hash(trace),
            Message::Ask { call, ask } => (call, ask.place(), ask.epoch()).hash(trace),
            Message::Told { call, told } => (call, told.mark()).hash(trace),
            Message::NodeCall { call, request } => {
                let bytes = match request {
                    NodeRequest::Open(m) => m.encode_to_vec(),
                    NodeRequest::Mount(m) => m.encode_to_vec(),
                    NodeRequest::Map(m) => m.encode_to_vec(),
                };
                (call, bytes).hash(trace);
            }
            Message::NodeAnswer { call, answer } => {
                let bytes = match answer {
                    NodeAnswer::Opened(m) => m.encode_to_vec(),
                    NodeAnswer::Mounted(m) => m.encode_to_vec(),
                    NodeAnswer::Map(m) => m.encode_to_vec(),
                };
                (call, bytes).hash(trace);
            }
            Message::Registry { call, request } => (call, format!("{request:?}")).hash(trace),
            Message::RegistryAnswer { call, answer } => (call, format!("{answer:?}")).hash(trace),
            Message::Bequest { call, group, estate } => {
                (call, group, estate.objects.len(), &estate.tombstones).hash(trace);
                estate.objects.iter().for_each(|object| (object.id, object.epoch).hash(trace));
            }
            Message::Bequeathed { call } => call.hash(trace),
            Message::StreamOpen { stream, session } => (stream, session).hash(trace),
            Message::StreamOpened { stream } => stream.hash(trace),
            Message::FromNode { stream, message } => (stream, message.encode_to_vec()).hash(trace),
            Message::FromMaster { stream, message } => (stream, message.encode_to_vec()).hash(trace),
            Message::StreamEnd { stream, code } => (stream, code).hash(trace),
        }
    }
}

/// What a client asks of the master: the messages of the wire.
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

/// The master's answers.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Started(v1::PutStartResponse),
    Found(v1::GetReplicaListResponse),
    Present(v1::ExistResponse),
    Outcomes(v1::OutcomesResponse),
    Map(v1::GetGroupMapResponse),
}

impl Answer {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Answer::Started(m) => m.encode_to_vec(),
            Answer::Found(m) => m.encode_to_vec(),
            Answer::Present(m) => m.encode_to_vec(),
            Answer::Outcomes(m) => m.encode_to_vec(),
            Answer::Map(m) => m.encode_to_vec(),
        }
    }
}

/// What a node asks of the master.
#[derive(Clone, Debug)]
pub(crate) enum NodeRequest {
    Open(v1::OpenSessionRequest),
    Mount(v1::MountSegmentsRequest),
    Map(v1::GetGroupMapRequest),
}

/// The master's answers to nodes.
#[derive(Clone, Debug)]
pub(crate) enum NodeAnswer {
    Opened(v1::OpenSessionResponse),
    Mounted(v1::MountSegmentsResponse),
    Map(v1::GetGroupMapResponse),
}

/// What a master asks of the registry.
#[derive(Clone, Debug)]
pub(crate) enum RegistryRequest {
    Read,
    Write { token: Option<Token>, document: Document },
    Join { number: Term, addresses: MasterAddresses, lease: Duration },
    Renew { number: Term },
    Remove { number: Term },
}

/// The registry's answers.
#[derive(Clone, Debug)]
pub(crate) enum RegistryAnswer {
    Seen(Snapshot),
    Wrote(bool),
    Renewed(bool),
    Done,
}

/// What a client asks of a node.
#[derive(Clone, Debug)]
pub(crate) enum Ask {
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

impl Ask {
    fn epoch(&self) -> Epoch {
        match self {
            Ask::Begin { object, .. } | Ask::Write { object, .. } => object.epoch,
            Ask::Commit(entry) => entry.epoch,
            Ask::Read { epoch, .. } => *epoch,
        }
    }

    fn place(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Ask::Begin { handle, .. } | Ask::Write { handle, .. } | Ask::Read { handle, .. } => {
                handle.encode(&mut bytes);
            }
            Ask::Commit(entry) => entry.encode(&mut bytes),
        }
        bytes
    }
}

/// A node's answers.
#[derive(Clone, Debug)]
pub(crate) enum Told {
    Done,
    /// The bytes are there, with this root.
    Written {
        root: u64,
    },
    Bytes(Payload),
    Refused(ErrorCode),
}

impl Told {
    fn mark(&self) -> (u8, u64) {
        match self {
            Told::Done => (0, 0),
            Told::Written { root } => (1, *root),
            Told::Bytes(payload) => (2, payload.number()),
            Told::Refused(code) => (3, *code as u64),
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

    /// The next event; the time moves on to it.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let Reverse(next) = self.queue.pop()?;
        self.now = next.at;
        Some(next.event)
    }
}

/// Goes into the trace.
pub(crate) fn mark(at: MonoTime, event: &Event, trace: &mut impl Hasher) {
    at.hash(trace);
    match event {
        Event::Arrives(letter) => {
            (letter.from, letter.to).hash(trace);
            letter.message.mark(trace);
        }
        Event::Timer { who, life, timer } => {
            (who, life).hash(trace);
            match timer {
                Timer::Master(timer) => (0, timer).hash(trace),
                Timer::Node(timer) => (1, timer).hash(trace),
                Timer::Client(timer) => (2, timer).hash(trace),
            }
        }
        Event::Fault(fault) => fault.hash(trace),
        Event::Starts(who) | Event::Resumes(who) => who.hash(trace),
        Event::Heals | Event::Judged => {}
    }
}
