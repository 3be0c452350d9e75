//! [`TcpPending`]: a running batch or call: frames, each on a connection, sent again where a connection failed.

use std::task::{Context, Poll};

use moontide_proto::FrameKind;
use moontide_rt::sync::Arc;
use moontide_rt::time::Instant;
use moontide_types::ErrorCode;

use crate::engine::{Pending, WaitMode};
use crate::engine_kind::EngineKind;
use crate::error::{ConnectionError, TransferError};
use crate::framing::FramePlan;
use crate::op::OpCore;
use crate::tcp::connection::{Connection, code_at};
use crate::tcp::connection_set::ConnectionSet;
use crate::tcp::request::{Request, RequestError};

/// Most attempts to send a frame, if its connections fail.
const ATTEMPTS_MAX: u32 = 4;

/// Most attempts, if other requests cause the failure of its connections.
const RESUBMIT_MAX: u32 = 16;

/// Fixed cost of a request, expressed in bytes: a few microseconds.
const REQUEST_LOAD: u64 = 16 << 10;

/// A running batch or call.
#[derive(Debug)]
pub(super) struct TcpPending {
    shared: Arc<ConnectionSet>,
    ops: Arc<[OpCore]>,
    jobs: Vec<FrameJob>,
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
    reply: Vec<u8>,
    started: Instant,
    deadline: Instant,
    ended: Option<Result<(), TransferError>>,
}

/// One frame of a batch or call.
#[derive(Debug)]
struct FrameJob {
    body: FrameBody,
    /// Connection and request; `None` while the frame waits for a connection, and after it is done.
    in_flight: Option<(Arc<Connection>, Arc<Request>)>,
    attempts: u32,
    /// Error that made another attempt necessary.
    last: Option<ConnectionError>,
    done: bool,
}

#[derive(Debug)]
enum FrameBody {
    Frame(FramePlan),
    Call(FrameKind, Vec<u8>),
}

impl FrameJob {
    fn new(body: FrameBody) -> FrameJob {
        FrameJob { body, in_flight: None, attempts: 0, last: None, done: false }
    }

    /// Returns the load for a connection: the bytes plus the fixed cost of a request.
    fn load(&self) -> u64 {
        match &self.body {
            FrameBody::Frame(frame) => frame.bytes + REQUEST_LOAD,
            FrameBody::Call(..) => REQUEST_LOAD,
        }
    }

    /// Removes the frame from its connection.
    fn detach(&mut self) -> Option<(Arc<Connection>, Arc<Request>)> {
        let (connection, request) = self.in_flight.take()?;
        connection.drop_load(self.load());
        Some((connection, request))
    }
}

impl TcpPending {
    /// Starts a batch.
    pub(super) fn transfer(
        shared: Arc<ConnectionSet>,
        ops: Arc<[OpCore]>,
        frames: Vec<FramePlan>,
        deadline: Instant,
        wait_mode: WaitMode,
    ) -> TcpPending {
        let jobs = frames.into_iter().map(|frame| FrameJob::new(FrameBody::Frame(frame))).collect();
        TcpPending::start(shared, ops, jobs, deadline, wait_mode)
    }

    /// Starts a call.
    pub(super) fn call(
        shared: Arc<ConnectionSet>,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        wait_mode: WaitMode,
    ) -> TcpPending {
        let checked = Request::check_call(kind, &body);
        let jobs =
            if checked.is_ok() { vec![FrameJob::new(FrameBody::Call(kind, body))] } else { Vec::new() };
        let mut pending = TcpPending::start(shared, Arc::new([]), jobs, deadline, wait_mode);
        if checked.is_err() {
            pending.ended = Some(checked);
        }
        pending
    }

