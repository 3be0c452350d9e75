//! [`Server`]: a master as a whole. Binds the three doors, takes the cluster's identity, starts the threads, and ends
//! them in order.
//!
//! | thread | what it does |
//! |---|---|
//! | `frame-0` … | connections of the framed door |
//! | `doors`, `doors-worker` | gRPC and HTTP, and accepting for the framed door |
//! | `ticker` | what is due by time: expiry, eviction, jobs |
//!
//! Order at the start: addresses first, because a port that is taken is the usual mistake and must not cost a term; then
//! the identity, whose term is durable before anything is served.

use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_proto::convert::IdKeySecret;
use moontide_types::{IdKey, SystemClock, Term};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use crate::config::{InvalidConfig, MasterConfig, ValidConfig};
use crate::election::{self, Campaign, Document, MasterAddresses, Registry, RegistryError};
use crate::frame_door::{FrameDoor, FrameDoorConfig};
use crate::grpc_door::{self, GrpcDoorConfig};
use crate::identity::{Identity, IdentityError, random_u64};
use crate::metrics::{DoorCounters, DoorMetrics, Metrics};
use crate::service::{Role, Service, ServiceConfig};
use crate::{admin, identity};

/// The ticker comes at least and at most so often, whatever the service says.
const TICK_MIN: Duration = Duration::from_millis(1);
const TICK_MAX: Duration = Duration::from_millis(100);

/// A tick that takes longer holds callers up, and is worth a line.
const TICK_SLOW: Duration = Duration::from_millis(100);

/// How long a master that starts waits for its registry, and how often it looks.
const REGISTRY_WAIT: Duration = Duration::from_secs(30);
const REGISTRY_PAUSE: Duration = Duration::from_millis(500);

/// Changes that wait to be agreed on; operators make few.
const PROPOSALS_MAX: usize = 16;

/// How long calls under way may take at the end.
const GRACE: Duration = Duration::from_secs(5);

/// Why a master does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A value cannot be used.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// An address cannot be had.
    #[error("cannot serve {door} on {address}: {source}; {}", advice(source, setting))]
    Bind {
        /// Which door.
        door: &'static str,
        /// Which address.
        address: SocketAddr,
        /// The setting that names it.
        setting: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The cluster's identity cannot be had.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The registry is not there, or does not want us.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A cluster's number of groups is fixed.
    #[error(
        "the cluster was created with {found} groups, and {configured} are configured; set groups to {found}"
    )]
    Groups {
        /// What the registry says.
        found: NonZeroU16,
        /// What was asked for.
        configured: NonZeroU16,
    },
    /// The system gives no threads or event loops.
    #[error("cannot start threads: {0}; raise the limits of processes and open files")]
    Threads(#[source] io::Error),
}

/// What to do about an address that cannot be had.
fn advice(error: &io::Error, setting: &str) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("another process listens there: stop it, or set {setting} to another port")
        }
        io::ErrorKind::AddrNotAvailable => {
            format!("this host has no such address: set {setting} to one that it has")
        }
        io::ErrorKind::PermissionDenied => {
            format!("ports below 1024 need privileges: set {setting} to a higher one")
        }
        _ => format!("check {setting}"),
    }
}

/// Where a master can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// gRPC.
    pub grpc: SocketAddr,
    /// The framed protocol.
    pub frame: SocketAddr,
    /// HTTP for operators.
    pub admin: SocketAddr,
}

/// A running master. Dropping it ends it as [`Server::shutdown`] does.
pub struct Server {
    service: Arc<Service>,
    addresses: Addresses,
    term: Term,
    stop: watch::Sender<bool>,
    /// One of several: its part in the election, which ends before the rest.
    campaign: Option<Running>,
    stop_ticker: Sender<()>,
    threads: Vec<JoinHandle<()>>,
    /// Keeps other processes out of the data directory.
    _identity: Option<Identity>,
}

