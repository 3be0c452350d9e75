//! Ranks that write to each other's memory, for Python: [`moontide_client::RankStore`] with a node in this process, and
//! a master on rank 0. The public API is `moontide.nano`; this module also exposes addresses, for kernels.
//!
//! Invariant: a forked child neither uses nor drops inherited values.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use moontide_client::{
    DeviceKernelCell, PendingRecord as ClientPendingRecord, PushCommitError, PushWriter as ClientPushWriter,
    RankLayout, RankStoreError, RecordProgress, Store, StoreConfig, StoreError, Ticket,
};
use moontide_heap::{DeviceSlice, HugePages};
use moontide_master::{MasterConfig, Server};
use moontide_node::{ExternalMemory, Node, NodeConfig};
use moontide_settings::Component as _;
use moontide_symmetric::{
    DeviceConfig, DeviceWorld, DeviceWorldConfig, DeviceWorldError, Driver, Rank, Vendor, World, WorldConfig,
    WorldShape,
};
use moontide_types::{ErrorCode, NodeId};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::arguments::{key, seconds};
use crate::array::{Source, Target};
use crate::errors;
use crate::process::{ProcessLocal, Unusable, unusable_error};
use crate::store::config as store_config;

/// Offset, in the page behind the records of rank 0, of the address of its master: one word for the length, then the
/// bytes, eight per word.
const ADDRESS_OFFSET: u64 = 512;
const ADDRESS_WORDS: u64 = 9;

/// Interval at which a wait checks for signals.
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A ticket as numbers: rank, segment, generation, slot, epoch, payload_offset, bytes, page_bytes, flag_offset.
type Words = [u64; 9];

fn ticket_of(words: Words) -> PyResult<Ticket> {
    Ticket::from_words(words).ok_or_else(|| errors::argument("the numbers are not a valid ticket"))
}

/// Rank of a world whose ranks read and write each other's memory. ``moontide.nano.NanoKVCache`` is built on it.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct RankStore {
    inner: ProcessLocal<RankStoreInner>,
    rank: u32,
    ranks: u32,
    master: String,
}

/// Dropped in this order: the node unregisters from the master before the master ends.
#[derive(Debug)]
struct RankStoreInner {
    rank_store: moontide_client::RankStore,
    node: Arc<Node>,
    _server: Option<Server>,
}

/// Reason why a rank could not start.
enum StartError {
    World(moontide_symmetric::WorldError),
    Device(DeviceWorldError),
    Store(RankStoreError),
    Other(ErrorCode, String),
}

impl From<RankStoreError> for StartError {
    fn from(error: RankStoreError) -> StartError {
        StartError::Store(error)
    }
}

impl StartError {
    fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            StartError::World(error) => errors::world(py, &error),
            StartError::Device(DeviceWorldError::Wait(error))
            | StartError::Store(RankStoreError::Wait(error)) => errors::join(py, error),
            StartError::Device(error) => errors::other(py, ErrorCode::DeviceError, error),
            StartError::Store(RankStoreError::Store(error)) => errors::store(py, &error),
            StartError::Store(error) => errors::argument(error),
            StartError::Other(code, message) => errors::other(py, code, message),
        }
    }
}

/// Settings of a rank.
struct Settings {
    path: PathBuf,
    rank: Rank,
    ranks: u32,
    memory_bytes: u64,
    /// Device for the records; `None`: host memory.
    device: Option<(Vendor, u32)>,
    bytes_per_slot: u64,
    groups: u16,
    watermarks: (f64, f64),
    write_timeout: Duration,
    timeout: Duration,
    /// Tenant and certificate of the client; the address of the master is not known yet.
    client: StoreConfig,
    certificates: Certificates,
}

/// A certificate and its key.
#[derive(Clone, Debug, Default)]
struct Pair {
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
}

/// Certificates of the servers of a rank. They differ from that of its client: a certificate has one role.
#[derive(Clone, Debug, Default)]
struct Certificates {
    node: Pair,
    /// Of rank 0 only.
    master: Pair,
}

