//! [`Endpoints`]: calls to an etcd of one or several servers, each of which may be dead, unresponsive or partitioned.
//!
//! A call goes to the server that responded last. If it does not respond, the next server is tried, until the deadline
//! of the call. A connection with an unanswered call is not used again, because it may be dead.
//!
//! With a user of etcd, each call has its token; a call whose token is refused gets a new one and is made again.
//!
//! Invariant: a call that is not idempotent is retried only if it was certainly not sent, or etcd has refused its token.

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

use super::tls::EtcdConnector;
use super::user::{EtcdUser, UserState, UserToken, is_not_enabled};
use super::wire::{AuthenticateResponse, call};
use crate::election::registry::root_cause;

/// Timeout of a call, with all attempts.
pub(super) const CALL: Duration = Duration::from_millis(1800);
/// Number of attempts with a full share of the timeout: 3 · 600 ms = 1.8 s. A share must be longer than a write of
/// etcd to a busy disk.
const ATTEMPTS: usize = 3;
/// Delay before the second round over all servers: a restarting server refuses connections for a short time.
const PAUSE: Duration = Duration::from_millis(100);

/// Whether a call may be executed twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Idempotence {
    /// The second execution changes nothing.
    Idempotent,
    /// The second execution would have another result.
    Never,
}

/// Servers, and the index of the current one.
pub(super) struct Endpoints {
    servers: Vec<Endpoint>,
    connector: EtcdConnector,
    user: UserState,
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
    /// Creates the channels. Connects at the first call. Must be called inside a tokio runtime.
    pub(super) fn new(servers: Vec<Endpoint>, connector: EtcdConnector, user: Option<EtcdUser>) -> Endpoints {
        assert!(!servers.is_empty(), "an address has at least one server");
        let servers: Vec<Endpoint> = servers.into_iter().map(|server| server.connect_timeout(CALL)).collect();
        let connect = |server: &Endpoint| server.connect_with_connector_lazy(connector.clone());
        let channels = servers.iter().map(connect).collect();
        let state = Mutex::new(State { current: 0, channels });
        Endpoints { servers, connector, user: UserState::new(user), state }
    }

    /// Makes a unary call.
    pub(super) async fn unary<Req, Resp>(
        &self,
        deadline: Instant,
        idempotence: Idempotence,
        path: &'static str,
        message: &Req,
    ) -> Result<Resp, Status>
    where
        Req: Message + Clone + 'static,
        Resp: Message + Default + 'static,
    {
        self.call(deadline, idempotence, |mut grpc, share, token| async move {
            grpc.ready().await.map_err(unready)?;
            let path = PathAndQuery::from_static(path);
            let request = request(message.clone(), Some(share), token);
            Ok(grpc.unary(request, path, ProstCodec::<Req, Resp>::default()).await?.into_inner())
        })
        .await
    }

    /// Sends one message to a stream and returns the first response.
    pub(super) async fn first<Req, Resp>(
        &self,
        deadline: Instant,
        path: &'static str,
        message: &Req,
    ) -> Result<Resp, Status>
    where
        Req: Message + Clone + 'static,
        Resp: Message + Default + 'static,
    {
        self.call(deadline, Idempotence::Idempotent, |mut grpc, share, token| async move {
            grpc.ready().await.map_err(unready)?;
            let path = PathAndQuery::from_static(path);
            let message = message.clone();
            let request = request(stream::once(async move { message }), Some(share), token);
            let response = grpc.streaming(request, path, ProstCodec::<Req, Resp>::default()).await?;
            response.into_inner().message().await?.ok_or_else(|| Status::unavailable("stream ended"))
        })
        .await
    }

    /// Opens a stream and sends one message to it. Uses the current server, without retries.
    pub(super) async fn stream<Req, Resp>(
        &self,
        path: &'static str,
        message: Req,
    ) -> Result<Streaming<Resp>, Status>
    where
        Req: Message + 'static,
        Resp: Message + Default + 'static,
    {
        let (_, channel) = self.current();
        let token = self.token(&channel, CALL).await?;
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.map_err(unready)?;
        // The server ends the stream when the client's half ends, so it is kept open.
        let messages = stream::once(async move { message }).chain(stream::pending());
        let path = PathAndQuery::from_static(path);
        Ok(grpc
            .streaming(request(messages, None, token), path, ProstCodec::<Req, Resp>::default())
            .await?
            .into_inner())
    }

