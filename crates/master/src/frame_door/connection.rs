//! One connection of the framed door.
//!
//! ```text
//!  Hello ──► HelloAck, then:   read ─► handle every complete frame ─► one write ─► read …
//!                                          └─ Remove waits for nodes beside it
//! ```
//!
//! Requests are answered in the order in which they came, except Remove, which waits. One read usually brings header
//! and body of all requests that a caller had under way, and one write takes all their answers. A lone small request
//! costs a read and a write, and allocates nothing here.
//!
//! Rules: a header that cannot be read ends the connection, after an error frame, because what follows cannot be trusted;
//! a body that cannot be read is answered by an error frame. Bounds: a frame that has begun is complete within
//! [`FRAME_TIME_MAX`], a reply is taken within [`WRITE_TIME_MAX`], [`Shared::inflight_max`] calls wait at a time and the
//! connection is not read while they do.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use moontide_proto::convert::{self, Bounded};
use moontide_proto::{FRAME_HEADER_BYTES, FrameError, FrameHeader, FrameKind, Hello, ProtocolVersions, v1};
use moontide_types::ErrorCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use super::reply::{self, Response};
use super::{Shared, ThreadState};
use crate::metrics::Call;
use crate::service::Service;

/// From a frame's first byte to its last; for the Hello from the connection's beginning. The largest request then needs
/// 1.6 MB/s.
const FRAME_TIME_MAX: Duration = Duration::from_secs(10);

/// How long a caller may let its answers wait.
const WRITE_TIME_MAX: Duration = Duration::from_secs(10);

/// How long a caller that is told goodbye has for reading it.
const GOODBYE_TIME_MAX: Duration = Duration::from_secs(1);

/// How long after a request's deadline its answer is still waited for: the service keeps the deadline and answers what is
/// known by then; this is against a bug there.
const REMOVE_SLACK: Duration = Duration::from_secs(1);

/// A caller that asked again within this time of its last answer is looked for that long, before the thread sleeps.
/// Waking a sleeping thread takes some ten microseconds, which is half of a round trip on loopback.
const LINGER: Duration = Duration::from_micros(40);

/// Nobody is looked for after a larger request: in a batch, waking is shared by many keys, and the core is better used by
/// whoever makes the next one.
const LINGER_BYTES_MAX: usize = 1024;

/// The read buffer: some hundred small requests, or a batch of a thousand keys.
const INPUT_BYTES: usize = 64 << 10;

/// Less room than this in the read buffer, and what is left in it moves to its front.
const INPUT_ROOM_MIN: usize = 4 << 10;

/// Answers are sent at the latest when there are so many bytes of them.
const OUTPUT_FLUSH_BYTES: usize = 256 << 10;

/// What remains of the output buffer after a large answer.
const OUTPUT_KEEP_BYTES: usize = 64 << 10;

/// A call that waits for nodes, by its request number.
type Waiting = Pin<Box<dyn Future<Output = (u64, v1::OutcomesResponse)> + Send>>;

/// A complete frame.
struct Frame {
    header: FrameHeader,
    body: Bytes,
    /// When its first byte arrived.
    arrived: Instant,
}

/// Why a connection ends.
enum End {
    /// The caller closed it, or this process ends.
    Closed,
    /// It broke: nothing can be said to the caller.
    Broken(io::Error),
    /// The caller broke a rule; the output says which.
    Told(ErrorCode),
    /// The caller was too slow.
    TooSlow(&'static str),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        End::Broken(error)
    }
}

/// One connection.
pub(super) struct Connection {
    socket: TcpStream,
    shared: Arc<Shared>,
    thread: Arc<ThreadState>,
    input: BytesMut,
    /// The header of the frame whose body is being read; it is no longer in `input`.
    header: Option<FrameHeader>,
    /// When the first byte of the frame being read arrived, or the connection was made.
    arrived: Instant,
    /// When the last read ended: what follows a complete frame arrived then.
    last_read: Instant,
    /// Held while `input` is larger than usual.
    large: Option<OwnedSemaphorePermit>,
    /// When the last answers were sent.
    answered: Instant,
    /// The caller asked again right after its last answer.
    is_chatty: bool,
    /// The large frame is complete.
    is_large_done: bool,
    output: Vec<u8>,
    waiting: FuturesUnordered<Waiting>,
    inflight_max: usize,
    /// Whether the thread counts this connection as busy.
    is_busy: bool,
    /// The caller sends no more.
    is_ended: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.set_busy(false);
    }
}

