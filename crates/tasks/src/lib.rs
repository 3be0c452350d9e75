//! What the servers of nodes and masters share above tokio.
//!
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

pub use bounded_listener::{BoundedConnection, BoundedListener, ConnectionObserver};
