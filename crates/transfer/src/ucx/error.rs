//! What can go wrong with UCX: the reason why it is absent, a status that UCX gave, and the error of one operation.
//!
//! Invariant: errors carry facts and are cheap to clone, since one lost peer fails many operations at once.

use std::fmt;
use std::path::PathBuf;

use super::envelope::EnvelopeError;
use super::sys::RawStatus;

/// A version of UCX, `major.minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UcxVersion {
    /// One, so far.
    pub major: u16,
    /// Orders releases; patch releases do not change what we rely on.
    pub minor: u16,
}

impl fmt::Display for UcxVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why this process cannot use UCX. One line: what was found, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UcxAbsent {
    /// The loader found nothing that it could load.
    #[error("UCX is not available: cannot load {} ({reason}); install UCX {need} or newer, or point {env} at its \
             libucp.so.0", path.display(), env = super::library::ENV)]
    NotLoaded {
        /// The name or path that was tried last.
        path: PathBuf,
        /// The dynamic loader's words.
        reason: String,
        /// The oldest version that will do.
        need: UcxVersion,
    },
    /// The library lacks a function that we call.
    #[error("UCX is not available: {} has no {symbol}; install UCX {need} or newer, or point {env} at its \
             libucp.so.0", path.display(), env = super::library::ENV)]
    NoSymbol {
        /// Where the library was loaded from.
        path: PathBuf,
        /// The first function that was not found.
        symbol: &'static str,
        /// The oldest version that will do.
        need: UcxVersion,
    },
    /// The library works but is older than what we rely on.
    #[error("UCX {found} is too old; install UCX {need} or newer, or point {env} at its libucp.so.0",
            env = super::library::ENV)]
    TooOld {
        /// What was loaded.
        found: UcxVersion,
        /// The oldest version that will do.
        need: UcxVersion,
    },
    /// Another UCX was loaded before, and two of them in one process mix up their shared parts.
    #[error("UCX was already loaded from {}, so {} was refused; name one library for the whole process",
            loaded.display(), refused.display())]
    AnotherLoaded {
        /// The library in use.
        loaded: PathBuf,
        /// The one asked for now.
        refused: PathBuf,
    },
}

/// A failure code of UCX (`ucs_status_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(RawStatus);

impl Status {
    pub(super) fn new(raw: RawStatus) -> Self {
        Self(raw)
    }

    /// The number as UCX gave it.
    pub fn code(self) -> i8 {
        self.0
    }

    /// Whether the failure is one of our side or of the request, so that the peer may well be alive.
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

/// The transports that an endpoint runs over, as UCX names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transports(Vec<String>);

impl Transports {
    pub(super) fn new(mut names: Vec<String>) -> Self {
        names.sort();
        names.dedup();
        Self(names)
    }

    /// The names, sorted, each once.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// Whether every lane is plain TCP, over which UCX only emulates get and put.
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

/// The failure of one call or one operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UcxError {
    /// There is no usable UCX in this process.
    #[error(transparent)]
    Absent(#[from] UcxAbsent),
    /// A call into UCX failed.
    #[error("{call} failed: {status}")]
    Call {
        /// The function of UCX.
        call: &'static str,
        /// What it returned.
        status: Status,
    },
    /// A call into the kernel failed.
    #[error("{call} failed: {errno}")]
    Os {
        /// The system call.
        call: &'static str,
        /// What it returned.
        errno: rustix::io::Errno,
    },
    /// A configuration value holds a zero byte, which C cannot express.
    #[error("the value of UCX option {option} contains a zero byte")]
    ZeroByte {
        /// The option.
        option: &'static str,
    },
    /// An address or a key that did not come from a [`UcxWorker`](super::UcxWorker), or was damaged on its way.
    #[error(transparent)]
    Envelope(#[from] EnvelopeError),
    /// The key was made by another process (or an earlier life of it) than the endpoint leads to.
    #[error("key of owner {key:016x} does not fit an endpoint to owner {endpoint:016x}")]
    WrongOwner {
        /// Whom the endpoint leads to.
        endpoint: u64,
        /// Who made the key.
        key: u64,
    },
    /// The key was imported through another endpoint.
    #[error("the remote key was imported through another endpoint")]
    WrongEndpoint,
    /// The remote range is not inside what the owner registered. Nothing was sent.
    #[error("remote range {address:#x}+{len} is outside of the registered {base:#x}+{range}")]
    OutOfRange {
        /// First byte asked for.
        address: u64,
        /// Bytes asked for.
        len: u64,
        /// First registered byte.
        base: u64,
        /// Registered bytes.
        range: u64,
    },
    /// Every lane of the endpoint is TCP, which our own transport does better and more safely.
    #[error("endpoint refused: UCX would run over {transports} only")]
    OnlyTcp {
        /// What UCX chose.
        transports: Transports,
    },
    /// This UCX cannot tell over which transports an endpoint runs.
    #[error("endpoint refused: UCX {found} cannot name its transports")]
    TransportsUnknown {
        /// What was loaded.
        found: UcxVersion,
    },
    /// Too many operations wait on this worker; nothing was sent.
    #[error("{limit} operations are in flight already")]
    QueueFull {
        /// [`INFLIGHT_MAX`](super::INFLIGHT_MAX).
        limit: usize,
    },
    /// The peer died or became unreachable; its endpoint is closed.
    #[error("peer lost: {status}")]
    PeerLost {
        /// What UCX saw.
        status: Status,
    },
    /// An operation of this endpoint had no answer in time, so the endpoint was closed by force.
    #[error("deadline exceeded; the endpoint was closed")]
    DeadlineExceeded,
    /// The endpoint was closed by `abort`, or its last handle was dropped.
    #[error("the endpoint was aborted")]
    Aborted,
    /// The worker has stopped.
    #[error("the UCX worker has stopped")]
    WorkerStopped,
    /// A blocking call was made from a completion, which would wait for itself.
    #[error("{call} was called from a completion; it would wait for itself")]
    OnProgressThread {
        /// The call of ours.
        call: &'static str,
    },
    /// UCX did not give an operation back after its endpoint was closed. The local buffer may still be read or
    /// written: leak it. The worker leaks its context as well.
    #[error("UCX holds on to a buffer after its endpoint was closed; the buffer must not be used again")]
    Stuck,
}

impl UcxError {
    /// Whether the same request may succeed later, or against another replica.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::QueueFull { .. } | Self::PeerLost { .. } | Self::DeadlineExceeded)
    }

    /// Whether the local buffer is ours again. False only for [`UcxError::Stuck`].
    pub fn returns_buffer(&self) -> bool {
        !matches!(self, Self::Stuck)
    }
}
