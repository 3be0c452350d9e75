//! [`Socket`]: a stream to one peer, with ends to every wait.
//!
//! Bytes go straight between the socket and the memory that is named; nothing is buffered here. While bytes flow the
//! calls block in the kernel (`MSG_WAITALL`, with a time-out of [`TICK`]), which saves a call per wake-up; where nothing
//! may come for long, the wait is a poll to the exact end of patience.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};

use crate::error::{Failure, Name};

/// How long a blocking call may sit in the kernel before the clock is looked at. Long, because every
/// wait sets a timer, and a processor that goes idle sets its alarm for the next one.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// Most pieces in one call: what Linux copies without allocating a larger table is 8, what it takes is 1,024.
pub(crate) const PIECES_MAX: usize = 64;

/// How long to wait: until a point in time, and no longer than `stall` without a byte.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) deadline: Instant,
    pub(crate) stall: Duration,
}

impl Patience {
    /// No stall but the deadline.
    pub(crate) fn until(deadline: Instant) -> Patience {
        Patience { deadline, stall: Duration::MAX }
    }

    /// When the wait ends that began at `since`.
    fn end(&self, since: Instant) -> Instant {
        since.checked_add(self.stall).map_or(self.deadline, |stalled| stalled.min(self.deadline))
    }
}

/// Why bytes did not move.
#[derive(Clone, Debug)]
pub(crate) enum Halt {
    /// The deadline passed.
    Deadline,
    /// The connection is of no more use.
    Failed(Failure),
}

impl From<Failure> for Halt {
    fn from(failure: Failure) -> Halt {
        Halt::Failed(failure)
    }
}

/// Which way a wait looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// Wakes a thread that waits on a socket.
#[derive(Debug)]
pub(crate) struct Alarm(OwnedFd);

