//! [`BlockStore`]: the store as a place for the blocks of an engine's own cache.
//!
//! Keys are `<prefix><hash of the block>/<part>`, as the Python package (`moontide.kv`) makes them, so that engines in both
//! languages find each other's blocks when prefix, order of bytes and hashes are the same.

use moontide_blocks::{BlockHash, Destination, Source};

use crate::{GetInto, PutItem, PutOptions, Store, StoreError};

/// A cache's view of a store.
#[derive(Clone, Debug)]
pub struct BlockStore {
    store: Store,
    prefix: String,
    part: String,
    options: PutOptions,
}

impl BlockStore {
    /// Under a prefix that says all that gives a block's bytes a meaning: model, version, type, order. `part` is what this
    /// process has of a block, if several share a model: its rank.
    pub fn new(store: Store, prefix: &str, part: &str, options: PutOptions) -> BlockStore {
        BlockStore { store, prefix: prefix.to_owned(), part: part.to_owned(), options }
    }

    fn key(&self, hash: &BlockHash) -> String {
        format!("{}{hash}/{}", self.prefix, self.part)
    }

    /// Copies a block out of this host's memory, if it is there.
    fn load_here(&self, key: &str, block: &mut Destination<'_>) -> Result<bool, StoreError> {
        let Some(found) = self.store.get_ref_here(key.as_bytes())? else { return Ok(false) };
        Ok(found.len() == len_of(block) && self.store.copy_out_parts(&found, &mut block.pieces))
    }
}

fn len_of(block: &Destination<'_>) -> usize {
    block.pieces.iter().map(|piece| piece.len()).sum()
}

/// So many objects are fetched at a time: enough to keep links busy, without a second copy of a whole sequence.
const FETCHED_MAX: usize = 16;

impl moontide_blocks::Store for BlockStore {
    type Error = StoreError;

    fn prefix(&self, blocks: &[BlockHash]) -> Result<usize, StoreError> {
        let keys: Vec<String> = blocks.iter().map(|hash| self.key(hash)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        Ok(self.store.exists_batch(&keys)?.iter().take_while(|there| **there).count())
    }

    fn load(&self, blocks: &mut [Destination<'_>]) -> Result<usize, StoreError> {
        let mut loaded = 0;
        for group in blocks.chunks_mut(FETCHED_MAX) {
            let keys: Vec<String> = group.iter().map(|block| self.key(&block.hash)).collect();
            let mut far = Vec::new();
            for (at, (block, key)) in group.iter_mut().zip(&keys).enumerate() {
                if !self.load_here(key, block)? {
                    far.push((at, vec![0; len_of(block)]));
                }
            }
            let wanted = far.iter_mut().map(|(at, into)| GetInto { key: keys[*at].as_bytes(), into });
            let answers = self.store.get_batch_into(&mut wanted.collect::<Vec<_>>());
            for ((at, bytes), answer) in far.into_iter().zip(answers) {
                let block = &mut group[at];
                // Whatever was evicted since it was found, or has another length, ends what can be used.
                let len = match answer {
                    Err(StoreError::BufferTooSmall { .. }) => None,
                    answer => answer?,
                };
                if len != Some(bytes.len()) {
                    return Ok(loaded + at);
                }
                let mut rest = &bytes[..];
                for piece in &mut block.pieces {
                    let (now, later) = rest.split_at(piece.len());
                    piece.copy_from_slice(now);
                    rest = later;
                }
            }
            loaded += group.len();
        }
        Ok(loaded)
    }

    fn save(&self, blocks: &[Source<'_>]) -> Result<usize, StoreError> {
        let keys: Vec<String> = blocks.iter().map(|block| self.key(&block.hash)).collect();
        let item = |(block, key)| -> PutItem<'_> {
            let (block, key): (&Source<'_>, &String) = (block, key);
            PutItem { key: key.as_bytes(), parts: &block.pieces }
        };
        let items: Vec<PutItem<'_>> = blocks.iter().zip(&keys).map(item).collect();
        let outcomes = self.store.put_batch(&items, &self.options);
        let saved = outcomes.iter().take_while(|outcome| outcome.is_ok()).count();
        match outcomes.into_iter().nth(saved) {
            // A store that is full is no error of the cache's: what it took, it took.
            Some(Err(error)) if saved == 0 => Err(error),
            _ => Ok(saved),
        }
    }
}