impl Connection {
    pub(super) fn new(socket: TcpStream, shared: Arc<Shared>, thread: Arc<ThreadState>) -> Connection {
        let now = Instant::now();
        Connection {
            socket,
            inflight_max: shared.inflight_max as usize,
            shared,
            thread,
            input: BytesMut::with_capacity(INPUT_BYTES),
            header: None,
            arrived: now,
            last_read: now,
            answered: now,
            is_chatty: false,
            large: None,
            is_large_done: false,
            output: Vec::new(),
            waiting: FuturesUnordered::new(),
            is_busy: false,
            is_ended: false,
        }
    }

    /// Serves until the connection ends.
    pub(super) async fn run(mut self) {
        let end = match self.greet().await {
            Ok(()) => self.serve().await,
            Err(end) => end,
        };
        match end {
            End::Closed => {}
            End::Broken(error) => debug!(%error, "frame connection broke"),
            End::TooSlow(what) => {
                self.thread.counters.error();
                debug!(what, "frame connection closed: too slow");
            }
            End::Told(code) => {
                self.thread.counters.error();
                debug!(%code, "frame connection closed: rules broken");
                say_goodbye(&mut self.socket, &self.output).await;
            }
        }
    }

    /// The first frame says who calls, and in which versions.
    async fn greet(&mut self) -> Result<(), End> {
        let Frame { header, body, .. } = loop {
            if let Some(frame) = self.next_frame()? {
                break frame;
            }
            self.make_room().await?;
            // Also the first byte has its time: a connection that says nothing takes a seat.
            let deadline = Some(self.arrived + FRAME_TIME_MAX);
            let read = read_by(&mut self.socket, &mut self.input, deadline).await;
            self.has_read(read)?;
            if self.is_ended {
                return Err(End::Closed);
            }
        };
        if header.kind != FrameKind::Hello {
            return Err(self.told(
                header.request,
                ErrorCode::InvalidArgument,
                "a connection begins with Hello",
            ));
        }
        let hello = match Hello::decode_body(&body) {
            Ok(hello) => hello,
            Err(error) => {
                return Err(self.told(header.request, ErrorCode::InvalidArgument, &error.to_string()));
            }
        };
        let Some(version) = ProtocolVersions::CURRENT.common(hello.versions) else {
            let ProtocolVersions { min, max } = ProtocolVersions::CURRENT;
            let text = format!("this master speaks protocol versions {min} to {max}");
            return Err(self.told(header.request, ErrorCode::Unsupported, &text));
        };
        self.inflight_max = self.inflight_max.min(hello.inflight_max as usize);
        let (caller, inflight_max) = (self.shared.caller, self.inflight_max as u32); // ≤ a u32
        reply::push_hello_ack(&mut self.output, header.request, caller, version, inflight_max);
        Ok(())
    }

    async fn serve(&mut self) -> End {
        loop {
            if let Err(end) = self.turn().await {
                return end;
            }
        }
    }

    /// Handles what has arrived, sends what is due, waits for more.
    async fn turn(&mut self) -> Result<(), End> {
        while self.waiting.len() < self.inflight_max
            && let Some(frame) = self.next_frame()?
        {
            self.set_busy(true);
            self.handle(frame)?;
            if self.output.len() >= OUTPUT_FLUSH_BYTES {
                self.flush().await?;
            }
        }
        self.shrink();
        self.flush().await?;
        if self.waiting.is_empty() {
            self.set_busy(false);
            // Relaxed: nothing else is read after it; the next turn sees it at the latest.
            if self.is_ended || self.shared.stopping.load(Ordering::Relaxed) {
                return Err(End::Closed);
            }
            self.make_room().await?;
            if self.linger().await? {
                return Ok(());
            }
            return self.read().await;
        }
        if self.is_ended || self.waiting.len() >= self.inflight_max {
            // Back-pressure: what the caller sends stays in its socket.
            if let Some(done) = self.waiting.next().await {
                self.push_removed(done);
            }
            return Ok(());
        }
        self.make_room().await?;
        let deadline = self.read_deadline();
        let Connection { socket, input, waiting, .. } = self;
        tokio::select! {
            biased;
            Some(done) = waiting.next() => {
                self.push_removed(done);
                Ok(())
            }
            read = read_by(socket, input, deadline) => self.has_read(read),
        }
    }