/// Returns the value of a setting: the argument, else the variable. "none" stands for no value.
fn path_of(argument: Option<PathBuf>, variable: &str) -> Option<PathBuf> {
    let value = argument.or_else(|| std::env::var_os(variable).map(PathBuf::from));
    value.filter(|path| !path.as_os_str().is_empty() && path.as_os_str() != "none")
}

impl Certificates {
    /// Checks that a rank with a certificate for its client has those for its servers.
    fn check(self, client: &StoreConfig, rank: Rank) -> PyResult<Certificates> {
        client.check().map_err(errors::argument)?;
        if client.ca.is_none() {
            return Ok(Certificates::default());
        }
        let missing = |part: &str| {
            let variable = part.to_uppercase();
            Err(errors::argument(format!(
                "rank {} has a certificate for its client and none for its {part}; set {part}_cert and {part}_key \
                 (MOONTIDE_{variable}_CERT, MOONTIDE_{variable}_KEY), or ca, cert and key to \"none\" for ranks without TLS",
                rank.0
            )))
        };
        let is_complete = |pair: &Pair| pair.cert.is_some() && pair.key.is_some();
        match (is_complete(&self.node), rank) {
            (false, _) => missing("node"),
            (true, Rank(0)) if !is_complete(&self.master) => missing("master"),
            _ => Ok(self),
        }
    }
}

/// Parses `cuda`, `cuda:1` or `hip:0`: a vendor and the index of a device in this process.
fn device_of(name: &str) -> PyResult<(Vendor, u32)> {
    let (vendor, number) = name.split_once(':').unwrap_or((name, "0"));
    let vendor = match vendor {
        "cuda" => Some(Vendor::Cuda),
        "hip" => Some(Vendor::Hip),
        _ => None,
    };
    let found = vendor.zip(number.parse().ok());
    found.ok_or_else(|| errors::argument(format!("device must be 'cuda:N' or 'hip:N', not {name:?}")))
}

/// Joins the device memory of this rank to that of all ranks.
fn join_device(
    world: &World,
    path: &Path,
    (vendor, device): (Vendor, u32),
    timeout: Duration,
) -> Result<Arc<DeviceWorld>, StartError> {
    let driver = Driver::load(vendor, None).map_err(|error| StartError::Device(error.into()))?;
    let region = DeviceConfig { device, bytes: world.shape().bytes, peers: &[], sharing: None };
    let config = DeviceWorldConfig { path, region, timeout };
    // SAFETY: as for the world itself.
    unsafe { DeviceWorld::join(world, driver, &config) }.map(Arc::new).map_err(StartError::Device)
}

/// Converts a ratio to permille. The master rejects invalid values.
fn permille(share: f64) -> u16 {
    (share * 1000.0).round().clamp(0.0, 10_000.0) as u16
}

