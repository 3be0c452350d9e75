//! [`Endpoints`]: calls to an etcd of one or several servers, each of which may be dead, silent or cut off.
//!
//! A call goes to the server that answered last. If that one does not, the next is tried, until the call's time is up. A
//! connection on which something was left unanswered is not used again: whether it is dead or slow cannot be told.
//!
//! Invariant: what must not be done twice is tried again only if it was certainly not sent.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;
use prost::Message;
use tokio::time::{Instant, sleep, timeout};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, ConnectError, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::election::registry::root_cause;

/// How long a call may take in all.
pub(super) const CALL: Duration = Duration::from_millis(1800);
/// How many servers are tried for the whole of their share: 3 · 600 ms = 1.8 s. A share must be longer than etcd takes for a
/// write to a busy disk.
const SHARES: usize = 3;
/// Before all are tried a second time: a server that restarts refuses for a moment.
const PAUSE: Duration = Duration::from_millis(100);

/// Whether a call may be carried out twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// The second time changes nothing.
    Harmless,
    /// The second time would be answered differently.
    Never,
}

/// The servers, and which of them is asked.
pub(super) struct Endpoints {
    servers: Vec<Endpoint>,
    state: Mutex<State>,
}

struct State {
    current: usize,
    channels: Vec<Channel>,
}

impl fmt::Debug for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.servers.iter().map(Endpoint::uri)).finish()
    }
}

impl Endpoints {
    /// Connects when it is first called. Needs a runtime.
    pub(super) fn new(servers: Vec<Endpoint>) -> Endpoints {
        assert!(!servers.is_empty(), "an address names at least one server");
        let servers: Vec<Endpoint> = servers.into_iter().map(|server| server.connect_timeout(CALL)).collect();
        let channels = servers.iter().map(Endpoint::connect_lazy).collect();
        Endpoints { servers, state: Mutex::new(State { current: 0, channels }) }
    }

    /// A message for a message.
    pub(super) async fn unary<Q, A>(
        &self,
        until: Instant,
        repeat: Repeat,
        path: &'static str,
        question: &Q,
    ) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        self.call(until, repeat, |mut grpc, share| async move {
            grpc.ready().await.map_err(unready)?;
            let path = PathAndQuery::from_static(path);
            let request = request(question.clone(), Some(share));
            Ok(grpc.unary(request, path, ProstCodec::<Q, A>::default()).await?.into_inner())
        })
        .await
    }

    /// The first answer of a stream to which one message is sent.
    pub(super) async fn first<Q, A>(
        &self,
        until: Instant,
        path: &'static str,
        question: &Q,
    ) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        self.call(until, Repeat::Harmless, |mut grpc, share| async move {
            grpc.ready().await.map_err(unready)?;
            let path = PathAndQuery::from_static(path);
            let question = question.clone();
            let request = request(stream::once(async move { question }), Some(share));
            let answer = grpc.streaming(request, path, ProstCodec::<Q, A>::default()).await?;
            answer.into_inner().message().await?.ok_or_else(|| Status::unavailable("the stream ended"))
        })
        .await
    }

    /// A stream to which one message is sent, and which goes on. From the server that answered last; tried once.
    pub(super) async fn stream<Q, A>(&self, path: &'static str, question: Q) -> Result<Streaming<A>, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let (_, channel) = self.current();
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.map_err(unready)?;
        // The server ends the stream when our half of it ends.
        let questions = stream::once(async move { question }).chain(stream::pending());
        let path = PathAndQuery::from_static(path);
        Ok(grpc.streaming(request(questions, None), path, ProstCodec::<Q, A>::default()).await?.into_inner())
    }

    async fn call<A, F>(
        &self,
        until: Instant,
        repeat: Repeat,
        attempt: impl Fn(Grpc<Channel>, Duration) -> F,
    ) -> Result<A, Status>
    where
        F: Future<Output = Result<A, Status>>,
    {
        let count = self.servers.len();
        let mut last = Status::deadline_exceeded("there was no time left to ask");
        for number in 1..=2 * count {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let share = left.min(CALL / count.min(SHARES) as u32);
            let (index, channel) = self.current();
            last = match timeout(share, attempt(Grpc::new(channel), share)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(status)) if is_answer(&status) => return Err(status),
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded(format!("no answer within {} ms", share.as_millis())),
            };
            self.give_up(index);
            if repeat == Repeat::Never && !was_not_sent(&last) {
                break;
            }
            if number == count {
                sleep(PAUSE.min(until.saturating_duration_since(Instant::now()))).await;
            }
        }
        Err(last)
    }

    fn current(&self) -> (usize, Channel) {
        let state = self.state.lock();
        (state.current, state.channels[state.current].clone())
    }

    /// This one did not answer: others are asked from now on, and it gets a new connection.
    fn give_up(&self, index: usize) {
        let mut state = self.state.lock();
        state.channels[index] = self.servers[index].connect_lazy();
        if state.current == index {
            state.current = (index + 1) % self.servers.len();
        }
    }
}

fn request<T>(message: T, share: Option<Duration>) -> Request<T> {
    let mut request = Request::new(message);
    // A server that has lost the others must say so, instead of answering from what it remembers.
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    if let Some(share) = share {
        // For the server, so that it forgets what nobody waits for. A little longer: here the time is up by our own clock.
        request.set_timeout(share + PAUSE);
    }
    request
}

fn unready(error: tonic::transport::Error) -> Status {
    Status::from_error(Box::new(error))
}

/// Whether etcd has looked at the call and said no: another server would say the same.
fn is_answer(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::NotFound
            | Code::AlreadyExists
            | Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
    )
}

/// Whether there was no connection to send it on.
fn was_not_sent(status: &Status) -> bool {
    causes(status).any(|cause| cause.is::<ConnectError>())
}

/// What it comes down to, for people: the cause of the causes.
pub(super) fn reason(status: &Status) -> String {
    // A status without a cause shows its code and more than people want; one that has a cause has it as its message too.
    Error::source(status).map_or_else(|| status.message().to_owned(), root_cause)
}

fn causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(Error::source(status), |&cause| cause.source())
}
