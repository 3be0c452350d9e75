//! Expert-parallel dispatch and combine for Python: [`moontide_ep`] as `moontide.ep`.
//!
//! In Rust a step is a guard that borrows its channel. Python has no borrows, so here a step has a number:
//! [`Dispatching`] and [`Dispatched`] contain it, every call resumes the step ([`moontide_ep::Channel::resume`]), and a
//! call for a finished step fails. Calls are serialized. A call that waits releases the GIL, and no Python object is
//! used while the lock of the channel is held. The two locks therefore cannot deadlock.
//!
//! Exported rows are counted: the step does not continue while an array over them exists.
//!
//! Invariant: a forked child neither uses nor drops inherited values.

mod channel;
mod rows;
mod shape;
mod step;
mod world;

pub(crate) use channel::Channel;
pub(crate) use rows::TokenRows;
pub(crate) use step::{Dispatched, Dispatching};
pub(crate) use world::World;
