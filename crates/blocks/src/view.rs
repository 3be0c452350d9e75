//! [`Reader`], [`Guard`] and [`View`]: concurrent reads of sequences.
//!
//! A reader enters once for any number of views, at the cost of a store and a fence; a view costs two loads. While a
//! guard exists, no block that it could have found is reused, so that views need no count and no lock. A view cannot
//! outlive its guard, nor a guard its reader. A guard that is held for a long time prevents the reuse of memory.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::arena::{Arena, Rows};
use crate::pool::Block;
use crate::sequence::{BlockTable, SequenceId, Shared};
use crate::shape::Plane;

/// Per-thread read handle of a cache.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    cell: usize,
    /// A cell belongs to one thread at a time: it may be sent to another thread, but not shared.
    not_sync: PhantomData<Cell<()>>,
}

impl Reader {
    pub(crate) fn new(shared: &Arc<Shared>) -> Option<Reader> {
        let cell = shared.readers.register()?;
        Some(Reader { shared: Arc::clone(shared), cell, not_sync: PhantomData })
    }

    /// Enters a read section. Everything visible in it stays valid until the guard is dropped.
    #[inline]
    pub fn enter(&mut self) -> Guard<'_> {
        self.shared.readers.enter(self.cell);
        Guard { reader: self }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.readers.unregister(self.cell);
    }
}

/// An active read section of a reader.
#[derive(Debug)]
pub struct Guard<'r> {
    reader: &'r mut Reader,
}

impl Guard<'_> {
    /// Returns the current state of a sequence, if it exists.
    #[inline]
    pub fn view(&self, id: SequenceId) -> Option<View<'_>> {
        let shared = &self.reader.shared;
        // SAFETY: this reader is active for as long as the view lives.
        let table = unsafe { shared.table(id) }?;
        Some(View::new(table, &shared.arena))
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.reader.shared.readers.leave(self.reader.cell);
    }
}

/// The complete tokens of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct View<'g> {
    table: &'g BlockTable,
    tokens: usize,
    arena: &'g Arena,
}

impl<'g> View<'g> {
    #[inline]
    pub(crate) fn new(table: &'g BlockTable, arena: &'g Arena) -> View<'g> {
        View { table, tokens: table.computed_tokens(), arena }
    }

    /// Number of tokens.
    #[inline]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of blocks of these tokens.
    #[inline]
    pub fn block_count(&self) -> usize {
        self.arena.shape().blocks_for(self.tokens)
    }

    /// Returns these blocks: the block table of paged kernels.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = Block> + use<'g> {
        let table = self.table;
        (0..self.block_count()).map(move |at| table.block(at))
    }

    /// Returns the tokens of the `at`th block: a full block, or fewer in the last.
    ///
    /// # Panics
    /// If there is no such block, layer or plane.
    #[inline]
    pub fn rows(&self, plane: Plane, layer: u32, at: usize) -> Rows<'g> {
        let block_tokens = self.arena.shape().block_tokens as usize;
        let tokens = self
            .tokens
            .checked_sub(at * block_tokens)
            .expect("block index is out of range")
            .min(block_tokens);
        assert!(tokens > 0, "block {at} is out of range: view has {} blocks", self.block_count());
        // SAFETY: complete rows are not written, and their block is not reused, while the view lives.
        unsafe { self.arena.rows(plane, layer, self.table.block(at), tokens) }
    }

    /// Returns all tokens as one dense view, if their blocks are contiguous.
    pub fn contiguous(&self, plane: Plane, layer: u32) -> Option<Rows<'g>> {
        let mut blocks = self.blocks();
        let first = blocks.next()?;
        if !blocks.zip(first + 1..).all(|(block, next)| block == next) {
            return None;
        }
        // SAFETY: as above, for all of them.
        Some(unsafe { self.arena.rows(plane, layer, first, self.tokens) })
    }
}
