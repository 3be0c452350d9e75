//! [`TcpEngine`] and [`TcpLink`]: several connections to one peer, over one or several rails.
//!
//! ```text
//!   start ── plan: cut into frames ──▶ pick a connection for each ──▶ the caller's thread, or the connection's own
//!              ▲                                                            │
//!              └──────── a frame whose connection failed is sent again ─────┘
//! ```
//!
//! A rail is a pair of addresses. Each has at least one connection; a rail that fails is paused, longer each time, and a
//! **keeper** thread, which lives only while a connection is missing, connects again.
//!
//! Every frame can be sent again: reads change nothing, writes write the same bytes to a record that nobody reads yet,
//! calls are idempotent by protocol.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_proto::{FrameKind, Hello, Token};
use moontide_types::{Clock, ErrorCode, MonoTime, NodeId, SystemClock};
use tracing::{debug, warn};

use crate::engine::{Engine, EngineKind, Link, NotSuited, Peer, Pending, Score, Waiting};
use crate::error::{Failure, TransferError};
use crate::metrics::Metrics;
use crate::op::OpCore;
use crate::plan::{Frame, plan};
use crate::rails::{Candidate, Rail, RailState, choose};
use crate::sync::{Arc, Condvar, Mutex, lock, wait};
use crate::tcp::connection::{Connection, code_at};
use crate::tcp::hello;
use crate::tcp::request::{NoAnswer, Request};
use crate::tcp::socket::Socket;
use crate::topology::{RailAddress, current_numa_node, local_addresses, pair};

/// Connections to a peer that there are by default: a second one feeds a second core.
pub const CONNECTIONS_DEFAULT: usize = 2;

/// Most connections to a peer.
pub const CONNECTIONS_MAX: usize = 16;

/// How often a frame is sent at most.
const ATTEMPTS_MAX: u32 = 4;

/// How the TCP engine behaves.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Connections to each peer; at least one per rail.
    pub connections: usize,
    /// How long a connection may take to come about.
    pub connect: Duration,
    /// How long no byte may come or go while some are due, before a connection is given up.
    pub stall: Duration,
    /// Local addresses to use; empty: what fits.
    pub bind: Vec<IpAddr>,
    /// Most requests in flight on a connection; the peer may allow fewer.
    pub inflight_max: u32,
    /// Proof of who this is.
    pub token: Token,
    /// A number that this process drew at random when it started.
    pub caller: u64,
}

impl Default for TcpConfig {
    fn default() -> TcpConfig {
        TcpConfig {
            connections: CONNECTIONS_DEFAULT,
            connect: Duration::from_secs(1),
            stall: Duration::from_secs(1),
            bind: Vec::new(),
            inflight_max: 64,
            token: Token::NONE,
            caller: random(),
        }
    }
}

/// Streams over TCP, for every peer.
#[derive(Debug)]
pub struct TcpEngine {
    config: TcpConfig,
    metrics: Arc<Metrics>,
}

impl TcpEngine {
    /// An engine with this configuration.
    pub fn new(config: TcpConfig, metrics: Arc<Metrics>) -> TcpEngine {
        TcpEngine { config, metrics }
    }

    fn rails(&self, peer: &Peer) -> Vec<RailAddress> {
        let addresses: Vec<SocketAddr> =
            peer.addresses_of(EngineKind::Tcp).filter_map(|address| address.parse().ok()).collect();
        let local = local_addresses().unwrap_or_else(|error| {
            warn!(%error, "the addresses of this host cannot be listed; the kernel chooses");
            Vec::new()
        });
        pair(&local, &addresses, &self.config.bind)
    }
}

impl Engine for TcpEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Tcp
    }

    fn score(&self, peer: &Peer) -> Result<Score, NotSuited> {
        let mut addresses = peer.addresses_of(EngineKind::Tcp).peekable();
        addresses.peek().ok_or(NotSuited::NoAddress)?;
        let readable = addresses.any(|address| address.parse::<SocketAddr>().is_ok());
        if readable { Ok(Score::STREAM) } else { Err(NotSuited::BadAddress) }
    }

    fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError> {
        let link = TcpLink::open(peer.node, self.rails(peer), self.config.clone(), Arc::clone(&self.metrics));
        link.shared.pick(deadline)?;
        Ok(Arc::new(link))
    }
}

