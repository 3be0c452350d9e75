//! [`Parked`]: a sequence that was put aside, and its form as bytes, for another process.
//!
//! ```text
//! version u32 = 1 | block_tokens u32 | filled u64 | root 32 bytes | tokens u64 | worth u64 | is thinned u64, 0 or 1
//! each token u32 | each worth f32
//! if thinned: from_block u64 | history 32 bytes | old u64 | next u32 | the position of each token u32
//! ```
//!
//! All numbers are little-endian. Names of blocks are not among them: they follow from the rest, so that bytes from
//! elsewhere cannot give a block a name that is not its own.

use crate::hash::{BlockHash, Token};
use crate::sequence::{Sequence, Thinned};

const VERSION: u32 = 1;

/// No sequence has had more tokens.
const POSITION_MAX: u32 = 1 << 31;

/// A sequence that was put aside: all that is needed to go on with it, but for its blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Parked {
    pub(crate) block_tokens: u32,
    pub(crate) tokens: Vec<Token>,
    pub(crate) filled: usize,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) root: BlockHash,
    pub(crate) thinned: Option<Thinned>,
    pub(crate) worth: Vec<f32>,
}

impl Parked {
    /// Its tokens.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// How many of them were complete.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// As bytes, for another process.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let long = |number: usize| (number as u64).to_le_bytes();
        out.extend(VERSION.to_le_bytes());
        out.extend(self.block_tokens.to_le_bytes());
        out.extend(long(self.filled));
        out.extend(self.root.0);
        out.extend(long(self.tokens.len()));
        out.extend(long(self.worth.len()));
        out.extend(long(usize::from(self.thinned.is_some())));
        out.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        out.extend(self.worth.iter().flat_map(|worth| worth.to_le_bytes()));
        if let Some(thinned) = &self.thinned {
            out.extend(long(thinned.from_block));
            out.extend(thinned.history.0);
            out.extend(long(thinned.old));
            out.extend(thinned.next.to_le_bytes());
            out.extend(thinned.positions.iter().flat_map(|position| position.to_le_bytes()));
        }
        out
    }

    /// From those bytes; `None` if they are of another version, or make no sense.
    pub fn from_bytes(bytes: &[u8]) -> Option<Parked> {
        let mut rest = bytes;
        let version = u32::from_le_bytes(take(&mut rest)?);
        let block_tokens = u32::from_le_bytes(take(&mut rest)?);
        let filled = long(&mut rest)?;
        let root = BlockHash(take(&mut rest)?);
        let (tokens, worth, is_thinned) = (long(&mut rest)?, long(&mut rest)?, long(&mut rest)?);
        let makes_sense =
            version == VERSION && block_tokens > 0 && filled <= tokens && worth <= tokens && is_thinned < 2;
        if !makes_sense {
            return None;
        }
        let token_list: Vec<Token> = words(&mut rest, tokens)?.map(u32::from_le_bytes).collect();
        let worth = words(&mut rest, worth)?.map(f32::from_le_bytes).collect();
        let mut sequence = Sequence::new(token_list, Vec::new(), root);
        if is_thinned == 1 {
            let thinned = Thinned {
                from_block: long(&mut rest)?,
                history: BlockHash(take(&mut rest)?),
                old: long(&mut rest)?,
                next: u32::from_le_bytes(take(&mut rest)?),
                positions: words(&mut rest, tokens)?.map(u32::from_le_bytes).collect(),
            };
            // Positions rise, and there is room for tokens behind them.
            let rise = thinned.positions.is_sorted_by(|a, b| a < b);
            let before_next = thinned.positions.last().is_none_or(|last| *last < thinned.next);
            if !rise || !before_next || thinned.next > POSITION_MAX || thinned.old > tokens {
                return None;
            }
            sequence.thinned = Some(thinned);
        }
        if !rest.is_empty() {
            return None;
        }
        sequence.name_blocks(block_tokens as usize);
        let Sequence { tokens, hashes, thinned, .. } = sequence;
        Some(Parked { block_tokens, tokens, filled, hashes, root, thinned, worth })
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

/// So many words. What there is says how many there can be, before memory is taken for them.
fn words<'a>(rest: &mut &'a [u8], count: usize) -> Option<impl Iterator<Item = [u8; 4]> + use<'a>> {
    let (now, later) = rest.split_at_checked(count.checked_mul(4)?)?;
    *rest = later;
    Some(now.as_chunks::<4>().0.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parked() -> Parked {
        let root = BlockHash::root("salt", "");
        let mut sequence = Sequence::new(Vec::new(), Vec::new(), root);
        sequence.thinned = Some(Thinned {
            from_block: 1,
            history: root.then(&[7]),
            old: 5,
            positions: Vec::new(),
            next: 9,
        });
        (0..10).for_each(|token| sequence.push(token, 4));
        let Sequence { tokens, hashes, thinned, .. } = sequence;
        Parked { block_tokens: 4, tokens, filled: 9, hashes, root, thinned, worth: vec![0.5; 10] }
    }

    #[test]
    fn bytes_and_back() {
        let mut parked = parked();
        assert_eq!(parked.hashes.len(), 2);
        assert_eq!(Parked::from_bytes(&parked.to_bytes()), Some(parked.clone()));
        parked.thinned = None;
        parked.hashes = crate::hash::chain(parked.root, &parked.tokens, 4).collect();
        assert_eq!(Parked::from_bytes(&parked.to_bytes()), Some(parked));
    }

    #[test]
    fn bytes_that_make_no_sense_are_refused() {
        let good = parked().to_bytes();
        for len in 0..good.len() {
            assert_eq!(Parked::from_bytes(&good[..len]), None, "{len}");
        }
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        // The version, tokens of a block, complete tokens, tokens, worth; a length far beyond what there is; one more byte.
        for bytes in [with(0, 2), with(4, 0), with(8, 11), with(48, 9), with(56, 11), with(55, 255)] {
            assert_eq!(Parked::from_bytes(&bytes), None);
        }
        assert_eq!(Parked::from_bytes(&[&good[..], &[0]].concat()), None);
    }
}
