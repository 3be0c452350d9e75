//! [`BoundedListener`] does not accept at its limit of connections, so that further ones wait in the kernel's queue.
//! [`BoundedConnection`] reports its bytes to a [`ConnectionObserver`], and optionally closes when it is idle.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tracing::warn;

/// Wait after a failed accept, for example without free descriptors: an immediate retry would fail again.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Counts connections and their bytes. `()` counts nothing.
pub trait ConnectionObserver: Send + Sync + Unpin + 'static {
    /// A connection was accepted.
    fn opened(&self) {}

    /// A connection was closed.
    fn closed(&self) {}

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

    fn read(&self, bytes: usize) {
        O::read(self, bytes);
    }

    fn written(&self, bytes: usize) {
        O::written(self, bytes);
    }
}

/// Listener with a connection limit.
#[derive(Debug)]
pub struct BoundedListener<O> {
    listener: TcpListener,
    permits: Arc<Semaphore>,
    observer: O,
    idle_max: Option<Duration>,
}

impl<O: ConnectionObserver + Clone> BoundedListener<O> {
    /// Creates a listener. `idle_max`: time without received bytes after which a connection is closed.
    pub fn new(
        listener: TcpListener,
        connections_max: usize,
        observer: O,
        idle_max: Option<Duration>,
    ) -> BoundedListener<O> {
        BoundedListener { listener, permits: Arc::new(Semaphore::new(connections_max)), observer, idle_max }
    }

    /// Returns the next connection. Logs failures and retries.
    async fn next(&self) -> (BoundedConnection<O>, SocketAddr) {
        let permit = Arc::clone(&self.permits).acquire_owned().await.expect("the semaphore is never closed");
        loop {
            let accepted = self.listener.accept().await;
            match accepted.and_then(|(socket, peer)| socket.set_nodelay(true).map(|()| (socket, peer))) {
                Ok((socket, peer)) => {
                    self.observer.opened();
                    let idle = self.idle_max.map(|max| (max, Box::pin(tokio::time::sleep(max))));
                    let observer = self.observer.clone();
                    return (BoundedConnection { socket, observer, idle, _permit: permit }, peer);
                }
                Err(error) => {
                    warn!(%error, "cannot accept connection");
                    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            }
        }
    }

    /// Converts the listener to a stream of connections, for tonic.
    pub fn into_stream(self) -> impl Stream<Item = io::Result<BoundedConnection<O>>> {
        stream::unfold(self, |listener| async {
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

/// Connection with its permit.
#[derive(Debug)]
pub struct BoundedConnection<O: ConnectionObserver> {
    socket: TcpStream,
    observer: O,
    /// Idle timeout and its timer; every read resets the timer.
    idle: Option<(Duration, Pin<Box<Sleep>>)>,
    _permit: OwnedSemaphorePermit,
}

impl<O: ConnectionObserver> Drop for BoundedConnection<O> {
    fn drop(&mut self) {
        self.observer.closed();
    }
}

#[cfg(feature = "grpc")]
impl<O: ConnectionObserver> tonic::transport::server::Connected for BoundedConnection<O> {
    type ConnectInfo = tonic::transport::server::TcpConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.socket.connect_info()
    }
}

impl<O: ConnectionObserver> AsyncRead for BoundedConnection<O> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.socket).poll_read(cx, buffer) {
            Poll::Ready(result) => {
                self.observer.read(buffer.filled().len() - before);
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

impl<O: ConnectionObserver> AsyncWrite for BoundedConnection<O> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.socket).poll_write(cx, bytes))?;
        self.observer.written(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.socket).poll_write_vectored(cx, pieces))?;
        self.observer.written(written);
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::serve::Listener;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[derive(Clone, Default)]
    struct Counts(Arc<[AtomicUsize; 3]>);

    impl Counts {
        fn get(&self) -> [usize; 3] {
            [0, 1, 2].map(|at| self.0[at].load(Ordering::Relaxed))
        }
    }

    impl ConnectionObserver for Counts {
        fn opened(&self) {
            self.0[0].fetch_add(1, Ordering::Relaxed);
        }

        fn closed(&self) {
            self.0[0].fetch_sub(1, Ordering::Relaxed);
        }

        fn read(&self, bytes: usize) {
            self.0[1].fetch_add(bytes, Ordering::Relaxed);
        }

        fn written(&self, bytes: usize) {
            self.0[2].fetch_add(bytes, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn connection_over_limit_is_accepted_after_another_is_closed() {
        let (counts, listener) = (Counts::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let mut listener = BoundedListener::new(listener, 1, counts.clone(), None);
        let address = listener.local_addr().unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        let (mut first, _) = listener.accept().await;
        let _second = TcpStream::connect(address).await.unwrap();
        let pause = Duration::from_millis(50);
        assert!(tokio::time::timeout(pause, listener.accept()).await.is_err(), "the limit is reached");
        client.write_all(b"hello").await.unwrap();
        let mut heard = [0; 5];
        first.read_exact(&mut heard).await.unwrap();
        first.write_all(b"hi").await.unwrap();
        assert_eq!((&heard, counts.get()), (b"hello", [1, 5, 2]));
        drop(first);
        assert_eq!(counts.get()[0], 0);
        listener.accept().await;
    }

    #[tokio::test]
    async fn idle_connection_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut listener = BoundedListener::new(listener, 1, (), Some(Duration::from_millis(20)));
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut connection, _) = listener.accept().await;
        let error = connection.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
