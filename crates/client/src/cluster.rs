//! [`Cluster`]: the client's view of the masters: their addresses, and which of them hosts which group.
//!
//! Hot calls use framed links ([`BlockingLink`]), one to each master. All other calls use gRPC, on a small runtime
//! owned by the client, so that they work from any thread, with or without a runtime around it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::future::Future;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use moontide_auth::{Credentials, Role};
use moontide_proto::convert::{CallerId, GetClusterInfoResponse, GroupMap, RequestContext, Wire};
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::{ProtocolVersions, v1};
use moontide_rt::SplitMix64;
use moontide_rt::sync::{Mutex, RwLock};
use moontide_rt::time::Instant;
use moontide_tasks::channel::{self, Channel};
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, MapVersion, ObjectId, Tenant, TenantGeneration, TenantIdKey, Term};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;
use tonic::{Code, Response, Status};
use tracing::debug;

use crate::config::{KEYS_PER_CALL, StoreConfig};
use crate::error::StoreError;
use crate::link::{BlockingLink, KeyResult, LinkConfig, LinkError};
use crate::logic::{GroupRoutes, RETRY_BACKOFF, is_misrouted};

/// Shortest interval between refreshes of the group map, however many calls fail.
const MAP_REFRESH_MIN: Duration = Duration::from_millis(50);

/// Shortest timeout of an attempt at one of several masters.
const ATTEMPT_MIN: Duration = Duration::from_millis(250);

/// Time that the client waits for a response beyond the timeout that it sends to the master.
const ATTEMPT_SLACK: Duration = Duration::from_millis(100);

/// Time that the other masters have after the first response, if one response may be enough.
const OTHERS_WAIT: Duration = Duration::from_millis(100);

/// Longest wait for the responses of a map refresh.
const MAP_REFRESH_TIMEOUT: Duration = Duration::from_secs(1);

/// Inputs of the ids of the tenant's objects, and the cluster's id.
#[derive(Clone, Debug)]
pub(crate) struct ClusterIdentity {
    pub(crate) cluster: u64,
    pub(crate) id_key: TenantIdKey,
    pub(crate) generation: TenantGeneration,
}

/// How often entries are sent whose master is wrong or does not respond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounds {
    /// Once: the caller has other work to do before it tries again.
    One,
    /// Again, after a refresh of the map, until the deadline.
    UntilDeadline,
}

/// Connections to the masters, and the group map.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Shut down in the background: a task may drop the client.
    runtime: Option<Runtime>,
    pub(crate) config: StoreConfig,
    /// Certificate of this process; `None`: no TLS.
    pub(crate) credentials: Option<Arc<Credentials>>,
    pub(crate) caller: CallerId,
    masters: RwLock<Arc<Masters>>,
    /// Time of the last refresh of the map; locked during a refresh.
    refreshed_at: Mutex<Instant>,
}

/// Group map, with a connection to each master in it.
#[derive(Debug)]
pub(crate) struct Masters {
    version: u64,
    routes: GroupRoutes,
    /// Single-master cluster: the map never changes.
    single_master: bool,
    all: Vec<Arc<Master>>,
}

/// Connections to one master.
#[derive(Debug)]
pub(crate) struct Master {
    grpc_address: String,
    /// Address of the framed protocol.
    frame_address: String,
    channel: Channel,
    /// Whether the master hosts any group.
    hosts: bool,
    link: Mutex<Option<Arc<BlockingLink>>>,
}

impl Master {
    /// Returns the framed link; connects on first use.
    pub(crate) fn link(&self, cluster: &Cluster, deadline: Instant) -> Result<Arc<BlockingLink>, StoreError> {
        // A connecting thread holds the lock; others wait no longer than their own connect would take.
        let until = deadline.min(Instant::now() + cluster.config.connect_timeout);
        let Some(mut link) = self.link.try_lock_until(until) else {
            return Err(StoreError::refused(ErrorCode::Unreachable));
        };
        if let Some(link) = &*link {
            return Ok(Arc::clone(link));
        }
        let mut config = cluster.link_config_to(&self.frame_address);
        if !cluster.is_single_master() {
            // The link waits a little longer than the master, so that the master's own timeout error arrives.
            let slack = ATTEMPT_SLACK.min(cluster.config.timeout / 10);
            config.timeout_ms = (cluster.attempt_timeout() + slack).as_millis().max(1) as u32; // ≤ the deadline
            config.connect_timeout_ms = config.connect_timeout_ms.min(config.timeout_ms);
        }
        Ok(Arc::clone(link.insert(Arc::new(BlockingLink::connect_until(config, Some(deadline))?))))
    }

