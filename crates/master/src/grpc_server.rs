//! gRPC server: all calls, and the sessions of nodes. It only forwards calls to the service.
//!
//! The codec counts elements before it decodes (`BoundedCodec`), so a message that reaches a handler is within its
//! limits. Errors of a call are in the context of its response. A gRPC status is used where there is no response: at
//! the end of the stream of a session. Its metadata then contains the error code as [`CODE_METADATA`].

mod request_guard;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use moontide_auth::{Call, Caller, ClientCertificates};
use moontide_proto::v1;
use moontide_proto::v1::master_nodes_server::{MasterNodes, MasterNodesServer};
use moontide_proto::v1::master_peers_server::{MasterPeers, MasterPeersServer};
use moontide_proto::v1::master_server::{Master, MasterServer};
use moontide_tasks::{ALPN_GRPC, BoundedListener, ConnectionInfo, Protocol, TlsServer};
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, NodeId, SessionId};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::{debug, info};

use self::request_guard::{BodyMemory, RequestGuard};
use crate::access::{self, Refused};
use crate::metrics::{Method, ServerCounters};
use crate::service::{Service, SessionStream};

/// Metadata key of the number of an [`ErrorCode`] in a status.
pub const CODE_METADATA: &str = "moontide-code";

/// Margin of the limit of the transport: for messages within it the own limit applies, with a better error.
const MESSAGE_MARGIN: usize = 64 << 10;

/// Longest message that the transport accepts.
const MESSAGE_BYTES_MAX: usize = REQUEST_BYTES_MAX + MESSAGE_MARGIN;

/// Time from the preface of a connection to its first call. Clients connect when they have a call to make.
const FIRST_CALL_MAX: Duration = Duration::from_secs(60);

/// Window of a stream: several report chunks of half a megabyte are in flight while one is applied.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;

/// Window of a connection: several streams, or calls in parallel with a report.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// HTTP/2 frame size: one frame contains a report chunk, thirty times fewer headers than with the default of 16 KiB.
const HTTP2_FRAME_BYTES: u32 = 1 << 20;

/// Interval and timeout of pings that detect dead peers.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of the first message of a session's stream, which identifies the session.
const FIRST_MESSAGE_MAX: Duration = Duration::from_secs(10);

/// Maximum number of messages that wait for the connection of a node. The others wait in the command queue.
const NODE_SEND_QUEUE_MAX: usize = 4;

/// Additional time for a response after the timeout of a Remove; see the frame server.
const REMOVE_SLACK: Duration = Duration::from_secs(1);

/// Configuration of the gRPC server.
pub(crate) struct GrpcServerConfig {
    pub(crate) connections_max: u32,
    pub(crate) inflight_per_connection_max: u32,
}

