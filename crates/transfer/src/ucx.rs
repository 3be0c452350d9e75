//! One-sided transfers over OpenUCX, for RDMA networks and GPU memory.
//!
//! UCX is loaded at run time; nothing is linked and no header is needed. This module handles endpoints, registered
//! memory, gets and puts. It does not handle segments, keys of the cache or placement, and it is optional: the TCP and
//! shared-memory engines work without it.
//!
//! Reading order: [`Ucx`] loads the library; [`UcxWorker`] starts the only thread that calls into it; [`Registration`]
//! makes memory accessible to peers; [`Endpoint`] is a connection to a peer, [`RemoteKey`] gives access to its memory.
//!
//! Invariants:
//! - Only the progress thread of a worker calls UCX. Other threads send it commands.
//! - Each operation completes exactly once. Unless it completes with [`UcxError::Stuck`], UCX no longer uses its
//!   buffer.
//! - Every remote address is checked against the registered range before use: over some transports a wrong address
//!   kills the process that owns the memory.
//! - Deliberately absent: active messages, tags, streams, atomics, and UCX's own connection listener.

mod callbacks;
mod context;
mod envelope;
mod error;
mod handle;
mod library;
mod progress;
mod spin;
mod state;
mod sys;
mod version;
mod worker;

mod link;
mod server;

pub use self::context::WorkerConfig;
pub use self::envelope::EnvelopeError;
pub use self::error::{ENV, Status, Transports, UcxError, UcxUnavailable};
pub use self::handle::{Endpoint, Get, INFLIGHT_MAX, Put, Registration, RemoteKey};
pub use self::library::{OldVersions, Ucx};
pub use self::link::{UcxEngine, UcxLink};
pub use self::server::UcxServer;
pub use self::version::{MIN_FOR_USE, UcxVersion};
pub use self::worker::UcxWorker;
