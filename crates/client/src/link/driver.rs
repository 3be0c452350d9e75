//! [`LinkDriver`]: task that owns the socket of an [`AsyncLink`](super::AsyncLink).
//!
//! One loop polls all sources ([`Session::poll`]): commands from callers, space in the socket for writing, bytes to
//! read, the deadline of a request. It takes all available commands before it sends batches, so that the keys of
//! concurrent callers share a batch.
//!
//! Limits: commands wait in a channel of [`COMMANDS_MAX`]. The driver takes one only while the request table has space,
//! fewer than [`QUEUED_KEYS_MAX`] keys are queued and less than [`OUT_BYTES_MAX`] bytes wait to be written. Otherwise
//! callers wait for the channel, each until its deadline.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use moontide_auth::ExpectedServer;
use moontide_rt::sync::Mutex;
use moontide_rt::time::Instant;
use moontide_tasks::{MaybeTls, TlsClient};
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::{Key, Tenant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Sleep, sleep_until, timeout};

use super::batcher::SingleKey;
use super::call::Outcome;
use super::config::{Deadline, LinkConfig, MasterHint};
use super::error::LinkError;
use super::frames::{self, FrameReader, RequestFrame};
use super::handshake::{self, ALPN};
use super::reconnect::Reconnect;
use super::tracker::{BatchedCall, RequestTracker};

/// Capacity of the command channel; further callers wait for space in it.
pub(super) const COMMANDS_MAX: usize = 1024;

/// Most queued keys: one full batch. Further keys wait in the channel.
const QUEUED_KEYS_MAX: usize = BATCH_KEYS_MAX;

/// Unwritten bytes at which no further command is taken: about the size of a socket buffer.
const OUT_BYTES_MAX: usize = 1 << 20;

/// State shared by the handles and the driver.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: LinkConfig,
    pub(super) address: Arc<str>,
    pub(super) hint: Mutex<MasterHint>,
    pub(super) in_flight: AtomicUsize,
    pub(super) queued_keys: AtomicUsize,
}

impl Shared {
    pub(super) fn new(config: LinkConfig) -> Shared {
        Shared {
            address: config.address.as_str().into(),
            config,
            hint: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            queued_keys: AtomicUsize::new(0),
        }
    }
}

type Reply = oneshot::Sender<Result<Outcome, LinkError>>;

/// A call of a handle.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) body: CommandBody,
    pub(super) deadline: Deadline,
    pub(super) reply: Reply,
}

#[derive(Debug)]
pub(super) enum CommandBody {
    /// Separate request, encoded by its caller.
    Call(RequestFrame),
    /// Key that is batched with others.
    Single(QueuedKey),
}

/// Key in the command channel: tenant and key in one allocation.
#[derive(Debug)]
pub(super) struct QueuedKey {
    kind: BatchedCall,
    lease_ms: u32,
    tenant_len: usize,
    tenant_and_key: Box<[u8]>,
}

impl QueuedKey {
    pub(super) fn new(kind: BatchedCall, tenant: Tenant<'_>, key: Key<'_>, lease_ms: u32) -> QueuedKey {
        let tenant = tenant.as_str().as_bytes();
        let tenant_and_key = [tenant, key.as_bytes()].concat().into();
        QueuedKey { kind, lease_ms, tenant_len: tenant.len(), tenant_and_key }
    }

    fn parts(&self) -> (Tenant<'_>, Key<'_>) {
        let (tenant, key) = self.tenant_and_key.split_at(self.tenant_len);
        let tenant = Tenant::from_bytes(tenant).expect("stored from a valid tenant");
        (tenant, Key::new(key).expect("stored from a valid key"))
    }
}

/// Receiver of the commands; connects and reconnects.
#[derive(Debug)]
pub(super) struct LinkDriver {
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    reconnect: Reconnect,
    session: Option<Session>,
}

/// Reason of the end of a session.
enum SessionEnd {
    /// All handles are dropped.
    Closed,
    Broken(LinkError),
}

impl LinkDriver {
    /// Makes the first connection, so that a wrong address fails `AsyncLink::connect`.
    pub(super) async fn connect(
        shared: Arc<Shared>,
        commands: mpsc::Receiver<Command>,
    ) -> Result<LinkDriver, LinkError> {
        let session = Session::open(&shared, shared.config.connect_until(None)).await?;
        Ok(LinkDriver { shared, commands, reconnect: Reconnect::default(), session: Some(session) })
    }