/// Serves until `stop` becomes true, and then until the calls in flight are done.
pub(crate) async fn serve(
    config: GrpcServerConfig,
    listener: TcpListener,
    service: Arc<Service>,
    counters: Arc<ServerCounters>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), tonic::transport::Error> {
    let protocol = Protocol::Http2 { first_call_max: FIRST_CALL_MAX };
    let connections_max = config.connections_max as usize;
    let tls = TlsServer::new(service.credentials().cloned(), ClientCertificates::Required, ALPN_GRPC);
    let listener =
        BoundedListener::new(listener, connections_max, protocol, Arc::clone(&counters)).with_tls(tls);
    let memory = Arc::<BodyMemory>::default();
    let handler = Arc::new(GrpcHandler { service, counters, stop: stop.clone() });
    let master = MasterServer::from_arc(Arc::clone(&handler))
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let nodes = MasterNodesServer::from_arc(Arc::clone(&handler))
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let peers = MasterPeersServer::from_arc(handler)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    Server::builder()
        .concurrency_limit_per_connection(config.inflight_per_connection_max as usize)
        .max_concurrent_streams(config.inflight_per_connection_max)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(HTTP2_FRAME_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(RequestGuard::new(master, &memory))
        .add_service(RequestGuard::new(nodes, &memory))
        .add_service(RequestGuard::new(peers, &memory))
        .serve_with_incoming_shutdown(listener.into_stream(), async move {
            // An error means that the sender was dropped, which also means shutdown.
            let _ = stop.wait_for(|&stop| stop).await;
        })
        .await
}

/// Forwards calls to the service.
struct GrpcHandler {
    service: Arc<Service>,
    counters: Arc<ServerCounters>,
    stop: watch::Receiver<bool>,
}

/// Implements calls that never wait.
macro_rules! immediate {
    ($($call:ident($request:ident) -> $response:ident as $right:ident, $counted:ident;)*) => {$(
        fn $call<'s, 'f>(
            &'s self,
            request: Request<v1::$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<v1::$response>, Status>> + Send + 'f>>
        where
            's: 'f,
            Self: 'f,
        {
            Box::pin(async move {
                self.counters.request(Method::$counted);
                check(&request, Call::$right, request.get_ref().context.as_ref())?;
                Ok(Response::new(self.service.$call(request.get_ref())))
            })
        }
    )*};
}

/// Implements calls that wait for the registry, within the timeout of the caller.
macro_rules! replicated {
    ($($call:ident($request:ident) -> $response:ident as $right:ident;)*) => {$(
        fn $call<'s, 'f>(
            &'s self,
            request: Request<v1::$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<v1::$response>, Status>> + Send + 'f>>
        where
            's: 'f,
            Self: 'f,
        {
            Box::pin(async move {
                self.counters.request(Method::Other);
                check(&request, Call::$right, request.get_ref().context.as_ref())?;
                Ok(Response::new(self.service.$call(request.get_ref()).await))
            })
        }
    )*};
}

// `immediate` writes the signatures that `async_trait` would generate, because `async_trait` cannot expand macros
// inside an impl.
impl Master for GrpcHandler {
    immediate! {
        exist(ExistRequest) -> ExistResponse as Exist, Exist;
        get_replica_list(GetReplicaListRequest) -> GetReplicaListResponse as GetReplicaList, GetReplicaList;
        put_start(PutStartRequest) -> PutStartResponse as PutStart, PutStart;
        put_end(PutEndRequest) -> OutcomesResponse as PutEnd, PutEnd;
        put_revoke(PutRevokeRequest) -> OutcomesResponse as PutRevoke, Other;
        touch(TouchRequest) -> OutcomesResponse as Touch, Other;
        set_pin(SetPinRequest) -> OutcomesResponse as SetPin, Other;
        prefetch(PrefetchRequest) -> OutcomesResponse as Prefetch, Other;
        remove_by_prefix(RemoveByPrefixRequest) -> StartJobResponse as RemoveByPrefix, Other;
        remove_by_regex(RemoveByRegexRequest) -> StartJobResponse as RemoveByRegex, Other;
        get_job(GetJobRequest) -> GetJobResponse as GetJob, Other;
        list_keys(ListKeysRequest) -> ListKeysResponse as ListKeys, Other;
        query_keys(QueryKeysRequest) -> QueryKeysResponse as QueryKeys, Other;
        get_group_map(GetGroupMapRequest) -> GetGroupMapResponse as GetGroupMap, Other;
        get_cluster_info(GetClusterInfoRequest) -> GetClusterInfoResponse as GetClusterInfo, Other;
        get_nodes(GetNodesRequest) -> GetNodesResponse as GetNodes, Other;
        evict(EvictRequest) -> EvictResponse as Evict, Other;
        get_tenants(GetTenantsRequest) -> GetTenantsResponse as GetTenants, Other;
        list_segments(ListSegmentsRequest) -> ListSegmentsResponse as ListSegments, Other;
        drain_segment(DrainSegmentRequest) -> StartJobResponse as DrainSegment, Other;
        drain_node(DrainNodeRequest) -> DrainNodeResponse as DrainNode, Other;
    }

    replicated! {
        remove_all(RemoveAllRequest) -> StartJobResponse as RemoveAll;
        set_tenant_quota(SetTenantQuotaRequest) -> SetTenantQuotaResponse as SetTenantQuota;
    }

    /// Ends early at shutdown, because it may wait for a long time.
    fn poll_invalidations<'s, 'f>(
        &'s self,
        request: Request<v1::PollInvalidationsRequest>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<v1::PollInvalidationsResponse>, Status>> + Send + 'f>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            self.counters.request(Method::Other);
            check(&request, Call::PollInvalidations, request.get_ref().context.as_ref())?;
            let mut stop = self.stop.clone();
            tokio::select! {
                response = self.service.poll_invalidations(request.get_ref()) => Ok(Response::new(response)),
                _ = stop.wait_for(|&stop| stop) => {
                    Err(status(ErrorCode::Unreachable, "master is shutting down"))
                }
            }
        })
    }

    fn remove<'s, 'f>(
        &'s self,
        request: Request<v1::RemoveRequest>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<v1::OutcomesResponse>, Status>> + Send + 'f>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            self.counters.request(Method::Remove);
            check(&request, Call::Remove, request.get_ref().context.as_ref())?;
            let request = request.get_ref();
            let timeout_ms = request.context.as_ref().map_or(0, |context| context.timeout_ms);
            let timeout = Duration::from_millis(timeout_ms.into()) + REMOVE_SLACK;
            match tokio::time::timeout(timeout, self.service.remove(request)).await {
                Ok(response) => Ok(Response::new(response)),
                Err(_) => Err(status(ErrorCode::DeadlineExceeded, "timeout of the call")),
            }
        })
    }
}

