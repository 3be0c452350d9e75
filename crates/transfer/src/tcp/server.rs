//! [`Server`]: the owner's end. A thread per connection, which reads a frame, answers it, and reads the next.
//!
//! A thread per connection because each of them moves bytes with blocking calls, which is what is fastest, and because
//! a peer that is slow or stopped then holds up nobody but itself. An idle connection costs a sleeping thread with a
//! small stack; [`ServerConfig::connections_max`] bounds them.
//!
//! What a peer can make this side hold is bounded: one frame's body, one frame's pins, and the time that they are held
//! by the request's deadline.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_proto::limits::FRAME_PAYLOAD_BYTES_MAX;
use moontide_proto::{
    FRAME_HEADER_BYTES, FrameFlags, FrameHeader, FrameKind, Hello, Token, TransferOp, TransferOps,
};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::{ErrorCode, Span};
use tracing::{debug, warn};

use crate::engine::EngineKind;
use crate::error::{Failure, Name};
use crate::metrics::Metrics;
use crate::op::Direction;
use crate::owner::{Caller, Owner, Source, sink, sources};
use crate::sync::{Arc, Mutex, lock};
use crate::tcp::flow::Chunk;
use crate::tcp::hello;
use crate::tcp::inbox::Inbox;
use crate::tcp::socket::{Halt, PIECES_MAX, Patience, Socket, TICK};

/// How a server behaves.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where it listens; port 0 for any.
    pub listen: Vec<SocketAddr>,
    /// Most connections at a time.
    pub connections_max: usize,
    /// Most requests in flight that a peer may have on a connection.
    pub inflight_max: u32,
    /// How long a peer may take to greet.
    pub greeting: Duration,
    /// How long no byte may come or go in the middle of a frame.
    pub stall: Duration,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            connections_max: 4096,
            inflight_max: 64,
            greeting: Duration::from_secs(2),
            // Shorter than a client's: what it sends again finds the bytes free.
            stall: Duration::from_millis(700),
        }
    }
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error(
        "listen on {address}: {source} (is another process listening there, or is it not this host's address?)"
    )]
    Listen {
        /// Which address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// No thread.
    #[error("start a thread: {0}")]
    Thread(std::io::Error),
}

/// Serves an owner's memory. Dropping it ends all connections and threads.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    acceptors: Vec<(JoinHandle<()>, Arc<TcpListener>)>,
}

/// What all threads of a server share. Also serves streams that came in by another way than a listener.
#[derive(Debug)]
pub(crate) struct Shared {
    owner: Arc<dyn Owner>,
    config: ServerConfig,
    metrics: Arc<Metrics>,
    sessions: Mutex<Vec<Session>>,
    next_session: AtomicU64,
    stopped: AtomicBool,
}