    /// The next complete frame of the input, if there is one.
    fn next_frame(&mut self) -> Result<Option<Frame>, End> {
        let header = match self.header {
            Some(header) => header,
            None => {
                let Some(bytes) = self.input.first_chunk::<FRAME_HEADER_BYTES>() else { return Ok(None) };
                let header = match FrameHeader::decode(bytes) {
                    Ok(header) => header,
                    Err(error) => {
                        let request = request_of(bytes, &error);
                        return Err(self.told(request, error.code(), &error.to_string()));
                    }
                };
                let _ = self.input.split_to(FRAME_HEADER_BYTES);
                self.header = Some(header);
                header
            }
        };
        if header.payload_len > 0 {
            return Err(self.unsupported(&header));
        }
        let body_len = header.body_len as usize;
        if self.input.len() < body_len {
            return Ok(None);
        }
        self.header = None;
        self.is_large_done |= body_len > INPUT_BYTES;
        let arrived = std::mem::replace(&mut self.arrived, self.last_read);
        Ok(Some(Frame { header, body: self.input.split_to(body_len).freeze(), arrived }))
    }

    /// Handles one request, or begins to if it has to wait.
    fn handle(&mut self, Frame { header, body, arrived }: Frame) -> Result<(), End> {
        let service = &*self.shared.service;
        let call = match header.kind {
            FrameKind::Exist => Call::Exist,
            FrameKind::GetReplicaList => Call::GetReplicaList,
            FrameKind::PutStart => Call::PutStart,
            FrameKind::PutEnd => Call::PutEnd,
            FrameKind::Remove => Call::Remove,
            FrameKind::Ping => {
                reply::push_pong(&mut self.output, header.request);
                return Ok(());
            }
            // Answers of calls that wait are sent anyway; whoever cancelled does not look at them.
            FrameKind::Cancel => return Ok(()),
            _ => return Err(self.unsupported(&header)),
        };
        self.thread.counters.request(call);
        if arrived.elapsed() >= Duration::from_millis(header.deadline_ms.into()) {
            self.error(
                header.request,
                ErrorCode::DeadlineExceeded,
                "the deadline passed before the request's turn",
            );
            return Ok(());
        }
        let (out, request) = (&mut self.output, header.request);
        let handled = match header.kind {
            FrameKind::Exist => answer(out, &header, body, |m| service.exist(m)),
            FrameKind::GetReplicaList => answer(out, &header, body, |m| service.get_replica_list(m)),
            FrameKind::PutStart => answer(out, &header, body, |m| service.put_start(m)),
            FrameKind::PutEnd => answer(out, &header, body, |m| service.put_end(m)),
            _ => self.begin_remove(request, body),
        };
        if let Err(error) = handled {
            self.error(request, error.code(), &error.to_string());
        }
        Ok(())
    }

    fn begin_remove(&mut self, request: u64, body: Bytes) -> Result<(), convert::ConvertError> {
        // The body stays as long as the call waits. A small one is copied, so that it does not keep the read buffer; a
        // large one keeps its share of memory.
        let large = self.large.take();
        let body = if large.is_some() { body } else { Bytes::copy_from_slice(&body) };
        if large.is_some() {
            self.renew_input();
        }
        let message = convert::decode(body)?;
        self.waiting.push(remove(&self.shared.service, request, message, large));
        Ok(())
    }