    fn start(
        shared: Arc<ConnectionSet>,
        ops: Arc<[OpCore]>,
        jobs: Vec<FrameJob>,
        deadline: Instant,
        wait_mode: WaitMode,
    ) -> TcpPending {
        let outcomes = vec![None; ops.len()];
        let (started, reply, ended) = (Instant::now(), Vec::new(), None);
        let mut pending = TcpPending { shared, ops, jobs, outcomes, reply, started, deadline, ended };
        let bytes: Vec<u64> = pending.jobs.iter().map(FrameJob::load).collect();
        let assigned = match wait_mode {
            WaitMode::Blocking => pending.shared.assign(&bytes, deadline).map(Some),
            // Without a connection the first poll tries again.
            WaitMode::Polling => pending.shared.assign_or_wake(&bytes, None),
        };
        match assigned {
            Ok(Some(connections)) => pending.launch(connections, wait_mode),
            Ok(None) => {}
            Err(error) => {
                let _ = pending.end(Err(error)); // returned by `wait` and `poll`
            }
        }
        pending
    }

    /// Sends every job on its connection. A waiting thread serves the first connection itself; before that, it starts
    /// the threads of the other connections.
    fn launch(&mut self, connections: Vec<Arc<Connection>>, wait_mode: WaitMode) {
        let own = connections.first().filter(|_| wait_mode == WaitMode::Blocking).cloned();
        let mut mine = Vec::new();
        for (index, connection) in connections.into_iter().enumerate() {
            let request = self.make_request(index, Arc::clone(&connection));
            if own.as_ref().is_some_and(|own| Arc::ptr_eq(own, &connection)) {
                mine.push((connection, request));
            } else {
                connection.submit_async(request);
            }
        }
        mine.iter().for_each(|(connection, request)| connection.submit(request));
    }

    /// Creates the request of a job, which the caller sends.
    fn make_request(&mut self, index: usize, connection: Arc<Connection>) -> Arc<Request> {
        let job = &mut self.jobs[index];
        job.attempts += 1;
        let request = match &job.body {
            FrameBody::Frame(frame) => Request::transfer(&self.ops, frame.clone(), self.deadline),
            FrameBody::Call(kind, body) => Request::call(*kind, body.clone(), self.deadline),
        };
        if job.attempts > 1 {
            self.shared.metrics.resubmitted(EngineKind::Tcp);
        }
        job.in_flight = Some((connection, Arc::clone(&request)));
        request
    }

    /// Handles a job whose request has finished: it is done, or must be sent again.
    fn settle(&mut self, index: usize) -> Result<(), TransferError> {
        let (_, request) = self.jobs[index].detach().expect("the job was sent");
        let result = request.take_result().expect("the request has finished");
        let failure = match result {
            Ok(body) => {
                self.jobs[index].done = true;
                self.handle_reply(index, body);
                return Ok(());
            }
            Err(RequestError::Refused(code)) => return Err(TransferError::Refused { code }),
            Err(RequestError::Aborted) => return Err(TransferError::Aborted),
            Err(RequestError::Deadline) => return Err(self.deadline_error()),
            Err(RequestError::Failed(failure)) => failure,
        };
        if Instant::now() >= self.deadline {
            return Err(self.deadline_error());
        }
        // Another request caused the failure of the connection. Such retries are limited too.
        let abandoned = matches!(failure, ConnectionError::Abandoned { .. });
        let limit = if abandoned { RESUBMIT_MAX } else { ATTEMPTS_MAX };
        if self.jobs[index].attempts >= limit {
            return Err(TransferError::ConnectionLost { node: self.shared.node, last: failure });
        }
        self.jobs[index].last = Some(failure);
        Ok(())
    }

    fn handle_reply(&mut self, index: usize, body: Vec<u8>) {
        match &self.jobs[index].body {
            FrameBody::Call(..) => self.reply = body,
            FrameBody::Frame(frame) => {
                for (position, part) in frame.parts.iter().enumerate() {
                    let outcome = &mut self.outcomes[part.op];
                    // The first failed part determines the outcome of the operation.
                    if !matches!(outcome, Some(Err(_))) {
                        *outcome = Some(code_at(&body, position).map_or(Ok(()), Err));
                    }
                }
            }
        }
    }

