//! Changing the number of blocks at run time.
//!
//! Growing moves nothing: the arena already has the addresses. Shrinking copies blocks above the new limit to free
//! blocks below it. The memory returns to the operating system once no reader and no [pin](crate::PinnedBlocks) can
//! access it.

use std::collections::HashMap;

use crate::cache::{Cache, CacheError, PoolOwner};
use crate::pool::Block;

impl Cache {
    /// Changes the number of blocks to `blocks`. Fails if more are in use, and then no sequence has changed. Cached
    /// prefixes that are in the way are evicted even then.
    ///
    /// # Panics
    /// If `blocks` exceeds `blocks_max`.
    pub fn resize(&mut self, blocks: u32) -> Result<(), CacheError> {
        self.process_returns();
        if self.pool_owner == PoolOwner::Shared {
            return Err(CacheError::NotOwner);
        }
        let before = self.allocator.blocks();
        if blocks >= before {
            self.allocator.set_limit(blocks);
            self.shrinking &= blocks < self.shared.arena.blocks_max();
            return Ok(());
        }
        let ids: Vec<_> = self.sequences().collect();
        // Rows that are being written cannot be moved.
        ids.iter().try_for_each(|id| self.idle(*id))?;
        self.reclaim();
        for block in self.index.cached_from(blocks) {
            let since = self.index.evict(block);
            self.index.retire(block, since);
        }
        self.allocator.set_limit(blocks);
        let moved = if self.allocator.is_paged() { self.move_blocks(blocks) } else { self.move_runs(blocks) };
        if let Err(error) = moved {
            self.allocator.set_limit(before);
            self.reclaim();
            return Err(error);
        }
        self.shrinking = true;
        self.reclaim();
        Ok(())
    }

    /// Copies blocks of sequences from `limit` on to free ones; a shared block is copied once.
    fn move_blocks(&mut self, limit: Block) -> Result<(), CacheError> {
        let mut users: HashMap<Block, Vec<_>> = HashMap::new();
        for id in self.sequences().collect::<Vec<_>>() {
            for (at, block) in
                self.blocks_of(id)?.into_iter().enumerate().filter(|(_, block)| *block >= limit)
            {
                users.entry(block).or_default().push((id, at));
            }
        }
        let mut targets = Vec::new();
        self.alloc(users.len() as u32, &mut targets)?;
        for ((from, users), to) in users.into_iter().zip(targets) {
            // SAFETY: no thread writes the source, as all sequences are idle; the target was just allocated.
            unsafe { self.shared.arena.copy(from, to, self.block_tokens()) };
            for (id, at) in &users {
                self.table(*id).set_block(*at, to);
            }
            let epoch = self.shared.readers.next_epoch();
            self.index.move_refs(from, to, users.len() as u32, epoch);
            self.counts.moved_blocks += 1;
        }
        Ok(())
    }

    /// Moves sequences whose run extends above `limit` to another run.
    fn move_runs(&mut self, limit: Block) -> Result<(), CacheError> {
        for id in self.sequences().collect::<Vec<_>>() {
            let used = self.blocks_of(id)?;
            let Some(end) = used.last().map(|last| last + 1) else { continue };
            if end > limit {
                self.relocate(id, used.len(), used.len() as u32)?;
            } else if end + self.sequence(id)?.reserve > limit {
                // Only the reserve is in the way.
                let reserve = std::mem::replace(&mut self.sequence_mut(id)?.reserve, limit - end);
                self.allocator.free_blocks(limit..end + reserve);
            }
        }
        Ok(())
    }

    /// Returns the memory above the limit to the operating system, if none of its blocks is in use.
    pub(crate) fn finish_shrinking(&mut self) {
        let limit = self.allocator.blocks();
        for block in self.index.cached_from(limit) {
            // It was in use when the limit was lowered.
            let since = self.index.evict(block);
            self.index.retire(block, since);
        }
        if self.allocator.used_above_limit() == 0 {
            self.shrinking = false;
            // SAFETY: no block from here on is in use, and none is allocated.
            unsafe { self.shared.arena.discard(limit) };
        }
    }

    /// Whether memory above the limit still waits for readers or pins.
    pub fn is_shrinking(&mut self) -> bool {
        self.process_returns();
        self.reclaim();
        self.shrinking
    }
}
