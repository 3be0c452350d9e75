//! [`SequenceId`], and the two parts of a sequence: the reader-visible [`BlockTable`], and the owner's state.
//!
//! A table is an array of block numbers with the count of complete tokens. The owner appends blocks, and may replace a
//! block by another one with the same rows; any other change installs a new table. So a reader of a table sees tokens
//! that the sequence had at one time.
//!
//! Invariant: in the blocks of a table, the rows up to `computed_tokens` are complete and are not written again while a
//! reader has the table.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::AtomicPtr;

use moontide_rt::sync::{AtomicU32, AtomicU64, Ordering};

use crate::arena::Arena;
use crate::hash::{BlockHash, Token};
use crate::pool::Block;
use crate::reader_epochs::ReaderEpochs;

/// Id of a sequence. It is never reused: the id of a freed sequence stays unknown (as long as no more than 2³²
/// sequences use its slot).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl SequenceId {
    /// Converts the id to a number, for other languages.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    /// Creates an id from a number. Any number is valid; calls check whether the sequence exists.
    pub fn from_bits(bits: u64) -> SequenceId {
        SequenceId { slot: bits as u32, generation: (bits >> 32) as u32 }
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}", self.slot, self.generation)
    }
}

impl fmt::Debug for SequenceId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "sequence {self}")
    }
}

/// Reader-visible part of a sequence.
#[derive(Debug)]
pub(crate) struct BlockTable {
    pub(crate) generation: u32,
    /// Number of tokens whose rows are complete.
    computed_tokens: AtomicU64,
    entries: Box<[AtomicU32]>,
}

impl BlockTable {
    pub(crate) fn new(
        generation: u32,
        computed_tokens: usize,
        blocks: &[Block],
        capacity: usize,
    ) -> BlockTable {
        let entry = |at| AtomicU32::new(blocks.get(at).copied().unwrap_or(Block::MAX));
        let entries = (0..capacity.max(blocks.len())).map(entry).collect();
        BlockTable { generation, computed_tokens: AtomicU64::new(computed_tokens as u64), entries }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.entries.len()
    }

    #[inline]
    pub(crate) fn computed_tokens(&self) -> usize {
        // Acquire; pairs with the Release of `set_computed_tokens`: rows are complete before they are counted.
        self.computed_tokens.load(Ordering::Acquire) as usize
    }

    pub(crate) fn set_computed_tokens(&self, computed_tokens: usize) {
        self.computed_tokens.store(computed_tokens as u64, Ordering::Release);
    }

    #[inline]
    pub(crate) fn block(&self, at: usize) -> Block {
        // Acquire; pairs with the Release of `set_block`: a copy is complete before it is in the table.
        self.entries[at].load(Ordering::Acquire)
    }

    pub(crate) fn set_block(&self, at: usize, block: Block) {
        self.entries[at].store(block, Ordering::Release);
    }

    pub(crate) fn blocks(&self, count: usize) -> Vec<Block> {
        (0..count).map(|at| self.block(at)).collect()
    }
}

/// A table that is in no slot any more; dropping this frees it. Not a box: readers may still have it.
#[derive(Debug)]
pub(crate) struct RetiredTable(NonNull<BlockTable>);

// SAFETY: a table can be read and freed by any thread.
unsafe impl Send for RetiredTable {}

impl RetiredTable {
    /// # Safety
    /// The pointer is from `Box::into_raw`, and nothing else frees it.
    pub(crate) unsafe fn new(table: NonNull<BlockTable>) -> RetiredTable {
        RetiredTable(table)
    }
}

impl Drop for RetiredTable {
    fn drop(&mut self) {
        // SAFETY: owned by this value, as `new` requires; the holder of this value has waited for the readers.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// State shared by the owner, its readers, writers and pins.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) arena: std::sync::Arc<Arena>,
    pub(crate) readers: ReaderEpochs,
    /// One for each concurrent sequence; null if unused.
    pub(crate) slots: Box<[AtomicPtr<BlockTable>]>,
    /// Dropped writers and pins, to be processed by the owner.
    pub(crate) released: parking_lot::Mutex<Vec<Released>>,
    pub(crate) returned: AtomicU64,
    /// Tables of a dropped cache, which readers may still have.
    pub(crate) orphaned_tables: parking_lot::Mutex<Vec<RetiredTable>>,
}

/// Something that its holder has dropped.
#[derive(Debug)]
pub(crate) enum Released {
    /// A writer of this sequence, without a commit.
    Writer(SequenceId),
    /// A pin of these blocks. The first `saved` of them are in the store.
    Blocks { blocks: Vec<(BlockHash, Block)>, saved: usize },
}

impl Shared {
    pub(crate) fn push_released(&self, released: Released) {
        self.released.lock().push(released);
        self.returned.fetch_add(1, Ordering::Release);
    }

