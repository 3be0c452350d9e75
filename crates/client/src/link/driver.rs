//! [`Driver`]: the task that owns the socket of an [`AsyncLink`](super::AsyncLink).
//!
//! One loop over everything that can happen ([`Session::poll`]): commands from callers, room in the socket to write,
//! bytes to read, the deadline of a flight. It takes all commands that are there before it sends gathered keys, so
//! that callers who ask together travel together.
//!
//! Bounds: commands wait in a channel of [`COMMANDS_MAX`]; the driver takes one only while there is room in flight,
//! fewer than [`GATHERED_MAX`] keys are gathered and less than [`OUT_BYTES_MAX`] waits to be written. Otherwise
//! callers wait for the channel, each until its deadline.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use moontide_types::bounds::BATCH_KEYS_MAX;
use moontide_types::{Key, Tenant};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Sleep, sleep_until, timeout_at};

use super::backoff::Backoff;
use super::call::Outcome;
use super::config::{Deadline, Known, LinkConfig};
use super::error::LinkError;
use super::frames::{self, FrameReader, Outgoing};
use super::gather::Single;
use super::hello;
use super::traffic::{Gathered, Traffic};

/// Commands that wait for the driver: more callers than this wait for the channel.
pub(super) const COMMANDS_MAX: usize = 1024;

/// Keys that are gathered at most: one full batch. Beyond that, callers wait in the channel.
const GATHERED_MAX: usize = BATCH_KEYS_MAX;

/// Bytes that wait for the socket, beyond which no command is taken: what a socket's own buffer holds.
const OUT_BYTES_MAX: usize = 1 << 20;

/// What the handles and the driver share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: LinkConfig,
    pub(super) address: Arc<str>,
    pub(super) known: Mutex<Known>,
    pub(super) in_flight: AtomicUsize,
    pub(super) gathered: AtomicUsize,
}

impl Shared {
    pub(super) fn new(config: LinkConfig) -> Shared {
        Shared {
            address: config.address.as_str().into(),
            config,
            known: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            gathered: AtomicUsize::new(0),
        }
    }
}

type Reply = oneshot::Sender<Result<Outcome, LinkError>>;

/// What a caller wants.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) ask: Ask,
    pub(super) deadline: Deadline,
    pub(super) reply: Reply,
}

#[derive(Debug)]
pub(super) enum Ask {
    /// A request of its own, encoded by its caller.
    Call(Outgoing),
    /// A key that may travel with others.
    Single(SingleKey),
}

/// A key on its way to the driver: tenant and key in one allocation.
#[derive(Debug)]
pub(super) struct SingleKey {
    kind: Gathered,
    lease_ms: u32,
    tenant_len: usize,
    tenant_and_key: Box<[u8]>,
}

impl SingleKey {
    pub(super) fn new(kind: Gathered, tenant: Tenant<'_>, key: Key<'_>, lease_ms: u32) -> SingleKey {
        let tenant = tenant.as_str().as_bytes();
        let tenant_and_key = [tenant, key.as_bytes()].concat().into();
        SingleKey { kind, lease_ms, tenant_len: tenant.len(), tenant_and_key }
    }

    fn parts(&self) -> (Tenant<'_>, Key<'_>) {
        let (tenant, key) = self.tenant_and_key.split_at(self.tenant_len);
        let tenant = Tenant::from_bytes(tenant).expect("made of a tenant");
        (tenant, Key::new(key).expect("made of a key"))
    }
}

/// Owns the receiving end of the commands; connects and reconnects.
#[derive(Debug)]
pub(super) struct Driver {
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    backoff: Backoff,
    session: Option<Session>,
}

/// Why a session ended.
enum End {
    /// All handles are gone.
    Closed,
    Broken(LinkError),
}

