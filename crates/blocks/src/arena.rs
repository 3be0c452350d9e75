//! [`Arena`]: the memory of all blocks, in a region that other processes can map, and views of its rows.
//!
//! The arena has room for the most blocks that there may ever be; memory that was never touched costs nothing. So the
//! pool can grow without anything being moved.
//!
//! Invariant: the arena hands out addresses; who may read or write behind them is said by the one who asks.

use std::marker::PhantomData;
use std::ptr::NonNull;

use moontide_heap::{HugePages, Protection, Region, RegionError};

use crate::pool::Block;
use crate::shape::{At, Plane, Shape, Strides};

/// The memory of a cache.
#[derive(Debug)]
pub struct Arena {
    region: Region,
    shape: Shape,
    strides: Strides,
    blocks_max: u32,
}

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// Sizes that are 0 or too large.
    #[error("no memory can hold {blocks} blocks of {shape}: a size is 0, or they are too large together")]
    Size {
        /// How many.
        blocks: u32,
        /// Of which.
        shape: Shape,
    },
    /// More blocks than there may be.
    #[error("{blocks} blocks are more than `blocks_max`, or that ({blocks_max}) is more than {}", crate::BLOCKS_MAX)]
    Blocks {
        /// How many at first.
        blocks: u32,
        /// How many at most.
        blocks_max: u32,
    },
    /// The operating system refused.
    #[error(transparent)]
    Region(#[from] RegionError),
}

impl Arena {
    pub(crate) fn new(shape: Shape, blocks_max: u32) -> Result<Arena, ArenaError> {
        let bytes = shape.bytes_of(blocks_max).ok_or(ArenaError::Size { blocks: blocks_max, shape })?;
        let page = HugePages::IfAllowed.page_bytes();
        let len = (bytes as u64).next_multiple_of(page);
        let region = Region::create("moontide-blocks", len, HugePages::IfAllowed, Protection::AllWrite)?;
        Ok(Arena { region, shape, strides: shape.strides(blocks_max), blocks_max })
    }

    /// What it holds.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How far things are apart in it.
    pub fn strides(&self) -> &Strides {
        &self.strides
    }

    /// The most blocks that it has room for.
    pub fn blocks_max(&self) -> u32 {
        self.blocks_max
    }

    /// Its first byte: that of the first key. Valid while the arena lives.
    pub fn base(&self) -> NonNull<u8> {
        self.region.base()
    }

    /// Where a row begins.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row(&self, at: At) -> NonNull<u8> {
        let Shape { layers, block_tokens, .. } = self.shape;
        assert!(
            at.block < self.blocks_max
                && at.layer < layers
                && at.token < block_tokens
                && (at.head as usize) < self.shape.heads()
                && (at.plane == Plane::Keys || self.shape.planes().len() == 2),
            "{at:?} in {} blocks of {}",
            self.blocks_max,
            self.shape
        );
        // SAFETY: every row is inside of the arena, as `rows_do_not_overlap_and_fill_the_arena` shows.
        unsafe { self.region.base().add(self.strides.offset(at)) }
    }

    /// The first so many tokens of blocks that follow each other, of one plane and layer.
    ///
    /// # Safety
    /// Nobody writes those rows while the result lives, and the blocks are there.
    pub(crate) unsafe fn rows<'a>(&self, plane: Plane, layer: u32, block: Block, tokens: usize) -> Rows<'a> {
        let base = self.row(At { plane, layer, block, token: 0, head: 0 });
        Rows { grid: self.grid(base, tokens), lives: PhantomData }
    }

    /// Some tokens of one block, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes those rows while the result lives.
    pub(crate) unsafe fn rows_mut<'a>(&self, at: At, tokens: usize) -> RowsMut<'a> {
        let base = self.row(At { head: 0, ..at });
        assert!(at.token as usize + tokens <= self.shape.block_tokens as usize, "{tokens} tokens at {at:?}");
        RowsMut { grid: self.grid(base, tokens), lives: PhantomData }
    }

    fn grid(&self, base: NonNull<u8>, tokens: usize) -> Grid {
        let (heads, row_bytes) = (self.shape.heads(), self.shape.row_bytes());
        Grid { base, tokens, heads, row_bytes, token: self.strides.token, head: self.strides.head }
    }

    /// The pieces of memory in which the first tokens of a block lie, in the order in which they are stored: planes, then
    /// layers, then heads if they lie apart.
    pub(crate) fn pieces(&self, block: Block, tokens: usize) -> impl Iterator<Item = (NonNull<u8>, usize)> {
        let apart = if self.strides.token == self.shape.row_bytes() { self.shape.heads() } else { 1 };
        let len = tokens * self.strides.token;
        let layers = self.shape.layers;
        self.shape.planes().iter().flat_map(move |&plane| {
            (0..layers).flat_map(move |layer| {
                (0..apart as u32)
                    .map(move |head| (self.row(At { plane, layer, block, token: 0, head }), len))
            })
        })
    }

    /// Copies the first tokens of a block to another one.
    ///
    /// # Safety
    /// Nobody writes the one or touches the other.
    pub(crate) unsafe fn copy(&self, from: Block, to: Block, tokens: usize) {
        assert_ne!(from, to);
        for ((from, len), (to, _)) in self.pieces(from, tokens).zip(self.pieces(to, tokens)) {
            // SAFETY: pieces of different blocks do not overlap; the caller vouches for the rest.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
        }
    }

    /// Copies one token from a row to another one.
    ///
    /// # Safety
    /// Nobody writes the one or touches the other.
    pub(crate) unsafe fn copy_token(&self, from: (Block, u32), to: (Block, u32)) {
        assert_ne!(from, to);
        for &plane in self.shape.planes() {
            for layer in 0..self.shape.layers {
                for head in 0..self.shape.heads() as u32 {
                    let row = |(block, token)| self.row(At { plane, layer, block, token, head }).as_ptr();
                    // SAFETY: different rows do not overlap; the caller vouches for the rest.
                    unsafe { std::ptr::copy_nonoverlapping(row(from), row(to), self.shape.row_bytes()) };
                }
            }
        }
    }

    /// Gives the memory of the blocks from this one on back to the operating system: they are zeros afterwards.
    ///
    /// # Safety
    /// Nobody reads or writes those blocks.
    pub(crate) unsafe fn discard(&self, first: Block) {
        let page = HugePages::IfAllowed.page_bytes() as usize;
        let behind = (self.blocks_max - first) as usize * self.strides.block;
        if behind == 0 {
            return;
        }
        // In every piece of the arena that counts blocks, those behind.
        for (start, _) in self.pieces(first, self.shape.block_tokens as usize) {
            let start = start.as_ptr() as usize;
            let (from, to) = (start.next_multiple_of(page), (start + behind) / page * page);
            if from < to {
                // SAFETY: whole pages that have nothing but rows of those blocks.
                let given = unsafe {
                    rustix::mm::madvise(from as *mut _, to - from, rustix::mm::Advice::LinuxRemove)
                };
                debug_assert!(given.is_ok(), "{given:?}");
            }
        }
    }
}

