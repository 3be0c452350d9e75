//! [`DeviceWorld`]: symmetric heap in devices' memory. Every rank of a [`World`] owns a region on its device, all of
//! the same length, and all ranks map all regions.
//!
//! ```text
//!   rank r                                              every other rank
//!     creates its region, listens at PATH.device-r
//!     │── connects ────────────────────────────────────▶│  checks: same user
//!     │◀── DeviceExport, with the descriptor ───────────│  × ranks − 1
//!     barrier of the world: every rank has all regions; the listeners close
//! ```
//!
//! A location is `(rank, offset)`. [`DeviceWorld::bases`] is the table with which kernels translate:
//! `ptr − bases[me] + bases[peer]`. Barriers and liveness belong to the world: words that host processors modify are in
//! host memory (see [`AtomicDomain`](super::AtomicDomain)).
//!
//! Rejoining is not supported. Memory shared by descriptor outlives a rank that exited for the ranks that map it, but
//! its successor has none of it; the ranks drop their device worlds and join again.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_heap::{DeviceMemory, ShmError, ShmListener};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::context::Context;
use super::driver::Driver;
use super::error::DeviceError;
use super::export::DeviceExport;
use super::host_registration::{HostAccess, HostRegistration, can_be_read_only};
use super::region::{DeviceConfig, DeviceRegion, HandleType, ordinal};
use crate::barrier::WaitError;
use crate::ranks::{Rank, RankSet};
use crate::world::World;

/// Interval at which a rank retries to connect to a peer, and checks whether its own listener may close.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Reason why the ranks of a world cannot share devices' memory.
#[derive(Debug, thiserror::Error)]
pub enum DeviceWorldError {
    /// This rank's own region could not be created.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A peer's region could not be imported.
    #[error("region of rank {rank}: {source}")]
    Peer {
        /// Rank of the peer.
        rank: Rank,
        /// Reason of the failure.
        source: DeviceError,
    },
    /// A peer's region has another length.
    #[error(
        "region of rank {rank} has {theirs} bytes, ours {ours}; use the same length and device model in all ranks"
    )]
    Length {
        /// Rank of the peer.
        rank: Rank,
        /// Length of the peer's region in bytes.
        theirs: u64,
        /// Length of the own region in bytes.
        ours: u64,
    },
    /// The listener for the peers could not be bound.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// Other ranks did not arrive in time.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// Configuration of one rank of a device world.
#[derive(Clone, Copy, Debug)]
pub struct DeviceWorldConfig<'a> {
    /// Path of the world: the listeners' sockets are beside its socket.
    pub path: &'a Path,
    /// Configuration of this rank's region. The length is the same for all ranks.
    pub region: DeviceConfig<'a>,
    /// Maximum time to wait for the other ranks.
    pub timeout: Duration,
}

/// A device world as one rank uses it. Dropping does not synchronize with the other ranks: see
/// [`DeviceWorld::leave`].
#[derive(Debug)]
pub struct DeviceWorld {
    /// By rank; empty after [`DeviceWorld::leave`].
    regions: Vec<DeviceRegion>,
    bases: Vec<u64>,
    me: Rank,
    driver: Driver,
    device: u32,
}

impl DeviceWorld {
    /// Creates this rank's region and maps all others. All ranks of the world must join at the same time.
    ///
    /// # Safety
    /// As [`World::join`]: all ranks write each other's memory, and must follow the rules of the world's user.
    pub unsafe fn join(
        world: &World,
        driver: Driver,
        config: &DeviceWorldConfig<'_>,
    ) -> Result<DeviceWorld, DeviceWorldError> {
        let DeviceWorldConfig { path, region, timeout } = config;
        let (me, started) = (world.rank(), Instant::now());
        let own = DeviceRegion::create(driver, region)?;
        let address = socket_path(path, me);
        // SAFETY: only ranks of the world connect, for which the caller vouches.
        let listener = unsafe { ShmListener::bind(&address, &[], Duration::ZERO) }?;
        let is_over = AtomicBool::new(false);
        let (joined, was_exported) = std::thread::scope(|scope| {
            let server = scope.spawn(|| serve(&listener, &own, &is_over));
            let joined = collect(world, driver, config, own.len(), started).and_then(|others| {
                world.barrier(timeout.saturating_sub(started.elapsed()))?;
                Ok(others)
            });
            is_over.store(true, Ordering::Relaxed);
            (joined, server.join().unwrap_or(true))
        });
        let _ = std::fs::remove_file(&address);
        let mut regions = match joined {
            Ok(regions) => regions,
            Err(error) => {
                if was_exported {
                    release_own_region(own);
                }
                return Err(error);
            }
        };
        regions.insert(me.index(), own);
        let bases = regions.iter().map(DeviceRegion::address).collect();
        Ok(DeviceWorld { regions, bases, me, driver, device: region.device })
    }

    /// Frees everything, the own region after all ranks have closed it. Dropping frees the same without waiting for
    /// them, except for an own region that is shared by IPC handle: it remains until this process exits.
    pub fn leave(mut self, world: &World, timeout: Duration) -> Result<(), WaitError> {
        let mut others = std::mem::take(&mut self.regions);
        let own = others.remove(self.me.index());
        drop(others);
        let result = world.barrier(timeout).map(drop);
        if result.is_err() {
            release_own_region(own);
        }
        result
    }

