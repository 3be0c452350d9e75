//! [`Cache`]: sequences of tokens on blocks. One thread owns it, the engine's scheduler; views are read, and rows are
//! written, by any thread.
//!
//! ```text
//! allocate(prompt) ─▶ fill ─▶ rows are written ─▶ commit ─▶ append(token) ─▶ fill ─▶ … ─▶ free
//!      │ finds the longest                          │ from here on readers see the rows, and other
//!      │ prefix that is there already               │ sequences with the same prefix share full blocks
//! ```
//!
//! Blocks are shared by counting, and are copied when one of those that share a block writes to it. What was freed stays
//! findable by its hash until its block is needed.
//!
//! Invariants: what fails changes nothing that can be seen; a block is in two sequences only if both have the same tokens
//! up to its end, or one is a fork of the other.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicPtr;

use crate::arena::{Arena, ArenaError};
use crate::books::Books;
use crate::fill::{Fill, Held, Part};
use crate::hash::{BlockHash, Token, chain};
use crate::pool::{BLOCKS_MAX, Block, Pool};
use crate::readers::{Readers, Stamp};
use crate::runs::Runs;
use crate::sequence::{Return, Sequence, SequenceId, Shared, Table, Unlinked};
use crate::shape::Shape;
use crate::space::{Full, Space};
use crate::stats::Counts;
use crate::sync::{AtomicU64, Ordering};
use crate::view::{Reader, View};

/// How blocks are given to a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Any free blocks: nothing is ever too scattered to be used, and blocks are shared.
    #[default]
    Paged,
    /// Blocks that follow each other, so that a sequence is one dense view. Nothing is shared: a fork is a copy.
    Contiguous {
        /// Blocks that are kept free behind a sequence for its growth.
        reserve: u32,
    },
}

/// What a cache is made of.
#[derive(Clone, Copy, Debug)]
pub struct CacheConfig {
    /// What its blocks hold.
    pub shape: Shape,
    /// How many there are at first.
    pub blocks: u32,
    /// To how many it [can grow](Cache::resize). Address space, not memory.
    pub blocks_max: u32,
    /// The most sequences at a time.
    pub sequences_max: u32,
    /// The most readers at a time.
    pub readers_max: u32,
    /// How blocks are given to a sequence.
    pub placement: Placement,
}

impl CacheConfig {
    /// Paged blocks that do not grow.
    pub fn new(shape: Shape, blocks: u32) -> CacheConfig {
        let placement = Placement::Paged;
        CacheConfig { shape, blocks, blocks_max: blocks, sequences_max: 4096, readers_max: 64, placement }
    }
}

/// Why nothing was done.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BlocksError {
    /// There are not enough blocks.
    #[error(transparent)]
    Full(#[from] Full),
    /// It was freed, or never was.
    #[error("there is no {0:?}: it was freed, or is another cache's")]
    Unknown(SequenceId),
    /// Somebody writes its rows.
    #[error("rows of {0:?} are being written: commit or drop the fill first")]
    Busy(SequenceId),
    /// Some of its tokens have no rows yet.
    #[error("not all tokens of {0:?} are complete: fill and commit them first")]
    Incomplete(SequenceId),
    /// The pool is another's.
    #[error("this cache was made beside another one, which alone says how many blocks there are")]
    NotOwner,
    /// All places are taken.
    #[error("there are {max} sequences already; the limit is `sequences_max`")]
    Sequences {
        /// The limit.
        max: u32,
    },
    /// All places are taken.
    #[error("there are {max} readers already; the limit is `readers_max`")]
    Readers {
        /// The limit.
        max: u32,
    },
}

/// A new sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// Its name.
    pub id: SequenceId,
    /// So many of its tokens, from the first, need not be computed: another sequence with the same prefix left them.
    pub shared_tokens: usize,
}

/// How much of a prompt may be found instead of computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reuse {
    /// All but the last token: somebody must compute it, for what it says of the next.
    AllButLast,
    All,
}

