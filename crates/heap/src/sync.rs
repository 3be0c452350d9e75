//! Atomics, from one place, so that a model checker can stand in for the machine.
//!
//! `--cfg loom` explores every interleaving and every allowed reordering of small models; `--cfg shuttle`
//! runs larger ones on many random schedules, sequentially consistent. Everything that two processes may do
//! at once is written against these names, on slices of atomics: in production the slices lie in shared
//! memory, in a model they lie in a `Vec`.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
