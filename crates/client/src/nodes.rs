//! [`Nodes`]: the registered nodes, and the links to them.
//!
//! The list comes from the masters. It is refreshed every few seconds, and when a location names an unknown node. Links
//! connect on first use, except those to local nodes: zero-copy reads need no look-up that would name them, so their
//! memory is mapped at once.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moontide_heap::{Liveness, LocalHeap, PerProcess};
use moontide_rt::sync::{Mutex, RwLock};
use moontide_rt::time::Instant;
use moontide_transfer::shm::{ShmConfig, ShmEngine};
use moontide_transfer::tcp::{NearNode, TcpConfig, TcpEngine};
use moontide_transfer::ucx::UcxEngine;
use moontide_transfer::{ConnectionError, Engine, EngineKind, Engines, Link, Metrics, Peer, TransferError};
use moontide_types::limits::PREFERRED_PLACES_MAX;
use moontide_types::{Clock, Domain, Labels, NodeId, Place, Spread, SystemClock};
use tracing::{debug, warn};

use crate::cluster::{Cluster, next_counter};
use crate::error::StoreError;
use crate::logic::{Distance, NodeHealth};

/// Time for which a failed or slow node is tried last.
const SUSPECT_FOR: Duration = Duration::from_secs(1);

/// Interval between attempts to map memory that could not be mapped.
const REMAP_INTERVAL: Duration = Duration::from_secs(10);

/// Local memory that this process has mapped, for all stores of the process. A process may join a node's memory only a
/// limited number of times, because its ledgers last until it exits.
static MAPPED_NODES: PerProcess<Mutex<Vec<MappedNode>>> = PerProcess::new();

/// Sockets of a node, and the link to its memory.
type MappedNode = (Vec<String>, Arc<dyn Link>);

/// Returns the link to a node's memory if this process has mapped it.
fn mapped_link(node: &Node) -> Option<Arc<dyn Link>> {
    if node.distance != Distance::Mapped {
        return None;
    }
    let mut mapped = MAPPED_NODES.get_or_init(Mutex::default).lock();
    mapped.retain(|(_, link)| !Node::is_orphaned(link));
    let sockets = node.sockets();
    let same = |(of, link): &&MappedNode| *of == sockets && link.node() == node.info.node;
    mapped.iter().find(same).map(|(_, link)| Arc::clone(link))
}

/// Timeout of connecting to a node.
const CONNECT: Duration = Duration::from_secs(1);

/// Bytes that one thread may pin; further reads are copied.
const PINNED_BYTES_MAX: u64 = 4 << 30;

/// Node, as registered with the master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Id of the node.
    pub node: NodeId,
    /// Engines and addresses at which the node is reachable.
    pub addresses: Vec<(String, String)>,
    /// Host name.
    pub host: String,
    /// Rack; empty if unknown.
    pub rack: String,
    /// Zone; empty if unknown.
    pub zone: String,
    /// The node is being emptied.
    pub draining: bool,
}

impl NodeInfo {
    /// Returns the part of the cluster that has at most one replica of an object with this spread.
    fn domain(&self, spread: Spread) -> Domain<&str> {
        let [host, rack, zone] =
            [&self.host, &self.rack, &self.zone].map(|label| Some(label.as_str()).filter(|l| !l.is_empty()));
        spread.domain(self.node, Labels { host, rack, zone })
    }
}

/// Node with its link and health.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) info: NodeInfo,
    peer: Peer,
    pub(crate) distance: Distance,
    link: Mutex<Option<Arc<dyn Link>>>,
    /// Time until which the node counts as failed, in nanoseconds.
    suspect_until: AtomicU64,
    /// Time until which the node counts as slow, in nanoseconds.
    slow_until: AtomicU64,
    made: Instant,
}

impl Node {
    /// Returns the recent health of the node.
    pub(crate) fn health(&self) -> NodeHealth {
        // Relaxed, here and below: hints.
        let now = SystemClock.now().0;
        match () {
            () if now < self.suspect_until.load(Ordering::Relaxed) => NodeHealth::Failed,
            () if now < self.slow_until.load(Ordering::Relaxed) => NodeHealth::Slow,
            () => NodeHealth::Good,
        }
    }

    /// Marks the node as failed.
    pub(crate) fn suspect(&self) {
        self.suspect_until.store(SystemClock.now().after(SUSPECT_FOR).0, Ordering::Relaxed);
    }

    /// Marks the node as slow: another one was faster.
    pub(crate) fn mark_slow(&self) {
        self.slow_until.store(SystemClock.now().after(SUSPECT_FOR).0, Ordering::Relaxed);
    }

    /// Returns the sockets of the node's shm listener.
    fn sockets(&self) -> Vec<String> {
        self.peer.addresses_of(EngineKind::Shm).map(str::to_owned).collect()
    }

    /// Returns the link if it is connected.
    pub(crate) fn open_link(&self) -> Option<Arc<dyn Link>> {
        // A thread that connects holds the lock: there is no link yet.
        self.link.try_lock().and_then(|link| link.clone())
    }

