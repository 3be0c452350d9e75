//! [`Arena`]: the memory of all blocks, in a region that other processes can map, and views of its rows.
//!
//! The arena has space for the maximum number of blocks; untouched memory costs nothing. So the pool can grow without
//! moving anything.
//!
//! Invariant: the arena only computes addresses; its callers are responsible for exclusive or shared access.

use std::marker::PhantomData;
use std::ptr::NonNull;

use moontide_heap::{HugePages, Protection, Region, RegionError};

use crate::pool::Block;
use crate::shape::{CacheShape, Plane, RowIndex, Strides};

/// Memory of a cache.
#[derive(Debug)]
pub struct Arena {
    region: Region,
    shape: CacheShape,
    strides: Strides,
    blocks_max: u32,
}

/// Failure to create an arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// A size is 0, or the total is too large.
    #[error("cannot allocate {blocks} blocks of {shape}: a size is 0, or the total is too large")]
    Size {
        /// Requested blocks.
        blocks: u32,
        /// Requested shape.
        shape: CacheShape,
    },
    /// Too many blocks.
    #[error(
        "{blocks} blocks exceed `blocks_max` ({blocks_max}), or `blocks_max` exceeds {}",
        crate::BLOCKS_MAX
    )]
    Blocks {
        /// Requested initial blocks.
        blocks: u32,
        /// Requested maximum.
        blocks_max: u32,
    },
    /// The operating system refused the memory.
    #[error(transparent)]
    Region(#[from] RegionError),
}

impl Arena {
    pub(crate) fn new(shape: CacheShape, blocks_max: u32) -> Result<Arena, ArenaError> {
        let bytes = shape.bytes_of(blocks_max).ok_or(ArenaError::Size { blocks: blocks_max, shape })?;
        let page = HugePages::Auto.page_bytes();
        let len = (bytes as u64).next_multiple_of(page);
        let region = Region::create("moontide-blocks", len, HugePages::Auto, Protection::AllWrite)?;
        Ok(Arena { region, shape, strides: shape.strides(blocks_max), blocks_max })
    }

    /// Shape of the blocks.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Strides of the arena.
    pub fn strides(&self) -> &Strides {
        &self.strides
    }

    /// Maximum number of blocks.
    pub fn blocks_max(&self) -> u32 {
        self.blocks_max
    }

    /// Address of the first byte, which is that of the first key. Valid while the arena lives.
    pub fn base(&self) -> NonNull<u8> {
        self.region.base()
    }

