//! [`Connection`]: requests in flight on one stream.
//!
//! ```text
//!   send half     ── thread with a request ──▶ socket ──▶ peer
//!   receive lock  ◀─ waiting thread (see `receive_lock`) ◀── socket ◀── replies, which carry their request number
//!   worker        a thread that sends and receives for callers that do not wait on a thread; started when first needed
//! ```
//!
//! **Access to the memory of requests.** The thread that holds the send half reads a request's memory while it sends
//! this request. The thread that holds the receive lock writes it while it receives this request's reply. `in_flight`
//! decides which of them finishes the request: the one that is done with it last. [`Connection::fail`] only marks the
//! connection and shuts the socket down, which makes both threads return.
//!
//! **End of a connection.** A connection ends with any error, an unexpected reply, a stall, and a request that is
//! abandoned after its sending began: its reply would still arrive, in memory that belongs to the caller again.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use moontide_proto::limits::{OPS_PER_FRAME_MAX, TIMEOUT_MS_MAX};
use moontide_proto::{Codes, FRAME_HEADER_BYTES, FrameFlags, FrameHeader, FrameKind};
use moontide_rt::sync::{Arc, Condvar, Mutex, lock, wait};
use moontide_rt::time::Instant;
use moontide_types::ErrorCode;

use crate::error::{ConnectionError, PeerName};
use crate::tcp::in_flight::{InFlightTable, InsertError, ReceivedBy, SendIncomplete};
use crate::tcp::payload::{Chunk, PayloadCursor};
use crate::tcp::receive_lock::{AcquireOutcome, ReceiveLock, WaitOutcome, Waiter};
use crate::tcp::recv_buffer::RecvBuffer;
use crate::tcp::request::{Request, RequestError, RequestResult};
use crate::tcp::socket::{IoError, IoTimeout, Socket, WakeFd};

/// How long a sender that cannot send waits before it checks again whether a thread receives.
const SEND_WAIT: Duration = Duration::from_millis(1);

/// Bytes that the peer's kernel can buffer, whatever the peer's process does.
const PEER_KERNEL_BUFFER_BYTES: u32 = 64 << 10;

/// How long an idle worker sleeps. New work wakes it.
const IDLE_WAIT: Duration = Duration::from_secs(3600);

/// A stream with requests in flight.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    opened_at: Instant,
    stall: Duration,
    send: Mutex<SendHalf>,
    /// Notified when the send half is free.
    send_free: Condvar,
    receive_lock: ReceiveLock,
    /// Used by the holder of the receive lock.
    recv_buffer: Mutex<RecvBuffer>,
    in_flight: InFlightTable<Arc<Request>, RequestResult>,
    /// Bytes assigned to this connection and not yet moved.
    load: AtomicU64,
    dead: AtomicBool,
    /// A request was sent on it.
    used: AtomicBool,
    worker: Worker,
}

/// Right to send, held for one frame.
#[derive(Debug, Default)]
struct SendHalf {
    taken: bool,
    next_request: u64,
}

/// Thread that sends and receives for callers that do not wait on a thread.
#[derive(Debug, Default)]
struct Worker {
    state: Mutex<WorkerState>,
    condvar: Condvar,
    waiter: Arc<Waiter>,
    /// Notified when there is something to send, in case the thread is receiving.
    wake_fd: Option<WakeFd>,
}

#[derive(Debug, Default)]
struct WorkerState {
    to_send: VecDeque<Arc<Request>>,
    /// Requests in flight for which no caller may be waiting on a thread.
    tracked: Vec<Arc<Request>>,
    thread: Option<JoinHandle<()>>,
    stop: bool,
}

impl Connection {
    /// Creates a connection over a stream after its handshake.
    pub(crate) fn new(socket: Socket, stall: Duration, inflight_max: usize) -> Connection {
        Connection {
            socket,
            opened_at: Instant::now(),
            stall,
            send: Mutex::default(),
            send_free: Condvar::default(),
            receive_lock: ReceiveLock::default(),
            recv_buffer: Mutex::new(RecvBuffer::new(FRAME_HEADER_BYTES + 2 * OPS_PER_FRAME_MAX)),
            in_flight: InFlightTable::new(inflight_max),
            load: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            used: AtomicBool::new(false),
            // Without a `WakeFd` (the process is out of descriptors) requests wait for the next reply.
            worker: Worker { wake_fd: WakeFd::new().ok(), ..Worker::default() },
        }
    }