    /// Registers host memory, so that this rank's device can access it.
    ///
    /// # Safety
    /// As [`HostRegistration::open`].
    pub unsafe fn window(
        &self,
        at: NonNull<u8>,
        len: usize,
        access: HostAccess,
    ) -> Result<HostRegistration, DeviceError> {
        // SAFETY: guaranteed by the caller.
        unsafe { HostRegistration::open(self.driver, self.device, at, len, access) }
    }

    /// Returns whether this rank's device can access host memory that this process itself maps read-only, such as
    /// headers of records. AMD devices cannot.
    pub fn can_show_read_only(&self) -> Result<bool, DeviceError> {
        can_be_read_only(Context::retain(self.driver, ordinal(self.device))?.current())
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// Returns the addresses of the regions for the devices of this process, by rank.
    pub fn bases(&self) -> &[u64] {
        &self.bases
    }

    /// Returns a rank's region.
    pub fn region(&self, rank: Rank) -> &DeviceRegion {
        &self.regions[rank.index()]
    }

    /// Translates an address in the own region to the same offset of a peer's.
    ///
    /// # Panics
    /// If `address` is not in this rank's region.
    pub fn translate(&self, address: u64, peer: Rank) -> u64 {
        let offset = address.checked_sub(self.bases[self.me.index()]).expect("an address in the own region");
        assert!(offset < self.regions[self.me.index()].len(), "an address in the own region");
        self.bases[peer.index()] + offset
    }
}

/// The own region. Its bytes are the payload of a node's segments: see [`DeviceSlice`](moontide_heap::DeviceSlice).
impl DeviceMemory for DeviceWorld {
    fn bytes(&self) -> u64 {
        self.region(self.me).len()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.region(self.me).read(offset, into).map_err(io::Error::other)
    }
}

impl Drop for DeviceWorld {
    fn drop(&mut self) {
        // `leave` has removed them.
        if self.me.index() < self.regions.len() {
            release_own_region(self.regions.remove(self.me.index()));
        }
    }
}

/// Frees an own region that other ranks may still map. One shared by handle would be freed while they use it, which
/// is undefined according to the vendors: it remains until this process exits.
fn release_own_region(own: DeviceRegion) {
    match own.sharing() {
        HandleType::PosixFd => drop(own),
        HandleType::Ipc => std::mem::forget(own),
    }
}

fn socket_path(path: &Path, rank: Rank) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".device-{}", rank.0));
    PathBuf::from(name)
}

/// Sends the own region to all processes of the same user that connect. Returns whether any process got it.
fn serve(listener: &ShmListener, own: &DeviceRegion, is_over: &AtomicBool) -> bool {
    let mut was_exported = false;
    while !is_over.load(Ordering::Relaxed) {
        let socket = match listener.accept_timeout(CONNECT_RETRY_INTERVAL) {
            Ok(Some(socket)) => socket,
            Ok(None) => continue,
            Err(_) => {
                // Possibly out of descriptors, which may be temporary.
                std::thread::sleep(CONNECT_RETRY_INTERVAL);
                continue;
            }
        };
        let is_same_user =
            sockopt::socket_peercred(&socket).is_ok_and(|peer| peer.uid == rustix::process::getuid());
        if is_same_user {
            // SAFETY: sent to a rank of the world, for which the caller of `join` vouches. A rank that closed the
            // connection gets an error of its own.
            was_exported |= unsafe { own.export() }.and_then(|export| export.send(&socket)).is_ok();
        }
    }
    was_exported
}

/// Imports the regions of all other ranks, by rank.
fn collect(
    world: &World,
    driver: Driver,
    config: &DeviceWorldConfig<'_>,
    ours: u64,
    started: Instant,
) -> Result<Vec<DeviceRegion>, DeviceWorldError> {
    let mut regions = Vec::new();
    for rank in RankSet::first(world.shape().ranks as usize).iter().filter(|&rank| rank != world.rank()) {
        let peer = |source| DeviceWorldError::Peer { rank, source };
        let socket =
            connect_with_retry(&socket_path(config.path, rank), started, config.timeout).map_err(peer)?;
        let export = DeviceExport::receive(&socket).map_err(peer)?;
        if export.len != ours {
            return Err(DeviceWorldError::Length { rank, theirs: export.len, ours });
        }
        regions.push(DeviceRegion::import(driver, config.region.device, export).map_err(peer)?);
    }
    Ok(regions)
}

/// Connects to a peer, which may not be listening yet.
fn connect_with_retry(path: &Path, started: Instant, timeout: Duration) -> Result<OwnedFd, DeviceError> {
    let system = |what| move |source| DeviceError::System { what, source };
    let address = SocketAddrUnix::new(path).map_err(system("socket path (at most 107 bytes)"))?;
    loop {
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
            .map_err(system("create a socket"))?;
        let left = timeout.saturating_sub(started.elapsed()).max(CONNECT_RETRY_INTERVAL);
        sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(left))
            .map_err(system("set a socket timeout"))?;
        match retry_on_intr(|| rustix::net::connect(&socket, &address)) {
            Ok(()) => return Ok(socket),
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) if started.elapsed() < timeout => {
                std::thread::sleep(CONNECT_RETRY_INTERVAL);
            }
            Err(source) => return Err(system("connect (did it join with a device, too?)")(source)),
        }
    }
}
