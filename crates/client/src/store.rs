//! [`Store`]: what an application holds. Here is what all calls share; the calls are in `get`, `range`, `put`, `plan`
//! and `operate`.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use moontide_proto::convert::{Answer, NodeDetail, NodeDetails, Wire};
use moontide_proto::v1;
use moontide_transfer::Metrics as TransferMetrics;
use moontide_types::{Clock, ErrorCode, Key, ObjectId, SystemClock, TenantGeneration};
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::registry::Registry;
use tracing::{debug, warn};

use crate::cluster::{Cluster, Identity, Master, identity, insisting, spread};
use crate::config::{KEYS_PER_CALL, StoreConfig};
use crate::decide::{Backoff, Budget, HedgeTimer, Locations};
use crate::error::StoreError;
use crate::flights::Flights;
use crate::link::{KeyResult, Located};
use crate::local::Near;
use crate::metrics::StoreMetrics;
use crate::nodes::{NodeInfo, Nodes};
use crate::place::Placed;

/// How often the table of nodes is asked for.
const REFRESH: Duration = Duration::from_secs(2);

/// The table is not asked for more often than this, however many nodes are unknown.
const REFRESH_MIN: Duration = Duration::from_millis(50);

/// Parts of the memory of places, each behind a lock of its own.
const SHARDS: usize = 16;

/// How often a look-up that is told to come again does.
const LOOKUPS_MAX: usize = 8;

fn node_info(detail: &NodeDetail<'_>) -> NodeInfo {
    NodeInfo {
        node: detail.node,
        addresses: detail.addresses.iter().map(|a| (a.engine.into(), a.address.into())).collect(),
        host: detail.topology.host.into(),
        rack: detail.topology.rack.into(),
        zone: detail.topology.zone.into(),
    }
}

/// What a fetch gives.
pub(crate) type Fetched = Result<Option<Bytes>, StoreError>;

/// A store, for threads. Clones share everything. Calls wait; do not call them on a task of a runtime, which has
/// [`AsyncStore`](crate::AsyncStore).
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    me: Weak<Inner>,
    pub(crate) cluster: Cluster,
    pub(crate) nodes: Nodes,
    pub(crate) near: Near,
    locations: Vec<Mutex<Locations<Arc<Placed>>>>,
    pub(crate) flights: Flights<ObjectId, Fetched>,
    pub(crate) budget: Mutex<Budget>,
    pub(crate) hedge: Mutex<HedgeTimer>,
    pub(crate) metrics: StoreMetrics,
    transfer_metrics: Arc<TransferMetrics>,
    refreshed: Mutex<Option<Instant>>,
}

impl Store {
    /// Connects. Fails within [`StoreConfig::connect`] if no master answers, saying where and what to do.
    pub fn connect(config: StoreConfig) -> Result<Store, StoreError> {
        let (cluster, identity) = Cluster::connect(config)?;
        let transfer_metrics = TransferMetrics::new();
        let nodes = Nodes::new(&cluster.config, cluster.caller.0, Arc::clone(&transfer_metrics));
        let per_shard = cluster.config.locations.div_ceil(SHARDS);
        let metrics = StoreMetrics::default();
        let inner = Arc::new_cyclic(|me| Inner {
            me: Weak::clone(me),
            nodes,
            near: Near::new(identity, metrics.clone()),
            locations: (0..SHARDS).map(|_| Mutex::new(Locations::new(per_shard))).collect(),
            flights: Flights::default(),
            budget: Mutex::default(),
            hedge: Mutex::default(),
            metrics,
            transfer_metrics,
            refreshed: Mutex::new(None),
            cluster,
        });
        inner.refresh_nodes(inner.deadline())?;
        inner.keep_fresh();
        Ok(Store { inner })
    }

    /// What this store counts.
    pub fn metrics(&self) -> &StoreMetrics {
        &self.inner.metrics
    }