    /// Returns the address of a row.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row(&self, at: RowIndex) -> NonNull<u8> {
        let CacheShape { layers, block_tokens, .. } = self.shape;
        assert!(
            at.block < self.blocks_max
                && at.layer < layers
                && at.token < block_tokens
                && (at.head as usize) < self.shape.heads()
                && (at.plane == Plane::Keys || self.shape.planes().len() == 2),
            "{at:?} is out of range of {} blocks of {}",
            self.blocks_max,
            self.shape
        );
        // SAFETY: every row is inside of the arena, as `rows_do_not_overlap_and_fill_the_arena` shows.
        unsafe { self.region.base().add(self.strides.offset(at)) }
    }

    /// Returns the first `tokens` tokens of contiguous blocks, of one plane and layer.
    ///
    /// # Safety
    /// No thread writes those rows while the result lives, and the blocks exist.
    pub(crate) unsafe fn rows<'a>(&self, plane: Plane, layer: u32, block: Block, tokens: usize) -> Rows<'a> {
        let base = self.row(RowIndex { plane, layer, block, token: 0, head: 0 });
        Rows { grid: self.grid(base, tokens), lifetime: PhantomData }
    }

    /// Returns some tokens of one block, for writing.
    ///
    /// # Safety
    /// No other thread reads or writes those rows while the result lives.
    pub(crate) unsafe fn rows_mut<'a>(&self, at: RowIndex, tokens: usize) -> RowsMut<'a> {
        let base = self.row(RowIndex { head: 0, ..at });
        assert!(
            at.token as usize + tokens <= self.shape.block_tokens as usize,
            "{tokens} tokens at {at:?} exceed the block"
        );
        RowsMut { grid: self.grid(base, tokens), lifetime: PhantomData }
    }

    fn grid(&self, base: NonNull<u8>, tokens: usize) -> RowGrid {
        let (heads, row_bytes) = (self.shape.heads(), self.shape.row_bytes());
        RowGrid { base, tokens, heads, row_bytes, token: self.strides.token, head: self.strides.head }
    }

    /// Returns the memory pieces of the first tokens of a block, in storage order: planes, then layers, then heads if
    /// they are separate.
    pub(crate) fn pieces(&self, block: Block, tokens: usize) -> impl Iterator<Item = (NonNull<u8>, usize)> {
        let apart = if self.strides.token == self.shape.row_bytes() { self.shape.heads() } else { 1 };
        let len = tokens * self.strides.token;
        let layers = self.shape.layers;
        self.shape.planes().iter().flat_map(move |&plane| {
            (0..layers).flat_map(move |layer| {
                (0..apart as u32)
                    .map(move |head| (self.row(RowIndex { plane, layer, block, token: 0, head }), len))
            })
        })
    }

    /// Copies the first tokens of a block to another one.
    ///
    /// # Safety
    /// No thread writes the source or accesses the target.
    pub(crate) unsafe fn copy(&self, from: Block, to: Block, tokens: usize) {
        assert_ne!(from, to);
        for ((from, len), (to, _)) in self.pieces(from, tokens).zip(self.pieces(to, tokens)) {
            // SAFETY: pieces of different blocks do not overlap; the caller guarantees the rest.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
        }
    }

    /// Copies one token from a row to another one.
    ///
    /// # Safety
    /// No thread writes the source or accesses the target.
    pub(crate) unsafe fn copy_token(&self, from: (Block, u32), to: (Block, u32)) {
        assert_ne!(from, to);
        for &plane in self.shape.planes() {
            for layer in 0..self.shape.layers {
                for head in 0..self.shape.heads() as u32 {
                    let row =
                        |(block, token)| self.row(RowIndex { plane, layer, block, token, head }).as_ptr();
                    // SAFETY: different rows do not overlap; the caller guarantees the rest.
                    unsafe { std::ptr::copy_nonoverlapping(row(from), row(to), self.shape.row_bytes()) };
                }
            }
        }
    }

    /// Returns the memory of the blocks from this one on to the operating system: they are zeros afterwards.
    ///
    /// # Safety
    /// No thread reads or writes those blocks.
    pub(crate) unsafe fn discard(&self, first: Block) {
        let page = HugePages::Auto.page_bytes() as usize;
        let len = (self.blocks_max - first) as usize * self.strides.block;
        if len == 0 {
            return;
        }
        // In every piece of the arena that is indexed by blocks, those from `first` on.
        for (start, _) in self.pieces(first, self.shape.block_tokens as usize) {
            let start = start.as_ptr() as usize;
            let (from, to) = (start.next_multiple_of(page), (start + len) / page * page);
            if from < to {
                // SAFETY: whole pages that contain only rows of those blocks.
                let result = unsafe {
                    rustix::mm::madvise(from as *mut _, to - from, rustix::mm::Advice::LinuxRemove)
                };
                debug_assert!(result.is_ok(), "{result:?}");
            }
        }
    }
}

/// Location of the rows of some tokens.
#[derive(Clone, Copy, Debug)]
struct RowGrid {
    base: NonNull<u8>,
    tokens: usize,
    heads: usize,
    row_bytes: usize,
    token: usize,
    head: usize,
}

impl RowGrid {
    #[inline]
    fn row(&self, token: usize, head: usize) -> NonNull<u8> {
        assert!(
            token < self.tokens && head < self.heads,
            "token {token} of {} or head {head} is out of range",
            self.tokens
        );
        // SAFETY: inside of the arena, since both are in range.
        unsafe { self.base.add(token * self.token + head * self.head) }
    }