    /// Returns the table of a sequence, if it exists.
    ///
    /// # Safety
    /// The caller is the owner, or an active reader; the result must not be used after the reader has left.
    #[inline]
    pub(crate) unsafe fn table<'a>(&self, id: SequenceId) -> Option<&'a BlockTable> {
        // Acquire; pairs with the Release of the store that installed it.
        let table = self.slots.get(id.slot as usize)?.load(Ordering::Acquire);
        // SAFETY: a table lives until no reader can access it, which an active reader guarantees.
        let table = unsafe { table.as_ref() }?;
        (table.generation == id.generation).then_some(table)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            if let Some(table) = NonNull::new(*slot.get_mut()) {
                // SAFETY: made by `Box::into_raw`; no reader or owner is left that could have it.
                drop(unsafe { RetiredTable::new(table) });
            }
        }
    }
}

/// Owner's state of a sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<Token>,
    /// Hash of each full block of those tokens.
    pub(crate) hashes: Vec<BlockHash>,
    /// Hash that precedes the first block.
    pub(crate) root: BlockHash,
    /// The sequence has an open writer.
    pub(crate) has_writer: bool,
    /// Readers saw rows after the last complete one, before a truncation: these rows must not be written.
    pub(crate) sealed: bool,
    /// The last block is known to belong to this sequence alone, and is not sealed: true as long as it cannot have
    /// become shared.
    pub(crate) owns_tail: bool,
    /// Blocks after its own that are reserved for it, for contiguous placement.
    pub(crate) reserve: u32,
    /// Set if tokens were dropped from the sequence.
    pub(crate) pruned: Option<PrunedState>,
    /// Scores of its tokens, as far as they were set.
    pub(crate) scores: Vec<f32>,
}

/// State of a sequence from which tokens were dropped.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PrunedState {
    /// Blocks before this one are unchanged.
    pub(crate) from_block: usize,
    /// Hash of all tokens before the pruning, in whose presence the remaining rows were computed.
    pub(crate) history: BlockHash,
    /// Number of rows, from the first, that were computed before the pruning.
    pub(crate) old: usize,
    /// Original position of each token; appended tokens follow the highest one ever used.
    pub(crate) positions: Vec<u32>,
    /// Position of the next token.
    pub(crate) next: u32,
}

impl PrunedState {
    /// Removes tokens from the end: the next one gets the position of the first removed one.
    pub(crate) fn truncate(&mut self, tokens: usize) {
        if let Some(first) = self.positions.get(tokens) {
            self.next = *first;
            self.positions.truncate(tokens);
            self.old = self.old.min(tokens);
        }
    }
}

impl Sequence {
    pub(crate) fn new(tokens: Vec<Token>, hashes: Vec<BlockHash>, root: BlockHash) -> Sequence {
        Sequence {
            tokens,
            hashes,
            root,
            has_writer: false,
            sealed: false,
            owns_tail: false,
            reserve: 0,
            pruned: None,
            scores: Vec::new(),
        }
    }

    /// Returns the hash of tokens `from..to`, which begin a block.
    pub(crate) fn hash_of(&self, from: usize, to: usize, block_tokens: usize) -> BlockHash {
        let block = from / block_tokens;
        let parent = if block == 0 { self.root } else { self.hashes[block - 1] };
        let has_holes = |pruned: &&PrunedState| {
            block >= pruned.from_block && !moontide_rt::mutation_enabled("holes-not-in-names")
        };
        let Some(pruned) = self.pruned.as_ref().filter(has_holes) else {
            return parent.extend(&self.tokens[from..to]);
        };
        let parent = if block == pruned.from_block { parent.after_dropping(&pruned.history) } else { parent };
        parent.extend_words((from..to).map(|row| {
            let (token, position) = (u64::from(self.tokens[row]), u64::from(pruned.positions[row]));
            let since = u64::from(row >= pruned.old);
            since << 63 | (position + 1) << 32 | token
        }))
    }

    /// Handles the loss of rows from this one on, which will be computed again in the presence of the current tokens.
    /// After a pruning these rows differ from the lost ones, and so do their hashes.
    pub(crate) fn lose_rows(&mut self, from: usize, block_tokens: usize) {
        let Some(pruned) = self.pruned.as_mut().filter(|pruned| from < pruned.old) else { return };
        pruned.old = from;
        self.hashes.truncate(from / block_tokens);
        self.hash_blocks(block_tokens);
    }

    /// Adds the hashes of full blocks that have none.
    pub(crate) fn hash_blocks(&mut self, block_tokens: usize) {
        for at in self.hashes.len()..self.tokens.len() / block_tokens {
            let hash = self.hash_of(at * block_tokens, (at + 1) * block_tokens, block_tokens);
            self.hashes.push(hash);
        }
    }

    pub(crate) fn push(&mut self, token: Token, block_tokens: usize) {
        self.tokens.push(token);
        if let Some(pruned) = &mut self.pruned {
            pruned.positions.push(pruned.next);
            pruned.next += 1;
        }
        if self.tokens.len().is_multiple_of(block_tokens) {
            self.hash_blocks(block_tokens);
        }
    }
}
