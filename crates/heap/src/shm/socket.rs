//! Unix sockets of type SEQPACKET between processes of one host: a message and its descriptors arrive together or not
//! at all.
//!
//! The listener of a node and the rendezvous of the ranks of a world use them. Each has messages of its own; their
//! common form is [`RawMessage`].

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sockopt,
};
use rustix::process::Pid;

use crate::shm::error::ShmError;
use crate::shm::raw_message::{RawMessage, ShmMessageError};

/// Maximum number of descriptors of one message.
pub const DESCRIPTORS_MAX: usize = 2;

/// Creates a socket that is not connected.
pub fn open() -> Result<OwnedFd, ShmError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(ShmError::system("create a Unix socket"))
}

/// As [`ShmError::system`], but with a separate text for a timeout.
fn system_or_timeout(what: &'static str) -> impl FnOnce(Errno) -> ShmError {
    move |errno| match errno {
        Errno::AGAIN => {
            ShmError::system("timed out waiting for the peer")(io::Error::from(io::ErrorKind::TimedOut))
        }
        _ => ShmError::system(what)(errno),
    }
}

/// Limits every wait on the socket; zero removes the limit. With a limit, Linux ends the wait with EINTR when the
/// process was stopped and continues, even without a handler (signal(7)): hence `retry_on_intr` below.
pub fn set_timeouts(socket: &OwnedFd, timeout: Duration) -> Result<(), ShmError> {
    let timeout = (!timeout.is_zero()).then_some(timeout);
    for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(socket, direction, timeout)
            .map_err(ShmError::system("set a socket timeout"))?;
    }
    Ok(())
}

/// Sends a message with at most [`DESCRIPTORS_MAX`] descriptors.
///
/// # Panics
/// If there are more.
pub fn send(
    socket: impl AsFd,
    message: impl Into<RawMessage>,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), ShmError> {
    let bytes = message.into().encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(fits, "at most {DESCRIPTORS_MAX} descriptors");
    }
    retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)
    })
    .map_err(system_or_timeout("send on the node's socket"))?;
    Ok(())
}

/// Receives one message with its descriptors. Closes the descriptors of an invalid message. A message of another
/// protocol than `M` is invalid.
pub fn receive<M>(socket: impl AsFd) -> Result<(M, Vec<OwnedFd>), ShmError>
where
    M: TryFrom<RawMessage, Error = ShmMessageError>,
{
    let mut bytes = [0; RawMessage::BYTES + 1]; // one more, to detect a message that is too long
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let mut into = [IoSliceMut::new(&mut bytes)];
        rustix::net::recvmsg(&socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })
    .map_err(system_or_timeout("receive on the node's socket"))?;
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(ShmError::Descriptors);
    }
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes == 0 {
        let closed = io::Error::from(io::ErrorKind::UnexpectedEof);
        return Err(ShmError::System { what: "peer closed the node's socket", source: closed });
    }
    Ok((RawMessage::decode(&bytes[..received.bytes])?.try_into()?, descriptors))
}

/// Returns process id and user id of the peer; process id 0 if it is in a pid namespace that this process cannot see.
///
/// Does not use rustix, whose type for a process id cannot represent 0.
pub fn peer_of(socket: &OwnedFd) -> Result<(u32, u32), ShmError> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` and `len` describe memory of this function, and every bit pattern is a ucred.
    let result = unsafe {
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut peer).cast(), &mut len)
    };
    if result != 0 {
        return Err(ShmError::system("get the peer's credentials")(io::Error::last_os_error()));
    }
    Ok((peer.pid as u32, peer.uid))
}

/// Returns the process of a pidfd; `None` if it is no pidfd or the process has exited.
pub fn pid_of_pidfd(pidfd: BorrowedFd<'_>) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let field = |name| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    // PIDFD_THREAD, which is O_EXCL: it would become readable at the end of one thread, while others still read.
    let flags = u32::from_str_radix(field("flags:")?, 8).ok()?;
    if flags & libc::O_EXCL as u32 != 0 {
        return None;
    }
    let pid = field("Pid:")?;
    pid.parse().ok().filter(|&pid: &u32| Pid::from_raw(pid as i32).is_some())
}

/// Returns whether the socket becomes readable within `timeout`.
pub fn wait_readable(socket: &OwnedFd, timeout: Duration) -> Result<bool, ShmError> {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    match rustix::event::poll(&mut polled, Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(ShmError::system("wait on the node's socket")(errno)),
    }
}
