//! One connection of the frame server.
//!
//! ```text
//!  Hello ──► HelloAck, then:   read ─► handle every complete frame ─► one write ─► read …
//!                                          └─ Remove waits for nodes in the background
//! ```
//!
//! Replies are sent in the order of the requests, except for Remove, which waits. One read usually returns header and
//! body of all requests in flight, and one write sends all replies. A single small request costs a read and a write,
//! and no allocation here.
//!
//! Rules: an invalid header ends the connection after an error frame, because the following bytes cannot be trusted;
//! the reply to an invalid body is an error frame. Limits: a frame must be complete [`FRAME_TIME_MAX`] after its
//! first byte, a write must complete within [`WRITE_TIME_MAX`], and at most [`Shared::inflight_max`] calls wait at a
//! time; at that limit the connection is not read.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use moontide_auth::{Call, Caller};
use moontide_proto::convert::{self, Bounded};
use moontide_proto::{FRAME_HEADER_BYTES, FrameError, FrameHeader, FrameKind, Hello, ProtocolVersions, v1};
use moontide_tasks::{MaybeTls, Place};
use moontide_types::ErrorCode;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

use super::reply::{self, Response};
use super::{LARGE_BODIES_BYTES_MAX, Shared, ThreadState};
use crate::access::{self, Refused};
use crate::metrics::Method;
use crate::service::Service;

/// Time from the first to the last byte of a frame; for the Hello from the start of the connection. The largest request
/// then needs 1.6 MB/s.
pub(super) const FRAME_TIME_MAX: Duration = Duration::from_secs(10);

/// Timeout of a write.
const WRITE_TIME_MAX: Duration = Duration::from_secs(10);

/// Time for a caller to read the last frame before the connection is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Additional time for a response after the timeout of a Remove: the service keeps the timeout and returns the outcomes
/// so far; this limit protects against a bug there.
const REMOVE_SLACK: Duration = Duration::from_secs(1);

/// Duration of busy polling for a caller that sent its last request within this time after a reply. The wakeup of a
/// sleeping thread takes some ten microseconds, half of a round trip on loopback.
const BUSY_POLL: Duration = Duration::from_micros(40);

/// Largest request in bytes with busy polling: in a batch the cost of a wakeup is shared by many keys, and another
/// thread uses the core better.
const BUSY_POLL_BYTES_MAX: usize = 1024;

/// Size of the read buffer: some hundred small requests, or a batch of a thousand keys.
const INPUT_BYTES: usize = 64 << 10;

/// With less free space than this in the read buffer, its content moves to the front.
const INPUT_FREE_MIN: usize = 4 << 10;

/// Size of the output at which it is sent, even if more requests are complete.
const OUTPUT_FLUSH_BYTES: usize = 256 << 10;

/// Capacity of the output buffer that is kept after a large reply.
const OUTPUT_KEEP_BYTES: usize = 64 << 10;

/// A call that waits for nodes; the output contains its request id.
type PendingCall = Pin<Box<dyn Future<Output = (u64, v1::OutcomesResponse)> + Send>>;

/// Memory of a body that is larger than a read buffer, counted until it is dropped.
struct LargeBody {
    _permit: OwnedSemaphorePermit,
    _of_address: AddressShare,
}

/// The same bytes, counted for the address of the caller.
struct AddressShare {
    place: Arc<Place>,
    bytes: usize,
}

impl AddressShare {
    /// Returns `None` if the large bodies of the address would have more than half of the memory of all.
    fn take(place: &Arc<Place>, bytes: usize) -> Option<AddressShare> {
        // Relaxed: no other data depends on the sum.
        let before = place.body_bytes_of_address().large.fetch_add(bytes, Ordering::Relaxed);
        let share = AddressShare { place: Arc::clone(place), bytes };
        (before + bytes <= LARGE_BODIES_BYTES_MAX / 2).then_some(share)
    }
}

