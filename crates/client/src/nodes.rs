//! [`Nodes`]: who holds bytes, and the links to them.
//!
//! The table comes from the master and is asked for again every few seconds, and when a node is named that is not in
//! it. A link is made when it is first needed; those to nodes of this host at once, because reading in place needs no
//! look-up that would name them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_heap::{Liveness, LocalHeap, PerProcess};
use moontide_transfer::shm::{ShmConfig, ShmEngine};
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::ucx::UcxEngine;
use moontide_transfer::{Engine, EngineKind, Engines, Failure, Link, Metrics, Peer, TransferError};
use moontide_types::bounds::REPLICAS_MAX;
use moontide_types::{Clock, NodeId, SystemClock};
use parking_lot::{Mutex, RwLock};
use tracing::{debug, warn};

use crate::cluster::spread;
use crate::config::StoreConfig;
use crate::decide::{Nearness, Trust};
use crate::error::StoreError;

/// How long a node that failed is asked last.
const SUSPECT: Duration = Duration::from_secs(1);

/// How often memory that could be mapped and is not is tried again.
const MAP_AGAIN: Duration = Duration::from_secs(10);

/// Memory of this host that this process has mapped, whichever store did it first. A process may join a node's memory
/// only so often, because its ledgers last until it ends.
static JOINED: PerProcess<Mutex<Vec<Joined>>> = PerProcess::new();

/// Where memory of this host was had, and the link to it.
type Joined = (Vec<String>, Arc<dyn Link>);

/// The memory of a node, if this process has it mapped.
fn joined(node: &Node) -> Option<Arc<dyn Link>> {
    if node.nearness != Nearness::Mapped {
        return None;
    }
    let mut joined = JOINED.get_or_init(Mutex::default).lock();
    joined.retain(|(_, link)| !Node::is_orphaned(link));
    let doors = node.doors();
    let same = |(of, link): &&Joined| *of == doors && link.node() == node.info.node;
    joined.iter().find(same).map(|(_, link)| Arc::clone(link))
}

/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(1);

/// Bytes that one thread may hold in place before it is made to copy.
const PINNED_BYTES_MAX: u64 = 4 << 30;

/// A node, as the master describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// The node.
    pub node: NodeId,
    /// How to reach it: engine and address.
    pub addresses: Vec<(String, String)>,
    /// The host it is on.
    pub host: String,
    /// Its rack; empty if unknown.
    pub rack: String,
    /// Its zone; empty if unknown.
    pub zone: String,
}

/// A node, and the link to it.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) info: NodeInfo,
    peer: Peer,
    pub(crate) nearness: Nearness,
    link: Mutex<Option<Arc<dyn Link>>>,
    /// Nanoseconds of the clock until which it is asked last.
    suspect_until: AtomicU64,
    /// Until which it is asked only if there is no other.
    slow_until: AtomicU64,
    made: Instant,
}

impl Node {
    /// What it did a moment ago.
    pub(crate) fn trust(&self) -> Trust {
        // Relaxed, here and below: hints.
        let now = SystemClock.now().0;
        match () {
            () if now < self.suspect_until.load(Ordering::Relaxed) => Trust::Failed,
            () if now < self.slow_until.load(Ordering::Relaxed) => Trust::Slow,
            () => Trust::Good,
        }
    }

    /// It failed.
    pub(crate) fn suspect(&self) {
        self.suspect_until.store(SystemClock.now().after(SUSPECT).0, Ordering::Relaxed);
    }

    /// Another one was faster.
    pub(crate) fn was_slow(&self) {
        self.slow_until.store(SystemClock.now().after(SUSPECT).0, Ordering::Relaxed);
    }

    /// Where its memory is to be had.
    fn doors(&self) -> Vec<String> {
        self.peer.addresses_of(EngineKind::Shm).map(str::to_owned).collect()
    }

    /// The link to it, if there is one.
    pub(crate) fn open_link(&self) -> Option<Arc<dyn Link>> {
        self.link.lock().clone()
    }

