//! Threads: those of std, or the fibers of a simulated world.

#[cfg(sim)]
pub use crate::sim::{
    Builder, JoinHandle, Thread, ThreadId, current, park, park_timeout, sleep, spawn, yield_now,
};
#[cfg(not(sim))]
pub use std::thread::{
    Builder, JoinHandle, Thread, ThreadId, current, park, park_timeout, sleep, spawn, yield_now,
};
