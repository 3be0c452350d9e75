//! [`CacheShape`]: memory layout of a KV cache. Every offset is computed from strides, here.
//!
//! | [`DimOrder`] | dimensions of keys, and of values, outermost first |
//! |---|---|
//! | [`DimOrder::TokenMajor`] | `[layer, block, token, head, dim]` |
//! | [`DimOrder::HeadMajor`] | `[head, layer, block, token, dim]` |
//!
//! In both, contiguous blocks are one `[tokens, heads, dim]` view with the strides of a single block.
//!
//! Invariants: a row (one token's numbers of one head) has no holes; rows of different tokens never overlap.

use std::fmt;

use crate::pool::Block;

/// Element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// Four bytes, IEEE single precision.
    F32,
    /// Two bytes, IEEE half precision.
    F16,
    /// Two bytes, bfloat16.
    Bf16,
    /// One byte; the engine makes exponent format and scale part of the names of its blocks.
    F8,
}

impl Dtype {
    /// Bytes per number.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F8 => 1,
        }
    }
}

/// Attention kind: the data of a token in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// A key and a value per head: as many heads as the model has (MHA), or one per group of them (GQA, MQA).
    Heads {
        /// Number of key/value heads.
        kv_heads: u32,
        /// Numbers per head.
        dim: u32,
    },
    /// One compressed vector and one for the position, from which keys and values are computed (MLA). It has one plane.
    Latent {
        /// Numbers of the compressed vector.
        rank: u32,
        /// Numbers of the rotated part.
        rope: u32,
    },
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plane {
    /// Keys; for [`Attention::Latent`], the only plane.
    Keys,
    /// Values.
    Values,
}

/// Order of dimensions in memory, outermost first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DimOrder {
    /// A token's heads together: the smallest number of pieces, and the layout of most kernels.
    #[default]
    TokenMajor,
    /// A head's layers, blocks and tokens together, for engines that distribute heads over workers.
    HeadMajor,
}

/// Content of a cache's blocks, independent of their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers of the model that have a cache.
    pub layers: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Data of a token in each layer.
    pub attention: Attention,
    /// Element type.
    pub dtype: Dtype,
    /// Order of dimensions.
    pub order: DimOrder,
}

impl CacheShape {
    /// Heads per token; 1 for a compressed vector.
    pub const fn heads(&self) -> usize {
        match self.attention {
            Attention::Heads { kv_heads, .. } => kv_heads as usize,
            Attention::Latent { .. } => 1,
        }
    }

    /// Numbers per head.
    pub const fn dim(&self) -> usize {
        match self.attention {
            Attention::Heads { dim, .. } => dim as usize,
            Attention::Latent { rank, rope } => rank as usize + rope as usize,
        }
    }

    /// Keys and values, or only the keys.
    pub const fn planes(&self) -> &'static [Plane] {
        match self.attention {
            Attention::Heads { .. } => &[Plane::Keys, Plane::Values],
            Attention::Latent { .. } => &[Plane::Keys],
        }
    }

    /// Bytes of one token's numbers of one head.
    pub const fn row_bytes(&self) -> usize {
        self.dim() * self.dtype.bytes()
    }

    /// Bytes of a block: all its planes, layers, tokens and heads.
    pub const fn block_bytes(&self) -> usize {
        self.planes().len()
            * self.layers as usize
            * self.block_tokens as usize
            * self.heads()
            * self.row_bytes()
    }

    /// Returns the number of blocks for `tokens` tokens.
    pub const fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens as usize)
    }

    /// Returns the bytes of an arena; `None` if a size is 0, or it would exceed the address space.
    pub(crate) fn bytes_of(&self, blocks: u32) -> Option<usize> {
        let parts = [
            self.planes().len(),
            self.layers as usize,
            self.block_tokens as usize,
            self.heads(),
            self.dim(),
            self.dtype.bytes(),
            blocks as usize,
        ];
        let bytes = parts.into_iter().try_fold(1_usize, usize::checked_mul)?;
        (bytes > 0 && bytes <= isize::MAX as usize / 2).then_some(bytes)
    }

    /// Returns the strides in an arena of `blocks` blocks.
    pub(crate) fn strides(&self, blocks: u32) -> Strides {
        let row = self.row_bytes();
        let (tokens, heads, layers) = (self.block_tokens as usize, self.heads(), self.layers as usize);
        match self.order {
            DimOrder::TokenMajor => {
                let token = heads * row;
                let block = tokens * token;
                let layer = blocks as usize * block;
                Strides { head: row, token, block, layer, plane: layers * layer }
            }
            DimOrder::HeadMajor => {
                let block = tokens * row;
                let layer = blocks as usize * block;
                let head = layers * layer;
                Strides { token: row, block, layer, head, plane: heads * head }
            }
        }
    }
}

