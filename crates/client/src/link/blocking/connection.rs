//! [`Connection`]: socket with at most one reading and one writing thread at a time; both change often.
//!
//! Writing: frames are written whole, in the order in which they were given. A thread that finds no writer writes its
//! own frame, and then the frames that others have left meanwhile. `SendState::writing` is the right to write. It is
//! released when nothing is left, or kept for the thread that the link appoints to write the rest
//! ([`SendOutcome::Stuck`]).
//!
//! Reading: the socket's own timeout limits a read. It is changed only if it does not suit the reader's deadline, so
//! that a typical call costs two system calls, one write and one read.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use moontide_proto::FrameError;
use moontide_rt::sync::{Mutex, MutexGuard};
use moontide_rt::time::Instant;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::link::config::{Deadline, LinkConfig};
use crate::link::error::LinkError;
use crate::link::frames::{Frame, FrameReader};
use crate::link::handshake;

/// Shortest timeout of a read: the kernel's granularity.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);

/// Longest time for which the socket may accept no bytes. This also limits memory: the frames of callers that timed out
/// are kept until they are written, because a frame cannot be truncated.
const STUCK_MAX: Duration = Duration::from_secs(5);

/// Connection after the handshake.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    incoming: Mutex<RecvState>,
    out: Mutex<SendState>,
    /// Most requests in flight that the master accepts.
    pub(super) inflight_max: u16,
}

/// State of the reader.
#[derive(Debug)]
pub(super) struct RecvState {
    frames: FrameReader,
    /// Current read timeout of the socket.
    timeout: Duration,
}

impl RecvState {
    pub(super) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        self.frames.next()
    }
}

#[derive(Debug, Default)]
struct SendState {
    /// Bytes to write after those that are being written.
    left: Vec<u8>,
    writing: bool,
    /// Since when the socket has accepted no bytes.
    stuck_since: Option<Instant>,
}

/// Result of a write.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SendOutcome {
    /// All bytes are written, or another thread writes them.
    All,
    /// The socket is full and no thread writes: the caller must appoint a writer.
    Stuck,
}