#[derive(Debug)]
struct Session {
    number: u64,
    socket: Arc<Socket>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens and serves.
    pub fn start(
        config: ServerConfig,
        owner: Arc<dyn Owner>,
        metrics: Arc<Metrics>,
    ) -> Result<Server, ServeError> {
        let listen = config.listen.clone();
        let shared = Shared::new(config, owner, metrics);
        let mut server = Server { shared, addresses: Vec::new(), acceptors: Vec::new() };
        for address in listen {
            let failed = |source| ServeError::Listen { address, source };
            let listener = Arc::new(TcpListener::bind(address).map_err(failed)?);
            let bound = listener.local_addr().map_err(failed)?;
            server.addresses.push(bound);
            let (shared, heard) = (Arc::clone(&server.shared), Arc::clone(&listener));
            let thread = std::thread::Builder::new().name("moontide-accept".into());
            let thread = thread.spawn(move || shared.accept(&heard)).map_err(ServeError::Thread)?;
            server.acceptors.push((thread, listener));
        }
        Ok(server)
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// How many connections there are.
    pub fn connections(&self) -> usize {
        lock(&self.shared.sessions).len()
    }
}

impl Drop for Server {
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
    pub(crate) fn new(config: ServerConfig, owner: Arc<dyn Owner>, metrics: Arc<Metrics>) -> Arc<Shared> {
        let (sessions, next_session, stopped) = (Mutex::default(), AtomicU64::new(0), AtomicBool::new(false));
        Arc::new(Shared { owner, config, metrics, sessions, next_session, stopped })
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let accepted = listener.accept();
            if self.stopped.load(Ordering::SeqCst) {
                return;
            }
            match accepted {
                Ok((stream, peer)) => {
                    let served = self.serve(OwnedFd::from(stream), Name::Tcp(peer), None);
                    if let Err(failure) = served {
                        debug!(%peer, %failure, "connection not served");
                    }
                }
                Err(error) => {
                    // Out of descriptors, mostly: those that are open go on, and one of them will end.
                    warn!(%error, "cannot accept a connection");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    /// Serves a stream on a thread of its own. `known`: who it is, if that was found out before; else it greets.
    pub(crate) fn serve(
        self: &Arc<Self>,
        fd: OwnedFd,
        name: Name,
        known: Option<Caller>,
    ) -> Result<(), Failure> {
        let socket = Arc::new(Socket::new(fd, name)?);
        let number = self.next_session.fetch_add(1, Ordering::Relaxed);
        {
            // On the list first, so that the thread finds itself there when it ends.
            let mut sessions = lock(&self.sessions);
            if self.stopped.load(Ordering::SeqCst) {
                return Err(Failure::Stopped);
            }
            if sessions.len() >= self.config.connections_max {
                let (peer, code) = (name, ErrorCode::Busy);
                warn!(%peer, limit = self.config.connections_max, "too many connections; refusing one");
                return Err(Failure::Refused { peer, code });
            }
            sessions.push(Session { number, socket: Arc::clone(&socket), thread: None });
        }
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("moontide-serve".into()).stack_size(256 << 10).spawn(
            move || {
                let engine = if known.is_some() { EngineKind::Shm } else { EngineKind::Tcp };
                shared.metrics.served_opened(engine);
                let end = SessionEnd { shared: &shared, socket: &socket, number };
                let failure = shared.session(&socket, known);
                debug!(peer = %name, %failure, "connection ended");
                shared.metrics.served_ended(engine, &failure);
                drop(end);
            },
        );
        let mut sessions = lock(&self.sessions);
        match thread {
            Ok(thread) => {
                if let Some(session) = sessions.iter_mut().find(|session| session.number == number) {
                    session.thread = Some(thread);
                }
                Ok(())
            }
            Err(error) => {
                sessions.retain(|session| session.number != number);
                let source = rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN);
                Err(Failure::System { what: "start a thread for", peer: name, source })
            }
        }
    }

    /// Ends all sessions and waits for their threads.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        let threads: Vec<_> = {
            let mut sessions = lock(&self.sessions);
            sessions.iter().for_each(|session| session.socket.shut_down());
            sessions.iter_mut().filter_map(|session| session.thread.take()).collect()
        };
        for thread in threads {
            // A panic was told by the thread itself.
            let _ = thread.join();
        }
    }

    /// Greets and answers until the connection ends; why it did.
    fn session(&self, socket: &Socket, known: Option<Caller>) -> Failure {
        let caller = match known {
            Some(caller) => caller,
            None => {
                let greeted =
                    hello::welcome(socket, Instant::now() + self.config.greeting, |hello: &Hello| {
                        self.owner.greets(hello)?;
                        Ok(hello::hello(self.owner.node(), 0, self.config.inflight_max, Token::NONE))
                    });
                match greeted {
                    Ok(hello) => Caller::Remote(hello.caller),
                    Err(failure) => return failure,
                }
            }
        };
        let mut room = Room { inbox: Inbox::new(INBOX_BYTES), body: Vec::new(), scratch: Vec::new() };
        loop {
            match self.answer(socket, caller, &mut room) {
                Ok(()) => {}
                Err(Halt::Failed(failure)) => return failure,
                Err(Halt::Deadline) => return Failure::Abandoned { peer: socket.name() },
            }
        }
    }

