//! The door: how a client of the same host gets at a node's memory.
//!
//! A Unix socket of type SEQPACKET, so that a message and its descriptors arrive together or not at all:
//!
//! ```text
//!   client                                     node
//!     │── Hello            [pidfd of itself] ──▶│  who is it? (uid of the socket's peer; pidfd is the peer's)
//!     │◀── Welcome         [board, ledger] ─────│
//!     │◀── SegmentOffer    [headers, payload] ──│  × segments
//!     │── Stream           [end of a stream] ──▶│  whenever the client wants one
//!     │◀── SegmentOffer    [headers, payload] ──│  whenever there is a new segment
//! ```
//!
//! The pidfd is how the node learns of the client's death: the end of the connection proves nothing, and a
//! process number can be used again.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_types::ErrorCode;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::{Pid, PidfdFlags};

use crate::shm::ledger::{ClientLedger, LedgerError};
use crate::shm::local::{AttachError, LocalHeap};
use crate::shm::message::{Message, MessageError, Welcome};
use crate::shm::node_heap::NodeHeap;
use crate::shm::owner::Segment;
use crate::shm::region::{Protection, Region, RegionError};
use crate::shm::segment::SegmentShape;

/// Descriptors that travel with one message at most.
const DESCRIPTORS_MAX: usize = 2;

/// Clients that may wait to be let in.
const BACKLOG: i32 = 128;

/// Why a door could not be opened, or a client not be let in.
#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    /// A call to the operating system failed.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The answer.
        source: io::Error,
    },
    /// The path does not fit into a socket's address (107 bytes).
    #[error("the socket's path is too long; choose one of at most 107 bytes")]
    Path,
    /// The peer's message is not one.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The peer sent another message than is due, or not the descriptors that go with it.
    #[error("unexpected message from process {pid}")]
    Unexpected {
        /// The peer.
        pid: u32,
    },
    /// Descriptors got lost on the way: more than are due, or this process may open no more files.
    #[error("descriptors got lost; raise the limit on open files (ulimit -n)")]
    Descriptors,
    /// The peer runs as a user that is not allowed.
    #[error(
        "process {pid} of user {uid} is not allowed; run it as the node's user or add the user to the list"
    )]
    User {
        /// The peer.
        pid: u32,
        /// Its user.
        uid: u32,
    },
    /// The pidfd is not the peer's own.
    #[error("process {pid} handed over a descriptor that is not its own pidfd")]
    Pidfd {
        /// The peer.
        pid: u32,
    },
    /// The peer's process has no number here, so nothing can be said about it.
    #[error(
        "a process of user {uid} is in another pid namespace; let the containers share one with the node"
    )]
    PidNamespace {
        /// Its user.
        uid: u32,
    },
    /// No ledger could be made for it.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The node refused.
    #[error("the node refuses: {0}; {hint}", hint = .0.hint())]
    Refused(ErrorCode),
    /// What the node offered could not be mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// What the node offered is not what it should be.
    #[error(transparent)]
    Attach(#[from] AttachError),
}

pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> DoorError {
    move |source| DoorError::System { what, source: source.into() }
}

/// As [`system`], but a time-out is called one.
fn no_answer(what: &'static str) -> impl FnOnce(Errno) -> DoorError {
    move |errno| match errno {
        Errno::AGAIN => {
            system("the other side did not answer in time")(io::Error::from(io::ErrorKind::TimedOut))
        }
        _ => system(what)(errno),
    }
}

/// The node's end.
#[derive(Debug)]
pub struct Door {
    socket: OwnedFd,
    allowed_uids: Vec<u32>,
    stale_after: Duration,
    handshake_max: Duration,
}

/// A client that was let in.
#[derive(Debug)]
pub struct Visitor {
    /// The connection, for the messages that follow.
    pub socket: OwnedFd,
    /// Its ledger.
    pub ledger: Arc<ClientLedger>,
    /// Fires when its process ends. Hand it to a [`DeathWatch`](crate::DeathWatch).
    pub pidfd: OwnedFd,
    /// Its process, for messages to people.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
}

