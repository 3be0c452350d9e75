//! Connections of the doors that others implement (gRPC, HTTP), as many as allowed: [`SeatedListener`] does not accept
//! while there is no seat, so that the kernel's queue holds the rest. [`Seated`] counts bytes, and closes connections
//! that say nothing for too long where that is wanted.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;
use tonic::transport::server::{Connected, TcpConnectInfo};
use tracing::warn;

use crate::metrics::DoorCounters;

/// A listener with a bound.
pub(crate) struct SeatedListener {
    listener: TcpListener,
    seats: Arc<Semaphore>,
    counters: Arc<DoorCounters>,
    idle_max: Option<Duration>,
}

impl SeatedListener {
    pub(crate) fn new(
        listener: TcpListener,
        connections_max: usize,
        counters: Arc<DoorCounters>,
        idle_max: Option<Duration>,
    ) -> SeatedListener {
        SeatedListener { listener, seats: Arc::new(Semaphore::new(connections_max)), counters, idle_max }
    }

    /// The next connection. Failures are logged, and tried again.
    async fn next(&self) -> (Seated, SocketAddr) {
        let seat = Arc::clone(&self.seats).acquire_owned().await.expect("seats are never closed");
        loop {
            let accepted = self.listener.accept().await;
            match accepted.and_then(|(socket, peer)| socket.set_nodelay(true).map(|()| (socket, peer))) {
                Ok((socket, peer)) => {
                    self.counters.opened();
                    let idle = self.idle_max.map(|max| (max, Box::pin(tokio::time::sleep(max))));
                    let counters = Arc::clone(&self.counters);
                    return (Seated { socket, counters, idle, _seat: seat }, peer);
                }
                Err(error) => {
                    // Out of descriptors or memory: it would fail again at once.
                    warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// All connections, as tonic wants them.
    pub(crate) fn into_stream(self) -> impl Stream<Item = io::Result<Seated>> {
        stream::unfold(self, |listener| async {
            let (connection, _) = listener.next().await;
            Some((Ok(connection), listener))
        })
    }
}

/// As axum wants them.
impl axum::serve::Listener for SeatedListener {
    type Io = Seated;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Seated, SocketAddr) {
        self.next().await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with its seat.
pub(crate) struct Seated {
    socket: TcpStream,
    counters: Arc<DoorCounters>,
    /// How long nothing may be read, and when that time is over.
    idle: Option<(Duration, Pin<Box<Sleep>>)>,
    _seat: OwnedSemaphorePermit,
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.counters.closed();
    }
}

impl Connected for Seated {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.socket.connect_info()
    }
}

impl AsyncRead for Seated {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.socket).poll_read(cx, buffer) {
            Poll::Ready(result) => {
                self.counters.read(buffer.filled().len() - before);
                if let Some((max, timer)) = &mut self.idle {
                    timer.as_mut().reset(Instant::now() + *max);
                }
                Poll::Ready(result)
            }
            Poll::Pending => {
                let Some((_, timer)) = &mut self.idle else { return Poll::Pending };
                ready!(timer.as_mut().poll(cx));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl AsyncWrite for Seated {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.socket).poll_write(cx, bytes))?;
        self.counters.written(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.socket).poll_write_vectored(cx, pieces))?;
        self.counters.written(written);
        Poll::Ready(Ok(written))
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
