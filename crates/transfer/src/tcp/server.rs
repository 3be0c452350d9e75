//! [`TcpServer`]: server side of the TCP engine. A thread per connection reads a frame, replies to it, and reads the
//! next.
//!
//! A thread per connection because each moves bytes with blocking calls, which are the fastest, and because a slow or
//! stopped peer then blocks only its own connection. An idle connection costs a sleeping thread with a small stack;
//! [`TcpServerConfig::connections_max`] bounds their number, and `admission` who may have how many of them.
//!
//! The resources of a peer are bounded: the body of one frame, which is received within
//! [`TcpServerConfig::body_timeout`], and whose memory comes from the budget of all connections if it is large; and the
//! pins of one frame, held at most until the request's deadline.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use moontide_auth::{Call, ClientCertificates, Credentials};
use moontide_proto::limits::FRAME_PAYLOAD_BYTES_MAX;
use moontide_proto::{
    FRAME_HEADER_BYTES, FrameFlags, FrameHeader, FrameKind, Hello, OpFlags, Token, TransferOp, TransferOps,
};
use moontide_rt::sync::{Arc, Mutex, lock};
use moontide_rt::time::Instant;
use moontide_types::limits::{PAGE_BYTES, REQUEST_BYTES_MAX};
use moontide_types::{ErrorCode, NodeId, Span};
use tracing::{debug, warn};

use crate::engine_kind::EngineKind;
use crate::error::{ConnectionError, PeerName};
use crate::metrics::Metrics;
use crate::op::Direction;
use crate::owner::{Owner, PeerIdentity, PinnedRange, claim_write, pin_reads};
use crate::tcp::admission::{Admission, Origin, Phase, admit};
use crate::tcp::body_budget::{BodyBudget, SMALL_BODY_BYTES};
use crate::tcp::handshake;
use crate::tcp::payload::Chunk;
use crate::tcp::recv_buffer::RecvBuffer;
use crate::tcp::socket::{BLOCKING_CALL_MAX, IOVECS_MAX, IoError, IoTimeout, Socket};
use crate::tcp::tls::ALPN;

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct TcpServerConfig {
    /// Addresses to listen on; port 0 for any free port.
    pub listen: Vec<SocketAddr>,
    /// Most connections at the same time.
    pub connections_max: usize,
    /// Most connections of one host, or of one process of this host.
    pub connections_per_peer_max: usize,
    /// Most requests in flight on a connection, announced to the peer.
    pub inflight_max: u32,
    /// Certificate of this process; `None`: connections are not encrypted.
    pub credentials: Option<Arc<Credentials>>,
    /// Time limit for the handshake.
    pub handshake_timeout: Duration,
    /// How long a connection may make no progress in the middle of a frame.
    pub stall_timeout: Duration,
    /// Time after the handshake in which a remote peer must send its first request.
    pub unused_timeout: Duration,
    /// Most bytes of large bodies at the same time, over all connections.
    pub body_bytes_max: u64,
    /// Time for a body from its first to its last byte, however steadily it arrives.
    pub body_timeout: Duration,
}

