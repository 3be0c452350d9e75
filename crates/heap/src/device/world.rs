//! [`DeviceWorld`]: the symmetric heap in devices' memory. Every rank of a [`World`] owns a region on its device, all as
//! long as each other, and all map all.
//!
//! ```text
//!   rank r                                              every other rank
//!     makes its region, opens a door at PATH.device-r
//!     │── connects ────────────────────────────────────▶│  same user?
//!     │◀── DeviceOffer, with the descriptor ────────────│  × ranks − 1
//!     barrier of the world: everyone has everything; the doors close
//! ```
//!
//! A place is `(rank, offset)`. [`DeviceWorld::bases`] is the table that kernels translate by:
//! `ptr − bases[me] + bases[peer]`. Barriers, and who is alive, are the world's: words that processors modify stay in memory
//! of the host (see [`AtomicDomain`](super::AtomicDomain)).
//!
//! Not here: a rank that comes back. Memory shared by descriptor outlives a rank that died for those who map it, but a
//! successor has none of it; the ranks drop their device worlds and join anew.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::context::Context;
use super::driver::Driver;
use super::error::DeviceError;
use super::offer::DeviceOffer;
use super::region::{DeviceConfig, DeviceRegion, Sharing, ordinal};
use super::window::{HostWindow, WindowAccess, can_be_read_only};
use crate::phase::WaitError;
use crate::ranks::{Rank, RankSet};
use crate::shm::{Door, DoorError, World};

/// How often a rank knocks while a peer has not opened yet, and looks whether its own door may close.
const KNOCK_EVERY: Duration = Duration::from_millis(5);

/// Why the ranks of a world do not share devices' memory.
#[derive(Debug, thiserror::Error)]
pub enum DeviceWorldError {
    /// This rank's own region could not be made.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A peer's region could not be had.
    #[error("the region of rank {rank}: {source}")]
    Peer {
        /// Whose.
        rank: Rank,
        /// Why not.
        source: DeviceError,
    },
    /// A peer's region has another length.
    #[error(
        "the region of rank {rank} has {theirs} bytes, ours {ours}; give all ranks the same length and devices alike"
    )]
    Length {
        /// Whose.
        rank: Rank,
        /// Its length.
        theirs: u64,
        /// Ours.
        ours: u64,
    },
    /// The door for the peers could not be opened.
    #[error(transparent)]
    Door(#[from] DoorError),
    /// The others did not come.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// How to join.
#[derive(Clone, Copy, Debug)]
pub struct DeviceWorldConfig<'a> {
    /// As of the world: the doors stand beside its socket.
    pub path: &'a Path,
    /// This rank's region. The length is the same for all ranks.
    pub region: DeviceConfig<'a>,
    /// How long to wait for the others.
    pub timeout: Duration,
}

/// A rank's place in it. Dropping asks nobody: see [`DeviceWorld::leave`].
#[derive(Debug)]
pub struct DeviceWorld {
    /// By rank; none once they were given back.
    regions: Vec<DeviceRegion>,
    bases: Vec<u64>,
    me: Rank,
    driver: Driver,
    device: u32,
}

impl DeviceWorld {
    /// Makes this rank's region and maps everyone's. All ranks of the world join at the same time.
    ///
    /// # Safety
    /// As [`World::join`]: all ranks write each other's memory, and must keep to the rules of whoever uses it.
    pub unsafe fn join(
        world: &World,
        driver: Driver,
        config: &DeviceWorldConfig<'_>,
    ) -> Result<DeviceWorld, DeviceWorldError> {
        let DeviceWorldConfig { path, region, timeout } = config;
        let (me, began) = (world.rank(), Instant::now());
        let own = DeviceRegion::create(driver, region)?;
        let address = beside(path, me);
        // SAFETY: who comes is a rank of the world, whom the caller vouches for.
        let door = unsafe { Door::open(&address, &[], Duration::ZERO) }?;
        let is_over = AtomicBool::new(false);
        let (joined, was_offered) = std::thread::scope(|scope| {
            let server = scope.spawn(|| serve(&door, &own, &is_over));
            let joined = collect(world, driver, config, own.len(), began).and_then(|others| {
                world.barrier(timeout.saturating_sub(began.elapsed()))?;
                Ok(others)
            });
            is_over.store(true, Ordering::Relaxed);
            (joined, server.join().unwrap_or(true))
        });
        let _ = std::fs::remove_file(&address);
        let mut regions = match joined {
            Ok(regions) => regions,
            Err(error) => {
                if was_offered {
                    let_go(own);
                }
                return Err(error);
            }
        };
        regions.insert(me.index(), own);
        let bases = regions.iter().map(DeviceRegion::address).collect();
        Ok(DeviceWorld { regions, bases, me, driver, device: region.device })
    }

    /// Gives everything back, the own region when all ranks have let go of it. Dropping gives back the same without asking
    /// them, and so without the own region if it is shared by handle: that one stays until this process ends.
    pub fn leave(mut self, world: &World, timeout: Duration) -> Result<(), WaitError> {
        let mut others = std::mem::take(&mut self.regions);
        let own = others.remove(self.me.index());
        drop(others);
        let met = world.barrier(timeout).map(drop);
        if met.is_err() {
            let_go(own);
        }
        met
    }

