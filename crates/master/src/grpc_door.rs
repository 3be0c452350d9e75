//! The gRPC door: every call, for any language, and the sessions of nodes. It only hands over: one line per call.
//!
//! The codec counts before it decodes (`BoundedCodec`), so a message that reaches a handler is within its bounds. What a
//! call has to say about itself stands in the answer's context; a gRPC status is used for what has no answer: a
//! session's stream that ends. Its metadata then carries the stable number as [`CODE_METADATA`].

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use moontide_proto::v1;
use moontide_proto::v1::master_nodes_server::{MasterNodes, MasterNodesServer};
use moontide_proto::v1::master_peers_server::{MasterPeers, MasterPeersServer};
use moontide_proto::v1::master_server::{Master, MasterServer};
use moontide_types::bounds::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, SessionId};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::{debug, info};

use crate::metrics::{Call, DoorCounters};
use crate::seats::SeatedListener;
use crate::service::{Service, SessionStream};

/// Under this name a status carries the stable number of an [`ErrorCode`].
pub const CODE_METADATA: &str = "moontide-code";

/// Our own bound comes first for messages within this margin, and says more than the transport's.
const MESSAGE_MARGIN: usize = 64 << 10;

/// A report chunk of half a megabyte is under way while the one before it is applied, and some more.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;

/// Several streams, or calls beside a report.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// One frame holds a report chunk: thirty times fewer headers than with HTTP/2's 16 KiB.
const HTTP2_FRAME_BYTES: u32 = 1 << 20;

/// A peer that does not answer pings is gone.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a stream may be open before it says whose it is.
const FIRST_MESSAGE_MAX: Duration = Duration::from_secs(10);

/// Messages to a node that its connection has not taken yet. The rest waits in the session's outbox.
const TO_NODE_MAX: usize = 4;

/// How long after a request's deadline its answer is still waited for; see the framed door.
const REMOVE_SLACK: Duration = Duration::from_secs(1);

/// What the door must know.
pub(crate) struct GrpcDoorConfig {
    pub(crate) connections_max: u32,
    pub(crate) inflight_per_connection_max: u32,
}

