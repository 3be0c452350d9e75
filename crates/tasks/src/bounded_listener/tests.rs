//! Tests with real sockets.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::serve::Listener;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

use super::*;

const HTTP1: Protocol = Protocol::Http1 { answer_max: Duration::from_millis(400) };
const HTTP2: Protocol = Protocol::Http2 { first_call_max: Duration::from_millis(400) };
const HEAD: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
/// Longer than any wait here that succeeds.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, Debug, Default)]
struct Counts(Arc<[AtomicUsize; 4]>);

impl Counts {
    /// Open connections, read and written bytes, refused connections.
    fn get(&self) -> [usize; 4] {
        [0, 1, 2, 3].map(|at| self.0[at].load(Ordering::Relaxed))
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

    fn refused(&self) {
        self.0[3].fetch_add(1, Ordering::Relaxed);
    }
}

async fn listen(max: usize, protocol: Protocol) -> (Counts, BoundedListener<Counts>, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let counts = Counts::default();
    let listener = BoundedListener::new(listener, max, protocol, counts.clone());
    let address = Listener::local_addr(&listener).unwrap();
    (counts, listener, address)
}

async fn client(address: SocketAddr, greeting: &[u8]) -> TcpStream {
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(greeting).await.unwrap();
    client
}

async fn accept(listener: &mut BoundedListener<Counts>) -> BoundedConnection<Counts> {
    timeout(TIMEOUT, Listener::accept(listener)).await.expect("a connection in time").0
}

/// Whether the peer closes the connection.
async fn is_closed(client: &mut TcpStream) -> bool {
    let read = timeout(TIMEOUT, client.read_u8()).await.expect("the end of the connection in time");
    read.is_err()
}

/// Reads from a connection, as a server does that waits for a request.
fn serve(mut connection: BoundedConnection<Counts>) -> JoinHandle<io::Error> {
    tokio::spawn(async move {
        loop {
            if let Err(error) = connection.read_u8().await {
                return error;
            }
        }
    })
}

#[tokio::test]
async fn connection_over_limit_is_accepted_after_another_is_closed() {
    let (counts, mut listener, address) = listen(1, HTTP1).await;
    let mut client_of_first = client(address, HEAD).await;
    let mut first = accept(&mut listener).await;
    let _second = client(address, HEAD).await;
    let pause = Duration::from_millis(50);
    assert!(timeout(pause, Listener::accept(&mut listener)).await.is_err(), "the limit is reached");
    client_of_first.write_all(b"hello").await.unwrap();
    let mut heard = vec![0; HEAD.len() + 5];
    first.read_exact(&mut heard).await.unwrap();
    first.write_all(b"hi").await.unwrap();
    assert_eq!(heard, [HEAD, b"hello"].concat(), "the greeting, and what follows it");
    assert_eq!(counts.get(), [1, HEAD.len() + 5, 2, 0]);
    drop(first);
    assert_eq!(counts.get()[0], 0);
    accept(&mut listener).await;
}

#[tokio::test]
async fn silent_connections_give_way_to_one_that_calls() {
    for protocol in [HTTP1, HTTP2] {
        let (counts, mut listener, address) = listen(16, protocol).await;
        let mut silent = vec![];
        for _ in 0..40 {
            silent.push(client(address, b"").await);
        }
        let _client = client(address, if protocol == HTTP1 { HEAD } else { HTTP2_PREFACE }).await;
        let connection = accept(&mut listener).await;
        assert!(is_closed(&mut silent[0]).await, "the oldest one is closed");
        // One address has eight of the sixteen.
        assert_eq!(counts.get()[3], 40 + 1 - 8);
        assert!(counts.get()[0] <= 8);
        drop(connection);
    }
}

#[tokio::test]
async fn incomplete_or_wrong_greeting_is_never_served() {
    let (counts, mut listener, address) = listen(16, HTTP2).await;
    let mut wrong = client(address, b"GET / HTTP/1.1\r\n\r\n").await;
    let mut half = client(address, &HTTP2_PREFACE[..20]).await;
    assert!(timeout(Duration::from_millis(100), Listener::accept(&mut listener)).await.is_err());
    assert!(is_closed(&mut wrong).await);
    half.write_all(&HTTP2_PREFACE[20..]).await.unwrap();
    drop(accept(&mut listener).await);
    let _half = client(address, &HTTP2_PREFACE[..20]).await;
    assert!(timeout(Duration::from_millis(100), Listener::accept(&mut listener)).await.is_err());
    assert_eq!(counts.get()[0], 1);
}

#[tokio::test]
async fn greeting_has_a_time_limit() {
    let (counts, mut listener, address) = listen(16, HTTP1).await;
    listener.greeting_max = Duration::from_millis(300);
    let mut slow = client(address, b"").await;
    let dripping = async {
        // A byte every 50 ms: complete after more than a second.
        for byte in HEAD {
            if slow.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(is_closed(&mut slow).await);
    };
    tokio::select! {
        _ = Listener::accept(&mut listener) => panic!("it has not greeted"),
        () = dripping => {}
    }
    assert_eq!(counts.get()[0], 0);
}

#[tokio::test]
async fn connection_without_a_call_ends_and_one_with_a_call_stays() {
    let (_, mut listener, address) = listen(16, HTTP2).await;
    let _idle = client(address, HTTP2_PREFACE).await;
    let idle = serve(accept(&mut listener).await);
    let mut caller = client(address, HTTP2_PREFACE).await;
    let called = accept(&mut listener).await;
    called.info.called();
    let called = serve(called);
    // Bytes alone do not count: pings would keep a connection open without end.
    let error = timeout(TIMEOUT, idle).await.unwrap().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    tokio::time::sleep(Duration::from_millis(500)).await;
    caller.write_all(b"more").await.unwrap();
    assert!(!called.is_finished(), "it may be idle after its call");
    drop(caller);
    assert_eq!(timeout(TIMEOUT, called).await.unwrap().unwrap().kind(), io::ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn greeted_connection_without_a_call_gives_way() {
    let long = Protocol::Http2 { first_call_max: TIMEOUT };
    let (counts, mut listener, address) = listen(8, long).await;
    let (mut clients, mut served) = (vec![], vec![]);
    for at in 0..8 {
        clients.push(client(address, HTTP2_PREFACE).await);
        let connection = accept(&mut listener).await;
        if at == 0 {
            connection.info.called();
        }
        served.push(serve(connection));
    }
    clients.push(client(address, HTTP2_PREFACE).await);
    served.push(serve(accept(&mut listener).await));
    assert!(is_closed(&mut clients[1]).await, "the oldest one without a call");
    let error = timeout(TIMEOUT, served.remove(1)).await.unwrap().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    assert_eq!(counts.get()[3], 1);
    assert!(served.iter().all(|task| !task.is_finished()));
}

#[tokio::test]
async fn http1_connection_ends_without_answers_although_bytes_arrive() {
    let (_, mut listener, address) = listen(16, HTTP1).await;
    let mut client = client(address, HEAD).await;
    let mut connection = accept(&mut listener).await;
    let started = Instant::now();
    let dripping = tokio::spawn(async move {
        while client.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    // An answer in time starts the time again.
    tokio::time::sleep(Duration::from_millis(200)).await;
    connection.write_all(b"answer").await.unwrap();
    let error = timeout(TIMEOUT, serve(connection)).await.unwrap().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(started.elapsed() >= Duration::from_millis(590), "{:?}", started.elapsed());
    timeout(TIMEOUT, dripping).await.unwrap().unwrap();
}

#[test]
fn end_of_head_is_found_wherever_it_is() {
    for (bytes, ends) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], true),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\nbody", true),
        (b"GET / HTTP/1.1\n\n", true),
        (b"\r\n\r\n", true),
        (b"\n\r\n", true),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", false),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r", false),
        (b"GET / HTTP/1.1\r\nHost: a", false),
        (b"\r\n", false),
        (b"", false),
    ] {
        assert_eq!(ends_head(bytes), ends, "{}", bytes.escape_ascii());
    }
}
