//! [`BlockIndex`]: reference count, hash and release time of every block.
//!
//! ```text
//!             acquire                    last release
//!   free ───────────────▶ in use ─────────────────────────────▶ cached   it has a hash: the next request with the
//!    ▲                     ▲  │                                  │   │    same prefix finds it
//!    │                     │  └────────────▶ retired ◀───────────┘   │    retired: a reader may still access it
//!    │                     └─── found by its hash ───────────────────┘
//!    └────────────────── no reader can have it any more
//! ```
//!
//! Invariants: a block is in the list of cached blocks if and only if it has a hash and its count is 0 (or it is
//! temporarily [protected](BlockIndex::protect)); both lists are in the order of their epochs.

use std::collections::{HashMap, VecDeque, hash_map};
use std::hash::BuildHasherDefault;

use crate::hash::{BlockHash, PrehashedHasher};
use crate::pool::Block;
use crate::reader_epochs::RetireEpoch;

const NONE: u32 = u32::MAX;

/// Bit of a block's count: the block has a hash, and its [`HashedBlock`] is valid.
const HASHED: u32 = 1 << 31;

/// State of a block that has a hash.
#[derive(Clone, Debug)]
struct HashedBlock {
    /// Neighbours in the list of cached blocks: older and newer.
    older: u32,
    newer: u32,
    /// Release time; set while the block is in the list of cached blocks.
    since: Option<RetireEpoch>,
    /// Hash by which the block is found. Its bytes are complete, and do not change as long as it has one.
    hash: Option<BlockHash>,
    /// Whether the store has the block, as far as this cache knows.
    saved: bool,
}

#[derive(Debug)]
pub(crate) struct BlockIndex {
    /// Number of sequences and [pins](crate::PinnedBlocks) of each block, and whether it is [`HASHED`]: sufficient for
    /// most operations.
    counts: Vec<u32>,
    entries: Vec<HashedBlock>,
    by_hash: HashMap<BlockHash, Block, BuildHasherDefault<PrehashedHasher>>,
    oldest: u32,
    newest: u32,
    cached: u32,
    retired: VecDeque<(RetireEpoch, Block)>,
}

impl BlockIndex {
    pub(crate) fn new(blocks_max: u32) -> BlockIndex {
        let empty = HashedBlock { older: NONE, newer: NONE, since: None, hash: None, saved: false };
        BlockIndex {
            counts: vec![0; blocks_max as usize],
            entries: vec![empty; blocks_max as usize],
            by_hash: HashMap::default(),
            oldest: NONE,
            newest: NONE,
            cached: 0,
            retired: VecDeque::new(),
        }
    }

    pub(crate) fn refs(&self, block: Block) -> u32 {
        self.counts[block as usize] & !HASHED
    }

    pub(crate) fn is_hashed(&self, block: Block) -> bool {
        self.counts[block as usize] & HASHED != 0
    }

    pub(crate) fn hash(&self, block: Block) -> Option<BlockHash> {
        self.entries[block as usize].hash
    }

    pub(crate) fn cached(&self) -> u32 {
        self.cached
    }

    pub(crate) fn retired_count(&self) -> u32 {
        self.retired.len() as u32
    }

    pub(crate) fn is_saved(&self, block: Block) -> bool {
        self.entries[block as usize].saved
    }

    pub(crate) fn retired_blocks(&self) -> std::collections::HashSet<Block> {
        self.retired.iter().map(|(_, block)| *block).collect()
    }

    /// Marks a block as saved. Has no effect if the block has different content by now: then its hash differs.
    pub(crate) fn set_saved(&mut self, block: Block, hash: BlockHash) {
        let entry = &mut self.entries[block as usize];
        entry.saved |= entry.hash == Some(hash);
    }

    /// Sets the count of a free block to 1.
    pub(crate) fn acquire(&mut self, block: Block) {
        let count = &mut self.counts[block as usize];
        assert_eq!(*count, 0, "block {block} is not free");
        *count = 1;
    }

    /// Adds a reference.
    pub(crate) fn share(&mut self, block: Block) {
        assert!(self.refs(block) > 0, "block {block} has no references");
        self.counts[block as usize] += 1;
    }

    /// Returns the block of this hash, if there is one.
    pub(crate) fn find(&self, hash: &BlockHash) -> Option<Block> {
        self.by_hash.get(hash).copied()
    }

    /// Protects a found block from eviction, without changing its position in the list: until it is
    /// [reused](BlockIndex::reuse) or [unprotected](BlockIndex::unprotect).
    pub(crate) fn protect(&mut self, block: Block) {
        self.counts[block as usize] += 1;
    }

    pub(crate) fn unprotect(&mut self, block: Block) {
        self.counts[block as usize] -= 1;
    }

    /// Turns the protection of a block into a reference.
    pub(crate) fn reuse(&mut self, block: Block) {
        if self.entries[block as usize].since.is_some() {
            self.unlink(block);
        }
    }

