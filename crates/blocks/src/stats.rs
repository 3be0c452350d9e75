//! Statistics of a cache, and human-readable dumps.

use std::fmt::{self, Write as _};

use crate::cache::Cache;
use crate::shape::Attention;

/// Counters since the creation of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Prompt tokens whose rows existed already.
    pub cached_tokens: u64,
    /// Tokens loaded from a store.
    pub restored_tokens: u64,
    /// Forks of sequences.
    pub forks: u64,
    /// Suspended sequences.
    pub suspended: u64,
    /// Blocks copied because they were shared and one owner wrote.
    pub copied_blocks: u64,
    /// Blocks copied because a run had to grow or the cache to shrink.
    pub moved_blocks: u64,
    /// Cached blocks evicted for new ones.
    pub evicted_blocks: u64,
    /// Tokens dropped from the middle of sequences.
    pub pruned_tokens: u64,
}

/// State of a cache at one time. `in_use + cached + held_by_readers + reserved + free == blocks`, unless it shrinks or
/// shares its pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheStats {
    /// Number of blocks.
    pub blocks: u32,
    /// Free blocks.
    pub free: u32,
    /// Blocks of sequences or pins.
    pub in_use: u32,
    /// Blocks in use with more than one reference.
    pub shared: u32,
    /// Blocks that cache prefixes of no current sequence.
    pub cached: u32,
    /// Blocks that wait for readers to leave.
    pub held_by_readers: u32,
    /// Blocks reserved after sequences for their growth.
    pub reserved: u32,
    /// Bytes per block.
    pub block_bytes: usize,
    /// Number of sequences.
    pub sequences: u32,
    /// Tokens of all sequences.
    pub tokens: u64,
    /// Share of the free blocks that are not in the longest run of them. 0 for paged placement.
    pub fragmentation: f64,
    /// Counters since the creation of the cache.
    pub counts: CacheCounters,
}

const LINE: u32 = 64;

impl Cache {
    /// Scans the whole cache.
    pub fn stats(&mut self) -> CacheStats {
        self.process_returns();
        self.reclaim();
        let blocks = 0..self.shared.arena.blocks_max();
        let refs = || blocks.clone().map(|block| self.index.refs(block));
        let ids: Vec<_> = self.sequences().collect();
        let sequences = || ids.iter().filter_map(|id| self.sequence(*id).ok());
        CacheStats {
            blocks: self.allocator.blocks(),
            free: self.allocator.free(),
            in_use: refs().filter(|refs| *refs > 0).count() as u32,
            shared: refs().filter(|refs| *refs > 1).count() as u32,
            cached: self.index.cached(),
            held_by_readers: self.index.retired_count(),
            reserved: sequences().map(|sequence| sequence.reserve).sum(),
            block_bytes: self.shape().block_bytes(),
            sequences: ids.len() as u32,
            tokens: sequences().map(|sequence| sequence.tokens.len() as u64).sum(),
            fragmentation: self.allocator.fragmentation(),
            counts: self.counts,
        }
    }

    /// Returns a human-readable page about all sequences.
    pub fn dump(&mut self) -> String {
        let stats = self.stats();
        let mut out = format!("=== KVCache Statistics ===\n{stats}");
        let shape = *self.shape();
        let attention = match shape.attention {
            Attention::Heads { kv_heads, dim } => format!("Heads: {kv_heads}, HeadDim: {dim}"),
            Attention::Latent { rank, rope } => format!("Latent: {rank}+{rope}"),
        };
        let configuration = format!(
            "Configuration:\n  Layers: {}, {attention}, {:?}, {:?}\n  BlockSize: {}, TotalBlocks: {}\n\n",
            shape.layers, shape.dtype, shape.order, shape.block_tokens, stats.blocks
        );
        let at = out.find("Allocation State").expect("statistics contain this heading");
        out.insert_str(at, &configuration);
        out.push_str("\nSequences:\n");
        for id in self.sequences().collect::<Vec<_>>() {
            let (Ok(tokens), Ok(blocks)) = (self.tokens(id), self.blocks_of(id)) else { continue };
            let capacity = blocks.len() * shape.block_tokens as usize;
            let _ = write!(out, "  {id}: {}/{capacity} tokens, blocks", tokens.len());
            for (start, count) in runs(&blocks) {
                let _ = write!(out, " [{start}, +{count}]");
            }
            out.push('\n');
        }
        out
    }

    /// Returns a map of all blocks, one letter each.
    pub fn block_map(&mut self) -> String {
        let stats = self.stats();
        let mut out = format!(
            "KVBlockAllocator State:\n  Total blocks: {}\n  Used: {} Free: {}\n  Fragmentation: {:.2}\n  \
             Block map (. = free, X = used, S = shared, c = cached, w = waiting for readers, r = reserved):",
            stats.blocks,
            stats.blocks.saturating_sub(stats.free),
            stats.free,
            stats.fragmentation
        );
        let retired = self.index.retired_blocks();
        for block in 0..stats.blocks {
            if block % LINE == 0 {
                out.push_str("\n    ");
            }
            out.push(match self.index.refs(block) {
                0 if self.index.hash(block).is_some() => 'c',
                0 if retired.contains(&block) => 'w',
                0 if self.allocator.is_used(block) => 'r',
                0 => '.',
                1 => 'X',
                _ => 'S',
            });
        }
        out.push('\n');
        out
    }
}

/// Groups contiguous numbers into (first, count).
fn runs(blocks: &[u32]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &block in blocks {
        match runs.last_mut() {
            Some((start, count)) if *start + *count == block => *count += 1,
            _ => runs.push((block, 1)),
        }
    }
    runs
}

impl fmt::Display for CacheStats {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |blocks: u32| f64::from(blocks) * self.block_bytes as f64 / f64::from(1 << 20);
        writeln!(out, "Allocation State:")?;
        writeln!(out, "  Allocated sequences: {}", self.sequences)?;
        writeln!(out, "  Total allocated: {:.2} MB", mib(self.blocks.saturating_sub(self.free)))?;
        writeln!(out, "  Total free: {:.2} MB", mib(self.free))?;
        writeln!(out, "  Fragmentation: {:.2}", self.fragmentation)?;
        writeln!(out, "  Shared by several: {:.2} MB", mib(self.shared))?;
        writeln!(out, "  Cached for later: {:.2} MB", mib(self.cached))?;
        writeln!(out, "  Waiting for readers: {:.2} MB", mib(self.held_by_readers))
    }
}
