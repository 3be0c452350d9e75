//! Memory of ranks: processes that are peers, map each other's memory and meet in phases of a barrier.
//!
//! A **world** is a fixed number of processes of one host, its **ranks**. Each rank owns a region of the same length,
//! and all ranks map all regions, in shared memory ([`World`]) and, in addition, in the memory of their devices
//! ([`DeviceWorld`]). A location is `(rank, offset)`. The users of a world, such as `moontide-ep` and the rank store of
//! `moontide-client`, define what the regions contain, and which rank may access which bytes in which phase.
//!
//! Reading order: [`ranks`](RankSet) and [`barrier`](PhaseBarrier), the protocol in which ranks wait for each other,
//! exclude a rank that does not arrive, and admit it again; [`ready_flag`](ReadyFlag), which shows that all pages of a
//! record are written; then [`barrier_memory`](SharedBarrierMemory), which puts the barrier into shared memory and lets
//! ranks spin, sleep and wake each other; `world_memory`, [`message`](WorldMessage) and `rendezvous`, with which ranks
//! get the memory; then [`World`]. `device` is the same for memory of devices: [`Driver`], [`DeviceRegion`],
//! [`DeviceWorld`].
//!
//! `barrier` and `ready_flag` use slices of atomics and run unchanged under model checkers (`--cfg loom`, `--cfg
//! shuttle`). Model builds leave out the rest, except for `ranks`.
//!
//! # Example: two ranks exchange a number
//!
//! ```
//! use std::sync::atomic::Ordering;
//! use std::time::Duration;
//!
//! use moontide_heap::HugePages;
//! use moontide_symmetric::*;
//!
//! const TIMEOUT: Duration = Duration::from_secs(10);
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Usually each rank is a process. Here each is a thread.
//! let path = std::env::temp_dir().join(format!("moontide-ranks-{}", std::process::id()));
//! let run = |rank: Rank| -> Result<u64, WorldError> {
//!     let shape = WorldShape { ranks: 2, bytes: 1 << 20 };
//!     let config = WorldConfig { path: path.clone(), rank, shape, huge: HugePages::Auto, timeout: TIMEOUT };
//!     // SAFETY: both ranks are this program, and access their regions as atomics only.
//!     let world = unsafe { World::join(&config) }?;
//!
//!     // Each rank writes into the region of the other one, at the same offset.
//!     let peer = Rank(1 - rank.0);
//!     world.words(peer, 4096, 1)[0].store(100 + u64::from(rank.0), Ordering::Relaxed);
//!
//!     // After the barrier, all ranks see what all ranks have written before it.
//!     let members = world.barrier(TIMEOUT)?;
//!     assert_eq!(members, RankSet::first(2));
//!     let received = world.words(rank, 4096, 1)[0].load(Ordering::Relaxed);
//!
//!     // The regions remain mapped until the other rank has read its number, too.
//!     world.barrier(TIMEOUT)?;
//!     Ok(received)
//! };
//! let (first, second) = std::thread::scope(|scope| {
//!     let second = scope.spawn(|| run(Rank(1)));
//!     (run(Rank(0)), second.join().expect("rank 1 does not panic"))
//! });
//! assert_eq!((first?, second?), (101, 100));
//! # Ok(())
//! # }
//! ```

mod barrier;
mod mutation;
mod ranks;
mod ready_flag;

pub use barrier::{
    BarrierMemory, Membership, PhaseBarrier, PhaseOutcome, RejoinPoint, WaitAction, WaitError, WaitStrategy,
};
pub use ranks::{RANKS_MAX, Rank, RankSet};
pub use ready_flag::{PageOutcome, READY_FLAG_BYTES, ReadyFlag, ReadyFlagSnapshot, RecordProgress};

#[cfg(not(any(loom, shuttle)))]
mod barrier_memory;
#[cfg(not(any(loom, shuttle)))]
mod device;
#[cfg(not(any(loom, shuttle)))]
mod error;
#[cfg(not(any(loom, shuttle)))]
mod message;
#[cfg(not(any(loom, shuttle)))]
mod rendezvous;
#[cfg(not(any(loom, shuttle)))]
mod world;
#[cfg(not(any(loom, shuttle)))]
mod world_memory;

#[cfg(not(any(loom, shuttle)))]
pub use barrier_memory::{SPINS_UNTIL_DEADLINE, SharedBarrierMemory, SpinThenFutex};
#[cfg(not(any(loom, shuttle)))]
pub use device::{
    AtomicDomain, DeviceConfig, DeviceError, DeviceExport, DeviceInfo, DeviceRegion, DeviceWorld,
    DeviceWorldConfig, DeviceWorldError, Driver, HandleType, HostAccess, HostRegistration, ShareableHandle,
    Vendor,
};
#[cfg(not(any(loom, shuttle)))]
pub use error::WorldError;
#[cfg(not(any(loom, shuttle)))]
pub use message::WorldMessage;
#[cfg(not(any(loom, shuttle)))]
pub use world::{RankProcess, World, WorldConfig};
#[cfg(not(any(loom, shuttle)))]
pub use world_memory::WorldShape;

/// Items that the model tests need beyond the public ones.
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod model {
    pub use crate::mutation::Mutation;
}
