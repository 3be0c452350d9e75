//! Minimal HTTP client for one GET of an admin endpoint: one request, one connection, one deadline, with or without TLS.
//!
//! It uses HTTP/1.0: a response ends after its content length or at the end of the connection. That is enough for the
//! admin endpoints of Moontide processes. It supports no redirects and no proxies.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use moontide_auth::rustls::pki_types::ServerName;
use moontide_auth::rustls::{ClientConnection, StreamOwned};
use moontide_auth::{Credentials, ExpectedServer};

/// Protocol of admin pages over TLS.
const ALPN: &[u8] = b"http/1.1";

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
    #[error("{address} did not respond to {path} ({source}); see the log of the process")]
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
    /// The server uses TLS, and the request had none.
    #[error(
        "{address} uses TLS; set ca, cert and key (MOONTIDE_CA, MOONTIDE_CERT, MOONTIDE_KEY) to the files of an operator's \
         certificate, and write the address without http://"
    )]
    NeedsCertificate {
        /// Address of the server.
        address: String,
    },
    /// The handshake of TLS failed.
    #[error(
        "no TLS with {address} ({source}); check ca, cert and key, or write http:// before the address if the process has \
         no certificate"
    )]
    Tls {
        /// Address of the server.
        address: String,
        /// Reason.
        source: std::io::Error,
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

/// Fetches `path` without TLS from `address`, which is `host:port` with or without a leading `http://`.
pub fn get(address: &str, path: &str, timeout: Duration) -> Result<Vec<u8>, HttpError> {
    get_as(None, address, path, timeout)
}

/// Fetches `path` from `address`, which is `host:port` with or without a leading `http://` or `https://`. Without a scheme it uses
/// TLS if there are credentials. With TLS the server must be a master or a node of the own cluster.
pub fn get_as(
    credentials: Option<&Credentials>,
    address: &str,
    path: &str,
    timeout: Duration,
) -> Result<Vec<u8>, HttpError> {
    let deadline = Instant::now() + timeout;
    let (credentials, address) = match (address.strip_prefix("http://"), address.strip_prefix("https://")) {
        (Some(rest), _) => (None, rest.trim_end_matches('/')),
        (_, Some(rest)) if credentials.is_none() => {
            return Err(HttpError::NeedsCertificate { address: rest.trim_end_matches('/').to_owned() });
        }
        (_, rest) => (credentials, rest.unwrap_or(address).trim_end_matches('/')),
    };
    let unreachable = |source| HttpError::Unreachable { address: address.to_owned(), source };
    let broken = |source| HttpError::Broken { address: address.to_owned(), path: path.to_owned(), source };
    let mut stream = TimedStream { stream: connect(address, deadline).map_err(unreachable)?, deadline };
    let response = match credentials {
        None => exchange(&mut stream, address, path).map_err(broken)?,
        Some(credentials) => {
            let mut stream = handshake(credentials, stream)
                .map_err(|source| HttpError::Tls { address: address.to_owned(), source })?;
            exchange(&mut stream, address, path).map_err(broken)?
        }
    };
    body_of(response, address, path, credentials.is_some())
}

/// Runs the handshake of TLS.
fn handshake(
    credentials: &Credentials,
    stream: TimedStream,
) -> std::io::Result<StreamOwned<ClientConnection, TimedStream>> {
    let config = credentials.client(ExpectedServer::MasterOrNode, &[ALPN]);
    // Not sent, and not compared: the identity in the certificate is.
    let name = ServerName::try_from("moontide").expect("a valid name");
    let connection = ClientConnection::new(config, name).map_err(std::io::Error::other)?;
    let mut stream = StreamOwned::new(connection, stream);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    Ok(stream)
}

/// Sends a request and returns the response, until the server closes the connection.
fn exchange(stream: &mut (impl Read + Write), address: &str, path: &str) -> std::io::Result<Vec<u8>> {
    let request = format!(
        "GET {path} HTTP/1.0\r\nHost: {address}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes())?;
    stream.flush()?;
    let mut response = vec![];
    let mut chunk = [0; 64 << 10];
    loop {
        let n = match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // A server that closes with unread request bytes resets the connection. The bytes before it are valid.
            Err(error) if error.kind() == ErrorKind::ConnectionReset && !response.is_empty() => break,
            Err(error) => return Err(error),
        };
        if response.len() + n > RESPONSE_BYTES_MAX {
            return Err(std::io::Error::other("response is longer than 64 MiB"));
        }
        response.extend_from_slice(&chunk[..n]);
    }
    Ok(response)
}

/// Returns the body of a response.
fn body_of(mut response: Vec<u8>, address: &str, path: &str, is_tls: bool) -> Result<Vec<u8>, HttpError> {
    let Some((status, length, body_at)) = parse_head(&response) else {
        return Err(match response.starts_with(TLS_ALERT) && !is_tls {
            true => HttpError::NeedsCertificate { address: address.to_owned() },
            false => HttpError::NotHttp { address: address.to_owned() },
        });
    };
    let body = response.split_off(body_at);
    if status != 200 {
        let text: String = String::from_utf8_lossy(&body).chars().take(500).collect();
        return Err(HttpError::Status { address: address.to_owned(), path: path.to_owned(), status, text });
    }
    if length.is_some_and(|length| body.len() < length) {
        let source = ErrorKind::UnexpectedEof.into();
        return Err(HttpError::Broken { address: address.to_owned(), path: path.to_owned(), source });
    }
    Ok(body)
}

/// First bytes of the answer of a TLS server to bytes that are not TLS: the type of an alert, and the version of all records.
const TLS_ALERT: &[u8] = &[21, 3];

/// A socket whose reads and writes end at a deadline.
#[derive(Debug)]
struct TimedStream {
    stream: TcpStream,
    deadline: Instant,
}

impl Read for TimedStream {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.stream.set_read_timeout(Some(left(self.deadline)?))?;
        self.stream.read(into)
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(Some(left(self.deadline)?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
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
    use moontide_auth::rustls::ServerConnection;
    use moontide_auth::testing::{Authority, Directory};
    use moontide_auth::{ClientCertificates, Role};
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

    /// Starts a TLS server that answers one request; returns its address.
    fn serve_once_over_tls(credentials: &Credentials) -> String {
        let config = credentials.server(ClientCertificates::Required, &[ALPN]);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut connection = ServerConnection::new(config).unwrap();
            while connection.is_handshaking() {
                if connection.complete_io(&mut stream).is_err() {
                    // The alert, which tells the client why.
                    let _ = connection.write_tls(&mut stream);
                    return;
                }
            }
            let mut tls = StreamOwned::new(connection, stream);
            let mut request = [0; 1024];
            let _ = tls.read(&mut request);
            let _ = tls.write_all(b"HTTP/1.0 200 OK\r\n\r\nsecret");
            tls.conn.send_close_notify();
            let _ = tls.flush();
        });
        address
    }

    #[test]
    fn page_over_tls_needs_credentials_and_a_server_of_the_cluster() {
        let (directory, authority) = (Directory::new(), Authority::new());
        let load = |authority: &Authority, name: &str, role| {
            Credentials::load(authority.issue(&directory, name, role)).unwrap()
        };
        let master = load(&authority, "master", Role::Master);
        let operator = load(&authority, "operator", Role::Operator);
        let other = load(&Authority::new(), "other", Role::Operator);
        let time = Duration::from_secs(20);
        let page = |credentials: Option<&Credentials>, scheme: &str| {
            let address = format!("{scheme}{}", serve_once_over_tls(&master));
            get_as(credentials, &address, "/segments", time)
        };
        for scheme in ["", "https://"] {
            assert_eq!(page(Some(&operator), scheme).unwrap(), b"secret");
        }
        for (credentials, scheme) in
            [(None, ""), (None, "http://"), (None, "https://"), (Some(&*operator), "http://")]
        {
            let error = page(credentials, scheme).unwrap_err();
            assert!(matches!(error, HttpError::NeedsCertificate { .. }), "{scheme}: {error}");
            assert!(error.to_string().contains("MOONTIDE_CERT"), "{error}");
        }
        let error = page(Some(&other), "").unwrap_err();
        assert!(
            matches!(error, HttpError::Tls { .. }) && error.to_string().contains("UnknownIssuer"),
            "{error}"
        );
        let tenant = serve_once_over_tls(&load(&authority, "tenant", Role::Tenant("acme".into())));
        let error = get_as(Some(&operator), &tenant, "/", time).unwrap_err().to_string();
        assert!(error.contains("expected a master or a node"), "{error}");
        let plain = serve_once(b"HTTP/1.0 200 OK\r\n\r\n{}");
        let error = get_as(Some(&operator), &plain, "/", time).unwrap_err().to_string();
        assert!(error.contains("write http:// before the address"), "{error}");
        let plain = format!("http://{}", serve_once(b"HTTP/1.0 200 OK\r\n\r\n{}"));
        assert_eq!(get_as(Some(&operator), &plain, "/", time).unwrap(), b"{}");
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