    fn push_removed(&mut self, (request, response): (u64, v1::OutcomesResponse)) {
        reply::push_response(&mut self.output, request, FrameKind::RemoveReply, &response);
    }

    /// The request failed as a whole; the connection goes on.
    fn error(&mut self, request: u64, code: ErrorCode, text: &str) {
        self.thread.counters.error();
        reply::push_error(&mut self.output, request, code, text);
    }

    /// The request failed as a whole, and the connection with it.
    fn told(&mut self, request: u64, code: ErrorCode, text: &str) -> End {
        reply::push_error(&mut self.output, request, code, text);
        End::Told(code)
    }

    fn unsupported(&mut self, header: &FrameHeader) -> End {
        let text = format!("a master does not answer frames of kind {:?}", header.kind);
        self.told(header.request, ErrorCode::Unsupported, &text)
    }

    // ------------------------------------------------------------------------------------------- input

    /// Bytes that the frame being read still needs.
    fn missing(&self) -> usize {
        let len = self.header.map_or(FRAME_HEADER_BYTES, |header| header.body_len as usize);
        len.saturating_sub(self.input.len())
    }

    /// Makes room for the rest of the frame being read. A large one waits for its share of memory.
    async fn make_room(&mut self) -> Result<(), End> {
        let missing = self.missing();
        if self.large.is_none() && missing > INPUT_BYTES {
            let kib = (missing.div_ceil(1024)) as u32; // ≤ 16 Ki
            let permit = Arc::clone(&self.shared.large_bodies).acquire_many_owned(kib);
            self.large = match timeout_at(self.arrived + FRAME_TIME_MAX, permit).await {
                Ok(permit) => permit.ok(),
                Err(_) => return Err(self.told(0, ErrorCode::Busy, "too many large requests at a time")),
            };
        }
        // No request refers to the buffer by now, so this moves what is left to its front rather than allocating, unless
        // the frame is large.
        let room = self.input.capacity() - self.input.len();
        if room < missing.max(INPUT_ROOM_MIN) {
            self.input.reserve(missing.max(INPUT_BYTES.saturating_sub(self.input.len())));
        }
        Ok(())
    }

    /// Gives the memory of a large frame back.
    fn shrink(&mut self) {
        if self.is_large_done {
            self.renew_input();
            self.large = None;
        }
    }

    /// A buffer of the usual size, with what is left in the old one.
    fn renew_input(&mut self) {
        let mut input = BytesMut::with_capacity(INPUT_BYTES.max(self.input.len()));
        input.extend_from_slice(&self.input);
        self.input = input;
        self.is_large_done = false;
    }

    /// When the frame being read must be complete; none if none has begun.
    fn read_deadline(&self) -> Option<Instant> {
        let has_begun = self.header.is_some() || !self.input.is_empty();
        has_begun.then(|| self.arrived + FRAME_TIME_MAX)
    }

