//! [`Cache`]: sequences of tokens on blocks. One thread owns it, the engine's scheduler; any thread can read views and
//! write rows.
//!
//! ```text
//! allocate(prompt) ─▶ writer ─▶ rows are written ─▶ commit ─▶ append(token) ─▶ writer ─▶ … ─▶ free
//!      │ finds the longest                           │ from here on readers see the rows, and other
//!      │ cached prefix                               │ sequences with the same prefix share full blocks
//! ```
//!
//! Blocks are shared by reference counts, and copied when a sequence writes to a shared block. Blocks of a freed
//! sequence stay findable by their hashes until they are needed.
//!
//! Invariants: a failed call changes nothing visible; a block is in two sequences only if both have the same tokens up
//! to its end, or one is a fork of the other.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicPtr;

use moontide_rt::sync::{AtomicU64, Ordering};

use crate::allocator::{BlockAllocator, OutOfBlocks};
use crate::arena::{Arena, ArenaError};
use crate::block_index::BlockIndex;
use crate::hash::{BlockHash, Token, block_hashes};
use crate::pool::{BLOCKS_MAX, Block, BlockPool};
use crate::reader_epochs::{ReaderEpochs, RetireEpoch};
use crate::run_allocator::RunAllocator;
use crate::sequence::{BlockTable, Released, RetiredTable, Sequence, SequenceId, Shared};
use crate::shape::CacheShape;
use crate::stats::CacheCounters;
use crate::view::{Reader, View};
use crate::writer::{BlockSpan, PinnedBlocks, SequenceWriter};

/// Placement of a sequence's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockPlacement {
    /// Any free blocks: there is no fragmentation, and blocks are shared.
    #[default]
    Paged,
    /// Contiguous blocks, so that a sequence is one dense view. Nothing is shared: a fork is a copy.
    Contiguous {
        /// Blocks kept free after a sequence for its growth.
        reserve: u32,
    },
}

/// Configuration of a cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheConfig {
    /// Shape of the blocks.
    pub shape: CacheShape,
    /// Initial number of blocks.
    pub blocks: u32,
    /// Maximum number of blocks after [growth](Cache::resize). Address space, not memory.
    pub blocks_max: u32,
    /// Maximum number of concurrent sequences.
    pub sequences_max: u32,
    /// Maximum number of concurrent readers.
    pub readers_max: u32,
    /// Placement of a sequence's blocks.
    pub placement: BlockPlacement,
}

impl CacheConfig {
    /// Configuration with paged blocks and without growth.
    pub fn new(shape: CacheShape, blocks: u32) -> CacheConfig {
        let placement = BlockPlacement::Paged;
        CacheConfig { shape, blocks, blocks_max: blocks, sequences_max: 4096, readers_max: 64, placement }
    }
}

/// Failure of a call. Nothing has changed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CacheError {
    /// Not enough free blocks.
    #[error(transparent)]
    Full(#[from] OutOfBlocks),
    /// The sequence was freed, or never existed.
    #[error("unknown {0:?}: it was freed, or is another cache's")]
    Unknown(SequenceId),
    /// The sequence has an open writer.
    #[error("{0:?} has an open writer: commit or drop it first")]
    Busy(SequenceId),
    /// Some tokens of the sequence have no rows yet.
    #[error("{0:?} has tokens without rows: write and commit them first")]
    Incomplete(SequenceId),
    /// The cache shares the pool of another one, which owns it.
    #[error("this cache shares the pool of another one, which alone can be resized")]
    NotOwner,
    /// Too many sequences.
    #[error("limit of {max} sequences reached; raise `sequences_max`")]
    Sequences {
        /// `sequences_max` of the configuration.
        max: u32,
    },
    /// Too many readers.
    #[error("limit of {max} readers reached; raise `readers_max`")]
    Readers {
        /// `readers_max` of the configuration.
        max: u32,
    },
}

/// Result of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// Id of the new sequence.
    pub id: SequenceId,
    /// Number of tokens, from the first, whose rows exist already because of another sequence with the same prefix.
    pub cached_tokens: usize,
}

/// Part of a prompt that may be found instead of computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// All but the last token: the engine must compute it to get the next one.
    AllButLast,
    All,
}