    /// Adds its counters, and those of its transfers, to a registry.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.inner.metrics.register(registry);
        self.inner.transfer_metrics.register(registry);
    }

    /// The nodes that are registered now.
    pub fn nodes(&self) -> Result<Vec<NodeInfo>, StoreError> {
        self.inner.refresh_nodes(self.inner.deadline())?;
        Ok(self.inner.nodes.all())
    }
}

impl Inner {
    pub(crate) fn config(&self) -> &StoreConfig {
        &self.cluster.config
    }

    /// When a call that starts now ends.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.config().deadline
    }

    pub(crate) fn too_late(&self) -> StoreError {
        StoreError::Deadline { deadline_ms: self.config().deadline.as_millis() as u64 }
    }

    // ------------------------------------------------------------------------------------------------ the cluster

    /// Asks who is there, unless that was done a moment ago.
    pub(crate) fn refresh_nodes(&self, deadline: Instant) -> Result<(), StoreError> {
        let refreshed = self.refreshed.lock();
        if refreshed.is_some_and(|last| last.elapsed() < REFRESH_MIN) {
            return Ok(());
        }
        self.refresh(refreshed, deadline)
    }

    /// As [`Inner::refresh_nodes`], for somebody who knows that what was heard before is not right any more.
    pub(crate) fn refresh_nodes_anew(&self, deadline: Instant) -> Result<(), StoreError> {
        let asked = Instant::now();
        let refreshed = self.refreshed.lock();
        if refreshed.is_some_and(|last| last >= asked) {
            return Ok(()); // somebody else did while we waited
        }
        if let Some(pause) = refreshed.and_then(|last| REFRESH_MIN.checked_sub(last.elapsed())) {
            std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
        }
        self.refresh(refreshed, deadline)
    }

    fn refresh(
        &self,
        mut refreshed: MutexGuard<'_, Option<Instant>>,
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let context = self.cluster.context(deadline).to_wire();
        let answers = self.cluster.call_each(deadline, |mut master| {
            let context = Some(context.clone());
            async move { master.get_nodes(v1::GetNodesRequest { context }).await }
        });
        let (mut messages, mut failed) = (vec![], None);
        for answer in answers {
            match answer {
                Ok(message) => messages.push(message),
                Err(error) => failed = Some(error),
            }
        }
        // A master that has gone is somebody else's business: the others know the same nodes.
        if messages.is_empty() {
            self.cluster.look(self.cluster.masters().version(), deadline);
            return Err(failed.unwrap_or_else(|| StoreError::refused(ErrorCode::WrongMaster)));
        }
        self.take_nodes(&messages)?;
        *refreshed = Some(Instant::now());
        Ok(())
    }

    /// What the masters said about nodes, all together.
    fn take_nodes(&self, messages: &[v1::GetNodesResponse]) -> Result<(), StoreError> {
        let mut nodes: Vec<NodeInfo> = vec![];
        let mut generation = TenantGeneration(0);
        for message in messages {
            let answer = Answer::<NodeDetails<'_>>::from_wire(message).map_err(StoreError::Answer)?;
            generation = generation.max(answer.context().tenant_generation);
            let details = answer
                .into_result()
                .map_err(|context| StoreError::refused(context.code.unwrap_or(ErrorCode::Internal)))?;
            nodes.extend(details.nodes.iter().map(node_info));
        }
        nodes.sort_by_key(|node| node.node);
        nodes.dedup_by_key(|node| node.node);
        let heaps = self.nodes.update(nodes);
        self.near.set_heaps(heaps);
        self.learn_generation(generation);
        Ok(())
    }

    /// Everything of the tenant was removed, by whomever: ids of before mean nothing any more.
    pub(crate) fn learn_generation(&self, generation: TenantGeneration) {
        let identity = self.near.identity();
        if generation > identity.generation {
            self.near.set_identity(Identity { generation, ..(*identity).clone() });
            self.locations.iter().for_each(|shard| shard.lock().clear());
        }
    }

    /// Keeps the table of nodes fresh as long as somebody holds the store.
    fn keep_fresh(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.cluster.spawn(async move {
            for turn in 0usize.. {
                tokio::time::sleep(REFRESH).await;
                let Some(store) = weak.upgrade() else { return };
                let context = Some(store.cluster.context(Instant::now() + REFRESH).to_wire());
                // Those that host groups know the same nodes: one is asked, each in turn.
                let mut clients = store.cluster.clients();
                let several = !store.cluster.is_alone();
                // Not held while waiting: the last holder must be able to let go.
                drop(store);
                if clients.is_empty() {
                    continue;
                }
                let mut master = clients.swap_remove(turn % clients.len());
                let request = v1::GetNodesRequest { context: context.clone() };
                let nodes = match tokio::time::timeout(REFRESH, master.get_nodes(request)).await {
                    Ok(Ok(message)) => message.into_inner(),
                    Ok(Err(status)) => {
                        debug!(%status, "the table of nodes was not answered");
                        continue;
                    }
                    Err(_) => {
                        debug!("the table of nodes was not answered in time");
                        continue;
                    }
                };
                let mut map = None;
                if several {
                    let asked = master.get_group_map(v1::GetGroupMapRequest { context });
                    if let Ok(Ok(message)) = tokio::time::timeout(REFRESH, asked).await {
                        map = message.into_inner().map;
                    }
                }
                let Some(store) = weak.upgrade() else { return };
                // Joining memory waits for a node: not on the runtime's thread.
                let done = tokio::task::spawn_blocking(move || {
                    map.iter().for_each(|map| store.cluster.heard_of(map));
                    if several && nodes.nodes.len() < store.nodes.count() {
                        // A node may have left; or this master has not heard of all of them yet.
                        if let Err(error) = store.refresh_nodes_anew(store.deadline()) {
                            debug!(%error, "the table of nodes is not known");
                        }
                    } else if let Err(error) = store.take_nodes(&[nodes]) {
                        debug!(%error, "the table of nodes was not understood");
                    }
                });
                let _ = done.await;
            }
        });
    }

    /// The master answers for another cluster than it did: it was started anew, and everything it knew is gone.
    fn check_identity(&self, id_key: u32) {
        if self.near.identity().id_key.number() == id_key {
            return;
        }
        let Some(mut master) = self.cluster.clients().into_iter().next() else { return };
        // In the background: whoever noticed it may be a task, and has its answer already.
        let me = self.me.clone();
        let context = Some(self.cluster.context(Instant::now() + REFRESH).to_wire());
        self.cluster.spawn(async move {
            let asked = master.get_cluster_info(v1::GetClusterInfoRequest { context }).await;
            let identity = asked.map(|message| identity(message.get_ref()));
            let Some(store) = me.upgrade() else { return };
            match identity {
                Ok(Ok(identity)) => {
                    let before = store.near.identity().cluster;
                    warn!(cluster = identity.cluster, before, "the master serves another cluster now");
                    store.near.set_identity(identity);
                    store.locations.iter().for_each(|shard| shard.lock().clear());
                }
                Ok(Err(error)) => debug!(%error, "the cluster's identity was not understood"),
                Err(status) => debug!(%status, "the cluster's identity was not answered"),
            }
        });
    }

    // ---------------------------------------------------------------------------------------------------- places

    fn shard(&self, id: &ObjectId) -> &Mutex<Locations<Arc<Placed>>> {
        &self.locations[usize::from(id.0[0]) % SHARDS]
    }

    /// A place that is remembered.
    pub(crate) fn remembered(&self, id: &ObjectId) -> Option<Arc<Placed>> {
        let placed = self.shard(id).lock().get(id)?;
        self.metrics.locations_used.inc();
        Some(placed)
    }

    /// Remembers a place. Not that of an empty object: nobody would notice that it has gone. Nor one on disk: the master
    /// brings back into memory what it is asked for again.
    pub(crate) fn remember(&self, placed: &Arc<Placed>) {
        if placed.len() > 0 && !placed.is_on_disk(0) {
            self.shard(&placed.id()).lock().put(placed.id(), Arc::clone(placed));
        }
    }

    /// A place was not right any more.
    pub(crate) fn forget(&self, placed: &Arc<Placed>) {
        self.metrics.locations_stale.inc();
        self.shard(&placed.id()).lock().forget_if(&placed.id(), |other| other.epoch() == placed.epoch());
    }

    /// Whatever is remembered of an object is not right any more.
    pub(crate) fn forget_object(&self, id: &ObjectId) {
        self.shard(id).lock().forget_if(id, |_| true);
    }

    /// Asks the master where objects are, one answer per key. `None`: it is not there, or not complete.
    pub(crate) fn look_up(
        &self,
        keys: &[Key<'_>],
        deadline: Instant,
    ) -> Vec<Result<Option<Arc<Placed>>, StoreError>> {
        let mut answers: Vec<Option<Result<Option<Arc<Placed>>, StoreError>>> = vec![None; keys.len()];
        let mut backoff = Backoff::default();
        for attempt in 0..LOOKUPS_MAX {
            let open: Vec<usize> = (0..keys.len()).filter(|&at| answers[at].is_none()).collect();
            if open.is_empty() || Instant::now() >= deadline {
                break;
            }
            if attempt > 0 {
                std::thread::sleep(backoff.pause(Duration::ZERO, spread()));
            }
            for part in open.chunks(KEYS_PER_CALL) {
                let asked: Vec<Key<'_>> = part.iter().map(|&at| keys[at]).collect();
                for (&at, found) in part.iter().zip(self.ask(&asked, deadline)) {
                    answers[at] = match found {
                        Ok(found) => self.understood(found),
                        Err(error) => Some(Err(error)),
                    };
                }
            }
        }
        let late = || Err(StoreError::refused(ErrorCode::Retry));
        answers.into_iter().map(|answer| answer.unwrap_or_else(late)).collect()
    }

    /// One call to each master that knows of some of the keys.
    fn ask(&self, keys: &[Key<'_>], deadline: Instant) -> Vec<Result<KeyResult<Located>, StoreError>> {
        let tenant = self.cluster.tenant();
        self.cluster.route(
            keys.len(),
            deadline,
            |at| self.near.id(tenant, keys[at]),
            |master, part| {
                let asked: Vec<Key<'_>> = part.iter().map(|&at| keys[at]).collect();
                self.ask_at(master, &asked)
            },
        )
    }

    /// One call. A single key travels with those of other threads.
    fn ask_at(&self, master: &Master, keys: &[Key<'_>]) -> Result<Vec<KeyResult<Located>>, StoreError> {
        let (tenant, lease_ms) = (self.cluster.tenant(), self.config().lease_ms());
        let link = master.link(&self.cluster)?;
        if let &[key] = keys {
            return Ok(vec![insisting(|| link.lookup_one(tenant, key, lease_ms))?]);
        }
        let reply = insisting(|| link.lookup(tenant, keys, lease_ms, false))?;
        let replicas = reply.replicas()?;
        let each = replicas.list.iter().map(|(object, handles)| match object.code {
            Some(code) => Err(code),
            None => Ok(Located { object, handles: handles.iter().collect() }),
        });
        Ok(each.collect())
    }

    /// What an answer means; `None`: ask again.
    pub(crate) fn understood(
        &self,
        found: KeyResult<Located>,
    ) -> Option<Result<Option<Arc<Placed>>, StoreError>> {
        match found {
            Ok(located) => {
                self.check_identity(located.object.id_key);
                self.learn_generation(located.object.tenant_generation);
                // Counted from now, which is later than the sending: shortened by a part for that.
                let lease = Duration::from_millis(located.object.window_ms.into()) / 4 * 3;
                let leased_until = (!lease.is_zero()).then(|| SystemClock.now().after(lease));
                let placed = Placed::new(located, leased_until).map(Arc::new);
                if let Ok(placed) = &placed {
                    self.remember(placed);
                }
                Some(placed.map(Some))
            }
            Err(ErrorCode::NotFound | ErrorCode::NotReady | ErrorCode::Gone) => Some(Ok(None)),
            Err(ErrorCode::Retry) => None,
            Err(code) => Some(Err(StoreError::refused(code))),
        }
    }
}