    /// Returns the bytes assigned to this connection and not yet moved.
    pub(crate) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Assigns `bytes` to this connection. Counted from the assignment, not from the sending: two callers that choose a
    /// connection at the same time must see each other's load.
    pub(crate) fn take_load(&self, bytes: u64) {
        self.load.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Removes `bytes` that were moved, or will not be.
    pub(crate) fn drop_load(&self, bytes: u64) {
        self.load.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Ends the connection, and returns `true`, if no request was ever sent on it and the peer has closed it: servers close
    /// connections without requests. Later this check would cost each request a system call.
    pub(crate) fn is_closed_before_use(&self) -> bool {
        // Relaxed: a thread that checks once more does no harm.
        if self.used.load(Ordering::Relaxed) {
            return false;
        }
        // Without a request there is no reply: a readable stream has ended.
        let is_closed = self.socket.wait(true, false, Instant::now()).is_ok_and(|ready| ready.readable);
        // Another thread may have sent a request, and have its reply.
        let is_closed = is_closed && !self.used.load(Ordering::SeqCst);
        if is_closed {
            self.fail(ConnectionError::Closed { peer: self.socket.name() });
        }
        is_closed
    }

    /// Returns the time since the connection was opened.
    pub(crate) fn age(&self) -> Duration {
        self.opened_at.elapsed()
    }

    /// Returns whether the connection has failed.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// Returns the error that ended the connection.
    pub(crate) fn failure(&self) -> Option<ConnectionError> {
        match self.in_flight.failure() {
            Some(Err(RequestError::Failed(failure))) => Some(failure),
            _ => None,
        }
    }

    /// Ends the connection. All waiting callers get the error; returns without waiting for them.
    pub(crate) fn fail(&self, failure: ConnectionError) {
        self.mark_failed(failure);
        self.worker.condvar.notify_all();
        self.clear_if_dead();
    }

    fn mark_failed(&self, failure: ConnectionError) {
        self.in_flight.fail(Err(RequestError::Failed(failure)));
        self.dead.store(true, Ordering::SeqCst);
        self.socket.shut_down();
    }

    // ---------------------------------------------------------------------------------------------- blocking callers

    /// Sends a request on the caller's thread. It is finished later, or already by a failure.
    pub(crate) fn submit(&self, request: &Arc<Request>) {
        if let Err(error) = self.submit_inner(request) {
            request.finish(Err(error));
        }
    }

    fn submit_inner(&self, request: &Arc<Request>) -> Result<(), RequestError> {
        let number = self.take_send_half(request.deadline).ok_or(RequestError::Deadline)?;
        let inserted = loop {
            if Instant::now() >= request.deadline {
                break Err(RequestError::Deadline);
            }
            match self.in_flight.insert(number, Arc::clone(request)) {
                Err(InsertError::Full) => self.free_capacity(request.deadline),
                Err(InsertError::Failed(result)) => break Err(result.expect_err("a failure is an error")),
                Ok(()) => break Ok(()),
            }
        };
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::SeqCst);
        }
        let sent = if inserted.is_ok() { self.send(number, request) } else { Ok(()) };
        if let Err(error) = sent {
            // A part of it may be on the wire: the peer could not parse a following frame.
            self.fail(self.failure_of(error));
        }
        // Before the next sender begins, so that one request at a time is being sent.
        if inserted.is_ok() {
            self.finish(self.in_flight.sent(number));
        }
        lock(&self.send).taken = false;
        self.send_free.notify_one();
        inserted
    }

    /// Waits until the table is no longer full. The next reply frees an entry; if no thread receives, this one does.
    fn free_capacity(&self, deadline: Instant) {
        if !self.receive_lock.try_acquire() {
            return self.in_flight.wait_for_capacity(SEND_WAIT);
        }
        if let Err(error) = self.receive_frame(deadline, None, ReceivedBy::Sender) {
            self.mark_failed(self.failure_of(error));
        }
        self.receive_lock.release();
        self.clear_if_dead();
    }

    /// Acquires the send half and returns the number of the next request.
    fn take_send_half(&self, deadline: Instant) -> Option<u64> {
        let mut half = lock(&self.send);
        while half.taken {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            half = wait(&self.send_free, half, left).0;
        }
        half.taken = true;
        half.next_request += 1;
        Some(half.next_request)
    }

