//! [`Store`]: handle of an application. This file holds what all calls share; the calls are in `get`, `range`, `put`,
//! `write_plan` and `metadata`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use moontide_proto::convert::{NodeDetail, NodeDirectory, Response, Wire};
use moontide_proto::v1;
use moontide_rt::sync::{Mutex, MutexGuard};
use moontide_rt::time::Instant;
use moontide_transfer::Metrics as TransferMetrics;
use moontide_types::{Clock, ErrorCode, Key, ObjectId, SystemClock, TenantGeneration};
use prometheus_client::registry::Registry;
use tracing::{debug, warn};

use crate::cluster::{
    Cluster, ClusterIdentity, Master, Rounds, identity, next_counter, retry_if_disconnected,
};
use crate::config::StoreConfig;
use crate::error::StoreError;
use crate::link::{KeyResult, LookupEntry};
use crate::local::LocalNodes;
use crate::logic::{Budget, HedgeTimer, LocationCache, RETRY_BACKOFF};
use crate::metrics::StoreMetrics;
use crate::nodes::{NodeInfo, Nodes};
use crate::replica_list::ReplicaList;
use crate::single_flight::SingleFlight;

/// Interval of the background refresh of the node list.
const NODES_REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// Shortest interval between refreshes of the node list, however many nodes are unknown.
const REFRESH_MIN: Duration = Duration::from_millis(50);

/// Shards of the location cache, each with its own lock.
const SHARDS: usize = 16;

/// Attempts of a look-up that gets `Retry`.
const LOOKUPS_MAX: usize = 8;

fn node_info(detail: &NodeDetail<'_>) -> NodeInfo {
    NodeInfo {
        node: detail.node,
        addresses: detail.addresses.iter().map(|a| (a.engine.into(), a.address.into())).collect(),
        host: detail.topology.host.into(),
        rack: detail.topology.rack.into(),
        zone: detail.topology.zone.into(),
        draining: detail.draining,
    }
}

/// Result of a fetch.
pub(crate) type Fetched = Result<Option<Bytes>, StoreError>;

/// Store with blocking calls. Clones share everything. Tasks of an async runtime use [`AsyncStore`](crate::AsyncStore)
/// instead.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    self_weak: Weak<Inner>,
    pub(crate) cluster: Cluster,
    pub(crate) nodes: Nodes,
    pub(crate) local_nodes: LocalNodes,
    locations: Vec<Mutex<LocationCache<Arc<ReplicaList>>>>,
    pub(crate) single_flight: SingleFlight<ObjectId, Fetched>,
    pub(crate) budget: Mutex<Budget>,
    pub(crate) hedge: Mutex<HedgeTimer>,
    pub(crate) metrics: StoreMetrics,
    transfer_metrics: Arc<TransferMetrics>,
    refreshed: Mutex<Option<Instant>>,
}

impl Store {
    /// Connects. Fails within [`StoreConfig::connect_timeout`] if no master responds; the error names the address and a
    /// remedy.
    pub fn connect(config: StoreConfig) -> Result<Store, StoreError> {
        let until = Instant::now() + config.connect_timeout;
        let (cluster, identity) = Cluster::connect(config)?;
        let transfer_metrics = TransferMetrics::new();
        let nodes = Nodes::new(&cluster, Arc::clone(&transfer_metrics));
        let per_shard = cluster.config.location_cache_entries.div_ceil(SHARDS);
        let metrics = StoreMetrics::default();
        let inner = Arc::new_cyclic(|self_weak| Inner {
            self_weak: Weak::clone(self_weak),
            nodes,
            local_nodes: LocalNodes::new(identity, metrics.clone()),
            locations: (0..SHARDS).map(|_| Mutex::new(LocationCache::new(per_shard))).collect(),
            single_flight: SingleFlight::default(),
            budget: Mutex::default(),
            hedge: Mutex::default(),
            metrics,
            transfer_metrics,
            refreshed: Mutex::new(None),
            cluster,
        });
        inner.refresh_nodes(until)?;
        inner.spawn_refresh();
        Ok(Store { inner })
    }

    /// Returns the counters of this store.
    pub fn metrics(&self) -> &StoreMetrics {
        &self.inner.metrics
    }