/// Text that differs for shapes with incompatible blocks: part of a block's key in a store.
impl fmt::Display for CacheShape {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CacheShape { layers, block_tokens, dtype, order, .. } = self;
        match self.attention {
            Attention::Heads { kv_heads, dim } => write!(out, "{layers} layers, {kv_heads} heads of {dim}")?,
            Attention::Latent { rank, rope } => write!(out, "{layers} layers, latent {rank}+{rope}")?,
        }
        write!(out, ", {block_tokens} tokens, {dtype:?}, {order:?}")
    }
}

/// Distances in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// From a head to the next.
    pub head: usize,
    /// From a token to the next.
    pub token: usize,
    /// From a block to the next.
    pub block: usize,
    /// From a layer to the next.
    pub layer: usize,
    /// From keys to values.
    pub plane: usize,
}

/// Index of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowIndex {
    /// Keys or values.
    pub plane: Plane,
    /// Layer, from 0.
    pub layer: u32,
    /// Block in the arena.
    pub block: Block,
    /// Token within the block.
    pub token: u32,
    /// Head, from 0.
    pub head: u32,
}

impl Strides {
    /// Returns the offset of a row in bytes.
    #[inline]
    pub fn offset(&self, at: RowIndex) -> usize {
        let plane = match at.plane {
            Plane::Keys => 0,
            Plane::Values => self.plane,
        };
        plane
            + at.layer as usize * self.layer
            + at.block as usize * self.block
            + at.token as usize * self.token
            + at.head as usize * self.head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(order: DimOrder) -> CacheShape {
        let attention = Attention::Heads { kv_heads: 32, dim: 64 };
        CacheShape { layers: 32, block_tokens: 16, attention, dtype: Dtype::F32, order }
    }

    /// The example of the design: 32 layers, 32 heads of 64, 16 tokens per block, 2,048 blocks, f32. Token 512 (the
    /// 513th) of a sequence that begins at block 100 is the first one of block 132.
    #[test]
    fn strides_match_documented_example() {
        let shape = shape(DimOrder::TokenMajor);
        assert_eq!(shape.bytes_of(2048), Some(16 << 30), "keys and values");
        let strides = shape.strides(2048);
        let (block, token) = (100 + 512 / 16, 512 % 16);
        assert_eq!((block, token), (132, 0));
        let at = RowIndex { plane: Plane::Keys, layer: 0, block, token, head: 0 };
        assert_eq!(strides.offset(at) / 4, 132 * 32_768);
        assert_eq!(strides.offset(RowIndex { block: 101, ..at }) / 4, 3_309_568);
    }

    #[test]
    fn rows_do_not_overlap_and_fill_the_arena() {
        for order in [DimOrder::TokenMajor, DimOrder::HeadMajor] {
            for attention in
                [Attention::Heads { kv_heads: 3, dim: 5 }, Attention::Latent { rank: 6, rope: 2 }]
            {
                let shape = CacheShape { layers: 2, block_tokens: 4, attention, dtype: Dtype::Bf16, order };
                let strides = shape.strides(3);
                let mut seen = vec![false; shape.bytes_of(3).unwrap()];
                for &plane in shape.planes() {
                    for (layer, block) in (0..2).flat_map(|layer| (0..3).map(move |block| (layer, block))) {
                        for (token, head) in
                            (0..4).flat_map(|t| (0..shape.heads() as u32).map(move |h| (t, h)))
                        {
                            let start = strides.offset(RowIndex { plane, layer, block, token, head });
                            for byte in &mut seen[start..start + shape.row_bytes()] {
                                assert!(!std::mem::replace(byte, true), "{order:?} {attention:?}");
                            }
                        }
                    }
                }
                assert!(seen.into_iter().all(|byte| byte));
            }
        }
    }

    #[test]
    fn zero_layers_or_size_overflow_is_rejected() {
        assert_eq!(CacheShape { layers: 0, ..shape(DimOrder::TokenMajor) }.bytes_of(1), None);
        assert_eq!(CacheShape { layers: u32::MAX, ..shape(DimOrder::TokenMajor) }.bytes_of(1 << 25), None);
    }
}