    /// Makes a complete block findable by its hash, unless another block has the same hash.
    pub(crate) fn publish(&mut self, block: Block, hash: BlockHash) {
        assert!(
            self.refs(block) > 0 && !self.is_hashed(block),
            "block {block} is unused or already has a hash"
        );
        if let hash_map::Entry::Vacant(free) = self.by_hash.entry(hash) {
            free.insert(block);
            self.entries[block as usize].hash = Some(hash);
            self.counts[block as usize] |= HASHED;
        }
    }

    /// Removes a reference. `epoch` is the release time if it was the last one.
    pub(crate) fn release(&mut self, block: Block, epoch: RetireEpoch) {
        assert!(self.refs(block) > 0, "block {block} has no references");
        self.counts[block as usize] -= 1;
        match self.counts[block as usize] {
            0 => return self.retired.push_back((epoch, block)),
            HASHED => {}
            _ => return,
        }
        let entry = &mut self.entries[block as usize];
        (entry.since, entry.older, entry.newer) = (Some(epoch), self.newest, NONE);
        match self.newest {
            NONE => self.oldest = block,
            newest => self.entries[newest as usize].newer = block,
        }
        self.newest = block;
        self.cached += 1;
    }

    /// Returns a retired block that no reader can access any more.
    pub(crate) fn pop_quiescent(&mut self, oldest: RetireEpoch) -> Option<Block> {
        self.retired.pop_front_if(|(epoch, _)| *epoch < oldest).map(|(_, block)| block)
    }

    /// Returns the `count` least recently used blocks that no reader can access, or `None` if there are fewer.
    pub(crate) fn victims(&self, count: u32, oldest: RetireEpoch) -> Option<Vec<Block>> {
        let mut found = Vec::with_capacity(count as usize);
        let mut block = self.oldest;
        while found.len() < count as usize && block != NONE {
            let entry = &self.entries[block as usize];
            if entry.since.is_none_or(|since| since >= oldest) {
                break;
            }
            if self.refs(block) == 0 {
                found.push(block);
            }
            block = entry.newer;
        }
        (found.len() == count as usize).then_some(found)
    }

    /// Returns cached blocks from this one on.
    pub(crate) fn cached_from(&self, first: Block) -> Vec<Block> {
        let all = self.entries.iter().enumerate().skip(first as usize);
        all.filter(|(_, entry)| entry.since.is_some()).map(|(block, _)| block as Block).collect()
    }

    /// Removes a block from the cached blocks: it is no longer found.
    pub(crate) fn evict(&mut self, block: Block) -> RetireEpoch {
        let since = self.entries[block as usize].since.expect("block is cached");
        self.unlink(block);
        self.unpublish(block);
        since
    }

    /// Retires an evicted block until no reader can access it.
    pub(crate) fn retire(&mut self, block: Block, since: RetireEpoch) {
        // Its epoch may be older than those of blocks retired earlier: the newest one is safe for both.
        let since = self.retired.back().map_or(since, |(epoch, _)| since.max(*epoch));
        self.retired.push_back((since, block));
    }

    /// Moves `moved` references and the hash of a block to another one. `to` was just allocated; other references to
    /// `from` remain.
    pub(crate) fn move_refs(&mut self, from: Block, to: Block, moved: u32, epoch: RetireEpoch) {
        self.counts[to as usize] = moved;
        let entry = &mut self.entries[from as usize];
        let (hash, saved) = (entry.hash.take(), std::mem::take(&mut entry.saved));
        if let Some(hash) = hash {
            (self.entries[to as usize].hash, self.entries[to as usize].saved) = (Some(hash), saved);
            self.by_hash.insert(hash, to);
            self.counts[from as usize] &= !HASHED;
            self.counts[to as usize] |= HASHED;
        }
        for _ in 0..moved {
            self.release(from, epoch);
        }
    }

    /// Evicts all cached blocks and returns them.
    pub(crate) fn clear_cached(&mut self) -> Vec<(Block, RetireEpoch)> {
        let mut all = Vec::new();
        while self.oldest != NONE {
            let block = self.oldest;
            all.push((block, self.evict(block)));
        }
        all
    }

    /// Removes the hash of a block, because it will be written again.
    pub(crate) fn unpublish(&mut self, block: Block) {
        let entry = &mut self.entries[block as usize];
        entry.saved = false;
        if let Some(hash) = entry.hash.take() {
            self.by_hash.remove(&hash);
            self.counts[block as usize] &= !HASHED;
        }
    }

    fn unlink(&mut self, block: Block) {
        let entry = &mut self.entries[block as usize];
        let (older, newer) = (entry.older, entry.newer);
        (entry.since, entry.older, entry.newer) = (None, NONE, NONE);
        match older {
            NONE => self.oldest = newer,
            _ => self.entries[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.entries[newer as usize].older = older,
        }
        self.cached -= 1;
    }
}
