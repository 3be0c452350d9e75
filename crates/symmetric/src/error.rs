//! [`WorldError`]: failure of a world, with advice.

use moontide_heap::{NotOwner, RegionError, ShmError};

use crate::barrier::WaitError;
use crate::ranks::{RANKS_MAX, Rank};
use crate::world_memory::WorldShape;

/// Failure to join a world, to reserve a part of it, or of its barrier.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// The world has no ranks, too many, or no memory.
    #[error("a world has 1 to {RANKS_MAX} ranks with whole pages of memory; this one has {ranks} with {bytes} bytes",
        ranks = .0.ranks, bytes = .0.bytes)]
    Shape(WorldShape),
    /// Rank 0 has created a world of another shape under this path.
    #[error(
        "rank 0's world has {} ranks with {} bytes each, not {} with {}; use the same settings for all ranks",
        found.ranks, found.bytes, ours.ranks, ours.bytes
    )]
    OtherShape {
        /// Shape of rank 0's world.
        found: WorldShape,
        /// Shape that this process requested.
        ours: WorldShape,
    },
    /// The rank is not below the number of ranks.
    #[error("rank {rank} is out of range: the world has {ranks} ranks, counted from 0")]
    Rank {
        /// Requested rank.
        rank: Rank,
        /// Number of ranks of the world.
        ranks: u32,
    },
    /// Rank 0 could not be reached, or rejected this process.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// Memory could not be created or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Another process has this rank.
    #[error("rank {rank} is in use: {holder}")]
    RankInUse {
        /// Requested rank.
        rank: Rank,
        /// Process that has the rank.
        holder: NotOwner,
    },
    /// Other ranks did not arrive in time, or excluded this one.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// The range of the rank's region is already reserved.
    #[error("{len} bytes at {offset} of this rank's region are already reserved; start only one node there")]
    AlreadyReserved {
        /// Start of the requested range.
        offset: u64,
        /// Length of the requested range.
        len: u64,
    },
    /// A node of another process was in this memory, and other ranks may still read its records.
    #[error("rank was restarted and its region still holds records; start a new world")]
    NotEmpty,
}