    /// Reads one frame and answers it.
    fn answer(&self, socket: &Socket, caller: Caller, room: &mut Room) -> Result<(), Halt> {
        let mut bytes = [0; FRAME_HEADER_BYTES];
        while room.inbox.len() == 0 {
            // Whoever asks often asks again within a moment, and is spared a call.
            match room.inbox.receive_first(socket, INBOX_BYTES, Instant::now() + 10 * TICK) {
                Ok(()) => {}
                Err(Halt::Deadline) => socket.wait_for_ever()?,
                Err(halt) => return Err(halt),
            }
        }
        let stall = self.config.stall;
        let patience = Patience { deadline: Instant::now() + stall, stall };
        room.inbox.receive(socket, &mut bytes, patience)?;
        let peer = socket.name();
        let header = FrameHeader::decode(&bytes).map_err(|source| Failure::Frame { peer, source })?;
        let deadline = Instant::now() + Duration::from_millis(header.deadline_ms.into());
        let patience = Patience { deadline, stall };
        if header.flags != FrameFlags::NONE {
            return Err(Failure::Answer { peer, kind: header.kind, request: header.request }.into());
        }
        if header.kind == FrameKind::Cancel {
            // Whoever gives a request up ends the connection; this one has been answered already.
            return Ok(());
        }
        room.receive_body(
            socket,
            header.body_len as usize,
            Patience { deadline: deadline.max(Instant::now() + stall), stall },
        )?;
        let engine = if matches!(caller, Caller::Local(_)) { EngineKind::Shm } else { EngineKind::Tcp };
        match header.kind {
            FrameKind::Read => self.read(socket, &header, room, engine, patience),
            FrameKind::Write => self.write(socket, &header, room, engine, patience),
            FrameKind::Ping => {
                reply(socket, FrameHeader::new(FrameKind::Pong, header.request), &[], patience)
            }
            FrameKind::Begin
            | FrameKind::Commit
            | FrameKind::Load
            | FrameKind::Release
            | FrameKind::Attach => {
                let kind = header.kind.reply().expect("a request");
                match self.owner.call(caller, header.kind, &room.body, deadline) {
                    Ok(body) if body.len() <= kind.body_len_max() => {
                        reply(socket, FrameHeader::new(kind, header.request), &body, patience)
                    }
                    Ok(_) => refuse(socket, &header, ErrorCode::TooLarge, patience),
                    Err(code) => refuse(socket, &header, code, patience),
                }
            }
            // Control calls are the master's, and nobody answers an answer.
            kind => Err(Failure::Answer { peer, kind, request: header.request }.into()),
        }
    }

    fn read(
        &self,
        socket: &Socket,
        header: &FrameHeader,
        room: &mut Room,
        engine: EngineKind,
        patience: Patience,
    ) -> Result<(), Halt> {
        let peer = socket.name();
        let ops =
            TransferOps::decode(header, &room.body).map_err(|source| Failure::Ops { peer, source })?.ops();
        if ops.iter().map(|op| op.len).sum::<u64>() > FRAME_PAYLOAD_BYTES_MAX {
            return refuse(socket, header, ErrorCode::TooLarge, patience);
        }
        let sources: Vec<Result<Source<'_>, ErrorCode>> = sources(&*self.owner, ops, patience.deadline);
        let mut codes = Vec::with_capacity(2 * sources.len());
        for (source, op) in sources.iter().zip(ops.iter()) {
            let outcome = source.as_ref().map(|_| ()).map_err(|code| *code);
            codes.extend_from_slice(&code_bytes(outcome));
            self.metrics.served(engine, Direction::Get, op.len, outcome);
        }
        let good = || sources.iter().filter_map(|source| source.as_ref().ok());
        let payload_len: u64 = good().map(|source| source.bytes().len() as u64).sum();
        let answer = FrameHeader {
            body_len: codes.len() as u32,
            payload_len,
            ..FrameHeader::new(FrameKind::ReadReply, header.request)
        };
        let head = answer.encode();
        let mut chunk = Chunk::new();
        chunk.push(head.as_ptr().cast_mut(), head.len());
        chunk.push(codes.as_ptr().cast_mut(), codes.len());
        let mut left = payload_len;
        // SAFETY: header and codes live here, and what is pinned does not change.
        let flush = |chunk: &mut Chunk, left: u64| unsafe { send_all(socket, chunk, left > 0, patience) };
        let mut pieces = 2;
        for source in good() {
            let bytes = source.bytes();
            if pieces == PIECES_MAX {
                flush(&mut chunk, left)?;
                chunk = Chunk::new();
                pieces = 0;
            }
            chunk.push(bytes.as_ptr().cast_mut(), bytes.len());
            pieces += 1;
            left -= bytes.len() as u64;
        }
        flush(&mut chunk, left)
    }

