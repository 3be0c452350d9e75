//! The KV cache that an inference engine holds in its own process: blocks of tokens, sequences that share them, and a way to
//! and from a store.
//!
//! ```
//! use moontide_blocks::{Attention, BlockHash, Cache, CacheConfig, Dtype, Order, Plane, Shape};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let attention = Attention::Heads { kv_heads: 2, dim: 8 };
//! let shape = Shape { layers: 1, block_tokens: 4, attention, dtype: Dtype::F32, order: Order::TokenMajor };
//! let mut cache = Cache::new(&CacheConfig::new(shape, 64))?;
//! let root = BlockHash::root("", "");
//!
//! // A prompt of ten tokens: its rows are computed, written, and made visible.
//! let prompt: Vec<u32> = (0..10).collect();
//! let first = cache.allocate(&prompt, root)?;
//! let mut fill = cache.fill(first.id)?;
//! for plane in [Plane::Keys, Plane::Values] {
//!     fill.write(plane, 0, &[7; 10 * 2 * 8 * 4]);
//! }
//! fill.complete(10);
//! cache.commit(fill)?;
//!
//! // The next one with the same beginning has two blocks of it already.
//! let second = cache.allocate(&prompt, root)?;
//! assert_eq!(second.shared_tokens, 8);
//!
//! // Another thread reads while this one goes on; what it sees stays until it leaves.
//! let mut reader = cache.reader()?;
//! let guard = reader.enter();
//! let view = guard.view(first.id).expect("it is there");
//! cache.free(first.id)?;
//! assert_eq!(view.rows(Plane::Keys, 0, 2).numbers::<u8>(1, 1), [7; 32]);
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: [`Shape`] and `arena` (where numbers lie), [`Pool`] (which blocks are free; lock-free), `readers` (who
//! may still be looking), `hash` (what blocks are called), `books`, `sequence`, then [`Cache`], which brings them together;
//! [`View`], [`Fill`] and [`Held`] are what other threads have of it; [`Store`] is where blocks go to.

mod planted;
mod pool;
mod readers;
mod sync;

pub use pool::{BLOCKS_MAX, Block, Pool};

/// Everything but what a model checker runs by itself (`--cfg loom`).
macro_rules! the_rest {
    ($($item:item)*) => { $(#[cfg(not(loom))] $item)* };
}

the_rest! {
    mod arena;
    mod shape;

    mod books;
    mod hash;
    mod runs;
    mod sequence;
    mod space;

    mod cache;
    mod fill;
    mod view;

    mod audit;
    mod parked;
    mod pin;
    mod resize;
    mod stats;
    mod store;
    mod thin;

    pub use arena::{Arena, ArenaError, Element, Rows, RowsMut};
    pub use cache::{Allocated, BlocksError, Cache, CacheConfig, Placement};
    pub use fill::{Fill, Held};
    pub use hash::{BlockHash, Token, chain};
    pub use sequence::SequenceId;
    pub use shape::{At, Attention, Dtype, Order, Plane, Shape, Strides};
    pub use space::Full;
    pub use stats::{Counts, Stats};
    pub use parked::Parked;
    pub use store::{Destination, ParkError, Source, Store};
    pub use thin::Keep;
    pub use view::{Guard, Reader, View};
}

/// What the model tests need beyond the public names.
#[cfg(loom)]
#[doc(hidden)]
pub mod model {
    pub use crate::planted::{Bug, with_planted};
    pub use crate::readers::{Readers, Stamp};
}
