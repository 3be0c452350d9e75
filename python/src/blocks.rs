//! Paged KV cache for inference engines written in Python: [`moontide_blocks`] as `moontide.blocks`.
//!
//! In Rust a cache has one owner. Here a lock replaces it: calls are serialized, a call that waits for the lock
//! releases the GIL, and no Python object is used while the lock is held. The two locks therefore cannot deadlock.
//!
//! Python decides how long arrays live, so `Rows` own what they show: `Rows` of a view hold a reference count on their
//! blocks (see [`moontide_blocks::Cache::pin`]), `Rows` of a writer hold the writer (it cannot be committed before they
//! are dropped), and `Rows` of the arena hold its memory.
//!
//! Invariant: a forked child neither uses nor drops inherited values.

mod cache;
mod pinned;
mod rows;
mod shape;
mod writer;

pub(crate) use cache::{BlockCache, table};
pub(crate) use pinned::{PinnedBlocks, SequenceView, SuspendedSequence};
pub(crate) use rows::Rows;
pub(crate) use writer::SequenceWriter;
