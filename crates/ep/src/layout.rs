//! [`ChannelConfig`]: configuration of a channel, and the offsets of its parts in a rank's region.
//!
//! ```text
//!   channel, at the same offset of every rank's region:
//!     barrier          words of the barrier (see `barrier.rs` of symmetric)
//!     config record    configuration with which the rank opened the channel, 64 B; all must be equal
//!     buffer 0, and buffer 1 with double buffering:
//!       source headers per source  │ stamp: phase of the dispatch u64 │ tokens u64 │ zeros │       64 B
//!       token metadata per slot    │ hits u16 │ 0 u16 │ weights f32 × K │ local experts u16 × K │  to 8 B
//!       rows           per slot    │ the token                                                │    to 64 B
//!       results        per slot    │ this rank's result (push: results of peers for our tokens) │  to 64 B
//!
//!   slot = source × T_cap + token;   push: slot = rank that computed × T_cap + token
//! ```
//!
//! A rank writes into another's region only slots that belong to it, so no two ranks ever write the same bytes. The
//! size follows from the configuration alone and covers the worst case: every token of every rank.

use moontide_symmetric::{PhaseBarrier, RANKS_MAX, SharedBarrierMemory, World};

use crate::dtype::Dtype;
use crate::limits::{GROUPED_ROWS_MAX, TOP_K_MAX};

/// Number of buffers of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffering {
    /// One buffer: dispatch and combine have a phase each.
    Single,
    /// Two buffers: the combine of a step and the dispatch of the next may share a phase.
    Double,
}

/// Which rank moves the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CombineMode {
    /// The source of a token reads the results from the rank that computed them.
    Pull,
    /// The rank that computed a result writes it to the source of the token.
    Push,
}

/// Configuration of a channel. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Number of ranks of the world.
    pub ranks: usize,
    /// Most tokens of a rank in one step: T_cap.
    pub tokens_max: usize,
    /// Numbers per token: H.
    pub hidden: usize,
    /// Experts per token: K.
    pub top_k: usize,
    /// Experts per rank: n_local.
    pub experts_per_rank: usize,
    /// Number format of tokens.
    pub dispatch_dtype: Dtype,
    /// Number format of results.
    pub combine_dtype: Dtype,
    /// Single or double buffering.
    pub buffering: Buffering,
    /// Transfer of results: pull or push.
    pub combine_mode: CombineMode,
}

/// Invalid channel configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid channel config; valid are 1 to {RANKS_MAX} ranks, 1 to {TOP_K_MAX} experts per token, 1 to 65,535 \
     experts per rank, 1 to 2²⁴ − 1 tokens and numbers, 2²⁸ rows of the grouped layout (experts × ranks × tokens), \
     results not in fp8, less than 2⁴⁸ bytes: {0:?}"
)]
pub struct ChannelConfigError(pub ChannelConfig);

/// Offsets from the start of the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) barrier: u64,
    pub(crate) config_record: u64,
    pub(crate) buffers: [BufferLayout; 2],
    pub(crate) meta_stride: usize,
    pub(crate) row_bytes: usize,
    pub(crate) row_stride: usize,
    pub(crate) result_bytes: usize,
    pub(crate) result_stride: usize,
    pub(crate) bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BufferLayout {
    pub(crate) source_headers: u64,
    pub(crate) token_meta: u64,
    pub(crate) rows: u64,
    pub(crate) results: u64,
}

/// Size of a cache line. Parts that different ranks access are multiples of it.
pub(crate) const CACHE_LINE_BYTES: usize = 64;

impl ChannelConfig {
    /// Returns the bytes that the channel takes in a rank's region.
    pub fn bytes(&self) -> Result<u64, ChannelConfigError> {
        self.layout().map(|layout| layout.bytes)
    }

    /// Returns the number of slots of a rank: every token of every rank.
    pub fn slots(&self) -> usize {
        self.ranks * self.tokens_max
    }

    /// Returns the number of experts of all ranks.
    pub fn experts(&self) -> usize {
        self.ranks * self.experts_per_rank
    }