fn start(settings: Settings) -> Result<(RankStoreInner, String), StartError> {
    let Settings { path, rank, ranks, memory_bytes, device, bytes_per_slot, groups, .. } = settings;
    let Settings { watermarks, write_timeout, timeout, client, certificates, .. } = settings;
    let deadline = Instant::now() + timeout;
    let shape =
        WorldShape { ranks, bytes: moontide_client::RankStore::region_bytes(memory_bytes, bytes_per_slot) };
    let config = WorldConfig { path: path.clone(), rank, shape, huge: HugePages::Auto, timeout };
    // SAFETY: ranks that join through this module follow the protocol; the docs require the same of all other ranks.
    let world = Arc::new(unsafe { World::join(&config) }.map_err(StartError::World)?);
    let device = match device {
        Some(device) => {
            let left = deadline.saturating_duration_since(Instant::now());
            Some(join_device(&world, &path, device, left)?)
        }
        None => None,
    };
    let any_port = "127.0.0.1:0".parse().expect("a valid address");
    let page = world.words(Rank(0), memory_bytes + ADDRESS_OFFSET, ADDRESS_WORDS);
    let server = match rank {
        Rank(0) => {
            let config = MasterConfig {
                grpc_listen: any_port,
                frame_listen: any_port,
                admin_listen: any_port,
                groups: Some(groups),
                reallocation_delay_ms: 0,
                eviction_high_watermark_permille: permille(watermarks.0),
                eviction_low_watermark_permille: permille(watermarks.1),
                reservation_ms: write_timeout.as_millis() as u32,
                ca: client.ca.clone(),
                cert: certificates.master.cert,
                key: certificates.master.key,
                ..MasterConfig::default()
            };
            let server = Server::start(config)
                .map_err(|error| StartError::Other(ErrorCode::InvalidArgument, error.to_string()))?;
            let address = server.addresses().grpc.to_string();
            for (word, bytes) in page[1..].iter().zip(address.as_bytes().chunks(8)) {
                let mut eight = [0; 8];
                eight[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
            }
            // Release: a rank that sees the length sees the address.
            page[0].store(address.len() as u64, Ordering::Release);
            Some(server)
        }
        _ => None,
    };
    let len = loop {
        match page[0].load(Ordering::Acquire) {
            0 if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            0 => {
                let message = "timed out waiting for the master of rank 0; check the output of rank 0";
                return Err(StartError::Other(ErrorCode::Unreachable, message.to_owned()));
            }
            len => break len as usize,
        }
    };
    let bytes: Vec<u8> =
        page[1..].iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).take(len).collect();
    let master = String::from_utf8_lossy(&bytes).into_owned();
    // A region has whole pages; the node uses no part of a page.
    let whole_pages = memory_bytes - memory_bytes % HugePages::Auto.page_bytes();
    // SAFETY: the first `memory_bytes` bytes of the rank's region are used only for this.
    let region = unsafe { world.reserve(0, whole_pages) }.map_err(StartError::World)?;
    // SAFETY: as above.
    let memory = unsafe {
        match &device {
            Some(device) => {
                ExternalMemory::of_device(region, DeviceSlice::new(Arc::clone(device), 0, whole_pages))
            }
            None => ExternalMemory::new(region),
        }
    };
    let config = NodeConfig {
        master: master.clone(),
        memory_bytes,
        bytes_per_slot,
        listen: vec![any_port],
        admin_listen: None,
        ca: client.ca.clone(),
        cert: certificates.node.cert,
        key: certificates.node.key,
        ..NodeConfig::default()
    };
    let unreachable = |message: String| StartError::Other(ErrorCode::Unreachable, message);
    let node = Node::start_with_memory(config, memory).map_err(|error| unreachable(error.to_string()))?;
    if !node.wait_until_mounted(deadline.saturating_duration_since(Instant::now())) {
        return Err(unreachable(format!("the master at {master} has not mounted the node; check its log")));
    }
    let plan = node.segments();
    let own =
        RankLayout { node: node.id(), segments: plan.count, segment_bytes: plan.bytes(), slots: plan.slots };
    let StoreConfig { tenant, ca, cert, key, .. } = client;
    let config = StoreConfig { tenant, ca, cert, key, ..StoreConfig::new(&*master) };
    let store = Store::connect(config).map_err(RankStoreError::Store)?;
    let left = deadline.saturating_duration_since(Instant::now());
    // SAFETY: as above: the rest of the region is used only for this.
    let rank_store = unsafe {
        match device {
            Some(device) => {
                moontide_client::RankStore::open_on_device(world, device, store, memory_bytes, own, left)
            }
            None => moontide_client::RankStore::open(world, store, memory_bytes, own, left),
        }
    }?;
    Ok((RankStoreInner { rank_store, node: Arc::new(node), _server: server }, master))
}