    /// Waits until a request is finished, receiving if no other thread does. After the request's deadline the
    /// connection fails, and with it the request.
    pub(crate) fn wait(&self, request: &Request) {
        while !request.waiter.is_done() {
            let has_lock = match self.receive_lock.acquire(&request.waiter) {
                AcquireOutcome::Acquired => true,
                AcquireOutcome::Queued => {
                    // On a dead connection the wait is short, but it depends on other threads.
                    let over = request.deadline.max(Instant::now());
                    let until = if self.is_dead() { over + Duration::from_secs(60) } else { over };
                    match self.receive_lock.wait(&request.waiter, until) {
                        WaitOutcome::Done => return,
                        WaitOutcome::Promoted => true,
                        WaitOutcome::TimedOut => {
                            self.fail(ConnectionError::Abandoned { peer: self.socket.name() });
                            false
                        }
                    }
                }
            };
            if has_lock {
                self.receive_until(|| request.waiter.is_done(), request.deadline, None);
                self.receive_lock.release();
                self.clear_if_dead();
            }
            if self.is_dead() {
                // Nothing is received any more; the sender finishes the request.
                request.waiter.await_done(SEND_WAIT);
            }
        }
    }

    /// Aborts a request. After this returns, no thread accesses its memory.
    pub(crate) fn abort(&self, request: &Arc<Request>) {
        {
            let mut state = lock(&self.worker.state);
            let queued = state.to_send.len();
            state.to_send.retain(|queued| !Arc::ptr_eq(queued, request));
            if state.to_send.len() < queued {
                drop(state);
                return request.finish(Err(RequestError::Aborted));
            }
        }
        if !request.waiter.is_done() {
            self.fail(ConnectionError::Abandoned { peer: self.socket.name() });
            self.wait(request);
        }
    }

    // --------------------------------------------------------------------------------------------------- sending

