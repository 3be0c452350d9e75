//! [`MaybeTls`]: a stream of tokio that is encrypted if this process has credentials.
//!
//! [`TlsServer`] and [`TlsClient`] make one from a connected stream, by a handshake with the current certificate. A connection without
//! TLS has the same type, so that servers and clients are written once.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use moontide_auth::{Caller, ClientCertificates, Credentials, ExpectedServer, Identity, peer_identity};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use tracing::{debug, info};

/// Protocol of gRPC over TLS.
pub const ALPN_GRPC: &[u8] = b"h2";

/// Protocol of admin pages over TLS.
pub const ALPN_HTTP: &[u8] = b"http/1.1";

/// A stream with or without encryption.
pub enum MaybeTls<S> {
    /// Bytes as they are.
    Plain(S),
    /// Encrypted, and the identity of the peer, if it has a certificate.
    Tls(Box<TlsStream<S>>, Option<Arc<Identity>>),
}

impl<S> fmt::Debug for MaybeTls<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MaybeTls::Plain(_) => f.write_str("Plain"),
            MaybeTls::Tls(_, peer) => f.debug_tuple("Tls").field(peer).finish(),
        }
    }
}

impl<S> MaybeTls<S> {
    /// Returns the identity of the peer; `None` without TLS, and for a client without a certificate.
    pub fn peer(&self) -> Option<&Arc<Identity>> {
        match self {
            MaybeTls::Plain(_) => None,
            MaybeTls::Tls(_, peer) => peer.as_ref(),
        }
    }

    /// Returns who the peer of a server is.
    pub fn caller(&self) -> Caller {
        Caller::of_connection(matches!(self, MaybeTls::Tls(..)), self.peer())
    }

    /// Returns the stream, if its bytes are not encrypted.
    pub fn plain(&self) -> Option<&S> {
        match self {
            MaybeTls::Plain(stream) => Some(stream),
            MaybeTls::Tls(..) => None,
        }
    }

    /// Returns the stream that carries the bytes.
    pub fn get_ref(&self) -> &S {
        match self {
            MaybeTls::Plain(stream) => stream,
            MaybeTls::Tls(stream, _) => stream.get_ref().0,
        }
    }
}

/// Accepts connections of clients.
#[derive(Clone, Debug)]
pub struct TlsServer {
    /// `None`: no TLS.
    credentials: Option<Arc<Credentials>>,
    clients: ClientCertificates,
    alpn: &'static [u8],
}

impl TlsServer {
    /// Creates a server that speaks the protocol `alpn` over TLS, or without TLS if there are no credentials.
    pub fn new(
        credentials: Option<Arc<Credentials>>,
        clients: ClientCertificates,
        alpn: &'static [u8],
    ) -> TlsServer {
        TlsServer { credentials, clients, alpn }
    }

    /// Creates a server without TLS.
    pub fn plain() -> TlsServer {
        TlsServer { credentials: None, clients: ClientCertificates::Required, alpn: b"" }
    }

    /// Returns whether connections are encrypted.
    pub fn is_tls(&self) -> bool {
        self.credentials.is_some()
    }

    /// Runs the handshake of a connection. The caller limits its time. A refused client is logged: it learns little itself.
    ///
    /// # Errors
    /// If the client is refused, or the connection breaks.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<MaybeTls<S>> {
        let Some(credentials) = &self.credentials else { return Ok(MaybeTls::Plain(stream)) };
        let config = credentials.server(self.clients, &[self.alpn]);
        let accepted = TlsAcceptor::from(config).accept(stream).await;
        let stream = accepted.inspect_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => info!(%error, "client refused: TLS failed"),
            _ => debug!(%error, "connection ended in its handshake"),
        })?;
        let peer = peer_identity(stream.get_ref().1).map(Arc::new);
        Ok(MaybeTls::Tls(Box::new(TlsStream::Server(stream)), peer))
    }
}

/// Connects to servers.
#[derive(Clone, Debug)]
pub struct TlsClient {
    /// `None`: no TLS.
    credentials: Option<Arc<Credentials>>,
    server: ExpectedServer,
    alpn: &'static [u8],
}

