//! [`ConnectionSet`]: several connections to one peer, over one or several rails.
//!
//! A rail is a pair of addresses. Each rail has at least one connection. A rail that fails backs off, longer each time,
//! and a connector thread, which runs only while a connection is missing, connects again.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use moontide_auth::{Credentials, ExpectedServer};
use moontide_proto::{Hello, Token};
use moontide_rt::mix64;
use moontide_rt::sync::{Arc, Condvar, Mutex, lock, wait};
use moontide_rt::time::Instant;
use moontide_types::{Clock, MonoTime, NodeId, SystemClock};
use tracing::{debug, warn};

use crate::engine_kind::EngineKind;
use crate::error::{ConnectionError, TransferError};
use crate::metrics::Metrics;
use crate::rails::{FAILURES_RESET_AFTER, Rail, RailCandidate, RailState, choose};
use crate::tcp::connection::Connection;
use crate::tcp::handshake;
use crate::tcp::socket::Socket;
use crate::tcp::tls::ALPN;
use crate::topology::{RailAddress, current_numa_node};

/// Default number of connections to a peer: the second one uses a second core.
pub const CONNECTIONS_DEFAULT: usize = 2;

/// Most connections to a peer.
pub const CONNECTIONS_MAX: usize = 16;

/// How long a caller waits for a link that has worked, while it connects again.
const RECONNECT_GRACE: Duration = Duration::from_secs(1);

/// Longest wait for a connection before the state is checked again.
const STATE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Configuration of the TCP engine.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Connections to each peer; at least one per rail.
    pub connections: usize,
    /// Time limit for connect and handshake.
    pub connect: Duration,
    /// How long a connection may make no progress while bytes are expected, before it is closed.
    pub stall: Duration,
    /// Local addresses to use; empty: chosen by topology.
    pub bind: Vec<IpAddr>,
    /// Most requests in flight on a connection. The peer may allow fewer.
    pub inflight_max: u32,
    /// Credential of this process, sent in the handshake.
    pub token: Token,
    /// Certificate of this process; `None`: connections are not encrypted.
    pub credentials: Option<Arc<Credentials>>,
    /// Random number that identifies this process, drawn at its start.
    pub caller: u64,
    /// Node on the host of this process, sent in the handshake.
    pub near: NearNode,
}

/// The node on the host of this process, whose memory it maps: peers learn where objects that it reads much should be.
#[derive(Clone, Debug, Default)]
pub struct NearNode(Arc<AtomicU64>);

impl NearNode {
    /// Sets the node; `None`: there is none. Connections that are opened later announce it.
    pub fn set(&self, node: Option<NodeId>) {
        // Relaxed, here and below: a hint, ordered with nothing.
        self.0.store(node.map_or(0, |node| node.0), Ordering::Relaxed);
    }

    fn get(&self) -> NodeId {
        NodeId(self.0.load(Ordering::Relaxed))
    }
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
            credentials: None,
            caller: random(),
            near: NearNode::default(),
        }
    }
}

/// Connections to one peer, over one or several rails.
#[derive(Debug)]
pub(super) struct ConnectionSet {
    pub(super) node: NodeId,
    config: TcpConfig,
    rails: Vec<RailAddress>,
    pub(super) metrics: Arc<Metrics>,
    state: Mutex<State>,
    /// Notified when a connection was opened or an attempt failed.
    changed: Condvar,
    rotation: AtomicU64,
}

#[derive(Debug)]
struct State {
    health: Vec<Rail>,
    slots: Vec<ConnectionSlot>,
    /// Whether a connector thread runs for each rail. The thread ends when no connection is missing.
    connecting: Vec<bool>,
    last: Option<ConnectionError>,
    /// Last time at which a connection was open.
    last_up: Option<Instant>,
    /// Wakers of callers that wait for a connection, but not on a thread.
    wakers: Vec<Waker>,
    stopped: bool,
}

/// Slot for a connection of a rail.
#[derive(Debug)]
struct ConnectionSlot {
    rail: usize,
    connection: Option<Arc<Connection>>,
}