impl Driver {
    /// Connects for the first time, so that a wrong address is told to whoever gave it.
    pub(super) async fn connect(
        shared: Arc<Shared>,
        commands: mpsc::Receiver<Command>,
    ) -> Result<Driver, LinkError> {
        let session = Session::open(&shared, shared.config.connect_until(None)).await?;
        Ok(Driver { shared, commands, backoff: Backoff::default(), session: Some(session) })
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
            match poll_fn(|cx| session.poll(cx, &mut self.commands, &mut self.backoff)).await {
                End::Closed => return,
                End::Broken(error) => {
                    if !session.answered {
                        self.backoff.failed(Instant::now(), error.clone());
                    }
                    session.fail(&error);
                }
            }
        }
    }

    /// Waits for a command that needs a connection, and makes one. `None` when all handles are gone.
    async fn reconnect(&mut self) -> Option<Session> {
        loop {
            let command = self.commands.recv().await?;
            let until = self.shared.config.connect_until(Some(command.deadline));
            let opened = match self.backoff.check(Instant::now()) {
                Ok(()) => Session::open(&self.shared, until).await.inspect_err(|error| {
                    self.backoff.failed(Instant::now(), error.clone());
                }),
                Err(error) => Err(error),
            };
            match opened {
                Ok(mut session) => {
                    session.take(command);
                    return Some(session);
                }
                Err(error) => tell(command.reply, Err(error)),
            }
        }
    }
}

/// Whoever asked may have gone.
fn tell(reply: Reply, outcome: Result<Outcome, LinkError>) {
    let _ = reply.send(outcome);
}

/// One connection.
#[derive(Debug)]
struct Session {
    shared: Arc<Shared>,
    stream: TcpStream,
    frames: FrameReader,
    traffic: Traffic<Reply>,
    /// To be written, from `written` on.
    out: Vec<u8>,
    written: usize,
    /// Set to the deadline of a flight, or not at all. It may fire early: flights that landed do not move it.
    timer: Option<Pin<Box<Sleep>>>,
    answered: bool,
}

impl Session {
    /// Connects and says Hello, until `until` at the latest.
    async fn open(shared: &Arc<Shared>, until: Instant) -> Result<Session, LinkError> {
        let timed_out = |_| LinkError::unreachable(&shared.address, io::ErrorKind::TimedOut.into());
        timeout_at(until.into(), Session::open_untimed(shared)).await.map_err(timed_out)?
    }

    async fn open_untimed(shared: &Arc<Shared>) -> Result<Session, LinkError> {
        let unreachable = |error| LinkError::unreachable(&shared.address, error);
        let mut stream = TcpStream::connect(&*shared.address).await.map_err(unreachable)?;
        hello::prepare(&stream).map_err(unreachable)?;
        let (offer, mut written) = (hello::offer(&shared.config), 0);
        while written < offer.len() {
            let write = poll_fn(|cx| Pin::new(&mut stream).poll_write(cx, &offer[written..]));
            written += write.await.map_err(unreachable)?;
        }
        let mut frames = FrameReader::new();
        let frame = loop {
            if let Some(frame) = frames.next().map_err(|error| LinkError::protocol(&shared.address, error))? {
                break frame;
            }
            poll_fn(|cx| poll_read(cx, &mut stream, &mut frames)).await.map_err(unreachable)?;
        };
        let inflight_max = hello::accepted(&frame, &shared.config, &shared.address)?;
        Ok(Session {
            shared: shared.clone(),
            stream,
            frames,
            traffic: Traffic::new(inflight_max),
            out: Vec::new(),
            written: 0,
            timer: None,
            answered: false,
        })
    }

