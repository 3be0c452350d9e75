//! [`SuspendedSequence`]: a sequence whose blocks are in a store, and its serialized form for another process.
//!
//! ```text
//! version u32 = 1 | block_tokens u32 | computed u64 | root 32 bytes | tokens u64 | scores u64 | is pruned u64, 0 or 1
//! each token u32 | each score f32
//! if pruned: from_block u64 | history 32 bytes | old u64 | next u32 | the position of each token u32
//! ```
//!
//! All numbers are little-endian. Block hashes are not included: they follow from the rest, so that foreign bytes
//! cannot assign a wrong hash to a block.

use crate::hash::{BlockHash, Token};
use crate::sequence::{PrunedState, Sequence};

const VERSION: u32 = 1;

/// Upper bound of all positions.
const POSITION_MAX: u32 = 1 << 31;

/// A suspended sequence: everything that is needed to continue it, except its blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct SuspendedSequence {
    pub(crate) block_tokens: u32,
    pub(crate) tokens: Vec<Token>,
    pub(crate) computed_tokens: usize,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) root: BlockHash,
    pub(crate) pruned: Option<PrunedState>,
    pub(crate) scores: Vec<f32>,
}

impl SuspendedSequence {
    /// Tokens of the sequence.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Number of tokens whose rows were complete.
    pub fn computed_tokens(&self) -> usize {
        self.computed_tokens
    }

    /// Serializes it for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let long = |number: usize| (number as u64).to_le_bytes();
        out.extend(VERSION.to_le_bytes());
        out.extend(self.block_tokens.to_le_bytes());
        out.extend(long(self.computed_tokens));
        out.extend(self.root.0);
        out.extend(long(self.tokens.len()));
        out.extend(long(self.scores.len()));
        out.extend(long(usize::from(self.pruned.is_some())));
        out.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        out.extend(self.scores.iter().flat_map(|scores| scores.to_le_bytes()));
        if let Some(pruned) = &self.pruned {
            out.extend(long(pruned.from_block));
            out.extend(pruned.history.0);
            out.extend(long(pruned.old));
            out.extend(pruned.next.to_le_bytes());
            out.extend(pruned.positions.iter().flat_map(|position| position.to_le_bytes()));
        }
        out
    }

    /// Parses the serialized form. Returns `None` for another version or inconsistent values.
    pub fn from_bytes(bytes: &[u8]) -> Option<SuspendedSequence> {
        let mut rest = bytes;
        let version = u32::from_le_bytes(take(&mut rest)?);
        let block_tokens = u32::from_le_bytes(take(&mut rest)?);
        let computed = long(&mut rest)?;
        let root = BlockHash(take(&mut rest)?);
        let (tokens, scores, is_pruned) = (long(&mut rest)?, long(&mut rest)?, long(&mut rest)?);
        let is_consistent =
            version == VERSION && block_tokens > 0 && computed <= tokens && scores <= tokens && is_pruned < 2;
        if !is_consistent {
            return None;
        }
        let token_list: Vec<Token> = words(&mut rest, tokens)?.map(u32::from_le_bytes).collect();
        let scores = words(&mut rest, scores)?.map(f32::from_le_bytes).collect();
        let mut sequence = Sequence::new(token_list, Vec::new(), root);
        if is_pruned == 1 {
            let pruned = PrunedState {
                from_block: long(&mut rest)?,
                history: BlockHash(take(&mut rest)?),
                old: long(&mut rest)?,
                next: u32::from_le_bytes(take(&mut rest)?),
                positions: words(&mut rest, tokens)?.map(u32::from_le_bytes).collect(),
            };
            // Positions increase, and there is space for tokens after them.
            let increasing = pruned.positions.is_sorted_by(|a, b| a < b);
            let before_next = pruned.positions.last().is_none_or(|last| *last < pruned.next);
            if !increasing || !before_next || pruned.next > POSITION_MAX || pruned.old > tokens {
                return None;
            }
            sequence.pruned = Some(pruned);
        }
        if !rest.is_empty() {
            return None;
        }
        sequence.hash_blocks(block_tokens as usize);
        let Sequence { tokens, hashes, pruned, .. } = sequence;
        Some(SuspendedSequence {
            block_tokens,
            tokens,
            computed_tokens: computed,
            hashes,
            root,
            pruned,
            scores,
        })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, later) = rest.split_first_chunk::<N>()?;
    *rest = later;
    Some(*first)
}

fn long(rest: &mut &[u8]) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(take(rest)?)).ok()
}

/// Returns `count` words. Compares the count with the available bytes before any memory is allocated.
fn words<'a>(rest: &mut &'a [u8], count: usize) -> Option<impl Iterator<Item = [u8; 4]> + use<'a>> {
    let (now, later) = rest.split_at_checked(count.checked_mul(4)?)?;
    *rest = later;
    Some(now.as_chunks::<4>().0.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suspended() -> SuspendedSequence {
        let root = BlockHash::root("salt", "");
        let mut sequence = Sequence::new(Vec::new(), Vec::new(), root);
        sequence.pruned = Some(PrunedState {
            from_block: 1,
            history: root.extend(&[7]),
            old: 5,
            positions: Vec::new(),
            next: 9,
        });
        (0..10).for_each(|token| sequence.push(token, 4));
        let Sequence { tokens, hashes, pruned, .. } = sequence;
        SuspendedSequence {
            block_tokens: 4,
            tokens,
            computed_tokens: 9,
            hashes,
            root,
            pruned,
            scores: vec![0.5; 10],
        }
    }

    #[test]
    fn suspended_sequence_bytes_round_trip() {
        let mut suspended = suspended();
        assert_eq!(suspended.hashes.len(), 2);
        assert_eq!(SuspendedSequence::from_bytes(&suspended.to_bytes()), Some(suspended.clone()));
        suspended.pruned = None;
        suspended.hashes = crate::hash::block_hashes(suspended.root, &suspended.tokens, 4).collect();
        assert_eq!(SuspendedSequence::from_bytes(&suspended.to_bytes()), Some(suspended));
    }

    #[test]
    fn invalid_suspended_sequence_bytes_are_rejected() {
        let valid = suspended().to_bytes();
        for len in 0..valid.len() {
            assert_eq!(SuspendedSequence::from_bytes(&valid[..len]), None, "{len}");
        }
        let with = |at: usize, byte: u8| {
            let mut bytes = valid.clone();
            bytes[at] = byte;
            bytes
        };
        // Version, tokens per block, computed tokens, tokens, scores; a length far beyond the available bytes; one more
        // byte.
        for bytes in [with(0, 2), with(4, 0), with(8, 11), with(48, 9), with(56, 11), with(55, 255)] {
            assert_eq!(SuspendedSequence::from_bytes(&bytes), None);
        }
        assert_eq!(SuspendedSequence::from_bytes(&[&valid[..], &[0]].concat()), None);
    }
}