/// The paged KV cache of one engine.
#[derive(Debug)]
pub struct Cache {
    pub(crate) shared: Arc<Shared>,
    pub(crate) space: Space,
    pub(crate) books: Books,
    sequences: Vec<Slot>,
    free_slots: Vec<u32>,
    /// Tables that readers may still have.
    retired: Vec<(Stamp, Unlinked)>,
    pub(crate) counts: Counts,
    /// Blocks behind the limit are on their way out.
    pub(crate) shrinking: bool,
    pub(crate) sizes: Sizes,
}

/// Who says how many blocks there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sizes {
    /// This cache.
    Own,
    /// The one that this one was made beside.
    Others,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    sequence: Option<Sequence>,
}

impl Cache {
    /// A cache with an arena of its own.
    pub fn new(config: &CacheConfig) -> Result<Cache, ArenaError> {
        let CacheConfig { shape, blocks, blocks_max, placement, .. } = *config;
        if blocks > blocks_max || blocks_max > BLOCKS_MAX {
            return Err(ArenaError::Blocks { blocks, blocks_max });
        }
        let arena = Arc::new(Arena::new(shape, blocks_max)?);
        let space = match placement {
            Placement::Paged => Space::Paged(Arc::new(Pool::new(blocks, blocks_max))),
            Placement::Contiguous { reserve } => {
                Space::Runs { runs: Runs::new(blocks, blocks_max), reserve: reserve.min(blocks_max) }
            }
        };
        Ok(Cache::over(arena, space, config.sequences_max, config.readers_max))
    }

    /// Another cache that takes its blocks from the same pool, for another thread's sequences. The two share no prefixes,
    /// and only this one can be [resized](Cache::resize).
    ///
    /// # Panics
    /// If the blocks are to follow each other: then they are one thread's.
    pub fn beside(&self) -> Cache {
        let Space::Paged(pool) = &self.space else { panic!("contiguous blocks have one owner") };
        let (arena, space) = (Arc::clone(&self.shared.arena), Space::Paged(Arc::clone(pool)));
        let mut beside =
            Cache::over(arena, space, self.sequences.len() as u32, self.shared.readers.max() as u32);
        beside.sizes = Sizes::Others;
        beside
    }

    fn over(arena: Arc<Arena>, space: Space, sequences_max: u32, readers_max: u32) -> Cache {
        let books = Books::new(arena.blocks_max());
        let shared = Shared {
            arena,
            readers: Readers::new(readers_max as usize),
            slots: (0..sequences_max).map(|_| AtomicPtr::default()).collect(),
            returns: parking_lot::Mutex::default(),
            returned: AtomicU64::new(0),
            left: parking_lot::Mutex::default(),
        };
        Cache {
            shared: Arc::new(shared),
            space,
            books,
            sequences: (0..sequences_max).map(|_| Slot { generation: 0, sequence: None }).collect(),
            free_slots: (0..sequences_max).rev().collect(),
            retired: Vec::new(),
            counts: Counts::default(),
            shrinking: false,
            sizes: Sizes::Own,
        }
    }

    /// What its blocks hold.
    pub fn shape(&self) -> &Shape {
        self.shared.arena.shape()
    }

