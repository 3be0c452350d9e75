//! [`Connection`]: socket with at most one reading and one writing thread at a time; both change often.
//!
//! Writing: frames are written whole, in the order in which they were given. A thread that finds no writer writes its
//! own frame, and then the frames that others have left meanwhile. `SendState::writing` is the right to write. It is
//! released when nothing is left, or kept for the thread that the link appoints to write the rest
//! ([`SendOutcome::Stuck`]).
//!
//! With TLS, bytes count as written when they are encrypted. A write ends when all encrypted bytes are sent, too, or as stuck.
//!
//! Reading: the socket's own timeout limits a read. It is changed only if it does not suit the reader's deadline, so
//! that a typical call costs two system calls, one write and one read.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use moontide_auth::rustls;
use moontide_auth::{ExpectedServer, Session};
use moontide_proto::FrameError;
use moontide_rt::sync::{Mutex, MutexGuard};
use moontide_rt::time::Instant;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::link::config::{Deadline, LinkConfig};
use crate::link::error::LinkError;
use crate::link::frames::{Frame, FrameReader};
use crate::link::handshake::{self, ALPN};

/// Shortest timeout of a read: the kernel's granularity.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);

/// Longest time for which the socket may accept no bytes. This also limits memory: the frames of callers that timed out
/// are kept until they are written, because a frame cannot be truncated.
const STUCK_MAX: Duration = Duration::from_secs(5);

/// Bytes of the socket that are received at a time with TLS: some replies, or a part of a large one.
const WIRE_BYTES: usize = 16 << 10;

/// Connection after the handshake.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Locked for no wait.
    tls: Option<Mutex<Session>>,
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
    /// Encrypted bytes that were just received; empty without TLS.
    wire: Vec<u8>,
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
        let mut tls = match &config.credentials {
            Some(credentials) => {
                let tls_config = credentials.client(ExpectedServer::Master, &[ALPN]);
                Some(start_tls(&stream, tls_config, until).map_err(unreachable)?)
            }
            None => None,
        };
        let hello = handshake::hello_frame(config);
        match &mut tls {
            Some(session) => {
                session.write(&hello).map_err(invalid).map_err(unreachable)?; // some hundred bytes
                send_all(&stream, session).map_err(unreachable)?;
            }
            None => (&stream).write_all(&hello).map_err(unreachable)?,
        }
        let mut frames = FrameReader::new();
        let frame = loop {
            if let Some(frame) = frames.next().map_err(|error| LinkError::protocol(address, error))? {
                break frame;
            }
            let timeout = left(until).map_err(unreachable)?;
            stream.set_read_timeout(Some(timeout)).map_err(unreachable)?;
            let read = match &mut tls {
                Some(session) => receive_tls(&stream, session).and_then(|()| read_tls(session, &mut frames)),
                None => (&stream).read(frames.space()).and_then(|count| match count {
                    0 => Err(io::ErrorKind::UnexpectedEof.into()),
                    count => {
                        frames.filled(count);
                        Ok(())
                    }
                }),
            };
            match read {
                Err(error) if !is_pause(&error) => return Err(unreachable(error)),
                _ => {} // left() fails at the deadline
            }
        };
        let inflight_max = handshake::check_hello_ack(&frame, config, address)?;
        let wire = if tls.is_some() { vec![0; WIRE_BYTES] } else { Vec::new() };
        let incoming = Mutex::new(RecvState { frames, timeout: Duration::ZERO, wire });
        Ok(Connection { stream, tls: tls.map(Mutex::new), incoming, out: Mutex::default(), inflight_max })
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
        let RecvState { frames, wire, .. } = incoming;
        let Some(tls) = &self.tls else {
            return match (&self.stream).read(frames.space()) {
                Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    frames.filled(count);
                    Ok(())
                }
                Err(error) if is_pause(&error) => Ok(()),
                Err(error) => Err(error),
            };
        };
        {
            let mut session = tls.lock();
            if session.is_readable() {
                return read_tls(&mut session, frames);
            }
        }
        // Without the lock, so that others can write meanwhile.
        let count = match (&self.stream).read(wire) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if is_pause(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut session = tls.lock();
        // There is room: at most a part of a record is left, and the space is that of several.
        session.space()[..count].copy_from_slice(&wire[..count]);
        session.received(count);
        read_tls(&mut session, frames)
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
        match self.write(frame, deadline, false)? {
            Written::All => self.flush(deadline),
            Written::Stuck(written) => Ok(self.put_back(&frame[written..])),
        }
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
                if out.left.is_empty() && !self.has_unsent() {
                    out.writing = false;
                    return Ok(SendOutcome::All);
                }
                std::mem::take(&mut out.left)
            };
            if let Written::Stuck(written) = self.write(&bytes, deadline, true)? {
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

    /// Writes until all is written, or until the socket is full and the deadline, if any, has passed. `stuck`: the socket
    /// may have been full before.
    fn write(&self, bytes: &[u8], deadline: Option<Deadline>, mut stuck: bool) -> io::Result<Written> {
        let mut written = 0;
        while written < bytes.len() || self.has_unsent() {
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
                    let Some(remaining) = deadline.and_then(Deadline::remaining) else {
                        return Ok(Written::Stuck(written));
                    };
                    self.wait_writable(remaining.min(STUCK_MAX))?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Written::All)
    }

    /// Writes the first bytes; fails with `AGAIN` if the socket is full. With TLS it also sends bytes that are left of earlier writes.
    fn write_some(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let Some(tls) = &self.tls else { return send_some(&self.stream, bytes) };
        let mut session = tls.lock();
        send_unsent(&self.stream, &mut session)?;
        let written = session.write(bytes).map_err(|_| Errno::PIPE)?; // the keys are used up
        match send_unsent(&self.stream, &mut session) {
            Err(Errno::AGAIN) if written > 0 => {}
            result => result?,
        }
        Ok(written)
    }

    /// Returns whether encrypted bytes are left to send.
    fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| !tls.lock().unsent().is_empty())
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

