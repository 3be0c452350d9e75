//! Pruning: drops low-scored tokens from the middle of a sequence, to continue in less memory.
//!
//! The remaining tokens keep their rows and their positions: keys have their position rotated into them when they are
//! computed, so that the rows are correct at any index. Only their index changes, and the engine gets positions from
//! [`Cache::positions`]. The effect of a sequence with holes on attention depends on the model: this is a lossy policy,
//! and never applied without a request.

use crate::cache::{Cache, CacheError};
use crate::sequence::{PrunedState, SequenceId};

/// Selection of the tokens to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrunePolicy {
    /// Tokens kept from the start (attention sinks), which models rely on whatever their content.
    pub sink_tokens: usize,
    /// Tokens kept at the end.
    pub recent_tokens: usize,
    /// Maximum number of tokens; of those in the middle the best-scored ones are kept.
    pub tokens_max: usize,
}

impl PrunePolicy {
    /// Returns the indices of the tokens to keep, in order. Of equal scores the later token is kept.
    pub fn choose(&self, scores: &[f32]) -> Vec<usize> {
        let all = scores.len();
        if all <= self.tokens_max {
            return (0..all).collect();
        }
        let first = self.sink_tokens.min(self.tokens_max);
        let last = self.recent_tokens.min(self.tokens_max - first);
        let middle = first..all - last;
        let mut ranked: Vec<usize> = middle.clone().collect();
        // NaN is the lowest score.
        let value = |at: usize| if scores[at].is_nan() { f32::NEG_INFINITY } else { scores[at] };
        ranked.sort_by(|a, b| value(*b).total_cmp(&value(*a)).then(b.cmp(a)));
        ranked.truncate(self.tokens_max - first - last);
        ranked.sort_unstable();
        (0..first).chain(ranked).chain(middle.end..all).collect()
    }
}

impl Cache {
    /// Adds to the scores of a sequence's tokens, from the first on: for example the attention that each has received.
    pub fn add_scores(&mut self, id: SequenceId, scores: &[f32]) -> Result<(), CacheError> {
        let sequence = self.sequence_mut(id)?;
        sequence.scores.resize(sequence.tokens.len(), 0.0);
        for (sum, more) in sequence.scores.iter_mut().zip(scores) {
            *sum += more;
        }
        Ok(())
    }

    /// Drops tokens. Returns the positions of the remaining tokens: their rows are unchanged, in this order. Blocks
    /// before the first dropped token stay shared; the others are copied, so that readers and forks of the earlier
    /// state are not affected.
    pub fn prune(&mut self, id: SequenceId, policy: &PrunePolicy) -> Result<Vec<u32>, CacheError> {
        self.process_returns();
        self.idle(id)?;
        let (block_tokens, tokens) = (self.block_tokens(), self.sequence(id)?.tokens.len());
        if self.computed(id) < tokens {
            return Err(CacheError::Incomplete(id));
        }
        self.add_scores(id, &[])?;
        let kept = policy.choose(&self.sequence(id)?.scores);
        let Some(first_hole) = (0..tokens).find(|at| kept.get(*at) != Some(at)) else {
            return self.positions(id);
        };
        let old = self.blocks_of(id)?;
        // A run moves as a whole.
        let shared = if self.allocator.is_paged() { first_hole / block_tokens } else { 0 };
        let mut blocks = old[..shared].to_vec();
        let needed = self.shape().blocks_for(kept.len()) - shared;
        let reserve = self.alloc(needed as u32, &mut blocks)?;
        for (to, &from) in kept.iter().enumerate().skip(shared * block_tokens) {
            let row = |blocks: &[u32], at: usize| (blocks[at / block_tokens], (at % block_tokens) as u32);
            // SAFETY: complete rows are not written; the targets were just allocated.
            unsafe { self.shared.arena.copy_token(row(&old, from), row(&blocks, to)) };
        }
        let positions = self.positions(id)?;
        let sequence = self.sequence_mut(id)?;
        // The hash covers all earlier tokens, since the remaining rows were computed in their presence.
        let full = tokens / block_tokens * block_tokens;
        let history = match sequence.hashes.last() {
            _ if full < tokens => sequence.hash_of(full, tokens, block_tokens),
            Some(last) => *last,
            None => sequence.root,
        };
        let next = sequence.pruned.as_ref().map_or(tokens as u32, |pruned| pruned.next);
        let before = sequence.pruned.as_ref().map_or(usize::MAX, |pruned| pruned.from_block);
        let from_block = before.min(first_hole / block_tokens);
        let positions: Vec<u32> = kept.iter().map(|at| positions[*at]).collect();
        sequence.pruned =
            Some(PrunedState { from_block, history, old: kept.len(), positions: positions.clone(), next });
        sequence.tokens = kept.iter().map(|at| sequence.tokens[*at]).collect();
        sequence.scores = kept.iter().map(|at| sequence.scores[*at]).collect();
        sequence.sealed = false;
        sequence.hashes.truncate(from_block);
        sequence.hash_blocks(block_tokens);
        let unused = std::mem::replace(&mut sequence.reserve, reserve);
        if self.allocator.is_paged() {
            let hashes = self.sequence(id)?.hashes.clone();
            for (block, hash) in blocks.iter().zip(hashes).skip(shared) {
                self.index.publish(*block, hash);
            }
        }
        self.set_table(id, kept.len(), &blocks);
        self.free_reserve(&old, unused);
        self.counts.pruned_tokens += (tokens - kept.len()) as u64;
        self.release_blocks(old.into_iter().skip(shared).rev());
        Ok(positions)
    }

    /// Returns the position of each token of a sequence, with which its rotation was computed. An appended token gets
    /// the position after the highest one ever used.
    pub fn positions(&self, id: SequenceId) -> Result<Vec<u32>, CacheError> {
        let sequence = self.sequence(id)?;
        Ok(match &sequence.pruned {
            Some(pruned) => pruned.positions.clone(),
            None => (0..sequence.tokens.len() as u32).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prune_keeps_sink_recent_and_best_scored_tokens() {
        let scores = [0.0, 5.0, 1.0, f32::NAN, 9.0, 1.0, 0.0, 0.0];
        let keep = |sink_tokens, recent_tokens, tokens_max| {
            PrunePolicy { sink_tokens, recent_tokens, tokens_max }.choose(&scores)
        };
        assert_eq!(keep(1, 1, 8), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(keep(1, 1, 5), [0, 1, 4, 5, 7], "later one of two equal scores");
        assert_eq!(keep(0, 0, 2), [1, 4]);
        assert_eq!(keep(4, 4, 6), [0, 1, 2, 3, 6, 7]);
        assert_eq!(keep(9, 9, 3), [0, 1, 2]);
        assert_eq!(keep(0, 0, 0), [0; 0]);
    }
}