    /// Does all that can be done, and is pending until something more can be.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        commands: &mut mpsc::Receiver<Command>,
        backoff: &mut Backoff,
    ) -> Poll<End> {
        let end = loop {
            let mut progress = false;
            while self.has_room() {
                match commands.poll_recv(cx) {
                    Poll::Ready(Some(command)) => self.take(command),
                    Poll::Ready(None) => return Poll::Ready(End::Closed),
                    Poll::Pending => break,
                }
            }
            self.depart();
            match self.poll_write(cx) {
                Poll::Ready(Err(_)) => break End::Broken(LinkError::lost(&self.shared.address)),
                Poll::Ready(Ok(())) | Poll::Pending => {}
            }
            match poll_read(cx, &mut self.stream, &mut self.frames) {
                Poll::Ready(Err(_)) => break End::Broken(LinkError::lost(&self.shared.address)),
                Poll::Ready(Ok(())) => {
                    progress = true;
                    if let Err(error) = self.deliver(backoff) {
                        break End::Broken(error);
                    }
                }
                Poll::Pending => {}
            }
            progress |= self.poll_timer(cx).is_ready();
            if !progress {
                let load = self.traffic.load();
                // Relaxed: numbers for a metric, ordered with nothing.
                self.shared.in_flight.store(load.in_flight, Ordering::Relaxed);
                self.shared.gathered.store(load.gathered, Ordering::Relaxed);
                return Poll::Pending;
            }
        };
        Poll::Ready(end)
    }

    fn has_room(&self) -> bool {
        !self.traffic.is_full()
            && self.traffic.load().gathered < GATHERED_MAX
            && self.out.len() - self.written < OUT_BYTES_MAX
    }

    /// Takes a command whose time is not over. Gathered keys leave later, in [`depart`](Session::depart).
    fn take(&mut self, command: Command) {
        let Command { ask, deadline, reply } = command;
        if reply.is_closed() {
            return; // its caller has gone
        }
        match ask {
            Ask::Call(outgoing) => {
                let request = self.traffic.board(outgoing.kind(), deadline.at, reply);
                self.write(&outgoing.numbered(request));
                self.watch(deadline.at);
            }
            Ask::Single(single) => {
                let (tenant, key) = single.parts();
                let (lease_ms, deadline) = (single.lease_ms, deadline.at);
                self.traffic.join(single.kind, Single { tenant, key, lease_ms, deadline, waiter: reply });
            }
        }
    }

    /// Sends the gathered keys that may leave.
    fn depart(&mut self) {
        while let Some(departure) = self.traffic.depart() {
            self.watch(departure.deadline);
            let known = *self.shared.known.lock();
            let frame = departure.encode(&self.shared.config, known);
            self.write(&frame);
        }
    }

    /// Hands out the replies that are there.
    fn deliver(&mut self, backoff: &mut Backoff) -> Result<(), LinkError> {
        let address = &self.shared.address;
        while let Some(frame) = self.frames.next().map_err(|error| LinkError::protocol(address, error))? {
            let flight = self.traffic.arrive(&frame.header);
            if let Some(flight) = flight.map_err(|error| LinkError::protocol(address, error))? {
                self.answered = true;
                backoff.succeeded();
                flight.settle(frame, address, tell);
            }
        }
        Ok(())
    }

    /// Appends to what is to be written.
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
        Poll::Ready(Ok(()))
    }

    /// Makes the timer fire at `deadline` at the latest.
    fn watch(&mut self, deadline: Instant) {
        let deadline = deadline.into();
        match &mut self.timer {
            None => self.timer = Some(Box::pin(sleep_until(deadline))),
            Some(timer) if deadline < timer.deadline() => timer.as_mut().reset(deadline),
            Some(_) => {}
        }
    }

    /// Ready when flights were given up.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(timer) = &mut self.timer else { return Poll::Pending };
        ready!(timer.as_mut().poll(cx));
        self.timer = None;
        while let Some((request, flight)) = self.traffic.expire(Instant::now()) {
            // Its callers see that their own deadlines have passed, too.
            drop(flight);
            self.write(&frames::cancel(request));
        }
        if let Some(next) = self.traffic.next_deadline() {
            self.watch(next);
        }
        Poll::Ready(())
    }

    /// Tells everybody who waits.
    fn fail(&mut self, error: &LinkError) {
        self.traffic.drain().into_iter().for_each(|reply| tell(reply, Err(error.clone())));
        // Relaxed: numbers for a metric, ordered with nothing.
        self.shared.in_flight.store(0, Ordering::Relaxed);
        self.shared.gathered.store(0, Ordering::Relaxed);
    }
}

/// Reads what there is. The end of the stream is an error.
fn poll_read(cx: &mut Context<'_>, stream: &mut TcpStream, frames: &mut FrameReader) -> Poll<io::Result<()>> {
    let mut space = ReadBuf::new(frames.space());
    ready!(Pin::new(stream).poll_read(cx, &mut space))?;
    let count = space.filled().len();
    if count == 0 {
        return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
    }
    frames.filled(count);
    Poll::Ready(Ok(()))
}