    /// A link to memory of this host that nobody owns any more.
    fn is_orphaned(link: &Arc<dyn Link>) -> bool {
        let gone =
            |heap: &Arc<LocalHeap>| !matches!(heap.board().liveness(SystemClock.now()), Liveness::Alive(_));
        link.local().is_some_and(gone)
    }
}

/// All nodes.
#[derive(Debug)]
pub(crate) struct Nodes {
    engines: Engines,
    labels: [String; 3],
    local: bool,
    table: RwLock<HashMap<NodeId, Arc<Node>>>,
}

impl Nodes {
    pub(crate) fn new(config: &StoreConfig, caller: u64, metrics: Arc<Metrics>) -> Nodes {
        let mut engines: Vec<Arc<dyn Engine>> = Vec::new();
        if config.local {
            engines.push(Arc::new(shm_engine(Arc::clone(&metrics))));
        }
        let tcp = TcpConfig {
            connections: config.connections,
            connect: CONNECT,
            token: config.token,
            caller,
            ..TcpConfig::default()
        };
        let tcp: Arc<dyn Engine> = Arc::new(TcpEngine::new(tcp, Arc::clone(&metrics)));
        if config.ucx {
            match UcxEngine::if_present(&tcp, &metrics) {
                Some(ucx) => engines.push(Arc::new(ucx)),
                None => warn!("UCX was asked for and is not there; see `moontide doctor`"),
            }
        }
        engines.push(tcp);
        let labels = [host_name(), config.rack.clone(), config.zone.clone()];
        let engines = Engines::new(engines, metrics);
        Nodes { engines, labels, local: config.local, table: RwLock::default() }
    }

    /// A node that is known.
    pub(crate) fn get(&self, node: NodeId) -> Option<Arc<Node>> {
        self.table.read().get(&node).cloned()
    }

    pub(crate) fn all(&self) -> Vec<NodeInfo> {
        let mut all: Vec<NodeInfo> = self.table.read().values().map(|node| node.info.clone()).collect();
        all.sort_by_key(|info| info.node);
        all
    }

    /// How many are registered.
    pub(crate) fn count(&self) -> usize {
        self.table.read().len()
    }

    /// Nodes to put on while others are not to be trusted: the master finds out later than those who try.
    pub(crate) fn good_if_some_are_not(&self) -> Vec<NodeId> {
        let table = self.table.read();
        let is_good = |node: &&Arc<Node>| node.trust() != Trust::Failed;
        let mut good: Vec<NodeId> = table.values().filter(is_good).map(|node| node.info.node).collect();
        if good.len() == table.len() {
            return Vec::new();
        }
        // Not the same one first for everybody.
        good.sort();
        let first = spread() as usize % good.len().max(1);
        good.rotate_left(first);
        good.truncate(REPLICAS_MAX);
        good
    }

    /// A node whose memory is mapped; of several, each in its turn.
    pub(crate) fn mapped(&self) -> Option<NodeId> {
        let table = self.table.read();
        let is_mapped =
            |node: &&Arc<Node>| node.nearness == Nearness::Mapped && node.trust() != Trust::Failed;
        let mut mapped: Vec<NodeId> = table.values().filter(is_mapped).map(|node| node.info.node).collect();
        mapped.sort();
        (!mapped.is_empty()).then(|| mapped[spread() as usize % mapped.len()])
    }

