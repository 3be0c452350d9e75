//! [`Routing`]: what a rank has received, sorted by expert: the grouped layout, and the way back.
//!
//! One pass over the notes, in the order of slots and within a slot in the order of the token's experts, so the same step
//! gives the same layout on every run. Nothing is allocated: all lists have their worst case from the start.
//!
//! ```text
//!   grouped layout: [expert][row], rows_max = ranks × T_cap rows per expert, of which rows[expert] are filled (masked_m)
//!   row r of expert e is the token in slot group(e)[r];   a slot's hits say (e, r, weight) for each of its experts
//! ```

use moontide_heap::{Rank, RankSet};

use crate::layout::Shape;
use crate::places::Places;

/// One expert of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// The expert's number on this rank.
    pub expert: u32,
    /// The token's row in this expert's group.
    pub row: u32,
    /// With which the expert's result counts.
    pub weight: f32,
}

/// A token that has an expert here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) slot: u32,
    pub(crate) source: Rank,
    first_hit: u32,
    hits: u32,
}

#[derive(Debug)]
pub(crate) struct Routing {
    rows_max: usize,
    /// Tokens of each source, here or not.
    tokens: Vec<u32>,
    rows: Vec<u32>,
    groups: Vec<u32>,
    received: Vec<Received>,
    hits: Vec<Hit>,
}

impl Routing {
    pub(crate) fn new(shape: &Shape) -> Routing {
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

    /// Reads the notes of these sources. `found` is told of every row of the grouped layout: its hit, and the slot whose
    /// token it is.
    ///
    /// # Safety
    /// By the table in `places.rs`: `me` has the word of `sources` that what they sent in phase `stamp` is complete.
    ///
    /// # Panics
    /// If a source has written nonsense: it does not run this program.
    pub(crate) unsafe fn read(
        &mut self,
        places: &Places,
        me: Rank,
        buffer: usize,
        sources: RankSet,
        stamp: u64,
        mut found: impl FnMut(Hit, Received),
    ) {
        self.tokens.fill(0);
        self.rows.fill(0);
        self.received.clear();
        self.hits.clear();
        for source in sources.iter() {
            // SAFETY: says the caller.
            let (found_stamp, tokens) = unsafe { places.read_head(me, buffer, source) };
            assert_eq!(found_stamp, stamp, "what rank {source} sent is of another phase");
            let first = places.slot(source, 0);
            assert!(tokens <= places.tokens_max() as u64, "rank {source} sent {tokens} tokens");
            self.tokens[source.index()] = tokens as u32;
            for slot in first..first + tokens as usize {
                let note = places.note(me, buffer, slot);
                // SAFETY: says the caller.
                let hits = unsafe { note.hits() };
                if hits == 0 {
                    continue;
                }
                let received = Received {
                    slot: slot as u32,
                    source,
                    first_hit: self.hits.len() as u32,
                    hits: hits as u32,
                };
                for hit in 0..hits {
                    // SAFETY: says the caller.
                    let (expert, weight) = unsafe { note.hit(hit) };
                    let expert = usize::from(expert);
                    let row = self.rows[expert] as usize;
                    assert!(row < self.rows_max, "no expert is named twice for a token");
                    self.rows[expert] += 1;
                    self.groups[expert * self.rows_max + row] = slot as u32;
                    let hit = Hit { expert: expert as u32, row: row as u32, weight };
                    found(hit, received);
                    self.hits.push(hit);
                }
                self.received.push(received);
            }
        }
        debug_assert!(self.received.len() <= self.rows_max, "reserved for the worst case");
    }

    /// How many tokens a source has, wherever they went.
    pub(crate) fn tokens_of(&self, source: Rank) -> usize {
        self.tokens[source.index()] as usize
    }

    /// How many rows each expert has: masked_m.
    pub(crate) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The slots of an expert's rows.
    pub(crate) fn group(&self, expert: usize) -> &[u32] {
        &self.groups[expert * self.rows_max..][..self.rows[expert] as usize]
    }

    pub(crate) fn received(&self) -> &[Received] {
        &self.received
    }

    pub(crate) fn hits(&self, received: Received) -> &[Hit] {
        &self.hits[received.first_hit as usize..][..received.hits as usize]
    }

    /// Rows that a group has place for.
    pub(crate) fn rows_max(&self) -> usize {
        self.rows_max
    }
}
