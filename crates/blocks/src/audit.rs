//! Consistency checks of a cache, for tests and for debugging an engine.

use std::collections::HashMap;

use crate::cache::Cache;
use crate::pool::Block;
use crate::writer::PinnedBlocks;

impl Cache {
    /// Recounts everything and returns the first inconsistency. `held` are all existing [pins](Cache::pin_full_blocks).
    ///
    /// Expects that no other cache allocates blocks of the same pool.
    pub fn audit(&mut self, held: &[&PinnedBlocks]) -> Result<(), String> {
        self.process_returns();
        self.reclaim();
        let mut owners: HashMap<Block, u32> = HashMap::new();
        let mut reserved = 0;
        for id in self.sequences().collect::<Vec<_>>() {
            let blocks = self.blocks_of(id).map_err(|error| error.to_string())?;
            let sequence = self.sequence(id).map_err(|error| error.to_string())?;
            reserved += sequence.reserve;
            if self.computed(id) > sequence.tokens.len() || self.table(id).capacity() < blocks.len() {
                return Err(format!("{id:?}: more computed tokens than tokens, or block table too small"));
            }
            if sequence.hashes.len() != sequence.tokens.len() / self.block_tokens() {
                return Err(format!(
                    "{id:?} has {} hashes for {} tokens",
                    sequence.hashes.len(),
                    sequence.tokens.len()
                ));
            }
            for block in blocks {
                *owners.entry(block).or_default() += 1;
            }
        }
        for block in held.iter().flat_map(|held| held.blocks()) {
            *owners.entry(block).or_default() += 1;
        }
        let retired = self.index.retired_blocks();
        for block in 0..self.shared.arena.blocks_max() {
            let (refs, expected) = (self.index.refs(block), owners.get(&block).copied().unwrap_or(0));
            if refs != expected {
                return Err(format!("block {block} has a count of {refs}, expected {expected}"));
            }
            let in_use = refs > 0 || self.index.hash(block).is_some() || retired.contains(&block);
            if in_use && !self.allocator.is_used(block) {
                return Err(format!("block {block} is in use, but free in the pool"));
            }
            if let Some(hash) = self.index.hash(block)
                && self.index.find(&hash) != Some(block)
            {
                return Err(format!("block {block} is not found by its hash"));
            }
        }
        let used = owners.len() as u32 + self.index.cached() + self.index.retired_count() + reserved;
        let (free, blocks) = (self.allocator.free(), self.allocator.blocks());
        if !self.shrinking && used + free != blocks {
            return Err(format!("{used} blocks in use and {free} free do not sum to {blocks}"));
        }
        Ok(())
    }
}
