//! Looking for contradictions: for tests, and for whoever debugs an engine.

use std::collections::HashMap;

use crate::cache::Cache;
use crate::fill::Held;
use crate::pool::Block;

impl Cache {
    /// Counts everything anew and says what does not agree. `held` is all that was [held](Cache::hold) and not dropped.
    ///
    /// Expects that nobody else takes blocks from the same pool.
    pub fn audit(&mut self, held: &[&Held]) -> Result<(), String> {
        self.put_in_order();
        self.settle();
        let mut owners: HashMap<Block, u32> = HashMap::new();
        let mut reserved = 0;
        for id in self.sequences().collect::<Vec<_>>() {
            let blocks = self.blocks_of(id).map_err(|error| error.to_string())?;
            let sequence = self.sequence(id).map_err(|error| error.to_string())?;
            reserved += sequence.reserve;
            if self.filled(id) > sequence.tokens.len() || self.table(id).capacity() < blocks.len() {
                return Err(format!("{id:?} shows more than it has"));
            }
            if sequence.hashes.len() != sequence.tokens.len() / self.block_tokens() {
                return Err(format!("{id:?} has {} names for {} tokens", sequence.hashes.len(), sequence.tokens.len()));
            }
            for block in blocks {
                *owners.entry(block).or_default() += 1;
            }
        }
        for block in held.iter().flat_map(|held| held.blocks()) {
            *owners.entry(block).or_default() += 1;
        }
        let waiting = self.books.waiting_blocks();
        for block in 0..self.shared.arena.blocks_max() {
            let (refs, expected) = (self.books.refs(block), owners.get(&block).copied().unwrap_or(0));
            if refs != expected {
                return Err(format!("block {block} has {refs} owners by the books, and {expected} really"));
            }
            let in_use = refs > 0 || self.books.hash(block).is_some() || waiting.contains(&block);
            if in_use && !self.space.is_used(block) {
                return Err(format!("block {block} is in use, and free"));
            }
            if let Some(hash) = self.books.hash(block)
                && self.books.find(&hash) != Some(block)
            {
                return Err(format!("block {block} is not found by its name"));
            }
        }
        let used = owners.len() as u32 + self.books.cached() + self.books.waiting() + reserved;
        let (free, blocks) = (self.space.free(), self.space.blocks());
        if !self.shrinking && used + free != blocks {
            return Err(format!("{used} blocks in use and {free} free are not {blocks}"));
        }
        Ok(())
    }
}