impl Drop for AddressShare {
    fn drop(&mut self) {
        self.place.body_bytes_of_address().large.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A complete frame.
struct Frame {
    header: FrameHeader,
    body: Bytes,
    /// Arrival of the first byte.
    arrived: Instant,
}

/// Reason for the end of a connection.
enum End {
    /// The caller closed it, or the master is shutting down.
    Closed,
    /// The socket failed: nothing can be sent to the caller.
    Broken(io::Error),
    /// The caller violated the protocol; the output contains the error frame.
    ProtocolError(ErrorCode),
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
    socket: MaybeTls<TcpStream>,
    caller: Caller,
    shared: Arc<Shared>,
    thread: Arc<ThreadState>,
    input: BytesMut,
    /// Header of the frame whose body is being read; it is no longer in `input`.
    header: Option<FrameHeader>,
    /// Arrival of the first byte of the frame being read, or start of the connection.
    arrived: Instant,
    /// End of the last read: bytes after a complete frame arrived then.
    last_read: Instant,
    /// Held while `input` is larger than usual.
    large: Option<LargeBody>,
    /// Place at the listener.
    place: Arc<Place>,
    /// Time of the last write.
    last_write: Instant,
    /// The caller sent its last request shortly after a reply.
    busy_poll: bool,
    /// The large frame is complete.
    is_large_done: bool,
    output: Vec<u8>,
    pending: FuturesUnordered<PendingCall>,
    inflight_max: usize,
    /// Whether the thread counts this connection as busy.
    is_busy: bool,
    /// The caller has closed its sending side.
    is_ended: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.set_busy(false);
    }
}

impl Connection {
    pub(super) fn new(
        socket: MaybeTls<TcpStream>,
        place: Place,
        shared: Arc<Shared>,
        thread: Arc<ThreadState>,
    ) -> Connection {
        let now = Instant::now();
        Connection {
            caller: socket.caller(),
            socket,
            inflight_max: shared.inflight_max as usize,
            shared,
            thread,
            input: BytesMut::with_capacity(INPUT_BYTES),
            header: None,
            arrived: now,
            last_read: now,
            last_write: now,
            busy_poll: false,
            large: None,
            place: Arc::new(place),
            is_large_done: false,
            output: Vec::new(),
            pending: FuturesUnordered::new(),
            is_busy: false,
            is_ended: false,
        }
    }

    /// Serves until the connection ends.
    pub(super) async fn run(mut self) {
        let end = match self.handshake().await {
            Ok(()) => self.serve().await,
            Err(end) => end,
        };
        match end {
            End::Closed => {}
            End::Broken(error) => debug!(%error, "frame connection failed"),
            End::TooSlow(what) => {
                self.thread.counters.error();
                debug!(what, "frame connection closed: too slow");
            }
            End::ProtocolError(code) => {
                self.thread.counters.error();
                debug!(%code, "frame connection closed: protocol error");
                send_and_close(&mut self.socket, &self.output).await;
            }
        }
    }

    /// Receives the Hello, and replies with a HelloAck.
    async fn handshake(&mut self) -> Result<(), End> {
        let Frame { header, body, .. } = loop {
            if let Some(frame) = self.next_frame()? {
                break frame;
            }
            self.reserve_input().await?;
            // The deadline applies to the first byte, too: a silent connection counts against the limit.
            let deadline = Some(self.arrived + FRAME_TIME_MAX);
            let read = read_by(&mut self.socket, &mut self.input, deadline).await;
            self.has_read(read)?;
            if self.is_ended {
                return Err(End::Closed);
            }
        };
        if header.kind != FrameKind::Hello {
            return Err(self.protocol_error(
                header.request,
                ErrorCode::InvalidArgument,
                "the first frame must be a Hello",
            ));
        }
        let hello = match Hello::decode_body(&body) {
            Ok(hello) => hello,
            Err(error) => {
                return Err(self.protocol_error(
                    header.request,
                    ErrorCode::InvalidArgument,
                    &error.to_string(),
                ));
            }
        };
        let Some(version) = ProtocolVersions::CURRENT.negotiate(hello.versions) else {
            let ProtocolVersions { min, max } = ProtocolVersions::CURRENT;
            let text = format!("this master supports protocol versions {min} to {max}");
            return Err(self.protocol_error(header.request, ErrorCode::Unsupported, &text));
        };
        self.place.greeted();
        self.inflight_max = self.inflight_max.min(hello.inflight_max as usize);
        let (caller, inflight_max) = (self.shared.caller, self.inflight_max as u32); // ≤ a u32
        reply::push_hello_ack(&mut self.output, header.request, caller, version, inflight_max);
        Ok(())
    }

    async fn serve(&mut self) -> End {
        loop {
            if let Err(end) = self.step().await {
                return end;
            }
        }
    }