impl Door {
    /// Opens a door at `path`. Processes of this process's user may enter, and those of `more_uids`. Clients
    /// stop believing the board after `stale_after` without a beat. A socket that a node left behind is replaced; this
    /// one's file stays when the door is dropped.
    ///
    /// # Safety
    /// Whoever enters maps the payload for writing, and Rust's guarantees about the bytes under a
    /// [`NodePin`](crate::NodePin) rest on these processes keeping to the protocol: as
    /// [`LocalHeap::new`], from the other side.
    pub unsafe fn open(path: &Path, more_uids: &[u32], stale_after: Duration) -> Result<Door, DoorError> {
        let address = SocketAddrUnix::new(path).map_err(|_| DoorError::Path)?;
        let mut socket = socket()?;
        let bound = rustix::net::bind(&socket, &address);
        let is_socket = || std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
        if bound == Err(Errno::ADDRINUSE) && is_socket() && nobody_listens(&address)? {
            std::fs::remove_file(path).map_err(system("remove the socket that a node left behind"))?;
            socket = self::socket()?;
            rustix::net::bind(&socket, &address).map_err(system("bind the node's socket"))?;
        } else {
            let what = match bound {
                Err(Errno::ADDRINUSE) if !is_socket() => {
                    "bind the node's socket (something else has this name)"
                }
                Err(Errno::ADDRINUSE) => "bind the node's socket (is another node running there?)",
                _ => "bind the node's socket (does its folder exist?)",
            };
            bound.map_err(system(what))?;
        }
        rustix::net::listen(&socket, BACKLOG).map_err(system("listen on the node's socket"))?;
        let mut allowed_uids = vec![rustix::process::getuid().as_raw()];
        allowed_uids.extend_from_slice(more_uids);
        Ok(Door { socket, allowed_uids, stale_after, handshake_max: Duration::from_secs(2) })
    }

    /// Whether processes of this user may enter.
    pub(super) fn allows(&self, uid: u32) -> bool {
        self.allowed_uids.contains(&uid)
    }

    /// As [`Door::accept`], but gives up after `timeout`.
    pub fn accept_within(&self, timeout: Duration) -> Result<Option<OwnedFd>, DoorError> {
        if wait_readable(&self.socket, timeout)? { self.accept().map(Some) } else { Ok(None) }
    }

    /// Waits for a connection, for ever. The greeting is [`Door::admit`]'s, so that a slow client does not keep others
    /// waiting: call `admit` on a thread of its own.
    pub fn accept(&self) -> Result<OwnedFd, DoorError> {
        rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC).map_err(system("accept a client"))
    }

    /// Checks who is there, makes a ledger, and passes the node's regions.
    pub fn admit(&self, socket: OwnedFd, heap: &NodeHeap) -> Result<Visitor, DoorError> {
        set_timeouts(&socket, self.handshake_max)?;
        let (pid, uid) = peer_of(&socket)?;
        let refuse = |code, error| {
            // Best effort: the client may be gone.
            let _ = send(&socket, &Message::Refusal(code), &[]);
            Err(error)
        };
        // The greeting is read before anything is refused: a socket that is closed with unread data in it resets
        // the connection, and the refusal would be lost.
        let (message, mut descriptors) = receive(&socket)?;
        if !self.allows(uid) {
            return refuse(ErrorCode::PermissionDenied, DoorError::User { pid, uid });
        }
        let (Message::Hello { .. }, 1) = (&message, descriptors.len()) else {
            return refuse(ErrorCode::InvalidArgument, DoorError::Unexpected { pid });
        };
        if pid == 0 {
            return refuse(ErrorCode::PermissionDenied, DoorError::PidNamespace { uid });
        }
        let pidfd = descriptors.remove(0);
        if pid_behind(pidfd.as_fd()) != Some(pid) {
            return refuse(ErrorCode::PermissionDenied, DoorError::Pidfd { pid });
        }
        let ledger = match heap.admit(pid) {
            Ok(ledger) => ledger,
            Err(error) => return refuse(ErrorCode::Busy, error.into()),
        };
        let segments = heap.segments();
        let offered = self
            .offer(&socket, heap, &ledger, &segments)
            .and_then(|()| set_timeouts(&socket, Duration::ZERO));
        if let Err(error) = offered {
            // The client has not joined, and nobody will watch it.
            heap.ledgers().forget(ledger.client());
            return Err(error);
        }
        Ok(Visitor { socket, ledger, pidfd, pid, uid })
    }

    fn offer(
        &self,
        socket: &OwnedFd,
        heap: &NodeHeap,
        ledger: &ClientLedger,
        segments: &[Arc<Segment>],
    ) -> Result<(), DoorError> {
        let board = heap.board().region();
        let welcome = Message::Welcome(Welcome {
            client: ledger.client(),
            board_len: board.len(),
            ledger_len: ledger.region().len(),
            stale_after_ms: self.stale_after.as_millis() as u64,
            segments: segments.len() as u32,
        });
        // SAFETY: to a client, which the caller of `open` vouches for.
        let descriptors = unsafe { [board.fd(), ledger.region().fd()] };
        send(socket, &welcome, &descriptors)?;
        // SAFETY: a client that is being let in.
        segments.iter().try_for_each(|segment| unsafe { offer_segment(socket.as_fd(), segment) })
    }
}