    /// Sends header, body and payload. The caller holds the send half.
    fn send(&self, number: u64, request: &Request) -> Result<(), IoError> {
        // The caller must time out first: the peer would close the connection, which fails other requests on it.
        let left = request.deadline.saturating_duration_since(Instant::now()) + self.stall;
        let timeout_ms = (left.as_millis() as u64).clamp(1, TIMEOUT_MS_MAX.into()) as u32;
        let header = request.header(number, timeout_ms).encode();
        let mut chunk = Chunk::new();
        chunk.push(header.as_ptr().cast_mut(), header.len());
        chunk.push(request.body.as_ptr().cast_mut(), request.body.len());
        let work = request.work.as_ref().filter(|_| request.kind == FrameKind::Write);
        let mut left_bytes = work.map_or(0, |work| work.frame.bytes);
        // SAFETY: header and body live in this function and in the request.
        unsafe { self.send_chunk(&mut chunk, left_bytes > 0 || request.more, request.deadline) }?;
        let Some(work) = work else { return Ok(()) };
        let mut cursor = PayloadCursor::new(&work.ops, &work.frame.parts);
        while left_bytes > 0 {
            cursor.next(&mut chunk, |_| true);
            left_bytes -= chunk.bytes();
            // SAFETY: the request is not finished, so its memory is valid and no other code writes it; only this thread
            // writes the digests, since it holds the send half.
            unsafe {
                chunk.digest(&work.ops);
                self.send_chunk(&mut chunk, left_bytes > 0 || request.more, request.deadline)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// The memory of the chunk is valid for reads, and no other code writes it during the call.
    unsafe fn send_chunk(&self, chunk: &mut Chunk, more: bool, deadline: Instant) -> Result<(), IoError> {
        let mut progress = Instant::now();
        while chunk.bytes() > 0 {
            // SAFETY: the caller upholds the contract, which is the same.
            let sent = unsafe { self.socket.try_send(chunk.iovecs(), more) }?;
            chunk.advance(sent);
            if sent == 0 {
                self.send_blocked(deadline, progress)?;
                continue;
            }
            progress = Instant::now();
            if progress >= deadline {
                return Err(IoError::Deadline);
            }
        }
        Ok(())
    }

    /// Waits while the peer receives nothing. The peer may be blocked on a reply that no thread receives here: then
    /// this thread receives it.
    fn send_blocked(&self, deadline: Instant, progress: Instant) -> Result<(), IoError> {
        let now = Instant::now();
        if now >= deadline {
            return Err(IoError::Deadline);
        }
        if now >= progress + self.stall {
            return Err(ConnectionError::Stalled { peer: self.socket.name(), silent: now - progress }.into());
        }
        if !self.receive_lock.try_acquire() {
            self.socket.wait(false, true, deadline.min(now + SEND_WAIT))?;
            return Ok(());
        }
        let end = deadline.min(progress + self.stall);
        let received = match self.socket.wait(true, true, end) {
            Ok(ready) if ready.readable => self.receive_frame(deadline, None, ReceivedBy::Sender),
            Ok(_) => Ok(()),
            Err(failure) => Err(failure.into()),
        };
        if let Err(error) = &received {
            // Before the lock passes to a thread that would parse the rest of a frame as the next one.
            self.mark_failed(self.failure_of(error.clone()));
        }
        self.receive_lock.release();
        received
    }

    // ------------------------------------------------------------------------------------------------- receiving

    /// Receives frames until `done`, or until the connection has failed. The caller holds the receive lock. `wake_fd`
    /// makes it evaluate `done` again.
    fn receive_until(&self, done: impl Fn() -> bool, deadline: Instant, wake_fd: Option<&WakeFd>) {
        while !done() && !self.is_dead() {
            if let Err(error) = self.receive_frame(deadline, wake_fd, ReceivedBy::Receiver) {
                self.mark_failed(self.failure_of(error));
            }
        }
        if self.is_dead() {
            self.finish(self.in_flight.clear());
        }
    }

    fn failure_of(&self, error: IoError) -> ConnectionError {
        match error {
            IoError::Deadline => ConnectionError::Abandoned { peer: self.socket.name() },
            IoError::Failed(failure) => failure,
        }
    }

    /// Receives one frame, or none if `wake_fd` is notified. The caller holds the receive lock.
    fn receive_frame(
        &self,
        deadline: Instant,
        wake_fd: Option<&WakeFd>,
        by: ReceivedBy,
    ) -> Result<(), IoError> {
        let recv_buffer = &mut *lock(&self.recv_buffer);
        let mut bytes = [0; FRAME_HEADER_BYTES];
        if recv_buffer.len() == 0 && !self.await_frame(recv_buffer, deadline, wake_fd)? {
            return Ok(());
        }
        // From here on bytes are expected: a gap is a stall. The receiving thread stops at its own deadline, for any
        // frame.
        let timeout = IoTimeout { deadline, stall: self.stall };
        recv_buffer.receive(&self.socket, &mut bytes, timeout)?;
        let peer = self.socket.name();
        let header = FrameHeader::decode(&bytes).map_err(|source| ConnectionError::Frame { peer, source })?;
        let unexpected =
            || ConnectionError::UnexpectedReply { peer, kind: header.kind, request: header.request };
        let request = self.in_flight.receive(header.request).ok_or_else(unexpected)?;
        let mut body = vec![0; header.body_len as usize];
        let fits = header.kind == FrameKind::Error || Some(header.kind) == request.kind.reply();
        if !fits || header.flags != FrameFlags::NONE {
            return Err(unexpected().into());
        }
        recv_buffer.receive(&self.socket, &mut body, timeout)?;
        if header.kind == FrameKind::ReadReply && header.status.is_none() {
            self.receive_payload(recv_buffer, &header, &request, &body, timeout)?;
        } else if header.payload_len > 0 {
            return Err(unexpected().into());
        }
        if request.kind == FrameKind::Write && header.status.is_none() && !codes_fit(&request, &body) {
            return Err(unexpected().into());
        }
        let result = match header.status {
            Some(code) => Err(RequestError::Refused(code)),
            None => Ok(body),
        };
        let finished = self
            .in_flight
            .replied(header.request, result, by, deadline)
            .map_err(|SendIncomplete| IoError::Deadline)?;
        self.finish(finished);
        Ok(())
    }

    /// Waits for the first bytes of the next frame. Returns `false` if `wake_fd` was notified first.
    fn await_frame(
        &self,
        recv_buffer: &mut RecvBuffer,
        deadline: Instant,
        wake_fd: Option<&WakeFd>,
    ) -> Result<bool, IoError> {
        let mut progress_at = Instant::now();
        let mut unsent = None;
        let mut drained_at = progress_at;
        loop {
            let front = self.in_flight.front();
            // Most likely the next frame is the reply to the oldest request: receive its header and codes, not its
            // payload.
            let work = front.as_ref().and_then(|(request, _)| request.work.as_ref());
            let likely = FRAME_HEADER_BYTES + work.map_or(0, |work| 2 * work.frame.parts.len());
            // While a call has no reply, which may take long, silence is not a stall; and a sending thread checks for
            // stalls itself.
            let sent_at = work.and(front.as_ref()).and_then(|(_, sent_at)| *sent_at);
            let due = sent_at.map(|sent_at| sent_at.max(progress_at) + self.stall);
            // The oldest request may change meanwhile, so this thread checks again after half the stall timeout.
            let check_at = Instant::now() + self.stall / 2;
            let end = due.unwrap_or(check_at).min(check_at).min(deadline);
            match wake_fd {
                Some(wake_fd) => {
                    let ready = self.socket.wait_or_wake(wake_fd, end)?;
                    if wake_fd.take() {
                        return Ok(false);
                    }
                    if ready {
                        recv_buffer.try_receive(&self.socket, likely)?;
                    }
                }
                None => match recv_buffer.receive_first(&self.socket, likely, end) {
                    Ok(()) => {}
                    Err(IoError::Deadline) => recv_buffer.try_receive(&self.socket, likely)?,
                    Err(error) => return Err(error),
                },
            }
            if recv_buffer.len() > 0 {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(IoError::Deadline);
            }
            // A peer that acknowledges sent bytes, however slowly, is not stalled.
            let left = self.socket.unsent_bytes();
            let before = unsent.replace(left);
            if left == 0 || before.is_some_and(|before| left < before) {
                drained_at = now;
            }
            // However long a call takes: the peer's kernel acknowledges sent bytes at once, unless its buffer is full.
            // If it does not, the peer is gone.
            let gone = matches!(self.socket.name(), PeerName::Tcp(_))
                && left <= PEER_KERNEL_BUFFER_BYTES
                && now >= drained_at + self.stall;
            if before.is_some_and(|before| left < before) {
                progress_at = now;
            } else if gone || due.is_some_and(|due| now >= due) {
                return Err(
                    ConnectionError::Stalled { peer: self.socket.name(), silent: now - progress_at }.into()
                );
            }
        }
    }

    /// Receives the payload of a ReadReply directly into the caller's memory.
    fn receive_payload(
        &self,
        recv_buffer: &mut RecvBuffer,
        header: &FrameHeader,
        request: &Request,
        codes: &[u8],
        timeout: IoTimeout,
    ) -> Result<(), IoError> {
        let peer = self.socket.name();
        let unexpected =
            ConnectionError::UnexpectedReply { peer, kind: header.kind, request: header.request };
        let Some(work) = request.work.as_ref().filter(|_| codes_fit(request, codes)) else {
            return Err(unexpected.into());
        };
        let has_payload = |part: usize| codes[2 * part] == 0 && codes[2 * part + 1] == 0;
        let parts = work.frame.parts.iter().enumerate();
        let expected: u64 = parts.filter(|(part, _)| has_payload(*part)).map(|(_, p)| p.range.len()).sum();
        if header.payload_len != expected {
            return Err(unexpected.into());
        }
        let mut cursor = PayloadCursor::new(&work.ops, &work.frame.parts);
        let mut chunk = Chunk::new();
        let mut left = expected;
        while left > 0 {
            cursor.next(&mut chunk, has_payload);
            left -= chunk.bytes();
            // SAFETY: as below.
            unsafe { recv_buffer.drain_into(&mut chunk) };
            while chunk.bytes() > 0 {
                // SAFETY: the request is not finished, so its memory is valid; this thread holds the receive lock, so
                // no other code uses it.
                let got = unsafe { self.socket.receive_some(chunk.iovecs(), timeout) }?;
                chunk.advance(got);
            }
            // SAFETY: as above.
            unsafe { chunk.digest(&work.ops) };
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------------------- finishing

    fn finish(&self, finished: impl IntoIterator<Item = (Arc<Request>, RequestResult)>) {
        for (request, result) in finished {
            let late = matches!(result, Err(RequestError::Failed(_))) && Instant::now() >= request.deadline;
            request.finish(if late { Err(RequestError::Deadline) } else { result });
        }
    }

    /// Finishes the requests of a dead connection. Called by a thread that marks the connection dead while the receive
    /// lock is free, and by a thread that releases the lock of a connection that was marked meanwhile. One of them sees
    /// the other.
    fn clear_if_dead(&self) {
        if self.is_dead() && self.receive_lock.try_acquire() {
            self.finish(self.in_flight.clear());
            self.receive_lock.release();
        }
    }

    // ---------------------------------------------------------------------------------------------------- worker

    /// Sends a request from the connection's own thread, which then receives for it until it is finished.
    pub(crate) fn submit_async(self: &Arc<Self>, request: Arc<Request>) {
        let mut state = lock(&self.worker.state);
        if state.stop || self.is_dead() {
            drop(state);
            let failure = self.failure().unwrap_or(ConnectionError::Stopped);
            return request.finish(Err(RequestError::Failed(failure)));
        }
        state.to_send.push_back(request);
        if state.thread.is_none() {
            let connection = Arc::clone(self);
            let thread = std::thread::Builder::new().name("moontide-tcp".into());
            match thread.spawn(move || connection.work()) {
                Ok(thread) => state.thread = Some(thread),
                Err(error) => {
                    let peer = self.socket.name();
                    let source = rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN);
                    let failure = ConnectionError::System { what: "start a thread for", peer, source };
                    for request in state.to_send.drain(..) {
                        request.finish(Err(RequestError::Failed(failure.clone())));
                    }
                }
            }
        }
        drop(state);
        self.worker.condvar.notify_all();
        if let Some(wake_fd) = &self.worker.wake_fd {
            wake_fd.notify();
        }
    }

    fn work(&self) {
        loop {
            let (to_send, tracked) = {
                let mut state = lock(&self.worker.state);
                loop {
                    state.tracked.retain(|request| !request.waiter.is_done());
                    if !state.to_send.is_empty() || !state.tracked.is_empty() {
                        break;
                    }
                    if state.stop || self.is_dead() {
                        return;
                    }
                    state = wait(&self.worker.condvar, state, IDLE_WAIT).0;
                }
                let next = state.to_send.pop_front();
                state.tracked.extend(next.clone());
                (next, state.tracked.clone())
            };
            if let Some(request) = to_send {
                self.submit(&request);
                continue;
            }
            self.receive_tracked(&tracked);
        }
    }

    /// Receives for tracked requests, until one of them is finished, there is something to send, or one of their
    /// deadlines has passed.
    fn receive_tracked(&self, tracked: &[Arc<Request>]) {
        let waiter = &self.worker.waiter;
        let deadline = tracked.iter().map(|request| request.deadline).min().expect("at least one is tracked");
        let has_lock = match self.receive_lock.acquire(waiter) {
            AcquireOutcome::Acquired => true,
            // The holder of the lock receives for all. This thread checks at intervals whether there is something to
            // send.
            AcquireOutcome::Queued => {
                self.receive_lock.wait(waiter, deadline.min(Instant::now() + SEND_WAIT))
                    == WaitOutcome::Promoted
            }
        };
        if has_lock {
            let enough =
                || tracked.iter().any(|r| r.waiter.is_done()) || !lock(&self.worker.state).to_send.is_empty();
            self.receive_until(enough, deadline, self.worker.wake_fd.as_ref());
            self.receive_lock.release();
            self.clear_if_dead();
        } else if Instant::now() >= deadline && tracked.iter().any(|r| !r.waiter.is_done()) {
            self.fail(ConnectionError::Abandoned { peer: self.socket.name() });
        }
    }

    /// Ends the connection and its thread. After this returns, its thread has exited and all requests are finished,
    /// except those that callers are sending at this moment.
    pub(crate) fn stop(&self) {
        self.fail(ConnectionError::Stopped);
        let thread = {
            let mut state = lock(&self.worker.state);
            state.stop = true;
            state.thread.take()
        };
        self.worker.condvar.notify_all();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // The thread does not panic; if it did, the panic was printed.
            let _ = thread.join();
        }
        let left: Vec<_> = lock(&self.worker.state).to_send.drain(..).collect();
        for request in left {
            request.finish(Err(RequestError::Failed(ConnectionError::Stopped)));
        }
    }
}

/// Returns whether `body` has one valid code per operation.
fn codes_fit(request: &Request, body: &[u8]) -> bool {
    let parts = request.work.as_ref().map_or(0, |work| work.frame.parts.len());
    body.len() == 2 * parts && Codes::decode(body, parts).is_ok()
}

/// Returns the code of one operation in a reply that passed [`codes_fit`].
pub(crate) fn code_at(codes: &[u8], part: usize) -> Option<ErrorCode> {
    let number = u16::from_le_bytes([codes[2 * part], codes[2 * part + 1]]);
    ErrorCode::try_from(u32::from(number)).ok()
}