    /// Handles the complete frames, sends pending output, waits for more input.
    async fn step(&mut self) -> Result<(), End> {
        while self.pending.len() < self.inflight_max
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
        if self.pending.is_empty() {
            self.set_busy(false);
            // Relaxed: no other data depends on it; at the latest the next step observes it.
            if self.is_ended || self.shared.stopping.load(Ordering::Relaxed) {
                return Err(End::Closed);
            }
            self.reserve_input().await?;
            if self.busy_poll().await? {
                return Ok(());
            }
            return self.read().await;
        }
        if self.is_ended || self.pending.len() >= self.inflight_max {
            // Back-pressure: further requests remain in the socket.
            if let Some(done) = self.pending.next().await {
                self.push_removed(done);
            }
            return Ok(());
        }
        self.reserve_input().await?;
        let deadline = self.read_deadline();
        let Connection { socket, input, pending, .. } = self;
        tokio::select! {
            biased;
            Some(done) = pending.next() => {
                self.push_removed(done);
                Ok(())
            }
            read = read_by(socket, input, deadline) => self.has_read(read),
        }
    }

    /// Returns the next complete frame of the input, if there is one.
    fn next_frame(&mut self) -> Result<Option<Frame>, End> {
        let header = match self.header {
            Some(header) => header,
            None => {
                let Some(bytes) = self.input.first_chunk::<FRAME_HEADER_BYTES>() else { return Ok(None) };
                let header = match FrameHeader::decode(bytes) {
                    Ok(header) => header,
                    Err(error) => {
                        let request = request_of(bytes, &error);
                        return Err(self.protocol_error(request, error.code(), &error.to_string()));
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

    /// Handles one request, or starts it if it has to wait.
    fn handle(&mut self, Frame { header, body, arrived }: Frame) -> Result<(), End> {
        let service = &*self.shared.service;
        let (method, call) = match header.kind {
            FrameKind::Exist => (Method::Exist, Call::Exist),
            FrameKind::GetReplicaList => (Method::GetReplicaList, Call::GetReplicaList),
            FrameKind::PutStart => (Method::PutStart, Call::PutStart),
            FrameKind::PutEnd => (Method::PutEnd, Call::PutEnd),
            FrameKind::Remove => (Method::Remove, Call::Remove),
            FrameKind::Ping => {
                reply::push_pong(&mut self.output, header.request);
                return Ok(());
            }
            // Replies of waiting calls are sent anyway; the caller ignores them.
            FrameKind::Cancel => return Ok(()),
            _ => return Err(self.unsupported(&header)),
        };
        self.thread.counters.request(method);
        self.place.proven();
        if arrived.elapsed() >= Duration::from_millis(header.timeout_ms.into()) {
            self.error(header.request, ErrorCode::DeadlineExceeded, "timeout before the request was handled");
            return Ok(());
        }
        let (out, request) = (&mut self.output, header.request);
        let rights = Rights { caller: &self.caller, call };
        let handled = match header.kind {
            FrameKind::Exist => handle_call(out, &header, body, rights, |m| service.exist(m)),
            FrameKind::GetReplicaList => {
                handle_call(out, &header, body, rights, |m| service.get_replica_list(m))
            }
            FrameKind::PutStart => handle_call(out, &header, body, rights, |m| service.put_start(m)),
            FrameKind::PutEnd => handle_call(out, &header, body, rights, |m| service.put_end(m)),
            _ => self.start_remove(request, body),
        };
        if let Err(Refused { code, text }) = handled {
            self.error(request, code, &text);
        }
        Ok(())
    }

    fn start_remove(&mut self, request: u64, body: Bytes) -> Result<(), Refused> {
        // The body lives as long as the call waits. A small body is copied, so that it does not keep the read buffer; a
        // large body keeps its memory permits.
        let large = self.large.take();
        let body = if large.is_some() { body } else { Bytes::copy_from_slice(&body) };
        if large.is_some() {
            self.renew_input();
        }
        let message: v1::RemoveRequest = convert::decode(body).map_err(malformed)?;
        access::check(&self.caller, Call::Remove, message.context.as_ref())?;
        self.pending.push(remove(&self.shared.service, request, message, large));
        Ok(())
    }

    fn push_removed(&mut self, (request, response): (u64, v1::OutcomesResponse)) {
        reply::push_response(&mut self.output, request, FrameKind::RemoveReply, &response);
    }

    /// Appends an error frame for a request; the connection remains open.
    fn error(&mut self, request: u64, code: ErrorCode, text: &str) {
        self.thread.counters.error();
        reply::push_error(&mut self.output, request, code, text);
    }

    /// Appends an error frame for a request, and ends the connection.
    fn protocol_error(&mut self, request: u64, code: ErrorCode, text: &str) -> End {
        reply::push_error(&mut self.output, request, code, text);
        End::ProtocolError(code)
    }

    fn unsupported(&mut self, header: &FrameHeader) -> End {
        let text = format!("a master does not support frames of kind {:?}", header.kind);
        self.protocol_error(header.request, ErrorCode::Unsupported, &text)
    }

    // ------------------------------------------------------------------------------------------- input

    /// Returns the number of missing bytes of the frame being read.
    fn missing(&self) -> usize {
        let len = self.header.map_or(FRAME_HEADER_BYTES, |header| header.body_len as usize);
        len.saturating_sub(self.input.len())
    }

    /// Reserves space for the rest of the frame being read. A large frame waits for memory permits.
    async fn reserve_input(&mut self) -> Result<(), End> {
        let missing = self.missing();
        if self.large.is_none() && missing > INPUT_BYTES {
            let Some(of_address) = AddressShare::take(&self.place, missing) else {
                return Err(self.protocol_error(
                    0,
                    ErrorCode::Busy,
                    "too many large requests in flight from this address",
                ));
            };
            let kib = (missing.div_ceil(1024)) as u32; // ≤ 16 Ki
            let permit = Arc::clone(&self.shared.large_bodies).acquire_many_owned(kib);
            self.large = match timeout_at(self.arrived + FRAME_TIME_MAX, permit).await {
                Ok(permit) => {
                    permit.ok().map(|permit| LargeBody { _permit: permit, _of_address: of_address })
                }
                Err(_) => {
                    return Err(self.protocol_error(0, ErrorCode::Busy, "too many large requests in flight"));
                }
            };
        }
        // No request refers to the buffer here, so `reserve` moves the content to the front instead of allocating,
        // unless the frame is large.
        let free = self.input.capacity() - self.input.len();
        if free < missing.max(INPUT_FREE_MIN) {
            self.input.reserve(missing.max(INPUT_BYTES.saturating_sub(self.input.len())));
        }
        Ok(())
    }

    /// Frees the memory of a large frame.
    fn shrink(&mut self) {
        if self.is_large_done {
            self.renew_input();
            self.large = None;
        }
    }

    /// Replaces the input by a buffer of the usual size with the same content.
    fn renew_input(&mut self) {
        let mut input = BytesMut::with_capacity(INPUT_BYTES.max(self.input.len()));
        input.extend_from_slice(&self.input);
        self.input = input;
        self.is_large_done = false;
    }

    /// Returns the deadline of the frame being read; `None` if there is none.
    fn read_deadline(&self) -> Option<Instant> {
        let has_started = self.header.is_some() || !self.input.is_empty();
        has_started.then(|| self.arrived + FRAME_TIME_MAX)
    }

    /// Polls for the next request for up to [`BUSY_POLL`], in turn with the other connections of the thread. Returns
    /// whether bytes arrived.
    async fn busy_poll(&mut self) -> Result<bool, End> {
        while self.busy_poll && self.read_deadline().is_none() {
            // Encrypted bytes cannot be read without a task.
            let Some(socket) = self.socket.plain() else { break };
            match socket.try_read_buf(&mut self.input) {
                Ok(bytes) => return self.has_read(Ok(bytes)).map(|()| true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(End::Broken(error)),
            }
            self.busy_poll = self.shared.may_busy_poll && self.last_write.elapsed() < BUSY_POLL;
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
        self.busy_poll = bytes <= BUSY_POLL_BYTES_MAX && self.last_read - self.last_write < BUSY_POLL;
        let had_started = self.header.is_some() || self.input.len() > bytes;
        if !had_started {
            self.arrived = self.last_read;
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------------ output

    /// Sends the pending output.
    async fn flush(&mut self) -> Result<(), End> {
        if self.output.is_empty() {
            return Ok(());
        }
        let written = match self.socket.plain().map(|socket| socket.try_write(&self.output)) {
            None => 0,
            Some(Ok(written)) => written,
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Some(Err(error)) => return Err(End::Broken(error)),
        };
        if written < self.output.len() {
            let Connection { socket, output, .. } = self;
            let write = async {
                socket.write_all(&output[written..]).await?;
                socket.flush().await
            };
            match timeout(WRITE_TIME_MAX, write).await {
                Ok(result) => result?,
                Err(_) => return Err(End::TooSlow("write timeout")),
            }
        }
        self.last_write = Instant::now();
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

/// A request with a context.
trait Contextual {
    fn context(&self) -> Option<&v1::RequestContext>;
}

macro_rules! contextual {
    ($($message:ident),*) => {$(
        impl Contextual for v1::$message {
            fn context(&self) -> Option<&v1::RequestContext> {
                self.context.as_ref()
            }
        }
    )*};
}
contextual!(ExistRequest, GetReplicaListRequest, PutStartRequest, PutEndRequest);

/// A caller and its call.
struct Rights<'a> {
    caller: &'a Caller,
    call: Call,
}

fn malformed(error: convert::ConvertError) -> Refused {
    Refused { code: error.code(), text: error.to_string() }
}

/// Decodes a request, checks the rights of the caller, passes it to `call`, and appends the reply.
fn handle_call<Q: Bounded + Contextual, R: Response>(
    out: &mut Vec<u8>,
    header: &FrameHeader,
    body: Bytes,
    rights: Rights<'_>,
    call: impl FnOnce(&Q) -> R,
) -> Result<(), Refused> {
    let message: Q = convert::decode(body).map_err(malformed)?;
    access::check(rights.caller, rights.call, message.context())?;
    let kind = header.kind.reply().expect("a request has a reply");
    reply::push_response(out, header.request, kind, &call(&message));
    Ok(())
}

/// Removes objects; completes when the nodes have confirmed it, or at the timeout.
fn remove(
    service: &Arc<Service>,
    request: u64,
    message: v1::RemoveRequest,
    large: Option<LargeBody>,
) -> PendingCall {
    let service = Arc::clone(service);
    let timeout_ms = message.context.as_ref().map_or(0, |context| context.timeout_ms);
    let limit = Duration::from_millis(timeout_ms.into()) + REMOVE_SLACK;
    Box::pin(async move {
        let response = timeout(limit, service.remove(&message)).await;
        drop((message, large));
        (request, response.unwrap_or_else(|_| deadline_exceeded()))
    })
}

/// Creates the response of a call that timed out.
fn deadline_exceeded() -> v1::OutcomesResponse {
    let context = v1::ResponseContext { code: ErrorCode::DeadlineExceeded as u32, ..Default::default() };
    v1::OutcomesResponse { context: Some(context), codes: Bytes::new() }
}

/// Reads once. Without a deadline no timer is created.
async fn read_by(
    socket: &mut MaybeTls<TcpStream>,
    input: &mut BytesMut,
    deadline: Option<Instant>,
) -> Result<usize, End> {
    let read = socket.read_buf(input);
    match deadline {
        None => Ok(read.await?),
        Some(deadline) => match timeout_at(deadline, read).await {
            Ok(read) => Ok(read?),
            Err(_) => Err(End::TooSlow("frame incomplete at its deadline")),
        },
    }
}

/// Returns the request id of an invalid header; 0 if the bytes are not those that were sent.
fn request_of(bytes: &[u8; FRAME_HEADER_BYTES], error: &FrameError) -> u64 {
    match error {
        FrameError::Magic { .. } | FrameError::Version { .. } | FrameError::Crc { .. } => 0,
        _ => u64::from_le_bytes(*bytes[8..].first_chunk().expect("a header is longer")),
    }
}

/// Sends the last frames and closes the socket. A socket that is closed with unread input resets the connection, and
/// the peer may lose the output. So input is read and discarded for up to [`CLOSE_TIMEOUT`].
pub(super) async fn send_and_close(socket: &mut (impl AsyncRead + AsyncWrite + Unpin), frames: &[u8]) {
    let close = async {
        socket.write_all(frames).await?;
        socket.shutdown().await?;
        let mut discarded = [0; 4096];
        while socket.read(&mut discarded).await? > 0 {}
        io::Result::Ok(())
    };
    // Best effort.
    let _ = timeout(CLOSE_TIMEOUT, close).await;
}
