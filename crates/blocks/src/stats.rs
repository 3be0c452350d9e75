//! What a cache says of itself: numbers, and pages for people.

use std::fmt::{self, Write as _};

use crate::cache::Cache;
use crate::shape::Attention;

/// What has happened since the cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// How many of those were there already.
    pub shared_tokens: u64,
    /// Tokens that came from a store.
    pub restored_tokens: u64,
    /// Forks.
    pub forks: u64,
    /// Sequences that were put aside.
    pub parked: u64,
    /// Blocks that were copied because they were shared and one was to be written.
    pub copied_blocks: u64,
    /// Blocks that were copied because a run had to grow or the cache to shrink.
    pub moved_blocks: u64,
    /// Cached blocks that were given up for new ones.
    pub evicted_blocks: u64,
    /// Tokens that were dropped from the middle of sequences.
    pub dropped_tokens: u64,
}

/// How a cache is at one moment. `held + cached + waiting + reserved + free == blocks`, unless it shrinks or shares its
/// pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stats {
    /// All blocks.
    pub blocks: u32,
    /// Free ones.
    pub free: u32,
    /// Blocks that sequences or holds have.
    pub held: u32,
    /// How many of those more than one has.
    pub shared: u32,
    /// Blocks that hold prefixes which nobody is using.
    pub cached: u32,
    /// Blocks that wait for readers to leave.
    pub waiting: u32,
    /// Blocks that are kept behind sequences for their growth.
    pub reserved: u32,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Sequences.
    pub sequences: u32,
    /// Their tokens.
    pub tokens: u64,
    /// Which share of the free blocks is not in the longest run of them. 0 where that makes no difference.
    pub fragmentation: f64,
    /// What has happened.
    pub counts: Counts,
}

const LINE: u32 = 64;

impl Cache {
    /// Looks at everything once.
    pub fn stats(&mut self) -> Stats {
        self.put_in_order();
        self.settle();
        let blocks = 0..self.shared.arena.blocks_max();
        let refs = || blocks.clone().map(|block| self.books.refs(block));
        let ids: Vec<_> = self.sequences().collect();
        let sequences = || ids.iter().filter_map(|id| self.sequence(*id).ok());
        Stats {
            blocks: self.space.blocks(),
            free: self.space.free(),
            held: refs().filter(|refs| *refs > 0).count() as u32,
            shared: refs().filter(|refs| *refs > 1).count() as u32,
            cached: self.books.cached(),
            waiting: self.books.waiting(),
            reserved: sequences().map(|sequence| sequence.reserve).sum(),
            block_bytes: self.shape().block_bytes(),
            sequences: ids.len() as u32,
            tokens: sequences().map(|sequence| sequence.tokens.len() as u64).sum(),
            fragmentation: self.space.fragmentation(),
            counts: self.counts,
        }
    }

    /// A page about all sequences.
    pub fn dump(&mut self) -> String {
        let stats = self.stats();
        let mut out = format!("=== KVCache Statistics ===\n{stats}");
        let shape = *self.shape();
        let what = match shape.attention {
            Attention::Heads { kv_heads, dim } => format!("Heads: {kv_heads}, HeadDim: {dim}"),
            Attention::Latent { rank, rope } => format!("Latent: {rank}+{rope}"),
        };
        let configuration = format!(
            "Configuration:\n  Layers: {}, {what}, {:?}, {:?}\n  BlockSize: {}, TotalBlocks: {}\n\n",
            shape.layers, shape.dtype, shape.order, shape.block_tokens, stats.blocks
        );
        let at = out.find("Allocation State").expect("the page has it");
        out.insert_str(at, &configuration);
        out.push_str("\nSequences:\n");
        for id in self.sequences().collect::<Vec<_>>() {
            let (Ok(tokens), Ok(blocks)) = (self.tokens(id), self.blocks_of(id)) else { continue };
            let room = blocks.len() * shape.block_tokens as usize;
            let _ = write!(out, "  {id}: {}/{room} tokens, blocks", tokens.len());
            for (start, count) in runs(&blocks) {
                let _ = write!(out, " [{start}, +{count}]");
            }
            out.push('\n');
        }
        out
    }

    /// A map of all blocks, one letter each.
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
        let waiting = self.books.waiting_blocks();
        for block in 0..stats.blocks {
            if block % LINE == 0 {
                out.push_str("\n    ");
            }
            out.push(match self.books.refs(block) {
                0 if self.books.hash(block).is_some() => 'c',
                0 if waiting.contains(&block) => 'w',
                0 if self.space.is_used(block) => 'r',
                0 => '.',
                1 => 'X',
                _ => 'S',
            });
        }
        out.push('\n');
        out
    }
}

/// Numbers that follow each other, as the first and how many.
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

impl fmt::Display for Stats {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |blocks: u32| f64::from(blocks) * self.block_bytes as f64 / f64::from(1 << 20);
        writeln!(out, "Allocation State:")?;
        writeln!(out, "  Allocated sequences: {}", self.sequences)?;
        writeln!(out, "  Total allocated: {:.2} MB", mib(self.blocks.saturating_sub(self.free)))?;
        writeln!(out, "  Total free: {:.2} MB", mib(self.free))?;
        writeln!(out, "  Fragmentation: {:.2}", self.fragmentation)?;
        writeln!(out, "  Shared by several: {:.2} MB", mib(self.shared))?;
        writeln!(out, "  Cached for later: {:.2} MB", mib(self.cached))?;
        writeln!(out, "  Waiting for readers: {:.2} MB", mib(self.waiting))
    }
}
