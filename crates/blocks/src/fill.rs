//! [`Fill`], the right to write rows, and [`Held`], blocks that stay while they are read. Both belong to no thread, so that
//! copying and computing go on beside the owner; dropped, they tell the owner.
//!
//! Invariants: there is one fill of a sequence at a time, and nobody sees its rows before it is committed; a held block is
//! not written, nor given out.

use std::sync::Arc;

use crate::arena::RowsMut;
use crate::hash::BlockHash;
use crate::pool::Block;
use crate::sequence::{Return, SequenceId, Shared};
use crate::shape::{At, Plane};
use crate::store::{Destination, Source, Store};

/// A block, or the first tokens of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Under which name it is stored, if it can be.
    pub(crate) hash: Option<BlockHash>,
    pub(crate) block: Block,
    pub(crate) tokens: usize,
}

/// Rows of a sequence that are to be written.
#[derive(Debug)]
pub struct Fill {
    shared: Arc<Shared>,
    id: SequenceId,
    /// The first token that has no rows yet.
    from: usize,
    /// Tokens up to this one have theirs.
    filled: usize,
    /// From the block on in which `from` is.
    parts: Vec<Part>,
    /// So many of the complete ones came from a store.
    restored: usize,
    finished: bool,
}

impl Fill {
    pub(crate) fn new(shared: Arc<Shared>, id: SequenceId, from: usize, parts: Vec<Part>) -> Fill {
        Fill { shared, id, from, filled: from, parts, restored: 0, finished: false }
    }

    /// Whose rows they are.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Up to where rows are complete.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// The tokens whose rows are to be written, counted from the sequence's first.
    pub fn tokens(&self) -> std::ops::Range<usize> {
        self.filled..self.end()
    }

    fn block_tokens(&self) -> usize {
        self.shared.arena.shape().block_tokens as usize
    }

    fn end(&self) -> usize {
        let first = self.from / self.block_tokens() * self.block_tokens();
        first + self.parts.iter().map(|part| part.tokens).sum::<usize>()
    }

    /// Which block a token is in, and where in it.
    fn place(&self, token: usize) -> (Part, usize) {
        let first = self.from / self.block_tokens();
        (self.parts[token / self.block_tokens() - first], token % self.block_tokens())
    }

