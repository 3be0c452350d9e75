//! [`Node`]: startup and shutdown of a node. It fetches the cluster parameters, allocates the memory, binds the
//! sockets, starts the threads, and stops them in order.
//!
//! | thread | task |
//! |---|---|
//! | `moontide-gate` | heartbeat; opens and closes the local index |
//! | `moontide-exec` | executes commands, reclaims |
//! | disk threads | see `disk` |
//! | `moontide-node` | sessions with masters, admin HTTP server |
//! | transfer threads | one per connection, see `moontide_transfer` |
//!
//! Startup order: first a master, because the number of groups determines the segments; then memory and sockets, so
//! that everything that is registered can be reached.

use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use moontide_auth::{Credentials, CredentialsError, Identity, Role};
use moontide_proto::{CapabilityKey, v1};
use moontide_rt::SplitMix64;
use moontide_rt::time::Instant;
use moontide_settings::InvalidConfig;
use moontide_tasks::AdminGuard;
use moontide_transfer::shm::{self, ShmServer, ShmServerConfig, ShmServerError};
use moontide_transfer::tcp::{TcpConfig, TcpEngine, TcpServer, TcpServerConfig, TcpServerError};
use moontide_transfer::{EngineKind, Engines, Owner};
use moontide_types::limits::UNIT_BYTES;
use moontide_types::{Generation, NodeId};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tracing::{debug, error, info, warn};

use crate::admin::{self, AdminState};
use crate::config::{DiskConfig, MASTER_START_TIMEOUT, NodeConfig};
use crate::core::{CoreConfig, CoreError, NodeCore, open_disk};
use crate::disk::{DiskDirectories, DiskError};
use crate::flush::FlushCanceller;
use crate::index_gate::HEARTBEAT_TIMEOUT;
use crate::logic::segment_plan::{PlanArgs, PlanError, SegmentPlan, plan};
use crate::logic::timing::MASTER_BACKOFF;
use crate::memory::{ExternalMemory, MemoryError};
use crate::metrics::Metrics;
use crate::prefault::Prefault;
use crate::session::{NodeDescriptor, learn_cluster};

/// Maximum number of shm streams: one per client process, with a margin.
const STREAMS_MAX: usize = 4096;

/// Time without a move after which the drain before a stop ends: the other nodes are full, or there are none.
const DRAIN_STALL_TIMEOUT: Duration = Duration::from_secs(15);

/// Interval at which a shutdown checks whether transfers have ended.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Interval at which a shutdown checks whether all objects are on disk.
const FLUSH_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Interval at which a shutdown logs how many objects are left to write.
const FLUSH_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout for one master to return the cluster parameters, before the next one is asked.
const CLUSTER_INFO_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for the sessions to stop: one call to unmount, with a margin.
pub(crate) const SESSIONS_STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Failure to start a node.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// The certificate files cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The certificate is not that of this node.
    #[error("certificate {} is that of {found}, not of {expected}; {hint}", path.display())]
    OtherNode {
        /// Path of the certificate.
        path: PathBuf,
        /// Identity in the certificate.
        found: Identity,
        /// What the certificate should be of.
        expected: String,
        /// What to do.
        hint: &'static str,
    },
    /// No master is reachable.
    #[error(
        "no master at {master} within {:.1} s: {reason}; start it first (`moontide master`), or set `master` to \
         its gRPC address",
        waited.as_secs_f32()
    )]
    Master {
        /// Configured addresses.
        master: String,
        /// Time waited.
        waited: Duration,
        /// Error of the last attempt.
        reason: String,
    },
    /// A master is reachable, but has not mounted the segments.
    #[error("master at {master} has not mounted the segments within {:.1} s: {reason}", waited.as_secs_f32())]
    NotMounted {
        /// Configured addresses.
        master: String,
        /// Time waited.
        waited: Duration,
        /// Error of the last attempt.
        reason: String,
    },
    /// The memory cannot be divided into segments.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The memory cannot be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The disk tier cannot be opened.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The TCP server cannot start.
    #[error("cannot serve transfers over TCP: {0}; set `listen` to an address of this host with a free port")]
    Serve(#[from] TcpServerError),
    /// The directory of the Unix socket is not usable.
    #[error(
        "directory {path} of the Unix socket: {reason}; set `shm_socket` to a path that this user may write"
    )]
    SocketDir {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system, or the violated rule.
        reason: String,
    },
    /// The shm server cannot start.
    #[error("cannot serve shm clients: {0}; set `shm_socket` to another path, or `shm` to false")]
    Shm(#[from] ShmServerError),
    /// The admin HTTP server cannot start.
    #[error("cannot serve the admin endpoints on {address}: {source}; set `admin_listen` to another address")]
    Admin {
        /// Configured address.
        address: SocketAddr,
        /// I/O error of the bind.
        source: io::Error,
    },
    /// The system provides no threads, event loop or random numbers.
    #[error("cannot start: {0}; raise the limits of processes and open files")]
    System(#[from] io::Error),
}

impl From<CoreError> for StartError {
    fn from(error: CoreError) -> StartError {
        match error {
            CoreError::Memory(error) => StartError::Memory(error),
            CoreError::Disk(error) => StartError::Disk(error),
            CoreError::Threads(error) => StartError::System(error),
        }
    }
}

/// Addresses of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Bound TCP addresses of the data plane.
    pub tcp: Vec<SocketAddr>,
    /// Unix socket for shm clients.
    pub shm_socket: Option<PathBuf>,
    /// Address of the admin HTTP server.
    pub admin: Option<SocketAddr>,
}

