//! Ranks that write into each other's memory, for Python: [`moontide_client::Hop`], with a node in this process, and on rank
//! 0 a master. `moontide.nano` is what people call; in here are addresses, for kernels.
//!
//! Invariant: what a forked child inherits of all this it neither uses nor drops.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use moontide_client::{
    Awaited, Cut, HopError, NotCommitted, Progress, Push, SightCell, Store, StoreConfig, StoreError, Ticket,
};
use moontide_heap::{
    DeviceConfig, DeviceWorld, DeviceWorldConfig, DeviceWorldError, Driver, HugePages, Rank, Vendor, World,
    WorldConfig, WorldShape,
};
use moontide_master::{MasterConfig, Server};
use moontide_node::{LentMemory, Node, NodeConfig};
use moontide_types::ErrorCode;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::arguments::{key, seconds};
use crate::array::{Source, Target};
use crate::errors;
use crate::process::{Gone, OfProcess, gone};

/// Where rank 0 writes its master's address into the page behind its records: a length, then the bytes, eight a word.
const ADDRESS_AT: u64 = 512;
const ADDRESS_WORDS: u64 = 9;

/// How often a wait looks whether somebody wants to end it.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(50);

/// A record's place as Python has it: rank, segment, generation, slot, epoch, payload_offset, bytes, page_bytes, flag_offset.
type Words = [u64; 9];

fn ticket_of(words: Words) -> PyResult<Ticket> {
    Ticket::from_words(words).ok_or_else(|| errors::argument("these are not a ticket's numbers"))
}

/// A rank of a world whose memory all of them write and read: the ground of ``moontide.nano.NanoKVCache``.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct Hop {
    inside: OfProcess<Inside>,
    rank: u32,
    ranks: u32,
    master: String,
}

/// Dropped in this order: the node before the master that it tells of its end.
#[derive(Debug)]
struct Inside {
    hop: moontide_client::Hop,
    node: Arc<Node>,
    _server: Option<Server>,
}

/// Why a rank does not come up.
enum Failed {
    World(moontide_heap::WorldError),
    Device(DeviceWorldError),
    Hop(HopError),
    Other(ErrorCode, String),
}

impl From<HopError> for Failed {
    fn from(error: HopError) -> Failed {
        Failed::Hop(error)
    }
}

impl Failed {
    fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Failed::World(error) => errors::world(py, &error),
            Failed::Device(DeviceWorldError::Wait(error)) | Failed::Hop(HopError::Wait(error)) => {
                errors::join(py, error)
            }
            Failed::Device(error) => errors::other(py, ErrorCode::DeviceError, error),
            Failed::Hop(HopError::Store(error)) => errors::store(py, &error),
            Failed::Hop(error) => errors::argument(error),
            Failed::Other(code, message) => errors::other(py, code, message),
        }
    }
}

/// What a rank is made of.
struct Settings {
    path: PathBuf,
    rank: Rank,
    ranks: u32,
    memory_bytes: u64,
    /// Where the records are to be, if not in memory of the host.
    device: Option<(Vendor, u32)>,
    slot_bytes: u64,
    groups: u16,
    watermarks: (f64, f64),
    write_timeout: Duration,
    timeout: Duration,
}

/// `cuda`, `cuda:1`, `hip:0`: a vendor and a device's number in this process.
fn device_of(name: &str) -> PyResult<(Vendor, u32)> {
    let (vendor, number) = name.split_once(':').unwrap_or((name, "0"));
    let vendor = match vendor {
        "cuda" => Some(Vendor::Cuda),
        "hip" => Some(Vendor::Hip),
        _ => None,
    };
    let found = vendor.zip(number.parse().ok());
    found.ok_or_else(|| errors::argument(format!("device is 'cuda:N' or 'hip:N', not {name:?}")))
}