    /// The link to a node; made if there is none.
    pub(crate) fn link(&self, node: &Node, deadline: Instant) -> Result<Arc<dyn Link>, StoreError> {
        let mut place = node.link.lock();
        if let Some(link) = &*place {
            return Ok(Arc::clone(link));
        }
        if let Some(joined) = joined(node) {
            *place = Some(Arc::clone(&joined));
            return Ok(joined);
        }
        if node.trust() == Trust::Failed {
            // Somebody has just tried: those who waited for that do not try again one after the other.
            let source = TransferError::Unreachable {
                node: node.info.node,
                last: Failure::Paused { pause: SUSPECT },
            };
            return Err(StoreError::Node { node: node.info.node, source });
        }
        let until = deadline.min(Instant::now() + CONNECT);
        match self.engines.connect(&node.peer, until) {
            Ok(link) => {
                if link.local().is_some() {
                    JOINED.get_or_init(Mutex::default).lock().push((node.doors(), Arc::clone(&link)));
                }
                *place = Some(Arc::clone(&link));
                Ok(link)
            }
            Err(source) => {
                node.suspect();
                Err(StoreError::Node { node: node.info.node, source })
            }
        }
    }

    /// Takes in what the master says. The heaps of this host that are mapped now.
    pub(crate) fn update(&self, found: Vec<NodeInfo>) -> Vec<Arc<LocalHeap>> {
        let mut next = HashMap::with_capacity(found.len());
        let before = self.table.read().clone();
        for info in found {
            let kept = before.get(&info.node).filter(|node| {
                let link = node.open_link();
                // Its memory could be mapped, but was not when it was first reached: that is tried again now and then.
                let may_map = node.nearness == Nearness::Mapped
                    && link.as_ref().is_some_and(|link| link.local().is_none())
                    && node.made.elapsed() > MAP_AGAIN;
                node.info == info && !may_map && !link.as_ref().is_some_and(Node::is_orphaned)
            });
            let node = kept.cloned().unwrap_or_else(|| Arc::new(self.node(info)));
            next.insert(node.info.node, node);
        }
        let mut heaps = Vec::new();
        for node in next.values().filter(|node| node.nearness == Nearness::Mapped) {
            match self.link(node, Instant::now() + CONNECT) {
                Ok(link) => heaps.extend(link.local().cloned()),
                Err(error) => debug!(node = node.info.node.0, %error, "memory of this host is not mapped"),
            }
        }
        *self.table.write() = next;
        heaps
    }

    fn node(&self, info: NodeInfo) -> Node {
        let addresses = info.addresses.iter();
        let addresses = addresses.filter_map(|(engine, at)| Some((EngineKind::named(engine)?, at.clone())));
        let peer = Peer { node: info.node, addresses: addresses.collect() };
        let mapped = self.local
            && self.engines.ranked(&peer).first().is_some_and(|(_, best)| best.kind() == EngineKind::Shm);
        let ours = [&*self.labels[0], &*self.labels[1], &*self.labels[2]];
        let nearness = Nearness::of(mapped, ours, [&info.host, &info.rack, &info.zone]);
        Node {
            info,
            peer,
            nearness,
            link: Mutex::default(),
            suspect_until: AtomicU64::new(0),
            slow_until: AtomicU64::new(0),
            made: Instant::now(),
        }
    }
}

/// The engine for memory of this host.
#[expect(unsafe_code, reason = "mapping memory that other processes write is a matter of trust")]
fn shm_engine(metrics: Arc<Metrics>) -> ShmEngine {
    let config = ShmConfig { pinned_bytes_max: PINNED_BYTES_MAX };
    // SAFETY: a node's door lets in only processes of its own user and of users that its operator named, and a client
    // connects to nodes that its master named. All of them belong to one deployment and keep to the protocol; where
    // that cannot be trusted, `StoreConfig::local` is switched off.
    unsafe { ShmEngine::new(config, metrics) }
}

/// A node that has not answered within this may still be well: whoever had so little time left has learned nothing of it.
const ANSWERS_WITHIN: Duration = Duration::from_millis(200);

/// Whether a failure is the connection's rather than the request's.
pub(crate) fn is_of_connection(error: &TransferError) -> bool {
    use TransferError::*;
    match error {
        Deadline { waited } => *waited >= ANSWERS_WITHIN,
        Unreachable { .. } | NotLetIn { .. } | Lost { .. } => true,
        _ => false,
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