    pub(super) async fn run(mut self) {
        loop {
            let mut session = match self.session.take() {
                Some(session) => session,
                None => match self.reconnect().await {
                    Some(session) => session,
                    None => return,
                },
            };
            match poll_fn(|cx| session.poll(cx, &mut self.commands, &mut self.reconnect)).await {
                SessionEnd::Closed => return,
                SessionEnd::Broken(error) => {
                    if !session.got_reply {
                        self.reconnect.failed(Instant::now(), error.clone());
                    }
                    session.fail(&error);
                }
            }
        }
    }

    /// Waits for a command, and connects for it. `None` when all handles are dropped.
    async fn reconnect(&mut self) -> Option<Session> {
        loop {
            let command = self.commands.recv().await?;
            let until = self.shared.config.connect_until(Some(command.deadline));
            let opened = match self.reconnect.check(Instant::now()) {
                Ok(()) => Session::open(&self.shared, until).await.inspect_err(|error| {
                    self.reconnect.failed(Instant::now(), error.clone());
                }),
                Err(error) => Err(error),
            };
            match opened {
                Ok(mut session) => {
                    session.take(command);
                    return Some(session);
                }
                Err(error) => send_reply(command.reply, Err(error)),
            }
        }
    }
}

/// Delivers an outcome. The caller may have been dropped.
fn send_reply(reply: Reply, outcome: Result<Outcome, LinkError>) {
    let _ = reply.send(outcome);
}

/// Connection of the driver, with its requests.
#[derive(Debug)]
struct Session {
    shared: Arc<Shared>,
    stream: MaybeTls<TcpStream>,
    frames: FrameReader,
    tracker: RequestTracker<Reply>,
    /// Bytes to write, starting at `written`.
    out: Vec<u8>,
    written: usize,
    /// Set to the deadline of a request, or `None`. It may fire early: the end of a request does not move it.
    timer: Option<Pin<Box<Sleep>>>,
    got_reply: bool,
}

impl Session {
    /// Connects and performs the handshake; fails at `until`.
    async fn open(shared: &Arc<Shared>, until: Instant) -> Result<Session, LinkError> {
        let timed_out = |_| LinkError::unreachable(&shared.address, io::ErrorKind::TimedOut.into());
        let left = until.saturating_duration_since(Instant::now());
        timeout(left, Session::open_untimed(shared)).await.map_err(timed_out)?
    }

    async fn open_untimed(shared: &Arc<Shared>) -> Result<Session, LinkError> {
        let unreachable = |error| LinkError::unreachable(&shared.address, error);
        let stream = TcpStream::connect(&*shared.address).await.map_err(unreachable)?;
        handshake::prepare(&stream).map_err(unreachable)?;
        let tls = TlsClient::new(shared.config.credentials.clone(), ExpectedServer::Master, ALPN);
        let mut stream = tls.connect(stream).await.map_err(unreachable)?;
        let (hello, mut written) = (handshake::hello_frame(&shared.config), 0);
        while written < hello.len() {
            let write = poll_fn(|cx| Pin::new(&mut stream).poll_write(cx, &hello[written..]));
            written += write.await.map_err(unreachable)?;
        }
        poll_fn(|cx| Pin::new(&mut stream).poll_flush(cx)).await.map_err(unreachable)?;
        let mut frames = FrameReader::new();
        let frame = loop {
            if let Some(frame) = frames.next().map_err(|error| LinkError::protocol(&shared.address, error))? {
                break frame;
            }
            poll_fn(|cx| poll_read(cx, &mut stream, &mut frames)).await.map_err(unreachable)?;
        };
        let inflight_max = handshake::check_hello_ack(&frame, &shared.config, &shared.address)?;
        Ok(Session {
            shared: shared.clone(),
            stream,
            frames,
            tracker: RequestTracker::new(inflight_max),
            out: Vec::new(),
            written: 0,
            timer: None,
            got_reply: false,
        })
    }