    async fn call<Resp, F>(
        &self,
        deadline: Instant,
        idempotence: Idempotence,
        attempt: impl Fn(Grpc<Channel>, Duration, UserToken) -> F,
    ) -> Result<Resp, Status>
    where
        F: Future<Output = Result<Resp, Status>>,
    {
        let count = self.servers.len();
        let mut last = Status::deadline_exceeded("deadline passed before the call");
        for number in 1..=2 * count {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let share = left.min(CALL / count.min(ATTEMPTS) as u32);
            let (index, channel) = self.current();
            let attempt = async {
                let token = self.token(&channel, share).await?;
                let response = attempt(Grpc::new(channel.clone()), share, token.clone()).await;
                match response {
                    Err(status) if self.user.is_refused(&status) => {
                        self.user.forget(&token);
                        let token = self.token(&channel, share).await?;
                        attempt(Grpc::new(channel), share, token).await
                    }
                    response => response,
                }
            };
            last = match timeout(share, attempt).await {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(status)) if is_final(&status) => return Err(status),
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded(format!("no response within {} ms", share.as_millis())),
            };
            self.replace(index);
            if idempotence == Idempotence::Never && !was_not_sent(&last) {
                break;
            }
            if number == count {
                sleep(PAUSE.min(deadline.saturating_duration_since(Instant::now()))).await;
            }
        }
        Err(last)
    }

    /// Returns the token of the user; gets one from the server at `channel` if there is none.
    async fn token(&self, channel: &Channel, share: Duration) -> Result<UserToken, Status> {
        if let Some(token) = self.user.token() {
            return Ok(token);
        }
        let _authenticating = self.user.authenticating.lock().await;
        let (Some(user), None) = (&self.user.user, self.user.token()) else {
            return Ok(self.user.token().unwrap_or(UserToken::NotNeeded));
        };
        let mut grpc = Grpc::new(channel.clone());
        grpc.ready().await.map_err(unready)?;
        let request = request(user.request()?, Some(share), UserToken::NotNeeded);
        let path = PathAndQuery::from_static(call::AUTHENTICATE);
        let token = match grpc.unary(request, path, ProstCodec::<_, AuthenticateResponse>::default()).await {
            Ok(response) => {
                let token = response.into_inner().token.parse::<MetadataValue<_>>();
                let mut token = token.map_err(|_| Status::internal("the token has invalid characters"))?;
                token.set_sensitive(true); // not in logs
                UserToken::Token(token)
            }
            Err(status) if is_not_enabled(&status) => UserToken::NotNeeded,
            Err(status) => return Err(user.refused(status)),
        };
        self.user.set(token.clone());
        Ok(token)
    }

    fn current(&self) -> (usize, Channel) {
        let state = self.state.lock();
        (state.current, state.channels[state.current].clone())
    }

    /// Switches to the next server and replaces the connection of server `index`, which did not respond.
    fn replace(&self, index: usize) {
        let mut state = self.state.lock();
        state.channels[index] = self.servers[index].connect_with_connector_lazy(self.connector.clone());
        if state.current == index {
            state.current = (index + 1) % self.servers.len();
        }
    }
}

fn request<T>(message: T, share: Option<Duration>, token: UserToken) -> Request<T> {
    let mut request = Request::new(message);
    if let UserToken::Token(token) = token {
        request.metadata_mut().insert("token", token);
    }
    // A server without a leader must return an error instead of stale data.
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    if let Some(share) = share {
        // Lets the server drop abandoned calls. Slightly longer than the own timeout, which ends the call here.
        request.set_timeout(share + PAUSE);
    }
    request
}

fn unready(error: tonic::transport::Error) -> Status {
    Status::from_error(Box::new(error))
}

/// Returns whether etcd processed and rejected the call: another server would do the same.
fn is_final(status: &Status) -> bool {
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

/// Returns whether the call was certainly not sent, because the connection failed.
fn was_not_sent(status: &Status) -> bool {
    causes(status).any(|cause| cause.is::<ConnectError>())
}

/// Returns a human-readable reason: the root cause.
pub(super) fn reason(status: &Status) -> String {
    // The display form of a status without a cause has too many details; a status with a cause repeats it as its
    // message.
    Error::source(status).map_or_else(|| status.message().to_owned(), root_cause)
}

fn causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(Error::source(status), |&cause| cause.source())
}
