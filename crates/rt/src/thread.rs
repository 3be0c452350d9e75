//! Threads: those of std, or the fibers of a simulated world.

#[cfg(sim)]
pub use crate::sim::{
    Builder, JoinHandle, Thread, ThreadId, current, park, park_timeout, sleep, spawn, yield_now,
};
#[cfg(not(sim))]
pub use std::thread::{
    Builder, JoinHandle, Thread, ThreadId, current, park, park_timeout, sleep, spawn, yield_now,
};

/// A thread of this priority gives way to one that wakes up, and has a tenth of a core beside one that does not sleep. Less would
/// let it keep a lock for too long.
#[cfg(not(sim))]
const BACKGROUND_NICENESS: i32 = 10;

/// Lets other threads of the host run before the current one, from now on: its work is not urgent. If the operating system
/// refuses, it goes on with its priority.
pub fn lower_priority() {
    // On Linux the call is about the calling thread.
    #[cfg(not(sim))]
    let _ = rustix::process::setpriority_process(None, BACKGROUND_NICENESS);
}