    fn deadline_error(&self) -> TransferError {
        TransferError::Deadline { waited: self.started.elapsed() }
    }

    /// Returns the error of a job without a connection. A lost connection is more specific than an unreachable peer.
    fn unassigned_error(&self, index: usize, error: TransferError) -> TransferError {
        if Instant::now() >= self.deadline {
            return self.deadline_error();
        }
        match (&self.jobs[index].last, error) {
            (Some(last), TransferError::Unreachable { node, .. }) if self.jobs[index].attempts == 1 => {
                TransferError::ConnectionLost { node, last: last.clone() }
            }
            (_, error) => error,
        }
    }

    /// Aborts running requests and sets the result.
    fn end(&mut self, result: Result<(), TransferError>) -> Result<(), TransferError> {
        for job in &mut self.jobs {
            if let Some((connection, request)) = job.detach() {
                connection.abort(&request);
            }
        }
        let failed = result.as_ref().err().map(TransferError::code);
        for (op, outcome) in self.ops.iter().zip(&self.outcomes) {
            let outcome = outcome.unwrap_or(Err(failed.unwrap_or(ErrorCode::Internal)));
            self.shared.metrics.op(EngineKind::Tcp, op.direction(), op.len(), outcome);
        }
        self.ended = Some(result.clone());
        result
    }
}

impl Pending for TcpPending {
    fn wait(&mut self) -> Result<(), TransferError> {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        for index in 0..self.jobs.len() {
            while !self.jobs[index].done {
                if self.jobs[index].in_flight.is_none() {
                    match self.shared.assign(&[self.jobs[index].load()], self.deadline) {
                        Ok(connections) => {
                            let connection = Arc::clone(&connections[0]);
                            let request = self.make_request(index, Arc::clone(&connection));
                            connection.submit(&request);
                        }
                        Err(error) => {
                            let error = self.unassigned_error(index, error);
                            return self.end(Err(error));
                        }
                    }
                }
                let (connection, request) = self.jobs[index].in_flight.as_ref().expect("sent above");
                connection.wait(request);
                if let Err(error) = self.settle(index) {
                    return self.end(Err(error));
                }
            }
        }
        self.end(Ok(()))
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        if let Some(ended) = &self.ended {
            return Poll::Ready(ended.clone());
        }
        let mut all_done = true;
        for index in 0..self.jobs.len() {
            while !self.jobs[index].done {
                if self.jobs[index].in_flight.is_none() {
                    let bytes = [self.jobs[index].load()];
                    match self.shared.assign_or_wake(&bytes, Some(context.waker())) {
                        Ok(Some(connections)) => {
                            let connection = Arc::clone(&connections[0]);
                            let request = self.make_request(index, Arc::clone(&connection));
                            connection.submit_async(request);
                        }
                        Ok(None) if Instant::now() < self.deadline => {
                            all_done = false;
                            break;
                        }
                        Ok(None) => {
                            let error = self.deadline_error();
                            return Poll::Ready(self.end(Err(error)));
                        }
                        Err(error) => {
                            let error = self.unassigned_error(index, error);
                            return Poll::Ready(self.end(Err(error)));
                        }
                    }
                }
                let (_, request) = self.jobs[index].in_flight.as_ref().expect("sent above");
                if !request.waiter.poll(context.waker()) {
                    all_done = false;
                    break;
                }
                if let Err(error) = self.settle(index) {
                    return Poll::Ready(self.end(Err(error)));
                }
            }
        }
        if all_done { Poll::Ready(self.end(Ok(()))) } else { Poll::Pending }
    }

    fn abort(&mut self) {
        if self.ended.is_none() {
            let _ = self.end(Err(TransferError::Aborted));
        }
    }

    fn outcomes(&self) -> &[Option<Result<(), ErrorCode>>] {
        &self.outcomes
    }

    fn take_reply(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.reply)
    }
}

impl Drop for TcpPending {
    fn drop(&mut self) {
        self.abort();
    }
}
