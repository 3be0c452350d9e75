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
use std::task::Waker;
use std::time::{Duration, Instant};

use moontide_proto::{FrameKind, Hello, Token};
use moontide_types::{Clock, MonoTime, NodeId, SystemClock};
use tracing::{debug, warn};

use crate::engine::{Engine, EngineKind, Link, NotSuited, OneGo, Peer, Pending, Score, Waiting};
use crate::error::{Failure, TransferError};
use crate::metrics::Metrics;
use crate::op::OpCore;
use crate::plan::plan;
use crate::rails::{Candidate, FORGIVEN_AFTER, Rail, RailState, choose};
use crate::sync::{Arc, Condvar, Mutex, lock, wait};
use crate::tcp::connection::Connection;
use crate::tcp::hello;
use crate::tcp::one_go;
use crate::tcp::pending::TcpPending;
use crate::tcp::socket::Socket;
use crate::topology::{RailAddress, current_numa_node, local_addresses, pair};

/// Connections to a peer that there are by default: a second one feeds a second core.
pub const CONNECTIONS_DEFAULT: usize = 2;

/// Most connections to a peer.
pub const CONNECTIONS_MAX: usize = 16;

/// How long a link that has worked is waited for, while it connects again.
const GRACE: Duration = Duration::from_secs(1);

/// How long is waited at a time for a connection.
const LOOK: Duration = Duration::from_millis(50);

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
        link.shared.assign(&[0], deadline)?;
        Ok(Arc::new(link))
    }
}

/// A peer over TCP. Dropping it ends its connections and threads.
#[derive(Debug)]
pub struct TcpLink {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) node: NodeId,
    config: TcpConfig,
    rails: Vec<RailAddress>,
    pub(super) metrics: Arc<Metrics>,
    state: Mutex<State>,
    /// Rung when a connection came about or an attempt failed.
    changed: Condvar,
    rotation: AtomicU64,
}

#[derive(Debug)]
struct State {
    health: Vec<Rail>,
    slots: Vec<Slot>,
    /// Whether a thread is connecting each rail. It ends by itself.
    keepers: Vec<bool>,
    last: Option<Failure>,
    /// When a connection was there last.
    last_up: Option<Instant>,
    /// Who waits for a connection, but not on a thread.
    wakers: Vec<Waker>,
    stopped: bool,
}

/// A place for a connection.
#[derive(Debug)]
struct Slot {
    rail: usize,
    connection: Option<Arc<Connection>>,
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
            keepers: vec![false; rails.len()],
            last: None,
            last_up: None,
            wakers: Vec::new(),
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
        let (connections, wakers) = {
            let mut state = lock(&self.shared.state);
            state.stopped = true;
            let slots = state.slots.iter_mut();
            let connections: Vec<_> = slots.filter_map(|slot| slot.connection.take()).collect();
            (connections, std::mem::take(&mut state.wakers))
        };
        // A keeper in the middle of connecting ends when that does, at most `TcpConfig::connect` later.
        self.shared.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
        for connection in connections {
            self.shared.bury(&connection);
        }
        self.shared.metrics.link_closed(EngineKind::Tcp);
    }
}