    /// Adds the address of the master to an error.
    fn named<R>(&self, result: Result<R, Status>) -> Result<R, StoreError> {
        result.map_err(|status| master_error(&self.grpc_address, &status))
    }

    /// Returns a gRPC client, for calls that are not hot.
    pub(crate) fn client(&self) -> MasterClient<Channel> {
        client(&self.channel)
    }
}

impl Cluster {
    /// Fetches the group map and the cluster's identity from the first configured master that responds. Connects the
    /// framed link of a single master.
    pub(crate) fn connect(mut config: StoreConfig) -> Result<(Cluster, ClusterIdentity), StoreError> {
        config.validate()?;
        let credentials = config.load_credentials()?;
        if let Some(credentials) = &credentials {
            config.tenant = tenant_of(&config.tenant, credentials.info().identity.role())?;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("moontide-client")
            .enable_all()
            .build()
            .map_err(|error| StoreError::system("start the client runtime", error))?;
        let unreachable =
            |reason: String| StoreError::NoMaster { address: config.master.clone(), reason: reason.into() };
        let caller = CallerId(random_u64());
        let until = Instant::now() + config.connect_timeout;
        let context = context(&config, caller, config.connect_timeout);
        let (mut map, mut reason) = (None, "address is not host:port".to_owned());
        // All at once: a master that does not respond does not delay the others.
        let (sender, responses) = std::sync::mpsc::channel();
        for address in config.masters() {
            let channel = channel(&runtime, &address, config.connect_timeout, credentials.as_ref())
                .map_err(unreachable)?;
            let (sender, context) = (sender.clone(), context.clone());
            runtime.spawn(async move {
                let request = v1::GetGroupMapRequest { context: Some(context) };
                let response = client(&channel).get_group_map(request).await;
                // The receiver is gone if another master was faster.
                let _ = sender.send((channel, response.map(Response::into_inner)));
            });
        }
        drop(sender);
        while map.is_none() {
            match responses.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((channel, Ok(response))) => map = response.map.map(|map| (map, channel)),
                Ok((_, Err(status))) if is_denied(&status) => {
                    return Err(master_error(&config.master, &status));
                }
                Ok((_, Err(status))) => reason = status_text(&status),
                Err(RecvTimeoutError::Timeout) => {
                    reason = "timed out".to_owned();
                    break;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let Some((map, channel)) = map else { return Err(unreachable(reason)) };
        let info = RunningCall::start(&runtime, &channel, move |mut master| async move {
            master.get_cluster_info(v1::GetClusterInfoRequest { context: Some(context) }).await
        });
        let identity = identity(&info.wait(until).map_err(|status| unreachable(status_text(&status)))?)?;
        let cluster = Cluster {
            masters: RwLock::new(Arc::new(Masters {
                version: 0,
                routes: GroupRoutes::new(NonZeroU16::MIN, []),
                single_master: false,
                all: vec![],
            })),
            runtime: Some(runtime),
            config,
            credentials,
            caller,
            refreshed_at: Mutex::new(Instant::now()),
        };
        cluster.apply_map(&map)?;
        // An election may be in progress.
        while cluster.masters().hosts().next().is_none() && Instant::now() < until {
            std::thread::sleep(MAP_REFRESH_MIN);
            cluster.refresh_map(cluster.masters().version, until);
        }
        let masters = cluster.masters();
        let Some(master) = masters.hosts().next() else {
            let (address, reason) = (cluster.config.master.clone(), "no master hosts a group".into());
            return Err(StoreError::NoMaster { address, reason });
        };
        if masters.single_master {
            master.link(&cluster, until)?;
        }
        Ok((cluster, identity))
    }

    pub(crate) fn masters(&self) -> Arc<Masters> {
        Arc::clone(&self.masters.read())
    }

    /// Returns whether the cluster has a single master and no election.
    pub(crate) fn is_single_master(&self) -> bool {
        self.masters.read().single_master
    }

    /// Sends each entry of a batch to the master of its group, to all masters at once: `call` gets a master and indices of
    /// at most [`KEYS_PER_CALL`] entries, and returns one result for each of them. Entries that reach a wrong or
    /// unreachable master are sent again after a refresh of the map, until the deadline.
    pub(crate) fn route<T: Send>(
        &self,
        count: usize,
        deadline: Instant,
        id_of: impl Fn(usize) -> ObjectId,
        call: impl Fn(&Master, &[usize]) -> Result<Vec<KeyResult<T>>, StoreError> + Sync,
    ) -> Vec<Result<KeyResult<T>, StoreError>> {
        self.route_rounds(Rounds::UntilDeadline, count, deadline, id_of, call)
    }

    /// As [`Cluster::route`], with one round of calls or as many as fit.
    pub(crate) fn route_rounds<T: Send>(
        &self,
        rounds: Rounds,
        count: usize,
        deadline: Instant,
        id_of: impl Fn(usize) -> ObjectId,
        call: impl Fn(&Master, &[usize]) -> Result<Vec<KeyResult<T>>, StoreError> + Sync,
    ) -> Vec<Result<KeyResult<T>, StoreError>> {
        let mut results: Vec<Option<Result<KeyResult<T>, StoreError>>> = (0..count).map(|_| None).collect();
        let mut backoff = RETRY_BACKOFF;
        loop {
            let masters = self.masters();
            let open = (0..count).filter(|&at| results[at].is_none());
            let parts = match masters.all.len() {
                1 if masters.single_master => vec![(Some(0), open.collect())],
                _ => masters.routes.split(open.map(|at| (at, id_of(at)))),
            };
            let mut last = StoreError::refused(ErrorCode::WrongMaster);
            let asked: Vec<(&Arc<Master>, Vec<usize>)> = parts
                .into_iter()
                .filter_map(|(host, part)| Some((&masters.all[usize::from(host?)], part)))
                .filter(|(_, part)| !part.is_empty())
                .collect();
            let results_of_parts = call_all(&asked, &call);
            let parts = asked.iter().flat_map(|(_, part)| part.chunks(KEYS_PER_CALL));
            for (part, result) in parts.zip(results_of_parts.into_iter().flatten()) {
                match result {
                    Ok(found) => {
                        for (&at, found) in part.iter().zip(found) {
                            let found = match found {
                                Err(ErrorCode::WrongMaster)
                                    if moontide_rt::mutation_enabled("wrong-master-a-miss") =>
                                {
                                    Err(ErrorCode::NotFound)
                                }
                                found => found,
                            };
                            match found {
                                // Retry: the group is being handed off to another master, or its nodes have yet to respond.
                                Err(code @ (ErrorCode::WrongMaster | ErrorCode::Retry))
                                    if !masters.single_master =>
                                {
                                    last = StoreError::refused(code);
                                }
                                found => results[at] = Some(Ok(found)),
                            }
                        }
                    }
                    Err(error) if !masters.single_master && is_misrouted(error.code()) => last = error,
                    Err(error) => part.iter().for_each(|&at| results[at] = Some(Err(error.clone()))),
                }
            }
            if results.iter().all(Option::is_some) {
                return results.into_iter().map(|result| result.expect("every entry has a result")).collect();
            }
            let pause = backoff.pause(Duration::ZERO, next_counter());
            if rounds == Rounds::One || Instant::now() + pause >= deadline {
                return results
                    .into_iter()
                    .map(|result| result.unwrap_or_else(|| Err(last.clone())))
                    .collect();
            }
            std::thread::sleep(pause);
            self.refresh_map(masters.version, deadline);
        }
    }

    /// Applies a group map that came with a response, if it is newer.
    pub(crate) fn observe_map(&self, map: &v1::GroupMap) {
        let current = self.masters();
        let newer = map.version > current.version;
        let other = map.version == current.version && map.masters.len() != current.all.len();
        if !current.single_master
            && (newer || other)
            && let Err(error) = self.apply_map(map)
        {
            debug!(%error, "invalid group map ignored");
        }
    }

    /// Refreshes the map. Does nothing if another thread has installed a map other than `seen`, or has just refreshed.
    pub(crate) fn refresh_map(&self, seen: u64, deadline: Instant) {
        let Some(mut refreshed_at) = self.refreshed_at.try_lock_until(deadline) else { return };
        if self.masters().version != seen || refreshed_at.elapsed() < MAP_REFRESH_MIN {
            return;
        }
        let current = self.masters().all.iter().map(|master| master.grpc_address.clone()).collect::<Vec<_>>();
        let addresses: BTreeSet<String> = self.config.masters().into_iter().chain(current).collect();
        let timeout = deadline.saturating_duration_since(Instant::now()).min(MAP_REFRESH_TIMEOUT);
        let (sender, responses) = std::sync::mpsc::channel();
        for address in addresses {
            let Ok(channel) = channel(self.runtime(), &address, timeout, self.credentials.as_ref()) else {
                continue;
            };
            let (sender, context) = (sender.clone(), context(&self.config, self.caller, MAP_REFRESH_TIMEOUT));
            self.spawn(async move {
                let request = v1::GetGroupMapRequest { context: Some(context) };
                if let Ok(Ok(response)) =
                    tokio::time::timeout(timeout, client(&channel).get_group_map(request)).await
                {
                    // The receiver is gone if a newer map was found already.
                    let _ = sender.send(response.into_inner());
                }
            });
        }
        drop(sender);
        let mut until = Instant::now() + timeout;
        let mut newest: Option<v1::GroupMap> = None;
        while let Ok(response) = responses.recv_timeout(until.saturating_duration_since(Instant::now())) {
            let Some(map) = response.map else { continue };
            until = until.min(Instant::now() + OTHERS_WAIT);
            let is_newer = newest.as_ref().is_none_or(|newest| newest.version < map.version);
            if is_newer {
                let enough = map.version > seen;
                newest = Some(map);
                if enough {
                    break; // do not wait for the other masters
                }
            }
        }
        if let Some(map) = newest.filter(|map| map.version > seen)
            && let Err(error) = self.apply_map(&map)
        {
            debug!(%error, "invalid group map ignored");
        }
        *refreshed_at = Instant::now();
    }

    /// Installs a map. Links to masters that are in both maps are kept.
    fn apply_map(&self, map: &v1::GroupMap) -> Result<(), StoreError> {
        let parsed = GroupMap::from_wire(map).map_err(StoreError::InvalidResponse)?;
        let before = self.masters();
        let mut all = Vec::with_capacity(parsed.masters.len());
        for master in &parsed.masters {
            // A single master may be reachable at another address than the one it knows.
            let named = self.config.masters().into_iter().next().filter(|_| parsed.single_master);
            let grpc_address = named.unwrap_or_else(|| master.grpc_address.to_owned());
            let hosts = !master.groups.is_empty();
            let same = |current: &&Arc<Master>| {
                (current.hosts, &*current.grpc_address, &*current.frame_address)
                    == (hosts, &*grpc_address, master.frame_address)
            };
            if let Some(current) = before.all.iter().find(same) {
                all.push(Arc::clone(current));
                continue;
            }
            let address = self.config.master.clone();
            let unreachable = |reason: String| StoreError::NoMaster { address, reason: reason.into() };
            if master.frame_address.is_empty() {
                return Err(unreachable("the master does not serve the framed protocol".into()));
            }
            let channel = channel(
                self.runtime(),
                &grpc_address,
                self.config.connect_timeout,
                self.credentials.as_ref(),
            )
            .map_err(unreachable)?;
            let frame_address = master.frame_address.to_owned();
            let link = Mutex::default();
            all.push(Arc::new(Master { grpc_address, frame_address, channel, hosts, link }));
        }
        let groups = NonZeroU16::new(parsed.groups).unwrap_or(NonZeroU16::MIN);
        let routes = GroupRoutes::new(groups, map.masters.iter().map(|master| &master.groups[..]));
        let masters = Masters { version: map.version, routes, single_master: parsed.single_master, all };
        // Another thread may have installed a newer one meanwhile.
        let mut current = self.masters.write();
        if map.version >= current.version {
            *current = Arc::new(masters);
        }
        Ok(())
    }

    /// Returns the context of a call.
    pub(crate) fn context(&self, deadline: Instant) -> RequestContext<'_> {
        let mut left = deadline.saturating_duration_since(Instant::now());
        if !self.is_single_master() {
            left = left.min(self.attempt_timeout());
        }
        let left = left.as_millis();
        RequestContext {
            tenant: self.tenant(),
            group: None,
            map_version: MapVersion(0),
            term: Term::ZERO,
            caller: self.caller,
            session: None,
            timeout_ms: left.clamp(1, 600_000) as u32, // clamped
            token: self.config.token,
        }
    }

    /// Returns the timeout of an attempt at one of several masters or nodes: a master that does not respond may no longer
    /// be the master, and a node that does not respond must not take the time of the others.
    pub(crate) fn attempt_timeout(&self) -> Duration {
        // At most half of the call's timeout: the rest is for a refresh of the map and another attempt.
        (self.config.timeout / 4).max(ATTEMPT_MIN).min(self.config.timeout / 2)
    }

    /// Returns the tenant of all keys.
    pub(crate) fn tenant(&self) -> Tenant<'_> {
        Tenant::new(&self.config.tenant).expect("validated at connect")
    }

    /// Makes a gRPC call to one master. The caller checks the context of the response.
    pub(crate) fn call<R: Send + 'static, F>(
        &self,
        master: &Master,
        deadline: Instant,
        call: impl FnOnce(MasterClient<Channel>) -> F,
    ) -> Result<R, StoreError>
    where
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        master.named(RunningCall::start(self.runtime(), &master.channel, call).wait(deadline))
    }

    /// Makes a gRPC call to each master that hosts a group, all at once, for calls that every master can answer: the
    /// others have [`OTHERS_WAIT`] left after the first response.
    pub(crate) fn call_any<R: Send + 'static, F>(
        &self,
        deadline: Instant,
        mut call: impl FnMut(MasterClient<Channel>) -> F,
    ) -> Vec<Result<R, StoreError>>
    where
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        let masters = self.masters();
        let (sender, responses) = std::sync::mpsc::channel();
        let asked: Vec<&Arc<Master>> = masters.hosts().collect();
        for (at, master) in asked.iter().enumerate() {
            let (sender, future) = (sender.clone(), call(client(&master.channel)));
            self.spawn(async move {
                let left = deadline.saturating_duration_since(Instant::now());
                let response = tokio::time::timeout(left, future).await;
                let response = response.unwrap_or_else(|_| Err(Status::deadline_exceeded("timed out")));
                // The receiver is gone if the others were faster.
                let _ = sender.send((at, response.map(Response::into_inner)));
            });
        }
        drop(sender);
        let (mut results, mut until) = (Vec::with_capacity(asked.len()), deadline);
        while results.len() < asked.len()
            && let Ok((at, response)) =
                responses.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            if response.is_ok() {
                until = until.min(Instant::now() + OTHERS_WAIT);
            }
            results.push(asked[at].named(response));
        }
        results
    }

    /// Runs a future in the background until the client is dropped.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.runtime().spawn(future);
    }

    /// Runs a future in the background; returns a handle that aborts it.
    pub(crate) fn start(&self, future: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        self.runtime().spawn(future).abort_handle()
    }

    /// Returns gRPC clients of all masters that host a group, for tasks.
    pub(crate) fn clients(&self) -> Vec<MasterClient<Channel>> {
        self.masters().hosts().map(|master| master.client()).collect()
    }

    /// Returns the settings of an asynchronous link to a single master; `None` with several masters.
    pub(crate) fn link_config(&self) -> Option<LinkConfig> {
        let masters = self.masters();
        let master = masters.all.first().filter(|_| masters.single_master)?;
        Some(self.link_config_to(&master.frame_address))
    }

    fn link_config_to(&self, address: &str) -> LinkConfig {
        let ms = |timeout: Duration| timeout.as_millis() as u32; // validated
        LinkConfig {
            token: self.config.token,
            credentials: self.credentials.clone(),
            timeout_ms: ms(self.config.timeout),
            connect_timeout_ms: ms(self.config.connect_timeout),
            ..LinkConfig::new(address, self.caller)
        }
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("taken only by drop")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Masters {
    /// Returns the version of the map.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the masters that host a group, with their indices in the map.
    pub(crate) fn hosting(&self) -> impl Iterator<Item = (u16, &Arc<Master>)> {
        (0u16..).zip(&self.all).filter(|(_, master)| master.hosts)
    }

    /// Returns the groups of the master with this index.
    pub(crate) fn groups_of(&self, index: u16) -> impl Iterator<Item = u16> {
        self.routes.groups_of(index)
    }

    /// Returns whether every group has a master.
    pub(crate) fn is_complete(&self) -> bool {
        self.routes.is_complete()
    }

    /// Returns the number of groups of the cluster.
    pub(crate) fn group_count(&self) -> u32 {
        self.routes.group_count()
    }

    /// Returns the masters that host a group, in the order of the map.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = &Arc<Master>> {
        self.all.iter().filter(|master| master.hosts)
    }
}

