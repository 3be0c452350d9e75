//! Invalid clients of the frame server: each gets an error frame, and none uses more than its limits.

mod support;

use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use moontide_master::{MasterConfig, Server};
use moontide_proto::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, ProtocolVersions, v1};
use moontide_types::ErrorCode;
use moontide_types::limits::{BATCH_KEYS_MAX, REQUEST_BYTES_MAX};
use prost::Message;
use support::*;

/// Returns a header with changed bytes and a recomputed CRC.
fn forged(header: FrameHeader, change: impl FnOnce(&mut [u8])) -> [u8; FRAME_HEADER_BYTES] {
    let mut bytes = header.encode();
    change(&mut bytes);
    let crc = crc32c::crc32c(&bytes[..FRAME_HEADER_BYTES - 4]);
    bytes[FRAME_HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
fn invalid_header_gets_error_frame_and_closes_connection() {
    let server = start();
    let exist = FrameHeader::new(FrameKind::Exist, 9);
    let body_len = |len: u32| forged(exist, |bytes| bytes[16..20].copy_from_slice(&len.to_le_bytes()));
    let cases = [
        ("a body of 16 MiB and one byte", body_len(REQUEST_BYTES_MAX as u32 + 1), ErrorCode::TooLarge, 9),
        ("a body of 4 GiB", body_len(u32::MAX), ErrorCode::TooLarge, 9),
        ("an unknown kind", forged(exist, |bytes| bytes[6] = 200), ErrorCode::Unsupported, 9),
        ("no timeout", forged(exist, |bytes| bytes[20..24].fill(0)), ErrorCode::InvalidArgument, 9),
        ("another version", forged(exist, |bytes| bytes[4] = 2), ErrorCode::Unsupported, 0),
        (
            "another protocol",
            *b"GET / HTTP/1.1\r\nHost: master\r\nAccept: */*, text/html;q=0.1\r\n\r\n...."
                .first_chunk()
                .unwrap(),
            ErrorCode::InvalidArgument,
            0,
        ),
        ("a reply", FrameHeader::new(FrameKind::ExistReply, 9).encode(), ErrorCode::Unsupported, 9),
        (
            "a second Hello",
            {
                let mut h = FrameHeader::new(FrameKind::Hello, 9);
                h.body_len = 96;
                h.encode()
            },
            ErrorCode::Unsupported,
            9,
        ),
        (
            "a data frame",
            forged(
                FrameHeader { body_len: 80, payload_len: 1 << 20, ..FrameHeader::new(FrameKind::Write, 9) },
                |_| {},
            ),
            ErrorCode::Unsupported,
            9,
        ),
    ];
    for (what, header, code, request) in cases {
        let mut caller = FrameCaller::connect(server.addresses().frame);
        caller.socket.write_all(&header).unwrap();
        // Completes the second Hello; the other headers are rejected before.
        let _ = caller.socket.write_all(&[0; 96]);
        let reply = caller.read().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((reply.header.kind, reply.header.status), (FrameKind::Error, Some(code)), "{what}");
        assert_eq!(reply.header.request, request, "{what}");
        assert!(!reply.body.is_empty() && std::str::from_utf8(&reply.body).is_ok(), "{what}");
        assert!(caller.is_closed(), "{what}");
    }
    let mut flipped = exist.encode();
    flipped[8] ^= 1;
    let mut caller = FrameCaller::connect(server.addresses().frame);
    caller.socket.write_all(&flipped).unwrap();
    assert_eq!(caller.read().unwrap().header.status, Some(ErrorCode::Corrupt));
    assert!(caller.is_closed());
}

#[test]
fn invalid_body_gets_error_frame_and_connection_continues() {
    let server = start();
    let mut caller = FrameCaller::connect(server.addresses().frame);
    let many = BATCH_KEYS_MAX as u32 + 1;
    let mut too_many = many.to_le_bytes().to_vec();
    (0..many).for_each(|_| too_many.extend(1u16.to_le_bytes()));
    too_many.resize(too_many.len() + many as usize, b'k');
    let too_many = v1::ExistRequest { context: context(), keys: too_many.into() };
    let reply = caller.call(FrameKind::Exist, &too_many);
    assert_eq!(reply.header.status, Some(ErrorCode::TooLarge), "{reply:?}");

    // Empty elements take two bytes each on the wire: counted before they are decoded.
    let mut configs = put_start(&["a"], 1);
    configs.configs = vec![v1::PutConfig::default(); 1_000_000];
    let reply = caller.call(FrameKind::PutStart, &configs);
    assert_eq!((reply.header.kind, reply.header.status), (FrameKind::Error, Some(ErrorCode::TooLarge)));

    for garbage in
        [&b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"[..], b"\x0a\xff\x01", b"\x12\x80\x80\x80\x80\x7f"]
    {
        for kind in [
            FrameKind::Exist,
            FrameKind::GetReplicaList,
            FrameKind::PutStart,
            FrameKind::PutEnd,
            FrameKind::Remove,
        ] {
            caller.socket.write_all(&frame(kind, 5, 1_000, garbage)).unwrap();
            let reply = caller.read().unwrap();
            assert_eq!((reply.header.kind, reply.header.request), (FrameKind::Error, 5), "{kind:?}");
            assert_eq!(reply.header.status, Some(ErrorCode::InvalidArgument));
        }
    }
    // An empty body is a message without a context.
    caller.socket.write_all(&frame(FrameKind::Exist, 6, 1_000, b"")).unwrap();
    assert_eq!(caller.read().unwrap().header.status, Some(ErrorCode::InvalidArgument));
    let reply = caller.call(FrameKind::Exist, &exist(&["a"]));
    assert_eq!((reply.header.kind, reply.header.status), (FrameKind::ExistReply, None));
    caller.socket.write_all(&FrameHeader::new(FrameKind::Cancel, 1).encode()).unwrap();
    caller.socket.write_all(&FrameHeader::new(FrameKind::Ping, 8).encode()).unwrap();
    let pong = caller.read().unwrap();
    assert_eq!((pong.header.kind, pong.header.request), (FrameKind::Pong, 8));
}

#[test]
fn truncated_frame_closes_connection_without_reply() {
    let server = start();
    let whole = frame(FrameKind::Exist, 1, 5_000, &exist(&["a"]).encode_to_vec());
    for cut in [1, 63, 64, 65, whole.len() - 1] {
        let mut caller = FrameCaller::connect(server.addresses().frame);
        caller.socket.write_all(&whole[..cut]).unwrap();
        caller.socket.shutdown(Shutdown::Write).unwrap();
        assert!(caller.read().is_err(), "{cut} bytes are no request");
    }
    // A request that arrives byte by byte is valid.
    let mut caller = FrameCaller::connect(server.addresses().frame);
    for byte in &whole {
        caller.socket.write_all(&[*byte]).unwrap();
    }
    assert_eq!(caller.read().unwrap().header.kind, FrameKind::ExistReply);
    // A caller that has closed its sending side still gets its replies.
    caller.socket.write_all(&[&whole[..], &whole[..]].concat()).unwrap();
    caller.socket.shutdown(Shutdown::Write).unwrap();
    assert_eq!(caller.read().unwrap().header.kind, FrameKind::ExistReply);
    assert_eq!(caller.read().unwrap().header.kind, FrameKind::ExistReply);
    assert!(caller.is_closed());
}

#[test]
fn first_frame_must_be_hello_with_supported_version() {
    let server = start();
    let mut caller = FrameCaller::connect_without_hello(server.addresses().frame);
    let reply = caller.call(FrameKind::Exist, &exist(&["a"]));
    assert_eq!(reply.header.status, Some(ErrorCode::InvalidArgument));
    assert!(caller.is_closed());
    let mut caller = FrameCaller::connect_without_hello(server.addresses().frame);
    // Processes of version 1 compute the ids of objects in another way.
    for (min, max) in [(7, 9), (1, 1)] {
        let reply = caller.hello(ProtocolVersions { min, max }).unwrap();
        let (kind, status) = (reply.header.kind, reply.header.status);
        assert_eq!((kind, status), (FrameKind::Error, Some(ErrorCode::Unsupported)));
        assert!(caller.is_closed());
        caller = FrameCaller::connect_without_hello(server.addresses().frame);
    }
    let reply = caller.hello(ProtocolVersions { min: 1, max: 9 }).unwrap();
    let hello = moontide_proto::Hello::decode_body(&reply.body).unwrap();
    assert_eq!((hello.versions, hello.inflight_max), (ProtocolVersions { min: 2, max: 2 }, 64));
}

#[test]
fn request_completed_after_deadline_is_rejected() {
    let server = start();
    let mut caller = FrameCaller::connect(server.addresses().frame);
    let late = frame(FrameKind::Exist, 3, 50, &exist(&["a"]).encode_to_vec());
    caller.socket.write_all(&late[..70]).unwrap();
    std::thread::sleep(Duration::from_millis(80));
    caller.socket.write_all(&late[70..]).unwrap();
    let reply = caller.read().unwrap();
    assert_eq!((reply.header.status, reply.header.request), (Some(ErrorCode::DeadlineExceeded), 3));
    let reply = caller.call(FrameKind::Exist, &exist(&["a"]));
    assert_eq!(reply.header.status, None, "the next request has its own timeout");
}

#[test]
fn connection_over_limit_gets_error_frame() {
    let server = Server::start(MasterConfig { connections_max: 2, ..config() }).unwrap();
    let [mut first, mut second] = [(); 2].map(|()| FrameCaller::connect(server.addresses().frame));
    // A connection that has made no call would give way.
    for caller in [&mut first, &mut second] {
        assert_eq!(caller.call(FrameKind::Exist, &exist(&["a"])).header.status, None);
    }
    let mut third = FrameCaller::connect_without_hello(server.addresses().frame);
    let reply = third.hello(ProtocolVersions::CURRENT).unwrap();
    assert_eq!((reply.header.kind, reply.header.status), (FrameKind::Error, Some(ErrorCode::Busy)));
    assert!(third.is_closed());
    assert_eq!(second.call(FrameKind::Exist, &exist(&["a"])).header.status, None);
    drop(first);
    eventually("a connection permit is free", || {
        let mut caller = FrameCaller::connect_without_hello(server.addresses().frame);
        caller.hello(ProtocolVersions::CURRENT).is_ok_and(|reply| reply.header.kind == FrameKind::HelloAck)
    });
}

#[test]
fn incomplete_frame_times_out_and_idle_connection_does_not() {
    let server = start();
    let whole = frame(FrameKind::Exist, 1, 60_000, &exist(&["a"]).encode_to_vec());
    // Five clients: silent, partial Hello, partial header, partial body, and one that sends byte by byte.
    let silent = FrameCaller::connect_without_hello(server.addresses().frame);
    let mut half_hello = FrameCaller::connect_without_hello(server.addresses().frame);
    half_hello.socket.write_all(&hello(ProtocolVersions::CURRENT, 1)[..50]).unwrap();
    let mut half_header = FrameCaller::connect(server.addresses().frame);
    half_header.socket.write_all(&whole[..10]).unwrap();
    let mut half_body = FrameCaller::connect(server.addresses().frame);
    half_body.socket.write_all(&whole[..70]).unwrap();
    let drip = FrameCaller::connect(server.addresses().frame);
    let started = Instant::now();
    let mut slow = drip.socket.try_clone().unwrap();
    let dripping = std::thread::spawn(move || {
        // Two bytes of a header per second: the whole header would take half a minute.
        for byte in &whole[..40] {
            if slow.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    });
    let mut idle = FrameCaller::connect(server.addresses().frame);
    for (what, mut caller) in [
        ("silent", silent),
        ("Hello", half_hello),
        ("header", half_header),
        ("body", half_body),
        ("drip", drip),
    ] {
        assert!(caller.is_closed(), "{what}");
        let waited = started.elapsed();
        assert!((Duration::from_secs(9)..Duration::from_secs(15)).contains(&waited), "{what}: {waited:?}");
    }
    dripping.join().unwrap();
    assert_eq!(
        idle.call(FrameKind::Exist, &exist(&["a"])).header.status,
        None,
        "idle connections are allowed"
    );
}
