//! The engine's own paged cache, for engines written in Python: [`moontide_blocks`] as `moontide.blocks`.
//!
//! A cache has one owner in Rust. Here a lock stands for it: calls take turns, those that wait for it do so with Python's
//! lock released, and nothing of Python is touched while it is held, so that the two locks cannot wait for each other.
//!
//! Arrays live as long as Python likes. So what they show is not borrowed but held: `Rows` of a view keep a count on their
//! blocks (see [`moontide_blocks::Cache::pin`]), those of a fill keep the right to write (it cannot be committed before
//! they are gone), and those of the arena keep its memory.
//!
//! Invariant: what a forked child inherits of all this it neither uses nor drops.

mod cache;
mod fill;
mod held;
mod rows;
mod shape;

pub(crate) use cache::{BlockCache, table};
pub(crate) use fill::Fill;
pub(crate) use held::{Held, Parked, SequenceView};
pub(crate) use rows::Rows;