/// A peer over TCP. Dropping it ends its connections and threads.
#[derive(Debug)]
pub struct TcpLink {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    node: NodeId,
    config: TcpConfig,
    rails: Vec<RailAddress>,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
    /// Rung when a connection came about or an attempt failed.
    changed: Condvar,
    rotation: AtomicU64,
}

#[derive(Debug)]
struct State {
    health: Vec<Rail>,
    slots: Vec<Slot>,
    keepers: Vec<Keeper>,
    last: Option<Failure>,
    stopped: bool,
}

/// A place for a connection.
#[derive(Debug)]
struct Slot {
    rail: usize,
    connection: Option<Arc<Connection>>,
}

/// The thread that connects a rail.
#[derive(Debug, Default)]
struct Keeper {
    running: bool,
    thread: Option<JoinHandle<()>>,
}

impl TcpLink {
    fn open(node: NodeId, rails: Vec<RailAddress>, config: TcpConfig, metrics: Arc<Metrics>) -> TcpLink {
        let now = SystemClock.now();
        let count = config.connections.clamp(1, CONNECTIONS_MAX).max(rails.len());
        let slots = (0..if rails.is_empty() { 0 } else { count })
            .map(|slot| Slot { rail: slot % rails.len(), connection: None })
            .collect();
        let state = State {
            health: rails.iter().map(|_| Rail::new(now)).collect(),
            slots,
            keepers: rails.iter().map(|_| Keeper::default()).collect(),
            last: None,
            stopped: false,
        };
        metrics.link_opened(EngineKind::Tcp);
        let shared = Arc::new(Shared {
            node,
            config,
            rails,
            metrics,
            state: Mutex::new(state),
            changed: Condvar::default(),
            rotation: AtomicU64::new(0),
        });
        shared.tend(&mut lock(&shared.state));
        TcpLink { shared }
    }

    /// How many connections are up.
    pub fn connections_up(&self) -> usize {
        let mut state = lock(&self.shared.state);
        self.shared.tend(&mut state);
        state.slots.iter().filter(|slot| slot.connection.is_some()).count()
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        let (connections, keepers) = {
            let mut state = lock(&self.shared.state);
            state.stopped = true;
            let connections: Vec<_> =
                state.slots.iter_mut().filter_map(|slot| slot.connection.take()).collect();
            let keepers: Vec<_> =
                state.keepers.iter_mut().filter_map(|keeper| keeper.thread.take()).collect();
            (connections, keepers)
        };
        self.shared.changed.notify_all();
        for connection in connections {
            self.shared.bury(&connection);
        }
        for keeper in keepers {
            // It does not panic; if it did, it has said so.
            let _ = keeper.join();
        }
        self.shared.metrics.link_closed(EngineKind::Tcp);
    }
}

impl Shared {
    /// A connection for the next frame. Waits for one until `deadline`, unless all rails are paused.
    fn pick(self: &Arc<Self>, deadline: Instant) -> Result<Arc<Connection>, TransferError> {
        let mut state = lock(&self.state);
        loop {
            self.tend(&mut state);
            let candidates: Vec<Candidate> = state
                .slots
                .iter()
                .enumerate()
                .filter_map(|(slot, place)| {
                    let in_flight_bytes = place.connection.as_ref()?.in_flight_bytes();
                    let numa = self.rails[place.rail].numa;
                    Some(Candidate { rail: slot, usable: true, in_flight_bytes, numa })
                })
                .collect();
            let turn = self.rotation.fetch_add(1, Ordering::Relaxed);
            if let Some(slot) = choose(&candidates, current_numa_node(), turn) {
                return Ok(Arc::clone(state.slots[slot].connection.as_ref().expect("a candidate")));
            }
            let now = SystemClock.now();
            // A rail that is being tried may be there in a moment; for one that is paused it is not worth waiting.
            let pauses = |rail: &Rail| match rail.state() {
                RailState::Paused { until } => until > now,
                RailState::Up { .. } | RailState::Probing { .. } => false,
            };
            let paused = state.stopped || state.health.iter().all(pauses);
            let left = deadline.saturating_duration_since(Instant::now());
            if paused || left.is_zero() {
                let pause = state.health.iter().map(Rail::ready_at).min().unwrap_or(now).since(now);
                let last = state.last.clone().unwrap_or(Failure::Paused { pause });
                return Err(TransferError::Unreachable { node: self.node, last });
            }
            state = wait(&self.changed, state, left);
        }
    }

