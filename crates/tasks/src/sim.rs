//! Tasks of a simulated world, compiled with `--cfg sim`: each task is a thread of the world that polls one future. Timers use
//! the world's clock, and calls go through a [`Network`] of the world.

mod rpc;
mod task;
mod time;

pub use rpc::{Channel, ConnectError, Network, Reply, connect, set_network};
pub use task::{JoinError, JoinHandle, block_on, spawn, spawn_blocking, with_runtime};
pub use time::{Elapsed, Interval, MissedTickBehavior, Sleep, interval, sleep, timeout};