/// This rank's part of all ranks' memory on their devices.
fn join_device(
    world: &World,
    path: &Path,
    (vendor, device): (Vendor, u32),
    timeout: Duration,
) -> Result<Arc<DeviceWorld>, Failed> {
    let driver = Driver::load(vendor, None).map_err(|error| Failed::Device(error.into()))?;
    let region = DeviceConfig { device, bytes: world.shape().bytes, peers: &[], sharing: None };
    let config = DeviceWorldConfig { path, region, timeout };
    // SAFETY: as for the world itself.
    unsafe { DeviceWorld::join(world, driver, &config) }.map(Arc::new).map_err(Failed::Device)
}

/// A share in thousandths; what is no share is refused by the master.
fn permille(share: f64) -> u16 {
    (share * 1000.0).round().clamp(0.0, 10_000.0) as u16
}

fn start(settings: Settings) -> Result<(Inside, String), Failed> {
    let Settings { path, rank, ranks, memory_bytes, device, slot_bytes, groups, .. } = settings;
    let Settings { watermarks, write_timeout, timeout, .. } = settings;
    let until = Instant::now() + timeout;
    let shape = WorldShape { ranks, bytes: moontide_client::Hop::region_bytes(memory_bytes, slot_bytes) };
    let config = WorldConfig { path: path.clone(), rank, shape, huge: HugePages::IfAllowed, timeout };
    // SAFETY: who joins by this module keeps to the rules, and that others do is theirs to keep: its docs say so.
    let world = Arc::new(unsafe { World::join(&config) }.map_err(Failed::World)?);
    let device = match device {
        Some(device) => {
            let left = until.saturating_duration_since(Instant::now());
            Some(join_device(&world, &path, device, left)?)
        }
        None => None,
    };
    let beside = "127.0.0.1:0".parse().expect("an address");
    let page = world.words(Rank(0), memory_bytes + ADDRESS_AT, ADDRESS_WORDS);
    let server = match rank {
        Rank(0) => {
            let config = MasterConfig {
                grpc_listen: beside,
                frame_listen: beside,
                admin_listen: beside,
                groups,
                reallocate_wait_ms: 0,
                high_permille: permille(watermarks.0),
                low_permille: permille(watermarks.1),
                reservation_ms: write_timeout.as_millis() as u32,
                ..MasterConfig::default()
            };
            let server = Server::start(config)
                .map_err(|error| Failed::Other(ErrorCode::InvalidArgument, error.to_string()))?;
            let address = server.addresses().grpc.to_string();
            for (word, bytes) in page[1..].iter().zip(address.as_bytes().chunks(8)) {
                let mut eight = [0; 8];
                eight[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
            }
            // Release: who sees the length sees the rest.
            page[0].store(address.len() as u64, Ordering::Release);
            Some(server)
        }
        _ => None,
    };
    let len = loop {
        match page[0].load(Ordering::Acquire) {
            0 if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            0 => {
                let message = "rank 0 has not started its master in time; look at what it says";
                return Err(Failed::Other(ErrorCode::Unreachable, message.to_owned()));
            }
            len => break len as usize,
        }
    };
    let bytes: Vec<u8> =
        page[1..].iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).take(len).collect();
    let master = String::from_utf8_lossy(&bytes).into_owned();
    // SAFETY: the first bytes of the rank's region are for this alone.
    let memory = unsafe {
        match &device {
            Some(device) => LentMemory::of_device(Arc::clone(&world), Arc::clone(device), 0, memory_bytes),
            None => LentMemory::new(Arc::clone(&world), 0, memory_bytes),
        }
    };
    let config = NodeConfig {
        master: master.clone(),
        memory_bytes,
        slot_bytes,
        listen: vec![beside],
        admin_listen: None,
        ..NodeConfig::default()
    };
    let unreachable = |message: String| Failed::Other(ErrorCode::Unreachable, message);
    let node = Node::start_in(config, memory).map_err(|error| unreachable(error.to_string()))?;
    if !node.wait_until_mounted(until.saturating_duration_since(Instant::now())) {
        return Err(unreachable(format!("the master at {master} has not taken the node in; check its log")));
    }
    let plan = node.segments();
    let own = Cut { node: node.id(), segments: plan.count, segment_bytes: plan.bytes(), slots: plan.slots };
    let store = Store::connect(StoreConfig::new(&*master)).map_err(HopError::Store)?;
    let left = until.saturating_duration_since(Instant::now());
    // SAFETY: as above: the rest of the region is for this alone.
    let hop = unsafe {
        match device {
            Some(device) => {
                moontide_client::Hop::open_on_device(world, device, store, memory_bytes, own, left)
            }
            None => moontide_client::Hop::open(world, store, memory_bytes, own, left),
        }
    }?;
    Ok((Inside { hop, node: Arc::new(node), _server: server }, master))
}

