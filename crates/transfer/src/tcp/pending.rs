//! [`TcpPending`]: a batch, or a call, under way: frames, each on a connection, sent again where one failed.

use std::task::{Context, Poll};
use std::time::Instant;

use moontide_proto::FrameKind;
use moontide_types::ErrorCode;

use crate::engine::{EngineKind, Pending, Waiting};
use crate::error::{Failure, TransferError};
use crate::op::OpCore;
use crate::plan::Frame;
use crate::sync::Arc;
use crate::tcp::connection::{Connection, code_at};
use crate::tcp::link::Shared;
use crate::tcp::request::{NoAnswer, Request};

/// How often a frame is sent at most, when its connections fail.
const ATTEMPTS_MAX: u32 = 4;

/// How often at most, when it is others who give its connections up.
const ABANDONED_MAX: u32 = 16;

/// What a request costs besides its bytes, in bytes: a few microseconds.
const REQUEST_LOAD: u64 = 16 << 10;

/// A batch, or a call, under way.
#[derive(Debug)]
pub(super) struct TcpPending {
    shared: Arc<Shared>,
    ops: Arc<[OpCore]>,
    jobs: Vec<Job>,
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
    reply: Vec<u8>,
    started: Instant,
    deadline: Instant,
    ended: Option<Result<(), TransferError>>,
}

/// One frame of it.
#[derive(Debug)]
struct Job {
    ask: Ask,
    /// `None`: it waits for a connection, or is done.
    flight: Option<(Arc<Connection>, Arc<Request>)>,
    attempts: u32,
    /// Why it has to be sent again.
    last: Option<Failure>,
    done: bool,
}

#[derive(Debug)]
enum Ask {
    Frame(Frame),
    Call(FrameKind, Vec<u8>),
}

impl Job {
    fn new(ask: Ask) -> Job {
        Job { ask, flight: None, attempts: 0, last: None, done: false }
    }

    /// What it means for a connection: its bytes, and a little for being a request.
    fn load(&self) -> u64 {
        match &self.ask {
            Ask::Frame(frame) => frame.bytes + REQUEST_LOAD,
            Ask::Call(..) => REQUEST_LOAD,
        }
    }

    /// Takes it off its connection.
    fn land(&mut self) -> Option<(Arc<Connection>, Arc<Request>)> {
        let (connection, request) = self.flight.take()?;
        connection.drop_load(self.load());
        Some((connection, request))
    }
}

impl TcpPending {
    /// Starts a batch.
    pub(super) fn transfer(
        shared: Arc<Shared>,
        ops: Arc<[OpCore]>,
        frames: Vec<Frame>,
        deadline: Instant,
        waiting: Waiting,
    ) -> TcpPending {
        let jobs = frames.into_iter().map(|frame| Job::new(Ask::Frame(frame))).collect();
        TcpPending::start(shared, ops, jobs, deadline, waiting)
    }

    /// Starts a call.
    pub(super) fn call(
        shared: Arc<Shared>,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        waiting: Waiting,
    ) -> TcpPending {
        let checked = Request::check_call(kind, &body);
        let jobs = if checked.is_ok() { vec![Job::new(Ask::Call(kind, body))] } else { Vec::new() };
        let mut pending = TcpPending::start(shared, Arc::new([]), jobs, deadline, waiting);
        if checked.is_err() {
            pending.ended = Some(checked);
        }
        pending
    }

    fn start(
        shared: Arc<Shared>,
        ops: Arc<[OpCore]>,
        jobs: Vec<Job>,
        deadline: Instant,
        waiting: Waiting,
    ) -> TcpPending {
        let outcomes = vec![None; ops.len()];
        let (started, reply, ended) = (Instant::now(), Vec::new(), None);
        let mut pending = TcpPending { shared, ops, jobs, outcomes, reply, started, deadline, ended };
        let bytes: Vec<u64> = pending.jobs.iter().map(Job::load).collect();
        let assigned = match waiting {
            Waiting::Here => pending.shared.assign(&bytes, deadline).map(Some),
            // Without a connection the first poll tries again.
            Waiting::Elsewhere => pending.shared.assign_or_wake(&bytes, None),
        };
        match assigned {
            Ok(Some(connections)) => pending.launch(connections, waiting),
            Ok(None) => {}
            Err(error) => {
                let _ = pending.end(Err(error)); // told by `wait` and `poll`
            }
        }
        pending
    }

    /// Sends every job on its connection. A thread that waits serves the first connection itself; the others' own
    /// threads are set to work before that.
    fn launch(&mut self, connections: Vec<Arc<Connection>>, waiting: Waiting) {
        let own = connections.first().filter(|_| waiting == Waiting::Here).cloned();
        let mut mine = Vec::new();
        for (index, connection) in connections.into_iter().enumerate() {
            let request = self.board(index, Arc::clone(&connection));
            if own.as_ref().is_some_and(|own| Arc::ptr_eq(own, &connection)) {
                mine.push((connection, request));
            } else {
                connection.hand_over(request);
            }
        }
        mine.iter().for_each(|(connection, request)| connection.submit(request));
    }