    /// The rows of tokens from this one on, as many of them as are in its block.
    ///
    /// # Panics
    /// If the token is not to be written, or there is no such layer or plane.
    #[inline]
    pub fn rows(&mut self, plane: Plane, layer: u32, token: usize) -> RowsMut<'_> {
        assert!(self.tokens().contains(&token), "token {token} of {:?}", self.tokens());
        let (part, at) = self.place(token);
        let place = At { plane, layer, block: part.block, token: at as u32, head: 0 };
        // SAFETY: nobody sees rows behind `filled`, and this fill is the only one.
        unsafe { self.shared.arena.rows_mut(place, part.tokens - at) }
    }

    /// Copies from a dense `[tokens, heads, dim]` that begins with the first token that is to be written.
    ///
    /// # Panics
    /// If those are more tokens than are to be written, or the length is not one of whole tokens.
    pub fn write(&mut self, plane: Plane, layer: u32, dense: &[u8]) {
        let shape = self.shared.arena.shape();
        let token_bytes = shape.heads() * shape.row_bytes();
        assert!(
            dense.len().is_multiple_of(token_bytes) && dense.len() / token_bytes <= self.tokens().len(),
            "{} bytes, {token_bytes} a token, for {:?}",
            dense.len(),
            self.tokens()
        );
        let (mut at, mut rest) = (self.filled, dense);
        while !rest.is_empty() {
            let (part, within) = self.place(at);
            let tokens = (rest.len() / token_bytes).min(part.tokens - within);
            let (now, later) = rest.split_at(tokens * token_bytes);
            let place = At { plane, layer, block: part.block, token: within as u32, head: 0 };
            // SAFETY: as above.
            unsafe { self.shared.arena.rows_mut(place, tokens) }.copy_from(now);
            (at, rest) = (at + tokens, later);
        }
    }

    /// The rows of so many tokens more are complete, in all layers and planes.
    ///
    /// # Panics
    /// If those are more than are to be written.
    pub fn complete(&mut self, tokens: usize) {
        assert!(tokens <= self.tokens().len(), "{tokens} tokens of {:?}", self.tokens());
        self.filled += tokens;
    }

    /// Brings from a store what it has of these blocks, straight into place, up to the first one that it does not have.
    /// Says how many tokens came, which are complete now. A store that fails brings nothing.
    pub fn restore<S: Store + ?Sized>(&mut self, store: &S) -> Result<usize, S::Error> {
        if self.filled != self.from || !self.from.is_multiple_of(self.block_tokens()) {
            return Ok(0);
        }
        let hashes: Vec<BlockHash> = self.parts.iter().map_while(|part| part.hash).collect();
        let there = if hashes.is_empty() { 0 } else { store.prefix(&hashes)?.min(hashes.len()) };
        if there == 0 {
            return Ok(0);
        }
        let arena = &self.shared.arena;
        let mut wanted: Vec<Destination<'_>> = self.parts[..there]
            .iter()
            .zip(hashes)
            .map(|(part, hash)| {
                let pieces = arena.pieces(part.block, part.tokens).map(|(at, len)| {
                    // SAFETY: rows that nobody sees, of different blocks; this fill is borrowed.
                    unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
                });
                Destination { hash, pieces: pieces.collect() }
            })
            .collect();
        let loaded = store.load(&mut wanted)?.min(there);
        let tokens = self.parts[..loaded].iter().map(|part| part.tokens).sum();
        self.complete(tokens);
        self.restored += tokens;
        Ok(tokens)
    }

    /// How many tokens came from a store.
    pub(crate) fn restored(&self) -> usize {
        self.restored
    }

    /// Nothing behind this token is to be written.
    pub(crate) fn end_at(&mut self, token: usize) {
        let mut left = token - self.from / self.block_tokens() * self.block_tokens();
        self.parts.retain_mut(|part| {
            if part.tokens > left {
                // No longer a full block: it has another name, if it has one.
                (part.tokens, part.hash) = (left, None);
            }
            left -= part.tokens;
            part.tokens > 0
        });
    }

    /// The name of the last block, which is not full.
    pub(crate) fn name_tail(&mut self, hash: BlockHash) {
        if let Some(last) = self.parts.last_mut() {
            last.hash = Some(hash);
        }
    }

    /// The last token is left to be computed, whatever a store has: said before [`Fill::restore`], for a prompt.
    pub fn leave_last(&mut self) {
        if let Some(last) = self.parts.last_mut() {
            last.hash = None;
        }
    }

    pub(crate) fn is_of(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// The owner takes over.
    pub(crate) fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        if !self.finished {
            self.shared.put_back(Return::Fill(self.id));
        }
    }
}

/// Blocks that stay as they are until this is dropped.
#[derive(Debug)]
pub struct Held {
    pub(crate) shared: Arc<Shared>,
    pub(crate) parts: Vec<Part>,
    /// Which of them the store is known to have.
    known: Vec<bool>,
    /// So many of them, from the first, were saved or known.
    saved: usize,
}

impl Held {
    pub(crate) fn new(shared: Arc<Shared>, parts: Vec<Part>, known: Vec<bool>) -> Held {
        Held { shared, parts, known, saved: 0 }
    }

    /// How many blocks.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Their numbers.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = Block> {
        self.parts.iter().map(|part| part.block)
    }

    /// Brings those to a store that it is not known to have. Says whether all are there now.
    pub fn save<S: Store + ?Sized>(&mut self, store: &S) -> Result<bool, S::Error> {
        let arena = &self.shared.arena;
        let new = self.parts.iter().zip(&self.known).filter(|(_, known)| !**known);
        let sources: Vec<Source<'_>> = new
            .map(|(part, _)| {
                let pieces = arena.pieces(part.block, part.tokens).map(|(at, len)| {
                    // SAFETY: complete rows of a held block are not written.
                    unsafe { std::slice::from_raw_parts(at.as_ptr(), len) }
                });
                Source { hash: part.hash.expect("held blocks have names"), pieces: pieces.collect() }
            })
            .collect();
        let wanted = sources.len();
        let saved = if wanted == 0 { 0 } else { store.save(&sources)?.min(wanted) };
        // Those that are there up to the first new one that is not.
        let mut new = 0;
        let there = |known: &&bool| {
            new += usize::from(!**known);
            new <= saved
        };
        self.saved = self.known.iter().take_while(there).count();
        Ok(self.saved == self.parts.len())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let name = |part: &Part| (part.hash.expect("held blocks have names"), part.block);
        let blocks = self.parts.iter().map(name).collect();
        self.shared.put_back(Return::Blocks { blocks, saved: self.saved });
    }
}
