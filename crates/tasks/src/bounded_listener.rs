//! [`BoundedListener`]: a TCP listener whose connections are limited in number and in what they may leave undone.
//!
//! ```text
//!   accept ──▶ greeting ──▶ serving
//!     │           │            └─ BoundedConnection: the server reads and writes
//!     │           └─ one task per connection: the first bytes of the protocol, within GREETING_MAX.
//!     │              A TLS handshake is the first part of it.
//!     └─ Admission: a place for the connection
//! ```
//!
//! A server gets a connection when it has greeted. Until it has made a call it may be closed in favour of others, and is closed
//! after some time.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use futures_util::stream::{self, Stream};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, timeout};
use tracing::{debug, warn};

use moontide_auth::Caller;

use crate::admission::{Admission, Evicted, Place, Refusal};
use crate::tls::{MaybeTls, TlsServer};

/// Wait after a failed accept, for example without free descriptors: an immediate retry would fail again.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Time from accept to the end of the greeting: a few round trips of a slow network.
pub const GREETING_MAX: Duration = Duration::from_secs(10);

/// Longest head of an HTTP/1 request. The longest valid ones list keys in the query.
const HEAD_BYTES_MAX: usize = 128 << 10;

/// What a client of HTTP/2 sends first.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Memory for the greeting of a connection, before it has sent anything.
const GREETING_BYTES: usize = 256;

/// Counts connections and their bytes. `()` counts nothing.
pub trait ConnectionObserver: Send + Sync + Unpin + 'static {
    /// A connection was accepted.
    fn opened(&self) {}

    /// A connection was closed.
    fn closed(&self) {}

    /// A connection got no place, or lost it to another one.
    fn refused(&self) {}

    /// Bytes were read from a connection.
    fn read(&self, _bytes: usize) {}

    /// Bytes were written to a connection.
    fn written(&self, _bytes: usize) {}
}

impl ConnectionObserver for () {}

impl<O: ConnectionObserver> ConnectionObserver for Arc<O> {
    fn opened(&self) {
        O::opened(self);
    }

    fn closed(&self) {
        O::closed(self);
    }

    fn refused(&self) {
        O::refused(self);
    }

    fn read(&self, bytes: usize) {
        O::read(self, bytes);
    }

    fn written(&self, bytes: usize) {
        O::written(self, bytes);
    }
}

/// Protocol of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1. The head of the first request is the greeting, and is a call.
    Http1 {
        /// Time without a byte of a response after which a connection is closed. It covers slow requests and idle
        /// connections alike.
        answer_max: Duration,
    },
    /// HTTP/2. The preface is the greeting; the server says when a call is made: [`ConnectionInfo::called`].
    Http2 {
        /// Time from the greeting to the first call.
        first_call_max: Duration,
    },
}

/// Listener with a connection limit.
#[derive(Debug)]
pub struct BoundedListener<O: ConnectionObserver> {
    listener: TcpListener,
    admission: Arc<Admission>,
    protocol: Protocol,
    /// [`GREETING_MAX`].
    greeting_max: Duration,
    tls: TlsServer,
    observer: O,
    /// A connection for which there is no place yet.
    waiting: Option<(TcpStream, SocketAddr)>,
    greetings: JoinSet<Option<(BoundedConnection<O>, SocketAddr)>>,
}

impl<O: ConnectionObserver + Clone> BoundedListener<O> {
    /// Creates a listener with at most this number of connections.
    pub fn new(
        listener: TcpListener,
        connections_max: usize,
        protocol: Protocol,
        observer: O,
    ) -> BoundedListener<O> {
        let admission = Admission::new(connections_max);
        BoundedListener {
            listener,
            admission,
            protocol,
            greeting_max: GREETING_MAX,
            tls: TlsServer::plain(),
            observer,
            waiting: None,
            greetings: JoinSet::new(),
        }
    }

    /// Encrypts the connections. The handshake is the first part of the greeting.
    #[must_use]
    pub fn with_tls(self, tls: TlsServer) -> BoundedListener<O> {
        BoundedListener { tls, ..self }
    }

    /// Returns the next connection that has greeted.
    async fn next(&mut self) -> (BoundedConnection<O>, SocketAddr) {
        loop {
            let BoundedListener { listener, admission, observer, waiting, greetings, .. } = self;
            tokio::select! {
                Some(greeted) = greetings.join_next() => {
                    if let Ok(Some(greeted)) = greeted {
                        return greeted;
                    }
                }
                accepted = accept(listener, admission, observer, waiting) => {
                    let (protocol, tls, observer) = (self.protocol, self.tls.clone(), self.observer.clone());
                    self.greetings.spawn(greet(accepted, protocol, tls, self.greeting_max, observer));
                }
            }
        }
    }

