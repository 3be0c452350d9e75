//! [`SequenceId`], and the two halves of a sequence: what readers see of it ([`Table`]), and what its owner knows.
//!
//! A table is an array of block numbers with the count of tokens that are complete. The owner adds blocks behind, and may
//! replace a block by another one with the same rows; whatever else changes, changes by a new table in the old one's
//! place. So whoever has a table sees tokens that were once the sequence's, all of one time.
//!
//! Invariant: of the blocks that a table lists, the rows up to `filled` are complete and are not written again while a
//! reader has the table.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::AtomicPtr;

use crate::arena::Arena;
use crate::hash::{BlockHash, Token};
use crate::pool::Block;
use crate::readers::Readers;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// The name of a sequence. It is never used twice: one that was freed stays unknown for ever (as long as no more than
/// 2³² sequences pass through its place).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl SequenceId {
    /// As a number, to be carried through other languages.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    /// From that number. Any number will do: what it names is looked up.
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

/// What readers see of a sequence.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) generation: u32,
    /// Tokens whose rows are complete.
    filled: AtomicU64,
    entries: Box<[AtomicU32]>,
}

impl Table {
    pub(crate) fn new(generation: u32, filled: usize, blocks: &[Block], capacity: usize) -> Table {
        let entry = |at| AtomicU32::new(blocks.get(at).copied().unwrap_or(Block::MAX));
        let entries = (0..capacity.max(blocks.len())).map(entry).collect();
        Table { generation, filled: AtomicU64::new(filled as u64), entries }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.entries.len()
    }

    #[inline]
    pub(crate) fn filled(&self) -> usize {
        // Acquire; pairs with the Release of `set_filled`: rows are complete before they are counted.
        self.filled.load(Ordering::Acquire) as usize
    }

    pub(crate) fn set_filled(&self, filled: usize) {
        self.filled.store(filled as u64, Ordering::Release);
    }

    #[inline]
    pub(crate) fn block(&self, at: usize) -> Block {
        // Acquire; pairs with the Release of `set_block`: a copy is complete before it is listed.
        self.entries[at].load(Ordering::Acquire)
    }

    pub(crate) fn set_block(&self, at: usize, block: Block) {
        self.entries[at].store(block, Ordering::Release);
    }

    pub(crate) fn blocks(&self, count: usize) -> Vec<Block> {
        (0..count).map(|at| self.block(at)).collect()
    }
}

/// A table that is in no slot any more, and is freed with this. Not a box: readers may still have it.
#[derive(Debug)]
pub(crate) struct Unlinked(NonNull<Table>);

// SAFETY: a table can be read and freed by any thread.
unsafe impl Send for Unlinked {}

impl Unlinked {
    /// # Safety
    /// The pointer is from `Box::into_raw`, and nobody else frees it.
    pub(crate) unsafe fn new(table: NonNull<Table>) -> Unlinked {
        Unlinked(table)
    }
}

impl Drop for Unlinked {
    fn drop(&mut self) {
        // SAFETY: ours to free, as `new` was told; whoever keeps this has waited for the readers.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// What the owner, its readers, and whatever they hold have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) arena: std::sync::Arc<Arena>,
    pub(crate) readers: Readers,
    /// One for each sequence that there can be at a time; null where there is none.
    pub(crate) slots: Box<[AtomicPtr<Table>]>,
    /// What was dropped by others, for the owner to put in order.
    pub(crate) returns: parking_lot::Mutex<Vec<Return>>,
    pub(crate) returned: AtomicU64,
    /// Tables of a cache that is gone, which readers may still have.
    pub(crate) left: parking_lot::Mutex<Vec<Unlinked>>,
}

/// Something that its holder has dropped.
#[derive(Debug)]
pub(crate) enum Return {
    /// Nobody writes to this sequence any more; nothing was added to it.
    Fill(SequenceId),
    /// Nobody reads these blocks any more. The first so many of them are in the store.
    Blocks { blocks: Vec<(BlockHash, Block)>, saved: usize },
}

impl Shared {
    pub(crate) fn put_back(&self, what: Return) {
        self.returns.lock().push(what);
        self.returned.fetch_add(1, Ordering::Release);
    }

