//! [`Routing`]: received tokens sorted by expert: the grouped layout, and the way back.
//!
//! One pass over the token metadata, in the order of slots and within a slot in the order of the token's experts, so
//! that the same step gives the same layout in every run. Nothing is allocated: all lists are allocated for the worst
//! case at the start.
//!
//! ```text
//!   grouped layout: [expert][row], rows_max = ranks × T_cap rows per expert, of which rows[expert] are filled (masked_m)
//!   row r of expert e is the token in slot group(e)[r];   a slot's hits are (e, r, weight) for each of its experts
//! ```

use moontide_symmetric::{Rank, RankSet};

use crate::layout::ChannelConfig;
use crate::memory::ChannelMemory;

/// One expert of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertAssignment {
    /// Number of the expert on this rank.
    pub expert: u32,
    /// Row of the token in the group of this expert.
    pub row: u32,
    /// Weight of the expert's result.
    pub weight: f32,
}

/// A token with an expert on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceivedToken {
    pub(crate) slot: u32,
    pub(crate) source: Rank,
    first_hit: u32,
    hits: u32,
}

#[derive(Debug)]
pub(crate) struct Routing {
    rows_max: usize,
    /// Tokens of each source, with or without an expert on this rank.
    tokens: Vec<u32>,
    rows: Vec<u32>,
    groups: Vec<u32>,
    received: Vec<ReceivedToken>,
    hits: Vec<ExpertAssignment>,
}

impl Routing {
    pub(crate) fn new(shape: &ChannelConfig) -> Routing {
        let slots = shape.slots();
        Routing {
            rows_max: slots,
            tokens: vec![0; shape.ranks],
            rows: vec![0; shape.experts_per_rank],
            groups: vec![0; shape.experts_per_rank * slots],
            received: Vec::with_capacity(slots),
            hits: Vec::with_capacity(slots * shape.top_k),
        }
    }

    /// Reads the metadata of these sources. Calls `found` for every row of the grouped layout, with its assignment and
    /// its token.
    ///
    /// # Safety
    /// By the table in `memory.rs`: `sources` have announced to `me` that their tokens of phase `stamp` are complete.
    ///
    /// # Panics
    /// If a source has written invalid data: it does not run this program.
    pub(crate) unsafe fn read(
        &mut self,
        memory: &ChannelMemory,
        me: Rank,
        buffer: usize,
        sources: RankSet,
        stamp: u64,
        mut found: impl FnMut(ExpertAssignment, ReceivedToken),
    ) {
        self.tokens.fill(0);
        self.rows.fill(0);
        self.received.clear();
        self.hits.clear();
        for source in sources.iter() {
            // SAFETY: the caller guarantees that the source's tokens are complete.
            let (found_stamp, tokens) = unsafe { memory.read_source_header(me, buffer, source) };
            assert_eq!(found_stamp, stamp, "tokens of rank {source} are of another phase");
            let first = memory.slot(source, 0);
            assert!(tokens <= memory.tokens_max() as u64, "rank {source} sent {tokens} tokens");
            self.tokens[source.index()] = tokens as u32;
            for slot in first..first + tokens as usize {
                let meta = memory.token_meta(me, buffer, slot);
                // SAFETY: the caller guarantees that the source's tokens are complete.
                let hits = unsafe { meta.hits() };
                if hits == 0 {
                    continue;
                }
                let received = ReceivedToken {
                    slot: slot as u32,
                    source,
                    first_hit: self.hits.len() as u32,
                    hits: hits as u32,
                };
                for hit in 0..hits {
                    // SAFETY: the caller guarantees that the source's tokens are complete.
                    let (expert, weight) = unsafe { meta.hit(hit) };
                    let expert = usize::from(expert);
                    let row = self.rows[expert] as usize;
                    assert!(row < self.rows_max, "no token names an expert twice");
                    self.rows[expert] += 1;
                    self.groups[expert * self.rows_max + row] = slot as u32;
                    let hit = ExpertAssignment { expert: expert as u32, row: row as u32, weight };
                    found(hit, received);
                    self.hits.push(hit);
                }
                self.received.push(received);
            }
        }
        debug_assert!(self.received.len() <= self.rows_max, "reserved for the worst case");
    }

    /// Returns the number of tokens of a source, with or without an expert on this rank.
    pub(crate) fn tokens_of(&self, source: Rank) -> usize {
        self.tokens[source.index()] as usize
    }

    /// Returns the number of rows of each expert: masked_m.
    pub(crate) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Returns the slots of an expert's rows.
    pub(crate) fn group(&self, expert: usize) -> &[u32] {
        &self.groups[expert * self.rows_max..][..self.rows[expert] as usize]
    }

    pub(crate) fn received(&self) -> &[ReceivedToken] {
        &self.received
    }

    pub(crate) fn hits(&self, received: ReceivedToken) -> &[ExpertAssignment] {
        &self.hits[received.first_hit as usize..][..received.hits as usize]
    }

    /// Returns the capacity of a group in rows.
    pub(crate) fn rows_max(&self) -> usize {
        self.rows_max
    }
}
