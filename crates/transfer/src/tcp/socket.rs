//! [`Socket`]: a stream to one peer on which every wait has a time limit.
//!
//! Bytes move directly between the socket and the caller's memory; nothing is buffered here. While bytes flow the calls
//! block in the kernel (`MSG_WAITALL`, with a timeout of [`BLOCKING_CALL_MAX`]), which saves a call per wake-up. Where
//! the wait may be long, it is a poll with the exact time limit.
//!
//! After [`Socket::start_client_tls`] or [`Socket::start_server_tls`] the same methods send and receive over TLS. Then bytes pass
//! through the buffers of the session, and every wait is a poll.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use moontide_auth::{Identity, Session, rustls};
use moontide_rt::time::Instant;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};

use crate::error::{ConnectionError, PeerName};
use crate::tcp::tls::TlsLayer;

/// How long a blocking call may stay in the kernel before the deadline is checked. Long, because every wait sets a
/// timer, and a processor that becomes idle programs its timer interrupt for the next one.
pub(crate) const BLOCKING_CALL_MAX: Duration = Duration::from_millis(100);

/// Most iovecs in one call: Linux copies up to 8 without allocating a larger table, and accepts 1,024.
pub(crate) const IOVECS_MAX: usize = 64;

/// Limits of a wait: a deadline, and at most `stall` without a byte.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IoTimeout {
    pub(crate) deadline: Instant,
    pub(crate) stall: Duration,
}

impl IoTimeout {
    /// Creates a timeout without a stall limit.
    pub(crate) fn until(deadline: Instant) -> IoTimeout {
        IoTimeout { deadline, stall: Duration::MAX }
    }

    /// Returns the end of a wait that began at `since`.
    fn end(&self, since: Instant) -> Instant {
        since.checked_add(self.stall).map_or(self.deadline, |stalled| stalled.min(self.deadline))
    }
}

/// Reason why bytes did not move.
#[derive(Clone, Debug)]
pub(crate) enum IoError {
    /// The deadline passed.
    Deadline,
    /// The connection can no longer be used.
    Failed(ConnectionError),
}

impl From<ConnectionError> for IoError {
    fn from(failure: ConnectionError) -> IoError {
        IoError::Failed(failure)
    }
}

/// Result of a wait on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Readiness {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// Wakes a thread that waits on a socket (eventfd).
#[derive(Debug)]
pub(crate) struct WakeFd(OwnedFd);

impl WakeFd {
    pub(crate) fn new() -> Result<WakeFd, Errno> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(WakeFd)
    }

    /// Wakes the waiting thread, or the next one that waits.
    pub(crate) fn notify(&self) {
        // The counter cannot be full: that takes 2⁶⁴ calls.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Returns whether [`WakeFd::notify`] was called since the last call of this function.
    pub(crate) fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

/// A connected stream.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    name: PeerName,
    /// Set once, before other threads use the socket.
    tls: OnceLock<TlsLayer>,
}

impl Socket {
    /// Connects, from the address `local` if given.
    pub(crate) fn connect(
        local: Option<IpAddr>,
        peer: SocketAddr,
        deadline: Instant,
    ) -> Result<Socket, ConnectionError> {
        let name = PeerName::Tcp(peer);
        let system = |what| move |source| ConnectionError::System { what, peer: name, source };
        let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .map_err(system("create a socket for"))?;
        if let Some(local) = local {
            let from = SocketAddr::new(local, 0);
            rustix::net::bind(&fd, &from).map_err(system("bind the local address for"))?;
        }
        match rustix::net::connect(&fd, &peer) {
            Ok(()) => {}
            Err(Errno::INPROGRESS | Errno::INTR) => {
                let mut wait = [PollFd::new(&fd, PollFlags::OUT)];
                loop {
                    let left = deadline.saturating_duration_since(Instant::now());
                    match rustix::event::poll(&mut wait, Some(&timespec(left))) {
                        Ok(0) if left.is_zero() => return Err(system("connect to")(Errno::TIMEDOUT)),
                        Ok(0) | Err(Errno::INTR) => {}
                        Ok(_) => break,
                        Err(errno) => return Err(system("connect to")(errno)),
                    }
                }
                let outcome = sockopt::socket_error(&fd).map_err(system("connect to"))?;
                outcome.map_err(system("connect to"))?;
            }
            Err(errno) => return Err(system("connect to")(errno)),
        }
        rustix::io::ioctl_fionbio(&fd, false).map_err(system("set up the socket to"))?;
        Socket::new(fd, name)
    }