/// A running node. Dropping it stops it at once; [`Node::shutdown`] first waits for writes to disk and for transfers.
pub struct Node {
    id: NodeId,
    segments: SegmentPlan,
    addresses: Addresses,
    is_tls: bool,
    drain: Duration,
    drain_on_stop: Duration,
    flush_timeout: Duration,
    core: NodeCore,
    stop_sessions: watch::Sender<bool>,
    stop_admin: watch::Sender<bool>,
    sessions: Option<tokio::task::JoinHandle<()>>,
    admin: Option<tokio::task::JoinHandle<()>>,
    tcp_server: Option<TcpServer>,
    shm_server: Option<ShmServer>,
    runtime: Option<Runtime>,
    /// Ends with the node.
    prefault: Option<Prefault>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("id", &self.id)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Starts a node. When this returns, the masters have mounted its segments, and it serves.
    pub fn start(config: NodeConfig) -> Result<Node, StartError> {
        Node::start_with(config, None)
    }

    /// Like [`Node::start`], with the segments in memory that other processes map, too.
    pub fn start_with_memory(config: NodeConfig, memory: ExternalMemory) -> Result<Node, StartError> {
        Node::start_with(config, Some(memory))
    }

    fn start_with(config: NodeConfig, external: Option<ExternalMemory>) -> Result<Node, StartError> {
        config.validate()?;
        let boot = random_u64()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("moontide-node")
            .enable_all()
            .build()?;
        let started = Instant::now();
        let seeds = config.masters();
        let credentials = load_credentials(&config)?;
        let certified = credentials.as_ref().map(|(_, node)| *node);
        let credentials = credentials.map(|(credentials, _)| credentials);
        let cluster = runtime.block_on(fetch_cluster_info(&seeds, boot, credentials.as_ref()))?;
        let configured = certified.or(config.node_id);
        let directories = match &config.disk {
            Some(disk) => {
                let DiskConfig { dir, backend, .. } = disk;
                let opened = DiskDirectories::open(dir, cluster.number, *backend, configured, random_u64);
                Some(opened.map_err(DiskError::from)?)
            }
            None => None,
        };
        let id = match (&directories, configured) {
            (Some(directories), _) => directories.node,
            (None, Some(node)) => node,
            (None, None) => NodeId(random_u64()?.max(1)),
        };
        let groups = cluster.groups;
        let plan = plan(PlanArgs {
            memory_bytes: config.memory_bytes,
            segment_bytes_max: config.segment_bytes_max,
            slot_bytes: config.bytes_per_slot,
            groups: groups.get(),
            page_bytes: config.huge_pages.page_bytes(),
        })?;
        let transfer = moontide_transfer::Metrics::new();
        // The boot id is for masters only: a process that knows it can take the node's session away.
        let tcp_config =
            TcpConfig { caller: random_u64()?, credentials: credentials.clone(), ..TcpConfig::default() };
        let tcp_engine = TcpEngine::new(tcp_config, Arc::clone(&transfer));
        let core_config = CoreConfig {
            node: id,
            groups,
            generation: generation(),
            plan,
            huge_pages: config.huge_pages,
            external: external.as_ref(),
            disk: config.disk.clone(),
            self_fence_timeout: config.self_fence_timeout,
            copy_bytes_per_s: config.copy_bytes_per_s,
            engines: Engines::new(vec![Arc::new(tcp_engine)], Arc::clone(&transfer)),
            capability_key: CapabilityKey::new(random()?),
        };
        let mark_dirs = directories.as_ref().map_or(vec![], |found| found.usable().to_vec());
        let core = NodeCore::start(core_config, &mark_dirs, open_disk(directories))?;
        // Opening the disk takes time; it does not count towards the wait for the master.
        let started = started.max(Instant::now() - MASTER_START_TIMEOUT / 2);
        let owner = Arc::clone(&core.owner) as Arc<dyn Owner>;
        let (stop_sessions, sessions_stopped) = watch::channel(false);
        let (stop_admin, admin_stopped) = watch::channel(false);
        // From here on, dropping `node` stops everything that was started.
        let mut node = Node {
            id,
            segments: plan,
            addresses: Addresses::default(),
            is_tls: credentials.is_some(),
            drain: config.drain_timeout,
            drain_on_stop: config.drain_on_stop,
            flush_timeout: config.disk.as_ref().map_or(Duration::ZERO, |disk| disk.flush_timeout),
            core,
            stop_sessions,
            stop_admin,
            sessions: None,
            admin: None,
            tcp_server: None,
            shm_server: None,
            runtime: Some(runtime),
            prefault: None,
        };
        if config.prefault {
            let started = Prefault::start(Arc::clone(&node.core.memory));
            node.prefault = Some(started?);
        }

        let defaults = TcpServerConfig::default();
        let connections_max = connections_max(defaults.connections_max);
        let server_config = TcpServerConfig {
            listen: config.listen.clone(),
            connections_max,
            connections_per_peer_max: connections_max.div_ceil(2),
            credentials: credentials.clone(),
            ..defaults
        };
        let server = TcpServer::start(server_config, Arc::clone(&owner), Arc::clone(&transfer))?;
        node.addresses.tcp = server.addresses().to_vec();
        node.tcp_server = Some(server);
        if config.shm {
            let socket = socket_path(&config, id)?;
            let shm_config = ShmServerConfig {
                socket: socket.clone(),
                extra_uids: Vec::new(),
                stale_after: HEARTBEAT_TIMEOUT,
                streams_max: STREAMS_MAX,
            };
            // SAFETY: the listener accepts only processes of this user, which could change the memory of this process
            // by other means as well; enabling `shm` asserts that they follow the protocol.
            let shm_server =
                unsafe { ShmServer::start(shm_config, Arc::clone(&owner), Arc::clone(&transfer)) }?;
            node.addresses.shm_socket = Some(socket);
            node.shm_server = Some(shm_server);
        }
        let metrics = Metrics {
            counters: Arc::clone(&node.core.counters),
            transfer,
            memory: Arc::clone(&node.core.memory),
            disk: node.core.disk.clone(),
            index_gate: Arc::clone(&node.core.index_gate),
            status: Arc::clone(&node.core.status),
        };
        if let Some(address) = config.admin_listen {
            let state = AdminState { node: id, master: config.master.clone(), metrics };
            let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            let names = config.admin_hosts.iter().chain([&host, &config.host]);
            node.serve_admin(address, state, AdminGuard::new(names), credentials.clone(), admin_stopped)?;
        }

        let descriptor = NodeDescriptor {
            node: id,
            boot,
            addresses: advertised(&config, &node.addresses),
            topology: v1::Topology { host: config.host, rack: config.rack, zone: config.zone },
            cluster: cluster.number,
            groups,
            credentials: credentials.clone(),
        };
        let manager = node.core.sessions(descriptor, seeds, sessions_stopped);
        node.sessions = node.runtime.as_ref().map(|runtime| runtime.spawn(manager.run()));
        let left = MASTER_START_TIMEOUT.saturating_sub(started.elapsed()).max(Duration::from_secs(1));
        if !node.core.status.wait_until_mounted(left) {
            let reason = node.core.status.get().last_error.unwrap_or_else(|| "no response yet".into());
            node.drain = Duration::ZERO;
            return Err(StartError::NotMounted { master: config.master, waited: started.elapsed(), reason });
        }
        let Addresses { tcp, shm_socket, admin } = &node.addresses;
        info!(node = %id, ?tcp, shm = ?shm_socket, ?admin, "node serves");
        Ok(node)
    }

