//! Errors of UCX: the reason why it is unavailable, a status returned by UCX, and the error of one operation.
//!
//! Invariant: errors carry facts and are cheap to clone, since one lost peer fails many operations at once.

use std::fmt;
use std::path::PathBuf;

use super::envelope::EnvelopeError;
use super::sys::RawStatus;
use super::version::UcxVersion;

/// Environment variable with the path of the libucp to load when the configuration has none.
pub const ENV: &str = "MOONTIDE_UCX_LIB";

/// Reason why this process cannot use UCX, and the remedy, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UcxUnavailable {
    /// The dynamic loader could not load the library.
    #[error("UCX is not available: cannot load {} ({reason}); install UCX {need} or newer, or point {env} at its \
             libucp.so.0", path.display(), env = ENV)]
    NotLoaded {
        /// Name or path that was tried last.
        path: PathBuf,
        /// Message of the dynamic loader.
        reason: String,
        /// Oldest usable version.
        need: UcxVersion,
    },
    /// The library lacks a function that this crate calls.
    #[error("UCX is not available: {} has no {symbol}; install UCX {need} or newer, or point {env} at its \
             libucp.so.0", path.display(), env = ENV)]
    NoSymbol {
        /// Path from which the library was loaded.
        path: PathBuf,
        /// First function that was not found.
        symbol: &'static str,
        /// Oldest usable version.
        need: UcxVersion,
    },
    /// The library works but is too old.
    #[error("UCX {found} is too old; install UCX {need} or newer, or point {env} at its libucp.so.0",
            env = ENV)]
    TooOld {
        /// Version of the loaded library.
        found: UcxVersion,
        /// Oldest usable version.
        need: UcxVersion,
    },
    /// Another UCX was loaded before. Two of them in one process would mix their shared libraries.
    #[error("UCX was already loaded from {}, so {} was refused; name one library for the whole process",
            loaded.display(), refused.display())]
    AnotherLoaded {
        /// Library in use.
        loaded: PathBuf,
        /// Library requested now.
        refused: PathBuf,
    },
}

/// Failure code of UCX (`ucs_status_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(RawStatus);

impl Status {
    pub(super) fn new(raw: RawStatus) -> Self {
        Self(raw)
    }

    /// Returns the code as UCX returned it.
    pub fn code(self) -> i8 {
        self.0
    }

    /// Returns whether the failure is local or caused by the request, so that the peer may be alive.
    pub(super) fn is_local(self) -> bool {
        // No memory, invalid parameter, not implemented, truncated, too small, exceeds limit, unsupported.
        matches!(self.0, -2 | -4 | -5 | -8 | -9 | -11 | -21 | -22)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = match self.0 {
            -1 => "no message",
            -2 => "no resource",
            -3 => "input/output error",
            -4 => "out of memory",
            -5 => "invalid parameter",
            -6 => "destination unreachable",
            -7 => "invalid address",
            -8 => "not implemented",
            -9 => "truncated",
            -10 => "no progress",
            -11 => "buffer too small",
            -12 => "no such element",
            -13 => "some connections failed",
            -14 => "no such device",
            -15 => "busy",
            -16 => "cancelled",
            -17 => "shared memory segment failed",
            -18 => "already exists",
            -19 => "out of range",
            -20 => "timed out",
            -21 => "exceeds a limit",
            -22 => "unsupported",
            -23 => "rejected",
            -24 => "not connected",
            -25 => "connection reset by peer",
            -80 => "endpoint timed out",
            -59..=-40 => "link failure",
            -89..=-60 => "endpoint failure",
            _ => "unknown status",
        };
        write!(f, "{meaning} ({})", self.0)
    }
}

/// Transports of an endpoint, by their UCX names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transports(Vec<String>);

impl Transports {
    pub(super) fn new(mut names: Vec<String>) -> Self {
        names.sort();
        names.dedup();
        Self(names)
    }

    /// Returns the names, sorted and without duplicates.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// Returns whether every lane is plain TCP, over which UCX only emulates get and put.
    pub fn is_only_tcp(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|name| name == "tcp")
    }
}

