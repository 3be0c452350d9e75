//! TCP: frames over streams, on threads.
//!
//! | file | what |
//! |---|---|
//! | `socket` | a stream, with an end to every wait |
//! | `hello` | the greeting |
//! | `turn` | who receives on a connection |
//! | `flights` | which requests are in flight, and who finishes them |
//! | `request` | one frame that asks |
//! | `flow` | the memory behind a frame's payload |
//! | `inbox` | headers and bodies that came together |
//! | `connection` | requests in flight on one stream |
//! | `link` | several connections to one peer; rails |
//! | `pending` | a batch under way; sending again |
//! | `one_go` | small puts in one round trip |
//! | `server` | the owner's end |

#[cfg(not(shuttle))]
pub(crate) mod connection;
mod flights;
#[cfg(not(shuttle))]
mod flow;
#[cfg(not(shuttle))]
mod hello;
#[cfg(not(shuttle))]
mod inbox;
#[cfg(not(shuttle))]
mod link;
#[cfg(not(shuttle))]
mod one_go;
#[cfg(not(shuttle))]
mod pending;
#[cfg(not(shuttle))]
pub(crate) mod request;
#[cfg(not(shuttle))]
pub(crate) mod server;
#[cfg(not(shuttle))]
pub(crate) mod socket;
mod turn;

#[cfg(not(shuttle))]
pub use link::{CONNECTIONS_DEFAULT, CONNECTIONS_MAX, TcpConfig, TcpEngine, TcpLink};
#[cfg(not(shuttle))]
pub use server::{ServeError, Server, ServerConfig};
