//! [`ShmListener`]: gives clients of the same host access to a node's memory.
//!
//! A Unix socket of type SEQPACKET, so that a message and its descriptors arrive together or not at all:
//!
//! ```text
//!   client                                     node
//!     │── Hello      [pidfd of itself] ────────▶│  checks: uid of the socket's peer; pidfd is the peer's
//!     │◀── Accepted  [index region, ledger] ────│
//!     │◀── Segment   [headers, payload] ────────│  × segments
//!     │── Stream     [end of a stream] ────────▶│  at any later time
//!     │◀── Segment   [headers, payload] ────────│  for every later segment
//! ```
//!
//! The node detects the client's exit by the pidfd: the end of the connection proves nothing, and a process id can be
//! reused.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_types::ErrorCode;
use rustix::fs::Mode;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::PidfdFlags;

use crate::shm::error::ShmError;
use crate::shm::ledger::ClientLedger;
use crate::shm::local::{AttachError, LocalHeap};
use crate::shm::message::{Accepted, ShmMessage};
use crate::shm::node_heap::NodeHeap;
use crate::shm::owner::Segment;
use crate::shm::region::{Protection, Region};
use crate::shm::segment::SegmentDescriptor;
use crate::shm::socket::{self, peer_of, pid_of_pidfd, receive, send, set_timeouts, wait_readable};

/// Maximum number of clients that wait for `accept`.
const BACKLOG: i32 = 128;

/// Listener of a node for shm clients.
#[derive(Debug)]
pub struct ShmListener {
    socket: OwnedFd,
    allowed_uids: Vec<u32>,
    stale_after: Duration,
    handshake_max: Duration,
}

/// A connected client.
#[derive(Debug)]
pub struct ShmClient {
    /// Connection for the messages that follow.
    pub socket: OwnedFd,
    /// Ledger of the client.
    pub ledger: Arc<ClientLedger>,
    /// Becomes readable when the process exits. Pass it to an [`ExitMonitor`](crate::ExitMonitor).
    pub pidfd: OwnedFd,
    /// Process id, for log messages.
    pub pid: u32,
    /// User id of the process.
    pub uid: u32,
}

impl ShmListener {
    /// Binds a listener at `path`. Processes of this process's user may connect, and those of `more_uids`. Clients
    /// stop using the index `stale_after` after the last heartbeat. Replaces the socket of a node that has exited.
    /// The file of the new socket has mode 0600, whatever the umask, and remains when the listener is dropped.
    ///
    /// # Safety
    /// A process that connects maps the payload writable, and Rust's guarantees about the bytes under a
    /// [`NodePin`](crate::NodePin) depend on these processes following the protocol: the counterpart of
    /// [`LocalHeap::new`].
    pub unsafe fn bind(
        path: &Path,
        more_uids: &[u32],
        stale_after: Duration,
    ) -> Result<ShmListener, ShmError> {
        let address = SocketAddrUnix::new(path).map_err(|_| ShmError::Path)?;
        let mut socket = open_private()?;
        let bound = rustix::net::bind(&socket, &address);
        let is_socket = || std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
        if bound == Err(Errno::ADDRINUSE) && is_socket() && is_stale_socket(&address)? {
            std::fs::remove_file(path)
                .map_err(ShmError::system("remove the stale socket of another node"))?;
            socket = open_private()?;
            rustix::net::bind(&socket, &address).map_err(ShmError::system("bind the node's socket"))?;
        } else {
            let what = match bound {
                Err(Errno::ADDRINUSE) if !is_socket() => {
                    "bind the node's socket (the path exists and is not a socket)"
                }
                Err(Errno::ADDRINUSE) => "bind the node's socket (is another node using it?)",
                _ => "bind the node's socket (does its directory exist?)",
            };
            bound.map_err(ShmError::system(what))?;
        }
        rustix::net::listen(&socket, BACKLOG).map_err(ShmError::system("listen on the node's socket"))?;
        let mut allowed_uids = vec![rustix::process::getuid().as_raw()];
        allowed_uids.extend_from_slice(more_uids);
        Ok(ShmListener { socket, allowed_uids, stale_after, handshake_max: Duration::from_secs(2) })
    }

    /// Returns whether processes of this user may connect.
    pub fn allows(&self, uid: u32) -> bool {
        self.allowed_uids.contains(&uid)
    }

    /// As [`ShmListener::accept`], but returns `None` after `timeout`.
    pub fn accept_timeout(&self, timeout: Duration) -> Result<Option<OwnedFd>, ShmError> {
        if wait_readable(&self.socket, timeout)? { self.accept().map(Some) } else { Ok(None) }
    }

