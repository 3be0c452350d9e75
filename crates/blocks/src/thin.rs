//! Dropping tokens from the middle of a sequence that are worth little, to go on in less memory.
//!
//! What is left keeps its rows and its positions: keys have their position rotated into them when they are computed, so
//! that the rows are right wherever they lie. Only their index changes, and the engine asks for positions by
//! [`Cache::positions`]. What attention makes of a sequence with holes is the model's affair: this is a lossy policy, and
//! never happens unasked.

use crate::cache::{BlocksError, Cache};
use crate::sequence::{SequenceId, Thinned};

/// Which tokens stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// So many from the first, which models lean on whatever they say.
    pub first: usize,
    /// So many up to the last.
    pub last: usize,
    /// So many in all; of those in the middle the ones that are worth most.
    pub budget: usize,
}

impl Keep {
    /// The indices of the tokens that stay, in order. Of equal ones the later stays.
    pub fn choose(&self, worth: &[f32]) -> Vec<usize> {
        let all = worth.len();
        if all <= self.budget {
            return (0..all).collect();
        }
        let first = self.first.min(self.budget);
        let last = self.last.min(self.budget - first);
        let middle = first..all - last;
        let mut ranked: Vec<usize> = middle.clone().collect();
        // A worth that is no number is worth nothing.
        let value = |at: usize| if worth[at].is_nan() { f32::NEG_INFINITY } else { worth[at] };
        ranked.sort_by(|a, b| value(*b).total_cmp(&value(*a)).then(b.cmp(a)));
        ranked.truncate(self.budget - first - last);
        ranked.sort_unstable();
        (0..first).chain(ranked).chain(middle.end..all).collect()
    }
}

impl Cache {
    /// Adds to what the tokens of a sequence are worth, from the first on: for example the attention that each has got.
    pub fn add_worth(&mut self, id: SequenceId, worth: &[f32]) -> Result<(), BlocksError> {
        let sequence = self.sequence_mut(id)?;
        sequence.worth.resize(sequence.tokens.len(), 0.0);
        for (sum, more) in sequence.worth.iter_mut().zip(worth) {
            *sum += more;
        }
        Ok(())
    }

    /// Drops tokens. Says where those stood that are left: all their rows are as they were, in this order. Blocks before
    /// the first token that is dropped stay shared; the others are copied, so that whoever reads or shares the sequence
    /// as it was is not disturbed.
    pub fn thin(&mut self, id: SequenceId, keep: &Keep) -> Result<Vec<u32>, BlocksError> {
        self.put_in_order();
        self.idle(id)?;
        let (block_tokens, tokens) = (self.block_tokens(), self.sequence(id)?.tokens.len());
        if self.filled(id) < tokens {
            return Err(BlocksError::Incomplete(id));
        }
        self.add_worth(id, &[])?;
        let kept = keep.choose(&self.sequence(id)?.worth);
        let Some(first_hole) = (0..tokens).find(|at| kept.get(*at) != Some(at)) else {
            return self.positions(id);
        };
        let old = self.blocks_of(id)?;
        // A run moves as a whole.
        let stays = if self.space.is_paged() { first_hole / block_tokens } else { 0 };
        let mut blocks = old[..stays].to_vec();
        let needed = self.shape().blocks_for(kept.len()) - stays;
        let reserve = self.take(needed as u32, &mut blocks)?;
        for (to, &from) in kept.iter().enumerate().skip(stays * block_tokens) {
            let place = |blocks: &[u32], at: usize| (blocks[at / block_tokens], (at % block_tokens) as u32);
            // SAFETY: complete rows are not written; the others were just taken.
            unsafe { self.shared.arena.copy_token(place(&old, from), place(&blocks, to)) };
        }
        let positions = self.positions(id)?;
        let sequence = self.sequence_mut(id)?;
        // Named after all that there was, since what is left was computed in its presence.
        let full = tokens / block_tokens * block_tokens;
        let history = match sequence.hashes.last() {
            _ if full < tokens => sequence.hash_of(full, tokens, block_tokens),
            Some(last) => *last,
            None => sequence.root,
        };
        let next = sequence.thinned.as_ref().map_or(tokens as u32, |thinned| thinned.next);
        let before = sequence.thinned.as_ref().map_or(usize::MAX, |thinned| thinned.from_block);
        let from_block = before.min(first_hole / block_tokens);
        let positions: Vec<u32> = kept.iter().map(|at| positions[*at]).collect();
        sequence.thinned =
            Some(Thinned { from_block, history, old: kept.len(), positions: positions.clone(), next });
        sequence.tokens = kept.iter().map(|at| sequence.tokens[*at]).collect();
        sequence.worth = kept.iter().map(|at| sequence.worth[*at]).collect();
        sequence.sealed = false;
        sequence.hashes.truncate(from_block);
        sequence.name_blocks(block_tokens);
        let unused = std::mem::replace(&mut sequence.reserve, reserve);
        if self.space.is_paged() {
            let names = self.sequence(id)?.hashes.clone();
            for (block, hash) in blocks.iter().zip(names).skip(stays) {
                self.books.name(*block, hash);
            }
        }
        self.set_table(id, kept.len(), &blocks);
        self.give_reserve(&old, unused);
        self.counts.dropped_tokens += (tokens - kept.len()) as u64;
        self.let_go(old.into_iter().skip(stays).rev());
        Ok(positions)
    }

    /// Where each token of a sequence stands: what its rotation was computed with. A token that is added stands behind
    /// the last one that there ever was.
    pub fn positions(&self, id: SequenceId) -> Result<Vec<u32>, BlocksError> {
        let sequence = self.sequence(id)?;
        Ok(match &sequence.thinned {
            Some(thinned) => thinned.positions.clone(),
            None => (0..sequence.tokens.len() as u32).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_the_last_and_the_best() {
        let worth = [0.0, 5.0, 1.0, f32::NAN, 9.0, 1.0, 0.0, 0.0];
        let keep = |first, last, budget| Keep { first, last, budget }.choose(&worth);
        assert_eq!(keep(1, 1, 8), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(keep(1, 1, 5), [0, 1, 4, 5, 7], "of the two that are worth 1 the later");
        assert_eq!(keep(0, 0, 2), [1, 4]);
        assert_eq!(keep(4, 4, 6), [0, 1, 2, 3, 6, 7]);
        assert_eq!(keep(9, 9, 3), [0, 1, 2]);
        assert_eq!(keep(0, 0, 0), [0; 0]);
    }
}