/// Paged KV cache of one engine.
#[derive(Debug)]
pub struct Cache {
    pub(crate) shared: Arc<Shared>,
    pub(crate) allocator: BlockAllocator,
    pub(crate) index: BlockIndex,
    sequences: Vec<Slot>,
    free_slots: Vec<u32>,
    /// Tables that readers may still have.
    retired_tables: Vec<(RetireEpoch, RetiredTable)>,
    pub(crate) counts: CacheCounters,
    /// Blocks above the limit are still in use.
    pub(crate) shrinking: bool,
    pub(crate) pool_owner: PoolOwner,
}

/// Owner of the pool, which determines the number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolOwner {
    /// This cache.
    Own,
    /// The cache whose pool this one shares.
    Shared,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    sequence: Option<Sequence>,
}

impl Cache {
    /// Creates a cache with its own arena.
    pub fn new(config: &CacheConfig) -> Result<Cache, ArenaError> {
        let CacheConfig { shape, blocks, blocks_max, placement, .. } = *config;
        if blocks > blocks_max || blocks_max > BLOCKS_MAX {
            return Err(ArenaError::Blocks { blocks, blocks_max });
        }
        let arena = Arc::new(Arena::new(shape, blocks_max)?);
        let allocator = match placement {
            BlockPlacement::Paged => BlockAllocator::Paged(Arc::new(BlockPool::new(blocks, blocks_max))),
            BlockPlacement::Contiguous { reserve } => BlockAllocator::Runs {
                runs: RunAllocator::new(blocks, blocks_max),
                reserve: reserve.min(blocks_max),
            },
        };
        Ok(Cache::with_arena(arena, allocator, config.sequences_max, config.readers_max))
    }

    /// Creates another cache on the same pool, for sequences of another thread. The two share no prefixes, and only
    /// this one can be [resized](Cache::resize).
    ///
    /// # Panics
    /// If the placement is contiguous: then one thread owns all blocks.
    pub fn sharing_pool(&self) -> Cache {
        let BlockAllocator::Paged(pool) = &self.allocator else {
            panic!("contiguous blocks cannot be shared")
        };
        let (arena, allocator) = (Arc::clone(&self.shared.arena), BlockAllocator::Paged(Arc::clone(pool)));
        let mut other = Cache::with_arena(
            arena,
            allocator,
            self.sequences.len() as u32,
            self.shared.readers.max() as u32,
        );
        other.pool_owner = PoolOwner::Shared;
        other
    }

    fn with_arena(
        arena: Arc<Arena>,
        allocator: BlockAllocator,
        sequences_max: u32,
        readers_max: u32,
    ) -> Cache {
        let index = BlockIndex::new(arena.blocks_max());
        let shared = Shared {
            arena,
            readers: ReaderEpochs::new(readers_max as usize),
            slots: (0..sequences_max).map(|_| AtomicPtr::default()).collect(),
            released: parking_lot::Mutex::default(),
            returned: AtomicU64::new(0),
            orphaned_tables: parking_lot::Mutex::default(),
        };
        Cache {
            shared: Arc::new(shared),
            allocator,
            index,
            sequences: (0..sequences_max).map(|_| Slot { generation: 0, sequence: None }).collect(),
            free_slots: (0..sequences_max).rev().collect(),
            retired_tables: Vec::new(),
            counts: CacheCounters::default(),
            shrinking: false,
            pool_owner: PoolOwner::Own,
        }
    }

    /// Shape of the blocks.
    pub fn shape(&self) -> &CacheShape {
        self.shared.arena.shape()
    }