    fn serve_admin(
        &mut self,
        address: SocketAddr,
        state: AdminState,
        guard: AdminGuard,
        credentials: Option<Arc<Credentials>>,
        stopped: watch::Receiver<bool>,
    ) -> Result<(), StartError> {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let failed = |source| StartError::Admin { address, source };
        let listener = runtime.block_on(TcpListener::bind(address)).map_err(failed)?;
        self.addresses.admin = Some(listener.local_addr().map_err(failed)?);
        self.admin = Some(runtime.spawn(async move {
            if let Err(error) = admin::serve(listener, state, guard, credentials, stopped).await {
                error!(%error, "admin HTTP server failed");
            }
        }));
        Ok(())
    }

    /// Returns the node id.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Returns the bound addresses, with the actual port for port 0.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Returns the URL of the admin endpoints, if they are enabled.
    pub fn admin_url(&self) -> Option<String> {
        let scheme = if self.is_tls { "https" } else { "http" };
        self.addresses.admin.map(|address| format!("{scheme}://{address}"))
    }

    /// Returns the bytes of memory in use, the bytes that are draining, and the total.
    pub fn usage(&self) -> (u64, u64, u64) {
        let usage = self.core.owner.memory().usage();
        let bytes = |units: u64| units * UNIT_BYTES;
        (bytes(usage.live_units + usage.writing_units), bytes(usage.draining_units), bytes(usage.units))
    }