    /// Waits for a connection without a timeout. [`ShmListener::handshake`] is separate, so that a slow client does
    /// not delay others: call it on a thread of its own.
    pub fn accept(&self) -> Result<OwnedFd, ShmError> {
        rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC)
            .map_err(ShmError::system("accept a client"))
    }

    /// Checks the peer, creates a ledger, and sends the node's regions.
    pub fn handshake(&self, socket: OwnedFd, heap: &NodeHeap) -> Result<ShmClient, ShmError> {
        set_timeouts(&socket, self.handshake_max)?;
        let (pid, uid) = peer_of(&socket)?;
        let reject = |code, error| {
            // Best effort: the client may have exited.
            let _ = send(&socket, ShmMessage::Rejected(code), &[]);
            Err(error)
        };
        // The first message is received before anything is rejected: closing a socket with unread data resets the
        // connection, and the rejection would be lost.
        let (message, mut descriptors) = match receive(&socket) {
            Err(error @ ShmError::Message(_)) => return reject(ErrorCode::InvalidArgument, error),
            received => received?,
        };
        if !self.allows(uid) {
            return reject(ErrorCode::PermissionDenied, ShmError::User { pid, uid });
        }
        let (ShmMessage::Hello { .. }, 1) = (&message, descriptors.len()) else {
            return reject(ErrorCode::InvalidArgument, ShmError::Unexpected { pid });
        };
        if pid == 0 {
            return reject(ErrorCode::PermissionDenied, ShmError::PidNamespace { uid });
        }
        let pidfd = descriptors.remove(0);
        if pid_of_pidfd(pidfd.as_fd()) != Some(pid) {
            return reject(ErrorCode::PermissionDenied, ShmError::Pidfd { pid });
        }
        let ledger = match heap.admit(pid) {
            Ok(ledger) => ledger,
            Err(error) => return reject(ErrorCode::Busy, error.into()),
        };
        let segments = heap.segments();
        let sent = self
            .send_regions(&socket, heap, &ledger, &segments)
            .and_then(|()| set_timeouts(&socket, Duration::ZERO));
        if let Err(error) = sent {
            // The client is not connected, and no exit monitor will watch it.
            heap.ledgers().forget(ledger.client());
            return Err(error);
        }
        Ok(ShmClient { socket, ledger, pidfd, pid, uid })
    }

    fn send_regions(
        &self,
        socket: &OwnedFd,
        heap: &NodeHeap,
        ledger: &ClientLedger,
        segments: &[Arc<Segment>],
    ) -> Result<(), ShmError> {
        let index_region = heap.index_region().region();
        let accepted = ShmMessage::Accepted(Accepted {
            client: ledger.client(),
            board_len: index_region.len(),
            ledger_len: ledger.region().len(),
            stale_after_ms: self.stale_after.as_millis() as u64,
            segments: segments.len() as u32,
        });
        // SAFETY: sent to a client, for which the caller of `bind` vouches.
        let descriptors = unsafe { [index_region.fd(), ledger.region().fd()] };
        send(socket, accepted, &descriptors)?;
        // SAFETY: a client that is being connected.
        segments.iter().try_for_each(|segment| unsafe { send_segment(socket.as_fd(), segment) })
    }
}

/// Event on the connection of a client.
#[derive(Debug)]
pub enum ClientEvent {
    /// The client opens a stream.
    Stream(OwnedFd),
    /// No message within the timeout.
    Idle,
    /// The client has closed the connection. Its process may still be running.
    Closed,
}

impl ShmClient {
    /// Waits for an event for at most `timeout`.
    pub fn poll(&self, timeout: Duration) -> Result<ClientEvent, ShmError> {
        if !wait_readable(&self.socket, timeout)? {
            return Ok(ClientEvent::Idle);
        }
        match receive(&self.socket) {
            Ok((ShmMessage::Stream, mut descriptors)) if descriptors.len() == 1 => {
                Ok(ClientEvent::Stream(descriptors.remove(0)))
            }
            Ok(_) => Err(ShmError::Unexpected { pid: self.pid }),
            Err(ShmError::System { source, .. }) if source.kind() == io::ErrorKind::UnexpectedEof => {
                Ok(ClientEvent::Closed)
            }
            Err(error) => Err(error),
        }
    }
}

/// Opens a stream from a connected client to its node, over the socket that [`connect`] returned. The node knows
/// which client uses it.
pub fn open_stream(socket: BorrowedFd<'_>) -> Result<OwnedFd, ShmError> {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(ShmError::system("create a socket pair"))?;
    send(socket, ShmMessage::Stream, &[theirs.as_fd()])?;
    Ok(ours)
}

/// Sends a segment to a connected client. The client ignores a segment that it has, so a node that adds segments
/// while clients connect sends all of them again after it has listed the client.
///
/// # Safety
/// The socket belongs to a client that was connected by [`ShmListener::handshake`].
pub unsafe fn send_segment(socket: BorrowedFd<'_>, segment: &Segment) -> Result<(), ShmError> {
    let message = ShmMessage::Segment(segment.shape(), segment.payload().offset());
    // SAFETY: sent to a client, as the caller guarantees.
    let descriptors = unsafe { [segment.headers().fd(), segment.payload().fd()] };
    send(socket, message, &descriptors)
}