/// Returns a channel that connects on first use. The error says why the address is invalid.
fn channel(
    runtime: &Runtime,
    address: &str,
    connect: Duration,
    credentials: Option<&Arc<Credentials>>,
) -> Result<Channel, String> {
    // The channel spawns tasks on the current runtime.
    let _entered = runtime.enter();
    channel::connect_lazy(address, connect.max(Duration::from_millis(1)), credentials)
        .map_err(|error| format!("address is not host:port ({error})"))
}

/// A gRPC call in the background, for a blocking thread.
struct RunningCall<R> {
    task: AbortHandle,
    response: Receiver<Result<R, Status>>,
}

impl<R: Send + 'static> RunningCall<R> {
    fn start<F>(
        runtime: &Runtime,
        channel: &Channel,
        call: impl FnOnce(MasterClient<Channel>) -> F,
    ) -> RunningCall<R>
    where
        F: Future<Output = Result<Response<R>, Status>> + Send + 'static,
    {
        let (sender, response) = std::sync::mpsc::sync_channel(1);
        let future = call(client(channel));
        let task = runtime.spawn(async move {
            // The receiver is gone if the caller timed out.
            let _ = sender.send(future.await.map(Response::into_inner));
        });
        RunningCall { task: task.abort_handle(), response }
    }

    /// Waits for the response. At the deadline, the call is cancelled.
    fn wait(self, deadline: Instant) -> Result<R, Status> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.response.recv_timeout(left).unwrap_or_else(|_| {
            self.task.abort();
            Err(Status::deadline_exceeded("timed out"))
        })
    }
}

