//! [`TcpServer`]: server side of the TCP engine. A thread per connection reads a frame, replies to it, and reads the
//! next.
//!
//! A thread per connection because each moves bytes with blocking calls, which are the fastest, and because a slow or
//! stopped peer then blocks only its own connection. An idle connection costs a sleeping thread with a small stack;
//! [`TcpServerConfig::connections_max`] bounds their number.
//!
//! The resources of a peer are bounded: the body of one frame and the pins of one frame, held at most until the
//! request's deadline.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use moontide_proto::limits::FRAME_PAYLOAD_BYTES_MAX;
use moontide_proto::{
    FRAME_HEADER_BYTES, FrameFlags, FrameHeader, FrameKind, Hello, Token, TransferOp, TransferOps,
};
use moontide_rt::sync::{Arc, Mutex, lock};
use moontide_rt::time::Instant;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{ErrorCode, Span};
use tracing::{debug, warn};

use crate::engine_kind::EngineKind;
use crate::error::{ConnectionError, PeerName};
use crate::metrics::Metrics;
use crate::op::Direction;
use crate::owner::{Owner, PeerIdentity, PinnedRange, claim_write, pin_reads};
use crate::tcp::handshake;
use crate::tcp::payload::Chunk;
use crate::tcp::recv_buffer::RecvBuffer;
use crate::tcp::socket::{BLOCKING_CALL_MAX, IOVECS_MAX, IoError, IoTimeout, Socket};

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct TcpServerConfig {
    /// Addresses to listen on; port 0 for any free port.
    pub listen: Vec<SocketAddr>,
    /// Most connections at the same time.
    pub connections_max: usize,
    /// Most requests in flight on a connection, announced to the peer.
    pub inflight_max: u32,
    /// Time limit for the handshake.
    pub handshake_timeout: Duration,
    /// How long a connection may make no progress in the middle of a frame.
    pub stall_timeout: Duration,
}

impl Default for TcpServerConfig {
    fn default() -> TcpServerConfig {
        TcpServerConfig {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            connections_max: 4096,
            inflight_max: 64,
            handshake_timeout: Duration::from_secs(2),
            // Shorter than a client's: when the client sends again, the claim of the first attempt is released.
            stall_timeout: Duration::from_millis(700),
        }
    }
}

/// Error of [`TcpServer::start`].
#[derive(Debug, thiserror::Error)]
pub enum TcpServerError {
    /// The server cannot listen on an address.
    #[error(
        "cannot listen on {address}: {source}; check that no other process listens there and that it is an address of \
         this host"
    )]
    Listen {
        /// Address from the configuration.
        address: SocketAddr,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// Serves the memory of an owner. Dropping it ends all connections and threads.
#[derive(Debug)]
pub struct TcpServer {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    acceptors: Vec<(JoinHandle<()>, Arc<TcpListener>)>,
}

/// State shared by all threads of a server. Also serves streams that were not accepted by a TCP listener.
#[derive(Debug)]
pub(crate) struct Shared {
    owner: Arc<dyn Owner>,
    config: TcpServerConfig,
    metrics: Arc<Metrics>,
    connections: Mutex<Vec<ServerConnection>>,
    next_connection: AtomicU64,
    stopped: AtomicBool,
}

#[derive(Debug)]
struct ServerConnection {
    number: u64,
    socket: Arc<Socket>,
    thread: Option<JoinHandle<()>>,
}

impl TcpServer {
    /// Listens and serves.
    pub fn start(
        config: TcpServerConfig,
        owner: Arc<dyn Owner>,
        metrics: Arc<Metrics>,
    ) -> Result<TcpServer, TcpServerError> {
        let listen = config.listen.clone();
        let shared = Shared::new(config, owner, metrics);
        let mut server = TcpServer { shared, addresses: Vec::new(), acceptors: Vec::new() };
        for address in listen {
            let failed = |source| TcpServerError::Listen { address, source };
            let listener = Arc::new(TcpListener::bind(address).map_err(failed)?);
            let bound = listener.local_addr().map_err(failed)?;
            server.addresses.push(bound);
            let (shared, accepting) = (Arc::clone(&server.shared), Arc::clone(&listener));
            let thread = std::thread::Builder::new().name("moontide-accept".into());
            let thread = thread.spawn(move || shared.accept(&accepting)).map_err(TcpServerError::Thread)?;
            server.acceptors.push((thread, listener));
        }
        Ok(server)
    }

    /// Returns the addresses that the server listens on.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        lock(&self.shared.connections).len()
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.shared.stop();
        for (thread, listener) in self.acceptors.drain(..) {
            // Wakes the acceptor, and every later accept.
            let _ = rustix::net::shutdown(&*listener, rustix::net::Shutdown::Both);
            let _ = thread.join();
        }
        self.shared.stop();
    }
}

