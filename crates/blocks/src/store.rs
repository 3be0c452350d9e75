//! [`BlockStore`]: target for blocks that do not fit into the cache, and source of blocks that another process
//! computed. A cache has no network code: an adapter implements this trait for a client of a store.
//!
//! The stored form of a block is the sequence of its pieces: planes, then layers, then heads if they are separate. An
//! implementation stores it under a key that includes the hash, the [`CacheShape`](crate::CacheShape), the model and
//! its version.

use crate::cache::{Cache, CacheError, Reuse};
use crate::hash::BlockHash;
use crate::sequence::{Sequence, SequenceId};
use crate::suspended::SuspendedSequence;

/// A block to save.
#[derive(Debug)]
pub struct BlockSource<'a> {
    /// Hash of the block.
    pub hash: BlockHash,
    /// Bytes of the block, in pieces.
    pub pieces: Vec<&'a [u8]>,
}

/// A block to load.
#[derive(Debug)]
pub struct BlockTarget<'a> {
    /// Hash of the block.
    pub hash: BlockHash,
    /// Memory for its bytes, in pieces.
    pub pieces: Vec<&'a mut [u8]>,
}

/// External storage of blocks.
pub trait BlockStore {
    /// Error of a request.
    type Error: std::error::Error;

    /// Returns how many of these blocks it has, counted from the first up to the first missing one.
    fn prefix(&self, blocks: &[BlockHash]) -> Result<usize, Self::Error>;

    /// Loads the bytes of these blocks. Returns how many of them, counted from the first, are complete and intact.
    fn load(&self, blocks: &mut [BlockTarget<'_>]) -> Result<usize, Self::Error>;

    /// Saves these blocks. Returns how many of them, counted from the first, it has now.
    fn save(&self, blocks: &[BlockSource<'_>]) -> Result<usize, Self::Error>;
}

/// Failure to suspend or resume a sequence.
#[derive(Debug, thiserror::Error)]
pub enum SuspendError<E: std::error::Error> {
    /// Error of the cache.
    #[error(transparent)]
    Blocks(#[from] CacheError),
    /// Error of the store. The sequence is unchanged.
    #[error("store failed: {0}")]
    Store(E),
    /// The store did not accept all blocks. The sequence is unchanged.
    #[error("store did not accept all blocks: it may be full")]
    Refused,
    /// The sequence was suspended with another block size.
    #[error("sequence was suspended with {suspended} tokens per block; this cache has {cache}")]
    BlockTokens {
        /// Tokens per block of the suspended sequence.
        suspended: u32,
        /// Tokens per block of this cache.
        cache: u32,
    },
}

impl Cache {
    /// Loads the blocks of a sequence's prefix that the store has and the cache does not. Returns the number of loaded
    /// tokens. The last token is left to be computed. An engine that must not block uses [`Cache::writer`], and
    /// [`SequenceWriter::restore`](crate::SequenceWriter::restore) in another thread.
    pub fn restore<S: BlockStore + ?Sized>(
        &mut self,
        id: SequenceId,
        store: &S,
    ) -> Result<usize, SuspendError<S::Error>> {
        let mut writer = self.writer(id)?;
        writer.skip_last_token();
        let restored = writer.restore(store).map_err(SuspendError::Store)?;
        self.commit(writer)?;
        Ok(restored)
    }

    /// Saves all full blocks of a sequence that the store is not known to have. Returns whether it has all of them now.
    pub fn spill<S: BlockStore + ?Sized>(
        &mut self,
        id: SequenceId,
        store: &S,
    ) -> Result<bool, SuspendError<S::Error>> {
        self.pin_full_blocks(id)?.save(store).map_err(SuspendError::Store)
    }

    /// Suspends a sequence: saves its blocks to the store, including a partly filled last one, and frees them.
    /// [`Cache::resume`] restores it, here or in another process.
    pub fn suspend<S: BlockStore + ?Sized>(
        &mut self,
        id: SequenceId,
        store: &S,
    ) -> Result<SuspendedSequence, SuspendError<S::Error>> {
        self.process_returns();
        self.idle(id)?;
        if !self.pin_spans(id, true)?.save(store).map_err(SuspendError::Store)? {
            return Err(SuspendError::Refused);
        }
        let computed = self.computed(id);
        let Sequence { tokens, hashes, root, pruned, scores, .. } = self.sequence(id)?;
        let suspended = SuspendedSequence {
            block_tokens: self.shape().block_tokens,
            tokens: tokens.clone(),
            computed_tokens: computed,
            hashes: hashes.clone(),
            root: *root,
            pruned: pruned.clone(),
            scores: scores.clone(),
        };
        self.free(id)?;
        self.counts.suspended += 1;
        Ok(suspended)
    }

    /// Resumes a suspended sequence with all its tokens. [`Cache::computed_tokens`] returns how many of them are
    /// complete: rows that neither cache nor store has any more must be computed again. If there is no space, or the
    /// store fails, nothing has changed.
    pub fn resume<S: BlockStore + ?Sized>(
        &mut self,
        suspended: &SuspendedSequence,
        store: &S,
    ) -> Result<SequenceId, SuspendError<S::Error>> {
        let SuspendedSequence {
            block_tokens,
            tokens,
            computed_tokens: computed,
            hashes,
            root,
            pruned,
            scores,
        } = suspended.clone();
        let cache = self.shape().block_tokens;
        if block_tokens != cache {
            return Err(SuspendError::BlockTokens { suspended: block_tokens, cache });
        }
        let mut sequence = Sequence::new(tokens, hashes, root);
        (sequence.pruned, sequence.scores) = (pruned, scores);
        let full = computed / self.block_tokens() * self.block_tokens();
        let tail = (computed > full).then(|| sequence.hash_of(full, computed, self.block_tokens()));
        let id = self.insert_sequence(sequence, Reuse::All)?.id;
        let restored = self.load_blocks(id, computed, tail, store);
        if restored.is_err() {
            self.free(id)?;
        }
        restored.map(|()| id)
    }

    fn load_blocks<S: BlockStore + ?Sized>(
        &mut self,
        id: SequenceId,
        computed: usize,
        tail: Option<BlockHash>,
        store: &S,
    ) -> Result<(), SuspendError<S::Error>> {
        // Only the complete tokens: rows of later ones were never stored.
        let mut writer = self.writer(id)?;
        writer.end_at(computed.max(writer.computed_tokens()));
        if let Some(tail) = tail {
            writer.set_tail_hash(tail);
        }
        writer.restore(store).map_err(SuspendError::Store)?;
        self.commit(writer)?;
        let (computed, block_tokens) = (self.computed(id), self.block_tokens());
        self.sequence_mut(id)?.lose_rows(computed, block_tokens);
        Ok(())
    }
}