/// Calls all masters at once, so that one that does not respond does not delay the others. The first one is called by
/// this thread, and each further one by a thread of its own. A part of more than [`KEYS_PER_CALL`] entries takes several
/// calls, one after the other. Returns the results of the calls to each master.
fn call_all<T: Send>(
    asked: &[(&Arc<Master>, Vec<usize>)],
    call: &(impl Fn(&Master, &[usize]) -> Result<T, StoreError> + Sync),
) -> Vec<Vec<Result<T, StoreError>>> {
    let call = |master: &Master, part: &[usize]| {
        let mut results: Vec<Result<T, StoreError>> = vec![];
        for part in part.chunks(KEYS_PER_CALL) {
            // Each further call to a master that does not respond would take as long.
            results.push(match results.last() {
                Some(Err(error)) if is_misrouted(error.code()) => Err(error.clone()),
                _ => call(master, part),
            });
        }
        results
    };
    if asked.len() < 2 || moontide_rt::mutation_enabled("silent-master") {
        return asked.iter().map(|(master, part)| call(master, part)).collect();
    }
    let (first, others) = (&asked[0], &asked[1..]);
    std::thread::scope(|scope| {
        let start = |(master, part): &'_ (&Arc<Master>, Vec<usize>)| {
            let (master, part) = (Arc::clone(master), part.clone());
            let call = &call;
            let run = move || call(&master, &part);
            std::thread::Builder::new().name("moontide-call".into()).spawn_scoped(scope, run)
        };
        let started: Vec<_> = others.iter().map(start).collect();
        let first = call(first.0, &first.1);
        let join =
            |(started, (master, part)): (std::io::Result<_>, &(&Arc<Master>, Vec<usize>))| match started {
                Ok(thread) => {
                    let thread: std::thread::ScopedJoinHandle<'_, Vec<Result<T, StoreError>>> = thread;
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                }
                Err(_) => call(master, part), // too many threads
            };
        std::iter::once(first).chain(started.into_iter().zip(others).map(join)).collect()
    })
}