/// As [`start`], but signals can interrupt the wait for ranks. The thread that starts then ends at its timeout.
fn start_interruptibly(
    py: Python<'_>,
    settings: Settings,
) -> PyResult<Result<(RankStoreInner, String), StartError>> {
    let (sender, mut results) = mpsc::channel();
    let thread = std::thread::Builder::new().name("moontide-join".into());
    // The receiver may have been interrupted.
    thread.spawn(move || drop(sender.send(start(settings)))).map_err(errors::argument)?;
    loop {
        let received;
        (received, results) = py.detach(move || (results.recv_timeout(SIGNAL_POLL_INTERVAL), results));
        match received {
            Ok(started) => return Ok(started),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the thread that joins the world ended without a result".to_owned();
                return Ok(Err(StartError::Other(ErrorCode::Internal, message)));
            }
        }
    }
}

impl RankStore {
    fn rank_store(&self, py: Python<'_>) -> PyResult<moontide_client::RankStore> {
        self.inner
            .with(|inner| inner.rank_store.clone())
            .map_err(|reason| unusable_error(py, "cache", reason))
    }

    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&moontide_client::RankStore) -> Result<R, StoreError> + Send,
    ) -> PyResult<R> {
        let rank_store = self.rank_store(py)?;
        py.detach(|| call(&rank_store)).map_err(|error| errors::store(py, &error))
    }
}

#[pymethods]
impl RankStore {
    #[new]
    #[pyo3(signature = (path, rank, ranks, memory_bytes, *, device=None, bytes_per_slot=65536, groups=1,
        watermarks=(0.95, 0.85), write_timeout=30.0, timeout=30.0, ca=None, cert=None, key=None, node_cert=None,
        node_key=None, master_cert=None, master_key=None))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        py: Python<'_>,
        path: PathBuf,
        rank: u32,
        ranks: u32,
        memory_bytes: u64,
        device: Option<&str>,
        bytes_per_slot: u64,
        groups: u16,
        watermarks: (f64, f64),
        write_timeout: f64,
        timeout: f64,
        ca: Option<PathBuf>,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        node_cert: Option<PathBuf>,
        node_key: Option<PathBuf>,
        master_cert: Option<PathBuf>,
        master_key: Option<PathBuf>,
    ) -> PyResult<RankStore> {
        let page = HugePages::Auto.page_bytes();
        let memory_bytes = memory_bytes.checked_next_multiple_of(page).filter(|&bytes| bytes < 1 << 46);
        let Some(memory_bytes) = memory_bytes.filter(|_| bytes_per_slot > 0) else {
            return Err(errors::argument("memory_bytes must be below 2⁴⁶, and bytes_per_slot above 0"));
        };
        let timeout = seconds("timeout", timeout)?;
        let rank = Rank(rank);
        let write_timeout = seconds("write_timeout", write_timeout)?;
        let client = StoreConfig {
            ca: path_of(ca, "MOONTIDE_CA"),
            cert: path_of(cert, "MOONTIDE_CERT"),
            key: path_of(key, "MOONTIDE_KEY"),
            ..store_config(None, None)?
        };
        let node = Pair {
            cert: path_of(node_cert, "MOONTIDE_NODE_CERT"),
            key: path_of(node_key, "MOONTIDE_NODE_KEY"),
        };
        let master = Pair {
            cert: path_of(master_cert, "MOONTIDE_MASTER_CERT"),
            key: path_of(master_key, "MOONTIDE_MASTER_KEY"),
        };
        let certificates = Certificates { node, master }.check(&client, rank)?;
        let settings = Settings {
            path,
            rank,
            ranks,
            memory_bytes,
            device: device.map(device_of).transpose()?,
            bytes_per_slot,
            groups,
            watermarks,
            write_timeout,
            timeout,
            client,
            certificates,
        };
        let (inner, master) = start_interruptibly(py, settings)?.map_err(|error| error.raise(py))?;
        Ok(RankStore { inner: ProcessLocal::new(inner), rank: rank.0, ranks, master })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Address of the master on rank 0. Any store can connect to it.
    #[getter]
    fn master(&self) -> &str {
        &self.master
    }

    /// Base addresses of the ranks' record regions in this process.
    #[getter]
    fn bases(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        Ok(self.rank_store(py)?.bases())
    }

    /// Returns used, draining and total bytes of this rank's memory.
    fn usage(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let node = self.inner.with(|inner| Arc::clone(&inner.node));
        Ok(node.map_err(|reason| unusable_error(py, "cache", reason))?.usage())
    }

    /// Returns the rank of a node. `node` is a node id in the format of the command line.
    fn rank_of(&self, py: Python<'_>, node: &str) -> PyResult<Option<u32>> {
        let rank_store = self.rank_store(py)?;
        let node: Option<NodeId> = node.parse().ok();
        Ok(node.and_then(|node| rank_store.rank_of(node)).map(|rank| rank.0))
    }

    #[pyo3(signature = (name, bytes, page_bytes, owner=None))]
    fn open_for_write(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        bytes: u64,
        page_bytes: u64,
        owner: Option<u32>,
    ) -> PyResult<PushWriter> {
        let name = key(name)?;
        let push = self.call(py, |store| store.open_for_write(name, bytes, page_bytes, owner.map(Rank)))?;
        let (ticket, address) = (push.ticket(), push.address().unwrap_or(0));
        Ok(PushWriter { push: ProcessLocal::new(Arc::new(push)), ticket, address })
    }

    /// Returns a complete object, or None if there is none. Its memory stays valid until it is released.
    fn find(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        page_bytes: u64,
    ) -> PyResult<Option<PendingRecord>> {
        let name = key(name)?;
        Ok(self.call(py, |store| store.find(name, page_bytes))?.map(PendingRecord::new))
    }

    /// Opens a record that another rank writes. Its memory is not reused until it is released. Returns None if the
    /// record no longer exists.
    fn open_for_read(&self, py: Python<'_>, ticket: Words) -> PyResult<Option<PendingRecord>> {
        let ticket = ticket_of(ticket)?;
        Ok(self.call(py, |store| store.open_for_read(ticket))?.map(PendingRecord::new))
    }

    /// Allocates a ledger cell with which kernels of this process pin records in the memory of a rank.
    fn kernel_cell(&self, py: Python<'_>, rank: u32) -> PyResult<KernelCell> {
        let cell = self.call(py, |store| store.kernel_cell(Rank(rank)))?;
        let address = cell.address();
        Ok(KernelCell { held: ProcessLocal::new(cell), address })
    }

    /// Returns the value that a kernel writes to a cell to pin the slot of a record.
    #[staticmethod]
    fn slot_ref(ticket: Words) -> PyResult<u64> {
        let ticket = ticket_of(ticket)?;
        Ok(DeviceKernelCell::name(ticket.segment, ticket.slot))
    }

    /// Shuts the node down, and on rank 0 the master. Further calls of close() do nothing.
    fn close(&self, py: Python<'_>) {
        let inner = self.inner.take();
        py.detach(|| drop(inner));
    }
}