    /// Makes all possible progress; pending until more is possible.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        commands: &mut mpsc::Receiver<Command>,
        reconnect: &mut Reconnect,
    ) -> Poll<SessionEnd> {
        let end = loop {
            let mut progress = false;
            while self.has_space() {
                match commands.poll_recv(cx) {
                    Poll::Ready(Some(command)) => self.take(command),
                    Poll::Ready(None) => return Poll::Ready(SessionEnd::Closed),
                    Poll::Pending => break,
                }
            }
            self.send_ready();
            match self.poll_write(cx) {
                Poll::Ready(Err(_)) => break SessionEnd::Broken(LinkError::lost(&self.shared.address)),
                Poll::Ready(Ok(())) | Poll::Pending => {}
            }
            match poll_read(cx, &mut self.stream, &mut self.frames) {
                Poll::Ready(Err(_)) => break SessionEnd::Broken(LinkError::lost(&self.shared.address)),
                Poll::Ready(Ok(())) => {
                    progress = true;
                    if let Err(error) = self.deliver(reconnect) {
                        break SessionEnd::Broken(error);
                    }
                }
                Poll::Pending => {}
            }
            progress |= self.poll_timer(cx).is_ready();
            if !progress {
                let load = self.tracker.load();
                // Relaxed: numbers for a metric that order nothing.
                self.shared.in_flight.store(load.in_flight, Ordering::Relaxed);
                self.shared.queued_keys.store(load.queued_keys, Ordering::Relaxed);
                return Poll::Pending;
            }
        };
        Poll::Ready(end)
    }

    fn has_space(&self) -> bool {
        !self.tracker.is_full()
            && self.tracker.load().queued_keys < QUEUED_KEYS_MAX
            && self.out.len() - self.written < OUT_BYTES_MAX
    }

    /// Takes a command unless its caller is gone. Queued keys are sent later, by [`send_ready`](Session::send_ready).
    fn take(&mut self, command: Command) {
        let Command { body, deadline, reply } = command;
        if reply.is_closed() {
            return; // the caller timed out or was dropped
        }
        match body {
            CommandBody::Call(outgoing) => {
                let request = self.tracker.insert(outgoing.kind(), deadline.at, reply);
                self.write(&outgoing.numbered(request));
                self.watch(deadline.at);
            }
            CommandBody::Single(single) => {
                let (tenant, key) = single.parts();
                let (lease_ms, deadline) = (single.lease_ms, deadline.at);
                self.tracker.push(single.kind, SingleKey { tenant, key, lease_ms, deadline, waiter: reply });
            }
        }
    }

    /// Sends the batches that are ready.
    fn send_ready(&mut self) {
        while let Some(batch) = self.tracker.pop_batch() {
            self.watch(batch.deadline);
            let hint = *self.shared.hint.lock();
            let frame = batch.encode(&self.shared.config, hint);
            self.write(&frame);
        }
    }

    /// Delivers the replies that have arrived.
    fn deliver(&mut self, reconnect: &mut Reconnect) -> Result<(), LinkError> {
        let address = &self.shared.address;
        while let Some(frame) = self.frames.next().map_err(|error| LinkError::protocol(address, error))? {
            let request = self.tracker.take_reply(&frame.header);
            if let Some(request) = request.map_err(|error| LinkError::protocol(address, error))? {
                self.got_reply = true;
                reconnect.succeeded();
                request.settle(frame, address, send_reply);
            }
        }
        Ok(())
    }

    /// Appends a frame to the bytes to write.
    fn write(&mut self, frame: &[u8]) {
        self.out.extend_from_slice(frame);
    }

    /// Writes until nothing is left.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.out.len() {
            let rest = &self.out[self.written..];
            self.written += ready!(Pin::new(&mut self.stream).poll_write(cx, rest))?;
        }
        self.out.clear();
        self.out.shrink_to(OUT_BYTES_MAX);
        self.written = 0;
        // With TLS, bytes may be left in the stream.
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Makes the timer fire at `deadline` at the latest.
    fn watch(&mut self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let deadline = tokio::time::Instant::now() + left;
        match &mut self.timer {
            None => self.timer = Some(Box::pin(sleep_until(deadline))),
            Some(timer) if deadline < timer.deadline() => timer.as_mut().reset(deadline),
            Some(_) => {}
        }
    }

    /// Removes requests whose deadline has passed. Ready when the timer has fired.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(timer) = &mut self.timer else { return Poll::Pending };
        ready!(timer.as_mut().poll(cx));
        self.timer = None;
        while let Some((number, request)) = self.tracker.expire(Instant::now()) {
            // The deadlines of its callers have passed, too.
            drop(request);
            self.write(&frames::cancel(number));
        }
        if let Some(next) = self.tracker.next_deadline() {
            self.watch(next);
        }
        Poll::Ready(())
    }

    /// Fails all waiting calls.
    fn fail(&mut self, error: &LinkError) {
        self.tracker.drain().into_iter().for_each(|reply| send_reply(reply, Err(error.clone())));
        // Relaxed: numbers for a metric, ordered with nothing.
        self.shared.in_flight.store(0, Ordering::Relaxed);
        self.shared.queued_keys.store(0, Ordering::Relaxed);
    }
}

/// Reads available bytes. The end of the stream is an error.
fn poll_read(
    cx: &mut Context<'_>,
    stream: &mut MaybeTls<TcpStream>,
    frames: &mut FrameReader,
) -> Poll<io::Result<()>> {
    let mut space = ReadBuf::new(frames.space());
    ready!(Pin::new(stream).poll_read(cx, &mut space))?;
    let count = space.filled().len();
    if count == 0 {
        return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
    }
    frames.filled(count);
    Poll::Ready(Ok(()))
}
