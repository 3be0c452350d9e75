//! [`SequenceWriter`], the right to write rows, and [`PinnedBlocks`], blocks that stay valid while they are read. Both
//! belong to no thread, so that copying and computing run concurrently with the owner; dropping them notifies the
//! owner.
//!
//! Invariants: a sequence has at most one writer, and its rows are not visible before the commit; a pinned block is
//! neither written nor reused.

use std::sync::Arc;

use crate::arena::RowsMut;
use crate::hash::BlockHash;
use crate::pool::Block;
use crate::sequence::{Released, SequenceId, Shared};
use crate::shape::{Plane, RowIndex};
use crate::store::{BlockSource, BlockStore, BlockTarget};

/// A block, or the first tokens of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockSpan {
    /// Hash under which it is stored, if it can be.
    pub(crate) hash: Option<BlockHash>,
    pub(crate) block: Block,
    pub(crate) tokens: usize,
}

/// Rows of a sequence to be written.
#[derive(Debug)]
pub struct SequenceWriter {
    shared: Arc<Shared>,
    id: SequenceId,
    /// First token that has no rows yet.
    from: usize,
    /// Tokens up to this one have rows.
    computed_tokens: usize,
    /// From the block of `from` on.
    spans: Vec<BlockSpan>,
    /// Number of complete tokens that were loaded from a store.
    restored: usize,
    finished: bool,
}

impl SequenceWriter {
    pub(crate) fn new(
        shared: Arc<Shared>,
        id: SequenceId,
        from: usize,
        spans: Vec<BlockSpan>,
    ) -> SequenceWriter {
        SequenceWriter { shared, id, from, computed_tokens: from, spans, restored: 0, finished: false }
    }

    /// Id of the sequence.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Number of tokens whose rows are complete.
    pub fn computed_tokens(&self) -> usize {
        self.computed_tokens
    }

    /// Range of the tokens whose rows are to be written, counted from the sequence's first.
    pub fn tokens(&self) -> std::ops::Range<usize> {
        self.computed_tokens..self.end()
    }

    fn block_tokens(&self) -> usize {
        self.shared.arena.shape().block_tokens as usize
    }

    fn end(&self) -> usize {
        let first = self.from / self.block_tokens() * self.block_tokens();
        first + self.spans.iter().map(|span| span.tokens).sum::<usize>()
    }

    /// Returns the block of a token, and its index in the block.
    fn locate(&self, token: usize) -> (BlockSpan, usize) {
        let first = self.from / self.block_tokens();
        (self.spans[token / self.block_tokens() - first], token % self.block_tokens())
    }

