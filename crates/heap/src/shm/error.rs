//! [`ShmError`]: failure of a connection between processes of one host.

use std::io;

use moontide_types::ErrorCode;

use crate::shm::ledger::LedgerError;
use crate::shm::local::AttachError;
use crate::shm::raw_message::ShmMessageError;
use crate::shm::region::RegionError;

/// Failure to bind a listener or to connect a client.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// Attempted operation.
        what: &'static str,
        /// Error of the operation.
        source: io::Error,
    },
    /// The path does not fit into a socket address (107 bytes).
    #[error("socket path is too long; choose one of at most 107 bytes")]
    Path,
    /// The peer's message is invalid.
    #[error(transparent)]
    Message(#[from] ShmMessageError),
    /// The peer sent another message than expected, or not the descriptors that belong to it.
    #[error("unexpected message from process {pid}")]
    Unexpected {
        /// Process id of the peer.
        pid: u32,
    },
    /// Descriptors of a message were lost: there were too many, or this process may not open more files.
    #[error("descriptors of a message were lost; raise the limit on open files (ulimit -n)")]
    Descriptors,
    /// The peer's user is not allowed.
    #[error(
        "process {pid} of user {uid} is not allowed; run it as the node's user or add the user to the list"
    )]
    User {
        /// Process id of the peer.
        pid: u32,
        /// User id of the peer.
        uid: u32,
    },
    /// The process behind the node's socket belongs to another user, who is not trusted with the objects.
    #[error(
        "process {pid} behind the node's socket belongs to user {uid}, who is neither this process's user nor root; \
         run node and client as one user"
    )]
    NodeUser {
        /// Process id of the listener.
        pid: u32,
        /// User id of the listener.
        uid: u32,
    },
    /// The pidfd is not that of the peer.
    #[error("process {pid} sent a descriptor that is not its own pidfd")]
    Pidfd {
        /// Process id of the peer.
        pid: u32,
    },
    /// The peer's process has no id in this pid namespace, so it cannot be identified.
    #[error("process of user {uid} is in another pid namespace; let the containers share one with the node")]
    PidNamespace {
        /// User id of the peer.
        uid: u32,
    },
    /// No ledger could be created for the client.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The node rejected the client.
    #[error("node rejected the client: {0}; {hint}", hint = .0.hint())]
    Refused(ErrorCode),
    /// A region of the node could not be mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A region of the node is invalid.
    #[error(transparent)]
    Attach(#[from] AttachError),
}

impl ShmError {
    /// Returns a function that converts the error of a system call; `what` is the attempted operation.
    pub fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> ShmError {
        move |source| ShmError::System { what, source: source.into() }
    }
}
