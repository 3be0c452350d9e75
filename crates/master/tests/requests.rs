//! Requests that never end: their time and their memory are limited, and others are served meanwhile.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::Frame;
use moontide_proto::v1;
use moontide_types::ErrorCode;
use moontide_types::limits::REQUEST_BYTES_MAX;
use support::*;
use tonic::Code;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Channel;

/// A body that declares a message of some length and sends a part of it: at first these bytes, then one at a time.
struct Drip {
    first: Option<Bytes>,
    pause: Pin<Box<tokio::time::Sleep>>,
}

/// Time between two bytes.
const PAUSE: Duration = Duration::from_millis(200);

impl Drip {
    fn new(len: usize) -> Drip {
        let prefix = [&[0][..], &(len as u32).to_be_bytes(), &[7][..]].concat();
        Drip { first: Some(prefix.into()), pause: Box::pin(tokio::time::sleep(PAUSE)) }
    }
}

impl hyper::body::Body for Drip {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        std::task::ready!(self.pause.as_mut().poll(cx));
        self.pause = Box::pin(tokio::time::sleep(PAUSE));
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[7])))))
    }
}

/// Starts a call whose request never ends. Returns the status of the response.
async fn drip(mut channel: Channel, len: usize) -> (Code, Option<ErrorCode>) {
    std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let request = http::Request::post("/moontide.v1.Master/Exist")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Drip::new(len)))
        .unwrap();
    let response = channel.call(request).await.unwrap();
    let status = tonic::Status::from_header_map(response.headers()).expect("an error has no body");
    (status.code(), moontide_master::code_of(&status))
}

async fn exists(address: SocketAddr) -> bool {
    let request = v1::ExistRequest { context: context(), keys: keys(["key"]) };
    let response = grpc(address).await.exist(request).await.unwrap().into_inner();
    response.context.unwrap().code == 0
}

#[test]
fn request_that_comes_byte_by_byte_ends_in_time() {
    let server = start();
    let address = server.addresses().grpc;
    runtime().block_on(async {
        let started = Instant::now();
        let slow = tokio::spawn(drip(channel(address).await, 1_000));
        assert!(exists(address).await);
        let status = tokio::time::timeout(Duration::from_secs(20), slow).await.unwrap().unwrap();
        assert_eq!(status, (Code::DeadlineExceeded, Some(ErrorCode::DeadlineExceeded)));
        let took = started.elapsed();
        assert!((Duration::from_secs(9)..Duration::from_secs(15)).contains(&took), "{took:?}");
    });
}

#[test]
fn large_requests_of_one_address_have_a_limit_in_all() {
    let server = start();
    let address = server.addresses().grpc;
    runtime().block_on(async {
        // 16 of them have half of the memory. Two connections, because a limit of one connection would be no limit.
        let (one, other) = (channel(address).await, channel(address).await);
        let before = resident_bytes();
        let mut calls = tokio::task::JoinSet::new();
        for n in 0..17 {
            calls.spawn(drip(if n % 2 == 0 { &one } else { &other }.clone(), REQUEST_BYTES_MAX));
        }
        let refused = tokio::time::timeout(Duration::from_secs(8), calls.join_next()).await;
        let refused = refused.expect("one is refused at once").unwrap().unwrap();
        assert_eq!(refused, (Code::ResourceExhausted, Some(ErrorCode::Busy)));
        let another = tokio::time::timeout(Duration::from_millis(300), calls.join_next()).await;
        assert!(another.is_err(), "the others go on");
        assert!(exists(address).await, "small requests are served");
        assert!(resident_bytes() < before + (300 << 20));
        // Ended calls return their memory.
        calls.shutdown().await;
        let end = Instant::now() + Duration::from_secs(8);
        while tokio::time::timeout(PAUSE, drip(one.clone(), REQUEST_BYTES_MAX)).await.is_ok() {
            assert!(Instant::now() < end, "refused although all others have ended");
        }
    });
}

#[test]
fn large_frames_of_one_address_have_a_limit_in_all() {
    let server = start();
    let address = server.addresses().frame;
    let len = REQUEST_BYTES_MAX as u32;
    let begin = || {
        let mut caller = FrameCaller::connect(address);
        let header = moontide_proto::FrameHeader {
            body_len: len,
            timeout_ms: 5_000,
            ..moontide_proto::FrameHeader::new(moontide_proto::FrameKind::Exist, 9)
        };
        caller.socket.write_all(&header.encode()).unwrap();
        caller
    };
    let mut callers: Vec<FrameCaller> = (0..17).map(|_| begin()).collect();
    // One of them is over the limit of 16.
    callers.iter_mut().for_each(|c| c.socket.set_nonblocking(true).unwrap());
    let end = Instant::now() + Duration::from_secs(8);
    let refused = 'found: loop {
        for (at, caller) in callers.iter_mut().enumerate() {
            if caller.socket.peek(&mut [0]).is_ok() {
                break 'found at;
            }
        }
        assert!(Instant::now() < end, "not refused");
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut refused = callers.remove(refused);
    refused.socket.set_nonblocking(false).unwrap();
    assert_eq!(refused.read().unwrap().header.status, Some(ErrorCode::Busy));
    let mut small = FrameCaller::connect(address);
    let reply = small.call(moontide_proto::FrameKind::Exist, &exist(&["a"]));
    assert_eq!(reply.header.status, None, "small requests are served");
}

#[test]
fn admin_request_that_comes_byte_by_byte_ends_in_time() {
    let server = start();
    let address = server.addresses().admin;
    let mut slow = TcpStream::connect(address).unwrap();
    slow.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = "POST /batch_query_keys HTTP/1.1\r\nHost: localhost\r\nmoontide-admin: 1\r\nContent-Length: 100000\r\n\r\n";
    slow.write_all(head.as_bytes()).unwrap();
    let started = Instant::now();
    let mut writer = slow.try_clone().unwrap();
    let dripping = std::thread::spawn(move || {
        while writer.write_all(b" ").is_ok() {
            std::thread::sleep(PAUSE);
        }
    });
    assert_eq!(get(address, "/health").0, 200);
    let mut response = vec![];
    // The connection is closed, or reset because bytes were not read.
    let _ = slow.read_to_end(&mut response);
    let took = started.elapsed();
    assert!((Duration::from_secs(29)..Duration::from_secs(45)).contains(&took), "{took:?}");
    dripping.join().unwrap();
}
