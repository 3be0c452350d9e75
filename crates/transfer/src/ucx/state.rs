//! State of the progress thread: endpoints, keys, registrations, and pending reports of UCX.
//!
//! Data only; the transitions are in `progress`, which has the state diagram.

use moontide_rt::time::Instant;

use super::error::UcxError;
use super::handle::{Done, Endpoint, Reply};
use super::sys;

pub(super) enum State {
    Open,
    Closing { reason: UcxError, since: Instant },
    Closed { reason: UcxError },
}

pub(super) struct EndpointState {
    pub(super) raw: *mut sys::Ep,
    pub(super) state: State,
    /// Entries of `Engine::pending` that belong to this endpoint.
    pub(super) in_flight: usize,
    pub(super) flushes: usize,
    /// Puts that no flush covers yet.
    pub(super) unflushed: Vec<u64>,
    /// No handle exists (or none ever did): the endpoint is removed once it is closed.
    pub(super) dropped: bool,
    /// UCX kept a buffer of this endpoint; every later `abort` must return [`UcxError::Stuck`].
    pub(super) keeps_buffers: bool,
    /// Replies to callers of `abort`.
    pub(super) waiting: Vec<Reply<()>>,
}

pub(super) struct Key {
    pub(super) raw: *mut sys::Rkey,
    pub(super) users: usize,
    pub(super) dropped: bool,
}

pub(super) struct Region {
    pub(super) raw: *mut sys::Mem,
    pub(super) base: usize,
    pub(super) len: usize,
    pub(super) users: usize,
    /// The registration was dropped; the reply is sent when the memory is unmapped.
    pub(super) dropped: Option<Option<Reply<()>>>,
}

/// An event that UCX will report.
pub(super) enum Pending {
    Transfer(InFlight),
    Flush { endpoint: u64, covers: Vec<u64> },
    Connect { endpoint: u64, owner: u64, deadline: Instant, reply: Reply<Endpoint> },
}

pub(super) struct InFlight {
    pub(super) endpoint: u64,
    pub(super) key: u64,
    pub(super) region: Option<u64>,
    pub(super) deadline: Instant,
    /// Outstanding reports: the operation's own, and for a put that of a flush.
    pub(super) reports: u8,
    /// The operation's own report is outstanding, so UCX may still access the local buffer. A flush does not access it.
    pub(super) holds_buffer: bool,
    pub(super) error: Option<UcxError>,
    pub(super) done: Done,
}