/// Writer of a record.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct PushWriter {
    push: ProcessLocal<Arc<ClientPushWriter>>,
    ticket: Ticket,
    address: u64,
}

impl PushWriter {
    fn push(&self, py: Python<'_>) -> PyResult<Arc<ClientPushWriter>> {
        self.push.with(Arc::clone).map_err(|reason| unusable_error(py, "plan", reason))
    }
}

#[pymethods]
impl PushWriter {
    /// Ticket with which other ranks open the record.
    #[getter]
    fn ticket(&self) -> Words {
        self.ticket.words()
    }

    /// Address of the payload in this process.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        self.push(py).map(|_| self.address)
    }

    /// Address of the record's header word for kernels of this process; None if the device cannot access it.
    #[getter]
    fn word_address(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let push = self.push(py)?;
        py.detach(|| push.word_address()).map_err(|error| errors::store(py, &error))
    }

    /// Seconds until the reservation expires.
    #[getter]
    fn seconds_left(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.push(py)?.expires_at().saturating_duration_since(Instant::now()).as_secs_f64())
    }

    /// Whether all pages are written.
    #[getter]
    fn complete(&self, py: Python<'_>) -> PyResult<bool> {
        let push = self.push(py)?;
        let progress = py.detach(|| push.progress()).map_err(|error| errors::store(py, &error))?;
        Ok(progress == RecordProgress::Complete)
    }

    /// Writes all pages from memory of this process.
    fn write(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (push, source) = (self.push(py)?, Source::of(value)?);
        let bytes = source.bytes();
        if bytes.len() as u64 != self.ticket.bytes {
            let message = format!("value has {} bytes, the plan has {}", bytes.len(), self.ticket.bytes);
            return Err(errors::argument(message));
        }
        let written = py.detach(|| {
            let pages = bytes.chunks(self.ticket.page_bytes as usize);
            (0..).zip(pages).try_for_each(|(page, bytes)| push.write_page(page, bytes).map(drop))
        });
        written.map_err(|error| errors::store(py, &error))
    }

    /// Writes one page from memory of this process.
    fn write_page(&self, py: Python<'_>, page: u32, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (push, source) = (self.push(py)?, Source::of(value)?);
        let bytes = source.bytes();
        py.detach(|| push.write_page(page, bytes)).map(drop).map_err(|error| errors::store(py, &error))
    }

    /// Writes all pages from device memory at `address` of this process. First waits for kernels that this process runs
    /// on the device.
    fn write_from_device(&self, py: Python<'_>, address: u64, bytes: u64) -> PyResult<()> {
        let (push, ticket) = (self.push(py)?, self.ticket);
        if bytes != ticket.bytes {
            return Err(errors::argument(format!("value has {bytes} bytes, the plan has {}", ticket.bytes)));
        }
        let written = py.detach(|| {
            push.synchronize()?;
            (0..ticket.pages()).try_for_each(|page| {
                let at = u64::from(page) * ticket.page_bytes;
                let len = ticket.page_bytes.min(bytes - at);
                // SAFETY: the caller guarantees that the bytes are in device memory, as for arguments of kernels.
                unsafe { push.write_page_from_device(page, address + at, len) }.map(drop)
            })
        });
        written.map_err(|error| errors::store(py, &error))
    }

    /// Commits the record as an object of the store. Returns False if it was committed or aborted before.
    fn commit(&self, py: Python<'_>) -> PyResult<bool> {
        // An incomplete record stays open: kernels may still write.
        let progress = match self.push.with(Arc::clone) {
            Ok(push) => py.detach(|| push.progress()).map_err(|error| errors::store(py, &error))?,
            Err(Unusable::Closed) => return Ok(false),
            Err(reason) => return Err(unusable_error(py, "plan", reason)),
        };
        if progress != RecordProgress::Complete {
            let message = "not all pages are written; wait for the kernels that write them";
            return Err(errors::other(py, ErrorCode::NotReady, message));
        }
        let push = loop {
            match self.push.take_if(|push| Arc::strong_count(push) == 1) {
                Ok(Some(push)) => {
                    break Arc::into_inner(push).expect("the only reference, and no new one can be made");
                }
                // All pages are written, so a call that still has a reference returns soon: it polls the progress, or
                // its page was rejected.
                Ok(None) => {
                    py.check_signals()?;
                    py.detach(|| std::thread::sleep(Duration::from_micros(20)));
                }
                Err(Unusable::Closed) => return Ok(false),
                Err(reason) => return Err(unusable_error(py, "plan", reason)),
            }
        };
        match py.detach(|| push.commit()) {
            Ok(_) => Ok(true),
            Err(PushCommitError::Store(error)) => Err(errors::store(py, &error)),
            Err(PushCommitError::Unknown(push, error)) => {
                py.detach(|| drop(push));
                Err(errors::store(py, &error))
            }
            Err(error @ PushCommitError::Incomplete(_)) => Err(errors::other(py, ErrorCode::NotReady, error)),
        }
    }

    /// Frees the reservation. Does nothing after a commit or another abort.
    fn abort(&self, py: Python<'_>) {
        let push = self.push.take();
        py.detach(|| drop(push));
    }
}