    /// How many connections a batch can be spread over.
    fn width(&self) -> usize {
        let state = lock(&self.state);
        state.slots.iter().filter(|slot| slot.connection.as_ref().is_some_and(|c| !c.is_dead())).count()
    }

    /// Takes dead connections out and sees to it that missing ones are made.
    fn tend(self: &Arc<Self>, state: &mut State) {
        for slot in 0..state.slots.len() {
            let Slot { rail, connection } = &mut state.slots[slot];
            let rail = *rail;
            if let Some(dead) = connection.take_if(|connection| connection.is_dead()) {
                let failure = dead.failure().unwrap_or(Failure::Stopped);
                // A request that was given up says nothing about the rail.
                if !matches!(failure, Failure::Abandoned { .. }) {
                    debug!(node = self.node.0, rail, %failure, "connection lost");
                    state.health[rail].failed(SystemClock.now(), random());
                    state.last = Some(failure);
                }
                let shared = Arc::clone(self);
                shared.bury(&dead);
            }
            let missing = state.slots[slot].connection.is_none();
            if missing && !state.stopped && !state.keepers[rail].running {
                self.start_keeper(state, rail);
            }
        }
    }

    fn start_keeper(self: &Arc<Self>, state: &mut State, rail: usize) {
        let shared = Arc::clone(self);
        let thread =
            std::thread::Builder::new().name("moontide-keeper".into()).spawn(move || shared.keep(rail));
        let keeper = &mut state.keepers[rail];
        match thread {
            Ok(thread) => {
                // One that ran before has ended, or is about to: it has nothing left to do but to return.
                keeper.running = true;
                keeper.thread = Some(thread);
            }
            Err(error) => warn!(node = self.node.0, %error, "no thread for connecting"),
        }
    }

    /// Connects what is missing on a rail.
    fn keep(&self, rail: usize) {
        let mut state = lock(&self.state);
        loop {
            let missing = |slot: &Slot| slot.rail == rail && slot.connection.is_none();
            if state.stopped || !state.slots.iter().any(missing) {
                state.keepers[rail].running = false;
                return;
            }
            let now = SystemClock.now();
            if !state.health[rail].may_try(now) {
                let pause = state.health[rail].ready_at().since(now).max(Duration::from_millis(1));
                state = wait(&self.changed, state, pause);
                continue;
            }
            drop(state);
            let connected = self.connect(rail);
            state = lock(&self.state);
            match connected {
                Ok(connection) => {
                    state.health[rail].succeeded(SystemClock.now());
                    let place = state.slots.iter().position(missing).filter(|_| !state.stopped);
                    match place {
                        Some(slot) => {
                            state.slots[slot].connection = Some(Arc::new(connection));
                            self.metrics.connection_opened(EngineKind::Tcp);
                        }
                        None => connection.stop(),
                    }
                }
                Err(failure) => {
                    debug!(node = self.node.0, rail, %failure, "cannot connect");
                    self.metrics.connect_failed(EngineKind::Tcp);
                    state.health[rail].failed(SystemClock.now(), random());
                    state.last = Some(failure);
                }
            }
            self.changed.notify_all();
        }
    }

    fn connect(&self, rail: usize) -> Result<Connection, Failure> {
        let RailAddress { local, peer, .. } = self.rails[rail];
        let deadline = Instant::now() + self.config.connect;
        let socket = Socket::connect(local, peer, deadline)?;
        let TcpConfig { inflight_max, token, caller, stall, .. } = self.config;
        let me = hello::hello(NodeId(0), caller, inflight_max.max(1), token);
        let Hello { inflight_max: allowed, .. } = hello::greet(&socket, &me, self.node, deadline)?;
        Ok(Connection::new(socket, stall, inflight_max.min(allowed) as usize))
    }

    fn bury(&self, connection: &Connection) {
        let failure = connection.failure().unwrap_or(Failure::Stopped);
        connection.stop();
        self.metrics.connection_ended(EngineKind::Tcp, &failure);
    }
}

impl Link for TcpLink {
    fn engine(&self) -> EngineKind {
        EngineKind::Tcp
    }

