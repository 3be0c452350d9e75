//! [`RemoteBlockStore`]: the store as second tier of an engine's block cache.
//!
//! Keys are `<prefix><hash of the block>/<part>`. The Python package (`moontide.kv`) uses the same format: engines in
//! both languages find each other's blocks if prefix, byte order and hashes are equal.

use moontide_blocks::{BlockHash, BlockSource, BlockTarget};
use moontide_types::ErrorCode;

use crate::{GetInto, PutItem, PutOptions, PutOutcome, Store, StoreError};

/// Store of the blocks of one model and rank.
#[derive(Clone, Debug)]
pub struct RemoteBlockStore {
    store: Store,
    prefix: String,
    part: String,
    options: PutOptions,
}

impl RemoteBlockStore {
    /// Creates a block store. `prefix` identifies everything that the meaning of a block's bytes depends on: model,
    /// version, data type, layout order. `part` identifies this process's share of a block if several processes share a
    /// model: its rank.
    pub fn new(store: Store, prefix: &str, part: &str, options: PutOptions) -> RemoteBlockStore {
        RemoteBlockStore { store, prefix: prefix.to_owned(), part: part.to_owned(), options }
    }

    fn key(&self, hash: &BlockHash) -> String {
        format!("{}{hash}/{}", self.prefix, self.part)
    }

    /// Copies a block out of local memory. Returns `false` if it is not there.
    fn load_local(&self, key: &str, block: &mut BlockTarget<'_>) -> Result<bool, StoreError> {
        let Some(found) = self.store.try_get_ref(key.as_bytes())? else { return Ok(false) };
        Ok(found.len() == len_of(block) && self.store.copy_out_parts(&found, &mut block.pieces))
    }
}

fn len_of(block: &BlockTarget<'_>) -> usize {
    block.pieces.iter().map(|piece| piece.len()).sum()
}

/// Objects fetched at a time: enough to keep links busy, without a second copy of a whole sequence.
const FETCH_BATCH_MAX: usize = 16;

impl moontide_blocks::BlockStore for RemoteBlockStore {
    type Error = StoreError;

    fn prefix(&self, blocks: &[BlockHash]) -> Result<usize, StoreError> {
        let keys: Vec<String> = blocks.iter().map(|hash| self.key(hash)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        let mut prefix = 0;
        for exists in self.store.exists_batch(&keys) {
            match exists {
                Ok(true) => prefix += 1,
                // What precedes a key of an unreachable master can be used.
                Err(error) if prefix == 0 => return Err(error),
                Ok(false) | Err(_) => break,
            }
        }
        Ok(prefix)
    }

    fn load(&self, blocks: &mut [BlockTarget<'_>]) -> Result<usize, StoreError> {
        let mut loaded = 0;
        for group in blocks.chunks_mut(FETCH_BATCH_MAX) {
            let keys: Vec<String> = group.iter().map(|block| self.key(&block.hash)).collect();
            let mut remote = Vec::new();
            for (at, (block, key)) in group.iter_mut().zip(&keys).enumerate() {
                if !self.load_local(key, block)? {
                    remote.push((at, vec![0; len_of(block)]));
                }
            }
            let wanted = remote.iter_mut().map(|(at, into)| GetInto { key: keys[*at].as_bytes(), into });
            let results = self.store.get_batch_into(&mut wanted.collect::<Vec<_>>());
            for ((at, bytes), result) in remote.into_iter().zip(results) {
                let block = &mut group[at];
                // A block that was evicted since the look-up, or has another length, ends the usable prefix.
                let len = match result {
                    Err(StoreError::BufferTooSmall { .. }) => None,
                    result => result?,
                };
                if len != Some(bytes.len()) {
                    return Ok(loaded + at);
                }
                let mut rest = &bytes[..];
                for piece in &mut block.pieces {
                    let (head, tail) = rest.split_at(piece.len());
                    piece.copy_from_slice(head);
                    rest = tail;
                }
            }
            loaded += group.len();
        }
        Ok(loaded)
    }

    fn save(&self, blocks: &[BlockSource<'_>]) -> Result<usize, StoreError> {
        let keys: Vec<String> = blocks.iter().map(|block| self.key(&block.hash)).collect();
        let item = |(block, key)| -> PutItem<'_> {
            let (block, key): (&BlockSource<'_>, &String) = (block, key);
            PutItem { key: key.as_bytes(), parts: &block.pieces }
        };
        let items: Vec<PutItem<'_>> = blocks.iter().zip(&keys).map(item).collect();
        let outcomes = self.store.put_batch(&items, &self.options);
        // `Pending`: saved, but a node may return with the block that was replaced.
        let is_saved = |outcome: &&Result<PutOutcome, StoreError>| {
            outcome.as_ref().err().is_none_or(|error| error.code() == ErrorCode::Pending)
        };
        let saved = outcomes.iter().take_while(is_saved).count();
        match outcomes.into_iter().nth(saved) {
            // A full store is not an error of the cache: the blocks that were saved count.
            Some(Err(error)) if saved == 0 => Err(error),
            _ => Ok(saved),
        }
    }
}