impl ConnectionSet {
    /// Starts to connect to a peer over the given rails.
    pub(super) fn open(
        node: NodeId,
        rails: Vec<RailAddress>,
        config: TcpConfig,
        metrics: Arc<Metrics>,
    ) -> Arc<ConnectionSet> {
        let now = SystemClock.now();
        let count = config.connections.clamp(1, CONNECTIONS_MAX).max(rails.len());
        let slots = (0..if rails.is_empty() { 0 } else { count })
            .map(|slot| ConnectionSlot { rail: slot % rails.len(), connection: None })
            .collect();
        let state = State {
            health: rails.iter().map(|_| Rail::new(now)).collect(),
            slots,
            connecting: vec![false; rails.len()],
            last: None,
            last_up: None,
            wakers: Vec::new(),
            stopped: false,
        };
        let shared = Arc::new(ConnectionSet {
            node,
            config,
            rails,
            metrics,
            state: Mutex::new(state),
            changed: Condvar::default(),
            rotation: AtomicU64::new(0),
        });
        shared.maintain(&mut lock(&shared.state));
        shared
    }

    /// Ends all connections and threads.
    pub(super) fn close(&self) {
        let (connections, wakers) = {
            let mut state = lock(&self.state);
            state.stopped = true;
            let slots = state.slots.iter_mut();
            let connections: Vec<_> = slots.filter_map(|slot| slot.connection.take()).collect();
            (connections, std::mem::take(&mut state.wakers))
        };
        // A connector thread that is connecting ends when that does, at most `TcpConfig::connect` later.
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
        for connection in connections {
            self.dispose(&connection);
        }
    }