fn client(channel: &Channel) -> MasterClient<Channel> {
    let max = REQUEST_BYTES_MAX;
    MasterClient::new(channel.clone()).max_decoding_message_size(2 * max).max_encoding_message_size(max)
}

/// Returns the tenant of a store: that of the certificate, if it is for a tenant, else that of the settings.
fn tenant_of(configured: &str, role: &Role) -> Result<String, StoreError> {
    match role {
        Role::Tenant(own) if configured == &**own || configured == Tenant::DEFAULT.as_str() => {
            Ok(own.to_string())
        }
        Role::Tenant(own) => {
            let reason = format!(
                "certificate is for tenant {own}, but tenant is {configured}; omit the setting `tenant`"
            );
            Err(StoreError::Credentials { reason: reason.into() })
        }
        _ => Ok(configured.to_owned()),
    }
}

fn context(config: &StoreConfig, caller: CallerId, deadline: Duration) -> v1::RequestContext {
    v1::RequestContext {
        tenant: config.tenant.clone(),
        caller: caller.0,
        timeout_ms: deadline.as_millis() as u32, // validated
        token: config.token.as_bytes().to_vec().into(),
        ..Default::default()
    }
}

/// Parses the identity of the cluster out of a response.
pub(crate) fn identity(message: &v1::GetClusterInfoResponse) -> Result<ClusterIdentity, StoreError> {
    let response = GetClusterInfoResponse::from_wire(message).map_err(StoreError::InvalidResponse)?;
    let generation = response.context().tenant_generation;
    let facts = response
        .into_result()
        .map_err(|context| StoreError::refused(context.code.unwrap_or(ErrorCode::Internal)))?;
    if ProtocolVersions::CURRENT.negotiate(facts.protocol).is_none() {
        return Err(StoreError::refused(ErrorCode::Unsupported));
    }
    let secret = facts.tenant_id_key.ok_or(StoreError::refused(ErrorCode::Unauthenticated))?;
    Ok(ClusterIdentity {
        cluster: facts.cluster,
        id_key: TenantIdKey::new(facts.id_key, secret.0),
        generation,
    })
}

