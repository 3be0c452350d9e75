//! [`Shape`]: what a channel is made for, and where everything of it lies in a rank's region.
//!
//! ```text
//!   channel, at the same offset of every rank's region:
//!     post      words of the barrier (see heap's phase.rs)
//!     card      what the rank takes the channel for, 64 B; all must agree
//!     buffer 0, and buffer 1 if there are two:
//!       heads   per source      │ stamp: phase of the dispatch u64 │ tokens u64 │ zeros │       64 B
//!       notes   per slot        │ hits u16 │ 0 u16 │ weights f32 × K │ local experts u16 × K │  to 8 B
//!       rows    per slot        │ the token                                                │    to 64 B
//!       backs   per slot        │ what this rank makes of it (push: what peers made of ours) │  to 64 B
//!
//!   slot = source × T_cap + token;   push: slot = rank that worked × T_cap + token
//! ```
//!
//! Everything that a rank writes into another's region lies in slots that are its own, so no two ranks ever write the
//! same place. The size follows from the shape alone and covers the worst case: every token of every rank.

use moontide_heap::{PhaseBarrier, RANKS_MAX, RegionPosts, World};

use crate::numbers::Dtype;

/// Experts that a token may be sent to at most: a bound for loops on the stack, four times what models use.
pub const TOP_K_MAX: usize = 32;

/// Rows of a rank's grouped layout at most, filled or not: their list takes 4 B each, from the start.
pub const GROUPED_ROWS_MAX: usize = 1 << 28;

/// Buffers of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffers {
    /// One: dispatch and return have a barrier each.
    One,
    /// Two: the return of a step and the dispatch of the next may share a barrier.
    Two,
}

/// Who moves what comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Returns {
    /// The owner of a token reads it from where it was made.
    Pull,
    /// Who made it writes it to the owner of the token.
    Push,
}

/// What a channel is made for. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Ranks of the world.
    pub ranks: usize,
    /// Tokens of a rank in one step at most: T_cap.
    pub tokens_max: usize,
    /// Numbers of a token: H.
    pub hidden: usize,
    /// Experts of a token: K.
    pub top_k: usize,
    /// Experts of each rank: n_local.
    pub experts_per_rank: usize,
    /// How tokens are written.
    pub send: Dtype,
    /// How results are written.
    pub back: Dtype,
    /// One buffer or two.
    pub buffers: Buffers,
    /// Pull or push.
    pub returns: Returns,
}

/// A shape that no channel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no channel has this shape: 1 to {RANKS_MAX} ranks, 1 to {TOP_K_MAX} experts a token, 1 to 65,535 experts a rank, \
     tokens and numbers, 2²⁸ rows of the grouped layout (experts × ranks × tokens), results not in fp8, less than 2⁴⁸ \
     bytes: {0:?}"
)]
pub struct ShapeError(pub Shape);

/// Offsets from the channel's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) post: u64,
    pub(crate) card: u64,
    pub(crate) buffers: [BufferLayout; 2],
    pub(crate) note_stride: usize,
    pub(crate) row_bytes: usize,
    pub(crate) row_stride: usize,
    pub(crate) back_bytes: usize,
    pub(crate) back_stride: usize,
    pub(crate) bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BufferLayout {
    pub(crate) heads: u64,
    pub(crate) notes: u64,
    pub(crate) rows: u64,
    pub(crate) backs: u64,
}

/// A cache line, of which everything that two ranks touch is a multiple.
pub(crate) const LINE: usize = 64;

impl Shape {
    /// Bytes of a rank's region that a channel of this shape takes.
    pub fn bytes(&self) -> Result<u64, ShapeError> {
        self.layout().map(|layout| layout.bytes)
    }

    /// Slots of a rank: every token of every rank.
    pub fn slots(&self) -> usize {
        self.ranks * self.tokens_max
    }

    /// Experts of all ranks.
    pub fn experts(&self) -> usize {
        self.ranks * self.experts_per_rank
    }