    /// Memory of the cache, for the construction of tensors over all of it.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.shared.arena
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.shape().block_tokens as usize
    }

    /// Creates a sequence of these tokens, following `root` (see [`BlockHash::root`]). It shares the blocks of the
    /// longest cached prefix; the last token is never part of it, since the engine must compute the next one from it.
    pub fn allocate(&mut self, prompt: &[Token], root: BlockHash) -> Result<Allocated, CacheError> {
        let hashes = block_hashes(root, prompt, self.block_tokens()).collect();
        self.insert_sequence(Sequence::new(prompt.to_vec(), hashes, root), Reuse::AllButLast)
    }

    /// Allocates the blocks and the slot of a sequence.
    pub(crate) fn insert_sequence(
        &mut self,
        mut sequence: Sequence,
        reuse: Reuse,
    ) -> Result<Allocated, CacheError> {
        self.process_returns();
        let max = self.sequences.len() as u32;
        let slot = *self.free_slots.last().ok_or(CacheError::Sequences { max })?;
        let tokens = sequence.tokens.len();
        let reusable = match reuse {
            Reuse::AllButLast => tokens.saturating_sub(1) / self.block_tokens(),
            Reuse::All => sequence.hashes.len(),
        };
        let mut blocks: Vec<Block> = Vec::new();
        if self.allocator.is_paged() {
            let hashes = &sequence.hashes[..reusable.min(sequence.hashes.len())];
            blocks.extend(hashes.iter().map_while(|hash| self.index.find(hash)));
        }
        let found = blocks.len();
        let needed = self.shape().blocks_for(tokens) - found;
        blocks.iter().for_each(|block| self.index.protect(*block));
        match self.alloc(needed as u32, &mut blocks) {
            Ok(reserve) => sequence.reserve = reserve,
            Err(full) => {
                blocks.iter().for_each(|block| self.index.unprotect(*block));
                return Err(full.into());
            }
        }
        blocks[..found].iter().for_each(|block| self.index.reuse(*block));
        self.free_slots.pop();
        let entry = &mut self.sequences[slot as usize];
        entry.generation = entry.generation.wrapping_add(1);
        let id = SequenceId { slot, generation: entry.generation };
        let cached_tokens = found * self.shared.arena.shape().block_tokens as usize;
        self.counts.prompt_tokens += tokens as u64;
        self.counts.cached_tokens += cached_tokens as u64;
        self.sequences[slot as usize].sequence = Some(sequence);
        self.set_table(id, cached_tokens, &blocks);
        Ok(Allocated { id, cached_tokens })
    }

    /// Appends a token, whose rows are still to be [written](Cache::writer). Allocates a block when the last one is
    /// full, or copies it when it is shared; if there is none, the sequence is unchanged.
    #[inline]
    pub fn append(&mut self, id: SequenceId, token: Token) -> Result<(), CacheError> {
        self.process_returns();
        let block_tokens = self.block_tokens();
        let sequence = self.sequence_mut(id)?;
        let tokens = sequence.tokens.len();
        if tokens.is_multiple_of(block_tokens) {
            self.grow(id, tokens / block_tokens)?;
            self.sequence_mut(id)?.owns_tail = true;
        } else if !sequence.owns_tail {
            if self.computed(id) >= tokens / block_tokens * block_tokens {
                self.own_tail(id)?;
            }
            self.sequence_mut(id)?.owns_tail = true;
        }
        self.sequence_mut(id)?.push(token, block_tokens);
        Ok(())
    }

    /// Returns the right to write the rows of all tokens that have none yet, from any thread; [`Cache::commit`] makes
    /// them visible. While the writer exists, the sequence can only be appended to and read.
    pub fn writer(&mut self, id: SequenceId) -> Result<SequenceWriter, CacheError> {
        self.process_returns();
        self.idle(id)?;
        let block_tokens = self.block_tokens();
        let computed = self.computed(id);
        if !computed.is_multiple_of(block_tokens) && computed < self.sequence(id)?.tokens.len() {
            self.own_tail(id)?;
        }
        let sequence = self.sequence(id)?;
        let (first, to) = (computed / block_tokens, sequence.tokens.len());
        let spans = (first..to.div_ceil(block_tokens)).map(|at| {
            let (from, to) = (at * block_tokens, ((at + 1) * block_tokens).min(to));
            // The hash of a tail is computed only on demand: see `Cache::suspend`.
            let hash = sequence.hashes.get(at).copied();
            BlockSpan { hash, block: self.table(id).block(at), tokens: to - from }
        });
        let writer = SequenceWriter::new(Arc::clone(&self.shared), id, computed, spans.collect());
        self.sequence_mut(id)?.has_writer = true;
        Ok(writer)
    }

    /// Makes the written rows visible to readers, and full blocks shareable.
    ///
    /// # Panics
    /// If the writer belongs to another cache.
    pub fn commit(&mut self, writer: SequenceWriter) -> Result<(), CacheError> {
        self.process_returns();
        assert!(writer.belongs_to(&self.shared), "writer belongs to another cache");
        let (id, computed) = (writer.id(), writer.computed_tokens());
        self.counts.restored_tokens += writer.restored() as u64;
        // No thread writes any more, whether the commit succeeds or not.
        writer.finish();
        let block_tokens = self.block_tokens();
        let sequence = self.sequence_mut(id)?;
        assert!(
            sequence.has_writer && computed <= sequence.tokens.len(),
            "{computed} written tokens exceed {id:?}"
        );
        sequence.has_writer = false;
        let table = self.table(id);
        let before = table.computed_tokens();
        table.set_computed_tokens(computed);
        if self.allocator.is_paged() {
            let complete = if moontide_rt::mutation_enabled("named-before-complete") {
                self.sequence(id)?.tokens.len()
            } else {
                computed
            };
            for at in before / block_tokens..complete / block_tokens {
                let hash = self.sequence(id)?.hashes[at];
                self.index.publish(self.table(id).block(at), hash);
            }
        }
        Ok(())
    }

    /// Creates a second sequence with the same complete tokens. Blocks are shared until one of the two writes.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, CacheError> {
        self.process_returns();
        self.idle(id)?;
        let max = self.sequences.len() as u32;
        let slot = *self.free_slots.last().ok_or(CacheError::Sequences { max })?;
        let computed = self.computed(id);
        let block_tokens = self.block_tokens();
        let count = self.shape().blocks_for(computed);
        let mut blocks = self.table(id).blocks(count);
        let parent = self.sequence_mut(id)?;
        parent.owns_tail = false;
        let mut child = Sequence::new(parent.tokens[..computed].to_vec(), Vec::new(), parent.root);
        child.hashes = parent.hashes[..computed / block_tokens].to_vec();
        child.scores = parent.scores.iter().copied().take(computed).collect();
        child.sealed = parent.sealed;
        child.pruned = parent.pruned.clone();
        if let Some(pruned) = &mut child.pruned {
            pruned.truncate(computed);
        }
        if self.allocator.is_paged() {
            blocks.iter().for_each(|block| self.index.share(*block));
        } else {
            let from = std::mem::take(&mut blocks);
            child.reserve = self.alloc(count as u32, &mut blocks)?;
            for (from, to) in from.into_iter().zip(&blocks) {
                // SAFETY: the source is complete or being read, the target was just allocated.
                unsafe { self.shared.arena.copy(from, *to, block_tokens) };
            }
        }
        self.free_slots.pop();
        let entry = &mut self.sequences[slot as usize];
        entry.generation = entry.generation.wrapping_add(1);
        entry.sequence = Some(child);
        let id = SequenceId { slot, generation: entry.generation };
        self.set_table(id, computed, &blocks);
        self.counts.forks += 1;
        Ok(id)
    }

    /// Removes tokens from the end, as if they had not been added: for rejected draft tokens.
    pub fn truncate(&mut self, id: SequenceId, tokens: usize) -> Result<(), CacheError> {
        self.process_returns();
        self.idle(id)?;
        let before = self.sequence(id)?.tokens.len();
        if tokens >= before {
            return Ok(());
        }
        let (block_tokens, computed) = (self.block_tokens(), self.computed(id));
        let all = self.blocks_of(id)?;
        let keep = self.shape().blocks_for(tokens);
        let sequence = self.sequence_mut(id)?;
        sequence.owns_tail = false;
        sequence.tokens.truncate(tokens);
        sequence.hashes.truncate(tokens / block_tokens);
        sequence.scores.truncate(tokens);
        sequence.sealed |= computed > tokens && !moontide_rt::mutation_enabled("taken-back-rows-written");
        sequence.sealed &= !computed.min(tokens).is_multiple_of(block_tokens);
        if let Some(pruned) = &mut sequence.pruned {
            pruned.truncate(tokens);
        }
        if keep < all.len() {
            // The reserve does not follow the last block any more.
            let unused = std::mem::take(&mut sequence.reserve);
            self.free_reserve(&all, unused);
        }
        // Readers with the old table still see the old state.
        self.set_table(id, computed.min(tokens), &all[..keep]);
        self.release_blocks(all.into_iter().skip(keep).rev());
        Ok(())
    }

    /// Ends a sequence. Its full blocks stay findable until they are needed; the start of a prefix longer than its end.
    pub fn free(&mut self, id: SequenceId) -> Result<(), CacheError> {
        self.process_returns();
        self.idle(id)?;
        let blocks = self.blocks_of(id)?;
        let reserve = self.sequence(id)?.reserve;
        self.sequences[id.slot as usize].sequence = None;
        self.free_slots.push(id.slot);
        let epoch = self.retire_table(id, std::ptr::null_mut());
        self.free_reserve(&blocks, reserve);
        for block in blocks.into_iter().rev() {
            self.index.release(block, epoch);
        }
        self.reclaim();
        Ok(())
    }

    /// Pins all full and complete blocks of a sequence, to be [saved](PinnedBlocks::save) by any thread. They stay
    /// valid until the result is dropped, even if the sequence is freed.
    pub fn pin_full_blocks(&mut self, id: SequenceId) -> Result<PinnedBlocks, CacheError> {
        self.pin_spans(id, false)
    }

    pub(crate) fn pin_spans(&mut self, id: SequenceId, with_tail: bool) -> Result<PinnedBlocks, CacheError> {
        self.process_returns();
        let (block_tokens, computed) = (self.block_tokens(), self.computed_tokens(id)?);
        let sequence = self.sequence(id)?;
        let table = self.table(id);
        let full = computed / block_tokens;
        let mut spans: Vec<BlockSpan> = (0..full)
            .map(|at| BlockSpan {
                hash: Some(sequence.hashes[at]),
                block: table.block(at),
                tokens: block_tokens,
            })
            .collect();
        if with_tail && !computed.is_multiple_of(block_tokens) {
            let hash = sequence.hash_of(full * block_tokens, computed, block_tokens);
            spans.push(BlockSpan {
                hash: Some(hash),
                block: table.block(full),
                tokens: computed % block_tokens,
            });
            self.sequence_mut(id)?.owns_tail = false;
        }
        for span in &spans {
            self.index.share(span.block);
        }
        let is_saved =
            |span: &BlockSpan| self.index.is_saved(span.block) && self.index.hash(span.block) == span.hash;
        let saved = spans.iter().map(is_saved).collect();
        Ok(PinnedBlocks::new(Arc::clone(&self.shared), spans, saved))
    }

    /// Returns a view of a sequence's complete tokens, for the owner's thread.
    pub fn view(&self, id: SequenceId) -> Result<View<'_>, CacheError> {
        // SAFETY: the owner is borrowed as long as the view lives, so that nothing is freed or written again.
        let table = unsafe { self.shared.table(id) }.ok_or(CacheError::Unknown(id))?;
        Ok(View::new(table, &self.shared.arena))
    }

    /// Creates a reader for another thread.
    pub fn reader(&self) -> Result<Reader, CacheError> {
        let max = self.shared.readers.max() as u32;
        Reader::new(&self.shared).ok_or(CacheError::Readers { max })
    }

    /// Returns the tokens of a sequence, complete or not.
    pub fn tokens(&self, id: SequenceId) -> Result<&[Token], CacheError> {
        Ok(&self.sequence(id)?.tokens)
    }

    /// Returns the blocks of a sequence in order, for kernels with block tables. Includes those of incomplete tokens.
    pub fn blocks_of(&self, id: SequenceId) -> Result<Vec<Block>, CacheError> {
        let count = self.shape().blocks_for(self.sequence(id)?.tokens.len());
        Ok(self.table(id).blocks(count))
    }

    /// Returns the hashes of the full blocks.
    pub fn hashes_of(&self, id: SequenceId) -> Result<&[BlockHash], CacheError> {
        Ok(&self.sequence(id)?.hashes)
    }

    /// Returns all sequences.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        let entries = self.sequences.iter().zip(0..);
        entries.filter(|(entry, _)| entry.sequence.is_some()).map(|(entry, slot)| {
            let generation = entry.generation;
            SequenceId { slot, generation }
        })
    }

    /// Evicts all cached blocks that no sequence uses.
    pub fn clear(&mut self) {
        self.process_returns();
        for (block, since) in self.index.clear_cached() {
            self.index.retire(block, since);
        }
        self.reclaim();
    }

    pub(crate) fn sequence(&self, id: SequenceId) -> Result<&Sequence, CacheError> {
        let entry = self.sequences.get(id.slot as usize).filter(|entry| entry.generation == id.generation);
        entry.and_then(|entry| entry.sequence.as_ref()).ok_or(CacheError::Unknown(id))
    }

    pub(crate) fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, CacheError> {
        let entry =
            self.sequences.get_mut(id.slot as usize).filter(|entry| entry.generation == id.generation);
        entry.and_then(|entry| entry.sequence.as_mut()).ok_or(CacheError::Unknown(id))
    }

    /// Checks that the sequence exists and has no open writer.
    pub(crate) fn idle(&self, id: SequenceId) -> Result<(), CacheError> {
        if self.sequence(id)?.has_writer { Err(CacheError::Busy(id)) } else { Ok(()) }
    }

    /// Returns the table of an existing sequence.
    #[inline]
    pub(crate) fn table(&self, id: SequenceId) -> &BlockTable {
        // SAFETY: this is the owner, and tables are removed through `&mut self` only.
        unsafe { self.shared.table(id) }.expect("existing sequence has a table")
    }

    pub(crate) fn computed(&self, id: SequenceId) -> usize {
        self.table(id).computed_tokens()
    }

    /// Returns the number of complete tokens.
    pub fn computed_tokens(&self, id: SequenceId) -> Result<usize, CacheError> {
        self.sequence(id)?;
        Ok(self.computed(id))
    }

    /// Replaces the table of a sequence.
    pub(crate) fn set_table(&mut self, id: SequenceId, computed: usize, blocks: &[Block]) {
        // Capacity for twice as many, so that a growing sequence is copied only a few times.
        let capacity = (blocks.len() + 1).next_power_of_two().max(4);
        let table = Box::new(BlockTable::new(id.generation, computed, blocks, capacity));
        self.retire_table(id, Box::into_raw(table));
    }

    fn retire_table(&mut self, id: SequenceId, new: *mut BlockTable) -> RetireEpoch {
        // Release; pairs with the Acquire of `Shared::table`.
        let old = self.shared.slots[id.slot as usize].swap(new, Ordering::AcqRel);
        let epoch = self.shared.readers.next_epoch();
        if let Some(old) = NonNull::new(old) {
            // SAFETY: made by `Box::into_raw`, and just removed from its only location.
            self.retired_tables.push((epoch, unsafe { RetiredTable::new(old) }));
        }
        epoch
    }

    /// Allocates the `at`th block of a sequence.
    fn grow(&mut self, id: SequenceId, at: usize) -> Result<(), CacheError> {
        let reserve = self.sequence(id)?.reserve;
        if self.allocator.is_paged() {
            let block = self.alloc_one()?;
            self.set_block(id, at, block);
            return Ok(());
        }
        let next = if at == 0 { None } else { Some(self.table(id).block(at - 1) + 1) };
        if reserve > 0 {
            let block = next.expect("reserve follows a block");
            self.sequence_mut(id)?.reserve -= 1;
            self.index.acquire(block);
            self.set_block(id, at, block);
        } else if let Some(reserve) = next.and_then(|next| self.allocator.extend(next)) {
            self.sequence_mut(id)?.reserve = reserve;
            self.index.acquire(next.expect("next block was allocated"));
            self.set_block(id, at, next.expect("next block was allocated"));
        } else {
            self.idle(id)?;
            self.relocate(id, at, at as u32 + 1)?;
        }
        Ok(())
    }

    /// Moves a contiguous sequence of `used` blocks to a run of `count` blocks.
    pub(crate) fn relocate(&mut self, id: SequenceId, used: usize, count: u32) -> Result<(), CacheError> {
        let (from, mut to) = (self.table(id).blocks(used), Vec::new());
        let reserve = self.alloc(count, &mut to)?;
        for (from, to) in from.iter().zip(&to) {
            // SAFETY: no thread writes the sequence, as it is idle; the targets were just allocated.
            unsafe { self.shared.arena.copy(*from, *to, self.block_tokens()) };
        }
        let computed = self.computed(id);
        self.set_table(id, computed, &to);
        let sequence = self.sequence_mut(id)?;
        let unused = std::mem::replace(&mut sequence.reserve, reserve);
        self.free_reserve(&from, unused);
        self.counts.moved_blocks += used as u64;
        self.release_blocks(from);
        Ok(())
    }

    /// Frees the reserve after these blocks. No reader has ever seen it.
    pub(crate) fn free_reserve(&mut self, blocks: &[Block], reserve: u32) {
        let end = blocks.last().map_or(0, |last| last + 1);
        self.allocator.free_blocks(end..end + reserve);
    }

    /// Writes a block into the table, or into a larger one.
    fn set_block(&mut self, id: SequenceId, at: usize, block: Block) {
        if at < self.table(id).capacity() {
            self.table(id).set_block(at, block);
            return;
        }
        let mut blocks = self.table(id).blocks(at);
        blocks.push(block);
        let computed = self.computed(id);
        self.set_table(id, computed, &blocks);
    }

    /// Ensures that the block of the next row to be written belongs to this sequence alone, and that no reader has seen
    /// rows of it beyond the complete ones.
    fn own_tail(&mut self, id: SequenceId) -> Result<(), CacheError> {
        let computed = self.computed(id);
        let (at, rows) = (computed / self.block_tokens(), computed % self.block_tokens());
        let block = self.table(id).block(at);
        let sequence = self.sequence(id)?;
        if sequence.has_writer
            || moontide_rt::mutation_enabled("tail-written-while-shared")
            || self.index.refs(block) == 1 && !self.index.is_hashed(block) && !sequence.sealed
        {
            return Ok(());
        }
        if !self.allocator.is_paged() {
            // A run stays contiguous: all of it moves.
            let used = self.shape().blocks_for(sequence.tokens.len());
            self.relocate(id, used, used as u32)?;
        } else {
            let copy = self.alloc_one()?;
            // SAFETY: complete rows are not written; the copy was just allocated.
            unsafe { self.shared.arena.copy(block, copy, rows) };
            self.table(id).set_block(at, copy);
            self.release_blocks([block]);
            self.counts.copied_blocks += 1;
        }
        self.sequence_mut(id)?.sealed = false;
        Ok(())
    }

    /// Removes references of a sequence to blocks that readers may have seen.
    pub(crate) fn release_blocks(&mut self, blocks: impl IntoIterator<Item = Block>) {
        let epoch = self.shared.readers.next_epoch();
        for block in blocks {
            self.index.release(block, epoch);
        }
        self.reclaim();
    }

    /// Frees blocks and tables that no reader can access any more.
    pub(crate) fn reclaim(&mut self) {
        let mut oldest = self.shared.readers.min_active();
        if moontide_rt::mutation_enabled("reused-while-read") {
            oldest = self.shared.readers.next_epoch();
        }
        let (index, retired_tables) = (&mut self.index, &mut self.retired_tables);
        self.allocator.free_blocks(std::iter::from_fn(|| index.pop_quiescent(oldest)));
        retired_tables.retain(|(epoch, _)| *epoch >= oldest);
        if self.shrinking {
            self.finish_shrinking();
        }
    }

    /// Processes writers and pins that other threads have dropped.
    #[inline]
    pub(crate) fn process_returns(&mut self) {
        if self.shared.returned.load(Ordering::Relaxed) > 0 {
            self.drain_released();
        }
    }

    #[cold]
    fn drain_released(&mut self) {
        // Acquire; pairs with the Release of `push_released`.
        self.shared.returned.swap(0, Ordering::Acquire);
        let released = std::mem::take(&mut *self.shared.released.lock());
        for item in released {
            match item {
                Released::Writer(id) => {
                    if let Ok(sequence) = self.sequence_mut(id) {
                        sequence.has_writer = false;
                        // Some rows may have been written, which is harmless: they were never visible.
                    }
                }
                Released::Blocks { blocks, saved } => {
                    for (hash, block) in &blocks[..saved] {
                        self.index.set_saved(*block, *hash);
                    }
                    self.release_blocks(blocks.into_iter().map(|(_, block)| block).rev());
                }
            }
        }
    }
}

impl Drop for Cache {
    /// Frees all blocks to the pool, which other caches may share. Blocks that active readers or pins can access are
    /// lost to the pool instead.
    fn drop(&mut self) {
        self.process_returns();
        let ids: Vec<_> = self.sequences().collect();
        for id in ids {
            // A sequence with an open writer keeps its blocks.
            let _ = self.free(id);
        }
        self.clear();
        // Tables of active readers: dropping `Shared` frees them, after the last reader.
        let tables = std::mem::take(&mut self.retired_tables).into_iter().map(|(_, table)| table);
        self.shared.orphaned_tables.lock().extend(tables);
    }
}
