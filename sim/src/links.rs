//! [`Links`]: what connects the nodes, which run in threads of the world, with the simulated network. It carries the gRPC calls
//! of their sessions, their requests to each other, and what they answer to clients.
//!
//! Threads of nodes put messages into the outbox, and the thread that drives the world takes them from there.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use bytes::Bytes;
use moontide_proto::v1;
use moontide_rt::sim::Process;
use moontide_rt::sync::{Condvar, Mutex};
use moontide_rt::thread::{Thread, current};
use moontide_rt::time::Instant;
use moontide_tasks::sim::{Network, Reply};
use moontide_transfer::{CarriedRequest, Carrier, EngineKind, Peer};
use moontide_types::{ErrorCode, NodeId, SessionId};
use prost::Message as _;
use tonic::{Code, Status};

use crate::event::{Message, NodeRequest, NodeResponse, Payload, ProcessId};
use crate::master::index_of;
use crate::plan::AimedFault;

/// Metadata key of the number of an [`ErrorCode`], as a master's server sets it.
const CODE_METADATA: &str = "moontide-code";

/// Something that a thread of a node has done.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Message {
        from: ProcessId,
        to: ProcessId,
        message: Message,
    },
    /// The process has ended by itself, at its start.
    Ended {
        node: usize,
        incarnation: u32,
        reason: String,
    },
    /// It is at a place at which this happens to it.
    Aimed {
        node: usize,
        fault: AimedFault,
    },
}

/// A call of a node to a master.
struct NodeCall {
    process: Process,
    node: usize,
    master: usize,
    kind: CallKind,
    reply: Reply,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallKind {
    Open,
    Mount,
    Unmount,
    Map,
    Info,
    /// A session; whether its first message was sent.
    Session {
        is_open: bool,
    },
}

impl CallKind {
    fn of(path: &str) -> CallKind {
        match path {
            "/moontide.v1.MasterNodes/OpenSession" => CallKind::Open,
            "/moontide.v1.MasterNodes/MountSegments" => CallKind::Mount,
            "/moontide.v1.MasterNodes/UnmountSegments" => CallKind::Unmount,
            "/moontide.v1.MasterNodes/Session" => CallKind::Session { is_open: false },
            "/moontide.v1.Master/GetGroupMap" => CallKind::Map,
            "/moontide.v1.Master/GetClusterInfo" => CallKind::Info,
            _ => unreachable!("a node does not call {path}"),
        }
    }
}

/// Connections of all nodes.
pub(crate) struct Links {
    /// The thread that drives the world.
    driver: Thread,
    outbox: RefCell<Vec<Outgoing>>,
    calls: RefCell<BTreeMap<u64, NodeCall>>,
    last: Cell<u64>,
    /// Requests of nodes to each other, with the replies that have arrived.
    fetches: RefCell<BTreeMap<u64, (Process, Arc<Fetch>)>>,
    /// Processes of nodes that were not killed.
    nodes: RefCell<Vec<(Process, usize)>>,
}

impl Links {
    /// Creates the links; the caller drives the world.
    pub(crate) fn new() -> Links {
        Links {
            driver: current(),
            outbox: RefCell::default(),
            calls: RefCell::default(),
            // Apart from the numbers of clients and masters.
            last: Cell::new(1 << 62),
            fetches: RefCell::default(),
            nodes: RefCell::default(),
        }
    }

    pub(crate) fn started(&self, process: Process, node: usize) {
        self.nodes.borrow_mut().push((process, node));
    }

    /// A process was killed: the kernel of its host closes its connections, which the masters notice as far as the network
    /// lets them.
    pub(crate) fn close_connections(&self, process: Process) {
        let calls = self.calls.borrow();
        let is_open = CallKind::Session { is_open: true };
        for (&stream, call) in
            calls.iter().filter(|(_, call)| call.process == process && call.kind == is_open)
        {
            self.send_from(call, Message::StreamEnd { stream, code: None });
        }
    }

    /// A process has ended: none of its calls is waited for.
    pub(crate) fn killed(&self, process: Process) {
        self.nodes.borrow_mut().retain(|(known, _)| *known != process);
        self.calls.borrow_mut().retain(|_, call| call.process != process);
        self.fetches.borrow_mut().retain(|_, (of, _)| *of != process);
    }