/// Result of [`Connection::write`].
enum Written {
    All,
    /// The socket is full. This many bytes need not be written again; with TLS some of them may be unsent.
    Stuck(usize),
}

/// Sends the first bytes; fails with `AGAIN` if the socket is full.
fn send_some(stream: &TcpStream, bytes: &[u8]) -> Result<usize, Errno> {
    loop {
        match send(stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Sends the encrypted bytes; fails with `AGAIN` if the socket is full.
fn send_unsent(stream: &TcpStream, session: &mut Session) -> Result<(), Errno> {
    while !session.unsent().is_empty() {
        let sent = send_some(stream, session.unsent())?;
        session.sent(sent);
    }
    Ok(())
}

/// Sends the encrypted bytes, within the write timeout of the socket.
fn send_all(mut stream: &TcpStream, session: &mut Session) -> io::Result<()> {
    stream.write_all(session.unsent())?;
    session.sent(session.unsent().len());
    Ok(())
}

/// Receives encrypted bytes, within the read timeout of the socket.
fn receive_tls(mut stream: &TcpStream, session: &mut Session) -> io::Result<()> {
    match stream.read(session.space())? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => {
            session.received(count);
            Ok(())
        }
    }
}

/// Decrypts what has arrived.
fn read_tls(session: &mut Session, frames: &mut FrameReader) -> io::Result<()> {
    let space = frames.space();
    let mut filled = 0;
    let max = space.len();
    session
        .read(max, &mut |piece| {
            space[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        })
        .map_err(invalid)?;
    frames.filled(filled);
    if filled == 0 && session.is_closed() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

/// Runs the TLS handshake, until `until`.
fn start_tls(stream: &TcpStream, config: Arc<rustls::ClientConfig>, until: Instant) -> io::Result<Session> {
    let mut session = Session::client(config).map_err(invalid)?;
    loop {
        let progress = session.handshake();
        if progress.is_err() {
            // The master learns the reason.
            let _ = send_all(stream, &mut session);
        }
        let is_done = progress.map_err(invalid)?;
        send_all(stream, &mut session)?;
        if is_done {
            return Ok(session);
        }
        stream.set_read_timeout(Some(left(until)?))?;
        match receive_tls(stream, &mut session) {
            Err(error) if !is_pause(&error) => return Err(error),
            _ => {} // left() fails at the deadline
        }
    }
}

fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
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