impl Connection {
    /// Connects and performs the handshake; fails at `until`.
    pub(super) fn open(
        config: &LinkConfig,
        address: &Arc<str>,
        until: Instant,
    ) -> Result<Connection, LinkError> {
        let unreachable = |error| LinkError::unreachable(address, error);
        let stream = connect(address, until).map_err(unreachable)?;
        handshake::prepare(&stream).map_err(unreachable)?;
        stream.set_write_timeout(Some(left(until).map_err(unreachable)?)).map_err(unreachable)?;
        (&stream).write_all(&handshake::hello_frame(config)).map_err(unreachable)?;
        let mut frames = FrameReader::new();
        let frame = loop {
            if let Some(frame) = frames.next().map_err(|error| LinkError::protocol(address, error))? {
                break frame;
            }
            let timeout = left(until).map_err(unreachable)?;
            stream.set_read_timeout(Some(timeout)).map_err(unreachable)?;
            match (&stream).read(frames.space()) {
                Ok(0) => return Err(unreachable(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => frames.filled(count),
                Err(error) if is_pause(&error) => {} // left() fails at the deadline
                Err(error) => return Err(unreachable(error)),
            }
        };
        let inflight_max = handshake::check_hello_ack(&frame, config, address)?;
        let incoming = Mutex::new(RecvState { frames, timeout: Duration::ZERO });
        Ok(Connection { stream, incoming, out: Mutex::default(), inflight_max })
    }

    /// Returns the reader's state; only the leader calls it.
    pub(super) fn incoming(&self) -> MutexGuard<'_, RecvState> {
        self.incoming.lock()
    }

    /// Reads available bytes, or waits for at most about `remaining`. Fails when the connection has ended.
    pub(super) fn receive(&self, incoming: &mut RecvState, remaining: Duration) -> io::Result<()> {
        // Half of the remaining time also suits the next calls: they start with about the same timeout.
        if incoming.timeout > remaining.max(TIMEOUT_MIN) || incoming.timeout < remaining / 8 {
            let timeout = (remaining / 2).max(TIMEOUT_MIN);
            self.stream.set_read_timeout(Some(timeout))?;
            incoming.timeout = timeout;
        }
        match (&self.stream).read(incoming.frames.space()) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                incoming.frames.filled(count);
                Ok(())
            }
            Err(error) if is_pause(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Writes a frame. Waits until the deadline if there is one.
    pub(super) fn send(&self, frame: &[u8], deadline: Option<Deadline>) -> io::Result<SendOutcome> {
        {
            let mut out = self.out.lock();
            if out.writing {
                out.left.extend_from_slice(frame);
                return Ok(SendOutcome::All);
            }
            out.writing = true;
        }
        let written = self.write(frame, deadline, false)?;
        if written < frame.len() {
            return Ok(self.put_back(&frame[written..]));
        }
        self.flush(deadline)
    }

    /// Puts unwritten bytes in front of those that others have left meanwhile.
    fn put_back(&self, rest: &[u8]) -> SendOutcome {
        let mut out = self.out.lock();
        let later = std::mem::replace(&mut out.left, rest.to_vec());
        out.left.extend_from_slice(&later);
        SendOutcome::Stuck
    }

    /// Writes the bytes that are left. The caller has the right to write.
    pub(super) fn flush(&self, deadline: Option<Deadline>) -> io::Result<SendOutcome> {
        loop {
            let bytes = {
                let mut out = self.out.lock();
                if out.left.is_empty() {
                    out.writing = false;
                    return Ok(SendOutcome::All);
                }
                std::mem::take(&mut out.left)
            };
            let written = self.write(&bytes, deadline, true)?;
            if written < bytes.len() {
                return Ok(self.put_back(&bytes[written..]));
            }
        }
    }

    /// Writes a short frame if no thread is writing; otherwise drops it. Fails if only a part could be written.
    pub(super) fn send_if_idle(&self, frame: &[u8]) -> io::Result<()> {
        let out = self.out.lock();
        if out.writing {
            return Ok(());
        }
        match self.write_some(frame) {
            Ok(count) if count < frame.len() => Err(io::ErrorKind::WriteZero.into()),
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes until all is written, or until the socket is full and the deadline, if any, has passed. Returns the
    /// number of bytes. `stuck`: the socket may have been full before.
    fn write(&self, bytes: &[u8], deadline: Option<Deadline>, mut stuck: bool) -> io::Result<usize> {
        let mut written = 0;
        while written < bytes.len() {
            match self.write_some(&bytes[written..]) {
                Ok(count) => {
                    written += count;
                    if std::mem::take(&mut stuck) {
                        self.out.lock().stuck_since = None;
                    }
                }
                Err(Errno::AGAIN) => {
                    stuck = true;
                    if self.out.lock().stuck_since.get_or_insert_with(Instant::now).elapsed() > STUCK_MAX {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    let Some(remaining) = deadline.and_then(Deadline::remaining) else { break };
                    self.wait_writable(remaining.min(STUCK_MAX))?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(written)
    }

    fn write_some(&self, bytes: &[u8]) -> Result<usize, Errno> {
        loop {
            match send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                result => return result,
            }
        }
    }

    fn wait_writable(&self, remaining: Duration) -> io::Result<()> {
        let timeout =
            Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: remaining.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.stream, PollFlags::OUT)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Closes the connection and wakes threads that read or wait to write.
    pub(super) fn shutdown(&self) {
        // Fails if the peer has closed it already; then no thread waits on it.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// Returns whether a read returned without bytes for a harmless reason.
fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// Returns the time left; fails with `TimedOut` if there is none.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
    left.ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// Connects to the first address of a name that accepts.
fn connect(address: &str, until: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "name has no address");
    for address in resolve(address, until)? {
        match TcpStream::connect_timeout(&address, left(until)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Resolves a name on a thread of its own, because the system's resolver has no deadline; the thread is abandoned at
/// `until`. Numeric addresses need no resolver.
fn resolve(address: &str, until: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let name = address.to_owned();
    thread::Builder::new().name("resolve".into()).spawn(move || {
        // The receiver is gone after a timeout.
        let _ = sender.send(name.to_socket_addrs().map(Iterator::collect));
    })?;
    receiver.recv_timeout(left(until)?).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