/// Record that this process reads or waits for.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct PendingRecord {
    record: ProcessLocal<Arc<Mutex<ClientPendingRecord>>>,
    ticket: Ticket,
    address: u64,
}

impl PendingRecord {
    fn new(record: ClientPendingRecord) -> PendingRecord {
        let (ticket, address) = (record.ticket(), record.address().unwrap_or(0));
        PendingRecord { record: ProcessLocal::new(Arc::new(Mutex::new(record))), ticket, address }
    }

    fn copied(py: Python<'_>, copied: Result<bool, StoreError>) -> PyResult<()> {
        match copied.map_err(|error| errors::store(py, &error))? {
            true => Ok(()),
            false => Err(errors::other(py, ErrorCode::NotReady, "the record is not complete; wait for it")),
        }
    }
}

#[pymethods]
impl PendingRecord {
    /// Ticket of the record.
    #[getter]
    fn ticket(&self) -> Words {
        self.ticket.words()
    }

    /// Address of the payload in this process.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        self.record.with(|_| self.address).map_err(|reason| unusable_error(py, "record", reason))
    }

    /// Address of the record's header word for kernels of this process; None if the device cannot access it.
    #[getter]
    fn word_address(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let record = self.record.with(Arc::clone).map_err(|reason| unusable_error(py, "record", reason))?;
        py.detach(|| record.lock().word_address()).map_err(|error| errors::store(py, &error))
    }

    /// "complete", "pending", or "gone".
    #[getter]
    fn progress(&self, py: Python<'_>) -> PyResult<&'static str> {
        let record = self.record.with(Arc::clone).map_err(|reason| unusable_error(py, "record", reason))?;
        let progress = py.detach(|| record.lock().progress());
        Ok(match progress.map_err(|error| errors::store(py, &error))? {
            RecordProgress::Complete => "complete",
            RecordProgress::Pending => "pending",
            RecordProgress::Gone => "gone",
        })
    }

    /// Copies the bytes of a complete record.
    fn copy_into(&self, py: Python<'_>, target: &Bound<'_, PyAny>) -> PyResult<()> {
        let record = self.record.with(Arc::clone).map_err(|reason| unusable_error(py, "record", reason))?;
        let mut target = Target::of(target)?;
        let space = target.bytes();
        if space.len() as u64 != self.ticket.bytes {
            let message = format!("buffer has {} bytes, the record has {}", space.len(), self.ticket.bytes);
            return Err(errors::argument(message));
        }
        let copied = py.detach(|| record.lock().copy_into(space));
        PendingRecord::copied(py, copied)
    }

    /// Copies the bytes of a complete record to device memory at `address` of this process.
    fn copy_to_device(&self, py: Python<'_>, address: u64, bytes: u64) -> PyResult<()> {
        let record = self.record.with(Arc::clone).map_err(|reason| unusable_error(py, "record", reason))?;
        if bytes != self.ticket.bytes {
            let message = format!("buffer has {bytes} bytes, the record has {}", self.ticket.bytes);
            return Err(errors::argument(message));
        }
        // SAFETY: the caller guarantees that the target is device memory of this size, as for arguments of kernels.
        let copied = py.detach(|| unsafe { record.lock().copy_to_device(address) });
        PendingRecord::copied(py, copied)
    }

    /// Releases the record. Further calls of release() do nothing.
    fn release(&self, py: Python<'_>) {
        let record = self.record.take();
        py.detach(|| drop(record));
    }
}

/// Ledger cell for kernels.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct KernelCell {
    held: ProcessLocal<DeviceKernelCell>,
    address: u64,
}

#[pymethods]
impl KernelCell {
    /// Address of the cell in this process.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        self.held.with(|_| self.address).map_err(|reason| unusable_error(py, "cell", reason))
    }

    /// Waits for kernels of this process, then frees the cell.
    fn close(&self, py: Python<'_>) {
        let held = self.held.take();
        py.detach(|| drop(held));
    }
}