    pub(crate) fn layout(&self) -> Result<Layout, ShapeError> {
        let Shape { ranks, tokens_max, hidden, top_k, experts_per_rank, send, back, buffers, .. } = *self;
        let is_possible = (1..=RANKS_MAX).contains(&ranks)
            && (1..=TOP_K_MAX).contains(&top_k)
            && (1..=usize::from(u16::MAX)).contains(&experts_per_rank)
            && (1..1 << 24).contains(&tokens_max)
            && (1..1 << 24).contains(&hidden)
            && back != Dtype::Fp8;
        if !is_possible || experts_per_rank * self.slots() > GROUPED_ROWS_MAX {
            return Err(ShapeError(*self));
        }
        let mut end = 0u64;
        // Each factor is below 2³⁰ (slots) or 2²⁷ (strides), so nothing overflows.
        let mut take = |count: usize, stride: usize| {
            let at = end;
            end += ((count * stride) as u64).next_multiple_of(LINE as u64);
            at
        };
        let note_stride = (4 + top_k * 6).next_multiple_of(8);
        let (row_bytes, back_bytes) = (send.row_bytes(hidden), back.row_bytes(hidden));
        let (row_stride, back_stride) = (row_bytes.next_multiple_of(LINE), back_bytes.next_multiple_of(LINE));
        let post = take(PhaseBarrier::<RegionPosts<World>>::words(ranks), 8);
        let card = take(1, LINE);
        let mut places = [BufferLayout::default(); 2];
        let count = if buffers == Buffers::Two { 2 } else { 1 };
        for place in &mut places[..count] {
            *place = BufferLayout {
                heads: take(ranks, LINE),
                notes: take(self.slots(), note_stride),
                rows: take(self.slots(), row_stride),
                backs: take(self.slots(), back_stride),
            };
        }
        if end >= 1 << 48 {
            return Err(ShapeError(*self));
        }
        Ok(Layout {
            post,
            card,
            buffers: places,
            note_stride,
            row_bytes,
            row_stride,
            back_bytes,
            back_stride,
            bytes: end,
        })
    }

    /// The shape as the card says it.
    pub(crate) fn card(&self) -> [u64; 8] {
        const MAGIC: u64 = u64::from_le_bytes(*b"MTEPCH01");
        let kinds = [self.send as u64, self.back as u64, self.buffers as u64, self.returns as u64];
        let kinds = kinds.into_iter().rev().fold(0, |kinds, kind| kinds << 8 | kind);
        let Shape { ranks, tokens_max, hidden, top_k, experts_per_rank, .. } = *self;
        let numbers = [ranks, tokens_max, hidden, top_k, experts_per_rank].map(|number| number as u64);
        let [ranks, tokens_max, hidden, top_k, experts] = numbers;
        [MAGIC, ranks, tokens_max, hidden, top_k, experts, kinds, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECODE: Shape = Shape {
        ranks: 8,
        tokens_max: 32,
        hidden: 7168,
        top_k: 8,
        experts_per_rank: 32,
        send: Dtype::Bf16,
        back: Dtype::Bf16,
        buffers: Buffers::One,
        returns: Returns::Pull,
    };

    #[test]
    fn a_channel_takes_what_its_parts_need() {
        let layout = DECODE.layout().unwrap();
        assert_eq!((layout.row_bytes, layout.row_stride, layout.note_stride), (14336, 14336, 56));
        // Post 5 lines, card 1, heads 8, notes 256 × 56, rows and backs 256 × 14,336 each.
        assert_eq!(layout.bytes, 5 * 64 + 64 + 8 * 64 + 256 * 56 + 2 * 256 * 14336);
        let two = Shape { buffers: Buffers::Two, ..DECODE };
        assert_eq!(two.bytes().unwrap() - 6 * 64, 2 * (layout.bytes - 6 * 64));
        let fp8 = Shape { send: Dtype::Fp8, ..DECODE };
        assert_eq!(fp8.layout().unwrap().row_bytes, 7168 + 56 * 4);
    }

    #[test]
    fn parts_follow_each_other_without_overlap() {
        let odd = Shape { ranks: 3, tokens_max: 5, hidden: 7, top_k: 3, experts_per_rank: 2, ..DECODE };
        let layout = Shape { buffers: Buffers::Two, ..odd }.layout().unwrap();
        let [a, b] = layout.buffers;
        let starts = [
            layout.post,
            layout.card,
            a.heads,
            a.notes,
            a.rows,
            a.backs,
            b.heads,
            b.notes,
            b.rows,
            b.backs,
            layout.bytes,
        ];
        assert!(starts.is_sorted_by(|left, right| left < right), "{starts:?}");
        assert!(starts.iter().all(|start| start.is_multiple_of(LINE as u64)));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for shape in [
            Shape { ranks: 0, ..DECODE },
            Shape { ranks: 65, ..DECODE },
            Shape { top_k: 0, ..DECODE },
            Shape { top_k: 33, ..DECODE },
            Shape { experts_per_rank: 65_536, ..DECODE },
            Shape { back: Dtype::Fp8, ..DECODE },
            Shape { tokens_max: 1 << 23, hidden: 1 << 23, ..DECODE },
            Shape { tokens_max: 1 << 13, experts_per_rank: 1 << 12 | 1, ..DECODE },
        ] {
            assert_eq!(shape.bytes(), Err(ShapeError(shape)));
        }
    }
}