    fn node(&self) -> NodeId {
        self.shared.node
    }

    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, waiting: Waiting) -> Box<dyn Pending> {
        let frames = plan(&ops, self.shared.width());
        let ops: Arc<[OpCore]> = ops.into();
        let jobs = frames.into_iter().map(|frame| Job::new(Ask::Frame(frame))).collect();
        let outcomes = vec![None; ops.len()];
        Box::new(TcpPending::start(Arc::clone(&self.shared), ops, outcomes, jobs, deadline, waiting))
    }

    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        waiting: Waiting,
    ) -> Box<dyn Pending> {
        let jobs = vec![Job::new(Ask::Call(kind, body))];
        Box::new(TcpPending::start(
            Arc::clone(&self.shared),
            Arc::new([]),
            Vec::new(),
            jobs,
            deadline,
            waiting,
        ))
    }
}

/// A batch, or a call, under way.
#[derive(Debug)]
struct TcpPending {
    shared: Arc<Shared>,
    ops: Arc<[OpCore]>,
    jobs: Vec<Job>,
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
    reply: Vec<u8>,
    started: Instant,
    deadline: Instant,
    ended: Option<Result<(), TransferError>>,
}

/// One frame of it.
#[derive(Debug)]
struct Job {
    ask: Ask,
    flight: Option<(Arc<Connection>, Arc<Request>)>,
    attempts: u32,
    done: bool,
}

#[derive(Debug)]
enum Ask {
    Frame(Frame),
    Call(FrameKind, Vec<u8>),
}

impl Job {
    fn new(ask: Ask) -> Job {
        Job { ask, flight: None, attempts: 0, done: false }
    }
}

impl TcpPending {
    fn start(
        shared: Arc<Shared>,
        ops: Arc<[OpCore]>,
        outcomes: Vec<Option<Result<(), ErrorCode>>>,
        jobs: Vec<Job>,
        deadline: Instant,
        waiting: Waiting,
    ) -> TcpPending {
        let (started, reply, ended) = (Instant::now(), Vec::new(), None);
        let mut pending = TcpPending { shared, ops, jobs, outcomes, reply, started, deadline, ended };
        if let Err(error) = pending.launch(waiting) {
            let _ = pending.end(Err(error)); // told by `wait` and `poll`
        }
        pending
    }

    /// Gives every job a connection. A thread that waits serves the first of them itself; the others' own threads are
    /// set to work before that.
    fn launch(&mut self, waiting: Waiting) -> Result<(), TransferError> {
        if let Ask::Call(kind, body) =
            &self.jobs.first().map_or(&Ask::Call(FrameKind::Ping, Vec::new()), |j| &j.ask)
        {
            let (found, max) = (body.len() as u64, kind.body_len_max() as u64);
            if found > max {
                return Err(TransferError::TooLarge { what: "the body of a call", found, max });
            }
        }
        let mut own: Option<Arc<Connection>> = None;
        let mut mine = Vec::new();
        for index in 0..self.jobs.len() {
            let until = if waiting == Waiting::Here { self.deadline } else { Instant::now() };
            let connection = self.shared.pick(until)?;
            let request = self.board(index, connection);
            let connection = &self.jobs[index].flight.as_ref().expect("just boarded").0;
            if waiting == Waiting::Here
                && Arc::ptr_eq(own.get_or_insert_with(|| Arc::clone(connection)), connection)
            {
                mine.push((Arc::clone(connection), request));
            } else {
                connection.hand_over(request);
            }
        }
        mine.iter().for_each(|(connection, request)| connection.submit(request));
        Ok(())
    }

    /// Makes the request of a job.
    fn board(&mut self, index: usize, connection: Arc<Connection>) -> Arc<Request> {
        let job = &mut self.jobs[index];
        job.attempts += 1;
        let request = match &job.ask {
            Ask::Frame(frame) => Request::transfer(&self.ops, frame.clone(), self.deadline),
            Ask::Call(kind, body) => Request::call(*kind, body.clone(), self.deadline),
        };
        job.flight = Some((connection, Arc::clone(&request)));
        request
    }

