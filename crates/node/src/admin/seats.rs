//! Connections of the page for operators, as many as allowed: [`SeatedListener`] does not accept while there is no seat,
//! so that the kernel's queue holds the rest, and closes connections that say nothing for too long.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tracing::warn;

/// A few scrapers, probes and people.
const CONNECTIONS_MAX: usize = 64;

/// A connection that says nothing for so long is closed: it takes a seat.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// How long to wait when there are no descriptors: it would fail again at once.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// A listener with a bound.
pub(super) struct SeatedListener {
    listener: TcpListener,
    seats: Arc<Semaphore>,
}

impl SeatedListener {
    pub(super) fn new(listener: TcpListener) -> SeatedListener {
        SeatedListener { listener, seats: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

impl axum::serve::Listener for SeatedListener {
    type Io = Seated;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Seated, SocketAddr) {
        let seat = Arc::clone(&self.seats).acquire_owned().await.expect("seats are never closed");
        loop {
            match self.listener.accept().await {
                Ok((socket, peer)) => {
                    let idle = Box::pin(tokio::time::sleep(IDLE_MAX));
                    return (Seated { socket, idle, _seat: seat }, peer);
                }
                Err(error) => {
                    warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with its seat.
pub(super) struct Seated {
    socket: TcpStream,
    /// When it has said nothing for too long.
    idle: Pin<Box<Sleep>>,
    _seat: OwnedSemaphorePermit,
}

impl AsyncRead for Seated {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.socket).poll_read(cx, buffer) {
            Poll::Ready(result) => {
                self.idle.as_mut().reset(Instant::now() + IDLE_MAX);
                Poll::Ready(result)
            }
            Poll::Pending => {
                ready!(self.idle.as_mut().poll(cx));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl AsyncWrite for Seated {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
