//! [`Server`]: a running master. Binds the three listeners, loads the identity of the cluster, starts the threads, and
//! stops them in order.
//!
//! | thread | task |
//! |---|---|
//! | `frame-0` … | connections of the frame server |
//! | `servers`, `servers-worker` | gRPC and HTTP, and accepting connections of the frame server |
//! | `ticker` | periodic work: expiry, eviction, jobs |
//!
//! Order at the start: listeners first, because a port in use is the most frequent error and must not use up a term;
//! then the identity, whose term is durable before the master serves.

use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_auth::{Credentials, CredentialsError, Identity};
use moontide_proto::CapabilitySecret;
use moontide_proto::convert::IdKeySecret;
use moontide_settings::InvalidConfig;
use moontide_tasks::AdminGuard;
use moontide_types::limits::GROUPS_DEFAULT;
use moontide_types::{IdKey, SystemClock, Term};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use crate::config::{MasterConfig, ValidConfig};
use crate::election::{self, ClusterState, Elector, MasterAddresses, Proposal, Registry, RegistryError};
use crate::frame_server::{FrameServer, FrameServerConfig};
use crate::grpc_server::{self, GrpcServerConfig};
use crate::identity::{IdentityError, LocalIdentity, random_u64};
use crate::metrics::{Metrics, ServerCounters, ServerMetrics};
use crate::service::{Role, Service, ServiceConfig, SessionSecret};
use crate::{admin, identity};

/// Shortest and longest interval of the ticker, independent of the result of `Service::tick`.
const TICK_MIN: Duration = Duration::from_millis(1);
const TICK_MAX: Duration = Duration::from_millis(100);

/// A tick that takes longer delays callers and is logged.
const TICK_SLOW: Duration = Duration::from_millis(100);

/// Time for which a starting master waits for its registry, and the interval of its attempts.
const REGISTRY_WAIT: Duration = Duration::from_secs(30);
const REGISTRY_PAUSE: Duration = Duration::from_millis(500);

/// Maximum number of pending changes of the cluster state; operators make few.
const PENDING_PROPOSALS_MAX: usize = 16;

/// Time for calls in flight at shutdown.
const GRACE: Duration = Duration::from_secs(5);

/// Error of the start of a master.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// The certificate files cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The certificate is not that of a master.
    #[error("certificate {} is that of {found}, not of a master; create one with `moontide certs issue DIRECTORY master`", path.display())]
    NoMaster {
        /// Path of the certificate.
        path: PathBuf,
        /// Identity in the certificate.
        found: Identity,
    },
    /// A listener cannot be bound.
    #[error("cannot serve {protocol} on {address}: {source}; {}", bind_hint(source, setting))]
    Bind {
        /// Protocol of the server.
        protocol: &'static str,
        /// Address of the listener.
        address: SocketAddr,
        /// Setting with the address.
        setting: &'static str,
        /// I/O error of the bind.
        source: io::Error,
    },
    /// The identity of the cluster cannot be loaded or created.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The registry is unreachable, or refused a request.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The number of groups differs from the registry; it is fixed for a cluster.
    #[error("cluster has {found} groups, but {configured} are configured; set groups to {found}")]
    Groups {
        /// Number of groups in the registry.
        found: NonZeroU16,
        /// Configured number of groups.
        configured: NonZeroU16,
    },
    /// A thread or an event loop cannot be created.
    #[error("cannot start threads: {0}; raise the limits of processes and open files")]
    Threads(#[source] io::Error),
}

/// Returns a hint for a failed bind.
fn bind_hint(error: &io::Error, setting: &str) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("another process uses this port: stop it, or set {setting} to another port")
        }
        io::ErrorKind::AddrNotAvailable => {
            format!("this host does not have this address: set {setting} to one of its addresses")
        }
        io::ErrorKind::PermissionDenied => {
            format!("ports below 1024 need privileges: set {setting} to a higher port")
        }
        _ => format!("check {setting}"),
    }
}

/// Addresses of a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Address of the gRPC server.
    pub grpc: SocketAddr,
    /// Address of the frame server.
    pub frame: SocketAddr,
    /// Address of the admin endpoints (HTTP).
    pub admin: SocketAddr,
}

