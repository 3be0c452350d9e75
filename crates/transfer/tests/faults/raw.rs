//! The protocol by hand: frames on plain streams, and a [`Liar`] that answers with whatever a test wants.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moontide_proto::{
    FRAME_HEADER_BYTES, FixedRecord, FrameHeader, FrameKind, Hello, ProtocolVersions, Token,
};
use moontide_types::NodeId;

/// A greeting, or the answer to one.
pub fn hello(kind: FrameKind, node: u64, inflight_max: u32) -> Vec<u8> {
    let header = FrameHeader { body_len: Hello::BYTES as u32, ..FrameHeader::new(kind, 0) };
    let mut bytes = header.encode().to_vec();
    let versions = ProtocolVersions::CURRENT;
    let hello =
        Hello { node: NodeId(node), caller: 5, versions, inflight_max, features: 0, token: Token::NONE };
    hello.encode(&mut bytes);
    bytes
}

/// A frame with this body and payload.
pub fn frame(header: FrameHeader, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = FrameHeader { body_len: body.len() as u32, payload_len: payload.len() as u64, ..header };
    [&header.encode()[..], body, payload].concat()
}

/// Reads a frame's header.
pub fn read_header(stream: &mut TcpStream) -> Option<FrameHeader> {
    let mut bytes = [0; FRAME_HEADER_BYTES];
    stream.read_exact(&mut bytes).ok()?;
    FrameHeader::decode(&bytes).ok()
}

/// Reads a frame's header and body.
pub fn read_frame(stream: &mut TcpStream) -> Option<(FrameHeader, Vec<u8>)> {
    let header = read_header(stream)?;
    let mut body = vec![0; header.body_len as usize];
    stream.read_exact(&mut body).ok()?;
    Some((header, body))
}

/// Connects to an owner and greets it; `None` if it does not want to.
pub fn greeted(address: SocketAddr) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_nodelay(true).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    stream.write_all(&hello(FrameKind::Hello, 0, 64)).ok()?;
    let (header, _) = read_frame(&mut stream)?;
    (header.kind == FrameKind::HelloAck).then_some(stream)
}

/// A peer that does what a test wants with every connection.
pub struct Liar {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Liar {
    pub fn start(talk: impl Fn(TcpStream) + Send + Sync + 'static) -> Liar {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let (stop, streams) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<TcpStream>>>::default());
        let (stopped, open, talk) = (Arc::clone(&stop), Arc::clone(&streams), Arc::new(talk));
        let thread = std::thread::spawn(move || {
            let mut talks = Vec::new();
            while let Ok((stream, _)) = listener.accept() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let _ = stream.set_nodelay(true);
                open.lock().expect("no panic").push(stream.try_clone().expect("a handle"));
                let talk = Arc::clone(&talk);
                talks.push(std::thread::spawn(move || {
                    let ours = stream.try_clone().expect("a handle");
                    talk(stream);
                    let _ = ours.shutdown(Shutdown::Both);
                }));
            }
            open.lock().expect("no panic").iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
            talks.into_iter().for_each(|talk| talk.join().expect("a liar found what must not be"));
        });
        Liar { address, stop, streams, thread: Some(thread) }
    }

    /// One that greets well, and then does what a test wants.
    pub fn greeting(inflight_max: u32, talk: impl Fn(TcpStream) + Send + Sync + 'static) -> Liar {
        Liar::start(move |mut stream| {
            if read_frame(&mut stream).is_some()
                && stream.write_all(&hello(FrameKind::HelloAck, 1, inflight_max)).is_ok()
            {
                talk(stream);
            }
        })
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.streams.lock().expect("no panic").iter().for_each(|s| drop(s.shutdown(Shutdown::Both)));
        let _ = TcpStream::connect(self.address);
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        if !std::thread::panicking() {
            ended.expect("it was started").expect("a liar found what must not be");
        }
    }
}

/// Holds a connection and says nothing until the other side ends it.
pub fn wait_for_the_end(mut stream: TcpStream) {
    let mut sink = [0; 4096];
    while stream.read(&mut sink).is_ok_and(|count| count > 0) {}
}
