//! KV cache in the process of an inference engine: blocks of tokens, sequences that share them, and transfer to and
//! from a store.
//!
//! ```
//! use moontide_blocks::{Attention, BlockHash, Cache, CacheConfig, CacheShape, DimOrder, Dtype, Plane};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let attention = Attention::Heads { kv_heads: 2, dim: 8 };
//! let order = DimOrder::TokenMajor;
//! let shape = CacheShape { layers: 1, block_tokens: 4, attention, dtype: Dtype::F32, order };
//! let mut cache = Cache::new(&CacheConfig::new(shape, 64))?;
//! let root = BlockHash::root("", "");
//!
//! // A prompt of ten tokens: its rows are computed, written, and made visible.
//! let prompt: Vec<u32> = (0..10).collect();
//! let first = cache.allocate(&prompt, root)?;
//! let mut writer = cache.writer(first.id)?;
//! for plane in [Plane::Keys, Plane::Values] {
//!     writer.write(plane, 0, &[7; 10 * 2 * 8 * 4]);
//! }
//! writer.mark_written(10);
//! cache.commit(writer)?;
//!
//! // The next sequence with the same prefix shares two blocks.
//! let second = cache.allocate(&prompt, root)?;
//! assert_eq!(second.cached_tokens, 8);
//!
//! // Another thread reads concurrently; its view stays valid until it drops the guard.
//! let mut reader = cache.reader()?;
//! let guard = reader.enter();
//! let view = guard.view(first.id).expect("sequence exists");
//! cache.free(first.id)?;
//! assert_eq!(view.rows(Plane::Keys, 0, 2).numbers::<u8>(1, 1), [7; 32]);
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: [`CacheShape`] and `arena` (memory layout), [`BlockPool`] (free blocks; lock-free), `reader_epochs`
//! (active readers), `hash` (block hashes), `block_index`, `sequence`, then [`Cache`], which combines them. [`View`],
//! [`SequenceWriter`] and [`PinnedBlocks`] are handles for other threads; [`BlockStore`] is the interface of a store.

mod mutation;
mod pool;
mod reader_epochs;

pub use pool::{BLOCKS_MAX, Block, BlockPool};

// A model checker runs the modules above alone; `--cfg loom` leaves out the rest.
#[cfg(not(loom))]
mod arena;
#[cfg(not(loom))]
mod shape;

#[cfg(not(loom))]
mod allocator;
#[cfg(not(loom))]
mod block_index;
#[cfg(not(loom))]
mod hash;
#[cfg(not(loom))]
mod run_allocator;
#[cfg(not(loom))]
mod sequence;

#[cfg(not(loom))]
mod cache;
#[cfg(not(loom))]
mod view;
#[cfg(not(loom))]
mod writer;

#[cfg(all(not(loom), any(test, feature = "testing")))]
mod audit;
#[cfg(not(loom))]
mod pin;
#[cfg(not(loom))]
mod prune;
#[cfg(not(loom))]
mod resize;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod store;
#[cfg(not(loom))]
mod suspended;

#[cfg(not(loom))]
pub use allocator::OutOfBlocks;
#[cfg(not(loom))]
pub use arena::{Arena, ArenaError, Element, Rows, RowsMut};
#[cfg(not(loom))]
pub use cache::{Allocated, BlockPlacement, Cache, CacheConfig, CacheError};
#[cfg(not(loom))]
pub use hash::{BlockHash, Token, block_hashes};
#[cfg(not(loom))]
pub use prune::PrunePolicy;
#[cfg(not(loom))]
pub use sequence::SequenceId;
#[cfg(not(loom))]
pub use shape::{Attention, CacheShape, DimOrder, Dtype, Plane, RowIndex, Strides};
#[cfg(not(loom))]
pub use stats::{CacheCounters, CacheStats};
#[cfg(not(loom))]
pub use store::{BlockSource, BlockStore, BlockTarget, SuspendError};
#[cfg(not(loom))]
pub use suspended::SuspendedSequence;
#[cfg(not(loom))]
pub use view::{Guard, Reader, View};
#[cfg(not(loom))]
pub use writer::{PinnedBlocks, SequenceWriter};

/// Items for the model tests in addition to the public ones.
#[cfg(loom)]
#[doc(hidden)]
pub mod model {
    pub use crate::mutation::Mutation;
    pub use crate::reader_epochs::{ReaderEpochs, RetireEpoch};
}