/// A campaign that runs.
struct Running {
    stop: watch::Sender<bool>,
    ended: Mutex<Receiver<()>>,
}

/// How a master came to be.
enum Origin {
    /// It is the only one.
    Alone(Identity),
    /// It is one of several.
    Member(Box<Campaign>, election::Identity),
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("addresses", &self.addresses)
            .field("term", &self.term)
            .finish_non_exhaustive()
    }
}

/// The three listeners.
struct Listeners {
    grpc: TcpListener,
    frame: TcpListener,
    admin: TcpListener,
}

impl Server {
    /// Starts a master. When this returns, it serves; one of several masters then hosts groups as soon as it is given some.
    pub fn start(config: MasterConfig) -> Result<Server, StartError> {
        Server::start_at(config, None)
    }

    /// The same; masters meet at this registry, if there is one, instead of the one that is configured.
    pub fn start_at(config: MasterConfig, registry: Option<Arc<dyn Registry>>) -> Result<Server, StartError> {
        let config = config.validate()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .thread_name("doors-worker")
            .enable_all()
            .build()
            .map_err(StartError::Threads)?;
        let (listeners, addresses) = runtime.block_on(bind_all(&config))?;
        let registry = match registry {
            Some(registry) => Some(registry),
            // It may want a runtime around it.
            None => runtime.block_on(async { config.registry().connect() })?,
        };
        let origin = match registry {
            Some(registry) => runtime.block_on(join(&config, registry, addresses))?,
            None => Origin::Alone(Identity::establish(config.data_dir.as_deref(), config.groups())?),
        };
        if config.data_dir.is_some() && matches!(origin, Origin::Member(..)) {
            warn!("data_dir is not used: the registry keeps the cluster's identity");
        }
        if config.data_dir.is_none() && matches!(origin, Origin::Alone(_)) {
            warn!("no data_dir: a restart forgets the cluster's identity, and nodes begin anew");
        }
        let service = Service::new(service_config(&config, &origin, addresses)?, Arc::new(SystemClock));
        let (campaign, identity) = match origin {
            Origin::Alone(identity) => (None, Some(identity)),
            Origin::Member(campaign, _) => (Some(run(*campaign, &runtime, &service)), None),
        };
        let (stop, stopped) = watch::channel(false);
        let frame_config = FrameDoorConfig {
            threads: config.frame_threads(),
            connections_max: config.connections_max,
            inflight_per_connection_max: config.inflight_per_connection_max,
            caller: random_u64()?,
        };
        let (frame_door, mut threads) = FrameDoor::start(frame_config, Arc::clone(&service), stopped.clone())
            .map_err(StartError::Threads)?;
        let (stop_ticker, ticker_stopped) = channel();
        let ticking = Arc::clone(&service);
        threads.push(spawn("ticker", move || tick(&ticking, &ticker_stopped))?);
        let doors =
            Doors { config: config.clone(), listeners, service: Arc::clone(&service), frame_door, stopped };
        threads.push(spawn("doors", move || doors.serve(runtime))?);
        let term = service.term();
        info!(
            grpc = %addresses.grpc,
            frame = %addresses.frame,
            admin = %addresses.admin,
            term = term.get(),
            groups = config.groups,
            frame_threads = config.frame_threads(),
            "master serves"
        );
        Ok(Server { service, addresses, term, stop, campaign, stop_ticker, threads, _identity: identity })
    }

    /// Where it can be reached: the addresses that were bound, also for port 0.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Its number: the term of all groups, if it is alone.
    pub fn term(&self) -> Term {
        self.term
    }

    /// The handler behind the doors.
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Ends it: no new connections, calls under way are answered, then the threads end. Takes some seconds at most.
    pub fn shutdown(self) {
        // What there is to do is in Drop.
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        info!("master stops");
        if let Some(campaign) = self.campaign.take() {
            // Groups are handed over while the doors are open: the heir may have questions, and so may clients.
            campaign.stop.send_replace(true);
            let _ = campaign.ended.lock().recv_timeout(2 * GRACE);
        }
        self.stop.send_replace(true);
        // A ticker that is gone has said why.
        let _ = self.stop_ticker.send(());
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                error!(thread = name, "a thread of the master had panicked");
            }
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(StartError::Threads)
}