    /// Returns the rows from this token to the end of its block.
    ///
    /// # Panics
    /// If the token is not to be written, or there is no such layer or plane.
    #[inline]
    pub fn rows(&mut self, plane: Plane, layer: u32, token: usize) -> RowsMut<'_> {
        assert!(self.tokens().contains(&token), "token {token} is not in {:?}", self.tokens());
        let (span, at) = self.locate(token);
        let index = RowIndex { plane, layer, block: span.block, token: at as u32, head: 0 };
        // SAFETY: rows after `computed_tokens` are not visible to any reader, and this writer is the only one.
        unsafe { self.shared.arena.rows_mut(index, span.tokens - at) }
    }

    /// Copies from a dense `[tokens, heads, dim]` that begins with the first token to be written.
    ///
    /// # Panics
    /// If it has more tokens than are to be written, or the length is not a multiple of a token.
    pub fn write(&mut self, plane: Plane, layer: u32, dense: &[u8]) {
        let shape = self.shared.arena.shape();
        let token_bytes = shape.heads() * shape.row_bytes();
        assert!(
            dense.len().is_multiple_of(token_bytes) && dense.len() / token_bytes <= self.tokens().len(),
            "{} bytes, {token_bytes} per token, do not fit tokens {:?}",
            dense.len(),
            self.tokens()
        );
        let (mut at, mut rest) = (self.computed_tokens, dense);
        while !rest.is_empty() {
            let (span, within) = self.locate(at);
            let tokens = (rest.len() / token_bytes).min(span.tokens - within);
            let (now, later) = rest.split_at(tokens * token_bytes);
            let index = RowIndex { plane, layer, block: span.block, token: within as u32, head: 0 };
            // SAFETY: as above.
            unsafe { self.shared.arena.rows_mut(index, tokens) }.copy_from(now);
            (at, rest) = (at + tokens, later);
        }
    }

    /// Marks the rows of `tokens` more tokens as complete, in all layers and planes.
    ///
    /// # Panics
    /// If those are more than are to be written.
    pub fn mark_written(&mut self, tokens: usize) {
        assert!(tokens <= self.tokens().len(), "{tokens} tokens exceed {:?}", self.tokens());
        self.computed_tokens += tokens;
    }

    /// Loads these blocks from a store, directly into the arena, up to the first one that it does not have. Returns the
    /// number of loaded tokens, which are complete now. If the store fails, nothing is marked as complete.
    pub fn restore<S: BlockStore + ?Sized>(&mut self, store: &S) -> Result<usize, S::Error> {
        if self.computed_tokens != self.from || !self.from.is_multiple_of(self.block_tokens()) {
            return Ok(0);
        }
        let hashes: Vec<BlockHash> = self.spans.iter().map_while(|span| span.hash).collect();
        let available = if hashes.is_empty() { 0 } else { store.prefix(&hashes)?.min(hashes.len()) };
        if available == 0 {
            return Ok(0);
        }
        let arena = &self.shared.arena;
        let mut targets: Vec<BlockTarget<'_>> = self.spans[..available]
            .iter()
            .zip(hashes)
            .map(|(span, hash)| {
                let pieces = arena.pieces(span.block, span.tokens).map(|(at, len)| {
                    // SAFETY: rows that no reader sees, of different blocks; this writer is borrowed.
                    unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
                });
                BlockTarget { hash, pieces: pieces.collect() }
            })
            .collect();
        let loaded = store.load(&mut targets)?.min(available);
        let tokens = self.spans[..loaded].iter().map(|span| span.tokens).sum();
        self.mark_written(tokens);
        self.restored += tokens;
        Ok(tokens)
    }

    /// Number of tokens that were loaded from a store.
    pub(crate) fn restored(&self) -> usize {
        self.restored
    }

    /// Limits the writer to tokens before this one.
    pub(crate) fn end_at(&mut self, token: usize) {
        let mut left = token - self.from / self.block_tokens() * self.block_tokens();
        self.spans.retain_mut(|span| {
            if span.tokens > left {
                // No longer a full block: it has another hash, if any.
                (span.tokens, span.hash) = (left, None);
            }
            left -= span.tokens;
            span.tokens > 0
        });
    }

    /// Sets the hash of the last block, which is not full.
    pub(crate) fn set_tail_hash(&mut self, hash: BlockHash) {
        if let Some(last) = self.spans.last_mut() {
            last.hash = Some(hash);
        }
    }

    /// Leaves the last token to be computed, even if a store has it. To be called before [`SequenceWriter::restore`],
    /// for a prompt.
    pub fn skip_last_token(&mut self) {
        if let Some(last) = self.spans.last_mut() {
            last.hash = None;
        }
    }

    pub(crate) fn belongs_to(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Ends the writer without notifying the owner, which commits it.
    pub(crate) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for SequenceWriter {
    fn drop(&mut self) {
        if !self.finished {
            self.shared.push_released(Released::Writer(self.id));
        }
    }
}

/// Blocks that stay unchanged until this is dropped.
#[derive(Debug)]
pub struct PinnedBlocks {
    pub(crate) shared: Arc<Shared>,
    pub(crate) spans: Vec<BlockSpan>,
    /// Blocks that the store is known to have.
    stored: Vec<bool>,
    /// Number of blocks, from the first, that were saved or known.
    saved: usize,
}

impl PinnedBlocks {
    pub(crate) fn new(shared: Arc<Shared>, spans: Vec<BlockSpan>, stored: Vec<bool>) -> PinnedBlocks {
        PinnedBlocks { shared, spans, stored, saved: 0 }
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Returns the block numbers.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = Block> {
        self.spans.iter().map(|span| span.block)
    }

    /// Saves the blocks that the store is not known to have. Returns whether the store has all of them now.
    pub fn save<S: BlockStore + ?Sized>(&mut self, store: &S) -> Result<bool, S::Error> {
        let arena = &self.shared.arena;
        let new = self.spans.iter().zip(&self.stored).filter(|(_, stored)| !**stored);
        let sources: Vec<BlockSource<'_>> = new
            .map(|(span, _)| {
                let pieces = arena.pieces(span.block, span.tokens).map(|(at, len)| {
                    // SAFETY: complete rows of a pinned block are not written.
                    unsafe { std::slice::from_raw_parts(at.as_ptr(), len) }
                });
                BlockSource { hash: span.hash.expect("pinned block has a hash"), pieces: pieces.collect() }
            })
            .collect();
        let count = sources.len();
        let saved = if count == 0 { 0 } else { store.save(&sources)?.min(count) };
        // Those that the store has, up to the first new one that it does not have.
        let mut new = 0;
        let is_stored = |stored: &&bool| {
            new += usize::from(!**stored);
            new <= saved
        };
        self.saved = self.stored.iter().take_while(is_stored).count();
        Ok(self.saved == self.spans.len())
    }
}

impl Drop for PinnedBlocks {
    fn drop(&mut self) {
        let hashed = |span: &BlockSpan| (span.hash.expect("pinned block has a hash"), span.block);
        let blocks = self.spans.iter().map(hashed).collect();
        self.shared.push_released(Released::Blocks { blocks, saved: self.saved });
    }
}
