//! [`Store`]: where blocks go that there is no room for, and come from that another process computed. A cache knows no
//! network: whoever has a client of a store gives it this face.
//!
//! What is stored of a block are its pieces one after the other: planes, then layers, then heads if they lie apart. The
//! [`Shape`](crate::Shape) belongs to the name under which an implementation files it, with the model and its version.

use crate::cache::{BlocksError, Cache, Reuse};
use crate::hash::BlockHash;
use crate::parked::Parked;
use crate::sequence::{Sequence, SequenceId};

/// A block to be saved.
#[derive(Debug)]
pub struct Source<'a> {
    /// Its name.
    pub hash: BlockHash,
    /// Its bytes, in pieces.
    pub pieces: Vec<&'a [u8]>,
}

/// A block to be loaded.
#[derive(Debug)]
pub struct Destination<'a> {
    /// Its name.
    pub hash: BlockHash,
    /// Where its bytes belong, in pieces.
    pub pieces: Vec<&'a mut [u8]>,
}

/// Somewhere else that blocks can be.
pub trait Store {
    /// Why it could not answer.
    type Error: std::error::Error;

    /// How many of these blocks it has, counted from the first up to the first that is missing.
    fn prefix(&self, blocks: &[BlockHash]) -> Result<usize, Self::Error>;

    /// Fills in the bytes of these blocks, and says how many of them, counted from the first, came complete and intact.
    fn load(&self, blocks: &mut [Destination<'_>]) -> Result<usize, Self::Error>;

    /// Keeps these blocks, and says how many of them, counted from the first, it has now.
    fn save(&self, blocks: &[Source<'_>]) -> Result<usize, Self::Error>;
}

/// Why a sequence was not put aside, or not brought back.
#[derive(Debug, thiserror::Error)]
pub enum ParkError<E: std::error::Error> {
    /// The cache's reason.
    #[error(transparent)]
    Blocks(#[from] BlocksError),
    /// The store's reason. The sequence is as it was.
    #[error("the store failed: {0}")]
    Store(E),
    /// The store did not take all blocks. The sequence is as it was.
    #[error("the store did not take all blocks: it may be full")]
    Refused,
    /// Its blocks would not be this cache's.
    #[error("it was put aside in blocks of {parked} tokens; those of this cache have {here}")]
    BlockTokens {
        /// How many a block had.
        parked: u32,
        /// How many it has here.
        here: u32,
    },
}

impl Cache {
    /// Brings what the store has of a sequence's beginning that is not there yet, and says how many tokens came. The last
    /// token is left to be computed. For an engine that must not wait: [`Cache::fill`], and
    /// [`Fill::restore`](crate::Fill::restore) in another thread.
    pub fn restore<S: Store + ?Sized>(&mut self, id: SequenceId, store: &S) -> Result<usize, ParkError<S::Error>> {
        let mut fill = self.fill(id)?;
        fill.leave_last();
        let restored = fill.restore(store).map_err(ParkError::Store)?;
        self.commit(fill)?;
        Ok(restored)
    }

    /// Saves all full blocks of a sequence that the store is not known to have. Says whether it has all of them now.
    pub fn spill<S: Store + ?Sized>(&mut self, id: SequenceId, store: &S) -> Result<bool, ParkError<S::Error>> {
        self.hold(id)?.save(store).map_err(ParkError::Store)
    }

    /// Puts a sequence aside: its blocks go to the store, the last one even if it is not full, and their room is free.
    /// [`Cache::resume`] brings it back, here or in another process.
    pub fn park<S: Store + ?Sized>(&mut self, id: SequenceId, store: &S) -> Result<Parked, ParkError<S::Error>> {
        self.put_in_order();
        self.idle(id)?;
        if !self.hold_parts(id, true)?.save(store).map_err(ParkError::Store)? {
            return Err(ParkError::Refused);
        }
        let filled = self.filled(id);
        let Sequence { tokens, hashes, root, thinned, worth, .. } = self.sequence(id)?;
        let parked = Parked {
            block_tokens: self.shape().block_tokens,
            tokens: tokens.clone(),
            filled,
            hashes: hashes.clone(),
            root: *root,
            thinned: thinned.clone(),
            worth: worth.clone(),
        };
        self.free(id)?;
        self.counts.parked += 1;
        Ok(parked)
    }

    /// Brings back a sequence that was put aside. All its tokens are there again; how many of them are complete
    /// [is to be asked](Cache::filled_of): what neither cache nor store has any more is to be computed again. If there is
    /// no room, or the store cannot be asked, nothing has changed.
    pub fn resume<S: Store + ?Sized>(
        &mut self,
        parked: &Parked,
        store: &S,
    ) -> Result<SequenceId, ParkError<S::Error>> {
        let Parked { block_tokens, tokens, filled, hashes, root, thinned, worth } = parked.clone();
        let here = self.shape().block_tokens;
        if block_tokens != here {
            return Err(ParkError::BlockTokens { parked: block_tokens, here });
        }
        let mut sequence = Sequence::new(tokens, hashes, root);
        (sequence.thinned, sequence.worth) = (thinned, worth);
        let full = filled / self.block_tokens() * self.block_tokens();
        let tail = (filled > full).then(|| sequence.hash_of(full, filled, self.block_tokens()));
        let id = self.install(sequence, Reuse::All)?.id;
        let restored = self.bring_back(id, filled, tail, store);
        if restored.is_err() {
            self.free(id)?;
        }
        restored.map(|()| id)
    }

    fn bring_back<S: Store + ?Sized>(
        &mut self,
        id: SequenceId,
        filled: usize,
        tail: Option<BlockHash>,
        store: &S,
    ) -> Result<(), ParkError<S::Error>> {
        // Only what was complete: tokens behind it never were anywhere.
        let mut fill = self.fill(id)?;
        fill.end_at(filled.max(fill.filled()));
        if let Some(tail) = tail {
            fill.name_tail(tail);
        }
        fill.restore(store).map_err(ParkError::Store)?;
        self.commit(fill)?;
        let (filled, block_tokens) = (self.filled(id), self.block_tokens());
        self.sequence_mut(id)?.lose_rows(filled, block_tokens);
        Ok(())
    }
}