    /// Returns the size and number of segments.
    pub fn segments(&self) -> SegmentPlan {
        self.segments
    }

    /// Waits until the masters have mounted all segments and acknowledged their reports. Returns `false` after
    /// `timeout`.
    pub fn wait_until_mounted(&self, timeout: Duration) -> bool {
        self.core.status.wait_until_mounted(timeout)
    }

    /// Returns the owner as the transfer servers use it; for tests that call it directly.
    #[cfg(any(test, feature = "testing"))]
    pub fn owner(&self) -> Arc<dyn Owner> {
        Arc::clone(&self.core.owner) as Arc<dyn Owner>
    }

    /// Returns a handle that ends the first part of [`Node::shutdown`] early.
    pub fn flush_canceller(&self) -> FlushCanceller {
        FlushCanceller(Arc::clone(&self.core.flush))
    }

    /// Stops the node. With [`NodeConfig::drain_on_stop`], its objects first move to other nodes. A node with a disk then
    /// refuses new writes, and waits at most [`DiskConfig::flush_timeout`] until its objects are on the disk. Then the
    /// node refuses reads, unmounts the segments at the masters, and waits at most [`NodeConfig::drain_timeout`] for
    /// transfers in flight.
    ///
    /// [`DiskConfig::flush_timeout`]: crate::DiskConfig::flush_timeout
    pub fn shutdown(mut self) {
        let drain = self.drain;
        self.move_to_other_nodes();
        self.write_to_disk();
        self.core.disk.iter().for_each(|disk| disk.write_memory_list());
        self.stop(drain);
    }

    /// Lets the masters move all objects in memory to other nodes, and waits for them.
    fn move_to_other_nodes(&self) {
        if self.drain_on_stop.is_zero() {
            return;
        }
        self.core.drain.set(true);
        let started = Instant::now();
        let (mut logged, mut moved, mut left) = (started, started, u64::MAX);
        while started.elapsed() < self.drain_on_stop && !self.core.flush.is_cancelled() {
            let now = self.usage().0;
            if now < left {
                (left, moved) = (now, Instant::now());
            }
            if left == 0 || moved.elapsed() >= DRAIN_STALL_TIMEOUT {
                break;
            }
            if logged.elapsed() >= FLUSH_LOG_INTERVAL {
                logged = Instant::now();
                info!(bytes_left = left, "moving objects to other nodes before the stop");
            }
            moontide_rt::thread::sleep(FLUSH_POLL_INTERVAL);
        }
        let seconds = started.elapsed().as_secs_f32();
        match self.usage().0 {
            0 => info!(seconds, "all objects moved to other nodes"),
            bytes_left => warn!(
                bytes_left,
                seconds, "not all objects moved to other nodes: no space there, or no other node"
            ),
        }
    }