/// A running master. Drop stops it as [`Server::shutdown`] does.
pub struct Server {
    service: Arc<Service>,
    addresses: Addresses,
    term: Term,
    stop: watch::Sender<bool>,
    /// Elector of a master with a registry; stopped before the servers.
    election: Option<RunningElection>,
    stop_ticker: Sender<()>,
    threads: Vec<JoinHandle<()>>,
    /// Holds the lock of the data directory.
    _identity: Option<Arc<Mutex<LocalIdentity>>>,
}

/// A running elector.
struct RunningElection {
    stop: watch::Sender<bool>,
    ended: Mutex<Receiver<()>>,
}

/// Kind of a master.
enum Membership {
    /// Single master, with its own identity.
    Single(LocalIdentity),
    /// One of several masters, a member of a registry.
    Member(Box<Elector>, election::ClusterIdentity),
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("addresses", &self.addresses)
            .field("term", &self.term)
            .finish_non_exhaustive()
    }
}

/// Bound listeners.
struct Listeners {
    grpc: TcpListener,
    frame: TcpListener,
    admin: TcpListener,
}

impl Server {
    /// Starts a master. When this returns, it serves; with a registry it hosts groups as soon as it owns some.
    pub fn start(config: MasterConfig) -> Result<Server, StartError> {
        Server::start_at(config, None)
    }

    /// As [`Server::start`], with this registry instead of the configured one, if given.
    pub fn start_at(config: MasterConfig, registry: Option<Arc<dyn Registry>>) -> Result<Server, StartError> {
        let config = config.validate()?;
        let credentials = load_credentials(&config)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .thread_name("servers-worker")
            .enable_all()
            .build()
            .map_err(StartError::Threads)?;
        let (listeners, addresses) = runtime.block_on(bind_all(&config))?;
        let registry = match registry {
            Some(registry) => Some(registry),
            // The connection may need a runtime.
            None => runtime.block_on(async { config.registry().connect() })?,
        };
        let membership = match registry {
            Some(registry) => runtime.block_on(join(&config, registry, addresses))?,
            None => Membership::Single(LocalIdentity::load_or_create(
                config.data_dir.as_deref(),
                config.groups(),
            )?),
        };
        if config.data_dir.is_some() && matches!(membership, Membership::Member(..)) {
            warn!("data_dir is ignored: the registry stores the identity of the cluster");
        }
        if config.data_dir.is_none() && matches!(membership, Membership::Single(_)) {
            warn!("data_dir is not set: a restart creates a new cluster, and nodes discard their records");
        }
        let service_config = service_config(&config, &membership, addresses, credentials)?;
        let groups = service_config.groups;
        let service = Service::new(service_config, Arc::new(SystemClock));
        let (election, identity) = match membership {
            Membership::Single(identity) => {
                let identity = Arc::new(Mutex::new(identity));
                let (proposals, proposed) = mpsc::channel(PENDING_PROPOSALS_MAX);
                service.set_proposals(proposals);
                runtime.spawn(store_tenants(Arc::clone(&service), Arc::clone(&identity), proposed));
                (None, Some(identity))
            }
            Membership::Member(elector, _) => (Some(run(*elector, &runtime, &service)), None),
        };
        let (stop, stopped) = watch::channel(false);
        let frame_config = FrameServerConfig {
            threads: config.frame_threads(),
            connections_max: config.connections_max,
            inflight_per_connection_max: config.inflight_per_connection_max,
            caller: random_u64()?,
        };
        let (frame_server, mut threads) =
            FrameServer::start(frame_config, Arc::clone(&service), stopped.clone())
                .map_err(StartError::Threads)?;
        let (stop_ticker, ticker_stopped) = channel();
        let ticking = Arc::clone(&service);
        let stored = identity.clone();
        threads.push(spawn("ticker", move || tick(&ticking, stored.as_deref(), &ticker_stopped))?);
        let tasks = ServerTasks {
            config: config.clone(),
            listeners,
            service: Arc::clone(&service),
            frame_server,
            stopped,
        };
        threads.push(spawn("servers", move || tasks.serve(runtime))?);
        let term = service.term();
        info!(
            grpc = %addresses.grpc,
            frame = %addresses.frame,
            admin = %addresses.admin,
            term = term.get(),
            groups,
            frame_threads = config.frame_threads(),
            "master started"
        );
        Ok(Server { service, addresses, term, stop, election, stop_ticker, threads, _identity: identity })
    }

