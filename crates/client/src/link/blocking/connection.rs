//! [`Connection`]: a socket that one thread reads and one thread writes, never the same two for long.
//!
//! Writing: frames go out in one piece, in the order in which they were given. Whoever finds nobody writing writes,
//! its own frame and then what others have left meanwhile. `Out::writing` is that right; it is given back when
//! nothing is left, or kept for the thread that the link makes to write the rest ([`Sent::Stuck`]).
//!
//! Reading: the socket's own timeout bounds a read. It is changed only if it does not suit the reader's deadline, so
//! that in the usual case a call costs two system calls, one to write and one to read.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use moontide_proto::FrameError;
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::link::config::{Deadline, LinkConfig};
use crate::link::error::LinkError;
use crate::link::frames::{Frame, FrameReader};
use crate::link::hello;

/// The shortest timeout of a read: the kernel's grain.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);

/// How long a master may take nothing of what we want to write. A bound on memory, too: what callers leave behind who
/// gave up is kept until it is written, because a frame cannot be cut.
const STUCK_MAX: Duration = Duration::from_secs(5);

/// A connection that has said Hello.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    incoming: Mutex<Incoming>,
    out: Mutex<Out>,
    /// How many requests the master lets us have in flight.
    pub(super) inflight_max: u16,
}

/// The reader's side.
#[derive(Debug)]
pub(super) struct Incoming {
    frames: FrameReader,
    /// The socket's timeout at present.
    timeout: Duration,
}

impl Incoming {
    pub(super) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        self.frames.next()
    }
}

#[derive(Debug, Default)]
struct Out {
    /// What is to be written after what is being written.
    left: Vec<u8>,
    writing: bool,
    /// Since when the socket has taken nothing.
    stuck_since: Option<Instant>,
}

/// What became of something to be written.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// It is written, or another thread writes it.
    All,
    /// The socket takes no more at present, and nobody writes: somebody must be made to.
    Stuck,
}

impl Connection {
    /// Connects and says Hello, until `until` at the latest.
    pub(super) fn open(
        config: &LinkConfig,
        address: &Arc<str>,
        until: Instant,
    ) -> Result<Connection, LinkError> {
        let unreachable = |error| LinkError::unreachable(address, error);
        let stream = connect(address, until).map_err(unreachable)?;
        hello::prepare(&stream).map_err(unreachable)?;
        stream.set_write_timeout(Some(left(until).map_err(unreachable)?)).map_err(unreachable)?;
        (&stream).write_all(&hello::offer(config)).map_err(unreachable)?;
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
                Err(error) if is_pause(&error) => {} // left() says when it is over
                Err(error) => return Err(unreachable(error)),
            }
        };
        let inflight_max = hello::accepted(&frame, config, address)?;
        let incoming = Mutex::new(Incoming { frames, timeout: Duration::ZERO });
        Ok(Connection { stream, incoming, out: Mutex::default(), inflight_max })
    }

    /// The reader's side; only the leader takes it.
    pub(super) fn incoming(&self) -> MutexGuard<'_, Incoming> {
        self.incoming.lock()
    }

    /// Reads what there is, or waits for at most about `remaining`. Fails when the connection has ended.
    pub(super) fn receive(&self, incoming: &mut Incoming, remaining: Duration) -> io::Result<()> {
        // Half of what remains suits the next calls, too: they start with about the same time left.
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

    /// Writes a frame, waiting until the deadline if there is one.
    pub(super) fn send(&self, frame: &[u8], deadline: Option<Deadline>) -> io::Result<Sent> {
        {
            let mut out = self.out.lock();
            if out.writing {
                out.left.extend_from_slice(frame);
                return Ok(Sent::All);
            }
            out.writing = true;
        }
        let written = self.write(frame, deadline, false)?;
        if written < frame.len() {
            return Ok(self.put_back(&frame[written..]));
        }
        self.flush(deadline)
    }

    /// What could not be written stays in front of what others have left meanwhile.
    fn put_back(&self, rest: &[u8]) -> Sent {
        let mut out = self.out.lock();
        let behind = std::mem::replace(&mut out.left, rest.to_vec());
        out.left.extend_from_slice(&behind);
        Sent::Stuck
    }

    /// Writes what is left, by right of `writing`.
    pub(super) fn flush(&self, deadline: Option<Deadline>) -> io::Result<Sent> {
        loop {
            let bytes = {
                let mut out = self.out.lock();
                if out.left.is_empty() {
                    out.writing = false;
                    return Ok(Sent::All);
                }
                std::mem::take(&mut out.left)
            };
            let written = self.write(&bytes, deadline, true)?;
            if written < bytes.len() {
                return Ok(self.put_back(&bytes[written..]));
            }
        }
    }

    /// Writes a short frame if nobody writes; otherwise it is dropped. Fails if it could be written in part only.
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

    /// Writes until all is written or the socket takes no more, by the deadline if there is one. How much it was.
    /// `stuck` if the socket may have taken nothing for a while.
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

    /// Ends it; whoever reads or waits to write wakes up.
    pub(super) fn shutdown(&self) {
        // It may have ended by itself; then there is nobody to wake.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// Nothing was read, and nothing is wrong.
fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// The time until then, or that it is over.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
    left.ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// Tries the addresses of a name one after the other.
fn connect(address: &str, until: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in resolve(address, until)? {
        match TcpStream::connect_timeout(&address, left(until)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The system's resolver knows no deadline, so a name is resolved on a thread that is left to itself when the time
/// is over. Numbers need no resolver.
fn resolve(address: &str, until: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let (sender, receiver) = mpsc::sync_channel(1);
    let name = address.to_owned();
    thread::Builder::new().name("resolve".into()).spawn(move || {
        // Nobody may be listening any more.
        let _ = sender.send(name.to_socket_addrs().map(Iterator::collect));
    })?;
    receiver.recv_timeout(left(until)?).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