    /// Makes the request of a job, which the caller sends.
    fn board(&mut self, index: usize, connection: Arc<Connection>) -> Arc<Request> {
        let job = &mut self.jobs[index];
        job.attempts += 1;
        let request = match &job.ask {
            Ask::Frame(frame) => Request::transfer(&self.ops, frame.clone(), self.deadline),
            Ask::Call(kind, body) => Request::call(*kind, body.clone(), self.deadline),
        };
        if job.attempts > 1 {
            self.shared.metrics.resubmitted(EngineKind::Tcp);
        }
        job.flight = Some((connection, Arc::clone(&request)));
        request
    }

    /// Looks at a job whose request has finished: it is done, or has to be sent again.
    fn settle(&mut self, index: usize) -> Result<(), TransferError> {
        let (_, request) = self.jobs[index].land().expect("a job that was sent");
        let answer = request.take_answer().expect("it has finished");
        let failure = match answer {
            Ok(body) => {
                self.jobs[index].done = true;
                self.take_in(index, body);
                return Ok(());
            }
            Err(NoAnswer::Refused(code)) => return Err(TransferError::Refused { code }),
            Err(NoAnswer::Aborted) => return Err(TransferError::Aborted),
            Err(NoAnswer::Deadline) => return Err(self.too_late()),
            Err(NoAnswer::Failed(failure)) => failure,
        };
        if Instant::now() >= self.deadline {
            return Err(self.too_late());
        }
        // A connection that somebody else gave up is not this job's fault, but there must be an end.
        let abandoned = matches!(failure, Failure::Abandoned { .. });
        let limit = if abandoned { ABANDONED_MAX } else { ATTEMPTS_MAX };
        if self.jobs[index].attempts >= limit {
            return Err(TransferError::Lost { node: self.shared.node, last: failure });
        }
        self.jobs[index].last = Some(failure);
        Ok(())
    }

    fn take_in(&mut self, index: usize, body: Vec<u8>) {
        match &self.jobs[index].ask {
            Ask::Call(..) => self.reply = body,
            Ask::Frame(frame) => {
                for (place, part) in frame.parts.iter().enumerate() {
                    let outcome = &mut self.outcomes[part.op];
                    // Of several parts the first that failed speaks for the operation.
                    if !matches!(outcome, Some(Err(_))) {
                        *outcome = Some(code_at(&body, place).map_or(Ok(()), Err));
                    }
                }
            }
        }
    }

    fn too_late(&self) -> TransferError {
        TransferError::Deadline { waited: self.started.elapsed() }
    }

    /// No connection is to be had for a job. That it was reached, and then lost, says more than that it is not now.
    fn stranded(&self, index: usize, error: TransferError) -> TransferError {
        if Instant::now() >= self.deadline {
            return self.too_late();
        }
        match (&self.jobs[index].last, error) {
            (Some(last), TransferError::Unreachable { node, .. }) if self.jobs[index].attempts == 1 => {
                TransferError::Lost { node, last: last.clone() }
            }
            (_, error) => error,
        }
    }

    /// Whatever is under way ends here; then the result is known.
    fn end(&mut self, result: Result<(), TransferError>) -> Result<(), TransferError> {
        for job in &mut self.jobs {
            if let Some((connection, request)) = job.land() {
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
                if self.jobs[index].flight.is_none() {
                    match self.shared.assign(&[self.jobs[index].load()], self.deadline) {
                        Ok(connections) => {
                            let connection = Arc::clone(&connections[0]);
                            let request = self.board(index, Arc::clone(&connection));
                            connection.submit(&request);
                        }
                        Err(error) => {
                            let error = self.stranded(index, error);
                            return self.end(Err(error));
                        }
                    }
                }
                let (connection, request) = self.jobs[index].flight.as_ref().expect("sent above");
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
                if self.jobs[index].flight.is_none() {
                    let bytes = [self.jobs[index].load()];
                    match self.shared.assign_or_wake(&bytes, Some(context.waker())) {
                        Ok(Some(connections)) => {
                            let connection = Arc::clone(&connections[0]);
                            let request = self.board(index, Arc::clone(&connection));
                            connection.hand_over(request);
                        }
                        Ok(None) if Instant::now() < self.deadline => {
                            all_done = false;
                            break;
                        }
                        Ok(None) => {
                            let error = self.too_late();
                            return Poll::Ready(self.end(Err(error)));
                        }
                        Err(error) => {
                            let error = self.stranded(index, error);
                            return Poll::Ready(self.end(Err(error)));
                        }
                    }
                }
                let (_, request) = self.jobs[index].flight.as_ref().expect("sent above");
                if !request.seat.poll(context.waker()) {
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
