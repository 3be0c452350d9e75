//! Threads: those of std.

pub use std::thread::{
    Builder, JoinHandle, Thread, ThreadId, current, park, park_timeout, sleep, spawn, yield_now,
};
