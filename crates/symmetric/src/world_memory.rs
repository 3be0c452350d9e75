//! [`WorldMemory`]: control region and regions of a world, as one rank maps them.

use std::ptr::NonNull;
use std::sync::Arc;

use moontide_heap::{HugePages, LivenessRow, Protection, Region, RegionError};
use moontide_rt::sync::AtomicU64;

use crate::barrier::PhaseBarrier;
use crate::barrier_memory::SharedBarrierMemory;
use crate::ranks::{Rank, RankSet};

/// Size of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldShape {
    /// Number of ranks, at most [`RANKS_MAX`](crate::RANKS_MAX).
    pub ranks: u32,
    /// Length of each rank's region in bytes.
    pub bytes: u64,
}

/// Mapped memory of a world.
#[derive(Debug)]
pub(crate) struct WorldMemory {
    shape: WorldShape,
    control: Region,
    regions: Vec<Region>,
}

impl WorldMemory {
    pub(crate) fn create(shape: WorldShape, huge: HugePages) -> Result<WorldMemory, RegionError> {
        let control =
            Region::create("moontide-world", control_bytes(shape), HugePages::Auto, Protection::AllWrite)?;
        let region = |_| Region::create("moontide-rank", shape.bytes, huge, Protection::AllWrite);
        let regions = (0..shape.ranks).map(region).collect::<Result<_, _>>()?;
        Ok(WorldMemory { shape, control, regions })
    }

    pub(crate) fn from_parts(shape: WorldShape, control: Region, regions: Vec<Region>) -> WorldMemory {
        assert!(regions.len() == shape.ranks as usize && control.len() == control_bytes(shape));
        WorldMemory { shape, control, regions }
    }

    pub(crate) fn shape(&self) -> WorldShape {
        self.shape
    }

    pub(crate) fn control(&self) -> &Region {
        &self.control
    }

    pub(crate) fn region(&self, rank: Rank) -> &Region {
        &self.regions[rank.index()]
    }

    pub(crate) fn row(&self, rank: Rank) -> &LivenessRow {
        // SAFETY: every bit pattern is a row, and its words are atomics.
        let rows: &[LivenessRow] = unsafe { self.control.slice(0, self.shape.ranks.into()) };
        &rows[rank.index()]
    }
}

/// Returns the length of the control region: liveness rows, then rank words; both are whole cache lines.
pub(crate) fn control_bytes(shape: WorldShape) -> u64 {
    let ranks = shape.ranks as usize;
    let bytes = ranks * size_of::<LivenessRow>() + ranks * words_per_rank(ranks) * size_of::<AtomicU64>();
    (bytes as u64).next_multiple_of(HugePages::Auto.page_bytes())
}

/// Returns the number of words of a rank in a barrier.
pub(crate) fn words_per_rank(ranks: usize) -> usize {
    PhaseBarrier::<SharedBarrierMemory<WorldMemory>>::words(ranks)
}

/// Returns the rank words of the world's own barrier, which follow the liveness rows.
pub(crate) fn barrier_memory_of(memory: &Arc<WorldMemory>) -> SharedBarrierMemory<WorldMemory> {
    let ranks = memory.shape.ranks as usize;
    let words = words_per_rank(ranks);
    let first = (ranks * size_of::<LivenessRow>()) as u64;
    let bytes = (words * size_of::<AtomicU64>()) as u64;
    let address = |rank: Rank| {
        let offset = first + u64::from(rank.0) * bytes;
        // SAFETY: every bit pattern is a word; only rank words are there, which every rank accesses as atomics.
        let words: &[AtomicU64] = unsafe { memory.control.slice(offset, words as u64) };
        NonNull::from(words).cast()
    };
    let addresses = RankSet::first(ranks).iter().map(address).collect();
    // SAFETY: in bounds and aligned, as `slice` checks; mapped during the life of `memory`; only rank words are
    // there.
    unsafe { SharedBarrierMemory::new(addresses, words, Arc::clone(memory)) }
}