    /// Wraps a connected stream.
    pub(crate) fn new(fd: OwnedFd, name: PeerName) -> Result<Socket, ConnectionError> {
        let socket = Socket { fd, name, tls: OnceLock::new() };
        socket.set_up().map_err(|source| ConnectionError::System {
            what: "set up the socket to",
            peer: name,
            source,
        })?;
        Ok(socket)
    }

    fn set_up(&self) -> Result<(), Errno> {
        for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&self.fd, direction, Some(BLOCKING_CALL_MAX))?;
        }
        if matches!(self.name, PeerName::Tcp(_)) {
            sockopt::set_tcp_nodelay(&self.fd, true)?;
            // A peer that vanished while the connection was idle is detected within ten seconds.
            sockopt::set_socket_keepalive(&self.fd, true)?;
            sockopt::set_tcp_keepidle(&self.fd, Duration::from_secs(5))?;
            sockopt::set_tcp_keepintvl(&self.fd, Duration::from_secs(1))?;
            sockopt::set_tcp_keepcnt(&self.fd, 5)?;
        }
        Ok(())
    }

    /// Runs the handshake of a client, until `deadline`. From then on all bytes are encrypted.
    pub(crate) fn start_client_tls(
        &self,
        config: Arc<rustls::ClientConfig>,
        deadline: Instant,
    ) -> Result<(), ConnectionError> {
        self.start_tls(Session::client(config), deadline)
    }

    /// Runs the handshake of a server, until `deadline`. From then on all bytes are encrypted.
    pub(crate) fn start_server_tls(
        &self,
        config: Arc<rustls::ServerConfig>,
        deadline: Instant,
    ) -> Result<(), ConnectionError> {
        self.start_tls(Session::server(config), deadline)
    }

    fn start_tls(
        &self,
        session: Result<Session, rustls::Error>,
        deadline: Instant,
    ) -> Result<(), ConnectionError> {
        let layer = TlsLayer::handshake(self, session, deadline)?;
        assert!(self.tls.set(layer).is_ok(), "TLS is started once");
        Ok(())
    }

    /// Returns the identity of the peer, if the connection uses TLS and the peer has a certificate.
    pub(crate) fn peer(&self) -> Option<&Identity> {
        self.tls.get()?.peer()
    }

    /// Returns the name of the peer.
    pub(crate) fn name(&self) -> PeerName {
        self.name
    }

    /// Ends the stream in both directions. This wakes every thread that waits on it, now and later.
    pub(crate) fn shut_down(&self) {
        // The peer may have ended it already.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Fills `into`.
    pub(crate) fn receive(&self, into: &mut [u8], timeout: IoTimeout) -> Result<(), IoError> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let iovec = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            // SAFETY: `rest` is borrowed for the call.
            done += unsafe { self.receive_some(&mut [iovec], timeout) }?;
        }
        Ok(())
    }

    /// Receives at least one byte into the iovecs, in order, and as many as arrive without a gap.
    ///
    /// # Safety
    /// The iovecs are valid for writes, and no other code uses them during the call.
    pub(crate) unsafe fn receive_some(
        &self,
        iovecs: &mut [libc::iovec],
        timeout: IoTimeout,
    ) -> Result<usize, IoError> {
        // SAFETY: the caller upholds the contract, which is the same.
        unsafe { self.receive_with(iovecs, libc::MSG_WAITALL, timeout) }
    }

    /// # Safety
    /// As [`Socket::receive_some`].
    unsafe fn receive_with(
        &self,
        iovecs: &mut [libc::iovec],
        blocking: i32,
        timeout: IoTimeout,
    ) -> Result<usize, IoError> {
        let expects_bytes = !iovecs.is_empty();
        let began = Instant::now();
        let end = timeout.end(began);
        if let Some(tls) = self.tls.get() {
            loop {
                // SAFETY: the caller upholds the contract, which is the same.
                let count = unsafe { tls.try_receive(self, iovecs) }?;
                if count > 0 || !expects_bytes {
                    return Ok(count);
                }
                if !self.wait(true, false, end)?.readable {
                    return Err(self.timed_out(timeout, began));
                }
            }
        }
        loop {
            let now = Instant::now();
            if now >= timeout.deadline {
                return Err(IoError::Deadline);
            }
            // Close to the end, BLOCKING_CALL_MAX would be too coarse.
            let exact = end.saturating_duration_since(now) <= BLOCKING_CALL_MAX;
            let flags = if exact { libc::MSG_DONTWAIT } else { blocking };
            // SAFETY: the caller upholds the contract, which is the same.
            match unsafe { self.recvmsg(iovecs, flags) } {
                Ok(0) if expects_bytes => return Err(ConnectionError::Closed { peer: self.name }.into()),
                Ok(count) => return Ok(count),
                Err(Errno::AGAIN) if exact => {
                    if !self.wait(true, false, end)?.readable {
                        return Err(self.timed_out(timeout, began));
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(self.failed("receive from", errno).into()),
            }
        }
    }

    /// Sends all of `bytes`.
    pub(crate) fn send(&self, bytes: &[u8], timeout: IoTimeout) -> Result<(), IoError> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let iovec = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: `rest` is borrowed for the call.
            done += unsafe { self.send_some(&mut [iovec], false, timeout) }?;
        }
        Ok(())
    }

    /// Sends at least one byte of the iovecs, in order. `more`: the following bytes belong to the same message.
    ///
    /// # Safety
    /// The iovecs are valid for reads, and no other code writes them during the call.
    pub(crate) unsafe fn send_some(
        &self,
        iovecs: &mut [libc::iovec],
        more: bool,
        timeout: IoTimeout,
    ) -> Result<usize, IoError> {
        let began = Instant::now();
        let end = timeout.end(began);
        if let Some(tls) = self.tls.get() {
            loop {
                // SAFETY: the caller upholds the contract, which is the same.
                let count = unsafe { tls.try_send(self, iovecs) }?;
                if count > 0 {
                    return Ok(count);
                }
                if !self.wait(false, true, end)?.writable {
                    return Err(self.timed_out(timeout, began));
                }
            }
        }
        let more = if more { libc::MSG_MORE } else { 0 };
        loop {
            let exact = end.saturating_duration_since(Instant::now()) <= BLOCKING_CALL_MAX;
            let flags = if exact { libc::MSG_DONTWAIT } else { 0 };
            // SAFETY: the caller upholds the contract, which is the same.
            match unsafe { self.sendmsg(iovecs, flags | more) } {
                Ok(count) => return Ok(count),
                Err(Errno::AGAIN) if exact => {
                    if !self.wait(false, true, end)?.writable {
                        return Err(self.timed_out(timeout, began));
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(self.failed("send to", errno).into()),
            }
        }
    }

    /// As [`Socket::send_some`], but returns 0 if nothing can be sent now. Then the next call must be given the same bytes again: with
    /// TLS a part of them may be on the way.
    ///
    /// # Safety
    /// As [`Socket::send_some`].
    pub(crate) unsafe fn try_send(
        &self,
        iovecs: &mut [libc::iovec],
        more: bool,
    ) -> Result<usize, ConnectionError> {
        if let Some(tls) = self.tls.get() {
            // SAFETY: the caller upholds the contract, which is the same.
            return unsafe { tls.try_send(self, iovecs) };
        }
        let flags = libc::MSG_DONTWAIT | if more { libc::MSG_MORE } else { 0 };
        // SAFETY: the caller upholds the contract, which is the same.
        match unsafe { self.sendmsg(iovecs, flags) } {
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(self.failed("send to", errno)),
        }
    }

    /// Receives the bytes that arrive first, at most until `end`. Returns their number.
    pub(crate) fn receive_first(&self, into: &mut [u8], end: Instant) -> Result<usize, IoError> {
        let mut iovecs = [libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() }];
        // SAFETY: `into` is borrowed for the call.
        unsafe { self.receive_with(&mut iovecs, 0, IoTimeout::until(end)) }
    }

    /// Receives the bytes that are available now. Returns their number.
    pub(crate) fn try_receive(&self, into: &mut [u8]) -> Result<usize, ConnectionError> {
        if let Some(tls) = self.tls.get() {
            let mut iovecs = [libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() }];
            // SAFETY: `into` is borrowed for the call.
            return unsafe { tls.try_receive(self, &mut iovecs) };
        }
        self.try_receive_raw(into)
    }

    /// Receives the bytes that are available now, as they are on the wire.
    pub(super) fn try_receive_raw(&self, into: &mut [u8]) -> Result<usize, ConnectionError> {
        let mut iovecs = [libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() }];
        // SAFETY: `into` is borrowed for the call.
        match unsafe { self.recvmsg(&mut iovecs, libc::MSG_DONTWAIT) } {
            Ok(0) => Err(ConnectionError::Closed { peer: self.name }),
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(self.failed("receive from", errno)),
        }
    }

    /// Sends what the socket accepts now, as it is. Returns the number of bytes.
    pub(super) fn try_send_raw(&self, bytes: &[u8]) -> Result<usize, ConnectionError> {
        let mut iovecs = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        // SAFETY: `bytes` is borrowed for the call.
        match unsafe { self.sendmsg(&mut iovecs, libc::MSG_DONTWAIT) } {
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(self.failed("send to", errno)),
        }
    }

    /// Returns whether bytes can be received without a wait for the socket.
    fn has_received(&self) -> bool {
        self.tls.get().is_some_and(TlsLayer::is_readable)
    }

    /// Waits until the socket is ready, at most until `end`. The end of the stream counts as readable and writable.
    pub(crate) fn wait(&self, read: bool, write: bool, end: Instant) -> Result<Readiness, ConnectionError> {
        if read && self.has_received() {
            return Ok(Readiness { readable: true, writable: false });
        }
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, read);
        events.set(PollFlags::OUT, write);
        let mut wait = [PollFd::new(&self.fd, events)];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match rustix::event::poll(&mut wait, Some(&timespec(left))) {
                Ok(0) if !left.is_zero() => {}
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("wait for", errno)),
            }
        }
        let seen = wait[0].revents();
        let ended = seen.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
        Ok(Readiness {
            readable: read && (ended || seen.contains(PollFlags::IN)),
            writable: write && (ended || seen.contains(PollFlags::OUT)),
        })
    }

    /// Waits for bytes or for `wake_fd`, at most until `end`. Returns whether there are bytes to receive.
    pub(crate) fn wait_or_wake(&self, wake_fd: &WakeFd, end: Instant) -> Result<bool, ConnectionError> {
        if self.has_received() {
            return Ok(true);
        }
        let mut wait = [PollFd::new(&self.fd, PollFlags::IN), PollFd::new(&wake_fd.0, PollFlags::IN)];
        let left = end.saturating_duration_since(Instant::now());
        match rustix::event::poll(&mut wait, Some(&timespec(left))) {
            Ok(_) | Err(Errno::INTR) => Ok(!wait[0].revents().is_empty()),
            Err(errno) => Err(self.failed("wait for", errno)),
        }
    }

    /// Waits for the next byte without a time limit; [`Socket::shut_down`] ends the wait.
    pub(crate) fn wait_readable(&self) -> Result<(), ConnectionError> {
        if self.has_received() {
            return Ok(());
        }
        let mut wait = [PollFd::new(&self.fd, PollFlags::IN)];
        loop {
            match rustix::event::poll(&mut wait, None) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("wait for", errno)),
            }
        }
    }

    /// Returns the number of sent bytes that the peer's host has not acknowledged yet.
    pub(crate) fn unsent_bytes(&self) -> u32 {
        let mut count: libc::c_int = 0;
        // SAFETY: writes an int.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TIOCOUTQ, &mut count) };
        if result == 0 { count.max(0) as u32 } else { 0 }
    }

    fn timed_out(&self, timeout: IoTimeout, began: Instant) -> IoError {
        if Instant::now() >= timeout.deadline {
            return IoError::Deadline;
        }
        ConnectionError::Stalled { peer: self.name, silent: began.elapsed() }.into()
    }

    fn failed(&self, what: &'static str, source: Errno) -> ConnectionError {
        match source {
            Errno::PIPE | Errno::CONNRESET => ConnectionError::Closed { peer: self.name },
            source => ConnectionError::System { what, peer: self.name, source },
        }
    }

    /// # Safety
    /// The iovecs are valid for writes, and no other code uses them during the call.
    unsafe fn recvmsg(&self, iovecs: &mut [libc::iovec], flags: i32) -> Result<usize, Errno> {
        let mut message = message(iovecs);
        // SAFETY: `message` refers to `iovecs`, which are valid by the contract.
        let count = unsafe { libc::recvmsg(self.fd.as_fd().as_raw_fd(), &mut message, flags) };
        counted(count)
    }

    /// # Safety
    /// The iovecs are valid for reads, and no other code writes them during the call.
    unsafe fn sendmsg(&self, iovecs: &mut [libc::iovec], flags: i32) -> Result<usize, Errno> {
        let message = message(iovecs);
        let flags = flags | libc::MSG_NOSIGNAL;
        // SAFETY: `message` refers to `iovecs`, which are valid by the contract.
        let count = unsafe { libc::sendmsg(self.fd.as_fd().as_raw_fd(), &message, flags) };
        counted(count)
    }
}

/// Creates a message header of these iovecs only. Does not use rustix, whose slices would be references into memory
/// that the kernel writes while other processes map it.
fn message(iovecs: &mut [libc::iovec]) -> libc::msghdr {
    debug_assert!(iovecs.len() <= IOVECS_MAX);
    // SAFETY: all zero is an empty message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len() as _;
    message
}

fn counted(count: isize) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    })
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