/// As [`start`], but whoever waits for ranks that do not come can give up: what was begun ends by itself then.
fn started(py: Python<'_>, settings: Settings) -> PyResult<Result<(Inside, String), Failed>> {
    let (sender, mut answer) = mpsc::channel();
    let joining = std::thread::Builder::new().name("moontide-join".into());
    // Nobody may wait for it any more.
    joining.spawn(move || drop(sender.send(start(settings)))).map_err(errors::argument)?;
    loop {
        let heard;
        (heard, answer) = py.detach(move || (answer.recv_timeout(LOOK_FOR_SIGNALS), answer));
        match heard {
            Ok(started) => return Ok(started),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the thread that joined has ended without an answer".to_owned();
                return Ok(Err(Failed::Other(ErrorCode::Internal, message)));
            }
        }
    }
}

impl Hop {
    fn hop(&self, py: Python<'_>) -> PyResult<moontide_client::Hop> {
        self.inside.with(|inside| inside.hop.clone()).map_err(|why| gone(py, "cache", why))
    }

    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&moontide_client::Hop) -> Result<R, StoreError> + Send,
    ) -> PyResult<R> {
        let hop = self.hop(py)?;
        py.detach(|| call(&hop)).map_err(|error| errors::store(py, &error))
    }
}

#[pymethods]
impl Hop {
    #[new]
    #[pyo3(signature = (path, rank, ranks, memory_bytes, *, device=None, slot_bytes=65536, groups=1,
        watermarks=(0.95, 0.85), write_timeout=30.0, timeout=30.0))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        py: Python<'_>,
        path: PathBuf,
        rank: u32,
        ranks: u32,
        memory_bytes: u64,
        device: Option<&str>,
        slot_bytes: u64,
        groups: u16,
        watermarks: (f64, f64),
        write_timeout: f64,
        timeout: f64,
    ) -> PyResult<Hop> {
        let page = HugePages::IfAllowed.page_bytes();
        let memory_bytes = memory_bytes.checked_next_multiple_of(page).filter(|&bytes| bytes < 1 << 46);
        let Some(memory_bytes) = memory_bytes.filter(|_| slot_bytes > 0) else {
            return Err(errors::argument("memory_bytes must be below 2⁴⁶, and slot_bytes above 0"));
        };
        let timeout = seconds("timeout", timeout)?;
        let rank = Rank(rank);
        let write_timeout = seconds("write_timeout", write_timeout)?;
        let settings = Settings {
            path,
            rank,
            ranks,
            memory_bytes,
            device: device.map(device_of).transpose()?,
            slot_bytes,
            groups,
            watermarks,
            write_timeout,
            timeout,
        };
        let (inside, master) = started(py, settings)?.map_err(|failed| failed.raise(py))?;
        Ok(Hop { inside: OfProcess::new(inside), rank: rank.0, ranks, master })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.rank
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The address of rank 0's master, to which any store can connect.
    #[getter]
    fn master(&self) -> &str {
        &self.master
    }

    /// Where the ranks' regions with the records lie in this process.
    #[getter]
    fn bases(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        Ok(self.hop(py)?.bases())
    }

    /// Used, being given back, and all bytes of this rank's memory.
    fn usage(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let node = self.inside.with(|inside| Arc::clone(&inside.node));
        Ok(node.map_err(|why| gone(py, "cache", why))?.usage())
    }

    /// Which rank's node this is, by its number as the command line writes it.
    fn rank_of(&self, py: Python<'_>, node: &str) -> PyResult<Option<u32>> {
        let hop = self.hop(py)?;
        let node = u64::from_str_radix(node, 16).ok();
        Ok(node.and_then(|node| hop.rank_of(moontide_types::NodeId(node))).map(|rank| rank.0))
    }

    #[pyo3(signature = (name, bytes, page_bytes, owner=None))]
    fn open_for_write(
        &self,
        py: Python<'_>,
        name: &Bound<'_, PyAny>,
        bytes: u64,
        page_bytes: u64,
        owner: Option<u32>,
    ) -> PyResult<HopPush> {
        let name = key(name)?;
        let push = self.call(py, |hop| hop.open_for_write(name, bytes, page_bytes, owner.map(Rank)))?;
        let (ticket, address) = (push.ticket(), push.address().unwrap_or(0));
        Ok(HopPush { push: OfProcess::new(Arc::new(push)), ticket, address })
    }

    /// A complete object, which stays where it is until it is released; None if there is none.
    fn find(&self, py: Python<'_>, name: &Bound<'_, PyAny>, page_bytes: u64) -> PyResult<Option<HopAwaited>> {
        let name = key(name)?;
        Ok(self.call(py, |hop| hop.find(name, page_bytes))?.map(HopAwaited::new))
    }

    /// What waits for a record, and keeps its memory from being used again; None if it has ended.
    fn expect(&self, py: Python<'_>, ticket: Words) -> PyResult<Option<HopAwaited>> {
        let ticket = ticket_of(ticket)?;
        Ok(self.call(py, |hop| hop.expect(ticket))?.map(HopAwaited::new))
    }

    /// A cell in which kernels of this process name what they read of a rank's memory.
    fn kernel_cell(&self, py: Python<'_>, rank: u32) -> PyResult<HopCell> {
        let cell = self.call(py, |hop| hop.kernel_cell(Rank(rank)))?;
        let address = cell.address();
        Ok(HopCell { held: OfProcess::new(cell), address })
    }

    /// What a kernel writes into a cell to name a record's slot.
    #[staticmethod]
    fn cell_name(ticket: Words) -> PyResult<u64> {
        let ticket = ticket_of(ticket)?;
        Ok(SightCell::name(ticket.segment, ticket.slot))
    }

    /// Ends the node, and on rank 0 the master. A second time it does nothing.
    fn close(&self, py: Python<'_>) {
        let inside = self.inside.take();
        py.detach(|| drop(inside));
    }
}