    /// Gives something to the thread that drives the world.
    pub(crate) fn send(&self, outgoing: Outgoing) {
        self.outbox.borrow_mut().push(outgoing);
        self.driver.unpark();
    }

    /// Returns the node of the running process, if it is one.
    pub(crate) fn running_node(&self) -> Option<usize> {
        let process = Process::current();
        self.nodes.borrow().iter().find(|(known, _)| *known == process).map(|(_, node)| *node)
    }

    pub(crate) fn take(&self) -> Vec<Outgoing> {
        self.outbox.take()
    }

    /// Returns the streams of a node's sessions, each with its master.
    pub(crate) fn streams(&self, node: usize) -> Vec<(u64, usize)> {
        let calls = self.calls.borrow();
        let is_open = |call: &NodeCall| call.kind == CallKind::Session { is_open: true } && call.node == node;
        calls.iter().filter(|(_, call)| is_open(call)).map(|(&number, call)| (number, call.master)).collect()
    }

    /// A message of a master arrives at its node.
    pub(crate) fn arrives(&self, message: Message) {
        match message {
            Message::NodeResponse { call, reply } => {
                let Some(call) = self.calls.borrow_mut().remove(&call) else { return };
                let bytes = match &reply {
                    NodeResponse::Opened(m) => m.encode_to_vec(),
                    NodeResponse::Mounted(m) => m.encode_to_vec(),
                    NodeResponse::Unmounted(m) => m.encode_to_vec(),
                    NodeResponse::Map(m) => m.encode_to_vec(),
                    NodeResponse::Info(m) => m.encode_to_vec(),
                };
                call.reply.started();
                call.reply.message(bytes.into());
                call.reply.end(Status::new(Code::Ok, ""));
            }
            Message::StreamOpened { stream } => {
                if let Some(answers) = self.answers_to(stream) {
                    answers.started();
                }
            }
            Message::FromMaster { stream, message } => {
                if let Some(answers) = self.answers_to(stream) {
                    answers.message(message.encode_to_vec().into());
                }
            }
            Message::StreamEnd { stream, code } => {
                let ended = self.calls.borrow_mut().remove(&stream);
                if let Some(call) = ended {
                    call.reply.end(status(code));
                }
            }
            Message::Fetched { call, reply } => {
                // A lock of a world may let other threads run, which begin requests: nothing is borrowed meanwhile.
                let fetched = self.fetches.borrow_mut().remove(&call);
                if let Some((_, fetch)) = fetched {
                    *fetch.reply.lock() = Some(reply);
                    fetch.arrived.notify_all();
                }
            }
            _ => unreachable!("not for a node"),
        }
    }

    /// Returns where the answers to a call go.
    fn answers_to(&self, call: u64) -> Option<Reply> {
        self.calls.borrow().get(&call).map(|call| call.reply.clone())
    }

    /// Ends a stream from the node's side.
    fn hang_up(&self, number: u64) {
        let Some(call) = self.calls.borrow_mut().remove(&number) else { return };
        if call.kind == (CallKind::Session { is_open: true }) {
            self.send_from(&call, Message::StreamEnd { stream: number, code: None });
        }
    }

    fn send_from(&self, call: &NodeCall, message: Message) {
        let (from, to) = (ProcessId::Node(call.node), ProcessId::Master(call.master));
        self.send(Outgoing::Message { from, to, message });
    }
}

/// A request to another node, whose reply a thread waits for.
#[derive(Default)]
struct Fetch {
    reply: Mutex<Option<Result<Payload, ErrorCode>>>,
    arrived: Condvar,
}

thread_local! {
    /// The links of the world that this thread runs.
    static CURRENT: RefCell<Weak<Links>> = const { RefCell::new(Weak::new()) };
}

impl Links {
    /// Lets [`NodesOfWorld`] use these links.
    pub(crate) fn set_current(self: &Rc<Self>) {
        CURRENT.set(Rc::downgrade(self));
    }