    /// Returns the length of all rows as one piece, if heads are not separate.
    fn piece(&self) -> Option<usize> {
        (self.token == self.heads * self.row_bytes).then_some(self.tokens * self.token)
    }
}

/// Element type of a cache.
///
/// # Safety
/// Every bit pattern is a valid value, and there is no padding.
pub unsafe trait Element: Copy + 'static {}

// SAFETY: every bit pattern is a valid value, and there is no padding.
unsafe impl Element for f32 {}
// SAFETY: as above. The bits of an f16 or bf16.
unsafe impl Element for u16 {}
// SAFETY: as above.
unsafe impl Element for u8 {}

/// A zero-copy view of tokens: `[tokens, heads, dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    grid: RowGrid,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: a shared borrow of bytes.
unsafe impl Send for Rows<'_> {}
// SAFETY: as above.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.grid.tokens
    }

    /// Number of heads per token.
    pub fn heads(&self) -> usize {
        self.grid.heads
    }

    /// Returns one head of one token.
    ///
    /// # Panics
    /// If there is no such head or token.
    #[inline]
    pub fn head(&self, token: usize, head: usize) -> &'a [u8] {
        // SAFETY: a row, which no thread writes during `'a`.
        unsafe { std::slice::from_raw_parts(self.grid.row(token, head).as_ptr(), self.grid.row_bytes) }
    }

    /// Returns one head of one token as numbers.
    ///
    /// # Panics
    /// If the type does not have the element size of the cache.
    #[inline]
    pub fn numbers<T: Element>(&self, token: usize, head: usize) -> &'a [T] {
        let bytes = self.head(token, head);
        // SAFETY: `Element` accepts all bytes.
        let (before, numbers, after) = unsafe { bytes.align_to::<T>() };
        assert!(
            before.is_empty() && after.is_empty(),
            "rows of {} bytes do not have this element type",
            bytes.len()
        );
        numbers
    }

    /// Returns all rows, if heads are not separate: dense `[tokens, heads, dim]`.
    pub fn bytes(&self) -> Option<&'a [u8]> {
        // SAFETY: all rows, one after the other.
        self.grid.piece().map(|len| unsafe { std::slice::from_raw_parts(self.grid.base.as_ptr(), len) })
    }

    /// Returns the start address and the strides of tokens and heads, for the construction of a tensor.
    pub fn parts(&self) -> (NonNull<u8>, usize, usize) {
        (self.grid.base, self.grid.token, self.grid.head)
    }
}

/// Tokens of one block, for writing.
#[derive(Debug)]
pub struct RowsMut<'a> {
    grid: RowGrid,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive borrow of bytes.
unsafe impl Send for RowsMut<'_> {}

impl RowsMut<'_> {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.grid.tokens
    }

    /// Returns one head of one token.
    ///
    /// # Panics
    /// If there is no such head or token.
    #[inline]
    pub fn head(&mut self, token: usize, head: usize) -> &mut [u8] {
        // SAFETY: a row that is borrowed through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.grid.row(token, head).as_ptr(), self.grid.row_bytes) }
    }

    /// Copies from a dense `[tokens, heads, dim]`.
    ///
    /// # Panics
    /// If it has another length.
    pub fn copy_from(&mut self, dense: &[u8]) {
        let RowGrid { base, tokens, heads, row_bytes, .. } = self.grid;
        assert_eq!(dense.len(), tokens * heads * row_bytes, "wrong length for {tokens} tokens");
        if let Some(len) = self.grid.piece() {
            // SAFETY: all rows, one after the other, borrowed through `self`.
            unsafe { std::ptr::copy_nonoverlapping(dense.as_ptr(), base.as_ptr(), len) };
            return;
        }
        for (at, row) in dense.chunks_exact(row_bytes).enumerate() {
            self.head(at / heads, at % heads).copy_from_slice(row);
        }
    }

    /// Returns the start address and the strides of tokens and heads.
    pub fn parts(&mut self) -> (NonNull<u8>, usize, usize) {
        (self.grid.base, self.grid.token, self.grid.head)
    }
}
