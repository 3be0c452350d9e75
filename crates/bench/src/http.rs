//! Minimal HTTP client for one GET of an admin endpoint: one request, one connection, one deadline.
//!
//! It uses HTTP/1.0: a response ends after its content length or at the end of the connection. That is enough for the
//! admin endpoints of Moontide processes. It supports no redirects, no TLS and no proxies.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Maximum length of a response. The listing of a segment with 100,000 records is about 30 MB.
const RESPONSE_BYTES_MAX: usize = 64 << 20;

/// Error of [`get`].
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The connection could not be established.
    #[error(
        "{address} cannot be reached ({source}); check that the process runs and that this is its admin address"
    )]
    Unreachable {
        /// Address of the server.
        address: String,
        /// Error of the connect.
        source: std::io::Error,
    },
    /// The connection failed, or the response did not arrive before the deadline.
    #[error("{address} did not response {path} ({source}); see the log of the process")]
    Broken {
        /// Address of the server.
        address: String,
        /// Requested path.
        path: String,
        /// Error of the connection.
        source: std::io::Error,
    },
    /// The response is not HTTP.
    #[error("{address} is not an HTTP server; use the address that the process printed after `admin`")]
    NotHttp {
        /// Address of the server.
        address: String,
    },
    /// The response has a status other than 200.
    #[error("{address} answered {path} with {status}: {text}")]
    Status {
        /// Address of the server.
        address: String,
        /// Requested path.
        path: String,
        /// Status code.
        status: u16,
        /// First 500 characters of the body.
        text: String,
    },
}

/// Fetches `path` from `address`, which is `host:port` with or without a leading `http://`.
pub fn get(address: &str, path: &str, timeout: Duration) -> Result<Vec<u8>, HttpError> {
    let deadline = Instant::now() + timeout;
    let address = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
    let unreachable = |source| HttpError::Unreachable { address: address.to_owned(), source };
    let broken = |source| HttpError::Broken { address: address.to_owned(), path: path.to_owned(), source };
    let mut stream = connect(address, deadline).map_err(unreachable)?;
    stream.set_write_timeout(Some(left(deadline).map_err(broken)?)).map_err(broken)?;
    let request = format!(
        "GET {path} HTTP/1.0\r\nHost: {address}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).map_err(broken)?;
    let mut response = vec![];
    let mut chunk = [0; 64 << 10];
    loop {
        stream.set_read_timeout(Some(left(deadline).map_err(broken)?)).map_err(broken)?;
        let n = match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // A server that closes with unread request bytes resets the connection. The bytes before it are valid.
            Err(error) if error.kind() == ErrorKind::ConnectionReset && !response.is_empty() => break,
            Err(error) => return Err(broken(error)),
        };
        if response.len() + n > RESPONSE_BYTES_MAX {
            return Err(broken(std::io::Error::other("response is longer than 64 MiB")));
        }
        response.extend_from_slice(&chunk[..n]);
    }
    let (status, length, body_at) =
        parse_head(&response).ok_or_else(|| HttpError::NotHttp { address: address.to_owned() })?;
    let body = response.split_off(body_at);
    if status != 200 {
        let text: String = String::from_utf8_lossy(&body).chars().take(500).collect();
        return Err(HttpError::Status { address: address.to_owned(), path: path.to_owned(), status, text });
    }
    if length.is_some_and(|length| body.len() < length) {
        return Err(broken(ErrorKind::UnexpectedEof.into()));
    }
    Ok(body)
}

fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Connects to the first address of the name that accepts before `deadline`.
pub fn connect(address: &str, deadline: Instant) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, "name resolves to no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns the status, the content length if the head has one, and the offset of the body.
fn parse_head(response: &[u8]) -> Option<(u16, Option<usize>, usize)> {
    let end = response.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&response[..end]).ok()?;
    let mut lines = head.split("\r\n");
    let mut first = lines.next()?.split(' ');
    first.next().filter(|version| version.starts_with("HTTP/1."))?;
    let status = first.next()?.parse().ok()?;
    let length = lines
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse().ok());
    Some((status, length, end + 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Starts a server that answers one request with `bytes`; returns its address.
    fn serve_once(bytes: &'static [u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(bytes);
        });
        address
    }

    fn fetch(bytes: &'static [u8]) -> Result<Vec<u8>, HttpError> {
        get(&serve_once(bytes), "/segments", Duration::from_secs(5))
    }

    #[test]
    fn get_returns_complete_body() {
        assert_eq!(fetch(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap(), b"{}");
        assert_eq!(fetch(b"HTTP/1.1 200 OK\r\n\r\nuntil the end").unwrap(), b"until the end");
    }

    #[test]
    fn bad_status_non_http_and_short_body_are_distinct_errors() {
        assert!(matches!(
            fetch(b"HTTP/1.0 404 Not Found\r\n\r\nno"),
            Err(HttpError::Status { status: 404, .. })
        ));
        assert!(matches!(fetch(b"SSH-2.0-OpenSSH_9.6\r\n"), Err(HttpError::NotHttp { .. })));
        assert!(matches!(
            fetch(b"HTTP/1.0 200 OK\r\ncontent-length: 9\r\n\r\n{}"),
            Err(HttpError::Broken { .. })
        ));
        assert!(matches!(fetch(b""), Err(HttpError::NotHttp { .. })));
    }

    #[test]
    fn silent_server_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let started = Instant::now();
        let response = get(&address, "/", Duration::from_millis(100));
        assert!(matches!(response, Err(HttpError::Broken { .. })), "{response:?}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}