    /// Looks for the next request of a chatty caller for a moment, with the thread's other connections in turn. The
    /// answer is whether something came.
    async fn linger(&mut self) -> Result<bool, End> {
        while self.is_chatty && self.read_deadline().is_none() {
            match self.socket.try_read_buf(&mut self.input) {
                Ok(bytes) => return self.has_read(Ok(bytes)).map(|()| true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(End::Broken(error)),
            }
            self.is_chatty = self.shared.may_linger && self.answered.elapsed() < LINGER;
            tokio::task::yield_now().await;
        }
        Ok(false)
    }

    async fn read(&mut self) -> Result<(), End> {
        let deadline = self.read_deadline();
        let read = read_by(&mut self.socket, &mut self.input, deadline).await;
        self.has_read(read)
    }

    fn has_read(&mut self, read: Result<usize, End>) -> Result<(), End> {
        let bytes = read?;
        if bytes == 0 {
            self.is_ended = true;
            return Ok(());
        }
        self.thread.counters.read(bytes);
        self.last_read = Instant::now();
        self.is_chatty = bytes <= LINGER_BYTES_MAX && self.last_read - self.answered < LINGER;
        let had_begun = self.header.is_some() || self.input.len() > bytes;
        if !had_begun {
            self.arrived = self.last_read;
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------------ output

    /// Sends what is due.
    async fn flush(&mut self) -> Result<(), End> {
        if self.output.is_empty() {
            return Ok(());
        }
        let written = match self.socket.try_write(&self.output) {
            Ok(written) => written,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(End::Broken(error)),
        };
        if written < self.output.len() {
            match timeout(WRITE_TIME_MAX, self.socket.write_all(&self.output[written..])).await {
                Ok(result) => result?,
                Err(_) => return Err(End::TooSlow("it does not take its answers")),
            }
        }
        self.answered = Instant::now();
        self.thread.counters.written(self.output.len());
        self.output.clear();
        self.output.shrink_to(OUTPUT_KEEP_BYTES);
        Ok(())
    }

    fn set_busy(&mut self, is_busy: bool) {
        if self.is_busy != is_busy {
            self.is_busy = is_busy;
            // Relaxed: the thread only waits for zero.
            if is_busy {
                self.thread.busy.fetch_add(1, Ordering::Relaxed);
            } else {
                self.thread.busy.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

/// Decodes a request, lets `call` answer it, and appends the answer.
fn answer<Q: Bounded, R: Response>(
    out: &mut Vec<u8>,
    header: &FrameHeader,
    body: Bytes,
    call: impl FnOnce(&Q) -> R,
) -> Result<(), convert::ConvertError> {
    let message = convert::decode(body)?;
    let kind = header.kind.reply().expect("only requests are answered");
    reply::push_response(out, header.request, kind, &call(&message));
    Ok(())
}

/// Removes, and answers when the nodes have done so or the deadline has passed.
fn remove(
    service: &Arc<Service>,
    request: u64,
    message: v1::RemoveRequest,
    large: Option<OwnedSemaphorePermit>,
) -> Waiting {
    let service = Arc::clone(service);
    let deadline_ms = message.context.as_ref().map_or(0, |context| context.deadline_ms);
    let time = Duration::from_millis(deadline_ms.into()) + REMOVE_SLACK;
    Box::pin(async move {
        let response = timeout(time, service.remove(&message)).await;
        drop((message, large));
        (request, response.unwrap_or_else(|_| deadline_exceeded()))
    })
}

/// The answer of a call whose time is over.
fn deadline_exceeded() -> v1::OutcomesResponse {
    let context = v1::ResponseContext { code: ErrorCode::DeadlineExceeded as u32, ..Default::default() };
    v1::OutcomesResponse { context: Some(context), codes: Bytes::new() }
}

/// Reads once. Without a deadline no timer is set.
async fn read_by(
    socket: &mut TcpStream,
    input: &mut BytesMut,
    deadline: Option<Instant>,
) -> Result<usize, End> {
    let read = socket.read_buf(input);
    match deadline {
        None => Ok(read.await?),
        Some(deadline) => match timeout_at(deadline, read).await {
            Ok(read) => Ok(read?),
            Err(_) => Err(End::TooSlow("a frame that has begun is not complete in time")),
        },
    }
}

/// The request number in a header that could not be read: only where the bytes are those that were sent.
fn request_of(bytes: &[u8; FRAME_HEADER_BYTES], error: &FrameError) -> u64 {
    match error {
        FrameError::Magic { .. } | FrameError::Version { .. } | FrameError::Crc { .. } => 0,
        _ => u64::from_le_bytes(*bytes[8..].first_chunk().expect("a header is longer")),
    }
}

/// Sends the last words and closes so that they arrive: a socket that is closed with bytes in it that nobody has read
/// takes back what was sent. So what still comes is read and thrown away, for a moment.
pub(super) async fn say_goodbye(socket: &mut TcpStream, words: &[u8]) {
    let goodbye = async {
        socket.write_all(words).await?;
        socket.shutdown().await?;
        let mut waste = [0; 4096];
        while socket.read(&mut waste).await? > 0 {}
        io::Result::Ok(())
    };
    // Whether they arrive is up to the caller.
    let _ = timeout(GOODBYE_TIME_MAX, goodbye).await;
}
