//! [`Connection`]: requests in flight on one stream.
//!
//! ```text
//!   send half ── whoever has a request ──▶ socket ──▶ peer
//!   turn      ◀─ whoever waits (see `turn`) ◀── socket ◀── answers, which name their request
//!   worker    a thread that stands in for callers who do not wait on a thread; started when first needed
//! ```
//!
//! **Whose memory is touched when.** A request's memory is read by the thread that holds the send half while it sends
//! this request, and written by the thread that has the turn while it receives this request's answer. `flights` says
//! which of them finishes it: the one that is done with it last. [`Connection::fail`] only marks the connection and
//! shuts the socket down, which brings both of them back.
//!
//! **What ends a connection.** Any error, an answer that nobody asked for, a stall, and a request that is given up after
//! it was begun: its answer would still come and go into memory that is the caller's again.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_proto::limits::{DEADLINE_MS_MAX, OPS_PER_FRAME_MAX};
use moontide_proto::{Codes, FRAME_HEADER_BYTES, FrameFlags, FrameHeader, FrameKind};
use moontide_types::ErrorCode;

use crate::error::{Failure, Name};
use crate::sync::{Arc, Condvar, Mutex, lock, wait};
use crate::tcp::flights::{By, Flights, Late, NoEntry};
use crate::tcp::flow::{Chunk, Flow};
use crate::tcp::inbox::Inbox;
use crate::tcp::request::{Answer, NoAnswer, Request};
use crate::tcp::socket::{Alarm, Halt, Patience, Socket};
use crate::tcp::turn::{Asked, Seat, Turn, Waited};

/// How long a sender that cannot send waits before it looks again whether somebody receives.
const SEND_WAIT: Duration = Duration::from_millis(1);

/// Bytes that a peer's kernel has room for, whatever its process does.
const TAKEN_AT_ONCE: u32 = 64 << 10;

/// How long a worker with nothing to do sleeps. It is woken when there is something.
const IDLE_LOOK: Duration = Duration::from_secs(3600);

/// A stream with requests in flight.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    opened_at: Instant,
    stall: Duration,
    send: Mutex<SendHalf>,
    /// Rung when the send half is free.
    send_free: Condvar,
    turn: Turn,
    /// Whoever has the turn uses it.
    inbox: Mutex<Inbox>,
    flights: Flights<Arc<Request>, Answer>,
    /// Bytes that it has been given to move and has not moved yet.
    load: AtomicU64,
    dead: AtomicBool,
    worker: Worker,
}

/// The right to send, which is held for the length of a frame.
#[derive(Debug, Default)]
struct SendHalf {
    taken: bool,
    next_request: u64,
}

/// The thread that stands in for those who do not wait.
#[derive(Debug, Default)]
struct Worker {
    state: Mutex<WorkerState>,
    bell: Condvar,
    seat: Arc<Seat>,
    /// Rung when there is something to send, in case the thread is receiving.
    alarm: Option<Alarm>,
}

#[derive(Debug, Default)]
struct WorkerState {
    to_send: VecDeque<Arc<Request>>,
    /// Requests that nobody may be waiting for on a thread, in flight.
    minded: Vec<Arc<Request>>,
    thread: Option<JoinHandle<()>>,
    stop: bool,
}

impl Connection {
    /// A connection over a greeted stream.
    pub(crate) fn new(socket: Socket, stall: Duration, inflight_max: usize) -> Connection {
        Connection {
            socket,
            opened_at: Instant::now(),
            stall,
            send: Mutex::default(),
            send_free: Condvar::default(),
            turn: Turn::default(),
            inbox: Mutex::new(Inbox::new(FRAME_HEADER_BYTES + 2 * OPS_PER_FRAME_MAX)),
            flights: Flights::new(inflight_max),
            load: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            // Without one, which only a process without descriptors is, requests wait for the next answer.
            worker: Worker { alarm: Alarm::new().ok(), ..Worker::default() },
        }
    }