    /// Converts the listener to a stream of connections, for tonic.
    pub fn into_stream(self) -> impl Stream<Item = io::Result<BoundedConnection<O>>> {
        stream::unfold(self, |mut listener| async {
            let (connection, _) = listener.next().await;
            Some((Ok(connection), listener))
        })
    }
}

/// Listener for axum.
impl<O: ConnectionObserver + Clone> axum::serve::Listener for BoundedListener<O> {
    type Io = BoundedConnection<O>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (BoundedConnection<O>, SocketAddr) {
        self.next().await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

// ---------------------------------------------------------------------------------------------------- accept

/// A connection with its place.
struct Accepted {
    socket: TcpStream,
    peer: SocketAddr,
    place: Place,
    evicted: Evicted,
}

/// Accepts the next connection that gets a place. Logs failures and retries. May be cancelled: a connection that waits for its
/// place remains in `waiting`.
async fn accept<O: ConnectionObserver>(
    listener: &TcpListener,
    admission: &Arc<Admission>,
    observer: &O,
    waiting: &mut Option<(TcpStream, SocketAddr)>,
) -> Accepted {
    loop {
        if waiting.is_none() {
            match listener.accept().await {
                Ok(accepted) => *waiting = Some(accepted),
                Err(error) => {
                    warn!(%error, "cannot accept connection");
                    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                    continue;
                }
            }
        }
        let freed = admission.freed();
        let Some((_, peer)) = waiting else { continue };
        match admission.admit(peer.ip()) {
            Ok((place, evicted)) => {
                let Some((socket, peer)) = waiting.take() else { continue };
                return Accepted { socket, peer, place, evicted };
            }
            Err(Refusal::Address) => {
                debug!(%peer, "connection refused: too many from its address");
                observer.refused();
                *waiting = None;
            }
            // Further ones wait in the kernel's queue.
            Err(Refusal::Full) => freed.await,
        }
    }
}

// -------------------------------------------------------------------------------------------------- greeting

/// Counts a connection as open.
#[derive(Debug)]
struct Opened<O: ConnectionObserver>(O);

impl<O: ConnectionObserver> Drop for Opened<O> {
    fn drop(&mut self) {
        self.0.closed();
    }
}

/// Receives the greeting. Returns the connection for the server, or nothing if it is to be closed.
async fn greet<O: ConnectionObserver>(
    accepted: Accepted,
    protocol: Protocol,
    tls: TlsServer,
    greeting_max: Duration,
    observer: O,
) -> Option<(BoundedConnection<O>, SocketAddr)> {
    let Accepted { socket, peer, place, mut evicted } = accepted;
    observer.opened();
    let opened = Opened(observer);
    // A connection that was reset already fails here.
    socket.set_nodelay(true).ok()?;
    let greeting = async {
        let mut socket = tls.accept(socket).await?;
        let read = read_greeting(&mut socket, protocol).await?;
        io::Result::Ok((socket, read))
    };
    let greeting = tokio::select! {
        biased;
        greeting = timeout(greeting_max, greeting) => greeting,
        () = &mut evicted => {
            debug!(%peer, "connection closed in favour of another one: no greeting");
            opened.0.refused();
            return None;
        }
    };
    let (socket, greeting) = match greeting {
        Ok(Ok(greeted)) => greeted,
        Ok(Err(error)) => {
            debug!(%peer, %error, "connection closed: no greeting");
            return None;
        }
        Err(_) => {
            debug!(%peer, "connection closed: no greeting within the time limit");
            return None;
        }
    };
    place.greeted();
    let info = ConnectionInfo { place: Arc::new(place), peer, caller: socket.caller() };
    let deadline = match protocol {
        Protocol::Http1 { answer_max } => {
            info.called();
            Deadline::Answer(answer_max, Box::pin(tokio::time::sleep(answer_max)))
        }
        Protocol::Http2 { first_call_max } => {
            Deadline::FirstCall(Box::pin(tokio::time::sleep(first_call_max)), evicted)
        }
    };
    Some((BoundedConnection { socket, opened, greeting, info, deadline }, peer))
}

/// Reads the greeting, and what comes with it.
async fn read_greeting(socket: &mut MaybeTls<TcpStream>, protocol: Protocol) -> io::Result<BytesMut> {
    let mut read = BytesMut::with_capacity(GREETING_BYTES);
    let mut searched = 0;
    loop {
        if socket.read_buf(&mut read).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match protocol {
            Protocol::Http2 { .. } => {
                let common = read.len().min(HTTP2_PREFACE.len());
                if read[..common] != HTTP2_PREFACE[..common] {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "no HTTP/2 preface"));
                }
                if common == HTTP2_PREFACE.len() {
                    return Ok(read);
                }
            }
            Protocol::Http1 { .. } => {
                if ends_head(&read[searched..]) {
                    return Ok(read);
                }
                if read.len() > HEAD_BYTES_MAX {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "head of the request is too long",
                    ));
                }
                // The end may have begun in these bytes.
                searched = read.len().saturating_sub(3);
            }
        }
    }
}