    /// Returns whether a link leads to local memory whose node has exited.
    fn is_orphaned(link: &Arc<dyn Link>) -> bool {
        let gone =
            |heap: &Arc<LocalHeap>| !matches!(heap.board().liveness(SystemClock.now()), Liveness::Alive(_));
        // The heartbeat of a killed node is a while ago before it counts as gone; its socket is closed at once.
        link.is_closed() || link.local().is_some_and(gone)
    }
}

/// All registered nodes.
#[derive(Debug)]
pub(crate) struct Nodes {
    engines: Engines,
    /// Tells nodes of other hosts where objects that this process reads much should be.
    near: NearNode,
    labels: [String; 3],
    local: bool,
    table: RwLock<HashMap<NodeId, Arc<Node>>>,
}

impl Nodes {
    pub(crate) fn new(cluster: &Cluster, metrics: Arc<Metrics>) -> Nodes {
        let config = &cluster.config;
        let mut engines: Vec<Arc<dyn Engine>> = Vec::new();
        if config.shm {
            engines.push(Arc::new(shm_engine(Arc::clone(&metrics))));
        }
        let near = NearNode::default();
        let tcp = TcpConfig {
            connections: config.connections_per_node,
            connect: CONNECT,
            token: config.token,
            credentials: cluster.credentials.clone(),
            caller: cluster.caller.0,
            near: near.clone(),
            ..TcpConfig::default()
        };
        let tcp: Arc<dyn Engine> = Arc::new(TcpEngine::new(tcp, Arc::clone(&metrics)));
        if config.ucx {
            match UcxEngine::if_present(&tcp, &metrics) {
                Some(ucx) => engines.push(Arc::new(ucx)),
                None => warn!("UCX is enabled but not available; see `moontide doctor`"),
            }
        }
        engines.push(tcp);
        let labels = [host_name(), config.rack.clone(), config.zone.clone()];
        let engines = Engines::new(engines, metrics);
        Nodes { engines, near, labels, local: config.shm, table: RwLock::default() }
    }

    /// Returns a node by id.
    pub(crate) fn get(&self, node: NodeId) -> Option<Arc<Node>> {
        self.table.read().get(&node).cloned()
    }

    pub(crate) fn all(&self) -> Vec<NodeInfo> {
        let mut all: Vec<NodeInfo> = self.table.read().values().map(|node| node.info.clone()).collect();
        all.sort_by_key(|info| info.node);
        all
    }

    /// Returns the number of registered nodes, or of the different hosts, racks or zones in which they are.
    pub(crate) fn count_apart(&self, spread: Option<Spread>) -> usize {
        let table = self.table.read();
        let Some(spread) = spread else { return table.len() };
        let domains: BTreeSet<Domain<&str>> = table.values().map(|node| node.info.domain(spread)).collect();
        domains.len()
    }

    /// Returns the places that a put names to the master: those that its caller prefers. If some nodes have failed, these
    /// are left out, and healthy nodes follow, the local one first: clients detect failures earlier than the master.
    pub(crate) fn places(&self, preferred: &[Place], local: Option<NodeId>) -> Vec<Place> {
        let mut healthy = self.healthy_when_degraded();
        if healthy.is_empty() {
            return preferred.to_vec();
        }
        if let Some(local) = local {
            healthy.retain(|&node| node != local);
            healthy.insert(0, local);
        }
        let has_failed =
            |node: NodeId| self.get(node).is_some_and(|node| node.health() == NodeHealth::Failed);
        let mut places: Vec<Place> =
            preferred.iter().copied().filter(|place| !has_failed(place.node)).collect();
        places.extend(healthy.into_iter().map(Place::from));
        places.truncate(PREFERRED_PLACES_MAX);
        places
    }

    /// Returns healthy nodes to put on if some nodes have failed, otherwise none.
    fn healthy_when_degraded(&self) -> Vec<NodeId> {
        let table = self.table.read();
        let is_good = |node: &&Arc<Node>| node.health() != NodeHealth::Failed;
        let mut good: Vec<NodeId> = table.values().filter(is_good).map(|node| node.info.node).collect();
        if good.len() == table.len() {
            return Vec::new();
        }
        // Rotate, so that clients do not all prefer the same node.
        good.sort();
        let first = next_counter() as usize % good.len().max(1);
        good.rotate_left(first);
        good.truncate(PREFERRED_PLACES_MAX);
        good
    }

    /// Returns a node whose memory is mapped; rotates if there are several.
    pub(crate) fn mapped(&self) -> Option<NodeId> {
        let table = self.table.read();
        let is_mapped =
            |node: &&Arc<Node>| node.distance == Distance::Mapped && node.health() != NodeHealth::Failed;
        let mut mapped: Vec<NodeId> = table.values().filter(is_mapped).map(|node| node.info.node).collect();
        mapped.sort();
        (!mapped.is_empty()).then(|| mapped[next_counter() as usize % mapped.len()])
    }

