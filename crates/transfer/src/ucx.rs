//! One-sided transfers over OpenUCX, for RDMA networks and GPU memory.
//!
//! UCX is loaded at run time; nothing is linked and no header is needed. This module knows endpoints, registered
//! memory, gets and puts. It knows nothing of segments, keys of the cache or placement, and it is never the base: the
//! TCP and shared-memory engines work without it.
//!
//! Reading order: [`Ucx`] finds the library; [`UcxWorker`] starts the one thread that ever calls into it;
//! [`Registration`] opens memory to peers; [`Endpoint`] leads to a peer, [`RemoteKey`] to its memory.
//!
//! Invariants:
//! - Only the progress thread of a worker calls UCX. Everybody else hands it commands.
//! - Each operation completes exactly once. Unless it completes with [`UcxError::Stuck`], its buffer is ours again.
//! - No remote address leaves this process without having been checked against the registered range: over some
//!   transports a wrong address kills the owner of the memory.
//! - Deliberately absent: active messages, tags, streams, atomics, and UCX's own connection listener.

mod context;
mod envelope;
mod error;
mod library;
mod mail;
mod progress;
mod spin;
mod state;
mod sys;
mod worker;

mod host;
mod link;

pub use self::envelope::EnvelopeError;
pub use self::error::{Status, Transports, UcxAbsent, UcxError, UcxVersion};
pub use self::host::UcxHost;
pub use self::library::{ENV, MIN_FOR_USE, OldVersions, Ucx};
pub use self::link::{UcxEngine, UcxLink};
pub use self::worker::{Endpoint, Get, INFLIGHT_MAX, Put, Registration, RemoteKey, UcxWorker, WorkerConfig};
