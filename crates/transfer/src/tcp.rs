//! TCP engine: frames over streams, on threads.
//!
//! | file | content |
//! |---|---|
//! | `socket` | a stream whose waits all have a time limit |
//! | `handshake` | Hello and HelloAck |
//! | `receive_lock` | choice of the thread that receives on a connection |
//! | `in_flight` | requests in flight, and the thread that completes each |
//! | `request` | one request frame |
//! | `payload` | the memory behind the payload of a frame |
//! | `recv_buffer` | headers and bodies received in one system call |
//! | `connection` | requests in flight on one stream |
//! | `connection_set` | connections to one peer; rails |
//! | `link` | engine and link |
//! | `pending` | a running batch; resending of frames |
//! | `pipeline` | small puts in one round trip |
//! | `server` | server side |
//! | `admission` | which connections a server accepts |
//! | `body_budget` | memory for the bodies of requests at a server |

#[cfg(not(shuttle))]
mod admission;
#[cfg(not(shuttle))]
mod body_budget;
#[cfg(not(shuttle))]
pub(crate) mod connection;
#[cfg(not(shuttle))]
mod connection_set;
#[cfg(not(shuttle))]
mod handshake;
mod in_flight;
#[cfg(not(shuttle))]
mod link;
#[cfg(not(shuttle))]
mod payload;
#[cfg(not(shuttle))]
mod pending;
#[cfg(not(shuttle))]
mod pipeline;
mod receive_lock;
#[cfg(not(shuttle))]
mod recv_buffer;
#[cfg(not(shuttle))]
pub(crate) mod request;
#[cfg(not(shuttle))]
pub(crate) mod server;
#[cfg(not(shuttle))]
pub(crate) mod socket;
#[cfg(not(shuttle))]
mod tls;

#[cfg(not(shuttle))]
pub use connection_set::{CONNECTIONS_DEFAULT, CONNECTIONS_MAX, NearNode, TcpConfig};
#[cfg(not(shuttle))]
pub use link::{TcpEngine, TcpLink};
#[cfg(not(shuttle))]
pub use server::{TcpServer, TcpServerConfig, TcpServerError};