    /// Returns a connection for each frame. `frames` are the bytes of each, which count as load of its connection until
    /// the caller drops them. Waits until there is a connection, at most until `deadline`.
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
            state = wait(&self.changed, state, left.min(STATE_POLL_INTERVAL)).0;
        }
    }

    /// As [`ConnectionSet::assign`], but does not wait: returns `None` if there may be a connection soon; then the waker is
    /// woken.
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

    /// Returns `None` if no connection is open, but one may be soon.
    fn try_assign(
        self: &Arc<Self>,
        state: &mut State,
        frames: &[u64],
    ) -> Result<Option<Vec<Arc<Connection>>>, TransferError> {
        self.maintain(state);
        let now = SystemClock.now();
        let mut candidates: Vec<RailCandidate> = Vec::with_capacity(state.slots.len());
        let mut idle_rails: Vec<usize> = Vec::new();
        for (index, slot) in state.slots.iter().enumerate() {
            if let Some(connection) = &slot.connection {
                // A single request always takes the same idle connection of a rail: its caches are warm at both ends.
                if frames.len() == 1 && connection.load() == 0 {
                    if idle_rails.contains(&slot.rail) {
                        continue;
                    }
                    idle_rails.push(slot.rail);
                }
                let usable = matches!(state.health[slot.rail].state(), RailState::Up { .. });
                let (numa, in_flight_bytes) = (self.rails[slot.rail].numa, connection.load());
                candidates.push(RailCandidate { rail: index, usable, in_flight_bytes, numa });
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
            let assigned: Vec<Arc<Connection>> = frames.iter().map(assign).collect();
            // Each of them, so that the next attempt finds no other closed one.
            if assigned.iter().filter(|connection| connection.is_closed_before_use()).count() == 0 {
                return Ok(Some(assigned));
            }
            for (connection, &bytes) in assigned.iter().zip(frames) {
                connection.drop_load(bytes);
            }
            return self.try_assign(state, frames);
        }
        // A rail that is connecting may be up in a moment. A caller does not wait for one that is backing off, unless
        // it worked until just now and no error shows that the peer is gone.
        let backs_off = |rail: &Rail| match rail.state() {
            RailState::BackingOff { until } => until > now,
            RailState::Up { .. } | RailState::Probing { .. } => false,
        };
        let worked = state.last_up.is_some_and(|last_up| last_up.elapsed() < RECONNECT_GRACE)
            && !state.last.as_ref().is_some_and(is_peer_gone);
        if state.stopped || (state.health.iter().all(backs_off) && !worked) {
            return Err(self.unreachable(state));
        }
        Ok(None)
    }

    fn unreachable(&self, state: &State) -> TransferError {
        let now = SystemClock.now();
        let pause = state.health.iter().map(Rail::ready_at).min().unwrap_or(now).since(now);
        let last = state.last.clone().unwrap_or(ConnectionError::BackingOff { pause });
        TransferError::Unreachable { node: self.node, last }
    }

    /// Returns over how many connections a batch is spread: the idle ones. Where every connection is busy with other
    /// transfers, splitting a transfer does not make it faster.
    pub(super) fn width(&self) -> usize {
        let state = lock(&self.state);
        let idle = |connection: &Arc<Connection>| !connection.is_dead() && connection.load() == 0;
        state.slots.iter().filter(|slot| slot.connection.as_ref().is_some_and(idle)).count().max(1)
    }

    /// Removes dead connections and starts connector threads for missing ones.
    fn maintain(self: &Arc<Self>, state: &mut State) {
        for slot in 0..state.slots.len() {
            let ConnectionSlot { rail, connection } = &mut state.slots[slot];
            let rail = *rail;
            if let Some(dead) = connection.take_if(|connection| connection.is_dead()) {
                let failure = dead.failure().unwrap_or(ConnectionError::Stopped);
                debug!(node = %self.node, rail, %failure, "connection lost");
                if dead.age() >= FAILURES_RESET_AFTER {
                    state.health[rail].succeeded(SystemClock.now());
                }
                // A closed connection can be retried at once; silence counts as a failure of the rail.
                if matches!(failure, ConnectionError::Stalled { .. }) {
                    state.health[rail].failed(SystemClock.now(), random());
                }
                state.last = Some(failure);
                state.last_up = Some(Instant::now());
                self.dispose(&dead);
            }
            let missing = state.slots[slot].connection.is_none();
            if missing && !state.stopped && !state.connecting[rail] {
                self.start_connector(state, rail);
            }
        }
    }

    fn start_connector(self: &Arc<Self>, state: &mut State, rail: usize) {
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("moontide-conn".into())
            .spawn(move || shared.connect_missing(rail));
        match thread {
            Ok(_) => state.connecting[rail] = true,
            Err(error) => warn!(node = %self.node, %error, "cannot start a thread for connecting"),
        }
    }

    /// Opens the missing connections of a rail.
    fn connect_missing(&self, rail: usize) {
        let mut state = lock(&self.state);
        loop {
            let missing = |slot: &ConnectionSlot| slot.rail == rail && slot.connection.is_none();
            if state.stopped || !state.slots.iter().any(missing) {
                state.connecting[rail] = false;
                return;
            }
            let now = SystemClock.now();
            if !state.health[rail].try_acquire(now) {
                let pause = state.health[rail].ready_at().since(now).max(Duration::from_millis(1));
                // Wakes callers that poll, so that they check their deadlines.
                state = wait(&self.changed, state, pause.min(STATE_POLL_INTERVAL)).0;
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
                    let slot = state.slots.iter().position(missing).filter(|_| !state.stopped);
                    match slot {
                        Some(slot) => {
                            state.slots[slot].connection = Some(Arc::new(connection));
                            state.last_up = Some(Instant::now());
                            self.metrics.connection_opened(EngineKind::Tcp);
                        }
                        None => connection.stop(),
                    }
                }
                Err(failure) => {
                    debug!(node = %self.node, rail, %failure, "cannot connect");
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

    fn connect(&self, rail: usize) -> Result<Connection, ConnectionError> {
        let RailAddress { local, peer, .. } = self.rails[rail];
        let deadline = Instant::now() + self.config.connect;
        let socket = Socket::connect(local, peer, deadline)?;
        if let Some(credentials) = &self.config.credentials {
            let expected = ExpectedServer::Node(self.node);
            socket.start_client_tls(credentials.client(expected, &[ALPN]), deadline)?;
        }
        let TcpConfig { inflight_max, token, caller, stall, ref near, .. } = self.config;
        let local_hello = handshake::hello(NodeId(0), caller, inflight_max.max(1), token);
        let Hello { inflight_max: allowed, .. } =
            handshake::client_handshake(&socket, (&local_hello, near.get()), self.node, deadline)?;
        Ok(Connection::new(socket, stall, inflight_max.min(allowed) as usize))
    }

    fn dispose(&self, connection: &Connection) {
        let failure = connection.failure().unwrap_or(ConnectionError::Stopped);
        connection.stop();
        self.metrics.connection_ended(EngineKind::Tcp, &failure);
    }
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // For jitter and process ids the clock is good enough if the kernel has no randomness.
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => {
            let MonoTime(nanos) = SystemClock.now();
            mix64(nanos)
        }
    }
}

/// Returns whether a failure to connect shows that the peer is not running.
fn is_peer_gone(failure: &ConnectionError) -> bool {
    use rustix::io::Errno;
    matches!(
        failure,
        ConnectionError::System { source: Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH, .. }
    )
}