/// A record that this process writes.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct HopPush {
    push: OfProcess<Arc<Push>>,
    ticket: Ticket,
    address: u64,
}

impl HopPush {
    fn push(&self, py: Python<'_>) -> PyResult<Arc<Push>> {
        self.push.with(Arc::clone).map_err(|why| gone(py, "plan", why))
    }
}

#[pymethods]
impl HopPush {
    /// The numbers by which others wait for it.
    #[getter]
    fn ticket(&self) -> Words {
        self.ticket.words()
    }

    /// Where the bytes go, in this process.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        self.push(py).map(|_| self.address)
    }

    /// Where kernels of this process find the word of the record's header; None if its device cannot see it.
    #[getter]
    fn word_address(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let push = self.push(py)?;
        py.detach(|| push.word_address()).map_err(|error| errors::store(py, &error))
    }

    /// Seconds until the reservation ends.
    #[getter]
    fn seconds_left(&self, py: Python<'_>) -> PyResult<f64> {
        Ok(self.push(py)?.until().saturating_duration_since(Instant::now()).as_secs_f64())
    }

    /// Whether all pages are there.
    #[getter]
    fn complete(&self, py: Python<'_>) -> PyResult<bool> {
        let push = self.push(py)?;
        let progress = py.detach(|| push.progress()).map_err(|error| errors::store(py, &error))?;
        Ok(progress == Progress::Complete)
    }

    /// Writes all pages, from this process.
    fn write(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (push, source) = (self.push(py)?, Source::of(value)?);
        let bytes = source.bytes();
        if bytes.len() as u64 != self.ticket.bytes {
            let message = format!("{} bytes for a plan of {}", bytes.len(), self.ticket.bytes);
            return Err(errors::argument(message));
        }
        let written = py.detach(|| {
            let pages = bytes.chunks(self.ticket.page_bytes as usize);
            (0..).zip(pages).try_for_each(|(page, bytes)| push.write_page(page, bytes).map(drop))
        });
        written.map_err(|error| errors::store(py, &error))
    }

    /// Writes one page, from this process.
    fn write_page(&self, py: Python<'_>, page: u32, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (push, source) = (self.push(py)?, Source::of(value)?);
        let bytes = source.bytes();
        py.detach(|| push.write_page(page, bytes)).map(drop).map_err(|error| errors::store(py, &error))
    }

    /// Writes all pages from memory of a device, at this address of this process. Waits for kernels that this process has
    /// under way there.
    fn write_from_device(&self, py: Python<'_>, address: u64, bytes: u64) -> PyResult<()> {
        let (push, ticket) = (self.push(py)?, self.ticket);
        if bytes != ticket.bytes {
            return Err(errors::argument(format!("{bytes} bytes for a plan of {}", ticket.bytes)));
        }
        let written = py.detach(|| {
            push.settle()?;
            (0..ticket.pages()).try_for_each(|page| {
                let at = u64::from(page) * ticket.page_bytes;
                let len = ticket.page_bytes.min(bytes - at);
                // SAFETY: the caller has them in memory of a device, as kernels' arguments are.
                unsafe { push.write_page_from_device(page, address + at, len) }.map(drop)
            })
        });
        written.map_err(|error| errors::store(py, &error))
    }

    /// Makes it an object of the store. `False` if that was done before, or the plan was given back.
    fn commit(&self, py: Python<'_>) -> PyResult<bool> {
        // One that is not complete is kept: kernels may still be writing.
        let progress = match self.push.with(Arc::clone) {
            Ok(push) => py.detach(|| push.progress()).map_err(|error| errors::store(py, &error))?,
            Err(Gone::Closed) => return Ok(false),
            Err(why) => return Err(gone(py, "plan", why)),
        };
        if progress != Progress::Complete {
            let message = "not all pages are there; wait for the kernels that write them";
            return Err(errors::other(py, ErrorCode::NotReady, message));
        }
        let push = loop {
            match self.push.take_if(|push| Arc::strong_count(push) == 1) {
                Ok(Some(push)) => {
                    break Arc::into_inner(push).expect("nobody else has it, or gets it any more");
                }
                // All pages are there, so whoever has it is about to return: it looks, or was refused a page.
                Ok(None) => {
                    py.check_signals()?;
                    py.detach(|| std::thread::sleep(Duration::from_micros(20)));
                }
                Err(Gone::Closed) => return Ok(false),
                Err(why) => return Err(gone(py, "plan", why)),
            }
        };
        match py.detach(|| push.commit()) {
            Ok(_) => Ok(true),
            Err(NotCommitted::Store(error)) => Err(errors::store(py, &error)),
            Err(NotCommitted::Unknown(push, error)) => {
                py.detach(|| drop(push));
                Err(errors::store(py, &error))
            }
            Err(error @ NotCommitted::Incomplete(_)) => Err(errors::other(py, ErrorCode::NotReady, error)),
        }
    }

    /// Gives the place back. A second time, or after a commit, it does nothing.
    fn abort(&self, py: Python<'_>) {
        let push = self.push.take();
        py.detach(|| drop(push));
    }
}

