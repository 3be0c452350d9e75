//! Atomics, from one place, so that a model checker can stand in for the machine (`--cfg loom`).
//!
//! What two threads may do at once is in [`pool`](crate::pool) and [`readers`](crate::readers), and is written against
//! these names.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