    /// Memory of the host that this rank's device sees.
    ///
    /// # Safety
    /// As [`HostWindow::open`].
    pub unsafe fn window(
        &self,
        at: NonNull<u8>,
        len: usize,
        access: WindowAccess,
    ) -> Result<HostWindow, DeviceError> {
        // SAFETY: says the caller.
        unsafe { HostWindow::open(self.driver, self.device, at, len, access) }
    }

    /// Whether this rank's device can look at memory of the host that this process itself may only read, such as headers of
    /// records. No device of AMD's can.
    pub fn can_show_read_only(&self) -> Result<bool, DeviceError> {
        can_be_read_only(Context::retain(self.driver, ordinal(self.device))?.place())
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// Where the regions lie for the devices of this process, by rank.
    pub fn bases(&self) -> &[u64] {
        &self.bases
    }

    /// A rank's region.
    pub fn region(&self, rank: Rank) -> &DeviceRegion {
        &self.regions[rank.index()]
    }

    /// The same place in a peer's region as `address` is in the own one.
    ///
    /// # Panics
    /// If `address` is not in this rank's region.
    pub fn translate(&self, address: u64, peer: Rank) -> u64 {
        let offset = address.checked_sub(self.bases[self.me.index()]).expect("an address in the own region");
        assert!(offset < self.regions[self.me.index()].len(), "an address in the own region");
        self.bases[peer.index()] + offset
    }
}

impl Drop for DeviceWorld {
    fn drop(&mut self) {
        // `leave` has taken them.
        if self.me.index() < self.regions.len() {
            let_go(self.regions.remove(self.me.index()));
        }
    }
}

/// Gives back an own region that others may still map. By handle it would end under them, which is undefined, say the vendors:
/// it stays until this process ends.
fn let_go(own: DeviceRegion) {
    match own.sharing() {
        Sharing::Descriptor => drop(own),
        Sharing::Handle => std::mem::forget(own),
    }
}

fn beside(path: &Path, rank: Rank) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".device-{}", rank.0));
    PathBuf::from(name)
}

/// Gives the own region to whoever of the same user comes. Answers whether anyone has it.
fn serve(door: &Door, own: &DeviceRegion, is_over: &AtomicBool) -> bool {
    let mut was_offered = false;
    while !is_over.load(Ordering::Relaxed) {
        let socket = match door.accept_within(KNOCK_EVERY) {
            Ok(Some(socket)) => socket,
            Ok(None) => continue,
            Err(_) => {
                // Out of descriptors, perhaps, and not for long.
                std::thread::sleep(KNOCK_EVERY);
                continue;
            }
        };
        let is_ours =
            sockopt::socket_peercred(&socket).is_ok_and(|peer| peer.uid == rustix::process::getuid());
        if is_ours {
            // SAFETY: to a rank of the world, whom the caller of `join` vouches for. Who is gone finds out by itself.
            was_offered |= unsafe { own.offer() }.and_then(|offer| offer.send(&socket)).is_ok();
        }
    }
    was_offered
}

/// Everyone else's regions, by rank.
fn collect(
    world: &World,
    driver: Driver,
    config: &DeviceWorldConfig<'_>,
    ours: u64,
    began: Instant,
) -> Result<Vec<DeviceRegion>, DeviceWorldError> {
    let mut regions = Vec::new();
    for rank in RankSet::first(world.shape().ranks as usize).iter().filter(|&rank| rank != world.rank()) {
        let peer = |source| DeviceWorldError::Peer { rank, source };
        let socket = knock(&beside(config.path, rank), began, config.timeout).map_err(peer)?;
        let offer = DeviceOffer::receive(&socket).map_err(peer)?;
        if offer.len != ours {
            return Err(DeviceWorldError::Length { rank, theirs: offer.len, ours });
        }
        regions.push(DeviceRegion::import(driver, config.region.device, offer).map_err(peer)?);
    }
    Ok(regions)
}

/// A connection to a peer, who may still be on its way.
fn knock(path: &Path, began: Instant, timeout: Duration) -> Result<OwnedFd, DeviceError> {
    let system = |what| move |source| DeviceError::System { what, source };
    let address = SocketAddrUnix::new(path).map_err(system("name a socket (107 bytes at most)"))?;
    loop {
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
            .map_err(system("make a socket"))?;
        let left = timeout.saturating_sub(began.elapsed()).max(KNOCK_EVERY);
        sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(left)).map_err(system("set a deadline"))?;
        match retry_on_intr(|| rustix::net::connect(&socket, &address)) {
            Ok(()) => return Ok(socket),
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) if began.elapsed() < timeout => {
                std::thread::sleep(KNOCK_EVERY);
            }
            Err(source) => return Err(system("reach it (did it join with a device, too?)")(source)),
        }
    }
}