    /// Lets the masters command the writes of all objects that are only in memory, and waits for them.
    fn write_to_disk(&self) {
        let (Some(disk), false) = (&self.core.disk, self.flush_timeout.is_zero()) else { return };
        self.core.owner.close_writes();
        let (started, before) = (Instant::now(), disk.written());
        let since_start = || {
            let now = disk.written();
            (now.0 - before.0, now.1 - before.1)
        };
        disk.begin_flush();
        self.core.flush.begin();
        let mut logged = started;
        while !(self.core.flush.is_over(&self.core.router.masters()) && disk.is_idle())
            && started.elapsed() < self.flush_timeout
            && !self.core.flush.is_cancelled()
        {
            moontide_rt::thread::sleep(FLUSH_POLL_INTERVAL);
            if logged.elapsed() >= FLUSH_LOG_INTERVAL {
                logged = Instant::now();
                let ((records, bytes), left) =
                    (since_start(), self.core.flush.left(&self.core.router.masters()));
                info!(
                    records,
                    bytes,
                    objects_left = left.objects,
                    bytes_left = left.bytes,
                    "writing memory to disk before the stop"
                );
            }
        }
        let ((records, bytes), left) = (since_start(), self.core.flush.left(&self.core.router.masters()));
        let seconds = started.elapsed().as_secs_f32();
        let not_written = left.objects.saturating_add(left.refused);
        if not_written == 0 && self.core.flush.is_complete(&self.core.router.masters()) {
            info!(records, bytes, seconds, "memory written to disk");
        } else {
            warn!(
                records,
                bytes, not_written, seconds, "memory not completely written to disk; other objects are lost"
            );
        }
    }

    fn stop(&mut self, drain: Duration) {
        let Some(runtime) = self.runtime.take() else { return };
        info!(node = %self.id, "node stopping");
        let started = Instant::now();
        self.core.close();
        self.stop_sessions.send_replace(true);
        if let Some(sessions) = self.sessions.take() {
            let ended =
                runtime.block_on(async { tokio::time::timeout(SESSIONS_STOP_TIMEOUT, sessions).await });
            if ended.is_err() {
                warn!("sessions did not stop in time");
            }
        }
        self.core.stop_offloads();
        while started.elapsed() < drain && self.is_in_use() {
            moontide_rt::thread::sleep(DRAIN_POLL_INTERVAL);
        }
        if self.is_in_use() {
            warn!(
                drain_ms = drain.as_millis() as u64,
                "shutdown with transfers or zero-copy readers still active"
            );
        }
        self.tcp_server = None;
        if let Some(shm_server) = self.shm_server.take() {
            let socket = shm_server.socket().to_owned();
            drop(shm_server);
            // The file may already be removed.
            let _ = std::fs::remove_file(socket);
        }
        self.core.stop();
        self.stop_admin.send_replace(true);
        if let Some(admin) = self.admin.take() {
            // Do not wait for connections that their peers keep open.
            let _ = runtime.block_on(async { tokio::time::timeout(Duration::from_millis(100), admin).await });
        }
        runtime.shutdown_timeout(Duration::from_secs(1));
        debug!(node = %self.id, took_ms = started.elapsed().as_millis() as u64, "node stopped");
    }