    /// Bytes that it has been given to move and has not moved yet.
    pub(crate) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Gives it so many bytes to move. Counted from here, and not from when they are sent: two callers who choose at the
    /// same time must see each other.
    pub(crate) fn take_load(&self, bytes: u64) {
        self.load.fetch_add(bytes, Ordering::Relaxed);
    }

    /// They have moved, or will not.
    pub(crate) fn drop_load(&self, bytes: u64) {
        self.load.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// How long it has been there.
    pub(crate) fn age(&self) -> Duration {
        self.opened_at.elapsed()
    }

    /// Whether it can still be used.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// Why it cannot be used any more.
    pub(crate) fn failure(&self) -> Option<Failure> {
        match self.flights.failure() {
            Some(Err(NoAnswer::Failed(failure))) => Some(failure),
            _ => None,
        }
    }

    /// Ends the connection. Everybody who waits is told; returns without waiting for that.
    pub(crate) fn fail(&self, failure: Failure) {
        self.mark_failed(failure);
        self.worker.bell.notify_all();
        self.clear_if_dead();
    }

    fn mark_failed(&self, failure: Failure) {
        self.flights.fail(Err(NoAnswer::Failed(failure)));
        self.dead.store(true, Ordering::SeqCst);
        self.socket.shut_down();
    }

    // ---------------------------------------------------------------------------------------------- blocking callers

    /// Sends a request on the caller's thread. It is finished later, or already by a failure.
    pub(crate) fn submit(&self, request: &Arc<Request>) {
        if let Err(none) = self.submit_inner(request) {
            request.finish(Err(none));
        }
    }

    fn submit_inner(&self, request: &Arc<Request>) -> Result<(), NoAnswer> {
        let number = self.take_send_half(request.deadline).ok_or(NoAnswer::Deadline)?;
        let entered = loop {
            if Instant::now() >= request.deadline {
                break Err(NoAnswer::Deadline);
            }
            match self.flights.enter(number, Arc::clone(request)) {
                Err(NoEntry::Full) => self.make_room(request.deadline),
                Err(NoEntry::Failed(answer)) => break Err(answer.expect_err("a failure is no answer")),
                Ok(()) => break Ok(()),
            }
        };
        let sent = if entered.is_ok() { self.send(number, request) } else { Ok(()) };
        if let Err(halt) = sent {
            // Something of it may be on the wire: what follows would have no meaning.
            self.fail(self.failure_of(halt));
        }
        // Before the next sender begins, so that one request at a time is being sent.
        if entered.is_ok() {
            self.finish(self.flights.sent(number));
        }
        lock(&self.send).taken = false;
        self.send_free.notify_one();
        entered
    }

    /// As many requests are in flight as may be. The next answer makes room; if nobody receives it, this thread does.
    fn make_room(&self, deadline: Instant) {
        if !self.turn.try_take() {
            return self.flights.await_room(SEND_WAIT);
        }
        if let Err(halt) = self.receive_frame(deadline, None, By::TheSender) {
            self.mark_failed(self.failure_of(halt));
        }
        self.turn.leave();
        self.clear_if_dead();
    }

    /// The number of the next request, with the right to send it.
    fn take_send_half(&self, deadline: Instant) -> Option<u64> {
        let mut half = lock(&self.send);
        while half.taken {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            half = wait(&self.send_free, half, left);
        }
        half.taken = true;
        half.next_request += 1;
        Some(half.next_request)
    }

    /// Waits until a request is finished, receiving if nobody else does. After its deadline the connection is
    /// given up, and with it the request.
    pub(crate) fn wait(&self, request: &Request) {
        while !request.seat.is_done() {
            let has_turn = match self.turn.take(&request.seat) {
                Asked::Yours => true,
                Asked::Queued => {
                    // Once the connection is dead the wait is short, but it is a wait for other threads.
                    let over = request.deadline.max(Instant::now());
                    let until = if self.is_dead() { over + Duration::from_secs(60) } else { over };
                    match self.turn.wait(&request.seat, until) {
                        Waited::Done => return,
                        Waited::Promoted => true,
                        Waited::TimedOut => {
                            self.fail(Failure::Abandoned { peer: self.socket.name() });
                            false
                        }
                    }
                }
            };
            if has_turn {
                self.receive_until(|| request.seat.is_done(), request.deadline, None);
                self.turn.leave();
                self.clear_if_dead();
            }
            if self.is_dead() {
                // Nothing is received any more; what is left is done by its sender.
                request.seat.await_done(SEND_WAIT);
            }
        }
    }

    /// Gives a request up. When this returns nobody touches its memory.
    pub(crate) fn abort(&self, request: &Arc<Request>) {
        {
            let mut state = lock(&self.worker.state);
            let waiting = state.to_send.len();
            state.to_send.retain(|queued| !Arc::ptr_eq(queued, request));
            if state.to_send.len() < waiting {
                drop(state);
                return request.finish(Err(NoAnswer::Aborted));
            }
        }
        if !request.seat.is_done() {
            self.fail(Failure::Abandoned { peer: self.socket.name() });
            self.wait(request);
        }
    }

    // --------------------------------------------------------------------------------------------------- sending

    /// Sends header, body and payload. The caller holds the send half.
    fn send(&self, number: u64, request: &Request) -> Result<(), Halt> {
        // The caller is the first to give up: the peer would close the connection, and hit others on it.
        let left = request.deadline.saturating_duration_since(Instant::now()) + self.stall;
        let deadline_ms = (left.as_millis() as u64).clamp(1, DEADLINE_MS_MAX.into()) as u32;
        let header = request.header(number, deadline_ms).encode();
        let mut chunk = Chunk::new();
        chunk.push(header.as_ptr().cast_mut(), header.len());
        chunk.push(request.body.as_ptr().cast_mut(), request.body.len());
        let work = request.work.as_ref().filter(|_| request.kind == FrameKind::Write);
        let mut left_bytes = work.map_or(0, |work| work.frame.bytes);
        // SAFETY: header and body live here and in the request.
        unsafe { self.send_chunk(&mut chunk, left_bytes > 0 || request.is_followed, request.deadline) }?;
        let Some(work) = work else { return Ok(()) };
        let mut flow = Flow::new(&work.ops, &work.frame.parts);
        while left_bytes > 0 {
            flow.next(&mut chunk, |_| true);
            left_bytes -= chunk.bytes();
            // SAFETY: the request is not finished, so its memory is valid and nobody writes it; the digests are
            // this thread's to write, since it holds the send half.
            unsafe {
                chunk.digest(&work.ops);
                self.send_chunk(&mut chunk, left_bytes > 0 || request.is_followed, request.deadline)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// The memory of the chunk is valid for reads, and nobody writes it meanwhile.
    unsafe fn send_chunk(&self, chunk: &mut Chunk, more: bool, deadline: Instant) -> Result<(), Halt> {
        let mut progress = Instant::now();
        while chunk.bytes() > 0 {
            // SAFETY: says the caller.
            let sent = unsafe { self.socket.try_send(chunk.pieces(), more) }?;
            chunk.advance(sent);
            if sent == 0 {
                self.cannot_send(deadline, progress)?;
                continue;
            }
            progress = Instant::now();
            if progress >= deadline {
                return Err(Halt::Deadline);
            }
        }
        Ok(())
    }

    /// The peer takes nothing. Perhaps because it is answering, and nobody here listens: then this thread does.
    fn cannot_send(&self, deadline: Instant, progress: Instant) -> Result<(), Halt> {
        let now = Instant::now();
        if now >= deadline {
            return Err(Halt::Deadline);
        }
        if now >= progress + self.stall {
            return Err(Failure::Stalled { peer: self.socket.name(), silent: now - progress }.into());
        }
        if !self.turn.try_take() {
            self.socket.wait(false, true, deadline.min(now + SEND_WAIT))?;
            return Ok(());
        }
        let end = deadline.min(progress + self.stall);
        let received = match self.socket.wait(true, true, end) {
            Ok(ready) if ready.readable => self.receive_frame(deadline, None, By::TheSender),
            Ok(_) => Ok(()),
            Err(failure) => Err(failure.into()),
        };
        if let Err(halt) = &received {
            // Before the turn goes to somebody who would take the rest of a frame for the next one.
            self.mark_failed(self.failure_of(halt.clone()));
        }
        self.turn.leave();
        received
    }

    // ------------------------------------------------------------------------------------------------- receiving

    /// Receives frames until `done`, or the connection has failed. The caller has the turn. `alarm` makes it look again
    /// whether it is done.
    fn receive_until(&self, done: impl Fn() -> bool, deadline: Instant, alarm: Option<&Alarm>) {
        while !done() && !self.is_dead() {
            if let Err(halt) = self.receive_frame(deadline, alarm, By::AReceiver) {
                self.mark_failed(self.failure_of(halt));
            }
        }
        if self.is_dead() {
            self.finish(self.flights.clear());
        }
    }

    fn failure_of(&self, halt: Halt) -> Failure {
        match halt {
            Halt::Deadline => Failure::Abandoned { peer: self.socket.name() },
            Halt::Failed(failure) => failure,
        }
    }

    /// Receives one frame, or none when the alarm rings. The caller has the turn.
    fn receive_frame(&self, deadline: Instant, alarm: Option<&Alarm>, by: By) -> Result<(), Halt> {
        let inbox = &mut *lock(&self.inbox);
        let mut bytes = [0; FRAME_HEADER_BYTES];
        if inbox.len() == 0 && !self.await_frame(inbox, deadline, alarm)? {
            return Ok(());
        }
        // From here on bytes are due: a pause is a stall. Whoever receives stops at its own deadline, whosever frame it is.
        let patience = Patience { deadline, stall: self.stall };
        inbox.receive(&self.socket, &mut bytes, patience)?;
        let peer = self.socket.name();
        let header = FrameHeader::decode(&bytes).map_err(|source| Failure::Frame { peer, source })?;
        let unexpected = || Failure::Answer { peer, kind: header.kind, request: header.request };
        let request = self.flights.receive(header.request).ok_or_else(unexpected)?;
        let mut body = vec![0; header.body_len as usize];
        let fits = header.kind == FrameKind::Error || Some(header.kind) == request.kind.reply();
        if !fits || header.flags != FrameFlags::NONE {
            return Err(unexpected().into());
        }
        inbox.receive(&self.socket, &mut body, patience)?;
        if header.kind == FrameKind::ReadReply && header.status.is_none() {
            self.receive_payload(inbox, &header, &request, &body, patience)?;
        } else if header.payload_len > 0 {
            return Err(unexpected().into());
        }
        if request.kind == FrameKind::Write && header.status.is_none() && !codes_fit(&request, &body) {
            return Err(unexpected().into());
        }
        let answer = match header.status {
            Some(code) => Err(NoAnswer::Refused(code)),
            None => Ok(body),
        };
        let finished =
            self.flights.answered(header.request, answer, by, deadline).map_err(|Late| Halt::Deadline)?;
        self.finish(finished);
        Ok(())
    }

    /// Waits for the beginning of the next frame; `false` if the alarm rang first.
    fn await_frame(&self, inbox: &mut Inbox, deadline: Instant, alarm: Option<&Alarm>) -> Result<bool, Halt> {
        let mut moved_at = Instant::now();
        let mut unsent = None;
        let mut taken_at = moved_at;
        loop {
            let front = self.flights.front();
            // Most likely it is the oldest request's answer: its header and codes, and not yet its payload.
            let work = front.as_ref().and_then(|(request, _)| request.work.as_ref());
            let likely = FRAME_HEADER_BYTES + work.map_or(0, |work| 2 * work.frame.parts.len());
            // As long as a call is unanswered, which may take its time, silence is no stall; and whoever is sending
            // has a clock of its own.
            let sent_at = work.and(front.as_ref()).and_then(|(_, sent_at)| *sent_at);
            let due = sent_at.map(|sent_at| sent_at.max(moved_at) + self.stall);
            // What is in front may change meanwhile, so this thread looks again now and then.
            let look = Instant::now() + self.stall / 2;
            let end = due.unwrap_or(look).min(look).min(deadline);
            match alarm {
                Some(alarm) => {
                    let ready = self.socket.wait_or_alarm(alarm, end)?;
                    if alarm.was_rung() {
                        return Ok(false);
                    }
                    if ready {
                        inbox.try_receive(&self.socket, likely)?;
                    }
                }
                None => match inbox.receive_first(&self.socket, likely, end) {
                    Ok(()) => {}
                    Err(Halt::Deadline) => inbox.try_receive(&self.socket, likely)?,
                    Err(halt) => return Err(halt),
                },
            }
            if inbox.len() > 0 {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Halt::Deadline);
            }
            // A peer that takes what was sent, however slowly, is not silent.
            let left = self.socket.unsent_bytes();
            let before = unsent.replace(left);
            if left == 0 || before.is_some_and(|before| left < before) {
                taken_at = now;
            }
            // However long it takes to answer a call: what is sent is taken by the peer's kernel at once, unless that
            // has no more room. If it is not, nobody is there.
            let gone = matches!(self.socket.name(), Name::Tcp(_))
                && left <= TAKEN_AT_ONCE
                && now >= taken_at + self.stall;
            if before.is_some_and(|before| left < before) {
                moved_at = now;
            } else if gone || due.is_some_and(|due| now >= due) {
                return Err(Failure::Stalled { peer: self.socket.name(), silent: now - moved_at }.into());
            }
        }
    }

    /// Receives the payload of a ReadReply straight into the caller's memory.
    fn receive_payload(
        &self,
        inbox: &mut Inbox,
        header: &FrameHeader,
        request: &Request,
        codes: &[u8],
        patience: Patience,
    ) -> Result<(), Halt> {
        let peer = self.socket.name();
        let unexpected = Failure::Answer { peer, kind: header.kind, request: header.request };
        let Some(work) = request.work.as_ref().filter(|_| codes_fit(request, codes)) else {
            return Err(unexpected.into());
        };
        let is_there = |part: usize| codes[2 * part] == 0 && codes[2 * part + 1] == 0;
        let parts = work.frame.parts.iter().enumerate();
        let expected: u64 = parts.filter(|(part, _)| is_there(*part)).map(|(_, p)| p.range.len()).sum();
        if header.payload_len != expected {
            return Err(unexpected.into());
        }
        let mut flow = Flow::new(&work.ops, &work.frame.parts);
        let mut chunk = Chunk::new();
        let mut left = expected;
        while left > 0 {
            flow.next(&mut chunk, is_there);
            left -= chunk.bytes();
            // SAFETY: as below.
            unsafe { inbox.drain_into(&mut chunk) };
            while chunk.bytes() > 0 {
                // SAFETY: the request is not finished, so its memory is valid; this thread has the turn, so nobody
                // else uses it.
                let got = unsafe { self.socket.receive_some(chunk.pieces(), patience) }?;
                chunk.advance(got);
            }
            // SAFETY: as above.
            unsafe { chunk.digest(&work.ops) };
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------------------- finishing

    fn finish(&self, finished: impl IntoIterator<Item = (Arc<Request>, Answer)>) {
        for (request, answer) in finished {
            let late = matches!(answer, Err(NoAnswer::Failed(_))) && Instant::now() >= request.deadline;
            request.finish(if late { Err(NoAnswer::Deadline) } else { answer });
        }
    }

    /// Whoever marks the connection dead while nobody has the turn, and whoever leaves the turn of a connection that
    /// was marked meanwhile, clears up. One of them sees the other.
    fn clear_if_dead(&self) {
        if self.is_dead() && self.turn.try_take() {
            self.finish(self.flights.clear());
            self.turn.leave();
        }
    }

    // ---------------------------------------------------------------------------------------------------- worker

    /// Sends a request from the connection's own thread, which then minds it until it is finished.
    pub(crate) fn hand_over(self: &Arc<Self>, request: Arc<Request>) {
        let mut state = lock(&self.worker.state);
        if state.stop || self.is_dead() {
            drop(state);
            let failure = self.failure().unwrap_or(Failure::Stopped);
            return request.finish(Err(NoAnswer::Failed(failure)));
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
                    let failure = Failure::System { what: "start a thread for", peer, source };
                    for request in state.to_send.drain(..) {
                        request.finish(Err(NoAnswer::Failed(failure.clone())));
                    }
                }
            }
        }
        drop(state);
        self.worker.bell.notify_all();
        if let Some(alarm) = &self.worker.alarm {
            alarm.ring();
        }
    }

    fn work(&self) {
        loop {
            let (to_send, minded) = {
                let mut state = lock(&self.worker.state);
                loop {
                    state.minded.retain(|request| !request.seat.is_done());
                    if !state.to_send.is_empty() || !state.minded.is_empty() {
                        break;
                    }
                    if state.stop || self.is_dead() {
                        return;
                    }
                    state = wait(&self.worker.bell, state, IDLE_LOOK);
                }
                let next = state.to_send.pop_front();
                state.minded.extend(next.clone());
                (next, state.minded.clone())
            };
            if let Some(request) = to_send {
                self.submit(&request);
                continue;
            }
            self.mind(&minded);
        }
    }

    /// Receives for those who do not, until one of their requests is finished, there is something to send, or one of
    /// their deadlines has passed.
    fn mind(&self, minded: &[Arc<Request>]) {
        let seat = &self.worker.seat;
        let deadline = minded.iter().map(|request| request.deadline).min().expect("there is one");
        let has_turn = match self.turn.take(seat) {
            Asked::Yours => true,
            // Whoever has the turn answers for all. This thread looks now and then whether there is something to send.
            Asked::Queued => {
                self.turn.wait(seat, deadline.min(Instant::now() + SEND_WAIT)) == Waited::Promoted
            }
        };
        if has_turn {
            let enough =
                || minded.iter().any(|r| r.seat.is_done()) || !lock(&self.worker.state).to_send.is_empty();
            self.receive_until(enough, deadline, self.worker.alarm.as_ref());
            self.turn.leave();
            self.clear_if_dead();
        } else if Instant::now() >= deadline && minded.iter().any(|r| !r.seat.is_done()) {
            self.fail(Failure::Abandoned { peer: self.socket.name() });
        }
    }

    /// Ends the connection and its thread. When this returns no thread of it is left, and no request unfinished, but
    /// for those that callers are sending this moment.
    pub(crate) fn stop(&self) {
        self.fail(Failure::Stopped);
        let thread = {
            let mut state = lock(&self.worker.state);
            state.stop = true;
            state.thread.take()
        };
        self.worker.bell.notify_all();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // It does not panic; if it did, it has said so.
            let _ = thread.join();
        }
        let left: Vec<_> = lock(&self.worker.state).to_send.drain(..).collect();
        for request in left {
            request.finish(Err(NoAnswer::Failed(Failure::Stopped)));
        }
    }
}

/// One code per operation, and each of them known.
fn codes_fit(request: &Request, body: &[u8]) -> bool {
    let parts = request.work.as_ref().map_or(0, |work| work.frame.parts.len());
    body.len() == 2 * parts && Codes::decode(body, parts).is_ok()
}

/// The code of one operation in an answer that [`codes_fit`].
pub(crate) fn code_at(codes: &[u8], part: usize) -> Option<ErrorCode> {
    let number = u16::from_le_bytes([codes[2 * part], codes[2 * part + 1]]);
    ErrorCode::try_from(u32::from(number)).ok()
}