/// Serves until `stop` becomes true, and then until the calls under way are done.
pub(crate) async fn serve(
    config: GrpcDoorConfig,
    listener: TcpListener,
    service: Arc<Service>,
    counters: Arc<DoorCounters>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), tonic::transport::Error> {
    let listener =
        SeatedListener::new(listener, config.connections_max as usize, Arc::clone(&counters), None);
    let handler = Arc::new(Handler { service, counters, stop: stop.clone() });
    let bytes_max = REQUEST_BYTES_MAX + MESSAGE_MARGIN;
    let master = MasterServer::from_arc(Arc::clone(&handler))
        .max_decoding_message_size(bytes_max)
        .max_encoding_message_size(bytes_max);
    let nodes = MasterNodesServer::from_arc(Arc::clone(&handler))
        .max_decoding_message_size(bytes_max)
        .max_encoding_message_size(bytes_max);
    let peers = MasterPeersServer::from_arc(handler)
        .max_decoding_message_size(bytes_max)
        .max_encoding_message_size(bytes_max);
    Server::builder()
        .concurrency_limit_per_connection(config.inflight_per_connection_max as usize)
        .max_concurrent_streams(config.inflight_per_connection_max)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(HTTP2_FRAME_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(master)
        .add_service(nodes)
        .add_service(peers)
        .serve_with_incoming_shutdown(listener.into_stream(), async move {
            // An error means that the server is gone, which is the end as well.
            let _ = stop.wait_for(|&stop| stop).await;
        })
        .await
}

/// Hands calls over to the service.
struct Handler {
    service: Arc<Service>,
    counters: Arc<DoorCounters>,
    stop: watch::Receiver<bool>,
}

/// Calls that never wait.
macro_rules! at_once {
    ($($call:ident($request:ident) -> $response:ident as $counted:ident;)*) => {$(
        fn $call<'s, 'f>(
            &'s self,
            request: Request<v1::$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<v1::$response>, Status>> + Send + 'f>>
        where
            's: 'f,
            Self: 'f,
        {
            Box::pin(async move {
                self.counters.request(Call::$counted);
                Ok(Response::new(self.service.$call(request.get_ref())))
            })
        }
    )*};
}

/// Calls that wait for other masters, within the deadline of the caller.
macro_rules! when_agreed {
    ($($call:ident($request:ident) -> $response:ident;)*) => {$(
        fn $call<'s, 'f>(
            &'s self,
            request: Request<v1::$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<v1::$response>, Status>> + Send + 'f>>
        where
            's: 'f,
            Self: 'f,
        {
            Box::pin(async move {
                self.counters.request(Call::Other);
                Ok(Response::new(self.service.$call(request.get_ref()).await))
            })
        }
    )*};
}

// `async_trait` turns methods into what `at_once` writes by hand: a macro cannot stand inside of an impl that it rewrites.
impl Master for Handler {
    at_once! {
        exist(ExistRequest) -> ExistResponse as Exist;
        get_replica_list(GetReplicaListRequest) -> GetReplicaListResponse as GetReplicaList;
        put_start(PutStartRequest) -> PutStartResponse as PutStart;
        put_end(PutEndRequest) -> OutcomesResponse as PutEnd;
        put_revoke(PutRevokeRequest) -> OutcomesResponse as Other;
        touch(TouchRequest) -> OutcomesResponse as Other;
        set_pin(SetPinRequest) -> OutcomesResponse as Other;
        prefetch(PrefetchRequest) -> OutcomesResponse as Other;
        remove_by_prefix(RemoveByPrefixRequest) -> StartJobResponse as Other;
        remove_by_regex(RemoveByRegexRequest) -> StartJobResponse as Other;
        get_job(GetJobRequest) -> GetJobResponse as Other;
        list_keys(ListKeysRequest) -> ListKeysResponse as Other;
        query_keys(QueryKeysRequest) -> QueryKeysResponse as Other;
        get_group_map(GetGroupMapRequest) -> GetGroupMapResponse as Other;
        get_cluster_info(GetClusterInfoRequest) -> GetClusterInfoResponse as Other;
        get_nodes(GetNodesRequest) -> GetNodesResponse as Other;
        evict(EvictRequest) -> EvictResponse as Other;
        get_tenants(GetTenantsRequest) -> GetTenantsResponse as Other;
        list_segments(ListSegmentsRequest) -> ListSegmentsResponse as Other;
        drain_segment(DrainSegmentRequest) -> StartJobResponse as Other;
    }

    when_agreed! {
        remove_all(RemoveAllRequest) -> StartJobResponse;
        set_tenant_quota(SetTenantQuotaRequest) -> SetTenantQuotaResponse;
    }

    /// May wait for long: whoever wants this master to end does not.
    fn get_departures<'s, 'f>(
        &'s self,
        request: Request<v1::GetDeparturesRequest>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<v1::GetDeparturesResponse>, Status>> + Send + 'f>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            self.counters.request(Call::Other);
            let mut stop = self.stop.clone();
            tokio::select! {
                response = self.service.get_departures(request.get_ref()) => Ok(Response::new(response)),
                _ = stop.wait_for(|&stop| stop) => {
                    Err(status(ErrorCode::Unreachable, "this master is shutting down"))
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
            self.counters.request(Call::Remove);
            let request = request.get_ref();
            let deadline_ms = request.context.as_ref().map_or(0, |context| context.deadline_ms);
            let time = Duration::from_millis(deadline_ms.into()) + REMOVE_SLACK;
            match tokio::time::timeout(time, self.service.remove(request)).await {
                Ok(response) => Ok(Response::new(response)),
                Err(_) => Err(status(ErrorCode::DeadlineExceeded, "the deadline passed")),
            }
        })
    }
}

type ToNode = ReceiverStream<Result<v1::MasterMessage, Status>>;

impl MasterNodes for Handler {
    at_once! {
        open_session(OpenSessionRequest) -> OpenSessionResponse as Other;
        mount_segments(MountSegmentsRequest) -> MountSegmentsResponse as Other;
        unmount_segments(UnmountSegmentsRequest) -> OutcomesResponse as Other;
    }

    type SessionStream = ToNode;

    /// The stream is open at once; whether it belongs to a session turns out with its first message.
    fn session<'s, 'f>(
        &'s self,
        request: Request<Streaming<v1::NodeMessage>>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<ToNode>, Status>> + Send + 'f>>
    where
        's: 'f,
        Self: 'f,
    {
        self.counters.request(Call::Other);
        let (to_node, messages) = mpsc::channel(TO_NODE_MAX);
        let (service, mut stop) = (Arc::clone(&self.service), self.stop.clone());
        tokio::spawn(async move {
            let end = tokio::select! {
                end = run_session(&service, request.into_inner(), &to_node) => end,
                _ = stop.wait_for(|&stop| stop) => Err(status(ErrorCode::Unreachable, "this master is shutting down")),
            };
            if let Err(status) = end {
                // Nobody may be left to hear it.
                let _ = tokio::time::timeout(FIRST_MESSAGE_MAX, to_node.send(Err(status))).await;
            }
        });
        Box::pin(async move { Ok(Response::new(ReceiverStream::new(messages))) })
    }
}

impl MasterPeers for Handler {
    at_once! {
        bequeath(Bequest) -> OutcomesResponse as Other;
    }
}

/// Both directions of a session's stream, until one of them ends.
async fn run_session(
    service: &Arc<Service>,
    mut from_node: Streaming<v1::NodeMessage>,
    to_node: &mpsc::Sender<Result<v1::MasterMessage, Status>>,
) -> Result<(), Status> {
    let first = match tokio::time::timeout(FIRST_MESSAGE_MAX, from_node.message()).await {
        Ok(Ok(Some(first))) => first,
        Ok(Ok(None)) => return Ok(()),
        Ok(Err(status)) => return Err(status),
        Err(_) => {
            return Err(status(ErrorCode::DeadlineExceeded, "a session's stream begins with a message"));
        }
    };
    let session = SessionId(first.session);
    let Some(stream) = service.attach(session) else {
        return Err(status(ErrorCode::StaleSession, "there is no such session"));
    };
    info!(session = session.0, "session's stream begins");
    let end = tokio::select! {
        end = receive_all(&stream, first, &mut from_node) => end,
        end = send_all(&stream, to_node) => end,
    };
    info!(session = session.0, end = ?end.as_ref().err().map(Status::message), "session's stream ends");
    end
}

async fn receive_all(
    stream: &SessionStream,
    first: v1::NodeMessage,
    from_node: &mut Streaming<v1::NodeMessage>,
) -> Result<(), Status> {
    let mut next = Some(first);
    while let Some(message) = next {
        // Applied where it was read: a chunk of a report is milliseconds, and its bytes are in this core's cache.
        stream.receive(&message).map_err(|code| status(code, "the message was refused"))?;
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
            debug!("the node left its stream");
            return Ok(());
        }
    }
    Err(status(ErrorCode::StaleSession, "the session ended, or has a newer stream"))
}

/// A status that carries a stable code.
fn status(code: ErrorCode, text: &str) -> Status {
    let grpc = match code {
        ErrorCode::InvalidArgument | ErrorCode::OutOfBounds => Code::InvalidArgument,
        ErrorCode::TooLarge | ErrorCode::NoSpace | ErrorCode::QuotaExceeded | ErrorCode::Busy => {
            Code::ResourceExhausted
        }
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

/// The stable code of a status, if it carries one.
pub fn code_of(status: &Status) -> Option<ErrorCode> {
    let number = status.metadata().get(CODE_METADATA)?.to_str().ok()?;
    ErrorCode::try_from(number.parse::<u32>().ok()?).ok()
}

const _: () = assert!(REQUEST_BYTES_MAX <= CONNECTION_WINDOW_BYTES as usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_carries_the_code() {
        for &code in ErrorCode::ALL {
            let status = status(code, "text");
            assert_eq!(code_of(&status), Some(code));
            assert_ne!(status.code(), Code::Ok);
        }
        assert_eq!(code_of(&Status::internal("of another program")), None);
    }
}
