//! Connections of gRPC clients.

use std::time::Duration;

use tonic::transport::Endpoint;
pub use tonic::transport::{Channel, Error as ConnectError};

/// Connects to a server within `timeout`. `window_bytes` may be in flight on each stream.
///
/// # Errors
/// If the address is invalid, or no server accepts the connection.
pub async fn connect(address: &str, timeout: Duration, window_bytes: u32) -> Result<Channel, ConnectError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    endpoint
        .tcp_nodelay(true)
        .connect_timeout(timeout)
        .initial_stream_window_size(window_bytes)
        .connect()
        .await
}