/// What a client that is in has to say.
#[derive(Debug)]
pub enum Said {
    /// It opens a stream.
    Stream(OwnedFd),
    /// Nothing for now.
    Nothing,
    /// It has closed the connection. That does not mean that it has ended.
    Closed,
}

impl Visitor {
    /// Listens for `timeout`.
    pub fn listen(&self, timeout: Duration) -> Result<Said, DoorError> {
        if !wait_readable(&self.socket, timeout)? {
            return Ok(Said::Nothing);
        }
        match receive(&self.socket) {
            Ok((Message::Stream, mut descriptors)) if descriptors.len() == 1 => {
                Ok(Said::Stream(descriptors.remove(0)))
            }
            Ok(_) => Err(DoorError::Unexpected { pid: self.pid }),
            Err(DoorError::System { source, .. }) if source.kind() == io::ErrorKind::UnexpectedEof => {
                Ok(Said::Closed)
            }
            Err(error) => Err(error),
        }
    }
}

/// Opens a stream from a client that has joined to its node, over the socket that [`join`] returned. The node knows
/// that this client speaks on it.
pub fn open_stream(socket: BorrowedFd<'_>) -> Result<OwnedFd, DoorError> {
    let (here, there) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(system("make a pair of sockets"))?;
    send(socket, &Message::Stream, &[there.as_fd()])?;
    Ok(here)
}

/// Whether there is something to receive within `timeout`.
pub(super) fn wait_readable(socket: &OwnedFd, timeout: Duration) -> Result<bool, DoorError> {
    let mut knock = [PollFd::new(socket, PollFlags::IN)];
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    match rustix::event::poll(&mut knock, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(system("wait on the node's socket")(errno)),
    }
}

/// Passes a segment to a client that is already in. A second offer of the same one does no harm, so whoever adds
/// segments while clients come in offers them all again once a client is on its list.
///
/// # Safety
/// The socket is a client's, which was let in by [`Door::admit`].
pub unsafe fn offer_segment(socket: BorrowedFd<'_>, segment: &Segment) -> Result<(), DoorError> {
    let message = Message::SegmentOffer(segment.shape(), segment.payload().offset());
    // SAFETY: to a client, says the caller.
    let descriptors = unsafe { [segment.headers().fd(), segment.payload().fd()] };
    send(socket, &message, &descriptors)
}

/// Enters a node's door: the node's memory, and the connection for what follows. `timeout` bounds the greeting;
/// `pinned_bytes_max` is [`LocalHeap::new`]'s. Waits until the node admits, so a process that joins itself needs a
/// second thread. The ledger lasts until this process ends, even when the heap is dropped; hence a process can join
/// [`JOINS_PER_PROCESS_MAX`](crate::JOINS_PER_PROCESS_MAX) times.
///
/// # Safety
/// As [`LocalHeap::new`]: the node and its clients are trusted to keep to the protocol.
pub unsafe fn join(
    path: &Path,
    timeout: Duration,
    pinned_bytes_max: u64,
) -> Result<(LocalHeap, OwnedFd), DoorError> {
    let address = SocketAddrUnix::new(path).map_err(|_| DoorError::Path)?;
    let started = Instant::now();
    let socket = socket()?;
    set_timeouts(&socket, timeout.max(Duration::from_millis(1)))?;
    retry_on_intr(|| rustix::net::connect(&socket, &address))
        .map_err(system("connect to the node's socket (is it running?)"))?;
    let me = rustix::process::getpid();
    let pidfd = rustix::process::pidfd_open(me, PidfdFlags::empty()).map_err(system("pidfd_open"))?;
    send(&socket, &Message::Hello { pid: me.as_raw_nonzero().get() as u32 }, &[pidfd.as_fd()])?;

    let (message, descriptors) = receive(&socket)?;
    let pid = me.as_raw_nonzero().get() as u32;
    let welcome = match message {
        Message::Welcome(welcome) => welcome,
        Message::Refusal(code) => return Err(DoorError::Refused(code)),
        _ => return Err(DoorError::Unexpected { pid }),
    };
    let [board, ledger] = two(descriptors, pid)?;
    let board = Region::import(board, welcome.board_len, Protection::OwnerWrites)?;
    let ledger = Region::import(ledger, welcome.ledger_len, Protection::AllWrite)?;
    let stale_after = Duration::from_millis(welcome.stale_after_ms);
    // SAFETY: the caller vouches for node and clients.
    let heap = unsafe { LocalHeap::new(welcome.client, board, ledger, stale_after, pinned_bytes_max) }?;
    for _ in 0..welcome.segments {
        if started.elapsed() > timeout {
            let late = io::Error::from(io::ErrorKind::TimedOut);
            return Err(DoorError::System { what: "the node offers its segments too slowly", source: late });
        }
        match receive(&socket)? {
            (Message::SegmentOffer(shape, payload_at), descriptors) => {
                attach(&heap, shape, payload_at, descriptors)?;
            }
            _ => return Err(DoorError::Unexpected { pid }),
        }
    }
    set_timeouts(&socket, Duration::ZERO)?;
    Ok((heap, socket))
}