impl Shared {
    pub(crate) fn new(config: TcpServerConfig, owner: Arc<dyn Owner>, metrics: Arc<Metrics>) -> Arc<Shared> {
        let (connections, stopped) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(Shared { owner, config, metrics, connections, next_connection: AtomicU64::new(0), stopped })
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let accepted = listener.accept();
            if self.stopped.load(Ordering::SeqCst) {
                return;
            }
            match accepted {
                Ok((stream, peer)) => {
                    let served = self.serve(OwnedFd::from(stream), PeerName::Tcp(peer), None);
                    if let Err(failure) = served {
                        debug!(%peer, %failure, "connection not served");
                    }
                }
                Err(error) => {
                    // Mostly out of descriptors: open connections continue, and one of them will end.
                    warn!(%error, "cannot accept a connection");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    /// Serves a stream on a thread of its own. `identity`: identity of the peer, if already established; otherwise the
    /// stream starts with a handshake.
    pub(crate) fn serve(
        self: &Arc<Self>,
        fd: OwnedFd,
        name: PeerName,
        identity: Option<PeerIdentity>,
    ) -> Result<(), ConnectionError> {
        let socket = Arc::new(Socket::new(fd, name)?);
        let number = self.next_connection.fetch_add(1, Ordering::Relaxed);
        {
            // Added first, so that the thread can remove itself when it ends.
            let mut connections = lock(&self.connections);
            if self.stopped.load(Ordering::SeqCst) {
                return Err(ConnectionError::Stopped);
            }
            if connections.len() >= self.config.connections_max {
                let (peer, code) = (name, ErrorCode::Busy);
                warn!(%peer, limit = self.config.connections_max, "connection refused: too many connections");
                return Err(ConnectionError::HandshakeRefused { peer, code });
            }
            connections.push(ServerConnection { number, socket: Arc::clone(&socket), thread: None });
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("moontide-serve".into()).stack_size(256 << 10).spawn(
            move || {
                let engine = if identity.is_some() { EngineKind::Shm } else { EngineKind::Tcp };
                shared.metrics.served_opened(engine);
                let end = ConnectionGuard { shared: &shared, socket: &socket, number };
                let failure = shared.serve_connection(&socket, identity);
                debug!(peer = %name, %failure, "connection ended");
                shared.metrics.served_ended(engine, &failure);
                drop(end);
            },
        );
        let mut connections = lock(&self.connections);
        match thread {
            Ok(thread) => {
                if let Some(connection) =
                    connections.iter_mut().find(|connection| connection.number == number)
                {
                    connection.thread = Some(thread);
                }
                Ok(())
            }
            Err(error) => {
                connections.retain(|connection| connection.number != number);
                let source = rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN);
                Err(ConnectionError::System { what: "start a thread for", peer: name, source })
            }
        }
    }

    /// Ends all connections and waits for their threads.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        let threads: Vec<_> = {
            let mut connections = lock(&self.connections);
            connections.iter().for_each(|connection| connection.socket.shut_down());
            connections.iter_mut().filter_map(|connection| connection.thread.take()).collect()
        };
        for thread in threads {
            // A panic was printed by the thread itself.
            let _ = thread.join();
        }
    }

    /// Runs the handshake and replies to frames until the connection ends. Returns the reason for the end.
    fn serve_connection(&self, socket: &Socket, identity: Option<PeerIdentity>) -> ConnectionError {
        let caller = match identity {
            Some(caller) => caller,
            None => {
                let handshake = handshake::server_handshake(
                    socket,
                    Instant::now() + self.config.handshake_timeout,
                    |hello: &Hello| {
                        self.owner.authorize_peer(hello)?;
                        Ok(handshake::hello(self.owner.node(), 0, self.config.inflight_max, Token::NONE))
                    },
                );
                match handshake {
                    Ok(hello) => PeerIdentity::Remote(hello.caller),
                    Err(failure) => return failure,
                }
            }
        };
        let mut buffers = ConnectionBuffers {
            recv_buffer: RecvBuffer::new(RECV_BUFFER_BYTES),
            body: Vec::new(),
            scratch: Vec::new(),
        };
        loop {
            match self.handle_frame(socket, caller, &mut buffers) {
                Ok(()) => {}
                Err(IoError::Failed(failure)) => return failure,
                Err(IoError::Deadline) => return ConnectionError::Abandoned { peer: socket.name() },
            }
        }
    }

    /// Reads one frame and replies to it.
    fn handle_frame(
        &self,
        socket: &Socket,
        caller: PeerIdentity,
        buffers: &mut ConnectionBuffers,
    ) -> Result<(), IoError> {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        while buffers.recv_buffer.len() == 0 {
            // A busy peer sends its next request soon: this saves a poll.
            match buffers.recv_buffer.receive_first(
                socket,
                RECV_BUFFER_BYTES,
                Instant::now() + 10 * BLOCKING_CALL_MAX,
            ) {
                Ok(()) => {}
                Err(IoError::Deadline) => socket.wait_readable()?,
                Err(error) => return Err(error),
            }
        }
        let stall = self.config.stall_timeout;
        let timeout = IoTimeout { deadline: Instant::now() + stall, stall };
        buffers.recv_buffer.receive(socket, &mut bytes, timeout)?;
        let peer = socket.name();
        let header = FrameHeader::decode(&bytes).map_err(|source| ConnectionError::Frame { peer, source })?;
        let deadline = Instant::now() + Duration::from_millis(header.timeout_ms.into());
        let timeout = IoTimeout { deadline, stall };
        if header.flags != FrameFlags::NONE {
            return Err(ConnectionError::UnexpectedReply {
                peer,
                kind: header.kind,
                request: header.request,
            }
            .into());
        }
        if header.kind == FrameKind::Cancel {
            // A client that aborts a request ends the connection; this request already has its reply.
            return Ok(());
        }
        buffers.receive_body(
            socket,
            header.body_len as usize,
            IoTimeout { deadline: deadline.max(Instant::now() + stall), stall },
        )?;
        let engine = if matches!(caller, PeerIdentity::Local(_)) { EngineKind::Shm } else { EngineKind::Tcp };
        match header.kind {
            FrameKind::Read => self.read(socket, &header, buffers, engine, timeout),
            FrameKind::Write => self.write(socket, &header, buffers, engine, timeout),
            FrameKind::Ping => reply(socket, FrameHeader::new(FrameKind::Pong, header.request), &[], timeout),
            FrameKind::Begin
            | FrameKind::Commit
            | FrameKind::Load
            | FrameKind::Release
            | FrameKind::Attach
            | FrameKind::Describe => {
                let kind = header.kind.reply().expect("a request");
                match self.owner.call(caller, header.kind, &buffers.body, deadline) {
                    Ok(body) if body.len() <= kind.body_len_max() => {
                        reply(socket, FrameHeader::new(kind, header.request), &body, timeout)
                    }
                    Ok(_) => refuse(socket, &header, ErrorCode::TooLarge, timeout),
                    Err(code) => refuse(socket, &header, code, timeout),
                }
            }
            // Control calls are handled by masters, and a reply gets no reply.
            kind => Err(ConnectionError::UnexpectedReply { peer, kind, request: header.request }.into()),
        }
    }

    fn read(
        &self,
        socket: &Socket,
        header: &FrameHeader,
        buffers: &mut ConnectionBuffers,
        engine: EngineKind,
        timeout: IoTimeout,
    ) -> Result<(), IoError> {
        let peer = socket.name();
        let ops = TransferOps::decode(header, &buffers.body)
            .map_err(|source| ConnectionError::Ops { peer, source })?
            .ops();
        if ops.iter().map(|op| op.len).sum::<u64>() > FRAME_PAYLOAD_BYTES_MAX {
            return refuse(socket, header, ErrorCode::TooLarge, timeout);
        }
        let ranges: Vec<Result<PinnedRange<'_>, ErrorCode>> = pin_reads(&*self.owner, ops, timeout.deadline);
        let mut codes = Vec::with_capacity(2 * ranges.len());
        for (range, op) in ranges.iter().zip(ops.iter()) {
            let outcome = range.as_ref().map(|_| ()).map_err(|code| *code);
            codes.extend_from_slice(&code_bytes(outcome));
            self.metrics.served(engine, Direction::Get, op.len, outcome);
        }
        let pinned = || ranges.iter().filter_map(|range| range.as_ref().ok());
        let payload_len: u64 = pinned().map(|range| range.bytes().len() as u64).sum();
        let reply_header = FrameHeader {
            body_len: codes.len() as u32,
            payload_len,
            ..FrameHeader::new(FrameKind::ReadReply, header.request)
        };
        let header_bytes = reply_header.encode();
        let mut chunk = Chunk::new();
        chunk.push(header_bytes.as_ptr().cast_mut(), header_bytes.len());
        chunk.push(codes.as_ptr().cast_mut(), codes.len());
        let mut left = payload_len;
        // SAFETY: header and codes live in this function, and pinned memory does not change.
        let flush = |chunk: &mut Chunk, left: u64| unsafe { send_all(socket, chunk, left > 0, timeout) };
        let mut iovecs = 2;
        for range in pinned() {
            let bytes = range.bytes();
            if iovecs == IOVECS_MAX {
                flush(&mut chunk, left)?;
                chunk = Chunk::new();
                iovecs = 0;
            }
            chunk.push(bytes.as_ptr().cast_mut(), bytes.len());
            iovecs += 1;
            left -= bytes.len() as u64;
        }
        flush(&mut chunk, left)
    }

    fn write(
        &self,
        socket: &Socket,
        header: &FrameHeader,
        buffers: &mut ConnectionBuffers,
        engine: EngineKind,
        timeout: IoTimeout,
    ) -> Result<(), IoError> {
        let peer = socket.name();
        let ConnectionBuffers { body, scratch, recv_buffer } = buffers;
        let ops =
            TransferOps::decode(header, body).map_err(|source| ConnectionError::Ops { peer, source })?.ops();
        let mut codes = Vec::with_capacity(2 * ops.len());
        for op in ops.iter() {
            let outcome = match claim_write(&*self.owner, &op, timeout.deadline) {
                Ok(mut claim) => {
                    receive_into(socket, recv_buffer, &mut claim, &op, timeout)?;
                    Ok(())
                }
                Err(code) => {
                    // The peer sends the bytes all the same.
                    let mut left = op.len;
                    scratch.resize(SCRATCH_BYTES.min(op.len as usize).max(scratch.len()), 0);
                    while left > 0 {
                        let step = left.min(scratch.len() as u64) as usize;
                        recv_buffer.receive(socket, &mut scratch[..step], timeout)?;
                        left -= step as u64;
                    }
                    Err(code)
                }
            };
            codes.extend_from_slice(&code_bytes(outcome));
            self.metrics.served(engine, Direction::Put, op.len, outcome);
        }
        reply(socket, FrameHeader::new(FrameKind::WriteReply, header.request), &codes, timeout)
    }
}

/// Removes a connection from the list, even if its thread panics.
struct ConnectionGuard<'a> {
    shared: &'a Shared,
    socket: &'a Socket,
    number: u64,
}

