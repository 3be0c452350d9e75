//! [`Events`]: what happens when; and the messages that travel.
//!
//! Invariant: events of the same time happen in the order in which they were scheduled.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use moontide_meta::{Order, OrderOutcome, PlaceView};
use moontide_types::{Epoch, ErrorCode, Generation, MonoTime, NodeId, SegmentId, SessionId, Term};

use crate::client::GrantedPlace;
use crate::faults::Fault;
use crate::node::Change;

/// Something that happens at a time.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A client does what is next.
    Client { client: usize, wake: u64 },
    /// A node looks after itself.
    Node { node: usize },
    /// The bytes of a put have arrived at a node completely.
    Written { node: usize, write: u64 },
    /// The master looks after itself.
    Master,
    /// The master's process is there again.
    MasterStarts,
    /// A message arrives.
    Arrives(Message),
    /// Something breaks.
    Fault(Fault),
}

/// What travels.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// A client asks the master.
    Call { client: usize, op: u64, call: Call },
    /// The master answers.
    Answer { client: usize, op: u64, answer: Answer },
    /// A client asks a node.
    Ask { client: usize, op: u64, node: usize, place: usize, ask: Ask },
    /// A node answers.
    Told { client: usize, op: u64, place: usize, told: Told },
    /// A node wants a session.
    Open { node: usize, boot: u64, attempt: u64 },
    /// It has one.
    Opened { node: usize, attempt: u64, session: SessionId, term: Term },
    /// A node is alive.
    Beat { node: usize, session: SessionId },
    /// The master has heard it, and the session lives.
    Heard { node: usize, session: SessionId, alive: bool },
    /// One request of a node's session: they come one after the other, and each is repeated until it is answered.
    Request { node: usize, session: SessionId, number: u64, request: Request },
    /// The answer to it.
    Answered { node: usize, session: SessionId, number: u64, result: Result<(), ErrorCode> },
    /// An order of a session; orders are numbered and repeated until they are answered.
    Order { node: usize, session: SessionId, number: u64, order: Order },
    /// What became of it.
    Outcome { node: usize, session: SessionId, number: u64, outcome: OrderOutcome },
}

/// What a client asks of the master.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    PutStart { key: usize, len: u64, replicas: u8, upsert: bool },
    PutEnd { key: usize, epoch: Epoch, root: u64, outcomes: Vec<Option<ErrorCode>> },
    Lookup { key: usize, lease_ms: u32 },
    Remove { key: usize },
}

/// The master's answers.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Granted { epoch: Epoch, places: Vec<GrantedPlace> },
    Ended,
    Found { epoch: Epoch, object_len: u64, root: u64, places: Vec<PlaceView> },
    Removed(Option<ErrorCode>),
    Refused(ErrorCode),
}

/// What a client asks of a node.
#[derive(Clone, Debug)]
pub(crate) enum Ask {
    Write { place: PlaceView, session: SessionId, key: usize, epoch: Epoch, object_len: u64, token: u64 },
    Read { place: PlaceView, key: usize, epoch: Epoch },
}

/// A node's answers.
#[derive(Clone, Debug)]
pub(crate) enum Told {
    /// Published, with this root.
    Written(Result<u64, ErrorCode>),
    /// The bytes of this version.
    Bytes { epoch: Epoch, root: u64, bytes: Payload },
    /// It is not there in that version.
    NotThere,
}

/// Bytes of an object. A trace shows what they are, not all of them.
#[derive(Clone)]
pub(crate) struct Payload(pub(crate) Vec<u8>);

impl std::fmt::Debug for Payload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut hasher = std::hash::DefaultHasher::new();
        std::hash::Hash::hash(&self.0, &mut hasher);
        write!(f, "{} bytes #{:016x}", self.0.len(), std::hash::Hasher::finish(&hasher))
    }
}

/// A request of a node's session.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Mount { segment: SegmentId, generation: Generation, units: u32, slots: u32, term: Term, occupied: bool },
    Report { segment: SegmentId, generation: Generation, term: Term, first: u64, changes: Vec<Change> },
    ReportEnd { segment: SegmentId, generation: Generation, term: Term, records: u64 },
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
    pub(crate) fn after_ms(&mut self, ms: u64, event: Event) {
        self.at(self.now.after(std::time::Duration::from_millis(ms)), event);
    }

    /// The next event; the time moves on to it.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let Reverse(next) = self.queue.pop()?;
        self.now = next.at;
        Some(next.event)
    }
}

/// Who a node is to the master.
pub(crate) fn node_id(node: usize) -> NodeId {
    NodeId(node as u64 + 1)
}