    /// Returns the bound addresses, with the actual ports instead of port 0.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the URL of the admin endpoints.
    pub fn admin_url(&self) -> String {
        let scheme = if self.service.credentials().is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.addresses.admin)
    }

    /// Returns the id of this master; for a single master it is also the term of all groups.
    pub fn term(&self) -> Term {
        self.term
    }

    /// Returns the handler of all calls.
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Stops the master: it accepts no new connections, finishes calls in flight, then stops the threads. Takes a few
    /// seconds at most; with a registry up to 10 s more for handoffs.
    pub fn shutdown(self) {
        // Drop does the work.
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        info!("master stopping");
        if let Some(election) = self.election.take() {
            // Groups are handed off while the servers still run: the new owner and clients may send requests.
            election.stop.send_replace(true);
            let _ = election.ended.lock().recv_timeout(2 * GRACE);
        }
        self.stop.send_replace(true);
        // A ticker that has exited already is reported by `join` below.
        let _ = self.stop_ticker.send(());
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                error!(thread = name, "thread of the master panicked");
            }
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(StartError::Threads)
}

async fn bind_all(config: &ValidConfig) -> Result<(Listeners, Addresses), StartError> {
    let (grpc, grpc_address) = bind("gRPC", config.grpc_listen, "grpc_listen").await?;
    let (frame, frame_address) = bind("the frame protocol", config.frame_listen, "frame_listen").await?;
    let (admin, admin_address) = bind("HTTP", config.admin_listen, "admin_listen").await?;
    let addresses = Addresses { grpc: grpc_address, frame: frame_address, admin: admin_address };
    Ok((Listeners { grpc, frame, admin }, addresses))
}