    /// Looks at a job whose request has finished. `false`: it was sent again.
    fn settle(&mut self, index: usize, waiting: Waiting) -> Result<bool, TransferError> {
        let (_, request) = self.jobs[index].flight.take().expect("a job that was launched");
        let answer = request.take_answer().expect("it has finished");
        let failure = match answer {
            Ok(body) => {
                self.jobs[index].done = true;
                match &self.jobs[index].ask {
                    Ask::Call(..) => self.reply = body,
                    Ask::Frame(frame) => {
                        for (place, part) in frame.parts.iter().enumerate() {
                            let code = code_at(&body, place);
                            let outcome = &mut self.outcomes[part.op];
                            // Of several parts the first that failed speaks for the operation.
                            if !matches!(outcome, Some(Err(_))) {
                                *outcome = Some(code.map_or(Ok(()), Err));
                            }
                        }
                    }
                }
                return Ok(true);
            }
            Err(NoAnswer::Refused(code)) => return Err(TransferError::Refused { code }),
            Err(NoAnswer::Aborted) => return Err(TransferError::Aborted),
            Err(NoAnswer::Deadline) => return Err(self.too_late()),
            Err(NoAnswer::Failed(failure)) => failure,
        };
        if Instant::now() >= self.deadline {
            return Err(self.too_late());
        }
        // A connection that somebody else gave up is not this job's fault, but there must be an end.
        let limit =
            if matches!(failure, Failure::Abandoned { .. }) { 4 * ATTEMPTS_MAX } else { ATTEMPTS_MAX };
        if self.jobs[index].attempts >= limit {
            return Err(TransferError::Lost { node: self.shared.node, last: failure });
        }
        let until = if waiting == Waiting::Here { self.deadline } else { Instant::now() };
        let connection = self.shared.pick(until).map_err(|error| match error {
            // It was reached, and then lost: that says more.
            TransferError::Unreachable { node, .. } if self.jobs[index].attempts == 1 => {
                TransferError::Lost { node, last: failure.clone() }
            }
            error => error,
        })?;
        self.shared.metrics.resubmitted(EngineKind::Tcp);
        let request = self.board(index, Arc::clone(&connection));
        match waiting {
            Waiting::Here => connection.submit(&request),
            Waiting::Elsewhere => connection.hand_over(request),
        }
        Ok(false)
    }

    fn too_late(&self) -> TransferError {
        TransferError::Deadline { waited: self.started.elapsed() }
    }

    /// Whatever is under way ends here; then the result is known.
    fn end(&mut self, result: Result<(), TransferError>) -> Result<(), TransferError> {
        self.give_up();
        let failed = result.as_ref().err().map(TransferError::code);
        for (op, outcome) in self.ops.iter().zip(&self.outcomes) {
            let outcome = outcome.unwrap_or(Err(failed.unwrap_or(ErrorCode::Internal)));
            self.shared.metrics.op(EngineKind::Tcp, op.direction(), op.len(), outcome);
        }
        self.ended = Some(result.clone());
        result
    }

    fn give_up(&mut self) {
        for job in &mut self.jobs {
            if let Some((connection, request)) = job.flight.take() {
                connection.abort(&request);
            }
        }
    }
}

impl Pending for TcpPending {
    fn wait(&mut self) -> Result<(), TransferError> {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        for index in 0..self.jobs.len() {
            while !self.jobs[index].done {
                if let Some((connection, request)) = &self.jobs[index].flight {
                    connection.wait(request);
                }
                if let Err(error) = self.settle(index, Waiting::Here) {
                    return self.end(Err(error));
                }
            }
        }
        self.end(Ok(()))
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        if let Some(ended) = &self.ended {
            return Poll::Ready(ended.clone());
        }
        let mut all_done = true;
        for index in 0..self.jobs.len() {
            while !self.jobs[index].done {
                let (_, request) = self.jobs[index].flight.as_ref().expect("a job that was launched");
                if !request.seat.poll(context.waker()) {
                    all_done = false;
                    break;
                }
                if let Err(error) = self.settle(index, Waiting::Elsewhere) {
                    return Poll::Ready(self.end(Err(error)));
                }
            }
        }
        if all_done { Poll::Ready(self.end(Ok(()))) } else { Poll::Pending }
    }

    fn abort(&mut self) {
        if self.ended.is_none() {
            let _ = self.end(Err(TransferError::Aborted));
        }
    }

    fn outcomes(&self) -> &[Option<Result<(), ErrorCode>>] {
        &self.outcomes
    }

    fn take_reply(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.reply)
    }
}

impl Drop for TcpPending {
    fn drop(&mut self) {
        self.abort();
    }
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // Jitter and a process's number: without the kernel's randomness the clock's will do.
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => {
            let MonoTime(nanos) = SystemClock.now();
            nanos.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        }
    }
}