type ToNode = ReceiverStream<Result<v1::MasterMessage, Status>>;

/// Implements calls of nodes, which act for themselves only.
macro_rules! of_nodes {
    ($($call:ident($request:ident) -> $response:ident as $right:ident, $node:expr;)*) => {$(
        fn $call<'s, 'f>(
            &'s self,
            request: Request<v1::$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<v1::$response>, Status>> + Send + 'f>>
        where
            's: 'f,
            Self: 'f,
        {
            Box::pin(async move {
                self.counters.request(Method::Other);
                check(&request, Call::$right, request.get_ref().context.as_ref())?;
                let node: Option<NodeId> = $node(&self.service, request.get_ref());
                if let Some(node) = node {
                    access::check_node(&caller(&request), node).map_err(refused)?;
                }
                Ok(Response::new(self.service.$call(request.get_ref())))
            })
        }
    )*};
}

/// Returns the node of the session that a request names; an unknown session is refused later.
fn node_of_session(service: &Service, context: Option<&v1::RequestContext>) -> Option<NodeId> {
    service.session_node(SessionId(context?.session))
}

impl MasterNodes for GrpcHandler {
    of_nodes! {
        open_session(OpenSessionRequest) -> OpenSessionResponse
            as OpenSession, |_: &Service, m: &v1::OpenSessionRequest| Some(NodeId(m.node));
        mount_segments(MountSegmentsRequest) -> MountSegmentsResponse
            as MountSegments, |service: &Service, m: &v1::MountSegmentsRequest| node_of_session(service, m.context.as_ref());
        unmount_segments(UnmountSegmentsRequest) -> OutcomesResponse
            as UnmountSegments, |service: &Service, m: &v1::UnmountSegmentsRequest| node_of_session(service, m.context.as_ref());
    }

    type SessionStream = ToNode;

    /// Opens the stream immediately; its first message identifies the session.
    fn session<'s, 'f>(
        &'s self,
        request: Request<Streaming<v1::NodeMessage>>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<ToNode>, Status>> + Send + 'f>>
    where
        's: 'f,
        Self: 'f,
    {
        self.counters.request(Method::Other);
        if let Err(status) = check(&request, Call::Session, None) {
            return Box::pin(async move { Err(status) });
        }
        let (to_node, messages) = mpsc::channel(NODE_SEND_QUEUE_MAX);
        let (service, mut stop) = (Arc::clone(&self.service), self.stop.clone());
        let caller = caller(&request);
        tokio::spawn(async move {
            let end = tokio::select! {
                end = run_session(&service, &caller, request.into_inner(), &to_node) => end,
                _ = stop.wait_for(|&stop| stop) => Err(status(ErrorCode::Unreachable, "master is shutting down")),
            };
            if let Err(status) = end {
                // The receiver may be gone.
                let _ = tokio::time::timeout(FIRST_MESSAGE_MAX, to_node.send(Err(status))).await;
            }
        });
        Box::pin(async move { Ok(Response::new(ReceiverStream::new(messages))) })
    }
}

impl MasterPeers for GrpcHandler {
    immediate! {
        handoff_group(HandoffGroupRequest) -> OutcomesResponse as HandoffGroup, Other;
    }
}

/// Runs both directions of a session's stream until one of them ends.
async fn run_session(
    service: &Arc<Service>,
    caller: &Caller,
    mut from_node: Streaming<v1::NodeMessage>,
    to_node: &mpsc::Sender<Result<v1::MasterMessage, Status>>,
) -> Result<(), Status> {
    let first = match tokio::time::timeout(FIRST_MESSAGE_MAX, from_node.message()).await {
        Ok(Ok(Some(first))) => first,
        Ok(Ok(None)) => return Ok(()),
        Ok(Err(status)) => return Err(status),
        Err(_) => {
            return Err(status(ErrorCode::DeadlineExceeded, "no first message on the stream of a session"));
        }
    };
    let session = SessionId(first.session);
    if let Some(node) = service.session_node(session) {
        access::check_node(caller, node).map_err(refused)?;
    }
    let Some(stream) = service.attach(session) else {
        return Err(status(ErrorCode::StaleSession, "unknown session"));
    };
    info!(%session, "session stream opened");
    let end = tokio::select! {
        end = receive_all(&stream, first, &mut from_node) => end,
        end = send_all(&stream, to_node) => end,
    };
    info!(%session, end = ?end.as_ref().err().map(Status::message), "session stream closed");
    end
}

async fn receive_all(
    stream: &SessionStream,
    first: v1::NodeMessage,
    from_node: &mut Streaming<v1::NodeMessage>,
) -> Result<(), Status> {
    let mut next = Some(first);
    while let Some(message) = next {
        // Applied on the receiving thread: a report chunk takes milliseconds, and its bytes are in the cache of this
        // core.
        stream.receive(&message).map_err(|code| status(code, "message refused"))?;
        next = from_node.message().await?;
    }
    Ok(())
}

async fn send_all(
    stream: &SessionStream,
    to_node: &mpsc::Sender<Result<v1::MasterMessage, Status>>,
) -> Result<(), Status> {
    while let Some(message) = stream.next().await {
        if to_node.send(Ok(message)).await.is_err() {
            debug!("node closed its session stream");
            return Ok(());
        }
    }
    Err(status(ErrorCode::StaleSession, "session ended, or has a newer stream"))
}

/// Returns who makes a request. A request of unknown origin has no rights.
fn caller<T>(request: &Request<T>) -> Caller {
    let info = request.extensions().get::<ConnectionInfo>();
    info.map_or(Caller::Anonymous, |info| info.caller().clone())
}

/// Checks whether the caller may make a call.
fn check<T>(request: &Request<T>, call: Call, context: Option<&v1::RequestContext>) -> Result<(), Status> {
    let info = request.extensions().get::<ConnectionInfo>();
    let caller = info.map_or(&Caller::Anonymous, ConnectionInfo::caller);
    access::check(caller, call, context).map_err(refused)
}

fn refused(Refused { code, text }: Refused) -> Status {
    status(code, &text)
}

/// Creates a status with an error code.
fn status(code: ErrorCode, text: &str) -> Status {
    let grpc = match code {
        ErrorCode::InvalidArgument | ErrorCode::OutOfBounds => Code::InvalidArgument,
        ErrorCode::TooLarge
        | ErrorCode::NoSpace
        | ErrorCode::QuotaExceeded
        | ErrorCode::TooManyTenants
        | ErrorCode::Busy => Code::ResourceExhausted,
        ErrorCode::Unsupported => Code::Unimplemented,
        ErrorCode::Unauthenticated => Code::Unauthenticated,
        ErrorCode::PermissionDenied => Code::PermissionDenied,
        ErrorCode::NotFound | ErrorCode::Gone => Code::NotFound,
        ErrorCode::DeadlineExceeded => Code::DeadlineExceeded,
        ErrorCode::Unreachable | ErrorCode::ConnectionLost | ErrorCode::Retry => Code::Unavailable,
        ErrorCode::Corrupt => Code::DataLoss,
        ErrorCode::Internal => Code::Internal,
        _ => Code::FailedPrecondition,
    };
    let mut status = Status::new(grpc, format!("{code}: {text}; {}", code.hint()));
    status.metadata_mut().insert(CODE_METADATA, (code as u16).into());
    status
}

/// Returns the error code of a status, if it has one.
pub fn code_of(status: &Status) -> Option<ErrorCode> {
    let number = status.metadata().get(CODE_METADATA)?.to_str().ok()?;
    ErrorCode::try_from(number.parse::<u32>().ok()?).ok()
}

const _: () = assert!(REQUEST_BYTES_MAX <= CONNECTION_WINDOW_BYTES as usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_status_carries_error_code() {
        for &code in ErrorCode::ALL {
            let status = status(code, "text");
            assert_eq!(code_of(&status), Some(code));
            assert_ne!(status.code(), Code::Ok);
        }
        assert_eq!(code_of(&Status::internal("status of another program")), None);
    }
}