/// A record that this process waits for.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct HopAwaited {
    awaited: OfProcess<Arc<Mutex<Awaited>>>,
    ticket: Ticket,
    address: u64,
}

impl HopAwaited {
    fn new(awaited: Awaited) -> HopAwaited {
        let (ticket, address) = (awaited.ticket(), awaited.address().unwrap_or(0));
        HopAwaited { awaited: OfProcess::new(Arc::new(Mutex::new(awaited))), ticket, address }
    }

    fn copied(py: Python<'_>, copied: Result<bool, StoreError>) -> PyResult<()> {
        match copied.map_err(|error| errors::store(py, &error))? {
            true => Ok(()),
            false => Err(errors::other(py, ErrorCode::NotReady, "the record is not complete; wait for it")),
        }
    }
}

#[pymethods]
impl HopAwaited {
    /// The numbers by which it was found.
    #[getter]
    fn ticket(&self) -> Words {
        self.ticket.words()
    }

    /// Where the bytes are, in this process.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        self.awaited.with(|_| self.address).map_err(|why| gone(py, "record", why))
    }

    /// Where kernels of this process find the word of the record's header; None if its device cannot see it.
    #[getter]
    fn word_address(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let awaited = self.awaited.with(Arc::clone).map_err(|why| gone(py, "record", why))?;
        py.detach(|| awaited.lock().word_address()).map_err(|error| errors::store(py, &error))
    }

    /// "complete", "not yet", or "gone".
    #[getter]
    fn progress(&self, py: Python<'_>) -> PyResult<&'static str> {
        let awaited = self.awaited.with(Arc::clone).map_err(|why| gone(py, "record", why))?;
        let progress = py.detach(|| awaited.lock().progress());
        Ok(match progress.map_err(|error| errors::store(py, &error))? {
            Progress::Complete => "complete",
            Progress::NotYet => "not yet",
            Progress::Gone => "gone",
        })
    }

    /// Copies the bytes of a record that is complete.
    fn copy_into(&self, py: Python<'_>, target: &Bound<'_, PyAny>) -> PyResult<()> {
        let awaited = self.awaited.with(Arc::clone).map_err(|why| gone(py, "record", why))?;
        let mut target = Target::of(target)?;
        let space = target.bytes();
        if space.len() as u64 != self.ticket.bytes {
            let message = format!("{} bytes of room for a record of {}", space.len(), self.ticket.bytes);
            return Err(errors::argument(message));
        }
        let copied = py.detach(|| awaited.lock().copy_into(space));
        HopAwaited::copied(py, copied)
    }

    /// Copies the bytes of a record that is complete into memory of a device, at this address of this process.
    fn copy_to_device(&self, py: Python<'_>, address: u64, bytes: u64) -> PyResult<()> {
        let awaited = self.awaited.with(Arc::clone).map_err(|why| gone(py, "record", why))?;
        if bytes != self.ticket.bytes {
            let message = format!("{bytes} bytes of room for a record of {}", self.ticket.bytes);
            return Err(errors::argument(message));
        }
        // SAFETY: the caller has room for them in memory of a device, as kernels' arguments are.
        let copied = py.detach(|| unsafe { awaited.lock().copy_to_device(address) });
        HopAwaited::copied(py, copied)
    }

    /// Lets go of it. A second time it does nothing.
    fn release(&self, py: Python<'_>) {
        let awaited = self.awaited.take();
        py.detach(|| drop(awaited));
    }
}

/// A cell for kernels.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct HopCell {
    held: OfProcess<SightCell>,
    address: u64,
}

#[pymethods]
impl HopCell {
    /// Where it is, in this process.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        self.held.with(|_| self.address).map_err(|why| gone(py, "cell", why))
    }

    /// Gives it back, when kernels of this process have ended.
    fn close(&self, py: Python<'_>) {
        let held = self.held.take();
        py.detach(|| drop(held));
    }
}
