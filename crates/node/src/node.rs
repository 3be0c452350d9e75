//! [`Node`]: a node as a whole. Learns the cluster, makes the memory, opens the doors, starts the threads, and ends them in
//! order.
//!
//! | thread | what it does |
//! |---|---|
//! | `moontide-beat` | says that the node lives; opens and closes the index |
//! | `moontide-orders` | carries out orders, reclaims |
//! | of the disk | see `disk` |
//! | `moontide-node-…` | the session with the master, and the page for operators |
//! | of the transfers | a thread per connection, see `moontide_transfer` |
//!
//! Order at the start: the master first, because the number of groups says how the memory is cut; then memory and doors,
//! so that what is registered can be reached.

use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use moontide_proto::v1;
use moontide_transfer::shm::{self, Host, HostConfig, HostError};
use moontide_transfer::tcp::{ServeError, Server, ServerConfig};
use moontide_transfer::{EngineKind, Owner};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::{Generation, NodeId, SegmentId};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tracing::{debug, error, info, warn};

use crate::admin::{self, Page};
use crate::config::{InvalidConfig, MASTER_WAIT, NodeConfig};
use crate::decide::groups::group_of_segment;
use crate::decide::pace::Backoff;
use crate::decide::plan::{PlanArgs, PlanError, SegmentPlan, plan};
use crate::disk::{DiskError, DiskTier, Held, Identity};
use crate::keeper::{Keeper, STALE_AFTER};
use crate::lines::Lines;
use crate::memory::{LentMemory, Memory, MemoryError};
use crate::metrics::{Counters, Metrics};
use crate::orders::{Obedience, Work};
use crate::owner::NodeOwner;
use crate::session::{Facts, Fleet, Parts, learn_cluster};
use crate::status::Status;

/// Streams of processes of this host at a time: one per process and some.
const STREAMS_MAX: usize = 4096;

/// How often a shutdown looks whether transfers have ended.
const LOOK: Duration = Duration::from_millis(5);

/// How long one master has to tell about the cluster before another one is asked.
const LEARN_MAX: Duration = Duration::from_secs(2);