impl fmt::Display for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("unknown");
        }
        f.write_str(&self.0.join(","))
    }
}

/// Error of one call or one operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UcxError {
    /// No usable UCX is loaded in this process.
    #[error(transparent)]
    Unavailable(#[from] UcxUnavailable),
    /// A call into UCX failed.
    #[error("{call} failed: {status}")]
    Call {
        /// Name of the UCX function.
        call: &'static str,
        /// Returned status.
        status: Status,
    },
    /// A system call failed.
    #[error("{call} failed: {errno}")]
    Os {
        /// Name of the system call.
        call: &'static str,
        /// Returned error.
        errno: rustix::io::Errno,
    },
    /// A configuration value holds a zero byte, which C cannot express.
    #[error("value of UCX option {option} contains a zero byte")]
    ZeroByte {
        /// Name of the option.
        option: &'static str,
    },
    /// The address or key was not made by a [`UcxWorker`](super::UcxWorker), or was corrupted in transit.
    #[error(transparent)]
    Envelope(#[from] EnvelopeError),
    /// The key was made by another process (or an earlier incarnation of it) than the peer of the endpoint.
    #[error("key of owner {key:016x} does not fit an endpoint to owner {endpoint:016x}")]
    WrongOwner {
        /// Owner at the other end of the endpoint.
        endpoint: u64,
        /// Owner that made the key.
        key: u64,
    },
    /// The key was imported through another endpoint.
    #[error("remote key was imported through another endpoint")]
    WrongEndpoint,
    /// The remote range is not inside the registered memory of the owner. Nothing was sent.
    #[error("remote range {address:#x}+{len} is outside of the registered {base:#x}+{range}")]
    OutOfRange {
        /// Address of the first requested byte.
        address: u64,
        /// Number of requested bytes.
        len: u64,
        /// Address of the first registered byte.
        base: u64,
        /// Number of registered bytes.
        range: u64,
    },
    /// Every lane of the endpoint is TCP, for which the TCP engine of this crate is faster and safer.
    #[error("endpoint refused: UCX would run over {transports} only")]
    OnlyTcp {
        /// Transports chosen by UCX.
        transports: Transports,
    },
    /// This UCX cannot report the transports of an endpoint.
    #[error("endpoint refused: UCX {found} cannot report its transports")]
    TransportsUnknown {
        /// Version of the loaded library.
        found: UcxVersion,
    },
    /// Too many operations are in flight on this worker; nothing was sent.
    #[error("queue full: {limit} operations are in flight")]
    QueueFull {
        /// [`INFLIGHT_MAX`](super::INFLIGHT_MAX).
        limit: usize,
    },
    /// The peer exited or became unreachable; its endpoint is closed.
    #[error("peer lost: {status}")]
    PeerLost {
        /// Status reported by UCX.
        status: Status,
    },
    /// An operation of this endpoint was not complete at its deadline, so the endpoint was closed by force.
    #[error("deadline exceeded; the endpoint was closed")]
    DeadlineExceeded,
    /// The endpoint was closed by `abort`, or its last handle was dropped.
    #[error("endpoint was aborted")]
    Aborted,
    /// The worker has stopped.
    #[error("UCX worker has stopped")]
    WorkerStopped,
    /// A blocking function was called from a completion, which would deadlock.
    #[error("{call} was called from a completion, where it would deadlock")]
    OnProgressThread {
        /// Name of the blocking function.
        call: &'static str,
    },
    /// UCX did not complete an operation after its endpoint was closed. It may still read or write the local buffer, so
    /// the caller must leak the buffer. The worker leaks its context as well.
    #[error("UCX still holds a buffer after its endpoint was closed; the buffer must not be used again")]
    Stuck,
}

impl UcxError {
    /// Returns whether the same request may succeed later, or at another replica.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::QueueFull { .. } | Self::PeerLost { .. } | Self::DeadlineExceeded)
    }

    /// Returns whether UCX no longer uses the local buffer. `false` only for [`UcxError::Stuck`].
    pub fn returns_buffer(&self) -> bool {
        !matches!(self, Self::Stuck)
    }
}
