//! [`BlockAllocator`]: allocation of blocks, and reclamation when none are free: first blocks that readers have left,
//! then cached blocks.
//!
//! Invariant: a request gets all its blocks or none, and no block is evicted for a request that fails.

use std::ops::Range;
use std::sync::Arc;

use crate::cache::Cache;
use crate::pool::{Block, BlockPool};
use crate::run_allocator::RunAllocator;

/// Not enough free blocks; nothing has changed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "out of blocks: {needed} needed, {free} free{}, {cached} cached, {held_by_readers} held by readers",
    if *longest < *free { format!(" ({longest} contiguous)") } else { String::new() }
)]
pub struct OutOfBlocks {
    /// Blocks requested.
    pub needed: u32,
    /// Free blocks.
    pub free: u32,
    /// Length of the longest contiguous run of free blocks; all free blocks for paged placement.
    pub longest: u32,
    /// Blocks that cache prefixes of no current sequence.
    pub cached: u32,
    /// Blocks that would be free without active readers.
    pub held_by_readers: u32,
}

#[derive(Debug)]
pub(crate) enum BlockAllocator {
    Paged(Arc<BlockPool>),
    Runs { runs: RunAllocator, reserve: u32 },
}

impl BlockAllocator {
    #[inline]
    pub(crate) fn is_paged(&self) -> bool {
        matches!(self, BlockAllocator::Paged(_))
    }

    pub(crate) fn free(&self) -> u32 {
        match self {
            BlockAllocator::Paged(pool) => pool.free(),
            BlockAllocator::Runs { runs, .. } => runs.free(),
        }
    }

    pub(crate) fn blocks(&self) -> u32 {
        match self {
            BlockAllocator::Paged(pool) => pool.blocks(),
            BlockAllocator::Runs { runs, .. } => runs.blocks(),
        }
    }

    pub(crate) fn is_used(&self, block: Block) -> bool {
        match self {
            BlockAllocator::Paged(pool) => pool.is_taken(block),
            BlockAllocator::Runs { runs, .. } => runs.is_used(block),
        }
    }

    pub(crate) fn longest(&self) -> u32 {
        match self {
            BlockAllocator::Paged(pool) => pool.free(),
            BlockAllocator::Runs { runs, .. } => runs.longest(),
        }
    }

    pub(crate) fn fragmentation(&self) -> f64 {
        match self {
            BlockAllocator::Paged(_) => 0.0,
            BlockAllocator::Runs { runs, .. } => runs.fragmentation(),
        }
    }

    pub(crate) fn free_blocks(&mut self, blocks: impl IntoIterator<Item = Block>) {
        match self {
            BlockAllocator::Paged(pool) => pool.free_blocks(blocks),
            BlockAllocator::Runs { runs, .. } => blocks.into_iter().for_each(|block| runs.free_block(block)),
        }
    }

    pub(crate) fn set_limit(&mut self, limit: u32) {
        match self {
            BlockAllocator::Paged(pool) => pool.set_limit(limit),
            BlockAllocator::Runs { runs, .. } => runs.set_limit(limit),
        }
    }

    /// Number of blocks above the limit that are still in use.
    pub(crate) fn used_above_limit(&self) -> u32 {
        match self {
            BlockAllocator::Paged(pool) => pool.used_above_limit(),
            BlockAllocator::Runs { runs, .. } => runs.used_above_limit(),
        }
    }

    /// Allocates the block `next` and, if possible, a reserve after it. Returns the length of the reserve.
    pub(crate) fn extend(&mut self, next: Block) -> Option<u32> {
        let BlockAllocator::Runs { runs, reserve } = self else { return None };
        if runs.alloc_at(next..next + 1 + *reserve) {
            return Some(*reserve);
        }
        runs.alloc_at(next..next + 1).then_some(0)
    }

    /// Allocates exactly `count` blocks. Returns the length of the reserve after them.
    fn alloc(&mut self, count: u32, to: &mut Vec<Block>) -> Option<u32> {
        if count == 0 {
            // There is no block that a reserve could follow.
            return Some(0);
        }
        match self {
            BlockAllocator::Paged(pool) => pool.alloc(count, |block| to.push(block)).then_some(0),
            BlockAllocator::Runs { runs, reserve } => {
                let (Range { start, end }, reserve) = match runs.alloc(count + *reserve) {
                    Some(run) => (run, *reserve),
                    None => (runs.alloc(count)?, 0),
                };
                to.extend(start..end - reserve);
                Some(reserve)
            }
        }
    }
}

impl Cache {
    /// Allocates `count` blocks. Returns the length of the reserve after them.
    pub(crate) fn alloc(&mut self, count: u32, to: &mut Vec<Block>) -> Result<u32, OutOfBlocks> {
        let before = to.len();
        let reserve = loop {
            match self.allocator.alloc(count, to) {
                Some(reserve) => break reserve,
                None => self.make_space(count)?,
            }
        };
        for block in &to[before..] {
            self.index.acquire(*block);
        }
        Ok(reserve)
    }

    #[inline]
    pub(crate) fn alloc_one(&mut self) -> Result<Block, OutOfBlocks> {
        if let BlockAllocator::Paged(pool) = &self.allocator {
            let mut taken = None;
            if pool.alloc(1, |block| taken = Some(block))
                && let Some(block) = taken
            {
                self.index.acquire(block);
                return Ok(block);
            }
        }
        let mut blocks = Vec::new();
        self.alloc(1, &mut blocks)?;
        Ok(blocks[0])
    }

    /// Makes more blocks free after an allocation of `needed` blocks failed, or fails.
    fn make_space(&mut self, needed: u32) -> Result<(), OutOfBlocks> {
        let before = self.allocator.free();
        self.reclaim();
        let free = self.allocator.free();
        if free > before {
            return Ok(());
        }
        let oldest = self.shared.readers.min_active();
        // Another cache may have freed more than enough blocks of the same pool by now: then the caller tries again.
        let missing = needed.saturating_sub(free);
        match self.index.victims(missing, oldest) {
            Some(victims) if self.allocator.is_paged() => {
                for block in &victims {
                    self.index.evict(*block);
                }
                self.counts.evicted_blocks += u64::from(missing);
                self.allocator.free_blocks(victims);
                Ok(())
            }
            _ => Err(OutOfBlocks {
                needed,
                free,
                longest: self.allocator.longest(),
                cached: self.index.cached(),
                held_by_readers: self.index.retired_count(),
            }),
        }
    }
}