/// Returns the message of a status with those of its sources.
/// Returns whether a master has refused the caller.
fn is_denied(status: &Status) -> bool {
    matches!(status.code(), Code::PermissionDenied | Code::Unauthenticated)
}

/// Returns the error of a call that has no response.
fn master_error(address: &str, status: &Status) -> StoreError {
    let reason = status_text(status).into();
    if is_denied(status) {
        StoreError::Denied { reason }
    } else {
        StoreError::NoMaster { address: address.to_owned(), reason }
    }
}

fn status_text(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    if text.is_empty() { format!("{:?}", status.code()) } else { text }
}

/// Repeats an idempotent call once if the connection was lost: the next attempt reconnects to a restarted master.
pub(crate) fn retry_if_disconnected<T>(
    mut call: impl FnMut() -> Result<T, LinkError>,
) -> Result<T, LinkError> {
    match call() {
        Err(LinkError::Lost { .. }) => call(),
        response => response,
    }
}

/// Returns a random number.
pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    // Never short for 8 bytes. If randomness is unavailable (chroot), zero is acceptable.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}

/// Returns a cheap number that differs from call to call, for spreading load. Not random in any stronger sense.
pub(crate) fn next_counter() -> u64 {
    thread_local!(static NEXT: RefCell<SplitMix64> = RefCell::new(SplitMix64::new(random_u64())));
    NEXT.with(|next| next.borrow_mut().next_u64())
}