async fn bind(
    protocol: &'static str,
    address: SocketAddr,
    setting: &'static str,
) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Bind { protocol, address, setting, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Returns the addresses at which other processes reach this master.
fn advertised(config: &ValidConfig, addresses: Addresses) -> MasterAddresses {
    let of = |advertise: &Option<String>, bound: SocketAddr| {
        advertise.clone().unwrap_or_else(|| bound.to_string())
    };
    MasterAddresses {
        grpc: of(&config.grpc_advertise, addresses.grpc),
        frame: of(&config.frame_advertise, addresses.frame),
    }
}

/// Joins a registry. Waits up to [`REGISTRY_WAIT`] for a registry that is unreachable.
async fn join(
    config: &ValidConfig,
    registry: Arc<dyn Registry>,
    addresses: Addresses,
) -> Result<Membership, StartError> {
    let groups = config.groups().unwrap_or(NonZeroU16::new(GROUPS_DEFAULT).expect("a positive default"));
    let new_identity = identity::new_cluster_identity(groups)?;
    let lease = Duration::from_millis(config.registry_lease_ms.into());
    let deadline = Instant::now() + REGISTRY_WAIT;
    loop {
        let joined = async {
            let identity = registry.identity(&new_identity).await?;
            if let Some(configured) = config.groups().filter(|groups| *groups != identity.groups) {
                return Err(StartError::Groups { found: identity.groups, configured });
            }
            let first = ClusterState::new(identity.groups);
            let advertised = advertised(config, addresses);
            let elector = Elector::join(Arc::clone(&registry), &first, advertised, lease).await?;
            Ok(Membership::Member(Box::new(elector), identity))
        };
        match joined.await {
            Err(StartError::Registry(error @ RegistryError::Unreachable { .. }))
                if Instant::now() < deadline =>
            {
                info!(%error, "registry unreachable; retrying");
                tokio::time::sleep(REGISTRY_PAUSE).await;
            }
            joined => return joined,
        }
    }
}

/// Spawns an elector on the runtime of the servers.
fn run(elector: Elector, runtime: &Runtime, service: &Arc<Service>) -> RunningElection {
    let (stop, stopped) = watch::channel(false);
    let (ends, ended) = channel();
    let (proposals, proposed) = mpsc::channel(PENDING_PROPOSALS_MAX);
    service.set_proposals(proposals);
    let service = Arc::clone(service);
    runtime.spawn(async move {
        elector.run(service, proposed, stopped).await;
        // The receiver may be gone.
        let _ = ends.send(());
    });
    RunningElection { stop, ended: Mutex::new(ended) }
}

fn service_config(
    config: &ValidConfig,
    membership: &Membership,
    addresses: Addresses,
    credentials: Option<Arc<Credentials>>,
) -> Result<ServiceConfig, identity::IdentityError> {
    let millis = |ms: u32| Duration::from_millis(ms.into());
    let advertised = advertised(config, addresses);
    let (cluster, groups, id_key, secret, term) = match membership {
        Membership::Single(LocalIdentity { cluster, groups, id_key, secret, term, .. }) => {
            (*cluster, *groups, *id_key, *secret, *term)
        }
        Membership::Member(elector, identity) => {
            (identity.cluster, identity.groups, identity.id_key, identity.secret, elector.number())
        }
    };
    Ok(ServiceConfig {
        groups,
        cluster,
        id_key: IdKey::new(id_key, secret),
        id_key_secret: IdKeySecret(secret),
        capability_secret: CapabilitySecret::new(identity::random()?),
        capability_rotation: millis(config.capability_rotation_ms),
        term,
        exclusions: match membership {
            Membership::Single(identity) => identity.exclusions.clone(),
            Membership::Member(..) => vec![],
        },
        tenants: match membership {
            Membership::Single(identity) => identity.tenants.clone(),
            Membership::Member(..) => Default::default(),
        },
        multi_master: matches!(membership, Membership::Member(..)),
        session_ttl: millis(config.session_ttl_ms),
        session_secret: SessionSecret(identity::random()?),
        grpc_address: advertised.grpc,
        frame_address: advertised.frame,
        placement: config.placement,
        offload: config.offload,
        admission: config.offload_admission,
        eviction_high_watermark_permille: config.eviction_high_watermark_permille,
        eviction_low_watermark_permille: config.eviction_low_watermark_permille,
        reservation: millis(config.reservation_ms),
        reallocation_delay: millis(config.reallocation_delay_ms),
        rejoin_window: millis(config.node_rejoin_window_ms),
        repair_delay: millis(config.repair_delay_ms),
        rebalance_bytes_per_s: config.rebalance_bytes_per_s,
        rebalance_skew_permille: config.rebalance_skew_permille,
        hot_copy_bytes: config.hot_copy_bytes,
        hot_copy_idle: millis(config.hot_copy_idle_ms),
        stripe_bytes_max: config.stripe_bytes_max,
        seed: random_u64()?,
        credentials,
    })
}

/// Loads the certificate of this master, if there is one.
fn load_credentials(config: &ValidConfig) -> Result<Option<Arc<Credentials>>, StartError> {
    let credentials = config.load_credentials()?;
    if let Some(credentials) = &credentials {
        let found = credentials.info().identity;
        if *found.role() != moontide_auth::Role::Master {
            let path = config.cert.clone().unwrap_or_default();
            return Err(StartError::NoMaster { path, found });
        }
    }
    Ok(credentials)
}

/// Tasks of the thread `servers`.
struct ServerTasks {
    config: ValidConfig,
    listeners: Listeners,
    service: Arc<Service>,
    frame_server: Arc<FrameServer>,
    stopped: watch::Receiver<bool>,
}

impl ServerTasks {
    fn serve(self, runtime: Runtime) {
        let ServerTasks { config, listeners, service, frame_server, mut stopped } = self;
        let (grpc_counters, admin_counters) =
            (Arc::<ServerCounters>::default(), Arc::<ServerCounters>::default());
        let servers = vec![
            ServerMetrics { protocol: "frame", threads: frame_server.counters() },
            ServerMetrics { protocol: "grpc", threads: vec![Arc::clone(&grpc_counters)] },
            ServerMetrics { protocol: "admin", threads: vec![Arc::clone(&admin_counters)] },
        ];
        let metrics = Metrics::new(Arc::clone(&service), servers);
        let grpc_config = GrpcServerConfig {
            connections_max: config.connections_max,
            inflight_per_connection_max: config.inflight_per_connection_max,
        };
        runtime.block_on(async move {
            let frame = frame_server.accept(listeners.frame, stopped.clone());
            let grpc = grpc_server::serve(
                grpc_config,
                listeners.grpc,
                Arc::clone(&service),
                grpc_counters,
                stopped.clone(),
            );
            let admin = admin::serve(
                listeners.admin,
                service,
                metrics,
                admin_counters,
                AdminGuard::new(own_names(&config)),
                stopped.clone(),
            );
            let (frame, grpc, admin) = (tokio::spawn(frame), tokio::spawn(grpc), tokio::spawn(admin));
            // An error means that the sender was dropped, which also means shutdown.
            let _ = stopped.wait_for(|&stop| stop).await;
            let all = async {
                let _ = frame.await;
                log_end("grpc", grpc.await);
                log_end("admin", admin.await);
            };
            if tokio::time::timeout(GRACE, all).await.is_err() {
                info!("connections still open after the shutdown timeout");
            }
        });
        // Remaining tasks are dropped at their next await point.
        runtime.shutdown_timeout(GRACE);
    }
}

/// Returns the names by which requests to the admin endpoints may call this host.
fn own_names(config: &ValidConfig) -> Vec<String> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let advertised = [&config.grpc_advertise, &config.frame_advertise].into_iter().flatten().cloned();
    config.admin_hosts.iter().cloned().chain(advertised).chain([host]).collect()
}

