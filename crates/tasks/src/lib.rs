//! What nodes and masters take from tokio and tonic, and what they share above them.
//!
//! - [`spawn`], [`spawn_blocking`], [`time`], [`rpc`]: tasks, timers and connections of gRPC clients. They are those of tokio and
//!   tonic; a simulated world replaces them (`--cfg sim`).
//! - [`BoundedListener`]: a TCP listener with a limit of connections and an idle timeout, for axum and tonic.
//!
//! What needs no tokio is in `moontide-rt`.
//!
//! # Example
//!
//! An HTTP server with at most 64 connections, which closes those that are idle for ten seconds:
//!
//! ```no_run
//! # async fn example() -> std::io::Result<()> {
//! use std::time::Duration;
//!
//! use moontide_tasks::BoundedListener;
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! let listener = BoundedListener::new(listener, 64, (), Some(Duration::from_secs(10)));
//! axum::serve(listener, axum::Router::new()).await
//! # }
//! ```

#![forbid(unsafe_code)]

mod bounded_listener;
#[cfg(all(feature = "rpc", not(sim)))]
pub mod rpc;
#[cfg(sim)]
pub mod sim;

pub use bounded_listener::{BoundedConnection, BoundedListener, ConnectionObserver};
#[cfg(sim)]
pub use sim::{JoinHandle, spawn, spawn_blocking};
#[cfg(not(sim))]
pub use tokio::task::{JoinHandle, spawn, spawn_blocking};

/// Timers.
pub mod time {
    #[cfg(sim)]
    pub use crate::sim::{Interval, MissedTickBehavior, Sleep, interval, sleep, timeout};
    #[cfg(not(sim))]
    pub use tokio::time::{Interval, MissedTickBehavior, Sleep, interval, sleep, timeout};
}

/// Connections of gRPC clients.
#[cfg(sim)]
pub mod rpc {
    pub use crate::sim::{Channel, ConnectError, connect};
}