    /// The memory, for whoever makes tensors of all of it.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.shared.arena
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.shape().block_tokens as usize
    }

    /// A new sequence of these tokens, following `root` (see [`BlockHash::root`]). Blocks of the longest prefix that is
    /// there already are shared; the last token is never among them, since somebody must compute what follows it.
    pub fn allocate(&mut self, prompt: &[Token], root: BlockHash) -> Result<Allocated, BlocksError> {
        let hashes = chain(root, prompt, self.block_tokens()).collect();
        self.install(Sequence::new(prompt.to_vec(), hashes, root), Reuse::AllButLast)
    }

    /// Gives a sequence its blocks and its place.
    pub(crate) fn install(&mut self, mut sequence: Sequence, reuse: Reuse) -> Result<Allocated, BlocksError> {
        self.put_in_order();
        let max = self.sequences.len() as u32;
        let slot = *self.free_slots.last().ok_or(BlocksError::Sequences { max })?;
        let tokens = sequence.tokens.len();
        let reusable = match reuse {
            Reuse::AllButLast => tokens.saturating_sub(1) / self.block_tokens(),
            Reuse::All => sequence.hashes.len(),
        };
        let mut blocks: Vec<Block> = Vec::new();
        if self.space.is_paged() {
            let wanted = &sequence.hashes[..reusable.min(sequence.hashes.len())];
            blocks.extend(wanted.iter().map_while(|hash| self.books.find(hash)));
        }
        let found = blocks.len();
        let needed = self.shape().blocks_for(tokens) - found;
        blocks.iter().for_each(|block| self.books.shield(*block));
        match self.take(needed as u32, &mut blocks) {
            Ok(reserve) => sequence.reserve = reserve,
            Err(full) => {
                blocks.iter().for_each(|block| self.books.unshield(*block));
                return Err(full.into());
            }
        }
        blocks[..found].iter().for_each(|block| self.books.take_up(*block));
        self.free_slots.pop();
        let place = &mut self.sequences[slot as usize];
        place.generation = place.generation.wrapping_add(1);
        let id = SequenceId { slot, generation: place.generation };
        let shared_tokens = found * self.shared.arena.shape().block_tokens as usize;
        self.counts.prompt_tokens += tokens as u64;
        self.counts.shared_tokens += shared_tokens as u64;
        self.sequences[slot as usize].sequence = Some(sequence);
        self.set_table(id, shared_tokens, &blocks);
        Ok(Allocated { id, shared_tokens })
    }

    /// One more token, whose rows are still to be [filled](Cache::fill). Takes a block when the last one is full, or
    /// copies it when others have it too; if there is none, the sequence stays as it was.
    #[inline]
    pub fn append(&mut self, id: SequenceId, token: Token) -> Result<(), BlocksError> {
        self.put_in_order();
        let block_tokens = self.block_tokens();
        let sequence = self.sequence_mut(id)?;
        let tokens = sequence.tokens.len();
        if tokens.is_multiple_of(block_tokens) {
            self.grow(id, tokens / block_tokens)?;
            self.sequence_mut(id)?.owns_tail = true;
        } else if !sequence.owns_tail {
            if self.filled(id) >= tokens / block_tokens * block_tokens {
                self.own_tail(id)?;
            }
            self.sequence_mut(id)?.owns_tail = true;
        }
        self.sequence_mut(id)?.push(token, block_tokens);
        Ok(())
    }

    /// The right to write the rows of all tokens that have none yet, from any thread; [`Cache::commit`] makes them visible.
    /// While somebody has it, the sequence may be appended to and read, and nothing else.
    pub fn fill(&mut self, id: SequenceId) -> Result<Fill, BlocksError> {
        self.put_in_order();
        self.idle(id)?;
        let block_tokens = self.block_tokens();
        let filled = self.filled(id);
        if !filled.is_multiple_of(block_tokens) && filled < self.sequence(id)?.tokens.len() {
            self.own_tail(id)?;
        }
        let sequence = self.sequence(id)?;
        let (first, to) = (filled / block_tokens, sequence.tokens.len());
        let parts = (first..to.div_ceil(block_tokens)).map(|at| {
            let (from, to) = (at * block_tokens, ((at + 1) * block_tokens).min(to));
            // The name of a tail is made only when it is wanted: see `Cache::park`.
            let hash = sequence.hashes.get(at).copied();
            Part { hash, block: self.table(id).block(at), tokens: to - from }
        });
        let fill = Fill::new(Arc::clone(&self.shared), id, filled, parts.collect());
        self.sequence_mut(id)?.filling = true;
        Ok(fill)
    }

    /// The rows that were filled are there: readers see them, and full blocks can be shared.
    ///
    /// # Panics
    /// If the fill is another cache's.
    pub fn commit(&mut self, fill: Fill) -> Result<(), BlocksError> {
        self.put_in_order();
        assert!(fill.is_of(&self.shared), "a fill of another cache");
        let (id, filled) = (fill.id(), fill.filled());
        self.counts.restored_tokens += fill.restored() as u64;
        // Whatever comes of it, nobody writes any more.
        fill.finish();
        let block_tokens = self.block_tokens();
        let sequence = self.sequence_mut(id)?;
        assert!(sequence.filling && filled <= sequence.tokens.len(), "{filled} tokens of {id:?}");
        sequence.filling = false;
        let table = self.table(id);
        let before = table.filled();
        table.set_filled(filled);
        if self.space.is_paged() {
            let complete = if moontide_types::planted("named-before-complete") {
                self.sequence(id)?.tokens.len()
            } else {
                filled
            };
            for at in before / block_tokens..complete / block_tokens {
                let hash = self.sequence(id)?.hashes[at];
                self.books.name(self.table(id).block(at), hash);
            }
        }
        Ok(())
    }

    /// A second sequence with the same complete tokens. Blocks are shared until one of the two writes.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, BlocksError> {
        self.put_in_order();
        self.idle(id)?;
        let max = self.sequences.len() as u32;
        let slot = *self.free_slots.last().ok_or(BlocksError::Sequences { max })?;
        let filled = self.filled(id);
        let block_tokens = self.block_tokens();
        let count = self.shape().blocks_for(filled);
        let mut blocks = self.table(id).blocks(count);
        let parent = self.sequence_mut(id)?;
        parent.owns_tail = false;
        let mut child = Sequence::new(parent.tokens[..filled].to_vec(), Vec::new(), parent.root);
        child.hashes = parent.hashes[..filled / block_tokens].to_vec();
        child.worth = parent.worth.iter().copied().take(filled).collect();
        child.sealed = parent.sealed;
        child.thinned = parent.thinned.clone();
        if let Some(thinned) = &mut child.thinned {
            thinned.truncate(filled);
        }
        if self.space.is_paged() {
            blocks.iter().for_each(|block| self.books.share(*block));
        } else {
            let from = std::mem::take(&mut blocks);
            child.reserve = self.take(count as u32, &mut blocks)?;
            for (from, to) in from.into_iter().zip(&blocks) {
                // SAFETY: the one is complete or being read, the other was just taken.
                unsafe { self.shared.arena.copy(from, *to, block_tokens) };
            }
        }
        self.free_slots.pop();
        let place = &mut self.sequences[slot as usize];
        place.generation = place.generation.wrapping_add(1);
        place.sequence = Some(child);
        let id = SequenceId { slot, generation: place.generation };
        self.set_table(id, filled, &blocks);
        self.counts.forks += 1;
        Ok(id)
    }

    /// Takes tokens back from the end, as if they had not been added: what a draft got wrong.
    pub fn truncate(&mut self, id: SequenceId, tokens: usize) -> Result<(), BlocksError> {
        self.put_in_order();
        self.idle(id)?;
        let before = self.sequence(id)?.tokens.len();
        if tokens >= before {
            return Ok(());
        }
        let (block_tokens, filled) = (self.block_tokens(), self.filled(id));
        let all = self.blocks_of(id)?;
        let keep = self.shape().blocks_for(tokens);
        let sequence = self.sequence_mut(id)?;
        sequence.owns_tail = false;
        sequence.tokens.truncate(tokens);
        sequence.hashes.truncate(tokens / block_tokens);
        sequence.worth.truncate(tokens);
        sequence.sealed |= filled > tokens && !moontide_types::planted("taken-back-rows-written");
        sequence.sealed &= !filled.min(tokens).is_multiple_of(block_tokens);
        if let Some(thinned) = &mut sequence.thinned {
            thinned.truncate(tokens);
        }
        if keep < all.len() {
            // It does not follow the last block any more.
            let unused = std::mem::take(&mut sequence.reserve);
            self.give_reserve(&all, unused);
        }
        // Readers that have the old table still see what they saw.
        self.set_table(id, filled.min(tokens), &all[..keep]);
        self.let_go(all.into_iter().skip(keep).rev());
        Ok(())
    }

    /// The sequence is over. Its full blocks stay findable until they are needed for something else; the beginning of a
    /// prefix longer than its end.
    pub fn free(&mut self, id: SequenceId) -> Result<(), BlocksError> {
        self.put_in_order();
        self.idle(id)?;
        let blocks = self.blocks_of(id)?;
        let reserve = self.sequence(id)?.reserve;
        self.sequences[id.slot as usize].sequence = None;
        self.free_slots.push(id.slot);
        let stamp = self.retire_table(id, std::ptr::null_mut());
        self.give_reserve(&blocks, reserve);
        for block in blocks.into_iter().rev() {
            self.books.let_go(block, stamp);
        }
        self.settle();
        Ok(())
    }

    /// Blocks of a sequence that others may want, to be [saved](Held::save) by any thread: all that are full and complete.
    /// They stay until the result is dropped, whatever becomes of the sequence.
    pub fn hold(&mut self, id: SequenceId) -> Result<Held, BlocksError> {
        self.hold_parts(id, false)
    }

    pub(crate) fn hold_parts(&mut self, id: SequenceId, with_tail: bool) -> Result<Held, BlocksError> {
        self.put_in_order();
        let (block_tokens, filled) = (self.block_tokens(), self.filled_of(id)?);
        let sequence = self.sequence(id)?;
        let table = self.table(id);
        let full = filled / block_tokens;
        let mut parts: Vec<Part> = (0..full)
            .map(|at| Part { hash: Some(sequence.hashes[at]), block: table.block(at), tokens: block_tokens })
            .collect();
        if with_tail && !filled.is_multiple_of(block_tokens) {
            let hash = sequence.hash_of(full * block_tokens, filled, block_tokens);
            parts.push(Part { hash: Some(hash), block: table.block(full), tokens: filled % block_tokens });
            self.sequence_mut(id)?.owns_tail = false;
        }
        for part in &parts {
            self.books.share(part.block);
        }
        let known = |part: &Part| self.books.is_saved(part.block) && self.books.hash(part.block) == part.hash;
        let saved = parts.iter().map(known).collect();
        Ok(Held::new(Arc::clone(&self.shared), parts, saved))
    }

    /// A view of a sequence's complete tokens, for the owner's own thread.
    pub fn view(&self, id: SequenceId) -> Result<View<'_>, BlocksError> {
        // SAFETY: the owner is borrowed as long as the view lives, so that nothing is freed or written again.
        let table = unsafe { self.shared.table(id) }.ok_or(BlocksError::Unknown(id))?;
        Ok(View::new(table, &self.shared.arena))
    }

    /// A reader for another thread.
    pub fn reader(&self) -> Result<Reader, BlocksError> {
        let max = self.shared.readers.max() as u32;
        Reader::new(&self.shared).ok_or(BlocksError::Readers { max })
    }

    /// How many tokens a sequence has, complete or not.
    pub fn tokens(&self, id: SequenceId) -> Result<&[Token], BlocksError> {
        Ok(&self.sequence(id)?.tokens)
    }

    /// The blocks of a sequence in order, for kernels that take tables. Those of tokens that are not complete are
    /// listed too.
    pub fn blocks_of(&self, id: SequenceId) -> Result<Vec<Block>, BlocksError> {
        let count = self.shape().blocks_for(self.sequence(id)?.tokens.len());
        Ok(self.table(id).blocks(count))
    }

    /// The names of its full blocks.
    pub fn hashes_of(&self, id: SequenceId) -> Result<&[BlockHash], BlocksError> {
        Ok(&self.sequence(id)?.hashes)
    }

    /// All sequences that there are.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        let places = self.sequences.iter().zip(0..);
        places.filter(|(slot, _)| slot.sequence.is_some()).map(|(place, slot)| {
            let generation = place.generation;
            SequenceId { slot, generation }
        })
    }

    /// Forgets what is cached and in nobody's use.
    pub fn clear(&mut self) {
        self.put_in_order();
        for (block, since) in self.books.clear_cached() {
            self.books.wait(block, since);
        }
        self.settle();
    }

    pub(crate) fn sequence(&self, id: SequenceId) -> Result<&Sequence, BlocksError> {
        let place = self.sequences.get(id.slot as usize).filter(|place| place.generation == id.generation);
        place.and_then(|place| place.sequence.as_ref()).ok_or(BlocksError::Unknown(id))
    }

    pub(crate) fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, BlocksError> {
        let place = self.sequences.get_mut(id.slot as usize).filter(|place| place.generation == id.generation);
        place.and_then(|place| place.sequence.as_mut()).ok_or(BlocksError::Unknown(id))
    }

    /// That it is there and nobody writes to it.
    pub(crate) fn idle(&self, id: SequenceId) -> Result<(), BlocksError> {
        if self.sequence(id)?.filling { Err(BlocksError::Busy(id)) } else { Ok(()) }
    }

    /// The table of a sequence that is there.
    #[inline]
    pub(crate) fn table(&self, id: SequenceId) -> &Table {
        // SAFETY: this is the owner, and tables are taken away through `&mut self` only.
        unsafe { self.shared.table(id) }.expect("a sequence that is there has a table")
    }

    pub(crate) fn filled(&self, id: SequenceId) -> usize {
        self.table(id).filled()
    }

    /// How many of its tokens are complete.
    pub fn filled_of(&self, id: SequenceId) -> Result<usize, BlocksError> {
        self.sequence(id)?;
        Ok(self.filled(id))
    }

    /// Puts a table in the place of the one before.
    pub(crate) fn set_table(&mut self, id: SequenceId, filled: usize, blocks: &[Block]) {
        // Room for as many again, so that a sequence that grows is copied a few times only.
        let capacity = (blocks.len() + 1).next_power_of_two().max(4);
        let table = Box::new(Table::new(id.generation, filled, blocks, capacity));
        self.retire_table(id, Box::into_raw(table));
    }

    fn retire_table(&mut self, id: SequenceId, new: *mut Table) -> Stamp {
        // Release; pairs with the Acquire of `Shared::table`.
        let old = self.shared.slots[id.slot as usize].swap(new, Ordering::AcqRel);
        let stamp = self.shared.readers.stamp();
        if let Some(old) = NonNull::new(old) {
            // SAFETY: made by `Box::into_raw`, and just taken out of the only place where it was.
            self.retired.push((stamp, unsafe { Unlinked::new(old) }));
        }
        stamp
    }

    /// A block more for a sequence, as its `at`th.
    fn grow(&mut self, id: SequenceId, at: usize) -> Result<(), BlocksError> {
        let reserve = self.sequence(id)?.reserve;
        if self.space.is_paged() {
            let block = self.take_one()?;
            self.list(id, at, block);
            return Ok(());
        }
        let next = if at == 0 { None } else { Some(self.table(id).block(at - 1) + 1) };
        if reserve > 0 {
            let block = next.expect("a reserve follows a block");
            self.sequence_mut(id)?.reserve -= 1;
            self.books.take(block);
            self.list(id, at, block);
        } else if let Some(reserve) = next.and_then(|next| self.space.extend(next)) {
            self.sequence_mut(id)?.reserve = reserve;
            self.books.take(next.expect("just asked for"));
            self.list(id, at, next.expect("just asked for"));
        } else {
            self.idle(id)?;
            self.relocate(id, at, at as u32 + 1)?;
        }
        Ok(())
    }

    /// Moves a contiguous sequence of `used` blocks to a run of so many.
    pub(crate) fn relocate(&mut self, id: SequenceId, used: usize, count: u32) -> Result<(), BlocksError> {
        let (from, mut to) = (self.table(id).blocks(used), Vec::new());
        let reserve = self.take(count, &mut to)?;
        for (from, to) in from.iter().zip(&to) {
            // SAFETY: nobody writes the sequence, as it is idle; the others were just taken.
            unsafe { self.shared.arena.copy(*from, *to, self.block_tokens()) };
        }
        let filled = self.filled(id);
        self.set_table(id, filled, &to);
        let sequence = self.sequence_mut(id)?;
        let unused = std::mem::replace(&mut sequence.reserve, reserve);
        self.give_reserve(&from, unused);
        self.counts.moved_blocks += used as u64;
        self.let_go(from);
        Ok(())
    }

    /// Gives back what was kept behind these blocks. Nobody has ever seen it.
    pub(crate) fn give_reserve(&mut self, blocks: &[Block], reserve: u32) {
        let end = blocks.last().map_or(0, |last| last + 1);
        self.space.give(end..end + reserve);
    }

    /// Writes a block into the table, or into a larger one.
    fn list(&mut self, id: SequenceId, at: usize, block: Block) {
        if at < self.table(id).capacity() {
            self.table(id).set_block(at, block);
            return;
        }
        let mut blocks = self.table(id).blocks(at);
        blocks.push(block);
        let filled = self.filled(id);
        self.set_table(id, filled, &blocks);
    }

    /// Makes sure that the block of the next row to be written is this sequence's alone, and was never seen further than
    /// it is complete.
    fn own_tail(&mut self, id: SequenceId) -> Result<(), BlocksError> {
        let filled = self.filled(id);
        let (at, rows) = (filled / self.block_tokens(), filled % self.block_tokens());
        let block = self.table(id).block(at);
        let sequence = self.sequence(id)?;
        if sequence.filling
            || moontide_types::planted("tail-written-while-shared")
            || self.books.refs(block) == 1 && !self.books.is_named(block) && !sequence.sealed
        {
            return Ok(());
        }
        if !self.space.is_paged() {
            // A run stays together: all of it moves.
            let used = self.shape().blocks_for(sequence.tokens.len());
            self.relocate(id, used, used as u32)?;
        } else {
            let copy = self.take_one()?;
            // SAFETY: complete rows are not written; the copy was just taken.
            unsafe { self.shared.arena.copy(block, copy, rows) };
            self.table(id).set_block(at, copy);
            self.let_go([block]);
            self.counts.copied_blocks += 1;
        }
        self.sequence_mut(id)?.sealed = false;
        Ok(())
    }

    /// A block of a sequence that others have seen is no longer its own.
    pub(crate) fn let_go(&mut self, blocks: impl IntoIterator<Item = Block>) {
        let stamp = self.shared.readers.stamp();
        for block in blocks {
            self.books.let_go(block, stamp);
        }
        self.settle();
    }

    /// Gives back what nobody can be reading any more.
    pub(crate) fn settle(&mut self) {
        let mut oldest = self.shared.readers.oldest();
        if moontide_types::planted("reused-while-read") {
            oldest = self.shared.readers.stamp();
        }
        let (books, retired) = (&mut self.books, &mut self.retired);
        self.space.give(std::iter::from_fn(|| books.settled(oldest)));
        retired.retain(|(stamp, _)| *stamp >= oldest);
        if self.shrinking {
            self.finish_shrinking();
        }
    }

    /// What others have dropped since the last time.
    #[inline]
    pub(crate) fn put_in_order(&mut self) {
        if self.shared.returned.load(Ordering::Relaxed) > 0 {
            self.take_returns();
        }
    }

    #[cold]
    fn take_returns(&mut self) {
        // Acquire; pairs with the Release of `put_back`.
        self.shared.returned.swap(0, Ordering::Acquire);
        let returns = std::mem::take(&mut *self.shared.returns.lock());
        for what in returns {
            match what {
                Return::Fill(id) => {
                    if let Ok(sequence) = self.sequence_mut(id) {
                        sequence.filling = false;
                        // Some rows may have been written: no matter, they were never shown.
                    }
                }
                Return::Blocks { blocks, saved } => {
                    for (hash, block) in &blocks[..saved] {
                        self.books.set_saved(*block, *hash);
                    }
                    self.let_go(blocks.into_iter().map(|(_, block)| block).rev());
                }
            }
        }
    }
}

impl Drop for Cache {
    /// Gives its blocks back to a pool that others may share; if readers are in, or something is held, what they could
    /// see is lost to the pool instead.
    fn drop(&mut self) {
        self.put_in_order();
        let ids: Vec<_> = self.sequences().collect();
        for id in ids {
            // One that is being written keeps its blocks.
            let _ = self.free(id);
        }
        self.clear();
        // Tables that readers have: the last one of them frees them.
        let tables = std::mem::take(&mut self.retired).into_iter().map(|(_, table)| table);
        self.shared.left.lock().extend(tables);
    }
}