    /// Whether any peer reads, writes or calls.
    fn is_in_use(&self) -> bool {
        self.core.owner.calls() > 0 || !self.core.owner.heap().ledgers().pins().is_empty()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// Loads the certificate, if there is one, and returns the id of the node that it names.
fn load_credentials(config: &NodeConfig) -> Result<Option<(Arc<Credentials>, NodeId)>, StartError> {
    let files = config.credential_files().expect("validate() rejects incomplete settings");
    let Some(files) = files else { return Ok(None) };
    let path = files.cert.clone();
    let credentials = Credentials::load(files)?;
    let found = credentials.info().identity;
    let other = |found, expected, hint| StartError::OtherNode { path, found, expected, hint };
    match (found.role(), config.node_id) {
        (&Role::Node(id), None) => Ok(Some((credentials, id))),
        (&Role::Node(id), Some(expected)) if id == expected => Ok(Some((credentials, id))),
        (Role::Node(_), Some(expected)) => {
            Err(other(found, format!("node {expected}"), "omit node_id: the certificate names it"))
        }
        _ => Err(other(found, "a node".into(), "create one with `moontide certs issue DIRECTORY node`")),
    }
}

/// Returns how many connections of peers there may be: at most half of the files that this process may open. With too few
/// of them left, it could neither accept local processes nor open files of its disk.
fn connections_max(most: usize) -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let allowed = usize::try_from(files / 2).unwrap_or(usize::MAX).max(2);
    if allowed < most {
        info!(
            files,
            connections = allowed,
            wanted = most,
            "few open files allowed; raise the limit (ulimit -n)"
        );
    }
    most.min(allowed)
}

/// Asks the masters in turn for the cluster parameters, until one responds or the start times out.
async fn fetch_cluster_info(
    masters: &[String],
    boot: u64,
    credentials: Option<&Arc<Credentials>>,
) -> Result<crate::session::ClusterParams, StartError> {
    let started = Instant::now();
    let left = || MASTER_START_TIMEOUT.saturating_sub(started.elapsed());
    let (mut backoff, mut random) = (MASTER_BACKOFF, SplitMix64::new(boot));
    let mut reason = "no response".to_owned();
    while !left().is_zero() {
        for master in masters {
            let info = learn_cluster(master, boot, credentials);
            match tokio::time::timeout(left().min(CLUSTER_INFO_TIMEOUT), info).await {
                Ok(Ok(cluster)) => return Ok(cluster),
                Ok(Err(failure)) => reason = failure.to_string(),
                Err(_) => {}
            }
            debug!(master, reason, "master not reached");
        }
        let pause = backoff.pause(Duration::ZERO, random.next_u64());
        tokio::time::sleep(pause.min(left())).await;
    }
    Err(StartError::Master { master: masters.join(","), waited: started.elapsed(), reason })
}

/// Returns the addresses to register at the masters.
fn advertised(config: &NodeConfig, bound: &Addresses) -> Vec<v1::Address> {
    let address = |engine: EngineKind, address| v1::Address { engine: engine.name().into(), address };
    let tcp: Vec<String> = if config.advertise.is_empty() {
        bound.tcp.iter().map(ToString::to_string).collect()
    } else {
        config.advertise.clone()
    };
    let socket = bound.shm_socket.as_deref().and_then(shm::address);
    let local = socket.map(|socket| address(EngineKind::Shm, socket));
    tcp.into_iter().map(|tcp| address(EngineKind::Tcp, tcp)).chain(local).collect()
}

/// Returns the path of the shm socket. Creates the default directory.
fn socket_path(config: &NodeConfig, node: NodeId) -> Result<PathBuf, StartError> {
    if let Some(socket) = &config.shm_socket {
        return Ok(socket.clone());
    }
    let name = format!("moontide-{node}.sock");
    if let Some(dir) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|f| f.is_dir()) {
        remove_stale_sockets(&dir);
        return Ok(dir.join(name));
    }
    let uid = rustix::process::getuid().as_raw();
    let dir = PathBuf::from(format!("/tmp/moontide-{uid}"));
    make_private(&dir, uid)?;
    remove_stale_sockets(&dir);
    Ok(dir.join(name))
}

/// Removes the sockets of nodes that were killed: connections to them are refused.
fn remove_stale_sockets(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_socket =
            name.to_str().is_some_and(|name| name.starts_with("moontide-") && name.ends_with(".sock"));
        // A listening node refuses this socket type with another error (EPROTOTYPE); a stale socket refuses the
        // connection.
        let is_stale = || {
            let tried = std::os::unix::net::UnixStream::connect(entry.path());
            tried.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        };
        if is_socket && is_stale() {
            debug!(socket = ?entry.path(), "removing the stale socket of an exited node");
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Creates a directory that only this user can access: in `/tmp`, another user could create one first and listen there.
fn make_private(dir: &Path, uid: u32) -> Result<(), StartError> {
    let failed = |reason: String| StartError::SocketDir { path: dir.to_owned(), reason };
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = std::fs::symlink_metadata(dir).map_err(|error| failed(error.to_string()))?;
            let ours = found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0;
            if ours { Ok(()) } else { Err(failed("not owned by this user with mode 0700".into())) }
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Returns a number that grows with every start, so that grants of an earlier start with the same node id are refused.
fn generation() -> Generation {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Generation(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

fn random_u64() -> io::Result<u64> {
    random().map(u64::from_le_bytes)
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // Up to 256 bytes are returned in one call.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

    #[test]
    fn stale_socket_cleanup_keeps_live_and_foreign_sockets() {
        let dir = std::env::temp_dir().join(format!("moontide-sweep-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let listener = |name: &str| {
            let path = dir.join(name);
            let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            listen(&socket, 1).unwrap();
            (path, socket)
        };
        let (live, _listening) = listener("moontide-0000000000000001.sock");
        let (stale, gone) = listener("moontide-0000000000000002.sock");
        let (foreign, other) = listener("another-0000000000000002.sock");
        drop((gone, other));
        remove_stale_sockets(&dir);
        assert_eq!([live.exists(), stale.exists(), foreign.exists()], [true, false, true]);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