impl Drop for ConnectionGuard<'_> {
    fn drop(&mut self) {
        self.socket.shut_down();
        lock(&self.shared.connections).retain(|connection| connection.number != self.number);
    }
}

/// Size of the buffer for payload that is discarded.
const SCRATCH_BYTES: usize = 64 << 10;

/// Most bytes received ahead: a header with fifty operations, or several requests that follow each other.
const RECV_BUFFER_BYTES: usize = 4096;

/// Buffers of a connection, reused for every frame.
#[derive(Debug)]
struct ConnectionBuffers {
    recv_buffer: RecvBuffer,
    body: Vec<u8>,
    scratch: Vec<u8>,
}

impl ConnectionBuffers {
    /// Receives a body. `len` is within the limit of its kind, and the buffer grows only with the received bytes.
    fn receive_body(&mut self, socket: &Socket, len: usize, timeout: IoTimeout) -> Result<(), IoError> {
        const STEP: usize = 256 << 10;
        self.body.clear();
        self.body.shrink_to(STEP);
        while self.body.len() < len {
            let from = self.body.len();
            self.body.resize(len.min(from + STEP), 0);
            self.recv_buffer.receive(socket, &mut self.body[from..], timeout)?;
        }
        Ok(())
    }
}

/// Receives the bytes of a write directly into the record, and digests each page when it is complete.
fn receive_into(
    socket: &Socket,
    recv_buffer: &mut RecvBuffer,
    claim: &mut moontide_heap::NodeClaim<'_>,
    op: &TransferOp,
    timeout: IoTimeout,
) -> Result<(), IoError> {
    let stripe_len = claim.header().stripe_len;
    let digested = !claim.header().flags.digestless();
    let mut at = op.offset;
    let end = op.offset + op.len;
    while at < end {
        let page = at / PAGE_BYTES;
        let page_end = ((page + 1) * PAGE_BYTES).min(stripe_len);
        let until = page_end.min(end);
        let part = Span::new(at, until - at).expect("inside the claim");
        recv_buffer.receive(socket, claim.bytes_mut(part), timeout)?;
        // A page that another write completes is digested when the record is committed.
        if digested && until == page_end && page * PAGE_BYTES >= op.offset {
            claim.digest_page(page);
        }
        at = until;
    }
    Ok(())
}