/// Returns whether bytes contain the empty line after the head of a request.
fn ends_head(bytes: &[u8]) -> bool {
    let after_newline = bytes.split(|&byte| byte == b'\n').skip(1);
    // The last part is not complete yet.
    let lines = bytes.iter().filter(|&&byte| byte == b'\n').count();
    after_newline.take(lines.saturating_sub(1)).any(|line| matches!(line, b"" | b"\r"))
}

// --------------------------------------------------------------------------------------------------- serving

/// What a server knows about a connection. It is among the extensions of each request of tonic.
#[derive(Clone, Debug)]
pub struct ConnectionInfo {
    place: Arc<Place>,
    peer: SocketAddr,
    caller: Caller,
}

impl ConnectionInfo {
    /// The client has made a call: its connection is not closed in favour of others any more.
    pub fn called(&self) {
        self.place.proven();
    }

    /// Address of the client.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Who the client is.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Place of the connection.
    pub fn place(&self) -> &Place {
        &self.place
    }
}

/// Until when a connection must have done something.
#[derive(Debug)]
enum Deadline {
    /// A byte of a response, which resets the timer.
    Answer(Duration, Pin<Box<Sleep>>),
    /// The first call.
    FirstCall(Pin<Box<Sleep>>, Evicted),
    None,
}

/// Connection that has greeted, with its place.
#[derive(Debug)]
pub struct BoundedConnection<O: ConnectionObserver> {
    socket: MaybeTls<TcpStream>,
    opened: Opened<O>,
    /// Bytes of the greeting that the server has not read yet.
    greeting: BytesMut,
    info: ConnectionInfo,
    deadline: Deadline,
}

impl<O: ConnectionObserver> BoundedConnection<O> {
    /// Fails if the connection is over its deadline, or has lost its place.
    fn check_deadline(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match &mut self.deadline {
            Deadline::None => Ok(()),
            Deadline::FirstCall(..) if self.info.place.is_proven() => {
                self.deadline = Deadline::None;
                Ok(())
            }
            Deadline::FirstCall(timer, evicted) => {
                if Pin::new(evicted).poll(cx).is_ready() {
                    self.opened.0.refused();
                    self.deadline = Deadline::None;
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                is_over(timer, cx)
            }
            Deadline::Answer(_, timer) => is_over(timer, cx),
        }
    }
}

fn is_over(timer: &mut Pin<Box<Sleep>>, cx: &mut Context<'_>) -> io::Result<()> {
    match timer.as_mut().poll(cx) {
        Poll::Pending => Ok(()),
        Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// The information of a connection for handlers of axum.
impl<O: ConnectionObserver + Clone>
    axum::extract::connect_info::Connected<axum::serve::IncomingStream<'_, BoundedListener<O>>>
    for ConnectionInfo
{
    fn connect_info(stream: axum::serve::IncomingStream<'_, BoundedListener<O>>) -> ConnectionInfo {
        stream.io().info.clone()
    }
}

#[cfg(feature = "grpc")]
impl<O: ConnectionObserver> tonic::transport::server::Connected for BoundedConnection<O> {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
        self.info.clone()
    }
}

impl<O: ConnectionObserver> AsyncRead for BoundedConnection<O> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if self.greeting.is_empty() {
            let read = Pin::new(&mut self.socket).poll_read(cx, buffer);
            // Bytes that are there do not save a connection that is over its deadline.
            self.check_deadline(cx)?;
            ready!(read)?;
        } else {
            let len = self.greeting.len().min(buffer.remaining());
            buffer.put_slice(&self.greeting[..len]);
            self.greeting.advance(len);
            if self.greeting.is_empty() {
                self.greeting = BytesMut::new();
            }
        }
        self.opened.0.read(buffer.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<O: ConnectionObserver> BoundedConnection<O> {
    /// Handles the result of a write.
    fn has_written(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let Poll::Ready(result) = result else {
            // A client that does not read is over its deadline as well.
            self.check_deadline(cx)?;
            return Poll::Pending;
        };
        let written = result?;
        self.opened.0.written(written);
        if let Deadline::Answer(max, timer) = &mut self.deadline {
            timer.as_mut().reset(Instant::now() + *max);
        }
        Poll::Ready(Ok(written))
    }
}

impl<O: ConnectionObserver> AsyncWrite for BoundedConnection<O> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.has_written(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, pieces);
        self.has_written(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