    pub(crate) fn layout(&self) -> Result<Layout, ChannelConfigError> {
        let ChannelConfig {
            ranks,
            tokens_max,
            hidden,
            top_k,
            experts_per_rank,
            dispatch_dtype,
            combine_dtype,
            buffering,
            ..
        } = *self;
        let is_valid = (1..=RANKS_MAX).contains(&ranks)
            && (1..=TOP_K_MAX).contains(&top_k)
            && (1..=usize::from(u16::MAX)).contains(&experts_per_rank)
            && (1..1 << 24).contains(&tokens_max)
            && (1..1 << 24).contains(&hidden)
            && combine_dtype != Dtype::Fp8;
        if !is_valid || experts_per_rank * self.slots() > GROUPED_ROWS_MAX {
            return Err(ChannelConfigError(*self));
        }
        let mut end = 0u64;
        // Each factor is below 2³⁰ (slots) or 2²⁷ (strides), so nothing overflows.
        let mut take = |count: usize, stride: usize| {
            let at = end;
            end += ((count * stride) as u64).next_multiple_of(CACHE_LINE_BYTES as u64);
            at
        };
        let meta_stride = (4 + top_k * 6).next_multiple_of(8);
        let (row_bytes, result_bytes) = (dispatch_dtype.row_bytes(hidden), combine_dtype.row_bytes(hidden));
        let (row_stride, result_stride) =
            (row_bytes.next_multiple_of(CACHE_LINE_BYTES), result_bytes.next_multiple_of(CACHE_LINE_BYTES));
        let barrier = take(PhaseBarrier::<SharedBarrierMemory<World>>::words(ranks), 8);
        let config_record = take(1, CACHE_LINE_BYTES);
        let mut buffers = [BufferLayout::default(); 2];
        let count = if buffering == Buffering::Double { 2 } else { 1 };
        for buffer in &mut buffers[..count] {
            *buffer = BufferLayout {
                source_headers: take(ranks, CACHE_LINE_BYTES),
                token_meta: take(self.slots(), meta_stride),
                rows: take(self.slots(), row_stride),
                results: take(self.slots(), result_stride),
            };
        }
        if end >= 1 << 48 {
            return Err(ChannelConfigError(*self));
        }
        Ok(Layout {
            barrier,
            config_record,
            buffers,
            meta_stride,
            row_bytes,
            row_stride,
            result_bytes,
            result_stride,
            bytes: end,
        })
    }

    /// Returns the config record.
    pub(crate) fn config_record(&self) -> [u64; 8] {
        const MAGIC: u64 = u64::from_le_bytes(*b"MTEPCH01");
        let kinds = [
            self.dispatch_dtype as u64,
            self.combine_dtype as u64,
            self.buffering as u64,
            self.combine_mode as u64,
        ];
        let kinds = kinds.into_iter().rev().fold(0, |kinds, kind| kinds << 8 | kind);
        let ChannelConfig { ranks, tokens_max, hidden, top_k, experts_per_rank, .. } = *self;
        let numbers = [ranks, tokens_max, hidden, top_k, experts_per_rank].map(|number| number as u64);
        let [ranks, tokens_max, hidden, top_k, experts] = numbers;
        [MAGIC, ranks, tokens_max, hidden, top_k, experts, kinds, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECODE: ChannelConfig = ChannelConfig {
        ranks: 8,
        tokens_max: 32,
        hidden: 7168,
        top_k: 8,
        experts_per_rank: 32,
        dispatch_dtype: Dtype::Bf16,
        combine_dtype: Dtype::Bf16,
        buffering: Buffering::Single,
        combine_mode: CombineMode::Pull,
    };

    #[test]
    fn channel_size_is_sum_of_its_parts() {
        let layout = DECODE.layout().unwrap();
        assert_eq!((layout.row_bytes, layout.row_stride, layout.meta_stride), (14336, 14336, 56));
        // Barrier 5 lines, config record 1, source headers 8, metadata 256 × 56, rows and results 256 × 14,336 each.
        assert_eq!(layout.bytes, 5 * 64 + 64 + 8 * 64 + 256 * 56 + 2 * 256 * 14336);
        let two = ChannelConfig { buffering: Buffering::Double, ..DECODE };
        assert_eq!(two.bytes().unwrap() - 6 * 64, 2 * (layout.bytes - 6 * 64));
        let fp8 = ChannelConfig { dispatch_dtype: Dtype::Fp8, ..DECODE };
        assert_eq!(fp8.layout().unwrap().row_bytes, 7168 + 56 * 4);
    }

    #[test]
    fn layout_parts_are_aligned_and_do_not_overlap() {
        let odd =
            ChannelConfig { ranks: 3, tokens_max: 5, hidden: 7, top_k: 3, experts_per_rank: 2, ..DECODE };
        let layout = ChannelConfig { buffering: Buffering::Double, ..odd }.layout().unwrap();
        let [a, b] = layout.buffers;
        let starts = [
            layout.barrier,
            layout.config_record,
            a.source_headers,
            a.token_meta,
            a.rows,
            a.results,
            b.source_headers,
            b.token_meta,
            b.rows,
            b.results,
            layout.bytes,
        ];
        assert!(starts.is_sorted_by(|left, right| left < right), "{starts:?}");
        assert!(starts.iter().all(|start| start.is_multiple_of(CACHE_LINE_BYTES as u64)));
    }

    #[test]
    fn invalid_channel_config_is_rejected() {
        for config in [
            ChannelConfig { ranks: 0, ..DECODE },
            ChannelConfig { ranks: 65, ..DECODE },
            ChannelConfig { top_k: 0, ..DECODE },
            ChannelConfig { top_k: 33, ..DECODE },
            ChannelConfig { experts_per_rank: 65_536, ..DECODE },
            ChannelConfig { combine_dtype: Dtype::Fp8, ..DECODE },
            ChannelConfig { tokens_max: 1 << 23, hidden: 1 << 23, ..DECODE },
            ChannelConfig { tokens_max: 1 << 13, experts_per_rank: 1 << 12 | 1, ..DECODE },
        ] {
            assert_eq!(config.bytes(), Err(ChannelConfigError(config)));
        }
    }
}