async fn bind_all(config: &ValidConfig) -> Result<(Listeners, Addresses), StartError> {
    let (grpc, grpc_address) = bind("gRPC", config.grpc_listen, "grpc_listen").await?;
    let (frame, frame_address) = bind("the framed protocol", config.frame_listen, "frame_listen").await?;
    let (admin, admin_address) = bind("HTTP", config.admin_listen, "admin_listen").await?;
    let addresses = Addresses { grpc: grpc_address, frame: frame_address, admin: admin_address };
    Ok((Listeners { grpc, frame, admin }, addresses))
}

async fn bind(
    door: &'static str,
    address: SocketAddr,
    setting: &'static str,
) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Bind { door, address, setting, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Where others reach this master.
fn advertised(config: &ValidConfig, addresses: Addresses) -> MasterAddresses {
    let of = |advertise: &Option<String>, bound: SocketAddr| {
        advertise.clone().unwrap_or_else(|| bound.to_string())
    };
    MasterAddresses {
        grpc: of(&config.grpc_advertise, addresses.grpc),
        frame: of(&config.frame_advertise, addresses.frame),
    }
}

/// Becomes one of several masters. Waits some time for a registry that is not there yet.
async fn join(
    config: &ValidConfig,
    registry: Arc<dyn Registry>,
    addresses: Addresses,
) -> Result<Origin, StartError> {
    let draft = identity::draft(config.groups())?;
    let lease = Duration::from_millis(config.lease_ms.into());
    let until = Instant::now() + REGISTRY_WAIT;
    loop {
        let joined = async {
            let identity = registry.identity(&draft).await?;
            if identity.groups != config.groups() {
                let (found, configured) = (identity.groups, config.groups());
                return Err(StartError::Groups { found, configured });
            }
            let first = Document::new(identity.groups);
            let advertised = advertised(config, addresses);
            let campaign = Campaign::join(Arc::clone(&registry), &first, advertised, lease).await?;
            Ok(Origin::Member(Box::new(campaign), identity))
        };
        match joined.await {
            Err(StartError::Registry(error @ RegistryError::Unreachable { .. }))
                if Instant::now() < until =>
            {
                info!(%error, "waiting for the registry");
                tokio::time::sleep(REGISTRY_PAUSE).await;
            }
            joined => return joined,
        }
    }
}

/// Lets a campaign run beside the doors.
fn run(campaign: Campaign, runtime: &Runtime, service: &Arc<Service>) -> Running {
    let (stop, stopped) = watch::channel(false);
    let (ends, ended) = channel();
    let (proposals, proposed) = mpsc::channel(PROPOSALS_MAX);
    service.set_proposals(proposals);
    let service = Arc::clone(service);
    runtime.spawn(async move {
        campaign.run(service, proposed, stopped).await;
        // Nobody may wait for it.
        let _ = ends.send(());
    });
    Running { stop, ended: Mutex::new(ended) }
}

fn service_config(
    config: &ValidConfig,
    origin: &Origin,
    addresses: Addresses,
) -> Result<ServiceConfig, identity::IdentityError> {
    let millis = |ms: u32| Duration::from_millis(ms.into());
    let advertised = advertised(config, addresses);
    let (cluster, id_key, secret, term) = match origin {
        Origin::Alone(identity) => (identity.cluster, identity.id_key, identity.secret, identity.term),
        Origin::Member(campaign, identity) => {
            (identity.cluster, identity.id_key, identity.secret, campaign.number())
        }
    };
    Ok(ServiceConfig {
        groups: config.groups(),
        cluster,
        id_key: IdKey::new(id_key, secret),
        id_key_secret: IdKeySecret(secret),
        term,
        shared: matches!(origin, Origin::Member(..)),
        session_ttl: millis(config.session_ttl_ms),
        grpc_address: advertised.grpc,
        frame_address: advertised.frame,
        placement: config.placement.0,
        admission: config.offload_admission.0,
        high_permille: config.high_permille,
        low_permille: config.low_permille,
        reservation: millis(config.reservation_ms),
        reallocate_wait: millis(config.reallocate_wait_ms),
        absence_max: millis(config.absence_max_ms),
        stripe_bytes_max: config.stripe_bytes_max,
        seed: random_u64()?,
    })
}

/// What the thread `doors` runs.
struct Doors {
    config: ValidConfig,
    listeners: Listeners,
    service: Arc<Service>,
    frame_door: Arc<FrameDoor>,
    stopped: watch::Receiver<bool>,
}

impl Doors {
    fn serve(self, runtime: Runtime) {
        let Doors { config, listeners, service, frame_door, mut stopped } = self;
        let (grpc_counters, admin_counters) =
            (Arc::<DoorCounters>::default(), Arc::<DoorCounters>::default());
        let doors = vec![
            DoorMetrics { door: "frame", threads: frame_door.counters() },
            DoorMetrics { door: "grpc", threads: vec![Arc::clone(&grpc_counters)] },
            DoorMetrics { door: "admin", threads: vec![Arc::clone(&admin_counters)] },
        ];
        let metrics = Metrics::new(Arc::clone(&service), doors);
        let grpc_config = GrpcDoorConfig {
            connections_max: config.connections_max,
            inflight_per_connection_max: config.inflight_per_connection_max,
        };
        runtime.block_on(async move {
            let frame = frame_door.accept(listeners.frame, stopped.clone());
            let grpc = grpc_door::serve(
                grpc_config,
                listeners.grpc,
                Arc::clone(&service),
                grpc_counters,
                stopped.clone(),
            );
            let admin = admin::serve(listeners.admin, service, metrics, admin_counters, stopped.clone());
            let (frame, grpc, admin) = (tokio::spawn(frame), tokio::spawn(grpc), tokio::spawn(admin));
            // An error means that the server is gone, which is the end as well.
            let _ = stopped.wait_for(|&stop| stop).await;
            let all = async {
                let _ = frame.await;
                log_end("grpc", grpc.await);
                log_end("admin", admin.await);
            };
            if tokio::time::timeout(GRACE, all).await.is_err() {
                info!("some connections did not end in time");
            }
        });
        // Tasks that are left are dropped at their next wait.
        runtime.shutdown_timeout(GRACE);
    }
}

fn log_end<E: std::fmt::Display>(door: &str, end: Result<Result<(), E>, tokio::task::JoinError>) {
    match end {
        Ok(Ok(())) => {}
        Ok(Err(error)) => error!(door, %error, "a door failed"),
        Err(error) => error!(door, %error, "a door failed"),
    }
}

/// Lets the service do what is due, until told to stop.
fn tick(service: &Service, stopped: &Receiver<()>) {
    let mut role = service.role();
    loop {
        let begun = Instant::now();
        let wait = service.tick().clamp(TICK_MIN, TICK_MAX);
        let took = begun.elapsed();
        if took > TICK_SLOW {
            warn!(took_ms = took.as_millis() as u64, "a tick took long");
        }
        if service.role() != role {
            role = service.role();
            match role {
                Role::Leader { term } => info!(term = term.get(), "master leads"),
                Role::SteppedDown { seen } => {
                    warn!(seen_term = seen.get(), "master steps down: a node knows a higher term");
                }
                Role::Member { groups, confirmed: true, .. } => info!(groups, "master is confirmed"),
                Role::Member { groups, confirmed: false, .. } => {
                    warn!(groups, "master is not confirmed by the registry: removals are not certain");
                }
            }
        }
        match stopped.recv_timeout(wait) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
