//! Views that belong to no thread: the complete tokens of a sequence as they are now, in blocks that are [`Held`].
//!
//! A [`View`](crate::View) borrows from a reader and costs next to nothing, but while its reader is in, nothing at all that
//! was let go since can be used again. What is pinned costs a count for each block and keeps those alone, for as long as it
//! likes: for languages that cannot be asked to leave, whose arrays live until their last reference is gone.
//!
//! Invariant: rows that are shown are complete, and are not written while they are held. A last block that is not full
//! counts as shared, so that the sequence's next token goes into a copy of it (of the whole run, if blocks are to follow
//! each other), unless this was dropped before.

use crate::arena::Rows;
use crate::cache::{BlocksError, Cache};
use crate::fill::Held;
use crate::sequence::SequenceId;
use crate::shape::Plane;

impl Cache {
    /// All complete tokens of a sequence, to be read by anybody until the result is dropped, whatever becomes of the
    /// sequence. Unlike of [`Cache::hold`], those of a last block that is not full are among them.
    pub fn pin(&mut self, id: SequenceId) -> Result<Held, BlocksError> {
        self.hold_parts(id, true)
    }
}

impl Held {
    /// How many tokens there are in its blocks.
    pub fn tokens(&self) -> usize {
        self.parts.iter().map(|part| part.tokens).sum()
    }

    /// The tokens of its `at`th block: as many as a block has, or fewer in the last.
    ///
    /// # Panics
    /// If there is no such block, layer or plane.
    pub fn rows(&self, plane: Plane, layer: u32, at: usize) -> Rows<'_> {
        let part = self.parts[at];
        // SAFETY: complete rows of a held block are not written, and it is held as long as the result lives.
        unsafe { self.shared.arena.rows(plane, layer, part.block, part.tokens) }
    }

    /// All tokens as one dense view, if their blocks follow each other.
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
