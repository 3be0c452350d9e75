//! What nodes and masters take from tokio and tonic, and what they share above them.
//!
//! - [`spawn`], [`spawn_blocking`], [`time`], [`rpc`]: tasks, timers and connections of gRPC clients. They are those of tokio and
//!   tonic; a simulated world replaces them (`--cfg sim`).
//! - [`MaybeTls`], [`TlsServer`], [`TlsClient`]: streams that are encrypted if the process has credentials.
//! - [`BoundedListener`]: a TCP listener whose connections are limited in number and in what they leave undone, for axum and
//!   tonic. [`Admission`] decides which connections it keeps.
//! - [`AdminGuard`]: which requests an admin server refuses because a browser may have been tricked into them.
//!
//! What needs no tokio is in `moontide-rt`.
//!
//! # Example
//!
//! An HTTP server with at most 64 connections, which closes those on which it answers nothing for ten seconds:
//!
//! ```no_run
//! # async fn example() -> std::io::Result<()> {
//! use std::time::Duration;
//!
//! use moontide_tasks::{BoundedListener, Protocol};
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! let protocol = Protocol::Http1 { answer_max: Duration::from_secs(10) };
//! let listener = BoundedListener::new(listener, 64, protocol, ());
//! axum::serve(listener, axum::Router::new()).await
//! # }
//! ```

#![forbid(unsafe_code)]

#[cfg(feature = "listener")]
mod admin_guard;
#[cfg(feature = "listener")]
mod admission;
#[cfg(feature = "listener")]
mod bounded_listener;
#[cfg(feature = "rpc")]
pub mod channel;
#[cfg(sim)]
pub mod sim;
mod tls;

#[cfg(feature = "listener")]
pub use admin_guard::{ADMIN_HEADER, AdminGuard, Denied, call_of_page};
#[cfg(feature = "listener")]
pub use admission::{Admission, BodyBytes, Evicted, Place, Refusal};
#[cfg(feature = "listener")]
pub use bounded_listener::{
    BoundedConnection, BoundedListener, ConnectionInfo, ConnectionObserver, GREETING_MAX, Protocol,
};
#[cfg(sim)]
pub use sim::{JoinHandle, spawn, spawn_blocking};
pub use tls::{ALPN_GRPC, ALPN_HTTP, MaybeTls, TlsClient, TlsServer};
#[cfg(not(sim))]
pub use tokio::task::{JoinHandle, spawn, spawn_blocking};

/// Timers.
pub mod time {
    #[cfg(sim)]
    pub use crate::sim::{Interval, MissedTickBehavior, Sleep, interval, sleep, timeout};
    #[cfg(not(sim))]
    pub use tokio::time::{Interval, MissedTickBehavior, Sleep, interval, sleep, timeout};
}

/// Connections of gRPC clients, as [`channel`]; a simulated world replaces them.
#[cfg(any(feature = "rpc", sim))]
pub mod rpc {
    #[cfg(not(sim))]
    pub use crate::channel::{Channel, ConnectError, connect};
    #[cfg(sim)]
    pub use crate::sim::{Channel, ConnectError, connect};
}