    /// Sends a request to another node, and waits for the reply.
    fn fetch(
        &self,
        node: NodeId,
        to: usize,
        request: CarriedRequest,
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode> {
        let from = self.running_node().ok_or(ErrorCode::Cancelled)?;
        self.last.set(self.last.get() + 1);
        let (call, fetch) = (self.last.get(), Arc::<Fetch>::default());
        self.fetches.borrow_mut().insert(call, (Process::current(), Arc::clone(&fetch)));
        let message = Message::Fetch { call, node, request };
        self.send(Outgoing::Message { from: ProcessId::Node(from), to: ProcessId::Node(to), message });
        let mut reply = fetch.reply.lock();
        while reply.is_none() && Instant::now() < deadline {
            fetch.arrived.wait_until(&mut reply, deadline);
        }
        let reply = reply.take();
        self.fetches.borrow_mut().remove(&call);
        reply.unwrap_or(Err(ErrorCode::DeadlineExceeded)).map(|payload| payload.0)
    }
}

/// Carries requests of nodes to each other through the links of the world.
#[derive(Debug)]
pub(crate) struct NodesOfWorld;

impl Carrier for NodesOfWorld {
    fn carry(&self, peer: &Peer, request: CarriedRequest, deadline: Instant) -> Result<Vec<u8>, ErrorCode> {
        let links = CURRENT.with_borrow(Weak::upgrade).ok_or(ErrorCode::Cancelled)?;
        let mut addresses = peer.addresses_of(EngineKind::Tcp);
        let to = addresses.next().and_then(crate::node::index_of).ok_or(ErrorCode::Unreachable)?;
        links.fetch(peer.node, to, request, deadline)
    }
}

impl Network for Links {
    fn begin(&self, address: &str, path: &str, reply: Reply) -> u64 {
        let (process, node) = (Process::current(), self.running_node().expect("only nodes call"));
        self.last.set(self.last.get() + 1);
        let call = NodeCall { process, node, master: index_of(address), kind: CallKind::of(path), reply };
        self.calls.borrow_mut().insert(self.last.get(), call);
        self.last.get()
    }

    fn message(&self, number: u64, message: Bytes) {
        let mut calls = self.calls.borrow_mut();
        let Some(call) = calls.get_mut(&number) else { return };
        let valid = "the node encodes what it sends";
        let request = match call.kind {
            CallKind::Open => NodeRequest::Open(v1::OpenSessionRequest::decode(message).expect(valid)),
            CallKind::Mount => NodeRequest::Mount(v1::MountSegmentsRequest::decode(message).expect(valid)),
            CallKind::Unmount => {
                NodeRequest::Unmount(v1::UnmountSegmentsRequest::decode(message).expect(valid))
            }
            CallKind::Map => NodeRequest::Map(v1::GetGroupMapRequest::decode(message).expect(valid)),
            CallKind::Info => NodeRequest::Info(v1::GetClusterInfoRequest::decode(message).expect(valid)),
            CallKind::Session { is_open } => {
                let message = v1::NodeMessage::decode(message).expect(valid);
                if !is_open {
                    call.kind = CallKind::Session { is_open: true };
                    let session = SessionId(message.session);
                    self.send_from(call, Message::StreamOpen { stream: number, session });
                }
                return self.send_from(call, Message::FromNode { stream: number, message });
            }
        };
        self.send_from(call, Message::NodeCall { call: number, request });
    }

    fn half_close(&self, number: u64) {
        let is_session = |call: &NodeCall| matches!(call.kind, CallKind::Session { .. });
        if self.calls.borrow().get(&number).is_some_and(is_session) {
            self.hang_up(number);
        }
    }

    fn cancel(&self, number: u64) {
        self.hang_up(number);
    }
}

/// Returns the status that ends a stream: of a master, or of a broken connection.
fn status(code: Option<ErrorCode>) -> Status {
    let Some(code) = code else { return Status::unavailable("the connection is broken") };
    let mut status = Status::failed_precondition(code.to_string());
    let number = (code as u32).to_string().parse().expect("digits are a valid header");
    status.metadata_mut().insert(CODE_METADATA, number);
    status
}
