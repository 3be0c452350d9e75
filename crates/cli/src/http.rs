//! A GET of one page of an operators' door, by hand: one request, one connection, one deadline.
//!
//! It speaks HTTP/1.0, in which an answer ends where its length says or where the connection ends; nothing else is
//! needed for pages of our own processes. Not a general client: no redirects, no TLS, no proxies.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Longest answer that is taken: a segment's listing with a hundred thousand records is some 30 MB.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Why a page could not be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    /// Nobody is there.
    #[error(
        "{address} cannot be reached ({source}); check that the process runs and that this is its admin address"
    )]
    Unreachable {
        /// Where it was tried.
        address: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The connection broke, or the answer took too long.
    #[error("{address} did not answer {path} ({source}); look at the log of the process")]
    Broken {
        /// Who was asked.
        address: String,
        /// For what.
        path: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// Something answered that is not HTTP.
    #[error("{address} does not speak HTTP; give the address that the process printed behind `admin`")]
    NotHttp {
        /// Who was asked.
        address: String,
    },
    /// An answer other than 200.
    #[error("{address} answered {path} with {status}: {text}")]
    Status {
        /// Who was asked.
        address: String,
        /// For what.
        path: String,
        /// What it said.
        status: u16,
        /// The beginning of its words.
        text: String,
    },
}

/// Fetches a page from `address`, which is `host:port` with or without `http://` in front.
pub(crate) fn get(address: &str, path: &str, within: Duration) -> Result<Vec<u8>, HttpError> {
    let deadline = Instant::now() + within;
    let address = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
    let unreachable = |source| HttpError::Unreachable { address: address.to_owned(), source };
    let broken = |source| HttpError::Broken { address: address.to_owned(), path: path.to_owned(), source };
    let mut stream = connect(address, deadline).map_err(unreachable)?;
    stream.set_write_timeout(Some(left(deadline).map_err(broken)?)).map_err(broken)?;
    let request = format!(
        "GET {path} HTTP/1.0\r\nHost: {address}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).map_err(broken)?;
    let mut answer = vec![];
    let mut chunk = [0; 64 << 10];
    loop {
        stream.set_read_timeout(Some(left(deadline).map_err(broken)?)).map_err(broken)?;
        let n = match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // Whoever closes with unread bytes of ours resets; what came before counts.
            Err(error) if error.kind() == ErrorKind::ConnectionReset && !answer.is_empty() => break,
            Err(error) => return Err(broken(error)),
        };
        if answer.len() + n > ANSWER_BYTES_MAX {
            return Err(broken(std::io::Error::other("the answer is longer than 64 MiB")));
        }
        answer.extend_from_slice(&chunk[..n]);
    }
    let (status, length, body_at) =
        parse_head(&answer).ok_or_else(|| HttpError::NotHttp { address: address.to_owned() })?;
    let body = answer.split_off(body_at);
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

/// Connects to the first address behind a name that answers in time.
pub(crate) fn connect(address: &str, deadline: Instant) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Status, length of the body if it is told, and where the body begins.
fn parse_head(answer: &[u8]) -> Option<(u16, Option<usize>, usize)> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
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

    /// A server that answers one request with these bytes.
    fn answering(bytes: &'static [u8]) -> String {
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

    fn ask(bytes: &'static [u8]) -> Result<Vec<u8>, HttpError> {
        get(&answering(bytes), "/segments", Duration::from_secs(5))
    }

    #[test]
    fn a_body_is_returned_whole() {
        assert_eq!(ask(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap(), b"{}");
        assert_eq!(ask(b"HTTP/1.1 200 OK\r\n\r\nuntil the end").unwrap(), b"until the end");
    }

    #[test]
    fn every_other_answer_is_an_error_that_says_which() {
        assert!(matches!(
            ask(b"HTTP/1.0 404 Not Found\r\n\r\nno"),
            Err(HttpError::Status { status: 404, .. })
        ));
        assert!(matches!(ask(b"SSH-2.0-OpenSSH_9.6\r\n"), Err(HttpError::NotHttp { .. })));
        assert!(matches!(
            ask(b"HTTP/1.0 200 OK\r\ncontent-length: 9\r\n\r\n{}"),
            Err(HttpError::Broken { .. })
        ));
        assert!(matches!(ask(b""), Err(HttpError::NotHttp { .. })));
    }

    #[test]
    fn a_server_that_says_nothing_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let started = Instant::now();
        let answer = get(&address, "/", Duration::from_millis(100));
        assert!(matches!(answer, Err(HttpError::Broken { .. })), "{answer:?}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}