    /// Adds the counters of this store and of its transfers to a registry.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.inner.metrics.register(registry);
        self.inner.transfer_metrics.register(registry);
    }

    /// Returns the registered nodes: all that were registered before the call.
    pub fn nodes(&self) -> Result<Vec<NodeInfo>, StoreError> {
        self.inner.refresh_nodes_now(self.inner.deadline())?;
        Ok(self.inner.nodes.all())
    }
}

impl Inner {
    pub(crate) fn config(&self) -> &StoreConfig {
        &self.cluster.config
    }

    /// Returns the deadline of a call that starts now.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.config().timeout
    }

    pub(crate) fn timeout_error(&self) -> StoreError {
        StoreError::Deadline { deadline_ms: self.config().timeout.as_millis() as u64 }
    }

    // ------------------------------------------------------------------------------------------------ the cluster

    /// Refreshes the node list, unless it was refreshed within [`REFRESH_MIN`].
    pub(crate) fn refresh_nodes(&self, deadline: Instant) -> Result<(), StoreError> {
        let refreshed = self.refreshed.try_lock_until(deadline).ok_or_else(|| self.timeout_error())?;
        if refreshed.is_some_and(|last| last.elapsed() < REFRESH_MIN) {
            return Ok(());
        }
        self.refresh(refreshed, deadline)
    }

    /// As [`Inner::refresh_nodes`], for callers that know the list to be stale: waits out [`REFRESH_MIN`].
    pub(crate) fn refresh_nodes_now(&self, deadline: Instant) -> Result<(), StoreError> {
        let called_at = Instant::now();
        let refreshed = self.refreshed.try_lock_until(deadline).ok_or_else(|| self.timeout_error())?;
        if refreshed.is_some_and(|last| last >= called_at) {
            return Ok(()); // another thread refreshed while this one waited
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
        let responses = self.cluster.call_any(deadline, |mut master| {
            let context = Some(context.clone());
            async move { master.get_nodes(v1::GetNodesRequest { context }).await }
        });
        let (mut messages, mut failed) = (vec![], None);
        for response in responses {
            match response {
                Ok(message) => messages.push(message),
                Err(error) => failed = Some(error),
            }
        }
        // One response is enough: all masters know the same nodes.
        if messages.is_empty() {
            self.cluster.refresh_map(self.cluster.masters().version(), deadline);
            return Err(failed.unwrap_or_else(|| StoreError::refused(ErrorCode::WrongMaster)));
        }
        self.merge_nodes(&messages)?;
        *refreshed = Some(Instant::now());
        Ok(())
    }

    /// Merges the responses of the masters into the node list.
    fn merge_nodes(&self, messages: &[v1::GetNodesResponse]) -> Result<(), StoreError> {
        let mut nodes: Vec<NodeInfo> = vec![];
        let mut generation = TenantGeneration(0);
        for message in messages {
            let response =
                Response::<NodeDirectory<'_>>::from_wire(message).map_err(StoreError::InvalidResponse)?;
            generation = generation.max(response.context().tenant_generation);
            let details = response
                .into_result()
                .map_err(|context| StoreError::refused(context.code.unwrap_or(ErrorCode::Internal)))?;
            nodes.extend(details.nodes.iter().map(node_info));
        }
        nodes.sort_by_key(|node| node.node);
        nodes.dedup_by_key(|node| node.node);
        let heaps = self.nodes.update(nodes);
        self.local_nodes.set_heaps(heaps);
        self.learn_generation(generation);
        Ok(())
    }

    /// Adopts a newer tenant generation: all objects of the tenant were removed, and ids of older generations are
    /// invalid.
    pub(crate) fn learn_generation(&self, generation: TenantGeneration) {
        let identity = self.local_nodes.identity();
        if generation > identity.generation {
            self.local_nodes.set_identity(ClusterIdentity { generation, ..(*identity).clone() });
            self.locations.iter().for_each(|shard| shard.lock().clear());
        }
    }

    /// Refreshes the node list in the background while the store exists.
    fn spawn_refresh(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.cluster.spawn(async move {
            for round in 0usize.. {
                tokio::time::sleep(NODES_REFRESH_INTERVAL).await;
                let Some(store) = weak.upgrade() else { return };
                let context = Some(store.cluster.context(Instant::now() + NODES_REFRESH_INTERVAL).to_wire());
                // Masters with groups know the same nodes: ask one of them per round, in turn.
                let mut clients = store.cluster.clients();
                let several = !store.cluster.is_single_master();
                // Not held while waiting, so that the last handle can be dropped.
                drop(store);
                if clients.is_empty() {
                    continue;
                }
                let mut master = clients.swap_remove(round % clients.len());
                let request = v1::GetNodesRequest { context: context.clone() };
                let nodes =
                    match tokio::time::timeout(NODES_REFRESH_INTERVAL, master.get_nodes(request)).await {
                        Ok(Ok(message)) => message.into_inner(),
                        Ok(Err(status)) => {
                            debug!(%status, "refresh of the node list failed");
                            continue;
                        }
                        Err(_) => {
                            debug!("refresh of the node list timed out");
                            continue;
                        }
                    };
                let mut map = None;
                if several {
                    let call = master.get_group_map(v1::GetGroupMapRequest { context });
                    if let Ok(Ok(message)) = tokio::time::timeout(NODES_REFRESH_INTERVAL, call).await {
                        map = message.into_inner().map;
                    }
                }
                let Some(store) = weak.upgrade() else { return };
                // Mapping memory waits for a node: keep it off the runtime's thread.
                let done = tokio::task::spawn_blocking(move || {
                    map.iter().for_each(|map| store.cluster.observe_map(map));
                    if several && nodes.nodes.len() < store.nodes.count_apart(None) {
                        // A node may have left, or this master does not know all nodes yet.
                        if let Err(error) = store.refresh_nodes_now(store.deadline()) {
                            debug!(%error, "refresh of the node list failed");
                        }
                    } else if let Err(error) = store.merge_nodes(&[nodes]) {
                        debug!(%error, "invalid node list ignored");
                    }
                });
                let _ = done.await;
            }
        });
    }

    /// Adopts the identity of another cluster: the master was restarted, and all objects that it knew are lost.
    fn check_identity(&self, id_key: u32) {
        if self.local_nodes.identity().id_key.number() == id_key {
            return;
        }
        let Some(mut master) = self.cluster.clients().into_iter().next() else { return };
        // In the background: the caller may be a task, and its own look-up is already done.
        let self_weak = self.self_weak.clone();
        let context = Some(self.cluster.context(Instant::now() + NODES_REFRESH_INTERVAL).to_wire());
        self.cluster.spawn(async move {
            let response = master.get_cluster_info(v1::GetClusterInfoRequest { context }).await;
            let identity = response.map(|message| identity(message.get_ref()));
            let Some(store) = self_weak.upgrade() else { return };
            match identity {
                Ok(Ok(identity)) => {
                    let before = store.local_nodes.identity().cluster;
                    warn!(cluster = identity.cluster, before, "the master now serves another cluster");
                    store.local_nodes.set_identity(identity);
                    store.locations.iter().for_each(|shard| shard.lock().clear());
                }
                Ok(Err(error)) => debug!(%error, "invalid cluster identity ignored"),
                Err(status) => debug!(%status, "refresh of the cluster identity failed"),
            }
        });
    }

    // -------------------------------------------------------------------------------------------------- locations

    fn shard(&self, id: &ObjectId) -> &Mutex<LocationCache<Arc<ReplicaList>>> {
        &self.locations[usize::from(id.0[0]) % SHARDS]
    }

    /// Returns the cached location of an object.
    pub(crate) fn cached_location(&self, id: &ObjectId) -> Option<Arc<ReplicaList>> {
        let location = self.shard(id).lock().get(id)?;
        self.metrics.location_cache_hits.inc();
        Some(location)
    }

    /// Caches a location. Skips empty objects, whose removal no read would detect, and objects on disk, which the
    /// master promotes to memory on another look-up.
    pub(crate) fn cache_location(&self, location: &Arc<ReplicaList>) {
        if location.len() > 0 && !location.is_on_disk(0) {
            self.shard(&location.id()).lock().put(location.id(), Arc::clone(location));
        }
    }

    /// Removes a stale location from the cache.
    pub(crate) fn invalidate_location(&self, location: &Arc<ReplicaList>) {
        self.metrics.location_cache_stale.inc();
        self.shard(&location.id())
            .lock()
            .forget_if(&location.id(), |other| other.epoch() == location.epoch());
    }

    /// Removes any cached location of an object.
    pub(crate) fn forget_object(&self, id: &ObjectId) {
        self.shard(id).lock().forget_if(id, |_| true);
    }

    /// Looks up locations at the masters; one result per key. `None`: the object does not exist, or is incomplete.
    pub(crate) fn fetch_locations(
        &self,
        keys: &[Key<'_>],
        rounds: Rounds,
        deadline: Instant,
    ) -> Vec<Result<Option<Arc<ReplicaList>>, StoreError>> {
        let mut results: Vec<Option<Result<Option<Arc<ReplicaList>>, StoreError>>> = vec![None; keys.len()];
        let mut backoff = RETRY_BACKOFF;
        for attempt in 0..LOOKUPS_MAX {
            let open: Vec<usize> = (0..keys.len()).filter(|&at| results[at].is_none()).collect();
            if open.is_empty() || Instant::now() >= deadline {
                break;
            }
            if attempt > 0 {
                std::thread::sleep(backoff.pause(Duration::ZERO, next_counter()));
            }
            let open_keys: Vec<Key<'_>> = open.iter().map(|&at| keys[at]).collect();
            for (&at, found) in open.iter().zip(self.lookup(&open_keys, rounds, deadline)) {
                results[at] = match found {
                    Ok(found) => self.parse_lookup(found),
                    Err(error) => Some(Err(error)),
                };
            }
        }
        let retry = || Err(StoreError::refused(ErrorCode::Retry));
        results.into_iter().map(|result| result.unwrap_or_else(retry)).collect()
    }

    /// Calls each master that hosts a group of the keys.
    fn lookup(
        &self,
        keys: &[Key<'_>],
        rounds: Rounds,
        deadline: Instant,
    ) -> Vec<Result<KeyResult<LookupEntry>, StoreError>> {
        self.cluster.route_rounds(
            rounds,
            keys.len(),
            deadline,
            |at| self.local_nodes.id(keys[at]),
            |master, part| {
                let part_keys: Vec<Key<'_>> = part.iter().map(|&at| keys[at]).collect();
                self.lookup_at(master, &part_keys, deadline)
            },
        )
    }

    /// Makes one call. A single key is batched with those of other threads.
    fn lookup_at(
        &self,
        master: &Master,
        keys: &[Key<'_>],
        deadline: Instant,
    ) -> Result<Vec<KeyResult<LookupEntry>>, StoreError> {
        let (tenant, lease_ms) = (self.cluster.tenant(), self.config().lease_ms());
        let (link, until) = (master.link(&self.cluster, deadline)?, Some(deadline));
        if let &[key] = keys {
            let found = retry_if_disconnected(|| link.lookup_one_until(tenant, key, lease_ms, until))?;
            return Ok(vec![found]);
        }
        let reply = retry_if_disconnected(|| link.lookup_until(tenant, keys, lease_ms, false, until))?;
        let replicas = reply.replicas()?;
        let each = replicas.list.iter().map(|(object, handles)| match object.code {
            Some(code) => Err(code),
            None => Ok(LookupEntry { object, handles: handles.iter().collect() }),
        });
        Ok(each.collect())
    }

    /// Converts an entry of a look-up and caches it. `None`: retry.
    pub(crate) fn parse_lookup(
        &self,
        found: KeyResult<LookupEntry>,
    ) -> Option<Result<Option<Arc<ReplicaList>>, StoreError>> {
        match found {
            Ok(entry) => {
                self.check_identity(entry.object.id_key);
                self.learn_generation(entry.object.tenant_generation);
                // The client's clock starts after the master's: keep three quarters of the lease.
                let lease = Duration::from_millis(entry.object.valid_ms.into()) / 4 * 3;
                let lease_expires_at = (!lease.is_zero()).then(|| SystemClock.now().after(lease));
                let location = ReplicaList::new(entry, lease_expires_at).map(Arc::new);
                if let Ok(location) = &location {
                    self.cache_location(location);
                }
                Some(location.map(Some))
            }
            Err(ErrorCode::NotFound | ErrorCode::NotReady | ErrorCode::Gone) => Some(Ok(None)),
            Err(ErrorCode::Retry) => None,
            Err(code) => Some(Err(StoreError::refused(code))),
        }
    }
}
