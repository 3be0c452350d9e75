//! [`Reader`], [`Guard`] and [`View`]: how threads look at sequences while the owner goes on.
//!
//! A reader enters once for as many views as it likes, at the price of a store and a fence; a view is two loads. While a
//! guard lives, no block that it could have found is given out again, so that views need no count and no lock; and a view
//! cannot outlive its guard, nor a guard the reader. Whoever stays in for long keeps memory from being used again.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::arena::{Arena, Rows};
use crate::pool::Block;
use crate::sequence::{SequenceId, Shared, Table};
use crate::shape::Plane;

/// A thread's door to a cache.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    cell: usize,
    /// A cell is one thread's at a time: it may go to another thread, but not be shared.
    not_sync: PhantomData<Cell<()>>,
}

impl Reader {
    pub(crate) fn new(shared: &Arc<Shared>) -> Option<Reader> {
        let cell = shared.readers.join()?;
        Some(Reader { shared: Arc::clone(shared), cell, not_sync: PhantomData })
    }

    /// From here on nothing that can be seen goes away.
    #[inline]
    pub fn enter(&mut self) -> Guard<'_> {
        self.shared.readers.enter(self.cell);
        Guard { reader: self }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.readers.part(self.cell);
    }
}

/// A reader that is in.
#[derive(Debug)]
pub struct Guard<'r> {
    reader: &'r mut Reader,
}

impl Guard<'_> {
    /// A sequence as it is now, if it is still there.
    #[inline]
    pub fn view(&self, id: SequenceId) -> Option<View<'_>> {
        let shared = &self.reader.shared;
        // SAFETY: this reader is in for as long as the view lives.
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
    table: &'g Table,
    tokens: usize,
    arena: &'g Arena,
}

impl<'g> View<'g> {
    #[inline]
    pub(crate) fn new(table: &'g Table, arena: &'g Arena) -> View<'g> {
        View { table, tokens: table.filled(), arena }
    }

    /// How many tokens it has.
    #[inline]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// In how many blocks they are.
    #[inline]
    pub fn block_count(&self) -> usize {
        self.arena.shape().blocks_for(self.tokens)
    }

    /// Which blocks those are: the block table of paged kernels.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = Block> + use<'g> {
        let table = self.table;
        (0..self.block_count()).map(move |at| table.block(at))
    }

    /// The tokens of its `at`th block: as many as a block has, or fewer in the last.
    ///
    /// # Panics
    /// If there is no such block, layer or plane.
    #[inline]
    pub fn rows(&self, plane: Plane, layer: u32, at: usize) -> Rows<'g> {
        let block_tokens = self.arena.shape().block_tokens as usize;
        let tokens = self.tokens.checked_sub(at * block_tokens).expect("a block of the view").min(block_tokens);
        assert!(tokens > 0, "block {at} of {}", self.block_count());
        // SAFETY: complete rows are not written, and their block not given out, while the view lives.
        unsafe { self.arena.rows(plane, layer, self.table.block(at), tokens) }
    }

    /// All tokens as one dense view, if their blocks follow each other.
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
