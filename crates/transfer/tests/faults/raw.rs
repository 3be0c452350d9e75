//! The frame protocol by hand: frames on plain streams, and a [`FakePeer`] with arbitrary replies.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moontide_proto::{
    FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Hello, ProtocolVersions, Token,
};
use moontide_types::NodeId;

/// Encodes a Hello or HelloAck.
pub fn hello(kind: FrameKind, node: u64, inflight_max: u32) -> Vec<u8> {
    let header = FrameHeader { body_len: Hello::BYTES as u32, ..FrameHeader::new(kind, 0) };
    let mut bytes = header.encode().to_vec();
    let versions = ProtocolVersions::CURRENT;
    let hello =
        Hello { node: NodeId(node), caller: 5, versions, inflight_max, features: 0, token: Token::NONE };
    hello.encode(&mut bytes);
    bytes
}

/// Encodes a frame with this body and payload.
pub fn frame(header: FrameHeader, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = FrameHeader { body_len: body.len() as u32, payload_len: payload.len() as u64, ..header };
    [&header.encode()[..], body, payload].concat()
}

/// Reads the header of a frame.
pub fn read_header(stream: &mut TcpStream) -> Option<FrameHeader> {
    let mut bytes = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut bytes).ok()?;
    FrameHeader::decode(&bytes).ok()
}

/// Reads the header and body of a frame.
pub fn read_frame(stream: &mut TcpStream) -> Option<(FrameHeader, Vec<u8>)> {
    let header = read_header(stream)?;
    let mut body = vec![0; header.body_len as usize];
    stream.read_exact(&mut body).ok()?;
    Some((header, body))
}

/// Connects to an owner and runs the handshake; `None` if the owner refuses.
pub fn connect_raw(address: SocketAddr) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_nodelay(true).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    stream.write_all(&hello(FrameKind::Hello, 0, 64)).ok()?;
    let (header, _) = read_frame(&mut stream)?;
    (header.kind == FrameKind::HelloAck).then_some(stream)
}

/// A peer that runs a handler of the test on every connection.
pub struct FakePeer {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FakePeer {
    pub fn start(handler: impl Fn(TcpStream) + Send + Sync + 'static) -> FakePeer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("the listener is bound");
        let (stop, streams) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<TcpStream>>>::default());
        let (stopped, open, handler) = (Arc::clone(&stop), Arc::clone(&streams), Arc::new(handler));
        let thread = std::thread::spawn(move || {
            let mut threads = Vec::new();
            while let Ok((stream, _)) = listener.accept() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let _ = stream.set_nodelay(true);
                open.lock().expect("no panic").push(stream.try_clone().expect("a handle"));
                let handler = Arc::clone(&handler);
                threads.push(std::thread::spawn(move || {
                    let clone = stream.try_clone().expect("a handle");
                    handler(stream);
                    let _ = clone.shutdown(Shutdown::Both);
                }));
            }
            open.lock().expect("no panic").iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
            threads.into_iter().for_each(|thread| thread.join().expect("a handler panicked"));
        });
        FakePeer { address, stop, streams, thread: Some(thread) }
    }

    /// Starts a peer that completes the handshake and then runs the handler.
    pub fn with_handshake(
        inflight_max: u32,
        handler: impl Fn(TcpStream) + Send + Sync + 'static,
    ) -> FakePeer {
        FakePeer::start(move |mut stream| {
            if read_frame(&mut stream).is_some()
                && stream.write_all(&hello(FrameKind::HelloAck, 1, inflight_max)).is_ok()
            {
                handler(stream);
            }
        })
    }
}

impl Drop for FakePeer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.streams.lock().expect("no panic").iter().for_each(|s| drop(s.shutdown(Shutdown::Both)));
        let _ = TcpStream::connect(self.address);
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        if !std::thread::panicking() {
            ended.expect("the thread was started").expect("a handler panicked");
        }
    }
}

/// Receives and discards bytes until the other side closes the connection.
pub fn wait_for_close(mut stream: TcpStream) {
    let mut sink = [0; 4096];
    while stream.read(&mut sink).is_ok_and(|count| count > 0) {}
}