impl TlsClient {
    /// Creates a client that speaks the protocol `alpn` over TLS, or without TLS if there are no credentials.
    pub fn new(
        credentials: Option<Arc<Credentials>>,
        server: ExpectedServer,
        alpn: &'static [u8],
    ) -> TlsClient {
        TlsClient { credentials, server, alpn }
    }

    /// Runs the handshake of a connection. The caller limits its time.
    ///
    /// # Errors
    /// If the server is not the expected one, does not speak TLS, or refuses at once. A refusal of the certificate of this process
    /// is seen only by the first read.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<MaybeTls<S>> {
        let Some(credentials) = &self.credentials else { return Ok(MaybeTls::Plain(stream)) };
        let config = credentials.client(self.server, &[self.alpn]);
        // Not sent, and not compared: the identity in the certificate is.
        let name = ServerName::try_from("moontide").expect("a valid name");
        let stream = TlsConnector::from(config).connect(name, stream).await?;
        let peer = peer_identity(stream.get_ref().1).map(Arc::new);
        Ok(MaybeTls::Tls(Box::new(TlsStream::Client(stream)), peer))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for MaybeTls<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            MaybeTls::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            MaybeTls::Tls(stream, _) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for MaybeTls<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            MaybeTls::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            MaybeTls::Tls(stream, _) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            MaybeTls::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
            MaybeTls::Tls(stream, _) => Pin::new(stream).poll_write_vectored(cx, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            MaybeTls::Plain(stream) => stream.is_write_vectored(),
            MaybeTls::Tls(stream, _) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            MaybeTls::Plain(stream) => Pin::new(stream).poll_flush(cx),
            MaybeTls::Tls(stream, _) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            MaybeTls::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            MaybeTls::Tls(stream, _) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use moontide_auth::Role;
    use moontide_auth::testing::{Authority, Directory};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const ALPN: &[u8] = b"test";

    fn credentials(
        directory: &Directory,
        authority: &Authority,
        name: &str,
        role: Role,
    ) -> Option<Arc<Credentials>> {
        Some(Credentials::load(authority.issue(directory, name, role)).unwrap())
    }

    #[tokio::test]
    async fn stream_carries_bytes_and_identities_with_and_without_tls() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let of = |name: &str, role| credentials(&directory, &authority, name, role);
        for (master, client) in [(None, None), (of("m", Role::Master), of("c", Role::Operator))] {
            let (near, far) = tokio::io::duplex(4096);
            let server = TlsServer::new(master.clone(), ClientCertificates::Required, ALPN);
            let client = TlsClient::new(client, ExpectedServer::Master, ALPN);
            let (near, far) = tokio::join!(client.connect(near), server.accept(far));
            let (mut near, mut far) = (near.unwrap(), far.unwrap());
            let roles = [&near, &far].map(|stream| stream.peer().map(|peer| peer.role().clone()));
            let expected = master.map_or([None, None], |_| [Some(Role::Master), Some(Role::Operator)]);
            assert_eq!(roles, expected);
            let sent: Vec<u8> = (0..100_000u32).map(|n| (n / 7) as u8).collect();
            let mut got = vec![0; sent.len()];
            let (wrote, read) = tokio::join!(
                async {
                    near.write_all(&sent).await?;
                    near.flush().await
                },
                far.read_exact(&mut got)
            );
            wrote.unwrap();
            read.unwrap();
            assert_eq!(got, sent);
        }
    }

    #[tokio::test]
    async fn peer_without_tls_or_with_another_protocol_is_refused() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let of = |name: &str, role| credentials(&directory, &authority, name, role);
        let server = TlsServer::new(of("m", Role::Master), ClientCertificates::Required, ALPN);
        let (mut near, far) = tokio::io::duplex(4096);
        near.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        assert_eq!(server.accept(far).await.unwrap_err().kind(), io::ErrorKind::InvalidData);

        let (near, far) = tokio::io::duplex(4096);
        let other = TlsClient::new(of("c", Role::Operator), ExpectedServer::Master, ALPN_GRPC);
        let (near, far) = tokio::join!(other.connect(near), server.accept(far));
        assert!(far.is_err() && near.unwrap_err().to_string().contains("NoApplicationProtocol"));
    }
}
