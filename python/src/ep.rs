//! Expert-parallel exchange for Python: [`moontide_ep`] as `moontide.ep`.
//!
//! A step in Rust is a guard that borrows its channel. Python has no such borrows, so a step here is a number: what is held
//! of it ([`Sent`], [`Received`]) names it, every call takes the step up anew ([`moontide_ep::Channel::resume`]), and one
//! that is over is refused. Calls take turns; those that wait do so with Python's lock released, and nothing of Python is
//! touched while the channel's lock is held, so that the two locks cannot wait for each other.
//!
//! Rows that are lent in place are counted: while there is an array over them the step does not go on.
//!
//! Invariant: what a forked child inherits of all this it neither uses nor drops.

mod channel;
mod rows;
mod shape;
mod step;
mod world;

pub(crate) use channel::Channel;
pub(crate) use rows::TokenRows;
pub(crate) use step::{Received, Sent};
pub(crate) use world::World;
