//! Connections of gRPC clients, with TLS if the process has credentials.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use moontide_auth::{Credentials, ExpectedServer};
use tokio::net::TcpStream;
use tonic::codegen::http::Uri;
use tonic::transport::Endpoint;
pub use tonic::transport::{Channel, Error as ConnectError};
use tower_service::Service;

use crate::tls::{ALPN_GRPC, MaybeTls, TlsClient};

/// Connects to a master within `timeout`. `window_bytes` may be in flight on each stream.
///
/// # Errors
/// If the address is invalid, no server accepts the connection, or it is no master of this cluster.
pub async fn connect(
    address: &str,
    timeout: Duration,
    window_bytes: u32,
    credentials: Option<&Arc<Credentials>>,
) -> Result<Channel, ConnectError> {
    let endpoint = endpoint(address, timeout)?.initial_stream_window_size(window_bytes);
    endpoint.connect_with_connector(Connector::new(credentials)).await
}

/// Returns a connection to a master that is made when it is first used.
///
/// # Errors
/// If the address is invalid.
pub fn connect_lazy(
    address: &str,
    timeout: Duration,
    credentials: Option<&Arc<Credentials>>,
) -> Result<Channel, ConnectError> {
    Ok(endpoint(address, timeout)?.connect_with_connector_lazy(Connector::new(credentials)))
}

fn endpoint(address: &str, timeout: Duration) -> Result<Endpoint, ConnectError> {
    // The scheme says nothing about TLS: the connector decides.
    Ok(Endpoint::from_shared(format!("http://{address}"))?.connect_timeout(timeout))
}

/// Opens the stream of a connection.
#[derive(Clone, Debug)]
struct Connector(TlsClient);

impl Connector {
    fn new(credentials: Option<&Arc<Credentials>>) -> Connector {
        Connector(TlsClient::new(credentials.cloned(), ExpectedServer::Master, ALPN_GRPC))
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<MaybeTls<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let tls = self.0.clone();
        Box::pin(async move {
            let host = uri.host().unwrap_or_default();
            let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            let stream = TcpStream::connect((host, uri.port_u16().unwrap_or(80))).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(tls.connect(stream).await?))
        })
    }
}
