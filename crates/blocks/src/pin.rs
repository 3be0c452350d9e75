//! Views that belong to no thread: the complete tokens of a sequence at one time, in [`PinnedBlocks`].
//!
//! A [`View`](crate::View) borrows from a reader and costs almost nothing, but while its reader is active, no block
//! released since can be reused. A pin costs a reference count for each block and keeps only those blocks, for any
//! time: for languages with arrays that live until their last reference is gone.
//!
//! Invariant: visible rows are complete, and are not written while they are pinned. A last block that is not full
//! counts as shared, so that the sequence's next token goes into a copy of it (of the whole run, if the placement is
//! contiguous), unless the pin was dropped before.

use crate::arena::Rows;
use crate::cache::{Cache, CacheError};
use crate::sequence::SequenceId;
use crate::shape::Plane;
use crate::writer::PinnedBlocks;

impl Cache {
    /// Pins all complete tokens of a sequence, for any thread, until the result is dropped, even if the sequence is
    /// freed. In contrast to [`Cache::pin_full_blocks`], it includes the tokens of a last block that is not full.
    pub fn pin(&mut self, id: SequenceId) -> Result<PinnedBlocks, CacheError> {
        self.pin_spans(id, true)
    }
}

impl PinnedBlocks {
    /// Number of tokens in the blocks.
    pub fn tokens(&self) -> usize {
        self.spans.iter().map(|span| span.tokens).sum()
    }

    /// Returns the tokens of the `at`th block: a full block, or fewer in the last.
    ///
    /// # Panics
    /// If there is no such block, layer or plane.
    pub fn rows(&self, plane: Plane, layer: u32, at: usize) -> Rows<'_> {
        let span = self.spans[at];
        // SAFETY: complete rows of a pinned block are not written, and it is pinned as long as the result lives.
        unsafe { self.shared.arena.rows(plane, layer, span.block, span.tokens) }
    }

    /// Returns all tokens as one dense view, if their blocks are contiguous.
    ///
    /// # Panics
    /// If there is no such layer or plane.
    pub fn contiguous(&self, plane: Plane, layer: u32) -> Option<Rows<'_>> {
        let mut blocks = self.blocks();
        let first = blocks.next()?;
        if !blocks.zip(first + 1..).all(|(block, next)| block == next) {
            return None;
        }
        // SAFETY: as above, for all of them.
        Some(unsafe { self.shared.arena.rows(plane, layer, first, self.tokens()) })
    }
}