    fn write(
        &self,
        socket: &Socket,
        header: &FrameHeader,
        room: &mut Room,
        engine: EngineKind,
        patience: Patience,
    ) -> Result<(), Halt> {
        let peer = socket.name();
        let Room { body, scratch, inbox } = room;
        let ops = TransferOps::decode(header, body).map_err(|source| Failure::Ops { peer, source })?.ops();
        let mut codes = Vec::with_capacity(2 * ops.len());
        for op in ops.iter() {
            let outcome = match sink(&*self.owner, &op, patience.deadline) {
                Ok(mut claim) => {
                    receive_into(socket, inbox, &mut claim, &op, patience)?;
                    Ok(())
                }
                Err(code) => {
                    // Its bytes are on the way all the same.
                    let mut left = op.len;
                    scratch.resize(SCRATCH_BYTES.min(op.len as usize).max(scratch.len()), 0);
                    while left > 0 {
                        let piece = left.min(scratch.len() as u64) as usize;
                        inbox.receive(socket, &mut scratch[..piece], patience)?;
                        left -= piece as u64;
                    }
                    Err(code)
                }
            };
            codes.extend_from_slice(&code_bytes(outcome));
            self.metrics.served(engine, Direction::Put, op.len, outcome);
        }
        reply(socket, FrameHeader::new(FrameKind::WriteReply, header.request), &codes, patience)
    }
}

/// Takes a session off the list, even if its thread panics.
struct SessionEnd<'a> {
    shared: &'a Shared,
    socket: &'a Socket,
    number: u64,
}

impl Drop for SessionEnd<'_> {
    fn drop(&mut self) {
        self.socket.shut_down();
        lock(&self.shared.sessions).retain(|session| session.number != self.number);
    }
}

/// Where bytes go that nobody wants.
const SCRATCH_BYTES: usize = 64 << 10;

/// What is received ahead: a header with fifty operations, or several that follow each other.
const INBOX_BYTES: usize = 4096;

/// Memory of a session, used again and again.
#[derive(Debug)]
struct Room {
    inbox: Inbox,
    body: Vec<u8>,
    scratch: Vec<u8>,
}

impl Room {
    /// Receives a body. What is announced is within its kind's bound, and memory grows with what has come.
    fn receive_body(&mut self, socket: &Socket, len: usize, patience: Patience) -> Result<(), Halt> {
        const STEP: usize = 256 << 10;
        self.body.clear();
        self.body.shrink_to(STEP);
        while self.body.len() < len {
            let from = self.body.len();
            self.body.resize(len.min(from + STEP), 0);
            self.inbox.receive(socket, &mut self.body[from..], patience)?;
        }
        Ok(())
    }
}

/// Receives the bytes of a write where they belong, and digests each page as it is complete.
fn receive_into(
    socket: &Socket,
    inbox: &mut Inbox,
    claim: &mut moontide_heap::NodeClaim<'_>,
    op: &TransferOp,
    patience: Patience,
) -> Result<(), Halt> {
    let stripe_len = claim.header().stripe_len;
    let digested = !claim.header().flags.digestless();
    let mut at = op.offset;
    let end = op.offset + op.len;
    while at < end {
        let page = at / PAGE_BYTES;
        let page_end = ((page + 1) * PAGE_BYTES).min(stripe_len);
        let until = page_end.min(end);
        let part = Span::new(at, until - at).expect("inside the claim");
        inbox.receive(socket, claim.bytes_mut(part), patience)?;
        // Pages of which another write brings the rest are digested when the record is committed.
        if digested && until == page_end && page * PAGE_BYTES >= op.offset {
            claim.seal_page(page);
        }
        at = until;
    }
    Ok(())
}

/// # Safety
/// The memory of the chunk is valid for reads, and nobody writes it meanwhile.
unsafe fn send_all(socket: &Socket, chunk: &mut Chunk, more: bool, patience: Patience) -> Result<(), Halt> {
    while chunk.bytes() > 0 {
        // SAFETY: says the caller.
        let sent = unsafe { socket.send_some(chunk.pieces(), more, patience) }?;
        chunk.advance(sent);
    }
    Ok(())
}

fn reply(socket: &Socket, header: FrameHeader, body: &[u8], patience: Patience) -> Result<(), Halt> {
    let head = FrameHeader { body_len: body.len() as u32, ..header }.encode();
    let mut chunk = Chunk::new();
    chunk.push(head.as_ptr().cast_mut(), head.len());
    chunk.push(body.as_ptr().cast_mut(), body.len());
    // SAFETY: both are borrowed for the call.
    unsafe { send_all(socket, &mut chunk, false, patience) }
}

fn refuse(socket: &Socket, header: &FrameHeader, code: ErrorCode, patience: Patience) -> Result<(), Halt> {
    let answer = FrameHeader { status: Some(code), ..FrameHeader::new(FrameKind::Error, header.request) };
    reply(socket, answer, &[], patience)
}

fn code_bytes(outcome: Result<(), ErrorCode>) -> [u8; 2] {
    outcome.map_or_else(|code| code as u16, |()| 0).to_le_bytes()
}