/// # Safety
/// The memory of the chunk is valid for reads, and no other code writes it during the call.
unsafe fn send_all(
    socket: &Socket,
    chunk: &mut Chunk,
    more: bool,
    timeout: IoTimeout,
) -> Result<(), IoError> {
    while chunk.bytes() > 0 {
        // SAFETY: the caller upholds the contract, which is the same.
        let sent = unsafe { socket.send_some(chunk.iovecs(), more, timeout) }?;
        chunk.advance(sent);
    }
    Ok(())
}

fn reply(socket: &Socket, header: FrameHeader, body: &[u8], timeout: IoTimeout) -> Result<(), IoError> {
    let header_bytes = FrameHeader { body_len: body.len() as u32, ..header }.encode();
    let mut chunk = Chunk::new();
    chunk.push(header_bytes.as_ptr().cast_mut(), header_bytes.len());
    chunk.push(body.as_ptr().cast_mut(), body.len());
    // SAFETY: both are borrowed for the call.
    unsafe { send_all(socket, &mut chunk, false, timeout) }
}

fn refuse(socket: &Socket, header: &FrameHeader, code: ErrorCode, timeout: IoTimeout) -> Result<(), IoError> {
    let header = FrameHeader { status: Some(code), ..FrameHeader::new(FrameKind::Error, header.request) };
    reply(socket, header, &[], timeout)
}

fn code_bytes(outcome: Result<(), ErrorCode>) -> [u8; 2] {
    outcome.map_or_else(|code| code as u16, |()| 0).to_le_bytes()
}