impl Alarm {
    pub(crate) fn new() -> Result<Alarm, Errno> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Alarm)
    }

    /// Wakes whoever waits, now or next.
    pub(crate) fn ring(&self) {
        // It cannot be full: that takes 2⁶⁴ rings.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Whether it was rung since the last look.
    pub(crate) fn was_rung(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

/// A connected stream.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    name: Name,
}

impl Socket {
    /// Connects, from `local` if it matters.
    pub(crate) fn connect(
        local: Option<IpAddr>,
        peer: SocketAddr,
        deadline: Instant,
    ) -> Result<Socket, Failure> {
        let name = Name::Tcp(peer);
        let system = |what| move |source| Failure::System { what, peer: name, source };
        let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .map_err(system("make a socket for"))?;
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

    /// Takes over a connected stream.
    pub(crate) fn new(fd: OwnedFd, name: Name) -> Result<Socket, Failure> {
        let socket = Socket { fd, name };
        socket.set_up().map_err(|source| Failure::System {
            what: "set up the socket to",
            peer: name,
            source,
        })?;
        Ok(socket)
    }

    fn set_up(&self) -> Result<(), Errno> {
        for direction in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
            sockopt::set_socket_timeout(&self.fd, direction, Some(TICK))?;
        }
        if matches!(self.name, Name::Tcp(_)) {
            sockopt::set_tcp_nodelay(&self.fd, true)?;
            // A peer that vanished while nobody asked it anything is noticed within ten seconds.
            sockopt::set_socket_keepalive(&self.fd, true)?;
            sockopt::set_tcp_keepidle(&self.fd, Duration::from_secs(5))?;
            sockopt::set_tcp_keepintvl(&self.fd, Duration::from_secs(1))?;
            sockopt::set_tcp_keepcnt(&self.fd, 5)?;
        }
        Ok(())
    }

    /// Who is at the other end.
    pub(crate) fn name(&self) -> Name {
        self.name
    }

    /// Ends the stream in both directions: whoever waits on it is woken, now and later.
    pub(crate) fn shut_down(&self) {
        // It may have ended by itself.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Fills `into`.
    pub(crate) fn receive(&self, into: &mut [u8], patience: Patience) -> Result<(), Halt> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let piece = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            // SAFETY: `rest` is borrowed for the call.
            done += unsafe { self.receive_some(&mut [piece], patience) }?;
        }
        Ok(())
    }

    /// Receives at least one byte into the pieces, in order, and as many as come without a pause.
    ///
    /// # Safety
    /// The pieces are valid for writes, and nobody else uses them meanwhile.
    pub(crate) unsafe fn receive_some(
        &self,
        pieces: &mut [libc::iovec],
        patience: Patience,
    ) -> Result<usize, Halt> {
        // SAFETY: says the caller.
        unsafe { self.receive_with(pieces, libc::MSG_WAITALL, patience) }
    }

    /// # Safety
    /// As [`Socket::receive_some`].
    unsafe fn receive_with(
        &self,
        pieces: &mut [libc::iovec],
        blocking: i32,
        patience: Patience,
    ) -> Result<usize, Halt> {
        let wanted = !pieces.is_empty();
        let began = Instant::now();
        let end = patience.end(began);
        loop {
            let now = Instant::now();
            if now >= patience.deadline {
                return Err(Halt::Deadline);
            }
            // Near the end the kernel's tick would be too coarse.
            let exact = end.saturating_duration_since(now) <= TICK;
            let flags = if exact { libc::MSG_DONTWAIT } else { blocking };
            // SAFETY: says the caller.
            match unsafe { self.recvmsg(pieces, flags) } {
                Ok(0) if wanted => return Err(Failure::Closed { peer: self.name }.into()),
                Ok(count) => return Ok(count),
                Err(Errno::AGAIN) if exact => {
                    if !self.wait(true, false, end)?.readable {
                        return Err(self.patience_over(patience, began));
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(self.failed("receive from", errno).into()),
            }
        }
    }

    /// Sends all of `bytes`.
    pub(crate) fn send(&self, bytes: &[u8], patience: Patience) -> Result<(), Halt> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let piece = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
            // SAFETY: `rest` is borrowed for the call.
            done += unsafe { self.send_some(&mut [piece], false, patience) }?;
        }
        Ok(())
    }

    /// Sends at least one byte of the pieces, in order. `more`: what follows belongs to it.
    ///
    /// # Safety
    /// The pieces are valid for reads, and nobody writes them meanwhile.
    pub(crate) unsafe fn send_some(
        &self,
        pieces: &mut [libc::iovec],
        more: bool,
        patience: Patience,
    ) -> Result<usize, Halt> {
        let began = Instant::now();
        let end = patience.end(began);
        let more = if more { libc::MSG_MORE } else { 0 };
        loop {
            let exact = end.saturating_duration_since(Instant::now()) <= TICK;
            let flags = if exact { libc::MSG_DONTWAIT } else { 0 };
            // SAFETY: says the caller.
            match unsafe { self.sendmsg(pieces, flags | more) } {
                Ok(count) => return Ok(count),
                Err(Errno::AGAIN) if exact => {
                    if !self.wait(false, true, end)?.writable {
                        return Err(self.patience_over(patience, began));
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(self.failed("send to", errno).into()),
            }
        }
    }

    /// As [`Socket::send_some`], but 0 if nothing can be sent right now.
    ///
    /// # Safety
    /// As [`Socket::send_some`].
    pub(crate) unsafe fn try_send(&self, pieces: &mut [libc::iovec], more: bool) -> Result<usize, Failure> {
        let flags = libc::MSG_DONTWAIT | if more { libc::MSG_MORE } else { 0 };
        // SAFETY: says the caller.
        match unsafe { self.sendmsg(pieces, flags) } {
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(self.failed("send to", errno)),
        }
    }

    /// As much of `into` as comes first, at most until `end`.
    pub(crate) fn receive_first(&self, into: &mut [u8], end: Instant) -> Result<usize, Halt> {
        let mut pieces = [libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() }];
        // SAFETY: `into` is borrowed for the call.
        unsafe { self.receive_with(&mut pieces, 0, Patience::until(end)) }
    }

    /// As much of `into` as is there right now.
    pub(crate) fn try_receive(&self, into: &mut [u8]) -> Result<usize, Failure> {
        let mut pieces = [libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() }];
        // SAFETY: `into` is borrowed for the call.
        match unsafe { self.recvmsg(&mut pieces, libc::MSG_DONTWAIT) } {
            Ok(0) => Err(Failure::Closed { peer: self.name }),
            Ok(count) => Ok(count),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(self.failed("receive from", errno)),
        }
    }

    /// Waits until something can be done, at most until `end`. An end of the stream counts as readable and writable.
    pub(crate) fn wait(&self, read: bool, write: bool, end: Instant) -> Result<Ready, Failure> {
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
        Ok(Ready {
            readable: read && (ended || seen.contains(PollFlags::IN)),
            writable: write && (ended || seen.contains(PollFlags::OUT)),
        })
    }

    /// Waits for something to receive, or the alarm, at most until `end`. Whether there is something to receive.
    pub(crate) fn wait_or_alarm(&self, alarm: &Alarm, end: Instant) -> Result<bool, Failure> {
        let mut wait = [PollFd::new(&self.fd, PollFlags::IN), PollFd::new(&alarm.0, PollFlags::IN)];
        let left = end.saturating_duration_since(Instant::now());
        match rustix::event::poll(&mut wait, Some(&timespec(left))) {
            Ok(_) | Err(Errno::INTR) => Ok(!wait[0].revents().is_empty()),
            Err(errno) => Err(self.failed("wait for", errno)),
        }
    }

    /// Waits for the first byte of whatever comes next, for ever; [`Socket::shut_down`] ends it.
    pub(crate) fn wait_for_ever(&self) -> Result<(), Failure> {
        let mut wait = [PollFd::new(&self.fd, PollFlags::IN)];
        loop {
            match rustix::event::poll(&mut wait, None) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("wait for", errno)),
            }
        }
    }

    /// Bytes that the peer's side has not taken yet.
    pub(crate) fn unsent_bytes(&self) -> u32 {
        let mut count: libc::c_int = 0;
        // SAFETY: writes an int.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TIOCOUTQ, &mut count) };
        if result == 0 { count.max(0) as u32 } else { 0 }
    }

    fn patience_over(&self, patience: Patience, began: Instant) -> Halt {
        if Instant::now() >= patience.deadline {
            return Halt::Deadline;
        }
        Failure::Stalled { peer: self.name, silent: began.elapsed() }.into()
    }

    fn failed(&self, what: &'static str, source: Errno) -> Failure {
        match source {
            Errno::PIPE | Errno::CONNRESET => Failure::Closed { peer: self.name },
            source => Failure::System { what, peer: self.name, source },
        }
    }

    /// # Safety
    /// The pieces are valid for writes, and nobody else uses them meanwhile.
    unsafe fn recvmsg(&self, pieces: &mut [libc::iovec], flags: i32) -> Result<usize, Errno> {
        let mut message = message(pieces);
        // SAFETY: `message` names `pieces`, which are as the caller says.
        let count = unsafe { libc::recvmsg(self.fd.as_fd().as_raw_fd(), &mut message, flags) };
        counted(count)
    }

    /// # Safety
    /// The pieces are valid for reads, and nobody writes them meanwhile.
    unsafe fn sendmsg(&self, pieces: &mut [libc::iovec], flags: i32) -> Result<usize, Errno> {
        let message = message(pieces);
        let flags = flags | libc::MSG_NOSIGNAL;
        // SAFETY: `message` names `pieces`, which are as the caller says.
        let count = unsafe { libc::sendmsg(self.fd.as_fd().as_raw_fd(), &message, flags) };
        counted(count)
    }
}

/// A message of these pieces and nothing else. Not by rustix, whose slices would be references into memory that the
/// kernel writes while other processes map it.
fn message(pieces: &mut [libc::iovec]) -> libc::msghdr {
    debug_assert!(pieces.len() <= PIECES_MAX);
    // SAFETY: all zero is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
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