fn attach(
    heap: &LocalHeap,
    shape: SegmentShape,
    payload_at: u64,
    descriptors: Vec<OwnedFd>,
) -> Result<(), DoorError> {
    shape.check().map_err(AttachError::from)?;
    let [headers, payload] = two(descriptors, std::process::id())?;
    let headers = Region::import(headers, shape.header_bytes(), Protection::OwnerWrites)?;
    let payload = Region::import_part(&payload, (payload_at, shape.payload_bytes()), Protection::AllWrite)?;
    match heap.attach(shape, headers, payload) {
        // What does not fit is not read in place, but through the network.
        Err(AttachError::TooMany(_)) => Ok(()),
        attached => Ok(attached?),
    }
}

fn two(descriptors: Vec<OwnedFd>, pid: u32) -> Result<[OwnedFd; 2], DoorError> {
    descriptors.try_into().map_err(|_| DoorError::Unexpected { pid })
}

pub(super) fn socket() -> Result<OwnedFd, DoorError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(system("make a Unix socket"))
}

/// Whether the socket at this address belongs to a process that is gone.
fn nobody_listens(address: &SocketAddrUnix) -> Result<bool, DoorError> {
    Ok(rustix::net::connect(socket()?, address) == Err(Errno::CONNREFUSED))
}

/// Bounds every wait on the socket; zero takes the bound away. With a bound, Linux ends the wait with EINTR when
/// the process was stopped and goes on, even without a handler (signal(7)): hence `retry_on_intr` below.
pub(super) fn set_timeouts(socket: &OwnedFd, timeout: Duration) -> Result<(), DoorError> {
    let timeout = (!timeout.is_zero()).then_some(timeout);
    for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(socket, direction, timeout).map_err(system("set a time-out"))?;
    }
    Ok(())
}

pub(super) fn send(
    socket: impl AsFd,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), DoorError> {
    let bytes = message.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(fits, "at most {DESCRIPTORS_MAX} descriptors");
    }
    retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)
    })
    .map_err(no_answer("send on the node's socket"))?;
    Ok(())
}

/// One message with its descriptors. Descriptors of a message that is refused are closed.
pub(super) fn receive(socket: impl AsFd) -> Result<(Message, Vec<OwnedFd>), DoorError> {
    let mut bytes = [0; Message::BYTES + 1]; // one more, to notice what is too long
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let mut into = [IoSliceMut::new(&mut bytes)];
        rustix::net::recvmsg(&socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })
    .map_err(no_answer("receive on the node's socket"))?;
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(DoorError::Descriptors);
    }
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes == 0 {
        let closed = io::Error::from(io::ErrorKind::UnexpectedEof);
        return Err(DoorError::System { what: "the peer closed the node's socket", source: closed });
    }
    Ok((Message::decode(&bytes[..received.bytes])?, descriptors))
}

/// Process and user at the other end; process 0 if it is in a pid namespace that this process cannot see into.
///
/// Not by rustix, whose type for a process number has no room for that 0.
pub(super) fn peer_of(socket: &OwnedFd) -> Result<(u32, u32), DoorError> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` and `len` describe memory of this function, and every bit pattern is a ucred.
    let result = unsafe {
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut peer).cast(), &mut len)
    };
    if result != 0 {
        return Err(system("ask for the peer's credentials")(io::Error::last_os_error()));
    }
    Ok((peer.pid as u32, peer.uid))
}

/// The process that a pidfd stands for; `None` if it is no pidfd or the process is gone.
pub(super) fn pid_behind(pidfd: BorrowedFd<'_>) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let field = |name| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    // PIDFD_THREAD, which is O_EXCL: it would fire at the end of one thread, while others still read.
    let flags = u32::from_str_radix(field("flags:")?, 8).ok()?;
    if flags & libc::O_EXCL as u32 != 0 {
        return None;
    }
    let pid = field("Pid:")?;
    pid.parse().ok().filter(|&pid: &u32| Pid::from_raw(pid as i32).is_some())
}