    /// The table of a sequence, if it is still there.
    ///
    /// # Safety
    /// The caller is the owner, or a reader that is in; the result must not be used when it has left.
    #[inline]
    pub(crate) unsafe fn table<'a>(&self, id: SequenceId) -> Option<&'a Table> {
        // Acquire; pairs with the Release of whoever put it there.
        let table = self.slots.get(id.slot as usize)?.load(Ordering::Acquire);
        // SAFETY: a table lives until nobody can be reading it, which is what being in is for.
        let table = unsafe { table.as_ref() }?;
        (table.generation == id.generation).then_some(table)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            if let Some(table) = NonNull::new(*slot.get_mut()) {
                // SAFETY: made by `Box::into_raw`; nobody is left who could have it.
                drop(unsafe { Unlinked::new(table) });
            }
        }
    }
}

/// What its owner knows of a sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<Token>,
    /// The hash of each full block of those tokens.
    pub(crate) hashes: Vec<BlockHash>,
    /// What the first block follows.
    pub(crate) root: BlockHash,
    /// Somebody writes its rows.
    pub(crate) filling: bool,
    /// The rows behind the last complete one were seen by readers, before tokens were taken back: they must not be written.
    pub(crate) sealed: bool,
    /// Its last block is known to be its alone, and not sealed: true as long as nobody could have come to share it.
    pub(crate) owns_tail: bool,
    /// Blocks behind its own that are kept for it, if they are to follow each other.
    pub(crate) reserve: u32,
    /// Tokens were dropped from it.
    pub(crate) thinned: Option<Thinned>,
    /// What its tokens are worth, as far as that was said.
    pub(crate) worth: Vec<f32>,
}

/// A sequence of which tokens were dropped.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Thinned {
    /// Blocks before this one are as they were.
    pub(crate) from_block: usize,
    /// All that there was, in whose presence the rows were computed that are left.
    pub(crate) history: BlockHash,
    /// So many rows, from the first, were computed then; those behind them since.
    pub(crate) old: usize,
    /// Where each token stood; tokens that are added follow the last one that there ever was.
    pub(crate) positions: Vec<u32>,
    /// The next token's position.
    pub(crate) next: u32,
}

impl Thinned {
    /// Takes tokens back from the end: the next one stands where the first of them did.
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
            filling: false,
            sealed: false,
            owns_tail: false,
            reserve: 0,
            thinned: None,
            worth: Vec::new(),
        }
    }

    /// The hash of tokens `from..to`, which begin a block.
    pub(crate) fn hash_of(&self, from: usize, to: usize, block_tokens: usize) -> BlockHash {
        let block = from / block_tokens;
        let parent = if block == 0 { self.root } else { self.hashes[block - 1] };
        let holes = |thinned: &&Thinned| {
            block >= thinned.from_block && !moontide_types::planted("holes-not-in-names")
        };
        let Some(thinned) = self.thinned.as_ref().filter(holes) else {
            return parent.then(&self.tokens[from..to]);
        };
        let parent = if block == thinned.from_block { parent.after_dropping(&thinned.history) } else { parent };
        parent.then_words((from..to).map(|row| {
            let (token, position) = (u64::from(self.tokens[row]), u64::from(thinned.positions[row]));
            let since = u64::from(row >= thinned.old);
            since << 63 | (position + 1) << 32 | token
        }))
    }

    /// Rows from this one on are lost, and will be computed in the presence of what there is now: of a sequence from which
    /// tokens were dropped they will not be the same, nor have the same names.
    pub(crate) fn lose_rows(&mut self, from: usize, block_tokens: usize) {
        let Some(thinned) = self.thinned.as_mut().filter(|thinned| from < thinned.old) else { return };
        thinned.old = from;
        self.hashes.truncate(from / block_tokens);
        self.name_blocks(block_tokens);
    }

    /// Adds the names of full blocks that have none.
    pub(crate) fn name_blocks(&mut self, block_tokens: usize) {
        for at in self.hashes.len()..self.tokens.len() / block_tokens {
            let hash = self.hash_of(at * block_tokens, (at + 1) * block_tokens, block_tokens);
            self.hashes.push(hash);
        }
    }

    pub(crate) fn push(&mut self, token: Token, block_tokens: usize) {
        self.tokens.push(token);
        if let Some(thinned) = &mut self.thinned {
            thinned.positions.push(thinned.next);
            thinned.next += 1;
        }
        if self.tokens.len().is_multiple_of(block_tokens) {
            self.name_blocks(block_tokens);
        }
    }
}