fn log_end<E: std::fmt::Display>(protocol: &str, end: Result<Result<(), E>, tokio::task::JoinError>) {
    match end {
        Ok(Ok(())) => {}
        Ok(Err(error)) => error!(protocol, %error, "server failed"),
        Err(error) => error!(protocol, %error, "server failed"),
    }
}

/// Stores changes of tenants in the file of a single master, as an elector does in the registry.
async fn store_tenants(
    service: Arc<Service>,
    identity: Arc<Mutex<LocalIdentity>>,
    mut proposals: mpsc::Receiver<Proposal>,
) {
    while let Some(Proposal { tenant, change, agreed }) = proposals.recv().await {
        let (service, identity) = (Arc::clone(&service), Arc::clone(&identity));
        let stored = tokio::task::spawn_blocking(move || {
            let after = change.apply(service.tenant_state(&tenant));
            identity.lock().store_tenant(&tenant, after)?;
            service.set_tenant_state(&tenant, after);
            Ok::<_, IdentityError>(after)
        });
        match stored.await {
            // The caller may be gone.
            Ok(Ok(after)) => drop(agreed.send(after)),
            // The caller gets `Unreachable`.
            Ok(Err(error)) => error!(%error, "cannot store a change of a tenant"),
            Err(error) => error!(%error, "storing a change of a tenant failed"),
        }
    }
}

/// Runs the periodic work of the service until shutdown.
fn tick(service: &Service, identity: Option<&Mutex<LocalIdentity>>, stopped: &Receiver<()>) {
    let mut role = service.role();
    loop {
        let started = Instant::now();
        let wait = service.tick().clamp(TICK_MIN, TICK_MAX);
        let took = started.elapsed();
        if took > TICK_SLOW {
            warn!(took_ms = took.as_millis() as u64, "slow tick");
        }
        if let Some(identity) = identity
            && let Err(error) = service.store_exclusions(|numbers| identity.lock().store_exclusions(numbers))
        {
            warn!(%error, "cannot store exclusions; removals and upserts return Pending");
        }
        if service.role() != role {
            role = service.role();
            match role {
                Role::Leader { term } => info!(term = term.get(), "master is leader"),
                Role::SteppedDown { seen } => {
                    warn!(seen_term = seen.get(), "master stepped down: a node knows a higher term");
                }
                Role::Member { groups, confirmed: true, .. } => {
                    info!(groups, "lease confirmed by the registry")
                }
                Role::Member { groups, confirmed: false, .. } => {
                    warn!(groups, "lease not confirmed by the registry; removals and upserts return Pending");
                }
            }
        }
        match stopped.recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