/// Connects to a node of this process's user, or of root, and returns its memory and the connection for the messages that
/// follow. `timeout` bounds the
/// handshake; `pinned_bytes_max` is that of [`LocalHeap::new`]. Waits for the node's handshake, so a process that
/// connects to itself needs a second thread. The ledger exists until this process exits, even if the heap is dropped;
/// hence a process can connect [`LEDGERS_PER_PROCESS_MAX`](crate::LEDGERS_PER_PROCESS_MAX) times.
///
/// # Safety
/// As [`LocalHeap::new`]: the node and its clients are trusted to follow the protocol.
pub unsafe fn connect(
    path: &Path,
    timeout: Duration,
    pinned_bytes_max: u64,
) -> Result<(LocalHeap, OwnedFd), ShmError> {
    let address = SocketAddrUnix::new(path).map_err(|_| ShmError::Path)?;
    let started = Instant::now();
    let socket = socket::open()?;
    set_timeouts(&socket, timeout.max(Duration::from_millis(1)))?;
    retry_on_intr(|| rustix::net::connect(&socket, &address))
        .map_err(ShmError::system("connect to the node's socket (is it running?)"))?;
    // Another user who listens at this path would receive this process's objects, and could return others.
    let (pid, uid) = peer_of(&socket)?;
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Err(ShmError::NodeUser { pid, uid });
    }
    let me = rustix::process::getpid();
    let pidfd =
        rustix::process::pidfd_open(me, PidfdFlags::empty()).map_err(ShmError::system("pidfd_open"))?;
    send(&socket, ShmMessage::Hello { pid: me.as_raw_nonzero().get() as u32 }, &[pidfd.as_fd()])?;

    let (message, descriptors) = receive(&socket)?;
    let pid = me.as_raw_nonzero().get() as u32;
    let accepted = match message {
        ShmMessage::Accepted(accepted) => accepted,
        ShmMessage::Rejected(code) => return Err(ShmError::Refused(code)),
        _ => return Err(ShmError::Unexpected { pid }),
    };
    let [index_region, ledger] = two(descriptors, pid)?;
    let index_region = Region::import(index_region, accepted.board_len, Protection::OwnerWrites)?;
    let ledger = Region::import(ledger, accepted.ledger_len, Protection::AllWrite)?;
    let stale_after = Duration::from_millis(accepted.stale_after_ms);
    // SAFETY: the caller vouches for node and clients.
    let heap =
        unsafe { LocalHeap::new(accepted.client, index_region, ledger, stale_after, pinned_bytes_max) }?;
    for _ in 0..accepted.segments {
        if started.elapsed() > timeout {
            let late = io::Error::from(io::ErrorKind::TimedOut);
            return Err(ShmError::System { what: "timed out receiving the node's segments", source: late });
        }
        match receive(&socket)? {
            (ShmMessage::Segment(shape, payload_at), descriptors) => {
                attach(&heap, shape, payload_at, descriptors)?;
            }
            _ => return Err(ShmError::Unexpected { pid }),
        }
    }
    set_timeouts(&socket, Duration::ZERO)?;
    Ok((heap, socket))
}

fn attach(
    heap: &LocalHeap,
    shape: SegmentDescriptor,
    payload_at: u64,
    descriptors: Vec<OwnedFd>,
) -> Result<(), ShmError> {
    shape.check().map_err(AttachError::from)?;
    let [headers, payload] = two(descriptors, std::process::id())?;
    let headers = Region::import(headers, shape.header_bytes(), Protection::OwnerWrites)?;
    let payload = Region::import_range(&payload, (payload_at, shape.payload_bytes()), Protection::AllWrite)?;
    match heap.attach(shape, headers, payload) {
        // Segments beyond the limit are read through the network instead.
        Err(AttachError::TooMany(_)) => Ok(()),
        attached => Ok(attached?),
    }
}

fn two(descriptors: Vec<OwnedFd>, pid: u32) -> Result<[OwnedFd; 2], ShmError> {
    descriptors.try_into().map_err(|_| ShmError::Unexpected { pid })
}

/// Creates a socket whose file only this user may connect to: the mode of the socket becomes that of the file.
fn open_private() -> Result<OwnedFd, ShmError> {
    let socket = socket::open()?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)
        .map_err(ShmError::system("set the mode of a socket"))?;
    Ok(socket)
}

/// Returns whether the process of the socket at this address has exited.
fn is_stale_socket(address: &SocketAddrUnix) -> Result<bool, ShmError> {
    Ok(rustix::net::connect(socket::open()?, address) == Err(Errno::CONNREFUSED))
}