    /// Returns the link to a node; connects if there is none.
    pub(crate) fn link(&self, node: &Node, deadline: Instant) -> Result<Arc<dyn Link>, StoreError> {
        // Another thread may be connecting.
        let until = deadline.min(Instant::now() + CONNECT);
        let Some(mut current) = node.link.try_lock_until(until) else {
            return Err(unreachable_error(node));
        };
        if let Some(link) = &*current {
            return Ok(Arc::clone(link));
        }
        if let Some(mapped) = mapped_link(node) {
            *current = Some(Arc::clone(&mapped));
            return Ok(mapped);
        }
        if node.health() == NodeHealth::Failed {
            // Another thread has just failed: threads that waited for it do not repeat the attempt one by one.
            return Err(unreachable_error(node));
        }
        match self.engines.connect(&node.peer, until) {
            Ok(link) => {
                if link.local().is_some() {
                    MAPPED_NODES.get_or_init(Mutex::default).lock().push((node.sockets(), Arc::clone(&link)));
                }
                *current = Some(Arc::clone(&link));
                Ok(link)
            }
            Err(source) => {
                node.suspect();
                Err(StoreError::Node { node: node.info.node, source })
            }
        }
    }

    /// Replaces the node list. Returns the mapped heaps of local nodes.
    pub(crate) fn update(&self, found: Vec<NodeInfo>) -> Vec<Arc<LocalHeap>> {
        let mut next = HashMap::with_capacity(found.len());
        let before = self.table.read().clone();
        for info in found {
            let kept = before.get(&info.node).filter(|node| {
                let link = node.open_link();
                // The memory could not be mapped at the first connection: try again now and then.
                let may_map = node.distance == Distance::Mapped
                    && link.as_ref().is_some_and(|link| link.local().is_none())
                    && node.made.elapsed() > REMAP_INTERVAL;
                node.info == info && !may_map && !link.as_ref().is_some_and(Node::is_orphaned)
            });
            let node = kept.cloned().unwrap_or_else(|| Arc::new(self.node(info)));
            next.insert(node.info.node, node);
        }
        let (mut heaps, mut near) = (Vec::new(), None);
        for node in next.values().filter(|node| node.distance == Distance::Mapped) {
            match self.link(node, Instant::now() + CONNECT) {
                Ok(link) => {
                    heaps.extend(link.local().cloned());
                    near = near.or(link.local().map(|_| node.info.node));
                }
                Err(error) => debug!(node = %node.info.node, %error, "local memory is not mapped"),
            }
        }
        *self.table.write() = next;
        self.near.set(near);
        heaps
    }

    fn node(&self, info: NodeInfo) -> Node {
        let addresses = info.addresses.iter();
        let addresses =
            addresses.filter_map(|(engine, at)| Some((EngineKind::from_name(engine)?, at.clone())));
        let peer = Peer { node: info.node, addresses: addresses.collect() };
        let mapped = self.local
            && self.engines.ranked(&peer).first().is_some_and(|(_, best)| best.kind() == EngineKind::Shm);
        let own_labels = [&*self.labels[0], &*self.labels[1], &*self.labels[2]];
        let distance = Distance::of(mapped, own_labels, [&info.host, &info.rack, &info.zone]);
        Node {
            info,
            peer,
            distance,
            link: Mutex::default(),
            suspect_until: AtomicU64::new(0),
            slow_until: AtomicU64::new(0),
            made: Instant::now(),
        }
    }
}

/// Error of a node to which another thread connects in vain.
fn unreachable_error(node: &Node) -> StoreError {
    let last = ConnectionError::BackingOff { pause: SUSPECT_FOR };
    let source = TransferError::Unreachable { node: node.info.node, last };
    StoreError::Node { node: node.info.node, source }
}

/// Creates the engine for local memory.
#[expect(unsafe_code, reason = "mapping memory that other processes write is a matter of trust")]
fn shm_engine(metrics: Arc<Metrics>) -> ShmEngine {
    let config = ShmConfig { pinned_bytes_max: PINNED_BYTES_MAX };
    // SAFETY: a node's shm listener accepts only processes of its own user and of users that its operator named, and a
    // client connects to nodes that its master named. All of them belong to one deployment and keep to the protocol;
    // where that cannot be trusted, `StoreConfig::shm` is switched off.
    unsafe { ShmEngine::new(config, metrics) }
}

/// Shorter timeouts do not mark a node as failed.
const ANSWERS_WITHIN: Duration = Duration::from_millis(200);

/// Returns whether an error is of the connection rather than of the request.
pub(crate) fn is_connection_error(error: &TransferError) -> bool {
    use TransferError::*;
    match error {
        Deadline { waited } => *waited >= ANSWERS_WITHIN,
        Unreachable { .. } | AttachRejected { .. } | ConnectionLost { .. } => true,
        _ => false,
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
