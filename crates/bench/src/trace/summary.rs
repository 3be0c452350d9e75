//! Totals of a trace, and the hit rate of an infinite cache.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::{BlockHash, Header, Request};

/// Running totals over the requests of a trace.
pub(crate) struct Summary {
    header: Header,
    seen: HashSet<BlockHash>,
    sessions: HashSet<u64>,
    requests: u64,
    input_tokens: u64,
    output_tokens: u64,
    /// Block references, with repetitions.
    references: u64,
    /// Block references that an infinite cache would hit: those in the longest cached prefix of each request.
    hits: u64,
    last_at_us: u64,
    blocks_most: usize,
}

impl Summary {
    /// Creates empty totals.
    pub(crate) fn new(header: Header) -> Summary {
        Summary {
            header,
            seen: HashSet::new(),
            sessions: HashSet::new(),
            requests: 0,
            input_tokens: 0,
            output_tokens: 0,
            references: 0,
            hits: 0,
            last_at_us: 0,
            blocks_most: 0,
        }
    }

    /// Adds a request.
    pub(crate) fn add(&mut self, request: &Request) {
        self.requests += 1;
        self.sessions.insert(request.session);
        self.input_tokens += request.input_tokens;
        self.output_tokens += request.output_tokens;
        self.references += request.blocks.len() as u64;
        self.last_at_us = request.at_us;
        self.blocks_most = self.blocks_most.max(request.blocks.len());
        let mut is_prefix = true;
        for block in &request.blocks {
            let is_new = self.seen.insert(*block);
            // A block after a missing one cannot be used.
            is_prefix &= !is_new;
            self.hits += u64::from(is_prefix);
        }
    }

    /// Number of block references so far, with repetitions.
    pub(crate) fn references(&self) -> u64 {
        self.references
    }

    /// Share of the block references that an infinite cache would hit.
    pub(crate) fn ideal_hit_rate(&self) -> f64 {
        if self.references == 0 { 0.0 } else { self.hits as f64 / self.references as f64 }
    }

    /// Formats the totals as one result row.
    pub(crate) fn to_json(&self) -> Value {
        let Header { block_bytes, block_tokens, seed } = self.header;
        let distinct = self.seen.len() as u64;
        json!({
            "bench": "trace",
            "case": "summary",
            "block_bytes": block_bytes,
            "block_tokens": block_tokens,
            "seed": seed,
            "seconds": self.last_at_us as f64 / 1e6,
            "requests": self.requests,
            "sessions": self.sessions.len(),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "blocks_per_request_max": self.blocks_most,
            "blocks": self.references,
            "bytes": self.references.saturating_mul(block_bytes),
            "distinct_blocks": distinct,
            "working_set_bytes": distinct.saturating_mul(block_bytes),
            "ideal_hit_rate": (self.ideal_hit_rate() * 1e6).round() / 1e6,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(session: u64, blocks: &[u64]) -> Request {
        let blocks: Vec<BlockHash> = blocks.iter().copied().map(BlockHash).collect();
        let input_tokens = blocks.len() as u64 * 16;
        Request { at_us: 0, session, turn: 0, input_tokens, output_tokens: 1, blocks }
    }

    const HEADER: Header = Header { block_bytes: 1000, block_tokens: 16, seed: 1 };

    #[test]
    fn blocks_after_first_miss_do_not_count_as_hits() {
        let mut summary = Summary::new(HEADER);
        for blocks in [&[1, 2, 3][..], &[1, 2, 4], &[9, 2, 3], &[]] {
            summary.add(&request(1, blocks));
        }
        assert_eq!((summary.hits, summary.references), (2, 9));
        let json = summary.to_json();
        assert_eq!(json["distinct_blocks"], 5);
        assert_eq!(json["working_set_bytes"], 5000);
        assert_eq!(json["bytes"], 9000);
        assert_eq!(json["sessions"], 1);
        assert_eq!(Summary::new(HEADER).ideal_hit_rate(), 0.0);
    }

    proptest! {
        /// Compares with a naive model over lists.
        #[test]
        fn summary_matches_naive_model(list in proptest::collection::vec(proptest::collection::vec(0u64..30, 0..8), 0..40)) {
            let mut summary = Summary::new(HEADER);
            let (mut cache, mut hits, mut all): (Vec<u64>, usize, usize) = (vec![], 0, 0);
            for blocks in &list {
                summary.add(&request(0, blocks));
                let mut before = cache.clone();
                for block in blocks {
                    if !before.contains(block) { break; }
                    hits += 1;
                }
                before.extend(blocks);
                all += blocks.len();
                before.sort_unstable();
                before.dedup();
                cache = before;
            }
            prop_assert_eq!(summary.seen.len(), cache.len());
            prop_assert_eq!(summary.references, all as u64);
            prop_assert_eq!(summary.hits, hits as u64);
        }
    }
}