impl Shared {
    /// A connection for each frame, given the frames' bytes, which are its load until the caller drops it; waits until
    /// there is one, at most until `deadline`.
    pub(super) fn assign(
        self: &Arc<Self>,
        frames: &[u64],
        deadline: Instant,
    ) -> Result<Vec<Arc<Connection>>, TransferError> {
        let mut state = lock(&self.state);
        loop {
            if let Some(assigned) = self.try_assign(&mut state, frames)? {
                return Ok(assigned);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.unreachable(&state));
            }
            state = wait(&self.changed, state, left.min(LOOK));
        }
    }

    /// As [`Shared::assign`], but does not wait: `None` if there may be a connection soon; then the waker is woken.
    pub(super) fn assign_or_wake(
        self: &Arc<Self>,
        frames: &[u64],
        waker: Option<&Waker>,
    ) -> Result<Option<Vec<Arc<Connection>>>, TransferError> {
        let mut state = lock(&self.state);
        let assigned = self.try_assign(&mut state, frames)?;
        if assigned.is_none() {
            state.wakers.extend(waker.cloned());
        }
        Ok(assigned)
    }

    /// `None`: no connection is there, but one may be soon.
    fn try_assign(
        self: &Arc<Self>,
        state: &mut State,
        frames: &[u64],
    ) -> Result<Option<Vec<Arc<Connection>>>, TransferError> {
        self.tend(state);
        let now = SystemClock.now();
        let mut candidates: Vec<Candidate> = Vec::with_capacity(state.slots.len());
        let mut idle_rails: Vec<usize> = Vec::new();
        for (slot, place) in state.slots.iter().enumerate() {
            if let Some(connection) = &place.connection {
                // A lone request takes the same idle connection of a rail again and again: both ends of it are warm.
                if frames.len() == 1 && connection.load() == 0 {
                    if idle_rails.contains(&place.rail) {
                        continue;
                    }
                    idle_rails.push(place.rail);
                }
                let usable = matches!(state.health[place.rail].state(), RailState::Up { .. });
                let (numa, in_flight_bytes) = (self.rails[place.rail].numa, connection.load());
                candidates.push(Candidate { rail: slot, usable, in_flight_bytes, numa });
            }
        }
        if !candidates.iter().any(|candidate| candidate.usable) {
            // A connection over a rail that failed is better than none.
            candidates.iter_mut().for_each(|candidate| candidate.usable = true);
        }
        if !candidates.is_empty() {
            let numa = current_numa_node();
            let assign = |&bytes: &u64| {
                let turn = self.rotation.fetch_add(1, Ordering::Relaxed);
                let slot = choose(&candidates, numa, turn).expect("all of them are usable");
                candidates.iter_mut().filter(|c| c.rail == slot).for_each(|c| c.in_flight_bytes += bytes);
                let connection = state.slots[slot].connection.as_ref().expect("a candidate");
                connection.take_load(bytes);
                Arc::clone(connection)
            };
            return Ok(Some(frames.iter().map(assign).collect()));
        }
        // A rail that is being tried may be there in a moment; for one that is paused it is not worth waiting, unless
        // it worked until just now and nothing says that the peer has gone.
        let pauses = |rail: &Rail| match rail.state() {
            RailState::Paused { until } => until > now,
            RailState::Up { .. } | RailState::Probing { .. } => false,
        };
        let worked = state.last_up.is_some_and(|last_up| last_up.elapsed() < GRACE)
            && !state.last.as_ref().is_some_and(says_gone);
        if state.stopped || (state.health.iter().all(pauses) && !worked) {
            return Err(self.unreachable(state));
        }
        Ok(None)
    }

    fn unreachable(&self, state: &State) -> TransferError {
        let now = SystemClock.now();
        let pause = state.health.iter().map(Rail::ready_at).min().unwrap_or(now).since(now);
        let last = state.last.clone().unwrap_or(Failure::Paused { pause });
        TransferError::Unreachable { node: self.node, last }
    }

    /// How many connections a batch is spread over: those that have nothing to do. Where every connection is busy with
    /// somebody else's bytes, cutting a transfer makes it no faster.
    fn width(&self) -> usize {
        let state = lock(&self.state);
        let idle = |connection: &Arc<Connection>| !connection.is_dead() && connection.load() == 0;
        state.slots.iter().filter(|slot| slot.connection.as_ref().is_some_and(idle)).count().max(1)
    }

    /// Takes dead connections out and sees to it that missing ones are made.
    fn tend(self: &Arc<Self>, state: &mut State) {
        for slot in 0..state.slots.len() {
            let Slot { rail, connection } = &mut state.slots[slot];
            let rail = *rail;
            if let Some(dead) = connection.take_if(|connection| connection.is_dead()) {
                let failure = dead.failure().unwrap_or(Failure::Stopped);
                debug!(node = self.node.0, rail, %failure, "connection lost");
                if dead.age() >= FORGIVEN_AFTER {
                    state.health[rail].succeeded(SystemClock.now());
                }
                // A connection that was closed is worth another try at once; silence is the rail's.
                if matches!(failure, Failure::Stalled { .. }) {
                    state.health[rail].failed(SystemClock.now(), random());
                }
                state.last = Some(failure);
                state.last_up = Some(Instant::now());
                self.bury(&dead);
            }
            let missing = state.slots[slot].connection.is_none();
            if missing && !state.stopped && !state.keepers[rail] {
                self.start_keeper(state, rail);
            }
        }
    }

    fn start_keeper(self: &Arc<Self>, state: &mut State, rail: usize) {
        let shared = Arc::clone(self);
        let thread =
            std::thread::Builder::new().name("moontide-keeper".into()).spawn(move || shared.keep(rail));
        match thread {
            Ok(_) => state.keepers[rail] = true,
            Err(error) => warn!(node = self.node.0, %error, "no thread for connecting"),
        }
    }

    /// Connects what is missing on a rail.
    fn keep(&self, rail: usize) {
        let mut state = lock(&self.state);
        loop {
            let missing = |slot: &Slot| slot.rail == rail && slot.connection.is_none();
            if state.stopped || !state.slots.iter().any(missing) {
                state.keepers[rail] = false;
                return;
            }
            let now = SystemClock.now();
            if !state.health[rail].may_try(now) {
                let pause = state.health[rail].ready_at().since(now).max(Duration::from_millis(1));
                // Whoever waits without a thread looks at its own clock meanwhile.
                state = wait(&self.changed, state, pause.min(LOOK));
                let wakers = std::mem::take(&mut state.wakers);
                drop(state);
                wakers.into_iter().for_each(Waker::wake);
                state = lock(&self.state);
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
                            state.last_up = Some(Instant::now());
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
            let wakers = std::mem::take(&mut state.wakers);
            drop(state);
            wakers.into_iter().for_each(Waker::wake);
            state = lock(&self.state);
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
        Box::new(TcpPending::transfer(Arc::clone(&self.shared), ops.into(), frames, deadline, waiting))
    }

    unsafe fn put_in_one_go(
        &self,
        begin: Vec<u8>,
        ops: Vec<OpCore>,
        commit: &mut dyn FnMut(&[Option<u64>]) -> Vec<u8>,
        deadline: Instant,
    ) -> OneGo {
        // SAFETY: says the caller.
        unsafe { one_go::put_in_one_go(&self.shared, begin, ops, commit, deadline) }
    }

    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        waiting: Waiting,
    ) -> Box<dyn Pending> {
        Box::new(TcpPending::call(Arc::clone(&self.shared), kind, body, deadline, waiting))
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

/// Whether a failure to connect says that nobody is there.
fn says_gone(failure: &Failure) -> bool {
    use rustix::io::Errno;
    matches!(
        failure,
        Failure::System { source: Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH, .. }
    )
}
