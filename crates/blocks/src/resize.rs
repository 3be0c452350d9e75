//! More or fewer blocks at run time.
//!
//! Growing moves nothing: the arena has the addresses already. Shrinking copies what lies behind the new end to free blocks
//! in front of it; the memory goes back to the operating system once no reader and no [hold](crate::Held) can see it.

use std::collections::HashMap;

use crate::cache::{BlocksError, Cache, Sizes};
use crate::pool::Block;

impl Cache {
    /// From now on there are so many blocks. With fewer than are in use it fails, and no sequence has changed; prefixes that
    /// are cached for later are given up where they are in the way, even then.
    ///
    /// # Panics
    /// If those are more than `blocks_max`.
    pub fn resize(&mut self, blocks: u32) -> Result<(), BlocksError> {
        self.put_in_order();
        if self.sizes == Sizes::Others {
            return Err(BlocksError::NotOwner);
        }
        let before = self.space.blocks();
        if blocks >= before {
            self.space.set_limit(blocks);
            self.shrinking &= blocks < self.shared.arena.blocks_max();
            return Ok(());
        }
        let ids: Vec<_> = self.sequences().collect();
        // Rows that are being written cannot be moved.
        ids.iter().try_for_each(|id| self.idle(*id))?;
        self.settle();
        for block in self.books.cached_from(blocks) {
            let since = self.books.evict(block);
            self.books.wait(block, since);
        }
        self.space.set_limit(blocks);
        let moved = if self.space.is_paged() { self.move_blocks(blocks) } else { self.move_runs(blocks) };
        if let Err(error) = moved {
            self.space.set_limit(before);
            self.settle();
            return Err(error);
        }
        self.shrinking = true;
        self.settle();
        Ok(())
    }

    /// Blocks of sequences from `limit` on go to free ones; one that is shared goes once.
    fn move_blocks(&mut self, limit: Block) -> Result<(), BlocksError> {
        let mut places: HashMap<Block, Vec<_>> = HashMap::new();
        for id in self.sequences().collect::<Vec<_>>() {
            for (at, block) in self.blocks_of(id)?.into_iter().enumerate().filter(|(_, block)| *block >= limit) {
                places.entry(block).or_default().push((id, at));
            }
        }
        let mut room = Vec::new();
        self.take(places.len() as u32, &mut room)?;
        for ((from, places), to) in places.into_iter().zip(room) {
            // SAFETY: nobody writes, as all are idle; the other was just taken.
            unsafe { self.shared.arena.copy(from, to, self.block_tokens()) };
            for (id, at) in &places {
                self.table(*id).set_block(*at, to);
            }
            let stamp = self.shared.readers.stamp();
            self.books.rename(from, to, places.len() as u32, stamp);
            self.counts.moved_blocks += 1;
        }
        Ok(())
    }

    /// Sequences whose run reaches behind `limit` go to another one.
    fn move_runs(&mut self, limit: Block) -> Result<(), BlocksError> {
        for id in self.sequences().collect::<Vec<_>>() {
            let used = self.blocks_of(id)?;
            let Some(end) = used.last().map(|last| last + 1) else { continue };
            if end > limit {
                self.relocate(id, used.len(), used.len() as u32)?;
            } else if end + self.sequence(id)?.reserve > limit {
                // Only the reserve is in the way.
                let reserve = std::mem::replace(&mut self.sequence_mut(id)?.reserve, limit - end);
                self.space.give(limit..end + reserve);
            }
        }
        Ok(())
    }

    /// Gives the memory behind the limit back, if nobody has any of it.
    pub(crate) fn finish_shrinking(&mut self) {
        let limit = self.space.blocks();
        for block in self.books.cached_from(limit) {
            // Was held when the limit was lowered.
            let since = self.books.evict(block);
            self.books.wait(block, since);
        }
        if self.space.behind() == 0 {
            self.shrinking = false;
            // SAFETY: no block from here on is in use, and none is given out.
            unsafe { self.shared.arena.discard(limit) };
        }
    }

    /// Whether memory behind the end still waits for readers or holds.
    pub fn is_shrinking(&mut self) -> bool {
        self.put_in_order();
        self.settle();
        self.shrinking
    }
}