impl Default for TcpServerConfig {
    fn default() -> TcpServerConfig {
        TcpServerConfig {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            connections_max: 4096,
            // Half, so that one host does not lock the others out: the two connections each of a thousand processes.
            connections_per_peer_max: 2048,
            inflight_max: 64,
            credentials: None,
            handshake_timeout: Duration::from_secs(2),
            // Shorter than a client's: when the client sends again, the claim of the first attempt is released.
            stall_timeout: Duration::from_millis(700),
            // Clients open two connections, and use the second one when they are busy; they open it again if it is closed.
            unused_timeout: Duration::from_secs(60),
            // Four of the longest, or two hundred batches of a thousand small objects. A body is copied once when it is
            // decoded.
            body_bytes_max: 4 * REQUEST_BYTES_MAX as u64,
            // As at a master. The longest body then needs 1.7 MB/s.
            body_timeout: Duration::from_secs(10),
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
    /// The oldest first.
    connections: Mutex<Vec<ServerConnection>>,
    body_budget: BodyBudget,
    next_connection: AtomicU64,
    stopped: AtomicBool,
}

#[derive(Debug)]
struct ServerConnection {
    number: u64,
    socket: Arc<Socket>,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
    phase: Phase,
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
        let (body_budget, next_connection) = (BodyBudget::new(config.body_bytes_max), AtomicU64::new(0));
        Arc::new(Shared { owner, config, metrics, connections, body_budget, next_connection, stopped })
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
                    // Mostly out of descriptors: open connections continue, and one that is silent makes room.
                    warn!(%error, "cannot accept a connection");
                    self.close_oldest_silent();
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    /// Closes the oldest connection that has not finished its handshake.
    fn close_oldest_silent(&self) {
        let mut connections = lock(&self.connections);
        if let Some(silent) = connections.iter_mut().find(|open| open.phase == Phase::Handshake) {
            silent.phase = Phase::Closing;
            silent.socket.shut_down();
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
            let origin = Origin::of(name);
            let limits = (self.config.connections_max, self.config.connections_per_peer_max);
            match admit(connections.iter().map(|open| (open.origin, open.phase)), origin, limits) {
                Admission::Accept => {}
                Admission::Replace(index) => {
                    connections[index].phase = Phase::Closing;
                    connections[index].socket.shut_down();
                }
                Admission::Refuse(reason) => {
                    let (peer, code) = (name, ErrorCode::Busy);
                    warn!(%peer, ?limits, reason, "connection refused");
                    return Err(ConnectionError::HandshakeRefused { peer, code });
                }
            }
            let phase = if identity.is_some() { Phase::Established } else { Phase::Handshake };
            let (socket, thread) = (Arc::clone(&socket), None);
            connections.push(ServerConnection { number, socket, thread, origin, phase });
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("moontide-serve".into()).stack_size(256 << 10).spawn(
            move || {
                let engine = if identity.is_some() { EngineKind::Shm } else { EngineKind::Tcp };
                shared.metrics.served_opened(engine);
                let end = ConnectionGuard { shared: &shared, socket: &socket, number };
                let failure = shared.serve_connection(&socket, number, identity);
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
    fn serve_connection(
        &self,
        socket: &Socket,
        number: u64,
        identity: Option<PeerIdentity>,
    ) -> ConnectionError {
        let (caller, near) = match identity {
            Some(caller) => (caller, NodeId(0)),
            None => {
                let deadline = Instant::now() + self.config.handshake_timeout;
                if let Some(credentials) = &self.config.credentials {
                    let config = credentials.server(ClientCertificates::Required, &[ALPN]);
                    if let Err(failure) = socket.start_server_tls(config, deadline) {
                        return failure;
                    }
                }
                let handshake = handshake::server_handshake(socket, deadline, |hello: &Hello| {
                    self.owner.authorize_peer(hello, socket.peer())?;
                    self.establish(number);
                    Ok(handshake::hello(self.owner.node(), 0, self.config.inflight_max, Token::NONE))
                });
                match handshake {
                    Ok((hello, near)) => (PeerIdentity::Remote(hello.caller), near),
                    Err(failure) => return failure,
                }
            }
        };
        let mut buffers = ConnectionBuffers {
            recv_buffer: RecvBuffer::new(RECV_BUFFER_BYTES),
            body: Vec::new(),
            reads: ReadSampler { near, bytes: 0 },
            is_background: false,
            unused_until: identity.is_none().then(|| Instant::now() + self.config.unused_timeout),
        };
        loop {
            match self.handle_frame(socket, caller, &mut buffers) {
                Ok(()) => {}
                Err(IoError::Failed(failure)) => return failure,
                Err(IoError::Deadline) => return ConnectionError::Abandoned { peer: socket.name() },
            }
        }
    }

    /// Records that a connection has finished its handshake, before the peer learns that: it no longer makes room for
    /// others.
    fn establish(&self, number: u64) {
        let mut connections = lock(&self.connections);
        let connection = connections.iter_mut().find(|connection| connection.number == number);
        if let Some(connection) = connection.filter(|connection| connection.phase == Phase::Handshake) {
            connection.phase = Phase::Established;
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
                Err(IoError::Deadline) => match buffers.unused_until {
                    None => socket.wait_readable()?,
                    Some(end) if socket.wait(true, false, end)?.readable => {}
                    Some(_) => {
                        let (peer, silent) = (socket.name(), self.config.unused_timeout);
                        return Err(ConnectionError::Stalled { peer, silent }.into());
                    }
                },
                Err(error) => return Err(error),
            }
        }
        buffers.unused_until = None;
        let stall = self.config.stall_timeout;
        let timeout = IoTimeout { deadline: Instant::now() + stall, stall };
        buffers.recv_buffer.receive(socket, &mut bytes, timeout)?;
        let peer = socket.name();
        let header = FrameHeader::decode(&bytes).map_err(|source| ConnectionError::Frame { peer, source })?;
        let now = Instant::now();
        let deadline = now + Duration::from_millis(header.timeout_ms.into());
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
        let body_end = deadline.max(now + stall).min(now + self.config.body_timeout);
        let body_timeout = IoTimeout { deadline: body_end, stall };
        let body_len = header.body_len as usize;
        let is_large = body_len > SMALL_BODY_BYTES;
        // Shorter than the time after which the peer gives up.
        let permit = is_large.then(|| self.body_budget.acquire(body_len as u64, (now + stall).min(deadline)));
        if let Some(None) = permit {
            discard(socket, &mut buffers.recv_buffer, body_len as u64, body_timeout)?;
            return refuse(socket, &header, ErrorCode::Busy, timeout);
        }
        buffers.receive_body(socket, body_len, body_timeout)?;
        let handled = self.handle_request(socket, caller, &header, buffers, timeout);
        // The memory of a large body goes before its permit.
        buffers.body.clear();
        buffers.body.shrink_to(SMALL_BODY_BYTES);
        drop(permit);
        handled
    }

    /// Replies to a request whose body is in the buffer.
    fn handle_request(
        &self,
        socket: &Socket,
        caller: PeerIdentity,
        header: &FrameHeader,
        buffers: &mut ConnectionBuffers,
        timeout: IoTimeout,
    ) -> Result<(), IoError> {
        let peer = socket.name();
        if let (Some(peer), Some(call)) = (socket.peer(), call_of(header.kind))
            && !peer.role().may(call)
            && !moontide_rt::mutation_enabled("frame-unchecked")
        {
            // Payload may follow: the connection ends.
            let code = ErrorCode::PermissionDenied;
            refuse(socket, header, code, timeout)?;
            return Err(ConnectionError::HandshakeRefused { peer: socket.name(), code }.into());
        }
        let engine = if matches!(caller, PeerIdentity::Local(_)) { EngineKind::Shm } else { EngineKind::Tcp };
        match header.kind {
            FrameKind::Read => self.read(socket, header, buffers, engine, timeout),
            FrameKind::Write => self.write(socket, header, buffers, engine, timeout),
            FrameKind::Ping => reply(socket, FrameHeader::new(FrameKind::Pong, header.request), &[], timeout),
            FrameKind::Begin
            | FrameKind::Commit
            | FrameKind::Load
            | FrameKind::Release
            | FrameKind::Attach
            | FrameKind::Describe => {
                let kind = header.kind.reply().expect("a request");
                match self.owner.call(caller, tenant_of(socket), header.kind, &buffers.body, timeout.deadline)
                {
                    Ok(body) if body.len() <= kind.body_len_max() => {
                        reply(socket, FrameHeader::new(kind, header.request), &body, timeout)
                    }
                    Ok(_) => refuse(socket, header, ErrorCode::TooLarge, timeout),
                    Err(code) => refuse(socket, header, code, timeout),
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
        let ConnectionBuffers { body, reads, is_background, .. } = buffers;
        let ops =
            TransferOps::decode(header, body).map_err(|source| ConnectionError::Ops { peer, source })?.ops();
        if ops.iter().map(|op| op.len).sum::<u64>() > FRAME_PAYLOAD_BYTES_MAX {
            return refuse(socket, header, ErrorCode::TooLarge, timeout);
        }
        // Other nodes copy over connections of their own, which carry nothing else.
        if !*is_background && ops.iter().any(|op| op.flags.contains(OpFlags::BACKGROUND)) {
            *is_background = true;
            moontide_rt::thread::lower_priority();
        }
        let ranges: Vec<Result<PinnedRange<'_>, ErrorCode>> =
            pin_reads(&*self.owner, tenant_of(socket), ops, timeout.deadline);
        let mut codes = Vec::with_capacity(2 * ranges.len());
        for (range, op) in ranges.iter().zip(ops.iter()) {
            let outcome = range.as_ref().map(|_| ()).map_err(|code| *code);
            codes.extend_from_slice(&code_bytes(outcome));
            self.metrics.served(engine, Direction::Get, op.len, outcome);
            if outcome.is_ok() {
                reads.note(&*self.owner, &op);
            }
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
        let ConnectionBuffers { body, recv_buffer, .. } = buffers;
        let ops =
            TransferOps::decode(header, body).map_err(|source| ConnectionError::Ops { peer, source })?.ops();
        let mut codes = Vec::with_capacity(2 * ops.len());
        for op in ops.iter() {
            let outcome = match claim_write(&*self.owner, tenant_of(socket), &op, timeout.deadline) {
                Ok(mut claim) => {
                    receive_into(socket, recv_buffer, &mut claim, &op, timeout)?;
                    Ok(())
                }
                Err(code) => {
                    // The peer sends the bytes all the same.
                    discard(socket, recv_buffer, op.len, timeout)?;
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

/// Most bytes that are discarded in one call.
const DISCARD_BYTES: u64 = 64 << 10;

/// Most bytes received ahead: a header with fifty operations, or several requests that follow each other.
const RECV_BUFFER_BYTES: usize = 4096;

/// Buffers of a connection, reused for every frame.
#[derive(Debug)]
struct ConnectionBuffers {
    recv_buffer: RecvBuffer,
    body: Vec<u8>,
    reads: ReadSampler,
    /// Whether the thread of the connection has a low priority.
    is_background: bool,
    /// Time until which a connection without requests is open; `None` after the first one.
    unused_until: Option<Instant>,
}

/// Bytes read over a connection for each notice to the owner. A node that serves 2 GB/s makes 2,000 notices per second.
const BYTES_PER_READ_NOTICE: u64 = 1 << 20;

/// Samples the reads of a peer by their bytes, so that the owner learns which records another host reads much without any work
/// for the others.
#[derive(Debug)]
struct ReadSampler {
    /// Node on the host of the peer; 0: none, and nothing is sampled.
    near: NodeId,
    /// Bytes since the last notice.
    bytes: u64,
}

impl ReadSampler {
    /// Counts a read.
    fn note(&mut self, owner: &dyn Owner, op: &TransferOp) {
        let counts =
            ![OpFlags::DIGESTS, OpFlags::BACKGROUND, OpFlags::DISK].iter().any(|&f| op.flags.contains(f));
        if self.near == NodeId(0) || self.near == owner.node() || !counts {
            return;
        }
        self.bytes += op.len;
        if self.bytes >= BYTES_PER_READ_NOTICE {
            owner.on_remote_reads(self.near, op, self.bytes);
            self.bytes = 0;
        }
    }
}

impl ConnectionBuffers {
    /// Receives a body. `len` is within the limit of its kind, and the buffer grows only with the received bytes.
    fn receive_body(&mut self, socket: &Socket, len: usize, timeout: IoTimeout) -> Result<(), IoError> {
        const STEP: usize = 256 << 10;
        self.body.clear();
        while self.body.len() < len {
            let from = self.body.len();
            // Exact: twice the memory of a body would exceed its permit.
            self.body.reserve_exact(STEP.min(len - from));
            self.body.resize(len.min(from + STEP), 0);
            self.recv_buffer.receive(socket, &mut self.body[from..], timeout)?;
        }
        Ok(())
    }
}

/// Receives `len` bytes that are not used.
fn discard(
    socket: &Socket,
    recv_buffer: &mut RecvBuffer,
    len: u64,
    timeout: IoTimeout,
) -> Result<(), IoError> {
    let (mut left, mut scratch) = (len, vec![0; len.min(DISCARD_BYTES) as usize]);
    while left > 0 {
        let step = left.min(DISCARD_BYTES) as usize;
        recv_buffer.receive(socket, &mut scratch[..step], timeout)?;
        left -= step as u64;
    }
    Ok(())
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
    claim.set_written();
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

/// Returns the call that a frame makes, for the table of rights.
fn call_of(kind: FrameKind) -> Option<Call> {
    match kind {
        FrameKind::Read => Some(Call::Read),
        FrameKind::Write => Some(Call::Write),
        FrameKind::Begin => Some(Call::Begin),
        FrameKind::Commit => Some(Call::Commit),
        FrameKind::Load => Some(Call::Load),
        FrameKind::Release => Some(Call::Release),
        FrameKind::Describe => Some(Call::Describe),
        FrameKind::Ping => Some(Call::PingNode),
        // Not served to peers on the network.
        _ => None,
    }
}

/// Returns the only tenant whose records the peer may use.
fn tenant_of(socket: &Socket) -> Option<&str> {
    socket.peer().and_then(|peer| peer.role().tenant())
}

fn code_bytes(outcome: Result<(), ErrorCode>) -> [u8; 2] {
    outcome.map_or_else(|code| code as u16, |()| 0).to_le_bytes()
}