/// How long the session's driver may take to end: one call to unmount, and some.
const DRIVER_END_MAX: Duration = Duration::from_secs(2);

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A value cannot be used.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// Nobody answers.
    #[error(
        "no master at {master} within {:.1} s: {why}; start it first (`moontide master`), or set `master` to its gRPC address",
        waited.as_secs_f32()
    )]
    Master {
        /// Where it was looked for.
        master: String,
        /// How long.
        waited: Duration,
        /// What the last attempt said.
        why: String,
    },
    /// The master answers, but does not take the segments.
    #[error("the master at {master} has not taken the segments within {:.1} s: {why}", waited.as_secs_f32())]
    NotMounted {
        /// Which master.
        master: String,
        /// How long.
        waited: Duration,
        /// What the last attempt said.
        why: String,
    },
    /// The memory cannot be cut into segments.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The memory cannot be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The disk cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// Transfers cannot be served.
    #[error("transfers cannot be served: {0}; set `listen` to an address of this host with a free port")]
    Serve(#[from] ServeError),
    /// The folder of the Unix socket cannot be had.
    #[error("the folder {path} for the Unix socket: {why}; set `door` to a path that this user may write")]
    Folder {
        /// Which folder.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The memory cannot be shared.
    #[error("processes of this host cannot be let in: {0}; set `door` to another path, or `local` to false")]
    Host(#[from] HostError),
    /// The page for operators cannot be served.
    #[error(
        "the page for operators cannot be served on {address}: {source}; set `admin_listen` to another address"
    )]
    Admin {
        /// Which address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The system gives no threads, event loops or random numbers.
    #[error("cannot start: {0}; raise the limits of processes and open files")]
    System(#[from] io::Error),
}

/// Where a node can be reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Transfers over TCP, as they were bound.
    pub tcp: Vec<SocketAddr>,
    /// The Unix socket for processes of this host.
    pub door: Option<PathBuf>,
    /// HTTP for operators.
    pub admin: Option<SocketAddr>,
}

/// A running node. Dropping it ends it at once; [`Node::shutdown`] lets transfers end first.
pub struct Node {
    id: NodeId,
    segments: SegmentPlan,
    addresses: Addresses,
    drain: Duration,
    owner: Arc<NodeOwner>,
    disk: Option<Arc<DiskTier>>,
    /// The disk is this process's alone.
    _held: Option<Held>,
    keeper: Arc<Keeper>,
    status: Arc<Status>,
    work: mpsc::Sender<Work>,
    stop_beat: mpsc::Sender<()>,
    stop_driver: watch::Sender<bool>,
    stop_admin: watch::Sender<bool>,
    driver: Option<tokio::task::JoinHandle<()>>,
    admin: Option<tokio::task::JoinHandle<()>>,
    server: Option<Server>,
    host: Option<Host>,
    threads: Vec<JoinHandle<()>>,
    runtime: Option<Runtime>,
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
    /// Starts a node. When this returns, a master knows of it, and it serves.
    pub fn start(config: NodeConfig) -> Result<Node, StartError> {
        Node::start_with(config, None)
    }

    /// As [`Node::start`], with its segments in memory that others know by another way, too.
    pub fn start_in(config: NodeConfig, memory: LentMemory) -> Result<Node, StartError> {
        Node::start_with(config, Some(memory))
    }

    fn start_with(config: NodeConfig, lent: Option<LentMemory>) -> Result<Node, StartError> {
        config.validate()?;
        let boot = random_u64()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("moontide-node")
            .enable_all()
            .build()?;
        let begun = Instant::now();
        let seeds = config.masters();
        let cluster = runtime.block_on(find_cluster(&seeds, boot))?;
        let draw = || Ok(NodeId(random_u64()?.max(1)));
        let held = match &config.disk {
            Some(disk) => {
                let held = Identity::hold(&disk.dir, cluster.number, disk.backend, config.node, draw);
                Some(held.map_err(DiskError::from)?)
            }
            None => None,
        };
        let id = match (&held, config.node) {
            (Some(held), _) => held.identity.node,
            (None, Some(node)) => node,
            (None, None) => draw()?,
        };
        let groups = cluster.groups;
        let plan = plan(PlanArgs {
            memory_bytes: config.memory_bytes,
            segment_bytes_max: config.segment_bytes_max,
            slot_bytes: config.slot_bytes,
            groups: groups.get(),
            page_bytes: config.huge.page_bytes(),
        })?;
        let staging_bytes = config.disk.as_ref().map(|disk| disk.staging_bytes);
        let memory = Memory::create(id, generation(), plan, config.huge, staging_bytes, lent.as_ref())
            .map(Arc::new)?;
        info!(
            node = id.0,
            segments = plan.count,
            segment_bytes = plan.bytes(),
            slots = plan.slots,
            groups,
            "memory is there"
        );

        let counters = Arc::<Counters>::default();
        let transfer = moontide_transfer::Metrics::new();
        let group = |number| group_of_segment(id, SegmentId(number), groups);
        let lines = Lines::new((0..plan.count).map(group).collect());
        let (work, work_taken) = mpsc::channel();
        let disk = match (config.disk.clone(), memory.staging()) {
            (Some(disk), Some(staging)) => {
                let tier =
                    DiskTier::open(disk, Arc::clone(&memory), Arc::clone(staging), Arc::clone(&lines))?;
                Some(Arc::new(tier))
            }
            _ => None,
        };
        // What reads the disk takes its time, and the master is not waited for meanwhile.
        let begun = begun.max(Instant::now() - MASTER_WAIT / 2);
        let owner = Arc::new(NodeOwner::new(
            id,
            Arc::clone(&memory),
            disk.clone(),
            Arc::clone(&counters),
            Arc::clone(&lines),
            work.clone(),
        ));
        let keeper = Arc::new(Keeper::new(Arc::clone(&memory), config.local_stale_max));
        // A beat before anybody can look.
        memory.heap().beat();
        let status = Arc::<Status>::default();

        let (stop_beat, beat_stopped) = mpsc::channel();
        let (stop_driver, driver_stopped) = watch::channel(false);
        let (stop_admin, admin_stopped) = watch::channel(false);
        // From here on dropping it ends what was started.
        let mut node = Node {
            id,
            segments: plan,
            addresses: Addresses::default(),
            drain: config.drain,
            owner: Arc::clone(&owner),
            disk: disk.clone(),
            _held: held,
            keeper: Arc::clone(&keeper),
            status: Arc::clone(&status),
            work: work.clone(),
            stop_beat,
            stop_driver,
            stop_admin,
            driver: None,
            admin: None,
            server: None,
            host: None,
            threads: Vec::new(),
            runtime: Some(runtime),
        };
        if let Some(disk) = &disk {
            node.threads.extend(disk.start()?);
        }
        let obedience =
            Obedience::new(Arc::clone(&memory), disk.clone(), Arc::clone(&counters), Arc::clone(&lines));
        node.threads.push(spawn("moontide-orders", move || obedience.run(&work_taken))?);
        let beating = Arc::clone(&keeper);
        node.threads.push(spawn("moontide-beat", move || beating.run(&beat_stopped))?);

        let server_config = ServerConfig { listen: config.listen.clone(), ..ServerConfig::default() };
        let server =
            Server::start(server_config, Arc::clone(&owner) as Arc<dyn Owner>, Arc::clone(&transfer))?;
        node.addresses.tcp = server.addresses().to_vec();
        node.server = Some(server);
        if config.local {
            let door = door_of(&config, id)?;
            let host = HostConfig {
                door: door.clone(),
                more_uids: Vec::new(),
                stale_after: STALE_AFTER,
                streams_max: STREAMS_MAX,
            };
            // SAFETY: the door lets in processes of this user only, who could change this process's memory by other
            // means as well; that they keep to the protocol is what running them with `local` says.
            let host =
                unsafe { Host::start(host, Arc::clone(&owner) as Arc<dyn Owner>, Arc::clone(&transfer)) }?;
            node.addresses.door = Some(door);
            node.host = Some(host);
        }
        let metrics = Metrics {
            counters: Arc::clone(&counters),
            transfer,
            memory: Arc::clone(&memory),
            disk: disk.clone(),
            keeper: Arc::clone(&keeper),
            status: Arc::clone(&status),
        };
        if let Some(address) = config.admin_listen {
            let page = Page { node: id, master: config.master.clone(), metrics };
            node.serve_admin(address, page, admin_stopped)?;
        }

        let facts = Facts {
            node: id,
            boot,
            addresses: announced(&config, &node.addresses),
            topology: v1::Topology { host: config.host, rack: config.rack, zone: config.zone },
            cluster: cluster.number,
            groups,
        };
        let parts = Parts { memory, disk, owner, keeper, status, counters, work };
        let fleet = Fleet::new(facts, parts, lines, seeds, driver_stopped);
        node.driver = node.runtime.as_ref().map(|runtime| runtime.spawn(fleet.run()));
        let left = MASTER_WAIT.saturating_sub(begun.elapsed()).max(Duration::from_secs(1));
        if !node.status.wait_until_mounted(left) {
            let why = node.status.get().trouble.unwrap_or_else(|| "it has not answered yet".into());
            node.drain = Duration::ZERO;
            return Err(StartError::NotMounted { master: config.master, waited: begun.elapsed(), why });
        }
        info!(node = id.0, tcp = ?node.addresses.tcp, door = ?node.addresses.door, admin = ?node.addresses.admin, "node serves");
        Ok(node)
    }

    fn serve_admin(
        &mut self,
        address: SocketAddr,
        page: Page,
        stopped: watch::Receiver<bool>,
    ) -> Result<(), StartError> {
        let Some(runtime) = &self.runtime else { return Ok(()) };
        let failed = |source| StartError::Admin { address, source };
        let listener = runtime.block_on(TcpListener::bind(address)).map_err(failed)?;
        self.addresses.admin = Some(listener.local_addr().map_err(failed)?);
        self.admin = Some(runtime.spawn(async move {
            if let Err(error) = admin::serve(listener, page, stopped).await {
                error!(%error, "the page for operators failed");
            }
        }));
        Ok(())
    }

    /// Its number.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Where it can be reached: the addresses that were bound, also for port 0.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Bytes of its memory that are in use, that are being given back, and all of them.
    pub fn usage(&self) -> (u64, u64, u64) {
        let usage = self.owner.memory().usage();
        let bytes = |units: u64| units * UNIT_BYTES;
        (bytes(usage.live_units + usage.writing_units), bytes(usage.draining_units), bytes(usage.units))
    }

    /// How its memory is cut.
    pub fn segments(&self) -> SegmentPlan {
        self.segments
    }

    /// Waits until a master knows of all segments and all that is in them. `false`: not within `timeout`.
    pub fn wait_until_mounted(&self, timeout: Duration) -> bool {
        self.status.wait_until_mounted(timeout)
    }

    /// The node as transfers see it: for tests that speak as the heap does.
    #[doc(hidden)]
    pub fn owner(&self) -> Arc<dyn Owner> {
        Arc::clone(&self.owner) as Arc<dyn Owner>
    }

    /// Ends it: nothing new is begun or read, the master forgets its segments, transfers under way end, for as long as
    /// [`NodeConfig::drain`] says at most.
    pub fn shutdown(mut self) {
        let drain = self.drain;
        self.stop(drain);
    }

    fn stop(&mut self, drain: Duration) {
        let Some(runtime) = self.runtime.take() else { return };
        info!(node = self.id.0, "node stops");
        let begun = Instant::now();
        // Before the master forgets what is here: what is removed or replaced from then on must not be found here.
        self.owner.close();
        self.keeper.shut();
        self.stop_driver.send_replace(true);
        if let Some(driver) = self.driver.take() {
            let ended = runtime.block_on(async { tokio::time::timeout(DRIVER_END_MAX, driver).await });
            if ended.is_err() {
                warn!("the session did not end in time");
            }
        }
        while begun.elapsed() < drain && self.is_in_use() {
            std::thread::sleep(LOOK);
        }
        if self.is_in_use() {
            warn!(
                drain_ms = drain.as_millis() as u64,
                "some transfers, or readers in place, did not end in time"
            );
        }
        self.server = None;
        if let Some(host) = self.host.take() {
            let door = host.door().to_owned();
            drop(host);
            // Somebody may have cleaned up already.
            let _ = std::fs::remove_file(door);
        }
        // Threads that are gone have said why.
        if let Some(disk) = &self.disk {
            disk.stop();
        }
        let _ = self.work.send(Work::Stop);
        let _ = self.stop_beat.send(());
        for thread in self.threads.drain(..) {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                error!(thread = name, "a thread of the node had panicked");
            }
        }
        self.stop_admin.send_replace(true);
        if let Some(admin) = self.admin.take() {
            // A connection that is kept open by its peer is not waited for.
            let _ = runtime.block_on(async { tokio::time::timeout(Duration::from_millis(100), admin).await });
        }
        runtime.shutdown_timeout(Duration::from_secs(1));
        debug!(node = self.id.0, took_ms = begun.elapsed().as_millis() as u64, "node stopped");
    }

    /// Whether somebody reads, writes or calls.
    fn is_in_use(&self) -> bool {
        self.owner.calls() > 0 || !self.owner.heap().ledgers().pins().is_empty()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// Asks the masters in turn about the cluster, until one answers or the time is over.
async fn find_cluster(masters: &[String], boot: u64) -> Result<crate::session::Cluster, StartError> {
    let begun = Instant::now();
    let left = || MASTER_WAIT.saturating_sub(begun.elapsed());
    let mut backoff = Backoff::new(boot);
    let mut why = "it does not answer".to_owned();
    while !left().is_zero() {
        for master in masters {
            match tokio::time::timeout(left().min(LEARN_MAX), learn_cluster(master, boot)).await {
                Ok(Ok(cluster)) => return Ok(cluster),
                Ok(Err(failure)) => why = failure.to_string(),
                Err(_) => {}
            }
            debug!(master, why, "master not reached");
        }
        tokio::time::sleep(backoff.wait().min(left())).await;
    }
    Err(StartError::Master { master: masters.join(","), waited: begun.elapsed(), why })
}

/// How others reach the node.
fn announced(config: &NodeConfig, bound: &Addresses) -> Vec<v1::Address> {
    let address = |engine: EngineKind, address| v1::Address { engine: engine.name().into(), address };
    let tcp: Vec<String> = if config.advertise.is_empty() {
        bound.tcp.iter().map(ToString::to_string).collect()
    } else {
        config.advertise.clone()
    };
    let door = bound.door.as_deref().and_then(shm::address);
    let local = door.map(|door| address(EngineKind::Shm, door));
    tcp.into_iter().map(|tcp| address(EngineKind::Tcp, tcp)).chain(local).collect()
}

/// Where the door is, in a folder that is there.
fn door_of(config: &NodeConfig, node: NodeId) -> Result<PathBuf, StartError> {
    if let Some(door) = &config.door {
        return Ok(door.clone());
    }
    let name = format!("moontide-{:016x}.sock", node.0);
    if let Some(folder) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|f| f.is_dir()) {
        sweep(&folder);
        return Ok(folder.join(name));
    }
    let uid = rustix::process::getuid().as_raw();
    let folder = PathBuf::from(format!("/tmp/moontide-{uid}"));
    make_private(&folder, uid)?;
    sweep(&folder);
    Ok(folder.join(name))
}

/// Removes the doors of nodes that were killed: behind them nobody listens.
fn sweep(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_door =
            name.to_str().is_some_and(|name| name.starts_with("moontide-") && name.ends_with(".sock"));
        // A door that somebody listens behind takes another type of socket, and says so; a deserted one refuses.
        let deserted = || {
            let tried = std::os::unix::net::UnixStream::connect(entry.path());
            tried.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        };
        if is_door && deserted() {
            debug!(door = ?entry.path(), "removing the door of a node that is gone");
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// A folder of this user alone: in `/tmp` somebody else could have put one there to listen in our place.
fn make_private(folder: &Path, uid: u32) -> Result<(), StartError> {
    let failed = |why: String| StartError::Folder { path: folder.to_owned(), why };
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = std::fs::symlink_metadata(folder).map_err(|error| failed(error.to_string()))?;
            let ours = found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0;
            if ours { Ok(()) } else { Err(failed("it is not this user's alone (mode 0700)".into())) }
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Grows with every start: what was handed out by an earlier one of the same number is known to be old.
fn generation() -> Generation {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Generation(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // Up to 256 bytes come at once.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(bytes))
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};

    #[test]
    fn only_doors_that_nobody_listens_behind_are_swept() {
        let folder = std::env::temp_dir().join(format!("moontide-sweep-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let door = |name: &str| {
            let path = folder.join(name);
            let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            listen(&socket, 1).unwrap();
            (path, socket)
        };
        let (open, _listening) = door("moontide-0000000000000001.sock");
        let (deserted, gone) = door("moontide-0000000000000002.sock");
        let (foreign, other) = door("another-0000000000000002.sock");
        drop((gone, other));
        sweep(&folder);
        assert_eq!([open.exists(), deserted.exists(), foreign.exists()], [true, false, true]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