/// Where the rows of some tokens are.
#[derive(Clone, Copy, Debug)]
struct Grid {
    base: NonNull<u8>,
    tokens: usize,
    heads: usize,
    row_bytes: usize,
    token: usize,
    head: usize,
}

impl Grid {
    #[inline]
    fn row(&self, token: usize, head: usize) -> NonNull<u8> {
        assert!(token < self.tokens && head < self.heads, "token {token} of {}, head {head}", self.tokens);
        // SAFETY: inside of the arena, since both are in range.
        unsafe { self.base.add(token * self.token + head * self.head) }
    }

    /// All of it as one piece, if heads do not lie apart.
    fn piece(&self) -> Option<usize> {
        (self.token == self.heads * self.row_bytes).then_some(self.tokens * self.token)
    }
}

/// A type that numbers of a cache can be read as.
///
/// # Safety
/// Every bit pattern is a value, and there is no padding.
pub unsafe trait Element: Copy + 'static {}

// SAFETY: as the trait asks.
unsafe impl Element for f32 {}
// SAFETY: as the trait asks. The bits of an f16 or bf16.
unsafe impl Element for u16 {}
// SAFETY: as the trait asks.
unsafe impl Element for u8 {}

/// A view of tokens: `[tokens, heads, dim]`, in place.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    grid: Grid,
    lives: PhantomData<&'a [u8]>,
}

// SAFETY: a shared borrow of bytes.
unsafe impl Send for Rows<'_> {}
// SAFETY: as above.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    /// How many tokens.
    pub fn tokens(&self) -> usize {
        self.grid.tokens
    }

    /// How many heads of each.
    pub fn heads(&self) -> usize {
        self.grid.heads
    }

    /// One head of one token.
    ///
    /// # Panics
    /// If there is no such head or token.
    #[inline]
    pub fn head(&self, token: usize, head: usize) -> &'a [u8] {
        // SAFETY: a row, which nobody writes while `'a` lasts.
        unsafe { std::slice::from_raw_parts(self.grid.row(token, head).as_ptr(), self.grid.row_bytes) }
    }

    /// The same as numbers.
    ///
    /// # Panics
    /// If the type has not the size of the cache's.
    #[inline]
    pub fn numbers<T: Element>(&self, token: usize, head: usize) -> &'a [T] {
        let bytes = self.head(token, head);
        // SAFETY: `Element` accepts all bytes.
        let (before, numbers, after) = unsafe { bytes.align_to::<T>() };
        assert!(before.is_empty() && after.is_empty(), "rows of {} bytes are not of this type", bytes.len());
        numbers
    }

    /// All of them, if heads do not lie apart: dense `[tokens, heads, dim]`.
    pub fn bytes(&self) -> Option<&'a [u8]> {
        // SAFETY: all rows, one after the other.
        self.grid.piece().map(|len| unsafe { std::slice::from_raw_parts(self.grid.base.as_ptr(), len) })
    }

    /// Where it begins, and how far tokens and heads are apart, for whoever makes a tensor of it.
    pub fn parts(&self) -> (NonNull<u8>, usize, usize) {
        (self.grid.base, self.grid.token, self.grid.head)
    }
}

/// Tokens of one block, to be written.
#[derive(Debug)]
pub struct RowsMut<'a> {
    grid: Grid,
    lives: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive borrow of bytes.
unsafe impl Send for RowsMut<'_> {}

impl RowsMut<'_> {
    /// How many tokens.
    pub fn tokens(&self) -> usize {
        self.grid.tokens
    }

    /// One head of one token.
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
        let Grid { base, tokens, heads, row_bytes, .. } = self.grid;
        assert_eq!(dense.len(), tokens * heads * row_bytes, "bytes of {tokens} tokens");
        if let Some(len) = self.grid.piece() {
            // SAFETY: all rows, one after the other, borrowed through `self`.
            unsafe { std::ptr::copy_nonoverlapping(dense.as_ptr(), base.as_ptr(), len) };
            return;
        }
        for (at, row) in dense.chunks_exact(row_bytes).enumerate() {
            self.head(at / heads, at % heads).copy_from_slice(row);
        }
    }

    /// Where it begins, and how far tokens and heads are apart.
    pub fn parts(&mut self) -> (NonNull<u8>, usize, usize) {
        (self.grid.base, self.grid.token, self.grid.head)
    }
}
